//! The worker as a member of its group: partitions come and go, and a place that was lost is claimed back.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{PATIENCE, Worker};
use crate::crash::{self, Point};
use crate::error::{Disposition, Exit, Failure};
use crate::kafka::{Error, Polled};
use crate::record::TopicPartition;
use crate::runtime::positions::Found;

/// Two losses of our name so many session timeouts apart are two accidents instead of a twin.
const TWIN_SESSIONS: u32 = 2;

impl Worker {
    pub(super) fn handle(&mut self, event: Rebalance) -> Result<(), Failure> {
        match event {
            Rebalance::Assign(partitions) => self.assigned(partitions),
            Rebalance::Revoke { partitions, lost: false } => {
                crash::at(Point::InRevoke);
                // What was in the air when a batch failed comes again wherever the partition goes.
                if !self.drain(self.state.options.revoke_timeout)? {
                    self.state.abandon();
                }
                self.give_up(&partitions)
            }
            Rebalance::Revoke { partitions, lost: true } => {
                tracing::warn!(worker = self.state.options.name, count = partitions.len(), "partitions lost");
                self.state.abandon();
                self.give_up(&partitions)
            }
            Rebalance::End(partition) => {
                self.state.merge.ended(&partition, Instant::now());
                Ok(())
            }
            Rebalance::Failed(error) if error.is_fenced_instance() => self.fenced(error),
            Rebalance::Failed(error) => self.reported(error),
        }
    }

    /// Another member has our name. Mostly it is our own: while the coordinator did not answer, a join whose answer we
    /// never got went through. Who claims the name back and loses it again at once has a twin.
    fn fenced(&mut self, error: Error) -> Result<(), Failure> {
        let now = Instant::now();
        let recent = TWIN_SESSIONS * self.state.options.session_timeout;
        if self.fenced_at.replace(now).is_some_and(|at| now.duration_since(at) < recent) {
            return Err(Failure::new(Exit::Twin, error.to_string()));
        }
        tracing::warn!(worker = self.state.options.name, %error, "joining again under the same name");
        self.join_anew()
    }

    /// A client that has had no place in the group for so long does not find its way back by itself.
    pub(super) fn rejoin_if_outside(&mut self) -> Result<(), Failure> {
        let now = Instant::now();
        if now < self.looked_at {
            return Ok(());
        }
        self.looked_at = now + PATIENCE;
        let Some(outside) = self.state.options.outside_max else { return Ok(()) };
        if self.member().metadata().is_some_and(|metadata| metadata.is_member()) {
            self.outside_since = None;
            return Ok(());
        }
        let since = now.duration_since(*self.outside_since.get_or_insert(now));
        if since < outside {
            return Ok(());
        }
        self.outside_since = None;
        tracing::warn!(worker = self.state.options.name, ?since, "not let into the group; joining with a new client");
        self.join_anew()
    }

    fn join_anew(&mut self) -> Result<(), Failure> {
        self.state.abandon();
        let mut held = self.state.progress.partitions();
        held.append(&mut self.state.waiting);
        held.append(&mut self.state.preparing);
        self.forget(&held);
        (self.state.paused, self.state.missed) = (false, false);
        if self.state.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.consumer.renew().map_err(|error| Failure::stopped(error.to_string()))
    }

    /// An error of the consumer: what it cannot live with ends the worker, the rest it mends by itself.
    fn reported(&self, error: Error) -> Result<(), Failure> {
        match error.disposition() {
            Disposition::Fatal(exit) => Err(Failure::new(exit, error.to_string())),
            // Our place was given to another while we were away.
            _ if error.is_unreleased_instance() => Err(Failure::new(Exit::Twin, error.to_string())),
            // The client is dead and would go on without partitions.
            _ if error.is_fatal() => Err(Failure::stopped(error.to_string())),
            Disposition::Retry
            | Disposition::AbortTxn { .. }
            | Disposition::Fenced
            | Disposition::Rebuild
            | Disposition::Reject { .. } => {
                tracing::warn!(worker = self.state.options.name, %error, "the consumer reports");
                Ok(())
            }
        }
    }

    fn give_up(&mut self, partitions: &[TopicPartition]) -> Result<(), Failure> {
        self.forget(partitions);
        // A pause outlives the assignment: a partition that comes back would never be read.
        self.consumer.resume(partitions);
        self.consumer.unassign(partitions).or_else(|error| self.reported(error))
    }

    fn forget(&mut self, partitions: &[TopicPartition]) {
        self.state.progress.unassign(partitions);
        self.state.task.unassigned(partitions);
        self.state.waiting.retain(|p| !partitions.contains(p));
        self.state.preparing.retain(|p| !partitions.contains(p));
        self.state.stop_searching(partitions);
        self.state.merge.assign(&self.state.progress.partitions());
        self.state.hot = None;
        self.state.status.set_assigned(self.state.progress.partitions().len());
        tracing::info!(worker = self.state.options.name, partitions = %list(partitions), "given up");
    }

    fn assigned(&mut self, partitions: Vec<TopicPartition>) -> Result<(), Failure> {
        let mut found = self.state.positions.find(&self.consumer, &partitions, Duration::from_secs(1))?;
        tracing::info!(worker = self.state.options.name, partitions = %list(&partitions), "assigned");
        self.state.waiting.extend(found.unstable.iter().cloned());
        self.state.hold_back(&mut found)?;
        let answered = self.consumer.assign(&found.at());
        self.settle_in(found);
        answered.or_else(|error| self.reported(error))
    }

    pub(super) fn assign_waiting(&mut self) -> Result<(), Failure> {
        if !self.state.preparing.is_empty() {
            let unready = self.state.task.prepare(&self.state.preparing)?;
            let preparing = std::mem::replace(&mut self.state.preparing, unready);
            let ready = preparing.into_iter().filter(|partition| !self.state.preparing.contains(partition));
            self.state.waiting.extend(ready);
        }
        if self.state.waiting.is_empty() {
            return Ok(());
        }
        let partitions = std::mem::take(&mut self.state.waiting);
        let mut found = self.state.positions.find(&self.consumer, &partitions, Duration::from_millis(200))?;
        self.state.say_unstable(&found);
        self.state.waiting.extend(found.unstable.iter().cloned());
        self.state.hold_back(&mut found)?;
        let assigned = self.consumer.assignment();
        let (held, new): (Vec<_>, Vec<_>) = found.at().into_iter().partition(|(p, _)| assigned.contains(p));
        if !new.is_empty()
            && let Err(error) = self.consumer.add(&new)
        {
            self.state.waiting.extend(found.known.into_iter().map(|(partition, _, _)| partition));
            return self.reported(error);
        }
        // All fetchers began anew: at what was delivered, some of which may have been given up since.
        self.state.missed |= !new.is_empty() && !self.consumer.is_cooperative();
        if !held.is_empty() {
            // They were held back after an abort: the client stands where they were read last.
            let held: Vec<TopicPartition> = held.into_iter().map(|(partition, _)| partition).collect();
            self.consumer.resume(&held);
            self.state.missed = true;
        }
        self.settle_in(found);
        Ok(())
    }

    pub(super) fn settle_in(&mut self, found: Found) {
        for (partition, position, fresh) in found.known {
            let mut position = position;
            if fresh {
                // An abort before the first commit asks again; the end of the log may have moved since. A position in the
                // database is committed already.
                let resolved = self.state.resolved.entry(partition.clone()).or_insert(position);
                if self.state.positions.store.is_none() {
                    position = *resolved;
                }
                self.state.fresh = true;
            }
            self.state.task.assigned(&partition);
            self.state.progress.assign(partition, position, fresh);
        }
        self.state.merge.assign(&self.state.progress.partitions());
        self.state.hot = None;
        self.state.status.set_assigned(self.state.progress.partitions().len());
    }
}

/// What is not a record.
pub(super) enum Rebalance {
    Assign(Vec<TopicPartition>),
    Revoke {
        partitions: Vec<TopicPartition>,
        lost: bool,
    },
    /// Everything that the partition has was delivered.
    End(TopicPartition),
    Failed(Error),
}

impl Rebalance {
    pub(super) fn of(polled: Polled<'_>) -> Rebalance {
        match polled {
            Polled::Assign(partitions) => Rebalance::Assign(partitions),
            Polled::Revoke { partitions, lost } => Rebalance::Revoke { partitions, lost },
            Polled::Failed(error) => Rebalance::Failed(error),
            Polled::EndOfPartition(partition, _) => Rebalance::End(partition),
            Polled::Record(_) | Polled::Nothing => unreachable!("not asked for"),
        }
    }
}

fn list(partitions: &[TopicPartition]) -> String {
    let names: Vec<String> = partitions.iter().map(TopicPartition::to_string).collect();
    names.join(", ")
}
