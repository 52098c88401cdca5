//! Outputs on their way from a worker to its committer: one arena of bytes, so that a record costs no allocation.

use std::ops::Range;
use std::sync::Arc;

/// A topic that a stage writes to, with what the broker said of it at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub topic: Arc<str>,
    pub partitions: i32,
    /// The topic's `max.message.bytes`.
    pub max_message_bytes: usize,
    /// `cleanup.policy` holds `compact`: a null key would be refused by the broker.
    pub compacted: bool,
    /// `message.timestamp.before.max.ms` and `message.timestamp.after.max.ms`.
    pub timestamp_before_max_ms: i64,
    pub timestamp_after_max_ms: i64,
}

impl Target {
    /// Whether the broker takes a record of that time now; both are milliseconds since the epoch.
    pub fn takes_time(&self, time_ms: i64, now_ms: i64) -> bool {
        time_ms >= now_ms.saturating_sub(self.timestamp_before_max_ms)
            && time_ms <= now_ms.saturating_add(self.timestamp_after_max_ms)
    }
}

/// Index of a [`Target`] in the stage's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetId(pub u32);

type Span = Range<u32>;

#[derive(Clone, Debug)]
struct Entry {
    target: TargetId,
    partition: i32,
    timestamp: Option<i64>,
    key: Option<Span>,
    value: Option<Span>,
    headers: Span,
}

/// About 64 KB of outputs. Buffers are reused: `clear` keeps the capacity.
#[derive(Clone, Debug, Default)]
pub struct Chunk {
    data: Vec<u8>,
    entries: Vec<Entry>,
    headers: Vec<(Span, Option<Span>)>,
}

/// A place to go back to when a record is rejected.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    data: usize,
    entries: usize,
    headers: usize,
}

/// One output, borrowed from its chunk.
#[derive(Clone, Debug)]
pub struct Output<'a> {
    pub target: TargetId,
    pub partition: i32,
    /// Milliseconds since the epoch; `None` leaves it to the client (now).
    pub timestamp: Option<i64>,
    pub key: Option<&'a [u8]>,
    pub value: Option<&'a [u8]>,
    chunk: &'a Chunk,
    headers: Span,
}

impl<'a> Output<'a> {
    /// Bytes of key, value and headers.
    pub fn bytes_len(&self) -> usize {
        let len = |bytes: Option<&[u8]>| bytes.map_or(0, <[u8]>::len);
        let headers = self.headers().map(|(name, value)| name.len() + len(value)).sum::<usize>();
        len(self.key) + len(self.value) + headers
    }

    /// Headers in order, repeats and nulls kept.
    pub fn headers(&self) -> impl ExactSizeIterator<Item = (&'a [u8], Option<&'a [u8]>)> + use<'a> {
        let chunk = self.chunk;
        chunk.headers[self.headers.start as usize..self.headers.end as usize]
            .iter()
            .map(move |(name, value)| (chunk.bytes(name), value.as_ref().map(|v| chunk.bytes(v))))
    }
}

impl Chunk {
    /// Outputs held.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of keys, values and headers held.
    pub fn bytes_len(&self) -> usize {
        self.data.len()
    }

    /// Empties the chunk; its buffers stay.
    pub fn clear(&mut self) {
        self.data.clear();
        self.entries.clear();
        self.headers.clear();
    }

    /// Where the chunk stands.
    pub fn mark(&self) -> Mark {
        Mark { data: self.data.len(), entries: self.entries.len(), headers: self.headers.len() }
    }

    /// Withdraws everything put in since `mark`.
    pub fn rewind(&mut self, mark: Mark) {
        self.data.truncate(mark.data);
        self.entries.truncate(mark.entries);
        self.headers.truncate(mark.headers);
    }

    /// Starts an output: write key, headers and value through the builder, then `finish`. One that is dropped instead
    /// leaves bytes behind but no output; take a [`Mark`] first where that matters.
    pub fn push(&mut self, target: TargetId) -> Builder<'_> {
        let headers = self.headers.len() as u32;
        Builder {
            entry: Entry { target, partition: 0, timestamp: None, key: None, value: None, headers: headers..headers },
            start: self.data.len(),
            chunk: self,
        }
    }

    /// The outputs in the order they were put in.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Output<'_>> {
        (0..self.entries.len()).map(|index| self.get(index))
    }

    /// The output at `index`.
    pub fn get(&self, index: usize) -> Output<'_> {
        let e = &self.entries[index];
        Output {
            target: e.target,
            partition: e.partition,
            timestamp: e.timestamp,
            key: e.key.as_ref().map(|s| self.bytes(s)),
            value: e.value.as_ref().map(|s| self.bytes(s)),
            chunk: self,
            headers: e.headers.clone(),
        }
    }

    fn bytes(&self, span: &Span) -> &[u8] {
        &self.data[span.start as usize..span.end as usize]
    }
}

/// An output being written.
#[derive(Debug)]
pub struct Builder<'a> {
    chunk: &'a mut Chunk,
    entry: Entry,
    start: usize,
}

impl Builder<'_> {
    pub fn partition(&mut self, partition: i32) -> &mut Self {
        self.entry.partition = partition;
        self
    }

    pub fn timestamp(&mut self, timestamp: Option<i64>) -> &mut Self {
        self.entry.timestamp = timestamp;
        self
    }

    pub fn key(&mut self, key: Option<&[u8]>) -> &mut Self {
        self.entry.key = key.map(|k| self.write(k));
        self
    }

    pub fn value(&mut self, value: Option<&[u8]>) -> &mut Self {
        self.entry.value = value.map(|v| self.write(v));
        self
    }

    /// Writes the value straight into the arena.
    pub fn value_with<E>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Result<&mut Self, E> {
        let start = self.chunk.data.len() as u32;
        write(&mut self.chunk.data)?;
        self.entry.value = Some(start..self.chunk.data.len() as u32);
        Ok(self)
    }

    pub fn header(&mut self, name: &[u8], value: Option<&[u8]>) -> &mut Self {
        let name = self.write(name);
        let value = value.map(|v| self.write(v));
        self.chunk.headers.push((name, value));
        self.entry.headers.end += 1;
        self
    }

    /// Bytes of key, value and headers written so far.
    pub fn size(&self) -> usize {
        self.chunk.data.len() - self.start
    }

    /// Puts the output in.
    pub fn finish(self) {
        self.chunk.entries.push(self.entry);
    }

    fn write(&mut self, bytes: &[u8]) -> Span {
        let start = self.chunk.data.len() as u32;
        self.chunk.data.extend_from_slice(bytes);
        start..self.chunk.data.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_come_back_as_they_went_in_and_a_rewind_withdraws_them() {
        let mut chunk = Chunk::default();
        let mut out = chunk.push(TargetId(1));
        out.partition(3)
            .timestamp(Some(7))
            .key(Some(b"k"))
            .value(Some(b""))
            .header(b"a", None)
            .header(b"a", Some(b"1"));
        out.finish();
        let mark = chunk.mark();
        let mut out = chunk.push(TargetId(0));
        out.key(None).value(None);
        out.finish();
        chunk.rewind(mark);

        let outputs: Vec<_> = chunk.iter().collect();
        assert_eq!(outputs.len(), 1);
        let o = &outputs[0];
        assert_eq!((o.target, o.partition, o.timestamp), (TargetId(1), 3, Some(7)));
        assert_eq!((o.key, o.value), (Some(&b"k"[..]), Some(&b""[..])));
        assert_eq!(o.headers().collect::<Vec<_>>(), [(&b"a"[..], None), (&b"a"[..], Some(&b"1"[..]))]);
    }
}
