//! librdkafka's list of partitions, as values of ours.

use std::ffi::{CStr, CString};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use rdkafka::bindings as rd;

use super::code::Code;
use crate::commit::metadata::TopicIds;
use crate::record::{Position, TopicPartition};

unsafe extern "C" {
    fn malloc(size: usize) -> *mut std::ffi::c_void;
}

/// One entry of a list.
pub(super) struct Entry {
    pub partition: TopicPartition,
    /// A position, or one of librdkafka's negative marks.
    pub offset: i64,
    pub code: Code,
    /// What was committed beside a position; mostly nothing.
    pub metadata: Vec<u8>,
}

impl Entry {
    /// The position, `None` where there is none.
    pub fn position(&self) -> Option<Position> {
        (self.offset >= 0).then_some(Position(self.offset))
    }
}

/// A list that we own.
pub(super) struct List(NonNull<rd::rd_kafka_topic_partition_list_t>);

// SAFETY: a plain heap object without ties to a thread.
unsafe impl Send for List {}

impl List {
    pub fn new(capacity: usize) -> List {
        // SAFETY: no precondition; librdkafka aborts rather than returning null when memory is out.
        let list = unsafe { rd::rd_kafka_topic_partition_list_new(capacity as i32) };
        List(NonNull::new(list).expect("librdkafka returns a list"))
    }

    pub fn of_partitions<'a>(partitions: impl ExactSizeIterator<Item = &'a TopicPartition>) -> List {
        let mut list = List::new(partitions.len());
        for partition in partitions {
            list.push(partition, i64::from(rd::RD_KAFKA_OFFSET_INVALID));
        }
        list
    }

    pub fn of_positions(positions: &[(TopicPartition, Position)]) -> List {
        let mut list = List::new(positions.len());
        for (partition, position) in positions {
            list.push(partition, position.0);
        }
        list
    }

    /// Positions with what is committed beside each.
    pub fn of_commit(positions: &[(TopicPartition, Position)], ids: &TopicIds) -> List {
        let mut list = List::of_positions(positions);
        for (index, (partition, _)) in positions.iter().enumerate() {
            if let Some(metadata) = ids.metadata(partition) {
                list.set_metadata(index, metadata.as_bytes());
            }
        }
        list
    }

    fn set_metadata(&mut self, index: usize, metadata: &[u8]) {
        // SAFETY: the entry is there and has no metadata yet. The list frees what it is given by C's `free`; where
        // nothing can be had it stays without.
        unsafe {
            let entry = (*self.as_ptr()).elems.add(index);
            let copy = malloc(metadata.len());
            if !copy.is_null() {
                std::ptr::copy_nonoverlapping(metadata.as_ptr(), copy.cast(), metadata.len());
                (*entry).metadata = copy;
                (*entry).metadata_size = metadata.len();
            }
        }
    }

    pub fn push(&mut self, partition: &TopicPartition, offset: i64) {
        // A name with a NUL byte is no topic's; cut there, the broker answers that it does not exist.
        let topic = CString::new(&*partition.topic).unwrap_or_else(|e| {
            let end = e.nul_position();
            CString::new(&partition.topic.as_bytes()[..end]).unwrap_or_default()
        });
        // SAFETY: the list is ours and alive; the call copies the name and returns a pointer to the new entry, which
        // stays valid until the list is changed again.
        unsafe {
            let entry = rd::rd_kafka_topic_partition_list_add(self.as_ptr(), topic.as_ptr(), partition.partition);
            (*entry).offset = offset;
        }
    }

    pub fn as_ptr(&self) -> *mut rd::rd_kafka_topic_partition_list_t {
        self.0.as_ptr()
    }

    pub fn entries(&self) -> Vec<Entry> {
        // SAFETY: the list is ours and alive.
        unsafe { entries(self.as_ptr()) }
    }

    /// Takes over a list that a call has handed to us.
    ///
    /// # Safety
    /// `list` is null or a list that nobody else frees.
    pub unsafe fn from_owned(list: *mut rd::rd_kafka_topic_partition_list_t) -> Option<List> {
        NonNull::new(list).map(List)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: ours, and freed only here.
        unsafe { rd::rd_kafka_topic_partition_list_destroy(self.as_ptr()) }
    }
}

/// Copies the entries of a borrowed list (an event owns it); null is an empty list.
///
/// # Safety
/// `list` is null or points to a list that lives through the call.
pub(super) unsafe fn entries(list: *const rd::rd_kafka_topic_partition_list_t) -> Vec<Entry> {
    if list.is_null() {
        return Vec::new();
    }
    // SAFETY: a live list holds `cnt` initialised elements at `elems`; an empty one may hold null there.
    let elements = unsafe {
        let count = (*list).cnt.max(0) as usize;
        if count == 0 { &[] } else { slice::from_raw_parts((*list).elems.cast::<RawEntry>(), count) }
    };
    let mut topic: Option<Arc<str>> = None;
    elements
        .iter()
        .map(|element| {
            // SAFETY: every element holds a NUL-terminated name.
            let name = unsafe { CStr::from_ptr(element.topic) }.to_string_lossy();
            // Lists are mostly runs of one topic: share its name.
            let name = match &topic {
                Some(shared) if **shared == *name => shared.clone(),
                _ => topic.insert(Arc::from(&*name)).clone(),
            };
            Entry {
                partition: TopicPartition::new(name, element.partition),
                offset: element.offset,
                code: Code(element.code),
                // SAFETY: the list is alive.
                metadata: unsafe { element.metadata() },
            }
        })
        .collect()
}

/// `rd_kafka_topic_partition_t` with its error code as an integer: the bindings' enum has no value for codes that a
/// newer broker may send.
#[repr(C)]
pub(super) struct RawEntry {
    topic: *mut std::ffi::c_char,
    partition: i32,
    offset: i64,
    metadata: *mut std::ffi::c_void,
    metadata_size: usize,
    opaque: *mut std::ffi::c_void,
    code: i32,
    private: *mut std::ffi::c_void,
}

const _: () = assert!(size_of::<RawEntry>() == size_of::<rd::rd_kafka_topic_partition_t>());
const _: () =
    assert!(std::mem::offset_of!(RawEntry, code) == std::mem::offset_of!(rd::rd_kafka_topic_partition_t, err));

impl RawEntry {
    /// # Safety
    /// The entry's list is alive.
    unsafe fn metadata(&self) -> Vec<u8> {
        if self.metadata.is_null() || self.metadata_size == 0 {
            return Vec::new();
        }
        // SAFETY: by the caller's word; the bytes are copied.
        unsafe { slice::from_raw_parts(self.metadata.cast(), self.metadata_size) }.to_vec()
    }

    /// Copies a single borrowed entry.
    ///
    /// # Safety
    /// `entry` points to a live `rd_kafka_topic_partition_t`.
    pub unsafe fn read(entry: *const rd::rd_kafka_topic_partition_t) -> Entry {
        // SAFETY: same layout (asserted above), alive by the caller's word, name NUL-terminated.
        unsafe {
            let raw = &*entry.cast::<RawEntry>();
            Entry {
                partition: TopicPartition::new(&*CStr::from_ptr(raw.topic).to_string_lossy(), raw.partition),
                offset: raw.offset,
                code: Code(raw.code),
                metadata: raw.metadata(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_go_in_and_come_out() {
        let positions =
            [(TopicPartition::new("a", 0), Position(5)), (TopicPartition::new("b", 3), Position(i64::MAX - 1))];
        let list = List::of_positions(&positions);
        let back: Vec<_> = list.entries().into_iter().map(|e| (e.partition.clone(), e.position().unwrap())).collect();
        assert_eq!(back, positions);
    }

    #[test]
    fn a_partition_without_a_position_has_none() {
        let partitions = [TopicPartition::new("a\0b", 1)];
        let entries = List::of_partitions(partitions.iter()).entries();
        assert_eq!(entries.len(), 1);
        assert_eq!(entries[0].partition, TopicPartition::new("a", 1));
        assert_eq!(entries[0].position(), None);
        assert!(!entries[0].code.is_error());
    }
}
