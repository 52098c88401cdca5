//! Sinks outside Kafka: where a stage writes after its records left the log.

pub mod postgres;
