//! Records of transactions that were aborted (case 29): they reach no output, no table, no dead letter and no audit.

use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::producer::{BaseRecord, Producer, ThreadedProducer};
use semel::kafka::Isolation;

use super::harness::Job;
use super::kill::{TABLE, TOPOLOGY, check, order};
use crate::support;

const LONG: Duration = Duration::from_secs(60);
const PARTITIONS: i32 = 2;
/// Of both producers together, of each in one transaction.
const RUN: u64 = 500_000;
/// Not JSON: each would be a dead letter.
const BROKEN: &str = "{";

type Client = ThreadedProducer<rdkafka::producer::DefaultProducerContext>;

fn transactional(job: &Job, id: &str, compression: &str) -> Client {
    let producer: Client = ClientConfig::new()
        .set("bootstrap.servers", &job.brokers)
        .set("transactional.id", format!("{}.{id}", job.name))
        .set("compression.type", compression)
        .set("queue.buffering.max.messages", "2000000")
        .create()
        .unwrap();
    producer.init_transactions(LONG).unwrap();
    producer
}

fn send(producer: &Client, topic: &str, (key, value): (&str, &str)) {
    let partition = semel::operator::partition(Some(key.as_bytes()), 0, PARTITIONS);
    let record = BaseRecord::to(topic).partition(partition).key(key).payload(value);
    producer.send(record).unwrap_or_else(|(error, _)| panic!("{error}"));
}

#[test]
fn what_was_aborted_reaches_no_output_no_table_and_no_dead_letter() {
    let Some(cluster) = support::broker("a long run of aborted records") else { return };
    let job = Job::new(cluster, "aborted", PARTITIONS);
    job.sql(TABLE);
    let topic = job.topic("in");
    let producers = [transactional(&job, "a", "lz4"), transactional(&job, "b", "zstd")];
    let mut committed = 0;
    let mut batch = |commits: &[bool; 2], each: u64| {
        producers.iter().for_each(|producer| producer.begin_transaction().unwrap());
        // In turn, so that their records lie between each other's.
        let mut kept = committed;
        for i in 0..each {
            for (producer, commits) in producers.iter().zip(commits) {
                let number = if *commits { kept } else { committed + i };
                kept += u64::from(*commits);
                let (key, value) = order(number);
                send(producer, &topic, (&key, &value));
                if !commits && i % 1_000 == 0 {
                    send(producer, &topic, (&key, BROKEN));
                }
            }
        }
        committed = kept;
        for (producer, commits) in producers.iter().zip(commits) {
            producer.flush(LONG).unwrap();
            if *commits {
                producer.commit_transaction(LONG).unwrap()
            } else {
                producer.abort_transaction(LONG).unwrap()
            }
        }
    };
    for round in 0..12 {
        batch(&[round % 2 == 0, round % 3 == 0], 7);
        batch(&[false, false], u64::from(round % 4 == 0));
    }
    batch(&[false, false], RUN / 2);
    batch(&[true, true], 10);
    batch(&[false, true], 5);
    assert!(job.ends("in", Isolation::ReadCommitted).iter().sum::<i64>() > RUN as i64);

    let text = TOPOLOGY.replace("partitions = 4", &format!("partitions = {PARTITIONS}"));
    let summary = job.drain(&job.file(&text));
    check(&job, committed);
    assert_eq!(summary["stages"][0]["in"], committed);
    assert_eq!(summary["stages"][0]["rejected"], 0);
    let path = job.path();
    for command in [["dlq", "list"], ["dlq", "replay"]] {
        let output = job.semel(&[command[0], command[1], path.to_str().unwrap(), "--json"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let answer: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{output:?}"));
        let letters = answer.as_array().or_else(|| answer["replayed"].as_array());
        assert_eq!(letters.map(Vec::len), Some(0), "{text}");
    }
    let audit = job.semel(&["audit", path.to_str().unwrap()]).output().unwrap();
    assert!(audit.status.success(), "{audit:?}");
}
