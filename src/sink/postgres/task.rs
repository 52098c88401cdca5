//! Writing batches for as long as it takes: attempts, waits between them, and what ends them.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::batch::Batch;
use super::bisect::{Refused, isolate};
use super::connect::Connection;
use super::error::{Class, Error};
use super::fold::Folded;
use super::sql::Statements;
use super::status::{Status, Waiting};
use super::transaction::Transaction;
use super::write::{Writing, Written, folded_away};
use super::writer::{Applied, WriterConfig};
use crate::error::{Disposition, Failure};
use crate::reject::Reject;

const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Between log lines about one outage, or about ties.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// A writer's connection and what it learnt from earlier batches.
pub struct Task {
    config: WriterConfig,
    statements: Statements,
    status: Arc<Status>,
    stopped: watch::Receiver<()>,
    connection: Option<Connection>,
    /// Most of the last batch was in the table already.
    replay: bool,
    /// Rows a statement: lowered when statements take too long.
    rows_max: usize,
    ties: u64,
    ties_reported: Option<Instant>,
}

enum Attempt {
    Done(Written, Folded, Vec<Refused>),
    /// Too many rejects: nothing was committed.
    Tripped(Failure),
}

impl Task {
    pub fn new(config: WriterConfig, status: Arc<Status>, stopped: watch::Receiver<()>) -> Task {
        let statements = Statements::new(&config.layout);
        let (connection, replay, rows_max) = (None, false, usize::MAX);
        Task { config, statements, status, stopped, connection, replay, rows_max, ties: 0, ties_reported: None }
    }

    pub fn status(&self) -> &Status {
        &self.status
    }

    /// Writes a batch in one transaction, again and again through outages. `None`: the writer was told to stop while it
    /// waited.
    pub async fn write(&mut self, batch: Batch) -> Option<Result<Applied, Failure>> {
        let mut outage: Option<Outage> = None;
        let mut apart = false;
        let mut too_much = 0;
        loop {
            let error = match self.attempt(&batch, apart).await {
                Ok(Attempt::Done(written, folded, refused)) => {
                    if let Some(outage) = outage {
                        outage.over(&self.config.layout.node);
                    }
                    self.status.wait(None);
                    self.rows_max = self.rows_max.saturating_mul(2);
                    return Some(Ok(self.applied(batch, written, &folded, refused)));
                }
                Ok(Attempt::Tripped(failure)) => return Some(Err(failure)),
                Err(error) => error,
            };
            // What the server refused of the whole is looked for in its parts.
            if !apart && error.asks_for_parts() {
                apart = true;
                continue;
            }
            match error.disposition() {
                Disposition::Rebuild => self.connection = None,
                Disposition::Retry => {}
                _ => return Some(Err(self.fatal(&error))),
            }
            too_much += u32::from(error.class() == Some(Class::TooMuch));
            if too_much > 1 {
                self.rows_max = (self.rows_max.min(batch.len()) / 2).max(1);
            }
            let outage = outage.get_or_insert_with(Outage::new);
            let pause = outage.again(&self.config.layout.node, &error, &self.status);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = self.stopped.changed() => return None,
            }
        }
    }

    /// One transaction. `apart` looks for the rows that the server refuses.
    async fn attempt(&mut self, batch: &Batch, apart: bool) -> Result<Attempt, Error> {
        let mut folded = Folded::new(batch);
        let writing = Writing { batch, statements: &self.statements, replay: self.replay, rows_max: self.rows_max };
        if self.connection.as_ref().is_none_or(Connection::is_closed) {
            self.connection = None;
        }
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => none.insert(self.config.connect().await?),
        };
        let transaction = Transaction::begin(connection).await?;
        let (transaction, written, refused) = if apart {
            isolate(transaction, &writing, &mut folded).await?
        } else {
            let (transaction, written) = writing.write(transaction, &folded.winners()).await?;
            (transaction, written, Vec::new())
        };
        if let Some(last) = refused.last() {
            let refusal = last.error.to_string();
            if let Err(failure) = self.config.breaker.check(refused.len() as u64, &refusal) {
                return Ok(Attempt::Tripped(failure));
            }
        }
        transaction.commit().await?;
        Ok(Attempt::Done(written, folded, refused))
    }

    fn applied(&mut self, mut batch: Batch, written: Written, folded: &Folded, refused: Vec<Refused>) -> Applied {
        let sent = written.applied + written.stale + written.ties;
        self.replay = (written.stale + written.ties) * 2 > sent;
        self.config.breaker.count(refused.len() as u64);
        let (superseded, repeated, ties) = folded_away(folded, &batch);
        let table = &self.config.layout.table;
        let mut rejects: Vec<(usize, Reject)> = refused
            .into_iter()
            .map(|r| {
                let message = format!("table {table}: {}", r.error);
                let node = self.config.layout.node.clone();
                (r.row as usize, Reject { node, reason: "database", message })
            })
            .collect();
        rejects.sort_by_key(|(row, _)| *row);
        let tombstones = (0..batch.len() as u32).filter(|row| batch.deleted(*row)).count() as u64;
        batch.clear();
        let applied = Applied {
            rows: written.applied,
            superseded,
            stale: written.stale + repeated,
            ties: written.ties + ties,
            tombstones,
            rejects,
            batch,
        };
        self.report_ties(applied.ties);
        applied
    }

    fn report_ties(&mut self, ties: u64) {
        self.ties += ties;
        let due = self.ties_reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY);
        if self.ties > 0 && due {
            tracing::warn!(
                node = %self.config.layout.node,
                table = %self.config.layout.table,
                ties = self.ties,
                "records came with a version that their row has already, and other content: the first one stays"
            );
            (self.ties, self.ties_reported) = (0, Some(Instant::now()));
        }
    }

    fn fatal(&self, error: &Error) -> Failure {
        let layout = &self.config.layout;
        Failure::stopped(format!(
            "sink {}: table {}: {error}; nothing of this batch was written",
            layout.node, layout.table
        ))
    }

    /// Says goodbye to the server.
    pub async fn close(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.close().await;
        }
    }
}

/// A stretch of attempts that failed for reasons that pass.
struct Outage {
    since: Instant,
    attempts: u32,
    reported: Option<Instant>,
}

impl Outage {
    fn new() -> Outage {
        Outage { since: Instant::now(), attempts: 0, reported: None }
    }

    /// Notes a failed attempt; answers how long to wait before the next.
    fn again(&mut self, node: &str, error: &Error, status: &Status) -> Duration {
        self.attempts += 1;
        status.wait(Some(Waiting { since: self.since, attempts: self.attempts, reason: error.to_string() }));
        // A deadlock or a lost connection usually passes at once: not worth a line.
        let due = self.reported.map_or(self.attempts > 2, |at| at.elapsed() >= REPORT_EVERY);
        if due {
            self.reported = Some(Instant::now());
            tracing::warn!(%node, attempts = self.attempts, seconds = self.since.elapsed().as_secs(), %error,
                "the database did not take a batch; trying again until it does");
        }
        let pause = PAUSE_MIN * 2u32.saturating_pow(self.attempts - 1).min(1 << 10);
        // Two writers in each other's way must not come back at the same moment.
        let jitter = RandomState::new().hash_one(self.attempts) % 50;
        pause.min(PAUSE_MAX) * (75 + jitter as u32) / 100
    }

    fn over(&self, node: &str) {
        if self.reported.is_some() {
            tracing::info!(%node, attempts = self.attempts, seconds = self.since.elapsed().as_secs(),
                "the database takes batches again");
        }
    }
}
