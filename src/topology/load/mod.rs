//! Reads a file and reports all that is wrong with it in one run.

use std::ops::Range;

use sha2::{Digest, Sha256};
use toml::de::{DeTable, DeValue};

use super::finding::{Finding, Findings, code};
use super::keys;
use super::spec::{Kafka, Membership, Node, NodeKind, Topology};
use cx::{Cx, Item, Table};
use nodes::{Draft, Part};

mod aggregates;
mod cases;
mod cx;
mod expressions;
mod graph;
mod interpolate;
mod joins;
mod kafka;
mod kafka_properties;
mod nodes;
mod postgres;
mod read;
mod redelivery;
mod semantics;
mod sinks;
mod sources;
#[cfg(test)]
mod tests;
mod toml_string;
mod top;
mod topics;
mod transforms;
pub mod units;
mod values;

pub use cases::DEAD_LETTERS;
pub use graph::UNMATCHED;
pub use read::{duration_text, one_of};
pub use redelivery::REPLAY_WINDOW;

/// A file that was read.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The topology, if no finding is an error.
    pub topology: Option<Topology>,
    /// In the order of the file.
    pub findings: Vec<Finding>,
}

/// Parses and checks the text of a topology file. `file` is its name in findings, `env` answers variables. Pure: it
/// reads no file and no environment of its own.
pub fn load(text: &str, file: &str, env: &dyn Fn(&str) -> Option<String>) -> Loaded {
    let mut cx =
        Cx { text, env, found: Findings::new(file, text), unset: Vec::new(), node: None, programs: Vec::new() };
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let span = error.span().unwrap_or(0..0);
        cx.found.error(code::SYNTAX, span, error.message());
    }
    let root = Item::new(root.span(), DeValue::Table(root.into_inner()));
    let topology = topology(&mut cx, &root, file);
    let unset = std::mem::take(&mut cx.unset);
    let findings = cx.found.finish();
    let good = !findings.iter().any(Finding::is_error);
    let mut topology = topology.filter(|_| good).map(|topology| Topology { unset, ..topology });
    // Only now is it sure that nodes do not go in a circle.
    topology.iter_mut().for_each(aggregates::regroup);
    topology.iter_mut().for_each(aggregates::bound_times);
    Loaded { topology, findings }
}

/// Bytes of the file where a setting stands, such as `["sinks", "orders_table", "table"]`: its value; where there is
/// none,
/// the name of the innermost table on the way that there is. For findings of what is only known outside the file.
pub fn locate(text: &str, path: &[&str]) -> Range<usize> {
    let (root, _) = DeTable::parse_recoverable(text);
    let mut entries = root.get_ref();
    let mut span = 0..0;
    for name in path {
        let Some((key, item)) = entries.get_key_value(*name) else { return span };
        match item.get_ref() {
            DeValue::Table(inner) => (entries, span) = (inner, key.span()),
            _ => return item.span(),
        }
    }
    span
}

fn topology(cx: &mut Cx<'_>, root: &Item<'_>, file: &str) -> Option<Topology> {
    let top = cx.table(root, 0..0, &keys::TOP, "the file")?;
    let name = cx.required_string(&top, "name", "such as name = \"orders\"");
    if let Some(name) = name.as_ref().filter(|name| !name.unset) {
        nodes::check_name(cx, &name.value, &name.shown, name.span.clone(), "topology");
    }
    let settings = top::settings(cx, &top);
    let kafka = kafka_table(cx, &top, &settings);
    // Where the broker assigns, it refuses a static member's successor until the session of a crashed one has ended.
    let broker_assigns = kafka.as_ref().is_some_and(Kafka::broker_assigns);
    let usual = if broker_assigns { Membership::Dynamic } else { Membership::Static };
    let drafts = drafts(cx, &top);
    joins::strategy(cx, kafka.as_ref(), &drafts);
    check_names(cx, name.as_ref().map(|name| name.value.as_str()), &drafts);
    let inputs = graph::connect(cx, &drafts);
    semantics::check(cx, settings.guarantee, &drafts, &inputs);
    topics::check_topics(cx, name.as_ref().map(|name| name.value.as_str()), &drafts);
    let drill = top::drill(cx, &top);
    let tests = top.get("tests").map(|item| cases::read(cx, item, &drafts)).unwrap_or_default();

    let of_tables: Vec<bool> =
        drafts.iter().zip(&inputs).map(|(draft, inputs)| joins::of_tables(&drafts, draft, inputs)).collect();
    let nodes = drafts.into_iter().zip(inputs).zip(of_tables).map(|((mut draft, inputs), of_tables)| {
        if let Some(NodeKind::Join(join)) = &mut draft.kind {
            join.of_tables = of_tables;
        }
        let on_error = draft.on_error.unwrap_or(settings.on_error);
        Some(Node { name: draft.name, inputs, on_error, kind: draft.kind? })
    });
    Some(Topology {
        file: file.to_owned(),
        name: name?.value,
        guarantee: settings.guarantee,
        commit_interval: settings.commit_interval,
        batch_records: settings.batch_records,
        workers: settings.workers,
        memory: settings.memory,
        shutdown_timeout: settings.shutdown_timeout,
        transaction_timeout: settings.transaction_timeout,
        session_timeout: settings.session_timeout,
        membership: settings.membership.unwrap_or(usual),
        instance: settings.instance,
        state_dir: settings.state_dir,
        stores: settings.stores,
        max_task_idle: settings.max_task_idle,
        on_error: settings.on_error,
        audit: settings.audit,
        kafka: kafka?,
        nodes: nodes.collect::<Option<_>>()?,
        tests,
        drill,
        unset: Vec::new(),
        fingerprint: fingerprint(cx.text),
    })
}

fn kafka_table(cx: &mut Cx<'_>, top: &Table<'_>, settings: &top::Settings) -> Option<Kafka> {
    let timeouts = kafka::Timeouts { transaction: settings.transaction_timeout, session: settings.session_timeout };
    match top.get("kafka") {
        Some(item) => kafka::read(cx, item, top.key_span("kafka"), &timeouts),
        None => {
            let help = "add [kafka] with brokers = \"${KAFKA_BROKERS:-localhost:9092}\"";
            cx.missing(top, "kafka", help);
            None
        }
    }
}

/// All nodes in the order of the file.
fn drafts(cx: &mut Cx<'_>, top: &Table<'_>) -> Vec<Draft> {
    let mut drafts = Vec::new();
    for (name, part, types, later, needed) in [
        ("sources", Part::Source, sources::TYPES, sources::LATER, true),
        ("transforms", Part::Transform, transforms::TYPES, transforms::LATER, false),
        ("sinks", Part::Sink, sinks::TYPES, sinks::LATER, true),
    ] {
        let before = drafts.len();
        if let Some(item) = top.get(name) {
            nodes::read_nodes(cx, item, part, types, later, &mut drafts);
        }
        if needed && drafts.len() == before {
            let word = part.word();
            cx.found
                .error(code::EMPTY_TOPOLOGY, top.key_span(name), format!("the file has no {word}"))
                .help(format!("add a table [{name}.NAME] with type = \"kafka\""));
        }
    }
    drafts.sort_by_key(|draft: &Draft| draft.name_span.start);
    drafts
}

fn check_names(cx: &mut Cx<'_>, name: Option<&str>, drafts: &[Draft]) {
    for (i, draft) in drafts.iter().enumerate() {
        if let Some(other) = drafts[..i].iter().find(|other| other.name == draft.name) {
            let (line, _) = cx.found.position(other.name_span.start);
            let message = format!("{} has the name of the {} in line {line}", draft.what(), other.part.word());
            cx.found
                .error(code::DUPLICATE_NAME, draft.name_span.clone(), message)
                .help("names are unique in the file, since inputs refer to nodes by name alone");
        }
        if draft.name == DEAD_LETTERS {
            let message = format!("`{DEAD_LETTERS}` is what tests call the dead-letter topic");
            cx.found.error(code::RESERVED_NAME, draft.name_span.clone(), message).help("give the node another name");
        }
        if draft.postgres && Some(draft.name.as_str()) == name {
            let message = format!("{} has the name of the file, which is the name of its Kafka stage", draft.what());
            cx.found
                .error(code::RESERVED_NAME, draft.name_span.clone(), message)
                .help("a Postgres sink is a stage of its own: give it another name");
        }
    }
}

/// SHA-256 of the text in hex.
fn fingerprint(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}
