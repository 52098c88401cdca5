//! A batch into the table, within one transaction.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio_postgres::types::{ToSql, Type as Pg};

use super::batch::Batch;
use super::error::Error;
use super::fold::{Folded, Folding};
use super::layout::{Layout, Type};
use super::sql::Statements;
use super::transaction::{Params, Transaction};
use super::value::Value;
use crate::topology::spec::Mode;

/// What became of the rows that were sent in one or more statements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Rows that had their effect.
    pub applied: u64,
    /// Rows whose version in the table was as high already; in an update also those without a row, or equal to it.
    pub stale: u64,
    /// Of those, rows of the same version with other content.
    pub ties: u64,
}

impl Written {
    pub fn add(&mut self, other: Written) {
        self.applied += other.applied;
        self.stale += other.stale;
        self.ties += other.ties;
    }
}

/// How a batch is written.
pub struct Writing<'a> {
    pub batch: &'a Batch,
    pub statements: &'a Statements,
    /// Most rows of the last batch were stale.
    pub replay: bool,
    /// Rows a statement, lowered where a statement took too long.
    pub rows_max: usize,
}

impl Writing<'_> {
    /// Writes rows sorted by key, no key twice. Fails as soon as one of them does.
    pub async fn write<'c>(
        &self,
        mut transaction: Transaction<'c>,
        rows: &[u32],
    ) -> Result<(Transaction<'c>, Written), Error> {
        let mut written = Written::default();
        for rows in rows.chunks(self.rows_max.max(1)) {
            let arrays = arrays(self.batch, rows);
            let params = params(self.batch.layout(), &arrays);
            let applied;
            (transaction, applied) = transaction.execute(self.statement(), &params).await?;
            let counted;
            (transaction, counted) = self.counted(transaction, &params, rows.len(), applied).await?;
            written.add(counted);
        }
        Ok((transaction, written))
    }

    /// Writes rows under a savepoint. The inner result is the server's refusal of some row of theirs, after which
    /// none of them is written and the transaction goes on.
    pub async fn attempt<'c>(
        &self,
        transaction: Transaction<'c>,
        rows: &[u32],
    ) -> Result<(Transaction<'c>, Result<Written, Error>), Error> {
        let arrays = arrays(self.batch, rows);
        let params = params(self.batch.layout(), &arrays);
        let (transaction, result) = transaction.attempt(self.statement(), &params).await?;
        match result {
            Ok(applied) => {
                let (transaction, written) = self.counted(transaction, &params, rows.len(), applied).await?;
                Ok((transaction, Ok(written)))
            }
            Err(error) => Ok((transaction, Err(error))),
        }
    }

    fn statement(&self) -> &str {
        let replay = self.statements.replay.as_ref().filter(|_| self.replay);
        replay.unwrap_or(&self.statements.write)
    }

    /// Looks for ties only where rows were stale. Rows just written are equal to themselves and do not count.
    async fn counted<'c>(
        &self,
        mut transaction: Transaction<'c>,
        params: &Params<'_>,
        sent: usize,
        applied: u64,
    ) -> Result<(Transaction<'c>, Written), Error> {
        let stale = match self.batch.layout().mode {
            // Many rows may go into one.
            Mode::Insert | Mode::Add => 0,
            Mode::Upsert | Mode::Update => (sent as u64).saturating_sub(applied),
        };
        let applied = sent as u64 - stale;
        let mut ties = 0;
        if let Some(statement) = self.statements.ties.as_ref().filter(|_| stale > 0) {
            let count;
            (transaction, count) = transaction.count(statement, params).await?;
            ties = (count.max(0) as u64).min(stale);
        }
        Ok((transaction, Written { applied, stale: stale - ties, ties }))
    }
}

/// Rows that never reached the database because another of their key did: how many, and how many of them were ties.
pub fn folded_away(folded: &Folded, batch: &Batch) -> (u64, u64, u64) {
    let mut counts = (0, 0, 0);
    for folding in folded.losers(batch) {
        match folding {
            Folding::Superseded => counts.0 += 1,
            Folding::Repeated => counts.1 += 1,
            Folding::Tie => counts.2 += 1,
        }
    }
    counts
}

type Array<'a> = Box<dyn ToSql + Sync + Send + 'a>;

fn params<'a>(layout: &Layout, arrays: &'a [Array<'a>]) -> Vec<(&'a (dyn ToSql + Sync), Pg)> {
    let types = layout.columns.iter().map(|c| c.ty.array());
    arrays.iter().map(|a| &**a as &(dyn ToSql + Sync)).zip(types).collect()
}

/// The rows as one array a column.
fn arrays<'a>(batch: &'a Batch, rows: &'a [u32]) -> Vec<Array<'a>> {
    let columns = batch.layout().columns.iter().enumerate();
    columns.map(|(at, column)| array(batch, rows, at, &column.ty)).collect()
}

fn array<'a>(batch: &'a Batch, rows: &'a [u32], at: usize, ty: &Type) -> Array<'a> {
    let values = rows.iter().map(|&row| batch.row(row)[at]);
    let ints = values.clone().map(|v| if let Value::Int(n) = v { Some(n) } else { None });
    let floats = values.clone().map(|v| if let Value::Float(n) = v { Some(n) } else { None });
    match ty {
        Type::Bool => Box::new(values.map(|v| if let Value::Bool(b) = v { Some(b) } else { None }).collect::<Vec<_>>()),
        // Ranges were checked when the values were made.
        Type::Int2 => Box::new(ints.map(|n| n.map(|n| n as i16)).collect::<Vec<_>>()),
        Type::Int4 => Box::new(ints.map(|n| n.map(|n| n as i32)).collect::<Vec<_>>()),
        Type::Int8 => Box::new(ints.collect::<Vec<_>>()),
        Type::Float4 => Box::new(floats.map(|n| n.map(|n| n as f32)).collect::<Vec<_>>()),
        Type::Float8 => Box::new(floats.collect::<Vec<_>>()),
        Type::TimestampTz { .. } | Type::Timestamp { .. } => Box::new(ints.map(|n| n.map(time)).collect::<Vec<_>>()),
        Type::Uuid => Box::new(
            values
                .map(|v| if let Value::Uuid(id) = v { Some(uuid::Uuid::from_bytes(id)) } else { None })
                .collect::<Vec<_>>(),
        ),
        Type::Bytea => Box::new(
            values.map(|v| if let Value::Bytes(s) = v { Some(batch.arena.bytes(s)) } else { None }).collect::<Vec<_>>(),
        ),
        Type::Text { .. }
        | Type::Char { .. }
        | Type::Numeric { .. }
        | Type::Date
        | Type::Json
        | Type::Jsonb
        | Type::Enum { .. } => Box::new(
            values.map(|v| if let Value::Text(s) = v { Some(batch.arena.text(s)) } else { None }).collect::<Vec<_>>(),
        ),
    }
}

fn time(micros: i64) -> SystemTime {
    let distance = Duration::from_micros(micros.unsigned_abs());
    if micros < 0 { UNIX_EPOCH - distance } else { UNIX_EPOCH + distance }
}

/// Runs the statements without a row and leaves the transaction to be rolled back: names, types, rights and the unique
/// index are checked by the server itself.
pub async fn dry_run(transaction: Transaction<'_>, layout: &Layout, statements: &Statements) -> Result<(), Error> {
    let batch = Batch::new(Arc::new(layout.clone()));
    let arrays = arrays(&batch, &[]);
    let params = params(layout, &arrays);
    let (mut transaction, _) = transaction.execute(&statements.write, &params).await?;
    if let Some(replay) = &statements.replay {
        (transaction, _) = transaction.execute(replay, &params).await?;
    }
    if let Some(ties) = &statements.ties {
        transaction.count(ties, &params).await?;
    }
    Ok(())
}
