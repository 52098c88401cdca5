//! Broker and database go away in the middle and come back: the job goes on by itself.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::harness::{Job, Load, PATIENCE};
use super::kill::{TABLE, TOPOLOGY, check, order};
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
        moved("the job works", &table_group, "out");
        cluster.restart_kafka().unwrap();
        moved("it goes on after the broker was restarted", &table_group, "out");
        cluster.kill_kafka().unwrap();
        cluster.start_kafka().unwrap();
        moved("it goes on after the broker was killed", &table_group, "out");
        cluster.restart_postgres().unwrap();
        moved("it goes on after the database was restarted", &table_group, "out");
        cluster.kill_postgres().unwrap();
        moved("the Kafka stage goes on without a database", &job.name, "in");
        cluster.start_postgres().unwrap();
        moved("it goes on after the database was killed", &table_group, "out");
        assert!(process.is_running(), "{}", process.log());
        process.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
}
