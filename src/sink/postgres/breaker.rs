//! Too many rejects in a minute are no bad records but something wrong: stop before the dead letters fill.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Failure;

const MINUTE: Duration = Duration::from_secs(60);

/// Counts the rejects of a stage; its workers and writers share one.
#[derive(Debug)]
pub struct Breaker {
    node: String,
    limit: u64,
    window: Mutex<Window>,
}

#[derive(Debug)]
struct Window {
    started: Instant,
    rejects: u64,
}

impl Breaker {
    /// Trips on more than `limit` rejects a minute of the sink `node`.
    pub fn new(node: &str, limit: u64) -> Breaker {
        Breaker { node: node.into(), limit, window: Mutex::new(Window { started: Instant::now(), rejects: 0 }) }
    }

    /// Whether `rejects` more would still be bearable; `last` is one of them, for the message.
    ///
    /// # Errors
    /// Exit 5 with the limit and how to raise it.
    pub fn check(&self, rejects: u64, last: &str) -> Result<(), Failure> {
        let counted = self.window(Instant::now(), |w| w.rejects) + rejects;
        if rejects == 0 || counted <= self.limit {
            return Ok(());
        }
        Err(Failure::stopped(format!(
            "sink {}: {counted} records rejected within a minute, and max_rejects_per_minute is {}; the last one: \
             {last}",
            self.node, self.limit
        )))
    }

    /// Counts rejects that went out.
    pub fn count(&self, rejects: u64) {
        self.window(Instant::now(), |w| w.rejects += rejects);
    }

    fn window<T>(&self, now: Instant, apply: impl FnOnce(&mut Window) -> T) -> T {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        if now.duration_since(window.started) >= MINUTE {
            *window = Window { started: now, rejects: 0 };
        }
        apply(&mut window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_the_last_that_passes() {
        let breaker = Breaker::new("table", 3);
        breaker.count(2);
        assert!(breaker.check(0, "").is_ok());
        assert!(breaker.check(1, "x").is_ok());
        let failure = breaker.check(2, "column a").unwrap_err();
        assert_eq!(failure.exit, crate::error::Exit::Stopped);
        assert_eq!(
            failure.message,
            "sink table: 4 records rejected within a minute, and max_rejects_per_minute is 3; the last one: column a"
        );
    }

    #[test]
    fn a_new_minute_starts_from_nothing() {
        let breaker = Breaker::new("table", 3);
        breaker.count(3);
        breaker.window(Instant::now() + MINUTE, |w| assert_eq!(w.rejects, 0));
    }
}
