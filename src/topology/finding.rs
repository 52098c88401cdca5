//! Findings: what is wrong with a file, where, and the cure.

use std::ops::Range;

use serde::Serialize;

/// How much a finding weighs: an error keeps the topology from running, a note never fails anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    Note,
    Warning,
    Error,
}

/// One finding. Lines and columns count from 1, columns in characters; the end is exclusive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub file: String,
    pub line: usize,
    pub column: usize,
    pub end_line: usize,
    pub end_column: usize,
    pub severity: Severity,
    /// A stable slug of [`FINDINGS`].
    pub code: &'static str,
    pub message: String,
    pub help: Option<String>,
    /// Bytes of the file.
    #[serde(skip)]
    pub span: Range<usize>,
}

/// Declares every slug once: a constant to report it by, and a sentence for the reference.
macro_rules! codes {
    ($($name:ident $slug:literal $doc:literal)*) => {
        /// The slugs as constants, so that none is reported that the reference does not explain.
        pub mod code {
            $(#[doc = $doc] pub const $name: &str = $slug;)*
        }
        /// Every slug a finding can carry, and what it means.
        pub const FINDINGS: &[(&str, &str)] = &[$(($slug, $doc)),*];
    };
}

codes! {
    SYNTAX "syntax" "The file is not TOML."
    UNKNOWN_KEY "unknown-key" "A key that semel does not know, most often a typing error."
    MISSING_KEY "missing-key" "A required key is absent."
    WRONG_TYPE "wrong-type" "A value of another TOML type than the key takes."
    INVALID_VALUE "invalid-value" "A value of the right type that the key cannot take."
    INVALID_NAME "invalid-name" "A name that is not a lower-case letter followed by lower-case letters, digits, `_` \
     or `-`, or that is too long."
    DUPLICATE_NAME "duplicate-name" "Two nodes, tests or routes of one name."
    RESERVED_NAME "reserved-name" "A name that semel uses itself: `dead_letters`, or a Postgres sink named as the file."
    UNKNOWN_TYPE "unknown-type" "A `type` that does not exist."
    NOT_AVAILABLE "not-available" "Something that this version cannot do yet."
    INVALID_INTERPOLATION "invalid-interpolation" "A `${` that is not closed or holds no variable name."
    UNSET_VARIABLE "unset-variable" "A variable without a value or a default; `run` and `check --online` refuse it \
     where the value is used."
    EMPTY_TOPOLOGY "empty-topology" "No source or no sink: nothing to do."
    MISSING_INPUT "missing-input" "An input that names no node of the file, or no output of a route."
    DUPLICATE_INPUT "duplicate-input" "An input named twice: each of its records would come twice."
    SOURCE_INPUT "source-input" "A source with inputs: sources read topics."
    SINK_AS_INPUT "sink-as-input" "A sink as the input of something that is no Postgres sink."
    POSTGRES_INPUT "postgres-input" "A Postgres sink whose input is neither a Kafka sink nor a source: its stage \
     reads a topic."
    CYCLE "cycle" "Nodes that feed each other in a circle."
    UNUSED_NODE "unused-node" "A source, a transform or an output of a route that nothing reads."
    INVALID_TOPIC "invalid-topic" "A name that Kafka does not take for a topic."
    RESERVED_TOPIC "reserved-topic" "A topic that semel writes itself for this topology."
    DUPLICATE_TOPIC "duplicate-topic" "A topic that is read by two sources, or listed twice."
    SHARED_TOPIC "shared-topic" "Several sinks write to one topic."
    TOPIC_LOOP "topic-loop" "A sink writes to a topic that a source of the same file reads."
    EXPRESSION "expression" "What the VRL compiler says about an expression."
    EXPRESSION_VARIABLE "expression-variable" "`${NAME}` in an expression: expressions are not interpolated."
    KAFKA_PROPERTY "kafka-property" "A librdkafka property that would break the guarantee, or that belongs to another \
     setting."
    UNKNOWN_PROPERTY "unknown-property" "A property that librdkafka does not know."
    COMMIT_INTERVAL "commit-interval" "`commit_interval` is half of `transaction_timeout` or more: transactions would \
     time out under load."
    TRANSACTION_TIMEOUT "transaction-timeout" "`transaction_timeout` is not below `session_timeout`, or above what \
     brokers accept by default."
    SESSION_TIMEOUT "session-timeout" "`session_timeout` is outside what brokers accept by default."
    MODE_SETTING "mode-setting" "A setting of a Postgres sink that its `mode`, or the \
     `guarantee` of the file, has no use for."
    REDELIVERY "redelivery" "A Postgres sink in which a batch that a crash delivers again has its effect again: no \
     version, no ledger, and progress in Kafka."
    LEDGER_IDENTITY "ledger-identity" "A ledger of events that have no identity of their own: a source without \
     `event_id`."
    LEDGER_LAYOUT "ledger-layout" "How the ledger of a sink is laid out: in partitions by time, or flat."
    SHARED_LEDGER "shared-ledger" "Two sinks with one ledger: each would pass over what the other has seen."
    LEDGER_RETENTION "ledger-retention" "What the retention of a ledger has to outlast."
    MISSING_DELETED "missing-deleted" "`delete_when` or `tombstones = \"delete\"` without a `deleted` column to mark \
     the row with."
    COLUMN_CLASH "column-clash" "One column in two roles."
    TOMBSTONES_DELETE "tombstones-delete" "`tombstones = \"delete\"` without a one-column key from the record key and \
     a version from metadata."
    VALUE_FORMAT "value-format" "An expression or a Postgres sink that takes text for a JSON object, or the other way \
     round."
    AGGREGATE_KEY "aggregate-key" "An aggregate that would meet the records of one key in several partitions: its records \
     come from several topics, or under another key than they were partitioned by."
    TABLE_KEY "table-key" "A table or a join that would meet the records of one key in several partitions, as \
     `aggregate-key`."
    TABLE_START "table-start" "A table whose source does not start at the beginning of its topic: it lacks rows."
    JOIN_TABLE "join-table" "A join whose `table` is no table of the file, or with a setting that does not go with its inputs."
    JOIN_ASSIGNMENT "join-assignment" "A job with a join divides partitions by range: a job that ran without one is \
     stopped everywhere first."
    COORDINATES_ID "coordinates-id" "A source without `event_id`: its events are told apart by topic, partition and \
     offset, so a producer's second send is another event."
    COORDINATES "coordinates" "An identity, key or column made of `%offset` or `%partition`, which differ when the \
     record is sent or replayed again."
    NONDETERMINISTIC "nondeterministic" "A key or version that a program upstream makes by the clock, by chance or of \
     a place in the log."
    BROKER "broker" "What the broker has against the job: a topic is missing, takes no write, or a limit of the \
        broker's is in the way (`check --online`)."
    DATABASE "database" "What the database has against a sink: a table, column, index or right is missing or does not \
        fit (`check --online`)."
    STATE "state" "State that the job has kept so far and that does not fit the file (`check --online`)."
    RETENTION "retention" "A topic with a retention gets records with the time of their events: old events are \
     deleted soon after they are written."
    VERSION_OFFSET "version-offset" "A version made of the offset where a key need not stay in one partition."
    SECRET "secret" "A password written into the file."
    TEST_NODE "test-node" "A test that names no source or sink of the file."
    TEST_VALUE "test-value" "A test record without exactly one form of value, or with a value that is none."
    TEST_OUTPUT "test-output" "A test output that does not fit its sink, or a sink named twice."
    DUPLICATE_TOPOLOGY "duplicate-topology" "Two files of one `name`: they would share a consumer group and take each \
     other's partitions."
}

impl Finding {
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

/// Maps bytes of a file to lines and columns.
#[derive(Clone, Debug)]
pub struct Lines<'a> {
    text: &'a str,
    starts: Vec<usize>,
}

impl<'a> Lines<'a> {
    pub fn new(text: &'a str) -> Lines<'a> {
        let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1)).collect();
        Lines { text, starts }
    }

    /// Line and column of a byte, both from 1, the column in characters.
    pub fn position(&self, byte: usize) -> (usize, usize) {
        let byte = floor_boundary(self.text, byte);
        let line = self.starts.partition_point(|start| *start <= byte);
        let start = self.starts[line - 1];
        (line, self.text[start..byte].chars().count() + 1)
    }
}

/// The nearest character boundary at or before `byte`, inside the text.
fn floor_boundary(text: &str, byte: usize) -> usize {
    let mut byte = byte.min(text.len());
    while !text.is_char_boundary(byte) {
        byte -= 1;
    }
    byte
}

/// Collects the findings of one file.
#[derive(Debug)]
pub struct Findings<'a> {
    file: &'a str,
    lines: Lines<'a>,
    list: Vec<Finding>,
}

impl<'a> Findings<'a> {
    pub fn new(file: &'a str, text: &'a str) -> Findings<'a> {
        Findings { file, lines: Lines::new(text), list: Vec::new() }
    }

    /// Line and column of a byte.
    pub fn position(&self, byte: usize) -> (usize, usize) {
        self.lines.position(byte)
    }

    pub fn add(
        &mut self,
        severity: Severity,
        code: &'static str,
        span: Range<usize>,
        message: impl Into<String>,
    ) -> &mut Finding {
        let span = floor_boundary(self.lines.text, span.start)..floor_boundary(self.lines.text, span.end);
        let (line, column) = self.lines.position(span.start);
        let (end_line, end_column) = self.lines.position(span.end);
        let (file, message) = (self.file.to_owned(), message.into());
        self.list.push(Finding { file, line, column, end_line, end_column, severity, code, message, help: None, span });
        self.list.last_mut().expect("just pushed")
    }

    pub fn error(&mut self, code: &'static str, span: Range<usize>, message: impl Into<String>) -> &mut Finding {
        self.add(Severity::Error, code, span, message)
    }

    pub fn warning(&mut self, code: &'static str, span: Range<usize>, message: impl Into<String>) -> &mut Finding {
        self.add(Severity::Warning, code, span, message)
    }

    /// The findings in the order of the file. What starts on a line that is not TOML is left out but for the syntax
    /// error itself: the parser's guess at such a line makes no sense to its reader.
    pub fn finish(mut self) -> Vec<Finding> {
        let broken: Vec<usize> = self.list.iter().filter(|f| f.code == code::SYNTAX).map(|f| f.line).collect();
        self.list.retain(|f| f.code == code::SYNTAX || !broken.contains(&f.line));
        self.list.sort_by_key(|f| (f.span.start, f.span.end));
        self.list.dedup();
        self.list
    }
}

impl Finding {
    /// Adds the cure.
    pub fn help(&mut self, help: impl Into<String>) -> &mut Finding {
        self.help = Some(help.into());
        self
    }

    /// Adds the cure if there is one to offer.
    pub fn maybe_help(&mut self, help: Option<String>) -> &mut Finding {
        self.help = help.or(self.help.take());
        self
    }
}

/// The candidate nearest to a mistyped word, if one is near enough to be meant.
pub fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let limit = (word.chars().count() / 3).max(1);
    let near = candidates.into_iter().map(|c| (strsim::osa_distance(&word.to_lowercase(), &c.to_lowercase()), c));
    near.filter(|(distance, _)| *distance <= limit).min_by_key(|(distance, _)| *distance).map(|(_, c)| c)
}

/// "did you mean", if a candidate is near.
pub fn did_you_mean<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<String> {
    nearest(word, candidates).map(|c| format!("did you mean `{c}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_characters_from_one_and_survive_any_byte() {
        let lines = Lines::new("å = 1\r\nb = \"ø\"\n");
        assert_eq!(lines.position(0), (1, 1));
        assert_eq!(lines.position(3), (1, 3), "å is one column");
        assert_eq!(lines.position(8), (2, 1));
        assert_eq!(lines.position(14), (2, 6), "inside ø: its start");
        assert_eq!(lines.position(999), (3, 1));
    }

    #[test]
    fn slugs_are_unique_and_in_one_form() {
        for (i, (slug, doc)) in FINDINGS.iter().enumerate() {
            assert!(slug.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{slug}");
            assert!(doc.ends_with('.'), "{slug}: {doc}");
            assert!(FINDINGS[..i].iter().all(|(other, _)| other != slug), "{slug} twice");
        }
    }

    #[test]
    fn the_nearest_word_is_offered_only_when_it_is_near() {
        assert_eq!(nearest("condtion", ["condition", "inputs"]), Some("condition"));
        assert_eq!(nearest("Topics", ["topics", "topic"]), Some("topics"));
        assert_eq!(nearest("colour", ["condition", "inputs"]), None);
    }
}
