//! Exact decimal arithmetic for aggregates: within 128 bits, and never rounded but for an average.

use std::cmp::Ordering;

use crate::decimal::Decimal;

/// The number `mantissa / 10^scale`, with the smallest scale that holds it: equal numbers are equal bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Number {
    mantissa: i128,
    scale: u8,
}

/// Decimals that an average has beyond those of its sum.
const AVERAGE_DECIMALS: u8 = 6;

/// Bytes of an encoded number.
pub(super) const ENCODED: usize = 17;

impl Number {
    /// Of a JSON number; `None` where 128 bits or 38 decimals do not hold it.
    pub(super) fn of(decimal: &Decimal<'_>) -> Option<Number> {
        let (mantissa, scale) = decimal.scaled()?;
        Some(Number { mantissa, scale })
    }

    /// The sum; `None` where 128 bits do not hold it.
    pub(super) fn plus(self, other: Number) -> Option<Number> {
        let scale = self.scale.max(other.scale);
        let mantissa = self.at(scale)?.checked_add(other.at(scale)?)?;
        Some(Number { mantissa, scale }.shortened())
    }

    pub(super) fn compare(self, other: Number) -> Ordering {
        let scale = self.scale.max(other.scale);
        match (self.at(scale), other.at(scale)) {
            (Some(a), Some(b)) => a.cmp(&b),
            // Only one of them grows, and what does not fit lies further from zero than anything that does.
            (None, _) => self.mantissa.cmp(&0),
            (_, None) => 0.cmp(&other.mantissa),
        }
    }

    /// The number divided by a count, to six decimals beyond its own, half away from zero.
    pub(super) fn over(self, count: u64) -> Number {
        let count = i128::from(count.max(1));
        let more = (0..=AVERAGE_DECIMALS).rev().find_map(|more| Some((more, self.at(self.scale + more)?)));
        let (more, mantissa) = more.unwrap_or((0, self.mantissa));
        let (quotient, rest) = (mantissa / count, mantissa % count);
        let up = i128::from(rest.unsigned_abs() * 2 >= count.unsigned_abs()) * mantissa.signum();
        Number { mantissa: quotient + up, scale: self.scale + more }.shortened()
    }

    /// Writes it as JSON, without an exponent.
    pub(super) fn write(self, out: &mut Vec<u8>) {
        let digits = self.mantissa.unsigned_abs().to_string();
        let scale = usize::from(self.scale);
        if self.mantissa < 0 {
            out.push(b'-');
        }
        if scale == 0 {
            out.extend_from_slice(digits.as_bytes());
            return;
        }
        let padded = format!("{digits:0>width$}", width = scale + 1);
        let (whole, fraction) = padded.split_at(padded.len() - scale);
        out.extend_from_slice(whole.as_bytes());
        out.push(b'.');
        out.extend_from_slice(fraction.as_bytes());
    }

    pub(super) fn encode(self, out: &mut Vec<u8>) {
        out.push(self.scale);
        out.extend_from_slice(&self.mantissa.to_be_bytes());
    }

    pub(super) fn decode(bytes: &[u8; ENCODED]) -> Number {
        let [scale, mantissa @ ..] = bytes;
        Number { mantissa: i128::from_be_bytes(*mantissa), scale: *scale }
    }

    /// The mantissa at a scale that is no smaller than its own.
    fn at(self, scale: u8) -> Option<i128> {
        self.mantissa.checked_mul(10_i128.checked_pow(u32::from(scale - self.scale))?)
    }

    fn shortened(self) -> Number {
        let Number { mut mantissa, mut scale } = self;
        while scale > 0 && mantissa % 10 == 0 {
            mantissa /= 10;
            scale -= 1;
        }
        Number { mantissa, scale }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn number(text: &str) -> Number {
        Number::of(&Decimal::parse(text).unwrap()).unwrap_or_else(|| panic!("{text} does not fit"))
    }

    fn text(number: Number) -> String {
        let mut out = Vec::new();
        number.write(&mut out);
        String::from_utf8(out).unwrap()
    }

    fn sum(texts: &[&str]) -> Option<String> {
        texts.iter().try_fold(Number::default(), |sum, text| sum.plus(number(text))).map(text)
    }

    #[test]
    fn sums_are_exact_to_the_last_digit() {
        assert_eq!(sum(&["9007199254740993"; 3]).unwrap(), "27021597764222979");
        assert_eq!(sum(&["0.1"; 3]).unwrap(), "0.3");
        assert_eq!(sum(&["18446744073709551615", "1e3", "-0.50", "0.5"]).unwrap(), "18446744073709552615");
        assert_eq!(sum(&["-0.001", "0.0005"]).unwrap(), "-0.0005");
        assert_eq!(sum(&["123456789012345678901234567890", "0.1"]).unwrap(), "123456789012345678901234567890.1");
        assert_eq!(sum(&["1.50", "0.50"]).unwrap(), "2");
    }

    #[test]
    fn what_128_bits_do_not_hold_is_no_number() {
        let fits = |text: &str| Number::of(&Decimal::parse(text).unwrap()).is_some();
        assert!(fits("170141183460469231731687303715884105727") && fits("1e38") && fits("1e-38") && fits("0e99"));
        assert!(!fits("170141183460469231731687303715884105728") && !fits("1e39") && !fits("1e-39"));
        assert!(!fits("1e999999999") && !fits("0.1234567890123456789012345678901234567891"));
        assert_eq!(sum(&["170141183460469231731687303715884105727", "1"]), None);
        assert_eq!(sum(&["1e38", "0.1"]), None);
    }

    #[test]
    fn an_average_has_six_decimals_more_than_its_sum() {
        let average = |sum: &str, count| text(number(sum).over(count));
        assert_eq!(average("10", 4), "2.5");
        assert_eq!(average("10", 3), "3.333333");
        assert_eq!(average("20", 3), "6.666667");
        assert_eq!(average("-20", 3), "-6.666667");
        assert_eq!(average("0.1", 3), "0.0333333");
        assert_eq!(average("170141183460469231731687303715884105727", 2), "85070591730234615865843651857942052864");
        assert_eq!(average("0", 9), "0");
    }

    proptest! {
        #[test]
        fn the_order_of_numbers_is_that_of_their_integers(a in any::<i64>(), b in any::<i64>(), scale in 0..20usize) {
            let scaled = |n: i64| number(&format!("{n}e-{scale}"));
            prop_assert_eq!(scaled(a).compare(scaled(b)), a.cmp(&b));
            prop_assert_eq!(text(scaled(a).plus(scaled(b)).unwrap()), text(number(&format!("{}e-{scale}", i128::from(a) + i128::from(b)))));
        }

        #[test]
        fn far_apart_numbers_compare_too(a in any::<i128>(), b in 1..1000i64) {
            let (large, small) = (number(&a.to_string()), number(&format!("{b}e-38")));
            prop_assert_eq!(large.compare(small), if a > 0 { Ordering::Greater } else { Ordering::Less });
            prop_assert_eq!(small.compare(large), if a > 0 { Ordering::Less } else { Ordering::Greater });
        }

        #[test]
        fn a_number_comes_back_from_its_bytes_and_its_text(mantissa in any::<i128>(), scale in 0..38u8) {
            let number = Number { mantissa, scale }.shortened();
            let mut bytes = Vec::new();
            number.encode(&mut bytes);
            prop_assert_eq!(Number::decode(&bytes.try_into().unwrap()), number);
            let text = text(number);
            prop_assert_eq!(Number::of(&Decimal::parse(&text).unwrap()), Some(number), "{}", text);
        }
    }
}
