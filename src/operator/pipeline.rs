//! A Kafka stage at work on one worker: from an input to its outputs, or to its dead letter.

use std::collections::HashMap;

use uuid::Uuid;

use crate::chunk::{Chunk, Target, TargetId};
use crate::clock::Clock;
use crate::commit::progress::BatchId;
use crate::error::Failure;
use crate::expr::{Fault, Program, Runtime};
use crate::ids::Deriver;
use crate::record::{Input, Position, Timestamp};
use crate::reject::{Reject, dead_letter};
use crate::topology::plan::{Plan, PlannedStore, StageKind};
use crate::topology::spec::{self, Node, NodeId, NodeKind, OnError, Port, Repartition, Topology};

use super::aggregate::{Aggregate, Stamp, stamp};
use super::changelog::Changelog;
use super::closing::CLOSE_AT_ONCE;
use super::coding::{Coded, put_number};
use super::filter::Filter;
use super::flat_map::FlatMap;
use super::join::Join;
use super::join_tables::JoinTables;
use super::rekey::Rekey;
use super::remap::Remap;
use super::route::Route;
use super::sink::Sink;
use super::source::{Event, Source, Topic};
use super::state::{States, Store, StoreId};
use super::steps::{Done, Operator, Run, Step};
use super::table::{self, Table};
use super::{Counts, Pool, Slot};

/// Of the one key of a store under which stands how many batches have changed it. It is no key of a node's.
const REVISION: [u8; 1] = [0];

/// What a stage runs in.
#[derive(Clone, Debug)]
pub struct Environment {
    /// The topics that the stage writes: those of its sinks, its repartitions and the changelogs of its stores (found by
    /// name), and the dead letters.
    pub targets: Vec<Target>,
    /// The broker's ids of the source topics, by name.
    pub topic_ids: HashMap<String, Uuid>,
    /// Which of `targets` takes the dead letters.
    pub dead_letters: TargetId,
    pub clock: Clock,
}

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It went through; `outputs` of it are in the chunk. None: it was dropped on its way.
    Processed { outputs: u32 },
    /// It is in the state, and puts nothing out now.
    Kept,
    /// It came too late: its windows had closed, and nothing else became of it.
    Late,
    /// Its dead letter is in the chunk, and nothing else of it.
    Rejected { node: NodeId, reason: &'static str },
    /// It failed under `on_error = "skip"`: nothing of it is in the chunk.
    Skipped { node: NodeId, reason: &'static str },
}

/// A record failed under `on_error = "stop"`. Nothing of it is in the chunk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{topic}-{partition} at offset {offset}: {node}: {message} ({reason}); on_error is \"stop\"")]
pub struct Stop {
    pub node: String,
    pub reason: &'static str,
    pub message: String,
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
}

/// The operators of a Kafka stage with their state between records.
#[derive(Debug)]
pub struct Pipeline {
    topology: String,
    names: Vec<(String, OnError)>,
    sources: Vec<(NodeId, Source, Vec<usize>)>,
    pub(super) steps: Vec<Step>,
    dead_letters: (TargetId, Target),
    runtime: Runtime,
    pub(super) pool: Pool,
    pub(super) states: States,
    stamps: Vec<Stamp>,
    /// Where the changes of a store go.
    changelogs: Vec<Option<TargetId>>,
    queues: Vec<Vec<Slot>>,
    scratch: Vec<u8>,
    pub(super) counts: Counts,
    pub(super) close_at_once: usize,
}

impl Pipeline {
    /// Sets up the Kafka stage of a plan.
    ///
    /// # Errors
    /// Refused: the plan has no Kafka stage, or a topic is missing from the environment.
    pub fn new(plan: &Plan, environment: Environment) -> Result<Pipeline, Failure> {
        let topology = &*plan.topology;
        let stage = plan.stages.iter().find_map(|stage| match &stage.kind {
            StageKind::Kafka { sources, nodes } => Some((stage, sources, nodes)),
            StageKind::Postgres { .. } => None,
        });
        let Some((stage, sources, nodes)) = stage else {
            return Err(Failure::refused(format!("{}: the topology has no Kafka stage", topology.file)));
        };
        let dead_letters = environment.targets.get(environment.dead_letters.0 as usize).cloned();
        let dead_letters = dead_letters.ok_or_else(|| Failure::refused("the topic of the dead letters is unknown"))?;
        let stores = plan.stores(stage);
        let steps = nodes.iter().map(|id| step(topology, *id, nodes, &stores, &environment));
        let steps = steps.collect::<Result<Vec<_>, _>>()?;
        let stamps = stores.iter().filter_map(|store| match &topology.nodes[store.node.0].kind {
            NodeKind::Aggregate(spec) => Some(stamp(spec)),
            NodeKind::Table => Some(table::STAMP),
            _ => None,
        });
        let changelogs = stores.iter().map(|store| Some(target(&environment, &store.changelog)?.0)).collect();
        let sources = sources
            .iter()
            .map(|id| Ok((*id, source(topology, *id, &environment)?, takers(topology, *id, 0, nodes))))
            .collect::<Result<Vec<_>, Failure>>()?;
        Ok(Pipeline {
            topology: topology.name.clone(),
            names: topology.nodes.iter().map(|node| (node.declared_name().to_owned(), node.on_error)).collect(),
            queues: vec![Vec::new(); steps.len()],
            counts: Counts::new(topology.nodes.len()),
            dead_letters: (environment.dead_letters, dead_letters),
            runtime: Runtime::default(),
            pool: Pool::default(),
            states: States::new(stores.len()),
            stamps: stamps.collect(),
            changelogs,
            scratch: Vec::new(),
            close_at_once: CLOSE_AT_ONCE,
            sources,
            steps,
        })
    }

    /// Runs one record of a source through the whole stage. Afterwards `chunk` holds all its outputs besides what was in it,
    /// or only its dead letter. Outputs come in the order of the plan's nodes. No other record may come before all windows that
    /// this one closed [are closed](Pipeline::close).
    ///
    /// # Errors
    /// The record failed under `on_error = "stop"`.
    pub fn process(&mut self, source: NodeId, input: &Input<'_>, chunk: &mut Chunk) -> Result<Outcome, Stop> {
        let mark = chunk.mark();
        let mut event = Event::default();
        match self.run(source, input, &mut event, chunk) {
            Ok(outcome) => {
                self.keep();
                Ok(outcome)
            }
            Err((node, fault)) => {
                chunk.rewind(mark);
                self.withdraw();
                self.fail(node, fault, &event, input, chunk)
            }
        }
    }

    pub(super) fn keep(&mut self) {
        self.counts.keep();
        self.states.keep();
        self.pool.reset();
    }

    pub(super) fn withdraw(&mut self) {
        self.states.withdraw();
        self.queues.iter_mut().for_each(Vec::clear);
        self.pool.reset();
    }

    /// The time by which a record is ordered among those of other topics: its event's where the source declares one that can
    /// be read, else its own.
    pub fn time(&mut self, source: NodeId, input: &Input<'_>) -> Timestamp {
        if !self.sources.iter().any(|(id, from, _)| *id == source && from.declares_time()) {
            return input.timestamp;
        }
        let mut event = Event::default();
        // What is wrong with it is found again when its turn comes; its time counts for nothing.
        let taken = self.take_in(source, input, &mut event).is_ok();
        self.pool.reset();
        event.time_ms.filter(|_| taken).or(input.timestamp)
    }

    /// Rejects a record for a reason that was found outside, such as a refusal by the broker: as `on_error` of the named node
    /// says. Outputs that it has in the chunk are the caller's to withdraw.
    ///
    /// # Errors
    /// As [`Pipeline::process`].
    pub fn reject(
        &mut self,
        source: NodeId,
        input: &Input<'_>,
        reject: Reject,
        chunk: &mut Chunk,
    ) -> Result<Outcome, Stop> {
        let mut event = Event::default();
        // Its errors are not those that the record is rejected for; the id is all that counts here.
        let _ = self.take_in(source, input, &mut event);
        self.pool.reset();
        let node = self.names.iter().position(|(name, _)| *name == reject.node).map_or(source, NodeId);
        self.fail(node, Fault::new(reject.reason, reject.message), &event, input, chunk)
    }

    /// The time that a source tells of a record's event; none where it does not.
    pub fn event_time(&mut self, source: NodeId, input: &Input<'_>) -> Option<i64> {
        let mut event = Event::default();
        // Whether the record is taken is not asked here.
        let _ = self.take_in(source, input, &mut event);
        self.pool.reset();
        event.time_ms
    }

    /// What every value of a store begins with.
    pub fn stamp(&self, store: StoreId) -> Stamp {
        self.stamps[store.0]
    }

    /// Takes over the committed state of a partition: from now on records of it are processed.
    pub fn hold(&mut self, store: StoreId, partition: i32, committed: Box<dyn Store>) {
        self.states.hold(store, partition, committed);
    }

    /// Forgets the state of a partition.
    pub fn release(&mut self, store: StoreId, partition: i32) {
        self.states.release(store, partition);
    }

    /// Whether the state of a partition is here and known to be what is committed. After [`Pipeline::abandon`] it may not be.
    pub fn holds(&self, store: StoreId, partition: i32) -> bool {
        self.states.is_held(store, partition)
    }

    /// What was processed since the last seal is this batch.
    pub fn sealed(&mut self, batch: BatchId) {
        self.states.sealed(batch);
    }

    /// A sealed batch is committed, and with it those before.
    pub fn committed(&mut self, batch: BatchId) {
        self.states.committed(batch);
    }

    /// The end of a partition's changelog, asked for before this batch was sealed: once it is committed, everything below is
    /// in the state.
    pub fn bound(&mut self, store: StoreId, partition: i32, batch: BatchId, end: Position) {
        self.states.bound(store, partition, batch, end);
    }

    /// The state that the open batch has changed: store and partition.
    pub fn changed(&self) -> impl Iterator<Item = (StoreId, i32)> {
        self.states.changed()
    }

    /// How many batches have changed a partition's state.
    pub fn revision(&self, store: StoreId, partition: i32) -> u64 {
        let mut value = Vec::new();
        let told = self.states.read(store, partition, &REVISION, &mut value).unwrap_or(false);
        let revision = || Coded(value.strip_prefix(&self.stamps[store.0])?).number();
        if told { revision().unwrap_or(0) } else { 0 }
    }

    /// Writes the revision of a partition's state, where its store has a changelog to say so.
    pub fn revise(&mut self, store: StoreId, partition: i32, revision: u64, chunk: &mut Chunk) {
        let Some(changelog) = self.changelogs[store.0] else { return };
        let mut value = self.stamps[store.0].to_vec();
        put_number(revision, &mut value);
        let mut out = chunk.push(changelog);
        out.partition(partition).key(Some(&REVISION)).value(Some(&value));
        out.finish();
        self.states.write(store, partition, &REVISION, Some(&value));
        self.states.keep();
    }

    /// The state that is held: store and partition.
    pub fn held(&self) -> impl Iterator<Item = (StoreId, i32)> {
        self.states.held()
    }

    /// Drops what is not committed.
    pub fn abandon(&mut self) {
        self.states.abandon();
        for step in &mut self.steps {
            if let Operator::Aggregate(aggregate) = &mut step.operator {
                aggregate.abandon();
            }
        }
    }

    /// What happened so far, by node.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    fn run(
        &mut self,
        source: NodeId,
        input: &Input<'_>,
        event: &mut Event,
        chunk: &mut Chunk,
    ) -> Result<Outcome, (NodeId, Fault)> {
        self.counts.open(source).input += 1;
        let slot = self.take_in(source, input, event).map_err(|fault| (source, fault))?;
        let Some((slot, from)) = slot else {
            self.counts.open(source).dropped += 1;
            return Ok(Outcome::Processed { outputs: 0 });
        };
        self.counts.open(source).output += 1;
        let done = self.walk(slot, From::Source(from), input, event, chunk)?;
        Ok(match done {
            Done { outputs: 0, applied: true, .. } => Outcome::Kept,
            Done { outputs: 0, late: true, .. } => Outcome::Late,
            Done { outputs, .. } => Outcome::Processed { outputs },
        })
    }

    pub(super) fn walk(
        &mut self,
        slot: Slot,
        from: From,
        input: &Input<'_>,
        event: &Event,
        chunk: &mut Chunk,
    ) -> Result<Done, (NodeId, Fault)> {
        let Pipeline { sources, steps, runtime, pool, states, queues, scratch, counts, .. } = self;
        let done = Done::default();
        let mut run = Run { input, event, runtime, pool, states, counts, chunk, queues, scratch, done };
        run.emit(
            slot,
            match from {
                From::Source(source) => &sources[source].2,
                From::Step(step) => &steps[step].takers[0],
            },
        );
        run.steps(steps)?;
        Ok(run.done)
    }

    /// Decodes a record; `None` if an expression of the source aborted.
    fn take_in(
        &mut self,
        source: NodeId,
        input: &Input<'_>,
        event: &mut Event,
    ) -> Result<Option<(Slot, usize)>, Fault> {
        let from = self.sources.iter().position(|(id, ..)| *id == source);
        let Some(from) = from else {
            return Err(Fault::new(
                "undecodable",
                format!("no source of this stage reads the topic `{}`", input.topic),
            ));
        };
        let slot = self.pool.take();
        let taken = self.sources[from].1.take(input, self.pool.get_mut(slot), &mut self.runtime, event)?;
        Ok(taken.then_some((slot, from)))
    }

    pub(super) fn fail(
        &mut self,
        node: NodeId,
        fault: Fault,
        event: &Event,
        input: &Input<'_>,
        chunk: &mut Chunk,
    ) -> Result<Outcome, Stop> {
        let Fault { reason, message } = fault;
        let (name, on_error) = &self.names[node.0];
        match on_error {
            OnError::Reject => {
                let reject = Reject { node: name.clone(), reason, message };
                let mut buffer = [0; 36];
                let id = event.identity.id().map(|id| id.text(&mut buffer));
                let (target_id, target) = &self.dead_letters;
                dead_letter(chunk, *target_id, target, &self.topology, id, input, &reject);
                self.counts.rejected(node, reason);
                Ok(Outcome::Rejected { node, reason })
            }
            OnError::Skip => {
                self.counts.skipped(node);
                Ok(Outcome::Skipped { node, reason })
            }
            OnError::Stop => {
                self.counts.stopped();
                Err(Stop {
                    node: name.clone(),
                    reason,
                    message,
                    topic: input.topic.to_owned(),
                    partition: input.partition,
                    offset: input.offset.0,
                })
            }
        }
    }
}

/// Where a record begins its way.
#[derive(Clone, Copy, Debug)]
pub(super) enum From {
    Source(usize),
    Step(usize),
}

/// The places in `nodes` of those that take from an output.
fn takers(topology: &Topology, from: NodeId, output: usize, nodes: &[NodeId]) -> Vec<usize> {
    let takes = |node: &Node| node.streams().iter().any(|port| port.node == from && port.output == output);
    (0..nodes.len()).filter(|i| takes(&topology.nodes[nodes[*i].0])).collect()
}

fn source(topology: &Topology, id: NodeId, environment: &Environment) -> Result<Source, Failure> {
    let Node { name, kind, .. } = &topology.nodes[id.0];
    let topic_id = |topic: &String| {
        let id = environment.topic_ids.get(topic).copied();
        id.ok_or_else(|| Failure::refused(format!("source `{name}`: the id of the topic `{topic}` is unknown")))
    };
    let source = match kind {
        NodeKind::Source(source) => source,
        NodeKind::Repartitioned { topic, format } => {
            let own = Topic { name: topic.clone(), id: topic_id(topic)?, own: true };
            return Ok(Source::new(name, &spec::Source::plain(topic, *format), vec![own]));
        }
        _ => return Err(Failure::refused(format!("`{name}` is planned as a source, but is none"))),
    };
    let written: Vec<&str> = topology
        .nodes
        .iter()
        .filter_map(|node| match &node.kind {
            NodeKind::KafkaSink(sink) => Some(sink.topic.as_str()),
            _ => None,
        })
        .collect();
    let topic = |topic: &String| {
        Ok(Topic { name: topic.clone(), id: topic_id(topic)?, own: written.contains(&topic.as_str()) })
    };
    let topics = source.topics.iter().map(topic).collect::<Result<Vec<_>, Failure>>()?;
    Ok(Source::new(name, source, topics))
}

fn step(
    topology: &Topology,
    id: NodeId,
    nodes: &[NodeId],
    stores: &[PlannedStore],
    environment: &Environment,
) -> Result<Step, Failure> {
    let node = &topology.nodes[id.0];
    let operator = match &node.kind {
        NodeKind::Filter { condition, tombstones } => {
            Operator::Filter(Filter { condition: condition.clone(), tombstones: *tombstones })
        }
        NodeKind::Remap { source, tombstones } => {
            Operator::Remap(Remap { source: source.clone(), tombstones: *tombstones })
        }
        NodeKind::Route { routes, tombstones } => {
            let conditions = routes.iter().map(|route| route.condition.clone()).collect();
            Operator::Route(Route { conditions, tombstones: *tombstones })
        }
        NodeKind::FlatMap { source, tombstones } => {
            Operator::FlatMap(FlatMap { source: source.clone(), tombstones: *tombstones })
        }
        NodeKind::Rekey { key } => Operator::Rekey(Rekey { key: key.clone() }),
        NodeKind::Aggregate(spec) => {
            let (store, name, changelog) = store(id, stores, environment)?;
            Operator::Aggregate(Box::new(Aggregate::new(store, name.to_owned(), spec, changelog)))
        }
        NodeKind::Table => {
            let (store, _, changelog) = store(id, stores, environment)?;
            Operator::Table(Box::new(Table::new(store, changelog)))
        }
        NodeKind::Join(spec) => {
            let table = |port: Option<&Port>| {
                let at = port.and_then(|port| stores.iter().position(|store| store.node == port.node)).map(StoreId);
                at.ok_or_else(|| Failure::refused(format!("`{}` has no table in this stage", node.name)))
            };
            let (name, right) = (format!("{}.{}", topology.name, node.name), table(node.inputs.last())?);
            match spec.of_tables {
                false => Operator::Join(Box::new(Join::new(right, name, spec))),
                true => Operator::JoinTables(Box::new(JoinTables::new(table(node.inputs.first())?, right, name, spec))),
            }
        }
        NodeKind::KafkaSink(sink) => {
            Operator::Sink(Box::new(kafka_sink(topology, node, &sink.topic, sink.key.clone(), environment)?))
        }
        NodeKind::Repartition(repartition) => {
            let Repartition { topic, key, tombstones, null_keys } = repartition;
            let sink = kafka_sink(topology, node, topic, Some(key.clone()), environment)?;
            Operator::Sink(Box::new(Sink { repartition: Some(*tombstones), null_keys: *null_keys, ..sink }))
        }
        NodeKind::Source(_) | NodeKind::Repartitioned { .. } | NodeKind::PostgresSink(_) => {
            return Err(Failure::refused(format!("`{}` cannot run in the Kafka stage", node.name)));
        }
    };
    let outputs = if let Operator::Route(route) = &operator { route.conditions.len() + 1 } else { 1 };
    let takers: Vec<Vec<usize>> = (0..outputs).map(|output| takers(topology, id, output, nodes)).collect();
    let mut all_takers = takers.concat();
    all_takers.sort_unstable();
    all_takers.dedup();
    Ok(Step { node: id, operator, takers, all_takers })
}

/// The store of a node with state: its id, its name and its changelog.
fn store<'s>(
    id: NodeId,
    stores: &'s [PlannedStore],
    environment: &Environment,
) -> Result<(StoreId, &'s str, Changelog), Failure> {
    let store = stores.iter().position(|store| store.node == id).expect("a node with state has a store");
    let PlannedStore { name, changelog, .. } = &stores[store];
    let found = target(environment, changelog);
    let (id, target) = found.ok_or_else(|| Failure::refused(format!("the changelog `{changelog}` is unknown")))?;
    Ok((StoreId(store), name, Changelog { id, target: target.clone() }))
}

/// What the stage knows of a topic that it writes.
fn target<'e>(environment: &'e Environment, topic: &str) -> Option<(TargetId, &'e Target)> {
    let at = environment.targets.iter().position(|target| *target.topic == *topic)?;
    Some((TargetId(at as u32), &environment.targets[at]))
}

fn kafka_sink(
    topology: &Topology,
    node: &Node,
    topic: &str,
    key: Option<Program>,
    environment: &Environment,
) -> Result<Sink, Failure> {
    let Some((id, target)) = target(environment, topic) else {
        return Err(Failure::refused(format!("sink `{}`: the topic `{topic}` is unknown", node.name)));
    };
    Ok(Sink {
        ids: Deriver::new(&topology.name, &node.name),
        key,
        id,
        target: target.clone(),
        now_ms: environment.clock.now_ms(),
        clock: environment.clock.clone(),
        audit: topology.audit.then(|| topology.name.as_str().into()),
        repartition: None,
        null_keys: false,
        buffer: Vec::new(),
    })
}
