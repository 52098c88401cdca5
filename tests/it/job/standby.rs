//! A second PostgreSQL server that follows a private cluster's by streaming replication, asynchronously.

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use semel::cluster::{Cluster, Server};
use semel::sink::postgres::Address;

use super::harness::{PATIENCE, sql};
use crate::support;

/// A PostgreSQL of the test's own. `None`, and said on stderr: it runs in a container, where its folder is out of reach.
pub fn primary(test: &str) -> Option<Cluster> {
    if !support::online(test) {
        return None;
    }
    let cluster = support::private_server(Server::Postgres, &[]);
    let local = pid(&cluster).is_some();
    if !local {
        eprintln!("LEFT OUT (PostgreSQL runs in a container): {test}");
    }
    local.then_some(cluster)
}

fn pid(cluster: &Cluster) -> Option<u32> {
    cluster.status().unwrap()?.postgres?.pid
}

/// The data folder of a private cluster's server, which must be up.
pub fn data_folder(cluster: &Cluster) -> PathBuf {
    sql(&cluster.database_url, "SHOW data_directory")[0][0].clone().unwrap().into()
}

/// Copies a data folder, whose server must be stopped.
pub fn copy_folder(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(copied.success(), "cp: {copied}");
}

/// Tells a server that is stopped to come up as a standby.
pub fn make_standby(data: &Path) {
    let (signal, owner) = (data.join("standby.signal"), fs::metadata(data).unwrap());
    fs::write(&signal, "").unwrap();
    std::os::unix::fs::chown(&signal, Some(owner.uid()), Some(owner.gid())).unwrap();
}

/// A hot standby. Ended when dropped; its data lie beside the primary's.
pub struct Standby {
    pub url: String,
    primary_url: String,
    server: Child,
}

impl Standby {
    /// Copies the primary, which is stopped for it, and follows it. Blocks until both answer.
    pub fn of(cluster: &Cluster) -> Standby {
        let data = data_folder(cluster);
        let program = fs::read_link(format!("/proc/{}/exe", pid(cluster).unwrap())).unwrap();
        let folder = data.with_file_name("standby");
        cluster.stop_postgres().unwrap();
        copy_folder(&data, &folder);
        make_standby(&folder);
        let settings = fs::OpenOptions::new().append(true).open(folder.join("postgresql.auto.conf"));
        writeln!(settings.unwrap(), "primary_conninfo = '{}'", cluster.database_url).unwrap();
        cluster.start_postgres().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let owner = fs::metadata(&data).unwrap();
        let mut command = Command::new(program);
        command.current_dir(&folder).stdin(Stdio::null());
        if nix::unistd::geteuid().is_root() {
            command.uid(owner.uid()).gid(owner.gid());
        }
        command.arg("-D").arg(&folder).arg("-k").arg(data.parent().unwrap()).args(["-p", &port.to_string()]);
        for setting in ["listen_addresses=127.0.0.1", "max_connections=200", "timezone=UTC", "log_timezone=UTC"] {
            command.args(["-c", setting]);
        }
        let log = fs::File::create(data.with_file_name("standby.log")).unwrap();
        let server = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let url = cluster.database_url.replace(&format!(":{}/", port_of(&cluster.database_url)), &format!(":{port}/"));
        let standby = Standby { url, primary_url: cluster.database_url.clone(), server };
        support::eventually(PATIENCE, "the standby answers", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok() && answers(&standby.url)
        });
        standby
    }

    /// An address that names both servers; whichever takes writes is meant.
    pub fn both(&self) -> String {
        let (primary, here) = (port_of(&self.primary_url), port_of(&self.url));
        let hosts = format!("127.0.0.1:{primary},127.0.0.1:{here}/");
        self.primary_url.replace(&format!("127.0.0.1:{primary}/"), &hosts) + "?target_session_attrs=read-write"
    }

    /// Blocks until the standby has everything that is committed at the primary now.
    pub fn catch_up(&self) {
        let at = sql(&self.primary_url, "SELECT pg_current_wal_insert_lsn()")[0][0].clone().unwrap();
        let there = format!("SELECT pg_last_wal_replay_lsn() >= '{at}'");
        support::eventually(PATIENCE, "the standby has caught up", || {
            sql(&self.url, &there)[0][0].as_deref() == Some("t")
        });
    }

    /// Receives nothing more from the primary.
    pub fn detach(&self) {
        sql(&self.url, "ALTER SYSTEM SET primary_conninfo = ''");
        sql(&self.url, "SELECT pg_reload_conf()");
        support::eventually(PATIENCE, "the standby is detached", || {
            sql(&self.url, "SELECT 1 FROM pg_stat_wal_receiver").is_empty()
        });
    }

    /// Becomes a primary. Blocks until it takes writes.
    pub fn promote(&self) {
        sql(&self.url, "SELECT pg_promote(true, 60)");
        support::eventually(PATIENCE, "the standby takes writes", || {
            sql(&self.url, "SELECT pg_is_in_recovery()")[0][0].as_deref() == Some("f")
        });
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.server.id() as i32), Signal::SIGQUIT);
        let _ = self.server.wait();
    }
}

fn port_of(url: &str) -> u16 {
    Address::parse(url, "x").unwrap().config.get_ports()[0]
}

fn answers(url: &str) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(tokio_postgres::connect(url, tokio_postgres::NoTls)).is_ok()
}
