//! `remap`: changes a record in place.

use crate::expr::{Body, Fault, Metadata, Program, Runtime};
use crate::topology::spec::Tombstones;

#[derive(Clone, Debug)]
pub(super) struct Remap {
    pub(super) source: Program,
    pub(super) tombstones: Tombstones,
}

impl Remap {
    /// False if the record is dropped.
    pub(super) fn apply(&self, body: &mut Body, runtime: &mut Runtime, metadata: &Metadata<'_>) -> Result<bool, Fault> {
        if body.is_null() && self.tombstones != Tombstones::Process {
            return Ok(self.tombstones == Tombstones::Pass);
        }
        self.source.transform(runtime, body, metadata)
    }
}
