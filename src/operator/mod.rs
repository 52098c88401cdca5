//! Operators.

pub mod row;
