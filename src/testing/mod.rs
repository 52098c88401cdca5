//! Running a topology's `[[tests]]` without a broker and without a database.
//!
//! Records go through the operators that a worker runs. Topics, the table of a Postgres sink and the clock are in
//! memory:
//! the clock stands still, a topic has the partitions that its `create` names (else one), and a table keeps what the
//! version guard keeps, without the types that only a database knows.
//!
//! ```
//! let file = r#"
//! name = "greetings"
//! kafka.brokers = "localhost:9092"
//!
//! [sources.names]
//! type = "kafka"
//! topics = ["names"]
//!
//! [transforms.greet]
//! type = "remap"
//! inputs = ["names"]
//! source = '.text = "hello " + string!(.name)'
//!
//! [sinks.greetings]
//! type = "kafka"
//! inputs = ["greet"]
//! topic = "greetings"
//!
//! [[tests]]
//! name = "greets by name"
//! inputs = [{ source = "names", value = { name = "Ada" } }]
//! outputs = [{ sink = "greetings", records = [{ value = { name = "Ada", text = "hello Ada" } }] }]
//! "#;
//! let topology = semel::topology::load(file, "greetings.toml", &|_| None).topology.expect("a topology without
//! errors");
//! let reports = semel::testing::run_tests(&topology);
//! assert!(reports.iter().all(|report| report.passed()), "{reports:#?}");
//! ```

mod compare;
mod driver;
mod json;
mod table;
#[cfg(test)]
mod tests;

pub use driver::{passes, run_tests};

use serde::Serialize;

/// How one `[[tests]]` case went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TestReport {
    pub name: String,
    /// Line of the case in the file, from 1.
    pub line: usize,
    /// Why it could not run to its end: a record stopped the job.
    pub stopped: Option<String>,
    /// What came out otherwise than expected.
    pub differences: Vec<Difference>,
    /// What was rejected, with the message that a dead letter carries: often why something is missing.
    pub rejected: Vec<String>,
}

/// A place where what came out is not what was expected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The sink, or `dead_letters`.
    pub sink: String,
    /// Which record or row, and what of it: "record 2, value.total".
    pub at: String,
    /// None where nothing was expected there.
    pub expected: Option<String>,
    /// None where nothing came.
    pub actual: Option<String>,
}

impl TestReport {
    pub fn passed(&self) -> bool {
        self.stopped.is_none() && self.differences.is_empty()
    }
}
