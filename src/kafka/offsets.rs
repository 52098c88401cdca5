//! Positions: of a group, and at the ends of the log.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::bindings as rd;
use rdkafka::types::RDKafkaAdminOp as AdminOp;

use super::client::Client;
use super::code::Code;
use super::config::millis;
use super::error::{Error, Operation};
use super::list::{self, List, RawEntry};
use super::request::{c_string, question, with_trouble};
use crate::record::{Position, TopicPartition};

/// The client is looked after this often while it waits.
const SLICE: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(20);
/// For one partition of several, of which some are held by a transaction.
const ALONE: Duration = Duration::from_millis(100);

/// A partition's position in a group or in the log: `None` where it has none, an error where it cannot be told.
pub type Committed = (TopicPartition, Result<Option<Position>, Error>);

/// The same with what was committed beside the position.
pub type CommittedWith = (TopicPartition, Result<Option<(Position, Vec<u8>)>, Error>);

/// Which position to look up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The first record that is still there.
    Earliest,
    /// After the last one: the last stable offset with [`Isolation::ReadCommitted`], else the end of the log.
    Latest,
    /// The first record of that time or later, in milliseconds since the epoch.
    Timestamp(i64),
}

/// Which records count: `isolation.level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    ReadCommitted,
    ReadUncommitted,
}

// As an integer: see `code.rs`.
unsafe extern "C" {
    fn rd_kafka_committed(
        client: *mut rd::rd_kafka_t,
        partitions: *mut rd::rd_kafka_topic_partition_list_t,
        timeout_ms: c_int,
    ) -> c_int;
}

/// Positions of the client's group. With `stable`, which is for a client that reads `read_committed`, those that an open
/// transaction holds are waited for up to `timeout`; they then answer with an error that asks to come back, and the
/// others with what they are. Else nothing holds them, and no answer in time is an error of them all.
///
/// Asked for as a consumer, never by ListConsumerGroupOffsets: librdkafka aborts the process where the coordinator goes
/// away under such an administrative request (librdkafka #3663, #4605).
pub(super) fn committed(
    client: &Client,
    partitions: &[TopicPartition],
    stable: bool,
    timeout: Duration,
) -> Result<Vec<Committed>, Error> {
    let commits = commits(client, partitions, stable, timeout)?;
    Ok(commits.into_iter().map(|(partition, at)| (partition, at.map(|at| at.map(|(position, _)| position)))).collect())
}

/// [`committed`] with what was committed beside each position.
pub(super) fn commits(
    client: &Client,
    partitions: &[TopicPartition],
    stable: bool,
    timeout: Duration,
) -> Result<Vec<CommittedWith>, Error> {
    if partitions.is_empty() {
        return Ok(Vec::new());
    }
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match committed_once(client, partitions, left.min(SLICE)) {
            Err(error) if error.code().is_transient() && left > AGAIN => {
                client.look_after();
                // A coordinator that moved or is loading is answered at once.
                thread::sleep(AGAIN);
            }
            Err(error) if error.is_timeout() && stable => {
                return Ok(one_by_one(client, partitions, timeout, &error));
            }
            answer => return answer,
        }
    }
}

/// The client waits for all where one is held: the others are told apart from it, within `timeout` once more.
fn one_by_one(client: &Client, partitions: &[TopicPartition], timeout: Duration, held: &Error) -> Vec<CommittedWith> {
    let held_by = |error: Error| {
        let text = format!("{} (an open transaction may hold it)", error.text());
        error.with_text(text)
    };
    let ask = |alone: &[TopicPartition]| committed_once(client, alone, ALONE).map_err(held_by);
    each_alone(partitions, |partition| partition, timeout, &held_by(held.clone()), ask)
}

/// Asks about each partition alone, for as long as `timeout` lasts, after the question about all of them met `whole`.
fn each_alone<A, T>(
    asked: &[A],
    partition: impl Fn(&A) -> &TopicPartition,
    timeout: Duration,
    whole: &Error,
    ask: impl Fn(&[A]) -> Result<Vec<(TopicPartition, Result<T, Error>)>, Error>,
) -> Vec<(TopicPartition, Result<T, Error>)> {
    let deadline = Instant::now() + timeout;
    let answer = |one: &A| {
        let again = asked.len() > 1 && Instant::now() < deadline;
        let told = if again { ask(std::slice::from_ref(one)) } else { Err(whole.clone()) };
        told.and_then(|mut found| found.pop().ok_or_else(|| whole.clone())).unwrap_or_else(|error| {
            let partition = partition(one);
            (partition.clone(), Err(error.at(&*partition.topic, Some(partition.partition))))
        })
    };
    asked.iter().map(answer).collect()
}

fn committed_once(
    client: &Client,
    partitions: &[TopicPartition],
    timeout: Duration,
) -> Result<Vec<CommittedWith>, Error> {
    let operation = Operation::Positions;
    let list = List::of_partitions(partitions.iter());
    // SAFETY: client and list are alive; answers go into the list.
    let code = Code(unsafe { rd_kafka_committed(client.ptr(), list.as_ptr(), millis(timeout)) });
    if code.is_error() {
        return Err(with_trouble(client, Error::of_code(operation, code)));
    }
    let answers = list.entries().into_iter().map(|e| {
        let answer = if e.code.is_error() {
            Err(Error::of_code(operation, e.code).at(e.partition.topic.clone(), Some(e.partition.partition)))
        } else {
            Ok(e.position().map(|position| (position, e.metadata)))
        };
        (e.partition, answer)
    });
    Ok(answers.collect())
}

/// Positions in the log; `None` where no record is that young. Errors: the first partition that cannot be told.
pub(super) fn in_log(
    client: &Client,
    asked: &[(TopicPartition, At)],
    isolation: Isolation,
    timeout: Duration,
) -> Result<Vec<(TopicPartition, Option<Position>)>, Error> {
    let found = in_log_fresh(client, asked, isolation, timeout)?;
    found.into_iter().map(|(partition, position)| Ok((partition, position?))).collect()
}

/// The same where some partitions cannot be told: the question about all of them may fail for one without a leader, and
/// each is asked about alone then, within `timeout` once more.
pub(super) fn each_in_log(
    client: &Client,
    asked: &[(TopicPartition, At)],
    isolation: Isolation,
    timeout: Duration,
) -> Vec<Committed> {
    in_log_fresh(client, asked, isolation, timeout).unwrap_or_else(|whole| {
        let ask = |alone: &[(TopicPartition, At)]| in_log_fresh(client, alone, isolation, ALONE);
        each_alone(asked, |(partition, _)| partition, timeout, &whole, ask)
    })
}

/// Asks again where a partition met what passes by itself (a topic that was just made, a leader on the move), until
/// `timeout`.
fn in_log_fresh(
    client: &Client,
    asked: &[(TopicPartition, At)],
    isolation: Isolation,
    timeout: Duration,
) -> Result<Vec<Committed>, Error> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let found = in_log_once(client, asked, isolation, left);
        let met: Vec<Code> = match &found {
            Err(error) => vec![error.code()],
            Ok(found) => found.iter().filter_map(|(_, at)| Some(at.as_ref().err()?.code())).collect(),
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left <= AGAIN || !met.iter().any(|code| code.is_transient()) {
            return found;
        }
        // The client asked with a leader or an epoch that it once heard of and would ask with for ever.
        if met.iter().any(|code| code.is_stale_leader()) {
            let topics: BTreeSet<&str> = asked.iter().map(|(partition, _)| &*partition.topic).collect();
            for topic in topics {
                let name = c_string(Operation::Admin("looking up positions in the log"), topic)?;
                let _ = client.refresh(&name, left);
            }
        }
        thread::sleep(AGAIN);
    }
}

fn in_log_once(
    client: &Client,
    asked: &[(TopicPartition, At)],
    isolation: Isolation,
    timeout: Duration,
) -> Result<Vec<Committed>, Error> {
    if asked.is_empty() {
        return Ok(Vec::new());
    }
    let operation = Operation::Admin("looking up positions in the log");
    let mut list = List::new(asked.len());
    for (partition, at) in asked {
        list.push(
            partition,
            match at {
                At::Earliest => rd::rd_kafka_OffsetSpec_t::RD_KAFKA_OFFSET_SPEC_EARLIEST as i64,
                At::Latest => rd::rd_kafka_OffsetSpec_t::RD_KAFKA_OFFSET_SPEC_LATEST as i64,
                // Negative ones are the marks above.
                At::Timestamp(ms) => (*ms).max(0),
            },
        );
    }
    let answer = question(client, operation, AdminOp::RD_KAFKA_ADMIN_OP_LISTOFFSETS, timeout, |options, queue| {
        options.isolation(match isolation {
            Isolation::ReadCommitted => rd::rd_kafka_IsolationLevel_t::RD_KAFKA_ISOLATION_LEVEL_READ_COMMITTED,
            Isolation::ReadUncommitted => rd::rd_kafka_IsolationLevel_t::RD_KAFKA_ISOLATION_LEVEL_READ_UNCOMMITTED,
        });
        // SAFETY: everything is alive, and the call copies the list.
        unsafe { rd::rd_kafka_ListOffsets(client.ptr(), list.as_ptr(), options.as_ptr(), queue) }
    })?;
    // SAFETY: the event is alive and owns what it hands out, which is copied; a null result is not looked into.
    let entries: Vec<list::Entry> = unsafe {
        let result = rd::rd_kafka_event_ListOffsets_result(answer.as_ptr());
        let mut count = 0;
        if result.is_null() {
            Vec::new()
        } else {
            let infos = rd::rd_kafka_ListOffsets_result_infos(result, &mut count);
            (0..count)
                .map(|i| RawEntry::read(rd::rd_kafka_ListOffsetsResultInfo_topic_partition(*infos.add(i))))
                .collect()
        }
    };
    let answers = entries.into_iter().map(|e| {
        let answer = if e.code.is_error() {
            Err(Error::of_code(operation, e.code).at(e.partition.topic.clone(), Some(e.partition.partition)))
        } else {
            Ok(e.position())
        };
        (e.partition, answer)
    });
    Ok(answers.collect())
}
