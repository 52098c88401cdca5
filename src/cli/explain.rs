//! `semel explain`.

use std::path::PathBuf;
use std::sync::Arc;

use super::file;
use crate::error::{Exit, Failure};
use crate::topology::describe;
use crate::topology::plan::Plan;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The topology file.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Short for --format json.
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Text,
    Json,
    /// For Graphviz: pipe it to `dot -Tsvg`.
    Dot,
    Mermaid,
}

/// Runs the command: exit 1 where the file has errors.
pub fn run(args: Args) -> Result<Exit, Failure> {
    let plan = Plan::new(Arc::new(file::checked(&args.file, Exit::Findings)?));
    let format = if args.json { Format::Json } else { args.format };
    super::output::write(&match format {
        Format::Text => describe::text(&plan),
        Format::Json => format!("{:#}\n", describe::json(&plan)),
        Format::Dot => describe::dot(&plan),
        Format::Mermaid => describe::mermaid(&plan),
    });
    Ok(Exit::Done)
}
