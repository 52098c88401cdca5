//! What the suites share: nodes and plans built by hand, a pipeline to drive, its outputs in words.

mod aggregates;
mod joins;
mod records;
mod rules;
mod windows;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::*;
use crate::chunk::{Chunk, Target, TargetId};
use crate::clock::Clock;
use crate::expr::{Role, compile};
use crate::ids::{EventId, Identity};
use crate::record::{Headers, Input, Offset};
use crate::reject::Reject;
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::*;

/// A topology in the making: nodes by name, in the order of the file.
pub(super) struct Build {
    pub(super) nodes: Vec<Node>,
    pub(super) targets: Vec<Target>,
}

pub(super) const NOW: i64 = 1_700_000_000_000;

pub(super) fn program(source: &str, role: Role) -> crate::expr::Program {
    compile(source, role).unwrap_or_else(|e| panic!("{source}: {e:?}")).0
}

pub(super) fn target(topic: &str) -> Target {
    Target {
        topic: topic.into(),
        partitions: 12,
        max_message_bytes: 1_048_588,
        compacted: false,
        timestamp_before_max_ms: i64::MAX,
        timestamp_after_max_ms: 3_600_000,
    }
}

impl Build {
    pub(super) fn new() -> Build {
        Build { nodes: Vec::new(), targets: vec![target("shop.dead-letters")] }
    }

    pub(super) fn node(mut self, name: &str, inputs: &[&str], kind: NodeKind) -> Build {
        let port = |input: &&str| {
            let (node, output) = input.split_once('.').map_or((*input, None), |(node, output)| (node, Some(output)));
            let at = self.nodes.iter().position(|n| n.name == node).expect("an earlier node");
            let output = match (&self.nodes[at].kind, output) {
                (NodeKind::Route { routes, .. }, Some(output)) => {
                    routes.iter().position(|r| r.name == output).unwrap_or(routes.len())
                }
                _ => 0,
            };
            Port { node: NodeId(at), output }
        };
        let inputs = inputs.iter().map(port).collect();
        self.nodes.push(Node { name: name.into(), inputs, on_error: OnError::Reject, kind });
        self
    }

    pub(super) fn source(self, name: &str, format: Format, event_id: Option<&str>, event_time: Option<&str>) -> Build {
        let value = |source: Option<&str>| source.map(|s| program(s, Role::Value));
        let (event_id, event_time) = (value(event_id), value(event_time));
        self.node(name, &[], NodeKind::Source(Source { event_id, event_time, ..Source::plain(name, format) }))
    }

    pub(super) fn json(self, name: &str) -> Build {
        self.source(name, Format::Json, None, None)
    }

    pub(super) fn filter(self, name: &str, input: &str, condition: &str) -> Build {
        let condition = program(condition, Role::Condition);
        self.node(name, &[input], NodeKind::Filter { condition, tombstones: Tombstones::Pass })
    }

    pub(super) fn remap(self, name: &str, input: &str, source: &str) -> Build {
        let source = program(source, Role::Remap);
        self.node(name, &[input], NodeKind::Remap { source, tombstones: Tombstones::Pass })
    }

    pub(super) fn flat_map(self, name: &str, input: &str, source: &str) -> Build {
        let source = program(source, Role::Expand);
        self.node(name, &[input], NodeKind::FlatMap { source, tombstones: Tombstones::Pass })
    }

    pub(super) fn rekey(self, name: &str, input: &str, key: &str) -> Build {
        let key = program(key, Role::Value);
        self.node(name, &[input], NodeKind::Rekey { key })
    }

    /// An aggregate with a changelog.
    pub(super) fn aggregate(mut self, name: &str, input: &str, fields: &[(&str, Function, Option<&str>)]) -> Build {
        self.targets.push(target(&format!("shop.{name}.changelog")));
        let field = |(name, function, of): &(&str, Function, Option<&str>)| Field {
            name: (*name).to_owned(),
            function: *function,
            of: of.map(|of| program(of, Role::Value)),
            merge: (*function == Function::Reduce).then(|| program(".acc + .other ?? null", Role::Value)),
            limit: 1000,
        };
        let fields = fields.iter().map(field).collect();
        let tombstones = AggregateTombstones::Drop;
        let key_field = "key".to_owned();
        self.node(
            name,
            &[input],
            NodeKind::Aggregate(Aggregate { group_by: None, key_field, fields, tombstones, window: None }),
        )
    }

    /// A table with a changelog.
    pub(super) fn table(mut self, name: &str, input: &str) -> Build {
        self.targets.push(target(&format!("shop.{name}.changelog")));
        self.node(name, &[input], NodeKind::Table)
    }

    pub(super) fn join(self, name: &str, input: &str, table: &str, kind: JoinKind, into: &str) -> Build {
        self.node(
            name,
            &[input, table],
            NodeKind::Join(Join { kind, key: None, into: into.to_owned(), of_tables: false }),
        )
    }

    pub(super) fn join_tables(self, name: &str, left: &str, right: &str, kind: JoinKind, into: &str) -> Build {
        let join = Join { kind, key: None, into: into.to_owned(), of_tables: true };
        self.node(name, &[left, right], NodeKind::Join(join))
    }

    /// Windows of the last aggregate.
    pub(super) fn window(mut self, window: Window) -> Build {
        match &mut self.nodes.last_mut().expect("a node").kind {
            NodeKind::Aggregate(aggregate) => aggregate.window = Some(window),
            _ => panic!("no aggregate"),
        }
        self
    }

    pub(super) fn route(self, name: &str, input: &str, routes: &[(&str, &str)]) -> Build {
        let route = |(name, condition): &(&str, &str)| Route {
            name: (*name).to_owned(),
            condition: program(condition, Role::Condition),
        };
        let routes = routes.iter().map(route).collect();
        self.node(name, &[input], NodeKind::Route { routes, tombstones: Tombstones::Pass })
    }

    pub(super) fn sink(mut self, name: &str, inputs: &[&str], key: Option<&str>) -> Build {
        self.targets.push(target(name));
        let key = key.map(|k| program(k, Role::Value));
        self.node(name, inputs, NodeKind::KafkaSink(KafkaSink { topic: name.into(), key, create: None }))
    }

    pub(super) fn tombstones(mut self, how: Tombstones) -> Build {
        match &mut self.nodes.last_mut().expect("a node").kind {
            NodeKind::Filter { tombstones, .. }
            | NodeKind::Remap { tombstones, .. }
            | NodeKind::Route { tombstones, .. }
            | NodeKind::FlatMap { tombstones, .. } => *tombstones = how,
            _ => panic!("no transform"),
        }
        self
    }

    pub(super) fn on_error(mut self, on_error: OnError) -> Build {
        self.nodes.last_mut().expect("a node").on_error = on_error;
        self
    }

    pub(super) fn target(mut self, change: impl FnOnce(&mut Target)) -> Build {
        change(self.targets.last_mut().expect("a target"));
        self
    }

    pub(super) fn run(self) -> Rig {
        let (sources, nodes): (Vec<_>, Vec<_>) =
            (0..self.nodes.len()).map(NodeId).partition(|id| matches!(self.nodes[id.0].kind, NodeKind::Source(_)));
        let topic_ids: HashMap<_, _> = self
            .nodes
            .iter()
            .filter_map(|node| match &node.kind {
                NodeKind::Source(source) => Some(source.topics.clone()),
                _ => None,
            })
            .flatten()
            .enumerate()
            .map(|(i, topic)| (topic, Uuid::from_u128(i as u128 + 1)))
            .collect();
        let plan = plan(self.nodes, sources, nodes);
        let environment = Environment {
            targets: self.targets.clone(),
            topic_ids,
            dead_letters: TargetId(0),
            clock: Clock::manual(NOW),
        };
        let mut pipeline = Pipeline::new(&plan, environment).expect("a pipeline");
        for store in 0..plan.stores(&plan.stages[0]).len() {
            pipeline.hold(StoreId(store), 14, Box::new(Memory::default()));
        }
        Rig { pipeline, plan, targets: self.targets, chunk: Chunk::default() }
    }
}

pub(super) fn plan(nodes: Vec<Node>, sources: Vec<NodeId>, order: Vec<NodeId>) -> Plan {
    let topology = Topology {
        file: "shop.toml".into(),
        name: "shop".into(),
        guarantee: Guarantee::ExactlyOnce,
        commit_interval: Duration::from_millis(100),
        batch_records: None,
        workers: 1,
        memory: 24 << 20,
        shutdown_timeout: Duration::from_secs(30),
        transaction_timeout: Duration::from_secs(10),
        session_timeout: Duration::from_secs(15),
        membership: Membership::Static,
        instance: None,
        state_dir: None,
        stores: Stores::Disk,
        max_task_idle: Duration::ZERO,
        on_error: OnError::Reject,
        audit: false,
        kafka: Kafka { brokers: "localhost:9092".into(), properties: BTreeMap::new() },
        nodes,
        tests: Vec::new(),
        drill: Vec::new(),
        unset: Vec::new(),
        fingerprint: String::new(),
    };
    let stage = Stage { name: "shop".into(), group: "shop".into(), kind: StageKind::Kafka { sources, nodes: order } };
    Plan { topology: Arc::new(topology), stages: vec![stage], edges: Vec::new() }
}

/// A pipeline and what it put out.
pub(super) struct Rig {
    pub(super) pipeline: Pipeline,
    pub(super) plan: Plan,
    pub(super) targets: Vec<Target>,
    pub(super) chunk: Chunk,
}

/// An output, readable: topic, key, value.
pub(super) type Out = (String, Option<String>, Option<String>);

pub(super) fn out(topic: &str, key: Option<&str>, value: Option<&str>) -> Out {
    (topic.to_owned(), key.map(str::to_owned), value.map(str::to_owned))
}

pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(super) fn input<'a>(topic: &'a str, key: Option<&'a str>, value: Option<&'a str>) -> Input<'a> {
    Input {
        topic,
        partition: 14,
        offset: Offset(42),
        timestamp: Some(NOW - 5),
        key: key.map(str::as_bytes),
        value: value.map(str::as_bytes),
        headers: Headers::default(),
    }
}

impl Rig {
    pub(super) fn id(&self, name: &str) -> NodeId {
        NodeId(self.plan.topology.nodes.iter().position(|n| n.name == name).expect("a node"))
    }

    pub(super) fn process(&mut self, input: &Input<'_>) -> Result<Outcome, Stop> {
        self.chunk.clear();
        let outcome = self.pipeline.process(self.id(input.topic), input, &mut self.chunk)?;
        while self.pipeline.close(&mut self.chunk)?.is_some() {}
        Ok(outcome)
    }

    /// Processes a record that must go through; its outputs in order.
    pub(super) fn outputs(&mut self, input: &Input<'_>) -> Vec<Out> {
        let outcome = self.process(input);
        let outs = self.outs();
        assert_eq!(outcome, Ok(Outcome::Processed { outputs: outs.len() as u32 }), "{outs:?}");
        outs
    }

    pub(super) fn outs(&self) -> Vec<Out> {
        let topic = |id: TargetId| self.targets[id.0 as usize].topic.to_string();
        self.chunk.iter().map(|o| (topic(o.target), o.key.map(text), o.value.map(text))).collect()
    }

    /// Processes a record that must be rejected: node, reason and message of its dead letter.
    pub(super) fn rejected(&mut self, input: &Input<'_>) -> (String, String, String) {
        let outcome = self.process(input);
        assert_eq!(self.chunk.len(), 1, "{:?}", self.outs());
        let letter = self.chunk.iter().next().expect("a dead letter");
        assert_eq!(letter.target, TargetId(0));
        assert_eq!((letter.key, letter.value), (input.key, input.value));
        let header = |name: &str| {
            let found = letter.headers().find(|(n, _)| *n == name.as_bytes());
            text(found.and_then(|(_, v)| v).unwrap_or_default())
        };
        let (node, reason) = (header("semel-error-node"), header("semel-error-reason"));
        match outcome {
            Ok(Outcome::Rejected { node: id, reason: slug }) => {
                assert_eq!((id, slug), (self.id(&node), reason.as_str()));
            }
            other => panic!("{other:?}"),
        }
        (node, reason, header("semel-error-message"))
    }

    pub(super) fn header(&self, output: usize, name: &str) -> Option<String> {
        let output = self.chunk.iter().nth(output).expect("an output");
        output.headers().find(|(n, _)| *n == name.as_bytes()).and_then(|(_, v)| v).map(text)
    }
}

pub(super) fn rejection(node: &str, reason: &str, message: &str) -> (String, String, String) {
    (node.to_owned(), reason.to_owned(), message.to_owned())
}

pub(super) fn orders() -> Build {
    Build::new()
        .source("orders", Format::Json, Some(".event_id"), Some(".created_at"))
        .filter("live", "orders", ".status != \"cancelled\"")
        .remap("priced", "live", ".total = to_float!(.qty) * to_float!(.price)\ndel(.note)")
        .sink("orders_priced", &["priced"], Some(".customer_id"))
}

pub(super) const ORDER: &str = r#"{"event_id":"e1","status":"new","customer_id":"c1","qty":2,"price":19.90,"note":"x","created_at":"2023-11-14T22:13:19Z"}"#;
