//! What this process has used of the machine.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

/// Time on all cores since the process started, the system's included.
pub fn cpu() -> Duration {
    let used = getrusage(UsageWho::RUSAGE_SELF)
        .map_or(0, |usage| usage.user_time().num_microseconds() + usage.system_time().num_microseconds());
    Duration::from_micros(used.max(0) as u64)
}

/// The most that was resident at a time, in bytes; 0 where the system does not tell. Of this program alone: what
/// `getrusage` says holds its parent's as well.
pub fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
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
