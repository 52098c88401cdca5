//! `table`: keeps the latest value of each key, and passes records on.

use crate::chunk::Chunk;
use crate::expr::Fault;
use crate::ids::EventId;
use crate::record::{Input, Offset};
use crate::reject::header;

use super::aggregate::Stamp;
use super::changelog::Changelog;
use super::coding::{Coded, put_number};
use super::record::{Record, write_text};
use super::source::Event;
use super::state::{States, StoreId, elsewhere};

/// The format byte of keys and values.
const FORMAT: u8 = 1;

/// What every row begins with.
pub(super) const STAMP: Stamp = [FORMAT, b't', b'a', b'b', b'l'];

/// How a value is written.
const JSON: u8 = 0;
const TEXT: u8 = 1;

/// What is wrong with text that becomes a member of an object.
pub(super) const NOT_UTF8: &str = "the row is not UTF-8";

#[derive(Clone, Debug)]
pub(super) struct Table {
    store: StoreId,
    changelog: Changelog,
    key: Vec<u8>,
    row: Vec<u8>,
}

impl Table {
    pub(super) fn new(store: StoreId, changelog: Changelog) -> Table {
        Table { store, changelog, key: Vec::new(), row: Vec::new() }
    }

    pub(super) fn store(&self) -> StoreId {
        self.store
    }

    /// Makes the record the row of its key, or removes that for a null value. False for a record that is older than the row:
    /// a dead letter that came back.
    ///
    /// # Errors
    /// `null-key`, `too-large`, and `retry` where another worker has the state.
    pub(super) fn take(
        &mut self,
        record: &Record,
        input: &Input<'_>,
        event: &Event,
        states: &mut States,
        chunk: &mut Chunk,
    ) -> Result<bool, Fault> {
        let Some(key) = record.key(input) else {
            return Err(Fault::new("null-key", "the key is null: the record is the row of none"));
        };
        row_key(key, &mut self.key);
        // What is read in its turn is newer than every row.
        if input.headers.last(header::RESTORED).is_some() {
            let row = find(states, self.store, input.partition, &self.key, &mut self.row)?;
            if row.is_some_and(|row| row.offset > input.offset) {
                return Ok(false);
            }
        } else if !states.is_held(self.store, input.partition) {
            return Err(elsewhere(input.partition));
        }
        let value = (!record.body.is_null()).then(|| {
            self.row.clear();
            self.row.extend_from_slice(&STAMP);
            let id = record.identity(event).id();
            self.row.push(u8::from(id.is_some()));
            self.row.extend_from_slice(id.as_ref().map_or(&[][..], |id| &id.bytes()[..]));
            put_number(input.offset.0.max(0) as u64, &mut self.row);
            self.row.push(if record.body.json().is_some() { JSON } else { TEXT });
            record.body.encode(&mut self.row);
            &self.row[..]
        });
        self.changelog.check("the row", &self.key, value)?;
        self.changelog.put(input.partition, &self.key, value, chunk);
        states.write(self.store, input.partition, &self.key, value);
        Ok(true)
    }
}

/// What is kept under a key.
pub(super) struct Row<'a> {
    pub(super) id: Option<EventId>,
    /// Of the record that it was.
    offset: Offset,
    kind: u8,
    value: &'a [u8],
}

impl<'a> Row<'a> {
    pub(super) fn decode(bytes: &'a [u8]) -> Option<Row<'a>> {
        let mut coded = Coded(bytes.strip_prefix(&STAMP)?);
        let id = match coded.array()? {
            [0] => None,
            [_] => Some(EventId::from_bytes(*coded.array()?)),
        };
        let offset = Offset(i64::try_from(coded.number()?).ok()?);
        let [kind] = *coded.array()?;
        Some(Row { id, offset, kind, value: coded.0 })
    }

    /// The text of an object; none of a row that is text.
    pub(super) fn object(&self) -> Option<&'a [u8]> {
        (self.kind == JSON).then_some(self.value)
    }

    /// Writes the value as JSON: an object as it came, text as a string.
    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<(), Fault> {
        match self.kind {
            JSON => out.extend_from_slice(self.value),
            _ => write_text(self.value, NOT_UTF8, out)?,
        }
        Ok(())
    }
}

/// Looks a row up by the key that [`row_key`] makes; its bytes are in `row`.
///
/// # Errors
/// `retry`: another worker has the table.
pub(super) fn find<'r>(
    states: &States,
    table: StoreId,
    partition: i32,
    key: &[u8],
    row: &'r mut Vec<u8>,
) -> Result<Option<Row<'r>>, Fault> {
    let found = states.read(table, partition, key, row)?;
    Ok(found.then(|| Row::decode(row).expect("what is restored has the stamp of a table")))
}

/// Writes the key under which a row lies.
pub(super) fn row_key(key: &[u8], out: &mut Vec<u8>) {
    out.clear();
    out.push(FORMAT);
    out.extend_from_slice(key);
}
