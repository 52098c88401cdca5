//! What nodes with state are declared as: aggregates, their windows and fields, and joins.

use crate::expr::Program;

/// Folds the records of a key.
#[derive(Clone, Debug)]
pub struct Aggregate {
    /// The key that records are grouped by; none: the one that they have.
    pub group_by: Option<Program>,
    /// The member of an update that holds the key.
    pub key_field: String,
    /// The other members, in the order of the file.
    pub fields: Vec<Field>,
    pub tombstones: AggregateTombstones,
    /// A group for each window of time; none: one group for all times.
    pub window: Option<Window>,
}

/// Members of an update that tell its window.
pub const WINDOW_START: &str = "window_start";
pub const WINDOW_END: &str = "window_end";
/// The member of an update that tells that another session took its session in.
pub const RETRACTED: &str = "retracted";

/// Groups by time, in UTC, and what becomes of a group in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub kind: WindowKind,
    /// How late a record may come after the end of its window.
    pub grace_ms: i64,
    pub emit: Emit,
    pub late: Late,
    /// After so long without a record a partition's time goes on with the clock.
    pub idle_ms: Option<i64>,
}

/// How times are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowKind {
    /// Of one length; one begins every `advance_ms` since 1970. Tumbling ones begin where the one before ends.
    Aligned { size_ms: i64, advance_ms: i64 },
    /// Records of a key with no pause between them that is longer than the gap.
    Session { gap_ms: i64 },
}

/// When an aggregate puts out a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emit {
    /// At every record.
    Update,
    /// Once, when it closes.
    Close,
}

/// What becomes of a record whose windows have closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    Drop,
    Reject,
}

/// A member of what an aggregate puts out.
#[derive(Clone, Debug)]
pub struct Field {
    pub name: String,
    pub function: Function,
    /// What the function is given of a record; none for a count of records.
    pub of: Option<Program>,
    /// Of a reduction over sessions: what two of its values come to.
    pub merge: Option<Program>,
    /// How many values `distinct_count` and `collect` keep.
    pub limit: usize,
}

impl Field {
    pub fn programs(&self) -> impl Iterator<Item = &Program> {
        self.of.iter().chain(&self.merge)
    }
}

/// What a field of an aggregate tells of its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    Count,
    Sum,
    Min,
    Max,
    Avg,
    First,
    Last,
    DistinctCount,
    Collect,
    /// What the expression makes of the former value and the record.
    Reduce,
}

impl Function {
    /// Every function with the word for it in the file.
    pub const WORDS: [(&'static str, Function); 10] = [
        ("count", Function::Count),
        ("sum", Function::Sum),
        ("min", Function::Min),
        ("max", Function::Max),
        ("avg", Function::Avg),
        ("first", Function::First),
        ("last", Function::Last),
        ("distinct_count", Function::DistinctCount),
        ("collect", Function::Collect),
        ("reduce", Function::Reduce),
    ];

    /// As the file writes it.
    pub fn as_str(self) -> &'static str {
        Function::WORDS.iter().find(|(_, function)| *function == self).expect("every function has a word").0
    }

    /// Whether it keeps several values, so that it needs a limit.
    pub fn keeps_values(self) -> bool {
        matches!(self, Function::DistinctCount | Function::Collect)
    }
}

/// Gives each record, or each row of another table, the row of a table that has its key.
#[derive(Clone, Debug)]
pub struct Join {
    pub kind: JoinKind,
    /// The key to look up by, for which records go through a topic; none: the one that they have.
    pub key: Option<Program>,
    /// The member that the row becomes.
    pub into: String,
    /// The input is a table, too: a change of either puts out what both are now.
    pub of_tables: bool,
}

/// What a join does with a record for which the table has no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinKind {
    /// It ends here.
    Inner,
    /// It goes on with null in place of the row.
    Left,
    /// So does a row of the table to which the input has none.
    Outer,
}

impl JoinKind {
    /// Each with the word for it in the file.
    pub const WORDS: [(&'static str, JoinKind); 3] =
        [("inner", JoinKind::Inner), ("left", JoinKind::Left), ("outer", JoinKind::Outer)];

    /// As the file writes it.
    pub fn as_str(self) -> &'static str {
        JoinKind::WORDS.iter().find(|(_, kind)| *kind == self).expect("every kind has a word").0
    }
}

/// What an aggregate does with a null value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AggregateTombstones {
    Drop,
    Reject,
}
