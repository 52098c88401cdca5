//! `join` of two tables: a change of either puts out what both are now.

use crate::expr::Fault;
use crate::ids::EventId;
use crate::json::JsonBody;
use crate::record::Input;
use crate::topology::spec::{self, JoinKind};

use super::Record;
use super::join::begin;
use super::source::Event;
use super::state::{States, StoreId};
use super::table::{NOT_UTF8, find, row_key};

#[derive(Clone, Debug)]
pub(super) struct JoinTables {
    left: StoreId,
    right: StoreId,
    /// `<topology>.<node>`, part of the ids of what it makes.
    name: String,
    kind: JoinKind,
    into: String,
    key: Vec<u8>,
    row: Vec<u8>,
    object: JsonBody,
    output: Vec<u8>,
}

/// What a change of a table is for the join.
pub(super) enum Changed {
    /// It is in [`JoinTables::output`].
    Row(EventId),
    /// Nothing is left of that key.
    Gone(EventId),
    /// There was nothing, and there is nothing.
    Nothing,
}

impl JoinTables {
    pub(super) fn new(left: StoreId, right: StoreId, name: String, spec: &spec::Join) -> JoinTables {
        let spec::Join { kind, into, .. } = spec;
        JoinTables {
            left,
            right,
            name,
            kind: *kind,
            into: into.clone(),
            key: Vec::new(),
            row: Vec::new(),
            object: JsonBody::default(),
            output: Vec::new(),
        }
    }

    /// Joins what became of a row with the row of the other table.
    ///
    /// # Errors
    /// `field` for a left row that is no object or one that is not UTF-8, and `retry` where another worker has the other table.
    pub(super) fn change(
        &mut self,
        record: &Record,
        input: &Input<'_>,
        event: &Event,
        states: &States,
    ) -> Result<Changed, Fault> {
        let of_right = record.row_of == Some(self.right);
        let other = if of_right { self.left } else { self.right };
        row_key(record.key(input).unwrap_or_default(), &mut self.key);
        let row = find(states, other, input.partition, &self.key, &mut self.row)?;
        let found = row.is_some();
        let is_there = !record.body.is_null();
        let (left, right) = if of_right { (found, is_there) } else { (is_there, found) };
        let (exists, existed) = match self.kind {
            JoinKind::Inner => (left && right, found),
            JoinKind::Left => (left, found || !of_right),
            JoinKind::Outer => (left || right, true),
        };
        let id = record.identity(event).or_nil().joined(&self.name, row.as_ref().and_then(|row| row.id));
        if !exists {
            return Ok(if existed { Changed::Gone(id) } else { Changed::Nothing });
        }
        let no_object =
            || Fault::new("field", "the row is no JSON object, and that of the other table becomes a member of it");
        if of_right {
            let object = match &row {
                Some(row) => {
                    let decoded = self.object.decode(row.object().ok_or_else(no_object)?);
                    decoded.map_err(|error| Fault::new("field", error.to_string()))?;
                    Some(&self.object)
                }
                None => None,
            };
            begin(object, &self.into, &mut self.output);
        } else {
            let object = if is_there { Some(record.body.json().ok_or_else(no_object)?) } else { None };
            begin(object, &self.into, &mut self.output);
        }
        match row {
            Some(row) if !of_right => row.write(&mut self.output)?,
            _ if of_right && is_there => record.write_json(NOT_UTF8, &mut self.output)?,
            _ => self.output.extend_from_slice(b"null"),
        }
        self.output.push(b'}');
        Ok(Changed::Row(id))
    }

    /// What both are: a JSON object.
    pub(super) fn output(&self) -> &[u8] {
        &self.output
    }
}
