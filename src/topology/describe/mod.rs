//! A plan as text, JSON, dot and mermaid.

use super::plan::{Edge, EdgeEnd, Plan, Stage, StageKind};
use super::spec::{Format, Guarantee, Node, NodeKind, Source, Start};

mod graph;
mod json;
mod text;

pub use graph::{dot, mermaid};
pub use json::json;
pub use text::text;

/// What a node is, in a word or two.
fn kind_word(kind: &NodeKind) -> &'static str {
    match kind {
        NodeKind::Source(_) => "source",
        NodeKind::Filter { .. } => "filter",
        NodeKind::Remap { .. } => "remap",
        NodeKind::Route { .. } => "route",
        NodeKind::FlatMap { .. } => "flat_map",
        NodeKind::Rekey { .. } => "rekey",
        NodeKind::KafkaSink(_) => "kafka sink",
        NodeKind::PostgresSink(_) => "postgres sink",
    }
}

fn guarantee_word(guarantee: Guarantee) -> &'static str {
    match guarantee {
        Guarantee::ExactlyOnce => "exactly-once",
        Guarantee::AtLeastOnce => "at-least-once",
        Guarantee::AtMostOnce => "at-most-once",
    }
}

fn format_word(format: Format) -> &'static str {
    match format {
        Format::Json => "json",
        Format::String => "string",
        Format::Bytes => "bytes",
    }
}

fn start_words(source: &Source) -> String {
    match source.start {
        Start::Earliest => "earliest".to_owned(),
        Start::Latest => "latest".to_owned(),
        Start::Timestamp(ms) => format!("{ms} ms since 1970"),
    }
}

/// The node that an end of an edge names (the route, for an output of a route).
fn node_of<'p>(plan: &'p Plan, end: &EdgeEnd) -> Option<&'p Node> {
    let EdgeEnd::Node(name) = end else { return None };
    let name = name.split('.').next().unwrap_or(name);
    plan.topology.nodes.iter().find(|node| node.name == name)
}

/// The edges of a stage.
fn edges_of<'p>(plan: &'p Plan, stage: &'p Stage) -> impl Iterator<Item = &'p Edge> {
    plan.edges.iter().filter(|edge| edge.stage == stage.name)
}

/// The pattern of a stage's transactional ids, where it has any.
fn transactional_ids(plan: &Plan, stage: &Stage) -> Option<String> {
    let topology = &plan.topology;
    let instance = topology.instance.as_deref().unwrap_or("<instance>");
    plan.transactional().then(|| format!("{}.{}.{instance}.<worker>.<0|1>", topology.name, stage.name))
}

fn stage_words(stage: &Stage) -> &'static str {
    match stage.kind {
        StageKind::Kafka { .. } => "Kafka to Kafka",
        StageKind::Postgres { .. } => "Kafka to Postgres",
    }
}

/// Where exactly-once ends, in the words that every format uses. One entry an end.
fn ends(plan: &Plan) -> Vec<End> {
    let mut ends = Vec::new();
    if !plan.transactional() {
        let guarantee = guarantee_word(plan.topology.guarantee);
        ends.push(End {
            before: plan.stages.first().map(|stage| stage.name.clone()),
            text: format!("nothing here is exactly-once: the file asks for guarantee = \"{guarantee}\""),
        });
        return ends;
    }
    let postgres = plan.stages.iter().find(|stage| matches!(stage.kind, StageKind::Postgres { .. }));
    if let Some(stage) = postgres {
        ends.push(End {
            before: Some(stage.name.clone()),
            text: "exactly-once ends here: below, a batch may be delivered again; the table shows its effect once"
                .to_owned(),
        });
    }
    let mut topics: Vec<String> = plan.stages.iter().flat_map(|stage| plan.writes(stage)).collect();
    topics.push(plan.dead_letters());
    ends.push(End {
        before: None,
        text: format!(
            "exactly-once ends at {}: who reads on must set isolation.level=read_committed",
            one_and(&topics)
        ),
    });
    ends
}

/// A line where exactly-once ends.
struct End {
    /// The stage that begins behind the line; none for the edge of the topology.
    before: Option<String>,
    text: String,
}

/// "a", "a and b", "a, b and c".
fn one_and(list: &[String]) -> String {
    match list {
        [] => String::new(),
        [one] => one.clone(),
        [init @ .., last] => format!("{} and {last}", init.join(", ")),
    }
}
