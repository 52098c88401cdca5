//! `semel reset`.

use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{file, output, time};
use crate::error::{Exit, Failure};
use crate::runtime::reset::{Change, Reset, To};
use crate::runtime::{app, preflight};
use crate::topology::plan::Plan;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The topology file.
    file: PathBuf,
    /// earliest, latest, a time (RFC 3339, or a duration such as 2h for as long ago), or a JSON file of positions.
    #[arg(long, value_name = "POSITION")]
    to: String,
    /// One stage only: the topology's name for the Kafka stage, or a Postgres sink's.
    #[arg(long, value_name = "STAGE")]
    only: Option<String>,
    /// Do it without asking.
    #[arg(long)]
    yes: bool,
    /// Print the positions as they were, for --to to put them back.
    #[arg(long)]
    json: bool,
}

/// Runs the command: exit 2 where nobody says yes.
pub fn run(args: Args) -> Result<Exit, Failure> {
    let to = to(&args.to)?;
    let plan = Plan::new(Arc::new(file::checked(&args.file, Exit::Refused)?));
    let stages = app::chosen(&plan, args.only.as_deref())?;
    let (connection, admin) = app::connect(&plan.topology)?;
    let admin = Arc::new(admin);
    let reset = Reset::look(&plan, &stages, &to, &connection, &admin)?;
    if args.json {
        eprint!("{}", table(&reset.changes));
        let before = serde_json::to_string_pretty(&reset.before()).expect("positions are plain data");
        output::write(&format!("{before}\n"));
    } else {
        output::write(&table(&reset.changes));
    }
    if reset.changes.iter().any(|change| change.from.is_some_and(|from| change.to < from)) {
        for stage in &stages {
            output::warn(preflight::ledger_problems(&plan, stage, &admin)?);
        }
    }
    if reset.changes.is_empty() {
        eprintln!("nothing to set");
        return Ok(Exit::Done);
    }
    for changelog in &reset.changelogs {
        eprintln!("{changelog} goes, with the state in it: that tells of records which come again, or never");
    }
    if !args.yes && !agreed(reset.changes.len()) {
        return Err(Failure::refused("nothing was changed: say --yes to set these positions"));
    }
    reset.carry_out(&connection, &admin)?;
    eprintln!("{} positions set; the next run goes on from there", reset.changes.len());
    Ok(Exit::Done)
}

fn to(text: &str) -> Result<To, Failure> {
    match text {
        "earliest" => return Ok(To::Earliest),
        "latest" => return Ok(To::Latest),
        _ => {}
    }
    if let Ok(ms) = time::ago_or_at(text) {
        return Ok(To::Timestamp(ms));
    }
    let refused = |why: String| Failure::refused(format!("--to {text}: {why}"));
    if !Path::new(text).exists() {
        return Err(refused("neither earliest nor latest, nor a time, nor a file".to_owned()));
    }
    let json = std::fs::read_to_string(text).map_err(|error| refused(error.to_string()))?;
    serde_json::from_str(&json)
        .map(To::Positions)
        .map_err(|error| refused(format!("no positions as `semel reset --json` prints them: {error}")))
}

fn table(changes: &[Change]) -> String {
    let mut rows = vec![["STAGE", "PARTITION", "FROM", "TO", ""].map(str::to_owned)];
    for change in changes {
        let distance = match change.from.map(|from| change.to.0 - from.0) {
            None => "no position before".to_owned(),
            Some(0) => "stays".to_owned(),
            Some(distance) if distance < 0 => format!("{} again", -distance),
            Some(distance) => format!("{distance} skipped"),
        };
        rows.push([
            change.stage.clone(),
            change.partition.to_string(),
            change.from.map_or("-".to_owned(), |position| position.to_string()),
            change.to.to_string(),
            distance,
        ]);
    }
    output::columns(&rows)
}

/// Asks on a terminal; anywhere else nobody can say yes.
fn agreed(count: usize) -> bool {
    if !std::io::stdin().is_terminal() {
        return false;
    }
    eprint!("set {count} positions? [y/N] ");
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    read.is_ok() && ["y", "yes"].contains(&answer.trim().to_lowercase().as_str())
}
