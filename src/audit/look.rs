//! What lies in the topics of a stage: how far its input is committed, and which outputs and dead letters come from it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;

use uuid::Uuid;

use super::compare::{Found, Kind, Letters, Wrong, print};
use super::{Options, PATIENCE, topics};
use crate::chunk::Target;
use crate::commit::metadata::topic_id_of;
use crate::error::{Disposition, Failure};
use crate::ids;
use crate::kafka::{Admin, At, Connection, Error, Isolation, Range, Reader, TopicInfo};
use crate::operator::ORIGIN;
use crate::record::{Input, Position, TopicPartition};
use crate::reject::{header, restored};
use crate::runtime::past;
use crate::topology::plan::{Plan, Stage};
use crate::topology::spec::NodeId;

/// A record of the input: the index of its partition in the ranges, and its offset.
type Origin = (usize, i64);

/// What is there.
pub struct Looked {
    pub ranges: Vec<Range>,
    /// The topics whose outputs are audited.
    pub topics: Vec<String>,
    /// All topics that the stage writes, the dead letters last.
    pub targets: Vec<Target>,
    pub topic_ids: HashMap<String, Uuid>,
    pub not_audited: Vec<String>,
    found: HashMap<Origin, Vec<Found>>,
    letters: HashMap<Origin, Letters>,
    /// Partitions of audited topics whose first records were deleted, or that are compacted: by the index of the input
    /// partition, the lowest offset that an output still names. Outputs lie in the order of their records, so only those
    /// of that record and of earlier ones may have been deleted. Nothing of a compacted partition is kept here.
    deleted: BTreeMap<(usize, i32), BTreeMap<usize, i64>>,
}

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
        let mut looked = Looked {
            // Before the outputs are read: what is committed then is there.
            ranges: ranges(plan, stage, &reads, &infos, admin, options)?,
            topics: topics(&plan.topology, stage, without),
            targets: written.iter().map(|topic| infos[topic].target(topic.as_str())).collect(),
            topic_ids: reads.iter().map(|topic| (topic.clone(), infos[topic].id)).collect(),
            not_audited: Vec::new(),
            found: HashMap::new(),
            letters: HashMap::new(),
            deleted: BTreeMap::new(),
        };
        let mut reader = Reader::new(connection, admin, PATIENCE).map_err(failed)?;
        looked.read_letters(plan, &dead_letters, &infos, admin, &mut reader)?;
        let retry = plan.retry(stage);
        if let Some(info) = admin.topic(&retry).map_err(failed)? {
            looked.read_replays(&retry, info.partitions, admin, &mut reader)?;
        }
        looked.read_outputs(&infos, admin, &mut reader)?;
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

    /// It may have been there, and was deleted since.
    pub fn is_deleted(&self, wrong: &Wrong, input: &Input<'_>) -> bool {
        let (Kind::Lost, Some(topic), Some((partition, _))) = (wrong.kind, wrong.topic, wrong.place) else {
            return false;
        };
        let Some(left) = self.deleted.get(&(topic, partition)) else { return false };
        let origin = self.any_origin(input.topic, input.partition, input.offset.0);
        let lowest = origin.and_then(|(index, _)| left.get(&index));
        lowest.is_none_or(|lowest| input.offset.0 <= *lowest)
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
            each(reader, &range, |input| {
                let node = input.headers.last(header::NODE).flatten().and_then(|node| std::str::from_utf8(node).ok());
                // What another stage rejected has its outputs here.
                let here = node.and_then(|node| plan.stage_of(node)).is_some_and(|s| s.name == plan.topology.name);
                let record = restored(input).filter(|_| here);
                if let Some(origin) = record.and_then(|r| self.any_origin(r.topic, r.partition, r.offset.0)) {
                    self.letters.entry(origin).or_default().written += 1;
                }
            })?;
        }
        Ok(())
    }

    fn read_replays(
        &mut self,
        topic: &str,
        partitions: i32,
        admin: &Admin,
        reader: &mut Reader,
    ) -> Result<(), Failure> {
        for range in whole(admin, topic, partitions)? {
            each(reader, &range, |input| {
                let record = restored(input);
                if let Some(origin) = record.and_then(|r| self.any_origin(r.topic, r.partition, r.offset.0)) {
                    self.letters.entry(origin).or_default().replayed += 1;
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
        let mut nameless = 0_u64;
        let mut first: BTreeMap<usize, i64> = BTreeMap::new();
        for (index, topic) in self.topics.clone().iter().enumerate() {
            let info = &infos[topic];
            let compacted = info.target(topic.as_str()).compacted;
            if compacted {
                self.not_audited
                    .push(format!("topic {topic}: it is compacted, so what is missing there may be lost or not"));
            }
            for range in whole(admin, topic, info.partitions)? {
                let mut left: BTreeMap<usize, i64> = BTreeMap::new();
                each(reader, &range, |input| {
                    let Some((topic, partition, offset)) = origin_of(input) else {
                        nameless += 1;
                        return;
                    };
                    // The outputs of a replay are not in order.
                    let any = self.any_origin(topic, partition, offset);
                    if let Some((index, _)) = any.filter(|origin| !self.letters.contains_key(origin)) {
                        let lowest = left.entry(index).or_insert(offset);
                        *lowest = offset.min(*lowest);
                    }
                    let Some(origin) = self.origin(topic, partition, offset) else { return };
                    let seen = first.entry(origin.0).or_insert(offset);
                    *seen = offset.min(*seen);
                    let replayed = self.letters.get(&origin).is_some_and(|letters| letters.replayed > 0);
                    let without: &[&str] = if replayed { &[ids::HEADER] } else { &[] };
                    let headers = input.headers.0.iter().copied();
                    self.found.entry(origin).or_default().push(Found {
                        topic: index,
                        print: print(input.partition, input.key, input.value, headers, index, without),
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
                    self.deleted.insert((index, range.partition.partition), left);
                }
            }
        }
        if nameless > 0 {
            self.not_audited.push(format!(
                "{nameless} outputs that name no record: from before audit = true, or written by others; each partition \
                 is audited from the first record on that an output names"
            ));
            for (index, range) in self.ranges.iter_mut().enumerate() {
                range.from = first.get(&index).map_or(range.to, |offset| Position(*offset));
            }
        }
        Ok(())
    }

    /// What cannot be audited in a partition of outputs whose first records were deleted.
    fn cut(&self, outputs: &Range, left: &BTreeMap<usize, i64>) -> String {
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

/// The record that an output names.
fn origin_of<'a>(input: &Input<'a>) -> Option<(&'a str, i32, i64)> {
    let text = std::str::from_utf8(input.headers.last(ORIGIN).flatten()?).ok()?;
    let mut parts = text.split('/');
    let origin = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    parts.next().is_none().then_some(origin)
}

/// What of each input partition is audited.
fn ranges(
    plan: &Plan,
    stage: &Stage,
    reads: &[String],
    infos: &BTreeMap<String, TopicInfo>,
    admin: &Admin,
    options: &Options,
) -> Result<Vec<Range>, Failure> {
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
    let from = options.from.map(|ms| bound(At::Timestamp(ms))).transpose()?;
    let to = options.to.map(|ms| bound(At::Timestamp(ms))).transpose()?;
    let mut ranges = Vec::new();
    for (partition, commit) in admin.commits(&stage.group, &partitions, true).map_err(failed)? {
        let Some((committed, metadata)) = commit.map_err(failed)? else { continue };
        let now = infos[&*partition.topic].id;
        if let Some(id) = topic_id_of(&metadata).filter(|id| *id != now) {
            let message = past::recreated(&partition.topic, id, now, &stage.group, &plan.topology.file);
            return Err(Failure::refused(message));
        }
        // Nothing as late as that: nothing of it from there on, all of it up to there.
        let begin = from.as_ref().map_or(low[&partition], |from| from.get(&partition).copied().unwrap_or(committed));
        let end = to.as_ref().and_then(|to| to.get(&partition).copied()).unwrap_or(committed).min(committed);
        let end = options.limit.map_or(end, |limit| end.min(Position(begin.0.saturating_add(limit))));
        ranges.push(Range { partition, from: begin.min(end), to: end });
    }
    ranges.sort_by(|a, b| a.partition.cmp(&b.partition));
    Ok(ranges)
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
