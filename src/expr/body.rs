//! The value of a record on its way through the operators: a JSON object, text, bytes or null.

use std::cell::OnceCell;

use vrl::path::OwnedSegment;
use vrl::value::Value;

use crate::json::{Inexact, JsonBody, unwritable};
use crate::topology::spec::Format;

use super::Fault;

/// The value of a record. Its buffers are reused: decode the next record into the same body.
#[derive(Clone, Debug)]
pub struct Body {
    format: Format,
    null: bool,
    json: JsonBody,
    /// The value of a `string` or `bytes` record.
    plain: Vec<u8>,
    /// `plain` as expressions see it.
    plain_value: OnceCell<Value>,
    /// What a program assigned to `.`; [`Body::settle`] takes it in.
    assigned: Option<Value>,
}

static NULL: Value = Value::Null;

impl Default for Body {
    fn default() -> Body {
        Body {
            format: Format::Json,
            null: true,
            json: JsonBody::default(),
            plain: Vec::new(),
            plain_value: OnceCell::new(),
            assigned: None,
        }
    }
}

impl Body {
    /// Takes in the value of a record. Null is a tombstone in every format.
    ///
    /// # Errors
    /// `undecodable`: not a JSON object as [`JsonBody::decode`] wants it, not UTF-8 where text is due.
    pub fn decode(&mut self, format: Format, value: Option<&[u8]>) -> Result<(), Fault> {
        self.format = format;
        self.assigned = None;
        self.null = value.is_none();
        let Some(value) = value else { return Ok(()) };
        match format {
            Format::Json => self.json.decode(value).map_err(|e| Fault::new("undecodable", e.to_string()))?,
            Format::String | Format::Bytes => {
                if format == Format::String
                    && let Err(e) = std::str::from_utf8(value)
                {
                    let message = format!("the value is not UTF-8 (byte {})", e.valid_up_to());
                    return Err(Fault::new("undecodable", message));
                }
                self.set_plain(value);
            }
        }
        Ok(())
    }

    /// A tombstone.
    pub fn is_null(&self) -> bool {
        self.null
    }

    /// The object, of a JSON record that is no tombstone.
    pub fn json(&self) -> Option<&JsonBody> {
        (self.format == Format::Json && !self.null).then_some(&self.json)
    }

    /// Writes the value as it goes into a topic; nothing for a tombstone.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self.format {
            _ if self.null => {}
            Format::Json => self.json.encode(out),
            Format::String | Format::Bytes => out.extend_from_slice(&self.plain),
        }
    }

    /// Makes ready for a value that takes the place of another record's.
    pub(crate) fn inherit(&mut self, other: &Body) {
        self.format = other.format;
        self.assigned = None;
    }

    /// Makes `value` the value, as an element of a `flat_map` or an assignment to `.` does.
    ///
    /// # Errors
    /// What is wrong with it: a record of JSON must be an object, a record of text or bytes that or a string.
    pub(crate) fn become_value(&mut self, value: Value) -> Result<(), String> {
        match (value, self.format) {
            (Value::Object(object), _) => {
                if let Some(problem) = object.values().find_map(unwritable) {
                    return Err(format!("the value cannot be written as JSON: {problem}"));
                }
                self.format = Format::Json;
                self.json.replace(object);
            }
            (value @ (Value::Bytes(_) | Value::String(_)), Format::String | Format::Bytes) => {
                let bytes = value.as_bytes().map_or(&[][..], |b| b);
                if self.format == Format::String && std::str::from_utf8(bytes).is_err() {
                    return Err("the value of a string record must be UTF-8".into());
                }
                self.set_plain(bytes);
            }
            (other, Format::Json) => return Err(format!("the value must be an object, it is {}", described(&other))),
            (other, _) => return Err(format!("the value must be a string or an object, it is {}", described(&other))),
        }
        self.null = false;
        Ok(())
    }

    fn set_plain(&mut self, bytes: &[u8]) {
        self.plain.clear();
        self.plain.extend_from_slice(bytes);
        self.plain_value.take();
    }

    /// The value at a path. The second answer tells of a number in it that the value does not hold exactly.
    pub(super) fn get(&self, path: &[OwnedSegment]) -> (Option<&Value>, Option<Inexact>) {
        if let Some(value) = &self.assigned {
            return (if path.is_empty() { Some(value) } else { value.get(path) }, None);
        }
        match self.format {
            _ if self.null => (path.is_empty().then_some(&NULL), None),
            Format::Json => self.json.get(path),
            Format::String | Format::Bytes => (path.is_empty().then(|| self.plain_value()), None),
        }
    }

    fn plain_value(&self) -> &Value {
        self.plain_value.get_or_init(|| match std::str::from_utf8(&self.plain) {
            Ok(text) => Value::from(text),
            Err(_) => Value::from(&self.plain[..]),
        })
    }

    /// Writes at a path.
    pub(super) fn set(&mut self, path: &[OwnedSegment], value: Value) -> Result<(), Fault> {
        let [OwnedSegment::Field(name), rest @ ..] = path else { return self.assign(path, value) };
        if self.assigned.is_some() || self.json().is_none() {
            return self.assign(path, value);
        }
        if let Some(problem) = unwritable(&value) {
            return Err(Fault::new(
                "expression",
                format!("the value of `{name}` cannot be written as JSON: {problem}"),
            ));
        }
        self.json.set(name, rest, value).map_err(Fault::from)
    }

    /// Writes to the value as a whole: it is parsed, and encoded anew afterwards.
    fn assign(&mut self, path: &[OwnedSegment], value: Value) -> Result<(), Fault> {
        if path.is_empty() {
            self.assigned = Some(value);
            return Ok(());
        }
        self.whole()?.insert(path, value);
        Ok(())
    }

    /// The assigned value; before any assignment a copy of what is there.
    fn whole(&mut self) -> Result<&mut Value, Fault> {
        if self.assigned.is_none() {
            let (value, inexact) = self.get(&[]);
            if let Some(inexact) = inexact {
                return Err(inexact.into());
            }
            self.assigned = value.cloned();
        }
        Ok(self.assigned.get_or_insert(Value::Null))
    }

    /// Removes what stands at a path.
    pub(super) fn unset(&mut self, path: &[OwnedSegment], compact: bool) -> Result<Option<Value>, Fault> {
        if self.assigned.is_none()
            && self.json().is_some()
            && let [OwnedSegment::Field(name), rest @ ..] = path
        {
            return self.json.unset(name, rest, compact).map_err(Fault::from);
        }
        Ok(self.whole()?.remove(path, compact))
    }

    /// Removes a member whose value nobody looks at.
    pub(super) fn discard(&mut self, name: &str) {
        if let Some(assigned) = &mut self.assigned {
            if let Value::Object(object) = assigned {
                object.remove(name);
            }
        } else if self.json().is_some() {
            self.json.discard(name);
        }
    }

    /// Takes in what a program assigned to `.`: null is a tombstone only where it was one before.
    pub(super) fn settle(&mut self) -> Result<(), Fault> {
        match self.assigned.take() {
            None => Ok(()),
            Some(Value::Null) if self.null => Ok(()),
            Some(value) => self.become_value(value).map_err(|message| Fault::new("expression", message)),
        }
    }
}

/// A value's type, in words for a message.
pub(crate) fn described(value: &Value) -> &'static str {
    match value {
        Value::Bytes(_) | Value::String(_) | Value::Regex(_) => "a string",
        Value::Integer(_) => "an integer",
        Value::Float(_) => "a float",
        Value::Boolean(_) => "a boolean",
        Value::Timestamp(_) => "a timestamp",
        Value::Object(_) => "an object",
        Value::Array(_) => "an array",
        Value::Null => "null",
    }
}
