//! The job in memory: topics, the Kafka stage's pipeline, and each Postgres stage with its table.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

use super::TestReport;
use super::compare::compare;
use super::table::Table;
use crate::chunk::{Chunk, Output, Target, TargetId};
use crate::clock::Clock;
use crate::operator::row::{Mapped, RowMapper};
use crate::operator::{Environment, Memory, Pipeline, StoreId};
use crate::record::{Headers, Input, Offset};
use crate::reject::Reject;
use crate::topology::plan::{Plan, PlannedStore, StageKind};
use crate::topology::spec::{Node, NodeId, NodeKind, OnError, TestCase, TestInput, Topology};

/// Where the clock stands: 2026-01-01T00:00:00Z. It is the timestamp of test records that name none, and whose event is not
/// later.
const NOW_MS: i64 = 1_767_225_600_000;

/// What Kafka takes where `create.config` says nothing else.
const MAX_MESSAGE_BYTES: usize = 1_048_588;

/// Runs all `[[tests]]` of a topology, each from nothing, in the order of the file. Blocks for as long as the operators
/// take; needs no broker, no database and no variables of the environment.
pub fn run_tests(topology: &Topology) -> Vec<TestReport> {
    let plan = Plan::new(Arc::new(topology.clone()));
    topology.tests.iter().map(|case| run_test(&plan, case)).collect()
}

/// Whether a record that comes alone goes through every stage, without a dead letter.
pub fn passes(plan: &Plan, input: &TestInput) -> bool {
    Job::new(plan).is_ok_and(|mut job| job.process(input).is_ok() && job.letters.is_empty())
}

fn run_test(plan: &Plan, case: &TestCase) -> TestReport {
    let mut report = TestReport {
        name: case.name.clone(),
        line: case.line,
        stopped: None,
        differences: Vec::new(),
        rejected: Vec::new(),
    };
    let mut job = match Job::new(plan) {
        Ok(job) => job,
        Err(message) => return TestReport { stopped: Some(message), ..report },
    };
    report.stopped = case.inputs.iter().find_map(|input| job.process(input).err());
    report.differences = case.outputs.iter().flat_map(|output| compare(plan, &job, output)).collect();
    report.rejected = job.letters.iter().map(Letter::to_string).collect();
    report
}

/// A record in a topic.
#[derive(Clone, Debug)]
pub struct Stored {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
    pub timestamp: Option<i64>,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

impl Stored {
    fn input(&self) -> Input<'_> {
        Input {
            topic: &self.topic,
            partition: self.partition,
            offset: Offset(self.offset),
            timestamp: self.timestamp,
            key: self.key.as_deref(),
            value: self.value.as_deref(),
            headers: Headers(self.headers.iter().map(|(name, value)| (&name[..], value.as_deref())).collect()),
        }
    }
}

/// What a test may look at of a dead letter.
#[derive(Clone, Debug)]
pub struct Letter {
    pub node: String,
    pub reason: String,
    pub message: String,
}

impl fmt::Display for Letter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}, reason {}: {}", self.node, self.reason, self.message)
    }
}

struct PostgresStage {
    sink: NodeId,
    topics: Vec<String>,
    mapper: RowMapper,
    table: Table,
}

/// A job whose broker and database are in memory.
pub struct Job<'p> {
    plan: &'p Plan,
    pipeline: Option<Pipeline>,
    targets: Vec<Target>,
    stores: Vec<PlannedStore>,
    stages: Vec<PostgresStage>,
    chunk: Chunk,
    ends: HashMap<(String, i32), i64>,
    records: Vec<Stored>,
    pub letters: Vec<Letter>,
}

impl<'p> Job<'p> {
    fn new(plan: &'p Plan) -> Result<Job<'p>, String> {
        let topology = &plan.topology;
        let targets = targets(plan);
        let environment = Environment {
            dead_letters: TargetId(targets.len() as u32 - 1),
            targets: targets.clone(),
            topic_ids: topic_ids(topology),
            clock: Clock::manual(NOW_MS),
        };
        let kafka = plan.stages.iter().any(|stage| matches!(stage.kind, StageKind::Kafka { .. }));
        let pipeline =
            kafka.then(|| Pipeline::new(plan, environment)).transpose().map_err(|failure| failure.message)?;
        let stages = plan.stages.iter().filter_map(|stage| {
            let StageKind::Postgres { sink, .. } = stage.kind else { return None };
            let mapper = RowMapper::new(&stage.name, plan.postgres_sink(stage)?, plan.formats(stage), None);
            let mapper = mapper.with_events(plan, stage, &topic_ids(topology));
            Some(PostgresStage { sink, topics: plan.reads(stage), mapper, table: Table::default() })
        });
        let stages = stages.collect();
        Ok(Job {
            plan,
            pipeline,
            targets,
            stores: plan.stages.iter().flat_map(|stage| plan.stores(stage)).collect(),
            stages,
            chunk: Chunk::default(),
            ends: HashMap::new(),
            records: Vec::new(),
            letters: Vec::new(),
        })
    }

    /// The records of a topic in the order in which they came.
    pub fn topic(&self, name: &str) -> impl Iterator<Item = &Stored> {
        self.records.iter().filter(move |record| record.topic == name)
    }

    /// The table of a Postgres sink.
    pub fn table(&self, sink: NodeId) -> Option<&Table> {
        self.stages.iter().find(|stage| stage.sink == sink).map(|stage| &stage.table)
    }

    /// Puts a record into its source's topic and runs every stage until nothing is left to read. `Err`: the job
    /// stopped.
    fn process(&mut self, input: &TestInput) -> Result<(), String> {
        let NodeKind::Source(source) = &self.plan.topology.nodes[input.source.0].kind else { return Ok(()) };
        let topic = input.topic.clone().unwrap_or_else(|| source.topics[0].clone());
        let first = self.records.len();
        let headers = input.headers.iter().map(|(name, value)| (name.clone().into_bytes(), value.clone())).collect();
        let mut record = Stored {
            topic,
            partition: input.partition,
            offset: 0,
            timestamp: input.timestamp.or(Some(NOW_MS)),
            key: input.key.clone(),
            value: input.value.clone(),
            headers,
        };
        if let (None, Some(pipeline)) = (input.timestamp, &mut self.pipeline) {
            // A record is written when its event has happened, also where that is after the clock of tests.
            record.timestamp = pipeline.event_time(input.source, &record.input()).max(Some(NOW_MS));
        }
        self.append(record);
        self.kafka_stage(input.source, first)?;
        (first..self.records.len()).try_for_each(|record| self.postgres_stages(record))
    }

    fn append(&mut self, mut record: Stored) {
        let end = self.ends.entry((record.topic.clone(), record.partition)).or_default();
        record.offset = *end;
        *end += 1;
        self.records.push(record);
    }

    fn kafka_stage(&mut self, source: NodeId, record: usize) -> Result<(), String> {
        let stage = self.plan.stages.iter().find_map(|stage| match &stage.kind {
            StageKind::Kafka { sources, .. } => Some(sources),
            StageKind::Postgres { .. } => None,
        });
        let Some(pipeline) = self.pipeline.as_mut().filter(|_| stage.is_some_and(|s| s.contains(&source))) else {
            return Ok(());
        };
        for (i, store) in self.stores.iter().enumerate() {
            let partition = self.records[record].partition;
            if store.topics().any(|topic| *topic == self.records[record].topic)
                && !pipeline.holds(StoreId(i), partition)
            {
                pipeline.hold(StoreId(i), partition, Box::new(Memory::default()));
            }
        }
        self.chunk.clear();
        pipeline.process(source, &self.records[record].input(), &mut self.chunk).map_err(|stop| stop.to_string())?;
        while pipeline.close(&mut self.chunk).map_err(|stop| stop.to_string())?.is_some() {}
        let outputs: Vec<(TargetId, Stored)> = self.chunk.iter().map(|output| self.stored(&output)).collect();
        for (target, output) in outputs {
            if target.0 as usize + 1 == self.targets.len() {
                self.letters.push(letter(&output));
                continue;
            }
            // What the stage sends to itself it reads next.
            let nodes = &self.plan.topology.nodes;
            let reads =
                |node: &Node| matches!(&node.kind, NodeKind::Repartitioned { topic, .. } if *topic == output.topic);
            let reader = nodes.iter().position(reads).map(NodeId);
            let record = self.records.len();
            self.append(output);
            if let Some(reader) = reader {
                self.kafka_stage(reader, record)?;
            }
        }
        Ok(())
    }

    fn stored(&self, output: &Output<'_>) -> (TargetId, Stored) {
        let record = Stored {
            topic: self.targets[output.target.0 as usize].topic.to_string(),
            partition: output.partition,
            offset: 0,
            // A client stamps what has no time with its own.
            timestamp: output.timestamp.or(Some(NOW_MS)),
            key: output.key.map(<[u8]>::to_vec),
            value: output.value.map(<[u8]>::to_vec),
            headers: output.headers().map(|(name, value)| (name.to_vec(), value.map(<[u8]>::to_vec))).collect(),
        };
        (output.target, record)
    }

    fn postgres_stages(&mut self, record: usize) -> Result<(), String> {
        let record = &self.records[record];
        for stage in self.stages.iter_mut().filter(|stage| stage.topics.contains(&record.topic)) {
            let node = &self.plan.topology.nodes[stage.sink.0];
            let NodeKind::PostgresSink(sink) = &node.kind else { continue };
            let input = record.input();
            let written = match stage.mapper.map(&input) {
                Ok(Mapped::Row(row)) => stage.table.write(sink, &row).map_err(|message| Reject {
                    node: node.name.clone(),
                    reason: "column",
                    message,
                }),
                Ok(Mapped::Ignored) => Ok(()),
                Err(reject) => Err(reject),
            };
            match (written, node.on_error) {
                (Ok(()), _) | (Err(_), OnError::Skip) => {}
                (Err(reject), OnError::Reject) => self.letters.push(Letter {
                    node: reject.node,
                    reason: reject.reason.to_owned(),
                    message: reject.message,
                }),
                (Err(reject), OnError::Stop) => {
                    let Stored { topic, partition, offset, .. } = record;
                    let (name, message, reason) = (&node.name, reject.message, reject.reason);
                    return Err(format!("{topic}-{partition} at offset {offset}: {name}: {message} ({reason})"));
                }
            }
        }
        Ok(())
    }
}

/// The topics that the job writes, each once; the last is the dead letters'.
fn targets(plan: &Plan) -> Vec<Target> {
    let topology = &*plan.topology;
    let mut targets: Vec<Target> = Vec::new();
    for node in &topology.nodes {
        let NodeKind::KafkaSink(sink) = &node.kind else { continue };
        if targets.iter().any(|target| *target.topic == *sink.topic) {
            continue;
        }
        let create = sink.create.as_ref();
        let config = |name: &str| create.and_then(|create| create.config.get(name));
        let number = |name: &str| config(name).and_then(|value| value.parse::<i64>().ok());
        targets.push(Target {
            topic: sink.topic.as_str().into(),
            partitions: create.map_or(1, |create| create.partitions),
            max_message_bytes: number("max.message.bytes").map_or(MAX_MESSAGE_BYTES, |bytes| bytes.max(0) as usize),
            compacted: config("cleanup.policy").is_some_and(|policy| policy.contains("compact")),
            timestamp_before_max_ms: number("message.timestamp.before.max.ms").unwrap_or(i64::MAX),
            // The clock of tests stands still: times after it are no mistake of the record.
            timestamp_after_max_ms: number("message.timestamp.after.max.ms").unwrap_or(i64::MAX),
        });
    }
    let made = |topic: String| Target {
        topic: topic.into(),
        partitions: 1,
        max_message_bytes: MAX_MESSAGE_BYTES,
        compacted: false,
        timestamp_before_max_ms: i64::MAX,
        timestamp_after_max_ms: i64::MAX,
    };
    targets.extend(plan.stages.iter().flat_map(|stage| plan.repartitions(stage)).map(made));
    let stores = plan.stages.iter().flat_map(|stage| plan.stores(stage));
    targets.extend(stores.map(|store| Target { partitions: i32::MAX, compacted: true, ..made(store.changelog) }));
    targets.push(Target { max_message_bytes: 2 * MAX_MESSAGE_BYTES, ..made(topology.dead_letters()) });
    targets
}

/// Topics have an id on a broker; here any will do that is the same in every run.
fn topic_ids(topology: &Topology) -> HashMap<String, Uuid> {
    let topics = (0..topology.nodes.len()).flat_map(|id| topology.topics(NodeId(id)));
    topics.enumerate().map(|(i, topic)| (topic, Uuid::from_u128(i as u128 + 1))).collect()
}

fn letter(record: &Stored) -> Letter {
    let header = |name: &str| {
        let value = record.headers.iter().rev().find(|(n, _)| n == name.as_bytes()).and_then(|(_, v)| v.as_deref());
        value.map_or(String::new(), |value| String::from_utf8_lossy(value).into_owned())
    };
    Letter {
        node: header("semel-error-node"),
        reason: header("semel-error-reason"),
        message: header("semel-error-message"),
    }
}
