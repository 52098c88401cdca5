//! What jsonb refuses although it is JSON.

use std::borrow::Cow;

use super::value::check_numeric;
use crate::decimal::Decimal;

/// Postgres recurses over a document: far below where its stack limit bites.
const DEPTH_MAX: usize = 1000;

/// Checks well-formed JSON for `\u0000`, lone surrogates, numbers that numeric cannot hold, and depth.
pub fn check(json: &str) -> Result<(), Cow<'static, str>> {
    let bytes = json.as_bytes();
    let mut depth = 0usize;
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => at = check_string(json, at)?,
            b'{' | b'[' => {
                depth += 1;
                if depth > DEPTH_MAX {
                    return Err("it is nested too deep".into());
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'-' | b'0'..=b'9' => {
                let number = |b: &u8| matches!(b, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9');
                let end = bytes[at..].iter().position(|b| !number(b)).map_or(bytes.len(), |n| at + n);
                let decimal = Decimal::parse(&json[at..end]).ok_or("it holds what is no number")?;
                check_numeric(&decimal, None).map_err(|_| "it holds a number out of range")?;
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

/// Walks the string that opens at `start`; answers where its closing quote is.
fn check_string(json: &str, start: usize) -> Result<usize, Cow<'static, str>> {
    let bytes = json.as_bytes();
    let mut at = start + 1;
    let mut high_surrogate = false;
    loop {
        // Bytes of other characters never equal a quote or a backslash in UTF-8.
        let Some(skipped) = memchr::memchr2(b'"', b'\\', bytes.get(at..).unwrap_or_default()) else {
            return Err("it holds a string without an end".into());
        };
        if high_surrogate && (skipped > 0 || bytes[at] == b'"' || bytes.get(at + 1) != Some(&b'u')) {
            return Err(LONE.into());
        }
        at += skipped;
        if bytes[at] == b'"' {
            return Ok(at);
        }
        if bytes.get(at + 1) != Some(&b'u') {
            at += 2;
            continue;
        }
        let code = json.get(at + 2..at + 6).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        match code.ok_or("it holds a broken \\u escape")? {
            0 => return Err("it holds \\u0000, which jsonb cannot store".into()),
            0xD800..=0xDBFF if high_surrogate => return Err(LONE.into()),
            0xD800..=0xDBFF => high_surrogate = true,
            0xDC00..=0xDFFF if !high_surrogate => return Err(LONE.into()),
            0xDC00..=0xDFFF => high_surrogate = false,
            _ if high_surrogate => return Err(LONE.into()),
            _ => {}
        }
        at += 6;
    }
}

const LONE: &str = "it holds half a surrogate pair, which jsonb cannot store";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_that_jsonb_takes_pass() {
        for json in [
            r#"{"a":[1,-2.5e3,true,null,"x"],"b":"\\u0000 \" \ud83d\ude00 é"}"#,
            r#""plain""#,
            "1e131071",
            "[]",
            r#"{"":"\n\u0001"}"#,
        ] {
            assert_eq!(check(json), Ok(()), "{json}");
        }
        let deep = "[".repeat(1000) + &"]".repeat(1000);
        assert_eq!(check(&deep), Ok(()));
    }

    #[test]
    fn what_jsonb_refuses_is_told_apart() {
        let problem = |json: &str| check(json).unwrap_err().into_owned();
        assert!(problem(r#"{"a":"x\u0000"}"#).contains("\\u0000"));
        assert!(problem(r#"{"\u0000":1}"#).contains("\\u0000"));
        for lone in [
            r#"["\ud800"]"#,
            r#"["\ud800x"]"#,
            r#"["\udc00"]"#,
            r#"["\ud800\n"]"#,
            r#"["\ud800\ud800"]"#,
            r#"["\ud800\u0041"]"#,
        ] {
            assert!(problem(lone).contains("surrogate"), "{lone}");
        }
        assert!(problem("[1e200000]").contains("number"));
        assert!(problem("[1e-20000]").contains("number"));
        assert!(problem(&"[".repeat(1001)).contains("deep"));
        assert!(problem(r#"["abc"#).contains("end"));
        assert!(problem(r#"["\u00"#).contains("escape"));
        assert!(problem(r#"["\"#).contains("end"));
    }
}
