//! The worker's thread: it polls, processes and hands over, and never waits for a commit. Rebalances arrive as events
//! in its own loop, so that a partition is given up only when no batch names it any more.

mod member;
mod merge;
mod state;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use self::member::Rebalance;
use self::merge::Merge;
use self::state::{Phase, State};
use crate::chunk::Chunk;
use crate::commit::Cause;
use crate::commit::progress::Progress;
use crate::error::{Exit, Failure};
use crate::kafka::{Consumer, GroupHandle, Polled};
use crate::observe::status::StageStatus;
use crate::record::Input;
use crate::runtime::link::{ToWorker, WorkerEnd};
use crate::runtime::positions::Positions;
use crate::runtime::task::Task;
use crate::topology::spec::Guarantee;

/// Records between two looks at the clock.
const RUN: usize = 256;
/// Leaving the group; a broker that does not answer must not hold the process.
const CLOSE: Duration = Duration::from_secs(2);
const IDLE_WAIT: Duration = Duration::from_millis(20);
/// A worker that cannot read on for this long polls with all partitions paused, so that rebalances are served.
const PATIENCE: Duration = Duration::from_secs(1);
const MARKERS_EVERY: Duration = Duration::from_millis(100);
const TICK_EVERY: Duration = Duration::from_millis(100);

/// What a worker is told.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    pub name: String,
    pub guarantee: Guarantee,
    pub commit_interval: Duration,
    pub batch_records: u64,
    /// Bytes handed over and not yet produced before the worker stops reading.
    pub channel_bytes: usize,
    /// How long a revocation waits for open batches: the lesser of the transaction timeout and half of
    /// `max.poll.interval.ms`.
    pub revoke_timeout: Duration,
    pub session_timeout: Duration,
    /// How long the group may take to let the worker in before its client is made anew; `None`: it never is.
    pub outside_max: Option<Duration>,
    pub shutdown_timeout: Duration,
    pub retry: RetryTopic,
    pub co_partitioned: CoPartitioned,
}

/// Topics whose records meet by key.
#[derive(Clone, Debug, Default)]
pub struct CoPartitioned {
    /// Topics whose partitions of one number are a task.
    pub topics: Vec<Vec<String>>,
    /// How long an input that is at its end is waited for.
    pub max_task_idle: Duration,
    /// Bytes of records that may wait for those of other inputs, about.
    pub bytes: usize,
}

/// The topic through which dead letters come back to a stage.
#[derive(Clone, Debug)]
pub struct RetryTopic {
    pub topic: String,
    /// The topics that the stage reads: a record has to come from one of them.
    pub sources: Vec<String>,
}

impl RetryTopic {
    fn is(&self, input: &Input<'_>) -> bool {
        self.topic == input.topic
    }

    fn knows(&self, restored: &Input<'_>) -> bool {
        self.sources.iter().any(|topic| *topic == restored.topic)
    }
}

/// A worker with its consumer and task, ready to run on a thread of its own.
pub struct Worker {
    consumer: Consumer,
    state: State,
    /// When another member was last met under our name.
    fenced_at: Option<Instant>,
    /// When the membership is looked at next, and since when there is none.
    looked_at: Instant,
    outside_since: Option<Instant>,
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
        let CoPartitioned { topics, max_task_idle, bytes } = &options.co_partitioned;
        let state = State {
            merge: Merge::new(topics, *max_task_idle, *bytes),
            options,
            task,
            positions,
            link,
            status,
            stop,
            progress: Progress::default(),
            phase: Phase::Running,
            chunk: Chunk::default(),
            owing: 0,
            spare: Vec::new(),
            opened: None,
            waiting: Vec::new(),
            preparing: Vec::new(),
            isolation: None,
            last: None,
            hot: None,
            blocked_since: None,
            paused: false,
            missed: false,
            rejoin_until: None,
            fresh: false,
            resolved: HashMap::new(),
            markers_at: Instant::now(),
            tick_at: Instant::now(),
            quiet_until: Instant::now() + PATIENCE,
            parted_since: None,
        };
        Worker { consumer, state, fenced_at: None, looked_at: Instant::now(), outside_since: None }
    }

    /// Its membership of the group, for another thread.
    pub fn member(&self) -> GroupHandle {
        self.consumer.group()
    }

    /// Runs until it is told to stop or cannot go on. What was processed is committed first where that is possible.
    /// Blocks.
    pub fn run(mut self) -> Result<(), Failure> {
        let mut result = Ok(());
        while result.is_ok() && !self.state.stop.load(Ordering::Relaxed) {
            result = self.turn();
        }
        let drained = match &result {
            // A committer that failed, or a member that was replaced, has nothing left to say.
            Err(failure) if failure.exit != Exit::Stopped => Ok(()),
            _ => self.finish(),
        };
        self.state.task.close(CLOSE);
        self.state.link.close();
        self.await_close();
        self.consumer.close(CLOSE);
        result.and(drained)
    }

    /// Commits what is processed, as far as that comes about within the shutdown timeout. Rebalances are served
    /// meanwhile: a member that was asleep has to join again before its committer goes on.
    fn finish(&mut self) -> Result<(), Failure> {
        let deadline = Instant::now() + self.state.options.shutdown_timeout;
        while Instant::now() < deadline {
            self.take_messages()?;
            if !matches!(self.state.phase, Phase::Running | Phase::Sealing) || self.state.task.is_fenced() {
                return Ok(());
            }
            if self.state.settle(Duration::from_millis(5))? && self.state.is_through() {
                return Ok(());
            }
            self.serve(Duration::from_millis(5))?;
        }
        Ok(())
    }

    fn turn(&mut self) -> Result<(), Failure> {
        self.take_messages()?;
        self.rejoin_if_fenced();
        self.rejoin_if_outside()?;
        match self.state.phase {
            Phase::Running => self.run_on(),
            Phase::Sealing => {
                if self.state.settle(Duration::from_millis(5))? {
                    return Ok(());
                }
                if (self.state.awaits_commit() || self.state.is_backed_up())
                    && let Ok(message) = self.state.link.messages.recv_timeout(Duration::from_millis(5))
                {
                    self.take(message)?;
                }
                self.blocked()
            }
            Phase::Recovering(_) => {
                self.state.blocked_since.get_or_insert_with(Instant::now);
                self.serve(IDLE_WAIT)
            }
            Phase::Repositioning => self.reposition(),
        }
    }

    /// Another may own what the task writes to: what is open is given up. The group is asked first; what it still says is
    /// ours is claimed anew then.
    fn rejoin_if_fenced(&mut self) {
        if matches!(self.state.phase, Phase::Running | Phase::Sealing) && self.state.task.is_fenced() {
            self.state.abandon();
            self.state.rejoin_until = Some(Instant::now() + PATIENCE);
        }
    }

    fn run_on(&mut self) -> Result<(), Failure> {
        self.assign_waiting()?;
        if self.state.fresh {
            // Where a partition starts is committed before its first record, so that it is resolved once.
            if self.state.progress.is_open() {
                self.state.phase = Phase::Sealing;
                return Ok(());
            }
            self.state.fresh = self.state.progress.in_flight() > 0;
        }
        let now = Instant::now();
        if self.state.is_due(now) {
            self.step_over_markers(now);
            self.state.phase = Phase::Sealing;
            return Ok(());
        }
        if !self.state.has_room()? {
            if let Ok(message) = self.state.link.messages.recv_timeout(Duration::from_millis(2)) {
                self.take(message)?;
            }
            return self.blocked();
        }
        if !self.unblock()? {
            return Ok(());
        }
        if self.state.tick(now)? {
            return Ok(());
        }
        if !self.state.merge.is_off() && self.in_turn(now)? {
            return Ok(());
        }
        for _ in 0..RUN {
            match self.consumer.poll(Duration::ZERO) {
                Polled::Record(message) => {
                    if self.state.read(&message.to_input(Vec::new()))? {
                        return Ok(());
                    }
                }
                Polled::Nothing if self.state.merge.is_ready(now) => return Ok(()),
                Polled::Nothing => return self.idle(),
                other => {
                    let event = Rebalance::of(other);
                    return self.handle(event);
                }
            }
        }
        Ok(())
    }

    /// Processes records that wait, some at a time; true when there may be more of them, or the batch is to be ended now. What
    /// runs ahead of the other inputs of its task is paused.
    fn in_turn(&mut self, now: Instant) -> Result<bool, Failure> {
        self.state.say_parted(now);
        let more = self.state.in_turn(now, RUN)?;
        let (full, low) = self.state.merge.flow();
        if !full.is_empty() {
            self.consumer.pause(&full);
        }
        if !low.is_empty() {
            self.consumer.resume(&low);
        }
        Ok(more)
    }

    /// Nothing to read: what is there goes to the committer, positions step over markers, then wait.
    fn idle(&mut self) -> Result<(), Failure> {
        if self.state.streams() {
            self.state.hand_over();
        }
        let now = Instant::now();
        self.step_over_markers(now);
        if self.state.is_over(now) && self.state.is_held_up() {
            // The batch ends with the commit of the one before.
            if let Ok(message) = self.state.link.messages.recv_timeout(Duration::from_millis(1)) {
                return self.take(message);
            }
        }
        let wait = self.state.opened.map_or(IDLE_WAIT, |at| {
            (at + self.state.options.commit_interval).saturating_duration_since(now).min(IDLE_WAIT)
        });
        match self.consumer.poll(wait) {
            Polled::Record(message) => self.state.read(&message.to_input(Vec::new())).map(drop),
            Polled::Nothing => Ok(()),
            other => {
                let event = Rebalance::of(other);
                self.handle(event)
            }
        }
    }

    /// Moves positions over transaction markers, every now and then. Every record that was delivered is processed here, but for
    /// those that wait for their turn.
    fn step_over_markers(&mut self, now: Instant) {
        if now < self.state.markers_at || self.state.paused || self.state.missed {
            return;
        }
        self.state.markers_at = now + MARKERS_EVERY;
        let mut partitions = self.state.progress.partitions();
        partitions.retain(|partition| !self.state.merge.holds(partition));
        for (partition, position) in self.consumer.position(&partitions) {
            if let Some(position) = position {
                self.state.progress.step_over(&partition, position);
                self.state.task.step_over(&partition, position);
            }
        }
        if self.state.progress.is_open() {
            self.state.opened.get_or_insert(now);
        }
    }

    /// Cannot read on. Rebalances are served all the same.
    fn blocked(&mut self) -> Result<(), Failure> {
        let since = *self.state.blocked_since.get_or_insert_with(Instant::now);
        if since.elapsed() < PATIENCE { Ok(()) } else { self.serve(Duration::from_millis(5)) }
    }

    fn serve(&mut self, wait: Duration) -> Result<(), Failure> {
        if !self.state.paused {
            self.consumer.pause(&self.state.progress.partitions());
            self.state.paused = true;
        }
        match self.consumer.poll(wait) {
            Polled::Record(_) => {
                self.state.missed = true;
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
        self.state.blocked_since = None;
        if std::mem::take(&mut self.state.paused) {
            self.consumer.resume(&self.state.progress.partitions());
            self.state.merge.resumed();
        }
        if self.state.missed {
            self.state.missed = !self.seek_all()?;
        }
        Ok(!self.state.missed)
    }

    /// Commits what is processed and waits until nothing is open; false when that did not come about in time or the
    /// epoch was given up on the way.
    fn drain(&mut self, timeout: Duration) -> Result<bool, Failure> {
        let deadline = Instant::now() + timeout;
        loop {
            if !matches!(self.state.phase, Phase::Running | Phase::Sealing) {
                return Ok(true);
            }
            if self.state.task.is_fenced() {
                return Ok(false);
            }
            let settled = self.state.settle(Duration::from_millis(5))?;
            if settled && self.state.is_through() {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            if let Ok(message) = self.state.link.messages.recv_timeout(Duration::from_millis(5)) {
                self.take(message)?;
            }
        }
    }

    fn await_close(&mut self) {
        let deadline = Instant::now() + self.state.options.shutdown_timeout;
        while let Ok(message) = self.state.link.messages.recv_deadline(deadline) {
            if matches!(message, ToWorker::Closed | ToWorker::Failed(_)) {
                return;
            }
        }
    }

    fn take_messages(&mut self) -> Result<(), Failure> {
        while let Ok(message) = self.state.link.messages.try_recv() {
            self.take(message)?;
        }
        Ok(())
    }

    fn take(&mut self, message: ToWorker) -> Result<(), Failure> {
        let state = &mut self.state;
        match message {
            ToWorker::Buffer(chunk) => state.spare.push(chunk),
            ToWorker::Committed(batch) => {
                if let Some(sealed) = state.progress.committed(batch) {
                    state.passed(&sealed.positions);
                    state.task.committed(batch);
                }
            }
            ToWorker::Report { epoch, cause } if epoch == state.progress.epoch() => {
                state.isolate(cause)?;
                state.give_up_epoch();
                state.phase = Phase::Repositioning;
                state.rejoin_until = (cause == Cause::Rejoin).then(|| Instant::now() + PATIENCE);
            }
            ToWorker::Report { epoch, .. } if state.phase == Phase::Recovering(epoch) => {
                state.phase = Phase::Repositioning;
            }
            ToWorker::Report { .. } | ToWorker::Closed => {}
            ToWorker::Failed(failure) => return Err(failure),
        }
        Ok(())
    }

    /// Reads the broker's stable positions and goes back to them.
    fn reposition(&mut self) -> Result<(), Failure> {
        if self.state.rejoin_until.is_some_and(|until| Instant::now() < until) {
            return self.serve(IDLE_WAIT);
        }
        self.state.rejoin_until = None;
        let partitions = self.state.progress.partitions();
        let mut found = self.state.positions.find(&self.consumer, &partitions, Duration::from_secs(1))?;
        if !found.unstable.is_empty() {
            self.state.say_unstable(&found);
            if found.known.is_empty() {
                return self.serve(IDLE_WAIT);
            }
            // One whose leader is away holds up no other. It stays assigned: an answer to a rebalance may be due meanwhile.
            self.consumer.pause(&found.unstable);
            self.state.progress.unassign(&found.unstable);
            self.state.task.unassigned(&found.unstable);
            self.state.waiting.extend(found.unstable.iter().cloned());
        }
        let unready = self.state.hold_back(&mut found)?;
        if !unready.is_empty() {
            self.consumer.pause(&unready);
            self.state.progress.unassign(&unready);
        }
        self.settle_in(found);
        self.state.phase = Phase::Running;
        self.state.missed = true;
        Ok(())
    }

    /// Seeks every partition to its position; false where a rebalance came between. A partition that was only just
    /// assigned refuses at first.
    fn seek_all(&mut self) -> Result<bool, Failure> {
        let paused = self.state.merge.clear();
        if !paused.is_empty() {
            self.consumer.resume(&paused);
        }
        let mut pending = self.state.progress.positions();
        let deadline = Instant::now() + self.state.options.revoke_timeout;
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
                // It may be of a partition that is back already: all are sought again, and their ends are told again.
                Polled::Record(_) | Polled::EndOfPartition(..) => pending = self.state.progress.positions(),
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
