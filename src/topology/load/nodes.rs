//! What sources, transforms and sinks have in common: names, types, inputs.

use std::ops::Range;

use toml::de::DeValue;

use super::cx::{Cx, Item, Table, Text, in_order, is_hole};
use crate::topology::finding::{code, did_you_mean};
use crate::topology::keys::Section;
use crate::topology::spec::{NodeKind, OnError};

/// Longest name of a topology or node: internal topics are `<name>.<node>.repartition` and Kafka takes 249 bytes.
const NAME_MAX: usize = 100;

/// The tables that nodes are declared in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Source,
    Transform,
    Sink,
}

impl Part {
    pub fn word(self) -> &'static str {
        match self {
            Part::Source => "source",
            Part::Transform => "transform",
            Part::Sink => "sink",
        }
    }
}

/// A node as declared. It is kept even when its settings are wrong, so that what refers to it is not blamed.
#[derive(Clone, Debug)]
pub struct Draft {
    pub part: Part,
    pub name: String,
    pub name_span: Range<usize>,
    pub inputs: Vec<Text>,
    /// The outputs of a route, without `_unmatched`, with the place of each name.
    pub outputs: Option<Vec<(String, Range<usize>)>>,
    /// Topics that it reads or writes, as far as they are known.
    pub topics: Vec<Text>,
    pub postgres: bool,
    pub on_error: Option<OnError>,
    /// Where a join names its table, which is its last input.
    pub table: Option<Range<usize>>,
    /// `None` after a finding.
    pub kind: Option<NodeKind>,
}

impl Draft {
    pub fn what(&self) -> String {
        format!("{} `{}`", self.part.word(), self.name)
    }

    pub fn is_kafka_sink(&self) -> bool {
        self.part == Part::Sink && !self.postgres
    }
}

/// What a `type` means: the table it has and how it is read.
pub struct NodeType {
    pub word: &'static str,
    pub section: &'static Section,
    pub read: fn(&mut Cx<'_>, &Table<'_>, &mut Draft),
}

/// Reads all nodes of one part.
pub fn read_nodes(
    cx: &mut Cx<'_>,
    item: &Item<'_>,
    part: Part,
    types: &'static [NodeType],
    later: &[&str],
    drafts: &mut Vec<Draft>,
) {
    let Some(entries) = cx.entries(item, &format!("`{}s`", part.word())) else { return };
    for (key, item) in in_order(entries) {
        let mut draft = Draft {
            part,
            name: key.get_ref().to_string(),
            name_span: key.span(),
            inputs: Vec::new(),
            outputs: None,
            topics: Vec::new(),
            postgres: false,
            on_error: None,
            table: None,
            kind: None,
        };
        cx.node = Some(draft.name.clone());
        check_name(cx, &draft.name, &format!("`{}`", draft.name), key.span(), part.word());
        read_node(cx, item, types, later, &mut draft);
        drafts.push(draft);
    }
    cx.node = None;
}

fn read_node(cx: &mut Cx<'_>, item: &Item<'_>, types: &'static [NodeType], later: &[&str], draft: &mut Draft) {
    let what = draft.what();
    let Some(entries) = cx.entries(item, &what) else { return };
    let words: Vec<_> = types.iter().map(|t| format!("\"{}\"", t.word)).collect();
    let help = format!("types of {}s: {}", draft.part.word(), words.join(", "));
    let Some(type_item) = entries.get("type") else {
        cx.found.error(code::MISSING_KEY, draft.name_span.clone(), format!("{what} needs `type`")).help(help);
        return;
    };
    let DeValue::String(word) = type_item.get_ref() else {
        cx.wrong_type("type", type_item, "a string");
        return;
    };
    let Some(found) = types.iter().find(|t| t.word == word) else {
        if later.contains(&word.as_ref()) {
            let message = format!("{}s of type \"{word}\" come in a later version", draft.part.word());
            cx.found.error(code::NOT_AVAILABLE, type_item.span(), message).help(help);
        } else if !is_hole(type_item) {
            let near = did_you_mean(word, types.iter().map(|t| t.word));
            let message = format!("there is no {} of type \"{word}\"", draft.part.word());
            cx.found.error(code::UNKNOWN_TYPE, type_item.span(), message).help(help).maybe_help(near);
        }
        return;
    };
    draft.postgres = found.word == "postgres";
    if draft.part == Part::Source && entries.contains_key("inputs") {
        let span = entries.get_key_value("inputs").map_or(0..0, |(key, _)| key.span());
        cx.found
            .error(code::SOURCE_INPUT, span, format!("{what} has inputs, but a source reads topics"))
            .help("name its topics in `topics`; other nodes name it in their `inputs`");
    }
    let Some(table) = cx.table(item, draft.name_span.clone(), found.section, what) else { return };
    draft.on_error = on_error(cx, &table);
    if found.section.has("inputs") {
        let help = match draft.postgres {
            true => "name Kafka sinks or sources of this file, such as inputs = [\"orders\"]",
            false => "name the nodes to read, such as inputs = [\"orders\"]",
        };
        draft.inputs = cx.required_strings(&table, "inputs", help);
    }
    (found.read)(cx, &table, draft);
}

/// The key `on_error` of a table.
pub fn on_error(cx: &mut Cx<'_>, table: &Table<'_>) -> Option<OnError> {
    let words = [("reject", OnError::Reject), ("skip", OnError::Skip), ("stop", OnError::Stop)];
    cx.choice(table, "on_error", &words)
}

/// Reports a name that is not one, as `shown`.
pub fn check_name(cx: &mut Cx<'_>, name: &str, shown: &str, span: Range<usize>, what: &str) -> bool {
    let head = name.starts_with(|c: char| c.is_ascii_lowercase());
    let tail = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '-');
    if head && tail && name.len() <= NAME_MAX {
        return true;
    }
    let finding = cx.found.error(code::INVALID_NAME, span, format!("{shown} is no name for a {what}"));
    finding.help(if name.len() > NAME_MAX {
        format!("names have at most {NAME_MAX} characters, since topics are made of them")
    } else {
        "names are a lower-case letter, then lower-case letters, digits, `_` or `-`".to_owned()
    });
    false
}
