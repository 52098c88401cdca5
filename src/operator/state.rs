//! What stateful operators keep, by partition. Below lies what is committed; above it what each batch wrote, newest last,
//! until its commit makes it true or an abort drops it. A record that is rejected takes back what it wrote.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::mem;
use std::ops::Bound;

use crate::commit::progress::BatchId;
use crate::expr::Fault;
use crate::record::Position;

/// What batches wrote: keys with their whole values; none where a key was removed. In order, since windows are looked for by
/// their time.
pub type Writes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// The committed state of one store and partition.
pub trait Store: Send + fmt::Debug {
    /// Writes the value of a key to `out`, which is empty; false where there is none.
    fn read(&self, key: &[u8], out: &mut Vec<u8>) -> bool;

    /// The first keys from one on and below another, in order; so many at most.
    fn keys(&self, from: &[u8], below: &[u8], most: usize) -> Vec<Vec<u8>>;

    /// Makes the writes of a committed batch true, all or none. With a bound, every committed record of the changelog below
    /// it is in the state then.
    fn apply(&mut self, writes: Writes, bound: Option<Position>);
}

/// A store in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory(BTreeMap<Vec<u8>, Vec<u8>>);

impl Memory {
    /// Takes in a record of the changelog; null removes the key.
    pub fn restore(&mut self, key: &[u8], value: Option<&[u8]>) {
        match value {
            Some(value) => drop(self.0.insert(key.to_vec(), value.to_vec())),
            None => drop(self.0.remove(key)),
        }
    }

    /// How many keys it holds.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Store for Memory {
    fn read(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        let value = self.0.get(key);
        value.inspect(|value| out.extend_from_slice(value)).is_some()
    }

    fn keys(&self, from: &[u8], below: &[u8], most: usize) -> Vec<Vec<u8>> {
        between(&self.0, from, below).take(most).map(|(key, _)| key.clone()).collect()
    }

    fn apply(&mut self, writes: Writes, _bound: Option<Position>) {
        writes.into_iter().for_each(|(key, value)| self.restore(&key, value.as_deref()));
    }
}

/// What a map holds from one key on and below another, in order.
fn between<'m, V>(
    map: &'m BTreeMap<Vec<u8>, V>,
    from: &[u8],
    below: &[u8],
) -> impl Iterator<Item = (&'m Vec<u8>, &'m V)> {
    map.range::<[u8], _>((Bound::Included(from), Bound::Excluded(below)))
}

/// What is wrong with a record whose state another worker has.
pub(super) fn elsewhere(partition: i32) -> Fault {
    let message =
        format!("the state of partition {partition} is not here; replay it while one worker has all partitions");
    Fault::new("retry", message)
}

/// A store of the stage: its place in the plan's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreId(pub usize);

/// One store's part of one partition.
#[derive(Debug)]
struct Part {
    committed: Box<dyn Store>,
    sealed: VecDeque<(BatchId, Writes)>,
    open: Writes,
    /// A bound that holds once this batch is committed.
    bound: Option<(BatchId, Position)>,
    /// A batch was given up of which nobody knows whether it was committed.
    doubtful: bool,
}

/// The state of a pipeline: of each store the partitions that it holds.
#[derive(Debug, Default)]
pub(super) struct States {
    stores: Vec<HashMap<i32, Part>>,
    /// By the record at hand.
    written: Vec<Written>,
}

#[derive(Debug)]
struct Written {
    store: StoreId,
    partition: i32,
    key: Vec<u8>,
    /// What the open batch had there.
    before: Option<Option<Vec<u8>>>,
}

impl States {
    pub(super) fn new(stores: usize) -> States {
        States { stores: (0..stores).map(|_| HashMap::new()).collect(), written: Vec::new() }
    }

    /// Takes over a partition in its committed state.
    pub(super) fn hold(&mut self, store: StoreId, partition: i32, committed: Box<dyn Store>) {
        let part = Part { committed, sealed: VecDeque::new(), open: Writes::new(), bound: None, doubtful: false };
        self.stores[store.0].insert(partition, part);
    }

    pub(super) fn release(&mut self, store: StoreId, partition: i32) {
        self.stores[store.0].remove(&partition);
    }

    /// Whether the partition's state is there and known to be what is committed.
    pub(super) fn is_held(&self, store: StoreId, partition: i32) -> bool {
        self.stores[store.0].get(&partition).is_some_and(|part| !part.doubtful)
    }

    /// Writes the newest value of a key to `out`; false where there is none.
    ///
    /// # Errors
    /// `retry`: the state is another worker's, or doubtful.
    pub(super) fn read(&self, store: StoreId, partition: i32, key: &[u8], out: &mut Vec<u8>) -> Result<bool, Fault> {
        out.clear();
        let part = self.stores[store.0].get(&partition).filter(|part| !part.doubtful);
        let part = part.ok_or_else(|| elsewhere(partition))?;
        let staged = part.open.get(key).or_else(|| part.sealed.iter().rev().find_map(|(_, writes)| writes.get(key)));
        Ok(match staged {
            Some(Some(value)) => {
                out.extend_from_slice(value);
                true
            }
            Some(None) => false,
            None => part.committed.read(key, out),
        })
    }

    /// The first keys that are there, from one on and below another, in order; so many at most.
    pub(super) fn keys(&self, store: StoreId, partition: i32, from: &[u8], below: &[u8], most: usize) -> Vec<Vec<u8>> {
        let part = self.stores[store.0].get(&partition).filter(|_| from < below);
        let Some(part) = part else { return Vec::new() };
        let layers = part.sealed.iter().map(|(_, writes)| writes).chain([&part.open]);
        let mut layers: Vec<_> = layers.map(|writes| between(writes, from, below).peekable()).collect();
        let mut committed = VecDeque::new();
        let mut next = Some(from.to_vec());
        let mut keys = Vec::new();
        while keys.len() < most {
            if committed.is_empty()
                && let Some(from) = next.take()
            {
                committed.extend(part.committed.keys(&from, below, most - keys.len()));
                // The next key in order is the last one and a byte more.
                next = committed.back().map(|last: &Vec<u8>| [&last[..], &[0]].concat());
            }
            let staged = layers.iter_mut().filter_map(|layer| layer.peek().map(|(key, _)| *key)).min();
            let Some(key) = staged.into_iter().chain(committed.front()).min().cloned() else { break };
            let mut there = committed.pop_front_if(|committed| *committed == key).is_some();
            for layer in &mut layers {
                if let Some((_, value)) = layer.next_if(|(staged, _)| **staged == key) {
                    there = value.is_some();
                }
            }
            if there {
                keys.push(key);
            }
        }
        keys
    }

    /// Writes into the open batch; none removes the key. The partition is held.
    pub(super) fn write(&mut self, store: StoreId, partition: i32, key: &[u8], value: Option<&[u8]>) {
        let Some(part) = self.stores[store.0].get_mut(&partition) else { return };
        let before = part.open.insert(key.to_vec(), value.map(<[u8]>::to_vec));
        self.written.push(Written { store, partition, key: key.to_vec(), before });
    }

    /// The record went through.
    pub(super) fn keep(&mut self) {
        self.written.clear();
    }

    /// Takes back what the record wrote.
    pub(super) fn withdraw(&mut self) {
        for Written { store, partition, key, before } in self.written.drain(..).rev() {
            let Some(part) = self.stores[store.0].get_mut(&partition) else { continue };
            match before {
                Some(value) => drop(part.open.insert(key, value)),
                None => drop(part.open.remove(&key)),
            }
        }
    }

    /// The open batch ends as this one.
    pub(super) fn sealed(&mut self, batch: BatchId) {
        for part in self.parts().filter(|part| !part.open.is_empty()) {
            part.sealed.push_back((batch, mem::take(&mut part.open)));
        }
    }

    /// A sealed batch is committed.
    pub(super) fn committed(&mut self, batch: BatchId) {
        for part in self.parts() {
            while let Some((_, writes)) = part.sealed.pop_front_if(|(sealed, _)| *sealed <= batch) {
                part.committed.apply(writes, None);
            }
            if let Some((_, bound)) = part.bound.take_if(|(of, _)| *of <= batch) {
                part.committed.apply(Writes::new(), Some(bound));
            }
        }
    }

    /// Drops the open batch and those whose commit nobody knows of: what they wrote to is doubtful.
    pub(super) fn abandon(&mut self) {
        for part in self.parts() {
            part.doubtful |= !part.sealed.is_empty();
            part.sealed.clear();
            part.open.clear();
            part.bound = None;
        }
    }

    /// The end of a partition's changelog, as it was after everything up to this batch had been written: a bound once the batch
    /// is committed. One that waits already comes first.
    pub(super) fn bound(&mut self, store: StoreId, partition: i32, batch: BatchId, end: Position) {
        if let Some(part) = self.stores[store.0].get_mut(&partition).filter(|part| !part.doubtful) {
            part.bound.get_or_insert((batch, end));
        }
    }

    /// What the open batch has changed: store and partition.
    pub(super) fn changed(&self) -> impl Iterator<Item = (StoreId, i32)> {
        let stores = self.stores.iter().enumerate();
        let changed = |(store, parts): (usize, &HashMap<i32, Part>)| {
            let changed = parts.iter().filter(|(_, part)| !part.open.is_empty());
            changed.map(|(partition, _)| (StoreId(store), *partition)).collect::<Vec<_>>()
        };
        stores.flat_map(changed)
    }

    /// What is held: store and partition.
    pub(super) fn held(&self) -> impl Iterator<Item = (StoreId, i32)> {
        let stores = self.stores.iter().enumerate();
        stores.flat_map(|(store, parts)| parts.keys().map(move |partition| (StoreId(store), *partition)))
    }

    fn parts(&mut self) -> impl Iterator<Item = &mut Part> {
        self.stores.iter_mut().flat_map(HashMap::values_mut)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STORE: StoreId = StoreId(0);

    fn get(states: &States, key: &str) -> Option<String> {
        let mut out = Vec::new();
        let found = states.read(STORE, 3, key.as_bytes(), &mut out).expect("the partition is held");
        found.then(|| String::from_utf8(out).unwrap())
    }

    fn put(states: &mut States, key: &str, value: &str) {
        states.write(STORE, 3, key.as_bytes(), Some(value.as_bytes()));
    }

    fn held() -> States {
        let mut states = States::new(1);
        let mut committed = Memory::default();
        committed.restore(b"a", Some(b"0"));
        committed.restore(b"gone", Some(b"0"));
        committed.restore(b"gone", None);
        assert_eq!(committed.len(), 1);
        states.hold(STORE, 3, Box::new(committed));
        states
    }

    #[test]
    fn a_batch_is_read_before_those_under_it_and_true_once_it_is_committed() {
        let mut states = held();
        put(&mut states, "a", "1");
        states.keep();
        states.sealed(BatchId(7));
        put(&mut states, "a", "2");
        put(&mut states, "b", "2");
        states.keep();
        assert_eq!((get(&states, "a"), get(&states, "b")), (Some("2".into()), Some("2".into())));
        states.committed(BatchId(7));
        assert_eq!(get(&states, "a"), Some("2".into()), "a later batch stays above");
        states.abandon();
        assert_eq!((get(&states, "a"), get(&states, "b")), (Some("1".into()), None));
        assert!(states.is_held(STORE, 3), "an open batch was never sent to be committed");
    }

    #[test]
    fn what_was_sealed_and_not_acknowledged_leaves_a_doubt() {
        let mut states = held();
        put(&mut states, "a", "1");
        states.keep();
        states.sealed(BatchId(0));
        states.abandon();
        assert!(!states.is_held(STORE, 3));
        states.hold(STORE, 3, Box::new(Memory::default()));
        assert!(states.is_held(STORE, 3));
        states.release(STORE, 3);
        assert_eq!(states.read(STORE, 3, b"a", &mut Vec::new()), Err(elsewhere(3)));
    }

    #[test]
    fn a_rejected_record_takes_back_all_that_it_wrote() {
        let mut states = held();
        put(&mut states, "b", "kept");
        states.keep();
        for value in ["x", "y"] {
            put(&mut states, "a", value);
            put(&mut states, "b", value);
            put(&mut states, "c", value);
        }
        states.withdraw();
        assert_eq!(
            [get(&states, "a"), get(&states, "b"), get(&states, "c")],
            [Some("0".into()), Some("kept".into()), None]
        );
    }

    proptest! {
        /// Whatever happens in whatever order: what is read is what a plain map of committed and open writes holds.
        #[test]
        fn states_are_what_a_plain_model_says(steps in prop::collection::vec((0..6u8, 0..4u8, any::<u8>()), 1..80)) {
            let mut states = States::new(1);
            states.hold(STORE, 3, Box::new(Memory::default()));
            let mut committed: HashMap<u8, Option<u8>> = HashMap::new();
            let mut batches: VecDeque<(BatchId, HashMap<u8, Option<u8>>)> = VecDeque::new();
            let mut open: HashMap<u8, Option<u8>> = HashMap::new();
            let mut next = 0;
            for (step, key, value) in steps {
                match step {
                    0 | 1 => {
                        // Some values stand for a removal.
                        let value = (value % 5 != 0).then_some(value);
                        states.write(STORE, 3, &[key], value.as_ref().map(std::slice::from_ref));
                        states.keep();
                        open.insert(key, value);
                    }
                    2 => {
                        states.write(STORE, 3, &[key], Some(&[value]));
                        states.write(STORE, 3, &[key], None);
                        states.withdraw();
                    }
                    3 => {
                        states.sealed(BatchId(next));
                        batches.push_back((BatchId(next), mem::take(&mut open)));
                        next += 1;
                    }
                    4 => {
                        if let Some((batch, writes)) = batches.pop_front() {
                            states.committed(batch);
                            committed.extend(writes);
                        }
                    }
                    _ => {
                        states.abandon();
                        prop_assert_eq!(states.is_held(STORE, 3), batches.iter().all(|(_, writes)| writes.is_empty()));
                        if !states.is_held(STORE, 3) {
                            // As a restore does.
                            let mut restored = Memory::default();
                            for (key, value) in &committed {
                                restored.restore(&[*key], value.as_ref().map(std::slice::from_ref));
                            }
                            states.hold(STORE, 3, Box::new(restored));
                        }
                        batches.clear();
                        open.clear();
                    }
                }
                let mut there = Vec::new();
                for key in 0..4 {
                    let sealed = batches.iter().map(|(_, writes)| writes);
                    let layers = std::iter::once(&committed).chain(sealed).chain([&open]);
                    let newest = layers.rev().find_map(|layer| layer.get(&key)).copied().flatten();
                    let mut out = Vec::new();
                    let found = states.read(STORE, 3, &[key], &mut out).unwrap();
                    prop_assert_eq!(found.then_some(out), newest.map(|value| vec![value]));
                    there.extend(newest.filter(|_| (1..3).contains(&key)).map(|_| vec![key]));
                }
                prop_assert_eq!(states.keys(STORE, 3, &[1], &[3], 1), &there[..there.len().min(1)]);
                prop_assert_eq!(states.keys(STORE, 3, &[1], &[3], 9), there);
                prop_assert_eq!(states.keys(STORE, 3, &[3], &[1], 9), Vec::<Vec<u8>>::new());
            }
        }
    }
}
