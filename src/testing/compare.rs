//! Expected outputs against what came out.

use std::fmt::Display;

use serde_json::Value as Json;

use super::Difference;
use super::driver::{Job, Letter, Stored};
use super::json::Tree;
use crate::ids;
use crate::topology::DEAD_LETTERS;
use crate::topology::plan::Plan;
use crate::topology::spec::{ExpectedRecord, ExpectedReject, ExpectedValue, NodeId, TestOutput};

/// All differences of one expectation.
pub fn compare(plan: &Plan, job: &Job<'_>, expected: &TestOutput) -> Vec<Difference> {
    let name = |sink: &NodeId| plan.topology.nodes[sink.0].name.clone();
    match expected {
        TestOutput::Records { sink, records } => {
            let topic = plan.topology.topics(*sink).pop().unwrap_or_default();
            let actual: Vec<&Stored> = job.topic(&topic).collect();
            let found = Found { sink: name(sink), what: "record" };
            found.each(records, &actual, record, shown_expected, shown)
        }
        TestOutput::DeadLetters { records } => {
            let actual: Vec<&Letter> = job.letters.iter().collect();
            let found = Found { sink: DEAD_LETTERS.to_owned(), what: "record" };
            found.each(records, &actual, reject, shown_reject, shown_letter)
        }
        TestOutput::Rows { sink, rows, deleted } => {
            let Some(table) = job.table(*sink) else { return Vec::new() };
            let mut differences = Vec::new();
            if let Some(rows) = rows {
                let live: Vec<Tree> = table.live().map(|row| Tree::Object(row.cells.clone())).collect();
                let found = Found { sink: name(sink), what: "row" };
                differences.extend(found.each(rows, &live, row, shown_row, Tree::text));
            }
            if let Some(keys) = deleted {
                let actual: Vec<Tree> = table.deleted().collect();
                let found = Found { sink: name(sink), what: "deleted key" };
                differences.extend(found.each(keys, &actual, key, Json::to_string, Tree::text));
            }
            differences
        }
    }
}

type Row = serde_json::Map<String, Json>;

/// Part of a record or row, and what is expected and found there.
type Part = (String, Option<String>, Option<String>);

struct Found {
    sink: String,
    what: &'static str,
}

impl Found {
    /// Compares one by one; what is left on one side is missing or too much.
    fn each<E, A>(
        &self,
        expected: &[E],
        actual: &[A],
        differ: fn(&E, &A) -> Option<Part>,
        show_expected: fn(&E) -> String,
        show_actual: fn(&A) -> String,
    ) -> Vec<Difference> {
        let mut differences = Vec::new();
        for i in 0..expected.len().max(actual.len()) {
            let at = format!(
                "{} {} of {}",
                self.what,
                i + 1,
                if i < expected.len() { expected.len() } else { actual.len() }
            );
            let (part, expected, actual) = match (expected.get(i), actual.get(i)) {
                (Some(expected), Some(actual)) => match differ(expected, actual) {
                    Some(part) => part,
                    None => continue,
                },
                (expected, actual) => (String::new(), expected.map(show_expected), actual.map(show_actual)),
            };
            let at = if part.is_empty() { at } else { format!("{at}, {part}") };
            differences.push(Difference { sink: self.sink.clone(), at, expected, actual });
        }
        differences
    }
}

fn record(expected: &ExpectedRecord, actual: &&Stored) -> Option<Part> {
    let part = |name: &str, expected: String, actual: String| Some((name.to_owned(), Some(expected), Some(actual)));
    if let Some(key) = expected.key.as_ref().filter(|key| **key != actual.key) {
        return part("key", bytes(key.as_deref()), bytes(actual.key.as_deref()));
    }
    if let Some(difference) = expected.value.as_ref().and_then(|expected| value(expected, actual.value.as_deref())) {
        return Some(difference);
    }
    if let Some(expected) = &expected.headers {
        let actual = headers(actual, expected.iter().any(|(name, _)| name == ids::HEADER));
        if *expected != actual {
            return part("headers", pairs(expected), pairs(&actual));
        }
    }
    if let Some(timestamp) = expected.timestamp.filter(|timestamp| Some(*timestamp) != actual.timestamp) {
        return part("timestamp", timestamp.to_string(), or_none(actual.timestamp));
    }
    let partition = expected.partition.filter(|partition| *partition != actual.partition)?;
    part("partition", partition.to_string(), actual.partition.to_string())
}

fn value(expected: &ExpectedValue, actual: Option<&[u8]>) -> Option<Part> {
    let whole = |expected: String| Some(("value".to_owned(), Some(expected), Some(bytes(actual))));
    match (expected, actual) {
        (ExpectedValue::Tombstone, None) => None,
        (ExpectedValue::Tombstone, Some(_)) => whole("null".to_owned()),
        (ExpectedValue::Bytes(expected), _) => match actual == Some(&expected[..]) {
            true => None,
            false => whole(bytes(Some(expected))),
        },
        (ExpectedValue::Json(expected), _) => match (tree(expected), actual.and_then(Tree::parse)) {
            (Some(expected), Some(actual)) => {
                let (path, expected, actual) = expected.first_difference(&actual)?;
                Some((format!("value{path}"), expected, actual))
            }
            _ => whole(expected.to_string()),
        },
    }
}

/// The headers of a record; semel's own are there only if the test asks for the event id.
fn headers(record: &Stored, with_id: bool) -> Vec<(String, Option<Vec<u8>>)> {
    let kept = record.headers.iter().filter(|(name, _)| with_id || name != ids::HEADER.as_bytes());
    kept.map(|(name, value)| (String::from_utf8_lossy(name).into_owned(), value.clone())).collect()
}

fn reject(expected: &ExpectedReject, actual: &&Letter) -> Option<Part> {
    let parts = [("node", &expected.node, &actual.node), ("reason", &expected.reason, &actual.reason)];
    let (name, expected, _) = parts.into_iter().find(|(_, e, a)| e.as_ref().is_some_and(|e| e != *a))?;
    Some((name.to_owned(), expected.clone(), Some(shown_letter(actual))))
}

fn row(expected: &Row, actual: &Tree) -> Option<Part> {
    let Tree::Object(cells) = actual else { return None };
    expected.iter().find_map(|(column, expected)| {
        let expected = tree(expected)?;
        match cells.get(column) {
            Some(actual) => {
                let (path, expected, actual) = expected.first_difference(actual)?;
                Some((format!("{column}{path}"), expected, actual))
            }
            None => Some((column.clone(), Some(expected.text()), Some("NULL".to_owned()))),
        }
    })
}

fn key(expected: &Json, actual: &Tree) -> Option<Part> {
    let expected = tree(expected)?;
    (expected != *actual).then(|| (String::new(), Some(expected.text()), Some(actual.text())))
}

/// Bytes as a person reads them: text as it is, what is no text in escapes.
fn bytes(bytes: Option<&[u8]>) -> String {
    match bytes {
        None => "null".to_owned(),
        Some([]) => "(empty)".to_owned(),
        Some(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.escape_ascii().to_string(),
        },
    }
}

fn or_none(value: Option<impl Display>) -> String {
    value.map_or("none".to_owned(), |value| value.to_string())
}

fn pairs(headers: &[(String, Option<Vec<u8>>)]) -> String {
    let pair = |(name, value): &(String, Option<Vec<u8>>)| format!("{name}={}", bytes(value.as_deref()));
    format!("[{}]", headers.iter().map(pair).collect::<Vec<_>>().join(", "))
}

fn shown(record: &&Stored) -> String {
    format!("key {}, value {}", bytes(record.key.as_deref()), bytes(record.value.as_deref()))
}

fn shown_expected(expected: &ExpectedRecord) -> String {
    let mut parts = Vec::new();
    parts.extend(expected.key.as_ref().map(|key| format!("key {}", bytes(key.as_deref()))));
    parts.extend(expected.value.as_ref().map(|value| match value {
        ExpectedValue::Json(json) => format!("value {json}"),
        ExpectedValue::Bytes(text) => format!("value {}", bytes(Some(text))),
        ExpectedValue::Tombstone => "value null".to_owned(),
    }));
    if parts.is_empty() { "a record".to_owned() } else { parts.join(", ") }
}

fn shown_reject(expected: &ExpectedReject) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_else(|| "any".to_owned());
    format!("node {}, reason {}", part(&expected.node), part(&expected.reason))
}

fn shown_letter(letter: &&Letter) -> String {
    format!("node {}, reason {}: {}", letter.node, letter.reason, letter.message)
}

fn shown_row(row: &Row) -> String {
    let cell = |(column, value): (&String, &Json)| format!("{column} {value}");
    row.iter().map(cell).collect::<Vec<_>>().join(", ")
}

fn tree(json: &Json) -> Option<Tree> {
    Tree::parse(json.to_string().as_bytes())
}
