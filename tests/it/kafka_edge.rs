//! The Kafka module against a real broker.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use semel::chunk::{Chunk, Target, TargetId};
use semel::error::{Disposition, Exit};
use semel::kafka::{Admin, At, Connection, Consumer, ConsumerOptions, Isolation, Polled, Producer, ProducerOptions};
use semel::record::{Position, TopicPartition};

const SECONDS: Duration = Duration::from_secs(10);

fn connection() -> Connection {
    let brokers = std::env::var("KAFKA_BROKERS").expect("KAFKA_BROKERS");
    Connection::new(brokers, "kafka-edge")
}

fn admin() -> Admin {
    Admin::new(&connection(), SECONDS).unwrap()
}

/// A name that no other test and no other run uses.
fn unique(name: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let started = std::time::UNIX_EPOCH.elapsed().unwrap().as_micros();
    format!("edge.{name}.{started}.{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A topic of its own, gone when the test is.
struct Topic {
    name: String,
    admin: Admin,
}

impl Topic {
    fn new(name: &str, partitions: i32) -> Topic {
        Topic::with(name, partitions, &[])
    }

    fn with(name: &str, partitions: i32, config: &[(&str, &str)]) -> Topic {
        let topic = Topic { name: unique(name), admin: admin() };
        let config = config.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        assert!(topic.admin.create_topic(&topic.name, partitions, 1, &config).unwrap());
        topic
    }

    fn partition(&self, partition: i32) -> TopicPartition {
        TopicPartition::new(&*self.name, partition)
    }

    fn target(&self) -> Target {
        self.admin.topic(&self.name).unwrap().unwrap().target(&*self.name)
    }

    fn end(&self, isolation: Isolation) -> i64 {
        self.admin.offsets(&[(self.partition(0), At::Latest)], isolation).unwrap()[0].1.unwrap().0
    }
}

impl Drop for Topic {
    fn drop(&mut self) {
        let _ = self.admin.delete_topics(&[&self.name]);
    }
}

fn transactional(id: &str, targets: &[Target]) -> Producer {
    let producer = uninitialised(id, targets);
    producer.init(SECONDS).unwrap();
    producer
}

fn uninitialised(id: &str, targets: &[Target]) -> Producer {
    let options = ProducerOptions {
        transactional_id: Some(id.to_owned()),
        transaction_timeout: Duration::from_secs(10),
        queue_bytes: 8 << 20,
    };
    Producer::new(&connection(), &options, targets).unwrap()
}

fn plain(targets: &[Target]) -> Producer {
    let options =
        ProducerOptions { transactional_id: None, transaction_timeout: Duration::from_secs(10), queue_bytes: 8 << 20 };
    Producer::new(&connection(), &options, targets).unwrap()
}

type Header<'a> = (&'a [u8], Option<&'a [u8]>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    partition: i32,
    offset: i64,
    timestamp: Option<i64>,
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

fn send(producer: &Producer, partition: i32, key: Option<&[u8]>, value: Option<&[u8]>, headers: &[Header<'_>]) {
    send_at(producer, partition, None, key, value, headers);
}

fn send_at(
    producer: &Producer,
    partition: i32,
    timestamp: Option<i64>,
    key: Option<&[u8]>,
    value: Option<&[u8]>,
    headers: &[Header<'_>],
) {
    let chunk = chunk(partition, timestamp, key, value, headers);
    producer.produce(&chunk.iter().next().unwrap()).unwrap();
}

fn chunk(
    partition: i32,
    timestamp: Option<i64>,
    key: Option<&[u8]>,
    value: Option<&[u8]>,
    headers: &[Header<'_>],
) -> Chunk {
    let mut chunk = Chunk::default();
    let mut output = chunk.push(TargetId(0));
    output.partition(partition).timestamp(timestamp).key(key).value(value);
    for (name, value) in headers {
        output.header(name, *value);
    }
    output.finish();
    chunk
}

/// A consumer that reads from given positions, in a group of its own.
struct Reader {
    consumer: Consumer,
    start: Vec<(TopicPartition, Position)>,
}

impl Reader {
    fn new(topic: &Topic, start: &[(i32, i64)]) -> Reader {
        Reader::with(topic, start, true)
    }

    fn with(topic: &Topic, start: &[(i32, i64)], read_committed: bool) -> Reader {
        let group = unique("group");
        let options = ConsumerOptions { read_committed, ..ConsumerOptions::new(&group) };
        let consumer = Consumer::new(&connection(), &options).unwrap();
        consumer.subscribe(&[&topic.name]).unwrap();
        let start = start.iter().map(|(p, at)| (topic.partition(*p), Position(*at))).collect();
        let mut reader = Reader { consumer, start };
        reader.join();
        reader
    }

    fn join(&mut self) {
        let deadline = Instant::now() + SECONDS;
        loop {
            assert!(Instant::now() < deadline, "no assignment");
            if let Polled::Assign(_) = self.consumer.poll(Duration::from_millis(100)) {
                break;
            }
        }
        let start = self.start.clone();
        self.consumer.assign(&start).unwrap();
    }

    fn read(&self, count: usize) -> Vec<Record> {
        let deadline = Instant::now() + SECONDS;
        let mut records = Vec::new();
        while records.len() < count {
            assert!(Instant::now() < deadline, "only {records:?}");
            match self.consumer.poll(Duration::from_millis(100)) {
                Polled::Record(message) => {
                    let input = message.to_input(Vec::new());
                    records.push(Record {
                        partition: input.partition,
                        offset: input.offset.0,
                        timestamp: input.timestamp,
                        key: input.key.map(<[u8]>::to_vec),
                        value: input.value.map(<[u8]>::to_vec),
                        headers: (input.headers.0.iter()).map(|(n, v)| (n.to_vec(), v.map(<[u8]>::to_vec))).collect(),
                    });
                }
                Polled::Nothing => {}
                other => panic!("{other:?}"),
            }
        }
        records
    }

    fn values(&self, count: usize) -> Vec<String> {
        self.read(count).into_iter().map(|r| String::from_utf8(r.value.unwrap()).unwrap()).collect()
    }
}

#[track_caller]
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + SECONDS;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_record_comes_back_as_it_went_in() {
    let topic = Topic::new("round-trip", 1);
    let producer = plain(&[topic.target()]);
    let headers: [Header<'_>; 5] =
        [(b"a", Some(b"1")), (b"a", Some(b"2")), (b"b", None), (b"c", Some(b"")), (b"\xc3\x28\xff", Some(&[0xff]))];
    let values: [Option<&[u8]>; 4] = [None, Some(b""), Some(b"null"), Some(b"{}")];
    let keys: [Option<&[u8]>; 3] = [None, Some(b""), Some(b"k")];
    let mut sent = Vec::new();
    for value in values {
        for key in keys {
            let headers: &[Header<'_>] = if key.is_none() { &headers } else { &[] };
            let timestamp = 1_700_000_000_000 + sent.len() as i64;
            send_at(&producer, 0, Some(timestamp), key, value, headers);
            sent.push(Record {
                partition: 0,
                offset: sent.len() as i64,
                timestamp: Some(timestamp),
                key: key.map(<[u8]>::to_vec),
                value: value.map(<[u8]>::to_vec),
                headers: headers.iter().map(|(n, v)| (n.to_vec(), v.map(<[u8]>::to_vec))).collect(),
            });
        }
    }
    producer.flush(SECONDS).unwrap();
    assert_eq!(producer.failed_deliveries(), None);
    assert_eq!(Reader::new(&topic, &[(0, 0)]).read(sent.len()), sent);
}

#[test]
fn times_before_the_epoch_are_kept_and_none_is_now() {
    let topic = Topic::new("times", 1);
    let producer = plain(&[topic.target()]);
    let before = std::time::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64;
    for timestamp in [Some(1), Some(-60_000), None] {
        send_at(&producer, 0, timestamp, None, Some(b"x"), &[]);
    }
    producer.flush(SECONDS).unwrap();
    assert_eq!(producer.failed_deliveries(), None);
    let times: Vec<_> = Reader::new(&topic, &[(0, 0)]).read(3).into_iter().map(|r| r.timestamp).collect();
    assert_eq!(times[..2], [Some(1), Some(-60_000)]);
    let after = std::time::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64;
    assert!((before..=after).contains(&times[2].unwrap()), "{times:?}");
}

#[test]
fn an_aborted_transaction_is_invisible_and_the_position_steps_over_it() {
    let topic = Topic::new("abort", 1);
    let producer = transactional(&unique("id"), &[topic.target()]);
    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"aborted"), &[]);
    producer.flush(SECONDS).unwrap();
    producer.abort(SECONDS).unwrap();
    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"committed"), &[]);
    producer.commit(SECONDS).unwrap();

    let reader = Reader::new(&topic, &[(0, 0)]);
    assert_eq!(reader.consumer.position(&[topic.partition(0)]), [(topic.partition(0), None)]);
    assert_eq!(reader.values(1), ["committed"]);
    // Two records and a marker after each.
    eventually("the position is after the last marker", || {
        let _ = reader.consumer.poll(Duration::from_millis(10));
        reader.consumer.position(&[topic.partition(0)])[0].1 == Some(Position(4))
    });
    eventually("the log is stable", || topic.end(Isolation::ReadCommitted) == 4);
    assert_eq!(topic.end(Isolation::ReadUncommitted), 4);
    assert_eq!(Reader::with(&topic, &[(0, 0)], false).values(2), ["aborted", "committed"]);
}

#[test]
fn positions_are_committed_in_the_transaction_and_held_while_it_is_open() {
    let topic = Topic::new("positions", 1);
    let reader = Reader::new(&topic, &[(0, 0)]);
    let partition = topic.partition(0);
    let committed = |timeout| {
        let answer = reader.consumer.committed(std::slice::from_ref(&partition), timeout).unwrap();
        assert_eq!(answer.len(), 1);
        assert_eq!(answer[0].0, partition);
        answer.into_iter().next().unwrap().1
    };
    assert_eq!(committed(SECONDS), Ok(None));
    let nobody = topic.admin.committed(&unique("nobody"), std::slice::from_ref(&partition), true).unwrap();
    assert_eq!(nobody, [(partition.clone(), Ok(None))]);

    let producer = transactional(&unique("id"), &[topic.target()]);
    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"x"), &[]);
    let group = reader.consumer.group();
    producer.send_offsets(&[(partition.clone(), Position(7))], &group.metadata().unwrap(), SECONDS).unwrap();
    let held = committed(Duration::from_millis(200)).unwrap_err();
    assert!(held.is_unstable());
    assert_eq!(held.disposition(), Disposition::Retry);
    producer.commit(SECONDS).unwrap();
    assert_eq!(committed(SECONDS), Ok(Some(Position(7))));

    producer.begin().unwrap();
    producer.send_offsets(&[(partition.clone(), Position(9))], &group.metadata().unwrap(), SECONDS).unwrap();
    producer.abort(SECONDS).unwrap();
    assert_eq!(committed(SECONDS), Ok(Some(Position(7))));
}

#[test]
fn a_member_has_a_generation_only_after_it_joined() {
    let topic = Topic::new("generation", 1);
    let group = unique("group");
    let consumer = Consumer::new(&connection(), &ConsumerOptions::new(&group)).unwrap();
    let handle = consumer.group();
    let before = handle.metadata().unwrap();
    assert_eq!((before.generation(), before.member_id(), before.is_member()), (-1, "", false));
    consumer.subscribe(&[&topic.name]).unwrap();
    eventually("a member", || {
        let _ = consumer.poll(Duration::from_millis(10));
        handle.metadata().unwrap().is_member()
    });
    consumer.close(SECONDS);
    assert!(handle.metadata().is_none());
}

#[test]
fn a_stale_generation_aborts_and_waits_for_the_group() {
    let topic = Topic::new("stale", 1);
    let reader = Reader::new(&topic, &[(0, 0)]);
    let producer = transactional(&unique("id"), &[topic.target()]);
    let metadata = reader.consumer.group().metadata().unwrap();
    // The group is empty from here on, so that the member is unknown.
    reader.consumer.close(SECONDS);
    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"x"), &[]);
    let error = producer.send_offsets(&[(topic.partition(0), Position(1))], &metadata, SECONDS).unwrap_err();
    assert_eq!(error.disposition(), Disposition::AbortTxn { rejoin: true }, "{error}");
    producer.abort(SECONDS).unwrap();
}

#[test]
fn a_seek_goes_back_and_drops_what_was_fetched() {
    let topic = Topic::new("seek", 1);
    let producer = plain(&[topic.target()]);
    for value in ["a", "b", "c", "d"] {
        send(&producer, 0, None, Some(value.as_bytes()), &[]);
    }
    producer.flush(SECONDS).unwrap();
    let reader = Reader::new(&topic, &[(0, 0)]);
    assert_eq!(reader.values(2), ["a", "b"]);
    let answer = reader.consumer.seek(&[(topic.partition(0), Position(1))], SECONDS);
    assert_eq!(answer, [(topic.partition(0), Ok(()))]);
    assert_eq!(reader.values(3), ["b", "c", "d"]);
}

#[test]
fn a_seek_right_after_an_assignment_comes_true_in_the_end() {
    let topic = Topic::new("early-seek", 1);
    let producer = plain(&[topic.target()]);
    for value in ["a", "b", "c"] {
        send(&producer, 0, None, Some(value.as_bytes()), &[]);
    }
    producer.flush(SECONDS).unwrap();
    let reader = Reader::new(&topic, &[(0, 0)]);
    eventually("the seek is done", || {
        let answer = reader.consumer.seek(&[(topic.partition(0), Position(2))], SECONDS).remove(0).1;
        if let Err(error) = &answer {
            assert!(error.is_not_started(), "{error:?}");
            assert_eq!(error.disposition(), Disposition::Retry);
            let _ = reader.consumer.poll(Duration::ZERO);
        }
        answer.is_ok()
    });
    assert_eq!(reader.values(1), ["c"]);
}

#[test]
fn a_waiting_poll_can_be_woken() {
    let topic = Topic::new("wake", 1);
    let reader = Reader::new(&topic, &[(0, 0)]);
    let group = reader.consumer.group();
    eventually("woken", || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                group.wake();
            });
            assert!(matches!(reader.consumer.poll(SECONDS), Polled::Nothing));
        });
        start.elapsed() > Duration::from_millis(15) && start.elapsed() < Duration::from_secs(2)
    });
}

#[test]
fn a_commit_takes_milliseconds() {
    let topic = Topic::new("latency", 1);
    let reader = Reader::new(&topic, &[(0, 0)]);
    let producer = transactional(&unique("id"), &[topic.target()]);
    let group = reader.consumer.group();
    let mut took: Vec<Duration> = (0..20)
        .map(|i| {
            producer.begin().unwrap();
            for _ in 0..100 {
                send(&producer, 0, None, Some(&[b'x'; 200]), &[]);
            }
            let start = Instant::now();
            producer.flush(SECONDS).unwrap();
            producer.send_offsets(&[(topic.partition(0), Position(i))], &group.metadata().unwrap(), SECONDS).unwrap();
            producer.commit(SECONDS).unwrap();
            start.elapsed()
        })
        .collect();
    took.sort();
    // The crate's own commit takes 100 ms whenever a message is unacknowledged.
    assert!(took[10] < Duration::from_millis(50), "{took:?}");
}

#[test]
fn a_record_larger_than_the_fetch_size_is_read() {
    let topic = Topic::with("large", 1, &[("max.message.bytes", "8000000")]);
    let target = topic.target();
    assert_eq!(target.max_message_bytes, 8_000_000);
    let producer = plain(&[target]);
    // Nothing that compression makes small.
    let mut seed = 1u64;
    let value: Vec<u8> = (0..5_000_000)
        .map(|_| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 56) as u8
        })
        .collect();
    send(&producer, 0, None, Some(&value), &[]);
    send(&producer, 0, None, Some(b"after"), &[]);
    producer.flush(SECONDS).unwrap();
    assert_eq!(producer.failed_deliveries(), None);
    let records = Reader::new(&topic, &[(0, 0)]).read(2);
    assert!(records[0].value.as_deref() == Some(&value[..]));
    assert_eq!(records[1].value.as_deref(), Some(&b"after"[..]));
}

#[test]
fn a_record_that_the_topic_refuses_is_a_reject() {
    let refused = |topic: &Topic, timestamp, value: &[u8]| {
        let mut target = topic.target();
        target.max_message_bytes = 1 << 20;
        let producer = transactional(&unique("id"), &[target]);
        producer.begin().unwrap();
        send_at(&producer, 0, timestamp, None, Some(value), &[]);
        let error = match producer.flush(SECONDS).and_then(|()| producer.commit(SECONDS)) {
            Err(error) => error,
            Ok(()) => panic!("committed"),
        };
        assert!(error.is_abortable(), "{error:?}");
        producer.abort(SECONDS).unwrap();
        // The producer lives on.
        producer.begin().unwrap();
        producer.commit(SECONDS).unwrap();
        error
    };
    let small = Topic::with("small", 1, &[("max.message.bytes", "1000"), ("compression.type", "uncompressed")]);
    let random: Vec<u8> = (0..5000u32).map(|i| (i.wrapping_mul(2654435761) >> 13) as u8).collect();
    let error = refused(&small, None, &random);
    assert_eq!(error.disposition(), Disposition::Reject { reason: "too-large" }, "{error}");

    let recent = Topic::with("recent", 1, &[("message.timestamp.before.max.ms", "1000")]);
    let error = refused(&recent, Some(1_000_000), b"x");
    assert_eq!(error.disposition(), Disposition::Reject { reason: "timestamp" }, "{error}");

    let compacted = Topic::with("compacted", 1, &[("cleanup.policy", "compact")]);
    assert!(compacted.target().compacted);
    let error = refused(&compacted, None, b"x");
    assert_eq!(error.disposition(), Disposition::Reject { reason: "broker" }, "{error}");
    assert_eq!(error.topic(), None);

    // Outside a transaction it is the delivery that fails.
    let producer = plain(&[compacted.target()]);
    send(&producer, 0, None, Some(b"x"), &[]);
    producer.flush(SECONDS).unwrap();
    let error = producer.failed_deliveries().unwrap();
    assert_eq!(error.disposition(), Disposition::Reject { reason: "broker" }, "{error}");
    assert_eq!((error.topic(), error.partition()), (Some(&*compacted.name), Some(0)));
    assert_eq!(error.text(), "Broker: Broker failed to validate record");
}

#[test]
fn a_message_over_the_clients_own_limit_is_refused_at_once() {
    let topic = Topic::new("client-limit", 1);
    let producer = plain(&[topic.target()]);
    let chunk = chunk(0, None, None, Some(&vec![b'x'; 2_000_000]), &[]);
    let error = producer.produce(&chunk.iter().next().unwrap()).unwrap_err();
    assert_eq!(error.disposition(), Disposition::Reject { reason: "too-large" });
    assert_eq!((error.topic(), error.partition()), (Some(&*topic.name), Some(0)));
}

#[test]
fn batches_fit_into_a_small_topic() {
    let topic = Topic::with("small-batches", 1, &[("max.message.bytes", "20000")]);
    let producer = plain(&[topic.target()]);
    let mut seed = 1u32;
    for _ in 0..1000 {
        // Nothing that compression makes small.
        let value: Vec<u8> = std::iter::repeat_with(|| {
            seed = seed.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            (seed >> 24) as u8
        })
        .take(500)
        .collect();
        send(&producer, 0, None, Some(&value), &[]);
    }
    producer.flush(SECONDS).unwrap();
    assert_eq!(producer.failed_deliveries(), None);
    assert_eq!(topic.end(Isolation::ReadUncommitted), 1000);
}

#[test]
fn a_full_queue_says_so_and_takes_more_later() {
    let topic = Topic::new("full", 1);
    let options =
        ProducerOptions { transactional_id: None, transaction_timeout: Duration::from_secs(10), queue_bytes: 64 << 10 };
    let producer = Producer::new(&connection(), &options, &[topic.target()]).unwrap();
    let chunk = chunk(0, None, None, Some(&[b'x'; 100_000]), &[(b"h", Some(b"v"))]);
    let output = chunk.iter().next().unwrap();
    let (mut sent, mut full) = (0, 0);
    let deadline = Instant::now() + SECONDS;
    while sent < 100 {
        assert!(Instant::now() < deadline);
        match producer.produce(&output) {
            Ok(()) => sent += 1,
            Err(error) => {
                assert!(error.is_queue_full(), "{error}");
                assert_eq!(error.disposition(), Disposition::Retry);
                full += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    assert!(full > 0);
    producer.flush(SECONDS).unwrap();
    assert_eq!(producer.in_flight(), 0);
    assert_eq!(topic.end(Isolation::ReadUncommitted), 100);
}

#[test]
fn a_newcomer_fences_the_producer_before_it() {
    let topic = Topic::new("fence", 1);
    let id = unique("id");
    let old = transactional(&id, &[topic.target()]);
    old.begin().unwrap();
    send(&old, 0, None, Some(b"old"), &[]);
    old.flush(SECONDS).unwrap();
    let new = transactional(&id, &[topic.target()]);
    let error = old.commit(SECONDS).unwrap_err();
    assert_eq!(error.disposition(), Disposition::Fenced, "{error}");
    assert!(error.is_fatal());
    let dead = old.produce(&chunk(0, None, None, None, &[]).iter().next().unwrap()).unwrap_err();
    assert_eq!(dead.disposition(), Disposition::Fenced, "{dead}");
    assert_eq!(old.fatal().unwrap().disposition(), Disposition::Fenced);
    new.begin().unwrap();
    send(&new, 0, None, Some(b"new"), &[]);
    new.commit(SECONDS).unwrap();
    assert_eq!(Reader::new(&topic, &[(0, 0)]).values(1), ["new"]);
}

#[test]
fn a_transaction_timeout_above_the_brokers_limit_is_refused_by_name() {
    assert_eq!(admin().broker_config("transaction.max.timeout.ms").unwrap().as_deref(), Some("900000"));
    let options = ProducerOptions {
        transactional_id: Some(unique("id")),
        transaction_timeout: Duration::from_secs(1200),
        queue_bytes: 1 << 20,
    };
    let producer = Producer::new(&connection(), &options, &[]).unwrap();
    let error = producer.init(SECONDS).unwrap_err();
    assert_eq!(error.disposition(), Disposition::Fatal(Exit::Refused));
    let text = error.to_string();
    assert!(text.contains("transaction.timeout.ms 1200000"), "{text}");
    assert!(text.contains("transaction.max.timeout.ms"), "{text}");
}

#[test]
fn a_position_outside_the_log_is_named() {
    let topic = Topic::new("out-of-range", 1);
    let reader = Reader::new(&topic, &[(0, 1000)]);
    let deadline = Instant::now() + SECONDS;
    let error = loop {
        assert!(Instant::now() < deadline);
        match reader.consumer.poll(Duration::from_millis(100)) {
            Polled::Failed(error) => break error,
            Polled::Nothing => {}
            other => panic!("{other:?}"),
        }
    };
    assert!(error.is_out_of_range());
    assert_eq!((error.topic(), error.partition()), (Some(&*topic.name), Some(0)));
    assert_eq!(error.disposition(), Disposition::Fatal(Exit::Stopped));
    assert!(error.to_string().contains("position 1000"), "{error}");
}

#[test]
fn topics_are_made_described_and_deleted() {
    let topic = Topic::with("describe", 2, &[("retention.ms", "60000"), ("cleanup.policy", "compact,delete")]);
    let info = topic.admin.topic(&topic.name).unwrap().unwrap();
    assert_eq!((info.partitions, info.replicas, info.retention_ms), (2, 1, 60_000));
    assert_eq!(info.max_message_bytes, 1_048_588);
    assert!(info.target("x").compacted);
    assert!(!info.id.is_nil());
    // It is there: made once.
    assert!(!topic.admin.create_topic(&topic.name, 9, 1, &BTreeMap::new()).unwrap());
    topic.admin.create_partitions(&topic.name, 3).unwrap();
    let grown = topic.admin.topic(&topic.name).unwrap().unwrap();
    assert_eq!((grown.partitions, grown.id), (3, info.id));

    let missing = unique("missing");
    let both = topic.admin.topics(&[&topic.name, &missing, &topic.name]).unwrap();
    assert_eq!(both.len(), 2);
    assert_eq!(both[&missing], None);

    topic.admin.delete_topics(&[&topic.name, &missing]).unwrap();
    assert_eq!(topic.admin.topic(&topic.name).unwrap(), None);
    assert!(topic.admin.create_topic(&topic.name, 1, 1, &BTreeMap::new()).unwrap());
    assert_ne!(topic.admin.topic(&topic.name).unwrap().unwrap().id, info.id);
}

#[test]
fn a_bad_topic_setting_is_refused_in_the_brokers_words() {
    let config = BTreeMap::from([("retention.ms".to_owned(), "soon".to_owned())]);
    let error = admin().create_topic(&unique("bad"), 1, 1, &config).unwrap_err();
    assert_eq!(error.disposition(), Disposition::Fatal(Exit::Refused));
    assert!(error.to_string().contains("retention.ms"), "{error}");
}

#[test]
fn positions_in_the_log_are_found_by_time_and_records_deleted() {
    let topic = Topic::new("offsets", 1);
    let producer = plain(&[topic.target()]);
    for timestamp in [1000, 2000, 3000] {
        send_at(&producer, 0, Some(timestamp), None, Some(b"x"), &[]);
    }
    producer.flush(SECONDS).unwrap();
    let at = |at| topic.admin.offsets(&[(topic.partition(0), at)], Isolation::ReadCommitted).unwrap()[0].1;
    assert_eq!(at(At::Timestamp(1500)), Some(Position(1)));
    assert_eq!(at(At::Timestamp(9999)), None);
    assert_eq!(at(At::Earliest), Some(Position(0)));
    topic.admin.delete_records(&[(topic.partition(0), Position(2))]).unwrap();
    assert_eq!(at(At::Earliest), Some(Position(2)));
    assert_eq!(at(At::Latest), Some(Position(3)));
}

#[test]
fn an_open_transaction_holds_the_stable_end_back() {
    let topic = Topic::new("stable-end", 1);
    let producer = transactional(&unique("id"), &[topic.target()]);
    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"x"), &[]);
    producer.flush(SECONDS).unwrap();
    assert_eq!(topic.end(Isolation::ReadCommitted), 0);
    assert_eq!(topic.end(Isolation::ReadUncommitted), 1);
    producer.abort(SECONDS).unwrap();
}

#[test]
fn a_wrong_address_is_said_within_its_time() {
    let unreachable = |brokers: &str| {
        let admin = Admin::new(&Connection::new(brokers, "lost"), SECONDS).unwrap();
        let start = Instant::now();
        let error = admin.ping(Duration::from_secs(3)).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        let start = Instant::now();
        drop(admin);
        assert!(start.elapsed() < Duration::from_secs(3));
        error.to_string()
    };
    let text = unreachable("127.0.0.1:1");
    assert!(text.contains("127.0.0.1:1") && text.contains("Connection refused"), "{text}");
    assert!(!text.contains("after"), "{text}");
    let text = unreachable("no-such-host.invalid:9092");
    assert!(text.contains("no-such-host.invalid:9092") && text.contains("resolve"), "{text}");
    admin().ping(SECONDS).unwrap();
}

#[test]
fn a_broker_that_speaks_no_tls_is_said_so() {
    let mut connection = connection();
    connection.properties.insert("security.protocol".into(), "ssl".into());
    let admin = Admin::new(&connection, SECONDS).unwrap();
    let text = admin.ping(Duration::from_secs(2)).unwrap_err().to_string();
    assert!(text.contains("PLAINTEXT") && text.contains("security.protocol"), "{text}");
}

#[test]
fn clients_of_an_unreachable_broker_end_within_a_bound() {
    let lost = Connection::new("127.0.0.1:1", "lost");
    let start = Instant::now();
    let consumer = Consumer::new(&lost, &ConsumerOptions::new("g")).unwrap();
    consumer.subscribe(&["t"]).unwrap();
    assert!(matches!(consumer.poll(Duration::from_millis(300)), Polled::Nothing));
    consumer.close(Duration::from_secs(1));
    let options =
        ProducerOptions { transactional_id: None, transaction_timeout: Duration::from_secs(10), queue_bytes: 1 << 20 };
    let targets = [Target {
        topic: "t".into(),
        partitions: 1,
        max_message_bytes: 1000,
        compacted: false,
        timestamp_before_max_ms: i64::MAX,
        timestamp_after_max_ms: i64::MAX,
    }];
    let producer = Producer::new(&lost, &options, &targets).unwrap();
    send(&producer, 0, None, Some(b"x"), &[]);
    assert_eq!(producer.flush(Duration::from_millis(100)).unwrap_err().disposition(), Disposition::Retry);
    drop(producer);
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
}

fn poll_until<T>(consumer: &mut Consumer, mut done: impl FnMut(&mut Consumer) -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        assert!(Instant::now() < deadline, "never");
        if let Some(done) = done(consumer) {
            return done;
        }
    }
}

#[test]
fn a_cooperative_rebalance_moves_only_what_it_must() {
    let topic = Topic::new("cooperative", 4);
    let group = unique("group");
    let member = || {
        let consumer = Consumer::new(&connection(), &ConsumerOptions::new(&group)).unwrap();
        consumer.subscribe(&[&topic.name]).unwrap();
        consumer
    };
    let mut first = member();
    let given = poll_until(&mut first, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Assign(partitions) => Some(partitions),
        _ => None,
    });
    assert!(first.is_cooperative());
    assert_eq!(given.len(), 4);
    // Three have a position, the fourth is added from the loop.
    let at_start = |p: &[TopicPartition]| p.iter().map(|p| (p.clone(), Position(0))).collect::<Vec<_>>();
    first.assign(&at_start(&given[..3])).unwrap();
    assert_eq!(first.assignment().len(), 3);
    first.add(&at_start(&given[3..])).unwrap();
    assert_eq!(first.assignment().len(), 4);

    let mut second = member();
    let mut held = BTreeSet::new();
    let mut revoked = Vec::new();
    poll_until(&mut second, |second| {
        match first.poll(Duration::from_millis(20)) {
            Polled::Revoke { partitions, lost } => {
                assert!(!lost);
                first.unassign(&partitions).unwrap();
                revoked.extend(partitions);
            }
            Polled::Assign(partitions) => first.assign(&at_start(&partitions)).unwrap(),
            Polled::Nothing => {}
            other => panic!("{other:?}"),
        }
        match second.poll(Duration::from_millis(20)) {
            Polled::Assign(partitions) => {
                held.extend(partitions.clone());
                second.assign(&at_start(&partitions)).unwrap();
            }
            Polled::Nothing => {}
            other => panic!("{other:?}"),
        }
        (held.len() == 2).then_some(())
    });
    assert_eq!(revoked.iter().cloned().collect::<BTreeSet<_>>(), held);
    assert_eq!(first.assignment().len(), 2);
    // A dynamic member leaves when it closes: the other has its partitions back at once.
    second.close(SECONDS);
    let back = poll_until(&mut first, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Assign(partitions) if !partitions.is_empty() => Some(partitions),
        Polled::Assign(_) => {
            c.assign(&[]).unwrap();
            None
        }
        _ => None,
    });
    assert_eq!(back.into_iter().collect::<BTreeSet<_>>(), held);
}

#[test]
fn a_member_that_polls_too_late_has_lost_its_partitions() {
    let topic = Topic::new("late", 1);
    let group = unique("group");
    let options = ConsumerOptions {
        session_timeout: Duration::from_secs(6),
        max_poll_interval: Duration::from_secs(6),
        ..ConsumerOptions::new(&group)
    };
    let mut consumer = Consumer::new(&connection(), &options).unwrap();
    consumer.subscribe(&[&topic.name]).unwrap();
    poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(50)) {
        Polled::Assign(_) => c.assign(&[(topic.partition(0), Position(0))]).ok(),
        _ => None,
    });
    let membership = consumer.group();
    eventually("not a member any more", || !membership.metadata().unwrap().is_member());
    let error = poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(50)) {
        Polled::Failed(error) => Some(error),
        _ => None,
    });
    assert_eq!(error.disposition(), Disposition::Retry, "{error}");
    assert!(error.to_string().contains("maximum poll interval (6000ms) exceeded"), "{error}");
    let (partitions, lost) = poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(50)) {
        Polled::Revoke { partitions, lost } => Some((partitions, lost)),
        _ => None,
    });
    assert_eq!((&partitions[..], lost), (&[topic.partition(0)][..], true));
    consumer.unassign(&partitions).unwrap();
    assert_eq!(consumer.assignment(), []);
    // It polls again, so it joins again.
    poll_until(&mut consumer, |c| matches!(c.poll(Duration::from_millis(50)), Polled::Assign(_)).then_some(()));
    assert!(membership.metadata().unwrap().is_member());
}

#[test]
fn an_eager_assignor_takes_additions_too() {
    let topic = Topic::new("eager", 2);
    let producer = plain(&[topic.target()]);
    for partition in [0, 0, 1] {
        send(&producer, partition, None, Some(format!("p{partition}").as_bytes()), &[]);
    }
    producer.flush(SECONDS).unwrap();
    let mut connection = connection();
    connection.properties.insert("partition.assignment.strategy".into(), "range".into());
    let group = unique("group");
    let mut consumer = Consumer::new(&connection, &ConsumerOptions::new(&group)).unwrap();
    consumer.subscribe(&[&topic.name]).unwrap();
    poll_until(&mut consumer, |c| matches!(c.poll(Duration::from_millis(100)), Polled::Assign(_)).then_some(()));
    assert!(!consumer.is_cooperative());
    consumer.assign(&[(topic.partition(0), Position(0))]).unwrap();
    let next = |c: &mut Consumer| match c.poll(Duration::from_millis(100)) {
        Polled::Record(message) => Some((message.partition(), message.offset().0)),
        Polled::Nothing => None,
        other => panic!("{other:?}"),
    };
    assert_eq!(poll_until(&mut consumer, next), (0, 0));
    consumer.add(&[(topic.partition(1), Position(0))]).unwrap();
    let rest = BTreeSet::from([poll_until(&mut consumer, next), poll_until(&mut consumer, next)]);
    assert_eq!(rest, BTreeSet::from([(0, 1), (1, 0)]));
    consumer.unassign(&[topic.partition(0), topic.partition(1)]).unwrap();
    assert_eq!(consumer.assignment(), []);
}

#[test]
fn a_static_member_that_closes_has_its_partitions_back() {
    let topic = Topic::new("static", 2);
    let group = unique("group");
    let member = |instance| {
        let options = ConsumerOptions { instance_id: Some(instance), ..ConsumerOptions::new(&group) };
        let consumer = Consumer::new(&connection(), &options).unwrap();
        consumer.subscribe(&[&topic.name]).unwrap();
        consumer
    };
    let assigned = |consumer: &mut Consumer| {
        let partitions = poll_until(consumer, |c| match c.poll(Duration::from_millis(100)) {
            Polled::Assign(partitions) => Some(partitions),
            _ => None,
        });
        let positions: Vec<_> = partitions.iter().map(|p| (p.clone(), Position(0))).collect();
        consumer.assign(&positions).unwrap();
        partitions
    };
    let mut first = member("a");
    assert_eq!(assigned(&mut first).len(), 2);
    let generation = first.group().metadata().unwrap().generation();
    let start = Instant::now();
    first.close(SECONDS);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    let mut again = member("a");
    assert_eq!(assigned(&mut again).len(), 2);
    // It had not left: the group did not even change its generation.
    assert_eq!(again.group().metadata().unwrap().generation(), generation);

    // A twin takes the name over; the older one learns that it is fenced.
    let mut twin = member("a");
    assigned(&mut twin);
    let error = poll_until(&mut again, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Failed(error) => Some(error),
        _ => None,
    });
    assert_eq!(error.disposition(), Disposition::Fatal(Exit::Twin), "{error}");
}

#[test]
fn the_new_group_protocol_works_too() {
    let topic = Topic::new("kip-848", 1);
    let mut connection = connection();
    connection.properties.insert("group.protocol".into(), "consumer".into());
    let group = unique("group");
    let mut consumer = Consumer::new(&connection, &ConsumerOptions::new(&group)).unwrap();
    consumer.subscribe(&[&topic.name]).unwrap();
    let partitions = poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Assign(partitions) if !partitions.is_empty() => Some(partitions),
        Polled::Assign(_) => {
            c.assign(&[]).unwrap();
            None
        }
        _ => None,
    });
    assert_eq!(partitions, [topic.partition(0)]);
    assert!(consumer.is_cooperative());
    assert_eq!(consumer.committed(&partitions, SECONDS).unwrap(), [(topic.partition(0), Ok(None))]);
    consumer.assign(&[(topic.partition(0), Position(0))]).unwrap();
    let producer = transactional(&unique("id"), &[topic.target()]);
    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"x"), &[]);
    let metadata = consumer.group().metadata().unwrap();
    assert!(metadata.is_member());
    producer.send_offsets(&[(topic.partition(0), Position(1))], &metadata, SECONDS).unwrap();
    producer.commit(SECONDS).unwrap();
    assert_eq!(consumer.committed(&partitions, SECONDS).unwrap(), [(topic.partition(0), Ok(Some(Position(1))))]);
    consumer.close(SECONDS);
}

#[test]
fn under_the_new_protocol_it_is_the_newcomer_that_is_refused() {
    let topic = Topic::new("kip-848-twin", 1);
    let mut connection = connection();
    connection.properties.insert("group.protocol".into(), "consumer".into());
    let group = unique("group");
    let options = ConsumerOptions { instance_id: Some("a"), ..ConsumerOptions::new(&group) };
    let join = || {
        let consumer = Consumer::new(&connection, &options).unwrap();
        consumer.subscribe(&[&topic.name]).unwrap();
        consumer
    };
    let mut old = join();
    poll_until(&mut old, |c| matches!(c.poll(Duration::from_millis(100)), Polled::Assign(_)).then_some(()));
    let error = poll_until(&mut join(), |c| match c.poll(Duration::from_millis(100)) {
        Polled::Failed(error) => Some(error),
        _ => None,
    });
    assert!(error.is_unreleased_instance() && error.is_fatal(), "{error:?}");
    assert_eq!(error.disposition(), Disposition::Rebuild);
}

#[test]
fn positions_are_committed_without_a_transaction() {
    let topic = Topic::new("plain-commit", 1);
    let reader = Reader::new(&topic, &[(0, 0)]);
    let positions = [(topic.partition(0), Position(5))];
    reader.consumer.group().commit(&positions, SECONDS).unwrap();
    assert_eq!(
        reader.consumer.committed(&[topic.partition(0)], SECONDS).unwrap(),
        [(topic.partition(0), Ok(Some(Position(5))))]
    );
    let handle = reader.consumer.group();
    reader.consumer.close(SECONDS);
    assert!(handle.commit(&positions, SECONDS).unwrap_err().to_string().contains("closed"));
}

#[test]
fn a_paused_partition_delivers_nothing_until_it_is_resumed() {
    let topic = Topic::new("pause", 1);
    let producer = plain(&[topic.target()]);
    let reader = Reader::new(&topic, &[(0, 0)]);
    reader.consumer.pause(&[topic.partition(0)]);
    send(&producer, 0, None, Some(b"x"), &[]);
    producer.flush(SECONDS).unwrap();
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        assert!(matches!(reader.consumer.poll(Duration::from_millis(50)), Polled::Nothing));
    }
    reader.consumer.resume(&[topic.partition(0)]);
    assert_eq!(reader.values(1), ["x"]);
}

#[test]
fn the_end_of_a_partition_is_reported_when_asked_for() {
    let topic = Topic::new("eof", 1);
    let group = unique("group");
    let options = ConsumerOptions { end_of_partition: true, ..ConsumerOptions::new(&group) };
    let mut consumer = Consumer::new(&connection(), &options).unwrap();
    consumer.subscribe(&[&topic.name]).unwrap();
    let end = poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Assign(_) => {
            c.assign(&[(topic.partition(0), Position(0))]).unwrap();
            None
        }
        Polled::EndOfPartition(partition) => Some(partition),
        _ => None,
    });
    assert_eq!(end, topic.partition(0));
}
