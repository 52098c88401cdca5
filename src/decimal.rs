//! Decimal numbers as text: what JSON says of a number, without a float in between.

/// A JSON number, read for the places of its digits. `12.50` has its first digit at place 1 and its last that counts
/// at place -1; so has `1.25e1` at 1 and -1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decimal<'a> {
    mantissa: &'a str,
    negative: bool,
    /// Places of the first and last digits that are not 0; `None` is zero.
    places: Option<(i64, i64)>,
}

/// Beyond any number that a database or a float holds: exponents are cut to this, so that arithmetic on them is safe.
const EXPONENT_MAX: i64 = 1_000_000_000;

impl<'a> Decimal<'a> {
    /// Reads a number by JSON's grammar (`-12.5e3`); `None` where it is none.
    pub fn parse(text: &'a str) -> Option<Decimal<'a>> {
        let unsigned = text.strip_prefix('-').unwrap_or(text);
        let end = unsigned.find(['e', 'E']).unwrap_or(unsigned.len());
        let (mantissa, exponent) = unsigned.split_at(end);
        let exponent = if exponent.is_empty() { 0 } else { parse_exponent(&exponent[1..])? };
        let (whole, fraction) = match mantissa.split_once('.') {
            Some((_, "")) => return None,
            Some(parts) => parts,
            None => (mantissa, ""),
        };
        let digits_only = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        if whole.is_empty() || (whole.len() > 1 && whole.starts_with('0')) {
            return None;
        }
        if !digits_only(whole) || !digits_only(fraction) {
            return None;
        }
        let mut decimal = Decimal { mantissa, negative: text.len() != unsigned.len(), places: None };
        let mut places = decimal.digits_with_places(whole.len() as i64 - 1 + exponent).filter(|(d, _)| *d != b'0');
        if let Some((_, first)) = places.next() {
            let last = places.last().map_or(first, |(_, place)| place);
            decimal.places = Some((first, last));
        }
        Some(decimal)
    }

    pub fn is_zero(&self) -> bool {
        self.places.is_none()
    }

    /// Places of the first and the last digit that are not 0 (0 is the units, -1 the tenths); `None` for zero.
    pub fn places(&self) -> Option<(i64, i64)> {
        self.places
    }

    /// The number as an integer, if it is one within 64 bits: `1e3` and `5.0` are.
    pub fn to_i64(&self) -> Option<i64> {
        let Some((first, last)) = self.places else { return Some(0) };
        if last < 0 || first > 18 {
            return None;
        }
        let significant = self.significant().fold(0i128, |n, d| n * 10 + i128::from(d - b'0'));
        let n = significant * 10i128.pow(last as u32);
        i64::try_from(if self.negative { -n } else { n }).ok()
    }

    /// The number as an integer over a power of ten, `n / 10^scale`, with the smallest scale; `None` where 128 bits do not
    /// hold it or it has more than 38 decimals.
    pub fn scaled(&self) -> Option<(i128, u8)> {
        let Some((first, last)) = self.places else { return Some((0, 0)) };
        if first > 38 || last < -38 {
            return None;
        }
        let push = |n: i128, digit: u8| n.checked_mul(10)?.checked_sub(i128::from(digit - b'0'));
        // Counted downwards: the smallest has no positive twin.
        let n = self.significant().try_fold(0, push)?.checked_mul(10_i128.checked_pow(last.max(0) as u32)?)?;
        let n = if self.negative { n } else { n.checked_neg()? };
        Some((n, (-last).max(0) as u8))
    }

    /// Writes the one spelling that all equal numbers share: `1.50` and `15e-1` give `15e-1`, zero gives `0`.
    pub fn write_canonical(&self, out: &mut String) {
        let Some((_, last)) = self.places else { return out.push('0') };
        if self.negative {
            out.push('-');
        }
        out.extend(self.significant().map(char::from));
        if last != 0 {
            out.push_str(&format!("e{last}"));
        }
    }

    /// The digits from the first that is not 0 to the last that is not.
    fn significant(&self) -> impl Iterator<Item = u8> + use<'a> {
        let digits = self.mantissa.trim_matches(['0', '.']);
        digits.bytes().filter(|b| *b != b'.')
    }

    fn digits_with_places(&self, first: i64) -> impl Iterator<Item = (u8, i64)> + use<'a> {
        self.mantissa.bytes().filter(|b| *b != b'.').zip(0..).map(move |(digit, i)| (digit, first - i))
    }
}

fn parse_exponent(text: &str) -> Option<i64> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n = digits.parse::<i64>().unwrap_or(EXPONENT_MAX).min(EXPONENT_MAX);
    Some(if text.starts_with('-') { -n } else { n })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(text: &str) -> String {
        let mut out = String::new();
        Decimal::parse(text).unwrap().write_canonical(&mut out);
        out
    }

    #[test]
    fn integers_are_exact_to_the_last_of_64_bits_and_nothing_beyond() {
        let int = |text| Decimal::parse(text).and_then(|d| d.to_i64());
        assert_eq!(int("9007199254740993"), Some(9_007_199_254_740_993));
        assert_eq!(int("-9223372036854775808"), Some(i64::MIN));
        assert_eq!(int("9223372036854775807"), Some(i64::MAX));
        assert_eq!(int("9223372036854775808"), None);
        assert_eq!(int("18446744073709551615"), None);
        assert_eq!(int("1e3"), Some(1000));
        assert_eq!(int("1.20E1"), Some(12));
        assert_eq!(int("0.1"), None);
        assert_eq!(int("0e999999999999999999999999"), Some(0));
        assert_eq!(int("1e999999999999999999999999"), None);
        assert_eq!(int("-0.0"), Some(0));
    }

    #[test]
    fn equal_numbers_share_one_spelling() {
        for text in ["1.5", "1.50", "15e-1", "0.15e1", "0.0015E+3"] {
            assert_eq!(canonical(text), "15e-1", "{text}");
        }
        assert_eq!(canonical("-1200"), "-12e2");
        assert_eq!(canonical("-0.00"), "0");
        assert_eq!(canonical("7"), "7");
        assert_eq!(canonical("1001"), "1001");
    }

    #[test]
    fn what_is_no_json_number_is_refused() {
        for text in ["", "-", "01", "+1", "1.", ".5", "1e", "1e+", "0x1", "NaN", "1 ", "1e1.5", "١", "1..2", "1.2.3"] {
            assert_eq!(Decimal::parse(text), None, "{text:?}");
        }
    }
}
