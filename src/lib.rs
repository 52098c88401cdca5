//! semel runs topologies declared in TOML as exactly-once stream jobs: Kafka in, transforms, Kafka out, output and
//! positions in one transaction; a last stage keeps Postgres tables right by version-guarded upserts.
//!
//! The layers point one way: *pure* (records, topology, expressions, operators, the commit protocol) ← *edge* (Kafka,
//! sinks) ← *run* (workers, the development cluster, the test driver) ← *shell* (the command line).

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

pub mod kafka;
pub mod sink;

pub mod cluster;
pub mod observe;
pub mod quickstart;
pub mod runtime;
pub mod testing;

pub mod cli;
