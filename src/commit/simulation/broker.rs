//! What a broker keeps, as far as the protocol can tell: open transactions, the log, positions and the generation.

use super::random::Random;
use crate::commit::Side;

pub(super) const PARTITIONS: usize = 2;
pub(super) const RECORDS: i64 = 25;

/// Partition and offset of an input; its output is told by them.
pub(super) type Input = (usize, i64);

#[derive(Default)]
pub(super) struct Broker {
    pub(super) open: [Option<Transaction>; 2],
    /// Outputs that a `read_committed` reader sees.
    pub(super) log: Vec<Input>,
    pub(super) positions: [i64; PARTITIONS],
    /// Of the group; a commit of another one is refused.
    pub(super) generation: u64,
    /// The last commit ended without the client having heard of it.
    pub(super) unheard: bool,
    /// Sent without a transaction and not yet acknowledged.
    pub(super) unacknowledged: Vec<Input>,
}

#[derive(Default)]
pub(super) struct Transaction {
    pub(super) outputs: Vec<Input>,
    pub(super) offsets: Vec<(usize, i64)>,
}

impl Broker {
    pub(super) fn end(&mut self, side: Side, commit: bool) {
        let Some(transaction) = self.open[side.index()].take() else { return };
        if commit {
            self.log.extend(transaction.outputs);
            for (p, position) in transaction.offsets {
                self.positions[p] = position;
            }
        }
    }

    /// Ends a transaction so that its outcome reaches the client only with the next call.
    pub(super) fn end_unheard(&mut self, side: Side, commit: bool) {
        self.end(side, commit);
        self.unheard = true;
    }

    /// Positions that a require_stable fetch would answer.
    pub(super) fn stable(&self, p: usize) -> Option<i64> {
        let pending = self.open.iter().flatten().any(|t| t.offsets.iter().any(|(q, _)| *q == p));
        (!pending).then_some(self.positions[p])
    }

    /// The client goes on waiting until everything sent is acknowledged.
    pub(super) fn deliver(&mut self) {
        self.log.append(&mut self.unacknowledged);
    }

    /// The client gives up or dies: what was sent arrived as far as it did.
    pub(super) fn deliver_some(&mut self, random: &mut Random) {
        let arrived = random.below(self.unacknowledged.len() as u64 + 1) as usize;
        self.log.extend(self.unacknowledged.drain(..arrived));
        self.unacknowledged.clear();
    }

    /// Another member of the group has the partition for a while.
    pub(super) fn others_work(&mut self, p: usize, random: &mut Random) {
        let Some(from) = self.stable(p) else { return };
        let to = RECORDS.min(from + random.below(4) as i64);
        self.log.extend((from..to).map(|offset| (p, offset)));
        self.positions[p] = to;
    }
}
