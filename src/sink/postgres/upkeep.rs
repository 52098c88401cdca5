//! The upkeep of a ledger beside the work: partitions ahead of time, and forgetting what is old.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::connect::Connection;
use super::error::{Class, Error};
use super::ledger::LedgerTable;
use super::partitions::Window;
use super::status::Status;
use super::writer::WriterConfig;

const EVERY: Duration = Duration::from_secs(3600);
/// After a failure that passes.
const AGAIN: Duration = Duration::from_secs(60);
/// A restart delivers again what was not committed when its predecessor died, however long ago that was: nothing is
/// deleted before the positions are past that.
const AFTER_FIRST_COMMIT: Duration = Duration::from_secs(600);

/// What a writer does for its ledger.
pub struct Upkeep {
    config: WriterConfig,
    window: Option<Window>,
    extended: Option<Instant>,
    forgotten: Option<Instant>,
    forgetting: Option<JoinHandle<()>>,
}

impl Upkeep {
    pub fn new(config: &WriterConfig) -> Upkeep {
        Upkeep { config: config.clone(), window: None, extended: None, forgotten: None, forgetting: None }
    }

    /// The window of a ledger in partitions, extended to the present; none of a flat one, which holds everything.
    pub async fn window(&mut self, connection: &mut Connection) -> Result<Option<Window>, Error> {
        let Some(ledger) = self.config.ledger.as_ref().filter(|ledger| ledger.partitioned) else { return Ok(None) };
        if self.window.is_some() && self.extended.is_some_and(|at| at.elapsed() < EVERY) {
            return Ok(self.window);
        }
        match ledger.extend(connection).await {
            Ok(window) => (self.window, self.extended) = (Some(window), Some(Instant::now())),
            // The former window serves until the partitions made ahead are used up.
            Err(error) if error.class() == Some(Class::Transient) && self.window.is_some() => {
                tracing::debug!(ledger = ledger.name, %error, "partitions are made a little later");
                self.extended = Instant::now().checked_sub(EVERY - AGAIN);
            }
            Err(error) => return Err(error),
        }
        Ok(self.window)
    }

    /// A new connection may lead to a database that lacks what was made: a promoted standby, a backup put back.
    pub fn reconnected(&mut self) {
        self.extended = None;
    }

    /// Forgets what is old, every now and then. Never ends.
    pub async fn run(&mut self, status: &Status) -> Infallible {
        loop {
            if let Some(ledger) = self.config.ledger.clone()
                && self.is_due(&ledger, status)
            {
                self.forgotten = Some(Instant::now());
                self.forgetting = Some(tokio::spawn(forget(self.config.clone(), ledger)));
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    fn is_due(&self, ledger: &LedgerTable, status: &Status) -> bool {
        let rested = self.forgotten.is_none_or(|at| at.elapsed() >= EVERY);
        let over = self.forgetting.as_ref().is_none_or(JoinHandle::is_finished);
        rested && over && may_forget(ledger.partitioned, status.positions_committed_at(), Instant::now())
    }
}

/// What is older than the partitions is refused; of a flat ledger it would be taken for new.
fn may_forget(partitioned: bool, first_commit: Option<Instant>, now: Instant) -> bool {
    partitioned || first_commit.is_some_and(|at| now >= at + AFTER_FIRST_COMMIT)
}

async fn forget(config: WriterConfig, ledger: LedgerTable) {
    let forgotten = async {
        let mut connection = config.connect().await?;
        let forgotten = ledger.forget_old(&mut connection).await?;
        connection.close().await;
        Ok::<u64, Error>(forgotten)
    };
    match forgotten.await {
        Ok(0) => {}
        Ok(gone) if ledger.partitioned => tracing::info!(ledger = ledger.name, partitions = gone, "old ids dropped"),
        Ok(gone) => tracing::info!(ledger = ledger.name, rows = gone, "old ids deleted"),
        Err(error) => tracing::warn!(ledger = ledger.name, %error, "old ids stay for now; tried again within the hour"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Case 40: retention of a minute, five minutes down, and a batch that was written and not committed in Kafka.
    #[test]
    fn a_flat_ledger_forgets_nothing_before_the_positions_are_past_what_a_restart_delivers() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(!may_forget(false, None, after(1_000_000)), "no position was committed");
        assert!(!may_forget(false, Some(after(50)), after(649)));
        assert!(may_forget(false, Some(after(50)), after(650)));
        assert!(may_forget(true, None, start), "what is outside a partition is never taken for new");
    }
}
