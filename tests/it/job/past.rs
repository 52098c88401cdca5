//! What a job remembers: topics made anew, positions that are gone, partitions that are new, and others in its group.

use std::collections::BTreeMap;
use std::time::Duration;

use semel::commit::metadata::{topic_id_of, topic_id_text};
use semel::kafka::{Connection, Consumer, ConsumerOptions, Polled};

use super::harness::{Feed, Job, PATIENCE, Record};
use crate::support;

const COPY: &str = r#"
name = "NAME"
[kafka]
properties = { "topic.metadata.refresh.interval.ms" = "500" }
[sources.all]
type = "kafka"
topics = ["NAME.in"]
format = "json"
start = "latest"
[sinks.out]
type = "kafka"
inputs = ["all"]
topic = "NAME.out"
create = { partitions = 1 }
"#;

fn value(text: &str) -> Record<'_> {
    Record { value: Some(text.as_bytes()), ..Record::default() }
}

/// Exit status and message of a run that should not come about.
fn refused(job: &Job, file: &std::path::Path) -> (Option<i32>, String) {
    let output = job.run_drain(file);
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn id(job: &Job) -> uuid::Uuid {
    job.admin.topic(&job.topic("in")).unwrap().unwrap().id
}

fn make_anew(job: &Job, partitions: i32) {
    let topic = job.topic("in");
    job.admin.delete_topics(&[&topic]).unwrap();
    job.admin.create_topic(&topic, partitions, 1, &BTreeMap::new()).unwrap();
}

#[test]
fn positions_say_of_which_topic_they_are() {
    let Some(cluster) = support::broker("metadata of positions") else { return };
    for guarantee in ["exactly-once", "at-least-once"] {
        let job = Job::new(cluster, "metadata", 2);
        let text = COPY.replace("\"latest\"", "\"earliest\"");
        let file = job.file(&text.replace("[kafka]\n", &format!("guarantee = \"{guarantee}\"\n[kafka]\n")));
        job.produce("in", [value("{}")]);
        job.drain(&file);
        for (partition, commit) in job.admin.commits(&job.name, &job.partitions("in"), true).unwrap() {
            let (position, metadata) = commit.unwrap().unwrap();
            assert_eq!(position.0, i64::from(partition.partition == 0), "{guarantee}");
            assert_eq!(topic_id_of(&metadata), Some(id(&job)), "{guarantee}");
        }
    }
}

#[test]
fn a_topic_made_anew_is_never_taken_for_the_old_one() {
    let Some(cluster) = support::broker("a topic made anew") else { return };
    let job = Job::new(cluster, "anew", 1);
    let file = job.file(&COPY.replace("\"latest\"", "\"earliest\""));
    job.produce("in", (0..3).map(|_| value("{}")));
    job.drain(&file);
    let old = id(&job);
    make_anew(&job, 1);
    // Longer than the old one: the position would fit, and mean something else.
    job.produce("in", (0..5).map(|_| value(r#"{"new":1}"#)));
    let (code, message) = refused(&job, &file);
    assert_eq!(code, Some(2), "{message}");
    for word in [job.topic("in"), topic_id_text(old), topic_id_text(id(&job)), "semel reset".to_owned()] {
        assert!(message.contains(&word), "{word} in {message}");
    }
    assert_eq!(job.read("out").len(), 3);
}

#[test]
fn a_topic_made_anew_under_a_running_job_stops_it() {
    let Some(cluster) = support::broker("a topic made anew under a running job") else { return };
    let job = Job::new(cluster, "under", 1);
    let file = job.file(&COPY.replace("\"latest\"", "\"earliest\""));
    let mut process = job.start(&file);
    support::eventually(PATIENCE, "it runs", || job.positions(&job.name, "in") == [Some(0)]);
    let old = id(&job);
    // Nothing was read: the position 0 fits any topic.
    make_anew(&job, 1);
    support::eventually(PATIENCE, "the job stops", || !process.is_running());
    assert_eq!(process.child.wait().unwrap().code(), Some(5), "{}", process.log());
    for word in [topic_id_text(old), topic_id_text(id(&job)), "was deleted and made anew".to_owned()] {
        assert!(process.log().contains(&word), "{word} in {}", process.log());
    }
}

#[test]
fn a_position_that_is_gone_is_not_guessed() {
    let Some(cluster) = support::broker("positions that are gone") else { return };
    let job = Job::new(cluster, "gone", 2);
    let file = job.file(COPY);
    let process = job.start(&file);
    support::eventually(PATIENCE, "it runs", || job.positions(&job.name, "in") == [Some(0), Some(0)]);
    process.stop();
    job.produce("in", (0..3).map(|_| value("{}")));
    job.drain(&file);
    assert_eq!(job.read("out").len(), 3);
    job.produce("in", (0..2).map(|_| value(r#"{"later":1}"#)));
    // As the broker does when offsets.retention.minutes are over.
    support::eventually(PATIENCE, "the group is deleted", || {
        use rdkafka::admin::{AdminClient, AdminOptions};
        let mut config = rdkafka::ClientConfig::new();
        let admin: AdminClient<_> = config.set("bootstrap.servers", &job.brokers).create().unwrap();
        // The static member is in it until its session times out.
        let deleted = futures::executor::block_on(admin.delete_groups(&[&job.name], &AdminOptions::new())).unwrap();
        deleted.iter().all(Result::is_ok)
    });
    let (code, message) = refused(&job, &file);
    assert_eq!(code, Some(2), "{message}");
    for partition in 0..2 {
        assert!(message.contains(&format!("no position in {}-{partition} any more", job.topic("in"))), "{message}");
    }
    assert!(message.contains("semel reset"), "{message}");
    assert_eq!(job.read("out").len(), 3);
    assert_eq!(job.positions(&job.name, "in"), [None, None]);
}

#[test]
fn partitions_added_under_load_lose_nothing_with_any_start() {
    let Some(cluster) = support::broker("partitions added under load") else { return };
    let job = Job::new(cluster, "grow", 2);
    let file = job.file(COPY);
    let process = job.start(&file);
    // Before the job started is before `latest`; from here on nothing may be missing.
    support::eventually(PATIENCE, "it runs", || job.positions(&job.name, "in") == [Some(0), Some(0)]);
    let topic = job.topic("in");
    let mut feed = Feed::new(&job, &topic);
    let mut sent = 0;
    let mut send = |feed: &mut Feed, partitions: i32| {
        for _ in 0..200 {
            let text = format!("{{\"i\":{sent}}}");
            feed.push(&Record { partition: sent % partitions, value: Some(text.as_bytes()), ..Record::default() });
            sent += 1;
        }
        feed.flush();
    };
    send(&mut feed, 2);
    job.admin.create_partitions(&topic, 4).unwrap();
    let mut feed = Feed::new(&job, &topic);
    for _ in 0..20 {
        send(&mut feed, 4);
    }
    support::eventually(PATIENCE, "all is through", || job.progress(&job.name, "in") == 4200);
    process.stop();
    let mut seen: Vec<String> = job.read("out").iter().map(|r| r.text().to_owned()).collect();
    assert_eq!(seen.len(), 4200);
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 4200);
}

#[test]
fn what_is_added_between_two_runs_is_read() {
    let Some(cluster) = support::broker("topics and partitions added between two runs") else { return };
    let job = Job::new(cluster, "added", 1);
    let text = COPY.replace("\"latest\"", "\"earliest\"");
    job.produce("in", [value("{}")]);
    job.drain(&job.file(&text));
    // The broker gives a static member back what it had, whatever there is to read by now.
    job.admin.create_partitions(&job.topic("in"), 2).unwrap();
    job.admin.create_topic(&job.topic("more"), 1, 1, &BTreeMap::new()).unwrap();
    job.produce("in", [Record { partition: 1, ..value("{}") }]);
    job.produce("more", [value("{}")]);
    job.drain(&job.file(&text.replace("[\"NAME.in\"]", "[\"NAME.in\", \"NAME.more\"]")));
    assert_eq!(job.read("out").len(), 3);
}

#[test]
fn another_program_in_the_group_is_named_and_the_start_refused() {
    let Some(cluster) = support::broker("another program in the group") else { return };
    for protocol in ["classic", "consumer"] {
        let job = Job::new(cluster, "shared", 1);
        let file = job.file(COPY);
        job.admin.create_topic(&job.topic("other"), 1, 1, &BTreeMap::new()).unwrap();
        let mut connection = Connection::new(job.brokers.clone(), "someone-else");
        connection.properties.insert("group.protocol".into(), protocol.into());
        let mut consumer = Consumer::new(&connection, &ConsumerOptions::new(&job.name)).unwrap();
        consumer.subscribe(&[&job.topic("other")]).unwrap();
        support::eventually(PATIENCE, "it is in the group", || {
            if let Polled::Assign(partitions) = consumer.poll(Duration::from_millis(100)) {
                let at: Vec<_> = partitions.into_iter().map(|p| (p, semel::record::Position(0))).collect();
                consumer.assign(&at).unwrap();
            }
            !consumer.assignment().is_empty()
        });
        let (code, message) = refused(&job, &file);
        assert_eq!(code, Some(2), "{message}");
        for word in ["someone-else", &job.topic("other"), &format!("group {}", job.name)] {
            assert!(message.contains(word), "{word} in {message}");
        }
        consumer.close(Duration::from_secs(5));
        job.drain(&file);
    }
}
