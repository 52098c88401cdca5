//! The ledger: the ids of the events that had their effect, written in the transaction of the effect. What the ledger
//! knows already has none.

use std::collections::{HashMap, HashSet};

use tokio_postgres::types::Type as Pg;
use uuid::Uuid;

use super::batch::Batch;
use super::error::Error;
use super::partitions::Window;
use super::transaction::Transaction;

/// A sink's ledger as it was found in the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerTable {
    /// As the user named it.
    pub name: String,
    pub schema: String,
    /// Its name within the schema.
    pub table: String,
    pub oid: u32,
    /// In partitions of a day by the time in the ids; else flat.
    pub partitioned: bool,
    pub retention: std::time::Duration,
}

/// What the ledger says of rows.
#[derive(Debug, Default)]
pub struct Sifted {
    /// Seen for the first time; the ledger has them now.
    pub fresh: Vec<u32>,
    /// Their events had their effect before.
    pub duplicates: Vec<u32>,
    /// Their events are in another of these rows, by the row that stands first for them.
    pub repeats: HashMap<u32, Vec<u32>>,
    /// Of a time that the ledger does not remember: nobody knows whether they had their effect.
    pub outside: Vec<u32>,
}

impl LedgerTable {
    fn quoted(&self) -> String {
        use super::layout::quoted;
        format!("{}.{}", quoted(&self.schema), quoted(&self.table))
    }

    fn insert(&self) -> String {
        // One order for all writers, or two of them would wait for each other.
        format!(
            "INSERT INTO {} (event_id) SELECT e FROM unnest($1::uuid[]) AS semel_u(e) ORDER BY e \
             ON CONFLICT (event_id) DO NOTHING RETURNING event_id",
            self.quoted()
        )
    }

    fn delete(&self) -> String {
        format!("DELETE FROM {} WHERE event_id = ANY($1::uuid[])", self.quoted())
    }

    /// Enters the events of rows and tells which of them are new. An event that stands in several rows is entered for the
    /// first of them.
    ///
    /// # Panics
    /// If a row has no id.
    pub async fn sift<'c>(
        &self,
        transaction: Transaction<'c>,
        batch: &Batch,
        rows: &[u32],
        window: Option<Window>,
    ) -> Result<(Transaction<'c>, Sifted), Error> {
        let mut sifted = Sifted::default();
        let mut first: HashMap<Uuid, u32> = HashMap::with_capacity(rows.len());
        for &row in rows {
            let id = batch.id(row).expect("rows of a sink with a ledger have ids");
            if window.is_some_and(|window| !window.holds(id)) {
                sifted.outside.push(row);
                continue;
            }
            match first.get(&id.uuid()) {
                Some(&earlier) => sifted.repeats.entry(earlier).or_default().push(row),
                None => drop(first.insert(id.uuid(), row)),
            }
        }
        let ids: Vec<Uuid> = first.keys().copied().collect();
        let (transaction, answered) = transaction.query(&self.insert(), &[(&ids, Pg::UUID_ARRAY)]).await?;
        let entered: HashSet<Uuid> = answered.iter().map(|row| row.get(0)).collect();
        for &row in rows {
            let Some(id) = batch.id(row).map(|id| id.uuid()) else { continue };
            if first.get(&id) != Some(&row) {
                continue;
            }
            if entered.contains(&id) {
                sifted.fresh.push(row);
            } else {
                sifted.duplicates.push(row);
                sifted.duplicates.extend(sifted.repeats.remove(&row).unwrap_or_default());
            }
        }
        Ok((transaction, sifted))
    }

    /// Strikes the events of rows out again: what the database refused has had no effect.
    pub async fn forget<'c>(
        &self,
        transaction: Transaction<'c>,
        batch: &Batch,
        rows: impl Iterator<Item = u32>,
    ) -> Result<Transaction<'c>, Error> {
        let ids: Vec<Uuid> = rows.filter_map(|row| batch.id(row)).map(|id| id.uuid()).collect();
        let (transaction, _) = transaction.execute(&self.delete(), &[(&ids, Pg::UUID_ARRAY)]).await?;
        Ok(transaction)
    }

    /// Runs the statements without an id.
    pub async fn dry_run<'c>(&self, transaction: Transaction<'c>) -> Result<Transaction<'c>, Error> {
        let none: Vec<Uuid> = Vec::new();
        let (transaction, _) = transaction.query(&self.insert(), &[(&none, Pg::UUID_ARRAY)]).await?;
        let (transaction, _) = transaction.execute(&self.delete(), &[(&none, Pg::UUID_ARRAY)]).await?;
        Ok(transaction)
    }
}
