//! `type = "aggregate"`: its fields, and whether the records of a key meet in one partition.

use std::collections::BTreeSet;
use std::time::Duration;

use toml::de::DeValue;

use super::cx::{Cx, Item, Table, in_order, is_hole};
use super::joins;
use super::nodes::Draft;
use super::read::one_of;
use super::semantics::{Unstable, overlap};
use crate::expr::Role;
use crate::topology::finding::{code, did_you_mean};
use crate::topology::keys;
use crate::topology::spec::{
    Aggregate, AggregateTombstones, Emit, Field, Function, Join, JoinKind, Late, Node, NodeId, NodeKind, Port,
    RETRACTED, Repartition, Topology, WINDOW_END, WINDOW_START, Window, WindowKind,
};

const HELP: &str = "such as fields = { orders = \"count\", revenue = { sum = '.total' } }";
const LIMIT: usize = 1000;
/// A hundred years: arithmetic on times is safe up to there.
const LONGEST_MS: i64 = 100 * 366 * 24 * 3600 * 1000;

pub fn read(cx: &mut Cx<'_>, table: &Table<'_>, draft: &mut Draft) {
    let key_field = cx.string(table, "key_field").map_or_else(|| "key".to_owned(), |text| text.value);
    let words = [("drop", AggregateTombstones::Drop), ("reject", AggregateTombstones::Reject)];
    let tombstones = cx.choice(table, "tombstones", &words).unwrap_or(AggregateTombstones::Drop);
    let group_by = cx.expression(table, "group_by", Role::Value);
    let group_by_fails = table.get("group_by").is_some() && group_by.is_none();
    let window = table.get("window").map(|item| window(cx, table, item));
    let Some(item) = table.get("fields") else {
        cx.missing(table, "fields", HELP);
        return;
    };
    let Some(entries) = cx.entries(item, "`fields`") else { return };
    if entries.is_empty() {
        cx.found.error(code::INVALID_VALUE, item.span(), "`fields` is empty").help(HELP);
    }
    let mut fields = Vec::new();
    let session = window.flatten().filter(|window| matches!(window.kind, WindowKind::Session { .. }));
    for (name, item) in in_order(entries) {
        let retracted = session.is_some_and(|window| window.emit == Emit::Update) && name.get_ref() == RETRACTED;
        if window.is_some() && (name.get_ref() == WINDOW_START || name.get_ref() == WINDOW_END || retracted) {
            let message = format!("the field `{}` has the name of a member that holds the window", name.get_ref());
            cx.found.error(code::DUPLICATE_NAME, name.span(), message).help("give the field another name");
        }
        if *name.get_ref() == *key_field {
            let message = format!("the field `{key_field}` has the name of the member that holds the key");
            cx.found
                .error(code::DUPLICATE_NAME, name.span(), message)
                .help("give the field another name, or the key's member: key_field = \"customer_id\"");
        }
        let field = field(cx, name.get_ref(), name.span(), item);
        if let Some(field) = &field {
            merges(cx, field, name.span(), item, session.is_some());
        }
        fields.push(field);
    }
    let complete = !group_by_fails
        && window.is_none_or(|window| window.is_some())
        && !fields.is_empty()
        && fields.iter().all(Option::is_some);
    draft.kind = complete.then(|| {
        let fields = fields.into_iter().flatten().collect();
        let window = window.flatten();
        NodeKind::Aggregate(Aggregate { group_by, key_field, fields, tombstones, window })
    });
}

/// The kinds of windows, by the key that gives the length, and what such a table looks like.
const KINDS: [(&str, &str); 3] = [
    ("tumbling", "window = { tumbling = \"1m\", grace = \"10s\" }"),
    ("hopping", "window = { hopping = \"10m\", advance = \"1m\", grace = \"10s\" }"),
    ("session", "window = { session = \"30m\", grace = \"10s\" }"),
];
/// Windows that a record may be in: it changes each of them.
const OVERLAPS: i64 = 1000;

fn window(cx: &mut Cx<'_>, table: &Table<'_>, item: &Item<'_>) -> Option<Window> {
    let window = cx.table(item, table.key_span("window"), &keys::WINDOW, "`window`")?;
    let given: Vec<_> = KINDS.iter().filter(|(kind, _)| window.entries.contains_key(*kind)).collect();
    let grace = window.get("grace").map(|_| cx.duration(&window, "grace", Duration::ZERO));
    let emit = cx.choice(&window, "emit", &[("update", Emit::Update), ("close", Emit::Close)]);
    let late = cx.choice(&window, "late", &[("drop", Late::Drop), ("reject", Late::Reject)]);
    let idle = window.get("idle").map(|_| cx.duration(&window, "idle", Duration::from_secs(1)));
    if idle.is_some() && emit != Some(Emit::Close) {
        let message = "`idle` has no use: with emit = \"update\" every window is put out before it closes";
        cx.found
            .error(code::INVALID_VALUE, window.key_span("idle"), message)
            .help("leave it out, or put windows out when they close: emit = \"close\"");
    }
    let ms = |duration: Duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).min(LONGEST_MS);
    let [(word, such_as)] = given[..] else {
        let words: Vec<String> = KINDS.iter().map(|(kind, _)| format!("`{kind}`")).collect();
        if given.len() > 1 {
            let message = format!("a window is of one kind, not {}", given.len());
            cx.found
                .error(code::INVALID_VALUE, window.span.clone(), message)
                .help(format!("one of {}", one_of(&words)));
        } else {
            cx.missing(&window, "tumbling", format!("or {}: such as {}", one_of(&words[1..]), KINDS[0].1));
        }
        return None;
    };
    let length = cx.duration(&window, word, Duration::from_millis(1)).map(ms);
    let advance = window.get("advance").map(|item| (item, cx.duration(&window, "advance", Duration::from_millis(1))));
    let kind = match (*word, advance) {
        ("hopping", None) => {
            cx.missing(&window, "advance", format!("how far apart windows begin: such as {such_as}"));
            None
        }
        ("hopping", Some((item, advance))) => {
            let (size_ms, advance_ms) = (length?, ms(advance?));
            if advance_ms > size_ms {
                let message = "`advance` is longer than the windows are: records between two of them would be in none";
                cx.found.error(code::INVALID_VALUE, item.span(), message).help("make it as long or shorter");
            } else if size_ms / advance_ms > OVERLAPS {
                let overlaps = size_ms / advance_ms;
                let message = format!("a record would be in {overlaps} windows, and change each of them");
                cx.found
                    .error(code::INVALID_VALUE, item.span(), message)
                    .help(format!("make `advance` longer: at most {OVERLAPS} windows overlap"));
            }
            Some(WindowKind::Aligned { size_ms, advance_ms })
        }
        (_, Some(_)) => {
            let message = format!("`{word}` windows have no `advance`");
            cx.found
                .error(code::INVALID_VALUE, window.key_span("advance"), message)
                .help(format!("windows that overlap are hopping ones: such as {}", KINDS[1].1));
            None
        }
        ("session", None) => Some(WindowKind::Session { gap_ms: length? }),
        (_, None) => length.map(|size_ms| WindowKind::Aligned { size_ms, advance_ms: size_ms }),
    };
    let grace_ms = ms(grace.unwrap_or(Some(Duration::ZERO))?);
    let idle_ms = match idle {
        Some(idle) => Some(ms(idle?)),
        None => None,
    };
    let (emit, late) = (emit.unwrap_or(Emit::Update), late.unwrap_or(Late::Drop));
    Some(Window { kind: kind?, grace_ms, emit, late, idle_ms })
}

/// A record may join two sessions: a reduction has to say what its two values come to.
fn merges(cx: &mut Cx<'_>, field: &Field, name_span: std::ops::Range<usize>, item: &Item<'_>, sessions: bool) {
    let name = &field.name;
    let merge = match item.get_ref() {
        DeValue::Table(entries) => entries.get_key_value("merge"),
        _ => None,
    };
    match merge {
        None if sessions && field.function == Function::Reduce => {
            let message = format!("the reduction `{name}` does not say what it makes of two sessions that become one");
            cx.found.error(code::MISSING_KEY, name_span, message).help(
                "add merge = '…': an expression of `.acc`, the earlier session's value, and `.other`, the later one's",
            );
        }
        Some((key, _)) if field.function != Function::Reduce => {
            let message = format!("`{}` knows how to merge: it has no `merge`", field.function.as_str());
            cx.found.error(code::INVALID_VALUE, key.span(), message).help("`merge` is for `reduce`");
        }
        Some((key, _)) if !sessions => {
            let message = "only sessions are merged, and this aggregate has none";
            cx.found
                .error(code::INVALID_VALUE, key.span(), message)
                .help("leave it out, or group by sessions: window = { session = \"30m\" }");
        }
        _ => {}
    }
}

fn field(cx: &mut Cx<'_>, name: &str, name_span: std::ops::Range<usize>, item: &Item<'_>) -> Option<Field> {
    match item.get_ref() {
        DeValue::String(word) if word == Function::Count.as_str() => {
            Some(Field { name: name.to_owned(), function: Function::Count, of: None, merge: None, limit: LIMIT })
        }
        DeValue::String(word) => {
            let known = Function::WORDS.iter().any(|(function, _)| *function == word);
            let message = match known {
                true => format!("`{word}` needs an expression: what of a record it is given"),
                false => format!("a field is \"count\" or a table such as {{ sum = '.total' }}, not \"{word}\""),
            };
            let help = match known {
                true => Some(format!("such as {name} = {{ {word} = '.total' }}")),
                false => did_you_mean(word, Function::WORDS.iter().map(|(function, _)| *function)),
            };
            cx.found.error(code::INVALID_VALUE, item.span(), message).maybe_help(help);
            None
        }
        DeValue::Table(_) => function(cx, name, name_span, item),
        _ if is_hole(item) => None,
        _ => {
            cx.wrong_type(name, item, "\"count\" or a table such as { sum = '.total' }");
            None
        }
    }
}

fn function(cx: &mut Cx<'_>, name: &str, name_span: std::ops::Range<usize>, item: &Item<'_>) -> Option<Field> {
    let table = cx.table(item, name_span.clone(), &keys::FIELD, format!("field `{name}`"))?;
    let of_expression = || Function::WORDS.iter().filter(|(_, function)| *function != Function::Count);
    let given: Vec<_> = of_expression().filter(|(word, _)| table.entries.contains_key(*word)).collect();
    let [(word, function)] = given[..] else {
        let words: Vec<String> = of_expression().map(|(word, _)| format!("`{word}`")).collect();
        // A typing error in the one key has its finding already.
        if given.len() > 1 || table.entries.keys().all(|key| table.section.has(key.get_ref())) {
            let message = format!("field `{name}` needs one function, not {}", given.len());
            cx.found.error(code::INVALID_VALUE, name_span, message).help(format!("one of {}", one_of(&words)));
        }
        return None;
    };
    let limit = cx.integer(&table, "limit", 1..=100_000);
    if table.get("limit").is_some() && !function.keeps_values() {
        cx.found
            .error(code::INVALID_VALUE, table.key_span("limit"), format!("`{word}` keeps one value: it has no `limit`"))
            .help("`limit` bounds `distinct_count` and `collect`");
    }
    let item = table.get(word)?;
    let of = cx.expression_item(&place(name, *function), item, Role::Value)?;
    let merge = match table.get("merge") {
        Some(item) => Some(cx.expression_item(&format!("{REDUCTION}{name}.merge"), item, Role::Value)?),
        None => None,
    };
    let limit = limit.map_or(LIMIT, |limit| limit as usize);
    Some(Field { name: name.to_owned(), function: *function, of: Some(of), merge, limit })
}

/// What the place of a reduction begins with: its `.` is not the record's value.
pub const REDUCTION: &str = "reduce.";

fn place(name: &str, function: Function) -> String {
    if function == Function::Reduce { format!("{REDUCTION}{name}") } else { format!("fields.{name}") }
}

/// Reports nodes with state that would meet the records of one key in several partitions: each would keep its own part.
pub fn check(cx: &mut Cx<'_>, drafts: &[Draft], inputs: &[Vec<Port>]) {
    for (id, draft) in drafts.iter().enumerate().filter(|(_, draft)| groups(draft) == Some(false)) {
        let above = above(drafts, inputs, id);
        if let Some(rekey) = above.iter().find(|id| matches!(drafts[**id].kind, Some(NodeKind::Rekey { .. }))) {
            let message =
                format!("{} comes behind `{}`, which gives records another key", draft.what(), drafts[*rekey].name);
            let (code, cure) = scattered(draft);
            cx.found
                .error(code, draft.name_span.clone(), message)
                .help(format!("records of the new key lie in all partitions: {cure}"));
        }
        let regrouped = above.iter().filter(|id| groups(&drafts[**id]) == Some(true));
        let regrouped = regrouped.map(|id| format!("what `{}` groups", drafts[*id].name));
        let topics = above.iter().flat_map(|id| &drafts[*id].topics).map(|topic| topic.value.clone());
        let topics: BTreeSet<String> = topics.chain(regrouped).collect();
        // Tables that are joined have a topic each.
        if topics.len() > 1 && !joins::of_tables(drafts, draft, &inputs[id]) {
            let topics = Vec::from_iter(topics);
            let message = format!("{} takes from several topics: {}", draft.what(), topics.join(", "));
            let (code, cure) = scattered(draft);
            cx.found
                .error(code, draft.name_span.clone(), message)
                .help(format!("their partitions may be with several workers: {cure}"));
        }
    }
}

/// What to say of a node with state whose records lie anywhere, and the cure.
fn scattered(draft: &Draft) -> (&'static str, &'static str) {
    match &draft.kind {
        Some(NodeKind::Table) => (
            code::TABLE_KEY,
            "write them under that key to a topic, in a job of their own, and make the table of that topic",
        ),
        Some(NodeKind::Join(_)) => (
            code::TABLE_KEY,
            "bring those of a key together here, as with key = '.customer_id', or by the key that they have: key = \"%key\"",
        ),
        _ => (
            code::AGGREGATE_KEY,
            "bring those of a key together here, as with group_by = '.customer_id', or by the key that they have: \
             group_by = \"%key\"",
        ),
    }
}

/// Whether a node with state brings the records of a key together itself; none for another node.
fn groups(draft: &Draft) -> Option<bool> {
    match &draft.kind {
        Some(NodeKind::Aggregate(aggregate)) => Some(aggregate.group_by.is_some()),
        Some(NodeKind::Join(join)) => Some(join.key.is_some()),
        Some(NodeKind::Table) => Some(false),
        _ => None,
    }
}

/// All nodes that a node's records come through, each once, up to where they were brought together by key.
pub fn above(drafts: &[Draft], inputs: &[Vec<Port>], of: usize) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![of];
    while let Some(id) = waiting.pop() {
        let all = joins::of_tables(drafts, &drafts[id], &inputs[id]);
        let ports = if all { &inputs[id][..] } else { joins::streams(&drafts[id], &inputs[id]) };
        let new = ports.iter().map(|port| port.node.0).filter(|id| found.insert(*id));
        waiting.extend(new.filter(|id| groups(&drafts[*id]) != Some(true)));
    }
    found
}

/// Puts a topic before every aggregate that groups by something else than the key its records have, and before every join
/// that looks up by something else: a node that writes it and one that reads it. They are named after the node that they are
/// made for, which is what messages name.
pub fn regroup(topology: &mut Topology) {
    for id in 0..topology.nodes.len() {
        let format = topology.format_into(NodeId(id));
        let next = topology.nodes.len();
        let (name, node) = (topology.name.clone(), &mut topology.nodes[id]);
        let (key, tombstones, null_keys) = match &node.kind {
            NodeKind::Aggregate(Aggregate { group_by: Some(key), tombstones, .. }) => (key, *tombstones, false),
            NodeKind::Join(Join { key: Some(key), kind, .. }) => {
                (key, AggregateTombstones::Reject, *kind == JoinKind::Left)
            }
            _ => continue,
        };
        let topic = format!("{name}.{}.repartition", node.name);
        let repartition = Repartition { topic: topic.clone(), key: key.clone(), tombstones, null_keys };
        let on_error = node.on_error;
        let made = |word: &str, inputs, kind| Node { name: format!("{}:{word}", node.name), inputs, on_error, kind };
        let port = |node| vec![Port { node: NodeId(node), output: 0 }];
        let writer = made("repartition", node.streams().to_vec(), NodeKind::Repartition(repartition));
        let reader = made("repartitioned", port(next), NodeKind::Repartitioned { topic, format });
        let table = node.inputs.last().copied().filter(|_| node.table().is_some());
        node.inputs = port(next + 1).into_iter().chain(table).collect();
        topology.nodes.extend([writer, reader]);
    }
}

/// How far ahead of its record an event may be where nothing is said: what Kafka's brokers take of a producer's clock.
const MAX_AHEAD_MS: i64 = 3_600_000;

/// Bounds the times of events that windows are told by, where the file says nothing: one bad clock would close them all.
pub fn bound_times(topology: &mut Topology) {
    let windows = |node: &Node| matches!(&node.kind, NodeKind::Aggregate(aggregate) if aggregate.window.is_some());
    let mut above: BTreeSet<usize> = (0..topology.nodes.len()).filter(|id| windows(&topology.nodes[*id])).collect();
    let mut waiting = Vec::from_iter(above.iter().copied());
    while let Some(id) = waiting.pop() {
        let new = topology.nodes[id].inputs.iter().map(|port| port.node.0).filter(|id| above.insert(*id));
        waiting.extend(new);
    }
    for id in above {
        if let NodeKind::Source(source) = &mut topology.nodes[id].kind
            && source.event_time.is_some()
        {
            source.max_ahead_ms.get_or_insert(MAX_AHEAD_MS);
        }
    }
}

/// What another attempt may change of an aggregate's updates, from what it may change of the records.
pub fn unstable(aggregate: &Aggregate, flow: &[Unstable]) -> Vec<Unstable> {
    let fields = aggregate.fields.iter().filter_map(|field| {
        let reads = &field.of.as_ref()?.uses().reads;
        let of_record = |path: &String| match (field.function, path.strip_prefix(".value")) {
            (Function::Reduce, Some("")) => Some(".".to_owned()),
            (Function::Reduce, rest) => rest.map(str::to_owned),
            _ => Some(path.clone()),
        };
        let reads: Vec<String> = reads.iter().filter_map(of_record).collect();
        let unstable = flow.iter().find(|unstable| reads.iter().any(|path| overlap(path, &unstable.path)))?;
        Some(Unstable { path: format!(".{}", field.name), ..unstable.clone() })
    });
    fields.collect()
}
