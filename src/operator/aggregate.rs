//! `aggregate`: folds the records of a key into one that tells of all of them, and puts it out at each change.

use sha2::{Digest, Sha256};

use crate::chunk::{Chunk, Target, TargetId};
use crate::expr::{Body, Fault, Metadata, Program, Runtime};
use crate::ids::{EventId, Identity};
use crate::json::{unwritable, write, write_string};
use crate::record::Input;
use crate::topology::spec::{self, AggregateTombstones, Field, Format, Function};

use super::Record;
use super::coding::{Coded, put_number};
use super::fold::{Cell, Refusal};
use super::sink::record_size;
use super::source::Event;
use super::state::{States, StoreId};

/// The format byte of keys and of values.
const FORMAT: u8 = 1;

/// The first bytes of every value of a store: its format, and which fields it holds.
pub type Stamp = [u8; 5];

#[derive(Clone, Debug)]
pub(super) struct Aggregate {
    store: StoreId,
    /// `<topology>.<node>`, part of the ids of its updates.
    name: String,
    spec: spec::Aggregate,
    changelog: (TargetId, Target),
    stamp: Stamp,
    key: Vec<u8>,
    state: Vec<u8>,
    text: Vec<u8>,
    /// The update that was put out last, as JSON.
    output: Vec<u8>,
}

/// Which fields a store holds: what is restored must have been written by an aggregate of the same.
pub(super) fn stamp(spec: &spec::Aggregate) -> Stamp {
    let mut hash = Sha256::new();
    for field in &spec.fields {
        for part in [field.name.as_str(), field.function.as_str()] {
            hash.update((part.len() as u32).to_be_bytes());
            hash.update(part);
        }
    }
    let hash = hash.finalize();
    [FORMAT, hash[0], hash[1], hash[2], hash[3]]
}

impl Aggregate {
    pub(super) fn new(
        store: StoreId,
        name: String,
        spec: &spec::Aggregate,
        changelog: (TargetId, Target),
    ) -> Aggregate {
        Aggregate {
            store,
            name,
            stamp: stamp(spec),
            spec: spec.clone(),
            changelog,
            key: Vec::new(),
            state: Vec::new(),
            text: Vec::new(),
            output: Vec::new(),
        }
    }

    /// Folds a record into the state of its key, and writes that to the changelog. The update is in [`Aggregate::output`],
    /// its id is the answer; `None` drops the record.
    ///
    /// # Errors
    /// `null-key`, `key`, `tombstone`, `field`, `overflow`, `limit`, `too-large`, those of the expressions, and `retry`
    /// where another worker has the state.
    pub(super) fn fold(
        &mut self,
        record: &Record,
        input: &Input<'_>,
        event: &Event,
        runtime: &mut Runtime,
        states: &mut States,
        chunk: &mut Chunk,
    ) -> Result<Option<EventId>, Fault> {
        if record.body.is_null() {
            return match self.spec.tombstones {
                AggregateTombstones::Drop => Ok(None),
                AggregateTombstones::Reject => Err(Fault::new("tombstone", "the value is null")),
            };
        }
        let Some(key) = record.key(input) else {
            return Err(Fault::new("null-key", "the key is null: the record belongs to no group"));
        };
        let Ok(group) = std::str::from_utf8(key) else {
            return Err(Fault::new("key", "the key is not UTF-8, and updates hold it as a member"));
        };
        self.key.clear();
        self.key.push(FORMAT);
        self.key.extend_from_slice(key);
        let (revision, mut cells) = self.read(states, input.partition)?;
        let metadata = Metadata::new(input, Some(key), record.identity(event));
        for (field, cell) in self.spec.fields.iter().zip(&mut cells) {
            match take(field, cell, record, runtime, &metadata, &mut self.text)? {
                Taken::Value => {}
                Taken::Aborted => return Ok(None),
            }
        }
        let revision = revision + 1;
        self.write(revision, &cells, input.partition, states, chunk)?;
        self.output.clear();
        self.output.push(b'{');
        member(&self.spec.key_field, &mut self.output);
        write_string(group, &mut self.output);
        for (field, cell) in self.spec.fields.iter().zip(&cells) {
            self.output.push(b',');
            member(&field.name, &mut self.output);
            cell.write(&mut self.output);
        }
        self.output.push(b'}');
        // Behind a repartition only the record's own id knows the event's time.
        let carried = || match record.identity(event) {
            Identity::Known(id) => id.time_ms(),
            Identity::Unknown | Identity::Place(..) => None,
        };
        let time_ms = event.time_ms.or_else(carried);
        Ok(Some(EventId::of_state(&self.name, &self.key, revision, time_ms)))
    }

    /// The last update: a JSON object.
    pub(super) fn output(&self) -> &[u8] {
        &self.output
    }

    /// Revision and cells of the key at hand.
    fn read(&mut self, states: &States, partition: i32) -> Result<(u64, Vec<Cell>), Fault> {
        match states.read(self.store, partition, &self.key, &mut self.state) {
            None => Err(Fault::new(
                "retry",
                format!(
                    "the state of partition {partition} is not here; replay it while one worker has all partitions"
                ),
            )),
            Some(false) => Ok((0, self.spec.fields.iter().map(|field| Cell::new(field.function)).collect())),
            Some(true) => Ok(self.decode().expect("what is restored has the stamp of these fields")),
        }
    }

    fn decode(&self) -> Option<(u64, Vec<Cell>)> {
        let mut coded = Coded(self.state.strip_prefix(&self.stamp)?);
        let revision = coded.number()?;
        let cells = self.spec.fields.iter().map(|field| Cell::decode(field.function, &mut coded));
        Some((revision, cells.collect::<Option<_>>()?))
    }

    fn write(
        &mut self,
        revision: u64,
        cells: &[Cell],
        partition: i32,
        states: &mut States,
        chunk: &mut Chunk,
    ) -> Result<(), Fault> {
        self.state.clear();
        self.state.extend_from_slice(&self.stamp);
        put_number(revision, &mut self.state);
        cells.iter().for_each(|cell| cell.encode(&mut self.state));
        let (id, target) = &self.changelog;
        let size = record_size(self.key.len(), self.state.len());
        if size > target.max_message_bytes {
            let Target { topic, max_message_bytes, .. } = target;
            let message = format!(
                "the state of the key takes {size} bytes, the topic `{topic}` takes {max_message_bytes} (max.message.bytes)"
            );
            return Err(Fault::new("too-large", message));
        }
        let mut out = chunk.push(*id);
        out.partition(partition).key(Some(&self.key)).value(Some(&self.state));
        out.finish();
        states.write(self.store, partition, &self.key, &self.state);
        Ok(())
    }
}

enum Taken {
    Value,
    /// The expression aborted: the record is dropped.
    Aborted,
}

/// Has a field take its value of a record. Null and what is not there are passed over.
fn take(
    field: &Field,
    cell: &mut Cell,
    record: &Record,
    runtime: &mut Runtime,
    metadata: &Metadata<'_>,
    text: &mut Vec<u8>,
) -> Result<Taken, Fault> {
    let Field { function, of, limit, .. } = field;
    text.clear();
    match of {
        None => text.extend_from_slice(b"true"),
        Some(program) if *function == Function::Reduce => {
            let both = both(cell, record)?;
            if !evaluate(program, &both, runtime, metadata, text)? {
                return Ok(Taken::Aborted);
            }
        }
        Some(program) => {
            if !json_text(program, record, runtime, metadata, text)? {
                return Ok(Taken::Aborted);
            }
        }
    }
    if text != b"null" {
        cell.take(*function, *limit, text).map_err(|refusal| fault(field, refusal, text))?;
    }
    Ok(Taken::Value)
}

/// Writes what an expression gives as JSON: of a top-level member its text as it stands. False if it aborted.
fn json_text(
    program: &Program,
    record: &Record,
    runtime: &mut Runtime,
    metadata: &Metadata<'_>,
    text: &mut Vec<u8>,
) -> Result<bool, Fault> {
    if let (Some(name), Some(json)) = (program.member(), record.body.json()) {
        text.extend_from_slice(json.member(name).as_deref().unwrap_or(b"null"));
        return Ok(true);
    }
    evaluate(program, &record.body, runtime, metadata, text)
}

/// What a reduction sees: `{"acc":…,"value":…}`.
fn both(cell: &Cell, record: &Record) -> Result<Body, Fault> {
    let mut text = b"{\"acc\":".to_vec();
    cell.write(&mut text);
    text.extend_from_slice(b",\"value\":");
    if record.body.json().is_some() {
        record.body.encode(&mut text);
    } else {
        let mut plain = Vec::new();
        record.body.encode(&mut plain);
        let plain = String::from_utf8(plain)
            .map_err(|_| Fault::new("field", "a reduction takes no bytes that are not UTF-8"))?;
        write_string(&plain, &mut text);
    }
    text.push(b'}');
    let mut body = Body::default();
    body.decode(Format::Json, Some(&text)).map_err(|fault| Fault::new("field", fault.message))?;
    Ok(body)
}

/// Writes the value of an expression as JSON. False if it aborted.
fn evaluate(
    program: &Program,
    body: &Body,
    runtime: &mut Runtime,
    metadata: &Metadata<'_>,
    text: &mut Vec<u8>,
) -> Result<bool, Fault> {
    let Some(value) = program.value(runtime, body, metadata)? else { return Ok(false) };
    if let Some(problem) = unwritable(&value) {
        return Err(Fault::new("field", format!("`{}` gives no JSON: {problem}", program.source())));
    }
    write(&value, text);
    Ok(true)
}

fn fault(field: &Field, refusal: Refusal, text: &[u8]) -> Fault {
    let Field { name, function, limit, .. } = field;
    let function = function.as_str();
    let value = String::from_utf8_lossy(text);
    match refusal {
        Refusal::Takes(values) => Fault::new("field", format!("the {function} `{name}` takes {values}, not {value}")),
        Refusal::Overflow => Fault::new(
            "overflow",
            format!("the {function} `{name}` does not hold {value}: it has 128 bits and 38 decimals"),
        ),
        Refusal::Limit => Fault::new("limit", format!("the {function} `{name}` holds {limit} values already")),
    }
}

fn member(name: &str, out: &mut Vec<u8>) {
    write_string(name, out);
    out.push(b':');
}
