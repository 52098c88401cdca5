//! Deletes what a stage sent to itself and has processed: the topics of repartitions have no limit by age.

use std::time::{Duration, Instant};

use crate::kafka::Admin;
use crate::record::TopicPartition;

const EVERY: Duration = Duration::from_secs(30);

/// The repartition topics of one stage.
pub struct Purge {
    group: String,
    partitions: Vec<TopicPartition>,
    next: Instant,
    /// Whether the user knows that it cannot be done.
    said: bool,
}

impl Purge {
    pub fn new(group: &str, partitions: Vec<TopicPartition>) -> Purge {
        Purge { group: group.to_owned(), partitions, next: Instant::now() + EVERY, said: false }
    }

    /// Whether there is nothing to look after.
    pub fn is_empty(&self) -> bool {
        self.partitions.is_empty()
    }

    /// Deletes up to the committed positions, every 30 s. What cannot be deleted now is the next time. Blocks for a moment.
    pub fn look(&mut self, admin: &Admin) {
        if Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + EVERY;
        let admin = admin.within(Duration::from_secs(2));
        let Ok(committed) = admin.committed(&self.group, &self.partitions, true) else { return };
        let processed = committed.into_iter().filter_map(|(partition, at)| Some((partition, at.ok()??)));
        let processed: Vec<_> = processed.filter(|(_, at)| at.0 > 0).collect();
        if processed.is_empty() {
            return;
        }
        match admin.delete_records(&processed) {
            Ok(()) => self.said = false,
            Err(error) if !self.said => {
                self.said = true;
                tracing::warn!(group = self.group, %error, "records of a repartition stay although they are processed");
            }
            Err(_) => {}
        }
    }
}
