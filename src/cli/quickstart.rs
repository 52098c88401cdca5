//! `semel quickstart`.

use clap::value_parser;

use super::output;
use crate::error::{Exit, Failure};
use crate::quickstart::{self, Options};
use crate::runtime::shutdown;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Leave broker and database up, and say how to reach and how to stop them.
    #[arg(long)]
    keep: bool,
    /// How many records to produce.
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = value_parser!(u32).range(100..=5_000_000))]
    records: u32,
    /// Of the records that are made: the same seed makes the same.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<Exit, Failure> {
    let interrupted = shutdown::on_signals()?;
    let options = Options { records: args.records as usize, seed: args.seed, keep: args.keep };
    let Some(report) = quickstart::run(&options, &interrupted, &|text| eprintln!("{text}"))? else {
        eprintln!("stopped before the end: nothing was compared");
        return Ok(Exit::Done);
    };
    output::write(&if args.json { format!("{}\n", report.json()) } else { report.text(&super::program()) });
    Ok(if report.is_right() { Exit::Done } else { Exit::Broken })
}
