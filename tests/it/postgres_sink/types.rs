//! Values in columns of every type.

use super::fixture::{Database, Target};

#[test]
fn every_type_stores_what_the_record_says() {
    let Some(db) = Database::new("all_types") else { return };
    db.session.execute("CREATE TYPE mood AS ENUM ('sad', 'glad'); CREATE DOMAIN cents AS int4 CHECK (value >= 0)");
    for prepared in [true, false] {
        db.session.execute("DROP TABLE IF EXISTS t");
        db.session.execute(
            "CREATE TABLE t (id int4 PRIMARY KEY, version int2 NOT NULL, a text, b varchar(3), c char(4), d bool, e int2, \
             f int4, g int8, h numeric, i numeric(7,2), j float4, k float8, l uuid, m timestamptz, n timestamp(3), o date, \
             p json, q jsonb, r bytea, s mood, u cents)",
        );
        let mut target = Target::new(semel::topology::spec::PostgresSink { prepared, ..db.sink("t") })
            .unwrap_or_else(|e| panic!("{e}"));
        let full = r#"{"id":1,"version":7,"a":"ä\n","b":"äöü","c":"x ","d":true,"e":-32768,"f":2147483647,
            "g":-9223372036854775808,"h":123456789012345678901234567890.120,"i":12345.60,"j":0.1,"k":1e308,
            "l":"A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11","m":"2024-03-01T12:00:00.123456+02:00","n":"1969-12-31T23:59:59.9996",
            "o":"2024-02-29","p":{"b":1,"a":1.10,"a":2e1},"q":{"b":1,"a":1.10},"r":"AAH/","s":"glad","u":5}"#;
        let empty = r#"{"id":2,"version":-7,"a":null,"q":null}"#;
        assert_eq!(target.write(&[full, empty], 2).rows, 2);
        db.session.execute("SET timezone = 'UTC'");
        let expected = [
            "1|7|ä\n|äöü|x   |t|-32768|2147483647|-9223372036854775808|123456789012345678901234567890.120|12345.60|0.1|\
             1e+308|a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11|2024-03-01 10:00:00.123456+00|1970-01-01 00:00:00|2024-02-29|\
             {\"b\":1,\"a\":1.10,\"a\":2e1}|{\"a\": 1.10, \"b\": 1}|\\x0001ff|glad|5",
            "2|-7|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-",
        ];
        assert_eq!(db.table(), expected);
        // The same again: nothing of it may look like a tie.
        let again = target.write(&[full, empty], 2);
        assert_eq!((again.rows, again.stale, again.ties), (0, 2, 0));
        let other = full.replace("\"b\":1,", "\"b\":2,");
        assert_eq!(target.write(&[&other], 1).ties, 1);
        // The constraint of a domain is the database's to check.
        let refused = target.write(&[r#"{"id":3,"version":1,"u":-1}"#], 1);
        let schema = &db.schema;
        let message = format!(
            "table {schema}.t: 23514 value for domain {schema}.cents violates check constraint \"cents_check\""
        );
        assert_eq!(refused.rejects, [(0, message)]);
    }
}

#[test]
fn what_the_sink_lets_through_the_server_takes() {
    let Some(db) = Database::new("borders") else { return };
    let mut target = db.target(
        "id text PRIMARY KEY, version int8 NOT NULL, i numeric(5,2), j float4, k float8, m timestamptz, n timestamp, o date, \
         q jsonb, h numeric",
    );
    let deep = "[".repeat(1000) + &"]".repeat(1000);
    let long_key = "0123456789abcdef".repeat(2600 / 16);
    let columns = [
        ("i", "999.99"),
        ("i", "-999.9900"),
        ("i", "1e2"),
        ("j", "3.4028235e38"),
        ("j", "1e-45"),
        ("k", "1.7976931348623157e308"),
        ("k", "5e-324"),
        ("m", "\"0001-01-01T00:00:00Z\""),
        ("m", "\"9999-12-31T23:59:59.999999Z\""),
        ("m", "-62135596800000"),
        ("n", "\"9999-12-31T23:59\""),
        ("o", "\"0001-01-01\""),
        ("o", "\"9999-12-31\""),
        ("q", &deep),
        ("q", r#"{"a":1e131071,"b":"\ud83d\ude00"}"#),
        ("h", "1e131071"),
        ("h", "1e-16383"),
    ];
    let records: Vec<String> = columns
        .iter()
        .enumerate()
        .map(|(at, (column, json))| format!("{{\"id\":\"{at}-{long_key}\",\"version\":1,\"{column}\":{json}}}"))
        .collect();
    let records: Vec<String> = records.iter().map(|r| r.replacen(&long_key, &long_key[..2590], 1)).collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    let summary = target.write(&records, 100);
    assert_eq!(summary.rejects, []);
    assert_eq!(summary.rows, columns.len() as u64);
}

#[test]
fn keys_that_are_equal_in_the_database_are_one_key() {
    let Some(db) = Database::new("equal_keys") else { return };
    for (ty, spellings) in [
        ("uuid", ["\"A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11\"", "\"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11\""]),
        ("numeric", ["1.0", "\"1\""]),
        ("char(3)", ["\"a\"", "\"a  \""]),
        ("timestamptz", ["\"2024-01-01T02:00:00+02:00\"", "1704067200000"]),
        ("timestamptz(0)", ["\"2024-01-01T00:00:00.4Z\"", "\"2023-12-31T23:59:59.6Z\""]),
        ("float8", ["-0.0", "0"]),
        ("int8", ["1e1", "\"10\""]),
    ] {
        db.session.execute("DROP TABLE IF EXISTS t");
        let mut target = db.target(&format!("id {ty} PRIMARY KEY, version int8 NOT NULL"));
        for spelling in [0, 1] {
            let record = |s: usize, version: i32| format!("{{\"id\":{},\"version\":{version}}}", spellings[s]);
            let (first, second) =
                (record(spelling, 2 * spelling as i32 + 1), record(1 - spelling, 2 * spelling as i32 + 2));
            let summary = target.write(&[&first, &second], 2);
            assert_eq!((summary.rows, summary.superseded), (1, 1), "{ty}");
        }
        assert_eq!(db.session.value("SELECT count(*) || ' ' || max(version) FROM t"), "1 4", "{ty}");
    }
}

#[test]
fn defaults_and_what_the_database_makes_are_its_own() {
    let Some(db) = Database::new("defaults") else { return };
    let mut target = db.target(
        "id text PRIMARY KEY, version int8 NOT NULL, state text NOT NULL DEFAULT 'new', note text DEFAULT 'none', \
         number serial, twin int4 GENERATED BY DEFAULT AS IDENTITY, own int4 GENERATED ALWAYS AS IDENTITY, \
         upper text GENERATED ALWAYS AS (upper(state)) STORED",
    );
    assert_eq!(
        target.checked.warnings.iter().map(|w| w.rsplit_once(".t: ").unwrap().1).collect::<Vec<_>>(),
        [
            "column number takes a number from its sequence for every record, stale ones too, and will run out: make it \
             bigint",
            "column twin takes a number from its sequence for every record, stale ones too, and will run out: make it \
             bigint",
        ]
    );
    let records = [r#"{"id":"a","version":1,"number":77}"#, r#"{"id":"b","version":1,"state":"done","note":"x"}"#];
    assert_eq!(target.write(&records, 2).rows, 2);
    // Absent is NULL, and the default where NULL cannot be.
    assert_eq!(db.table(), ["a|1|new|-|1|1|1|NEW", "b|1|done|x|2|2|2|DONE"]);
    let again = target.write(&records, 2);
    assert_eq!((again.rows, again.stale, again.ties), (0, 2, 0));
    target.write(&[r#"{"id":"b","version":2}"#], 1);
    assert_eq!(db.session.value("SELECT state, note, number FROM t WHERE id = 'b'"), "new|-|2");
}
