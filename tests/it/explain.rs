//! `semel explain`.

use assert_cmd::Command;
use serde_json::{Value, json};

use crate::golden::golden;

fn explain(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_semel"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("DATABASE_URL").env_remove("KAFKA_BROKERS");
    let output = command.arg("explain").args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_plan_of_orders_in_every_format() {
    let file = "topologies/orders.toml";
    golden("tests/explain/orders.txt", &explain(&[file]));
    golden("tests/explain/orders.dot", &explain(&["--format", "dot", file]));
    golden("tests/explain/orders.mmd", &explain(&["--format", "mermaid", file]));
    golden("tests/explain/orders.json", &explain(&["--format", "json", file]));
    assert_eq!(explain(&["--json", file]), explain(&["--format", "json", file]));
}

#[test]
fn the_plan_shows_stores_and_what_they_are_restored_from() {
    let file = "topologies/customer-revenue.toml";
    golden("tests/explain/customer-revenue.txt", &explain(&[file]));
    golden("tests/explain/customer-revenue.dot", &explain(&["--format", "dot", file]));
    golden("tests/explain/customer-revenue.mmd", &explain(&["--format", "mermaid", file]));
    golden("tests/explain/customer-revenue.json", &explain(&["--format", "json", file]));
    let file = "topologies/word-count.toml";
    golden("tests/explain/word-count.txt", &explain(&[file]));
    for name in ["windowed-revenue", "sessions", "fraud-detection"] {
        golden(&format!("tests/explain/{name}.txt"), &explain(&[&format!("topologies/{name}.toml")]));
    }
    golden("tests/explain/word-count.mmd", &explain(&["--format", "mermaid", file]));
    let file = "topologies/orders-with-customers.toml";
    golden("tests/explain/orders-with-customers.txt", &explain(&[file]));
    golden("tests/explain/orders-with-customers.mmd", &explain(&["--format", "mermaid", file]));
}

#[test]
fn at_least_once_says_that_nothing_is_exactly_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("orders.toml");
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/orders.toml")).unwrap();
    std::fs::write(&path, text.replace("\"exactly-once\"", "\"at-least-once\"")).unwrap();
    let path = path.to_str().unwrap();
    let text = explain(&[path]);
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part} is not in\n{text}"));
    assert!(at("─── nothing here is exactly-once ─") < at("stage orders: Kafka to Kafka"));
    assert!(!text.contains("  exactly-once"), "{text}");
    assert!(!text.contains("transactional ids"), "{text}");

    let plan: Value = serde_json::from_str(&explain(&["--json", path])).unwrap();
    let edges = plan["edges"].as_array().unwrap();
    let guarantee = |from: &str, to: &str| {
        let edge = edges.iter().find(|e| e["from"]["name"] == from && e["to"]["name"] == to).unwrap();
        edge["guarantee"].clone()
    };
    assert_eq!(guarantee("orders_priced", "orders.priced"), "at-least-once");
    assert_eq!(guarantee("orders_table", "orders"), "effectively-once", "the version guard holds all the same");
    assert_eq!(plan["exactly_once_ends"][0]["before_stage"], json!("orders"));
}

#[test]
fn a_file_with_errors_exits_with_1_and_shows_them() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_semel"));
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = command.args(["explain", "tests/findings/timeouts.toml"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("error[commit-interval]"), "{errors}");
    assert!(errors.ends_with("semel: tests/findings/timeouts.toml has 2 errors; `semel check` shows all findings\n"));
}
