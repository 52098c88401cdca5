//! Sums in a table: what has no version to guard it, and must be right all the same.

use std::process::Stdio;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use semel::cluster::Cluster;
use semel::kafka::Isolation;

use super::harness::{Job, Load, PATIENCE, wait_with_output};
use crate::support;

const TOPOLOGY: &str = r#"
name = "NAME"
[kafka]
[sources.payments]
type = "kafka"
topics = ["NAME.in"]
event_id = ".event_id"
event_time = ".at"
[sinks.balances]
type = "postgres"
inputs = ["payments"]
url = "${DATABASE_URL}"
table = "THE_TABLE"
mode = "add"
key = ["account"]
"#;

const TABLE: &str = "CREATE TABLE THE_TABLE (account text PRIMARY KEY, amount bigint NOT NULL, events int NOT NULL)";

const PARTITIONS: i32 = 3;

/// The `i`-th record: every third event is sent twice.
pub fn payment(i: u64) -> (String, String) {
    let event = if i % 3 == 2 { i - 1 } else { i };
    // The same for both sends of an event, also when a day ends between them.
    static STARTED: OnceLock<u64> = OnceLock::new();
    let at = STARTED.get_or_init(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64) + event;
    let account = event % 5;
    let value = format!(r#"{{"event_id":"p-{event}","at":{at},"account":"a{account}","amount":{event},"events":1}}"#);
    (format!("a{account}"), value)
}

/// The balances that the events of `count` records make: account, amount, events.
pub fn balances(count: u64) -> Vec<Vec<Option<String>>> {
    let of = |account: u64| {
        let events: Vec<u64> = (0..count).filter(|i| i % 3 != 2 && i % 5 == account).collect();
        [format!("a{account}"), events.iter().sum::<u64>().to_string(), events.len().to_string()]
    };
    (0..5).map(|account| of(account).into_iter().map(Some).collect()).collect()
}

const LEDGER: &str = "CREATE TABLE THE_TABLE_seen (event_id uuid PRIMARY KEY) PARTITION BY RANGE (event_id)";

const DEDUPE: &str = "dedupe = { table = \"THE_TABLE_seen\", retention = \"3d\" }\n";

/// The text of a file with the ledger.
pub fn text() -> String {
    format!("{TOPOLOGY}{DEDUPE}")
}

/// A job with its table and its ledger.
pub fn job(cluster: &Cluster, prefix: &str) -> Job {
    let job = Job::new(cluster, prefix, PARTITIONS);
    make_tables(&job);
    job
}

pub fn make_tables(job: &Job) {
    job.sql(TABLE);
    job.sql(LEDGER);
}

pub fn sums(job: &Job) -> Vec<Vec<Option<String>>> {
    job.sql("SELECT account, amount, events FROM THE_TABLE ORDER BY 1")
}

/// Compares sums, ledger and positions with `count` records.
#[track_caller]
pub fn check(job: &Job, count: u64) {
    assert_eq!(sums(job), balances(count));
    let seen = job.sql("SELECT count(*) FROM THE_TABLE_seen");
    assert_eq!(seen[0][0], Some((0..count).filter(|i| i % 3 != 2).count().to_string()));
    let at: Vec<i64> =
        job.positions(&format!("{}.balances", job.name), "in").into_iter().map(|p| p.unwrap_or(0)).collect();
    assert_eq!(at, job.ends("in", Isolation::ReadCommitted));
}

/// Kills a job in the middle of its work, time and again, and compares with what it has read; answers how many records.
fn is_exact_through_kills(job: &Job, file: &std::path::Path) -> u64 {
    let group = format!("{}.balances", job.name);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, job, 3_000, PARTITIONS, payment);
        for round in 0..4_u64 {
            let process = job.start(file);
            let before = job.progress(&group, "in");
            support::eventually(PATIENCE, "the job makes progress", || job.progress(&group, "in") > before);
            support::pass(Duration::from_millis(29 * round));
            process.kill();
        }
        load.stop()
    });
    // Its events are counted with the first of each.
    let report = job.drain(file);
    assert!(report["stages"][0]["duplicates"].as_u64().unwrap() > 0, "{report}");
    check(job, count);
    count
}

#[test]
fn sums_of_a_ledger_are_exact_through_kills_and_second_sends() {
    let Some(cluster) = support::broker("kill -9 of a job with a ledger") else { return };
    let job = job(cluster, "ledger");
    let count = is_exact_through_kills(&job, &job.file(&text()));
    // From the beginning again: nothing changes, and every record is a duplicate.
    let again = job.file(&text().replace("name = \"NAME\"", "name = \"NAME-again\""));
    let report = job.drain(&again);
    assert_eq!(report["stages"][0]["duplicates"].as_u64(), Some(count), "{report}");
    assert_eq!(sums(&job), balances(count));

    // Whoever goes back is told how far the ledger remembers.
    let args = ["reset", again.to_str().unwrap(), "--to", "earliest"];
    // The last run is a member for as long as its session.
    support::eventually(PATIENCE, "the reset warns", || {
        let command = job.semel(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let message = String::from_utf8_lossy(&wait_with_output(command).stderr).into_owned();
        assert!(message.contains("somebody") || message.contains("nothing was changed"), "{message}");
        message.contains("warning: the ledger") && message.contains("forgets an event after 3d")
    });
}

/// The ledger for what a producer sends twice, the positions for what a crash redelivers.
#[test]
fn a_ledger_and_positions_beside_the_rows_go_together() {
    let Some(cluster) = support::broker("kill -9 of a job with a ledger and positions beside it") else { return };
    let job = job(cluster, "ledger-beside");
    support::progress_tables(&job.database_url);
    let count = is_exact_through_kills(&job, &job.file(&format!("{}progress = \"postgres\"\n", text())));
    let offsets =
        format!("SELECT next_offset FROM semel.sink_offsets WHERE stage = '{}.balances' ORDER BY partition", job.name);
    let at: i64 = job.sql(&offsets).iter().map(|row| row[0].as_deref().unwrap().parse::<i64>().unwrap()).sum();
    assert_eq!(at, count as i64);
}

#[test]
fn check_online_compares_the_ledgers_memory_with_the_topics() {
    let Some(cluster) = support::broker("check --online of a ledger") else { return };
    let job = Job::new(cluster, "memory", 1);
    make_tables(&job);
    let warnings = |retention: &str| {
        let file =
            job.file(&format!("{TOPOLOGY}dedupe = {{ table = \"THE_TABLE_seen\", retention = \"{retention}\" }}\n"));
        let args = ["check", file.to_str().unwrap(), "--online", "--json"];
        let output = wait_with_output(job.semel(&args).stdout(Stdio::piped()).spawn().unwrap());
        let findings: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
        let warnings = findings.into_iter().filter(|f| f["severity"] == "warning" || f["severity"] == "error");
        warnings.map(|f| format!("{}: {}", f["code"], f["message"])).collect::<Vec<_>>()
    };
    let short = warnings("14d");
    assert_eq!(short.len(), 1, "{short:?}");
    assert!(short[0].starts_with("\"ledger-retention\": "), "{short:?}");
    assert!(short[0].contains("retention.ms = 604800000") && short[0].contains("a retention of 21d"), "{short:?}");
    assert_eq!(warnings("21d"), [""; 0]);
}
