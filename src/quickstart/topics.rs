//! Topics of the quick start and of drills: must be empty, are made, filled and read back.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use super::compare::DeadLetter;
use crate::chunk::{Chunk, TargetId};
use crate::error::{Exit, Failure};
use crate::kafka::{
    Admin, At, Connection, Consumer, ConsumerOptions, Error, Isolation, LINGER, Polled, Producer, ProducerOptions,
};
use crate::record::{Input, Position, TopicPartition};

const CHUNK_BYTES: usize = 64 * 1024;
const QUEUE_BYTES: u64 = 16 << 20;
/// A broker that takes or gives nothing for this long is gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where a group stands in a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    pub group: String,
    pub partition: TopicPartition,
    /// The committed position; none where nothing was committed.
    pub position: Option<Position>,
    /// The end of the log, transaction markers included.
    pub end: Position,
}

impl Standing {
    /// Everything in the partition is behind the position.
    pub fn is_at_end(&self) -> bool {
        self.position.map_or(0, |p| p.0) == self.end.0
    }
}

/// A record to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Sent<'a> {
    pub partition: i32,
    pub key: Option<&'a [u8]>,
    pub value: Option<&'a [u8]>,
    pub headers: &'a [(String, Option<Vec<u8>>)],
    /// None: now.
    pub timestamp: Option<i64>,
}

/// A broker's topics.
pub struct Topics {
    pub connection: Connection,
    pub admin: Admin,
}

impl Topics {
    /// Blocks until the broker answers, for 8 seconds at most.
    pub fn connect(connection: Connection) -> Result<Topics, Failure> {
        let admin = Admin::new(&connection, Duration::from_secs(10)).map_err(|e| Failure::refused(e.to_string()))?;
        admin.ping(Duration::from_secs(8)).map_err(|e| Failure::unreachable(e.to_string()))?;
        Ok(Topics { connection, admin })
    }

    /// Refuses topics that hold records and groups that have positions in them: the comparison would be about
    /// somebody else's data.
    pub fn refuse_used(&self, topics: &[&str], groups: &[&str]) -> Result<(), Failure> {
        let refuse = |what: String| {
            let cure =
                "the quick start needs fresh topics; delete it, or unset KAFKA_BROKERS to have a broker brought up";
            Failure::refused(format!("{what} on {}: {cure}", self.connection.brokers))
        };
        let partitions = self.partitions(topics)?;
        for (partition, end) in self.ends(&partitions, Isolation::ReadUncommitted)? {
            if end.0 > 0 {
                return Err(refuse(format!("topic {} holds, or has held, records", partition.topic)));
            }
        }
        for group in groups {
            let positions = self.admin.committed(group, &partitions, false).map_err(failed)?;
            if positions.into_iter().any(|(_, position)| matches!(position, Ok(Some(_)))) {
                return Err(refuse(format!("consumer group {group} has positions of an earlier run")));
            }
        }
        Ok(())
    }

    /// Makes a topic, if it is not there.
    pub fn make(&self, topic: &str, partitions: i32) -> Result<(), Failure> {
        self.admin.create_topic(topic, partitions, -1, &BTreeMap::new()).map(drop).map_err(failed)
    }

    /// Sends the records in order and waits until the broker has them all. Stops early, without error, when `stop` is
    /// set.
    pub fn produce<'r>(
        &self,
        topic: &str,
        records: impl IntoIterator<Item = Sent<'r>>,
        bar: &ProgressBar,
        stop: &AtomicBool,
    ) -> Result<(), Failure> {
        let info = self.admin.topic(topic).map_err(failed)?;
        let info = info.ok_or_else(|| Failure::unreachable(format!("topic {topic} was made but is not there")))?;
        let options = ProducerOptions {
            transactional_id: None,
            transaction_timeout: Duration::from_secs(10),
            linger: LINGER,
            queue_bytes: QUEUE_BYTES,
        };
        let producer = Producer::new(&self.connection, &options, &[info.target(topic)]).map_err(failed)?;
        let mut chunk = Chunk::default();
        for record in records {
            let mut output = chunk.push(TargetId(0));
            output.partition(record.partition).timestamp(record.timestamp).key(record.key).value(record.value);
            for (name, value) in record.headers {
                output.header(name.as_bytes(), value.as_deref());
            }
            output.finish();
            if chunk.bytes_len() >= CHUNK_BYTES {
                send(&producer, &chunk, bar)?;
                chunk.clear();
            }
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
        send(&producer, &chunk, bar)?;
        flush(&producer)
    }

    /// Values of the topic, as a reader with `isolation.level=read_committed` sees them, in the order of each
    /// partition. Blocks until every partition is read to its end.
    pub fn read_outputs(&self, topic: &str) -> Result<Vec<Vec<u8>>, Failure> {
        let mut values = Vec::new();
        self.read(topic, |message| values.push(message.value.unwrap_or_default().to_vec()))?;
        Ok(values)
    }

    /// As [`Topics::read_outputs`], with what the headers say was wrong.
    pub fn read_dead_letters(&self, topic: &str) -> Result<Vec<DeadLetter>, Failure> {
        let mut letters = Vec::new();
        self.read(topic, |message| {
            let header = |name: &str| {
                let value = message.headers.last(name).flatten().unwrap_or_default();
                String::from_utf8_lossy(value).into_owned()
            };
            letters.push(DeadLetter {
                node: header("semel-error-node"),
                reason: header("semel-error-reason"),
                value: message.value.unwrap_or_default().to_vec(),
            });
        })?;
        Ok(letters)
    }

    /// Reads a topic to its end, as a reader with `isolation.level=read_committed`. Blocks.
    pub fn read(&self, topic: &str, mut record: impl FnMut(Input<'_>)) -> Result<(), Failure> {
        let partitions = self.partitions(&[topic])?;
        self.await_markers(&partitions)?;
        let group = format!("{}-check", self.connection.client_id);
        let options = ConsumerOptions { end_of_partition: true, ..ConsumerOptions::new(&group) };
        let mut consumer = Consumer::new(&self.connection, &options).map_err(failed)?;
        let starts: Vec<_> = partitions.iter().map(|partition| (partition.clone(), Position(0))).collect();
        consumer.assign(&starts).map_err(failed)?;
        let mut unread = partitions;
        let mut moved = Instant::now();
        while !unread.is_empty() {
            match consumer.poll(Duration::from_millis(100)) {
                Polled::Record(message) => {
                    record(message.to_input(Vec::new()));
                    moved = Instant::now();
                }
                Polled::EndOfPartition(partition, _) => unread.retain(|p| *p != partition),
                Polled::Failed(error) => return Err(failed(error)),
                Polled::Nothing | Polled::Assign(_) | Polled::Revoke { .. } => {}
            }
            if moved.elapsed() > PATIENCE {
                return Err(Failure::unreachable(format!("the broker delivers nothing more of topic {topic}")));
            }
        }
        Ok(())
    }

    /// A commit is acknowledged before its markers are written, and until then a reader's end is before them.
    fn await_markers(&self, partitions: &[TopicPartition]) -> Result<(), Failure> {
        let deadline = Instant::now() + PATIENCE;
        while self.ends(partitions, Isolation::ReadCommitted)? != self.ends(partitions, Isolation::ReadUncommitted)? {
            if Instant::now() > deadline {
                return Err(Failure::unreachable("a transaction is still open after the job has ended"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Where a group stands in each partition of a topic.
    pub fn standings(&self, group: &str, topic: &str) -> Result<Vec<Standing>, Failure> {
        let partitions = self.partitions(&[topic])?;
        let ends: BTreeMap<_, _> = self.ends(&partitions, Isolation::ReadUncommitted)?.into_iter().collect();
        let committed = self.admin.committed(group, &partitions, true).map_err(failed)?;
        let mut standings = Vec::new();
        for (partition, position) in committed {
            let position = position.map_err(failed)?;
            standings.push(Standing { group: group.to_owned(), end: ends[&partition], partition, position });
        }
        standings.sort_by(|a, b| a.partition.cmp(&b.partition));
        Ok(standings)
    }

    /// The partitions of those topics that exist.
    pub fn partitions(&self, topics: &[&str]) -> Result<Vec<TopicPartition>, Failure> {
        let infos = self.admin.topics(topics).map_err(failed)?;
        let of = |(topic, info): (String, Option<crate::kafka::TopicInfo>)| {
            let count = info.map_or(0, |info| info.partitions);
            (0..count).map(move |partition| TopicPartition::new(topic.as_str(), partition)).collect::<Vec<_>>()
        };
        Ok(infos.into_iter().flat_map(of).collect())
    }

    fn ends(
        &self,
        partitions: &[TopicPartition],
        isolation: Isolation,
    ) -> Result<Vec<(TopicPartition, Position)>, Failure> {
        let asked: Vec<_> = partitions.iter().map(|partition| (partition.clone(), At::Latest)).collect();
        let ends = self.admin.offsets(&asked, isolation).map_err(failed)?;
        Ok(ends.into_iter().map(|(partition, end)| (partition, end.unwrap_or(Position(0)))).collect())
    }
}

fn send(producer: &Producer, chunk: &Chunk, bar: &ProgressBar) -> Result<(), Failure> {
    for output in chunk.iter() {
        let since = Instant::now();
        while let Err(error) = producer.produce(&output) {
            if !error.is_queue_full() || since.elapsed() > PATIENCE {
                return Err(failed(error));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    bar.inc(chunk.len() as u64);
    Ok(())
}

fn flush(producer: &Producer) -> Result<(), Failure> {
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = producer.flush(Duration::from_secs(1)) {
        if !error.is_timeout() || Instant::now() > deadline {
            return Err(failed(error));
        }
    }
    producer.failed_deliveries().map_or(Ok(()), |error| Err(failed(error)))
}

fn failed(error: Error) -> Failure {
    Failure::new(Exit::Unreachable, error.to_string())
}
