//! `semel bench`: what it measures, what it prints, and what it leaves behind.

use std::process::{Command, Output};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use serde_json::Value;
use tempfile::TempDir;

use crate::job::harness::sql;
use crate::support::{self, SEMEL};

fn bench(args: &[&str]) -> Output {
    let cluster = support::cluster();
    let mut command = Command::new(SEMEL);
    command.args(["bench", "--quick", "--external"]).args(args);
    command.env("KAFKA_BROKERS", &cluster.brokers).env("DATABASE_URL", &cluster.database_url);
    command.output().unwrap()
}

/// The orders with topics and a table of their own name.
fn orders(name: &str) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("orders.toml");
    let text = std::fs::read_to_string("topologies/orders.toml").unwrap();
    let text = text.replace("topics = [\"orders\"]", &format!("topics = [\"{name}\"]"));
    let text = text.replace("topic = \"orders.priced\"", &format!("topic = \"{name}.priced\""));
    std::fs::write(&file, text.replace("table = \"orders\"", &format!("table = \"{name}\""))).unwrap();
    let path = file.to_str().unwrap().to_owned();
    (folder, path)
}

fn report(output: &Output) -> Value {
    let report = serde_json::from_slice(&output.stdout);
    report.unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn every_guarantee_is_measured_on_the_same_input_and_nothing_is_left_behind() {
    if !support::online("a benchmark") {
        return;
    }
    let name = support::unique("measured");
    let (folder, file) = orders(&name);
    let path = |name: &str| folder.path().join(name);
    let (csv, html) = (path("runs.csv"), path("page.html"));
    let output = bench(&[
        &file,
        "--json",
        "--records=3000",
        "--rounds=2",
        "--intervals=20ms,100ms",
        "--rates=300",
        "--csv",
        csv.to_str().unwrap(),
        "--html",
        html.to_str().unwrap(),
    ]);
    let report = report(&output);
    let throughput = report["throughput"].as_array().unwrap();
    let settings: Vec<_> = throughput
        .iter()
        .map(|t| {
            let setting = &t["setting"];
            let bytes = t["record_bytes"].as_u64().unwrap();
            (setting["commit_interval_ms"].as_u64().unwrap(), bytes >= 1000, t["guarantee"].as_str().unwrap())
        })
        .collect();
    let (exactly, at_least) = ("exactly-once", "at-least-once");
    assert_eq!(
        settings,
        [
            (20, false, exactly),
            (20, false, at_least),
            (100, false, exactly),
            (100, false, at_least),
            (100, true, exactly),
            (100, true, at_least),
        ]
    );
    for measured in throughput {
        let runs = measured["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 2);
        for run in runs {
            assert_eq!((&run["records"], &run["rejected"]), (&3000.into(), &0.into()), "{run}");
            assert!(run["commits"].as_u64() >= Some(1) && run["cpu_seconds"].as_f64() > Some(0.0), "{run}");
        }
        let at_least_once = measured["guarantee"] == at_least;
        assert!(!at_least_once || measured["of_at_least_once"] == 1.0, "{measured}");
    }
    let latency = report["latency"].as_array().unwrap();
    assert_eq!(latency.len(), 4);
    for found in latency {
        // Two of the eleven inputs that pass are cancelled orders or sent twice; each output is timed.
        assert!(found["records"].as_u64() > Some(300), "{found}");
        let [p50, p99, max] = ["p50", "p99", "max"].map(|name| found["ms"][name].as_f64().unwrap());
        assert!(p50 > 0.0 && p50 <= p99 && p99 <= max, "{found}");
    }
    let csv = std::fs::read_to_string(csv).unwrap();
    assert_eq!(csv.lines().count(), 1 + 6 * 2 + 4, "{csv}");
    let html = std::fs::read_to_string(html).unwrap();
    assert_eq!(html.matches("<svg").count(), 5, "two by interval, one by size, one a fixed rate and interval");

    let brokers = &support::cluster().brokers;
    let client: BaseConsumer = ClientConfig::new().set("bootstrap.servers", brokers).create().unwrap();
    let metadata = client.fetch_metadata(None, std::time::Duration::from_secs(10)).unwrap();
    let left: Vec<&str> = metadata.topics().iter().map(|topic| topic.name()).filter(|t| t.contains(&name)).collect();
    assert_eq!(left, Vec::<&str>::new());
}

#[test]
fn a_postgres_stage_is_measured_over_what_the_stage_before_it_wrote() {
    if !support::online("a benchmark of a Postgres stage") {
        return;
    }
    let name = support::unique("measured").replace('-', "_");
    let (_folder, file) = orders(&name);
    let output = bench(&[
        &file,
        "--only=orders_table",
        "--json",
        "--records=2000",
        "--rounds=1",
        "--intervals=100ms",
        "--sizes=1KiB",
    ]);
    let report = report(&output);
    assert_eq!(report["stage"], "orders_table");
    let throughput = report["throughput"].as_array().unwrap();
    assert_eq!(throughput.len(), 4);
    let records: Vec<u64> = throughput.iter().map(|t| t["runs"][0]["records"].as_u64().unwrap()).collect();
    assert!(records[0] > 1500 && records.iter().all(|count| *count == records[0]), "{records:?}");
    assert_eq!(report["latency"].as_array().unwrap().len(), 0);
    let tables = format!("SELECT 1 FROM pg_tables WHERE tablename = '{name}'");
    assert_eq!(sql(&support::cluster().database_url, &tables), Vec::<Vec<Option<String>>>::new());
}

#[test]
fn what_cannot_be_measured_is_refused_with_the_cure() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bare.toml");
    let text = std::fs::read_to_string("topologies/orders.toml").unwrap();
    std::fs::write(&file, text.split("[[tests]]").next().unwrap()).unwrap();
    let run = |args: &[&str]| {
        let output = Command::new(SEMEL).arg("bench").args(args).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, message) = run(&[file.to_str().unwrap()]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("--input FILE"), "{message}");
    let (code, message) = run(&["topologies/orders.toml", "--only=nothing"]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("orders_table"), "{message}");
    let (code, message) = run(&["topologies/orders.toml", "--intervals=soon"]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("100ms"), "{message}");
}
