//! What a worker keeps between polls: its positions and open batch, and where it stands with its committer.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::WorkerOptions;
use super::merge::Merge;
use crate::chunk::Chunk;
use crate::commit::progress::{Progress, SlotId};
use crate::commit::{Cause, Epoch};
use crate::crash::{self, Point};
use crate::error::Failure;
use crate::observe::status::StageStatus;
use crate::record::{Input, Offset, Position, TopicPartition};
use crate::reject::restored;
use crate::runtime::link::{ToCommitter, WorkerEnd};
use crate::runtime::positions::{Found, Positions};
use crate::runtime::task::Task;
use crate::topology::spec::Guarantee;

/// Chunks of about this many bytes go to the committer.
const CHUNK_BYTES: usize = 64 * 1024;
const SAY_EVERY: Duration = Duration::from_secs(10);
/// Records a batch, once the broker refused one of them and it has to be found.
const ISOLATE_FROM: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Running,
    /// The batch ends as soon as the task's effects outside Kafka are through.
    Sealing,
    /// The epoch was given up; waiting until nothing of it is open.
    Recovering(Epoch),
    /// Going back to the committed positions.
    Repositioning,
}

/// Looks for a record that the broker refuses, by ever smaller batches.
#[derive(Clone, Debug)]
pub(super) struct Isolation {
    pub(super) limit: u64,
    pub(super) reason: &'static str,
    /// Found: it is rejected when it comes again.
    pub(super) condemned: Option<(TopicPartition, Offset)>,
    /// Partitions with where that ends which was given up with the record. However much passes elsewhere, as while one of
    /// them restores its state, the search is not over before they are behind it.
    pub(super) suspects: Vec<(TopicPartition, Position)>,
}

impl Isolation {
    /// Takes committed positions; true when the condemned record is behind, or everything that was suspected.
    fn committed(&mut self, positions: &[(TopicPartition, Position)]) -> bool {
        let behind = |partition: &TopicPartition, end: Position| {
            positions.iter().any(|(other, position)| other == partition && *position >= end)
        };
        self.suspects.retain(|(partition, end)| !behind(partition, *end));
        self.suspects.is_empty() || self.condemned.as_ref().is_some_and(|(p, offset)| behind(p, offset.next()))
    }

    /// Partitions went to others; true when nothing is left to look for here.
    fn given_up(&mut self, partitions: &[TopicPartition]) -> bool {
        self.suspects.retain(|(partition, _)| !partitions.contains(partition));
        self.suspects.is_empty()
    }
}

/// Everything of a worker but the consumer, which lends out the record at hand.
pub(super) struct State {
    pub(super) options: WorkerOptions,
    pub(super) task: Box<dyn Task>,
    pub(super) positions: Positions,
    pub(super) link: WorkerEnd,
    pub(super) status: Arc<StageStatus>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) progress: Progress,
    pub(super) phase: Phase,
    pub(super) chunk: Chunk,
    /// Outputs of the chunk that are counted as owed.
    pub(super) owing: u64,
    pub(super) spare: Vec<Chunk>,
    pub(super) opened: Option<Instant>,
    /// Assigned, but their positions are not stable yet.
    pub(super) waiting: Vec<TopicPartition>,
    /// Assigned, but the task is not ready for them yet.
    pub(super) preparing: Vec<TopicPartition>,
    /// Records that wait for those of other topics.
    pub(super) merge: Merge,
    pub(super) isolation: Option<Isolation>,
    pub(super) last: Option<(TopicPartition, Offset)>,
    /// The partition of the last record: the next one mostly has the same.
    pub(super) hot: Option<(TopicPartition, SlotId)>,
    pub(super) blocked_since: Option<Instant>,
    pub(super) paused: bool,
    /// A record came while none could be taken: its partition must be read again.
    pub(super) missed: bool,
    pub(super) rejoin_until: Option<Instant>,
    /// A partition has no committed position yet: nothing is read before it has.
    pub(super) fresh: bool,
    /// Where such partitions start, as it was found first.
    pub(super) resolved: HashMap<TopicPartition, Position>,
    pub(super) markers_at: Instant,
    pub(super) tick_at: Instant,
    /// When unstable positions may be spoken of again.
    pub(super) quiet_until: Instant,
    /// Since when a task has had a part that another member has.
    pub(super) parted_since: Option<Instant>,
}

impl State {
    /// Tells the user, now and then, why partitions wait.
    pub(super) fn say_unstable(&mut self, found: &Found) {
        let now = Instant::now();
        if let Some(why) = found.why.as_ref().filter(|_| now >= self.quiet_until) {
            self.quiet_until = now + SAY_EVERY;
            let (worker, partitions) = (&self.options.name, found.unstable.len());
            tracing::warn!(worker, partitions, %why, "waiting for positions that can be read");
        }
    }

    /// Takes out of what was found the partitions that the task is not ready for.
    pub(super) fn hold_back(&mut self, found: &mut Found) -> Result<Vec<TopicPartition>, Failure> {
        let partitions: Vec<TopicPartition> = found.known.iter().map(|(partition, ..)| partition.clone()).collect();
        let unready = self.task.prepare(&partitions)?;
        found.known.retain(|(partition, ..)| !unready.contains(partition));
        for (partition, position, _) in &found.known {
            if let Some(state) = self.task.revision(partition).filter(|revision| *revision > 0) {
                let committed = found.revisions.get(partition).copied().flatten();
                self.positions.is_of_state(partition, *position, committed, state, self.options.guarantee)?;
            }
        }
        self.preparing.extend(unready.iter().cloned());
        Ok(unready)
    }

    /// Tells the user, now and then, that a task waits for a part of it that another member has.
    pub(super) fn say_parted(&mut self, now: Instant) {
        let there = [&self.waiting, &self.preparing].into_iter().flatten();
        let assigned: Vec<TopicPartition> = self.progress.partitions().into_iter().chain(there.cloned()).collect();
        let parted = self.merge.parted(&assigned);
        let Some((here, missing)) = parted.first() else {
            self.parted_since = None;
            return;
        };
        // A rebalance gives partitions one after another.
        let since = *self.parted_since.get_or_insert(now);
        if now.duration_since(since) >= SAY_EVERY {
            self.parted_since = Some(now);
            tracing::warn!(
                worker = self.options.name,
                %here,
                %missing,
                tasks = parted.len(),
                "waiting for a partition that another member of the group has: what is joined has to be divided by range; stop \
                 every process of this job, then start them again"
            );
        }
    }

    /// Takes a record that was read: it is processed, or waits for its turn. True when nothing more is to be read before the
    /// batch, or what waits, was looked at.
    pub(super) fn read(&mut self, input: &Input<'_>) -> Result<bool, Failure> {
        if !self.merge.takes(input.topic) {
            return self.record(input);
        }
        let time = self.task.time(input);
        self.merge.push(input, time);
        Ok(self.merge.is_full())
    }

    /// Processes up to so many records whose turn it is; true when there may be more of them, or the batch is to be ended now.
    pub(super) fn in_turn(&mut self, now: Instant, most: usize) -> Result<bool, Failure> {
        for _ in 0..most {
            let Some(record) = self.merge.next(now) else { return Ok(false) };
            if self.record(&record.input())? {
                return Ok(true);
            }
        }
        Ok(true)
    }

    /// Processes a record; true when the batch is to be ended now.
    pub(super) fn record(&mut self, input: &Input<'_>) -> Result<bool, Failure> {
        let slot = match &self.hot {
            Some((partition, slot)) if partition.partition == input.partition && *partition.topic == *input.topic => {
                *slot
            }
            _ => {
                let Some(slot) = self.progress.slot(input.topic, input.partition) else { return Ok(false) };
                self.hot = Some((TopicPartition::new(input.topic, input.partition), slot));
                slot
            }
        };
        if !self.progress.is_due(slot, input.offset) {
            return Ok(false);
        }
        crash::at(Point::AfterPoll);
        if self.opened.is_none() {
            self.opened = Some(Instant::now());
            self.status.begin();
        }
        if let Some((partition, _)) = &self.hot {
            self.task.reading(partition, input.offset);
        }
        match &mut self.isolation {
            Some(Isolation { condemned: Some((partition, offset)), reason, .. })
                if *offset == input.offset
                    && partition.partition == input.partition
                    && *partition.topic == *input.topic =>
            {
                let message = format!("the broker refused what this record made: {reason}");
                let restored = if self.options.retry.is(input) { restored(input) } else { None };
                self.task.reject(restored.as_ref().unwrap_or(input), "broker", message, &mut self.chunk)?;
            }
            _ if self.options.retry.is(input) => match restored(input).filter(|i| self.options.retry.knows(i)) {
                Some(restored) => self.task.process(&restored, &mut self.chunk)?,
                None => {
                    let message = "no header says which source of this stage it comes from".to_owned();
                    self.task.reject(input, "retry", message, &mut self.chunk)?;
                }
            },
            _ => self.task.process(input, &mut self.chunk)?,
        }
        self.task.processed();
        self.status.records_in.add(1);
        self.progress.processed(slot, input.offset);
        crash::at(Point::AfterProcess);
        if self.isolation.is_some() {
            self.last = self.hot.as_ref().map(|(partition, _)| (partition.clone(), input.offset));
        }
        if self.chunk.bytes_len() >= CHUNK_BYTES && self.streams() {
            self.hand_over();
        }
        Ok(self.is_full())
    }

    /// Lets the task do what time brings about; true when the batch is to be ended by it, before another record is taken.
    pub(super) fn tick(&mut self, now: Instant) -> Result<bool, Failure> {
        if now < self.tick_at || !self.task.has_timers() {
            return Ok(false);
        }
        // A worker that could not read on knows of no partition that it is quiet.
        if now >= self.tick_at + super::PATIENCE {
            self.task.quiet_anew();
        }
        self.tick_at = now + super::TICK_EVERY;
        let mut positions = self.progress.positions();
        // Where records wait for their turn it is not quiet; and what windows are joined with may be elsewhere.
        positions.retain(|(partition, _)| !self.merge.holds(partition) && self.merge.is_whole(partition));
        let touched = self.task.tick(&positions, &mut self.chunk)?;
        for partition in &touched {
            self.progress.touch(partition);
        }
        if !touched.is_empty() && self.opened.is_none() {
            self.opened = Some(now);
            self.status.begin();
        }
        Ok(!touched.is_empty() && self.is_full())
    }

    pub(super) fn batch_limit(&self) -> u64 {
        self.isolation.as_ref().map_or(self.options.batch_records, |i| i.limit.min(self.options.batch_records))
    }

    /// Whether the open batch takes no further record.
    fn is_full(&self) -> bool {
        self.progress.open_records() >= self.batch_limit()
            || self.task.is_full()
            || self.chunk.bytes_len() >= self.options.channel_bytes
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.is_full() || (self.is_over(now) && !self.is_held_up())
    }

    /// Whether the open batch has had its time.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.opened.is_some_and(|at| now.duration_since(at) >= self.options.commit_interval)
    }

    /// Whether the batch goes on growing until the one before is committed: where a commit takes longer than the interval,
    /// a queue of sealed batches would only be delay, and more commits than the broker can do. Effects outside Kafka wait
    /// for no commit in it.
    pub(super) fn is_held_up(&self) -> bool {
        self.streams() && self.progress.in_flight() > 0
    }

    pub(super) fn has_room(&mut self) -> Result<bool, Failure> {
        // While a refused record is looked for, one batch at a time tells which batch it was in.
        let alone = self.isolation.is_none() || self.progress.in_flight() == 0;
        Ok(alone && !self.fresh && self.link.bytes() < self.options.channel_bytes && self.task.has_room()?)
    }

    pub(super) fn hand_over(&mut self) {
        if self.chunk.is_empty() {
            return;
        }
        if self.positions_first() {
            self.owe();
            self.owing = 0;
        }
        let next = self.spare.pop().unwrap_or_default();
        let chunk = std::mem::replace(&mut self.chunk, next);
        self.link.outputs(self.progress.epoch(), chunk);
    }

    /// Ends the batch once the task's effects are through; true when that is done. At-most-once puts positions first:
    /// effects follow when they are committed.
    pub(super) fn settle(&mut self, wait: Duration) -> Result<bool, Failure> {
        if self.positions_first() {
            self.seal();
        }
        if self.awaits_commit() || self.is_backed_up() || !self.task.settle(&mut self.chunk, wait)? {
            if self.chunk.bytes_len() >= CHUNK_BYTES && self.streams() {
                self.hand_over();
            }
            self.phase = Phase::Sealing;
            return Ok(false);
        }
        if !self.positions_first() {
            let progress = &mut self.progress;
            self.task.revise(&mut self.chunk, &mut |partition| progress.touch(partition));
        }
        self.hand_over();
        self.opened = None;
        self.seal();
        self.phase = Phase::Running;
        Ok(true)
    }

    fn seal(&mut self) {
        if self.positions_first() {
            self.owe();
        }
        if let Some(mut sealed) = self.progress.seal() {
            let revision =
                |(partition, _): &(TopicPartition, Position)| Some((partition.clone(), self.task.revision(partition)?));
            sealed.revisions = sealed.positions.iter().filter_map(revision).collect();
            self.task.sealed(sealed.batch);
            let _ = self.link.work.send(ToCommitter::Seal { sealed, at: Instant::now() });
        }
    }

    /// Counts the open outputs, before their positions are committed.
    fn owe(&mut self) {
        let more = self.chunk.len() as u64 - self.owing;
        self.owing += more;
        self.link.owed().add(more);
        self.status.owed.add(more);
    }

    fn positions_first(&self) -> bool {
        self.options.guarantee == Guarantee::AtMostOnce
    }

    /// Whether the batch that ends waits for its positions to be committed.
    pub(super) fn awaits_commit(&self) -> bool {
        self.positions_first() && self.progress.in_flight() > 0
    }

    /// Whether the task has more to put into the batch than the committer has taken over.
    pub(super) fn is_backed_up(&self) -> bool {
        self.task.is_full() && self.streams() && self.link.bytes() >= self.options.channel_bytes
    }

    /// Whether nothing of what was sealed is under way: no positions, and no outputs that follow theirs.
    pub(super) fn is_through(&self) -> bool {
        self.progress.in_flight() == 0 && self.link.owed().get() == 0
    }

    /// Whether outputs may go to the committer while the batch is open.
    pub(super) fn streams(&self) -> bool {
        !self.positions_first() && self.task.streams()
    }

    /// Gives the open and sealed batches up before the committer is asked.
    pub(super) fn abandon(&mut self) {
        if let Phase::Recovering(_) = self.phase {
            return;
        }
        let epoch = self.give_up_epoch();
        self.link.abandon(epoch);
        self.phase = Phase::Recovering(epoch);
    }

    pub(super) fn give_up_epoch(&mut self) -> Epoch {
        // Positions that were committed first stay: nothing of these comes again.
        if self.positions_first() && !self.progress.is_open() && self.progress.in_flight() == 0 {
            let lost = self.chunk.len() as u64 + self.task.held();
            if lost > 0 {
                self.status.lost.add(lost);
                tracing::warn!(worker = self.options.name, lost, "given up after their positions (at-most-once)");
            }
        }
        self.link.owed().sub(self.owing);
        self.status.owed.sub(self.owing);
        self.owing = 0;
        self.chunk.clear();
        self.opened = None;
        self.last = None;
        self.task.abandon();
        self.progress.abandon()
    }

    /// The broker refused a record: batches shrink until it is alone in one. Where it refuses the dead letter too,
    /// nothing is left to try.
    pub(super) fn isolate(&mut self, cause: Cause) -> Result<(), Failure> {
        let Cause::Record(reason) = cause else { return Ok(()) };
        let limit = self.isolation.as_ref().map_or(ISOLATE_FROM, |i| i.limit / 2).max(1);
        let former = self.isolation.take();
        let alone = former.as_ref().is_some_and(|i| i.limit == 1);
        // Beside the rows nothing but letters goes to Kafka, and a record at hand may be none of theirs.
        if alone && self.positions.store.is_some() {
            self.give_up_epoch();
            return Err(Failure::stopped(format!(
                "the broker refuses a dead letter that lies in semel.dead_letters ({reason}): look at the settings of the \
                 dead-letter topic"
            )));
        }
        let condemned = if alone { self.last.take() } else { None };
        if let Some((partition, offset)) = &condemned {
            tracing::warn!(%partition, %offset, reason, "the broker refuses this record");
            if former.is_some_and(|i| i.condemned == condemned) {
                self.give_up_epoch();
                return Err(Failure::stopped(format!(
                    "the broker refuses even the dead letter of {partition} offset {offset} ({reason}): look at the \
                     settings of the dead-letter topic"
                )));
            }
        }
        self.isolation = Some(Isolation { limit, reason, condemned, suspects: self.progress.uncommitted() });
        Ok(())
    }

    /// Ends the search for a refused record where it is over.
    pub(super) fn passed(&mut self, positions: &[(TopicPartition, Position)]) {
        if !self.resolved.is_empty() {
            for (partition, _) in positions {
                if self.resolved.remove(partition).is_some() {
                    self.positions.started(partition);
                }
            }
        }
        self.isolation.take_if(|isolation| isolation.committed(positions));
    }

    /// What is searched in partitions that went to others is theirs to find.
    pub(super) fn stop_searching(&mut self, partitions: &[TopicPartition]) {
        self.isolation.take_if(|isolation| isolation.given_up(partitions));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(partition: i32, position: i64) -> (TopicPartition, Position) {
        (TopicPartition::new("in", partition), Position(position))
    }

    fn isolation(suspects: Vec<(TopicPartition, Position)>) -> Isolation {
        Isolation { limit: 64, reason: "message-too-large", condemned: None, suspects }
    }

    #[test]
    fn a_search_goes_on_until_all_that_is_suspected_is_behind_however_much_passes_elsewhere() {
        let mut search = isolation(vec![at(0, 10), at(1, 20)]);
        for passed in 0..10_000 {
            // Partition 1 restores its state meanwhile.
            assert!(!search.committed(&[at(0, passed), at(2, passed)]));
        }
        assert!(!search.committed(&[at(1, 19)]));
        assert!(search.committed(&[at(1, 20)]));
    }

    #[test]
    fn a_search_ends_with_the_condemned_record_or_with_the_partition_that_it_is_in() {
        let condemned = Some((TopicPartition::new("in", 1), Offset(14)));
        let mut search = Isolation { condemned, ..isolation(vec![at(0, 10), at(1, 20)]) };
        assert!(!search.committed(&[at(1, 14)]));
        assert!(search.committed(&[at(1, 15)]));
        let mut search = isolation(vec![at(0, 10), at(1, 20)]);
        assert!(!search.given_up(&[TopicPartition::new("in", 1), TopicPartition::new("in", 2)]));
        assert!(search.given_up(&[TopicPartition::new("in", 0)]));
    }
}
