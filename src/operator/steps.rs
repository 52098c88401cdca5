//! The nodes behind the sources, in the plan's order, and who takes what from whom.

use crate::chunk::Chunk;
use crate::expr::{Fault, Metadata, Runtime};
use crate::ids::EventId;
use crate::record::Input;
use crate::topology::spec::NodeId;

use super::aggregate::{Aggregate, Folded};
use super::filter::Filter;
use super::flat_map::{Expanded, FlatMap};
use super::join::{Join, Joined};
use super::join_tables::{Changed, JoinTables};
use super::rekey::Rekey;
use super::remap::Remap;
use super::route::{Route, Way};
use super::sink::Sink;
use super::source::Event;
use super::state::States;
use super::table::Table;
use super::{Counts, Pool, Slot};

/// A node at work.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) node: NodeId,
    pub(super) operator: Operator,
    /// The steps that take from each output.
    pub(super) takers: Vec<Vec<usize>>,
    /// The steps that take from any output.
    pub(super) all_takers: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(super) enum Operator {
    Filter(Filter),
    Remap(Remap),
    Route(Route),
    FlatMap(FlatMap),
    Rekey(Rekey),
    Aggregate(Box<Aggregate>),
    Table(Box<Table>),
    Join(Box<Join>),
    JoinTables(Box<JoinTables>),
    Sink(Box<Sink>),
}

/// What one input is on its way through the steps.
pub(super) struct Run<'a, 'i> {
    pub(super) input: &'a Input<'i>,
    pub(super) event: &'a Event,
    pub(super) runtime: &'a mut Runtime,
    pub(super) pool: &'a mut Pool,
    pub(super) states: &'a mut States,
    pub(super) counts: &'a mut Counts,
    pub(super) chunk: &'a mut Chunk,
    /// The records that wait before each step.
    pub(super) queues: &'a mut [Vec<Slot>],
    pub(super) scratch: &'a mut Vec<u8>,
    pub(super) done: Done,
}

/// What became of an input on its way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Done {
    pub(super) outputs: u32,
    /// It is in the state of some node.
    pub(super) applied: bool,
    /// It came too late for some node.
    pub(super) late: bool,
}

impl Run<'_, '_> {
    /// Hands a record to its takers.
    pub(super) fn emit(&mut self, slot: Slot, takers: &[usize]) {
        match takers.len() {
            0 => self.pool.release(slot),
            takers => self.pool.share(slot, takers - 1),
        }
        for taker in takers {
            self.queues[*taker].push(slot);
        }
    }

    /// Runs every step on what waits before it. A step takes only from earlier ones, so one turn is enough, and the
    /// outputs come in the order of the nodes.
    ///
    /// # Errors
    /// The node that the record failed at, and why.
    pub(super) fn steps(&mut self, steps: &mut [Step]) -> Result<(), (NodeId, Fault)> {
        for (i, step) in steps.iter_mut().enumerate() {
            if self.queues[i].is_empty() {
                continue;
            }
            let mut queue = std::mem::take(&mut self.queues[i]);
            for (index, slot) in queue.drain(..).enumerate() {
                self.counts.open(step.node).input += 1;
                self.step(step, slot, index as u32).map_err(|fault| (step.node, fault))?;
            }
            self.queues[i] = queue;
        }
        Ok(())
    }

    fn step(&mut self, step: &mut Step, slot: Slot, index: u32) -> Result<(), Fault> {
        let Step { node, operator, takers, all_takers } = step;
        match operator {
            Operator::Filter(filter) => {
                let record = self.pool.get(slot);
                let metadata = Metadata::new(self.input, record.key(self.input), record.identity(self.event));
                let keeps = filter.keeps(record, self.runtime, &metadata)?;
                self.pass(*node, slot, keeps.then_some(&takers[0]));
            }
            Operator::Remap(remap) => {
                let slot = self.pool.own(slot);
                let record = self.pool.get_mut(slot);
                let identity = record.identity(self.event);
                let (body, key) = record.parts(self.input);
                let metadata = Metadata::new(self.input, key, identity);
                let kept = remap.apply(body, self.runtime, &metadata)?;
                self.pass(*node, slot, kept.then_some(&takers[0]));
            }
            Operator::Route(route) => {
                let record = self.pool.get(slot);
                let metadata = Metadata::new(self.input, record.key(self.input), record.identity(self.event));
                let takers = match route.way(record, self.runtime, &metadata)? {
                    Way::Output(output) => Some(&takers[output]),
                    Way::Every => Some(&*all_takers),
                    Way::Nowhere => None,
                };
                self.pass(*node, slot, takers.filter(|t| !t.is_empty()));
            }
            Operator::FlatMap(flat_map) => {
                let slot = self.pool.own(slot);
                let record = self.pool.get_mut(slot);
                let identity = record.identity(self.event);
                let (body, key) = record.parts(self.input);
                let metadata = Metadata::new(self.input, key, identity);
                match flat_map.expand(body, self.runtime, &metadata)? {
                    Expanded::Same => self.pass(*node, slot, Some(&takers[0])),
                    Expanded::Dropped => self.pass(*node, slot, None),
                    Expanded::Values(values) => {
                        for (i, value) in values.into_iter().enumerate() {
                            let child = self.pool.child(slot);
                            FlatMap::fill(&mut self.pool.get_mut(child).body, i, value)?;
                            self.pass(*node, child, Some(&takers[0]));
                        }
                        self.pool.release(slot);
                    }
                }
            }
            Operator::Rekey(rekey) => {
                let record = self.pool.get(slot);
                let metadata = Metadata::new(self.input, record.key(self.input), record.identity(self.event));
                match rekey.key(record, self.runtime, &metadata, self.scratch)? {
                    Some(key) => {
                        let slot = self.pool.own(slot);
                        self.pool.get_mut(slot).set_key(key, self.scratch);
                        self.pass(*node, slot, Some(&takers[0]));
                    }
                    None => self.pass(*node, slot, None),
                }
            }
            Operator::Aggregate(aggregate) => {
                let record = self.pool.get(slot);
                let Run { input, event, runtime, states, chunk, .. } = self;
                match aggregate.fold(record, input, event, runtime, states, chunk)? {
                    Folded::Applied => {
                        self.done.applied = true;
                        let mut updates = aggregate.updates().peekable();
                        if updates.peek().is_none() {
                            self.pool.release(slot);
                        }
                        while let Some((json, id)) = updates.next() {
                            let slot = match updates.peek() {
                                Some(_) => self.pool.child(slot),
                                None => slot,
                            };
                            self.update(*node, slot, json, id, &takers[0])?;
                        }
                    }
                    Folded::Dropped => self.pass(*node, slot, None),
                    Folded::Late => {
                        self.done.late = true;
                        self.counts.open(*node).late += 1;
                        self.pool.release(slot);
                    }
                }
            }
            Operator::Table(table) => {
                let record = self.pool.get(slot);
                let taken = table.take(record, self.input, self.event, self.states, self.chunk)?;
                let mut slot = slot;
                // Others that take the same record do not take a row of this table.
                if taken && !takers[0].is_empty() {
                    slot = self.pool.own(slot);
                    self.pool.get_mut(slot).row_of = Some(table.store());
                }
                self.pass(*node, slot, taken.then_some(&takers[0]));
            }
            Operator::Join(join) => {
                let record = self.pool.get(slot);
                match join.join(record, self.input, self.event, self.states)? {
                    Joined::Record(id) => self.update(*node, slot, join.output(), id, &takers[0])?,
                    Joined::Null => self.pass(*node, slot, Some(&takers[0])),
                    Joined::Alone => self.pass(*node, slot, None),
                }
            }
            Operator::JoinTables(join) => {
                let record = self.pool.get(slot);
                match join.change(record, self.input, self.event, self.states)? {
                    Changed::Row(id) => self.update(*node, slot, join.output(), id, &takers[0])?,
                    Changed::Gone(id) => {
                        let slot = self.pool.own(slot);
                        self.pool.get_mut(slot).become_null(id)?;
                        self.pass(*node, slot, Some(&takers[0]));
                    }
                    Changed::Nothing => self.pass(*node, slot, None),
                }
            }
            Operator::Sink(sink) => {
                let record = self.pool.get(slot);
                let written = sink.write(record, self.input, self.event, index, self.runtime, self.chunk)?;
                self.done.outputs += u32::from(written);
                self.count(*node, written);
                self.pool.release(slot);
            }
        }
        Ok(())
    }

    /// Sends on what a node made of a record, under an id of its own.
    fn update(&mut self, node: NodeId, slot: Slot, json: &[u8], id: EventId, takers: &Vec<usize>) -> Result<(), Fault> {
        let slot = self.pool.own(slot);
        self.pool.get_mut(slot).become_update(json, id)?;
        self.pass(node, slot, Some(takers));
        Ok(())
    }

    /// Sends a record on, or drops it.
    fn pass(&mut self, node: NodeId, slot: Slot, takers: Option<&Vec<usize>>) {
        self.count(node, takers.is_some());
        match takers {
            Some(takers) => self.emit(slot, takers),
            None => self.pool.release(slot),
        }
    }

    fn count(&mut self, node: NodeId, passed: bool) {
        let counts = self.counts.open(node);
        if passed {
            counts.output += 1;
        } else {
            counts.dropped += 1;
        }
    }
}
