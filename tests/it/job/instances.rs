//! Several processes of one job: they share the partitions, and whatever happens to one of them nothing is lost or
//! doubled.

use std::time::Duration;

use nix::sys::signal::Signal;
use semel::kafka::Isolation;

use super::harness::{Job, Load, PATIENCE, Process};
use super::kill::{self, TABLE, TOPOLOGY, check, order};
use crate::support;

/// A start, two looks at the group, and a rebalance.
const UNREAD: Duration = Duration::from_secs(45);

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

/// Three instances become two and then four (case 25): the one that went was only asleep, and comes back.
#[test]
fn a_member_that_was_asleep_past_its_session_writes_nothing_of_what_others_took_over() {
    let Some(cluster) = support::broker("a member asleep past its session") else { return };
    let job = Job::new(cluster, "asleep", 6);
    job.sql(TABLE);
    let text = TOPOLOGY.replace("[kafka]\n", "session_timeout = \"6s\"\ntransaction_timeout = \"4s\"\n[kafka]\n");
    let file = job.file(&text);
    let assigned = |process: &Process| {
        process.log().lines().filter(|line| line.contains(" assigned ") && line.contains(".in-")).count()
    };
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, 6, |i| (format!("c-{}", i % 101), order(i).1));
        let taken_over = |what: &str| {
            let before = job.positions(&job.name, "in");
            support::eventually(PATIENCE, what, || {
                job.positions(&job.name, "in").iter().zip(&before).all(|(now, then)| now > then)
            });
        };
        let sleeper = job.start(&file);
        support::eventually(PATIENCE, "the first works", || {
            job.positions(&job.name, "in").into_iter().flatten().sum::<i64>() > 0
        });
        let mut others = vec![job.start(&file), job.start(&file)];
        support::eventually(PATIENCE, "the others have partitions", || others.iter().all(|other| assigned(other) > 0));
        sleeper.signal(Signal::SIGSTOP);
        taken_over("the two others take every partition over");
        others.extend([job.start(&file), job.start(&file)]);
        support::eventually(PATIENCE, "four have partitions", || others.iter().all(|other| assigned(other) > 0));
        taken_over("four share the partitions");
        let before = assigned(&sleeper);
        sleeper.signal(Signal::SIGCONT);
        support::eventually(PATIENCE, "the sleeper has work again", || assigned(&sleeper) > before);
        sleeper.stop();
        others.into_iter().for_each(Process::stop);
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
    let text = kill::kafka_stage();
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

/// The group has given a partition to nobody while the process that read it finishes its work. A static member that dies
/// there and comes back is given what it had left, and no rebalance follows by itself (KIP-345).
#[test]
fn a_process_killed_while_it_gives_partitions_up_leaves_none_unread() {
    let Some(cluster) = support::broker("killed in a revocation") else { return };
    let job = Job::new(cluster, "revoke", 6);
    job.sql(TABLE);
    // Long enough not to be what mends it.
    let file = job.file(&TOPOLOGY.replace("[kafka]\n", "session_timeout = \"120s\"\n[kafka]\n"));
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 1_000, 6, |i| (format!("c-{}", i % 101), order(i).1));
        let mut dies = job.start_with(&file, &[(semel::crash::VARIABLE, "in-revoke:1")]);
        support::eventually(PATIENCE, "it works", || dies.log().matches("assigned").count() >= 2);
        let newcomer = job.start(&file);
        support::eventually(PATIENCE, "it dies giving partitions up", || !dies.is_running());
        let back = job.start(&file);
        let before = job.positions(&job.name, "in");
        support::eventually(UNREAD, "every partition is read again", || {
            job.positions(&job.name, "in").iter().zip(&before).all(|(now, then)| now > then)
        });
        let count = load.stop();
        support::eventually(PATIENCE, "all is through", || through(&job));
        [newcomer, back].into_iter().for_each(Process::stop);
        count
    });
    check(&job, count);
}

/// Both stages stand at the ends of what they read.
pub fn through(job: &Job) -> bool {
    let at = |group: &str, suffix: &str| {
        job.positions(group, suffix).into_iter().map(|p| p.unwrap_or(0)).collect::<Vec<_>>()
    };
    at(&job.name, "in") == job.ends("in", Isolation::ReadCommitted)
        && at(&format!("{}.orders_table", job.name), "out") == job.ends("out", Isolation::ReadUncommitted)
}
