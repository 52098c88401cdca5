//! The value of a `key`, `event_id` or `event_time` expression. One that is just a path of a JSON record is read off the
//! record's text: fast, and an integer of any size keeps its digits.

use std::borrow::Cow;

use crate::expr::{Fault, Metadata, Program, Runtime, Value, described};

use super::Record;

/// What an expression gave.
#[derive(Debug)]
pub(super) enum Scalar<'a> {
    Null,
    Text(Cow<'a, [u8]>),
    /// The digits.
    Integer(Cow<'a, [u8]>),
    /// Anything else.
    Value(Value),
}

/// Evaluates an expression on a record; `None` if it aborted.
pub(super) fn scalar<'a>(
    program: &Program,
    record: &'a Record,
    runtime: &mut Runtime,
    metadata: &Metadata<'_>,
) -> Result<Option<Scalar<'a>>, Fault> {
    if let Some(name) = program.member()
        && let Some(json) = record.body.json()
        && let Some(scalar) = json.kept(name).map_or(Some(Scalar::Null), of_text)
    {
        return Ok(Some(scalar));
    }
    Ok(program.value(runtime, &record.body, metadata)?.map(of_value))
}

/// What JSON text is read as it stands; the rest (decimals, containers) goes through the expression.
fn of_text(text: &[u8]) -> Option<Scalar<'_>> {
    match text {
        [b'"', inside @ .., b'"'] if memchr::memchr(b'\\', inside).is_none() => {
            Some(Scalar::Text(Cow::Borrowed(inside)))
        }
        b"-0" => Some(Scalar::Integer(Cow::Borrowed(b"0"))),
        [b'-' | b'0'..=b'9', rest @ ..] if rest.iter().all(u8::is_ascii_digit) => {
            Some(Scalar::Integer(Cow::Borrowed(text)))
        }
        _ => None,
    }
}

fn of_value(value: Value) -> Scalar<'static> {
    match value {
        Value::Null => Scalar::Null,
        Value::Integer(i) => Scalar::Integer(Cow::Owned(i.to_string().into_bytes())),
        Value::Bytes(bytes) => Scalar::Text(Cow::Owned(bytes.to_vec())),
        Value::String(text) => Scalar::Text(Cow::Owned(text.as_bytes().to_vec())),
        other => Scalar::Value(other),
    }
}

impl Scalar<'_> {
    /// The type, in words for a message.
    pub(super) fn described(&self) -> &'static str {
        match self {
            Scalar::Null => "null",
            Scalar::Text(_) => "a string",
            Scalar::Integer(_) => "an integer",
            Scalar::Value(value) => described(value),
        }
    }
}
