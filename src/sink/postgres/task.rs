//! Writing batches for as long as it takes: attempts, waits between them, and what ends them.

use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::batch::Batch;
use super::bisect::isolate;
use super::connect::Connection;
use super::error::{Class, Error};
use super::fold::Folded;
use super::ledger::Sifted;
use super::offsets::{self, Letter, Moves};
use super::partitions::Window;
use super::sql::Statements;
use super::status::{Status, Waiting};
use super::transaction::Transaction;
use super::upkeep::Upkeep;
use super::write::{Writing, Written, folded_away};
use super::writer::{Applied, Job, WriterConfig};
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
    timeline: Option<String>,
    /// Most of the last batch was in the table already.
    replay: bool,
    /// Rows a statement: lowered when statements take too long.
    rows_max: usize,
    ties: u64,
    ties_reported: Option<Instant>,
    upkeep: Upkeep,
}

enum Attempt {
    Done(Effect),
    /// Its positions are somebody else's, or were advanced by an earlier attempt whose answer got lost.
    Fenced,
    /// Too many rejects: nothing was committed.
    Tripped(Failure),
}

/// What became of a batch's rows within a transaction.
#[derive(Default)]
struct Effect {
    written: Written,
    superseded: u64,
    repeated: u64,
    ties: u64,
    /// Rows whose events had their effect before.
    duplicates: Vec<u32>,
    /// Rows with the reason and what was wrong.
    rejects: Vec<(u32, &'static str, String)>,
    letters: Vec<Letter>,
    fenced: bool,
}

impl Task {
    pub fn new(config: WriterConfig, status: Arc<Status>, stopped: watch::Receiver<()>) -> Task {
        let statements = Statements::new(&config.layout);
        Task {
            upkeep: Upkeep::new(&config),
            config,
            statements,
            status,
            stopped,
            connection: None,
            timeline: None,
            replay: false,
            rows_max: usize::MAX,
            ties: 0,
            ties_reported: None,
        }
    }

    pub fn status(&self) -> &Status {
        &self.status
    }

    /// Writes a batch in one transaction, again and again through outages. `None`: the writer was told to stop while it
    /// waited.
    pub async fn write(&mut self, job: Job) -> Option<Result<Applied, Failure>> {
        let mut outage: Option<Outage> = None;
        let mut apart = false;
        let mut too_much = 0;
        loop {
            let error = match self.attempt(&job, apart).await {
                Ok(Attempt::Done(effect)) => {
                    if let Some(outage) = outage {
                        outage.over(&self.config.layout.node);
                    }
                    self.status.wait(None);
                    self.rows_max = self.rows_max.saturating_mul(2);
                    return Some(Ok(self.applied(job.batch, effect)));
                }
                Ok(Attempt::Fenced) => {
                    self.status.wait(None);
                    let node = &self.config.layout.node;
                    tracing::warn!(%node, moves = ?job.moves, "positions in the database have moved; the batch is dropped");
                    return Some(Ok(self.applied(job.batch, Effect { fenced: true, ..Effect::default() })));
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
                self.rows_max = (self.rows_max.min(job.batch.len()) / 2).max(1);
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
    async fn attempt(&mut self, job: &Job, apart: bool) -> Result<Attempt, Error> {
        if self.connection.as_ref().is_none_or(Connection::is_closed) {
            self.connection = None;
        }
        if self.connection.is_none() {
            let connection = self.config.connect().await?;
            if self.config.progress.is_none() {
                self.compare_timelines(connection.timeline().await);
            }
            self.connection = Some(connection);
            self.upkeep.reconnected();
        }
        let Some(connection) = &mut self.connection else { unreachable!("it was just opened") };
        let window = self.upkeep.window(connection).await?;
        let batch = &job.batch;
        let writing = Writing { batch, statements: &self.statements, replay: self.replay, rows_max: self.rows_max };
        let mut transaction = Transaction::begin(connection).await?;
        if let Some(name) = &self.config.progress {
            let ours;
            (transaction, ours) = offsets::advance(transaction, name, &job.moves.advances).await?;
            if !ours {
                // The owner may be waiting for these rows.
                transaction.rollback().await?;
                return Ok(Attempt::Fenced);
            }
        }
        let (mut transaction, mut effect) = effect(transaction, &self.config, &writing, window, apart).await?;
        if let Some((_, _, last)) = effect.rejects.last()
            && let Err(failure) = self.config.breaker.check(effect.rejects.len() as u64, last)
        {
            return Ok(Attempt::Tripped(failure));
        }
        if let Some(name) = &self.config.progress {
            match letters(&self.config, &job.moves, &effect) {
                Ok(letters) => effect.letters = letters,
                Err(failure) => return Ok(Attempt::Tripped(failure)),
            }
            transaction = offsets::keep(transaction, name, &effect.letters).await?;
            if !job.moves.relayed.is_empty() {
                transaction = offsets::relayed(transaction, name, &job.moves.relayed).await?;
            }
        }
        transaction.commit().await?;
        Ok(Attempt::Done(effect))
    }

    /// Positions in Kafka do not go back with a database: all that can be done here is to say so.
    fn compare_timelines(&mut self, now: Option<String>) {
        if let (Some(before), Some(now)) = (&self.timeline, &now)
            && before != now
        {
            tracing::warn!(
                node = %self.config.layout.node, before, now,
                "a standby was promoted, or a backup put back: rows that were acknowledged last may be missing here, while \
                 the positions in Kafka stand past them; semel reset sets the stage back to a time before"
            );
        }
        self.timeline = now.or(self.timeline.take());
    }

    fn applied(&mut self, mut batch: Batch, effect: Effect) -> Applied {
        let written = effect.written;
        let sent = written.applied + written.stale + written.ties;
        if sent > 0 {
            self.replay = (written.stale + written.ties) * 2 > sent;
        }
        self.config.breaker.count(effect.rejects.len() as u64);
        let mut rejects = rejects(&self.config, &effect);
        let layout = &self.config.layout;
        rejects.sort_by_key(|(row, _)| *row);
        for id in effect.duplicates.iter().filter_map(|row| batch.id(*row)) {
            tracing::debug!(node = %layout.node, %id, "duplicate, skipped");
        }
        let tombstones = (0..batch.len() as u32).filter(|row| batch.deleted(*row)).count() as u64;
        batch.clear();
        let applied = Applied {
            rows: written.applied,
            superseded: effect.superseded,
            stale: written.stale + effect.repeated,
            ties: written.ties + effect.ties,
            duplicates: effect.duplicates.len() as u64,
            tombstones,
            rejects,
            letters: effect.letters,
            fenced: effect.fenced,
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

    /// Keeps the ledger in shape, also while no batch comes. Never ends.
    pub async fn keep_up(&mut self) -> Infallible {
        self.upkeep.run(&self.status).await
    }

    /// Says goodbye to the server.
    pub async fn close(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.close().await;
        }
    }
}

/// The letters of a transaction: of records that became no row, and of rows that the database refused.
fn letters(config: &WriterConfig, moves: &Moves, effect: &Effect) -> Result<Vec<Letter>, Failure> {
    let mut letters = moves.letters.clone();
    if let Some(refused) = &moves.refused {
        for (row, reject) in rejects(config, effect) {
            letters.extend(refused(row, &reject)?);
        }
    }
    Ok(letters)
}

fn rejects(config: &WriterConfig, effect: &Effect) -> Vec<(usize, Reject)> {
    let layout = &config.layout;
    let reject = |(row, reason, message): &(u32, &'static str, String)| {
        let message = format!("table {}: {message}", layout.table);
        (*row as usize, Reject { node: layout.node.clone(), reason, message })
    };
    effect.rejects.iter().map(reject).collect()
}

/// Writes the rows of a batch that are to be written. With a ledger these are the ones whose events it does not know;
/// what the database refuses of them is struck out of it again, and another row of such an event has its turn.
async fn effect<'c>(
    mut transaction: Transaction<'c>,
    config: &WriterConfig,
    writing: &Writing<'_>,
    window: Option<Window>,
    apart: bool,
) -> Result<(Transaction<'c>, Effect), Error> {
    let mut effect = Effect::default();
    let mut rows: Vec<u32> = (0..writing.batch.len() as u32).collect();
    while !rows.is_empty() {
        let mut sifted = Sifted::default();
        match &config.ledger {
            Some(ledger) => (transaction, sifted) = ledger.sift(transaction, writing.batch, &rows, window).await?,
            None => sifted.fresh = std::mem::take(&mut rows),
        }
        let mut folded = Folded::new(writing.batch, &sifted.fresh);
        let (written, mut refused) = (&mut effect.written, Vec::new());
        let added;
        if apart {
            (transaction, added, refused) = isolate(transaction, writing, &mut folded).await?;
        } else {
            (transaction, added) = writing.write(transaction, &folded.winners()).await?;
        }
        written.add(added);
        let (superseded, repeated, ties) = folded_away(&folded, writing.batch);
        effect.superseded += superseded;
        effect.repeated += repeated;
        effect.ties += ties;
        if let Some(ledger) = config.ledger.as_ref().filter(|_| !refused.is_empty()) {
            transaction = ledger.forget(transaction, writing.batch, refused.iter().map(|r| r.row)).await?;
        }
        rows = refused.iter().flat_map(|r| sifted.repeats.remove(&r.row).unwrap_or_default()).collect();
        effect.duplicates.append(&mut sifted.duplicates);
        effect.duplicates.extend(sifted.repeats.into_values().flatten());
        effect.rejects.extend(refused.into_iter().map(|r| (r.row, "database", r.error.to_string())));
        effect.rejects.extend(sifted.outside.into_iter().map(|row| {
            let message = "the time in the event's id is outside what the ledger remembers".to_owned();
            (row, "outside-ledger", message)
        }));
    }
    Ok((transaction, effect))
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
