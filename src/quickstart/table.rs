//! The table of the quick start: must not be there, is made, and is read back.

use tokio_postgres::Client;

use super::fold::Order;
use crate::error::Failure;
use crate::sink::postgres::{Address, session};

/// The table's definition.
pub const CREATE: &str = include_str!("../../topologies/orders.sql");

/// A connection to the database.
pub struct Table {
    runtime: tokio::runtime::Runtime,
    client: Client,
}

impl Table {
    /// Connects. Blocks, for 8 seconds at most.
    pub fn connect(url: &str) -> Result<Table, Failure> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(|e| Failure::refused(format!("cannot start a thread: {e}")))?;
        let address = Address::parse(url, "semel-quickstart").map_err(Failure::refused)?;
        let client = runtime.block_on(session(&address)).map_err(|e| Failure::unreachable(e.to_string()))?;
        Ok(Table { client, runtime })
    }

    /// Refuses a database that has the table: it would be somebody else's.
    pub fn refuse_used(&self) -> Result<(), Failure> {
        let there = self.client.query_one("SELECT to_regclass('orders') IS NOT NULL", &[]);
        if self.runtime.block_on(there).map_err(failed)?.get(0) {
            return Err(Failure::refused(
                "the database that DATABASE_URL names has a table orders: the quick start makes its own; drop that \
                 one, name another database, or unset DATABASE_URL to have one brought up",
            ));
        }
        Ok(())
    }

    /// Makes the table.
    pub fn make(&self) -> Result<(), Failure> {
        self.runtime.block_on(self.client.batch_execute(CREATE)).map_err(failed)
    }

    /// All rows, deleted ones included.
    pub fn read(&self) -> Result<Vec<Order>, Failure> {
        let query = "SELECT event_id, order_id, customer_id, status, qty::bigint, price::text, total, version, \
                     to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), deleted FROM orders";
        let rows = self.runtime.block_on(self.client.query(query, &[])).map_err(failed)?;
        let order = |row: &tokio_postgres::Row| Order {
            event_id: row.get(0),
            order_id: row.get(1),
            customer_id: row.get(2),
            status: row.get(3),
            qty: row.get(4),
            price: row.get(5),
            total: row.get(6),
            version: row.get(7),
            created_at: row.get(8),
            deleted: row.get(9),
        };
        Ok(rows.iter().map(order).collect())
    }
}

fn failed(error: tokio_postgres::Error) -> Failure {
    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
    Failure::unreachable(format!("the database: {error}{cause}"))
}
