//! Where a partition goes on: the group's stable position, or where a job that never ran starts.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use crate::commit::metadata::{TopicIds, is_copy, revision_of, topic_id_of};
use crate::error::{Disposition, Failure};
use crate::kafka::{Admin, At, Consumer, Error, Isolation};
use crate::record::{Position, TopicPartition};
use crate::runtime::job_topic::{JobTopic, Memory, Note, ReadError};
use crate::runtime::past;
use crate::sink::postgres::{Claim, Seed, Store};
use crate::topology::spec::{Guarantee, Start};

/// Finds positions for one stage.
pub struct Positions {
    /// The topology file, to name in messages.
    pub file: String,
    pub stage: String,
    pub admin: Arc<Admin>,
    pub group: String,
    /// Where each topic starts when the group has no position in it.
    pub starts: HashMap<String, Start>,
    /// How many partitions each topic had when the stage first read it: `start` holds for these.
    pub first_partitions: HashMap<String, i32>,
    /// Offsets are the rows' versions: a key must stay in its partition.
    pub version_by_offset: bool,
    /// Topics whose state has so many partitions: a key must stay where its state is.
    pub state_partitions: HashMap<String, i32>,
    pub job: Arc<JobTopic>,
    /// Of the topics as they were when their partitions were assigned.
    pub topic_ids: TopicIds,
    /// Where positions are kept beside the rows: the group's are a copy then, and the start of the very first claim.
    pub store: Option<Arc<Store>>,
}

/// What was found.
#[derive(Debug, Default)]
pub struct Found {
    /// Partition, next offset to read, and whether the group has yet to get that position.
    pub known: Vec<(TopicPartition, Position, bool)>,
    /// Which revision of the state a committed position belongs to; none of one that somebody else committed.
    pub revisions: HashMap<TopicPartition, Option<u64>>,
    /// A transaction is open on the position, or the broker did not answer: ask again.
    pub unstable: Vec<TopicPartition>,
    /// Why, in the words of the last of them.
    pub why: Option<String>,
}

impl Found {
    pub fn at(&self) -> Vec<(TopicPartition, Position)> {
        self.known.iter().map(|(partition, position, _)| (partition.clone(), *position)).collect()
    }

    /// Takes an answer; an error that goes by itself is kept for the user.
    fn take<T>(&mut self, result: Result<T, Error>) -> Result<Option<T>, Failure> {
        match result {
            Ok(value) => Ok(Some(value)),
            // A broker that was just started, or a topic that was just made.
            Err(error) if error.is_unknown_topic() => {
                self.why = Some(error.to_string());
                Ok(None)
            }
            Err(error) => match error.disposition() {
                Disposition::Fatal(exit) => Err(Failure::new(exit, error.to_string())),
                Disposition::Retry
                | Disposition::AbortTxn { .. }
                | Disposition::Fenced
                | Disposition::Rebuild
                | Disposition::Reject { .. } => {
                    self.why = Some(error.to_string());
                    Ok(None)
                }
            },
        }
    }
}

impl Positions {
    /// Blocks for about `wait` a question. A position outside the log stops the job: skipping to where the log begins
    /// or ends would lose or repeat records without a word.
    pub fn find(&self, consumer: &Consumer, partitions: &[TopicPartition], wait: Duration) -> Result<Found, Failure> {
        let mut found = Found::default();
        if partitions.is_empty() {
            return Ok(found);
        }
        let admin = self.admin.within(wait);
        let topics: BTreeSet<&str> = partitions.iter().map(|partition| &*partition.topic).collect();
        let shapes = found.take(admin.shapes(&topics.into_iter().collect::<Vec<_>>()))?;
        let commits = found.take(consumer.commits(partitions, wait))?;
        let (Some(shapes), Some(commits)) = (shapes, commits) else {
            found.unstable = partitions.to_vec();
            return Ok(found);
        };
        let mut stable = BTreeMap::new();
        for (partition, result) in commits {
            let (Some(commit), Some((id, _))) = (found.take(result)?, shapes.get(&*partition.topic)) else {
                found.unstable.push(partition);
                continue;
            };
            self.same_topic(&partition, commit.as_ref(), *id)?;
            if let Some(first) = self.first_partitions.get(&*partition.topic).copied()
                && self.version_by_offset
                && partition.partition >= first
            {
                return Err(Failure::stopped(past::grown(&partition.topic, first)));
            }
            if self.state_partitions.get(&*partition.topic).is_some_and(|count| partition.partition >= *count) {
                return Err(Failure::stopped(past::outgrown(&partition.topic, &self.file)));
            }
            self.topic_ids.set(&partition.topic, *id);
            if let Some(store) = &self.store {
                store.name.learn(&partition.topic, *id);
            }
            if let Some((_, metadata)) = &commit {
                found.revisions.insert(partition.clone(), revision_of(metadata));
            }
            stable.insert(partition, commit.map(|(position, metadata)| (position, is_copy(&metadata))));
        }
        let memory = match stable.values().any(Option::is_none) {
            false => Some(Memory::default()),
            true => self.remembered(&mut found, wait)?,
        };
        let low = bounds(&admin, stable.keys(), At::Earliest, &mut found)?;
        // What does not tell its beginning is not waited for again.
        let high = bounds(&admin, low.keys(), At::Latest, &mut found)?;
        let mut places = Vec::new();
        for (partition, position) in stable {
            let (Some(low), Some(high)) = (low.get(&partition).copied(), high.get(&partition).copied()) else {
                found.unstable.push(partition);
                continue;
            };
            let started = || memory.as_ref().is_some_and(|memory| memory.started(&self.stage, &partition).is_some());
            let (at, had) = match position {
                Some((_, true)) if self.store.is_none() => {
                    return Err(Failure::stopped(past::copied(&partition, &self.group, &self.file)));
                }
                Some((position, copy)) => (Some(position), copy),
                None if memory.is_none() => (None, false),
                None if started() && self.store.is_none() => {
                    return Err(Failure::stopped(past::lost(&partition, &self.group, &self.file)));
                }
                None => (found.take(self.start(&admin, &partition, low, high))?, started()),
            };
            // Where the database keeps the position, the group gets a copy that says so.
            let own = self.store.is_some() && position.is_some_and(|(_, copy)| !copy);
            let fresh = position.is_none() || own;
            match at {
                Some(at) => places.push(Place { partition, at, own, fresh, had, low, high }),
                None => found.unstable.push(partition),
            }
        }
        if let Some(store) = &self.store {
            places = self.claimed(store, places, &mut found)?;
        }
        for Place { partition, at, fresh, low, high, .. } in places {
            if at < low || at > high {
                return Err(self.outside(&partition, at, low, high));
            }
            found.known.push((partition, at, fresh));
        }
        Ok(found)
    }

    /// Stops the job where the name belongs to another topic by now: its positions mean nothing there.
    fn same_topic(
        &self,
        partition: &TopicPartition,
        commit: Option<&(Position, Vec<u8>)>,
        id: Uuid,
    ) -> Result<(), Failure> {
        let committed = commit.and_then(|(_, metadata)| topic_id_of(metadata));
        match committed.or_else(|| self.topic_ids.get(&partition.topic)).filter(|known| *known != id) {
            None => Ok(()),
            Some(known) => Err(Failure::stopped(past::recreated(&partition.topic, known, id, &self.group, &self.file))),
        }
    }

    /// Stops the job where a partition's state is not what belongs to its position. Under exactly-once the two are committed
    /// together; else the state may be ahead, but the position is one that semel committed.
    pub fn is_of_state(
        &self,
        partition: &TopicPartition,
        position: Position,
        committed: Option<u64>,
        state: u64,
        guarantee: Guarantee,
    ) -> Result<(), Failure> {
        let fits = match guarantee {
            Guarantee::ExactlyOnce => committed == Some(state),
            Guarantee::AtLeastOnce | Guarantee::AtMostOnce => committed.is_some(),
        };
        if fits {
            return Ok(());
        }
        Err(Failure::stopped(past::set_outside(partition, position, committed, state, &self.group, &self.file)))
    }

    fn remembered(&self, found: &mut Found, wait: Duration) -> Result<Option<Memory>, Failure> {
        match self.job.read(wait) {
            Ok(memory) => Ok(Some(memory)),
            Err(ReadError::Kafka(_, error)) => found.take(Err(error)),
            Err(error @ ReadError::Newer(_)) => Err(Failure::stopped(error.to_string())),
        }
    }

    /// The partition's start is committed: from here on a missing position is a lost one.
    pub fn started(&self, partition: &TopicPartition) {
        if let Some(id) = self.topic_ids.get(&partition.topic) {
            self.job.note(&Note::started(&self.stage, partition, id));
        }
    }

    fn start(
        &self,
        admin: &Admin,
        partition: &TopicPartition,
        low: Position,
        high: Position,
    ) -> Result<Position, Error> {
        // What was written to a partition that is younger than the job was written for the job.
        let first = self.first_partitions.get(&*partition.topic).copied().unwrap_or(0);
        let start = self.starts.get(&*partition.topic).copied().filter(|_| partition.partition < first);
        match start.unwrap_or(Start::Earliest) {
            Start::Earliest => Ok(low),
            Start::Latest => Ok(high),
            Start::Timestamp(ms) => {
                let found = admin.offsets(&[(partition.clone(), At::Timestamp(ms))], Isolation::ReadUncommitted)?;
                // Nothing as late as that: the end.
                Ok(found.first().and_then(|(_, position)| *position).unwrap_or(high))
            }
        }
    }

    /// Takes partitions over in the database, which knows where they are.
    fn claimed(&self, store: &Store, places: Vec<Place>, found: &mut Found) -> Result<Vec<Place>, Failure> {
        let seed =
            |Place { partition, at, had, .. }: &Place| Seed { partition: partition.clone(), position: *at, had: *had };
        let seeds: Vec<_> = places.iter().map(seed).collect();
        if seeds.is_empty() {
            return Ok(places);
        }
        let claims = match store.claim(&seeds)? {
            Ok(claims) => claims,
            Err(why) => {
                found.why = Some(why);
                found.unstable.extend(seeds.into_iter().map(|seed| seed.partition));
                return Ok(Vec::new());
            }
        };
        let claim = |partition: &TopicPartition| claims.iter().find(|claim| claim.partition == *partition);
        let place = |place: Place| {
            let Claim { position, .. } = claim(&place.partition)?;
            if place.own && place.at != *position {
                let text = past::disagree(&place.partition, &self.group, place.at, *position, &self.file);
                return Some(Err(Failure::stopped(text)));
            }
            // The group gets the position with the next commit, which also carries letters that a former owner left.
            let fresh = place.fresh || place.at != *position || store.has_letters(&place.partition);
            Some(Ok(Place { at: *position, fresh, ..place }))
        };
        places.into_iter().filter_map(place).collect()
    }

    fn outside(&self, partition: &TopicPartition, position: Position, low: Position, high: Position) -> Failure {
        let keeper = if self.store.is_some() { "semel.sink_offsets, stage" } else { "group" };
        Failure::stopped(format!(
            "the position of {partition} in {keeper} {} is {position}, but the log holds offsets {low} to {high}: records \
             were deleted before they were read. Nothing was skipped; once you know what is missing, semel reset {} \
             sets the position anew",
            self.group, self.file
        ))
    }
}

/// A partition with what is known of it so far.
struct Place {
    partition: TopicPartition,
    at: Position,
    /// The group's own position, of a time when Kafka kept them, or as a reset set it.
    own: bool,
    fresh: bool,
    /// The database had it.
    had: bool,
    low: Position,
    high: Position,
}

/// The ends of the log, without the partitions that do not tell them.
fn bounds<'a>(
    admin: &Admin,
    partitions: impl Iterator<Item = &'a TopicPartition>,
    at: At,
    found: &mut Found,
) -> Result<BTreeMap<TopicPartition, Position>, Failure> {
    let asked: Vec<_> = partitions.map(|partition| (partition.clone(), at)).collect();
    let mut bounds = BTreeMap::new();
    for (partition, result) in admin.each_offset(&asked, Isolation::ReadUncommitted) {
        bounds.extend(found.take(result)?.flatten().map(|position| (partition, position)));
    }
    Ok(bounds)
}
