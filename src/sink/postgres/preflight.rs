//! What must be true of a table before anything is written to it, and what a user should know of it.

use std::sync::Arc;

use super::address::Address;
use super::catalog::{CatalogColumn, Server, Table, similar_tables};
use super::connect::Connection;
use super::create::{Sample, create_table, samples};
use super::error::{Class, Error};
use super::layout::{Column, Layout, Type, quoted};
use super::sql::Statements;
use super::transaction::Transaction;
use super::write::dry_run;
use crate::error::{Exit, Failure};
use crate::topology::spec::{NodeId, NodeKind, PostgresSink, SinkTombstones, Topology};

/// A sink whose database and table were found fit.
#[derive(Clone, Debug)]
pub struct Checked {
    pub address: Address,
    pub layout: Arc<Layout>,
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
    let subject = Subject { node: &node.name, sink: spec, samples: samples(topology, sink) };
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
        Ok(Ok((layout, warnings))) => Ok(Checked { address, layout: Arc::new(layout), warnings }),
        Ok(Err(problems)) => Err(refused(problems.join("\n"))),
        Err(error) => {
            let away = matches!(error, Error::Connection(_)) || error.class() == Some(Class::Transient);
            let exit = if away { Exit::Unreachable } else { Exit::Refused };
            Err(Failure::new(exit, format!("sink {}: {error}", node.name)))
        }
    }
}

struct Subject<'a> {
    node: &'a str,
    sink: &'a PostgresSink,
    samples: Vec<Sample>,
}

type Verdict = Result<(Layout, Vec<String>), Vec<String>>;

impl Subject<'_> {
    async fn check(&self, address: &Address) -> Result<Verdict, Error> {
        let mut connection = Connection::open(address, self.sink.prepared).await?;
        let server = Server::read(&connection).await?;
        let mut problems = server_problems(&server);
        if !problems.is_empty() {
            return Ok(Err(problems));
        }
        let name = &self.sink.table;
        let Some(table) = Table::read(&connection, name).await? else {
            let similar = similar_tables(&connection, name).await?;
            return Ok(Err(vec![self.missing_table(address, &similar)]));
        };
        problems = self.table_problems(&table);
        if !problems.is_empty() {
            return Ok(Err(problems));
        }
        let layout = self.layout(&table);
        let statements = Statements::new(&layout);
        // What no look at the catalog finds (rules, policies, what an extension added), the statement itself does.
        let transaction = Transaction::begin(&mut connection).await?;
        if let Err(error) = dry_run(transaction, &layout, &statements).await {
            return match error {
                Error::Server(e) if e.class != Class::Transient => {
                    Ok(Err(vec![format!("table {name}: {}", e.message)]))
                }
                other => Err(other),
            };
        }
        let warnings = self.warnings(&server, &table);
        connection.close().await;
        Ok(Ok((layout, warnings)))
    }

    fn missing_table(&self, address: &Address, similar: &[String]) -> String {
        let name = &self.sink.table;
        let hint = match similar {
            [] => String::new(),
            names => format!(" (there is {}; names are taken exactly as written)", names.join(", ")),
        };
        let create = create_table(self.sink, &self.samples);
        format!("table {name} does not exist in {address}{hint}. One that fits:\n\n{create}\n")
    }

    fn table_problems(&self, table: &Table) -> Vec<String> {
        let sink = self.sink;
        let mut problems = Vec::new();
        let mut problem = |text: String| problems.push(format!("table {}: {text}", sink.table));
        match table.kind.as_str() {
            "r" | "p" => {}
            "v" => problem("it is a view; name the table below it".into()),
            "m" => problem("it is a materialized view; name a table".into()),
            _ => problem("it is a foreign table, which takes no upserts; name a table of this database".into()),
        }
        if table.unlogged {
            problem(
                "it is unlogged: a crash of the server empties it, and the positions in Kafka would stand past the rows \
                 lost; ALTER TABLE … SET LOGGED"
                    .into(),
            );
        }
        if table.rules && matches!(table.kind.as_str(), "r" | "p") {
            problem("it has rules, which rewrite statements behind the guard's back; make them triggers".into());
        }
        let fixed = sink.key.iter().chain([&sink.version]).chain(&sink.deleted);
        for name in fixed.chain(sink.columns.iter().map(|(name, _)| name)) {
            match table.column(name) {
                None => problem(self.missing_column(name, table)),
                Some(c) if c.generated => {
                    problem(format!("column {name} is made by the database: it cannot be written"))
                }
                Some(_) => {}
            }
        }
        for column in &table.columns {
            if self.written(column) {
                self.column_problems(column, &mut problem);
            }
        }
        self.key_problems(table, &mut problem);
        problems
    }

    fn missing_column(&self, name: &str, table: &Table) -> String {
        let sink = self.sink;
        let similar = table.columns.iter().find(|c| c.name.eq_ignore_ascii_case(name));
        if let Some(similar) = similar {
            return format!("there is no column {name}, but {}: names are taken exactly as written", similar.name);
        }
        let ty = match name {
            _ if name == sink.version => "bigint NOT NULL DEFAULT 0",
            _ if Some(name) == sink.deleted.as_deref() => "boolean NOT NULL DEFAULT false",
            _ => "text",
        };
        format!("there is no column {name}; ALTER TABLE {} ADD COLUMN {} {ty}", sink.table, quoted(name))
    }

    fn column_problems(&self, column: &CatalogColumn, problem: &mut impl FnMut(String)) {
        let CatalogColumn { name, declared, .. } = column;
        let sink = self.sink;
        let Some(ty) = &column.ty else {
            return problem(format!(
                "column {name} is {declared}, which semel cannot write; it writes text, varchar, char, boolean, smallint, \
                 integer, bigint, numeric, real, double precision, uuid, timestamptz, timestamp, date, json, jsonb, bytea \
                 and enums"
            ));
        };
        if *name == sink.version {
            if !matches!(ty, Type::Int2 | Type::Int4 | Type::Int8) {
                problem(format!("the version column {name} is {declared}; it must be bigint (or a smaller integer)"));
            }
            if !column.not_null {
                problem(format!(
                    "the version column {name} may be NULL, and such a row would never be updated again; \
                     ALTER TABLE {} ALTER COLUMN {} SET NOT NULL",
                    sink.table,
                    quoted(name)
                ));
            }
        }
        if Some(name) == sink.deleted.as_ref() && *ty != Type::Bool {
            problem(format!("the column {name} for deleted is {declared}; it must be boolean"));
        }
        let key = sink.key.contains(name);
        if key && column.nondeterministic {
            problem(format!(
                "the key column {name} has a collation that calls different texts equal, which semel cannot follow; give \
                 it a deterministic one"
            ));
        }
        if key && matches!(ty, Type::Json | Type::Jsonb) {
            problem(format!("the key column {name} is {declared}; take a type with one spelling a value, as text"));
        }
        let rest = !key && *name != sink.version && Some(name) != sink.deleted.as_ref();
        if rest && column.not_null && column.default.is_none() && sink.tombstones == SinkTombstones::Delete {
            problem(format!(
                "column {name} is NOT NULL, but with tombstones = \"delete\" a deleted row has no value for it; make it \
                 nullable or give it a default"
            ));
        }
        let missing = [("SELECT", column.may_select), ("INSERT", column.may_insert), ("UPDATE", column.may_update)];
        let missing: Vec<&str> = missing.iter().filter(|(_, may)| !may).map(|(right, _)| *right).collect();
        if !missing.is_empty() {
            let rights = missing.join(", ");
            problem(format!(
                "no right to {rights} column {name}; GRANT {rights} ON {} TO the user of the url",
                sink.table
            ));
        }
    }

    fn key_problems(&self, table: &Table, problem: &mut impl FnMut(String)) {
        let wanted = sorted(&self.sink.key);
        let on_key: Vec<_> = table.unique.iter().filter(|index| sorted(&index.columns) == wanted).collect();
        if on_key.iter().any(|index| index.unfit.is_none()) {
            return;
        }
        let key = self.sink.key.iter().map(|k| quoted(k)).collect::<Vec<_>>().join(", ");
        let cure = format!("CREATE UNIQUE INDEX ON {} ({key})", self.sink.table);
        match on_key.first() {
            Some(index) => {
                let why = index.unfit.unwrap_or_default();
                problem(format!("the unique index {} on the key cannot guard it: {why}; {cure}", index.name));
            }
            None => {
                let others: Vec<String> =
                    table.unique.iter().map(|i| format!("{} on ({})", i.name, i.columns.join(", "))).collect();
                let others =
                    if others.is_empty() { String::new() } else { format!(" (there is {})", others.join("; ")) };
                problem(format!("no unique index is on exactly the key{others}; {cure}"));
            }
        }
    }

    /// Whether the sink writes the column. What the database fills from a sequence is left to it unless it is named.
    fn written(&self, column: &CatalogColumn) -> bool {
        let sink = self.sink;
        let named = sink.key.contains(&column.name)
            || sink.version == column.name
            || sink.deleted.as_ref() == Some(&column.name)
            || sink.columns.iter().any(|(name, _)| *name == column.name);
        !column.generated && (named || !column.sequence)
    }

    /// Of a table without problems.
    fn layout(&self, table: &Table) -> Layout {
        let sink = self.sink;
        let written: Vec<&CatalogColumn> = table.columns.iter().filter(|c| self.written(c)).collect();
        let at = |name: &str| written.iter().position(|c| c.name == name).unwrap_or_default();
        let column = |c: &&CatalogColumn| {
            let fixed = sink.key.contains(&c.name) || c.name == sink.version || Some(&c.name) == sink.deleted.as_ref();
            let default = c.default.clone().filter(|_| c.not_null && !fixed);
            Column {
                name: c.name.clone(),
                ty: c.ty.clone().unwrap_or(Type::Text { max: None }),
                required: c.not_null && default.is_none() && table.before_insert.is_empty(),
                may_be_filled: default.is_some() || !table.before_row.is_empty(),
                default,
            }
        };
        Layout {
            node: self.node.into(),
            table: sink.table.clone(),
            quoted_table: format!("{}.{}", quoted(&table.schema), quoted(&table.name)),
            key: sink.key.iter().map(|k| at(k)).collect(),
            version: at(&sink.version),
            deleted: sink.deleted.as_deref().map(at),
            columns: written.iter().map(column).collect(),
        }
    }

    fn warnings(&self, server: &Server, table: &Table) -> Vec<String> {
        let mut warnings = Vec::new();
        let mut warn = |text: String| warnings.push(format!("sink {}: table {}: {text}", self.node, self.sink.table));
        if server.async_standby {
            warn(
                "a standby follows asynchronously: after a failover to it, rows that were acknowledged here may be gone \
                 while the positions in Kafka stand past them; see synchronous_standby_names"
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
        for trigger in &table.before_insert {
            warn(format!("trigger {trigger} runs before each insert, for stale records too"));
        }
        for column in table.columns.iter().filter(|c| c.sequence && !self.written(c)) {
            warn(format!(
                "column {} takes a number from its sequence for every record, stale ones too{}",
                column.name,
                if column.ty == Some(Type::Int8) { "" } else { ", and will run out: make it bigint" }
            ));
        }
        let unfilled = table.columns.iter().filter(|c| {
            let fixed = self.sink.key.contains(&c.name) || c.name == self.sink.version;
            let fixed = fixed || Some(&c.name) == self.sink.deleted.as_ref();
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

fn server_problems(server: &Server) -> Vec<String> {
    let mut problems = Vec::new();
    if server.version < 140_000 {
        problems.push(format!("the server is PostgreSQL {}; semel needs 14 or newer", server.version_text));
    }
    if server.in_recovery {
        problems.push("the server is a standby; name the primary in the url, or all hosts of the cluster".into());
    }
    if server.synchronous_commit == "off" {
        problems.push(
            "synchronous_commit is off: the server acknowledges rows that a crash loses, while the positions in Kafka stand \
             past them. Set it on for this user: ALTER ROLE … SET synchronous_commit = on"
                .into(),
        );
    }
    problems
}

fn sorted(names: &[String]) -> Vec<&String> {
    let mut names: Vec<&String> = names.iter().collect();
    names.sort();
    names
}
