//! Times on the command line.

use std::time::SystemTime;

use chrono::DateTime;

use crate::topology::units;

/// Milliseconds since the epoch of an RFC 3339 time, or of as long ago as a duration says.
pub fn ago_or_at(text: &str) -> Result<i64, String> {
    if let Ok(ago) = units::duration(text) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        return Ok(now.saturating_sub(ago).as_millis() as i64);
    }
    let time = DateTime::parse_from_rfc3339(text).map(|time| time.timestamp_millis());
    time.map_err(|_| "write a duration such as 2h, or a time such as 2026-01-31T00:00:00Z".to_owned())
}
