//! `semel drill`.

use std::path::PathBuf;

use super::{file, output};
use crate::drill::{self, Options, Origin};
use crate::error::{Exit, Failure};
use crate::runtime::shutdown;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The topology file.
    file: PathBuf,
    /// Records to drill with, as JSON lines: {"key": "k", "value": {…}, "headers": [["name", "text"]], "timestamp": ms}.
    /// `text` or `base64` instead of `value`; a null value is a tombstone. Default: the inputs of the file's [[tests]],
    /// multiplied.
    #[arg(long, value_name = "FILE", conflicts_with = "sample")]
    input: Option<PathBuf>,
    /// Take the first N records of the source topics.
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Kill N times at random moments, after the named places.
    #[arg(long, value_name = "N")]
    random: Option<usize>,
    /// Of everything that is left to chance: the same seed crashes at the same places.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fewer places and records, for continuous integration.
    #[arg(long)]
    quick: bool,
    /// Use the servers that KAFKA_BROKERS and DATABASE_URL name; topics and schemas of the drill's own are made there
    /// and taken away again.
    #[arg(long)]
    external: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Also write the report as a page of its own.
    #[arg(long, value_name = "PATH")]
    html: Option<PathBuf>,
}

/// Runs the command: exit 4 when a guarantee was broken.
pub fn run(args: Args) -> Result<Exit, Failure> {
    let topology = file::checked(&args.file, Exit::Refused)?;
    let text = file::open(&args.file)?.text;
    let interrupted = shutdown::on_signals()?;
    let origin = args.input.map(Origin::File).or(args.sample.map(Origin::Sample));
    let options = Options {
        origin,
        random: args.random.unwrap_or(if args.quick { 1 } else { 5 }),
        seed: args.seed,
        quick: args.quick,
        external: args.external,
    };
    let say = |text: &str| eprintln!("{text}");
    let (text, json, html, right) = if topology.drill.is_empty() {
        let report = drill::run(&text, topology, &options, &interrupted, &say)?;
        (report.text(), report.json(), report.html(), report.is_right())
    } else {
        let report = drill::compare_guarantees(&text, topology, &options, &interrupted, &say)?;
        (report.text(), report.json(), report.html(), report.is_right())
    };
    if let Some(path) = &args.html {
        output::save(path, &html)?;
    }
    output::write(&if args.json { format!("{json}\n") } else { text });
    Ok(if right { Exit::Done } else { Exit::Broken })
}
