//! Dead letters: finding them, showing them, and sending them back to the stage that rejected them.

mod letter;
mod replay;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::Duration;

pub use letter::{Address, Letter};
pub use replay::{LeftOut, Options, Outcome, Replayed, replay};

use crate::error::Failure;
use crate::kafka::{Admin, Connection, Error, Isolation, Range, Reader};
use crate::record::{Input, Position};
use crate::reject::header;

/// How long a topic that has more may bring nothing.
const PATIENCE: Duration = Duration::from_secs(20);

/// Which dead letters are meant: all conditions hold.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Only these; empty is all.
    pub addresses: BTreeSet<Address>,
    pub node: Option<String>,
    pub reason: Option<String>,
    /// The topic that the record came from.
    pub source: Option<String>,
    /// Of this time or later, by the record's own timestamp in milliseconds since the epoch.
    pub since: Option<i64>,
}

impl Filter {
    pub fn matches(&self, input: &Input<'_>) -> bool {
        let is = |wanted: &Option<String>, name: &str| {
            wanted.as_ref().is_none_or(|wanted| input.headers.last(name).flatten() == Some(wanted.as_bytes()))
        };
        let address = Address { partition: input.partition, offset: input.offset };
        (self.addresses.is_empty() || self.addresses.contains(&address))
            && is(&self.node, header::NODE)
            && is(&self.reason, header::REASON)
            && is(&self.source, header::TOPIC)
            && self.since.is_none_or(|since| input.timestamp.is_some_and(|time| time >= since))
    }
}

/// The dead-letter topic of a topology as it is now.
pub struct DeadLetters {
    pub topic: String,
    /// Empty where the topic does not exist yet.
    ranges: Vec<Range>,
    reader: Reader,
}

impl DeadLetters {
    /// Takes what is committed in the topic now. Blocks.
    pub fn open(topic: &str, connection: &Connection, admin: &Admin) -> Result<DeadLetters, Failure> {
        let failed = failed(topic);
        let info = admin.topic(topic).map_err(&failed)?;
        let partitions = info.map_or(0, |info| info.partitions);
        let ranges = Reader::whole(admin, topic, partitions, Isolation::ReadCommitted).map_err(&failed)?;
        let reader = Reader::new(connection, PATIENCE).map_err(&failed)?;
        Ok(DeadLetters { topic: topic.to_owned(), ranges, reader })
    }

    /// Hands each matching dead letter to `take` until it has had enough, in the order of partitions and offsets: those
    /// of one key come as they were rejected. Blocks.
    ///
    /// # Errors
    /// What `take` says; exit 2 for an address that the topic does not hold; exit 3 where the broker stops answering.
    pub fn each(
        &mut self,
        filter: &Filter,
        mut take: impl FnMut(&Input<'_>) -> Result<ControlFlow<()>, Failure>,
    ) -> Result<(), Failure> {
        let mut missing = filter.addresses.clone();
        let mut enough = false;
        for range in &self.ranges {
            let Some(range) = within(range, &filter.addresses) else { continue };
            let topic = &self.topic;
            let read = self.reader.read(&range, |input| {
                missing.remove(&Address { partition: input.partition, offset: input.offset });
                if !filter.matches(input) {
                    return Ok(ControlFlow::Continue(()));
                }
                let flow = take(input).map_err(Interrupted::Taker)?;
                enough = flow.is_break();
                Ok(flow)
            });
            match read {
                Ok(()) => {}
                Err(Interrupted::Taker(failure)) => return Err(failure),
                Err(Interrupted::Reader(error)) => return Err(failed(topic)(error)),
            }
            if enough {
                return Ok(());
            }
        }
        match missing.first() {
            None => Ok(()),
            Some(address) => Err(self.unknown(*address)),
        }
    }

    fn unknown(&self, address: Address) -> Failure {
        let held: Vec<String> = self
            .ranges
            .iter()
            .map(|range| format!("{}:{} to {}", range.partition.partition, range.from, range.to.0 - 1))
            .collect();
        let held = if held.is_empty() { "nothing".to_owned() } else { held.join(", ") };
        Failure::refused(format!("there is no dead letter {address} in {}: it holds {held}", self.topic))
    }
}

/// The part of a range that holds all of its addresses; without addresses all of it.
fn within(range: &Range, addresses: &BTreeSet<Address>) -> Option<Range> {
    if addresses.is_empty() {
        return Some(range.clone());
    }
    let mut here = addresses.iter().filter(|a| a.partition == range.partition.partition).map(|a| a.offset);
    let first = here.next()?;
    let from = Position(first.0).max(range.from);
    let to = here.next_back().unwrap_or(first).next().min(range.to);
    Some(Range { partition: range.partition.clone(), from, to })
}

enum Interrupted {
    Reader(Error),
    Taker(Failure),
}

impl From<Error> for Interrupted {
    fn from(error: Error) -> Interrupted {
        Interrupted::Reader(error)
    }
}

/// Reading failed: refused where the broker does not let us, else it is out of reach.
fn failed(topic: &str) -> impl Fn(Error) -> Failure + use<> {
    let topic = topic.to_owned();
    move |error| match error.disposition() {
        crate::error::Disposition::Fatal(exit) => Failure::new(exit, format!("cannot read {topic}: {error}")),
        _ => Failure::unreachable(format!("cannot read {topic}: {error}")),
    }
}
