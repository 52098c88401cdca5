//! A keeper: the thread that owns one server for as long as the supervisor lives. The kernel ends a child with the
//! *thread* that made it, so servers are never started from a shorter-lived one.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::kafka::Nodes;
use super::wire::{Action, ServerStatus};
use super::{kafka, postgres};
use crate::error::Failure;

/// How often a server that nobody asks about is looked at.
const WATCH: Duration = Duration::from_secs(1);

/// One way to run a server.
pub(super) trait Backend {
    /// "Apache Kafka 4.2.0 (local JVM)"
    fn description(&self) -> String;
    /// Bootstrap servers, or a database URL. The same for the backend's whole life.
    fn address(&self) -> String;
    /// Blocks until the server answers.
    fn start(&mut self) -> Result<(), Failure>;
    /// Blocks until the server is gone. `hard`: as a crash would end it.
    fn stop(&mut self, hard: bool);
    fn is_alive(&mut self) -> bool;
    /// Process id, where it is a process of this machine.
    fn pid(&self) -> Option<u32>;
}

/// What a backend is made from.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    /// Logs and configuration.
    pub(super) directory: PathBuf,
    /// Data.
    pub(super) data: PathBuf,
    /// `key=value`, added to the broker's configuration.
    pub(super) broker_settings: Vec<(String, String)>,
    pub(super) nodes: Nodes,
}

/// What a keeper runs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kept {
    /// The node of that number, from 1.
    Kafka(usize),
    Postgres,
}

/// Something to do, and where to tell of it.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) action: Action,
    pub(super) events: Sender<Event>,
}

#[derive(Debug)]
pub(super) enum Event {
    Progress(String),
    Done(Result<(), Failure>),
}

/// The thread's body: works off `jobs` until their sender is gone, then ends the server without care for its data.
pub(super) fn keep(kept: Kept, setup: &Setup, jobs: &Receiver<Job>, status: &Arc<Mutex<Option<ServerStatus>>>) {
    let mut backend: Option<Box<dyn Backend>> = None;
    loop {
        match jobs.recv_timeout(WATCH) {
            Ok(job) => {
                let progress = |text: &str| {
                    let _ = job.events.send(Event::Progress(text.to_owned()));
                };
                let result = act(kept, setup, &mut backend, job.action, &progress);
                publish(&mut backend, status);
                let _ = job.events.send(Event::Done(result));
            }
            Err(RecvTimeoutError::Timeout) => publish(&mut backend, status),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn act(
    kept: Kept,
    setup: &Setup,
    backend: &mut Option<Box<dyn Backend>>,
    action: Action,
    progress: &dyn Fn(&str),
) -> Result<(), Failure> {
    if matches!(action, Action::Stop | Action::Kill | Action::Restart)
        && let Some(backend) = backend
    {
        backend.stop(action == Action::Kill);
    }
    if matches!(action, Action::Stop | Action::Kill) {
        return Ok(());
    }
    let running = match backend {
        Some(backend) => backend,
        None => backend.insert(match kept {
            Kept::Kafka(node) => kafka::backend(setup, node, progress)?,
            Kept::Postgres => postgres::backend(setup, progress)?,
        }),
    };
    if !running.is_alive() {
        progress(&format!("starting {} …", running.description()));
        running.start()?;
    }
    Ok(())
}

fn publish(backend: &mut Option<Box<dyn Backend>>, status: &Mutex<Option<ServerStatus>>) {
    let now = backend.as_mut().map(|backend| ServerStatus {
        address: backend.address(),
        description: backend.description(),
        up: backend.is_alive(),
        pid: backend.pid(),
    });
    *status.lock().expect("no holder of the status panics") = now;
}
