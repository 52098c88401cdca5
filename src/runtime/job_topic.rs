//! What a job remembers of itself in a compacted topic of one partition, `<name>.job`: which file ran, how many partitions
//! its topics had at first, and which partitions it ever started. Positions alone cannot tell a partition that is new from
//! one whose position was lost.
//!
//! | key | value: a format byte, then JSON |
//! |---|---|
//! | `plan` | `{fingerprint, stages: {stage: [topic]}}` |
//! | `topic/STAGE/TOPIC` | `{id, partitions}` as they were at first |
//! | `started/STAGE/TOPIC/PARTITION` | `{id}` of the topic, once the partition's start was committed |
//! | `store/STAGE/NODE` | `{meaning, left}` of the node's state; `left` once the job ran without the node |

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use uuid::Uuid;

use crate::chunk::{Chunk, TargetId};
use crate::error::Failure;
use crate::kafka::{Admin, Connection, Error, Isolation, LINGER, Producer, ProducerOptions, Reader};
use crate::record::{Input, TopicPartition};
use crate::runtime::preflight::asked;
use crate::topology::meaning::Meaning;
use crate::topology::plan::{CHANGELOG, Plan};

/// The format byte.
const FORMAT: u8 = b'1';
const PATIENCE: Duration = Duration::from_secs(10);
const SLICE: Duration = Duration::from_secs(1);

/// What was remembered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The SHA-256 of the file that ran last.
    pub fingerprint: Option<String>,
    /// By stage and topic: the topic's id and its partitions when the stage first read it.
    pub topics: BTreeMap<(String, String), (Uuid, i32)>,
    /// By stage, topic and partition: the topic's id when the partition's start was committed.
    pub started: BTreeMap<(String, String, i32), Uuid>,
    /// By stage and node.
    pub stores: BTreeMap<(String, String), Kept>,
}

/// What the state of a node was when the job last ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    pub meaning: Meaning,
    /// The job has run without the node since: the state lacks what passed meanwhile.
    pub left: bool,
}

/// Something to remember; without a value it is forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    key: String,
    value: Option<Value>,
}

impl Note {
    pub fn plan(plan: &Plan) -> Note {
        let stages: BTreeMap<&str, Vec<String>> =
            plan.stages.iter().map(|stage| (stage.name.as_str(), plan.reads(stage))).collect();
        let value = json!({ "fingerprint": plan.topology.fingerprint, "stages": stages });
        Note { key: "plan".to_owned(), value: Some(value) }
    }

    pub fn topic(stage: &str, topic: &str, id: Uuid, partitions: i32) -> Note {
        let value = json!({ "id": id.to_string(), "partitions": partitions });
        Note { key: format!("topic/{stage}/{topic}"), value: Some(value) }
    }

    /// That a topic is not the stage's any more.
    pub fn topic_forgotten(stage: &str, topic: &str) -> Note {
        Note { key: format!("topic/{stage}/{topic}"), value: None }
    }

    pub fn started(stage: &str, partition: &TopicPartition, id: Uuid) -> Note {
        let value = json!({ "id": id.to_string() });
        Note { key: format!("started/{stage}/{}/{}", partition.topic, partition.partition), value: Some(value) }
    }

    pub fn store(stage: &str, node: &str, kept: &Kept) -> Note {
        let value = json!({ "meaning": kept.meaning, "left": kept.left });
        Note { key: format!("store/{stage}/{node}"), value: Some(value) }
    }

    /// That a node has no state.
    pub fn store_forgotten(stage: &str, node: &str) -> Note {
        Note { key: format!("store/{stage}/{node}"), value: None }
    }

    /// That a partition was never started.
    pub fn forgotten(stage: &str, partition: &TopicPartition) -> Note {
        Note { key: format!("started/{stage}/{}/{}", partition.topic, partition.partition), value: None }
    }
}

impl Memory {
    /// Takes one record of the topic; false for a value that a newer version wrote.
    fn take(&mut self, key: &str, value: Option<&[u8]>) -> bool {
        let value: Value = match value.map(|value| value.split_first()) {
            None => Value::Null,
            Some(Some((&FORMAT, json))) => serde_json::from_slice(json).unwrap_or_default(),
            Some(_) => return false,
        };
        let id = || Uuid::try_parse(value["id"].as_str()?).ok();
        let parts: Vec<&str> = key.split('/').collect();
        match parts[..] {
            ["plan"] => self.fingerprint = value["fingerprint"].as_str().map(str::to_owned),
            ["topic", stage, topic] => {
                let key = (stage.to_owned(), topic.to_owned());
                match (id(), value["partitions"].as_i64()) {
                    (Some(id), Some(partitions)) => drop(self.topics.insert(key, (id, partitions as i32))),
                    _ => drop(self.topics.remove(&key)),
                }
            }
            ["started", stage, topic, partition] => {
                let key = (stage.to_owned(), topic.to_owned(), partition.parse().unwrap_or(-1));
                match id() {
                    Some(id) => drop(self.started.insert(key, id)),
                    None => drop(self.started.remove(&key)),
                }
            }
            ["store", stage, node] => {
                let key = (stage.to_owned(), node.to_owned());
                let left = value["left"].as_bool().unwrap_or(false);
                match serde_json::from_value(value["meaning"].clone()) {
                    Ok(meaning) => drop(self.stores.insert(key, Kept { meaning, left })),
                    Err(_) => drop(self.stores.remove(&key)),
                }
            }
            _ => {}
        }
        true
    }

    /// The topic's id when the partition was started; `None` if it never was.
    pub fn started(&self, stage: &str, partition: &TopicPartition) -> Option<Uuid> {
        self.started.get(&(stage.to_owned(), partition.topic.to_string(), partition.partition)).copied()
    }

    /// The changelogs that a stage had when it last ran, with their ids.
    pub fn changelogs<'m>(&'m self, stage: &'m str) -> impl Iterator<Item = (&'m str, Uuid)> {
        // `<stage>.<node>.changelog`; a source's topic may end so too.
        let is_ours = move |topic: &str| {
            let node = topic.strip_prefix(stage).and_then(|rest| rest.strip_prefix('.')?.strip_suffix(CHANGELOG));
            node.is_some_and(|node| !node.contains('.'))
        };
        let own = self.topics.iter().filter(move |((of, topic), _)| of == stage && is_ours(topic));
        own.map(|((_, topic), (id, _))| (topic.as_str(), *id))
    }

    /// What is known of a node's state.
    pub fn kept(&self, stage: &str, node: &str) -> Option<&Kept> {
        self.stores.get(&(stage.to_owned(), node.to_owned()))
    }

    /// The partitions that a topic had at first.
    pub fn first_partitions(&self, stage: &str, topic: &str) -> Option<i32> {
        self.topics.get(&(stage.to_owned(), topic.to_owned())).map(|(_, partitions)| *partitions)
    }
}

/// The topic of a job. Any thread may use it.
#[derive(Debug)]
pub struct JobTopic {
    name: String,
    connection: Connection,
    admin: Arc<Admin>,
    producer: Producer,
}

impl JobTopic {
    /// Makes the topic where it is not there. Blocks.
    pub fn open(plan: &Plan, connection: &Connection, admin: &Arc<Admin>) -> Result<JobTopic, Failure> {
        let name = plan.topology.job_topic();
        let failed = |e: Error| asked(&e, &format!("cannot use the topic {name:?}, in which a job remembers itself"));
        let info = admin.internal_topic(&name, 1, &[("cleanup.policy", "compact".to_owned())]).map_err(failed)?;
        if info.cleanup_policy.trim() != "compact" {
            return Err(Failure::refused(format!(
                "topic {name:?}, in which a job remembers itself, forgets by age or size (cleanup.policy = {}): set \
                 cleanup.policy = compact",
                info.cleanup_policy
            )));
        }
        let options = ProducerOptions {
            transactional_id: None,
            transaction_timeout: PATIENCE,
            linger: LINGER,
            queue_bytes: 1 << 20,
        };
        let producer = Producer::new(connection, &options, &[info.target(name.as_str())]).map_err(failed)?;
        Ok(JobTopic { name, connection: connection.clone(), admin: Arc::clone(admin), producer })
    }

    /// Reads all of it; nothing for up to `patience` is an error. Blocks.
    pub fn read(&self, patience: Duration) -> Result<Memory, ReadError> {
        read(&self.name, &self.connection, &self.admin.within(patience), patience)
    }

    /// Writes notes and waits until they are there. Blocks.
    pub fn remember(&self, notes: &[Note]) -> Result<(), Failure> {
        notes.iter().for_each(|note| self.note(note));
        let deadline = Instant::now() + PATIENCE;
        let mut flushed = self.producer.flush(SLICE);
        while flushed.is_err() && Instant::now() < deadline {
            flushed = self.producer.flush(SLICE);
        }
        let result = flushed.and(self.producer.failed_deliveries().map_or(Ok(()), Err));
        result.map_err(|error| asked(&error, &format!("cannot write to the topic {:?}", self.name)))
    }

    /// Writes a note in the background. One that gets lost is written again at the next start.
    pub fn note(&self, note: &Note) {
        let mut chunk = Chunk::default();
        let mut value = vec![FORMAT];
        if let Some(json) = &note.value {
            value.extend(json.to_string().into_bytes());
        }
        let mut out = chunk.push(TargetId(0));
        out.key(Some(note.key.as_bytes())).value(note.value.is_some().then_some(&value[..]));
        out.finish();
        if let Err(error) = self.producer.produce(&chunk.get(0)) {
            tracing::warn!(topic = self.name, key = note.key, %error, "cannot be remembered");
        }
    }

    /// Waits a moment for what is written in the background.
    pub fn flush(&self) {
        let _ = self.producer.flush(2 * SLICE);
    }
}

/// Why a job's memory could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read {0:?}: {1}")]
    Kafka(String, Error),
    #[error("topic {0:?} was written by a newer version of semel, which remembers more: run that one")]
    Newer(String),
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Failure {
        match &error {
            ReadError::Kafka(topic, cause) => asked(cause, &format!("cannot read {topic:?}")),
            ReadError::Newer(_) => Failure::refused(error.to_string()),
        }
    }
}

/// What the job of that topic remembers; nothing where there is no topic. Blocks.
pub fn read(topic: &str, connection: &Connection, admin: &Admin, patience: Duration) -> Result<Memory, ReadError> {
    let mut memory = Memory::default();
    let failed = |error| ReadError::Kafka(topic.to_owned(), error);
    if !admin.shapes(&[topic]).map_err(failed)?.contains_key(topic) {
        return Ok(memory);
    }
    let mut newer = false;
    for range in Reader::whole(admin, topic, 1, Isolation::ReadUncommitted).map_err(failed)? {
        let mut reader = Reader::new(connection, patience).map_err(failed)?;
        let read = reader.read(&range, |input: &Input<'_>| {
            let key = input.key.and_then(|key| std::str::from_utf8(key).ok()).unwrap_or_default();
            newer |= !memory.take(key, input.value);
            Ok::<_, Error>(ControlFlow::Continue(()))
        });
        read.map_err(failed)?;
    }
    if newer { Err(ReadError::Newer(topic.to_owned())) } else { Ok(memory) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(note: &Note) -> Option<String> {
        note.value.as_ref().map(|value| format!("1{value}"))
    }

    /// `reset` deletes changelogs: a source's topic that is called like one is none.
    #[test]
    fn a_changelog_is_the_stages_own_and_no_topic_that_it_reads() {
        let mut memory = Memory::default();
        for topic in ["shop.totals.changelog", "cdc.orders.changelog", "shop.a.b.changelog", "shopper.a.changelog"] {
            memory.topics.insert(("shop".to_owned(), topic.to_owned()), (Uuid::from_u128(7), 4));
        }
        assert_eq!(memory.changelogs("shop").collect::<Vec<_>>(), [("shop.totals.changelog", Uuid::from_u128(7))]);
    }

    #[test]
    fn what_is_noted_is_remembered_until_it_is_forgotten() {
        let id = Uuid::from_u128(7);
        let partition = TopicPartition::new("a.b_c-d", 3);
        let kept = Kept { meaning: Meaning::from([("fields".to_owned(), "n".to_owned())]), left: true };
        let notes = [
            Note::topic("s", "a.b_c-d", id, 4),
            Note::started("s", &partition, id),
            Note::store("s", "sums", &kept),
            Note::store("s", "counts", &Kept::default()),
        ];
        let mut memory = Memory::default();
        for note in &notes {
            assert!(memory.take(&note.key, text(note).as_deref().map(str::as_bytes)));
        }
        assert!(memory.take("plan", Some(br#"1{"fingerprint":"f","stages":{"s":["a"]}}"#)));
        assert!(memory.take("of a later version", Some(b"1{}")));
        assert_eq!(memory.fingerprint.as_deref(), Some("f"));
        assert_eq!(memory.first_partitions("s", "a.b_c-d"), Some(4));
        assert_eq!(memory.started("s", &partition), Some(id));
        assert_eq!(memory.started("t", &partition), None);
        assert_eq!((memory.kept("s", "sums"), memory.kept("s", "counts")), (Some(&kept), Some(&Kept::default())));
        for note in &notes {
            assert!(memory.take(&note.key, None));
        }
        assert_eq!(memory, Memory { fingerprint: Some("f".into()), ..Memory::default() });
        assert!(!memory.take("plan", Some(b"2...")), "another format is not guessed at");
    }
}
