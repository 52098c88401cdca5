//! `semel audit`: for a range of the committed input, whether each record has the outputs that the operators make of it,
//! each once. Outputs name the record that they come from (`audit = true`, header `semel-origin`).

mod compare;
mod look;
mod unnamed;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::time::Duration;

pub use compare::Kind;

use self::compare::{Expected, Wrong, compare, print};
use self::look::Looked;
use crate::chunk::{Chunk, Target, TargetId};
use crate::clock::Clock;
use crate::error::Failure;
use crate::kafka::{Admin, Connection, Error, Range, Reader};
use crate::operator::{Environment, Outcome, Pipeline};
use crate::record::Input;
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::{Guarantee, NodeId, NodeKind, Topology};

/// Wrong outputs that are told one by one.
const TOLD: usize = 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// What is audited: records of these times in milliseconds since the epoch, and at most so many offsets a partition.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    pub from: Option<i64>,
    pub to: Option<i64>,
    pub limit: Option<i64>,
}

/// What an audit found.
#[derive(Clone, Debug)]
pub struct Report {
    pub guarantee: Guarantee,
    /// What was audited of each partition.
    pub ranges: Vec<Range>,
    pub records: u64,
    /// Outputs of those records that are right.
    pub outputs: u64,
    /// Records that a dead letter accounts for.
    pub dead_letters: u64,
    /// Records that have no outputs and should have none.
    pub without_output: u64,
    pub wrong: BTreeMap<Kind, u64>,
    /// The first of them.
    pub told: Vec<Told>,
    /// What the audit does not speak of.
    pub not_audited: Vec<String>,
}

/// A wrong output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub kind: Kind,
    /// The record: topic, partition, offset.
    pub origin: (String, i32, i64),
    /// The topic of the output; none where it is about the record's dead letter.
    pub topic: Option<String>,
    pub partition: Option<i32>,
    /// Where the output lies that is doubled or different.
    pub offset: Option<i64>,
}

impl Report {
    /// Whether nothing could be audited, so that it says nothing of the job.
    pub fn is_empty(&self) -> bool {
        self.records == 0
    }

    pub fn count(&self, kind: Kind) -> u64 {
        self.wrong.get(&kind).copied().unwrap_or(0)
    }

    /// Whether something is wrong that the guarantee excludes.
    pub fn is_broken(&self) -> bool {
        let excluded: &[Kind] = match self.guarantee {
            Guarantee::ExactlyOnce => &[Kind::Lost, Kind::Doubled, Kind::Different],
            Guarantee::AtLeastOnce => &[Kind::Lost, Kind::Different],
            Guarantee::AtMostOnce => &[Kind::Doubled, Kind::Different],
        };
        excluded.iter().any(|kind| self.count(*kind) > 0)
    }
}

/// Audits the Kafka stage, also while it runs: what is past the committed positions is not looked at. Blocks.
///
/// # Errors
/// Exit 2 for a file that cannot be audited, where a position was lost, or where the broker refuses; exit 3 where it does
/// not answer.
pub fn audit(plan: &Plan, connection: &Connection, admin: &Admin, options: &Options) -> Result<Report, Failure> {
    let topology = &*plan.topology;
    let stage = plan.stages.iter().find(|stage| matches!(stage.kind, StageKind::Kafka { .. }));
    let stage = stage.ok_or_else(|| Failure::refused(format!("{} has no Kafka stage to audit", topology.file)))?;
    if !topology.audit {
        return Err(Failure::refused(format!(
            "{}: outputs do not say which record they come from; set audit = true at the top of the file, and audit \
             what is put out from then on",
            topology.file
        )));
    }
    if let Some(store) = plan.stores(stage).first() {
        return Err(Failure::refused(format!(
            "{}: `{}` keeps state, and an update tells of all records before; an audit looks at each record alone",
            topology.file, topology.nodes[store.node.0].name
        )));
    }
    let uneven = unrepeatable(topology, stage);
    let mut looked = Looked::at(plan, stage, connection, admin, options, &uneven.keys().copied().collect())?;
    let mut report = Report {
        guarantee: topology.guarantee,
        ranges: looked.ranges.clone(),
        records: 0,
        outputs: 0,
        dead_letters: 0,
        without_output: 0,
        wrong: BTreeMap::new(),
        told: Vec::new(),
        not_audited: not_audited(plan, &uneven),
    };
    report.not_audited.append(&mut looked.not_audited);
    let mut operators = Operators::new(plan, stage, &looked)?;
    let mut reader = Reader::new(connection, PATIENCE).map_err(look::failed)?;
    for range in looked.ranges.clone() {
        let read = reader.read(&range, |input| {
            operators.record(input, &mut looked, &mut report);
            Ok::<_, Error>(ControlFlow::Continue(()))
        });
        read.map_err(look::failed)?;
    }
    report.outputs += looked.unnamed.same;
    report.not_audited.extend(looked.notes());
    Ok(report)
}

/// Sinks whose outputs an operator makes anew each time, and by which function.
fn unrepeatable(topology: &Topology, stage: &Stage) -> BTreeMap<NodeId, String> {
    let StageKind::Kafka { nodes, .. } = &stage.kind else { return BTreeMap::new() };
    let mut by: HashMap<NodeId, String> = HashMap::new();
    // In topological order: what a node reads is known before it.
    for id in nodes {
        let node = &topology.nodes[id.0];
        let own =
            node.kind.programs().into_iter().find_map(|program| program.uses().nondeterministic_functions.first());
        let own = own.map(|function| format!("node {} calls {function}", node.name));
        let inherited = || node.inputs.iter().find_map(|port| by.get(&port.node).cloned());
        if let Some(reason) = own.or_else(inherited) {
            by.insert(*id, reason);
        }
    }
    by.into_iter().filter(|(id, _)| matches!(topology.nodes[id.0].kind, NodeKind::KafkaSink(_))).collect()
}

fn not_audited(plan: &Plan, uneven: &BTreeMap<NodeId, String>) -> Vec<String> {
    let mut notes = Vec::new();
    for (sink, by) in uneven {
        let topic = plan.topology.topics(*sink).concat();
        notes.push(format!("topic {topic}: {by}, which gives another value each time"));
    }
    for stage in &plan.stages {
        if let StageKind::Postgres { sink, .. } = &stage.kind {
            notes.push(format!(
                "table of {}: rows do not say which record they come from",
                plan.topology.nodes[sink.0].name
            ));
        }
    }
    notes.push("times of the outputs".to_owned());
    notes
}

/// The stage's operators, and what they make of one record.
struct Operators {
    pipeline: Pipeline,
    sources: HashMap<String, NodeId>,
    chunk: Chunk,
    /// By target: the index of its topic, where it is audited.
    audited: Vec<Option<usize>>,
}

impl Operators {
    fn new(plan: &Plan, stage: &Stage, looked: &Looked) -> Result<Operators, Failure> {
        let StageKind::Kafka { sources, .. } = &stage.kind else { unreachable!("the Kafka stage") };
        let targets: Vec<Target> = looked.targets.clone();
        let audited = targets.iter().map(|target| looked.topics.iter().position(|topic| *topic == *target.topic));
        let topics = sources.iter().flat_map(|id| plan.topology.topics(*id).into_iter().map(move |topic| (topic, *id)));
        Ok(Operators {
            audited: audited.collect(),
            sources: topics.collect(),
            chunk: Chunk::default(),
            pipeline: Pipeline::new(
                plan,
                Environment {
                    dead_letters: TargetId(targets.len() as u32 - 1),
                    targets,
                    topic_ids: looked.topic_ids.clone(),
                    clock: Clock::System,
                },
            )?,
        })
    }

    fn record(&mut self, input: &Input<'_>, looked: &mut Looked, report: &mut Report) {
        let Some(source) = self.sources.get(input.topic) else { return };
        self.chunk.clear();
        let outcome = self.pipeline.process(*source, input, &mut self.chunk);
        let letters = looked.letters(input);
        let expected: Option<Vec<Expected>> = match outcome {
            Ok(Outcome::Processed { .. } | Outcome::Skipped { .. } | Outcome::Kept | Outcome::Late) => {
                let outputs = self.chunk.iter().filter_map(|out| {
                    let topic = self.audited[out.target.0 as usize]?;
                    let print = print(topic, out.partition, out.key, out.value, out.headers());
                    Some(Expected { topic, partition: out.partition, print })
                });
                Some(outputs.collect())
            }
            Ok(Outcome::Rejected { .. }) | Err(_) => None,
        };
        let found = looked.found(input);
        let wrong = compare(expected.as_deref(), found, letters);
        report.records += 1;
        report.dead_letters += u64::from(letters.account() && found.is_empty());
        report.without_output += u64::from(!letters.account() && found.is_empty() && wrong.is_empty());
        report.outputs +=
            (found.len() - wrong.iter().filter(|w| w.kind != Kind::Lost && w.topic.is_some()).count()) as u64;
        for wrong in wrong {
            // What retention took is not known to have been lost.
            if looked.is_deleted(&wrong, input) || looked.is_unnamed(&wrong, input, letters.replayed > 0) {
                continue;
            }
            *report.wrong.entry(wrong.kind).or_default() += 1;
            if report.told.len() < TOLD {
                report.told.push(told(input, &wrong, looked));
            }
        }
    }
}

fn told(input: &Input<'_>, wrong: &Wrong, looked: &Looked) -> Told {
    Told {
        kind: wrong.kind,
        origin: (input.topic.to_owned(), input.partition, input.offset.0),
        topic: wrong.topic.map(|topic| looked.topics[topic].clone()),
        partition: wrong.place.map(|(partition, _)| partition),
        offset: wrong.place.and_then(|(_, offset)| offset),
    }
}

/// Topics of sinks that are audited.
fn topics(topology: &Topology, stage: &Stage, without: &BTreeSet<NodeId>) -> Vec<String> {
    let mut topics: Vec<String> = Vec::new();
    let left_out: BTreeSet<String> = without.iter().flat_map(|id| topology.topics(*id)).collect();
    for topic in stage.nodes().iter().filter(|id| matches!(topology.nodes[id.0].kind, NodeKind::KafkaSink(_))) {
        let names = topology.topics(*topic);
        topics.extend(names.into_iter().filter(|name| !left_out.contains(name)));
    }
    topics.sort();
    topics.dedup();
    topics
}
