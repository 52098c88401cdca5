//! What cannot work is refused at once: one clear message, the right exit status.

use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use super::harness::{Job, wait_with_output};
use super::kill::{TABLE, TOPOLOGY};
use crate::support;

fn run(job: &Job, text: &str, env: &[(&str, &str)]) -> (Option<i32>, String) {
    let file = job.file(text);
    let mut command = job.semel(&["run", file.to_str().unwrap(), "--drain", "--quiet"]);
    command.envs(env.iter().copied());
    let started = Instant::now();
    let output: Output = wait_with_output(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    assert!(started.elapsed() < Duration::from_secs(12), "took {:?}", started.elapsed());
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
