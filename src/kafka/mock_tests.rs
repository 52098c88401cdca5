//! Error classes against librdkafka's mock cluster, which answers any request with any error. It writes no transaction
//! markers, so what readers see is for the tests on a real broker.

use std::time::{Duration, Instant};

use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::RDKafkaApiKey as Api;
use rdkafka::types::RDKafkaRespErr as Resp;

use super::options::LINGER;
use super::*;
use crate::chunk::{Chunk, Target, TargetId};
use crate::commit::metadata::TopicIds;
use crate::error::{Disposition, Exit};
use crate::record::{Position, TopicPartition};

const SECONDS: Duration = Duration::from_secs(10);

struct Mock {
    cluster: MockCluster<'static, DefaultProducerContext>,
}

impl Mock {
    fn new() -> Mock {
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic("in", 1, 1).unwrap();
        cluster.create_topic("out", 1, 1).unwrap();
        Mock { cluster }
    }

    fn producer(&self) -> Producer {
        let connection = Connection::new(self.cluster.bootstrap_servers(), "mock");
        let options = ProducerOptions {
            transactional_id: Some("id".into()),
            transaction_timeout: SECONDS,
            linger: LINGER,
            queue_bytes: 1 << 20,
        };
        let target = Target {
            topic: "out".into(),
            partitions: 1,
            max_message_bytes: 1 << 20,
            compacted: false,
            timestamp_before_max_ms: i64::MAX,
            timestamp_after_max_ms: i64::MAX,
        };
        Producer::new(&connection, &options, &[target]).unwrap()
    }
}

fn send(producer: &Producer) -> Result<(), Error> {
    let mut chunk = Chunk::default();
    let mut output = chunk.push(TargetId(0));
    output.value(Some(b"x"));
    output.finish();
    producer.produce(&chunk.iter().next().unwrap())
}

/// One whole transaction; what it met first.
fn transact(producer: &Producer) -> Result<(), Error> {
    producer.begin()?;
    send(producer)?;
    producer.flush(SECONDS)?;
    let group = GroupMetadata::invented("group", 1, "member");
    producer.send_offsets(&[(TopicPartition::new("in", 0), Position(1))], &TopicIds::default(), &group, SECONDS)?;
    producer.commit(SECONDS)
}

/// What a transaction answers when the broker answers the first requests of this kind so. What the answer asks for is
/// then done, and has to bring a transaction about: in two rounds at most, since the client finds a gap in its sequence
/// numbers only with the first record after the one that was refused.
fn met(api: Api, errors: &[Resp]) -> Result<(), Error> {
    let mock = Mock::new();
    let mut producer = mock.producer();
    producer.init(SECONDS).unwrap();
    mock.cluster.request_errors(api, errors);
    let Err(error) = transact(&producer) else { return Ok(()) };
    let mut last = error.clone();
    for _ in 0..2 {
        match last.disposition() {
            Disposition::AbortTxn { .. } | Disposition::Reject { .. } => producer.abort(SECONDS).unwrap(),
            Disposition::Rebuild | Disposition::Fenced => {
                drop(producer);
                producer = mock.producer();
                producer.init(SECONDS).unwrap();
            }
            Disposition::Retry => panic!("the client itself asks again: {last:?}"),
            Disposition::Fatal(_) => return Err(error),
        }
        match transact(&producer) {
            Ok(()) => return Err(error),
            Err(error) => last = error,
        }
    }
    panic!("{last:?} after {error:?} of {api:?}");
}

/// Each case on a thread of its own: nearly all of their time is waiting for the first coordinator.
fn each<T: Send>(cases: impl IntoIterator<Item = T>, check: impl Fn(T) + Sync) {
    let check = &check;
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(move || check(case));
        }
    });
}

/// As of a topic that was made a moment ago.
#[test]
fn a_leader_that_does_not_know_yet_that_it_leads_is_asked_again_for_positions() {
    let mock = Mock::new();
    let admin = Admin::new(&Connection::new(mock.cluster.bootstrap_servers(), "mock"), SECONDS).unwrap();
    mock.cluster.request_errors(Api::ListOffsets, &[Resp::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION; 5]);
    let partition = TopicPartition::new("in", 0);
    let found = admin.offsets(&[(partition.clone(), At::Latest)], Isolation::ReadCommitted);
    assert_eq!(found.unwrap(), [(partition, Some(Position(0)))]);
}

#[test]
fn passing_troubles_are_retried_inside_the_client() {
    use Resp::*;
    each(
        [
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS),
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS),
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_NOT_COORDINATOR),
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART),
            (Api::AddOffsetsToTxn, RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS),
            (Api::AddOffsetsToTxn, RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE),
            (Api::AddOffsetsToTxn, RD_KAFKA_RESP_ERR_NOT_COORDINATOR),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_NOT_COORDINATOR),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT),
            (Api::EndTxn, RD_KAFKA_RESP_ERR_NOT_COORDINATOR),
            (Api::EndTxn, RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS),
            (Api::EndTxn, RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE),
            (Api::EndTxn, RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS),
            (Api::Produce, RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION),
            (Api::Produce, RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT),
            (Api::Produce, RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS),
        ],
        |(api, error)| assert_eq!(met(api, &[error, error]), Ok(()), "{api:?} {error:?}"),
    );
}

#[test]
fn broker_errors_become_dispositions() {
    use Disposition::*;
    use Resp::*;
    let refused = Fatal(Exit::Refused);
    let abort = AbortTxn { rejoin: false };
    let rejoin = AbortTxn { rejoin: true };
    each(
        [
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH, Fenced),
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_PRODUCER_FENCED, Fenced),
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_INVALID_TXN_STATE, Rebuild),
            // The id expired while nothing was to be done.
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_INVALID_PRODUCER_ID_MAPPING, abort.clone()),
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_TRANSACTIONAL_ID_AUTHORIZATION_FAILED, refused.clone()),
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, refused.clone()),
            (Api::AddPartitionsToTxn, RD_KAFKA_RESP_ERR_UNKNOWN, abort.clone()),
            (Api::AddOffsetsToTxn, RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH, Fenced),
            // The client calls it abortable: the abort says what is true.
            (Api::AddOffsetsToTxn, RD_KAFKA_RESP_ERR_PRODUCER_FENCED, abort.clone()),
            (Api::AddOffsetsToTxn, RD_KAFKA_RESP_ERR_INVALID_PRODUCER_ID_MAPPING, abort.clone()),
            (Api::AddOffsetsToTxn, RD_KAFKA_RESP_ERR_INVALID_TXN_STATE, Rebuild),
            (Api::AddOffsetsToTxn, RD_KAFKA_RESP_ERR_TRANSACTIONAL_ID_AUTHORIZATION_FAILED, refused.clone()),
            (Api::AddOffsetsToTxn, RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED, refused.clone()),
            (Api::AddOffsetsToTxn, RD_KAFKA_RESP_ERR_UNKNOWN, abort.clone()),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION, rejoin.clone()),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID, rejoin.clone()),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_STALE_MEMBER_EPOCH, rejoin.clone()),
            // Also after our own return within the session: only the group itself says who is the twin.
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_FENCED_INSTANCE_ID, rejoin),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH, Fenced),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_PRODUCER_FENCED, abort.clone()),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_INVALID_TXN_STATE, Rebuild),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_INVALID_PRODUCER_ID_MAPPING, Rebuild),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED, refused.clone()),
            (Api::TxnOffsetCommit, RD_KAFKA_RESP_ERR_UNKNOWN, abort.clone()),
            (Api::EndTxn, RD_KAFKA_RESP_ERR_INVALID_PRODUCER_ID_MAPPING, abort.clone()),
            (Api::EndTxn, RD_KAFKA_RESP_ERR_TRANSACTIONAL_ID_AUTHORIZATION_FAILED, refused.clone()),
            (Api::EndTxn, RD_KAFKA_RESP_ERR_UNKNOWN, abort.clone()),
            (Api::EndTxn, RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH, Fenced),
            (Api::EndTxn, RD_KAFKA_RESP_ERR_PRODUCER_FENCED, Fenced),
            (Api::EndTxn, RD_KAFKA_RESP_ERR_INVALID_TXN_STATE, Rebuild),
            // Not of an earlier request in flight: the broker and the client disagree.
            (Api::Produce, RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER, Rebuild),
            (Api::Produce, RD_KAFKA_RESP_ERR_UNKNOWN_PRODUCER_ID, abort.clone()),
            (Api::Produce, RD_KAFKA_RESP_ERR_INVALID_TXN_STATE, abort),
            (Api::Produce, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, refused),
            (Api::Produce, RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE, Reject { reason: "too-large" }),
            (Api::Produce, RD_KAFKA_RESP_ERR_INVALID_TIMESTAMP, Reject { reason: "timestamp" }),
            (Api::Produce, RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH, Fenced),
        ],
        |(api, error, expected)| {
            let met = met(api, &[error]).unwrap_err();
            assert_eq!(met.disposition(), expected, "{api:?} {error:?} came as {met:?}");
        },
    );
}

#[test]
fn after_an_abort_the_producer_goes_on() {
    let mock = Mock::new();
    let producer = mock.producer();
    producer.init(SECONDS).unwrap();
    mock.cluster.request_errors(Api::TxnOffsetCommit, &[Resp::RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION]);
    assert!(transact(&producer).unwrap_err().is_abortable());
    // In a failed transaction nothing is queued.
    let error = send(&producer).unwrap_err();
    assert_eq!(error.disposition(), Disposition::AbortTxn { rejoin: false }, "{error:?}");
    producer.abort(SECONDS).unwrap();
    transact(&producer).unwrap();
}

#[test]
fn an_abort_with_records_in_the_queue_does_not_hang() {
    let mock = Mock::new();
    let producer = mock.producer();
    producer.init(SECONDS).unwrap();
    producer.begin().unwrap();
    mock.cluster.broker_round_trip_time(1, Duration::from_millis(200)).unwrap();
    for _ in 0..100 {
        send(&producer).unwrap();
    }
    let start = Instant::now();
    producer.abort(SECONDS).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(producer.failed_deliveries(), None);
}

#[test]
fn a_commit_that_is_not_answered_is_asked_again() {
    let mock = Mock::new();
    let producer = mock.producer();
    producer.init(SECONDS).unwrap();
    producer.begin().unwrap();
    send(&producer).unwrap();
    producer.flush(SECONDS).unwrap();
    mock.cluster.broker_round_trip_time(1, Duration::from_millis(1000)).unwrap();
    let error = producer.commit(Duration::from_millis(200)).unwrap_err();
    assert!(error.is_timeout(), "{error:?}");
    assert_eq!(error.disposition(), Disposition::Retry);
    // Nothing else may be asked before the outcome is known.
    let error = producer.abort(Duration::from_millis(200)).unwrap_err();
    assert_ne!(error.disposition(), Disposition::AbortTxn { rejoin: false }, "{error:?}");
    producer.commit(SECONDS).unwrap();
}

#[test]
fn initialising_is_tried_again_refused_or_fenced() {
    use Disposition::*;
    use Resp::*;
    each(
        [
            (RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE, None),
            (RD_KAFKA_RESP_ERR_NOT_COORDINATOR, None),
            (RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS, None),
            (RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS, None),
            (RD_KAFKA_RESP_ERR_TRANSACTIONAL_ID_AUTHORIZATION_FAILED, Some(Fatal(Exit::Refused))),
            (RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED, Some(Fatal(Exit::Refused))),
            (RD_KAFKA_RESP_ERR_UNKNOWN, None),
        ],
        |(error, expected)| {
            let mock = Mock::new();
            mock.cluster.request_errors(Api::InitProducerId, &[error]);
            let met = mock.producer().init(SECONDS).err();
            assert_eq!(met.as_ref().map(Error::disposition), expected, "{error:?} came as {met:?}");
            let producer = mock.producer();
            producer.init(SECONDS).and_then(|()| transact(&producer)).unwrap();
        },
    );
}

#[test]
fn initialising_says_why_it_is_refused_or_late() {
    let mock = Mock::new();
    mock.cluster.request_errors(Api::InitProducerId, &[Resp::RD_KAFKA_RESP_ERR_INVALID_TRANSACTION_TIMEOUT]);
    let error = mock.producer().init(SECONDS).unwrap_err();
    assert_eq!(error.disposition(), Disposition::Fatal(Exit::Refused));
    assert!(error.to_string().contains("transactional.id id, transaction.timeout.ms 10000"), "{error}");

    let mock = Mock::new();
    let unavailable = [Resp::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE; 10_000];
    mock.cluster.request_errors(Api::InitProducerId, &unavailable);
    let producer = mock.producer();
    let error = producer.init(Duration::from_millis(700)).unwrap_err();
    assert_eq!(error.disposition(), Disposition::Retry, "{error:?}");
    assert!(error.to_string().contains("transaction.state.log.replication.factor"), "{error}");
    mock.cluster.clear_request_errors(Api::InitProducerId);
    producer.init(SECONDS).unwrap();
}
