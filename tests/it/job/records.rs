//! What records are made of goes through untouched, and what cannot be processed goes to the dead letters, once.

use std::time::{SystemTime, UNIX_EPOCH};

use super::harness::{Job, Record, Stored};
use crate::support;

const COPY: &str = r#"
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
"#;

fn value(text: &str) -> Record<'_> {
    Record { value: Some(text.as_bytes()), ..Record::default() }
}

fn values(records: &[Stored]) -> Vec<Option<&str>> {
    records.iter().map(|r| r.value.as_deref().map(|v| std::str::from_utf8(v).unwrap())).collect()
}

#[test]
fn numbers_text_and_order_pass_digit_for_digit() {
    let Some(cluster) = support::broker("numbers digit for digit") else { return };
    let job = Job::new(cluster, "digits", 1);
    let text = COPY.replace(
        "[sinks.out]\ntype = \"kafka\"\ninputs = [\"all\"]",
        "[transforms.t]\ntype = \"remap\"\ninputs = [\"all\"]\nsource = '.n = to_int!(.q) + 1'\n\
         [sinks.out]\ntype = \"kafka\"\ninputs = [\"t\"]",
    );
    let file = job.file(&text);
    let input = r#"{ "id":9007199254740993,"big":123456789012345678901234567890,"u":18446744073709551615 ,"e":1e3,"d":0.10,"s":"\u00e9\/","q":1}"#;
    job.produce("in", [value(input)]);
    job.drain(&file);
    let expected = r#"{"id":9007199254740993,"big":123456789012345678901234567890,"u":18446744073709551615,"e":1e3,"d":0.10,"s":"\u00e9\/","q":1,"n":2}"#;
    assert_eq!(values(&job.read("out")), [Some(expected)]);
}

#[test]
fn null_empty_and_repeated_stay_apart() {
    let Some(cluster) = support::broker("null and empty") else { return };
    let job = Job::new(cluster, "empty", 1);
    let file = job.file(COPY);
    let headers: Vec<(&[u8], Option<&[u8]>)> =
        vec![(b"a", Some(b"1")), (b"a", Some(b"2")), (b"b", None), (b"c", Some(b"")), (b"\xff\xfe", Some(b"\xff"))];
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64;
    let record =
        |key, value, timestamp| Record { key, value, headers: headers.clone(), timestamp, ..Record::default() };
    job.produce(
        "in",
        [
            record(None, Some(&b"{}"[..]), Some(now - 5)),
            record(Some(&b""[..]), Some(&b"{}"[..]), Some(now - 4)),
            record(Some(&b"k"[..]), None, Some(now - 3)),
            record(Some(&b"k"[..]), Some(&b""[..]), Some(now - 2)),
            record(Some(&b"k"[..]), Some(&b"null"[..]), Some(now - 1)),
        ],
    );
    job.drain(&file);
    let out = job.read("out");
    let wanted: Vec<(Vec<u8>, Option<Vec<u8>>)> =
        headers.iter().map(|(n, v)| (n.to_vec(), v.map(<[u8]>::to_vec))).collect();
    let shape: Vec<_> = out.iter().map(|r| (r.key.as_deref(), r.value.as_deref(), r.timestamp)).collect();
    assert_eq!(
        shape,
        [
            (None, Some(&b"{}"[..]), Some(now - 5)),
            (Some(&b""[..]), Some(&b"{}"[..]), Some(now - 4)),
            (Some(&b"k"[..]), None, Some(now - 3)),
        ]
    );
    assert!(out.iter().all(|r| r.headers == wanted), "{out:?}");
    let letters = job.read("dead-letters");
    let shape: Vec<_> = letters.iter().map(|r| (r.key.as_deref(), r.value.as_deref(), r.timestamp)).collect();
    assert_eq!(
        shape,
        [(Some(&b"k"[..]), Some(&b""[..]), Some(now - 2)), (Some(&b"k"[..]), Some(&b"null"[..]), Some(now - 1)),]
    );
    assert!(
        letters.iter().all(|r| r.headers[..5] == wanted[..] && r.header("semel-error-reason") == Some("undecodable"))
    );
}

#[test]
fn poison_is_rejected_once_with_its_position_and_neighbours_are_right() {
    let Some(cluster) = support::broker("poison records") else { return };
    let job = Job::new(cluster, "poison", 2);
    let file = job.file(COPY);
    let brackets = vec![b'['; 900_000];
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(200), "]".repeat(200));
    let poison: Vec<&[u8]> = vec![
        b"not json",
        &brackets,
        deep.as_bytes(),
        br#""a string""#,
        br#"{"a":1,"a":2}"#,
        br#"{"a":1,"\u0061":2}"#,
        br#"{"a":"\ud800"}"#,
        b"{\"a\":\"\xff\"}",
        br#"{"a":1} x"#,
    ];
    for bad in &poison {
        job.produce("in", [value(r#"{"good":1}"#), Record { value: Some(bad), ..Record::default() }]);
    }
    // The last record of its partition is poison, and the other partition holds nothing else.
    job.produce("in", [Record { partition: 1, value: Some(b"not json"), ..Record::default() }]);
    for _ in 0..3 {
        job.drain(&file);
        let letters = job.read("dead-letters");
        let reasons: Vec<_> = letters.iter().map(|l| l.header("semel-error-reason").unwrap()).collect();
        assert_eq!(reasons, ["undecodable"; 10]);
        let offsets: Vec<_> = letters.iter().map(|l| l.header("semel-error-offset").unwrap()).collect();
        assert_eq!(offsets, ["1", "3", "5", "7", "9", "11", "13", "15", "17", "0"]);
        assert_eq!(values(&job.read("out")), [Some(r#"{"good":1}"#); 9]);
        assert_eq!(job.positions(&job.name, "in"), [Some(18), Some(1)]);
    }
    // A letter keeps its record's time, however old.
    let letters = job.admin.topic(&job.topic("dead-letters")).unwrap().unwrap();
    assert_eq!(letters.retention_ms, -1);
}

#[test]
fn five_megabytes_of_brackets_are_one_dead_letter() {
    if !support::online("5 MB of [") {
        return;
    }
    let cluster = support::private_cluster(&[("message.max.bytes", "6000000")]);
    let job = Job::new(&cluster, "brackets", 1);
    let file = job.file(COPY);
    let brackets = vec![b'['; 5_000_000];
    job.produce(
        "in",
        [value(r#"{"a":1}"#), Record { value: Some(&brackets), ..Record::default() }, value(r#"{"a":2}"#)],
    );
    job.drain(&file);
    assert_eq!(values(&job.read("out")), [Some(r#"{"a":1}"#), Some(r#"{"a":2}"#)]);
    let letters = job.read("dead-letters");
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].value.as_deref(), Some(&brackets[..]));
}

#[test]
fn a_null_key_towards_a_compacted_topic_is_rejected_and_nothing_loops() {
    let Some(cluster) = support::broker("null keys and a compacted topic") else { return };
    let job = Job::new(cluster, "compacted", 1);
    let file = job.file(&COPY.replace(
        "create = { partitions = 1 }",
        "create = { partitions = 1, config = { \"cleanup.policy\" = \"compact\" } }",
    ));
    let keyed = |key: &'static [u8]| Record { key: Some(key), ..value(r#"{"a":1}"#) };
    job.produce("in", [keyed(b"k"), value(r#"{"a":2}"#), keyed(b"")]);
    let report = job.drain(&file);
    assert_eq!(report["stages"][0]["aborts"], 0);
    assert_eq!(values(&job.read("out")), [Some(r#"{"a":1}"#), Some(r#"{"a":1}"#)]);
    let letters = job.read("dead-letters");
    assert_eq!(letters.iter().map(|l| l.header("semel-error-reason")).collect::<Vec<_>>(), [Some("null-key")]);
}

#[test]
fn what_the_broker_refuses_is_found_and_rejected_alone() {
    let Some(cluster) = support::broker("a record that the broker refuses") else { return };
    let job = Job::new(cluster, "refused", 1);
    let file = job.file(COPY);
    job.drain(&file);
    let process = job.start(&file);
    support::eventually(super::harness::PATIENCE, "the job runs", || process.log().contains("assigned"));
    // The job knows the topic's limit from its start; the broker's is lowered behind its back.
    lower_limit(&job);
    let large = format!("{{\"a\":\"{}\"}}", random_text(40_000));
    let records: Vec<String> =
        (0..300).map(|i| if i == 137 { large.clone() } else { format!("{{\"i\":{i}}}") }).collect();
    job.produce("in", records.iter().map(|text| value(text)));
    support::eventually(super::harness::PATIENCE, "all is through", || job.positions(&job.name, "in") == [Some(300)]);
    process.stop();
    let good: Vec<Option<&str>> = records.iter().filter(|r| **r != large).map(|r| Some(r.as_str())).collect();
    assert_eq!(values(&job.read("out")), good);
    let letters = job.read("dead-letters");
    assert_eq!(letters.iter().map(|l| l.header("semel-error-offset")).collect::<Vec<_>>(), [Some("137")]);
    assert_eq!(letters[0].header("semel-error-reason"), Some("broker"));
}

/// Lowers the limit of the topic `out` behind a job's back.
pub fn lower_limit(job: &Job) {
    use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, ResourceSpecifier};
    let topic = job.topic("out");
    let mut config = rdkafka::ClientConfig::new();
    let admin: AdminClient<_> = config.set("bootstrap.servers", &job.brokers).create().unwrap();
    let alter = AlterConfig::new(ResourceSpecifier::Topic(&topic)).set("max.message.bytes", "20000");
    let results = futures::executor::block_on(admin.alter_configs([&alter], &AdminOptions::new())).unwrap();
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

/// Text that does not compress below the limit.
pub fn random_text(len: usize) -> String {
    let mut state = 1_u64;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            char::from(b'a' + ((state >> 33) % 26) as u8)
        })
        .collect()
}
