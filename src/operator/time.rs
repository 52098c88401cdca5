//! Times of events, as texts tell them.

use chrono::{DateTime, SecondsFormat};

/// A time as RFC 3339 writes it, with its milliseconds.
pub(super) fn rfc3339(time_ms: i64) -> String {
    let time = DateTime::from_timestamp_millis(time_ms).unwrap_or_default();
    time.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// Milliseconds since 1970 of an RFC 3339 text; `None` if it is none. The shape that most events have, in UTC with no
/// fraction or three digits of it, is read here: `chrono` takes five times as long, and reads every other.
pub(super) fn rfc3339_ms(text: &[u8]) -> Option<i64> {
    usual(text).or_else(|| {
        let time = DateTime::parse_from_rfc3339(std::str::from_utf8(text).ok()?).ok()?;
        Some(time.timestamp_millis())
    })
}

/// `2026-01-31T12:00:00Z` or `2026-01-31T12:00:00.123Z`.
fn usual(text: &[u8]) -> Option<i64> {
    let (head, tail) = text.split_first_chunk::<19>()?;
    let millis = match tail {
        b"Z" => 0,
        [b'.', digits @ .., b'Z'] if digits.len() == 3 => number(digits)?,
        _ => return None,
    };
    let [year @ .., b'-', m0, m1, b'-', d0, d1, b'T', h0, h1, b':', n0, n1, b':', s0, s1] = head else { return None };
    let two = |a: &u8, b: &u8| number(&[*a, *b]);
    let (year, month, day) = (number(year)?, two(m0, m1)?, two(d0, d1)?);
    let (hour, minute, second) = (two(h0, h1)?, two(n0, n1)?, two(s0, s1)?);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if day < 1 || day > days || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    // The year begins in March, so that the day which is sometimes there comes last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days =
        365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + (153 * month + 2) / 5 + day;
    let since_1970 = days - 719_469;
    Some((((since_1970 * 24 + hour) * 60 + minute) * 60 + second) * 1000 + millis)
}

fn number(digits: &[u8]) -> Option<i64> {
    digits.iter().try_fold(0, |number, digit| digit.is_ascii_digit().then(|| number * 10 + i64::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn by_chrono(text: &str) -> Option<i64> {
        DateTime::parse_from_rfc3339(text).ok().map(|time| time.timestamp_millis())
    }

    #[test]
    fn the_usual_shape_is_read_here_and_every_other_by_chrono() {
        assert_eq!(usual(b"1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(usual(b"2024-02-29T12:30:15.250Z"), Some(1_709_209_815_250));
        for other in ["2024-02-29T12:30:15+01:00", "2024-02-29T12:30:15.5Z", "2024-02-29t12:30:15z"] {
            assert_eq!(usual(other.as_bytes()), None, "{other}");
            assert_eq!(rfc3339_ms(other.as_bytes()), by_chrono(other), "{other}");
        }
        assert_eq!(rfc3339_ms(b"2016-12-31T23:59:60Z"), by_chrono("2016-12-31T23:59:60Z"));
        assert_eq!(rfc3339_ms(b"yesterday"), None);
    }

    proptest! {
        #[test]
        fn both_ways_of_reading_agree(
            year in 0..10_000, month in 0..14, day in 0..33, hour in 0..26, minute in 0..62, second in 0..62,
            fraction in prop_oneof![Just(String::new()), "\\.[0-9]{1,4}"], zone in prop_oneof!["Z", "[+-]0[0-9]:[0-5]0"],
        ) {
            let text = format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}{zone}");
            prop_assert_eq!(rfc3339_ms(text.as_bytes()), by_chrono(&text), "{}", text);
        }
    }
}
