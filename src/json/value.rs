//! JSON text to VRL values and back.

use std::ops::Range;

use vrl::path::OwnedSegment;
use vrl::value::{KeyString, ObjectMap, Value};

use super::number::{self, Number};
use super::{MAX_DEPTH, unescape};

/// A value read from valid JSON text.
#[derive(Clone, Debug)]
pub(crate) struct Parsed {
    pub(crate) value: Value,
    /// The first number in the text that the value does not hold exactly.
    pub(crate) inexact: Option<Range<usize>>,
}

/// Reads JSON text that a scan has found valid; what is not valid reads as null. Recursion is bounded by
/// [`MAX_DEPTH`].
pub(crate) fn parse(text: &[u8]) -> Parsed {
    let mut reader = Reader { text, at: 0, inexact: None };
    let value = reader.value();
    Parsed { value, inexact: reader.inexact }
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
    inexact: Option<Range<usize>>,
}

impl Reader<'_> {
    fn peek(&self) -> u8 {
        self.text.get(self.at).copied().unwrap_or(0)
    }

    fn space(&mut self) {
        while matches!(self.peek(), b' ' | b'\n' | b'\r' | b'\t') {
            self.at += 1;
        }
    }

    fn value(&mut self) -> Value {
        self.space();
        match self.peek() {
            b'"' => {
                let (raw, escaped) = self.string();
                let raw = &self.text[raw];
                if escaped { Value::from(unescape(raw)) } else { Value::from(&*String::from_utf8_lossy(raw)) }
            }
            b'{' => self.object(),
            b'[' => self.array(),
            b't' => self.word(4, Value::Boolean(true)),
            b'f' => self.word(5, Value::Boolean(false)),
            b'-' | b'0'..=b'9' => self.number(),
            _ => self.word(4, Value::Null),
        }
    }

    fn word(&mut self, len: usize, value: Value) -> Value {
        self.at += len;
        value
    }

    fn number(&mut self) -> Value {
        let start = self.at;
        while matches!(self.peek(), b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9') {
            self.at += 1;
        }
        let (number, exact) = number::parse(&self.text[start..self.at]);
        if !exact && self.inexact.is_none() {
            self.inexact = Some(start..self.at);
        }
        match number {
            Number::Integer(i) => Value::Integer(i),
            Number::Float(f) => Value::from_f64_or_zero(f),
        }
    }

    /// Steps over a string: where its inside is, and whether it holds escapes.
    fn string(&mut self) -> (Range<usize>, bool) {
        let start = self.at + 1;
        let mut end = start;
        let mut escaped = false;
        while let Some(at) = self.text.get(end..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
            end += at;
            if self.text[end] == b'"' {
                break;
            }
            escaped = true;
            end += 2;
        }
        let end = end.min(self.text.len());
        self.at = end + 1;
        (start..end, escaped)
    }

    fn array(&mut self) -> Value {
        let mut items = Vec::new();
        self.at += 1;
        loop {
            self.space();
            match self.peek() {
                b']' | 0 => break,
                b',' => self.at += 1,
                _ => items.push(self.value()),
            }
        }
        self.at += 1;
        Value::Array(items)
    }

    fn object(&mut self) -> Value {
        let mut map = ObjectMap::new();
        self.at += 1;
        loop {
            self.space();
            match self.peek() {
                b'"' => {
                    let (raw, escaped) = self.string();
                    let raw = &self.text[raw];
                    let name = if escaped {
                        KeyString::from(unescape(raw))
                    } else {
                        KeyString::from(String::from_utf8_lossy(raw))
                    };
                    self.space();
                    self.at += 1;
                    let value = self.value();
                    map.insert(name, value);
                }
                b',' => self.at += 1,
                _ => break,
            }
        }
        self.at += 1;
        Value::Object(map)
    }
}

impl Reader<'_> {
    /// Steps to the value of a member of the object that stands here.
    fn enter_member(&mut self, wanted: &str) -> bool {
        self.at += 1;
        loop {
            self.space();
            match self.peek() {
                b'"' => {
                    let (raw, escaped) = self.string();
                    let raw = &self.text[raw];
                    let found = if escaped { unescape(raw) == wanted } else { raw == wanted.as_bytes() };
                    self.space();
                    self.at += 1;
                    if found {
                        return true;
                    }
                    self.value();
                }
                b',' => self.at += 1,
                _ => return false,
            }
        }
    }

    /// Steps to an item of the array that stands here; a negative index counts from the end.
    fn enter_item(&mut self, index: isize) -> bool {
        self.at += 1;
        let mut starts = Vec::new();
        loop {
            self.space();
            match self.peek() {
                b']' | 0 => break,
                b',' => self.at += 1,
                _ => {
                    starts.push(self.at);
                    self.value();
                }
            }
        }
        let index = if index < 0 { starts.len().checked_add_signed(index) } else { Some(index as usize) };
        match index.and_then(|i| starts.get(i)) {
            Some(start) => {
                self.at = *start;
                true
            }
            None => false,
        }
    }
}

/// The first number below a path of valid JSON text that its value does not hold exactly.
pub(super) fn inexact_below<'a>(text: &'a [u8], path: &[OwnedSegment]) -> Option<&'a [u8]> {
    let mut reader = Reader { text, at: 0, inexact: None };
    for segment in path {
        reader.space();
        let found = match segment {
            OwnedSegment::Field(name) if reader.peek() == b'{' => reader.enter_member(name),
            OwnedSegment::Index(index) if reader.peek() == b'[' => reader.enter_item(*index),
            _ => false,
        };
        if !found {
            return None;
        }
    }
    // Numbers that were stepped over on the way do not count.
    reader.inexact = None;
    reader.value();
    reader.inexact.map(|range| &text[range])
}

/// What JSON cannot carry of a value that a program made, in words; `None` if it can carry all of it.
pub(crate) fn unwritable(value: &Value) -> Option<&'static str> {
    unwritable_at(value, 1)
}

fn unwritable_at(value: &Value, depth: usize) -> Option<&'static str> {
    if depth > MAX_DEPTH {
        return Some("it is nested deeper than 128 levels");
    }
    match value {
        Value::Float(f) if !f.is_finite() => Some("it holds a number that is not finite"),
        Value::Bytes(bytes) if std::str::from_utf8(bytes).is_err() => {
            Some("it holds bytes that are not UTF-8; encode_base64 makes text of them")
        }
        Value::Object(map) => map.values().find_map(|v| unwritable_at(v, depth + 1)),
        Value::Array(items) => items.iter().find_map(|v| unwritable_at(v, depth + 1)),
        _ => None,
    }
}

/// Writes a value as compact JSON. What [`unwritable`] names is written as null, or with replacement characters.
pub(crate) fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::String(text) => write_string(text, out),
        Value::Object(map) => {
            out.push(b'{');
            for (i, (name, value)) in map.iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                write_string(name, out);
                out.push(b':');
                write(value, out);
            }
            out.push(b'}');
        }
        Value::Array(items) => {
            out.push(b'[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                write(item, out);
            }
            out.push(b']');
        }
        Value::Boolean(true) => out.extend_from_slice(b"true"),
        Value::Boolean(false) => out.extend_from_slice(b"false"),
        Value::Null => out.extend_from_slice(b"null"),
        // Writing to memory does not fail.
        _ => drop(serde_json::to_writer(out, value)),
    }
}

pub(crate) fn write_string(text: &str, out: &mut Vec<u8>) {
    let plain = |b: &u8| *b >= 0x20 && *b != b'"' && *b != b'\\';
    if text.as_bytes().iter().all(plain) {
        out.push(b'"');
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
    } else {
        // Writing to memory does not fail.
        drop(serde_json::to_writer(out, text));
    }
}
