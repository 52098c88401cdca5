//! Reading ranges of a topic outside any group: dead letters, what a job remembers, what an audit compares.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::admin::Admin;
use super::code::Code;
use super::config::Connection;
use super::consumer::{Consumer, Polled};
use super::error::{Error, Operation};
use super::offsets::{At, Isolation};
use super::options::ConsumerOptions;
use crate::record::{Input, Position, TopicPartition};

const SLICE: Duration = Duration::from_millis(100);

/// Reads committed records, one partition after the other.
#[derive(Debug)]
pub struct Reader {
    consumer: Consumer,
    patience: Duration,
}

/// A part of a partition: from a position up to another, which is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    pub partition: TopicPartition,
    pub from: Position,
    pub to: Position,
}

impl Reader {
    /// `patience`: how long nothing may come before a read is given up.
    pub fn new(connection: &Connection, patience: Duration) -> Result<Reader, Error> {
        // It never joins the group: positions are given.
        let options = ConsumerOptions { end_of_partition: true, ..ConsumerOptions::new(&connection.client_id) };
        let consumer = Consumer::new(connection, &options)?;
        Ok(Reader { consumer, patience })
    }

    /// All of a topic that is there now: up to the last stable offsets, or up to the ends of the log, where what is
    /// still open is waited for.
    pub fn whole(admin: &Admin, topic: &str, partitions: i32, isolation: Isolation) -> Result<Vec<Range>, Error> {
        let all = || (0..partitions).map(|partition| TopicPartition::new(topic, partition));
        let ask = |at, isolation| admin.offsets(&all().map(|p| (p, at)).collect::<Vec<_>>(), isolation);
        let from = ask(At::Earliest, Isolation::ReadUncommitted)?;
        let to: std::collections::BTreeMap<_, _> = ask(At::Latest, isolation)?.into_iter().collect();
        let mut ranges: Vec<Range> = from
            .into_iter()
            .filter_map(|(partition, from)| {
                let to = to.get(&partition).copied().flatten()?;
                Some(Range { partition, from: from?, to })
            })
            .collect();
        ranges.sort_by(|a, b| a.partition.cmp(&b.partition));
        Ok(ranges)
    }

    /// Reads a range in order until its end, or until `take` has had enough. Blocks. Errors: what `take` says; nothing
    /// came for `patience`, not even a marker; records before `from` were deleted.
    pub fn read<E: From<Error>>(
        &mut self,
        range: &Range,
        take: impl FnMut(&Input<'_>) -> Result<ControlFlow<()>, E>,
    ) -> Result<(), E> {
        self.read_on(range, take, |error| Err(error.into()))
    }

    /// As [`read`](Reader::read), but where nothing came for `patience` `idle` says whether to go on.
    pub fn read_on<E: From<Error>>(
        &mut self,
        range: &Range,
        mut take: impl FnMut(&Input<'_>) -> Result<ControlFlow<()>, E>,
        mut idle: impl FnMut(Error) -> Result<(), E>,
    ) -> Result<(), E> {
        if range.from >= range.to {
            return Ok(());
        }
        let partition = std::slice::from_ref(&range.partition);
        self.consumer.assign(&[(range.partition.clone(), range.from)])?;
        let (mut heard, mut reached) = (Instant::now(), None);
        loop {
            match self.consumer.poll(SLICE) {
                Polled::Record(message) => {
                    heard = Instant::now();
                    let input = message.to_input(Vec::new());
                    let other = input.topic != &*range.partition.topic || input.partition != range.partition.partition;
                    if other || Position(input.offset.0) < range.from {
                        continue;
                    }
                    if Position(input.offset.0) >= range.to || take(&input)?.is_break() {
                        return Ok(());
                    }
                    continue;
                }
                // Where only markers lie at the end no record moves the position over them.
                Polled::EndOfPartition(ended, at) if ended == range.partition && at >= range.to => return Ok(()),
                Polled::Failed(error) if error.is_out_of_range() || error.is_fatal() => return Err(error.into()),
                _ => {}
            }
            let position = self.consumer.position(partition).pop().and_then(|(_, position)| position);
            if position.is_some_and(|position| position >= range.to) {
                return Ok(());
            }
            // What was aborted comes as markers alone.
            if position > reached {
                (heard, reached) = (Instant::now(), position);
            }
            if heard.elapsed() >= self.patience {
                let place = &range.partition;
                let error = Error::of_code(Operation::Consume, Code::TIMED_OUT);
                idle(error.at(place.topic.clone(), Some(place.partition)))?;
                heard = Instant::now();
            }
        }
    }
}
