//! `aggregate`: folds the records of a key into one that tells of all of them, and puts it out at each change, or once its
//! window closes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::chunk::Chunk;
use crate::expr::{Body, Fault, Metadata, Program, Runtime};
use crate::ids::{EventId, Identity};
use crate::json::{unwritable, write, write_string};
use crate::record::{Input, Offset};
use crate::topology::spec::{self, AggregateTombstones, Emit, Field, Format, Function, Late, WindowKind};

use super::Record;
use super::changelog::Changelog;
use super::coding::{Coded, put_number};
use super::fold::{Cell, Refusal};
use super::source::Event;
use super::state::{States, StoreId};
use super::time::rfc3339;
use super::windows::{CLOCK, Final};

/// The format byte of values, and of keys without a window.
const FORMAT: u8 = 1;

/// The first bytes of every value of a store: its format, and which fields it holds.
pub type Stamp = [u8; 5];

#[derive(Clone, Debug)]
pub(super) struct Aggregate {
    pub(super) store: StoreId,
    /// `<topology>.<node>`, part of the ids of its updates.
    pub(super) name: String,
    pub(super) spec: spec::Aggregate,
    changelog: Changelog,
    pub(super) stamp: Stamp,
    /// The value that was read last.
    pub(super) state: Vec<u8>,
    /// What the fields are given of the record at hand, as JSON.
    values: Vec<Vec<u8>>,
    text: Vec<u8>,
    /// What the record at hand puts out: JSON texts, and where each lies with its id.
    output: Vec<u8>,
    updates: Vec<(Range<usize>, EventId)>,
    /// Partitions in which windows close: from which key on, and the record that closed them.
    pub(super) closing: BTreeMap<i32, (Vec<u8>, Offset)>,
    /// Partitions whose time goes into the changelog when the batch ends.
    pub(super) moved: BTreeSet<i32>,
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
    match spec.window.map(|window| window.kind) {
        None => {}
        Some(WindowKind::Aligned { size_ms, advance_ms }) => {
            hash.update(size_ms.to_be_bytes());
            if advance_ms != size_ms {
                hash.update(advance_ms.to_be_bytes());
            }
        }
        Some(WindowKind::Session { gap_ms }) => {
            hash.update("session");
            hash.update(gap_ms.to_be_bytes());
        }
    }
    let hash = hash.finalize();
    [FORMAT, hash[0], hash[1], hash[2], hash[3]]
}

/// The state of a record's partition, and the chunk that its changelog goes into.
pub(super) struct Place<'a> {
    pub(super) states: &'a mut States,
    pub(super) chunk: &'a mut Chunk,
    pub(super) partition: i32,
}

/// A record that is being folded.
pub(super) struct Folding<'a> {
    pub(super) record: &'a Record,
    pub(super) input: &'a Input<'a>,
    /// Its key, which an update holds as a member.
    pub(super) group: &'a str,
    metadata: Metadata<'a>,
    /// The event and its time, for the ids of updates.
    pub(super) cause: Identity,
    pub(super) time_ms: Option<i64>,
}

impl Aggregate {
    pub(super) fn new(store: StoreId, name: String, spec: &spec::Aggregate, changelog: Changelog) -> Aggregate {
        Aggregate {
            store,
            name,
            stamp: stamp(spec),
            values: vec![Vec::new(); spec.fields.len()],
            spec: spec.clone(),
            changelog,
            state: Vec::new(),
            text: Vec::new(),
            output: Vec::new(),
            updates: Vec::new(),
            closing: BTreeMap::new(),
            moved: BTreeSet::new(),
        }
    }

    /// Folds a record into the state of its key, and writes that to the changelog. What it puts out is in
    /// [`Aggregate::updates`].
    ///
    /// # Errors
    /// `null-key`, `key`, `tombstone`, `event-time`, `late`, `field`, `overflow`, `limit`, `too-large`, those of the
    /// expressions, and `retry` where another worker has the state.
    pub(super) fn fold(
        &mut self,
        record: &Record,
        input: &Input<'_>,
        event: &Event,
        runtime: &mut Runtime,
        states: &mut States,
        chunk: &mut Chunk,
    ) -> Result<Folded, Fault> {
        self.output.clear();
        self.updates.clear();
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
        let identity = record.identity(event);
        // Behind a repartition only the record's own id knows the event's time.
        let carried = || match identity {
            Identity::Known(id) => id.time_ms(),
            Identity::Unknown | Identity::Place(..) => None,
        };
        let time_ms = event.time_ms.or_else(carried);
        let metadata = Metadata::new(input, Some(key), identity);
        let folding = Folding { record, input, group, metadata, cause: identity, time_ms };
        let mut place = Place { states, chunk, partition: input.partition };
        let Some(window) = self.spec.window else { return self.fold_all(&folding, runtime, &mut place) };
        let time = event.time_ms.or(input.timestamp).filter(|time| *time >= 0);
        let time =
            time.ok_or_else(|| Fault::new("event-time", "the record has no time, which its window is told by"))?;
        let folded = match window.kind {
            WindowKind::Aligned { size_ms, advance_ms } => {
                self.fold_aligned(size_ms, advance_ms, window, time, &folding, runtime, &mut place)?
            }
            WindowKind::Session { gap_ms } => self.fold_session(gap_ms, window, time, &folding, runtime, &mut place)?,
        };
        if matches!(folded, Folded::Late) && window.late == Late::Reject {
            let message = format!("the time {} is late: its windows have closed", rfc3339(time));
            return Err(Fault::new("late", message));
        }
        Ok(folded)
    }

    /// Without windows: one group for all times.
    fn fold_all(
        &mut self,
        folding: &Folding<'_>,
        runtime: &mut Runtime,
        place: &mut Place<'_>,
    ) -> Result<Folded, Fault> {
        let key = [&[FORMAT], folding.group.as_bytes()].concat();
        let (revision, mut cells) = self.read(place, &key)?;
        if !self.evaluate(folding, runtime)? || !self.apply(&mut cells, folding, runtime, 0)? {
            return Ok(Folded::Dropped);
        }
        self.write(revision + 1, &cells, &key, place)?;
        let id = EventId::of_state(&self.name, &key, revision + 1, folding.cause, folding.time_ms);
        self.show(folding.group, None, &cells, id);
        Ok(Folded::Applied)
    }

    /// What the last record put out: JSON objects with their ids.
    pub(super) fn updates(&self) -> impl Iterator<Item = (&[u8], EventId)> {
        self.updates.iter().map(|(range, id)| (&self.output[range.clone()], *id))
    }

    /// The topic that its state is restored from.
    pub(super) fn changelog(&self) -> Arc<str> {
        Arc::clone(&self.changelog.target.topic)
    }

    /// Whether windows are put out once, when they close.
    pub(super) fn waits(&self) -> bool {
        self.spec.window.is_some_and(|window| window.emit == Emit::Close)
    }

    /// Puts out a group with its fields.
    pub(super) fn show(&mut self, group: &str, window: Option<(i64, i64)>, cells: &[Cell], id: EventId) {
        let start = self.output.len();
        self.begin(group, window);
        for (field, cell) in self.spec.fields.iter().zip(cells) {
            self.output.push(b',');
            member(&field.name, &mut self.output);
            cell.write(field.function, &mut self.output);
        }
        self.output.push(b'}');
        self.updates.push((start..self.output.len(), id));
    }

    /// Takes back what was told of a session that another has taken in.
    pub(super) fn retract(&mut self, group: &str, window: (i64, i64), id: EventId) {
        let start = self.output.len();
        self.begin(group, Some(window));
        self.output.push(b',');
        member(spec::RETRACTED, &mut self.output);
        self.output.extend_from_slice(b"true}");
        self.updates.push((start..self.output.len(), id));
    }

    /// What is put out of a window that closed.
    pub(super) fn last_of(
        &mut self,
        group: String,
        window: (i64, i64),
        cells: &[Cell],
        id: EventId,
        last_ms: i64,
    ) -> Final {
        self.output.clear();
        self.updates.clear();
        self.show(&group, Some(window), cells, id);
        Final { group, json: self.output.clone(), id, last_ms }
    }

    /// Closes windows of one partition in which some have to, so many at most: which, by which record, and what is put out of
    /// them. None where all are closed.
    pub(super) fn close(
        &mut self,
        most: usize,
        states: &mut States,
        chunk: &mut Chunk,
    ) -> Option<(i32, Offset, Vec<Final>)> {
        let window = self.spec.window?;
        let (partition, (from, offset)) = self.closing.pop_first()?;
        let mut place = Place { states, chunk, partition };
        let closed = match window.kind {
            WindowKind::Aligned { size_ms, .. } => self.close_aligned(size_ms, &from, most, &mut place),
            WindowKind::Session { gap_ms } => self
                .close_sessions(gap_ms, window, most, &mut place)
                .map(|(finals, more)| (finals, more.then(Vec::new))),
        };
        // Without its state a partition is another's to close.
        let (finals, rest) = closed.unwrap_or_default();
        if let Some(from) = rest {
            self.closing.insert(partition, (from, offset));
        }
        Some((partition, offset, finals))
    }

    /// The time of a partition, of one whose time goes on without records; none where there was no record yet.
    pub(super) fn time(&mut self, partition: i32, states: &mut States, chunk: &mut Chunk) -> Option<i64> {
        let window = self.spec.window.filter(|window| window.idle_ms.is_some())?;
        let place = Place { states, chunk, partition };
        let time = match window.kind {
            WindowKind::Aligned { .. } => self.time_aligned(&place),
            WindowKind::Session { .. } => self.time_session(&place),
        };
        // Without its state a partition is another's.
        time.ok().flatten()
    }

    /// Moves the time of a partition without a record, where windows close by it; whether it did. `offset` is that of the last
    /// record.
    pub(super) fn advance(
        &mut self,
        time: i64,
        partition: i32,
        offset: Offset,
        states: &mut States,
        chunk: &mut Chunk,
    ) -> bool {
        let Some(window) = self.spec.window else { return false };
        let mut place = Place { states, chunk, partition };
        let moved = match window.kind {
            WindowKind::Aligned { size_ms, advance_ms } => {
                self.advance_aligned((size_ms, advance_ms), window, time, offset, &mut place)
            }
            WindowKind::Session { gap_ms } => self.advance_session(gap_ms, window, time, offset, &mut place),
        };
        moved.unwrap_or_default()
    }

    /// Writes the time of partitions that moved to the changelog: once a batch.
    pub(super) fn tell_time(&mut self, states: &mut States, chunk: &mut Chunk) {
        for partition in std::mem::take(&mut self.moved) {
            if states.read(self.store, partition, &CLOCK, &mut self.state) == Ok(true) {
                self.changelog.put(partition, &CLOCK, Some(&self.state), chunk);
            }
        }
    }

    /// Forgets what was to be done for records that come again.
    pub(super) fn abandon(&mut self) {
        self.closing.clear();
        self.moved.clear();
    }

    fn begin(&mut self, group: &str, window: Option<(i64, i64)>) {
        self.output.push(b'{');
        member(&self.spec.key_field, &mut self.output);
        write_string(group, &mut self.output);
        if let Some((start, end)) = window {
            for (name, time) in [(spec::WINDOW_START, start), (spec::WINDOW_END, end)] {
                self.output.push(b',');
                member(name, &mut self.output);
                write_string(&rfc3339(time), &mut self.output);
            }
        }
    }

    /// Reads a key to `state`; false where there is none.
    ///
    /// # Errors
    /// `retry`: another worker has the state.
    pub(super) fn get(&mut self, place: &Place<'_>, key: &[u8]) -> Result<bool, Fault> {
        let Place { states, partition, .. } = place;
        states.read(self.store, *partition, key, &mut self.state)
    }

    /// Writes a key to state and changelog; none removes it.
    pub(super) fn put(&self, place: &mut Place<'_>, key: &[u8], value: Option<&[u8]>) {
        self.changelog.put(place.partition, key, value, place.chunk);
        place.states.write(self.store, place.partition, key, value);
    }

    /// Revision and cells of a key.
    pub(super) fn read(&mut self, place: &Place<'_>, key: &[u8]) -> Result<(u64, Vec<Cell>), Fault> {
        if self.get(place, key)? {
            return Ok(self.decode().expect("what is restored has the stamp of these fields"));
        }
        Ok((0, self.spec.fields.iter().map(|field| Cell::new(field.function)).collect()))
    }

    fn decode(&self) -> Option<(u64, Vec<Cell>)> {
        let mut coded = Coded(self.state.strip_prefix(&self.stamp)?);
        let revision = coded.number()?;
        let cells = self.spec.fields.iter().map(|field| Cell::new(field.function).decode(&mut coded));
        Some((revision, cells.collect::<Option<_>>()?))
    }

    pub(super) fn write(
        &mut self,
        revision: u64,
        cells: &[Cell],
        key: &[u8],
        place: &mut Place<'_>,
    ) -> Result<(), Fault> {
        self.state.clear();
        self.state.extend_from_slice(&self.stamp);
        put_number(revision, &mut self.state);
        cells.iter().for_each(|cell| cell.encode(&mut self.state));
        self.put_state(key, place)
    }

    /// Writes a key to the value in `state`.
    ///
    /// # Errors
    /// `too-large` for the changelog.
    pub(super) fn put_state(&mut self, key: &[u8], place: &mut Place<'_>) -> Result<(), Fault> {
        self.changelog.check("the state of the key", key, Some(&self.state))?;
        self.put(place, key, Some(&self.state));
        Ok(())
    }

    /// Works out what the fields are given of a record; reductions are worked out as they are applied. False if an
    /// expression aborted: the record is dropped.
    pub(super) fn evaluate(&mut self, folding: &Folding<'_>, runtime: &mut Runtime) -> Result<bool, Fault> {
        let Folding { record, metadata, .. } = folding;
        for (field, text) in self.spec.fields.iter().zip(&mut self.values) {
            text.clear();
            match &field.of {
                None => text.extend_from_slice(b"true"),
                Some(_) if field.function == Function::Reduce => {}
                Some(program) => {
                    if !json_text(program, record, runtime, metadata, text)? {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    /// Has the fields take their values. Null and what is not there are passed over. False if a reduction aborted.
    pub(super) fn apply(
        &mut self,
        cells: &mut [Cell],
        folding: &Folding<'_>,
        runtime: &mut Runtime,
        arrival: u64,
    ) -> Result<bool, Fault> {
        let Folding { record, metadata, .. } = folding;
        for ((field, cell), value) in self.spec.fields.iter().zip(cells).zip(&self.values) {
            let mut text = value;
            if let Some(program) = field.of.as_ref().filter(|_| field.function == Function::Reduce) {
                let both = both(field, cell, record)?;
                self.text.clear();
                if !evaluate(program, &both, runtime, metadata, &mut self.text)? {
                    return Ok(false);
                }
                text = &self.text;
            }
            if text != b"null" {
                cell.take(field.function, field.limit, text, arrival).map_err(|refusal| fault(field, refusal, text))?;
            }
        }
        Ok(true)
    }

    /// Has a session take in a later one. False if a merge aborted.
    pub(super) fn merge(
        &mut self,
        cells: &mut [Cell],
        later: Vec<Cell>,
        folding: &Folding<'_>,
        runtime: &mut Runtime,
    ) -> Result<bool, Fault> {
        for ((field, cell), later) in self.spec.fields.iter().zip(cells).zip(later) {
            let Some(program) = &field.merge else {
                let shown = |refusal| {
                    let mut text = Vec::new();
                    later.write(field.function, &mut text);
                    fault(field, refusal, &text)
                };
                cell.merge(field.function, field.limit, later.clone()).map_err(shown)?;
                continue;
            };
            let (Cell::One(own), Cell::One(other)) = (&*cell, &later) else { continue };
            if own.is_empty() || other.is_empty() {
                if own.is_empty() {
                    *cell = later;
                }
                continue;
            }
            let both = pair(own, "other", other)?;
            self.text.clear();
            if !evaluate(program, &both, runtime, &folding.metadata, &mut self.text)? {
                return Ok(false);
            }
            if self.text != b"null" {
                *cell = Cell::One(self.text.clone());
            }
        }
        Ok(true)
    }
}

/// What became of a record.
pub(super) enum Folded {
    /// It is in the state; its updates may go on.
    Applied,
    Dropped,
    /// Its windows have closed.
    Late,
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
fn both(field: &Field, cell: &Cell, record: &Record) -> Result<Body, Fault> {
    let mut acc = Vec::new();
    cell.write(field.function, &mut acc);
    let mut value = Vec::new();
    record.write_json("a reduction takes no bytes that are not UTF-8", &mut value)?;
    pair(&acc, "value", &value)
}

/// The object `{"acc":…,NAME:…}`.
fn pair(acc: &[u8], name: &str, other: &[u8]) -> Result<Body, Fault> {
    let text = [b"{\"acc\":", acc, b",\"", name.as_bytes(), b"\":", other, b"}"].concat();
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
