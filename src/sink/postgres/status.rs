//! What a writer is doing, for progress displays and metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::writer::Applied;

/// Counters of a writer and whether it waits for the database. Shared between threads.
#[derive(Debug, Default)]
pub struct Status {
    batches: AtomicU64,
    rows: AtomicU64,
    superseded: AtomicU64,
    stale: AtomicU64,
    ties: AtomicU64,
    rejects: AtomicU64,
    retries: AtomicU64,
    writing_micros: AtomicU64,
    duplicates: AtomicU64,
    waiting: Mutex<Option<Waiting>>,
    positions_committed: OnceLock<Instant>,
}

/// A database that is away.
#[derive(Clone, Debug)]
pub struct Waiting {
    pub since: Instant,
    pub attempts: u32,
    pub reason: String,
}

/// A reading of a [`Status`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub batches: u64,
    pub rows: u64,
    pub superseded: u64,
    pub stale: u64,
    pub ties: u64,
    /// Records whose events had their effect before.
    pub duplicates: u64,
    /// Rows that the database refused.
    pub rejects: u64,
    /// Transactions done again.
    pub retries: u64,
    /// Time spent on batches, waiting included.
    pub writing: Duration,
}

impl Status {
    pub fn counts(&self) -> Counts {
        Counts {
            batches: self.batches.load(Relaxed),
            rows: self.rows.load(Relaxed),
            superseded: self.superseded.load(Relaxed),
            stale: self.stale.load(Relaxed),
            ties: self.ties.load(Relaxed),
            duplicates: self.duplicates.load(Relaxed),
            rejects: self.rejects.load(Relaxed),
            retries: self.retries.load(Relaxed),
            writing: Duration::from_micros(self.writing_micros.load(Relaxed)),
        }
    }

    /// Since when and why the writer waits, if it does.
    pub fn waiting(&self) -> Option<Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tells the writer that positions are past what a crash before this process may have left to be delivered again.
    pub fn positions_committed(&self) {
        self.positions_committed.get_or_init(Instant::now);
    }

    /// When that was the case for the first time.
    pub(super) fn positions_committed_at(&self) -> Option<Instant> {
        self.positions_committed.get().copied()
    }

    pub(super) fn count(&self, applied: &Applied, took: Duration) {
        self.batches.fetch_add(1, Relaxed);
        self.rows.fetch_add(applied.rows, Relaxed);
        self.superseded.fetch_add(applied.superseded, Relaxed);
        self.stale.fetch_add(applied.stale, Relaxed);
        self.ties.fetch_add(applied.ties, Relaxed);
        self.duplicates.fetch_add(applied.duplicates, Relaxed);
        self.rejects.fetch_add(applied.rejects.len() as u64, Relaxed);
        self.writing_micros.fetch_add(took.as_micros() as u64, Relaxed);
    }

    pub(super) fn wait(&self, waiting: Option<Waiting>) {
        if waiting.is_some() {
            self.retries.fetch_add(1, Relaxed);
        }
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = waiting;
    }
}
