//! Tables under faults: joined with each other, built anew after a reset, and not set back by what is replayed.

use std::collections::BTreeMap;
use std::process::Stdio;

use semel::kafka::Isolation;
use semel::operator::partition;
use serde_json::{Value, json};

use super::harness::{Feed, PATIENCE, Record, each_committed, wait_with_output};
use super::joins::{TOPOLOGY, base, check, expected, job, joined, produce, topology};
use crate::support;

/// Two tables, joined outer: each change of each key puts out what both were at its time, in that order, through kills; what both
/// lost is null.
#[test]
fn tables_are_joined_change_by_change_through_kills() {
    let Some(cluster) = support::broker("kill -9 of a job that joins tables") else { return };
    let job = job(cluster, "join-tables");
    let text = TOPOLOGY
        .replace("kind = \"left\"", "kind = \"outer\"")
        .replace("inputs = [\"orders\"]", "inputs = [\"order\"]");
    let text = text.replace("condition = \"to_int!(.version) > 0\"", "condition = \"true\"");
    let table = "[transforms.order]\ntype = \"table\"\ninputs = [\"orders\"]\n[transforms.good]";
    let file =
        job.file(&text.replace("[transforms.good]", table).replace("[kafka]\n", "batch_records = 20\n[kafka]\n"));
    let (base, count) = (base(), 8_000_u64);
    let mut rows: [BTreeMap<String, Value>; 2] = Default::default();
    let mut expected: [BTreeMap<String, Vec<Value>>; 2] = Default::default();
    let mut feeds = ["in", "customers"].map(|suffix| Feed::new(&job, &job.topic(suffix)));
    for i in 0..count {
        let (key, right) = (format!("c{}", (i / 3) % 25), i.wrapping_mul(2_654_435_761) >> 7 & 1 == 1);
        let value = (i % 7 != 3).then(|| json!({ "id": format!("v{i}") }));
        let (text, timestamp) = (value.as_ref().map(Value::to_string), Some(base + i as i64));
        let bytes = (Some(key.as_bytes()), text.as_deref().map(str::as_bytes));
        let record = Record {
            partition: partition(bytes.0, 0, 4),
            timestamp,
            key: bytes.0,
            value: bytes.1,
            ..Record::default()
        };
        feeds[usize::from(right)].push(&record);
        let other = rows[usize::from(!right)].contains_key(&key);
        let was_delete = value.is_none();
        match value {
            Some(value) => drop(rows[usize::from(right)].insert(key.clone(), value)),
            None => drop(rows[usize::from(right)].remove(&key)),
        }
        let (left, right) = (rows[0].get(&key), rows[1].get(&key));
        let both = |left: Option<&Value>, right: Option<&Value>| {
            let mut both = left.cloned().unwrap_or(json!({}));
            both["customer"] = right.cloned().unwrap_or(Value::Null);
            both
        };
        let outer = if left.or(right).is_some() { both(left, right) } else { Value::Null };
        expected[0].entry(key.clone()).or_default().push(outer);
        match (left, right) {
            (Some(_), Some(_)) => expected[1].entry(key).or_default().push(both(left, right)),
            _ if other && was_delete => expected[1].entry(key).or_default().push(Value::Null),
            _ => {}
        }
    }
    feeds.iter().for_each(Feed::flush);
    job.kill_at_moments(&file, 4, "in");
    job.drain(&file);
    for (suffix, expected) in ["out", "known"].into_iter().zip(expected) {
        let mut found: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        each_committed(&job.brokers, &job.admin, &job.topic(suffix), |input| {
            let key = String::from_utf8(input.key.unwrap().to_vec()).unwrap();
            let value = input.value.map_or(Value::Null, |value| serde_json::from_slice(value).unwrap());
            found.entry(key).or_default().push(value);
        });
        for (key, expected) in &expected {
            let found = found.get(key).map_or(&[][..], Vec::as_slice);
            let differs = expected.iter().zip(found).position(|(expected, found)| expected != found);
            assert!(found == expected, "{suffix} {key}: {} of {}, {differs:?}", found.len(), expected.len());
        }
    }
}

/// A reset clears the table with its positions, and reads all of its topic, whatever it does with the orders.
#[test]
fn a_reset_builds_the_table_anew_and_a_new_table_lacks_no_row() {
    let Some(cluster) = support::broker("a reset of a job that joins") else { return };
    let job = job(cluster, "join-reset");
    let file = job.file(&topology());
    let (base, count) = (base(), 2_000);
    produce(&job, base, 0..count);
    job.drain(&file);
    check(&job, count);
    let args = ["reset", file.to_str().unwrap(), "--to", "latest", "--yes"];
    let reset = || job.semel(&args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
    support::eventually(PATIENCE, "nobody is in the group", || reset().success());
    assert_eq!(job.positions(&job.name, "customers"), [Some(0); 4]);
    assert_eq!(
        job.positions(&job.name, "in").into_iter().flatten().sum::<i64>(),
        job.ends("in", Isolation::ReadCommitted).iter().sum::<i64>()
    );
    produce(&job, base, count..count + 500);
    job.drain(&file);
    let (orders, _) = expected(count + 500);
    assert_eq!(joined(&job, "out"), orders, "those from before the reset are not read again, and the table is whole");

    // Another table of a topic that was read before would have no rows.
    let more = "[transforms.second]\ntype = \"table\"\ninputs = [\"customers\"]\n[sinks.out]";
    let file = job.file(&topology().replace("[sinks.out]", more));
    let output = job.run_drain(&file);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("table second is new") && text.contains("semel reset"), "{text}");
}

/// A dead letter of the table that is replayed after a newer row came replaces nothing.
#[test]
fn a_replayed_row_does_not_replace_a_newer_one() {
    let Some(cluster) = support::broker("a dead letter of a table that is replayed") else { return };
    let job = job(cluster, "join-replay");
    let broken = topology();
    let file = job.file(&broken);
    let customer = |id: &str, version: &str| ("c1".to_owned(), format!(r#"{{"id":"{id}","version":{version}}}"#));
    job.produce_keyed("customers", 4, [customer("v1", "\"x\""), customer("v2", "2")].into_iter());
    job.produce_keyed("customers", 4, [("c2".to_owned(), r#"{"id":"v3","version":"x"}"#.to_owned())].into_iter());
    job.drain(&file);
    assert_eq!(job.read("dead-letters").len(), 2);
    // The file is mended, and what was rejected comes again.
    let file = job.file(&broken.replace("to_int!(.version) > 0", "true"));
    let args = ["dlq", "replay", file.to_str().unwrap()];
    let replayed = wait_with_output(
        job.semel(&args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap(),
    );
    assert!(replayed.status.success(), "{replayed:?}");
    job.drain(&file);
    job.produce_keyed(
        "in",
        4,
        [("c1".to_owned(), r#"{"id":"o1"}"#.to_owned()), ("c2".to_owned(), r#"{"id":"o2"}"#.to_owned())].into_iter(),
    );
    job.drain(&file);
    let row = |id: &str, version: Value| json!({ "id": id, "version": version });
    let rows = BTreeMap::from([("o1".to_owned(), row("v2", json!(2))), ("o2".to_owned(), row("v3", json!("x")))]);
    assert_eq!(joined(&job, "out"), rows);
}
