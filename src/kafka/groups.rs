//! Consumer groups as the broker sees them.

use std::ffi::{CStr, c_char};
use std::time::Duration;

use rdkafka::bindings as rd;
use rdkafka::types::RDKafkaAdminOp as AdminOp;

use super::client::Client;
use super::error::{Error, Operation};
use super::list;
use super::request::{again, c_string, request};
use crate::record::TopicPartition;

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
    /// `group.instance.id`, of a static member.
    pub instance: Option<String>,
    pub client_id: String,
    pub host: String,
    pub partitions: Vec<TopicPartition>,
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
                instance: text(rd::rd_kafka_MemberDescription_group_instance_id(member)),
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
