//! What at-least-once and at-most-once lose and double when the process is killed, and that a clean stop does neither.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::sys::signal::Signal;
use semel::kafka::Isolation;

use super::harness::{Job, Load, PATIENCE, Record};
use super::kafka_proxy::{Fault, KafkaProxy, Kind};
use crate::support;

const TOPOLOGY: &str = r#"
name = "NAME"
guarantee = "THE_GUARANTEE"
commit_interval = "50ms"
[kafka]
[sources.events]
type = "kafka"
topics = ["NAME.in"]
format = "json"
event_id = ".id"
[sinks.out]
type = "kafka"
inputs = ["events"]
topic = "NAME.out"
create = { partitions = 2 }
"#;

fn event(i: u64) -> (String, String) {
    (format!("k-{}", i % 7), format!(r#"{{"id":"e-{i}"}}"#))
}

/// Kills the job three times while events come in, drains the rest, and answers how often each event came out.
fn killed(job: &Job, guarantee: &str) -> Vec<u64> {
    let file = job.file(&TOPOLOGY.replace("THE_GUARANTEE", guarantee));
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, job, 5_000, 2, event);
        for round in 0..3_u64 {
            let process = job.start(&file);
            let before: i64 = job.positions(&job.name, "in").into_iter().flatten().sum();
            support::eventually(PATIENCE, "the job makes progress", || {
                job.positions(&job.name, "in").into_iter().flatten().sum::<i64>() > before
            });
            support::pass(Duration::from_millis(23 * round));
            process.kill();
        }
        load.stop()
    });
    job.drain(&file);
    let positions: Vec<i64> = job.positions(&job.name, "in").into_iter().map(|p| p.unwrap_or(0)).collect();
    assert_eq!(positions, job.ends("in", Isolation::ReadCommitted));
    times(job, count)
}

/// How often each of so many events is in the output.
fn times(job: &Job, count: u64) -> Vec<u64> {
    let mut seen: BTreeMap<String, u64> = BTreeMap::new();
    job.read("out").iter().for_each(|record| *seen.entry(record.text().to_owned()).or_default() += 1);
    let times = (0..count).map(|i| seen.remove(&event(i).1).unwrap_or(0)).collect();
    assert_eq!(seen, BTreeMap::new(), "outputs of no event");
    times
}

#[test]
fn at_most_once_never_doubles() {
    let Some(cluster) = support::broker("kill -9 under at-most-once") else { return };
    let job = Job::new(cluster, "atmost", 2);
    let times = killed(&job, "at-most-once");
    assert_eq!(times.iter().max(), Some(&1));
}

/// Positions first: a stage that has reached its end may still hold what follows them.
#[test]
fn at_most_once_drains_through_every_stage() {
    let Some(cluster) = support::broker("a drain under at-most-once") else { return };
    for round in 0..4 {
        let job = Job::new(cluster, "through", 2);
        job.sql("CREATE TABLE THE_TABLE (id text, round int)");
        let rows = "[sinks.rows]\ntype = \"postgres\"\ninputs = [\"out\"]\nurl = \"${DATABASE_URL}\"\n\
                    table = \"THE_TABLE\"\nmode = \"insert\"\n";
        let file = job.file(&format!("{}{rows}", TOPOLOGY.replace("THE_GUARANTEE", "at-most-once")));
        let events: Vec<String> = (0..4_000).map(|i| event(i).1).collect();
        job.produce("in", events.iter().map(|event| Record { value: Some(event.as_bytes()), ..Record::default() }));
        let report = job.drain(&file);
        assert_eq!(report["stages"][0]["lost"], 0, "{report}");
        let found = job.sql("SELECT count(*), count(DISTINCT id) FROM THE_TABLE");
        assert_eq!(found[0], vec![Some("4000".to_owned()); 2], "round {round}: {report}");
    }
}

/// What was not acknowledged when the job ends is counted as lost: nobody sends it again.
#[test]
fn what_at_most_once_holds_at_its_end_is_counted_as_lost() {
    if !support::online("a stop under at-most-once while the broker hangs") {
        return;
    }
    let proxy = KafkaProxy::start();
    let cluster = support::private_cluster(&[("advertised.listeners", &format!("PLAINTEXT://{}", proxy.address))]);
    proxy.forward_to(&cluster.brokers);
    let job = Job::new(&cluster, "held", 1);
    let text = TOPOLOGY.replace("[kafka]\n", "shutdown_timeout = \"2s\"\n[kafka]\n");
    let file = job.file(&text.replace("THE_GUARANTEE", "at-most-once"));
    let mut process = job.start(&file);
    // The first one takes with it what is noted of the start.
    job.produce("in", [Record { value: Some(b"{\"id\":\"first\"}"), ..Record::default() }]);
    support::eventually(PATIENCE, "it runs", || !job.partitions("out").is_empty() && job.read("out").len() == 1);
    proxy.next(Kind::Produce, Fault::Delay(PATIENCE * 2));
    let events: Vec<String> = (0..100).map(|i| event(i).1).collect();
    job.produce("in", events.iter().map(|event| Record { value: Some(event.as_bytes()), ..Record::default() }));
    support::eventually(PATIENCE, "positions are committed and outputs held up", || {
        job.positions(&job.name, "in") == [Some(101)] && proxy.done()
    });
    process.signal(Signal::SIGTERM);
    support::eventually(PATIENCE, "it ends", || !process.is_running());
    let log = process.log();
    assert!(log.contains("outputs are lost (at-most-once)") && log.contains("count=100"), "{log}");
}

#[test]
fn at_least_once_never_loses() {
    let Some(cluster) = support::broker("kill -9 under at-least-once") else { return };
    let job = Job::new(cluster, "atleast", 2);
    let times = killed(&job, "at-least-once");
    assert_eq!(times.iter().min(), Some(&1));
}

#[test]
fn a_clean_stop_loses_and_doubles_nothing_under_any_guarantee() {
    let Some(cluster) = support::broker("clean stops under each guarantee") else { return };
    for guarantee in ["at-most-once", "at-least-once", "exactly-once"] {
        let job = Job::new(cluster, "clean", 2);
        let file = job.file(&TOPOLOGY.replace("THE_GUARANTEE", guarantee));
        let count = std::thread::scope(|scope| {
            let load = Load::start(scope, &job, 5_000, 2, event);
            for _ in 0..2 {
                let process = job.start(&file);
                let before: i64 = job.positions(&job.name, "in").into_iter().flatten().sum();
                support::eventually(PATIENCE, "the job makes progress", || {
                    job.positions(&job.name, "in").into_iter().flatten().sum::<i64>() > before
                });
                process.stop();
            }
            load.stop()
        });
        job.drain(&file);
        assert_eq!(times(&job, count), vec![1; count as usize], "{guarantee}");
    }
}
