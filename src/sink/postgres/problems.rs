//! What keeps a sink from writing to its table, each with its cure.

use super::catalog::{CatalogColumn, Server, Table};
use super::layout::{Type, quoted};
use super::preflight::Subject;
use crate::topology::spec::{Mode, Progress, SinkTombstones};

pub(super) fn server_problems(server: &Server, progress: Progress) -> Vec<String> {
    let mut problems = Vec::new();
    if server.version < 140_000 {
        problems.push(format!("the server is PostgreSQL {}; semel needs 14 or newer", server.version_text));
    }
    if server.in_recovery {
        problems.push("the server is a standby; name the primary in the url, or all hosts of the cluster".into());
    }
    // Positions beside the rows are lost with them, and both come again.
    if server.synchronous_commit == "off" && progress == Progress::Kafka {
        problems.push(
            "synchronous_commit is off: the server acknowledges rows that a crash loses, while the positions in Kafka \
             stand past them. Set it on for this user: ALTER ROLE … SET synchronous_commit = on"
                .into(),
        );
    }
    problems
}

impl Subject<'_> {
    pub(super) fn table_problems(&self, table: &Table) -> Vec<String> {
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
                "it is unlogged: a crash of the server empties it, and the positions would stand past the rows \
                 lost; ALTER TABLE … SET LOGGED"
                    .into(),
            );
        }
        if table.rules && matches!(table.kind.as_str(), "r" | "p") {
            problem("it has rules, which rewrite statements behind the guard's back; make them triggers".into());
        }
        let fixed = sink.key.iter().chain(&sink.version).chain(&sink.deleted);
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
        let deletes = sink.delete_when.is_some() || sink.tombstones == SinkTombstones::Delete;
        if deletes && sink.deleted.is_none() {
            problem("deletes need a boolean column, named by `deleted`".into());
        }
        match sink.mode {
            Mode::Insert => self.insert_problems(table, &mut problem),
            Mode::Upsert | Mode::Add | Mode::Update => self.key_problems(table, &mut problem),
        }
        problems
    }

    fn missing_column(&self, name: &str, table: &Table) -> String {
        let sink = self.sink;
        let similar = table.columns.iter().find(|c| c.name.eq_ignore_ascii_case(name));
        if let Some(similar) = similar {
            return format!("there is no column {name}, but {}: names are taken exactly as written", similar.name);
        }
        let ty = match name {
            _ if Some(name) == sink.version.as_deref() => "bigint NOT NULL DEFAULT 0",
            _ if Some(name) == sink.deleted.as_deref() => "boolean NOT NULL DEFAULT false",
            _ if sink.mode == Mode::Add && !sink.key.iter().any(|key| key == name) => "bigint NOT NULL DEFAULT 0",
            _ => "text",
        };
        format!("there is no column {name}; ALTER TABLE {} ADD COLUMN {} {ty}", sink.table, quoted(name))
    }

    fn column_problems(&self, column: &CatalogColumn, problem: &mut impl FnMut(String)) {
        let CatalogColumn { name, declared, .. } = column;
        let sink = self.sink;
        let Some(ty) = &column.ty else {
            return problem(format!(
                "column {name} is {declared}, which semel cannot write; it writes text, varchar, char, boolean, \
                 smallint, integer, bigint, numeric, real, double precision, uuid, timestamptz, timestamp, date, \
                 json, jsonb, bytea and enums"
            ));
        };
        if Some(name) == sink.version.as_ref() {
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
                "the key column {name} has a collation that calls different texts equal, which semel cannot follow; \
                 give it a deterministic one"
            ));
        }
        if key && matches!(ty, Type::Json | Type::Jsonb) {
            problem(format!("the key column {name} is {declared}; take a type with one spelling a value, as text"));
        }
        let rest = !self.fixed(name);
        if rest && sink.mode == Mode::Add && !ty.adds() {
            problem(format!(
                "column {name} is {declared}, to which nothing is added exactly; it must be smallint, integer, bigint or \
                 numeric, or be left out of `columns`"
            ));
        }
        if rest && column.not_null && column.default.is_none() && sink.tombstones == SinkTombstones::Delete {
            problem(format!(
                "column {name} is NOT NULL, but with tombstones = \"delete\" a deleted row has no value for it; make \
                 it nullable or give it a default"
            ));
        }
        let (insert, change) = match sink.mode {
            Mode::Upsert | Mode::Add => (true, true),
            Mode::Insert => (true, false),
            Mode::Update => (false, true),
        };
        let missing = [
            ("SELECT", column.may_select || !change),
            ("INSERT", column.may_insert || !insert),
            ("UPDATE", column.may_update || !change),
        ];
        let missing: Vec<&str> = missing.iter().filter(|(_, may)| !may).map(|(right, _)| *right).collect();
        if !missing.is_empty() {
            let rights = missing.join(", ");
            problem(format!(
                "no right to {rights} column {name}; GRANT {rights} ON {} TO the user of the url",
                sink.table
            ));
        }
    }

    /// Rows that a crash delivers again would be refused, and each become a dead letter of a row that is there.
    fn insert_problems(&self, table: &Table, problem: &mut impl FnMut(String)) {
        if !self.comes_again {
            return;
        }
        let written = |column: &String| table.column(column).is_some_and(|column| self.written(column));
        if let Some(index) = table.unique.iter().find(|index| index.columns.iter().any(written)) {
            problem(format!(
                "mode = \"insert\" may insert a row again after a crash, which the unique index {} refuses; tell events \
                 apart (dedupe = {{ table = \"processed_events\", retention = \"14d\" }}), or keep positions beside the \
                 rows (progress = \"postgres\"), or use mode = \"upsert\"",
                index.name
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
}

fn sorted(names: &[String]) -> Vec<&String> {
    let mut names: Vec<&String> = names.iter().collect();
    names.sort();
    names
}
