//! What the server's catalog says of itself and of a table.

use tokio_postgres::Row;
use tokio_postgres::types::Type as Pg;

use super::connect::Connection;
use super::error::Error;
use super::layout::{Type, quoted};

/// Settings of the server and this session.
#[derive(Clone, Debug)]
pub struct Server {
    /// As in `server_version_num`: 150018.
    pub version: i32,
    pub version_text: String,
    pub in_recovery: bool,
    pub synchronous_commit: String,
    pub fsync: String,
    pub encoding: String,
    /// Some standby gets its rows after they were acknowledged here.
    pub async_standby: bool,
}

/// A table, or what the user took for one.
#[derive(Clone, Debug)]
pub struct Table {
    pub oid: u32,
    pub schema: String,
    pub name: String,
    /// `r` table, `p` partitioned table, `v` view, `m` materialized view, `f` foreign table.
    pub kind: String,
    pub unlogged: bool,
    pub rules: bool,
    /// Row security applies to this session.
    pub row_security: bool,
    pub columns: Vec<CatalogColumn>,
    pub unique: Vec<UniqueIndex>,
    /// Triggers that run for each row before it is inserted.
    pub before_insert: Vec<String>,
    /// Triggers that run for each row before it is inserted or updated, and may change it.
    pub before_row: Vec<String>,
}

/// A column with what this session may do to it.
#[derive(Clone, Debug)]
pub struct CatalogColumn {
    pub name: String,
    /// As declared: `character varying(10)`.
    pub declared: String,
    /// `None`: nothing that the sink can write.
    pub ty: Option<Type>,
    pub not_null: bool,
    pub default: Option<String>,
    /// Made by the server from other columns, or an identity that is always generated.
    pub generated: bool,
    /// Filled from a sequence: `serial`, or an identity that may be given.
    pub sequence: bool,
    /// The collation calls different bytes equal.
    pub nondeterministic: bool,
    pub may_select: bool,
    pub may_insert: bool,
    pub may_update: bool,
}

/// A unique index with its key columns in order.
#[derive(Clone, Debug)]
pub struct UniqueIndex {
    pub name: String,
    pub columns: Vec<String>,
    /// Why it cannot be the arbiter of an upsert, if it cannot.
    pub unfit: Option<&'static str>,
}

impl Server {
    pub async fn read(connection: &Connection) -> Result<Server, Error> {
        let sql = "SELECT current_setting('server_version_num')::int4, current_setting('server_version'), \
                   pg_is_in_recovery(), current_setting('synchronous_commit'), current_setting('fsync'), \
                   current_setting('server_encoding'), \
                   EXISTS (SELECT FROM pg_stat_replication r WHERE (sync_state = 'async' \
                           OR current_setting('synchronous_standby_names') = '' \
                           OR current_setting('synchronous_commit') = 'local') \
                           AND NOT EXISTS (SELECT FROM pg_replication_slots s \
                                           WHERE s.active_pid = r.pid AND s.slot_type = 'logical'))";
        let row = &rows(connection, sql, &[]).await?[0];
        Ok(Server {
            version: row.get(0),
            version_text: row.get(1),
            in_recovery: row.get(2),
            synchronous_commit: row.get(3),
            fsync: row.get(4),
            encoding: row.get(5),
            async_standby: row.get(6),
        })
    }
}

impl Table {
    /// Reads `table` or `schema.table`, written exactly so; `None` where there is none.
    pub async fn read(connection: &Connection, table: &str) -> Result<Option<Table>, Error> {
        let quoted_name = table.split('.').map(quoted).collect::<Vec<_>>().join(".");
        let sql = "SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence = 'u', \
                   EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = c.oid), \
                   row_security_active(c.oid) \
                   FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass($1)";
        let found = rows(connection, sql, &[(&quoted_name, Pg::TEXT)]).await?;
        let Some(row) = found.first() else { return Ok(None) };
        let oid: u32 = row.get(0);
        Ok(Some(Table {
            oid,
            schema: row.get(1),
            name: row.get(2),
            kind: row.get(3),
            unlogged: row.get(4),
            rules: row.get(5),
            row_security: row.get(6),
            columns: columns(connection, oid).await?,
            unique: unique_indexes(connection, oid).await?,
            before_insert: before_row(connection, oid, ON_INSERT).await?,
            before_row: before_row(connection, oid, ON_INSERT | ON_UPDATE).await?,
        }))
    }

    pub fn column(&self, name: &str) -> Option<&CatalogColumn> {
        self.columns.iter().find(|c| c.name == name)
    }
}

/// Tables of nearly that name, as one would write them in a topology.
pub async fn similar_tables(connection: &Connection, table: &str) -> Result<Vec<String>, Error> {
    let name = table.rsplit('.').next().unwrap_or(table);
    let sql = "SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
               WHERE lower(c.relname) = lower($1) AND c.relkind IN ('r', 'p') ORDER BY 1 LIMIT 3";
    Ok(rows(connection, sql, &[(&name, Pg::TEXT)]).await?.iter().map(|r| r.get(0)).collect())
}

async fn columns(connection: &Connection, oid: u32) -> Result<Vec<CatalogColumn>, Error> {
    // A domain is followed down to the type below it; its length may be declared at any step.
    let sql = "WITH RECURSIVE base AS ( \
                 SELECT attnum, atttypid AS type, atttypmod AS modifier, attnotnull AS not_null FROM pg_attribute \
                 WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped \
               UNION ALL \
                 SELECT b.attnum, t.typbasetype, greatest(b.modifier, t.typtypmod), b.not_null OR t.typnotnull \
                 FROM base b JOIN pg_type t ON t.oid = b.type WHERE t.typtype = 'd') \
               SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), t.typname::text, n.nspname::text, \
                      b.modifier, b.not_null, pg_get_expr(d.adbin, d.adrelid), \
                      a.attidentity::text, a.attgenerated::text, coalesce(NOT co.collisdeterministic, false), \
                      has_column_privilege(a.attrelid, a.attnum, 'SELECT'), \
                      has_column_privilege(a.attrelid, a.attnum, 'INSERT'), \
                      has_column_privilege(a.attrelid, a.attnum, 'UPDATE'), \
                      CASE WHEN t.typtype = 'e' THEN ARRAY(SELECT enumlabel::text FROM pg_enum \
                           WHERE enumtypid = t.oid ORDER BY enumsortorder) END \
               FROM base b JOIN pg_type t ON t.oid = b.type AND t.typtype <> 'd' \
               JOIN pg_namespace n ON n.oid = t.typnamespace \
               JOIN pg_attribute a ON a.attrelid = $1 AND a.attnum = b.attnum \
               LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
               LEFT JOIN pg_collation co ON co.oid = a.attcollation ORDER BY a.attnum";
    Ok(rows(connection, sql, &[(&oid, Pg::OID)]).await?.iter().map(column).collect())
}

fn column(row: &Row) -> CatalogColumn {
    let (identity, generated): (String, String) = (row.get(7), row.get(8));
    let default: Option<String> = row.get(6);
    let sequence = identity == "d" || default.as_ref().is_some_and(|d| d.starts_with("nextval("));
    CatalogColumn {
        name: row.get(0),
        declared: row.get(1),
        ty: resolve(row.get(2), row.get(3), row.get(4), row.get(13)),
        not_null: row.get(5),
        default,
        generated: identity == "a" || !generated.is_empty(),
        sequence,
        nondeterministic: row.get(9),
        may_select: row.get(10),
        may_insert: row.get(11),
        may_update: row.get(12),
    }
}

/// The type of a catalog entry; `modifier` is its length or scale as `pg_attribute.atttypmod` has it.
fn resolve(name: &str, schema: &str, modifier: i32, labels: Option<Vec<String>>) -> Option<Type> {
    if let Some(labels) = labels {
        return Some(Type::Enum { sql: format!("{}.{}", quoted(schema), quoted(name)), labels });
    }
    if schema != "pg_catalog" {
        return None;
    }
    // Lengths carry the four bytes of a header that once was stored with them.
    let length = (modifier >= 4).then(|| (modifier - 4) as usize);
    let digits = u32::try_from(modifier).unwrap_or(6);
    Some(match name {
        "text" => Type::Text { max: None },
        "varchar" => Type::Text { max: length },
        "bpchar" => Type::Char { max: length.unwrap_or(usize::MAX) },
        "bool" => Type::Bool,
        "int2" => Type::Int2,
        "int4" => Type::Int4,
        "int8" => Type::Int8,
        "numeric" => Type::Numeric { limits: numeric_limits(modifier) },
        "float4" => Type::Float4,
        "float8" => Type::Float8,
        "uuid" => Type::Uuid,
        "timestamptz" => Type::TimestampTz { digits },
        "timestamp" => Type::Timestamp { digits },
        "date" => Type::Date,
        "json" => Type::Json,
        "jsonb" => Type::Jsonb,
        "bytea" => Type::Bytea,
        _ => return None,
    })
}

/// Precision in the upper half, scale in eleven bits below, signed since Postgres 15.
fn numeric_limits(modifier: i32) -> Option<(i32, i32)> {
    let packed = modifier.checked_sub(4).filter(|packed| *packed >= 0)?;
    let scale = ((packed & 0x7ff) ^ 1024) - 1024;
    Some((packed >> 16 & 0xffff, scale))
}

async fn unique_indexes(connection: &Connection, oid: u32) -> Result<Vec<UniqueIndex>, Error> {
    let sql = "SELECT c.relname::text, \
                      ARRAY(SELECT a.attname::text FROM unnest(i.indkey::int2[]) WITH ORDINALITY k(num, ord) \
                            JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.num \
                            WHERE k.ord <= i.indnkeyatts ORDER BY k.ord), \
                      i.indisvalid, i.indimmediate, i.indpred IS NOT NULL, i.indexprs IS NOT NULL, \
                      EXISTS (SELECT FROM unnest(i.indcollation::oid[]) c JOIN pg_collation co ON co.oid = c \
                              WHERE NOT co.collisdeterministic) \
               FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE i.indrelid = $1 AND i.indisunique ORDER \
               BY i.indisprimary DESC, 1";
    let found = rows(connection, sql, &[(&oid, Pg::OID)]).await?;
    let index = |row: &Row| {
        let unfit = match (row.get(2), row.get(3), row.get(4), row.get(5), row.get(6)) {
            (false, _, _, _, _) => Some("it is not valid (its CREATE INDEX CONCURRENTLY failed)"),
            (_, false, _, _, _) => Some("it is deferrable"),
            (_, _, true, _, _) => Some("it is partial"),
            (_, _, _, true, _) => Some("it is on an expression"),
            (_, _, _, _, true) => Some("its collation is not deterministic"),
            _ => None,
        };
        UniqueIndex { name: row.get(0), columns: row.get(1), unfit }
    };
    Ok(found.iter().map(index).collect())
}

/// Bits of `pg_trigger.tgtype`.
const ON_INSERT: i16 = 4;
const ON_UPDATE: i16 = 16;

async fn before_row(connection: &Connection, oid: u32, events: i16) -> Result<Vec<String>, Error> {
    // Bit 1: for each row; bit 2: before.
    let sql = "SELECT tgname::text FROM pg_trigger WHERE tgrelid = $1 AND NOT tgisinternal AND tgenabled <> 'D' \
               AND tgtype & 3 = 3 AND tgtype & $2 <> 0 ORDER BY 1";
    let found = rows(connection, sql, &[(&oid, Pg::OID), (&events, Pg::INT2)]).await?;
    Ok(found.iter().map(|r| r.get(0)).collect())
}

/// What this session may not do to a ledger, in words.
pub async fn missing_ledger_rights(connection: &Connection, oid: u32, partitioned: bool) -> Result<Vec<String>, Error> {
    let sql = "SELECT array_remove(ARRAY[ \
                 CASE WHEN NOT has_table_privilege($1, 'SELECT') THEN 'SELECT' END, \
                 CASE WHEN NOT has_table_privilege($1, 'INSERT') THEN 'INSERT' END, \
                 CASE WHEN NOT has_table_privilege($1, 'DELETE') THEN 'DELETE' END, \
                 CASE WHEN $2 AND NOT pg_has_role(relowner, 'USAGE') THEN 'own it, to attach partitions' END, \
                 CASE WHEN $2 AND NOT has_schema_privilege(relnamespace, 'CREATE') \
                      THEN 'CREATE in its schema, to make partitions' END], NULL) FROM pg_class WHERE oid = $1";
    let found = rows(connection, sql, &[(&oid, Pg::OID), (&partitioned, Pg::BOOL)]).await?;
    Ok(found.first().map_or_else(Vec::new, |row| row.get(0)))
}

/// Whether a partitioned table has a partition for whatever fits no other.
pub async fn has_default_partition(connection: &Connection, oid: u32) -> Result<bool, Error> {
    let sql = "SELECT EXISTS (SELECT FROM pg_partitioned_table WHERE partrelid = $1 AND partdefid <> 0)";
    Ok(rows(connection, sql, &[(&oid, Pg::OID)]).await?[0].get(0))
}

async fn rows(
    connection: &Connection,
    sql: &str,
    params: &[(&(dyn tokio_postgres::types::ToSql + Sync), Pg)],
) -> Result<Vec<Row>, Error> {
    // Unnamed statements work behind every pooler.
    connection.client.query_typed(sql, params).await.map_err(|e| connection.error(&e))
}
