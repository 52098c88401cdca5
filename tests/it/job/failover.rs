//! A database that goes back in time: a standby promoted without the last commits, a server that takes no writes for a
//! while, yesterday's data folder.

use semel::cluster::Cluster;

use semel::kafka::Isolation;

use super::beside::{self, PARTITIONS, TOPOLOGY, check, expected_letters, letters, payment, produce};
use super::harness::{Job, Load, PATIENCE, sql};
use super::ledger;
use super::standby::{Standby, copy_folder, data_folder, make_standby, primary};
use crate::support;

/// A job of payments on the shared broker and this database.
fn job(server: &Cluster, prefix: &str) -> Job {
    let mut job = Job::new(support::cluster(), prefix, PARTITIONS);
    job.database_url = server.database_url.clone();
    beside::make_tables(&job);
    job
}

/// The sum of the stage's positions in a database.
fn position(job: &Job, url: &str) -> i64 {
    let sum =
        format!("SELECT coalesce(sum(next_offset), 0) FROM semel.sink_offsets WHERE stage = '{}.balances'", job.name);
    sql(url, &sum)[0][0].as_deref().unwrap().parse().unwrap()
}

#[test]
fn a_standby_promoted_without_the_last_commits_is_followed_and_sums_stay_exact() {
    let Some(server) = primary("a promoted standby") else { return };
    let standby = Standby::of(&server);
    let mut job = job(&server, "promoted");
    job.database_url = standby.both();
    let file = job.file(TOPOLOGY);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, PARTITIONS, payment);
        let mut process = job.start(&file);
        support::eventually(PATIENCE, "the job works", || position(&job, &server.database_url) > 1_000);
        standby.catch_up();
        standby.detach();
        let kept = position(&job, &standby.url);
        support::eventually(PATIENCE, "the standby lacks commits", || {
            position(&job, &server.database_url) > kept + 2_000
        });
        server.kill_postgres().unwrap();
        assert_eq!(position(&job, &standby.url), kept);
        standby.promote();
        let (group, ends) = (format!("{}.balances", job.name), job.ends("in", Isolation::ReadUncommitted));
        support::eventually(PATIENCE, "the job goes on at the standby", || {
            job.progress(&group, "in") > ends.iter().sum::<i64>()
        });
        assert!(process.is_running(), "{}", process.log());
        process.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
    assert_eq!(letters(&job).into_keys().collect::<Vec<_>>(), expected_letters(count));
}

#[test]
fn a_server_that_comes_back_as_a_standby_is_waited_for_until_it_is_promoted() {
    let Some(server) = primary("a server that is a standby for a while") else { return };
    let job = job(&server, "demoted");
    let data = data_folder(&server);
    let file = job.file(TOPOLOGY);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, PARTITIONS, payment);
        let mut process = job.start(&file);
        let at = || position(&job, &server.database_url);
        support::eventually(PATIENCE, "the job works", || at() > 1_000);
        server.stop_postgres().unwrap();
        make_standby(&data);
        server.start_postgres().unwrap();
        support::eventually(PATIENCE, "the job says why it waits", || process.log().contains("does not allow writes"));
        // What Kafka was told is never ahead of what is written.
        let group = format!("{}.balances", job.name);
        let written = at();
        assert!(job.progress(&group, "in") <= written);
        sql(&server.database_url, "SELECT pg_promote(true, 60)");
        support::eventually(PATIENCE, "the job goes on", || at() > written + 1_000);
        assert!(process.is_running(), "{}", process.log());
        process.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
    assert_eq!(letters(&job).into_keys().collect::<Vec<_>>(), expected_letters(count));
}

/// What only positions beside the rows can promise, and how it is mended without them.
#[test]
fn positions_in_kafka_stay_ahead_of_a_promoted_standby_until_they_are_set_back() {
    let Some(server) = primary("a promoted standby and positions in Kafka") else { return };
    let standby = Standby::of(&server);
    let mut job = Job::new(support::cluster(), "ahead", PARTITIONS);
    job.database_url = standby.both();
    ledger::make_tables(&job);
    let file = job.file(&ledger::text());
    let sums = || ledger::sums(&job);
    let mut process = job.start(&file);
    let group = format!("{}.balances", job.name);
    let written = |records: std::ops::Range<u64>| {
        let end = records.end as i64;
        job.produce_keyed("in", PARTITIONS, records.map(ledger::payment));
        support::eventually(PATIENCE, "all is written", || job.progress(&group, "in") == end);
    };
    written(0..600);
    standby.catch_up();
    standby.detach();
    written(600..1200);
    assert_eq!(sums(), ledger::balances(1200));
    server.kill_postgres().unwrap();
    standby.promote();
    assert_eq!(sums(), ledger::balances(600));
    written(1200..1500);
    assert!(process.is_running() && process.log().contains("a standby was promoted"), "{}", process.log());
    process.stop();
    job.drain(&file);
    assert_ne!(sums(), ledger::balances(1500), "nobody reads again what the standby lacks");
    beside::reset(&job, &file, &["--to", "earliest", "--yes"]);
    job.drain(&file);
    assert_eq!(sums(), ledger::balances(1500));
}

/// Nothing comes in any more that would show a job that its database is another one.
#[test]
fn yesterdays_data_folder_under_an_idle_job_is_noticed_and_read_again() {
    let Some(server) = primary("yesterday's data folder") else { return };
    let job = job(&server, "yesterday");
    let data = data_folder(&server);
    let yesterday = data.with_file_name("yesterday");
    let file = job.file(TOPOLOGY);
    produce(&job, 0..1000);
    job.drain(&file);
    server.stop_postgres().unwrap();
    copy_folder(&data, &yesterday);
    server.start_postgres().unwrap();
    let process = job.start(&file);
    produce(&job, 1000..1700);
    let position = || position(&job, &server.database_url);
    let end = job.ends("in", Isolation::ReadCommitted).iter().sum::<i64>();
    let group = format!("{}.balances", job.name);
    support::eventually(PATIENCE, "all is written", || position() == end && job.progress(&group, "in") == end);
    server.stop_postgres().unwrap();
    std::fs::rename(&data, data.with_file_name("today")).unwrap();
    std::fs::rename(&yesterday, &data).unwrap();
    server.start_postgres().unwrap();
    assert_eq!(position(), 1000);
    support::eventually(PATIENCE, "it is read again", || position() == end);
    process.stop();
    check(&job, 1700);
    assert_eq!(letters(&job).into_keys().collect::<Vec<_>>(), expected_letters(1700));
}
