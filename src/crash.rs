//! Crashes on purpose, for `semel drill`: a process that kills itself at a named place. The places are compiled in
//! always, so that what is proven is what runs; unarmed, one costs a relaxed load. Nothing arms them but the variable
//! `SEMEL_CRASH` of a `semel run`, which only the drill sets.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, raise};

use crate::error::Failure;

/// The environment variable that arms a process.
pub const VARIABLE: &str = "SEMEL_CRASH";

/// A place where a process can be made to crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(usize)]
pub enum Point {
    /// The producers are initialised, nothing is polled yet.
    AtStart,
    /// A record was read.
    AfterPoll,
    /// A record is processed; its outputs may still be in the worker.
    AfterProcess,
    /// Outputs are handed to the client, which may have sent them.
    AfterProduce,
    /// Outputs are acknowledged, the transaction does not hold the positions yet.
    BeforeSendOffsets,
    /// The transaction holds the positions.
    AfterSendOffsets,
    /// The call that commits is about to be made. With a delay, the kill falls into the call.
    BeforeCommit,
    /// The commit was answered, the worker does not know it yet.
    AfterCommit,
    /// The rows are in the database's transaction, COMMIT was not sent.
    BeforeDatabaseCommit,
    /// COMMIT was answered.
    AfterDatabaseCommit,
    /// All rows of a batch are committed, its positions are still with the worker.
    BeforePositions,
    /// Partitions are asked back, the open batch is not committed.
    InRevoke,
    /// A commit is acknowledged, what it changed is not in the stores yet.
    BeforeApply,
    /// What a commit changed is in the stores.
    AfterApply,
    /// A store on disk is about to be told from where its changelog has to be read.
    BeforeCheckpoint,
    /// The changelog of a store is read, the store is not complete.
    InRestore,
}

/// All of them, in the order in which a batch comes by.
pub const POINTS: [Point; 16] = [
    Point::AtStart,
    Point::InRestore,
    Point::BeforeCheckpoint,
    Point::AfterPoll,
    Point::AfterProcess,
    Point::BeforeDatabaseCommit,
    Point::AfterDatabaseCommit,
    Point::BeforePositions,
    Point::AfterProduce,
    Point::BeforeSendOffsets,
    Point::AfterSendOffsets,
    Point::BeforeCommit,
    Point::AfterCommit,
    Point::BeforeApply,
    Point::AfterApply,
    Point::InRevoke,
];

impl Point {
    /// As `SEMEL_CRASH` and the drill's report write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Point::AtStart => "at-start",
            Point::AfterPoll => "after-poll",
            Point::AfterProcess => "after-process",
            Point::AfterProduce => "after-produce",
            Point::BeforeSendOffsets => "before-send-offsets",
            Point::AfterSendOffsets => "after-send-offsets",
            Point::BeforeCommit => "before-commit",
            Point::AfterCommit => "after-commit",
            Point::BeforeDatabaseCommit => "before-database-commit",
            Point::AfterDatabaseCommit => "after-database-commit",
            Point::BeforePositions => "before-positions",
            Point::InRevoke => "in-revoke",
            Point::BeforeApply => "before-apply",
            Point::AfterApply => "after-apply",
            Point::BeforeCheckpoint => "before-checkpoint",
            Point::InRestore => "in-restore",
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// When a process kills itself: at the `nth` time that it comes by `point`, or so long after that. Written
/// `point:n`, `point:n:microseconds` or `point:n:microseconds:records`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    pub point: Point,
    /// From 1.
    pub nth: u64,
    /// Zero: there and then. Else another thread does it, whatever this one is at by then.
    pub after: Duration,
    /// Counts from when so many records are processed.
    pub records: u64,
}

impl Crash {
    /// The `nth` time, from the start, at once.
    pub fn at(point: Point, nth: u64) -> Crash {
        Crash { point, nth, after: Duration::ZERO, records: 0 }
    }
}

impl fmt::Display for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.point, self.nth)?;
        match (self.after.as_micros(), self.records) {
            (0, 0) => Ok(()),
            (after, 0) => write!(f, ":{after}"),
            (after, records) => write!(f, ":{after}:{records}"),
        }
    }
}

impl FromStr for Crash {
    type Err = String;

    fn from_str(text: &str) -> Result<Crash, String> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let point = POINTS.into_iter().find(|point| point.as_str() == name);
        let point = point.ok_or_else(|| format!("there is no place {name:?}"))?;
        let mut number = |missing: Option<u64>| match parts.next() {
            None => missing.ok_or_else(|| "point:n, such as after-poll:3".to_owned()),
            Some(text) => text.parse().map_err(|_| format!("{text:?} is no number")),
        };
        let (nth, micros, records) = (number(None)?.max(1), number(Some(0))?, number(Some(0))?);
        Ok(Crash { point, nth, after: Duration::from_micros(micros), records })
    }
}

static ARMED: AtomicBool = AtomicBool::new(false);
static CRASH: OnceLock<Crash> = OnceLock::new();
/// How often the process came by the place where it is to crash, since it counts.
static COUNTED: AtomicU64 = AtomicU64::new(0);
static PASSED: [AtomicU64; POINTS.len()] = [const { AtomicU64::new(0) }; POINTS.len()];

/// Arms the process as `SEMEL_CRASH` says; without it nothing happens. Refused where it cannot be understood.
pub fn arm() -> Result<(), Failure> {
    let Ok(text) = std::env::var(VARIABLE) else { return Ok(()) };
    let crash = text.parse().map_err(|e| Failure::refused(format!("{VARIABLE}={text}: {e}; only a drill sets it")))?;
    ARMED.store(CRASH.set(crash).is_ok(), Ordering::SeqCst);
    Ok(())
}

/// A place where the process may be made to crash.
#[inline]
pub fn at(point: Point) {
    if ARMED.load(Ordering::Relaxed) {
        pass(point);
    }
}

#[cold]
fn pass(point: Point) {
    PASSED[point as usize].fetch_add(1, Ordering::SeqCst);
    let Some(crash) = CRASH.get().filter(|crash| crash.point == point) else { return };
    let processed = PASSED[Point::AfterProcess as usize].load(Ordering::SeqCst);
    if processed < crash.records || COUNTED.fetch_add(1, Ordering::SeqCst) + 1 != crash.nth {
        return;
    }
    if crash.after.is_zero() {
        kill();
    }
    let after = crash.after;
    std::thread::spawn(move || {
        std::thread::sleep(after);
        kill();
    });
}

/// What a process says before it kills itself while a commit is on its way.
pub const IN_FLIGHT: &str = "killed while a commit was in flight";

fn kill() {
    let passed = |point: Point| PASSED[point as usize].load(Ordering::SeqCst);
    let in_flight = passed(Point::BeforeCommit) > passed(Point::AfterCommit);
    eprintln!("{VARIABLE}: {}", if in_flight { IN_FLIGHT } else { "killed" });
    // SIGKILL cannot be refused: nothing of the process runs after this.
    let _ = raise(Signal::SIGKILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_read_as_it_is_written() {
        for point in POINTS {
            let crash = Crash::at(point, 3);
            assert_eq!(crash.to_string().parse(), Ok(crash));
        }
        let late = Crash { after: Duration::from_micros(1500), ..Crash::at(Point::BeforeCommit, 2) };
        assert_eq!((late.to_string().as_str(), "before-commit:2:1500".parse()), ("before-commit:2:1500", Ok(late)));
        let third = Crash { records: 3, ..Crash::at(Point::AfterCommit, 1) };
        assert_eq!((third.to_string().as_str(), "after-commit:1:0:3".parse()), ("after-commit:1:0:3", Ok(third)));
        for wrong in ["", "after-lunch:1", "after-poll", "after-poll:x", "after-poll:1:x"] {
            assert!(wrong.parse::<Crash>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_place_has_a_counter_of_its_own() {
        let mut indices: Vec<usize> = POINTS.iter().map(|point| *point as usize).collect();
        indices.sort_unstable();
        assert_eq!(indices, (0..POINTS.len()).collect::<Vec<_>>());
    }
}
