//! `semel quickstart`: the main job on servers of its own, compared with an independent fold, nothing left behind.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::support::{self, SEMEL, eventually};

/// The command with a runtime directory of its own, so that what it leaves behind would be seen.
fn quickstart(home: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(SEMEL);
    command.arg("quickstart").args(arguments);
    command.env("XDG_RUNTIME_DIR", home).env("TMPDIR", home);
    command.env_remove("KAFKA_BROKERS").env_remove("DATABASE_URL").stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Processes that name the directory on their command lines.
fn processes(home: &Path) -> Vec<String> {
    let name = home.to_string_lossy().into_owned();
    let command_lines = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|process| {
        let line = std::fs::read(process.path().join("cmdline")).ok()?;
        Some(text(&line).replace('\0', " "))
    });
    command_lines.filter(|line| line.contains(&name)).collect()
}

/// What is left under a directory, but for the empty folder of the runtime directories.
fn files(folder: &Path) -> Vec<String> {
    let mut left = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        match entry.file_type().unwrap().is_dir() {
            true => left.extend(files(&entry.path())),
            false => left.push(entry.path().display().to_string()),
        }
    }
    left
}

#[test]
fn a_small_run_is_right_and_leaves_nothing_behind() {
    if !support::online("a_small_run_is_right_and_leaves_nothing_behind") {
        return;
    }
    let home = tempfile::tempdir_in("/tmp").unwrap();
    let output: Output = quickstart(home.path(), &["--records", "5000", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}\n{}", text(&output.stdout), text(&output.stderr));
    assert_eq!(processes(home.path()), [""; 0]);
    assert_eq!(files(home.path()), [""; 0]);

    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let of = |key: &str| found[key].clone();
    assert_eq!([of("in"), of("produced")], [5000, 5000]);
    assert_eq!([of("lost"), of("doubled"), of("different"), of("positions_behind")], [0, 0, 0, 0]);
    let number = |key: &str| of(key).as_u64().unwrap_or_else(|| panic!("{key}: {found}"));
    assert_eq!([of("rejected"), of("dead_letters")], [7, 7], "{found}");
    assert_eq!(
        of("rejects"),
        json!([
            { "node": "orders", "reason": "undecodable", "count": 6 },
            { "node": "orders_table", "reason": "database", "count": 1 },
        ])
    );
    // What was refused by the table had gone out before.
    assert_eq!(number("in"), number("out") + number("filtered") + 6);
    let applied = ["updates_applied", "updates_superseded", "stale"].map(number).iter().sum::<u64>();
    assert_eq!((number("out"), number("ties")), (applied + 1, 0), "each update is counted once");
    assert!(number("stale") > 0 && number("sent_twice") > 0 && number("sent_late") > 0, "{found}");
    assert!(number("deleted_rows") > 0 && number("deleted_rows") < number("rows"), "{found}");
    assert!(number("rows") < number("out"), "{found}");
    let guarantees: Vec<&str> =
        found["edges"].as_array().unwrap().iter().map(|e| e["guarantee"].as_str().unwrap()).collect();
    assert!(guarantees.contains(&"exactly-once") && guarantees.contains(&"effectively-once"), "{guarantees:?}");
}

#[test]
fn an_interrupt_stops_everything_in_good_order() {
    if !support::online("an_interrupt_stops_everything_in_good_order") {
        return;
    }
    let home = tempfile::tempdir_in("/tmp").unwrap();
    let path = home.path().join("said");
    let said = || std::fs::read_to_string(&path).unwrap();
    let file = std::fs::File::create(&path).unwrap();
    let mut command = quickstart(home.path(), &["--records", "400000"]);
    let mut child = command.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
    eventually(Duration::from_secs(120), "the job runs", || said().contains("running topologies/orders.toml"));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let mut status = None;
    eventually(Duration::from_secs(60), "the command ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(0), "{}", said());
    assert!(said().contains("nothing was compared") && !said().contains("compared with"), "{}", said());
    assert_eq!(processes(home.path()), [""; 0]);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(files(home.path()), [""; 0]);
}

#[test]
fn what_is_kept_can_be_used_and_given_servers_that_hold_something_are_refused() {
    let Some(cluster) = support::broker("what_is_kept_can_be_used_and_given_servers_that_hold_something_are_refused")
    else {
        return;
    };
    let home = tempfile::tempdir_in("/tmp").unwrap();
    let _down = DownAtTheEnd(home.path());
    let kept = quickstart(home.path(), &["--records", "2000", "--keep"]).output().unwrap();
    assert_eq!(kept.status.code(), Some(0), "{}\n{}", text(&kept.stdout), text(&kept.stderr));
    let summary = text(&kept.stdout);
    let exported = |name: &str| {
        let lines = summary.lines().filter_map(|line| line.trim().strip_prefix("export ")?.strip_prefix(name));
        lines.map(|value| value.trim_start_matches('=').to_owned()).next().unwrap_or_else(|| panic!("{summary}"))
    };
    let (brokers, url) = (exported("KAFKA_BROKERS"), exported("DATABASE_URL"));
    assert!(summary.contains("0 lost, 0 doubled, 0 different") && summary.contains("dev down"), "{summary}");

    let refused = |brokers: &str, url: &str| {
        let mut command = quickstart(home.path(), &["--records", "100"]);
        let output = command.env("KAFKA_BROKERS", brokers).env("DATABASE_URL", url).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    let said = refused(&brokers, &url);
    assert!(said.contains("the database that DATABASE_URL names has a table orders"), "{said}");
    let said = refused(&brokers, &empty_database(&cluster.database_url));
    assert!(said.contains("topic orders holds, or has held, records"), "{said}");

    let down = Command::new(SEMEL).args(["dev", "down"]).env("XDG_RUNTIME_DIR", home.path()).output().unwrap();
    assert_eq!(down.status.code(), Some(0), "{}", text(&down.stderr));
    assert_eq!(processes(home.path()), [""; 0]);
}

/// Servers that are kept outlive a test that fails.
pub struct DownAtTheEnd<'a>(pub &'a Path);

impl Drop for DownAtTheEnd<'_> {
    fn drop(&mut self) {
        let mut down = Command::new(SEMEL);
        let _ = down.args(["dev", "down", "--force"]).env("XDG_RUNTIME_DIR", self.0).output();
    }
}

/// Makes a database beside the one of the URL and answers its URL.
fn empty_database(url: &str) -> String {
    let name = support::unique("quickstart").replace('-', "_");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
        let driver = tokio::spawn(connection);
        client.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        drop(client);
        driver.await.unwrap().unwrap();
    });
    let (server, _) = url.rsplit_once('/').unwrap();
    format!("{server}/{name}")
}
