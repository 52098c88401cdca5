//! What an error asks of the worker. Every error of the edges answers `disposition()`, and the worker matches it
//! without a wildcard.

/// What to do next about an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Nothing was decided: call the same thing again.
    Retry,
    /// The transaction failed: abort it, rewind, process again. `rejoin` waits for the group first.
    AbortTxn { rejoin: bool },
    /// Another process took this identity, or the broker timed the transaction out: rebuild once, then exit 6.
    Fenced,
    /// The client is dead or its outcome unknown: rebuild it on the same identity and read positions from the broker.
    Rebuild,
    /// One record cannot pass: reject it and go on.
    Reject { reason: &'static str },
    /// Nothing that a retry mends: stop with this exit status.
    Fatal(Exit),
}

/// Exit statuses (documented in `docs/reference.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Exit {
    Done = 0,
    /// Findings, or failed tests.
    Findings = 1,
    /// Refused before work: usage, configuration, a missing topic, table, column, privilege.
    Refused = 2,
    /// Broker or database unreachable at start.
    Unreachable = 3,
    /// A guarantee was broken.
    Broken = 4,
    /// Stopped while running: `on_error = "stop"`, a table gone, positions outside the log.
    Stopped = 5,
    /// Another process runs with this identity.
    Twin = 6,
    /// A second signal.
    Interrupted = 130,
}

/// An end with a message for the user and the exit status that goes with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub exit: Exit,
    /// One clear message: what is wrong, where, and the cure. May span lines (a fitting CREATE TABLE).
    pub message: String,
}

impl Failure {
    pub fn new(exit: Exit, message: impl Into<String>) -> Failure {
        Failure { exit, message: message.into() }
    }

    pub fn refused(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Refused, message)
    }

    pub fn unreachable(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Unreachable, message)
    }

    pub fn stopped(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Stopped, message)
    }
}
