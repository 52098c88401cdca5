//! What at-least-once and at-most-once lose and double when the process is killed, and that a clean stop does neither.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use semel::kafka::Isolation;

use super::harness::{Job, Load, PATIENCE};
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
            let until = Instant::now() + Duration::from_millis(23 * round);
            support::eventually(PATIENCE, "the moment", || Instant::now() >= until);
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
