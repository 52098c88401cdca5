//! What consumers and producers are made with, as librdkafka's settings.

use std::time::Duration;

use super::config::{Connection, Settings, millis};
use crate::chunk::Target;

/// The strategy that divides the partitions of every topic alike.
const RANGE: &str = "range";

/// What a member of a group is made with.
#[derive(Clone, Debug)]
pub struct ConsumerOptions<'a> {
    pub group: &'a str,
    /// `group.instance.id`: static membership.
    pub instance_id: Option<&'a str>,
    pub session_timeout: Duration,
    pub max_poll_interval: Duration,
    /// Bytes fetched ahead for all partitions together. One fetch response may go over it.
    pub queue_bytes: u64,
    pub read_committed: bool,
    /// Report [`Polled::EndOfPartition`], each time that an end is reached that was not reached before.
    pub end_of_partition: bool,
    /// Partitions of one number go to one member, whatever their topic: they are divided by range.
    pub co_located: bool,
    /// The client commits by itself, every so often, what it has handed out. No job does that: a drill shows why.
    pub auto_commit: Option<Duration>,
}

impl<'a> ConsumerOptions<'a> {
    pub fn new(group: &'a str) -> ConsumerOptions<'a> {
        ConsumerOptions {
            group,
            instance_id: None,
            session_timeout: Duration::from_secs(15),
            max_poll_interval: Duration::from_secs(300),
            queue_bytes: 8 << 20,
            read_committed: true,
            end_of_partition: false,
            co_located: false,
            auto_commit: None,
        }
    }

    pub(super) fn settings(&self, connection: &Connection) -> Settings {
        let mut settings = connection.settings();
        settings
            // The default waits a second before it fills a queue that was full.
            .default("fetch.queue.backoff.ms", 2)
            // Small queues stay in the processor's caches: twice the throughput of the defaults.
            .default("queued.min.messages", 5_000)
            .default("fetch.message.max.bytes", 100_000)
            .default("fetch.wait.max.ms", 100)
            // New partitions are found by it; librdkafka's default is five minutes.
            .default("topic.metadata.refresh.interval.ms", 30_000)
            // Positions that a transaction held are told within milliseconds of its end.
            .default("retry.backoff.ms", 10)
            .fixed("queued.max.messages.kbytes", (self.queue_bytes / 1024).clamp(1, 2_097_151))
            .fixed("group.id", self.group)
            .fixed("max.poll.interval.ms", millis(self.max_poll_interval))
            .fixed("isolation.level", if self.read_committed { "read_committed" } else { "read_uncommitted" })
            .fixed("enable.partition.eof", self.end_of_partition)
            .fixed("enable.auto.commit", self.auto_commit.is_some())
            .fixed("enable.auto.offset.store", self.auto_commit.is_some())
            // Positions are given with each assignment; one outside the log must stop the job, not skip or repeat
            // records.
            .fixed("auto.offset.reset", "error");
        if let Some(every) = self.auto_commit {
            settings.fixed("auto.commit.interval.ms", millis(every));
        }
        if let Some(instance) = self.instance_id {
            settings.fixed("group.instance.id", instance);
        }
        // Under the new protocol the broker decides these, and the client refuses them.
        if settings.user("group.protocol") != Some("consumer") {
            settings
                .fixed("session.timeout.ms", millis(self.session_timeout))
                // Members hear of a rebalance in the answer to a heartbeat, and a cooperative one takes two rounds.
                .default("heartbeat.interval.ms", millis((self.session_timeout / 3).min(Duration::from_secs(1))))
                .default("partition.assignment.strategy", if self.co_located { RANGE } else { "cooperative-sticky" });
        } else if self.co_located {
            settings.fixed("group.remote.assignor", RANGE);
        }
        settings
    }
}

/// What librdkafka holds for a queued message besides its bytes, roughly: the queue is bounded by count as well.
const BYTES_A_MESSAGE: u64 = 256;

/// For records that nobody waits for and nobody flushes.
pub const LINGER: Duration = Duration::from_millis(5);

/// What a producer is made with.
#[derive(Clone, Debug)]
pub struct ProducerOptions {
    /// `None`: a plain idempotent producer, for at-least-once.
    pub transactional_id: Option<String>,
    /// The broker aborts a transaction that is open for longer.
    pub transaction_timeout: Duration,
    /// How long a record waits for others of its partition, if nobody flushes.
    pub linger: Duration,
    /// Bytes of values that may wait to be acknowledged; beyond, producing answers that the queue is full.
    pub queue_bytes: u64,
}

impl ProducerOptions {
    pub(super) fn settings(&self, connection: &Connection, targets: &[Target]) -> Settings {
        let mut settings = connection.settings();
        // The client's own limit must not be the tighter one; sizes are checked against the topics before.
        let largest = targets.iter().map(|t| t.max_message_bytes).max().unwrap_or(0).clamp(1_000_000, 1_000_000_000);
        // A queue smaller than one message would be full for ever.
        let queue_bytes = self.queue_bytes.max(largest as u64 + 1024);
        settings
            .default("compression.type", "lz4")
            .default("linger.ms", millis(self.linger))
            // CONCURRENT_TRANSACTIONS and moving coordinators are asked again after this; the default is 100.
            .default("retry.backoff.ms", 2)
            .default("retry.backoff.max.ms", 500)
            .default("message.max.bytes", largest)
            .default("batch.size", request_bytes(targets))
            .fixed("queue.buffering.max.kbytes", queue_bytes.div_ceil(1024).min(2_147_483_647))
            .fixed("queue.buffering.max.messages", (queue_bytes / BYTES_A_MESSAGE).clamp(1000, 10_000_000))
            .fixed("delivery.report.only.error", true)
            .fixed("enable.idempotence", true)
            .fixed("acks", "all");
        if let Some(id) = &self.transactional_id {
            settings.fixed("transactional.id", id).fixed("transaction.timeout.ms", millis(self.transaction_timeout));
        }
        settings
    }
}

/// Of one request for a partition. A topic's limit counts whole batches, so one has to fit into the smallest.
pub(super) fn request_bytes(targets: &[Target]) -> usize {
    let smallest = targets.iter().map(|t| t.max_message_bytes).min().unwrap_or(1_000_000);
    smallest.saturating_sub(512).clamp(1, 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(max_message_bytes: usize) -> Target {
        Target {
            topic: "t".into(),
            partitions: 1,
            max_message_bytes,
            compacted: false,
            timestamp_before_max_ms: i64::MAX,
            timestamp_after_max_ms: i64::MAX,
        }
    }

    #[test]
    fn limits_follow_the_targets() {
        let options = ProducerOptions {
            transactional_id: Some("id".into()),
            transaction_timeout: Duration::from_secs(10),
            linger: LINGER,
            queue_bytes: 4 << 20,
        };
        let targets = [target(20_000), target(8_000_000)];
        let config = options.settings(&Connection::new("localhost:1", "c"), &targets).build().unwrap();
        let get = |name| config.get(name);
        assert_eq!(get("message.max.bytes"), "8000000");
        assert_eq!(get("batch.size"), "19488");
        assert_eq!(get("queue.buffering.max.kbytes"), "7814");
        assert_eq!(get("transaction.timeout.ms"), "10000");
    }

    #[test]
    fn the_new_group_protocol_gets_none_of_the_old_ones_settings() {
        let options = ConsumerOptions::new("g");
        let mut connection = Connection::new("localhost:1", "c");
        let strategy = |connection: &Connection| {
            let config = options.settings(connection).build().unwrap();
            (config.get("partition.assignment.strategy"), config.get("session.timeout.ms"))
        };
        assert_eq!(strategy(&connection), ("cooperative-sticky".into(), "15000".into()));
        connection.properties.insert("partition.assignment.strategy".into(), "range".into());
        assert_eq!(strategy(&connection).0, "range");
        connection.properties.clear();
        connection.properties.insert("group.protocol".into(), "consumer".into());
        // librdkafka's defaults.
        assert_eq!(strategy(&connection), ("range,roundrobin".into(), "45000".into()));
    }
}
