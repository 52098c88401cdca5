//! `semel run`.

use std::path::PathBuf;
use std::sync::Arc;

use super::file;
use crate::crash;
use crate::error::{Exit, Failure};
use crate::observe::progress::grouped;
use crate::observe::usage;
use crate::runtime::app::{self, Report, RunOptions};
use crate::runtime::shutdown;
use crate::topology::plan::Plan;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The topology file.
    file: PathBuf,
    /// Stop once everything that is in the sources now is through every stage.
    #[arg(long)]
    drain: bool,
    /// Run one stage only: the topology's name for the Kafka stage, or a Postgres sink's.
    #[arg(long, value_name = "STAGE")]
    only: Option<String>,
    /// No progress on stderr.
    #[arg(long, short)]
    quiet: bool,
    /// Print what was done as one JSON object on stdout.
    #[arg(long)]
    json: bool,
}

/// Runs the job until it is drained or told to stop.
pub fn run(args: Args) -> Result<Exit, Failure> {
    crash::arm()?;
    let topology = file::checked(&args.file, Exit::Refused)?;
    let plan = Plan::new(Arc::new(topology));
    let stop = shutdown::on_signals()?;
    let options = RunOptions { drain: args.drain, only: args.only, stop, progress: !args.quiet };
    let report = app::run(&plan, &options)?;
    if args.json {
        println!("{}", json(&report))
    } else {
        eprint!("{}", text(&report))
    }
    Ok(Exit::Done)
}

fn text(report: &Report) -> String {
    let seconds = report.elapsed.as_secs_f64();
    let mut text = String::new();
    for stage in &report.stages {
        text.push_str(&format!(
            "{}: {} records in, {} out, {} rejected, {} without output, {} transactions in {seconds:.1} s\n",
            stage.name,
            grouped(stage.records_in.get()),
            grouped(stage.records_out.get()),
            grouped(stage.rejected.get()),
            grouped(stage.dropped.get()),
            grouped(stage.commits.get()),
        ));
        if stage.duplicates.get() > 0 {
            text.push_str(&format!("  duplicates that the ledger knew: {}\n", grouped(stage.duplicates.get())));
        }
        for ((node, reason), count) in stage.rejects() {
            text.push_str(&format!("  rejected by {node}, {reason}: {}\n", grouped(count)));
        }
        if stage.lost.get() > 0 {
            let lost = grouped(stage.lost.get());
            text.push_str(&format!("  {lost} outputs lost (at-most-once)\n"));
        }
    }
    text
}

fn json(report: &Report) -> serde_json::Value {
    let stages = report.stages.iter().map(|stage| {
        let rejects = stage.rejects();
        let (steady, steady_cpu, steady_records) = stage.steady();
        let rejects = rejects
            .iter()
            .map(|((node, reason), count)| serde_json::json!({ "node": node, "reason": reason, "count": count }));
        serde_json::json!({
            "stage": stage.name,
            "in": stage.records_in.get(),
            "out": stage.records_out.get(),
            "applied": stage.applied.get(),
            "rejected": stage.rejected.get(),
            "rejects": rejects.collect::<Vec<_>>(),
            "dropped": stage.dropped.get(),
            "skipped": stage.skipped.get(),
            "lost": stage.lost.get(),
            "transactions": stage.commits.get(),
            "first_record_seconds": stage.first_record().map(|time| time.as_secs_f64()),
            "busy_seconds": stage.busy().as_secs_f64(),
            "busy_cpu_seconds": stage.busy_cpu().as_secs_f64(),
            "steady": {
                "records": steady_records,
                "seconds": steady.as_secs_f64(),
                "cpu_seconds": steady_cpu.as_secs_f64(),
            },
            "commit_ms": stage.commit_us.get() as f64 / 1000.0 / stage.commits.get().max(1) as f64,
            "aborts": stage.aborts.get(),
            "rows": stage.rows.get(),
            "stale": stage.stale.get(),
            "late": stage.late.get(),
            "windows": { "closed": stage.windows.get(), "rejected": stage.windows_rejected.get() },
            "ties": stage.ties.get(),
            "duplicates": stage.duplicates.get(),
        })
    });
    serde_json::json!({
        "seconds": report.elapsed.as_secs_f64(),
        "cpu_seconds": usage::cpu().as_secs_f64(),
        "peak_memory_bytes": usage::peak_memory(),
        "stages": stages.collect::<Vec<_>>(),
    })
}
