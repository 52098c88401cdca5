//! What one run used and did.

use serde::Serialize;
use serde_json::Value;

/// With fewer, a run is too short to leave its start out.
const FEWEST_COMMITS: u64 = 6;

/// One run over the whole input, as the job itself reports it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample {
    pub records: u64,
    /// Of these, records between the first acknowledged commit and the last but one: what figures are of. All of them, where
    /// the commits are too few.
    pub measured: u64,
    /// Commits in that time.
    pub measured_commits: u64,
    /// From the one to the other.
    pub seconds: f64,
    /// On all cores, meanwhile.
    pub cpu_seconds: f64,
    pub peak_memory_bytes: u64,
    /// Acknowledged commits: transactions, or positions where there are none.
    pub commits: u64,
    /// Milliseconds from the end of a batch to its acknowledged commit, on average.
    pub commit_ms: f64,
    pub rejected: u64,
}

impl Sample {
    /// From what `semel run --json` prints of one stage.
    pub fn of(report: &Value) -> Option<Sample> {
        let stage = &report["stages"][0];
        let (records, commits) = (stage["in"].as_u64()?, stage["transactions"].as_u64()?);
        let steady = &stage["steady"];
        let (of, measured, measured_commits) = match commits >= FEWEST_COMMITS {
            true => {
                (["seconds", "cpu_seconds"].map(|name| steady[name].as_f64()), steady["records"].as_u64()?, commits - 2)
            }
            false => (["busy_seconds", "busy_cpu_seconds"].map(|name| stage[name].as_f64()), records, commits),
        };
        let [seconds, cpu_seconds] = of;
        Some(Sample {
            records,
            measured,
            measured_commits,
            seconds: seconds.filter(|seconds| *seconds > 0.0)?,
            cpu_seconds: cpu_seconds?,
            peak_memory_bytes: report["peak_memory_bytes"].as_u64()?,
            commits,
            commit_ms: stage["commit_ms"].as_f64()?,
            rejected: stage["rejected"].as_u64()?,
        })
    }

    pub fn records_per_second(&self) -> f64 {
        self.measured as f64 / self.seconds
    }

    pub fn cpu_per_million(&self) -> f64 {
        self.cpu_seconds * 1e6 / self.measured as f64
    }

    pub fn commits_per_second(&self) -> f64 {
        self.measured_commits as f64 / self.seconds
    }
}

/// The middle one, or the mean of the two in the middle; 0 of none.
pub fn median(figures: impl IntoIterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.into_iter().collect();
    figures.sort_by(f64::total_cmp);
    match figures.len() {
        0 => 0.0,
        count if count % 2 == 1 => figures[count / 2],
        count => (figures[count / 2 - 1] + figures[count / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([]), 0.0);
    }

    #[test]
    fn a_sample_is_what_a_run_prints() {
        let report = serde_json::json!({
            "peak_memory_bytes": 7,
            "stages": [{ "in": 2_000_000, "busy_seconds": 4.0, "busy_cpu_seconds": 6.0, "transactions": 40,
                         "commit_ms": 5.5, "rejected": 1,
                         "steady": { "records": 1_950_000, "seconds": 3.9, "cpu_seconds": 5.85 } }],
        });
        let sample = Sample::of(&report).unwrap();
        assert_eq!(
            (sample.records, sample.records_per_second(), sample.cpu_per_million()),
            (2_000_000, 500_000.0, 3.0)
        );
        assert_eq!((sample.commits, sample.peak_memory_bytes, sample.rejected), (40, 7, 1));
        let mut short = report.clone();
        short["stages"][0]["transactions"] = 2.into();
        assert_eq!(Sample::of(&short).unwrap().seconds, 4.0, "all of it");
        assert_eq!(Sample::of(&serde_json::json!({ "stages": [] })), None);
    }
}
