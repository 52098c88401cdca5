//! Rejects: a record that cannot be processed goes whole to the dead-letter topic, with what was wrong.

use std::borrow::Cow;

use crate::chunk::{Chunk, Target, TargetId};
use crate::clock::Clock;
use crate::ids;
use crate::record::{Headers, Input, Offset};

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
    (
        "event-time",
        "the declared event time is missing or no time between 1970 and 9999, or a record for a window has no time",
    ),
    ("expression", "an expression failed on this record"),
    ("inexact-number", "an expression that assigns read a number that it cannot hold exactly"),
    ("key", "the key expression gave an object or an array, or an aggregate's key is not UTF-8"),
    ("tombstone-key", "a null value where a key is made from the value"),
    ("null-key", "a null key towards a compacted topic, or into an aggregate, a table or an inner join"),
    ("too-large", "an output, the state of a key or a row is larger than its topic takes"),
    ("timestamp", "an output's time is outside what its topic takes"),
    ("broker", "the broker refused the record"),
    ("version", "the version is missing, null or no integer"),
    ("column", "a value does not fit its column"),
    ("unknown-field", "a member that has no column, with unknown_fields = \"reject\""),
    ("tombstone", "a null value, with tombstones = \"reject\", or into a join by another key"),
    ("database", "the database refused the row"),
    ("outside-ledger", "the time in the event's id is outside what the sink's ledger remembers"),
    (
        "field",
        "a value that a field of an aggregate does not take, such as text for a sum, or that a join cannot put into JSON",
    ),
    ("overflow", "a number that a field of an aggregate does not hold exactly in 128 bits"),
    ("limit", "a value more than a field of an aggregate keeps"),
    ("late", "the record's windows had closed, with late = \"reject\""),
    ("ahead", "the event's time lies further past its record's own timestamp than the source's `max_ahead`"),
    (
        "retry",
        "a record of a retry topic that names no source which the stage reads, or whose state is with another worker",
    ),
];

/// Headers of a dead letter.
pub mod header {
    pub const TOPOLOGY: &str = "semel-error-topology";
    pub const NODE: &str = "semel-error-node";
    pub const TOPIC: &str = "semel-error-topic";
    pub const PARTITION: &str = "semel-error-partition";
    pub const OFFSET: &str = "semel-error-offset";
    pub const REASON: &str = "semel-error-reason";
    pub const MESSAGE: &str = "semel-error-message";
    /// How often the record was rejected, from 1.
    pub const ATTEMPT: &str = "semel-error-attempt";
    /// The same on a restored record, under a name that no record brings: the client ends names at a NUL. Outputs do not
    /// carry it.
    pub const RESTORED: &str = "semel-error-attempt\0";
    /// On a record of a retry topic: the address of its dead letter, `PARTITION:OFFSET`.
    pub const REPLAY_OF: &str = "semel-replay-of";
    /// What all of a dead letter's own headers begin with.
    pub const ERROR: &str = "semel-error-";
}

/// What the message of a dead letter ends with that does not hold the whole record.
pub const CUT: &str = " [cut: the record was larger than the dead-letter topic takes]";

/// Writes the dead letter of `input`: key, value, headers and timestamp as they were, then what was wrong in
/// `semel-error-*` headers (former ones of those names are replaced). It goes to the input's partition modulo the
/// topic's. A letter over the topic's limit is cut: value first, then headers, and says so in
/// `semel-error-message`. A time that the topic does not take is left to the client: better a letter of now than none.
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
        message.to_mut().push_str(CUT);
    }
    let attempt = attempt(input).saturating_add(1);
    let timestamp = input.timestamp.filter(|time| *time >= 0 && target.takes_time(*time, Clock::System.now_ms()));

    let mut out = chunk.push(id);
    out.partition(input.partition.rem_euclid(target.partitions.max(1))).timestamp(timestamp);
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
        let ours =
            name.starts_with(header::ERROR.as_bytes()) || (event_id.is_some() && *name == ids::HEADER.as_bytes());
        if ours || size > left {
            continue;
        }
        left -= size;
        out.header(name, *value);
    }
    if let Some(id) = event_id {
        out.header(ids::HEADER.as_bytes(), Some(id.as_bytes()));
    }
    out.header(header::TOPOLOGY.as_bytes(), Some(topology.as_bytes()))
        .header(header::NODE.as_bytes(), Some(reject.node.as_bytes()))
        .header(header::TOPIC.as_bytes(), Some(input.topic.as_bytes()))
        .header(header::PARTITION.as_bytes(), Some(input.partition.to_string().as_bytes()))
        .header(header::OFFSET.as_bytes(), Some(input.offset.to_string().as_bytes()))
        .header(header::REASON.as_bytes(), Some(reject.reason.as_bytes()))
        .header(header::MESSAGE.as_bytes(), Some(message.as_bytes()))
        .header(header::ATTEMPT.as_bytes(), Some(attempt.to_string().as_bytes()));
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
    let value = text(input, header::RESTORED).or_else(|| text(input, header::ATTEMPT));
    value.and_then(|v| v.parse().ok()).unwrap_or(0)
}

fn text<'a>(input: &Input<'a>, header: &str) -> Option<&'a str> {
    std::str::from_utf8(input.headers.last(header).flatten()?).ok()
}

/// The record that a record of a retry topic stands for, as its source had it: topic, partition and offset are the
/// source's, and of the dead letter's headers only the attempt is left, for the next one to count on. `None` where it
/// does not say where it comes from.
pub fn restored<'a>(retry: &Input<'a>) -> Option<Input<'a>> {
    let ours = |name: &[u8]| name.starts_with(header::ERROR.as_bytes()) || name == header::REPLAY_OF.as_bytes();
    let attempt = retry.headers.last(header::ATTEMPT).map(|value| (header::RESTORED.as_bytes(), value));
    Some(Input {
        topic: text(retry, header::TOPIC)?,
        partition: text(retry, header::PARTITION)?.parse().ok().filter(|partition| *partition >= 0)?,
        offset: Offset(text(retry, header::OFFSET)?.parse().ok().filter(|offset| *offset >= 0)?),
        headers: Headers(retry.headers.0.iter().filter(|(name, _)| !ours(name)).copied().chain(attempt).collect()),
        ..*retry
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_rejected_comes_back_as_it_was_read_and_counts_on() {
        let target = Target {
            topic: "t.dead-letters".into(),
            partitions: 2,
            max_message_bytes: 1 << 20,
            compacted: false,
            timestamp_before_max_ms: i64::MAX,
            timestamp_after_max_ms: i64::MAX,
        };
        let input = Input {
            topic: "in",
            partition: 3,
            offset: Offset(17),
            timestamp: Some(1_700_000_000_000),
            key: Some(b""),
            value: None,
            headers: Headers(vec![(b"a", Some(b"1")), (b"a", None), (b"\xff", Some(b""))]),
        };
        let reject = Reject { node: "n".into(), reason: "expression", message: "m".into() };
        let mut rejected = input.clone();
        for attempt in ["1", "2"] {
            let mut chunk = Chunk::default();
            dead_letter(&mut chunk, TargetId(0), &target, "t", None, &rejected, &reject);
            let letter = chunk.get(0);
            assert_eq!(letter.partition, 1);
            let mut headers: Vec<_> = letter.headers().collect();
            headers.push((header::REPLAY_OF.as_bytes(), Some(b"1:0")));
            let retry = Input {
                topic: "t.t.retry",
                partition: 1,
                offset: Offset(0),
                timestamp: letter.timestamp,
                key: letter.key,
                value: letter.value,
                headers: Headers(headers),
            };
            let back = restored(&retry).unwrap();
            assert_eq!((back.topic, back.partition, back.offset), ("in", 3, Offset(17)));
            assert_eq!((back.timestamp, back.key, back.value), (input.timestamp, input.key, None));
            let expected: Vec<(&[u8], Option<&[u8]>)> = input
                .headers
                .0
                .iter()
                .copied()
                .chain([(header::RESTORED.as_bytes(), Some(attempt.as_bytes()))])
                .collect();
            assert_eq!(back.headers.0, expected);
            rejected.headers = Headers(expected);
        }
        assert!(restored(&input).is_none());
    }
}
