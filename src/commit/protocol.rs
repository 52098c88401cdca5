//! The committer as a state machine: state × event → the next effect. The driver (`runtime::committer`) carries effects
//! out one at a time and feeds back what came of them; the simulation does the same on a modelled broker.
//!
//! ```text
//!            Outputs                 Seal
//!   Idle ──▶ Begin ──▶ Open ⇄ Produce  ──▶ Flush ──▶ SendOffsets ──▶ Commit ──▶ Acknowledge ──▶ Idle
//!                       │ abortable            │            │           │
//!                       ▼                      ▼            ▼           ▼ fatal, fenced, outcome unknown
//!                     Abort ──────────────────────────────────────▶ Rebuild ──▶ Report ──▶ Idle
//! ```
//!
//! Sources: KIP-98, KIP-447; librdkafka's INTRODUCTION, "Transactional producer", on the three error flags.

use crate::commit::{Cause, Epoch, Side};
use crate::error::{Disposition, Exit};

/// What a worker hands over, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Outputs of the open batch.
    Outputs { epoch: Epoch },
    /// The batch ends: commit its positions.
    Seal { epoch: Epoch },
    /// The worker gave this epoch up: nothing of it may be committed any more.
    Abandon { epoch: Epoch },
    /// No more work comes. A rebuild may be given up for it.
    Close,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Received(Work),
    /// The last effect succeeded.
    Done,
    /// The last effect failed; `Retry` means that nothing was decided yet.
    Failed(Disposition),
}

/// What to do next, one thing at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Wait for work.
    Receive,
    Begin(Side),
    /// Produce the outputs just received.
    Produce(Side),
    /// Drop the work just received: its epoch is dead.
    Discard,
    /// Wait until every record is acknowledged.
    Flush(Side),
    /// Take the group metadata, *then* look whether the epoch was given up, then send the positions.
    SendOffsets(Side),
    /// End the transaction. The driver looks once more whether the epoch was given up.
    Commit(Side),
    Abort(Side),
    /// Replace both producers on the same transactional ids and initialise them, which resolves what they left.
    Rebuild {
        first: Await,
    },
    /// Tell the worker that the sealed batch is committed.
    Acknowledge,
    /// Tell the worker that nothing of `epoch` or older is open or will be committed.
    Report {
        epoch: Epoch,
        cause: Cause,
    },
    /// Give up with this exit status.
    Stop(Exit),
    /// All work is done.
    End,
}

/// What a rebuild waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Await {
    Nothing,
    /// The consumer is a member again: a member that was only asleep does not fence the one that took its place.
    Generation,
    /// It is so late (ms): whoever fenced us may still be taking our ids. Taken in turn with it, each of us would hold one
    /// of the two, and both would be fenced a second time.
    Until(u64),
}

/// How long a process that was fenced leaves its ids to whoever took them: longer than it takes to initialise both.
const FENCED_PAUSE_MS: u64 = 2_000;

/// How many transaction timeouts apart two fencings must be to count as two accidents instead of a twin.
const TWIN_TIMEOUTS: u64 = 5;

/// Aborts in a row before the producers are rebuilt.
const ABORTS_MAX: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Beginning {
        epoch: Epoch,
        sealed: bool,
    },
    Open {
        epoch: Epoch,
    },
    Producing {
        epoch: Epoch,
    },
    Flushing {
        epoch: Epoch,
    },
    SendingOffsets {
        epoch: Epoch,
    },
    Committing {
        epoch: Epoch,
    },
    Acknowledging,
    Aborting {
        epoch: Epoch,
        cause: Cause,
    },
    /// `report` is empty where only the producers are in doubt, not a batch.
    Rebuilding {
        report: Option<(Epoch, Cause)>,
        first: Await,
    },
    Discarding,
    Reporting,
    Ended,
}

/// The committer's state.
#[derive(Clone, Debug)]
pub struct Protocol {
    transaction_timeout_ms: u64,
    state: State,
    side: Side,
    /// Work of this epoch and older is discarded.
    dead: Option<Epoch>,
    /// When the open transaction began.
    began_ms: u64,
    /// When the step under way was first tried; its retries are bounded from here.
    step_ms: u64,
    /// A commit or abort saw a timeout: its EndTxn may still be on its way and could end the next transaction of the
    /// same producer (librdkafka #5423), so both are rebuilt before the next begin.
    doubtful: bool,
    fenced_ms: Option<u64>,
    /// Aborts since the last commit. A client whose picture of the cluster went wrong (a leader that it never finds
    /// again) fails every transaction alike; new producers look anew.
    aborts: u32,
    closing: bool,
}

impl Protocol {
    /// A committer whose producers are initialised. `transaction_timeout_ms` is the producers' own.
    pub fn new(transaction_timeout_ms: u64) -> Protocol {
        Protocol {
            transaction_timeout_ms,
            state: State::Idle,
            side: Side::A,
            dead: None,
            began_ms: 0,
            step_ms: 0,
            doubtful: false,
            fenced_ms: None,
            aborts: 0,
            closing: false,
        }
    }

    /// The first effect.
    pub fn start(&self) -> Effect {
        Effect::Receive
    }

    /// The epoch of the open transaction.
    pub fn epoch(&self) -> Option<Epoch> {
        match self.state {
            State::Beginning { epoch, .. }
            | State::Open { epoch }
            | State::Producing { epoch }
            | State::Flushing { epoch }
            | State::SendingOffsets { epoch }
            | State::Committing { epoch }
            | State::Aborting { epoch, .. } => Some(epoch),
            _ => None,
        }
    }

    /// Takes what came of the last effect and answers the next one. `now_ms` only ever rises.
    pub fn on(&mut self, event: Event, now_ms: u64) -> Effect {
        match event {
            Event::Received(work) => self.received(work, now_ms),
            Event::Done => self.done(now_ms),
            Event::Failed(disposition) => self.failed(disposition, now_ms),
        }
    }

    fn received(&mut self, work: Work, now_ms: u64) -> Effect {
        let given_up = work == Work::Close && matches!(self.state, State::Rebuilding { .. });
        let ready = given_up || matches!(self.state, State::Idle | State::Open { .. });
        assert!(ready, "work taken in state {:?}", self.state);
        match work {
            Work::Outputs { epoch } | Work::Seal { epoch } if self.dead.is_some_and(|dead| epoch <= dead) => {
                assert_eq!(self.state, State::Idle, "work of a dead epoch behind a live one");
                self.discard()
            }
            Work::Outputs { epoch } => match self.state {
                State::Open { epoch: open } => {
                    assert_eq!(open, epoch, "outputs of another epoch in one transaction");
                    self.step_ms = now_ms;
                    self.state = State::Producing { epoch };
                    Effect::Produce(self.side)
                }
                _ => self.begin(epoch, false, now_ms),
            },
            Work::Seal { epoch } => match self.state {
                State::Open { epoch: open } => {
                    assert_eq!(open, epoch, "a seal of another epoch");
                    self.flush(epoch, now_ms)
                }
                _ => self.begin(epoch, true, now_ms),
            },
            Work::Abandon { epoch } => {
                self.dead = self.dead.max(Some(epoch));
                match self.state {
                    State::Open { epoch: open } => self.abort(open.max(epoch), Cause::Abandoned, now_ms),
                    _ => self.report(epoch, Cause::Abandoned),
                }
            }
            Work::Close => {
                self.closing = true;
                match self.state {
                    State::Open { epoch } => self.abort(epoch, Cause::Abandoned, now_ms),
                    _ => self.end(),
                }
            }
        }
    }

    fn done(&mut self, now_ms: u64) -> Effect {
        match self.state {
            State::Beginning { epoch, sealed: true } => self.flush(epoch, now_ms),
            State::Beginning { epoch, sealed: false } => {
                self.state = State::Producing { epoch };
                Effect::Produce(self.side)
            }
            State::Producing { epoch } => {
                self.state = State::Open { epoch };
                Effect::Receive
            }
            State::Flushing { epoch } => {
                self.state = State::SendingOffsets { epoch };
                self.step_ms = now_ms;
                Effect::SendOffsets(self.side)
            }
            State::SendingOffsets { epoch } => {
                self.state = State::Committing { epoch };
                self.step_ms = now_ms;
                Effect::Commit(self.side)
            }
            State::Committing { .. } => {
                self.state = State::Acknowledging;
                self.aborts = 0;
                self.side = self.side.other();
                Effect::Acknowledge
            }
            State::Acknowledging if self.doubtful => self.rebuild(None, Await::Nothing),
            State::Aborting { epoch, cause } => {
                self.aborts += 1;
                if self.doubtful || self.aborts >= ABORTS_MAX {
                    self.aborts = 0;
                    return self.rebuild(Some((epoch, cause)), Await::Nothing);
                }
                self.report(epoch, cause)
            }
            State::Rebuilding { report, .. } => {
                self.doubtful = false;
                self.side = Side::A;
                match report {
                    Some((epoch, cause)) => self.report(epoch, cause),
                    None => self.idle(),
                }
            }
            State::Acknowledging | State::Discarding | State::Reporting => self.idle(),
            State::Idle | State::Open { .. } | State::Ended => {
                unreachable!("nothing was under way in {:?}", self.state)
            }
        }
    }

    fn failed(&mut self, disposition: Disposition, now_ms: u64) -> Effect {
        let overdue = now_ms.saturating_sub(self.step_ms) >= self.transaction_timeout_ms;
        match (self.state, disposition) {
            (_, Disposition::Fatal(exit)) => {
                self.state = State::Ended;
                Effect::Stop(exit)
            }
            (State::Rebuilding { .. }, Disposition::Fenced) => self.fenced(now_ms),
            // The driver pauses between tries.
            (State::Rebuilding { first, .. }, _) => Effect::Rebuild { first },

            (State::Committing { .. }, Disposition::Retry) => {
                self.doubtful = true;
                if overdue { self.unknown() } else { Effect::Commit(self.side) }
            }
            (State::Aborting { .. }, Disposition::Retry) => {
                self.doubtful = true;
                if overdue { self.unknown() } else { Effect::Abort(self.side) }
            }
            (State::Aborting { .. }, Disposition::Fenced) => self.fenced(now_ms),
            (State::Aborting { .. }, _) => self.unknown(),

            (State::Beginning { .. }, Disposition::Retry) if !overdue => Effect::Begin(self.side),
            (State::Flushing { .. }, Disposition::Retry) if !overdue => Effect::Flush(self.side),
            (State::SendingOffsets { .. }, Disposition::Retry) if !overdue => Effect::SendOffsets(self.side),
            (State::Producing { .. }, Disposition::Retry) if !overdue => Effect::Produce(self.side),

            (_, Disposition::Fenced) => self.fenced(now_ms),
            // A transaction that could not begin has nothing to abort.
            (State::Beginning { .. }, _) | (_, Disposition::Rebuild) => self.unknown(),
            (_, Disposition::AbortTxn { rejoin: true }) => self.abort_open(Cause::Rejoin, now_ms),
            (_, Disposition::Reject { reason }) => self.abort_open(Cause::Record(reason), now_ms),
            (_, Disposition::AbortTxn { rejoin: false } | Disposition::Retry) => {
                self.abort_open(Cause::Aborted, now_ms)
            }
        }
    }

    fn begin(&mut self, epoch: Epoch, sealed: bool, now_ms: u64) -> Effect {
        self.state = State::Beginning { epoch, sealed };
        self.began_ms = now_ms;
        self.step_ms = now_ms;
        Effect::Begin(self.side)
    }

    fn flush(&mut self, epoch: Epoch, now_ms: u64) -> Effect {
        self.state = State::Flushing { epoch };
        self.step_ms = now_ms;
        Effect::Flush(self.side)
    }

    fn abort_open(&mut self, cause: Cause, now_ms: u64) -> Effect {
        let epoch = self.epoch().expect("only an open transaction fails");
        self.abort(epoch, cause, now_ms)
    }

    fn abort(&mut self, epoch: Epoch, cause: Cause, now_ms: u64) -> Effect {
        self.dead = self.dead.max(Some(epoch));
        self.state = State::Aborting { epoch, cause };
        self.step_ms = now_ms;
        Effect::Abort(self.side)
    }

    /// The outcome is unknown: `init_transactions` on the same ids resolves it at the broker, and only the broker's
    /// stable positions say what it was.
    fn unknown(&mut self) -> Effect {
        let epoch = self.epoch();
        let cause = match self.state {
            State::Aborting { cause, .. } => cause,
            _ => Cause::Aborted,
        };
        self.dead = self.dead.max(epoch);
        self.rebuild(epoch.map(|epoch| (epoch, cause)), Await::Nothing)
    }

    /// Fenced: by the broker's own timeout of a transaction that was open too long (the client lacks KIP-588), by an
    /// accident once, or by a twin.
    fn fenced(&mut self, now_ms: u64) -> Effect {
        let ours = self.epoch().is_some() && now_ms.saturating_sub(self.began_ms) > self.transaction_timeout_ms;
        let report = match self.state {
            State::Rebuilding { report, .. } => report,
            State::Aborting { epoch, cause } => Some((epoch, cause)),
            _ => self.epoch().map(|epoch| (epoch, Cause::Aborted)),
        };
        self.dead = self.dead.max(report.map(|(epoch, _)| epoch));
        if ours {
            return self.rebuild(report, Await::Generation);
        }
        let recent = TWIN_TIMEOUTS * self.transaction_timeout_ms;
        if self.fenced_ms.is_some_and(|at| now_ms.saturating_sub(at) < recent) {
            self.state = State::Ended;
            return Effect::Stop(Exit::Twin);
        }
        self.fenced_ms = Some(now_ms);
        self.rebuild(report, Await::Until(now_ms + FENCED_PAUSE_MS))
    }

    fn rebuild(&mut self, report: Option<(Epoch, Cause)>, first: Await) -> Effect {
        self.state = State::Rebuilding { report, first };
        Effect::Rebuild { first }
    }

    fn report(&mut self, epoch: Epoch, cause: Cause) -> Effect {
        self.state = State::Reporting;
        Effect::Report { epoch, cause }
    }

    fn discard(&mut self) -> Effect {
        self.state = State::Discarding;
        Effect::Discard
    }

    fn idle(&mut self) -> Effect {
        if self.closing {
            return self.end();
        }
        self.state = State::Idle;
        Effect::Receive
    }

    fn end(&mut self) -> Effect {
        self.state = State::Ended;
        Effect::End
    }
}
