//! The Kafka stage's task: the topology's operators, and the state that they keep.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::chunk::Chunk;
use crate::commit::progress::BatchId;
use crate::crash::{self, Point};
use crate::error::Failure;
use crate::kafka::{Admin, Connection};
use crate::observe::status::StageStatus;
use crate::operator::{Closed, Outcome, Pipeline, Stop, StoreId};
use crate::record::{Input, Offset, Position, Timestamp, TopicPartition};
use crate::reject::Reject;
use crate::runtime::task::Task;
use crate::store::{Bounds, Changelog, Disk, Restoring};
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
    /// None: it is kept in memory.
    disk: Option<Disk>,
    bounds: Bounds,
    /// With the ids of their changelogs.
    stores: Vec<(PlannedStore, Uuid)>,
    /// The stage's retry topic: its records are folded into the state of other partitions.
    retry: String,
    restoring: HashMap<TopicPartition, Restoring>,
    /// Partitions whose time may go on without records.
    quiet: HashMap<TopicPartition, Quiet>,
}

/// Since when a partition stands where it stands, and at what time of its records in each store.
struct Quiet {
    position: Position,
    since: Instant,
    times: Vec<(StoreId, i64)>,
}

impl State {
    /// `stores`: all of the stage's, in the order of the plan.
    pub fn new(
        connection: Connection,
        admin: Arc<Admin>,
        disk: Option<Disk>,
        stores: Vec<(PlannedStore, Uuid)>,
        retry: String,
    ) -> State {
        let bounds = Bounds::new(Arc::clone(&admin));
        let (restoring, quiet) = (HashMap::new(), HashMap::new());
        State { connection, admin, disk, bounds, stores, retry, restoring, quiet }
    }

    /// The stores that records of a topic write.
    fn of<'s>(&'s self, topic: &'s str) -> impl Iterator<Item = StoreId> {
        (0..self.stores.len()).filter(move |store| self.stores[*store].0.source == topic).map(StoreId)
    }

    /// The stores of other topics that records of a topic look up.
    fn looked_up<'s>(&'s self, topic: &'s str) -> impl Iterator<Item = StoreId> {
        let reads = move |store: &usize| self.stores[*store].0.readers.iter().any(|reader| reader == topic);
        (0..self.stores.len()).filter(reads).map(StoreId)
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
            Ok(Outcome::Processed { outputs }) => {
                self.status.applied.add(1);
                self.status.records_out.add(u64::from(outputs));
            }
            Ok(Outcome::Kept) => self.status.applied.add(1),
            Ok(Outcome::Late) => self.status.late.add(1),
            Ok(Outcome::Rejected { node, reason }) => self.status.reject(&self.names[node.0], reason),
            Ok(Outcome::Skipped { .. }) => self.status.skipped.add(1),
            Err(stop) => return Err(Failure::stopped(stop.to_string())),
        }
        Ok(())
    }

    /// Closes windows for a turn; whether there may be more.
    fn close(&mut self, chunk: &mut Chunk) -> Result<bool, Failure> {
        let closed = self.pipeline.close(chunk).map_err(|stop| Failure::stopped(stop.to_string()))?;
        let Some(Closed { windows, outputs, rejects, skipped: _ }) = closed else { return Ok(false) };
        self.status.windows.add(u64::from(windows));
        self.status.records_out.add(u64::from(outputs));
        for (node, reason) in rejects {
            self.status.reject_window(&self.names[node.0], reason);
        }
        Ok(self.pipeline.is_closing())
    }

    /// Whether the state of a partition is there; else it is being restored from now on.
    fn is_ready(&mut self, partition: &TopicPartition) -> Result<bool, Failure> {
        let KafkaTask { pipeline, state, .. } = self;
        let stores: Vec<StoreId> = state.of(&partition.topic).collect();
        if stores.iter().all(|store| pipeline.holds(*store, partition.partition)) {
            return Ok(true);
        }
        let Some(restoring) = state.restoring.get_mut(partition) else {
            let changelog = |store: &StoreId| {
                let (planned, id) = &state.stores[store.0];
                Changelog { topic: planned.changelog.as_str().into(), id: *id, stamp: pipeline.stamp(*store) }
            };
            let changelogs = stores.iter().map(changelog).collect();
            // What is doubtful makes way: its files are the restore's from now on.
            stores.iter().for_each(|store| pipeline.release(*store, partition.partition));
            let State { connection, admin, disk, .. } = &state;
            let begun = Restoring::begin(connection, admin, disk.as_ref(), changelogs, partition.partition)?;
            state.restoring.insert(partition.clone(), begun);
            return Ok(false);
        };
        let Some(restored) = restoring.poll()? else { return Ok(false) };
        state.restoring.remove(partition);
        for (store, committed) in stores.into_iter().zip(restored) {
            pipeline.hold(store, partition.partition, committed);
        }
        Ok(true)
    }
}

/// The changelogs' partitions whose state is here.
fn held(pipeline: &Pipeline, stores: &[(PlannedStore, Uuid)]) -> Vec<(StoreId, TopicPartition)> {
    let changelog = |(store, partition): (StoreId, i32)| {
        (store, TopicPartition::new(stores[store.0].0.changelog.as_str(), partition))
    };
    pipeline.held().map(changelog).collect()
}

impl Task for KafkaTask {
    fn process(&mut self, input: &Input<'_>, chunk: &mut Chunk) -> Result<(), Failure> {
        let source = self.source(input.topic);
        let outcome = self.pipeline.process(source, input, chunk);
        self.count(outcome)?;
        self.close(chunk).map(drop)
    }

    /// Where more windows close than fit into a turn, the batch takes no other record before they are closed.
    fn is_full(&self) -> bool {
        self.pipeline.is_closing()
    }

    fn has_timers(&self) -> bool {
        (0..self.state.stores.len()).any(|store| self.pipeline.idle_ms(StoreId(store)).is_some())
    }

    fn tick(
        &mut self,
        partitions: &[(TopicPartition, Position)],
        chunk: &mut Chunk,
    ) -> Result<Vec<TopicPartition>, Failure> {
        let (now, mut moved) = (Instant::now(), Vec::new());
        for (partition, position) in partitions {
            let KafkaTask { pipeline, state, .. } = self;
            let number = partition.partition;
            if state.quiet.get(partition).is_none_or(|quiet| quiet.position != *position) {
                let times = state.of(&partition.topic);
                let times =
                    times.filter_map(|store| Some((store, pipeline.stream_time(store, number, chunk)?))).collect();
                state.quiet.insert(partition.clone(), Quiet { position: *position, since: now, times });
                continue;
            }
            let quiet = &state.quiet[partition];
            let silent = i64::try_from(now.duration_since(quiet.since).as_millis()).unwrap_or(i64::MAX);
            let offset = Offset((position.0 - 1).max(0));
            let mut closing = false;
            for (store, time) in &quiet.times {
                if pipeline.idle_ms(*store).is_some_and(|idle| silent >= idle) {
                    closing |= pipeline.advance(*store, number, time.saturating_add(silent), offset, chunk);
                }
            }
            if closing {
                moved.push(partition.clone());
            }
        }
        if !moved.is_empty() {
            self.close(chunk)?;
        }
        Ok(moved)
    }

    fn settle(&mut self, chunk: &mut Chunk, _wait: Duration) -> Result<bool, Failure> {
        if self.close(chunk)? {
            return Ok(false);
        }
        self.pipeline.settle(chunk);
        Ok(true)
    }

    fn time(&mut self, input: &Input<'_>) -> Timestamp {
        let source = self.source(input.topic);
        self.pipeline.time(source, input)
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
            // What it looks up is restored with the partition of that number of another topic.
            if !self.is_ready(partition)?
                || !self.state.looked_up(&partition.topic).all(|s| self.pipeline.holds(s, partition.partition))
            {
                unready.push(partition.clone());
            }
        }
        // What is replayed waits for the state that it goes into.
        if !self.state.restoring.is_empty() {
            unready.extend(retries.into_iter().cloned());
        }
        Ok(unready)
    }

    fn revision(&self, partition: &TopicPartition) -> Option<u64> {
        let stores = self.state.of(&partition.topic);
        stores.map(|store| self.pipeline.revision(store, partition.partition)).max()
    }

    fn revise(&mut self, chunk: &mut Chunk, touch: &mut dyn FnMut(&TopicPartition) -> bool) {
        let of = |(store, number): (StoreId, i32)| TopicPartition::new(&*self.state.stores[store.0].0.source, number);
        let changed: BTreeSet<TopicPartition> = self.pipeline.changed().map(of).collect();
        for partition in changed.iter().filter(|partition| touch(partition)) {
            let next = self.revision(partition).unwrap_or(0) + 1;
            // In every store of the partition, so that the revision is known whichever of them the file goes on with.
            for store in self.state.of(&partition.topic) {
                self.pipeline.revise(store, partition.partition, next, chunk);
            }
        }
    }

    fn unassigned(&mut self, partitions: &[TopicPartition]) {
        let KafkaTask { pipeline, state, .. } = self;
        for partition in partitions {
            state.restoring.remove(partition);
            state.quiet.remove(partition);
            state.of(&partition.topic).for_each(|store| pipeline.release(store, partition.partition));
        }
    }

    fn sealed(&mut self, batch: BatchId) {
        let KafkaTask { pipeline, state, .. } = self;
        pipeline.sealed(batch);
        if state.disk.is_none() {
            return;
        }
        for (store, partition, end) in state.bounds.told() {
            pipeline.bound(store, partition, batch, end);
        }
        let State { bounds, stores, .. } = state;
        bounds.ask(|| held(pipeline, stores));
    }

    fn committed(&mut self, batch: BatchId) {
        if self.state.stores.is_empty() {
            return;
        }
        crash::at(Point::BeforeApply);
        self.pipeline.committed(batch);
        crash::at(Point::AfterApply);
    }

    fn quiet_anew(&mut self) {
        self.state.quiet.clear();
    }

    fn abandon(&mut self) {
        self.pipeline.abandon();
        self.state.quiet.clear();
    }

    fn close(&mut self, _wait: Duration) {
        // No bound is written here: a member that lost its place unnoticed would vouch for what another has added.
        self.state.restoring.clear();
    }
}
