//! A Kafka sink: what a record becomes in its topic. Everything that the broker would refuse is refused here, because
//! there it would fail the whole transaction.

use crate::chunk::{Builder, Chunk, Target, TargetId};
use crate::clock::Clock;
use crate::expr::{Fault, Metadata, Program, Runtime};
use crate::ids::{self, Deriver, EventId};
use crate::record::Input;
use crate::reject::header;

use crate::topology::spec::AggregateTombstones;

use super::key::{self, Made};
use super::source::Event;
use super::{Record, partition};

#[derive(Clone, Debug)]
pub(super) struct Sink {
    pub(super) ids: Deriver,
    pub(super) key: Option<Program>,
    pub(super) id: TargetId,
    pub(super) target: Target,
    pub(super) clock: Clock,
    /// A reading of the clock that may be old: time only grows, so what is not too far ahead of it is not too far ahead.
    pub(super) now_ms: i64,
    /// Outputs name the record that they come from, and this job.
    pub(super) audit: Option<Box<str>>,
    /// Of a repartition: what happens to null values. Its records need a key, and carry their ids always.
    pub(super) repartition: Option<AggregateTombstones>,
    /// Whether a repartition takes records without one all the same.
    pub(super) null_keys: bool,
    /// Scratch for keys.
    pub(super) buffer: Vec<u8>,
}

/// The header that names the job and the record which an output comes from: `NAME/TOPIC/PARTITION/OFFSET`. Other jobs
/// may make outputs of the same record in the same topic.
pub const ORIGIN: &str = "semel-origin";

impl Sink {
    /// Writes a record as the `index`th output of its input in this sink. False if the key expression aborted.
    ///
    /// # Errors
    /// `null-key`, `too-large`, `timestamp`, and those of the key. The chunk then holds bytes without an output: rewind it.
    pub(super) fn write(
        &mut self,
        record: &Record,
        input: &Input<'_>,
        event: &Event,
        index: u32,
        runtime: &mut Runtime,
        chunk: &mut Chunk,
    ) -> Result<bool, Fault> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let result = self.write_with(&mut buffer, record, input, event, index, runtime, chunk);
        self.buffer = buffer;
        result
    }

    #[allow(clippy::too_many_arguments)] // Only here to lend out the scratch buffer.
    fn write_with(
        &mut self,
        buffer: &mut Vec<u8>,
        record: &Record,
        input: &Input<'_>,
        event: &Event,
        index: u32,
        runtime: &mut Runtime,
        chunk: &mut Chunk,
    ) -> Result<bool, Fault> {
        match self.repartition.filter(|_| record.body.is_null()) {
            None => {}
            Some(AggregateTombstones::Drop) => return Ok(false),
            Some(AggregateTombstones::Reject) => return Err(Fault::new("tombstone", "the value is null")),
        }
        let key = match &self.key {
            None => record.key(input),
            Some(program) => {
                let metadata = Metadata::new(input, record.key(input), record.identity(event));
                match key::make(program, record, runtime, &metadata, buffer)? {
                    Made::Key => Some(&buffer[..]),
                    Made::Null => None,
                    Made::Aborted => return Ok(false),
                }
            }
        };
        if key.is_none() && self.repartition.is_some() && !self.null_keys {
            return Err(Fault::new("null-key", "the key to go by is null: the record belongs to no other"));
        }
        if key.is_none() && self.target.compacted {
            let message = format!("the key is null, and the topic `{}` is compacted", self.target.topic);
            return Err(Fault::new("null-key", message));
        }
        let timestamp = self.timestamp(input, event)?;

        let mut out = chunk.push(self.id);
        out.partition(partition(key, input.partition, self.target.partitions)).timestamp(timestamp).key(key);
        let tell = event.tell || self.repartition.is_some();
        let id = record.own_id().or_else(|| if tell { event.identity.id() } else { None });
        let own = id.map(|id| self.ids.derive(id, index));
        let headers = write_headers(&mut out, input, own, self.audit.as_deref());
        let before = out.size();
        if !record.body.is_null() {
            let Ok(_) = out.value_with(|arena| {
                record.body.encode(arena);
                Ok::<(), std::convert::Infallible>(())
            });
        }
        let value = (!record.body.is_null()).then(|| out.size() - before);
        let size = batch_size(key.map(<[u8]>::len), value, headers);
        if size > self.target.max_message_bytes {
            let Target { topic, max_message_bytes, .. } = &self.target;
            let message = format!(
                "the output takes {size} bytes, the topic `{topic}` takes {max_message_bytes} (max.message.bytes)"
            );
            return Err(Fault::new("too-large", message));
        }
        out.finish();
        Ok(true)
    }

    /// The event's time, else the record's. A zero is left to the client: it takes it for "now" anyway.
    fn timestamp(&mut self, input: &Input<'_>, event: &Event) -> Result<Option<i64>, Fault> {
        let Some(time) = event.time_ms.or(input.timestamp).filter(|time| *time > 0) else { return Ok(None) };
        let Target { topic, timestamp_before_max_ms: before, timestamp_after_max_ms: after, .. } = &self.target;
        if *before != i64::MAX {
            self.now_ms = self.clock.now_ms();
            if time < self.now_ms.saturating_sub(*before) {
                let message = format!(
                    "the time {time} lies more than {before} ms before now, the topic `{topic}` does not take it \
                     (message.timestamp.before.max.ms)"
                );
                return Err(Fault::new("timestamp", message));
            }
        }
        if time > self.now_ms.saturating_add(*after) {
            self.now_ms = self.clock.now_ms();
            if time > self.now_ms.saturating_add(*after) {
                let message = format!(
                    "the time {time} lies more than {after} ms after now, the topic `{topic}` does not take it \
                     (message.timestamp.after.max.ms)"
                );
                return Err(Fault::new("timestamp", message));
            }
        }
        Ok(Some(time))
    }
}

/// Number and encoded size of an output's headers.
#[derive(Clone, Copy, Default)]
struct Headers {
    count: usize,
    size: usize,
}

/// The input's headers in order; the event id takes the place of the one that the input carries, or comes last. How often
/// a record was rejected before is between semel and its dead letters.
fn write_headers(out: &mut Builder<'_>, input: &Input<'_>, id: Option<EventId>, audit: Option<&str>) -> Headers {
    let mut buffer = [0; 36];
    let mut id = id.map(|id| id.text(&mut buffer).as_bytes());
    let replaces = id.is_some();
    let mut headers = Headers::default();
    let mut write = |name: &[u8], value: Option<&[u8]>| {
        headers.count += 1;
        headers.size += field(Some(name.len())) + field(value.map(<[u8]>::len));
        out.header(name, value);
    };
    for (name, value) in &input.headers.0 {
        if replaces && *name == ids::HEADER.as_bytes() {
            if let Some(id) = id.take() {
                write(name, Some(id));
            }
        } else if *name != header::RESTORED.as_bytes() && (audit.is_none() || *name != ORIGIN.as_bytes()) {
            write(name, *value);
        }
    }
    if let Some(id) = id {
        write(ids::HEADER.as_bytes(), Some(id));
    }
    if let Some(job) = audit {
        let origin = format!("{job}/{}/{}/{}", input.topic, input.partition, input.offset);
        write(ORIGIN.as_bytes(), Some(origin.as_bytes()));
    }
    headers
}

/// What the broker measures: a record batch of format 2 with this one record, not compressed.
fn batch_size(key: Option<usize>, value: Option<usize>, headers: Headers) -> usize {
    const BATCH: usize = 61;
    // Attributes, and the zero deltas of time and offset.
    let record = 3 + field(key) + field(value) + varint(headers.count) + headers.size;
    BATCH + varint(record) + record
}

/// [`batch_size`] of a record without headers.
pub(super) fn record_size(key: usize, value: usize) -> usize {
    batch_size(Some(key), Some(value), Headers::default())
}

/// A length and what it counts; null is the length -1.
fn field(len: Option<usize>) -> usize {
    len.map_or(1, |len| varint(len) + len)
}

/// The size of a zigzag varint that is not negative.
fn varint(n: usize) -> usize {
    let bits = (n as u64) << 1;
    (64 - (bits | 1).leading_zeros() as usize).div_ceil(7)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes of `DefaultRecordBatch.sizeInBytes` in Kafka's Java client for the same records.
    #[test]
    fn sizes_are_those_of_the_broker() {
        assert_eq!(batch_size(None, None, Headers::default()), 61 + 1 + 6);
        assert_eq!(batch_size(Some(1), Some(2), Headers::default()), 61 + 1 + 9);
        assert_eq!(varint(63), 1);
        assert_eq!(varint(64), 2);
        assert_eq!(varint(8191), 2);
        assert_eq!(varint(8192), 3);
        let headers = Headers { count: 1, size: field(Some(1)) + field(None) };
        assert_eq!(batch_size(Some(100), None, headers), 61 + 2 + 3 + 102 + 1 + 1 + 3);
    }
}
