//! `semel bench`: what exactly-once costs on a user's own topology. Guarantees take turns on one broker and one input,
//! over commit intervals, record sizes and workers; then records come at a fixed rate, and their way is timed.

mod html;
mod input;
mod machine;
mod plot;
pub mod probe;
mod report;
mod sample;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use toml::Value;

use crate::error::Failure;
use crate::scratch::input::Origin;
use crate::scratch::process::{Process, Start, start};
use crate::scratch::{self, Run, Sources, Variant, World};
use crate::topology::describe::stage_words;
use crate::topology::duration_text;
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::{Guarantee, Topology};

use input::Input;
use probe::Probe;

pub use report::{Latency, Report, Throughput};
pub use sample::Sample;

/// Partitions of the source topics.
const PARTITIONS: i32 = 4;
/// A size is measured with no more input than this, in bytes.
const MOST_BYTES: usize = 400 << 20;
/// At a fixed rate, records of the first moments are not counted: clients connect, code is cold.
const WARM_UP: Duration = Duration::from_secs(2);
/// A run takes no longer.
const LONGEST: Duration = Duration::from_secs(1800);
/// A process is in the group by then.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// How a benchmark is done.
#[derive(Clone, Debug)]
pub struct Options {
    /// None: the file's tests.
    pub origin: Option<Origin>,
    /// The stage. None: the Kafka stage, else the first.
    pub only: Option<String>,
    /// Records a run; those that are given are sent over and over, with other ids and keys, until there are so many.
    pub records: usize,
    /// How often each is measured.
    pub rounds: u32,
    pub guarantees: Vec<Guarantee>,
    /// Commit intervals. Sizes and workers are measured at 100 ms, or else at the longest.
    pub intervals: Vec<Duration>,
    /// Bytes to which records are filled up, besides those that they have.
    pub sizes: Vec<usize>,
    /// The first is what intervals, sizes and rates are measured with.
    pub workers: Vec<u32>,
    /// Records a second at which the way of a record is timed.
    pub rates: Vec<u64>,
    /// How long each rate is kept up.
    pub latency_for: Duration,
    /// Use the servers that `KAFKA_BROKERS` and `DATABASE_URL` name.
    pub external: bool,
}

/// What a run is measured at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Setting {
    pub interval: Duration,
    /// Bytes to which records were filled up; none: as they were given.
    pub size: Option<usize>,
    pub workers: u32,
}

/// Measures. Blocks, for minutes. `say` is given short sentences for the user.
///
/// # Errors
/// What keeps it from being done: no input, servers that cannot be had, a job that does not run, an interrupt.
pub fn run(
    text: &str,
    topology: Topology,
    options: &Options,
    interrupted: &AtomicBool,
    say: &dyn Fn(&str),
) -> Result<Report, Failure> {
    let started = Instant::now();
    let plan = Plan::new(Arc::new(topology));
    let stage = stage(&plan, options.only.as_deref())?;
    let input = Input::gather(&plan, options.origin.as_ref())?;
    let cluster = scratch::cluster(options.external, say)?;
    let world = World::new(&cluster, text, Arc::clone(&plan.topology), "bench", 0, options.external)?;
    let bench = Bench { world: &world, plan: &plan, stage, options, input: &input, interrupted };
    let result = bench.run(say);
    world.clean();
    let (throughput, latency) = result?;
    Ok(Report {
        file: plan.topology.file.clone(),
        stage: stage.name.clone(),
        kind: stage_words(stage),
        input: input.from.clone(),
        rounds: options.rounds,
        base: bench.base(),
        throughput,
        latency,
        machine: machine::facts(),
        servers: cluster.description.clone(),
        elapsed: started.elapsed(),
    })
}

fn stage<'p>(plan: &'p Plan, only: Option<&str>) -> Result<&'p Stage, Failure> {
    match only {
        // The Kafka stage is the first.
        None => plan.stages.first().ok_or_else(|| Failure::refused(format!("{}: no stage", plan.topology.file))),
        Some(_) => Ok(crate::runtime::app::chosen(plan, only)?[0]),
    }
}

struct Bench<'a> {
    world: &'a World,
    plan: &'a Plan,
    stage: &'a Stage,
    options: &'a Options,
    input: &'a Input,
    interrupted: &'a AtomicBool,
}

/// Source topics that hold an input.
struct Fed {
    /// Run whose topics a Postgres stage reads.
    outputs: Option<String>,
    prefix: String,
    records: u64,
    /// Mean bytes of a value.
    bytes: u64,
}

impl Bench<'_> {
    fn run(&self, say: &dyn Fn(&str)) -> Result<(Vec<Throughput>, Vec<Latency>), Failure> {
        let settings = self.settings();
        let mut fed: BTreeMap<Option<usize>, Fed> = BTreeMap::new();
        let sizes: Vec<Option<usize>> =
            [None].into_iter().chain(self.options.sizes.iter().copied().map(Some)).collect();
        for size in sizes {
            say(&match size {
                None => format!("sending {} records …", self.options.records),
                Some(size) => format!("sending records of {size} bytes …"),
            });
            fed.insert(size, self.feed(size)?);
        }
        say("measuring …");
        let guarantees = &self.options.guarantees;
        let rates = self.latency_settings();
        let steps = self.options.rounds as usize * settings.len() * guarantees.len() + rates.len();
        let style = ProgressStyle::with_template("{msg:44} {wide_bar} {pos}/{len}").expect("a template of ours");
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr()).with_style(style);
        let mut found: BTreeMap<(Setting, usize), Vec<Sample>> = BTreeMap::new();
        for round in 0..self.options.rounds as usize {
            for setting in &settings {
                // In turn, so that no guarantee always comes first.
                for turn in 0..guarantees.len() {
                    let at = (turn + round) % guarantees.len();
                    let interval = duration_text(setting.interval);
                    bar.set_message(format!("{} at {interval}", guarantees[at].as_str()));
                    let sample = self.throughput(guarantees[at], setting, &fed[&setting.size])?;
                    found.entry((*setting, at)).or_default().push(sample);
                    bar.inc(1);
                }
            }
        }
        let throughput = settings.iter().flat_map(|setting| {
            let of = |(at, guarantee): (usize, &Guarantee)| Throughput {
                setting: *setting,
                guarantee: *guarantee,
                record_bytes: fed[&setting.size].bytes,
                samples: found[&(*setting, at)].clone(),
            };
            guarantees.iter().enumerate().map(of).collect::<Vec<_>>()
        });
        let throughput = throughput.collect();
        let mut latency = Vec::new();
        for (rate, interval, guarantee) in rates {
            bar.set_message(format!("{} at {rate} records/s", guarantee.as_str()));
            latency.extend(self.latency(rate, interval, guarantee)?);
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok((throughput, latency))
    }

    fn base(&self) -> Setting {
        let usual = Duration::from_millis(100);
        let intervals = &self.options.intervals;
        let longest = intervals.iter().max().copied().unwrap_or(usual);
        let interval = if intervals.contains(&usual) { usual } else { longest };
        Setting { interval, size: None, workers: self.options.workers.first().copied().unwrap_or(1) }
    }

    /// Each once: intervals, then sizes and workers at the base.
    fn settings(&self) -> Vec<Setting> {
        let base = self.base();
        let intervals = self.options.intervals.iter().map(|interval| Setting { interval: *interval, ..base });
        let sizes = self.options.sizes.iter().map(|size| Setting { size: Some(*size), ..base });
        let workers = self.options.workers.iter().map(|workers| Setting { workers: *workers, ..base });
        let mut all: Vec<Setting> = intervals.chain(sizes).chain(workers).collect();
        let mut seen = Vec::new();
        all.retain(|setting| {
            let new = !seen.contains(setting);
            seen.push(*setting);
            new
        });
        all
    }

    fn latency_settings(&self) -> Vec<(u64, Duration, Guarantee)> {
        // A row in a table has no header to tell when its record was sent.
        if !matches!(self.stage.kind, StageKind::Kafka { .. }) || self.plan.writes(self.stage).is_empty() {
            return Vec::new();
        }
        let mut all = Vec::new();
        for rate in &self.options.rates {
            for interval in &self.options.intervals {
                all.extend(self.options.guarantees.iter().map(|guarantee| (*rate, *interval, *guarantee)));
            }
        }
        all
    }

    /// Sends an input, and runs what comes before a Postgres stage over it.
    fn feed(&self, size: Option<usize>) -> Result<Fed, Failure> {
        let prefix = match size {
            None => self.world.prefix().to_owned(),
            Some(size) => format!("{}_{size}b", self.world.prefix()),
        };
        self.world.make_sources(&prefix, PARTITIONS)?;
        let mean = size.unwrap_or(0).max(self.input.mean_bytes());
        let wanted = self.options.records.min(MOST_BYTES / mean.max(1)).max(1);
        let sent = self.input.send(self.world, &prefix, wanted, size, self.interrupted)?;
        let mut fed = Fed { outputs: None, prefix, records: sent.records, bytes: sent.bytes / sent.records.max(1) };
        if let StageKind::Postgres { .. } = self.stage.kind {
            let reads = self.plan.reads(self.stage);
            let before =
                self.plan.stages.iter().find(|stage| self.plan.writes(stage).iter().any(|t| reads.contains(t)));
            if before.is_some() {
                let run =
                    self.world.run(&Variant { sources: Sources::Of(fed.prefix.clone()), ..Variant::default() })?;
                let how = Start { only: Some(&run.name), ..Start::default() };
                self.finish(start(&run, how)?)?;
                fed.outputs = Some(run.name);
            }
        }
        fed.records = self.stage_input(&fed)?;
        Ok(fed)
    }

    /// Records that the stage reads.
    fn stage_input(&self, fed: &Fed) -> Result<u64, Failure> {
        let mut count = 0;
        for topic in self.plan.reads(self.stage) {
            let written = self.plan.stages.iter().any(|stage| self.plan.writes(stage).contains(&topic));
            let prefix = if written { fed.outputs.as_ref().unwrap_or(&fed.prefix) } else { &fed.prefix };
            self.world.topics.read(&format!("{prefix}.{topic}"), |_| count += 1)?;
        }
        Ok(count)
    }

    fn new_run(&self, guarantee: Guarantee, setting: &Setting, sources: Sources, fed: &Fed) -> Result<Run, Failure> {
        let settings = vec![
            ("guarantee", Some(Value::from(guarantee.as_str()))),
            ("commit_interval", Some(duration_text(setting.interval).into())),
            ("workers", Some(i64::from(setting.workers).into())),
            // Batches end by time alone.
            ("batch_records", None),
        ];
        let run = self.world.run(&Variant { outputs: fed.outputs.clone(), sources, settings })?;
        if let StageKind::Postgres { .. } = self.stage.kind {
            self.world.make_tables(&run)?;
        }
        Ok(run)
    }

    fn only<'r>(&'r self, run: &'r Run) -> &'r str {
        if let StageKind::Kafka { .. } = self.stage.kind { &run.name } else { &self.stage.name }
    }

    /// One run over the whole input.
    fn throughput(&self, guarantee: Guarantee, setting: &Setting, fed: &Fed) -> Result<Sample, Failure> {
        let run = self.new_run(guarantee, setting, Sources::Of(fed.prefix.clone()), fed)?;
        let report = self.finish(start(&run, Start { only: Some(self.only(&run)), ..Start::default() })?)?;
        self.world.discard(&run);
        let sample = Sample::of(&report).ok_or_else(|| Failure::refused(format!("a run reported: {report}")))?;
        if sample.records < fed.records {
            let (took, all) = (sample.records, fed.records);
            return Err(Failure::refused(format!("a run took {took} of {all} records ({})", guarantee.as_str())));
        }
        Ok(sample)
    }

    /// Waits for a process to come to its end, and answers what it printed.
    fn finish(&self, mut process: Process) -> Result<serde_json::Value, Failure> {
        let ended = process.ended(LONGEST, self.interrupted)?;
        let ended = ended.ok_or_else(|| {
            Failure::unreachable(format!("a run did not come to its end within {} minutes", LONGEST.as_secs() / 60))
        })?;
        if ended.status.success() {
            return Ok(ended.report);
        }
        Err(Failure::refused(format!("{} does not run ({}):\n{}", self.plan.topology.file, ended.status, ended.tail())))
    }

    /// Times records that come at a rate; none where none of them has an output.
    fn latency(&self, rate: u64, interval: Duration, guarantee: Guarantee) -> Result<Option<Latency>, Failure> {
        let setting = Setting { interval, ..self.base() };
        let nothing = Fed { outputs: None, prefix: String::new(), records: 0, bytes: 0 };
        let run = self.new_run(guarantee, &setting, Sources::Own, &nothing)?;
        self.world.make_sources(&run.name, PARTITIONS)?;
        let process = start(&run, Start { only: Some(self.only(&run)), endless: true, ..Start::default() })?;
        let outputs = run.plan.stages.iter().find(|stage| stage.name == self.only(&run));
        let probe = Probe {
            topics: &self.world.topics,
            inputs: self.world.source_topics().map(|topic| format!("{}.{topic}", run.name)).collect(),
            outputs: outputs.map(|stage| run.plan.writes(stage)).unwrap_or_default(),
            rate,
            warm_up: WARM_UP,
            time: self.options.latency_for,
            ready_within: READY_WITHIN,
            tail: Duration::from_secs(1) + 2 * interval,
        };
        let names: Vec<&String> = self.world.source_topics().collect();
        let records = self.input.endless().map(|record| {
            let topic = names.iter().position(|name| **name == record.topic).unwrap_or(0);
            (topic, record)
        });
        let micros = probe.run(records, self.interrupted)?;
        process.stop();
        self.finish(process)?;
        self.world.discard(&run);
        Ok(Latency::of(rate, interval, guarantee, micros))
    }
}
