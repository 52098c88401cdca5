//! The development cluster: it answers, it is shared, and nothing outlives its users.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::consumer::{BaseConsumer, Consumer};
use semel::cluster::{Cluster, Options, Server, ServerStatus, Status};
use semel::error::Exit;
use tokio_postgres::{NoTls, SimpleQueryMessage};

use crate::support::{self, SEMEL, eventually, unique};

const SOON: Duration = Duration::from_secs(20);
/// Makes [`a_killed_user_leaves_nothing_behind`] the user that is killed.
const HOLD: &str = "SEMEL_TEST_HOLD";

#[test]
fn broker_and_database_answer() {
    let Some(cluster) = support::broker("broker_and_database_answer") else { return };
    assert_eq!(query(cluster, "SELECT 1"), ["1"]);
    let topic = unique("cluster");
    make_topic(cluster, &topic, 3);
    assert_eq!(partitions(cluster, &topic), Some(3));
    assert_eq!(cluster.description.len(), 2, "{:?}", cluster.description);
}

#[test]
fn processes_that_start_at_once_share_one_cluster_which_stops_after_the_last() {
    if !support::online("processes_that_start_at_once_share_one_cluster_which_stops_after_the_last") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let options = at(home.path(), &[Server::Kafka, Server::Postgres]);
    let barrier = Barrier::new(2);
    let obtain = || {
        barrier.wait();
        Cluster::obtain(&options, &|_| {}).unwrap()
    };
    let (one, two) = std::thread::scope(|scope| {
        let (one, two) = (scope.spawn(obtain), scope.spawn(obtain));
        (one.join().unwrap(), two.join().unwrap())
    });
    assert_eq!((&one.brokers, &one.database_url), (&two.brokers, &two.database_url));
    let status = status(&one);
    assert_eq!((status.users, status.pinned), (2, false));
    drop(one);
    assert_eq!(query(&two, "SELECT 1"), ["1"], "stopped under its last user");
    let data = data(&status);
    drop(two);
    eventually(SOON, "all processes are gone", || !is_running(status.pid) && !servers_run(&status));
    assert!(!data.exists(), "{} is left", data.display());
}

#[test]
fn a_killed_user_leaves_nothing_behind() {
    if let Some(home) = std::env::var_os(HOLD) {
        let _cluster = Cluster::obtain(&at(Path::new(&home), &[Server::Postgres]), &|_| {}).unwrap();
        loop {
            std::thread::park();
        }
    }
    if !support::online("a_killed_user_leaves_nothing_behind") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let options = at(home.path(), &[Server::Postgres]);
    let mut user = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cluster::a_killed_user_leaves_nothing_behind"])
        .env(HOLD, home.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut seen = None;
    eventually(Duration::from_secs(60), "the user's Postgres is up", || {
        seen = semel::cluster::status(&options).unwrap().filter(|s| s.postgres.as_ref().is_some_and(|p| p.up));
        seen.is_some()
    });
    let status = seen.unwrap();
    assert_eq!(status.users, 1);
    user.kill().unwrap();
    user.wait().unwrap();
    eventually(SOON, "all processes are gone", || !is_running(status.pid) && !servers_run(&status));
    assert_eq!(semel::cluster::status(&options).unwrap(), None);
}

#[test]
fn a_killed_supervisor_takes_its_servers_along_and_the_next_start_clears_up() {
    if !support::online("a_killed_supervisor_takes_its_servers_along_and_the_next_start_clears_up") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let options = at(home.path(), &[Server::Postgres]);
    let cluster = Cluster::obtain(&options, &|_| {}).unwrap();
    let first = status(&cluster);
    let left = data(&first);
    kill_hard(first.pid);
    eventually(SOON, "the servers have followed their supervisor", || !servers_run(&first));
    assert!(cluster.status().unwrap_err().message.contains("is gone"));

    let cluster = Cluster::obtain(&options, &|_| {}).unwrap();
    assert_ne!(status(&cluster).pid, first.pid);
    assert_eq!(query(&cluster, "SELECT 1"), ["1"]);
    assert!(!left.exists(), "{} is left", left.display());
}

#[test]
fn servers_of_a_private_cluster_come_back_with_the_same_address_and_data() {
    if !support::online("servers_of_a_private_cluster_come_back_with_the_same_address_and_data") {
        return;
    }
    let cluster = support::private_cluster(&[("num.partitions", "7")]);
    query(&cluster, "CREATE TABLE kept (n int); INSERT INTO kept VALUES (41)");
    make_topic(&cluster, "kept", -1);
    assert_eq!(partitions(&cluster, "kept"), Some(7), "the broker's extra setting");

    cluster.kill_postgres().unwrap();
    cluster.kill_kafka().unwrap();
    let down = status(&cluster);
    assert!(down.kafka.iter().all(|broker| !broker.up) && !down.postgres.unwrap().up);
    cluster.start_postgres().unwrap();
    cluster.start_kafka().unwrap();
    assert_eq!(query(&cluster, "UPDATE kept SET n = n + 1 RETURNING n"), ["42"]);
    assert_eq!(partitions(&cluster, "kept"), Some(7));

    let before = status(&cluster);
    cluster.restart_postgres().unwrap();
    cluster.restart_kafka().unwrap();
    assert_ne!(pids(&before), pids(&status(&cluster)));
    assert_eq!(query(&cluster, "SELECT n FROM kept"), ["42"]);
    assert_eq!(partitions(&cluster, "kept"), Some(7));

    let status = status(&cluster);
    drop(cluster);
    eventually(SOON, "all processes are gone", || !is_running(status.pid) && !servers_run(&status));
    assert!(!status.directory.exists(), "{} is left", status.directory.display());
}

#[test]
fn the_shared_cluster_cannot_be_stopped_under_its_users() {
    let Some(cluster) = support::broker("the_shared_cluster_cannot_be_stopped_under_its_users") else { return };
    assert_eq!(cluster.kill_kafka().unwrap_err().exit, Exit::Refused);
    assert_eq!(cluster.restart_postgres().unwrap_err().exit, Exit::Refused);
}

#[test]
fn another_number_of_brokers_than_there_are_is_refused() {
    if !support::online("another_number_of_brokers_than_there_are_is_refused") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let options = at(home.path(), &[Server::Postgres]);
    let _one = Cluster::obtain(&options, &|_| {}).unwrap();
    let failure = Cluster::obtain(&Options { brokers: Some(3), ..options }, &|_| {}).unwrap_err();
    assert!(failure.message.contains("up with 1 broker(s), not 3"), "{failure}");

    let mut up = Command::new(SEMEL);
    let output = up.args(["dev", "up", "--brokers", "3"]).env("KAFKA_BROKERS", "localhost:9092").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(Exit::Refused as i32), "{stderr}");
    assert!(stderr.contains("KAFKA_BROKERS names a Kafka that has its own number of brokers"), "{stderr}");
}

#[test]
fn a_machine_without_java_and_maven_is_told_what_to_install() {
    let empty = tempfile::tempdir().unwrap();
    let output = Command::new(SEMEL)
        .args(["dev", "up"])
        .env("PATH", empty.path())
        .env("XDG_CACHE_HOME", empty.path())
        .env("XDG_RUNTIME_DIR", empty.path())
        .env("DOCKER_HOST", format!("unix://{}/none", empty.path().display()))
        .env_remove("JAVA_HOME")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(Exit::Refused as i32), "{stderr}");
    assert!(stderr.contains("Java 17 or newer; Apache Maven"), "{stderr}");
    assert!(stderr.contains("apt-get install default-jre-headless maven\n"), "{stderr}");
    assert!(stderr.contains("in KAFKA_BROKERS"), "{stderr}");
    assert!(output.stdout.is_empty());
}

/// A shared cluster under `home` that hardly outlives its users.
fn at(home: &Path, servers: &[Server]) -> Options {
    Options {
        home: Some(home.to_owned()),
        servers: servers.to_vec(),
        use_given: false,
        grace: Duration::from_millis(200),
        ..support::options()
    }
}

fn status(cluster: &Cluster) -> Status {
    cluster.status().unwrap().expect("a cluster of our own")
}

/// The directory that the cluster's data are in.
fn data(status: &Status) -> PathBuf {
    PathBuf::from(std::fs::read_to_string(status.directory.join("data")).unwrap())
}

fn servers(status: &Status) -> impl Iterator<Item = &ServerStatus> {
    status.kafka.iter().chain(&status.postgres)
}

fn pids(status: &Status) -> Vec<Option<u32>> {
    servers(status).map(|s| s.pid).collect()
}

fn servers_run(status: &Status) -> bool {
    servers(status).filter_map(|s| s.pid).any(is_running)
}

/// The process exists and is no zombie.
fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

fn kill_hard(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

/// The first column of what `sql` answers.
fn query(cluster: &Cluster, sql: &str) -> Vec<String> {
    let messages = block_on(async {
        let (client, connection) = tokio_postgres::connect(&cluster.database_url, NoTls).await.unwrap();
        tokio::spawn(connection);
        client.simple_query(sql).await.unwrap()
    });
    let row = |message: &SimpleQueryMessage| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    };
    messages.iter().filter_map(row).collect()
}

fn make_topic(cluster: &Cluster, topic: &str, partitions: i32) {
    let admin: AdminClient<_> = client(cluster).create().unwrap();
    let topic = NewTopic::new(topic, partitions, TopicReplication::Fixed(1));
    let results = block_on(admin.create_topics([&topic], &AdminOptions::new())).unwrap();
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

/// How many partitions the broker says a topic has.
fn partitions(cluster: &Cluster, topic: &str) -> Option<usize> {
    let consumer: BaseConsumer = client(cluster).set("allow.auto.create.topics", "false").create().unwrap();
    let mut count = None;
    eventually(SOON, "the broker tells the topic", || {
        let metadata = consumer.fetch_metadata(Some(topic), Duration::from_secs(5));
        count = metadata.ok().and_then(|m| m.topics().first().map(|t| t.partitions().len())).filter(|n| *n > 0);
        count.is_some()
    });
    count
}

fn client(cluster: &Cluster) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", &cluster.brokers);
    config
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap().block_on(future)
}
