//! Everything that can be refused is refused before a record is read: topics, their settings, the broker's limits.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use crate::chunk::{Target, TargetId};
use crate::error::{Disposition, Failure};
use crate::kafka::{Admin, At, Error, Isolation, TopicInfo};
use crate::record::TopicPartition;
use crate::store::KEPT;
use crate::topology::plan::{Plan, PlannedStore, Stage, StageKind};
use crate::topology::spec::{CreateTopic, Guarantee, Node, NodeId, NodeKind, Source, Start, Topology};
use crate::topology::{REPLAY_WINDOW, duration_text};

/// A dead letter is its record plus what was wrong.
const DEAD_LETTER_ROOM: usize = 64 * 1024;

/// What a stage needs to know of the broker's topics.
#[derive(Clone, Debug)]
pub struct StageTopics {
    /// Topics read, with where each starts; the stage's retry topic is last, where there is one.
    pub sources: Vec<(Arc<str>, Start, TopicInfo)>,
    /// Topics written, changelogs of stores among them; the dead-letter topic is last.
    pub targets: Vec<Target>,
    pub dead_letters: TargetId,
    pub topic_ids: HashMap<String, Uuid>,
    /// Changelogs of the stage's stores, with the ids that they have.
    pub changelogs: Vec<(String, TopicInfo)>,
}

/// The topics that a stage reads, with where each starts.
pub fn read_topics(topology: &Topology, stage: &Stage) -> Vec<(String, Start)> {
    let nodes = match &stage.kind {
        StageKind::Kafka { sources, .. } => sources,
        StageKind::Postgres { inputs, .. } => inputs,
    };
    let mut topics = Vec::new();
    for id in nodes {
        match &topology.nodes[id.0].kind {
            NodeKind::Source(Source { topics: names, start, .. }) => {
                topics.extend(names.iter().map(|t| (t.clone(), *start)))
            }
            NodeKind::KafkaSink(sink) => topics.push((sink.topic.clone(), Start::Earliest)),
            NodeKind::Repartitioned { topic, .. } => topics.push((topic.clone(), Start::Earliest)),
            _ => unreachable!("no other node is read"),
        }
    }
    topics
}

/// The topics that a stage writes, but for its dead letters.
fn written_topics<'a>(topology: &'a Topology, stage: &Stage) -> Vec<(&'a str, &'a str, Option<&'a CreateTopic>)> {
    let StageKind::Kafka { nodes, .. } = &stage.kind else { return Vec::new() };
    let sinks = nodes.iter().map(|id| &topology.nodes[id.0]).filter_map(|node| match &node.kind {
        NodeKind::KafkaSink(sink) => Some((node.name.as_str(), sink.topic.as_str(), sink.create.as_ref())),
        _ => None,
    });
    let mut seen = BTreeSet::new();
    sinks.filter(|(_, topic, _)| seen.insert(*topic)).collect()
}

/// What stands in the way of a start, and which setting it is about: the path to it in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub setting: Vec<String>,
    pub message: String,
}

/// The broker's topics as the stages find them.
struct Found<'a> {
    infos: BTreeMap<String, TopicInfo>,
    /// Sink, topic and how it is declared: to be made.
    missing: Vec<(&'a str, &'a str, &'a CreateTopic)>,
    problems: Vec<Problem>,
}

/// All that the broker has against a start of these stages. Changes nothing. Blocks.
pub fn problems(plan: &Plan, stages: &[&Stage], admin: &Admin) -> Result<Vec<Problem>, Failure> {
    Ok(inspect(plan, stages, admin)?.problems)
}

/// Looks at every topic of the stages, makes those that are declared with `create` and the dead-letter topic, and
/// answers what each stage works with. Refuses what is missing or cannot work, all of it in one message and before
/// anything is made. Blocks.
pub fn topics(plan: &Plan, stages: &[&Stage], admin: &Admin) -> Result<Vec<StageTopics>, Failure> {
    let topology = &plan.topology;
    let Found { mut infos, missing, problems } = inspect(plan, stages, admin)?;
    refuse(topology, problems)?;
    let created = create(&missing, admin)?;
    let new = describe(admin, &created)?;
    refuse(
        topology,
        missing.iter().filter_map(|(sink, topic, _)| unwritable(sink, topic, new.get(*topic)?)).collect(),
    )?;
    infos.extend(new);
    let retries: BTreeSet<String> = stages.iter().map(|stage| plan.retry(stage)).collect();
    infos.extend(describe(admin, &retries)?);
    for stage in stages {
        infos.extend(repartitions(plan, stage, &infos, admin)?);
        refuse(topology, parted(plan, stage, &infos))?;
    }
    let changelogs = stages.iter().flat_map(|stage| plan.stores(stage));
    let changelogs = changelogs.map(|store| changelog(&store, &infos, admin)).collect::<Result<Vec<_>, _>>()?;
    infos.extend(changelogs);
    let dead_letters = dead_letter_topic(plan, stages, admin, &infos)?;
    Ok(stages.iter().map(|stage| stage_topics(plan, stage, &infos, &dead_letters)).collect())
}

fn inspect<'a>(plan: &'a Plan, stages: &[&Stage], admin: &Admin) -> Result<Found<'a>, Failure> {
    let topology = &*plan.topology;
    let mut names: BTreeSet<String> = BTreeSet::new();
    for stage in stages {
        names.extend(read_topics(topology, stage).into_iter().map(|(topic, _)| topic));
        names.extend(written_topics(topology, stage).into_iter().map(|(_, topic, _)| topic.to_owned()));
        names.extend(plan.stores(stage).into_iter().map(|store| store.changelog));
        names.insert(plan.retry(stage));
    }
    let infos = describe(admin, &names)?;
    let mut found = Found { missing: Vec::new(), problems: Vec::from_iter(limits(topology, admin)), infos };
    for stage in stages {
        let own = plan.repartitions(stage);
        for (topic, _) in read_topics(topology, stage).into_iter().filter(|(topic, _)| !own.contains(topic)) {
            // The stage that writes it answers for it.
            let written = |stage: &&Stage| written_topics(topology, stage).iter().any(|(_, t, _)| *t == topic);
            if !found.infos.contains_key(&topic) && !stages.iter().any(written) {
                let message = format!("topic {topic:?}, which stage {} reads, does not exist", stage.name);
                found.problems.push(Problem { setting: setting_of(topology, &topic), message });
            }
        }
        found.problems.extend(parted(plan, stage, &found.infos));
        let unfit: Vec<_> = plan.stores(stage).iter().filter_map(|s| unfit(topology, s, &found.infos)).collect();
        found.problems.extend(unfit);
        let lossy: Vec<_> =
            own.iter().chain([&plan.retry(stage)]).filter_map(|t| lossy(topology, t, &found.infos)).collect();
        found.problems.extend(lossy);
        for (sink, topic, create) in written_topics(topology, stage) {
            match (found.infos.get(topic), create) {
                (Some(info), _) => found.problems.extend(unwritable(sink, topic, info)),
                (None, Some(create)) => found.missing.push((sink, topic, create)),
                (None, None) => found.problems.push(Problem {
                    setting: sink_topic(sink),
                    message: format!(
                        "topic {topic:?}, which sink {sink} writes, does not exist; create it, or declare \
                         create = {{ partitions = 4 }} in [sinks.{sink}] so that semel does"
                    ),
                }),
            }
        }
    }
    found.problems.dedup();
    Ok(found)
}

/// Topics that are joined and have unlike numbers of partitions: keys that are the same lie apart.
fn parted(plan: &Plan, stage: &Stage, infos: &BTreeMap<String, TopicInfo>) -> Vec<Problem> {
    let stores = plan.stores(stage);
    let pairs = stores.iter().flat_map(|store| store.readers.iter().map(move |reader| (store, reader)));
    let parted = pairs.filter_map(|(store, reader)| {
        let (table, stream) = (infos.get(&store.source)?, infos.get(reader)?);
        let own = |topic: &String| plan.repartitions(stage).contains(topic);
        let cure = match own(reader) || own(&store.source) {
            true => format!(
                "semel makes the topic of a repartition with as many where it is not there: once it is empty, delete it, and \
                 begin anew with semel reset {}",
                plan.topology.file
            ),
            false => "give both as many; or have semel send the records of the stream anew, with key = \"%key\" in the \
                      join"
                .to_owned(),
        };
        (table.partitions != stream.partitions).then(|| Problem {
            setting: vec!["transforms".to_owned(), plan.topology.nodes[store.node.0].name.clone()],
            message: format!(
                "topic {reader:?} has {} partitions, and topic {:?}, which it is joined with, has {}: records of one key would \
                 lie in partitions of other numbers and never meet; {cure}",
                stream.partitions, store.source, table.partitions
            ),
        })
    });
    parted.collect()
}

/// What is wrong with a changelog that is there.
fn unfit(topology: &Topology, store: &PlannedStore, infos: &BTreeMap<String, TopicInfo>) -> Option<Problem> {
    let (changelog, source) = (infos.get(&store.changelog)?, infos.get(&store.source)?);
    let PlannedStore { node, changelog: topic, source: read, .. } = store;
    let message = if changelog.partitions != source.partitions {
        format!(
            "topic {topic:?}, from which state is restored, has {} partitions, but topic {read:?} has {}: a key may lie in \
             another partition than its state. semel reset {} clears the state and sets where to begin anew with it",
            changelog.partitions, source.partitions, topology.file
        )
    } else if changelog.cleanup_policy.trim() != "compact" {
        format!(
            "topic {topic:?}, from which state is restored, deletes by age or size (cleanup.policy = {}): set \
             cleanup.policy = compact",
            changelog.cleanup_policy
        )
    } else {
        return None;
    };
    Some(Problem { setting: vec!["transforms".to_owned(), topology.nodes[node.0].name.clone()], message })
}

/// What is wrong with a topic that is there and through which a stage sends records to itself.
fn lossy(topology: &Topology, topic: &str, infos: &BTreeMap<String, TopicInfo>) -> Option<Problem> {
    let why = infos.get(topic)?.loses_unread()?;
    let writes = |node: &&Node| matches!(&node.kind, NodeKind::Repartition(repartition) if repartition.topic == topic);
    let setting = match topology.nodes.iter().find(writes) {
        Some(node) => vec!["transforms".to_owned(), node.declared_name().to_owned()],
        None => vec!["name".to_owned()],
    };
    let message = format!(
        "topic {topic:?}, through which the job sends records to itself, may lose them before they are read ({why}): set \
         cleanup.policy = delete, retention.ms = -1 and retention.bytes = -1, or delete the topic while nothing is in \
         it, and semel makes it anew"
    );
    Some(Problem { setting, message })
}

/// Makes the topics through which a stage sends records to itself, where they are not there: with as many partitions as the
/// topics that they are joined with, else the widest of their sources. Records stay until they are processed, and are deleted then.
fn repartitions(
    plan: &Plan,
    stage: &Stage,
    infos: &BTreeMap<String, TopicInfo>,
    admin: &Admin,
) -> Result<Vec<(String, TopicInfo)>, Failure> {
    let StageKind::Kafka { nodes, .. } = &stage.kind else { return Ok(Vec::new()) };
    let mut made = Vec::new();
    for id in nodes {
        let Some(topic) = plan.topology.repartition(*id) else { continue };
        let with = plan.co_partitioned(stage).into_iter().find(|group| group.contains(&topic));
        let with = with.unwrap_or_else(|| vec![topic.clone()]);
        // Repartitions that are joined are as wide as the widest source of any.
        let writers =
            nodes.iter().filter(|id| plan.topology.repartition(**id).is_some_and(|topic| with.contains(&topic)));
        let sources = writers.flat_map(|id| plan.topology.sources_of(*id)).flat_map(|source| &source.topics);
        let read: Vec<&TopicInfo> = sources.filter_map(|topic| infos.get(topic)).collect();
        let widest = read.iter().map(|info| info.partitions).max().unwrap_or(1);
        let partitions = with.iter().find_map(|topic| infos.get(topic)).map_or(widest, |info| info.partitions);
        let largest = read.iter().map(|info| info.max_message_bytes).max().unwrap_or(1 << 20);
        let info = admin
            .unread_topic(&topic, partitions, largest.max(1 << 20))
            .map_err(|e| asked(&e, &format!("cannot create the repartition topic {topic:?}")))?;
        made.push((topic, info));
    }
    Ok(made)
}

/// Makes the changelog of a store, where it is not there: with a partition for each of the source.
fn changelog(
    store: &PlannedStore,
    infos: &BTreeMap<String, TopicInfo>,
    admin: &Admin,
) -> Result<(String, TopicInfo), Failure> {
    let PlannedStore { changelog, source, .. } = store;
    // The segment that is written is never compacted: by the broker's default a gigabyte, mostly of windows that are gone.
    let config = [
        ("cleanup.policy", "compact".to_owned()),
        ("segment.bytes", (50 << 20).to_string()),
        // Files that are gone on with know nothing of tombstones that are gone.
        ("delete.retention.ms", (2 * KEPT.as_millis()).to_string()),
    ];
    let info = admin
        .internal_topic(changelog, infos[source].partitions, &config)
        .map_err(|e| asked(&e, &format!("cannot create the changelog {changelog:?}")))?;
    Ok((changelog.clone(), info))
}

/// The changelogs of a stage that are there, with their ids. Blocks.
pub fn changelogs(plan: &Plan, stage: &Stage, admin: &Admin) -> Result<BTreeMap<String, Uuid>, Failure> {
    let names: Vec<String> = plan.stores(stage).into_iter().map(|store| store.changelog).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let there = admin.shapes(&names).map_err(|e| asked(&e, "cannot look at the changelogs"))?;
    Ok(there.into_iter().map(|(topic, (id, _))| (topic, id)).collect())
}

/// The setting that names a topic.
fn setting_of(topology: &Topology, topic: &str) -> Vec<String> {
    let path = |node: &Node| match &node.kind {
        NodeKind::Source(source) if source.topics.iter().any(|t| t == topic) => {
            Some(vec!["sources".to_owned(), node.name.clone(), "topics".to_owned()])
        }
        NodeKind::KafkaSink(sink) if sink.topic == topic => Some(sink_topic(&node.name)),
        _ => None,
    };
    topology.nodes.iter().find_map(path).unwrap_or_default()
}

fn sink_topic(sink: &str) -> Vec<String> {
    vec!["sinks".to_owned(), sink.to_owned(), "topic".to_owned()]
}

fn refuse(topology: &Topology, problems: Vec<Problem>) -> Result<(), Failure> {
    if problems.is_empty() {
        return Ok(());
    }
    let messages: Vec<String> = problems.into_iter().map(|problem| problem.message).collect();
    Err(Failure::refused(format!("at {}: {}", topology.kafka.brokers, messages.join("\n  "))))
}

fn stage_topics(plan: &Plan, stage: &Stage, infos: &BTreeMap<String, TopicInfo>, dead_letters: &Target) -> StageTopics {
    let topology = &*plan.topology;
    let retry = infos.get_key_value(&plan.retry(stage)).map(|(topic, _)| (topic.clone(), Start::Earliest));
    let sources: Vec<_> = read_topics(topology, stage)
        .into_iter()
        .chain(retry)
        .map(|(topic, start)| (Arc::from(topic.as_str()), start, infos[&topic].clone()))
        .collect();
    let mut targets: Vec<Target> =
        written_topics(topology, stage).into_iter().map(|(_, topic, _)| infos[topic].target(topic)).collect();
    let changelogs: Vec<(String, TopicInfo)> =
        plan.stores(stage).into_iter().map(|s| (s.changelog.clone(), infos[&s.changelog].clone())).collect();
    targets.extend(changelogs.iter().map(|(topic, info)| info.target(topic.as_str())));
    targets.extend(plan.repartitions(stage).into_iter().map(|topic| infos[&topic].target(topic)));
    targets.push(dead_letters.clone());
    StageTopics {
        changelogs,
        topic_ids: sources
            .iter()
            .map(|(topic, _, info): &(Arc<str>, _, TopicInfo)| (topic.to_string(), info.id))
            .collect(),
        sources,
        dead_letters: TargetId(targets.len() as u32 - 1),
        targets,
    }
}

fn unwritable(sink: &str, topic: &str, info: &TopicInfo) -> Option<Problem> {
    (info.min_insync_replicas > info.replicas).then(|| Problem {
        setting: sink_topic(sink),
        message: format!(
            "topic {topic:?} has {} replicas but min.insync.replicas = {}: the broker would refuse every record; lower \
             the setting or add replicas",
            info.replicas, info.min_insync_replicas
        ),
    })
}

/// A transaction timeout above the broker's limit would be refused by `init_transactions`.
fn limits(topology: &Topology, admin: &Admin) -> Option<Problem> {
    if topology.guarantee != Guarantee::ExactlyOnce {
        return None;
    }
    // A broker that does not let us look says so when the producer is initialised.
    let limit: u64 = admin.broker_config("transaction.max.timeout.ms").ok().flatten()?.parse().ok()?;
    (topology.transaction_timeout.as_millis() > u128::from(limit)).then(|| Problem {
        setting: vec!["transaction_timeout".to_owned()],
        message: format!(
            "transaction_timeout = {:?} is above the broker's transaction.max.timeout.ms = {limit}; lower it, or raise \
             the broker's limit",
            topology.transaction_timeout
        ),
    })
}

/// Where the ledger of a stage forgets ids earlier than their events may come again: from the topics that it reads, and
/// as dead letters from there. Blocks.
pub fn ledger_problems(plan: &Plan, stage: &Stage, admin: &Admin) -> Result<Vec<String>, Failure> {
    let Some(ledger) = plan.postgres_sink(stage).and_then(|sink| sink.dedupe.as_ref()) else { return Ok(Vec::new()) };
    let infos = describe(admin, &plan.reads(stage).into_iter().collect())?;
    let short = infos.into_iter().filter_map(|(topic, info)| {
        let needed = kept_by_time(&info).map(|kept| kept + REPLAY_WINDOW);
        if needed.is_some_and(|needed| ledger.retention >= needed) {
            return None;
        }
        let (has, cure) = match needed {
            Some(needed) => {
                let cure = format!("a retention of {} outlasts both", duration_text(needed));
                (format!("retention.ms = {}", info.retention_ms), cure)
            }
            None => ("no end of its retention".to_owned(), "do not reset the group further back than that".to_owned()),
        };
        Some(format!(
            "the ledger {} forgets an event after {}, but topic {topic:?} has {has} and its dead letters may be replayed \
             for {}: what comes again after that has its effect again, or is rejected; {cure}",
            ledger.table,
            duration_text(ledger.retention),
            duration_text(REPLAY_WINDOW),
        ))
    });
    Ok(short.collect())
}

/// Makes declared topics; answers their names.
fn create(missing: &[(&str, &str, &CreateTopic)], admin: &Admin) -> Result<BTreeSet<String>, Failure> {
    for (sink, topic, create) in missing {
        admin
            .create_topic(topic, create.partitions, create.replication.unwrap_or(-1), &create.config)
            .map_err(|e| asked(&e, &format!("cannot create topic {topic:?} of sink {sink}")))?;
    }
    Ok(missing.iter().map(|(_, topic, _)| (*topic).to_owned()).collect())
}

fn dead_letter_topic(
    plan: &Plan,
    stages: &[&Stage],
    admin: &Admin,
    infos: &BTreeMap<String, TopicInfo>,
) -> Result<Target, Failure> {
    let name = plan.dead_letters();
    let read: Vec<&TopicInfo> =
        stages.iter().flat_map(|stage| read_topics(&plan.topology, stage)).map(|(topic, _)| &infos[&topic]).collect();
    let partitions = read.iter().map(|info| info.partitions).max().unwrap_or(1);
    let largest = read.iter().map(|info| info.max_message_bytes).max().unwrap_or(1 << 20);
    // A letter keeps its record's time: any limit would delete that of an old record at once.
    let info = admin
        .unread_topic(&name, partitions, largest + DEAD_LETTER_ROOM)
        .map_err(|e| asked(&e, &format!("cannot create the dead-letter topic {name:?}")))?;
    let target = info.target(name.as_str());
    if target.compacted {
        return Err(Failure::refused(format!(
            "the dead-letter topic {name:?} is compacted: letters without a key are refused there, and of those with one \
             only the last is kept; set its cleanup.policy = delete"
        )));
    }
    if let Some(kept) = kept_by_time(&info) {
        tracing::warn!(
            topic = name,
            retention_ms = kept.as_millis(),
            "dead letters keep their records' times: those of older records are deleted soon; set retention.ms = -1"
        );
    }
    Ok(target)
}

/// How long a topic keeps a record after its own time; `None` is for ever.
fn kept_by_time(info: &TopicInfo) -> Option<Duration> {
    let deletes = info.cleanup_policy.split(',').any(|policy| policy.trim() == "delete");
    u64::try_from(info.retention_ms).ok().filter(|_| deletes).map(Duration::from_millis)
}

/// Topics of a stage's sinks that delete a record by its time while the topics that it reads still hold it, or that delete
/// what aggregates tell of events by the times of these: sink and what is wrong. Blocks.
pub fn retention_problems(plan: &Plan, stage: &Stage, admin: &Admin) -> Result<Vec<(String, String)>, Failure> {
    let written = written_topics(&plan.topology, stage);
    let own = plan.repartitions(stage);
    let reads: Vec<String> = plan.reads(stage).into_iter().filter(|topic| !own.contains(topic)).collect();
    let names: BTreeSet<String> =
        reads.iter().cloned().chain(written.iter().map(|(_, topic, _)| (*topic).to_owned())).collect();
    let infos = describe(admin, &names)?;
    // The one that is kept for longest; for ever before all others.
    let read = reads.into_iter().filter_map(|topic| Some((kept_by_time(infos.get(&topic)?), topic)));
    let Some((longest, topic)) = read.max_by_key(|(kept, _)| kept.unwrap_or(Duration::MAX)) else {
        return Ok(Vec::new());
    };
    let topology = &plan.topology;
    let short = written.into_iter().filter_map(|(sink, output, _)| {
        let kept = kept_by_time(infos.get(output)?)?;
        let id = NodeId(topology.nodes.iter().position(|node| node.name == sink)?);
        if topology.is_folded(id) && topology.sources_of(id).any(|source| source.event_time.is_some()) {
            let message = format!(
                "topic {output:?} keeps a record for {} after its own time, and updates have the event times of their \
                 records: those of older events are deleted soon after they are written; raise its retention.ms, or \
                 set cleanup.policy = compact",
                duration_text(kept)
            );
            return Some((sink.to_owned(), message));
        }
        (longest.is_none_or(|longest| kept < longest)).then(|| {
            let longest = longest.map_or("for ever".to_owned(), duration_text);
            let message = format!(
                "topic {output:?} keeps a record for {} after its own time, topic {topic:?} keeps it {longest}: outputs \
                 of records older than that are deleted soon after they are written; raise its retention.ms",
                duration_text(kept)
            );
            (sink.to_owned(), message)
        })
    });
    Ok(short.collect())
}

fn describe(admin: &Admin, names: &BTreeSet<String>) -> Result<BTreeMap<String, TopicInfo>, Failure> {
    let asked_for: Vec<&str> = names.iter().map(String::as_str).collect();
    let infos = admin.topics(&asked_for).map_err(|e| asked(&e, "cannot look at the topics"))?;
    Ok(infos.into_iter().filter_map(|(name, info)| Some((name, info?))).collect())
}

/// An error of a question at start: what the broker refuses is refused, anything else is a broker out of reach.
pub fn asked(error: &Error, what: &str) -> Failure {
    match error.disposition() {
        Disposition::Fatal(exit) => Failure::new(exit, format!("{what}: {error}")),
        Disposition::Retry => Failure::unreachable(format!("{what}: {error}")),
        Disposition::AbortTxn { .. } | Disposition::Fenced | Disposition::Rebuild | Disposition::Reject { .. } => {
            Failure::refused(format!("{what}: {error}"))
        }
    }
}

/// Records between each stage's committed positions and the last stable offsets; `None` where the broker does not
/// answer at once. Blocks for a moment.
pub fn lags(admin: &Admin, stages: &[&Stage], topics: &[StageTopics]) -> Vec<Option<i64>> {
    let admin = admin.within(Duration::from_millis(500));
    let lag = |(stage, topics): (&&Stage, &StageTopics)| {
        let partitions: Vec<TopicPartition> = topics.partitions().collect();
        let asked: Vec<_> = partitions.iter().map(|partition| (partition.clone(), At::Latest)).collect();
        let ends: BTreeMap<_, _> = admin.offsets(&asked, Isolation::ReadCommitted).ok()?.into_iter().collect();
        let positions = admin.committed(&stage.group, &partitions, false).ok()?;
        let behind = positions.into_iter().map(|(partition, at)| {
            let at = at.ok().flatten().map_or(0, |at| at.0);
            ends.get(&partition).copied().flatten().map_or(0, |end| (end.0 - at).max(0))
        });
        Some(behind.sum())
    };
    stages.iter().zip(topics).map(lag).collect()
}

impl StageTopics {
    /// Every partition that the stage reads.
    pub fn partitions(&self) -> impl Iterator<Item = TopicPartition> + '_ {
        self.sources.iter().flat_map(|(topic, _, info)| {
            (0..info.partitions).map(|partition| TopicPartition { topic: Arc::clone(topic), partition })
        })
    }
}
