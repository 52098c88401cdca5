//! Copies of records whose fate the database has yet to decide.

use std::sync::Arc;

use crate::chunk::{Chunk, TargetId};
use crate::record::{Headers, Input, Offset};

/// Records in one arena, in the order they were put in.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    topics: Vec<Arc<str>>,
    offsets: Vec<Offset>,
    records: Chunk,
}

impl Kept {
    /// Records held.
    pub fn len(&self) -> usize {
        self.offsets.len()
    }

    /// Copies a record.
    pub fn push(&mut self, input: &Input<'_>) {
        let topic = match self.topics.iter().position(|topic| **topic == *input.topic) {
            Some(topic) => topic,
            None => {
                self.topics.push(input.topic.into());
                self.topics.len() - 1
            }
        };
        self.offsets.push(input.offset);
        let mut out = self.records.push(TargetId(topic as u32));
        out.partition(input.partition).timestamp(input.timestamp).key(input.key).value(input.value);
        for (name, value) in &input.headers.0 {
            out.header(name, *value);
        }
        out.finish();
    }

    /// The record at `index`, as it was read.
    pub fn input(&self, index: usize) -> Input<'_> {
        let record = self.records.get(index);
        Input {
            topic: &self.topics[record.target.0 as usize],
            partition: record.partition,
            offset: self.offsets[index],
            timestamp: record.timestamp,
            key: record.key,
            value: record.value,
            headers: Headers(record.headers().collect()),
        }
    }

    pub fn clear(&mut self) {
        self.topics.clear();
        self.offsets.clear();
        self.records.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_as_it_was_read() {
        let input = Input {
            topic: "in",
            partition: 3,
            offset: Offset(9),
            timestamp: Some(-1),
            key: Some(b""),
            value: None,
            headers: Headers(vec![(b"a", None), (b"\xff", Some(b"1"))]),
        };
        let mut kept = Kept::default();
        kept.push(&Input { topic: "other", offset: Offset(1), ..input.clone() });
        kept.push(&input);
        let back = kept.input(1);
        assert_eq!((back.topic, back.partition, back.offset), ("in", 3, Offset(9)));
        assert_eq!((back.timestamp, back.key, back.value), (Some(-1), Some(&b""[..]), None));
        assert_eq!(back.headers, input.headers);
    }
}
