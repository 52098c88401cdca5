//! Positions: of a group, and at the ends of the log.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::bindings as rd;
use rdkafka::types::RDKafkaAdminOp as AdminOp;

use super::client::Client;
use super::code::Code;
use super::error::{Error, Operation};
use super::list::{self, List, RawEntry};
use super::request::{c_string, request};
use crate::record::{Position, TopicPartition};

/// A partition's position in a group: `None` where it has none, an error where it cannot be told.
pub type Committed = (TopicPartition, Result<Option<Position>, Error>);

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

/// A group's positions. With `stable` those that an open transaction holds are asked for again until `timeout`; then
/// the partition answers with its error.
pub(super) fn committed(
    client: &Client,
    group: &str,
    partitions: &[TopicPartition],
    stable: bool,
    timeout: Duration,
) -> Result<Vec<Committed>, Error> {
    if partitions.is_empty() {
        return Ok(Vec::new());
    }
    let deadline = Instant::now() + timeout;
    let mut wait = Duration::from_millis(10);
    let mut answers = committed_once(client, group, partitions, stable, timeout)?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let unstable = answers.iter().any(|(_, answer)| answer.as_ref().is_err_and(Error::is_unstable));
        if !unstable || left <= wait {
            return Ok(answers);
        }
        // The markers of a finished transaction take milliseconds, an open one takes as long as it likes.
        thread::sleep(wait);
        match committed_once(client, group, partitions, stable, left - wait) {
            Ok(newer) => answers = newer,
            // The last try had no time left: what the broker said before stands.
            Err(error) if error.is_timeout() => return Ok(answers),
            Err(error) => return Err(error),
        }
        wait = (wait * 2).min(Duration::from_millis(100));
    }
}

fn committed_once(
    client: &Client,
    group: &str,
    partitions: &[TopicPartition],
    stable: bool,
    timeout: Duration,
) -> Result<Vec<Committed>, Error> {
    let operation = Operation::Positions;
    let name = c_string(operation, group)?;
    let list = List::of_partitions(partitions.iter());
    let answer =
        request(client, operation, AdminOp::RD_KAFKA_ADMIN_OP_LISTCONSUMERGROUPOFFSETS, timeout, |options, queue| {
            if stable {
                options.require_stable();
            }
            // SAFETY: everything is alive; the call copies what it is given, and what is made here is freed here.
            unsafe {
                let mut asked = rd::rd_kafka_ListConsumerGroupOffsets_new(name.as_ptr(), list.as_ptr());
                rd::rd_kafka_ListConsumerGroupOffsets(client.ptr(), &mut asked, 1, options.as_ptr(), queue);
                rd::rd_kafka_ListConsumerGroupOffsets_destroy(asked);
            }
        })?;
    // SAFETY: the event is alive and of the kind that was asked for (null otherwise, which the calls below do not get);
    // it owns the groups and their lists, which are copied.
    let entries = unsafe {
        let result = rd::rd_kafka_event_ListConsumerGroupOffsets_result(answer.as_ptr());
        let mut count = 0;
        let groups = if result.is_null() {
            std::ptr::null_mut()
        } else {
            rd::rd_kafka_ListConsumerGroupOffsets_result_groups(result, &mut count)
        };
        if groups.is_null() || count == 0 {
            return Err(Error::new(operation, Code::BAD_MESSAGE, "the answer names no group"));
        }
        let error = rd::rd_kafka_group_result_error(*groups);
        if !error.is_null() {
            return Err(Error::borrowed(operation, error));
        }
        list::entries(rd::rd_kafka_group_result_partitions(*groups))
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

/// Positions in the log; `None` where no record is that young. Errors: the first partition that cannot be told.
pub(super) fn in_log(
    client: &Client,
    asked: &[(TopicPartition, At)],
    isolation: Isolation,
    timeout: Duration,
) -> Result<Vec<(TopicPartition, Option<Position>)>, Error> {
    let deadline = Instant::now() + timeout;
    match in_log_once(client, asked, isolation, timeout) {
        // The client asked with a leader epoch that it once heard of and would ask with for ever (a broker was
        // restarted meanwhile).
        Err(error) if error.code().is_stale_leader() => {
            let topics: BTreeSet<&str> = asked.iter().map(|(partition, _)| &*partition.topic).collect();
            for topic in topics {
                let name = c_string(Operation::Admin("looking up positions in the log"), topic)?;
                client.refresh(&name, deadline.saturating_duration_since(Instant::now()))?;
            }
            in_log_once(client, asked, isolation, deadline.saturating_duration_since(Instant::now()))
        }
        result => result,
    }
}

fn in_log_once(
    client: &Client,
    asked: &[(TopicPartition, At)],
    isolation: Isolation,
    timeout: Duration,
) -> Result<Vec<(TopicPartition, Option<Position>)>, Error> {
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
    let answer = request(client, operation, AdminOp::RD_KAFKA_ADMIN_OP_LISTOFFSETS, timeout, |options, queue| {
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
    let mut positions = Vec::with_capacity(entries.len());
    for e in entries {
        if e.code.is_error() {
            return Err(Error::of_code(operation, e.code).at(e.partition.topic, Some(e.partition.partition)));
        }
        positions.push((e.partition.clone(), e.position()));
    }
    Ok(positions)
}
