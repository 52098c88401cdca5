//! The writer: a thread of its own with the connection, so that the worker goes on polling Kafka while the database
//! works or is away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use tokio::sync::{mpsc, watch};

use super::address::Address;
use super::batch::Batch;
use super::breaker::Breaker;
use super::connect::Connection;
use super::error::Error;
use super::layout::Layout;
use super::ledger::LedgerTable;
use super::offsets::{Letter, Moves, StageName};
use super::status::Status;
use super::task::Task;
use crate::error::Failure;
use crate::reject::Reject;

/// What a writer needs to know.
#[derive(Clone, Debug)]
pub struct WriterConfig {
    pub address: Address,
    pub layout: Arc<Layout>,
    pub ledger: Option<LedgerTable>,
    /// Whose positions are kept beside the rows; none where Kafka keeps them.
    pub progress: Option<StageName>,
    /// `false` behind a pooler in transaction mode.
    pub prepared: bool,
    pub breaker: Arc<Breaker>,
}

impl WriterConfig {
    pub(super) async fn connect(&self) -> Result<Connection, Error> {
        Connection::reopen(&self.address, self.prepared).await
    }
}

/// What became of a batch: its rows are committed. Each record is counted once, in `rows`, `superseded`, `stale`,
/// `ties`, `duplicates` or `rejects`.
#[derive(Debug)]
pub struct Applied {
    /// Rows inserted or updated.
    pub rows: u64,
    /// Records whose key had a newer version in the same batch.
    pub superseded: u64,
    /// Records whose version the table had already, or a higher one.
    pub stale: u64,
    /// Records whose version the table (or the batch) had already with other content: the first one stays.
    pub ties: u64,
    /// Records whose events the ledger knew, or that stood in the batch before.
    pub duplicates: u64,
    /// Records of the batch that are tombstones, whatever became of them.
    pub tombstones: u64,
    /// Records that the database refused, by their index in the batch, ascending.
    pub rejects: Vec<(usize, Reject)>,
    /// Dead letters that were committed with the rows and wait to be relayed.
    pub letters: Vec<Letter>,
    /// Its positions were not where the transaction began, or belong to another by now: nothing of it is committed.
    pub fenced: bool,
    /// The batch, empty, to be filled again.
    pub batch: Batch,
}

/// What a writer is asked to do in one transaction.
#[derive(Debug)]
pub struct Job {
    pub batch: Batch,
    pub moves: Moves,
}

/// A handle on a writer's thread. Dropped, the thread ends after the batch it is at; waiting for a database that is
/// away ends at once.
#[derive(Debug)]
pub struct Writer {
    jobs: mpsc::UnboundedSender<Job>,
    answers: Receiver<Result<Applied, Failure>>,
    status: Arc<Status>,
    in_flight: usize,
    _stop: watch::Sender<()>,
}

impl Writer {
    /// Starts the thread. It connects when the first batch comes.
    pub fn spawn(config: WriterConfig) -> Writer {
        let (jobs, queue) = mpsc::unbounded_channel();
        let (answer, answers) = bounded(1024);
        let (stop, stopped) = watch::channel(());
        let status = Arc::new(Status::default());
        let task = Task::new(config, Arc::clone(&status), stopped);
        std::thread::Builder::new()
            .name("semel-postgres".into())
            .spawn(move || run(task, queue, answer))
            .expect("the system has threads");
        Writer { jobs, answers, status, in_flight: 0, _stop: stop }
    }

    /// Hands a batch over. Batches are written in order, each in its own transaction; nothing blocks here.
    pub fn submit(&mut self, batch: Batch) {
        self.submit_with(batch, Moves::default());
    }

    /// The same, with what else the transaction does.
    pub fn submit_with(&mut self, batch: Batch, moves: Moves) {
        self.in_flight += 1;
        // A thread that ended has left its failure for `poll`.
        let _ = self.jobs.send(Job { batch, moves });
    }

    /// Batches that were handed over and not yet answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Waits up to `timeout` for the answer to the oldest batch. Outages are not answered but waited out (and shown in
    /// [`status`](Writer::status)). After a failure the writer is done: nothing of that batch is committed, nor of
    /// later ones.
    pub fn poll(&mut self, timeout: Duration) -> Option<Result<Applied, Failure>> {
        match self.answers.recv_timeout(timeout) {
            Ok(answer) => {
                self.in_flight -= 1;
                Some(answer)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(Failure::stopped("the Postgres writer has ended"))),
        }
    }

    /// Counters and whether it waits for the database; for displays, may be kept.
    pub fn status(&self) -> &Arc<Status> {
        &self.status
    }
}

fn run(mut task: Task, mut queue: mpsc::UnboundedReceiver<Job>, answer: Sender<Result<Applied, Failure>>) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            let _ = answer.send(Err(Failure::stopped(format!("no runtime for the Postgres writer: {e}"))));
            return;
        }
    };
    runtime.block_on(async {
        loop {
            let job = tokio::select! {
                job = queue.recv() => job,
                never = task.keep_up() => match never {},
            };
            let Some(job) = job else { break };
            let started = Instant::now();
            // None: the handle is gone, and with it whoever wanted to know.
            let Some(result) = task.write(job).await else { break };
            let failed = result.is_err();
            if let Ok(applied) = &result {
                task.status().count(applied, started.elapsed());
            }
            if answer.send(result).is_err() || failed {
                break;
            }
        }
        task.close().await;
    });
}
