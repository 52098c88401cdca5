//! Of the inputs of a task the record with the lowest time goes first. Records are held back until every other input of
//! their task has one, or is at the end of what the broker has, as Kafka Streams does (KIP-353, KIP-695).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::record::{Headers, Input, Offset, Timestamp, TopicPartition};

/// What a record takes besides its bytes, roughly.
const RECORD: usize = 128;
/// So much of a partition may always wait.
const LEAST: usize = 16 * 1024;

/// A record that was read, and waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) partition: TopicPartition,
    offset: Offset,
    timestamp: Timestamp,
    /// What it is ordered by; one without a time goes first.
    time: i64,
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

impl Waiting {
    fn new(partition: TopicPartition, input: &Input<'_>, time: Timestamp) -> Waiting {
        let Input { offset, timestamp, key, value, headers, .. } = input;
        Waiting {
            partition,
            offset: *offset,
            timestamp: *timestamp,
            time: time.unwrap_or(i64::MIN),
            key: key.map(<[u8]>::to_vec),
            value: value.map(<[u8]>::to_vec),
            headers: headers.0.iter().map(|(name, value)| (name.to_vec(), value.map(<[u8]>::to_vec))).collect(),
        }
    }

    fn size(&self) -> usize {
        let len = |bytes: &Option<Vec<u8>>| bytes.as_ref().map_or(0, Vec::len);
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + len(value)).sum();
        RECORD + len(&self.key) + len(&self.value) + headers
    }

    /// As it was read.
    pub(super) fn input(&self) -> Input<'_> {
        Input {
            topic: &self.partition.topic,
            partition: self.partition.partition,
            offset: self.offset,
            timestamp: self.timestamp,
            key: self.key.as_deref(),
            value: self.value.as_deref(),
            headers: Headers(self.headers.iter().map(|(name, value)| (&name[..], value.as_deref())).collect()),
        }
    }
}

/// A partition of a task.
#[derive(Debug)]
struct Queue {
    partition: TopicPartition,
    /// It is assigned, and ready.
    here: bool,
    records: VecDeque<Waiting>,
    bytes: usize,
    /// Everything that the broker has was delivered, since when.
    ended: Option<Instant>,
    paused: bool,
}

impl Queue {
    fn clear(&mut self) {
        self.records.clear();
        (self.bytes, self.ended, self.paused) = (0, None, false);
    }
}

/// The partitions of one number of topics that are joined. In the order in which records of one time go.
#[derive(Debug)]
struct Task {
    queues: Vec<Queue>,
}

impl Task {
    /// Which queue's record goes next; none while one has to be waited for.
    fn next(&self, now: Instant, idle: Duration) -> Option<usize> {
        let mut next: Option<(i64, usize)> = None;
        for (i, queue) in self.queues.iter().enumerate() {
            match queue.records.front() {
                // A task with a part elsewhere lacks state or records.
                _ if !queue.here => return None,
                Some(record) if next.is_none_or(|(time, _)| record.time < time) => next = Some((record.time, i)),
                Some(_) => {}
                None if queue.ended.is_some_and(|since| now.duration_since(since) >= idle) => {}
                None => return None,
            }
        }
        next.map(|(_, queue)| queue)
    }
}

/// The tasks of a worker that have several inputs.
#[derive(Debug, Default)]
pub(super) struct Merge {
    /// Topics whose partitions of one number are a task.
    groups: Vec<Vec<Arc<str>>>,
    idle: Duration,
    /// Bytes of all that waits, about.
    limit: usize,
    bytes: usize,
    tasks: BTreeMap<(usize, i32), Task>,
}

impl Merge {
    pub(super) fn new(groups: &[Vec<String>], idle: Duration, limit: usize) -> Merge {
        let group = |topics: &Vec<String>| topics.iter().map(|topic| Arc::from(topic.as_str())).collect();
        Merge { groups: groups.iter().map(group).collect(), idle, limit, bytes: 0, tasks: BTreeMap::new() }
    }

    /// Whether no topic is joined with another.
    pub(super) fn is_off(&self) -> bool {
        self.groups.is_empty()
    }

    /// The group of a topic, and its place there.
    fn place(&self, topic: &str) -> Option<(usize, usize)> {
        let places = self.groups.iter().enumerate();
        places.filter_map(|(group, topics)| Some((group, topics.iter().position(|t| **t == *topic)?))).next()
    }

    fn queue(&mut self, topic: &str, partition: i32) -> Option<&mut Queue> {
        let (group, at) = self.place(topic)?;
        self.tasks.get_mut(&(group, partition)).map(|task| &mut task.queues[at])
    }

    /// Whether records of a topic wait for their turn.
    pub(super) fn takes(&self, topic: &str) -> bool {
        !self.is_off() && self.place(topic).is_some()
    }

    /// Takes a record in that has this time. One of a partition that is not here is none of ours.
    pub(super) fn push(&mut self, input: &Input<'_>, time: Timestamp) {
        let Some(queue) = self.queue(input.topic, input.partition).filter(|queue| queue.here) else { return };
        let record = Waiting::new(queue.partition.clone(), input, time);
        let size = record.size();
        queue.bytes += size;
        queue.ended = None;
        queue.records.push_back(record);
        self.bytes += size;
    }

    /// Whether so much waits that nothing more is read before it was looked at.
    pub(super) fn is_full(&self) -> bool {
        self.bytes > self.limit
    }

    /// A partition has nothing more for now.
    pub(super) fn ended(&mut self, partition: &TopicPartition, now: Instant) {
        if let Some(queue) = self.queue(&partition.topic, partition.partition) {
            queue.ended.get_or_insert(now);
        }
    }

    /// Takes out the record that goes next, of any task.
    pub(super) fn next(&mut self, now: Instant) -> Option<Waiting> {
        let idle = self.idle;
        let (task, at) = self.tasks.values_mut().find_map(|task| task.next(now, idle).map(|at| (task, at)))?;
        let queue = &mut task.queues[at];
        let record = queue.records.pop_front()?;
        let size = record.size();
        queue.bytes -= size;
        self.bytes -= size;
        if queue.records.is_empty()
            && let Some(since) = &mut queue.ended
        {
            // What is waited for may come from now on.
            *since = now;
        }
        Some(record)
    }

    /// Whether a record may go.
    pub(super) fn is_ready(&self, now: Instant) -> bool {
        self.tasks.values().any(|task| task.next(now, self.idle).is_some())
    }

    /// The partitions that are assigned and ready are these: what waits of others is forgotten.
    pub(super) fn assign(&mut self, partitions: &[TopicPartition]) {
        if self.is_off() {
            return;
        }
        for partition in partitions {
            let Some((group, _)) = self.place(&partition.topic) else { continue };
            let queue = |topic: &Arc<str>| Queue {
                partition: TopicPartition::new(Arc::clone(topic), partition.partition),
                here: false,
                records: VecDeque::new(),
                bytes: 0,
                ended: None,
                paused: false,
            };
            let topics = &self.groups[group];
            self.tasks
                .entry((group, partition.partition))
                .or_insert_with(|| Task { queues: topics.iter().map(queue).collect() });
        }
        for queue in self.tasks.values_mut().flat_map(|task| &mut task.queues) {
            queue.here = partitions.contains(&queue.partition);
            if !queue.here {
                queue.clear();
            }
        }
        self.tasks.retain(|_, task| task.queues.iter().any(|queue| queue.here));
        self.bytes = self.tasks.values().flat_map(|task| &task.queues).map(|queue| queue.bytes).sum();
    }

    /// Forgets all that waits: it is read again. Answers the partitions that were paused.
    pub(super) fn clear(&mut self) -> Vec<TopicPartition> {
        let paused = self.resumed();
        self.tasks.values_mut().flat_map(|task| &mut task.queues).for_each(Queue::clear);
        self.bytes = 0;
        paused
    }

    /// Every partition was resumed. Answers those that were paused.
    pub(super) fn resumed(&mut self) -> Vec<TopicPartition> {
        let mut paused = Vec::new();
        for queue in self.tasks.values_mut().flat_map(|task| &mut task.queues) {
            // More may lie there since; the client tells ends again.
            queue.ended = None;
            if std::mem::take(&mut queue.paused) {
                paused.push(queue.partition.clone());
            }
        }
        paused
    }

    /// Partitions of which so much waits that they are to be paused, and those that are to be resumed.
    pub(super) fn flow(&mut self) -> (Vec<TopicPartition>, Vec<TopicPartition>) {
        let queues = self.tasks.values().map(|task| task.queues.len()).sum::<usize>().max(1);
        let limit = (self.limit / queues).max(LEAST);
        let (mut full, mut low) = (Vec::new(), Vec::new());
        for queue in self.tasks.values_mut().flat_map(|task| &mut task.queues) {
            if !queue.paused && queue.bytes > limit {
                queue.paused = true;
                // What is written from now on is not delivered before it goes on.
                queue.ended = None;
                full.push(queue.partition.clone());
            } else if queue.paused && queue.bytes <= limit / 2 {
                queue.paused = false;
                low.push(queue.partition.clone());
            }
        }
        (full, low)
    }

    /// Whether records of a partition wait: its position is behind what was delivered.
    pub(super) fn holds(&self, partition: &TopicPartition) -> bool {
        let queue = self
            .place(&partition.topic)
            .and_then(|(group, at)| self.tasks.get(&(group, partition.partition)).map(|task| &task.queues[at]));
        queue.is_some_and(|queue| !queue.records.is_empty())
    }

    /// Whether nothing of a partition's task is with another member.
    pub(super) fn is_whole(&self, partition: &TopicPartition) -> bool {
        let task = self.place(&partition.topic).and_then(|(group, _)| self.tasks.get(&(group, partition.partition)));
        task.is_none_or(|task| task.queues.iter().all(|queue| queue.here))
    }

    /// Partitions whose task has a part that is none of these.
    pub(super) fn parted(&self, assigned: &[TopicPartition]) -> Vec<(TopicPartition, TopicPartition)> {
        let missing = |queue: &&Queue| !assigned.contains(&queue.partition);
        let parted = self.tasks.values().filter_map(|task| {
            let missing = task.queues.iter().find(missing)?;
            let here = task.queues.iter().find(|queue| queue.here)?;
            Some((here.partition.clone(), missing.partition.clone()))
        });
        parted.collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn merge(idle_ms: u64) -> Merge {
        let topics = vec![vec!["table".to_owned(), "stream".to_owned()]];
        Merge::new(&topics, Duration::from_millis(idle_ms), 1 << 20)
    }

    fn tp(topic: &str, partition: i32) -> TopicPartition {
        TopicPartition::new(topic, partition)
    }

    fn push(merge: &mut Merge, topic: &str, offset: i64, time: i64) {
        let (offset, headers) = (Offset(offset), Headers::default());
        let input = Input { topic, partition: 3, offset, timestamp: Some(time), key: None, value: Some(b"v"), headers };
        merge.push(&input, Some(time));
    }

    fn next(merge: &mut Merge, now: Instant) -> Option<(String, i64)> {
        merge.next(now).map(|record| (record.partition.topic.to_string(), record.offset.0))
    }

    fn some(topic: &str, offset: i64) -> Option<(String, i64)> {
        Some((topic.to_owned(), offset))
    }

    #[test]
    fn the_lowest_time_goes_first_and_of_one_time_the_table() {
        let (mut merge, now) = (merge(0), Instant::now());
        merge.assign(&[tp("stream", 3), tp("table", 3), tp("other", 3)]);
        assert!(merge.takes("table") && !merge.takes("other"));
        push(&mut merge, "stream", 0, 5);
        assert_eq!(next(&mut merge, now), None, "the table may have an older one");
        push(&mut merge, "table", 0, 5);
        push(&mut merge, "table", 1, 7);
        assert_eq!(next(&mut merge, now), some("table", 0));
        assert_eq!(next(&mut merge, now), some("stream", 0));
        assert_eq!(next(&mut merge, now), None, "the stream may have an older one");
        merge.ended(&tp("stream", 3), now);
        assert_eq!(next(&mut merge, now), some("table", 1));
        push(&mut merge, "stream", 1, 1);
        assert_eq!(next(&mut merge, now), None, "a record ends the end");
    }

    #[test]
    fn an_input_at_its_end_is_waited_for_as_long_as_a_task_may_be_idle() {
        let (mut merge, now) = (merge(50), Instant::now());
        let later = |ms: u64| now + Duration::from_millis(ms);
        merge.assign(&[tp("stream", 3), tp("table", 3)]);
        push(&mut merge, "stream", 0, 5);
        merge.ended(&tp("table", 3), now);
        assert_eq!(next(&mut merge, later(49)), None);
        assert!(merge.is_ready(later(50)));
        assert_eq!(next(&mut merge, later(50)), some("stream", 0));
    }

    #[test]
    fn a_task_with_a_part_elsewhere_rests_and_what_waits_of_it_is_forgotten_with_it() {
        let (mut merge, now) = (merge(0), Instant::now());
        merge.assign(&[tp("stream", 3)]);
        push(&mut merge, "stream", 0, 5);
        push(&mut merge, "table", 0, 1);
        merge.ended(&tp("table", 3), now);
        assert_eq!(next(&mut merge, now), None);
        assert_eq!(merge.parted(&[tp("stream", 3)]), [(tp("stream", 3), tp("table", 3))]);
        assert_eq!(merge.parted(&[tp("stream", 3), tp("table", 3)]), [], "it is being made ready");
        merge.assign(&[tp("stream", 3), tp("table", 3)]);
        assert!(merge.holds(&tp("stream", 3)));
        merge.ended(&tp("table", 3), now);
        assert_eq!(next(&mut merge, now), some("stream", 0));
        push(&mut merge, "stream", 1, 6);
        merge.ended(&tp("table", 3), now);
        merge.resumed();
        assert_eq!(next(&mut merge, now), None, "more may have come while the table was paused");
        merge.assign(&[tp("table", 3)]);
        assert!(!merge.holds(&tp("stream", 3)));
    }

    #[test]
    fn the_end_of_an_input_that_is_paused_is_waited_for_anew() {
        let (mut merge, now) = (merge(0), Instant::now());
        merge.assign(&[tp("stream", 3), tp("table", 3)]);
        (0..20_000).for_each(|offset| push(&mut merge, "table", offset, offset));
        merge.ended(&tp("table", 3), now);
        assert_eq!(merge.flow().0, [tp("table", 3)]);
        push(&mut merge, "stream", 0, 1_000_000);
        while let Some((topic, _)) = next(&mut merge, now) {
            assert_eq!(topic, "table", "rows that were written since may be older");
        }
        merge.ended(&tp("table", 3), now);
        assert_eq!(next(&mut merge, now), some("stream", 0));
    }

    #[test]
    fn an_input_that_runs_ahead_is_paused_until_half_of_it_is_through() {
        let (mut merge, now) = (merge(0), Instant::now());
        merge.assign(&[tp("stream", 3), tp("table", 3)]);
        for offset in 0..5000 {
            push(&mut merge, "stream", offset, offset);
        }
        assert_eq!(merge.flow(), (vec![tp("stream", 3)], vec![]));
        assert_eq!(merge.flow(), (vec![], vec![]));
        merge.ended(&tp("table", 3), now);
        while merge.flow().1.is_empty() {
            assert!(next(&mut merge, now).is_some());
        }
        assert!(merge.holds(&tp("stream", 3)) && !merge.is_full());
        for offset in 5_000..20_000 {
            push(&mut merge, "stream", offset, offset);
        }
        assert!(merge.is_full());
        assert_eq!(merge.clear(), []);
        assert!(!merge.is_full());
        assert!(!merge.is_ready(now), "all ends have to be told again");
    }

    proptest! {
        /// However records and ends arrive: each input keeps its order, and a record goes only before those of the other input
        /// that are younger or came after it went.
        #[test]
        fn records_go_by_time_in_the_order_of_their_inputs(steps in prop::collection::vec((0..3u8, 0..20i64), 1..200)) {
            let (mut merge, now) = (merge(0), Instant::now());
            merge.assign(&[tp("stream", 3), tp("table", 3)]);
            let mut sent: [Vec<i64>; 2] = [Vec::new(), Vec::new()];
            let mut gone = [0usize; 2];
            for (step, time) in steps {
                match step {
                    0 | 1 => {
                        let topic = ["table", "stream"][step as usize];
                        push(&mut merge, topic, sent[step as usize].len() as i64, time);
                        sent[step as usize].push(time);
                    }
                    _ => ["table", "stream"].iter().for_each(|topic| merge.ended(&tp(topic, 3), now)),
                }
                while let Some((topic, offset)) = next(&mut merge, now) {
                    let own = usize::from(topic == "stream");
                    prop_assert_eq!(offset as usize, gone[own]);
                    let time = sent[own][gone[own]];
                    gone[own] += 1;
                    if let Some(other) = sent[1 - own].get(gone[1 - own]) {
                        prop_assert!(time < *other || (time == *other && own == 0), "{} before {}", time, other);
                    }
                }
                if step == 2 {
                    prop_assert_eq!(gone.to_vec(), sent.iter().map(Vec::len).collect::<Vec<_>>(), "nothing is held back at the end");
                }
            }
        }
    }
}
