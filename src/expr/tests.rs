use super::*;
use crate::ids::EventId;
use crate::record::{Headers, Input, Offset};
use crate::topology::spec::Format;

fn program(source: &str, role: Role) -> Program {
    match compile(source, role) {
        Ok((program, warnings)) => {
            assert_eq!(warnings, [], "{source}");
            program
        }
        Err(errors) => panic!("{source}: {errors:#?}"),
    }
}

/// Message and help of each error, and the text it points at.
fn errors(source: &str, role: Role) -> Vec<(String, String)> {
    let errors = compile(source, role).expect_err("refused");
    assert!(errors.iter().all(|e| e.error));
    errors
        .into_iter()
        .map(|e| {
            (source[e.span.clone()].to_owned(), e.help.map_or(e.message.clone(), |h| format!("{} [{h}]", e.message)))
        })
        .collect()
}

fn input<'a>(key: Option<&'a [u8]>, headers: &[(&'a [u8], Option<&'a [u8]>)]) -> Input<'a> {
    Input {
        topic: "orders",
        partition: 3,
        offset: Offset(42),
        timestamp: Some(1_700_000_000_123),
        key,
        value: None,
        headers: Headers(headers.to_vec()),
    }
}

fn body(format: Format, value: Option<&str>) -> Body {
    let mut body = Body::default();
    body.decode(format, value.map(str::as_bytes)).expect("decodes");
    body
}

fn encoded(body: &Body) -> Option<String> {
    let mut out = Vec::new();
    body.encode(&mut out);
    (!body.is_null()).then(|| String::from_utf8_lossy(&out).into_owned())
}

fn test(source: &str, json: &str) -> Result<Option<bool>, Fault> {
    let input = input(None, &[]);
    program(source, Role::Condition).condition(
        &mut Runtime::default(),
        &body(Format::Json, Some(json)),
        &Metadata::new(&input, None, None),
    )
}

fn value(source: &str, json: &str) -> Result<Option<Value>, Fault> {
    let input = input(None, &[]);
    program(source, Role::Value).value(
        &mut Runtime::default(),
        &body(Format::Json, Some(json)),
        &Metadata::new(&input, None, None),
    )
}

fn remap_as(format: Format, source: &str, text: Option<&str>) -> Result<Option<String>, Fault> {
    let input = input(None, &[]);
    let mut body = body(format, text);
    let kept = program(source, Role::Remap).transform(
        &mut Runtime::default(),
        &mut body,
        &Metadata::new(&input, None, None),
    )?;
    Ok(if kept { encoded(&body) } else { Some("dropped".into()) })
}

fn remap(source: &str, json: &str) -> Result<String, Fault> {
    remap_as(Format::Json, source, Some(json)).map(|text| text.unwrap_or("null".into()))
}

fn fault(reason: &'static str, message: &str) -> Fault {
    Fault::new(reason, message)
}

#[test]
fn the_orders_program_changes_what_it_names_and_nothing_else() {
    let source = ".total = to_float!(.qty) * to_float!(.price)\ndel(.note)\n";
    assert_eq!(
        remap(source, r#"{"order_id":"o1","qty":3,"price":19.90,"note":"x","id":18446744073709551615,"t":"\u00e9"}"#),
        Ok(r#"{"order_id":"o1","qty":3,"price":19.90,"id":18446744073709551615,"t":"\u00e9","total":59.699999999999996}"#.into())
    );
    assert_eq!(
        remap(source, r#"{"qty":"many","price":1}"#),
        Err(fault("expression", "to_float: Invalid floating point number \"many\": invalid float literal"))
    );
}

#[test]
fn writes_reach_into_members_and_the_root() {
    assert_eq!(
        remap(".a.b = 1\ndel(.a.c)", r#"{"a":{"c":1.50,"d":1.50},"z":1.50}"#),
        Ok(r#"{"a":{"b":1,"d":1.5},"z":1.50}"#.into())
    );
    assert_eq!(remap(".new = del(.old)", r#"{"old":"x","z":1.50}"#), Ok(r#"{"z":1.50,"new":"x"}"#.into()));
    assert_eq!(remap(". = {\"b\": .a, \"a\": 1}", r#"{"a":2}"#), Ok(r#"{"a":1,"b":2}"#.into()));
    assert_eq!(remap(". |= {\"b\": 1}", r#"{"a":2}"#), Ok(r#"{"a":2,"b":1}"#.into()));
    assert_eq!(remap(". = {}\n.x = 1\ndel(.x)\n.y = .a", r#"{"a":2}"#), Ok(r#"{"y":null}"#.into()));
    assert_eq!(remap("del(.)", r#"{"a":2}"#), Ok("{}".into()));
    assert_eq!(remap("if .a == 2 { abort }", r#"{"a":2}"#), Ok("dropped".into()));
    assert_eq!(remap("if .a == 2 { return null }\n.b = 1", r#"{"a":2}"#), Ok(r#"{"a":2}"#.into()));
    assert_eq!(
        remap(". = [.a]", r#"{"a":2}"#),
        Err(fault("expression", "the value must be an object, it is an array"))
    );
    assert_eq!(remap(". = .gone", r#"{"a":2}"#), Err(fault("expression", "the value must be an object, it is null")));
}

#[test]
fn what_json_cannot_carry_is_refused_where_it_is_made() {
    assert_eq!(
        remap(".b = decode_base64!(.a)", r#"{"a":"//8="}"#),
        Err(fault(
            "expression",
            "the value of `b` cannot be written as JSON: it holds bytes that are not UTF-8; encode_base64 makes text of them"
        ))
    );
    assert_eq!(
        remap(".b = to_float!(.a) * to_float!(.a)", r#"{"a":1e300}"#),
        Err(fault("expression", "the value of `b` cannot be written as JSON: it holds a number that is not finite"))
    );
}

#[test]
fn a_number_that_cannot_be_held_fails_who_may_write_it_and_nobody_else() {
    let record = r#"{"id":18446744073709551615,"in":{"n":0.1000000000000000055,"m":1},"qty":2}"#;
    let refused = |member: &str, number: &str| {
        Err(fault(
            "inexact-number",
            &format!(
                "the member `{member}` holds {number}, which is neither a 64-bit integer nor exactly a double; a condition may read \
                 it, another expression would change it"
            ),
        ))
    };
    assert_eq!(test(".id > 5", record), Ok(Some(true)));
    assert_eq!(remap("if .id == 5 { abort }", record), Ok(record.into()));
    assert_eq!(remap(".qty = 3", record), Ok(record.replace("\"qty\":2", "\"qty\":3")));
    assert_eq!(remap(".m = .in.m", record), Ok(record.replace("2}", "2,\"m\":1}")));
    assert_eq!(remap(".id = 3", record), Ok(record.replace("18446744073709551615", "3")));
    assert_eq!(remap("del(.id)", record), Ok(record.replace("\"id\":18446744073709551615,", "")));
    assert_eq!(remap(".copy = .id", record), refused("id", "18446744073709551615"));
    assert_eq!(remap(".new = del(.id)", record), refused("id", "18446744073709551615"));
    assert_eq!(remap(".in.m = 2", record), refused("in", "0.1000000000000000055"));
    assert_eq!(remap(". |= {\"b\": 1}", record), refused("id", "18446744073709551615"));
    assert_eq!(remap(".y = encode_json(.in)", record).map_err(|f| f.reason), Err("inexact-number"));
    assert_eq!(value(".id", record).map_err(|f| f.reason), Err("inexact-number"));
    assert_eq!(value(".in.m", record), Ok(Some(Value::from(1))));
}

#[test]
fn sums_of_integers_are_exact_in_64_bits_and_wrap_beyond() {
    let sum = ".sum = int!(.a) + int!(.a) + int!(.a)";
    assert_eq!(remap(sum, r#"{"a":9007199254740993}"#), Ok(r#"{"a":9007199254740993,"sum":27021597764222979}"#.into()));
    // As documented: VRL's own arithmetic.
    assert_eq!(remap(".a = int!(.a) + 1", r#"{"a":9223372036854775807}"#), Ok(r#"{"a":-9223372036854775808}"#.into()));
}

#[test]
fn conditions_may_fail_and_the_record_bears_it() {
    assert_eq!(test(".total > 1000", r#"{"total":1000.5}"#), Ok(Some(true)));
    assert_eq!(test(".total > 1000", r#"{"total":"much"}"#), Err(fault("expression", "expected string, got integer")));
    assert_eq!(test("contains(.name, \"x\")", r#"{"name":"xyz"}"#), Ok(Some(true)));
    assert_eq!(
        test("contains(.name, \"x\")", r#"{"name":5}"#),
        Err(fault("expression", "contains: expected string, got integer"))
    );
    assert_eq!(test(".active", r#"{"active":true}"#), Ok(Some(true)));
    assert_eq!(test(".active", r#"{}"#), Err(fault("expression", "the condition gave null, not true or false")));
    assert_eq!(test("if .a == 2 { abort }\n.b > 1", r#"{"a":2}"#), Ok(None));
    assert_eq!(test("if .a == 2 { return false }\n.a > 0", r#"{"a":2}"#), Ok(Some(false)));
    assert_eq!(test("# a comment\nx = .a\nx > 1 # another", r#"{"a":2}"#), Ok(Some(true)));
    assert_eq!(test(".status != \"cancelled\"", r#"{"status":"c\u0061ncelled"}"#), Ok(Some(false)));
    assert_eq!(test("exists(.a) && !exists(.b)", r#"{"a":null}"#), Ok(Some(true)));
}

/// The parentheses keep the expression from being read off the record's text.
#[test]
fn a_comparison_with_a_text_answers_as_the_expression_does() {
    let values = [
        r#"{"a":"x"}"#,
        r#"{"a":"y"}"#,
        r#"{"a":"\u0078"}"#,
        r#"{"a":""}"#,
        r#"{"a":"x","b":{"a":"y"}}"#,
        r#"{"a": 5}"#,
        r#"{"a":18446744073709551616}"#,
        r#"{"a":null}"#,
        r#"{"a":true}"#,
        r#"{"a":["x"]}"#,
        r#"{"a":{"x":"x"}}"#,
        "{}",
    ];
    for (op, text) in [("==", "x"), ("!=", "x"), ("==", "y"), ("!=", "5"), ("==", "null")] {
        let (fast, plain) = (format!(".a {op} \"{text}\""), format!("(.a) {op} \"{text}\""));
        assert!(program(&fast, Role::Condition).inner.comparison.is_some());
        assert!(program(&plain, Role::Condition).inner.comparison.is_none());
        for value in values {
            assert_eq!(test(&fast, value), test(&plain, value), "{fast} of {value}");
        }
        let input = input(None, &[]);
        let metadata = Metadata::new(&input, None, None);
        let mut written = body(Format::Json, Some(r#"{"a":"y"}"#));
        let runtime = &mut Runtime::default();
        program(".a = \"x\"", Role::Remap).transform(runtime, &mut written, &metadata).unwrap();
        let mut removed = body(Format::Json, Some(r#"{"a":"x"}"#));
        program("del(.a)", Role::Remap).transform(runtime, &mut removed, &metadata).unwrap();
        let tombstone = body(Format::Json, None);
        for body in [written, removed, tombstone] {
            let answer =
                |source: &str| program(source, Role::Condition).condition(&mut Runtime::default(), &body, &metadata);
            assert_eq!(answer(&fast), answer(&plain), "{fast} of {:?}", encoded(&body));
        }
    }
}

#[test]
fn metadata_is_there_to_read() {
    let headers: [(&[u8], Option<&[u8]>); 4] =
        [(b"a", Some(b"1")), (b"a", Some(b"2")), (b"b", None), (b"\xff", Some(b"\xff"))];
    let input = input(Some(b"input"), &headers);
    let id = EventId::declared("orders", "e1", None);
    let metadata = Metadata::new(&input, Some(b"k1"), Some(id));
    let tombstone = body(Format::Json, None);
    let read = |source: &str| {
        let value = program(source, Role::Value).value(&mut Runtime::default(), &tombstone, &metadata);
        value.expect("a value").expect("a value").to_string()
    };
    assert_eq!(read("%key"), r#""k1""#);
    assert_eq!(read("[%topic, %partition, %offset]"), r#"["orders", 3, 42]"#);
    assert_eq!(read("%timestamp"), "t'2023-11-14T22:13:20.123Z'");
    assert_eq!(read("to_unix_timestamp!(%timestamp, unit: \"milliseconds\")"), "1700000000123");
    assert_eq!(read("%headers[1]"), r#"["a", "2"]"#);
    assert_eq!(read("%headers[2][1]"), "null");
    assert_eq!(read("%headers[3][0]"), "\"\u{fffd}\"");
    assert_eq!(read("%event_id"), format!("\"{id}\""));
    assert_eq!(read("keys(%)"), r#"["event_id", "headers", "key", "offset", "partition", "timestamp", "topic"]"#);
    assert_eq!(read("."), "null");
    assert_eq!(read(".a"), "null");
}

#[test]
fn text_and_bytes_are_the_value_themselves() {
    let text = |source: &str, text: &str| remap_as(Format::String, source, Some(text));
    assert_eq!(text(". = upcase(.)", "abc"), Ok(Some("ABC".into())));
    assert_eq!(text(". = parse_json!(.)\n.b = 1", "{\"a\":1}"), Ok(Some("{\"a\":1,\"b\":1}".into())));
    assert_eq!(
        text(". = 5", "abc"),
        Err(fault("expression", "the value must be a string or an object, it is an integer"))
    );
    assert_eq!(
        text(". = decode_base64!(.)", "//8="),
        Err(fault("expression", "the value of a string record must be UTF-8"))
    );
    let mut bytes = body(Format::Bytes, Some("//8="));
    let input = input(None, &[]);
    let program = program(". = decode_base64!(.)", Role::Remap);
    assert_eq!(program.transform(&mut Runtime::default(), &mut bytes, &Metadata::new(&input, None, None)), Ok(true));
    let mut out = Vec::new();
    bytes.encode(&mut out);
    assert_eq!(out, b"\xff\xff");
    assert!(program.uses().text);
}

#[test]
fn a_processed_tombstone_stays_one_until_something_is_assigned() {
    let json = |source: &str| remap_as(Format::Json, source, None);
    assert_eq!(json(".x = .y"), Ok(Some("{\"x\":null}".into())));
    assert_eq!(json("if . != null { .x = 1 }"), Ok(None));
    assert_eq!(json(". = {\"deleted\": true}"), Ok(Some("{\"deleted\":true}".into())));
    assert_eq!(json(". = \"gone\""), Err(fault("expression", "the value must be an object, it is a string")));
    assert_eq!(json("del(.x)"), Ok(None));
}

#[test]
fn flat_map_gives_an_array() {
    let expand = |source: &str, json: &str| {
        let input = input(None, &[]);
        let items = program(source, Role::Expand).expand(
            &mut Runtime::default(),
            &mut body(Format::Json, Some(json)),
            &Metadata::new(&input, None, None),
        );
        items.map(|items| items.map(|items| items.iter().map(ToString::to_string).collect::<Vec<_>>()))
    };
    assert_eq!(
        expand(".items", r#"{"items":[{"a":1},{"a":2}]}"#),
        Ok(Some(vec!["{ \"a\": 1 }".into(), "{ \"a\": 2 }".into()]))
    );
    assert_eq!(expand("del(.items)", r#"{"items":[]}"#), Ok(Some(vec![])));
    assert_eq!(expand(".items", "{}"), Err(fault("expression", "the expression gave null, not an array")));
    let merge = "base = .\ndel(base.items)\nmap_values(array!(.items)) -> |item| { merge(base, object!(item)) }";
    assert_eq!(expand(merge, r#"{"o":1,"items":[{"a":1}]}"#), Ok(Some(vec!["{ \"a\": 1, \"o\": 1 }".into()])));
    assert_eq!(expand(".items", r#"{"items":[1e400]}"#).map_err(|f| f.reason), Err("inexact-number"));
}

#[test]
fn errors_point_at_their_place_and_say_what_to_do() {
    assert_eq!(
        errors(".a = now()", Role::Value)[0],
        (
            "now".into(),
            "`now` is not available here: the value must be the same on every attempt, and it depends on the clock"
                .into()
        )
    );
    assert_eq!(
        errors("get_env_var!(\"HOME\") == \"x\"", Role::Condition),
        [(
            "get_env_var".into(),
            "`get_env_var` is not available: it reads the environment of the process; use `${NAME}` in a setting of the file".into()
        )]
    );
    assert_eq!(
        errors("upcas(.a) == \"X\"", Role::Condition),
        [("upcas".into(), "call to undefined function: undefined function [did you mean \"upcase\"?]".into())]
    );
    assert_eq!(
        errors("\"x\"", Role::Condition),
        [("\"x\"".into(), "a condition must be true or false, but this gives string".into())]
    );
    assert_eq!(
        errors("{ \"a\": 1 }", Role::Expand),
        [(
            "{ \"a\": 1 }".into(),
            "the expression must give an array, one record an element, but this gives { a: integer }".into()
        )]
    );
    assert_eq!(
        errors("%topik == \"x\"", Role::Condition),
        [(
            "%topik".into(),
            "unknown metadata `%topik` [did you mean `%topic`? There are %key, %topic, %partition, %offset, %timestamp, %headers, \
             %event_id]"
                .into()
        )]
    );
    assert_eq!(
        errors("%key = .a", Role::Remap),
        [(
            "%key".into(),
            "mutation of read-only value [metadata is read-only; a `rekey` transform changes the key]".into()
        )]
    );
    assert_eq!(
        errors(".a = 1", Role::Value),
        [(
            ".a".into(),
            "mutation of read-only value [this expression only reads; a `remap` transform changes records]".into()
        )]
    );
    let syntax = errors(".a ==", Role::Condition);
    assert_eq!(syntax[0].0, "");
    assert!(syntax[0].1.starts_with("syntax error: unexpected end of program"), "{syntax:?}");
    // A wrapped expression points into its own text too.
    assert_eq!(errors(".a > 1 && nope(.b)", Role::Condition)[0].0, "nope");
    let unhandled = errors(".total = to_float(.qty)", Role::Remap);
    assert_eq!(unhandled[0].0, "to_float(.qty)");
    assert!(unhandled[0].1.starts_with("unhandled fallible assignment"), "{unhandled:?}");
}

#[test]
fn warnings_come_beside_the_program() {
    let (_, warnings) = compile("unused = 1\n.a == 1", Role::Condition).expect("compiles");
    assert_eq!(warnings.len(), 1);
    assert!(!warnings[0].error);
    assert_eq!(warnings[0].span, 0..6);
    let (_, warnings) = compile("unused = 1\n.a > 1", Role::Condition).expect("compiles");
    assert_eq!(warnings.len(), 1, "{warnings:?}");
}

#[test]
fn uses_tell_what_an_expression_touches() {
    let uses = |source: &str, role| program(source, role).uses().clone();
    let remap = uses("if exists(.a) { .b.c = now() }\ndel(.d)\n. |= {\"x\": %offset}\n.f = uuid_v4()", Role::Remap);
    assert_eq!(remap.nondeterministic_functions, ["now", "uuid_v4"]);
    assert_eq!(remap.reads, ["%offset", ".", ".a"]);
    assert_eq!(remap.writes, [".", ".b.c", ".d", ".f"]);
    assert!(remap.offset_or_partition && remap.value);
    let key = uses("%key", Role::Value);
    assert!(!key.value && !key.offset_or_partition && !key.text);
    assert!(uses("%", Role::Value).offset_or_partition);
    let closure = uses("for_each(array!(.a)) -> |_i, v| { .sum = v }", Role::Remap);
    assert_eq!((closure.reads, closure.writes), (vec![".a".to_owned()], vec![".sum".to_owned()]));
    assert_eq!(program(".amount", Role::Value).member(), Some("amount"));
    assert_eq!(program(".amount.x", Role::Value).member(), None);
    assert_eq!(program("%key", Role::Value).member(), None);
}

/// A key made by one of these could not be made again.
#[test]
fn every_function_of_clock_or_chance_is_kept_from_values() {
    for name in [
        "now()",
        "random_int(0, 5)",
        "random_bool()",
        "random_float(0.0, 1.0)",
        "random_bytes(2)",
        "uuid_v4()",
        "uuid_v7()",
    ] {
        let errors = errors(name, Role::Value);
        assert!(errors[0].1.contains("the same on every attempt"), "{name}: {errors:?}");
        assert_eq!(errors[0].0, name.split('(').next().expect("a name"));
    }
    for name in ["parse_syslog", "parse_klog", "parse_linux_authorization", "shannon_entropy"] {
        let errors = errors(&format!("{name}!(.a)"), Role::Value);
        assert!(errors[0].1.contains("the same on every attempt"), "{name}: {errors:?}");
    }
}

#[test]
fn programs_are_shared_by_threads() {
    fn shared<T: Send + Sync + Clone + std::fmt::Debug>(_: &T) {}
    shared(&program(".a", Role::Value));
}
