//! What this process has used of the machine.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

/// When this process started: the first call, which the command line makes before anything else.
pub fn started() -> Instant {
    static STARTED: OnceLock<Instant> = OnceLock::new();
    *STARTED.get_or_init(Instant::now)
}

/// Time on all cores since the process started, the system's included.
pub fn cpu() -> Duration {
    let used = getrusage(UsageWho::RUSAGE_SELF)
        .map_or(0, |usage| usage.user_time().num_microseconds() + usage.system_time().num_microseconds());
    Duration::from_micros(used.max(0) as u64)
}

/// The most that was resident at a time, in bytes; 0 where the system does not tell. Of this program alone: what
/// `getrusage` says holds its parent's as well.
pub fn peak_memory() -> u64 {
    kilobytes("/proc/self/status", "VmHWM").unwrap_or(0) * 1024
}

/// A size that the system tells in kB, from a file of `/proc`.
pub fn kilobytes(path: &str, name: &str) -> Option<u64> {
    line_of(path, name)?.trim_end_matches(" kB").parse().ok()
}

/// The value of the first line of that name, from a file of `/proc`.
pub fn line_of(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_and_memory_are_counted() {
        let (before, peak) = (cpu(), peak_memory());
        let block: Vec<u64> = (0..8_000_000).map(|i| i ^ 7).collect();
        assert!(std::hint::black_box(&block).contains(&7));
        assert!(cpu() > before);
        assert!(peak_memory() >= peak.max(block.len() as u64 * 8));
    }
}
