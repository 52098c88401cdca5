//! `semel drill`: what it proves, what it allows, and what it calls broken.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::job::harness::{Job, sql};
use crate::support::{self, SEMEL};

/// Orders that are priced and kept in a table; `GUARANTEE` and `COLUMNS` are the test's.
const TOPOLOGY: &str = r#"
name = "shop"
guarantee = "GUARANTEE"
kafka.brokers = "localhost:1"
[sources.orders]
type = "kafka"
topics = ["orders"]
event_id = ".event_id"
[transforms.priced]
type = "remap"
inputs = ["orders"]
source = ".total = to_int!(.qty) * to_int!(.price)"
[sinks.priced_orders]
type = "kafka"
inputs = ["priced"]
topic = "orders.priced"
key = ".order_id"
[sinks.orders_table]
type = "postgres"
inputs = ["priced_orders"]
url = "${DATABASE_URL}"
table = "orders"
key = ["order_id"]
version = "version"
COLUMNS
[[tests]]
name = "two orders, one of them twice, and no order"
inputs = [
  { source = "orders", key = "o1", value = { event_id = "e1", order_id = "o1", qty = 2, price = 3, version = 1 } },
  { source = "orders", key = "o1", value = { event_id = "e2", order_id = "o1", qty = 4, price = 3, version = 2 } },
  { source = "orders", key = "o2", value = { event_id = "e3", order_id = "o2", qty = 1, price = 5, version = 1 } },
  { source = "orders", key = "o2", value = { event_id = "e3", order_id = "o2", qty = 1, price = 5, version = 1 } },
  { source = "orders", key = "o3", text = "no order" },
]
outputs = []
"#;

/// The input that stands twice in the topology's test.
const SENT_TWICE: &str = "{ source = \"orders\", key = \"o2\", value = { event_id = \"e3\", order_id = \"o2\", qty = 1, price = 5, version = 1 } },";

/// What `semel drill --quick --json` says of the topology, and its exit status.
fn drill(guarantee: &str, args: &[&str]) -> (Value, Option<i32>) {
    drill_text(&TOPOLOGY.replace("GUARANTEE", guarantee).replace("COLUMNS", ""), args)
}

fn drill_text(topology: &str, args: &[&str]) -> (Value, Option<i32>) {
    let cluster = support::cluster();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shop.toml");
    std::fs::write(&file, topology).unwrap();
    let output = semel_drill(&file, cluster, args);
    let report = serde_json::from_slice(&output.stdout);
    (report.unwrap_or_else(|e| panic!("{e}\n{}", text(&output))), output.status.code())
}

fn semel_drill(file: &Path, cluster: &semel::cluster::Cluster, args: &[&str]) -> Output {
    let mut command = Command::new(SEMEL);
    command.args(["drill", "--quick", "--json", "--external"]).args(args).arg(file);
    command.env("KAFKA_BROKERS", &cluster.brokers).env("DATABASE_URL", &cluster.database_url);
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    let utf8 = |bytes| String::from_utf8_lossy(bytes).into_owned();
    format!("{}\n{}", utf8(&output.stdout), utf8(&output.stderr))
}

/// `stage point` of every crash, those of one place once.
fn places(report: &Value) -> Vec<String> {
    let crashes = report["crashes"].as_array().unwrap();
    let mut places: Vec<String> = crashes
        .iter()
        .map(|c| format!("{} {}", c["stage"].as_str().unwrap_or("all"), c["point"].as_str().unwrap()))
        .collect();
    places.dedup();
    places
}

/// Lost, doubled and different of an end after a crash.
fn counts(crash: &Value, end: &str) -> Option<[u64; 3]> {
    let end = crash["ends"].as_array().unwrap().iter().find(|found| found["end"] == end)?;
    Some(["lost", "doubled", "different"].map(|count| end[count].as_u64().unwrap()))
}

#[test]
fn a_drill_proves_exactly_once_at_every_place_and_leaves_nothing_behind() {
    if !support::online("a drill of an exactly-once topology") {
        return;
    }
    let page = tempfile::NamedTempFile::new().unwrap();
    let (report, exit) = drill("exactly-once", &["--seed", "71101", "--html", page.path().to_str().unwrap()]);
    assert_eq!((exit, &report["broken"]), (Some(0), &Value::Bool(false)), "{report:#}");
    assert_eq!(
        places(&report),
        [
            "shop after-produce",
            "shop after-send-offsets",
            "shop before-commit",
            "shop commit-in-flight",
            "shop after-commit",
            "orders_table after-database-commit",
            "orders_table after-send-offsets",
            "orders_table before-commit",
            "orders_table commit-in-flight",
            "orders_table after-commit",
            "all random-moment",
        ]
    );
    let found: Vec<_> = report["without_crash"].as_array().unwrap().iter().map(|end| end["found"].clone()).collect();
    assert_eq!(found, [48, 24, 12], "outputs, rows and dead letters of 60 records");
    for crash in report["crashes"].as_array().unwrap().iter().chain([&report["replay"]]) {
        assert_ne!(crash["fate"], "not reached", "{crash:#}");
        assert_eq!(crash["positions_behind"], 0, "{crash:#}");
        for end in ["topic orders.priced", "table orders", "dead letters"] {
            let own = crash["stage"] != "orders_table" || end != "topic orders.priced";
            assert_eq!(counts(crash, end), own.then_some([0, 0, 0]), "{end}: {crash:#}");
        }
    }
    let in_flight = |stage: &str| {
        let crashes = report["crashes"].as_array().unwrap().iter();
        crashes.filter(|c| c["stage"] == stage && c["fate"] == "killed in flight").count()
    };
    assert_eq!([in_flight("shop"), in_flight("orders_table")], [1, 1], "kills between a commit and its answer");

    let page = std::fs::read_to_string(page.path()).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("every guarantee was kept"), "{page}");
    assert!(page.contains("<td class=\"right\">right</td>") && !page.contains("class=\"broken\""), "{page}");
    assert!(!page.contains("http"), "a page of its own asks nobody");

    let cluster = support::cluster();
    let left = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'drill_71101_%'";
    assert_eq!(sql(&cluster.database_url, left), Vec::<Vec<Option<String>>>::new());
}

#[test]
fn a_drill_lets_at_least_once_double_and_shows_that_it_does() {
    if !support::online("a drill of an at-least-once topology") {
        return;
    }
    let (report, exit) = drill("at-least-once", &[]);
    assert_eq!((exit, &report["broken"]), (Some(0), &Value::Bool(false)), "{report:#}");
    let crashes = report["crashes"].as_array().unwrap();
    let before = crashes.iter().find(|c| c["stage"] == "shop" && c["point"] == "before-commit").unwrap();
    let [lost, doubled, different] = counts(before, "topic orders.priced").unwrap();
    assert!(lost == 0 && doubled > 0 && different == 0, "outputs were there, positions were not: {before:#}");
    assert_eq!(counts(before, "table orders"), Some([0, 0, 0]), "the guard takes each version once");
    assert!(!places(&report).contains(&"shop after-send-offsets".to_owned()), "there is no transaction");
}

#[test]
fn a_drill_calls_a_table_broken_that_a_crash_makes_another() {
    if !support::online("a drill of a topology that cannot keep its promise") {
        return;
    }
    // Where a record lies is another place after an aborted transaction: such a column makes another table.
    let topology =
        TOPOLOGY.replace("GUARANTEE", "exactly-once").replace("COLUMNS", "columns = { place = \"%offset\" }");
    // Sent twice, an order would have one version with two contents: then contents are not compared.
    let (report, exit) = drill_text(&topology.replacen(SENT_TWICE, "", 1), &[]);
    assert_eq!((exit, &report["broken"]), (Some(4), &Value::Bool(true)), "{report:#}");
    let crashes = report["crashes"].as_array().unwrap();
    let aborted = crashes.iter().find(|c| c["stage"] == "shop" && c["point"] == "after-send-offsets").unwrap();
    let [lost, doubled, different] = counts(aborted, "table orders").unwrap();
    assert!(lost == 0 && doubled == 0 && different > 0, "{aborted:#}");
    assert_eq!(counts(aborted, "topic orders.priced"), Some([0, 0, 0]));
}

/// Sums, which nothing but the positions beside them keeps from being added twice.
const SUMS: &str = r#"
name = "sums"
kafka.brokers = "localhost:1"
[sources.payments]
type = "kafka"
topics = ["payments"]
event_id = ".event_id"
[sinks.balances]
type = "postgres"
inputs = ["payments"]
url = "${DATABASE_URL}"
table = "balances"
mode = "add"
key = ["account"]
progress = "postgres"
[[tests]]
name = "two accounts"
inputs = [
  { source = "payments", key = "a", value = { event_id = "e1", account = "a", amount = 5 } },
  { source = "payments", key = "a", value = { event_id = "e2", account = "a", amount = 7 } },
  { source = "payments", key = "b", value = { event_id = "e3", account = "b", amount = 1 } },
]
outputs = []
"#;

#[test]
fn a_drill_reads_positions_beside_the_rows_and_finds_sums_exact() {
    if !support::online("a drill of a topology with positions in its database") {
        return;
    }
    let (report, exit) = drill_text(SUMS, &[]);
    assert_eq!((exit, &report["broken"]), (Some(0), &Value::Bool(false)), "{report:#}");
    assert_eq!(report["without_crash"][0]["found"], 40, "two accounts, 20 times");
    for crash in report["crashes"].as_array().unwrap() {
        assert_eq!((counts(crash, "table balances"), &crash["positions_behind"]), (Some([0, 0, 0]), &0.into()));
    }
}

/// Records of the user's own, instead of those of the file's tests.
#[test]
fn a_drill_takes_its_records_from_a_file_or_from_the_topic() {
    let Some(cluster) = support::broker("drills with given records") else { return };
    let job = Job::new(cluster, "sample", 1);
    let text = SUMS.split("[[tests]]").next().unwrap().replace("localhost:1", &cluster.brokers);
    let text = text.replace("\"payments\"]\nevent", &format!("\"{}\"]\nevent", job.topic("in")));
    let payments: Vec<(String, String)> = (0..12)
        .map(|i| (format!("k{i}"), format!(r#"{{"event_id":"e{i}","account":"a{}","amount":{i}}}"#, i % 6)))
        .collect();
    job.produce_keyed("in", 1, payments.iter().cloned());
    let lines = payments.iter().map(|(key, value)| format!("{{\"key\":\"{key}\",\"value\":{value}}}\n"));
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, lines.collect::<String>()).unwrap();
    let file = file.path().to_str().unwrap();
    let drills = |args: [&str; 2], records: u64, rows: u64| {
        let (report, exit) = drill_text(&text, &args);
        assert_eq!((exit, &report["broken"]), (Some(0), &Value::Bool(false)), "{report:#}");
        assert!(report["input"].as_str().unwrap().starts_with(&format!("{records} records")), "{report:#}");
        assert_eq!(report["without_crash"][0]["found"], rows, "{report:#}");
        let crashes = report["crashes"].as_array().unwrap();
        assert!(crashes.iter().any(|crash| crash["fate"] == "killed"), "{report:#}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| drills(["--input", file], 12, 6));
        drills(["--sample", "4"], 4, 4);
    });
}

/// What each way of giving an order its invoice does when the process is killed at order-3: guarantee, where, killed at,
/// what becomes of it, and how many were passed over.
const FIVE_ORDERS: &[[&str; 5]] = &[
    ["at-most-once", "topic invoices", "after-commit", "order-3 lost", "0"],
    ["at-most-once", "table invoices_plain", "after-commit", "order-3 lost", "0"],
    ["at-most-once", "table invoices_once", "after-commit", "order-3 lost", "0"],
    ["at-most-once", "table order_view", "after-commit", "order-3 lost", "0"],
    ["at-least-once", "topic invoices", "before-commit", "order-3 twice", "0"],
    ["at-least-once", "table invoices_plain", "after-database-commit", "order-3 twice", "0"],
    ["at-least-once", "table invoices_once", "after-database-commit", "each once", "1"],
    ["at-least-once", "table order_view", "after-database-commit", "each once", "1"],
    ["exactly-once", "topic invoices", "before-commit", "each once", "0"],
    ["exactly-once", "table invoices_plain", "after-database-commit", "order-3 twice", "0"],
    ["exactly-once", "table invoices_once", "after-database-commit", "each once", "1"],
    ["exactly-once", "table order_view", "after-database-commit", "each once", "1"],
    ["one id", "topic invoices", "not killed", "order-3 twice", "0"],
    ["one id", "table invoices_plain", "not killed", "order-3 twice", "0"],
    ["one id", "table invoices_once", "not killed", "each once", "1"],
    ["one id", "table order_view", "not killed", "each once", "1"],
    ["an id made anew", "topic invoices", "not killed", "order-3 twice", "0"],
    ["an id made anew", "table invoices_plain", "not killed", "order-3 twice", "0"],
    ["an id made anew", "table invoices_once", "not killed", "order-3 twice", "0"],
    ["an id made anew", "table order_view", "not killed", "each once", "1"],
    ["enable.auto.commit", "its effects", "committed too early", "order-3 lost", "0"],
    ["enable.auto.commit", "its effects", "committed too late", "order-1 twice, order-2 twice, order-3 twice", "0"],
];

#[test]
fn five_orders_show_what_each_guarantee_loses_and_doubles() {
    if !support::online("a drill of topologies/five-orders.toml") {
        return;
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/five-orders.toml");
    let output = semel_drill(&file, support::cluster(), &[]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}\n{}", text(&output)));
    assert_eq!((output.status.code(), &report["broken"]), (Some(0), &Value::Bool(false)), "{report:#}");
    let rows = report["rows"].as_array().unwrap().iter().map(|row| {
        assert_eq!(row["expected"], row["observed"], "{row:#}");
        let cell = |name: &str| row[name].as_str().unwrap().to_owned();
        let observed = row["observed"]["text"].as_str().unwrap().to_owned();
        [cell("how"), cell("end"), cell("killed"), observed, row["skipped"].to_string()]
    });
    assert_eq!(rows.collect::<Vec<_>>(), FIVE_ORDERS);
}

/// Sums in a table whose ledger keeps an event from being added twice.
const ADDED: &str = r#"
name = "added"
batch_records = 1
kafka.brokers = "localhost:1"
[sources.payments]
type = "kafka"
topics = ["payments"]
event_id = ".event_id"
[sinks.balances]
type = "postgres"
inputs = ["payments"]
url = "${DATABASE_URL}"
table = "balances"
mode = "add"
key = ["account"]
dedupe = { table = "seen", retention = "14d" }
[drill]
guarantees = ["at-least-once"]
[[tests]]
name = "three accounts"
inputs = [
  { source = "payments", key = "a", value = { event_id = "e1", account = "a", amount = 5 } },
  { source = "payments", key = "b", value = { event_id = "e2", account = "b", amount = 7 } },
  { source = "payments", key = "c", value = { event_id = "e3", account = "c", amount = 1 } },
]
outputs = []
"#;

#[test]
fn effects_of_sums_are_counted_by_what_was_added() {
    if !support::online("a comparison of guarantees on sums") {
        return;
    }
    let (report, exit) = drill_text(ADDED, &[]);
    assert_eq!((exit, &report["broken"]), (Some(0), &Value::Bool(false)), "{report:#}");
    let rows = report["rows"].as_array().unwrap().iter().filter(|row| row["end"] == "table balances");
    let rows: Vec<_> =
        rows.map(|row| (row["how"].as_str().unwrap(), row["observed"]["text"].as_str().unwrap())).collect();
    assert_eq!(rows, [("at-least-once", "each once"), ("one id", "each once"), ("an id made anew", "b twice")]);
    // A record that is rejected without a crash has no effect to count.
    let (message, exit) = refused(&ADDED.replace("event_id = \"e2\", ", ""));
    assert_eq!(exit, Some(2), "{message}");
    assert!(message.contains("rejected even without a crash"), "{message}");
}

/// What `semel drill` says of a topology that it does not drill.
fn refused(topology: &str) -> (String, Option<i32>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("refused.toml");
    std::fs::write(&file, topology).unwrap();
    let output = semel_drill(&file, support::cluster(), &[]);
    (text(&output), output.status.code())
}
