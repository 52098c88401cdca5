//! State stores, and the topics that they are restored from.

mod bounds;
mod disk;
mod restore;

pub use bounds::Bounds;
pub use disk::{Disk, DiskPart};
pub use restore::{Changelog, Restored, Restoring};
