//! The table of a Postgres sink in memory: what the version guard keeps.

use std::collections::BTreeMap;

use super::json::Tree;
use crate::operator::row::Row;

/// Rows by key.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: BTreeMap<Vec<Tree>, Stored>,
}

/// A row as the table keeps it.
#[derive(Clone, Debug)]
pub struct Stored {
    version: i64,
    deleted: bool,
    /// Columns that are not null.
    pub cells: BTreeMap<String, Tree>,
}

impl Table {
    /// Inserts a row, or replaces the row of its key in full if the version is higher: of equal versions the first
    /// stays.
    pub fn upsert(&mut self, key: &[String], row: &Row<'_>) {
        let cells: BTreeMap<String, Tree> = row
            .cells
            .iter()
            .filter_map(|(name, cell)| Some((name.to_string(), Tree::parse(cell.as_deref()?)?)))
            .filter(|(_, tree)| *tree != Tree::Null)
            .collect();
        let key = key.iter().map(|column| cells.get(column).cloned().unwrap_or(Tree::Null)).collect();
        let new = Stored { version: row.version, deleted: row.deleted, cells };
        match self.rows.get_mut(&key) {
            Some(old) if old.version >= new.version => {}
            Some(old) => *old = new,
            None => drop(self.rows.insert(key, new)),
        }
    }

    /// The live rows by key.
    pub fn live(&self) -> impl Iterator<Item = &Stored> {
        self.rows.values().filter(|row| !row.deleted)
    }

    /// The keys of the rows that are marked deleted: the value of a one-column key, else an array.
    pub fn deleted(&self) -> impl Iterator<Item = Tree> {
        self.rows.iter().filter(|(_, row)| row.deleted).map(|(key, _)| match &key[..] {
            [one] => one.clone(),
            several => Tree::Array(several.to_vec()),
        })
    }
}
