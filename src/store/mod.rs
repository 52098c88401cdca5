//! State stores, and the topics that they are restored from.

mod bounds;
mod disk;
mod restore;

pub use bounds::Bounds;
pub use disk::{Disk, DiskPart, KEPT};
pub use restore::{Changelog, Restored, Restoring};
