//! The main job from nothing: servers, topics, table, orders, `topologies/orders.toml` to its end, and a comparison
//! with an independent fold.

mod compare;
mod fold;
pub(crate) mod orders;
mod report;
mod table;
pub(crate) mod topics;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cluster::{Cluster, Options as ClusterOptions, Server};
use crate::error::Failure;
use crate::kafka::Connection;
use crate::observe::progress::grouped;
use crate::runtime::app::{self, RunOptions};
use crate::topology::load;
use crate::topology::plan::Plan;

use compare::{Found, compare};
use fold::{Expected, fold};
use orders::Record;
use table::Table;
use topics::{Sent, Topics};

pub use compare::Comparison;
pub use report::Report;

/// What the quick start runs.
pub const TOPOLOGY: &str = include_str!("../../topologies/orders.toml");
/// Its name in the repository.
const FILE: &str = "topologies/orders.toml";
const SOURCE: &str = "orders";
const OUTPUT: &str = "orders.priced";
const SOURCE_PARTITIONS: i32 = 4;
/// How long private servers may take to end.
const STOP_WITHIN: Duration = Duration::from_secs(20);

/// How it is run.
#[derive(Clone, Debug)]
pub struct Options {
    pub records: usize,
    /// Of the records: the same seed makes the same.
    pub seed: u64,
    /// Leave the servers up.
    pub keep: bool,
}

/// Runs it all. Blocks, for seconds; the first time as long as a download takes. `say` is given short sentences for the
/// user. `None`: `interrupted` was set, and everything was stopped in good order.
pub fn run(options: &Options, interrupted: &AtomicBool, say: &dyn Fn(&str)) -> Result<Option<Report>, Failure> {
    let started = Instant::now();
    let servers = if options.keep {
        Cluster::keep(&ClusterOptions::default(), say)?
    } else {
        Cluster::private(&ClusterOptions::default(), say)?
    };
    for line in &servers.description {
        say(&format!("using {line}"));
    }
    let result = on(&servers, options, interrupted, say);
    let result = result.map(|report| report.map(|report| Report { elapsed: started.elapsed(), ..report }));
    if !options.keep {
        stop(servers, say);
    }
    result
}

/// Lets the servers go and waits until nothing of them runs.
fn stop(servers: Cluster, say: &dyn Fn(&str)) {
    let Ok(Some(status)) = servers.status() else { return };
    say("stopping the servers …");
    drop(servers);
    let deadline = Instant::now() + STOP_WITHIN;
    // The supervisor removes its directory last.
    while status.directory.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn on(
    servers: &Cluster,
    options: &Options,
    interrupted: &AtomicBool,
    say: &dyn Fn(&str),
) -> Result<Option<Report>, Failure> {
    let is_interrupted = || interrupted.load(Ordering::Relaxed);
    // Its own state: a user's job of the same name has another identity.
    let state = tempfile::tempdir().map_err(|e| Failure::refused(format!("no temporary directory to be had: {e}")))?;
    let plan = plan(servers, state.path());
    let topics = Topics::connect(Connection::new(&servers.brokers, "semel-quickstart"))?;
    let table = Table::connect(&servers.database_url)?;
    let groups: Vec<&str> = plan.stages.iter().map(|stage| stage.group.as_str()).collect();
    table.refuse_used()?;
    topics.refuse_used(&[SOURCE, OUTPUT, &plan.dead_letters(), &plan.topology.job_topic()], &groups)?;
    if is_interrupted() {
        return Ok(None);
    }

    topics.make(SOURCE, SOURCE_PARTITIONS)?;
    table.make()?;
    say(&format!("made topic {SOURCE} with {SOURCE_PARTITIONS} partitions, and table orders"));
    let records = orders::generate(options.records, options.seed, now_ms());
    produce(&topics, &records, interrupted, say)?;
    if is_interrupted() {
        return Ok(None);
    }

    say(&format!("running {FILE} until everything is through …"));
    let Some(job) = run_job(&plan, interrupted)? else { return Ok(None) };

    say("comparing with an independent fold …");
    let expected = fold(&records);
    let found = Found {
        outputs: topics.read_outputs(OUTPUT)?,
        rows: table.read()?,
        dead_letters: topics.read_dead_letters(&plan.dead_letters())?,
    };
    let mut standings = topics.standings(&plan.stages[0].group, SOURCE)?;
    for stage in &plan.stages[1..] {
        standings.extend(topics.standings(&stage.group, OUTPUT)?);
    }
    say_what_stays(servers, &plan, say);
    Ok(Some(report(servers, options, &plan, &expected, found, standings, &job)))
}

/// What was made on somebody's own servers is theirs to look at, and to remove.
fn say_what_stays(servers: &Cluster, plan: &Plan, say: &dyn Fn(&str)) {
    for server in servers.given() {
        let stays = match server {
            Server::Kafka => {
                format!("topics {SOURCE}, {OUTPUT}, {} and {}", plan.dead_letters(), plan.topology.job_topic())
            }
            Server::Postgres => "table orders".to_owned(),
        };
        say(&format!("left for you to look at, where {} points: {stays}", server.variable()));
    }
}

fn plan(servers: &Cluster, state_dir: &std::path::Path) -> Plan {
    let variable = |name: &str| match name {
        "KAFKA_BROKERS" => Some(servers.brokers.clone()),
        "DATABASE_URL" => Some(servers.database_url.clone()),
        _ => None,
    };
    let topology = load(TOPOLOGY, FILE, &variable).topology.expect("a test loads the file that is compiled in");
    Plan::new(Arc::new(crate::topology::spec::Topology { state_dir: Some(state_dir.to_owned()), ..topology }))
}

fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.as_millis() as i64
}

fn produce(topics: &Topics, records: &[Record], stop: &AtomicBool, say: &dyn Fn(&str)) -> Result<(), Failure> {
    let style = "producing orders {wide_bar} {human_pos}/{human_len}";
    let style = ProgressStyle::with_template(style).expect("a template of ours");
    // Hidden where stderr is no terminal.
    let bar = ProgressBar::with_draw_target(Some(records.len() as u64), ProgressDrawTarget::stderr()).with_style(style);
    let since = Instant::now();
    let result = topics.produce(SOURCE, records.iter().map(sent), &bar, stop);
    bar.finish_and_clear();
    result?;
    if !stop.load(Ordering::Relaxed) {
        let (count, seconds) = (grouped(records.len() as u64), since.elapsed().as_secs_f64());
        say(&format!("produced {count} records in {seconds:.1} s"));
    }
    Ok(())
}

/// An order stays in its partition.
fn sent(record: &Record) -> Sent<'_> {
    let key = Some(record.key.as_bytes());
    Sent {
        partition: crate::operator::partition(key, 0, SOURCE_PARTITIONS),
        key,
        value: Some(&record.value),
        headers: &[],
        timestamp: Some(record.timestamp),
    }
}

/// Runs the job until everything is through; `None` if it was interrupted before.
fn run_job(plan: &Plan, interrupted: &AtomicBool) -> Result<Option<app::Report>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let ended = AtomicBool::new(false);
    // The job sets its own flag when it ends; what the user wanted stays apart from that.
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                if interrupted.load(Ordering::Relaxed) {
                    stop.store(true, Ordering::SeqCst);
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let options = RunOptions { drain: true, progress: true, stop: Arc::clone(&stop), ..RunOptions::default() };
        let report = app::run(plan, &options);
        ended.store(true, Ordering::Relaxed);
        report
    })?;
    Ok((!interrupted.load(Ordering::Relaxed)).then_some(report))
}

fn report(
    servers: &Cluster,
    options: &Options,
    plan: &Plan,
    expected: &Expected,
    found: Found,
    standings: Vec<topics::Standing>,
    job: &app::Report,
) -> Report {
    let comparison = compare(expected, &found);
    let mut rejected: std::collections::BTreeMap<(String, String), u64> = Default::default();
    for letter in &found.dead_letters {
        *rejected.entry((letter.node.clone(), letter.reason.clone())).or_default() += 1;
    }
    let sum = |count: fn(&crate::observe::status::StageStatus) -> u64| job.stages.iter().map(|s| count(s)).sum();
    Report {
        records: options.records as u64,
        read: standings
            .iter()
            .filter(|s| s.group == plan.stages[0].group)
            .filter_map(|s| s.position)
            .map(|p| p.0 as u64)
            .sum(),
        out: found.outputs.len() as u64,
        cancelled: expected.cancelled,
        repeated: expected.repeated,
        late: expected.late,
        rejected,
        rows: found.rows.len() as u64,
        deleted: found.rows.iter().filter(|row| row.deleted).count() as u64,
        written: sum(|s| s.rows.get()),
        superseded: sum(|s| s.superseded.get()),
        stale: sum(|s| s.stale.get()),
        ties: sum(|s| s.ties.get()),
        transactions: sum(|s| s.commits.get()),
        standings,
        comparison,
        edges: plan.edges.clone(),
        job: job.elapsed,
        elapsed: Duration::ZERO,
        servers: servers.description.clone(),
        kept: options.keep.then(|| (servers.brokers.clone(), servers.database_url.clone())),
    }
}
