//! A record as the consumer hands it out: borrowed from the client's fetch buffer, no allocation, no copy.

use std::ffi::CStr;
use std::marker::PhantomData;
use std::ptr;
use std::slice;

use rdkafka::bindings as rd;

use super::client::Event;
use super::consumer::Consumer;
use crate::record::{Headers, Input, Offset, Timestamp};

/// One record. It keeps its whole fetch response in memory: process it and let it go.
pub struct Message<'c> {
    /// Owns what `raw` points to.
    _event: Event,
    raw: *const rd::rd_kafka_message_t,
    consumer: PhantomData<&'c Consumer>,
}

impl<'c> Message<'c> {
    /// The record of a fetch event; `None` if it holds none.
    #[inline]
    pub(super) fn new(event: Event) -> Option<Message<'c>> {
        // SAFETY: the event is ours. The message it returns lives inside the event, whose address does not change when
        // the handle moves.
        let raw = unsafe { rd::rd_kafka_event_message_next(event.as_ptr()) };
        (!raw.is_null()).then_some(Message { _event: event, raw, consumer: PhantomData })
    }

    #[inline]
    fn raw(&self) -> &rd::rd_kafka_message_t {
        // SAFETY: alive as long as the event, which `self` owns. Its error code is one that the bindings know: a fetch
        // event holds a record and no error.
        unsafe { &*self.raw }
    }

    pub fn topic(&self) -> &str {
        // SAFETY: the topic handle is referenced by the message, its name is NUL-terminated and lives as long.
        let name = unsafe { CStr::from_ptr(rd::rd_kafka_topic_name(self.raw().rkt)) };
        // Kafka takes letters, digits, dot, dash and underscore in names and nothing else.
        name.to_str().unwrap_or_default()
    }

    #[inline]
    pub fn partition(&self) -> i32 {
        self.raw().partition
    }

    #[inline]
    pub fn offset(&self) -> Offset {
        Offset(self.raw().offset)
    }

    /// `None` where the record has no time.
    pub fn timestamp(&self) -> Timestamp {
        let mut kind = rd::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE;
        // SAFETY: the message is alive; librdkafka sets one of the three kinds that the bindings know.
        let timestamp = unsafe { rd::rd_kafka_message_timestamp(self.raw, &mut kind) };
        (kind != rd::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE && timestamp != -1)
            .then_some(timestamp)
    }

    /// `None` is a null key; an empty slice is an empty key.
    #[inline]
    pub fn key(&self) -> Option<&[u8]> {
        let raw = self.raw();
        // SAFETY: pointer and length are the key's, alive as long as the event.
        unsafe { bytes(raw.key.cast(), raw.key_len) }
    }

    /// `None` is a null value; an empty slice is an empty value.
    #[inline]
    pub fn value(&self) -> Option<&[u8]> {
        let raw = self.raw();
        // SAFETY: pointer and length are the value's, alive as long as the event.
        unsafe { bytes(raw.payload.cast(), raw.len) }
    }

    /// Appends the headers in order, repeats and nulls kept. A name's bytes end at a NUL: the client hides what
    /// follows.
    pub fn headers<'m>(&'m self, into: &mut Vec<(&'m [u8], Option<&'m [u8]>)>) {
        let mut headers = ptr::null_mut();
        // SAFETY: the message is alive; it keeps the parsed headers until it is destroyed. Any answer but 0 (none, or
        // unreadable) leaves nothing to read, and is compared as an integer since it may be a code unknown to us.
        unsafe {
            if rd::rd_kafka_message_headers(self.raw, &mut headers) as i32 != 0 || headers.is_null() {
                return;
            }
            let count = rd::rd_kafka_header_cnt(headers);
            into.reserve(count);
            for index in 0..count {
                let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0);
                if rd::rd_kafka_header_get_all(headers, index, &mut name, &mut value, &mut size) as i32 == 0 {
                    into.push((CStr::from_ptr(name).to_bytes(), bytes(value.cast(), size)));
                }
            }
        }
    }

    /// The record as operators read it. `headers` lends its buffer: pass an empty one back in to save the allocation.
    pub fn to_input<'m>(&'m self, mut headers: Vec<(&'m [u8], Option<&'m [u8]>)>) -> Input<'m> {
        headers.clear();
        self.headers(&mut headers);
        Input {
            topic: self.topic(),
            partition: self.partition(),
            offset: self.offset(),
            timestamp: self.timestamp(),
            key: self.key(),
            value: self.value(),
            headers: Headers(headers),
        }
    }
}

impl std::fmt::Debug for Message<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Message")
            .field("topic", &self.topic())
            .field("partition", &self.partition())
            .field("offset", &self.offset())
            .finish_non_exhaustive()
    }
}

/// Null stays apart from empty.
///
/// # Safety
/// `start` is null or `len` bytes can be read there for `'a`.
#[inline]
unsafe fn bytes<'a>(start: *const u8, len: usize) -> Option<&'a [u8]> {
    match (start.is_null(), len) {
        (true, _) => None,
        (false, 0) => Some(&[]),
        // SAFETY: by the caller's word.
        (false, _) => Some(unsafe { slice::from_raw_parts(start, len) }),
    }
}
