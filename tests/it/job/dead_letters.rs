//! Dead letters: listed, shown, and replayed to the stage that rejected them, each once.

use std::process::{Output, Stdio};

use serde_json::{Value, json};

use super::harness::{Job, PATIENCE, Record, Stored, wait_with_output};
use crate::support;

/// `q` has to be a number.
const STRICT: &str = r#"
name = "NAME"
[kafka]
[sources.all]
type = "kafka"
topics = ["NAME.in"]
format = "json"
[transforms.t]
type = "remap"
inputs = ["all"]
source = '.n = to_int!(.q); .at = join!([%topic, to_string(%partition), to_string(%offset)], "/")'
[sinks.out]
type = "kafka"
inputs = ["t"]
topic = "NAME.out"
create = { partitions = 2 }
"#;

fn semel(job: &Job, args: &[&str]) -> Output {
    wait_with_output(job.semel(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

/// The JSON that a command prints; it has to exit 0.
fn json_of(job: &Job, args: &[&str]) -> Value {
    let output = semel(job, args);
    assert!(output.status.success(), "{args:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn addresses(list: &Value, of: &str) -> Vec<String> {
    list[of].as_array().unwrap().iter().map(|l| l["address"].as_str().unwrap().to_owned()).collect()
}

/// Partition, key, value, headers and time of each record.
fn shapes(records: &[Stored]) -> Vec<Stored> {
    records.iter().map(|r| Stored { offset: 0, ..r.clone() }).collect()
}

#[test]
fn a_replayed_dead_letter_is_the_record_that_it_was() {
    let Some(cluster) = support::broker("a replay") else { return };
    let job = Job::new(cluster, "replay", 2);
    let now = chrono::Utc::now().timestamp_millis();
    let shown = |ms: i64| {
        let time = chrono::DateTime::from_timestamp_millis(ms).unwrap();
        time.to_rfc3339_opts(chrono::SecondsFormat::Millis, true)
    };
    let file = job.file(STRICT);
    let path = file.to_str().unwrap().to_owned();
    let headers: Vec<(&[u8], Option<&[u8]>)> =
        vec![(b"a", Some(b"1")), (b"a", Some(b"2")), (b"b", None), (b"c", Some(b"")), (b"\xff", Some(b"\xff"))];
    let record = |key, value: &'static str, time| Record {
        partition: 1,
        timestamp: Some(time),
        key,
        value: Some(value.as_bytes()),
        headers: headers.clone(),
    };
    job.produce(
        "in",
        [
            record(Some(&b"k"[..]), r#"{ "q":"one","d":0.10}"#, now - 5),
            record(Some(b"k"), r#"{"q":"2"}"#, now - 4),
            record(None, r#"{"q":"three"}"#, now - 3),
            record(Some(b""), r#"{"q":"four"}"#, now - 2),
            record(Some(b"k"), r#"{"q":"five"}"#, now - 1),
        ],
    );
    job.drain(&file);
    assert_eq!(job.read("out").len(), 1);

    let list = json_of(&job, &["dlq", "list", &path, "--json"]);
    let expected = |offset: i64, key: Value| json!({ "address": format!("1:{offset}"), "node": "t", "reason": "expression", "attempt": 1, "key": key });
    let keys = ["address", "node", "reason", "attempt", "key"];
    let listed: Vec<Value> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|l| keys.iter().map(|k| ((*k).to_owned(), l[*k].clone())).collect())
        .collect();
    assert_eq!(
        listed,
        [expected(0, json!("k")), expected(1, Value::Null), expected(2, json!("")), expected(3, json!("k"))]
    );
    assert_eq!(list[3]["source"], json!({ "topic": job.topic("in"), "partition": 1, "offset": 4 }));
    let filtered = ["dlq", "list", &path, "--json", "--node", "t", "--since", &shown(now - 2), "--limit", "1"];
    assert_eq!(json_of(&job, &filtered)[0]["address"], "1:2");
    assert_eq!(json_of(&job, &["dlq", "list", &path, "--json", "--reason", "undecodable"]), json!([]));
    let table = String::from_utf8(semel(&job, &["dlq", "list", &path]).stdout).unwrap();
    let line = format!("1:3               {}  t     expression  {}/1/4", shown(now - 1), job.topic("in"));
    assert!(table.lines().any(|l| l.starts_with(&line)), "{table}");
    let one = String::from_utf8(semel(&job, &["dlq", "show", &path, "1:0"]).stdout).unwrap();
    assert!(one.contains("\n  a = 1\n  a = 2\n  b = (null)\n  c = \"\"\n  base64:/w== = base64:/w==\n"), "{one}");
    assert!(one.contains("value (json)\n{\n  \"q\": \"one\",\n  \"d\": 0.10\n}\n"), "{one}");
    let unknown = semel(&job, &["dlq", "show", &path, "1:4"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("it holds 0:0 to -1, 1:0 to "), "{unknown:?}");

    // The file is mended: what would have been put out in the first place comes out now.
    let file = job.file(&STRICT.replace("to_int!(.q)", "length!(.q)"));
    let planned = json_of(&job, &["dlq", "replay", &path, "--dry-run", "--json"]);
    assert_eq!(addresses(&planned, "replayed"), ["1:0", "1:1", "1:2", "1:3"]);
    assert!(job.admin.topic(&job.topic(&format!("{}.retry", job.name))).unwrap().is_none(), "a dry run makes nothing");
    let first = json_of(&job, &["dlq", "replay", &path, "1:0", "--json"]);
    assert_eq!(addresses(&first, "replayed"), ["1:0"]);
    let rest = json_of(&job, &["dlq", "replay", &path, "--source", &job.topic("in"), "--json"]);
    assert_eq!(addresses(&rest, "replayed"), ["1:1", "1:2", "1:3"]);
    assert_eq!(addresses(&rest, "left_out"), ["1:0"]);
    let again = json_of(&job, &["dlq", "replay", &path, "--json"]);
    assert_eq!((addresses(&again, "replayed").len(), addresses(&again, "left_out").len()), (0, 4));
    job.drain(&file);
    job.drain(&file);

    let reference = Job::new(cluster, "replay-reference", 2);
    let text = STRICT.replace("to_int!(.q)", "length!(.q)").replace("%topic", &format!("\"{}\"", job.topic("in")));
    let reference_file = reference.file(&text);
    let same = job.read("in");
    let borrowed = same.iter().map(|r| Record {
        partition: r.partition,
        timestamp: r.timestamp,
        key: r.key.as_deref(),
        value: r.value.as_deref(),
        headers: r.headers.iter().map(|(name, value)| (&name[..], value.as_deref())).collect(),
    });
    reference.produce("in", borrowed);
    reference.drain(&reference_file);
    let mut wanted = shapes(&reference.read("out"));
    let mut got = shapes(&job.read("out"));
    // The record that passed at first has another `n`, and a replayed one carries the id that its dead letter got.
    let times =
        |records: &[Stored]| records.iter().map(|r| (r.partition, r.key.clone(), r.timestamp)).collect::<Vec<_>>();
    let replayed: Vec<_> = times(&got).into_iter().filter(|(_, _, time)| *time != Some(now - 4)).collect();
    let direct: Vec<_> = times(&wanted).into_iter().filter(|(_, _, time)| *time != Some(now - 4)).collect();
    assert_eq!(replayed, direct, "order of each key");
    for records in [&mut got, &mut wanted] {
        records.retain(|r| r.timestamp != Some(now - 4));
        records.iter_mut().for_each(|r| r.headers.retain(|(name, _)| name != b"semel-event-id"));
    }
    assert_eq!(got, wanted);
    assert_eq!(job.read("dead-letters").len(), 4);
}

#[test]
fn a_record_that_fails_again_counts_on_and_is_left_out_in_the_end() {
    let Some(cluster) = support::broker("a replay that fails again") else { return };
    let job = Job::new(cluster, "carousel", 1);
    let file = job.file(STRICT);
    let path = file.to_str().unwrap();
    job.produce("in", [Record { value: Some(br#"{"q":"one"}"#), ..Record::default() }]);
    job.drain(&file);
    for offset in 0..4 {
        let letters = job.read("dead-letters");
        let headers = ["attempt", "topic", "offset", "node"].map(|h| format!("semel-error-{h}"));
        let last = letters.last().unwrap();
        let shown: Vec<_> = headers.iter().map(|h| last.header(h).unwrap().to_owned()).collect();
        assert_eq!(shown, [(offset + 1).to_string(), job.topic("in"), "0".to_owned(), "t".to_owned()]);
        assert_eq!(last.headers.iter().filter(|(name, _)| name == b"semel-error-attempt").count(), 1);
        let outcome = json_of(&job, &["dlq", "replay", path, "--max-attempts", "3", "--json"]);
        // One that has the mark of a replay, or too many attempts behind it, stays.
        let replayed = addresses(&outcome, "replayed");
        assert_eq!(replayed.len(), usize::from(offset < 3), "{outcome}");
        job.drain(&file);
    }
    assert_eq!(job.read("dead-letters").len(), 4);
    let output = String::from_utf8(semel(&job, &["dlq", "replay", path, "--max-attempts", "3"]).stdout).unwrap();
    assert!(output.contains("replayed nothing\n"), "{output}");
    assert!(output.contains("rejected 4 times, which is more than --max-attempts 3"), "{output}");
    assert!(output.contains("left out 3 (0:0, "), "{output}");
}

const ROWS: &str = r#"
name = "NAME"
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
[sinks.rows]
type = "postgres"
inputs = ["out"]
url = "${DATABASE_URL}"
table = "THE_TABLE"
key = ["id"]
version = "v"
"#;

#[test]
fn a_running_stage_reads_what_is_replayed_to_it_and_no_other_stage_does() {
    let Some(cluster) = support::broker("a replay to a running job") else { return };
    let job = Job::new(cluster, "rows", 1);
    job.sql("CREATE TABLE THE_TABLE (id text PRIMARY KEY, v bigint NOT NULL, n int, CONSTRAINT small CHECK (n < 10))");
    let file = job.file(ROWS);
    let path = file.to_str().unwrap();
    let record = |text: &'static str| Record { value: Some(text.as_bytes()), ..Record::default() };
    job.produce("in", [record(r#"{"id":"a","v":1,"n":5}"#), record(r#"{"id":"a","v":2,"n":50}"#), record("no json")]);
    let process = job.start(&file);
    let group = format!("{}.rows", job.name);
    support::eventually(PATIENCE, "all is through", || {
        job.progress(&job.name, "in") == 3 && job.progress(&group, "out") >= 2
    });
    assert_eq!(job.read("dead-letters").len(), 2);
    let rows = || job.sql("SELECT id, v, n FROM THE_TABLE");
    assert_eq!(rows(), [[Some("a".to_owned()), Some("1".into()), Some("5".into())]]);
    job.sql("ALTER TABLE THE_TABLE DROP CONSTRAINT small");
    let outcome = json_of(&job, &["dlq", "replay", path, "--node", "rows", "--json"]);
    assert_eq!(outcome["replayed"][0]["topic"], job.topic("rows.retry"));
    support::eventually(PATIENCE, "the row is written", || rows()[0][1].as_deref() == Some("2"));
    // What no source of the stage sent is rejected, and goes round no more.
    job.produce("rows.retry", [record(r#"{"id":"b","v":1,"n":1}"#)]);
    support::eventually(PATIENCE, "it is rejected", || job.read("dead-letters").len() == 3);
    process.stop();
    let letters = job.read("dead-letters");
    let foreign = letters.last().unwrap();
    assert_eq!(foreign.header("semel-error-reason"), Some("retry"));
    assert_eq!(foreign.header("semel-error-topic"), Some(job.topic("rows.retry").as_str()));
    assert_eq!(rows().len(), 1);
    assert_eq!(job.read("out").len(), 2);
    assert_eq!(job.positions(&group, "rows.retry").len(), 1);
}

#[test]
fn two_replays_at_once_send_each_letter_once() {
    let Some(cluster) = support::broker("two replays at once") else { return };
    let job = Job::new(cluster, "twice", 1);
    let file = job.file(STRICT);
    let path = file.to_str().unwrap();
    job.produce("in", (0..2500).map(|_| Record { value: Some(br#"{"q":"x"}"#), ..Record::default() }));
    job.drain(&file);
    let replay = || job.semel(&["dlq", "replay", path]).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (first, mut killed, second) = (replay(), replay(), replay());
    let retry = job.topic(&format!("{}.retry", job.name));
    support::eventually(PATIENCE, "a replay is under way", || job.admin.topic(&retry).unwrap().is_some());
    killed.kill().unwrap();
    killed.wait().unwrap();
    for output in [wait_with_output(first), wait_with_output(second)] {
        // The newest fences the others, which say so.
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 6)), "{code:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    json_of(&job, &["dlq", "replay", path, "--json"]);
    let replayed = job.read(&format!("{}.retry", job.name));
    let mut of: Vec<i64> =
        replayed.iter().map(|r| r.header("semel-replay-of").unwrap()[2..].parse().unwrap()).collect();
    let in_order = of.is_sorted();
    of.dedup();
    assert_eq!((replayed.len(), of.len(), in_order), (2500, 2500, true));
}

#[test]
fn a_letter_that_lies_there_twice_goes_back_once() {
    let Some(cluster) = support::broker("a letter written twice") else { return };
    let job = Job::new(cluster, "relayed", 1);
    let file = job.file(STRICT);
    let path = file.to_str().unwrap();
    job.produce("in", ["x", "y"].map(|_| Record { value: Some(br#"{"q":"x"}"#), ..Record::default() }));
    job.drain(&file);
    let relay = |letter: &Stored| {
        let headers = letter.headers.iter().map(|(n, v)| (&n[..], v.as_deref())).collect();
        job.produce("dead-letters", [Record { value: letter.value.as_deref(), headers, ..Record::default() }]);
    };
    let letters = job.read("dead-letters");
    let at = |letter: &Stored| format!("0:{}", letter.offset);
    relay(&letters[0]);
    let copy = at(&job.read("dead-letters")[2]);
    let (first, second) = (at(&letters[0]), at(&letters[1]));
    let replay = |args: &[&str]| {
        let done = json_of(&job, &[&["dlq", "replay", path, "--json"], args].concat());
        let why = done["left_out"].as_array().unwrap().iter().map(|l| l["why"].as_str().unwrap().to_owned()).collect();
        (addresses(&done, "replayed"), addresses(&done, "left_out"), why)
    };
    let same = vec!["another dead letter of the same rejection goes back".to_owned()];
    let expected = (vec![first.clone(), second.clone()], vec![copy.clone()], same);
    assert_eq!(replay(&["--dry-run"]), expected);
    assert_eq!(replay(&[]), expected);
    assert_eq!(replay(&["--again"]), expected);
    // Also one that comes later.
    relay(&letters[1]);
    let later = at(job.read("dead-letters").last().unwrap());
    let (replayed, left_out, _) = replay(&[&later]);
    assert_eq!((replayed, left_out), (vec![], vec![later]));
    assert_eq!(job.read(&format!("{}.retry", job.name)).len(), 4);
}
