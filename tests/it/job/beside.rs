//! Positions kept beside the rows: sums without a version or a ledger, exact through kills, sleepers and a database that
//! goes back in time.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use semel::kafka::Isolation;
use semel::record::{Position, TopicPartition};
use semel::runtime::app;
use semel::runtime::reset::{Reset, To};
use semel::topology::plan::Plan;

use super::harness::{Job, Load, PATIENCE, wait_with_output};
use crate::support;

pub const TOPOLOGY: &str = r#"
name = "NAME"
session_timeout = "6s"
transaction_timeout = "4s"
[kafka]
[sources.payments]
type = "kafka"
topics = ["NAME.in"]
event_id = ".event_id"
[sinks.balances]
type = "postgres"
inputs = ["payments"]
url = "${DATABASE_URL}"
table = "THE_TABLE"
mode = "add"
key = ["account"]
progress = "postgres"
"#;

pub const PARTITIONS: i32 = 3;

/// A job with its table and the tables of positions.
fn job(prefix: &str) -> Option<Job> {
    let job = Job::new(support::broker(prefix)?, prefix, PARTITIONS);
    make_tables(&job);
    Some(job)
}

pub fn make_tables(job: &Job) {
    support::progress_tables(&job.database_url);
    job.sql(
        "CREATE TABLE THE_TABLE (account text PRIMARY KEY CHECK (account <> 'nobody'), amount bigint NOT NULL, events int \
         NOT NULL)",
    );
}

/// What is wrong with a record: its amount is no number, or the database refuses it.
fn poison(i: u64) -> Option<&'static str> {
    match i % 100 {
        37 => Some("column"),
        71 => Some("database"),
        _ => None,
    }
}

pub fn payment(i: u64) -> (String, String) {
    let key = format!("a{}", i % 5);
    let (account, amount) = match poison(i) {
        Some("column") => (&*key, "\"much\"".to_owned()),
        Some(_) => ("nobody", i.to_string()),
        None => (&*key, i.to_string()),
    };
    let value = format!(r#"{{"event_id":"p-{i}","account":"{account}","amount":{amount},"events":1}}"#);
    (key, value)
}

pub fn produce(job: &Job, records: std::ops::Range<u64>) {
    job.produce_keyed("in", PARTITIONS, records.map(payment));
}

/// Compares sums, positions in both places and dead letters with `count` records.
#[track_caller]
pub fn check(job: &Job, count: u64) {
    let expected: Vec<Vec<Option<String>>> = (0..5)
        .map(|account| {
            let good: Vec<u64> = (0..count).filter(|i| i % 5 == account && poison(*i).is_none()).collect();
            [format!("a{account}"), good.iter().sum::<u64>().to_string(), good.len().to_string()].map(Some).to_vec()
        })
        .collect();
    assert_eq!(job.sql("SELECT account, amount, events FROM THE_TABLE ORDER BY 1"), expected, "of {count} records");
    let group = format!("{}.balances", job.name);
    let in_group: Vec<i64> = job.positions(&group, "in").into_iter().map(|p| p.unwrap_or(0)).collect();
    assert_eq!(in_group, job.ends("in", Isolation::ReadCommitted));
    let offsets = format!("SELECT next_offset FROM semel.sink_offsets WHERE stage = '{group}' ORDER BY partition");
    let in_database: Vec<i64> =
        job.sql(&offsets).into_iter().map(|row| row[0].clone().unwrap().parse().unwrap()).collect();
    assert_eq!(in_database, in_group);
    let left = job.sql(&format!("SELECT count(*) FROM semel.dead_letters WHERE stage = '{group}'"));
    assert_eq!(left[0][0].as_deref(), Some("0"), "every letter was relayed");
}

/// How often each rejected event came to the dead letters, by what was wrong with it; relayed again it has the same id.
pub fn letters(job: &Job) -> BTreeMap<(String, String), usize> {
    let (mut letters, mut ids) = (BTreeMap::new(), BTreeMap::new());
    for letter in job.read("dead-letters") {
        let value: serde_json::Value = serde_json::from_str(letter.text()).unwrap();
        let event = value["event_id"].as_str().unwrap().to_owned();
        let id = letter.header("semel-event-id").unwrap().to_owned();
        assert_eq!(*ids.entry(event.clone()).or_insert_with(|| id.clone()), id);
        *letters.entry((event, letter.header("semel-error-reason").unwrap().to_owned())).or_default() += 1;
    }
    letters
}

pub fn expected_letters(count: u64) -> Vec<(String, String)> {
    let mut letters: Vec<_> =
        (0..count).filter_map(|i| poison(i).map(|reason| (format!("p-{i}"), reason.to_owned()))).collect();
    letters.sort();
    letters
}

#[test]
fn sums_with_positions_beside_them_are_exact_through_kills() {
    let Some(job) = job("beside") else { return };
    let file = job.file(TOPOLOGY);
    let group = format!("{}.balances", job.name);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 3_000, PARTITIONS, payment);
        for round in 0..5_u64 {
            let process = job.start(&file);
            let before = job.progress(&group, "in");
            support::eventually(PATIENCE, "the job makes progress", || job.progress(&group, "in") > before);
            support::pass(Duration::from_millis(31 * round));
            process.kill();
        }
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
    assert_eq!(letters(&job).into_keys().collect::<Vec<_>>(), expected_letters(count));
}

#[test]
fn a_clean_stop_relays_each_dead_letter_once() {
    let Some(job) = job("letters") else { return };
    let file = job.file(TOPOLOGY);
    for round in 0..3 {
        produce(&job, round * 500..(round + 1) * 500);
        job.drain(&file);
        check(&job, (round + 1) * 500);
        let letters = letters(&job);
        assert!(letters.values().all(|times| *times == 1), "{letters:?}");
        assert_eq!(letters.into_keys().collect::<Vec<_>>(), expected_letters((round + 1) * 500));
    }
}

/// Yesterday's data folder: table and positions go back together, Kafka does not.
#[test]
fn a_database_restored_to_an_earlier_state_reads_again_from_there() {
    let Some(job) = job("restored") else { return };
    let file = job.file(TOPOLOGY);
    let group = format!("{}.balances", job.name);
    produce(&job, 0..1000);
    job.drain(&file);
    job.sql(&format!(
        "CREATE TABLE THE_TABLE_rows AS SELECT * FROM THE_TABLE; \
         CREATE TABLE THE_TABLE_offsets AS SELECT * FROM semel.sink_offsets WHERE stage = '{group}'"
    ));
    produce(&job, 1000..1700);
    job.drain(&file);
    check(&job, 1700);
    job.sql(&format!(
        "BEGIN; TRUNCATE THE_TABLE; INSERT INTO THE_TABLE SELECT * FROM THE_TABLE_rows; \
         DELETE FROM semel.sink_offsets WHERE stage = '{group}'; \
         INSERT INTO semel.sink_offsets SELECT * FROM THE_TABLE_offsets; COMMIT"
    ));
    let report = job.drain(&file);
    assert_eq!(report["stages"][0]["in"].as_u64(), Some(700), "{report}");
    check(&job, 1700);
}

#[test]
fn a_worker_that_was_asleep_adds_nothing_of_what_another_took_over() {
    let Some(job) = job("asleep-beside") else { return };
    let file = job.file(TOPOLOGY);
    let group = format!("{}.balances", job.name);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, PARTITIONS, payment);
        let sleeper = job.start(&file);
        support::eventually(PATIENCE, "the first works", || job.progress(&group, "in") > 0);
        let other = job.start(&file);
        support::eventually(PATIENCE, "the other has partitions", || other.log().contains("assigned"));
        sleeper.signal(Signal::SIGSTOP);
        let before = job.positions(&group, "in");
        support::eventually(PATIENCE, "the other takes every partition over", || {
            job.positions(&group, "in").iter().zip(&before).all(|(now, then)| now > then)
        });
        sleeper.signal(Signal::SIGCONT);
        support::eventually(PATIENCE, "the sleeper has work again", || sleeper.log().matches("assigned").count() > 2);
        sleeper.stop();
        other.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
    assert_eq!(letters(&job).into_keys().collect::<Vec<_>>(), expected_letters(count));
}

/// A record of the retry topic moves the position of that topic, not of the one it once came from.
#[test]
fn a_replayed_dead_letter_adds_once_where_positions_lie_beside_the_rows() {
    let Some(job) = job("replayed") else { return };
    let file = job.file(TOPOLOGY);
    produce(&job, 0..100);
    job.drain(&file);
    check(&job, 100);
    job.sql("ALTER TABLE THE_TABLE DROP CONSTRAINT THE_TABLE_account_check");
    let args = ["dlq", "replay", file.to_str().unwrap(), "--json"];
    let output = wait_with_output(job.semel(&args).stdout(Stdio::piped()).spawn().unwrap());
    let outcome: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(outcome["replayed"].as_array().unwrap().len(), 2, "{outcome}");
    for _ in 0..2 {
        job.drain(&file);
        let nobody = "SELECT amount, events FROM THE_TABLE WHERE account = 'nobody'";
        assert_eq!(job.sql(nobody), [["71", "1"].map(|cell| Some(cell.to_owned())).to_vec()]);
        let again = BTreeMap::from([(("p-37".into(), "column".into()), 2), (("p-71".into(), "database".into()), 1)]);
        assert_eq!(letters(&job), again);
    }
    let retry = format!(
        "SELECT sum(next_offset) FROM semel.sink_offsets WHERE stage = '{0}.balances' AND topic = \
                         '{0}.balances.retry'",
        job.name
    );
    assert!(job.sql(&retry)[0][0].as_deref().is_some_and(|sum| sum >= "2"), "{:?}", job.sql(&retry));
}

#[test]
fn a_topic_made_anew_stops_the_stage_instead_of_skipping() {
    let Some(job) = job("anew") else { return };
    let file = job.file(TOPOLOGY);
    produce(&job, 0..30);
    job.drain(&file);
    job.sql(&format!(
        "UPDATE semel.sink_offsets SET topic_id = gen_random_uuid() WHERE stage = '{}.balances'",
        job.name
    ));
    let output = job.run_drain(&file);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(5), "{message}");
    assert!(message.contains("was deleted and made anew"), "{message}");
    produce(&job, 30..40);
    let before = reset(&job, &file, &["--to", "earliest", "--yes", "--json"]);
    assert!(before["positions"].as_array().unwrap().iter().all(|entry| entry["position"].is_null()), "{before}");
    job.sql("TRUNCATE THE_TABLE");
    job.drain(&file);
    check(&job, 40);
    // What is there is what the database says, and reset sets it there.
    let before = reset(&job, &file, &["--to", "latest", "--yes", "--json"]);
    let sum: i64 =
        before["positions"].as_array().unwrap().iter().map(|entry| entry["position"].as_i64().unwrap()).sum();
    assert_eq!(sum, job.ends("in", Isolation::ReadCommitted).iter().sum::<i64>());
    let rows = format!("SELECT count(*) FROM semel.sink_offsets WHERE stage = '{}.balances'", job.name);
    assert_eq!(job.sql(&rows), [[Some("0".to_owned())]]);
    job.drain(&file);
    check(&job, 40);
}

/// The table goes back to yesterday, its positions do not come with it.
#[test]
fn a_database_put_back_without_its_positions_is_refused() {
    let Some(job) = job("without") else { return };
    let file = job.file(TOPOLOGY);
    let group = format!("{}.balances", job.name);
    produce(&job, 0..100);
    job.drain(&file);
    job.sql(&format!("DELETE FROM semel.sink_offsets WHERE stage = '{group}' AND partition = 1; TRUNCATE THE_TABLE"));
    produce(&job, 100..200);
    let output = job.run_drain(&file);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(5), "{message}");
    let named = format!("semel.sink_offsets has no row of stage {group} for {}-1", job.topic("in"));
    assert!(message.contains(&named), "{message}");
    let count = job.sql(&format!("SELECT count(*) FROM semel.sink_offsets WHERE stage = '{group}' AND partition = 1"));
    assert_eq!(count[0][0].as_deref(), Some("0"), "nothing was skipped");
    // To start anew, the table is emptied.
    reset(&job, &file, &["--to", "earliest", "--yes"]);
    job.sql("TRUNCATE THE_TABLE");
    job.drain(&file);
    check(&job, 200);
}

/// The database goes back to a time of which the topic holds nothing any more.
#[test]
fn a_database_put_back_to_before_the_log_is_refused() {
    let Some(job) = job("before") else { return };
    let file = job.file(TOPOLOGY);
    produce(&job, 0..100);
    job.drain(&file);
    let partition = TopicPartition::new(job.topic("in"), 0);
    job.admin.delete_records(&[(partition, Position(5))]).unwrap();
    let back = format!("UPDATE semel.sink_offsets SET next_offset = 3 WHERE stage = '{}.balances'", job.name);
    job.sql(&format!("{back} AND partition = 0"));
    let output = job.run_drain(&file);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(5), "{message}");
    let named = format!("in semel.sink_offsets, stage {}.balances is 3, but the log holds offsets 5 to ", job.name);
    assert!(message.contains(&named), "{message}");
}

/// Offsets of a group expire when it rests; the database knows where to go on.
#[test]
fn a_stage_goes_on_from_the_database_when_the_group_has_forgotten_its_copy() {
    let Some(job) = job("rested") else { return };
    let file = job.file(TOPOLOGY);
    let group = format!("{}.balances", job.name);
    produce(&job, 0..100);
    job.drain(&file);
    forget(&job, &group);
    produce(&job, 100..200);
    let report = job.drain(&file);
    assert_eq!(report["stages"][0]["in"].as_u64(), Some(100), "{report}");
    check(&job, 200);
    // Neither knows it: that is not taken for a new stage.
    forget(&job, &group);
    job.sql(&format!("DELETE FROM semel.sink_offsets WHERE stage = '{group}'"));
    assert_eq!(job.run_drain(&file).status.code(), Some(5));
}

/// Whoever changes where positions are kept takes them along, or is refused: neither place goes on from the other's past.
#[test]
fn positions_that_were_kept_in_both_places_in_turn_are_not_mixed_up() {
    let Some(job) = job("in-turn") else { return };
    job.sql("CREATE TABLE THE_TABLE_seen (event_id uuid PRIMARY KEY, seen_at timestamptz NOT NULL DEFAULT now())");
    let in_kafka =
        TOPOLOGY.replace("progress = \"postgres\"", "dedupe = { table = \"THE_TABLE_seen\", retention = \"3d\" }");
    let refused = |file: &std::path::Path, code: i32, words: &str| {
        let output = job.run_drain(file);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{message}");
        assert!(message.contains(words), "{message}");
    };
    produce(&job, 0..100);
    job.drain(&job.file(TOPOLOGY));
    produce(&job, 100..200);
    refused(&job.file(&in_kafka), 2, "is a copy");

    // As the message says.
    let positions = job.path().with_file_name("positions.json");
    let shown = || {
        let file = job.file(TOPOLOGY);
        let args = ["reset", file.to_str().unwrap(), "--to", "latest", "--json"];
        let ran = job.semel(&args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_with_output(ran).stdout
    };
    support::eventually(PATIENCE, "nobody is in the group", || !shown().is_empty());
    std::fs::write(&positions, shown()).unwrap();
    reset(&job, &job.file(&in_kafka), &["--to", positions.to_str().unwrap(), "--yes", "--json"]);
    job.drain(&job.file(&in_kafka));
    produce(&job, 200..300);
    refused(&job.file(TOPOLOGY), 5, "in semel.sink_offsets: the rows of one of them");
    reset(&job, &job.file(&in_kafka), &["--to", "latest", "--yes", "--json"]);
    refused(&job.file(TOPOLOGY), 5, "in semel.sink_offsets: the rows of one of them");

    // The database forgets what it kept, and takes over where Kafka stands.
    let behind = std::fs::read_to_string(&positions).unwrap();
    reset(&job, &job.file(TOPOLOGY), &["--to", "latest", "--yes", "--json"]);
    assert!(behind.contains("\"position\""), "{behind}");
    job.drain(&job.file(TOPOLOGY));
    produce(&job, 300..400);
    job.drain(&job.file(TOPOLOGY));
    let events = job.sql("SELECT sum(events) FROM THE_TABLE");
    let good = (0..400).filter(|i| poison(*i).is_none() && !(200..300).contains(i)).count();
    assert_eq!(events[0][0], Some(good.to_string()), "all but those that were passed over on purpose, once");
}

/// A reset that is refused late leaves what the running job goes by.
#[test]
fn a_reset_beside_a_job_that_was_started_meanwhile_changes_nothing() {
    let Some(job) = job("meanwhile") else { return };
    let file = job.file(TOPOLOGY);
    produce(&job, 0..50);
    job.drain(&file);
    let mut ask = None;
    support::eventually(PATIENCE, "the reset can be carried out", || {
        let text = std::fs::read_to_string(&file).unwrap();
        let variable =
            |name: &str| Some(if name == "KAFKA_BROKERS" { &job.brokers } else { &job.database_url }.clone());
        let topology = semel::topology::load(&text, "job.toml", &variable).topology.unwrap();
        let plan = Plan::new(Arc::new(topology));
        let stages: Vec<_> = plan.stages.iter().collect();
        let (connection, admin) = app::connect(&plan.topology).unwrap();
        let admin = Arc::new(admin);
        let Ok(reset) = Reset::look(&plan, &stages, &To::Latest, &connection, &admin) else { return false };
        let process = job.start(&file);
        produce(&job, 50..60);
        let group = format!("{}.balances", job.name);
        support::eventually(PATIENCE, "the job works", || job.progress(&group, "in") == 60);
        ask = Some(reset.carry_out(&connection, &admin).map_err(|failure| failure.message));
        produce(&job, 60..80);
        support::eventually(PATIENCE, "the job goes on", || job.progress(&group, "in") == 80);
        process.stop();
        true
    });
    let message = ask.unwrap().unwrap_err();
    assert!(message.contains("somebody is in the group"), "{message}");
    check(&job, 80);
}

/// Runs `semel reset` once nobody is in the group; answers what it prints.
pub fn reset(job: &Job, file: &std::path::Path, args: &[&str]) -> serde_json::Value {
    let args: Vec<&str> = ["reset", file.to_str().unwrap()].into_iter().chain(args.iter().copied()).collect();
    let mut printed = None;
    support::eventually(PATIENCE, "nobody is in the group", || {
        let ran = job.semel(&args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let ran = wait_with_output(ran);
        let busy = String::from_utf8_lossy(&ran.stderr).contains("somebody is in the group");
        assert!(busy || ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        printed = Some(serde_json::from_slice(&ran.stdout).unwrap_or_default());
        !busy
    });
    printed.unwrap()
}

/// As the broker does when offsets.retention.minutes are over.
pub(super) fn forget(job: &Job, group: &str) {
    support::eventually(PATIENCE, "the group is deleted", || {
        use rdkafka::admin::{AdminClient, AdminOptions};
        let mut config = rdkafka::ClientConfig::new();
        let admin: AdminClient<_> = config.set("bootstrap.servers", &job.brokers).create().unwrap();
        // The static member is in it until its session times out.
        let deleted = futures::executor::block_on(admin.delete_groups(&[group], &AdminOptions::new())).unwrap();
        deleted.iter().all(Result::is_ok)
    });
}
