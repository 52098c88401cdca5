//! The protocol against a modelled broker: random schedules of faults, crashes, losses, revocations, zombies and lost
//! answers. Whatever happens: exactly-once commits each input's output once and in order, at-least-once never loses one,
//! at-most-once never doubles one, and all come to an end.

mod broker;
mod random;
mod twins;

use std::collections::VecDeque;

use self::broker::{Broker, Input, PARTITIONS, RECORDS, Transaction};
pub(crate) use self::random::Random;
use crate::commit::progress::{BatchId, Progress, Sealed};
use crate::commit::protocol::{Effect, Event, Protocol, Work};
use crate::commit::{Cause, Epoch, Side};
use crate::error::Disposition;
use crate::record::{Offset, Position, TopicPartition};
use crate::topology::spec::Guarantee;

const TIMEOUT_MS: u64 = 10_000;

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Running,
    /// At-most-once: the batch is sealed, its outputs wait until its positions are committed.
    PositionsFirst,
    /// A partition is asked back: the batches that name it are brought to an end.
    Revoking(usize),
    Recovering(Epoch),
}

enum Message {
    Committed(BatchId),
    Report(Epoch),
}

/// What is deliberately wrong, to see that the checker sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Mutant {
    None,
    /// Resume after an abort where processing stood.
    MissingRewind,
    /// Commit the last processed offset instead of the next one.
    PositionPlusZero,
    /// Do not look whether the epoch was given up.
    NoFence,
    /// Take an unanswered commit for an abort and go on from memory.
    GuessOutcome,
    /// Send positions that the broker does not check against the generation.
    StaleGeneration,
    /// Give a partition up while batches that name it are open.
    RevokeWithoutDrain,
    /// At-least-once that commits positions first.
    CommitBeforeProduce,
    /// At-most-once that produces before its positions are acknowledged.
    ProduceBeforeAcknowledgement,
}

struct World {
    random: Random,
    broker: Broker,
    guarantee: Guarantee,
    mutant: Mutant,
    faults: bool,
    now: u64,
    // The process: all of it dies in a crash.
    protocol: Protocol,
    effect: Effect,
    progress: Progress,
    phase: Phase,
    work: VecDeque<(Work, Vec<Input>, Option<Sealed>)>,
    messages: VecDeque<Message>,
    held: (Vec<Input>, Option<Sealed>),
    chunk: Vec<Input>,
    fence: Option<Epoch>,
    /// The generation that this member believes in.
    member: u64,
}

fn tp(p: usize) -> TopicPartition {
    TopicPartition::new("in", p as i32)
}

impl World {
    fn new(seed: u64, guarantee: Guarantee, mutant: Mutant) -> World {
        let mut world = World {
            random: Random(seed),
            broker: Broker::default(),
            guarantee,
            mutant,
            faults: true,
            now: 0,
            protocol: Protocol::new(TIMEOUT_MS),
            effect: Effect::Receive,
            progress: Progress::default(),
            phase: Phase::Running,
            work: VecDeque::new(),
            messages: VecDeque::new(),
            held: (Vec::new(), None),
            chunk: Vec::new(),
            fence: None,
            member: 0,
        };
        world.start();
        world
    }

    fn transactional(&self) -> bool {
        self.guarantee == Guarantee::ExactlyOnce
    }

    fn positions_first(&self) -> bool {
        self.guarantee == Guarantee::AtMostOnce || self.mutant == Mutant::CommitBeforeProduce
    }

    /// A process starts: initialising the same ids aborts what the former one left open.
    fn start(&mut self) {
        self.broker.end(Side::A, false);
        self.broker.end(Side::B, false);
        self.broker.unheard = false;
        self.broker.deliver_some(&mut self.random);
        self.broker.generation += 1;
        self.member = self.broker.generation;
        self.protocol = Protocol::new(TIMEOUT_MS);
        self.effect = self.protocol.start();
        self.progress = Progress::default();
        self.phase = Phase::Running;
        self.work.clear();
        self.messages.clear();
        self.chunk.clear();
        self.held = (Vec::new(), None);
        self.fence = None;
        self.reposition();
    }

    fn reposition(&mut self) {
        for p in 0..PARTITIONS {
            let position = self.broker.stable(p).expect("nothing is pending once the outcome is resolved");
            self.progress.assign(tp(p), Position(position), false);
        }
    }

    fn step(&mut self) {
        self.now += self.random.below(40);
        match self.random.below(100) {
            0 if self.faults => self.start(),
            1 if self.faults => self.lose(),
            2 if self.faults => self.sleep(),
            3 if self.faults => self.revoke(),
            4 if self.faults => self.replaced(),
            5..=50 => self.worker(),
            _ => self.committer(),
        }
    }

    /// All partitions are lost; another member takes them, works for a while and loses them to us again.
    fn lose(&mut self) {
        if let Phase::Recovering(_) = self.phase {
            return;
        }
        self.abandon();
        self.broker.generation += 1;
        (0..PARTITIONS).for_each(|p| self.broker.others_work(p, &mut self.random));
        self.member = self.broker.generation;
    }

    fn abandon(&mut self) {
        let epoch = self.progress.abandon();
        self.fence = Some(epoch);
        self.chunk.clear();
        self.work.push_back((Work::Abandon { epoch }, Vec::new(), None));
        self.phase = Phase::Recovering(epoch);
    }

    /// The group goes on without this member, which does not hear of it: another one has its partitions.
    fn replaced(&mut self) {
        self.broker.generation += 1;
        (0..PARTITIONS).for_each(|p| self.broker.others_work(p, &mut self.random));
    }

    /// A partition is asked back.
    fn revoke(&mut self) {
        if self.phase != Phase::Running || self.member != self.broker.generation {
            return;
        }
        let p = self.random.below(PARTITIONS as u64) as usize;
        if self.mutant == Mutant::RevokeWithoutDrain {
            self.handed_over(p);
            return;
        }
        self.phase = Phase::Revoking(p);
    }

    /// Another member has the partition for a while, in good order.
    fn handed_over(&mut self, p: usize) {
        self.broker.generation += 1;
        self.member = self.broker.generation;
        self.broker.others_work(p, &mut self.random);
        if let Some(position) = self.broker.stable(p) {
            self.progress.assign(tp(p), Position(position), false);
        }
    }

    /// The process sleeps past the transaction timeout: the broker aborts what is open.
    fn sleep(&mut self) {
        self.now += TIMEOUT_MS + 1;
        self.broker.end(Side::A, false);
        self.broker.end(Side::B, false);
    }

    fn worker(&mut self) {
        if let Some(message) = self.messages.pop_front() {
            match message {
                Message::Committed(batch) => drop(self.progress.committed(batch)),
                Message::Report(epoch) if epoch == self.progress.epoch() => {
                    self.progress.abandon();
                    self.chunk.clear();
                    self.recovered();
                }
                Message::Report(epoch) if self.phase == Phase::Recovering(epoch) => self.recovered(),
                Message::Report(_) => {}
            }
            return;
        }
        match self.phase {
            Phase::Running => self.process(),
            Phase::PositionsFirst if self.progress.in_flight() == 0 => self.effects(),
            // The group has gone on without us: that is no revocation any more.
            Phase::Revoking(_) if self.member != self.broker.generation => self.lose(),
            Phase::Revoking(p) => {
                if self.progress.is_open() {
                    self.seal();
                } else if self.progress.in_flight() == 0 {
                    self.hand_over();
                    self.phase = Phase::Running;
                    self.handed_over(p);
                } else if self.random.chance(2) {
                    // It took too long.
                    self.abandon();
                }
            }
            Phase::PositionsFirst | Phase::Recovering(_) => {}
        }
    }

    fn process(&mut self) {
        if self.progress.is_open() && self.random.chance(25) {
            self.seal();
            return;
        }
        let p = self.random.below(PARTITIONS as u64) as usize;
        let slot = self.progress.slot("in", p as i32).unwrap();
        let (_, next) = self.progress.positions()[p].clone();
        if next.0 < RECORDS {
            self.progress.processed(slot, Offset(next.0));
            self.chunk.push((p, next.0));
            if !self.positions_first() && self.random.chance(30) {
                self.hand_over();
            }
        }
    }

    fn seal(&mut self) {
        if !self.positions_first() || self.mutant == Mutant::ProduceBeforeAcknowledgement {
            self.hand_over();
        } else if self.phase == Phase::Running {
            self.phase = Phase::PositionsFirst;
        }
        let mut sealed = self.progress.seal().unwrap();
        if self.mutant == Mutant::PositionPlusZero {
            sealed.positions.iter_mut().for_each(|(_, p)| p.0 -= 1);
        }
        self.work.push_back((Work::Seal { epoch: sealed.epoch }, Vec::new(), Some(sealed)));
    }

    /// The positions are committed: now the outputs.
    fn effects(&mut self) {
        self.hand_over();
        self.phase = Phase::Running;
    }

    fn recovered(&mut self) {
        self.phase = Phase::Running;
        self.member = self.broker.generation;
        if self.mutant == Mutant::MissingRewind {
            return;
        }
        self.reposition();
    }

    fn hand_over(&mut self) {
        if !self.chunk.is_empty() {
            let chunk = std::mem::take(&mut self.chunk);
            self.work.push_back((Work::Outputs { epoch: self.progress.epoch() }, chunk, None));
        }
    }

    fn committer(&mut self) {
        let event = match self.effect.clone() {
            Effect::Receive => {
                let Some((work, outputs, sealed)) = self.work.pop_front() else { return };
                self.held = (outputs, sealed);
                Event::Received(work)
            }
            Effect::Acknowledge => {
                let sealed = self.held.1.take().expect("a sealed batch");
                self.messages.push_back(Message::Committed(sealed.batch));
                Event::Done
            }
            Effect::Report { epoch, cause } => {
                assert!(!matches!(cause, Cause::Record(_)));
                self.messages.push_back(Message::Report(epoch));
                Event::Done
            }
            Effect::Discard => Event::Done,
            Effect::Stop(_) => {
                // The process ends and is started again by its supervisor.
                self.start();
                return;
            }
            Effect::End => unreachable!("nobody closed"),
            effect if self.transactional() => self.call(effect),
            effect => self.plain_call(effect),
        };
        self.effect = self.protocol.on(event, self.now);
    }

    /// A call of a transactional client with what can go wrong with it.
    fn call(&mut self, effect: Effect) -> Event {
        let fault = self.faults && self.random.chance(8);
        match effect {
            Effect::Begin(side) => {
                assert!(self.broker.open[side.index()].is_none(), "begin on a producer whose transaction is open");
                if fault {
                    return Event::Failed(Disposition::Rebuild);
                }
                self.broker.open[side.index()] = Some(Transaction::default());
                Event::Done
            }
            Effect::Rebuild { .. } => {
                self.broker.unheard = false;
                if fault {
                    return Event::Failed(Disposition::Retry);
                }
                self.broker.end(Side::A, false);
                self.broker.end(Side::B, false);
                Event::Done
            }
            // A call that timed out is called again and tells what became of it.
            Effect::Commit(_) if std::mem::take(&mut self.broker.unheard) => Event::Done,
            Effect::Produce(side) | Effect::Flush(side) | Effect::SendOffsets(side) | Effect::Commit(side)
                if self.broker.open[side.index()].is_none() =>
            {
                // The broker timed the transaction out.
                Event::Failed(Disposition::Fenced)
            }
            Effect::Produce(side) => {
                self.broker.open[side.index()].as_mut().unwrap().outputs.append(&mut self.held.0);
                Event::Done
            }
            Effect::Flush(_) => self.fail_or_done(fault),
            Effect::SendOffsets(side) => {
                if self.fenced() || self.is_stale() {
                    return Event::Failed(Disposition::AbortTxn { rejoin: true });
                }
                let offsets = self.offsets();
                self.broker.open[side.index()].as_mut().unwrap().offsets = offsets;
                self.fail_or_done(fault)
            }
            Effect::Commit(side) => self.commit(side, fault),
            Effect::Abort(side) => {
                if fault {
                    let applied = self.random.chance(50);
                    if applied {
                        self.broker.end(side, false);
                    }
                    let retry = self.random.chance(60);
                    return Event::Failed(if retry { Disposition::Retry } else { Disposition::Rebuild });
                }
                self.broker.end(side, false);
                Event::Done
            }
            other => unreachable!("{other:?} is no call"),
        }
    }

    /// A call of a client without transactions.
    fn plain_call(&mut self, effect: Effect) -> Event {
        let fault = self.faults && self.random.chance(8);
        match effect {
            Effect::Begin(_) => Event::Done,
            Effect::Produce(_) => {
                self.broker.unacknowledged.append(&mut self.held.0);
                Event::Done
            }
            Effect::Flush(_) if fault && self.guarantee == Guarantee::AtLeastOnce => {
                self.broker.deliver_some(&mut self.random);
                Event::Failed(Disposition::AbortTxn { rejoin: false })
            }
            Effect::Flush(_) if fault => {
                // What at-most-once cannot deliver is lost.
                self.broker.deliver_some(&mut self.random);
                Event::Done
            }
            Effect::Flush(_) | Effect::Abort(_) => {
                self.broker.deliver();
                Event::Done
            }
            Effect::Rebuild { .. } => {
                self.broker.deliver_some(&mut self.random);
                self.fail_or_done(fault)
            }
            Effect::SendOffsets(_) if self.fenced() => Event::Failed(Disposition::AbortTxn { rejoin: true }),
            Effect::SendOffsets(_) => Event::Done,
            Effect::Commit(_) if self.fenced() || self.is_stale() => {
                Event::Failed(Disposition::AbortTxn { rejoin: true })
            }
            Effect::Commit(_) => {
                if !fault || self.random.chance(50) {
                    for (p, position) in self.offsets() {
                        self.broker.positions[p] = position;
                    }
                }
                if !fault {
                    return Event::Done;
                }
                let lost = self.random.chance(50);
                Event::Failed(if lost { Disposition::Retry } else { Disposition::AbortTxn { rejoin: false } })
            }
            other => unreachable!("{other:?} is no call"),
        }
    }

    fn offsets(&self) -> Vec<(usize, i64)> {
        let sealed = self.held.1.as_ref().expect("a sealed batch");
        sealed.positions.iter().map(|(p, position)| (p.partition as usize, position.0)).collect()
    }

    fn is_stale(&self) -> bool {
        self.mutant != Mutant::StaleGeneration && self.member != self.broker.generation
    }

    fn commit(&mut self, side: Side, fault: bool) -> Event {
        if self.fenced() {
            return Event::Failed(Disposition::AbortTxn { rejoin: true });
        }
        if !fault {
            self.broker.end(side, true);
            return Event::Done;
        }
        match self.random.below(5) {
            4 => {
                self.broker.end_unheard(side, true);
                Event::Failed(Disposition::Retry)
            }
            // The answer is lost, and the client with it.
            0 => {
                self.broker.end(side, true);
                self.guess()
            }
            1 => Event::Failed(Disposition::Retry),
            2 => Event::Failed(Disposition::Rebuild),
            _ => Event::Failed(Disposition::AbortTxn { rejoin: false }),
        }
    }

    fn guess(&mut self) -> Event {
        if self.mutant == Mutant::GuessOutcome {
            // Back to the start of the batch, from memory.
            for (p, position) in self.offsets() {
                self.broker.positions[p] = (position - 1).max(0);
            }
        }
        Event::Failed(Disposition::Rebuild)
    }

    fn fail_or_done(&mut self, fault: bool) -> Event {
        if !fault {
            return Event::Done;
        }
        let retry = self.random.chance(40);
        Event::Failed(if retry { Disposition::Retry } else { Disposition::AbortTxn { rejoin: false } })
    }

    fn fenced(&self) -> bool {
        self.mutant != Mutant::NoFence && self.fence >= self.protocol.epoch() && self.protocol.epoch().is_some()
    }

    fn is_finished(&self) -> bool {
        self.broker.positions == [RECORDS; PARTITIONS]
            && self.broker.open.iter().all(Option::is_none)
            && self.work.is_empty()
            && self.effect == Effect::Receive
            && self.chunk.is_empty()
            && self.phase == Phase::Running
    }

    /// Runs with faults, then without until all is committed; answers what is wrong.
    fn run(mut self) -> Result<(), String> {
        for _ in 0..600 {
            self.step();
        }
        self.faults = false;
        for _ in 0..20_000 {
            if self.is_finished() {
                break;
            }
            self.step();
        }
        if !self.is_finished() {
            return Err(format!("stuck at {:?} in {:?}", self.broker.positions, self.protocol));
        }
        self.broker.deliver();
        for p in 0..PARTITIONS {
            let got: Vec<i64> = self.broker.log.iter().filter(|(q, _)| *q == p).map(|(_, offset)| *offset).collect();
            let times = |offset: i64| got.iter().filter(|o| **o == offset).count();
            let right = match self.guarantee {
                Guarantee::ExactlyOnce => got == (0..RECORDS).collect::<Vec<_>>(),
                Guarantee::AtLeastOnce => (0..RECORDS).all(|offset| times(offset) >= 1),
                Guarantee::AtMostOnce => (0..RECORDS).all(|offset| times(offset) <= 1),
            };
            if !right {
                return Err(format!("partition {p}: {got:?}"));
            }
        }
        Ok(())
    }
}

const GUARANTEES: [Guarantee; 3] = [Guarantee::ExactlyOnce, Guarantee::AtLeastOnce, Guarantee::AtMostOnce];

/// 120,000 schedules, two thirds of them exactly-once.
#[test]
fn every_schedule_of_faults_keeps_what_its_guarantee_promises() {
    for (guarantee, seeds) in GUARANTEES.into_iter().zip([80_000, 20_000, 20_000]) {
        for seed in 0..seeds {
            if let Err(wrong) = World::new(seed, guarantee, Mutant::None).run() {
                panic!("{guarantee:?}, seed {seed}: {wrong}");
            }
        }
    }
}

#[test]
fn without_a_fault_every_guarantee_is_exactly_once() {
    for (guarantee, seed) in GUARANTEES.into_iter().flat_map(|g| (0..200).map(move |seed| (g, seed))) {
        let mut world = World::new(seed, guarantee, Mutant::None);
        world.faults = false;
        for _ in 0..20_000 {
            if world.is_finished() {
                break;
            }
            world.step();
        }
        world.broker.deliver();
        let mut log = world.broker.log;
        log.sort_unstable();
        let all: Vec<Input> = (0..PARTITIONS).flat_map(|p| (0..RECORDS).map(move |offset| (p, offset))).collect();
        assert_eq!(log, all, "{guarantee:?}, seed {seed}");
    }
}

/// A checker that accepts a broken protocol proves nothing.
#[test]
fn the_checker_catches_each_mutant() {
    use Guarantee::{AtLeastOnce, AtMostOnce, ExactlyOnce};
    for (guarantee, mutant) in [
        (ExactlyOnce, Mutant::MissingRewind),
        (ExactlyOnce, Mutant::PositionPlusZero),
        (ExactlyOnce, Mutant::NoFence),
        (ExactlyOnce, Mutant::GuessOutcome),
        (ExactlyOnce, Mutant::StaleGeneration),
        (ExactlyOnce, Mutant::RevokeWithoutDrain),
        (AtLeastOnce, Mutant::CommitBeforeProduce),
        (AtMostOnce, Mutant::ProduceBeforeAcknowledgement),
    ] {
        let caught = (0..2_000).any(|seed| {
            let outcome = std::panic::catch_unwind(|| World::new(seed, guarantee, mutant).run());
            !matches!(outcome, Ok(Ok(())))
        });
        assert!(caught, "{mutant:?} was not caught");
    }
}
