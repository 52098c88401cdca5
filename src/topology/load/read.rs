//! Typed reading of keys. Every reader answers `None` for an absent key and, after a finding, for a wrong value.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use toml::de::{DeInteger, DeValue};

use super::cx::{Cx, Table, Text, in_order, is_hole, with_article};
use super::units;
use crate::topology::finding::{code, did_you_mean};

/// A setting's name, where the name stands, and its value.
pub type Setting = (String, Range<usize>, Text);

impl Cx<'_> {
    /// A string with its variables.
    pub fn string(&mut self, table: &Table<'_>, name: &str) -> Option<Text> {
        let item = table.get(name)?;
        match item.get_ref() {
            DeValue::String(text) => Some(self.interpolated(text, item.span())),
            _ => {
                self.wrong_type(name, item, "a string");
                None
            }
        }
    }

    pub fn required_string(&mut self, table: &Table<'_>, name: &str, help: &str) -> Option<Text> {
        if table.get(name).is_none() {
            self.missing(table, name, help);
        }
        self.string(table, name)
    }

    /// A non-empty array of strings.
    pub fn required_strings(&mut self, table: &Table<'_>, name: &str, help: &str) -> Vec<Text> {
        let Some(item) = table.get(name) else {
            self.missing(table, name, help);
            return Vec::new();
        };
        let DeValue::Array(array) = item.get_ref() else {
            if !is_hole(item) {
                let message = format!("`{name}` must be an array of strings, not a {}", item.get_ref().type_str());
                self.found.error(code::WRONG_TYPE, item.span(), message).help(help);
            }
            return Vec::new();
        };
        if array.is_empty() {
            self.found.error(code::INVALID_VALUE, item.span(), format!("`{name}` is empty")).help(help);
        }
        array
            .iter()
            .filter_map(|item| match item.get_ref() {
                DeValue::String(text) => Some(self.interpolated(text, item.span())),
                other => {
                    let message = format!("`{name}` must hold strings, not {}", with_article(other.type_str()));
                    self.found.error(code::WRONG_TYPE, item.span(), message);
                    None
                }
            })
            .collect()
    }

    /// An integer, or a string that holds one after interpolation.
    pub fn integer(&mut self, table: &Table<'_>, name: &str, range: RangeInclusive<i64>) -> Option<i64> {
        let item = table.get(name)?;
        let (value, shown) = match item.get_ref() {
            DeValue::Integer(integer) => (parse_integer(integer), integer.to_string()),
            DeValue::String(text) => {
                let text = self.interpolated(text, item.span());
                if text.unset {
                    return None;
                }
                (text.value.trim().parse().ok(), text.shown)
            }
            _ => {
                self.wrong_type(name, item, "a number");
                return None;
            }
        };
        if is_hole(item) {
            return None;
        }
        let value = value.filter(|v| range.contains(v));
        if value.is_none() {
            let limits = match (*range.start(), *range.end()) {
                (low, i64::MAX) => format!("a whole number from {low}"),
                (low, high) => format!("a whole number from {low} to {high}"),
            };
            self.found.error(code::INVALID_VALUE, item.span(), format!("`{name}` must be {limits}, not {shown}"));
        }
        value
    }

    /// A boolean, or a string that holds one after interpolation.
    pub fn boolean(&mut self, table: &Table<'_>, name: &str) -> Option<bool> {
        let item = table.get(name)?;
        match item.get_ref() {
            DeValue::Boolean(value) => Some(*value),
            DeValue::String(text) => {
                let text = self.interpolated(text, item.span());
                let value = text.value.parse().ok();
                if value.is_none() && !text.unset {
                    let message = format!("`{name}` must be true or false, not {}", text.shown);
                    self.found.error(code::INVALID_VALUE, text.span, message);
                }
                value
            }
            _ => {
                self.wrong_type(name, item, "true or false");
                None
            }
        }
    }

    /// A duration of at least `least`.
    pub fn duration(&mut self, table: &Table<'_>, name: &str, least: Duration) -> Option<Duration> {
        let value = self.unit(table, name, "a duration such as \"100ms\"", units::duration)?;
        if value < least {
            let message = format!("`{name}` must be at least {}", duration_text(least));
            self.found.error(code::INVALID_VALUE, table.get(name)?.span(), message);
            return None;
        }
        Some(value)
    }

    /// A size of at least `least` bytes.
    pub fn size(&mut self, table: &Table<'_>, name: &str, least: u64) -> Option<u64> {
        let value = self.unit(table, name, "a size such as \"16MiB\"", units::size)?;
        if value < least {
            let message = format!("`{name}` must be at least {} KiB", least >> 10);
            self.found.error(code::INVALID_VALUE, table.get(name)?.span(), message);
            return None;
        }
        Some(value)
    }

    fn unit<T>(
        &mut self,
        table: &Table<'_>,
        name: &str,
        wanted: &str,
        parse: fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        let item = table.get(name)?;
        let DeValue::String(text) = item.get_ref() else {
            self.wrong_type(name, item, wanted);
            return None;
        };
        let text = self.interpolated(text, item.span());
        if text.unset {
            return None;
        }
        parse(text.value.trim())
            .map_err(|problem| {
                // The parser quotes its input, which may be a secret put in the wrong variable.
                let plain = text.shown.starts_with('`');
                let message = if plain { problem } else { format!("`{name}` must be {wanted}: {} is not", text.shown) };
                self.found.error(code::INVALID_VALUE, text.span, message);
            })
            .ok()
    }

    /// One of a few words.
    pub fn choice<T: Copy>(&mut self, table: &Table<'_>, name: &str, words: &[(&str, T)]) -> Option<T> {
        let text = self.string(table, name)?;
        if text.unset {
            return None;
        }
        let value = words.iter().find(|(word, _)| *word == text.value).map(|(_, value)| *value);
        if value.is_none() {
            let list: Vec<_> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
            let message = format!("`{name}` must be {}, not {}", one_of(&list), text.shown);
            let help = did_you_mean(&text.value, words.iter().map(|(word, _)| *word));
            self.found.error(code::INVALID_VALUE, text.span, message).maybe_help(help);
        }
        value
    }

    /// A time: milliseconds since 1970, or RFC 3339 with an offset as a TOML date-time or a string.
    pub fn instant(&mut self, table: &Table<'_>, name: &str) -> Option<i64> {
        let item = table.get(name)?;
        let parsed = match item.get_ref() {
            DeValue::Integer(integer) => parse_integer(integer).ok_or("too large for a time"),
            DeValue::Datetime(at) => units::instant(at),
            DeValue::String(text) => {
                let text = self.interpolated(text, item.span());
                if text.unset {
                    return None;
                }
                parse_instant(&text.value)
            }
            _ => {
                self.wrong_type(name, item, "a time (RFC 3339 or milliseconds since 1970)");
                return None;
            }
        };
        if let Err(problem) = parsed {
            self.found.error(code::INVALID_VALUE, item.span(), problem);
        }
        parsed.ok()
    }

    /// A table of settings with text values; nested tables are keys with dots, numbers and booleans are their text.
    pub fn settings(&mut self, table: &Table<'_>, name: &str) -> Vec<Setting> {
        let mut out = Vec::new();
        if let Some(item) = table.get(name)
            && let Some(entries) = self.entries(item, &format!("`{name}`"))
        {
            self.flatten(None, entries, &mut out);
        }
        out
    }

    fn flatten<'t>(&mut self, prefix: Option<&str>, entries: &'t toml::de::DeTable<'t>, out: &mut Vec<Setting>) {
        for (key, item) in in_order(entries) {
            let mut name = key.get_ref().to_string();
            let mut span = key.span();
            if let Some(prefix) = prefix {
                name = format!("{prefix}.{name}");
                span.start = self.dotted_start(span.start);
            }
            let plain = |value: String| Text { shown: value.clone(), value, span: item.span(), unset: false };
            match item.get_ref() {
                DeValue::Table(inner) => self.flatten(Some(&name), inner, out),
                DeValue::String(text) => {
                    let text = self.interpolated(text, item.span());
                    out.push((name, span, text));
                }
                DeValue::Integer(integer) if !is_hole(item) => out.push((name, span, plain(integer.to_string()))),
                DeValue::Float(float) => out.push((name, span, plain(float.to_string()))),
                DeValue::Boolean(value) => out.push((name, span, plain(value.to_string()))),
                _ => self.wrong_type(&name, item, "a string, a number or a boolean"),
            }
        }
    }
}

impl Cx<'_> {
    /// Where a key like `a.b` begins, from where its last part does.
    fn dotted_start(&self, last: usize) -> usize {
        let before = self.text.get(..last).unwrap_or("");
        before.trim_end_matches(|c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')).len()
    }
}

/// The settings as a map.
pub fn into_map(settings: Vec<Setting>) -> BTreeMap<String, String> {
    settings.into_iter().map(|(name, _, text)| (name, text.value)).collect()
}

pub fn parse_integer(integer: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

pub fn parse_instant(text: &str) -> Result<i64, &'static str> {
    if let Ok(ms) = text.parse::<i64>() {
        return Ok(ms);
    }
    text.parse().map_err(|_| "no time; write RFC 3339, such as 2026-01-31T00:00:00Z").and_then(|at| units::instant(&at))
}

/// A duration in its largest whole unit.
pub fn duration_text(duration: Duration) -> String {
    let ms = duration.as_millis();
    match ms {
        _ if ms == 0 || !ms.is_multiple_of(1000) => format!("{ms}ms"),
        _ if !ms.is_multiple_of(60_000) => format!("{}s", ms / 1000),
        _ if !ms.is_multiple_of(3_600_000) => format!("{}m", ms / 60_000),
        _ if !ms.is_multiple_of(86_400_000) => format!("{}h", ms / 3_600_000),
        _ => format!("{}d", ms / 86_400_000),
    }
}

/// "a", "a or b", "a, b or c".
pub fn one_of(list: &[String]) -> String {
    match list {
        [] => String::new(),
        [one] => one.clone(),
        [init @ .., last] => format!("{} or {last}", init.join(", ")),
    }
}
