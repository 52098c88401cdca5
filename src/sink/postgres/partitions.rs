//! What a ledger remembers: its partitions, a day each, are made ahead and dropped after its retention; a flat one
//! forgets rows by the time at which they were seen.
//!
//! An id of version 7 begins with its milliseconds, so that a range of ids is a range of time and the primary key of
//! the whole table is the partition key (a partition by arrival would take the same event again on the next day).

use std::time::Duration;

use chrono::DateTime;
use tokio_postgres::types::Type as Pg;
use uuid::Uuid;

use super::connect::Connection;
use super::error::Error;
use super::layout::quoted;
use super::ledger::LedgerTable;
use super::transaction::Transaction;
use crate::ids::EventId;

const DAY_MS: i64 = 86_400_000;
/// Days made ahead of today.
const AHEAD: i64 = 2;
/// Days beyond the retention before a partition goes: another process may look at the clock a little later.
const SLACK: i64 = 1;
/// Nobody's work waits long for the upkeep of a ledger.
const LOCK_TIMEOUT: &str = "2s";
/// Partitions made in one transaction: each takes locks, of which a server has a few thousand.
const MADE_AT_ONCE: usize = 50;
/// On a partition that is being dropped. One without it that is not attached is somebody else's: an archive.
const DROPPED: &str = "semel: past its ledger's retention, about to be dropped";
/// Rows deleted in one transaction.
const DELETED_AT_ONCE: u64 = 5000;

/// The times of events that a ledger can tell about, in milliseconds since 1970; the end is exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    from: i64,
    to: i64,
}

impl Window {
    fn around(now_ms: i64, retention: Duration) -> Window {
        let oldest = now_ms.saturating_sub(retention.as_millis() as i64).max(0);
        Window { from: oldest - oldest % DAY_MS, to: (now_ms / DAY_MS + 1 + AHEAD) * DAY_MS }
    }

    /// Whether the ledger can tell about an event: its id has a time, and it lies in the window.
    pub fn holds(self, id: EventId) -> bool {
        id.time_ms().is_some_and(|time| (self.from..self.to).contains(&time))
    }

    fn days(self) -> impl Iterator<Item = i64> {
        self.from / DAY_MS..self.to / DAY_MS
    }
}

/// A partition of ours, attached or not.
struct Partition {
    day: i64,
    name: String,
    attached: bool,
    detach_pending: bool,
    /// Marked by us before it was detached.
    dropped: bool,
}

impl LedgerTable {
    fn place(&self, table: &str) -> String {
        format!("{}.{}", quoted(&self.schema), quoted(table))
    }

    fn partition_of(&self, day: i64) -> String {
        let date = DateTime::from_timestamp_millis(day * DAY_MS).unwrap_or_default();
        format!("{}_p{}", self.table, date.format("%Y%m%d"))
    }

    /// Makes the partitions that are missing from today's window; answers the window. Writers go on meanwhile: a table is
    /// made apart and attached.
    pub async fn extend(&self, connection: &mut Connection) -> Result<Window, Error> {
        loop {
            let transaction = Transaction::begin(connection).await?;
            let (transaction, now) =
                transaction.count("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::int8", &[]).await?;
            let window = Window::around(now, self.retention);
            let (mut transaction, there) = self.partitions(transaction).await?;
            let missing = |there: &[Partition]| window.days().filter(|day| !attached(there, *day)).collect::<Vec<_>>();
            if missing(&there).is_empty() {
                transaction.commit().await?;
                return Ok(window);
            }
            // Another process may be at it: one after the other, and the second finds nothing to do.
            transaction = transaction.batch(&format!("SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")).await?;
            let lock = "SELECT 1::int8 FROM (SELECT pg_advisory_xact_lock(20260101, $1::int4)) l";
            (transaction, _) = transaction.count(lock, &[(&(self.oid as i32), Pg::INT4)]).await?;
            let there;
            (transaction, there) = self.partitions(transaction).await?;
            for day in missing(&there).into_iter().take(MADE_AT_ONCE) {
                let (parent, partition) = (self.place(&self.table), self.place(&self.partition_of(day)));
                let (from, to) = (first_id(day), first_id(day + 1));
                transaction = transaction
                    .batch(&format!(
                        "CREATE TABLE IF NOT EXISTS {partition} (LIKE {parent} INCLUDING DEFAULTS INCLUDING CONSTRAINTS); \
                         ALTER TABLE {parent} ATTACH PARTITION {partition} FOR VALUES FROM ('{from}') TO ('{to}')"
                    ))
                    .await?;
            }
            transaction.commit().await?;
        }
    }

    async fn partitions<'c>(&self, transaction: Transaction<'c>) -> Result<(Transaction<'c>, Vec<Partition>), Error> {
        let sql = "SELECT c.relname::text, i.inhrelid IS NOT NULL, coalesce(i.inhdetachpending, false), \
                   coalesce(obj_description(c.oid, 'pg_class') = $3, false) \
                   FROM pg_class p JOIN pg_class c ON c.relnamespace = p.relnamespace AND c.relkind = 'r' \
                   LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = p.oid \
                   WHERE p.oid = $1 AND starts_with(c.relname, $2) ORDER BY 1";
        let prefix = format!("{}_p", self.table);
        let (transaction, rows) =
            transaction.query(sql, &[(&self.oid, Pg::OID), (&prefix, Pg::TEXT), (&DROPPED, Pg::TEXT)]).await?;
        let partitions = rows.iter().filter_map(|row| {
            let name: String = row.get(0);
            let date = name.strip_prefix(&prefix).filter(|date| date.len() == 8)?;
            let date = chrono::NaiveDate::parse_from_str(date, "%Y%m%d").ok()?;
            let day = date.and_time(chrono::NaiveTime::MIN).and_utc().timestamp_millis() / DAY_MS;
            Some(Partition { day, name, attached: row.get(1), detach_pending: row.get(2), dropped: row.get(3) })
        });
        Ok((transaction, partitions.collect()))
    }

    /// Forgets what is older than the retention; answers how many partitions or rows went. On a connection of its own,
    /// since a partition is detached once the last transaction that may look at it is over.
    pub async fn forget_old(&self, connection: &mut Connection) -> Result<u64, Error> {
        match self.partitioned {
            true => self.drop_partitions(connection).await,
            false => self.delete_rows(connection).await,
        }
    }

    async fn drop_partitions(&self, connection: &mut Connection) -> Result<u64, Error> {
        let transaction = Transaction::begin(connection).await?;
        let (transaction, now) =
            transaction.count("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::int8", &[]).await?;
        let (transaction, there) = self.partitions(transaction).await?;
        transaction.commit().await?;
        let oldest = Window::around(now, self.retention).from / DAY_MS - SLACK;
        // DETACH CONCURRENTLY runs in no transaction, so the setting is the session's: behind a pooler that is somebody
        // else's next.
        connection.batch(&format!("SET lock_timeout = '{LOCK_TIMEOUT}'")).await?;
        let old = there.iter().filter(|partition| partition.day < oldest && (partition.attached || partition.dropped));
        let dropped = self.drop_each(connection, old).await;
        connection.batch("RESET lock_timeout").await?;
        dropped
    }

    async fn drop_each(
        &self,
        connection: &mut Connection,
        partitions: impl Iterator<Item = &Partition>,
    ) -> Result<u64, Error> {
        let parent = self.place(&self.table);
        let mut dropped = 0;
        for old in partitions {
            let partition = self.place(&old.name);
            if !old.dropped {
                connection.batch(&format!("COMMENT ON TABLE {partition} IS '{}'", DROPPED.replace('\'', "''"))).await?;
            }
            if old.attached {
                // Cut off in the middle before, it is finished now.
                let how = if old.detach_pending { "FINALIZE" } else { "CONCURRENTLY" };
                connection.batch(&format!("ALTER TABLE {parent} DETACH PARTITION {partition} {how}")).await?;
            }
            connection.batch(&format!("DROP TABLE {partition}")).await?;
            dropped += 1;
        }
        Ok(dropped)
    }

    async fn delete_rows(&self, connection: &mut Connection) -> Result<u64, Error> {
        let ledger = self.place(&self.table);
        let sql = format!(
            "DELETE FROM {ledger} WHERE event_id IN (SELECT event_id FROM {ledger} \
             WHERE seen_at < clock_timestamp() - $1::int8 * interval '1 millisecond' LIMIT {DELETED_AT_ONCE})"
        );
        let retention = self.retention.as_millis() as i64;
        let mut deleted = 0;
        loop {
            let transaction = Transaction::begin(connection).await?;
            let (transaction, rows) = transaction.execute(&sql, &[(&retention, Pg::INT8)]).await?;
            transaction.commit().await?;
            deleted += rows;
            if rows < DELETED_AT_ONCE {
                return Ok(deleted);
            }
        }
    }
}

fn attached(partitions: &[Partition], day: i64) -> bool {
    partitions.iter().any(|partition| partition.day == day && partition.attached)
}

/// The lowest id of a day.
fn first_id(day: i64) -> Uuid {
    Uuid::from_u128(((day * DAY_MS) as u128) << 80)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_reaches_from_the_first_day_remembered_to_the_days_made_ahead() {
        let day = |n: i64| n * DAY_MS;
        let window = Window::around(day(20_000) + 5, Duration::from_secs(3 * 86_400));
        assert_eq!(window, Window { from: day(19_997), to: day(20_003) });
        assert_eq!(window.days().collect::<Vec<_>>(), (19_997..20_003).collect::<Vec<_>>());
        let at = |ms: i64| EventId::declared("s", "x", Some(ms));
        assert!(!window.holds(at(day(19_997) - 1)));
        assert!(window.holds(at(day(19_997))));
        assert!(window.holds(at(day(20_003) - 1)));
        assert!(!window.holds(at(day(20_003))));
        assert!(!window.holds(EventId::declared("s", "x", None)), "an id without a time");
        assert_eq!(first_id(19_997).to_string(), "01924560-6c00-0000-0000-000000000000");
    }
}
