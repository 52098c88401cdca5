//! The Postgres sink: tables kept right by version-guarded upserts.
//!
//! A record's row is inserted, or replaces the row of its key if its version is higher. Redelivered records meet that
//! guard and change nothing, so that committing the batch here and the positions in Kafka afterwards is enough.
//! A delete is a row too, a tombstone with a version, or a late older record would bring the row back.
//!
//! [`preflight`] looks at the table before anything runs. Rows go into a [`Batch`], which checks their values; a
//! [`Writer`] writes it in one transaction on a thread of its own.

mod address;
mod batch;
mod bisect;
mod breaker;
mod catalog;
mod connect;
mod create;
mod error;
mod fold;
mod jsonb;
mod layout;
mod ledger;
mod ledger_check;
mod offsets;
mod partitions;
mod preflight;
mod problems;
mod sql;
mod status;
mod store;
mod task;
mod temporal;
mod transaction;
mod upkeep;
mod value;
mod write;
mod writer;

pub use address::Address;
pub use batch::Batch;
pub use breaker::Breaker;
pub use connect::{Connection, session};
pub use create::{Sample, create_ledger, create_table, samples};
pub use fold::Folded;
pub use layout::{Column, Layout, Type};
pub use ledger::LedgerTable;
pub use offsets::{
    Advance, CREATE_LETTERS, CREATE_OFFSETS, Claim, LETTERS, Letter, Moves, OFFSETS, Origin, Refused, Seed, StageName,
};
pub use preflight::{Checked, preflight};
pub use status::{Counts, Status, Waiting};
pub use store::Store;
pub use writer::{Applied, Writer, WriterConfig};
