//! What the state of a node means: what it is worked out from, and how. State that was kept under another meaning cannot be
//! gone on with.

use std::collections::BTreeMap;
use std::time::Duration;

use super::duration_text;
use super::spec::{Field, NodeId, NodeKind, Topology, WindowKind};

/// Settings as the file has them, by name.
pub type Meaning = BTreeMap<String, String>;

/// The names of the fields in their order, which is that of their values in the state.
const FIELDS: &str = "fields";

impl Topology {
    /// What the state of a node means. Filters and programs upstream are not part of it: they decide on what comes from now
    /// on, as in a job without state.
    pub fn meaning(&self, id: NodeId) -> Meaning {
        let mut topics: Vec<&str> = self.sources_of(id).flat_map(|source| &source.topics).map(String::as_str).collect();
        topics.sort_unstable();
        topics.dedup();
        let mut meaning = Meaning::from([("topics".to_owned(), topics.join(", "))]);
        if let NodeKind::Aggregate(aggregate) = &self.nodes[id.0].kind {
            meaning
                .extend(aggregate.group_by.iter().map(|key| ("group_by".to_owned(), key.source().trim().to_owned())));
            meaning.extend(aggregate.window.map(|window| ("window".to_owned(), kind(window.kind))));
            let names: Vec<&str> = aggregate.fields.iter().map(|field| field.name.as_str()).collect();
            meaning.insert(FIELDS.to_owned(), names.join(", "));
            meaning.extend(aggregate.fields.iter().map(|field| (format!("{FIELDS}.{}", field.name), function(field))));
        }
        meaning
    }
}

fn kind(window: WindowKind) -> String {
    let text = |ms: i64| duration_text(Duration::from_millis(ms as u64));
    match window {
        WindowKind::Aligned { size_ms, advance_ms } if advance_ms == size_ms => text(size_ms),
        WindowKind::Aligned { size_ms, advance_ms } => format!("{} every {}", text(size_ms), text(advance_ms)),
        WindowKind::Session { gap_ms } => format!("sessions with a gap of {}", text(gap_ms)),
    }
}

fn function(field: &Field) -> String {
    let of = field.of.as_ref().map(|program| format!(" of {}", program.source().trim()));
    format!("{}{}", field.function.as_str(), of.unwrap_or_default())
}

/// What differs, in words; empty where nothing does.
pub fn changed(before: &Meaning, now: &Meaning) -> Vec<String> {
    let mut names: Vec<&String> = before.keys().chain(now.keys()).collect();
    names.sort();
    names.dedup();
    names.retain(|name| before.get(*name) != now.get(*name));
    // A field more or less says so itself.
    if names.len() > 1 {
        names.retain(|name| *name != FIELDS);
    }
    let differs = |name: &String| match (before.get(name), now.get(name)) {
        (Some(before), Some(now)) => format!("`{name}` was {before}, and is {now}"),
        (Some(before), None) => format!("`{name}` was {before}, and is not there any more"),
        (None, now) => format!("`{name}` is new: {}", now.map_or("", String::as_str)),
    };
    names.into_iter().map(differs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::load;

    fn meaning(aggregate: &str) -> Meaning {
        let text = format!(
            "name = \"t\"\n[kafka]\nbrokers = \"localhost:9092\"\n[sources.in]\ntype = \"kafka\"\ntopics = [\"b\", \"a\"]\n\
             [transforms.live]\ntype = \"filter\"\ninputs = [\"in\"]\ncondition = '.live == true'\n\
             [transforms.sums]\ntype = \"aggregate\"\ninputs = [\"live\"]\n{aggregate}\n\
             [sinks.out]\ntype = \"kafka\"\ninputs = [\"sums\"]\ntopic = \"out\"\n"
        );
        let loaded = load(&text, "t.toml", &|_| None);
        let topology = loaded.topology.unwrap_or_else(|| panic!("{:#?}", loaded.findings));
        topology.meaning(NodeId(2))
    }

    #[test]
    fn a_meaning_is_what_the_state_is_worked_out_from() {
        let of = |aggregate| meaning(aggregate).into_iter().collect::<Vec<_>>();
        let pairs = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
        };
        assert_eq!(
            of(
                "group_by = '.who'\nwindow = { tumbling = \"90s\" }\nfields.n = \"count\"\nfields.sum = { sum = ' .x ' }"
            ),
            pairs(&[
                ("fields", "n, sum"),
                ("fields.n", "count"),
                ("fields.sum", "sum of .x"),
                ("group_by", ".who"),
                ("topics", "a, b"),
                ("window", "90s"),
            ])
        );
    }

    #[test]
    fn what_changed_is_named_and_what_does_not_touch_the_state_is_no_change() {
        let before = meaning("group_by = '.who'\nfields.n = \"count\"\nfields.sum = { sum = '.x' }");
        let since = |aggregate: &str| changed(&before, &meaning(aggregate));
        let same = "key_field = \"id\"\ntombstones = \"reject\"\nfields.n = \"count\"\nfields.sum = { sum = '.x' }";
        assert_eq!(since(&format!("group_by = '.who'\n{same}")), [""; 0]);
        assert_eq!(
            since("group_by = '.whom'\nfields.n = \"count\"\nfields.sum = { sum = '.y' }"),
            ["`fields.sum` was sum of .x, and is sum of .y", "`group_by` was .who, and is .whom"]
        );
        assert_eq!(
            since("group_by = '.who'\nwindow = { tumbling = \"1m\" }\nfields.n = \"count\""),
            ["`fields.sum` was sum of .x, and is not there any more", "`window` is new: 1m"]
        );
        assert_eq!(
            since("group_by = '.who'\nfields.sum = { sum = '.x' }\nfields.n = \"count\""),
            ["`fields` was n, sum, and is sum, n"]
        );
    }
}
