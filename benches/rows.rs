//! The statement of a Postgres stage, sent raw: `benches/figures.py` holds it against the stage itself.
//!
//! `cargo bench --bench rows -- TABLE [TOPIC]` makes TABLE anew, as `topologies/orders.sql` has it, in the database
//! that `DATABASE_URL` names. With a TOPIC of `KAFKA_BROKERS`, whose records are priced orders, their rows are read
//! into memory, and then written in one loop; it prints how long the loop took.

use std::error::Error;
use std::ops::ControlFlow;
use std::time::{Duration, Instant, SystemTime};

use chrono::DateTime;
use semel::kafka::{Admin, Connection, Isolation, Reader};
use semel::sink::postgres::{Address, session};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio_postgres::Client;

/// What a stage takes into a transaction by default.
const ROWS: usize = 1000;
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
struct Order {
    order_id: String,
    event_id: String,
    customer_id: String,
    status: String,
    qty: i32,
    price: Box<RawValue>,
    total: f64,
    version: i64,
    created_at: String,
}

/// Rows of one transaction, a vector a column.
#[derive(Default)]
struct Rows {
    /// order_id, event_id, customer_id, status, price.
    texts: [Vec<String>; 5],
    qty: Vec<i32>,
    total: Vec<f64>,
    version: Vec<i64>,
    created_at: Vec<SystemTime>,
    deleted: Vec<bool>,
}

impl Rows {
    fn push(&mut self, order: Order) -> Result<(), Box<dyn Error>> {
        self.deleted.push(order.status == "deleted");
        let texts = [order.order_id, order.event_id, order.customer_id, order.status, order.price.get().to_owned()];
        self.texts.iter_mut().zip(texts).for_each(|(column, text)| column.push(text));
        self.qty.push(order.qty);
        self.total.push(order.total);
        self.version.push(order.version);
        self.created_at.push(DateTime::parse_from_rfc3339(&order.created_at)?.into());
        Ok(())
    }
}

/// A table without rows; what was written before is on disk, so that it is not written while somebody is timed.
async fn make(client: &Client, table: &str) -> Result<(), Box<dyn Error>> {
    let columns = include_str!("../topologies/orders.sql").replace("TABLE orders", &format!("TABLE {table}"));
    client.batch_execute(&format!("DROP TABLE IF EXISTS {table}")).await?;
    client.batch_execute(&columns).await?;
    Ok(client.batch_execute("CHECKPOINT").await?)
}

fn read(brokers: &str, topic: &str) -> Result<Vec<Rows>, Box<dyn Error>> {
    let connection = Connection::new(brokers, "rows");
    let admin = Admin::new(&connection, PATIENCE)?;
    let partitions = admin.topic(topic)?.ok_or("no such topic")?.partitions;
    let mut reader = Reader::new(&connection, PATIENCE)?;
    let mut all: Vec<Rows> = Vec::new();
    for range in Reader::whole(&admin, topic, partitions, Isolation::ReadCommitted)? {
        reader.read::<Box<dyn Error>>(&range, |input| {
            if all.last().is_none_or(|rows| rows.qty.len() == ROWS) {
                all.push(Rows::default());
            }
            let order = serde_json::from_slice(input.value.ok_or("a record without a value")?)?;
            all.last_mut().expect("pushed above").push(order)?;
            Ok(ControlFlow::Continue(()))
        })?;
    }
    Ok(all)
}

/// Sends what the stage would: one prepared statement, here a transaction of its own, which saves BEGIN and COMMIT.
async fn write(client: &Client, table: &str, all: &[Rows]) -> Result<u64, tokio_postgres::Error> {
    let sql = format!(
        "INSERT INTO {table} AS t (order_id, event_id, customer_id, status, price, qty, total, version, created_at, \
         deleted) SELECT u.c0, u.c1, u.c2, u.c3, u.c4::numeric, u.c5, u.c6, u.c7, u.c8, u.c9 \
         FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::int4[], $7::float8[], $8::int8[], \
         $9::timestamptz[], $10::bool[]) AS u(c0, c1, c2, c3, c4, c5, c6, c7, c8, c9) \
         ON CONFLICT (order_id) DO UPDATE SET event_id = excluded.event_id, customer_id = excluded.customer_id, \
         status = excluded.status, price = excluded.price, qty = excluded.qty, total = excluded.total, \
         version = excluded.version, created_at = excluded.created_at, deleted = excluded.deleted \
         WHERE t.version < excluded.version"
    );
    let statement = client.prepare(&sql).await?;
    let mut written = 0;
    for rows in all {
        let [order_id, event_id, customer_id, status, price] = &rows.texts;
        let Rows { qty, total, version, created_at, deleted, .. } = rows;
        written += client
            .execute(
                &statement,
                &[order_id, event_id, customer_id, status, price, qty, total, version, created_at, deleted],
            )
            .await?;
    }
    Ok(written)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let Some((table, topic)) = arguments.split_first() else {
        println!("rows: nothing to do without a table; benches/figures.py names one");
        return Ok(());
    };
    let client = session(&Address::parse(&std::env::var("DATABASE_URL")?, "rows")?).await?;
    make(&client, table).await?;
    let Some(topic) = topic.first() else { return Ok(()) };
    let all = read(&std::env::var("KAFKA_BROKERS")?, topic)?;
    let began = Instant::now();
    let rows = write(&client, table, &all).await?;
    println!("{}", serde_json::json!({ "rows": rows, "seconds": began.elapsed().as_secs_f64() }));
    Ok(())
}
