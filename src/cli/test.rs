//! `semel test`.

use std::fmt::Write;
use std::io::IsTerminal;
use std::path::PathBuf;

use serde_json::json;

use super::{file, output};
use crate::error::{Exit, Failure};
use crate::testing::{Difference, TestReport, run_tests};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Topology files.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
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
}

/// A file and how its tests went.
struct Tested {
    name: String,
    reports: Vec<TestReport>,
}

/// Runs the command: exit 1 on a failed test and where a file has errors, 2 where one cannot be read. The other files'
/// tests run all the same.
pub fn run(args: Args) -> Result<Exit, Failure> {
    let mut tested = Vec::new();
    let mut failure: Option<Failure> = None;
    for path in &args.files {
        match file::checked(path, Exit::Findings) {
            Ok(topology) => tested.push(Tested { name: topology.file.clone(), reports: run_tests(&topology) }),
            Err(new) => {
                let old = failure.take();
                let (worse, other) = match old {
                    Some(old) if old.exit > new.exit => (old, Some(new)),
                    old => (new, old),
                };
                other.iter().for_each(|other| eprintln!("semel: {}", other.message));
                failure = Some(worse);
            }
        }
    }
    if args.json || args.format == Format::Json {
        output::write(&format!("{:#}\n", as_json(&tested)));
    } else {
        output::write(&as_text(&tested, std::io::stdout().is_terminal()));
    }
    match failure {
        Some(failure) => Err(failure),
        None if tested.iter().flat_map(|file| &file.reports).all(TestReport::passed) => Ok(Exit::Done),
        None => Ok(Exit::Findings),
    }
}

/// `[{file, name, line, passed, stopped, differences: [{sink, at, expected, actual}]}]`.
fn as_json(tested: &[Tested]) -> serde_json::Value {
    let reports = tested.iter().flat_map(|file| {
        file.reports.iter().map(|report| {
            json!({
                "file": file.name,
                "name": report.name,
                "line": report.line,
                "passed": report.passed(),
                "stopped": report.stopped,
                "differences": report.differences,
            })
        })
    });
    reports.collect()
}

fn as_text(tested: &[Tested], colour: bool) -> String {
    let paint = |code: &str, text: &str| if colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() };
    let (good, bad) = (paint("32", "ok"), paint("1;31", "FAILED"));
    let mut out = String::new();
    for Tested { name, reports } in tested {
        let _ = writeln!(out, "{name}{}", if reports.is_empty() { ": no tests" } else { "" });
        for report in reports {
            let verdict = if report.passed() { &good } else { &bad };
            let _ = writeln!(out, "  {verdict}  {}", report.name);
            if report.passed() {
                continue;
            }
            let _ = writeln!(out, "      at {name}:{}", report.line);
            if let Some(stopped) = &report.stopped {
                let _ = writeln!(out, "      the job stopped: {stopped}");
            }
            for difference in &report.differences {
                write_difference(&mut out, difference, &paint);
            }
        }
    }
    let all: Vec<_> = tested.iter().flat_map(|file| &file.reports).collect();
    let failed = all.iter().filter(|report| !report.passed()).count();
    let _ = writeln!(out, "\n{} passed, {failed} failed", all.len() - failed);
    out
}

/// Expected above actual, with a mark under the first character that differs.
fn write_difference(out: &mut String, difference: &Difference, paint: &dyn Fn(&str, &str) -> String) {
    let Difference { sink, at, expected, actual } = difference;
    let _ = writeln!(out, "      {}: {at}", paint("1", sink));
    let _ = writeln!(out, "        expected  {}", expected.as_deref().unwrap_or("(nothing)"));
    let _ = writeln!(out, "        actual    {}", actual.as_deref().unwrap_or("(nothing)"));
    if let (Some(expected), Some(actual)) = (expected, actual) {
        let same = expected.chars().zip(actual.chars()).take_while(|(e, a)| e == a).count();
        let _ = writeln!(out, "                  {}{}", " ".repeat(same), paint("31", "^"));
    }
}
