//! A job on three brokers: the one that coordinates its group and the one that coordinates its transactions go away.
//!
//! `SEMEL_BROKERS=8` makes them go eight times each.

use std::collections::BTreeMap;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::metadata::Metadata;
use semel::cluster::{Cluster, Options};
use semel::kafka::{At, Isolation};
use semel::record::TopicPartition;

use super::harness::{Job, Load, PATIENCE, Process, Record};
use super::instances::through;
use super::kill::{TABLE, TOPOLOGY, check, order};
use crate::support;

/// Every partition moves within so long after a broker went: a killed one is missed after 5 s, a call of the client that
/// does not come back is left after 16 s, and the transaction that it held ends after 10 s. It is 15 s where two cores are
/// free for three brokers.
const BOUND: Duration = Duration::from_secs(90);
/// Of the development cluster's internal topics.
const PARTITIONS: i32 = 4;

const COPY: &str = r#"
name = "NAME"
transaction_timeout = "4s"
session_timeout = "30s"
[kafka]
[sources.all]
type = "kafka"
topics = ["NAME.in"]
[sinks.out]
type = "kafka"
inputs = ["all"]
topic = "NAME.out"
create = { partitions = 4 }
"#;

struct Brokers {
    client: BaseConsumer,
}

impl Brokers {
    fn of(cluster: &Cluster) -> Brokers {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &cluster.brokers).set("allow.auto.create.topics", "false");
        Brokers { client: config.create().unwrap() }
    }

    fn ask<T>(&self, topic: &str, answer: impl Fn(&Metadata) -> Option<T>) -> T {
        let mut found = None;
        support::eventually(PATIENCE, &format!("the brokers tell of {topic}"), || {
            let metadata = self.client.fetch_metadata(Some(topic), Duration::from_secs(5));
            found = metadata.ok().and_then(|metadata| answer(&metadata));
            found.is_some()
        });
        found.unwrap()
    }

    /// The broker that coordinates what has this name: it leads the partition that the name falls on.
    fn coordinator(&self, topic: &str, name: &str) -> usize {
        let hash = name.chars().fold(0_i32, |hash, c| hash.wrapping_mul(31).wrapping_add(c as i32));
        let partition = hash.checked_abs().unwrap_or(0) % PARTITIONS;
        let leader = self.ask(topic, |metadata| {
            let partitions = metadata.topics().first()?.partitions();
            partitions.iter().find(|p| p.id() == partition).map(|p| p.leader()).filter(|leader| *leader > 0)
        });
        leader as usize
    }

    /// Waits until every replica of these topics is in sync, all three of them.
    fn in_sync(&self, topics: &[String]) {
        for topic in topics {
            self.ask(topic, |metadata| {
                let partitions = metadata.topics().first()?.partitions();
                (!partitions.is_empty() && partitions.iter().all(|p| p.isr().len() == 3)).then_some(())
            });
        }
    }
}

fn three_brokers() -> (MutexGuard<'static, ()>, Cluster) {
    let one = support::one_heavy_test();
    let options = Options { use_given: false, brokers: Some(3), ..support::options() };
    let cluster = Cluster::private(&options, &|text| eprintln!("{text}")).unwrap_or_else(|failure| panic!("{failure}"));
    (one, cluster)
}

#[test]
fn a_job_moves_on_when_its_coordinators_go() {
    if !support::online("a job on three brokers") {
        return;
    }
    let (_one, cluster) = three_brokers();
    let status = cluster.status().unwrap().unwrap();
    assert_eq!(status.kafka.iter().filter(|broker| broker.up).count(), 3, "{status:?}");
    assert_eq!(cluster.brokers.split(',').count(), 3);

    let job = Job::new(&cluster, "moves", 4);
    job.sql(TABLE);
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", "instance = \"blue\"\n[kafka]\n"));
    // Whichever broker is asked next knows a topic that was made.
    for n in 0..20 {
        let topic = job.topic(&format!("made-{n}"));
        job.admin.create_topic(&topic, 1, -1, &BTreeMap::new()).unwrap();
        assert_eq!(job.admin.topic(&topic).unwrap().map(|info| info.replicas), Some(3));
    }
    let brokers = Brokers::of(&cluster);
    let (offsets, transactions) = ("__consumer_offsets".to_owned(), "__transaction_state".to_owned());
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 200, 4, order);
        let mut process = job.start(&file);
        let partitions: Vec<_> = (0..4).map(|p| TopicPartition::new(job.topic("in"), p)).collect();
        let latest: Vec<_> = partitions.iter().map(|p| (p.clone(), At::Latest)).collect();
        // What was written by now is processed, in every partition. A partition whose leader went has none for a while.
        let all_move = |process: &Process, what: &str| {
            let since = Instant::now();
            let mut ends = Vec::new();
            support::eventually(BOUND, "every partition has a leader", || {
                let found = job.admin.offsets(&latest, Isolation::ReadCommitted).unwrap_or_default();
                ends = found.into_iter().filter_map(|(_, end)| end).collect();
                ends.len() == partitions.len()
            });
            let moved = || {
                let committed = job.admin.committed(&job.name, &partitions, false).unwrap_or_default();
                let positions: Vec<_> = committed.into_iter().map(|(_, at)| at.ok().flatten().map(|at| at.0)).collect();
                let all =
                    positions.len() == ends.len() && positions.iter().zip(&ends).all(|(at, end)| *at > Some(end.0));
                (all, positions)
            };
            if !support::within(BOUND, || moved().0) {
                let now = job.admin.offsets(&latest, Isolation::ReadCommitted);
                panic!("{what}: {:?} of {ends:?}, the input ends at {now:?}\n{}", moved().1, process.log());
            }
            since.elapsed()
        };
        all_move(&process, "the job works");
        let mine = [job.topic("in"), job.topic("out"), job.topic("job"), offsets.clone(), transactions.clone()];
        let names = [(&offsets, job.name.clone()), (&transactions, format!("{0}.{0}.blue.0.0", job.name))];
        let rounds = std::env::var("SEMEL_BROKERS").map_or(1, |n| n.parse().expect("SEMEL_BROKERS is a number"));
        for (round, (topic, name)) in names.iter().cycle().enumerate().take(2 * rounds) {
            let hard = round % 4 == 1 || round % 4 == 2;
            brokers.in_sync(&mine);
            let broker = brokers.coordinator(topic, name);
            if hard {
                cluster.kill_broker(broker).unwrap()
            } else {
                cluster.stop_broker(broker).unwrap()
            }
            let moved = all_move(&process, "every partition moves while the broker is away");
            let now = brokers.coordinator(topic, name);
            assert_ne!(now, broker, "the coordinator has not moved");
            cluster.start_broker(broker).unwrap();
            println!("broker {broker} of {topic} went (hard: {hard}), {now} took over: all moved after {moved:?}");
            all_move(&process, "every partition moves when the broker is back");
            assert!(process.is_running(), "{}", process.log());
        }
        let count = load.stop();
        support::eventually(BOUND, "all is through", || through(&job));
        process.stop();
        count
    });
    check(&job, count);
}

/// Its partition has no other replica. A batch fails meanwhile, and all positions are read again: the one that cannot be
/// read is left for later.
#[test]
fn a_partition_without_a_leader_holds_up_no_other_after_an_abort() {
    if !support::online("a partition without a leader") {
        return;
    }
    let (_one, cluster) = three_brokers();
    let job = Job::new(&cluster, "leaderless", 3);
    let brokers = Brokers::of(&cluster);
    let input = job.topic("in");
    let leaders = brokers.ask(&input, |metadata| {
        let leader = |p: &rdkafka::metadata::MetadataPartition| (p.id(), p.leader());
        let leaders: BTreeMap<i32, i32> = metadata.topics().first()?.partitions().iter().map(leader).collect();
        (leaders.len() == 3 && leaders.values().all(|leader| *leader > 0)).then_some(leaders)
    });
    let gone = leaders[&0] as usize;
    let rest: Vec<i32> = (0..3).filter(|p| leaders[p] != leaders[&0]).collect();
    assert!(!rest.is_empty(), "{leaders:?}");
    let send = |partitions: &[i32]| {
        let record = |partition: &i32| Record { partition: *partition, value: Some(b"{}"), ..Record::default() };
        job.produce("in", partitions.iter().map(record));
    };
    let positions = || -> Vec<i64> {
        let partitions: Vec<_> = (0..3).map(|p| TopicPartition::new(input.as_str(), p)).collect();
        let committed = job.admin.committed(&job.name, &partitions, false).unwrap_or_default();
        committed.into_iter().map(|(_, at)| at.ok().flatten().map_or(-1, |at| at.0)).collect()
    };
    send(&[0, 1, 2]);
    let process = job.start(&job.file(COPY));
    support::eventually(BOUND, "the job works", || positions() == [1, 1, 1]);
    brokers.in_sync(&[job.topic("out"), "__consumer_offsets".to_owned(), "__transaction_state".to_owned()]);
    cluster.stop_broker(gone).unwrap();
    // Asleep with an open transaction for longer than one may be open.
    send(&rest);
    support::eventually(BOUND, "the others move without it", || rest.iter().all(|p| positions()[*p as usize] >= 2));
    let aborts = || process.log().matches("going back to the committed positions").count();
    let before = aborts();
    support::eventually(BOUND, "a batch fails", || {
        send(&rest);
        process.signal(Signal::SIGSTOP);
        support::pass(Duration::from_secs(6));
        process.signal(Signal::SIGCONT);
        aborts() > before
    });
    let ends = job.admin.offsets(
        &rest.iter().map(|p| (TopicPartition::new(input.as_str(), *p), At::Latest)).collect::<Vec<_>>(),
        Isolation::ReadCommitted,
    );
    let ends: Vec<i64> = ends.unwrap().into_iter().map(|(_, end)| end.unwrap().0).collect();
    send(&rest);
    support::eventually(BOUND, "the others move after the abort", || {
        rest.iter().zip(&ends).all(|(p, end)| positions()[*p as usize] > *end)
    });
    cluster.start_broker(gone).unwrap();
    let ends = || job.ends("in", Isolation::ReadCommitted);
    support::eventually(BOUND, "it is there again", || job.admin.topic(&input).is_ok_and(|info| info.is_some()));
    send(&[0]);
    support::eventually(BOUND, "all is through", || positions() == ends());
    process.stop();
    assert_eq!(job.read("out").len() as i64, ends().iter().sum::<i64>());
}
