//! The most that a crash may lose or double, where the guarantee allows it at all.

use std::collections::BTreeMap;

use super::observe::{Contents, End, EndKind, ends, observe};
use super::verdict::{self, Bound};
use super::{Baseline, Drill};
use crate::error::Failure;
use crate::scratch::Run;
use crate::topology::plan::Stage;

/// Batches of each worker that a crash may lose or double: the one that is open between positions and effects, and one
/// that was given up for another reason, such as a rebalance. The next one has no effect before its positions, or no
/// positions before its effects, are acknowledged.
const OPEN_BATCHES: u64 = 2;

/// Of a Postgres stage after a crash: records at and behind its positions, and the rows of its tables without a key.
pub struct Again {
    records: u64,
    rows: Vec<(EndKind, u64)>,
}

impl Again {
    fn of(&self, end: &End) -> (u64, Option<u64>) {
        let rows = self.rows.iter().find(|(kind, _)| *kind == end.kind);
        (self.records, rows.map(|(_, rows)| *rows))
    }
}

/// What was open when a process crashed.
pub struct Open<'a> {
    /// The Postgres stage that ran alone.
    pub alone: Option<&'a Stage>,
    /// All of the input.
    pub all: bool,
    /// What it reads again, where that is known.
    pub again: Option<Again>,
}

/// The most outputs that a record has.
fn outputs(contents: &Contents) -> u64 {
    match contents {
        Contents::Records(records) => verdict::fan_out(records),
        Contents::Rows(_) | Contents::Heap(_) => 1,
    }
}

impl Drill<'_> {
    /// What a Postgres stage that crashed reads again, and what is there of it, where that may double anything. Looked at
    /// before it starts again.
    pub fn again(&self, run: &Run, stage: &Stage) -> Result<Option<Again>, Failure> {
        let tables = ends(&self.plan, Some(stage), &[]).into_iter().filter(|e| matches!(e.kind, EndKind::Table(_)));
        let tables: Vec<End> = tables.filter(|end| end.promise.may_double).collect();
        // Positions that a transaction holds are not told, until it is aborted.
        if tables.is_empty() || self.plan.transactional() {
            return Ok(None);
        }
        let own = run.plan.stages.iter().find(|own| own.name == stage.name).expect("every run has the same stages");
        let mut records = 0;
        for topic in run.plan.reads(own) {
            let partitions = self.world.topics.partitions(&[&topic])?;
            let unreachable = |e: crate::kafka::Error| Failure::unreachable(e.to_string());
            let committed = self.world.topics.admin.committed(&own.group, &partitions, false).map_err(unreachable)?;
            let from: BTreeMap<i32, i64> = committed
                .into_iter()
                .map(|(p, position)| Ok((p.partition, position.map_err(unreachable)?.map_or(0, |at| at.0))))
                .collect::<Result<_, Failure>>()?;
            self.world.topics.read(&topic, |input| {
                records += u64::from(from.get(&input.partition).is_none_or(|from| input.offset.0 >= *from));
            })?;
        }
        // A COMMIT that was sent is carried out: who holds rows is waited for.
        for (_, sink) in run.sinks().filter(|(id, _)| run.plan.topology.nodes[id.0].name == stage.name) {
            self.world.database.execute(&format!("BEGIN; LOCK TABLE {} IN SHARE MODE; COMMIT", sink.table))?;
        }
        let rows = observe(self.world, run, &tables, Some(&own.name))?.contents;
        let rows = tables.into_iter().zip(rows).filter_map(|(end, contents)| match contents {
            Contents::Heap(rows) => Some((end.kind, rows.len() as u64)),
            Contents::Records(_) | Contents::Rows(_) => None,
        });
        Ok(Some(Again { records, rows: rows.collect() }))
    }

    /// The most that a crash may lose or double at an end. `expected`: what is there without a crash.
    pub fn bound(&self, end: &End, expected: &Contents, baseline: &Baseline, open: &Open<'_>) -> Bound {
        let all = expected.len() as u64;
        if open.all {
            // Everything is in one batch there.
            return Bound { lost: all, doubled: all };
        }
        let batch = OPEN_BATCHES * self.batch_records() * u64::from(self.plan.topology.workers);
        // What a record that the Kafka stage loses or doubles is to a stage behind it, and a record of its own.
        let behind = |stage: &Stage| -> u64 {
            let reads = self.plan.reads(stage);
            let read = |end: &End| end.kind == EndKind::Topic && open.alone.is_none() && reads.contains(&end.name);
            let all = ends(&self.plan, None, &[]);
            let topics = all.iter().zip(&baseline.observed.contents).filter(|(end, _)| read(end));
            1 + topics.map(|(_, contents)| outputs(contents)).sum::<u64>()
        };
        let own = |node: usize| self.stage(Some(&self.plan.topology.nodes[node].name)).expect("a sink is a stage");
        let postgres = self.plan.stages.iter().filter(|stage| self.plan.postgres_sink(stage).is_some());
        let effects = match (end.kind, open.alone) {
            (EndKind::Topic, _) => outputs(expected),
            (EndKind::Table(node) | EndKind::Ledger(node), _) => behind(own(node)),
            (EndKind::DeadLetters, Some(_)) => 1,
            (EndKind::DeadLetters, None) => 1 + postgres.map(behind).sum::<u64>(),
        };
        let runs = |stage: &Stage| open.alone.is_none_or(|only| only.name == stage.name);
        let beside = || self.plan.stages.iter().any(|stage| self.plan.keeps_positions(stage) && runs(stage));
        let doubled = match end.kind {
            // Rows are committed batch after batch, however long the positions of former ones take.
            EndKind::Table(_) | EndKind::Ledger(_) => {
                let missing = |rows: u64| all.saturating_sub(rows);
                let again = open.again.as_ref().map(|again| again.of(end));
                again.map_or(all, |(records, rows)| records.saturating_sub(rows.map_or(0, missing)))
            }
            // So are dead letters that lie beside them.
            EndKind::DeadLetters if beside() => all,
            EndKind::DeadLetters | EndKind::Topic => batch * effects,
        };
        Bound { lost: batch * effects, doubled }
    }
}
