//! `semel test`.

use crate::error::{Exit, Failure};

#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args) -> Result<Exit, Failure> {
    Err(Failure::refused("test: not built yet"))
}
