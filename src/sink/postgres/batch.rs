//! Rows on their way to the database, converted and checked.

use std::borrow::Cow;
use std::sync::Arc;

use super::layout::{Layout, Type};
use super::value::{Arena, Value, convert};
use crate::ids::EventId;
use crate::operator::row::Row;
use crate::reject::Reject;

/// A btree refuses longer keys depending on how well they compress; below this it takes all.
const KEY_BYTES_MAX: usize = 2600;
/// Of a value in a message.
const SHOWN_MAX: usize = 64;

/// Rows of one table. Fill it with [`push`](Batch::push) and hand it to
/// [`Writer::submit`](super::Writer::submit), which gives it back empty.
#[derive(Clone, Debug)]
pub struct Batch {
    layout: Arc<Layout>,
    /// One stride of columns a row.
    values: Vec<Value>,
    /// The event of each row; empty where rows come without.
    ids: Vec<EventId>,
    pub(super) arena: Arena,
}

impl Batch {
    pub fn new(layout: Arc<Layout>) -> Batch {
        Batch { layout, values: Vec::new(), ids: Vec::new(), arena: Arena::default() }
    }

    /// An empty batch of the same table.
    pub fn like(&self) -> Batch {
        Batch::new(Arc::clone(&self.layout))
    }

    /// Converts a row and takes it in; answers its index in the batch, by which [`Applied`](super::Applied) names it.
    ///
    /// # Errors
    /// A value that does not fit its column, a null in the key or another required column, a key too long for an index,
    /// a version that its column cannot hold. Nothing of the row stays in the batch.
    ///
    /// # Panics
    /// If the row was not mapped for the columns of this batch's layout.
    pub fn push(&mut self, row: &Row<'_>) -> Result<usize, Reject> {
        let mark = self.arena.mark();
        let index = self.len();
        let start = self.values.len();
        let result = self.convert_row(row, start);
        if let Err((reason, message)) = result {
            self.values.truncate(start);
            self.arena.rewind(mark);
            return Err(Reject { node: self.layout.node.clone(), reason, message });
        }
        self.ids.extend(row.id);
        Ok(index)
    }

    fn convert_row(&mut self, row: &Row<'_>, start: usize) -> Result<(), (&'static str, String)> {
        let Batch { layout, values, arena, .. } = self;
        // Another number would shift the values of all rows behind it.
        assert_eq!(row.cells.len(), layout.columns.len(), "a mapper for another table");
        for (at, (column, (_, cell))) in layout.columns.iter().zip(&row.cells).enumerate() {
            let key = layout.key.contains(&at);
            let value = if let Some(number) = row.version.filter(|_| Some(at) == layout.version) {
                version(number, &column.ty).ok_or_else(|| {
                    ("version", format!("version {number} is out of range for {} {}", column.name, column.ty.name()))
                })?
            } else if Some(at) == layout.deleted {
                Value::Bool(row.deleted)
            } else if let Some(json) = cell {
                let not_fitting = |problem: &str| {
                    let (name, ty) = (&column.name, column.ty.name());
                    ("column", format!("column {name}: {} does not fit {ty}: {problem}", shown(json)))
                };
                let json = std::str::from_utf8(json).map_err(|_| not_fitting("not UTF-8"))?;
                convert(column, key, json, arena).map_err(|problem| not_fitting(&problem))?
            } else {
                Value::Null
            };
            if value == Value::Null && (key || column.required) {
                let what = if key { "the key column" } else { "the NOT NULL column" };
                return Err(("column", format!("{what} {} is null or missing in the record", column.name)));
            }
            values.push(value);
        }
        let key_bytes: usize = layout.key.iter().map(|k| stored_len(values[start + k], arena)).sum();
        if key_bytes > KEY_BYTES_MAX {
            let names = layout.key_names().collect::<Vec<_>>().join(", ");
            return Err((
                "column",
                format!("key {names}: {key_bytes} bytes are too long for an index ({KEY_BYTES_MAX})"),
            ));
        }
        if u32::try_from(arena.len()).is_err() {
            return Err(("too-large", "a batch holds at most 4 GiB".into()));
        }
        Ok(())
    }

    /// Rows held.
    pub fn len(&self) -> usize {
        self.values.len() / self.layout.columns.len()
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Bytes held, to keep batches in bounds.
    pub fn bytes(&self) -> usize {
        self.arena.len() + size_of_val(self.values.as_slice())
    }

    /// Empties the batch; its buffers stay.
    pub fn clear(&mut self) {
        self.values.clear();
        self.ids.clear();
        self.arena.clear();
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(super) fn row(&self, index: u32) -> &[Value] {
        let stride = self.layout.columns.len();
        &self.values[index as usize * stride..][..stride]
    }

    /// The version of a row; the same for all rows where there is no guard.
    pub(super) fn version(&self, index: u32) -> i64 {
        match self.layout.version.map(|at| self.row(index)[at]) {
            Some(Value::Int(version)) => version,
            _ => i64::MIN,
        }
    }

    /// The event of a row, where rows come with one.
    pub(super) fn id(&self, index: u32) -> Option<EventId> {
        self.ids.get(index as usize).copied()
    }

    /// Whether the row is a tombstone.
    pub(super) fn deleted(&self, index: u32) -> bool {
        self.layout.deleted.is_some_and(|at| self.row(index)[at] == Value::Bool(true))
    }
}

fn version(version: i64, ty: &Type) -> Option<Value> {
    let fits = match ty {
        Type::Int2 => i16::try_from(version).is_ok(),
        Type::Int4 => i32::try_from(version).is_ok(),
        _ => true,
    };
    fits.then_some(Value::Int(version))
}

fn stored_len(value: Value, arena: &Arena) -> usize {
    match value {
        Value::Text(span) => arena.text(span).len(),
        Value::Bytes(span) => arena.bytes(span).len(),
        Value::Uuid(_) => 16,
        _ => 8,
    }
}

/// A value for a message: its beginning.
fn shown(json: &[u8]) -> Cow<'_, str> {
    if json.len() <= SHOWN_MAX {
        return String::from_utf8_lossy(json);
    }
    // A character may be cut in the middle: drop what is left of it.
    let head = String::from_utf8_lossy(&json[..SHOWN_MAX]);
    format!("{}…", head.trim_end_matches('\u{FFFD}')).into()
}

#[cfg(test)]
mod tests {
    use super::super::layout::Column;
    use super::*;
    use crate::topology::spec::Mode;

    fn layout() -> Arc<Layout> {
        let column =
            |name: &str, ty, required| Column { name: name.into(), ty, required, default: None, may_be_filled: false };
        Arc::new(Layout {
            node: "orders_table".into(),
            table: "orders".into(),
            quoted_table: "orders".into(),
            columns: vec![
                column("id", Type::Text { max: None }, true),
                column("version", Type::Int4, true),
                column("amount", Type::Int4, true),
                column("deleted", Type::Bool, true),
            ],
            mode: Mode::Upsert,
            key: vec![0],
            version: Some(1),
            deleted: Some(3),
        })
    }

    fn row<'a>(id: &'a str, version: i64, amount: &'a str) -> Row<'a> {
        let cell = |json: &'a str| (!json.is_empty()).then_some(Cow::Borrowed(json.as_bytes()));
        let cells = vec![
            ("id".into(), cell(id)),
            ("version".into(), None),
            ("amount".into(), cell(amount)),
            ("deleted".into(), None),
        ];
        Row { id: None, version: Some(version), deleted: false, cells }
    }

    #[test]
    fn a_row_that_does_not_fit_leaves_nothing_behind() {
        let mut batch = Batch::new(layout());
        assert_eq!(batch.push(&row("\"a\"", 1, "10")), Ok(0));
        let bytes = batch.bytes();
        let mut refused = |row: &Row<'_>| {
            let reject = batch.push(row).unwrap_err();
            assert_eq!(reject.node, "orders_table");
            assert_eq!((batch.len(), batch.bytes()), (1, bytes));
            (reject.reason, reject.message)
        };
        let column = |message: &str| ("column", message.to_owned());
        assert_eq!(
            refused(&row("\"b\"", 1, "2147483648")),
            column("column amount: 2147483648 does not fit integer: out of range")
        );
        assert_eq!(
            refused(&row("\"b\"", 1, &format!("\"{}\"", "é".repeat(40)))),
            column(&format!("column amount: \"{}… does not fit integer: no number", "é".repeat(31)))
        );
        assert_eq!(
            refused(&row("\"b\"", 2_147_483_648, "1")),
            ("version", "version 2147483648 is out of range for version integer".into())
        );
        assert_eq!(refused(&row("", 1, "1")), column("the key column id is null or missing in the record"));
        assert_eq!(refused(&row("null", 1, "1")), column("the key column id is null or missing in the record"));
        assert_eq!(
            refused(&row("\"b\"", 1, "null")),
            column("the NOT NULL column amount is null or missing in the record")
        );
        assert_eq!(
            refused(&row(&format!("\"{}\"", "k".repeat(2601)), 1, "1")),
            column("key id: 2601 bytes are too long for an index (2600)")
        );
        assert_eq!(batch.push(&row("\"b\"", 1, "1")), Ok(1));
    }
}
