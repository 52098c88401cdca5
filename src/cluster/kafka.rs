//! Apache Kafka as one KRaft node: in a container, else as a JVM of this machine from Maven artifacts.

use std::fmt::Write as _;
use std::fs::{self, DirBuilder};
use std::io::{self, Read, Write as _};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::keeper::{Backend, Setup};
use super::maven::Bundle;
use super::process::{self, Process};
use super::{Missing, containers, maven, place};
use crate::error::Failure;

pub(super) const VERSION: &str = "4.2.0";
const TITLE: &str = "Apache Kafka 4.2.0";
/// Brokers of this version need it.
const OLDEST_JAVA: u32 = 17;

/// What one node needs to work alone, and what keeps tests quick: few partitions of internal topics, no wait for more
/// group members, transactions that timed out are aborted within a second, and a killed broker is let in again as soon
/// as its former session has ended (9 s by default).
pub(super) const SETTINGS: &[(&str, &str)] = &[
    ("offsets.topic.num.partitions", "4"),
    ("offsets.topic.replication.factor", "1"),
    ("transaction.state.log.num.partitions", "4"),
    ("transaction.state.log.replication.factor", "1"),
    ("transaction.state.log.min.isr", "1"),
    ("transaction.abort.timed.out.transaction.cleanup.interval.ms", "1000"),
    ("share.coordinator.state.topic.num.partitions", "4"),
    ("share.coordinator.state.topic.replication.factor", "1"),
    ("share.coordinator.state.topic.min.isr", "1"),
    ("group.initial.rebalance.delay.ms", "0"),
    ("broker.heartbeat.interval.ms", "1000"),
    ("broker.session.timeout.ms", "5000"),
    ("auto.create.topics.enable", "false"),
];

/// A container where an engine answers, else local processes. Fails with what to install.
pub(super) fn backend(setup: &Setup, progress: &dyn Fn(&str)) -> Result<Box<dyn Backend>, Failure> {
    if let Some(container) = containers::kafka(setup, progress) {
        return Ok(container);
    }
    let bundle = bundle();
    let java = java();
    let mut missing = Missing::default();
    if java.is_none() {
        missing.needs("Java 17 or newer", ["default-jre-headless", "java-21-openjdk-headless", "openjdk"]);
    }
    if bundle.cached().is_none() && !maven::is_installed() {
        missing.needs("Apache Maven (mvn, which fetches Kafka once)", ["maven"; 3]);
    }
    let Some(java) = java.filter(|_| missing.is_empty()) else {
        return Err(missing.failure(TITLE, "KAFKA_BROKERS"));
    };
    let libraries = bundle.fetch(&setup.directory.join("mvn-kafka.log"), progress)?.join("files");
    let local = LocalKafka {
        java,
        libraries,
        directory: setup.directory.clone(),
        data: setup.data.join("kafka"),
        settings: setup.broker_settings.clone(),
        ports: ports()?,
        formatted: false,
        process: None,
    };
    Ok(Box::new(local))
}

fn bundle() -> Bundle {
    Bundle {
        name: format!("kafka-{VERSION}"),
        title: TITLE,
        artifacts: vec![
            ("org.apache.kafka", "kafka_2.13", VERSION),
            ("org.apache.kafka", "kafka-tools", VERSION),
            ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.3"),
        ],
        unpack: false,
    }
}

/// Java that is new enough: under JAVA_HOME, else on the PATH.
fn java() -> Option<PathBuf> {
    let home = std::env::var_os("JAVA_HOME").map(|home| PathBuf::from(home).join("bin/java"));
    let found = [home.filter(|j| j.is_file()), maven::on_path("java")];
    found.into_iter().flatten().find(|java| {
        let output = Command::new(java).arg("-version").output();
        output.is_ok_and(|o| java_version(&String::from_utf8_lossy(&o.stderr)).is_some_and(|v| v >= OLDEST_JAVA))
    })
}

/// The feature release in what `java -version` says: `openjdk version "17.0.15" …`; old ones say `"1.8.0_392"`.
fn java_version(text: &str) -> Option<u32> {
    let quoted = text.split('"').nth(1)?;
    let mut numbers = quoted.split(|c: char| !c.is_ascii_digit());
    match numbers.next()?.parse().ok()? {
        1 => numbers.next()?.parse().ok(),
        feature => Some(feature),
    }
}

fn ports() -> Result<(u16, u16), Failure> {
    let port = || place::free_port().map_err(|error| Failure::unreachable(error.to_string()));
    Ok((port()?, port()?))
}

#[derive(Debug)]
struct LocalKafka {
    java: PathBuf,
    libraries: PathBuf,
    directory: PathBuf,
    data: PathBuf,
    settings: Vec<(String, String)>,
    /// Of the broker's and of the controller's listener.
    ports: (u16, u16),
    formatted: bool,
    process: Option<Process>,
}

impl LocalKafka {
    fn log(&self) -> PathBuf {
        self.directory.join("kafka.log")
    }

    fn properties(&self) -> PathBuf {
        self.directory.join("server.properties")
    }

    /// A JVM with Kafka on its class path.
    fn jvm(&self, options: &[&str]) -> Command {
        let mut command = Command::new(&self.java);
        command.args(options).args(["-XX:-UsePerfData", "-Djava.awt.headless=true"]);
        command.arg(format!("-Dlog4j2.configurationFile={}", self.directory.join("log4j2.properties").display()));
        command.arg("-cp").arg(self.libraries.join("*")).current_dir(&self.directory);
        command
    }

    fn format(&mut self) -> Result<(), Failure> {
        let in_place = |error: io::Error| {
            Failure::refused(format!("cannot write Kafka's files under {}: {error}", self.directory.display()))
        };
        DirBuilder::new().recursive(true).mode(0o700).create(&self.data).map_err(in_place)?;
        fs::write(self.properties(), properties(self.ports, &self.data, &self.settings)).map_err(in_place)?;
        fs::write(self.directory.join("log4j2.properties"), LOG4J).map_err(in_place)?;
        let mut command = self.jvm(&["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]);
        command.args(["kafka.tools.StorageTool", "format", "--cluster-id", &cluster_id(), "--config"]);
        command.arg(self.properties());
        process::run(command, "formatting Kafka's storage", &self.directory.join("kafka-format.log"))?;
        self.formatted = true;
        Ok(())
    }

    fn launch(&mut self) -> Result<(), Failure> {
        let mut command = self.jvm(&["-Xms256m", "-Xmx768m"]);
        command.arg("kafka.Kafka").arg(self.properties());
        let mut process = Process::spawn(command, &self.log(), Signal::SIGKILL)
            .map_err(|error| Failure::unreachable(format!("{} cannot be run: {error}", self.java.display())))?;
        let address = self.address();
        process.wait_ready(TITLE, Duration::from_secs(90), || answers(&address))?;
        self.process = Some(process);
        Ok(())
    }
}

impl Backend for LocalKafka {
    fn description(&self) -> String {
        format!("{TITLE} (local JVM)")
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.ports.0)
    }

    fn start(&mut self) -> Result<(), Failure> {
        if self.formatted {
            return self.launch();
        }
        self.format()?;
        let result = self.launch();
        if result.as_ref().is_err_and(|failure| failure.message.contains("Address already in use")) {
            // Somebody took a port between our look and the start. Only before the first success: later the address
            // is known to users.
            self.ports = ports()?;
            let _ = fs::remove_dir_all(&self.data);
            self.format()?;
            return self.launch();
        }
        self.formatted = result.is_ok();
        result
    }

    fn stop(&mut self, hard: bool) {
        if let Some(mut process) = self.process.take() {
            process.stop(if hard { Signal::SIGKILL } else { Signal::SIGTERM }, Duration::from_secs(20));
        }
    }

    fn is_alive(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::is_alive)
    }

    fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }
}

/// The broker answers an ApiVersions request, which it does once it is no longer fenced.
pub(super) fn answers(address: &str) -> bool {
    api_versions(address).unwrap_or(false)
}

fn api_versions(address: &str) -> io::Result<bool> {
    let address = address.to_socket_addrs()?.next().ok_or(io::ErrorKind::AddrNotAvailable)?;
    let patience = Duration::from_secs(2);
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    // Length 10; key 18, version 0; correlation id 7; no client id.
    stream.write_all(&[0, 0, 0, 10, 0, 18, 0, 0, 0, 0, 0, 7, 0xff, 0xff])?;
    // Length; correlation id; error code.
    let mut answer = [0; 10];
    stream.read_exact(&mut answer)?;
    Ok(answer[4..] == [0, 0, 0, 7, 0, 0])
}

/// Any 16 bytes in URL-safe base64; the last character carries two bits only.
fn cluster_id() -> String {
    format!("semel{}{}A", place::random_name(), place::random_name())
}

fn properties(ports: (u16, u16), data: &Path, extra: &[(String, String)]) -> String {
    let (broker, controller) = ports;
    let mut text = format!(
        "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:{controller}\n\
         listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}\n\
         advertised.listeners=PLAINTEXT://127.0.0.1:{broker}\ncontroller.listener.names=CONTROLLER\n\
         listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT\nlog.dirs={}\n",
        data.display()
    );
    let own = SETTINGS.iter().map(|(key, value)| (*key, *value));
    for (key, value) in own.chain(extra.iter().map(|(key, value)| (key.as_str(), value.as_str()))) {
        let _ = writeln!(text, "{key}={value}");
    }
    text
}

const LOG4J: &str = "\
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=[%d] %p %m (%c{1})%n
rootLogger.level=INFO
rootLogger.appenderRef.out.ref=out
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn java_tells_its_feature_release_in_two_ways() {
        assert_eq!(java_version("openjdk version \"17.0.15\" 2025-04-15\nOpenJDK Runtime"), Some(17));
        assert_eq!(java_version("openjdk version \"21\" 2023-09-19"), Some(21));
        assert_eq!(java_version("java version \"1.8.0_392\""), Some(8));
        assert_eq!(java_version("java version \"25-ea\""), Some(25));
        assert_eq!(java_version("Unable to locate a Java Runtime."), None);
    }

    #[test]
    fn settings_of_the_caller_come_last_so_that_they_win() {
        let extra = [("auto.create.topics.enable".to_owned(), "true".to_owned())];
        let text = properties((1, 2), Path::new("/data"), &extra);
        assert!(text.contains("listeners=PLAINTEXT://127.0.0.1:1,CONTROLLER://127.0.0.1:2\n"));
        assert!(text.ends_with("auto.create.topics.enable=false\nauto.create.topics.enable=true\n"));
    }

    #[test]
    fn a_cluster_id_has_the_length_that_kafka_decodes_to_sixteen_bytes() {
        let id = cluster_id();
        assert_eq!(id.len(), 22, "{id}");
    }
}
