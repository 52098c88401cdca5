//! `semel dev`: a local Kafka and Postgres to play with.

use std::path::PathBuf;
use std::time::Duration;

use crate::cluster::{self, Cluster, Options, Released, Server, ServerStatus, Status, Supervise};
use crate::error::{Exit, Failure};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Bring it up and leave it up; prints two `export` lines for the shell: eval "$(semel dev up)".
    Up {
        /// So many brokers on this machine, 1 to 5; of three, topics are kept by all. Refused where KAFKA_BROKERS is set.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=5))]
        brokers: Option<u8>,
        /// Print one JSON object instead.
        #[arg(long)]
        json: bool,
    },
    /// Stop it and throw its data away.
    Down {
        /// Also while other processes use it.
        #[arg(long)]
        force: bool,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Print what is up.
    Status {
        /// Print one JSON object instead.
        #[arg(long)]
        json: bool,
    },
    /// The process that owns the servers; started by the others.
    #[command(hide = true)]
    Supervise {
        directory: PathBuf,
        #[arg(long)]
        grace_ms: u64,
        #[arg(long)]
        brokers: usize,
        #[arg(long)]
        private: bool,
        #[arg(long, value_parser = setting)]
        broker_setting: Vec<(String, String)>,
    },
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected key=value")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Runs the command.
pub fn run(args: Args) -> Result<Exit, Failure> {
    match args.command {
        Command::Up { brokers, json } => up(brokers.map(usize::from), json),
        Command::Down { force, json } => down(force, json),
        Command::Status { json } => status(json),
        Command::Supervise { directory, grace_ms, brokers, private, broker_setting } => {
            cluster::supervise(&Supervise {
                directory,
                grace: Duration::from_millis(grace_ms),
                private,
                broker_settings: broker_setting,
                brokers,
            })
        }
    }
}

fn up(brokers: Option<usize>, json: bool) -> Result<Exit, Failure> {
    let variable = Server::Kafka.variable();
    if brokers.is_some() && std::env::var_os(variable).is_some() {
        return Err(Failure::refused(format!(
            "{variable} names a Kafka that has its own number of brokers: unset it, or leave out --brokers"
        )));
    }
    for server in [Server::Kafka, Server::Postgres] {
        if std::env::var_os(server.variable()).is_some() {
            eprintln!("{} is set, but `dev up` brings up its own", server.variable());
        }
    }
    let cluster = Cluster::pin(&Options { brokers, ..Options::default() }, &|text| eprintln!("{text}"))?;
    if json {
        let object = serde_json::json!({
            "brokers": cluster.brokers, "database_url": cluster.database_url, "description": cluster.description,
        });
        println!("{object}");
    } else {
        for line in &cluster.description {
            eprintln!("{line} is up");
        }
        eprintln!("stop it with: semel dev down");
        println!("export {}={}", Server::Kafka.variable(), cluster.brokers);
        println!("export {}={}", Server::Postgres.variable(), cluster.database_url);
    }
    Ok(Exit::Done)
}

fn down(force: bool, json: bool) -> Result<Exit, Failure> {
    let released = cluster::release(&Options::default(), force)?;
    let (state, users) = match released {
        Released::NotUp => ("not_up", 0),
        Released::Stopped => ("stopped", 0),
        Released::InUse(users) => ("in_use", users),
    };
    if json {
        println!("{}", serde_json::json!({ "state": state, "users": users }));
    } else {
        println!(
            "{}",
            match released {
                Released::NotUp => "the development cluster is not up".to_owned(),
                Released::Stopped => "the development cluster is stopped, its data are gone".to_owned(),
                Released::InUse(users) => format!("in use by {users}: stops after the last one (--force stops it now)"),
            }
        );
    }
    Ok(Exit::Done)
}

fn status(json: bool) -> Result<Exit, Failure> {
    let status = cluster::status(&Options::default())?;
    if json {
        println!("{}", serde_json::json!({ "up": status.is_some(), "cluster": status }));
        return Ok(Exit::Done);
    }
    let Some(status) = status else {
        println!("the development cluster is not up; bring it up with: semel dev up");
        return Ok(Exit::Done);
    };
    print_servers("Kafka", &status.kafka);
    print_servers("Postgres", status.postgres.as_slice());
    println!("{}", lifetime(&status));
    println!("logs: {}", status.directory.display());
    Ok(Exit::Done)
}

fn print_servers(name: &str, servers: &[ServerStatus]) {
    if servers.is_empty() {
        println!("{name}: not started");
    }
    for s in servers {
        let (state, pid) = (if s.up { "up" } else { "down" }, s.pid.map(|pid| format!(", process {pid}")));
        println!("{}: {state} at {}{}", s.description, s.address, pid.unwrap_or_default());
    }
}

fn lifetime(status: &Status) -> String {
    match (status.pinned, status.users) {
        (true, users) => format!("used by {users}, stays up until: semel dev down"),
        (false, 0) => "not in use, stops within seconds".to_owned(),
        (false, users) => format!("used by {users}, stops after the last one"),
    }
}
