//! A job under load that meets one fault after the other, of every kind, and is right at the end.
//!
//! `cargo test` runs a short form. The long one, at 20,000 records a second, with 60 faults and ten quiet seconds before
//! each: `SEMEL_SOAK=60 cargo test --test it soak -- --nocapture`. `SEMEL_SOAK_REPORT=FILE` writes what happened as JSON
//! lines, `SEMEL_SOAK_SEED` repeats an order of faults.

use std::fmt::Write as _;
use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::harness::{Job, Load, PATIENCE, Process};
use super::kafka_proxy::Fault::{CutAfter, CutBefore};
use super::kafka_proxy::{self, KafkaProxy, Kind};
use super::kill::{TABLE, TOPOLOGY, check, order};
use crate::postgres_sink::proxy::{Cut, Proxy};
use crate::support;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    KillInstance,
    KillBoth,
    StopInstance,
    /// Another instance comes and goes.
    Visitor,
    /// Asleep past its session while the other instance takes over.
    Zombie,
    /// Asleep for longer than a transaction may be open, and back within the session.
    Doze,
    RestartBroker,
    KillBroker,
    RestartDatabase,
    KillDatabase,
    /// The server takes no writes, as a standby does.
    ReadOnlyDatabase,
    TerminateBackends,
    /// What a statement timeout does.
    CancelStatements,
    /// Somebody else locks rows in the wrong order.
    Deadlocks,
    /// Rows are held by somebody else for longer than a transaction may be open.
    LockRows,
    Commit(Cut),
    Request(Kind, kafka_proxy::Fault),
    /// An instance is killed, and the request that its successor starts with meets a fault.
    Start(Kind, kafka_proxy::Fault),
}

const LATE: kafka_proxy::Fault = kafka_proxy::Fault::Delay(Duration::from_secs(5));

const FAULTS: [Fault; 30] = [
    Fault::Request(Kind::EndTxn, CutAfter),
    Fault::KillInstance,
    Fault::TerminateBackends,
    Fault::Zombie,
    Fault::Request(Kind::TxnOffsetCommit, CutAfter),
    Fault::RestartBroker,
    Fault::Commit(Cut::After),
    Fault::Visitor,
    Fault::LockRows,
    Fault::StopInstance,
    Fault::KillDatabase,
    Fault::Request(Kind::Produce, CutAfter),
    Fault::Doze,
    Fault::KillBroker,
    Fault::Start(Kind::InitProducerId, CutAfter),
    Fault::Deadlocks,
    Fault::Request(Kind::AddOffsetsToTxn, CutBefore),
    Fault::RestartDatabase,
    Fault::Request(Kind::EndTxn, LATE),
    Fault::KillBoth,
    Fault::Commit(Cut::Before),
    Fault::Start(Kind::OffsetFetch, CutAfter),
    Fault::CancelStatements,
    Fault::Request(Kind::AddPartitionsToTxn, LATE),
    Fault::Request(Kind::Produce, LATE),
    Fault::ReadOnlyDatabase,
    Fault::Request(Kind::Heartbeat, CutBefore),
    Fault::Start(Kind::JoinGroup, LATE),
    Fault::Request(Kind::TxnOffsetCommit, LATE),
    Fault::Request(Kind::Fetch, CutBefore),
];

/// How long a job may take to catch up.
const CATCH_UP: Duration = Duration::from_secs(180);

struct Scale {
    faults: usize,
    rate: u64,
    quiet: Duration,
}

impl Scale {
    fn of_environment() -> Scale {
        let faults = std::env::var("SEMEL_SOAK").ok().map(|n| n.parse().expect("SEMEL_SOAK is a number of faults"));
        match faults {
            Some(faults) => Scale { faults, rate: 20_000, quiet: Duration::from_secs(10) },
            None => Scale { faults: 5, rate: 2_000, quiet: Duration::ZERO },
        }
    }
}

struct World<'a> {
    job: &'a Job,
    file: std::path::PathBuf,
    cluster: &'a semel::cluster::Cluster,
    proxy: &'a KafkaProxy,
    commits: &'a Proxy,
    instances: [Option<Process>; 2],
    rate: u64,
}

impl World<'_> {
    fn group(&self) -> String {
        format!("{}.orders_table", self.job.name)
    }

    /// Both stages are within a second of their inputs' ends.
    fn caught_up(&self) -> bool {
        let near = |group: &str, suffix: &str| {
            let topic = self.job.topic(suffix);
            let Ok(Some(info)) = self.job.admin.topic(&topic) else { return false };
            let asked: Vec<_> = (0..info.partitions)
                .map(|p| (semel::record::TopicPartition::new(topic.as_str(), p), semel::kafka::At::Latest))
                .collect();
            let Ok(ends) = self.job.admin.offsets(&asked, semel::kafka::Isolation::ReadCommitted) else { return false };
            let end: i64 = ends.into_iter().filter_map(|(_, end)| end).map(|end| end.0).sum();
            end > 0 && end - self.job.progress(group, suffix) < self.rate as i64
        };
        near(&self.job.name, "in") && near(&self.group(), "out")
    }

    fn start(&mut self, slot: usize) {
        self.instances[slot] = Some(self.job.start(&self.file));
    }

    fn meet(&mut self, fault: Fault, round: usize) {
        let slot = round % 2;
        match fault {
            Fault::KillInstance => {
                self.instances[slot].take().expect("it runs").kill();
                self.start(slot);
            }
            Fault::StopInstance => {
                self.instances[slot].take().expect("it runs").stop();
                self.start(slot);
            }
            Fault::KillBoth => {
                self.instances.iter_mut().for_each(|instance| instance.take().expect("it runs").kill());
                (0..self.instances.len()).for_each(|slot| self.start(slot));
            }
            Fault::Visitor => {
                let visitor = self.job.start(&self.file);
                support::eventually(CATCH_UP, "the visitor has partitions", || visitor.log().contains("assigned"));
                visitor.stop();
            }
            Fault::Zombie => self.stop_for(slot, Duration::from_secs(9)),
            Fault::Doze => self.stop_for(slot, Duration::from_secs(5)),
            Fault::RestartBroker => self.cluster.restart_kafka().unwrap(),
            Fault::KillBroker => {
                self.cluster.kill_kafka().unwrap();
                self.cluster.start_kafka().unwrap();
            }
            Fault::RestartDatabase => self.cluster.restart_postgres().unwrap(),
            Fault::KillDatabase => {
                self.cluster.kill_postgres().unwrap();
                self.cluster.start_postgres().unwrap();
            }
            Fault::ReadOnlyDatabase => {
                self.job.sql("ALTER ROLE CURRENT_USER SET default_transaction_read_only = on");
                self.job.sql(&others("pg_terminate_backend"));
                support::pass(Duration::from_secs(5));
                self.job.sql("BEGIN READ WRITE; ALTER ROLE CURRENT_USER RESET default_transaction_read_only; COMMIT");
                self.job.sql(&others("pg_terminate_backend"));
            }
            Fault::TerminateBackends => drop(self.job.sql(&others("pg_terminate_backend"))),
            Fault::CancelStatements => {
                let until = Instant::now() + Duration::from_secs(3);
                support::eventually(PATIENCE, "statements are cancelled", || {
                    self.job.sql(&others("pg_cancel_backend"));
                    Instant::now() >= until
                });
            }
            Fault::Deadlocks => {
                let mut deadlocks = 0;
                support::eventually(CATCH_UP, "two deadlocks", || {
                    deadlocks += u32::from(self.job.lock_backwards());
                    deadlocks == 2
                });
            }
            Fault::LockRows => {
                let lock = self.job.lock_rows();
                support::pass(Duration::from_secs(6));
                drop(lock);
            }
            Fault::Commit(cut) => {
                self.commits.next(cut, 1);
                support::eventually(PATIENCE, &format!("a COMMIT is cut, {cut:?}"), || self.commits.done());
            }
            Fault::Start(kind, fault) => {
                self.instances[slot].take().expect("it runs").kill();
                self.proxy.next(kind, fault);
                self.start(slot);
                support::eventually(PATIENCE, &format!("{fault:?} of {kind:?}"), || self.proxy.done());
            }
            Fault::Request(kind, fault) => {
                self.proxy.next(kind, fault);
                support::eventually(PATIENCE, &format!("{fault:?} of {kind:?}"), || self.proxy.done());
            }
        }
    }

    fn stop_for(&self, slot: usize, long: Duration) {
        let sleeper = self.instances[slot].as_ref().expect("it runs");
        sleeper.signal(Signal::SIGSTOP);
        support::pass(long);
        sleeper.signal(Signal::SIGCONT);
    }

    /// Resident memory of each instance, in MB.
    fn memory(&self) -> Vec<u64> {
        let resident = |process: &Process| {
            let status = fs::read_to_string(format!("/proc/{}/status", process.child.id())).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0 kB").to_owned();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) / 1024
        };
        self.instances.iter().flatten().map(resident).collect()
    }
}

/// A function of the server called on every session but this one.
fn others(function: &str) -> String {
    format!(
        "SELECT {function}(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )
}

/// The same order for the same seed: every kind once before any comes again.
fn schedule(seed: u64, faults: usize) -> Vec<Fault> {
    let mut state = seed;
    let mut schedule = Vec::new();
    // `Visitor,KillBroker`: these kinds only, to look closer.
    let kinds = std::env::var("SEMEL_SOAK_KINDS").unwrap_or_default();
    let kinds: Vec<&str> = kinds.split(',').collect();
    while schedule.len() < faults {
        let mut round = FAULTS.to_vec();
        round.retain(|fault| kinds.iter().any(|kind| format!("{fault:?}").starts_with(kind)));
        for i in (1..round.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            round.swap(i, (state >> 33) as usize % (i + 1));
        }
        schedule.extend(round);
    }
    schedule.truncate(faults);
    schedule
}

#[test]
fn a_job_that_meets_every_kind_of_fault_loses_and_doubles_nothing() {
    if !support::online("the soak") {
        return;
    }
    let scale = Scale::of_environment();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let seed = std::env::var("SEMEL_SOAK_SEED").map_or(now, |seed| seed.parse().expect("SEMEL_SOAK_SEED is a number"));
    println!("soak: {} faults at {} records/s, SEMEL_SOAK_SEED={seed}", scale.faults, scale.rate);
    let _one = support::one_heavy_test();
    let proxy = KafkaProxy::start();
    let cluster = support::private_cluster(&[("advertised.listeners", &format!("PLAINTEXT://{}", proxy.address))]);
    proxy.forward_to(&cluster.brokers);
    let mut job = Job::new(&cluster, "soak", 4);
    job.sql(TABLE);
    let commits = Proxy::to(&cluster.database_url, Cut::After, 0);
    job.database_url = commits.url(&cluster.database_url);
    let job = job;
    let text = TOPOLOGY.replace("[kafka]\n", "transaction_timeout = \"4s\"\nsession_timeout = \"6s\"\n[kafka]\n");
    let file = job.file(&text);
    let mut report = String::new();
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, scale.rate, 4, order);
        let mut world = World {
            job: &job,
            file: file.clone(),
            cluster: &cluster,
            proxy: &proxy,
            commits: &commits,
            instances: [None, None],
            rate: scale.rate,
        };
        world.start(0);
        world.start(1);
        support::eventually(CATCH_UP, "the job works", || world.caught_up());
        for (round, fault) in schedule(seed, scale.faults).into_iter().enumerate() {
            support::pass(scale.quiet);
            let met = Instant::now();
            world.meet(fault, round);
            support::eventually(CATCH_UP, &format!("caught up after fault {round}, {fault:?}"), || world.caught_up());
            for instance in world.instances.iter_mut().flatten() {
                assert!(instance.is_running(), "after {fault:?}: {}", instance.log());
            }
            let (seconds, memory) = (met.elapsed().as_secs_f64(), world.memory());
            println!("{:3} {fault:?}: caught up after {seconds:.1} s, {memory:?} MB", round + 1);
            let line = serde_json::json!({
                "fault": round + 1, "kind": format!("{fault:?}"), "caught_up_seconds": (seconds * 10.0).round() / 10.0,
                "resident_mb": memory,
            });
            writeln!(report, "{line}").unwrap();
            assert!(memory.iter().all(|mb| *mb < 400), "memory grows: {memory:?} MB");
        }
        world.instances.into_iter().flatten().for_each(Process::stop);
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
    let end = serde_json::json!({ "records": count, "faults": scale.faults, "seed": seed, "rate": scale.rate,
                                  "lost": 0, "doubled": 0, "table": "equal" });
    writeln!(report, "{end}").unwrap();
    println!("{end}");
    if let Ok(path) = std::env::var("SEMEL_SOAK_REPORT") {
        fs::write(path, report).unwrap();
    }
}
