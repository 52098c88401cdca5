//! What came out of a run against what came out of the crash-free one, and what the guarantee says of the difference.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use serde::Serialize;

use super::effects::multiple;
use crate::topology::plan::EdgeGuarantee;

const EXAMPLES: usize = 3;

/// What a guarantee lets a crash do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Promise {
    pub may_lose: bool,
    pub may_double: bool,
}

impl Promise {
    pub fn of(guarantee: EdgeGuarantee) -> Promise {
        match guarantee {
            EdgeGuarantee::ExactlyOnce | EdgeGuarantee::EffectivelyOnce => Promise::default(),
            EdgeGuarantee::AtLeastOnce => Promise { may_double: true, may_lose: false },
            EdgeGuarantee::AtMostOnce => Promise { may_double: false, may_lose: true },
        }
    }

    /// What is left of two promises in a row.
    pub fn and(self, other: Promise) -> Promise {
        Promise { may_lose: self.may_lose || other.may_lose, may_double: self.may_double || other.may_double }
    }
}

/// How many effects one crash may lose or double at most, where that may be at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Bound {
    pub lost: u64,
    pub doubled: u64,
}

/// A record of a topic as it is compared.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Seen {
    /// What is the same on every attempt: key, value, headers but the derived id.
    pub content: String,
    /// Within one line the order counts: the source partition and the output's key.
    pub line: String,
    pub event_id: Option<String>,
    /// Which record of the input it was made of.
    pub source: Option<String>,
    /// Who rejected it, of a dead letter.
    pub node: Option<String>,
}

impl Seen {
    /// The event that it is of: what a replay must not change.
    pub fn identity(&self) -> &str {
        self.event_id.as_deref().unwrap_or(&self.content)
    }
}

/// What was found at one end of the topology.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Of the crash-free run.
    pub expected: u64,
    pub found: u64,
    pub lost: u64,
    pub doubled: u64,
    /// Rows with other content than they should have.
    pub different: u64,
    /// Lines whose order is another.
    pub disordered: u64,
    /// The first few findings in words.
    pub examples: Vec<String>,
}

impl Tally {
    pub fn is_right(&self) -> bool {
        (self.lost, self.doubled, self.different, self.disordered) == (0, 0, 0, 0)
    }

    /// Whether the promise was broken: what may be lost or doubled may also be different, each record's effect once, and
    /// order is never given up.
    pub fn breaks(&self, promise: Promise, bound: Bound) -> bool {
        let lost = if promise.may_lose { bound.lost } else { 0 };
        let doubled = if promise.may_double { bound.doubled } else { 0 };
        self.lost > lost
            || self.doubled > doubled
            || self.different > lost.saturating_add(doubled)
            || self.disordered > 0
    }

    /// Both together, of two parts of one end.
    pub fn and(mut self, other: Tally) -> Tally {
        self.expected += other.expected;
        self.found += other.found;
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.different += other.different;
        self.disordered += other.disordered;
        for example in other.examples {
            self.example(|| example);
        }
        self
    }

    fn example(&mut self, text: impl FnOnce() -> String) {
        if self.examples.len() < EXAMPLES {
            self.examples.push(text());
        }
    }

    fn counted(expected: usize, found: usize) -> Tally {
        Tally { expected: expected as u64, found: found as u64, ..Tally::default() }
    }

    fn multiset<'a>(&mut self, expected: impl Iterator<Item = &'a str>, found: impl Iterator<Item = &'a str>) {
        let mut balance: BTreeMap<&str, i64> = BTreeMap::new();
        expected.for_each(|content| *balance.entry(content).or_default() -= 1);
        found.for_each(|content| *balance.entry(content).or_default() += 1);
        for (content, balance) in balance {
            if balance < 0 {
                self.lost += balance.unsigned_abs();
                self.example(|| format!("lost: {}", shortened(content)));
            } else if balance > 0 {
                self.doubled += balance as u64;
                self.example(|| format!("once too often: {}", shortened(content)));
            }
        }
    }
}

/// Records of a topic: as a multiset, and in the order of each line.
pub fn records(expected: &[Seen], found: &[Seen]) -> Tally {
    let mut tally = Tally::counted(expected.len(), found.len());
    tally.multiset(expected.iter().map(|r| r.content.as_str()), found.iter().map(|r| r.content.as_str()));
    let (must, is) = (lines(expected), lines(found));
    for (line, is) in is {
        // What is lost or doubled is counted already: the order is that of what came first.
        let must = must.get(line).map(|m| firsts(m)).unwrap_or_default();
        let place: HashMap<&str, usize> = must.iter().enumerate().map(|(place, content)| (*content, place)).collect();
        if !firsts(&is).iter().filter_map(|content| place.get(content)).is_sorted() {
            tally.disordered += 1;
            tally.example(|| format!("out of order: {line}"));
        }
    }
    tally
}

/// What a second pass put out: `found` without what the first one did, which lies before it.
pub fn second(first: &[Seen], found: &[Seen]) -> Vec<Seen> {
    let mut left: HashMap<&Seen, usize> = HashMap::new();
    first.iter().for_each(|seen| *left.entry(seen).or_default() += 1);
    let mut second = Vec::new();
    for seen in found {
        match left.get_mut(seen) {
            Some(left) if *left > 0 => *left -= 1,
            _ => second.push(seen.clone()),
        }
    }
    second
}

/// The records of a pass against those of another one without a crash: the same, of the same events.
pub fn again(first: &[Seen], second: &[Seen]) -> Tally {
    let tally = records(first, second);
    if !tally.is_right() {
        return tally;
    }
    sets(first.iter().map(Seen::identity), second.iter().map(Seen::identity))
}

/// The most outputs that one record of the input has.
pub fn fan_out(records: &[Seen]) -> u64 {
    let mut outputs: HashMap<&str, u64> = HashMap::new();
    for source in records.iter().filter_map(|seen| seen.source.as_deref()) {
        *outputs.entry(source).or_default() += 1;
    }
    outputs.into_values().max().unwrap_or(1)
}

fn lines(records: &[Seen]) -> BTreeMap<&str, Vec<&str>> {
    let mut lines: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for record in records {
        lines.entry(&record.line).or_default().push(&record.content);
    }
    lines
}

fn firsts<'a>(contents: &[&'a str]) -> Vec<&'a str> {
    let mut seen = std::collections::HashSet::new();
    contents.iter().copied().filter(|content| seen.insert(*content)).collect()
}

/// Rows by key: the last value of each.
pub fn rows<K: Hash + Eq + Ord + std::fmt::Debug>(expected: &HashMap<K, String>, found: &HashMap<K, String>) -> Tally {
    let mut tally = Tally::counted(expected.len(), found.len());
    let mut keys: Vec<&K> = expected.keys().chain(found.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    for key in keys {
        match (expected.get(key), found.get(key)) {
            (Some(must), Some(is)) if must == is => {}
            (Some(must), Some(is)) => {
                tally.different += 1;
                tally.example(|| format!("row is {} instead of {}", shortened(is), shortened(must)));
            }
            (Some(must), None) => {
                tally.lost += 1;
                tally.example(|| format!("lost: row {}", shortened(must)));
            }
            (None, found) => {
                tally.doubled += 1;
                tally.example(|| format!("a row that nothing asks for: {}", shortened(found.map_or("", |f| f))));
            }
        }
    }
    tally
}

/// Rows of a table without a key.
pub fn rows_by_content(expected: &[String], found: &[String]) -> Tally {
    let mut tally = Tally::counted(expected.len(), found.len());
    tally.multiset(expected.iter().map(String::as_str), found.iter().map(String::as_str));
    tally
}

/// Rows of sums to which everything was added so many times.
pub fn sums(expected: &HashMap<String, String>, found: &HashMap<String, String>, key: &[String], times: u64) -> Tally {
    let mut tally = Tally::counted(expected.len(), found.len());
    let mut keys: Vec<&String> = expected.keys().chain(found.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    for (must, is) in keys.into_iter().map(|key| (expected.get(key), found.get(key))) {
        let (Some(must), Some(is)) = (must, is) else {
            let (lost, row) = (is.is_none(), must.or(is).map_or("", String::as_str));
            tally.lost += u64::from(lost);
            tally.doubled += u64::from(!lost);
            let what = if lost { "lost: row" } else { "a row that nothing asks for:" };
            tally.example(|| format!("{what} {}", shortened(row)));
            continue;
        };
        // What sums up to nothing stays, however often it is added.
        let still = || must == is && multiple(must, must, key).is_none();
        if !multiple(must, is, key).map_or_else(still, |added| added as u64 == times) {
            tally.different += 1;
            tally.example(|| format!("row is {} and not {times} times {}", shortened(is), shortened(must)));
        }
    }
    tally
}

/// Things of which only the number can be the same.
pub fn counts(expected: usize, found: usize) -> Tally {
    let mut tally = Tally::counted(expected, found);
    tally.lost = expected.saturating_sub(found) as u64;
    tally.doubled = found.saturating_sub(expected) as u64;
    tally
}

/// Things that are the same, however often each is there.
pub fn sets<'a>(expected: impl Iterator<Item = &'a str>, found: impl Iterator<Item = &'a str>) -> Tally {
    let (must, is): (std::collections::BTreeSet<_>, std::collections::BTreeSet<_>) =
        (expected.collect(), found.collect());
    let mut tally = Tally::counted(must.len(), is.len());
    tally.multiset(must.into_iter(), is.into_iter());
    tally
}

fn shortened(text: &str) -> String {
    const MOST: usize = 160;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(line: &str, content: &str) -> Seen {
        Seen { content: content.into(), line: line.into(), event_id: None, source: None, node: None }
    }

    fn all(contents: &str) -> Vec<Seen> {
        contents.split_whitespace().map(|content| seen("l", content)).collect()
    }

    const ONCE: Promise = Promise { may_lose: false, may_double: false };
    const LEAST: Promise = Promise { may_lose: false, may_double: true };
    const MOST: Promise = Promise { may_lose: true, may_double: false };
    const WIDE: Bound = Bound { lost: 9, doubled: 9 };

    #[test]
    fn a_guarantee_is_broken_by_what_it_excludes_and_by_nothing_else() {
        let outcomes = [("a b c", 0, 0), ("a b c b", 0, 1), ("a c", 1, 0), ("a c c", 1, 1)];
        let broken: Vec<_> = outcomes
            .iter()
            .map(|(found, lost, doubled)| {
                let tally = records(&all("a b c"), &all(found));
                assert_eq!((tally.lost, tally.doubled, tally.disordered), (*lost, *doubled, 0), "{found}");
                [ONCE, LEAST, MOST].map(|promise| tally.breaks(promise, WIDE))
            })
            .collect();
        let (yes, no) = (true, false);
        assert_eq!(broken, [[no, no, no], [yes, no, yes], [yes, yes, no], [yes, yes, yes]]);
    }

    #[test]
    fn no_crash_may_lose_or_double_more_than_was_open() {
        let bound = Bound { lost: 2, doubled: 2 };
        let must = all("a b c d e f");
        let breaks = |found: &str, promise| records(&must, &all(found)).breaks(promise, bound);
        assert!(!breaks("a b e f", MOST));
        assert!(breaks("a b c", MOST), "all after the crash is lost");
        assert!(!breaks("a b c d c d e f", LEAST));
        assert!(breaks("a b c a b c d e f", LEAST), "read from the beginning again");
        let table =
            |value: &str| -> HashMap<&str, String> { ["a", "b", "c"].map(|key| (key, value.to_owned())).into() };
        assert!(rows(&table("2"), &table("1")).breaks(MOST, bound), "three rows have an older value");
    }

    #[test]
    fn a_second_pass_is_what_lies_behind_the_first() {
        let with = |content: &str, id: &str| Seen { event_id: Some(id.into()), ..seen("l", content) };
        let first = [with("a", "1"), with("b", "2"), with("c", "3")];
        let pass = |more: &[Seen]| second(&first, &[&first[..], more].concat());
        assert_eq!(pass(&first), first);
        assert!(again(&first, &pass(&first)).is_right());
        assert_eq!(again(&first, &pass(&[])).lost, 3, "a second pass that puts out nothing");
        assert_eq!(again(&first, &pass(&first[1..])).lost, 1);
        let other = [with("a", "1"), with("b", "9"), with("c", "3")];
        let tally = again(&first, &pass(&other));
        assert_eq!((tally.lost, tally.doubled), (1, 1), "another event");
    }

    #[test]
    fn the_fan_out_is_that_of_the_record_with_the_most_outputs() {
        let of = |source: &str| Seen { source: Some(source.into()), ..seen("l", "a") };
        assert_eq!(fan_out(&[of("t-0:1"), of("t-0:2"), of("t-0:1")]), 2);
        assert_eq!(fan_out(&[]), 1);
    }

    #[test]
    fn sums_are_so_many_times_those_of_one_pass() {
        let table = |rows: &[(&str, i64)]| -> HashMap<String, String> {
            let row = |(key, n): &(&str, i64)| (key.to_string(), serde_json::json!({ "id": key, "n": n }).to_string());
            rows.iter().map(row).collect()
        };
        let once = table(&[("a", 5), ("b", 0), ("c", -2)]);
        let wrong = |found: &[(&str, i64)], times| {
            let tally = sums(&once, &table(found), &["id".to_owned()], times);
            (tally.lost, tally.doubled, tally.different)
        };
        assert_eq!(wrong(&[("a", 5), ("b", 0), ("c", -2)], 1), (0, 0, 0));
        assert_eq!(wrong(&[("a", 10), ("b", 0), ("c", -4)], 2), (0, 0, 0));
        assert_eq!(wrong(&[("a", 5), ("b", 0), ("c", -4)], 2), (0, 0, 1));
        assert_eq!(wrong(&[("a", 10), ("b", 1), ("d", 1)], 2), (1, 1, 1));
    }

    #[test]
    fn order_counts_within_a_line_and_not_between_lines() {
        let must = [seen("1", "a"), seen("1", "b"), seen("2", "c")];
        let mixed = [seen("2", "c"), seen("1", "a"), seen("1", "b")];
        let turned = [seen("1", "b"), seen("1", "a"), seen("2", "c")];
        assert!(records(&must, &mixed).is_right());
        let tally = records(&must, &turned);
        assert_eq!((tally.disordered, tally.lost, tally.doubled), (1, 0, 0));
        assert!(tally.breaks(LEAST, WIDE) && tally.breaks(MOST, WIDE), "{tally:?}");
        // What comes again after a crash is doubled, not disordered.
        let again = [seen("1", "a"), seen("1", "b"), seen("1", "a"), seen("1", "b"), seen("2", "c")];
        let tally = records(&must, &again);
        assert_eq!((tally.disordered, tally.doubled), (0, 2));
        assert!(!tally.breaks(LEAST, WIDE));
    }

    #[test]
    fn rows_are_compared_by_key_or_where_there_is_none_by_content() {
        let table = |rows: &[(&str, &str)]| -> HashMap<String, String> {
            rows.iter().map(|(key, row)| ((*key).to_owned(), (*row).to_owned())).collect()
        };
        let tally = rows(&table(&[("a", "1"), ("b", "2"), ("c", "3")]), &table(&[("a", "1"), ("b", "9"), ("d", "4")]));
        assert_eq!((tally.lost, tally.doubled, tally.different), (1, 1, 1));
        let different = rows(&table(&[("a", "2")]), &table(&[("a", "1")]));
        assert!(different.breaks(ONCE, WIDE) && !different.breaks(MOST, WIDE) && !different.breaks(LEAST, WIDE));
        let heap = |rows: &[&str]| rows.iter().map(|row| (*row).to_owned()).collect::<Vec<_>>();
        let tally = rows_by_content(&heap(&["1", "2", "2"]), &heap(&["1", "1", "2", "2"]));
        assert_eq!((tally.lost, tally.doubled), (0, 1));
    }

    #[test]
    fn promises_in_a_row_give_up_what_either_gives_up() {
        assert_eq!(LEAST.and(MOST), Promise { may_lose: true, may_double: true });
        assert_eq!(ONCE.and(MOST), MOST);
        assert_eq!(Promise::of(EdgeGuarantee::EffectivelyOnce), ONCE);
    }
}
