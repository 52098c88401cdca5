//! What a figure was measured on.

use std::fs;

use crate::observe::usage::{kilobytes, line_of};

/// Names and values, for a report: the machine and this program.
pub fn facts() -> Vec<(&'static str, String)> {
    let cpu = line_of("/proc/cpuinfo", "model name").unwrap_or_else(|| "an unknown processor".to_owned());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let gigabytes = kilobytes("/proc/meminfo", "MemTotal").unwrap_or(0) as f64 / 1_048_576.0;
    let system = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let build = if cfg!(debug_assertions) { "debug build: its figures mean nothing" } else { "release build" };
    vec![
        ("processor", format!("{cpu}, {cores} cores")),
        ("memory", format!("{gigabytes:.0} GiB")),
        ("system", format!("{} {}", std::env::consts::OS, system.trim())),
        ("semel", format!("{} ({build}), librdkafka {}", env!("CARGO_PKG_VERSION"), crate::kafka::client_version())),
    ]
}
