//! JSON numbers as VRL has them (i64 or f64), and whether one holds the number that the text says.

/// A number of a valid JSON text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Number {
    Integer(i64),
    Float(f64),
}

/// Reads the text of a valid JSON number. The flag is false where the value is another number than the text: an integer
/// outside i64, or a decimal whose f64, written in its shortest form, is another decimal value (19.90 is 19.9;
/// 0.1000000000000000055 is not 0.1).
pub(super) fn parse(text: &[u8]) -> (Number, bool) {
    let mut fraction = false;
    let mut integer: Option<i64> = Some(0);
    let negative = text.first() == Some(&b'-');
    for byte in &text[usize::from(negative)..] {
        if !byte.is_ascii_digit() {
            fraction = true;
            break;
        }
        // Counted downwards: the smallest i64 has no positive twin.
        integer = integer.and_then(|i| i.checked_mul(10)?.checked_sub(i64::from(byte - b'0')));
    }
    if !fraction {
        let value = if negative { integer } else { integer.and_then(i64::checked_neg) };
        if let Some(value) = value {
            return (Number::Integer(value), true);
        }
    }
    let float = float(text);
    (Number::Float(float), fraction && is_exact(text, float))
}

fn float(text: &[u8]) -> f64 {
    // The text of a JSON number is a subset of what Rust reads, so the fallback is never taken.
    std::str::from_utf8(text).ok().and_then(|t| t.parse().ok()).unwrap_or(0.0)
}

fn is_exact(text: &[u8], float: f64) -> bool {
    let digits = text.iter().take_while(|b| !matches!(b, b'e' | b'E')).filter(|b| b.is_ascii_digit()).count();
    if digits <= 15 && text.len() <= 19 && !text.iter().any(|b| matches!(b, b'e' | b'E')) {
        // Every decimal of 15 digits comes back from its f64 unharmed.
        return true;
    }
    if !float.is_finite() {
        return false;
    }
    let shortest = format!("{float:e}");
    Decimal::of(text) == Decimal::of(shortest.as_bytes())
}

/// `0.d₁d₂…dₙ × 10^point`, with neither leading nor trailing zeros among the digits.
#[derive(Debug, PartialEq)]
struct Decimal {
    digits: Vec<u8>,
    point: i64,
}

impl Decimal {
    fn of(text: &[u8]) -> Decimal {
        let split = text.iter().position(|b| matches!(b, b'e' | b'E'));
        let (mantissa, exponent) = split.map_or((text, &b""[..]), |at| (&text[..at], &text[at + 1..]));
        let whole = mantissa.split(|b| *b == b'.').next().unwrap_or(mantissa);
        let mut point = whole.iter().filter(|b| b.is_ascii_digit()).count() as i64 + exponent_of(exponent);
        let mut digits: Vec<u8> = mantissa.iter().copied().filter(u8::is_ascii_digit).collect();
        let leading = digits.iter().take_while(|d| **d == b'0').count();
        digits.drain(..leading);
        point -= leading as i64;
        while digits.last() == Some(&b'0') {
            digits.pop();
        }
        if digits.is_empty() {
            point = 0;
        }
        Decimal { digits, point }
    }
}

/// Saturates far outside of what an f64 reaches.
fn exponent_of(text: &[u8]) -> i64 {
    let negative = text.first() == Some(&b'-');
    let digits = text.iter().filter(|b| b.is_ascii_digit());
    let size = digits.fold(0i64, |n, d| n.saturating_mul(10).saturating_add(i64::from(d - b'0'))).min(1 << 40);
    if negative { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::Number::{Float, Integer};
    use super::*;

    #[test]
    fn integers_hold_exactly_what_fits_64_bits() {
        assert_eq!(parse(b"0"), (Integer(0), true));
        assert_eq!(parse(b"-0"), (Integer(0), true));
        assert_eq!(parse(b"9007199254740993"), (Integer(9_007_199_254_740_993), true));
        assert_eq!(parse(b"228930314431312345"), (Integer(228_930_314_431_312_345), true));
        assert_eq!(parse(b"-9223372036854775808"), (Integer(i64::MIN), true));
        assert_eq!(parse(b"9223372036854775807"), (Integer(i64::MAX), true));
        assert_eq!(parse(b"9223372036854775808"), (Float(9_223_372_036_854_775_808.0), false));
        assert_eq!(parse(b"18446744073709551615"), (Float(1.8446744073709552e19), false));
        assert_eq!(parse(b"123456789012345678901234567890"), (Float(1.2345678901234568e29), false));
    }

    #[test]
    fn decimals_are_exact_when_their_shortest_text_is_the_same_number() {
        for text in
            ["19.90", "0.1", "1e3", "-0.0", "0e99999999999999999999", "1.50e1", "123456.789e-3", "5e-324", "1E+22"]
        {
            assert!(parse(text.as_bytes()).1, "{text}");
        }
        for text in [
            "0.1000000000000000055",
            "1e400",
            "1e-400",
            "1.00000000000000000001",
            "3.14159265358979323846",
            "123456789012345678.5",
        ] {
            assert!(!parse(text.as_bytes()).1, "{text}");
        }
        assert_eq!(parse(b"1e3").0, Float(1000.0));
        assert_eq!(parse(b"1e400").0, Float(f64::INFINITY));
    }
}
