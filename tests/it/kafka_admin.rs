//! Topics, positions in the log and clusters that do not answer, on a real broker.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use semel::chunk::Target;
use semel::error::{Disposition, Exit};
use semel::kafka::{Admin, At, Connection, Consumer, ConsumerOptions, Isolation, Polled, Producer, ProducerOptions};
use semel::record::Position;

use crate::kafka_support::*;
use crate::support::unique;

#[test]
fn a_transaction_timeout_above_the_brokers_limit_is_refused_by_name() {
    if !online() {
        return;
    }
    assert_eq!(admin().broker_config("transaction.max.timeout.ms").unwrap().as_deref(), Some("900000"));
    let options = ProducerOptions { transaction_timeout: Duration::from_secs(1200), ..options(Some(&unique("id"))) };
    let producer = Producer::new(&connection(), &options, &[]).unwrap();
    let error = producer.init(SECONDS).unwrap_err();
    assert_eq!(error.disposition(), Disposition::Fatal(Exit::Refused));
    let text = error.to_string();
    assert!(text.contains("transaction.timeout.ms 1200000"), "{text}");
    assert!(text.contains("transaction.max.timeout.ms"), "{text}");
}

#[test]
fn topics_are_made_described_and_deleted() {
    if !online() {
        return;
    }
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
    if !online() {
        return;
    }
    let config = BTreeMap::from([("retention.ms".to_owned(), "soon".to_owned())]);
    let error = admin().create_topic(&unique("bad"), 1, 1, &config).unwrap_err();
    assert_eq!(error.disposition(), Disposition::Fatal(Exit::Refused));
    assert!(error.to_string().contains("retention.ms"), "{error}");
}

#[test]
fn positions_in_the_log_are_found_by_time_and_records_deleted() {
    if !online() {
        return;
    }
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
fn a_partition_that_cannot_be_told_does_not_hide_the_others() {
    if !online() {
        return;
    }
    let topic = Topic::new("some", 2);
    let asked = [0, 7, 1].map(|partition| (topic.partition(partition), At::Latest));
    let error = topic.admin.offsets(&asked, Isolation::ReadUncommitted).unwrap_err();
    assert!(error.is_unknown_topic(), "{error}");
    let told = topic.admin.within(Duration::from_secs(2)).each_offset(&asked, Isolation::ReadUncommitted);
    let told: BTreeMap<i32, _> = told.into_iter().map(|(partition, at)| (partition.partition, at)).collect();
    assert_eq!(told.keys().copied().collect::<Vec<_>>(), [0, 1, 7]);
    assert_eq!((told[&0].as_ref().unwrap(), told[&1].as_ref().unwrap()), (&Some(Position(0)), &Some(Position(0))));
    let error = told[&7].as_ref().unwrap_err();
    assert!(error.to_string().contains(&topic.partition(7).to_string()), "{error}");
}

#[test]
fn an_open_transaction_holds_the_stable_end_back() {
    if !online() {
        return;
    }
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
    if !online() {
        return;
    }
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
    if !online() {
        return;
    }
    let mut connection = connection();
    connection.properties.insert("security.protocol".into(), "ssl".into());
    let admin = Admin::new(&connection, SECONDS).unwrap();
    let text = admin.ping(Duration::from_secs(2)).unwrap_err().to_string();
    assert!(text.contains("SSL") && text.contains("security.protocol"), "{text}");
}

#[test]
fn clients_of_an_unreachable_broker_end_within_a_bound() {
    if !online() {
        return;
    }
    let lost = Connection::new("127.0.0.1:1", "lost");
    let start = Instant::now();
    let consumer = Consumer::new(&lost, &ConsumerOptions::new("g")).unwrap();
    consumer.subscribe(&["t"]).unwrap();
    assert!(matches!(consumer.poll(Duration::from_millis(300)), Polled::Nothing));
    consumer.close(Duration::from_secs(1));
    let targets = [Target {
        topic: "t".into(),
        partitions: 1,
        max_message_bytes: 1000,
        compacted: false,
        timestamp_before_max_ms: i64::MAX,
        timestamp_after_max_ms: i64::MAX,
    }];
    let producer = Producer::new(&lost, &options(None), &targets).unwrap();
    send(&producer, 0, None, Some(b"x"), &[]);
    assert_eq!(producer.flush(Duration::from_millis(100)).unwrap_err().disposition(), Disposition::Retry);
    drop(producer);
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
}
