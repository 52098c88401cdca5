//! Rights that a user lacks, on a broker that asks for them, and transactions that a broker cannot hold (case 38): one
//! message that names the cure.

use std::ffi::CString;

use rdkafka::ClientConfig;
use rdkafka::bindings as rd;
use rdkafka::bindings::rd_kafka_AclOperation_t::{self as Right, *};
use rdkafka::bindings::rd_kafka_AclPermissionType_t::*;
use rdkafka::bindings::rd_kafka_ResourcePatternType_t::RD_KAFKA_RESOURCE_PATTERN_PREFIXED;
use rdkafka::bindings::rd_kafka_ResourceType_t::{self as Resource, *};
use rdkafka::consumer::{BaseConsumer, Consumer};
use semel::cluster::Server;

use super::harness::{Job, Record};
use super::kill::kafka_stage;
use super::refusals::run_within;
use crate::support;

/// Where nothing is said of a resource everything is allowed. Alone, the broker cannot hold transactions.
const BROKER: [(&str, &str); 3] = [
    ("authorizer.class.name", "org.apache.kafka.metadata.authorizer.StandardAuthorizer"),
    ("allow.everyone.if.no.acl.found", "true"),
    ("transaction.state.log.replication.factor", "3"),
];

/// Denies a right on everything of this kind whose name begins so; the other rights stay.
fn deny(brokers: &str, resource: Resource, name: &str, right: Right) {
    let client: BaseConsumer = ClientConfig::new().set("bootstrap.servers", brokers).create().unwrap();
    let client = client.client().native_ptr();
    let [name, anybody, anywhere] = [name, "User:*", "*"].map(|text| CString::new(text).unwrap());
    let permissions =
        [(RD_KAFKA_ACL_OPERATION_ALL, RD_KAFKA_ACL_PERMISSION_TYPE_ALLOW), (right, RD_KAFKA_ACL_PERMISSION_TYPE_DENY)];
    // SAFETY: every pointer that is passed on was made here or outlives the calls; what is made is freed at the end.
    unsafe {
        let mut rules = permissions.map(|(right, permission)| {
            let rule = rd::rd_kafka_AclBinding_new(
                resource,
                name.as_ptr(),
                RD_KAFKA_RESOURCE_PATTERN_PREFIXED,
                anybody.as_ptr(),
                anywhere.as_ptr(),
                right,
                permission,
                std::ptr::null_mut(),
                0,
            );
            assert!(!rule.is_null());
            rule
        });
        let queue = rd::rd_kafka_queue_new(client);
        rd::rd_kafka_CreateAcls(client, rules.as_mut_ptr(), rules.len(), std::ptr::null(), queue);
        let event = rd::rd_kafka_queue_poll(queue, 20_000);
        let result = rd::rd_kafka_event_CreateAcls_result(event);
        assert!(!result.is_null(), "no answer");
        let mut count = 0;
        let each = rd::rd_kafka_CreateAcls_result_acls(result, &raw mut count);
        assert_eq!(count, rules.len());
        for i in 0..count {
            assert!(rd::rd_kafka_acl_result_error(*each.add(i)).is_null(), "the broker refuses a rule");
        }
        rd::rd_kafka_event_destroy(event);
        rd::rd_kafka_queue_destroy(queue);
        for rule in rules {
            rd::rd_kafka_AclBinding_destroy(rule);
        }
    }
}

#[test]
fn rights_that_are_missing_and_transactions_that_cannot_start_are_named_within_30_seconds() {
    if !support::online("rights that are missing") {
        return;
    }
    let cluster = support::private_server(Server::Kafka, &BROKER);
    let exactly = kafka_stage().to_owned();
    let at_least = exactly.replace("[kafka]\n", "guarantee = \"at-least-once\"\n[kafka]\n");
    let causes = [
        (
            Some((RD_KAFKA_RESOURCE_TRANSACTIONAL_ID, "", RD_KAFKA_ACL_OPERATION_ALL)),
            &exactly,
            2,
            "WRITE and DESCRIBE on the transactional id",
        ),
        (Some((RD_KAFKA_RESOURCE_GROUP, "", RD_KAFKA_ACL_OPERATION_READ)), &at_least, 2, "READ on the consumer group"),
        (Some((RD_KAFKA_RESOURCE_TOPIC, ".in", RD_KAFKA_ACL_OPERATION_READ)), &at_least, 2, "READ on source topics"),
        (Some((RD_KAFKA_RESOURCE_TOPIC, ".out", RD_KAFKA_ACL_OPERATION_WRITE)), &at_least, 2, "WRITE on output topics"),
        (None, &exactly, 3, "transaction.state.log.replication.factor"),
    ];
    std::thread::scope(|scope| {
        for (denied, text, status, cure) in causes {
            let cluster = &cluster;
            scope.spawn(move || {
                let job = Job::new(cluster, "rights", 1);
                let value = br#"{"event_id":"e-1","order_id":"o-1","status":"paid","qty":1,"price":2,"version":1}"#;
                job.produce("in", [Record { value: Some(value), ..Record::default() }]);
                if let Some((resource, suffix, right)) = denied {
                    deny(&job.brokers, resource, &format!("{}{suffix}", job.name), right);
                }
                let (code, message) = run_within(30, &job, text, &[]);
                assert_eq!(code, Some(status), "{cure}: {message}");
                assert!(message.contains(cure), "{cure}: {message}");
            });
        }
    });
}
