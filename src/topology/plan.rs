//! The plan: stages, topics and the guarantee of each edge. `explain` prints it, a worker runs nothing else.

use std::sync::Arc;

use super::spec::{NodeId, Topology};

/// What a topology becomes when it runs.
#[derive(Clone, Debug)]
pub struct Plan {
    pub topology: Arc<Topology>,
    /// The Kafka stage first (where the file has Kafka sinks or transforms), then one stage a Postgres sink.
    pub stages: Vec<Stage>,
    pub edges: Vec<Edge>,
}

/// What shares a consumer group.
#[derive(Clone, Debug)]
pub struct Stage {
    /// The topology's name, or the sink's.
    pub name: String,
    /// The consumer group: `<name>` or `<name>.<sink>`.
    pub group: String,
    pub kind: StageKind,
}

#[derive(Clone, Debug)]
pub enum StageKind {
    Kafka {
        sources: Vec<NodeId>,
        /// Transforms and Kafka sinks in topological order.
        nodes: Vec<NodeId>,
    },
    Postgres {
        sink: NodeId,
        /// The Kafka sinks and sources of this file whose topics it reads.
        inputs: Vec<NodeId>,
    },
}

/// An arrow of the topology with what it promises (protocol section 7).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    pub from: EdgeEnd,
    pub to: EdgeEnd,
    pub guarantee: EdgeGuarantee,
    /// By what it holds, in a sentence.
    pub by: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EdgeEnd {
    Topic(String),
    /// A node; for a route's output `name.route`.
    Node(String),
    Table(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EdgeGuarantee {
    ExactlyOnce,
    EffectivelyOnce,
    AtLeastOnce,
    AtMostOnce,
}

impl Plan {
    /// The dead-letter topic of the topology.
    pub fn dead_letters(&self) -> String {
        format!("{}.dead-letters", self.topology.name)
    }
}
