//! The clock as a value, so that tests turn its hands.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Wall-clock time in milliseconds since the epoch: the system's, or one that a test sets.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    #[default]
    System,
    Manual(Arc<AtomicI64>),
}

impl Clock {
    /// A clock that stands at `ms` until it is moved.
    pub fn manual(ms: i64) -> Clock {
        Clock::Manual(Arc::new(AtomicI64::new(ms)))
    }

    /// Milliseconds since the epoch.
    pub fn now_ms(&self) -> i64 {
        match self {
            Clock::System => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64),
            Clock::Manual(ms) => ms.load(Ordering::Relaxed),
        }
    }
}
