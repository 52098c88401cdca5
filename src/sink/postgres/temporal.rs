//! Dates and times from JSON text or integers, as microseconds since 1970.

use chrono::{DateTime, NaiveDate};

/// Microseconds since 1970-01-01T00:00:00Z of year 1 and of year 10000: JSON's times have four digits a year, and an
/// integer in the wrong unit falls outside.
const MIN: i64 = -62_135_596_800_000_000;
const MAX: i64 = 253_402_300_800_000_000;

/// An RFC 3339 time with an offset; seconds may be missing, as Java leaves out zeros. Finer than a microsecond is
/// rounded, as Postgres does.
pub fn timestamptz(text: &str) -> Result<i64, &'static str> {
    let text = with_seconds(text);
    let time = DateTime::parse_from_rfc3339(&text).map_err(|_| "no RFC 3339 time with an offset")?;
    // A leap second is written as 60, and chrono carries it in the nanoseconds.
    let nanos = i128::from(time.timestamp()) * 1_000_000_000 + i128::from(time.timestamp_subsec_nanos());
    in_range(rounded_micros(nanos))
}

/// A date and a time of day without an offset: Postgres would drop an offset in silence.
pub fn timestamp(text: &str) -> Result<i64, &'static str> {
    let mut utc = with_seconds(text).into_owned();
    utc.push('Z');
    timestamptz(&utc).map_err(|_| "no time as YYYY-MM-DDTHH:MM:SS (a time with an offset belongs into timestamptz)")
}

/// Milliseconds since 1970.
pub fn from_millis(ms: i64) -> Result<i64, &'static str> {
    in_range(ms.checked_mul(1000).ok_or(RANGE)?)
}

/// `YYYY-MM-DD`; answers whether it is a day that exists.
pub fn is_date(text: &str) -> bool {
    let shape = text.len() == 10
        && text.bytes().enumerate().all(|(i, b)| if i == 4 || i == 7 { b == b'-' } else { b.is_ascii_digit() });
    shape && !text.starts_with("0000") && NaiveDate::parse_from_str(text, "%Y-%m-%d").is_ok()
}

/// Rounds to `digits` of a second as `timestamp(digits)` does: half away from the epoch of Postgres (2000-01-01).
pub fn rounded(micros: i64, digits: u32) -> i64 {
    const EPOCH: i64 = 946_684_800_000_000;
    let unit = 10i64.pow(6u32.saturating_sub(digits));
    let offset = micros - EPOCH;
    let half = unit / 2;
    let rounded = if offset >= 0 { (offset + half) / unit * unit } else { -((-offset + half) / unit * unit) };
    EPOCH + rounded
}

const RANGE: &str = "outside the years 1 to 9999";

fn in_range(micros: i64) -> Result<i64, &'static str> {
    if (MIN..MAX).contains(&micros) { Ok(micros) } else { Err(RANGE) }
}

fn rounded_micros(nanos: i128) -> i64 {
    (nanos + 500).div_euclid(1000) as i64
}

/// `2024-01-01T10:00Z` with its `:00` put in.
fn with_seconds(text: &str) -> std::borrow::Cow<'_, str> {
    let bytes = text.as_bytes();
    let minutes_only =
        bytes.len() >= 16 && bytes[13] == b':' && bytes.get(16) != Some(&b':') && text.is_char_boundary(16);
    if minutes_only { format!("{}:00{}", &text[..16], &text[16..]).into() } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_moment_in_two_offsets_is_one_value() {
        let utc = timestamptz("2024-03-01T10:00:00.123456Z").unwrap();
        assert_eq!(utc, 1_709_287_200_123_456);
        assert_eq!(timestamptz("2024-03-01T12:00:00.123456+02:00"), Ok(utc));
        assert_eq!(timestamptz("2024-03-01 12:00:00.1234564+02:00"), Ok(utc));
        assert_eq!(timestamptz("2024-03-01T10:00Z"), timestamptz("2024-03-01T10:00:00Z"));
        assert_eq!(timestamptz("2016-12-31T23:59:60Z"), timestamptz("2017-01-01T00:00:00Z"));
        assert_eq!(timestamptz("1969-12-31T23:59:59.9999996Z"), Ok(0));
    }

    #[test]
    fn a_timestamp_takes_no_offset_and_a_timestamptz_needs_one() {
        assert_eq!(timestamp("1970-01-01T00:00:01"), Ok(1_000_000));
        assert_eq!(timestamp("1970-01-01 00:00"), Ok(0));
        assert!(timestamp("1970-01-01T00:00:01Z").is_err());
        assert!(timestamp("1970-01-01T00:00:01+01:00").is_err());
        assert!(timestamptz("1970-01-01T00:00:01").is_err());
        for text in
            ["", "now", "infinity", "2024-02-30T00:00:00Z", "0000-01-01T00:00:00Z", "2024-01-01", "ä024-01-01T10:00Z"]
        {
            assert!(timestamptz(text).is_err(), "{text}");
        }
    }

    #[test]
    fn integers_are_milliseconds_and_one_in_nanoseconds_is_out_of_range() {
        assert_eq!(from_millis(1_700_000_000_123), Ok(1_700_000_000_123_000));
        assert_eq!(from_millis(-1), Ok(-1000));
        assert!(from_millis(1_700_000_000_123_000_000).is_err());
        assert!(from_millis(1_700_000_000_123_000).is_err());
    }

    #[test]
    fn only_days_that_exist_are_dates() {
        assert!(is_date("2024-02-29"));
        for text in ["2023-02-29", "2024-2-1", "2024-02-29T00:00:00Z", "+024-01-01", "0000-01-01", "20240101", "today"]
        {
            assert!(!is_date(text), "{text}");
        }
    }

    #[test]
    fn fewer_digits_round_as_the_column_does() {
        assert_eq!(rounded(1_500_000, 0), 1_000_000, "before 2000 half goes down, away from Postgres's epoch");
        assert_eq!(rounded(946_684_801_500_000, 0), 946_684_802_000_000);
        assert_eq!(rounded(1_234_567, 3), 1_235_000);
        assert_eq!(rounded(1_234_567, 6), 1_234_567);
    }
}
