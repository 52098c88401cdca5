//! What a record becomes on its way through: values, routes, ids, headers.

use super::*;

#[test]
fn an_order_is_priced_and_a_cancelled_one_goes_nowhere() {
    let mut stage = orders().run();
    assert_eq!(
        stage.outputs(&input("orders", Some("k"), Some(ORDER))),
        [out(
            "orders_priced",
            Some("c1"),
            Some(
                r#"{"event_id":"e1","status":"new","customer_id":"c1","qty":2,"price":19.90,"created_at":"2023-11-14T22:13:19Z","total":39.8}"#
            )
        )]
    );
    let output = stage.chunk.iter().next().expect("an output");
    assert_eq!(output.partition, partition(Some(b"c1"), 14, 12));
    assert_eq!(output.timestamp, Some(1_699_999_999_000));
    let id = EventId::declared("orders", "e1", Some(1_699_999_999_000)).derived("shop", "orders_priced", 0);
    assert_eq!(stage.header(0, "semel-event-id"), Some(id.to_string()));

    assert_eq!(stage.outputs(&input("orders", Some("k"), Some(&ORDER.replace("new", "cancelled")))), []);
    let node = |name: &str| stage.pipeline.counts().node(stage.id(name));
    assert_eq!(node("orders"), NodeCounts { input: 2, output: 2, ..NodeCounts::default() });
    assert_eq!(node("live"), NodeCounts { input: 2, output: 1, dropped: 1, ..NodeCounts::default() });
    assert_eq!(node("orders_priced"), NodeCounts { input: 1, output: 1, ..NodeCounts::default() });
}

#[test]
fn numbers_pass_digit_for_digit() {
    let mut stage = Build::new().json("in").remap("r", "in", ".seen = true").sink("out", &["r"], Some(".id")).run();
    for number in [
        "9007199254740993",
        "228930314431312345",
        "-9223372036854775808",
        "18446744073709551615",
        "123456789012345678901234567890",
    ] {
        let record = format!("{{\"id\":{number},\"e\":1e3,\"d\":0.10}}");
        assert_eq!(
            stage.outputs(&input("in", None, Some(&record))),
            [out("out", Some(number), Some(&record.replace('}', ",\"seen\":true}")))]
        );
    }
}

#[test]
fn the_first_route_that_holds_takes_a_record() {
    let mut stage = Build::new()
        .json("in")
        .route("size", "in", &[("large", ".n > 100"), ("medium", ".n > 10")])
        .sink("rest", &["size._unmatched"], None)
        .sink("big", &["size.large"], None)
        .sink("mid", &["size.medium", "size.large"], None)
        .run();
    let topics = |stage: &mut Rig, n: i64| -> Vec<String> {
        stage.outputs(&input("in", None, Some(&format!("{{\"n\":{n}}}")))).into_iter().map(|o| o.0).collect()
    };
    assert_eq!(topics(&mut stage, 500), ["big", "mid"]);
    assert_eq!(topics(&mut stage, 50), ["mid"]);
    assert_eq!(topics(&mut stage, 5), ["rest"]);
    assert_eq!(
        stage.rejected(&input("in", None, Some(r#"{"n":"x"}"#))),
        rejection("size", "expression", "expected string, got integer")
    );
    // A delete goes everywhere, and to each taker once.
    let deletes = stage.outputs(&input("in", Some("k"), None));
    assert_eq!(deletes, ["rest", "big", "mid"].map(|topic| out(topic, Some("k"), None)));
}

#[test]
fn branches_do_not_see_each_others_changes() {
    let mut stage = Build::new()
        .json("in")
        .remap("a", "in", ".x = 1\ndel(.gone)")
        .remap("b", "in", ".y = 2\n.x = .x")
        .sink("plain", &["in"], None)
        .sink("both", &["a", "b"], None)
        .rekey("k", "a", ".x")
        .sink("keyed", &["k", "in"], None)
        .run();
    assert_eq!(
        stage.outputs(&input("in", Some("k"), Some(r#"{"gone":0}"#))),
        [
            out("plain", Some("k"), Some(r#"{"gone":0}"#)),
            out("both", Some("k"), Some(r#"{"x":1}"#)),
            out("both", Some("k"), Some(r#"{"gone":0,"y":2,"x":null}"#)),
            out("keyed", Some("k"), Some(r#"{"gone":0}"#)),
            out("keyed", Some("1"), Some(r#"{"x":1}"#)),
        ]
    );
}

#[test]
fn flat_map_makes_a_record_of_every_element() {
    let mut stage =
        Build::new().json("in").flat_map("lines", "in", ".items").sink("out", &["lines"], Some("%key")).run();
    let outputs =
        |stage: &mut Rig, items: &str| stage.outputs(&input("in", Some("k"), Some(&format!("{{\"items\":{items}}}"))));
    assert_eq!(
        outputs(&mut stage, r#"[{"b":1.0,"a":2},{},{"c":[1]}]"#),
        [r#"{"a":2,"b":1.0}"#, "{}", r#"{"c":[1]}"#].map(|value| out("out", Some("k"), Some(value)))
    );
    let ids: Vec<_> = (0..3).map(|i| stage.header(i, "semel-event-id")).collect();
    assert_eq!(ids, [None, None, None], "nobody declared an id");
    assert_eq!(outputs(&mut stage, "[]"), []);
    let mut rejected = |items: &str| stage.rejected(&input("in", Some("k"), Some(&format!("{{\"items\":{items}}}"))));
    assert_eq!(rejected("5"), rejection("lines", "expression", "the expression gave an integer, not an array"));
    assert_eq!(
        rejected(r#"[{"a":1},"x"]"#),
        rejection("lines", "expression", "element 1: the value must be an object, it is a string")
    );
    assert_eq!(rejected("[{\"n\":18446744073709551615}]").1, "inexact-number");
}

#[test]
fn derived_ids_count_the_outputs_of_one_input() {
    let mut stage = Build::new()
        .source("in", Format::Json, Some(".id"), None)
        .flat_map("lines", "in", ".items")
        .sink("out", &["lines", "in"], None)
        .run();
    stage.outputs(&input("in", None, Some(r#"{"id":7,"items":[{},{}]}"#)));
    let id = EventId::declared("in", "7", None);
    let ids: Vec<_> = (0..3).map(|i| stage.header(i, "semel-event-id").expect("an id")).collect();
    assert_eq!(ids, [0, 1, 2].map(|i| id.derived("shop", "out", i).to_string()));
    // The same on another attempt.
    stage.outputs(&input("in", None, Some(r#"{"id":7,"items":[{},{}]}"#)));
    assert_eq!(stage.header(2, "semel-event-id"), Some(ids[2].clone()));
}

#[test]
fn an_event_id_comes_from_where_it_is_known_best() {
    let header = EventId::declared("elsewhere", "h", None).to_string();
    let carried = [(&b"semel-event-id"[..], Some(header.as_bytes()))];
    let id = |stage: &mut Rig, input: &Input<'_>| {
        stage.outputs(input);
        stage.header(0, "semel-event-id")
    };
    let derived = |id: EventId| Some(id.derived("shop", "out", 0).to_string());
    let header = EventId::carried("", header.as_bytes(), None).expect("an id");

    // Declared beats a foreign header; without a value there is only the header, or the place in the log.
    let mut declared = Build::new().source("in", Format::Json, Some(".id"), None).sink("out", &["in"], None).run();
    let mut record = input("in", Some("k"), Some(r#"{"id":"e1"}"#));
    assert_eq!(id(&mut declared, &record), derived(EventId::declared("in", "e1", None)));
    record.headers = Headers(carried.to_vec());
    assert_eq!(id(&mut declared, &record), derived(EventId::declared("in", "e1", None)));
    record.value = None;
    assert_eq!(id(&mut declared, &record), derived(header));
    record.headers = Headers::default();
    assert_eq!(id(&mut declared, &record), derived(EventId::at(Uuid::from_u128(1), 14, Offset(42))));

    // Nothing declared: the header is passed on, and none is made up.
    let mut silent = Build::new().json("in").sink("out", &["in"], None).run();
    let mut record = input("in", Some("k"), Some("{}"));
    assert_eq!(id(&mut silent, &record), None);
    record.headers = Headers(carried.to_vec());
    assert_eq!(id(&mut silent, &record), derived(header));

    // A topic that this job writes: its header is our own word.
    let mut own = Build::new()
        .json("in")
        .sink("out", &["in"], None)
        .source("again", Format::Json, Some(".id"), None)
        .sink("last", &["again"], None);
    if let NodeKind::Source(source) = &mut own.nodes[2].kind {
        source.topics = vec!["out".into()];
    }
    let mut own = own.run();
    let mut record = input("out", Some("k"), Some(r#"{"id":"e1"}"#));
    record.headers = Headers(carried.to_vec());
    own.chunk.clear();
    own.pipeline.process(NodeId(2), &record, &mut own.chunk).expect("processed");
    assert_eq!(own.header(0, "semel-event-id"), Some(header.derived("shop", "last", 0).to_string()));
}

#[test]
fn a_declared_id_must_be_one() {
    let mut stage = Build::new().source("in", Format::Json, Some(".id"), None).sink("out", &["in"], None).run();
    let mut rejected = |value: &str| stage.rejected(&input("in", None, Some(value)));
    for (value, found) in [
        ("{}", "null"),
        (r#"{"id":null}"#, "null"),
        (r#"{"id":""}"#, "empty or not UTF-8"),
        (r#"{"id":1.5}"#, "a float"),
        (r#"{"id":{}}"#, "an object"),
    ] {
        let message = format!("the event id must be a string or an integer, it is {found}");
        assert_eq!(rejected(value), rejection("in", "event-id", &message));
    }
    // 64 unsigned bits are no problem: the digits are the id.
    let mut stage = Build::new().source("in", Format::Json, Some(".id"), None).sink("out", &["in"], None).run();
    stage.outputs(&input("in", None, Some(r#"{"id":18446744073709551615}"#)));
    let id = EventId::declared("in", "18446744073709551615", None).derived("shop", "out", 0);
    assert_eq!(stage.header(0, "semel-event-id"), Some(id.to_string()));
}

#[test]
fn headers_go_on_in_order_with_repeats_and_nulls_and_one_id() {
    let mut stage = orders().run();
    let mut record = input("orders", Some("k"), Some(ORDER));
    let headers: Vec<(&[u8], Option<&[u8]>)> = vec![
        (b"a", Some(b"1")),
        (b"semel-event-id", Some(b"old")),
        (b"a", Some(b"2")),
        (b"semel-event-id", Some(b"older")),
        (b"b", None),
        (b"c", Some(b"")),
        (b"\xff\xfe", Some(b"\xff")),
        (b"semel-error-attempt", Some(b"3")),
    ];
    record.headers = Headers(headers.clone());
    stage.outputs(&record);
    let id = stage.header(0, "semel-event-id").expect("an id");
    let mut expected = headers;
    expected.remove(3);
    expected[1].1 = Some(id.as_bytes());
    let output = stage.chunk.iter().next().expect("an output");
    assert_eq!(output.headers().collect::<Vec<_>>(), expected);

    // A dead letter keeps them too.
    record.value = Some(b"{}");
    stage.rejected(&record);
    let letter = stage.chunk.iter().next().expect("a letter");
    assert_eq!(letter.headers().next(), Some((&b"a"[..], Some(&b"1"[..]))));
    assert!(letter.headers().any(|header| header == (b"\xff\xfe", Some(b"\xff"))));
    assert_eq!(stage.header(0, "semel-error-attempt"), Some("4".into()));
}
