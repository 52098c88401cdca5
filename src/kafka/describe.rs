//! What the broker says of topics and of itself.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;
use std::time::Duration;

use rdkafka::bindings as rd;
use rdkafka::types::{RDKafkaAdminOp as AdminOp, RDKafkaResourceType as ResourceType};
use uuid::Uuid;

use super::client::Client;
use super::code::Code;
use super::error::{Error, Operation};
use super::request::{c_string, question};
use crate::chunk::Target;

// As an integer: see `code.rs`.
unsafe extern "C" {
    fn rd_kafka_ConfigResource_error(resource: *const rd::rd_kafka_ConfigResource_t) -> c_int;
}

/// A topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicInfo {
    /// Changes when a topic is deleted and made anew under its name.
    pub id: Uuid,
    pub partitions: i32,
    /// Replicas of the first partition.
    pub replicas: i32,
    /// `min.insync.replicas`
    pub min_insync_replicas: i32,
    /// `max.message.bytes`
    pub max_message_bytes: usize,
    /// `cleanup.policy`: `delete`, `compact` or both, separated by a comma.
    pub cleanup_policy: String,
    /// `retention.ms`; below 0 is for ever.
    pub retention_ms: i64,
    /// `retention.bytes`; below 0 is no limit.
    pub retention_bytes: i64,
    /// `message.timestamp.before.max.ms` and `message.timestamp.after.max.ms`
    pub timestamp_before_max_ms: i64,
    pub timestamp_after_max_ms: i64,
}

impl TopicInfo {
    /// What a worker has to know to write to it.
    pub fn target(&self, name: impl Into<Arc<str>>) -> Target {
        Target {
            topic: name.into(),
            partitions: self.partitions,
            max_message_bytes: self.max_message_bytes,
            compacted: self.cleanup_policy.split(',').any(|policy| policy.trim() == "compact"),
            timestamp_before_max_ms: self.timestamp_before_max_ms,
            timestamp_after_max_ms: self.timestamp_after_max_ms,
        }
    }

    /// The setting by which the topic may lose records before they are read.
    pub fn loses_unread(&self) -> Option<String> {
        let TopicInfo { cleanup_policy, retention_ms, retention_bytes, .. } = self;
        if cleanup_policy.trim() != "delete" {
            Some(format!("cleanup.policy = {cleanup_policy}"))
        } else if *retention_ms >= 0 {
            Some(format!("retention.ms = {retention_ms}"))
        } else {
            (*retention_bytes >= 0).then(|| format!("retention.bytes = {retention_bytes}"))
        }
    }

    fn new(shape: Shape, config: &BTreeMap<String, String>) -> TopicInfo {
        fn number<T: std::str::FromStr>(config: &BTreeMap<String, String>, name: &str, missing: T) -> T {
            config.get(name).and_then(|value| value.parse().ok()).unwrap_or(missing)
        }
        TopicInfo {
            id: shape.id,
            partitions: shape.partitions,
            replicas: shape.replicas,
            min_insync_replicas: number(config, "min.insync.replicas", 1),
            max_message_bytes: number(config, "max.message.bytes", 1_048_588),
            cleanup_policy: config.get("cleanup.policy").cloned().unwrap_or_else(|| "delete".into()),
            retention_ms: number(config, "retention.ms", -1),
            retention_bytes: number(config, "retention.bytes", -1),
            // Brokers before 3.6 know neither.
            timestamp_before_max_ms: number(config, "message.timestamp.before.max.ms", i64::MAX),
            timestamp_after_max_ms: number(config, "message.timestamp.after.max.ms", i64::MAX),
        }
    }
}

/// What metadata says of a topic.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub id: Uuid,
    pub partitions: i32,
    replicas: i32,
}

/// Topics by name; one that does not exist is `None`.
pub(super) fn topics(
    client: &Client,
    names: &[&str],
    timeout: Duration,
) -> Result<BTreeMap<String, Option<TopicInfo>>, Error> {
    let shapes = shapes(client, names, None, timeout)?;
    let existing: Vec<&str> = shapes.iter().filter(|(_, s)| s.is_some()).map(|(name, _)| name.as_str()).collect();
    let configs = configs(client, ResourceType::RD_KAFKA_RESOURCE_TOPIC, &existing, timeout)?;
    let none = BTreeMap::new();
    let describe = |(name, shape): (String, Option<Shape>)| {
        let info = shape.map(|shape| TopicInfo::new(shape, configs.get(&name).unwrap_or(&none)));
        (name, info)
    };
    Ok(shapes.into_iter().map(describe).collect())
}

/// As `topics`, without settings; as one broker sees them, or any.
pub(super) fn shapes(
    client: &Client,
    names: &[&str],
    broker: Option<i32>,
    timeout: Duration,
) -> Result<BTreeMap<String, Option<Shape>>, Error> {
    let operation = Operation::Admin("describing topics");
    let unique: BTreeSet<&str> = names.iter().copied().collect();
    if unique.is_empty() {
        return Ok(BTreeMap::new());
    }
    let owned = unique.iter().map(|name| c_string(operation, name)).collect::<Result<Vec<_>, _>>()?;
    let mut pointers: Vec<*const c_char> = owned.iter().map(|name| name.as_ptr()).collect();
    let answer = question(client, operation, AdminOp::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS, timeout, |options, queue| {
        if let Some(id) = broker {
            options.broker(id);
        }
        // SAFETY: names and client are alive; the calls copy them, and what is made here is freed here.
        unsafe {
            let topics = rd::rd_kafka_TopicCollection_of_topic_names(pointers.as_mut_ptr(), pointers.len());
            rd::rd_kafka_DescribeTopics(client.ptr(), topics, options.as_ptr(), queue);
            rd::rd_kafka_TopicCollection_destroy(topics);
        }
    })?;
    let mut shapes: BTreeMap<String, Option<Shape>> = unique.iter().map(|name| (name.to_string(), None)).collect();
    // SAFETY: the event is alive and owns what it hands out; a null result is not looked into.
    unsafe {
        let result = rd::rd_kafka_event_DescribeTopics_result(answer.as_ptr());
        let mut count = 0;
        if result.is_null() {
            return Ok(shapes);
        }
        let descriptions = rd::rd_kafka_DescribeTopics_result_topics(result, &mut count);
        for index in 0..count {
            let (name, shape) = read_shape(operation, *descriptions.add(index))?;
            shapes.insert(name, shape);
        }
    }
    Ok(shapes)
}

/// # Safety
/// `description` points to a live topic description.
unsafe fn read_shape(
    operation: Operation,
    description: *const rd::rd_kafka_TopicDescription_t,
) -> Result<(String, Option<Shape>), Error> {
    // SAFETY: alive by the caller's word; it owns name, error, id and partitions, which are copied.
    unsafe {
        let name = CStr::from_ptr(rd::rd_kafka_TopicDescription_name(description)).to_string_lossy().into_owned();
        let error = rd::rd_kafka_TopicDescription_error(description);
        if !error.is_null() {
            let error = Error::borrowed(operation, error);
            return match error.code() {
                Code::NONE => Ok((name, None)),
                Code::UNKNOWN_TOPIC | Code::LOCAL_UNKNOWN_TOPIC => Ok((name, None)),
                _ => Err(error.at(name, None)),
            };
        }
        let id = rd::rd_kafka_TopicDescription_topic_id(description);
        let id = Uuid::from_u64_pair(
            rd::rd_kafka_Uuid_most_significant_bits(id) as u64,
            rd::rd_kafka_Uuid_least_significant_bits(id) as u64,
        );
        let (mut partitions, mut replicas) = (0, 0);
        let infos = rd::rd_kafka_TopicDescription_partitions(description, &mut partitions);
        if partitions > 0 {
            rd::rd_kafka_TopicPartitionInfo_replicas(*infos, &mut replicas);
        }
        Ok((name, Some(Shape { id, partitions: partitions as i32, replicas: replicas as i32 })))
    }
}

/// Settings of topics or brokers, by name.
pub(super) fn configs(
    client: &Client,
    kind: ResourceType,
    names: &[&str],
    timeout: Duration,
) -> Result<BTreeMap<String, BTreeMap<String, String>>, Error> {
    let operation = Operation::Admin("reading settings");
    let mut all = BTreeMap::new();
    if names.is_empty() {
        return Ok(all);
    }
    let owned = names.iter().map(|name| c_string(operation, name)).collect::<Result<Vec<_>, _>>()?;
    let answer = question(client, operation, AdminOp::RD_KAFKA_ADMIN_OP_DESCRIBECONFIGS, timeout, |options, queue| {
        // SAFETY: names and client are alive; the calls copy them, and what is made here is freed here.
        unsafe {
            let mut resources: Vec<_> =
                owned.iter().map(|name| rd::rd_kafka_ConfigResource_new(kind, name.as_ptr())).collect();
            let count = resources.len();
            rd::rd_kafka_DescribeConfigs(client.ptr(), resources.as_mut_ptr(), count, options.as_ptr(), queue);
            rd::rd_kafka_ConfigResource_destroy_array(resources.as_mut_ptr(), count);
        }
    })?;
    // SAFETY: the event is alive and owns what it hands out, which is copied; a null result is not looked into.
    unsafe {
        let result = rd::rd_kafka_event_DescribeConfigs_result(answer.as_ptr());
        let mut count = 0;
        if result.is_null() {
            return Ok(all);
        }
        let resources = rd::rd_kafka_DescribeConfigs_result_resources(result, &mut count);
        for index in 0..count {
            let resource = *resources.add(index);
            let name = CStr::from_ptr(rd::rd_kafka_ConfigResource_name(resource)).to_string_lossy().into_owned();
            let code = Code(rd_kafka_ConfigResource_error(resource));
            if code.is_error() {
                return Err(Error::of_code(operation, code).at(name, None));
            }
            all.insert(name, read_entries(resource));
        }
    }
    Ok(all)
}

/// # Safety
/// `resource` points to a live resource.
unsafe fn read_entries(resource: *const rd::rd_kafka_ConfigResource_t) -> BTreeMap<String, String> {
    let mut count = 0;
    let mut settings = BTreeMap::new();
    // SAFETY: alive by the caller's word; it owns the entries, which are copied. A value may be null (passwords).
    unsafe {
        let entries = rd::rd_kafka_ConfigResource_configs(resource, &mut count);
        for index in 0..count {
            let entry = *entries.add(index);
            let value = rd::rd_kafka_ConfigEntry_value(entry);
            if !value.is_null() {
                let name = CStr::from_ptr(rd::rd_kafka_ConfigEntry_name(entry)).to_string_lossy().into_owned();
                settings.insert(name, CStr::from_ptr(value).to_string_lossy().into_owned());
            }
        }
    }
    settings
}
