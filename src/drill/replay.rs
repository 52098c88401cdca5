//! The whole input once more: what a second pass puts out, and what it leaves as it was.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::observe::{Contents, End, EndKind, ends, observe};
use super::report::{CaseReport, EndReport};
use super::verdict::{self, Bound, Promise, Seen, Tally};
use super::{Baseline, Drill, compare};
use crate::error::Failure;
use crate::runtime::app;
use crate::runtime::reset::{Reset, To};
use crate::scratch::process::{Start, start};
use crate::topology::plan::{Plan, Stage};
use crate::topology::spec::Mode;

impl Drill<'_> {
    /// Sets every group of the crash-free run back to the beginning and runs again.
    pub fn replay(&self, baseline: &Baseline) -> Result<CaseReport, Failure> {
        let started = Instant::now();
        let run = &baseline.run;
        self.rewind(&run.plan)?;
        let mut report = CaseReport::replay();
        let ended = start(run, Start::default())?.wait(self.interrupted)?;
        if !ended.status.success() {
            return Ok(report.failed(&ended, started.elapsed()));
        }
        let all = ends(&self.plan, None, &baseline.tied);
        let observed = observe(self.world, run, &all, None)?;
        for (end, (expected, found)) in all.iter().zip(baseline.observed.contents.iter().zip(&observed.contents)) {
            let tally = match (expected, found) {
                (Contents::Records(expected), Contents::Records(found)) if end.kind == EndKind::Topic => {
                    verdict::again(expected, &verdict::second(expected, found))
                }
                (Contents::Records(expected), Contents::Records(found)) => self.letters_again(expected, found),
                (Contents::Heap(expected), Contents::Heap(found)) if matches!(end.kind, EndKind::Ledger(_)) => {
                    verdict::rows_by_content(expected, found)
                }
                _ => self.table_again(end, expected, found),
            };
            // Nothing crashed, but a batch may have been given up.
            let end = End { promise: Promise { may_lose: false, ..end.promise }, ..end.clone() };
            let bound = Bound { lost: 0, doubled: expected.len() as u64 };
            report.ends.push(EndReport { end, tally, bound });
        }
        report.behind = observed.standings.iter().filter(|standing| !standing.is_at_end()).count() as u64;
        report.elapsed = started.elapsed();
        Ok(report)
    }

    /// The Kafka stage rejects the same once more. A Postgres stage may find a record superseded that it rejected: of its
    /// dead letters only which events they are of must not change.
    fn letters_again(&self, expected: &[Seen], found: &[Seen]) -> Tally {
        let of_postgres = |seen: &&Seen| {
            let node = self.stage(seen.node.as_deref());
            node.is_some_and(|stage| self.plan.postgres_sink(stage).is_some())
        };
        let part = |letters: &[Seen]| letters.iter().cloned().partition::<Vec<Seen>, _>(|seen| of_postgres(&seen));
        let ((rows, records), (rows_found, records_found)) = (part(expected), part(found));
        let identity = |letters: &[Seen]| letters.iter().map(|seen| seen.identity().to_owned()).collect::<Vec<_>>();
        let (rows, rows_found) = (identity(&rows), identity(&rows_found));
        let rows = verdict::sets(rows.iter().map(String::as_str), rows_found.iter().map(String::as_str));
        verdict::again(&records, &verdict::second(&records, &records_found)).and(rows)
    }

    /// A table is as it was, but where a record has its effect each time that it is read.
    fn table_again(&self, end: &End, expected: &Contents, found: &Contents) -> Tally {
        let EndKind::Table(node) = end.kind else { return compare(end, expected, found) };
        let stage = self.stage(Some(&self.plan.topology.nodes[node].name)).expect("a sink is a stage");
        let Some(sink) = self.plan.postgres_sink(stage) else { return compare(end, expected, found) };
        if !matches!(sink.mode, Mode::Insert | Mode::Add) || sink.dedupe.is_some() {
            return compare(end, expected, found);
        }
        let written = |topic: &String| self.plan.stages.iter().any(|stage| self.plan.writes(stage).contains(topic));
        let reads = self.plan.reads(stage);
        let (behind, rewound) = (reads.iter().any(written), !self.plan.keeps_positions(stage));
        if behind && !reads.iter().all(written) {
            // Some records were read more often than others: none is missing.
            return Tally { doubled: 0, different: 0, ..compare(end, expected, found) };
        }
        // In the first run; in the second one from the beginning; and what the second one put into the topic.
        let times = 1 + u64::from(rewound) + u64::from(behind);
        match (expected, found) {
            (Contents::Heap(expected), Contents::Heap(found)) => {
                let all = std::iter::repeat_n(expected, times as usize).flatten().cloned().collect();
                compare(end, &Contents::Heap(all), &Contents::Heap(found.clone()))
            }
            (Contents::Rows(expected), Contents::Rows(found)) if end.varies.is_none() => {
                verdict::sums(expected, found, &sink.key, times)
            }
            _ => compare(end, expected, found),
        }
    }

    /// Sets every stage back to the beginning. Only an empty group can be, and a static member that left is missed for a
    /// session.
    fn rewind(&self, plan: &Plan) -> Result<(), Failure> {
        let (connection, admin) = app::connect(&plan.topology)?;
        let admin = Arc::new(admin);
        // Positions beside the rows go back with the database only.
        let stages: Vec<&Stage> = plan.stages.iter().filter(|stage| !plan.keeps_positions(stage)).collect();
        let deadline = Instant::now() + self.plan.topology.session_timeout + Duration::from_secs(10);
        let reset = loop {
            match Reset::look(plan, &stages, &To::Earliest, &connection, &admin) {
                Ok(reset) => break reset,
                Err(failure) if Instant::now() >= deadline || self.interrupted.load(Ordering::Relaxed) => {
                    return Err(failure);
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        };
        reset.carry_out(&connection, &admin)
    }
}
