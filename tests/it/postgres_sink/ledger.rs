//! The ledger: an event has its effect once, whoever brings it again.

use std::time::{SystemTime, UNIX_EPOCH};

use semel::sink::postgres::Connection;
use semel::topology::spec::{Ledger, Mode, PostgresSink};

use super::fixture::{Database, Session, Summary, Target, check};
use crate::support;

use super::fixture::PATIENCE;

const FLAT: &str = "CREATE TABLE seen (event_id uuid PRIMARY KEY, seen_at timestamptz NOT NULL DEFAULT now())";
const BY_DAY: &str = "CREATE TABLE seen (event_id uuid PRIMARY KEY) PARTITION BY RANGE (event_id)";
const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);

fn sink(db: &Database, mode: Mode) -> PostgresSink {
    let ledger = Ledger { table: format!("{}.seen", db.schema), retention: 3 * DAY };
    let version = (mode == Mode::Upsert).then(|| "version".into());
    let key = if mode == Mode::Insert { Vec::new() } else { vec!["id".into()] };
    PostgresSink { mode, key, version, dedupe: Some(ledger), ..db.sink("t") }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// An id of version 7 of so many days ago.
fn id(days_ago: i64, n: u64) -> String {
    let ms = (now_ms() as i64 - days_ago * DAY.as_millis() as i64) as u64;
    uuid::Builder::from_unix_timestamp_millis(ms, &[(n >> 8) as u8, n as u8, 0, 0, 0, 0, 0, 0, 0, 0])
        .into_uuid()
        .to_string()
}

#[test]
fn an_event_adds_once_at_every_batch_size_and_again_never() {
    let Some(db) = Database::new("ledger_add") else { return };
    for ledger in [FLAT, BY_DAY] {
        db.session.execute(&format!(
            "DROP TABLE IF EXISTS t, seen; CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL); {ledger}"
        ));
        // 40 events, every fourth sent twice.
        let events: Vec<String> = (0..50)
            .map(|i| {
                let event = if i % 5 == 4 { i - 1 } else { i };
                format!(r#"{{"event":"{}","id":"k{}","n":{}}}"#, id(event % 3, event as u64), event % 4, event)
            })
            .collect();
        let expected: Vec<String> = (0..4_i64)
            .map(|key| {
                let of_key = (0..50_i64).filter(|i| i % 5 != 4 && i % 4 == key);
                format!("k{key}|{}", of_key.sum::<i64>())
            })
            .collect();
        let events: Vec<&str> = events.iter().map(String::as_str).collect();
        for size in [1, 3, 50] {
            db.session.execute("TRUNCATE t, seen");
            let mut target = Target::new(sink(&db, Mode::Add)).unwrap();
            let summary = target.write(&events, size);
            assert_eq!(summary, Summary { rows: 40, duplicates: 10, ..Summary::default() }, "{size}");
            assert_eq!(target.write(&events, size), Summary { duplicates: 50, ..Summary::default() });
            assert_eq!(db.table(), expected, "{ledger} {size}");
            assert_eq!(db.session.value("SELECT count(*) FROM seen"), "40");
        }
    }
}

/// Case 01: one batch, a key several times; every event is recorded as seen, also those that a newer one stands before.
#[test]
fn all_events_of_a_batch_are_recorded_also_those_that_were_superseded() {
    let Some(db) = Database::new("ledger_seen") else { return };
    db.session.execute(&format!("CREATE TABLE t (id text PRIMARY KEY, version int8 NOT NULL); {FLAT}"));
    let records: Vec<String> = [("a", 1), ("a", 3), ("a", 2), ("b", 1), ("b", 1)]
        .iter()
        .enumerate()
        .map(|(i, (key, version))| format!(r#"{{"event":"e{i}","id":"{key}","version":{version}}}"#))
        .collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    for size in [1, 5] {
        db.session.execute("TRUNCATE t, seen");
        let mut target = Target::new(sink(&db, Mode::Upsert)).unwrap();
        assert_eq!(target.write(&records, size).rejects, []);
        assert_eq!(db.table(), ["a|3", "b|1"]);
        assert_eq!(db.session.value("SELECT count(*) FROM seen"), "5");
    }
}

#[test]
fn a_rejected_record_leaves_no_row_in_the_ledger_and_its_twin_has_its_turn() {
    let Some(db) = Database::new("ledger_reject") else { return };
    db.session.execute(&format!("CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL CHECK (n < 100)); {FLAT}"));
    let records = [
        r#"{"event":"e1","id":"a","n":1}"#,
        r#"{"event":"e2","id":"a","n":1000}"#,
        r#"{"event":"e3","id":"b","n":2}"#,
        // The same event with a value that can be stored, and once more.
        r#"{"event":"e2","id":"a","n":5}"#,
        r#"{"event":"e2","id":"a","n":5}"#,
    ];
    for size in [1, 5] {
        db.session.execute("TRUNCATE t, seen");
        let mut target = Target::new(sink(&db, Mode::Add)).unwrap();
        let summary = target.write(&records, size);
        let refused: Vec<usize> = summary.rejects.iter().map(|(at, _)| *at).collect();
        assert_eq!((summary.rows, summary.duplicates, &refused[..]), (3, 1, &[1][..]), "{size}");
        assert_eq!(db.table(), ["a|6", "b|2"]);
        assert_eq!(db.session.value("SELECT count(*) FROM seen"), "3");
    }
    db.session.execute("TRUNCATE t, seen");
    let mut target = Target::new(sink(&db, Mode::Add)).unwrap();
    assert_eq!(target.write(&records[1..2], 1).rejects.len(), 1);
    assert_eq!(db.session.value("SELECT count(*) FROM seen"), "0");
}

#[test]
fn partitions_are_made_ahead_and_ids_outside_them_are_rejected() {
    let Some(db) = Database::new("ledger_days") else { return };
    db.session.execute(&format!("CREATE TABLE t (id text, n int8); {BY_DAY}"));
    let mut target = Target::new(sink(&db, Mode::Insert)).unwrap();
    let record = |event: &str| format!(r#"{{"event":"{event}","id":"a","n":1}}"#);
    let records =
        [record(&id(0, 1)), record(&id(3, 2)), record(&id(5, 3)), record(&id(-2, 4)), record(&id(-4, 5)), record("x")];
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    target.writer.submit(target.batch(&records));
    let applied = target.answer().unwrap();
    let rejects: Vec<_> = applied.rejects.iter().map(|(at, reject)| (*at, reject.reason)).collect();
    assert_eq!(rejects, [(2, "outside-ledger"), (4, "outside-ledger"), (5, "outside-ledger")]);
    assert_eq!(applied.rows, 3);
    let partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'seen'::regclass";
    assert_eq!(db.session.value(partitions), "6", "three days back, today, two ahead");
    // A second process finds them there.
    assert_eq!(Target::new(sink(&db, Mode::Insert)).unwrap().write(&records[..2], 2).duplicates, 2);
    assert_eq!(db.session.value(partitions), "6");
}

#[test]
fn old_partitions_go_also_those_that_a_crash_left_half_detached() {
    let Some(db) = Database::new("ledger_old") else { return };
    db.session.execute(&format!(
        "CREATE TABLE t (id text, n int8); {BY_DAY}; CREATE TABLE seen_p20200101 PARTITION OF seen FOR VALUES FROM \
         ('016f5e66-e800-0000-0000-000000000000') TO ('016f638d-4400-0000-0000-000000000000'); \
         CREATE TABLE seen_p20200102 (LIKE seen); CREATE TABLE seen_p20200103 (LIKE seen); CREATE TABLE seen_pictures \
         (LIKE seen); COMMENT ON TABLE seen_p20200102 IS 'semel: past its ledger''s retention, about to be dropped'"
    ));
    let mut target = Target::new(sink(&db, Mode::Insert)).unwrap();
    target.write(&[&format!(r#"{{"event":"{}","id":"a"}}"#, id(0, 1))], 1);
    let tables = "SELECT count(*), min(relname) FROM pg_class WHERE relname LIKE 'seen\\_p2020%' AND relkind = 'r' AND \
                  relnamespace = current_schema::regnamespace";
    // The third was detached by somebody else, who may want it.
    support::eventually(PATIENCE, "two are gone", || db.session.value(tables) == "1|seen_p20200103");
    assert_eq!(db.session.value("SELECT count(*) FROM seen_pictures"), "0", "a table of another name is not ours");
    assert_eq!(db.session.value("SELECT count(*) FROM seen"), "1");
}

#[test]
fn partitions_that_a_database_came_back_without_are_made_again() {
    let Some(db) = Database::new("ledger_back") else { return };
    db.session.execute(&format!("CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL); {BY_DAY}"));
    let separator = if db.url.contains('?') { '&' } else { '?' };
    let url = format!("{}{separator}application_name={}", db.url, db.schema);
    let mut target = Target::new(PostgresSink { url, ..sink(&db, Mode::Add) }).unwrap();
    let record = |n: u64| format!(r#"{{"event":"{}","id":"a","n":1}}"#, id(0, n));
    assert_eq!(target.write(&[&record(1)], 1).rows, 1);
    // As a standby that was behind when they were made.
    db.session.execute(
        "DO $$ DECLARE p regclass; BEGIN FOR p IN SELECT inhrelid FROM pg_inherits WHERE inhparent = 'seen'::regclass \
         LOOP EXECUTE 'DROP TABLE ' || p; END LOOP; END $$",
    );
    let end = format!(
        "SELECT bool_or(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = '{}'",
        db.schema
    );
    assert_eq!(db.session.value(&end), "t");
    assert_eq!(target.write(&[&record(2)], 1).rows, 1);
    assert_eq!((db.table(), db.session.value("SELECT count(*) FROM seen")), (vec!["a|2".to_owned()], "1".to_owned()));
}

/// Case 40: its size is bounded, and what may come again is still known.
#[test]
fn a_flat_ledger_forgets_what_is_older_than_its_retention_and_nothing_else() {
    let Some(db) = Database::new("ledger_flat") else { return };
    db.session.execute(&format!("CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL); {FLAT}"));
    let mut target = Target::new(sink(&db, Mode::Add)).unwrap();
    let record = |event: &str| format!(r#"{{"event":"{event}","id":"a","n":1}}"#);
    target.write(&[&record("old"), &record("young")], 2);
    db.session.execute("UPDATE seen SET seen_at = now() - interval '71 hours'");
    // More than are deleted in one transaction, past the three days.
    db.session.execute(
        "INSERT INTO seen SELECT gen_random_uuid(), now() - interval '73 hours' FROM generate_series(1, 5001)",
    );
    let ledger = target.checked.ledger.clone().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let forgotten = runtime.block_on(async {
        let mut connection = Connection::open(&target.checked.address, true).await?;
        ledger.forget_old(&mut connection).await
    });
    assert_eq!(forgotten.map_err(|e| e.to_string()), Ok(5001));
    assert_eq!(target.write(&[&record("old"), &record("young")], 2).duplicates, 2);
    assert_eq!((db.table(), db.session.value("SELECT count(*) FROM seen")), (vec!["a|2".to_owned()], "2".to_owned()));
}

#[test]
fn two_writers_with_the_same_events_add_each_once() {
    let Some(db) = Database::new("ledger_two") else { return };
    db.session.execute(&format!("CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL); {FLAT}"));
    std::thread::scope(|scope| {
        for descending in [false, true] {
            let mut target = Target::new(sink(&db, Mode::Add)).unwrap();
            scope.spawn(move || {
                for batch in 0..40 {
                    let mut records: Vec<String> = (0..25)
                        .map(|i| format!(r#"{{"event":"e{}","id":"{}","n":1}}"#, batch * 25 + i, i % 5))
                        .collect();
                    if descending {
                        records.reverse();
                    }
                    let records: Vec<&str> = records.iter().map(String::as_str).collect();
                    let summary = target.write(&records, 25);
                    assert_eq!(summary.rows + summary.duplicates, 25);
                }
            });
        }
    });
    assert_eq!(db.session.value("SELECT sum(n), (SELECT count(*) FROM seen) FROM t"), "1000|1000");
}

#[test]
fn a_ledger_that_cannot_keep_its_word_is_refused() {
    let Some(db) = Database::new("ledger_checks") else { return };
    db.session.execute("CREATE TABLE t (id text PRIMARY KEY, n int8)");
    let refusal = || check(sink(&db, Mode::Add)).unwrap_err().message.replace(&db.schema, "S");
    let (sentence, create) = refusal().split_once("\n\n").map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    assert!(sentence.starts_with("sink sink: table S.seen does not exist in "), "{sentence}");
    db.session.execute(&create.replace("S.", &format!("{}.", db.schema)));
    check(sink(&db, Mode::Add)).unwrap();
    db.session.execute("DROP TABLE seen; CREATE UNLOGGED TABLE seen (event_id text, n int NOT NULL)");
    assert_eq!(
        refusal().lines().collect::<Vec<_>>(),
        [
            "sink sink: the ledger S.seen: it is unlogged: a crash of the server empties it; ALTER TABLE … SET LOGGED",
            "the ledger S.seen: the column event_id is text; it must be uuid",
            "the ledger S.seen: no unique index is on exactly event_id: an event would be entered twice",
            "the ledger S.seen: there is no column seen_at timestamptz NOT NULL DEFAULT now(), by which old ids are \
             deleted",
            "the ledger S.seen: the column n is NOT NULL and has no default: nothing fills it",
        ]
    );
    db.session.execute(&format!("DROP TABLE seen; {BY_DAY}; CREATE TABLE rest PARTITION OF seen DEFAULT"));
    assert!(refusal().contains("it has a DEFAULT partition"), "{}", refusal());
}

/// Case 40: between the entry and the effect nothing is committed, so the retry is no duplicate.
#[test]
fn a_failure_between_entry_and_effect_leaves_neither() {
    let Some(db) = Database::new("ledger_between") else { return };
    db.session.execute(&format!(
        "CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL); {FLAT}; INSERT INTO t VALUES ('a', 0)"
    ));
    let holder = Session::open(&db.url);
    holder.execute(&format!("BEGIN; SELECT * FROM {}.t FOR UPDATE", db.schema));
    let mut target = Target::new(sink(&db, Mode::Add)).unwrap();
    target.writer.submit(target.batch(&[r#"{"event":"e1","id":"a","n":1}"#]));
    let waiting = "SELECT pid FROM pg_stat_activity WHERE application_name = 'semel-test' AND wait_event_type = 'Lock' AND \
                   query LIKE '%ledger_between%'";
    let mut pid = String::new();
    support::eventually(PATIENCE, "the writer waits for the row, its event entered", || {
        pid = db.session.value(waiting);
        !pid.is_empty()
    });
    db.session.rows(&format!("SELECT pg_terminate_backend({pid})"));
    holder.execute("COMMIT");
    let applied = target.answer().unwrap();
    assert_eq!((applied.rows, applied.duplicates), (1, 0));
    assert_eq!(db.table(), ["a|1"]);
}
