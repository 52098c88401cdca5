//! The development cluster: a Kafka and a Postgres for the quick start, drills, tests and benches.
//!
//! [`Cluster::obtain`] uses what `KAFKA_BROKERS` and `DATABASE_URL` name, else containers, else local processes. The
//! servers belong to a supervisor process (`semel dev supervise`). All processes of a user share one cluster;
//! [`Cluster::private`] brings up one of its own with fresh data. A cluster lives as long as somebody holds it: a user
//! that is killed holds nothing. Its data go with it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use serde::{Deserialize, Serialize};

mod client;
#[cfg(feature = "containers")]
mod containers;
#[cfg(not(feature = "containers"))]
#[path = "no_containers.rs"]
mod containers;
mod given;
mod kafka;
mod keeper;
mod maven;
mod missing;
mod place;
mod postgres;
mod process;
mod supervisor;
mod wire;

use missing::Missing;
use place::Place;
use wire::{Action, Lines, Reply, Request};

pub use client::Released;
pub use supervisor::supervise;
pub use wire::{ServerStatus, Status};

use crate::error::Failure;

/// The servers of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Server {
    Kafka,
    Postgres,
}

impl Server {
    fn name(self) -> &'static str {
        match self {
            Server::Kafka => "Apache Kafka",
            Server::Postgres => "PostgreSQL",
        }
    }

    /// The environment variable that names a running one.
    pub fn variable(self) -> &'static str {
        match self {
            Server::Kafka => "KAFKA_BROKERS",
            Server::Postgres => "DATABASE_URL",
        }
    }
}

/// How a cluster is obtained.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `semel` binary, which is run again as the supervisor. Default: this process' own executable, which is wrong
    /// in tests.
    pub executable: Option<PathBuf>,
    /// Where runtime directories are made. Default: `semel-<uid>` under `XDG_RUNTIME_DIR`, else the temporary
    /// directory.
    pub home: Option<PathBuf>,
    /// Which servers are wanted. Default: both. The address of one that is not is empty.
    pub servers: Vec<Server>,
    /// Use what `KAFKA_BROKERS` and `DATABASE_URL` name, each on its own.
    pub use_given: bool,
    /// How long a shared cluster outlives its last user. Counts for the process that brings it up.
    pub grace: Duration,
    /// Added to the broker's configuration; only for a private cluster.
    pub broker_settings: Vec<(String, String)>,
    /// So many brokers: refused for given ones, and for a shared cluster that is up with another number. Default: those
    /// that are there, else one.
    pub brokers: Option<usize>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            executable: None,
            home: None,
            servers: vec![Server::Kafka, Server::Postgres],
            use_given: true,
            grace: Duration::from_secs(10),
            broker_settings: Vec::new(),
            brokers: None,
        }
    }
}

/// What a supervisor process is told on its command line.
#[derive(Clone, Debug)]
pub struct Supervise {
    pub directory: PathBuf,
    pub grace: Duration,
    /// Nobody comes back to it: its runtime directory goes too.
    pub private: bool,
    pub broker_settings: Vec<(String, String)>,
    pub brokers: usize,
}

impl Supervise {
    fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["dev".into(), "supervise".into(), self.directory.clone().into()];
        arguments.extend(["--grace-ms".into(), self.grace.as_millis().to_string().into()]);
        arguments.extend(["--brokers".into(), self.brokers.to_string().into()]);
        if self.private {
            arguments.push("--private".into());
        }
        for (key, value) in &self.broker_settings {
            arguments.extend(["--broker-setting".into(), format!("{key}={value}").into()]);
        }
        arguments
    }
}

/// A Kafka and a Postgres that answer, held until this is dropped.
#[derive(Debug)]
pub struct Cluster {
    /// Bootstrap servers.
    pub brokers: String,
    pub database_url: String,
    /// A line a server: what it is and how it came up.
    pub description: Vec<String>,
    private: bool,
    /// Servers that were given by the environment.
    given: Vec<Server>,
    /// `None` when both were given. The open connection is what keeps the cluster up.
    connection: Option<Mutex<Lines>>,
}

impl Cluster {
    /// The servers that the environment names, else the ones that all processes of this user share. Blocks until they
    /// answer: seconds, the first time as long as a download takes. `progress` is given short sentences for the user.
    ///
    /// # Errors
    /// Refused, with what to install, when the machine lacks something; unreachable when a server does not answer.
    pub fn obtain(options: &Options, progress: &dyn Fn(&str)) -> Result<Cluster, Failure> {
        let place = Place::shared(&home(options)?);
        if !options.broker_settings.is_empty() {
            return Err(Failure::refused("broker settings need a private cluster: the shared one has its own"));
        }
        Cluster::at(&place, options, false, false, progress)
    }

    /// The servers that the environment names (unless `use_given` is off), else new ones with fresh data that nobody
    /// else uses and that stop as soon as this is dropped.
    ///
    /// # Errors
    /// As [`Cluster::obtain`].
    pub fn private(options: &Options, progress: &dyn Fn(&str)) -> Result<Cluster, Failure> {
        let place = Place::private(&home(options)?);
        Cluster::at(&place, options, true, false, progress)
    }

    /// As [`Cluster::obtain`], and what it brings up stays up until [`release`].
    pub fn keep(options: &Options, progress: &dyn Fn(&str)) -> Result<Cluster, Failure> {
        let place = Place::shared(&home(options)?);
        Cluster::at(&place, options, false, true, progress)
    }

    /// As [`Cluster::keep`], without the environment.
    pub fn pin(options: &Options, progress: &dyn Fn(&str)) -> Result<Cluster, Failure> {
        Cluster::keep(&Options { use_given: false, ..options.clone() }, progress)
    }

    fn at(
        place: &Place,
        options: &Options,
        private: bool,
        pin: bool,
        progress: &dyn Fn(&str),
    ) -> Result<Cluster, Failure> {
        let mut cluster = Cluster {
            brokers: String::new(),
            database_url: String::new(),
            description: Vec::new(),
            private,
            given: Vec::new(),
            connection: None,
        };
        if options.brokers.is_some() && options.use_given && given::address(Server::Kafka).is_some() {
            return Err(Failure::refused(
                "KAFKA_BROKERS names a Kafka that has its own number of brokers: unset it to have so many brought up",
            ));
        }
        let mut own = Vec::new();
        for &server in &options.servers {
            match given::address(server).filter(|_| options.use_given) {
                Some(address) => {
                    given::check(server, &address)?;
                    cluster.description.push(format!("{}: given by {}", server.name(), server.variable()));
                    cluster.given.push(server);
                    cluster.set_address(server, address);
                }
                None => own.push(server),
            }
        }
        if own.is_empty() {
            return Ok(cluster);
        }
        let supervise = Supervise {
            directory: place.directory.clone(),
            grace: if private { Duration::ZERO } else { options.grace },
            private,
            broker_settings: options.broker_settings.clone(),
            brokers: options.brokers.unwrap_or(1),
        };
        let launch = client::Launch { executable: executable(options)?, arguments: supervise.arguments() };
        let (lines, status) = client::hold(place, &launch, &own, pin, progress)?;
        if let Some(wanted) = options.brokers.filter(|wanted| *wanted != status.brokers) {
            return Err(Failure::refused(format!(
                "the development cluster is up with {} broker(s), not {wanted}: stop it first with: semel dev down",
                status.brokers
            )));
        }
        for (server, up) in [(Server::Kafka, status.kafka), (Server::Postgres, Vec::from_iter(status.postgres))] {
            if own.contains(&server) {
                let addresses: Vec<_> = up.iter().map(|server| server.address.clone()).collect();
                cluster.set_address(server, addresses.join(","));
                cluster.description.extend(up.into_iter().map(|server| server.description));
            }
        }
        cluster.connection = Some(Mutex::new(lines));
        Ok(cluster)
    }

    fn set_address(&mut self, server: Server, address: String) {
        match server {
            Server::Kafka => self.brokers = address,
            Server::Postgres => self.database_url = address,
        }
    }

    /// Stops the broker, or all of them, in order (SIGTERM) and starts it again on the same port and data. Blocks until
    /// it answers.
    ///
    /// # Errors
    /// This and the following are refused unless the cluster is private and the server its own.
    pub fn restart_kafka(&self) -> Result<(), Failure> {
        self.control(Server::Kafka, None, Action::Restart)
    }

    /// Stops the broker in order. Blocks until its process is gone.
    pub fn stop_kafka(&self) -> Result<(), Failure> {
        self.control(Server::Kafka, None, Action::Stop)
    }

    /// Kills the broker (SIGKILL).
    pub fn kill_kafka(&self) -> Result<(), Failure> {
        self.control(Server::Kafka, None, Action::Kill)
    }

    /// Starts a stopped or killed broker on the same port and data. Blocks until it answers.
    pub fn start_kafka(&self) -> Result<(), Failure> {
        self.control(Server::Kafka, None, Action::Start)
    }

    /// Stops one of several brokers in order; they count from 1.
    pub fn stop_broker(&self, broker: usize) -> Result<(), Failure> {
        self.control(Server::Kafka, Some(broker), Action::Stop)
    }

    /// Kills one of several brokers.
    pub fn kill_broker(&self, broker: usize) -> Result<(), Failure> {
        self.control(Server::Kafka, Some(broker), Action::Kill)
    }

    /// Starts one of several brokers again. Blocks until it answers.
    pub fn start_broker(&self, broker: usize) -> Result<(), Failure> {
        self.control(Server::Kafka, Some(broker), Action::Start)
    }

    /// Stops Postgres by its fast shutdown and starts it again on the same port and data. Blocks until it answers.
    pub fn restart_postgres(&self) -> Result<(), Failure> {
        self.control(Server::Postgres, None, Action::Restart)
    }

    /// Stops Postgres by its fast shutdown. Blocks until its process is gone.
    pub fn stop_postgres(&self) -> Result<(), Failure> {
        self.control(Server::Postgres, None, Action::Stop)
    }

    /// Kills Postgres (SIGKILL), its sessions included.
    pub fn kill_postgres(&self) -> Result<(), Failure> {
        self.control(Server::Postgres, None, Action::Kill)
    }

    /// Starts a stopped or killed Postgres on the same port and data. Blocks until it answers.
    pub fn start_postgres(&self) -> Result<(), Failure> {
        self.control(Server::Postgres, None, Action::Start)
    }

    /// The servers that the environment gave: what is left on them stays.
    pub fn given(&self) -> &[Server] {
        &self.given
    }

    /// What the supervisor keeps now, with process ids; `None` when both servers were given.
    pub fn status(&self) -> Result<Option<Status>, Failure> {
        match self.ask(&Request::Status)? {
            Some(Reply::Status(status)) => Ok(Some(status)),
            _ => Ok(None),
        }
    }

    fn control(&self, server: Server, broker: Option<usize>, action: Action) -> Result<(), Failure> {
        if self.given.contains(&server) {
            let variable = server.variable();
            return Err(Failure::refused(format!("the server that {variable} names is not ours to stop or start")));
        }
        if !self.private {
            return Err(Failure::refused("others use the shared development cluster: take a private one"));
        }
        self.ask(&Request::Control { server, broker, action })?;
        Ok(())
    }

    fn ask(&self, request: &Request) -> Result<Option<Reply>, Failure> {
        let Some(connection) = &self.connection else { return Ok(None) };
        let mut lines = connection.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let reply = client::converse(&mut lines, request, &|_| {})?;
        reply.map(Some).ok_or_else(|| Failure::unreachable("the development cluster's supervisor is gone"))
    }
}

/// What is up of the shared cluster, without holding it.
pub fn status(options: &Options) -> Result<Option<Status>, Failure> {
    client::status(&Place::shared(&home(options)?))
}

/// Undoes [`Cluster::pin`]: the shared cluster stops now if nobody uses it or `force` is set, else after its last user.
/// Blocks until it is gone.
pub fn release(options: &Options, force: bool) -> Result<Released, Failure> {
    client::release(&Place::shared(&home(options)?), force)
}

fn home(options: &Options) -> Result<PathBuf, Failure> {
    match &options.home {
        Some(home) => place::make_private(home).map(|()| home.clone()),
        None => place::home(),
    }
}

fn executable(options: &Options) -> Result<PathBuf, Failure> {
    match &options.executable {
        Some(path) => Ok(path.clone()),
        None => std::env::current_exe()
            .map_err(|error| Failure::refused(format!("cannot find this program's own file: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_cluster_takes_no_settings_of_one_user() {
        let settings = vec![("log.retention.ms".to_owned(), "1".to_owned())];
        let failure =
            Cluster::obtain(&Options { broker_settings: settings, ..Options::default() }, &|_| {}).unwrap_err();
        assert!(failure.message.contains("private cluster"), "{failure}");
    }
}
