//! Restoring the state of a partition from its changelogs.
//!
//! The order matters: a worker's producers are initialised and the group's position is stable before a restore begins, so
//! that every transaction which wrote the changelog up to that position is decided. Its markers may still be missing: the
//! end is asked of what is not committed too, and what is committed is read up to it, by position.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::crash::{self, Point};
use crate::error::{Disposition, Exit, Failure};
use crate::kafka::{Admin, At, Connection, Error, Isolation, Range, Reader};
use crate::operator::{Memory, Stamp, Store};
use crate::record::{Input, Position, TopicPartition};
use crate::store::disk::{Disk, DiskPart};

/// Nothing comes for so long while an open transaction holds the rest back.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often a reader hears nothing for so long before another one takes its place.
const IDLES: u32 = 30;
const PAUSE: Duration = Duration::from_millis(200);
const SAY_EVERY: Duration = Duration::from_secs(10);

/// Records that go to disk together.
const BATCH: usize = 1000;

/// A changelog, and what values in it begin with.
#[derive(Clone, Debug)]
pub struct Changelog {
    pub topic: Arc<str>,
    pub id: Uuid,
    pub stamp: Stamp,
}

/// Complete state of a partition: of each changelog that was asked for.
pub type Restored = Vec<Box<dyn Store>>;

/// A restore on its way, in a thread of its own. Dropped, it ends soon.
#[derive(Debug)]
pub struct Restoring {
    answer: Receiver<Result<Restored, Failure>>,
    cancelled: Arc<AtomicBool>,
}

impl Restoring {
    /// Begins to restore one partition of each changelog: on disk from where its checkpoint says, in memory from the
    /// beginning.
    pub fn begin(
        connection: &Connection,
        admin: &Arc<Admin>,
        disk: Option<&Disk>,
        changelogs: Vec<Changelog>,
        partition: i32,
    ) -> Result<Restoring, Failure> {
        let (answers, answer) = channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let mut restore = Restore {
            connection: connection.clone(),
            admin: Arc::clone(admin),
            disk: disk.cloned(),
            cancelled: Arc::clone(&cancelled),
            quiet_until: Instant::now() + SAY_EVERY,
        };
        let run = move || {
            let restored = changelogs.iter().map(|changelog| restore.changelog(changelog, partition));
            // Nobody may wait for it any more.
            let _ = answers.send(restored.collect());
        };
        let thread = std::thread::Builder::new().name(format!("restore-{partition}"));
        thread.spawn(run).map_err(|e| Failure::new(Exit::Refused, format!("cannot start a thread: {e}")))?;
        Ok(Restoring { answer, cancelled })
    }

    /// The state once it is complete. Does not block.
    ///
    /// # Errors
    /// A changelog cannot be read, or holds what no aggregate of these fields wrote; the disk fails.
    pub fn poll(&mut self) -> Result<Option<Restored>, Failure> {
        match self.answer.try_recv() {
            Ok(answer) => answer.map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Failure::stopped("a restore panicked")),
        }
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

struct Restore {
    connection: Connection,
    admin: Arc<Admin>,
    disk: Option<Disk>,
    cancelled: Arc<AtomicBool>,
    quiet_until: Instant,
}

/// Where restored records go.
enum Part {
    Memory(Memory),
    Disk(DiskPart, Vec<(Vec<u8>, Option<Vec<u8>>)>),
}

impl Part {
    fn take(&mut self, key: &[u8], value: Option<&[u8]>) -> Result<(), Failure> {
        match self {
            Part::Memory(memory) => memory.restore(key, value),
            Part::Disk(part, records) => {
                records.push((key.to_vec(), value.map(<[u8]>::to_vec)));
                if records.len() >= BATCH {
                    part.restore(records)?;
                }
            }
        }
        Ok(())
    }

    /// Everything up to `end` is there.
    fn complete(self, end: Position) -> Result<Box<dyn Store>, Failure> {
        match self {
            Part::Memory(memory) => Ok(Box::new(memory)),
            Part::Disk(mut part, mut records) => {
                part.restore(&mut records)?;
                part.complete(end)?;
                Ok(Box::new(part))
            }
        }
    }
}

impl Restore {
    fn changelog(&mut self, changelog: &Changelog, partition: i32) -> Result<Box<dyn Store>, Failure> {
        let started = Instant::now();
        let partition = TopicPartition::new(Arc::clone(&changelog.topic), partition);
        let (mut range, mut part) = loop {
            let begun = match self.log(&partition) {
                Ok(Some((low, high))) => self.begin(changelog, &partition, low, high)?,
                Ok(None) => None,
                Err(error) => {
                    self.wait(&partition, &error)?;
                    continue;
                }
            };
            match begun {
                Some(begun) => break begun,
                None if self.cancelled.load(Ordering::Relaxed) => return Err(cancelled()),
                None => std::thread::sleep(PAUSE),
            }
        };
        let (from, mut records) = (range.from, 0_u64);
        loop {
            match self.read(&mut range, changelog.stamp, &mut part, &mut records) {
                Ok(()) => break,
                Err(Problem::Failure(failure)) => return Err(failure),
                Err(Problem::Kafka(error)) => self.wait(&partition, &error)?,
            }
        }
        crash::at(Point::InRestore);
        let elapsed = started.elapsed();
        tracing::info!(changelog = %partition, %from, to = %range.to, records, ?elapsed, "state restored");
        part.complete(range.to)
    }

    /// What has to be read, and where it goes; `None` while somebody else has the files.
    fn begin(
        &self,
        changelog: &Changelog,
        partition: &TopicPartition,
        low: Position,
        high: Position,
    ) -> Result<Option<(Range, Part)>, Failure> {
        let range = |from| Range { partition: partition.clone(), from, to: high };
        match &self.disk {
            None => Ok(Some((range(low), Part::Memory(Memory::default())))),
            Some(disk) => {
                let part = disk.part(partition, changelog.id, changelog.stamp, (low, high))?;
                Ok(part.map(|part| (range(part.bound.unwrap_or(low)), Part::Disk(part, Vec::new()))))
            }
        }
    }

    /// Reads on from where the range begins, and moves that.
    fn read(&mut self, range: &mut Range, stamp: Stamp, part: &mut Part, records: &mut u64) -> Result<(), Problem> {
        let mut next = range.from;
        let mut reader = Reader::new(&self.connection, PATIENCE)?;
        let (cancelled, quiet_until) = (Arc::clone(&self.cancelled), &mut self.quiet_until);
        let is_cancelled = || cancelled.load(Ordering::Relaxed);
        // A transaction is open, or one that was aborted is longer than what is read in so long: beginning again would never
        // get past it.
        let mut idles = 0;
        let idle = |error: Error| {
            if is_cancelled() {
                return Err(Problem::Failure(self::cancelled()));
            }
            say(quiet_until, &range.partition, &error);
            // A client whose picture of the cluster went wrong finds nothing any more: another one begins.
            idles += 1;
            if idles < IDLES { Ok(()) } else { Err(error.into()) }
        };
        let take = |input: &Input<'_>| {
            if is_cancelled() {
                return Err(Problem::Failure(self::cancelled()));
            }
            if input.value.is_some_and(|value| !value.starts_with(&stamp)) {
                return Err(Problem::Failure(foreign(&range.partition)));
            }
            part.take(input.key.unwrap_or_default(), input.value).map_err(Problem::Failure)?;
            next = input.offset.next();
            *records += 1;
            Ok(ControlFlow::Continue(()))
        };
        let read = reader.read_on(range, take, idle);
        range.from = next;
        read
    }

    /// What the partition holds. Its end is that of what is not committed too. `None`: it was not told, and is asked for again,
    /// since state up to a guessed end would lack what lies behind.
    fn log(&self, partition: &TopicPartition) -> Result<Option<(Position, Position)>, Error> {
        let ask = |at| self.admin.offsets(&[(partition.clone(), at)], Isolation::ReadUncommitted);
        let high = told(partition, &ask(At::Latest)?);
        Ok(told(partition, &ask(At::Earliest)?).zip(high))
    }

    /// A broker that is away, or a transaction that is open, is waited for.
    fn wait(&mut self, partition: &TopicPartition, error: &Error) -> Result<(), Failure> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(cancelled());
        }
        if error.is_fatal() || (matches!(error.disposition(), Disposition::Fatal(_)) && !error.is_unknown_topic()) {
            return Err(Failure::stopped(format!("the state cannot be restored from {partition}: {error}")));
        }
        say(&mut self.quiet_until, partition, error);
        std::thread::sleep(PAUSE);
        Ok(())
    }
}

/// Says now and then why a restore waits.
fn say(quiet_until: &mut Instant, partition: &TopicPartition, error: &Error) {
    if Instant::now() >= *quiet_until {
        *quiet_until = Instant::now() + SAY_EVERY;
        tracing::warn!(changelog = %partition, %error, "waiting to restore state");
    }
}

/// What was told of a partition.
fn told(partition: &TopicPartition, found: &[(TopicPartition, Option<Position>)]) -> Option<Position> {
    found.iter().find(|(of, _)| of == partition).and_then(|(_, position)| *position)
}

fn cancelled() -> Failure {
    Failure::stopped("the restore was cancelled")
}

enum Problem {
    Kafka(Error),
    Failure(Failure),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        Problem::Kafka(error)
    }
}

fn foreign(partition: &TopicPartition) -> Failure {
    Failure::stopped(format!(
        "the changelog {partition} holds the state of an aggregate with other fields, or of a newer version of semel: it \
         cannot be gone on with. Give the aggregate its former fields back, or another name, or clear its state with \
         semel reset"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_is_not_told_is_no_end() {
        let partition = TopicPartition::new("t.n.changelog", 2);
        let other = (TopicPartition::new("t.n.changelog", 1), Some(Position(7)));
        assert_eq!(told(&partition, &[other.clone(), (partition.clone(), Some(Position(0)))]), Some(Position(0)));
        assert_eq!(told(&partition, &[other, (partition.clone(), None)]), None);
    }
}
