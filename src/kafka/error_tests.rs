use super::Operation::*;
use super::*;

#[derive(Clone, Copy)]
enum Flag {
    No,
    Retriable,
    Abortable,
    Fatal,
}

fn error(operation: Operation, code: Code, flag: Flag) -> Error {
    Error {
        retriable: matches!(flag, Flag::Retriable),
        abortable: matches!(flag, Flag::Abortable),
        fatal: matches!(flag, Flag::Fatal),
        ..Error::of_code(operation, code)
    }
}

const ABORT: Disposition = Disposition::AbortTxn { rejoin: false };
const REJOIN: Disposition = Disposition::AbortTxn { rejoin: true };
const REFUSED: Disposition = Disposition::Fatal(Exit::Refused);
const STOPPED: Disposition = Disposition::Fatal(Exit::Stopped);
const TOO_LARGE: Disposition = Disposition::Reject { reason: "too-large" };

#[test]
fn every_class_of_error_has_its_answer() {
    use Disposition::{Fenced, Rebuild, Retry};
    use Flag::*;
    let unknown = Code(120);
    let table = [
        // Flags first: that is librdkafka's contract.
        (Init, Code::TIMED_OUT, Retriable, Retry),
        (Commit, Code::TIMED_OUT, Retriable, Retry),
        (Abort, Code::TIMED_OUT, Retriable, Retry),
        (Begin, Code::CONFLICT, Retriable, Retry),
        (SendOffsets, Code::COORDINATOR_NOT_AVAILABLE, Abortable, ABORT),
        (Commit, Code::INCONSISTENT, Abortable, ABORT),
        (Commit, unknown, Abortable, ABORT),
        (Commit, Code::INVALID_TXN_STATE, Fatal, Rebuild),
        (Init, unknown, Fatal, Rebuild),
        // None of the three flags counts as fatal.
        (Begin, Code::STATE, No, Rebuild),
        (Commit, unknown, No, Rebuild),
        // The group moved on.
        (SendOffsets, Code::ILLEGAL_GENERATION, Abortable, REJOIN),
        (SendOffsets, Code::UNKNOWN_MEMBER, Abortable, REJOIN),
        (SendOffsets, Code::STALE_MEMBER_EPOCH, Abortable, REJOIN),
        (CommitPositions, Code::ILLEGAL_GENERATION, No, REJOIN),
        (CommitPositions, Code::UNKNOWN_MEMBER, No, REJOIN),
        (CommitPositions, Code::REBALANCE_IN_PROGRESS, No, Retry),
        (CommitPositions, Code::TIMED_OUT, No, Retry),
        // Who we were before we joined anew; a twin is told to the member.
        (SendOffsets, Code::FENCED_INSTANCE, Abortable, REJOIN),
        (CommitPositions, Code::FENCED_INSTANCE, No, REJOIN),
        // Somebody else.
        (Consume, Code::FENCED_INSTANCE, Fatal, Disposition::Rebuild),
        (Consume, Code::UNRELEASED_INSTANCE, Fatal, Rebuild),
        (Commit, Code::FENCED, Fatal, Fenced),
        (Init, Code::PRODUCER_FENCED, Fatal, Fenced),
        (Produce, Code::INVALID_PRODUCER_EPOCH, No, Fenced),
        // An abortable error of that name: the abort says what is true.
        (SendOffsets, Code::FENCED, Abortable, ABORT),
        // What neither a retry nor a rebuild mends.
        (Init, Code::TRANSACTIONAL_ID_AUTHORIZATION, Fatal, REFUSED),
        (Init, Code::INVALID_TRANSACTION_TIMEOUT, Fatal, REFUSED),
        (Init, Code::UNSUPPORTED_VERSION, Fatal, REFUSED),
        (SendOffsets, Code::GROUP_AUTHORIZATION, Abortable, REFUSED),
        (Commit, Code::TOPIC_AUTHORIZATION, Abortable, REFUSED),
        (Consume, Code::TOPIC_AUTHORIZATION, No, REFUSED),
        (Consume, Code::INCONSISTENT_GROUP_PROTOCOL, No, REFUSED),
        (Admin("x"), Code::INVALID_CONFIG, No, REFUSED),
        // A record.
        (Produce, Code::MESSAGE_TOO_LARGE, No, TOO_LARGE),
        (Commit, Code::MESSAGE_TOO_LARGE, Abortable, TOO_LARGE),
        (SendOffsets, Code::BATCH_TOO_LARGE, Abortable, TOO_LARGE),
        (Commit, Code::INVALID_TIMESTAMP, Abortable, Disposition::Reject { reason: "timestamp" }),
        (Commit, Code::INVALID_RECORD, Abortable, Disposition::Reject { reason: "broker" }),
        // Producing.
        (Produce, Code::QUEUE_FULL, No, Retry),
        (Produce, Code::STATE, No, ABORT),
        (Produce, Code::LOCAL_UNKNOWN_PARTITION, No, ABORT),
        (Produce, Code::FATAL, No, Rebuild),
        (Flush, Code::TIMED_OUT, No, Retry),
        // Reading.
        (Consume, Code::AUTO_OFFSET_RESET, No, STOPPED),
        (Consume, Code::LOG_TRUNCATION, No, STOPPED),
        (Consume, Code::BAD_MESSAGE, No, STOPPED),
        (Consume, Code::UNKNOWN_TOPIC, No, Retry),
        (Consume, Code::MAX_POLL_EXCEEDED, No, Retry),
        (Seek, Code::STATE, No, Retry),
        (Seek, Code::TIMED_OUT, No, Retry),
        (Positions, Code::UNSTABLE_OFFSET, No, Retry),
        (Positions, Code::NOT_COORDINATOR, No, Retry),
        (Admin("x"), Code::TIMED_OUT, No, Retry),
        (Admin("x"), Code::DESTROY_BROKER, No, Retry),
    ];
    for (operation, code, flag, expected) in table {
        let error = error(operation, code, flag);
        assert_eq!(error.disposition(), expected, "{error:?}");
    }
}

#[test]
fn a_message_names_the_place_and_the_cure() {
    let delivery = Error::of_code(Produce, Code::TOPIC_AUTHORIZATION).at("orders", Some(3));
    let refused = error(Commit, Code::INCONSISTENT, Flag::Abortable).caused_by(delivery);
    assert!(refused.is_abortable());
    assert_eq!(
        refused.to_string(),
        "committing the transaction (orders-3): Broker: Topic authorization failed; \
         the user needs READ on source topics, WRITE on output topics and DESCRIBE_CONFIGS on both"
    );
    let plain = Error::new(Admin("creating a topic"), Code::INVALID_CONFIG, "Invalid value soon.").at("t", None);
    assert_eq!(plain.to_string(), "creating a topic (t): Invalid value soon");
}

#[test]
fn a_code_that_no_one_knows_has_a_name_too() {
    assert_eq!(format!("{:?}", Code(12345)), "ERR_12345? (12345)");
    assert!(!Code(12345).is_transient());
}
