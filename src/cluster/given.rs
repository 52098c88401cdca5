//! Servers that the environment names: used as they are, after a look whether anybody answers.

use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::Server;
use crate::error::Failure;

/// What the server's variable holds; an empty one counts as unset.
pub(super) fn address(server: Server) -> Option<String> {
    std::env::var(server.variable()).ok().filter(|address| !address.trim().is_empty())
}

/// A given server takes connections.
pub(super) fn check(server: Server, address: &str) -> Result<(), Failure> {
    match server {
        Server::Kafka => check_brokers(address),
        Server::Postgres => check_database(address),
    }
}

/// One of the given brokers takes connections.
fn check_brokers(brokers: &str) -> Result<(), Failure> {
    let answers = |address: &str| connects(address.rsplit_once("://").map_or(address, |(_, a)| a).trim());
    if brokers.split(',').any(answers) {
        return Ok(());
    }
    Err(Failure::unreachable(format!(
        "no broker answers at {brokers} (KAFKA_BROKERS): start it, or unset the variable to have one brought up"
    )))
}

/// One of the given database's hosts takes connections. The URL may hold a password: it is not printed.
fn check_database(url: &str) -> Result<(), Failure> {
    use tokio_postgres::config::Host;
    let config: tokio_postgres::Config =
        url.parse().map_err(|error| Failure::refused(format!("DATABASE_URL is not a Postgres URL: {error}")))?;
    let ports = config.get_ports();
    let mut tried = Vec::new();
    for (n, host) in config.get_hosts().iter().enumerate() {
        let port = ports.get(n).or(ports.first()).copied().unwrap_or(5432);
        let (answers, name) = match host {
            Host::Tcp(host) => (connects(&format!("{host}:{port}")), format!("{host}:{port}")),
            Host::Unix(directory) => {
                let socket = directory.join(format!(".s.PGSQL.{port}"));
                (std::os::unix::net::UnixStream::connect(&socket).is_ok(), socket.display().to_string())
            }
        };
        if answers {
            return Ok(());
        }
        tried.push(name);
    }
    if tried.is_empty() {
        return Err(Failure::refused("DATABASE_URL names no host"));
    }
    Err(Failure::unreachable(format!(
        "no database answers at {} (DATABASE_URL): start it, or unset the variable to have one brought up",
        tried.join(", ")
    )))
}

fn connects(address: &str) -> bool {
    let patience = Duration::from_secs(3);
    address
        .to_socket_addrs()
        .is_ok_and(|mut addresses| addresses.any(|a| TcpStream::connect_timeout(&a, patience).is_ok()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Exit;

    #[test]
    fn a_given_server_that_does_not_answer_is_named_without_its_password() {
        let failure = check(Server::Kafka, "PLAINTEXT://127.0.0.1:1, 127.0.0.1:2").unwrap_err();
        assert_eq!(failure.exit, Exit::Unreachable);
        assert!(failure.message.contains("127.0.0.1:2 (KAFKA_BROKERS)"), "{failure}");

        let failure = check(Server::Postgres, "postgres://me:secret@127.0.0.1:1/db").unwrap_err();
        assert_eq!(failure.exit, Exit::Unreachable);
        assert!(failure.message.contains("127.0.0.1:1 (DATABASE_URL)"), "{failure}");
        assert!(!failure.message.contains("secret"), "{failure}");

        let failure = check(Server::Postgres, "mysql://localhost").unwrap_err();
        assert_eq!(failure.exit, Exit::Refused);
    }

    #[test]
    fn a_given_server_that_takes_connections_is_used() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(check(Server::Kafka, &format!("127.0.0.1:1,127.0.0.1:{port}")), Ok(()));
        assert_eq!(check(Server::Postgres, &format!("postgres://me@127.0.0.1:{port}/db")), Ok(()));
    }
}
