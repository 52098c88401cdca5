//! What the sink says of databases and tables that do not fit, before anything runs.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use semel::error::Exit;
use semel::topology::spec::{NodeId, PostgresSink, SinkTombstones, TestCase, TestOutput};

use super::fixture::{Database, check, topology};

/// The message of a refusal, without the prefix of sink and table.
fn problems(db: &Database, sink: PostgresSink) -> Vec<String> {
    let failure = check(sink.clone()).unwrap_err();
    assert_eq!(failure.exit, Exit::Refused, "{failure}");
    let text = failure.message.strip_prefix("sink sink: ").unwrap();
    let table = format!("table {}.t: ", db.schema);
    text.lines().map(|line| line.strip_prefix(&table).unwrap_or(line).replace(&db.schema, "S")).collect()
}

fn table_problems(db: &Database, columns: &str) -> Vec<String> {
    db.session.execute(&format!("DROP TABLE IF EXISTS t; CREATE TABLE t ({columns})"));
    problems(db, PostgresSink { deleted: Some("deleted".into()), ..db.sink("t") })
}

#[test]
fn a_missing_table_is_answered_with_one_that_fits() {
    let Some(db) = Database::new("missing_table") else { return };
    let mut sink = db.sink("Orders");
    sink.deleted = Some("deleted".into());
    let rows =
        r#"[{"id":"a","Total":19.90,"qty":1,"at":"2024-01-01T00:00:00Z","tags":["x"]},{"id":"b","qty":2,"user":true}]"#;
    let rows = serde_json::from_str(rows).unwrap();
    let test = TestCase {
        name: String::new(),
        line: 1,
        inputs: Vec::new(),
        outputs: vec![TestOutput::Rows { sink: NodeId(0), rows: Some(rows), deleted: None }],
    };
    let failure = semel::sink::postgres::preflight(&topology(sink.clone(), vec![test]), NodeId(0), "g").unwrap_err();
    assert_eq!(failure.exit, Exit::Refused);
    let (sentence, create) = failure.message.split_once("\n\n").unwrap();
    assert!(sentence.starts_with(&format!("sink sink: table {}.Orders does not exist in ", db.schema)), "{sentence}");
    assert!(sentence.ends_with(". One that fits:"), "{sentence}");
    let expected = format!(
        "CREATE TABLE {}.\"Orders\" (
    id      text NOT NULL,
    version bigint NOT NULL,
    \"Total\" numeric,
    at      timestamptz,
    qty     bigint,
    tags    jsonb,
    \"user\"  boolean,
    deleted boolean NOT NULL DEFAULT false,
    PRIMARY KEY (id)
);
",
        db.schema
    );
    assert_eq!(create, expected);
    db.session.execute(create);
    check(sink).unwrap();

    // Without tests to learn from, and a table of nearly that name.
    let failure = check(db.sink("orders")).unwrap_err();
    let hint = format!("(there is {}.Orders; names are taken exactly as written)", db.schema);
    assert!(failure.message.contains(&hint), "{failure}");
    assert!(
        failure.message.contains("-- a column for each member of the records that you want to keep\n"),
        "{failure}"
    );
}

#[test]
fn columns_that_do_not_fit_are_all_named_with_a_cure() {
    let Some(db) = Database::new("columns") else { return };
    assert_eq!(
        table_problems(&db, "id text PRIMARY KEY, Version text, tags text[]"),
        [
            "there is no column deleted; ALTER TABLE S.t ADD COLUMN \"deleted\" boolean NOT NULL DEFAULT false",
            "the version column version is text; it must be bigint (or a smaller integer)",
            "the version column version may be NULL, and such a row would never be updated again; ALTER TABLE S.t ALTER \
             COLUMN \"version\" SET NOT NULL",
            "column tags is text[], which semel cannot write; it writes text, varchar, char, boolean, smallint, integer, \
             bigint, numeric, real, double precision, uuid, timestamptz, timestamp, date, json, jsonb, bytea and enums",
        ]
    );
    assert_eq!(
        table_problems(&db, "id jsonb PRIMARY KEY, \"Version\" int8 NOT NULL, deleted int4"),
        [
            "there is no column version, but Version: names are taken exactly as written",
            "the key column id is jsonb; take a type with one spelling a value, as text",
            "the column deleted for deleted is integer; it must be boolean",
        ]
    );
    db.session.execute("DROP TABLE t; CREATE TABLE t (id text PRIMARY KEY, version int8 NOT NULL, name text NOT NULL)");
    let sink = PostgresSink { tombstones: SinkTombstones::Delete, ..db.sink("t") };
    assert_eq!(
        problems(&db, sink),
        [
            "column name is NOT NULL, but with tombstones = \"delete\" a deleted row has no value for it; make it nullable or \
          give it a default"
        ]
    );
}

#[test]
fn the_key_needs_a_unique_index_that_can_guard_it() {
    let Some(db) = Database::new("index") else { return };
    let index = |columns: &str, index: &str| {
        let problems =
            table_problems(&db, &format!("id text {columns}, version int8 NOT NULL, deleted bool, other text {index}"));
        assert_eq!(problems.len(), 1, "{problems:?}");
        problems[0].clone()
    };
    let cure = "CREATE UNIQUE INDEX ON S.t (\"id\")";
    assert_eq!(index("", ""), format!("no unique index is on exactly the key; {cure}"));
    assert_eq!(
        index("", ", UNIQUE (id, other)"),
        format!("no unique index is on exactly the key (there is t_id_other_key on (id, other)); {cure}")
    );
    assert_eq!(
        index("PRIMARY KEY DEFERRABLE", ""),
        format!("the unique index t_pkey on the key cannot guard it: it is deferrable; {cure}")
    );
    db.session.execute(
        "DROP TABLE t; CREATE TABLE t (id text, version int8 NOT NULL, deleted bool); \
         CREATE UNIQUE INDEX part ON t (id) WHERE version > 0; CREATE UNIQUE INDEX lowered ON t (lower(id))",
    );
    let found = problems(&db, db.sink("t"));
    assert_eq!(found, [format!("the unique index part on the key cannot guard it: it is partial; {cure}")]);
    db.session.execute("CREATE UNIQUE INDEX whole ON t (id) INCLUDE (version)");
    check(db.sink("t")).unwrap();
}

#[test]
fn what_cannot_keep_rows_or_take_them_is_refused() {
    let Some(db) = Database::new("kinds") else { return };
    db.session.execute("CREATE UNLOGGED TABLE t (id text PRIMARY KEY, version int8 NOT NULL)");
    assert!(problems(&db, db.sink("t"))[0].starts_with("it is unlogged: a crash of the server empties it"));
    db.session.execute("DROP TABLE t; CREATE TABLE u (id text PRIMARY KEY, version int8 NOT NULL)");
    db.session.execute("CREATE VIEW t AS SELECT * FROM u");
    assert_eq!(problems(&db, db.sink("t"))[0], "it is a view; name the table below it");
    let mut sink = db.sink("u");
    sink.url = with(&sink.url, "options=-c%20synchronous_commit%3Doff");
    let failure = check(sink).unwrap_err();
    assert!(failure.message.starts_with("sink sink: synchronous_commit is off: "), "{failure}");
    db.session.execute("CREATE RULE nothing AS ON INSERT TO u DO INSTEAD NOTHING");
    let failure = check(db.sink("u")).unwrap_err();
    assert!(failure.message.contains(".u: it has rules, which rewrite statements"), "{failure}");
    // What no check knows of, the server says when the statement is tried.
    db.session.execute(
        "DROP RULE nothing ON u; CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'closed'; END $$; \
         CREATE TRIGGER no BEFORE INSERT ON u FOR EACH STATEMENT EXECUTE FUNCTION no()",
    );
    let failure = check(db.sink("u")).unwrap_err();
    assert_eq!(failure.exit, Exit::Refused);
    assert!(failure.message.ends_with(".u: P0001 closed"), "{failure}");
}

#[test]
fn missing_rights_are_named() {
    let Some(db) = Database::new("rights") else { return };
    let role = format!("{}_role", db.schema);
    db.session.execute(&format!(
        "CREATE TABLE t (id text PRIMARY KEY, version int8 NOT NULL); DROP ROLE IF EXISTS {role}; CREATE ROLE {role} LOGIN; \
         GRANT USAGE ON SCHEMA {} TO {role}; GRANT SELECT, INSERT ON t TO {role}",
        db.schema
    ));
    let mut sink = db.sink("t");
    sink.url = with(&sink.url, &format!("options=-c%20role%3D{role}"));
    assert_eq!(
        problems(&db, sink.clone()),
        [
            "no right to UPDATE column id; GRANT UPDATE ON S.t TO the user of the url",
            "no right to UPDATE column version; GRANT UPDATE ON S.t TO the user of the url",
        ]
    );
    db.session.execute(&format!("GRANT UPDATE ON t TO {role}"));
    check(sink.clone()).unwrap();
    db.session.execute(&format!("REVOKE USAGE ON SCHEMA {} FROM {role}", db.schema));
    let failure = check(sink).unwrap_err();
    assert_eq!(failure.exit, Exit::Refused);
    assert!(failure.message.contains("42501 permission denied for schema"), "{failure}");
    db.session.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

/// The url with another parameter.
fn with(url: &str, parameter: &str) -> String {
    format!("{url}{}{parameter}", if url.contains('?') { '&' } else { '?' })
}

#[test]
fn servers_that_are_not_there_are_reported_in_time() {
    let Some(db) = Database::new("away") else { return };
    let mut sink = db.sink("t");
    // A port that nobody listens on, and one where nobody answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (place, words) in [(closed, "Connection refused"), (silent.local_addr().unwrap(), "no answer within 8 s")] {
        sink.url = format!("postgres://u:s3cret@{place}/d");
        let started = Instant::now();
        let failure = check(sink.clone()).unwrap_err();
        assert_eq!(failure.exit, Exit::Unreachable, "{failure}");
        assert!(started.elapsed() < Duration::from_secs(10));
        assert!(failure.message.starts_with(&format!("sink sink: cannot connect to u@{place}/d: ")), "{failure}");
        assert!(failure.message.contains(words) && !failure.message.contains("s3cret"), "{failure}");
    }
    let mut sink = db.sink("t");
    sink.url = sink.url.rsplit_once('/').unwrap().0.to_owned() + "/no_such_database";
    let failure = check(sink).unwrap_err();
    assert_eq!(failure.exit, Exit::Refused);
    assert!(failure.message.ends_with("3D000 database \"no_such_database\" does not exist"), "{failure}");
    let mut sink = db.sink("t");
    sink.url = with(&sink.url, "sslmode=require");
    let failure = check(sink).unwrap_err();
    assert_eq!(failure.exit, Exit::Refused);
    assert!(failure.message.ends_with("if the network is trusted, say sslmode=disable in the url"), "{failure}");
}
