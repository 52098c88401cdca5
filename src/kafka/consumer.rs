//! The consumer: one call that waits for whatever comes next, rebalances included.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdkafka::bindings as rd;

use super::caller::Caller;
use super::client::{Client, Event, Kind};
use super::code::Code;
use super::config::{Connection, Settings, millis};
use super::error::{Error, Operation};
use super::group::GroupHandle;
use super::list::{self, List, RawEntry};
use super::message::Message;
use super::offsets;
use super::options::ConsumerOptions;
use crate::commit::metadata::TopicIds;
use crate::record::{Position, TopicPartition};

/// How long dropping a consumer may take when nobody closed it.
const CLOSE_ON_DROP: Duration = Duration::from_secs(3);
/// A client that has failed asks its last question within this.
const QUIET: Duration = Duration::from_millis(100);

/// What a poll brought.
#[derive(Debug)]
pub enum Polled<'c> {
    Record(Message<'c>),
    /// The group gives us these. Answer with [`Consumer::assign`], also when the list is empty.
    Assign(Vec<TopicPartition>),
    /// Finish what is open on these, then answer with [`Consumer::unassign`]. `lost`: somebody else may have them
    /// already, nothing of them may be committed any more.
    Revoke {
        partitions: Vec<TopicPartition>,
        lost: bool,
    },
    /// Everything before that offset was delivered: the log's end, or the last stable offset with read_committed.
    EndOfPartition(TopicPartition, Position),
    Failed(Error),
    /// Nothing for the caller: time is up, or the client minded its own business. Poll again.
    Nothing,
}

/// A member of a consumer group. Nothing happens in callbacks: rebalances arrive from [`poll`](Consumer::poll) and wait
/// for their answer, heartbeats go on meanwhile. Poll at least every `max_poll_interval`.
pub struct Consumer {
    client: Arc<Client>,
    settings: Settings,
    group: GroupHandle,
    group_id: String,
    /// Where each assigned partition was started, for assignors that know only whole assignments.
    starts: HashMap<TopicPartition, Position>,
    /// The group assigns, rather than we ourselves.
    by_group: AtomicBool,
    closed: bool,
}

impl Consumer {
    /// Creates the client; it connects in the background. Errors: settings that the client does not take.
    pub fn new(connection: &Connection, options: &ConsumerOptions<'_>) -> Result<Consumer, Error> {
        let settings = options.settings(connection);
        let client = Arc::new(Client::new(Kind::Member, &settings)?);
        Ok(Consumer {
            group: GroupHandle::new(&client),
            client,
            settings,
            group_id: options.group.to_owned(),
            starts: HashMap::new(),
            by_group: AtomicBool::new(false),
            closed: false,
        })
    }

    /// Joins the group for these topics. A name that starts with `^` is a pattern.
    pub fn subscribe(&self, topics: &[&str]) -> Result<(), Error> {
        self.group.subscribe(topics)
    }

    /// Joins again as the same member, with a client made anew: one that was fenced is dead. What was assigned is gone, and
    /// every [`GroupHandle`] speaks of the new client.
    pub fn renew(&mut self) -> Result<(), Error> {
        self.discharge();
        self.client = Arc::new(Client::new(Kind::Member, &self.settings)?);
        self.starts.clear();
        self.group.renew(&self.client)
    }

    /// Whether the group has let this member in. Asks the client's own thread, not the network. Errors: the client has
    /// given up, such as for an instance id that [`is_unreleased_instance`](Error::is_unreleased_instance).
    pub fn has_joined(&self) -> Result<bool, Error> {
        match self.client.fatal(Operation::Consume) {
            Some(error) => Err(error),
            // Where the broker assigns, a member that only asks to be let in is at epoch 0.
            None => Ok(self.group.metadata().is_some_and(|m| m.is_member() && m.generation() > 0)),
        }
    }

    /// Waits up to `timeout` for what comes next. A message borrows the consumer, so none can be held across a change
    /// of the assignment.
    #[inline]
    pub fn poll(&self, timeout: Duration) -> Polled<'_> {
        let Some(event) = self.client.poll(timeout) else { return Polled::Nothing };
        match event.kind() {
            rd::RD_KAFKA_EVENT_FETCH => Message::new(event).map_or(Polled::Nothing, Polled::Record),
            rd::RD_KAFKA_EVENT_REBALANCE => self.rebalance(&event),
            rd::RD_KAFKA_EVENT_ERROR => self.failed(&event),
            _ => Polled::Nothing,
        }
    }

    fn rebalance(&self, event: &Event) -> Polled<'_> {
        // SAFETY: the event is alive and owns the list.
        let entries = unsafe { list::entries(rd::rd_kafka_event_topic_partition_list(event.as_ptr())) };
        let partitions = entries.into_iter().map(|e| e.partition).collect();
        self.by_group.store(true, Ordering::Relaxed);
        match event.code() {
            Code::ASSIGN_PARTITIONS => Polled::Assign(partitions),
            _ => Polled::Revoke { partitions, lost: self.assignment_lost() },
        }
    }

    fn failed(&self, event: &Event) -> Polled<'_> {
        let code = event.code();
        let entry = partition_of(event);
        if let (Code::PARTITION_EOF, Some(entry)) = (code, &entry) {
            return Polled::EndOfPartition(entry.partition.clone(), entry.position().unwrap_or(Position(0)));
        }
        let mut text = event.text();
        // Connections come and go, and the client mends them by itself.
        let connection = code.is_transient() || matches!(code, Code::AUTHENTICATION | Code::SSL);
        if !event.is_fatal() && entry.is_none() && connection {
            self.client.note_trouble(code, &text);
            return Polled::Nothing;
        }
        let mut error = Error::new(Operation::Consume, code, String::new()).with_fatal(event.is_fatal());
        if let Some(entry) = entry {
            if let Some(position) = entry.position().filter(|_| error.is_out_of_range()) {
                text = format!("the position {position} is outside the topic's log ({text})");
            }
            error = error.at(entry.partition.topic, Some(entry.partition.partition));
        }
        Polled::Failed(self.client.explain(error.with_text(text)))
    }

    /// Answers [`Polled::Assign`], with as many of its partitions as have a position yet; [`add`](Consumer::add) the
    /// rest later. An incremental assignor (cooperative-sticky, `group.protocol=consumer`) gets these on top of what is
    /// assigned; for another one they are the whole assignment.
    pub fn assign(&mut self, positions: &[(TopicPartition, Position)]) -> Result<(), Error> {
        if self.is_cooperative() {
            return self.incremental_assign(positions);
        }
        self.starts = positions.iter().cloned().collect();
        self.assign_whole()
    }

    /// Adds partitions to the assignment, from the loop rather than in answer to an event.
    pub fn add(&mut self, positions: &[(TopicPartition, Position)]) -> Result<(), Error> {
        if self.is_cooperative() {
            return self.incremental_assign(positions);
        }
        // A whole assignment starts every fetcher anew: those that have delivered go on where they are.
        let assigned: Vec<TopicPartition> = self.starts.keys().cloned().collect();
        for (partition, position) in self.position(&assigned) {
            if let Some(position) = position {
                self.starts.insert(partition, position);
            }
        }
        self.starts.extend(positions.iter().cloned());
        self.assign_whole()
    }

    /// Answers [`Polled::Revoke`]. Partitions of the list that were never added are no matter. Under an assignor that
    /// knows only whole assignments everything is given up.
    pub fn unassign(&mut self, partitions: &[TopicPartition]) -> Result<(), Error> {
        let cooperative = self.is_cooperative();
        if !cooperative {
            self.starts.clear();
        }
        give_up(&self.client, cooperative, partitions)
    }

    fn incremental_assign(&self, positions: &[(TopicPartition, Position)]) -> Result<(), Error> {
        let list = List::of_positions(positions);
        // SAFETY: client and list are alive; the call copies the list, and the error it returns is ours.
        unsafe { Error::check(Operation::Assign, rd::rd_kafka_incremental_assign(self.client.ptr(), list.as_ptr())) }
    }

    fn assign_whole(&self) -> Result<(), Error> {
        let positions: Vec<_> = self.starts.iter().map(|(p, at)| (p.clone(), *at)).collect();
        let list = List::of_positions(&positions);
        // SAFETY: client and list are alive; the call copies the list.
        assigned(Code(unsafe { rd::rd_kafka_assign(self.client.ptr(), list.as_ptr()) } as i32))
    }

    /// The partitions that were assigned and not given up yet.
    pub fn assignment(&self) -> Vec<TopicPartition> {
        assignment(&self.client)
    }

    /// Assignments change by additions and removals; else each one replaces the one before. All assignors of a list are of
    /// one kind, else there is no client.
    pub fn is_cooperative(&self) -> bool {
        let assignors = self.settings.value("partition.assignment.strategy").unwrap_or_default();
        let by_broker = self.settings.user("group.protocol") == Some("consumer");
        self.by_group.load(Ordering::Relaxed) && (by_broker || assignors.contains("cooperative-sticky"))
    }

    /// The group took the assignment away without asking (session timeout, a fenced member).
    pub fn assignment_lost(&self) -> bool {
        // SAFETY: the client is alive.
        unsafe { rd::rd_kafka_assignment_lost(self.client.ptr()) != 0 }
    }

    /// Moves assigned partitions. Blocks up to `timeout`. Records that were fetched before are dropped by the client;
    /// those that were polled already are the caller's to forget. Right after an assignment a partition answers an
    /// error that [`is_not_started`](Error::is_not_started): poll and seek it again.
    pub fn seek(
        &self,
        positions: &[(TopicPartition, Position)],
        timeout: Duration,
    ) -> Vec<(TopicPartition, Result<(), Error>)> {
        let list = List::of_positions(positions);
        // SAFETY: client and list are alive; the error that is returned is ours.
        let whole = unsafe {
            let error = rd::rd_kafka_seek_partitions(self.client.ptr(), list.as_ptr(), millis(timeout));
            Error::check(Operation::Seek, error)
        };
        let answer = |e: list::Entry| {
            let at = |error: Error| error.at(e.partition.topic.clone(), Some(e.partition.partition));
            let result = match &whole {
                _ if e.code.is_error() => Err(at(Error::of_code(Operation::Seek, e.code))),
                Err(error) => Err(at(error.clone())),
                Ok(()) => Ok(()),
            };
            (e.partition, result)
        };
        list.entries().into_iter().map(answer).collect()
    }

    /// Stops delivery of these; polls still serve rebalances. What was fetched ahead is dropped and fetched again:
    /// rarely.
    pub fn pause(&self, partitions: &[TopicPartition]) {
        let list = List::of_partitions(partitions.iter());
        // SAFETY: client and list are alive.
        unsafe { rd::rd_kafka_pause_partitions(self.client.ptr(), list.as_ptr()) };
    }

    pub fn resume(&self, partitions: &[TopicPartition]) {
        let list = List::of_partitions(partitions.iter());
        // SAFETY: client and list are alive.
        unsafe { rd::rd_kafka_resume_partitions(self.client.ptr(), list.as_ptr()) };
    }

    /// [`committed`](Self::committed), and what was committed beside each position.
    pub fn commits(
        &self,
        partitions: &[TopicPartition],
        timeout: Duration,
    ) -> Result<Vec<offsets::CommittedWith>, Error> {
        offsets::commits(&self.client, partitions, true, timeout)
    }

    /// The group's positions; `None` where it has none. With `read_committed`, a position that an open transaction
    /// holds is waited for up to `timeout` and then an error of its partition.
    pub fn committed(
        &self,
        partitions: &[TopicPartition],
        timeout: Duration,
    ) -> Result<Vec<offsets::Committed>, Error> {
        offsets::committed(&self.client, partitions, true, timeout)
    }

    /// Where delivery stands: the last polled record + 1, or further over transaction markers. `None` before the first
    /// record after an assignment or a seek.
    pub fn position(&self, partitions: &[TopicPartition]) -> Vec<(TopicPartition, Option<Position>)> {
        let list = List::of_partitions(partitions.iter());
        // SAFETY: client and list are alive; answers go into the list.
        unsafe { rd::rd_kafka_position(self.client.ptr(), list.as_ptr()) };
        list.entries().into_iter().map(|e| (e.partition.clone(), e.position())).collect()
    }

    /// [`GroupHandle::commit`]
    pub fn commit(
        &self,
        positions: &[(TopicPartition, Position)],
        ids: &TopicIds,
        timeout: Duration,
    ) -> Result<(), Error> {
        self.group.commit(positions, ids, timeout)
    }

    /// The membership, for another thread.
    pub fn group(&self) -> GroupHandle {
        self.group.clone()
    }

    /// Gives up the assignment and leaves the group within `within`, else goes on in the background. A static member
    /// does not leave: it has its partitions back if it returns within the session timeout.
    pub fn close(mut self, within: Duration) {
        self.shut(within);
    }

    fn shut(&mut self, within: Duration) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        self.group.close();
        let deadline = Instant::now() + within;
        // A question that was handed out and not answered would keep the group from ending.
        let was_asked = self.by_group.load(Ordering::Relaxed);
        if was_asked && self.tell(self.assignment(), within) == Answer::Unheard {
            return;
        }
        // SAFETY: client and queue are alive; the error that is returned is ours.
        let started = unsafe {
            let error = rd::rd_kafka_consumer_close_queue(self.client.ptr(), self.client.queue().as_ptr());
            Error::check(Operation::Connect, error)
        };
        if started.is_err() {
            // After a fatal error there is nothing to leave.
            self.discharge();
            return;
        }
        // SAFETY: the client is alive.
        while unsafe { rd::rd_kafka_consumer_closed(self.client.ptr()) } == 0 {
            if Instant::now() >= deadline || self.answer(deadline) == Answer::Unheard {
                tracing::debug!(client = self.client.name(), "the group does not answer the leave");
                return;
            }
        }
    }

    /// Answers what the group has asked. A client that is destroyed over an open question never ends, and keeps a core
    /// busy.
    fn discharge(&self) {
        // The last question may have been handed out already.
        if self.tell(self.assignment(), CLOSE_ON_DROP) == Answer::Unheard {
            return;
        }
        let mut until = Instant::now() + QUIET;
        while Instant::now() < until {
            match self.answer(until) {
                Answer::Nothing => {}
                Answer::Heard => until = Instant::now() + QUIET,
                Answer::Unheard => return,
            }
        }
    }

    /// Waits for a question of the group until `deadline` and answers it by giving everything up.
    fn answer(&self, deadline: Instant) -> Answer {
        let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_millis(100));
        let (Polled::Assign(partitions) | Polled::Revoke { partitions, .. }) = self.poll(left) else {
            return Answer::Nothing;
        };
        self.tell(partitions, deadline.saturating_duration_since(Instant::now()).max(QUIET))
    }

    /// Gives partitions up. Once the group has ended within the client, an answer that was on its way is not heard, and
    /// its call does not come back.
    fn tell(&self, partitions: Vec<TopicPartition>, within: Duration) -> Answer {
        let (client, cooperative) = (Arc::clone(&self.client), self.is_cooperative());
        let answer = move || drop(give_up(&client, cooperative, &partitions));
        let answered = Caller::new("kafka-close").ok().and_then(|caller| caller.call(within, answer));
        if answered.is_some() { Answer::Heard } else { Answer::Unheard }
    }
}

/// What became of an answer to the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// There was no question.
    Nothing,
    Heard,
    Unheard,
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.shut(CLOSE_ON_DROP);
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").field("client", &self.client).field("group", &self.group_id).finish_non_exhaustive()
    }
}

fn assignment(client: &Client) -> Vec<TopicPartition> {
    let mut list = ptr::null_mut();
    // SAFETY: the client is alive; the list that is set is ours.
    let list = unsafe {
        rd::rd_kafka_assignment(client.ptr(), &mut list);
        List::from_owned(list)
    };
    list.map_or_else(Vec::new, |list| list.entries().into_iter().map(|e| e.partition).collect())
}

/// Gives partitions up, of which some may never have been added; everything where assignments are whole.
fn give_up(client: &Client, cooperative: bool, partitions: &[TopicPartition]) -> Result<(), Error> {
    if !cooperative {
        // SAFETY: the client is alive; null is documented as "nothing".
        return assigned(Code(unsafe { rd::rd_kafka_assign(client.ptr(), ptr::null()) } as i32));
    }
    let held: HashSet<TopicPartition> = assignment(client).into_iter().collect();
    let list = List::of_partitions(partitions.iter().filter(|p| held.contains(p)).collect::<Vec<_>>().into_iter());
    // SAFETY: client and list are alive; the call copies the list, and the error it returns is ours.
    unsafe { Error::check(Operation::Assign, rd::rd_kafka_incremental_unassign(client.ptr(), list.as_ptr())) }
}

fn assigned(code: Code) -> Result<(), Error> {
    if code.is_error() { Err(Error::of_code(Operation::Assign, code)) } else { Ok(()) }
}

/// The partition that an error is about.
fn partition_of(event: &Event) -> Option<list::Entry> {
    // SAFETY: the event is alive; the entry that is returned is ours, is copied, and freed here.
    unsafe {
        let entry = rd::rd_kafka_event_topic_partition(event.as_ptr());
        if entry.is_null() {
            return None;
        }
        let copy = RawEntry::read(entry);
        rd::rd_kafka_topic_partition_destroy(entry);
        Some(copy)
    }
}
