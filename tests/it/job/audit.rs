//! `semel audit`: what is there is compared with what the operators make, while the job runs or not.

use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};

use semel::record::Position;

use super::beside::forget;
use super::harness::{Job, Load, PATIENCE, Record, wait_with_output};
use crate::support;

const AUDITED: &str = r#"
name = "NAME"
audit = true
session_timeout = "6s"
transaction_timeout = "3s"
[kafka]
[sources.all]
type = "kafka"
topics = ["NAME.in"]
format = "json"
event_id = ".id"
[transforms.some]
type = "filter"
inputs = ["all"]
condition = '.keep != false'
[transforms.twice]
type = "flat_map"
inputs = ["some"]
source = '[{"n": to_int!(.n)}, {"n": to_int!(.n) + 1}]'
[sinks.out]
type = "kafka"
inputs = ["twice"]
topic = "NAME.out"
create = { partitions = 2 }
"#;

fn input(text: &str) -> Record<'_> {
    Record { key: Some(b"k"), value: Some(text.as_bytes()), ..Record::default() }
}

/// Exit status and what the audit prints.
fn audit(job: &Job, args: &[&str]) -> (Option<i32>, Value) {
    let file = job.path();
    let mut all = vec!["audit", file.to_str().unwrap(), "--json"];
    all.extend(args);
    let output = wait_with_output(job.semel(&all).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let printed = serde_json::from_slice(&output.stdout);
    let printed = printed.unwrap_or_else(|_| json!(String::from_utf8_lossy(&output.stderr)));
    (output.status.code(), printed)
}

fn counts(report: &Value) -> Value {
    let keys = ["records", "outputs", "dead_letters", "without_output", "lost", "doubled", "different"];
    keys.iter().map(|key| report[*key].clone()).collect()
}

#[test]
fn an_audit_names_what_is_lost_doubled_and_different() {
    let Some(cluster) = support::broker("an audit") else { return };
    let job = Job::new(cluster, "audit", 1);
    let file = job.file(AUDITED);
    job.produce(
        "in",
        [
            input(r#"{"id":"a","n":"1"}"#),
            input(r#"{"id":"b","n":"2","keep":false}"#),
            input(r#"{"id":"c","n":"three"}"#),
            input(r#"{"id":"d","n":"4"}"#),
        ],
    );
    job.drain(&file);
    let origins: Vec<String> = job.read("out").iter().map(|r| r.header("semel-origin").unwrap().to_owned()).collect();
    assert_eq!(origins, [0, 0, 3, 3].map(|offset| format!("{}/{}/0/{offset}", job.name, job.topic("in"))));
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(0), json!([4, 4, 1, 1, 0, 0, 0])), "{report}");
    let (code, report) = audit(&job, &["--limit", "2"]);
    assert_eq!((code, counts(&report)), (Some(0), json!([2, 2, 0, 1, 0, 0, 0])), "{report}");
    let (code, report) = audit(&job, &["--from", "2100-01-01T00:00:00Z"]);
    assert_eq!((code, &counts(&report)[0]), (Some(2), &json!(0)), "nothing was audited: {report}");

    // Replayed, the rejected record has its outputs too, and its dead letter stays.
    let mended = job.file(&AUDITED.replace("to_int!(.n)", "length!(.n)"));
    let replay = ["dlq", "replay", mended.to_str().unwrap()];
    assert!(job.semel(&replay).status().unwrap().success());
    job.drain(&mended);
    job.file(&AUDITED.replace("to_int!(.n)", "(to_int(.n) ?? length!(.n))"));
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(0), json!([4, 6, 0, 1, 0, 0, 0])), "{report}");

    // Somebody sends an output again, and one of their own.
    let out = job.read("out");
    let headers: Vec<(&[u8], Option<&[u8]>)> = out[0].headers.iter().map(|(n, v)| (&n[..], v.as_deref())).collect();
    let copy = Record {
        partition: out[0].partition,
        key: Some(b"k"),
        value: out[0].value.as_deref(),
        headers,
        ..Record::default()
    };
    job.produce("out", [copy.clone(), Record { value: Some(b"{\"n\":7}"), ..copy }]);
    let (code, report) = audit(&job, &["--limit", "1"]);
    assert_eq!((code, counts(&report)), (Some(4), json!([1, 2, 0, 0, 0, 1, 1])), "{report}");
    let origin = json!({ "topic": job.topic("in"), "partition": 0, "offset": 0 });
    assert!(report["wrong"].as_array().unwrap().iter().all(|wrong| wrong["origin"] == origin), "{report}");
}

#[test]
fn what_a_group_passed_over_is_lost() {
    let Some(cluster) = support::broker("an audit of lost records") else { return };
    let job = Job::new(cluster, "passed", 1);
    let file = job.file(AUDITED);
    job.produce("in", [input(r#"{"id":"a","n":1}"#)]);
    job.drain(&file);
    job.produce("in", [input(r#"{"id":"b","n":2}"#), input(r#"{"id":"c","n":3}"#), input("no json")]);
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(0), json!([1, 2, 0, 0, 0, 0, 0])), "what is not committed is not lost");
    pass_over(&job, &file);
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(4), json!([4, 2, 0, 0, 5, 0, 0])), "{report}");
    job.produce("out", strangers());
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(4), json!([4, 2, 0, 0, 5, 0, 0])), "{report}");
    assert!(report["not_audited"].to_string().contains("2 outputs that name no record"), "{report}");
}

#[test]
fn what_others_write_does_not_excuse_a_total_loss() {
    let Some(cluster) = support::broker("an audit of a topic that others write to") else { return };
    let job = Job::new(cluster, "strangers", 1);
    let file = job.file(AUDITED);
    job.produce("in", []);
    job.drain(&file);
    job.produce("out", strangers());
    job.produce("in", [input(r#"{"id":"a","n":1}"#), input(r#"{"id":"b","n":2}"#), input("no json")]);
    pass_over(&job, &file);
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(4), json!([3, 0, 0, 0, 5, 0, 0])), "{report}");
}

/// A record of another program in each partition of the outputs.
fn strangers() -> [Record<'static>; 2] {
    [0, 1].map(|partition| Record { partition, value: Some(b"{\"stranger\":1}"), ..Record::default() })
}

/// Sets the job's positions past what it has not read.
fn pass_over(job: &Job, file: &Path) {
    let skip = ["reset", file.to_str().unwrap(), "--to", "latest", "--yes"];
    support::eventually(PATIENCE, "the positions are set past them", || {
        job.semel(&skip).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
    });
}

#[test]
fn a_partition_without_a_position_is_said_or_ends_the_audit() {
    let Some(cluster) = support::broker("an audit without positions") else { return };
    let job = Job::new(cluster, "unread", 1);
    let file = job.file(AUDITED);
    job.produce("in", [input(r#"{"id":"a","n":1}"#)]);
    job.drain(&file);
    job.admin.create_partitions(&job.topic("in"), 2).unwrap();
    job.produce("in", [Record { partition: 1, ..input(r#"{"id":"b","n":2}"#) }]);
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(0), json!([1, 2, 0, 0, 0, 0, 0])), "{report}");
    let unread =
        format!("{}-1: group {} has no position in it, so nothing of its 1 offsets", job.topic("in"), job.name);
    assert!(report["not_audited"].to_string().contains(&unread), "{report}");
    forget(&job, &job.name);
    let (code, message) = audit(&job, &[]);
    assert_eq!(code, Some(2), "{message}");
    let lost = format!("group {} has no position in {}-0 any more", job.name, job.topic("in"));
    assert!(message.as_str().unwrap().contains(&lost), "{message}");
}

#[test]
fn a_replay_that_was_read_and_came_to_nothing_is_lost() {
    let Some(cluster) = support::broker("an audit of replays") else { return };
    let job = Job::new(cluster, "replays", 1);
    let file = job.file(AUDITED);
    job.produce("in", [input(r#"{"id":"a","n":"three"}"#), input(r#"{"id":"b","n":2}"#)]);
    job.drain(&file);
    assert!(job.semel(&["dlq", "replay", file.to_str().unwrap()]).status().unwrap().success());
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(0), json!([2, 2, 1, 0, 0, 0, 0])), "it waits to be read: {report}");
    // It is read, and put out by nobody.
    let mended = AUDITED.replace("to_int!(.n)", "(to_int(.n) ?? 3)");
    job.drain(&job.file(&mended.replace("'.keep != false'", "'false'")));
    job.file(&mended);
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(4), json!([2, 2, 0, 0, 2, 0, 0])), "{report}");
    assert_eq!(report["wrong"][0]["origin"]["offset"], 0, "{report}");
}

#[test]
fn a_dead_letter_that_was_deleted_is_not_missed() {
    let Some(cluster) = support::broker("an audit of old dead letters") else { return };
    let job = Job::new(cluster, "letters", 1);
    let file = job.file(AUDITED);
    job.produce("in", [input("no json"), input("nor this"), input(r#"{"id":"a","n":1}"#)]);
    job.drain(&file);
    let letters = job.partitions("dead-letters")[0].clone();
    let delete = |before| job.admin.delete_records(&[(letters.clone(), Position(before))]).unwrap();
    delete(1);
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(0), json!([3, 2, 1, 0, 0, 0, 0])), "{report}");
    let note = format!("{}-0: dead letters before offset 1 were deleted", job.topic("dead-letters"));
    assert!(report["not_audited"].to_string().contains(&note), "{report}");
    // A rejected record that is younger than what is left must have one.
    job.produce("in", [input("passed over")]);
    pass_over(&job, &file);
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(4), json!([4, 2, 1, 0, 1, 0, 0])), "{report}");
}

#[test]
fn another_job_may_make_outputs_of_the_same_records() {
    let Some(cluster) = support::broker("an audit of a topic of two jobs") else { return };
    let job = Job::new(cluster, "two", 1);
    job.produce("in", [input(r#"{"id":"a","n":1}"#)]);
    job.drain(&job.file(&AUDITED.replace("name = \"NAME\"", "name = \"NAME-other\"").replace("+ 1", "+ 2")));
    job.drain(&job.file(AUDITED));
    assert_eq!(job.read("out").len(), 4);
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(0), json!([1, 2, 0, 0, 0, 0, 0])), "{report}");
    assert!(!report["not_audited"].to_string().contains("name no record"), "{report}");
}

#[test]
fn a_loss_shows_where_earlier_outputs_were_deleted() {
    let Some(cluster) = support::broker("an audit of what was deleted") else { return };
    let job = Job::new(cluster, "expired", 1);
    let file = job.file(AUDITED);
    for n in [1, 2] {
        job.produce("in", [input(&format!("{{\"id\":\"{n}\",\"n\":{n}}}"))]);
        job.drain(&file);
    }
    job.produce("in", [input(r#"{"id":"lost","n":3}"#)]);
    pass_over(&job, &file);
    job.produce("in", [input(r#"{"id":"4","n":4}"#)]);
    job.drain(&file);
    let out = job.read("out");
    let place = job.partitions("out")[out[0].partition as usize].clone();
    let delete = |before| job.admin.delete_records(&[(place.clone(), Position(before))]).unwrap();
    let note = |report: &Value| report["not_audited"].to_string();
    let unseen = format!("not audited: {}-0", job.topic("in"));

    // The first record is gone, and half of the second.
    delete(out[3].offset);
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(4), json!([4, 3, 0, 0, 2, 0, 0])), "{report}");
    assert_eq!(report["wrong"][0]["origin"]["offset"], 2, "{report}");
    assert!(note(&report).contains(&format!("outputs before offset {} were deleted", out[3].offset)), "{report}");
    assert!(!note(&report).contains(&unseen), "{report}");
    // What is left is no earlier than the last record.
    delete(out[4].offset);
    let (code, report) = audit(&job, &[]);
    assert_eq!((code, counts(&report)), (Some(0), json!([4, 2, 0, 0, 0, 0, 0])), "{report}");
    assert!(note(&report).contains(&unseen), "{report}");
}

#[test]
fn a_running_job_is_audited_and_what_cannot_be_is_said() {
    let Some(cluster) = support::broker("an audit under load") else { return };
    let job = Job::new(cluster, "load", 4);
    let file = job.file(&AUDITED.replace("audit = true\n", ""));
    let (code, message) = audit(&job, &[]);
    assert_eq!(code, Some(2));
    assert!(message.as_str().unwrap().contains("audit = true"), "{message}");
    job.produce("in", [input(r#"{"id":"before","n":0}"#)]);
    job.drain(&file);
    let clock = "[transforms.stamped]\ntype = \"remap\"\ninputs = [\"some\"]\nsource = '.at = now()'\n\
                 [sinks.stamps]\ntype = \"kafka\"\ninputs = [\"stamped\"]\ntopic = \"NAME.stamps\"\n\
                 create = { partitions = 1 }\n";
    let file = job.file(&format!("{AUDITED}{clock}"));
    std::thread::scope(|scope| {
        let make = |i| (format!("k{}", i % 9), format!("{{\"id\":\"e{i}\",\"n\":{i},\"keep\":{}}}", i % 5 != 0));
        let load = Load::start(scope, &job, 2_000, 4, make);
        let process = job.start(&file);
        for records in [2_000, 6_000] {
            support::eventually(PATIENCE, "it gets on", || job.progress(&job.name, "in") > records);
            let (code, report) = audit(&job, &[]);
            assert_eq!(code, Some(0), "{report}");
            assert!(report["records"].as_i64().unwrap() >= records - 500, "{report}");
            assert!(report["without_output"].as_i64().unwrap() > 300, "{report}");
            let notes = report["not_audited"].to_string();
            assert!(notes.contains("2 outputs that name no record"), "{notes}");
            assert!(notes.contains(&format!("topic {}: node stamped calls now", job.topic("stamps"))), "{notes}");
        }
        process.stop();
        load.stop();
    });
}
