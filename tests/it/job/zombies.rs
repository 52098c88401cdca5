//! A process that is put to sleep inside its database transaction while another takes over its partitions: Kafka's
//! fencing does not reach the database (case 26). Sums have no version that would make its late write harmless.

use nix::sys::signal::Signal;

use super::beside::{self, PARTITIONS};
use super::harness::{Job, PATIENCE};
use super::ledger;
use crate::support;

/// When the sleeper wakes.
#[derive(Clone, Copy, Debug)]
enum Wakes {
    /// Its transaction is open, and its successor waits for the rows: it commits what it was at.
    Before,
    /// The server has rolled its transaction back: it does again what its successor has done.
    After,
}

/// Puts the only process of a job to sleep while its transaction is open, has another take over, and wakes it.
/// `records(n)` produces up to the `n`-th record.
fn sleeps(job: &Job, file: &std::path::Path, wakes: Wakes, from: u64, records: impl Fn(std::ops::Range<u64>)) -> u64 {
    let group = format!("{}.balances", job.name);
    let sleeper = job.start(file);
    let (start, middle, end) = (from + 100, from + 300, from + 500);
    let all = |count: u64| job.progress(&group, "in") == count as i64;
    records(from..start);
    support::eventually(PATIENCE, "there are rows", || all(start));
    let lock = job.lock_rows();
    records(start..middle);
    let waiting = format!(
        "SELECT pid FROM pg_stat_activity WHERE application_name = '{group}' AND wait_event_type = 'Lock' AND query \
         LIKE '%{}%'",
        job.table()
    );
    let mut pid = None;
    support::eventually(PATIENCE, "it stands in its transaction", || {
        pid = job.sql(&waiting).pop().and_then(|row| row[0].clone());
        pid.is_some()
    });
    sleeper.signal(Signal::SIGSTOP);
    let pid = pid.unwrap();
    drop(lock);
    let other = job.start(file);
    let gone = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}");
    let gone = || job.sql(&gone)[0][0].as_deref() == Some("0");
    let blocks = format!("SELECT count(*) FROM pg_stat_activity WHERE {pid} = ANY(pg_blocking_pids(pid))");
    match wakes {
        Wakes::Before => support::eventually(PATIENCE, "its successor waits for it", || {
            job.sql(&blocks)[0][0].as_deref() > Some("0") || gone()
        }),
        Wakes::After => {
            support::eventually(PATIENCE, "its transaction is rolled back, its work done", || gone() && all(middle))
        }
    }
    sleeper.signal(Signal::SIGCONT);
    records(middle..end);
    support::eventually(PATIENCE, "both go on", || all(end));
    sleeper.stop();
    other.stop();
    end
}

const TIMEOUTS: &str = "session_timeout = \"6s\"\ntransaction_timeout = \"4s\"\n[kafka]\n";

#[test]
fn a_process_that_slept_in_its_transaction_adds_nothing_twice_by_its_ledger() {
    let Some(cluster) = support::broker("a sleeper in its transaction, with a ledger") else { return };
    let job = ledger::job(cluster, "sleeper-ledger");
    let file = job.file(&ledger::text().replace("[kafka]\n", TIMEOUTS));
    let mut count = 0;
    for wakes in [Wakes::Before, Wakes::After] {
        count = sleeps(&job, &file, wakes, count, |records| {
            job.produce_keyed("in", PARTITIONS, records.map(ledger::payment));
        });
        job.drain(&file);
        ledger::check(&job, count);
    }
}

#[test]
fn a_process_that_slept_in_its_transaction_adds_nothing_twice_by_the_positions_beside_its_rows() {
    let Some(cluster) = support::broker("a sleeper in its transaction, with positions beside the rows") else { return };
    let job = Job::new(cluster, "sleeper-beside", PARTITIONS);
    beside::make_tables(&job);
    let file = job.file(beside::TOPOLOGY);
    let mut count = 0;
    for wakes in [Wakes::Before, Wakes::After] {
        count = sleeps(&job, &file, wakes, count, |records| beside::produce(&job, records));
        job.drain(&file);
        beside::check(&job, count);
        let letters: Vec<_> = beside::letters(&job).into_keys().collect();
        assert_eq!(letters, beside::expected_letters(count));
    }
}
