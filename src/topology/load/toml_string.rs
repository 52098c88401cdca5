//! Where the characters of a TOML string stand in the file.

/// Byte of the file (counted from the literal's first quote) for a byte of the string it means. Exact for all four
/// forms of a string; where the literal cannot be followed (it is not valid), everything is at its start.
#[derive(Clone, Debug, Default)]
pub struct StringMap {
    /// Runs of bytes that stand as they mean: (byte of the value, byte of the literal). The last entry is the end.
    runs: Vec<(usize, usize)>,
    len: usize,
}

impl StringMap {
    /// `literal` is the string as written, quotes included; `value` what it means.
    pub fn new(literal: &str, value: &str) -> StringMap {
        let followed = follow(literal).filter(|map| map.len == value.len());
        followed.unwrap_or_default()
    }

    /// The place of a byte of the value (its end included).
    pub fn place(&self, byte: usize) -> usize {
        let byte = byte.min(self.len);
        let run = self.runs.partition_point(|(value, _)| *value <= byte);
        match run.checked_sub(1).map(|i| self.runs[i]) {
            Some((value, literal)) => literal + (byte - value),
            None => 0,
        }
    }
}

fn follow(literal: &str) -> Option<StringMap> {
    let (quote, escapes) = [("'''", false), ("\"\"\"", true), ("'", false), ("\"", true)]
        .into_iter()
        .find(|(quote, _)| literal.len() >= 2 * quote.len() && literal.starts_with(quote))?;
    let end = literal.len() - quote.len();
    let mut at = quote.len();
    // The first newline of a multi-line string is not part of it.
    if quote.len() == 3 {
        let body = &literal[at..end];
        at += if body.starts_with("\r\n") { 2 } else { usize::from(body.starts_with('\n')) };
    }
    let mut map = StringMap { runs: vec![(0, at)], len: 0 };
    while at < end {
        let rest = &literal[at..end];
        match rest.find('\\').filter(|_| escapes) {
            Some(plain) => {
                map.len += plain;
                let (written, meant) = escape(&rest[plain..])?;
                at += plain + written;
                // An escape's bytes all stand at its backslash; what follows is a new run.
                map.runs.push((map.len, at - written));
                map.len += meant;
                map.runs.push((map.len, at));
            }
            None => {
                map.len += rest.len();
                at = end;
            }
        }
    }
    Some(map)
}

/// Bytes that an escape takes in the literal, and bytes that it means.
fn escape(text: &str) -> Option<(usize, usize)> {
    let kind = text.as_bytes().get(1)?;
    let digits = match kind {
        b'x' => 2,
        b'u' => 4,
        b'U' => 8,
        b'b' | b't' | b'n' | b'f' | b'r' | b'e' | b'"' | b'\\' => return Some((2, 1)),
        // A backslash at the end of a line swallows the white space up to the next character.
        b' ' | b'\t' | b'\n' | b'\r' => {
            let rest = text[1..].trim_start_matches([' ', '\t', '\n', '\r']);
            return Some((text.len() - rest.len(), 0));
        }
        _ => return None,
    };
    let code = u32::from_str_radix(text.get(2..2 + digits)?, 16).ok()?;
    Some((2 + digits, char::from_u32(code)?.len_utf8()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The place of each byte of the value, by the literal's own text.
    fn places(literal: &str, value: &str) -> Vec<usize> {
        let map = StringMap::new(literal, value);
        (0..=value.len()).map(|byte| map.place(byte)).collect()
    }

    #[test]
    fn literals_without_escapes_are_followed_byte_by_byte() {
        assert_eq!(places("'ab'", "ab"), [1, 2, 3]);
        assert_eq!(places("\"ab\"", "ab"), [1, 2, 3]);
        assert_eq!(places("'''\nab'''", "ab"), [4, 5, 6]);
        assert_eq!(places("'''\r\nab'''", "ab"), [5, 6, 7]);
        assert_eq!(places("'''ab'''", "ab"), [3, 4, 5]);
        assert_eq!(places("''", ""), [1]);
    }

    #[test]
    fn an_escape_stands_at_its_backslash() {
        assert_eq!(places(r#""a\"b""#, "a\"b"), [1, 2, 4, 5]);
        assert_eq!(places(r#""\u00e5b""#, "åb"), [1, 2, 7, 8]);
        assert_eq!(places("\"\"\"\na\\\n   b\"\"\"", "ab"), [4, 10, 11]);
    }

    #[test]
    fn what_cannot_be_followed_is_at_the_start() {
        assert_eq!(places("'abc'", "ab"), [0, 0, 0]);
        assert_eq!(places("bare", "bare"), [0; 5]);
    }
}
