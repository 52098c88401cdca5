//! `[sinks.NAME]`.

use super::cx::{Cx, Table};
use super::nodes::{Draft, NodeType};
use super::postgres::postgres;
use super::read::into_map;
use super::topics::check_topic;
use crate::expr::Role;
use crate::topology::keys;
use crate::topology::spec::{CreateTopic, KafkaSink, NodeKind};

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
