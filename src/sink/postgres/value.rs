//! From a member's JSON text to what its column takes. Everything that Postgres would refuse in a value alone is
//! refused here, before versions of a key are folded: a bad record must reach the dead letters no matter what else is
//! in its batch.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use uuid::Uuid;

use super::layout::{Column, Type};
use super::{jsonb, temporal};
use crate::decimal::Decimal;

/// A value ready for its column. Texts and bytes lie in the batch's [`Arena`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    Null,
    Bool(bool),
    /// Integers, and times in microseconds since 1970.
    Int(i64),
    Float(f64),
    Uuid([u8; 16]),
    Text(Span),
    Bytes(Span),
}

/// A place in an [`Arena`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    start: u32,
    end: u32,
}

/// The texts and bytes of a batch.
#[derive(Clone, Debug, Default)]
pub struct Arena {
    text: String,
    bytes: Vec<u8>,
}

impl Arena {
    pub fn text(&self, span: Span) -> &str {
        &self.text[span.start as usize..span.end as usize]
    }

    pub fn bytes(&self, span: Span) -> &[u8] {
        &self.bytes[span.start as usize..span.end as usize]
    }

    pub fn len(&self) -> usize {
        self.text.len() + self.bytes.len()
    }

    pub fn clear(&mut self) {
        self.text.clear();
        self.bytes.clear();
    }

    /// Where the arena stands, to [`rewind`](Arena::rewind) to.
    pub fn mark(&self) -> (usize, usize) {
        (self.text.len(), self.bytes.len())
    }

    pub fn rewind(&mut self, (text, bytes): (usize, usize)) {
        self.text.truncate(text);
        self.bytes.truncate(bytes);
    }

    fn push_text(&mut self, text: &str) -> Value {
        self.write_text(|out| out.push_str(text))
    }

    fn write_text(&mut self, write: impl FnOnce(&mut String)) -> Value {
        let start = self.text.len();
        write(&mut self.text);
        Value::Text(Span { start: start as u32, end: self.text.len() as u32 })
    }
}

/// Converts the JSON text of a cell. In a key column equal values become equal: numerics lose trailing zeros, times
/// their offset, uuids their case.
///
/// # Errors
/// What is wrong with the value, to follow "does not fit".
pub fn convert(column: &Column, key: bool, json: &str, arena: &mut Arena) -> Result<Value, Cow<'static, str>> {
    if json == "null" {
        return Ok(Value::Null);
    }
    match &column.ty {
        Type::Text { max } => text(json, *max, arena),
        Type::Char { max } => {
            let text = plain_text(json)?;
            let text = text.trim_end_matches(' ');
            check_text(text, Some(*max))?;
            Ok(arena.push_text(text))
        }
        Type::Bool => match json {
            "true" => Ok(Value::Bool(true)),
            "false" => Ok(Value::Bool(false)),
            _ => Err("only true and false do".into()),
        },
        Type::Int2 => integer(json, i16::MIN.into(), i16::MAX.into()),
        Type::Int4 => integer(json, i32::MIN.into(), i32::MAX.into()),
        Type::Int8 => integer(json, i64::MIN, i64::MAX),
        Type::Numeric { limits } => numeric(json, *limits, key, arena),
        Type::Float4 => float(json, |text| text.parse::<f32>().map(f64::from).unwrap_or(f64::INFINITY)),
        Type::Float8 => float(json, |text| text.parse::<f64>().unwrap_or(f64::INFINITY)),
        Type::Uuid => match Uuid::parse_str(&string(json)?) {
            Ok(uuid) => Ok(Value::Uuid(*uuid.as_bytes())),
            Err(_) => Err("no uuid".into()),
        },
        Type::TimestampTz { digits } => time(json, *digits, temporal::timestamptz),
        Type::Timestamp { digits } => time(json, *digits, temporal::timestamp),
        Type::Date => match string(json)? {
            date if temporal::is_date(&date) => Ok(arena.push_text(&date)),
            _ => Err("no date as YYYY-MM-DD".into()),
        },
        Type::Json => Ok(arena.push_text(json)),
        Type::Jsonb => {
            jsonb::check(json)?;
            Ok(arena.push_text(json))
        }
        Type::Bytea => {
            let encoded = string(json)?;
            let start = arena.bytes.len();
            match STANDARD.decode_vec(encoded.as_bytes(), &mut arena.bytes) {
                Ok(()) => Ok(Value::Bytes(Span { start: start as u32, end: arena.bytes.len() as u32 })),
                Err(_) => Err("no base64".into()),
            }
        }
        Type::Enum { labels, .. } => match string(json)? {
            label if labels.iter().any(|l| *l == label) => Ok(arena.push_text(&label)),
            _ => Err("none of the enum's labels".into()),
        },
    }
}

/// A JSON string's characters.
fn string(json: &str) -> Result<Cow<'_, str>, Cow<'static, str>> {
    let Some(inner) = json.strip_prefix('"').and_then(|s| s.strip_suffix('"')) else {
        return Err("no string".into());
    };
    if !inner.contains('\\') {
        return Ok(Cow::Borrowed(inner));
    }
    serde_json::from_str::<String>(json).map(Cow::Owned).map_err(|e| format!("no valid string ({e})").into())
}

/// A string's characters; of anything else its JSON text.
fn plain_text(json: &str) -> Result<Cow<'_, str>, Cow<'static, str>> {
    if json.starts_with('"') { string(json) } else { Ok(Cow::Borrowed(json)) }
}

fn text(json: &str, max: Option<usize>, arena: &mut Arena) -> Result<Value, Cow<'static, str>> {
    let text = plain_text(json)?;
    check_text(&text, max)?;
    Ok(arena.push_text(&text))
}

fn check_text(text: &str, max: Option<usize>) -> Result<(), Cow<'static, str>> {
    if text.contains('\0') {
        return Err("it holds a NUL character, which Postgres cannot store in text".into());
    }
    match max {
        // Only a text with more bytes than characters allowed needs counting.
        Some(max) if text.len() > max && text.chars().count() > max => {
            Err(format!("it has {} characters", text.chars().count()).into())
        }
        _ => Ok(()),
    }
}

/// A number, or a string that holds one: identifiers often come as strings.
fn number(json: &str) -> Result<(&str, Decimal<'_>), Cow<'static, str>> {
    let text = json.strip_prefix('"').and_then(|s| s.strip_suffix('"')).unwrap_or(json);
    Decimal::parse(text).map(|d| (text, d)).ok_or(Cow::Borrowed("no number"))
}

fn integer(json: &str, min: i64, max: i64) -> Result<Value, Cow<'static, str>> {
    let (_, decimal) = number(json)?;
    match decimal.to_i64() {
        Some(n) if (min..=max).contains(&n) => Ok(Value::Int(n)),
        None if decimal.places().is_some_and(|(_, last)| last < 0) => Err("it is no integer".into()),
        _ => Err("out of range".into()),
    }
}

fn numeric(json: &str, limits: Option<(i32, i32)>, key: bool, arena: &mut Arena) -> Result<Value, Cow<'static, str>> {
    let (text, decimal) = number(json)?;
    check_numeric(&decimal, limits)?;
    Ok(arena.write_text(|out| if key { decimal.write_canonical(out) } else { out.push_str(text) }))
}

/// Refuses a number that a numeric would not hold to the last digit. Without declared limits Postgres takes 131072
/// digits before the point and 16383 behind it.
pub(super) fn check_numeric(decimal: &Decimal<'_>, limits: Option<(i32, i32)>) -> Result<(), Cow<'static, str>> {
    let Some((first, last)) = decimal.places() else { return Ok(()) };
    let (whole, scale) = limits.map_or((131_072, 16_383), |(p, s)| (i64::from(p) - i64::from(s), i64::from(s)));
    if first >= whole {
        return Err("out of range".into());
    }
    if last < -scale {
        return Err("digits behind its scale would be lost".into());
    }
    Ok(())
}

fn float(json: &str, parse: impl FnOnce(&str) -> f64) -> Result<Value, Cow<'static, str>> {
    let (text, decimal) = number(json)?;
    let value = parse(text);
    // Postgres refuses what only rounds to 0, too.
    if !value.is_finite() || (value == 0.0 && !decimal.is_zero()) {
        return Err("out of range".into());
    }
    // -0 and 0 are equal in the database: one spelling.
    Ok(Value::Float(value + 0.0))
}

fn time(json: &str, digits: u32, parse: fn(&str) -> Result<i64, &'static str>) -> Result<Value, Cow<'static, str>> {
    let micros = if json.starts_with('"') {
        parse(&string(json)?)?
    } else {
        let decimal = Decimal::parse(json).ok_or("neither a string nor an integer")?;
        temporal::from_millis(decimal.to_i64().ok_or("no integer of milliseconds since 1970")?)?
    };
    Ok(Value::Int(temporal::rounded(micros, digits)))
}

#[cfg(test)]
mod tests;
