//! Keys, null values, rejects and limits.

use super::*;

#[test]
fn keys_are_made_of_scalars() {
    let mut stage = Build::new().json("in").sink("out", &["in"], Some(".k")).run();
    let mut key = |k: &str| {
        let record = format!("{{\"k\":{k}}}");
        stage.outputs(&input("in", Some("input"), Some(&record)))[0].1.clone()
    };
    assert_eq!(key(r#""c1""#).as_deref(), Some("c1"));
    assert_eq!(key(r#""\u0063\n""#).as_deref(), Some("c\n"));
    assert_eq!(key(r#""""#).as_deref(), Some(""));
    assert_eq!(key("-5").as_deref(), Some("-5"));
    assert_eq!(key("-0").as_deref(), Some("0"));
    assert_eq!(key("1.50").as_deref(), Some("1.5"));
    assert_eq!(key("true").as_deref(), Some("true"));
    assert_eq!(key("null"), None);
    assert_eq!(stage.chunk.iter().next().map(|o| o.partition), Some(14 % 12));
    assert_eq!(stage.outputs(&input("in", Some("input"), Some("{}")))[0].1, None);
    let mut rejected = |k: &str| stage.rejected(&input("in", None, Some(&format!("{{\"k\":{k}}}"))));
    assert_eq!(
        rejected("{}"),
        rejection("out", "key", "the key must be a string, a number or a boolean, it is an object")
    );
    assert_eq!(rejected("[1]").1, "key");
    assert_eq!(rejected("0.1000000000000000055").1, "inexact-number");
}

#[test]
fn a_rekey_holds_for_everything_behind_it() {
    let mut stage = Build::new()
        .json("in")
        .rekey("by_customer", "in", ".c")
        .remap("r", "by_customer", ".key = %key")
        .sink("out", &["r"], None)
        .sink("other", &["by_customer"], Some("join!([%key, \"x\"], \"-\")"))
        .run();
    assert_eq!(
        stage.outputs(&input("in", Some("k"), Some(r#"{"c":"c1"}"#))),
        [out("out", Some("c1"), Some(r#"{"c":"c1","key":"c1"}"#)), out("other", Some("c1-x"), Some(r#"{"c":"c1"}"#))]
    );
    assert_eq!(
        stage.rejected(&input("in", Some("k"), Some(r#"{}"#))),
        rejection("other", "expression", "join: all array items must be strings")
    );
}

#[test]
fn tombstones_pass_unless_told_otherwise() {
    let chain = |how: Tombstones| {
        Build::new()
            .json("in")
            .filter("f", "in", ".a == 1")
            .tombstones(how)
            .remap("r", "f", ".n = to_float!(.n)")
            .flat_map("m", "r", "[.]")
            .sink("out", &["m"], None)
            .run()
    };
    assert_eq!(chain(Tombstones::Pass).outputs(&input("in", Some("k"), None)), [out("out", Some("k"), None)]);
    assert_eq!(chain(Tombstones::Drop).outputs(&input("in", Some("k"), None)), []);
    assert_eq!(chain(Tombstones::Process).outputs(&input("in", Some("k"), None)), [], "null is not 1");

    let processed = |source: &str| {
        let build = Build::new().json("in").remap("r", "in", source).tombstones(Tombstones::Process);
        build.sink("out", &["r"], None).run().outputs(&input("in", Some("k"), None))
    };
    assert_eq!(
        processed(". = {\"id\": %key, \"gone\": true}"),
        [out("out", Some("k"), Some(r#"{"gone":true,"id":"k"}"#))]
    );
    assert_eq!(processed("if . != null { .x = 1 }"), [out("out", Some("k"), None)]);

    let mut routed = Build::new()
        .json("in")
        .route("r", "in", &[("gone", ". == null")])
        .tombstones(Tombstones::Process)
        .sink("gone", &["r.gone"], None)
        .sink("rest", &["r._unmatched"], None)
        .run();
    assert_eq!(routed.outputs(&input("in", Some("k"), None)), [out("gone", Some("k"), None)]);
}

#[test]
fn a_key_made_from_the_value_cannot_be_made_of_a_tombstone() {
    let mut stage = Build::new().json("in").sink("out", &["in"], Some(".id")).run();
    assert_eq!(
        stage.rejected(&input("in", Some("k"), None)),
        rejection("out", "tombstone-key", "the value is null, but the key `.id` is made from it")
    );
    let mut stage = Build::new().json("in").rekey("r", "in", "string!(.id)").sink("out", &["r"], None).run();
    assert_eq!(stage.rejected(&input("in", Some("k"), None)).1, "tombstone-key");
    let mut stage = Build::new().json("in").rekey("r", "in", "upcase(string!(%key))").sink("out", &["r"], None).run();
    assert_eq!(stage.outputs(&input("in", Some("k"), None)), [out("out", Some("K"), None)]);
}

#[test]
fn empty_is_not_null() {
    let mut stage = Build::new().json("in").sink("out", &["in"], None).run();
    assert_eq!(
        stage.rejected(&input("in", Some("k"), Some(""))),
        rejection("in", "undecodable", "the value is empty, a JSON object was expected (byte 0)")
    );
    assert_eq!(stage.rejected(&input("in", Some("k"), Some("null"))).1, "undecodable");
    assert_eq!(stage.outputs(&input("in", Some(""), Some("{}"))), [out("out", Some(""), Some("{}"))]);
    assert_eq!(stage.chunk.iter().next().map(|o| o.partition), Some(partition(Some(b""), 0, 12)));
    assert_eq!(stage.outputs(&input("in", None, Some("{}"))), [out("out", None, Some("{}"))]);
    for format in [Format::String, Format::Bytes] {
        let mut stage = Build::new().source("in", format, None, None).sink("out", &["in"], None).run();
        assert_eq!(stage.outputs(&input("in", None, Some(""))), [out("out", None, Some(""))]);
        assert_eq!(stage.outputs(&input("in", None, None)), [out("out", None, None)]);
    }
}

#[test]
fn a_string_source_wants_utf_8_and_a_bytes_source_takes_all() {
    let mut record = input("in", None, None);
    record.value = Some(b"ab\xff");
    let mut stage = Build::new().source("in", Format::String, None, None).sink("out", &["in"], None).run();
    assert_eq!(stage.rejected(&record), rejection("in", "undecodable", "the value is not UTF-8 (byte 2)"));
    let mut stage = Build::new().source("in", Format::Bytes, None, None).sink("out", &["in"], None).run();
    stage.process(&record).expect("processed");
    assert_eq!(stage.chunk.iter().next().and_then(|o| o.value), Some(&b"ab\xff"[..]));
}

#[test]
fn poison_is_rejected_and_its_neighbours_are_right() {
    let mut stage = orders().run();
    let good = stage.outputs(&input("orders", Some("k"), Some(ORDER)));
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
    let open = "[".repeat(5 << 20);
    for poison in ["{", "hello", "[]", "\"x\"", r#"{"a":1,"a":2}"#, r#"{"a":"\ud800"}"#, &deep, &open] {
        stage.chunk.clear();
        stage.pipeline.process(NodeId(0), &input("orders", None, Some(poison)), &mut stage.chunk).expect("a reject");
        assert_eq!(stage.chunk.len(), 1);
        assert_eq!(stage.header(0, "semel-error-reason"), Some("undecodable".into()));
        assert_eq!(stage.header(0, "semel-event-id"), None, "its declared id could not be read");
        assert_eq!(stage.outputs(&input("orders", Some("k"), Some(ORDER))), good);
    }
    let rejects: Vec<_> = stage.pipeline.counts().rejects().collect();
    assert_eq!(rejects, [(NodeId(0), "undecodable", 8)]);
}

#[test]
fn a_reject_withdraws_what_the_record_put_out() {
    let mut stage = Build::new()
        .json("in")
        .sink("early", &["in"], None)
        .remap("r", "in", ".n = to_int!(.n)")
        .sink("late", &["r"], None)
        .run();
    stage.chunk.clear();
    let good = input("in", Some("a"), Some(r#"{"n":"1"}"#));
    let bad = input("in", Some("b"), Some(r#"{"n":"x"}"#));
    for record in [&good, &bad, &good] {
        stage.pipeline.process(NodeId(0), record, &mut stage.chunk).expect("no stop");
    }
    let topics: Vec<String> = stage.outs().into_iter().map(|o| o.0).collect();
    assert_eq!(topics, ["early", "late", "shop.dead-letters", "early", "late"]);
    assert_eq!(stage.pipeline.counts().node(NodeId(1)).output, 2);
    // It carries the id that its outputs would have had theirs from.
    assert_eq!(stage.header(2, "semel-event-id"), Some(EventId::at(Uuid::from_u128(1), 14, Offset(42)).to_string()));
}

#[test]
fn on_error_is_the_nodes_own() {
    let build = |how: OnError| {
        Build::new().json("in").sink("early", &["in"], None).remap("r", "in", ".n = to_int!(.n)").on_error(how).sink(
            "out",
            &["r"],
            None,
        )
    };
    let bad = input("in", Some("b"), Some(r#"{"n":"x"}"#));
    let mut skip = build(OnError::Skip).run();
    assert_eq!(skip.process(&bad), Ok(Outcome::Skipped { node: NodeId(2), reason: "expression" }));
    assert!(skip.chunk.is_empty());
    assert_eq!(skip.pipeline.counts().node(NodeId(2)).skipped, 1);
    let mut stop = build(OnError::Stop).run();
    let error = stop.process(&bad).expect_err("a stop");
    assert!(stop.chunk.is_empty());
    assert_eq!(
        error.to_string(),
        "in-14 at offset 42: r: to_int: Invalid integer \"x\": invalid digit found in string (expression); on_error is \"stop\""
    );
    assert_eq!(stop.outputs(&input("in", None, Some(r#"{"n":1}"#))).len(), 2);
}

#[test]
fn what_the_broker_would_refuse_is_refused_before() {
    let mut compacted = Build::new().json("in").sink("out", &["in"], Some(".k")).target(|t| t.compacted = true).run();
    assert_eq!(
        compacted.rejected(&input("in", None, Some("{}"))),
        rejection("out", "null-key", "the key is null, and the topic `out` is compacted")
    );
    assert_eq!(compacted.outputs(&input("in", None, Some(r#"{"k":""}"#))), [out("out", Some(""), Some(r#"{"k":""}"#))]);

    // 61 bytes of batch, 2 of length, 3 of attributes and deltas, 1 of a null key, 2 of length and 98 of value, 1 of headers.
    let value = format!("{{\"a\":\"{}\"}}", "x".repeat(90));
    let fits = Build::new().json("in").sink("out", &["in"], None).target(|t| t.max_message_bytes = 168);
    assert_eq!(fits.run().outputs(&input("in", None, Some(&value))).len(), 1);
    let mut small = Build::new().json("in").sink("out", &["in"], None).target(|t| t.max_message_bytes = 167).run();
    assert_eq!(
        small.rejected(&input("in", None, Some(&value))),
        rejection("out", "too-large", "the output takes 168 bytes, the topic `out` takes 167 (max.message.bytes)")
    );

    let mut late =
        Build::new().json("in").sink("out", &["in"], None).target(|t| t.timestamp_before_max_ms = 1000).run();
    let mut record = input("in", None, Some("{}"));
    assert_eq!(late.outputs(&record).len(), 1);
    record.timestamp = Some(NOW - 1001);
    assert_eq!(
        late.rejected(&record),
        rejection(
            "out",
            "timestamp",
            "the time 1699999998999 lies more than 1000 ms before now, the topic `out` does not take it \
             (message.timestamp.before.max.ms)"
        )
    );
    record.timestamp = Some(NOW + 3_600_000);
    assert_eq!(late.outputs(&record).len(), 1);
    record.timestamp = Some(NOW + 3_600_001);
    assert_eq!(late.rejected(&record).1, "timestamp");
}

#[test]
fn times_are_checked_where_they_come_in() {
    let mut stage = Build::new().source("in", Format::Json, None, Some(".t")).sink("out", &["in"], None).run();
    let time = |stage: &mut Rig, t: &str| {
        stage.outputs(&input("in", None, Some(&format!("{{\"t\":{t}}}"))));
        stage.chunk.iter().next().expect("an output").timestamp
    };
    assert_eq!(time(&mut stage, "1699999999000"), Some(1_699_999_999_000));
    assert_eq!(time(&mut stage, "\"2023-11-14T22:13:19.5+00:00\""), Some(1_699_999_999_500));
    assert_eq!(time(&mut stage, "\"2023-11-14T23:13:19+01:00\""), Some(1_699_999_999_000));
    assert_eq!(
        time(&mut stage, "1699999999"),
        Some(1_699_999_999),
        "milliseconds are meant, also where they look like seconds"
    );
    assert_eq!(time(&mut stage, "0"), None, "the client takes a zero for now");
    for bad in ["-1", "-60000", "null", "1.5", "\"yesterday\"", "\"1969-12-31T23:59:59Z\"", "253402300800000", "true"] {
        let (node, reason, _) = stage.rejected(&input("in", None, Some(&format!("{{\"t\":{bad}}}"))));
        assert_eq!((node.as_str(), reason.as_str()), ("in", "event-time"), "{bad}");
    }
    assert_eq!(
        stage.rejected(&input("in", None, Some("{}"))).2,
        "the event time must be an RFC 3339 string or milliseconds, between 1970 and 9999, it is null"
    );
    // A delete has no time of its own.
    stage.outputs(&input("in", None, None));
    assert_eq!(stage.chunk.iter().next().expect("an output").timestamp, Some(NOW - 5));

    let mut plain = Build::new().json("in").sink("out", &["in"], None).run();
    for (timestamp, expected) in [(None, None), (Some(0), None), (Some(-1), None), (Some(7), Some(7))] {
        let mut record = input("in", None, Some("{}"));
        record.timestamp = timestamp;
        plain.outputs(&record);
        assert_eq!(plain.chunk.iter().next().expect("an output").timestamp, expected);
    }
}

#[test]
fn a_record_that_the_broker_refused_is_rejected_with_its_id() {
    let mut stage = orders().run();
    let reject = Reject { node: "orders_priced".into(), reason: "broker", message: "MSG_SIZE_TOO_LARGE".into() };
    let record = input("orders", Some("k"), Some(ORDER));
    let outcome = stage.pipeline.reject(NodeId(0), &record, reject, &mut stage.chunk);
    assert_eq!(outcome, Ok(Outcome::Rejected { node: NodeId(3), reason: "broker" }));
    let id = EventId::declared("orders", "e1", Some(1_699_999_999_000));
    assert_eq!(stage.header(0, "semel-event-id"), Some(id.to_string()));
    assert_eq!(stage.header(0, "semel-error-message"), Some("MSG_SIZE_TOO_LARGE".into()));
    assert_eq!(stage.outputs(&record).len(), 1);
}

#[test]
fn what_the_stage_needs_and_does_not_get_is_named() {
    let nodes = orders().nodes;
    let (sources, order) = (vec![NodeId(0)], vec![NodeId(1), NodeId(2), NodeId(3)]);
    let plan = plan(nodes, sources, order);
    let environment = |targets: &[&str], topics: &[&str]| Environment {
        targets: targets.iter().map(|t| target(t)).collect(),
        topic_ids: topics.iter().map(|t| ((*t).to_owned(), Uuid::from_u128(1))).collect(),
        dead_letters: TargetId(0),
        clock: Clock::manual(NOW),
    };
    let refused = |targets: &[&str], topics: &[&str]| {
        Pipeline::new(&plan, environment(targets, topics)).expect_err("refused").message
    };
    assert_eq!(refused(&["dl"], &["orders"]), "sink `orders_priced`: the topic `orders_priced` is unknown");
    assert_eq!(refused(&["dl", "orders_priced"], &[]), "source `orders`: the id of the topic `orders` is unknown");
    assert_eq!(refused(&[], &[]), "the topic of the dead letters is unknown");
}
