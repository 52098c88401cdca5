//! The database of scratch tables.

use tokio_postgres::{Client, SimpleQueryMessage};

use crate::error::Failure;
use crate::record::{Position, TopicPartition};
use crate::sink::postgres::{Address, OFFSETS, session};

/// A connection to the database, where the topology has tables.
pub struct Database(Option<(tokio::runtime::Runtime, Client)>);

impl Database {
    /// Connects. Blocks, for 8 seconds at most.
    pub(super) fn connect(url: Option<&str>, purpose: &str) -> Result<Database, Failure> {
        let Some(url) = url else { return Ok(Database(None)) };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(|e| Failure::refused(format!("cannot start a thread: {e}")))?;
        let address = Address::parse(url, &format!("semel-{purpose}")).map_err(Failure::refused)?;
        let client = runtime.block_on(session(&address)).map_err(|e| Failure::unreachable(e.to_string()))?;
        Ok(Database(Some((runtime, client))))
    }

    /// Runs a statement; blocks.
    pub fn execute(&self, sql: &str) -> Result<(), Failure> {
        self.query(sql).map(drop)
    }

    /// The first column of each row that a statement gives; blocks.
    pub fn query(&self, sql: &str) -> Result<Vec<String>, Failure> {
        let Some((runtime, client)) = &self.0 else { return Ok(Vec::new()) };
        let messages = runtime.block_on(client.simple_query(sql)).map_err(|error| {
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            Failure::unreachable(format!("the database: {error}{cause} ({sql})"))
        })?;
        let first = |message| match message {
            SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or_default().to_owned()),
            _ => None,
        };
        Ok(messages.into_iter().filter_map(first).collect())
    }

    /// Where a stage with positions beside its rows stands in a partition.
    pub fn position(&self, stage: &str, partition: &TopicPartition) -> Result<Option<Position>, Failure> {
        // Scratch names of stages and topics hold no quotes.
        let TopicPartition { topic, partition } = partition;
        let sql = format!(
            "SELECT next_offset FROM {OFFSETS} WHERE stage = '{stage}' AND topic = '{topic}' AND partition = {partition}"
        );
        Ok(self.query(&sql)?.first().and_then(|offset| offset.parse().ok()).map(Position))
    }

    /// The rows of a table as JSON text.
    pub fn rows(&self, table: &str) -> Result<Vec<String>, Failure> {
        self.query(&format!("SELECT to_jsonb(t) FROM {table} t"))
    }
}
