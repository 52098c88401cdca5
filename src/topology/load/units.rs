//! Durations, sizes and times as people write them.

use std::time::Duration;

use toml::value::{Datetime, Offset};

/// "100ms", "1.5s", "5m", "2h", "14d".
pub fn duration(text: &str) -> Result<Duration, String> {
    const UNITS: &[(&str, u64)] = &[("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
    let ms = scaled(text, UNITS).ok_or_else(|| {
        format!("`{}` is no duration; write a number and ms, s, m, h or d, such as \"100ms\"", shown(text))
    })?;
    Ok(Duration::from_millis(ms))
}

/// "512B", "64KiB", "16MiB", "1GiB", and "kB", "MB", "GB" as powers of ten.
pub fn size(text: &str) -> Result<u64, String> {
    const UNITS: &[(&str, u64)] = &[
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("kB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("B", 1),
    ];
    scaled(text, UNITS).ok_or_else(|| {
        format!("`{}` is no size; write a number and B, KiB, MiB or GiB, such as \"16MiB\"", shown(text))
    })
}

fn shown(text: &str) -> String {
    text.chars().take(40).collect()
}

/// A non-negative decimal number and one of the units; exact, with at most nine decimals.
fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let unit = text[split..].trim_start();
    let factor = units.iter().find(|(name, _)| *name == unit)?.1;
    let (whole, decimals) = text[..split].split_once('.').unwrap_or((&text[..split], "0"));
    if whole.is_empty() || decimals.is_empty() || decimals.len() > 9 {
        return None;
    }
    let scale = 10u128.pow(decimals.len() as u32);
    let number = whole.parse::<u64>().ok()? as u128 * scale + decimals.parse::<u64>().ok()? as u128;
    let value = number.checked_mul(factor as u128)?;
    (value % scale == 0).then(|| u64::try_from(value / scale).ok()).flatten()
}

/// Milliseconds since 1970 of a date-time with an offset; `Err` says what is missing.
pub fn instant(at: &Datetime) -> Result<i64, &'static str> {
    let (Some(date), Some(time)) = (at.date, at.time) else {
        return Err("a time needs a date and a time of day, such as 2026-01-31T00:00:00Z");
    };
    let offset = match at.offset {
        Some(Offset::Z) => 0,
        Some(Offset::Custom { minutes }) => i64::from(minutes),
        None => return Err("a time needs its offset: write Z or +02:00 at its end"),
    };
    let days = days_from_civil(i64::from(date.year), i64::from(date.month), i64::from(date.day));
    let minutes = days * 1440 + i64::from(time.hour) * 60 + i64::from(time.minute) - offset;
    let ms = i64::from(time.nanosecond.unwrap_or(0)) / 1_000_000;
    Ok((minutes * 60 + i64::from(time.second.unwrap_or(0))) * 1000 + ms)
}

/// Days since 1970-01-01 of a date of the Gregorian calendar (Hinnant's algorithm: years begin in March).
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year - era * 400;
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_exact() {
        assert_eq!(duration("100ms"), Ok(Duration::from_millis(100)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("14d"), Ok(Duration::from_secs(14 * 86_400)));
        assert_eq!(duration("5 m"), Ok(Duration::from_secs(300)));
        for bad in ["", "5", "ms", "-1s", "1.s", ".5s", "0.0005s", "1e3ms", "99999999999999999999d", "1 fortnight"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_know_both_kinds_of_units() {
        assert_eq!(size("16MiB"), Ok(16 << 20));
        assert_eq!(size("0.5KiB"), Ok(512));
        assert_eq!(size("2MB"), Ok(2_000_000));
        for bad in ["16", "16mib", "MiB", "1.3B", "16 TiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn instants_are_milliseconds_since_1970() {
        let at = |text: &str| instant(&text.parse().unwrap());
        assert_eq!(at("1970-01-01T00:00:00Z"), Ok(0));
        assert_eq!(at("2000-03-01T00:00:00Z"), Ok(951_868_800_000));
        assert_eq!(at("2026-02-28T23:59:59.123Z"), Ok(1_772_323_199_123));
        assert_eq!(at("1969-12-31T23:59:59Z"), Ok(-1000));
        assert_eq!(at("2026-01-01T02:00:00+02:00"), at("2026-01-01T00:00:00Z"));
        assert!(at("2026-01-01T00:00:00").is_err());
        assert!(at("2026-01-01").is_err());
    }
}
