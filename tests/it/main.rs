//! Tests that need a broker, a database or the whole binary: one program, a module a suite.
//!
//! They use the development cluster, which comes up by itself. `SEMEL_TEST=offline` leaves out what needs it.

mod bench;
mod check;
mod cluster;
mod drill;
mod explain;
mod golden;
mod job;
mod kafka_admin;
mod kafka_edge;
mod kafka_group;
mod kafka_support;
mod postgres_sink;
mod quickstart;
mod readme;
mod reference;
mod support;
mod tidy;
mod topologies;
