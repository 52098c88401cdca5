//! The way of a record, from before it is sent until a reader with `isolation.level=read_committed` has its output.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::chunk::{Chunk, Target, TargetId};
use crate::error::{Disposition, Failure};
use crate::kafka::{At, Connection, Consumer, ConsumerOptions, Error, Isolation, Polled, Producer, ProducerOptions};
use crate::operator::partition;
use crate::quickstart::orders;
use crate::quickstart::topics::Topics;
use crate::record::Position;
use crate::runtime::shutdown;
use crate::scratch::input::Record;
use crate::scratch::process::go_on;
use crate::topology::spec::Guarantee;

use super::report::{Latency, QUANTILES};

/// Carries microseconds since the probe began, big-endian: when its record was sent.
const HEADER: &str = "bench-sent";
/// Between two looks at the clock.
const TICK: Duration = Duration::from_micros(500);
/// What was sent is acknowledged within this.
const ACKNOWLEDGED: Duration = Duration::from_secs(5);

/// Sends at a fixed rate and watches what comes out.
pub struct Probe<'a> {
    pub topics: &'a Topics,
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    /// Records a second.
    pub rate: u64,
    /// What is sent before this is over is not counted.
    pub warm_up: Duration,
    pub time: Duration,
    /// The job's first output comes within this, or it does not run.
    pub ready_within: Duration,
    /// After all is sent, the time that may pass without an output before no more is expected.
    pub tail: Duration,
}

impl Probe<'_> {
    /// Microseconds that the outputs took, in the order in which they came. `records` name their topic by its place
    /// among the inputs. Blocks, until all is over.
    pub fn run(
        &self,
        mut records: impl Iterator<Item = (usize, Record)>,
        interrupted: &AtomicBool,
    ) -> Result<Vec<u64>, Failure> {
        let began = Instant::now();
        let reader = self.reader()?;
        let producer = self.producer()?;
        let (done, ready) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            let reading = scope.spawn(|| self.read(&reader, began, &done, &ready));
            let sent = self.send(&producer, &mut records, began, &ready, interrupted);
            done.store(true, Ordering::Relaxed);
            let read = reading.join().expect("the reader does not panic");
            let counted = sent?;
            let all = read?.into_iter().filter(|(sent, _)| *sent >= counted).map(|(_, took)| took);
            Ok(all.collect())
        })
    }

    /// Of the outputs, from where they end now.
    fn reader(&self) -> Result<Consumer, Failure> {
        let names: Vec<&str> = self.outputs.iter().map(String::as_str).collect();
        let deadline = Instant::now() + self.ready_within;
        // The job makes its topics, and a topic that was made has no leader at first.
        let starts = loop {
            let partitions = self.topics.partitions(&names)?;
            let all = names.iter().all(|name| partitions.iter().any(|p| *p.topic == **name));
            let asked: Vec<_> = partitions.into_iter().map(|partition| (partition, At::Latest)).collect();
            match self.topics.admin.offsets(&asked, Isolation::ReadUncommitted) {
                Ok(ends) if all => break ends,
                Err(error) if error.disposition() != Disposition::Retry => return Err(failed(error)),
                _ if Instant::now() > deadline => {
                    return Err(Failure::unreachable(format!("the job makes no topic {}", self.outputs.join(", "))));
                }
                _ => thread::sleep(Duration::from_millis(20)),
            }
        };
        let starts: Vec<_> = starts.into_iter().map(|(p, end)| (p, end.unwrap_or(Position(0)))).collect();
        let mut reader =
            Consumer::new(&self.topics.connection, &ConsumerOptions::new("semel-bench-probe")).map_err(failed)?;
        reader.assign(&starts).map_err(failed)?;
        Ok(reader)
    }

    fn producer(&self) -> Result<Producer, Failure> {
        let mut targets: Vec<Target> = Vec::new();
        for topic in &self.inputs {
            let info = self.topics.admin.topic(topic).map_err(failed)?;
            let info = info.ok_or_else(|| Failure::unreachable(format!("there is no topic {topic}")))?;
            targets.push(info.target(topic.as_str()));
        }
        let options = ProducerOptions {
            transactional_id: None,
            transaction_timeout: Duration::from_secs(10),
            // What is timed is the job, not this producer's patience.
            linger: Duration::ZERO,
            queue_bytes: 16 << 20,
        };
        Producer::new(&self.topics.connection, &options, &targets).map_err(failed)
    }

    /// Sends; answers from when on what is sent counts, in microseconds since the beginning.
    fn send(
        &self,
        producer: &Producer,
        records: &mut impl Iterator<Item = (usize, Record)>,
        began: Instant,
        ready: &AtomicBool,
        interrupted: &AtomicBool,
    ) -> Result<u64, Failure> {
        let mut chunk = Chunk::default();
        let (mut started, mut sent, mut is_ready) = (Instant::now(), 0, false);
        let mut counted = u64::MAX;
        loop {
            go_on(interrupted)?;
            let now = started.elapsed();
            if !is_ready && ready.load(Ordering::Relaxed) {
                // The clock of the measurement starts with the first output.
                (is_ready, started, sent) = (true, Instant::now(), 0);
                counted = (began.elapsed() + self.warm_up).as_micros() as u64;
                continue;
            }
            if !is_ready && now > self.ready_within {
                // Nothing comes out of these records.
                return Ok(u64::MAX);
            }
            if is_ready && now > self.warm_up + self.time {
                producer.flush(ACKNOWLEDGED).map_err(failed)?;
                return Ok(counted);
            }
            let due = (now.as_secs_f64() * self.rate as f64) as u64;
            while sent < due {
                let Some((target, record)) = records.next() else { return Ok(counted) };
                let mut output = chunk.push(TargetId(target as u32));
                output.partition(record.partition).key(record.key.as_deref()).value(record.value.as_deref());
                output.timestamp(record.timestamp);
                for (name, value) in &record.headers {
                    output.header(name.as_bytes(), value.as_deref());
                }
                output.header(HEADER.as_bytes(), Some(&(began.elapsed().as_micros() as u64).to_be_bytes()));
                output.finish();
                producer.produce(&chunk.get(0)).map_err(failed)?;
                chunk.clear();
                sent += 1;
            }
            thread::sleep(TICK);
        }
    }

    /// Reads until nothing more is to come: when each record was sent, and what it took.
    fn read(
        &self,
        reader: &Consumer,
        began: Instant,
        done: &AtomicBool,
        ready: &AtomicBool,
    ) -> Result<Vec<(u64, u64)>, Failure> {
        let mut found = Vec::new();
        let mut last = Instant::now();
        while !(done.load(Ordering::Relaxed) && last.elapsed() > self.tail) {
            match reader.poll(Duration::from_millis(100)) {
                Polled::Record(message) => {
                    let now = began.elapsed().as_micros() as u64;
                    let input = message.to_input(Vec::new());
                    let sent = input.headers.last(HEADER).flatten().and_then(|bytes| bytes.try_into().ok());
                    if let Some(sent) = sent.map(u64::from_be_bytes) {
                        found.push((sent, now.saturating_sub(sent)));
                    }
                    ready.store(true, Ordering::Relaxed);
                    last = Instant::now();
                }
                Polled::Failed(error) => return Err(failed(error)),
                _ => {}
            }
        }
        Ok(found)
    }
}

fn failed(error: Error) -> Failure {
    Failure::unreachable(error.to_string())
}

/// What the probe's own process is told on its command line: it looks at a job of any make.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[arg(long)]
    brokers: String,
    /// Topic that the job reads. Orders go there, as the quick start makes them.
    #[arg(long)]
    input: String,
    /// Topic that the job writes, headers kept.
    #[arg(long)]
    output: String,
    #[arg(long, default_value_t = 5_000)]
    rate: u64,
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

/// The probe's process: prints the quantiles as one JSON object.
pub fn main(args: &Args) -> Result<(), Failure> {
    let interrupted = shutdown::on_signals()?;
    let topics = Topics::connect(Connection::new(&args.brokers, "semel-bench-probe"))?;
    let ready_within = Duration::from_secs(60);
    let probe = Probe {
        topics: &topics,
        inputs: vec![args.input.clone()],
        outputs: vec![args.output.clone()],
        rate: args.rate,
        warm_up: Duration::from_secs(5),
        time: Duration::from_secs(args.seconds),
        ready_within,
        tail: Duration::from_secs(2),
    };
    let partitions = topics.partitions(&[&args.input])?.len().max(1) as i32;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as i64;
    let count = args.rate * (args.seconds + 5 + ready_within.as_secs());
    let records = orders::generate(count.max(1_000) as usize, 1, now).into_iter().map(|order| {
        let record = Record {
            topic: args.input.clone(),
            partition: partition(Some(order.key.as_bytes()), 0, partitions),
            key: Some(order.key.into_bytes()),
            value: Some(order.value),
            headers: Vec::new(),
            timestamp: Some(order.timestamp),
        };
        (0, record)
    });
    let micros = probe.run(records, &interrupted)?;
    let found = Latency::of(args.rate, Duration::ZERO, Guarantee::ExactlyOnce, micros);
    let found = found.ok_or_else(|| Failure::unreachable("nothing came out"))?;
    let quantiles = QUANTILES.iter().zip(found.quantiles).map(|((name, _), ms)| format!("\"{name}\":{ms:.2}"));
    println!("{{\"records\":{},\"rate\":{},{}}}", found.records, args.rate, quantiles.collect::<Vec<_>>().join(","));
    Ok(())
}
