//! A job under test: topics and a table of its own, a topology file, the processes that run it, and what came out.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use semel::chunk::{Chunk, TargetId};
use semel::cluster::Cluster;
use semel::kafka::{Admin, At, Connection, Isolation, LINGER, Producer, ProducerOptions, Reader};
use semel::record::{Input, TopicPartition};
use tempfile::TempDir;

use crate::support;

/// What the tests wait for at most; a broker that was killed takes its time.
pub const PATIENCE: Duration = Duration::from_secs(60);
const ASK: Duration = Duration::from_secs(20);

/// A job of its own on a cluster.
pub struct Job {
    pub name: String,
    pub brokers: String,
    pub database_url: String,
    pub admin: Admin,
    dir: TempDir,
}

/// A record as it lies in a topic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stored {
    pub partition: i32,
    pub offset: i64,
    pub timestamp: Option<i64>,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

impl Stored {
    /// The value as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(self.value.as_deref().expect("a value")).expect("UTF-8")
    }

    /// The last header of that name, as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        let header = self.headers.iter().rev().find(|(n, _)| n == name.as_bytes())?;
        std::str::from_utf8(header.1.as_deref()?).ok()
    }
}

/// A record to produce.
#[derive(Clone, Debug, Default)]
pub struct Record<'a> {
    pub partition: i32,
    pub timestamp: Option<i64>,
    pub key: Option<&'a [u8]>,
    pub value: Option<&'a [u8]>,
    pub headers: Vec<(&'a [u8], Option<&'a [u8]>)>,
}

impl Job {
    /// Topics `<name>.in` (of so many partitions) and `<name>.out` are the job's; only the first is made.
    pub fn new(cluster: &Cluster, prefix: &str, partitions: i32) -> Job {
        let name = support::unique(prefix);
        let connection = Connection::new(cluster.brokers.clone(), "semel-tests");
        let admin = Admin::new(&connection, ASK).unwrap();
        admin.create_topic(&format!("{name}.in"), partitions, -1, &BTreeMap::new()).unwrap();
        Job {
            name,
            brokers: cluster.brokers.clone(),
            database_url: cluster.database_url.clone(),
            admin,
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub fn topic(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.name)
    }

    /// The job's table: its name in SQL.
    pub fn table(&self) -> String {
        self.name.replace('-', "_")
    }

    /// Writes the topology file: `NAME` and `THE_TABLE` in the text become the job's.
    pub fn file(&self, text: &str) -> PathBuf {
        let path = self.path();
        let head = "[kafka]\nbrokers = \"${KAFKA_BROKERS}\"\n";
        let text = text.replace("THE_TABLE", &self.table()).replace("NAME", &self.name).replace("[kafka]\n", head);
        fs::write(&path, text).unwrap();
        path
    }

    /// Where the topology file lies.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("job.toml")
    }

    /// `semel ARGS`, with the job's cluster and state folder.
    pub fn semel(&self, args: &[&str]) -> Command {
        let mut command = Command::new(support::SEMEL);
        command.args(args).env("KAFKA_BROKERS", &self.brokers).env("DATABASE_URL", &self.database_url);
        command.env("XDG_STATE_HOME", self.dir.path().join("state")).env("NO_COLOR", "1");
        command
    }

    /// Runs the job to the end of its input; panics where it does not exit 0.
    pub fn drain(&self, file: &Path) -> serde_json::Value {
        let output = self.run_drain(file);
        assert!(
            output.status.success(),
            "semel run --drain: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub fn run_drain(&self, file: &Path) -> Output {
        let args = ["run", file.to_str().unwrap(), "--drain", "--quiet", "--json"];
        wait_with_output(self.semel(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Starts `semel run`; its log goes to a file that failing tests show.
    pub fn start(&self, file: &Path) -> Process {
        self.start_with(file, &[])
    }

    /// As [`start`](Job::start), with variables of the environment.
    pub fn start_with(&self, file: &Path, environment: &[(&str, &str)]) -> Process {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let log = self.dir.path().join(format!("run-{}.log", NEXT.fetch_add(1, Ordering::Relaxed)));
        let to = fs::File::create(&log).unwrap();
        let args = ["run", file.to_str().unwrap(), "--quiet"];
        let mut command = self.semel(&args);
        command.envs(environment.iter().copied()).stdout(Stdio::null()).stderr(to);
        Process { child: command.spawn().unwrap(), log }
    }

    /// Produces records and waits until all are acknowledged.
    pub fn produce<'a>(&self, suffix: &str, records: impl IntoIterator<Item = Record<'a>>) {
        let topic = self.topic(suffix);
        let mut producer = Feed::new(self, &topic);
        records.into_iter().for_each(|record| producer.push(&record));
        producer.flush();
    }

    /// Produces keys and values, each to its key's partition.
    pub fn produce_keyed(&self, suffix: &str, partitions: i32, records: impl Iterator<Item = (String, String)>) {
        let records: Vec<_> = records.collect();
        let records = records.iter().map(|(key, value)| Record {
            partition: semel::operator::partition(Some(key.as_bytes()), 0, partitions),
            key: Some(key.as_bytes()),
            value: Some(value.as_bytes()),
            ..Record::default()
        });
        self.produce(suffix, records);
    }

    /// All committed records of a topic, partition by partition.
    pub fn read(&self, suffix: &str) -> Vec<Stored> {
        read_committed(&self.brokers, &self.admin, &self.topic(suffix))
    }

    /// The positions of a group in a topic.
    pub fn positions(&self, group: &str, suffix: &str) -> Vec<Option<i64>> {
        let partitions = self.partitions(suffix);
        let committed = self.admin.committed(group, &partitions, true).unwrap();
        committed.into_iter().map(|(_, position)| position.unwrap().map(|p| p.0)).collect()
    }

    /// The sum of a group's positions in a topic; 0 while the broker does not answer.
    pub fn progress(&self, group: &str, suffix: &str) -> i64 {
        let Ok(Some(info)) = self.admin.topic(&self.topic(suffix)) else { return 0 };
        let partitions: Vec<_> = (0..info.partitions).map(|p| TopicPartition::new(self.topic(suffix), p)).collect();
        let positions = self.admin.committed(group, &partitions, false).unwrap_or_default();
        positions.into_iter().filter_map(|(_, position)| position.ok().flatten()).map(|p| p.0).sum()
    }

    /// Waits until a group has gone on in a topic by more than so many records.
    pub fn moves(&self, group: &str, suffix: &str, by: i64, what: &str) {
        let before = self.progress(group, suffix);
        support::eventually(PATIENCE, what, || self.progress(group, suffix) > before + by);
    }

    /// Starts the job so often, and kills it once its stage has gone on in a topic: somewhere in the cycle of a transaction,
    /// another place each round. `SEMEL_KILLS` says another number.
    pub fn kill_at_moments(&self, file: &Path, kills: u64, suffix: &str) {
        let kills = std::env::var("SEMEL_KILLS").map_or(kills, |n| n.parse().expect("SEMEL_KILLS is a number"));
        for _ in 0..kills {
            let (before, started) = (self.progress(&self.name, suffix), Instant::now());
            let process = self.start(file);
            let goes_on = || self.progress(&self.name, suffix) > before;
            support::eventually(PATIENCE, "the job makes progress", goes_on);
            let moment = Instant::now() + Duration::from_millis(u64::from(started.elapsed().subsec_nanos()) % 200);
            support::eventually(PATIENCE, "the moment", || Instant::now() >= moment);
            process.kill();
        }
    }

    /// The ends of a topic's partitions: `ReadCommitted` gives the last stable offsets.
    pub fn ends(&self, suffix: &str, isolation: Isolation) -> Vec<i64> {
        let asked: Vec<_> = self.partitions(suffix).into_iter().map(|p| (p, At::Latest)).collect();
        self.admin.offsets(&asked, isolation).unwrap().into_iter().map(|(_, end)| end.unwrap().0).collect()
    }

    /// The partitions of a topic; none while it is not there.
    pub fn partitions(&self, suffix: &str) -> Vec<TopicPartition> {
        let topic = self.topic(suffix);
        let count = self.admin.topic(&topic).unwrap().map_or(0, |info| info.partitions);
        (0..count).map(|p| TopicPartition::new(topic.as_str(), p)).collect()
    }

    /// Runs SQL and answers the rows as text.
    pub fn sql(&self, statement: &str) -> Vec<Vec<Option<String>>> {
        sql(&self.database_url, &statement.replace("THE_TABLE", &self.table()))
    }
}

/// Locks on rows, held until dropped.
pub struct Lock {
    client: Option<tokio_postgres::Client>,
    runtime: tokio::runtime::Runtime,
}

impl Drop for Lock {
    fn drop(&mut self) {
        let client = self.client.take().expect("held until here");
        self.runtime.block_on(client.batch_execute("ROLLBACK")).unwrap();
    }
}

impl Job {
    /// Locks every row of the job's table against writers.
    pub fn lock_rows(&self) -> Lock {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let client = runtime.block_on(async {
            let (client, connection) =
                tokio_postgres::connect(&self.database_url, tokio_postgres::NoTls).await.unwrap();
            tokio::spawn(connection);
            let lock = format!("BEGIN; SELECT 1 FROM {} FOR UPDATE", self.table());
            client.batch_execute(&lock).await.unwrap();
            client
        });
        Lock { client: Some(client), runtime }
    }
}

impl Job {
    /// Locks the job's last row, and the others once somebody waits, who holds some of these: the job locks in the other
    /// order. Answers whether that was a deadlock.
    pub fn lock_backwards(&self) -> bool {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let client = runtime.block_on(async {
            let (client, connection) =
                tokio_postgres::connect(&self.database_url, tokio_postgres::NoTls).await.unwrap();
            tokio::spawn(connection);
            client
        });
        let lock = |which| format!("SELECT 1 FROM {} ORDER BY order_id {which} FOR UPDATE", self.table());
        runtime.block_on(client.batch_execute(&format!("BEGIN; {}", lock("DESC LIMIT 1")))).unwrap();
        let waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        support::eventually(PATIENCE, "somebody waits for the last row", || !self.sql(waits).is_empty());
        // Either of the two may be the victim. A waiter finds out after `deadlock_timeout`, a second.
        let since = Instant::now();
        let locked = runtime.block_on(client.batch_execute(&lock("ASC")));
        let _ = runtime.block_on(client.batch_execute("ROLLBACK"));
        locked.is_err() || since.elapsed() > Duration::from_millis(900)
    }
}

/// Runs SQL of one or more statements and answers the last one's rows as text.
pub fn sql(url: &str, statement: &str) -> Vec<Vec<Option<String>>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let messages = client.simple_query(statement).await.unwrap_or_else(|e| panic!("{statement}: {e:?}"));
        let rows = messages.into_iter().filter_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => {
                Some((0..row.len()).map(|i| row.get(i).map(str::to_owned)).collect())
            }
            _ => None,
        });
        rows.collect()
    })
}

/// All committed records of a topic, partition by partition.
pub fn read_committed(brokers: &str, admin: &Admin, topic: &str) -> Vec<Stored> {
    let mut records = Vec::new();
    each_committed(brokers, admin, topic, |input| {
        records.push(Stored {
            partition: input.partition,
            offset: input.offset.0,
            timestamp: input.timestamp,
            key: input.key.map(<[u8]>::to_vec),
            value: input.value.map(<[u8]>::to_vec),
            headers: input.headers.0.iter().map(|(n, v)| (n.to_vec(), v.map(<[u8]>::to_vec))).collect(),
        });
    });
    records
}

/// Goes through all committed records of a topic, partition by partition.
pub fn each_committed(brokers: &str, admin: &Admin, topic: &str, mut see: impl FnMut(&Input<'_>)) {
    let info = admin.topic(topic).unwrap().unwrap_or_else(|| panic!("no topic {topic}"));
    let connection = Connection::new(brokers, support::unique("semel-tests-reader"));
    let mut reader = Reader::new(&connection, PATIENCE).unwrap();
    for range in Reader::whole(admin, topic, info.partitions, Isolation::ReadUncommitted).unwrap() {
        let read = reader.read(&range, |input| -> Result<_, semel::kafka::Error> {
            see(input);
            Ok(ControlFlow::Continue(()))
        });
        read.unwrap_or_else(|error| panic!("{topic} cannot be read to its end: {error}"));
    }
}

/// Produces to one topic.
pub struct Feed {
    producer: Producer,
    chunk: Chunk,
}

impl Feed {
    pub fn new(job: &Job, topic: &str) -> Feed {
        let info = job.admin.topic(topic).unwrap().unwrap_or_else(|| panic!("no topic {topic}"));
        let options = ProducerOptions {
            transactional_id: None,
            transaction_timeout: PATIENCE,
            linger: LINGER,
            queue_bytes: 32 << 20,
        };
        let connection = Connection::new(job.brokers.clone(), "semel-tests-feed");
        Feed { producer: Producer::new(&connection, &options, &[info.target(topic)]).unwrap(), chunk: Chunk::default() }
    }

    pub fn push(&mut self, record: &Record<'_>) {
        let mut out = self.chunk.push(TargetId(0));
        out.partition(record.partition).timestamp(record.timestamp).key(record.key).value(record.value);
        for (name, value) in &record.headers {
            out.header(name, *value);
        }
        out.finish();
        while let Err(error) = self.producer.produce(&self.chunk.get(0)) {
            assert!(error.is_queue_full(), "{error}");
            self.producer.flush(Duration::from_millis(100)).ok();
        }
        self.chunk.clear();
    }

    /// Waits until all is acknowledged.
    pub fn flush(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.producer.flush(Duration::from_secs(1)).is_err() {
            assert!(Instant::now() < deadline, "records are not acknowledged");
        }
        assert!(self.producer.failed_deliveries().is_none(), "a record was not delivered");
    }
}

/// Keeps producing `rate` records a second from a thread until stopped or dropped; `make(i)` answers key and value.
pub struct Load<'scope> {
    stop: Sender<()>,
    thread: std::thread::ScopedJoinHandle<'scope, u64>,
}

impl<'scope> Load<'scope> {
    pub fn start<'env>(
        scope: &'scope std::thread::Scope<'scope, 'env>,
        job: &'env Job,
        rate: u64,
        partitions: i32,
        make: impl Fn(u64) -> (String, String) + Send + 'scope,
    ) -> Load<'scope> {
        let (stop, stopped) = channel::<()>();
        let thread = scope.spawn(move || {
            let mut feed = Feed::new(job, &job.topic("in"));
            let (started, mut sent) = (Instant::now(), 0);
            // A test that panics drops the sender, which ends this thread too.
            while stopped.recv_timeout(Duration::from_millis(2)) == Err(RecvTimeoutError::Timeout) {
                let due = (started.elapsed().as_secs_f64() * rate as f64) as u64;
                while sent < due {
                    let (key, value) = make(sent);
                    let (key, value) = (key.as_bytes(), value.as_bytes());
                    let partition = semel::operator::partition(Some(key), 0, partitions);
                    feed.push(&Record { partition, key: Some(key), value: Some(value), ..Record::default() });
                    sent += 1;
                }
            }
            feed.flush();
            sent
        });
        Load { stop, thread }
    }

    /// Stops and answers how many records were produced, all acknowledged.
    pub fn stop(self) -> u64 {
        drop(self.stop);
        self.thread.join().unwrap()
    }
}

/// A running `semel run`. Killed when dropped.
pub struct Process {
    pub child: Child,
    log: PathBuf,
}

impl Process {
    /// A process that is put to sleep sleeps when this returns: each of its threads.
    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        use nix::sys::signal::{Signal, kill};
        use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        kill(pid, signal).unwrap();
        if signal == Signal::SIGSTOP {
            let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG;
            support::eventually(PATIENCE, "it sleeps", || {
                !matches!(waitid(Id::Pid(pid), flags), Ok(WaitStatus::StillAlive) | Err(_))
            });
        }
    }

    /// kill -9, and gone.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM: exits 0 in good order.
    pub fn stop(mut self) {
        self.signal(nix::sys::signal::Signal::SIGTERM);
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status} on SIGTERM\n{}", self.log());
    }

    /// Whether one of its threads keeps a core busy.
    pub fn is_busy(&self) -> bool {
        is_busy(self.child.id(), "")
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of semel run ---\n{}", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a thread of a process, whose name begins so, uses more than half of a core for a second.
pub fn is_busy(process: u32, name: &str) -> bool {
    let used = || -> BTreeMap<PathBuf, u64> {
        let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        let time = |thread: PathBuf| {
            let stat = fs::read_to_string(thread.join("stat")).ok()?;
            let (own, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
            // User and system time, in hundredths of a second.
            let times = rest.split(' ').skip(11).take(2).filter_map(|time| time.parse::<u64>().ok());
            own.starts_with(name).then(|| (thread, times.sum()))
        };
        threads.filter_map(|thread| time(thread.path())).collect()
    };
    let before = used();
    support::pass(Duration::from_secs(1));
    used().iter().any(|(thread, now)| before.get(thread).is_some_and(|before| now - before > 50))
}

/// Waits for a process, for [`PATIENCE`] at most.
pub fn wait_with_output(child: Child) -> Output {
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    let (done, waiting) = channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if waiting.recv_timeout(PATIENCE * 2).is_err_and(|e| e == RecvTimeoutError::Timeout) {
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    });
    let output = child.wait_with_output().unwrap();
    drop(done);
    watchdog.join().unwrap();
    output
}
