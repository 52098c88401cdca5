//! The table of a Postgres sink in memory: what its mode, its version and its ledger make of rows.

use std::collections::{BTreeMap, BTreeSet};

use super::json::Tree;
use crate::ids::EventId;
use crate::operator::row::Row;
use crate::topology::spec::{Mode, PostgresSink};

/// Rows by key; where every record is a row, by their number.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: BTreeMap<Vec<Tree>, Stored>,
    /// The ledger.
    seen: BTreeSet<EventId>,
}

/// A row as the table keeps it.
#[derive(Clone, Debug)]
pub struct Stored {
    version: Option<i64>,
    deleted: bool,
    /// Columns that are not null.
    pub cells: BTreeMap<String, Tree>,
}

impl Table {
    /// Does to the table what a row does: inserts it, replaces the row of its key in full (if the version is higher: of
    /// equal versions the first stays), adds its numbers. An event that is in the ledger has no effect.
    ///
    /// # Errors
    /// A sum of more digits than tests can hold.
    pub fn write(&mut self, sink: &PostgresSink, row: &Row<'_>) -> Result<(), String> {
        let id = row.id.filter(|_| sink.dedupe.is_some());
        if id.is_some_and(|id| self.seen.contains(&id)) {
            return Ok(());
        }
        let cells: BTreeMap<String, Tree> = row
            .cells
            .iter()
            .filter_map(|(name, cell)| Some((name.to_string(), Tree::parse(cell.as_deref()?)?)))
            .filter(|(_, tree)| *tree != Tree::Null)
            .collect();
        let key = match sink.mode {
            Mode::Insert => vec![Tree::parse(self.rows.len().to_string().as_bytes()).unwrap_or(Tree::Null)],
            _ => sink.key.iter().map(|column| cells.get(column).cloned().unwrap_or(Tree::Null)).collect(),
        };
        let new = Stored { version: row.version, deleted: row.deleted, cells };
        match (sink.mode, self.rows.get_mut(&key)) {
            (Mode::Add, old) => {
                let none = Stored { cells: BTreeMap::new(), ..new.clone() };
                let sums = added(&sink.key, &old.as_deref().unwrap_or(&none).cells, &new.cells)?;
                self.rows.insert(key, Stored { cells: sums, ..new });
            }
            (_, Some(old)) if old.version.is_some() && old.version >= new.version => {}
            (_, Some(old)) => *old = new,
            (Mode::Update, None) => {}
            (Mode::Upsert | Mode::Insert, None) => drop(self.rows.insert(key, new)),
        }
        self.seen.extend(id);
        Ok(())
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

/// The numbers of two rows summed; what is no number has no column to be added to.
fn added(
    key: &[String],
    old: &BTreeMap<String, Tree>,
    new: &BTreeMap<String, Tree>,
) -> Result<BTreeMap<String, Tree>, String> {
    let mut sums = old.clone();
    for (name, value) in new {
        if key.contains(name) {
            sums.insert(name.clone(), value.clone());
            continue;
        }
        let Some(value) = value.as_number() else { continue };
        let sum = match old.get(name) {
            Some(before) => before.plus(&value).ok_or_else(|| format!("column {name}: the sum has too many digits"))?,
            None => value,
        };
        sums.insert(name.clone(), sum);
    }
    Ok(sums)
}
