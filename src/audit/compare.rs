//! What one record should have become, against what is there.

use sha2::{Digest, Sha256};

/// Stands for topic, partition, key, value and headers of an output.
pub type Print = [u8; 16];

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
}

/// Compares the outputs of one record. `None` of `expected`: the record is rejected by what the file says now.
pub fn compare(expected: Option<&[Expected]>, found: &[Found], letters: Letters) -> Vec<Wrong> {
    let mut wrong = Vec::new();
    if letters.written > letters.replayed + 1 {
        wrong.push(Wrong { kind: Kind::Doubled, topic: None, place: None });
    }
    let wanted = expected.unwrap_or_default();
    if letters.written > letters.replayed && !found.is_empty() {
        // Put out and rejected: the outputs should have been withdrawn.
        wrong.extend(found.iter().map(|f| at(Kind::Doubled, f)));
        return wrong;
    }
    if found.is_empty() && (letters.written > 0 || (expected.is_some() && wanted.is_empty())) {
        return wrong;
    }
    if found.is_empty() && expected.is_none() {
        wrong.push(Wrong { kind: Kind::Lost, topic: None, place: None });
        return wrong;
    }
    let mut left = found.to_vec();
    let mut missing: Vec<&Expected> = Vec::new();
    for output in wanted {
        match left.iter().position(|f| f.print == output.print) {
            Some(index) => drop(left.remove(index)),
            None => missing.push(output),
        }
    }
    for found in &left {
        if wanted.iter().any(|e| e.print == found.print) {
            wrong.push(at(Kind::Doubled, found));
            continue;
        }
        if let Some(index) = missing.iter().position(|e| e.topic == found.topic) {
            missing.remove(index);
        }
        wrong.push(at(Kind::Different, found));
    }
    let lost = |e: &&Expected| Wrong { kind: Kind::Lost, topic: Some(e.topic), place: Some((e.partition, None)) };
    wrong.extend(missing.iter().map(lost));
    wrong
}

fn at(kind: Kind, found: &Found) -> Wrong {
    Wrong { kind, topic: Some(found.topic), place: Some((found.partition, Some(found.offset))) }
}

/// The print of an output. Headers of the names in `without` do not count.
pub fn print<'a>(
    partition: i32,
    key: Option<&[u8]>,
    value: Option<&[u8]>,
    headers: impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)>,
    topic: usize,
    without: &[&str],
) -> Print {
    let mut hash = Sha256::new();
    hash.update((topic as u64).to_be_bytes());
    hash.update(partition.to_be_bytes());
    let mut part = |bytes: Option<&[u8]>| {
        // Null is no length.
        hash.update(bytes.map_or(u64::MAX, |bytes| bytes.len() as u64).to_be_bytes());
        hash.update(bytes.unwrap_or_default());
    };
    part(key);
    part(value);
    for (name, value) in headers.filter(|(name, _)| !without.iter().any(|other| other.as_bytes() == *name)) {
        part(Some(name));
        part(value);
    }
    let mut print = [0; 16];
    print.copy_from_slice(&hash.finalize()[..16]);
    print
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected(print: u8) -> Expected {
        Expected { topic: 0, partition: 1, print: [print; 16] }
    }

    fn found(print: u8, offset: i64) -> Found {
        Found { topic: 0, print: [print; 16], partition: 1, offset }
    }

    fn verdict(wanted: Option<&[u8]>, there: &[u8], written: u32, replayed: u32) -> Vec<(Kind, Option<i64>)> {
        let wanted: Option<Vec<Expected>> = wanted.map(|prints| prints.iter().map(|p| expected(*p)).collect());
        let there: Vec<Found> = there.iter().enumerate().map(|(i, p)| found(*p, i as i64)).collect();
        let wrong = compare(wanted.as_deref(), &there, Letters { written, replayed });
        wrong.into_iter().map(|w| (w.kind, w.place.and_then(|(_, offset)| offset))).collect()
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
        assert_eq!(verdict(Some(&[1]), &[], 1, 1), [], "replayed, and not read yet");
        assert_eq!(verdict(None, &[], 2, 1), [], "replayed, and rejected again");
        assert_eq!(verdict(None, &[], 2, 0), [(Doubled, None)]);
    }

    #[test]
    fn null_and_empty_have_other_prints() {
        let none = || std::iter::empty();
        let base = print(0, None, None, none(), 0, &[]);
        assert_ne!(base, print(0, Some(b""), None, none(), 0, &[]));
        assert_ne!(base, print(0, None, Some(b""), none(), 0, &[]));
        assert_ne!(base, print(1, None, None, none(), 0, &[]));
        assert_ne!(base, print(0, None, None, none(), 1, &[]));
        let header = || [(&b"a"[..], None)].into_iter();
        assert_ne!(base, print(0, None, None, header(), 0, &[]));
        assert_eq!(base, print(0, None, None, header(), 0, &["a"]));
    }
}
