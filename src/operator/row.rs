//! From a record to a row.

use std::borrow::Cow;

/// A column that rows have a cell for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnSpec {
    pub name: String,
}

/// The JSON text of a member or an expression's value; none where the record has none.
pub type Cell<'a> = Option<Cow<'a, [u8]>>;

/// A row of a sink's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    pub version: i64,
    pub deleted: bool,
    pub cells: Vec<Cell<'a>>,
}
