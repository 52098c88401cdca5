//! What a topology file declares, checked and with its expressions compiled.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use crate::expr::Program;

mod stateful;

pub use stateful::{
    Aggregate, AggregateTombstones, Emit, Field, Function, Join, JoinKind, Late, RETRACTED, WINDOW_END, WINDOW_START,
    Window, WindowKind,
};

/// A checked topology file.
#[derive(Clone, Debug)]
pub struct Topology {
    /// The file it was read from, as the user named it.
    pub file: String,
    pub name: String,
    pub guarantee: Guarantee,
    pub commit_interval: Duration,
    /// Seals a batch earlier: 1 is a transaction a record.
    pub batch_records: Option<NonZeroU64>,
    pub workers: u32,
    /// Bytes of a worker's queues.
    pub memory: u64,
    pub shutdown_timeout: Duration,
    pub transaction_timeout: Duration,
    pub session_timeout: Duration,
    pub membership: Membership,
    /// Overrides the instance id that semel makes and keeps in its state directory.
    pub instance: Option<String>,
    pub state_dir: Option<PathBuf>,
    pub stores: Stores,
    /// How long a task whose inputs go by time waits for an input that is at its end.
    pub max_task_idle: Duration,
    pub on_error: OnError,
    /// Outputs name the record that they come from.
    pub audit: bool,
    pub kafka: Kafka,
    /// Sources, transforms and sinks in the order of the file. Inputs refer to this list by index.
    pub nodes: Vec<Node>,
    pub tests: Vec<TestCase>,
    /// Guarantees under which a drill compares the topology; empty: it drills the file's own.
    pub drill: Vec<Guarantee>,
    /// Variables without a value or a default: an error as soon as the place that names them is used.
    pub unset: Vec<UnsetVariable>,
    /// SHA-256 of the file's text in hex: which version of the file ran.
    pub fingerprint: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarantee {
    ExactlyOnce,
    AtLeastOnce,
    AtMostOnce,
}

impl Guarantee {
    /// Every guarantee with the word for it in the file.
    pub const WORDS: [(&'static str, Guarantee); 3] = [
        ("exactly-once", Guarantee::ExactlyOnce),
        ("at-least-once", Guarantee::AtLeastOnce),
        ("at-most-once", Guarantee::AtMostOnce),
    ];

    /// As the file writes it.
    pub fn as_str(self) -> &'static str {
        Guarantee::WORDS.iter().find(|(_, guarantee)| *guarantee == self).expect("every guarantee has a word").0
    }
}

/// How the process is a member of its consumer groups (KIP-345).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Membership {
    /// By its instance: one that comes back within the session has its partitions again without a rebalance.
    Static,
    /// Each start is a new member.
    Dynamic,
}

impl Membership {
    /// Each with the word for it in the file.
    pub const WORDS: [(&'static str, Membership); 2] =
        [("static", Membership::Static), ("dynamic", Membership::Dynamic)];
}

/// Where stateful nodes keep what they know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    Disk,
    Memory,
}

/// What happens to a record that an operator fails on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnError {
    Reject,
    Skip,
    Stop,
}

#[derive(Clone, Debug)]
pub struct Kafka {
    pub brokers: String,
    /// librdkafka properties, none of which breaks the guarantee.
    pub properties: BTreeMap<String, String>,
}

impl Kafka {
    /// The broker assigns partitions (KIP-848), not a member.
    pub fn broker_assigns(&self) -> bool {
        self.properties.get("group.protocol").is_some_and(|protocol| protocol == "consumer")
    }
}

#[derive(Clone, Debug)]
pub struct UnsetVariable {
    pub name: String,
    /// The node whose setting names it; none for the top level and `[kafka]`.
    pub node: Option<String>,
    /// Line and column, from 1.
    pub line: usize,
    pub column: usize,
}

/// Index into [`Topology::nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub usize);

/// Where a node's input comes from: a node, and for a `route` which of its outputs
/// (an index into its routes; `routes.len()` is `_unmatched`). 0 elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port {
    pub node: NodeId,
    pub output: usize,
}

#[derive(Clone, Debug)]
pub struct Node {
    pub name: String,
    /// Empty for sources.
    pub inputs: Vec<Port>,
    /// The node's own `on_error`, else the file's.
    pub on_error: OnError,
    pub kind: NodeKind,
}

impl Node {
    /// The inputs whose records are processed: of a join of a stream all but its table.
    pub fn streams(&self) -> &[Port] {
        match &self.kind {
            NodeKind::Join(Join { of_tables: false, .. }) => {
                self.inputs.split_last().map_or(&[], |(_, streams)| streams)
            }
            _ => &self.inputs,
        }
    }

    /// The table that a join names.
    pub fn table(&self) -> Option<NodeId> {
        self.inputs.last().filter(|_| matches!(self.kind, NodeKind::Join(_))).map(|port| port.node)
    }

    /// Which tables a join looks up for the records of which inputs.
    pub fn looks_up(&self) -> Vec<(NodeId, NodeId)> {
        match (&self.kind, &self.inputs[..]) {
            (NodeKind::Join(Join { of_tables: true, .. }), [left, right]) => {
                vec![(left.node, right.node), (right.node, left.node)]
            }
            (NodeKind::Join(_), [streams @ .., table]) => {
                streams.iter().map(|stream| (table.node, stream.node)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The name of the node of the file that it is, or that it was made for.
    pub fn declared_name(&self) -> &str {
        self.name.split(':').next().unwrap_or(&self.name)
    }
}

#[derive(Clone, Debug)]
pub enum NodeKind {
    Source(Source),
    Filter {
        condition: Program,
        tombstones: Tombstones,
    },
    Remap {
        source: Program,
        tombstones: Tombstones,
    },
    Route {
        routes: Vec<Route>,
        tombstones: Tombstones,
    },
    FlatMap {
        source: Program,
        tombstones: Tombstones,
    },
    Rekey {
        key: Program,
    },
    Aggregate(Aggregate),
    /// Keeps the latest value of each key, and passes records on.
    Table,
    /// Its last input is the table.
    Join(Join),
    /// Writes records under the key that they are grouped by; the loader puts it before an aggregate.
    Repartition(Repartition),
    /// Reads what a repartition wrote, which is its one input.
    Repartitioned {
        topic: String,
        format: Format,
    },
    KafkaSink(KafkaSink),
    PostgresSink(PostgresSink),
}

impl NodeKind {
    /// The programs that decide on what comes out of the node.
    pub fn programs(&self) -> Vec<&Program> {
        match self {
            NodeKind::Source(_) | NodeKind::Repartitioned { .. } | NodeKind::Table => Vec::new(),
            NodeKind::Join(join) => join.key.iter().collect(),
            NodeKind::Repartition(repartition) => vec![&repartition.key],
            NodeKind::Filter { condition, .. } => vec![condition],
            NodeKind::Remap { source, .. } | NodeKind::FlatMap { source, .. } => vec![source],
            NodeKind::Route { routes, .. } => routes.iter().map(|route| &route.condition).collect(),
            NodeKind::Rekey { key } => vec![key],
            NodeKind::Aggregate(aggregate) => aggregate.fields.iter().flat_map(Field::programs).collect(),
            NodeKind::KafkaSink(sink) => sink.key.iter().collect(),
            NodeKind::PostgresSink(sink) => {
                sink.columns.iter().map(|(_, program)| program).chain(&sink.delete_when).collect()
            }
        }
    }
}

#[derive(Clone, Debug)]
pub struct Source {
    pub topics: Vec<String>,
    pub format: Format,
    pub event_id: Option<Program>,
    pub event_time: Option<Program>,
    /// How far past its record's own time an event's time may lie.
    pub max_ahead_ms: Option<i64>,
    pub start: Start,
}

impl Source {
    /// A topic as it is, from its beginning: events have the identity and the time that their records carry.
    pub fn plain(topic: &str, format: Format) -> Source {
        let topics = vec![topic.to_owned()];
        Source { topics, format, event_id: None, event_time: None, max_ahead_ms: None, start: Start::Earliest }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Json,
    String,
    Bytes,
}

/// Where a job that never ran begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    Earliest,
    Latest,
    /// Milliseconds since the epoch.
    Timestamp(i64),
}

/// What a transform does with a null value. `Pass` is the default; a route then sends it to every output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tombstones {
    Pass,
    Drop,
    Process,
}

#[derive(Clone, Debug)]
pub struct Repartition {
    /// `<topology>.<node>.repartition`
    pub topic: String,
    pub key: Program,
    pub tombstones: AggregateTombstones,
    /// Whether records whose key is null go too, to any partition.
    pub null_keys: bool,
}

#[derive(Clone, Debug)]
pub struct Route {
    pub name: String,
    pub condition: Program,
}

#[derive(Clone, Debug)]
pub struct KafkaSink {
    pub topic: String,
    /// Default: the input's key.
    pub key: Option<Program>,
    pub create: Option<CreateTopic>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateTopic {
    pub partitions: i32,
    pub replication: Option<i32>,
    pub config: BTreeMap<String, String>,
}

#[derive(Clone, Debug)]
pub struct PostgresSink {
    pub url: String,
    /// `table` or `schema.table`.
    pub table: String,
    pub mode: Mode,
    /// Empty where every record is a row of its own.
    pub key: Vec<String>,
    /// The guard: a row is only touched by a record of a higher version.
    pub version: Option<String>,
    pub deleted: Option<String>,
    pub delete_when: Option<Program>,
    /// Columns made by an expression instead of taken from the member of their name.
    pub columns: Vec<(String, Program)>,
    pub unknown_fields: UnknownFields,
    pub tombstones: SinkTombstones,
    pub dedupe: Option<Ledger>,
    pub progress: Progress,
    pub batch_rows: usize,
    pub batch_bytes: u64,
    /// `false` sends unnamed statements, for a pooler in transaction mode.
    pub prepared: bool,
    /// Stops the stage when more records than this a minute are rejected.
    pub max_rejects_per_minute: u64,
}

/// What a record does to the table of a Postgres sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Inserts the row of its key, or replaces it in full.
    Upsert,
    /// Adds a row.
    Insert,
    /// Adds its numbers to those of the row of its key.
    Add,
    /// Replaces the row of its key where there is one and it differs.
    Update,
}

impl Mode {
    /// Every mode with the word for it in the file.
    pub const WORDS: [(&'static str, Mode); 4] =
        [("upsert", Mode::Upsert), ("insert", Mode::Insert), ("add", Mode::Add), ("update", Mode::Update)];

    /// As the file writes it.
    pub fn as_str(self) -> &'static str {
        Mode::WORDS.iter().find(|(_, mode)| *mode == self).expect("every mode has a word").0
    }
}

/// The table of the event ids that had their effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// `table` or `schema.table`.
    pub table: String,
    /// How long an id is remembered.
    pub retention: Duration,
}

impl PostgresSink {
    /// What keeps the effect of a record from being there twice, the strongest first; none where nothing does.
    pub fn once_by(&self) -> Option<Once> {
        match self {
            PostgresSink { progress: Progress::Postgres, .. } => Some(Once::Progress),
            PostgresSink { dedupe: Some(_), .. } => Some(Once::Ledger),
            PostgresSink { version: Some(_), .. } => Some(Once::Version),
            _ => None,
        }
    }

    /// Whether positions are kept beside the rows: those in Kafka only follow.
    pub fn keeps_positions(&self) -> bool {
        self.progress == Progress::Postgres
    }

    /// Whether rows are marked as deleted.
    pub fn deletes(&self) -> bool {
        self.deleted.is_some() || self.delete_when.is_some() || self.tombstones == SinkTombstones::Delete
    }
}

/// What keeps a redelivered record from having its effect again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Once {
    Version,
    Ledger,
    Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownFields {
    Ignore,
    Reject,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SinkTombstones {
    Reject,
    Ignore,
    Delete,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Kafka,
    /// Beside the rows, in the same database transaction.
    Postgres,
}

/// A `[[tests]]` case.
#[derive(Clone, Debug)]
pub struct TestCase {
    pub name: String,
    /// Line of the case in the file, from 1.
    pub line: usize,
    pub inputs: Vec<TestInput>,
    pub outputs: Vec<TestOutput>,
}

#[derive(Clone, Debug)]
pub struct TestInput {
    pub source: NodeId,
    /// Topic, for a source of several; default its first.
    pub topic: Option<String>,
    pub key: Option<Vec<u8>>,
    /// `None` is a tombstone.
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    pub timestamp: Option<i64>,
    pub partition: i32,
}

#[derive(Clone, Debug)]
pub enum TestOutput {
    /// Complete and in order; only what is given is compared.
    Records { sink: NodeId, records: Vec<ExpectedRecord> },
    /// The live table sorted by key; columns given are compared. `deleted` lists keys that hold a tombstone.
    Rows {
        sink: NodeId,
        rows: Option<Vec<serde_json::Map<String, serde_json::Value>>>,
        deleted: Option<Vec<serde_json::Value>>,
    },
    /// In order.
    DeadLetters { records: Vec<ExpectedReject> },
}

#[derive(Clone, Debug, Default)]
pub struct ExpectedRecord {
    /// `Some(None)` expects a null key.
    pub key: Option<Option<Vec<u8>>>,
    pub value: Option<ExpectedValue>,
    pub headers: Option<Vec<(String, Option<Vec<u8>>)>>,
    pub timestamp: Option<i64>,
    pub partition: Option<i32>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ExpectedValue {
    /// By JSON equality.
    Json(serde_json::Value),
    /// Byte for byte (`json`, `text`, `base64`).
    Bytes(Vec<u8>),
    Tombstone,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpectedReject {
    pub node: Option<String>,
    pub reason: Option<String>,
}
