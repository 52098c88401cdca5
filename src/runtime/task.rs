//! What a worker runs on each record: the operators of the Kafka stage, or the rows of a Postgres stage.

use std::time::Duration;

use crate::chunk::Chunk;
use crate::commit::progress::BatchId;
use crate::error::Failure;
use crate::record::{Input, Offset, Position, Timestamp, TopicPartition};

/// A stage's work on its records, driven by one worker.
pub trait Task: Send {
    /// Takes one record. Its outputs go into `chunk`: all of them, or its dead letter. An error stops the job.
    fn process(&mut self, input: &Input<'_>, chunk: &mut Chunk) -> Result<(), Failure>;

    /// The time by which a record is ordered among those of other topics.
    fn time(&mut self, input: &Input<'_>) -> Timestamp {
        input.timestamp
    }

    /// Rejects a record for a reason that was found outside: the broker refused it, or nobody knows its source.
    fn reject(
        &mut self,
        input: &Input<'_>,
        reason: &'static str,
        message: String,
        chunk: &mut Chunk,
    ) -> Result<(), Failure>;

    /// Whether another record can be taken. Does not block.
    fn has_room(&mut self) -> Result<bool, Failure> {
        Ok(true)
    }

    /// Whether outputs may be produced before the batch is sealed.
    fn streams(&self) -> bool {
        true
    }

    /// Whether another record would fit only after [`settle`](Task::settle): the batch is to be ended now.
    fn is_full(&self) -> bool {
        false
    }

    /// Finishes effects outside Kafka: true once everything taken has its effect and its dead letters are in `chunk`.
    /// Blocks for `wait` at most; to be called again until true.
    fn settle(&mut self, _chunk: &mut Chunk, _wait: Duration) -> Result<bool, Failure> {
        Ok(true)
    }

    /// Makes ready in the background what the task needs to take partitions over; answers those for which that is not done
    /// yet. To be asked again, until a partition is ready or given up. Does not block.
    fn prepare(&mut self, _partitions: &[TopicPartition]) -> Result<Vec<TopicPartition>, Failure> {
        Ok(Vec::new())
    }

    /// The revision of a partition's state, raised by every batch that changes it; 0 where it is empty. None where the partition has no
    /// state.
    fn revision(&self, _partition: &TopicPartition) -> Option<u64> {
        None
    }

    /// Raises the revisions of what the open batch changed. `touch` has the batch commit a partition's position; false where
    /// that cannot be, and the revision stays.
    fn revise(&mut self, _chunk: &mut Chunk, _touch: &mut dyn FnMut(&TopicPartition) -> bool) {}

    /// A partition was taken over, at its position.
    fn assigned(&mut self, _partition: &TopicPartition) {}

    /// Partitions were given up; nothing of them is open.
    fn unassigned(&mut self, _partitions: &[TopicPartition]) {}

    /// The next record is read from here. One of a retry topic is handed to `process` as its source had it.
    fn reading(&mut self, _partition: &TopicPartition, _offset: Offset) {}

    /// That record is through: its position may go where its effects go.
    fn processed(&mut self) {}

    /// A position moves on without a record.
    fn step_over(&mut self, _partition: &TopicPartition, _to: Position) {}

    /// Whether [`tick`](Task::tick) has anything to do.
    fn has_timers(&self) -> bool {
        false
    }

    /// The worker could not read for a while: no partition is known to be quiet.
    fn quiet_anew(&mut self) {}

    /// Does what time brings about, every now and then between records, given where each partition stands. Outputs go into
    /// `chunk`; answers the partitions that they are of, so that the transaction holds their positions though no record moved
    /// them.
    fn tick(
        &mut self,
        _partitions: &[(TopicPartition, Position)],
        _chunk: &mut Chunk,
    ) -> Result<Vec<TopicPartition>, Failure> {
        Ok(Vec::new())
    }

    /// Whether its effects belong to another by now: what is open is to be given up and the positions read again. Until
    /// then nothing settles.
    fn is_fenced(&self) -> bool {
        false
    }

    /// What was settled last is sealed as this batch.
    fn sealed(&mut self, _batch: BatchId) {}

    /// The positions of a sealed batch were committed.
    fn committed(&mut self, _batch: BatchId) {}

    /// Records that were taken and whose effects are not through, where [`settle`](Task::settle) brings these about.
    fn held(&self) -> u64 {
        0
    }

    /// Forgets what was taken and has no effect yet: the records come again.
    fn abandon(&mut self) {}

    /// Nothing comes any more. Blocks for `wait` at most.
    fn close(&mut self, _wait: Duration) {}
}
