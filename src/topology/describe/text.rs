//! The plan as people read it.

use std::fmt::Write;

use super::{
    End, edges_of, ends, format_word, guarantee_word, kind_word, node_of, stage_words, start_words, transactional_ids,
};
use crate::topology::load::duration_text;
use crate::topology::plan::{EdgeEnd, EdgeGuarantee, Plan, Stage, StageKind};
use crate::topology::spec::{Emit, Field, Late, Mode, NodeKind, OnError, Window, WindowKind};

/// Width of the rules that mark where exactly-once ends.
const WIDTH: usize = 100;

/// The plan as text: stages with their groups, topics and transactional ids, the guarantee of every edge, and a rule
/// across the page where exactly-once ends.
pub fn text(plan: &Plan) -> String {
    let topology = &plan.topology;
    let mut out = format!("{}  ({})\n\n", topology.name, topology.file);
    let commit = match topology.batch_records {
        Some(records) => format!("{} or {records} records", duration_text(topology.commit_interval)),
        None => duration_text(topology.commit_interval),
    };
    let on_error = match topology.on_error {
        OnError::Reject => format!("reject to {}", plan.dead_letters()),
        OnError::Skip => "skip and count".to_owned(),
        OnError::Stop => "stop".to_owned(),
    };
    line(&mut out, "guarantee", guarantee_word(topology.guarantee));
    line(&mut out, "commit", &format!("every {commit}"));
    line(&mut out, "workers", &topology.workers.to_string());
    line(&mut out, "on error", &on_error);
    line(&mut out, "job topic", &topology.job_topic());
    for name in variables(plan) {
        line(&mut out, "not set", &name);
    }
    let ends = ends(plan);
    for stage in &plan.stages {
        for end in ends.iter().filter(|end| end.before.as_ref() == Some(&stage.name)) {
            rule(&mut out, end);
        }
        describe_stage(&mut out, plan, stage);
    }
    for end in ends.iter().filter(|end| end.before.is_none()) {
        rule(&mut out, end);
    }
    out
}

/// Variables without a value, each once.
fn variables(plan: &Plan) -> Vec<String> {
    let mut names: Vec<String> = plan.topology.unset.iter().map(|variable| variable.name.clone()).collect();
    names.sort();
    names.dedup();
    names
}

fn line(out: &mut String, label: &str, value: &str) {
    let _ = writeln!(out, "  {label:<19}{value}");
}

fn rule(out: &mut String, end: &End) {
    let head = format!("─── {} ", end.headline);
    let _ = writeln!(out, "\n{head}{}\n    {}", "─".repeat(WIDTH.saturating_sub(head.chars().count())), end.text);
}

fn describe_stage(out: &mut String, plan: &Plan, stage: &Stage) {
    let _ = writeln!(out, "\nstage {}: {}\n", stage.name, stage_words(stage));
    line(out, "group", &stage.group);
    if let Some(ids) = transactional_ids(plan, stage) {
        line(out, "transactional ids", &ids);
    }
    line(out, "reads", &plan.reads(stage).join(", "));
    let writes = plan.writes(stage);
    if !writes.is_empty() {
        line(out, "writes", &writes.join(", "));
    }
    for topic in plan.repartitions(stage) {
        line(out, "repartitions by", &topic);
    }
    for store in plan.stores(stage) {
        line(out, "store", &format!("{}, restored from {}", store.name, store.changelog));
    }
    for topics in plan.co_partitioned(stage) {
        line(out, "by lowest time", &topics.join(", "));
    }
    line(out, "dead letters", &plan.dead_letters());
    line(out, "replayed from", &plan.retry(stage));
    describe_nodes(out, plan, stage);
    describe_edges(out, plan, stage);
}

fn describe_nodes(out: &mut String, plan: &Plan, stage: &Stage) {
    let ids: Vec<_> = match &stage.kind {
        StageKind::Kafka { sources, nodes } => sources.iter().chain(nodes).copied().collect(),
        StageKind::Postgres { sink, .. } => vec![*sink],
    };
    let rows: Vec<[String; 3]> = ids
        .iter()
        .map(|id| {
            let node = &plan.topology.nodes[id.0];
            [node.name.clone(), kind_word(&node.kind).to_owned(), details(&node.kind)]
        })
        .collect();
    columns(out, &rows);
}

/// What a reader wants to know of a node beside its kind.
fn details(kind: &NodeKind) -> String {
    match kind {
        NodeKind::Source(source) => {
            let id = source.event_id.as_ref().map_or("topic, partition and offset", |program| program.source());
            let mut text = format!("{}, from {}, event id {id}", format_word(source.format), start_words(source));
            if let Some(time) = &source.event_time {
                let _ = write!(text, ", event time {}", time.source());
            }
            if let Some(ms) = source.max_ahead_ms {
                let _ = write!(text, " at most {} ahead", duration_text(std::time::Duration::from_millis(ms as u64)));
            }
            text
        }
        NodeKind::Filter { condition, .. } => one_line(condition.source()),
        NodeKind::Remap { source, .. } | NodeKind::FlatMap { source, .. } => one_line(source.source()),
        NodeKind::Route { routes, .. } => {
            let outputs: Vec<_> =
                routes.iter().map(|r| format!("{} if {}", r.name, one_line(r.condition.source()))).collect();
            outputs.join("; ")
        }
        NodeKind::Rekey { key } => format!("key {}", one_line(key.source())),
        NodeKind::Aggregate(aggregate) => {
            let field = |field: &Field| match &field.of {
                None => format!("{} {}", field.name, field.function.as_str()),
                Some(of) => format!("{} {} {}", field.name, field.function.as_str(), one_line(of.source())),
            };
            let mut text = aggregate.fields.iter().map(field).collect::<Vec<_>>().join(", ");
            if let Some(window) = &aggregate.window {
                text.push_str(&window_words(window));
            }
            text
        }
        NodeKind::Table => "latest value by key".to_owned(),
        NodeKind::Join(join) => {
            let of = if join.of_tables { " of tables" } else { "" };
            format!("{}{of}, the row into .{}", join.kind.as_str(), join.into)
        }
        NodeKind::Repartition(repartition) => {
            format!("topic {}, key {}", repartition.topic, one_line(repartition.key.source()))
        }
        NodeKind::Repartitioned { topic, format } => format!("topic {topic}, {}", format_word(*format)),
        NodeKind::KafkaSink(sink) => {
            let key = sink.key.as_ref().map_or("the input's".to_owned(), |key| one_line(key.source()));
            let mut text = format!("topic {}, key {key}", sink.topic);
            if let Some(create) = &sink.create {
                let _ = write!(text, ", made with {} partitions", create.partitions);
            }
            text
        }
        NodeKind::PostgresSink(sink) => {
            let mut text = format!("table {}", sink.table);
            if sink.mode != Mode::Upsert {
                let _ = write!(text, ", mode {}", sink.mode.as_str());
            }
            if !sink.key.is_empty() {
                let _ = write!(text, ", key {}", sink.key.join(", "));
            }
            if let Some(version) = &sink.version {
                let _ = write!(text, ", version {version}");
            }
            if sink.keeps_positions() {
                text.push_str(", positions beside the rows");
            }
            if let Some(ledger) = &sink.dedupe {
                let _ = write!(text, ", ledger {} for {}", ledger.table, duration_text(ledger.retention));
            }
            if let Some(deleted) = &sink.deleted {
                let _ = write!(text, ", deletes marked in {deleted}");
            }
            text
        }
    }
}

fn window_words(window: &Window) -> String {
    let ms = |ms: i64| duration_text(std::time::Duration::from_millis(ms.max(0) as u64));
    let mut text = match window.kind {
        WindowKind::Aligned { size_ms, advance_ms } if size_ms == advance_ms => format!(", each {}", ms(size_ms)),
        WindowKind::Aligned { size_ms, advance_ms } => format!(", over {} every {}", ms(size_ms), ms(advance_ms)),
        WindowKind::Session { gap_ms } => format!(", in sessions until nothing comes for {}", ms(gap_ms)),
    };
    let _ = write!(text, ", grace {}", ms(window.grace_ms));
    if window.emit == Emit::Close {
        text.push_str(", put out on close");
    }
    if let Some(idle) = window.idle_ms {
        let _ = write!(text, ", by the clock after {} without a record (time-dependent)", ms(idle));
    }
    if window.late == Late::Reject {
        text.push_str(", late ones rejected");
    }
    text
}

/// A program on one line, cut where it is long.
fn one_line(source: &str) -> String {
    let lines: Vec<_> =
        source.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let text = lines.join("; ");
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

fn describe_edges(out: &mut String, plan: &Plan, stage: &Stage) {
    let rows: Vec<[String; 3]> = edges_of(plan, stage)
        .map(|edge| [end(plan, &edge.from), end(plan, &edge.to), edge.guarantee.as_str().to_owned()])
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let (from, to) = (width(0), width(1));
    let _ = writeln!(out);
    for row in &rows {
        let _ = writeln!(out, "  {:<from$} → {:<to$}  {}", row[0], row[1], row[2]);
    }
    let mut said: Vec<(EdgeGuarantee, &str)> = Vec::new();
    for edge in edges_of(plan, stage) {
        if !said.contains(&(edge.guarantee, &edge.by)) {
            said.push((edge.guarantee, &edge.by));
        }
    }
    let _ = writeln!(out);
    for (guarantee, by) in said {
        let _ = writeln!(out, "  {}: {by}", guarantee.as_str());
    }
}

fn end(plan: &Plan, end: &EdgeEnd) -> String {
    match end {
        EdgeEnd::Topic(topic) => format!("topic {topic}"),
        EdgeEnd::Table(table) => format!("table {table}"),
        EdgeEnd::Rejects => "rejects".to_owned(),
        EdgeEnd::Node(name) => match node_of(plan, end) {
            Some(node) => format!("{name} ({})", kind_word(&node.kind)),
            None => name.clone(),
        },
    }
}

fn columns(out: &mut String, rows: &[[String; 3]]) {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let (name, kind) = (width(0), width(1));
    let _ = writeln!(out);
    for row in rows {
        let _ = writeln!(out, "  {:<name$}  {:<kind$}  {}", row[0], row[1], row[2]);
    }
}
