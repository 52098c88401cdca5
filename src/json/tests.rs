use std::collections::HashSet;

use proptest::prelude::*;
use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use vrl::path::{OwnedSegment, parse_value_path};
use vrl::value::Value;

use super::*;

fn body(text: &str) -> JsonBody {
    let mut body = JsonBody::default();
    body.decode(text.as_bytes()).unwrap_or_else(|e| panic!("{text}: {e}"));
    body
}

fn refusal(text: impl AsRef<[u8]>) -> String {
    JsonBody::default().decode(text.as_ref()).expect_err("refused").to_string()
}

fn encoded(body: &JsonBody) -> String {
    let mut out = Vec::new();
    body.encode(&mut out);
    String::from_utf8(out).expect("UTF-8")
}

fn path(text: &str) -> Vec<OwnedSegment> {
    parse_value_path(text).expect("a path").segments
}

fn set(body: &mut JsonBody, at: &str, value: impl Into<Value>) -> Result<(), Inexact> {
    let segments = path(at);
    let OwnedSegment::Field(name) = &segments[0] else { panic!("{at} begins with a name") };
    body.set(name, &segments[1..], value.into())
}

fn unset(body: &mut JsonBody, at: &str, compact: bool) -> Result<Option<Value>, Inexact> {
    let segments = path(at);
    let OwnedSegment::Field(name) = &segments[0] else { panic!("{at} begins with a name") };
    body.unset(name, &segments[1..], compact)
}

#[test]
fn an_untouched_record_is_copied_byte_for_byte() {
    for text in [
        "{}",
        " { } ",
        "{\"a\" : 1,\n\"b\":[ 1.50, {\"c\":\"\\u00e9\\/\"} ]}\n",
        r#"{"n":123456789012345678901234567890,"z":-0}"#,
    ] {
        let body = body(text);
        assert!(!body.is_touched());
        assert_eq!(encoded(&body), text);
    }
}

#[test]
fn members_that_nobody_wrote_keep_their_bytes_and_their_order() {
    let mut compact = body(r#"{"a":1.50,"b":"\u00e9","c":[1e3, 2],"d":null,"e":18446744073709551615}"#);
    set(&mut compact, "total", Value::from_f64_or_zero(2.5)).expect("exact");
    set(&mut compact, "d", "x\n").expect("exact");
    unset(&mut compact, "a", false).expect("exact");
    assert_eq!(encoded(&compact), r#"{"b":"\u00e9","c":[1e3, 2],"d":"x\n","e":18446744073709551615,"total":2.5}"#);

    let mut spaced = body("{ \"a\" : 1.50 , \"b\" : [ 1 ] }");
    set(&mut spaced, "c", 1).expect("exact");
    assert_eq!(encoded(&spaced), r#"{"a":1.50,"b":[ 1 ],"c":1}"#);
}

#[test]
fn a_member_that_comes_back_takes_its_old_place() {
    let mut body = body(r#"{"a":1,"b":2}"#);
    assert_eq!(unset(&mut body, "a", false), Ok(Some(Value::from(1))));
    assert_eq!(encoded(&body), r#"{"b":2}"#);
    assert_eq!(body.get(&path("a")), (None, None));
    set(&mut body, "a", true).expect("exact");
    assert_eq!(encoded(&body), r#"{"a":true,"b":2}"#);
    body.discard("a");
    body.discard("b");
    assert_eq!(encoded(&body), "{}");
}

#[test]
fn paths_below_a_member_rewrite_that_member_alone() {
    let mut body = body(r#"{"a":{"x":1.0,"y":[1,2]},"n":1.0}"#);
    set(&mut body, "a.y[1]", "two").expect("exact");
    set(&mut body, "new.deep[1]", true).expect("exact");
    assert_eq!(encoded(&body), r#"{"a":{"x":1.0,"y":[1,"two"]},"n":1.0,"new":{"deep":[null,true]}}"#);
    assert_eq!(unset(&mut body, "new.deep[1]", false), Ok(Some(Value::from(true))));
    assert_eq!(unset(&mut body, "new.deep[0]", true), Ok(Some(Value::Null)));
    assert_eq!(unset(&mut body, "a.none", true), Ok(None));
    assert_eq!(encoded(&body), r#"{"a":{"x":1.0,"y":[1,"two"]},"n":1.0}"#);
}

#[test]
fn reading_tells_of_numbers_that_do_not_fit() {
    let body =
        body(r#"{"id":9007199254740993,"big":{"ok":1.5,"n":[1,18446744073709551615]},"s":"18446744073709551615"}"#);
    assert_eq!(body.get(&path("id")), (Some(&Value::from(9_007_199_254_740_993_i64)), None));
    assert_eq!(body.get(&path("big.ok")), (Some(&Value::from_f64_or_zero(1.5)), None));
    let inexact = Inexact { member: "big".into(), number: "18446744073709551615".into() };
    assert_eq!(
        body.get(&path("big.n[1]")),
        (Some(&Value::from_f64_or_zero(1.8446744073709552e19)), Some(inexact.clone()))
    );
    assert_eq!(body.get(&path("big.n[-1]")).1, Some(inexact.clone()));
    assert_eq!(body.get(&path("big.n[0]")), (Some(&Value::from(1)), None));
    assert_eq!(body.get(&path("big")).1, Some(inexact.clone()));
    assert_eq!(body.get(&path("s")).1, None);
    assert_eq!(body.get(&[]).1, Some(inexact.clone()));

    // A write beside such a number would lose its digits; one over it does not.
    assert_eq!(set(&mut body.clone(), "big.ok", 2), Err(inexact.clone()));
    assert_eq!(unset(&mut body.clone(), "big.ok", false), Err(inexact));
    assert_eq!(set(&mut body.clone(), "big", 2), Ok(()));
    assert_eq!(set(&mut body.clone(), "id", 2), Ok(()));
}

#[test]
fn names_are_known_by_what_they_mean() {
    let mut body = body(r#"{"\u0061b":1,"a long name of more than eight bytes":2,"":3,"é":4}"#);
    assert_eq!(body.member("ab").as_deref(), Some(&b"1"[..]));
    assert_eq!(body.member("a long name of more than eight bytes").as_deref(), Some(&b"2"[..]));
    assert_eq!(body.member("").as_deref(), Some(&b"3"[..]));
    assert_eq!(body.member("é").as_deref(), Some(&b"4"[..]));
    assert_eq!(body.member("a long name of more than eight byteS"), None);
    set(&mut body, "ab", 5).expect("exact");
    assert_eq!(body.member("ab").as_deref(), Some(&b"5"[..]));
    let names: Vec<String> = body.members().map(|(name, _)| name.into_owned()).collect();
    assert_eq!(names, ["ab", "a long name of more than eight bytes", "", "é"]);
}

#[test]
fn what_is_no_record_is_refused_with_its_place() {
    let cases: &[(&str, &str)] = &[
        ("", "the value is empty, a JSON object was expected (byte 0)"),
        ("  ", "a JSON object was expected (byte 2)"),
        ("null", "the value is not a JSON object (byte 0)"),
        (" [1]", "the value is not a JSON object (byte 1)"),
        ("hello", "a JSON object was expected (byte 0)"),
        ("{", "the text ends in the middle of a value (byte 1)"),
        (r#"{"a":1,}"#, "a member name in quotes was expected (byte 7)"),
        (r#"{"a" 1}"#, "`:` was expected behind the member name (byte 5)"),
        (r#"{"a":01}"#, "a number may not begin with 0 (byte 6)"),
        (r#"{"a":1.}"#, "a digit was expected (byte 7)"),
        (r#"{"a":[1,]}"#, "a value was expected (byte 8)"),
        (r#"{"a":[1}"#, "`,` or `]` was expected (byte 7)"),
        (r#"{"a":1]"#, "`,` or `}` was expected (byte 6)"),
        (r#"{"a":"x"#, "the text ends inside a string (byte 7)"),
        (r#"{"a":1} {}"#, "something follows the JSON object (byte 8)"),
        (r#"{"a":NaN}"#, "a value was expected (byte 5)"),
        ("{\"a\":\"\t\"}", "a control character inside a string (byte 6)"),
        (r#"{"a":"\x"}"#, "an unknown escape (byte 6)"),
        (r#"{"a":"\u00g0"}"#, "\\u needs four hexadecimal digits (byte 6)"),
        (r#"{"a":"\ud83d"}"#, "a lone surrogate in a \\u escape (byte 6)"),
        (r#"{"a":"\ud83d\u0041"}"#, "a lone surrogate in a \\u escape (byte 6)"),
        (r#"{"a":"\ude00"}"#, "a lone surrogate in a \\u escape (byte 6)"),
        (r#"{"a":1,"b":2,"\u0061":3}"#, "the member \"a\" stands twice in its object (byte 13)"),
        (r#"{"a":[{"b":1,"b":2}]}"#, "the member \"b\" stands twice in its object (byte 13)"),
    ];
    for (text, message) in cases {
        assert_eq!(refusal(text), *message, "{text}");
    }
    assert_eq!(refusal(b"{\"a\":\"\xff\"}"), "the text is not UTF-8 (byte 6)");
    assert_eq!(encoded(&body(r#"{"a":"\ud83d\ude00"}"#)), r#"{"a":"\ud83d\ude00"}"#);
}

#[test]
fn depth_is_counted_and_never_recursed_into() {
    let deep = |n: usize| format!("{{\"a\":{}1{}}}", "[".repeat(n), "]".repeat(n));
    assert_eq!(encoded(&body(&deep(127))), deep(127));
    assert_eq!(refusal(deep(128)), "nested deeper than 128 levels (byte 132)");
    let open = "[".repeat(5 << 20);
    assert_eq!(refusal(&open), "the value is not a JSON object (byte 0)");
    assert_eq!(refusal(format!("{{\"a\":{open}")), "nested deeper than 128 levels (byte 132)");
}

#[test]
fn an_object_of_many_members_costs_no_square_and_still_shows_a_duplicate() {
    let members: Vec<String> = (0..200_000).map(|i| format!("\"the member {i}\":{i}")).collect();
    let object = format!("{{{}}}", members.join(","));
    assert_eq!(encoded(&body(&object)), object);
    let nested = format!("{{\"in\":{object}}}");
    assert_eq!(encoded(&body(&nested)), nested);
    let twice = format!("{{{},\"the member 7\":1}}", members.join(","));
    assert!(refusal(&twice).starts_with("the member \"the member 7\" stands twice"));
    assert!(refusal(format!("{{\"in\":{twice}}}")).starts_with("the member \"the member 7\" stands twice"));
}

#[test]
fn json_cannot_carry_every_value() {
    assert_eq!(unwritable(&Value::from_f64_or_zero(f64::INFINITY)), Some("it holds a number that is not finite"));
    assert!(unwritable(&Value::from(vec![Value::from(&b"\xff"[..])])).is_some());
    let deep = (0..MAX_DEPTH).fold(Value::Null, |inner, _| Value::Array(vec![inner]));
    assert_eq!(unwritable(&deep), Some("it is nested deeper than 128 levels"));
    assert_eq!(unwritable(&Value::from("x")), None);
}

/// Strict JSON by serde_json, with a duplicate name as an error.
struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = ();
    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }
    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }
    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }
    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }
    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(Strict)?.is_some() {}
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name) {
                return Err(A::Error::custom("twice"));
            }
            map.next_value_seed(Strict)?;
        }
        Ok(())
    }
}

fn oracle(text: &[u8]) -> Result<(), String> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    Strict.deserialize(&mut deserializer).and_then(|()| deserializer.end()).map_err(|e| e.to_string())?;
    let first = text.iter().find(|b| !b.is_ascii_whitespace());
    if first == Some(&b'{') { Ok(()) } else { Err("not an object".into()) }
}

/// Scalars, names and layout as they come in the wild.
fn json() -> impl Strategy<Value = String> {
    let string = prop_oneof![
        "[a-c]{0,2}".prop_map(|s| format!("{s:?}")),
        any::<String>().prop_map(|s| serde_json::to_string(&s).expect("a string")),
        Just(r#""\ud83d\ude00\u0061\/""#.to_owned()),
    ];
    let number = prop_oneof![
        any::<i64>().prop_map(|n| n.to_string()),
        "-?(0|[1-9][0-9]{0,25})(\\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?"
    ];
    let word = prop_oneof![Just("true".to_owned()), Just("false".to_owned()), Just("null".to_owned())];
    let space = || "[ \n]{0,1}";
    let scalar = prop_oneof![string, number, word];
    scalar.prop_recursive(4, 40, 6, move |inner| {
        let array = (proptest::collection::vec(inner.clone(), 0..5), space())
            .prop_map(|(items, space)| format!("[{space}{}{space}]", items.join(&format!("{space},{space}"))));
        let name = prop_oneof!["[a-e]{1,12}", "\\\\u006[1-5]"];
        let object = (proptest::collection::vec((name, inner), 0..5), space()).prop_map(|(members, space)| {
            let members: Vec<String> = members.iter().map(|(n, v)| format!("\"{n}\"{space}:{space}{v}")).collect();
            format!("{{{space}{}{space}}}", members.join(","))
        });
        prop_oneof![array, object]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { max_global_rejects: 1 << 20, ..ProptestConfig::default() })]

    #[test]
    fn a_text_is_accepted_exactly_when_strict_json_is(
        text in json(),
        name in "[a-e]{1,2}",
        edit in proptest::option::of((any::<prop::sample::Index>(), prop::sample::select(&b"{}[]\",:\\0-.e \x01\xff"[..]), 0..3u8)),
    ) {
        let mut text = format!("{{\"{name}\":{text},\"b\":{text}}}").into_bytes();
        if let Some((at, byte, how)) = edit {
            let at = at.index(text.len());
            match how {
                0 => text[at] = byte,
                1 => text.insert(at, byte),
                _ => drop(text.remove(at)),
            }
        }
        let expected = oracle(&text);
        prop_assume!(expected.as_ref().err().is_none_or(|e| !e.contains("out of range")));
        let mut body = JsonBody::default();
        let got = body.decode(&text);
        prop_assert_eq!(got.is_ok(), expected.is_ok(), "{}: {:?} {:?}", String::from_utf8_lossy(&text), got, expected);
        if got.is_ok() {
            let mut out = Vec::new();
            body.encode(&mut out);
            prop_assert_eq!(out, text);
        }
    }

    #[test]
    fn what_is_read_is_what_serde_json_reads(text in json()) {
        let object = format!("{{\"x\":{text}}}");
        prop_assume!(oracle(object.as_bytes()).is_ok());
        let body = body(&object);
        let raw = body.member("x").expect("x").into_owned();
        prop_assert_eq!(String::from_utf8(raw).expect("UTF-8"), text.trim().to_owned());
        let (value, inexact) = body.get(&path("x"));
        if inexact.is_none() {
            let expected: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            let mut written = Vec::new();
            write(value.expect("x"), &mut written);
            let written: serde_json::Value = serde_json::from_slice(&written).expect("JSON");
            prop_assert!(same(&written, &expected), "{} {}", written, expected);
        }
    }

    #[test]
    fn written_members_come_back_and_the_others_stay(text in json(), value in json(), at in 0..3usize) {
        let object = format!("{{\"a\":{text}, \"b\":1.50,\"c\":{text}}}");
        prop_assume!(oracle(object.as_bytes()).is_ok() && oracle(format!("{{\"v\":{value}}}").as_bytes()).is_ok());
        let mut body = body(&object);
        let name = ["a", "b", "new"][at];
        let value = parse(value.as_bytes()).value;
        set(&mut body, name, value.clone()).expect("a whole member may always be written");
        let again = self::body(&encoded(&body));
        let before = self::body(&object);
        for other in ["a", "b", "c"] {
            if other != name {
                prop_assert_eq!(again.member(other), before.member(other));
            }
        }
        prop_assert_eq!(again.get(&path(name)).0, Some(&value));
    }
}

/// JSON equality, where -0 is 0 and the last bit of a float may differ: serde_json rounds it wrongly now and then.
fn same(a: &serde_json::Value, b: &serde_json::Value) -> bool {
    use serde_json::Value::{Array, Number, Object};
    match (a, b) {
        (Number(a), Number(b)) if a.is_f64() || b.is_f64() => {
            let (a, b) = (a.as_f64().unwrap_or(f64::NAN), b.as_f64().unwrap_or(f64::NAN));
            (a - b).abs() <= a.abs() * 4e-16
        }
        (Array(a), Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Object(a), Object(b)) => a.len() == b.len() && a.iter().all(|(k, a)| b.get(k).is_some_and(|b| same(a, b))),
        _ => a == b,
    }
}
