//! The supervisor: a process of its own that owns the servers of one cluster. Users hold a connection to it; when the
//! last one closes, also because its process was killed, everything stops after a grace period and the data go.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::kafka::Nodes;
use super::keeper::{self, Event, Job, Kept, Setup};
use super::place::{self, Place};
use super::wire::{Action, Lines, Reply, Request, ServerStatus, Status};
use super::{Server, Supervise};
use crate::error::{Exit, Failure};

/// How long a new supervisor waits for the user that started it.
const FIRST_USER: Duration = Duration::from_secs(10);
/// How long servers may take to end before the process leaves anyway (the kernel ends them then).
const LAST_STOP: Duration = Duration::from_secs(15);

/// Runs the supervisor until it has stopped everything. Blocks. `Exit::Twin` when the place has one already.
pub fn supervise(options: &Supervise) -> Result<Exit, Failure> {
    let place = Place { directory: options.directory.clone() };
    let broken = |error: io::Error| Failure::refused(format!("{}: {error}", place.directory.display()));
    let Some(lock) = take_lock(&place).map_err(broken)? else { return Ok(Exit::Twin) };
    if let Some(home) = place.directory.parent() {
        place::sweep(home, &place.directory);
    }
    super::containers::remove_left_behind(&place.directory);
    place.remove_data();
    let nodes = Nodes::new(options.brokers)?;
    let logs = (1..=nodes.count()).map(|node| place.log(&nodes.name(node)));
    for left in logs.chain([place.socket(), place.log("postgres")]) {
        let _ = fs::remove_file(left);
    }
    let data = place.make_data().map_err(broken)?;
    let setup = Setup {
        directory: place.directory.clone(),
        data: data.clone(),
        broker_settings: options.broker_settings.clone(),
        nodes,
    };

    let kept = (1..=setup.nodes.count()).map(Kept::Kafka).chain([Kept::Postgres]);
    let (keepers, threads): (Vec<_>, Vec<_>) = kept.map(|kept| Keeper::spawn(kept, setup.clone())).unzip();
    let supervisor =
        Arc::new(Supervisor { place: place.clone(), keepers, usage: Mutex::new(Use::new()), changed: Condvar::new() });
    let listener = UnixListener::bind(place.socket()).map_err(broken)?;
    stop_on_signals(supervisor.clone())?;
    let door = supervisor.clone();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let supervisor = door.clone();
            thread::spawn(move || serve(&supervisor, Lines::new(stream)));
        }
    });
    supervisor.wait_until_unused(options.grace);

    // In this order: no new connection, servers gone, data gone, lock free.
    let _ = fs::remove_file(place.socket());
    supervisor.keepers.iter().for_each(Keeper::close);
    let deadline = Instant::now() + LAST_STOP;
    for ended in threads {
        let _ = ended.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
    // By name, not by what is written down: the directory may be gone with a test's temporary one.
    let _ = fs::remove_dir_all(&data);
    if options.private {
        place.remove();
    }
    drop(lock);
    Ok(Exit::Done)
}

/// Takes the place's lock; `None` when another supervisor has it. Others look at the lock for an instant, so one
/// failure means nothing.
fn take_lock(place: &Place) -> io::Result<Option<File>> {
    let file = File::options().create(true).truncate(false).write(true).open(place.lock())?;
    for _ in 0..50 {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(10)),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(None)
}

/// SIGTERM, SIGINT and SIGHUP stop the cluster in order.
fn stop_on_signals(supervisor: Arc<Supervisor>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::refused(format!("cannot watch for signals: {error}")))?;
    thread::spawn(move || {
        runtime.block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let (Ok(mut term), Ok(mut int), Ok(mut hup)) =
                (signal(SignalKind::terminate()), signal(SignalKind::interrupt()), signal(SignalKind::hangup()))
            else {
                return;
            };
            tokio::select! { _ = term.recv() => {}, _ = int.recv() => {}, _ = hup.recv() => {} }
        });
        supervisor.change(|u| u.stop = true);
    });
    Ok(())
}

/// The supervisor's end of a keeper.
#[derive(Debug)]
struct Keeper {
    kept: Kept,
    /// `None` once closed.
    jobs: Mutex<Option<Sender<Job>>>,
    status: Arc<Mutex<Option<ServerStatus>>>,
}

impl Keeper {
    /// Also answers a receiver that wakes when the thread has ended.
    fn spawn(kept: Kept, setup: Setup) -> (Keeper, Receiver<()>) {
        let (jobs, work) = channel();
        let (alive, ended) = channel();
        let status = Arc::new(Mutex::new(None));
        let shared = status.clone();
        thread::spawn(move || {
            keeper::keep(kept, &setup, &work, &shared);
            drop(alive);
        });
        (Keeper { kept, jobs: Mutex::new(Some(jobs)), status }, ended)
    }

    fn close(&self) {
        self.jobs.lock().expect("no holder of the jobs panics").take();
    }

    fn send(&self, action: Action, events: Sender<Event>) {
        if let Some(jobs) = &*self.jobs.lock().expect("no holder of the jobs panics") {
            let _ = jobs.send(Job { action, events });
        }
    }

    /// Whether it runs such a server; with a number, that broker.
    fn runs(&self, server: Server, broker: Option<usize>) -> bool {
        match self.kept {
            Kept::Kafka(node) => server == Server::Kafka && broker.is_none_or(|broker| broker == node),
            Kept::Postgres => server == Server::Postgres,
        }
    }

    fn status(&self) -> Option<ServerStatus> {
        self.status.lock().expect("no holder of the status panics").clone()
    }
}

/// Who uses the cluster.
#[derive(Debug)]
struct Use {
    users: usize,
    pinned: bool,
    stop: bool,
    /// Nobody is let in any more.
    closed: bool,
    /// Since when nobody uses it, and whether anybody ever did.
    unused_since: Instant,
    was_used: bool,
    /// The last attempt to bring servers up failed. The next one gets a new supervisor, with its user's environment.
    failed: bool,
}

impl Use {
    fn new() -> Use {
        Use {
            users: 0,
            pinned: false,
            stop: false,
            closed: false,
            unused_since: Instant::now(),
            was_used: false,
            failed: false,
        }
    }
}

#[derive(Debug)]
struct Supervisor {
    place: Place,
    keepers: Vec<Keeper>,
    usage: Mutex<Use>,
    changed: Condvar,
}

impl Supervisor {
    fn lock(&self) -> MutexGuard<'_, Use> {
        self.usage.lock().expect("no holder of the usage panics")
    }

    fn change<T>(&self, change: impl FnOnce(&mut Use) -> T) -> T {
        let answer = change(&mut self.lock());
        self.changed.notify_all();
        answer
    }

    /// Blocks until the cluster is to stop, and closes the door.
    fn wait_until_unused(&self, grace: Duration) {
        let mut usage = self.lock();
        loop {
            let patience = match (usage.was_used, usage.failed) {
                (false, _) => FIRST_USER.max(grace),
                (true, false) => grace,
                (true, true) => Duration::ZERO,
            };
            let left = patience.saturating_sub(usage.unused_since.elapsed());
            let in_use = usage.users > 0 || usage.pinned;
            if usage.stop || (!in_use && left.is_zero()) {
                usage.closed = true;
                return;
            }
            let wait = if in_use { Duration::from_secs(3600) } else { left };
            usage = self.changed.wait_timeout(usage, wait).expect("no holder of the usage panics").0;
        }
    }

    fn status(&self) -> Status {
        let usage = self.lock();
        let of = |server| self.keepers.iter().filter(move |k| k.runs(server, None)).filter_map(Keeper::status);
        Status {
            pid: std::process::id(),
            directory: self.place.directory.clone(),
            pinned: usage.pinned,
            users: usage.users,
            brokers: self.keepers.iter().filter(|keeper| keeper.runs(Server::Kafka, None)).count(),
            kafka: of(Server::Kafka).collect(),
            postgres: of(Server::Postgres).next(),
        }
    }
}

/// One use; it ends with the connection.
struct Hold<'a>(&'a Supervisor);

impl<'a> Hold<'a> {
    /// `None` when the cluster is stopping.
    fn take(supervisor: &'a Supervisor) -> Option<Hold<'a>> {
        supervisor.change(|u| {
            u.users += usize::from(!u.closed);
            u.was_used = true;
            (!u.closed).then_some(Hold(supervisor))
        })
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.change(|u| {
            u.users -= 1;
            u.unused_since = Instant::now();
        });
    }
}

/// Answers one connection until it closes. A closed connection is how a user leaves: errors are not looked at.
fn serve(supervisor: &Supervisor, mut lines: Lines) {
    let mut hold = None;
    while let Ok(Some(request)) = lines.receive::<Request>() {
        let answer = match request {
            Request::Hold { servers, pin } => {
                if hold.is_none() {
                    let Some(taken) = Hold::take(supervisor) else { return };
                    hold = Some(taken);
                }
                let result = act(supervisor, &mut lines, &servers, None, Action::Start);
                supervisor.change(|u| {
                    u.failed = result.is_err();
                    u.pinned |= pin && result.is_ok();
                });
                result.map(|()| Reply::Status(supervisor.status()))
            }
            Request::Control { server, broker, action } => {
                act(supervisor, &mut lines, &[server], broker, action).map(|()| Reply::Done)
            }
            Request::Status => Ok(Reply::Status(supervisor.status())),
            Request::Release { force } => Ok(supervisor.change(|u| {
                u.pinned = false;
                u.stop |= force || u.users == 0;
                Reply::Released { stops: u.stop, users: u.users }
            })),
        };
        if lines.send(&answer.unwrap_or_else(|failure| Reply::failed(&failure))).is_err() {
            return;
        }
    }
}

/// Has the keepers of `servers` do `action` at the same time, and passes on what they say.
fn act(
    supervisor: &Supervisor,
    lines: &mut Lines,
    servers: &[Server],
    broker: Option<usize>,
    action: Action,
) -> Result<(), Failure> {
    let (events, inbox) = channel();
    let meant = |keeper: &&Keeper| servers.iter().any(|server| keeper.runs(*server, broker));
    let keepers: Vec<&Keeper> = supervisor.keepers.iter().filter(meant).collect();
    if keepers.is_empty() {
        return Err(Failure::refused("the cluster has no broker of that number"));
    }
    keepers.iter().for_each(|keeper| keeper.send(action, events.clone()));
    drop(events);
    let mut failures: Vec<Failure> = Vec::new();
    let mut done = 0;
    for event in inbox {
        match event {
            Event::Progress(text) => {
                let _ = lines.send(&Reply::Progress(text));
            }
            Event::Done(result) => {
                done += 1;
                failures.extend(result.err());
            }
        }
    }
    if failures.is_empty() && done < keepers.len() {
        return Err(Failure::unreachable("the development cluster is stopping"));
    }
    let Some(first) = failures.first() else { return Ok(()) };
    let message = failures.iter().map(|f| f.message.as_str()).collect::<Vec<_>>().join("\n");
    Err(Failure::new(first.exit, message))
}
