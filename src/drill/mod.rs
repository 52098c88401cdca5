//! `semel drill`: proof by killing. A topology runs once without a crash; then again and again, each time killed at
//! another place and started again; then over its whole input once more. What came out is compared with what its
//! guarantees let a crash do.

pub mod auto_commit;
mod bound;
mod cases;
mod effects;
mod html;
mod observe;
mod replay;
mod report;
mod semantics;
mod semantics_report;
mod verdict;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use toml::Value;

use crate::crash::Point;
use crate::error::Failure;
use crate::quickstart::orders::Random;
use crate::scratch::process::{Ended, Start, start};
use crate::scratch::{self, Run, Variant, World, input};
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::Topology;

use bound::Open;
use cases::{Case, Kill, Load};
use observe::{Contents, End, Observed, ends, observe};
use verdict::{Seen, Tally};

pub use crate::scratch::input::Origin;
pub use report::{CaseReport, EndReport, Fate, Report};
pub use semantics::{Semantics, compare as compare_guarantees};

/// Batches into which the input is cut, so that a crash meets some that are committed and some that are not.
const BATCHES: u64 = 6;
/// Tries at a kill that falls into a commit, and at others.
const TRIES_IN_FLIGHT: u32 = 12;
const TRIES: u32 = 2;
/// Two processes are through a drill's input by then, once all partitions can be read.
const THROUGH_WITHIN: Duration = Duration::from_secs(20);
/// The broker's own session (`group.consumer.session.timeout.ms`), where it assigns.
const BROKERS_SESSION: Duration = Duration::from_secs(45);
/// A second process is up and in the group by then.
const REVOKED_WITHIN: Duration = Duration::from_secs(30);

/// How a drill is done.
#[derive(Clone, Debug)]
pub struct Options {
    /// None: the file's tests.
    pub origin: Option<Origin>,
    /// Kills at random moments.
    pub random: usize,
    /// Of everything that is left to chance.
    pub seed: u64,
    /// Fewer places and records.
    pub quick: bool,
    /// Use the servers that `KAFKA_BROKERS` and `DATABASE_URL` name.
    pub external: bool,
}

/// Drills a topology. `text` is its file's. Blocks, for minutes. `say` is given short sentences for the user.
///
/// # Errors
/// What keeps it from being done: no input, servers that cannot be had, a job that does not run even without a crash,
/// an interrupt. A broken guarantee is no error but in the report.
pub fn run(
    text: &str,
    topology: Topology,
    options: &Options,
    interrupted: &AtomicBool,
    say: &dyn Fn(&str),
) -> Result<Report, Failure> {
    let started = Instant::now();
    let cluster = scratch::cluster(options.external, say)?;
    let topology = Arc::new(topology);
    let least = if options.quick { 60 } else { 240 };
    let origin = options.origin.clone().unwrap_or(Origin::Tests { at_least: least });
    let (records, from) = input::gather(&topology, &origin)?;
    let world = World::new(&cluster, text, Arc::clone(&topology), "drill", options.seed, options.external)?;
    let drill = Drill { world: &world, plan: Plan::new(topology), options, interrupted, records: records.len() as u64 };
    let result = world.feed(&records).and_then(|()| drill.run(say));
    world.clean();
    let (ends, baseline, cases, replay) = result?;
    Ok(Report {
        file: drill.plan.topology.file.clone(),
        guarantee: drill.plan.topology.guarantee,
        seed: options.seed,
        input: format!("{} records {from}", records.len()),
        servers: cluster.description.clone(),
        ends,
        baseline,
        cases,
        replay,
        elapsed: started.elapsed(),
    })
}

struct Drill<'a> {
    world: &'a World,
    plan: Plan,
    options: &'a Options,
    interrupted: &'a AtomicBool,
    records: u64,
}

/// Where one looks, what the crash-free run left there, every crash, the replay.
type Found = (Vec<End>, Vec<EndReport>, Vec<CaseReport>, CaseReport);

/// The crash-free run.
struct Baseline {
    run: Run,
    observed: Observed,
    loads: BTreeMap<String, Load>,
    /// Postgres stages that met one version with several contents.
    tied: Vec<String>,
}

impl Baseline {
    /// Of a stage, or of all.
    fn load(&self, stage: Option<&str>) -> Load {
        let mut load = Load::default();
        for (_, own) in self.loads.iter().filter(|(name, _)| stage.is_none_or(|stage| stage == *name)) {
            load.records += own.records;
            load.transactions += own.transactions;
        }
        load
    }
}

impl Drill<'_> {
    fn run(&self, say: &dyn Fn(&str)) -> Result<Found, Failure> {
        say(&format!("running {} without a crash …", self.plan.topology.file));
        let baseline = self.baseline()?;
        let cases = cases::cases(&self.plan, self.options.random, self.options.quick);
        say(&format!("killing it in {} ways …", cases.len()));
        let style = ProgressStyle::with_template("{msg:32} {wide_bar} {pos}/{len}").expect("a template of ours");
        let bar = ProgressBar::with_draw_target(Some(cases.len() as u64), ProgressDrawTarget::stderr());
        let bar = bar.with_style(style);
        let mut reports = Vec::new();
        for (number, case) in cases.iter().enumerate() {
            let stage = case.stage.as_deref().unwrap_or("all stages");
            bar.set_message(format!("{stage}: {}", case.name()));
            // Each case draws its own numbers: what one meets does not change the next.
            let mut random = Random(self.options.seed.wrapping_add((number as u64) << 32));
            reports.extend(self.tried(case, &baseline, &mut random)?);
            bar.inc(1);
        }
        bar.finish_and_clear();
        say("running over the whole input once more …");
        let replay = self.replay(&baseline)?;
        let all = ends(&self.plan, None, &baseline.tied);
        let found = all
            .iter()
            .zip(&baseline.observed.contents)
            .map(|(end, contents)| EndReport::right(end, contents.len() as u64));
        let found = found.collect();
        Ok((all, found, reports, replay))
    }

    /// Makes a crash, and again where it fell between the places by chance. One that never comes by its place is reported
    /// as that.
    fn tried(&self, case: &Case, baseline: &Baseline, random: &mut Random) -> Result<Vec<CaseReport>, Failure> {
        let (tries, wanted) = match case.kill {
            Kill::InFlight { wanted } => (TRIES_IN_FLIGHT, wanted as usize),
            _ => (TRIES, 0),
        };
        let mut reports: Vec<CaseReport> = Vec::new();
        let mut missed = None;
        for _ in 0..tries {
            let report = self.case(case, baseline, random, reports.len(), missed.is_some())?;
            if report.fate == Fate::NotReached {
                missed = Some(report);
                continue;
            }
            reports.push(report);
            if reports.iter().filter(|report| report.fate == Fate::InFlight).count() >= wanted {
                break;
            }
        }
        reports.extend(missed.filter(|_| reports.is_empty()));
        Ok(reports)
    }

    /// Seals often enough that a crash in the middle has something before and behind it.
    fn batch_records(&self) -> u64 {
        let wanted = self.records.div_ceil(BATCHES).max(1);
        self.plan.topology.batch_records.map_or(wanted, |own| wanted.min(own.get()))
    }

    fn batches(&self) -> (&'static str, Option<Value>) {
        ("batch_records", Some((self.batch_records() as i64).into()))
    }

    fn baseline(&self) -> Result<Baseline, Failure> {
        let run = self.world.run(&Variant { settings: vec![self.batches()], ..Variant::default() })?;
        let mut reports = Vec::new();
        let has_kafka = run.plan.stages.iter().any(|stage| matches!(stage.kind, StageKind::Kafka { .. }));
        // The tables are made for what the Kafka stage writes.
        if has_kafka {
            reports.push(self.finish(&run, Start { only: Some(&run.name), ..Start::default() })?.report);
        }
        self.world.make_tables(&run)?;
        reports.push(self.finish(&run, Start::default())?.report);
        let stages = || reports.iter().flat_map(|report| report["stages"].as_array().into_iter().flatten());
        let tied =
            stages().filter(|stage| stage["ties"].as_u64() > Some(0)).filter_map(|stage| stage["stage"].as_str());
        let tied: Vec<String> = tied.map(str::to_owned).collect();
        let observed = observe(self.world, &run, &ends(&self.plan, None, &tied), None)?;
        if let Some(behind) = observed.standings.iter().find(|standing| !standing.is_at_end()) {
            let partition = &behind.partition;
            return Err(Failure::unreachable(format!(
                "the run without a crash did not come to the end of {partition}"
            )));
        }
        let mut loads: BTreeMap<String, Load> = BTreeMap::new();
        for stage in stages() {
            let name = stage["stage"].as_str().unwrap_or_default();
            let name = if name == run.name { self.plan.topology.name.as_str() } else { name };
            let load = loads.entry(name.to_owned()).or_default();
            load.records += stage["in"].as_u64().unwrap_or(0);
            load.transactions += stage["transactions"].as_u64().unwrap_or(0);
        }
        Ok(Baseline { run, observed, loads, tied })
    }

    /// Runs to the end; refused where even that fails.
    fn finish(&self, run: &Run, how: Start<'_>) -> Result<Ended, Failure> {
        let ended = start(run, how)?.wait(self.interrupted)?;
        if ended.status.success() {
            return Ok(ended);
        }
        let exit = match ended.status.code() {
            Some(code) => format!("exit {code}"),
            None => ended.status.to_string(),
        };
        Err(Failure::refused(format!(
            "{} does not run even without a crash ({exit}):\n{}",
            self.plan.topology.file,
            ended.tail()
        )))
    }

    fn stage(&self, name: Option<&str>) -> Option<&Stage> {
        self.plan.stages.iter().find(|stage| Some(stage.name.as_str()) == name)
    }

    /// One crash, and the run after it. `sure`: the first time that the process comes by the place.
    fn case(
        &self,
        case: &Case,
        baseline: &Baseline,
        random: &mut Random,
        tried: usize,
        sure: bool,
    ) -> Result<CaseReport, Failure> {
        let started = Instant::now();
        let stage = self.stage(case.stage.as_deref());
        let alone = stage.filter(|stage| matches!(stage.kind, StageKind::Postgres { .. }));
        let load = baseline.load(case.stage.as_deref());
        let mut crash = cases::crash(case.kill, &load, tried, random);
        if sure {
            crash.nth = 1;
        }
        let in_revoke = case.kill == Kill::At(Point::InRevoke);
        let mut settings = vec![self.batches()];
        if in_revoke {
            // The batch is still open when the partitions are asked back.
            let open = self.plan.topology.transaction_timeout.as_millis() as i64 * 2 / 5;
            settings = vec![("batch_records", None), ("commit_interval", Some(format!("{open}ms").into()))];
        }
        // A Postgres stage reads what the crash-free run wrote: what comes out is due to its own crash.
        let outputs = alone.map(|_| baseline.run.outputs.clone());
        let run = self.world.run(&Variant { outputs, settings, ..Variant::default() })?;
        self.world.make_tables(&run)?;
        let only = stage.map(|stage| if alone.is_some() { stage.name.as_str() } else { run.name.as_str() });
        let restart = Start { only: only.filter(|_| alone.is_some()), ..Start::default() };
        let mut report = CaseReport::new(case, crash);
        let mut again = None;
        let (crashed, restarted) = if in_revoke {
            let armed = Start { crash: Some(crash), only, endless: true };
            let Revoked { crashed, beside, restarted } = self.revoke(&run, armed, restart)?;
            if !beside.status.success() {
                return Ok(report.failed(&beside, started.elapsed()));
            }
            report.stalled = restarted.is_none();
            (crashed, restarted)
        } else {
            let crashed = start(&run, Start { crash: Some(crash), only, endless: false })?.wait(self.interrupted)?;
            again = alone.map(|stage| self.again(&run, stage)).transpose()?.flatten();
            (crashed, None)
        };
        let restarted = match restarted {
            Some(restarted) => restarted,
            None => start(&run, restart)?.wait(self.interrupted)?,
        };
        report.fate = match case.kill {
            _ if !crashed.was_killed() && !crashed.status.success() => {
                return Ok(report.failed(&crashed, started.elapsed()));
            }
            _ if !crashed.was_killed() => Fate::NotReached,
            Kill::InFlight { .. } if crashed.in_flight() => Fate::InFlight,
            _ => Fate::Killed,
        };
        if !restarted.status.success() {
            return Ok(report.failed(&restarted, started.elapsed()));
        }
        let all = ends(&self.plan, None, &baseline.tied);
        let reached = ends(&self.plan, alone, &baseline.tied);
        let observed = observe(self.world, &run, &reached, alone.map(|stage| stage.name.as_str()))?;
        let open = Open { alone, all: in_revoke, again };
        for (end, found) in reached.iter().zip(&observed.contents) {
            let at = all.iter().position(|e| e.kind == end.kind && e.name == end.name).expect("one of all");
            let expected = of_stage(&baseline.observed.contents[at], alone);
            let bound = self.bound(end, &expected, baseline, &open);
            report.ends.push(EndReport { end: end.clone(), tally: compare(end, &expected, found), bound });
        }
        report.behind = observed.standings.iter().filter(|standing| !standing.is_at_end()).count() as u64;
        report.elapsed = started.elapsed();
        Ok(report)
    }

    /// A second process joins the group while the armed one has an open batch: it is asked for partitions, and crashes.
    /// Its former self comes back to them while the second one goes on.
    fn revoke(&self, run: &Run, armed: Start<'_>, restart: Start<'_>) -> Result<Revoked, Failure> {
        let mut first = start(run, armed)?;
        first.until("assigned", self.interrupted);
        let mut second = start(run, Start { crash: None, ..armed })?;
        let crashed = match first.ended(REVOKED_WITHIN, self.interrupted)? {
            Some(crashed) => crashed,
            None => {
                first.stop();
                first.wait(self.interrupted)?
            }
        };
        let mut back = start(run, restart)?;
        // A member that crashed is missed for a session, its transaction holds positions until it times out: whatever
        // became of the two, by then the group has given every partition to somebody.
        let Topology { session_timeout, transaction_timeout, kafka, .. } = &*self.plan.topology;
        let broker_assigns = kafka.properties.get("group.protocol").is_some_and(|protocol| protocol == "consumer");
        let session = if broker_assigns { BROKERS_SESSION } else { *session_timeout };
        let restarted = back.ended(THROUGH_WITHIN + session + *transaction_timeout, self.interrupted)?;
        second.stop();
        let beside = second.wait(self.interrupted)?;
        if restarted.is_none() {
            back.stop();
            back.wait(self.interrupted)?;
        }
        Ok(Revoked { crashed, beside, restarted })
    }
}

/// How the processes of a revoke ended: the armed one, the one beside it, and the armed one's return, if it got through.
struct Revoked {
    crashed: Ended,
    beside: Ended,
    restarted: Option<Ended>,
}

/// Of dead letters those that a stage wrote itself.
fn of_stage(contents: &Contents, stage: Option<&Stage>) -> Contents {
    match (contents, stage) {
        (Contents::Records(records), Some(stage)) => {
            let own = |record: &&Seen| record.node.as_ref() == Some(&stage.name);
            Contents::Records(records.iter().filter(own).cloned().collect())
        }
        _ => contents.clone(),
    }
}

fn compare(end: &End, expected: &Contents, found: &Contents) -> Tally {
    match (expected, found) {
        (Contents::Records(expected), Contents::Records(found)) => verdict::records(expected, found),
        (Contents::Rows(expected), Contents::Rows(found)) if end.varies.is_some() => {
            verdict::sets(expected.keys().map(String::as_str), found.keys().map(String::as_str))
        }
        (Contents::Rows(expected), Contents::Rows(found)) => verdict::rows(expected, found),
        (Contents::Heap(expected), Contents::Heap(found)) if end.varies.is_some() => {
            verdict::counts(expected.len(), found.len())
        }
        (Contents::Heap(expected), Contents::Heap(found)) => verdict::rows_by_content(expected, found),
        _ => unreachable!("an end is of one kind in every run"),
    }
}
