//! `[sinks.NAME]`.

use super::cx::{Cx, Table, Text, in_order};
use super::nodes::{Draft, NodeType};
use super::read::into_map;
use super::topics::check_topic;
use crate::expr::{Program, Role};
use crate::topology::finding::code;
use crate::topology::keys;
use crate::topology::spec::{CreateTopic, KafkaSink, NodeKind, PostgresSink, Progress, SinkTombstones, UnknownFields};

pub const TYPES: &[NodeType] = &[
    NodeType { word: "kafka", section: &keys::KAFKA_SINK, read: kafka },
    NodeType { word: "postgres", section: &keys::POSTGRES_SINK, read: postgres },
];
pub const LATER: &[&str] = &["http", "mail", "file", "s3", "clickhouse", "mysql"];

fn kafka(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let topic = cx.required_string(table, "topic", "such as topic = \"orders.priced\"");
    if let Some(topic) = &topic {
        check_topic(cx, topic);
    }
    let key = cx.expression(table, "key", Role::Value);
    let create = create(cx, table);
    draft.topics = topic.iter().cloned().collect();
    draft.kind = topic.map(|topic| NodeKind::KafkaSink(KafkaSink { topic: topic.value, key, create }));
}

fn create(cx: &mut Cx<'_>, table: &Table<'_>) -> Option<CreateTopic> {
    let item = table.get("create")?;
    let inner = cx.table(item, table.key_span("create"), &keys::CREATE, "`create`")?;
    if inner.get("partitions").is_none() {
        cx.missing(&inner, "partitions", "such as create = { partitions = 4 }");
    }
    let partitions = cx.integer(&inner, "partitions", 1..=100_000).unwrap_or(1);
    let replication = cx.integer(&inner, "replication", 1..=i64::from(i16::MAX));
    let config = into_map(cx.settings(&inner, "config"));
    Some(CreateTopic { partitions: partitions as i32, replication: replication.map(|r| r as i32), config })
}

fn postgres(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let url = cx.required_string(table, "url", "such as url = \"${DATABASE_URL}\"");
    if let Some(url) = &url {
        check_url(cx, url);
    }
    let target = cx.required_string(table, "table", "such as table = \"orders\"");
    if let Some(target) = &target {
        check_table(cx, target);
    }
    let key = cx.required_strings(table, "key", "the columns of its primary key, such as key = [\"order_id\"]");
    let version = cx.required_string(
        table,
        "version",
        "an integer column that rises with each change of a row: without it a late record would overwrite a newer one",
    );
    let deleted = cx.string(table, "deleted");
    let delete_when = cx.expression(table, "delete_when", Role::Condition);
    let columns = columns(cx, table);
    let ignore_or_reject = [("ignore", UnknownFields::Ignore), ("reject", UnknownFields::Reject)];
    let unknown_fields = cx.choice(table, "unknown_fields", &ignore_or_reject).unwrap_or(UnknownFields::Ignore);
    let words =
        [("reject", SinkTombstones::Reject), ("ignore", SinkTombstones::Ignore), ("delete", SinkTombstones::Delete)];
    let tombstones = cx.choice(table, "tombstones", &words).unwrap_or(SinkTombstones::Reject);
    mode(cx, table);
    let batch_rows = cx.integer(table, "batch_rows", 1..=100_000).unwrap_or(1000) as usize;
    let batch_bytes = cx.size(table, "batch_bytes", 64 << 10).unwrap_or(8 << 20);
    let prepared = cx.boolean(table, "prepared").unwrap_or(true);
    let max_rejects_per_minute = cx.integer(table, "max_rejects_per_minute", 0..=i64::MAX).unwrap_or(1000) as u64;

    for column in key.iter().chain(&version).chain(&deleted) {
        check_column(cx, &column.value.clone(), column);
    }
    column_roles(cx, &key, version.as_ref(), deleted.as_ref(), delete_when.is_some(), &columns);
    deletes(cx, table, tombstones, deleted.as_ref());
    let (Some(url), Some(target), Some(version)) = (url, target, version) else { return };
    draft.kind = Some(NodeKind::PostgresSink(PostgresSink {
        url: url.value,
        table: target.value,
        key: key.into_iter().map(|column| column.value).collect(),
        version: version.value,
        deleted: deleted.map(|column| column.value),
        delete_when,
        columns: columns.into_iter().map(|(name, _, program)| (name, program)).collect(),
        unknown_fields,
        tombstones,
        progress: Progress::Kafka,
        batch_rows,
        batch_bytes,
        prepared,
        max_rejects_per_minute,
    }));
}

type Column = (String, std::ops::Range<usize>, Program);

fn columns(cx: &mut Cx<'_>, table: &Table<'_>) -> Vec<Column> {
    let Some(item) = table.get("columns") else { return Vec::new() };
    let Some(entries) = cx.entries(item, "`columns`") else { return Vec::new() };
    let mut columns = Vec::new();
    for (key, item) in in_order(entries) {
        let name = key.get_ref().to_string();
        let program = cx.expression_item(&format!("columns.{name}"), item, Role::Value);
        columns.extend(program.map(|program| (name, key.span(), program)));
    }
    columns
}

/// `mode` and `progress`: words whose other values are known but not built.
fn mode(cx: &mut Cx<'_>, table: &Table<'_>) {
    let keys: [(&str, &str, &[&str], &str); 2] = [
        ("mode", "upsert", &["insert", "append", "ledger", "merge"], "now every sink upserts under the version guard"),
        (
            "progress",
            "kafka",
            &["postgres"],
            "now positions are kept in Kafka, which makes the stage effectively-once: redelivery meets the version guard",
        ),
    ];
    for (name, now, later, help) in keys {
        let Some(text) = cx.string(table, name).filter(|text| !text.unset && text.value != now) else { continue };
        if later.contains(&text.value.as_str()) {
            let message = format!("{name} = \"{}\" comes in a later version", text.value);
            cx.found.error(code::NOT_AVAILABLE, text.span, message).help(help);
        } else {
            let message = format!("`{name}` must be \"{now}\", not {}", text.shown);
            cx.found.error(code::INVALID_VALUE, text.span, message);
        }
    }
}

fn check_url(cx: &mut Cx<'_>, url: &Text) {
    if url.unset {
        return;
    }
    let scheme = url.value.starts_with("postgres://") || url.value.starts_with("postgresql://");
    if !scheme && !url.value.contains('=') {
        cx.found
            .error(code::INVALID_VALUE, url.span.clone(), format!("`url` is no Postgres URL: {}", url.shown))
            .help("such as postgres://user@localhost:5432/shop");
        return;
    }
    // The password is in the file itself only where the string names no variable.
    let authority = url.value.split_once("://").map_or("", |(_, rest)| rest.split('/').next().unwrap_or(""));
    let user_info = authority.rsplit_once('@').map_or("", |(user, _)| user);
    if url.shown.starts_with('`') && (user_info.contains(':') || url.value.contains("password=")) {
        cx.secret(url.span.clone(), "`url` holds a password");
    }
}

fn check_table(cx: &mut Cx<'_>, table: &Text) {
    let parts: Vec<_> = table.value.split('.').collect();
    let good = parts.len() <= 2 && parts.iter().all(|part| is_identifier(part));
    if !table.unset && !good {
        let message = format!("{} is no table: write `table` or `schema.table`", table.shown);
        cx.found
            .error(code::INVALID_VALUE, table.span.clone(), message)
            .help("names are written as the catalog has them, without quotes; most are lower case");
    }
}

fn check_column(cx: &mut Cx<'_>, name: &str, column: &Text) {
    if !column.unset && !is_identifier(name) {
        let message = format!("{} is no column's name", column.shown);
        cx.found.error(code::INVALID_VALUE, column.span.clone(), message).help("1 to 63 bytes, without quotes");
    }
}

fn is_identifier(name: &str) -> bool {
    !name.is_empty() && name.len() <= 63 && !name.contains(['\0', '"']) && name.trim() == name
}

fn column_roles(
    cx: &mut Cx<'_>,
    key: &[Text],
    version: Option<&Text>,
    deleted: Option<&Text>,
    delete_when: bool,
    columns: &[Column],
) {
    let mut roles: Vec<(&str, &Text)> = Vec::new();
    let named = key.iter().map(|column| ("a key column", column));
    let named = named.chain(version.map(|c| ("the version", c))).chain(deleted.map(|c| ("the delete mark", c)));
    for (role, column) in named.filter(|(_, column)| !column.unset) {
        if let Some((other, _)) = roles.iter().find(|(_, earlier)| earlier.value == column.value) {
            let message = format!("the column {} cannot be {role}: it is already {other}", column.shown);
            cx.found.error(code::COLUMN_CLASH, column.span.clone(), message);
        }
        roles.push((role, column));
    }
    let marked = deleted.and_then(|column| columns.iter().find(|(name, ..)| *name == column.value));
    if let Some((name, span, _)) = marked.filter(|_| delete_when) {
        let message = format!("the column `{name}` is set by `delete_when` already");
        cx.found.error(code::COLUMN_CLASH, span.clone(), message).help("leave it out of `columns`");
    }
}

fn deletes(cx: &mut Cx<'_>, table: &Table<'_>, tombstones: SinkTombstones, deleted: Option<&Text>) {
    let by_tombstone = tombstones == SinkTombstones::Delete;
    if deleted.is_some() || (table.get("delete_when").is_none() && !by_tombstone) {
        return;
    }
    let name = if by_tombstone { "tombstones" } else { "delete_when" };
    let message = format!("`{name}` deletes rows, but {} names no column to mark them with", table.what);
    cx.found.error(code::MISSING_DELETED, table.key_span(name), message).help(
        "add deleted = \"deleted\", a boolean column: a row that is really gone could be brought back by an older version",
    );
}
