//! Windows under faults: every update of every window is that of its records in order, late ones stay late through kills,
//! and closed windows leave the state.

use std::collections::{BTreeMap, BTreeSet};

use semel::record::Input;
use serde_json::Value;

use super::harness::{Job, Load, each_committed};
use crate::support;

const TOPOLOGY: &str = r#"
name = "NAME"
[kafka]
[sources.orders]
type = "kafka"
topics = ["NAME.in"]
event_id = ".id"
event_time = ".at"
[transforms.totals]
type = "aggregate"
inputs = ["orders"]
window = { tumbling = "5s", grace = "2s" }
fields.orders = "count"
fields.total = { sum = ".total" }
[sinks.out]
type = "kafka"
inputs = ["totals"]
topic = "NAME.out"
# Updates have the times of their orders, years ago: the broker would delete them after a look, every five minutes.
create = { partitions = 4, config = { "retention.ms" = "-1" } }
"#;

const BASE: u64 = 1_700_000_000_000;

/// Time goes by 10 ms an order; some come 4 s late, which the grace mostly covers, some 30 s.
fn order(i: u64) -> (String, String) {
    let behind = match i % 100 {
        17 => 30_000,
        40..50 => 4_000,
        _ => 0,
    };
    let at = BASE + 60_000 + i * 10 - behind;
    (format!("c{}", i % 8), format!(r#"{{"id":"e{i}","at":{at},"total":{}}}"#, i % 50))
}

/// By customer: the updates, each with its window's start, orders and total.
type Updates = BTreeMap<String, Vec<(u64, u64, u64)>>;

/// The updates of each customer in order, and how many records came too late: by partition, as the rule says.
fn fold(job: &Job) -> (Updates, u64) {
    let mut seen: BTreeMap<i32, u64> = BTreeMap::new();
    let mut windows: BTreeMap<(String, u64), (u64, u64)> = BTreeMap::new();
    let mut updates = Updates::new();
    let mut late = 0;
    each_committed(&job.brokers, &job.admin, &job.topic("in"), |input: &Input<'_>| {
        let order: Value = serde_json::from_slice(input.value.unwrap()).unwrap();
        let customer = String::from_utf8(input.key.unwrap().to_vec()).unwrap();
        let at = order["at"].as_u64().unwrap();
        let start = at / 5_000 * 5_000;
        let newest = seen.entry(input.partition).or_default();
        if start + 7_000 <= *newest {
            late += 1;
            return;
        }
        *newest = at.max(*newest);
        let (count, total) = windows.entry((customer.clone(), start)).or_default();
        (*count, *total) = (*count + 1, *total + order["total"].as_u64().unwrap());
        updates.entry(customer).or_default().push((start, *count, *total));
    });
    (updates, late)
}

#[test]
fn windows_are_right_through_kills_and_late_records_stay_late() {
    let Some(cluster) = support::broker("kill -9 of a job with windows") else { return };
    let job = Job::new(cluster, "windows-kill", 4);
    let file = job.file(TOPOLOGY);
    std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 3_000, 4, order);
        job.kill_at_moments(&file, 4, "in");
        load.stop()
    });
    job.drain(&file);
    let (expected, late) = fold(&job);
    assert!(late > 0 && expected.len() == 8);
    let mut found = Updates::new();
    each_committed(&job.brokers, &job.admin, &job.topic("out"), |input| {
        let update: Value = serde_json::from_slice(input.value.unwrap()).unwrap();
        let time = |name: &str| {
            let text = update[name].as_str().unwrap();
            chrono::DateTime::parse_from_rfc3339(text).unwrap().timestamp_millis() as u64
        };
        assert_eq!(time("window_end"), time("window_start") + 5_000);
        let number = |name: &str| update[name].as_u64().unwrap();
        let update = (time("window_start"), number("orders"), number("total"));
        found.entry(String::from_utf8(input.key.unwrap().to_vec()).unwrap()).or_default().push(update);
    });
    for (customer, expected) in &expected {
        let differs = expected.iter().zip(&found[customer]).position(|(expected, found)| expected != found);
        assert_eq!((differs, expected.len()), (None, found[customer].len()), "{customer}");
    }
    assert_eq!(found.len(), 8);

    // Of the closed windows nothing is left in the state: what was not removed is of a few open ones.
    let mut state: BTreeSet<Vec<u8>> = BTreeSet::new();
    each_committed(&job.brokers, &job.admin, &job.topic("totals.changelog"), |input| match input.value {
        Some(_) => drop(state.insert(input.key.unwrap().to_vec())),
        None => drop(state.remove(input.key.unwrap())),
    });
    assert!(state.len() <= 2 * 4 + 8 * 3, "{} keys", state.len());
}

#[test]
fn a_run_tells_how_many_records_were_late() {
    let Some(cluster) = support::broker("late records") else { return };
    let job = Job::new(cluster, "windows-late", 1);
    let file = job.file(TOPOLOGY);
    job.produce_keyed("in", 1, (0..2_000).map(order));
    let report = job.drain(&file);
    let (updates, late) = fold(&job);
    let updates: usize = updates.values().map(Vec::len).sum();
    let stage = &report["stages"][0];
    let number = |name: &str| stage[name].as_u64().unwrap();
    assert_eq!((number("late"), number("out"), number("in")), (late, updates as u64, 2_000), "{stage}");
    assert_eq!(number("out") + number("dropped"), 2_000, "late ones are among those dropped");
    assert!(late >= 15);
}
