//! Two processes that run as one instance: on one host the lock keeps the second out, across hosts the group does.

use std::path::Path;
use std::time::Duration;

use semel::kafka::{Connection, Consumer, ConsumerOptions};

use super::harness::{Job, Load, PATIENCE, Process, is_busy};
use super::instances::through;
use super::kill::{TABLE, TOPOLOGY, check, order};
use crate::support;

#[test]
fn the_same_instance_twice_on_one_host_is_refused() {
    let Some(cluster) = support::broker("the same instance twice") else { return };
    let job = Job::new(cluster, "twin", 1);
    job.sql(TABLE);
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", "instance = \"blue\"\n[kafka]\n"));
    let first = job.start(&file);
    support::eventually(PATIENCE, "the first runs", || first.log().contains("assigned"));
    let output = job.run_drain(&file);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(6), "{message}");
    assert!(message.contains("instance \"blue\""), "{message}");
    first.stop();
}

/// A host that was copied with its state: the other has a state folder of its own.
fn elsewhere(job: &Job, file: &Path, host: &tempfile::TempDir) -> Process {
    job.start_with(file, &[("XDG_STATE_HOME", host.path().to_str().unwrap())])
}

fn moved(job: &Job, what: &str) {
    job.moves(&job.name, "in", 0, what);
}

/// Waits for the end of a process.
#[track_caller]
fn exits(mut process: Process, status: i32, message: &str) {
    support::eventually(PATIENCE, "it exits", || !process.is_running());
    assert_eq!(process.child.wait().unwrap().code(), Some(status), "{}", process.log());
    assert!(process.log().contains(message), "{}", process.log());
}

/// Runs the job of that head twice: the old one exits 6, the newcomer goes on to the end of so many records.
fn newcomer_wins(job: &Job, head: &str) -> u64 {
    job.sql(TABLE);
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", &format!("instance = \"blue\"\n{head}[kafka]\n")));
    let host = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let load = Load::start(scope, job, 1_000, 2, order);
        let old = job.start(&file);
        moved(job, "the first works");
        let newcomer = elsewhere(job, &file, &host);
        exits(old, 6, "another process");
        moved(job, "the newcomer works");
        let count = load.stop();
        support::eventually(PATIENCE, "all is through", || through(job));
        newcomer.stop();
        count
    })
}

#[test]
fn of_twins_the_newcomer_wins() {
    let Some(cluster) = support::broker("twins") else { return };
    let job = Job::new(cluster, "twins", 2);
    let count = newcomer_wins(&job, "");
    check(&job, count);
}

/// No transaction tells them apart: the group alone does. Each claims the name back once.
#[test]
fn of_twins_without_transactions_the_newcomer_wins_too() {
    let Some(cluster) = support::broker("twins without transactions") else { return };
    newcomer_wins(&Job::new(cluster, "twins", 2), "guarantee = \"at-least-once\"\n");
}

/// What a join of its own leaves behind whose answer was lost: a member of the same name, of which nobody knows.
#[test]
fn a_member_that_loses_its_name_to_nobody_joins_again_and_goes_on() {
    let Some(cluster) = support::broker("a member that loses its name to nobody") else { return };
    let job = Job::new(cluster, "ghost", 2);
    job.sql(TABLE);
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", "instance = \"blue\"\n[kafka]\n"));
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 1_000, 2, order);
        let mut process = job.start(&file);
        moved(&job, "it works");
        let connection = Connection::new(job.brokers.clone(), "semel-tests-ghost");
        let name = format!("{0}.{0}.blue.0", job.name);
        let options = ConsumerOptions { instance_id: Some(&name), ..ConsumerOptions::new(&job.name) };
        let ghost = Consumer::new(&connection, &options).unwrap();
        ghost.subscribe(&[&job.topic("in")]).unwrap();
        support::eventually(PATIENCE, "it loses its name", || process.log().contains("joining again"));
        moved(&job, "it goes on");
        assert!(process.is_running(), "{}", process.log());
        ghost.close(Duration::from_secs(1));
        let count = load.stop();
        support::eventually(PATIENCE, "all is through", || through(&job));
        // A client that lost its name, and is given up over an open question of the group, would keep a core busy.
        support::eventually(PATIENCE, "the process rests", || !process.is_busy());
        support::eventually(PATIENCE, "the ghost is gone", || !is_busy(std::process::id(), "rdk:main"));
        process.stop();
        count
    });
    check(&job, count);
}

#[test]
fn where_the_broker_assigns_a_static_newcomer_gives_way() {
    let Some(cluster) = support::broker("twins where the broker assigns") else { return };
    let job = Job::new(cluster, "twins", 2);
    job.sql(TABLE);
    let text = TOPOLOGY.replace("[kafka]\n", "[kafka]\nproperties = { \"group.protocol\" = \"consumer\" }\n");
    let file = job.file(&format!("instance = \"blue\"\nmembership = \"static\"\n{text}"));
    let host = tempfile::tempdir().unwrap();
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 1_000, 2, order);
        let old = job.start(&file);
        moved(&job, "the first works");
        exits(elsewhere(&job, &file, &host), 6, "another process runs with this group.instance.id");
        moved(&job, "the first goes on");
        // Its transactions were left alone.
        assert!(!old.log().contains("WARN"), "{}", old.log());
        let count = load.stop();
        support::eventually(PATIENCE, "all is through", || through(&job));
        old.stop();
        count
    });
    check(&job, count);
}
