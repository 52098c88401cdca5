//! Aggregates by another key than the records': what a job sends to itself through its repartition topic, under faults.

use std::collections::{BTreeMap, BTreeSet};

use semel::kafka::{At, Isolation};
use serde_json::Value;

use super::harness::{Job, Load, PATIENCE, each_committed};
use crate::support;

const TOPOLOGY: &str = r#"
name = "NAME"
session_timeout = "6s"
transaction_timeout = "3s"
[kafka]
[sources.orders]
type = "kafka"
topics = ["NAME.in"]
event_id = ".id"
[transforms.totals]
type = "aggregate"
inputs = ["orders"]
group_by = ".customer"
key_field = "customer"
fields.orders = "count"
fields.total = { sum = ".total" }
fields.largest = { max = ".total" }
[sinks.out]
type = "kafka"
inputs = ["totals"]
topic = "NAME.out"
create = { partitions = 4 }
"#;

/// Orders of one customer lie in all partitions; some name none.
fn order(i: u64) -> (String, String) {
    let customer = if i % 50 == 7 { "null".to_owned() } else { format!("\"c{}\"", i % 40) };
    (format!("store-{}", i % 13), format!(r#"{{"id":"e{i}","customer":{customer},"total":{}.{}}}"#, i % 1000, i % 10))
}

/// By customer: orders, tenths and the largest.
fn fold(count: u64) -> BTreeMap<String, (u64, u64, u64)> {
    let mut totals: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
    for i in (0..count).filter(|i| i % 50 != 7) {
        let tenths = i % 1000 * 10 + i % 10;
        let (orders, total, largest) = totals.entry(format!("c{}", i % 40)).or_default();
        (*orders, *total, *largest) = (*orders + 1, *total + tenths, tenths.max(*largest));
    }
    totals
}

/// Each customer's updates count from 1 to all of its orders, each once, and the last one tells of all.
#[track_caller]
fn check(job: &Job, count: u64) {
    let mut counts: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut last: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
    let mut ids = BTreeSet::new();
    each_committed(&job.brokers, &job.admin, &job.topic("out"), |input| {
        let update: Value = serde_json::from_slice(input.value.unwrap()).unwrap();
        let tenths = |field: &str| (update[field].as_f64().unwrap() * 10.0).round() as u64;
        let (customer, orders) = (update["customer"].as_str().unwrap().to_owned(), update["orders"].as_u64().unwrap());
        assert_eq!(Some(customer.as_bytes()), input.key);
        counts.entry(customer.clone()).or_default().push(orders);
        last.insert(customer, (orders, tenths("total"), tenths("largest")));
        ids.insert(input.headers.last("semel-event-id").flatten().unwrap().to_vec());
    });
    for (customer, counts) in &counts {
        let expected: Vec<u64> = (1..=counts.len() as u64).collect();
        assert_eq!(*counts, expected, "{customer}");
    }
    assert_eq!(last, fold(count));
    assert_eq!(ids.len(), counts.values().map(Vec::len).sum::<usize>(), "every update has an id of its own");
    let letters = job.read("dead-letters");
    assert_eq!(letters.len() as u64, (0..count).filter(|i| i % 50 == 7).count() as u64);
    let reasons = letters.iter().map(|l| (l.header("semel-error-node"), l.header("semel-error-reason")));
    assert!(reasons.into_iter().all(|reason| reason == (Some("totals"), Some("null-key"))));
}

#[test]
fn records_that_are_grouped_anew_count_once_through_kills() {
    let Some(cluster) = support::broker("kill -9 of a job that sends records to itself") else { return };
    let job = Job::new(cluster, "regroup-kill", 4);
    // Two workers, whose stores are in one database.
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", "workers = 2\n[kafka]\n"));
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 3_000, 4, order);
        job.kill_at_moments(&file, 4, "totals.repartition");
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
    assert_eq!(job.partitions("totals.repartition").len(), 4);
    let at: Vec<_> = job.positions(&job.name, "totals.repartition").into_iter().map(Option::unwrap).collect();
    assert_eq!(at, job.ends("totals.repartition", Isolation::ReadUncommitted), "a drain goes through both halves");
}

#[test]
fn two_processes_share_what_is_grouped_anew() {
    let Some(cluster) = support::broker("two processes that send records to each other") else { return };
    let job = Job::new(cluster, "regroup-two", 4);
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", "membership = \"dynamic\"\n[kafka]\n"));
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, 4, order);
        let first = job.start(&file);
        let moves = |what: &str| job.moves(&job.name, "totals.repartition", 1_000, what);
        moves("the first works");
        for _ in 0..2 {
            let second = job.start(&file);
            // Sources or repartitions: the group shares them by number.
            let has = |suffix: &str| second.log().contains(&format!("partitions={}-", job.topic(suffix)));
            support::eventually(PATIENCE, "the second has partitions", || has("in") || has("totals.repartition"));
            moves("both work");
            second.stop();
            moves("the first goes on alone");
        }
        first.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
}

/// What is processed is deleted from the repartition topic; a reset begins anew with neither state nor what lies there.
#[test]
fn a_repartition_topic_is_emptied_and_a_reset_sends_again() {
    let Some(cluster) = support::broker("a reset of a job that sends records to itself") else { return };
    let job = Job::new(cluster, "regroup-reset", 2);
    let file = job.file(TOPOLOGY);
    job.produce_keyed("in", 2, (0..600).map(order));
    let process = job.start(&file);
    let begins = || -> i64 {
        let asked: Vec<_> = job.partitions("totals.repartition").into_iter().map(|p| (p, At::Earliest)).collect();
        let begins = job.admin.offsets(&asked, Isolation::ReadUncommitted).unwrap_or_default();
        begins.into_iter().filter_map(|(_, begin)| begin).map(|begin| begin.0).sum()
    };
    support::eventually(PATIENCE, "what is processed is deleted", || begins() >= 588);
    process.stop();
    job.drain(&file);
    check(&job, 600);
    let args = ["reset", file.to_str().unwrap(), "--to", "earliest", "--yes"];
    support::eventually(PATIENCE, "nobody is in the group", || job.semel(&args).output().unwrap().status.success());
    job.admin.delete_topics(&[&job.topic("out"), &job.topic("dead-letters")]).unwrap();
    job.drain(&file);
    check(&job, 600);
}

/// Each aggregate stands in the file before the one that feeds it: a drain goes through the topics between them in the
/// order of the records.
#[test]
fn a_drain_goes_through_every_repartition_whatever_the_order_of_the_file() {
    let Some(cluster) = support::broker("a drain through repartitions") else { return };
    let job = Job::new(cluster, "regroup-order", 4);
    let file = job.file(
        r#"
name = "NAME"
[kafka]
[sinks.out]
type = "kafka"
inputs = ["all"]
topic = "NAME.out"
create = { partitions = 1 }
[transforms.all]
type = "aggregate"
inputs = ["tens"]
group_by = '"all"'
fields.updates = "count"
[transforms.tens]
type = "aggregate"
inputs = ["totals"]
group_by = 'to_int!(.key) / 10'
fields.updates = "count"
[transforms.totals]
type = "aggregate"
inputs = ["orders"]
group_by = ".customer"
fields.orders = "count"
[sources.orders]
type = "kafka"
topics = ["NAME.in"]
"#,
    );
    // Again with repartitions that are there.
    for count in [500, 1_000] {
        let order = |i: u64| (format!("store-{}", i % 13), format!(r#"{{"customer":{}}}"#, i % 40));
        job.produce_keyed("in", 4, (count - 500..count).map(order));
        job.drain(&file);
        let out = job.read("out");
        let updates = |update: &str| serde_json::from_str::<Value>(update).unwrap()["updates"].as_u64().unwrap();
        assert_eq!(out.iter().map(|update| updates(update.text())).max(), Some(count));
        assert_eq!(out.len() as u64, count, "an order is an update all the way");
        for topic in ["totals.repartition", "tens.repartition", "all.repartition"] {
            let at: Vec<_> = job.positions(&job.name, topic).into_iter().map(|at| at.unwrap_or(0)).collect();
            assert_eq!(at, job.ends(topic, Isolation::ReadUncommitted), "{topic}");
        }
    }
}
