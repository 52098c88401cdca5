//! Whether all that a stage reads is read by somebody, and still what it was: retry topics may be made while a job runs,
//! topics may be added to a file between two runs, and a topic may be made anew under its name.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::error::Failure;
use crate::kafka::{Admin, Error, GroupHandle};
use crate::record::TopicPartition;
use crate::runtime::past;

const ASK_EVERY: Duration = Duration::from_secs(1);
const COMPARE_EVERY: Duration = Duration::from_secs(5);
const WAIT: Duration = Duration::from_millis(500);

/// Looks in a row that find a partition unread before the group is joined again; between the two rounds of a cooperative
/// rebalance one is nobody's for a moment. Then the count begins anew, this far below.
const MISSED: u32 = 2;
const REST: u32 = 12;

/// Looks after the subscriptions of this process.
pub struct Subscriptions {
    stages: Vec<Subscription>,
    asked: Instant,
    compared: Instant,
    file: String,
}

/// What the members of a stage subscribe to.
pub struct Subscription {
    pub group: String,
    /// Topics with their partitions.
    pub topics: Vec<(String, i32)>,
    /// The ids of the topics at start.
    pub ids: HashMap<String, Uuid>,
    /// The stage's retry topic, as long as it is not there.
    pub retry: Option<String>,
    pub members: Vec<GroupHandle>,
    /// It leaves no partition to nobody.
    pub broker_assigns: bool,
    /// Every partition was seen to be read.
    pub covered: bool,
    /// How often in a row one was not.
    pub missed: u32,
}

impl Subscriptions {
    pub fn new(file: &str, stages: Vec<Subscription>) -> Subscriptions {
        Subscriptions { stages, asked: Instant::now(), compared: Instant::now(), file: file.to_owned() }
    }

    /// Asks the broker every now and then, for a second at most, and mends what it finds.
    ///
    /// # Errors
    /// A topic was made anew: what is read of it now is not what the positions are of.
    pub fn look(&mut self, admin: &Admin) -> Result<(), Failure> {
        if self.asked.elapsed() < ASK_EVERY {
            return Ok(());
        }
        let admin = admin.within(WAIT);
        if self.compared.elapsed() >= COMPARE_EVERY {
            self.compared = Instant::now();
            self.stages.iter().try_for_each(|stage| stage.compare(&admin, &self.file))?;
        }
        for stage in &mut self.stages {
            // A broker that does not answer is asked again.
            if let Err(error) = stage.look(&admin) {
                tracing::debug!(group = stage.group, %error, "cannot look after the subscription");
            }
        }
        self.asked = Instant::now();
        Ok(())
    }
}

impl Subscription {
    fn look(&mut self, admin: &Admin) -> Result<(), Error> {
        if let Some(retry) = &self.retry
            && let Some(info) = admin.topic(retry)?
        {
            tracing::info!(topic = retry, "dead letters come back; reading them");
            self.topics.push((retry.clone(), info.partitions));
            self.retry = None;
            self.covered = false;
            return self.subscribe();
        }
        if !self.covered && !self.broker_assigns {
            self.cover(admin)?;
        }
        Ok(())
    }

    fn compare(&self, admin: &Admin, file: &str) -> Result<(), Failure> {
        let topics: Vec<&str> = self.ids.keys().map(String::as_str).collect();
        let Ok(shapes) = admin.shapes(&topics) else { return Ok(()) };
        for (topic, (now, _)) in shapes {
            if self.ids[&topic] != now {
                return Err(Failure::stopped(past::recreated(&topic, self.ids[&topic], now, &self.group, file)));
            }
        }
        Ok(())
    }

    fn subscribe(&self) -> Result<(), Error> {
        let topics: Vec<&str> = self.topics.iter().map(|(topic, _)| topic.as_str()).collect();
        self.members.iter().try_for_each(|member| member.subscribe(&topics))
    }

    /// A static member that comes back within its session is given what it had, whatever it subscribes to now
    /// (KIP-345): a topic or a partition that came since would be read by nobody until the next rebalance. Leaving and joining
    /// again makes one.
    fn cover(&mut self, admin: &Admin) -> Result<(), Error> {
        let group = admin.assignments(&self.group)?.unwrap_or_default();
        let inside = |member: &GroupHandle| {
            let metadata = member.metadata();
            metadata.is_some_and(|m| m.is_member() && group.members.iter().any(|other| other.id == m.member_id()))
        };
        if !group.stable || !self.members.iter().all(inside) {
            self.missed = 0;
            return Ok(());
        }
        let read: HashSet<&TopicPartition> = group.members.iter().flat_map(|member| &member.partitions).collect();
        let all = self
            .topics
            .iter()
            .flat_map(|(topic, count)| (0..*count).map(|partition| TopicPartition::new(topic.as_str(), partition)));
        match all.into_iter().find(|partition| !read.contains(partition)) {
            None => self.covered = true,
            Some(_) if self.missed + 1 != MISSED => self.missed = (self.missed + 1) % REST,
            Some(partition) => {
                self.missed = MISSED;
                tracing::info!(group = self.group, %partition, "nobody reads this partition; joining the group again");
                let member = self.members.first().expect("a stage has a worker");
                member.unsubscribe()?;
                self.subscribe()?;
            }
        }
        Ok(())
    }
}
