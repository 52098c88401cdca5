//! Records as Kafka has them: bytes in order, with null, empty and absent kept apart.

use std::fmt;
use std::sync::Arc;

/// The offset of a record that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Offset(pub i64);

/// The next offset to read: last processed + 1, or further over transaction markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub i64);

impl Offset {
    /// The position after this record.
    pub fn next(self) -> Position {
        Position(self.0 + 1)
    }
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Milliseconds since the epoch, as Kafka counts them. `None` where a record has no time.
pub type Timestamp = Option<i64>;

/// Headers in wire order, repeats kept. A name is bytes: producers need not write UTF-8. A value is null or bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers<'a>(pub Vec<(&'a [u8], Option<&'a [u8]>)>);

impl<'a> Headers<'a> {
    /// The value of the last header of that name, as Kafka's clients answer `lastHeader`.
    pub fn last(&self, name: &str) -> Option<Option<&'a [u8]>> {
        self.0.iter().rev().find(|(n, _)| *n == name.as_bytes()).map(|(_, v)| *v)
    }
}

/// One record as it was read. It borrows the client's buffer: nothing is copied until somebody keeps it.
#[derive(Clone, Debug)]
pub struct Input<'a> {
    pub topic: &'a str,
    pub partition: i32,
    pub offset: Offset,
    pub timestamp: Timestamp,
    pub key: Option<&'a [u8]>,
    /// `None` is a tombstone; an empty slice is an empty value.
    pub value: Option<&'a [u8]>,
    pub headers: Headers<'a>,
}

/// A partition of a topic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicPartition {
    pub topic: Arc<str>,
    pub partition: i32,
}

impl TopicPartition {
    pub fn new(topic: impl Into<Arc<str>>, partition: i32) -> TopicPartition {
        TopicPartition { topic: topic.into(), partition }
    }
}

impl fmt::Display for TopicPartition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.topic, self.partition)
    }
}
