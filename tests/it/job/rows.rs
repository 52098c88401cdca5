//! What becomes of records in a table: deletes by null values, empty values, and rows that the database refuses.

use super::harness::{Job, Record, Stored};
use crate::support;

const HEAD: &str = r#"
name = "NAME"
[kafka]
[sources.all]
type = "kafka"
topics = ["NAME.in"]
format = "json"
"#;

fn keyed<'a>(key: &'a str, value: Option<&'a str>) -> Record<'a> {
    Record { key: Some(key.as_bytes()), value: value.map(str::as_bytes), ..Record::default() }
}

fn reasons(letters: &[Stored]) -> Vec<&str> {
    letters.iter().map(|letter| letter.header("semel-error-reason").unwrap()).collect()
}

/// Cases S13, 09 and 35: a null value is a delete and an empty one is not, and an older record brings nothing back.
#[test]
fn a_null_value_deletes_a_row_an_empty_one_does_not_and_offsets_guard_while_keys_stay_in_their_partition() {
    let Some(cluster) = support::broker("null values towards a table") else { return };
    let job = Job::new(cluster, "nulls", 1);
    job.sql(
        "CREATE TABLE THE_TABLE (id text PRIMARY KEY, v bigint NOT NULL, n int, gone boolean NOT NULL DEFAULT false)",
    );
    let sink = r#"
[sinks.rows]
type = "postgres"
inputs = ["all"]
url = "${DATABASE_URL}"
table = "THE_TABLE"
key = ["id"]
version = "v"
columns = { id = "%key", v = "%offset" }
deleted = "gone"
tombstones = "delete"
"#;
    let file = job.file(&format!("{HEAD}{sink}"));
    let rows = || -> Vec<Vec<String>> {
        let rows = job.sql("SELECT id, v, n, gone FROM THE_TABLE ORDER BY id");
        rows.into_iter().map(|row| row.into_iter().map(Option::unwrap_or_default).collect()).collect()
    };
    job.produce("in", [keyed("k", Some(r#"{"n":1}"#)), keyed("j", Some(r#"{"n":2}"#)), keyed("k", None)]);
    job.drain(&file);
    assert_eq!(rows(), [["j", "1", "2", "f"], ["k", "2", "", "t"]]);
    job.produce("in", [keyed("j", Some("")), keyed("j", Some("null"))]);
    job.drain(&file);
    assert_eq!(rows(), [["j", "1", "2", "f"], ["k", "2", "", "t"]]);
    assert_eq!(reasons(&job.read("dead-letters")), ["undecodable"; 2]);

    // From here on a key may be in another partition, whose offsets begin at 0.
    job.admin.create_partitions(&job.topic("in"), 2).unwrap();
    job.produce("in", [Record { partition: 1, ..keyed("j", Some(r#"{"n":3}"#)) }]);
    let output = job.run_drain(&file);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("had 1 partitions when its records were first applied"), "{message}");
    assert_eq!(rows(), [["j", "1", "2", "f"], ["k", "2", "", "t"]]);
}

/// Case 12: whatever a constraint refuses is one letter with its own SQLSTATE, and its neighbours are rows.
#[test]
fn rows_that_constraints_refuse_are_letters_with_their_sqlstate_and_all_others_are_rows() {
    let Some(cluster) = support::broker("rows that constraints refuse") else { return };
    let job = Job::new(cluster, "bad-rows", 1);
    job.sql(
        "CREATE TABLE THE_TABLE (id text PRIMARY KEY, v bigint NOT NULL, n int CHECK (n >= 0), email text UNIQUE, \
         of text REFERENCES THE_TABLE (id))",
    );
    let sink = r#"
[sinks.rows]
type = "postgres"
inputs = ["all"]
url = "${DATABASE_URL}"
table = "THE_TABLE"
key = ["id"]
version = "v"
"#;
    let file = job.file(&format!("{HEAD}{sink}"));
    let record = |i: u64| match i {
        37 => format!(r#"{{"id":"{i}","v":1,"n":-1}}"#),
        60 => format!(r#"{{"id":"{i}","v":1,"n":{i},"email":"m1@x"}}"#),
        61 => format!(r#"{{"id":"{i}","v":1,"n":{i},"of":"nobody"}}"#),
        _ => format!(r#"{{"id":"{i}","v":1,"n":{i},"email":"m{i}@x"}}"#),
    };
    let records: Vec<String> = (0..100).map(record).collect();
    job.produce("in", records.iter().map(|text| Record { value: Some(text.as_bytes()), ..Record::default() }));
    job.drain(&file);
    assert_eq!(job.sql("SELECT count(*), sum(n) FROM THE_TABLE")[0], ["97", "4792"].map(|n| Some(n.to_owned())));
    let letters = job.read("dead-letters");
    assert_eq!(reasons(&letters), ["database"; 3]);
    for (letter, (offset, state)) in letters.iter().zip([("37", "23514"), ("60", "23505"), ("61", "23503")]) {
        assert_eq!(letter.header("semel-error-offset"), Some(offset));
        let message = letter.header("semel-error-message").unwrap();
        assert!(message.contains(state), "{message}");
    }
    assert_eq!(job.positions(&format!("{}.rows", job.name), "in"), [Some(100)]);
}
