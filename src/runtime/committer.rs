//! The committer's thread: carries out what the protocol says, one effect at a time, on two producers used in turn.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;

use crate::chunk::{Chunk, Target};
use crate::commit::metadata::TopicIds;
use crate::commit::progress::Sealed;
use crate::commit::protocol::{Await, Effect, Event, Protocol, Work};
use crate::commit::{Epoch, Side};
use crate::crash::{self, Point};
use crate::error::{Disposition, Exit, Failure};
use crate::kafka::{Connection, Error, GroupHandle, Producer, ProducerOptions, Round};
use crate::observe::status::StageStatus;
use crate::runtime::link::{CommitterEnd, ToCommitter, ToWorker};
use crate::topology::spec::Guarantee;

/// Blocking calls return after this long at most, so that a deadline is seen.
const SLICE: Duration = Duration::from_secs(1);
const REBUILD_PAUSE_MAX: Duration = Duration::from_secs(30);
/// How long outputs of which readers know at once, without a transaction, wait for more before they are flushed.
const FOLLOW_UP: Duration = Duration::from_millis(5);
/// The committer flushes; a record waits for long only in a transaction that is open for long.
const LINGER: Duration = Duration::from_secs(1);
/// Of what is under way when the job ends.
const LAST_FLUSH: Duration = Duration::from_secs(5);
/// A broker that answers nothing for this long at start is reported with the usual causes.
const INIT_TIMEOUT: Duration = Duration::from_secs(25);

/// How a committer makes its producers.
#[derive(Clone, Debug)]
pub struct CommitterOptions {
    pub connection: Connection,
    pub guarantee: Guarantee,
    /// `<name>.<stage>.<instance>.<worker>`; the producers add `.0` and `.1`.
    pub identity: String,
    pub transaction_timeout: Duration,
    pub queue_bytes: u64,
    pub targets: Vec<Target>,
    /// Of the topics that the worker reads.
    pub topic_ids: TopicIds,
}

impl CommitterOptions {
    fn sides(&self) -> &'static [Side] {
        match self.guarantee {
            Guarantee::ExactlyOnce => &[Side::A, Side::B],
            Guarantee::AtLeastOnce | Guarantee::AtMostOnce => &[Side::A],
        }
    }

    fn producer(&self, side: Side) -> Result<Producer, Error> {
        let transactional = self.guarantee == Guarantee::ExactlyOnce;
        let options = ProducerOptions {
            transactional_id: transactional.then(|| transactional_id(&self.identity, side)),
            transaction_timeout: self.transaction_timeout,
            linger: LINGER,
            queue_bytes: self.queue_bytes,
        };
        Producer::new(&self.connection, &options, &self.targets)
    }

    /// Makes and initialises the producers, all at once: an open transaction that a former process left costs each of
    /// them half a second. Blocks for `timeout` at most.
    fn producers(&self, timeout: Duration) -> Result<Vec<Producer>, Error> {
        let producers: Vec<Producer> =
            self.sides().iter().map(|side| self.producer(*side)).collect::<Result<_, _>>()?;
        if self.guarantee == Guarantee::ExactlyOnce {
            std::thread::scope(|scope| {
                let calls: Vec<_> = producers.iter().map(|p| scope.spawn(|| init(p, timeout))).collect();
                calls.into_iter().try_for_each(|call| call.join().expect("init does not panic"))
            })?;
        }
        Ok(producers)
    }
}

/// The transactional id of one of a worker's producers.
pub fn transactional_id(identity: &str, side: Side) -> String {
    format!("{identity}.{}", side.index())
}

fn init(producer: &Producer, timeout: Duration) -> Result<(), Error> {
    let deadline = Instant::now() + timeout;
    loop {
        match producer.init(SLICE) {
            Err(error) if error.disposition() == Disposition::Retry && Instant::now() < deadline => {}
            result => return result,
        }
    }
}

/// Initialises transactional ids that no worker uses any more, so that what they left open is resolved.
pub fn retire(options: &CommitterOptions) -> Result<(), Failure> {
    options.producers(INIT_TIMEOUT).map(drop).map_err(|e| start_failure(options, &e))
}

fn start_failure(options: &CommitterOptions, error: &Error) -> Failure {
    match error.disposition() {
        Disposition::Fatal(exit) => Failure::new(exit, error.to_string()),
        _ => Failure::unreachable(format!(
            "transactions cannot start for {}: {error}. The broker's transaction coordinator does not answer: on a \
             cluster with fewer brokers than transaction.state.log.replication.factor or \
             transaction.state.log.min.isr it never will",
            options.identity
        )),
    }
}

/// A committer with its producers, ready to run on a thread of its own.
pub struct Committer {
    options: CommitterOptions,
    producers: Vec<Producer>,
    protocol: Protocol,
    link: CommitterEnd,
    group: GroupHandle,
    status: Arc<StageStatus>,
    started: Instant,
    outputs: Chunk,
    /// Outputs of the held chunk that are produced already: a full queue resumes here.
    produced: usize,
    /// What was produced since the last flush, and when its first was.
    round: Round,
    round_began: Instant,
    /// Outputs under at-most-once that were taken and are not known to be delivered.
    taken: u64,
    sealed: Option<(Sealed, Instant)>,
    stop_reason: Option<Error>,
}

impl Committer {
    /// Makes the producers and resolves what a former process left. Blocks, for 25 s at most.
    pub fn new(
        options: CommitterOptions,
        link: CommitterEnd,
        group: GroupHandle,
        status: Arc<StageStatus>,
    ) -> Result<Committer, Failure> {
        let producers = options.producers(INIT_TIMEOUT).map_err(|e| start_failure(&options, &e))?;
        Ok(Committer {
            round: producers[0].round(),
            round_began: Instant::now(),
            protocol: Protocol::new(options.transaction_timeout.as_millis() as u64),
            options,
            producers,
            link,
            group,
            status,
            started: Instant::now(),
            outputs: Chunk::default(),
            produced: 0,
            taken: 0,
            sealed: None,
            stop_reason: None,
        })
    }

    /// Runs until the worker closes the link or nothing can go on. Blocks.
    pub fn run(mut self) {
        let mut effect = self.protocol.start();
        loop {
            let event = match effect {
                Effect::End => {
                    self.last_flush();
                    let _ = self.link.messages.send(ToWorker::Closed);
                    return;
                }
                Effect::Stop(exit) => {
                    self.last_flush();
                    let _ = self.link.messages.send(ToWorker::Failed(self.failure(exit)));
                    return;
                }
                other => self.carry_out(other),
            };
            let now = self.started.elapsed().as_millis() as u64;
            effect = self.protocol.on(event, now);
        }
    }

    fn carry_out(&mut self, effect: Effect) -> Event {
        match effect {
            Effect::Receive => Event::Received(self.receive()),
            Effect::Begin(side) => self.answer(|c| if c.transactional() { c.producer(side).begin() } else { Ok(()) }),
            Effect::Produce(side) => self.produce(side),
            Effect::Discard => {
                self.recycle();
                self.sealed = None;
                Event::Done
            }
            Effect::Flush(side) => self.flush(side),
            Effect::SendOffsets(side) => self.send_offsets(side),
            Effect::Commit(side) => self.commit(side),
            Effect::Abort(side) => {
                self.recycle();
                self.sealed = None;
                self.status.aborts.add(1);
                self.round.clear();
                self.answer(|c| if c.transactional() { c.producer(side).abort(SLICE) } else { c.forget(side) })
            }
            Effect::Rebuild { first } => self.rebuild(first),
            Effect::Acknowledge => {
                let (sealed, at) = self.sealed.take().expect("a commit has a sealed batch");
                self.status.committed(at.elapsed());
                let _ = self.link.messages.send(ToWorker::Committed(sealed.batch));
                Event::Done
            }
            Effect::Report { epoch, cause } => {
                tracing::info!(
                    identity = self.options.identity,
                    ?cause,
                    "the batch is given up; going back to the committed positions"
                );
                let _ = self.link.messages.send(ToWorker::Report { epoch, cause });
                Event::Done
            }
            Effect::Stop(_) | Effect::End => unreachable!("handled by run"),
        }
    }

    /// Without transactions both sides are one producer.
    fn producer(&self, side: Side) -> &Producer {
        &self.producers[side.index() % self.producers.len()]
    }

    fn transactional(&self) -> bool {
        self.options.guarantee == Guarantee::ExactlyOnce
    }

    fn receive(&mut self) -> Work {
        let work = loop {
            if self.transactional() || (self.round.is_empty() && self.taken == 0) {
                break self.link.work.recv().ok();
            }
            let due = self.round_began + FOLLOW_UP;
            if due > Instant::now() {
                match self.link.work.recv_deadline(due) {
                    Err(RecvTimeoutError::Timeout) => {}
                    work => break work.ok(),
                }
            }
            self.follow_up();
        };
        match work {
            Some(ToCommitter::Outputs { epoch, chunk }) => {
                if self.options.guarantee == Guarantee::AtMostOnce {
                    self.taken += chunk.len() as u64;
                }
                self.outputs = chunk;
                self.produced = 0;
                Work::Outputs { epoch }
            }
            Some(ToCommitter::Seal { sealed, at }) => {
                let epoch = sealed.epoch;
                self.sealed = Some((sealed, at));
                Work::Seal { epoch }
            }
            Some(ToCommitter::Abandon { epoch }) => Work::Abandon { epoch },
            Some(ToCommitter::Close) | None => Work::Close,
        }
    }

    fn recycle(&mut self) {
        let chunk = std::mem::take(&mut self.outputs);
        self.lose((chunk.len() - self.produced) as u64, &"they were not produced before the batch was given up");
        self.produced = 0;
        if !chunk.is_empty() {
            self.link.recycle(chunk);
        }
    }

    fn answer(&mut self, call: impl FnOnce(&mut Committer) -> Result<(), Error>) -> Event {
        match call(self) {
            Ok(()) => Event::Done,
            Err(error) => self.failed(error),
        }
    }

    fn failed(&mut self, error: Error) -> Event {
        let disposition = error.disposition();
        if disposition != Disposition::Retry {
            tracing::warn!(identity = self.options.identity, %error, ?disposition, "a transaction call failed");
        }
        self.stop_reason = Some(error);
        Event::Failed(disposition)
    }

    fn produce(&mut self, side: Side) -> Event {
        match self.enqueue(side) {
            Ok(()) => {
                crash::at(Point::AfterProduce);
                self.recycle();
                Event::Done
            }
            Err(error) => match self.producer(side).count_failed_deliveries() {
                Some((undelivered, count)) if !self.may_lose(&undelivered, count) => self.undelivered(undelivered),
                _ => self.failed(error),
            },
        }
    }

    fn enqueue(&mut self, side: Side) -> Result<(), Error> {
        let deadline = Instant::now() + SLICE;
        if self.round.is_empty() {
            self.round_began = Instant::now();
        }
        let mut produced = self.produced;
        let mut result = Ok(());
        'outputs: for output in self.outputs.iter().skip(produced) {
            let mut full = !self.round.takes(&output);
            loop {
                if full {
                    if let Err(error) = self.producer(side).flush(SLICE) {
                        result = Err(error);
                        break 'outputs;
                    }
                    self.round.clear();
                    self.round.takes(&output);
                    self.round_began = Instant::now();
                }
                match self.producer(side).produce(&output) {
                    Err(error) if error.is_queue_full() && Instant::now() < deadline => full = true,
                    Err(error) if error.is_queue_full() || !self.may_lose(&error, 1) => {
                        result = Err(error);
                        break 'outputs;
                    }
                    _ => break,
                }
            }
            produced += 1;
        }
        self.produced = produced;
        result
    }

    /// Under at-most-once the positions are committed before: what cannot be delivered is lost, counted and said.
    fn may_lose(&self, error: &Error, count: u64) -> bool {
        let lost = self.options.guarantee == Guarantee::AtMostOnce && !error.is_fatal();
        if lost {
            self.lose(count, error);
        }
        lost
    }

    fn lose(&self, count: u64, why: &dyn std::fmt::Display) {
        if count > 0 && self.options.guarantee == Guarantee::AtMostOnce {
            self.status.lost.add(count);
            tracing::warn!(identity = self.options.identity, count, "outputs are lost (at-most-once): {why}");
        }
    }

    fn flush(&mut self, side: Side) -> Event {
        let producer = self.producer(side);
        if let Err(error) = producer.flush(SLICE) {
            return self.failed(error);
        }
        self.round.clear();
        let producer = self.producer(side);
        // A record that was not delivered makes the commit of a transaction fail, with a code that says less than the
        // delivery's own; without a transaction nothing else would tell.
        match producer.fatal().map(|error| (error, 1)).or_else(|| producer.count_failed_deliveries()) {
            Some((error, count)) if !self.may_lose(&error, count) => self.undelivered(error),
            _ => {
                self.paid();
                Event::Done
            }
        }
    }

    /// Sends what waits before its batch ends: no transaction hides it. A failure is told to the batch's own flush.
    fn follow_up(&mut self) {
        if self.taken > 0 {
            let _ = self.flush(Side::A);
        } else if self.producer(Side::A).flush(SLICE).is_ok() {
            self.round.clear();
        }
        // What comes meanwhile is received, however long the broker is away.
        self.round_began = Instant::now();
    }

    /// Every output that was taken so far is delivered or counted as lost.
    fn paid(&mut self) {
        self.link.owed().sub(self.taken);
        self.status.owed.sub(self.taken);
        self.taken = 0;
    }

    /// The end under at-most-once: positions are committed, and nobody sends these outputs again. Blocks for
    /// [`LAST_FLUSH`] at most.
    fn last_flush(&mut self) {
        let deadline = Instant::now() + LAST_FLUSH;
        while self.taken > 0 && Instant::now() < deadline {
            self.flush(Side::A);
        }
        let unacknowledged = self.producers.iter().map(Producer::in_flight).sum::<usize>();
        self.lose(unacknowledged as u64, &"the job stops");
    }

    /// The client has given a record up: trying again brings nothing, whatever the code says of its kind.
    fn undelivered(&mut self, error: Error) -> Event {
        match self.failed(error) {
            Event::Failed(Disposition::Retry) => Event::Failed(Disposition::AbortTxn { rejoin: false }),
            event => event,
        }
    }

    /// The delivery's own error where there is one: `State` from a call only says that the transaction has failed.
    fn refused(&self, side: Side, error: Error) -> Error {
        self.producer(side).failed_deliveries().unwrap_or(error)
    }

    /// At-least-once has no transaction to abort: what was produced stays, and comes again.
    fn forget(&mut self, side: Side) -> Result<(), Error> {
        if self.link.is_closed() {
            // The last flush waits for it, and counts what is lost: nobody waits for both.
            return Ok(());
        }
        let producer = self.producer(side);
        producer.flush(SLICE)?;
        if let Some((error, count)) = producer.count_failed_deliveries() {
            self.lose(count, &error);
        }
        self.paid();
        Ok(())
    }

    fn given_up(&self) -> bool {
        let epoch: Epoch = self.sealed.as_ref().expect("a sealed batch").0.epoch;
        self.link.is_dead(epoch)
    }

    fn send_offsets(&mut self, side: Side) -> Event {
        let lost = Event::Failed(Disposition::AbortTxn { rejoin: true });
        // A generation below 0 or an empty member id would be accepted unchecked by the broker.
        let Some(metadata) = self.group.metadata().filter(|m| m.is_member()) else {
            return lost;
        };
        if self.given_up() {
            return lost;
        }
        if !self.transactional() {
            return Event::Done;
        }
        crash::at(Point::BeforeSendOffsets);
        self.answer(|c| {
            let (sealed, _) = c.sealed.as_ref().expect("a sealed batch");
            let (ids, producer) = (c.options.topic_ids.with(&sealed.revisions), c.producer(side));
            let sent = producer.send_offsets(&sealed.positions, &ids, &metadata, SLICE);
            sent.map(|()| crash::at(Point::AfterSendOffsets)).map_err(|e| c.refused(side, e))
        })
    }

    fn commit(&mut self, side: Side) -> Event {
        if self.given_up() {
            return Event::Failed(Disposition::AbortTxn { rejoin: true });
        }
        crash::at(Point::BeforeCommit);
        let event = self.answer(|c| {
            if c.transactional() {
                return c.producer(side).commit(SLICE).map_err(|e| c.refused(side, e));
            }
            let (sealed, _) = c.sealed.as_ref().expect("a sealed batch");
            c.group.commit(&sealed.positions, &c.options.topic_ids.with(&sealed.revisions), SLICE)
        });
        crash::at(Point::AfterCommit);
        event
    }

    fn rebuild(&mut self, first: Await) -> Event {
        self.recycle();
        if self.link.is_closed() {
            // What is open is left to the next start, which initialises the same ids, or to the broker's timeout.
            return Event::Received(Work::Close);
        }
        let ready = match first {
            Await::Nothing => true,
            Await::Generation => self.group.metadata().is_some_and(|m| m.is_member()),
            Await::Until(ms) => self.started.elapsed() >= Duration::from_millis(ms),
        };
        if !ready {
            std::thread::sleep(Duration::from_millis(100));
            return Event::Failed(Disposition::Retry);
        }
        self.status.rebuilds.add(1);
        let unacknowledged = self.producers.iter().map(Producer::in_flight).sum::<usize>();
        self.lose(unacknowledged as u64, &"the producer is made anew");
        // Dropping a producer whose transaction is open leaves it to the next init on its id.
        self.producers.clear();
        self.round.clear();
        match self.options.producers(REBUILD_PAUSE_MAX) {
            Ok(producers) => {
                self.producers = producers;
                Event::Done
            }
            Err(error) => {
                std::thread::sleep(Duration::from_millis(500));
                self.failed(error)
            }
        }
    }

    fn failure(&self, exit: Exit) -> Failure {
        let reason = self.stop_reason.as_ref().map_or(String::new(), |e| format!(": {e}"));
        match exit {
            Exit::Twin => Failure::new(
                exit,
                format!("another process runs with the identity {} and took it over{reason}", self.options.identity),
            ),
            _ => Failure::new(exit, format!("{} cannot commit{reason}", self.options.identity)),
        }
    }
}
