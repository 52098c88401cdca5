//! What a benchmark feeds: the records that were given, over and over.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use indicatif::ProgressBar;

use super::PARTITIONS;
use crate::error::Failure;
use crate::operator::partition;
use crate::quickstart::orders::Random;
use crate::quickstart::topics::Sent;
use crate::scratch::World;
use crate::scratch::input::{self, Origin, Record, again};
use crate::testing::passes;
use crate::topology::plan::Plan;
use crate::topology::spec::Topology;

/// Records made ahead of sending.
const BLOCK: usize = 100_000;
/// Text that compresses about as well as payloads do: to half.
const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// Records of a user.
pub struct Input {
    records: Vec<Record>,
    /// Members that say which event and which entity a record is about.
    names: Vec<String>,
    /// Where they come from, in words.
    pub from: String,
}

/// What was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    pub records: u64,
    /// Of the values.
    pub bytes: u64,
}

impl Input {
    /// Gathers the records; of a file's tests those that no stage rejects.
    pub fn gather(plan: &Plan, origin: Option<&Origin>) -> Result<Input, Failure> {
        let topology = &plan.topology;
        let (records, from) = match origin {
            Some(origin) => input::gather(topology, origin)?,
            None => {
                let mut own = Topology::clone(topology);
                for case in &mut own.tests {
                    case.inputs.retain(|input| passes(plan, input));
                }
                let (records, _) = input::gather(&own, &Origin::Tests { at_least: 1 })?;
                (records, "the inputs of the file's [[tests]] that no stage rejects".to_owned())
            }
        };
        Ok(Input { records, names: input::identifying(topology), from })
    }

    /// Mean bytes of a value.
    pub fn mean_bytes(&self) -> usize {
        let bytes: usize = self.records.iter().map(|record| record.value.as_ref().map_or(0, Vec::len)).sum();
        bytes / self.records.len()
    }

    /// The records again and again: other events of other entities each time.
    pub fn endless(&self) -> impl Iterator<Item = Record> + '_ {
        (0..).flat_map(move |copy| self.records.iter().map(move |record| (copy, record))).enumerate().map(
            |(number, (copy, record))| {
                let mut record = again(record, &self.names, copy);
                let from = number as i32 % PARTITIONS;
                record.partition = partition(record.key.as_deref(), from, PARTITIONS);
                record
            },
        )
    }

    /// Sends so many records to the source topics under a prefix, filled up to `size` bytes.
    pub fn send(
        &self,
        world: &World,
        prefix: &str,
        wanted: usize,
        size: Option<usize>,
        interrupted: &AtomicBool,
    ) -> Result<Size, Failure> {
        let mut sent = Size::default();
        let mut random = Random(7);
        let mut records = self.endless().take(wanted).map(|mut record| {
            if let (Some(size), Some(value)) = (size, &mut record.value) {
                fill(value, size, &mut random);
            }
            record
        });
        let topics: Vec<Arc<str>> = world.source_topics().map(|topic| topic.as_str().into()).collect();
        loop {
            let block: Vec<Record> = records.by_ref().take(BLOCK).collect();
            if block.is_empty() {
                return Ok(sent);
            }
            for topic in &topics {
                let own = block.iter().filter(|record| *record.topic == **topic).map(|record| {
                    sent.records += 1;
                    sent.bytes += record.value.as_ref().map_or(0, Vec::len) as u64;
                    Sent {
                        partition: record.partition,
                        key: record.key.as_deref(),
                        value: record.value.as_deref(),
                        headers: &record.headers,
                        timestamp: record.timestamp,
                    }
                });
                world.topics.produce(&format!("{prefix}.{topic}"), own, &ProgressBar::hidden(), interrupted)?;
            }
            crate::scratch::process::go_on(interrupted)?;
        }
    }
}

/// Fills a value up to so many bytes: an object with a member of its own, anything else at its end.
fn fill(value: &mut Vec<u8>, size: usize, random: &mut Random) {
    const MEMBER: &[u8] = b",\"filled_up\":\"";
    let is_object = value.first() == Some(&b'{') && value.last() == Some(&b'}') && value.len() > 2;
    let frame = if is_object { MEMBER.len() + 1 } else { 0 };
    let Some(missing) = size.checked_sub(value.len() + frame).filter(|missing| *missing > 0) else { return };
    if is_object {
        value.pop();
        value.extend(MEMBER);
    }
    let mut digits = 0;
    for at in 0..missing {
        if at % 16 == 0 {
            digits = random.next();
        }
        value.push(DIGITS[(digits & 15) as usize]);
        digits >>= 4;
    }
    if is_object {
        value.extend(b"\"}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_filled_up_and_stay_what_they_are() {
        let filled = |value: &str, size: usize| {
            let mut value = value.as_bytes().to_vec();
            fill(&mut value, size, &mut Random(1));
            String::from_utf8(value).unwrap()
        };
        let object = filled(r#"{"a": 1e3}"#, 100);
        assert!(object.starts_with(r#"{"a": 1e3,"filled_up":""#), "{object}");
        assert_eq!(object.len(), 100);
        let read: serde_json::Value = serde_json::from_str(&object).unwrap();
        assert_eq!(read["filled_up"].as_str().unwrap().len(), 100 - 10 - 15);
        assert_eq!(filled("text", 10).len(), 10);
        assert_eq!(filled(r#"{"a": 1e3}"#, 12), r#"{"a": 1e3}"#, "no room for a member");
        assert_eq!(filled("longer", 3), "longer");
    }
}
