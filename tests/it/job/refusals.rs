//! What cannot work is refused at once: one clear message, the right exit status.

use std::collections::BTreeMap;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::harness::{Job, Record, wait_with_output};
use super::kill::{TABLE, TOPOLOGY};
use crate::support;

fn run(job: &Job, text: &str, env: &[(&str, &str)]) -> (Option<i32>, String) {
    run_within(15, job, text, env)
}

/// Runs the job to its end, which comes within so many seconds; answers its status and what it says.
pub fn run_within(seconds: u64, job: &Job, text: &str, env: &[(&str, &str)]) -> (Option<i32>, String) {
    let file = job.file(text);
    let mut command = job.semel(&["run", file.to_str().unwrap(), "--drain", "--quiet"]);
    command.envs(env.iter().copied());
    let started = Instant::now();
    let output: Output = wait_with_output(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    assert!(started.elapsed() < Duration::from_secs(seconds), "took {:?}", started.elapsed());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!message.contains("panicked"), "{message}");
    (output.status.code(), message)
}

#[test]
fn addresses_where_nobody_answers_exit_3() {
    let Some(cluster) = support::broker("addresses where nobody answers") else { return };
    let job = Job::new(cluster, "nobody", 1);
    let (code, message) = run(&job, TOPOLOGY, &[("KAFKA_BROKERS", "127.0.0.1:1")]);
    assert_eq!(code, Some(3), "{message}");
    assert!(message.contains("127.0.0.1:1"), "{message}");
    let (code, message) = run(&job, TOPOLOGY, &[("DATABASE_URL", "postgres://semel@127.0.0.1:1/semel")]);
    assert_eq!(code, Some(3), "{message}");
    assert!(message.contains("127.0.0.1:1"), "{message}");
}

#[test]
fn what_is_missing_is_named_with_the_cure_and_exits_2() {
    let Some(cluster) = support::broker("what is missing") else { return };
    let job = Job::new(cluster, "missing", 1);
    let (code, message) = run(&job, TOPOLOGY, &[]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains(&format!("CREATE TABLE {}", job.table())), "{message}");

    job.sql("CREATE TABLE THE_TABLE (order_id text PRIMARY KEY, version text NOT NULL, deleted boolean NOT NULL)");
    let (code, message) = run(&job, TOPOLOGY, &[]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("version"), "{message}");

    job.sql("DROP TABLE THE_TABLE");
    job.sql("CREATE TABLE THE_TABLE (order_id text, version bigint NOT NULL, deleted boolean NOT NULL)");
    let (code, message) = run(&job, TOPOLOGY, &[]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("order_id"), "{message}");

    job.sql("DROP TABLE THE_TABLE");
    job.sql(TABLE);
    let (code, message) = run(&job, &TOPOLOGY.replace("NAME.in", "NAME.nowhere"), &[]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains(&job.topic("nowhere")), "{message}");
    let (code, message) = run(&job, &TOPOLOGY.replace("create = { partitions = 4 }\n", ""), &[]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains(&job.topic("out")) && message.contains("create"), "{message}");
    assert!(job.admin.topic(&job.topic("out")).unwrap().is_none(), "nothing is made by a job that is refused");
}

#[test]
fn check_online_finds_what_a_start_would_refuse() {
    let Some(cluster) = support::broker("check --online") else { return };
    let job = Job::new(cluster, "online", 1);
    let check = |text: &str| {
        let file = job.file(text);
        let args = ["check", file.to_str().unwrap(), "--online", "--json"];
        let output = wait_with_output(job.semel(&args).stdout(Stdio::piped()).spawn().unwrap());
        let findings: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
        let errors = findings.into_iter().filter(|f| f["severity"] == "error");
        let errors = errors.map(|f| (f["code"].as_str().unwrap().to_owned(), f["line"].as_u64().unwrap()));
        (output.status.code(), errors.collect::<Vec<_>>())
    };
    let bad = TOPOLOGY.replace("NAME.in", "NAME.nowhere").replace("create = { partitions = 4 }\n", "");
    let line = |text: &str, of: &str| text.lines().position(|l| l.contains(of)).unwrap() as u64 + 2;
    let expected = [
        ("broker".to_owned(), line(&bad, "topics = ")),
        ("broker".to_owned(), line(&bad, "topic = ")),
        ("database".to_owned(), line(&bad, "table = ")),
    ];
    let (code, errors) = check(&bad);
    assert_eq!((code, errors), (Some(1), expected.to_vec()));
    job.sql(TABLE);
    assert_eq!(check(TOPOLOGY), (Some(0), Vec::new()));
    assert!(job.admin.topic(&job.topic("out")).unwrap().is_none(), "a check makes nothing");
}

#[test]
fn mistakes_of_the_command_line_and_the_file_exit_2() {
    let Some(cluster) = support::broker("mistakes of the command line") else { return };
    let job = Job::new(cluster, "usage", 1);
    let status = |args: &[&str]| {
        let output = wait_with_output(job.semel(args).stderr(Stdio::piped()).spawn().unwrap());
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, message) = status(&["run", "/nonexistent/topology.toml"]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("/nonexistent/topology.toml"), "{message}");
    assert_eq!(status(&["run"]).0, Some(2));
    assert_eq!(status(&["walk"]).0, Some(2));
    let file = job.file(TOPOLOGY);
    let (code, message) = status(&["run", file.to_str().unwrap(), "--only", "table"]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("orders_table"), "{message}");
}

#[test]
fn a_transaction_timeout_above_the_brokers_limit_is_refused() {
    let Some(cluster) = support::broker("a transaction timeout above the limit") else { return };
    let job = Job::new(cluster, "limit", 1);
    job.sql(TABLE);
    let text = TOPOLOGY.replace("[kafka]\n", "transaction_timeout = \"20m\"\nsession_timeout = \"25m\"\n[kafka]\n");
    let (code, message) = run(&job, &text, &[]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("transaction.max.timeout.ms"), "{message}");
}

#[test]
fn a_sink_that_can_take_no_write_is_refused() {
    let Some(cluster) = support::broker("min.insync.replicas above the replicas") else { return };
    let job = Job::new(cluster, "insync", 1);
    job.sql(TABLE);
    let text = TOPOLOGY.replace(
        "create = { partitions = 4 }",
        "create = { partitions = 4, config = { \"min.insync.replicas\" = \"2\" } }",
    );
    let (code, message) = run(&job, &text, &[]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("min.insync.replicas"), "{message}");
}

/// Case 38: a broker with the default of three replicas for its offsets, alone, has no group coordinator at all.
#[test]
fn a_group_without_a_coordinator_is_said_and_exits_3() {
    if !support::online("no group coordinator") {
        return;
    }
    let cluster = support::private_cluster(&[("offsets.topic.replication.factor", "3")]);
    let job = Job::new(&cluster, "headless", 1);
    job.sql(TABLE);
    let (code, message) = run(&job, TOPOLOGY, &[]);
    assert_eq!(code, Some(3), "{message}");
    assert!(message.contains("offsets.topic.replication.factor"), "{message}");
}

#[test]
fn sessions_longer_than_the_clients_own_limit_of_a_poll_work() {
    let Some(cluster) = support::broker("a session of seven minutes") else { return };
    let job = Job::new(cluster, "patient", 1);
    job.sql(TABLE);
    job.drain(&job.file(&TOPOLOGY.replace("[kafka]\n", "session_timeout = \"7m\"\n[kafka]\n")));
}

/// A topic that somebody made beforehand, with the broker's defaults: records from the future are over its limit.
#[test]
fn a_dead_letter_topic_made_by_hand_takes_every_letter_and_a_compacted_one_is_refused() {
    let Some(cluster) = support::broker("a dead-letter topic made by hand") else { return };
    let job = Job::new(cluster, "by-hand", 1);
    job.sql(TABLE);
    let letters = job.topic("dead-letters");
    let compact = BTreeMap::from([("cleanup.policy".to_owned(), "compact".to_owned())]);
    job.admin.create_topic(&letters, 1, 1, &compact).unwrap();
    let (code, message) = run(&job, TOPOLOGY, &[]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains(&letters) && message.contains("cleanup.policy"), "{message}");

    job.admin.delete_topics(&[&letters]).unwrap();
    job.admin.create_topic(&letters, 1, 1, &BTreeMap::new()).unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64;
    let input = BTreeMap::from([("message.timestamp.after.max.ms".to_owned(), i64::MAX.to_string())]);
    job.admin.delete_topics(&[&job.topic("in")]).unwrap();
    job.admin.create_topic(&job.topic("in"), 1, 1, &input).unwrap();
    let tomorrow = Some(now + 86_400_000);
    job.produce("in", [Record { value: Some(b"poison"), timestamp: tomorrow, ..Record::default() }]);
    let (code, message) = run(&job, TOPOLOGY, &[]);
    assert_eq!(code, Some(0), "{message}");
    assert!(message.contains("retention.ms = -1"), "{message}");
    let letters = job.read("dead-letters");
    assert_eq!(letters.len(), 1);
    assert!(letters[0].timestamp.is_some_and(|at| at >= now && Some(at) < tomorrow), "{letters:?}");
}

/// Case 16: what is older than an output topic keeps would be gone soon after it is written.
#[test]
fn check_online_compares_how_long_inputs_and_outputs_are_kept() {
    let Some(cluster) = support::broker("check --online of retention") else { return };
    let job = Job::new(cluster, "kept", 1);
    job.sql(TABLE);
    let keep = |ms: &str| BTreeMap::from([("retention.ms".to_owned(), ms.to_owned())]);
    job.admin.delete_topics(&[&job.topic("in")]).unwrap();
    job.admin.create_topic(&job.topic("in"), 1, 1, &keep("-1")).unwrap();
    let warnings = |output: &str| {
        job.admin.create_topic(&job.topic("out"), 4, 1, &keep(output)).unwrap();
        let file = job.file(TOPOLOGY);
        let args = ["check", file.to_str().unwrap(), "--online", "--json"];
        let output = wait_with_output(job.semel(&args).stdout(Stdio::piped()).spawn().unwrap());
        job.admin.delete_topics(&[&job.topic("out")]).unwrap();
        let findings: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
        let warnings = findings.into_iter().filter(|f| f["severity"] == "warning");
        warnings.map(|f| format!("{}: {}", f["code"].as_str().unwrap(), f["message"])).collect::<Vec<_>>()
    };
    let short = warnings("604800000");
    assert_eq!(short.len(), 1, "{short:?}");
    assert!(short[0].starts_with("retention: ") && short[0].contains("for 7d after its own time"), "{short:?}");
    assert_eq!(warnings("-1"), [""; 0]);

    // As long as its source, and not as long as the events that an aggregate tells of may be old.
    job.admin.create_topic(&job.topic("hours"), 1, 1, &keep("-1")).unwrap();
    let hours = |retention: &str| {
        job.admin.delete_topics(&[&job.topic("hours")]).unwrap();
        job.admin.create_topic(&job.topic("hours"), 1, 1, &keep(retention)).unwrap();
        let file = job.file(HOURS);
        let output = job.semel(&["check", file.to_str().unwrap(), "--online"]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    job.admin.delete_topics(&[&job.topic("in")]).unwrap();
    job.admin.create_topic(&job.topic("in"), 1, 1, &keep("604800000")).unwrap();
    let short = hours("604800000");
    assert!(short.contains("warning[retention]") && short.contains("updates have the event times"), "{short}");
    let long = hours("-1");
    assert!(!long.contains("warning"), "{long}");
}

const HOURS: &str = r#"
name = "NAME"
[kafka]
[sources.orders]
type = "kafka"
topics = ["NAME.in"]
event_id = ".id"
event_time = ".at"
[transforms.hours]
type = "aggregate"
inputs = ["orders"]
window = { tumbling = "1h" }
fields.orders = "count"
[sinks.out]
type = "kafka"
inputs = ["hours"]
topic = "NAME.hours"
"#;
