//! `semel dlq`: dead letters, listed, shown and replayed.

mod show;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Subcommand;
use serde_json::json;

use super::{file, output};
use crate::dlq::{self, Address, DeadLetters, Filter, Letter, Options, Outcome};
use crate::error::{Exit, Failure};
use crate::kafka::{Admin, Connection};
use crate::runtime::{app, preflight};
use crate::topology::plan::Plan;

/// Dead letters that `list` shows without `--limit`.
const LIST_LIMIT: usize = 100;
/// Characters of a key in the table.
const KEY_WIDTH: usize = 32;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List dead letters, partition by partition in the order in which they were rejected.
    List(ListArgs),
    /// Show all of one dead letter.
    Show(ShowArgs),
    /// Send dead letters back to the stage that rejected them, each once.
    Replay(ReplayArgs),
}

#[derive(Debug, clap::Args)]
struct ListArgs {
    /// The topology file.
    file: PathBuf,
    #[command(flatten)]
    filter: FilterArgs,
    /// At most so many, from the first on (default: 100).
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Print a JSON array.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct ShowArgs {
    /// The topology file.
    file: PathBuf,
    /// Which one, as `semel dlq list` names it.
    #[arg(value_name = "PARTITION:OFFSET")]
    address: Address,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct ReplayArgs {
    /// The topology file.
    file: PathBuf,
    /// Which ones, as `semel dlq list` names them; none: all that match.
    #[arg(value_name = "PARTITION:OFFSET")]
    addresses: Vec<Address>,
    #[command(flatten)]
    filter: FilterArgs,
    /// At most so many, from the first on.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Leave out records that were rejected more often than this.
    #[arg(long, value_name = "N", default_value_t = 5)]
    max_attempts: u32,
    /// Also those that were replayed before.
    #[arg(long)]
    again: bool,
    /// Only say what would be replayed.
    #[arg(long)]
    dry_run: bool,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct FilterArgs {
    /// Rejected by this node.
    #[arg(long)]
    node: Option<String>,
    /// Rejected for this reason, such as undecodable.
    #[arg(long)]
    reason: Option<String>,
    /// Read from this topic.
    #[arg(long, value_name = "TOPIC")]
    source: Option<String>,
    /// Of this time or later: the record's own timestamp, as RFC 3339, or as long ago as a duration such as 2h.
    #[arg(long, value_name = "TIME", value_parser = super::time::ago_or_at)]
    since: Option<i64>,
}

impl FilterArgs {
    fn filter(self, addresses: impl IntoIterator<Item = Address>) -> Filter {
        let addresses: BTreeSet<Address> = addresses.into_iter().collect();
        Filter { addresses, node: self.node, reason: self.reason, source: self.source, since: self.since }
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<Exit, Failure> {
    match args.command {
        Command::List(args) => list(args),
        Command::Show(args) => show(args),
        Command::Replay(args) => replay(args),
    }
}

fn connected(path: &std::path::Path) -> Result<(Plan, Connection, Admin), Failure> {
    let plan = Plan::new(Arc::new(file::checked(path, Exit::Refused)?));
    let (connection, admin) = app::connect(&plan.topology)?;
    Ok((plan, connection, admin))
}

fn list(args: ListArgs) -> Result<Exit, Failure> {
    let (plan, connection, admin) = connected(&args.file)?;
    let mut dead_letters = DeadLetters::open(&plan.dead_letters(), &connection, &admin)?;
    let limit = args.limit.unwrap_or(LIST_LIMIT);
    let mut letters: Vec<Letter> = Vec::new();
    let mut more = false;
    dead_letters.each(&args.filter.filter([]), |input| {
        if letters.len() >= limit {
            more = true;
            return Ok(ControlFlow::Break(()));
        }
        // The table shows no values, which may be large.
        letters.push(Letter { value: None, ..Letter::new(input) });
        Ok(ControlFlow::Continue(()))
    })?;
    output::write(&if args.json {
        let all: Vec<_> = letters.iter().map(show::summary).collect();
        format!("{:#}\n", json!(all))
    } else {
        table(&letters)
    });
    if more {
        eprintln!("there are more than {limit}: --limit shows more of them, --node, --reason, --source, --since fewer");
    } else if letters.is_empty() && !args.json {
        eprintln!("no dead letters that match in {}", dead_letters.topic);
    }
    Ok(Exit::Done)
}

fn table(letters: &[Letter]) -> String {
    let head = ["PARTITION:OFFSET", "TIME", "NODE", "REASON", "SOURCE", "KEY", "ATTEMPT"].map(str::to_owned);
    if letters.is_empty() {
        return String::new();
    }
    let mut rows = vec![head];
    rows.extend(letters.iter().map(|letter| {
        let (topic, partition, offset) = letter.source();
        let mut key = show::bytes(letter.key.as_deref());
        if key.chars().count() > KEY_WIDTH {
            key = key.chars().take(KEY_WIDTH - 1).chain(['…']).collect();
        }
        [
            letter.address.to_string(),
            show::time(letter.timestamp),
            letter.node().to_owned(),
            letter.reason().to_owned(),
            format!("{topic}/{partition}/{offset}"),
            key,
            letter.attempt().to_string(),
        ]
    }));
    output::columns(&rows)
}

fn show(args: ShowArgs) -> Result<Exit, Failure> {
    let (plan, connection, admin) = connected(&args.file)?;
    let mut dead_letters = DeadLetters::open(&plan.dead_letters(), &connection, &admin)?;
    let filter = Filter { addresses: BTreeSet::from([args.address]), ..Filter::default() };
    let mut found = None;
    dead_letters.each(&filter, |input| {
        found = Some(Letter::new(input));
        Ok(ControlFlow::Break(()))
    })?;
    let letter = found.expect("an address without a letter is refused");
    output::write(&if args.json { format!("{:#}\n", show::json(&letter)) } else { show::text(&letter, &plan) });
    Ok(Exit::Done)
}

fn replay(args: ReplayArgs) -> Result<Exit, Failure> {
    let (plan, connection, admin) = connected(&args.file)?;
    let options = Options {
        filter: args.filter.filter(args.addresses),
        limit: args.limit,
        max_attempts: args.max_attempts,
        again: args.again,
        dry_run: args.dry_run,
    };
    for stage in &plan.stages {
        output::warn(preflight::ledger_problems(&plan, stage, &admin)?);
    }
    let outcome = dlq::replay(&plan, &connection, &admin, &options)?;
    output::write(&if args.json {
        let replayed = outcome.replayed.iter().map(|r| json!({ "address": r.address.to_string(), "topic": r.topic }));
        let left = outcome.left_out.iter().map(|l| json!({ "address": l.address.to_string(), "why": l.why }));
        let (replayed, left): (Vec<_>, Vec<_>) = (replayed.collect(), left.collect());
        format!("{:#}\n", json!({ "dry_run": args.dry_run, "replayed": replayed, "left_out": left }))
    } else {
        summary(&outcome, args.dry_run)
    });
    Ok(Exit::Done)
}

fn summary(outcome: &Outcome, dry_run: bool) -> String {
    let mut text = String::new();
    let verb = if dry_run { "would replay" } else { "replayed" };
    let mut topics: BTreeMap<&str, usize> = BTreeMap::new();
    outcome.replayed.iter().for_each(|replayed| *topics.entry(&replayed.topic).or_default() += 1);
    for (topic, count) in &topics {
        let _ = writeln!(text, "{verb} {count} to {topic}");
    }
    if topics.is_empty() {
        let _ = writeln!(text, "{verb} nothing");
    }
    let mut reasons: BTreeMap<&str, Vec<Address>> = BTreeMap::new();
    outcome.left_out.iter().for_each(|left| reasons.entry(&left.why).or_default().push(left.address));
    for (why, addresses) in &reasons {
        let shown: Vec<String> = addresses.iter().take(5).map(Address::to_string).collect();
        let more = if addresses.len() > 5 { ", …" } else { "" };
        let _ = writeln!(text, "left out {} ({}{more}): {why}", addresses.len(), shown.join(", "));
    }
    text
}
