//! What runs between a worker and its committer. Messages travel unbounded and in order; memory is bounded by bytes: a
//! worker reads no further record while `bytes` is at its limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};

use crate::chunk::Chunk;
use crate::commit::progress::{BatchId, Sealed};
use crate::commit::{Cause, Epoch};
use crate::error::Failure;
use crate::observe::status::Gauge;

/// From a worker to its committer.
#[derive(Debug)]
pub enum ToCommitter {
    Outputs { epoch: Epoch, chunk: Chunk },
    Seal { sealed: Sealed, at: Instant },
    Abandon { epoch: Epoch },
    Close,
}

/// From a committer to its worker.
#[derive(Debug)]
pub enum ToWorker {
    Committed(BatchId),
    /// Nothing of `epoch` or older is open or will be committed.
    Report {
        epoch: Epoch,
        cause: Cause,
    },
    /// An empty chunk to fill again.
    Buffer(Chunk),
    /// The committer gave up.
    Failed(Failure),
    Closed,
}

#[derive(Debug, Default)]
struct Shared {
    /// Highest epoch given up, plus one; 0 is none.
    dead: AtomicU64,
    bytes: AtomicUsize,
    /// The worker's part of [`StageStatus::owed`](crate::observe::status::StageStatus).
    owed: Gauge,
    closed: AtomicBool,
}

/// The worker's end.
#[derive(Debug)]
pub struct WorkerEnd {
    pub work: Sender<ToCommitter>,
    pub messages: Receiver<ToWorker>,
    shared: Arc<Shared>,
}

/// The committer's end.
#[derive(Debug)]
pub struct CommitterEnd {
    pub work: Receiver<ToCommitter>,
    pub messages: Sender<ToWorker>,
    shared: Arc<Shared>,
}

/// A pair of ends.
pub fn link() -> (WorkerEnd, CommitterEnd) {
    let (work_in, work_out) = crossbeam_channel::unbounded();
    let (messages_in, messages_out) = crossbeam_channel::unbounded();
    let shared = Arc::new(Shared::default());
    (
        WorkerEnd { work: work_in, messages: messages_out, shared: Arc::clone(&shared) },
        CommitterEnd { work: work_out, messages: messages_in, shared },
    )
}

impl WorkerEnd {
    /// Hands outputs over. A committer that is gone has said why in `messages`.
    pub fn outputs(&self, epoch: Epoch, chunk: Chunk) {
        self.shared.bytes.fetch_add(chunk.bytes_len(), Ordering::Relaxed);
        let _ = self.work.send(ToCommitter::Outputs { epoch, chunk });
    }

    /// Gives an epoch up. From here on the committer sends no positions of it, wherever it stands.
    pub fn abandon(&self, epoch: Epoch) {
        self.shared.dead.fetch_max(epoch.0 + 1, Ordering::SeqCst);
        let _ = self.work.send(ToCommitter::Abandon { epoch });
    }

    /// No more work comes; what is not sealed is given up.
    pub fn close(&self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        let _ = self.work.send(ToCommitter::Close);
    }

    /// Outputs whose positions are committed before them, and that are not acknowledged.
    pub fn owed(&self) -> &Gauge {
        &self.shared.owed
    }

    /// Bytes handed over that are not produced yet.
    pub fn bytes(&self) -> usize {
        self.shared.bytes.load(Ordering::Relaxed)
    }
}

impl CommitterEnd {
    /// Whether the worker gave `epoch` up. To be asked after the group metadata was taken.
    pub fn is_dead(&self, epoch: Epoch) -> bool {
        self.shared.dead.load(Ordering::SeqCst) > epoch.0
    }

    /// Whether the worker is gone: nobody waits for producers that have to be made anew.
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::SeqCst)
    }

    /// [`WorkerEnd::owed`]
    pub fn owed(&self) -> &Gauge {
        &self.shared.owed
    }

    /// Gives a chunk's buffer back.
    pub fn recycle(&self, mut chunk: Chunk) {
        self.shared.bytes.fetch_sub(chunk.bytes_len(), Ordering::Relaxed);
        chunk.clear();
        let _ = self.messages.send(ToWorker::Buffer(chunk));
    }
}
