//! A plan as text, JSON, dot and mermaid.

use super::load::one_of;
use super::plan::{Edge, EdgeEnd, EdgeGuarantee, Plan, Stage, StageKind};
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
        NodeKind::Aggregate(_) => "aggregate",
        NodeKind::Table => "table",
        NodeKind::Join(_) => "join",
        NodeKind::Repartition(_) => "repartition",
        NodeKind::Repartitioned { .. } => "repartitioned",
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

/// From where to where a stage goes.
pub fn stage_words(stage: &Stage) -> &'static str {
    match stage.kind {
        StageKind::Kafka { .. } => "Kafka to Kafka",
        StageKind::Postgres { .. } => "Kafka to Postgres",
    }
}

/// A line where exactly-once ends.
struct End {
    /// The stage that begins behind the line; none for the edge of the topology.
    before: Option<String>,
    headline: String,
    text: String,
}

/// Where exactly-once ends, in the words that every format uses.
fn ends(plan: &Plan) -> Vec<End> {
    if !plan.transactional() {
        let guarantee = guarantee_word(plan.topology.guarantee);
        return vec![End {
            before: plan.stages.first().map(|stage| stage.name.clone()),
            headline: "nothing here is exactly-once".to_owned(),
            text: format!("the file asks for guarantee = \"{guarantee}\""),
        }];
    }
    let weakest = |stage: &&Stage| {
        let edges = plan.edges.iter().filter(|edge| edge.stage == stage.name && edge.from != EdgeEnd::Rejects);
        edges.map(|edge| edge.guarantee).max()
    };
    let weaker = plan.stages.iter().find(|stage| weakest(stage) > Some(EdgeGuarantee::ExactlyOnce));
    let stage = weaker.map(|stage| End {
        before: Some(stage.name.clone()),
        headline: "exactly-once ends here".to_owned(),
        text: match weakest(&stage) {
            Some(EdgeGuarantee::AtLeastOnce) => {
                "below, a batch may be delivered again after a crash, and has its effect again"
            }
            _ => "below, a batch may be delivered again after a crash; the table shows its effect once",
        }
        .to_owned(),
    });
    let mut topics: Vec<String> = plan.stages.iter().flat_map(|stage| plan.writes(stage)).collect();
    topics.push(plan.dead_letters());
    let topics = End {
        before: None,
        headline: "and at the topics, for readers of what is not committed".to_owned(),
        text: format!("who reads {} sets isolation.level=read_committed", one_of(&topics)),
    };
    let headline = "exactly-once ends at the topics, for readers of what is not committed".to_owned();
    match stage {
        Some(stage) => vec![stage, topics],
        None => vec![End { headline, ..topics }],
    }
}
