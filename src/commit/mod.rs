//! The commit protocol without I/O: what a committer does next (`protocol`) and what a worker knows of its positions
//! (`progress`). A seeded random simulation drives both through every fault.

pub mod metadata;
pub mod progress;
pub mod protocol;

#[cfg(test)]
pub(crate) mod simulation;

/// A run of work between two rewinds. Everything that a worker hands over carries its epoch; an abort kills the epoch,
/// and what still arrives of it is discarded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

impl Epoch {
    pub fn next(self) -> Epoch {
        Epoch(self.0 + 1)
    }
}

/// Which of a committer's two producers. They are used in turn, so that a transaction never meets the markers of the
/// one before (CONCURRENT_TRANSACTIONS and its back-off).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    A,
    B,
}

impl Side {
    pub fn other(self) -> Side {
        match self {
            Side::A => Side::B,
            Side::B => Side::A,
        }
    }

    pub fn index(self) -> usize {
        self as usize
    }
}

/// Why a worker has to go back to the committed positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The transaction failed, or its outcome is unknown: the broker's positions tell.
    Aborted,
    /// The group moved on: poll until this member has joined again.
    Rejoin,
    /// The broker refused a record of the batch for this reason.
    Record(&'static str),
    /// The worker itself gave the epoch up (partitions lost, or a drain that took too long).
    Abandoned,
}
