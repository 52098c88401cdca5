//! `filter`: keeps the records that a condition holds for.

use crate::expr::{Fault, Metadata, Program, Runtime};
use crate::topology::spec::Tombstones;

use super::Record;

#[derive(Clone, Debug)]
pub(super) struct Filter {
    pub(super) condition: Program,
    pub(super) tombstones: Tombstones,
}

impl Filter {
    pub(super) fn keeps(&self, record: &Record, runtime: &mut Runtime, metadata: &Metadata<'_>) -> Result<bool, Fault> {
        if record.body.is_null() && self.tombstones != Tombstones::Process {
            return Ok(self.tombstones == Tombstones::Pass);
        }
        Ok(self.condition.condition(runtime, &record.body, metadata)?.unwrap_or(false))
    }
}
