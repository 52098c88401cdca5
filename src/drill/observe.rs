//! What is there after a run: records of topics, rows of tables, positions of groups.

use std::collections::HashMap;

use serde_json::Value;

use super::verdict::{Promise, Seen};
use crate::error::Failure;
use crate::ids;
use crate::quickstart::topics::Standing;
use crate::record::Input;
use crate::scratch::{Run, SOURCE_HEADER, World};
use crate::topology::plan::{EdgeEnd, Plan, Stage, StageKind};
use crate::topology::spec::{Mode, NodeId, NodeKind, PostgresSink, Topology};

/// Tries at reading a topic.
const READS: u32 = 3;

/// One end of a topology, where what came out can be looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    pub kind: EndKind,
    /// As the user's file names it.
    pub name: String,
    /// The stages whose crashes reach it, its own last.
    pub promise: Promise,
    /// Why contents are another on another attempt, and so are not compared.
    pub varies: Option<&'static str>,
}

/// Why what is at an end varies.
const CHANCE: &str = "a program on the way asks the clock or chance";
const ORDER: &str = "records of several partitions meet in a repartition, in an order of their own";
const TIES: &str = "versions come with several contents, of which the first stays";
const NAMED: &str = "ids are made of the topology's name, which is another in every run";

/// What an end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndKind {
    Topic,
    /// The table of this sink.
    Table(usize),
    /// The ids in the ledger of this sink.
    Ledger(usize),
    /// What a stage rejects; all stages write to one topic.
    DeadLetters,
}

/// What was found at an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contents {
    Records(Vec<Seen>),
    /// By key.
    Rows(HashMap<String, String>),
    /// Of a table without a key, or ids of a ledger.
    Heap(Vec<String>),
}

impl Contents {
    pub fn len(&self) -> usize {
        match self {
            Contents::Records(records) => records.len(),
            Contents::Rows(rows) => rows.len(),
            Contents::Heap(rows) => rows.len(),
        }
    }
}

/// Everything that a run left.
#[derive(Clone, Debug)]
pub struct Observed {
    /// In the order of the ends that were asked for.
    pub contents: Vec<Contents>,
    pub standings: Vec<Standing>,
}

/// The ends of a topology in the order of the file, dead letters last. `stage`: those that this stage writes itself.
/// `tied`: Postgres stages that met one version with several contents.
pub fn ends(plan: &Plan, stage: Option<&Stage>, tied: &[String]) -> Vec<End> {
    let topology = &plan.topology;
    let mut ends: Vec<End> = Vec::new();
    let kafka = plan.stages.iter().find(|s| matches!(s.kind, StageKind::Kafka { .. }));
    let chosen = |s: &Stage| stage.is_none_or(|only| only.name == s.name);
    for (index, node) in topology.nodes.iter().enumerate() {
        match &node.kind {
            NodeKind::KafkaSink(sink) if kafka.is_some_and(chosen) => {
                let known = ends.iter().any(|end| end.kind == EndKind::Topic && end.name == sink.topic);
                if !known {
                    let promise = promised(plan, &EdgeEnd::Topic(sink.topic.clone()), None);
                    let varies = varies(topology, NodeId(index));
                    ends.push(End { kind: EndKind::Topic, name: sink.topic.clone(), promise, varies });
                }
            }
            NodeKind::PostgresSink(sink) => {
                let own = plan.stages.iter().find(|s| s.name == node.name).expect("a sink is a stage");
                if !chosen(own) {
                    continue;
                }
                let mut promise = promised(plan, &EdgeEnd::Table(sink.table.clone()), Some(&own.name));
                if stage.is_none() && plan.reads(own).iter().any(|topic| kafka_writes(topology, topic)) {
                    // A record that the Kafka stage sends twice is two with one id, which the table takes once.
                    let above = kafka.map(|_| kafka_promise(plan)).unwrap_or_default();
                    promise.may_lose |= above.may_lose;
                    let twice = sink.dedupe.is_none() && matches!(sink.mode, Mode::Insert | Mode::Add);
                    promise.may_double |= above.may_double && twice;
                }
                let tied = tied.contains(&own.name).then_some(TIES);
                let varies = varies(topology, NodeId(index)).or(tied);
                ends.push(End { kind: EndKind::Table(index), name: sink.table.clone(), promise, varies });
                if let Some(ledger) = &sink.dedupe {
                    ends.push(End {
                        kind: EndKind::Ledger(index),
                        name: ledger.table.clone(),
                        promise,
                        varies: Some(NAMED),
                    });
                }
            }
            _ => {}
        }
    }
    let name = topology.dead_letters();
    let letters: Vec<Promise> = plan
        .stages
        .iter()
        .filter(|s| chosen(s))
        .map(|s| promised(plan, &EdgeEnd::Topic(name.clone()), Some(&s.name)))
        .collect();
    let promise = letters.into_iter().fold(Promise::default(), Promise::and);
    // A stage behind another rejects again what came again.
    let promise = if stage.is_none() { promise.and(kafka_promise(plan)) } else { promise };
    let varies = (0..topology.nodes.len()).find_map(|node| varies(topology, NodeId(node)));
    ends.push(End { kind: EndKind::DeadLetters, name: "dead letters".to_owned(), promise, varies });
    ends
}

fn kafka_writes(topology: &Topology, topic: &str) -> bool {
    topology.nodes.iter().any(|n| matches!(&n.kind, NodeKind::KafkaSink(sink) if sink.topic == *topic))
}

fn promised(plan: &Plan, to: &EdgeEnd, stage: Option<&str>) -> Promise {
    let edges = plan.edges.iter().filter(|e| e.to == *to && stage.is_none_or(|stage| e.stage == stage));
    edges.map(|e| Promise::of(e.guarantee)).fold(Promise::default(), Promise::and)
}

/// Of what the Kafka stage writes, if there is one.
fn kafka_promise(plan: &Plan) -> Promise {
    let kafka = plan.stages.iter().find(|s| matches!(s.kind, StageKind::Kafka { .. }));
    let edges = kafka.into_iter().flat_map(|stage| plan.edges.iter().filter(|e| e.stage == stage.name));
    edges.map(|e| Promise::of(e.guarantee)).fold(Promise::default(), Promise::and)
}

/// Why what comes to a node is another on another attempt.
fn varies(topology: &Topology, id: NodeId) -> Option<&'static str> {
    let node = &topology.nodes[id.0];
    let programs = node.kind.programs();
    if programs.iter().any(|program| !program.uses().nondeterministic_functions.is_empty()) {
        return Some(CHANCE);
    }
    if let NodeKind::Repartitioned { .. } = node.kind {
        return Some(ORDER);
    }
    node.inputs.iter().find_map(|port| varies(topology, port.node))
}

/// Looks at the ends and at the positions of the stages that ran.
pub fn observe(world: &World, run: &Run, ends: &[End], stage: Option<&str>) -> Result<Observed, Failure> {
    let topology = &run.plan.topology;
    let mut contents = Vec::new();
    for end in ends {
        contents.push(match end.kind {
            EndKind::Topic => Contents::Records(records(world, run, &format!("{}.{}", run.outputs, end.name), end)?),
            EndKind::DeadLetters => Contents::Records(records(world, run, &topology.dead_letters(), end)?),
            EndKind::Table(node) => {
                let sink = sink(world, topology, node);
                let rows = world.database.rows(&sink.table)?;
                match sink.key.is_empty() {
                    true => Contents::Heap(rows),
                    false => Contents::Rows(rows.into_iter().map(|row| (key(&row, &sink.key), row)).collect()),
                }
            }
            EndKind::Ledger(node) => {
                let ledger = sink(world, topology, node).dedupe.as_ref().expect("the ledger of a sink that has one");
                Contents::Heap(world.database.query(&format!("SELECT event_id FROM {}", ledger.table))?)
            }
        });
    }
    let mut standings = Vec::new();
    for own in run.plan.stages.iter().filter(|own| stage.is_none_or(|stage| own.name == stage)) {
        for topic in run.plan.reads(own) {
            let mut found = world.topics.standings(&own.group, &topic)?;
            if run.plan.keeps_positions(own) {
                // Those in Kafka only follow.
                for standing in &mut found {
                    standing.position = world.database.position(&own.group, &standing.partition)?;
                }
            }
            standings.extend(found);
        }
    }
    Ok(Observed { contents, standings })
}

/// A run's Postgres sink by its place in the user's file.
fn sink<'t>(world: &World, run: &'t Topology, node: usize) -> &'t PostgresSink {
    let name = &world.topology.nodes[node].name;
    let own = run.nodes.iter().find(|n| n.name == *name).expect("every run has the same nodes");
    let NodeKind::PostgresSink(sink) = &own.kind else { unreachable!("a Postgres sink is one in every run") };
    sink
}

fn key(row: &str, columns: &[String]) -> String {
    let row: Value = serde_json::from_str(row).unwrap_or_default();
    let values: Vec<String> = columns.iter().map(|column| row[column.as_str()].to_string()).collect();
    values.join(", ")
}

fn records(world: &World, run: &Run, topic: &str, end: &End) -> Result<Vec<Seen>, Failure> {
    let mut tries = READS;
    loop {
        let mut records = Vec::new();
        match world.topics.read(topic, |input| records.push(seen(&input, run, end))) {
            Ok(()) => return Ok(records),
            Err(failure) if tries == 0 => return Err(failure),
            // A broker may know nothing of a partition that was made a moment ago.
            Err(_) => tries -= 1,
        }
    }
}

/// Headers that name the run: what it is called, where its topics lie, ids derived from that.
const OF_THE_RUN: &[&str] = &["semel-error-topology", "semel-error-offset", "semel-error-partition", ids::HEADER];

fn seen(input: &Input<'_>, run: &Run, end: &End) -> Seen {
    let text = |bytes: Option<&[u8]>| match bytes {
        None => "null".to_owned(),
        Some(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => format!("{text:?}"),
            Err(_) => format!("b\"{}\"", bytes.escape_ascii()),
        },
    };
    let header = |name: &str| input.headers.last(name).flatten().map(|v| String::from_utf8_lossy(v).into_owned());
    let source = header(SOURCE_HEADER);
    let mut content = String::new();
    if end.varies.is_some() {
        content.push_str(source.as_deref().unwrap_or("no source"));
    } else {
        content = format!("{} = {}", text(input.key), text(input.value));
        for (name, value) in &input.headers.0 {
            let name = String::from_utf8_lossy(name);
            if !OF_THE_RUN.contains(&&*name) {
                content.push_str(&format!(", {name}: {}", text(*value)));
            }
        }
        // Messages of the database name the table, headers the topic.
        content = content.replace(&run.name, "").replace(&run.outputs, "");
    }
    let partition = source.as_deref().and_then(|source| source.split_once(':')).map_or("", |(partition, _)| partition);
    // Dead letters come when their batch is answered: no order is promised among them.
    let line = match end.kind {
        EndKind::DeadLetters => content.clone(),
        _ => format!("{partition} {}", text(input.key)),
    };
    Seen { content, line, event_id: header(ids::HEADER), source, node: header("semel-error-node") }
}
