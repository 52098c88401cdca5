//! Closing windows: what is put out of them, and how time goes on where no record comes.

use crate::chunk::Chunk;
use crate::expr::Fault;
use crate::ids::Identity;
use crate::record::{Headers, Input, Offset};
use crate::topology::spec::{Format, NodeId};

use super::aggregate::Aggregate;
use super::pipeline::{From, Outcome, Pipeline, Stop};
use super::source::Event;
use super::state::StoreId;
use super::steps::{Operator, Step};

/// What a turn of closing windows came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Closed {
    /// Windows that were put out.
    pub windows: u32,
    /// What of them is in the chunk.
    pub outputs: u32,
    /// Those that a later node rejected, by that node and its reason: their dead letters are in the chunk.
    pub rejects: Vec<(NodeId, &'static str)>,
    /// Those that a later node failed on under `on_error = "skip"`.
    pub skipped: u32,
}

/// Windows that are closed in one turn, so that the chunk can be handed over between.
pub(super) const CLOSE_AT_ONCE: usize = 1000;

impl Pipeline {
    /// Closes windows whose time is over, in the order of their ends and then of their keys, as many as fit into one turn.
    /// What is put out of one goes through the nodes behind as a record of its own: one that fails there is rejected alone,
    /// and is closed all the same, or nothing could follow it. `None` once all are closed.
    ///
    /// # Errors
    /// One failed under `on_error = "stop"`.
    pub fn close(&mut self, chunk: &mut Chunk) -> Result<Option<Closed>, Stop> {
        let Pipeline { steps, states, close_at_once, .. } = self;
        let next = steps.iter_mut().enumerate().find_map(|(i, step)| match &mut step.operator {
            Operator::Aggregate(aggregate) => {
                Some((i, aggregate.close(*close_at_once, states, chunk)?, aggregate.changelog()))
            }
            _ => None,
        });
        let Some((step, (partition, offset, finals), topic)) = next else { return Ok(None) };
        self.states.keep();
        let mut closed = Closed::default();
        for last in finals {
            closed.windows += 1;
            // It is of no record: its place is the changelog, which no source reads.
            let input = Input {
                topic: &topic,
                partition,
                offset,
                timestamp: Some(last.last_ms),
                key: Some(last.group.as_bytes()),
                value: Some(&last.json),
                headers: Headers::default(),
            };
            let event = Event { identity: Identity::Known(last.id), time_ms: Some(last.last_ms), tell: true };
            let mark = chunk.mark();
            match self.put_out(step, &input, &event, chunk) {
                Ok(outputs) => {
                    closed.outputs += outputs;
                    self.keep();
                }
                Err((node, fault)) => {
                    chunk.rewind(mark);
                    self.withdraw();
                    match self.fail(node, fault, &event, &input, chunk)? {
                        Outcome::Rejected { node, reason } => closed.rejects.push((node, reason)),
                        _ => closed.skipped += 1,
                    }
                }
            }
        }
        Ok(Some(closed))
    }

    /// Whether windows are still to be closed.
    pub fn is_closing(&self) -> bool {
        let closing = |step: &Step| matches!(&step.operator, Operator::Aggregate(a) if !a.closing.is_empty());
        self.steps.iter().any(closing)
    }

    /// After how long without a record a partition's time goes on with the clock; none where it does not. Milliseconds.
    pub fn idle_ms(&self, store: StoreId) -> Option<i64> {
        self.aggregate(store).and_then(|aggregate| aggregate.spec.window?.idle_ms)
    }

    /// The time of a partition, of a store whose time goes on without records. Milliseconds since the epoch.
    pub fn stream_time(&mut self, store: StoreId, partition: i32, chunk: &mut Chunk) -> Option<i64> {
        let Pipeline { steps, states, .. } = self;
        steps.iter_mut().find_map(|step| match &mut step.operator {
            Operator::Aggregate(aggregate) if aggregate.store == store => aggregate.time(partition, states, chunk),
            _ => None,
        })
    }

    /// Moves the time of a partition, after whose last record nothing came: whether windows [are to be
    /// closed](Pipeline::close) by it.
    pub fn advance(&mut self, store: StoreId, partition: i32, time: i64, offset: Offset, chunk: &mut Chunk) -> bool {
        let Pipeline { steps, states, .. } = self;
        let moved = steps.iter_mut().any(|step| match &mut step.operator {
            Operator::Aggregate(aggregate) if aggregate.store == store => {
                aggregate.advance(time, partition, offset, states, chunk)
            }
            _ => false,
        });
        states.keep();
        moved
    }

    fn aggregate(&self, store: StoreId) -> Option<&Aggregate> {
        self.steps.iter().find_map(|step| match &step.operator {
            Operator::Aggregate(aggregate) if aggregate.store == store => Some(&**aggregate),
            _ => None,
        })
    }

    /// Puts into `chunk` what has to be in the changelogs once a batch: to be called before a batch is sealed, when all windows
    /// are closed.
    pub fn settle(&mut self, chunk: &mut Chunk) {
        let Pipeline { steps, states, .. } = self;
        for step in steps {
            if let Operator::Aggregate(aggregate) = &mut step.operator {
                aggregate.tell_time(states, chunk);
            }
        }
    }

    /// Runs what a window came to through the nodes behind.
    fn put_out(
        &mut self,
        step: usize,
        input: &Input<'_>,
        event: &Event,
        chunk: &mut Chunk,
    ) -> Result<u32, (NodeId, Fault)> {
        let node = self.steps[step].node;
        self.counts.open(node).output += 1;
        let slot = self.pool.take();
        let record = self.pool.get_mut(slot);
        record.start();
        record.body.decode(Format::Json, input.value).map_err(|fault| (node, fault))?;
        self.walk(slot, From::Step(step), input, event, chunk).map(|done| done.outputs)
    }
}
