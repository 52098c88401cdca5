//! Runs a plan: one job a process, one or more workers a stage, and a committer beside each worker.

pub mod app;
mod beside;
pub mod committer;
mod drain;
mod identity;
pub mod job_topic;
mod kafka_task;
mod kept;
mod let_in;
mod link;
mod moved;
pub mod past;
mod positions;
mod postgres_task;
pub mod preflight;
mod purge;
pub mod reset;
pub mod shutdown;
mod subscriptions;
mod task;
mod worker;
