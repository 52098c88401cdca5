//! `semel audit`.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

use clap::value_parser;
use serde_json::json;

use super::{file, output, time};
use crate::audit::{self, Kind, Options, Report, Told};
use crate::error::{Exit, Failure};
use crate::observe::progress::grouped;
use crate::runtime::app;
use crate::topology::plan::Plan;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The topology file, with audit = true.
    file: PathBuf,
    /// From records of this time on: RFC 3339, or a duration such as 2h for as long ago.
    #[arg(long, value_name = "TIME", value_parser = time::ago_or_at)]
    from: Option<i64>,
    /// Up to records of this time.
    #[arg(long, value_name = "TIME", value_parser = time::ago_or_at)]
    to: Option<i64>,
    /// At most so many offsets of each partition, from the first on.
    #[arg(long, value_name = "N", value_parser = value_parser!(i64).range(1..))]
    limit: Option<i64>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command: exit 4 where something is wrong that the guarantee excludes, 2 where there was nothing to audit.
pub fn run(args: Args) -> Result<Exit, Failure> {
    let plan = Plan::new(Arc::new(file::checked(&args.file, Exit::Refused)?));
    let (connection, admin) = app::connect(&plan.topology)?;
    let options = Options { from: args.from, to: args.to, limit: args.limit };
    let report = audit::audit(&plan, &connection, &admin, &options)?;
    output::write(&if args.json { format!("{:#}\n", json(&report)) } else { text(&report) });
    if report.is_empty() {
        let message = "no record was audited, so that nothing is known of the job: see what is not audited, and choose \
                       records by --from and --to that are behind the committed positions";
        return Err(Failure::refused(message));
    }
    Ok(if report.is_broken() { Exit::Broken } else { Exit::Done })
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    let mut line = |count: u64, what: &str| {
        let _ = writeln!(text, "{:>11}  {what}", grouped(count));
    };
    line(report.records, "records audited");
    line(report.outputs, "outputs of them that are right");
    line(report.dead_letters, "of them are dead letters");
    line(report.without_output, "of them have no output and should have none");
    for kind in [Kind::Lost, Kind::Doubled, Kind::Different] {
        line(report.count(kind), kind.as_str());
    }
    for told in &report.told {
        let _ = writeln!(text, "  {}", sentence(told));
    }
    let all: u64 = report.wrong.values().sum();
    if all > report.told.len() as u64 {
        let _ = writeln!(text, "  … and {} more", grouped(all - report.told.len() as u64));
    }
    text.push_str("\naudited\n");
    for range in &report.ranges {
        let _ = writeln!(text, "  {}: offsets from {} to {}, not included", range.partition, range.from, range.to);
    }
    text.push_str("\nnot audited\n");
    for note in &report.not_audited {
        let _ = writeln!(text, "  {note}");
    }
    text
}

fn sentence(told: &Told) -> String {
    let (topic, partition, offset) = &told.origin;
    let record = format!("{topic}-{partition} offset {offset}");
    let place = match (&told.topic, told.partition, told.offset) {
        (Some(topic), Some(partition), Some(offset)) => format!("{topic}-{partition} offset {offset}"),
        (Some(topic), Some(partition), None) => format!("its output in {topic}-{partition}"),
        _ => match told.kind {
            Kind::Lost => return format!("lost: {record}: neither an output nor a dead letter"),
            Kind::Doubled | Kind::Different => return format!("{}: {record}: its dead letter", told.kind.as_str()),
        },
    };
    format!("{}: {record}: {place}", told.kind.as_str())
}

fn json(report: &Report) -> serde_json::Value {
    let told = report.told.iter().map(|told| {
        let (topic, partition, offset) = &told.origin;
        json!({
            "kind": told.kind.as_str(),
            "origin": { "topic": topic, "partition": partition, "offset": offset },
            "topic": told.topic,
            "partition": told.partition,
            "offset": told.offset,
        })
    });
    let ranges = report.ranges.iter().map(|range| {
        let partition = &range.partition;
        json!({
            "topic": *partition.topic,
            "partition": partition.partition,
            "from": range.from.0,
            "to": range.to.0,
        })
    });
    let (told, ranges): (Vec<_>, Vec<_>) = (told.collect(), ranges.collect());
    json!({
        "records": report.records,
        "outputs": report.outputs,
        "dead_letters": report.dead_letters,
        "without_output": report.without_output,
        "lost": report.count(Kind::Lost),
        "doubled": report.count(Kind::Doubled),
        "different": report.count(Kind::Different),
        "wrong": told,
        "ranges": ranges,
        "not_audited": report.not_audited,
        "broken": report.is_broken(),
    })
}
