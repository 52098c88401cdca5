//! Membership of a consumer group, as a committer on another thread needs it.

use std::ffi::CStr;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::bindings as rd;

use super::client::Client;
use super::code::Code;
use super::error::{Error, Operation};
use super::list::{self, List};
use crate::commit::metadata::TopicIds;
use crate::record::{Position, TopicPartition};

/// A consumer's membership. Any thread may hold a clone; it answers nothing once the consumer is closed.
#[derive(Clone)]
pub struct GroupHandle(Arc<Mutex<Membership>>);

struct Membership {
    client: Option<Arc<Client>>,
    /// What was subscribed to last.
    topics: Vec<String>,
}

impl GroupHandle {
    pub(super) fn new(client: &Arc<Client>) -> GroupHandle {
        GroupHandle(Arc::new(Mutex::new(Membership { client: Some(client.clone()), topics: Vec::new() })))
    }

    fn membership(&self) -> MutexGuard<'_, Membership> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self, operation: Operation) -> Result<Arc<Client>, Error> {
        let closed = || Error::new(operation, Code::STATE, "the consumer is closed");
        self.membership().client.clone().ok_or_else(closed)
    }

    /// From here on no handle reaches the client: a closing client may never answer.
    pub(super) fn close(&self) {
        self.membership().client.take();
    }

    /// From here on the handles speak of another client, which joins for the same topics.
    pub(super) fn renew(&self, client: &Arc<Client>) -> Result<(), Error> {
        let topics = {
            let mut membership = self.membership();
            membership.client = Some(client.clone());
            membership.topics.clone()
        };
        self.subscribe(&topics.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// What the client believes of its membership right now. Asks librdkafka's own thread: microseconds, no network.
    /// `None` when the consumer is closed or never had a member id.
    pub fn metadata(&self) -> Option<GroupMetadata> {
        // Held through the call, so that the client cannot be closed under it.
        let membership = self.membership();
        // SAFETY: the client is alive; the metadata that is returned is ours.
        NonNull::new(unsafe { rd::rd_kafka_consumer_group_metadata(membership.client.as_ref()?.ptr()) })
            .map(GroupMetadata::new)
    }

    /// Makes a poll that waits on the consumer return at once.
    pub fn wake(&self) {
        if let Some(client) = &self.membership().client {
            client.queue().wake();
        }
    }

    /// Joins the group for these topics, or changes what is read; a rebalance follows.
    pub fn subscribe(&self, topics: &[&str]) -> Result<(), Error> {
        let client = self.client(Operation::Subscribe)?;
        self.membership().topics = topics.iter().map(|topic| (*topic).to_owned()).collect();
        let partitions: Vec<_> = topics.iter().map(|topic| TopicPartition::new(*topic, -1)).collect();
        let list = List::of_partitions(partitions.iter());
        // SAFETY: client and list are alive; the call copies the list.
        let code = Code(unsafe { rd::rd_kafka_subscribe(client.ptr(), list.as_ptr()) } as i32);
        if code.is_error() { Err(Error::of_code(Operation::Subscribe, code)) } else { Ok(()) }
    }

    /// Gives up what is read and leaves the group, to join it anew with [`subscribe`](Self::subscribe).
    pub fn unsubscribe(&self) -> Result<(), Error> {
        let client = self.client(Operation::Subscribe)?;
        // SAFETY: the client is alive.
        let code = Code(unsafe { rd::rd_kafka_unsubscribe(client.ptr()) } as i32);
        if code.is_error() { Err(Error::of_code(Operation::Subscribe, code)) } else { Ok(()) }
    }

    /// Commits positions outside a transaction, each with the id of its topic, for at-least-once. Blocks until the broker has answered or `timeout`
    /// has passed; then the outcome is unknown and committing the same positions again is harmless.
    pub fn commit(
        &self,
        positions: &[(TopicPartition, Position)],
        ids: &TopicIds,
        timeout: Duration,
    ) -> Result<(), Error> {
        let client = self.client(Operation::CommitPositions)?;
        let list = List::of_commit(positions, ids);
        let queue = client.new_queue();
        // SAFETY: client, list and queue are alive; the call copies the list. Without a callback the answer comes to
        // the queue as an event.
        let sent = unsafe {
            rd::rd_kafka_commit_queue(client.ptr(), list.as_ptr(), queue.as_ptr(), None, std::ptr::null_mut())
        };
        let sent = Code(sent as i32);
        if sent.is_error() {
            return Err(Error::of_code(Operation::CommitPositions, sent));
        }
        let deadline = Instant::now() + timeout;
        let answer = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match queue.poll(left) {
                Some(event) if event.kind() == rd::RD_KAFKA_EVENT_OFFSET_COMMIT => break event,
                None if left.is_zero() => return Err(Error::of_code(Operation::CommitPositions, Code::TIMED_OUT)),
                _ => {}
            }
        };
        if answer.code().is_error() {
            return Err(client.explain(Error::of_code(Operation::CommitPositions, answer.code())));
        }
        // SAFETY: the event is alive and owns the list.
        let entries = unsafe { list::entries(rd::rd_kafka_event_topic_partition_list(answer.as_ptr())) };
        match entries.into_iter().find(|e| e.code.is_error()) {
            Some(e) => {
                Err(Error::of_code(Operation::CommitPositions, e.code)
                    .at(e.partition.topic, Some(e.partition.partition)))
            }
            None => Ok(()),
        }
    }
}

impl fmt::Debug for GroupHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupHandle")
    }
}

/// One look at the membership: what `send_offsets` proves to the broker.
#[derive(Clone)]
pub struct GroupMetadata(Arc<Metadata>);

struct Metadata(NonNull<rd::rd_kafka_consumer_group_metadata_t>);

// SAFETY: a plain heap object without ties to a thread or to its client.
unsafe impl Send for Metadata {}
// SAFETY: it is only read.
unsafe impl Sync for Metadata {}

impl GroupMetadata {
    fn new(metadata: NonNull<rd::rd_kafka_consumer_group_metadata_t>) -> GroupMetadata {
        GroupMetadata(Arc::new(Metadata(metadata)))
    }

    /// A membership that nobody has.
    #[cfg(test)]
    pub(super) fn invented(group: &str, generation: i32, member: &str) -> GroupMetadata {
        let (group, member) = (std::ffi::CString::new(group).unwrap(), std::ffi::CString::new(member).unwrap());
        // SAFETY: the strings are alive and copied; the object that is returned is ours.
        GroupMetadata::new(
            NonNull::new(unsafe {
                rd::rd_kafka_consumer_group_metadata_new_with_genid(
                    group.as_ptr(),
                    generation,
                    member.as_ptr(),
                    std::ptr::null(),
                )
            })
            .unwrap(),
        )
    }

    pub(super) fn as_ptr(&self) -> *const rd::rd_kafka_consumer_group_metadata_t {
        self.0.0.as_ptr()
    }

    /// The generation (the member epoch under `group.protocol=consumer`); below 0 outside a group.
    pub fn generation(&self) -> i32 {
        // SAFETY: ours and alive.
        unsafe { rd::rd_kafka_consumer_group_metadata_generation_id(self.as_ptr()) }
    }

    /// Empty before the first join and after the membership was lost.
    pub fn member_id(&self) -> &str {
        // SAFETY: ours and alive; the string is NUL-terminated and lives as long.
        unsafe { CStr::from_ptr(rd::rd_kafka_consumer_group_metadata_member_id(self.as_ptr())) }
            .to_str()
            .unwrap_or_default()
    }

    /// Whether the broker would check anything: with a generation below 0 or an empty member id it accepts positions
    /// from anybody, so such a commit must not be sent.
    pub fn is_member(&self) -> bool {
        self.generation() >= 0 && !self.member_id().is_empty()
    }
}

impl Drop for Metadata {
    fn drop(&mut self) {
        // SAFETY: ours, and freed only here.
        unsafe { rd::rd_kafka_consumer_group_metadata_destroy(self.0.as_ptr()) }
    }
}

impl fmt::Debug for GroupMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupMetadata")
            .field("generation", &self.generation())
            .field("member_id", &self.member_id())
            .finish()
    }
}
