//! What users of a cluster and its supervisor say to each other: one JSON value a line over a unix socket.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Server;
use crate::error::{Exit, Failure};

/// Part of the shared cluster's directory name, so that builds that speak differently do not meet. Raise it with any
/// change of these types.
pub(super) const VERSION: u32 = 2;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    /// Brings these servers up and keeps them up as long as the connection is open, or for good with `pin`.
    Hold { servers: Vec<Server>, pin: bool },
    /// Acts on a server of a held cluster; of the brokers on one of them, or on all.
    Control { server: Server, broker: Option<usize>, action: Action },
    /// Asks what is up.
    Status,
    /// Takes the pin away; with `force` stops even under users.
    Release { force: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Action {
    /// Does nothing to a server that runs.
    Start,
    /// Asks it to end.
    Stop,
    /// SIGKILL.
    Kill,
    /// Stop, then start on the same port and data.
    Restart,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    /// A short sentence for the user; more replies follow.
    Progress(String),
    /// The servers that were asked for answer, or the answer to `Status`.
    Status(Status),
    Done,
    Failed {
        refused: bool,
        message: String,
    },
    /// Whether the cluster stops now, and how many users it has.
    Released {
        stops: bool,
        users: usize,
    },
}

impl Reply {
    pub(super) fn failed(failure: &Failure) -> Reply {
        Reply::Failed { refused: failure.exit == Exit::Refused, message: failure.message.clone() }
    }

    pub(super) fn failure(refused: bool, message: String) -> Failure {
        Failure::new(if refused { Exit::Refused } else { Exit::Unreachable }, message)
    }
}

/// What a supervisor keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The supervisor's process id.
    pub pid: u32,
    /// Where the logs, the socket and the lock are.
    pub directory: PathBuf,
    /// Kept up by `semel dev up`, whether used or not.
    pub pinned: bool,
    /// Connections that hold it up now.
    pub users: usize,
    /// How many brokers it has when it is up.
    pub brokers: usize,
    /// Those that were started, in their order.
    pub kafka: Vec<ServerStatus>,
    pub postgres: Option<ServerStatus>,
}

/// A server that a supervisor brought up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Bootstrap servers, or a database URL.
    pub address: String,
    /// Product, version and how it runs: "Apache Kafka 4.2.0 (local JVM)".
    pub description: String,
    pub up: bool,
    /// `None` in a container.
    pub pid: Option<u32>,
}

/// A connection, from either end.
#[derive(Debug)]
pub(super) struct Lines {
    reader: BufReader<UnixStream>,
}

impl Lines {
    pub(super) fn new(stream: UnixStream) -> Lines {
        Lines { reader: BufReader::new(stream) }
    }

    pub(super) fn connect(socket: &Path) -> io::Result<Lines> {
        UnixStream::connect(socket).map(Lines::new)
    }

    pub(super) fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.reader.get_mut().write_all(&line)
    }

    /// Blocks for the next message; `None` when the other end has closed.
    pub(super) fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        Ok(Some(serde_json::from_str(&line)?))
    }
}
