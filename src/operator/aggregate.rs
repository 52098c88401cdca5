//! `aggregate`: folds the records of a key into one that tells of all of them, and puts it out at each change.

use sha2::{Digest, Sha256};

use crate::chunk::{Chunk, Target, TargetId};
use crate::expr::{Body, Fault, Metadata, Program, Runtime};
use crate::ids::{EventId, Identity};
use crate::json::{unwritable, write, write_string};
use crate::record::Input;
use crate::topology::spec::{self, AggregateTombstones, Field, Format, Function, Window};

use super::Record;
use super::coding::{Coded, put_number};
use super::fold::{Cell, Refusal};
use super::sink::record_size;
use super::source::Event;
use super::state::{States, StoreId};

/// The format byte of values, and of keys without a window.
const FORMAT: u8 = 1;
/// Of a key in a window: the window's start, so that windows come in their order, then the key.
const WINDOWED: u8 = 2;
/// Of the one key under which stands where open windows begin.
const OPEN: u8 = 3;

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
    if let Some(window) = spec.window {
        hash.update(window.size_ms.to_be_bytes());
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

    /// Folds a record into the state of its key, and writes that to the changelog. The update is in [`Aggregate::output`].
    ///
    /// # Errors
    /// `null-key`, `key`, `tombstone`, `event-time`, `field`, `overflow`, `limit`, `too-large`, those of the expressions, and `retry`
    /// where another worker has the state.
    pub(super) fn fold(
        &mut self,
        record: &Record,
        input: &Input<'_>,
        event: &Event,
        runtime: &mut Runtime,
        states: &mut States,
        chunk: &mut Chunk,
    ) -> Result<Folded, Fault> {
        if record.body.is_null() {
            return match self.spec.tombstones {
                AggregateTombstones::Drop => Ok(Folded::Dropped),
                AggregateTombstones::Reject => Err(Fault::new("tombstone", "the value is null")),
            };
        }
        let Some(key) = record.key(input) else {
            return Err(Fault::new("null-key", "the key is null: the record belongs to no group"));
        };
        let Ok(group) = std::str::from_utf8(key) else {
            return Err(Fault::new("key", "the key is not UTF-8, and updates hold it as a member"));
        };
        let mut start = None;
        if let Some(window) = self.spec.window {
            let time = event.time_ms.or(input.timestamp).filter(|time| *time >= 0);
            let time =
                time.ok_or_else(|| Fault::new("event-time", "the record has no time, which its window is told by"))?;
            if !self.open(window, time, input.partition, states, chunk)? {
                return Ok(Folded::Late);
            }
            start = Some(window.start(time));
        }
        self.key.clear();
        match start {
            None => self.key.push(FORMAT),
            Some(start) => self.key.extend_from_slice(&windowed(start)),
        }
        self.key.extend_from_slice(key);
        let (revision, mut cells) = self.read(states, input.partition)?;
        let metadata = Metadata::new(input, Some(key), record.identity(event));
        for (field, cell) in self.spec.fields.iter().zip(&mut cells) {
            match take(field, cell, record, runtime, &metadata, &mut self.text)? {
                Taken::Value => {}
                Taken::Aborted => return Ok(Folded::Dropped),
            }
        }
        let revision = revision + 1;
        self.write(revision, &cells, input.partition, states, chunk)?;
        self.output.clear();
        self.output.push(b'{');
        member(&self.spec.key_field, &mut self.output);
        write_string(group, &mut self.output);
        if let (Some(window), Some(start)) = (self.spec.window, start) {
            for (name, time) in [(spec::WINDOW_START, start), (spec::WINDOW_END, start + window.size_ms)] {
                self.output.push(b',');
                member(name, &mut self.output);
                write_string(&rfc3339(time), &mut self.output);
            }
        }
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
        Ok(Folded::Update(EventId::of_state(&self.name, &self.key, revision, time_ms)))
    }

    /// Whether the window of a record takes it. A record whose time closes windows removes them.
    fn open(
        &mut self,
        window: Window,
        time: i64,
        partition: i32,
        states: &mut States,
        chunk: &mut Chunk,
    ) -> Result<bool, Fault> {
        self.key.clear();
        self.key.push(OPEN);
        let told =
            states.read(self.store, partition, &self.key, &mut self.state).ok_or_else(|| elsewhere(partition))?;
        let open = if told { decode_open(&self.state, &self.stamp) } else { Some(i64::MIN) };
        let open = open.expect("what is restored has the stamp of this window");
        if window.start(time) < open {
            return Ok(false);
        }
        let from = window.open_from(time);
        if from > open {
            self.state.clear();
            self.state.extend_from_slice(&self.stamp);
            self.state.extend_from_slice(&from.to_be_bytes());
            put(&self.changelog, partition, &self.key, Some(&self.state), chunk);
            states.write(self.store, partition, &self.key, Some(&self.state));
            for key in states.keys(self.store, partition, &[WINDOWED], &windowed(from)) {
                put(&self.changelog, partition, &key, None, chunk);
                states.write(self.store, partition, &key, None);
            }
        }
        Ok(true)
    }

    /// The last update: a JSON object.
    pub(super) fn output(&self) -> &[u8] {
        &self.output
    }

    /// Revision and cells of the key at hand.
    fn read(&mut self, states: &States, partition: i32) -> Result<(u64, Vec<Cell>), Fault> {
        match states.read(self.store, partition, &self.key, &mut self.state) {
            None => Err(elsewhere(partition)),
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
        let (_, target) = &self.changelog;
        let size = record_size(self.key.len(), self.state.len());
        if size > target.max_message_bytes {
            let Target { topic, max_message_bytes, .. } = target;
            let message = format!(
                "the state of the key takes {size} bytes, the topic `{topic}` takes {max_message_bytes} (max.message.bytes)"
            );
            return Err(Fault::new("too-large", message));
        }
        put(&self.changelog, partition, &self.key, Some(&self.state), chunk);
        states.write(self.store, partition, &self.key, Some(&self.state));
        Ok(())
    }
}

/// What became of a record.
pub(super) enum Folded {
    Update(EventId),
    Dropped,
    /// Its window has closed.
    Late,
}

impl Window {
    /// The start of the window that a time is in.
    fn start(self, time_ms: i64) -> i64 {
        time_ms - time_ms.rem_euclid(self.size_ms)
    }

    /// The start of the first window that is open once a record of that time was seen: those before ended longer ago than the
    /// grace.
    fn open_from(self, time_ms: i64) -> i64 {
        self.start(time_ms - self.size_ms - self.grace_ms) + self.size_ms
    }
}

/// What the keys of a window begin with. The sign is turned, so that bytes have the order of times.
fn windowed(start: i64) -> [u8; 9] {
    let mut key = [WINDOWED; 9];
    key[1..].copy_from_slice(&(start as u64 ^ (1 << 63)).to_be_bytes());
    key
}

fn decode_open(state: &[u8], stamp: &Stamp) -> Option<i64> {
    state.strip_prefix(stamp)?.try_into().ok().map(i64::from_be_bytes)
}

fn rfc3339(time_ms: i64) -> String {
    let time = chrono::DateTime::from_timestamp_millis(time_ms).unwrap_or_default();
    time.to_rfc3339_opts(chrono::SecondsFormat::Millis, true)
}

pub(super) fn elsewhere(partition: i32) -> Fault {
    let message =
        format!("the state of partition {partition} is not here; replay it while one worker has all partitions");
    Fault::new("retry", message)
}

/// Writes to the changelog.
pub(super) fn put((id, _): &(TargetId, Target), partition: i32, key: &[u8], value: Option<&[u8]>, chunk: &mut Chunk) {
    let mut out = chunk.push(*id);
    out.partition(partition).key(Some(key)).value(value);
    out.finish();
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
