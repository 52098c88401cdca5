//! A user's end: finds the supervisor of a place, or starts it, and holds it.

use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Server;
use super::place::{self, Place};
use super::wire::{Lines, Reply, Request, Status};
use crate::error::{Exit, Failure};

const POLL: Duration = Duration::from_millis(20);
/// From start to an open socket, and from the end of the last user to a free lock.
const PATIENCE: Duration = Duration::from_secs(40);

/// How a supervisor is started.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) executable: PathBuf,
    pub(super) arguments: Vec<OsString>,
}

/// Holds `servers` of the cluster at `place`, bringing up what is not. Blocks until they answer.
pub(super) fn hold(
    place: &Place,
    launch: &Launch,
    servers: &[Server],
    pin: bool,
    progress: &dyn Fn(&str),
) -> Result<(Lines, Status), Failure> {
    // A supervisor that was met while it stopped, or was killed, closes the connection: go round.
    for _ in 0..5 {
        let mut lines = connect(place, launch)?;
        let request = Request::Hold { servers: servers.to_vec(), pin };
        match converse(&mut lines, &request, progress)? {
            Some(Reply::Status(status)) => return Ok((lines, status)),
            Some(other) => return Err(Failure::unreachable(format!("the supervisor answered {other:?}"))),
            None => {}
        }
    }
    let tail = place::tail(&place.log("supervisor"), 15);
    Err(Failure::unreachable(format!("the development cluster's supervisor ended again and again; {tail}")))
}

/// Sends a request and blocks for its answer; `None` when the supervisor is gone.
pub(super) fn converse(
    lines: &mut Lines,
    request: &Request,
    progress: &dyn Fn(&str),
) -> Result<Option<Reply>, Failure> {
    if lines.send(request).is_err() {
        return Ok(None);
    }
    loop {
        match lines.receive::<Reply>() {
            Ok(Some(Reply::Progress(text))) => progress(&text),
            Ok(Some(Reply::Failed { refused, message })) => return Err(Reply::failure(refused, message)),
            Ok(other) => return Ok(other),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(Failure::refused(format!("the supervisor speaks another version: {error}")));
            }
            Err(_) => return Ok(None),
        }
    }
}

/// Connects to the supervisor, starting one where none lives. Of several processes that start at once, one
/// supervisor gets the lock and all connect to it.
fn connect(place: &Place, launch: &Launch) -> Result<Lines, Failure> {
    let deadline = Instant::now() + PATIENCE;
    let mut child: Option<Child> = None;
    loop {
        if let Ok(lines) = Lines::connect(&place.socket()) {
            reap(child);
            return Ok(lines);
        }
        if let Some(status) = child.as_mut().and_then(|c| c.try_wait().ok().flatten()) {
            if status.code() != Some(Exit::Twin as i32) {
                let tail = place::tail(&place.log("supervisor"), 15);
                return Err(Failure::unreachable(format!("the development cluster did not start ({status}); {tail}")));
            }
            child = None;
        }
        if Instant::now() >= deadline {
            reap(child);
            let tail = place::tail(&place.log("supervisor"), 15);
            return Err(Failure::unreachable(format!("the development cluster's supervisor does not answer; {tail}")));
        }
        if child.is_none() && !place.is_alive() {
            child = Some(spawn(place, launch)?);
        }
        thread::sleep(POLL);
    }
}

/// Starts the supervisor detached from this process: its own session, nothing of our terminal and pipes.
fn spawn(place: &Place, launch: &Launch) -> Result<Child, Failure> {
    let failed =
        |error: io::Error| Failure::unreachable(format!("cannot start the development cluster's supervisor: {error}"));
    DirBuilder::new().recursive(true).mode(0o700).create(&place.directory).map_err(failed)?;
    let log = File::create(place.log("supervisor")).map_err(failed)?;
    let mut command = Command::new(&launch.executable);
    command.args(&launch.arguments).current_dir(&place.directory);
    command.stdin(Stdio::null()).stdout(log.try_clone().map_err(failed)?).stderr(log);
    // SAFETY: setsid is async-signal-safe and the closure touches nothing else.
    unsafe { command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(io::Error::from)) };
    command.spawn().map_err(failed)
}

/// Collects the exit status of a supervisor that ends before this process.
fn reap(child: Option<Child>) {
    if let Some(mut child) = child {
        thread::spawn(move || child.wait());
    }
}

/// The cluster's state, without holding it; `None` when it is not up.
pub(super) fn status(place: &Place) -> Result<Option<Status>, Failure> {
    let Ok(mut lines) = Lines::connect(&place.socket()) else { return Ok(None) };
    Ok(match converse(&mut lines, &Request::Status, &|_| {})? {
        Some(Reply::Status(status)) => Some(status),
        _ => None,
    })
}

/// What became of [`release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// Nothing was up.
    NotUp,
    /// Servers and data are gone.
    Stopped,
    /// No longer pinned: stops when these users have gone.
    InUse(usize),
}

/// Unpins the cluster, and stops it if nobody uses it or `force` is set. Blocks until it is gone.
pub(super) fn release(place: &Place, force: bool) -> Result<Released, Failure> {
    let Ok(mut lines) = Lines::connect(&place.socket()) else { return Ok(Released::NotUp) };
    match converse(&mut lines, &Request::Release { force }, &|_| {})? {
        Some(Reply::Released { stops: false, users }) => return Ok(Released::InUse(users)),
        Some(Reply::Released { stops: true, .. }) | None => {}
        Some(other) => return Err(Failure::unreachable(format!("the supervisor answered {other:?}"))),
    }
    let deadline = Instant::now() + PATIENCE;
    while place.is_alive() {
        if Instant::now() >= deadline {
            let message = format!("the development cluster does not stop; look into {}", place.directory.display());
            return Err(Failure::unreachable(message));
        }
        thread::sleep(POLL);
    }
    Ok(Released::Stopped)
}
