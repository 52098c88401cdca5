//! `flat_map`: one record into as many as the expression's array has elements, in its order.

use crate::expr::{Body, Fault, Metadata, Program, Runtime, Value};
use crate::topology::spec::Tombstones;

#[derive(Clone, Debug)]
pub(super) struct FlatMap {
    pub(super) source: Program,
    pub(super) tombstones: Tombstones,
}

/// What becomes of a record.
#[derive(Debug)]
pub(super) enum Expanded {
    /// It passes as it is.
    Same,
    Dropped,
    /// The values of the records that take its place; key, headers and time are inherited.
    Values(Vec<Value>),
}

impl FlatMap {
    /// The body is scratch space afterwards, unless the record passes.
    pub(super) fn expand(
        &self,
        body: &mut Body,
        runtime: &mut Runtime,
        metadata: &Metadata<'_>,
    ) -> Result<Expanded, Fault> {
        if body.is_null() && self.tombstones != Tombstones::Process {
            return Ok(if self.tombstones == Tombstones::Pass { Expanded::Same } else { Expanded::Dropped });
        }
        Ok(self.source.expand(runtime, body, metadata)?.map_or(Expanded::Dropped, Expanded::Values))
    }

    /// Makes `value` the body of the record of element `index`.
    pub(super) fn fill(body: &mut Body, index: usize, value: Value) -> Result<(), Fault> {
        body.become_value(value).map_err(|problem| Fault::new("expression", format!("element {index}: {problem}")))
    }
}
