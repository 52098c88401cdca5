//! JSON for comparing: numbers to the last digit, members in any order.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::decimal::Decimal;

/// A JSON value. Two are equal where JSON means the same: `5` and `5.0`, `{"a":1,"b":2}` and `{"b":2,"a":1}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tree {
    Null,
    Bool(bool),
    Number(Number),
    String(String),
    Array(Vec<Tree>),
    Object(BTreeMap<String, Tree>),
}

/// A number: how it was written, and the one spelling that equal numbers share.
#[derive(Clone, Debug)]
pub struct Number {
    written: String,
    canonical: String,
}

impl PartialEq for Number {
    fn eq(&self, other: &Number) -> bool {
        self.canonical == other.canonical
    }
}

impl Eq for Number {}

impl Number {
    /// An integer and the power of ten that it is multiplied by.
    fn scaled(&self) -> Option<(i128, i64)> {
        let (digits, scale) = self.canonical.split_once('e').unwrap_or((&self.canonical, "0"));
        Some((digits.parse().ok()?, scale.parse().ok()?))
    }
}

impl Tree {
    /// Reads JSON text; `None` where it is none, or deeper than 128 levels.
    pub fn parse(text: &[u8]) -> Option<Tree> {
        let raw: &RawValue = serde_json::from_slice(text).ok()?;
        Tree::read(raw)
    }

    fn read(raw: &RawValue) -> Option<Tree> {
        let text = raw.get().trim();
        Some(match text.as_bytes().first()? {
            b'n' => Tree::Null,
            b't' | b'f' => Tree::Bool(text == "true"),
            b'"' => Tree::String(serde_json::from_str(text).ok()?),
            b'[' => {
                let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
                Tree::Array(items.into_iter().map(Tree::read).collect::<Option<_>>()?)
            }
            b'{' => {
                let members: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok()?;
                let members = members.into_iter().map(|(name, raw)| Some((name, Tree::read(raw)?)));
                Tree::Object(members.collect::<Option<_>>()?)
            }
            _ => {
                let mut canonical = String::new();
                Decimal::parse(text)?.write_canonical(&mut canonical);
                Tree::Number(Number { written: text.to_owned(), canonical })
            }
        })
    }

    /// The number that a number is, or that a string holds.
    pub fn as_number(&self) -> Option<Tree> {
        match self {
            Tree::Number(_) => Some(self.clone()),
            Tree::String(text) if Decimal::parse(text).is_some() => Tree::parse(text.as_bytes()),
            _ => None,
        }
    }

    /// The exact sum of two numbers; none where one is no number or the sum has more than 38 digits.
    pub fn plus(&self, other: &Tree) -> Option<Tree> {
        let (Tree::Number(a), Tree::Number(b)) = (self, other) else { return None };
        let ((a, a_scale), (b, b_scale)) = (a.scaled()?, b.scaled()?);
        let scale = a_scale.min(b_scale);
        let at = |number: i128, from: i64| number.checked_mul(10i128.checked_pow(u32::try_from(from - scale).ok()?)?);
        let sum = at(a, a_scale)?.checked_add(at(b, b_scale)?)?;
        let (sign, digits) = (if sum < 0 { "-" } else { "" }, sum.unsigned_abs().to_string());
        let text = match usize::try_from(-scale) {
            Ok(0) => digits,
            Ok(behind) => {
                let digits = format!("{digits:0>width$}", width = behind + 1);
                let (whole, fraction) = digits.split_at(digits.len() - behind);
                format!("{whole}.{fraction}")
            }
            Err(_) => format!("{digits}e{scale}"),
        };
        Tree::parse(format!("{sign}{text}").as_bytes())
    }

    /// The text, compact, members by name, numbers as they were written.
    pub fn text(&self) -> String {
        match self {
            Tree::Null => "null".to_owned(),
            Tree::Bool(value) => value.to_string(),
            Tree::Number(number) => number.written.clone(),
            Tree::String(text) => serde_json::Value::from(text.as_str()).to_string(),
            Tree::Array(items) => format!("[{}]", items.iter().map(Tree::text).collect::<Vec<_>>().join(",")),
            Tree::Object(members) => {
                let member = |(name, tree): (&String, &Tree)| {
                    format!("{}:{}", serde_json::Value::from(name.as_str()), tree.text())
                };
                format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(","))
            }
        }
    }

    /// The first place where `actual` differs, as a path (`.a[0]`; empty for the whole), with what stands there in
    /// both.
    pub fn first_difference(&self, actual: &Tree) -> Option<(String, Option<String>, Option<String>)> {
        match (self, actual) {
            _ if self == actual => None,
            (Tree::Object(expected), Tree::Object(actual)) => {
                let names = expected.keys().chain(actual.keys().filter(|name| !expected.contains_key(*name)));
                let places = names.map(|name| (format!(".{name}"), expected.get(name), actual.get(name)));
                first_of(places)
            }
            (Tree::Array(expected), Tree::Array(actual)) => {
                let places =
                    (0..expected.len().max(actual.len())).map(|i| (format!("[{i}]"), expected.get(i), actual.get(i)));
                first_of(places)
            }
            _ => Some((String::new(), Some(self.text()), Some(actual.text()))),
        }
    }
}

type Place<'t> = (String, Option<&'t Tree>, Option<&'t Tree>);

fn first_of<'t>(places: impl Iterator<Item = Place<'t>>) -> Option<(String, Option<String>, Option<String>)> {
    places.into_iter().find_map(|(path, expected, actual)| match (expected, actual) {
        (Some(expected), Some(actual)) => {
            let (inner, expected, actual) = expected.first_difference(actual)?;
            Some((format!("{path}{inner}"), expected, actual))
        }
        _ => Some((path, expected.map(Tree::text), actual.map(Tree::text))),
    })
}

/// Orders keys of rows: by type, numbers by value, texts by their bytes.
impl Ord for Tree {
    fn cmp(&self, other: &Tree) -> Ordering {
        let rank = |tree: &Tree| match tree {
            Tree::Null => 0,
            Tree::Bool(_) => 1,
            Tree::Number(_) => 2,
            Tree::String(_) => 3,
            Tree::Array(_) => 4,
            Tree::Object(_) => 5,
        };
        match (self, other) {
            (Tree::Bool(a), Tree::Bool(b)) => a.cmp(b),
            (Tree::Number(a), Tree::Number(b)) if a != b => {
                let value = |number: &Number| number.canonical.parse::<f64>().unwrap_or(0.0);
                value(a).total_cmp(&value(b)).then_with(|| a.canonical.cmp(&b.canonical))
            }
            (Tree::Number(_), Tree::Number(_)) => Ordering::Equal,
            (Tree::String(a), Tree::String(b)) => a.cmp(b),
            (Tree::Array(a), Tree::Array(b)) => a.cmp(b),
            (Tree::Object(a), Tree::Object(b)) => a.cmp(b),
            _ => rank(self).cmp(&rank(other)),
        }
    }
}

impl PartialOrd for Tree {
    fn partial_cmp(&self, other: &Tree) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(text: &str) -> Tree {
        Tree::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn equality_is_what_json_means() {
        assert_eq!(tree("5"), tree("5.0"));
        assert_eq!(tree("1e3"), tree("1000"));
        assert_eq!(tree(r#"{"a":1,"b":"\u00e5"}"#), tree(r#"{ "b": "å", "a": 1 }"#));
        assert_ne!(tree("9007199254740993"), tree("9007199254740992"), "a double calls these equal");
        assert_ne!(tree("123456789012345678901234567890"), tree("123456789012345678901234567891"));
        assert_ne!(tree("null"), tree("0"));
        assert_eq!(Tree::parse(b"{"), None);
        assert_eq!(Tree::parse(&b"[".repeat(100_000)), None);
    }

    #[test]
    fn sums_are_exact() {
        let sum = |a: &str, b: &str| tree(a).plus(&tree(b)).map(|sum| sum.text());
        assert_eq!(sum("0.1", "0.2").as_deref(), Some("0.3"));
        assert_eq!(sum("9007199254740993", "9007199254740993").as_deref(), Some("18014398509481986"));
        assert_eq!(sum("19.90", "-20").as_deref(), Some("-0.1"));
        assert_eq!(sum("1e3", "2e3").as_deref(), Some("3e3"));
        assert_eq!(sum("1e60", "1"), None);
        assert_eq!(sum("\"1\"", "1"), None);
        assert_eq!(tree("\"1\"").as_number().and_then(|n| n.plus(&tree("1"))).unwrap().text(), "2");
    }

    #[test]
    fn the_first_difference_is_named_by_its_path() {
        let expected = tree(r#"{"id":"o1","lines":[{"qty":1},{"qty":2}]}"#);
        let of = |actual: &str| expected.first_difference(&tree(actual));
        let text = |s: &str| Some(s.to_owned());
        assert_eq!(of(r#"{"lines":[{"qty":1.0},{"qty":2}],"id":"o1"}"#), None);
        assert_eq!(
            of(r#"{"id":"o1","lines":[{"qty":1},{"qty":3}]}"#),
            Some((".lines[1].qty".to_owned(), text("2"), text("3")))
        );
        assert_eq!(
            of(r#"{"id":"o1","lines":[{"qty":1}]}"#),
            Some((".lines[1]".to_owned(), text(r#"{"qty":2}"#), None))
        );
        assert_eq!(
            of(r#"{"id":"o1","lines":[{"qty":1},{"qty":2}],"note":null}"#),
            Some((".note".to_owned(), None, text("null")))
        );
        assert_eq!(of("[]").unwrap().0, "");
    }

    #[test]
    fn keys_are_ordered_by_value() {
        let mut keys = ["\"b\"", "10", "9.5", "\"a\"", "-1", "true"].map(tree);
        keys.sort();
        assert_eq!(keys.map(|key| key.text()), ["true", "-1", "9.5", "10", "\"a\"", "\"b\""]);
    }
}
