//! Instances of a job that join, leave, are killed and sleep past their session every few seconds, with every assignor
//! and both kinds of membership: nothing is lost or doubled, and every partition moves on.
//!
//! `cargo test` makes each change once, in a fixed order; by chance, for so many seconds a variant:
//! `SEMEL_CHURN=300 cargo test --test it churn -- --nocapture`. `SEMEL_CHURN_SEED` repeats an order of changes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use semel::cluster::Cluster;
use semel::kafka::Isolation;
use semel::record::TopicPartition;

use super::harness::{Job, Load, PATIENCE, Process};
use super::kill::{TABLE, TOPOLOGY, check, order};
use crate::support;

const PARTITIONS: i32 = 12;
const RATE: u64 = 500;
const INSTANCES: usize = 3;
const SESSION: &str = "6s";
/// Past the session.
const SLEEP: Duration = Duration::from_secs(8);
/// Every partition moves within so long after the last of a run of changes: a session, a transaction that is waited for,
/// two rebalances and the start of a process that shares two cores with nine others. It is 1 to 5 s where nothing else runs.
const BOUND: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(150);

const ASSIGNORS: [(&str, &str); 3] = [
    ("range", r#""partition.assignment.strategy" = "range""#),
    ("cooperative-sticky", r#""partition.assignment.strategy" = "cooperative-sticky""#),
    ("the broker's", r#""group.protocol" = "consumer""#),
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    Join,
    Leave,
    Kill,
    Sleep,
}

use Change::{Join, Kill, Leave, Sleep};

/// The fixed order.
const SCRIPT: [Change; 9] = [Join, Join, Sleep, Kill, Join, Leave, Join, Kill, Join];

/// How long each change is left alone, and after how many the job is to catch up.
const BETWEEN: Duration = Duration::from_millis(2_500);
const RUN: usize = SCRIPT.len();

/// The instances of a job, and how long each partition rested.
struct Flock<'a> {
    job: &'a Job,
    file: PathBuf,
    awake: Vec<Process>,
    asleep: Vec<(Process, Instant)>,
    looked: Instant,
    /// Of each partition, by its name: where its position was last seen to be, and since when.
    seen: BTreeMap<String, (i64, Instant)>,
    longest: (Duration, String),
}

impl Flock<'_> {
    fn change(&mut self, change: Change, which: usize) {
        let chosen = which % self.awake.len().max(1);
        match change {
            Join => self.awake.push(self.job.start(&self.file)),
            Leave => self.awake.remove(chosen).stop(),
            Kill => self.awake.remove(chosen).kill(),
            Sleep => {
                let sleeper = self.awake.remove(chosen);
                sleeper.signal(Signal::SIGSTOP);
                self.asleep.push((sleeper, Instant::now() + SLEEP));
            }
        }
    }

    /// One is always awake.
    fn may(&self, change: Change) -> bool {
        match change {
            Join => self.awake.len() + self.asleep.len() < INSTANCES,
            Leave | Kill => self.awake.len() > 1,
            Sleep => self.awake.len() > 1 && self.asleep.is_empty(),
        }
    }

    /// Wakes who has slept enough, and looks at the positions.
    fn tend(&mut self) {
        let now = Instant::now();
        while self.asleep.first().is_some_and(|(_, until)| now >= *until) {
            let (sleeper, _) = self.asleep.remove(0);
            sleeper.signal(Signal::SIGCONT);
            self.awake.push(sleeper);
        }
        if now.duration_since(self.looked) < LOOK_EVERY {
            return;
        }
        self.looked = now;
        let sink = format!("{}.orders_table", self.job.name);
        for (group, topic, count) in [(&self.job.name, "in", PARTITIONS), (&sink, "out", 4)] {
            let partitions: Vec<_> = (0..count).map(|p| TopicPartition::new(self.job.topic(topic), p)).collect();
            for (partition, position) in self.job.admin.committed(group, &partitions, false).unwrap_or_default() {
                let Ok(Some(position)) = position else { continue };
                let seen = self.seen.entry(partition.to_string()).or_insert((position.0, now));
                let rested = now.duration_since(seen.1);
                if rested > self.longest.0 {
                    self.longest = (rested, partition.to_string());
                }
                if position.0 > seen.0 {
                    *seen = (position.0, now);
                }
            }
        }
    }

    /// Tends until `done`, for `patience` at most.
    fn until(&mut self, patience: Duration, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        support::eventually(patience, what, || {
            self.tend();
            done(self)
        });
    }

    /// All are awake and every partition moves; answers how long after the last change.
    fn settle(&mut self) -> Duration {
        self.until(PATIENCE, "all are awake", |flock| flock.asleep.is_empty());
        let last = Instant::now();
        let ends = self.job.ends("in", Isolation::ReadCommitted);
        let topic = self.job.topic("in");
        self.until(BOUND, &format!("every partition of {topic} moves after the last change"), |flock| {
            let at = |p: usize| flock.seen[&TopicPartition::new(topic.as_str(), p as i32).to_string()].0;
            ends.iter().enumerate().all(|(p, end)| at(p) > *end)
        });
        last.elapsed()
    }

    fn rest(&mut self, by: Duration) {
        let end = Instant::now() + by;
        self.until(by + PATIENCE, "time passes", |_| Instant::now() >= end);
    }
}

/// The changes of a variant: the script, or by chance for so long.
struct Changes {
    script: std::vec::IntoIter<Change>,
    until: Option<Instant>,
    state: u64,
}

impl Changes {
    fn of_environment(seed: u64) -> Changes {
        let seconds = std::env::var("SEMEL_CHURN").ok().map(|n| n.parse().expect("SEMEL_CHURN is a number of seconds"));
        let until = seconds.filter(|seconds| *seconds > 0).map(|seconds| Instant::now() + Duration::from_secs(seconds));
        Changes { script: SCRIPT.to_vec().into_iter(), until, state: seed }
    }

    fn random(&mut self) -> usize {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize
    }

    fn next(&mut self, flock: &Flock<'_>) -> Option<(Change, usize)> {
        let Some(until) = self.until else { return Some((self.script.next()?, self.random())) };
        let possible: Vec<_> = [Join, Join, Leave, Kill, Sleep].into_iter().filter(|c| flock.may(*c)).collect();
        let change = possible[self.random() % possible.len()];
        (Instant::now() < until).then(|| (change, self.random()))
    }
}

/// What a variant went through.
fn churn(cluster: &Cluster, assignor: (&str, &str), membership: &str, seed: u64) -> String {
    let job = Job::new(cluster, "churn", PARTITIONS);
    job.sql(TABLE);
    let (name, properties) = assignor;
    let head =
        format!("membership = \"{membership}\"\nsession_timeout = \"{SESSION}\"\ntransaction_timeout = \"4s\"\n");
    let text = TOPOLOGY.replace("[kafka]\n", &format!("{head}[kafka]\nproperties = {{ {properties} }}\n"));
    let file = job.file(&text);
    let (mut met, mut after, mut longest) = (0, Duration::ZERO, (Duration::ZERO, String::new()));
    let count = std::thread::scope(|scope| {
        // Every partition has something to do all the time.
        let load = Load::start(scope, &job, RATE, PARTITIONS, |i| (format!("c-{}", i % 101), order(i).1));
        let (awake, asleep, seen) = (vec![job.start(&file)], Vec::new(), BTreeMap::new());
        let mut flock = Flock {
            job: &job,
            file: file.clone(),
            awake,
            asleep,
            looked: Instant::now(),
            seen,
            longest: longest.clone(),
        };
        flock.until(PATIENCE, "the first instance works", |flock| flock.seen.len() == PARTITIONS as usize + 4);
        let mut changes = Changes::of_environment(seed);
        while let Some((change, which)) = changes.next(&flock) {
            flock.change(change, which);
            met += 1;
            flock.rest(BETWEEN);
            for process in &mut flock.awake {
                assert!(process.is_running(), "{name}, {membership}: after {change:?}\n{}", process.log());
            }
            if met % RUN == 0 {
                after = after.max(flock.settle());
            }
        }
        after = after.max(flock.settle());
        longest = flock.longest;
        flock.awake.into_iter().for_each(Process::stop);
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
    format!(
        "{name}, {membership}: {met} changes, {count} records; a partition rested for {:.1} s at most ({}), all moved \
         {:.1} s after a run of changes at the latest",
        longest.0.as_secs_f64(),
        longest.1,
        after.as_secs_f64()
    )
}

#[test]
fn instances_that_come_and_go_lose_and_double_nothing_and_every_partition_moves_on() {
    if !support::online("churn") {
        return;
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let seed =
        std::env::var("SEMEL_CHURN_SEED").map_or(now, |seed| seed.parse().expect("SEMEL_CHURN_SEED is a number"));
    println!("SEMEL_CHURN_SEED={seed}");
    let _one = support::one_heavy_test();
    let cluster = support::private_cluster(&[]);
    for membership in ["static", "dynamic"] {
        std::thread::scope(|scope| {
            let runs = ASSIGNORS.map(|assignor| {
                let cluster = &cluster;
                scope.spawn(move || println!("{}", churn(cluster, assignor, membership, seed)))
            });
            for run in runs {
                run.join().unwrap();
            }
        });
    }
}
