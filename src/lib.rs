//! semel runs topologies declared in TOML as exactly-once stream jobs: Kafka in, transforms, Kafka out, output and
//! positions in one transaction; a last stage keeps Postgres tables right by version-guarded upserts.
//!
//! The layers point one way: *pure* (records, topology, expressions, operators, the commit protocol) ← *edge* (Kafka,
//! sinks) ← *run* (workers, the development cluster, the test driver) ← *shell* (the command line).
//!
//! What a record makes goes into a [`chunk::Chunk`] on its way to the transaction; a record that is rejected takes
//! back all of it:
//!
//! ```
//! use semel::chunk::{Chunk, TargetId};
//!
//! let mut chunk = Chunk::default();
//! let mut output = chunk.push(TargetId(0));
//! output.partition(3).key(Some(b"c1")).value(Some(br#"{"total":4.0}"#));
//! output.finish();
//!
//! let before = chunk.mark();
//! chunk.push(TargetId(0)).finish();
//! chunk.rewind(before);
//!
//! let outputs: Vec<_> = chunk.iter().map(|o| (o.partition, o.key, o.value)).collect();
//! assert_eq!(outputs, [(3, Some(&b"c1"[..]), Some(&br#"{"total":4.0}"#[..]))]);
//! ```

pub mod chunk;
pub mod clock;
pub mod decimal;
pub mod error;
pub mod ids;
pub mod json;
pub mod record;
pub mod reject;

pub mod commit;
pub mod expr;
pub mod operator;
pub mod topology;

pub mod crash;
pub mod dlq;
pub mod kafka;
pub mod sink;
pub mod store;

pub mod audit;
pub mod bench;
pub mod cluster;
pub mod drill;
pub mod observe;
pub mod quickstart;
pub mod runtime;
pub mod scratch;
pub mod testing;

pub mod cli;
