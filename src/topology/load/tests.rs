use std::time::Duration;

use super::*;
use crate::topology::spec::*;

/// Every setting with another value than its default, numbers and booleans as strings too.
const FULL: &str = r#"
name = "shop"
guarantee = "at-least-once"
commit_interval = "250ms"
batch_records = "${BATCH}"
workers = "${WORKERS:-3}"
memory = "64MiB"
shutdown_timeout = "1m"
transaction_timeout = "20s"
session_timeout = "30s"
instance = "${INSTANCE}"
state_dir = "state"
on_error = "skip"

[kafka]
brokers = "${HOST}:9092"
[kafka.properties]
client.rack = "$${eu}"
fetch.min.bytes = 1
socket.keepalive.enable = true

[sources.orders]
type = "kafka"
topics = ["orders", "orders.old"]
format = { type = "string" }
event_time = "."
start = 2026-01-31T00:00:00Z
on_error = "stop"

[transforms.routed]
type = "route"
inputs = ["orders"]
tombstones = "drop"
routes = [{ name = "a", condition = 'contains(string!(.), "a")' }, { name = "b", condition = "true" }]

[sinks.out]
type = "kafka"
inputs = ["routed.b", "routed._unmatched"]
topic = "out"
key = "%topic"
create = { partitions = "4", replication = 3, config = { "cleanup.policy" = "compact", "retention.ms" = 5 } }

[sinks.a]
type = "kafka"
inputs = ["routed.a"]
topic = "a"

[sinks.table]
type = "postgres"
inputs = ["orders", "out"]
url = "${DATABASE_URL}"
table = "s.t"
key = ["id", "line"]
version = "version"
deleted = "gone"
delete_when = "false"
columns = { version = "1", id = "%key", line = "2" }
unknown_fields = "reject"
tombstones = "ignore"
batch_rows = 10
batch_bytes = "1MiB"
prepared = "${PREPARED}"
max_rejects_per_minute = 0
mode = "upsert"
progress = "kafka"
"#;

fn env(name: &str) -> Option<String> {
    let value = match name {
        "BATCH" => "1",
        "INSTANCE" => "blue",
        "HOST" => "kafka",
        "PREPARED" => "false",
        _ => return None,
    };
    Some(value.to_owned())
}

fn topology(text: &str) -> Topology {
    let loaded = load(text, "t.toml", &env);
    loaded.topology.unwrap_or_else(|| panic!("{:#?}", loaded.findings))
}

#[test]
fn every_setting_is_read() {
    let t = topology(FULL);
    assert_eq!((t.file.as_str(), t.name.as_str()), ("t.toml", "shop"));
    assert_eq!((t.guarantee, t.on_error), (Guarantee::AtLeastOnce, OnError::Skip));
    assert_eq!(t.commit_interval, Duration::from_millis(250));
    assert_eq!((t.batch_records.unwrap().get(), t.workers, t.memory), (1, 3, 64 << 20));
    assert_eq!(t.shutdown_timeout, Duration::from_secs(60));
    assert_eq!((t.transaction_timeout, t.session_timeout), (Duration::from_secs(20), Duration::from_secs(30)));
    assert_eq!(t.instance.as_deref(), Some("blue"));
    assert_eq!(t.state_dir.as_deref(), Some(std::path::Path::new("state")));
    assert_eq!(t.kafka.brokers, "kafka:9092");
    let properties: Vec<_> = t.kafka.properties.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(properties, [("client.rack", "${eu}"), ("fetch.min.bytes", "1"), ("socket.keepalive.enable", "true")]);
    let unset: Vec<_> = t.unset.iter().map(|v| (v.name.as_str(), v.node.as_deref(), v.line, v.column)).collect();
    assert_eq!(unset, [("DATABASE_URL", Some("table"), 51, 8)]);
    assert_eq!(t.fingerprint.len(), 64);
    assert_ne!(t.fingerprint, topology(&FULL.replace("250ms", "251ms")).fingerprint);
}

#[test]
fn nodes_come_in_the_order_of_the_file_with_their_inputs_as_ports() {
    let t = topology(FULL);
    let port = |node, output| Port { node: NodeId(node), output };
    let nodes: Vec<_> = t.nodes.iter().map(|n| (n.name.as_str(), n.inputs.clone(), n.on_error)).collect();
    assert_eq!(
        nodes,
        [
            ("orders", vec![], OnError::Stop),
            ("routed", vec![port(0, 0)], OnError::Skip),
            ("out", vec![port(1, 1), port(1, 2)], OnError::Skip),
            ("a", vec![port(1, 0)], OnError::Skip),
            ("table", vec![port(0, 0), port(2, 0)], OnError::Skip),
        ]
    );
    let NodeKind::Source(source) = &t.nodes[0].kind else { panic!() };
    assert_eq!(source.topics, ["orders", "orders.old"]);
    assert_eq!((source.format, source.start), (Format::String, Start::Timestamp(1_769_817_600_000)));
    assert_eq!(source.event_time.as_ref().map(|p| p.source()), Some("."));
    let NodeKind::Route { routes, tombstones } = &t.nodes[1].kind else { panic!() };
    assert_eq!(routes.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(*tombstones, Tombstones::Drop);
    let NodeKind::KafkaSink(sink) = &t.nodes[2].kind else { panic!() };
    let create = sink.create.as_ref().unwrap();
    assert_eq!((create.partitions, create.replication, create.config["retention.ms"].as_str()), (4, Some(3), "5"));
}

#[test]
fn a_postgres_sink_is_read() {
    let t = topology(FULL);
    let NodeKind::PostgresSink(sink) = &t.nodes[4].kind else { panic!() };
    assert_eq!((sink.url.as_str(), sink.table.as_str()), ("${DATABASE_URL}", "s.t"));
    assert_eq!(sink.key, ["id", "line"]);
    assert_eq!((sink.version.as_deref(), sink.deleted.as_deref()), (Some("version"), Some("gone")));
    assert_eq!(sink.delete_when.as_ref().map(|p| p.source()), Some("false"));
    let columns: Vec<_> = sink.columns.iter().map(|(name, program)| (name.as_str(), program.source())).collect();
    assert_eq!(columns, [("version", "1"), ("id", "%key"), ("line", "2")], "in the order of the file");
    assert_eq!((sink.unknown_fields, sink.tombstones), (UnknownFields::Reject, SinkTombstones::Ignore));
    assert_eq!((sink.batch_rows, sink.batch_bytes, sink.prepared), (10, 1 << 20, false));
    assert_eq!(sink.max_rejects_per_minute, 0);
}

#[test]
fn settings_are_located_by_their_path() {
    let at = |path: &[&str]| &FULL[locate(FULL, path)];
    assert_eq!(at(&["name"]), "\"shop\"");
    assert_eq!(at(&["sinks", "table", "table"]), "\"s.t\"");
    assert_eq!(at(&["sinks", "table", "nothing"]), "table", "the header of the table that it would be in");
    assert_eq!(at(&["sinks", "out", "create", "partitions"]), "\"4\"");
    assert_eq!(locate("name =", &["name"]).len(), 0);
}

#[test]
fn defaults_are_those_of_the_reference() {
    let t = topology(
        "name = \"t\"\nkafka.brokers = \"localhost\"\n\
         [sources.in]\ntype = \"kafka\"\ntopics = [\"in\"]\n\
         [sinks.out]\ntype = \"kafka\"\ninputs = [\"in\"]\ntopic = \"out\"\n\
         [sinks.rows]\ntype = \"postgres\"\ninputs = [\"in\"]\nurl = \"host=/tmp user=me\"\ntable = \"t\"\n\
         key = [\"id\"]\nversion = \"v\"\n",
    );
    assert_eq!((t.guarantee, t.on_error), (Guarantee::ExactlyOnce, OnError::Reject));
    assert_eq!(t.commit_interval, Duration::from_millis(100));
    assert_eq!((t.batch_records, t.workers, t.memory), (None, 1, 12 << 20));
    assert_eq!(t.shutdown_timeout, Duration::from_secs(30));
    assert_eq!((t.transaction_timeout, t.session_timeout), (Duration::from_secs(10), Duration::from_secs(15)));
    assert_eq!((t.instance, t.state_dir), (None, None));
    let NodeKind::Source(source) = &t.nodes[0].kind else { panic!() };
    assert_eq!((source.format, source.start), (Format::Json, Start::Earliest));
    let NodeKind::PostgresSink(sink) = &t.nodes[2].kind else { panic!() };
    assert_eq!((sink.unknown_fields, sink.tombstones), (UnknownFields::Ignore, SinkTombstones::Reject));
    assert_eq!((sink.batch_rows, sink.batch_bytes, sink.prepared), (1000, 8 << 20, true));
    assert_eq!((sink.max_rejects_per_minute, sink.progress), (1000, Progress::Kafka));
}

#[test]
fn test_values_keep_their_order_and_their_digits() {
    let t = topology(
        "name = \"t\"\nkafka.brokers = \"localhost\"\n\
         [sources.in]\ntype = \"kafka\"\ntopics = [\"in\"]\n\
         [sinks.out]\ntype = \"kafka\"\ninputs = [\"in\"]\ntopic = \"out\"\n\
         [[tests]]\nname = \"x\"\n[[tests.inputs]]\nsource = \"in\"\ntimestamp = 1970-01-01T00:00:01+00:00\n\
         value = { z = 1.50, a = [+1, 0x10, -0.0, 1e3], t = 2026-01-31T00:00:00Z, \
         s = \"\\u00e5\\n\", o = { b = true } }\n\
         [[tests.outputs]]\nsink = \"out\"\nrecords = []\n",
    );
    let input = &t.tests[0].inputs[0];
    let text = r#"{"z":1.50,"a":[1,16,-0.0,1e3],"t":"2026-01-31T00:00:00Z","s":"å\n","o":{"b":true}}"#;
    assert_eq!(std::str::from_utf8(input.value.as_ref().unwrap()), Ok(text));
    assert_eq!(input.timestamp, Some(1000));
    assert_eq!((t.tests[0].name.as_str(), t.tests[0].line), ("x", 10));
}

#[test]
fn an_aggregate_of_text_may_reduce_it_and_one_of_another_key_gets_a_topic() {
    let text = r#"
name = "t"
kafka.brokers = "localhost:9092"
[sources.lines]
type = "kafka"
topics = ["lines"]
format = "string"
[transforms.sizes]
type = "aggregate"
inputs = ["lines"]
group_by = "length!(.)"
fields.chars = { reduce = "(int(.acc) ?? 0) + length!(string!(.value))" }
[sinks.out]
type = "kafka"
inputs = ["sizes"]
topic = "out"
"#;
    let loaded = load(text, "t.toml", &|_| None);
    let topology = loaded.topology.unwrap_or_else(|| panic!("{:#?}", loaded.findings));
    let names: Vec<&str> = topology.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["lines", "sizes", "out", "sizes:repartition", "sizes:repartitioned"]);
    let reads = |node: usize| topology.nodes[node].inputs.iter().map(|port| port.node.0).collect::<Vec<_>>();
    assert_eq!((reads(1), reads(3), reads(4)), (vec![4], vec![0], vec![3]));
    let NodeKind::Repartitioned { topic, format } = &topology.nodes[4].kind else { panic!() };
    assert_eq!((topic.as_str(), *format), ("t.sizes.repartition", Format::String));
}

#[test]
fn events_that_windows_are_told_by_are_an_hour_ahead_of_their_records_at_most() {
    let bound = |source: &str, window: &str| {
        let text = format!(
            "name = \"t\"\nkafka.brokers = \"localhost:9092\"\n\
             [sources.in]\ntype = \"kafka\"\ntopics = [\"in\"]\n{source}\n\
             [transforms.live]\ntype = \"filter\"\ninputs = [\"in\"]\ncondition = \"true\"\n\
             [transforms.n]\ntype = \"aggregate\"\ninputs = [\"live\"]\ngroup_by = \".k\"\nfields.n = \"count\"\n{window}\n\
             [sinks.out]\ntype = \"kafka\"\ninputs = [\"n\"]\ntopic = \"out\"\n"
        );
        let NodeKind::Source(source) = &topology(&text).nodes[0].kind else { panic!() };
        source.max_ahead_ms
    };
    let (timed, windows) = ("event_time = \".at\"", "window = { tumbling = \"1m\" }");
    assert_eq!(bound(timed, windows), Some(3_600_000), "also through a repartition");
    assert_eq!(bound(timed, ""), None);
    assert_eq!(bound("", windows), None, "the topic bounds its records' own times");
    assert_eq!(bound("event_time = \".at\"\nmax_ahead = \"5s\"", windows), Some(5_000));
    assert_eq!(bound("event_time = \".at\"\nmax_ahead = \"5s\"", ""), Some(5_000));
}

const JOIN: &str = r#"
name = "t"
max_task_idle = "2s"
kafka.brokers = "localhost:9092"
[sources.orders]
type = "kafka"
topics = ["orders"]
[sources.customers]
type = "kafka"
topics = ["customers"]
[transforms.customer]
type = "table"
inputs = ["customers"]
[transforms.joined]
type = "join"
inputs = ["orders"]
table = "customer"
kind = "left"
into = "customer"
KEY
[transforms.counts]
type = "aggregate"
inputs = ["joined"]
fields.n = "count"
[sinks.out]
type = "kafka"
inputs = ["counts"]
topic = "out"
"#;

#[test]
fn a_join_takes_from_its_table_last_and_its_topics_are_read_together() {
    let topology = |key: &str| {
        let loaded = load(&JOIN.replace("KEY", key), "t.toml", &|_| None);
        loaded.topology.unwrap_or_else(|| panic!("{:#?}", loaded.findings))
    };
    let t = topology("");
    assert_eq!(t.max_task_idle, Duration::from_secs(2));
    let join = &t.nodes[3];
    assert_eq!((join.streams().to_vec(), join.table()), (vec![Port { node: NodeId(0), output: 0 }], Some(NodeId(2))));
    let NodeKind::Join(Join { kind: JoinKind::Left, key: None, into, of_tables: false }) = &join.kind else {
        panic!("{join:?}")
    };
    assert_eq!(into, "customer");
    let stores = |topology: Topology| {
        let plan = crate::topology::plan::Plan::new(std::sync::Arc::new(topology));
        let stores = plan.stores(&plan.stages[0]).into_iter().map(|store| (store.name, store.source, store.readers));
        (stores.collect::<Vec<_>>(), plan.co_partitioned(&plan.stages[0]))
    };
    let text = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let store = |name: &str, source: &str, readers: &[&str]| (name.to_owned(), source.to_owned(), text(readers));
    assert_eq!(
        stores(t),
        (
            vec![store("t.customer", "customers", &["orders"]), store("t.counts", "orders", &[])],
            vec![text(&["customers", "orders"])]
        )
    );

    let t = topology("key = \".customer_id\"");
    let names: Vec<&str> = t.nodes[6..].iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["joined:repartition", "joined:repartitioned"]);
    assert_eq!((t.nodes[3].streams()[0].node, t.nodes[3].table()), (NodeId(7), Some(NodeId(2))));
    assert_eq!(t.nodes[6].inputs, [Port { node: NodeId(0), output: 0 }], "the table does not go through it");
    let NodeKind::Repartition(Repartition { null_keys: true, .. }) = &t.nodes[6].kind else { panic!() };
    assert_eq!(stores(t).1, [text(&["customers", "t.joined.repartition"])]);
}
