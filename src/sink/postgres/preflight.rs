//! What must be true of a table before anything is written to it, and what a user should know of it.

use std::collections::HashMap;
use std::sync::Arc;

use super::address::Address;
use super::catalog::{CatalogColumn, Server, Table, similar_tables};
use super::connect::Connection;
use super::create::{Sample, create_table, samples};
use super::error::{Class, Error};
use super::layout::{Column, Layout, Type, quoted};
use super::ledger::LedgerTable;
use super::offsets::{CREATE_LETTERS, CREATE_OFFSETS, LETTERS, OFFSETS, StageName, dry_run as dry_run_offsets};
use super::problems::server_problems;
use super::sql::Statements;
use super::transaction::Transaction;
use super::write::dry_run;
use crate::error::{Exit, Failure};
use crate::topology::spec::{Guarantee, Mode, NodeId, NodeKind, PostgresSink, Progress, Topology};

/// A sink whose database and table were found fit.
#[derive(Clone, Debug)]
pub struct Checked {
    pub address: Address,
    pub layout: Arc<Layout>,
    pub ledger: Option<LedgerTable>,
    /// Sentences to show before the start.
    pub warnings: Vec<String>,
}

/// Connects to the database of the Postgres sink `sink` and checks server, table, columns, index and rights; nothing is
/// changed there. `group` names the session in the server's views. Blocks for 10 seconds at most.
///
/// # Errors
/// Exit 3 if no server answers, else exit 2 with all that is wrong at once and how to mend it.
///
/// # Panics
/// If `sink` is no Postgres sink of the topology.
pub fn preflight(topology: &Topology, sink: NodeId, group: &str) -> Result<Checked, Failure> {
    let node = &topology.nodes[sink.0];
    let NodeKind::PostgresSink(spec) = &node.kind else { panic!("{} is no Postgres sink", node.name) };
    let timed = topology.sources_of(sink).all(|source| source.event_time.is_some());
    let once = spec.dedupe.is_some() || spec.keeps_positions();
    let comes_again = !once && topology.guarantee != Guarantee::AtMostOnce;
    let subject = Subject { node: &node.name, sink: spec, timed, comes_again, samples: samples(topology, sink) };
    let refused = |message: String| Failure::refused(format!("sink {}: {message}", node.name));
    let address = Address::parse(&spec.url, group).map_err(refused)?;

    // On a thread of its own: the caller may be inside a runtime already, where another cannot block.
    let result = std::thread::scope(|scope| {
        let check = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|e| Error::Client(e.to_string()))?;
            runtime.block_on(subject.check(&address))
        };
        scope.spawn(check).join().unwrap_or_else(|_| Err(Error::Client("the check itself failed".into())))
    });
    match result {
        Ok(Ok(Fit { layout, ledger, warnings })) => Ok(Checked { address, layout: Arc::new(layout), ledger, warnings }),
        Ok(Err(problems)) => Err(refused(problems.join("\n"))),
        Err(error) => {
            let away = matches!(error, Error::Connection(_)) || error.class() == Some(Class::Transient);
            let exit = if away { Exit::Unreachable } else { Exit::Refused };
            Err(Failure::new(exit, format!("sink {}: {error}", node.name)))
        }
    }
}

/// A sink under examination.
pub(super) struct Subject<'a> {
    pub(super) node: &'a str,
    pub(super) sink: &'a PostgresSink,
    /// All sources declare the time of their events, so that ids have one.
    pub(super) timed: bool,
    /// A crash may deliver a record again, and nothing tells that it was there before.
    pub(super) comes_again: bool,
    samples: Vec<Sample>,
}

/// What was found fit.
struct Fit {
    layout: Layout,
    ledger: Option<LedgerTable>,
    warnings: Vec<String>,
}

type Verdict = Result<Fit, Vec<String>>;

impl Subject<'_> {
    async fn check(&self, address: &Address) -> Result<Verdict, Error> {
        let mut connection = Connection::open(address, self.sink.prepared).await?;
        let server = Server::read(&connection).await?;
        let mut problems = server_problems(&server, self.sink.progress);
        if !problems.is_empty() {
            return Ok(Err(problems));
        }
        let name = &self.sink.table;
        let table = Table::read(&connection, name).await?;
        match &table {
            Some(table) => problems.extend(self.table_problems(table)),
            None => {
                let similar = similar_tables(&connection, name).await?;
                let create = create_table(self.sink, &self.samples);
                problems.push(missing_table(name, address, &similar, &create));
            }
        }
        let mut warnings = Vec::new();
        let mut ledger = None;
        if let Some(spec) = &self.sink.dedupe {
            let looked_at = self.ledger(&connection, spec, address).await?;
            problems.extend(looked_at.problems);
            warnings.extend(looked_at.warnings);
            ledger = looked_at.ledger;
        }
        if self.sink.keeps_positions() {
            for (name, create) in [(OFFSETS, CREATE_OFFSETS), (LETTERS, CREATE_LETTERS)] {
                if Table::read(&connection, name).await?.is_none() {
                    let create = format!("CREATE SCHEMA IF NOT EXISTS semel;\n{create}");
                    problems.push(missing_table(name, address, &[], &create));
                }
            }
        }
        let Some(table) = table.filter(|_| problems.is_empty()) else { return Ok(Err(problems)) };
        let layout = self.layout(&table);
        let statements = Statements::new(&layout);
        // What no look at the catalog finds (rules, policies, what an extension added), the statement itself does.
        let transaction = Transaction::begin(&mut connection).await?;
        if let Err(error) = dry_run(transaction, &layout, &statements).await {
            return refused_dry(name, error);
        }
        if let Some(ledger) = &ledger {
            let transaction = Transaction::begin(&mut connection).await?;
            if let Err(error) = ledger.dry_run(transaction).await {
                return refused_dry(&ledger.name, error);
            }
        }
        if self.sink.keeps_positions() {
            let transaction = Transaction::begin(&mut connection).await?;
            let nobody = StageName::new("", HashMap::new());
            if let Err(error) = dry_run_offsets(transaction, &nobody).await {
                return refused_dry(&format!("{OFFSETS} or {LETTERS}"), error);
            }
        }
        warnings.extend(self.warnings(&server, &table));
        connection.close().await;
        Ok(Ok(Fit { layout, ledger, warnings }))
    }

    /// Whether the sink writes the column. What the database fills from a sequence is left to it unless it is named.
    pub(super) fn written(&self, column: &CatalogColumn) -> bool {
        let sink = self.sink;
        let named = self.fixed(&column.name) || sink.columns.iter().any(|(name, _)| *name == column.name);
        let taken = match sink.mode {
            Mode::Upsert | Mode::Insert | Mode::Update => !column.sequence,
            Mode::Add => !column.sequence && column.ty.as_ref().is_some_and(Type::adds),
        };
        !column.generated && (named || taken)
    }

    /// Whether the column is of the key, the version or the mark of deletion.
    pub(super) fn fixed(&self, column: &String) -> bool {
        let sink = self.sink;
        sink.key.contains(column) || sink.version.as_ref() == Some(column) || sink.deleted.as_ref() == Some(column)
    }

    /// Of a table without problems.
    fn layout(&self, table: &Table) -> Layout {
        let sink = self.sink;
        let written: Vec<&CatalogColumn> = table.columns.iter().filter(|c| self.written(c)).collect();
        let at = |name: &str| written.iter().position(|c| c.name == name).unwrap_or_default();
        let column = |c: &&CatalogColumn| {
            // A sum of nothing is 0: no null is left for a default.
            let sum = sink.mode == Mode::Add && !sink.key.contains(&c.name);
            let default = c.default.clone().filter(|_| c.not_null && !sum && !self.fixed(&c.name));
            Column {
                name: c.name.clone(),
                ty: c.ty.clone().unwrap_or(Type::Text { max: None }),
                required: c.not_null && !sum && default.is_none() && table.before_insert.is_empty(),
                may_be_filled: default.is_some() || !table.before_row.is_empty(),
                default,
            }
        };
        Layout {
            node: self.node.into(),
            table: sink.table.clone(),
            quoted_table: format!("{}.{}", quoted(&table.schema), quoted(&table.name)),
            mode: sink.mode,
            key: sink.key.iter().map(|k| at(k)).collect(),
            version: sink.version.as_deref().map(at),
            deleted: sink.deleted.as_deref().map(at),
            columns: written.iter().map(column).collect(),
        }
    }

    fn warnings(&self, server: &Server, table: &Table) -> Vec<String> {
        let mut warnings = Vec::new();
        let mut warn = |text: String| warnings.push(format!("sink {}: table {}: {text}", self.node, self.sink.table));
        if server.async_standby && self.sink.progress == Progress::Kafka {
            warn(
                "a standby follows asynchronously: after a failover to it, rows that were acknowledged here may be \
                 gone while the positions in Kafka stand past them; see synchronous_standby_names"
                    .into(),
            );
        }
        if server.fsync == "off" {
            warn("the server runs with fsync = off: a crash of its machine loses rows that were acknowledged".into());
        }
        if server.encoding != "UTF8" {
            warn(format!(
                "the database is encoded in {}: records with characters outside it are rejected",
                server.encoding
            ));
        }
        if table.row_security {
            warn("row security applies to this user: a row that a policy refuses stops the stage".into());
        }
        // Upserts try to insert what is there already.
        let upserts = matches!(self.sink.mode, Mode::Upsert | Mode::Add);
        for trigger in table.before_insert.iter().filter(|_| upserts) {
            warn(format!("trigger {trigger} runs before each insert, for stale records too"));
        }
        for column in table.columns.iter().filter(|c| upserts && c.sequence && !self.written(c)) {
            warn(format!(
                "column {} takes a number from its sequence for every record, stale ones too{}",
                column.name,
                if column.ty == Some(Type::Int8) { "" } else { ", and will run out: make it bigint" }
            ));
        }
        let unfilled = table.columns.iter().filter(|c| {
            let fixed = self.fixed(&c.name) || self.sink.mode == Mode::Add;
            let mapped = self.sink.columns.iter().any(|(name, _)| *name == c.name);
            c.not_null && c.default.is_none() && self.written(c) && !fixed && !mapped
        });
        for column in unfilled.filter(|_| !self.samples.is_empty()) {
            if self.samples.iter().all(|s| !s.contains_key(&column.name)) {
                warn(format!("column {} is NOT NULL, and no record of the file's tests has it", column.name));
            }
        }
        warnings
    }
}

fn refused_dry(table: &str, error: Error) -> Result<Verdict, Error> {
    match error {
        Error::Server(e) if e.class != Class::Transient => Ok(Err(vec![format!("table {table}: {}", e.message)])),
        other => Err(other),
    }
}

/// A table that is not there, with one that would do.
pub(super) fn missing_table(name: &str, address: &Address, similar: &[String], create: &str) -> String {
    let hint = match similar {
        [] => String::new(),
        names => format!(" (there is {}; names are taken exactly as written)", names.join(", ")),
    };
    format!("table {name} does not exist in {address}{hint}. One that fits:\n\n{create}\n")
}
