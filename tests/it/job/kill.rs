//! kill -9 at random moments: every input's output is there once, the table equals the fold, positions are right.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use semel::kafka::Isolation;
use semel::record::Input;

use super::harness::{Job, Load, PATIENCE, each_committed};
use crate::support;

pub const TOPOLOGY: &str = r#"
name = "NAME"
audit = true
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

/// The Kafka stage of the topology alone.
pub fn kafka_stage() -> &'static str {
    TOPOLOGY.split("[sinks.orders_table]").next().expect("a split has a first part")
}

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

/// What has to come out of the order's `i`-th event, worked out without the product.
fn output(i: u64) -> Option<String> {
    let (order, status, version) = (i % 50, status(i), version(i));
    let (qty, price) = (i % 9 + 1, i % 90 + 1);
    (status != "cancelled").then(|| {
        format!(
            r#"{{"event_id":"e-{i}","order_id":"o-{order}","status":"{status}","qty":{qty},"price":{price},"version":{version},"total":{}}}"#,
            qty * price
        )
    })
}

/// What has to be in the table: order id → version, deleted, event id.
fn rows(count: u64) -> BTreeMap<String, (u64, bool, String)> {
    let mut rows = BTreeMap::new();
    for i in (0..count).filter(|i| status(*i) != "cancelled") {
        let row = (version(i), status(i) == "deleted", format!("e-{i}"));
        let held = rows.entry(format!("o-{}", i % 50)).or_insert_with(|| row.clone());
        if row.0 > held.0 {
            *held = row;
        }
    }
    rows
}

/// Lost, doubled and unexpected outputs of `count` orders. An order that lies in the input twice, since a producer that
/// lost its broker sent it again, has two outputs. Says of the first doubled ones where they lie and where they come from.
pub fn outputs(job: &Job, count: u64) -> (u64, u64, u64) {
    let number = |input: &Input<'_>| {
        let value = std::str::from_utf8(input.value.expect("a value")).expect("UTF-8");
        let (_, rest) = value.split_once(r#""event_id":"e-"#)?;
        rest.split('"').next()?.parse().ok().filter(|i| *i < count)
    };
    let each = |suffix: &str, see: &mut dyn FnMut(&Input<'_>)| {
        each_committed(&job.brokers, &job.admin, &job.topic(suffix), see);
    };
    let mut times = vec![0_u8; count as usize];
    let mut unexpected = 0;
    each("out", &mut |input| match number(input).filter(|i| output(*i).as_deref().map(str::as_bytes) == input.value) {
        Some(i) => times[i as usize] = times[i as usize].saturating_add(1),
        None => unexpected += 1,
    });
    let mut again: BTreeMap<u64, u64> = BTreeMap::new();
    let mut lost = 0;
    for (i, times) in (0..).zip(times) {
        let expected = u8::from(status(i) != "cancelled");
        lost += u64::from(expected.saturating_sub(times));
        if times > expected {
            again.insert(i, u64::from(times - expected));
        }
    }
    if !again.is_empty() {
        let mut sent: BTreeMap<u64, u64> = BTreeMap::new();
        each("in", &mut |input| {
            if let Some(i) = number(input).filter(|i| again.contains_key(i)) {
                *sent.entry(i).or_default() += 1;
            }
        });
        for (i, more) in &mut again {
            *more = more.saturating_sub(sent.get(i).map_or(0, |times| times - 1));
        }
        println!("{} orders lie in the input more than once", sent.values().filter(|times| **times > 1).count());
        again.retain(|_, more| *more > 0);
        let shown: Vec<u64> = again.keys().copied().take(20).collect();
        each("out", &mut |input| {
            if let Some(i) = number(input).filter(|i| shown.contains(i)) {
                let origin = input.headers.last("semel-origin").flatten().unwrap_or(b"an unnamed record");
                println!("order {i}: {}/{} of {}", input.partition, input.offset, String::from_utf8_lossy(origin));
            }
        });
    }
    let doubled = again.values().sum();
    (lost, doubled, unexpected)
}

/// Compares everything that a job made of `count` orders with what has to be there.
#[track_caller]
pub fn check(job: &Job, count: u64) {
    assert_eq!(outputs(job, count), (0, 0, 0), "lost, doubled and unexpected outputs of {count} orders");

    let found = job.sql("SELECT order_id, version, deleted, event_id FROM THE_TABLE ORDER BY order_id");
    let found: BTreeMap<String, (u64, bool, String)> = found
        .into_iter()
        .map(|row| {
            let cell = |i: usize| row[i].clone().unwrap();
            (cell(0), (cell(1).parse().unwrap(), cell(2) == "t", cell(3)))
        })
        .collect();
    assert_eq!(found, rows(count));

    let at = |positions: Vec<Option<i64>>| positions.into_iter().map(|p| p.unwrap_or(0)).collect::<Vec<_>>();
    assert_eq!(at(job.positions(&job.name, "in")), job.ends("in", Isolation::ReadCommitted));
    let group = format!("{}.orders_table", job.name);
    assert_eq!(at(job.positions(&group, "out")), job.ends("out", Isolation::ReadUncommitted));
}

/// Five kills under a light load; `SEMEL_KILLS=10 cargo test --test it killed_at_random -- --nocapture` is the long form,
/// at 20,000 records a second, and says how long each restart took.
#[test]
fn a_job_killed_at_random_moments_loses_and_doubles_nothing() {
    let Some(cluster) = support::broker("kill -9 of a running job") else { return };
    let kills: Option<u64> = std::env::var("SEMEL_KILLS").ok().map(|n| n.parse().expect("SEMEL_KILLS is a number"));
    let (kills, rate, longest) = kills.map_or((5, 5_000, 200), |kills| (kills, 20_000, 3_000));
    let job = Job::new(cluster, "kill", 4);
    job.sql(TABLE);
    let file = job.file(TOPOLOGY);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, rate, 4, order);
        for round in 1..=kills {
            let before = job.progress(&job.name, "in");
            let started = Instant::now();
            let process = job.start(&file);
            support::eventually(PATIENCE, "the job makes progress", || job.progress(&job.name, "in") > before);
            let progress = started.elapsed();
            // Somewhere in the cycle of a transaction, another place each round.
            let moment =
                started + progress + Duration::from_millis(u64::from(started.elapsed().subsec_nanos()) % longest);
            support::eventually(PATIENCE, "the moment", || Instant::now() >= moment);
            println!("kill {round}: committed {progress:.1?} after its start, killed after {:.1?}", started.elapsed());
            process.kill();
        }
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
    println!("{kills} kills at {rate} records/s: {count} records, none lost, none doubled, the table equal");
}
