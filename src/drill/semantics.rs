//! The guarantees side by side, on one topology (`[drill]` in its file): records arrive one by one, the process is killed
//! at the middle one, comes back, and gets the rest. Then what a producer's second send does, and what a client does
//! that commits by itself.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde_json::Value as Json;
use serde_json::value::RawValue;
use toml::Value;

use super::auto_commit;
use super::effects::{Effects, Fate, How, Traces};
use super::observe::{Contents, End, EndKind, ends, observe};
use super::verdict::Promise;
use crate::clock::Clock;
use crate::crash::{Crash, Point};
use crate::error::Failure;
use crate::record::Position;
use crate::scratch::input::{self, Origin, Record};
use crate::scratch::process::{Ended, Start, start};
use crate::scratch::{self, Run, Sources, Variant, World};
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::{Guarantee, Mode, NodeKind, Once, PostgresSink, Topology};

/// An id that is a number is made anew above this.
const OTHER_ID: i64 = 7_000_000_000_000_000;
/// What is waited for at most: a group's positions, a crash.
const PATIENCE: Duration = Duration::from_secs(60);

/// One line of the comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub chapter: Chapter,
    /// The guarantee, the kind of send, or the client's setting.
    pub how: String,
    /// Where one looks.
    pub end: String,
    /// What keeps an effect from being there twice: `version guard`, `ledger`, …
    pub by: &'static str,
    /// Where the process was killed.
    pub killed: String,
    pub expected: Effects,
    pub observed: Effects,
    /// Events that were delivered again and passed over.
    pub skipped: u64,
}

impl Row {
    pub fn is_right(&self) -> bool {
        self.expected == self.observed
    }
}

/// What a line is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chapter {
    Crash,
    Sends,
    AutoCommit,
}

/// The comparison.
#[derive(Clone, Debug)]
pub struct Semantics {
    pub file: String,
    pub seed: u64,
    pub servers: Vec<String>,
    /// The record that the process is killed at.
    pub at: String,
    pub rows: Vec<Row>,
    pub elapsed: Duration,
}

/// Compares the guarantees that the file's `[drill]` names. Blocks, for a minute.
///
/// # Errors
/// As [`super::run`].
pub fn compare(
    text: &str,
    topology: Topology,
    options: &super::Options,
    interrupted: &AtomicBool,
    say: &dyn Fn(&str),
) -> Result<Semantics, Failure> {
    let started = Instant::now();
    let topology = Arc::new(topology);
    let records = records(&topology, options)?;
    let cluster = scratch::cluster(options.external, say)?;
    let world = World::new(&cluster, text, Arc::clone(&topology), "drill", options.seed, options.external)?;
    let names: Vec<String> = records.iter().map(name).collect();
    let comparison = Comparison {
        world: &world,
        plan: Plan::new(topology),
        middle: (records.len() - 1) / 2,
        records,
        names,
        quick: options.quick,
        interrupted,
    };
    let rows = comparison.run(say);
    world.clean();
    Ok(Semantics {
        file: comparison.plan.topology.file.clone(),
        seed: options.seed,
        servers: cluster.description.clone(),
        at: comparison.names[comparison.middle].clone(),
        rows: rows?,
        elapsed: started.elapsed(),
    })
}

/// The inputs of the file's first test, as they are, all in one partition.
fn records(topology: &Topology, options: &super::Options) -> Result<Vec<Record>, Failure> {
    let file = &topology.file;
    if let Some(node) = topology.nodes.iter().find(|node| {
        let reads_sinks =
            |n: &crate::topology::spec::Port| !matches!(topology.nodes[n.node.0].kind, NodeKind::Source(_));
        matches!(node.kind, NodeKind::PostgresSink(_)) && node.inputs.iter().any(reads_sinks)
    }) {
        return Err(Failure::refused(format!(
            "{file}: [drill] compares stages one by one, so that sink {} has to read a source; without [drill] the file \
             is drilled as it is",
            node.name
        )));
    }
    let first = Topology { tests: topology.tests.iter().take(1).cloned().collect(), ..topology.clone() };
    let origin = options.origin.clone().unwrap_or(Origin::Tests { at_least: 1 });
    let (records, _) = input::gather(&first, &origin)?;
    // One time for all runs, so that what is made of it is the same.
    let now = Some(Clock::System.now_ms());
    let timed = |record: Record| Record { partition: 0, timestamp: record.timestamp.or(now), ..record };
    let mut records: Vec<Record> = records.into_iter().map(timed).collect();
    records.retain(|record| record.key.is_some());
    let mut names: Vec<String> = records.iter().map(name).collect();
    names.sort_unstable();
    names.dedup();
    if records.len() < 3 || names.len() < records.len() {
        return Err(Failure::refused(format!(
            "{file}: [drill] needs at least three records, each with a key of its own, in the file's first test"
        )));
    }
    Ok(records)
}

fn name(record: &Record) -> String {
    String::from_utf8_lossy(record.key.as_deref().unwrap_or_default()).into_owned()
}

struct Comparison<'a> {
    world: &'a World,
    plan: Plan,
    records: Vec<Record>,
    names: Vec<String>,
    /// The record at which processes are killed.
    middle: usize,
    quick: bool,
    interrupted: &'a AtomicBool,
}

impl Comparison<'_> {
    fn run(&self, say: &dyn Fn(&str)) -> Result<Vec<Row>, Failure> {
        let mut rows = Vec::new();
        say("running without a crash …");
        let once = self.once()?;
        for guarantee in &self.plan.topology.drill {
            say(&format!("{}: killing it at {} …", guarantee.as_str(), self.names[self.middle]));
            for stage in &self.plan.stages {
                for point in points(*guarantee, stage, self.quick) {
                    rows.extend(self.crash(*guarantee, stage, point, &once)?);
                }
            }
        }
        say("sending it twice …");
        rows.extend(self.sends(false, &once)?);
        rows.extend(self.sends(true, &once)?);
        say("a client that commits by itself …");
        for crash in [auto_commit::Crash::BeforeEffect, auto_commit::Crash::BeforeCommit] {
            rows.push(self.auto_commit(crash)?);
        }
        Ok(rows)
    }

    /// What a stage writes itself; dead letters and ledgers are no effects. Contents are looked at also where they vary:
    /// the keys are in them.
    fn ends(&self, stage: Option<&Stage>) -> Vec<End> {
        let all = ends(&self.plan, stage, &[]).into_iter();
        let all = all.filter(|end| matches!(end.kind, EndKind::Topic | EndKind::Table(_)));
        all.map(|end| End { varies: None, ..end }).collect()
    }

    /// What each record leaves at each end without a crash.
    fn once(&self) -> Result<Vec<(End, Traces)>, Failure> {
        let file = &self.plan.topology.file;
        let run = self.new_run(None)?;
        self.world.send(&run.name, &self.records, 0)?;
        through(start(&run, Start::default())?.wait(self.interrupted)?)?;
        let (found, letters) = self.look(&run, &self.ends(None), None, None)?;
        if let Some(letter) = letters.first() {
            return Err(Failure::refused(format!(
                "{file}: [drill] compares effects, and a record is rejected even without a crash: {letter}"
            )));
        }
        let varying = ends(&self.plan, None, &[]);
        let traces = self.ends(None).into_iter().zip(found).map(|(end, contents)| {
            let varies = varying.iter().any(|v| v.kind == end.kind && v.name == end.name && v.varies.is_some());
            let how = match self.sink(&end) {
                _ if varies => How::Counted,
                Some(sink) if sink.mode == Mode::Add => How::Sums(sink.key.clone()),
                _ => How::Same,
            };
            match Traces::new(&self.names, &contents, how) {
                Ok(traces) => Ok((end, traces)),
                Err(why) => Err(Failure::refused(format!(
                    "{file}: [drill] cannot count effects in {}: {why}; without [drill] the file is drilled as it is",
                    super::report::title(&end)
                ))),
            }
        });
        traces.collect()
    }

    /// What is at some ends of a run, without what names the run, and the contents of its dead letters. `ids`: an event id
    /// that stands for another.
    fn look(
        &self,
        run: &Run,
        ends: &[End],
        alone: Option<&str>,
        ids: Option<&(String, String)>,
    ) -> Result<(Vec<Contents>, Vec<String>), Failure> {
        let letters = End {
            kind: EndKind::DeadLetters,
            name: "dead letters".to_owned(),
            promise: Promise::default(),
            varies: None,
        };
        let all: Vec<End> = ends.iter().cloned().chain([letters]).collect();
        let mut found = observe(self.world, run, &all, alone)?.contents;
        let plain = |text: &mut String| {
            *text = text.replace(&run.name, "");
            if let Some((other, first)) = ids {
                *text = text.replace(other, first);
            }
        };
        for contents in &mut found {
            match contents {
                Contents::Records(records) => records.iter_mut().for_each(|record| plain(&mut record.content)),
                Contents::Rows(rows) => rows.values_mut().for_each(plain),
                Contents::Heap(rows) => rows.iter_mut().for_each(plain),
            }
        }
        let letters = match found.pop() {
            Some(Contents::Records(records)) => records.into_iter().map(|record| record.content).collect(),
            _ => Vec::new(),
        };
        Ok((found, letters))
    }

    fn new_run(&self, guarantee: Option<Guarantee>) -> Result<Run, Failure> {
        let settings = guarantee.map(|guarantee| ("guarantee", Some(Value::from(guarantee.as_str()))));
        // A second send lies elsewhere, which is no other effect.
        let settings = settings.into_iter().chain([("audit", None)]).collect();
        let run = self.world.run(&Variant { sources: Sources::Own, settings, ..Variant::default() })?;
        self.world.make_sources(&run.name, 1)?;
        self.world.make_tables(&run)?;
        Ok(run)
    }

    /// One crash of one stage under a guarantee.
    fn crash(
        &self,
        guarantee: Guarantee,
        stage: &Stage,
        point: Point,
        once: &[(End, Traces)],
    ) -> Result<Vec<Row>, Failure> {
        let run = self.new_run(Some(guarantee))?;
        let only = if let StageKind::Kafka { .. } = stage.kind { run.name.as_str() } else { stage.name.as_str() };
        let (before, rest) = self.records.split_at(self.middle);
        self.world.send(&run.name, before, 0)?;
        let crash = Crash { records: self.middle as u64 + 1, ..Crash::at(point, 1) };
        let mut armed = start(&run, Start { crash: Some(crash), only: Some(only), endless: true })?;
        self.await_positions(&run, only, self.middle)?;
        self.world.send(&run.name, &rest[..1], self.middle)?;
        let crashed = armed.ended(PATIENCE, self.interrupted)?;
        let killed = match &crashed {
            Some(ended) if ended.was_killed() => point.to_string(),
            Some(ended) => return Err(Failure::refused(format!("a run ended by itself:\n{}", ended.tail()))),
            None => return Err(Failure::unreachable(format!("{only} never came by {point}"))),
        };
        self.world.send(&run.name, &rest[1..], self.middle + 1)?;
        let ended = start(&run, Start { crash: None, only: Some(only), endless: false })?.wait(self.interrupted)?;
        let ended = through(ended)?;
        let reported = ended.report["stages"][0].clone();
        let count = |name: &str| reported[name].as_u64().unwrap_or(0);
        let skipped = count("duplicates") + count("stale") + count("ties");
        let times = times_after(guarantee, point, self.plan.postgres_sink(stage).map(PostgresSink::once_by));
        let mut rows = Vec::new();
        for (end, observed) in self.effects(&run, Some(stage), once, None)? {
            rows.push(Row {
                chapter: Chapter::Crash,
                how: guarantee.as_str().to_owned(),
                by: self.by(&end),
                end: super::report::title(&end),
                killed: killed.clone(),
                expected: Effects::expected(&self.names, &self.names[self.middle], times),
                observed,
                skipped,
            });
        }
        Ok(rows)
    }

    fn sink(&self, end: &End) -> Option<&PostgresSink> {
        let EndKind::Table(node) = end.kind else { return None };
        let NodeKind::PostgresSink(sink) = &self.plan.topology.nodes[node].kind else { return None };
        Some(sink)
    }

    fn by(&self, end: &End) -> &'static str {
        let Some(sink) = self.sink(end) else { return "" };
        match (sink.once_by(), sink.mode) {
            (Some(Once::Version), _) => "version guard",
            (Some(Once::Ledger), _) => "ledger",
            (Some(Once::Progress), _) => "progress beside the rows",
            (None, Mode::Insert) => "plain insert",
            (None, _) => "nothing",
        }
    }

    /// Waits until a stage is through so many records, so that the next one meets nothing that is still open.
    fn await_positions(&self, run: &Run, only: &str, records: usize) -> Result<(), Failure> {
        let stage = run.plan.stages.iter().find(|stage| stage.name == only).expect("a stage of the run");
        let deadline = Instant::now() + PATIENCE;
        let through = |standings: &[crate::quickstart::topics::Standing]| {
            standings.iter().map(|s| s.position.unwrap_or(Position(0)).0).sum::<i64>() >= records as i64
        };
        loop {
            let mut standings = Vec::new();
            for topic in run.plan.reads(stage) {
                standings.extend(self.world.topics.standings(&stage.group, &topic)?);
            }
            if through(&standings) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Failure::unreachable(format!("{only} does not commit what it was sent")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// What became of each record at each end of a stage, or of the whole job. `ids`: as for [`Self::look`].
    fn effects(
        &self,
        run: &Run,
        stage: Option<&Stage>,
        once: &[(End, Traces)],
        ids: Option<&(String, String)>,
    ) -> Result<Vec<(End, Effects)>, Failure> {
        let ends = self.ends(stage);
        let alone = stage.map(|stage| match stage.kind {
            StageKind::Kafka { .. } => run.name.as_str(),
            StageKind::Postgres { .. } => stage.name.as_str(),
        });
        let (found, letters) = self.look(run, &ends, alone, ids)?;
        let rejected = |name: &str| letters.iter().any(|letter| letter.starts_with(&format!("{name:?} = ")));
        let effects = ends.into_iter().zip(found).map(|(end, contents)| {
            let known = once.iter().find(|(known, _)| known.kind == end.kind && known.name == end.name);
            let (_, traces) = known.expect("the run without a crash reaches every end");
            let mut effects = traces.effects(&contents);
            for name in self.names.iter().filter(|name| rejected(name)) {
                effects.other.entry(name.clone()).or_insert(Fate::ONCE).rejected = true;
            }
            (end, effects)
        });
        Ok(effects.collect())
    }

    /// The middle record is sent at two offsets; with `anew` its second send has an id of its own.
    fn sends(&self, anew: bool, once: &[(End, Traces)]) -> Result<Vec<Row>, Failure> {
        let first = &self.records[self.middle];
        let (second, ids) = match first.value.as_deref().and_then(|value| self.other_id(value)).filter(|_| anew) {
            Some((value, ids)) => (Record { value: Some(value), ..first.clone() }, Some(ids)),
            None => (first.clone(), None),
        };
        let (before, after) = self.records.split_at(self.middle + 1);
        let run = self.new_run(None)?;
        // Both sends say that they are the same record.
        self.world.send(&run.name, before, 0)?;
        self.world.send(&run.name, &[second], self.middle)?;
        self.world.send(&run.name, after, self.middle + 1)?;
        let ended = through(start(&run, Start::default())?.wait(self.interrupted)?)?;
        // Where records lie is another place after the second send: what is made of that is counted and not compared.
        let placed = self.plan.topology.nodes.iter().flat_map(|node| node.kind.programs());
        let placed = placed.into_iter().any(|program| program.uses().offset_or_partition);
        let counted = |(end, traces): &(End, Traces)| (end.clone(), traces.clone().counted());
        let once: Vec<(End, Traces)> = if placed { once.iter().map(counted).collect() } else { once.to_vec() };
        let skipped = |end: &End| {
            let stages = ended.report["stages"].as_array().into_iter().flatten();
            let EndKind::Table(node) = end.kind else { return 0 };
            let own = stages.filter(|s| s["stage"] == self.plan.topology.nodes[node].name.as_str());
            let count = |s: &Json, name: &str| s[name].as_u64().unwrap_or(0);
            own.map(|s| count(s, "duplicates") + count(s, "stale") + count(s, "ties")).sum()
        };
        let rows = self.effects(&run, None, &once, ids.as_ref())?.into_iter().map(|(end, observed)| {
            let stage = self
                .plan
                .stages
                .iter()
                .find(|s| self.ends(Some(s)).iter().any(|own| own.kind == end.kind && own.name == end.name));
            let times = match stage.and_then(|stage| self.plan.postgres_sink(stage)?.once_by()) {
                Some(Once::Version) => 1,
                Some(Once::Ledger) if !anew => 1,
                _ => 2,
            };
            Row {
                chapter: Chapter::Sends,
                how: if anew { "an id made anew" } else { "one id" }.to_owned(),
                by: self.by(&end),
                end: super::report::title(&end),
                killed: "not killed".to_owned(),
                expected: Effects::expected(&self.names, &self.names[self.middle], times),
                observed,
                skipped: skipped(&end),
            }
        });
        Ok(rows.collect())
    }

    /// The record's value with another event id, where its source declares one as a member; and the two ids as they stand
    /// in texts.
    fn other_id(&self, value: &[u8]) -> Option<(Vec<u8>, (String, String))> {
        let member = self.plan.topology.nodes.iter().find_map(|node| match &node.kind {
            NodeKind::Source(source) => source.event_id.as_ref()?.member(),
            _ => None,
        })?;
        other_member(value, member)
    }

    /// A consumer with `enable.auto.commit=true` is killed at the middle record and starts again.
    fn auto_commit(&self, crash: auto_commit::Crash) -> Result<Row, Failure> {
        let run = self.new_run(None)?;
        self.world.send(&run.name, &self.records, 0)?;
        let topic = format!("{}.{}", run.name, self.records[0].topic);
        let connection = &self.world.topics.connection;
        let effects = auto_commit::crash_and_restart(&run, connection, &topic, self.middle, crash, self.interrupted)?;
        let count = |name: &str| Fate::of(effects.iter().filter(|effect| *effect == name).count());
        let (how, times): (_, Box<dyn Fn(usize) -> usize>) = match crash {
            // The client had committed what was not done.
            auto_commit::Crash::BeforeEffect => ("committed too early", Box::new(|i| usize::from(i != self.middle))),
            // It had not committed what was done.
            auto_commit::Crash::BeforeCommit => {
                ("committed too late", Box::new(|i| if i <= self.middle { 2 } else { 1 }))
            }
        };
        let index = |name: &str| self.names.iter().position(|known| known == name).unwrap_or_default();
        Ok(Row {
            chapter: Chapter::AutoCommit,
            how: "enable.auto.commit".to_owned(),
            end: "its effects".to_owned(),
            by: "",
            killed: how.to_owned(),
            expected: Effects::observed(&self.names, |name| Fate::of(times(index(name)))),
            observed: Effects::observed(&self.names, count),
            skipped: 0,
        })
    }
}

/// Where a process is killed: before and after what each guarantee puts first.
fn points(guarantee: Guarantee, stage: &Stage, quick: bool) -> Vec<Point> {
    let kafka = matches!(stage.kind, StageKind::Kafka { .. });
    let (telling, other): (Point, &[Point]) = match (guarantee, kafka) {
        (Guarantee::AtMostOnce, true) => (Point::AfterCommit, &[Point::BeforeCommit]),
        (Guarantee::AtMostOnce, false) => (Point::AfterCommit, &[Point::AfterDatabaseCommit]),
        (_, true) => (Point::BeforeCommit, &[Point::AfterCommit]),
        (_, false) => (Point::AfterDatabaseCommit, &[Point::BeforeDatabaseCommit]),
    };
    let other = if quick { &[] } else { other };
    [&[telling], other].concat()
}

/// How often the record that a process is killed at has its effect in the end. `once_by`: of a Postgres stage, what
/// keeps its effects from being there twice.
fn times_after(guarantee: Guarantee, point: Point, once_by: Option<Option<Once>>) -> usize {
    let positions_first = guarantee == Guarantee::AtMostOnce && once_by != Some(Some(Once::Progress));
    let (effect, committed) = match point {
        Point::BeforeCommit => (!positions_first, false),
        Point::AfterCommit => (!positions_first, true),
        Point::BeforeDatabaseCommit => (false, positions_first),
        Point::AfterDatabaseCommit => (true, positions_first),
        _ => (false, false),
    };
    // A transaction that is not committed has no effect, and what is known has it once.
    let transaction = once_by.is_none() && guarantee == Guarantee::ExactlyOnce;
    let effect = effect && (committed || !transaction);
    let again = !committed;
    match (effect, again) {
        (true, true) if once_by.is_some_and(|once| once.is_some()) => 1,
        (effect, again) => usize::from(effect) + usize::from(again),
    }
}

/// The object with another id in that member, and nothing else changed; then the other id and the first as text.
fn other_member(value: &[u8], member: &str) -> Option<(Vec<u8>, (String, String))> {
    let text = std::str::from_utf8(value).ok()?;
    let members: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok()?;
    let first = members.get(member)?.get();
    let at = first.as_ptr().addr() - text.as_ptr().addr();
    let (other, first) = match serde_json::from_str(first).ok()? {
        Json::String(first) => (Json::from(uuid::Uuid::now_v7().to_string()), first),
        // So large that no other number of a record holds its digits.
        _ => (Json::from(OTHER_ID + Clock::System.now_ms()), first.to_owned()),
    };
    let end = at + members[member].get().len();
    let changed = format!("{}{other}{}", &text[..at], &text[end..]);
    let other = other.as_str().map_or_else(|| other.to_string(), str::to_owned);
    Some((changed.into_bytes(), (other, first)))
}

/// A run that should have come to its end.
fn through(ended: Ended) -> Result<Ended, Failure> {
    match ended.status.success() {
        true => Ok(ended),
        false => Err(Failure::refused(format!("a run did not come to its end:\n{}", ended.tail()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_first_decides_whether_a_crash_loses_or_doubles() {
        use Guarantee::{AtLeastOnce, AtMostOnce, ExactlyOnce};
        use Point::{AfterCommit, AfterDatabaseCommit, BeforeCommit, BeforeDatabaseCommit};
        let kafka = |guarantee| [BeforeCommit, AfterCommit].map(|point| times_after(guarantee, point, None));
        assert_eq!([AtMostOnce, AtLeastOnce, ExactlyOnce].map(kafka), [[1, 0], [2, 1], [1, 1]]);
        let table = |guarantee, once| {
            [BeforeDatabaseCommit, AfterDatabaseCommit, AfterCommit]
                .map(|point| times_after(guarantee, point, Some(once)))
        };
        assert_eq!(table(AtMostOnce, None), [0, 1, 0]);
        assert_eq!(table(AtLeastOnce, None), [1, 2, 1]);
        assert_eq!(table(ExactlyOnce, None), [1, 2, 1]);
        assert_eq!(table(AtLeastOnce, Some(Once::Ledger)), [1, 1, 1]);
        assert_eq!(table(AtMostOnce, Some(Once::Version)), [0, 1, 0]);
        assert_eq!(table(AtMostOnce, Some(Once::Progress)), [1, 1, 1]);
    }

    #[test]
    fn a_second_send_differs_by_its_id_alone() {
        for (value, first) in [(r#"{"b": 1e3, "id" : "e1", "a":"e1"}"#, "e1"), (r#"{"id":7,"n":7}"#, "7")] {
            let (changed, (other, was)) = other_member(value.as_bytes(), "id").unwrap();
            assert_eq!(was, first);
            let changed = String::from_utf8(changed).unwrap();
            assert_ne!(changed, value);
            assert_eq!(changed.replace(&other, first), value);
        }
        assert_eq!(other_member(b"{}", "id"), None);
    }
}
