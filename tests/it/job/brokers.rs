//! A job on three brokers: the one that coordinates its group and the one that coordinates its transactions go away.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::metadata::Metadata;
use semel::cluster::{Cluster, Options};
use semel::kafka::{At, Isolation};
use semel::record::TopicPartition;

use super::harness::{Job, Load, PATIENCE};
use super::instances::through;
use super::kill::{TABLE, TOPOLOGY, check, order};
use crate::support;

/// Every partition moves within so long after a broker went: a killed one is missed after 5 s, a call of the client that
/// does not come back is left after 16 s, and the transaction that it held ends after 10 s. It is 15 s where two cores are
/// free for three brokers.
const BOUND: Duration = Duration::from_secs(90);
/// Of the development cluster's internal topics.
const PARTITIONS: i32 = 4;

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

#[test]
fn a_job_moves_on_when_its_coordinators_go() {
    if !support::online("a job on three brokers") {
        return;
    }
    let options = Options { use_given: false, brokers: Some(3), ..support::options() };
    let cluster = Cluster::private(&options, &|text| eprintln!("{text}")).unwrap_or_else(|failure| panic!("{failure}"));
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
        let all_move = |what: &str| {
            let since = Instant::now();
            let mut ends = Vec::new();
            support::eventually(BOUND, "every partition has a leader", || {
                let found = job.admin.offsets(&latest, Isolation::ReadCommitted).unwrap_or_default();
                ends = found.into_iter().filter_map(|(_, end)| end).collect();
                ends.len() == partitions.len()
            });
            support::eventually(BOUND, what, || {
                let committed = job.admin.committed(&job.name, &partitions, false).unwrap_or_default();
                let positions: Vec<_> = committed.into_iter().filter_map(|(_, at)| at.ok().flatten()).collect();
                positions.len() == ends.len() && positions.iter().zip(&ends).all(|(at, end)| at > end)
            });
            since.elapsed()
        };
        all_move("the job works");
        let mine = [job.topic("in"), job.topic("out"), job.topic("job"), offsets.clone(), transactions.clone()];
        let names = [(&offsets, job.name.clone(), false), (&transactions, format!("{0}.{0}.blue.0.0", job.name), true)];
        for (topic, name, hard) in names {
            brokers.in_sync(&mine);
            let broker = brokers.coordinator(topic, &name);
            if hard {
                cluster.kill_broker(broker).unwrap()
            } else {
                cluster.stop_broker(broker).unwrap()
            }
            let moved = all_move("every partition moves while the broker is away");
            let now = brokers.coordinator(topic, &name);
            assert_ne!(now, broker, "the coordinator has not moved");
            cluster.start_broker(broker).unwrap();
            println!("broker {broker} of {topic} went (hard: {hard}), {now} took over: all moved after {moved:?}");
            all_move("every partition moves when the broker is back");
            assert!(process.is_running(), "{}", process.log());
        }
        let count = load.stop();
        support::eventually(BOUND, "all is through", || through(&job));
        process.stop();
        count
    });
    check(&job, count);
}
