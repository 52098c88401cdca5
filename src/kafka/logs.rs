//! librdkafka's log lines, through `tracing`.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A broker that is down makes every client say so several times a second.
const QUIET: Duration = Duration::from_secs(30);

static REPEATS: LazyLock<Mutex<Repeats>> = LazyLock::new(Mutex::default);

/// Passes one line on: syslog levels, the client's name, librdkafka's facility (`FAIL`, `SESSTMOUT`).
pub(super) fn record(client: &str, level: i32, facility: &str, line: &str) {
    let line = strip_thread(line.trim());
    match level {
        // Which property is for producers only concerns nobody: both kinds of client get the user's properties.
        _ if facility == "CONFWARN" => tracing::debug!(client, facility, "{line}"),
        ..=4 => {
            let mut repeats = REPEATS.lock().unwrap_or_else(PoisonError::into_inner);
            match repeats.admit(facility, line, Instant::now()) {
                Some(0) => tracing::warn!(client, facility, "{line}"),
                Some(more) => tracing::warn!(client, facility, repeated = more, "{line}"),
                None => tracing::debug!(client, facility, "{line}"),
            }
        }
        5..=6 => tracing::debug!(client, facility, "{line}"),
        _ => tracing::trace!(client, facility, "{line}"),
    }
}

/// `[thrd:127.0.0.1:9092/bootstrap]: 127.0.0.1:9092/bootstrap: …` names the broker twice.
fn strip_thread(line: &str) -> &str {
    match line.strip_prefix("[thrd:").and_then(|rest| rest.split_once("]: ")) {
        Some((_, rest)) => rest,
        None => line,
    }
}

/// Lines said of late, whoever said them, and how often they were held back since.
#[derive(Default)]
struct Repeats {
    seen: HashMap<String, (Instant, u64)>,
}

impl Repeats {
    /// `Some(n)`: say it, and that `n` of its kind were held back. Numbers in a line (times, counts) make it no other
    /// line.
    fn admit(&mut self, facility: &str, line: &str, now: Instant) -> Option<u64> {
        if self.seen.len() > 1000 {
            self.seen.retain(|_, (said, _)| now.duration_since(*said) < QUIET);
        }
        let mut key = String::from(facility);
        key.extend(line.split(" (after ").next().unwrap_or(line).chars().filter(|c| !c.is_ascii_digit()));
        match self.seen.get_mut(&key) {
            Some((said, held)) if now.duration_since(*said) < QUIET => {
                *held += 1;
                None
            }
            Some((said, held)) => {
                *said = now;
                Some(std::mem::take(held))
            }
            None => {
                self.seen.insert(key, (now, 0));
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_line_is_said_once_in_a_while_with_its_count() {
        let mut repeats = Repeats::default();
        let start = Instant::now();
        let line = |ms, more| format!("localhost:1/bootstrap: Connect failed: Connection refused (after {ms}ms{more})");
        assert_eq!(repeats.admit("FAIL", &line(0, ""), start), Some(0));
        assert_eq!(repeats.admit("FAIL", &line(3, ", 2 identical error(s) suppressed"), start), None);
        assert_eq!(repeats.admit("FAIL", &line(1, ""), start + QUIET / 2), None);
        assert_eq!(repeats.admit("FAIL", &line(1, ""), start + QUIET), Some(2));
        assert_eq!(repeats.admit("FAIL", "localhost:1/bootstrap: Disconnected", start + QUIET), Some(0));
    }

    #[test]
    fn the_thread_is_left_out() {
        assert_eq!(
            strip_thread("[thrd:localhost:1/bootstrap]: localhost:1/bootstrap: down"),
            "localhost:1/bootstrap: down"
        );
        assert_eq!(strip_thread("no thread"), "no thread");
    }
}
