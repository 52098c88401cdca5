//! The Postgres sink on a real server.

mod faults;
mod fixture;
mod ledger;
mod modes;
mod preflight;
mod progress;
pub mod proxy;
mod rows;
mod server;
mod types;
