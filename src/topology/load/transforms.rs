//! `[transforms.NAME]`.

use toml::de::DeValue;

use super::aggregates;
use super::cx::{Cx, Item, Table, is_hole};
use super::joins;
use super::nodes::{Draft, NodeType, check_name};
use crate::expr::Role;
use crate::topology::finding::code;
use crate::topology::keys;
use crate::topology::spec::{NodeKind, Route, Tombstones};

pub const TYPES: &[NodeType] = &[
    NodeType { word: "filter", section: &keys::FILTER, read: filter },
    NodeType { word: "remap", section: &keys::REMAP, read: remap },
    NodeType { word: "route", section: &keys::ROUTE, read: route },
    NodeType { word: "flat_map", section: &keys::FLAT_MAP, read: flat_map },
    NodeType { word: "rekey", section: &keys::REKEY, read: rekey },
    NodeType { word: "aggregate", section: &keys::AGGREGATE, read: aggregates::read },
    NodeType { word: "table", section: &keys::TABLE, read: joins::table },
    NodeType { word: "join", section: &keys::JOIN, read: joins::read },
];
pub const LATER: &[&str] = &["window", "dedupe", "global_table"];

const CONDITION: &str = "a boolean expression, such as condition = '.status != \"cancelled\"'";

fn filter(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let condition = cx.required_expression(table, "condition", Role::Condition, CONDITION);
    let tombstones = tombstones(cx, table);
    draft.kind = condition.map(|condition| NodeKind::Filter { condition, tombstones });
}

fn remap(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let help = "a VRL program, such as source = '.total = to_float!(.qty) * to_float!(.price)'";
    let source = cx.required_expression(table, "source", Role::Remap, help);
    let tombstones = tombstones(cx, table);
    draft.kind = source.map(|source| NodeKind::Remap { source, tombstones });
}

fn flat_map(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let help = "a VRL program that ends in an array, such as source = '.lines'";
    let source = cx.required_expression(table, "source", Role::Expand, help);
    let tombstones = tombstones(cx, table);
    draft.kind = source.map(|source| NodeKind::FlatMap { source, tombstones });
}

fn rekey(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let key = cx.required_expression(table, "key", Role::Value, "the new key, such as key = '.customer_id'");
    draft.kind = key.map(|key| NodeKind::Rekey { key });
}

fn route(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let help = "such as routes = [ { name = \"large\", condition = '.total > 1000' } ]";
    let tombstones = tombstones(cx, table);
    let mut outputs = Vec::new();
    let mut routes = Vec::new();
    match table.get("routes") {
        None => cx.missing(table, "routes", help),
        Some(item) => match item.get_ref() {
            DeValue::Array(array) => {
                if array.is_empty() {
                    cx.found.error(code::INVALID_VALUE, item.span(), "`routes` is empty").help(help);
                }
                for item in array.iter() {
                    routes.push(route_output(cx, item, draft, &mut outputs));
                }
            }
            _ if is_hole(item) => {}
            other => {
                let message = format!("`routes` must be an array of tables, not a {}", other.type_str());
                cx.found
                    .error(code::WRONG_TYPE, item.span(), message)
                    .help(format!("an array, since the order matters: {help}"));
            }
        },
    }
    draft.outputs = Some(outputs);
    let complete = !routes.is_empty() && routes.iter().all(Option::is_some);
    draft.kind = complete.then(|| NodeKind::Route { routes: routes.into_iter().flatten().collect(), tombstones });
}

fn route_output(
    cx: &mut Cx<'_>,
    item: &Item<'_>,
    draft: &Draft,
    outputs: &mut Vec<(String, std::ops::Range<usize>)>,
) -> Option<Route> {
    let what = format!("an output of route `{}`", draft.name);
    let table = cx.table(item, item.span(), &keys::ROUTE_OUTPUT, what)?;
    let name = cx.required_string(&table, "name", "such as name = \"large\"");
    let condition = cx.required_expression(&table, "condition", Role::Condition, CONDITION);
    let name = name?;
    if !name.unset {
        if !check_name(cx, &name.value, &name.shown, name.span.clone(), "route's output") {
            return None;
        }
        if outputs.iter().any(|(other, _)| *other == name.value) {
            let message = format!("route `{}` has two outputs `{}`", draft.name, name.value);
            cx.found.error(code::DUPLICATE_NAME, name.span.clone(), message).help("inputs could not tell them apart");
            return None;
        }
    }
    outputs.push((name.value.clone(), name.span));
    Some(Route { name: name.value, condition: condition? })
}

fn tombstones(cx: &mut Cx<'_>, table: &Table<'_>) -> Tombstones {
    let words = [("pass", Tombstones::Pass), ("drop", Tombstones::Drop), ("process", Tombstones::Process)];
    cx.choice(table, "tombstones", &words).unwrap_or(Tombstones::Pass)
}
