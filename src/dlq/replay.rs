//! Replay: dead letters go to the retry topic of the stage that rejected them, each once, in transactions.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::letter::{Address, Letter};
use super::{DeadLetters, Filter, PATIENCE, failed};
use crate::chunk::{Chunk, Target, TargetId};
use crate::error::{Disposition, Exit, Failure};
use crate::kafka::{Admin, Connection, Error, Isolation, LINGER, Producer, ProducerOptions, Reader};
use crate::reject::header;
use crate::topology::plan::Plan;

/// Dead letters and bytes of one transaction.
const BATCH: usize = 1000;
const BATCH_BYTES: usize = 4 << 20;
const SLICE: Duration = Duration::from_secs(1);
/// A record of a retry topic is its dead letter plus one header.
const ROOM: usize = 4 * 1024;

/// What to replay.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub filter: Filter,
    /// The first so many that match.
    pub limit: Option<usize>,
    /// A record that was rejected more often than this stays where it is.
    pub max_attempts: u32,
    /// Also what was replayed before.
    pub again: bool,
    /// Only say what would be done.
    pub dry_run: bool,
}

/// What was done with the dead letters that matched.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub replayed: Vec<Replayed>,
    pub left_out: Vec<LeftOut>,
}

/// A dead letter that is in a retry topic now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replayed {
    pub address: Address,
    pub topic: String,
}

/// A dead letter that stays where it is, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    pub address: Address,
    pub why: String,
}

impl LeftOut {
    fn replayed(address: Address) -> LeftOut {
        LeftOut { address, why: "replayed before (--again replays it once more)".to_owned() }
    }

    fn same(address: Address) -> LeftOut {
        LeftOut { address, why: "another dead letter of the same rejection goes back".to_owned() }
    }
}

/// What a dead letter and its replayed record have in common: retry topic, the record's topic, partition and offset,
/// attempt and event id. Not the address: a letter that was relayed or written twice has two, and a dead-letter topic
/// that is made anew begins to count anew. The id tells records of a source topic that was made anew apart.
type Mark = (String, [String; 3], u32, Option<String>);

fn mark(letter: &Letter, retry: &str) -> Mark {
    let (topic, partition, offset) = letter.source();
    let source = [topic, partition, offset].map(str::to_owned);
    (retry.to_owned(), source, letter.attempt(), letter.event_id().map(str::to_owned))
}

/// Replays what matches: key, value, headers and timestamp as they are, those of one key in their order. What was
/// replayed before is left out, also after a crash or beside another replay. Blocks.
///
/// # Errors
/// Exit 2 for an unknown address or what the broker refuses, 3 where it does not answer, 6 where another replay of the
/// topology began meanwhile. What was replayed before that stays, and is left out the next time.
pub fn replay(plan: &Plan, connection: &Connection, admin: &Admin, options: &Options) -> Result<Outcome, Failure> {
    let mut letters = DeadLetters::open(&plan.dead_letters(), connection, admin)?;
    let mut outcome = Outcome::default();
    let retries: Vec<String> = plan.stages.iter().map(|stage| plan.retry(stage)).collect();
    let before = if options.again { BTreeSet::new() } else { marks(connection, admin, &retries)? };
    let mut chosen: BTreeMap<Address, String> = BTreeMap::new();
    let mut seen: BTreeSet<Mark> = BTreeSet::new();
    letters.each(&options.filter, |input| {
        let letter = Letter::new(input);
        let address = letter.address;
        match destination(plan, &letter, options.max_attempts) {
            Ok(topic) => {
                let mark = mark(&letter, &topic);
                if before.contains(&mark) {
                    outcome.left_out.push(LeftOut::replayed(address));
                } else if seen.insert(mark) {
                    chosen.insert(address, topic);
                } else {
                    outcome.left_out.push(LeftOut::same(address));
                }
            }
            Err(why) => outcome.left_out.push(LeftOut { address, why }),
        }
        let enough = options.limit.is_some_and(|limit| chosen.len() >= limit);
        Ok(if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    if options.dry_run || chosen.is_empty() {
        outcome.replayed.extend(chosen.into_iter().map(|(address, topic)| Replayed { address, topic }));
        return Ok(outcome);
    }
    let topics: BTreeSet<&String> = chosen.values().collect();
    let topics: Vec<String> = topics.into_iter().cloned().collect();
    let out = Out::new(plan, connection, admin, &topics)?;
    // Once more, since here another replay can add none.
    let marks = if options.again { BTreeSet::new() } else { marks(connection, admin, &topics)? };
    let mut batch = Batch { out, chunk: Chunk::default(), open: Vec::new(), outcome: &mut outcome };
    let only = Filter { addresses: chosen.keys().copied().collect(), ..Filter::default() };
    letters.each(&only, |input| {
        let letter = Letter::new(input);
        let topic = &chosen[&letter.address];
        if marks.contains(&mark(&letter, topic)) {
            batch.outcome.left_out.push(LeftOut::replayed(letter.address));
        } else {
            batch.take(&letter, topic)?;
        }
        Ok(ControlFlow::Continue(()))
    })?;
    batch.end()?;
    outcome.left_out.sort_by_key(|left| left.address);
    Ok(outcome)
}

/// The retry topic of a dead letter, or why it has none.
fn destination(plan: &Plan, letter: &Letter, max_attempts: u32) -> Result<String, String> {
    if letter.is_cut() {
        return Err("it does not hold the whole record, which was too large for the dead-letter topic".to_owned());
    }
    if letter.attempt() > max_attempts {
        return Err(format!("rejected {} times, which is more than --max-attempts {max_attempts}", letter.attempt()));
    }
    let node = letter.node();
    let Some(stage) = plan.stage_of(node) else {
        return Err(format!("{} has no node {node:?} any more", plan.topology.file));
    };
    let (topic, ..) = letter.source();
    if !plan.reads(stage).iter().any(|read| read == topic) {
        return Err(format!("stage {} does not read {topic:?}", stage.name));
    }
    Ok(plan.retry(stage))
}

/// The dead letters whose records are in the retry topics.
fn marks(connection: &Connection, admin: &Admin, topics: &[String]) -> Result<BTreeSet<Mark>, Failure> {
    let mut marks = BTreeSet::new();
    for topic in topics {
        let failed = failed(topic);
        let Some(info) = admin.topic(topic).map_err(&failed)? else { continue };
        // A commit is acknowledged before its markers are written: what is still open is waited for.
        let ranges = Reader::whole(admin, topic, info.partitions, Isolation::ReadUncommitted).map_err(&failed)?;
        let mut reader = Reader::new(connection, PATIENCE).map_err(&failed)?;
        for range in ranges {
            let read: Result<(), Error> = reader.read(&range, |input| {
                if input.headers.last(header::REPLAY_OF).is_some() {
                    marks.insert(mark(&Letter::new(input), topic));
                }
                Ok(ControlFlow::Continue(()))
            });
            read.map_err(&failed)?;
        }
    }
    Ok(marks)
}

/// The producer of replays: there is one a topology, and the newest fences those before it.
struct Out {
    producer: Producer,
    targets: Vec<Target>,
    deadline: Duration,
}

impl Out {
    fn new(plan: &Plan, connection: &Connection, admin: &Admin, topics: &[String]) -> Result<Out, Failure> {
        let name = plan.dead_letters();
        let letters = admin.topic(&name).map_err(failed(&name))?;
        let letters = letters.ok_or_else(|| Failure::refused(format!("topic {name:?} does not exist any more")))?;
        let mut targets = Vec::new();
        for topic in topics {
            // What is replayed is read in its own time and may be old already: no age ends it.
            let largest = letters.max_message_bytes + ROOM;
            let info = admin.unread_topic(topic, letters.partitions, largest).map_err(|error| {
                let refused = Failure::refused(format!("cannot make the retry topic {topic:?}: {error}"));
                if error.is_retriable() { Failure::new(Exit::Unreachable, refused.message) } else { refused }
            })?;
            targets.push(info.target(topic.as_str()));
        }
        let deadline = plan.topology.transaction_timeout;
        let producer = ProducerOptions {
            transactional_id: Some(format!("{}.dlq-replay", plan.topology.name)),
            transaction_timeout: deadline,
            linger: LINGER,
            queue_bytes: 2 * BATCH_BYTES as u64,
        };
        let connected = Producer::new(connection, &producer, &targets);
        let producer = connected.map_err(|e| Failure::refused(e.to_string()))?;
        let out = Out { producer, targets, deadline };
        // An open transaction of a replay that was killed is ended first.
        out.until(PATIENCE, |producer| producer.init(SLICE))?;
        Ok(out)
    }

    /// A dead letter as the retry topic has it: in the partition of the same number, so that order stays.
    fn record(&self, chunk: &mut Chunk, topic: &str, letter: &Letter) {
        let at = self.targets.iter().position(|target| *target.topic == *topic).expect("a topic that letters go to");
        let of = letter.address.to_string();
        let mut out = chunk.push(TargetId(at as u32));
        out.partition(letter.address.partition.rem_euclid(self.targets[at].partitions)).timestamp(letter.timestamp);
        out.key(letter.key.as_deref()).value(letter.value.as_deref());
        for (name, value) in letter.headers.iter().filter(|(name, _)| name != header::REPLAY_OF.as_bytes()) {
            out.header(name, value.as_deref());
        }
        out.header(header::REPLAY_OF.as_bytes(), Some(of.as_bytes()));
        out.finish();
    }

    fn commit(&self, chunk: &Chunk) -> Result<(), Failure> {
        let sent = self.send(chunk);
        if sent.is_err() {
            // Nothing of an open transaction becomes visible either way.
            let _ = self.producer.abort(SLICE);
        }
        sent
    }

    fn send(&self, chunk: &Chunk) -> Result<(), Failure> {
        self.until(self.deadline, Producer::begin)?;
        for output in chunk.iter() {
            self.until(self.deadline, |producer| {
                let queued = producer.produce(&output);
                if queued.as_ref().is_err_and(Error::is_queue_full) {
                    let _ = producer.flush(Duration::from_millis(10));
                }
                queued
            })?;
        }
        self.until(self.deadline, |producer| producer.flush(SLICE))?;
        // An unanswered commit is asked again; left open here, the next replay finds out what became of it.
        self.until(PATIENCE, |producer| producer.commit(SLICE))
    }

    fn until(&self, limit: Duration, call: impl Fn(&Producer) -> Result<(), Error>) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        loop {
            let Err(error) = call(&self.producer) else { return Ok(()) };
            let exit = match error.disposition() {
                Disposition::Retry if Instant::now() < deadline => continue,
                Disposition::Retry | Disposition::Rebuild | Disposition::AbortTxn { .. } => Exit::Unreachable,
                Disposition::Fenced => Exit::Twin,
                Disposition::Reject { .. } => Exit::Refused,
                Disposition::Fatal(exit) => exit,
            };
            let what = if exit == Exit::Twin { "another replay of this topology took over: " } else { "" };
            return Err(Failure::new(
                exit,
                format!("{what}{error}; what was replayed before is kept, and the same command goes on after it"),
            ));
        }
    }
}

/// Dead letters on their way into one transaction.
struct Batch<'a> {
    out: Out,
    chunk: Chunk,
    open: Vec<Replayed>,
    outcome: &'a mut Outcome,
}

impl Batch<'_> {
    fn take(&mut self, letter: &Letter, topic: &str) -> Result<(), Failure> {
        self.out.record(&mut self.chunk, topic, letter);
        self.open.push(Replayed { address: letter.address, topic: topic.to_owned() });
        if self.open.len() >= BATCH || self.chunk.bytes_len() >= BATCH_BYTES { self.end() } else { Ok(()) }
    }

    /// Commits what is there.
    fn end(&mut self) -> Result<(), Failure> {
        if !self.chunk.is_empty() {
            self.out.commit(&self.chunk)?;
            self.chunk.clear();
            self.outcome.replayed.append(&mut self.open);
        }
        Ok(())
    }
}
