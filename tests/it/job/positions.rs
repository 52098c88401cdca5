//! Positions: next offset to read, never redone, never outside the log without a word.

use std::collections::BTreeMap;
use std::time::Instant;

use semel::kafka::Isolation;
use semel::record::Position;

use super::harness::{Job, Load, PATIENCE, Record};
use super::kill::{TABLE, TOPOLOGY, check, order};
use crate::support;

const PASS: &str = r#"
name = "NAME"
[kafka]
[sources.all]
type = "kafka"
topics = ["NAME.in"]
format = "json"
[transforms.few]
type = "filter"
inputs = ["all"]
condition = ".keep == true"
[sinks.out]
type = "kafka"
inputs = ["few"]
topic = "NAME.out"
create = { partitions = 2 }
"#;

fn value(text: &str) -> Record<'_> {
    Record { value: Some(text.as_bytes()), ..Record::default() }
}

#[test]
fn a_job_restarted_ten_times_at_an_idle_topic_redoes_nothing() {
    let Some(cluster) = support::broker("ten restarts at an idle topic") else { return };
    let job = Job::new(cluster, "idle", 2);
    let file = job.file(PASS);
    job.produce("in", (0..5).map(|_| value(r#"{"keep":true}"#)));
    for restarts in 0..10 {
        let began = Instant::now();
        let report = job.drain(&file);
        let stage = &report["stages"][0];
        match stage["first_record_seconds"].as_f64() {
            Some(first) => {
                assert_eq!(restarts, 0, "{report}");
                let commit = first + stage["busy_seconds"].as_f64().unwrap();
                assert!(first > 0.0 && commit <= began.elapsed().as_secs_f64(), "{report}");
            }
            None => assert!(restarts > 0 && stage["first_record_seconds"].is_null(), "{report}"),
        }
        assert_eq!(job.read("out").len(), 5);
        assert_eq!(job.positions(&job.name, "in"), [Some(5), Some(0)]);
    }
}

#[test]
fn positions_advance_where_a_filter_drops_everything() {
    let Some(cluster) = support::broker("a filter that drops everything") else { return };
    let job = Job::new(cluster, "drop", 2);
    let file = job.file(PASS);
    job.produce("in", (0..7).map(|_| value(r#"{"keep":false}"#)));
    let report = job.drain(&file);
    assert_eq!(report["stages"][0]["dropped"], 7);
    assert_eq!(job.positions(&job.name, "in"), [Some(7), Some(0)]);
    assert_eq!(job.read("out"), []);
    job.produce("in", [value(r#"{"keep":true}"#)]);
    job.drain(&file);
    assert_eq!(job.read("out").len(), 1);
    assert_eq!(job.positions(&job.name, "in"), [Some(8), Some(0)]);
}

#[test]
fn a_position_below_the_log_stops_the_job_and_names_both() {
    let Some(cluster) = support::broker("a position below the log") else { return };
    let job = Job::new(cluster, "below", 1);
    let file = job.file(PASS);
    job.produce("in", (0..4).map(|_| value(r#"{"keep":true}"#)));
    job.drain(&file);
    job.produce("in", (0..6).map(|_| value(r#"{"keep":true}"#)));
    job.admin.delete_records(&[(job.partitions("in")[0].clone(), Position(8))]).unwrap();
    let output = job.run_drain(&file);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(5), "{message}");
    assert!(message.contains("is 4, but the log holds offsets 8 to 10"), "{message}");
    assert_eq!(job.read("out").len(), 4);
    assert_eq!(job.positions(&job.name, "in"), [Some(4)]);
}

#[test]
fn a_start_at_the_latest_is_resolved_once() {
    let Some(cluster) = support::broker("start = latest") else { return };
    let job = Job::new(cluster, "latest", 1);
    let file = job.file(&PASS.replace("format = \"json\"", "format = \"json\"\nstart = \"latest\""));
    job.produce("in", (0..3).map(|_| value(r#"{"keep":true}"#)));
    let process = job.start(&file);
    support::eventually(PATIENCE, "the start is committed", || job.positions(&job.name, "in") == [Some(3)]);
    process.kill();
    // Produced while nobody runs: after a restart these are neither skipped nor taken for the start.
    job.produce("in", (0..2).map(|_| value(r#"{"keep":true}"#)));
    job.drain(&file);
    assert_eq!(job.read("out").len(), 2);
}

#[test]
fn partitions_given_up_while_the_database_was_slow_are_read_when_they_come_back() {
    let Some(cluster) = support::broker("partitions given up while paused") else { return };
    let job = Job::new(cluster, "paused", 4);
    job.sql(TABLE);
    let file = job.file(TOPOLOGY);
    let table_group = format!("{}.orders_table", job.name);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, 4, order);
        let first = job.start(&file);
        support::eventually(PATIENCE, "rows are written", || job.progress(&table_group, "out") > 0);
        // Its rows are locked for longer than a worker waits before it pauses.
        let locker = job.lock_rows();
        let before = job.progress(&job.name, "in");
        support::eventually(PATIENCE, "the Kafka stage goes on", || job.progress(&job.name, "in") > before + 4_000);
        let second = job.start(&file);
        support::eventually(PATIENCE, "the second has partitions", || second.log().contains("orders_table.0"));
        drop(locker);
        second.stop();
        let ends = job.ends("out", Isolation::ReadCommitted);
        support::eventually(PATIENCE * 2, "every partition is read again", || {
            let positions = job.positions(&table_group, "out");
            positions.iter().zip(&ends).all(|(at, end)| at.unwrap_or(0) >= *end)
        });
        first.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
}

#[test]
fn lag_reads_zero_behind_transaction_markers() {
    let Some(cluster) = support::broker("lag behind markers") else { return };
    let job = Job::new(cluster, "markers", 1);
    let first = job.file(PASS);
    job.produce("in", (0..3).map(|_| value(r#"{"keep":true}"#)));
    job.drain(&first);
    // A second job reads what the first wrote in a transaction: a marker ends the topic.
    let text = PASS.replace("name = \"NAME\"", "name = \"NAME-two\"");
    let second = job.file(&text.replace("NAME.out", "NAME.end").replace("NAME.in", "NAME.out"));
    job.drain(&second);
    let group = format!("{}-two", job.name);
    let positions: Vec<i64> = job.positions(&group, "out").into_iter().map(|p| p.unwrap_or(0)).collect();
    assert_eq!(positions, job.ends("out", Isolation::ReadUncommitted));
    assert_eq!(job.read("end").len(), 3);
}

/// Cases S10 and 37: holes of compaction are stepped over, and a topic that ends in a marker is read once.
#[test]
fn holes_of_compaction_and_markers_at_the_end_are_stepped_over() {
    if !support::online("a compacted source") {
        return;
    }
    let cluster = support::private_cluster(&[("log.cleaner.backoff.ms", "100")]);
    let job = Job::new(&cluster, "holes", 1);
    let config = [("cleanup.policy", "compact"), ("min.cleanable.dirty.ratio", "0.01"), ("segment.ms", "100")];
    let config: BTreeMap<String, String> = config.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    job.admin.delete_topics(&[&job.topic("in")]).unwrap();
    job.admin.create_topic(&job.topic("in"), 1, 1, &config).unwrap();
    let send = |from: u32| {
        let keys: Vec<String> = (from..from + 50).map(|i| format!("k{}", i % 5)).collect();
        job.produce("in", keys.iter().map(|key| Record { key: Some(key.as_bytes()), ..value(r#"{"keep":true}"#) }));
    };
    send(0);
    // A segment is rolled by what comes after its time, and only then cleaned.
    support::eventually(PATIENCE, "the log has holes", || {
        send(0);
        (job.read("in").len() as i64) < job.ends("in", Isolation::ReadCommitted)[0] - 100
    });
    let first = job.file(PASS);
    let (before, report) = (job.read("in").len(), job.drain(&first));
    let read = report["stages"][0]["in"].as_u64().unwrap() as usize;
    assert!(read <= before && read >= 5, "{read} of {before}");
    assert_eq!(job.read("out").len(), read);
    assert_eq!(job.positions(&job.name, "in"), [Some(job.ends("in", Isolation::ReadCommitted)[0])]);

    let text = PASS.replace("name = \"NAME\"", "name = \"NAME-two\"");
    let second = job.file(&text.replace("NAME.out", "NAME.end").replace("NAME.in", "NAME.out"));
    for _ in 0..5 {
        job.drain(&second);
        assert_eq!(job.read("end").len(), read);
    }
}
