//! Which rows of a batch are written. Under a guard one row a key, the first of the highest version: that gives the
//! table that applying record by record under the guard `table.version < new.version` gives. Without one the last row
//! of a key; where rows are inserted or added, all of them.

use std::cmp::Ordering;
use std::collections::HashSet;

use super::batch::Batch;
use super::value::Value;
use crate::topology::spec::Mode;

/// Rows of a batch grouped by key. Keys are sorted, so that all writers lock rows in one order.
#[derive(Debug)]
pub struct Folded {
    /// Row indexes: keys ascending, within a key the winner first, then the order in which others take its place.
    order: Vec<u32>,
    /// Where in `order` each key's candidate stands, and where the key ends.
    candidates: Vec<(u32, u32)>,
}

/// How a row that was not written stands to the one that was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Folding {
    /// Of a lower version; without versions an earlier one.
    Superseded,
    /// The same version and content: a redelivery.
    Repeated,
    /// The same version with other content. The first one stays, and somebody should know.
    Tie,
}

impl Folded {
    pub fn new(batch: &Batch, rows: &[u32]) -> Folded {
        let layout = batch.layout();
        let each = matches!(layout.mode, Mode::Insert | Mode::Add);
        let last = layout.version.is_none() && !each;
        let mut order: Vec<u32> = rows.to_vec();
        order.sort_unstable_by(|&a, &b| {
            let by_age = if last { b.cmp(&a) } else { a.cmp(&b) };
            compare_keys(batch, a, b).then(batch.version(b).cmp(&batch.version(a))).then(by_age)
        });
        let mut candidates: Vec<(u32, u32)> = Vec::new();
        for at in 0..order.len() {
            let same = !each && at > 0 && compare_keys(batch, order[at - 1], order[at]) == Ordering::Equal;
            match candidates.last_mut() {
                Some((_, end)) if same => *end = at as u32 + 1,
                _ => candidates.push((at as u32, at as u32 + 1)),
            }
        }
        Folded { order, candidates }
    }

    /// The rows to write, sorted by key.
    pub fn winners(&self) -> Vec<u32> {
        self.candidates.iter().map(|(at, _)| self.order[*at as usize]).collect()
    }

    /// Takes rejected winners out and answers the rows that now stand for their keys, sorted by key. Keys without
    /// another row are gone.
    pub fn without(&mut self, rejected: &HashSet<u32>) -> Vec<u32> {
        let Folded { order, candidates } = self;
        let mut next = Vec::new();
        candidates.retain_mut(|(at, end)| {
            if rejected.contains(&order[*at as usize]) {
                *at += 1;
                next.extend((*at < *end).then(|| order[*at as usize]));
            }
            at < end
        });
        next
    }

    /// The rows behind their key's winner and how they stand to it.
    pub fn losers<'a>(&'a self, batch: &'a Batch) -> impl Iterator<Item = Folding> + use<'a> {
        self.candidates.iter().flat_map(move |&(at, end)| {
            let winner = self.order[at as usize];
            self.order[at as usize + 1..end as usize].iter().map(move |&row| compare_rows(batch, winner, row))
        })
    }
}

fn compare_rows(batch: &Batch, winner: u32, other: u32) -> Folding {
    if batch.version(other) < batch.version(winner) {
        return Folding::Superseded;
    }
    let mut columns = batch.row(winner).iter().zip(batch.row(other));
    match columns.all(|(a, b)| compare(batch, *a, *b) == Ordering::Equal) {
        true => Folding::Repeated,
        false if batch.layout().version.is_none() => Folding::Superseded,
        false => Folding::Tie,
    }
}

fn compare_keys(batch: &Batch, a: u32, b: u32) -> Ordering {
    let (left, right) = (batch.row(a), batch.row(b));
    let mut columns = batch.layout().key.iter().map(|&k| compare(batch, left[k], right[k]));
    columns.find(|o| o.is_ne()).unwrap_or(Ordering::Equal)
}

/// A total order on the values of one column. It need not be the database's, only the same everywhere.
fn compare(batch: &Batch, a: Value, b: Value) -> Ordering {
    let arena = &batch.arena;
    match (a, b) {
        (Value::Bool(a), Value::Bool(b)) => a.cmp(&b),
        (Value::Int(a), Value::Int(b)) => a.cmp(&b),
        (Value::Float(a), Value::Float(b)) => a.total_cmp(&b),
        (Value::Uuid(a), Value::Uuid(b)) => a.cmp(&b),
        (Value::Text(a), Value::Text(b)) => arena.text(a).cmp(arena.text(b)),
        (Value::Bytes(a), Value::Bytes(b)) => arena.bytes(a).cmp(arena.bytes(b)),
        (Value::Null, Value::Null) => Ordering::Equal,
        (Value::Null, _) => Ordering::Less,
        // A column has values of one kind.
        _ => Ordering::Greater,
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::sync::Arc;

    use super::super::layout::{Column, Layout, Type};
    use super::*;
    use crate::operator::row::Row;

    fn batch(rows: &[(&str, i64, &str)]) -> Batch {
        batch_of(Mode::Upsert, rows)
    }

    /// Only an upsert takes the second column for a version.
    fn batch_of(mode: Mode, rows: &[(&str, i64, &str)]) -> Batch {
        let column =
            |name: &str, ty| Column { name: name.into(), ty, required: false, default: None, may_be_filled: false };
        let layout = Layout {
            node: "n".into(),
            table: "t".into(),
            quoted_table: "t".into(),
            columns: vec![
                column("id", Type::Numeric { limits: None }),
                column("version", Type::Int8),
                column("text", Type::Text { max: None }),
            ],
            mode,
            key: vec![0],
            version: (mode == Mode::Upsert).then_some(1),
            deleted: None,
        };
        let mut batch = Batch::new(Arc::new(layout));
        for (id, version, text) in rows {
            let cell = |json: &str| Some(Cow::Owned(json.as_bytes().to_vec()));
            let number = version.to_string();
            let cells = vec![("id".into(), cell(id)), ("version".into(), cell(&number)), ("text".into(), cell(text))];
            let row = Row { id: None, version: (mode == Mode::Upsert).then_some(*version), deleted: false, cells };
            batch.push(&row).unwrap();
        }
        batch
    }

    fn folded(batch: &Batch) -> Folded {
        Folded::new(batch, &(0..batch.len() as u32).collect::<Vec<_>>())
    }

    #[test]
    fn without_a_guard_the_last_row_of_a_key_wins_or_all_do() {
        let rows = [("2", 1, "1"), ("1", 9, "1"), ("1", 3, "2"), ("1", 3, "2")];
        let updates = batch_of(Mode::Update, &rows);
        assert_eq!(folded(&updates).winners(), [3, 0]);
        let losers: Vec<_> = folded(&updates).losers(&updates).collect();
        assert_eq!(losers, [Folding::Repeated, Folding::Superseded]);
        let adds = batch_of(Mode::Add, &rows);
        let mut each = folded(&adds);
        assert_eq!(each.winners(), [1, 2, 3, 0], "by key, and within a key as they came");
        assert_eq!(each.without(&HashSet::from([2])), [0; 0]);
        assert_eq!(each.winners(), [1, 3, 0]);
        assert_eq!(each.losers(&adds).count(), 0);
    }

    #[test]
    fn the_first_of_the_highest_version_wins() {
        let batch =
            batch(&[("1", 1, "\"a\""), ("1.0", 3, "\"b\""), ("1", 2, "\"c\""), ("10e-1", 3, "\"d\""), ("2", 1, "1")]);
        let folded = folded(&batch);
        assert_eq!(folded.winners(), [1, 4]);
        let mut losers: Vec<Folding> = folded.losers(&batch).collect();
        losers.sort_by_key(|f| *f as u8);
        assert_eq!(losers, [Folding::Superseded, Folding::Superseded, Folding::Tie]);
    }

    #[test]
    fn a_repeated_record_is_no_tie() {
        let batch = batch(&[("1", 1, "\"a\""), ("1", 1, "\"a\"")]);
        assert_eq!(folded(&batch).losers(&batch).collect::<Vec<_>>(), [Folding::Repeated]);
    }

    #[test]
    fn a_rejected_winner_gives_way_to_the_next_of_its_key() {
        let batch = batch(&[("1", 1, "1"), ("1", 3, "2"), ("1", 2, "3"), ("2", 1, "4"), ("3", 1, "5")]);
        let mut folded = folded(&batch);
        assert_eq!(folded.winners(), [1, 3, 4]);
        assert_eq!(folded.without(&HashSet::from([1, 3])), [2]);
        assert_eq!(folded.winners(), [2, 4], "key 2 has no other row");
        assert_eq!(folded.without(&HashSet::from([2])), [0]);
        assert_eq!(folded.without(&HashSet::from([0])), [0; 0]);
        assert_eq!(folded.winners(), [4]);
        assert_eq!(folded.losers(&batch).count(), 0);
    }
}
