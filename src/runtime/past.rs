//! What the past of a job says against a start: topics made anew under their names, positions that were lost, and groups
//! that somebody else is in.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use uuid::Uuid;

use crate::commit::metadata::{is_copy, topic_id_of, topic_id_text};
use crate::error::{Disposition, Failure};
use crate::kafka::{Admin, At, CommittedWith, Group, Isolation, Member};
use crate::record::{Position, TopicPartition};
use crate::runtime::job_topic::{JobTopic, Kept, Memory, Note};
use crate::runtime::preflight::{Problem, StageTopics, asked};
use crate::runtime::reset;
use crate::topology::meaning::{Meaning, changed};
use crate::topology::plan::{CHANGELOG, Plan, PlannedStore, Stage};
use crate::topology::spec::NodeKind;

/// How long brokers may take to say who is in a group.
const LOOK: Duration = Duration::from_secs(3);

/// The name belongs to another topic than it did.
pub fn recreated(topic: &str, known: Uuid, now: Uuid, group: &str, file: &str) -> String {
    format!(
        "topic {topic:?} was deleted and made anew: the positions of group {group} are of the topic with the id {}, the \
         broker's has {}. Nothing of it was read; semel reset {file} sets positions in the new one",
        topic_id_text(known),
        topic_id_text(now)
    )
}

/// The position of a partition that was started is gone.
pub fn lost(partition: &TopicPartition, group: &str, file: &str) -> String {
    format!(
        "group {group} has no position in {partition} any more, although it was started: positions expire when nobody \
         is in the group for offsets.retention.minutes. Where to go on is not guessed; semel reset {file} sets it"
    )
}

/// The group's position is a copy of one that the stage's database keeps, but the file says that Kafka keeps them.
pub fn copied(partition: &TopicPartition, group: &str, file: &str) -> String {
    format!(
        "the position of {partition} in group {group} is a copy: the sink's database keeps the true one, and \
         progress = \"kafka\" would go on from the copy. With progress = \"postgres\", semel reset {file} --to latest \
         --json prints the positions and sets none; semel reset {file} --to FILE sets them with progress = \"kafka\""
    )
}

/// The position of a partition is not the one that its state belongs to.
pub fn set_outside(
    partition: &TopicPartition,
    position: Position,
    committed: Option<u64>,
    state: u64,
    group: &str,
    file: &str,
) -> String {
    let of = match committed {
        Some(revision) => format!("is of revision {revision} of the state"),
        None => "was set by somebody else".to_owned(),
    };
    format!(
        "the position {position} of {partition} in group {group} {of}, and the state is at revision {state}: records would \
         count again or not at all. Nothing was read; semel reset {file} clears the state and sets positions together with it"
    )
}

/// Kafka and the database kept positions in turn, and do not say the same.
pub fn disagree(partition: &TopicPartition, group: &str, kafka: Position, database: Position, file: &str) -> String {
    format!(
        "the position of {partition} is {kafka} in group {group}, which was set while Kafka kept it, and {database} in \
         semel.sink_offsets: the rows of one of them would be written twice or not at all. Nothing was read; semel \
         reset {file} sets the position in both"
    )
}

/// Whether the rows of a stage are guarded by their records' offsets: these order what is in one partition.
pub fn version_by_offset(plan: &Plan, stage: &Stage) -> bool {
    let Some(sink) = plan.postgres_sink(stage) else { return false };
    let version = sink.columns.iter().find(|(column, _)| Some(column) == sink.version.as_ref());
    version.is_some_and(|(_, program)| program.uses().offset_or_partition)
}

/// That a topic has more partitions than when a stage that tells versions by offsets began with it.
pub fn grown(topic: &str, first: i32) -> String {
    format!(
        "topic {topic:?} had {first} partitions when its records were first applied, and has more now: a key may be in \
         another partition than before, where offsets say nothing of its older records, and the version is the offset. \
         Take the version from a member of the record, or apply the topic to an empty table under another `name`"
    )
}

/// That a topic has more partitions than its state.
pub fn outgrown(topic: &str, file: &str) -> String {
    format!(
        "topic {topic:?} has more partitions than the state of its keys: a key may lie in another partition than before, \
         where nothing is known of it. semel reset {file} clears the state and sets where to begin anew with it"
    )
}

/// Refuses what the past forbids, all of it in one message, and has the topic remember this run. Blocks.
pub fn check(
    plan: &Plan,
    stages: &[&Stage],
    topics: &[StageTopics],
    admin: &Admin,
    job: &JobTopic,
    memory: &mut Memory,
) -> Result<(), Failure> {
    let mut problems = BTreeSet::new();
    let mut notes = Vec::new();
    for (stage, topics) in stages.iter().zip(topics) {
        // Who may not look is not kept from running, nor is who cannot: a broker of several may be away.
        match admin.within(LOOK).group(&stage.group) {
            Ok(group) => problems.extend(strangers(plan, stage, &group)),
            Err(error) => tracing::warn!(group = stage.group, %error, "who else is in the group is not known"),
        }
        if version_by_offset(plan, stage) {
            let grown = topics.sources.iter().filter_map(|(topic, _, info)| {
                let first = memory.first_partitions(&stage.name, topic).filter(|first| *first < info.partitions)?;
                Some(grown(topic, first))
            });
            problems.extend(grown);
        }
        let ids = topics.changelogs.iter().map(|(topic, info)| (topic.clone(), info.id)).collect();
        problems.extend(state(plan, stage, &ids, memory).into_iter().map(|problem| problem.message));
        notes.extend(states(plan, stage, memory));
        let partitions: Vec<TopicPartition> = topics.partitions().collect();
        let commits = admin.commits(&stage.group, &partitions, false);
        let commits = commits.map_err(|error| match error.disposition() {
            Disposition::Retry => Failure::unreachable(format!(
                "no coordinator of the consumer group {} answers: {error}. On a cluster with fewer brokers than \
                 offsets.topic.replication.factor it never will",
                stage.group
            )),
            _ => asked(&error, &format!("cannot read the positions of group {}", stage.group)),
        })?;
        let kept_here = !plan.keeps_positions(stage);
        problems.extend(lacking(plan, stage, &commits, memory, admin)?);
        for (partition, commit) in commits {
            // One that an open transaction holds is looked at when it is assigned.
            let Ok(commit) = commit else { continue };
            let id = topics.topic_ids[&*partition.topic];
            let started = memory.started(&stage.name, &partition);
            let known = commit.as_ref().and_then(|(_, metadata)| topic_id_of(metadata)).or(started);
            let file = &plan.topology.file;
            if kept_here && commit.as_ref().is_some_and(|(_, metadata)| is_copy(metadata)) {
                problems.insert(copied(&partition, &stage.group, file));
            }
            match (known, commit) {
                (Some(known), _) if known != id => {
                    problems.insert(recreated(&partition.topic, known, id, &stage.group, file));
                }
                // The database knows the position; where it does not, the claim says so.
                (_, None) if started.is_some() && kept_here => {
                    problems.insert(lost(&partition, &stage.group, file));
                }
                (_, Some(_)) if started.is_none() => notes.push(Note::started(&stage.name, &partition, id)),
                _ => {}
            }
        }
        let changelogs = topics.changelogs.iter().map(|(topic, info)| (topic.as_str(), info));
        for (topic, info) in topics.sources.iter().map(|(topic, _, info)| (&**topic, info)).chain(changelogs) {
            memory.topics.entry((stage.name.clone(), topic.to_string())).or_insert_with(|| {
                notes.push(Note::topic(&stage.name, topic, info.id, info.partitions));
                (info.id, info.partitions)
            });
        }
    }
    if !problems.is_empty() {
        return Err(Failure::refused(Vec::from_iter(problems).join("\n  ")));
    }
    if memory.fingerprint.as_ref() != Some(&plan.topology.fingerprint) {
        if memory.fingerprint.is_some() {
            tracing::info!(file = plan.topology.file, "the file is another one than at the last run");
        }
        notes.push(Note::plan(plan));
    }
    job.remember(&notes)
}

/// What the past says against the state of a stage: it would be empty where positions are not, or tell of something else.
/// `changelogs`: those that are there, with their ids.
pub fn state(plan: &Plan, stage: &Stage, changelogs: &BTreeMap<String, Uuid>, memory: &Memory) -> Vec<Problem> {
    let file = &plan.topology.file;
    let known: BTreeMap<&str, Uuid> = memory.changelogs(&stage.name).collect();
    let stores = plan.stores(stage);
    let left = left(plan, stage, memory);
    let renamed = |meaning: &Meaning| {
        // What the job ran without already has a note, and is none that was renamed now.
        let gone = left.iter().filter(|node| !memory.kept(&stage.name, node).is_some_and(|kept| kept.left));
        let mut gone = gone.map(|node| (node, memory.kept(&stage.name, node)));
        gone.find(|(_, kept)| kept.is_none_or(|kept| kept.meaning == *meaning)).map(|(node, _)| node.clone())
    };
    let mut problems = Vec::new();
    for PlannedStore { node: id, changelog, .. } in &stores {
        let (node, meaning) = (&plan.topology.nodes[id.0].name, plan.topology.meaning(*id));
        let kept = memory.kept(&stage.name, node);
        let changed = kept.map(|kept| changed(&kept.meaning, &meaning)).unwrap_or_default();
        let message = match known.get(&**changelog) {
            None => renamed(&meaning).map(|former| {
                format!(
                    "the state of {node:?} would begin with nothing, and that of {former:?} is in no use any more: a \
                     renamed node keeps its state under its former name. Give it that back; or semel reset {file} \
                     clears all state and sets where to begin anew"
                )
            }),
            Some(id) if changelogs.get(changelog) != Some(id) => Some(format!(
                "topic {changelog:?}, from which state is restored, was deleted and made anew: the state is gone, and the \
                 positions of group {} are not. semel reset {file} sets where to begin anew, with no state",
                stage.group
            )),
            Some(_) if kept.is_some_and(|kept| kept.left) => Some(format!(
                "{node:?} is in the file again, but the job ran without it: its state in topic {changelog:?} lacks what \
                 passed meanwhile. Give it another name, under which it begins with nothing; or semel reset {file} \
                 clears all state and sets where to begin anew"
            )),
            Some(_) if !changed.is_empty() => Some(format!(
                "the state of {node:?} in topic {changelog:?} tells of something else: {}. Give the node its former shape \
                 back, or another name, under which it begins with nothing; or semel reset {file} clears all state and \
                 sets where to begin anew",
                changed.join("; ")
            )),
            Some(_) => None,
        };
        let setting = vec!["transforms".to_owned(), node.clone()];
        problems.extend(message.map(|message| Problem { setting, message }));
    }
    problems
}

/// The nodes whose state is known of and that the file does not have any more.
fn left(plan: &Plan, stage: &Stage, memory: &Memory) -> BTreeSet<String> {
    let stores = plan.stores(stage);
    let topics = memory.changelogs(&stage.name).map(|(topic, _)| topic);
    let gone = topics.filter(|topic| stores.iter().all(|store| store.changelog != **topic));
    let node =
        |topic: &str| topic.strip_prefix(&format!("{}.", stage.name))?.strip_suffix(CHANGELOG).map(str::to_owned);
    gone.filter_map(node).collect()
}

/// What is to be remembered of the state of a stage from this run on.
fn states(plan: &Plan, stage: &Stage, memory: &Memory) -> Vec<Note> {
    let name = &plan.topology.name;
    let stores = plan.stores(stage).into_iter().map(|store| {
        let kept = Kept { meaning: plan.topology.meaning(store.node), left: false };
        (plan.topology.nodes[store.node.0].name.clone(), kept)
    });
    let left = left(plan, stage, memory).into_iter().map(|node| {
        tracing::warn!(stage = stage.name, "no node of the file keeps its state in {name}.{node}{CHANGELOG} any more");
        let kept = memory.kept(&stage.name, &node).cloned().unwrap_or_default();
        (node, Kept { left: true, ..kept })
    });
    let new = stores.chain(left).filter(|(node, kept)| memory.kept(&stage.name, node) != Some(kept));
    new.map(|(node, kept)| Note::store(&stage.name, &node, &kept)).collect()
}

/// Tables that would lack rows: their state is new, and the group has read part of their topic, or what an aggregate told
/// before.
fn lacking(
    plan: &Plan,
    stage: &Stage,
    commits: &[CommittedWith],
    memory: &Memory,
    admin: &Admin,
) -> Result<Vec<String>, Failure> {
    let is_new = |store: &PlannedStore| memory.changelogs(&stage.name).all(|(known, _)| known != store.changelog);
    let (of_topics, begins_anew) = (reset::tables(plan, stage), memory.changelogs(&stage.name).next().is_none());
    let is_table = |store: &PlannedStore| matches!(plan.topology.nodes[store.node.0].kind, NodeKind::Table);
    let mut problems = Vec::new();
    for store in plan.stores(stage).iter().filter(|store| is_table(store) && is_new(store)) {
        let committed = commits.iter().filter(|(partition, _)| *partition.topic == *store.source);
        let at: Vec<_> = committed.filter_map(|(p, at)| Some((p.clone(), at.as_ref().ok()?.as_ref()?.0))).collect();
        let question: Vec<_> = at.iter().map(|(partition, _)| (partition.clone(), At::Earliest)).collect();
        if question.is_empty() {
            continue;
        }
        if !of_topics.contains(&store.source) {
            // An aggregate that begins anew, too, tells of every key again.
            if !begins_anew && at.iter().any(|(_, at)| *at > Position(0)) {
                problems.push(lacks(plan, stage, store));
            }
            continue;
        }
        let begins = admin.offsets(&question, Isolation::ReadCommitted);
        let begins = begins.map_err(|e| asked(&e, &format!("cannot look at topic {:?}", store.source)))?;
        let begins: BTreeMap<_, _> = begins.into_iter().collect();
        if at.iter().any(|(partition, at)| begins.get(partition).copied().flatten().is_some_and(|begin| *at > begin)) {
            problems.push(lacks(plan, stage, store));
        }
    }
    Ok(problems)
}

fn lacks(plan: &Plan, stage: &Stage, store: &PlannedStore) -> String {
    format!(
        "table {} is new, and group {} has read part of topic {:?}, whose rows it would lack: semel reset {} begins anew, \
         with all state cleared",
        plan.topology.nodes[store.node.0].name, stage.group, store.source, plan.topology.file
    )
}

/// Members of a stage's group that are not the stage's: they would take partitions and leave their records unprocessed.
fn strangers(plan: &Plan, stage: &Stage, group: &Group) -> Option<String> {
    let own = format!("{}.{}.", plan.topology.name, stage.name);
    let reads: BTreeSet<String> = plan.reads(stage).into_iter().chain([plan.retry(stage)]).collect();
    let strange = |member: &&Member| {
        // A file that was changed may read less or more than the one that still runs; but not something else.
        let mut topics = member.partitions.iter().map(|partition| &*partition.topic).peekable();
        let other_job = topics.peek().is_some() && !topics.any(|topic| reads.contains(topic));
        !member.client_id.starts_with(&own) || other_job
    };
    let member = group.members.iter().find(strange)?;
    let topics: BTreeSet<&str> = member.partitions.iter().map(|partition| &*partition.topic).collect();
    let reads = match topics.is_empty() {
        true => "no partition yet".to_owned(),
        false => Vec::from_iter(topics).join(", "),
    };
    Some(format!(
        "the consumer group {} is in use by another program: member {} ({}) reads {reads}. Two programs in one group \
         take each other's records away; stop that one, or give this topology another `name`",
        stage.group, member.client_id, member.host
    ))
}
