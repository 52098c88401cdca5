//! `[sinks.NAME]` of Postgres.

use std::time::Duration;

use super::cx::{Cx, Table, Text, in_order};
use super::nodes::Draft;
use crate::expr::{Program, Role};
use crate::topology::finding::code;
use crate::topology::keys;
use crate::topology::spec::{Ledger, Mode, NodeKind, PostgresSink, Progress, SinkTombstones, UnknownFields};

/// Partitions add `_p20260131`, and Postgres cuts names at 63 bytes.
const LEDGER_NAME_MAX: usize = 53;
/// A shorter memory would not outlast a restart.
const RETENTION_LEAST: Duration = Duration::from_secs(3600);

/// `[sinks.NAME]`, `type = "postgres"`.
pub fn postgres(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let url = cx.required_string(table, "url", "such as url = \"${DATABASE_URL}\"");
    if let Some(url) = &url {
        check_url(cx, url);
    }
    let target = cx.required_string(table, "table", "such as table = \"orders\"");
    if let Some(target) = &target {
        check_table(cx, target);
    }
    let mode = cx.choice(table, "mode", &Mode::WORDS).unwrap_or(Mode::Upsert);
    let key = match mode {
        Mode::Insert => Vec::new(),
        Mode::Upsert | Mode::Add | Mode::Update => {
            cx.required_strings(table, "key", "the columns of its primary key, such as key = [\"order_id\"]")
        }
    };
    let version = match mode {
        Mode::Upsert => cx.required_string(
            table,
            "version",
            "an integer column that rises with each change of a row: without it a late record would overwrite a newer \
             one",
        ),
        Mode::Update => cx.string(table, "version"),
        Mode::Insert | Mode::Add => None,
    };
    unused(cx, table, mode, version.is_some());
    let deleted = cx.string(table, "deleted");
    let delete_when = cx.expression(table, "delete_when", Role::Condition);
    let columns = columns(cx, table);
    let ignore_or_reject = [("ignore", UnknownFields::Ignore), ("reject", UnknownFields::Reject)];
    let unknown_fields = cx.choice(table, "unknown_fields", &ignore_or_reject).unwrap_or(UnknownFields::Ignore);
    let words =
        [("reject", SinkTombstones::Reject), ("ignore", SinkTombstones::Ignore), ("delete", SinkTombstones::Delete)];
    let tombstones = cx.choice(table, "tombstones", &words).unwrap_or(SinkTombstones::Reject);
    let dedupe = dedupe(cx, table, target.as_ref());
    let words = [("kafka", Progress::Kafka), ("postgres", Progress::Postgres)];
    let progress = cx.choice(table, "progress", &words).unwrap_or(Progress::Kafka);
    let batch_rows = cx.integer(table, "batch_rows", 1..=100_000).unwrap_or(1000) as usize;
    let batch_bytes = cx.size(table, "batch_bytes", 64 << 10).unwrap_or(8 << 20);
    let prepared = cx.boolean(table, "prepared").unwrap_or(true);
    let max_rejects_per_minute = cx.integer(table, "max_rejects_per_minute", 0..=i64::MAX).unwrap_or(1000) as u64;

    for column in key.iter().chain(&version).chain(&deleted) {
        check_column(cx, &column.value.clone(), column);
    }
    column_roles(cx, &key, version.as_ref(), deleted.as_ref(), delete_when.is_some(), &columns);
    let guarded = version.is_some() || mode == Mode::Upsert;
    deletes(cx, table, tombstones, deleted.as_ref(), guarded);
    let (Some(url), Some(target)) = (url, target) else { return };
    if mode == Mode::Upsert && version.is_none() {
        return;
    }
    draft.kind = Some(NodeKind::PostgresSink(PostgresSink {
        url: url.value,
        table: target.value,
        mode,
        key: key.into_iter().map(|column| column.value).collect(),
        version: version.map(|column| column.value),
        deleted: deleted.map(|column| column.value),
        delete_when,
        columns: columns.into_iter().map(|(name, _, program)| (name, program)).collect(),
        unknown_fields,
        tombstones,
        dedupe,
        progress,
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

/// Reports settings that a mode has no use for.
fn unused(cx: &mut Cx<'_>, table: &Table<'_>, mode: Mode, version: bool) {
    let names: &[&str] = match mode {
        Mode::Upsert => &[],
        Mode::Insert => &["key", "version", "deleted", "delete_when"],
        Mode::Add => &["version", "deleted", "delete_when"],
        Mode::Update if version => &[],
        Mode::Update => &["deleted", "delete_when"],
    };
    for name in names.iter().filter(|name| table.get(name).is_some()) {
        let why = match (mode, *name) {
            (Mode::Insert, "key") => "every record is a row of its own",
            (Mode::Update, _) => "without a `version` an older record would bring a deleted row back",
            (_, "version") => "no row is replaced, so there is nothing to guard",
            _ => "no row is ever deleted",
        };
        let message = format!("{} has no use for `{name}` in mode = \"{}\": {why}", table.what, mode.as_str());
        cx.found.error(code::MODE_SETTING, table.key_span(name), message);
    }
}

fn dedupe(cx: &mut Cx<'_>, table: &Table<'_>, target: Option<&Text>) -> Option<Ledger> {
    let item = table.get("dedupe")?;
    let help = "such as dedupe = { table = \"processed_events\", retention = \"14d\" }";
    let inner = cx.table(item, table.key_span("dedupe"), &keys::LEDGER, "`dedupe`")?;
    let name = cx.required_string(&inner, "table", help);
    if let Some(name) = &name {
        check_table(cx, name);
        if !name.unset && name.value.rsplit('.').next().is_some_and(|table| table.len() > LEDGER_NAME_MAX) {
            let message = format!("{} is too long for a ledger, whose partitions add ten characters", name.shown);
            cx.found.error(code::INVALID_VALUE, name.span.clone(), message);
        }
        if target.is_some_and(|target| !target.unset && target.value == name.value) {
            let message = format!("{} is the table that the sink writes its rows to", name.shown);
            cx.found.error(code::INVALID_VALUE, name.span.clone(), message).help("a ledger is a table of its own");
        }
    }
    if inner.get("retention").is_none() {
        cx.missing(&inner, "retention", help);
    }
    let retention = cx.duration(&inner, "retention", RETENTION_LEAST);
    Some(Ledger { table: name?.value, retention: retention.unwrap_or(RETENTION_LEAST) })
}

fn check_url(cx: &mut Cx<'_>, url: &Text) {
    if url.unset {
        return;
    }
    // The password is in the file itself only where the string names no variable.
    let authority = url.value.split_once("://").map_or("", |(_, rest)| rest.split('/').next().unwrap_or(""));
    let user_info = authority.rsplit_once('@').map_or("", |(user, _)| user);
    if url.shown.starts_with('`') && (user_info.contains(':') || url.value.contains("password=")) {
        cx.secret(url.span.clone(), "`url` holds a password");
    }
    let scheme = url.value.starts_with("postgres://") || url.value.starts_with("postgresql://");
    if !scheme && !url.value.contains("host=") {
        cx.found
            .error(code::INVALID_VALUE, url.span.clone(), "`url` is no Postgres URL")
            .help("such as postgres://user@localhost:5432/shop");
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

fn deletes(cx: &mut Cx<'_>, table: &Table<'_>, tombstones: SinkTombstones, deleted: Option<&Text>, guarded: bool) {
    let by_tombstone = tombstones == SinkTombstones::Delete;
    if !guarded {
        if by_tombstone {
            let message = format!("{} cannot delete by null values: it has no `version`", table.what);
            cx.found.error(code::MODE_SETTING, table.key_span("tombstones"), message);
        }
        return;
    }
    if deleted.is_some() || (table.get("delete_when").is_none() && !by_tombstone) {
        return;
    }
    let name = if by_tombstone { "tombstones" } else { "delete_when" };
    let message = format!("`{name}` deletes rows, but {} names no column to mark them with", table.what);
    cx.found.error(code::MISSING_DELETED, table.key_span(name), message).help(
        "add deleted = \"deleted\", a boolean column: a row that is really gone could be brought back by an older \
         version",
    );
}
