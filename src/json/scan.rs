//! One pass over a record's text: is it a JSON object (RFC 8259), and where are its members?

use super::names::{COMPARED, Name, Names, Sieve, all_differ, differs};
use super::{JsonError, MAX_DEPTH, Member};

/// Validates `text` and fills `members`. `nested` is scratch space for the names of inner objects. Never recurses:
/// the depth is a counter and the kinds of the open containers are bits. Answers whether the object is compact: no
/// white space around its names and values, so that runs of members can be copied as they stand.
///
/// # Errors
/// The first thing that is wrong, with its byte offset.
pub(super) fn scan(text: &[u8], members: &mut Vec<Member>, nested: &mut Names) -> Result<bool, JsonError> {
    members.clear();
    nested.clear();
    if let Err(e) = std::str::from_utf8(text) {
        return Err(JsonError::at(e.valid_up_to(), "the text is not UTF-8"));
    }
    let mut scanner = Scanner { text, at: 0 };
    scanner.space();
    match scanner.peek() {
        None if text.is_empty() => return Err(JsonError::at(0, "the value is empty, a JSON object was expected")),
        Some(b'{') => scanner.at += 1,
        Some(b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => {
            return Err(JsonError::at(scanner.at, "the value is not a JSON object"));
        }
        _ => return Err(JsonError::at(scanner.at, "a JSON object was expected")),
    }
    let mut open = Open { members, sieve: Sieve::default(), nested, kinds: 1, depth: 1, compact: true };
    scanner.object(&mut open)?;
    let compact = open.compact;
    scanner.space();
    if scanner.at < text.len() {
        return Err(JsonError::at(scanner.at, "something follows the JSON object"));
    }
    Ok(compact)
}

struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
}

/// The containers that are open.
struct Open<'a> {
    members: &'a mut Vec<Member>,
    sieve: Sieve,
    nested: &'a mut Names,
    /// One bit a level, innermost lowest: 1 is an object.
    kinds: u128,
    depth: usize,
    compact: bool,
}

impl Open<'_> {
    #[inline]
    fn in_object(&self) -> bool {
        self.kinds & 1 == 1
    }

    fn enter(&mut self, object: bool, at: usize) -> Result<(), JsonError> {
        if self.depth == MAX_DEPTH {
            return Err(JsonError::at(at, "nested deeper than 128 levels"));
        }
        self.depth += 1;
        self.kinds = self.kinds << 1 | u128::from(object);
        if object {
            self.nested.open();
        }
        Ok(())
    }

    /// Closes an inner container.
    fn leave(&mut self, text: &[u8]) -> Result<(), JsonError> {
        if self.in_object() {
            self.nested.close(text)?;
        }
        self.depth -= 1;
        self.kinds >>= 1;
        Ok(())
    }

    #[inline]
    fn name(&mut self, name: Name, text: &[u8]) -> Result<(), JsonError> {
        if self.depth > 1 {
            return self.nested.add(name, text);
        }
        if self.sieve.knows(&name) {
            differs(&name, self.members.iter().map(|m| &m.name), text)?;
        }
        self.members.push(Member::at(name));
        Ok(())
    }

    fn all_names_differ(&self, text: &[u8]) -> Result<(), JsonError> {
        if self.members.len() <= COMPARED {
            return Ok(());
        }
        all_differ(&mut self.members.iter().map(|m| m.name.clone()).collect::<Vec<_>>(), text)
    }
}

impl Scanner<'_> {
    #[inline]
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    #[cold]
    fn error(&self, message: &'static str) -> JsonError {
        if self.at >= self.text.len() {
            return JsonError::at(self.at, "the text ends in the middle of a value");
        }
        JsonError::at(self.at, message)
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.at += 1;
        }
    }

    /// Everything behind the opening brace, up to and with the brace that closes the outermost object.
    fn object(&mut self, open: &mut Open<'_>) -> Result<(), JsonError> {
        // An end may follow `{` or `[` at once, but not a comma.
        let mut empty = true;
        loop {
            self.space_in(open);
            if empty && self.peek() == Some(if open.in_object() { b'}' } else { b']' }) {
                if self.close(open)? {
                    return Ok(());
                }
            } else {
                if open.in_object() {
                    self.name(open)?;
                }
                if self.value(open)? {
                    empty = true;
                    continue;
                }
                if open.depth == 1 {
                    self.end_member(open);
                }
            }
            // A value is complete: a comma goes on, ends close.
            loop {
                self.space_in(open);
                match self.peek() {
                    Some(b',') => {
                        self.at += 1;
                        empty = false;
                        break;
                    }
                    Some(b'}') if open.in_object() => {
                        if self.close(open)? {
                            return Ok(());
                        }
                    }
                    Some(b']') if !open.in_object() => {
                        self.close(open)?;
                    }
                    _ if open.in_object() => return Err(self.error("`,` or `}` was expected")),
                    _ => return Err(self.error("`,` or `]` was expected")),
                }
            }
        }
    }

    #[inline]
    fn space_in(&mut self, open: &mut Open<'_>) {
        if let Some(b'\0'..=b' ') = self.peek() {
            let before = self.at;
            self.space();
            open.compact &= self.at == before || open.depth > 1;
        }
    }

    /// Steps over the end of the innermost container; true if it was the outermost.
    fn close(&mut self, open: &mut Open<'_>) -> Result<bool, JsonError> {
        self.at += 1;
        if open.depth == 1 {
            open.all_names_differ(self.text)?;
            return Ok(true);
        }
        open.leave(self.text)?;
        if open.depth == 1 {
            self.end_member(open);
        }
        Ok(false)
    }

    fn end_member(&self, open: &mut Open<'_>) {
        if let Some(member) = open.members.last_mut() {
            member.value.end = self.at as u32;
        }
    }

    fn name(&mut self, open: &mut Open<'_>) -> Result<(), JsonError> {
        if self.peek() != Some(b'"') {
            return Err(self.error("a member name in quotes was expected"));
        }
        let start = self.at + 1;
        let escaped = self.string()?;
        let name = Name::new(self.text, start as u32..(self.at - 1) as u32, escaped);
        open.name(name, self.text)?;
        self.space_in(open);
        if self.peek() != Some(b':') {
            return Err(self.error("`:` was expected behind the member name"));
        }
        self.at += 1;
        self.space_in(open);
        if open.depth == 1
            && let Some(member) = open.members.last_mut()
        {
            member.value.start = self.at as u32;
        }
        Ok(())
    }

    /// A scalar, or the opening of a container (then true).
    fn value(&mut self, open: &mut Open<'_>) -> Result<bool, JsonError> {
        match self.peek() {
            Some(b'"') => self.string().map(|_| false),
            Some(b'-' | b'0'..=b'9') => self.number().map(|()| false),
            Some(b't') => self.word(b"true").map(|()| false),
            Some(b'f') => self.word(b"false").map(|()| false),
            Some(b'n') => self.word(b"null").map(|()| false),
            Some(byte @ (b'{' | b'[')) => {
                open.enter(byte == b'{', self.at)?;
                self.at += 1;
                Ok(true)
            }
            _ => Err(self.error("a value was expected")),
        }
    }

    fn word(&mut self, word: &'static [u8]) -> Result<(), JsonError> {
        if !self.text[self.at..].starts_with(word) {
            return Err(self.error("a value was expected"));
        }
        self.at += word.len();
        Ok(())
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        if self.at == start { Err(self.error("a digit was expected")) } else { Ok(()) }
    }

    fn number(&mut self) -> Result<(), JsonError> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
            if let Some(b'0'..=b'9') = self.peek() {
                return Err(self.error("a number may not begin with 0"));
            }
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    /// Steps over a string, quotes included; true if it holds escapes.
    #[inline]
    fn string(&mut self) -> Result<bool, JsonError> {
        self.at += 1;
        let mut escaped = false;
        loop {
            self.plain();
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(escaped);
                }
                Some(b'\\') => {
                    escaped = true;
                    self.escape()?;
                }
                other => return Err(self.broken_string(other)),
            }
        }
    }

    #[cold]
    fn broken_string(&self, next: Option<u8>) -> JsonError {
        let message =
            if next.is_some() { "a control character inside a string" } else { "the text ends inside a string" };
        JsonError::at(self.at, message)
    }

    /// Steps to the next quote, backslash or control character, eight bytes at a time.
    #[inline]
    fn plain(&mut self) {
        while let Some(word) = self.text.get(self.at..self.at + 8) {
            let found = special(u64::from_le_bytes(word.try_into().expect("eight bytes")));
            if found != 0 {
                self.at += found.trailing_zeros() as usize / 8;
                return;
            }
            self.at += 8;
        }
        while let Some(byte) = self.peek() {
            if byte == b'"' || byte == b'\\' || byte < 0x20 {
                return;
            }
            self.at += 1;
        }
    }

    fn escape(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        match self.text.get(self.at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                self.at += 2;
                Ok(())
            }
            Some(b'u') => {
                let lone = JsonError::at(start, "a lone surrogate in a \\u escape");
                match self.hex()? {
                    0xdc00..=0xdfff => Err(lone),
                    0xd800..=0xdbff if self.text[self.at..].starts_with(b"\\u") => match self.hex()? {
                        0xdc00..=0xdfff => Ok(()),
                        _ => Err(lone),
                    },
                    0xd800..=0xdbff => Err(lone),
                    _ => Ok(()),
                }
            }
            Some(_) => Err(self.error("an unknown escape")),
            None => Err(JsonError::at(self.text.len(), "the text ends inside a string")),
        }
    }

    /// The code unit of a `\uXXXX`, which is stepped over.
    fn hex(&mut self) -> Result<u16, JsonError> {
        let unit = self.text.get(self.at + 2..self.at + 6).and_then(hex_unit);
        let unit = unit.ok_or_else(|| self.error("\\u needs four hexadecimal digits"))?;
        self.at += 6;
        Ok(unit)
    }
}

pub(super) fn hex_unit(digits: &[u8]) -> Option<u16> {
    digits.iter().try_fold(0u16, |unit, digit| Some(unit << 4 | char::from(*digit).to_digit(16)? as u16))
}

/// The high bit of each byte that is a quote, a backslash or below 0x20. Bytes above the lowest hit may be wrong.
#[inline]
fn special(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    let quote = word ^ (ONES * b'"' as u64);
    let backslash = word ^ (ONES * b'\\' as u64);
    let hits = quote.wrapping_sub(ONES) & !quote
        | backslash.wrapping_sub(ONES) & !backslash
        | word.wrapping_sub(ONES * 0x20) & !word;
    hits & HIGH
}
