//! The worker's thread: it polls, processes and hands over, and never waits for a commit. Rebalances arrive as events
//! in its own loop, so that a partition is given up only when no batch names it any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::chunk::Chunk;
use crate::commit::progress::{Progress, SlotId};
use crate::commit::{Cause, Epoch};
use crate::error::{Disposition, Exit, Failure};
use crate::kafka::{Consumer, Error, Polled};
use crate::observe::status::StageStatus;
use crate::record::{Input, Offset, TopicPartition};
use crate::runtime::link::{ToCommitter, ToWorker, WorkerEnd};
use crate::runtime::positions::{Found, Positions};
use crate::runtime::task::Task;

/// Chunks of about this many bytes go to the committer.
const CHUNK_BYTES: usize = 64 * 1024;
/// Records between two looks at the clock.
const RUN: usize = 256;
/// Leaving the group; a broker that does not answer must not hold the process.
const CLOSE: Duration = Duration::from_secs(2);
const IDLE_WAIT: Duration = Duration::from_millis(20);
/// A worker that cannot read on for this long polls with all partitions paused, so that rebalances are served.
const PATIENCE: Duration = Duration::from_secs(1);
const MARKERS_EVERY: Duration = Duration::from_millis(100);
/// Records a batch, once the broker refused one of them and it has to be found.
const ISOLATE_FROM: u64 = 64;

/// What a worker is told.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    pub name: String,
    pub commit_interval: Duration,
    pub batch_records: u64,
    /// Bytes handed over and not yet produced before the worker stops reading.
    pub channel_bytes: usize,
    /// How long a revocation waits for open batches: the lesser of the transaction timeout and half of
    /// `max.poll.interval.ms`.
    pub revoke_timeout: Duration,
    pub shutdown_timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
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
struct Isolation {
    limit: u64,
    reason: &'static str,
    /// Found: it is rejected when it comes again.
    condemned: Option<(TopicPartition, Offset)>,
    passed: u64,
}

/// A worker with its consumer and task, ready to run on a thread of its own.
pub struct Worker {
    consumer: Consumer,
    desk: Desk,
}

/// Everything of a worker but the consumer, which lends out the record at hand.
struct Desk {
    options: WorkerOptions,
    task: Box<dyn Task>,
    positions: Positions,
    link: WorkerEnd,
    status: Arc<StageStatus>,
    stop: Arc<AtomicBool>,
    progress: Progress,
    phase: Phase,
    chunk: Chunk,
    spare: Vec<Chunk>,
    opened: Option<Instant>,
    /// Assigned, but their positions are not stable yet.
    waiting: Vec<TopicPartition>,
    isolation: Option<Isolation>,
    last: Option<(TopicPartition, Offset)>,
    /// The partition of the last record: the next one mostly has the same.
    hot: Option<(TopicPartition, SlotId)>,
    blocked_since: Option<Instant>,
    paused: bool,
    /// A record came while none could be taken: its partition must be read again.
    missed: bool,
    rejoin_until: Option<Instant>,
    markers_at: Instant,
}

impl Worker {
    pub fn new(
        options: WorkerOptions,
        consumer: Consumer,
        task: Box<dyn Task>,
        positions: Positions,
        link: WorkerEnd,
        status: Arc<StageStatus>,
        stop: Arc<AtomicBool>,
    ) -> Worker {
        let desk = Desk {
            options,
            task,
            positions,
            link,
            status,
            stop,
            progress: Progress::default(),
            phase: Phase::Running,
            chunk: Chunk::default(),
            spare: Vec::new(),
            opened: None,
            waiting: Vec::new(),
            isolation: None,
            last: None,
            hot: None,
            blocked_since: None,
            paused: false,
            missed: false,
            rejoin_until: None,
            markers_at: Instant::now(),
        };
        Worker { consumer, desk }
    }

    /// Runs until it is told to stop or cannot go on. What was processed is committed first where that is possible.
    /// Blocks.
    pub fn run(mut self) -> Result<(), Failure> {
        let mut result = Ok(());
        while result.is_ok() && !self.desk.stop.load(Ordering::Relaxed) {
            result = self.turn();
        }
        let drained = match &result {
            // A committer that failed, or a member that was replaced, has nothing left to say.
            Err(failure) if failure.exit != Exit::Stopped => Ok(()),
            _ => self.drain(self.desk.options.shutdown_timeout).map(drop),
        };
        let _ = self.desk.link.work.send(ToCommitter::Close);
        self.await_close();
        self.consumer.close(CLOSE);
        result.and(drained)
    }

    fn turn(&mut self) -> Result<(), Failure> {
        self.take_messages()?;
        match self.desk.phase {
            Phase::Running => self.run_on(),
            Phase::Sealing => {
                if self.desk.settle(Duration::from_millis(5))? {
                    Ok(())
                } else {
                    self.blocked()
                }
            }
            Phase::Recovering(_) => {
                self.desk.blocked_since.get_or_insert_with(Instant::now);
                self.serve(IDLE_WAIT)
            }
            Phase::Repositioning => self.reposition(),
        }
    }

    fn run_on(&mut self) -> Result<(), Failure> {
        self.assign_waiting()?;
        if self.desk.is_due(Instant::now()) {
            self.desk.phase = Phase::Sealing;
            return Ok(());
        }
        if !self.desk.has_room()? {
            if let Ok(message) = self.desk.link.messages.recv_timeout(Duration::from_millis(2)) {
                self.take(message)?;
            }
            return self.blocked();
        }
        if !self.unblock()? {
            return Ok(());
        }
        for _ in 0..RUN {
            match self.consumer.poll(Duration::ZERO) {
                Polled::Record(message) => {
                    if self.desk.record(&message.to_input(Vec::new()))? {
                        return Ok(());
                    }
                }
                Polled::Nothing => return self.idle(),
                other => {
                    let event = Rebalance::of(other);
                    return self.handle(event);
                }
            }
        }
        Ok(())
    }

    /// Nothing to read: what is there goes to the committer, positions step over markers, then wait.
    fn idle(&mut self) -> Result<(), Failure> {
        if self.desk.task.streams() {
            self.desk.hand_over();
        }
        let now = Instant::now();
        if now >= self.desk.markers_at && !self.desk.progress.is_open() {
            self.desk.markers_at = now + MARKERS_EVERY;
            let partitions = self.desk.progress.partitions();
            for (partition, position) in self.consumer.position(&partitions) {
                if let Some(position) = position {
                    self.desk.progress.step_over(&partition, position);
                }
            }
            if self.desk.progress.is_open() {
                self.desk.opened.get_or_insert(now);
            }
        }
        let wait = self.desk.opened.map_or(IDLE_WAIT, |at| {
            (at + self.desk.options.commit_interval).saturating_duration_since(now).min(IDLE_WAIT)
        });
        match self.consumer.poll(wait) {
            Polled::Record(message) => self.desk.record(&message.to_input(Vec::new())).map(drop),
            Polled::Nothing => Ok(()),
            other => {
                let event = Rebalance::of(other);
                self.handle(event)
            }
        }
    }

    /// Cannot read on. Rebalances are served all the same.
    fn blocked(&mut self) -> Result<(), Failure> {
        let since = *self.desk.blocked_since.get_or_insert_with(Instant::now);
        if since.elapsed() < PATIENCE { Ok(()) } else { self.serve(Duration::from_millis(5)) }
    }

    fn serve(&mut self, wait: Duration) -> Result<(), Failure> {
        if !self.desk.paused {
            self.consumer.pause(&self.desk.progress.partitions());
            self.desk.paused = true;
        }
        match self.consumer.poll(wait) {
            Polled::Record(_) => {
                self.desk.missed = true;
                Ok(())
            }
            Polled::Nothing => Ok(()),
            other => {
                let event = Rebalance::of(other);
                self.handle(event)
            }
        }
    }

    /// Makes every partition readable at its position again; false where that has to be tried again.
    fn unblock(&mut self) -> Result<bool, Failure> {
        self.desk.blocked_since = None;
        if std::mem::take(&mut self.desk.paused) {
            self.consumer.resume(&self.desk.progress.partitions());
        }
        if self.desk.missed {
            self.desk.missed = !self.seek_all()?;
        }
        Ok(!self.desk.missed)
    }

    fn handle(&mut self, event: Rebalance) -> Result<(), Failure> {
        match event {
            Rebalance::Assign(partitions) => self.assigned(partitions),
            Rebalance::Revoke { partitions, lost: false } => {
                // What was in the air when a batch failed comes again wherever the partition goes.
                if !self.drain(self.desk.options.revoke_timeout)? {
                    self.desk.abandon();
                }
                self.give_up(&partitions)
            }
            Rebalance::Revoke { partitions, lost: true } => {
                tracing::warn!(worker = self.desk.options.name, count = partitions.len(), "partitions lost");
                self.desk.abandon();
                self.give_up(&partitions)
            }
            Rebalance::Failed(error) => self.reported(error),
        }
    }

    /// An error of the consumer: what it cannot live with ends the worker, the rest it mends by itself.
    fn reported(&self, error: Error) -> Result<(), Failure> {
        match error.disposition() {
            Disposition::Fatal(exit) => Err(Failure::new(exit, error.to_string())),
            Disposition::Retry
            | Disposition::AbortTxn { .. }
            | Disposition::Fenced
            | Disposition::Rebuild
            | Disposition::Reject { .. } => {
                tracing::warn!(worker = self.desk.options.name, %error, "the consumer reports");
                Ok(())
            }
        }
    }

    fn give_up(&mut self, partitions: &[TopicPartition]) -> Result<(), Failure> {
        self.desk.progress.unassign(partitions);
        self.desk.waiting.retain(|p| !partitions.contains(p));
        self.desk.hot = None;
        let answered = self.consumer.unassign(partitions);
        self.desk.status.set_assigned(self.desk.progress.partitions().len());
        tracing::info!(worker = self.desk.options.name, partitions = %list(partitions), "given up");
        answered.or_else(|error| self.reported(error))
    }

    fn assigned(&mut self, partitions: Vec<TopicPartition>) -> Result<(), Failure> {
        let found = self.desk.positions.find(&self.consumer, &partitions, Duration::from_secs(1))?;
        tracing::info!(worker = self.desk.options.name, partitions = %list(&partitions), "assigned");
        self.desk.waiting.extend(found.unstable.iter().cloned());
        let answered = self.consumer.assign(&found.at());
        self.settle_in(found);
        answered.or_else(|error| self.reported(error))
    }

    fn assign_waiting(&mut self) -> Result<(), Failure> {
        if self.desk.waiting.is_empty() {
            return Ok(());
        }
        let partitions = std::mem::take(&mut self.desk.waiting);
        let found = self.desk.positions.find(&self.consumer, &partitions, Duration::from_millis(200))?;
        self.desk.waiting.extend(found.unstable.iter().cloned());
        if !found.known.is_empty()
            && let Err(error) = self.consumer.add(&found.at())
        {
            self.desk.waiting.extend(found.known.into_iter().map(|(partition, _, _)| partition));
            return self.reported(error);
        }
        self.settle_in(found);
        Ok(())
    }

    fn settle_in(&mut self, found: Found) {
        for (partition, position, fresh) in found.known {
            if fresh {
                self.desk.opened.get_or_insert_with(Instant::now);
            }
            self.desk.progress.assign(partition, position, fresh);
        }
        self.desk.hot = None;
        self.desk.status.set_assigned(self.desk.progress.partitions().len());
    }

    /// Commits what is processed and waits until nothing is open; false when that did not come about in time or the
    /// epoch was given up on the way.
    fn drain(&mut self, timeout: Duration) -> Result<bool, Failure> {
        let deadline = Instant::now() + timeout;
        loop {
            if !matches!(self.desk.phase, Phase::Running | Phase::Sealing) {
                return Ok(true);
            }
            let settled = self.desk.settle(Duration::from_millis(5))?;
            if settled && self.desk.progress.in_flight() == 0 {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            if let Ok(message) = self.desk.link.messages.recv_timeout(Duration::from_millis(5)) {
                self.take(message)?;
            }
        }
    }

    fn await_close(&mut self) {
        let deadline = Instant::now() + self.desk.options.shutdown_timeout;
        while let Ok(message) = self.desk.link.messages.recv_deadline(deadline) {
            if matches!(message, ToWorker::Closed | ToWorker::Failed(_)) {
                return;
            }
        }
    }

    fn take_messages(&mut self) -> Result<(), Failure> {
        while let Ok(message) = self.desk.link.messages.try_recv() {
            self.take(message)?;
        }
        Ok(())
    }

    fn take(&mut self, message: ToWorker) -> Result<(), Failure> {
        let desk = &mut self.desk;
        match message {
            ToWorker::Buffer(chunk) => desk.spare.push(chunk),
            ToWorker::Committed(batch) => {
                if let Some(sealed) = desk.progress.committed(batch) {
                    desk.passed(&sealed.positions);
                }
            }
            ToWorker::Report { epoch, cause } if epoch == desk.progress.epoch() => {
                desk.isolate(cause);
                desk.give_up_epoch();
                desk.phase = Phase::Repositioning;
                desk.rejoin_until = (cause == Cause::Rejoin).then(|| Instant::now() + PATIENCE);
            }
            ToWorker::Report { epoch, .. } if desk.phase == Phase::Recovering(epoch) => {
                desk.phase = Phase::Repositioning;
            }
            ToWorker::Report { .. } | ToWorker::Closed => {}
            ToWorker::Failed(failure) => return Err(failure),
        }
        Ok(())
    }

    /// Reads the broker's stable positions and goes back to them.
    fn reposition(&mut self) -> Result<(), Failure> {
        if self.desk.rejoin_until.is_some_and(|until| Instant::now() < until) {
            return self.serve(IDLE_WAIT);
        }
        self.desk.rejoin_until = None;
        let partitions = self.desk.progress.partitions();
        let found = self.desk.positions.find(&self.consumer, &partitions, Duration::from_secs(1))?;
        if !found.unstable.is_empty() {
            return self.serve(IDLE_WAIT);
        }
        self.settle_in(found);
        self.desk.phase = Phase::Running;
        self.desk.missed = true;
        Ok(())
    }

    /// Seeks every partition to its position; false where a rebalance came between. A partition that was only just
    /// assigned refuses at first.
    fn seek_all(&mut self) -> Result<bool, Failure> {
        let mut pending = self.desk.progress.positions();
        let deadline = Instant::now() + self.desk.options.revoke_timeout;
        while !pending.is_empty() {
            let results = self.consumer.seek(&pending, PATIENCE);
            let Some((partition, error)) = results.iter().find_map(|(p, r)| r.as_ref().err().map(|e| (p.clone(), e)))
            else {
                return Ok(true);
            };
            if Instant::now() >= deadline {
                return Err(Failure::stopped(format!("cannot go back to the position of {partition}: {error}")));
            }
            match self.consumer.poll(IDLE_WAIT) {
                // It may be of a partition that is back already: all are sought again.
                Polled::Record(_) => pending = self.desk.progress.positions(),
                Polled::Nothing => {
                    pending.retain(|(p, _)| results.iter().any(|(q, result)| p == q && result.is_err()));
                }
                other => {
                    let event = Rebalance::of(other);
                    self.handle(event)?;
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

impl Desk {
    /// Processes a record; true when the batch is to be ended now.
    fn record(&mut self, input: &Input<'_>) -> Result<bool, Failure> {
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
        self.opened.get_or_insert_with(Instant::now);
        match &mut self.isolation {
            Some(Isolation { condemned: Some((partition, offset)), reason, .. })
                if *offset == input.offset
                    && partition.partition == input.partition
                    && *partition.topic == *input.topic =>
            {
                self.task.reject(input, reason, &mut self.chunk)?;
            }
            _ => self.task.process(input, &mut self.chunk)?,
        }
        self.status.records_in.add(1);
        self.progress.processed(slot, input.offset);
        if self.isolation.is_some() {
            self.last = self.hot.as_ref().map(|(partition, _)| (partition.clone(), input.offset));
        }
        if self.chunk.bytes_len() >= CHUNK_BYTES && self.task.streams() {
            self.hand_over();
        }
        Ok(self.progress.open_records() >= self.batch_limit())
    }

    fn batch_limit(&self) -> u64 {
        self.isolation.as_ref().map_or(self.options.batch_records, |i| i.limit.min(self.options.batch_records))
    }

    fn is_due(&self, now: Instant) -> bool {
        self.progress.open_records() >= self.batch_limit()
            || self.opened.is_some_and(|at| now.duration_since(at) >= self.options.commit_interval)
    }

    fn has_room(&mut self) -> Result<bool, Failure> {
        // While a refused record is looked for, one batch at a time tells which batch it was in.
        let alone = self.isolation.is_none() || self.progress.in_flight() == 0;
        Ok(alone && self.link.bytes() < self.options.channel_bytes && self.task.has_room()?)
    }

    fn hand_over(&mut self) {
        if self.chunk.is_empty() {
            return;
        }
        let next = self.spare.pop().unwrap_or_default();
        let chunk = std::mem::replace(&mut self.chunk, next);
        self.link.outputs(self.progress.epoch(), chunk);
    }

    /// Ends the batch once the task's effects are through; true when that is done.
    fn settle(&mut self, wait: Duration) -> Result<bool, Failure> {
        if !self.task.settle(&mut self.chunk, wait)? {
            self.phase = Phase::Sealing;
            return Ok(false);
        }
        self.hand_over();
        self.opened = None;
        if let Some(sealed) = self.progress.seal() {
            let _ = self.link.work.send(ToCommitter::Seal { sealed, at: Instant::now() });
        }
        self.phase = Phase::Running;
        Ok(true)
    }

    /// Gives the open and sealed batches up before the committer is asked.
    fn abandon(&mut self) {
        if let Phase::Recovering(_) = self.phase {
            return;
        }
        let epoch = self.give_up_epoch();
        self.link.abandon(epoch);
        self.phase = Phase::Recovering(epoch);
    }

    fn give_up_epoch(&mut self) -> Epoch {
        self.chunk.clear();
        self.opened = None;
        self.last = None;
        self.task.abandon();
        self.progress.abandon()
    }

    /// The broker refused a record: batches shrink until it is alone in one.
    fn isolate(&mut self, cause: Cause) {
        let Cause::Record(reason) = cause else { return };
        let limit = self.isolation.as_ref().map_or(ISOLATE_FROM, |i| i.limit / 2).max(1);
        let alone = self.isolation.as_ref().is_some_and(|i| i.limit == 1);
        let condemned = if alone { self.last.take() } else { None };
        if let Some((partition, offset)) = &condemned {
            tracing::warn!(%partition, %offset, reason, "the broker refuses this record");
        }
        self.isolation = Some(Isolation { limit, reason, condemned, passed: 0 });
    }

    /// Ends the search when the condemned record is behind, or when enough passed without a refusal.
    fn passed(&mut self, positions: &[(TopicPartition, crate::record::Position)]) {
        let Some(isolation) = &mut self.isolation else { return };
        isolation.passed += 1;
        let behind = isolation
            .condemned
            .as_ref()
            .is_some_and(|(p, offset)| positions.iter().any(|(q, position)| p == q && *position >= offset.next()));
        if behind || isolation.passed > 4 * ISOLATE_FROM {
            self.isolation = None;
        }
    }
}

/// What is not a record.
enum Rebalance {
    Assign(Vec<TopicPartition>),
    Revoke { partitions: Vec<TopicPartition>, lost: bool },
    Failed(Error),
}

impl Rebalance {
    fn of(polled: Polled<'_>) -> Rebalance {
        match polled {
            Polled::Assign(partitions) => Rebalance::Assign(partitions),
            Polled::Revoke { partitions, lost } => Rebalance::Revoke { partitions, lost },
            Polled::Failed(error) => Rebalance::Failed(error),
            Polled::Record(_) | Polled::Nothing | Polled::EndOfPartition(_) => unreachable!("not asked for"),
        }
    }
}

fn list(partitions: &[TopicPartition]) -> String {
    let names: Vec<String> = partitions.iter().map(TopicPartition::to_string).collect();
    names.join(", ")
}
