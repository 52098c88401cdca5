//! Windows under faults: every update of every window is that of its records in order, late ones stay late through kills,
//! and closed windows leave the state.

use std::collections::{BTreeMap, BTreeSet};

use semel::record::Input;
use serde_json::Value;

use super::harness::{Job, Load, PATIENCE, each_committed};
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
    let mut orders: BTreeMap<i32, Vec<(String, String)>> = BTreeMap::new();
    each_committed(&job.brokers, &job.admin, &job.topic("in"), |input: &Input<'_>| {
        let text = |bytes: Option<&[u8]>| String::from_utf8(bytes.unwrap().to_vec()).unwrap();
        orders.entry(input.partition).or_default().push((text(input.key), text(input.value)));
    });
    let (mut updates, mut late) = (Updates::new(), 0);
    for orders in orders.values() {
        let (more, of_these) = fold_of(orders.iter());
        updates.extend(more);
        late += of_these;
    }
    (updates, late)
}

/// [`fold`] of the orders of one partition.
fn fold_of<'a>(orders: impl Iterator<Item = &'a (String, String)>) -> (Updates, u64) {
    let mut newest = 0;
    let mut windows: BTreeMap<(String, u64), (u64, u64)> = BTreeMap::new();
    let mut updates = Updates::new();
    let mut late = 0;
    for (customer, order) in orders {
        let order: Value = serde_json::from_str(order).unwrap();
        let at = order["at"].as_u64().unwrap();
        let start = at / 5_000 * 5_000;
        if start + 7_000 <= newest {
            late += 1;
            continue;
        }
        newest = at.max(newest);
        let (count, total) = windows.entry((customer.clone(), start)).or_default();
        (*count, *total) = (*count + 1, *total + order["total"].as_u64().unwrap());
        updates.entry(customer.clone()).or_default().push((start, *count, *total));
    }
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
fn every_record_is_counted_as_applied_dropped_late_or_rejected() {
    let Some(cluster) = support::broker("late records") else { return };
    for (rule, name) in [("drop", "windows-late"), ("reject", "windows-late-reject")] {
        let job = Job::new(cluster, name, 1);
        let live = "[transforms.live]\ntype = \"filter\"\ninputs = [\"orders\"]\ncondition = '.total != 3'\n[transforms.totals]";
        let text = TOPOLOGY.replace("grace = \"2s\"", &format!("grace = \"2s\", late = \"{rule}\", emit = \"close\""));
        let text = text.replace("inputs = [\"orders\"]", "inputs = [\"live\"]").replace("[transforms.totals]", live);
        let file = job.file(&text);
        // One in fifty is filtered, one in fifty has a total that is none; both move no time.
        let order = |i| {
            let (key, value) = order(i);
            (key, if i % 50 == 9 { value.replace("\"total\":9", "\"total\":\"x\"") } else { value })
        };
        let orders: Vec<_> = (0..2_000).map(order).collect();
        job.produce_keyed("in", 1, orders.iter().cloned());
        let report = job.drain(&file);
        let stage = &report["stages"][0];
        let number = |name: &str| stage[name].as_u64().unwrap();
        let late = fold_of(orders.iter().filter(|(_, order)| !order.contains("\"x\"") && !order.contains(":3}"))).1;
        assert!(late >= 15);
        let rejected = 40 + if rule == "reject" { late } else { 0 };
        assert_eq!((number("in"), number("dropped"), number("rejected")), (2_000, 40, rejected), "{stage}");
        assert_eq!(number("late"), if rule == "drop" { late } else { 0 }, "{stage}");
        let sum = ["applied", "dropped", "late", "rejected", "skipped"].map(number).iter().sum::<u64>();
        assert_eq!(sum, number("in"), "{stage}");
        assert_eq!(stage["windows"]["closed"].as_u64(), Some(number("out")), "what came out are windows: {stage}");
        assert_eq!(job.read("dead-letters").len() as u64, rejected);
    }
}

const FINALS: &str = r#"
name = "NAME"
[kafka]
[sources.orders]
type = "kafka"
topics = ["NAME.in"]
event_id = ".id"
event_time = ".at"
[transforms.hops]
type = "aggregate"
inputs = ["orders"]
window = { hopping = "5s", advance = "2s", grace = "2s", emit = "close" }
fields.orders = "count"
fields.total = { sum = ".total" }
[transforms.visits]
type = "aggregate"
inputs = ["orders"]
window = { session = "1s", grace = "2s", emit = "close" }
fields.orders = "count"
fields.total = { sum = ".total" }
[sinks.hops_out]
type = "kafka"
inputs = ["hops"]
topic = "NAME.hops"
create = { partitions = 4, config = { "retention.ms" = "-1" } }
[sinks.visits_out]
type = "kafka"
inputs = ["visits"]
topic = "NAME.visits"
create = { partitions = 4, config = { "retention.ms" = "-1" } }
"#;

/// A customer orders for three seconds, then others do: visits end, and late orders join them.
fn visit(i: u64) -> (String, String) {
    (format!("c{}", i / 300 % 8), order(i).1)
}

/// A window: its end, its customer, its start, orders and total.
type Window = (u64, String, u64, u64, u64);

/// What is put out of windows that have closed, by partition and in order, as the rules say it: of hops and of visits.
fn finals(job: &Job) -> [BTreeMap<i32, Vec<Window>>; 2] {
    let mut time: BTreeMap<i32, u64> = BTreeMap::new();
    let mut open: [BTreeMap<i32, Vec<Window>>; 2] = Default::default();
    let mut finals: [BTreeMap<i32, Vec<Window>>; 2] = Default::default();
    each_committed(&job.brokers, &job.admin, &job.topic("in"), |input: &Input<'_>| {
        let order: Value = serde_json::from_slice(input.value.unwrap()).unwrap();
        let customer = String::from_utf8(input.key.unwrap().to_vec()).unwrap();
        let (at, total) = (order["at"].as_u64().unwrap(), order["total"].as_u64().unwrap());
        let now = time.entry(input.partition).or_default();
        *now = at.max(*now);
        // A hop has closed two seconds after its end; a visit three after its last order, and not just then.
        let closed: [fn(u64, u64) -> bool; 2] = [|end, now| end + 2_000 <= now, |end, now| end + 3_000 < now];
        let (hops, visits) = (0, 1);
        let windows = open[hops].entry(input.partition).or_default();
        for start in (at / 2_000 * 2_000 - 4_000..=at).step_by(2_000).filter(|start| at < start + 5_000) {
            let end = start + 5_000;
            if closed[hops](end, *now) {
                continue;
            }
            match windows.iter_mut().find(|window| (window.0, &window.1) == (end, &customer)) {
                Some(window) => (window.3, window.4) = (window.3 + 1, window.4 + total),
                None => windows.push((end, customer.clone(), start, 1, total)),
            }
        }
        let windows = open[visits].entry(input.partition).or_default();
        let mut one = (at, customer.clone(), at, 1, total);
        let mut rest = Vec::new();
        for window in windows.drain(..) {
            if window.1 == customer && window.2 <= at + 1_000 && at <= window.0 + 1_000 {
                one = (one.0.max(window.0), one.1, one.2.min(window.2), one.3 + window.3, one.4 + window.4);
            } else {
                rest.push(window);
            }
        }
        if !closed[visits](one.0, *now) {
            rest.push(one);
        }
        *windows = rest;
        for kind in [hops, visits] {
            let windows = open[kind].entry(input.partition).or_default();
            let (mut over, rest): (Vec<Window>, Vec<Window>) =
                windows.drain(..).partition(|window| closed[kind](window.0, *now));
            over.sort();
            finals[kind].entry(input.partition).or_default().extend(over);
            *windows = rest;
        }
    });
    finals
}

/// What was put out, by partition and in order.
fn found(job: &Job, topic: &str) -> BTreeMap<i32, Vec<Window>> {
    let mut found: BTreeMap<i32, Vec<Window>> = BTreeMap::new();
    let mut ids = BTreeSet::new();
    each_committed(&job.brokers, &job.admin, &job.topic(topic), |input| {
        let shown: Value = serde_json::from_slice(input.value.unwrap()).unwrap();
        let time = |name: &str| {
            let text = shown[name].as_str().unwrap();
            chrono::DateTime::parse_from_rfc3339(text).unwrap().timestamp_millis() as u64
        };
        let number = |name: &str| shown[name].as_u64().unwrap();
        let customer = shown["key"].as_str().unwrap().to_owned();
        let window = (time("window_end"), customer, time("window_start"), number("orders"), number("total"));
        found.entry(input.partition).or_default().push(window);
        assert!(ids.insert(input.headers.last("semel-event-id").flatten().unwrap().to_vec()), "an id twice");
    });
    found
}

#[test]
fn windows_that_are_put_out_on_close_are_there_once_and_in_order_through_kills() {
    let Some(cluster) = support::broker("kill -9 of a job that puts windows out on close") else { return };
    let job = Job::new(cluster, "windows-close", 4);
    let file = job.file(FINALS);
    std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 3_000, 4, visit);
        job.kill_at_moments(&file, 4, "in");
        load.stop()
    });
    job.drain(&file);
    let expected = finals(&job);
    for (topic, expected) in ["hops", "visits"].into_iter().zip(&expected) {
        let found = found(&job, topic);
        let windows: usize = expected.values().map(Vec::len).sum();
        assert!(windows > 40, "{windows} {topic}");
        for (partition, expected) in expected {
            let found = found.get(partition).map_or(&[][..], Vec::as_slice);
            let differs = expected.iter().zip(found).position(|(expected, found)| expected != found);
            let at = differs.map(|at| (&expected[at], &found[at]));
            assert_eq!((at, expected.len()), (None, found.len()), "{topic} {partition}");
        }
        println!("{windows} {topic}, each once and in order");
    }
}

/// More windows than fit into one turn, or into the memory of the job's queues, close by one record.
#[test]
fn windows_of_many_keys_close_by_one_record() {
    const KEYS: u64 = 30_000;
    let Some(cluster) = support::broker("many windows that close at once") else { return };
    let job = Job::new(cluster, "windows-many", 1);
    let file = job.file(&FINALS.replace("[kafka]\n", "memory = \"3MiB\"\n[kafka]\n"));
    let order = |i: u64| (format!("k{i:06}"), format!(r#"{{"id":"e{i}","at":{},"total":1}}"#, BASE));
    job.produce_keyed("in", 1, (0..KEYS).map(order));
    job.produce_keyed(
        "in",
        1,
        [("z".to_owned(), format!(r#"{{"id":"z","at":{},"total":1}}"#, BASE + 60_000))].into_iter(),
    );
    let report = job.drain(&file);
    for (topic, windows) in [("visits", 1), ("hops", 3)] {
        let found = found(&job, topic);
        assert!(found.values().all(|windows| windows.is_sorted()), "by their ends, then by their keys");
        let mut count: BTreeMap<&str, u64> = BTreeMap::new();
        found.values().flatten().for_each(|window| *count.entry(&window.1).or_default() += 1);
        assert_eq!(count.len() as u64, KEYS, "{topic}");
        assert!(count.values().all(|count| *count == windows), "{topic}");
    }
    let stage = &report["stages"][0];
    assert_eq!(stage["windows"]["closed"].as_u64(), stage["out"].as_u64(), "{stage}");
    assert_eq!(stage["applied"].as_u64(), Some(KEYS + 1), "{stage}");
}

/// No record comes any more: the last windows close by the clock, and each once, though the job is killed meanwhile.
#[test]
fn windows_of_a_quiet_partition_close_by_the_clock() {
    let Some(cluster) = support::broker("windows that close by the clock") else { return };
    let job = Job::new(cluster, "windows-idle", 2);
    let text = FINALS.replace("emit = \"close\"", "emit = \"close\", idle = \"1s\"");
    let file = job.file(&text);
    let order = |i: u64| (format!("k{i}"), format!(r#"{{"id":"e{i}","at":{},"total":1}}"#, BASE));
    // More than close in one turn.
    job.produce_keyed("in", 2, (0..2_500).map(order));
    let all = |topic: &str, count: usize| {
        let there = || {
            job.admin.topic(&job.topic(topic)).unwrap().is_some()
                && found(&job, topic).values().map(Vec::len).sum::<usize>() == count
        };
        support::eventually(PATIENCE, topic, there);
    };
    let process = job.start(&file);
    // Visits close three seconds after their last order, hops up to seven.
    all("visits", 2_500);
    let positions = job.positions(&job.name, "in");
    process.kill();
    let process = job.start(&file);
    all("hops", 7_500);
    all("visits", 2_500);
    assert_eq!(job.positions(&job.name, "in"), positions, "they stand where they stood");
    process.kill();
    // A record that comes then is late.
    job.produce_keyed("in", 2, [order(0)].into_iter());
    let report = job.drain(&file);
    assert_eq!(report["stages"][0]["late"].as_u64(), Some(1), "{report}");
}

/// A topology of the repository, with the job's own topics.
fn shipped(job: &Job, name: &str, input: &str, output: &str) -> std::path::PathBuf {
    let path = format!("{}/topologies/{name}.toml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let text = text
        .replace(&format!("name = \"{name}\""), &format!("name = \"{}\"", job.name))
        .replace(&format!("topics = [\"{input}\"]"), &format!("topics = [\"{}\"]", job.topic("in")))
        .replace(&format!("topic = \"{name}.{output}\""), &format!("topic = \"{}\"", job.topic("out")));
    assert_eq!(text.matches(&job.name).count(), 3, "{text}");
    std::fs::write(job.path(), text).unwrap();
    job.path()
}

fn rfc3339(ms: u64) -> String {
    chrono::DateTime::from_timestamp_millis(ms as i64).unwrap().to_rfc3339()
}

/// A full minute six hours ago: the shipped topics keep what is put out of it.
fn lately() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    now / 60_000 * 60_000 - 6 * 3_600_000
}

#[test]
fn the_shipped_sessions_are_visits() {
    let Some(cluster) = support::broker("topologies/sessions.toml") else { return };
    let job = Job::new(cluster, "visits", 2);
    let file = shipped(&job, "sessions", "clicks", "visits");
    let base = lately();
    // Forty visitors come every hour, for three clicks a minute apart.
    let click = |i: u64| {
        let (hour, minute, visitor) = (i / 120, i / 40 % 3, i % 40);
        let at = rfc3339(base + (hour * 60 + minute) * 60_000);
        (format!("v{visitor}"), format!(r#"{{"click_id":"c{i}","page":"/{minute}","at":"{at}"}}"#))
    };
    job.produce_keyed("in", 2, (0..480).map(click));
    let report = job.drain(&file);
    let mut visits: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for visit in job.read("out") {
        let shown: Value = serde_json::from_str(visit.text()).unwrap();
        let visitor = shown["visitor"].as_str().unwrap().to_owned();
        visits.entry(visitor).or_default().push(format!(
            "{} {}",
            shown["window_start"].as_str().unwrap(),
            shown["clicks"]
        ));
    }
    // The visits of the last hour are not over.
    let start = |hour: u64| rfc3339(base + hour * 3_600_000).replace("+00:00", ".000Z");
    let expected: Vec<String> = (0..3).map(|hour| format!("{} 3", start(hour))).collect();
    assert_eq!(visits.len(), 40);
    assert!(visits.values().all(|visits| *visits == expected), "{visits:?}");
    assert_eq!(report["stages"][0]["applied"].as_u64(), Some(480), "{report}");
}

#[test]
fn the_shipped_fraud_detection_raises_its_alerts() {
    let Some(cluster) = support::broker("topologies/fraud-detection.toml") else { return };
    // Of several partitions some would be read ahead of others by more than the grace.
    let job = Job::new(cluster, "fraud", 1);
    let file = shipped(&job, "fraud-detection", "payments", "alerts");
    let base = lately();
    // Cards pay every 40 seconds; one pays four times within 19.
    let payment = |i: u64, card: &str, seconds: u64| {
        let at = rfc3339(base + seconds * 1_000);
        (
            format!("shop{}", i % 7),
            format!(r#"{{"payment_id":"p{i}","card":"{card}","amount":1,"country":"DK","paid_at":"{at}"}}"#),
        )
    };
    let usual = (0..200).map(|i| (i / 20 * 40, payment(i, &format!("c{}", i % 20), i / 20 * 40)));
    let burst = [81, 85, 90, 99].into_iter().map(|at| (at, payment(1_000 + at, "bad", at)));
    let mut payments: Vec<(u64, (String, String))> = usual.chain(burst).collect();
    payments.sort_by_key(|(at, _)| *at);
    job.produce_keyed("in", 1, payments.into_iter().map(|(_, payment)| payment));
    job.drain(&file);
    let alerts: Vec<(String, String)> = job
        .read("out")
        .iter()
        .map(|alert| {
            let shown: Value = serde_json::from_str(alert.text()).unwrap();
            assert_eq!((&shown["payments"], &shown["amount"]), (&Value::from(4), &Value::from(4)), "{shown}");
            (shown["card"].as_str().unwrap().to_owned(), shown["window_start"].as_str().unwrap().to_owned())
        })
        .collect();
    // Windows of a minute that begin at a multiple of ten seconds, hold the second 81 and the second 99.
    let starts = [40, 50, 60, 70, 80].map(|second| rfc3339(base + second * 1_000).replace("+00:00", ".000Z"));
    assert_eq!(alerts, starts.map(|start| ("bad".to_owned(), start)));
}
