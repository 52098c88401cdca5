//! What must be true of a ledger before anything is entered in it.

use super::address::Address;
use super::catalog::{Table, has_default_partition, missing_ledger_rights, similar_tables};
use super::connect::Connection;
use super::create::create_ledger;
use super::error::Error;
use super::layout::Type;
use super::ledger::LedgerTable;
use super::preflight::{Subject, missing_table};
use crate::topology::spec::Ledger;

/// A ledger as it was found.
#[derive(Default)]
pub(super) struct LookedAt {
    /// Only without problems.
    pub ledger: Option<LedgerTable>,
    pub problems: Vec<String>,
    pub warnings: Vec<String>,
}

impl Subject<'_> {
    pub(super) async fn ledger(
        &self,
        connection: &Connection,
        spec: &Ledger,
        address: &Address,
    ) -> Result<LookedAt, Error> {
        let mut found = LookedAt::default();
        let name = &spec.table;
        let Some(table) = Table::read(connection, name).await? else {
            let similar = similar_tables(connection, name).await?;
            found.problems.push(missing_table(name, address, &similar, &create_ledger(name, self.timed)));
            return Ok(found);
        };
        let mut problem = |text: &str| found.problems.push(format!("the ledger {name}: {text}"));
        let partitioned = table.kind == "p";
        if !partitioned && table.kind != "r" {
            problem("it is no table");
        }
        if table.unlogged {
            problem("it is unlogged: a crash of the server empties it; ALTER TABLE … SET LOGGED");
        }
        match table.column("event_id") {
            None => problem("there is no column event_id; it must be uuid, and the primary key"),
            Some(column) if column.ty != Some(Type::Uuid) => {
                problem(&format!("the column event_id is {}; it must be uuid", column.declared));
            }
            Some(_) => {}
        }
        let guards = |index: &super::catalog::UniqueIndex| index.columns == ["event_id"] && index.unfit.is_none();
        if !table.unique.iter().any(guards) {
            problem("no unique index is on exactly event_id: an event would be entered twice");
        }
        let seen_at = table.column("seen_at");
        if !partitioned
            && seen_at.is_none_or(|c| !matches!(c.ty, Some(Type::TimestampTz { .. })) || c.default.is_none())
        {
            problem("there is no column seen_at timestamptz NOT NULL DEFAULT now(), by which old ids are deleted");
        }
        for column in &table.columns {
            let filled = column.name == "event_id" || column.default.is_some() || column.generated || !column.not_null;
            if !filled {
                problem(&format!("the column {} is NOT NULL and has no default: nothing fills it", column.name));
            }
        }
        if partitioned && has_default_partition(connection, table.oid).await? {
            problem(
                "it has a DEFAULT partition, which would take ids of any time and keeps others from being detached",
            );
        }
        let missing = missing_ledger_rights(connection, table.oid, partitioned).await?;
        if !missing.is_empty() {
            problem(&format!("the user of the url may not {}", missing.join(", ")));
        }
        if partitioned && !self.timed {
            found.warnings.push(format!(
                "sink {}: the ledger {name} is in partitions by time, but a source declares no event_time: only ids that \
                 are UUIDs of version 7 are taken, all others are rejected",
                self.node
            ));
        }
        if found.problems.is_empty() {
            found.ledger = Some(LedgerTable {
                name: name.clone(),
                schema: table.schema,
                table: table.name,
                oid: table.oid,
                partitioned,
                retention: spec.retention,
            });
        }
        Ok(found)
    }
}
