//! From a record to a row of a Postgres sink's table.
//!
//! A column takes the value of its expression in `columns`, else the top-level member of its name; a record without it
//! (or with null) writes NULL, for a record is the whole row. A record for which `delete_when` holds is written just
//! so, with its deleted column set: a delete is a version like any other. A null value carries nothing but its key, so
//! that with `tombstones = "delete"` the row keeps key and version and loses the rest.

use std::borrow::Cow;
use std::collections::HashMap;

use uuid::Uuid;

use crate::decimal::Decimal;
use crate::expr::{Body, Fault, Metadata, Program, Runtime, Value};
use crate::ids::{self, EventId, Identity};
use crate::json;
use crate::operator::{self, source};
use crate::record::Input;
use crate::reject::Reject;
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::{self, Format, NodeKind, PostgresSink, SinkTombstones, UnknownFields};

/// A column that rows have a cell for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnSpec {
    pub name: String,
}

/// The JSON text of a value; none where the record has none, which is NULL. So is the text `null`.
pub type Cell<'a> = Option<Cow<'a, [u8]>>;

/// A row of a sink's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    /// The event's id, where the sink keeps a ledger of them.
    pub id: Option<EventId>,
    /// None where the sink has no guard.
    pub version: Option<i64>,
    pub deleted: bool,
    /// By column name: in the order of the columns that the mapper was given, else key, members, expressions. The
    /// columns of version and deletion have a cell, too; key columns are never null.
    pub cells: Vec<(Cow<'a, str>, Cell<'a>)>,
}

/// What a record gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mapped<'a> {
    Row(Row<'a>),
    /// Nothing: a null value with `tombstones = "ignore"`, or an expression that aborted.
    Ignored,
}

/// Maps the records of one sink.
#[derive(Debug)]
pub struct RowMapper {
    node: String,
    sink: PostgresSink,
    /// Of each topic that the sink reads.
    formats: HashMap<String, Format>,
    /// Of each topic, what tells its events apart; only where the sink keeps a ledger.
    events: HashMap<String, source::Source>,
    columns: Option<Vec<Source>>,
    record: operator::Record,
    runtime: Runtime,
}

/// Where a column's value comes from.
#[derive(Clone, Debug)]
struct Source {
    name: String,
    expression: Option<Program>,
}

/// Why a record gives no row.
enum Stop {
    Fault(Fault),
    Ignored,
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Stop {
        Stop::Fault(fault)
    }
}

fn fault<T>(reason: &'static str, message: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Fault(Fault::new(reason, message)))
}

impl RowMapper {
    /// A mapper for the sink `node`. `formats` are those of the topics it reads. `columns` are the table's; without
    /// them (no database at hand) every member is a column.
    pub fn new(
        node: &str,
        sink: &PostgresSink,
        formats: impl IntoIterator<Item = (String, Format)>,
        columns: Option<Vec<ColumnSpec>>,
    ) -> RowMapper {
        let expression = |name: &str| sink.columns.iter().find(|(n, _)| n == name).map(|(_, program)| program.clone());
        let source = |name: String| Source { expression: expression(&name), name };
        let columns = columns.map(|columns| columns.into_iter().map(|c| source(c.name)).collect());
        RowMapper {
            node: node.into(),
            sink: sink.clone(),
            formats: formats.into_iter().collect(),
            events: HashMap::new(),
            columns,
            record: operator::Record::default(),
            runtime: Runtime::default(),
        }
    }

    /// Rows get the ids of their events where the sink keeps a ledger. `topic_ids` are the broker's.
    pub fn with_events(mut self, plan: &Plan, stage: &Stage, topic_ids: &HashMap<String, Uuid>) -> RowMapper {
        let StageKind::Postgres { inputs, .. } = &stage.kind else { return self };
        if self.sink.dedupe.is_none() {
            return self;
        }
        for node in inputs.iter().map(|id| &plan.topology.nodes[id.0]) {
            let (spec, own) = match &node.kind {
                NodeKind::Source(spec) => (spec.clone(), false),
                NodeKind::KafkaSink(sink) => {
                    let format = self.formats.get(&sink.topic).copied().unwrap_or(Format::Json);
                    (spec::Source::plain(&sink.topic, format), true)
                }
                _ => continue,
            };
            for name in &spec.topics {
                let id = topic_ids.get(name).copied().unwrap_or_default();
                let topic = source::Topic { name: name.clone(), id, own };
                self.events.insert(name.clone(), source::Source::new(&node.name, &spec, vec![topic]));
            }
        }
        self
    }

    /// The row of a record.
    ///
    /// # Errors
    /// `undecodable`; `event-id` and `event-time` where the sink keeps a ledger; `expression` and `inexact-number` from an expression; `tombstone`; `version` that is no 64-bit
    /// integer; `unknown-field`; `column` for a key without a value or a deletion mark that is neither true nor false.
    pub fn map<'a>(&'a mut self, input: &'a Input<'a>) -> Result<Mapped<'a>, Reject> {
        let format = self.formats.get(input.topic).copied().unwrap_or(Format::Json);
        // Apart from the rest of the mapper, which the row does not borrow.
        let RowMapper { node, sink, events, columns, record, runtime, .. } = self;
        let event = match events.get(input.topic) {
            Some(source) => event(source, input, record, runtime),
            None => record.body.decode(format, input.value).map(|()| None).map_err(Stop::Fault),
        };
        let carried = || input.headers.last(ids::HEADER).flatten().and_then(|id| EventId::carried(node, id, None));
        let id = event.as_ref().ok().copied().flatten();
        let metadata = Metadata::new(input, input.key, id.or_else(carried));
        let mut record = Record { sink, body: &record.body, metadata: &metadata, runtime };
        let nameless = id.is_none() && events.contains_key(input.topic);
        match event.and_then(|_| record.row(columns.as_deref(), input.key)) {
            // A place in the log is no id: the ledger would take what is sent twice for two events.
            Ok(_) if nameless => {
                let message = "the record has no event id for the ledger".to_owned();
                Err(Reject { node: node.clone(), reason: "event-id", message })
            }
            Ok(row) => Ok(Mapped::Row(Row { id, ..row })),
            Err(Stop::Ignored) => Ok(Mapped::Ignored),
            Err(Stop::Fault(Fault { reason, message })) => Err(Reject { node: node.clone(), reason, message }),
        }
    }
}

/// Decodes a record and finds the id of its event, if it has one of its own.
fn event(
    source: &source::Source,
    input: &Input<'_>,
    record: &mut operator::Record,
    runtime: &mut Runtime,
) -> Result<Option<EventId>, Stop> {
    let mut event = source::Event::default();
    if !source.take(input, record, runtime, &mut event)? {
        return Err(Stop::Ignored);
    }
    Ok(match event.identity {
        Identity::Known(id) => Some(id),
        Identity::Place(..) | Identity::Unknown => None,
    })
}

/// A record in work.
struct Record<'r, 'a> {
    sink: &'a PostgresSink,
    body: &'a Body,
    metadata: &'r Metadata<'r>,
    runtime: &'r mut Runtime,
}

impl<'a> Record<'_, 'a> {
    fn row(&mut self, columns: Option<&'a [Source]>, key: Option<&'a [u8]>) -> Result<Row<'a>, Stop> {
        let mut cells = match (self.body.is_null(), self.sink.tombstones) {
            (false, _) => self.cells(columns)?,
            (true, SinkTombstones::Delete) => self.tombstone(columns, key)?,
            (true, SinkTombstones::Ignore) => return Err(Stop::Ignored),
            (true, SinkTombstones::Reject) => return fault("tombstone", "a null value, and tombstones = \"reject\""),
        };
        for key in &self.sink.key {
            if find(&cells, key).is_none() {
                return fault("column", format!("the key column {key} is null or missing in the record"));
            }
        }
        let version = self.version(&cells)?;
        let deleted = self.deleted(&cells)?;
        if let Some(name) = &self.sink.deleted {
            let text: &[u8] = if deleted { b"true" } else { b"false" };
            match cells.iter_mut().find(|(n, _)| n == name) {
                Some((_, cell)) => *cell = Some(text.into()),
                None => cells.push((name.into(), Some(text.into()))),
            }
        }
        Ok(Row { id: None, version, deleted, cells })
    }

    fn cells(&mut self, columns: Option<&'a [Source]>) -> Result<Vec<(Cow<'a, str>, Cell<'a>)>, Stop> {
        let body = self.body;
        let Some(columns) = columns else {
            let mut cells: Vec<(Cow<'a, str>, Cell<'a>)> = Vec::new();
            let members = body.json().into_iter().flat_map(|json| json.members());
            cells.extend(members.map(|(name, text)| (name, Some(text))));
            for (name, program) in &self.sink.columns {
                cells.retain(|(n, _)| n != name);
                let cell = self.evaluate(program)?;
                cells.push((name.into(), cell));
            }
            cells.sort_by_key(|(name, _)| self.sink.key.iter().position(|k| k == name).unwrap_or(usize::MAX));
            return Ok(cells);
        };
        if self.sink.unknown_fields == UnknownFields::Reject {
            self.refuse_unknown(columns)?;
        }
        let mut cells = Vec::with_capacity(columns.len());
        for column in columns {
            let cell = match &column.expression {
                Some(program) => self.evaluate(program)?,
                None => body.json().and_then(|json| json.member(&column.name)),
            };
            cells.push((Cow::Borrowed(column.name.as_str()), cell));
        }
        Ok(cells)
    }

    /// Key and version of a null value. The key is the record's, unless an expression makes it.
    fn tombstone(
        &mut self,
        columns: Option<&'a [Source]>,
        key: Option<&'a [u8]>,
    ) -> Result<Vec<(Cow<'a, str>, Cell<'a>)>, Stop> {
        let names = columns.map(|c| c.iter().map(|s| s.name.as_str()).collect::<Vec<_>>());
        let fixed = self.sink.key.iter().chain(&self.sink.version).map(String::as_str);
        let names = names.unwrap_or_else(|| fixed.collect());
        let mut cells = Vec::with_capacity(names.len());
        for name in names {
            let expression = self.sink.columns.iter().find(|(n, _)| n == name).map(|(_, program)| program);
            let is_key = self.sink.key.iter().any(|k| k == name);
            let cell = match expression {
                Some(program) if is_key || Some(name) == self.sink.version.as_deref() => self.evaluate(program)?,
                None if is_key => key.map(record_key).transpose()?,
                _ => None,
            };
            cells.push((Cow::Borrowed(name), cell));
        }
        Ok(cells)
    }

    fn version(&self, cells: &[(Cow<'_, str>, Cell<'_>)]) -> Result<Option<i64>, Stop> {
        let Some(name) = &self.sink.version else { return Ok(None) };
        let Some(text) = find(cells, name) else {
            return fault("version", format!("the version {name} is null or missing in the record"));
        };
        let number = std::str::from_utf8(text).ok().and_then(Decimal::parse).and_then(|d| d.to_i64());
        match number {
            Some(version) => Ok(Some(version)),
            None => fault("version", format!("the version {name} is {}, no 64-bit integer", shown(text))),
        }
    }

    fn deleted(&mut self, cells: &[(Cow<'_, str>, Cell<'_>)]) -> Result<bool, Stop> {
        if self.body.is_null() {
            return Ok(true);
        }
        if let Some(condition) = &self.sink.delete_when {
            return condition.condition(self.runtime, self.body, self.metadata)?.ok_or(Stop::Ignored);
        }
        let Some(name) = &self.sink.deleted else { return Ok(false) };
        match find(cells, name) {
            None | Some(b"false") => Ok(false),
            Some(b"true") => Ok(true),
            Some(other) => fault("column", format!("column {name}: {} is neither true nor false", shown(other))),
        }
    }

    /// The value of an expression as JSON text. Of a plain member it is the record's own text, to the last digit.
    fn evaluate(&mut self, program: &'a Program) -> Result<Cell<'a>, Stop> {
        if let (Some(name), Some(json)) = (program.member(), self.body.json()) {
            return Ok(json.member(name));
        }
        let value = program.value(self.runtime, self.body, self.metadata)?.ok_or(Stop::Ignored)?;
        if value == Value::Null {
            return Ok(None);
        }
        if let Some(problem) = json::unwritable(&value) {
            return fault("expression", format!("the value of a column cannot be written as JSON: {problem}"));
        }
        let mut text = Vec::new();
        json::write(&value, &mut text);
        Ok(Some(text.into()))
    }

    /// A member that no column takes and no expression reads.
    fn refuse_unknown(&self, columns: &[Source]) -> Result<(), Stop> {
        let Some(json) = self.body.json() else { return Ok(()) };
        for (name, _) in json.members() {
            let column = columns.iter().any(|c| c.name == name && c.expression.is_none());
            let programs = self.sink.columns.iter().map(|(_, program)| program).chain(&self.sink.delete_when);
            if !column && !programs.into_iter().any(|p| p.uses().reads.iter().any(|path| reads(path, &name))) {
                return fault("unknown-field", format!("the table has no column for the member {name}"));
            }
        }
        Ok(())
    }
}

/// Whether a path as VRL writes it (`.a.b`) begins with the member.
fn reads(path: &str, member: &str) -> bool {
    let Some(path) = path.strip_prefix('.') else { return false };
    let rest = path.strip_prefix(member).or_else(|| path.strip_prefix(&format!("{member:?}")));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// The cell of a column, where it is not null.
fn find<'c>(cells: &'c [(Cow<'_, str>, Cell<'_>)], name: &str) -> Option<&'c [u8]> {
    let (_, cell) = cells.iter().find(|(n, _)| n == name)?;
    cell.as_deref().filter(|text| *text != b"null")
}

/// A record's key as a JSON string.
fn record_key<'a>(key: &[u8]) -> Result<Cow<'a, [u8]>, Stop> {
    let Ok(text) = std::str::from_utf8(key) else { return fault("column", "the record's key is not UTF-8") };
    let mut cell = Vec::with_capacity(key.len() + 2);
    json::write(&Value::from(text), &mut cell);
    Ok(cell.into())
}

/// A value for a message: its beginning.
fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    if text.chars().count() > 64 { text.chars().take(64).chain(['…']).collect() } else { text.into_owned() }
}

#[cfg(test)]
mod tests;
