use super::*;
use crate::topology::load;

const HEAD: &str = "name = \"t\"\nkafka.brokers = \"localhost:9092\"\n\
                    [sources.in]\ntype = \"kafka\"\ntopics = [\"in\"]\n";

/// The reports of a file that begins with [`HEAD`].
fn reports(rest: &str) -> Vec<TestReport> {
    let loaded = load(&format!("{HEAD}{rest}"), "t.toml", &|_| None);
    run_tests(&loaded.topology.unwrap_or_else(|| panic!("{:#?}", loaded.findings)))
}

/// The one report of a file with one test.
fn report(rest: &str) -> TestReport {
    let mut reports = reports(rest);
    assert_eq!(reports.len(), 1);
    reports.remove(0)
}

fn difference(sink: &str, at: &str, expected: Option<&str>, actual: Option<&str>) -> Difference {
    let text = |text: &str| text.to_owned();
    Difference { sink: text(sink), at: text(at), expected: expected.map(text), actual: actual.map(text) }
}

const PASS: &str = "[sinks.out]\ntype = \"kafka\"\ninputs = [\"in\"]\ntopic = \"out\"\ncreate = { partitions = 4 }\n";

const TABLE: &str = "[sinks.rows]\ntype = \"postgres\"\ninputs = [\"in\"]\nurl = \"postgres://localhost/x\"\n\
                     table = \"t\"\nkey = [\"id\"]\nversion = \"version\"\n";

#[test]
fn null_empty_and_bytes_pass_as_they_are() {
    let report = report(&format!(
        "format = \"bytes\"\n{PASS}[[tests]]\nname = \"x\"\n\
         inputs = [{{ source = \"in\", tombstone = true }}, {{ source = \"in\", text = \"\", key = \"\" }}, \
         {{ source = \"in\", base64 = \"/w==\", headers = [[\"a\", \"1\"], [\"a\"], [\"b\", \"\"]] }}]\n\
         [[tests.outputs]]\nsink = \"out\"\n\
         records = [{{ tombstone = true, null_key = true }}, {{ text = \"\", key = \"\" }}, \
         {{ base64 = \"/w==\", headers = [[\"a\", \"1\"], [\"a\"], [\"b\", \"\"]] }}]\n"
    ));
    assert_eq!(report.differences, []);
    assert!(report.passed());
}

#[test]
fn partitions_are_those_of_java_clients_and_of_the_input_where_there_is_no_key() {
    // murmur2 of the 32-bit hash, as Kafka's own tests have it: "21" hashes to -973932308.
    let partition = (-973_932_308i32 & 0x7fff_ffff) % 4;
    let report = report(&format!(
        "{PASS}[[tests]]\nname = \"x\"\n\
         inputs = [{{ source = \"in\", key = \"21\", value = {{}} }}, \
         {{ source = \"in\", value = {{}}, partition = 6 }}]\n\
         outputs = [{{ sink = \"out\", records = [{{ partition = {partition} }}, {{ partition = 2 }}] }}]\n"
    ));
    assert_eq!(report.differences, []);
}

#[test]
fn a_difference_names_the_first_place_and_both_sides() {
    let report = report(&format!(
        "{PASS}[[tests]]\nname = \"x\"\n\
         inputs = [{{ source = \"in\", key = \"k\", value = {{ a = 1, b = {{ c = [1, 2] }} }}, timestamp = 5 }}]\n\
         [[tests.outputs]]\nsink = \"out\"\n\
         records = [{{ value = {{ a = 1.0, b = {{ c = [1, 3] }} }} }}, {{ key = \"k2\" }}]\n\
         [[tests.outputs]]\nsink = \"dead_letters\"\nrecords = [{{ node = \"in\", reason = \"undecodable\" }}]\n"
    ));
    assert_eq!(
        report.differences,
        [
            difference("out", "record 1 of 2, value.b.c[1]", Some("3"), Some("2")),
            difference("out", "record 2 of 2", Some("key k2"), None),
            difference("dead_letters", "record 1 of 1", Some("node in, reason undecodable"), None),
        ]
    );
}

#[test]
fn keys_times_headers_and_partitions_are_compared_where_they_are_given() {
    let differences = |expected: &str| {
        let report = report(&format!(
            "{PASS}[[tests]]\nname = \"x\"\n\
             inputs = [{{ source = \"in\", key = \"k\", value = {{}}, timestamp = 5, headers = [[\"h\", \"1\"]] }}]\n\
             outputs = [{{ sink = \"out\", records = [{expected}] }}]\n"
        ));
        report.differences.into_iter().map(|d| (d.at, d.expected, d.actual)).collect::<Vec<_>>()
    };
    let one = |part: &str, expected: &str, actual: &str| {
        vec![(format!("record 1 of 1, {part}"), Some(expected.to_owned()), Some(actual.to_owned()))]
    };
    assert_eq!(differences("{}"), []);
    assert_eq!(differences("{ null_key = true }"), one("key", "null", "k"));
    assert_eq!(differences("{ tombstone = true }"), one("value", "null", "{}"));
    assert_eq!(differences("{ json = \"{ }\" }"), one("value", "{ }", "{}"));
    assert_eq!(differences("{ timestamp = 1970-01-01T00:00:00.006Z }"), one("timestamp", "6", "5"));
    assert_eq!(differences("{ headers = [] }"), one("headers", "[]", "[h=1]"));
}

#[test]
fn of_equal_versions_the_first_stays_and_a_delete_is_a_version() {
    let report = report(&format!(
        "{TABLE}deleted = \"gone\"\ndelete_when = \".gone == true\"\n[[tests]]\nname = \"x\"\n\
         inputs = [{{ source = \"in\", value = {{ id = 10, version = 7, v = \"x\" }} }}, \
         {{ source = \"in\", value = {{ id = 10.0, version = 7, v = \"y\" }} }}, \
         {{ source = \"in\", value = {{ id = 9, version = 5, gone = true }} }}, \
         {{ source = \"in\", value = {{ id = 9, version = 4 }} }}, \
         {{ source = \"in\", value = {{ id = 8, version = 1, v = \"z\" }} }}, \
         {{ source = \"in\", value = {{ id = 8, version = 2 }} }}]\n\
         [[tests.outputs]]\nsink = \"rows\"\nrows = [{{ id = 8, version = 2, v = 1 }}, {{ id = 10, v = \"x\" }}]\n\
         deleted = [9]\n"
    ));
    assert_eq!(
        report.differences,
        [difference("rows", "row 1 of 2, v", Some("1"), Some("NULL"))],
        "a row is replaced in full"
    );
}

#[test]
fn null_values_delete_where_the_sink_says_so() {
    let report = report(&format!(
        "{TABLE}deleted = \"gone\"\ntombstones = \"delete\"\ncolumns = {{ id = \"%key\", version = \"%offset\" }}\n\
         [[tests]]\nname = \"x\"\n\
         inputs = [{{ source = \"in\", key = \"a\", value = {{}} }}, {{ source = \"in\", key = \"b\", value = {{}} }}, \
         {{ source = \"in\", key = \"a\", tombstone = true }}]\n\
         outputs = [{{ sink = \"rows\", rows = [{{ id = \"b\", version = 1 }}], deleted = [\"a\"] }}]\n"
    ));
    assert_eq!(report.differences, []);
}

#[test]
fn on_error_rejects_skips_or_stops() {
    let with = |on_error: &str| {
        report(&format!(
            "on_error = \"{on_error}\"\n{PASS}[[tests]]\nname = \"x\"\n\
             inputs = [{{ source = \"in\", text = \"[]\" }}, {{ source = \"in\", value = {{}} }}]\n\
             outputs = [{{ sink = \"out\", records = [{{}}] }}, {{ sink = \"dead_letters\", records = [] }}]\n"
        ))
    };
    let rejected = with("reject");
    assert_eq!(rejected.differences.len(), 1);
    assert_eq!(rejected.differences[0].actual.as_ref(), Some(&rejected.rejected[0]));
    assert!(rejected.rejected[0].starts_with("node in, reason undecodable: "), "{:?}", rejected.rejected);
    assert!(with("skip").passed());
    let stopped = with("stop");
    assert!(!stopped.passed());
    let message = stopped.stopped.unwrap();
    assert!(message.starts_with("in-0 at offset 0: in: "), "{message}");
    assert_eq!(stopped.differences, [difference("out", "record 1 of 1", Some("a record"), None)]);
}

/// The report of a sink that has `settings` and no version, of three records of which two are the same event.
fn report_of(settings: &str, rows: &str) -> TestReport {
    report(&format!(
        "event_id = \".e\"\n[sinks.rows]\ntype = \"postgres\"\ninputs = [\"in\"]\n\
         url = \"postgres://localhost/x\"\ntable = \"t\"\n{settings}\n[[tests]]\nname = \"x\"\n\
         inputs = [{{ source = \"in\", value = {{ e = 1, id = \"a\", n = 0.1, name = \"x\" }} }}, \
         {{ source = \"in\", value = {{ e = 2, id = \"a\", n = 0.2 }} }}, \
         {{ source = \"in\", value = {{ e = 1, id = \"a\", n = 0.1, name = \"x\" }} }}]\n\
         outputs = [{{ sink = \"rows\", rows = {rows} }}, {{ sink = \"dead_letters\", records = [] }}]\n"
    ))
}

#[test]
fn each_mode_and_the_ledger_do_to_the_table_what_they_do_to_postgres() {
    let dedupe = "dedupe = { table = \"seen\", retention = \"14d\" }";
    let insert = "mode = \"insert\"\n";
    let rows = |rows: &str| report_of(&format!("{insert}{dedupe}"), rows).differences;
    assert_eq!(rows("[{ n = 0.1, name = \"x\" }, { n = 0.2 }]"), []);
    assert_eq!(report_of(insert, "[{ n = 0.1 }, { n = 0.2 }, { n = 0.1 }]").differences, []);
    let add = format!("mode = \"add\"\nkey = [\"id\"]\n{dedupe}");
    assert_eq!(report_of(&add, "[{ id = \"a\", n = 0.3 }]").differences, []);
    let update = "mode = \"update\"\nkey = [\"id\"]\n";
    assert_eq!(report_of(update, "[]").differences, [], "there is no row to update");
}

#[test]
fn each_test_begins_with_nothing() {
    let test = "[[tests]]\nname = \"NAME\"\ninputs = [{ source = \"in\", value = { id = 1, version = 1 } }]\n\
                outputs = [{ sink = \"rows\", rows = [{ id = 1 }] }]\n";
    let reports = reports(&format!("{TABLE}{}{}", test.replace("NAME", "a"), test.replace("NAME", "b")));
    assert_eq!(reports.iter().map(|r| (r.name.as_str(), r.passed())).collect::<Vec<_>>(), [("a", true), ("b", true)]);
    assert!(reports[0].line < reports[1].line);
}
