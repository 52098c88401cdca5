//! The target table as the sink writes it: columns with their types, in the table's order.

use crate::operator::row::ColumnSpec;
use crate::topology::spec::Mode;

/// The columns that the sink writes, and which of them are the key, the version and the tombstone flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The topology node, for messages.
    pub node: String,
    /// The table as the user named it.
    pub table: String,
    /// Quoted, for SQL: `"public"."orders"`.
    pub quoted_table: String,
    pub mode: Mode,
    pub columns: Vec<Column>,
    /// Indexes into `columns`, in the order of the topology's `key`.
    pub key: Vec<usize>,
    pub version: Option<usize>,
    pub deleted: Option<usize>,
}

/// A column that the sink writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    pub ty: Type,
    /// A null is refused before the database sees it: NOT NULL, without a default or a trigger that could fill it.
    pub required: bool,
    /// The default's SQL, put in the place of a null where the column is NOT NULL.
    pub default: Option<String>,
    /// What the table holds may differ from what was written without anybody's fault (a trigger, a default): such a
    /// column only counts as different when the record carried a value.
    pub may_be_filled: bool,
}

/// What a column takes. Domains are resolved to the type below them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// `text`, or `varchar(n)` with its limit in characters.
    Text {
        max: Option<usize>,
    },
    /// `char(n)`: trailing blanks do not count.
    Char {
        max: usize,
    },
    Bool,
    Int2,
    Int4,
    Int8,
    /// `numeric`, or `numeric(precision, scale)`.
    Numeric {
        limits: Option<(i32, i32)>,
    },
    Float4,
    Float8,
    Uuid,
    /// With the digits kept of a second, at most 6.
    TimestampTz {
        digits: u32,
    },
    Timestamp {
        digits: u32,
    },
    Date,
    Json,
    Jsonb,
    Bytea,
    /// An enum with its labels; `sql` is its quoted name.
    Enum {
        sql: String,
        labels: Vec<String>,
    },
}

impl Type {
    /// The type as a user wrote it, for messages.
    pub fn name(&self) -> String {
        match self {
            Type::Text { max: None } => "text".into(),
            Type::Text { max: Some(n) } => format!("varchar({n})"),
            Type::Char { max } => format!("char({max})"),
            Type::Bool => "boolean".into(),
            Type::Int2 => "smallint".into(),
            Type::Int4 => "integer".into(),
            Type::Int8 => "bigint".into(),
            Type::Numeric { limits: None } => "numeric".into(),
            Type::Numeric { limits: Some((p, s)) } => format!("numeric({p},{s})"),
            Type::Float4 => "real".into(),
            Type::Float8 => "double precision".into(),
            Type::Uuid => "uuid".into(),
            Type::TimestampTz { digits: 6 } => "timestamptz".into(),
            Type::TimestampTz { digits } => format!("timestamptz({digits})"),
            Type::Timestamp { digits: 6 } => "timestamp".into(),
            Type::Timestamp { digits } => format!("timestamp({digits})"),
            Type::Date => "date".into(),
            Type::Json => "json".into(),
            Type::Jsonb => "jsonb".into(),
            Type::Bytea => "bytea".into(),
            Type::Enum { sql, .. } => sql.clone(),
        }
    }

    /// The array that carries the column to the server.
    pub fn array(&self) -> tokio_postgres::types::Type {
        use tokio_postgres::types::Type as Pg;
        match self {
            Type::Bool => Pg::BOOL_ARRAY,
            Type::Int2 => Pg::INT2_ARRAY,
            Type::Int4 => Pg::INT4_ARRAY,
            Type::Int8 => Pg::INT8_ARRAY,
            Type::Float4 => Pg::FLOAT4_ARRAY,
            Type::Float8 => Pg::FLOAT8_ARRAY,
            Type::Uuid => Pg::UUID_ARRAY,
            Type::TimestampTz { .. } => Pg::TIMESTAMPTZ_ARRAY,
            Type::Timestamp { .. } => Pg::TIMESTAMP_ARRAY,
            Type::Bytea => Pg::BYTEA_ARRAY,
            Type::Text { .. }
            | Type::Char { .. }
            | Type::Numeric { .. }
            | Type::Date
            | Type::Json
            | Type::Jsonb
            | Type::Enum { .. } => Pg::TEXT_ARRAY,
        }
    }

    /// The cast from the array's element to the column, where the assignment in an INSERT would not do it. Without a
    /// length: an explicit cast to `varchar(3)` would cut in silence.
    pub fn cast(&self) -> Option<&str> {
        match self {
            Type::Char { .. } => Some("bpchar"),
            Type::Numeric { .. } => Some("numeric"),
            Type::Date => Some("date"),
            Type::Json => Some("json"),
            Type::Jsonb => Some("jsonb"),
            Type::Enum { sql, .. } => Some(sql),
            _ => None,
        }
    }

    /// Whether sums of it are exact, whatever their order.
    pub fn adds(&self) -> bool {
        matches!(self, Type::Int2 | Type::Int4 | Type::Int8 | Type::Numeric { .. })
    }

    /// Whether `=` exists for it (`json` has none: it is compared as text).
    pub fn comparable(&self) -> bool {
        !matches!(self, Type::Json)
    }
}

impl Layout {
    /// The columns that [`RowMapper`](crate::operator::row::RowMapper) makes cells for, in the order of `columns`.
    pub fn specs(&self) -> Vec<ColumnSpec> {
        self.columns.iter().map(|c| ColumnSpec { name: c.name.clone() }).collect()
    }

    /// The names of the key columns.
    pub fn key_names(&self) -> impl Iterator<Item = &str> {
        self.key.iter().map(|k| self.columns[*k].name.as_str())
    }
}

/// `name` as an SQL identifier, exactly as it is.
pub fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}
