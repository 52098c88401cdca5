//! What the checker carries through the file, and the tables it reads.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::interpolate::interpolate;
use super::toml_string::StringMap;
use crate::expr::{Program, Role};
use crate::topology::finding::{Findings, Severity, code, nearest};
use crate::topology::keys::{SECTIONS, SOURCE, Section};
use crate::topology::spec::UnsetVariable;

pub type Item<'t> = Spanned<DeValue<'t>>;

/// The checker's state: the file, its findings so far, and variables without a value.
pub struct Cx<'a> {
    pub text: &'a str,
    pub env: &'a dyn Fn(&str) -> Option<String>,
    pub found: Findings<'a>,
    pub unset: Vec<UnsetVariable>,
    /// The node being read, for `unset` and `programs`.
    pub node: Option<String>,
    /// The expressions of nodes, as they were read.
    pub programs: Vec<Placed>,
}

/// A compiled expression and where it stands.
#[derive(Clone, Debug)]
pub struct Placed {
    pub node: String,
    /// The setting that holds it.
    pub key: String,
    pub span: Range<usize>,
    pub program: Program,
}

impl Placed {
    /// It may make another value of the record before it reads it.
    pub fn assigns(&self) -> bool {
        matches!(self.program.role(), Role::Remap | Role::Expand)
    }
}

/// A string of the file with its variables put in.
#[derive(Clone, Debug)]
pub struct Text {
    pub value: String,
    pub span: Range<usize>,
    /// A variable had no value: `value` is a placeholder and not to be judged.
    pub unset: bool,
    /// How a message may show it: as written, since a variable's value may be a secret.
    pub shown: String,
}

/// A table with the keys it may have.
#[derive(Clone)]
pub struct Table<'t> {
    pub entries: &'t DeTable<'t>,
    /// Where to point when something is missing: the key or header that opens it.
    pub span: Range<usize>,
    pub section: &'static Section,
    /// Its name in messages: "source `orders`".
    pub what: String,
}

/// A value that is there because the parser had to put something: its place is empty.
pub fn is_hole(item: &Item<'_>) -> bool {
    item.span().is_empty() && matches!(item.get_ref(), DeValue::Integer(_))
}

impl<'a> Cx<'a> {
    /// Reads a value as a table of `section` and reports the keys that it does not have.
    pub fn table<'t>(
        &mut self,
        item: &'t Item<'t>,
        span: Range<usize>,
        section: &'static Section,
        what: impl Into<String>,
    ) -> Option<Table<'t>> {
        let what = what.into();
        let entries = self.entries(item, &what)?;
        let table = Table { entries, span, section, what };
        self.unknown_keys(&table);
        Some(table)
    }

    /// Reads a value as a table of any keys.
    pub fn entries<'t>(&mut self, item: &'t Item<'t>, what: &str) -> Option<&'t DeTable<'t>> {
        match item.get_ref() {
            DeValue::Table(entries) => Some(entries),
            _ if is_hole(item) => None,
            other => {
                let message = format!("{what} must be a table, not {}", with_article(other.type_str()));
                self.found.error(code::WRONG_TYPE, item.span(), message);
                None
            }
        }
    }

    fn unknown_keys(&mut self, table: &Table<'_>) {
        for (key, _) in in_order(table.entries) {
            let name = key.get_ref().as_ref();
            // A source's `inputs` has a finding of its own.
            if table.section.has(name) || (name == "inputs" && table.section.title == SOURCE.title) {
                continue;
            }
            let near = nearest(name, table.section.names());
            let one_off = near.filter(|near| strsim::osa_distance(name, near) <= 1);
            let help = match (one_off, belongs_to(name), near) {
                (Some(near), ..) | (None, None, Some(near)) => format!("did you mean `{near}`?"),
                (None, Some(place), _) => place,
                (None, None, None) => {
                    let names: Vec<_> = table.section.names().map(|n| format!("`{n}`")).collect();
                    format!("it takes {}", names.join(", "))
                }
            };
            let message = format!("{} has no key `{name}`", table.what);
            self.found.error(code::UNKNOWN_KEY, key.span(), message).help(help);
        }
    }

    /// Puts variables into a string; reports malformed and unset ones.
    pub fn interpolated(&mut self, written: &str, span: Range<usize>) -> Text {
        let out = interpolate(written, self.env);
        let literal = self.text.get(span.clone()).unwrap_or("");
        let map = StringMap::new(literal, written);
        for (at, problem) in &out.invalid {
            let start = span.start + map.place(*at);
            self.found
                .error(code::INVALID_INTERPOLATION, start..start + 2, *problem)
                .help("write `$${` for the characters themselves");
        }
        for (name, at) in &out.unset {
            let start = span.start + map.place(*at);
            let end = (start + name.len() + 3).min(span.end);
            self.found
                .add(Severity::Note, code::UNSET_VARIABLE, start..end, format!("the variable `{name}` is not set"))
                .help(format!("set it, or give a default: `${{{name}:-default}}`"));
            let (line, column) = self.found.position(start);
            self.unset.push(UnsetVariable { name: name.clone(), node: self.node.clone(), line, column });
        }
        let shown = if out.variables { format!("the value of `{written}`") } else { format!("`{written}`") };
        let unset = !out.unset.is_empty() || !out.invalid.is_empty();
        Text { value: out.value, span, unset, shown }
    }

    /// The tables of an array of tables.
    pub fn tables<'t>(&mut self, item: &'t Item<'t>, name: &str, help: &str) -> Vec<&'t Item<'t>> {
        let DeValue::Array(array) = item.get_ref() else {
            if !is_hole(item) {
                let type_name = with_article(item.get_ref().type_str());
                let message = format!("`{name}` must be an array of tables, not {type_name}");
                self.found.error(code::WRONG_TYPE, item.span(), message).help(help);
            }
            return Vec::new();
        };
        array.iter().collect()
    }

    /// The expressions of a node.
    pub fn programs_of(&self, node: &str) -> Vec<Placed> {
        self.programs.iter().filter(|placed| placed.node == node).cloned().collect()
    }

    /// Warns of a secret in the file. Renderers blank the place of this finding.
    pub fn secret(&mut self, span: Range<usize>, message: &str) {
        self.found
            .warning(code::SECRET, span, message)
            .help("take it from the environment: write \"${NAME}\" and set NAME where the job runs");
    }

    /// Reports that a table lacks a key, unless a key that it does not know was meant to be this one.
    pub fn missing(&mut self, table: &Table<'_>, name: &str, help: impl Into<String>) {
        let unknown = table.entries.keys().map(|key| key.get_ref().as_ref()).filter(|key| !table.section.has(key));
        if unknown.into_iter().any(|key| nearest(key, table.section.names()) == Some(name)) {
            return;
        }
        let message = format!("{} needs `{name}`", table.what);
        self.found.error(code::MISSING_KEY, table.span.clone(), message).help(help);
    }

    /// Reports a value of another type than `wanted`.
    pub fn wrong_type(&mut self, name: &str, item: &Item<'_>, wanted: &str) {
        if !is_hole(item) {
            let message = format!("`{name}` must be {wanted}, not {}", with_article(item.get_ref().type_str()));
            self.found.error(code::WRONG_TYPE, item.span(), message);
        }
    }
}

impl<'t> Table<'t> {
    pub fn get(&self, name: &str) -> Option<&'t Item<'t>> {
        debug_assert!(self.section.has(name), "{name} is not declared in {}", self.section.title);
        self.entries.get(name)
    }

    /// Where a key's name stands, else where the table does.
    pub fn key_span(&self, name: &str) -> Range<usize> {
        self.entries.get_key_value(name).map_or(self.span.clone(), |(key, _)| key.span())
    }
}

/// The entries of a table in the order of the file (the parser sorts by name).
pub fn in_order<'t>(entries: &'t DeTable<'t>) -> Vec<(&'t Spanned<std::borrow::Cow<'t, str>>, &'t Item<'t>)> {
    let mut list: Vec<_> = entries.iter().collect();
    list.sort_by_key(|(key, _)| key.span().start);
    list
}

pub fn with_article(type_name: &str) -> String {
    let article = if type_name.starts_with(['a', 'i']) { "an" } else { "a" };
    format!("{article} {type_name}")
}

/// A key that another table has: most often one that TOML's last header took in.
fn belongs_to(name: &str) -> Option<String> {
    let section = SECTIONS.iter().find(|section| section.has(name))?;
    Some(match section.title {
        "Top level" => format!("`{name}` belongs at the top of the file, before the first table"),
        title => format!("`{name}` belongs in {title}"),
    })
}
