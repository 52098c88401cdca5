//! Records and transactions through the Kafka module, on a real broker.

use std::ops::ControlFlow;
use std::time::{Duration, Instant, UNIX_EPOCH};

use semel::cluster::Server;
use semel::commit::metadata::TopicIds;
use semel::error::{Disposition, Exit};
use semel::kafka::{
    Admin, Connection, Consumer, ConsumerOptions, Error, Isolation, Polled, Producer, ProducerOptions, Range,
};
use semel::record::{Input, Position, TopicPartition};

use crate::kafka_support::*;
use crate::support::{self, eventually, unique};

#[test]
fn a_record_comes_back_as_it_went_in() {
    if !online() {
        return;
    }
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
    if !online() {
        return;
    }
    let topic = Topic::new("times", 1);
    let producer = plain(&[topic.target()]);
    let before = UNIX_EPOCH.elapsed().unwrap().as_millis() as i64;
    for timestamp in [Some(1), Some(-60_000), None] {
        send_at(&producer, 0, timestamp, None, Some(b"x"), &[]);
    }
    producer.flush(SECONDS).unwrap();
    assert_eq!(producer.failed_deliveries(), None);
    let times: Vec<_> = Reader::new(&topic, &[(0, 0)]).read(3).into_iter().map(|r| r.timestamp).collect();
    assert_eq!(times[..2], [Some(1), Some(-60_000)]);
    let after = UNIX_EPOCH.elapsed().unwrap().as_millis() as i64;
    assert!((before..=after).contains(&times[2].unwrap()), "{times:?}");
}

#[test]
fn an_aborted_transaction_is_invisible_and_the_position_steps_over_it() {
    if !online() {
        return;
    }
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
    eventually(SECONDS, "the position is after the last marker", || {
        let _ = reader.consumer.poll(Duration::from_millis(10));
        reader.consumer.position(&[topic.partition(0)])[0].1 == Some(Position(4))
    });
    eventually(SECONDS, "the log is stable", || topic.end(Isolation::ReadCommitted) == 4);
    assert_eq!(topic.end(Isolation::ReadUncommitted), 4);
    assert_eq!(Reader::with(&topic, &[(0, 0)], false).values(2), ["aborted", "committed"]);
}

/// What was aborted is fetched and never delivered. A restore that began again whenever nothing came for a while would not get
/// past it.
#[test]
fn a_long_aborted_stretch_is_read_over_however_long_it_takes() {
    if !online() {
        return;
    }
    let read = |topic: &Topic, ms_a_fetch: &str, idle: &mut dyn FnMut(Error) -> Result<(), Error>| {
        // Little a fetch; where nothing comes of it, the client asks for twice as much.
        let slow =
            [("max.partition.fetch.bytes", "1"), ("fetch.min.bytes", "1000000"), ("fetch.wait.max.ms", ms_a_fetch)];
        let properties = slow.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let connection = Connection { properties, ..connection() };
        let mut values = Vec::new();
        let to = Position(topic.end(Isolation::ReadUncommitted));
        let range = Range { partition: topic.partition(0), from: Position(0), to };
        let take = |input: &Input<'_>| {
            values.extend(input.value.map(<[u8]>::to_vec));
            Ok(ControlFlow::Continue(()))
        };
        let read = semel::kafka::Reader::new(&connection, Duration::from_secs(1)).unwrap().read_on(&range, take, idle);
        read.map(|()| values)
    };
    let many = Topic::new("aborted-many", 1);
    let one = Topic::new("aborted-one", 1);
    let id = unique("id");
    for (topic, transactions, batches) in [(&many, 60, 1), (&one, 1, 100)] {
        let producer = transactional(&id, &[topic.target()]);
        for _ in 0..transactions {
            producer.begin().unwrap();
            for _ in 0..batches {
                send(&producer, 0, None, Some(b"aborted"), &[]);
                producer.flush(SECONDS).unwrap();
            }
            producer.abort(SECONDS).unwrap();
        }
        producer.begin().unwrap();
        send(&producer, 0, None, Some(b"committed"), &[]);
        producer.commit(SECONDS).unwrap();
    }
    // Each of many markers is something that came.
    assert_eq!(read(&many, "20", &mut Err).unwrap(), [b"committed"]);
    // The one transaction has a marker at its end alone.
    assert!(read(&one, "200", &mut Err).unwrap_err().is_timeout());
    let mut waited = 0;
    let mut wait = |_| {
        waited += 1;
        Ok(())
    };
    assert_eq!(read(&one, "200", &mut wait).unwrap(), [b"committed"]);
    assert!(waited > 0);
}

#[test]
fn positions_are_committed_in_the_transaction_and_held_while_it_is_open() {
    if !online() {
        return;
    }
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
    producer
        .send_offsets(&[(partition.clone(), Position(7))], &TopicIds::default(), &group.metadata().unwrap(), SECONDS)
        .unwrap();
    let held = committed(Duration::from_millis(200)).unwrap_err();
    assert!(held.to_string().contains("an open transaction may hold it"), "{held}");
    assert_eq!(held.disposition(), Disposition::Retry);
    producer.commit(SECONDS).unwrap();
    assert_eq!(committed(SECONDS), Ok(Some(Position(7))));

    producer.begin().unwrap();
    producer
        .send_offsets(&[(partition.clone(), Position(9))], &TopicIds::default(), &group.metadata().unwrap(), SECONDS)
        .unwrap();
    producer.abort(SECONDS).unwrap();
    assert_eq!(committed(SECONDS), Ok(Some(Position(7))));
}

#[test]
fn a_seek_goes_back_and_drops_what_was_fetched() {
    if !online() {
        return;
    }
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
    if !online() {
        return;
    }
    let topic = Topic::new("early-seek", 1);
    let producer = plain(&[topic.target()]);
    for value in ["a", "b", "c"] {
        send(&producer, 0, None, Some(value.as_bytes()), &[]);
    }
    producer.flush(SECONDS).unwrap();
    let reader = Reader::new(&topic, &[(0, 0)]);
    eventually(SECONDS, "the seek is done", || {
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
fn a_commit_takes_milliseconds() {
    if !online() {
        return;
    }
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
            producer
                .send_offsets(
                    &[(topic.partition(0), Position(i))],
                    &TopicIds::default(),
                    &group.metadata().unwrap(),
                    SECONDS,
                )
                .unwrap();
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
    if !online() {
        return;
    }
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
    if !online() {
        return;
    }
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
    if !online() {
        return;
    }
    let topic = Topic::new("client-limit", 1);
    let producer = plain(&[topic.target()]);
    let chunk = chunk(0, None, None, Some(&vec![b'x'; 2_000_000]), &[]);
    let error = producer.produce(&chunk.iter().next().unwrap()).unwrap_err();
    assert_eq!(error.disposition(), Disposition::Reject { reason: "too-large" });
    assert_eq!((error.topic(), error.partition()), (Some(&*topic.name), Some(0)));
}

#[test]
fn batches_fit_into_a_small_topic() {
    if !online() {
        return;
    }
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
    if !online() {
        return;
    }
    let topic = Topic::new("full", 1);
    let producer = plain(&[topic.target()]);
    let chunk = chunk(0, None, None, Some(&[b'x'; 100_000]), &[(b"h", Some(b"v"))]);
    let output = chunk.iter().next().unwrap();
    let mut full = 0;
    for _ in 0..100 {
        eventually(SECONDS, "there is room", || match producer.produce(&output) {
            Ok(()) => true,
            Err(error) => {
                assert!(error.is_queue_full(), "{error}");
                assert_eq!(error.disposition(), Disposition::Retry);
                full += 1;
                false
            }
        });
    }
    assert!(full > 0);
    producer.flush(SECONDS).unwrap();
    assert_eq!(producer.in_flight(), 0);
    assert_eq!(topic.end(Isolation::ReadUncommitted), 100);
}

#[test]
fn a_newcomer_fences_the_producer_before_it() {
    if !online() {
        return;
    }
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
fn a_position_outside_the_log_is_named() {
    if !online() {
        return;
    }
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
fn a_broker_restart_is_passed_through() {
    if !online() {
        return;
    }
    let cluster = support::private_server(Server::Kafka, &[]);
    let connection = Connection::new(&*cluster.brokers, "restart");
    let admin = Admin::new(&connection, SECONDS).unwrap();
    admin.create_topic("t", 1, 1, &Default::default()).unwrap();
    let target = admin.topic("t").unwrap().unwrap().target("t");
    let minute = Duration::from_secs(60);
    let patient = ProducerOptions { transaction_timeout: minute, ..options(Some("id")) };
    let producer = Producer::new(&connection, &patient, &[target]).unwrap();
    producer.init(SECONDS).unwrap();
    let patient = ConsumerOptions { session_timeout: minute, ..ConsumerOptions::new("g") };
    let mut consumer = Consumer::new(&connection, &patient).unwrap();
    consumer.subscribe(&["t"]).unwrap();
    poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(50)) {
        Polled::Assign(_) => c.assign(&[(TopicPartition::new("t", 0), Position(0))]).ok(),
        _ => None,
    });

    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"before"), &[]);
    producer.flush(SECONDS).unwrap();
    cluster.kill_kafka().unwrap();
    send(&producer, 0, None, Some(b"during"), &[]);
    // The client mends its connection by itself: nothing but silence until then.
    assert!(matches!(consumer.poll(Duration::from_millis(500)), Polled::Nothing));
    cluster.start_kafka().unwrap();
    let commit = || match producer.commit(Duration::from_secs(1)) {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.disposition(), Disposition::Retry, "{error:?}");
            false
        }
    };
    eventually(minute, "the transaction is committed", commit);

    let mut values = Vec::new();
    eventually(minute, "both records are read", || {
        match consumer.poll(Duration::from_millis(50)) {
            Polled::Record(message) => values.push(message.value().unwrap().to_vec()),
            Polled::Revoke { .. } | Polled::Failed(_) => panic!("the session outlives a restart"),
            _ => {}
        }
        values.len() == 2
    });
    assert_eq!(values, [&b"before"[..], b"during"]);
}
