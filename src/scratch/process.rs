//! Processes that run a run's file: `semel run`, armed to crash or not.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::Run;
use crate::crash::{self, Crash};
use crate::error::{Exit, Failure};

const TICK: Duration = Duration::from_millis(5);
/// A run that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// Of a log, in what is said of a run that failed.
const TAIL: usize = 6;

/// How a process is started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Start<'a> {
    pub crash: Option<Crash>,
    /// Only this stage.
    pub only: Option<&'a str>,
    /// Run on when everything is through.
    pub endless: bool,
}

/// A running `semel run`. Killed when dropped.
pub struct Process {
    child: Child,
    out: PathBuf,
    log: PathBuf,
}

/// How a process ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    /// What it printed, if it came to its end.
    pub report: Value,
    pub log: String,
}

impl Ended {
    /// By its own hand, as it was armed to.
    pub fn was_killed(&self) -> bool {
        self.status.signal() == Some(Signal::SIGKILL as i32)
    }

    /// It was killed after a commit was sent and before the answer came.
    pub fn in_flight(&self) -> bool {
        self.log.contains(crash::IN_FLIGHT)
    }

    /// The end of its log.
    pub fn tail(&self) -> String {
        let lines: Vec<&str> = self.log.lines().collect();
        lines[lines.len().saturating_sub(TAIL)..].join("\n")
    }
}

/// An error once the user wants no more.
pub fn go_on(interrupted: &AtomicBool) -> Result<(), Failure> {
    match interrupted.load(Ordering::Relaxed) {
        true => Err(Failure::new(Exit::Interrupted, "stopped before the end: nothing was found out")),
        false => Ok(()),
    }
}

/// Starts a process that runs `run`.
pub fn start(run: &Run, how: Start<'_>) -> Result<Process, Failure> {
    let failed = |e: std::io::Error| Failure::refused(format!("cannot start `semel run`: {e}"));
    let number = std::fs::read_dir(&run.dir).map_err(failed)?.count();
    let path = |suffix: &str| run.dir.join(format!("{number}.{suffix}"));
    let (out, log) = (path("out"), path("log"));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.arg("run").arg(&run.file).args(["--quiet", "--json"]);
    if !how.endless {
        command.arg("--drain");
    }
    if let Some(stage) = how.only {
        // The stage of the Kafka part has the run's name.
        command.args(["--only", stage]);
    }
    match how.crash {
        Some(crash) => command.env(crash::VARIABLE, crash.to_string()),
        None => command.env_remove(crash::VARIABLE),
    };
    // The tail of the log is shown where something fails: a filter of the user's would hide it.
    command.env_remove("SEMEL_LOG").stdin(Stdio::null());
    command.stdout(File::create(&out).map_err(failed)?).stderr(File::create(&log).map_err(failed)?);
    Ok(Process { child: command.spawn().map_err(failed)?, out, log })
}

impl Process {
    /// Waits for its end, for two minutes at most. `interrupted` ends all.
    pub fn wait(&mut self, interrupted: &AtomicBool) -> Result<Ended, Failure> {
        self.ended(PATIENCE, interrupted)?.ok_or_else(|| {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            Failure::unreachable(format!("a run did not come to its end within {} s:\n{log}", PATIENCE.as_secs()))
        })
    }

    /// Its end, if that comes within `patience`.
    pub fn ended(&mut self, patience: Duration, interrupted: &AtomicBool) -> Result<Option<Ended>, Failure> {
        let deadline = Instant::now() + patience;
        loop {
            let status = self.child.try_wait().map_err(|e| Failure::refused(format!("waiting for a run: {e}")))?;
            if let Some(status) = status {
                let log = String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned();
                let report = std::fs::read(&self.out).unwrap_or_default();
                let report = serde_json::from_slice(&report).unwrap_or(Value::Null);
                return Ok(Some(Ended { status, report, log }));
            }
            go_on(interrupted)?;
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(TICK);
        }
    }

    /// Waits until its log holds `text`, or until it has ended.
    pub fn until(&mut self, text: &str, interrupted: &AtomicBool) {
        let deadline = Instant::now() + PATIENCE;
        let is_running = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        while !std::fs::read_to_string(&self.log).unwrap_or_default().contains(text)
            && is_running(&mut self.child)
            && !interrupted.load(Ordering::Relaxed)
            && Instant::now() < deadline
        {
            std::thread::sleep(TICK);
        }
    }

    /// Asks it to stop in good order.
    pub fn stop(&self) {
        let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
