//! How much a producer is handed before it is flushed.

use crate::chunk::{Output, Target};

/// What librdkafka puts into one request at most (`batch.num.messages`).
const MESSAGES: u32 = 10_000;
/// What a record and a header take beyond their bytes, at most (KIP-98: varints, attributes, lengths).
const RECORD_BYTES: usize = 48;
const HEADER_BYTES: usize = 12;

/// What was handed over since all was acknowledged, by target and partition. An idempotent producer has one request of
/// a partition under way at a time, and librdkafka 2.12 asks without a pause whether the next may go while records older
/// than `linger.ms` wait for it, all of them during a flush: a third of a busy job's CPU. So nobody hands over more of a
/// partition than its next request takes, and then flushes.
#[derive(Debug)]
pub struct Round {
    request_bytes: usize,
    targets: Vec<Vec<Load>>,
    is_empty: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    bytes: usize,
    records: u32,
}

impl Round {
    pub(super) fn new(request_bytes: usize, targets: &[Target]) -> Round {
        let loads = |target: &Target| vec![Load::default(); target.partitions.max(0) as usize];
        Round { request_bytes, targets: targets.iter().map(loads).collect(), is_empty: true }
    }

    pub fn is_empty(&self) -> bool {
        self.is_empty
    }

    /// Counts an output in, if the next request of its partition takes it; alone it always does.
    #[inline]
    pub fn takes(&mut self, output: &Output<'_>) -> bool {
        let load = self.targets.get_mut(output.target.0 as usize);
        let Some(load) = load.and_then(|loads| loads.get_mut(output.partition as usize)) else {
            // There is no such partition: the producer's own error says so.
            return true;
        };
        let bytes = output.bytes_len() + RECORD_BYTES + output.headers().len() * HEADER_BYTES;
        if load.records > 0 && (load.bytes + bytes > self.request_bytes || load.records == MESSAGES) {
            return false;
        }
        load.bytes += bytes;
        load.records += 1;
        self.is_empty = false;
        true
    }

    /// All is acknowledged, or was given up.
    pub fn clear(&mut self) {
        if !self.is_empty {
            self.targets.iter_mut().for_each(|loads| loads.fill(Load::default()));
            self.is_empty = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::{Chunk, TargetId};

    fn target(topic: &str) -> Target {
        Target {
            topic: topic.into(),
            partitions: 2,
            max_message_bytes: 1000,
            compacted: false,
            timestamp_before_max_ms: i64::MAX,
            timestamp_after_max_ms: i64::MAX,
        }
    }

    /// Whether each of the outputs `(target, partition, bytes of its value)` is taken.
    fn taken(round: &mut Round, outputs: &[(u32, i32, usize)]) -> Vec<bool> {
        let mut chunk = Chunk::default();
        for (target, partition, bytes) in outputs {
            let mut output = chunk.push(TargetId(*target));
            output.partition(*partition).value(Some(&vec![b'x'; *bytes])).header(b"name", Some(b"value"));
            output.finish();
        }
        chunk.iter().map(|output| round.takes(&output)).collect()
    }

    #[test]
    fn a_partition_gets_what_one_request_takes() {
        let mut round = Round::new(1000, &[target("a"), target("b")]);
        let outputs = [(0, 0, 900), (0, 0, 100), (0, 1, 900), (1, 0, 900), (1, 0, 1)];
        assert!(round.is_empty());
        assert_eq!(taken(&mut round, &outputs), [true, false, true, true, false]);
        assert!(!round.is_empty());
        round.clear();
        assert!(round.is_empty());
        assert_eq!(taken(&mut round, &outputs[..2]), [true, false]);
    }

    #[test]
    fn one_that_no_request_should_take_goes_alone() {
        let mut round = Round::new(1000, &[target("a")]);
        assert_eq!(taken(&mut round, &[(0, 0, 5000), (0, 0, 0), (0, 9, 0), (7, 0, 0)]), [true, false, true, true]);
    }

    #[test]
    fn a_request_has_so_many_records() {
        let mut round = Round::new(usize::MAX, &[target("a")]);
        let outputs = vec![(0, 0, 1); MESSAGES as usize + 1];
        assert_eq!(taken(&mut round, &outputs).iter().filter(|taken| !**taken).count(), 1);
    }
}
