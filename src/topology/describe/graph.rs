//! The plan as a drawing: Graphviz dot and Mermaid.

use std::fmt::Write;

use super::{edges_of, ends, kind_word, node_of, stage_words};
use crate::topology::plan::{EdgeEnd, EdgeGuarantee, Plan, Stage, StageKind};

/// For Graphviz: `semel explain --format dot FILE | dot -Tsvg`.
pub fn dot(plan: &Plan) -> String {
    let mut out = format!("digraph {} {{\n", quoted(&plan.topology.name));
    out.push_str("  rankdir=LR;\n  node [fontname=\"sans-serif\", shape=box];\n  edge [fontname=\"sans-serif\"];\n");
    let _ = writeln!(out, "  labelloc=b;\n  label={};", quoted(&caption(plan)));
    for (i, stage) in plan.stages.iter().enumerate() {
        let _ = writeln!(out, "  subgraph cluster_{i} {{\n    label={};", quoted(&title(plan, stage)));
        for name in nodes(plan, stage) {
            let _ = writeln!(out, "    {} [label={}];", quoted(&id_of_node(&name)), quoted(&label(plan, &name, "\n")));
        }
        out.push_str("  }\n");
    }
    for (id, name, shape) in outside(plan) {
        let shape = if shape == "table" { "cylinder" } else { "cds" };
        let _ = writeln!(out, "  {} [shape={shape}, label={}];", quoted(&id), quoted(&name));
    }
    for (from, to, edge) in drawn(plan) {
        let style = if edge.guarantee == EdgeGuarantee::ExactlyOnce { "solid" } else { "dashed" };
        let mut text = edge.guarantee.as_str().to_owned();
        if let Some(output) = output(&edge.from) {
            text = format!("{output}: {text}");
        }
        let _ = writeln!(out, "  {} -> {} [label={}, style={style}];", quoted(&from), quoted(&to), quoted(&text));
    }
    out.push_str("}\n");
    out
}

/// For Mermaid, as in Markdown on code hosts.
pub fn mermaid(plan: &Plan) -> String {
    let mut out = String::from("flowchart LR\n");
    for (i, stage) in plan.stages.iter().enumerate() {
        let _ = writeln!(out, "  subgraph stage{i}[\"{}\"]", title(plan, stage));
        for name in nodes(plan, stage) {
            let _ = writeln!(out, "    {}[\"{}\"]", mermaid_id(&id_of_node(&name)), label(plan, &name, "<br/>"));
        }
        out.push_str("  end\n");
    }
    for (id, name, shape) in outside(plan) {
        let (open, close) = if shape == "table" { ("[(", ")]") } else { ("([", "])") };
        let _ = writeln!(out, "  {}{open}\"{name}\"{close}", mermaid_id(&id));
    }
    for (from, to, edge) in drawn(plan) {
        let arrow = if edge.guarantee == EdgeGuarantee::ExactlyOnce { "-->" } else { "-.->" };
        let mut text = edge.guarantee.as_str().to_owned();
        if let Some(output) = output(&edge.from) {
            text = format!("{output}: {text}");
        }
        let _ = writeln!(out, "  {} {arrow}|\"{text}\"| {}", mermaid_id(&from), mermaid_id(&to));
    }
    for end in ends(plan) {
        let _ = writeln!(out, "  %% {}: {}", end.headline, end.text);
    }
    out
}

fn caption(plan: &Plan) -> String {
    ends(plan).into_iter().map(|end| format!("{}: {}", end.headline, end.text)).collect::<Vec<_>>().join("\n")
}

/// A stage's title; behind the line where exactly-once ends it says so.
fn title(plan: &Plan, stage: &Stage) -> String {
    let behind = ends(plan).iter().any(|end| end.before.as_ref() == Some(&stage.name));
    let line = if behind { ", exactly-once ends here" } else { "" };
    format!("stage {}: {}{line}", stage.name, stage_words(stage))
}

fn nodes(plan: &Plan, stage: &Stage) -> Vec<String> {
    let ids: Vec<_> = match &stage.kind {
        StageKind::Kafka { sources, nodes } => sources.iter().chain(nodes).copied().collect(),
        StageKind::Postgres { sink, .. } => vec![*sink],
    };
    ids.iter().map(|id| plan.topology.nodes[id.0].name.clone()).collect()
}

fn label(plan: &Plan, name: &str, newline: &str) -> String {
    let kind = node_of(plan, &EdgeEnd::Node(name.to_owned())).map_or("", |node| kind_word(&node.kind));
    format!("{name}{newline}{kind}")
}

/// Topics and tables, each once: id, name, shape.
fn outside(plan: &Plan) -> Vec<(String, String, &'static str)> {
    let mut list: Vec<(String, String, &'static str)> = Vec::new();
    for end in plan.edges.iter().flat_map(|edge| [&edge.from, &edge.to]) {
        let item = match end {
            EdgeEnd::Topic(name) => (format!("topic:{name}"), name.clone(), "topic"),
            EdgeEnd::Table(name) => (format!("table:{name}"), format!("table {name}"), "table"),
            EdgeEnd::Node(_) | EdgeEnd::Rejects => continue,
        };
        if !list.contains(&item) {
            list.push(item);
        }
    }
    list
}

/// The edges to draw, by the ids of their ends. Rejects leave each stage at its last node but are drawn from the first:
/// one arrow a stage says enough.
fn drawn(plan: &Plan) -> Vec<(String, String, &crate::topology::plan::Edge)> {
    let mut list = Vec::new();
    for stage in &plan.stages {
        let first = nodes(plan, stage).first().cloned().unwrap_or_default();
        for edge in edges_of(plan, stage) {
            let id = |end: &EdgeEnd| match end {
                EdgeEnd::Topic(name) => format!("topic:{name}"),
                EdgeEnd::Table(name) => format!("table:{name}"),
                EdgeEnd::Node(name) => id_of_node(name.split('.').next().unwrap_or(name)),
                EdgeEnd::Rejects => id_of_node(&first),
            };
            list.push((id(&edge.from), id(&edge.to), edge));
        }
    }
    list
}

/// The output of a route that an edge leaves by, or that it carries rejects.
fn output(end: &EdgeEnd) -> Option<&str> {
    match end {
        EdgeEnd::Node(name) => name.split_once('.').map(|(_, output)| output),
        EdgeEnd::Rejects => Some("rejects"),
        EdgeEnd::Topic(_) | EdgeEnd::Table(_) => None,
    }
}

fn id_of_node(name: &str) -> String {
    format!("node:{name}")
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

/// Mermaid ids hold letters, digits and `_`; other characters of names are written as their code.
fn mermaid_id(id: &str) -> String {
    let escape = |c: char| match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' => c.to_string(),
        ':' => "_".to_owned(),
        other => format!("_{:x}_", other as u32),
    };
    id.chars().map(escape).collect()
}
