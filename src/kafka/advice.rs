//! The cure that goes with an error, in the user's words: the right to grant, the setting to change.

use super::code::Code;
use super::error::{Error, Operation};

/// The cure, for errors that have one.
pub(super) fn of(error: &Error) -> Option<&'static str> {
    use Operation::*;
    Some(match (error.code(), error.operation()) {
        (Code::TOPIC_AUTHORIZATION, _) => {
            "the user needs READ on source topics, WRITE on output topics and DESCRIBE_CONFIGS on both"
        }
        (Code::GROUP_AUTHORIZATION, _) => "the user needs READ on the consumer group",
        (Code::CLUSTER_AUTHORIZATION, Admin(_)) => "the user lacks the right on the cluster that this asks for",
        (Code::CLUSTER_AUTHORIZATION, _) => "the user needs IDEMPOTENT_WRITE on the cluster",
        (Code::TRANSACTIONAL_ID_AUTHORIZATION, _) => "the user needs WRITE and DESCRIBE on the transactional id",
        (Code::INVALID_TRANSACTION_TIMEOUT, _) => {
            "lower the transaction timeout, or raise the broker's transaction.max.timeout.ms"
        }
        (Code::INVALID_SESSION_TIMEOUT, _) => {
            "choose a session timeout that the broker's group.min. and group.max.session.timeout.ms allow"
        }
        (Code::INCONSISTENT_GROUP_PROTOCOL, _) => {
            "other members of the group use another partition.assignment.strategy or protocol: stop them all first"
        }
        (Code::UNSUPPORTED_VERSION | Code::UNSUPPORTED_FEATURE, _) => {
            "the broker is too old: Kafka 2.5 or newer is needed"
        }
        (Code::FENCED_INSTANCE | Code::UNRELEASED_INSTANCE, _) => "another process runs with this group.instance.id",
        (Code::FENCED | Code::PRODUCER_FENCED | Code::INVALID_PRODUCER_EPOCH, _) => {
            "another process uses this transactional id, or the transaction was open longer than its timeout"
        }
        (code, Init) if code.is_transient() => {
            "does the cluster have as many brokers as transaction.state.log.replication.factor \
             and transaction.state.log.min.isr ask for?"
        }
        (Code::AUTO_OFFSET_RESET | Code::OFFSET_OUT_OF_RANGE, Consume) => {
            "records were deleted before they were read, or the topic was made anew: see `semel reset`"
        }
        (Code::LOG_TRUNCATION, Consume) => "the log was cut back below the position after an unclean leader election",
        (Code::BAD_MESSAGE, Consume) => "the log is damaged there",
        (Code::UNKNOWN_TOPIC | Code::LOCAL_UNKNOWN_TOPIC, _) => "create the topic first",
        (Code::LOCAL_UNKNOWN_PARTITION, Produce) => "the topic has fewer partitions than at start",
        (Code::MESSAGE_TOO_LARGE | Code::BATCH_TOO_LARGE, _) => "raise the topic's max.message.bytes",
        (Code::INVALID_REPLICATION_FACTOR, _) => "the cluster has fewer brokers than replicas were asked for",
        (Code::AUTHENTICATION | Code::SASL_AUTHENTICATION, _) => {
            "check security.protocol and the sasl.* properties under [kafka]"
        }
        (Code::TRANSPORT, Connect) if error.text().contains("SSL") => {
            "check security.protocol and the ssl.* properties under [kafka]"
        }
        (Code::SSL, _) => "check security.protocol and the ssl.* properties under [kafka]",
        (Code::TRANSPORT | Code::RESOLVE | Code::ALL_BROKERS_DOWN | Code::TIMED_OUT, Connect) => {
            "is the broker up, and is `brokers` under [kafka] its address?"
        }
        _ => return None,
    })
}
