//! Tests that need a broker, a database or the whole binary: one program, a module a suite.

mod check;
mod explain;
mod golden;
mod postgres_sink;
mod reference;
