//! Lost connections, deadlocks, time limits, and tables that change under the sink.

use std::net::TcpListener;
use std::time::Duration;

use semel::error::Exit;
use semel::topology::spec::{Ledger, Mode, PostgresSink};

use super::fixture::{Database, PASSES, PATIENCE, Session, Target, writer};
use super::proxy::{Cut, Proxy};
use crate::support;
use semel::sink::postgres::Address;

const TABLE: &str = "id text PRIMARY KEY, version int8 NOT NULL, amount int8";

/// A sink of three rows with a fourth that the database refuses, so that savepoints are at work too.
const RECORDS: [&str; 4] = [
    r#"{"id":"a","version":1,"amount":1}"#,
    r#"{"id":"b","version":1,"amount":2}"#,
    r#"{"id":"bad","version":1,"amount":-1}"#,
    r#"{"id":"c","version":1,"amount":3}"#,
];

fn eventually(what: &str, predicate: impl FnMut() -> bool) {
    support::eventually(PATIENCE, what, predicate);
}

#[test]
fn a_commit_that_gets_lost_is_done_again() {
    let Some(db) = Database::new("lost_commit") else { return };
    db.session.execute(&format!("CREATE TABLE t ({TABLE} CHECK (amount > 0))"));
    for cut in [Cut::Before, Cut::After] {
        for records in [&RECORDS[..2], &RECORDS[..]] {
            db.session.execute("TRUNCATE t");
            let proxy = Proxy::to(&db.url, cut, 3);
            let mut target = Target::new(PostgresSink { url: proxy.url(&db.url), ..db.sink("t") }).unwrap();
            let summary = target.write(records, 4);
            assert!(proxy.done());
            // What was committed already is stale the next time.
            let expected = if cut == Cut::Before { (records.len().min(3), 0) } else { (0, records.len().min(3)) };
            assert_eq!((summary.rows as usize, summary.stale as usize), expected, "{cut:?}");
            assert_eq!(summary.ties, 0);
            assert_eq!(summary.rejects.len(), records.len() - records.len().min(3));
            assert_eq!(target.writer.status().counts().retries, 3);
            assert_eq!(db.table(), ["a|1|1", "b|1|2", "c|1|3"][..records.len().min(3)]);
        }
    }
}

/// Case 18, with an effect that no guard makes harmless.
#[test]
fn a_lost_commit_adds_once_with_a_ledger() {
    let Some(db) = Database::new("lost_sum") else { return };
    db.session.execute(
        "CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL CHECK (n < 1000)); \
         CREATE TABLE seen (event_id uuid PRIMARY KEY, seen_at timestamptz NOT NULL DEFAULT now())",
    );
    let records: Vec<String> = (0..12).map(|i| format!(r#"{{"event":"e{i}","id":"{}","n":{i}}}"#, i % 2)).collect();
    let mut records: Vec<&str> = records.iter().map(String::as_str).collect();
    // One that the database refuses, so that savepoints are at work too.
    records.push(r#"{"event":"e12","id":"0","n":1000}"#);
    for cut in [Cut::Before, Cut::After] {
        for records in [&records[..12], &records[..]] {
            db.session.execute("TRUNCATE t, seen");
            let proxy = Proxy::to(&db.url, cut, 2);
            let ledger = Ledger { table: format!("{}.seen", db.schema), retention: Duration::from_secs(86_400) };
            let sink = PostgresSink {
                url: proxy.url(&db.url),
                mode: Mode::Add,
                version: None,
                dedupe: Some(ledger),
                ..db.sink("t")
            };
            let mut target = Target::new(sink).unwrap();
            let summary = target.write(records, 13);
            assert!(proxy.done());
            assert_eq!((summary.rows + summary.duplicates, summary.rejects.len()), (12, records.len() - 12), "{cut:?}");
            assert_eq!(target.writer.status().counts().retries, 2);
            assert_eq!(db.table(), ["0|30", "1|36"], "{cut:?}");
            assert_eq!(db.session.value("SELECT count(*) FROM seen"), "12");
        }
    }
}

/// Something between here and the server keeps a connection open that it has lost: no silent stall.
#[test]
fn a_commit_that_is_never_answered_is_done_again() {
    let Some(db) = Database::new("unanswered") else { return };
    db.session.execute(
        "CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL); \
         CREATE TABLE seen (event_id uuid PRIMARY KEY, seen_at timestamptz NOT NULL DEFAULT now())",
    );
    let proxy = Proxy::to(&db.url, Cut::Before, 0);
    let ledger = Ledger { table: format!("{}.seen", db.schema), retention: Duration::from_secs(86_400) };
    let url = proxy.url(&db.url);
    let sink = PostgresSink { url, mode: Mode::Add, version: None, dedupe: Some(ledger), ..db.sink("t") };
    let mut target = Target::new(sink).unwrap();
    proxy.next(Cut::Silent, 1);
    target.writer.submit(target.batch(&[r#"{"event":"e1","id":"a","n":1}"#]));
    eventually("it says so", || {
        target.writer.status().waiting().is_some_and(|w| w.reason.contains("no answer within 45 s"))
    });
    assert_eq!(target.answer().unwrap().rows, 1);
    assert_eq!(db.table(), ["a|1"]);
}

/// A sum has no guard that would make the half of a batch harmless.
#[test]
fn a_sum_that_is_tried_again_is_added_once() {
    let Some(db) = Database::new("tried_again") else { return };
    db.session.execute(
        "CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL); \
         CREATE TABLE seen (event_id uuid PRIMARY KEY, seen_at timestamptz NOT NULL DEFAULT now())",
    );
    let records: Vec<String> = (0..6).map(|i| format!(r#"{{"event":"e{i}","id":"{}","n":{i}}}"#, i % 2)).collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    let ledger = Ledger { table: format!("{}.seen", db.schema), retention: Duration::from_secs(86_400) };
    let sink = PostgresSink { mode: Mode::Add, version: None, dedupe: Some(ledger), ..db.sink("t") };
    for sqlstate in PASSES {
        db.session.execute("TRUNCATE t, seen");
        let mut target = Target::new(sink.clone()).unwrap();
        db.refuses_twice(sqlstate);
        let summary = target.write(&records, 6);
        assert_eq!((summary.rows, summary.duplicates, summary.rejects.len()), (6, 0, 0), "{sqlstate}");
        assert_eq!(target.writer.status().counts().retries, 2, "{sqlstate}");
        assert_eq!(db.table(), ["0|6", "1|9"], "{sqlstate}");
        assert_eq!(db.session.value("SELECT count(*) FROM seen"), "6", "{sqlstate}");
        db.session.execute("DROP TRIGGER refuse ON t");
    }
}

/// A server that takes no writes for a while: nothing is written, nothing is rejected, and no success is told.
#[test]
fn a_server_that_is_read_only_for_a_while_is_waited_for() {
    let Some(db) = Database::new("read_only") else { return };
    let role = format!("{}_role", db.schema);
    db.session.execute(&format!(
        "CREATE TABLE t ({TABLE}); CREATE ROLE {role} SUPERUSER LOGIN PASSWORD 'x'; GRANT ALL ON SCHEMA {} TO {role}",
        db.schema
    ));
    let place = db.url.rsplit_once('@').map_or_else(|| db.url.split_once("://").unwrap().1, |(_, place)| place);
    let sink = PostgresSink { url: format!("postgres://{role}:x@{place}"), ..db.sink("t") };
    let mut target = Target::new(sink).unwrap();
    assert_eq!(target.write(&RECORDS[..1], 1).rows, 1);
    // As after a failover: the session that is there, and every new one, can only read.
    db.session.execute(&format!("ALTER ROLE {role} SET default_transaction_read_only = on"));
    let backends = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'");
    db.session.rows(&backends);
    target.writer.submit(target.batch(&RECORDS[1..2]));
    eventually("it waits", || target.writer.status().waiting().is_some_and(|w| w.attempts > 2));
    assert!(target.writer.poll(Duration::ZERO).is_none());
    let reason = target.writer.status().waiting().unwrap().reason;
    assert!(reason.contains("does not allow writes"), "{reason}");
    assert_eq!(db.table(), ["a|1|1"]);
    db.session.execute(&format!("ALTER ROLE {role} RESET default_transaction_read_only"));
    db.session.rows(&backends);
    assert_eq!(target.answer().unwrap().rows, 1);
    assert_eq!(db.table(), ["a|1|1", "b|1|2"]);
    drop(target);
    db.session
        .execute(&format!("REVOKE ALL ON SCHEMA {} FROM {role}; DROP OWNED BY {role}; DROP ROLE {role}", db.schema));
}

/// As a trigger at a stricter isolation would meet it: the whole batch again.
#[test]
fn a_serialization_failure_is_tried_again_as_a_whole() {
    let Some(db) = Database::new("serialization") else { return };
    db.session.execute(&format!(
        "CREATE TABLE t ({TABLE}); CREATE SEQUENCE tries; CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS \
         $$ BEGIN IF nextval('{}.tries') < 3 THEN RAISE 'could not serialize access' USING ERRCODE = '40001'; END IF; \
         RETURN NULL; END $$; ",
        db.schema
    ));
    let mut target = Target::new(db.sink("t")).unwrap();
    db.session
        .execute("CREATE TRIGGER refuse AFTER INSERT ON t FOR EACH ROW WHEN (new.id = 'b') EXECUTE FUNCTION refuse()");
    let summary = target.write(&RECORDS, 4);
    assert_eq!((summary.rows, summary.rejects), (4, Vec::new()));
    assert_eq!(target.writer.status().counts().retries, 2);
    assert_eq!(db.table(), ["a|1|1", "b|1|2", "bad|1|-1", "c|1|3"]);
}

#[test]
fn a_terminated_backend_costs_nothing_but_time() {
    let Some(db) = Database::new("terminated") else { return };
    let mut target = db.target(TABLE);
    target.write(&RECORDS[..2], 2);
    // Hold a row, so that the writer stands in the middle of its transaction when its backend is killed.
    let holder = Session::open(&db.url);
    holder.execute(&format!("BEGIN; SELECT * FROM {}.t WHERE id = 'b' FOR UPDATE", db.schema));
    let newer: Vec<String> = RECORDS[..2].iter().map(|r| r.replace("\"version\":1", "\"version\":2")).collect();
    let newer: Vec<&str> = newer.iter().map(String::as_str).collect();
    target.writer.submit(target.batch(&newer));
    let waiting = "FROM pg_stat_activity WHERE application_name = 'semel-test' AND wait_event_type = 'Lock' AND query \
                   LIKE '%terminated%'";
    for _ in 0..3 {
        let mut pid = String::new();
        eventually("the writer waits for the row", || {
            pid = db.session.value(&format!("SELECT pid {waiting}"));
            !pid.is_empty()
        });
        db.session.rows(&format!("SELECT pg_terminate_backend({pid})"));
        eventually("the backend is gone", || {
            db.session.value(&format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}")) == "0"
        });
    }
    holder.execute("COMMIT");
    let applied = target.answer().unwrap();
    assert_eq!((applied.rows, applied.stale), (2, 0));
    assert!(target.writer.status().counts().retries >= 3);
    assert!(target.writer.status().waiting().is_none());
    assert_eq!(db.table(), ["a|2|1", "b|2|2"]);
}

#[test]
fn a_deadlock_is_tried_again_as_a_whole() {
    let Some(db) = Database::new("deadlock") else { return };
    let mut target = db.target(TABLE);
    target.write(&RECORDS[..2], 2);
    // The other session locks in the wrong order and is patient, so that the writer is the victim.
    let other = Session::open(&db.url);
    other.execute("SET deadlock_timeout = '30s'");
    other.execute(&format!("BEGIN; UPDATE {}.t SET amount = 7 WHERE id = 'b'", db.schema));
    let newer: Vec<String> = RECORDS[..2].iter().map(|r| r.replace("\"version\":1", "\"version\":2")).collect();
    target.writer.submit(target.batch(&[&newer[0], &newer[1]]));
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'semel-test' AND wait_event_type = \
                 'Lock' AND query LIKE '%deadlock_%'";
    eventually("the writer waits for b", || db.session.value(waits) == "1");
    other.execute(&format!("UPDATE {}.t SET amount = 7 WHERE id = 'a'; COMMIT", db.schema));
    let applied = target.answer().unwrap();
    assert_eq!((applied.rows, applied.rejects.len()), (2, 0));
    assert_eq!(target.writer.status().counts().retries, 1);
    assert_eq!(db.table(), ["a|2|1", "b|2|2"]);
}

#[test]
fn two_writers_on_the_same_keys_never_deadlock() {
    let Some(db) = Database::new("two_writers") else { return };
    db.session.execute(&format!("CREATE TABLE t ({TABLE})"));
    std::thread::scope(|scope| {
        for descending in [false, true] {
            let mut target = Target::new(db.sink("t")).unwrap();
            scope.spawn(move || {
                for version in 1..=200 {
                    let mut records: Vec<String> = (0..50)
                        .map(|i| format!(r#"{{"id":"{i:02}","version":{version},"amount":{version}}}"#))
                        .collect();
                    if descending {
                        records.reverse();
                    }
                    let records: Vec<&str> = records.iter().map(String::as_str).collect();
                    let summary = target.write(&records, 50);
                    assert_eq!((summary.rows + summary.stale, summary.ties), (50, 0));
                }
                assert_eq!(target.writer.status().counts().retries, 0);
            });
        }
    });
    assert_eq!(db.session.value("SELECT count(*), min(version), max(amount) FROM t"), "50|200|200");
}

#[test]
fn a_table_that_goes_or_changes_stops_the_stage_without_a_reject() {
    let Some(db) = Database::new("changed") else { return };
    for (change, words) in [
        ("DROP TABLE t", "42P01 relation \"{}.t\" does not exist"),
        ("ALTER TABLE t DROP COLUMN amount", "42703 column \"amount\" of relation \"t\" does not exist"),
        ("ALTER TABLE t DROP CONSTRAINT t_pkey", "42P10 there is no unique or exclusion constraint matching"),
    ] {
        for prepared in [true, false] {
            db.session.execute(&format!("DROP TABLE IF EXISTS t; CREATE TABLE t ({TABLE})"));
            let mut target = Target::new(PostgresSink { prepared, ..db.sink("t") }).unwrap();
            assert_eq!(target.write(&RECORDS[..1], 1).rows, 1);
            db.session.execute(change);
            target.writer.submit(target.batch(&RECORDS[1..]));
            let failure = target.answer().unwrap_err();
            assert_eq!(failure.exit, Exit::Stopped);
            let words = words.replace("{}", &db.schema);
            assert!(failure.message.starts_with(&format!("sink sink: table {}.t: {words}", db.schema)), "{failure}");
            // The writer is done; whoever asks again is told so.
            target.writer.submit(target.batch(&RECORDS[..1]));
            assert_eq!(target.answer().unwrap_err().message, "the Postgres writer has ended");
        }
    }
}

#[test]
fn a_missing_partition_stops_the_stage_for_no_record_is_to_blame() {
    let Some(db) = Database::new("partitions") else { return };
    let mut target = db.target(&format!("{TABLE}) PARTITION BY RANGE (id"));
    db.session.execute("CREATE TABLE t_a PARTITION OF t FOR VALUES FROM ('a') TO ('b')");
    assert_eq!(target.write(&RECORDS[..1], 1).rows, 1);
    target.writer.submit(target.batch(&RECORDS[..2]));
    let failure = target.answer().unwrap_err();
    assert_eq!(failure.exit, Exit::Stopped);
    assert!(failure.message.contains("23514 no partition of relation \"t\" found for row"), "{failure}");
    assert_eq!(db.table(), ["a|1|1"]);
}

#[test]
fn too_many_rejects_stop_the_stage_before_anything_is_committed() {
    let Some(db) = Database::new("breaker") else { return };
    db.session.execute(&format!("CREATE TABLE t ({TABLE} CHECK (amount > 0))"));
    let sink = PostgresSink { max_rejects_per_minute: 2, ..db.sink("t") };
    let mut target = Target::new(sink).unwrap();
    let bad: Vec<String> = (0..3).map(|i| format!(r#"{{"id":"x{i}","version":1,"amount":0}}"#)).collect();
    assert_eq!(target.write(&[RECORDS[0], &bad[0]], 2).rejects.len(), 1);
    target.writer.submit(target.batch(&[RECORDS[1], &bad[1], &bad[2]]));
    let failure = target.answer().unwrap_err();
    assert_eq!(failure.exit, Exit::Stopped);
    assert!(
        failure.message.starts_with(
            "sink sink: 3 records rejected within a minute, and max_rejects_per_minute is 2; the last one: 23514 new \
             row"
        ),
        "{failure}"
    );
    assert_eq!(db.table(), ["a|1|1"]);
}

#[test]
fn a_writer_whose_database_is_away_says_so_and_lets_go_at_once() {
    let Some(db) = Database::new("let_go") else { return };
    db.session.execute(&format!("CREATE TABLE t ({TABLE})"));
    let target = Target::new(db.sink("t")).unwrap();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut checked = target.checked.clone();
    checked.address = Address::parse(&format!("postgres://u@{nobody}/d"), "x").unwrap();
    let mut away = writer(&checked, &db.sink("t"));
    away.submit(target.batch(&RECORDS[..1]));
    let status = std::sync::Arc::clone(away.status());
    eventually("it waits", || status.waiting().is_some_and(|w| w.attempts > 5));
    let reason = status.waiting().unwrap().reason;
    assert!(reason.contains("Connection refused"), "{reason}");
    assert!(away.poll(Duration::ZERO).is_none());
    let weak = std::sync::Arc::downgrade(&status);
    drop((away, status));
    // The thread holds the last one.
    eventually("the thread ends", || weak.upgrade().is_none());
}

#[test]
fn a_statement_over_its_time_limit_is_sent_in_parts() {
    let Some(db) = Database::new("too_slow") else { return };
    // A server to which more than two rows a statement are too much.
    db.session.execute(&format!("CREATE TABLE t ({TABLE})"));
    let mut target = Target::new(db.sink("t")).unwrap();
    db.session.execute(
        "CREATE FUNCTION hurry() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF (SELECT count(*) FROM added) > 2 \
         THEN RAISE 'too much' USING ERRCODE = '57014'; END IF; RETURN NULL; END $$; CREATE TRIGGER hurry AFTER \
         INSERT ON t REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION hurry()",
    );
    let records: Vec<String> = (0..8).map(|i| format!(r#"{{"id":"{i}","version":1}}"#)).collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    assert_eq!(target.write(&records, 8).rows, 8);
    assert_eq!(target.writer.status().counts().retries, 3, "all 8 twice, 4 once, then 2 at a time");
}
