//! Whether every partition of a group went on since this process started: what a crash before it left to be delivered
//! again has been delivered by then, whichever instance reads it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::kafka::{Admin, At, Isolation};
use crate::observe::status::StageStatus;
use crate::record::{Position, TopicPartition};

const EVERY: Duration = Duration::from_secs(10);

type Positions = BTreeMap<TopicPartition, Position>;

/// Watches one group until that is so, and tells the stage.
pub struct Moved {
    group: String,
    partitions: Vec<TopicPartition>,
    /// As they were before anything was read; none while the broker has not told them.
    first: Option<Positions>,
    status: Arc<StageStatus>,
    asked: Option<Instant>,
}

impl Moved {
    pub fn new(group: &str, partitions: Vec<TopicPartition>, status: Arc<StageStatus>) -> Moved {
        Moved { group: group.to_owned(), partitions, first: None, status, asked: None }
    }

    /// Looks, at most every 10 s, until it is so. A broker that does not answer is asked the next time.
    pub fn look(&mut self, admin: &Admin) {
        if self.status.has_moved_on() || self.asked.is_some_and(|at| at.elapsed() < EVERY) {
            return;
        }
        self.asked = Some(Instant::now());
        let Some(now) = self.positions(admin) else { return };
        let Some(first) = &self.first else {
            self.first = Some(now);
            return;
        };
        let asked: Vec<_> = self.partitions.iter().map(|partition| (partition.clone(), At::Latest)).collect();
        let Ok(ends) = admin.offsets(&asked, Isolation::ReadCommitted) else { return };
        let ends: BTreeMap<_, _> = ends.into_iter().filter_map(|(partition, end)| Some((partition, end?))).collect();
        if ends.len() == self.partitions.len() && ends.iter().all(|(p, end)| is_past(first.get(p), now.get(p), *end)) {
            self.status.move_on();
        }
    }

    fn positions(&self, admin: &Admin) -> Option<Positions> {
        let answers = admin.committed(&self.group, &self.partitions, false).ok()?;
        let mut positions = Positions::new();
        for (partition, position) in answers {
            if let Some(position) = position.ok()? {
                positions.insert(partition, position);
            }
        }
        Some(positions)
    }
}

/// A partition is past what was delivered before if its position moved, or if there is nothing behind it.
fn is_past(first: Option<&Position>, now: Option<&Position>, end: Position) -> bool {
    now.is_some_and(|now| first.is_some_and(|first| now > first) || *now >= end) || end.0 == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_that_nobody_has_read_since_the_start_holds_the_others_back() {
        let at = Position;
        assert!(is_past(Some(&at(5)), Some(&at(9)), at(100)), "it moved");
        assert!(is_past(Some(&at(5)), Some(&at(5)), at(5)), "nothing is behind it");
        assert!(is_past(None, None, at(0)), "nothing was ever in it");
        assert!(!is_past(Some(&at(5)), Some(&at(5)), at(6)), "its leader may be away");
        assert!(!is_past(None, None, at(6)), "it was never committed, but may have been applied");
        assert!(!is_past(None, Some(&at(3)), at(6)), "its start may be what was committed");
    }
}
