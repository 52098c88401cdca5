//! `semel bench`.

use std::path::PathBuf;
use std::time::Duration;

use super::{file, output};
use crate::bench::{self, Options};
use crate::error::{Exit, Failure};
use crate::runtime::shutdown;
use crate::scratch::input::Origin;
use crate::topology::spec::Guarantee;
use crate::topology::units;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The topology file.
    file: PathBuf,
    /// Records to measure with, as JSON lines (see `semel drill --help`). Default: the inputs of the file's [[tests]] that
    /// no stage rejects. They are sent again and again, with other ids and keys.
    #[arg(long, value_name = "FILE", conflicts_with = "sample")]
    input: Option<PathBuf>,
    /// Take the first N records of the source topics.
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// The stage to measure: the topology's name for the Kafka stage, or a Postgres sink's. Default: the Kafka stage.
    #[arg(long, value_name = "STAGE")]
    only: Option<String>,
    /// Records a run. Default: 1000000, with --quick 500000.
    #[arg(long, value_name = "N")]
    records: Option<usize>,
    /// How often each is measured. Default: 5, with --quick 3.
    #[arg(long, value_name = "N")]
    rounds: Option<u32>,
    /// Guarantees, which take turns. Default: all, with --quick the first two.
    #[arg(long, value_delimiter = ',', value_parser = guarantee)]
    guarantees: Vec<Guarantee>,
    /// Commit intervals. Default: 5ms,10ms,20ms,50ms,100ms,500ms,1s, with --quick 10ms,100ms.
    #[arg(long, value_delimiter = ',', value_parser = units::duration)]
    intervals: Vec<Duration>,
    /// Sizes to which records are filled up, besides their own. Default: 100B,1KiB,10KiB, with --quick 1KiB.
    #[arg(long, value_delimiter = ',', value_parser = units::size)]
    sizes: Vec<u64>,
    /// Numbers of workers. Default: 1,2, with --quick 1.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: Vec<u32>,
    /// Records a second at which the way of a record is timed; 0 leaves that out. Default: 500,5000, with --quick 5000.
    #[arg(long, value_delimiter = ',')]
    rates: Vec<u64>,
    /// Less of everything: under three minutes.
    #[arg(long)]
    quick: bool,
    /// Use the servers that KAFKA_BROKERS and DATABASE_URL name; topics and schemas of the benchmark's own are made there
    /// and taken away again.
    #[arg(long)]
    external: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Also write every run as CSV.
    #[arg(long, value_name = "PATH")]
    csv: Option<PathBuf>,
    /// Also write the report as a page of its own, with plots.
    #[arg(long, value_name = "PATH")]
    html: Option<PathBuf>,
}

const ALL: [Guarantee; 3] = [Guarantee::ExactlyOnce, Guarantee::AtLeastOnce, Guarantee::AtMostOnce];

fn guarantee(text: &str) -> Result<Guarantee, String> {
    let found = ALL.into_iter().find(|guarantee| guarantee.as_str() == text);
    found.ok_or_else(|| format!("one of {}", ALL.map(Guarantee::as_str).join(", ")))
}

/// What was asked for, else the default.
fn or<T: Clone>(given: Vec<T>, quick: bool, short: &[T], long: &[T]) -> Vec<T> {
    match (given.is_empty(), quick) {
        (false, _) => given,
        (true, true) => short.to_vec(),
        (true, false) => long.to_vec(),
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<Exit, Failure> {
    let topology = file::checked(&args.file, Exit::Refused)?;
    let text = file::open(&args.file)?.text;
    let interrupted = shutdown::on_signals()?;
    let quick = args.quick;
    let ms = |list: &[u64]| list.iter().map(|ms| Duration::from_millis(*ms)).collect::<Vec<_>>();
    let intervals = or(args.intervals, quick, &ms(&[10, 100]), &ms(&[5, 10, 20, 50, 100, 500, 1000]));
    let sizes = or(args.sizes, quick, &[1024], &[100, 1024, 10 * 1024]);
    let mut rates = or(args.rates, quick, &[5_000], &[500, 5_000]);
    rates.retain(|rate| *rate > 0);
    let options = Options {
        origin: args.input.map(Origin::File).or(args.sample.map(Origin::Sample)),
        only: args.only,
        records: args.records.unwrap_or(if quick { 500_000 } else { 1_000_000 }).max(1),
        rounds: args.rounds.unwrap_or(if quick { 3 } else { 5 }).max(1),
        guarantees: or(args.guarantees, quick, &ALL[..2], &ALL),
        intervals,
        sizes: sizes.into_iter().map(|size| size as usize).collect(),
        workers: or(args.workers, quick, &[1], &[1, 2]),
        rates,
        latency_for: Duration::from_secs(if quick { 5 } else { 10 }),
        external: args.external,
    };
    let report = bench::run(&text, topology, &options, &interrupted, &|text| eprintln!("{text}"))?;
    // A path that cannot be written must not cost the figures.
    output::write(&if args.json { format!("{}\n", report.json()) } else { report.text() });
    args.csv.map_or(Ok(()), |path| output::save(&path, &report.csv()))?;
    args.html.map_or(Ok(()), |path| output::save(&path, &report.html()?))?;
    Ok(Exit::Done)
}
