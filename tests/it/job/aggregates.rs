//! Aggregates under faults: whatever happens, the last update of each key is the fold of its committed records, and every
//! update is there once.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use semel::cluster::Server;
use semel::kafka::Isolation;
use semel::record::Input;
use serde_json::Value;

use super::harness::{Job, Load, PATIENCE, Record, each_committed};
use super::records::{lower_limit, random_text};
use crate::support;

const TOPOLOGY: &str = r#"
name = "NAME"
[kafka]
[sources.orders]
type = "kafka"
topics = ["NAME.in"]
event_id = ".id"
[transforms.live]
type = "filter"
inputs = ["orders"]
condition = '.status != "cancelled"'
[transforms.totals]
type = "aggregate"
inputs = ["live"]
key_field = "customer"
fields.orders = "count"
fields.revenue = { sum = ".total" }
fields.largest = { max = ".total" }
fields.last = { last = ".id" }
fields.sizes = { distinct_count = ".size" }
[sinks.out]
type = "kafka"
inputs = ["totals"]
topic = "NAME.out"
create = { partitions = 4 }
"#;

const CUSTOMERS: u64 = 40;

/// The `i`-th order: cents that no double adds up exactly, now and then a total that is none.
fn order(i: u64) -> (String, String) {
    let status = if i % 11 == 3 { "cancelled" } else { "paid" };
    let total = match i % 97 {
        5 => "\"broken\"".to_owned(),
        _ => format!("{}.{:02}", i % 1000, i % 100),
    };
    let size = i % 7;
    (format!("c{}", i % CUSTOMERS), format!(r#"{{"id":"e{i}","status":"{status}","total":{total},"size":{size}}}"#))
}

/// What a customer's orders amount to, worked out without the product.
#[derive(Clone, Debug, Default, PartialEq)]
struct Totals {
    orders: u64,
    cents: u64,
    largest: u64,
    last: String,
    sizes: std::collections::BTreeSet<u64>,
}

impl Totals {
    fn add(&mut self, order: &Value, cents: u64) {
        self.orders += 1;
        self.cents += cents;
        self.largest = self.largest.max(cents);
        self.last = order["id"].as_str().unwrap().to_owned();
        self.sizes.insert(order["size"].as_u64().unwrap());
    }

    /// As an update writes it.
    fn update(&self, customer: &str) -> String {
        let Totals { orders, cents, largest, last, sizes } = self;
        let last = Value::from(last.as_str());
        format!(
            r#"{{"customer":"{customer}","orders":{orders},"revenue":{},"largest":{},"last":{last},"sizes":{}}}"#,
            shortest(*cents),
            largest_text(*largest),
            sizes.len()
        )
    }
}

fn shortest(cents: u64) -> String {
    let text = format!("{}.{:02}", cents / 100, cents % 100);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The greatest keeps the digits that it came with.
fn largest_text(cents: u64) -> String {
    format!("{}.{:02}", cents / 100, cents % 100)
}

/// Cents of an order that counts.
fn counted(order: &Value, text: &str) -> Option<u64> {
    if order["status"] == "cancelled" || order["total"].is_string() {
        return None;
    }
    let (_, rest) = text.split_once("\"total\":").unwrap();
    let (whole, cents) = rest.split(',').next().unwrap().split_once('.').unwrap();
    Some(whole.parse::<u64>().unwrap() * 100 + cents.parse::<u64>().unwrap())
}

/// Compares every update of every customer with the fold of the input: the n-th update is that of the first n orders.
#[track_caller]
fn check(job: &Job, skip: impl Fn(&Value) -> bool) -> u64 {
    let text = |bytes: Option<&[u8]>| String::from_utf8(bytes.expect("no tombstone").to_vec()).unwrap();
    let each = |suffix: &str, see: &mut dyn FnMut(&Input<'_>)| {
        each_committed(&job.brokers, &job.admin, &job.topic(suffix), see);
    };
    let mut totals: BTreeMap<String, Totals> = BTreeMap::new();
    let mut expected: BTreeMap<String, Vec<String>> = BTreeMap::new();
    each("in", &mut |input| {
        let (customer, text) = (text(input.key), text(input.value));
        let order: Value = serde_json::from_str(&text).unwrap();
        let Some(cents) = counted(&order, &text).filter(|_| !skip(&order)) else { return };
        let own = totals.entry(customer.clone()).or_default();
        own.add(&order, cents);
        expected.entry(customer.clone()).or_default().push(own.update(&customer));
    });
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut ids = std::collections::BTreeSet::new();
    each("out", &mut |input| {
        found.entry(text(input.key)).or_default().push(text(input.value));
        ids.insert(text(input.headers.last("semel-event-id").flatten()));
    });
    let updates: usize = expected.values().map(Vec::len).sum();
    for (customer, expected) in &expected {
        let found = found.get(customer).map_or(&[][..], Vec::as_slice);
        let differs = expected.iter().zip(found).position(|(expected, found)| expected != found);
        let at = differs.unwrap_or(expected.len().min(found.len()));
        assert!(
            expected == found,
            "{customer}: {} updates expected, {} found; the first that differs is {at}:\n  {:?}\n  {:?}",
            expected.len(),
            found.len(),
            expected.get(at),
            found.get(at)
        );
    }
    assert_eq!(found.len(), expected.len(), "customers");
    assert_eq!(ids.len(), updates, "every update has an id of its own");
    updates as u64
}

/// Five kills under a light load; `SEMEL_KILLS=10` is the long form.
#[test]
fn an_aggregate_killed_at_random_moments_is_the_fold_of_its_input() {
    let Some(cluster) = support::broker("kill -9 of a job that keeps state") else { return };
    let job = Job::new(cluster, "aggregate-kill", 4);
    let file = job.file(TOPOLOGY);
    std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 5_000, 4, order);
        job.kill_at_moments(&file, 5, "in");
        load.stop()
    });
    job.drain(&file);
    let updates = check(&job, |_| false);
    let at = |positions: Vec<Option<i64>>| positions.into_iter().map(|p| p.unwrap_or(0)).collect::<Vec<_>>();
    assert_eq!(at(job.positions(&job.name, "in")), job.ends("in", Isolation::ReadCommitted));
    println!("{updates} updates, each what the fold says, none lost, none doubled");
}

/// Places that only a job with state comes by.
#[test]
fn an_aggregate_killed_at_each_place_of_its_state_is_the_fold_of_its_input() {
    let Some(cluster) = support::broker("a job that dies while it keeps its state") else { return };
    let job = Job::new(cluster, "aggregate-places", 4);
    let file = job.file(TOPOLOGY);
    std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 3_000, 4, order);
        for place in ["before-apply:3", "in-restore:2", "after-apply:5", "before-checkpoint:2", "before-checkpoint:6"] {
            let mut process = job.start_with(&file, &[(semel::crash::VARIABLE, place)]);
            support::eventually(PATIENCE, place, || !process.is_running());
        }
        load.stop()
    });
    job.drain(&file);
    check(&job, |_| false);
}

#[test]
fn state_in_memory_survives_a_kill_too() {
    let Some(cluster) = support::broker("kill -9 of a job with its state in memory") else { return };
    let job = Job::new(cluster, "aggregate-memory", 4);
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", "stores = \"memory\"\n[kafka]\n"));
    std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 5_000, 4, order);
        for _ in 0..2 {
            let before = job.progress(&job.name, "in");
            let process = job.start(&file);
            support::eventually(PATIENCE, "the job makes progress", || job.progress(&job.name, "in") > before);
            process.kill();
        }
        load.stop()
    });
    job.drain(&file);
    check(&job, |_| false);
}

#[test]
fn without_its_state_folder_a_job_restores_from_the_changelog() {
    let Some(cluster) = support::broker("a job whose state folder is gone") else { return };
    let job = Job::new(cluster, "aggregate-folder", 4);
    // The former instance is in the group until its session is over.
    let settings = "session_timeout = \"6s\"\ntransaction_timeout = \"3s\"\n[kafka]\n";
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", settings));
    job.produce_keyed("in", 4, (0..1_000).map(order));
    job.drain(&file);
    let state = job.path().with_file_name("state");
    assert!(state.is_dir());
    fs::remove_dir_all(state).unwrap();
    job.produce_keyed("in", 4, (1_000..2_000).map(order));
    job.drain(&file);
    check(&job, |_| false);
}

/// How many changelog records a run read before it began.
fn restored(log: &str) -> u64 {
    let counts = log.lines().filter(|line| line.contains("state restored"));
    let count = |line: &str| {
        // Logs may be coloured.
        let (_, rest) = line.split_once("records")?;
        rest.trim_start_matches(|c: char| !c.is_ascii_digit())
            .split(|c: char| !c.is_ascii_digit())
            .next()?
            .parse::<u64>()
            .ok()
    };
    let counts: Vec<u64> = counts.map(|line| count(line).unwrap_or_else(|| panic!("{line}"))).collect();
    assert!(!counts.is_empty(), "nothing was restored: {log}");
    counts.iter().sum()
}

#[test]
fn a_restart_reads_the_tail_of_the_changelog_alone() {
    let Some(cluster) = support::broker("a job that keeps its state on disk") else { return };
    let job = Job::new(cluster, "aggregate-tail", 4);
    let file = job.file(TOPOLOGY);
    let through = |count: u64| {
        support::eventually(PATIENCE, "all are through", || job.progress(&job.name, "in") >= count as i64);
    };
    let process = job.start(&file);
    job.produce_keyed("in", 4, (0..4_000).map(order));
    through(4_000);
    // The next batches ask for the ends and are told, longer than bounds rest; by the last the one before is on disk.
    for count in [4_010, 4_020, 4_030, 4_040] {
        support::pass(Duration::from_secs(3));
        job.produce_keyed("in", 4, (count - 10..count).map(order));
        through(count);
    }
    process.kill();
    let run = |count: u64| {
        job.produce_keyed("in", 4, (count - 1..count).map(order));
        let output = job.run_drain(&file);
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{log}");
        restored(&log)
    };
    let tail = run(4_041);
    assert!(tail < 100, "{tail} records were read after kill -9");
    let tail = run(4_042);
    assert!(tail < 100, "{tail} records were read after a stop in good order");
    check(&job, |_| false);

    // Yesterday's files, and a file that is none.
    let stores =
        fs::read_dir(job.path().with_file_name("state").join("semel").join(&job.name).join(&job.name)).unwrap();
    let stores =
        stores.map(|slot| slot.unwrap().path().join("stores")).find(|stores| stores.is_dir()).expect("stores on disk");
    let yesterday = job.path().with_file_name("yesterday");
    copy(&stores, &yesterday);
    job.produce_keyed("in", 4, (4_042..4_142).map(order));
    job.drain(&file);
    fs::remove_dir_all(&stores).unwrap();
    copy(&yesterday, &stores);
    let read = run(4_143);
    assert!((50..200).contains(&read), "{read} records were read for yesterday's files");
    fs::write(stores.join("version"), b"no version of it").unwrap();
    assert!(run(4_144) > 4_000 / 2, "all is read for files that say nothing");
    check(&job, |_| false);
}

fn copy(from: &std::path::Path, to: &std::path::Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// Transactions that time out while the process sleeps: what they would have written leaves the state too.
#[test]
fn an_abort_drops_the_state_of_its_batch() {
    if !support::online("transactions that the broker ends") {
        return;
    }
    let often = [("transaction.abort.timed.out.transaction.cleanup.interval.ms", "200")];
    let cluster = support::private_server(Server::Kafka, &often);
    let job = Job::new(&cluster, "aggregate-abort", 4);
    let settings = "transaction_timeout = \"2s\"\nsession_timeout = \"15s\"\ncommit_interval = \"500ms\"\n[kafka]\n";
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", settings));
    std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, 4, order);
        let mut process = job.start(&file);
        let moves = |what: &str| job.moves(&job.name, "in", 0, what);
        moves("the job works");
        for _ in 0..4 {
            process.signal(Signal::SIGSTOP);
            // Longer than a transaction may be open.
            support::pass(Duration::from_millis(3_500));
            process.signal(Signal::SIGCONT);
            moves("it goes on after it was asleep");
        }
        let log = process.log();
        assert!(process.is_running() && log.contains("the batch is given up"), "nothing was aborted: {log}");
        process.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, |_| false);
}

/// The topic takes less than the job believes: the batch is aborted and redone in ever smaller ones until the record is
/// alone, each time from the committed state.
#[test]
fn what_the_broker_refuses_counts_nowhere() {
    let Some(cluster) = support::broker("updates that the broker refuses") else { return };
    let job = Job::new(cluster, "aggregate-refused", 4);
    let file = job.file(TOPOLOGY);
    job.produce_keyed("in", 4, (0..200).map(order));
    job.drain(&file);
    let process = job.start(&file);
    let count = |count: i64| job.progress(&job.name, "in") >= count;
    job.produce_keyed("in", 4, (200..201).map(order));
    support::eventually(PATIENCE, "the job works", || count(201));
    lower_limit(&job);
    let large = format!(r#"{{"id":"large-{}","status":"paid","total":1.00,"size":3}}"#, random_text(30_000));
    let records = (201..400).map(|i| if i == 300 { ("c7".to_owned(), large.clone()) } else { order(i) });
    job.produce_keyed("in", 4, records);
    support::eventually(PATIENCE, "all are through", || count(400));
    process.stop();
    check(&job, |order| order["id"].as_str().is_some_and(|id| id.starts_with("large-")));
    let letters = job.read("dead-letters");
    assert_eq!(letters.iter().filter(|letter| letter.header("semel-error-reason") == Some("broker")).count(), 1);
}

/// Two processes one after the other, each with part of the partitions: state moves with them.
#[test]
fn state_moves_with_its_partitions() {
    let Some(cluster) = support::broker("partitions that move with their state") else { return };
    let job = Job::new(cluster, "aggregate-moves", 4);
    // Members come and go at once.
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", "membership = \"dynamic\"\n[kafka]\n"));
    std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, 4, order);
        let moves = |what: &str| job.moves(&job.name, "in", 1_000, what);
        let first = job.start(&file);
        moves("the first works");
        for _ in 0..3 {
            let second = job.start(&file);
            support::eventually(PATIENCE, "the second has partitions", || second.log().contains("state restored"));
            moves("both work");
            second.stop();
            moves("the first goes on alone");
        }
        first.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, |_| false);
}

/// State that is gone or would begin anew is refused; a reset clears it with the positions.
#[test]
fn positions_without_their_state_are_refused_until_a_reset() {
    let Some(cluster) = support::broker("state that is gone") else { return };
    let job = Job::new(cluster, "aggregate-reset", 2);
    let text = TOPOLOGY.replace("[kafka]\n", "session_timeout = \"6s\"\ntransaction_timeout = \"3s\"\n[kafka]\n");
    let file = job.file(&text);
    job.produce_keyed("in", 2, (0..300).map(order));
    job.drain(&file);
    let refused = |text: &str| {
        let output = job.run_drain(&job.file(text));
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{errors}");
        errors
    };
    let renamed = text.replace("[transforms.totals]", "[transforms.sums]").replace("[\"totals\"]", "[\"sums\"]");
    let errors = refused(&renamed);
    assert!(errors.contains("a renamed node keeps its state under its former name"), "{errors}");

    job.admin.delete_topics(&[&job.topic("totals.changelog")]).unwrap();
    let errors = refused(&text);
    assert!(errors.contains("the state is gone"), "{errors}");
    let file = job.file(&text);
    let args = ["reset", file.to_str().unwrap(), "--to", "earliest", "--yes"];
    support::eventually(PATIENCE, "nobody is in the group", || job.semel(&args).output().unwrap().status.success());
    job.admin.delete_topics(&[&job.topic("out")]).unwrap();
    job.drain(&file);
    check(&job, |_| false);
}

/// State belongs to what the aggregate says, not to its name alone: under another expression it would mix what was worked
/// out in two ways.
#[test]
fn state_of_another_meaning_is_refused_until_it_has_another_name() {
    let Some(cluster) = support::broker("an aggregate that changes under its state") else { return };
    let job = Job::new(cluster, "aggregate-meaning", 2);
    let settings = "session_timeout = \"6s\"\ntransaction_timeout = \"3s\"\n[kafka]\n";
    let text = TOPOLOGY.replace("[kafka]\n", settings);
    let go_on = |text: &str, from: u64| {
        job.produce_keyed("in", 2, (from..from + 100).map(order));
        job.drain(&job.file(text));
    };
    let refused = |text: &str, why: &str| {
        let file = job.file(text);
        let output = job.run_drain(&file);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(why), "{errors}");
        let check = job.semel(&["check", file.to_str().unwrap(), "--online"]).output().unwrap();
        let findings = String::from_utf8_lossy(&check.stdout).into_owned();
        assert_eq!(check.status.code(), Some(1), "{findings}");
        assert!(findings.contains("error[state]") && findings.contains(why), "{findings}");
    };
    go_on(&text, 0);
    // The same functions with other expressions, which what each value begins with does not tell.
    let other = text.replace("{ sum = \".total\" }", "{ sum = \".size\" }");
    refused(&other, "`fields.revenue` was sum of .total, and is sum of .size");
    go_on(&text, 100);
    check(&job, |_| false);

    // Another name is another state: it begins with nothing, at the positions of the job.
    let renamed =
        |text: &str| text.replace("[transforms.totals]", "[transforms.sums]").replace("[\"totals\"]", "[\"sums\"]");
    go_on(&renamed(&other), 200);
    let last: Value = serde_json::from_str(job.read("out").pop().unwrap().text()).unwrap();
    assert!(last["orders"].as_u64().unwrap() <= 3, "{last}");
    // The first one lacks what passed meanwhile, whatever it says.
    refused(&text, "\"totals\" is in the file again, but the job ran without it");
    let file = job.file(&text);
    let args = ["reset", file.to_str().unwrap(), "--to", "earliest", "--yes"];
    support::eventually(PATIENCE, "nobody is in the group", || job.semel(&args).output().unwrap().status.success());
    job.admin.delete_topics(&[&job.topic("out"), &job.topic("dead-letters")]).unwrap();
    go_on(&text, 300);
    check(&job, |_| false);

    // Without the memory of the job the first bytes of each value still tell other fields.
    job.admin.delete_topics(&[&job.topic("job")]).unwrap();
    job.produce_keyed("in", 2, (400..401).map(order));
    let other = job.file(&text.replace("fields.largest = { max", "fields.least = { min"));
    let output = job.run_drain(&other);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(5), "{errors}");
    assert!(errors.contains("an aggregate with other fields"), "{errors}");
}

/// A dead letter that is replayed is folded when it comes, in a job that has all partitions.
#[test]
fn a_replayed_record_is_folded_once() {
    let Some(cluster) = support::broker("a replay into state") else { return };
    let job = Job::new(cluster, "aggregate-replay", 2);
    let strict = TOPOLOGY.replace("'.status != \"cancelled\"'", "'assert!(.size != 3)'");
    let file = job.file(&strict);
    let record =
        |i: u64, size: u64| (format!("c{i}"), format!(r#"{{"id":"e{i}","status":"paid","total":1.25,"size":{size}}}"#));
    job.produce_keyed("in", 2, [record(1, 1), record(1, 3), record(2, 3), record(1, 2)].into_iter());
    job.drain(&file);
    let file = job.file(TOPOLOGY);
    let replay = job.semel(&["dlq", "replay", file.to_str().unwrap()]).output().unwrap();
    assert!(replay.status.success(), "{}", String::from_utf8_lossy(&replay.stderr));
    job.drain(&file);
    // The batch of a replayed record commits where its own partition stands, so that position and state go on together.
    job.produce_keyed("in", 2, [record(1, 4), record(2, 4)].into_iter());
    job.drain(&file);
    let mut last: BTreeMap<String, Value> = BTreeMap::new();
    for update in job.read("out") {
        let update: Value = serde_json::from_str(update.text()).unwrap();
        last.insert(update["customer"].as_str().unwrap().to_owned(), update);
    }
    let orders = |customer: &str| (last[customer]["orders"].clone(), last[customer]["revenue"].to_string());
    assert_eq!(orders("c1"), (Value::from(4), "5".to_owned()));
    assert_eq!(orders("c2"), (Value::from(2), "2.5".to_owned()));
    assert_eq!(job.read("dead-letters").len(), 2);
}

/// Restoring ends by position: markers and records of other stages' batches lie behind the last of the state's own.
#[test]
fn a_changelog_of_markers_and_gaps_is_read_to_its_end() {
    let Some(cluster) = support::broker("a changelog that ends in markers") else { return };
    let job = Job::new(cluster, "aggregate-markers", 1);
    let file = job.file(TOPOLOGY);
    let value = |text: &'static str| Record { key: Some(b"c1"), value: Some(text.as_bytes()), ..Record::default() };
    job.produce("in", [value(r#"{"id":"a","status":"paid","total":1.00,"size":1}"#)]);
    job.drain(&file);
    // Only a commit marker follows the record; then batches that change no state.
    for _ in 0..2 {
        job.produce("in", [value(r#"{"id":"b","status":"cancelled","total":1.00,"size":1}"#)]);
        job.drain(&file);
    }
    job.produce("in", [value(r#"{"id":"c","status":"paid","total":2.50,"size":1}"#)]);
    job.drain(&file);
    assert_eq!(check(&job, |_| false), 2);
}

#[test]
fn weaker_guarantees_fold_the_same_where_nothing_crashes() {
    let Some(cluster) = support::broker("aggregates under weaker guarantees") else { return };
    for guarantee in ["at-least-once", "at-most-once"] {
        let job = Job::new(cluster, &format!("aggregate-{guarantee}"), 4);
        let file = job.file(&TOPOLOGY.replace("[kafka]\n", &format!("guarantee = \"{guarantee}\"\n[kafka]\n")));
        for from in [0, 2_000] {
            job.produce_keyed("in", 4, (from..from + 2_000).map(order));
            job.drain(&file);
        }
        check(&job, |_| false);
    }
}
