//! `type = "table"` and `type = "join"`: what a join names as its table, and where its records lie.

use super::aggregates;
use super::cx::{Cx, Table};
use super::kafka::STRATEGY;
use super::locate;
use super::nodes::Draft;
use super::semantics::Unstable;
use crate::expr::Role;
use crate::topology::finding::{Severity, code};
use crate::topology::spec::{Join, JoinKind, Kafka, NodeKind, Port, Start};

/// The strategy that gives the partitions of one number to one member.
const RANGE: &str = "range";

pub fn table(_: &mut Cx<'_>, _: &Table<'_>, draft: &mut Draft) {
    draft.kind = Some(NodeKind::Table);
}

pub fn read(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let kind = cx.choice(table, "kind", &JoinKind::WORDS).unwrap_or(JoinKind::Inner);
    let into = cx.required_string(table, "into", "the member that the row becomes, such as into = \"customer\"");
    let key = cx.expression(table, "key", Role::Value);
    let key_fails = table.get("key").is_some() && key.is_none();
    // Last of the inputs, as the nodes of a topology have it.
    let name = cx.required_string(table, "table", "the `table` of this file to look up, such as table = \"customers\"");
    draft.table = name.as_ref().map(|name| name.span.clone());
    let named = name.is_some();
    draft.inputs.extend(name);
    let into = into.filter(|_| named && !key_fails);
    draft.kind = into.map(|into| NodeKind::Join(Join { kind, key, into: into.value, of_tables: false }));
}

/// Whether a join's input is a table, too.
pub fn of_tables(drafts: &[Draft], draft: &Draft, inputs: &[Port]) -> bool {
    let is_table = |port: &Port| matches!(drafts[port.node.0].kind, Some(NodeKind::Table));
    draft.table.is_some() && inputs.len() == draft.inputs.len() && streams(draft, inputs).iter().any(is_table)
}

/// The inputs of a node: of a join all but its table.
pub fn streams<'p>(draft: &Draft, inputs: &'p [Port]) -> &'p [Port] {
    match draft.table {
        // One that was not found is not there to be left out.
        Some(_) if inputs.len() == draft.inputs.len() => &inputs[..inputs.len() - 1],
        _ => inputs,
    }
}

/// Reports tables that are none, and those that lack rows.
pub fn check(cx: &mut Cx<'_>, drafts: &[Draft], inputs: &[Vec<Port>]) {
    let joins = drafts.iter().zip(inputs).filter(|(draft, _)| draft.table.is_some());
    for (draft, ports) in joins.filter(|(draft, ports)| ports.len() == draft.inputs.len()) {
        let (Some(span), Some(port)) = (&draft.table, ports.last()) else { continue };
        let named = &drafts[port.node.0];
        if named.kind.as_ref().is_some_and(|kind| !matches!(kind, NodeKind::Table)) {
            let message = format!("{} looks up `{}`, which is no table", draft.what(), named.name);
            cx.found.error(code::JOIN_TABLE, span.clone(), message).help(format!(
                "put a table behind it: [transforms.NAME] with type = \"table\" and inputs = [\"{}\"], and name that",
                named.name
            ));
        }
    }
    joins_of_tables(cx, drafts, inputs);
    let tables = drafts.iter().enumerate().filter(|(_, draft)| matches!(draft.kind, Some(NodeKind::Table)));
    for (id, draft) in tables {
        let above = aggregates::above(drafts, inputs, id);
        let late = above
            .iter()
            .map(|id| &drafts[*id])
            .find(|above| matches!(&above.kind, Some(NodeKind::Source(source)) if source.start != Start::Earliest));
        if let Some(source) = late {
            let message = format!("{} lacks the rows from before the start of `{}`", draft.what(), source.name);
            cx.found
                .warning(code::TABLE_START, draft.name_span.clone(), message)
                .help("read the topic of a table from its beginning: start = \"earliest\"");
        }
    }
}

/// Reports settings that a join of two tables cannot have, and one that only such a join has.
fn joins_of_tables(cx: &mut Cx<'_>, drafts: &[Draft], inputs: &[Vec<Port>]) {
    for (draft, ports) in drafts.iter().zip(inputs).filter(|(draft, ports)| ports.len() == draft.inputs.len()) {
        let Some(NodeKind::Join(join)) = &draft.kind else { continue };
        let of_tables = of_tables(drafts, draft, ports);
        let (message, help) = match join {
            Join { kind: JoinKind::Outer, .. } if !of_tables => (
                "keeps rows without a record of the stream: only a join of two tables has those".to_owned(),
                "kind = \"left\" keeps the records that have no row",
            ),
            Join { key: Some(_), .. } if of_tables => (
                "looks up by another key than that of its tables".to_owned(),
                "leave `key` out: both are looked up by the key that they have",
            ),
            _ if of_tables && ports.len() > 2 => (
                format!("joins {} inputs with a table", ports.len() - 1),
                "where one is a table it is the only one; join the result with the next",
            ),
            _ => continue,
        };
        let message = format!("{} {message}", draft.what());
        cx.found.error(code::JOIN_TABLE, draft.name_span.clone(), message).help(help);
    }
}

/// Joins need the partitions of one number with one worker, which one strategy of the client gives; the broker has one, too.
pub fn strategy(cx: &mut Cx<'_>, kafka: Option<&Kafka>, drafts: &[Draft]) {
    let Some(join) = drafts.iter().find(|draft| draft.table.is_some()) else { return };
    let Some(kafka) = kafka.filter(|kafka| !kafka.broker_assigns()) else { return };
    match kafka.properties.get(STRATEGY).map(String::as_str) {
        Some(RANGE) => {}
        Some(_) => {
            let span = locate(cx.text, &["kafka", "properties", STRATEGY]);
            let message = format!("`{STRATEGY}` must be \"{RANGE}\" because of {}", join.what());
            cx.found
                .error(code::KAFKA_PROPERTY, span, message)
                .help("its topics are joined partition by partition: leave the property out");
        }
        None => {
            let message = format!("because of {} the members of the group divide partitions by {RANGE}", join.what());
            cx.found.add(Severity::Note, code::JOIN_ASSIGNMENT, join.name_span.clone(), message).help(
                "a job that ran without a join is stopped on every host before this file runs: a group has one strategy at \
                 a time",
            );
        }
    }
}

/// What another attempt may change of what is joined.
pub fn unstable(join: &Join, flow: Vec<Unstable>, row: &[Unstable]) -> Vec<Unstable> {
    let into = format!(".{}", join.into);
    let below = |unstable: &Unstable| {
        let path = if unstable.path == "." { into.clone() } else { format!("{into}{}", unstable.path) };
        Unstable { path, ..unstable.clone() }
    };
    let kept = flow.into_iter().filter(|unstable| unstable.path != into);
    kept.chain(row.iter().map(below)).collect()
}
