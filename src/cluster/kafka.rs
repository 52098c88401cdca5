//! Apache Kafka as KRaft nodes that are broker and controller: one in a container, else JVMs of this machine from Maven
//! artifacts.

use std::collections::BTreeSet;
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

/// What keeps tests quick: few partitions of internal topics, no wait for more
/// group members, members of the new protocol (KIP-848) are forgotten as soon as those of the old may be, transactions
/// that timed out are aborted within a second, and a killed broker is let in again as soon as its former session has
/// ended (9 s by default).
pub(super) const SETTINGS: &[(&str, &str)] = &[
    ("offsets.topic.num.partitions", "4"),
    ("transaction.state.log.num.partitions", "4"),
    ("transaction.abort.timed.out.transaction.cleanup.interval.ms", "1000"),
    ("share.coordinator.state.topic.num.partitions", "4"),
    ("group.initial.rebalance.delay.ms", "0"),
    ("group.consumer.min.session.timeout.ms", "6000"),
    ("group.consumer.session.timeout.ms", "6000"),
    ("group.consumer.min.heartbeat.interval.ms", "1000"),
    ("group.consumer.heartbeat.interval.ms", "1000"),
    ("broker.heartbeat.interval.ms", "1000"),
    ("broker.session.timeout.ms", "5000"),
    ("auto.create.topics.enable", "false"),
    // By default it takes half of a small heap.
    ("log.cleaner.dedupe.buffer.size", "16777216"),
];

/// How often topics are kept: by three brokers at most, and by two of three before a write is acknowledged. Topics that
/// do not say otherwise as well as those of the cluster's own.
pub(super) fn replication(brokers: usize) -> Vec<(&'static str, String)> {
    let (factor, in_sync) = (brokers.min(3), if brokers < 3 { 1 } else { 2 });
    let factors = [
        "default.replication.factor",
        "offsets.topic.replication.factor",
        "transaction.state.log.replication.factor",
        "share.coordinator.state.topic.replication.factor",
    ];
    let in_syncs = ["min.insync.replicas", "transaction.state.log.min.isr", "share.coordinator.state.topic.min.isr"];
    let factors = factors.map(|name| (name, factor.to_string()));
    factors.into_iter().chain(in_syncs.map(|name| (name, in_sync.to_string()))).collect()
}

/// What the brokers of a cluster know of each other.
#[derive(Clone, Debug)]
pub(super) struct Nodes {
    id: String,
    /// Of each node: the port of its broker's and of its controller's listener. Node ids count from 1.
    ports: Vec<(u16, u16)>,
}

impl Nodes {
    pub(super) fn new(count: usize) -> Result<Nodes, Failure> {
        Ok(Nodes { id: cluster_id(), ports: ports(count)? })
    }

    pub(super) fn count(&self) -> usize {
        self.ports.len()
    }

    /// Of a node's log and its files.
    pub(super) fn name(&self, node: usize) -> String {
        if self.count() == 1 { "kafka".to_owned() } else { format!("kafka-{node}") }
    }
}

/// A container where an engine answers and one broker is enough, else local processes. `node` counts from 1. Fails with
/// what to install.
pub(super) fn backend(setup: &Setup, node: usize, progress: &dyn Fn(&str)) -> Result<Box<dyn Backend>, Failure> {
    if setup.nodes.count() == 1
        && let Some(container) = containers::kafka(setup, progress)
    {
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
    let name = setup.nodes.name(node);
    let libraries = bundle.fetch(&setup.directory.join(format!("mvn-{name}.log")), progress)?.join("files");
    let local = LocalKafka {
        java,
        libraries,
        directory: setup.directory.clone(),
        data: setup.data.join(&name),
        name,
        settings: setup.broker_settings.clone(),
        node,
        nodes: setup.nodes.clone(),
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

/// Two for each node, none of them twice.
fn ports(nodes: usize) -> Result<Vec<(u16, u16)>, Failure> {
    let mut taken = BTreeSet::new();
    while taken.len() < 2 * nodes {
        taken.insert(place::free_port().map_err(|error| Failure::unreachable(error.to_string()))?);
    }
    let taken: Vec<u16> = taken.into_iter().collect();
    Ok(taken.chunks(2).map(|pair| (pair[0], pair[1])).collect())
}

#[derive(Debug)]
struct LocalKafka {
    java: PathBuf,
    libraries: PathBuf,
    directory: PathBuf,
    data: PathBuf,
    name: String,
    settings: Vec<(String, String)>,
    node: usize,
    nodes: Nodes,
    formatted: bool,
    process: Option<Process>,
}

impl LocalKafka {
    fn log(&self) -> PathBuf {
        self.directory.join(format!("{}.log", self.name))
    }

    fn properties(&self) -> PathBuf {
        self.directory.join(format!("{}.properties", self.name))
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
        fs::write(self.properties(), properties(self.node, &self.nodes, &self.data, &self.settings))
            .map_err(in_place)?;
        fs::write(self.directory.join("log4j2.properties"), LOG4J).map_err(in_place)?;
        let mut command = self.jvm(&["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]);
        command.args(["kafka.tools.StorageTool", "format", "--cluster-id", &self.nodes.id, "--config"]);
        command.arg(self.properties());
        process::run(command, "formatting Kafka's storage", &self.directory.join(format!("{}-format.log", self.name)))?;
        self.formatted = true;
        Ok(())
    }

    fn launch(&mut self) -> Result<(), Failure> {
        // Several share the machine.
        let heap = if self.nodes.count() == 1 { ["-Xms256m", "-Xmx768m"] } else { ["-Xms128m", "-Xmx256m"] };
        let mut command = self.jvm(&heap);
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
        match self.nodes.count() {
            1 => format!("{TITLE} (local JVM)"),
            count => format!("{TITLE} (local JVM, broker {} of {count})", self.node),
        }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.nodes.ports[self.node - 1].0)
    }

    fn start(&mut self) -> Result<(), Failure> {
        if self.formatted {
            return self.launch();
        }
        self.format()?;
        let result = self.launch();
        let taken = result.as_ref().is_err_and(|failure| failure.message.contains("Address already in use"));
        if taken && self.nodes.count() == 1 {
            // Somebody took a port between our look and the start. Only before the first success: later the address
            // is known to users. Several nodes know each other's.
            self.nodes = Nodes::new(1)?;
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

fn properties(node: usize, nodes: &Nodes, data: &Path, extra: &[(String, String)]) -> String {
    let (broker, controller) = nodes.ports[node - 1];
    let voters = (1..).zip(&nodes.ports).map(|(node, (_, controller))| format!("{node}@127.0.0.1:{controller}"));
    let voters = voters.collect::<Vec<_>>().join(",");
    let mut text = format!(
        "process.roles=broker,controller\nnode.id={node}\ncontroller.quorum.voters={voters}\n\
         listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}\n\
         advertised.listeners=PLAINTEXT://127.0.0.1:{broker}\ncontroller.listener.names=CONTROLLER\n\
         listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT\nlog.dirs={}\n",
        data.display()
    );
    let replication = replication(nodes.count());
    let own = SETTINGS.iter().copied().chain(replication.iter().map(|(key, value)| (*key, value.as_str())));
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
        let nodes = Nodes { id: String::new(), ports: vec![(1, 2)] };
        let text = properties(1, &nodes, Path::new("/data"), &extra);
        assert!(text.contains("listeners=PLAINTEXT://127.0.0.1:1,CONTROLLER://127.0.0.1:2\n"));
        assert!(text.contains("auto.create.topics.enable=false\n"));
        assert!(text.ends_with("\nauto.create.topics.enable=true\n"));
    }

    #[test]
    fn nodes_know_each_other_and_keep_internal_topics_three_times() {
        let nodes = Nodes { id: String::new(), ports: vec![(1, 2), (3, 4), (5, 6)] };
        let text = properties(2, &nodes, Path::new("/data"), &[]);
        for line in [
            "node.id=2",
            "controller.quorum.voters=1@127.0.0.1:2,2@127.0.0.1:4,3@127.0.0.1:6",
            "listeners=PLAINTEXT://127.0.0.1:3,CONTROLLER://127.0.0.1:4",
            "offsets.topic.replication.factor=3",
            "transaction.state.log.replication.factor=3",
            "transaction.state.log.min.isr=2",
            "min.insync.replicas=2",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn a_cluster_id_has_the_length_that_kafka_decodes_to_sixteen_bytes() {
        let id = cluster_id();
        assert_eq!(id.len(), 22, "{id}");
    }
}
