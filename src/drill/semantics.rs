//! The guarantees side by side, on one topology (`[drill]` in its file): records arrive one by one, the process is killed
//! at the middle one, comes back, and gets the rest. Then what a producer's second send does, and what a client does
//! that commits by itself.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde_json::Value as Json;
use toml::Value;

use super::auto_commit;
use super::child::{Start, start};
use super::input::{self, Origin, Record};
use super::observe::{Contents, End, EndKind, ends, observe};
use super::world::{Run, Variant, World};
use crate::cluster::{Cluster, Options as ClusterOptions};
use crate::crash::{Crash, Point};
use crate::error::Failure;
use crate::record::Position;
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::{Guarantee, Mode, NodeKind, Once, Topology};

/// What is waited for at most: a group's positions, a crash.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often each record had its effect, but for those that had it once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    pub records: usize,
    /// By the record's key.
    pub other: BTreeMap<String, usize>,
}

impl Effects {
    /// Every record once, but `name` so often.
    fn expected(names: &[String], name: &str, times: usize) -> Effects {
        let other = if times == 1 { BTreeMap::new() } else { BTreeMap::from([(name.to_owned(), times)]) };
        Effects { records: names.len(), other }
    }

    /// Counted by name.
    pub fn observed(names: &[String], count: impl Fn(&str) -> usize) -> Effects {
        let counts = names.iter().map(|name| (name.clone(), count(name)));
        Effects { records: names.len(), other: counts.filter(|(_, times)| *times != 1).collect() }
    }

    pub fn lost(&self) -> usize {
        self.other.values().filter(|times| **times == 0).count()
    }

    pub fn doubled(&self) -> usize {
        self.other.values().filter(|times| **times > 1).count()
    }

    pub fn right(&self) -> usize {
        self.records - self.other.len()
    }

    /// `each once`, `order-3 lost`, `order-3 twice`.
    pub fn text(&self) -> String {
        let said = self.other.iter().map(|(name, times)| match times {
            0 => format!("{name} lost"),
            2 => format!("{name} twice"),
            times => format!("{name} {times} times"),
        });
        if self.other.is_empty() { "each once".to_owned() } else { said.collect::<Vec<_>>().join(", ") }
    }
}

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
    let cluster = Cluster::obtain(&ClusterOptions { use_given: options.external, ..ClusterOptions::default() }, say)?;
    for line in &cluster.description {
        say(&format!("using {line}"));
    }
    let world = World::new(&cluster, text, Arc::clone(&topology), options.seed, options.external)?;
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
    let mut records: Vec<Record> = records.into_iter().map(|record| Record { partition: 0, ..record }).collect();
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
        for guarantee in &self.plan.topology.drill {
            say(&format!("{}: killing it at {} …", guarantee.as_str(), self.names[self.middle]));
            for stage in &self.plan.stages {
                for point in points(*guarantee, stage, self.quick) {
                    rows.extend(self.crash(*guarantee, stage, point)?);
                }
            }
        }
        say("sending it twice …");
        rows.extend(self.sends(false)?);
        rows.extend(self.sends(true)?);
        say("a client that commits by itself …");
        for crash in [auto_commit::Crash::BeforeEffect, auto_commit::Crash::BeforeCommit] {
            rows.push(self.auto_commit(crash)?);
        }
        Ok(rows)
    }

    /// What a stage writes itself; dead letters and ledgers are no effects.
    fn ends(&self, stage: Option<&Stage>) -> Vec<End> {
        let all = ends(&self.plan, stage, &[]).into_iter();
        all.filter(|end| matches!(end.kind, EndKind::Topic | EndKind::Table(_))).collect()
    }

    fn new_run(&self, guarantee: Option<Guarantee>) -> Result<Run, Failure> {
        let settings = guarantee.map(|guarantee| ("guarantee", Some(Value::from(guarantee.as_str()))));
        let settings = settings.into_iter().collect();
        let run = self.world.run(&Variant { own_sources: true, settings, ..Variant::default() })?;
        self.world.make_sources(&run.name, 1)?;
        self.world.make_tables(&run)?;
        Ok(run)
    }

    /// One crash of one stage under a guarantee.
    fn crash(&self, guarantee: Guarantee, stage: &Stage, point: Point) -> Result<Vec<Row>, Failure> {
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
        if !ended.status.success() {
            return Err(Failure::refused(format!("a run did not come to its end:\n{}", ended.tail())));
        }
        let reported = ended.report["stages"][0].clone();
        let count = |name: &str| reported[name].as_u64().unwrap_or(0);
        let skipped = count("duplicates") + count("stale") + count("ties");
        let times = times_after(guarantee, point, self.once_by(stage));
        let mut rows = Vec::new();
        for (end, observed) in self.effects(&run, Some(stage))? {
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

    /// What keeps a stage's effects from being there twice, of Postgres stages.
    fn once_by(&self, stage: &Stage) -> Option<Option<Once>> {
        let StageKind::Postgres { sink, .. } = &stage.kind else { return None };
        let NodeKind::PostgresSink(sink) = &self.plan.topology.nodes[sink.0].kind else { return None };
        Some(sink.once_by())
    }

    fn by(&self, end: &End) -> &'static str {
        let EndKind::Table(node) = end.kind else { return "" };
        let NodeKind::PostgresSink(sink) = &self.plan.topology.nodes[node].kind else { return "" };
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

    /// How often each record has its effect at each end of a stage, or of the whole job.
    fn effects(&self, run: &Run, stage: Option<&Stage>) -> Result<Vec<(End, Effects)>, Failure> {
        let ends = self.ends(stage);
        let alone = stage.map(|stage| match stage.kind {
            StageKind::Kafka { .. } => run.name.as_str(),
            StageKind::Postgres { .. } => stage.name.as_str(),
        });
        let observed = observe(self.world, run, &ends, alone)?;
        let effects =
            observed.contents.iter().map(|contents| Effects::observed(&self.names, |name| times(contents, name)));
        Ok(ends.iter().cloned().zip(effects).collect())
    }

    /// The middle record is sent at two offsets; with `anew` its second send has an id of its own.
    fn sends(&self, anew: bool) -> Result<Vec<Row>, Failure> {
        let mut second = self.records[self.middle].clone();
        if anew {
            second.value = second.value.map(|value| self.other_id(&value));
        }
        let (before, after) = self.records.split_at(self.middle + 1);
        let records = [before, &[second], after].concat();
        let run = self.new_run(None)?;
        self.world.send(&run.name, &records, 0)?;
        let ended = start(&run, Start::default())?.wait(self.interrupted)?;
        if !ended.status.success() {
            return Err(Failure::refused(format!("a run did not come to its end:\n{}", ended.tail())));
        }
        let skipped = |end: &End| {
            let stages = ended.report["stages"].as_array().into_iter().flatten();
            let EndKind::Table(node) = end.kind else { return 0 };
            let own = stages.filter(|s| s["stage"] == self.plan.topology.nodes[node].name.as_str());
            let count = |s: &Json, name: &str| s[name].as_u64().unwrap_or(0);
            own.map(|s| count(s, "duplicates") + count(s, "stale") + count(s, "ties")).sum()
        };
        let rows = self.effects(&run, None)?.into_iter().map(|(end, observed)| {
            let stage = self
                .plan
                .stages
                .iter()
                .find(|s| self.ends(Some(s)).iter().any(|own| own.kind == end.kind && own.name == end.name));
            let times = match stage.and_then(|stage| self.once_by(stage)) {
                Some(Some(Once::Version)) => 1,
                Some(Some(Once::Ledger)) if !anew => 1,
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

    /// The record's value with another event id, where its source declares one as a member.
    fn other_id(&self, value: &[u8]) -> Vec<u8> {
        let member = self.plan.topology.nodes.iter().find_map(|node| match &node.kind {
            NodeKind::Source(source) => source.event_id.as_ref()?.member(),
            _ => None,
        });
        let (Some(member), Ok(Json::Object(mut members))) = (member, serde_json::from_slice(value)) else {
            return value.to_vec();
        };
        members.insert(member.to_owned(), uuid::Uuid::now_v7().to_string().into());
        Json::Object(members).to_string().into_bytes()
    }

    /// A consumer with `enable.auto.commit=true` is killed at the middle record and starts again.
    fn auto_commit(&self, crash: auto_commit::Crash) -> Result<Row, Failure> {
        let run = self.new_run(None)?;
        self.world.send(&run.name, &self.records, 0)?;
        let topic = format!("{}.{}", run.name, self.records[0].topic);
        let connection = &self.world.topics.connection;
        let effects = auto_commit::crash_and_restart(&run, connection, &topic, self.middle, crash, self.interrupted)?;
        let count = |name: &str| effects.iter().filter(|effect| *effect == name).count();
        let (how, times): (_, Box<dyn Fn(usize) -> usize>) = match crash {
            // The client had committed what was not done.
            auto_commit::Crash::BeforeEffect => ("committed too early", Box::new(|i| usize::from(i != self.middle))),
            // It had not committed what was done.
            auto_commit::Crash::BeforeCommit => {
                ("committed too late", Box::new(|i| if i <= self.middle { 2 } else { 1 }))
            }
        };
        let other = self.names.iter().enumerate().map(|(i, name)| (name.clone(), times(i))).filter(|(_, n)| *n != 1);
        Ok(Row {
            chapter: Chapter::AutoCommit,
            how: "enable.auto.commit".to_owned(),
            end: "its effects".to_owned(),
            by: "",
            killed: how.to_owned(),
            expected: Effects { records: self.names.len(), other: other.collect() },
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

/// How often a record of that key is among what was found.
fn times(contents: &Contents, name: &str) -> usize {
    let has = |row: &String| {
        let row: Json = serde_json::from_str(row).unwrap_or_default();
        row.as_object().is_some_and(|row| row.values().any(|value| value == name))
    };
    match contents {
        Contents::Records(records) => {
            // Of the key: the contents begin with it, as text in quotes.
            let start = format!("{name:?} = ");
            records.iter().filter(|record| record.content.starts_with(&start)).count()
        }
        Contents::Rows(rows) => rows.values().filter(|row| has(row)).count(),
        Contents::Heap(rows) => rows.iter().filter(|row| has(row)).count(),
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
    fn effects_name_what_is_not_there_once() {
        let names = ["a", "b", "c"].map(str::to_owned);
        let effects = Effects::observed(&names, |name| match name {
            "a" => 0,
            "b" => 1,
            _ => 2,
        });
        assert_eq!((effects.lost(), effects.doubled(), effects.right()), (1, 1, 1));
        assert_eq!(effects.text(), "a lost, c twice");
        assert_eq!(Effects::expected(&names, "b", 1).text(), "each once");
    }
}
