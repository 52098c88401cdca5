//! Several processes of one job: they share the partitions, and whatever happens to one of them nothing is lost or
//! doubled.

use nix::sys::signal::Signal;
use semel::kafka::Isolation;

use super::harness::{Job, Load, PATIENCE};
use super::kill::{self, TABLE, TOPOLOGY, check, order};
use crate::support;

#[test]
fn two_instances_one_stopped_one_killed_one_started_in_the_middle() {
    let Some(cluster) = support::broker("two instances of a job") else { return };
    let job = Job::new(cluster, "pair", 6);
    job.sql(TABLE);
    let file = job.file(TOPOLOGY);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 3_000, 6, order);
        let moved = |what: &str, job: &Job| {
            let before: i64 = job.positions(&job.name, "in").into_iter().flatten().sum();
            support::eventually(PATIENCE, what, || {
                job.positions(&job.name, "in").into_iter().flatten().sum::<i64>() > before
            });
        };
        let first = job.start(&file);
        moved("the first instance works", &job);
        let second = job.start(&file);
        support::eventually(PATIENCE, "the second instance has partitions", || second.log().contains("assigned"));
        moved("both work", &job);
        first.kill();
        // Back within the session timeout: a static member has its partitions again without a rebalance.
        let first = job.start(&file);
        moved("the first is back", &job);
        second.stop();
        moved("one stopped in good order", &job);
        let third = job.start(&file);
        moved("a third one came", &job);
        first.stop();
        third.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
}

#[test]
fn a_member_that_was_asleep_past_its_session_writes_nothing_of_what_another_took_over() {
    let Some(cluster) = support::broker("a member asleep past its session") else { return };
    let job = Job::new(cluster, "asleep", 4);
    job.sql(TABLE);
    let text = TOPOLOGY.replace("[kafka]\n", "session_timeout = \"6s\"\ntransaction_timeout = \"4s\"\n[kafka]\n");
    let file = job.file(&text);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, 4, order);
        let sleeper = job.start(&file);
        support::eventually(PATIENCE, "the first works", || {
            job.positions(&job.name, "in").into_iter().flatten().sum::<i64>() > 0
        });
        let other = job.start(&file);
        support::eventually(PATIENCE, "the other has partitions", || other.log().contains("assigned"));
        sleeper.signal(Signal::SIGSTOP);
        let before = job.positions(&job.name, "in");
        support::eventually(PATIENCE, "the other takes every partition over", || {
            job.positions(&job.name, "in").iter().zip(&before).all(|(now, then)| now > then)
        });
        sleeper.signal(Signal::SIGCONT);
        support::eventually(PATIENCE, "the sleeper has work again", || sleeper.log().matches("assigned").count() > 2);
        sleeper.stop();
        other.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
}

/// Case 22: what a dead worker left open holds up readers until somebody ends it, or its timeout does.
#[test]
fn a_restart_with_fewer_workers_ends_what_the_others_left_open() {
    let Some(cluster) = support::broker("a restart with fewer workers") else { return };
    let job = Job::new(cluster, "fewer", 6);
    let text = TOPOLOGY.split("[sinks.orders_table]").next().unwrap();
    let settings = |workers: u32| {
        let timeouts = "transaction_timeout = \"90s\"\nsession_timeout = \"120s\"\ncommit_interval = \"8s\"";
        format!("workers = {workers}\n{timeouts}\n[kafka]\n")
    };
    let file = job.file(&text.replace("[kafka]\n", &settings(3)));
    let process = job.start(&file);
    let given = |worker: u32| {
        process.log().lines().any(|line| line.contains("assigned") && line.contains(&format!(".{worker}\"")))
    };
    support::eventually(PATIENCE, "each worker has partitions", || (0..3).all(given));
    job.produce_keyed("in", 6, (0..600).map(order));
    let (read, all) = (Isolation::ReadCommitted, Isolation::ReadUncommitted);
    let sum = |isolation| job.ends("out", isolation).iter().sum::<i64>();
    support::eventually(PATIENCE, "outputs lie in open transactions", || sum(all) > 300);
    process.kill();
    assert!(sum(read) < sum(all), "the transactions are open");
    let file = job.file(&text.replace("[kafka]\n", &settings(1)));
    let process = job.start(&file);
    support::eventually(PATIENCE, "readers are not held up any more", || sum(read) == sum(all));
    process.stop();
    let file = job.file(&text.replace("[kafka]\n", &settings(3)));
    job.drain(&file);
    assert_eq!(kill::outputs(&job, 600), (0, 0, 0), "lost, doubled and unexpected outputs");
}

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
