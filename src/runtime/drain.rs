//! `--drain`: what has to be committed before the job is done.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::error::{Disposition, Failure};
use crate::kafka::{Admin, At, Isolation};
use crate::record::{Position, TopicPartition};
use crate::runtime::preflight::StageTopics;
use crate::sink::postgres::Store;
use crate::topology::plan::{Plan, Stage};

const ASK_EVERY: Duration = Duration::from_millis(50);

/// One stage's goal.
struct Goal {
    group: String,
    /// Positions that the group must reach.
    targets: Vec<(TopicPartition, Position)>,
    /// Topics that another stage of this run still writes: their targets are taken when it is done.
    internal: Vec<TopicPartition>,
    /// Topics that the stage itself writes, what feeds them first: the targets of each are taken when all before are
    /// reached.
    own: VecDeque<Vec<TopicPartition>>,
    /// Positions that are kept in the database have to be there too.
    store: Option<Store>,
    done: bool,
}

/// Watches the groups' committed positions until every stage has reached its targets.
pub struct Drain {
    goals: Vec<Goal>,
    asked: Instant,
}

impl Drain {
    /// Takes the last stable offset of every source as it is now. Blocks.
    pub fn new(
        plan: &Plan,
        stages: &[&Stage],
        topics: &[StageTopics],
        stores: Vec<Option<Store>>,
        admin: &Admin,
    ) -> Result<Drain, Failure> {
        let written: BTreeSet<String> = stages.iter().flat_map(|stage| plan.writes(stage)).collect();
        let mut goals = Vec::new();
        for ((stage, topics), store) in stages.iter().zip(topics).zip(stores) {
            let of = |topic: &String| topics.partitions().filter(|p| *p.topic == **topic).collect();
            let repartitions = plan.repartitions(stage);
            let own = repartitions.iter().map(of).collect();
            let others = topics.partitions().filter(|p| repartitions.iter().all(|topic| *p.topic != **topic));
            let (internal, external): (Vec<_>, Vec<_>) = others.partition(|p| written.contains(&*p.topic));
            let targets = ends(admin, &external, Isolation::ReadCommitted)?
                .ok_or_else(|| Failure::unreachable("the broker does not tell the ends of the sources"))?;
            goals.push(Goal { group: stage.group.clone(), targets, internal, own, store, done: false });
        }
        Ok(Drain { goals, asked: Instant::now() })
    }

    /// Whether all is through. Asks the broker at most every 50 ms.
    /// `owed`: outputs of a stage, by its place in the run, that are not acknowledged although their positions are
    /// committed.
    pub fn is_done(&mut self, admin: &Admin, owed: impl Fn(usize) -> u64) -> Result<bool, Failure> {
        if self.asked.elapsed() < ASK_EVERY {
            return Ok(false);
        }
        self.asked = Instant::now();
        // Stages are in the order of the plan: the writers of an internal topic come before its readers.
        for (stage, goal) in self.goals.iter_mut().enumerate() {
            if goal.done {
                continue;
            }
            if !goal.internal.is_empty() {
                // EndTxn is acknowledged before its markers are written: the uncommitted end is past the last of them.
                let Some(targets) = ends(admin, &goal.internal, Isolation::ReadUncommitted)? else { return Ok(false) };
                goal.targets.extend(targets);
                goal.internal.clear();
            }
            goal.done = reached(admin, goal)? && owed(stage) == 0;
            if goal.done
                && let Some(own) = goal.own.front()
            {
                goal.done = false;
                let Some(targets) = ends(admin, own, Isolation::ReadUncommitted)? else { return Ok(false) };
                goal.targets.extend(targets);
                goal.own.pop_front();
            }
            if !goal.done {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// `None` when the broker did not answer for all of them.
fn ends(
    admin: &Admin,
    partitions: &[TopicPartition],
    isolation: Isolation,
) -> Result<Option<Vec<(TopicPartition, Position)>>, Failure> {
    if partitions.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let asked: Vec<_> = partitions.iter().map(|partition| (partition.clone(), At::Latest)).collect();
    match admin.offsets(&asked, isolation) {
        Ok(ends) => Ok(ends.into_iter().map(|(partition, end)| Some((partition, end?))).collect()),
        Err(error) => match error.disposition() {
            Disposition::Fatal(exit) if !error.is_unknown_topic() => Err(Failure::new(exit, error.to_string())),
            _ => Ok(None),
        },
    }
}

fn reached(admin: &Admin, goal: &Goal) -> Result<bool, Failure> {
    let partitions: Vec<_> = goal.targets.iter().map(|(partition, _)| partition.clone()).collect();
    match admin.committed(&goal.group, &partitions, false) {
        Ok(positions) => {
            let in_group = |partition: &TopicPartition| {
                positions.iter().find(|(p, _)| p == partition).and_then(|(_, at)| at.as_ref().ok()).copied().flatten()
            };
            if !all_reached(goal, in_group) {
                return Ok(false);
            }
            let Some(store) = &goal.store else { return Ok(true) };
            Ok(store.positions()?.is_ok_and(|held| all_reached(goal, |partition| held.get(partition).copied())))
        }
        Err(error) => match error.disposition() {
            Disposition::Fatal(exit) if !error.is_unknown_topic() => Err(Failure::new(exit, error.to_string())),
            _ => Ok(false),
        },
    }
}

/// A partition in which there was nothing needs no position.
fn all_reached(goal: &Goal, at: impl Fn(&TopicPartition) -> Option<Position>) -> bool {
    goal.targets.iter().all(|(partition, target)| target.0 == 0 || at(partition).is_some_and(|at| at >= *target))
}
