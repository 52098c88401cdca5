//! A transaction that cannot be committed after an error: a statement that fails takes it away from its caller. The
//! driver would not help: it answers `Ok` to a COMMIT that the server turned into a rollback.

use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Statement};

use super::connect::{ANSWER_TIMEOUT, Connection, SETTINGS};
use super::error::Error;
use crate::crash::{self, Point};

/// Parameters with their types.
pub type Params<'a> = [(&'a (dyn ToSql + Sync), Type)];

/// An open transaction. Dropped, it is rolled back before the next one begins on the connection.
pub struct Transaction<'c> {
    connection: &'c mut Connection,
}

impl<'c> Transaction<'c> {
    /// Begins at READ COMMITTED: the guard needs no more, and above it every conflict would be an error. Constraints
    /// are checked by each statement, so that none waits for COMMIT to refuse a row.
    pub async fn begin(connection: &'c mut Connection) -> Result<Transaction<'c>, Error> {
        let mut sql = String::new();
        if connection.dirty {
            sql.push_str("ROLLBACK;");
        }
        sql.push_str("BEGIN ISOLATION LEVEL READ COMMITTED; SET CONSTRAINTS ALL IMMEDIATE;");
        if !connection.prepared {
            sql.extend(SETTINGS.iter().map(|(name, value)| format!("SET LOCAL {name} = '{value}';")));
        }
        connection.dirty = true;
        let transaction = Transaction { connection };
        transaction.simple(&sql).await?;
        Ok(transaction)
    }

    /// Runs a statement; answers the rows it touched.
    pub async fn execute(self, sql: &str, params: &Params<'_>) -> Result<(Self, u64), Error> {
        let (transaction, result) = self.run(sql, params).await;
        Ok((transaction, result?))
    }

    /// Runs a statement under a savepoint: what the server refuses of it leaves the transaction as it was.
    pub async fn attempt(self, sql: &str, params: &Params<'_>) -> Result<(Self, Result<u64, Error>), Error> {
        self.simple("SAVEPOINT semel").await?;
        let (transaction, result) = self.run(sql, params).await;
        match result {
            Ok(rows) => {
                transaction.simple("RELEASE SAVEPOINT semel").await?;
                Ok((transaction, Ok(rows)))
            }
            Err(error) if error.asks_for_parts() => {
                transaction.simple("ROLLBACK TO SAVEPOINT semel; RELEASE SAVEPOINT semel").await?;
                Ok((transaction, Err(error)))
            }
            Err(error) => Err(error),
        }
    }

    /// Runs a query that answers one number.
    pub async fn count(self, sql: &str, params: &Params<'_>) -> Result<(Self, i64), Error> {
        let (transaction, rows) = self.query(sql, params).await?;
        let count = rows.first().map_or(Ok(0), |row| row.try_get(0)).map_err(|e| transaction.connection.error(&e))?;
        Ok((transaction, count))
    }

    /// Runs a query; answers its rows.
    pub async fn query(self, sql: &str, params: &Params<'_>) -> Result<(Self, Vec<Row>), Error> {
        let connection = &mut *self.connection;
        let result = answered(async {
            if !connection.prepared {
                return connection.client.query_typed(sql, params).await;
            }
            let statement = prepared(connection, sql, params).await?;
            connection.client.query(&statement, &values(params)).await
        });
        let rows = result.await?.map_err(|e| self.connection.error(&e))?;
        Ok((self, rows))
    }

    /// Runs statements without parameters or rows.
    pub async fn batch(self, sql: &str) -> Result<Self, Error> {
        self.simple(sql).await?;
        Ok(self)
    }

    /// Gives the transaction up at once, and with it its locks.
    pub async fn rollback(self) -> Result<(), Error> {
        self.simple("ROLLBACK").await?;
        self.connection.dirty = false;
        Ok(())
    }

    /// Commits. A connection that closes meanwhile, or an answer that does not come in time, leaves the outcome unknown:
    /// the whole transaction must be done again. It waits for the locks of this one while the server is still at it.
    pub async fn commit(self) -> Result<(), Error> {
        crash::at(Point::BeforeDatabaseCommit);
        answered(self.connection.client.batch_execute("COMMIT")).await?.map_err(|e| self.connection.error(&e))?;
        crash::at(Point::AfterDatabaseCommit);
        self.connection.dirty = false;
        Ok(())
    }

    async fn run(self, sql: &str, params: &Params<'_>) -> (Self, Result<u64, Error>) {
        let connection = &mut *self.connection;
        let result = answered(async {
            if !connection.prepared {
                return connection.client.execute_typed(sql, params).await;
            }
            let statement = prepared(connection, sql, params).await?;
            connection.client.execute(&statement, &values(params)).await
        })
        .await;
        let result = result.and_then(|r| r.map_err(|e| self.connection.error(&e)));
        (self, result)
    }

    async fn simple(&self, sql: &str) -> Result<(), Error> {
        self.connection.batch(sql).await
    }
}

impl Connection {
    /// Runs statements outside of any transaction of ours.
    pub async fn batch(&self, sql: &str) -> Result<(), Error> {
        answered(self.client.batch_execute(sql)).await?.map_err(|e| self.error(&e))
    }
}

/// The connection's prepared statement of a text.
async fn prepared(
    connection: &mut Connection,
    sql: &str,
    params: &Params<'_>,
) -> Result<Statement, tokio_postgres::Error> {
    if let Some((_, statement)) = connection.statements.iter().find(|(text, _)| text == sql) {
        return Ok(statement.clone());
    }
    let types: Vec<Type> = params.iter().map(|(_, ty)| ty.clone()).collect();
    let statement = connection.client.prepare_typed(sql, &types).await?;
    connection.statements.push((sql.to_owned(), statement.clone()));
    Ok(statement)
}

fn values<'a>(params: &'a Params<'_>) -> Vec<&'a (dyn ToSql + Sync)> {
    params.iter().map(|(value, _)| *value).collect()
}

/// Bounds the wait for an answer. Past it the connection is thrown away: the server may still be at it, or something
/// between here and there keeps the connection open that has lost it.
async fn answered<T>(query: impl Future<Output = T>) -> Result<T, Error> {
    let seconds = ANSWER_TIMEOUT.as_secs();
    timeout(ANSWER_TIMEOUT, query).await.map_err(|_| Error::Connection(format!("no answer within {seconds} s")))
}
