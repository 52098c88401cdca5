//! A server that is a child process of the supervisor.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpid};

use super::place;
use crate::error::Failure;

const POLL: Duration = Duration::from_millis(30);

/// A child that ends when this value is dropped, and when its parent dies.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    log: PathBuf,
    last_signal: Signal,
}

impl Process {
    /// Starts `command` with its output appended to `log`. `last_signal` ends it at once without care for its data.
    /// The kernel sends it too when the *thread* that called this ends: call it from one that lives as long as the
    /// child.
    pub(super) fn spawn(mut command: Command, log: &Path, last_signal: Signal) -> io::Result<Process> {
        let output = File::options().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        end_with_parent(&mut command, last_signal);
        Ok(Process { child: command.spawn()?, log: log.to_owned(), last_signal })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Blocks until `ready` answers true. Fails with the end of the log when the process ends first or the time is up.
    pub(super) fn wait_ready(
        &mut self,
        what: &str,
        patience: Duration,
        mut ready: impl FnMut() -> bool,
    ) -> Result<(), Failure> {
        let deadline = Instant::now() + patience;
        while !ready() {
            let complaint = match self.child.try_wait() {
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(POLL);
                    continue;
                }
                Ok(None) => format!("{what} does not answer after {} s", patience.as_secs()),
                Ok(Some(status)) => format!("{what} ended while it started ({status})"),
                Err(error) => format!("{what} cannot be watched: {error}"),
            };
            return Err(Failure::unreachable(format!("{complaint}; {}", place::tail(&self.log, 15))));
        }
        Ok(())
    }

    /// Ends the process and its own children at once, as a crash of the machine would. Blocks until it is gone.
    pub(super) fn kill_all(&mut self) {
        let pid = self.child.id();
        // Linux' list; elsewhere the children notice on their own.
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        self.stop(Signal::SIGKILL, Duration::from_secs(5));
        for child in children.split_whitespace().filter_map(|c| c.parse().ok()) {
            let _ = kill(Pid::from_raw(child), Signal::SIGKILL);
        }
    }

    /// Sends `signal` and blocks until the process is gone; SIGKILL when it takes longer than `patience`.
    pub(super) fn stop(&mut self, signal: Signal, patience: Duration) {
        let deadline = Instant::now() + patience;
        if self.is_alive() {
            let _ = kill(Pid::from_raw(self.child.id() as i32), signal);
        }
        while self.is_alive() {
            if Instant::now() >= deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop(self.last_signal, Duration::from_secs(5));
    }
}

/// Runs a tool to its end, its output in `log`. Fails with the end of the log.
pub(super) fn run(mut command: Command, what: &str, log: &Path) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::refused(format!("{what} could not be run: {error}"));
    let output = File::create(log).map_err(failed)?;
    command.stdin(Stdio::null()).stdout(output.try_clone().map_err(failed)?).stderr(output);
    end_with_parent(&mut command, Signal::SIGKILL);
    let status = command.status().map_err(failed)?;
    if status.success() {
        let _ = fs::remove_file(log);
        return Ok(());
    }
    Err(Failure::refused(format!("{what} failed ({status}); {}", place::tail(log, 15))))
}

#[cfg(target_os = "linux")]
fn end_with_parent(command: &mut Command, signal: Signal) {
    let parent = getpid();
    let arm = move || {
        nix::sys::prctl::set_pdeathsig(signal)?;
        // The parent may have died before the line above.
        if nix::unistd::getppid() != parent {
            return Err(io::Error::from_raw_os_error(nix::errno::Errno::ESRCH as i32));
        }
        Ok(())
    };
    // SAFETY: between fork and exec only prctl and getppid are called, both async-signal-safe. std runs this after it
    // has changed the user, which would have cleared the signal.
    unsafe { command.pre_exec(arm) };
}

#[cfg(not(target_os = "linux"))]
fn end_with_parent(_command: &mut Command, _signal: Signal) {}
