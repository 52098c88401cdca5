//! State stores and the topics that they are restored from.

mod restore;

pub use restore::{Changelog, Restoring};
