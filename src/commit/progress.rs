//! A worker's positions: what it processed, what it sealed, what is committed, and in which epoch.

use std::collections::{BTreeMap, VecDeque};

use crate::commit::Epoch;
use crate::record::{Offset, Position, TopicPartition};

/// Number of a sealed batch, rising by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// What a commit makes true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    pub batch: BatchId,
    pub epoch: Epoch,
    /// Never empty: a transaction without positions is not fenced by the group.
    pub positions: Vec<(TopicPartition, Position)>,
    /// Of the state of those partitions that have one.
    pub revisions: Vec<(TopicPartition, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The next offset to process.
    next: Position,
    /// Processed or moved since the last seal.
    touched: bool,
}

/// Index of an assigned partition, valid until the assignment changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotId(usize);

/// Positions of the assigned partitions.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    epoch: Epoch,
    next_batch: u64,
    ids: BTreeMap<TopicPartition, usize>,
    slots: Vec<Slot>,
    records: u64,
    in_flight: VecDeque<Sealed>,
}

impl Progress {
    /// The epoch that work is handed over in.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Adds partitions, or moves those that are there. One that never had a position is `fresh`: the next seal commits
    /// where it starts, so that `start` is resolved once.
    pub fn assign(&mut self, partition: TopicPartition, next: Position, fresh: bool) {
        let slot = Slot { next, touched: fresh };
        match self.ids.get(&partition) {
            Some(id) => self.slots[*id] = slot,
            None => {
                self.ids.insert(partition, self.slots.len());
                self.slots.push(slot);
            }
        }
    }

    /// Forgets partitions that were given up. The open batch must hold nothing of them.
    pub fn unassign(&mut self, partitions: &[TopicPartition]) {
        let kept: Vec<_> = self.positions().into_iter().filter(|(p, _)| !partitions.contains(p)).collect();
        let touched: Vec<bool> = kept.iter().map(|(p, _)| self.slots[self.ids[p]].touched).collect();
        self.ids.clear();
        self.slots.clear();
        for ((partition, next), touched) in kept.into_iter().zip(touched) {
            self.assign(partition, next, touched);
        }
    }

    /// The slot of an assigned partition.
    pub fn slot(&self, topic: &str, partition: i32) -> Option<SlotId> {
        // A scan: a worker has few partitions, and callers keep the answer for a run of records.
        self.ids.iter().find(|(p, _)| p.partition == partition && *p.topic == *topic).map(|(_, id)| SlotId(*id))
    }

    /// Whether the record at `offset` is the next of its partition or lies further on (markers and compaction leave
    /// gaps). A lower one was processed already and must be skipped.
    pub fn is_due(&self, slot: SlotId, offset: Offset) -> bool {
        Position(offset.0) >= self.slots[slot.0].next
    }

    /// Counts a record as processed.
    pub fn processed(&mut self, slot: SlotId, offset: Offset) {
        let slot = &mut self.slots[slot.0];
        assert!(Position(offset.0) >= slot.next, "offset {offset} processed after position {}", slot.next);
        slot.next = offset.next();
        slot.touched = true;
        self.records += 1;
    }

    /// Moves a position over markers. Never back.
    pub fn step_over(&mut self, partition: &TopicPartition, to: Position) {
        if let Some(id) = self.ids.get(partition) {
            let slot = &mut self.slots[*id];
            if to > slot.next {
                slot.next = to;
                slot.touched = true;
            }
        }
    }

    /// Has the open batch commit the position of a partition, though it need not have moved; false for one that is not
    /// assigned.
    pub fn touch(&mut self, partition: &TopicPartition) -> bool {
        let slot = self.ids.get(partition).map(|id| self.slots[*id].touched = true);
        slot.is_some()
    }

    /// Records in the open batch.
    pub fn open_records(&self) -> u64 {
        self.records
    }

    /// Whether a seal would commit anything.
    pub fn is_open(&self) -> bool {
        self.slots.iter().any(|s| s.touched)
    }

    /// Ends the open batch; none where nothing moved.
    pub fn seal(&mut self) -> Option<Sealed> {
        if !self.is_open() {
            return None;
        }
        let positions =
            self.ids.iter().filter(|(_, id)| self.slots[**id].touched).map(|(p, id)| (p.clone(), self.slots[*id].next));
        let (batch, positions) = (BatchId(self.next_batch), positions.collect());
        let sealed = Sealed { batch, epoch: self.epoch, positions, revisions: Vec::new() };
        self.next_batch += 1;
        self.records = 0;
        self.slots.iter_mut().for_each(|s| s.touched = false);
        self.in_flight.push_back(sealed.clone());
        Some(sealed)
    }

    /// The oldest sealed batch is committed. Answers its positions; none where it was given up meanwhile.
    pub fn committed(&mut self, batch: BatchId) -> Option<Sealed> {
        if self.in_flight.front().is_none_or(|sealed| sealed.batch != batch) {
            assert!(self.in_flight.front().is_none_or(|s| s.batch > batch), "batch {batch:?} committed out of turn");
            return None;
        }
        self.in_flight.pop_front()
    }

    /// Sealed batches that are not committed yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Where the partitions stand that something is open or sealed of.
    pub fn uncommitted(&self) -> Vec<(TopicPartition, Position)> {
        let sealed = |partition: &TopicPartition| {
            self.in_flight.iter().flat_map(|sealed| &sealed.positions).any(|(other, _)| other == partition)
        };
        let open = self.ids.iter().filter(|(partition, id)| self.slots[**id].touched || sealed(partition));
        open.map(|(partition, id)| (partition.clone(), self.slots[*id].next)).collect()
    }

    /// Gives up the open batch and all sealed ones; answers the epoch that died. Positions are wrong from here until
    /// each partition was assigned again.
    pub fn abandon(&mut self) -> Epoch {
        let dead = self.epoch;
        self.epoch = dead.next();
        self.in_flight.clear();
        self.records = 0;
        self.slots.iter_mut().for_each(|s| s.touched = false);
        dead
    }

    /// Every assigned partition with the next offset to process.
    pub fn positions(&self) -> Vec<(TopicPartition, Position)> {
        self.ids.iter().map(|(p, id)| (p.clone(), self.slots[*id].next)).collect()
    }

    /// The assigned partitions.
    pub fn partitions(&self) -> Vec<TopicPartition> {
        self.ids.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tp(partition: i32) -> TopicPartition {
        TopicPartition::new("in", partition)
    }

    #[test]
    fn a_seal_holds_the_next_offset_of_each_partition_that_moved() {
        let mut progress = Progress::default();
        progress.assign(tp(0), Position(5), false);
        progress.assign(tp(1), Position(0), true);
        progress.assign(tp(2), Position(9), false);
        let slot = progress.slot("in", 0).unwrap();
        progress.processed(slot, Offset(7));
        let sealed = progress.seal().unwrap();
        assert_eq!(sealed.positions, [(tp(0), Position(8)), (tp(1), Position(0))]);
        assert_eq!(progress.seal(), None);
        progress.touch(&tp(2));
        assert_eq!(
            progress.seal().unwrap().positions,
            [(tp(2), Position(9))],
            "what no record moved stands where it stood"
        );
        assert!(!progress.is_due(slot, Offset(7)));
        assert!(progress.is_due(slot, Offset(8)));
    }

    #[test]
    fn a_batch_given_up_is_not_acknowledged_by_a_late_answer() {
        let mut progress = Progress::default();
        progress.assign(tp(0), Position(0), false);
        let slot = progress.slot("in", 0).unwrap();
        progress.processed(slot, Offset(0));
        let first = progress.seal().unwrap();
        assert_eq!(progress.abandon(), Epoch(0));
        assert_eq!(progress.committed(first.batch), None);
        progress.assign(tp(0), Position(0), false);
        let slot = progress.slot("in", 0).unwrap();
        progress.processed(slot, Offset(0));
        let second = progress.seal().unwrap();
        assert_eq!((second.batch, second.epoch), (BatchId(1), Epoch(1)));
        assert_eq!(progress.committed(second.batch), Some(second));
    }

    #[test]
    fn a_partition_that_is_touched_is_committed_where_it_stands() {
        let mut progress = Progress::default();
        progress.assign(tp(0), Position(5), false);
        assert!(progress.touch(&tp(0)) && !progress.touch(&tp(1)));
        assert_eq!(progress.seal().unwrap().positions, [(tp(0), Position(5))]);
    }

    #[test]
    fn what_is_not_committed_is_open_or_sealed() {
        let mut progress = Progress::default();
        (0..4).for_each(|partition| progress.assign(tp(partition), Position(5), false));
        let process = |progress: &mut Progress, partition, offset| {
            let slot = progress.slot("in", partition).unwrap();
            progress.processed(slot, Offset(offset));
        };
        process(&mut progress, 3, 5);
        let batch = progress.seal().unwrap().batch;
        progress.committed(batch);
        process(&mut progress, 0, 5);
        process(&mut progress, 1, 5);
        progress.seal();
        process(&mut progress, 1, 6);
        process(&mut progress, 2, 9);
        assert_eq!(progress.uncommitted(), [(tp(0), Position(6)), (tp(1), Position(7)), (tp(2), Position(10))]);
    }

    #[test]
    fn forgetting_a_partition_keeps_the_others() {
        let mut progress = Progress::default();
        for p in 0..3 {
            progress.assign(tp(p), Position(10 * i64::from(p)), false);
        }
        let slot = progress.slot("in", 2).unwrap();
        progress.processed(slot, Offset(20));
        progress.unassign(&[tp(0)]);
        assert_eq!(progress.positions(), [(tp(1), Position(10)), (tp(2), Position(21))]);
        assert_eq!(progress.seal().unwrap().positions, [(tp(2), Position(21))]);
    }
}
