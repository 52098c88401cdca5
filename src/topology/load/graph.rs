//! Inputs: who reads whom. From names to ports, with what is missing, circular or unused.

use super::cx::{Cx, Text};
use super::nodes::{Draft, Part};
use crate::topology::finding::{code, nearest};
use crate::topology::spec::{NodeId, Port};

/// The output of a route for what matched nothing.
pub const UNMATCHED: &str = "_unmatched";

/// Resolves the inputs of all nodes; an input that names nothing is left out after a finding.
pub fn connect(cx: &mut Cx<'_>, drafts: &[Draft]) -> Vec<Vec<Port>> {
    let mut inputs = Vec::new();
    for draft in drafts {
        let mut ports: Vec<Port> = Vec::new();
        for input in draft.inputs.iter().filter(|input| !input.unset) {
            let Some(port) = resolve(cx, drafts, draft, input) else { continue };
            if ports.contains(&port) {
                let message = format!("{} names its input {} twice", draft.what(), input.shown);
                cx.found
                    .error(code::DUPLICATE_INPUT, input.span.clone(), message)
                    .help("each of its records would come twice");
            } else {
                ports.push(port);
            }
        }
        inputs.push(ports);
    }
    cycles(cx, drafts, &inputs);
    unused(cx, drafts, &inputs);
    inputs
}

fn resolve(cx: &mut Cx<'_>, drafts: &[Draft], draft: &Draft, input: &Text) -> Option<Port> {
    let name = input.value.as_str();
    let (node, output) = match name.split_once('.') {
        Some((node, output)) => (node, Some(output)),
        None => (name, None),
    };
    let Some(id) = drafts.iter().position(|other| other.name == node) else {
        missing(cx, drafts, draft, input);
        return None;
    };
    let target = &drafts[id];
    if draft.postgres {
        if target.part == Part::Transform || target.postgres {
            let message =
                format!("a Postgres sink reads a topic, but {} is neither a Kafka sink nor a source", target.what());
            cx.found
                .error(code::POSTGRES_INPUT, input.span.clone(), message)
                .help(format!("write `{name}` to a topic with a Kafka sink, and name that sink here"));
            return None;
        }
    } else if target.part == Part::Sink {
        let message = format!("{} is a sink and has no output here", target.what());
        let help = match &target.inputs[..] {
            [one] => format!("read what it reads: `{}`", one.value),
            _ => "read what it reads".to_owned(),
        };
        cx.found.error(code::SINK_AS_INPUT, input.span.clone(), message).help(help);
        return None;
    }
    let output = match (&target.outputs, output) {
        (None, None) => 0,
        (Some(outputs), Some(UNMATCHED)) => outputs.len(),
        (Some(outputs), Some(output)) if outputs.iter().any(|(name, _)| name == output) => {
            outputs.iter().position(|(name, _)| name == output)?
        }
        (Some(outputs), _) => {
            let all: Vec<_> =
                outputs.iter().map(|(o, _)| o.as_str()).chain([UNMATCHED]).map(|o| format!("`{node}.{o}`")).collect();
            let message = match output {
                None => format!("`{node}` is a route: name one of its outputs"),
                Some(output) => format!("route `{node}` has no output `{output}`"),
            };
            cx.found.error(code::MISSING_INPUT, input.span.clone(), message).help(all.join(", "));
            return None;
        }
        (None, Some(_)) => {
            let message = format!("{} is no route and has no outputs of its own", target.what());
            cx.found.error(code::MISSING_INPUT, input.span.clone(), message).help(format!("write `{node}`"));
            return None;
        }
    };
    Some(Port { node: NodeId(id), output })
}

fn missing(cx: &mut Cx<'_>, drafts: &[Draft], draft: &Draft, input: &Text) {
    let fits = |other: &&Draft| match draft.postgres {
        true => other.part == Part::Source || other.is_kafka_sink(),
        false => other.part != Part::Sink,
    };
    let fitting: Vec<&str> =
        drafts.iter().filter(fits).filter(|d| d.name != draft.name).map(|d| d.name.as_str()).collect();
    // The name of a topic is a common slip for the name of the source or sink that has it.
    let by_topic = drafts.iter().filter(fits).find(|d| d.topics.iter().any(|topic| topic.value == input.value));
    let help = match (by_topic, nearest(&input.value, fitting.iter().copied())) {
        (Some(node), _) => format!("that is a topic; its node is `{}`", node.name),
        (None, Some(near)) => format!("did you mean `{near}`?"),
        (None, None) if fitting.is_empty() => "there is nothing to read in this file".to_owned(),
        (None, None) => format!("there are `{}`", fitting.join("`, `")),
    };
    let message = format!("{} reads {}, which does not exist", draft.what(), input.shown);
    cx.found.error(code::MISSING_INPUT, input.span.clone(), message).help(help);
}

/// Reports each circle once, at the first of its nodes in the file.
fn cycles(cx: &mut Cx<'_>, drafts: &[Draft], inputs: &[Vec<Port>]) {
    let mut reported = vec![false; drafts.len()];
    for start in 0..drafts.len() {
        if reported[start] {
            continue;
        }
        let Some(path) = circle(inputs, start) else { continue };
        for id in &path {
            reported[*id] = true;
        }
        // The search walks against the flow, from a node to its inputs.
        let names: Vec<_> =
            path.iter().rev().chain([&path[path.len() - 1]]).map(|id| drafts[*id].name.as_str()).collect();
        let message = format!("nodes feed each other in a circle: {}", names.join(" → "));
        cx.found
            .error(code::CYCLE, drafts[start].name_span.clone(), message)
            .help("records only flow on: cut one of these inputs");
    }
}

/// The shortest way from a node over its inputs back to itself, itself first.
fn circle(inputs: &[Vec<Port>], start: usize) -> Option<Vec<usize>> {
    let mut from = vec![None; inputs.len()];
    let mut queue = std::collections::VecDeque::from([start]);
    while let Some(node) = queue.pop_front() {
        for input in inputs[node].iter().map(|port| port.node.0) {
            if input == start {
                let mut path = vec![node];
                while let Some(before) = from[path[path.len() - 1]] {
                    path.push(before);
                }
                path.reverse();
                return Some(path);
            }
            if from[input].is_none() {
                from[input] = Some(node);
                queue.push_back(input);
            }
        }
    }
    None
}

fn unused(cx: &mut Cx<'_>, drafts: &[Draft], inputs: &[Vec<Port>]) {
    let reads = |id: usize, output: Option<usize>| {
        inputs.iter().flatten().any(|port| port.node.0 == id && output.is_none_or(|output| port.output == output))
    };
    // A name that an input got wrong may have meant this node: then the missing input is the finding.
    for (id, draft) in drafts.iter().enumerate().filter(|(_, draft)| draft.part != Part::Sink) {
        if !reads(id, None) {
            let message = format!("nothing reads {}", draft.what());
            cx.found
                .warning(code::UNUSED_NODE, draft.name_span.clone(), message)
                .help("name it in the `inputs` of another node, or remove it");
            continue;
        }
        for (output, (name, span)) in draft.outputs.iter().flatten().enumerate() {
            if !reads(id, Some(output)) {
                let message = format!("nothing reads `{}.{name}`: its records end here", draft.name);
                cx.found
                    .warning(code::UNUSED_NODE, span.clone(), message)
                    .help("name it in the `inputs` of another node; to drop records, use a filter");
            }
        }
    }
}
