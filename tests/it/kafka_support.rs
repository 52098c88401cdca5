//! What the Kafka suites share: topics of their own, records, a reader that joins a group.
#![allow(dead_code, reason = "a helper may be used by no suite of a given build")]

use std::time::{Duration, Instant};

use semel::chunk::{Chunk, Target, TargetId};
use semel::kafka::{
    Admin, At, Connection, Consumer, ConsumerOptions, Isolation, LINGER, Polled, Producer, ProducerOptions,
};
use semel::record::{Position, TopicPartition};

use crate::support::{self, unique};

pub const SECONDS: Duration = Duration::from_secs(10);

/// False when the test that calls this is to be left out.
pub fn online() -> bool {
    support::online(std::thread::current().name().unwrap_or_default())
}

pub fn connection() -> Connection {
    Connection::new(&*support::cluster().brokers, "kafka-tests")
}

pub fn admin() -> Admin {
    Admin::new(&connection(), SECONDS).unwrap()
}

/// A topic of its own, gone when the test is.
pub struct Topic {
    pub name: String,
    pub admin: Admin,
}

impl Topic {
    pub fn new(name: &str, partitions: i32) -> Topic {
        Topic::with(name, partitions, &[])
    }

    pub fn with(name: &str, partitions: i32, config: &[(&str, &str)]) -> Topic {
        let topic = Topic { name: unique(name), admin: admin() };
        let config = config.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        assert!(topic.admin.create_topic(&topic.name, partitions, 1, &config).unwrap());
        topic
    }

    pub fn partition(&self, partition: i32) -> TopicPartition {
        TopicPartition::new(&*self.name, partition)
    }

    pub fn target(&self) -> Target {
        self.admin.topic(&self.name).unwrap().unwrap().target(&*self.name)
    }

    pub fn end(&self, isolation: Isolation) -> i64 {
        self.admin.offsets(&[(self.partition(0), At::Latest)], isolation).unwrap()[0].1.unwrap().0
    }
}

impl Drop for Topic {
    fn drop(&mut self) {
        let _ = self.admin.delete_topics(&[&self.name]);
    }
}

/// An initialised transactional producer.
pub fn transactional(id: &str, targets: &[Target]) -> Producer {
    let producer = Producer::new(&connection(), &options(Some(id)), targets).unwrap();
    producer.init(SECONDS).unwrap();
    producer
}

pub fn plain(targets: &[Target]) -> Producer {
    Producer::new(&connection(), &options(None), targets).unwrap()
}

pub fn options(transactional_id: Option<&str>) -> ProducerOptions {
    ProducerOptions {
        transactional_id: transactional_id.map(str::to_owned),
        transaction_timeout: Duration::from_secs(10),
        linger: LINGER,
        queue_bytes: 1 << 20,
    }
}

pub type Header<'a> = (&'a [u8], Option<&'a [u8]>);

/// A record as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub partition: i32,
    pub offset: i64,
    pub timestamp: Option<i64>,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

pub fn send(producer: &Producer, partition: i32, key: Option<&[u8]>, value: Option<&[u8]>, headers: &[Header<'_>]) {
    send_at(producer, partition, None, key, value, headers);
}

pub fn send_at(
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

pub fn chunk(
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
pub struct Reader {
    pub consumer: Consumer,
    pub start: Vec<(TopicPartition, Position)>,
}

impl Reader {
    pub fn new(topic: &Topic, start: &[(i32, i64)]) -> Reader {
        Reader::with(topic, start, true)
    }

    pub fn with(topic: &Topic, start: &[(i32, i64)], read_committed: bool) -> Reader {
        let group = unique("group");
        let options = ConsumerOptions { read_committed, ..ConsumerOptions::new(&group) };
        let consumer = Consumer::new(&connection(), &options).unwrap();
        consumer.subscribe(&[&topic.name]).unwrap();
        let start = start.iter().map(|(p, at)| (topic.partition(*p), Position(*at))).collect();
        let mut reader = Reader { consumer, start };
        reader.join();
        reader
    }

    pub fn join(&mut self) {
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

    pub fn read(&self, count: usize) -> Vec<Record> {
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

    pub fn values(&self, count: usize) -> Vec<String> {
        self.read(count).into_iter().map(|r| String::from_utf8(r.value.unwrap()).unwrap()).collect()
    }
}

/// Polls until `done` answers; it does the polling.
pub fn poll_until<T>(consumer: &mut Consumer, mut done: impl FnMut(&mut Consumer) -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        assert!(Instant::now() < deadline, "never");
        if let Some(done) = done(consumer) {
            return done;
        }
    }
}
