//! Dead letters as people and programs read them.

use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, SecondsFormat};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::dlq::Letter;
use crate::record::Timestamp;
use crate::topology::plan::Plan;

/// A time as RFC 3339; a dash where there is none.
pub fn time(timestamp: Timestamp) -> String {
    let time = timestamp.and_then(DateTime::from_timestamp_millis);
    time.map_or_else(|| "-".to_owned(), |time| time.to_rfc3339_opts(SecondsFormat::Millis, true))
}

/// Bytes on one line: text as it is where it can be told from the other forms, else quoted, base64, or `(null)`.
pub fn bytes(bytes: Option<&[u8]>) -> String {
    let Some(bytes) = bytes else { return "(null)".to_owned() };
    let plain = |text: &str| {
        let other = text.is_empty() || text == "(null)" || text.starts_with('"') || text.starts_with("base64:");
        !other && !text.contains(|c: char| c.is_control() || c.is_whitespace())
    };
    match std::str::from_utf8(bytes) {
        Ok(text) if plain(text) => text.to_owned(),
        Ok(text) => format!("{text:?}"),
        Err(_) => format!("base64:{}", STANDARD.encode(bytes)),
    }
}

/// `{name: text}`, or `{name_base64: …}` for what is no text.
fn member(object: &mut Map<String, Value>, name: &str, bytes: Option<&[u8]>) {
    match bytes.map(std::str::from_utf8) {
        None => object.insert(name.to_owned(), Value::Null),
        Some(Ok(text)) => object.insert(name.to_owned(), text.into()),
        Some(Err(_)) => object.insert(format!("{name}_base64"), STANDARD.encode(bytes.unwrap_or_default()).into()),
    };
}

/// A dead letter without its value and headers.
pub fn summary(letter: &Letter) -> Value {
    let (topic, partition, offset) = letter.source();
    let number = |text: &str| text.parse::<i64>().ok();
    let mut object = Map::new();
    object.insert("address".into(), letter.address.to_string().into());
    object.insert("timestamp".into(), json!(letter.timestamp));
    object.insert("node".into(), letter.node().into());
    object.insert("reason".into(), letter.reason().into());
    object.insert("message".into(), letter.message().into());
    let source = json!({ "topic": topic, "partition": number(partition), "offset": number(offset) });
    object.insert("source".into(), source);
    member(&mut object, "key", letter.key.as_deref());
    object.insert("event_id".into(), json!(letter.event_id()));
    object.insert("attempt".into(), letter.attempt().into());
    object.into()
}

/// All of a dead letter.
pub fn json(letter: &Letter) -> Value {
    let mut object = summary(letter);
    let members = object.as_object_mut().expect("a summary is an object");
    let headers = letter.headers.iter().map(|(name, value)| {
        let mut header = Map::new();
        member(&mut header, "name", Some(name));
        member(&mut header, "value", value.as_deref());
        Value::from(header)
    });
    let headers: Vec<Value> = headers.collect();
    members.insert("headers".into(), headers.into());
    member(members, "value", letter.value.as_deref());
    object
}

/// All of a dead letter, for people.
pub fn text(letter: &Letter, plan: &Plan) -> String {
    let (topic, partition, offset) = letter.source();
    let mut text = format!("dead letter {} of {}\n\n", letter.address, plan.dead_letters());
    let mut line = |label: &str, value: &str| {
        let _ = writeln!(text, "  {label:<10}{value}");
    };
    line("time", &time(letter.timestamp));
    line("node", letter.node());
    line("reason", letter.reason());
    line("message", letter.message());
    line("source", &format!("{topic}, partition {partition}, offset {offset}"));
    line("attempt", &letter.attempt().to_string());
    line("event id", letter.event_id().unwrap_or("-"));
    line("key", &bytes(letter.key.as_deref()));
    text.push_str("\nheaders\n");
    for (name, value) in &letter.headers {
        let _ = writeln!(text, "  {} = {}", bytes(Some(name)), bytes(value.as_deref()));
    }
    let (form, value) = value(letter.value.as_deref());
    let _ = write!(text, "\nvalue ({form})\n{value}");
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// A value in the form that shows most, and the form's name.
fn value(value: Option<&[u8]>) -> (&'static str, String) {
    let Some(bytes) = value else { return ("null", String::new()) };
    match std::str::from_utf8(bytes) {
        Ok(text) if serde_json::from_str::<&RawValue>(text).is_ok() => ("json", indented(text)),
        Ok(text) if !text.contains(|c: char| c.is_control() && !c.is_whitespace()) => ("text", text.to_owned()),
        _ => ("base64", STANDARD.encode(bytes)),
    }
}

/// JSON text with line breaks; what is between them stays as it was written, to the last digit.
fn indented(json: &str) -> String {
    let mut out = String::new();
    let (mut depth, mut in_string, mut escaped) = (0, false, false);
    let mut rest = json.chars().peekable();
    while let Some(c) = rest.next() {
        if in_string {
            out.push(c);
            in_string = escaped || c != '"';
            escaped = c == '\\' && !escaped;
            continue;
        }
        match c {
            '{' | '[' => {
                out.push(c);
                while rest.next_if(|c| c.is_ascii_whitespace()).is_some() {}
                if let Some(end) = rest.next_if(|c| matches!(c, '}' | ']')) {
                    out.push(end);
                } else {
                    depth += 1;
                    new_line(&mut out, depth);
                }
            }
            '}' | ']' => {
                depth -= 1;
                new_line(&mut out, depth);
                out.push(c);
            }
            ',' => {
                out.push(c);
                new_line(&mut out, depth);
            }
            ':' => out.push_str(": "),
            c if c.is_ascii_whitespace() => {}
            c => {
                in_string = c == '"';
                out.push(c);
            }
        }
    }
    out
}

fn new_line(out: &mut String, depth: usize) {
    out.push('\n');
    out.extend(std::iter::repeat_n("  ", depth));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_broken_into_lines_and_nothing_in_it_changes() {
        let json = r#"{ "a":1e3,"n":123456789012345678901234567890, "s":"x\"}{,: \\","l":[1, {}, [ ]] }"#;
        let expected = r#"{
  "a": 1e3,
  "n": 123456789012345678901234567890,
  "s": "x\"}{,: \\",
  "l": [
    1,
    {},
    []
  ]
}"#;
        assert_eq!(value(Some(json.as_bytes())), ("json", expected.to_owned()));
        assert_eq!(value(Some(b"{\"a\"")), ("text", "{\"a\"".to_owned()));
        assert_eq!(value(Some(b"\x00\xff")), ("base64", "AP8=".to_owned()));
        assert_eq!(value(None).0, "null");
    }

    #[test]
    fn null_empty_and_bytes_stay_apart_on_a_line() {
        let all = [None, Some(&b""[..]), Some(b"k1"), Some(b"a b"), Some(b"(null)"), Some(b"\xff")].map(bytes);
        assert_eq!(all, ["(null)", "\"\"", "k1", "\"a b\"", "\"(null)\"", "base64:/w=="]);
    }
}
