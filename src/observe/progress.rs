//! What a user sees of a running job: a line a stage on a terminal, else a summary line at intervals.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::observe::status::StageStatus;

const DRAW_EVERY: Duration = Duration::from_millis(250);
const SUMMARY_EVERY: Duration = Duration::from_secs(10);
/// The broker is asked for the ends of the log, so not at every redraw.
const LAG_EVERY: Duration = Duration::from_secs(2);

struct Line {
    status: Arc<StageStatus>,
    bar: Option<ProgressBar>,
    lag: Option<i64>,
    /// Records and time of the last look, for the rate.
    seen: (u64, Instant),
    rate: f64,
}

/// Shows the counters of the stages.
pub struct Display {
    lines: Vec<Line>,
    shown: bool,
    next: Instant,
    next_lag: Instant,
    next_summary: Instant,
    _bars: Option<MultiProgress>,
}

impl Display {
    /// Draws on stderr where that is a terminal. `shown = false` is silent.
    pub fn new(stages: &[Arc<StageStatus>], shown: bool) -> Display {
        let now = Instant::now();
        let bars = (shown && std::io::stderr().is_terminal()).then(MultiProgress::new);
        let style = ProgressStyle::with_template("{spinner} {wide_msg}").expect("a template of ours");
        let lines = stages.iter().map(|status| Line {
            bar: bars.as_ref().map(|bars| bars.add(ProgressBar::new_spinner().with_style(style.clone()))),
            status: Arc::clone(status),
            lag: None,
            seen: (0, now),
            rate: 0.0,
        });
        Display {
            lines: lines.collect(),
            shown,
            next: now,
            next_lag: now,
            next_summary: now + SUMMARY_EVERY,
            _bars: bars,
        }
    }

    /// Redraws when it is time. `lags` answers the lag of each stage in order; it may block for a moment.
    pub fn tick(&mut self, lags: impl FnOnce() -> Vec<Option<i64>>) {
        let now = Instant::now();
        if !self.shown || now < self.next {
            return;
        }
        self.next = now + DRAW_EVERY;
        let summary = self._bars.is_none() && now >= self.next_summary;
        if now >= self.next_lag && (self._bars.is_some() || summary) {
            self.next_lag = now + LAG_EVERY;
            self.lines.iter_mut().zip(lags()).for_each(|(line, lag)| line.lag = lag);
        }
        for line in &mut self.lines {
            line.look(now);
            if let Some(bar) = &line.bar {
                bar.set_message(line.text());
                bar.tick();
            } else if summary {
                tracing::info!("{}", line.text());
            }
        }
        if summary {
            self.next_summary = now + SUMMARY_EVERY;
        }
    }

    /// Takes the lines off the terminal.
    pub fn finish(&self) {
        self.lines.iter().filter_map(|line| line.bar.as_ref()).for_each(ProgressBar::finish_and_clear);
    }
}

impl Line {
    fn look(&mut self, now: Instant) {
        let records = self.status.records_in.get();
        let (before, at) = self.seen;
        let seconds = now.duration_since(at).as_secs_f64();
        if seconds > 0.0 {
            let rate = (records - before) as f64 / seconds;
            // Smooth enough to read, quick enough to see a stall.
            self.rate = if self.rate == 0.0 { rate } else { 0.6 * self.rate + 0.4 * rate };
        }
        self.seen = (records, now);
    }

    fn text(&self) -> String {
        let s = &self.status;
        let commits = s.commits.get();
        let latency = if commits > 0 { s.commit_us.get() as f64 / commits as f64 / 1000.0 } else { 0.0 };
        let mut text = format!(
            "{}: {} records ({}/s), {} out, {} rejected, {} transactions ({latency:.1} ms)",
            s.name,
            grouped(s.records_in.get()),
            grouped(self.rate as u64),
            grouped(s.records_out.get()),
            grouped(s.rejected.get()),
            grouped(commits),
        );
        if s.rows.get() > 0 {
            text.push_str(&format!(", {} rows", grouped(s.rows.get())));
        }
        if s.duplicates.get() > 0 {
            text.push_str(&format!(", {} duplicates", grouped(s.duplicates.get())));
        }
        if let Some(lag) = self.lag {
            text.push_str(&format!(", lag {}", grouped(lag.max(0) as u64)));
        }
        if s.aborts.get() > 0 {
            text.push_str(&format!(", {} aborts", s.aborts.get()));
        }
        text
    }
}

/// A number with its thousands apart.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn thousands_stand_apart() {
        assert_eq!([0, 999, 1000, 1234567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
