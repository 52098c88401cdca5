//! What suites share: the cluster, names that nobody else uses, waiting.
#![allow(dead_code, reason = "a helper may be used by no suite of a given build")]

use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use semel::cluster::{Cluster, Options, Server};

/// The `semel` binary of this build.
pub const SEMEL: &str = env!("CARGO_BIN_EXE_semel");

/// Tests that need a server are to be left out.
pub fn offline() -> bool {
    std::env::var("SEMEL_TEST").is_ok_and(|value| value == "offline")
}

/// The cluster that the whole run shares. `None`: leave the test out. Begin with
/// `let Some(cluster) = support::broker("name of the test") else { return };`
///
/// # Panics
/// If it cannot be brought up, with what to install.
pub fn broker(test: &str) -> Option<&'static Cluster> {
    online(test).then(cluster)
}

/// False, and said on stderr, when the test that calls this is to be left out.
pub fn online(test: &str) -> bool {
    if offline() {
        // Not eprintln!: the test harness would swallow it.
        let _ = writeln!(std::io::stderr(), "LEFT OUT (SEMEL_TEST=offline): {test}");
    }
    !offline()
}

/// The cluster that the whole run shares.
///
/// # Panics
/// If it cannot be brought up, with what to install.
pub fn cluster() -> &'static Cluster {
    static CLUSTER: OnceLock<Result<Cluster, String>> = OnceLock::new();
    let cluster = CLUSTER.get_or_init(|| Cluster::obtain(&options(), &say).map_err(|failure| failure.message));
    match cluster {
        Ok(cluster) => cluster,
        Err(message) => panic!("no broker and database to test with (SEMEL_TEST=offline leaves these out):\n{message}"),
    }
}

/// A cluster of the test's own, with fresh data: servers may be stopped and killed.
///
/// # Panics
/// If it cannot be brought up, with what to install.
pub fn private_cluster(broker_settings: &[(&str, &str)]) -> Cluster {
    private(options().servers, broker_settings)
}

/// As [`private_cluster`], of one server.
pub fn private_server(server: Server, broker_settings: &[(&str, &str)]) -> Cluster {
    private(vec![server], broker_settings)
}

fn private(servers: Vec<Server>, broker_settings: &[(&str, &str)]) -> Cluster {
    let broker_settings = broker_settings.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
    let options = Options { use_given: false, servers, broker_settings, ..options() };
    Cluster::private(&options, &say).unwrap_or_else(|failure| panic!("no private cluster: {failure}"))
}

/// Options that name the binary of this build.
pub fn options() -> Options {
    Options { executable: Some(SEMEL.into()), ..Options::default() }
}

fn say(text: &str) {
    eprintln!("{text}");
}

/// Makes the tables in which stages keep positions beside their rows, if they are not there.
pub fn progress_tables(url: &str) {
    use semel::sink::postgres::{CREATE_LETTERS, CREATE_OFFSETS};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let tables =
            format!("{CREATE_OFFSETS}\n{CREATE_LETTERS}").replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS");
        // One at a time: tests run side by side, and IF NOT EXISTS does not keep two apart.
        let lock = "SELECT pg_advisory_xact_lock(7)";
        client
            .batch_execute(&format!("BEGIN; {lock}; CREATE SCHEMA IF NOT EXISTS semel; {tables} COMMIT"))
            .await
            .unwrap();
    });
}

/// A name that no other test and no other run uses: `prefix-` and lower-case letters and digits.
pub fn unique(prefix: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    format!("{prefix}-{now:x}x{:x}x{:x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Blocks until `predicate` holds.
///
/// # Panics
/// After `deadline`, naming `what` was waited for.
#[track_caller]
pub fn eventually(deadline: Duration, what: &str, predicate: impl FnMut() -> bool) {
    assert!(within(deadline, predicate), "not within {deadline:?}: {what}");
}

/// Lets time pass in which something does its work.
pub fn pass(time: Duration) {
    let until = Instant::now() + time;
    within(time, || Instant::now() >= until);
}

/// Blocks until `predicate` holds; false after `deadline`.
pub fn within(deadline: Duration, mut predicate: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + deadline;
    while !predicate() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// Held by a test that takes all of a small machine: two of them beside each other would miss their bounds.
pub fn one_heavy_test() -> std::sync::MutexGuard<'static, ()> {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
