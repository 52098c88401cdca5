//! What lies in the topics of a stage: how far its input is committed, and which outputs and dead letters come from it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;

use uuid::Uuid;

use super::compare::{Found, Kind, Letters, Wrong, print};
use super::unnamed::Unnamed;
use super::{Options, PATIENCE, topics};
use crate::chunk::Target;
use crate::commit::metadata::topic_id_of;
use crate::error::{Disposition, Failure};
use crate::kafka::{Admin, At, Connection, Error, Isolation, Range, Reader, TopicInfo};
use crate::operator::ORIGIN;
use crate::record::{Input, Position, TopicPartition};
use crate::reject::{header, restored};
use crate::runtime::{job_topic, past};
use crate::topology::plan::{Plan, Stage};
use crate::topology::spec::NodeId;

/// A record of the input: the index of its partition in the ranges, and its offset.
type Origin = (usize, i64);

/// What is there.
pub struct Looked {
    /// The name of the topology.
    job: String,
    pub ranges: Vec<Range>,
    /// The topics whose outputs are audited.
    pub topics: Vec<String>,
    /// All topics that the stage writes, the dead letters last.
    pub targets: Vec<Target>,
    pub topic_ids: HashMap<String, Uuid>,
    pub not_audited: Vec<String>,
    found: HashMap<Origin, Vec<Found>>,
    letters: HashMap<Origin, Letters>,
    pub unnamed: Unnamed,
    /// Partitions of audited topics whose first records were deleted, or that are compacted: what is left there. Nothing
    /// of a compacted partition is kept here.
    deleted: BTreeMap<(usize, i32), Left>,
    /// The same of the partitions of the dead-letter topic.
    deleted_letters: BTreeMap<i32, Left>,
}

/// By the index of the input partition, the lowest offset that a record still names. Records lie in the order of those
/// that they name, so only those of that one and of earlier ones may have been deleted.
type Left = BTreeMap<usize, i64>;

impl Looked {
    pub fn at(
        plan: &Plan,
        stage: &Stage,
        connection: &Connection,
        admin: &Admin,
        options: &Options,
        without: &BTreeSet<NodeId>,
    ) -> Result<Looked, Failure> {
        let dead_letters = plan.dead_letters();
        let written: Vec<String> = plan.writes(stage).into_iter().chain([dead_letters.clone()]).collect();
        let reads = plan.reads(stage);
        let names: Vec<&str> = written.iter().chain(&reads).map(String::as_str).collect();
        let infos: BTreeMap<String, TopicInfo> =
            admin.topics(&names).map_err(failed)?.into_iter().filter_map(|(name, info)| Some((name, info?))).collect();
        if let Some(missing) = names.iter().find(|name| !infos.contains_key(**name)) {
            return Err(Failure::refused(format!("topic {missing:?} does not exist: the job never ran")));
        }
        // Before the outputs are read: what is committed then is there.
        let mut not_audited = Vec::new();
        let ranges = ranges(plan, stage, &infos, connection, admin, options, &mut not_audited)?;
        let retry = plan.retry(stage);
        let retried = retried(stage, &retry, admin)?;
        let mut looked = Looked {
            job: plan.topology.name.clone(),
            ranges,
            topics: topics(&plan.topology, stage, without),
            targets: written.iter().map(|topic| infos[topic].target(topic.as_str())).collect(),
            topic_ids: reads.iter().map(|topic| (topic.clone(), infos[topic].id)).collect(),
            not_audited,
            found: HashMap::new(),
            letters: HashMap::new(),
            unnamed: Unnamed::default(),
            deleted: BTreeMap::new(),
            deleted_letters: BTreeMap::new(),
        };
        let mut reader = Reader::new(connection, PATIENCE).map_err(failed)?;
        looked.read_letters(plan, &dead_letters, &infos, admin, &mut reader)?;
        looked.read_outputs(&infos, admin, &mut reader)?;
        // After the outputs: the replay of each that is there is there too.
        if let Some(info) = admin.topic(&retry).map_err(failed)? {
            looked.read_replays(&retry, info.partitions, &retried, admin, &mut reader)?;
        }
        Ok(looked)
    }

    /// The outputs of a record.
    pub fn found(&self, input: &Input<'_>) -> &[Found] {
        let origin = self.origin(input.topic, input.partition, input.offset.0);
        origin.and_then(|origin| self.found.get(&origin)).map_or(&[], Vec::as_slice)
    }

    pub fn letters(&self, input: &Input<'_>) -> Letters {
        let origin = self.origin(input.topic, input.partition, input.offset.0);
        origin.and_then(|origin| self.letters.get(&origin)).copied().unwrap_or_default()
    }

    /// It may have been there, and was deleted since: an output, or the dead letter of a record that is rejected.
    pub fn is_deleted(&self, wrong: &Wrong, input: &Input<'_>) -> bool {
        let left = match (wrong.kind, wrong.topic, wrong.place) {
            (Kind::Lost, Some(topic), Some((partition, _))) => self.deleted.get(&(topic, partition)),
            (Kind::Lost, None, _) => {
                let partitions = self.targets.last().map_or(1, |letters| letters.partitions.max(1));
                self.deleted_letters.get(&input.partition.rem_euclid(partitions))
            }
            _ => None,
        };
        let Some(left) = left else { return false };
        let origin = self.any_origin(input.topic, input.partition, input.offset.0);
        let lowest = origin.and_then(|(index, _)| left.get(&index));
        lowest.is_none_or(|lowest| input.offset.0 <= *lowest)
    }

    /// An output that names no record accounts for it.
    pub fn is_unnamed(&mut self, wrong: &Wrong, input: &Input<'_>, replayed: bool) -> bool {
        let Some((index, offset)) = self.any_origin(input.topic, input.partition, input.offset.0) else { return false };
        if wrong.kind != Kind::Lost || self.unnamed.len() == 0 {
            return false;
        }
        let same = wrong.print.is_some_and(|print| self.unnamed.take(&print, replayed));
        let place = wrong.topic.zip(wrong.place.map(|(partition, _)| partition));
        same || self.unnamed.excuses(place, index, offset)
    }

    /// What the outputs that name no record were taken for, once all records are compared.
    pub fn notes(&self) -> Vec<String> {
        let Unnamed { same, excused, .. } = &self.unnamed;
        let mut notes = Vec::new();
        if self.unnamed.len() > 0 {
            notes.push(format!(
                "{} outputs that name no record: from before audit = true, from a while without it, or written by \
                 others; {same} of them are outputs of records that no other output names",
                self.unnamed.len()
            ));
        }
        for (index, count) in excused {
            notes.push(format!(
                "{}: {count} outputs of records before offset {}, the first that an output names, are not there as the \
                 file makes them now; they may be among the outputs that name no record",
                self.ranges[*index].partition,
                self.unnamed.first(*index).unwrap_or_default()
            ));
        }
        notes
    }

    /// A record that is audited.
    fn origin(&self, topic: &str, partition: i32, offset: i64) -> Option<Origin> {
        let origin = self.any_origin(topic, partition, offset)?;
        let range = &self.ranges[origin.0];
        (range.from.0..range.to.0).contains(&offset).then_some(origin)
    }

    /// A record of an input partition, also outside its range.
    fn any_origin(&self, topic: &str, partition: i32, offset: i64) -> Option<Origin> {
        let is = |range: &Range| range.partition.partition == partition && *range.partition.topic == *topic;
        self.ranges.iter().position(is).map(|index| (index, offset))
    }

    fn read_letters(
        &mut self,
        plan: &Plan,
        topic: &str,
        infos: &BTreeMap<String, TopicInfo>,
        admin: &Admin,
        reader: &mut Reader,
    ) -> Result<(), Failure> {
        for range in whole(admin, topic, infos[topic].partitions)? {
            let mut left = Left::new();
            each(reader, &range, |input| {
                let node = input.headers.last(header::NODE).flatten().and_then(|node| std::str::from_utf8(node).ok());
                // What another stage rejected has its outputs here.
                let here = node.and_then(|node| plan.stage_of(node)).is_some_and(|s| s.name == plan.topology.name);
                let record = restored(input).filter(|_| here);
                if let Some(origin) = record.and_then(|r| self.any_origin(r.topic, r.partition, r.offset.0)) {
                    let (letters, attempt) = (self.letters.entry(origin).or_default(), attempt_of(input));
                    letters.written += 1;
                    letters.rejected = letters.rejected.max(attempt);
                    // Those of replays are in no order.
                    if attempt == 1 {
                        keep_lowest(&mut left, origin);
                    }
                }
            })?;
            if range.from.0 > 0 {
                self.not_audited.push(format!(
                    "{}: dead letters before offset {} were deleted: a record that is rejected and is older than what is \
                     left there may have had one",
                    range.partition, range.from
                ));
                self.deleted_letters.insert(range.partition.partition, left);
            }
        }
        Ok(())
    }

    /// `retried`: by partition, what the stage is past.
    fn read_replays(
        &mut self,
        topic: &str,
        partitions: i32,
        retried: &BTreeMap<i32, Position>,
        admin: &Admin,
        reader: &mut Reader,
    ) -> Result<(), Failure> {
        for range in whole(admin, topic, partitions)? {
            let past = retried.get(&range.partition.partition).map_or(0, |position| position.0);
            each(reader, &range, |input| {
                let record = restored(input);
                if let Some(origin) = record.and_then(|r| self.any_origin(r.topic, r.partition, r.offset.0)) {
                    let letters = self.letters.entry(origin).or_default();
                    letters.replayed += 1;
                    if input.offset.0 < past {
                        letters.retried = letters.retried.max(attempt_of(input));
                    }
                }
            })?;
        }
        Ok(())
    }

    fn read_outputs(
        &mut self,
        infos: &BTreeMap<String, TopicInfo>,
        admin: &Admin,
        reader: &mut Reader,
    ) -> Result<(), Failure> {
        for (index, topic) in self.topics.clone().iter().enumerate() {
            let info = &infos[topic];
            let compacted = info.target(topic.as_str()).compacted;
            if compacted {
                self.not_audited
                    .push(format!("topic {topic}: it is compacted, so what is missing there may be lost or not"));
            }
            for range in whole(admin, topic, info.partitions)? {
                let mut left = Left::new();
                let place = (index, range.partition.partition);
                each(reader, &range, |input| {
                    let print =
                        || print(index, input.partition, input.key, input.value, input.headers.0.iter().copied());
                    let (topic, partition, offset) = match origin_of(input) {
                        Some((job, topic, partition, offset)) if job == self.job => (topic, partition, offset),
                        // It is another job's.
                        Some(_) => return,
                        None => return self.unnamed.add(place, &print()),
                    };
                    // The outputs of a replay are not in order.
                    let any = self.any_origin(topic, partition, offset);
                    if let Some(origin) = any.filter(|origin| !self.letters.contains_key(origin)) {
                        keep_lowest(&mut left, origin);
                        self.unnamed.named(place, origin.0, offset);
                    }
                    let Some(origin) = self.origin(topic, partition, offset) else { return };
                    self.found.entry(origin).or_default().push(Found {
                        topic: index,
                        print: print(),
                        partition: input.partition,
                        offset: input.offset.0,
                    });
                })?;
                if compacted {
                    left.clear();
                } else if range.from.0 > 0 {
                    self.not_audited.push(self.cut(&range, &left));
                }
                if compacted || range.from.0 > 0 {
                    self.deleted.insert(place, left);
                }
            }
        }
        Ok(())
    }

    /// What cannot be audited in a partition of outputs whose first records were deleted.
    fn cut(&self, outputs: &Range, left: &Left) -> String {
        let mut note = format!(
            "{}: outputs before offset {} were deleted: what is lost there shows only after the first record of each \
             input partition that an output still names",
            outputs.partition, outputs.from
        );
        // In the order of the ranges.
        let unseen = self.ranges.iter().enumerate().filter(|(index, range)| {
            range.from < range.to && left.get(index).is_none_or(|lowest| *lowest + 1 >= range.to.0)
        });
        let unseen: Vec<String> = unseen.map(|(_, range)| range.partition.to_string()).collect();
        if !unseen.is_empty() {
            note.push_str(&format!(
                "; none of these is left, so losses of them are not audited: {}",
                unseen.join(", ")
            ));
        }
        note
    }
}

fn keep_lowest(left: &mut Left, (index, offset): Origin) {
    let lowest = left.entry(index).or_insert(offset);
    *lowest = offset.min(*lowest);
}

/// The job and the record that an output names.
fn origin_of<'a>(input: &Input<'a>) -> Option<(&'a str, &'a str, i32, i64)> {
    let text = std::str::from_utf8(input.headers.last(ORIGIN).flatten()?).ok()?;
    let mut parts = text.split('/');
    let origin = (parts.next()?, parts.next()?, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    parts.next().is_none().then_some(origin)
}

/// How often the record of a dead letter was rejected by then.
fn attempt_of(letter: &Input<'_>) -> u32 {
    let text = letter.headers.last(header::ATTEMPT).flatten().and_then(|text| std::str::from_utf8(text).ok());
    text.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// What of each input partition is audited.
fn ranges(
    plan: &Plan,
    stage: &Stage,
    infos: &BTreeMap<String, TopicInfo>,
    connection: &Connection,
    admin: &Admin,
    options: &Options,
    not_audited: &mut Vec<String>,
) -> Result<Vec<Range>, Failure> {
    let reads = plan.reads(stage);
    let partitions: Vec<TopicPartition> = reads
        .iter()
        .flat_map(|topic| (0..infos[topic].partitions).map(|partition| TopicPartition::new(topic.as_str(), partition)))
        .collect();
    let bound = |at: At| -> Result<BTreeMap<TopicPartition, Position>, Failure> {
        let asked: Vec<_> = partitions.iter().map(|partition| (partition.clone(), at)).collect();
        let found = admin.offsets(&asked, Isolation::ReadUncommitted).map_err(failed)?;
        Ok(found.into_iter().filter_map(|(partition, position)| Some((partition, position?))).collect())
    };
    let low = bound(At::Earliest)?;
    let high = bound(At::Latest)?;
    let from = options.from.map(|ms| bound(At::Timestamp(ms))).transpose()?;
    let to = options.to.map(|ms| bound(At::Timestamp(ms))).transpose()?;
    // Before the positions: what is remembered as started then has one.
    let job = plan.topology.job_topic();
    let memory = job_topic::read(&job, connection, &admin.within(PATIENCE), PATIENCE).map_err(Failure::from)?;
    let mut ranges = Vec::new();
    for (partition, committed, id) in positions(stage, &partitions, admin)? {
        let now = infos[&*partition.topic].id;
        if let Some(id) = id.filter(|id| *id != now) {
            let message = past::recreated(&partition.topic, id, now, &stage.group, &plan.topology.file);
            return Err(Failure::refused(message));
        }
        let Some(committed) = committed else {
            let offsets = high[&partition].0 - low[&partition].0;
            if offsets > 0 && memory.started(&stage.name, &partition).is_some() {
                return Err(Failure::refused(past::lost(&partition, &stage.group, &plan.topology.file)));
            }
            not_audited.push(format!(
                "{partition}: group {} has no position in it, so nothing of its {offsets} offsets is audited",
                stage.group
            ));
            continue;
        };
        // Nothing as late as that: nothing of it from there on, all of it up to there.
        let begin = from.as_ref().map_or(low[&partition], |from| from.get(&partition).copied().unwrap_or(committed));
        let end = to.as_ref().and_then(|to| to.get(&partition).copied()).unwrap_or(committed).min(committed);
        let end = options.limit.map_or(end, |limit| end.min(Position(begin.0.saturating_add(limit))));
        ranges.push(Range { partition, from: begin.min(end), to: end });
    }
    ranges.sort_by(|a, b| a.partition.cmp(&b.partition));
    not_audited.sort();
    Ok(ranges)
}

/// A committed position, and the id of the topic that it is of.
type Committed = (TopicPartition, Option<Position>, Option<Uuid>);

/// The stage's committed positions.
fn positions(stage: &Stage, partitions: &[TopicPartition], admin: &Admin) -> Result<Vec<Committed>, Failure> {
    let commits = admin.commits(&stage.group, partitions, true).map_err(failed)?;
    let positions = commits.into_iter().map(|(partition, commit)| {
        let commit = commit.map_err(failed)?;
        let id = commit.as_ref().and_then(|(_, metadata)| topic_id_of(metadata));
        Ok((partition, commit.map(|(position, _)| position), id))
    });
    positions.collect()
}

/// How far the stage has read its retry topic, by partition.
fn retried(stage: &Stage, topic: &str, admin: &Admin) -> Result<BTreeMap<i32, Position>, Failure> {
    let Some(info) = admin.topic(topic).map_err(failed)? else { return Ok(BTreeMap::new()) };
    let partitions: Vec<TopicPartition> = (0..info.partitions).map(|p| TopicPartition::new(topic, p)).collect();
    let positions = positions(stage, &partitions, admin)?.into_iter();
    // Those of a topic that was deleted say nothing of the one that is there.
    let positions = positions.filter(|(_, _, id)| id.is_none_or(|id| id == info.id));
    Ok(positions.filter_map(|(partition, position, _)| Some((partition.partition, position?))).collect())
}

/// All of a topic; what is still open at its end is waited for.
fn whole(admin: &Admin, topic: &str, partitions: i32) -> Result<Vec<Range>, Failure> {
    Reader::whole(admin, topic, partitions, Isolation::ReadUncommitted).map_err(failed)
}

fn each(reader: &mut Reader, range: &Range, mut take: impl FnMut(&Input<'_>)) -> Result<(), Failure> {
    let read = reader.read(range, |input| {
        take(input);
        Ok::<_, Error>(ControlFlow::Continue(()))
    });
    read.map_err(failed)
}

pub fn failed(error: Error) -> Failure {
    match error.disposition() {
        Disposition::Fatal(exit) => Failure::new(exit, format!("cannot audit: {error}")),
        _ => Failure::unreachable(format!("cannot audit: {error}")),
    }
}
