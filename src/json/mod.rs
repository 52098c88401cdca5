//! A JSON record that keeps what nobody touched: one validating pass finds the members, a member is parsed when it is
//! read, and encoding copies the bytes of every member that was not written. So numbers keep their digits and text its
//! escapes, and it is the fast way.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt;
use std::ops::Range;

use vrl::path::OwnedSegment;
use vrl::value::{ObjectMap, Value};

mod names;
mod number;
mod scan;
#[cfg(test)]
mod tests;
mod value;

use names::{Name, Names, range, signature};
pub(crate) use value::{Parsed, parse, unwritable, write, write_string};

/// Levels of nesting that a record may have, the outermost object included.
pub const MAX_DEPTH: usize = 128;

/// Capacity that a body keeps for the next record.
const KEPT: usize = 1 << 20;

/// Why a text is no record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonError {
    /// Byte of the text where it shows.
    pub offset: usize,
    pub message: Cow<'static, str>,
}

impl JsonError {
    fn at(offset: usize, message: &'static str) -> JsonError {
        JsonError { offset, message: message.into() }
    }
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (byte {})", self.message, self.offset)
    }
}

impl std::error::Error for JsonError {}

/// A JSON object. Its buffers are reused: decode the next record into the same body.
#[derive(Clone, Debug, Default)]
pub struct JsonBody {
    /// What was decoded, then the names of members that were added.
    text: Vec<u8>,
    /// How much of `text` was decoded.
    decoded: usize,
    members: Vec<Member>,
    /// Scratch of the scanner.
    nested: Names,
    compact: bool,
    touched: bool,
    whole: OnceCell<Value>,
}

#[derive(Clone, Debug)]
struct Member {
    name: Name,
    value: Range<u32>,
    state: State,
    parsed: OnceCell<Parsed>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// As it was decoded.
    Kept,
    /// `parsed` holds what was written.
    Written,
    Removed,
}

impl Member {
    fn at(name: Name) -> Member {
        Member { name, value: 0..0, state: State::Kept, parsed: OnceCell::new() }
    }
}

/// A number that a value does not hold exactly, met while reading: the member and the number's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inexact {
    pub(crate) member: String,
    pub(crate) number: String,
}

impl JsonBody {
    /// Checks a text and finds its members: a JSON object by RFC 8259 in UTF-8, at most [`MAX_DEPTH`] deep, without a
    /// member name standing twice in an object (after unescaping) and without lone surrogates. The body keeps its own
    /// copy of the text.
    ///
    /// # Errors
    /// The first thing wrong; the body is empty then.
    pub fn decode(&mut self, text: &[u8]) -> Result<(), JsonError> {
        self.clear();
        if u32::try_from(text.len()).is_err() {
            return Err(JsonError::at(0, "the text is longer than 4 GiB"));
        }
        match scan::scan(text, &mut self.members, &mut self.nested) {
            Ok(compact) => {
                self.text.extend_from_slice(text);
                self.decoded = text.len();
                self.compact = compact;
                self.touched = false;
                Ok(())
            }
            Err(error) => {
                self.clear();
                Err(error)
            }
        }
    }

    /// Makes the body the object that a program gave; its members come in the order of their names.
    pub(crate) fn replace(&mut self, object: ObjectMap) {
        self.clear();
        self.touched = true;
        for (name, value) in object {
            self.add(&name, value);
        }
    }

    /// Makes it an object without members.
    fn clear(&mut self) {
        if self.text.capacity() > KEPT {
            // One large record must not hold its memory for ever.
            *self = JsonBody::default();
        }
        self.text.clear();
        self.members.clear();
        self.nested.clear();
        self.decoded = 0;
        self.compact = true;
        self.touched = true;
        self.whole.take();
    }

    /// The JSON text of a member, as it stands in the record if nobody wrote it.
    pub fn member(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        self.find(name).map(|at| self.text_of(&self.members[at]))
    }

    /// The JSON text of a member that nobody wrote; empty for one that was written.
    pub(crate) fn kept(&self, name: &str) -> Option<&[u8]> {
        let member = &self.members[self.find(name)?];
        Some(if member.state == State::Kept { &self.text[range(&member.value)] } else { b"" })
    }

    /// Names and JSON texts of the members, in order.
    pub fn members(&self) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, [u8]>)> {
        self.live().map(|m| (m.name.unescaped(&self.text), self.text_of(m)))
    }

    /// Writes the object: the decoded text byte for byte if nothing was changed; else in compact form, with every
    /// member that was not written copied as it stands, in order, new members last.
    pub fn encode(&self, out: &mut Vec<u8>) {
        if !self.touched {
            out.extend_from_slice(&self.text[..self.decoded]);
            return;
        }
        out.push(b'{');
        let start = out.len();
        let mut i = 0;
        while let Some(member) = self.members.get(i) {
            i += 1;
            if member.state == State::Removed {
                continue;
            }
            if out.len() > start {
                out.push(b',');
            }
            if member.state == State::Written {
                self.encode_name(member, out);
                self.encode_value(member, out);
                continue;
            }
            if !self.compact {
                self.encode_name(member, out);
                out.extend_from_slice(&self.text[range(&member.value)]);
                continue;
            }
            // Neighbours that were kept are one run of bytes.
            let mut end = member.value.end;
            while let Some(next) = self.members.get(i).filter(|m| m.state == State::Kept) {
                end = next.value.end;
                i += 1;
            }
            out.extend_from_slice(&self.text[member.name.span.start as usize - 1..end as usize]);
        }
        out.push(b'}');
    }

    fn encode_name(&self, member: &Member, out: &mut Vec<u8>) {
        let name = range(&member.name.span);
        out.push(b'"');
        out.extend_from_slice(&self.text[name]);
        out.extend_from_slice(b"\":");
    }

    fn encode_value(&self, member: &Member, out: &mut Vec<u8>) {
        match member.parsed.get() {
            Some(parsed) => write(&parsed.value, out),
            None => out.extend_from_slice(b"null"),
        }
    }

    /// Whether the object differs from what was decoded.
    pub fn is_touched(&self) -> bool {
        self.touched
    }

    fn live(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|m| m.state != State::Removed)
    }

    fn find(&self, name: &str) -> Option<usize> {
        let at = self.slot(name)?;
        (self.members[at].state != State::Removed).then_some(at)
    }

    /// The place of a member, removed or not.
    fn slot(&self, name: &str) -> Option<usize> {
        let signature = signature(name.as_bytes());
        self.members.iter().position(|m| m.name.is(&self.text, name, signature))
    }

    fn text_of(&self, member: &Member) -> Cow<'_, [u8]> {
        if member.state == State::Kept {
            return Cow::Borrowed(&self.text[range(&member.value)]);
        }
        let mut text = Vec::new();
        self.encode_value(member, &mut text);
        Cow::Owned(text)
    }

    fn parsed<'a>(&'a self, member: &'a Member) -> &'a Parsed {
        member.parsed.get_or_init(|| parse(&self.text[range(&member.value)]))
    }

    /// The value at a path. The second answer tells of a number in it that the value does not hold exactly.
    pub(crate) fn get(&self, path: &[OwnedSegment]) -> (Option<&Value>, Option<Inexact>) {
        match path {
            [] => (Some(self.whole()), self.inexact()),
            [OwnedSegment::Field(name), rest @ ..] => {
                let Some(at) = self.find(name) else { return (None, None) };
                let parsed = self.parsed(&self.members[at]);
                let value = if rest.is_empty() { Some(&parsed.value) } else { parsed.value.get(rest) };
                (value, self.inexact_in(at, rest))
            }
            [OwnedSegment::Index(_), ..] => (None, None),
        }
    }

    /// The whole object, parsed; kept until the next write.
    fn whole(&self) -> &Value {
        self.whole.get_or_init(|| {
            let members = self.live().map(|m| (m.name.unescaped(&self.text).into(), self.parsed(m).value.clone()));
            Value::Object(members.collect())
        })
    }

    /// The first number of the whole object that its value does not hold exactly.
    pub(crate) fn inexact(&self) -> Option<Inexact> {
        (0..self.members.len()).find_map(|at| self.inexact_in(at, &[]))
    }

    fn inexact_in(&self, at: usize, rest: &[OwnedSegment]) -> Option<Inexact> {
        let member = &self.members[at];
        if member.state != State::Kept {
            return None;
        }
        let number = self.parsed(member).inexact.clone()?;
        let text = &self.text[range(&member.value)];
        let number = if rest.is_empty() { &text[number] } else { value::inexact_below(text, rest)? };
        Some(Inexact {
            member: member.name.unescaped(&self.text).into_owned(),
            number: String::from_utf8_lossy(number).into_owned(),
        })
    }

    /// Writes the value at a path below a member.
    ///
    /// # Errors
    /// What was lost: a number beside it, in the same member, that its value does not hold exactly.
    pub(crate) fn set(&mut self, name: &str, rest: &[OwnedSegment], value: Value) -> Result<(), Inexact> {
        self.touch();
        let Some(at) = self.slot(name) else {
            self.add(name, nested(rest, value));
            return Ok(());
        };
        if rest.is_empty() || self.members[at].state == State::Removed {
            self.written(at, nested(rest, value));
            return Ok(());
        }
        let lost = self.inexact_in(at, &[]);
        let mut whole = self.take(at);
        whole.insert(rest, value);
        self.written(at, whole);
        lost.map_or(Ok(()), Err)
    }

    /// Removes the value at a path below a member. With `compact` a container that is empty after it goes too.
    ///
    /// # Errors
    /// As [`JsonBody::set`], and also where the removed value itself is inexact.
    pub(crate) fn unset(&mut self, name: &str, rest: &[OwnedSegment], compact: bool) -> Result<Option<Value>, Inexact> {
        let Some(at) = self.find(name) else { return Ok(None) };
        let lost = self.inexact_in(at, &[]);
        let removed = if rest.is_empty() {
            let value = self.take(at);
            self.members[at].state = State::Removed;
            Some(value)
        } else {
            // Nothing there: the member stays as it stands.
            if self.parsed(&self.members[at]).value.get(rest).is_none() {
                return Ok(None);
            }
            let mut whole = self.take(at);
            let removed = whole.remove(rest, compact);
            let empty = match &whole {
                Value::Object(map) => map.is_empty(),
                Value::Array(items) => items.is_empty(),
                _ => false,
            };
            self.written(at, whole);
            if compact && empty {
                self.members[at].state = State::Removed;
            }
            removed
        };
        self.touch();
        lost.map_or(Ok(removed), Err)
    }

    /// Removes a member without reading it.
    pub(crate) fn discard(&mut self, name: &str) {
        if let Some(at) = self.find(name) {
            self.members[at].state = State::Removed;
            self.touch();
        }
    }

    fn touch(&mut self) {
        self.touched = true;
        self.whole.take();
    }

    fn take(&mut self, at: usize) -> Value {
        let member = &mut self.members[at];
        match member.parsed.take() {
            Some(parsed) => parsed.value,
            None => parse(&self.text[range(&member.value)]).value,
        }
    }

    fn written(&mut self, at: usize, value: Value) {
        let member = &mut self.members[at];
        member.state = State::Written;
        member.parsed = OnceCell::from(Parsed { value, inexact: None });
    }

    fn add(&mut self, name: &str, value: Value) {
        let start = self.text.len() as u32 + 1;
        value::write_string(name, &mut self.text);
        let span = start..self.text.len() as u32 - 1;
        let escaped = span.len() != name.len();
        let name = Name { span, signature: signature(name.as_bytes()), escaped };
        let parsed = OnceCell::from(Parsed { value, inexact: None });
        self.members.push(Member { name, value: 0..0, state: State::Written, parsed });
    }
}

/// The value, or containers made for a path with the value in them.
fn nested(rest: &[OwnedSegment], value: Value) -> Value {
    if rest.is_empty() { value } else { value.at_path(rest) }
}

/// Text that is UTF-8, because the scan said so.
fn lossy(raw: &[u8]) -> Cow<'_, str> {
    std::str::from_utf8(raw).map_or_else(|_| String::from_utf8_lossy(raw), Cow::Borrowed)
}

/// The text of a JSON string's inside. Input that no scan has seen is read as far as it makes sense.
pub(crate) fn unescape(raw: &[u8]) -> String {
    let mut out: Vec<u8> = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(at) = memchr::memchr(b'\\', rest) {
        out.extend_from_slice(&rest[..at]);
        rest = &rest[at..];
        let (char, len) = escape(rest);
        out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
        rest = &rest[len.min(rest.len())..];
    }
    out.extend_from_slice(rest);
    String::from_utf8(out).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
}

/// The character of the escape that `text` begins with, and the escape's length.
fn escape(text: &[u8]) -> (char, usize) {
    let unit = |at: usize| text.get(at..at + 4).and_then(scan::hex_unit);
    match text.get(1) {
        Some(b'b') => ('\u{8}', 2),
        Some(b'f') => ('\u{c}', 2),
        Some(b'n') => ('\n', 2),
        Some(b'r') => ('\r', 2),
        Some(b't') => ('\t', 2),
        Some(b'u') => {
            let units = [unit(2).unwrap_or(0xfffd), unit(8).unwrap_or(0)];
            let char = char::decode_utf16(units).next().and_then(Result::ok).unwrap_or(char::REPLACEMENT_CHARACTER);
            (char, if char.len_utf16() == 2 { 12 } else { 6 })
        }
        Some(other) => (char::from(*other), 2),
        None => (char::REPLACEMENT_CHARACTER, 1),
    }
}
