//! Tests that need a broker, a database or the whole binary: one program, a module a suite.

mod postgres_sink;
