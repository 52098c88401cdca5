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

use crate::error::{Disposition, Exit, Failure};
use crate::kafka::{Admin, At, Connection, Error, Isolation, Range, Reader};
use crate::operator::{Memory, Stamp};
use crate::record::{Position, TopicPartition};

/// Nothing comes for so long while an open transaction holds the rest back.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(200);
const SAY_EVERY: Duration = Duration::from_secs(10);

/// A changelog, and what values in it begin with.
#[derive(Clone, Debug)]
pub struct Changelog {
    pub topic: Arc<str>,
    pub stamp: Stamp,
}

/// A restore on its way, in a thread of its own. Dropped, it ends soon.
#[derive(Debug)]
pub struct Restoring {
    answer: Receiver<Result<Vec<Memory>, Failure>>,
    cancelled: Arc<AtomicBool>,
}

impl Restoring {
    /// Begins to restore one partition of each changelog.
    pub fn begin(
        connection: &Connection,
        admin: &Arc<Admin>,
        changelogs: &[Changelog],
        partition: i32,
    ) -> Result<Restoring, Failure> {
        let (answers, answer) = channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let restore = Restore {
            connection: connection.clone(),
            admin: Arc::clone(admin),
            cancelled: Arc::clone(&cancelled),
            quiet_until: Instant::now() + SAY_EVERY,
        };
        let changelogs = changelogs.to_vec();
        let run = move || {
            let mut restore = restore;
            let restored = changelogs.iter().map(|changelog| restore.changelog(changelog, partition));
            // Nobody may wait for it any more.
            let _ = answers.send(restored.collect());
        };
        let thread = std::thread::Builder::new().name(format!("restore-{partition}"));
        thread.spawn(run).map_err(|e| Failure::new(Exit::Refused, format!("cannot start a thread: {e}")))?;
        Ok(Restoring { answer, cancelled })
    }

    /// The state of each changelog once it is complete. Does not block.
    ///
    /// # Errors
    /// A changelog cannot be read, or holds what no aggregate of these fields wrote.
    pub fn poll(&mut self) -> Result<Option<Vec<Memory>>, Failure> {
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
    cancelled: Arc<AtomicBool>,
    quiet_until: Instant,
}

impl Restore {
    fn changelog(&mut self, changelog: &Changelog, partition: i32) -> Result<Memory, Failure> {
        let started = Instant::now();
        let partition = TopicPartition::new(Arc::clone(&changelog.topic), partition);
        let mut memory = Memory::default();
        let mut records = 0_u64;
        let mut range: Option<Range> = None;
        while !self.cancelled.load(Ordering::Relaxed) {
            match self.read(&partition, &mut range, changelog.stamp, &mut memory, &mut records) {
                Ok(()) => {
                    let (keys, elapsed) = (memory.len(), started.elapsed());
                    tracing::info!(changelog = %partition, records, keys, ?elapsed, "state restored");
                    return Ok(memory);
                }
                Err(Problem::Failure(failure)) => return Err(failure),
                Err(Problem::Kafka(error)) => self.wait(&partition, &error)?,
            }
        }
        Err(Failure::stopped("the restore was cancelled"))
    }

    /// Reads on from where the range begins, and moves that.
    fn read(
        &self,
        partition: &TopicPartition,
        range: &mut Option<Range>,
        stamp: Stamp,
        memory: &mut Memory,
        records: &mut u64,
    ) -> Result<(), Problem> {
        let range = match range {
            Some(range) => range,
            None => range.insert(self.whole(partition)?),
        };
        let mut next = range.from;
        let mut reader = Reader::new(&self.connection, PATIENCE)?;
        let cancelled = &self.cancelled;
        let read = reader.read(range, |input| {
            if cancelled.load(Ordering::Relaxed) {
                return Ok(ControlFlow::Break(()));
            }
            if input.value.is_some_and(|value| !value.starts_with(&stamp)) {
                return Err(Problem::Failure(foreign(partition)));
            }
            memory.restore(input.key.unwrap_or_default(), input.value);
            next = input.offset.next();
            *records += 1;
            Ok(ControlFlow::Continue(()))
        });
        range.from = next;
        if cancelled.load(Ordering::Relaxed) {
            return Err(Problem::Failure(Failure::stopped("the restore was cancelled")));
        }
        read
    }

    fn whole(&self, partition: &TopicPartition) -> Result<Range, Error> {
        let ask = |at| {
            let found = self.admin.offsets(&[(partition.clone(), at)], Isolation::ReadUncommitted)?;
            Ok::<_, Error>(found.first().and_then(|(_, position)| *position).unwrap_or(Position(0)))
        };
        let to = ask(At::Latest)?;
        Ok(Range { partition: partition.clone(), from: ask(At::Earliest)?, to })
    }

    /// A broker that is away, or a transaction that is open, is waited for.
    fn wait(&mut self, partition: &TopicPartition, error: &Error) -> Result<(), Failure> {
        if error.is_fatal() || (matches!(error.disposition(), Disposition::Fatal(_)) && !error.is_unknown_topic()) {
            return Err(Failure::stopped(format!("the state cannot be restored from {partition}: {error}")));
        }
        if Instant::now() >= self.quiet_until {
            self.quiet_until = Instant::now() + SAY_EVERY;
            tracing::warn!(changelog = %partition, %error, "waiting to restore state");
        }
        std::thread::sleep(PAUSE);
        Ok(())
    }
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
