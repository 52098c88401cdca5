//! Logs, counters and progress.

pub mod progress;
pub mod status;
pub mod usage;

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Sends `tracing` events to stderr, as text or as JSON lines; `SEMEL_LOG` filters them, else `filter` does.
pub fn init_logs(json: bool, filter: &str) {
    let filter = EnvFilter::try_from_env("SEMEL_LOG").unwrap_or_else(|_| EnvFilter::new(filter));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal());
    // A second call (tests) keeps the first subscriber.
    let _ = if json { builder.json().try_init() } else { builder.try_init() };
}
