//! Broker and database go away in the middle and come back: the job goes on by itself.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::beside;
use super::harness::{Job, Load, PATIENCE};
use super::kill::{TABLE, TOPOLOGY, check, order};
use super::ledger;
use crate::postgres_sink::proxy::{Cut, Proxy};
use crate::support;

#[test]
fn a_job_outlives_restarts_of_the_broker_and_of_the_database() {
    if !support::online("restarts of broker and database") {
        return;
    }
    let cluster = support::private_cluster(&[]);
    let job = Job::new(&cluster, "outage", 4);
    job.sql(TABLE);
    let file = job.file(TOPOLOGY);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, 4, order);
        let mut process = job.start(&file);
        let floors = RefCell::new(BTreeMap::<String, i64>::new());
        let moved = |what: &str, group: &str, suffix: &str| {
            let mut floors = floors.borrow_mut();
            // A broker that does not answer yet says 0; what was reached before stays the mark.
            let floor = floors.entry(group.to_owned()).or_default();
            *floor = job.progress(group, suffix).max(*floor);
            support::eventually(PATIENCE * 2, what, || job.progress(group, suffix) > *floor);
        };
        let table_group = format!("{}.orders_table", job.name);
        let both_moved = |what: &str| {
            moved(what, &job.name, "in");
            moved(what, &table_group, "out");
        };
        both_moved("the job works");
        cluster.restart_kafka().unwrap();
        both_moved("it goes on after the broker was restarted");
        cluster.stop_kafka().unwrap();
        cluster.start_kafka().unwrap();
        both_moved("it goes on after the broker was away");
        cluster.kill_kafka().unwrap();
        cluster.start_kafka().unwrap();
        both_moved("it goes on after the broker was killed");
        cluster.restart_postgres().unwrap();
        both_moved("it goes on after the database was restarted");
        cluster.kill_postgres().unwrap();
        moved("the Kafka stage goes on without a database", &job.name, "in");
        cluster.start_postgres().unwrap();
        both_moved("it goes on after the database was killed");
        assert!(process.is_running(), "{}", process.log());
        process.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
}

#[test]
fn a_table_that_goes_away_stops_the_job_and_no_position_passes_a_row_that_was_not_written() {
    let Some(cluster) = support::broker("a table that goes away") else { return };
    let job = Job::new(cluster, "gone", 2);
    job.sql(TABLE);
    let file = job.file(TOPOLOGY);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 1_000, 2, order);
        let mut process = job.start(&file);
        let group = format!("{}.orders_table", job.name);
        support::eventually(PATIENCE, "rows are written", || job.progress(&group, "out") > 0);
        job.sql("ALTER TABLE THE_TABLE RENAME TO THE_TABLE_away");
        support::eventually(PATIENCE, "the job stops", || !process.is_running());
        let log = process.log();
        assert_eq!(process.child.wait().unwrap().code(), Some(5), "{log}");
        assert!(log.contains(&job.table()), "{log}");
        load.stop()
    });
    job.sql("ALTER TABLE THE_TABLE_away RENAME TO THE_TABLE");
    job.drain(&file);
    check(&job, count);
    assert_eq!(job.read("dead-letters"), [], "no record goes to the dead letters for a missing table");
}

/// Case 18, of everything that a job commits in its database: claims, batches, and what it does again.
#[test]
fn sums_are_exact_though_commits_are_cut_before_and_after_the_server_has_them() {
    let Some(cluster) = support::broker("COMMITs that are cut") else { return };
    let proxy = Proxy::to(&cluster.database_url, Cut::Before, 0);
    let cut = |job: &Job, file: &std::path::Path, record: fn(u64) -> (String, String)| {
        let group = format!("{}.balances", job.name);
        std::thread::scope(|scope| {
            let load = Load::start(scope, job, 1_000, beside::PARTITIONS, record);
            let mut process = job.start(file);
            for cut in [Cut::Before, Cut::After] {
                for times in 1..4 {
                    proxy.next(cut, times);
                    support::eventually(PATIENCE, "the cuts are made", || proxy.done());
                    let before = job.progress(&group, "in");
                    support::eventually(PATIENCE, "the job goes on", || job.progress(&group, "in") > before);
                }
            }
            assert!(process.is_running(), "{}", process.log());
            process.stop();
            load.stop()
        })
    };
    let through = |mut job: Job| {
        job.database_url = proxy.url(&job.database_url);
        job
    };
    let job = through(ledger::job(cluster, "cut-ledger"));
    let file = job.file(&ledger::text());
    let count = cut(&job, &file, ledger::payment);
    job.drain(&file);
    ledger::check(&job, count);

    let job = through(Job::new(cluster, "cut-beside", beside::PARTITIONS));
    beside::make_tables(&job);
    let file = job.file(beside::TOPOLOGY);
    let count = cut(&job, &file, beside::payment);
    job.drain(&file);
    beside::check(&job, count);
}
