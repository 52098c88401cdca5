//! The protocol against a modelled broker: random schedules of faults, crashes, losses and lost answers. Whatever
//! happens, each input's output is committed once, in order, and positions never run ahead or fall behind.

use std::collections::VecDeque;

use crate::commit::progress::{BatchId, Progress, Sealed};
use crate::commit::protocol::{Effect, Event, Protocol, Work};
use crate::commit::{Cause, Epoch, Side};
use crate::error::Disposition;
use crate::record::{Offset, Position, TopicPartition};

const PARTITIONS: usize = 2;
const RECORDS: i64 = 25;
const TIMEOUT_MS: u64 = 10_000;

/// SplitMix64: the same schedule for the same seed, everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

type Input = (usize, i64);

/// What a broker keeps: one open transaction a producer, the committed log, the group's positions and generation.
#[derive(Default)]
struct Broker {
    open: [Option<Transaction>; 2],
    log: Vec<Input>,
    positions: [i64; PARTITIONS],
    generation: u64,
    unheard: bool,
}

#[derive(Default)]
struct Transaction {
    outputs: Vec<Input>,
    offsets: Vec<(usize, i64)>,
}

impl Broker {
    fn end(&mut self, side: Side, commit: bool) {
        let Some(transaction) = self.open[side.index()].take() else { return };
        if commit {
            self.log.extend(transaction.outputs);
            for (p, position) in transaction.offsets {
                self.positions[p] = position;
            }
        }
    }

    /// Ends a transaction so that its outcome reaches the client only with the next call.
    fn end_unheard(&mut self, side: Side, commit: bool) {
        self.end(side, commit);
        self.unheard = true;
    }

    /// Positions that a require_stable fetch would answer.
    fn stable(&self, p: usize) -> Option<i64> {
        let pending = self.open.iter().flatten().any(|t| t.offsets.iter().any(|(q, _)| *q == p));
        (!pending).then_some(self.positions[p])
    }
}

#[derive(PartialEq)]
enum Phase {
    Running,
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
}

struct World {
    random: Random,
    broker: Broker,
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
    member: u64,
}

fn tp(p: usize) -> TopicPartition {
    TopicPartition::new("in", p as i32)
}

impl World {
    fn new(seed: u64, mutant: Mutant) -> World {
        let mut world = World {
            random: Random(seed),
            broker: Broker::default(),
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

    /// A process starts: initialising the same ids aborts what the former one left open.
    fn start(&mut self) {
        self.broker.end(Side::A, false);
        self.broker.end(Side::B, false);
        self.broker.unheard = false;
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
            3..=49 => self.worker(),
            _ => self.committer(),
        }
    }

    /// All partitions are lost; another member takes them, works for a while and loses them to us again.
    fn lose(&mut self) {
        if self.phase != Phase::Running {
            return;
        }
        self.broker.generation += 1;
        let epoch = self.progress.abandon();
        self.fence = Some(epoch);
        self.chunk.clear();
        self.work.push_back((Work::Abandon { epoch }, Vec::new(), None));
        self.phase = Phase::Recovering(epoch);
        for p in 0..PARTITIONS {
            let Some(from) = self.broker.stable(p) else { continue };
            let to = RECORDS.min(from + self.random.below(4) as i64);
            self.broker.log.extend((from..to).map(|offset| (p, offset)));
            self.broker.positions[p] = to;
        }
        self.member = self.broker.generation;
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
        if self.phase != Phase::Running {
            return;
        }
        if self.progress.is_open() && self.random.chance(25) {
            self.hand_over();
            let mut sealed = self.progress.seal().unwrap();
            if self.mutant == Mutant::PositionPlusZero {
                sealed.positions.iter_mut().for_each(|(_, p)| p.0 -= 1);
            }
            self.work.push_back((Work::Seal { epoch: sealed.epoch }, Vec::new(), Some(sealed)));
            return;
        }
        let p = self.random.below(PARTITIONS as u64) as usize;
        let slot = self.progress.slot("in", p as i32).unwrap();
        let (_, next) = self.progress.positions()[p].clone();
        if next.0 < RECORDS {
            self.progress.processed(slot, Offset(next.0));
            self.chunk.push((p, next.0));
            if self.random.chance(30) {
                self.hand_over();
            }
        }
    }

    fn recovered(&mut self) {
        self.phase = Phase::Running;
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
            effect => self.call(effect),
        };
        self.effect = self.protocol.on(event, self.now);
    }

    /// A call of the client with what can go wrong with it.
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
            Effect::Flush(_) => self.fail_or(fault, Event::Done),
            Effect::SendOffsets(side) => {
                if self.fenced() || self.member != self.broker.generation {
                    return Event::Failed(Disposition::AbortTxn { rejoin: true });
                }
                let offsets = &self.held.1.as_ref().unwrap().positions;
                let offsets = offsets.iter().map(|(p, position)| (p.partition as usize, position.0)).collect();
                self.broker.open[side.index()].as_mut().unwrap().offsets = offsets;
                self.fail_or(fault, Event::Done)
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
            for (p, position) in self.held.1.as_ref().unwrap().positions.clone() {
                self.broker.positions[p.partition as usize] = (position.0 - 1).max(0);
            }
        }
        Event::Failed(Disposition::Rebuild)
    }

    fn fail_or(&mut self, fault: bool, event: Event) -> Event {
        if !fault {
            return event;
        }
        let retry = self.random.chance(40);
        Event::Failed(if retry { Disposition::Retry } else { Disposition::AbortTxn { rejoin: false } })
    }

    fn fenced(&self) -> bool {
        self.mutant != Mutant::NoFence && self.fence >= self.protocol.epoch() && self.protocol.epoch().is_some()
    }

    fn is_finished(&self) -> bool {
        self.broker.positions == [RECORDS; PARTITIONS] && self.broker.open.iter().all(Option::is_none)
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
        for p in 0..PARTITIONS {
            let got: Vec<i64> = self.broker.log.iter().filter(|(q, _)| *q == p).map(|(_, offset)| *offset).collect();
            let want: Vec<i64> = (0..RECORDS).collect();
            if got != want {
                return Err(format!("partition {p}: {got:?}"));
            }
        }
        Ok(())
    }
}

#[test]
fn every_schedule_of_faults_commits_each_input_once_and_in_order() {
    for seed in 0..20_000 {
        if let Err(wrong) = World::new(seed, Mutant::None).run() {
            panic!("seed {seed}: {wrong}");
        }
    }
}

/// A checker that accepts a broken protocol proves nothing.
#[test]
fn the_checker_catches_each_mutant() {
    for mutant in [Mutant::MissingRewind, Mutant::PositionPlusZero, Mutant::NoFence, Mutant::GuessOutcome] {
        let caught = (0..2_000).any(|seed| {
            let outcome = std::panic::catch_unwind(|| World::new(seed, mutant).run());
            !matches!(outcome, Ok(Ok(())))
        });
        assert!(caught, "{mutant:?} was not caught");
    }
}
