//! kill -9 at random moments: every input's output is there once, the table equals the fold, positions are right.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use semel::kafka::Isolation;

use super::harness::{Job, Load, PATIENCE};
use crate::support;

pub const TOPOLOGY: &str = r#"
name = "NAME"
[kafka]
[sources.orders]
type = "kafka"
topics = ["NAME.in"]
format = "json"
event_id = ".event_id"
[transforms.live]
type = "filter"
inputs = ["orders"]
condition = '.status != "cancelled"'
[transforms.priced]
type = "remap"
inputs = ["live"]
source = '''
.total = to_int!(.qty) * to_int!(.price)
del(.note)
'''
[sinks.priced_orders]
type = "kafka"
inputs = ["priced"]
topic = "NAME.out"
key = ".order_id"
create = { partitions = 4 }
[sinks.orders_table]
type = "postgres"
inputs = ["priced_orders"]
url = "${DATABASE_URL}"
table = "THE_TABLE"
key = ["order_id"]
version = "version"
deleted = "deleted"
delete_when = '.status == "deleted"'
"#;

pub const TABLE: &str = "CREATE TABLE THE_TABLE (order_id text PRIMARY KEY, version bigint NOT NULL, \
                         deleted boolean NOT NULL DEFAULT false, event_id text, status text, qty int, price int, total int)";

/// The order's `i`-th event: 50 orders, versions out of order, some cancelled, some deleted.
pub fn order(i: u64) -> (String, String) {
    let (order, status) = (i % 50, status(i));
    let (qty, price) = (i % 9 + 1, i % 90 + 1);
    let version = version(i);
    let value = format!(
        r#"{{"event_id":"e-{i}","order_id":"o-{order}","status":"{status}","qty":{qty},"price":{price},"note":"x","version":{version}}}"#
    );
    (format!("c-{}", i % 7), value)
}

fn status(i: u64) -> &'static str {
    match i % 23 {
        0 => "cancelled",
        1 => "deleted",
        _ => "paid",
    }
}

/// Neighbours swap places: 1, 0, 3, 2 … within an order.
fn version(i: u64) -> u64 {
    (i / 50) ^ 1
}

/// What has to come out, worked out without the product.
pub struct Fold {
    /// How often each output value is expected.
    pub outputs: BTreeMap<String, u64>,
    /// order id → version, deleted, event id
    pub rows: BTreeMap<String, (u64, bool, String)>,
}

pub fn fold(count: u64) -> Fold {
    let mut fold = Fold { outputs: BTreeMap::new(), rows: BTreeMap::new() };
    for i in (0..count).filter(|i| status(*i) != "cancelled") {
        let (order, status, version) = (format!("o-{}", i % 50), status(i), version(i));
        let (qty, price) = (i % 9 + 1, i % 90 + 1);
        let value = format!(
            r#"{{"event_id":"e-{i}","order_id":"{order}","status":"{status}","qty":{qty},"price":{price},"version":{version},"total":{}}}"#,
            qty * price
        );
        *fold.outputs.entry(value).or_default() += 1;
        let row = (version, status == "deleted", format!("e-{i}"));
        let held = fold.rows.entry(order).or_insert_with(|| row.clone());
        if row.0 > held.0 {
            *held = row;
        }
    }
    fold
}

/// Compares everything that a job made of `count` orders with the fold.
#[track_caller]
pub fn check(job: &Job, count: u64) {
    let fold = fold(count);
    let mut outputs: BTreeMap<String, u64> = BTreeMap::new();
    for record in job.read("out") {
        *outputs.entry(record.text().to_owned()).or_default() += 1;
    }
    let lost: u64 = fold.outputs.iter().map(|(v, n)| n.saturating_sub(outputs.get(v).copied().unwrap_or(0))).sum();
    let doubled: u64 = outputs.iter().map(|(v, n)| n.saturating_sub(fold.outputs.get(v).copied().unwrap_or(0))).sum();
    assert_eq!((lost, doubled), (0, 0), "lost and doubled outputs of {count} orders");

    let rows = job.sql("SELECT order_id, version, deleted, event_id FROM THE_TABLE ORDER BY order_id");
    let rows: BTreeMap<String, (u64, bool, String)> = rows
        .into_iter()
        .map(|row| {
            let cell = |i: usize| row[i].clone().unwrap();
            (cell(0), (cell(1).parse().unwrap(), cell(2) == "t", cell(3)))
        })
        .collect();
    assert_eq!(rows, fold.rows);

    let at = |positions: Vec<Option<i64>>| positions.into_iter().map(|p| p.unwrap_or(0)).collect::<Vec<_>>();
    assert_eq!(at(job.positions(&job.name, "in")), job.ends("in", Isolation::ReadCommitted));
    let group = format!("{}.orders_table", job.name);
    assert_eq!(at(job.positions(&group, "out")), job.ends("out", Isolation::ReadUncommitted));
}

#[test]
fn a_job_killed_at_random_moments_loses_and_doubles_nothing() {
    let Some(cluster) = support::broker("kill -9 of a running job") else { return };
    let job = Job::new(cluster, "kill", 4);
    job.sql(TABLE);
    let file = job.file(TOPOLOGY);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 5_000, 4, order);
        for round in 0..5_u64 {
            let process = job.start(&file);
            let before: i64 = job.positions(&job.name, "in").into_iter().flatten().sum();
            support::eventually(PATIENCE, "the job makes progress", || {
                job.positions(&job.name, "in").into_iter().flatten().sum::<i64>() > before
            });
            // Somewhere in the cycle of a transaction, another place each round.
            let until = Instant::now() + Duration::from_millis(37 * round);
            support::eventually(PATIENCE, "the moment", || Instant::now() >= until);
            process.kill();
        }
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
}
