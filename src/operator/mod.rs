//! The operators of a Kafka stage, and the pipeline that runs a record through them: whole, or rejected whole.

mod counts;
mod filter;
mod flat_map;
mod key;
mod partition;
mod pipeline;
mod record;
mod rekey;
mod remap;
mod route;
pub mod row;
mod scalar;
mod sink;
mod source;
mod steps;
#[cfg(test)]
mod tests;
mod time;

pub use counts::{Counts, NodeCounts};
pub use partition::{murmur2, partition};
pub use pipeline::{Environment, Outcome, Pipeline, Stop};
pub use sink::ORIGIN;

use record::{Key, Pool, Record, Slot};
