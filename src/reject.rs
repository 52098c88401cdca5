//! Rejects: a record that cannot be processed goes whole to the dead-letter topic, with what was wrong.

use std::borrow::Cow;

use crate::chunk::{Chunk, Target, TargetId};
use crate::record::Input;

/// Why a record was rejected: a stable slug (each documented in `docs/reference.md`) and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// The node that rejected it.
    pub node: String,
    /// A slug of [`REASONS`].
    pub reason: &'static str,
    pub message: String,
}

/// Every reason a reject can carry, and what it means.
pub const REASONS: &[(&str, &str)] = &[
    (
        "undecodable",
        "the value is not what the source's format says (not a JSON object, not UTF-8, too deep, a member name twice)",
    ),
    ("event-id", "the declared event id is missing, null, or neither a string nor an integer"),
    ("event-time", "the declared event time is missing or no time between 1970 and 9999"),
    ("expression", "an expression failed on this record"),
    ("inexact-number", "an expression that assigns read a number that it cannot hold exactly"),
    ("key", "the key expression gave an object or an array"),
    ("tombstone-key", "a null value where a key is made from the value"),
    ("null-key", "a null key towards a compacted topic"),
    ("too-large", "an output is larger than its topic takes"),
    ("timestamp", "an output's time is outside what its topic takes"),
    ("broker", "the broker refused the record"),
    ("version", "the version is missing, null or no integer"),
    ("column", "a value does not fit its column"),
    ("unknown-field", "a member that has no column, with unknown_fields = \"reject\""),
    ("tombstone", "a null value, with tombstones = \"reject\""),
    ("database", "the database refused the row"),
    ("outside-ledger", "the time in the event's id is outside what the sink's ledger remembers"),
];

/// Writes the dead letter of `input`: key, value, headers and timestamp as they were, then what was wrong in
/// `semel-error-*` headers (former ones of those names are replaced). It goes to the input's partition modulo the
/// topic's. A letter over the topic's limit is cut: value first, then headers, and says so in
/// `semel-error-message`.
pub fn dead_letter(
    chunk: &mut Chunk,
    id: TargetId,
    target: &Target,
    topology: &str,
    event_id: Option<&str>,
    input: &Input<'_>,
    reject: &Reject,
) {
    let carried: usize = input.headers.0.iter().map(|(n, v)| n.len() + v.map_or(0, <[u8]>::len) + 8).sum();
    let size = input.key.map_or(0, <[u8]>::len) + input.value.map_or(0, <[u8]>::len) + carried;
    // The broker counts batch overhead and our own headers too.
    let room = target.max_message_bytes.saturating_sub(2048 + reject.message.len().min(MESSAGE_MAX));
    let cut = size > room;

    let mut message: Cow<'_, str> = truncated(&reject.message);
    if cut {
        message.to_mut().push_str(" [cut: the record was larger than the dead-letter topic takes]");
    }
    let attempt = attempt(input) + 1;

    let mut out = chunk.push(id);
    out.partition(input.partition.rem_euclid(target.partitions.max(1))).timestamp(input.timestamp.filter(|t| *t >= 0));
    if cut {
        let key = input.key.map(|k| &k[..k.len().min(room / 4)]);
        out.key(key);
        let left = room - key.map_or(0, <[u8]>::len);
        out.value(input.value.map(|v| &v[..v.len().min(left / 2)]));
    } else {
        out.key(input.key).value(input.value);
    }
    let mut left = room.saturating_sub(out.size());
    for (name, value) in &input.headers.0 {
        let size = name.len() + value.map_or(0, <[u8]>::len) + 8;
        let ours = name.starts_with(b"semel-error-") || (event_id.is_some() && *name == b"semel-event-id");
        if ours || size > left {
            continue;
        }
        left -= size;
        out.header(name, *value);
    }
    if let Some(id) = event_id {
        out.header(b"semel-event-id", Some(id.as_bytes()));
    }
    out.header(b"semel-error-topology", Some(topology.as_bytes()))
        .header(b"semel-error-node", Some(reject.node.as_bytes()))
        .header(b"semel-error-topic", Some(input.topic.as_bytes()))
        .header(b"semel-error-partition", Some(input.partition.to_string().as_bytes()))
        .header(b"semel-error-offset", Some(input.offset.to_string().as_bytes()))
        .header(b"semel-error-reason", Some(reject.reason.as_bytes()))
        .header(b"semel-error-message", Some(message.as_bytes()))
        .header(b"semel-error-attempt", Some(attempt.to_string().as_bytes()));
    out.finish();
}

const MESSAGE_MAX: usize = 1024;

fn truncated(message: &str) -> Cow<'_, str> {
    if message.len() <= MESSAGE_MAX {
        return Cow::Borrowed(message);
    }
    let end = (0..=MESSAGE_MAX).rev().find(|i| message.is_char_boundary(*i)).unwrap_or(0);
    Cow::Owned(format!("{}…", &message[..end]))
}

/// How often the record was rejected before: its `semel-error-attempt`, 0 where there is none.
fn attempt(input: &Input<'_>) -> u32 {
    let value = input.headers.last("semel-error-attempt").flatten();
    value.and_then(|v| std::str::from_utf8(v).ok()).and_then(|v| v.parse().ok()).unwrap_or(0)
}
