//! What a running stage counts. Workers add, the progress display and the summary read; nothing here blocks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::usage;

/// A number that only rises.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that rises and falls.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::SeqCst);
    }

    pub fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Ordering::SeqCst);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

/// Counters of one stage, shared by its workers.
#[derive(Debug, Default)]
pub struct StageStatus {
    pub name: String,
    /// Records processed, those of batches that were given up included.
    pub records_in: Counter,
    pub records_out: Counter,
    pub rejected: Counter,
    /// Records that had an effect: an output, a change of state. Each record is counted as one of applied, dropped, late,
    /// rejected and skipped.
    pub applied: Counter,
    /// Records without an effect: filtered, or aborted by their program.
    pub dropped: Counter,
    /// Records that failed and were passed over, with `on_error = "skip"`.
    pub skipped: Counter,
    /// Outputs that could not be delivered under at-most-once.
    pub lost: Counter,
    /// Outputs under at-most-once whose positions go first, and that no broker has acknowledged yet.
    pub owed: Gauge,
    pub commits: Counter,
    /// Microseconds from a seal to its acknowledged commit, summed over commits.
    pub commit_us: Counter,
    pub aborts: Counter,
    pub rebuilds: Counter,
    /// When the first record was processed, and what the process had used by then.
    first: OnceLock<(Instant, Duration)>,
    /// Microseconds from there to the last commit, and those that the process was at work on all cores.
    busy_us: AtomicU64,
    busy_cpu_us: AtomicU64,
    /// The first commit: when, what the process had used by then, and the records by then.
    first_commit: OnceLock<(Instant, Duration, u64)>,
    /// From there to the last commit but one: microseconds, those at work on all cores, records. The last one may have
    /// waited for records that did not come.
    steady: Mutex<[[u64; 3]; 2]>,
    /// Partitions now assigned.
    pub assigned: AtomicU64,
    pub rows: Counter,
    /// Records whose batch held a higher version of their row.
    pub superseded: Counter,
    /// Records that the version guard ignored: the table, or their batch, had that version or a higher one before.
    pub stale: Counter,
    /// Records whose windows had closed.
    pub late: Counter,
    /// Windows that were put out when they closed.
    pub windows: Counter,
    /// Those that a later node rejected; they are no records that came in.
    pub windows_rejected: Counter,
    pub ties: Counter,
    /// Records whose events the ledger knew.
    pub duplicates: Counter,
    rejects: Mutex<BTreeMap<(String, &'static str), u64>>,
    moved_on: OnceLock<()>,
}

impl StageStatus {
    pub fn new(name: &str) -> StageStatus {
        StageStatus { name: name.to_owned(), ..StageStatus::default() }
    }

    /// Every partition of the group, also those of other instances, went on since this process started.
    pub fn move_on(&self) {
        self.moved_on.get_or_init(|| ());
    }

    pub fn has_moved_on(&self) -> bool {
        self.moved_on.get().is_some()
    }

    /// A batch begins.
    pub fn begin(&self) {
        self.first.get_or_init(|| (Instant::now(), usage::cpu()));
    }

    /// From the start of the process to the first record, which is processed next; `None` while there was none.
    pub fn first_record(&self) -> Option<Duration> {
        self.first.get().map(|(at, _)| at.saturating_duration_since(usage::started()))
    }

    /// A commit was acknowledged, so long after its batch was sealed.
    pub fn committed(&self, after: Duration) {
        self.commits.add(1);
        self.commit_us.add(after.as_micros() as u64);
        let (cpu, records) = (usage::cpu(), self.records_in.get());
        let micros = |time: Duration| time.as_micros() as u64;
        if let Some((first, used)) = self.first.get() {
            self.busy_us.store(micros(first.elapsed()), Ordering::Relaxed);
            self.busy_cpu_us.store(micros(cpu.saturating_sub(*used)), Ordering::Relaxed);
        }
        let (first, used, before) = self.first_commit.get_or_init(|| (Instant::now(), cpu, records));
        // Another worker may have counted more by its commit, which was the first.
        let now = [micros(first.elapsed()), micros(cpu.saturating_sub(*used)), records.saturating_sub(*before)];
        let mut steady = self.steady.lock().expect("no panic while counting");
        *steady = [steady[1], now];
    }

    /// From the first record to the last commit.
    pub fn busy(&self) -> Duration {
        Duration::from_micros(self.busy_us.load(Ordering::Relaxed))
    }

    /// Between the first commit and the last but one, when connections and code are warm and there is work: how long, what
    /// the whole process used on all cores, and the records.
    pub fn steady(&self) -> (Duration, Duration, u64) {
        let [[time, cpu, records], _] = *self.steady.lock().expect("no panic while counting");
        (Duration::from_micros(time), Duration::from_micros(cpu), records)
    }

    /// What the whole process used meanwhile, on all cores.
    pub fn busy_cpu(&self) -> Duration {
        Duration::from_micros(self.busy_cpu_us.load(Ordering::Relaxed))
    }

    /// Counts a record that `node` rejected.
    pub fn reject(&self, node: &str, reason: &'static str) {
        self.rejected.add(1);
        *self.rejects.lock().expect("no panic while counting").entry((node.to_owned(), reason)).or_default() += 1;
    }

    /// Counts a window that `node`, behind the one that put it out, rejected.
    pub fn reject_window(&self, node: &str, reason: &'static str) {
        self.windows_rejected.add(1);
        *self.rejects.lock().expect("no panic while counting").entry((node.to_owned(), reason)).or_default() += 1;
    }

    /// Rejected records and windows by node and reason.
    pub fn rejects(&self) -> BTreeMap<(String, &'static str), u64> {
        self.rejects.lock().expect("no panic while counting").clone()
    }

    pub fn set_assigned(&self, partitions: usize) {
        self.assigned.store(partitions as u64, Ordering::Relaxed);
    }
}
