//! The operators of a Kafka stage, and the pipeline that runs a record through them: whole, or rejected whole.

mod aggregate;
mod changelog;
mod closing;
mod coding;
mod counts;
mod filter;
mod flat_map;
mod fold;
mod join;
mod join_tables;
mod key;
mod number;
mod partition;
mod pipeline;
mod record;
mod rekey;
mod remap;
mod route;
pub mod row;
mod scalar;
mod sessions;
mod sink;
mod source;
mod state;
mod steps;
mod table;
#[cfg(test)]
mod tests;
mod time;
mod windows;

pub use aggregate::Stamp;
pub use closing::Closed;
pub use counts::{Counts, NodeCounts};
pub use partition::{murmur2, partition};
pub use pipeline::{Environment, Outcome, Pipeline, Stop};
pub use sink::ORIGIN;
pub use state::{Memory, Store, StoreId, Writes};

use record::{Key, Pool, Record, Slot};
