//! `[sources.NAME]`.

use std::ops::Range;
use std::time::Duration;

use toml::de::DeValue;

use super::cx::{Cx, Table, Text};
use super::nodes::{Draft, NodeType};
use super::read;
use super::topics::check_topic;
use super::units;
use crate::expr::Role;
use crate::topology::finding::{code, did_you_mean};
use crate::topology::keys;
use crate::topology::spec::{Format, NodeKind, Source, Start};

pub const TYPES: &[NodeType] = &[NodeType { word: "kafka", section: &keys::SOURCE, read: kafka }];
pub const LATER: &[&str] = &["http", "file", "timer"];

fn kafka(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let topics = cx.required_strings(table, "topics", "such as topics = [\"orders\"]");
    for topic in &topics {
        check_topic(cx, topic);
    }
    let source = Source {
        topics: topics.iter().map(|topic| topic.value.clone()).collect(),
        format: format(cx, table).unwrap_or(Format::Json),
        event_id: cx.expression(table, "event_id", Role::Value),
        event_time: cx.expression(table, "event_time", Role::Value),
        max_ahead_ms: max_ahead(cx, table),
        start: start(cx, table).unwrap_or(Start::Earliest),
    };
    draft.topics = topics;
    draft.kind = Some(NodeKind::Source(source));
}

fn max_ahead(cx: &mut Cx<'_>, table: &Table<'_>) -> Option<i64> {
    let item = table.get("max_ahead")?;
    if table.get("event_time").is_none() {
        let message = "`max_ahead` bounds the time that `event_time` gives, and there is none";
        cx.found.error(code::INVALID_VALUE, item.span(), message).help(
            "the time of a record itself is bounded by the topic: message.timestamp.after.max.ms, an hour by default",
        );
    }
    let ahead = cx.duration(table, "max_ahead", Duration::ZERO)?;
    Some(i64::try_from(ahead.as_millis()).unwrap_or(i64::MAX))
}

fn format(cx: &mut Cx<'_>, table: &Table<'_>) -> Option<Format> {
    let item = table.get("format")?;
    let text = match item.get_ref() {
        DeValue::Table(_) => {
            let inner = cx.table(item, table.key_span("format"), &keys::FORMAT, "`format`")?;
            cx.required_string(&inner, "type", "such as type = \"json\"")?
        }
        DeValue::String(text) => cx.interpolated(text, item.span()),
        _ => {
            cx.wrong_type("format", item, "\"json\", \"string\" or \"bytes\"");
            return None;
        }
    };
    if text.unset {
        return None;
    }
    match text.value.as_str() {
        "json" => Some(Format::Json),
        "string" => Some(Format::String),
        "bytes" => Some(Format::Bytes),
        "avro" | "protobuf" | "csv" => {
            let message = format!("the format \"{}\" comes in a later version", text.value);
            cx.found.error(code::NOT_AVAILABLE, text.span, message).help("formats now: json, string, bytes");
            None
        }
        other => {
            let message = format!("`format` must be \"json\", \"string\" or \"bytes\", not {}", text.shown);
            let near = did_you_mean(other, ["json", "string", "bytes"]);
            cx.found.error(code::INVALID_VALUE, text.span, message).maybe_help(near);
            None
        }
    }
}

fn start(cx: &mut Cx<'_>, table: &Table<'_>) -> Option<Start> {
    let item = table.get("start")?;
    if !matches!(item.get_ref(), DeValue::String(_)) {
        return cx.instant(table, "start").and_then(|ms| timestamp(cx, ms, item.span()));
    }
    let text = cx.string(table, "start")?;
    match text.value.as_str() {
        _ if text.unset => None,
        "earliest" => Some(Start::Earliest),
        "latest" => Some(Start::Latest),
        _ => match read::parse_instant(&text.value) {
            Ok(ms) => timestamp(cx, ms, text.span),
            Err(_) => {
                unknown_start(cx, &text);
                None
            }
        },
    }
}

fn timestamp(cx: &mut Cx<'_>, ms: i64, span: Range<usize>) -> Option<Start> {
    if ms < 0 {
        cx.found.error(code::INVALID_VALUE, span, "`start` lies before 1970, where Kafka has no time");
        return None;
    }
    Some(Start::Timestamp(ms))
}

fn unknown_start(cx: &mut Cx<'_>, text: &Text) {
    let near = did_you_mean(&text.value, ["earliest", "latest"]);
    cx.found
        .error(
            code::INVALID_VALUE,
            text.span.clone(),
            format!("`start` must be \"earliest\", \"latest\" or a time, not {}", text.shown),
        )
        .help(match units::duration(&text.value) {
            Ok(_) => "a time is a point, such as 2026-01-31T00:00:00Z, and no duration",
            Err(_) => "a time is RFC 3339 with an offset, such as 2026-01-31T00:00:00Z",
        })
        .maybe_help(near);
}
