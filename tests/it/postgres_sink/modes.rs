//! What each mode does to the table.

use std::time::Duration;

use semel::topology::spec::{Ledger, Mode, PostgresSink};

use super::fixture::{Database, Summary, Target, check};

fn sink(db: &Database, mode: Mode) -> PostgresSink {
    let key = if mode == Mode::Insert { Vec::new() } else { vec!["id".into()] };
    PostgresSink { mode, key, version: None, ..db.sink("t") }
}

fn refusal(sink: PostgresSink, db: &Database) -> String {
    check(sink).unwrap_err().message.replace(&db.schema, "S")
}

#[test]
fn in_mode_insert_every_record_is_a_row() {
    let Some(db) = Database::new("insert") else { return };
    db.session.execute("CREATE TABLE t (n serial, id text, amount int8 CHECK (amount > 0))");
    let records = [r#"{"id":"a","amount":1}"#, r#"{"id":"a","amount":1}"#, r#"{"id":"b","amount":0}"#, r#"{"id":"a"}"#];
    for size in [1, 4] {
        db.session.execute("TRUNCATE t RESTART IDENTITY");
        let mut target = Target::new(sink(&db, Mode::Insert)).unwrap();
        let summary = target.write(&records, size);
        assert_eq!((summary.rows, summary.stale, summary.superseded, summary.ties), (3, 0, 0, 0));
        let [(2, message)] = &summary.rejects[..] else { panic!("{:?}", summary.rejects) };
        assert!(message.contains("23514"), "{message}");
        assert_eq!(db.session.rows("SELECT id, amount FROM t ORDER BY n"), ["a|1", "a|1", "a|-"], "in their order");
    }
}

#[test]
fn in_mode_insert_a_unique_index_rejects_the_later_row_and_is_refused_where_rows_may_come_again() {
    let Some(db) = Database::new("insert_unique") else { return };
    db.session.execute("CREATE TABLE t (id text PRIMARY KEY, amount int8)");
    let message = refusal(sink(&db, Mode::Insert), &db);
    for cure in ["unique index t_pkey", "dedupe", "progress = \"postgres\"", "mode = \"upsert\""] {
        assert!(message.contains(cure), "{message}");
    }
    db.session.execute("CREATE TABLE seen (event_id uuid PRIMARY KEY, seen_at timestamptz NOT NULL DEFAULT now())");
    let ledger = Ledger { table: format!("{}.seen", db.schema), retention: Duration::from_secs(86_400) };
    let mut target = Target::new(PostgresSink { dedupe: Some(ledger), ..sink(&db, Mode::Insert) }).unwrap();
    let summary = target.write(&[r#"{"event":"1","id":"a","amount":1}"#, r#"{"event":"2","id":"a","amount":2}"#], 2);
    assert_eq!((summary.rows, summary.rejects.len()), (1, 1));
    assert!(summary.rejects[0].1.contains("23505"), "{:?}", summary.rejects);
    assert_eq!(db.table(), ["a|1"]);
}

#[test]
fn in_mode_add_sums_are_exact_at_every_batch_size() {
    let Some(db) = Database::new("add") else { return };
    db.session.execute(
        "CREATE TABLE t (id numeric PRIMARY KEY, n int8 NOT NULL DEFAULT 7, price numeric(30, 2), small int2, note text)",
    );
    let big = 9_007_199_254_740_993_i64;
    let records: Vec<String> = (0..60)
        .map(|i| match i % 3 {
            // 1 and 1.0 are one key; what is missing adds nothing.
            0 => format!(r#"{{"id":1,"n":{big},"price":0.10,"small":1}}"#),
            1 => r#"{"id":1.0,"n":-1,"price":"0.2"}"#.to_owned(),
            _ => r#"{"id":2,"price":123456789012345678901234.56,"note":"x"}"#.to_owned(),
        })
        .collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    for size in [1, 7, 60] {
        db.session.execute("TRUNCATE t; INSERT INTO t (id, n, note) VALUES (2, 5, 'kept')");
        let mut target = Target::new(sink(&db, Mode::Add)).unwrap();
        let summary = target.write(&records, size);
        assert_eq!(summary, Summary { rows: 60, ..Summary::default() });
        assert_eq!(
            db.table(),
            [format!("1|{}|6.00|20|-", 20 * big - 20), "2|5|2469135780246913578024691.20|0|kept".to_owned()]
        );
    }
}

/// A balance that may not fall below 0 is held against the sum, not against what is taken from it.
#[test]
fn in_mode_add_constraints_are_held_against_the_sum() {
    let Some(db) = Database::new("add_check") else { return };
    db.session.execute("CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL CHECK (n >= 0))");
    let mut target = Target::new(sink(&db, Mode::Add)).unwrap();
    let of = |id: &str, n: i64| format!(r#"{{"id":"{id}","n":{n}}}"#);
    for (record, good) in [(of("a", 10), true), (of("a", -3), true), (of("a", -20), false), (of("b", -1), false)] {
        assert_eq!(target.write(&[&record], 1).rows, u64::from(good), "{record}");
    }
    assert_eq!(db.table(), ["a|7"]);
    assert_eq!(target.write(&[&of("a", -7), &of("b", 2), &of("b", -1)], 3).rows, 3);
    assert_eq!(db.table(), ["a|0", "b|1"]);
}

#[test]
fn in_mode_add_what_overflows_is_rejected_alone() {
    let Some(db) = Database::new("add_overflow") else { return };
    db.session.execute("CREATE TABLE t (id text PRIMARY KEY, n int4 NOT NULL)");
    let mut target = Target::new(sink(&db, Mode::Add)).unwrap();
    let records = [
        r#"{"id":"a","n":2147483647}"#,
        r#"{"id":"b","n":1}"#,
        r#"{"id":"a","n":1}"#,
        r#"{"id":"a","n":-7}"#,
        r#"{"id":"b","n":2}"#,
        r#"{"id":"a","n":8}"#,
    ];
    let summary = target.write(&records, 6);
    let refused: Vec<usize> = summary.rejects.iter().map(|(at, _)| *at).collect();
    // Within a batch it is the sum that has to fit: the second record of a did, together with the third.
    assert_eq!((summary.rows, &refused[..]), (5, &[5][..]), "{:?}", summary.rejects);
    assert!(summary.rejects[0].1.contains("22003"), "{:?}", summary.rejects);
    assert_eq!(db.table(), ["a|2147483641", "b|3"]);
}

#[test]
fn mode_update_sets_what_differs_and_inserts_nothing() {
    let Some(db) = Database::new("update") else { return };
    db.session.execute(
        "CREATE TABLE t (id text PRIMARY KEY, state text, doc json); INSERT INTO t VALUES ('a', 'new', '1'), ('b', 'new', NULL)",
    );
    db.session.execute(&format!(
        "CREATE TABLE touched (id text); CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT \
         INTO {}.touched VALUES (new.id); RETURN NULL; END $$; CREATE TRIGGER touch AFTER UPDATE ON t FOR EACH ROW \
         EXECUTE FUNCTION touch()",
        db.schema
    ));
    let mut target = Target::new(sink(&db, Mode::Update)).unwrap();
    let records = [
        r#"{"id":"a","state":"paid","doc":1}"#,
        r#"{"id":"c","state":"paid"}"#,
        r#"{"id":"b","state":"new"}"#,
        r#"{"id":"a","state":"sent","doc":1}"#,
    ];
    let summary = target.write(&records, 4);
    assert_eq!(summary, Summary { rows: 1, stale: 2, superseded: 1, ..Summary::default() });
    assert_eq!(db.table(), ["a|sent|1", "b|new|-"]);
    assert_eq!(db.session.value("SELECT count(*) FROM touched"), "1", "b is not written: nothing differs");
    assert_eq!(target.write(&records[3..], 1).stale, 1);
}

#[test]
fn mode_update_with_a_version_takes_only_higher_ones() {
    let Some(db) = Database::new("update_version") else { return };
    db.session.execute(
        "CREATE TABLE t (id text PRIMARY KEY, version int8 NOT NULL, state text); INSERT INTO t VALUES ('a', 3, 'x')",
    );
    let mut target = Target::new(PostgresSink { version: Some("version".into()), ..sink(&db, Mode::Update) }).unwrap();
    let row = |version: u32, state: &str| format!(r#"{{"id":"a","version":{version},"state":"{state}"}}"#);
    let summary = target.write(&[&row(2, "old"), &row(3, "tie"), &row(5, "five"), &row(4, "four")], 1);
    assert_eq!(summary, Summary { rows: 1, stale: 2, ties: 1, ..Summary::default() });
    assert_eq!(db.table(), ["a|5|five"]);
}

#[test]
fn each_mode_asks_of_the_table_what_it_needs() {
    let Some(db) = Database::new("mode_checks") else { return };
    db.session.execute("CREATE TABLE t (id text, n int8, x real)");
    check(sink(&db, Mode::Insert)).unwrap();
    let no_index = "table S.t: no unique index is on exactly the key; CREATE UNIQUE INDEX ON S.t (\"id\")";
    assert_eq!(refusal(sink(&db, Mode::Update), &db), format!("sink sink: {no_index}"));
    assert_eq!(refusal(sink(&db, Mode::Add), &db), format!("sink sink: {no_index}"), "real is left out");
    db.session.execute("ALTER TABLE t ADD PRIMARY KEY (id)");
    assert_eq!(check(sink(&db, Mode::Add)).unwrap().layout.specs().len(), 2);
    let program = semel::expr::compile(".x", semel::expr::Role::Value).unwrap().0;
    let named = PostgresSink { columns: vec![("x".into(), program)], ..sink(&db, Mode::Add) };
    assert_eq!(
        refusal(named, &db),
        "sink sink: table S.t: column x is real, to which nothing is added exactly; it must be smallint, integer, \
         bigint or numeric, or be left out of `columns`"
    );
}

#[test]
fn a_missing_table_is_answered_with_one_that_fits_the_mode() {
    let Some(db) = Database::new("mode_create") else { return };
    let created = |mode: Mode| {
        let message = refusal(sink(&db, mode), &db);
        message.split_once("\n\n").unwrap().1.to_owned()
    };
    let keep = "    -- a column for each member of the records that you want to keep\n";
    assert_eq!(created(Mode::Insert), format!("CREATE TABLE S.t (\n{keep}\n);\n"));
    assert_eq!(
        created(Mode::Add),
        "CREATE TABLE S.t (\n    -- a number for each member of the records that you want to add up\n    \
         id text NOT NULL,\n    PRIMARY KEY (id)\n);\n"
    );
}
