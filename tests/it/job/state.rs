//! State and what belongs to it: positions that somebody else set, files and topics that somebody else changed.

use std::process::Command;

use semel::commit::metadata::TopicIds;
use semel::kafka::{Connection, Consumer, ConsumerOptions};
use semel::record::{Position, TopicPartition};

use super::harness::{Job, PATIENCE};
use super::records::random_text;
use crate::support;

const TOPOLOGY: &str = r#"
name = "NAME"
session_timeout = "6s"
transaction_timeout = "3s"
[kafka]
[sources.orders]
type = "kafka"
topics = ["NAME.in"]
[transforms.totals]
type = "aggregate"
inputs = ["orders"]
fields.orders = "count"
[sinks.out]
type = "kafka"
inputs = ["totals"]
topic = "NAME.out"
create = { partitions = 2 }
"#;

fn order(i: u64) -> (String, String) {
    (format!("c{}", i % 10), format!(r#"{{"id":"e{i}"}}"#))
}

/// Sets positions as any tool may, once nobody is in the group.
fn set(job: &Job, ids: &TopicIds, positions: &[(TopicPartition, Position)]) {
    let connection = Connection::new(&job.brokers, "somebody-else");
    let consumer = Consumer::new(&connection, &ConsumerOptions::new(&job.name)).unwrap();
    let set = || consumer.commit(positions, ids, PATIENCE).is_ok();
    support::eventually(PATIENCE, "positions are set", set);
}

#[test]
fn positions_that_somebody_else_set_are_not_those_of_the_state() {
    let Some(cluster) = support::broker("positions set from outside") else { return };
    for guarantee in ["exactly-once", "at-least-once"] {
        let job = Job::new(cluster, "state-outside", 2);
        let file = job.file(&TOPOLOGY.replace("[kafka]\n", &format!("guarantee = \"{guarantee}\"\n[kafka]\n")));
        // Where there is no state yet any position is as good.
        job.produce_keyed("in", 2, (0..100).map(|i| (order(i).0, "null".to_owned())));
        let partitions = job.partitions("in");
        let ends: Vec<i64> = job.ends("in", semel::kafka::Isolation::ReadUncommitted);
        let at = |positions: &[i64]| -> Vec<(TopicPartition, Position)> {
            partitions.iter().cloned().zip(positions.iter().map(|at| Position(*at))).collect()
        };
        set(&job, &TopicIds::default(), &at(&ends));
        job.produce_keyed("in", 2, (0..100).map(order));
        job.drain(&file);
        let out = job.read("out").len();
        assert_eq!(out, 100);
        let committed: Vec<i64> = job.positions(&job.name, "in").into_iter().map(Option::unwrap).collect();

        let refused = |what: &str| {
            let output = job.run_drain(&file);
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(5), "{guarantee}: {errors}");
            assert!(errors.contains(what) && errors.contains("semel reset"), "{guarantee}: {errors}");
            assert_eq!(job.read("out").len(), out, "nothing was processed");
        };
        set(&job, &TopicIds::default(), &at(&ends));
        job.produce_keyed("in", 2, (100..101).map(order));
        refused("was set by somebody else");
        if guarantee == "exactly-once" {
            // With what semel writes beside positions, but of an earlier state; then as it was.
            let ids = TopicIds::default();
            ids.set(&job.topic("in"), job.admin.topic(&job.topic("in")).unwrap().unwrap().id);
            set(&job, &ids, &at(&committed));
            refused("is of revision 0 of the state");
            let revisions = |revision| partitions.iter().map(|p| (p.clone(), revision)).collect::<Vec<_>>();
            set(&job, &ids.with(&revisions(7_000)), &at(&committed));
            refused("is of revision 7000 of the state");
        }
        let args = ["reset", file.to_str().unwrap(), "--to", "latest", "--yes"];
        support::eventually(PATIENCE, "nobody is in the group", || job.semel(&args).output().unwrap().status.success());
        job.produce_keyed("in", 2, (101..111).map(order));
        job.drain(&file);
        let updates = job.read("out");
        assert_eq!(updates.len(), out + 10);
        assert_eq!(updates.iter().filter(|update| update.text().contains("\"orders\":1}")).count(), 20);
    }
}

/// Topics that somebody made before the job did, by the broker's defaults or worse.
#[test]
fn a_topic_of_the_jobs_own_that_would_lose_records_is_refused() {
    let Some(cluster) = support::broker("topics of the job's own with other settings") else { return };
    let job = Job::new(cluster, "state-topics", 2);
    let file = job.file(&TOPOLOGY.replace("fields.orders", "group_by = \".id\"\nfields.orders"));
    job.produce_keyed("in", 2, (0..20).map(order));
    let lossy = [
        ("totals.repartition", "cleanup.policy", "compact"),
        ("totals.repartition", "retention.ms", "1000"),
        ("totals.repartition", "retention.bytes", "1000"),
        ("NAME.retry", "retention.ms", "604800000"),
        ("job", "cleanup.policy", "delete"),
    ];
    for (topic, setting, value) in lossy {
        let topic = job.topic(&topic.replace("NAME", &job.name));
        let fine =
            if topic.ends_with(".job") { [("cleanup.policy", "compact"); 2] } else { [("retention.ms", "-1"); 2] };
        let config = fine.into_iter().chain([(setting, value)]);
        let config = config.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        job.admin.create_topic(&topic, 2, 1, &config).unwrap();
        let output = job.run_drain(&file);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(&format!("{topic:?}")) && errors.contains(&format!("{setting} = {value}")), "{errors}");
        if !topic.ends_with(".job") {
            let check = job.semel(&["check", file.to_str().unwrap(), "--online"]).output().unwrap();
            let findings = String::from_utf8_lossy(&check.stdout).into_owned();
            assert!(findings.contains("error[broker]") && findings.contains(setting), "{findings}");
        }
        job.admin.delete_topics(&[&topic]).unwrap();
    }
    job.drain(&file);
    assert_eq!(job.read("out").len(), 20);
}

/// The disk takes no more: what is open is not committed, and a start on a disk that works goes on from there.
#[test]
fn a_disk_that_fails_stops_the_job_and_says_where() {
    let Some(cluster) = support::broker("a disk that fails") else { return };
    let job = Job::new(cluster, "state-disk", 1);
    let file = job.file(&TOPOLOGY.replace("\"count\"\n", "\"count\"\nfields.last = { last = \".text\" }\n"));
    let large = |i: u64| (format!("c{}", i % 250), format!(r#"{{"text":"{}"}}"#, random_text(20_000)));
    job.produce_keyed("in", 1, (0..10).map(large));
    job.drain(&file);
    job.produce_keyed("in", 1, (10..500).map(large));
    // Files end at 3 MiB, as on a disk that is full.
    let limited = "trap '' XFSZ; ulimit -f 6144; exec \"$0\" \"$@\"";
    let run = job.semel(&["run", file.to_str().unwrap(), "--drain", "--quiet", "--json"]);
    let mut shell = Command::new("sh");
    shell.args(["-c", limited]).arg(run.get_program()).args(run.get_args());
    shell.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = shell.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(5), "{errors}");
    let folder = job.path().with_file_name("state");
    assert!(errors.contains("File too large") && errors.contains(&folder.display().to_string()), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
    job.drain(&file);
    let out = job.read("out");
    let counts = out.iter().map(|update| {
        let update: serde_json::Value = serde_json::from_str(update.text()).unwrap();
        (update["key"].as_str().unwrap().to_owned(), update["orders"].as_u64().unwrap())
    });
    let counts: std::collections::BTreeSet<_> = counts.collect();
    assert_eq!((counts.len(), out.len()), (500, 500), "every update once");
    assert_eq!(counts.iter().filter(|(_, orders)| *orders == 2).count(), 250);
}
