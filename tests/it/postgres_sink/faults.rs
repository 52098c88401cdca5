//! Lost connections, deadlocks, time limits, and tables that change under the sink.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use semel::error::Exit;
use semel::sink::postgres::Address;
use semel::topology::spec::PostgresSink;

use super::fixture::{Database, PATIENCE, Session, Target, writer};
use super::proxy::{Cut, Proxy};

const TABLE: &str = "id text PRIMARY KEY, version int8 NOT NULL, amount int8";

/// A sink of three rows with a fourth that the database refuses, so that savepoints are at work too.
const RECORDS: [&str; 4] = [
    r#"{"id":"a","version":1,"amount":1}"#,
    r#"{"id":"b","version":1,"amount":2}"#,
    r#"{"id":"bad","version":1,"amount":-1}"#,
    r#"{"id":"c","version":1,"amount":3}"#,
];

fn eventually(what: &str, mut predicate: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !predicate() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_commit_that_gets_lost_is_done_again() {
    let Some(db) = Database::new("lost_commit") else { return };
    db.session.execute(&format!("CREATE TABLE t ({TABLE} CHECK (amount > 0))"));
    let config = Address::parse(&db.url, "x").unwrap().config;
    let port = config.get_ports().first().copied().unwrap_or(5432);
    let server = std::net::ToSocketAddrs::to_socket_addrs(&("127.0.0.1", port)).unwrap().next().unwrap();
    for cut in [Cut::Before, Cut::After] {
        for records in [&RECORDS[..2], &RECORDS[..]] {
            db.session.execute("TRUNCATE t");
            let proxy = Proxy::start(server, cut, 3);
            let mut sink = db.sink("t");
            let place = format!("127.0.0.1:{port}");
            sink.url = sink
                .url
                .replace(&place, &proxy.address.to_string())
                .replace(&format!("localhost:{port}"), &proxy.address.to_string());
            let mut target = Target::new(sink).unwrap();
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
    let waiting = "FROM pg_stat_activity WHERE application_name = 'semel-test' AND wait_event_type = 'Lock' AND query LIKE \
                   '%terminated%'";
    for _ in 0..3 {
        eventually("the writer waits for the row", || db.session.value(&format!("SELECT count(*) {waiting}")) == "1");
        db.session.rows(&format!("SELECT pg_terminate_backend(pid) {waiting}"));
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
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'semel-test' AND wait_event_type = 'Lock' \
                 AND query LIKE '%deadlock_%'";
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
            "sink sink: 3 records rejected within a minute, and max_rejects_per_minute is 2; the last one: 23514 new row"
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
        "CREATE FUNCTION hurry() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           IF (SELECT count(*) FROM added) > 2 THEN RAISE 'too much' USING ERRCODE = '57014'; END IF; RETURN NULL; END $$; \
         CREATE TRIGGER hurry AFTER INSERT ON t REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION hurry()",
    );
    let records: Vec<String> = (0..8).map(|i| format!(r#"{{"id":"{i}","version":1}}"#)).collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    assert_eq!(target.write(&records, 8).rows, 8);
    assert_eq!(target.writer.status().counts().retries, 3, "all 8 twice, 4 once, then 2 at a time");
}
