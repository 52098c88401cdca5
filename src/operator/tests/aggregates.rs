//! Aggregates: what an update tells, what a reject takes back, which updates have which id.

use crate::commit::progress::BatchId;

use super::windows::tumbling;
use super::*;

const TOTALS: &[(&str, Function, Option<&str>)] = &[
    ("orders", Function::Count, None),
    ("revenue", Function::Sum, Some(".total")),
    ("largest", Function::Max, Some(".total")),
    ("last", Function::Last, Some(".id")),
];

fn totals() -> Build {
    Build::new().source("in", Format::Json, Some(".id"), None).aggregate("totals", "in", TOTALS).sink(
        "out",
        &["totals"],
        None,
    )
}

fn update(key: &str, value: &str) -> Vec<Out> {
    vec![out("shop.totals.changelog", Some(&format!("\u{1}{key}")), None), out("out", Some(key), Some(value))]
}

/// Outputs without the bytes of state.
fn outputs(rig: &mut Rig, key: &str, value: &str) -> Vec<Out> {
    let outcome = rig.process(&input("in", Some(key), Some(value)));
    assert_eq!(outcome, Ok(Outcome::Processed { outputs: 1 }));
    let state = |(topic, key, value): Out| (topic.clone(), key, value.filter(|_| topic == "out"));
    rig.outs().into_iter().map(state).collect()
}

#[test]
fn every_record_puts_out_what_all_of_its_key_amount_to() {
    let mut rig = totals().run();
    assert_eq!(
        outputs(&mut rig, "c1", r#"{"id":"a","total":19.90}"#),
        update("c1", r#"{"key":"c1","orders":1,"revenue":19.9,"largest":19.90,"last":"a"}"#)
    );
    assert_eq!(
        outputs(&mut rig, "c2", r#"{"id":"b","total":9007199254740993}"#),
        update("c2", r#"{"key":"c2","orders":1,"revenue":9007199254740993,"largest":9007199254740993,"last":"b"}"#)
    );
    assert_eq!(
        outputs(&mut rig, "c1", r#"{"id":"c","total":0.1}"#),
        update("c1", r#"{"key":"c1","orders":2,"revenue":20,"largest":19.90,"last":"c"}"#)
    );
    assert_eq!(
        outputs(&mut rig, "c1", r#"{"id":"d"}"#),
        update("c1", r#"{"key":"c1","orders":3,"revenue":20,"largest":19.90,"last":"d"}"#),
        "what is missing is passed over"
    );
    let node = rig.pipeline.counts().node(rig.id("totals"));
    assert_eq!((node.input, node.output), (4, 4));
}

#[test]
fn state_goes_to_the_partition_of_its_records() {
    let mut rig = totals().run();
    outputs(&mut rig, "c1", r#"{"id":"a","total":1}"#);
    let state = rig.chunk.get(0);
    assert_eq!(state.partition, 14);
    assert!(state.value.unwrap().starts_with(&rig.pipeline.stamp(StoreId(0))));
}

#[test]
fn an_update_has_an_id_of_its_key_and_revision() {
    let mut rig = totals().run();
    let id = |rig: &mut Rig, key: &str, id: &str| {
        outputs(rig, key, &format!("{{\"id\":\"{id}\",\"total\":1}}"));
        rig.header(1, "semel-event-id").unwrap()
    };
    let derived = |key: &str, revision, id: &str| {
        let cause = Identity::Known(EventId::declared("in", id, None));
        EventId::of_state("shop.totals", format!("\u{1}{key}").as_bytes(), revision, cause, None)
            .derived("shop", "out", 0)
            .to_string()
    };
    assert_eq!(id(&mut rig, "c1", "a"), derived("c1", 1, "a"));
    assert_eq!(id(&mut rig, "c1", "b"), derived("c1", 2, "b"));
    assert_eq!(id(&mut rig, "c2", "c"), derived("c2", 1, "c"));
    // Another attempt, from what was committed: the same update under the same id.
    rig.pipeline.sealed(BatchId(0));
    rig.pipeline.committed(BatchId(0));
    let first = id(&mut rig, "c1", "d");
    rig.pipeline.abandon();
    assert!(rig.pipeline.holds(StoreId(0), 14));
    assert_eq!(id(&mut rig, "c1", "d"), first);
    assert_eq!(first, derived("c1", 3, "d"));
}

/// As after a reset: from the beginning the same updates come again, from elsewhere others that nobody may take for those.
#[test]
fn updates_of_state_that_begins_anew_have_their_ids_again_from_the_same_record_on_alone() {
    let ids = |from: usize| -> Vec<String> {
        let mut rig = totals().run();
        let mut id = |id: &&str| {
            outputs(&mut rig, "c1", &format!("{{\"id\":\"{id}\",\"total\":1}}"));
            rig.header(1, "semel-event-id").unwrap()
        };
        ["a", "b", "c", "d"][from..].iter().map(&mut id).collect()
    };
    let all = ids(0);
    assert_eq!(ids(0), all);
    assert!(ids(1).iter().all(|id| !all.contains(id)));
}

#[test]
fn a_record_that_is_rejected_leaves_no_trace_in_the_state() {
    let mut rig = totals()
        .filter("checked", "totals", ".revenue < 100")
        .remap("strict", "checked", "assert!(.orders != 2, \"not two\")")
        .sink("strict_out", &["strict"], None)
        .run();
    let record = |rig: &mut Rig, total: &str| {
        rig.process(&input("in", Some("k"), Some(&format!("{{\"id\":\"x\",\"total\":{total}}}"))))
    };
    assert!(matches!(record(&mut rig, "1"), Ok(Outcome::Processed { outputs: 2 })));
    // The aggregate and its sink are through when a later node fails.
    assert!(matches!(record(&mut rig, "2"), Ok(Outcome::Rejected { reason: "expression", .. })));
    assert_eq!(rig.chunk.len(), 1, "the dead letter alone");
    assert!(matches!(record(&mut rig, "4"), Ok(Outcome::Rejected { reason: "expression", .. })));
    rig.pipeline.abandon();
    assert!(matches!(record(&mut rig, "8"), Ok(Outcome::Processed { outputs: 2 })));
    let value = rig.chunk.iter().nth(1).and_then(|o| o.value.map(text)).unwrap();
    assert_eq!(value, r#"{"key":"k","orders":1,"revenue":8,"largest":8,"last":"x"}"#);
}

#[test]
fn what_no_aggregate_takes_is_rejected_by_rule() {
    let mut rig = totals().run();
    let good = r#"{"id":"a","total":1}"#;
    assert_eq!(
        rig.rejected(&input("in", None, Some(good))),
        rejection("totals", "null-key", "the key is null: the record belongs to no group")
    );
    let latin1 = Input { key: Some(b"\xe5"), ..input("in", None, Some(good)) };
    assert_eq!(rig.rejected(&latin1).1, "key");
    assert_eq!(
        rig.rejected(&input("in", Some("k"), Some(r#"{"id":"a","total":"1"}"#))),
        rejection("totals", "field", "the sum `revenue` takes numbers, not \"1\"")
    );
    assert_eq!(rig.rejected(&input("in", Some("k"), Some(r#"{"id":"a","total":1e39}"#))).1, "overflow");
    assert_eq!(
        rig.process(&input("in", Some("k"), None)),
        Ok(Outcome::Processed { outputs: 0 }),
        "a tombstone ends here"
    );
    assert_eq!(rig.pipeline.counts().node(rig.id("totals")).dropped, 1);
    assert_eq!(
        outputs(&mut rig, "", good),
        update("", r#"{"key":"","orders":1,"revenue":1,"largest":1,"last":"a"}"#),
        "an empty key is a key, and what was rejected is not in it"
    );
}

#[test]
fn a_state_that_outgrows_its_topic_rejects_the_record() {
    let mut rig = Build::new()
        .json("in")
        .aggregate("all", "in", &[("ids", Function::Collect, Some(".id"))])
        .target(|target| target.max_message_bytes = 300)
        .sink("out", &["all"], None)
        .run();
    let record = |n: usize| format!("{{\"id\":\"{}\"}}", "x".repeat(n));
    assert!(matches!(rig.process(&input("in", Some("k"), Some(&record(150)))), Ok(Outcome::Processed { .. })));
    assert_eq!(rig.rejected(&input("in", Some("k"), Some(&record(150)))).1, "too-large");
    assert!(matches!(rig.process(&input("in", Some("k"), Some(&record(20)))), Ok(Outcome::Processed { .. })));
}

#[test]
fn a_reduction_makes_its_next_value_of_the_last_and_the_record() {
    let longest = "if .acc == null || length!(.value.name) > length!(.acc) { .value.name }";
    let mut rig = Build::new()
        .json("in")
        .aggregate("all", "in", &[("longest", Function::Reduce, Some(longest)), ("n", Function::Count, None)])
        .sink("out", &["all"], None)
        .run();
    let shown = |rig: &mut Rig, name: &str| {
        rig.process(&input("in", Some("k"), Some(&format!("{{\"name\":{name}}}")))).unwrap();
        rig.outs().pop().and_then(|out| out.2).unwrap()
    };
    assert_eq!(shown(&mut rig, "\"ab\""), r#"{"key":"k","longest":"ab","n":1}"#);
    assert_eq!(shown(&mut rig, "\"a\""), r#"{"key":"k","longest":"ab","n":2}"#, "null leaves it as it is");
    assert_eq!(shown(&mut rig, "\"abc\""), r#"{"key":"k","longest":"abc","n":3}"#);
    assert_eq!(rig.rejected(&input("in", Some("k"), Some("{\"name\":7}"))).1, "expression");
    assert_eq!(shown(&mut rig, "\"abcd\""), r#"{"key":"k","longest":"abcd","n":4}"#);
}

#[test]
fn a_reduction_takes_text_too() {
    let mut rig = Build::new()
        .source("in", Format::String, None, None)
        .aggregate("all", "in", &[("chars", Function::Reduce, Some("(int(.acc) ?? 0) + length!(string!(.value))"))])
        .sink("out", &["all"], None)
        .run();
    for (line, chars) in [("a \"b\"", 5), ("", 5), ("æ", 7)] {
        rig.process(&input("in", Some("k"), Some(line))).unwrap();
        let shown = rig.outs().pop().and_then(|out| out.2).unwrap();
        assert_eq!(shown, format!("{{\"key\":\"k\",\"chars\":{chars}}}"), "{line}");
    }
}

#[test]
fn a_window_takes_records_until_its_grace_is_over_and_leaves_nothing_behind() {
    let mut rig = Build::new()
        .source("in", Format::Json, None, Some(".at"))
        .aggregate("n", "in", &[("n", Function::Count, None), ("s", Function::Sum, Some(".s"))])
        .window(tumbling(1_000, 500))
        .sink("out", &["n"], None)
        .run();
    let at = |rig: &mut Rig, key: &str, at: i64| {
        rig.process(&input("in", Some(key), Some(&format!("{{\"at\":{at}}}")))).unwrap();
        let mut values = rig.outs().into_iter().filter(|out| out.0 == "out").filter_map(|out| out.2);
        let update: Option<serde_json::Value> = values.next_back().map(|text| serde_json::from_str(&text).unwrap());
        let removed = rig.outs().iter().filter(|out| out.0 != "out" && out.2.is_none()).count();
        (
            update.map(|update| {
                (update["window_start"].as_str().unwrap()[17..].to_owned(), update["n"].as_i64().unwrap())
            }),
            removed,
        )
    };
    let shown = |start: &str, n: i64| Some((start.to_owned(), n));
    assert_eq!(at(&mut rig, "a", 10_000), (shown("10.000Z", 1), 0));
    assert_eq!(at(&mut rig, "b", 10_999), (shown("10.000Z", 1), 0));
    assert_eq!(at(&mut rig, "a", 11_499), (shown("11.000Z", 1), 0));
    assert_eq!(at(&mut rig, "a", 10_000), (shown("10.000Z", 2), 0), "within the grace");
    assert_eq!(at(&mut rig, "b", 11_500), (shown("11.000Z", 1), 2), "two keys of the window that closed");
    assert_eq!(at(&mut rig, "a", 10_999), (None, 0), "late");
    assert_eq!(rig.pipeline.counts().late(), 1);
    // A record that is rejected closes no window.
    let far = input("in", Some("a"), Some(r#"{"at":99000,"s":"no number"}"#));
    assert_eq!(rig.rejected(&far).1, "field");
    assert_eq!(at(&mut rig, "a", 11_000), (shown("11.000Z", 2), 0));
    // What is committed and what is not is closed alike.
    rig.pipeline.sealed(BatchId(0));
    rig.pipeline.committed(BatchId(0));
    assert_eq!(at(&mut rig, "c", 11_200), (shown("11.000Z", 1), 0));
    assert_eq!(at(&mut rig, "c", 20_000), (shown("20.000Z", 1), 3));
    rig.pipeline.abandon();
    assert_eq!(at(&mut rig, "c", 11_200), (shown("11.000Z", 1), 0), "an abort opens it again");
}

#[test]
fn a_record_whose_state_is_elsewhere_is_rejected() {
    let mut rig = totals().run();
    rig.pipeline.release(StoreId(0), 14);
    assert_eq!(rig.rejected(&input("in", Some("k"), Some(r#"{"id":"a","total":1}"#))).1, "retry");
}

#[test]
fn the_elements_of_a_record_are_folded_one_after_another() {
    let mut rig = Build::new()
        .json("in")
        .flat_map("lines", "in", ".lines")
        .aggregate("totals", "lines", &[("n", Function::Count, None), ("qty", Function::Sum, Some(".qty"))])
        .aggregate("peaks", "totals", &[("most", Function::Max, Some(".qty"))])
        .sink("out", &["totals", "peaks"], None)
        .run();
    rig.process(&input("in", Some("k"), Some(r#"{"lines":[{"qty":2},{"qty":-1}]}"#))).unwrap();
    let values: Vec<String> = rig.outs().into_iter().filter(|o| o.0 == "out").filter_map(|o| o.2).collect();
    assert_eq!(
        values,
        [
            r#"{"key":"k","n":1,"qty":2}"#,
            r#"{"key":"k","n":2,"qty":1}"#,
            r#"{"key":"k","most":2}"#,
            r#"{"key":"k","most":2}"#,
        ]
    );
    let ids: std::collections::BTreeSet<_> =
        (0..rig.chunk.len()).filter_map(|i| rig.header(i, "semel-event-id")).collect();
    assert_eq!(ids.len(), 4, "each update is an event of its own, though the source has no ids");
}
