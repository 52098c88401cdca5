//! What one record should have become, against what is there.

use sha2::{Digest, Sha256};

use crate::ids;
use crate::operator::ORIGIN;

/// Stands for topic, partition, key, value and headers of an output, but for the record that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Print {
    pub whole: [u8; 16],
    /// Without the event id: a replay brings the id of its dead letter along, which the record may not have had.
    pub bare: [u8; 16],
}

/// An output that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Index of its topic.
    pub topic: usize,
    pub print: Print,
    pub partition: i32,
    pub offset: i64,
}

/// An output that the operators make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    pub topic: usize,
    pub partition: i32,
    pub print: Print,
}

/// What is known of a record besides its outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Letters {
    /// Its dead letters.
    pub written: u32,
    /// How many of them were replayed.
    pub replayed: u32,
    /// By the last of its dead letters: how often it was rejected.
    pub rejected: u32,
    /// By the last of its replays that is behind the committed positions: how often it was rejected before that.
    pub retried: u32,
}

impl Letters {
    /// Whether a dead letter is the last that became of it. A replay that is not read yet changes nothing.
    pub fn account(&self) -> bool {
        self.rejected > self.retried
    }
}

/// What is wrong with an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// It is not there.
    Lost,
    /// It is there once more than it should be.
    Doubled,
    /// It is not what the record makes.
    Different,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Lost => "lost",
            Kind::Doubled => "doubled",
            Kind::Different => "different",
        }
    }
}

/// Something wrong: with an output of a topic, where it lies if it is there; without a topic, with the record as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong {
    pub kind: Kind,
    pub topic: Option<usize>,
    /// Partition, and the offset of what is there.
    pub place: Option<(i32, Option<i64>)>,
    /// Of an output that is not there.
    pub print: Option<Print>,
}

impl Wrong {
    /// With the record as a whole.
    fn record(kind: Kind) -> Wrong {
        Wrong { kind, topic: None, place: None, print: None }
    }
}

/// Compares the outputs of one record. `None` of `expected`: the record is rejected by what the file says now.
pub fn compare(expected: Option<&[Expected]>, found: &[Found], letters: Letters) -> Vec<Wrong> {
    let mut wrong = Vec::new();
    if letters.written > letters.replayed + 1 {
        wrong.push(Wrong::record(Kind::Doubled));
    }
    let wanted = expected.unwrap_or_default();
    if letters.written > letters.replayed && !found.is_empty() {
        // Put out and rejected: the outputs should have been withdrawn.
        wrong.extend(found.iter().map(|f| at(Kind::Doubled, f)));
        return wrong;
    }
    if found.is_empty() && (letters.account() || (expected.is_some() && wanted.is_empty())) {
        return wrong;
    }
    if found.is_empty() && expected.is_none() {
        wrong.push(Wrong::record(Kind::Lost));
        return wrong;
    }
    let is = |a: &Print, b: &Print| if letters.replayed > 0 { a.bare == b.bare } else { a == b };
    let mut left = found.to_vec();
    let mut missing: Vec<&Expected> = Vec::new();
    for output in wanted {
        match left.iter().position(|f| is(&f.print, &output.print)) {
            Some(index) => drop(left.remove(index)),
            None => missing.push(output),
        }
    }
    for found in &left {
        if wanted.iter().any(|e| is(&e.print, &found.print)) {
            wrong.push(at(Kind::Doubled, found));
            continue;
        }
        if let Some(index) = missing.iter().position(|e| e.topic == found.topic) {
            missing.remove(index);
        }
        wrong.push(at(Kind::Different, found));
    }
    let lost = |e: &&Expected| Wrong {
        kind: Kind::Lost,
        topic: Some(e.topic),
        place: Some((e.partition, None)),
        print: Some(e.print),
    };
    wrong.extend(missing.iter().map(lost));
    wrong
}

fn at(kind: Kind, found: &Found) -> Wrong {
    Wrong { kind, topic: Some(found.topic), place: Some((found.partition, Some(found.offset))), print: None }
}

/// The print of an output.
pub fn print<'a>(
    topic: usize,
    partition: i32,
    key: Option<&[u8]>,
    value: Option<&[u8]>,
    headers: impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)>,
) -> Print {
    let mut hash = Sha256::new();
    hash.update((topic as u64).to_be_bytes());
    hash.update(partition.to_be_bytes());
    let part = |hash: &mut Sha256, bytes: Option<&[u8]>| {
        // Null is no length.
        hash.update(bytes.map_or(u64::MAX, |bytes| bytes.len() as u64).to_be_bytes());
        hash.update(bytes.unwrap_or_default());
    };
    part(&mut hash, key);
    part(&mut hash, value);
    let mut id = None;
    for (name, value) in headers {
        if name == ids::HEADER.as_bytes() {
            id = Some(value);
        } else if name != ORIGIN.as_bytes() {
            part(&mut hash, Some(name));
            part(&mut hash, value);
        }
    }
    let finished = |hash: Sha256| {
        let mut print = [0; 16];
        print.copy_from_slice(&hash.finalize()[..16]);
        print
    };
    let bare = finished(hash.clone());
    if let Some(id) = id {
        part(&mut hash, id);
    }
    Print { whole: finished(hash), bare }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print_of(byte: u8) -> Print {
        Print { whole: [byte; 16], bare: [byte; 16] }
    }

    fn judged(wanted: Option<&[u8]>, there: &[u8], letters: Letters) -> Vec<(Kind, Option<i64>)> {
        let expected = |print: &u8| Expected { topic: 0, partition: 1, print: print_of(*print) };
        let wanted: Option<Vec<Expected>> = wanted.map(|prints| prints.iter().map(expected).collect());
        let found = |(i, p): (usize, &u8)| Found { topic: 0, print: print_of(*p), partition: 1, offset: i as i64 };
        let there: Vec<Found> = there.iter().enumerate().map(found).collect();
        let wrong = compare(wanted.as_deref(), &there, letters);
        wrong.into_iter().map(|w| (w.kind, w.place.and_then(|(_, offset)| offset))).collect()
    }

    /// Every dead letter is there, and every replay was read.
    fn verdict(wanted: Option<&[u8]>, there: &[u8], written: u32, replayed: u32) -> Vec<(Kind, Option<i64>)> {
        judged(wanted, there, Letters { written, replayed, rejected: written, retried: replayed })
    }

    #[test]
    fn each_output_is_there_once() {
        use Kind::*;
        assert_eq!(verdict(Some(&[1, 2]), &[2, 1], 0, 0), []);
        assert_eq!(verdict(Some(&[]), &[], 0, 0), []);
        assert_eq!(verdict(Some(&[1, 1]), &[1, 1], 0, 0), [], "two outputs may be alike");
        assert_eq!(verdict(Some(&[1, 2]), &[1], 0, 0), [(Lost, None)]);
        assert_eq!(verdict(Some(&[1]), &[1, 1], 0, 0), [(Doubled, Some(1))]);
        assert_eq!(verdict(Some(&[1]), &[3], 0, 0), [(Different, Some(0))]);
        assert_eq!(verdict(Some(&[1, 2]), &[3], 0, 0), [(Different, Some(0)), (Lost, None)]);
        assert_eq!(verdict(Some(&[]), &[3], 0, 0), [(Different, Some(0))]);
    }

    #[test]
    fn a_dead_letter_accounts_for_a_record_that_has_no_outputs() {
        use Kind::*;
        assert_eq!(verdict(None, &[], 1, 0), []);
        assert_eq!(verdict(Some(&[1]), &[], 1, 0), [], "the file was mended since");
        assert_eq!(verdict(None, &[], 0, 0), [(Lost, None)]);
        assert_eq!(verdict(Some(&[1]), &[1], 1, 0), [(Doubled, Some(0))], "put out and rejected");
        assert_eq!(verdict(Some(&[1]), &[1], 1, 1), [], "replayed");
        assert_eq!(verdict(None, &[], 2, 1), [], "replayed, and rejected again");
        assert_eq!(verdict(None, &[], 2, 0), [(Doubled, None)]);
    }

    #[test]
    fn a_dead_letter_accounts_for_nothing_once_its_replay_was_read() {
        use Kind::*;
        assert_eq!(verdict(Some(&[1]), &[], 1, 1), [(Lost, None)], "replayed, read, and nothing put out");
        assert_eq!(verdict(None, &[], 1, 1), [(Lost, None)], "nor rejected again");
        let waiting = Letters { written: 1, replayed: 1, rejected: 1, retried: 0 };
        assert_eq!(judged(Some(&[1]), &[], waiting), [], "replayed, and not read yet");
        assert_eq!(judged(None, &[], waiting), []);
        assert_eq!(judged(Some(&[1]), &[1], waiting), [], "read since");
        let expired = Letters { written: 1, replayed: 1, rejected: 2, retried: 1 };
        assert_eq!(judged(None, &[], expired), [], "rejected again, and the first dead letter is deleted");
        let all = Letters { written: 0, replayed: 1, rejected: 0, retried: 1 };
        assert_eq!(judged(Some(&[1]), &[], all), [(Lost, None)], "the dead letter is deleted, the replay was read");
    }

    #[test]
    fn a_replay_may_bring_an_event_id_along() {
        let with = |id: u8| Print { whole: [id; 16], bare: [0; 16] };
        let wanted = [Expected { topic: 0, partition: 1, print: with(1) }];
        let found = [Found { topic: 0, partition: 1, print: with(2), offset: 0 }];
        let replayed = Letters { written: 1, replayed: 1, rejected: 1, retried: 1 };
        assert_eq!(compare(Some(&wanted), &found, replayed), []);
        assert_eq!(compare(Some(&wanted), &found, Letters::default())[0].kind, Kind::Different);
    }

    #[test]
    fn what_is_not_the_same_has_another_print() {
        let none = || std::iter::empty();
        let base = print(0, 0, None, None, none());
        assert_ne!(base, print(0, 0, Some(b""), None, none()));
        assert_ne!(base, print(0, 0, None, Some(b""), none()));
        assert_ne!(base, print(0, 1, None, None, none()));
        assert_ne!(base, print(1, 0, None, None, none()));
        let with = |name: &'static str, value: Option<&'static [u8]>| {
            print(0, 0, None, None, [(name.as_bytes(), value)].into_iter())
        };
        assert_ne!(base, with("a", None));
        assert_ne!(with("a", None), with("a", Some(b"")));
        assert_eq!(base, with(ORIGIN, Some(b"t/in/0/1")), "which record it names is compared by itself");
        let id = with(ids::HEADER, Some(b"1"));
        assert_ne!(id.whole, base.whole);
        assert_ne!(id.whole, with(ids::HEADER, None).whole);
        assert_eq!(id.bare, base.bare);
    }
}
