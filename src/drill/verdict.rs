//! What came out of a run against what came out of the crash-free one, and what the guarantee says of the difference.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use serde::Serialize;

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

/// A record of a topic as it is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// What is the same on every attempt: key, value, headers but the derived id.
    pub content: String,
    /// Within one line the order counts: the source partition and the output's key.
    pub line: String,
    pub event_id: Option<String>,
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

    /// Whether the promise was broken: what may be lost may also be different, and order is never given up.
    pub fn breaks(&self, promise: Promise) -> bool {
        (self.lost > 0 && !promise.may_lose)
            || (self.doubled > 0 && !promise.may_double)
            || (self.different > 0 && promise == Promise::default())
            || self.disordered > 0
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
        Seen { content: content.into(), line: line.into(), event_id: None, node: None }
    }

    fn all(contents: &str) -> Vec<Seen> {
        contents.split_whitespace().map(|content| seen("l", content)).collect()
    }

    const ONCE: Promise = Promise { may_lose: false, may_double: false };
    const LEAST: Promise = Promise { may_lose: false, may_double: true };
    const MOST: Promise = Promise { may_lose: true, may_double: false };

    #[test]
    fn a_guarantee_is_broken_by_what_it_excludes_and_by_nothing_else() {
        let outcomes = [("a b c", 0, 0), ("a b c b", 0, 1), ("a c", 1, 0), ("a c c", 1, 1)];
        let broken: Vec<_> = outcomes
            .iter()
            .map(|(found, lost, doubled)| {
                let tally = records(&all("a b c"), &all(found));
                assert_eq!((tally.lost, tally.doubled, tally.disordered), (*lost, *doubled, 0), "{found}");
                [ONCE, LEAST, MOST].map(|promise| tally.breaks(promise))
            })
            .collect();
        let (yes, no) = (true, false);
        assert_eq!(broken, [[no, no, no], [yes, no, yes], [yes, yes, no], [yes, yes, yes]]);
    }

    #[test]
    fn order_counts_within_a_line_and_not_between_lines() {
        let must = [seen("1", "a"), seen("1", "b"), seen("2", "c")];
        let mixed = [seen("2", "c"), seen("1", "a"), seen("1", "b")];
        let turned = [seen("1", "b"), seen("1", "a"), seen("2", "c")];
        assert!(records(&must, &mixed).is_right());
        let tally = records(&must, &turned);
        assert_eq!((tally.disordered, tally.lost, tally.doubled), (1, 0, 0));
        assert!(tally.breaks(LEAST) && tally.breaks(MOST), "{tally:?}");
        // What comes again after a crash is doubled, not disordered.
        let again = [seen("1", "a"), seen("1", "b"), seen("1", "a"), seen("1", "b"), seen("2", "c")];
        let tally = records(&must, &again);
        assert_eq!((tally.disordered, tally.doubled), (0, 2));
        assert!(!tally.breaks(LEAST));
    }

    #[test]
    fn rows_are_compared_by_key_or_where_there_is_none_by_content() {
        let table = |rows: &[(&str, &str)]| -> HashMap<String, String> {
            rows.iter().map(|(key, row)| ((*key).to_owned(), (*row).to_owned())).collect()
        };
        let tally = rows(&table(&[("a", "1"), ("b", "2"), ("c", "3")]), &table(&[("a", "1"), ("b", "9"), ("d", "4")]));
        assert_eq!((tally.lost, tally.doubled, tally.different), (1, 1, 1));
        let different = rows(&table(&[("a", "2")]), &table(&[("a", "1")]));
        assert!(different.breaks(ONCE) && !different.breaks(MOST) && !different.breaks(LEAST));
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
