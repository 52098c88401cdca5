//! The Kafka stage's task: the topology's operators, and the state that they keep.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::chunk::Chunk;
use crate::commit::progress::BatchId;
use crate::error::Failure;
use crate::kafka::{Admin, Connection};
use crate::observe::status::StageStatus;
use crate::operator::{Outcome, Pipeline, Stop, StoreId};
use crate::record::{Input, TopicPartition};
use crate::reject::Reject;
use crate::runtime::task::Task;
use crate::store::{Changelog, Restoring};
use crate::topology::plan::PlannedStore;
use crate::topology::spec::NodeId;

/// Runs records through a pipeline and counts what became of them.
pub struct KafkaTask {
    pub pipeline: Pipeline,
    /// Which source reads a topic.
    pub sources: HashMap<String, NodeId>,
    /// Names of the nodes by id, for the counters.
    pub names: Vec<String>,
    pub status: Arc<StageStatus>,
    pub state: State,
}

/// The stores of the task, and the restores that are on their way.
pub struct State {
    connection: Connection,
    admin: Arc<Admin>,
    stores: Vec<PlannedStore>,
    /// The stage's retry topic: its records are folded into the state of other partitions.
    retry: String,
    restoring: HashMap<TopicPartition, Restoring>,
}

impl State {
    /// `stores`: all of the stage's, in the order of the plan.
    pub fn new(connection: Connection, admin: Arc<Admin>, stores: Vec<PlannedStore>, retry: String) -> State {
        State { connection, admin, stores, retry, restoring: HashMap::new() }
    }

    /// The stores that records of a topic reach.
    fn of<'s>(&'s self, topic: &'s str) -> impl Iterator<Item = (StoreId, &'s PlannedStore)> {
        let ids = self.stores.iter().enumerate().map(|(i, store)| (StoreId(i), store));
        ids.filter(move |(_, store)| store.source == topic)
    }
}

impl KafkaTask {
    /// The source that reads a topic; some source for a record of which that is not known.
    fn source(&self, topic: &str) -> NodeId {
        *self.sources.get(topic).or_else(|| self.sources.values().min()).expect("a stage has sources")
    }

    fn count(&self, outcome: Result<Outcome, Stop>) -> Result<(), Failure> {
        match outcome {
            Ok(Outcome::Processed { outputs: 0 }) => self.status.dropped.add(1),
            Ok(Outcome::Processed { outputs }) => self.status.records_out.add(u64::from(outputs)),
            Ok(Outcome::Rejected { node, reason }) => self.status.reject(&self.names[node.0], reason),
            Ok(Outcome::Skipped { .. }) => self.status.skipped.add(1),
            Err(stop) => return Err(Failure::stopped(stop.to_string())),
        }
        Ok(())
    }

    /// Whether the state of a partition is there; else it is being restored from now on.
    fn is_ready(&mut self, partition: &TopicPartition) -> Result<bool, Failure> {
        let KafkaTask { pipeline, state, .. } = self;
        let stores: Vec<StoreId> = state.of(&partition.topic).map(|(id, _)| id).collect();
        if stores.iter().all(|store| pipeline.holds(*store, partition.partition)) {
            return Ok(true);
        }
        let Some(restoring) = state.restoring.get_mut(partition) else {
            let changelog = |(id, store): (StoreId, &PlannedStore)| Changelog {
                topic: store.changelog.as_str().into(),
                stamp: pipeline.stamp(id),
            };
            let changelogs: Vec<Changelog> = state.of(&partition.topic).map(changelog).collect();
            let begun = Restoring::begin(&state.connection, &state.admin, &changelogs, partition.partition)?;
            state.restoring.insert(partition.clone(), begun);
            return Ok(false);
        };
        let Some(restored) = restoring.poll()? else { return Ok(false) };
        state.restoring.remove(partition);
        for (store, memory) in stores.into_iter().zip(restored) {
            pipeline.hold(store, partition.partition, Box::new(memory));
        }
        Ok(true)
    }
}

impl Task for KafkaTask {
    fn process(&mut self, input: &Input<'_>, chunk: &mut Chunk) -> Result<(), Failure> {
        let source = self.source(input.topic);
        let outcome = self.pipeline.process(source, input, chunk);
        self.count(outcome)
    }

    fn reject(
        &mut self,
        input: &Input<'_>,
        reason: &'static str,
        message: String,
        chunk: &mut Chunk,
    ) -> Result<(), Failure> {
        let source = self.source(input.topic);
        let reject = Reject { node: self.names[source.0].clone(), reason, message };
        let outcome = self.pipeline.reject(source, input, reject, chunk);
        self.count(outcome)
    }

    fn prepare(&mut self, partitions: &[TopicPartition]) -> Result<Vec<TopicPartition>, Failure> {
        let is_retry = |partition: &&TopicPartition| *partition.topic == *self.state.retry;
        let (retries, sources): (Vec<_>, Vec<_>) = partitions.iter().partition(is_retry);
        let mut unready = Vec::new();
        for partition in sources {
            if !self.is_ready(partition)? {
                unready.push(partition.clone());
            }
        }
        // What is replayed waits for the state that it goes into.
        if !self.state.restoring.is_empty() {
            unready.extend(retries.into_iter().cloned());
        }
        Ok(unready)
    }

    fn unassigned(&mut self, partitions: &[TopicPartition]) {
        let KafkaTask { pipeline, state, .. } = self;
        for partition in partitions {
            state.restoring.remove(partition);
            state.of(&partition.topic).for_each(|(store, _)| pipeline.release(store, partition.partition));
        }
    }

    fn sealed(&mut self, batch: BatchId) {
        self.pipeline.sealed(batch);
    }

    fn committed(&mut self, batch: BatchId) {
        self.pipeline.committed(batch);
    }

    fn abandon(&mut self) {
        self.pipeline.abandon();
    }

    fn close(&mut self, _wait: Duration) {
        self.state.restoring.clear();
    }
}
