//! Consumer groups as the broker sees them.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::bindings as rd;
use rdkafka::types::RDKafkaAdminOp as AdminOp;

use super::client::Client;
use super::code::Code;
use super::config::millis;
use super::error::{Error, Operation};
use super::list;
use super::request::{again, c_string, request};
use crate::record::TopicPartition;

// As an integer: see `code.rs`.
unsafe extern "C" {
    fn rd_kafka_list_groups(
        client: *mut rd::rd_kafka_t,
        group: *const c_char,
        groups: *mut *const rd::rd_kafka_group_list,
        timeout_ms: c_int,
    ) -> c_int;
}

/// A consumer group. One that nobody is in has no members.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// No rebalance is under way.
    pub stable: bool,
    pub members: Vec<Member>,
}

/// A member of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub id: String,
    pub client_id: String,
    pub host: String,
    pub partitions: Vec<TopicPartition>,
}

/// What each member of a group reads, and `None` of a group in which the broker assigns (KIP-848), of which this request
/// tells nothing. A running job may ask: where the coordinator goes away under [`describe`], librdkafka aborts the
/// process (#4605). Blocks for `timeout`, also where one broker of several is away.
pub(super) fn assignments(client: &Client, group: &str, timeout: Duration) -> Result<Option<Group>, Error> {
    let operation = Operation::Admin("looking at a group");
    let name = c_string(operation, group)?;
    let mut groups = ptr::null();
    // SAFETY: client and name are alive; groups that are set are ours and freed below.
    let code = Code(unsafe { rd_kafka_list_groups(client.ptr(), name.as_ptr(), &mut groups, millis(timeout)) });
    // Of several brokers one did not answer, but the one that has the group did.
    if code.is_error() && code != Code::PARTIAL {
        return Err(Error::of_code(operation, code));
    }
    let mut found = Some(Group::default());
    // SAFETY: the list holds that many groups, a group that many members, and each what its sizes say; all is copied.
    unsafe {
        for index in 0..(*groups).group_cnt.max(0) as usize {
            let group = (*groups).groups.add(index);
            let state = text((*group).state);
            // As a group of the older protocol it does not exist, and yet the broker lists it.
            found = found.filter(|_| state.as_deref() != Some("Dead"));
            let Some(found) = &mut found else { break };
            found.stable = state.as_deref() == Some("Stable");
            for index in 0..(*group).member_cnt.max(0) as usize {
                let member = &*(*group).members.add(index);
                let bytes = match member.member_assignment.is_null() {
                    true => &[][..],
                    false => std::slice::from_raw_parts(
                        member.member_assignment.cast(),
                        member.member_assignment_size.max(0) as usize,
                    ),
                };
                found.members.push(Member {
                    id: text(member.member_id).unwrap_or_default(),
                    client_id: text(member.client_id).unwrap_or_default(),
                    host: text(member.client_host).unwrap_or_default(),
                    partitions: partitions(bytes).unwrap_or_default(),
                });
            }
        }
        rd::rd_kafka_group_list_destroy(groups);
    }
    Ok(found)
}

/// The partitions of an assignment: `ConsumerProtocolAssignment.json` of Kafka, any version; `None` where it is cut short.
fn partitions(mut bytes: &[u8]) -> Option<Vec<TopicPartition>> {
    fn take<'b>(bytes: &mut &'b [u8], count: usize) -> Option<&'b [u8]> {
        let (taken, rest) = bytes.split_at_checked(count)?;
        *bytes = rest;
        Some(taken)
    }
    fn number(bytes: &mut &[u8]) -> Option<i32> {
        take(bytes, 4).map(|taken| i32::from_be_bytes(taken.try_into().expect("four bytes")))
    }
    let mut found = Vec::new();
    take(&mut bytes, 2)?;
    for _ in 0..number(&mut bytes)? {
        let length = take(&mut bytes, 2)?;
        let length = u16::from_be_bytes([length[0], length[1]]);
        let topic: Arc<str> = Arc::from(std::str::from_utf8(take(&mut bytes, length.into())?).ok()?);
        for _ in 0..number(&mut bytes)? {
            found.push(TopicPartition::new(topic.clone(), number(&mut bytes)?));
        }
    }
    Some(found)
}

/// The broker makes the topic of positions, and so its coordinators, when somebody first asks: asked until then.
pub(super) fn describe(client: &Client, group: &str, timeout: Duration) -> Result<Group, Error> {
    again(timeout, |left| describe_once(client, group, left))
}

fn describe_once(client: &Client, group: &str, timeout: Duration) -> Result<Group, Error> {
    let operation = Operation::Admin("describing a group");
    let name = c_string(operation, group)?;
    let answer =
        request(client, operation, AdminOp::RD_KAFKA_ADMIN_OP_DESCRIBECONSUMERGROUPS, timeout, |options, queue| {
            let mut names = [name.as_ptr()];
            // SAFETY: client and name are alive, and the call copies the name.
            unsafe {
                rd::rd_kafka_DescribeConsumerGroups(client.ptr(), names.as_mut_ptr(), 1, options.as_ptr(), queue);
            }
        })?;
    // SAFETY: the event is alive and owns what it hands out, which is copied; a null result is not looked into.
    unsafe {
        let result = rd::rd_kafka_event_DescribeConsumerGroups_result(answer.as_ptr());
        let mut count = 0;
        if result.is_null() {
            return Ok(Group::default());
        }
        let groups = rd::rd_kafka_DescribeConsumerGroups_result_groups(result, &mut count);
        if count == 0 { Ok(Group::default()) } else { read(operation, *groups) }
    }
}

/// # Safety
/// `group` points to a live group description.
unsafe fn read(operation: Operation, group: *const rd::rd_kafka_ConsumerGroupDescription_t) -> Result<Group, Error> {
    // SAFETY: alive by the caller's word; it owns its members, which are copied.
    unsafe {
        let error = rd::rd_kafka_ConsumerGroupDescription_error(group);
        if !error.is_null() {
            // Its own text names the request and not always an error.
            let error = Error::of_code(operation, Error::borrowed(operation, error).code());
            // A group that never was has no members either.
            return if error.is_unknown_group() { Ok(Group::default()) } else { Err(error) };
        }
        let state = rd::rd_kafka_ConsumerGroupDescription_state(group);
        let members = (0..rd::rd_kafka_ConsumerGroupDescription_member_count(group)).map(|index| {
            let member = rd::rd_kafka_ConsumerGroupDescription_member(group, index);
            let assignment = rd::rd_kafka_MemberDescription_assignment(member);
            let partitions = if assignment.is_null() {
                Vec::new()
            } else {
                list::entries(rd::rd_kafka_MemberAssignment_partitions(assignment))
            };
            Member {
                id: text(rd::rd_kafka_MemberDescription_consumer_id(member)).unwrap_or_default(),
                client_id: text(rd::rd_kafka_MemberDescription_client_id(member)).unwrap_or_default(),
                host: text(rd::rd_kafka_MemberDescription_host(member)).unwrap_or_default(),
                partitions: partitions.into_iter().map(|entry| entry.partition).collect(),
            }
        });
        let stable = state == rd::rd_kafka_consumer_group_state_t::RD_KAFKA_CONSUMER_GROUP_STATE_STABLE;
        Ok(Group { stable, members: members.collect() })
    }
}

/// # Safety
/// `text` is null or NUL-terminated and alive.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: by the caller's word.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_assignment_names_its_partitions_and_one_that_is_cut_short_none() {
        let bytes = b"\0\x01\0\0\0\x02\0\x01a\0\0\0\x02\0\0\0\0\0\0\0\x07\0\x02bc\0\0\0\x01\0\0\0\x03\xff\xff\xff\xff";
        let expected = [("a", 0), ("a", 7), ("bc", 3)].map(|(topic, partition)| TopicPartition::new(topic, partition));
        assert_eq!(partitions(bytes), Some(expected.to_vec()));
        assert_eq!(partitions(&bytes[..bytes.len() - 5]), None);
        assert_eq!(partitions(b""), None);
    }
}
