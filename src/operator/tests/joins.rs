//! Tables and joins: what a row is, what a record finds, what a reject takes back, which results have which id.

use std::collections::VecDeque;

use proptest::prelude::*;

use crate::commit::progress::BatchId;
use crate::reject::header;

use super::*;

fn shop(kind: JoinKind) -> Rig {
    Build::new()
        .source("customers", Format::Json, Some(".event_id"), None)
        .json("orders")
        .table("by_id", "customers")
        .join("joined", "orders", "by_id", kind, "customer")
        .sink("out", &["joined"], None)
        .run()
}

fn at<'a>(topic: &'a str, offset: i64, key: Option<&'a str>, value: Option<&'a str>) -> Input<'a> {
    Input { offset: Offset(offset), ..input(topic, key, value) }
}

/// A row of a customer: its changelog's key.
fn customer(rig: &mut Rig, offset: i64, key: &str, value: Option<&str>) {
    let outcome = rig.process(&at("customers", offset, Some(key), value));
    assert_eq!(outcome, Ok(Outcome::Processed { outputs: 0 }));
    let changelog = rig.chunk.get(0);
    assert_eq!(rig.targets[changelog.target.0 as usize].topic.as_ref(), "shop.by_id.changelog");
    assert_eq!((changelog.partition, changelog.key), (14, Some(format!("\u{1}{key}").as_bytes())));
    assert_eq!(changelog.value.is_some(), value.is_some());
}

fn order(rig: &mut Rig, key: Option<&str>, value: &str) -> Vec<Out> {
    rig.outputs(&input("orders", key, Some(value)))
}

#[test]
fn a_record_gets_the_latest_row_of_its_key_digit_for_digit() {
    let mut rig = shop(JoinKind::Inner);
    assert_eq!(order(&mut rig, Some("c1"), r#"{"id":1}"#), [], "no row yet");
    customer(&mut rig, 0, "c1", Some(r#"{"event_id":"a","name":"A\u00e9","limit":9007199254740993.10}"#));
    customer(&mut rig, 1, "c2", Some(r#"{"event_id":"b"}"#));
    assert_eq!(
        order(&mut rig, Some("c1"), r#"{ "id" : 123456789012345678901234567890, "customer":7, "total":1.50 }"#),
        [out(
            "out",
            Some("c1"),
            Some(
                r#"{"id":123456789012345678901234567890,"total":1.50,"customer":{"event_id":"a","name":"A\u00e9","limit":9007199254740993.10}}"#
            )
        )]
    );
    customer(&mut rig, 2, "c1", Some(r#"{"event_id":"c"}"#));
    let joined = [out("out", Some("c1"), Some(r#"{"id":2,"customer":{"event_id":"c"}}"#))];
    assert_eq!(order(&mut rig, Some("c1"), r#"{"id":2}"#), joined);
    customer(&mut rig, 3, "c1", None);
    assert_eq!(order(&mut rig, Some("c1"), r#"{"id":3}"#), [], "a null value removes the row");
    let counts = rig.pipeline.counts();
    let (table, join) = (counts.node(rig.id("by_id")), counts.node(rig.id("joined")));
    assert_eq!((table.input, table.output, join.input, join.output, join.dropped), (4, 4, 4, 2, 2));
}

#[test]
fn a_left_join_passes_what_has_no_row_and_both_pass_null_values() {
    let mut rig = shop(JoinKind::Left);
    let alone = [out("out", Some("c1"), Some(r#"{"id":1,"customer":null}"#))];
    assert_eq!(order(&mut rig, Some("c1"), r#"{"id":1}"#), alone);
    let keyless = [out("out", None, Some(r#"{"id":1,"customer":null}"#))];
    assert_eq!(order(&mut rig, None, r#"{"id":1}"#), keyless);
    for kind in [JoinKind::Inner, JoinKind::Left] {
        let mut rig = shop(kind);
        assert_eq!(rig.outputs(&input("orders", Some("c1"), None)), [out("out", Some("c1"), None)]);
    }
}

/// Case 08.
#[test]
fn a_null_key_is_rejected_by_a_table_and_by_an_inner_join_and_an_empty_one_is_a_key() {
    let mut rig = shop(JoinKind::Inner);
    let null = rejection("by_id", "null-key", "the key is null: the record is the row of none");
    assert_eq!(rig.rejected(&input("customers", None, Some(r#"{"event_id":"a"}"#))), null);
    let null = rejection("joined", "null-key", "the key is null: no row can be its");
    assert_eq!(rig.rejected(&input("orders", None, Some(r#"{"id":1}"#))), null);
    customer(&mut rig, 0, "", Some(r#"{"event_id":"a"}"#));
    assert_eq!(order(&mut rig, Some(""), r#"{"id":1}"#).len(), 1);
}

#[test]
fn a_dead_letter_of_a_table_that_comes_back_replaces_no_newer_row() {
    let mut rig = shop(JoinKind::Inner);
    customer(&mut rig, 7, "c1", Some(r#"{"event_id":"new"}"#));
    customer(&mut rig, 8, "c2", Some(r#"{"event_id":"other"}"#));
    let headers = || Headers(vec![(header::RESTORED.as_bytes(), Some(&b"1"[..]))]);
    let replayed = Input { headers: headers(), ..at("customers", 5, Some("c1"), Some(r#"{"event_id":"old"}"#)) };
    assert_eq!((rig.outputs(&replayed), rig.chunk.len()), (vec![], 0));
    assert_eq!(rig.pipeline.counts().node(rig.id("by_id")).dropped, 1);
    // One that no newer one followed is what there is.
    let replayed = Input { headers: headers(), ..at("customers", 6, Some("c3"), Some(r#"{"event_id":"late"}"#)) };
    assert_eq!(rig.process(&replayed), Ok(Outcome::Processed { outputs: 0 }));
    customer(&mut rig, 9, "c1", Some(r#"{"event_id":"newest"}"#));
    let row = |rig: &mut Rig, key| order(rig, Some(key), "{}").pop().and_then(|out| out.2).unwrap();
    assert_eq!(row(&mut rig, "c1"), r#"{"customer":{"event_id":"newest"}}"#);
    assert_eq!(row(&mut rig, "c3"), r#"{"customer":{"event_id":"late"}}"#);
}

#[test]
fn what_is_joined_has_an_id_of_the_record_and_the_row() {
    let mut rig = shop(JoinKind::Left);
    let id = |rig: &mut Rig, offset| {
        assert_eq!(rig.outputs(&at("orders", offset, Some("c1"), Some("{}"))).len(), 1);
        rig.header(0, "semel-event-id").unwrap()
    };
    let expected = |offset, row: Option<&str>| {
        let row = row.map(|row| EventId::declared("customers", row, None));
        let record = EventId::at(Uuid::from_u128(2), 14, Offset(offset));
        record.joined("shop.joined", row).derived("shop", "out", 0).to_string()
    };
    assert_eq!(id(&mut rig, 1), expected(1, None));
    customer(&mut rig, 0, "c1", Some(r#"{"event_id":"a"}"#));
    assert_eq!(id(&mut rig, 1), expected(1, Some("a")));
    customer(&mut rig, 1, "c1", Some(r#"{"event_id":"b"}"#));
    assert_eq!(id(&mut rig, 1), expected(1, Some("b")));
    assert_eq!(id(&mut rig, 2), expected(2, Some("b")));
    let ids: Vec<String> =
        [expected(1, None), expected(1, Some("a")), expected(1, Some("b")), expected(2, Some("b"))].into();
    assert!((1..4).all(|i| !ids[..i].contains(&ids[i])), "{ids:?}");
}

#[test]
fn a_row_of_text_becomes_a_string_and_one_that_is_no_text_rejects_what_looks_it_up() {
    let mut rig = Build::new()
        .source("names", Format::Bytes, None, None)
        .json("orders")
        .table("by_id", "names")
        .join("joined", "orders", "by_id", JoinKind::Inner, "name")
        .sink("out", &["joined"], None)
        .run();
    let kept = Ok(Outcome::Processed { outputs: 0 });
    assert_eq!(rig.process(&at("names", 0, Some("c1"), Some("a \"b\""))), kept);
    assert_eq!(order(&mut rig, Some("c1"), "{}"), [out("out", Some("c1"), Some(r#"{"name":"a \"b\""}"#))]);
    let bytes = Input { value: Some(b"\xff"), ..at("names", 1, Some("c1"), None) };
    assert_eq!(rig.process(&bytes), kept);
    assert_eq!(rig.rejected(&input("orders", Some("c1"), Some("{}"))).1, "field");
}

#[test]
fn a_row_that_its_changelog_does_not_take_is_rejected_and_the_former_stays() {
    let mut rig = Build::new()
        .json("customers")
        .json("orders")
        .table("by_id", "customers")
        .target(|target| target.max_message_bytes = 150)
        .join("joined", "orders", "by_id", JoinKind::Inner, "customer")
        .sink("out", &["joined"], None)
        .run();
    customer(&mut rig, 0, "c1", Some(r#"{"n":1}"#));
    let large = format!(r#"{{"n":"{}"}}"#, "x".repeat(100));
    let (node, reason, message) = rig.rejected(&at("customers", 1, Some("c1"), Some(&large)));
    assert_eq!((node.as_str(), reason.as_str()), ("by_id", "too-large"), "{message}");
    assert_eq!(order(&mut rig, Some("c1"), "{}"), [out("out", Some("c1"), Some(r#"{"customer":{"n":1}}"#))]);
}

#[test]
fn without_its_table_a_record_is_rejected_to_be_replayed() {
    let mut rig = shop(JoinKind::Left);
    rig.pipeline.release(StoreId(0), 14);
    assert_eq!(rig.rejected(&input("orders", Some("k"), Some("{}"))).1, "retry");
    assert_eq!(rig.rejected(&at("customers", 0, Some("k"), Some(r#"{"event_id":"a"}"#))).1, "retry");
    assert_eq!(rig.rejected(&at("customers", 1, Some("k"), Some(r#"{"event_id":"a"}"#))).1, "retry");
}

#[test]
fn records_are_ordered_by_the_time_of_their_event_where_it_is_declared() {
    let mut rig = Build::new()
        .source("timed", Format::Json, None, Some(".at"))
        .json("plain")
        .sink("out", &["timed", "plain"], None)
        .run();
    let mut time = |topic: &str, value| {
        let id = rig.id(topic);
        rig.pipeline.time(id, &input(topic, None, Some(value)))
    };
    assert_eq!(time("timed", r#"{"at":1234}"#), Some(1234));
    assert_eq!(time("timed", r#"{"at":"never"}"#), Some(NOW - 5), "a record that will be rejected has its own");
    assert_eq!(time("timed", "no object"), Some(NOW - 5));
    assert_eq!(time("plain", r#"{"at":1234}"#), Some(NOW - 5));
}

/// What a plain program would keep: committed rows, and what the open batches wrote.
#[derive(Clone, Default)]
struct Model {
    committed: HashMap<String, u32>,
    sealed: VecDeque<(BatchId, HashMap<String, Option<u32>>)>,
    open: HashMap<String, Option<u32>>,
}

impl Model {
    fn row(&self, key: &str) -> Option<u32> {
        let staged = [&self.open].into_iter().chain(self.sealed.iter().rev().map(|(_, writes)| writes));
        staged.filter_map(|writes| writes.get(key).copied()).next().unwrap_or_else(|| self.committed.get(key).copied())
    }
}

proptest! {
    /// Whatever comes in whatever order, with commits, aborts and rejects between: a record is joined with the row that a plain
    /// map holds.
    #[test]
    fn joins_are_what_a_plain_model_says(
        left in any::<bool>(),
        steps in prop::collection::vec((0..10u8, 0..3u8, any::<u32>()), 1..120),
    ) {
        let kind = if left { JoinKind::Left } else { JoinKind::Inner };
        let mut rig = Build::new()
            .json("customers")
            .json("orders")
            .table("by_id", "customers")
            .join("joined", "orders", "by_id", kind, "c")
            // A row that is not to be there: rejected behind the table.
            .filter("good", "by_id", "if .bad == true { to_int!(\"x\") == 1 } else { false }")
            .tombstones(Tombstones::Drop)
            .sink("out", &["joined", "good"], None)
            .run();
        let (mut model, mut next_batch, mut offset, mut committed_offset) = (Model::default(), 0, 0, 0);
        let mut sealed_offsets = VecDeque::new();
        for (step, key, number) in steps {
            let key = format!("k{key}");
            match step {
                0..=2 => {
                    let value = (number % 5 != 0).then(|| format!("{{\"n\":{number}}}"));
                    customer(&mut rig, offset, &key, value.as_deref());
                    model.open.insert(key, value.map(|_| number));
                    offset += 1;
                }
                3 => {
                    rig.rejected(&at("customers", offset, Some(&key), Some("{\"bad\":true}")));
                    offset += 1;
                }
                4..=6 => {
                    let found = model.row(&key);
                    let expected = match (found, kind) {
                        (Some(n), _) => vec![out("out", Some(&key), Some(&format!("{{\"i\":1,\"c\":{{\"n\":{n}}}}}")))],
                        (None, JoinKind::Left | JoinKind::Outer) => vec![out("out", Some(&key), Some("{\"i\":1,\"c\":null}"))],
                        (None, JoinKind::Inner) => vec![],
                    };
                    prop_assert_eq!(order(&mut rig, Some(&key), "{\"i\":1}"), expected);
                }
                7 => {
                    rig.pipeline.sealed(BatchId(next_batch));
                    model.sealed.push_back((BatchId(next_batch), std::mem::take(&mut model.open)));
                    sealed_offsets.push_back(offset);
                    next_batch += 1;
                }
                8 => {
                    if let Some((batch, writes)) = model.sealed.pop_front() {
                        rig.pipeline.committed(batch);
                        committed_offset = sealed_offsets.pop_front().unwrap_or(committed_offset);
                        for (key, value) in writes {
                            match value {
                                Some(value) => drop(model.committed.insert(key, value)),
                                None => drop(model.committed.remove(&key)),
                            }
                        }
                    }
                }
                _ => {
                    // The records since the last commit come again: the table is restored as it was then.
                    rig.pipeline.abandon();
                    let mut restored = Build::new()
                        .json("customers")
                        .table("by_id", "customers")
                        .run();
                    let mut memory = Memory::default();
                    for (key, n) in &model.committed {
                        restored.process(&at("customers", 0, Some(key), Some(&format!("{{\"n\":{n}}}")))).unwrap();
                        let row = restored.chunk.get(0);
                        memory.restore(row.key.unwrap(), row.value);
                    }
                    rig.pipeline.hold(StoreId(0), 14, Box::new(memory));
                    model.sealed.clear();
                    sealed_offsets.clear();
                    model.open.clear();
                    offset = committed_offset;
                }
            }
        }
    }
}

/// Of both tables: offsets rise, and each row is of its own key.
fn tables(kind: JoinKind) -> Rig {
    Build::new()
        .json("names")
        .json("cities")
        .table("name", "names")
        .table("city", "cities")
        .join_tables("both", "name", "city", kind, "city")
        .sink("out", &["both"], None)
        .run()
}

/// What a change of a table puts out; what it keeps is left out.
fn change(rig: &mut Rig, topic: &str, offset: i64, key: &str, value: Option<&str>) -> Vec<Out> {
    let outcome = rig.process(&at(topic, offset, Some(key), value));
    let outs: Vec<Out> = rig.outs().into_iter().filter(|out| out.0 == "out").collect();
    assert_eq!(outcome, Ok(Outcome::Processed { outputs: outs.len() as u32 }));
    outs
}

#[test]
fn a_change_of_either_table_puts_out_what_both_are() {
    let joined = |value: &str| vec![out("out", Some("k"), Some(value))];
    let gone = vec![out("out", Some("k"), None)];
    let mut rig = tables(JoinKind::Inner);
    assert_eq!(change(&mut rig, "names", 0, "k", Some(r#"{"n":1.50,"city":7}"#)), []);
    assert_eq!(change(&mut rig, "cities", 0, "k", Some(r#"{"c":10.00}"#)), joined(r#"{"n":1.50,"city":{"c":10.00}}"#));
    assert_eq!(change(&mut rig, "names", 1, "k", Some(r#"{"n":2}"#)), joined(r#"{"n":2,"city":{"c":10.00}}"#));
    assert_eq!(change(&mut rig, "cities", 1, "k", None), gone);
    assert_eq!(change(&mut rig, "names", 2, "k", None), [], "nothing was left");
    let mut rig = tables(JoinKind::Left);
    assert_eq!(change(&mut rig, "cities", 0, "k", Some(r#"{"c":1}"#)), []);
    assert_eq!(change(&mut rig, "names", 0, "k", Some(r#"{"n":1}"#)), joined(r#"{"n":1,"city":{"c":1}}"#));
    assert_eq!(change(&mut rig, "cities", 1, "k", None), joined(r#"{"n":1,"city":null}"#));
    assert_eq!(change(&mut rig, "names", 1, "k", None), gone);
    let mut rig = tables(JoinKind::Outer);
    assert_eq!(change(&mut rig, "cities", 0, "k", Some(r#"{"c":1}"#)), joined(r#"{"city":{"c":1}}"#));
    assert_eq!(change(&mut rig, "names", 0, "k", Some(r#"{"n":1}"#)), joined(r#"{"n":1,"city":{"c":1}}"#));
    assert_eq!(change(&mut rig, "names", 1, "k", None), joined(r#"{"city":{"c":1}}"#));
    assert_eq!(change(&mut rig, "cities", 1, "k", None), gone);
}

#[test]
fn what_two_tables_are_has_an_id_of_both_rows() {
    let mut rig = tables(JoinKind::Outer);
    let id = |topic: u128, offset| EventId::at(Uuid::from_u128(topic), 14, Offset(offset));
    let derived = |id: EventId, other| id.joined("shop.both", other).derived("shop", "out", 0).to_string();
    let found = |rig: &mut Rig, topic: &str, offset, value| {
        change(rig, topic, offset, "k", value);
        let at = rig.chunk.len() - 1;
        rig.header(at, "semel-event-id").unwrap()
    };
    assert_eq!(found(&mut rig, "names", 3, Some("{}")), derived(id(1, 3), None));
    assert_eq!(found(&mut rig, "cities", 5, Some("{}")), derived(id(2, 5), Some(id(1, 3))));
    assert_eq!(found(&mut rig, "names", 4, None), derived(id(1, 4), Some(id(2, 5))));
    assert_eq!(found(&mut rig, "cities", 6, None), derived(id(2, 6), None));
}

#[test]
fn tables_of_one_topic_do_not_take_each_others_rows() {
    let mut rig = Build::new()
        .json("all")
        .filter("left", "all", ".side == \"left\"")
        .filter("right", "all", ".side == \"right\"")
        .table("l", "left")
        .table("r", "right")
        .join_tables("both", "l", "r", JoinKind::Inner, "r")
        .sink("out", &["both", "all"], None)
        .run();
    let mut joined = |offset, side: &str| {
        change(&mut rig, "all", offset, "k", Some(&format!("{{\"side\":\"{side}\",\"at\":{offset}}}")))
            .pop()
            .unwrap()
            .2
            .unwrap()
    };
    assert_eq!(joined(0, "left"), r#"{"side":"left","at":0}"#);
    let both = r#"{"side":"left","at":0,"r":{"side":"right","at":1}}"#;
    assert_eq!(joined(1, "right"), both);
    assert_eq!(joined(2, "left"), r#"{"side":"left","at":2,"r":{"side":"right","at":1}}"#);
}

proptest! {
    /// After any changes of both tables, with rejects and aborts between: the last that was put out of each key is what two plain
    /// maps hold of it.
    #[test]
    fn tables_are_joined_as_a_plain_model_says(
        kind in 0..3usize,
        steps in prop::collection::vec((any::<bool>(), 0..3u8, 0..8u8), 1..100),
    ) {
        let kind = [JoinKind::Inner, JoinKind::Left, JoinKind::Outer][kind];
        let mut rig = tables(kind);
        let mut rows: [HashMap<String, u8>; 2] = Default::default();
        let mut results: HashMap<String, Option<String>> = HashMap::new();
        for (offset, (right, key, value)) in steps.into_iter().enumerate() {
            let (topic, member) = if right { ("cities", "c") } else { ("names", "n") };
            let key = format!("k{key}");
            if value == 7 {
                // Undecodable: neither a row nor a result.
                prop_assert_eq!(rig.rejected(&at(topic, offset as i64, Some(&key), Some("{"))).1, "undecodable");
                continue;
            }
            let own = &mut rows[usize::from(right)];
            let text = (value > 1).then(|| format!("{{\"{member}\":{value}}}"));
            match value {
                0 | 1 => drop(own.remove(&key)),
                value => drop(own.insert(key.clone(), value)),
            }
            for result in change(&mut rig, topic, offset as i64, &key, text.as_deref()) {
                results.insert(key.clone(), result.2);
            }
            let (left, right) = (rows[0].get(&key), rows[1].get(&key));
            let exists = match kind {
                JoinKind::Inner => left.is_some() && right.is_some(),
                JoinKind::Left => left.is_some(),
                JoinKind::Outer => left.is_some() || right.is_some(),
            };
            let left = left.map_or(String::new(), |n| format!("\"n\":{n},"));
            let right = right.map_or("null".to_owned(), |c| format!("{{\"c\":{c}}}"));
            let expected = exists.then(|| format!("{{{left}\"city\":{right}}}"));
            prop_assert_eq!(results.get(&key).cloned().flatten(), expected);
        }
    }
}
