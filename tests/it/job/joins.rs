//! Joins under faults: every order is there once, with the row that its customer had at its time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Stdio;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;
use semel::kafka::Isolation;
use semel::operator::partition;
use serde_json::{Value, json};

use super::harness::{Feed, Job, PATIENCE, Record, each_committed, wait_with_output};
use super::records::{lower_limit, random_text};
use crate::support;

pub const TOPOLOGY: &str = r#"
name = "NAME"
session_timeout = "6s"
transaction_timeout = "3s"
[kafka]
[sources.orders]
type = "kafka"
topics = ["NAME.in"]
event_id = ".id"
[sources.customers]
type = "kafka"
topics = ["NAME.customers"]
event_id = ".id"
[transforms.good]
type = "filter"
inputs = ["customers"]
condition = "to_int!(.version) > 0"
[transforms.customer]
type = "table"
inputs = ["good"]
[transforms.all]
type = "join"
inputs = ["orders"]
table = "customer"
kind = "left"
into = "customer"
[transforms.known]
type = "join"
inputs = ["orders"]
table = "customer"
into = "customer"
[sinks.out]
type = "kafka"
inputs = ["all"]
topic = "NAME.out"
create = { partitions = 4 }
[sinks.inner]
type = "kafka"
inputs = ["known"]
topic = "NAME.known"
create = { partitions = 4 }
"#;

const CUSTOMERS: u64 = 40;

/// Times are of the last hour, so that no topic deletes them.
pub fn base() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    now.as_millis() as i64 - 3_600_000
}

/// What happens at the `i`-th moment: most are orders; every fifth is a customer that changes, goes, or is none.
struct Moment {
    topic: &'static str,
    key: Option<String>,
    value: Option<String>,
}

fn moment(i: u64) -> Moment {
    // Whatever kind of moment it is: any customer.
    let customer = (i.wrapping_mul(2_654_435_761) >> 9) % CUSTOMERS;
    let key = format!("c{customer}");
    if i % 5 == 2 {
        let value = match i % 35 {
            7 => None,
            12 => Some(format!(r#"{{"id":"v{i}","version":"broken"}}"#)),
            _ => Some(format!(r#"{{"id":"v{i}","version":{i}}}"#)),
        };
        return Moment { topic: "customers", key: Some(key), value };
    }
    let key = (i % 101 != 50).then_some(key);
    Moment { topic: "in", key, value: Some(format!(r#"{{"id":"o{i}"}}"#)) }
}

/// Produces the moments in the order of their times, to both topics.
pub fn produce(job: &Job, base: i64, moments: std::ops::Range<u64>) {
    let mut feeds = ["in", "customers"].map(|suffix| (suffix, Feed::new(job, &job.topic(suffix))));
    for i in moments {
        let Moment { topic, key, value } = moment(i);
        let (_, feed) = feeds.iter_mut().find(|(suffix, _)| *suffix == topic).unwrap();
        let (key, value) = (key.as_deref().map(str::as_bytes), value.as_deref().map(str::as_bytes));
        // Two moments have one time: of an order and a customer of one time the customer goes first.
        let timestamp = Some(base + (i / 2) as i64);
        feed.push(&Record { partition: partition(key, (i % 4) as i32, 4), timestamp, key, value, ..Record::default() });
    }
    feeds.iter().for_each(|(_, feed)| feed.flush());
}

/// Orders as they have to come out, by id: what each customer was at the order's time.
pub fn expected(count: u64) -> (BTreeMap<String, Value>, u64) {
    let (mut rows, mut orders, mut letters) = (BTreeMap::new(), BTreeMap::new(), 0);
    for pair in 0..count.div_ceil(2) {
        let mut moments: Vec<u64> = (2 * pair..(2 * pair + 2).min(count)).collect();
        moments.sort_by_key(|i| moment(*i).topic == "in");
        for i in moments {
            let Moment { topic, key, value } = moment(i);
            if topic == "in" {
                let row = key.and_then(|key| rows.get(&key).cloned()).unwrap_or(Value::Null);
                orders.insert(format!("o{i}"), row);
                continue;
            }
            match value.map(|value| serde_json::from_str::<Value>(&value).unwrap()) {
                None => drop(rows.remove(&key.unwrap())),
                Some(row) if row["version"].is_string() => letters += 1,
                Some(row) => drop(rows.insert(key.unwrap(), row)),
            }
        }
    }
    (orders, letters)
}

/// What came out: by the order's id the row that it got, each order once, each with an id of its own.
#[track_caller]
pub fn joined(job: &Job, suffix: &str) -> BTreeMap<String, Value> {
    let (mut orders, mut ids) = (BTreeMap::new(), BTreeSet::new());
    each_committed(&job.brokers, &job.admin, &job.topic(suffix), |input| {
        let order: Value = serde_json::from_slice(input.value.unwrap()).unwrap();
        let id = order["id"].as_str().unwrap().to_owned();
        assert!(orders.insert(id.clone(), order["customer"].clone()).is_none(), "{id} is in {suffix} twice");
        assert!(ids.insert(input.headers.last("semel-event-id").flatten().unwrap().to_vec()), "the id of {id}");
    });
    orders
}

/// Compares every order with the plain reference.
#[track_caller]
pub fn check(job: &Job, count: u64) {
    let (orders, broken) = expected(count);
    let differs = |found: &BTreeMap<String, Value>, orders: &BTreeMap<String, Value>| {
        let all: BTreeSet<&String> = found.keys().chain(orders.keys()).collect();
        let unlike = all.into_iter().filter(|id| found.get(*id) != orders.get(*id));
        unlike.map(|id| format!("{id}: {:?} instead of {:?}", found.get(id), orders.get(id))).collect::<Vec<_>>()
    };
    let unlike = differs(&joined(job, "out"), &orders);
    assert!(unlike.is_empty(), "{} of {}: {:#?}", unlike.len(), orders.len(), &unlike[..unlike.len().min(5)]);
    let known: BTreeMap<String, Value> = orders.into_iter().filter(|(_, row)| !row.is_null()).collect();
    let unlike = differs(&joined(job, "known"), &known);
    assert!(unlike.is_empty(), "{} of {}: {:#?}", unlike.len(), known.len(), &unlike[..unlike.len().min(5)]);
    assert!(known.len() as u64 > count / 2, "{} of {count} found a row", known.len());
    let mut letters: BTreeMap<(String, String), u64> = BTreeMap::new();
    for letter in job.read("dead-letters") {
        let header = |name| letter.header(name).unwrap().to_owned();
        *letters.entry((header("semel-error-node"), header("semel-error-reason"))).or_default() += 1;
    }
    assert_eq!(letters, BTreeMap::from([(("good".to_owned(), "expression".to_owned()), broken)]));
}

pub fn job(cluster: &semel::cluster::Cluster, prefix: &str) -> Job {
    let job = Job::new(cluster, prefix, 4);
    job.admin.create_topic(&job.topic("customers"), 4, -1, &BTreeMap::new()).unwrap();
    job
}

/// Orders without a key end at the inner join in silence here.
pub fn topology() -> String {
    TOPOLOGY.replace("[transforms.known]\ntype = \"join\"\ninputs = [\"orders\"]", "[transforms.keyed]\ntype = \"filter\"\ninputs = [\"orders\"]\ncondition = \"%key != null\"\n[transforms.known]\ntype = \"join\"\ninputs = [\"keyed\"]")
}

/// All records lie there already, so that what each order finds is exact: the state of its time, whatever is killed when.
#[test]
fn orders_find_the_row_of_their_time_through_kills() {
    let Some(cluster) = support::broker("kill -9 of a job that joins") else { return };
    let job = job(cluster, "join-kill");
    // Small transactions, so that many kills meet one; little memory, so that an input that runs ahead is paused.
    let settings = "batch_records = 20\nworkers = 2\nmemory = \"1MiB\"\n[kafka]\n";
    let file = job.file(&topology().replace("[kafka]\n", settings));
    let count = 30_000;
    produce(&job, base(), 0..count);
    job.kill_at_moments(&file, 4, "in");
    for place in ["before-apply:3", "in-restore:2", "after-apply:5", "before-checkpoint:1", "before-commit:9"] {
        let mut process = job.start_with(&file, &[(semel::crash::VARIABLE, place)]);
        support::eventually(PATIENCE, place, || !process.is_running());
    }
    let before = job.progress(&job.name, "in");
    assert!(
        before < job.ends("in", Isolation::ReadCommitted).iter().sum::<i64>(),
        "the kills came after all was through"
    );
    job.drain(&file);
    check(&job, count);
    for suffix in ["in", "customers"] {
        let at: Vec<_> = job.positions(&job.name, suffix).into_iter().map(|at| at.unwrap_or(0)).collect();
        assert_eq!(at, job.ends(suffix, Isolation::ReadCommitted), "{suffix}");
    }
}

#[test]
fn a_table_in_memory_is_restored_in_full() {
    let Some(cluster) = support::broker("kill -9 of a job with its table in memory") else { return };
    let job = job(cluster, "join-memory");
    let settings = "stores = \"memory\"\nbatch_records = 20\n[kafka]\n";
    let file = job.file(&topology().replace("[kafka]\n", settings));
    let count = 8_000;
    produce(&job, base(), 0..count);
    job.kill_at_moments(&file, 2, "in");
    job.drain(&file);
    check(&job, count);
}

/// The topic takes less than the job believes: the batch is aborted and redone in ever smaller ones, both inputs from the
/// committed positions.
#[test]
fn what_the_broker_refuses_leaves_the_rest_exact() {
    let Some(cluster) = support::broker("joined records that the broker refuses") else { return };
    let job = job(cluster, "join-refused");
    let file = job.file(&topology());
    let (base, count) = (base(), 6_000);
    produce(&job, base, 0..100);
    job.drain(&file);
    let process = job.start(&file);
    produce(&job, base, 100..102);
    support::eventually(PATIENCE, "the job works", || {
        job.progress(&job.name, "in") + job.progress(&job.name, "customers") >= 102
    });
    lower_limit(&job);
    let large = format!(r#"{{"id":"large-{}"}}"#, random_text(30_000));
    let (key, timestamp) = (Some(&b"c7"[..]), Some(base + 1_000));
    job.produce(
        "in",
        [Record {
            partition: partition(key, 0, 4),
            timestamp,
            key,
            value: Some(large.as_bytes()),
            ..Record::default()
        }],
    );
    produce(&job, base, 102..count);
    let ends = |suffix| job.ends(suffix, Isolation::ReadCommitted).iter().sum::<i64>();
    let through = || ["in", "customers"].iter().all(|suffix| job.progress(&job.name, suffix) >= ends(suffix));
    support::eventually(PATIENCE, "all are through", through);
    process.stop();
    let refused =
        job.read("dead-letters").into_iter().filter(|letter| letter.header("semel-error-reason") == Some("broker"));
    assert_eq!(refused.map(|letter| letter.text().len()).collect::<Vec<_>>(), [large.len()]);
    // How far the other input was when it was read live is not said; but each order is there once, and no row goes back.
    live(&job, count);
}

/// Of records that arrive while the job runs: every order once, with versions of its customer that never go back.
#[track_caller]
fn live(job: &Job, count: u64) {
    let ids: BTreeSet<String> = (0..count).filter(|i| moment(*i).topic == "in").map(|i| format!("o{i}")).collect();
    assert_eq!(joined(job, "out").into_keys().collect::<BTreeSet<_>>(), ids);
    let mut last: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
    each_committed(&job.brokers, &job.admin, &job.topic("out"), |input| {
        let order: Value = serde_json::from_slice(input.value.unwrap()).unwrap();
        let (Some(key), Some(version)) = (input.key, order["customer"]["version"].as_u64()) else { return };
        let of = moment(version);
        assert_eq!((of.topic, of.key.as_deref().map(str::as_bytes)), ("customers", Some(key)));
        let last = last.entry(key.to_vec()).or_default();
        assert!(version >= *last, "{} after {last}: {order}", version);
        *last = version;
    });
    assert!(last.len() as u64 > CUSTOMERS / 2, "{} customers were found", last.len());
}

/// Produces to both topics while the job is handled, which may wait until it goes on in both; answers how many moments there were.
fn under_load(job: &Job, handle: impl FnOnce(&dyn Fn(&str))) -> u64 {
    let (stop, stopped) = channel::<()>();
    let base = base();
    std::thread::scope(|scope| {
        let load = scope.spawn(move || {
            let mut sent = 0;
            // A test that panics drops the sender, which ends this thread too.
            while stopped.recv_timeout(Duration::from_millis(50)) == Err(RecvTimeoutError::Timeout) {
                produce(job, base, sent..sent + 100);
                sent += 100;
            }
            sent
        });
        handle(&|what: &str| {
            job.moves(&job.name, "in", 500, what);
            job.moves(&job.name, "customers", 50, what);
        });
        drop(stop);
        load.join().unwrap()
    })
}

/// Processes that come, go, sleep and die, each with two workers: partitions of both topics move together, with the table.
#[test]
fn what_is_joined_moves_together() {
    let Some(cluster) = support::broker("joined partitions that move") else { return };
    let job = job(cluster, "join-moves");
    let file = job.file(&topology().replace("[kafka]\n", "membership = \"dynamic\"\nworkers = 2\n[kafka]\n"));
    let count = under_load(&job, |moves| {
        let first = job.start(&file);
        moves("the first works");
        let second = job.start(&file);
        support::eventually(PATIENCE, "the second has partitions", || second.log().contains("state restored"));
        moves("both work");
        // Longer than its session: what it had is with the other when it wakes.
        second.signal(Signal::SIGSTOP);
        support::pass(Duration::from_secs(8));
        moves("the first goes on alone");
        second.signal(Signal::SIGCONT);
        moves("both work again");
        second.kill();
        moves("the first has all");
        let third = job.start(&file);
        support::eventually(PATIENCE, "the third has partitions", || third.log().contains("state restored"));
        first.stop();
        moves("the third goes on");
        third.stop();
    });
    job.drain(&file);
    live(&job, count);
}

/// With the broker's assignor, which gives and takes partitions one by one.
#[test]
fn where_the_broker_assigns_what_is_joined_moves_together_too() {
    let Some(cluster) = support::broker("joined partitions that the broker assigns") else { return };
    let job = job(cluster, "join-broker");
    let properties = "[kafka]\nproperties = { \"group.protocol\" = \"consumer\" }\n";
    let text = topology()
        .replace("[kafka]\n", properties)
        .replace("session_timeout", "membership = \"dynamic\"\nsession_timeout");
    let file = job.file(&text);
    let count = under_load(&job, |moves| {
        let first = job.start(&file);
        moves("the first works");
        for _ in 0..2 {
            let second = job.start(&file);
            support::eventually(PATIENCE, "the second has partitions", || second.log().contains("state restored"));
            moves("both work");
            second.stop();
            moves("the first goes on alone");
        }
        first.stop();
    });
    job.drain(&file);
    live(&job, count);
}

#[test]
fn topics_of_unlike_partitions_are_refused_with_their_cure() {
    let Some(cluster) = support::broker("a join of unlike topics") else { return };
    let job = Job::new(cluster, "join-unlike", 4);
    job.admin.create_topic(&job.topic("customers"), 3, -1, &BTreeMap::new()).unwrap();
    let file = job.file(TOPOLOGY);
    let output = job.run_drain(&file);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let expected = format!(
        "topic {:?} has 4 partitions, and topic {:?}, which it is joined with, has 3",
        job.topic("in"),
        job.topic("customers")
    );
    assert!(text.contains(&expected) && text.contains("key = \"%key\""), "{text}");
    assert_eq!(job.partitions("out").len(), 0, "nothing was made");
    let args = ["check", "--online", file.to_str().unwrap()];
    let checked = wait_with_output(job.semel(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    assert_eq!(checked.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&checked.stdout).contains(&expected), "{checked:?}");
}

/// Orders that are partitioned by something else, in a topic of another width: they go through a topic of the job's own.
#[test]
fn orders_of_another_key_are_brought_to_their_customers_through_kills() {
    let Some(cluster) = support::broker("a join by another key") else { return };
    let job = Job::new(cluster, "join-key", 3);
    job.admin.create_topic(&job.topic("customers"), 4, -1, &BTreeMap::new()).unwrap();
    let text = TOPOLOGY.replace("kind = \"left\"\n", "kind = \"left\"\nkey = \".customer_id\"\n");
    let known = text.find("[transforms.known]").unwrap();
    let (sink, inner) = (text.find("[sinks.out]").unwrap(), text.find("[sinks.inner]").unwrap());
    let text = format!("{}{}", &text[..known], &text[sink..inner]);
    let file = job.file(&text.replace("[kafka]\n", "batch_records = 50\n[kafka]\n"));
    let (base, count) = (base(), 6_000);
    let customer = |i: u64| (format!("c{i}"), format!(r#"{{"id":"v{i}","version":{}}}"#, i + 1));
    let mut feed = Feed::new(&job, &job.topic("customers"));
    for (key, value) in (0..CUSTOMERS).map(customer) {
        let (key, value, timestamp) = (Some(key.as_bytes()), Some(value.as_bytes()), Some(base));
        feed.push(&Record { partition: partition(key, 0, 4), timestamp, key, value, ..Record::default() });
    }
    feed.flush();
    let order = |i: u64| {
        let customer = if i % 100 == 3 { "null".to_owned() } else { format!("\"c{}\"", i % CUSTOMERS) };
        format!(r#"{{"id":"o{i}","customer_id":{customer}}}"#)
    };
    let mut feed = Feed::new(&job, &job.topic("in"));
    for i in 0..count {
        let (key, value) = (format!("o{i}"), order(i));
        let (key, value) = (Some(key.as_bytes()), Some(value.as_bytes()));
        // Later than every customer.
        let timestamp = Some(base + 1 + i as i64);
        feed.push(&Record { partition: partition(key, 0, 3), timestamp, key, value, ..Record::default() });
    }
    feed.flush();
    job.kill_at_moments(&file, 3, "all.repartition");
    job.drain(&file);
    assert_eq!(job.partitions("all.repartition").len(), 4, "as many as the table's topic");
    let found = joined(&job, "out");
    assert_eq!(found.len() as u64, count);
    for i in 0..count {
        let row = match i % 100 {
            3 => Value::Null,
            _ => json!({ "id": format!("v{}", i % CUSTOMERS), "version": i % CUSTOMERS + 1 }),
        };
        assert_eq!(found[&format!("o{i}")], row, "o{i}");
    }
}

/// An order waits for its customer no longer than it is told to.
#[test]
fn an_order_waits_for_a_customer_that_comes_late_and_commits_go_on() {
    let Some(cluster) = support::broker("a join whose inputs wait for each other") else { return };
    let job = job(cluster, "join-idle");
    let file = job.file(&topology().replace("[kafka]\n", "max_task_idle = \"5s\"\n[kafka]\n"));
    let base = base();
    let process = job.start(&file);
    let record = |topic: &str, time: i64, value: &str| {
        let (key, value) = (Some(&b"c1"[..]), Some(value.as_bytes()));
        let record =
            Record { partition: partition(key, 0, 4), timestamp: Some(base + time), key, value, ..Record::default() };
        job.produce(topic, [record]);
    };
    record("customers", 0, r#"{"id":"v1","version":1}"#);
    support::eventually(PATIENCE, "the table has a row", || job.progress(&job.name, "customers") == 1);
    record("in", 20, r#"{"id":"o1"}"#);
    support::pass(Duration::from_secs(1));
    record("customers", 10, r#"{"id":"v2","version":2}"#);
    support::eventually(PATIENCE, "the order is through", || job.progress(&job.name, "in") == 1);
    process.stop();
    assert_eq!(joined(&job, "out"), BTreeMap::from([("o1".to_owned(), json!({ "id": "v2", "version": 2 }))]));
}

/// The topology of the repository, on a broker.
#[test]
fn orders_with_customers_runs_to_its_end() {
    let Some(cluster) = support::broker("orders-with-customers.toml") else { return };
    let job = job(cluster, "join-file");
    let text =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/orders-with-customers.toml")).unwrap();
    let text = text.replace("topics = [\"customers\"]", &format!("topics = [\"{}\"]", job.topic("customers")));
    let text = text.replace("topics = [\"placed-orders\"]", &format!("topics = [\"{}\"]", job.topic("in")));
    let text = text.split_once("[[tests]]").unwrap().0.replace("orders-with-customers", &job.name);
    fs::write(job.path(), text).unwrap();
    let at = |second: u64| format!("2026-01-31T12:{:02}:{:02}Z", second / 60, second % 60);
    let customer = |i: u64| {
        let (n, city) = (i % 10, if i < 10 { "London" } else { "Paris" });
        (
            format!("c{n}"),
            format!(r#"{{"event_id":"v{i}","name":"N{n}","city":"{city}","changed_at":"{}"}}"#, at(60 * i)),
        )
    };
    job.produce_keyed("customers", 4, (0..20).map(customer));
    let order =
        |i: u64| (format!("c{}", i % 12), format!(r#"{{"event_id":"o{i}","id":"o{i}","created_at":"{}"}}"#, at(i)));
    job.produce_keyed("in", 4, (0..1200).map(order));
    job.drain(&job.path());
    let labels: BTreeMap<String, String> = job
        .read("orders")
        .iter()
        .map(|order| {
            let order: Value = serde_json::from_str(order.text()).unwrap();
            (order["id"].as_str().unwrap().to_owned(), order["label"].as_str().unwrap().to_owned())
        })
        .collect();
    let nobody = job.read("of-nobody").len();
    // A customer is there from its first minute on, and elsewhere ten minutes later.
    let label = |i: u64| {
        let n = i % 12;
        let known = n < 10 && i >= 60 * n;
        let city = if i >= 60 * (n + 10) { "Paris" } else { "London" };
        known.then(|| (format!("o{i}"), format!("N{n}, {city}")))
    };
    let expected: BTreeMap<String, String> = (0..1200).filter_map(label).collect();
    assert_eq!(labels, expected);
    assert_eq!(nobody, 1200 - expected.len());
}

/// Guarantees without transactions: a crash may repeat an order or lose one, and the table is the fold of its topic all the
/// same once all is through.
#[test]
fn under_at_least_once_no_order_is_lost() {
    let Some(cluster) = support::broker("kill -9 of an at-least-once job that joins") else { return };
    let job = job(cluster, "join-alo");
    let settings = "guarantee = \"at-least-once\"\nbatch_records = 50\n[kafka]\n";
    let file = job.file(&topology().replace("[kafka]\n", settings));
    let count = 6_000;
    produce(&job, base(), 0..count);
    job.kill_at_moments(&file, 2, "in");
    job.drain(&file);
    let mut found = BTreeSet::new();
    each_committed(&job.brokers, &job.admin, &job.topic("out"), |input| {
        let order: Value = serde_json::from_slice(input.value.unwrap()).unwrap();
        found.insert(order["id"].as_str().unwrap().to_owned());
    });
    assert_eq!(found, expected(count).0.into_keys().collect());
}
