use super::*;
use crate::expr::{Role, compile};
use crate::record::{Headers, Offset};
use crate::topology::spec::{Mode, Progress};

fn program(source: &str, role: Role) -> Program {
    compile(source, role).unwrap_or_else(|e| panic!("{source}: {e:?}")).0
}

fn sink() -> PostgresSink {
    PostgresSink {
        url: String::new(),
        table: "t".into(),
        mode: Mode::Upsert,
        key: vec!["id".into()],
        version: Some("version".into()),
        deleted: None,
        delete_when: None,
        columns: Vec::new(),
        unknown_fields: UnknownFields::Ignore,
        tombstones: SinkTombstones::Reject,
        dedupe: None,
        progress: Progress::Kafka,
        batch_rows: 1000,
        batch_bytes: 1 << 20,
        prepared: true,
        max_rejects_per_minute: 10,
    }
}

fn with_columns(columns: &[(&str, &str)]) -> PostgresSink {
    let columns = columns.iter().map(|(name, source)| ((*name).into(), program(source, Role::Value))).collect();
    PostgresSink { columns, ..sink() }
}

fn input<'a>(key: Option<&'a str>, value: Option<&'a str>) -> Input<'a> {
    Input {
        topic: "orders",
        partition: 3,
        offset: Offset(42),
        timestamp: Some(1_700_000_000_123),
        key: key.map(str::as_bytes),
        value: value.map(str::as_bytes),
        headers: Headers::default(),
    }
}

/// Version, deletion and the cells as text; or `ignored`, or reason and message of a reject.
fn mapped(sink: &PostgresSink, columns: Option<&[&str]>, key: Option<&str>, value: Option<&str>) -> String {
    let columns = columns.map(|c| c.iter().map(|name| ColumnSpec { name: (*name).into() }).collect());
    let mut mapper = RowMapper::new("sink", sink, [], columns);
    match mapper.map(&input(key, value)) {
        Ok(Mapped::Ignored) => "ignored".into(),
        Err(reject) => {
            assert_eq!(reject.node, "sink");
            format!("{}: {}", reject.reason, reject.message)
        }
        Ok(Mapped::Row(row)) => {
            let text = |cell: &Cell<'_>| cell.as_ref().map_or("-".into(), |c| String::from_utf8_lossy(c).into_owned());
            let cells: Vec<String> = row.cells.iter().map(|(name, cell)| format!("{name}={}", text(cell))).collect();
            format!("{}{} {}", row.version.unwrap(), if row.deleted { " deleted" } else { "" }, cells.join(" "))
        }
    }
}

fn row(sink: &PostgresSink, value: &str) -> String {
    mapped(sink, Some(&["id", "version", "amount"]), None, Some(value))
}

#[test]
fn members_keep_their_text_and_absent_ones_are_null() {
    let value = r#"{"version": 7, "id": "a\u0041", "amount": 123456789012345678901234567890.10, "other": 1}"#;
    assert_eq!(row(&sink(), value), r#"7 id="a\u0041" version=7 amount=123456789012345678901234567890.10"#);
    assert_eq!(row(&sink(), r#"{"version":1,"id":1}"#), "1 id=1 version=1 amount=-");
    assert_eq!(row(&sink(), r#"{"version":1,"id":1,"amount":null}"#), "1 id=1 version=1 amount=null");
}

#[test]
fn a_version_is_an_integer_of_64_bits() {
    let version = |text: &str| row(&sink(), &format!(r#"{{"id":1,"version":{text}}}"#));
    assert!(version("-9223372036854775808").starts_with("-9223372036854775808 "));
    assert!(version("1e3").starts_with("1000 "));
    assert_eq!(
        version("9223372036854775808"),
        "version: the version version is 9223372036854775808, no 64-bit integer"
    );
    assert_eq!(version("1.5"), "version: the version version is 1.5, no 64-bit integer");
    assert_eq!(version("\"7\""), "version: the version version is \"7\", no 64-bit integer");
    assert_eq!(version("null"), "version: the version version is null or missing in the record");
    assert_eq!(row(&sink(), r#"{"id":1}"#), "version: the version version is null or missing in the record");
}

#[test]
fn expressions_make_columns_and_a_plain_member_stays_exact() {
    let sink = with_columns(&[("amount", ".total"), ("version", "%offset"), ("id", ".a + \"-\" + string!(%key)")]);
    let record = r#"{"a":"x","total":123456789012345678901234567890}"#;
    assert_eq!(
        mapped(&sink, Some(&["id", "version", "amount"]), Some("k"), Some(record)),
        "42 id=\"x-k\" version=42 amount=123456789012345678901234567890"
    );
    let sink = with_columns(&[("amount", "to_int!(.n)")]);
    assert!(row(&sink, r#"{"id":1,"version":1,"n":"x"}"#).starts_with("expression: "));
    let sink = with_columns(&[("amount", "if .n == 1 { abort }")]);
    assert_eq!(row(&sink, r#"{"id":1,"version":1,"n":1}"#), "ignored");
    assert_eq!(row(&sink, r#"{"id":1,"version":1,"n":2}"#), "1 id=1 version=1 amount=-");
}

#[test]
fn a_key_without_a_value_is_rejected() {
    let message = "column: the key column id is null or missing in the record";
    assert_eq!(row(&sink(), r#"{"version":1}"#), message);
    assert_eq!(row(&sink(), r#"{"version":1,"id":null}"#), message);
    assert!(row(&sink(), "[]").starts_with("undecodable: "));
}

#[test]
fn deletes_come_from_the_condition_or_the_column() {
    let mut sink = sink();
    sink.deleted = Some("gone".into());
    let columns = ["id", "version", "amount", "gone"];
    let row = |sink: &PostgresSink, value: &str| mapped(sink, Some(&columns), None, Some(value));
    assert_eq!(row(&sink, r#"{"id":1,"version":1}"#), "1 id=1 version=1 amount=- gone=false");
    assert_eq!(row(&sink, r#"{"id":1,"version":1,"gone":true}"#), "1 deleted id=1 version=1 amount=- gone=true");
    assert_eq!(row(&sink, r#"{"id":1,"version":1,"gone":1}"#), "column: column gone: 1 is neither true nor false");
    sink.delete_when = Some(program(".status == \"deleted\"", Role::Condition));
    assert_eq!(
        row(&sink, r#"{"id":1,"version":1,"amount":5,"status":"deleted","gone":false}"#),
        "1 deleted id=1 version=1 amount=5 gone=true",
        "a deleted row keeps what the record carries"
    );
    assert_eq!(row(&sink, r#"{"id":1,"version":1,"gone":true}"#), "1 id=1 version=1 amount=- gone=false");
}

#[test]
fn null_values_are_rejected_ignored_or_deletes() {
    let mut sink = with_columns(&[("version", "%offset"), ("amount", "to_int!(.amount)")]);
    sink.deleted = Some("deleted".into());
    let columns = ["amount", "id", "version", "deleted"];
    let mut map = |tombstones, key| {
        sink.tombstones = tombstones;
        mapped(&sink, Some(&columns), key, None)
    };
    assert_eq!(map(SinkTombstones::Reject, Some("k")), "tombstone: a null value, and tombstones = \"reject\"");
    assert_eq!(map(SinkTombstones::Ignore, Some("k")), "ignored");
    assert_eq!(map(SinkTombstones::Delete, Some("k\"")), r#"42 deleted amount=- id="k\"" version=42 deleted=true"#);
    assert_eq!(map(SinkTombstones::Delete, None), "column: the key column id is null or missing in the record");
    let mut sink = with_columns(&[("version", "%offset"), ("id", "parse_json!(string!(%key)).id")]);
    sink.tombstones = SinkTombstones::Delete;
    assert_eq!(mapped(&sink, None, Some(r#"{"id":7}"#), None), "42 deleted id=7 version=42");
    sink.columns.remove(0);
    assert_eq!(
        mapped(&sink, None, Some(r#"{"id":7}"#), None),
        "version: the version version is null or missing in the record"
    );
}

#[test]
fn unknown_members_are_ignored_or_rejected() {
    let mut sink = with_columns(&[("amount", ".total.net + 1")]);
    let record = r#"{"id":1,"version":1,"total":{"net":1},"new":2}"#;
    assert_eq!(row(&sink, record), "1 id=1 version=1 amount=2");
    sink.unknown_fields = UnknownFields::Reject;
    assert_eq!(row(&sink, record), "unknown-field: the table has no column for the member new");
    assert_eq!(row(&sink, &record.replace(",\"new\":2", "")), "1 id=1 version=1 amount=2", "total is read");
    sink.delete_when = Some(program("exists(.\"new\")", Role::Condition));
    assert_eq!(row(&sink, record), "1 deleted id=1 version=1 amount=2");
    assert_eq!(
        row(&sink, &record.replace("new", "newer")),
        "unknown-field: the table has no column for the member newer"
    );
}

#[test]
fn without_a_table_every_member_is_a_column() {
    let mut sink = with_columns(&[("amount", ".total")]);
    sink.deleted = Some("deleted".into());
    assert_eq!(
        mapped(&sink, None, None, Some(r#"{"total":1.50,"version":2,"id":"a"}"#)),
        "2 id=\"a\" total=1.50 version=2 amount=1.50 deleted=false"
    );
}

#[test]
fn records_of_text_have_columns_by_expressions() {
    let sink = with_columns(&[("id", "%key"), ("version", "%offset"), ("line", "string!(.)")]);
    let columns = ["id", "version", "line"].map(|name| ColumnSpec { name: name.into() });
    let formats = [("orders".to_owned(), Format::String)];
    let mut mapper = RowMapper::new("sink", &sink, formats, Some(columns.to_vec()));
    let record = input(Some("k"), Some("a \"line\""));
    let Ok(Mapped::Row(row)) = mapper.map(&record) else { panic!("no row") };
    assert_eq!(row.version, Some(42));
    assert_eq!(row.cells[2].1.as_deref(), Some(&br#""a \"line\"""#[..]));
}
