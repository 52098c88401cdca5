//! Records between nodes. Consumers share a record; who changes it takes it over, or a copy if others still want it.

use crate::expr::{Body, Fault};
use crate::ids::{EventId, Identity};
use crate::json::write_string;
use crate::record::Input;
use crate::topology::spec::Format;

use super::source::Event;
use super::state::StoreId;

/// Writes text as a JSON string, or refuses with that message what is not UTF-8.
pub(super) fn write_text(text: &[u8], refused: &str, out: &mut Vec<u8>) -> Result<(), Fault> {
    write_string(std::str::from_utf8(text).map_err(|_| Fault::new("field", refused))?, out);
    Ok(())
}

/// A record on its way: value and key. The rest is its input's.
#[derive(Clone, Debug, Default)]
pub(super) struct Record {
    pub(super) body: Body,
    key: Key,
    key_bytes: Vec<u8>,
    /// Of what an aggregate or a join made of the input.
    id: Option<EventId>,
    /// The table that it is a row of now.
    pub(super) row_of: Option<StoreId>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Key {
    /// The input's.
    #[default]
    Input,
    Null,
    /// One that a `rekey` made.
    Own,
}

impl Record {
    /// Makes ready for another input; the body is decoded next.
    pub(super) fn start(&mut self) {
        self.key = Key::Input;
        self.id = None;
        self.row_of = None;
    }

    /// Makes it the end of what it told of, under an id of its own.
    pub(super) fn become_null(&mut self, id: EventId) -> Result<(), Fault> {
        self.id = Some(id);
        self.body.decode(Format::Json, None)
    }

    /// Makes it what an aggregate or a join made of it: a JSON text under an id of its own, with the key that it has.
    pub(super) fn become_update(&mut self, json: &[u8], id: EventId) -> Result<(), Fault> {
        self.id = Some(id);
        self.body.decode(Format::Json, Some(json)).map_err(|fault| Fault::new("field", fault.message))
    }

    /// Writes the value as JSON: an object as it stands, text as a string.
    ///
    /// # Errors
    /// `field`, with that message: it is not UTF-8.
    pub(super) fn write_json(&self, refused: &str, out: &mut Vec<u8>) -> Result<(), Fault> {
        if self.body.json().is_some() {
            self.body.encode(out);
            return Ok(());
        }
        let mut text = Vec::new();
        self.body.encode(&mut text);
        write_text(&text, refused, out)
    }

    /// The id of an update; none of what is its input's event.
    pub(super) fn own_id(&self) -> Option<EventId> {
        self.id
    }

    pub(super) fn identity(&self, event: &Event) -> Identity {
        self.id.map_or(event.identity, Identity::Known)
    }

    pub(super) fn key<'a>(&'a self, input: &Input<'a>) -> Option<&'a [u8]> {
        match self.key {
            Key::Input => input.key,
            Key::Null => None,
            Key::Own => Some(&self.key_bytes),
        }
    }

    /// The body to change, and the key beside it.
    pub(super) fn parts<'a>(&'a mut self, input: &Input<'a>) -> (&'a mut Body, Option<&'a [u8]>) {
        let key = match self.key {
            Key::Input => input.key,
            Key::Null => None,
            Key::Own => Some(&self.key_bytes[..]),
        };
        (&mut self.body, key)
    }

    pub(super) fn set_key(&mut self, key: Key, bytes: &[u8]) {
        self.key = key;
        self.key_bytes.clear();
        self.key_bytes.extend_from_slice(bytes);
    }

    fn take_key(&mut self, other: &Record) {
        self.id = other.id;
        self.set_key(other.key, &other.key_bytes);
    }
}

/// A place in a [`Pool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(usize);

/// The records of one input that are between nodes. Their buffers are used again for the next input.
#[derive(Clone, Debug, Default)]
pub(super) struct Pool {
    records: Vec<Record>,
    /// How many consumers still wait for each record.
    waiting: Vec<u32>,
    free: Vec<Slot>,
}

/// Records kept for the next input; one that made thousands must not hold their memory.
const KEPT: usize = 64;

impl Pool {
    /// A record that one consumer waits for.
    pub(super) fn take(&mut self) -> Slot {
        if let Some(slot) = self.free.pop() {
            self.waiting[slot.0] = 1;
            return slot;
        }
        self.records.push(Record::default());
        self.waiting.push(1);
        Slot(self.records.len() - 1)
    }

    pub(super) fn get(&self, slot: Slot) -> &Record {
        &self.records[slot.0]
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> &mut Record {
        &mut self.records[slot.0]
    }

    /// More consumers wait for the record.
    pub(super) fn share(&mut self, slot: Slot, more: usize) {
        self.waiting[slot.0] += more as u32;
    }

    /// One consumer less.
    pub(super) fn release(&mut self, slot: Slot) {
        self.waiting[slot.0] -= 1;
        if self.waiting[slot.0] == 0 {
            self.free.push(slot);
        }
    }

    /// The record for a consumer that changes it: itself if nobody else waits for it, else a copy.
    pub(super) fn own(&mut self, slot: Slot) -> Slot {
        if self.waiting[slot.0] == 1 {
            return slot;
        }
        let copy = self.take();
        self.records[copy.0] = self.records[slot.0].clone();
        self.release(slot);
        copy
    }

    /// A record that inherits the key of `slot`, with a body yet to be filled.
    pub(super) fn child(&mut self, slot: Slot) -> Slot {
        let child = self.take();
        let parent = std::mem::take(&mut self.records[slot.0]);
        self.records[child.0].body.inherit(&parent.body);
        self.records[child.0].take_key(&parent);
        self.records[slot.0] = parent;
        child
    }

    /// Frees everything.
    pub(super) fn reset(&mut self) {
        if self.records.len() > KEPT {
            self.records.truncate(KEPT);
            self.waiting.truncate(KEPT);
        }
        self.waiting.fill(0);
        self.free.clear();
        self.free.extend((0..self.records.len()).map(Slot));
    }
}
