//! `[[tests]]`.

use toml::de::DeValue;

use super::cx::{Cx, Item, Table, Text};
use super::nodes::{Draft, Part};
use super::values;
use crate::reject::REASONS;
use crate::topology::finding::{code, did_you_mean};
use crate::topology::keys;
use crate::topology::spec::{ExpectedRecord, ExpectedReject, NodeId, TestCase, TestInput, TestOutput};

/// The name that tests give to the dead-letter topic.
pub const DEAD_LETTERS: &str = "dead_letters";

pub fn read(cx: &mut Cx<'_>, item: &Item<'_>, drafts: &[Draft]) -> Vec<TestCase> {
    let mut cases: Vec<TestCase> = Vec::new();
    for item in cx.tables(item, "tests", "write each test as [[tests]]") {
        let Some(table) = cx.table(item, item.span(), &keys::TEST, "a test") else { continue };
        let name = cx.required_string(&table, "name", "say what the case shows");
        if let Some(name) = &name
            && cases.iter().any(|case| case.name == name.value)
        {
            let message = format!("two tests are named \"{}\"", name.value);
            cx.found.error(code::DUPLICATE_NAME, name.span.clone(), message);
        }
        let inputs = match table.get("inputs") {
            None => {
                cx.missing(&table, "inputs", "write each record as [[tests.inputs]]");
                Vec::new()
            }
            Some(item) => cx.tables(item, "inputs", "write each record as [[tests.inputs]]"),
        };
        let inputs = inputs.into_iter().filter_map(|item| input(cx, item, drafts)).collect();
        let outputs = outputs(cx, &table, drafts);
        let (line, _) = cx.found.position(item.span().start);
        cases.push(TestCase { name: name.map_or_else(String::new, |name| name.value), line, inputs, outputs });
    }
    cases
}

fn input(cx: &mut Cx<'_>, item: &Item<'_>, drafts: &[Draft]) -> Option<TestInput> {
    let table = cx.table(item, item.span(), &keys::TEST_INPUT, "a test input")?;
    let source = cx.required_string(&table, "source", "the source that the record comes from");
    let found = source.as_ref().and_then(|source| {
        let sources = || drafts.iter().filter(|draft| draft.part == Part::Source);
        let found = drafts.iter().position(|draft| draft.part == Part::Source && draft.name == source.value);
        if found.is_none() && !source.unset {
            let help = did_you_mean(&source.value, sources().map(|draft| draft.name.as_str()));
            let message = format!("there is no source {}", source.shown);
            cx.found.error(code::TEST_NODE, source.span.clone(), message).maybe_help(help);
        }
        found
    });
    let topic = cx.string(&table, "topic");
    if let (Some(topic), Some(source)) = (&topic, found)
        && !drafts[source].topics.iter().any(|known| known.value == topic.value)
    {
        let message = format!("source `{}` does not read the topic {}", drafts[source].name, topic.shown);
        cx.found.error(code::TEST_NODE, topic.span.clone(), message);
    }
    let value = values::read(cx, &table);
    if value.is_none() && !values::given(&table) {
        cx.found
            .error(code::TEST_VALUE, table.span.clone(), "a test input needs a value")
            .help("one of value = { … }, json = '…', text = \"…\", base64 = \"…\", tombstone = true");
    }
    let key = cx.string(&table, "key").map(|key| key.value.into_bytes());
    let headers = values::headers(cx, &table).unwrap_or_default();
    let timestamp = cx.instant(&table, "timestamp");
    let partition = cx.integer(&table, "partition", 0..=i64::from(i32::MAX)).unwrap_or(0) as i32;
    let topic = topic.map(|topic| topic.value);
    let value = value?.into_bytes();
    Some(TestInput { source: NodeId(found?), topic, key, value, headers, timestamp, partition })
}

fn outputs(cx: &mut Cx<'_>, test: &Table<'_>, drafts: &[Draft]) -> Vec<TestOutput> {
    let help = "write each expectation as [[tests.outputs]]";
    let Some(item) = test.get("outputs") else {
        cx.missing(test, "outputs", help);
        return Vec::new();
    };
    let mut seen: Vec<String> = Vec::new();
    let mut outputs = Vec::new();
    for item in cx.tables(item, "outputs", help) {
        let Some(table) = cx.table(item, item.span(), &keys::TEST_OUTPUT, "a test output") else { continue };
        let Some(sink) = cx.required_string(&table, "sink", "a sink's name, or \"dead_letters\"") else { continue };
        if seen.contains(&sink.value) {
            let message = format!("the sink {} is named twice in this test", sink.shown);
            cx.found.error(code::TEST_OUTPUT, sink.span.clone(), message).help("write all its records in one place");
        }
        seen.push(sink.value.clone());
        outputs.extend(output(cx, &table, &sink, drafts));
    }
    outputs
}

fn output(cx: &mut Cx<'_>, table: &Table<'_>, sink: &Text, drafts: &[Draft]) -> Option<TestOutput> {
    let found = drafts.iter().position(|draft| draft.part == Part::Sink && draft.name == sink.value);
    let postgres = found.is_some_and(|sink| drafts[sink].postgres);
    let kind = match found {
        _ if sink.value == DEAD_LETTERS => "the dead letters",
        Some(_) if postgres => "a Postgres sink",
        Some(_) => "a Kafka sink",
        None => {
            let sinks = drafts.iter().filter(|draft| draft.part == Part::Sink).map(|draft| draft.name.as_str());
            let help = did_you_mean(&sink.value, sinks.chain([DEAD_LETTERS]));
            let message = format!("there is no sink {}", sink.shown);
            cx.found.error(code::TEST_NODE, sink.span.clone(), message).maybe_help(help);
            return None;
        }
    };
    let (wanted, unwanted): (&[&str], &[&str]) =
        if postgres { (&["rows", "deleted"], &["records"]) } else { (&["records"], &["rows", "deleted"]) };
    for name in unwanted.iter().filter(|name| table.get(name).is_some()) {
        let message = format!("`{name}` does not fit {kind}");
        cx.found.error(code::TEST_OUTPUT, table.key_span(name), message).help(format!("it has `{}`", wanted[0]));
    }
    if !wanted.iter().any(|name| table.get(name).is_some()) {
        let message = format!("nothing is expected of {}", sink.shown);
        cx.found
            .error(code::TEST_OUTPUT, sink.span.clone(), message)
            .help(format!("add `{}`, empty if nothing should arrive", wanted[0]));
    }
    if postgres {
        let rows = table.get("rows").map(|item| {
            let rows = cx.tables(item, "rows", "such as rows = [ { order_id = \"o1\", total = 5 } ]");
            rows.into_iter().filter_map(|item| values::row(cx, item)).collect()
        });
        let deleted = table.get("deleted").and_then(|item| match item.get_ref() {
            DeValue::Array(keys) => Some(keys.iter().filter_map(|key| values::json(cx, key)).collect()),
            _ => {
                cx.wrong_type("deleted", item, "an array of keys");
                None
            }
        });
        return Some(TestOutput::Rows { sink: NodeId(found?), rows, deleted });
    }
    let items = table.get("records").map(|item| cx.tables(item, "records", "such as records = [ { key = \"k\" } ]"));
    let items = items.unwrap_or_default();
    Some(match found {
        None => TestOutput::DeadLetters { records: items.into_iter().filter_map(|r| reject(cx, r, drafts)).collect() },
        Some(sink) => {
            let records = items.into_iter().filter_map(|item| record(cx, item)).collect();
            TestOutput::Records { sink: NodeId(sink), records }
        }
    })
}

fn record(cx: &mut Cx<'_>, item: &Item<'_>) -> Option<ExpectedRecord> {
    let table = cx.table(item, item.span(), &keys::EXPECTED_RECORD, "an expected record")?;
    let key = cx.string(&table, "key").map(|key| Some(key.value.into_bytes()));
    let null_key = cx.boolean(&table, "null_key") == Some(true);
    if null_key && key.is_some() {
        let message = "an expected record has either `key` or `null_key`";
        cx.found.error(code::TEST_VALUE, table.key_span("null_key"), message);
    }
    Some(ExpectedRecord {
        key: if null_key { Some(None) } else { key },
        value: values::read(cx, &table).map(values::Value::into_expected),
        headers: values::headers(cx, &table),
        timestamp: cx.instant(&table, "timestamp"),
        partition: cx.integer(&table, "partition", 0..=i64::from(i32::MAX)).map(|p| p as i32),
    })
}

fn reject(cx: &mut Cx<'_>, item: &Item<'_>, drafts: &[Draft]) -> Option<ExpectedReject> {
    let table = cx.table(item, item.span(), &keys::EXPECTED_REJECT, "an expected dead letter")?;
    let node = cx.string(&table, "node");
    if let Some(node) = node.as_ref().filter(|node| !drafts.iter().any(|draft| draft.name == node.value)) {
        let help = did_you_mean(&node.value, drafts.iter().map(|draft| draft.name.as_str()));
        cx.found.error(code::TEST_NODE, node.span.clone(), format!("there is no node {}", node.shown)).maybe_help(help);
    }
    let reason = cx.string(&table, "reason");
    if let Some(reason) = reason.as_ref().filter(|reason| !REASONS.iter().any(|(slug, _)| *slug == reason.value)) {
        let slugs = || REASONS.iter().map(|(slug, _)| *slug);
        let all = format!("reasons: {}", slugs().collect::<Vec<_>>().join(", "));
        let near = did_you_mean(&reason.value, slugs());
        let message = format!("there is no reason {}", reason.shown);
        cx.found.error(code::INVALID_VALUE, reason.span.clone(), message).help(all).maybe_help(near);
    }
    Some(ExpectedReject { node: node.map(|text| text.value), reason: reason.map(|text| text.value) })
}
