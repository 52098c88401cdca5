//! The hot path of a worker: what one record costs between the consumer and the producer.
//!
//! `cargo bench --bench operators`; with `-- --test` each is run once, as a test.

use std::collections::{BTreeMap, HashMap};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{Criterion, Throughput, criterion_group};
use nix::time::{ClockId, clock_gettime};
use semel::chunk::{Chunk, Target, TargetId};
use semel::clock::Clock;
use semel::commit::Epoch;
use semel::commit::protocol::{Effect, Event, Protocol, Work};
use semel::expr::{Body, Metadata, Role, Runtime, compile};
use semel::json::JsonBody;
use semel::operator::row::Row;
use semel::operator::{Environment, Outcome, Pipeline, partition};
use semel::record::{Headers, Input, Offset};
use semel::sink::postgres::{Batch, Column, Folded, Layout, Type};
use semel::topology::plan::{Plan, Stage, StageKind};
use semel::topology::spec::{
    Format, Guarantee, Kafka, KafkaSink, Membership, Mode, Node, NodeId, NodeKind, OnError, Port, Source, Stores,
    Tombstones, Topology,
};
use uuid::Uuid;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// An order as the quickstart writes it, about 230 bytes.
const ORDER: &str = concat!(
    r#"{"event_id":"0190b5a1-7c3e-7cc4-9d7a-3f1f0a9d2b11","order_id":"o-0000123","customer_id":"c-004217","#,
    r#""status":"paid","qty":3,"price":19.90,"currency":"EUR","version":2,"created_at":"2024-07-15T09:30:00.123Z","#,
    r#""note":"leave at the door"}"#
);

fn program(source: &str, role: Role) -> semel::expr::Program {
    compile(source, role).expect("compiles").0
}

fn node(name: &str, input: Option<usize>, kind: NodeKind) -> Node {
    let inputs = input.map(|node| Port { node: NodeId(node), output: 0 }).into_iter().collect();
    Node { name: name.into(), inputs, on_error: OnError::Reject, kind }
}

/// `topologies/orders.toml`, its Kafka stage: filter, remap, sink.
fn pipeline(event_id: Option<&str>, event_time: Option<&str>) -> Pipeline {
    let value = |source: Option<&str>| source.map(|s| program(s, Role::Value));
    let source =
        Source { event_id: value(event_id), event_time: value(event_time), ..Source::plain("orders", Format::Json) };
    let filter = NodeKind::Filter {
        condition: program(".status != \"cancelled\"", Role::Condition),
        tombstones: Tombstones::Pass,
    };
    let remap = NodeKind::Remap {
        source: program(".total = to_float!(.qty) * to_float!(.price)\ndel(.note)\n", Role::Remap),
        tombstones: Tombstones::Pass,
    };
    let sink = KafkaSink { topic: "orders.priced".into(), key: value(Some(".customer_id")), create: None };
    let nodes = vec![
        node("orders", None, NodeKind::Source(source)),
        node("live", Some(0), filter),
        node("priced", Some(1), remap),
        node("orders_priced", Some(2), NodeKind::KafkaSink(sink)),
    ];
    let kind = StageKind::Kafka { sources: vec![NodeId(0)], nodes: (1..4).map(NodeId).collect() };
    let stage = Stage { name: "orders".into(), group: "orders".into(), kind };
    let plan = Plan { topology: Arc::new(topology(nodes)), stages: vec![stage], edges: Vec::new() };
    let environment = Environment {
        targets: vec![target("orders.dead-letters"), target("orders.priced")],
        topic_ids: HashMap::from([("orders".to_owned(), Uuid::from_u128(7))]),
        dead_letters: TargetId(0),
        clock: Clock::System,
    };
    Pipeline::new(&plan, environment).expect("a pipeline")
}

fn topology(nodes: Vec<Node>) -> Topology {
    Topology {
        file: "orders.toml".into(),
        name: "orders".into(),
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
        max_task_idle: Duration::ZERO,
        stores: Stores::Disk,
        on_error: OnError::Reject,
        audit: false,
        kafka: Kafka { brokers: "localhost:9092".into(), properties: BTreeMap::new() },
        nodes,
        tests: Vec::new(),
        drill: Vec::new(),
        unset: Vec::new(),
        fingerprint: String::new(),
    }
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

fn order() -> Input<'static> {
    Input {
        topic: "orders",
        partition: 3,
        offset: Offset(42),
        timestamp: Some(1_721_035_800_123),
        key: Some(b"c-004217"),
        value: Some(ORDER.as_bytes()),
        headers: Headers::default(),
    }
}

/// Processor time of the bench's thread: neighbours on the machine do not count.
struct CpuTime;

impl Measurement for CpuTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("the time of this thread").into()
    }

    fn end(&self, start: Duration) -> Duration {
        self.start() - start
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}

fn decode(c: &mut Criterion<CpuTime>) {
    let mut group = c.benchmark_group("json");
    group.throughput(Throughput::Bytes(ORDER.len() as u64));
    let mut body = JsonBody::default();
    group.bench_function("decode", |b| b.iter(|| body.decode(black_box(ORDER.as_bytes())).expect("decodes")));
    body.decode(ORDER.as_bytes()).expect("decodes");
    let mut out = Vec::new();
    group.bench_function("encode untouched", |b| {
        b.iter(|| {
            out.clear();
            black_box(&body).encode(&mut out);
        });
    });
    group.finish();
}

fn touch(c: &mut Criterion<CpuTime>) {
    let raise = program(".qty = to_int!(.qty) + 1", Role::Remap);
    let (input, mut runtime, mut body, mut out) = (order(), Runtime::default(), Body::default(), Vec::new());
    c.bench_function("decode, touch a member, encode", |b| {
        b.iter(|| {
            body.decode(Format::Json, black_box(input.value)).expect("decodes");
            raise.transform(&mut runtime, &mut body, &Metadata::new(&input, input.key, None)).expect("transforms");
            out.clear();
            body.encode(&mut out);
        });
    });
}

fn protocol(c: &mut Criterion<CpuTime>) {
    let mut protocol = Protocol::new(10_000);
    let epoch = Epoch::default();
    assert_eq!(protocol.start(), Effect::Receive);
    c.bench_function("protocol, a batch of one chunk", |b| {
        b.iter(|| {
            for work in [Work::Outputs { epoch }, Work::Seal { epoch }] {
                let mut effect = protocol.on(Event::Received(work), 0);
                while effect != Effect::Receive {
                    effect = protocol.on(Event::Done, 0);
                }
            }
        });
    });
}

/// What a Postgres stage does before its statement: rows are converted, and one a key is left.
fn fold(c: &mut Criterion<CpuTime>) {
    let column = |name: &str, ty| Column { name: name.into(), ty, required: true, default: None, may_be_filled: false };
    let layout = Layout {
        node: "t".into(),
        table: "t".into(),
        quoted_table: "t".into(),
        mode: Mode::Upsert,
        columns: vec![
            column("id", Type::Int8),
            column("version", Type::Int8),
            column("name", Type::Text { max: None }),
        ],
        key: vec![0],
        version: Some(1),
        deleted: None,
    };
    let rows: Vec<(String, i64, String)> =
        (0..1000).map(|i| ((i % 250).to_string(), i * 7 % 1000, format!("\"name {i}\""))).collect();
    let all: Vec<u32> = (0..1000).collect();
    let mut batch = Batch::new(Arc::new(layout));
    c.bench_function("fold, 1000 rows of 250 keys", |b| {
        b.iter(|| {
            batch.clear();
            for (id, version, name) in &rows {
                let cell = |name: &'static str, text: String| (name.into(), Some(text.into_bytes().into()));
                let cells =
                    vec![cell("id", id.clone()), cell("version", version.to_string()), cell("name", name.clone())];
                batch.push(&Row { id: None, version: Some(*version), deleted: false, cells }).expect("a row");
            }
            assert_eq!(Folded::new(&batch, &all).winners().len(), 250);
        });
    });
}

fn orders(c: &mut Criterion<CpuTime>) {
    let mut group = c.benchmark_group("orders");
    group.throughput(Throughput::Elements(1));
    let cases = [
        ("filter, remap, key", None, None),
        ("with event id", Some(".event_id"), None),
        ("with event id hashed", Some(".order_id"), None),
        ("with event id and event time", Some(".event_id"), Some(".created_at")),
    ];
    for (name, event_id, event_time) in cases {
        let mut pipeline = pipeline(event_id, event_time);
        let mut chunk = Chunk::default();
        let input = order();
        group.bench_function(name, |b| {
            b.iter(|| {
                if chunk.bytes_len() > 64 << 10 {
                    chunk.clear();
                }
                let outcome = pipeline.process(NodeId(0), black_box(&input), &mut chunk);
                assert_eq!(outcome, Ok(Outcome::Processed { outputs: 1 }));
            });
        });
    }
    group.finish();
}

fn partitioner(c: &mut Criterion<CpuTime>) {
    c.bench_function("partition", |b| b.iter(|| partition(black_box(Some(b"c-004217")), 3, black_box(12))));
}

criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(CpuTime);
    targets = decode, touch, orders, partitioner, protocol, fold
}

/// The whole work on so many orders, and nothing else: `benches/instructions.sh` counts what it takes.
fn counted(orders: u64) {
    let mut pipeline = pipeline(Some(".event_id"), Some(".created_at"));
    let (mut chunk, input) = (Chunk::default(), order());
    for _ in 0..orders {
        if chunk.bytes_len() > 64 << 10 {
            chunk.clear();
        }
        let outcome = pipeline.process(NodeId(0), black_box(&input), &mut chunk);
        assert_eq!(outcome, Ok(Outcome::Processed { outputs: 1 }));
    }
}

fn main() {
    if let Ok(orders) = std::env::var("SEMEL_INSTRUCTIONS") {
        return counted(orders.parse().expect("a number of orders"));
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
