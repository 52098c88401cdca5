//! A schema of the test's own, a sink on a table in it, and a session to look at it with.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::support;
use semel::error::Failure;
use semel::ids::EventId;
use semel::operator::row::Row;
use semel::reject::Reject;
use semel::sink::postgres::{Applied, Batch, Breaker, Checked, StageName, Writer, WriterConfig, preflight};
use semel::topology::spec::{
    Guarantee, Kafka, Membership, Mode, Node, NodeId, NodeKind, OnError, PostgresSink, Progress, SinkTombstones,
    Stores, TestCase, Topology, UnknownFields,
};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

/// Longer than anything here may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A session beside the sink's.
pub struct Session {
    runtime: tokio::runtime::Runtime,
    client: Client,
}

impl Session {
    pub fn open(url: &str) -> Session {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let client = runtime.block_on(async {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
            tokio::spawn(connection);
            client
        });
        Session { runtime, client }
    }

    pub fn execute(&self, sql: &str) {
        self.try_execute(sql).unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    }

    pub fn try_execute(&self, sql: &str) -> Result<(), tokio_postgres::Error> {
        self.runtime.block_on(self.client.batch_execute(sql))
    }

    /// Rows as psql prints them: columns joined by `|`, NULL as `-`.
    pub fn rows(&self, sql: &str) -> Vec<String> {
        let messages = self.runtime.block_on(self.client.simple_query(sql)).unwrap_or_else(|e| panic!("{sql}: {e:?}"));
        let row = |message: SimpleQueryMessage| match message {
            SimpleQueryMessage::Row(row) => {
                let cells = (0..row.len()).map(|i| row.get(i).unwrap_or("-").to_owned());
                Some(cells.collect::<Vec<_>>().join("|"))
            }
            _ => None,
        };
        messages.into_iter().filter_map(row).collect()
    }

    pub fn value(&self, sql: &str) -> String {
        self.rows(sql).pop().unwrap_or_default()
    }
}

/// A schema that goes when the test ends.
pub struct Database {
    pub url: String,
    pub schema: String,
    pub session: Session,
}

impl Database {
    /// `None`: the test is to be left out.
    pub fn new(test: &str) -> Option<Database> {
        Some(Database::on(&support::broker(test)?.database_url, test))
    }

    pub fn on(url: &str, test: &str) -> Database {
        let schema = support::unique(test).replace('-', "_");
        let session = Session::open(url);
        session.execute(&format!("CREATE SCHEMA {schema}; SET search_path = {schema}"));
        Database { url: url.into(), schema, session }
    }

    /// A sink on `<schema>.<table>` with key `id` and version `version`.
    pub fn sink(&self, table: &str) -> PostgresSink {
        PostgresSink {
            url: self.url.clone(),
            table: format!("{}.{table}", self.schema),
            mode: Mode::Upsert,
            key: vec!["id".into()],
            version: Some("version".into()),
            deleted: None,
            delete_when: None,
            columns: Vec::new(),
            unknown_fields: UnknownFields::Ignore,
            tombstones: SinkTombstones::Reject,
            dedupe: None,
            progress: Progress::Kafka,
            batch_rows: 1000,
            batch_bytes: 8 << 20,
            prepared: true,
            max_rejects_per_minute: 100_000,
        }
    }

    /// Creates table `t` with these columns and opens a sink on it.
    pub fn target(&self, columns: &str) -> Target {
        self.session.execute(&format!("CREATE TABLE t ({columns})"));
        Target::new(self.sink("t")).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Has the server refuse what touches table `t` twice from now on, with this SQLSTATE.
    pub fn refuses_twice(&self, sqlstate: &str) {
        let schema = &self.schema;
        self.session.execute(&format!(
            "DROP SEQUENCE IF EXISTS tries CASCADE; CREATE SEQUENCE tries; \
             CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF nextval('{schema}.tries') < 3 THEN RAISE 'not now' USING ERRCODE = '{sqlstate}'; END IF; \
             RETURN NULL; END $$; \
             CREATE OR REPLACE TRIGGER refuse AFTER INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION refuse()"
        ));
    }

    pub fn table(&self) -> Vec<String> {
        self.session.rows("SELECT * FROM t ORDER BY id")
    }
}

/// What passes by itself: a conflict of transactions, a time limit, no memory, a server that became a standby or goes down.
pub const PASSES: [&str; 7] = ["40001", "40P01", "55P03", "57014", "53200", "25006", "57P01"];

impl Drop for Database {
    fn drop(&mut self) {
        let _ = self.session.try_execute(&format!("SET lock_timeout = '5s'; DROP SCHEMA {} CASCADE", self.schema));
    }
}

/// A topology that is one sink named `sink`.
pub fn topology(sink: PostgresSink, tests: Vec<TestCase>) -> Topology {
    Topology {
        file: "t.toml".into(),
        name: "t".into(),
        guarantee: Guarantee::ExactlyOnce,
        commit_interval: Duration::from_millis(100),
        batch_records: None,
        workers: 1,
        memory: 1 << 24,
        shutdown_timeout: Duration::from_secs(30),
        transaction_timeout: Duration::from_secs(10),
        session_timeout: Duration::from_secs(15),
        membership: Membership::Static,
        instance: None,
        state_dir: None,
        max_task_idle: std::time::Duration::ZERO,
        stores: Stores::Disk,
        on_error: OnError::Reject,
        audit: false,
        kafka: Kafka { brokers: String::new(), properties: BTreeMap::new() },
        nodes: vec![Node {
            name: "sink".into(),
            inputs: Vec::new(),
            on_error: OnError::Reject,
            kind: NodeKind::PostgresSink(sink),
        }],
        tests,
        drill: Vec::new(),
        unset: Vec::new(),
        fingerprint: String::new(),
    }
}

pub fn check(sink: PostgresSink) -> Result<Checked, Failure> {
    preflight(&topology(sink, Vec::new()), NodeId(0), "semel-test")
}

/// An open sink.
pub struct Target {
    pub checked: Checked,
    pub writer: Writer,
}

impl Target {
    pub fn new(sink: PostgresSink) -> Result<Target, Failure> {
        let checked = check(sink.clone())?;
        Ok(Target { writer: writer(&checked, &sink), checked })
    }

    pub fn batch(&self, records: &[&str]) -> Batch {
        let mut batch = Batch::new(Arc::clone(&self.checked.layout));
        for record in records {
            self.push(&mut batch, record).unwrap_or_else(|e| panic!("{record}: {e:?}"));
        }
        batch
    }

    /// Pushes a JSON object: members by column name, the version from its member.
    pub fn push(&self, batch: &mut Batch, record: &str) -> Result<usize, Reject> {
        let members: BTreeMap<String, Box<serde_json::value::RawValue>> = serde_json::from_str(record).unwrap();
        let text = |name: &str| members.get(name).map(|raw| raw.get());
        let columns = &self.checked.layout.columns;
        let cell = |name: &str| text(name).map(|t| Cow::Borrowed(t.as_bytes()));
        let cells = columns.iter().map(|c| (Cow::Borrowed(c.name.as_str()), cell(&c.name))).collect();
        let guarded = self.checked.layout.version.is_some();
        let version = guarded.then(|| text("version").and_then(|v| v.parse().ok()).unwrap_or_default());
        let id = text("event").and_then(|id| EventId::carried("test", id.trim_matches('"').as_bytes(), None));
        batch.push(&Row { id, version, deleted: text("deleted") == Some("true"), cells })
    }

    /// Writes the records in batches of `size`.
    pub fn write(&mut self, records: &[&str], size: usize) -> Summary {
        let mut summary = Summary::default();
        for (at, records) in records.chunks(size).enumerate() {
            self.writer.submit(self.batch(records));
            let applied = self.answer().unwrap_or_else(|e| panic!("{e}"));
            summary.add(&applied, at * size);
        }
        summary
    }

    pub fn answer(&mut self) -> Result<Applied, Failure> {
        self.writer.poll(PATIENCE).expect("an answer in time")
    }
}

pub fn writer(checked: &Checked, sink: &PostgresSink) -> Writer {
    writer_of(checked, sink, None)
}

/// A writer of the stage whose positions lie beside the rows.
pub fn writer_of(checked: &Checked, sink: &PostgresSink, progress: Option<StageName>) -> Writer {
    Writer::spawn(WriterConfig {
        address: checked.address.clone(),
        layout: Arc::clone(&checked.layout),
        ledger: checked.ledger.clone(),
        progress,
        prepared: sink.prepared,
        breaker: Arc::new(Breaker::new("sink", sink.max_rejects_per_minute)),
    })
}

/// What became of several batches; rejects by the index of the record in all of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub rows: u64,
    pub superseded: u64,
    pub stale: u64,
    pub ties: u64,
    pub duplicates: u64,
    pub rejects: Vec<(usize, String)>,
}

impl Summary {
    pub fn add(&mut self, applied: &Applied, offset: usize) {
        self.rows += applied.rows;
        self.superseded += applied.superseded;
        self.stale += applied.stale;
        self.ties += applied.ties;
        self.duplicates += applied.duplicates;
        self.rejects.extend(applied.rejects.iter().map(|(at, reject)| (offset + at, reject.message.clone())));
    }
}
