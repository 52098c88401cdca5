//! Topic names, and what topics of a file may not have in common.

use super::cx::{Cx, Text};
use super::nodes::{Draft, Part};
use crate::topology::finding::code;

/// Reports what Kafka would not take for a topic.
pub fn check_topic(cx: &mut Cx<'_>, topic: &Text) {
    if topic.unset {
        return;
    }
    let name = topic.value.as_str();
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let problem = if name.is_empty() {
        "a topic has a name"
    } else if name.len() > 249 {
        "a topic's name has at most 249 characters"
    } else if name == "." || name == ".." {
        "a topic is not called `.` or `..`"
    } else if name.starts_with('^') {
        "topics are named one by one, not by a pattern"
    } else if !name.chars().all(good) {
        "a topic's name holds letters, digits, `.`, `_` and `-`"
    } else {
        return;
    };
    let message = format!("{} is no topic: {problem}", topic.shown);
    cx.found.error(code::INVALID_TOPIC, topic.span.clone(), message);
}

/// Reports topics that are read twice, written by several sinks, written and read, or semel's own.
pub fn check_topics(cx: &mut Cx<'_>, name: Option<&str>, drafts: &[Draft]) {
    let of = |part: Part| {
        let drafts = drafts.iter().filter(move |draft| draft.part == part);
        drafts.flat_map(|draft| draft.topics.iter().map(move |topic| (draft, topic))).filter(|(_, t)| !t.unset)
    };
    let sources: Vec<_> = of(Part::Source).collect();
    let sinks: Vec<_> = of(Part::Sink).collect();
    for (i, (draft, topic)) in sources.iter().enumerate() {
        if let Some((other, _)) = sources[..i].iter().find(|(_, earlier)| earlier.value == topic.value) {
            let message = match other.name == draft.name {
                true => format!("{} lists the topic {} twice", draft.what(), topic.shown),
                false => format!("the topic {} is already read by source `{}`", topic.shown, other.name),
            };
            cx.found
                .error(code::DUPLICATE_TOPIC, topic.span.clone(), message)
                .help("a topic belongs to one source; several nodes may read that source");
        }
    }
    for (i, (draft, topic)) in sinks.iter().enumerate() {
        if let Some((source, _)) = sources.iter().find(|(_, read)| read.value == topic.value) {
            let message = format!(
                "{} writes to the topic {}, which source `{}` reads: a loop",
                draft.what(),
                topic.shown,
                source.name
            );
            cx.found.error(code::TOPIC_LOOP, topic.span.clone(), message).help("write to a topic of its own");
        }
        if let Some((other, _)) = sinks[..i].iter().find(|(_, earlier)| earlier.value == topic.value) {
            let message = format!("sinks `{}` and `{}` write to one topic, {}", other.name, draft.name, topic.shown);
            cx.found
                .warning(code::SHARED_TOPIC, topic.span.clone(), message)
                .help("if that is meant, give one sink both inputs; else give each its topic");
        }
    }
    let Some(name) = name else { return };
    for (draft, topic) in sources.iter().chain(&sinks) {
        if let Some(use_) = reserved(name, &topic.value) {
            let message = format!("{} names the topic {}, which is semel's own: {use_}", draft.what(), topic.shown);
            cx.found.error(code::RESERVED_TOPIC, topic.span.clone(), message).help(match draft.part {
                Part::Source => {
                    "a topology cannot read what it writes itself; read it in another file, with another `name`"
                }
                _ => "give the topic another name",
            });
        }
    }
}

/// What semel uses the topic for in the topology of that name.
fn reserved(name: &str, topic: &str) -> Option<&'static str> {
    let rest = topic.strip_prefix(name)?.strip_prefix('.')?;
    match rest {
        "dead-letters" => Some("its dead letters"),
        "job" => Some("what it remembers of the job"),
        _ => match rest.split_once('.')?.1 {
            "retry" => Some("dead letters to replay"),
            "repartition" => Some("records under a new key"),
            "changelog" => Some("a store's changes"),
            _ => None,
        },
    }
}
