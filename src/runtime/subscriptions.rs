//! Whether all that a stage reads is read by somebody, and still what it was: retry topics may be made while a job runs,
//! topics may be added to a file between two runs, and a topic may be made anew under its name.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::error::Failure;
use crate::kafka::{Admin, Error, GroupHandle};
use crate::runtime::past;

const ASK_EVERY: Duration = Duration::from_secs(1);
const COMPARE_EVERY: Duration = Duration::from_secs(5);
const WAIT: Duration = Duration::from_millis(500);

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
    pub topics: Vec<String>,
    /// The ids of the topics at start.
    pub ids: HashMap<String, Uuid>,
    /// The stage's retry topic, as long as it is not there.
    pub retry: Option<String>,
    pub members: Vec<GroupHandle>,
    /// Every topic was seen to be read.
    pub covered: bool,
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
            && admin.topic(retry)?.is_some()
        {
            tracing::info!(topic = retry, "dead letters come back; reading them");
            self.topics.extend(self.retry.take());
            self.covered = false;
            return self.subscribe();
        }
        if !self.covered {
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
        let topics: Vec<&str> = self.topics.iter().map(String::as_str).collect();
        self.members.iter().try_for_each(|member| member.subscribe(&topics))
    }

    /// A static member that comes back within its session is given what it had, whatever it subscribes to now
    /// (KIP-345): a topic that is new to the file would be read by nobody until the next rebalance. Leaving and joining
    /// again makes one.
    fn cover(&mut self, admin: &Admin) -> Result<(), Error> {
        let group = admin.group(&self.group)?;
        let inside = |member: &GroupHandle| {
            let metadata = member.metadata();
            metadata.is_some_and(|m| m.is_member() && group.members.iter().any(|other| other.id == m.member_id()))
        };
        if !group.stable || !self.members.iter().all(inside) {
            return Ok(());
        }
        let read = |topic: &String| group.members.iter().any(|m| m.partitions.iter().any(|p| *p.topic == **topic));
        match self.topics.iter().find(|topic| !read(topic)) {
            None => self.covered = true,
            Some(topic) => {
                tracing::info!(group = self.group, topic, "nobody reads this topic; joining the group again");
                let member = self.members.first().expect("a stage has a worker");
                member.unsubscribe()?;
                self.subscribe()?;
            }
        }
        Ok(())
    }
}
