//! Positions beside the rows: what a transaction advances, and the dead letters that it leaves to be relayed.
//!
//! A partition's row holds the next offset and an epoch that each owner raises when it takes the partition over. A
//! transaction advances exactly the positions that it began at, in its own epoch, or it is rolled back: an owner that was
//! away writes nothing any more, and a batch has its effect once however often its COMMIT went unanswered.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use tokio_postgres::types::Type as Pg;
use uuid::Uuid;

use super::error::Error;
use super::transaction::Transaction;
use crate::chunk::{Chunk, Output, TargetId};
use crate::error::Failure;
use crate::record::{Offset, Position, TopicPartition};
use crate::reject::Reject;

/// The tables, shared by all stages of a database.
pub const OFFSETS: &str = "semel.sink_offsets";
pub const LETTERS: &str = "semel.dead_letters";

/// The statements that make them.
pub const CREATE_OFFSETS: &str = "CREATE TABLE semel.sink_offsets (
    stage       text NOT NULL,
    topic       text NOT NULL,
    topic_id    uuid NOT NULL,
    partition   integer NOT NULL,
    next_offset bigint NOT NULL CHECK (next_offset >= 0),
    owner_epoch bigint NOT NULL DEFAULT 1,
    owner       text NOT NULL,
    updated_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (stage, topic, topic_id, partition)
) WITH (fillfactor = 50);";
pub const CREATE_LETTERS: &str = "CREATE TABLE semel.dead_letters (
    stage            text NOT NULL,
    topic            text NOT NULL,
    topic_id         uuid NOT NULL,
    partition        integer NOT NULL,
    record_offset    bigint NOT NULL,
    target_partition integer NOT NULL,
    timestamp_ms     bigint,
    key              bytea,
    value            bytea,
    header_names     bytea[] NOT NULL,
    header_values    bytea[] NOT NULL,
    created_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (stage, topic, topic_id, partition, record_offset)
);";

/// Locks first, in one order: a join alone takes rows as it finds them.
const ADVANCE: &str = "WITH semel_l AS MATERIALIZED (SELECT u.* FROM \
     unnest($2::text[], $3::uuid[], $4::int4[], $5::int8[], $6::int8[], $7::int8[]) AS u(t, i, p, e, f, n) \
     JOIN semel.sink_offsets o ON o.stage = $1 AND o.topic = u.t AND o.topic_id = u.i AND o.partition = u.p \
     ORDER BY u.t, u.p FOR UPDATE OF o) \
     UPDATE semel.sink_offsets AS o SET next_offset = u.n, updated_at = now() FROM semel_l AS u \
     WHERE o.stage = $1 AND o.topic = u.t AND o.topic_id = u.i AND o.partition = u.p \
     AND o.owner_epoch = u.e AND o.next_offset = u.f AND u.n >= u.f";
const CLAIM: &str = "INSERT INTO semel.sink_offsets AS o (stage, topic, topic_id, partition, next_offset, owner) \
     SELECT $1, u.t, u.i, u.p, u.n, $2 FROM unnest($3::text[], $4::uuid[], $5::int4[], $6::int8[]) AS u(t, i, p, n) \
     ORDER BY u.t, u.p ON CONFLICT (stage, topic, topic_id, partition) \
     DO UPDATE SET owner_epoch = o.owner_epoch + 1, owner = excluded.owner, updated_at = now() \
     RETURNING topic, partition, owner_epoch, next_offset";
const OTHERS: &str = "SELECT o.topic FROM semel.sink_offsets o \
     JOIN unnest($2::text[], $3::uuid[], $4::int4[]) AS u(t, i, p) ON o.topic = u.t AND o.partition = u.p \
     WHERE o.stage = $1 AND o.topic_id <> u.i ORDER BY 1 LIMIT 1";
const ABSENT: &str = "SELECT u.t, u.p FROM unnest($2::text[], $3::uuid[], $4::int4[]) AS u(t, i, p) \
     WHERE NOT EXISTS (SELECT FROM semel.sink_offsets o WHERE o.stage = $1 AND o.topic = u.t AND o.topic_id = u.i \
     AND o.partition = u.p) ORDER BY 1, 2 LIMIT 1";
/// Of any topic that had the name.
const FORGET: &str = "DELETE FROM semel.sink_offsets o USING unnest($2::text[], $3::int4[]) AS u(t, p) \
     WHERE o.stage = $1 AND o.topic = u.t AND o.partition = u.p";
const READ: &str = "SELECT topic, topic_id, partition, next_offset FROM semel.sink_offsets WHERE stage = $1";
const PENDING: &str = "SELECT d.topic, d.partition, d.record_offset, d.target_partition, d.timestamp_ms, d.key, d.value, \
     d.header_names, d.header_values FROM semel.dead_letters d \
     JOIN unnest($2::text[], $3::uuid[], $4::int4[]) AS u(t, i, p) \
     ON d.topic = u.t AND d.topic_id = u.i AND d.partition = u.p WHERE d.stage = $1 ORDER BY 1, 2, 3";
const KEEP: &str = "INSERT INTO semel.dead_letters (stage, topic, topic_id, partition, record_offset, target_partition, \
     timestamp_ms, key, value, header_names, header_values) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) \
     ON CONFLICT DO NOTHING";
const RELAYED: &str = "DELETE FROM semel.dead_letters d USING \
     unnest($2::text[], $3::uuid[], $4::int4[], $5::int8[]) AS u(t, i, p, o) WHERE d.stage = $1 \
     AND d.topic = u.t AND d.topic_id = u.i AND d.partition = u.p AND d.record_offset = u.o";

/// Who writes: a stage by its consumer group, and the topics' ids.
#[derive(Clone, Debug)]
pub struct StageName {
    pub stage: String,
    /// A retry topic may be made while the stage runs.
    topic_ids: Arc<RwLock<HashMap<String, Uuid>>>,
}

impl StageName {
    pub fn new(stage: &str, topic_ids: HashMap<String, Uuid>) -> StageName {
        StageName { stage: stage.to_owned(), topic_ids: Arc::new(RwLock::new(topic_ids)) }
    }

    /// Learns the id of a topic.
    pub fn learn(&self, topic: &str, id: Uuid) {
        self.topic_ids.write().unwrap_or_else(PoisonError::into_inner).insert(topic.to_owned(), id);
    }

    fn id(&self, topic: &str) -> Uuid {
        self.topic_ids.read().unwrap_or_else(PoisonError::into_inner).get(topic).copied().unwrap_or_default()
    }
}

/// A partition to be taken over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seed {
    pub partition: TopicPartition,
    /// Where it starts if this stage never had it.
    pub position: Position,
    /// The stage had it: its position must be there.
    pub had: bool,
}

/// A partition's position as an owner holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    pub partition: TopicPartition,
    pub epoch: i64,
    pub position: Position,
}

/// A move of a claimed partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advance {
    pub partition: TopicPartition,
    pub epoch: i64,
    pub from: Position,
    pub to: Position,
}

/// The record that a dead letter is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub partition: TopicPartition,
    pub offset: Offset,
}

/// A dead letter on its way through the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    pub origin: Origin,
    target_partition: i32,
    timestamp: Option<i64>,
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

impl Letter {
    pub fn new(origin: Origin, output: &Output<'_>) -> Letter {
        let headers = output.headers().map(|(name, value)| (name.to_vec(), value.map(<[u8]>::to_vec)));
        Letter {
            origin,
            target_partition: output.partition,
            timestamp: output.timestamp,
            key: output.key.map(<[u8]>::to_vec),
            value: output.value.map(<[u8]>::to_vec),
            headers: headers.collect(),
        }
    }

    /// Puts the letter among outputs to a topic of so many partitions: it may have been made anew with fewer.
    pub fn put(&self, chunk: &mut Chunk, target: TargetId, partitions: i32) {
        let mut out = chunk.push(target);
        out.partition(self.target_partition.rem_euclid(partitions.max(1))).timestamp(self.timestamp);
        out.key(self.key.as_deref()).value(self.value.as_deref());
        for (name, value) in &self.headers {
            out.header(name, value.as_deref());
        }
        out.finish();
    }
}

/// Makes the letter of a row that the database refused, by its index in the batch; none where it is passed over. An
/// error stops the stage before anything is committed.
pub type Refused = Box<dyn Fn(usize, &Reject) -> Result<Option<Letter>, Failure> + Send>;

/// What a transaction does beside its rows.
#[derive(Default)]
pub struct Moves {
    pub advances: Vec<Advance>,
    /// Of records that became no row.
    pub letters: Vec<Letter>,
    /// Letters that are in Kafka now.
    pub relayed: Vec<Origin>,
    pub refused: Option<Refused>,
}

impl std::fmt::Debug for Moves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Moves { advances, letters, relayed, .. } = self;
        write!(f, "{} advances, {} letters, {} relayed", advances.len(), letters.len(), relayed.len())
    }
}

/// Partitions as the arrays of a statement.
struct Arrays {
    topics: Vec<String>,
    ids: Vec<Uuid>,
    partitions: Vec<i32>,
}

impl Arrays {
    fn new<'p>(name: &StageName, partitions: impl Iterator<Item = &'p TopicPartition>) -> Arrays {
        let mut arrays = Arrays { topics: Vec::new(), ids: Vec::new(), partitions: Vec::new() };
        for partition in partitions {
            arrays.topics.push(partition.topic.to_string());
            arrays.ids.push(name.id(&partition.topic));
            arrays.partitions.push(partition.partition);
        }
        arrays
    }
}

/// Advances positions; false where one of them is not at its place or in its epoch any more. The transaction must not
/// be committed then.
pub async fn advance<'c>(
    transaction: Transaction<'c>,
    name: &StageName,
    advances: &[Advance],
) -> Result<(Transaction<'c>, bool), Error> {
    let arrays = Arrays::new(name, advances.iter().map(|a| &a.partition));
    let epochs: Vec<i64> = advances.iter().map(|a| a.epoch).collect();
    let from: Vec<i64> = advances.iter().map(|a| a.from.0).collect();
    let to: Vec<i64> = advances.iter().map(|a| a.to.0).collect();
    let (transaction, moved) = transaction
        .execute(
            ADVANCE,
            &[
                (&name.stage, Pg::TEXT),
                (&arrays.topics, Pg::TEXT_ARRAY),
                (&arrays.ids, Pg::UUID_ARRAY),
                (&arrays.partitions, Pg::INT4_ARRAY),
                (&epochs, Pg::INT8_ARRAY),
                (&from, Pg::INT8_ARRAY),
                (&to, Pg::INT8_ARRAY),
            ],
        )
        .await?;
    Ok((transaction, moved == advances.len() as u64))
}

/// Takes partitions over; one without a position gets the seed's. Waits for a former
/// owner's open transaction, and sees its end.
pub async fn claim<'c>(
    transaction: Transaction<'c>,
    name: &StageName,
    owner: &str,
    seeds: &[Seed],
) -> Result<(Transaction<'c>, Vec<Claim>), Error> {
    let arrays = Arrays::new(name, seeds.iter().map(|seed| &seed.partition));
    let positions: Vec<i64> = seeds.iter().map(|seed| seed.position.0).collect();
    let (transaction, rows) = transaction
        .query(
            CLAIM,
            &[
                (&name.stage, Pg::TEXT),
                (&owner, Pg::TEXT),
                (&arrays.topics, Pg::TEXT_ARRAY),
                (&arrays.ids, Pg::UUID_ARRAY),
                (&arrays.partitions, Pg::INT4_ARRAY),
                (&positions, Pg::INT8_ARRAY),
            ],
        )
        .await?;
    let claims = rows.iter().map(|row| Claim {
        partition: TopicPartition::new(row.get::<_, &str>(0), row.get(1)),
        epoch: row.get(2),
        position: Position(row.get(3)),
    });
    Ok((transaction, claims.collect()))
}

/// A topic of these whose positions are those of a former topic of its name.
pub async fn made_anew<'c>(
    transaction: Transaction<'c>,
    name: &StageName,
    partitions: impl Iterator<Item = &TopicPartition>,
) -> Result<(Transaction<'c>, Option<String>), Error> {
    let arrays = Arrays::new(name, partitions);
    let (transaction, rows) = transaction.query(OTHERS, &params(name, &arrays)).await?;
    Ok((transaction, rows.first().map(|row| row.get(0))))
}

/// A partition of these that has no position.
pub async fn absent<'c>(
    transaction: Transaction<'c>,
    name: &StageName,
    partitions: impl Iterator<Item = &TopicPartition>,
) -> Result<(Transaction<'c>, Option<TopicPartition>), Error> {
    let arrays = Arrays::new(name, partitions);
    let (transaction, rows) = transaction.query(ABSENT, &params(name, &arrays)).await?;
    Ok((transaction, rows.first().map(|row| TopicPartition::new(row.get::<_, &str>(0), row.get(1)))))
}

/// Forgets the positions of partitions, also those of former topics of their names.
pub async fn forget<'c>(
    transaction: Transaction<'c>,
    name: &StageName,
    partitions: impl Iterator<Item = &TopicPartition>,
) -> Result<Transaction<'c>, Error> {
    let arrays = Arrays::new(name, partitions);
    let params: [(&(dyn tokio_postgres::types::ToSql + Sync), Pg); 3] =
        [(&name.stage, Pg::TEXT), (&arrays.topics, Pg::TEXT_ARRAY), (&arrays.partitions, Pg::INT4_ARRAY)];
    let (transaction, _) = transaction.execute(FORGET, &params).await?;
    Ok(transaction)
}

/// Every position of the stage.
pub async fn read<'c>(
    transaction: Transaction<'c>,
    name: &StageName,
) -> Result<(Transaction<'c>, Vec<(TopicPartition, Position)>), Error> {
    let (transaction, rows) = transaction.query(READ, &[(&name.stage, Pg::TEXT)]).await?;
    let rows = rows.iter().filter(|row| row.get::<_, Uuid>(1) == name.id(row.get(0)));
    let positions = rows.map(|row| (TopicPartition::new(row.get::<_, &str>(0), row.get(2)), Position(row.get(3))));
    Ok((transaction, positions.collect()))
}

/// Letters of these partitions that are not known to be in Kafka.
pub async fn pending<'c>(
    transaction: Transaction<'c>,
    name: &StageName,
    partitions: impl Iterator<Item = &TopicPartition>,
) -> Result<(Transaction<'c>, Vec<Letter>), Error> {
    let arrays = Arrays::new(name, partitions);
    let (transaction, rows) = transaction.query(PENDING, &params(name, &arrays)).await?;
    let letters = rows.iter().map(|row| {
        let (names, values): (Vec<Vec<u8>>, Vec<Option<Vec<u8>>>) = (row.get(7), row.get(8));
        let partition = TopicPartition::new(row.get::<_, &str>(0), row.get(1));
        Letter {
            origin: Origin { partition, offset: Offset(row.get(2)) },
            target_partition: row.get(3),
            timestamp: row.get(4),
            key: row.get(5),
            value: row.get(6),
            headers: names.into_iter().zip(values).collect(),
        }
    });
    Ok((transaction, letters.collect()))
}

/// Keeps letters until they are relayed.
pub async fn keep<'c>(
    mut transaction: Transaction<'c>,
    name: &StageName,
    letters: &[Letter],
) -> Result<Transaction<'c>, Error> {
    for letter in letters {
        let (topic, partition) = (&*letter.origin.partition.topic, letter.origin.partition.partition);
        let names: Vec<&[u8]> = letter.headers.iter().map(|(name, _)| &name[..]).collect();
        let values: Vec<Option<&[u8]>> = letter.headers.iter().map(|(_, value)| value.as_deref()).collect();
        (transaction, _) = transaction
            .execute(
                KEEP,
                &[
                    (&name.stage, Pg::TEXT),
                    (&topic, Pg::TEXT),
                    (&name.id(topic), Pg::UUID),
                    (&partition, Pg::INT4),
                    (&letter.origin.offset.0, Pg::INT8),
                    (&letter.target_partition, Pg::INT4),
                    (&letter.timestamp, Pg::INT8),
                    (&letter.key, Pg::BYTEA),
                    (&letter.value, Pg::BYTEA),
                    (&names, Pg::BYTEA_ARRAY),
                    (&values, Pg::BYTEA_ARRAY),
                ],
            )
            .await?;
    }
    Ok(transaction)
}

/// Forgets letters that were relayed.
pub async fn relayed<'c>(
    transaction: Transaction<'c>,
    name: &StageName,
    origins: &[Origin],
) -> Result<Transaction<'c>, Error> {
    let arrays = Arrays::new(name, origins.iter().map(|origin| &origin.partition));
    let offsets: Vec<i64> = origins.iter().map(|origin| origin.offset.0).collect();
    let mut params = params(name, &arrays);
    params.push((&offsets, Pg::INT8_ARRAY));
    let (transaction, _) = transaction.execute(RELAYED, &params).await?;
    Ok(transaction)
}

/// Runs the statements without a partition.
pub async fn dry_run<'c>(transaction: Transaction<'c>, name: &StageName) -> Result<Transaction<'c>, Error> {
    let (transaction, _) = claim(transaction, name, "", &[]).await?;
    let (transaction, _) = advance(transaction, name, &[]).await?;
    let (transaction, _) = pending(transaction, name, [].iter()).await?;
    relayed(transaction, name, &[]).await
}

fn params<'a>(name: &'a StageName, arrays: &'a Arrays) -> Vec<(&'a (dyn tokio_postgres::types::ToSql + Sync), Pg)> {
    vec![
        (&name.stage, Pg::TEXT),
        (&arrays.topics, Pg::TEXT_ARRAY),
        (&arrays.ids, Pg::UUID_ARRAY),
        (&arrays.partitions, Pg::INT4_ARRAY),
    ]
}
