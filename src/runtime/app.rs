//! A job: the stages of a plan in one process, from the checks at start to the last commit.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::clock::Clock;
use crate::commit::metadata::TopicIds;
use crate::crash::{self, Point};
use crate::error::{Exit, Failure};
use crate::kafka::{Admin, Connection, Consumer, ConsumerOptions, Error, GroupHandle, TopicInfo};
use crate::observe::progress::Display;
use crate::observe::status::StageStatus;
use crate::operator::{Environment, Pipeline};
use crate::runtime::committer::{Committer, CommitterOptions, retire};
use crate::runtime::drain::Drain;
use crate::runtime::identity::{Identity, default_state_dir};
use crate::runtime::job_topic::{JobTopic, Memory};
use crate::runtime::kafka_task::{KafkaTask, State};
use crate::runtime::let_in;
use crate::runtime::link::link;
use crate::runtime::moved::Moved;
use crate::runtime::past;
use crate::runtime::positions::Positions;
use crate::runtime::postgres_task::PostgresTask;
use crate::runtime::preflight::{self, StageTopics};
use crate::runtime::purge::Purge;
use crate::runtime::subscriptions::{Subscription, Subscriptions};
use crate::runtime::task::Task;
use crate::runtime::worker::{CoPartitioned, RetryTopic, Worker, WorkerOptions};
use crate::sink::postgres::{self, Checked, StageName, Store};
use crate::store::Disk;
use crate::topology::plan::{Plan, PlannedStore, Stage, StageKind};
use crate::topology::spec::{Membership, Stores, Topology};

const ASK: Duration = Duration::from_secs(10);
const REACH: Duration = Duration::from_secs(8);
/// A client call that takes longer than this does not come back.
const CALL_MAX: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(20);
/// Of a rebalance that waits for nobody but members that are gone.
const OUTSIDE_MIN: Duration = Duration::from_secs(30);
/// librdkafka's default.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(300);

/// The user's `max.poll.interval.ms`, else the default; the client wants it to be no shorter than a session.
fn max_poll_interval(topology: &Topology) -> Duration {
    let set = topology.kafka.properties.get("max.poll.interval.ms").and_then(|ms| ms.trim().parse().ok());
    set.map_or(MAX_POLL_INTERVAL.max(topology.session_timeout), Duration::from_millis)
}

/// How a job is run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Stop once everything that was in the sources at start is through every stage.
    pub drain: bool,
    /// Only the stage of this name.
    pub only: Option<String>,
    /// Set from outside to stop the job in good order.
    pub stop: Arc<AtomicBool>,
    /// Show progress on stderr.
    pub progress: bool,
}

/// What a job did.
#[derive(Debug)]
pub struct Report {
    pub stages: Vec<Arc<StageStatus>>,
    pub elapsed: Duration,
}

/// Runs the job until it is drained, stopped or cannot go on. Blocks. Errors are refusals before any record was read, or
/// what stopped the job; either way nothing that was read is lost.
pub fn run(plan: &Plan, options: &RunOptions) -> Result<Report, Failure> {
    let topology = &plan.topology;
    let stages = chosen(plan, options.only.as_deref())?;
    unset_variables(topology, &stages)?;
    let (connection, admin) = connect(topology)?;
    let admin = Arc::new(admin);
    // The database is looked at before topics are made: what is refused leaves nothing behind.
    let mut checked = Vec::new();
    for stage in &stages {
        checked.push(match &stage.kind {
            StageKind::Postgres { sink, .. } => {
                let checked = postgres::preflight(topology, *sink, &stage.group)?;
                checked.warnings.iter().for_each(|warning| tracing::warn!(stage = stage.name, "{warning}"));
                Some(checked)
            }
            StageKind::Kafka { .. } => None,
        });
    }
    let topics = preflight::topics(plan, &stages, &admin)?;
    for stage in &stages {
        let short = preflight::ledger_problems(plan, stage, &admin)?;
        short.iter().for_each(|problem| tracing::warn!(stage = stage.name, "{problem}"));
    }
    let job_topic = Arc::new(JobTopic::open(plan, &connection, &admin)?);
    let mut memory = job_topic.read(ASK)?;
    past::check(plan, &stages, &topics, &admin, &job_topic, &mut memory)?;
    let stores = stages.iter().zip(&topics).zip(&checked);
    let stores = stores.map(|((stage, topics), checked)| store(plan, stage, topics, checked.as_ref()?, "drain"));
    let drain = match options.drain {
        true => Some(Drain::new(plan, &stages, &topics, stores.collect(), &admin)?),
        false => None,
    };

    let started = Instant::now();
    let stop = Arc::clone(&options.stop);
    let job = Job { plan, connection, admin: Arc::clone(&admin), topic: Arc::clone(&job_topic), memory: &memory, stop };
    let flat: Vec<bool> = checked.iter().map(forgets_by_itself).collect();
    let mut running = Vec::new();
    for ((stage, topics), checked) in stages.iter().zip(&topics).zip(checked) {
        match job.start(stage, topics, checked) {
            Ok(stage) => running.push(stage),
            Err(failure) => {
                options.stop.store(true, Ordering::SeqCst);
                running.into_iter().for_each(|stage: Running| drop(stage.join()));
                return Err(failure);
            }
        }
    }
    let statuses: Vec<_> = running.iter().map(|r| Arc::clone(&r.status)).collect();
    let mut display = Display::new(&statuses, options.progress);
    let mut looked_after = Subscriptions::new(&topology.file, subscriptions(plan, &stages, &topics, &running));
    let mut moved: Vec<Moved> = stages
        .iter()
        .zip(&topics)
        .zip(&statuses)
        .zip(flat)
        .filter(|(_, flat)| *flat)
        .map(|(((stage, topics), status), _)| {
            Moved::new(&stage.group, topics.partitions().collect(), Arc::clone(status))
        })
        .collect();
    let mut purges: Vec<Purge> = stages
        .iter()
        .zip(&topics)
        .map(|(stage, topics)| {
            let own = plan.repartitions(stage);
            let partitions = topics.partitions().filter(|p| own.iter().any(|topic| *p.topic == **topic));
            Purge::new(&stage.group, partitions.collect())
        })
        .filter(|purge| !purge.is_empty())
        .collect();
    let watched = watch(&running, drain, &mut looked_after, &options.stop, &admin, &mut || {
        moved.iter_mut().for_each(|moved| moved.look(&admin));
        purges.iter_mut().for_each(|purge| purge.look(&admin));
        display.tick(|| preflight::lags(&admin, &stages, &topics));
    });
    options.stop.store(true, Ordering::SeqCst);
    let mut result = watched;
    for stage in running {
        result = result.and(stage.join());
    }
    display.finish();
    job_topic.flush();
    result.map(|()| Report { stages: statuses, elapsed: started.elapsed() })
}

/// Reaches the topology's broker; exit 3 where nobody answers within 10 s.
pub fn connect(topology: &Topology) -> Result<(Connection, Admin), Failure> {
    let connection = Connection {
        properties: topology.kafka.properties.clone(),
        ..Connection::new(&topology.kafka.brokers, &topology.name)
    };
    let admin = Admin::new(&connection, ASK).map_err(|e| Failure::refused(e.to_string()))?;
    admin.ping(REACH).map_err(|e| Failure::unreachable(e.to_string()))?;
    Ok((connection, admin))
}

/// The stages that `--only` leaves.
pub fn chosen<'a>(plan: &'a Plan, only: Option<&str>) -> Result<Vec<&'a Stage>, Failure> {
    let Some(only) = only else { return Ok(plan.stages.iter().collect()) };
    let names: Vec<&str> = plan.stages.iter().map(|s| s.name.as_str()).collect();
    let stage = plan.stages.iter().find(|stage| stage.name == only);
    stage.map(|stage| vec![stage]).ok_or_else(|| {
        Failure::refused(format!(
            "--only {only}: no stage has that name; {} has {}",
            plan.topology.file,
            names.join(", ")
        ))
    })
}

/// A flat ledger takes an event that it has forgotten for a new one.
fn forgets_by_itself(checked: &Option<Checked>) -> bool {
    checked.as_ref().and_then(|checked| checked.ledger.as_ref()).is_some_and(|ledger| !ledger.partitioned)
}

fn unset_variables(topology: &Topology, stages: &[&Stage]) -> Result<(), Failure> {
    let used = |node: &Option<String>| match node {
        None => true,
        Some(name) => stages.iter().any(|stage| stage.nodes().iter().any(|id| topology.nodes[id.0].name == *name)),
    };
    let unset: Vec<String> = topology
        .unset
        .iter()
        .filter(|variable| used(&variable.node))
        .map(|v| format!("{}:{}:{}: the environment variable {} is not set", topology.file, v.line, v.column, v.name))
        .collect();
    if unset.is_empty() { Ok(()) } else { Err(Failure::refused(unset.join("\n"))) }
}

fn subscriptions(plan: &Plan, stages: &[&Stage], topics: &[StageTopics], running: &[Running]) -> Vec<Subscription> {
    let mut subscriptions = Vec::new();
    for ((stage, topics), running) in stages.iter().zip(topics).zip(running) {
        let ids = topics.topic_ids.clone();
        let topics: Vec<(String, i32)> =
            topics.sources.iter().map(|(topic, _, info)| (topic.to_string(), info.partitions)).collect();
        subscriptions.push(Subscription {
            group: stage.group.clone(),
            retry: Some(plan.retry(stage)).filter(|retry| topics.iter().all(|(topic, _)| topic != retry)),
            topics,
            ids,
            members: running.members.clone(),
            broker_assigns: plan.topology.kafka.broker_assigns(),
            covered: false,
            missed: 0,
        });
    }
    subscriptions
}

/// Waits until the job is drained or told to stop, or a worker ends by itself.
fn watch(
    running: &[Running],
    mut drain: Option<Drain>,
    subscriptions: &mut Subscriptions,
    stop: &AtomicBool,
    admin: &Admin,
    tick: &mut dyn FnMut(),
) -> Result<(), Failure> {
    loop {
        if stop.load(Ordering::Relaxed) || running.iter().any(Running::is_finished) {
            return Ok(());
        }
        if let Some(drain) = &mut drain
            && drain.is_done(admin, |stage| running[stage].status.owed.get())?
        {
            return Ok(());
        }
        tick();
        subscriptions.look(admin)?;
        std::thread::sleep(TICK);
    }
}

struct Job<'a> {
    plan: &'a Plan,
    connection: Connection,
    admin: Arc<Admin>,
    topic: Arc<JobTopic>,
    memory: &'a Memory,
    stop: Arc<AtomicBool>,
}

/// What the workers of a stage have in common.
struct Shared<'a> {
    stage: &'a Stage,
    topics: &'a StageTopics,
    checked: Option<&'a Checked>,
    disk: Option<Disk>,
    status: &'a Arc<StageStatus>,
}

struct Running {
    status: Arc<StageStatus>,
    workers: Vec<JoinHandle<Result<(), Failure>>>,
    committers: Vec<JoinHandle<()>>,
    members: Vec<GroupHandle>,
    /// Held until every thread is gone: no other process may take the identity before.
    _identity: Identity,
}

impl Running {
    fn is_finished(&self) -> bool {
        self.workers.iter().any(JoinHandle::is_finished) || self.committers.iter().any(JoinHandle::is_finished)
    }

    fn join(self) -> Result<(), Failure> {
        let mut result = Ok(());
        for worker in self.workers {
            let ended = worker.join().unwrap_or_else(|payload| {
                // A disk that fails ends its worker wherever that stands.
                let failure = payload.downcast::<Failure>().map(|failure| *failure);
                let panicked = |_| Failure::stopped("a worker panicked; nothing of its open batch was committed");
                Err(failure.unwrap_or_else(panicked))
            });
            result = result.and(ended);
        }
        let deadline = Instant::now() + CALL_MAX;
        for committer in self.committers {
            while !committer.is_finished() && Instant::now() < deadline {
                std::thread::sleep(TICK);
            }
            if !committer.is_finished() {
                // A call that ignores its timeout (librdkafka #5456). Nothing that is open will be committed.
                tracing::warn!(stage = self.status.name, "a transaction call does not return; it is left behind");
                continue;
            }
            let ended = committer.join();
            result = result.and(
                ended.map_err(|_| Failure::stopped("a committer panicked; its open transaction was not committed")),
            );
        }
        result
    }
}

impl Job<'_> {
    fn start(&self, stage: &Stage, topics: &StageTopics, checked: Option<Checked>) -> Result<Running, Failure> {
        let topology = &self.plan.topology;
        let state_dir = topology.state_dir.clone().map_or_else(default_state_dir, Ok)?;
        let identity =
            Identity::take(&state_dir, &topology.name, &stage.name, topology.instance.as_deref(), topology.workers)?;
        let status = Arc::new(StageStatus::new(&stage.name));
        let base = format!("{}.{}.{}", topology.name, stage.name, identity.instance);
        let copies = self.plan.keeps_positions(stage);
        let committer_options = |worker: u32| CommitterOptions {
            connection: self.named(&format!("{base}.{worker}")),
            guarantee: topology.guarantee,
            identity: format!("{base}.{worker}"),
            transaction_timeout: topology.transaction_timeout,
            queue_bytes: topology.memory / 3,
            targets: topics.targets.clone(),
            topic_ids: if copies { TopicIds::of_copies() } else { TopicIds::default() },
        };
        // Ids of a time when there were more workers may have left a transaction open.
        for former in topology.workers..identity.workers_ever {
            retire(&committer_options(former))?;
        }
        let on_disk = topology.stores == Stores::Disk && !topics.changelogs.is_empty();
        let disk = on_disk.then(|| Disk::open(&identity.folder.join("stores"))).transpose()?;
        let shared = Shared { stage, topics, checked: checked.as_ref(), disk, status: &status };
        let (mut ready, mut members) = (Vec::new(), Vec::new());
        for worker in 0..topology.workers {
            let (worker, committer) = self.worker(&shared, &base, committer_options(worker))?;
            members.push(worker.member());
            ready.push((worker, committer));
        }
        crash::at(Point::AtStart);
        let mut running = Running { status, workers: Vec::new(), committers: Vec::new(), members, _identity: identity };
        for (number, (worker, committer)) in ready.into_iter().enumerate() {
            let name = format!("{}-{number}", stage.name);
            running.committers.push(spawn(&format!("{name}-commit"), move || committer.run())?);
            running.workers.push(spawn(&name, move || worker.run())?);
        }
        Ok(running)
    }

    fn worker(
        &self,
        shared: &Shared<'_>,
        base: &str,
        options: CommitterOptions,
    ) -> Result<(Worker, Committer), Failure> {
        let topology = &self.plan.topology;
        let Shared { stage, topics, checked, status, .. } = *shared;
        let (identity, topic_ids) = (options.identity.clone(), options.topic_ids.clone());
        let (worker_end, committer_end) = link();
        let store = checked.and_then(|checked| store(self.plan, stage, topics, checked, &identity)).map(Arc::new);
        let task = self.task(shared, store.clone(), &identity)?;
        let static_member = topology.membership == Membership::Static;
        let co_partitioned = self.plan.co_partitioned(stage);
        let consumer_options = ConsumerOptions {
            instance_id: static_member.then_some(identity.as_str()),
            session_timeout: topology.session_timeout,
            max_poll_interval: max_poll_interval(topology),
            // Where records wait for others, they share it.
            queue_bytes: if co_partitioned.is_empty() { topology.memory / 3 } else { topology.memory / 6 },
            end_of_partition: !co_partitioned.is_empty(),
            co_located: !co_partitioned.is_empty(),
            ..ConsumerOptions::new(&stage.group)
        };
        let refused = |e: Error| Failure::refused(e.to_string());
        let names: Vec<&str> = topics.sources.iter().map(|(topic, _, _)| &**topic).collect();
        let connection = self.named(&identity);
        let (consumer, committer);
        if static_member && topology.kafka.broker_assigns() {
            // Before the transactional ids are taken: it is not the twin that runs which has to give way.
            consumer = let_in::join(&connection, &consumer_options, &names, &self.admin, &self.stop)?;
            committer = Committer::new(options, committer_end, consumer.group(), Arc::clone(status))?;
        } else {
            consumer = Consumer::new(&connection, &consumer_options).map_err(refused)?;
            committer = Committer::new(options, committer_end, consumer.group(), Arc::clone(status))?;
            consumer.subscribe(&names).map_err(refused)?;
        }
        let first = |topic: &str| self.memory.first_partitions(&stage.name, topic);
        let positions = Positions {
            file: topology.file.clone(),
            stage: stage.name.clone(),
            first_partitions: names.iter().filter_map(|topic| Some(((*topic).to_owned(), first(topic)?))).collect(),
            version_by_offset: past::version_by_offset(self.plan, stage),
            state_partitions: self.state_partitions(stage, topics),
            job: Arc::clone(&self.topic),
            topic_ids,
            admin: Arc::clone(&self.admin),
            group: stage.group.clone(),
            starts: topics.sources.iter().map(|(topic, start, _)| (topic.to_string(), *start)).collect(),
            store,
        };
        let worker_options = WorkerOptions {
            name: identity.strip_prefix(base).map_or_else(|| identity.clone(), |n| format!("{}{n}", stage.name)),
            guarantee: topology.guarantee,
            commit_interval: topology.commit_interval,
            batch_records: topology.batch_records.map_or(u64::MAX, Into::into),
            channel_bytes: (topology.memory / 3) as usize,
            revoke_timeout: topology.transaction_timeout.min(max_poll_interval(topology) / 2),
            session_timeout: topology.session_timeout,
            // Where the broker assigns, a static member that is made anew is not let in by its former self.
            outside_max: (!topology.kafka.broker_assigns()).then(|| OUTSIDE_MIN + 2 * topology.session_timeout),
            shutdown_timeout: topology.shutdown_timeout,
            retry: RetryTopic { topic: self.plan.retry(stage), sources: self.plan.reads(stage) },
            co_partitioned: CoPartitioned {
                topics: co_partitioned,
                max_task_idle: topology.max_task_idle,
                bytes: (topology.memory / 6) as usize,
            },
        };
        let worker = Worker::new(
            worker_options,
            consumer,
            task,
            positions,
            worker_end,
            Arc::clone(status),
            Arc::clone(&self.stop),
        );
        Ok((worker, committer))
    }

    /// By topic: how many partitions the state of its keys has.
    fn state_partitions(&self, stage: &Stage, topics: &StageTopics) -> HashMap<String, i32> {
        let stores = self.plan.stores(stage);
        let of = |(store, (_, info)): (&PlannedStore, &(String, TopicInfo))| {
            store.topics().map(|topic| (topic.clone(), info.partitions)).collect::<Vec<_>>()
        };
        stores.iter().zip(&topics.changelogs).flat_map(of).collect()
    }

    fn task(&self, shared: &Shared<'_>, store: Option<Arc<Store>>, identity: &str) -> Result<Box<dyn Task>, Failure> {
        let topology = &self.plan.topology;
        let Shared { stage, topics, checked, disk, status } = shared;
        match &stage.kind {
            StageKind::Kafka { sources, .. } => {
                let environment = Environment {
                    targets: topics.targets.clone(),
                    topic_ids: topics.topic_ids.clone(),
                    dead_letters: topics.dead_letters,
                    clock: Clock::System,
                };
                let mut by_topic = HashMap::new();
                for id in sources {
                    by_topic.extend(topology.topics(*id).into_iter().map(|topic| (topic, *id)));
                }
                let names = topology.nodes.iter().map(|node| node.declared_name().to_owned()).collect();
                let pipeline = Pipeline::new(self.plan, environment)?;
                let stores = self.plan.stores(stage).into_iter().zip(topics.changelogs.iter().map(|(_, info)| info.id));
                let connection = self.named(&format!("{identity}.restore"));
                let state = State::new(
                    connection,
                    Arc::clone(&self.admin),
                    disk.clone(),
                    stores.collect(),
                    self.plan.retry(stage),
                );
                Ok(Box::new(KafkaTask { pipeline, sources: by_topic, names, status: Arc::clone(status), state }))
            }
            StageKind::Postgres { .. } => {
                let checked = checked.expect("a Postgres stage was looked at");
                Ok(Box::new(PostgresTask::new(self.plan, stage, topics, checked, store, Arc::clone(status))))
            }
        }
    }

    fn named(&self, client_id: &str) -> Connection {
        Connection { client_id: client_id.to_owned(), ..self.connection.clone() }
    }
}

fn spawn<T: Send + 'static>(name: &str, run: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>, Failure> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(|e| Failure::new(Exit::Refused, format!("cannot start a thread: {e}")))
}

/// The stage's positions in the database, where they are kept there.
fn store(plan: &Plan, stage: &Stage, topics: &StageTopics, checked: &Checked, owner: &str) -> Option<Store> {
    let sink = plan.postgres_sink(stage).filter(|sink| sink.keeps_positions())?;
    let name = StageName::new(&stage.group, topics.topic_ids.clone());
    Some(Store::new(name, checked.address.clone(), sink.prepared, owner))
}
