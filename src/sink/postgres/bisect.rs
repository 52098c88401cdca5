//! Finding the rows that the database refuses, so that their neighbours are written all the same.

use std::collections::HashSet;

use super::error::{Class, Error};
use super::fold::Folded;
use super::transaction::Transaction;
use super::write::{Writing, Written};

/// A row that the database refused, and why.
#[derive(Clone, Debug)]
pub struct Refused {
    pub row: u32,
    pub error: Error,
}

/// Writes the rows of `folded` that can be written, each part under a savepoint: half by half down to the rows that
/// cannot. A key whose winner is refused is written by the row that stands next for it. Rows that only other rows stand
/// in the way of are tried again once those are written.
///
/// # Errors
/// Anything that no single row is to blame for; the transaction is lost then.
pub async fn isolate<'c>(
    mut transaction: Transaction<'c>,
    writing: &Writing<'_>,
    folded: &mut Folded,
) -> Result<(Transaction<'c>, Written, Vec<Refused>), Error> {
    let mut written = Written::default();
    let mut refused: Vec<Refused> = Vec::new();
    let mut rows = folded.winners();
    while !rows.is_empty() {
        let mut rejected = HashSet::new();
        while !rows.is_empty() {
            let (added, round);
            (transaction, added, round) = halves(transaction, writing, &rows).await?;
            written.add(added);
            // As long as some row got in, it may have made room for others.
            let progress = round.len() < rows.len();
            let (again, out): (Vec<_>, Vec<_>) =
                round.into_iter().partition(|r| progress && r.error.class() == Some(Class::Conflict));
            rejected.extend(out.iter().map(|r| r.row));
            refused.extend(out);
            rows = again.into_iter().map(|r| r.row).collect();
        }
        rows = folded.without(&rejected);
    }
    Ok((transaction, written, refused))
}

/// One pass over the rows: all of them, else each half, and so on.
async fn halves<'c>(
    mut transaction: Transaction<'c>,
    writing: &Writing<'_>,
    rows: &[u32],
) -> Result<(Transaction<'c>, Written, Vec<Refused>), Error> {
    let mut written = Written::default();
    let mut refused = Vec::new();
    let mut parts: Vec<&[u32]> = rows.chunks(writing.rows_max.max(1)).rev().collect();
    while let Some(part) = parts.pop() {
        let result;
        (transaction, result) = writing.attempt(transaction, part).await?;
        match result {
            Ok(added) => written.add(added),
            Err(error) if part.len() > 1 => {
                let (left, right) = part.split_at(part.len() / 2);
                parts.push(right);
                parts.push(left);
                tracing::trace!(rows = part.len(), %error, "a row of these is refused");
            }
            // One row alone cannot repeat a key: whatever this is, the record is not to blame.
            Err(error) if error.class() == Some(Class::Repeated) => return Err(error),
            Err(error) => refused.push(Refused { row: part[0], error }),
        }
    }
    Ok((transaction, written, refused))
}
