//! VRL programs on a record.

use std::ops::Range;

use crate::json::Inexact;

mod analysis;
mod body;
mod compile;
mod functions;
mod metadata;
mod program;
mod target;
#[cfg(test)]
mod tests;

pub use body::Body;
pub(crate) use body::described;
pub use compile::compile;
pub use metadata::Metadata;
pub use program::{Program, Runtime};
pub use vrl::value::Value;

/// What an expression is for; it decides which functions and paths it may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A boolean: `filter`, a route, `delete_when`. May not assign.
    Condition,
    /// Changes the record: `remap`.
    Remap,
    /// Gives an array, one record an element: `flat_map`. What it assigns is gone afterwards.
    Expand,
    /// A value that must be the same on every attempt: `key`, `version`, `event_id`, `event_time`, columns. Compiled
    /// without the functions of clock and chance. May not assign.
    Value,
}

/// A message of the compiler, placed in the expression's own text (bytes).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    pub error: bool,
    pub message: String,
    pub span: Range<usize>,
    pub help: Option<String>,
}

/// What an expression uses, for the checks of a topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// Functions whose value may differ from one attempt to the next.
    pub nondeterministic_functions: Vec<String>,
    /// Paths as VRL writes them: `.a.b`, `%key`; `.` is the whole value.
    pub reads: Vec<String>,
    /// Paths assigned or deleted.
    pub writes: Vec<String>,
    /// `%offset` or `%partition` is read (also with all of `%`).
    pub offset_or_partition: bool,
    /// The value of the record is read, so it cannot be made from a tombstone.
    pub value: bool,
    /// `.` is taken for text: the expression does not compile for an object.
    pub text: bool,
}

/// What is wrong with a record where a program or an operator met it; with the node's name it becomes a
/// [`Reject`](crate::reject::Reject).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// A slug of [`REASONS`](crate::reject::REASONS).
    pub reason: &'static str,
    pub message: String,
}

impl Fault {
    pub fn new(reason: &'static str, message: impl Into<String>) -> Fault {
        Fault { reason, message: message.into() }
    }
}

impl From<Inexact> for Fault {
    fn from(inexact: Inexact) -> Fault {
        let Inexact { member, number } = inexact;
        let message = format!(
            "the member `{member}` holds {number}, which is neither a 64-bit integer nor exactly a double; a condition may read it, \
             another expression would change it"
        );
        Fault::new("inexact-number", message)
    }
}
