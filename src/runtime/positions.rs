//! Where a partition goes on: the group's stable position, or where a job that never ran starts.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Disposition, Failure};
use crate::kafka::{Admin, At, Consumer, Error, Isolation};
use crate::record::{Position, TopicPartition};
use crate::topology::spec::Start;

/// Finds positions for one stage.
pub struct Positions {
    pub admin: Arc<Admin>,
    pub group: String,
    /// Where each topic starts when the group has no position in it.
    pub starts: HashMap<String, Start>,
}

/// What was found.
#[derive(Debug, Default)]
pub struct Found {
    /// Partition, next offset to read, and whether the group had no position yet.
    pub known: Vec<(TopicPartition, Position, bool)>,
    /// A transaction is open on the position, or the broker did not answer: ask again.
    pub unstable: Vec<TopicPartition>,
    /// Why, in the words of the last of them.
    pub why: Option<Error>,
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
                self.why = Some(error);
                Ok(None)
            }
            Err(error) => match error.disposition() {
                Disposition::Fatal(exit) => Err(Failure::new(exit, error.to_string())),
                Disposition::Retry
                | Disposition::AbortTxn { .. }
                | Disposition::Fenced
                | Disposition::Rebuild
                | Disposition::Reject { .. } => {
                    self.why = Some(error);
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
        let Some(committed) = found.take(consumer.committed(partitions, wait))? else {
            found.unstable = partitions.to_vec();
            return Ok(found);
        };
        let mut stable = BTreeMap::new();
        for (partition, result) in committed {
            match found.take(result)? {
                Some(position) => drop(stable.insert(partition, position)),
                None => found.unstable.push(partition),
            }
        }
        let admin = self.admin.within(wait);
        let low = found.take(bounds(&admin, stable.keys(), At::Earliest))?;
        let high = found.take(bounds(&admin, stable.keys(), At::Latest))?;
        for (partition, position) in stable {
            let bound = |bounds: &Option<Bounds>| bounds.as_ref().and_then(|b| b.get(&partition).copied().flatten());
            let (Some(low), Some(high)) = (bound(&low), bound(&high)) else {
                found.unstable.push(partition);
                continue;
            };
            match position {
                Some(position) if position < low || position > high => {
                    return Err(self.outside(&partition, position, low, high));
                }
                Some(position) => found.known.push((partition, position, false)),
                None => match found.take(self.start(&admin, &partition, low, high))? {
                    Some(position) => found.known.push((partition, position, true)),
                    None => found.unstable.push(partition),
                },
            }
        }
        Ok(found)
    }

    fn start(
        &self,
        admin: &Admin,
        partition: &TopicPartition,
        low: Position,
        high: Position,
    ) -> Result<Position, Error> {
        match self.starts.get(&*partition.topic).copied().unwrap_or(Start::Earliest) {
            Start::Earliest => Ok(low),
            Start::Latest => Ok(high),
            Start::Timestamp(ms) => {
                let found = bounds(admin, std::iter::once(partition), At::Timestamp(ms))?;
                // Nothing as late as that: the end.
                Ok(found.get(partition).copied().flatten().unwrap_or(high))
            }
        }
    }

    fn outside(&self, partition: &TopicPartition, position: Position, low: Position, high: Position) -> Failure {
        Failure::stopped(format!(
            "the position of {partition} in group {} is {position}, but the log holds offsets {low} to {high}: records \
             were deleted before they were read, or the topic was made anew. Nothing was skipped; set the group's \
             position by hand (kafka-consumer-groups --reset-offsets) once you know what is missing",
            self.group
        ))
    }
}

type Bounds = BTreeMap<TopicPartition, Option<Position>>;

fn bounds<'a>(admin: &Admin, partitions: impl Iterator<Item = &'a TopicPartition>, at: At) -> Result<Bounds, Error> {
    let asked: Vec<_> = partitions.map(|partition| (partition.clone(), at)).collect();
    Ok(admin.offsets(&asked, Isolation::ReadUncommitted)?.into_iter().collect())
}
