//! Outputs that name no record: from before `audit = true`, from a while without it, or written by others.

use std::collections::{BTreeMap, HashMap};

use super::compare::Print;

/// A topic by its index, and a partition of it.
type Place = (usize, i32);

/// The outputs that name no record. Each accounts for one output that no other is: exactly where it has the same
/// content, so that a foreign record excuses nothing; and by its place where a record lies before the first one of its
/// partition that an output names, since another file may have made it then.
#[derive(Debug, Default)]
pub struct Unnamed {
    /// By either print: which ones.
    by_print: HashMap<[u8; 16], Vec<usize>>,
    /// Of each where it lies; none once it accounts for an output.
    places: Vec<Option<Place>>,
    left: BTreeMap<Place, u64>,
    /// How many lay at a place before the first output there that names a record of an input partition.
    before: BTreeMap<(Place, usize), u64>,
    /// Of each input partition the first record that an output names.
    first: BTreeMap<usize, i64>,
    /// Outputs that were taken for their content.
    pub same: u64,
    /// Outputs by input partition that were excused by their place.
    pub excused: BTreeMap<usize, u64>,
}

impl Unnamed {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Of an input partition the first record that an output names.
    pub fn first(&self, input: usize) -> Option<i64> {
        self.first.get(&input).copied()
    }

    /// An output that names no record, in the order of the log.
    pub fn add(&mut self, place: Place, print: &Print) {
        let index = self.places.len();
        self.places.push(Some(place));
        *self.left.entry(place).or_default() += 1;
        self.by_print.entry(print.whole).or_default().push(index);
        if print.bare != print.whole {
            self.by_print.entry(print.bare).or_default().push(index);
        }
    }

    /// An output that names a record, in the order of the log. Not of a replay: these are in no order.
    pub fn named(&mut self, place: Place, input: usize, offset: i64) {
        let lying = self.left.get(&place).copied().unwrap_or(0);
        self.before.entry((place, input)).or_insert(lying);
        let first = self.first.entry(input).or_insert(offset);
        *first = offset.min(*first);
    }

    /// Whether one of them is this output, which is not found otherwise: one of the same content. `replayed`: whatever
    /// its event id.
    pub fn take(&mut self, print: &Print, replayed: bool) -> bool {
        let key = if replayed { print.bare } else { print.whole };
        let Some(indices) = self.by_print.get_mut(&key) else { return false };
        while let Some(index) = indices.pop() {
            if let Some(place) = self.places[index].take() {
                self.spend(place);
                self.same += 1;
                return true;
            }
        }
        false
    }

    /// Whether one of them may be an output that is not there as it is made now; `None`: any output of a record that is
    /// rejected now. Each is one output at most.
    pub fn excuses(&mut self, place: Option<Place>, input: usize, offset: i64) -> bool {
        if self.first(input).is_none_or(|first| offset >= first) {
            return false;
        }
        let lies = |place: &Place| {
            let left = self.left.get(place).copied().unwrap_or(0);
            left > 0 && self.before.get(&(*place, input)).is_none_or(|before| *before > 0)
        };
        let place = match place {
            Some(place) => Some(place).filter(lies),
            None => self.left.keys().copied().find(lies),
        };
        let Some(place) = place else { return false };
        self.spend(place);
        if let Some(before) = self.before.get_mut(&(place, input)) {
            *before -= 1;
        }
        *self.excused.entry(input).or_default() += 1;
        true
    }

    fn spend(&mut self, place: Place) {
        if let Some(left) = self.left.get_mut(&place) {
            *left = left.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = (0, 1);

    fn print(byte: u8) -> Print {
        Print { whole: [byte; 16], bare: [byte | 0x80; 16] }
    }

    #[test]
    fn each_accounts_for_one_output_of_its_content() {
        let mut unnamed = Unnamed::default();
        unnamed.add(PLACE, &print(1));
        unnamed.add(PLACE, &print(1));
        assert!(!unnamed.take(&print(2), false), "a foreign record is nobody's output");
        assert!(unnamed.take(&print(1), false));
        assert!(unnamed.take(&Print { whole: [9; 16], bare: [0x81; 16] }, true), "a replay may have had another id");
        assert!(!unnamed.take(&print(1), false) && !unnamed.take(&print(1), true), "both are taken");
        assert_eq!((unnamed.len(), unnamed.same), (2, 2));
    }

    #[test]
    fn by_its_place_it_excuses_only_what_may_have_lain_there() {
        let mut unnamed = Unnamed::default();
        unnamed.add(PLACE, &print(1));
        unnamed.add(PLACE, &print(2));
        assert!(!unnamed.excuses(Some(PLACE), 0, 0), "no output names a record of that partition");
        unnamed.named(PLACE, 0, 7);
        unnamed.add(PLACE, &print(3));
        assert!(!unnamed.excuses(Some(PLACE), 0, 7), "from the first named record on it must be there");
        assert!(!unnamed.excuses(Some((0, 2)), 0, 6), "there is nothing of it in that partition");
        assert!(unnamed.excuses(Some(PLACE), 0, 3) && unnamed.excuses(None, 0, 4));
        assert!(!unnamed.excuses(Some(PLACE), 0, 5), "the third lies after the output of record 7");
        assert_eq!(unnamed.excused, BTreeMap::from([(0, 2)]));
        let mut one = Unnamed::default();
        one.add(PLACE, &print(1));
        one.named((1, 0), 0, 7);
        assert!(one.take(&print(1), false));
        assert!(!one.excuses(Some(PLACE), 0, 3), "it is another output already");
    }
}
