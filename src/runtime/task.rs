//! What a worker runs on each record: the operators of the Kafka stage, or the rows of a Postgres stage.

use std::time::Duration;

use crate::chunk::Chunk;
use crate::error::Failure;
use crate::record::Input;

/// A stage's work on its records, driven by one worker.
pub trait Task: Send {
    /// Takes one record. Its outputs go into `chunk`: all of them, or its dead letter. An error stops the job.
    fn process(&mut self, input: &Input<'_>, chunk: &mut Chunk) -> Result<(), Failure>;

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

    /// The positions of a sealed batch were committed.
    fn committed(&mut self) {}

    /// Forgets what was taken and has no effect yet: the records come again.
    fn abandon(&mut self) {}
}
