//! `semel reset`: new positions for the stages of a job that does not run.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::commit::metadata::{TopicIds, is_copy, topic_id_of, topic_id_text};
use crate::error::Failure;
use crate::kafka::{Admin, At, Connection, Consumer, ConsumerOptions, Isolation};
use crate::record::{Position, TopicPartition};
use crate::runtime::job_topic::{JobTopic, Memory, Note, read};
use crate::runtime::preflight::asked;
use crate::sink::postgres::{Address, StageName, Store};
use crate::topology::plan::{Plan, Stage};
use crate::topology::spec::{NodeId, NodeKind};

const WAIT: Duration = Duration::from_secs(10);

/// Where positions are to go.
#[derive(Clone, Debug)]
pub enum To {
    Earliest,
    Latest,
    /// Milliseconds since the epoch.
    Timestamp(i64),
    Positions(Positions),
}

/// Positions as they are written to a file and put back from one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Positions {
    pub topology: String,
    pub positions: Vec<Entry>,
}

/// The position of a partition in the group of a stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    pub stage: String,
    pub topic: String,
    pub partition: i32,
    /// None where the group has none; it is left alone when it is put back.
    pub position: Option<i64>,
    /// As Kafka's tools write it.
    pub topic_id: String,
}

/// One partition's change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub stage: String,
    pub group: String,
    pub partition: TopicPartition,
    pub topic_id: Uuid,
    /// The partitions of the topic.
    pub partitions: i32,
    /// Of the topic that is there now; a position of one that it replaced is none.
    pub from: Option<Position>,
    pub to: Position,
}

/// What a reset does, looked at before it is done.
#[derive(Debug)]
pub struct Reset<'a> {
    plan: &'a Plan,
    pub changes: Vec<Change>,
    /// Changelogs that are deleted: state tells of what was before the new positions.
    pub changelogs: Vec<String>,
    memory: Memory,
}

impl<'a> Reset<'a> {
    /// Looks at positions and logs. Changes nothing. Blocks.
    ///
    /// # Errors
    /// Exit 2 while members are in a group, for positions outside the log or of another topic, and for what the broker
    /// refuses; exit 3 where it does not answer.
    pub fn look(
        plan: &'a Plan,
        stages: &[&Stage],
        to: &To,
        connection: &Connection,
        admin: &Admin,
    ) -> Result<Reset<'a>, Failure> {
        stages.iter().try_for_each(|stage| nobody_in(stage, admin))?;
        if let To::Positions(positions) = to {
            fits(plan, stages, positions)?;
        }
        let memory = read(&plan.topology.job_topic(), connection, admin, WAIT)?;
        let mut changes = Vec::new();
        for stage in stages {
            changes.extend(Looked::at(plan, stage, admin)?.changes(to, &memory, admin)?);
        }
        let mut changelogs = Vec::new();
        for stage in stages.iter().filter(|stage| changes.iter().any(|change: &Change| change.stage == stage.name)) {
            let reads = plan.reads(stage);
            let known = memory.changelogs(&stage.name).map(|(topic, _)| topic.to_owned());
            let known = known.filter(|topic| !reads.contains(topic));
            changelogs.extend(plan.stores(stage).into_iter().map(|store| store.changelog).chain(known));
        }
        changelogs.sort();
        changelogs.dedup();
        let names: Vec<&str> = changelogs.iter().map(String::as_str).collect();
        let there = admin.shapes(&names).map_err(|e| asked(&e, "cannot look at the changelogs"))?;
        changelogs.retain(|topic| there.contains_key(topic));
        Ok(Reset { plan, changes, changelogs, memory })
    }

    /// The positions as they are, to be put back.
    pub fn before(&self) -> Positions {
        let entry = |change: &Change| Entry {
            stage: change.stage.clone(),
            topic: change.partition.topic.to_string(),
            partition: change.partition.partition,
            position: change.from.map(|position| position.0),
            topic_id: topic_id_text(change.topic_id),
        };
        Positions { topology: self.plan.topology.name.clone(), positions: self.changes.iter().map(entry).collect() }
    }

    /// Deletes the state, commits the new positions and has the job's topic remember that they are meant. Blocks.
    pub fn carry_out(&self, connection: &Connection, admin: &Arc<Admin>) -> Result<(), Failure> {
        // First: should this end in between, a run is refused for the state that is gone, until the reset is repeated.
        if !self.changelogs.is_empty() {
            let reset = |stage: &&Stage| self.changes.iter().any(|change| change.stage == stage.name);
            self.plan.stages.iter().filter(reset).try_for_each(|stage| nobody_in(stage, admin))?;
            let names: Vec<&str> = self.changelogs.iter().map(String::as_str).collect();
            admin.delete_topics(&names).map_err(|e| asked(&e, "cannot delete the changelogs"))?;
        }
        for stage in &self.plan.stages {
            let ids = TopicIds::default();
            let mut positions = Vec::new();
            for change in self.changes.iter().filter(|change| change.stage == stage.name) {
                ids.set(&change.partition.topic, change.topic_id);
                positions.push((change.partition.clone(), change.to));
            }
            if positions.is_empty() {
                continue;
            }
            // A job may have been started since the look.
            nobody_in(stage, admin)?;
            let failed = |e| asked(&e, &format!("cannot set the positions of group {}", stage.group));
            // It never joins, and the broker takes positions from outside only where nobody is in the group.
            let consumer = Consumer::new(connection, &ConsumerOptions::new(&stage.group)).map_err(failed)?;
            consumer.commit(&positions, &ids, WAIT).map_err(failed)?;
            // Then those in the database: should this end in between, the two disagree, and no run goes on from either.
            if let Some(store) = store(self.plan, stage)? {
                let partitions: Vec<TopicPartition> = positions.into_iter().map(|(partition, _)| partition).collect();
                reached(&stage.name, store.forget(&partitions))?;
            }
        }
        JobTopic::open(self.plan, connection, admin)?.remember(&self.notes())
    }

    fn notes(&self) -> Vec<Note> {
        let mut notes = Vec::new();
        let mut seen = BTreeSet::new();
        for Change { stage, partition, topic_id, partitions, .. } in &self.changes {
            notes.push(Note::started(stage, partition, *topic_id));
            let key = (stage.clone(), partition.topic.to_string());
            if !seen.insert(key.clone()) {
                continue;
            }
            if self.memory.topics.get(&key).is_none_or(|(id, _)| id != topic_id) {
                notes.push(Note::topic(stage, &partition.topic, *topic_id, *partitions));
            }
            // A topic that was made anew may have fewer partitions.
            let gone =
                self.memory.started.keys().filter(|(s, topic, p)| (s, topic) == (&key.0, &key.1) && p >= partitions);
            notes
                .extend(gone.map(|(stage, topic, p)| Note::forgotten(stage, &TopicPartition::new(topic.as_str(), *p))));
        }
        for stage in self.changes.iter().map(|change| &change.stage).collect::<BTreeSet<_>>() {
            let known = self.memory.changelogs(stage);
            notes.extend(known.map(|(topic, _)| Note::topic_forgotten(stage, topic)));
            let stores = self.memory.stores.keys().filter(|(of, _)| of == stage);
            notes.extend(stores.map(|(stage, node)| Note::store_forgotten(stage, node)));
        }
        notes
    }
}

/// The stage's positions in its database, where they are kept there.
fn store(plan: &Plan, stage: &Stage) -> Result<Option<Store>, Failure> {
    let Some(sink) = plan.postgres_sink(stage).filter(|sink| sink.keeps_positions()) else { return Ok(None) };
    let address = Address::parse(&sink.url, &stage.group);
    let address = address.map_err(|why| Failure::refused(format!("stage {}: {why}", stage.name)))?;
    let name = StageName::new(&stage.group, HashMap::new());
    Ok(Some(Store::new(name, address, sink.prepared, "semel reset")))
}

/// A database that is away is not waited for.
fn reached<T>(stage: &str, answer: Result<Result<T, String>, Failure>) -> Result<T, Failure> {
    answer?.map_err(|why| Failure::unreachable(format!("the positions of stage {stage} are in its database: {why}")))
}

fn nobody_in(stage: &Stage, admin: &Admin) -> Result<(), Failure> {
    let group = admin.group(&stage.group).map_err(|e| asked(&e, &format!("cannot look at group {}", stage.group)))?;
    if group.members.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = group.members.iter().map(|m| format!("{} ({})", m.client_id, m.host)).collect();
    Err(Failure::refused(format!(
        "positions are not set while somebody is in the group {}: {}. Stop the job first; a process that ended is \
         forgotten after session_timeout",
        stage.group,
        names.join(", ")
    )))
}

fn fits(plan: &Plan, stages: &[&Stage], positions: &Positions) -> Result<(), Failure> {
    let name = &plan.topology.name;
    if positions.topology != *name {
        let other = &positions.topology;
        return Err(Failure::refused(format!("the positions are of the topology {other:?}, this one is {name:?}")));
    }
    for entry in &positions.positions {
        let Some(stage) = plan.stages.iter().find(|stage| stage.name == entry.stage) else {
            return Err(Failure::refused(format!("{} has no stage {:?}", plan.topology.file, entry.stage)));
        };
        let chosen = stages.iter().any(|chosen| chosen.name == stage.name);
        if chosen && !plan.stores(stage).is_empty() {
            return Err(Failure::refused(format!(
                "stage {} keeps state, which is of no single position: reset it --to earliest, latest or a time, which \
                 clears the state",
                stage.name
            )));
        }
        let reads = plan.reads(stage).contains(&entry.topic) || plan.retry(stage) == entry.topic;
        if chosen && !reads {
            return Err(Failure::refused(format!("stage {} does not read {:?}", stage.name, entry.topic)));
        }
    }
    Ok(())
}

/// The topics that tables are made of. What an aggregate tells begins anew with the aggregate.
pub fn tables(plan: &Plan, stage: &Stage) -> Vec<String> {
    let nodes = &plan.topology.nodes;
    let of_topic = |mut id: NodeId| {
        while !matches!(nodes[id.0].kind, NodeKind::Source(_)) {
            let stops = matches!(nodes[id.0].kind, NodeKind::Aggregate(_) | NodeKind::Repartitioned { .. });
            match nodes[id.0].streams().first() {
                Some(port) if !stops => id = port.node,
                _ => return false,
            }
        }
        true
    };
    let is_table = |id: NodeId| matches!(nodes[id.0].kind, NodeKind::Table) && of_topic(id);
    plan.stores(stage).into_iter().filter(|store| is_table(store.node)).map(|store| store.source).collect()
}

/// What there is of a stage.
struct Looked<'a> {
    stage: &'a Stage,
    retry: String,
    /// Topics through which the stage sends records to itself.
    own: Vec<String>,
    /// Topics that tables are made of: their state is deleted.
    tables: Vec<String>,
    topics: BTreeMap<String, (Uuid, i32)>,
    commits: BTreeMap<TopicPartition, Option<(Position, Option<Uuid>)>>,
    low: BTreeMap<TopicPartition, Position>,
    high: BTreeMap<TopicPartition, Position>,
}

impl<'a> Looked<'a> {
    fn at(plan: &Plan, stage: &'a Stage, admin: &Admin) -> Result<Looked<'a>, Failure> {
        let failed = |e| asked(&e, &format!("cannot look at the topics of stage {}", stage.name));
        let (reads, retry) = (plan.reads(stage), plan.retry(stage));
        let names: Vec<&str> = reads.iter().chain([&retry]).map(String::as_str).collect();
        let topics = admin.shapes(&names).map_err(failed)?;
        if let Some(missing) = reads.iter().find(|topic| !topics.contains_key(*topic)) {
            return Err(Failure::refused(format!(
                "topic {missing:?}, which stage {} reads, does not exist",
                stage.name
            )));
        }
        let partitions: Vec<TopicPartition> = topics
            .iter()
            .flat_map(|(topic, (_, count))| (0..*count).map(|partition| TopicPartition::new(topic.as_str(), partition)))
            .collect();
        let commits = admin.commits(&stage.group, &partitions, true).map_err(failed)?;
        let mut copies = BTreeSet::new();
        let commits = commits.into_iter().map(|(partition, commit)| {
            let commit = commit.map_err(failed)?;
            if commit.as_ref().is_some_and(|(_, metadata)| is_copy(metadata)) {
                copies.insert(partition.clone());
            }
            Ok((partition, commit.map(|(position, metadata)| (position, topic_id_of(&metadata)))))
        });
        let mut commits: BTreeMap<_, _> = commits.collect::<Result<_, Failure>>()?;
        if let Some(store) = store(plan, stage)? {
            topics.iter().for_each(|(topic, (id, _))| store.name.learn(topic, *id));
            let held = reached(&stage.name, store.positions())?;
            for (partition, commit) in &mut commits {
                let (id, _) = topics[&*partition.topic];
                match held.get(partition) {
                    Some(position) => *commit = Some((*position, Some(id))),
                    // One of a time when Kafka kept them is where the stage goes on.
                    None if copies.contains(partition) => *commit = None,
                    None => {}
                }
            }
        }
        let ends = |at| ends(admin, &partitions, at);
        Ok(Looked {
            stage,
            retry,
            own: plan.repartitions(stage),
            tables: tables(plan, stage),
            topics,
            commits,
            low: ends(At::Earliest)?,
            high: ends(At::Latest)?,
        })
    }

    fn changes(&self, to: &To, memory: &Memory, admin: &Admin) -> Result<Vec<Change>, Failure> {
        let at = match to {
            To::Timestamp(ms) => {
                let partitions: Vec<TopicPartition> = self.commits.keys().cloned().collect();
                ends(admin, &partitions, At::Timestamp(*ms))?
            }
            _ => BTreeMap::new(),
        };
        let mut changes = Vec::new();
        for (partition, commit) in &self.commits {
            let (topic_id, partitions) = self.topics[&*partition.topic];
            let (low, high) = (self.low[partition], self.high[partition]);
            let from = commit.filter(|(_, id)| id.is_none_or(|id| id == topic_id)).map(|(position, _)| position);
            let target = match to {
                // The rows of a table are those of all of its topic.
                _ if self.tables.iter().any(|topic| *topic == *partition.topic) => low,
                // What it sent to itself it sends again.
                _ if self.own.iter().any(|topic| *topic == *partition.topic) => high,
                To::Positions(positions) => match self.given(positions, partition, topic_id, low, high)? {
                    Some(position) => position,
                    None => continue,
                },
                // What came back as a dead letter is not read twice because the source is.
                _ if *partition.topic == *self.retry => {
                    let started = memory.started(&self.stage.name, partition).is_some();
                    if from.is_some() || !(started || commit.is_some()) {
                        continue;
                    }
                    low
                }
                To::Earliest => low,
                To::Latest => high,
                // Nothing as late as that: the end.
                To::Timestamp(_) => at.get(partition).copied().unwrap_or(high),
            };
            changes.push(Change {
                stage: self.stage.name.clone(),
                group: self.stage.group.clone(),
                partition: partition.clone(),
                topic_id,
                partitions,
                from,
                to: target,
            });
        }
        Ok(changes)
    }

    fn given(
        &self,
        positions: &Positions,
        partition: &TopicPartition,
        topic_id: Uuid,
        low: Position,
        high: Position,
    ) -> Result<Option<Position>, Failure> {
        let is = |entry: &&Entry| {
            entry.stage == self.stage.name && *entry.topic == *partition.topic && entry.partition == partition.partition
        };
        let Some(entry) = positions.positions.iter().find(is) else { return Ok(None) };
        let Some(position) = entry.position.map(Position) else { return Ok(None) };
        if entry.topic_id != topic_id_text(topic_id) {
            return Err(Failure::refused(format!(
                "the position {position} of {partition} is of the topic with the id {}, the broker's has {}: it was made \
                 anew since",
                entry.topic_id,
                topic_id_text(topic_id)
            )));
        }
        if position < low || position > high {
            return Err(Failure::refused(format!(
                "the position {position} of {partition} is outside the log, which holds offsets {low} to {high}"
            )));
        }
        Ok(Some(position))
    }
}

fn ends(admin: &Admin, partitions: &[TopicPartition], at: At) -> Result<BTreeMap<TopicPartition, Position>, Failure> {
    let asked_for: Vec<_> = partitions.iter().map(|partition| (partition.clone(), at)).collect();
    let ends = admin.offsets(&asked_for, Isolation::ReadUncommitted);
    let ends = ends.map_err(|e| asked(&e, "cannot look up positions in the log"))?;
    Ok(ends.into_iter().filter_map(|(partition, position)| Some((partition, position?))).collect())
}
