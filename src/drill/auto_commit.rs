//! A consumer as the articles warn of: `enable.auto.commit=true`, so that the client commits what it has handed out,
//! whatever became of it. Processes of their own, killed like the rest.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use nix::sys::signal::{Signal, raise};

use crate::error::Failure;
use crate::kafka::{Admin, Connection, Consumer, ConsumerOptions, Polled};
use crate::record::{Position, TopicPartition};
use crate::scratch::Run;

const PATIENCE: Duration = Duration::from_secs(60);
/// The client's interval where it commits before the effect; elsewhere it never comes.
const SOON: Duration = Duration::from_millis(50);
const NEVER: Duration = Duration::from_secs(3600);

/// Where the consumer is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Crash {
    /// A record was handed out, its position is committed, its effect is not there yet.
    BeforeEffect,
    /// The effect is there, the interval is not over.
    BeforeCommit,
}

/// What the consumer's process is told on its command line.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[arg(long)]
    brokers: String,
    #[arg(long)]
    group: String,
    #[arg(long)]
    topic: String,
    /// Records until the crash, that one included.
    #[arg(long)]
    records: usize,
    /// Default: not at all, until the topic's end.
    #[arg(long)]
    crash: Option<Crash>,
    /// A file to which the key of each record is appended: the effect.
    #[arg(long)]
    effects: std::path::PathBuf,
}

/// The consumer's process: one partition, one record after the other.
pub fn consume(args: &Args) -> Result<(), Failure> {
    let failed = |e: crate::kafka::Error| Failure::unreachable(e.to_string());
    let connection = Connection::new(&args.brokers, "semel-drill-auto-commit");
    let admin = Admin::new(&connection, Duration::from_secs(10)).map_err(failed)?;
    let partition = TopicPartition::new(args.topic.as_str(), 0);
    let committed = |stable| {
        let positions = admin.committed(&args.group, std::slice::from_ref(&partition), stable).map_err(failed)?;
        Ok::<_, Failure>(positions.into_iter().find_map(|(_, at)| at.ok().flatten()))
    };
    let interval = if args.crash == Some(Crash::BeforeEffect) { SOON } else { NEVER };
    let options =
        ConsumerOptions { auto_commit: Some(interval), end_of_partition: true, ..ConsumerOptions::new(&args.group) };
    let mut consumer = Consumer::new(&connection, &options).map_err(failed)?;
    consumer.assign(&[(partition.clone(), committed(true)?.unwrap_or(Position(0)))]).map_err(failed)?;
    let mut seen = 0;
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let (key, next) = match consumer.poll(Duration::from_millis(50)) {
            Polled::Record(message) => (message.key().unwrap_or_default().to_vec(), message.offset().next()),
            Polled::EndOfPartition(..) => return Ok(()),
            Polled::Failed(error) => return Err(failed(error)),
            Polled::Nothing | Polled::Assign(_) | Polled::Revoke { .. } => continue,
        };
        seen += 1;
        let last = seen == args.records;
        if last && args.crash == Some(Crash::BeforeEffect) {
            // The record is being worked on; the client's timer does not know.
            while committed(false)?.is_none_or(|at| at < next) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = raise(Signal::SIGKILL);
        }
        effect(&args.effects, &key)?;
        if last && args.crash == Some(Crash::BeforeCommit) {
            let _ = raise(Signal::SIGKILL);
        }
    }
    Err(Failure::unreachable("the broker delivers nothing"))
}

fn effect(path: &Path, key: &[u8]) -> Result<(), Failure> {
    let mut line = key.to_vec();
    line.push(b'\n');
    let written = std::fs::OpenOptions::new().create(true).append(true).open(path).and_then(|mut f| f.write_all(&line));
    written.map_err(|e| Failure::refused(format!("cannot write {}: {e}", path.display())))
}

/// Runs the consumer until it is killed at the record `middle` (from 0), then once more to the end; the keys of the
/// effects in their order.
pub fn crash_and_restart(
    run: &Run,
    connection: &Connection,
    topic: &str,
    middle: usize,
    crash: Crash,
    interrupted: &AtomicBool,
) -> Result<Vec<String>, Failure> {
    let failed = |e: std::io::Error| Failure::refused(format!("cannot start a consumer: {e}"));
    let effects = run.dir.join("effects");
    for crash in [Some(crash), None] {
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(["auto-commit", "--brokers", &connection.brokers, "--group", &format!("{}.auto", run.name)]);
        command.args(["--topic", topic, "--records", &(middle + 1).to_string()]);
        command.arg("--effects").arg(&effects);
        if let Some(word) = crash.and_then(|crash| crash.to_possible_value()) {
            command.args(["--crash", word.get_name()]);
        }
        let output = command.stdin(Stdio::null()).output().map_err(failed)?;
        let ended_well = output.status.success() || crash.is_some();
        if !ended_well || interrupted.load(Ordering::Relaxed) {
            let log = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(Failure::unreachable(format!("the consumer did not come to its end: {log}")));
        }
    }
    let text = std::fs::read_to_string(&effects).unwrap_or_default();
    Ok(text.lines().map(str::to_owned).collect())
}
