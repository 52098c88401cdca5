//! Where drills and benchmarks take place: source topics that all runs read, and for each run a file, topics, groups, a
//! schema and a state folder of its own, all taken away at the end.

mod database;
pub mod input;
pub mod page;
pub mod process;
mod rewrite;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use indicatif::ProgressBar;
use tempfile::TempDir;
use toml::Value;

use crate::cluster::{Cluster, Options as ClusterOptions};
use crate::error::Failure;
use crate::kafka::Connection;
use crate::quickstart::topics::{Sent, Topics};
use crate::sink::postgres::{
    CREATE_LETTERS, CREATE_OFFSETS, LETTERS, OFFSETS, Sample, create_ledger, create_table, samples,
};
use crate::topology::load;
use crate::topology::plan::{Plan, StageKind};
use crate::topology::spec::{NodeId, NodeKind, PostgresSink, Topology};

use database::Database;
use input::{PARTITIONS, Record};
use rewrite::{Changes, FOR_EVER, rewrite};

/// The header by which an output tells from which input it was made.
pub const SOURCE_HEADER: &str = "drill-source";

/// Records that decide on the columns of a table.
const MOST_SAMPLES: usize = 10_000;

/// Bytes of a dead letter, which is larger than the record that it is about.
const LARGEST_LETTER: usize = 2 << 20;

/// The development cluster, or with `external` the servers that `KAFKA_BROKERS` and `DATABASE_URL` name. Blocks while it
/// comes up.
pub fn cluster(external: bool, say: &dyn Fn(&str)) -> Result<Cluster, Failure> {
    let cluster = Cluster::obtain(&ClusterOptions { use_given: external, ..ClusterOptions::default() }, say)?;
    for line in &cluster.description {
        say(&format!("using {line}"));
    }
    Ok(cluster)
}

/// The user's topology, and what all runs share.
pub struct World {
    pub topology: Arc<Topology>,
    pub brokers: String,
    pub topics: Topics,
    pub database: Database,
    text: String,
    database_url: String,
    external: bool,
    /// `<purpose>_<seed>_<something of this process>`: begins every name.
    prefix: String,
    dir: TempDir,
    runs: Cell<u32>,
    /// Prefixes of source topics that were made.
    sources: RefCell<BTreeSet<String>>,
    /// Records that the sinks' tables were made for.
    samples: RefCell<Vec<(NodeId, Vec<Sample>)>>,
}

/// A run's topology.
pub struct Run {
    pub name: String,
    /// Its topics begin with this; another run's where only a Postgres stage runs.
    pub outputs: String,
    pub file: PathBuf,
    pub dir: PathBuf,
    pub plan: Plan,
}

/// What a run does otherwise than the user's file.
#[derive(Clone, Debug, Default)]
pub struct Variant {
    /// The run whose topics the Postgres stages read; default: its own.
    pub outputs: Option<String>,
    pub sources: Sources,
    pub settings: Vec<(&'static str, Option<Value>)>,
}

/// Which source topics a run reads.
#[derive(Clone, Debug, Default)]
pub enum Sources {
    /// Those that all runs read.
    #[default]
    Shared,
    /// Its own.
    Own,
    /// Those of [`World::make_sources`] with this prefix.
    Of(String),
}

impl World {
    /// `purpose`: a word that all names begin with.
    pub fn new(
        cluster: &Cluster,
        text: &str,
        topology: Arc<Topology>,
        purpose: &str,
        seed: u64,
        external: bool,
    ) -> Result<World, Failure> {
        let refused = |e: std::io::Error| Failure::refused(format!("no temporary directory to be had: {e}"));
        let mut connection = Connection::new(&cluster.brokers, format!("semel-{purpose}"));
        if external {
            connection.properties = topology.kafka.properties.clone();
        }
        // The same seed may run twice at once, and what an interrupted one left must not be met.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let prefix = format!("{purpose}_{seed}_{:x}", now.as_millis() as u64 ^ (u64::from(std::process::id()) << 24));
        let has_tables = topology.nodes.iter().any(|node| matches!(node.kind, NodeKind::PostgresSink(_)));
        Ok(World {
            brokers: cluster.brokers.clone(),
            topics: Topics::connect(connection)?,
            database: Database::connect(has_tables.then_some(cluster.database_url.as_str()), purpose)?,
            text: text.to_owned(),
            database_url: cluster.database_url.clone(),
            external,
            prefix,
            dir: tempfile::tempdir().map_err(refused)?,
            runs: Cell::new(0),
            sources: RefCell::default(),
            samples: RefCell::default(),
            topology,
        })
    }

    /// Makes the source topics that all runs read and sends the input.
    pub fn feed(&self, records: &[Record]) -> Result<(), Failure> {
        self.make_sources(&self.prefix, PARTITIONS)?;
        self.send(&self.prefix, records, 0)
    }

    /// Makes the source topics under a prefix: a run's own, or all runs'.
    pub fn make_sources(&self, prefix: &str, partitions: i32) -> Result<(), Failure> {
        self.sources.borrow_mut().insert(prefix.to_owned());
        for topic in self.source_topics() {
            self.make(&format!("{prefix}.{topic}"), partitions, None)?;
        }
        Ok(())
    }

    /// Sends records to source topics under a prefix and waits until they are there. Each says which it is, counted from
    /// `first`.
    pub fn send(&self, prefix: &str, records: &[Record], first: usize) -> Result<(), Failure> {
        let never = std::sync::atomic::AtomicBool::new(false);
        for topic in self.source_topics() {
            let mut own: Vec<Record> = Vec::new();
            for (number, record) in records.iter().enumerate().filter(|(_, record)| record.topic == *topic) {
                let source = format!("{}-{}:{}", record.topic, record.partition, first + number);
                let mut record = record.clone();
                record.headers.push((SOURCE_HEADER.to_owned(), Some(source.into_bytes())));
                own.push(record);
            }
            let sent = own.iter().map(|r| Sent {
                partition: r.partition,
                key: r.key.as_deref(),
                value: r.value.as_deref(),
                headers: &r.headers,
                timestamp: r.timestamp,
            });
            self.topics.produce(&format!("{prefix}.{topic}"), sent, &ProgressBar::hidden(), &never)?;
        }
        Ok(())
    }

    /// Topics that the job reads and does not write.
    pub fn source_topics(&self) -> impl Iterator<Item = &String> {
        let sources = self.topology.nodes.iter().filter_map(|node| match &node.kind {
            NodeKind::Source(source) => Some(&source.topics),
            _ => None,
        });
        sources.flatten().filter(|topic| !self.writes(topic))
    }

    /// Makes a topic that keeps its records.
    fn make(&self, topic: &str, partitions: i32, largest: Option<usize>) -> Result<(), Failure> {
        let mut config: BTreeMap<String, String> =
            FOR_EVER.iter().map(|(name, value)| ((*name).to_owned(), value.to_string())).collect();
        config.extend(largest.map(|bytes| ("max.message.bytes".to_owned(), bytes.to_string())));
        let made = self.topics.admin.create_topic(topic, partitions, -1, &config);
        made.map(drop).map_err(|e| Failure::unreachable(e.to_string()))
    }

    fn writes(&self, topic: &str) -> bool {
        self.topology.nodes.iter().any(|n| matches!(&n.kind, NodeKind::KafkaSink(sink) if sink.topic == topic))
    }

    /// Writes the file of a new run and loads it again.
    pub fn run(&self, variant: &Variant) -> Result<Run, Failure> {
        let number = self.runs.replace(self.runs.get() + 1);
        let name = format!("{}_{number}", self.prefix);
        let dir = self.dir.path().join(number.to_string());
        let outputs = variant.outputs.clone().unwrap_or_else(|| name.clone());
        let state_dir = dir.join("state").to_string_lossy().into_owned();
        let sources = match &variant.sources {
            Sources::Shared => self.prefix.clone(),
            Sources::Own => name.clone(),
            Sources::Of(prefix) => prefix.clone(),
        };
        let changes = Changes {
            name: &name,
            sources: &sources,
            outputs: &outputs,
            schema: &name,
            brokers: &self.brokers,
            database_url: &self.database_url,
            state_dir: &state_dir,
            external: self.external,
            settings: variant.settings.clone(),
        };
        let text = rewrite(&self.text, &self.topology, &changes)?;
        let file = dir.join("topology.toml");
        let written = std::fs::create_dir_all(&dir).and_then(|()| std::fs::write(&file, &text));
        written.map_err(|e| Failure::refused(format!("cannot write {}: {e}", file.display())))?;
        let loaded = load(&text, &self.topology.file, &|variable| std::env::var(variable).ok());
        let topology = loaded.topology.ok_or_else(|| {
            let errors: Vec<_> = loaded.findings.iter().filter(|f| f.is_error()).map(|f| f.message.clone()).collect();
            Failure::refused(format!("{} cannot run under other names: {}", self.topology.file, errors.join("; ")))
        })?;
        let sinks = topology.nodes.iter().filter_map(|node| match &node.kind {
            NodeKind::KafkaSink(sink) => sink.create.as_ref().map(|create| create.partitions),
            _ => None,
        });
        // As the job would make it, but for how long it keeps them.
        let widest = sinks.chain([PARTITIONS]).max().unwrap_or(PARTITIONS);
        self.make(&topology.dead_letters(), widest, Some(LARGEST_LETTER))?;
        Ok(Run { plan: Plan::new(Arc::new(topology)), name, outputs, file, dir })
    }

    /// Makes the tables of a run, in its schema. The first one's records decide on the columns of all.
    pub fn make_tables(&self, run: &Run) -> Result<(), Failure> {
        let sinks: Vec<NodeId> = run.sinks().map(|(id, _)| id).collect();
        if sinks.is_empty() {
            return Ok(());
        }
        self.database.execute(&format!("CREATE SCHEMA {}", run.name))?;
        if self.samples.borrow().is_empty() {
            let samples = sinks.iter().map(|id| Ok((*id, self.sample(run, *id)?))).collect::<Result<_, Failure>>()?;
            self.samples.replace(samples);
        }
        if run.sinks().any(|(_, sink)| sink.keeps_positions()) {
            self.database.execute("CREATE SCHEMA IF NOT EXISTS semel")?;
            for create in [CREATE_OFFSETS, CREATE_LETTERS] {
                self.database.execute(&create.replacen("CREATE TABLE", "CREATE TABLE IF NOT EXISTS", 1))?;
            }
        }
        let mut made: Vec<&str> = Vec::new();
        for (id, sink) in run.sinks() {
            if made.contains(&sink.table.as_str()) {
                continue;
            }
            made.push(&sink.table);
            if let Some(ledger) = &sink.dedupe {
                let timed = run.plan.topology.sources_of(id).all(|source| source.event_time.is_some());
                self.database.execute(&create_ledger(&ledger.table, timed))?;
            }
            let samples = self.samples.borrow();
            let (_, samples) = samples.iter().find(|(sink, _)| *sink == id).expect("every run has the same nodes");
            self.database.execute(&create_table(sink, samples))?;
        }
        Ok(())
    }

    /// Records as the sink will get them: of the file's tests, and of the topics that it reads.
    fn sample(&self, run: &Run, sink: NodeId) -> Result<Vec<Sample>, Failure> {
        // The run's file has lost its tests, and its nodes may stand in another order.
        let name = &run.plan.topology.nodes[sink.0].name;
        let own = self.topology.nodes.iter().position(|node| node.name == *name).map(NodeId);
        let mut found = own.map(|sink| samples(&self.topology, sink)).unwrap_or_default();
        let stage =
            run.plan.stages.iter().find(|s| matches!(s.kind, StageKind::Postgres { sink: id, .. } if id == sink));
        for topic in stage.map(|stage| run.plan.reads(stage)).unwrap_or_default() {
            self.topics.read(&topic, |input| {
                if found.len() < MOST_SAMPLES {
                    found.extend(input.value.and_then(|value| serde_json::from_slice::<Sample>(value).ok()));
                }
            })?;
        }
        Ok(found)
    }

    /// Begins every name; source topics of another prefix begin with it too.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Takes away what a run made, but for source topics of its own.
    pub fn discard(&self, run: &Run) {
        self.drop_tables(&run.name);
        self.delete(self.topics_of(&run.name));
    }

    /// Takes away everything that was made.
    pub fn clean(&self) {
        let mut names: Vec<String> = Vec::new();
        for prefix in self.sources.borrow().iter() {
            names.extend(self.source_topics().map(|topic| format!("{prefix}.{topic}")));
        }
        for number in 0..self.runs.get() {
            let run = format!("{}_{number}", self.prefix);
            self.drop_tables(&run);
            names.extend(self.topics_of(&run));
        }
        self.delete(names);
    }

    /// The topics that a run writes.
    fn topics_of(&self, run: &str) -> Vec<String> {
        let sinks = self.topology.nodes.iter().filter_map(|node| match &node.kind {
            NodeKind::KafkaSink(sink) => Some(sink.topic.clone()),
            NodeKind::Aggregate(_) | NodeKind::Table => Some(format!("{}.changelog", node.name)),
            NodeKind::Repartition(_) => Some(format!("{}.repartition", node.declared_name())),
            _ => None,
        });
        let own = ["dead-letters", "job"].map(str::to_owned);
        sinks.chain(own).map(|topic| format!("{run}.{topic}")).collect()
    }

    fn drop_tables(&self, run: &str) {
        let _ = self.database.execute(&format!("DROP SCHEMA IF EXISTS {run} CASCADE"));
        // Tables that stages with other positions share, where they are there.
        for table in [OFFSETS, LETTERS] {
            let _ = self.database.execute(&format!("DELETE FROM {table} WHERE stage LIKE '{run}.%'"));
        }
    }

    fn delete(&self, topics: Vec<String>) {
        let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
        if let Err(error) = self.topics.admin.delete_topics(&topics) {
            tracing::warn!(%error, prefix = self.prefix, "scratch topics are left behind");
        }
    }
}

impl Run {
    /// Its Postgres sinks.
    pub fn sinks(&self) -> impl Iterator<Item = (NodeId, &PostgresSink)> {
        self.plan.topology.nodes.iter().enumerate().filter_map(|(i, node)| match &node.kind {
            NodeKind::PostgresSink(sink) => Some((NodeId(i), sink)),
            _ => None,
        })
    }
}
