//! The topologies of the repository are right, and `semel test` says how tests went.

use std::path::PathBuf;

use assert_cmd::Command;
use serde_json::{Value, json};

fn semel() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_semel"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("DATABASE_URL").env_remove("KAFKA_BROKERS");
    command
}

fn topologies() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/topologies")).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    files
}

#[test]
fn every_topology_passes_its_check_and_its_tests() {
    let files = topologies();
    assert!(files.len() >= 3);
    // All at once, so that two of one name would be seen too.
    semel().args(["check"]).args(&files).assert().code(0);
    // A plain insert is what five-orders.toml is there to warn of.
    let (warns, rest): (Vec<PathBuf>, Vec<PathBuf>) =
        files.iter().cloned().partition(|f| f.ends_with("five-orders.toml"));
    semel().args(["check", "--deny-warnings"]).args(rest).assert().code(0);
    let output = semel().args(["check", "--json"]).args(warns).output().unwrap();
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let warnings = findings.iter().filter(|finding| finding["severity"] == "warning");
    assert_eq!(warnings.map(|w| w["code"].clone()).collect::<Vec<_>>(), ["redelivery"]);
    let output = semel().args(["test", "--json"]).args(&files).output().unwrap();
    let reports: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let failed: Vec<_> = reports.iter().filter(|report| report["passed"] != true).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert_eq!(output.status.code(), Some(0));
    for file in files {
        let tests = reports.iter().filter(|report| report["file"] == file.to_str().unwrap()).count();
        assert!(tests >= 3, "{} has {tests} tests", file.display());
    }
}

/// `orders.toml` with one expectation changed.
fn changed(from: &str, to: &str) -> (tempfile::TempDir, PathBuf) {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/orders.toml")).unwrap();
    assert!(text.contains(from));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("orders.toml");
    std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
    (directory, path)
}

#[test]
fn a_failed_test_shows_what_was_expected_above_what_came() {
    let (_directory, path) = changed("rows = [{ order_id = \"o1\", status = \"paid\"", "rows = [{ status = \"placed\"");
    let output = semel().arg("test").arg(&path).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    let expected = "      orders_table: row 1 of 1, status\n        expected  \"placed\"\n        actual    \"paid\"\n \
                     \x20                  ^\n";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("  FAILED  the table keeps the highest version, whatever the order\n"), "{text}");
    assert!(text.ends_with("\n6 passed, 1 failed\n"), "{text}");

    let output = semel().args(["test", "--json"]).arg(&path).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let reports: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let failed = reports.iter().find(|report| report["passed"] == false).unwrap();
    assert_eq!(
        failed["differences"],
        json!([{ "sink": "orders_table", "at": "row 1 of 1, status", "expected": "\"placed\"", "actual": "\"paid\"" }])
    );
}

#[test]
fn errors_in_a_file_exit_with_1_an_unreadable_file_with_2_and_the_others_run() {
    let good = "topologies/baskets.toml";
    let output = semel().args(["test", "tests/findings/timeouts.toml", good]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().ends_with("\n4 passed, 0 failed\n"));
    assert!(String::from_utf8(output.stderr).unwrap().contains("error[commit-interval]"));
    let output = semel().args(["test", "none.toml", "tests/findings/timeouts.toml", good]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stdout).unwrap().ends_with("\n4 passed, 0 failed\n"));
}
