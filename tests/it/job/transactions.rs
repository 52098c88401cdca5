//! Transactions that the broker ends by itself: one that was open too long, and transactional ids that it forgot.

use std::time::Duration;

use nix::sys::signal::Signal;
use semel::cluster::Server;

use super::harness::{Job, Load, PATIENCE};
use super::kill::{self, order};
use crate::support;

/// A broker that looks for transactions over their time, and for ids that rested, every moment.
const BROKER: [(&str, &str); 3] = [
    ("transaction.abort.timed.out.transaction.cleanup.interval.ms", "200"),
    ("transactional.id.expiration.ms", "6000"),
    ("transaction.remove.expired.transaction.cleanup.interval.ms", "500"),
];

/// One broker for both: bringing it up takes seconds.
#[test]
fn a_transaction_that_times_out_and_an_id_that_expires_lose_and_double_nothing() {
    if !support::online("transactions that the broker ends") {
        return;
    }
    let cluster = support::private_server(Server::Kafka, &BROKER);
    let job = Job::new(&cluster, "timeouts", 4);
    let text = kill::kafka_stage();
    let settings = "transaction_timeout = \"2s\"\nsession_timeout = \"15s\"\ncommit_interval = \"500ms\"\n[kafka]\n";
    let file = job.file(&text.replace("[kafka]\n", settings));
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, 4, order);
        let mut process = job.start(&file);
        let moves = |what: &str| job.moves(&job.name, "in", 0, what);
        moves("the job works");
        for _ in 0..5 {
            process.signal(Signal::SIGSTOP);
            // Longer than a transaction may be open.
            support::pass(Duration::from_millis(3_500));
            process.signal(Signal::SIGCONT);
            moves("it goes on after it was asleep");
        }
        assert!(process.is_running(), "{}", process.log());
        let log = process.log();
        assert!(log.contains("disposition=Fenced"), "no transaction was open too long: {log}");
        process.stop();
        load.stop()
    });
    // Its producers rest until the broker has forgotten their ids.
    let mut process = job.start(&file);
    let all = |count: u64| job.progress(&job.name, "in") >= count as i64;
    support::eventually(PATIENCE, "it has caught up", || all(count));
    // Longer than ids are kept.
    support::pass(Duration::from_secs(8));
    job.produce_keyed("in", 4, (count..count + 500).map(order));
    let count = count + 500;
    support::eventually(PATIENCE, "records go through after the ids expired", || all(count));
    let log = process.log();
    assert!(process.is_running() && log.contains("a transaction call failed"), "no id expired: {log}");
    process.stop();
    job.drain(&file);
    assert_eq!(kill::outputs(&job, count), (0, 0, 0), "lost, doubled and unexpected outputs of {count} orders");
}
