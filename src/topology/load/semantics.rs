//! What expressions mean for each other: text against objects, and values that another attempt would change.

use super::aggregates;
use super::cx::Cx;
use super::joins;
use super::nodes::Draft;
use super::redelivery;
use crate::expr::{Program, Uses};
use crate::topology::finding::{Severity, code};
use crate::topology::spec::{Format, Guarantee, KafkaSink, NodeKind, Port, PostgresSink, SinkTombstones};

/// Checks expressions against what flows into their nodes.
pub fn check(cx: &mut Cx<'_>, guarantee: Guarantee, drafts: &[Draft], inputs: &[Vec<Port>]) {
    let Some(order) = flow_order(inputs) else { return };
    formats(cx, drafts, inputs, &order);
    identities(cx, drafts);
    coordinates(cx, drafts);
    unstable_keys(cx, drafts, inputs, &order);
    retention(cx, drafts, inputs, &order);
    aggregates::check(cx, drafts, inputs);
    joins::check(cx, drafts, inputs);
    for draft in drafts {
        if let Some(NodeKind::PostgresSink(sink)) = &draft.kind {
            deletes(cx, draft, sink);
            version(cx, drafts, draft, sink, inputs);
            redelivery::check(cx, guarantee, drafts, draft, sink, inputs);
        }
    }
}

/// Nodes after their inputs; none where they go in a circle.
fn flow_order(inputs: &[Vec<Port>]) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = Vec::new();
    let mut placed = vec![false; inputs.len()];
    while order.len() < inputs.len() {
        let next = (0..inputs.len()).find(|id| !placed[*id] && inputs[*id].iter().all(|port| placed[port.node.0]))?;
        placed[next] = true;
        order.push(next);
    }
    Some(order)
}

/// A format that the values at a node's input surely have, with the source that says so.
type Flow = Vec<(Format, usize)>;

fn formats(cx: &mut Cx<'_>, drafts: &[Draft], inputs: &[Vec<Port>], order: &[usize]) {
    let mut flows: Vec<Flow> = vec![Vec::new(); drafts.len()];
    for id in order {
        let draft = &drafts[*id];
        let streams = joins::streams(draft, &inputs[*id]);
        let mut flow: Flow = streams.iter().flat_map(|port| flows[port.node.0].clone()).collect();
        if let Some(NodeKind::Source(source)) = &draft.kind {
            flow.push((source.format, *id));
        }
        mismatches(cx, drafts, draft, &flow);
        // A program may parse text into an object, but an object stays one.
        if matches!(draft.kind, Some(NodeKind::Remap { .. } | NodeKind::FlatMap { .. })) {
            flow.retain(|(format, _)| *format == Format::Json);
        }
        if let Some(NodeKind::Aggregate(_) | NodeKind::Join(_)) = draft.kind {
            flow = vec![(Format::Json, *id)];
        }
        flows[*id] = flow;
    }
}

fn mismatches(cx: &mut Cx<'_>, drafts: &[Draft], draft: &Draft, flow: &Flow) {
    let json = flow.iter().find(|(format, _)| *format == Format::Json);
    let text = flow.iter().find(|(format, _)| *format != Format::Json);
    let by_member = match &draft.kind {
        Some(NodeKind::PostgresSink(sink)) => {
            sink.key.iter().chain(&sink.version).any(|name| column(sink, name).is_none())
        }
        _ => false,
    };
    if let Some((_, source)) = text.filter(|_| by_member) {
        let message = format!("{} takes JSON objects, but `{}` has other values", draft.what(), drafts[*source].name);
        cx.found.error(code::VALUE_FORMAT, draft.name_span.clone(), message).help(
            "its key and version are members of an object: make them by `columns`, or parse the text in a remap before",
        );
    }
    if let (Some((_, source)), Some(NodeKind::Join(_))) = (text, &draft.kind) {
        let message =
            format!("{} adds a member to JSON objects, but `{}` has other values", draft.what(), drafts[*source].name);
        cx.found
            .error(code::VALUE_FORMAT, draft.name_span.clone(), message)
            .help("make objects of them in a remap before");
    }
    for placed in cx.programs_of(&draft.name) {
        if placed.key.starts_with(aggregates::REDUCTION) {
            continue;
        }
        let uses = placed.program.uses();
        let members = || uses.reads.iter().find(|path| is_member(path));
        let (source, takes, member) = match (json, text, members()) {
            (Some((_, source)), _, _) if uses.text => (*source, "text", None),
            // Of `remap` and `flat_map` the value may have become an object by the time that it is read.
            (_, Some((_, source)), Some(member)) if !placed.assigns() => (*source, "an object", Some(member.clone())),
            _ => continue,
        };
        let holds = if takes == "text" { "JSON objects" } else { "text or bytes, which have no members" };
        let reads = member.map_or(String::new(), |member| format!(" (`{member}`)"));
        let message =
            format!("the expression takes the value for {takes}{reads}, but `{}` has {holds}", drafts[source].name);
        cx.found.error(code::VALUE_FORMAT, placed.span, message);
    }
}

/// A path into the value, as `.a`.
fn is_member(path: &str) -> bool {
    path.starts_with('.') && path != "."
}

/// Says of sources what their events are told apart by.
fn identities(cx: &mut Cx<'_>, drafts: &[Draft]) {
    for draft in drafts {
        let Some(NodeKind::Source(source)) = &draft.kind else { continue };
        if source.event_id.is_none() {
            let message = format!("events of {} are told apart by their place in the log", draft.what());
            cx.found.add(Severity::Note, code::COORDINATES_ID, draft.name_span.clone(), message).help(
                "what a producer sends twice is two events then; name the member that identifies one: event_id = \
                 \".id\"",
            );
        }
    }
}

/// Says of outputs that get an event's time that the broker deletes them by it.
fn retention(cx: &mut Cx<'_>, drafts: &[Draft], inputs: &[Vec<Port>], order: &[usize]) {
    let (mut timed, mut folded) = (vec![false; drafts.len()], vec![false; drafts.len()]);
    for id in order {
        let own = matches!(&drafts[*id].kind, Some(NodeKind::Source(source)) if source.event_time.is_some());
        timed[*id] = own || inputs[*id].iter().any(|port| timed[port.node.0]);
        let aggregate = matches!(&drafts[*id].kind, Some(NodeKind::Aggregate(_)));
        folded[*id] = aggregate || inputs[*id].iter().any(|port| folded[port.node.0]);
        let Some(NodeKind::KafkaSink(KafkaSink { create: Some(create), .. })) = &drafts[*id].kind else { continue };
        let limit = create.config.get("retention.ms").filter(|limit| timed[*id] && *limit != "-1");
        if let Some(limit) = limit {
            let message = format!("{} keeps records by their event time", drafts[*id].what());
            cx.found.add(Severity::Note, code::RETENTION, drafts[*id].name_span.clone(), message).help(format!(
                "an event that is older than retention.ms = {limit} when it comes is deleted soon after it is written"
            ));
        }
        let says = |setting: &str| create.config.contains_key(setting);
        if timed[*id] && folded[*id] && !says("retention.ms") && !says("cleanup.policy") {
            let message = format!("{} keeps updates by the event times of their records", drafts[*id].what());
            cx.found.add(Severity::Note, code::RETENTION, drafts[*id].name_span.clone(), message).help(
                "the broker's default, a week, deletes those of older records soon after they are written: say how long they \
                 stay, such as config = { \"retention.ms\" = -1 }, or keep the last of each key by { \"cleanup.policy\" = \
                 \"compact\" }",
            );
        }
    }
}

/// Warns of identities and keys that are made of a record's place in the log.
fn coordinates(cx: &mut Cx<'_>, drafts: &[Draft]) {
    for draft in drafts {
        let version = match &draft.kind {
            Some(NodeKind::PostgresSink(sink)) => sink.version.as_ref().map(|version| format!("columns.{version}")),
            _ => None,
        };
        let places = cx.programs_of(&draft.name).into_iter();
        let reads = |key: &str| {
            key == "event_id"
                || key == "key"
                || key == "group_by"
                || (key.starts_with("columns.") && Some(key) != version.as_deref())
        };
        for placed in places.filter(|placed| reads(&placed.key) && placed.program.uses().offset_or_partition) {
            let message = format!("`{}` is made of the record's place in the log", placed.key);
            cx.found.warning(code::COORDINATES, placed.span, message).help(
                "a dead letter that is replayed, or a record that is sent again, has another place: use what \
                 the record itself holds",
            );
        }
    }
}

/// A path whose value another attempt may change, and what changes it.
#[derive(Clone, PartialEq)]
pub(super) struct Unstable {
    pub(super) path: String,
    pub(super) node: String,
    pub(super) cause: String,
}

/// Warns of keys and versions that a program upstream makes by the clock, by chance or of a place in the log.
fn unstable_keys(cx: &mut Cx<'_>, drafts: &[Draft], inputs: &[Vec<Port>], order: &[usize]) {
    let mut flows: Vec<Vec<Unstable>> = vec![Vec::new(); drafts.len()];
    for id in order {
        let draft = &drafts[*id];
        let mut flow: Vec<Unstable> = Vec::new();
        let streams = joins::streams(draft, &inputs[*id]);
        for unstable in streams.iter().flat_map(|port| &flows[port.node.0]) {
            if !flow.contains(unstable) {
                flow.push(unstable.clone());
            }
        }
        report_unstable(cx, draft, &flow);
        if let Some(NodeKind::Remap { source, .. } | NodeKind::FlatMap { source, .. }) = &draft.kind {
            let expands = matches!(draft.kind, Some(NodeKind::FlatMap { .. }));
            let written = written_unstable(source.uses(), expands, &draft.name, &flow);
            flow.extend(written);
        }
        if let Some(NodeKind::Aggregate(aggregate)) = &draft.kind {
            flow = aggregates::unstable(aggregate, &flow);
        }
        if let (Some(NodeKind::Join(join)), Some(table)) = (&draft.kind, inputs[*id].get(streams.len())) {
            flow = joins::unstable(join, flow, &flows[table.node.0]);
        }
        flows[*id] = flow;
    }
}

fn written_unstable(uses: &Uses, expands: bool, node: &str, flow: &[Unstable]) -> Vec<Unstable> {
    let inherited = flow.iter().find(|unstable| uses.reads.iter().any(|path| overlap(path, &unstable.path)));
    let functions = &uses.nondeterministic_functions;
    let (node, cause) = match inherited {
        _ if !functions.is_empty() => (node.to_owned(), format!("`{}`", functions.join("`, `"))),
        _ if uses.offset_or_partition => (node.to_owned(), "the record's place in the log".to_owned()),
        Some(unstable) => (unstable.node.clone(), unstable.cause.clone()),
        None => return Vec::new(),
    };
    // What a flat_map gives is a new value as a whole.
    let whole = vec![".".to_owned()];
    let paths = if expands { &whole } else { &uses.writes };
    paths.iter().map(|path| Unstable { path: path.clone(), node: node.clone(), cause: cause.clone() }).collect()
}

fn report_unstable(cx: &mut Cx<'_>, draft: &Draft, flow: &[Unstable]) {
    let mut reads: Vec<(String, String, std::ops::Range<usize>)> = Vec::new();
    for placed in cx.programs_of(&draft.name) {
        let what = match &draft.kind {
            Some(NodeKind::KafkaSink(_) | NodeKind::Rekey { .. } | NodeKind::Join(_)) if placed.key == "key" => {
                "the key"
            }
            Some(NodeKind::Aggregate(_)) if placed.key == "group_by" => "the key",
            Some(NodeKind::PostgresSink(sink)) => match placed.key.strip_prefix("columns.") {
                Some(column) if Some(column) == sink.version.as_deref() => "the version",
                Some(column) if sink.key.iter().any(|key| key == column) => "the key",
                _ => continue,
            },
            _ => continue,
        };
        for path in &placed.program.uses().reads {
            reads.push((what.to_owned(), path.clone(), placed.span.clone()));
        }
    }
    if let Some(NodeKind::PostgresSink(sink)) = &draft.kind {
        let made = |column: &str| sink.columns.iter().any(|(name, _)| name == column);
        let columns =
            sink.key.iter().map(|key| ("the key", key)).chain(sink.version.iter().map(|v| ("the version", v)));
        for (what, column) in columns.filter(|(_, column)| !made(column)) {
            reads.push((what.to_owned(), format!(".{column}"), draft.name_span.clone()));
        }
    }
    for (what, path, span) in reads {
        let Some(unstable) = flow.iter().find(|unstable| overlap(&path, &unstable.path)) else { continue };
        let message = format!(
            "{what} of {} comes from `{}`, which `{}` makes of {}",
            draft.what(),
            unstable.path,
            unstable.node,
            unstable.cause
        );
        cx.found
            .warning(code::NONDETERMINISTIC, span, message)
            .help("processed again, the same record gets another one: make it of what the record holds");
    }
}

/// Whether one path holds the other.
pub(super) fn overlap(a: &str, b: &str) -> bool {
    let holds = |outer: &str, inner: &str| {
        outer == "." && inner.starts_with('.')
            || inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    holds(a, b) || holds(b, a)
}

fn column<'s>(sink: &'s PostgresSink, name: &str) -> Option<&'s Program> {
    sink.columns.iter().find(|(column, _)| column == name).map(|(_, program)| program)
}

/// A deleted row needs a key and a version, and a null value has neither.
fn deletes(cx: &mut Cx<'_>, draft: &Draft, sink: &PostgresSink) {
    if sink.tombstones != SinkTombstones::Delete {
        return;
    }
    // Without an expression the key is the record's, but a version is nowhere else than in the value.
    let of_value = |name: &str| column(sink, name).is_some_and(|program| program.uses().value);
    let Some(version) = &sink.version else { return };
    let no_version = column(sink, version).is_none() || of_value(version);
    let [key] = &sink.key[..] else {
        let message = format!("{} deletes by null values, whose only key is the record's: one column", draft.what());
        cx.found.error(code::TOMBSTONES_DELETE, draft.name_span.clone(), message);
        return;
    };
    let parts = [("key", key, "%key", of_value(key)), ("version", version, "%offset", no_version)];
    for (what, name, example, missing) in parts {
        if missing {
            let message = format!("{} deletes by null values, which hold no {what}", draft.what());
            let help = format!("make the column of metadata: columns = {{ {name} = \"{example}\" }}");
            cx.found.error(code::TOMBSTONES_DELETE, draft.name_span.clone(), message).help(help);
        }
    }
}

/// Offsets order what is in one partition, nothing else.
fn version(cx: &mut Cx<'_>, drafts: &[Draft], draft: &Draft, sink: &PostgresSink, inputs: &[Vec<Port>]) {
    let Some(version) = &sink.version else { return };
    let Some(program) = column(sink, version).filter(|program| program.uses().offset_or_partition) else { return };
    let index = drafts.iter().position(|other| std::ptr::eq(other, draft)).unwrap_or(0);
    let topics: usize = inputs[index].iter().map(|port| drafts[port.node.0].topics.len()).sum();
    let by_key = match &sink.key[..] {
        [key] => column(sink, key).is_some_and(|program| program.source().trim() == "%key"),
        _ => false,
    };
    if topics == 1 && by_key && program.source().trim() == "%offset" {
        return;
    }
    let span = cx.programs_of(&draft.name).into_iter().find(|placed| placed.key == format!("columns.{version}"));
    cx.found
        .error(
            code::VERSION_OFFSET,
            span.map_or(draft.name_span.clone(), |placed| placed.span),
            "an offset is a version only within one partition",
        )
        .help(
            "the key must stay in one: one topic, and a key that is the record's (columns = { KEY = \"%key\" }); \
         better a version that the record holds",
        );
}
