//! The plan as JSON.

use serde_json::{Value, json};

use super::{ends, guarantee_word, kind_word, transactional_ids};
use crate::topology::plan::{EdgeEnd, Plan, PlannedStore, StageKind};

/// The plan as one JSON object: `name`, `file`, `guarantee`, `dead_letters`, `job_topic`, `nodes`, `stages`, `edges`,
/// `exactly_once_ends`, `unset`. Settings that may hold secrets are left out.
pub fn json(plan: &Plan) -> Value {
    let topology = &plan.topology;
    let nodes: Vec<_> = topology
        .nodes
        .iter()
        .map(|node| {
            let inputs: Vec<_> = node.inputs.iter().map(|port| topology.port_name(*port)).collect();
            json!({ "name": node.name, "kind": kind_word(&node.kind).replace(' ', "_"), "inputs": inputs })
        })
        .collect();
    let name = |id: &crate::topology::spec::NodeId| topology.nodes[id.0].name.clone();
    let stages: Vec<_> = plan
        .stages
        .iter()
        .map(|stage| {
            let (kind, nodes) = match &stage.kind {
                StageKind::Kafka { sources, nodes } => ("kafka", sources.iter().chain(nodes).map(name).collect()),
                StageKind::Postgres { sink, .. } => ("postgres", vec![name(sink)]),
            };
            let store = |store: PlannedStore| {
                json!({ "name": store.name, "node": name(&store.node), "changelog": store.changelog })
            };
            let stores: Vec<_> = plan.stores(stage).into_iter().map(store).collect();
            json!({
                "name": stage.name,
                "kind": kind,
                "group": stage.group,
                "transactional_ids": transactional_ids(plan, stage),
                "reads": plan.reads(stage),
                "writes": plan.writes(stage),
                "repartitions": plan.repartitions(stage),
                "stores": stores,
                "retry_topic": plan.retry(stage),
                "nodes": nodes,
            })
        })
        .collect();
    let edges: Vec<_> = plan
        .edges
        .iter()
        .map(|edge| {
            json!({
                "stage": edge.stage,
                "from": end(&edge.from),
                "to": end(&edge.to),
                "guarantee": edge.guarantee.as_str(),
                "by": edge.by,
            })
        })
        .collect();
    let ends: Vec<_> = ends(plan)
        .into_iter()
        .map(|end| json!({ "before_stage": end.before, "headline": end.headline, "text": end.text }))
        .collect();
    let unset: Vec<_> = topology
        .unset
        .iter()
        .map(|v| json!({ "name": v.name, "node": v.node, "line": v.line, "column": v.column }))
        .collect();
    json!({
        "name": topology.name,
        "file": topology.file,
        "guarantee": guarantee_word(topology.guarantee),
        "dead_letters": plan.dead_letters(),
        "job_topic": topology.job_topic(),
        "nodes": nodes,
        "stages": stages,
        "edges": edges,
        "exactly_once_ends": ends,
        "unset": unset,
    })
}

fn end(end: &EdgeEnd) -> Value {
    match end {
        EdgeEnd::Topic(name) => json!({ "kind": "topic", "name": name }),
        EdgeEnd::Node(name) => json!({ "kind": "node", "name": name }),
        EdgeEnd::Table(name) => json!({ "kind": "table", "name": name }),
        EdgeEnd::Rejects => json!({ "kind": "rejects", "name": null }),
    }
}
