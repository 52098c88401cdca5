//! The plan: stages, topics and the guarantee of each edge. `explain` prints it, a worker runs nothing else.

use std::sync::Arc;

use super::load::UNMATCHED;
use super::spec::{Format, Guarantee, NodeId, NodeKind, Once, Port, PostgresSink, Source, Topology};

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

/// What the name of a changelog ends with.
pub const CHANGELOG: &str = ".changelog";

/// What a stateful node keeps, by partition of the topic that feeds it, with the topic that it is restored from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedStore {
    pub node: NodeId,
    /// `<topology>.<node>`
    pub name: String,
    /// `<topology>.<node>.changelog`, with as many partitions as the source.
    pub changelog: String,
    /// The topic whose records reach the node.
    pub source: String,
    /// Other topics whose records look the state up: a partition of each belongs to one worker.
    pub readers: Vec<String>,
}

impl PlannedStore {
    /// The topics whose records need the state.
    pub fn topics(&self) -> impl Iterator<Item = &String> {
        [&self.source].into_iter().chain(&self.readers)
    }
}

/// An arrow of the topology with what it promises (protocol section 7).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The name of the stage that moves records along it.
    pub stage: String,
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
    /// What any node of the stage rejects.
    Rejects,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EdgeGuarantee {
    ExactlyOnce,
    EffectivelyOnce,
    AtLeastOnce,
    AtMostOnce,
}

impl EdgeGuarantee {
    /// As the file and the documentation write it.
    pub fn as_str(self) -> &'static str {
        match self {
            EdgeGuarantee::ExactlyOnce => "exactly-once",
            EdgeGuarantee::EffectivelyOnce => "effectively-once",
            EdgeGuarantee::AtLeastOnce => "at-least-once",
            EdgeGuarantee::AtMostOnce => "at-most-once",
        }
    }
}

impl Plan {
    /// Derives the plan of a checked topology.
    pub fn new(topology: Arc<Topology>) -> Plan {
        let mut stages: Vec<Stage> = kafka_stage(&topology).into_iter().collect();
        for (sink, node) in ids(&topology).filter(|(_, node)| matches!(node.kind, NodeKind::PostgresSink(_))) {
            let inputs = node.inputs.iter().map(|port| port.node).collect();
            let group = format!("{}.{}", topology.name, node.name);
            stages.push(Stage { name: node.name.clone(), group, kind: StageKind::Postgres { sink, inputs } });
        }
        let edges = stages.iter().flat_map(|stage| stage_edges(&topology, stage)).collect();
        Plan { topology, stages, edges }
    }

    /// The dead-letter topic of the topology.
    pub fn dead_letters(&self) -> String {
        self.topology.dead_letters()
    }

    /// The topic through which dead letters come back to the stage that rejected them.
    pub fn retry(&self, stage: &Stage) -> String {
        format!("{}.{}.retry", self.topology.name, stage.name)
    }

    /// The stage that a node works in.
    pub fn stage_of(&self, node: &str) -> Option<&Stage> {
        self.stages.iter().find(|stage| stage.nodes().iter().any(|id| self.topology.nodes[id.0].name == node))
    }

    /// The sink of a Postgres stage.
    pub fn postgres_sink(&self, stage: &Stage) -> Option<&PostgresSink> {
        let StageKind::Postgres { sink, .. } = &stage.kind else { return None };
        let NodeKind::PostgresSink(sink) = &self.topology.nodes[sink.0].kind else { return None };
        Some(sink)
    }

    /// Whether a stage keeps its positions itself, beside its rows: those in Kafka only follow.
    pub fn keeps_positions(&self, stage: &Stage) -> bool {
        self.postgres_sink(stage).is_some_and(PostgresSink::keeps_positions)
    }

    /// The topics that a stage reads, in the order of the file.
    pub fn reads(&self, stage: &Stage) -> Vec<String> {
        let nodes = match &stage.kind {
            StageKind::Kafka { sources, .. } => sources,
            StageKind::Postgres { inputs, .. } => inputs,
        };
        nodes.iter().flat_map(|id| self.topology.topics(*id)).collect()
    }

    /// The topics that a stage writes, its dead letters left out; each once.
    pub fn writes(&self, stage: &Stage) -> Vec<String> {
        let StageKind::Kafka { nodes, .. } = &stage.kind else { return Vec::new() };
        let mut topics: Vec<String> = Vec::new();
        for topic in nodes.iter().flat_map(|id| self.topology.topics(*id)) {
            if !topics.contains(&topic) {
                topics.push(topic);
            }
        }
        topics
    }

    /// The stores of a stage, in the order of its nodes.
    pub fn stores(&self, stage: &Stage) -> Vec<PlannedStore> {
        let StageKind::Kafka { nodes, .. } = &stage.kind else { return Vec::new() };
        let store = |id: &NodeId| {
            let name = format!("{}.{}", self.topology.name, self.topology.nodes[id.0].name);
            let changelog = self.topology.changelog(*id)?;
            let source = self.topology.fed_by(*id)?;
            let looks_up = nodes.iter().flat_map(|node| self.topology.nodes[node.0].looks_up());
            let by = looks_up.filter(|(table, _)| table == id).map(|(_, by)| by);
            let mut readers: Vec<String> = by.filter_map(|by| self.topology.fed_by(by)).collect();
            readers.sort();
            readers.dedup();
            readers.retain(|topic| *topic != source);
            Some(PlannedStore { node: *id, name, changelog, source, readers })
        };
        nodes.iter().filter_map(store).collect()
    }

    /// Topics that are read together, since their records meet by key: their partitions of one number are one task. What is
    /// looked up comes before what looks it up.
    pub fn co_partitioned(&self, stage: &Stage) -> Vec<Vec<String>> {
        let mut groups: Vec<Vec<String>> = Vec::new();
        for store in self.stores(stage).iter().filter(|store| !store.readers.is_empty()) {
            let (with, others) =
                groups.into_iter().partition(|group: &Vec<String>| store.topics().any(|t| group.contains(t)));
            groups = others;
            let mut topics: Vec<String> = Vec::new();
            let all = with.into_iter().flatten().chain(store.topics().cloned());
            all.for_each(|topic| {
                if !topics.contains(&topic) {
                    topics.push(topic)
                }
            });
            groups.push(topics);
        }
        let tables = self.stores(stage).into_iter().filter(|store| !store.readers.is_empty());
        let looked_up: Vec<String> = tables.map(|store| store.source).collect();
        groups.iter_mut().for_each(|group| group.sort_by_key(|topic| !looked_up.contains(topic)));
        groups
    }

    /// The topics through which a stage sends records to itself, in the order of its nodes.
    pub fn repartitions(&self, stage: &Stage) -> Vec<String> {
        let StageKind::Kafka { nodes, .. } = &stage.kind else { return Vec::new() };
        nodes.iter().filter_map(|id| self.topology.repartition(*id)).collect()
    }

    /// The format of each topic that a Postgres stage reads: a source's own; of what a Kafka sink writes JSON, unless
    /// it
    /// passes the values of text or byte sources on.
    pub fn formats(&self, stage: &Stage) -> Vec<(String, Format)> {
        let StageKind::Postgres { inputs, .. } = &stage.kind else { return Vec::new() };
        let formats = inputs.iter().flat_map(|id| {
            let format = self.topology.format_of(*id);
            self.topology.topics(*id).into_iter().map(move |topic| (topic, format))
        });
        formats.collect()
    }

    /// Whether a commit of this topology is a Kafka transaction.
    pub fn transactional(&self) -> bool {
        self.topology.guarantee == Guarantee::ExactlyOnce
    }
}

impl Stage {
    /// The nodes that work in it; a source that only Postgres stages read is in none.
    pub fn nodes(&self) -> Vec<NodeId> {
        match &self.kind {
            StageKind::Kafka { sources, nodes } => sources.iter().chain(nodes).copied().collect(),
            StageKind::Postgres { sink, .. } => vec![*sink],
        }
    }
}

impl Topology {
    /// The dead-letter topic: `<name>.dead-letters`.
    pub fn dead_letters(&self) -> String {
        format!("{}.dead-letters", self.name)
    }

    /// The sources that a node's records come from; one may come several times.
    pub fn sources_of(&self, id: NodeId) -> impl Iterator<Item = &Source> {
        let (mut waiting, mut sources) = (vec![id], Vec::new());
        while let Some(id) = waiting.pop() {
            let node = &self.nodes[id.0];
            if let NodeKind::Source(source) = &node.kind {
                sources.push(source);
            }
            waiting.extend(node.inputs.iter().map(|port| port.node));
        }
        sources.into_iter()
    }

    /// Whether what comes to a node tells of several records.
    pub fn is_folded(&self, id: NodeId) -> bool {
        let aggregate = |id: NodeId| matches!(self.nodes[id.0].kind, NodeKind::Aggregate(_));
        self.nodes[id.0].inputs.iter().any(|port| aggregate(port.node) || self.is_folded(port.node))
    }

    /// The topic in which a job remembers itself: `<name>.job`.
    pub fn job_topic(&self) -> String {
        format!("{}.job", self.name)
    }

    /// The topic through which a node sends records under another key to the stage itself.
    pub fn repartition(&self, id: NodeId) -> Option<String> {
        match &self.nodes[id.0].kind {
            NodeKind::Repartition(repartition) => Some(repartition.topic.clone()),
            _ => None,
        }
    }

    /// The topic whose records reach a node. A checked topology has one at a node with state.
    fn fed_by(&self, id: NodeId) -> Option<String> {
        match &self.nodes[id.0].kind {
            NodeKind::Source(source) => source.topics.first().cloned(),
            NodeKind::Repartitioned { topic, .. } => Some(topic.clone()),
            _ => self.nodes[id.0].streams().iter().find_map(|port| self.fed_by(port.node)),
        }
    }

    /// The topic from which the state of a node is restored, of one that has state.
    pub fn changelog(&self, id: NodeId) -> Option<String> {
        let node = &self.nodes[id.0];
        matches!(node.kind, NodeKind::Aggregate(_) | NodeKind::Table)
            .then(|| format!("{}.{}{CHANGELOG}", self.name, node.name))
    }

    /// The topics of a source, the topic of a Kafka sink, what a `Repartitioned` reads; else none.
    pub fn topics(&self, id: NodeId) -> Vec<String> {
        match &self.nodes[id.0].kind {
            NodeKind::Source(source) => source.topics.clone(),
            NodeKind::KafkaSink(sink) => vec![sink.topic.clone()],
            NodeKind::Repartitioned { topic, .. } => vec![topic.clone()],
            _ => Vec::new(),
        }
    }

    /// The format of the values that a node hands on. A program makes objects of them or leaves them; only where
    /// nothing but
    /// text or bytes can come out it is that.
    pub(super) fn format_of(&self, id: NodeId) -> Format {
        let node = &self.nodes[id.0];
        match &node.kind {
            NodeKind::Source(source) => source.format,
            NodeKind::Repartitioned { format, .. } => *format,
            NodeKind::Remap { .. } | NodeKind::FlatMap { .. } | NodeKind::Aggregate(_) | NodeKind::Join(_) => {
                Format::Json
            }
            _ => self.format_into(id),
        }
    }

    /// The format of the values that come to a node.
    pub(super) fn format_into(&self, id: NodeId) -> Format {
        let mut formats = self.nodes[id.0].streams().iter().map(|port| self.format_of(port.node));
        let first = formats.next().unwrap_or(Format::Json);
        if formats.all(|format| format == first) { first } else { Format::Json }
    }

    /// The name by which `inputs` call a port: `node`, or `route.output`.
    pub fn port_name(&self, port: Port) -> String {
        let node = &self.nodes[port.node.0];
        match &node.kind {
            NodeKind::Route { routes, .. } => {
                let output = routes.get(port.output).map_or(UNMATCHED, |route| route.name.as_str());
                format!("{}.{output}", node.name)
            }
            _ => node.name.clone(),
        }
    }
}

fn ids(topology: &Topology) -> impl Iterator<Item = (NodeId, &super::spec::Node)> {
    topology.nodes.iter().enumerate().map(|(i, node)| (NodeId(i), node))
}

/// The stage of transforms and Kafka sinks, if there are any, with the sources that they read.
fn kafka_stage(topology: &Topology) -> Option<Stage> {
    let reads = |kind: &NodeKind| matches!(kind, NodeKind::Source(_) | NodeKind::Repartitioned { .. });
    // What reads a topic of the stage's own waits for its writer: a drain goes through the repartitions in this order.
    let waits = |kind: &NodeKind| !matches!(kind, NodeKind::Source(_) | NodeKind::PostgresSink(_));
    let mut waiting: Vec<NodeId> = ids(topology).filter(|(_, node)| waits(&node.kind)).map(|(id, _)| id).collect();
    if waiting.is_empty() {
        return None;
    }
    let read = |id: NodeId| waiting.iter().any(|w| topology.nodes[w.0].inputs.iter().any(|port| port.node == id));
    let sources = ids(topology).filter(|(id, node)| reads(&node.kind) && read(*id)).map(|(id, _)| id).collect();
    // Again and again the first node of the file whose inputs are all placed; a checked topology has no circle.
    let mut nodes = Vec::new();
    let mut placed = vec![true; topology.nodes.len()];
    waiting.iter().for_each(|id| placed[id.0] = false);
    let ready = |id: &NodeId, placed: &[bool]| topology.nodes[id.0].inputs.iter().all(|port| placed[port.node.0]);
    while let Some(next) = waiting.iter().position(|id| ready(id, &placed)) {
        let id = waiting.remove(next);
        placed[id.0] = true;
        nodes.extend(Some(id).filter(|id| !reads(&topology.nodes[id.0].kind)));
    }
    let name = topology.name.clone();
    Some(Stage { group: name.clone(), name, kind: StageKind::Kafka { sources, nodes } })
}

fn stage_edges(topology: &Topology, stage: &Stage) -> Vec<Edge> {
    match &stage.kind {
        StageKind::Kafka { sources, nodes } => kafka_edges(topology, stage, sources, nodes),
        StageKind::Postgres { sink, inputs } => postgres_edges(topology, stage, *sink, inputs),
    }
}

fn kafka_edges(topology: &Topology, stage: &Stage, sources: &[NodeId], nodes: &[NodeId]) -> Vec<Edge> {
    let (guarantee, by) = kafka_promise(topology.guarantee);
    let edge = |from, to| Edge { stage: stage.name.clone(), from, to, guarantee, by: by.to_owned() };
    let mut edges = Vec::new();
    for id in sources {
        for topic in topology.topics(*id) {
            edges.push(edge(EdgeEnd::Topic(topic), EdgeEnd::Node(topology.nodes[id.0].name.clone())));
        }
    }
    for id in nodes {
        let node = &topology.nodes[id.0];
        for port in &node.inputs {
            edges.push(edge(EdgeEnd::Node(topology.port_name(*port)), EdgeEnd::Node(node.name.clone())));
        }
        for topic in topology.topics(*id).into_iter().chain(topology.repartition(*id)).chain(topology.changelog(*id)) {
            edges.push(edge(EdgeEnd::Node(node.name.clone()), EdgeEnd::Topic(topic)));
        }
    }
    edges.push(edge(EdgeEnd::Rejects, EdgeEnd::Topic(topology.dead_letters())));
    edges
}

fn kafka_promise(guarantee: Guarantee) -> (EdgeGuarantee, &'static str) {
    match guarantee {
        Guarantee::ExactlyOnce => (
            EdgeGuarantee::ExactlyOnce,
            "one Kafka transaction holds outputs, dead letters and positions; for readers with \
             isolation.level=read_committed",
        ),
        Guarantee::AtLeastOnce => (
            EdgeGuarantee::AtLeastOnce,
            "outputs are acknowledged before positions are committed; a crash between repeats them",
        ),
        Guarantee::AtMostOnce => (
            EdgeGuarantee::AtMostOnce,
            "positions are committed before outputs are produced; a crash between loses them",
        ),
    }
}

fn postgres_edges(topology: &Topology, stage: &Stage, sink: NodeId, inputs: &[NodeId]) -> Vec<Edge> {
    let node = &topology.nodes[sink.0];
    let NodeKind::PostgresSink(postgres) = &node.kind else { return Vec::new() };
    let edge =
        |from, to, guarantee, by: &str| Edge { stage: stage.name.clone(), from, to, guarantee, by: by.to_owned() };
    let (once, by) = match topology.guarantee {
        Guarantee::AtMostOnce => {
            (EdgeGuarantee::AtMostOnce, "positions are committed before rows are written; a crash between loses them")
        }
        Guarantee::ExactlyOnce | Guarantee::AtLeastOnce => postgres_promise(postgres),
    };
    let mut edges = Vec::new();
    for topic in inputs.iter().flat_map(|id| topology.topics(*id)) {
        edges.push(edge(EdgeEnd::Topic(topic), EdgeEnd::Node(node.name.clone()), once, by));
    }
    edges.push(edge(EdgeEnd::Node(node.name.clone()), EdgeEnd::Table(postgres.table.clone()), once, by));
    let (guarantee, by) = match topology.guarantee {
        _ if postgres.keeps_positions() => (
            EdgeGuarantee::AtLeastOnce,
            "dead letters lie in the database until they are relayed; a crash just then relays one again, with the same \
             event id",
        ),
        Guarantee::ExactlyOnce => (
            EdgeGuarantee::ExactlyOnce,
            "one Kafka transaction holds dead letters and positions; for readers with isolation.level=read_committed",
        ),
        other => kafka_promise(other),
    };
    edges.push(edge(EdgeEnd::Rejects, EdgeEnd::Topic(topology.dead_letters()), guarantee, by));
    edges
}

fn postgres_promise(sink: &PostgresSink) -> (EdgeGuarantee, &'static str) {
    match sink.once_by() {
        Some(Once::Version) => (
            EdgeGuarantee::EffectivelyOnce,
            "a batch that a crash delivers again meets the version guard; as long as the database keeps an \
             acknowledged COMMIT",
        ),
        Some(Once::Ledger) => (
            EdgeGuarantee::EffectivelyOnce,
            "an event that is delivered or sent again meets its id in the ledger, which is written with the rows; as \
             long as the database keeps an acknowledged COMMIT and the ledger the id",
        ),
        Some(Once::Progress) => (
            EdgeGuarantee::ExactlyOnce,
            "one database transaction holds rows, positions and dead letters; also after the database went back in \
             time",
        ),
        None => (
            EdgeGuarantee::AtLeastOnce,
            "rows are committed before their positions; a batch that a crash delivers again has its effect again",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::load;

    pub fn topology(text: &str) -> Arc<Topology> {
        let head = "name = \"t\"\n[kafka]\nbrokers = \"localhost:9092\"\n";
        let loaded = load(&format!("{head}{text}"), "t.toml", &|_| None);
        Arc::new(loaded.topology.unwrap_or_else(|| panic!("{:#?}", loaded.findings)))
    }

    const POSTGRES: &str =
        "type = \"postgres\"\nurl = \"postgres://localhost/x\"\ntable = \"s.t\"\nkey = [\"id\"]\nversion = \"v\"\n";

    #[test]
    fn nodes_come_in_topological_order_and_in_the_files_order_among_equals() {
        let plan = Plan::new(topology(
            "[sinks.out]\ntype = \"kafka\"\ninputs = [\"b\", \"r.x\"]\ntopic = \"out\"\n\
             [transforms.b]\ntype = \"filter\"\ninputs = [\"a\"]\ncondition = 'true'\n\
             [transforms.r]\ntype = \"route\"\ninputs = [\"in\"]\nroutes = [{ name = \"x\", condition = 'true' }]\n\
             [transforms.a]\ntype = \"filter\"\ninputs = [\"in\"]\ncondition = 'true'\n\
             [sources.in]\ntype = \"kafka\"\ntopics = [\"in\"]\n[sources.idle]\ntype = \"kafka\"\ntopics = \
              [\"idle\"]\n",
        ));
        let StageKind::Kafka { sources, nodes } = &plan.stages[0].kind else { panic!() };
        let names = |ids: &[NodeId]| ids.iter().map(|id| plan.topology.nodes[id.0].name.clone()).collect::<Vec<_>>();
        assert_eq!(names(nodes), ["r", "a", "b", "out"]);
        assert_eq!(names(sources), ["in"], "a source that nothing reads is not subscribed to");
        assert_eq!(plan.stages[0].group, "t");
        assert!(
            plan.edges.iter().any(|e| e.from == EdgeEnd::Node("r.x".into()) && e.to == EdgeEnd::Node("out".into()))
        );
    }

    #[test]
    fn what_reads_a_repartition_comes_behind_what_writes_it_wherever_the_file_has_them() {
        let aggregate = |name: &str, input: &str| {
            format!(
                "[transforms.{name}]\ntype = \"aggregate\"\ninputs = [\"{input}\"]\ngroup_by = '.x'\n\
                 fields.n = \"count\"\n"
            )
        };
        let plan = Plan::new(topology(&format!(
            "[sinks.out]\ntype = \"kafka\"\ninputs = [\"c\"]\ntopic = \"out\"\n{}{}{}\
             [sources.in]\ntype = \"kafka\"\ntopics = [\"in\"]\n",
            aggregate("c", "b"),
            aggregate("b", "a"),
            aggregate("a", "in"),
        )));
        let stage = &plan.stages[0];
        assert_eq!(plan.repartitions(stage), ["t.a.repartition", "t.b.repartition", "t.c.repartition"]);
        let StageKind::Kafka { nodes, .. } = &stage.kind else { panic!() };
        let names: Vec<_> = nodes.iter().map(|id| plan.topology.nodes[id.0].name.as_str()).collect();
        assert_eq!(names, ["a:repartition", "a", "b:repartition", "b", "c:repartition", "c", "out"]);
    }

    #[test]
    fn a_file_of_a_source_and_a_postgres_sink_has_no_kafka_stage() {
        let plan = Plan::new(topology(&format!(
            "[sources.in]\ntype = \"kafka\"\ntopics = [\"a\", \"b\"]\n[sinks.rows]\ninputs = [\"in\"]\n{POSTGRES}"
        )));
        let [stage] = &plan.stages[..] else { panic!("{:?}", plan.stages) };
        assert_eq!((stage.name.as_str(), stage.group.as_str()), ("rows", "t.rows"));
        assert_eq!(plan.reads(stage), ["a", "b"]);
        let shown: Vec<_> = plan.edges.iter().map(|e| (e.from.clone(), e.to.clone(), e.guarantee)).collect();
        let (topic, rows) = (|t: &str| EdgeEnd::Topic(t.into()), EdgeEnd::Node("rows".into()));
        assert_eq!(
            shown,
            [
                (topic("a"), rows.clone(), EdgeGuarantee::EffectivelyOnce),
                (topic("b"), rows.clone(), EdgeGuarantee::EffectivelyOnce),
                (rows, EdgeEnd::Table("s.t".into()), EdgeGuarantee::EffectivelyOnce),
                (EdgeEnd::Rejects, topic("t.dead-letters"), EdgeGuarantee::ExactlyOnce),
            ]
        );
    }

    #[test]
    fn an_edge_to_a_table_says_what_keeps_effects_from_doubling() {
        let guarantee = |settings: &str| {
            let plan = Plan::new(topology(&format!(
                "[sources.in]\ntype = \"kafka\"\ntopics = [\"a\"]\nevent_id = \".id\"\n[sinks.rows]\ntype = \"postgres\"\n\
                 inputs = [\"in\"]\nurl = \"postgres://localhost/x\"\ntable = \"t\"\n{settings}"
            )));
            let edge = plan.edges.iter().find(|edge| edge.to == EdgeEnd::Table("t".into())).unwrap();
            (edge.guarantee, edge.by.clone())
        };
        let dedupe = "dedupe = { table = \"seen\", retention = \"21d\" }\n";
        let (insert, by) = guarantee("mode = \"insert\"\n");
        assert_eq!(insert, EdgeGuarantee::AtLeastOnce);
        assert!(by.contains("has its effect again"), "{by}");
        assert_eq!(guarantee("mode = \"update\"\nkey = [\"id\"]\n").0, EdgeGuarantee::AtLeastOnce);
        let (insert, by) = guarantee(&format!("mode = \"insert\"\n{dedupe}"));
        assert_eq!(insert, EdgeGuarantee::EffectivelyOnce);
        assert!(by.contains("meets its id in the ledger"), "{by}");
        assert_eq!(guarantee(&format!("mode = \"add\"\nkey = [\"id\"]\n{dedupe}")).0, EdgeGuarantee::EffectivelyOnce);
        let beside = "mode = \"add\"\nkey = [\"id\"]\nprogress = \"postgres\"\n";
        assert_eq!(guarantee(beside).0, EdgeGuarantee::ExactlyOnce);
    }
}
