use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::*;
use crate::chunk::{Chunk, Target, TargetId};
use crate::clock::Clock;
use crate::expr::{Role, compile};
use crate::ids::EventId;
use crate::record::{Headers, Input, Offset};
use crate::reject::Reject;
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::*;

/// A topology in the making: nodes by name, in the order of the file.
struct Build {
    nodes: Vec<Node>,
    targets: Vec<Target>,
}

const NOW: i64 = 1_700_000_000_000;

fn program(source: &str, role: Role) -> crate::expr::Program {
    compile(source, role).unwrap_or_else(|e| panic!("{source}: {e:?}")).0
}

fn target(topic: &str) -> Target {
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
    fn new() -> Build {
        Build { nodes: Vec::new(), targets: vec![target("shop.dead-letters")] }
    }

    fn node(mut self, name: &str, inputs: &[&str], kind: NodeKind) -> Build {
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

    fn source(self, name: &str, format: Format, event_id: Option<&str>, event_time: Option<&str>) -> Build {
        let value = |source: Option<&str>| source.map(|s| program(s, Role::Value));
        let (event_id, event_time) = (value(event_id), value(event_time));
        let topics = vec![name.to_owned()];
        self.node(name, &[], NodeKind::Source(Source { topics, format, event_id, event_time, start: Start::Earliest }))
    }

    fn json(self, name: &str) -> Build {
        self.source(name, Format::Json, None, None)
    }

    fn filter(self, name: &str, input: &str, condition: &str) -> Build {
        let condition = program(condition, Role::Condition);
        self.node(name, &[input], NodeKind::Filter { condition, tombstones: Tombstones::Pass })
    }

    fn remap(self, name: &str, input: &str, source: &str) -> Build {
        let source = program(source, Role::Remap);
        self.node(name, &[input], NodeKind::Remap { source, tombstones: Tombstones::Pass })
    }

    fn flat_map(self, name: &str, input: &str, source: &str) -> Build {
        let source = program(source, Role::Expand);
        self.node(name, &[input], NodeKind::FlatMap { source, tombstones: Tombstones::Pass })
    }

    fn rekey(self, name: &str, input: &str, key: &str) -> Build {
        let key = program(key, Role::Value);
        self.node(name, &[input], NodeKind::Rekey { key })
    }

    fn route(self, name: &str, input: &str, routes: &[(&str, &str)]) -> Build {
        let route = |(name, condition): &(&str, &str)| Route {
            name: (*name).to_owned(),
            condition: program(condition, Role::Condition),
        };
        let routes = routes.iter().map(route).collect();
        self.node(name, &[input], NodeKind::Route { routes, tombstones: Tombstones::Pass })
    }

    fn sink(mut self, name: &str, inputs: &[&str], key: Option<&str>) -> Build {
        self.targets.push(target(name));
        let key = key.map(|k| program(k, Role::Value));
        self.node(name, inputs, NodeKind::KafkaSink(KafkaSink { topic: name.into(), key, create: None }))
    }

    fn tombstones(mut self, how: Tombstones) -> Build {
        match &mut self.nodes.last_mut().expect("a node").kind {
            NodeKind::Filter { tombstones, .. }
            | NodeKind::Remap { tombstones, .. }
            | NodeKind::Route { tombstones, .. }
            | NodeKind::FlatMap { tombstones, .. } => *tombstones = how,
            _ => panic!("no transform"),
        }
        self
    }

    fn on_error(mut self, on_error: OnError) -> Build {
        self.nodes.last_mut().expect("a node").on_error = on_error;
        self
    }

    fn target(mut self, change: impl FnOnce(&mut Target)) -> Build {
        change(self.targets.last_mut().expect("a target"));
        self
    }

    fn run(self) -> Rig {
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
        let pipeline = Pipeline::new(&plan, environment).expect("a pipeline");
        Rig { pipeline, plan, targets: self.targets, chunk: Chunk::default() }
    }
}

fn plan(nodes: Vec<Node>, sources: Vec<NodeId>, order: Vec<NodeId>) -> Plan {
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
        instance: None,
        state_dir: None,
        on_error: OnError::Reject,
        kafka: Kafka { brokers: "localhost:9092".into(), properties: BTreeMap::new() },
        nodes,
        tests: Vec::new(),
        unset: Vec::new(),
        fingerprint: String::new(),
    };
    let stage = Stage { name: "shop".into(), group: "shop".into(), kind: StageKind::Kafka { sources, nodes: order } };
    Plan { topology: Arc::new(topology), stages: vec![stage], edges: Vec::new() }
}

/// A pipeline and what it put out.
struct Rig {
    pipeline: Pipeline,
    plan: Plan,
    targets: Vec<Target>,
    chunk: Chunk,
}

/// An output, readable: topic, key, value.
type Out = (String, Option<String>, Option<String>);

fn out(topic: &str, key: Option<&str>, value: Option<&str>) -> Out {
    (topic.to_owned(), key.map(str::to_owned), value.map(str::to_owned))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn input<'a>(topic: &'a str, key: Option<&'a str>, value: Option<&'a str>) -> Input<'a> {
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
    fn id(&self, name: &str) -> NodeId {
        NodeId(self.plan.topology.nodes.iter().position(|n| n.name == name).expect("a node"))
    }

    fn process(&mut self, input: &Input<'_>) -> Result<Outcome, Stop> {
        self.chunk.clear();
        self.pipeline.process(self.id(input.topic), input, &mut self.chunk)
    }

    /// Processes a record that must go through; its outputs in order.
    fn outputs(&mut self, input: &Input<'_>) -> Vec<Out> {
        let outcome = self.process(input);
        let outs = self.outs();
        assert_eq!(outcome, Ok(Outcome::Processed { outputs: outs.len() as u32 }), "{outs:?}");
        outs
    }

    fn outs(&self) -> Vec<Out> {
        let topic = |id: TargetId| self.targets[id.0 as usize].topic.to_string();
        self.chunk.iter().map(|o| (topic(o.target), o.key.map(text), o.value.map(text))).collect()
    }

    /// Processes a record that must be rejected: node, reason and message of its dead letter.
    fn rejected(&mut self, input: &Input<'_>) -> (String, String, String) {
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

    fn header(&self, output: usize, name: &str) -> Option<String> {
        let output = self.chunk.iter().nth(output).expect("an output");
        output.headers().find(|(n, _)| *n == name.as_bytes()).and_then(|(_, v)| v).map(text)
    }
}

fn rejection(node: &str, reason: &str, message: &str) -> (String, String, String) {
    (node.to_owned(), reason.to_owned(), message.to_owned())
}

fn orders() -> Build {
    Build::new()
        .source("orders", Format::Json, Some(".event_id"), Some(".created_at"))
        .filter("live", "orders", ".status != \"cancelled\"")
        .remap("priced", "live", ".total = to_float!(.qty) * to_float!(.price)\ndel(.note)")
        .sink("orders_priced", &["priced"], Some(".customer_id"))
}

const ORDER: &str = r#"{"event_id":"e1","status":"new","customer_id":"c1","qty":2,"price":19.90,"note":"x","created_at":"2023-11-14T22:13:19Z"}"#;

#[test]
fn an_order_is_priced_and_a_cancelled_one_goes_nowhere() {
    let mut stage = orders().run();
    assert_eq!(
        stage.outputs(&input("orders", Some("k"), Some(ORDER))),
        [out(
            "orders_priced",
            Some("c1"),
            Some(
                r#"{"event_id":"e1","status":"new","customer_id":"c1","qty":2,"price":19.90,"created_at":"2023-11-14T22:13:19Z","total":39.8}"#
            )
        )]
    );
    let output = stage.chunk.iter().next().expect("an output");
    assert_eq!(output.partition, partition(Some(b"c1"), 14, 12));
    assert_eq!(output.timestamp, Some(1_699_999_999_000));
    let id = EventId::declared("orders", "e1", Some(1_699_999_999_000)).derived("shop", "orders_priced", 0);
    assert_eq!(stage.header(0, "semel-event-id"), Some(id.to_string()));

    assert_eq!(stage.outputs(&input("orders", Some("k"), Some(&ORDER.replace("new", "cancelled")))), []);
    let node = |name: &str| stage.pipeline.counts().node(stage.id(name));
    assert_eq!(node("orders"), NodeCounts { input: 2, output: 2, ..NodeCounts::default() });
    assert_eq!(node("live"), NodeCounts { input: 2, output: 1, dropped: 1, skipped: 0 });
    assert_eq!(node("orders_priced"), NodeCounts { input: 1, output: 1, ..NodeCounts::default() });
}

#[test]
fn numbers_pass_digit_for_digit() {
    let mut stage = Build::new().json("in").remap("r", "in", ".seen = true").sink("out", &["r"], Some(".id")).run();
    for number in [
        "9007199254740993",
        "228930314431312345",
        "-9223372036854775808",
        "18446744073709551615",
        "123456789012345678901234567890",
    ] {
        let record = format!("{{\"id\":{number},\"e\":1e3,\"d\":0.10}}");
        assert_eq!(
            stage.outputs(&input("in", None, Some(&record))),
            [out("out", Some(number), Some(&record.replace('}', ",\"seen\":true}")))]
        );
    }
}

#[test]
fn the_first_route_that_holds_takes_a_record() {
    let mut stage = Build::new()
        .json("in")
        .route("size", "in", &[("large", ".n > 100"), ("medium", ".n > 10")])
        .sink("rest", &["size._unmatched"], None)
        .sink("big", &["size.large"], None)
        .sink("mid", &["size.medium", "size.large"], None)
        .run();
    let topics = |stage: &mut Rig, n: i64| -> Vec<String> {
        stage.outputs(&input("in", None, Some(&format!("{{\"n\":{n}}}")))).into_iter().map(|o| o.0).collect()
    };
    assert_eq!(topics(&mut stage, 500), ["big", "mid"]);
    assert_eq!(topics(&mut stage, 50), ["mid"]);
    assert_eq!(topics(&mut stage, 5), ["rest"]);
    assert_eq!(
        stage.rejected(&input("in", None, Some(r#"{"n":"x"}"#))),
        rejection("size", "expression", "expected string, got integer")
    );
    // A delete goes everywhere, and to each taker once.
    let deletes = stage.outputs(&input("in", Some("k"), None));
    assert_eq!(deletes, ["rest", "big", "mid"].map(|topic| out(topic, Some("k"), None)));
}

#[test]
fn branches_do_not_see_each_others_changes() {
    let mut stage = Build::new()
        .json("in")
        .remap("a", "in", ".x = 1\ndel(.gone)")
        .remap("b", "in", ".y = 2\n.x = .x")
        .sink("plain", &["in"], None)
        .sink("both", &["a", "b"], None)
        .rekey("k", "a", ".x")
        .sink("keyed", &["k", "in"], None)
        .run();
    assert_eq!(
        stage.outputs(&input("in", Some("k"), Some(r#"{"gone":0}"#))),
        [
            out("plain", Some("k"), Some(r#"{"gone":0}"#)),
            out("both", Some("k"), Some(r#"{"x":1}"#)),
            out("both", Some("k"), Some(r#"{"gone":0,"y":2,"x":null}"#)),
            out("keyed", Some("k"), Some(r#"{"gone":0}"#)),
            out("keyed", Some("1"), Some(r#"{"x":1}"#)),
        ]
    );
}

#[test]
fn flat_map_makes_a_record_of_every_element() {
    let mut stage =
        Build::new().json("in").flat_map("lines", "in", ".items").sink("out", &["lines"], Some("%key")).run();
    let outputs =
        |stage: &mut Rig, items: &str| stage.outputs(&input("in", Some("k"), Some(&format!("{{\"items\":{items}}}"))));
    assert_eq!(
        outputs(&mut stage, r#"[{"b":1.0,"a":2},{},{"c":[1]}]"#),
        [r#"{"a":2,"b":1.0}"#, "{}", r#"{"c":[1]}"#].map(|value| out("out", Some("k"), Some(value)))
    );
    let ids: Vec<_> = (0..3).map(|i| stage.header(i, "semel-event-id")).collect();
    assert_eq!(ids, [None, None, None], "nobody declared an id");
    assert_eq!(outputs(&mut stage, "[]"), []);
    let mut rejected = |items: &str| stage.rejected(&input("in", Some("k"), Some(&format!("{{\"items\":{items}}}"))));
    assert_eq!(rejected("5"), rejection("lines", "expression", "the expression gave an integer, not an array"));
    assert_eq!(
        rejected(r#"[{"a":1},"x"]"#),
        rejection("lines", "expression", "element 1: the value must be an object, it is a string")
    );
    assert_eq!(rejected("[{\"n\":18446744073709551615}]").1, "inexact-number");
}

#[test]
fn derived_ids_count_the_outputs_of_one_input() {
    let mut stage = Build::new()
        .source("in", Format::Json, Some(".id"), None)
        .flat_map("lines", "in", ".items")
        .sink("out", &["lines", "in"], None)
        .run();
    stage.outputs(&input("in", None, Some(r#"{"id":7,"items":[{},{}]}"#)));
    let id = EventId::declared("in", "7", None);
    let ids: Vec<_> = (0..3).map(|i| stage.header(i, "semel-event-id").expect("an id")).collect();
    assert_eq!(ids, [0, 1, 2].map(|i| id.derived("shop", "out", i).to_string()));
    // The same on another attempt.
    stage.outputs(&input("in", None, Some(r#"{"id":7,"items":[{},{}]}"#)));
    assert_eq!(stage.header(2, "semel-event-id"), Some(ids[2].clone()));
}

#[test]
fn an_event_id_comes_from_where_it_is_known_best() {
    let header = EventId::declared("elsewhere", "h", None).to_string();
    let carried = [(&b"semel-event-id"[..], Some(header.as_bytes()))];
    let id = |stage: &mut Rig, input: &Input<'_>| {
        stage.outputs(input);
        stage.header(0, "semel-event-id")
    };
    let derived = |id: EventId| Some(id.derived("shop", "out", 0).to_string());
    let header = EventId::carried("", header.as_bytes(), None).expect("an id");

    // Declared beats a foreign header; without a value there is only the header, or the place in the log.
    let mut declared = Build::new().source("in", Format::Json, Some(".id"), None).sink("out", &["in"], None).run();
    let mut record = input("in", Some("k"), Some(r#"{"id":"e1"}"#));
    assert_eq!(id(&mut declared, &record), derived(EventId::declared("in", "e1", None)));
    record.headers = Headers(carried.to_vec());
    assert_eq!(id(&mut declared, &record), derived(EventId::declared("in", "e1", None)));
    record.value = None;
    assert_eq!(id(&mut declared, &record), derived(header));
    record.headers = Headers::default();
    assert_eq!(id(&mut declared, &record), derived(EventId::at(Uuid::from_u128(1), 14, Offset(42))));

    // Nothing declared: the header is passed on, and none is made up.
    let mut silent = Build::new().json("in").sink("out", &["in"], None).run();
    let mut record = input("in", Some("k"), Some("{}"));
    assert_eq!(id(&mut silent, &record), None);
    record.headers = Headers(carried.to_vec());
    assert_eq!(id(&mut silent, &record), derived(header));

    // A topic that this job writes: its header is our own word.
    let mut own = Build::new()
        .json("in")
        .sink("out", &["in"], None)
        .source("again", Format::Json, Some(".id"), None)
        .sink("last", &["again"], None);
    if let NodeKind::Source(source) = &mut own.nodes[2].kind {
        source.topics = vec!["out".into()];
    }
    let mut own = own.run();
    let mut record = input("out", Some("k"), Some(r#"{"id":"e1"}"#));
    record.headers = Headers(carried.to_vec());
    own.chunk.clear();
    own.pipeline.process(NodeId(2), &record, &mut own.chunk).expect("processed");
    assert_eq!(own.header(0, "semel-event-id"), Some(header.derived("shop", "last", 0).to_string()));
}

#[test]
fn a_declared_id_must_be_one() {
    let mut stage = Build::new().source("in", Format::Json, Some(".id"), None).sink("out", &["in"], None).run();
    let mut rejected = |value: &str| stage.rejected(&input("in", None, Some(value)));
    for (value, found) in [
        ("{}", "null"),
        (r#"{"id":null}"#, "null"),
        (r#"{"id":""}"#, "empty or not UTF-8"),
        (r#"{"id":1.5}"#, "a float"),
        (r#"{"id":{}}"#, "an object"),
    ] {
        let message = format!("the event id must be a string or an integer, it is {found}");
        assert_eq!(rejected(value), rejection("in", "event-id", &message));
    }
    // 64 unsigned bits are no problem: the digits are the id.
    let mut stage = Build::new().source("in", Format::Json, Some(".id"), None).sink("out", &["in"], None).run();
    stage.outputs(&input("in", None, Some(r#"{"id":18446744073709551615}"#)));
    let id = EventId::declared("in", "18446744073709551615", None).derived("shop", "out", 0);
    assert_eq!(stage.header(0, "semel-event-id"), Some(id.to_string()));
}

#[test]
fn headers_go_on_in_order_with_repeats_and_nulls_and_one_id() {
    let mut stage = orders().run();
    let mut record = input("orders", Some("k"), Some(ORDER));
    let headers: Vec<(&[u8], Option<&[u8]>)> = vec![
        (b"a", Some(b"1")),
        (b"semel-event-id", Some(b"old")),
        (b"a", Some(b"2")),
        (b"semel-event-id", Some(b"older")),
        (b"b", None),
        (b"c", Some(b"")),
        (b"\xff\xfe", Some(b"\xff")),
        (b"semel-error-attempt", Some(b"3")),
    ];
    record.headers = Headers(headers.clone());
    stage.outputs(&record);
    let id = stage.header(0, "semel-event-id").expect("an id");
    let mut expected = headers;
    expected.remove(3);
    expected[1].1 = Some(id.as_bytes());
    let output = stage.chunk.iter().next().expect("an output");
    assert_eq!(output.headers().collect::<Vec<_>>(), expected);

    // A dead letter keeps them too.
    record.value = Some(b"{}");
    stage.rejected(&record);
    let letter = stage.chunk.iter().next().expect("a letter");
    assert_eq!(letter.headers().next(), Some((&b"a"[..], Some(&b"1"[..]))));
    assert!(letter.headers().any(|header| header == (b"\xff\xfe", Some(b"\xff"))));
    assert_eq!(stage.header(0, "semel-error-attempt"), Some("4".into()));
}

#[test]
fn keys_are_made_of_scalars() {
    let mut stage = Build::new().json("in").sink("out", &["in"], Some(".k")).run();
    let mut key = |k: &str| {
        let record = format!("{{\"k\":{k}}}");
        stage.outputs(&input("in", Some("input"), Some(&record)))[0].1.clone()
    };
    assert_eq!(key(r#""c1""#).as_deref(), Some("c1"));
    assert_eq!(key(r#""\u0063\n""#).as_deref(), Some("c\n"));
    assert_eq!(key(r#""""#).as_deref(), Some(""));
    assert_eq!(key("-5").as_deref(), Some("-5"));
    assert_eq!(key("-0").as_deref(), Some("0"));
    assert_eq!(key("1.50").as_deref(), Some("1.5"));
    assert_eq!(key("true").as_deref(), Some("true"));
    assert_eq!(key("null"), None);
    assert_eq!(stage.chunk.iter().next().map(|o| o.partition), Some(14 % 12));
    assert_eq!(stage.outputs(&input("in", Some("input"), Some("{}")))[0].1, None);
    let mut rejected = |k: &str| stage.rejected(&input("in", None, Some(&format!("{{\"k\":{k}}}"))));
    assert_eq!(
        rejected("{}"),
        rejection("out", "key", "the key must be a string, a number or a boolean, it is an object")
    );
    assert_eq!(rejected("[1]").1, "key");
    assert_eq!(rejected("0.1000000000000000055").1, "inexact-number");
}

#[test]
fn a_rekey_holds_for_everything_behind_it() {
    let mut stage = Build::new()
        .json("in")
        .rekey("by_customer", "in", ".c")
        .remap("r", "by_customer", ".key = %key")
        .sink("out", &["r"], None)
        .sink("other", &["by_customer"], Some("join!([%key, \"x\"], \"-\")"))
        .run();
    assert_eq!(
        stage.outputs(&input("in", Some("k"), Some(r#"{"c":"c1"}"#))),
        [out("out", Some("c1"), Some(r#"{"c":"c1","key":"c1"}"#)), out("other", Some("c1-x"), Some(r#"{"c":"c1"}"#))]
    );
    assert_eq!(
        stage.rejected(&input("in", Some("k"), Some(r#"{}"#))),
        rejection("other", "expression", "join: all array items must be strings")
    );
}

#[test]
fn tombstones_pass_unless_told_otherwise() {
    let chain = |how: Tombstones| {
        Build::new()
            .json("in")
            .filter("f", "in", ".a == 1")
            .tombstones(how)
            .remap("r", "f", ".n = to_float!(.n)")
            .flat_map("m", "r", "[.]")
            .sink("out", &["m"], None)
            .run()
    };
    assert_eq!(chain(Tombstones::Pass).outputs(&input("in", Some("k"), None)), [out("out", Some("k"), None)]);
    assert_eq!(chain(Tombstones::Drop).outputs(&input("in", Some("k"), None)), []);
    assert_eq!(chain(Tombstones::Process).outputs(&input("in", Some("k"), None)), [], "null is not 1");

    let processed = |source: &str| {
        let build = Build::new().json("in").remap("r", "in", source).tombstones(Tombstones::Process);
        build.sink("out", &["r"], None).run().outputs(&input("in", Some("k"), None))
    };
    assert_eq!(
        processed(". = {\"id\": %key, \"gone\": true}"),
        [out("out", Some("k"), Some(r#"{"gone":true,"id":"k"}"#))]
    );
    assert_eq!(processed("if . != null { .x = 1 }"), [out("out", Some("k"), None)]);

    let mut routed = Build::new()
        .json("in")
        .route("r", "in", &[("gone", ". == null")])
        .tombstones(Tombstones::Process)
        .sink("gone", &["r.gone"], None)
        .sink("rest", &["r._unmatched"], None)
        .run();
    assert_eq!(routed.outputs(&input("in", Some("k"), None)), [out("gone", Some("k"), None)]);
}

#[test]
fn a_key_made_from_the_value_cannot_be_made_of_a_tombstone() {
    let mut stage = Build::new().json("in").sink("out", &["in"], Some(".id")).run();
    assert_eq!(
        stage.rejected(&input("in", Some("k"), None)),
        rejection("out", "tombstone-key", "the value is null, but the key `.id` is made from it")
    );
    let mut stage = Build::new().json("in").rekey("r", "in", "string!(.id)").sink("out", &["r"], None).run();
    assert_eq!(stage.rejected(&input("in", Some("k"), None)).1, "tombstone-key");
    let mut stage = Build::new().json("in").rekey("r", "in", "upcase(string!(%key))").sink("out", &["r"], None).run();
    assert_eq!(stage.outputs(&input("in", Some("k"), None)), [out("out", Some("K"), None)]);
}

#[test]
fn empty_is_not_null() {
    let mut stage = Build::new().json("in").sink("out", &["in"], None).run();
    assert_eq!(
        stage.rejected(&input("in", Some("k"), Some(""))),
        rejection("in", "undecodable", "the value is empty, a JSON object was expected (byte 0)")
    );
    assert_eq!(stage.rejected(&input("in", Some("k"), Some("null"))).1, "undecodable");
    assert_eq!(stage.outputs(&input("in", Some(""), Some("{}"))), [out("out", Some(""), Some("{}"))]);
    assert_eq!(stage.chunk.iter().next().map(|o| o.partition), Some(partition(Some(b""), 0, 12)));
    assert_eq!(stage.outputs(&input("in", None, Some("{}"))), [out("out", None, Some("{}"))]);
    for format in [Format::String, Format::Bytes] {
        let mut stage = Build::new().source("in", format, None, None).sink("out", &["in"], None).run();
        assert_eq!(stage.outputs(&input("in", None, Some(""))), [out("out", None, Some(""))]);
        assert_eq!(stage.outputs(&input("in", None, None)), [out("out", None, None)]);
    }
}

#[test]
fn a_string_source_wants_utf_8_and_a_bytes_source_takes_all() {
    let mut record = input("in", None, None);
    record.value = Some(b"ab\xff");
    let mut stage = Build::new().source("in", Format::String, None, None).sink("out", &["in"], None).run();
    assert_eq!(stage.rejected(&record), rejection("in", "undecodable", "the value is not UTF-8 (byte 2)"));
    let mut stage = Build::new().source("in", Format::Bytes, None, None).sink("out", &["in"], None).run();
    stage.process(&record).expect("processed");
    assert_eq!(stage.chunk.iter().next().and_then(|o| o.value), Some(&b"ab\xff"[..]));
}

#[test]
fn poison_is_rejected_and_its_neighbours_are_right() {
    let mut stage = orders().run();
    let good = stage.outputs(&input("orders", Some("k"), Some(ORDER)));
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
    let open = "[".repeat(5 << 20);
    for poison in ["{", "hello", "[]", "\"x\"", r#"{"a":1,"a":2}"#, r#"{"a":"\ud800"}"#, &deep, &open] {
        stage.chunk.clear();
        stage.pipeline.process(NodeId(0), &input("orders", None, Some(poison)), &mut stage.chunk).expect("a reject");
        assert_eq!(stage.chunk.len(), 1);
        assert_eq!(stage.header(0, "semel-error-reason"), Some("undecodable".into()));
        assert_eq!(stage.header(0, "semel-event-id"), None, "its declared id could not be read");
        assert_eq!(stage.outputs(&input("orders", Some("k"), Some(ORDER))), good);
    }
    let rejects: Vec<_> = stage.pipeline.counts().rejects().collect();
    assert_eq!(rejects, [(NodeId(0), "undecodable", 8)]);
}

#[test]
fn a_reject_withdraws_what_the_record_put_out() {
    let mut stage = Build::new()
        .json("in")
        .sink("early", &["in"], None)
        .remap("r", "in", ".n = to_int!(.n)")
        .sink("late", &["r"], None)
        .run();
    stage.chunk.clear();
    let good = input("in", Some("a"), Some(r#"{"n":"1"}"#));
    let bad = input("in", Some("b"), Some(r#"{"n":"x"}"#));
    for record in [&good, &bad, &good] {
        stage.pipeline.process(NodeId(0), record, &mut stage.chunk).expect("no stop");
    }
    let topics: Vec<String> = stage.outs().into_iter().map(|o| o.0).collect();
    assert_eq!(topics, ["early", "late", "shop.dead-letters", "early", "late"]);
    assert_eq!(stage.pipeline.counts().node(NodeId(1)).output, 2);
    // It carries the id that its outputs would have had theirs from.
    assert_eq!(stage.header(2, "semel-event-id"), Some(EventId::at(Uuid::from_u128(1), 14, Offset(42)).to_string()));
}

#[test]
fn on_error_is_the_nodes_own() {
    let build = |how: OnError| {
        Build::new().json("in").sink("early", &["in"], None).remap("r", "in", ".n = to_int!(.n)").on_error(how).sink(
            "out",
            &["r"],
            None,
        )
    };
    let bad = input("in", Some("b"), Some(r#"{"n":"x"}"#));
    let mut skip = build(OnError::Skip).run();
    assert_eq!(skip.process(&bad), Ok(Outcome::Skipped { node: NodeId(2), reason: "expression" }));
    assert!(skip.chunk.is_empty());
    assert_eq!(skip.pipeline.counts().node(NodeId(2)).skipped, 1);
    let mut stop = build(OnError::Stop).run();
    let error = stop.process(&bad).expect_err("a stop");
    assert!(stop.chunk.is_empty());
    assert_eq!(
        error.to_string(),
        "in-14 at offset 42: r: to_int: Invalid integer \"x\": invalid digit found in string (expression); on_error is \"stop\""
    );
    assert_eq!(stop.outputs(&input("in", None, Some(r#"{"n":1}"#))).len(), 2);
}

#[test]
fn what_the_broker_would_refuse_is_refused_before() {
    let mut compacted = Build::new().json("in").sink("out", &["in"], Some(".k")).target(|t| t.compacted = true).run();
    assert_eq!(
        compacted.rejected(&input("in", None, Some("{}"))),
        rejection("out", "null-key", "the key is null, and the topic `out` is compacted")
    );
    assert_eq!(compacted.outputs(&input("in", None, Some(r#"{"k":""}"#))), [out("out", Some(""), Some(r#"{"k":""}"#))]);

    // 61 bytes of batch, 2 of length, 3 of attributes and deltas, 1 of a null key, 2 of length and 98 of value, 1 of headers.
    let value = format!("{{\"a\":\"{}\"}}", "x".repeat(90));
    let fits = Build::new().json("in").sink("out", &["in"], None).target(|t| t.max_message_bytes = 168);
    assert_eq!(fits.run().outputs(&input("in", None, Some(&value))).len(), 1);
    let mut small = Build::new().json("in").sink("out", &["in"], None).target(|t| t.max_message_bytes = 167).run();
    assert_eq!(
        small.rejected(&input("in", None, Some(&value))),
        rejection("out", "too-large", "the output takes 168 bytes, the topic `out` takes 167 (max.message.bytes)")
    );

    let mut late =
        Build::new().json("in").sink("out", &["in"], None).target(|t| t.timestamp_before_max_ms = 1000).run();
    let mut record = input("in", None, Some("{}"));
    assert_eq!(late.outputs(&record).len(), 1);
    record.timestamp = Some(NOW - 1001);
    assert_eq!(
        late.rejected(&record),
        rejection(
            "out",
            "timestamp",
            "the time 1699999998999 lies more than 1000 ms before now, the topic `out` does not take it \
             (message.timestamp.before.max.ms)"
        )
    );
    record.timestamp = Some(NOW + 3_600_000);
    assert_eq!(late.outputs(&record).len(), 1);
    record.timestamp = Some(NOW + 3_600_001);
    assert_eq!(late.rejected(&record).1, "timestamp");
}

#[test]
fn times_are_checked_where_they_come_in() {
    let mut stage = Build::new().source("in", Format::Json, None, Some(".t")).sink("out", &["in"], None).run();
    let time = |stage: &mut Rig, t: &str| {
        stage.outputs(&input("in", None, Some(&format!("{{\"t\":{t}}}"))));
        stage.chunk.iter().next().expect("an output").timestamp
    };
    assert_eq!(time(&mut stage, "1699999999000"), Some(1_699_999_999_000));
    assert_eq!(time(&mut stage, "\"2023-11-14T22:13:19.5+00:00\""), Some(1_699_999_999_500));
    assert_eq!(time(&mut stage, "\"2023-11-14T23:13:19+01:00\""), Some(1_699_999_999_000));
    assert_eq!(
        time(&mut stage, "1699999999"),
        Some(1_699_999_999),
        "milliseconds are meant, also where they look like seconds"
    );
    assert_eq!(time(&mut stage, "0"), None, "the client takes a zero for now");
    for bad in ["-1", "-60000", "null", "1.5", "\"yesterday\"", "\"1969-12-31T23:59:59Z\"", "253402300800000", "true"] {
        let (node, reason, _) = stage.rejected(&input("in", None, Some(&format!("{{\"t\":{bad}}}"))));
        assert_eq!((node.as_str(), reason.as_str()), ("in", "event-time"), "{bad}");
    }
    assert_eq!(
        stage.rejected(&input("in", None, Some("{}"))).2,
        "the event time must be an RFC 3339 string or milliseconds, between 1970 and 9999, it is null"
    );
    // A delete has no time of its own.
    stage.outputs(&input("in", None, None));
    assert_eq!(stage.chunk.iter().next().expect("an output").timestamp, Some(NOW - 5));

    let mut plain = Build::new().json("in").sink("out", &["in"], None).run();
    for (timestamp, expected) in [(None, None), (Some(0), None), (Some(-1), None), (Some(7), Some(7))] {
        let mut record = input("in", None, Some("{}"));
        record.timestamp = timestamp;
        plain.outputs(&record);
        assert_eq!(plain.chunk.iter().next().expect("an output").timestamp, expected);
    }
}

#[test]
fn a_record_that_the_broker_refused_is_rejected_with_its_id() {
    let mut stage = orders().run();
    let reject = Reject { node: "orders_priced".into(), reason: "broker", message: "MSG_SIZE_TOO_LARGE".into() };
    let record = input("orders", Some("k"), Some(ORDER));
    let outcome = stage.pipeline.reject(NodeId(0), &record, reject, &mut stage.chunk);
    assert_eq!(outcome, Ok(Outcome::Rejected { node: NodeId(3), reason: "broker" }));
    let id = EventId::declared("orders", "e1", Some(1_699_999_999_000));
    assert_eq!(stage.header(0, "semel-event-id"), Some(id.to_string()));
    assert_eq!(stage.header(0, "semel-error-message"), Some("MSG_SIZE_TOO_LARGE".into()));
    assert_eq!(stage.outputs(&record).len(), 1);
}

#[test]
fn what_the_stage_needs_and_does_not_get_is_named() {
    let nodes = orders().nodes;
    let (sources, order) = (vec![NodeId(0)], vec![NodeId(1), NodeId(2), NodeId(3)]);
    let plan = plan(nodes, sources, order);
    let environment = |targets: &[&str], topics: &[&str]| Environment {
        targets: targets.iter().map(|t| target(t)).collect(),
        topic_ids: topics.iter().map(|t| ((*t).to_owned(), Uuid::from_u128(1))).collect(),
        dead_letters: TargetId(0),
        clock: Clock::manual(NOW),
    };
    let refused = |targets: &[&str], topics: &[&str]| {
        Pipeline::new(&plan, environment(targets, topics)).expect_err("refused").message
    };
    assert_eq!(refused(&["dl"], &["orders"]), "sink `orders_priced`: the topic `orders_priced` is unknown");
    assert_eq!(refused(&["dl", "orders_priced"], &[]), "source `orders`: the id of the topic `orders` is unknown");
    assert_eq!(refused(&[], &[]), "the topic of the dead letters is unknown");
}
