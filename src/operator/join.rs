//! `join`: gives each record the row of a table that has its key.

use crate::expr::Fault;
use crate::ids::EventId;
use crate::json::{JsonBody, write_string};
use crate::record::Input;
use crate::topology::spec::{self, JoinKind};

use super::Record;
use super::source::Event;
use super::state::{States, StoreId};
use super::table::{find, row_key};

#[derive(Clone, Debug)]
pub(super) struct Join {
    table: StoreId,
    /// `<topology>.<node>`, part of the ids of what it makes.
    name: String,
    kind: JoinKind,
    into: String,
    key: Vec<u8>,
    row: Vec<u8>,
    output: Vec<u8>,
}

/// What became of a record.
pub(super) enum Joined {
    /// It is in [`Join::output`].
    Record(EventId),
    /// It has no value to join anything to.
    Null,
    /// The table has no row for it.
    Alone,
}

impl Join {
    pub(super) fn new(table: StoreId, name: String, spec: &spec::Join) -> Join {
        let spec::Join { kind, into, .. } = spec;
        Join { table, name, kind: *kind, into: into.clone(), key: Vec::new(), row: Vec::new(), output: Vec::new() }
    }

    /// Looks up the row of a record's key.
    ///
    /// # Errors
    /// `null-key` of an inner join, `field` for a record that is no object or a row that is not UTF-8, and `retry` where
    /// another worker has the table.
    pub(super) fn join(
        &mut self,
        record: &Record,
        input: &Input<'_>,
        event: &Event,
        states: &States,
    ) -> Result<Joined, Fault> {
        if record.body.is_null() {
            return Ok(Joined::Null);
        }
        let Some(json) = record.body.json() else {
            return Err(Fault::new("field", "the value is no JSON object, and the row becomes a member of it"));
        };
        let row = match record.key(input) {
            Some(key) => {
                row_key(key, &mut self.key);
                find(states, self.table, input.partition, &self.key, &mut self.row)?
            }
            None if self.kind != JoinKind::Inner => None,
            None => return Err(Fault::new("null-key", "the key is null: no row can be its")),
        };
        if row.is_none() && self.kind == JoinKind::Inner {
            return Ok(Joined::Alone);
        }
        begin(Some(json), &self.into, &mut self.output);
        match &row {
            Some(row) => row.write(&mut self.output)?,
            None => self.output.extend_from_slice(b"null"),
        }
        self.output.push(b'}');
        let id = record.identity(event).or_nil();
        Ok(Joined::Record(id.joined(&self.name, row.and_then(|row| row.id))))
    }

    /// The last record that was joined: a JSON object.
    pub(super) fn output(&self) -> &[u8] {
        &self.output
    }
}

/// Writes an object up to the value of its last member, `into`.
pub(super) fn begin(object: Option<&JsonBody>, into: &str, out: &mut Vec<u8>) {
    out.clear();
    out.push(b'{');
    for (name, value) in object.into_iter().flat_map(JsonBody::members).filter(|(name, _)| name != into) {
        write_string(&name, out);
        out.push(b':');
        out.extend_from_slice(&value);
        out.push(b',');
    }
    write_string(into, out);
    out.push(b':');
}
