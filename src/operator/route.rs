//! `route`: the first condition that holds decides where a record goes.

use crate::expr::{Fault, Metadata, Program, Runtime};
use crate::topology::spec::Tombstones;

use super::Record;

#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) conditions: Vec<Program>,
    pub(super) tombstones: Tombstones,
}

/// Where a record goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// To one output; the one behind the last condition is `_unmatched`.
    Output(usize),
    /// A delete belongs to every output: nobody knows which of them saw the record.
    Every,
    Nowhere,
}

impl Route {
    pub(super) fn way(&self, record: &Record, runtime: &mut Runtime, metadata: &Metadata<'_>) -> Result<Way, Fault> {
        if record.body.is_null() && self.tombstones != Tombstones::Process {
            return Ok(if self.tombstones == Tombstones::Pass { Way::Every } else { Way::Nowhere });
        }
        for (output, condition) in self.conditions.iter().enumerate() {
            match condition.condition(runtime, &record.body, metadata)? {
                Some(true) => return Ok(Way::Output(output)),
                Some(false) => {}
                None => return Ok(Way::Nowhere),
            }
        }
        Ok(Way::Output(self.conditions.len()))
    }
}
