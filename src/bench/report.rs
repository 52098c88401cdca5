//! A benchmark's figures as text, JSON and CSV.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::Setting;
use super::sample::{Sample, median};
use crate::observe::progress::grouped;
use crate::topology::duration_text;
use crate::topology::spec::Guarantee;

/// Runs of one guarantee at one setting, in the order of the rounds.
#[derive(Clone, Debug)]
pub struct Throughput {
    pub setting: Setting,
    pub guarantee: Guarantee,
    /// Mean bytes of a value.
    pub record_bytes: u64,
    pub samples: Vec<Sample>,
}

/// The shares of records that are named in tables and plots.
pub const QUANTILES: [(&str, f64); 7] =
    [("p50", 0.5), ("p75", 0.75), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)];

/// How long records took at a fixed rate.
#[derive(Clone, Debug)]
pub struct Latency {
    pub rate: u64,
    pub interval: Duration,
    pub guarantee: Guarantee,
    pub records: u64,
    /// Milliseconds, one for each of [`QUANTILES`].
    pub quantiles: [f64; 7],
}

impl Latency {
    /// Of the microseconds that each record took; none of none.
    pub fn of(rate: u64, interval: Duration, guarantee: Guarantee, mut micros: Vec<u64>) -> Option<Latency> {
        micros.sort_unstable();
        let last = micros.len().checked_sub(1)?;
        let at = |share: f64| micros[((share * micros.len() as f64).ceil() as usize).saturating_sub(1).min(last)];
        let quantiles = QUANTILES.map(|(_, share)| at(share) as f64 / 1000.0);
        Some(Latency { rate, interval, guarantee, records: micros.len() as u64, quantiles })
    }

    pub fn quantile(&self, name: &str) -> f64 {
        QUANTILES.iter().position(|(known, _)| *known == name).map_or(0.0, |at| self.quantiles[at])
    }
}

/// Everything that was measured.
#[derive(Clone, Debug)]
pub struct Report {
    pub file: String,
    pub stage: String,
    pub kind: &'static str,
    pub input: String,
    pub rounds: u32,
    /// What sizes and workers are measured at.
    pub base: Setting,
    pub throughput: Vec<Throughput>,
    pub latency: Vec<Latency>,
    pub machine: Vec<(&'static str, String)>,
    pub servers: Vec<String>,
    pub elapsed: Duration,
}

impl Throughput {
    pub fn rates(&self) -> impl Iterator<Item = f64> + '_ {
        self.samples.iter().map(Sample::records_per_second)
    }

    pub fn rate(&self) -> f64 {
        median(self.rates())
    }

    fn of(&self, figure: impl Fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().map(figure))
    }
}

impl Report {
    /// The throughput as a share of at-least-once's: the median of the pairs, each of one round; none where that was not
    /// measured.
    pub fn share(&self, of: &Throughput) -> Option<f64> {
        let other =
            self.throughput.iter().find(|t| t.setting == of.setting && t.guarantee == Guarantee::AtLeastOnce)?;
        Some(median(of.rates().zip(other.rates()).map(|(own, others)| own / others)))
    }

    /// One sentence.
    pub fn verdict(&self) -> String {
        let at_base = |t: &&Throughput| t.setting == self.base && t.guarantee == Guarantee::ExactlyOnce;
        let interval = duration_text(self.base.interval);
        match self.throughput.iter().find(at_base).and_then(|exactly| Some((exactly, self.share(exactly)?))) {
            Some((exactly, share)) => format!(
                "exactly-once at {interval}: {} records/s, {:.1} % of at-least-once",
                grouped(exactly.rate() as u64),
                share * 100.0
            ),
            None => "exactly-once and at-least-once were not both measured".to_owned(),
        }
    }

    /// What it was measured on, a line each.
    pub fn conditions(&self) -> Vec<(String, String)> {
        let mut lines: Vec<(String, String)> =
            self.machine.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        lines.push(("servers".to_owned(), self.servers.join("; ")));
        lines.push(("input".to_owned(), self.input.clone()));
        let runs = format!("{} rounds, guarantees in turn; medians, lowest to highest in brackets", self.rounds);
        lines.push(("runs".to_owned(), runs));
        let rejected = self.throughput.iter().flat_map(|t| &t.samples).map(|s| (s.rejected, s.records)).max();
        if let Some((rejected, records)) = rejected.filter(|(rejected, _)| *rejected > 0) {
            let rejected = format!("up to {} of {} records of a run", grouped(rejected), grouped(records));
            lines.push(("rejected".to_owned(), rejected));
        }
        lines
    }

    /// The head and the rows of the table of throughput.
    pub fn throughput_rows(&self) -> Vec<[String; 9]> {
        let head = [
            "commit",
            "workers",
            "bytes",
            "guarantee",
            "records/s",
            "of at-least-once",
            "CPU s/million",
            "peak MB",
            "commits/s",
        ];
        let rows = self.throughput.iter().map(|t| {
            let (low, high) = t.rates().fold((f64::MAX, 0.0_f64), |(low, high), r| (low.min(r), high.max(r)));
            [
                duration_text(t.setting.interval),
                t.setting.workers.to_string(),
                t.record_bytes.to_string(),
                t.guarantee.as_str().to_owned(),
                format!("{} ({}-{} k)", grouped(t.rate() as u64), thousands(low), thousands(high)),
                self.share(t).map_or(String::new(), |share| format!("{:.1} %", share * 100.0)),
                format!("{:.2}", t.of(Sample::cpu_per_million)),
                format!("{:.0}", t.of(|s| s.peak_memory_bytes as f64 / 1e6)),
                format!("{:.1}", t.of(Sample::commits_per_second)),
            ]
        });
        [head.map(str::to_owned)].into_iter().chain(rows).collect()
    }

    /// The head and the rows of the table of latency; none where none was measured.
    pub fn latency_rows(&self) -> Vec<[String; 7]> {
        if self.latency.is_empty() {
            return Vec::new();
        }
        let head = ["records/s", "commit", "guarantee", "p50 ms", "p95 ms", "p99 ms", "max ms"];
        let rows = self.latency.iter().map(|l| {
            let ms = |name: &str| format!("{:.1}", l.quantile(name));
            let (rate, interval) = (grouped(l.rate), duration_text(l.interval));
            [rate, interval, l.guarantee.as_str().to_owned(), ms("p50"), ms("p95"), ms("p99"), ms("max")]
        });
        [head.map(str::to_owned)].into_iter().chain(rows).collect()
    }

    /// For a terminal.
    pub fn text(&self) -> String {
        let mut out = format!("{}, stage {} ({}): {}\n\n", self.file, self.stage, self.kind, self.verdict());
        for (name, value) in self.conditions() {
            let _ = writeln!(out, "  {name:<10} {value}");
        }
        out.push('\n');
        table(&mut out, &self.throughput_rows());
        let latency = self.latency_rows();
        if !latency.is_empty() {
            out.push_str("\nfrom before a record is sent until a read_committed reader has its output\n\n");
            table(&mut out, &latency);
        }
        let _ = writeln!(out, "\nmeasured in {:.0} s", self.elapsed.as_secs_f64());
        out
    }

    /// One object, with every run.
    pub fn json(&self) -> Value {
        let setting = |s: &Setting| json!({ "commit_interval_ms": millis(s.interval), "workers": s.workers });
        let throughput = self.throughput.iter().map(|t| {
            json!({
                "setting": setting(&t.setting),
                "record_bytes": t.record_bytes,
                "guarantee": t.guarantee.as_str(),
                "records_per_second": t.rate(),
                "of_at_least_once": self.share(t),
                "cpu_seconds_per_million": t.of(Sample::cpu_per_million),
                "peak_memory_bytes": t.of(|s| s.peak_memory_bytes as f64),
                "commits_per_second": t.of(Sample::commits_per_second),
                "runs": t.samples,
            })
        });
        let latency = self.latency.iter().map(|l| {
            let quantiles = QUANTILES.iter().zip(l.quantiles).map(|((name, _), ms)| (name.to_string(), json!(ms)));
            json!({
                "records_per_second": l.rate,
                "commit_interval_ms": millis(l.interval),
                "guarantee": l.guarantee.as_str(),
                "records": l.records,
                "ms": Value::Object(quantiles.collect()),
            })
        });
        let conditions = self.conditions().into_iter().map(|(name, value)| (name, json!(value)));
        json!({
            "file": self.file,
            "stage": self.stage,
            "verdict": self.verdict(),
            "conditions": Value::Object(conditions.collect()),
            "throughput": throughput.collect::<Vec<_>>(),
            "latency": latency.collect::<Vec<_>>(),
            "seconds": self.elapsed.as_secs_f64(),
        })
    }

    /// A line a run, and a line a fixed rate.
    pub fn csv(&self) -> String {
        let mut out =
            "measure,round,commit_interval_ms,workers,record_bytes,guarantee,records,seconds,records_per_second,\
                       cpu_seconds_per_million,peak_memory_bytes,commits,commit_ms,p50_ms,p75_ms,p90_ms,p95_ms,p99_ms,\
                       p999_ms,max_ms\n"
                .to_owned();
        for t in &self.throughput {
            for (round, s) in t.samples.iter().enumerate() {
                let _ = writeln!(
                    out,
                    "throughput,{},{},{},{},{},{},{:.4},{:.0},{:.4},{},{},{:.3},,,,,,,",
                    round + 1,
                    millis(t.setting.interval),
                    t.setting.workers,
                    t.record_bytes,
                    t.guarantee.as_str(),
                    s.records,
                    s.seconds,
                    s.records_per_second(),
                    s.cpu_per_million(),
                    s.peak_memory_bytes,
                    s.commits,
                    s.commit_ms,
                );
            }
        }
        for l in &self.latency {
            let ms: Vec<String> = l.quantiles.iter().map(|ms| format!("{ms:.3}")).collect();
            let _ = writeln!(
                out,
                "latency,1,{},{},,{},{},,{},,,,,{}",
                millis(l.interval),
                self.base.workers,
                l.guarantee.as_str(),
                l.records,
                l.rate,
                ms.join(","),
            );
        }
        out
    }
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis() as u64
}

fn thousands(figure: f64) -> String {
    format!("{:.0}", figure / 1000.0)
}

/// Figures stand to the right.
fn table<const N: usize>(out: &mut String, rows: &[[String; N]]) {
    let widths: [usize; N] = std::array::from_fn(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0));
    for row in rows {
        let mut line = String::from(" ");
        for (cell, width) in row.iter().zip(widths) {
            let _ = match cell.starts_with(|c: char| c.is_ascii_digit()) {
                true => write!(line, " {cell:>width$} "),
                false => write!(line, " {cell:<width$} "),
            };
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let base = Setting { interval: Duration::from_millis(100), size: None, workers: 1 };
        let sample = |seconds| Sample {
            records: 1_000_000,
            measured: 1_000_000,
            measured_commits: 20,
            seconds,
            cpu_seconds: 3.0,
            peak_memory_bytes: 90_000_000,
            commits: 20,
            commit_ms: 4.0,
            rejected: 0,
        };
        let of = |guarantee, seconds: [f64; 3]| Throughput {
            setting: base,
            guarantee,
            record_bytes: 230,
            samples: seconds.map(sample).to_vec(),
        };
        // A slow round is slow for both.
        let throughput = vec![of(Guarantee::ExactlyOnce, [2.0, 2.2, 4.4]), of(Guarantee::AtLeastOnce, [2.0, 2.0, 4.0])];
        let micros = (1..=1000).map(|i| i * 100).collect();
        let latency = Latency::of(5_000, base.interval, Guarantee::ExactlyOnce, micros);
        Report {
            file: "t.toml".into(),
            stage: "t".into(),
            kind: "Kafka to Kafka",
            input: "given".into(),
            rounds: 3,
            base,
            throughput,
            latency: latency.into_iter().collect(),
            machine: vec![("processor", "x".into())],
            servers: vec!["Kafka".into()],
            elapsed: Duration::from_secs(9),
        }
    }

    #[test]
    fn a_share_is_the_median_of_pairs_and_spread_is_told() {
        let report = report();
        let share = report.share(&report.throughput[0]).unwrap();
        assert!((share - 1.0 / 1.1).abs() < 1e-9, "{share}");
        let rows = report.throughput_rows();
        assert_eq!(rows[1][3..6], ["exactly-once", "454,545 (227-500 k)", "90.9 %"]);
        assert_eq!(rows[1][6..], ["3.00", "90", "9.1"]);
        assert_eq!(report.verdict(), "exactly-once at 100ms: 454,545 records/s, 90.9 % of at-least-once");
    }

    #[test]
    fn quantiles_are_records_that_there_were() {
        let latency = &report().latency[0];
        assert_eq!(latency.quantiles, [50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 100.0]);
        assert!(Latency::of(1, Duration::ZERO, Guarantee::ExactlyOnce, vec![]).is_none());
    }

    #[test]
    fn every_run_is_a_line_of_as_many_cells_as_the_head() {
        let csv = report().csv();
        let cells: Vec<usize> = csv.lines().map(|line| line.split(',').count()).collect();
        assert_eq!(cells, [cells[0]; 8], "{csv}");
    }
}
