//! Whole jobs: the `semel` binary on a real broker and a real Postgres, with the faults that a job meets.

mod aborted;
mod audit;
mod beside;
mod brokers;
mod churn;
mod dead_letters;
mod failover;
mod guarantees;
pub mod harness;
mod instances;
mod kafka_proxy;
mod kill;
mod ledger;
mod outages;
mod past;
mod positions;
mod records;
mod refusals;
mod requests;
mod reset;
mod rights;
mod rows;
mod soak;
mod standby;
mod transactions;
mod twins;
mod zombies;
