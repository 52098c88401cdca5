//! A CREATE TABLE that fits a sink, for whoever has no table yet.

use serde_json::{Map, Value};

use super::layout::quoted;
use crate::topology::spec::{ExpectedValue, Mode, NodeId, PostgresSink, TestOutput, Topology};

/// A record's members by name.
pub type Sample = Map<String, Value>;

/// Records as the sink may get them, from the file's tests: rows expected of it, records expected of the Kafka sinks it
/// reads, inputs of the sources it reads.
pub fn samples(topology: &Topology, sink: NodeId) -> Vec<Sample> {
    let reads: Vec<NodeId> = topology.nodes[sink.0].inputs.iter().map(|port| port.node).collect();
    let mut samples = Vec::new();
    for test in &topology.tests {
        for output in &test.outputs {
            match output {
                TestOutput::Rows { sink: of, rows: Some(rows), .. } if *of == sink => samples.extend(rows.clone()),
                TestOutput::Records { sink: of, records } if reads.contains(of) => {
                    let values = records.iter().filter_map(|r| match r.value.as_ref()? {
                        ExpectedValue::Json(value) => Some(value.clone()),
                        ExpectedValue::Bytes(bytes) => serde_json::from_slice(bytes).ok(),
                        ExpectedValue::Tombstone => None,
                    });
                    samples.extend(values.filter_map(object));
                }
                _ => {}
            }
        }
        let inputs = test.inputs.iter().filter(|input| reads.contains(&input.source));
        samples.extend(inputs.filter_map(|i| object(serde_json::from_slice(i.value.as_deref()?).ok()?)));
    }
    samples
}

fn object(value: Value) -> Option<Sample> {
    if let Value::Object(map) = value { Some(map) } else { None }
}

/// The statement, over several lines.
pub fn create_table(sink: &PostgresSink, samples: &[Sample]) -> String {
    let mut columns: Vec<(String, String)> = Vec::new();
    for key in &sink.key {
        // A key has one spelling a value, which jsonb does not give.
        let ty = inferred(key, samples).filter(|ty| *ty != "jsonb").unwrap_or("text");
        columns.push((key.clone(), format!("{ty} NOT NULL")));
    }
    columns.extend(sink.version.iter().map(|version| (version.clone(), "bigint NOT NULL".into())));
    let members = samples.iter().flat_map(|s| s.keys()).chain(sink.columns.iter().map(|(name, _)| name));
    for name in members {
        if columns.iter().any(|(known, _)| known == name) || sink.deleted.as_ref() == Some(name) {
            continue;
        }
        let ty = match (sink.mode, inferred(name, samples)) {
            (Mode::Add, Some(number @ ("bigint" | "numeric"))) => format!("{number} NOT NULL DEFAULT 0"),
            (Mode::Add, None) => "bigint NOT NULL DEFAULT 0".into(),
            // Nothing can be added to it.
            (Mode::Add, Some(_)) => continue,
            (_, ty) => ty.unwrap_or("text").into(),
        };
        columns.push((name.clone(), ty));
    }
    if let Some(deleted) = &sink.deleted {
        columns.push((deleted.clone(), "boolean NOT NULL DEFAULT false".into()));
    }
    let table = sink.table.split('.').map(plain_or_quoted).collect::<Vec<_>>().join(".");
    let width = columns.iter().map(|(name, _)| plain_or_quoted(name).len()).max().unwrap_or(0);
    let mut sql = format!("CREATE TABLE {table} (\n");
    let mut lines: Vec<String> =
        columns.iter().map(|(name, ty)| format!("    {:width$} {ty}", plain_or_quoted(name))).collect();
    if !sink.key.is_empty() {
        let key = sink.key.iter().map(|k| plain_or_quoted(k)).collect::<Vec<_>>().join(", ");
        lines.push(format!("    PRIMARY KEY ({key})"));
    }
    if samples.is_empty() {
        sql.push_str(match sink.mode {
            Mode::Add => "    -- a number for each member of the records that you want to add up\n",
            Mode::Upsert | Mode::Insert | Mode::Update => {
                "    -- a column for each member of the records that you want to keep\n"
            }
        });
    }
    sql + &lines.join(",\n") + "\n);"
}

/// The statement for a ledger: in partitions by the time in its ids, or flat.
pub fn create_ledger(name: &str, timed: bool) -> String {
    let parts: Vec<String> = name.split('.').map(plain_or_quoted).collect();
    let table = parts.join(".");
    if timed {
        return format!(
            "CREATE TABLE {table} (\n    event_id uuid PRIMARY KEY\n) PARTITION BY RANGE (event_id);\n\
             -- its partitions, a day each, are made and dropped by semel"
        );
    }
    format!(
        "CREATE TABLE {table} (\n    event_id uuid PRIMARY KEY,\n    seen_at  timestamptz NOT NULL DEFAULT now()\n);\n\
         CREATE INDEX ON {table} USING brin (seen_at);"
    )
}

/// The type that holds all of a member's sample values.
fn inferred(name: &str, samples: &[Sample]) -> Option<&'static str> {
    let types = samples.iter().filter_map(|s| s.get(name)).filter_map(|value| match value {
        Value::Null => None,
        Value::Bool(_) => Some("boolean"),
        Value::Number(n) if n.is_i64() => Some("bigint"),
        Value::Number(_) => Some("numeric"),
        Value::String(text) if super::temporal::timestamptz(text).is_ok() => Some("timestamptz"),
        Value::String(_) => Some("text"),
        Value::Array(_) | Value::Object(_) => Some("jsonb"),
    });
    types.reduce(|a, b| match (a, b) {
        _ if a == b => a,
        ("bigint" | "numeric", "bigint" | "numeric") => "numeric",
        ("text" | "timestamptz", "text" | "timestamptz") => "text",
        _ => "jsonb",
    })
}

/// Quotes only where Postgres would read the name otherwise.
fn plain_or_quoted(name: &str) -> String {
    let plain = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    let starts = name.as_bytes().first().is_some_and(|b| b.is_ascii_lowercase() || *b == b'_');
    if plain && starts && !RESERVED.contains(&name) { name.into() } else { quoted(name) }
}

/// Words of SQL that somebody may well use as a name, and that cannot be one unquoted.
const RESERVED: &[&str] = &[
    "all",
    "analyse",
    "analyze",
    "and",
    "any",
    "array",
    "as",
    "asc",
    "both",
    "case",
    "cast",
    "check",
    "collate",
    "column",
    "constraint",
    "create",
    "default",
    "desc",
    "distinct",
    "do",
    "else",
    "end",
    "except",
    "false",
    "fetch",
    "for",
    "foreign",
    "from",
    "grant",
    "group",
    "having",
    "in",
    "initially",
    "intersect",
    "into",
    "lateral",
    "leading",
    "limit",
    "not",
    "null",
    "offset",
    "on",
    "only",
    "or",
    "order",
    "placing",
    "primary",
    "references",
    "returning",
    "select",
    "some",
    "symmetric",
    "table",
    "then",
    "to",
    "trailing",
    "true",
    "union",
    "unique",
    "user",
    "using",
    "variadic",
    "when",
    "where",
    "window",
    "with",
];
