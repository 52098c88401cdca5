//! `semel reset`: positions are set while nobody runs, after they were shown, and can be put back.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Output, Stdio};

use serde_json::{Value, json};

use super::harness::{Job, PATIENCE, Record, wait_with_output};
use crate::support;

/// A static member that stopped is in the group until its session is over: as short as the broker allows.
const COPY: &str = r#"
name = "NAME"
session_timeout = "6s"
transaction_timeout = "3s"
[kafka]
[sources.all]
type = "kafka"
topics = ["NAME.in"]
format = "json"
[sinks.out]
type = "kafka"
inputs = ["all"]
topic = "NAME.out"
create = { partitions = 1 }
"#;

fn value(partition: i32) -> Record<'static> {
    Record { partition, value: Some(b"{}"), ..Record::default() }
}

/// Tries until the members of the last run are forgotten.
fn reset(job: &Job, file: &Path, args: &[&str]) -> Output {
    let mut all = vec!["reset", file.to_str().unwrap()];
    all.extend(args);
    let mut output = None;
    support::eventually(PATIENCE, "nobody is in the group", || {
        let ran = job.semel(&all).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let ran = wait_with_output(ran);
        let busy = text(&ran.stderr).contains("somebody is in the group");
        output = Some(ran);
        !busy
    });
    output.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn positions_are_shown_set_and_put_back() {
    let Some(cluster) = support::broker("a reset") else { return };
    let job = Job::new(cluster, "reset", 2);
    let file = job.file(COPY);
    job.produce("in", [value(0), value(0), value(0), value(1)]);
    job.drain(&file);
    let positions = || job.positions(&job.name, "in");
    let topic = job.topic("in");

    let unasked = reset(&job, &file, &["--to", "earliest"]);
    assert_eq!(unasked.status.code(), Some(2), "{unasked:?}");
    assert!(text(&unasked.stderr).contains("--yes"), "{unasked:?}");
    let shown = format!("{0:<1$}  {topic}-0  3     0   3 again\n{0:<1$}  {topic}-1  1     0   1 again\n", job.name, 5);
    assert!(text(&unasked.stdout).ends_with(&shown), "{}\n{shown}", text(&unasked.stdout));
    assert_eq!(positions(), [Some(3), Some(1)]);

    let before = reset(&job, &file, &["--to", "earliest", "--yes", "--json"]);
    assert!(before.status.success(), "{before:?}");
    assert_eq!(positions(), [Some(0), Some(0)]);
    let before: Value = serde_json::from_slice(&before.stdout).unwrap();
    let entries = before["positions"].as_array().unwrap().iter();
    let entries: Vec<Value> = entries.map(|e| json!([e["stage"], e["topic"], e["partition"], e["position"]])).collect();
    assert_eq!(entries, [json!([job.name, topic, 0, 3]), json!([job.name, topic, 1, 1])]);

    let kept = file.with_file_name("before.json");
    std::fs::write(&kept, before.to_string()).unwrap();
    let back = reset(&job, &file, &["--to", kept.to_str().unwrap(), "--yes"]);
    assert!(back.status.success(), "{back:?}");
    assert_eq!(positions(), [Some(3), Some(1)]);
    job.drain(&file);
    assert_eq!(job.read("out").len(), 4);

    assert!(reset(&job, &file, &["--to", "earliest", "--yes"]).status.success());
    job.drain(&file);
    assert_eq!(job.read("out").len(), 8);
    job.produce("in", [value(0), value(1)]);
    assert!(reset(&job, &file, &["--to", "latest", "--yes"]).status.success());
    assert_eq!(positions(), [Some(4), Some(2)]);
    assert!(reset(&job, &file, &["--to", "2100-01-01T00:00:00Z", "--yes"]).status.success());
    assert_eq!(positions(), [Some(4), Some(2)]);
    assert!(reset(&job, &file, &["--to", "1h", "--yes", "--only", &job.name]).status.success());
    assert_eq!(positions(), [Some(0), Some(0)]);

    let beyond = before.to_string().replace("\"position\":3", "\"position\":5");
    std::fs::write(&kept, beyond).unwrap();
    let refused = reset(&job, &file, &["--to", kept.to_str().unwrap(), "--yes"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("outside the log, which holds offsets 0 to 4"), "{refused:?}");
    let nonsense = reset(&job, &file, &["--to", "yesterday", "--yes"]);
    assert_eq!(nonsense.status.code(), Some(2), "{nonsense:?}");
}

#[test]
fn a_reset_is_refused_while_somebody_is_in_the_group() {
    let Some(cluster) = support::broker("a reset under a running job") else { return };
    let job = Job::new(cluster, "busy", 1);
    let file = job.file(COPY);
    job.produce("in", [value(0)]);
    let process = job.start(&file);
    support::eventually(PATIENCE, "it runs", || job.positions(&job.name, "in") == [Some(1)]);
    let args = ["reset", file.to_str().unwrap(), "--to", "earliest", "--yes"];
    let output = wait_with_output(job.semel(&args).stderr(Stdio::piped()).spawn().unwrap());
    assert_eq!(output.status.code(), Some(2));
    let member = format!("in the group {0}: {0}.{0}.", job.name);
    assert!(text(&output.stderr).contains(&member), "{member}: {output:?}");
    assert_eq!(job.positions(&job.name, "in"), [Some(1)]);
    process.stop();
}

#[test]
fn a_reset_goes_on_where_a_start_is_refused() {
    let Some(cluster) = support::broker("a reset after a refused start") else { return };
    let job = Job::new(cluster, "mended", 3);
    let file = job.file(COPY);
    job.produce("in", [value(0), value(1), value(2)]);
    job.drain(&file);
    let topic = job.topic("in");
    job.admin.delete_topics(&[&topic]).unwrap();
    job.admin.create_topic(&topic, 2, 1, &BTreeMap::new()).unwrap();
    job.produce("in", [value(0), value(1), value(1)]);
    assert_eq!(job.run_drain(&file).status.code(), Some(2));
    let output = reset(&job, &file, &["--to", "earliest", "--yes"]);
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stdout).contains("no position before"), "{output:?}");
    job.drain(&file);
    assert_eq!(job.read("out").len(), 6);
    assert_eq!(job.positions(&job.name, "in"), [Some(1), Some(2)]);
    // Partition 2 was forgotten with the topic that had it: it is new when it comes back.
    job.admin.create_partitions(&topic, 3).unwrap();
    job.produce("in", [value(2)]);
    job.drain(&file);
    assert_eq!(job.read("out").len(), 7);
}
