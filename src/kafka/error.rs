//! What went wrong at Kafka, and what it asks of the worker. Client codes become dispositions here and nowhere else.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::sync::Arc;

use rdkafka::bindings as rd;

use super::code::Code;
use crate::error::{Disposition, Exit};

// As an integer: see `code.rs`.
unsafe extern "C" {
    fn rd_kafka_error_code(error: *const rd::rd_kafka_error_t) -> c_int;
}

/// What was being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Creating a client or reaching the cluster.
    Connect,
    /// `init_transactions`
    Init,
    Begin,
    Produce,
    Flush,
    SendOffsets,
    Commit,
    Abort,
    Subscribe,
    Assign,
    Consume,
    Seek,
    /// Reading a group's positions.
    Positions,
    /// Committing positions outside a transaction.
    CommitPositions,
    /// Administration: what exactly, as a user would say it.
    Admin(&'static str),
}

impl Operation {
    /// A call on a transactional producer, for which librdkafka's rule holds: no flag set means fatal.
    fn is_transactional(self) -> bool {
        use Operation::*;
        matches!(self, Init | Begin | SendOffsets | Commit | Abort)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Connect => "connecting to Kafka",
            Operation::Init => "initialising transactions",
            Operation::Begin => "beginning a transaction",
            Operation::Produce => "producing",
            Operation::Flush => "flushing",
            Operation::SendOffsets => "adding positions to the transaction",
            Operation::Commit => "committing the transaction",
            Operation::Abort => "aborting the transaction",
            Operation::Subscribe => "subscribing",
            Operation::Assign => "changing the assignment",
            Operation::Consume => "reading",
            Operation::Seek => "seeking",
            Operation::Positions => "reading the group's positions",
            Operation::CommitPositions => "committing positions",
            Operation::Admin(what) => what,
        })
    }
}

/// An error of the client or the broker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.message())]
pub struct Error {
    operation: Operation,
    code: Code,
    text: String,
    topic: Option<Arc<str>>,
    partition: Option<i32>,
    fatal: bool,
    retriable: bool,
    abortable: bool,
}

impl Error {
    pub(super) fn new(operation: Operation, code: Code, text: impl Into<String>) -> Error {
        Error {
            operation,
            code,
            text: text.into(),
            topic: None,
            partition: None,
            fatal: false,
            retriable: false,
            abortable: false,
        }
    }

    /// An error of which only the code is known.
    pub(super) fn of_code(operation: Operation, code: Code) -> Error {
        Error::new(operation, code, code.text())
    }

    pub(super) fn at(mut self, topic: impl Into<Arc<str>>, partition: Option<i32>) -> Error {
        self.topic = Some(topic.into());
        self.partition = partition;
        self
    }

    pub(super) fn with_fatal(mut self, fatal: bool) -> Error {
        self.fatal = fatal;
        self
    }

    /// The same to do, for this reason.
    pub(super) fn caused_by(self, cause: Error) -> Error {
        Error { code: cause.code, text: cause.text, topic: cause.topic, partition: cause.partition, ..self }
    }

    pub(super) fn with_text(mut self, text: impl Into<String>) -> Error {
        self.text = text.into();
        self
    }

    /// Takes over what a call answered: null is success.
    ///
    /// # Safety
    /// `error` is null or an error object that nobody else frees.
    pub(super) unsafe fn check(operation: Operation, error: *mut rd::rd_kafka_error_t) -> Result<(), Error> {
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: ours by the caller's word and alive until the destroy below; the string is copied.
        unsafe {
            let mut converted = Error::borrowed(operation, error);
            converted.fatal = rd::rd_kafka_error_is_fatal(error) != 0;
            converted.retriable = rd::rd_kafka_error_is_retriable(error) != 0;
            converted.abortable = rd::rd_kafka_error_txn_requires_abort(error) != 0;
            rd::rd_kafka_error_destroy(error);
            Err(converted)
        }
    }

    /// Reads an error object that something else owns.
    ///
    /// # Safety
    /// `error` points to a live error object.
    pub(super) unsafe fn borrowed(operation: Operation, error: *const rd::rd_kafka_error_t) -> Error {
        // SAFETY: alive by the caller's word; the string is NUL-terminated and copied.
        unsafe {
            let text = CStr::from_ptr(rd::rd_kafka_error_string(error)).to_string_lossy().into_owned();
            Error::new(operation, Code(rd_kafka_error_code(error)), text)
        }
    }

    pub fn operation(&self) -> Operation {
        self.operation
    }

    pub fn code(&self) -> Code {
        self.code
    }

    /// What the client or the broker said, without our advice.
    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn topic(&self) -> Option<&str> {
        self.topic.as_deref()
    }

    pub fn partition(&self) -> Option<i32> {
        self.partition
    }

    /// The client is dead: only a new one helps.
    pub fn is_fatal(&self) -> bool {
        self.fatal
    }

    /// The call may be made again as it was.
    pub fn is_retriable(&self) -> bool {
        self.retriable || (!self.fatal && !self.abortable && self.code.is_transient())
    }

    /// The transaction has to be aborted.
    pub fn is_abortable(&self) -> bool {
        self.abortable
    }

    /// The producer's queue has no room: wait a millisecond and produce again.
    pub fn is_queue_full(&self) -> bool {
        self.code == Code::QUEUE_FULL
    }

    /// Time ran out and nothing is known: the outcome of a commit is open.
    pub fn is_timeout(&self) -> bool {
        matches!(self.code, Code::TIMED_OUT | Code::REQUEST_TIMED_OUT | Code::MESSAGE_TIMED_OUT)
    }

    /// A seek met a partition whose fetcher has not started yet, right after an assignment: poll and seek again.
    pub fn is_not_started(&self) -> bool {
        matches!(self.code, Code::STATE | Code::PREVIOUS_IN_PROGRESS)
    }

    /// Under `group.protocol=consumer`, another member still holds our `group.instance.id`: rebuild the consumer and
    /// try again for one session before believing in a twin.
    pub fn is_unreleased_instance(&self) -> bool {
        self.code == Code::UNRELEASED_INSTANCE
    }

    /// Another member has our `group.instance.id`: a twin, or a join of our own whose answer was lost, after which
    /// librdkafka does not know the late answer to an older request for one.
    pub fn is_fenced_instance(&self) -> bool {
        self.code == Code::FENCED_INSTANCE && self.fatal
    }

    /// The position is outside the topic's log.
    pub fn is_out_of_range(&self) -> bool {
        matches!(self.code, Code::AUTO_OFFSET_RESET | Code::OFFSET_OUT_OF_RANGE | Code::NO_OFFSET)
    }

    /// The broker that was asked does not know the topic or partition, or not yet.
    pub fn is_unknown_topic(&self) -> bool {
        let local = [Code::LOCAL_UNKNOWN_TOPIC, Code::LOCAL_UNKNOWN_PARTITION];
        self.code == Code::UNKNOWN_TOPIC || local.contains(&self.code)
    }

    /// There is no group of that name.
    pub fn is_unknown_group(&self) -> bool {
        self.code == Code::GROUP_ID_NOT_FOUND
    }

    /// What this asks of the worker.
    pub fn disposition(&self) -> Disposition {
        use Operation::*;
        match self.code {
            // A rebuild of the consumer answers it; who counts the tries decides when it is a twin.
            Code::UNRELEASED_INSTANCE => return Disposition::Rebuild,
            Code::FENCED | Code::PRODUCER_FENCED | Code::INVALID_PRODUCER_EPOCH if !self.abortable => {
                return Disposition::Fenced;
            }
            code if is_refusal(code) => return Disposition::Fatal(Exit::Refused),
            _ => {}
        }
        if let Some(reason) = self.reject_reason() {
            return Disposition::Reject { reason };
        }
        if self.fatal {
            return Disposition::Rebuild;
        }
        if is_group_caused(self.code) {
            return Disposition::AbortTxn { rejoin: true };
        }
        if self.abortable {
            return Disposition::AbortTxn { rejoin: false };
        }
        if self.is_retriable() || self.is_queue_full() {
            return Disposition::Retry;
        }
        match self.operation {
            // The transaction failed behind our back (`_STATE`): the abort says why.
            Produce if self.code == Code::FATAL => Disposition::Rebuild,
            Produce => Disposition::AbortTxn { rejoin: false },
            Seek | Assign if self.is_not_started() => Disposition::Retry,
            Consume if self.is_out_of_range() || self.code == Code::LOG_TRUNCATION => Disposition::Fatal(Exit::Stopped),
            Consume if matches!(self.code, Code::BAD_MESSAGE) => Disposition::Fatal(Exit::Stopped),
            // The client goes on by itself: topics come back after a restart of the broker, a rebalance follows.
            Consume => Disposition::Retry,
            CommitPositions if self.code == Code::REBALANCE_IN_PROGRESS => Disposition::Retry,
            Connect if self.code == Code::AUTHENTICATION || self.code == Code::SSL => {
                Disposition::Fatal(Exit::Unreachable)
            }
            Connect | Admin(_) | Subscribe => Disposition::Fatal(Exit::Refused),
            Init | Begin | SendOffsets | Commit | Abort | Flush | Seek | Assign | Positions | CommitPositions => {
                Disposition::Rebuild
            }
        }
    }

    /// Codes that speak of a record rather than of the transaction.
    fn reject_reason(&self) -> Option<&'static str> {
        let speaks_of_records = self.operation == Operation::Produce
            || self.operation == Operation::Flush
            || (self.operation.is_transactional() && self.abortable);
        if !speaks_of_records {
            return None;
        }
        match self.code {
            Code::MESSAGE_TOO_LARGE | Code::BATCH_TOO_LARGE => Some("too-large"),
            Code::INVALID_TIMESTAMP => Some("timestamp"),
            Code::INVALID_RECORD => Some("broker"),
            _ => None,
        }
    }

    fn message(&self) -> String {
        let mut message = self.operation.to_string();
        match (&self.topic, self.partition) {
            (Some(topic), Some(partition)) => message += &format!(" ({topic}-{partition})"),
            (Some(topic), None) => message += &format!(" ({topic})"),
            (None, _) => {}
        }
        message += ": ";
        message += self.text.trim().trim_end_matches('.');
        if let Some(advice) = super::advice::of(self) {
            message += "; ";
            message += advice;
        }
        message
    }
}

/// What no retry and no rebuild mends: rights, limits and versions.
fn is_refusal(code: Code) -> bool {
    matches!(
        code,
        Code::TOPIC_AUTHORIZATION
            | Code::GROUP_AUTHORIZATION
            | Code::CLUSTER_AUTHORIZATION
            | Code::TRANSACTIONAL_ID_AUTHORIZATION
            | Code::INVALID_TRANSACTION_TIMEOUT
            | Code::INVALID_SESSION_TIMEOUT
            | Code::INVALID_GROUP_ID
            | Code::INCONSISTENT_GROUP_PROTOCOL
            | Code::UNSUPPORTED_ASSIGNOR
            | Code::UNSUPPORTED_VERSION
            | Code::UNSUPPORTED_FEATURE
    )
}

/// The group has moved on: wait for the rebalance before going on.
fn is_group_caused(code: Code) -> bool {
    matches!(
        code,
        Code::ILLEGAL_GENERATION
            | Code::UNKNOWN_MEMBER
            | Code::STALE_MEMBER_EPOCH
            | Code::FENCED_MEMBER_EPOCH
            | Code::FENCED_INSTANCE
    )
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
