//! `semel check`: every finding in a file that has it, and the command itself.

use std::collections::BTreeSet;
use std::path::Path;

use assert_cmd::Command;
use semel::topology::finding::FINDINGS;
use semel::topology::{load, report};
use serde_json::{Value, json};

use crate::golden::golden;

fn semel() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_semel"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("DATABASE_URL").env_remove("KAFKA_BROKERS");
    command
}

/// Each `tests/findings/*.toml` says what the file of the same name and `.txt` says, and together they have all
/// findings there are.
#[test]
fn each_bad_file_gets_its_findings_all_in_one_run() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/findings");
    let mut seen = BTreeSet::new();
    let entries = std::fs::read_dir(directory).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    files.sort();
    for path in files {
        let name = format!("tests/findings/{}", path.file_name().unwrap().to_str().unwrap());
        let text = std::fs::read_to_string(&path).unwrap();
        let loaded = load(&text, &name, &|_| None);
        assert!(!loaded.findings.is_empty(), "{name} has no findings");
        assert_eq!(loaded.topology.is_some(), !loaded.findings.iter().any(|f| f.is_error()), "{name}");
        seen.extend(loaded.findings.iter().map(|finding| finding.code));
        let text = report::render(&text, &loaded.findings, false);
        assert!(!text.contains("hunter2"), "a password of the file is shown");
        // The renderer ends empty lines in blanks; files of the repository have none.
        let lines: Vec<_> = text.trim_end().lines().map(str::trim_end).collect();
        golden(&name.replace(".toml", ".txt"), &(lines.join("\n") + "\n"));
    }
    // Two files are needed for this one; it has a test of its own.
    seen.insert("duplicate-topology");
    // These need a broker and a database; `job::refusals` and `job::aggregates` have them.
    seen.extend(["broker", "database", "state"]);
    let unseen: Vec<_> = FINDINGS.iter().map(|(slug, _)| slug).filter(|slug| !seen.contains(**slug)).collect();
    assert!(unseen.is_empty(), "no file in tests/findings has these: {unseen:?}");
}

#[test]
fn errors_exit_with_1_warnings_and_notes_with_0_unless_denied() {
    let shared = "tests/findings/long-timeouts.toml";
    semel().args(["check", "tests/findings/keys.toml"]).assert().code(1);
    semel().args(["check", shared]).assert().code(0);
    semel().args(["check", "--deny-warnings", shared]).assert().code(1);
    // A variable that is not set is a note: the file itself is right.
    semel().args(["check", "--deny-warnings", "topologies/orders.toml"]).assert().code(0);
}

#[test]
fn a_file_that_cannot_be_read_exits_with_2_and_the_others_are_checked_all_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let latin1 = directory.path().join("latin1.toml");
    std::fs::write(&latin1, b"name = \"caf\xe9\"").unwrap();
    let output = semel().args(["check", "none.toml", "topologies/orders.toml"]).arg(&latin1).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("semel: cannot read none.toml: No such file or directory"), "{errors}");
    assert!(errors.contains("latin1.toml: not UTF-8 text from byte 11 on"), "{errors}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("topologies/orders.toml: 1 note"));
    semel().arg("check").assert().code(2);
    semel().args(["check", "--format", "yaml", "x.toml"]).assert().code(2);
}

#[test]
fn json_is_one_array_of_findings_with_their_places() {
    let output = semel().args(["check", "--json", "tests/findings/timeouts.toml"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        findings[0],
        json!({
            "file": "tests/findings/timeouts.toml",
            "line": 2,
            "column": 19,
            "end_line": 2,
            "end_column": 23,
            "severity": "error",
            "code": "commit-interval",
            "message": "`commit_interval` (5s) must be below half of `transaction_timeout` (10s)",
            "help": "a transaction that is open for that long would be timed out by the broker under load",
        })
    );
    let keys = ["file", "line", "column", "end_line", "end_column", "severity", "code", "message", "help"];
    let text = String::from_utf8(output.stdout).unwrap();
    let places: Vec<_> = keys.iter().map(|key| text.find(&format!("\"{key}\"")).unwrap()).collect();
    assert!(places.is_sorted(), "the members come in the documented order");
    assert!(findings.iter().all(|f| f["help"].is_string() || f["help"].is_null()));
}

#[test]
fn two_files_of_one_name_would_share_a_group() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("copy.toml");
    std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/orders.toml"), &copy).unwrap();
    let output = semel().args(["check", "--json", "topologies/orders.toml"]).arg(&copy).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let found = findings.iter().find(|f| f["code"] == "duplicate-topology").unwrap();
    assert_eq!(found["file"], copy.to_str().unwrap());
    assert_eq!(found["message"], "topologies/orders.toml has the same `name`");
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let command = format!("{} check tests/findings/*.toml | head -n 1", env!("CARGO_BIN_EXE_semel"));
    let output = Command::new("sh").args(["-c", &command]).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"));
}

proptest::proptest! {
    /// A good file with a few characters gone, doubled or changed: findings, and never a panic.
    #[test]
    fn damaged_files_get_findings_and_no_panic(
        damage in proptest::collection::vec((0..8000usize, 0..4u8, "[ -~åø\\n]"), 1..6)
    ) {
        let mut text = include_str!("../../topologies/orders.toml").to_owned();
        for (at, kind, with) in damage {
            let at = (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap();
            let end = text[at..].chars().next().map_or(at, |c| at + c.len_utf8());
            match kind {
                0 => text.replace_range(at..end, ""),
                1 => text.insert_str(at, &with),
                2 => text.replace_range(at..end, &with),
                _ => text.truncate(at),
            }
        }
        let loaded = load(&text, "damaged.toml", &|_| None);
        report::render(&text, &loaded.findings, false);
    }
}

/// What the parser or the checker might recurse on, index with, or divide by.
#[test]
fn hostile_files_get_findings_and_no_panic() {
    let deep = "[".repeat(1_000_000);
    let nested = format!("a = {}{}", "{ b = ".repeat(2000), "1".to_owned() + &" }".repeat(2000));
    let dotted = format!("{} = 1", vec!["a"; 5000].join("."));
    for text in [
        deep.as_str(),
        &format!("x = {deep}"),
        &nested,
        &dotted,
        "\u{feff}name = \"x\"",
        "name = \"\\u0000\"",
        "name = \"å\n",
        "\r\n\r\nname = 'x",
        "[sources.a]\n[sources.a]",
        "sources = 1\nsinks = [1]\ntransforms = \"x\"\ntests = [1, [2], {}]",
        "[[sources]]\n[[sinks.x]]\n",
        "workers = 99999999999999999999999999\nmemory = 1e400",
        "start = 0000-00-00T00:00:00Z",
        "name =",
        "[kafka]\nproperties = { a = ",
    ] {
        let loaded = load(text, "hostile.toml", &|_| Some("${X}".to_owned()));
        assert!(loaded.topology.is_none());
        assert!(loaded.findings.iter().any(|finding| finding.is_error()));
        report::render(text, &loaded.findings, true);
    }
}

/// Properties that the client has for itself and does not document.
const UNDOCUMENTED: [&str; 6] = [
    "client.software.name",
    "enable.sparse.connections",
    "enable_sasl_queue",
    "metadata.request.timeout.ms",
    "test.mock.broker.rtt",
    "test.mock.num.brokers",
];

/// The client's own list: a property of a newer client must not be called unknown.
#[test]
fn no_property_of_the_client_is_unknown() {
    use rdkafka::bindings::{rd_kafka_conf_destroy, rd_kafka_conf_dump, rd_kafka_conf_dump_free, rd_kafka_conf_new};
    // SAFETY: the dump is an array of `count` C strings, names and values in turn, that lives until it is freed.
    let names: Vec<String> = unsafe {
        let conf = rd_kafka_conf_new();
        let mut count = 0;
        let dump = rd_kafka_conf_dump(conf, &mut count);
        let texts = std::slice::from_raw_parts(dump, count);
        let names = texts.iter().step_by(2).map(|name| std::ffi::CStr::from_ptr(*name).to_string_lossy().into_owned());
        let names = names.collect();
        rd_kafka_conf_dump_free(dump, count);
        rd_kafka_conf_destroy(conf);
        names
    };
    assert!(names.len() > 80, "{names:?}");
    let documented = names.iter().filter(|name| !UNDOCUMENTED.contains(&name.as_str()));
    let properties: String = documented.map(|name| format!("\"{name}\" = \"\"\n")).collect();
    let text = format!("name = \"t\"\n[kafka]\nbrokers = \"localhost\"\n[kafka.properties]\n{properties}");
    let loaded = load(&text, "t.toml", &|_| None);
    let unknown: Vec<_> = loaded.findings.iter().filter(|f| f.code == "unknown-property").map(|f| &f.message).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}
