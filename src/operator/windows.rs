//! Windows of one length that begin at fixed distances: tumbling and hopping ones.
//!
//! A key begins with its window's start, so that windows come in their order. Under one more key stands where open windows
//! begin, which changes once a window and not with every record.

use crate::expr::{Fault, Runtime};
use crate::ids::{EventId, Identity};
use crate::record::Offset;
use crate::topology::spec::Window;

use super::aggregate::{Aggregate, Folded, Folding, Place};
use super::fold::Cell;

/// Of a key in a window: the window's start, then the group.
const WINDOWED: u8 = 2;
/// Of the one key that tells of time.
pub(super) const CLOCK: [u8; 1] = [3];

/// What is put out of a window that closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Final {
    pub(super) group: String,
    pub(super) json: Vec<u8>,
    pub(super) id: EventId,
    /// The last millisecond that is in the window.
    pub(super) last_ms: i64,
}

impl Aggregate {
    /// Folds a record into each window that its time is in and that is open.
    #[allow(clippy::too_many_arguments)] // What a window is, and what every fold needs.
    pub(super) fn fold_aligned(
        &mut self,
        size: i64,
        advance: i64,
        window: Window,
        time: i64,
        folding: &Folding<'_>,
        runtime: &mut Runtime,
        place: &mut Place<'_>,
    ) -> Result<Folded, Fault> {
        let open = self.open(place)?;
        let last = floor(time, advance);
        if last < open {
            return Ok(Folded::Late);
        }
        let since = self.aligned_time();
        if !self.evaluate(folding, runtime)? {
            return Ok(Folded::Dropped);
        }
        // As in Kafka Streams, no window begins before 1970.
        let first = (floor(time - size, advance) + advance).max(open).max(0);
        let mut folded: Vec<(i64, u64, Vec<Cell>)> = Vec::new();
        for start in (first..=last).step_by(advance as usize) {
            let (revision, mut cells) = self.read(place, &windowed(start, folding.group))?;
            if !self.apply(&mut cells, folding, runtime, 0)? {
                return Ok(Folded::Dropped);
            }
            folded.push((start, revision + 1, cells));
        }
        // A record that is dropped moves no time. Windows before `from` ended longer ago than the grace.
        let from = floor(time - size - window.grace_ms, advance) + advance;
        if from > open {
            self.set_open(from, time, true, place);
            self.closing.entry(place.partition).or_insert((ordered(WINDOWED, open).to_vec(), folding.input.offset));
        } else if window.idle_ms.is_some() && since < Some(time) {
            self.set_open(open, time, false, place);
        }
        for (start, revision, cells) in folded {
            let key = windowed(start, folding.group);
            self.write(revision, &cells, &key, place)?;
            if !self.waits() {
                let id = EventId::of_state(&self.name, &key, revision, folding.cause, folding.time_ms);
                self.show(folding.group, Some((start, start + size)), &cells, id);
            }
        }
        Ok(Folded::Applied)
    }

    /// Where the windows begin that are open.
    fn open(&mut self, place: &Place<'_>) -> Result<i64, Fault> {
        if !self.get(place, &CLOCK)? {
            return Ok(i64::MIN);
        }
        let open = self.state.strip_prefix(&self.stamp).and_then(|bytes| bytes.first_chunk());
        Ok(i64::from_be_bytes(*open.expect("what is restored has the stamp of this window")))
    }

    /// The greatest time of a record, of the clock that was read last; it is kept where it goes on without records.
    fn aligned_time(&self) -> Option<i64> {
        let bytes = self.state.strip_prefix(&self.stamp)?.get(8..)?;
        bytes.try_into().ok().map(i64::from_be_bytes)
    }

    /// Writes where open windows begin, to the changelog now or when the batch ends.
    fn set_open(&mut self, open: i64, time: i64, now: bool, place: &mut Place<'_>) {
        let time = self.spec.window.and_then(|window| window.idle_ms).map(|_| time.to_be_bytes());
        let value = [&self.stamp[..], &open.to_be_bytes(), time.as_ref().map_or(&[], |time| &time[..])].concat();
        if now {
            self.put(place, &CLOCK, Some(&value));
        } else {
            place.states.write(self.store, place.partition, &CLOCK, Some(&value));
            self.moved.insert(place.partition);
        }
    }

    /// As [`Aggregate::time`].
    pub(super) fn time_aligned(&mut self, place: &Place<'_>) -> Result<Option<i64>, Fault> {
        let open = self.open(place)?;
        // Where no time was kept, it is no earlier than where open windows begin.
        Ok(self.aligned_time().or_else(|| (open > i64::MIN).then_some(open)))
    }

    /// As [`Aggregate::advance`].
    pub(super) fn advance_aligned(
        &mut self,
        (size, advance): (i64, i64),
        window: Window,
        time: i64,
        offset: Offset,
        place: &mut Place<'_>,
    ) -> Result<bool, Fault> {
        let open = self.open(place)?;
        let since = self.aligned_time().unwrap_or(open);
        let from = floor(time - size - window.grace_ms, advance) + advance;
        let (begin, below) = (ordered(WINDOWED, open), ordered(WINDOWED, from));
        if place.states.keys(self.store, place.partition, &begin, &below, 1).is_empty() {
            return Ok(false);
        }
        self.set_open(from, since, true, place);
        self.closing.entry(place.partition).or_insert((begin.to_vec(), offset));
        Ok(true)
    }

    /// Removes the next windows that have closed, so many at most, and answers what is put out of them: in the order of
    /// their ends, then of their keys. The second says where to go on, if there may be more.
    pub(super) fn close_aligned(
        &mut self,
        size: i64,
        from: &[u8],
        most: usize,
        place: &mut Place<'_>,
    ) -> Result<(Vec<Final>, Option<Vec<u8>>), Fault> {
        let open = self.open(place)?;
        let below = ordered(WINDOWED, open);
        let keys = place.states.keys(self.store, place.partition, from, &below, most);
        let rest = keys.last().filter(|_| keys.len() == most).cloned();
        let mut finals = Vec::new();
        for key in keys {
            if self.waits() {
                let (revision, cells) = self.read(place, &key)?;
                let (start, group) = untimed(&key);
                let (group, last_ms) = (group.to_owned(), start + size - 1);
                let id = EventId::of_state(&self.name, &key, revision, Identity::Unknown, Some(last_ms));
                finals.push(self.last_of(group, (start, start + size), &cells, id, last_ms));
            }
            self.put(place, &key, None);
        }
        Ok((finals, rest))
    }
}

/// The greatest multiple of a step that is not above a time.
fn floor(time: i64, step: i64) -> i64 {
    time - time.rem_euclid(step)
}

fn windowed(start: i64, group: &str) -> Vec<u8> {
    timed(WINDOWED, start, group)
}

/// A key that begins with a time. The sign is turned, so that bytes have the order of times.
pub(super) fn ordered(tag: u8, time: i64) -> [u8; 9] {
    let mut key = [tag; 9];
    key[1..].copy_from_slice(&(time as u64 ^ (1 << 63)).to_be_bytes());
    key
}

/// [`ordered`], then a group.
pub(super) fn timed(tag: u8, time: i64, group: &str) -> Vec<u8> {
    [&ordered(tag, time)[..], group.as_bytes()].concat()
}

/// Time and group of a key that [`timed`] made.
pub(super) fn untimed(key: &[u8]) -> (i64, &str) {
    let time = key.get(1..9).and_then(|bytes| bytes.try_into().ok()).map(|bytes| u64::from_be_bytes(bytes) ^ (1 << 63));
    let group = key.get(9..).and_then(|bytes| std::str::from_utf8(bytes).ok());
    (time.expect("a key with a time") as i64, group.expect("groups are UTF-8"))
}
