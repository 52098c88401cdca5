//! The Postgres sink on a real server.

mod faults;
mod fixture;
mod preflight;
mod proxy;
mod rows;
mod types;
