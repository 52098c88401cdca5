//! What a drill found, as text and as JSON.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::cases::Case;
use super::observe::{End, EndKind};
use super::verdict::{Bound, Tally};
use crate::crash::{Crash, VARIABLE};
use crate::scratch::process::Ended;
use crate::topology::spec::Guarantee;

/// The whole drill.
#[derive(Clone, Debug)]
pub struct Report {
    pub file: String,
    pub guarantee: Guarantee,
    pub seed: u64,
    /// How many records, and where they came from.
    pub input: String,
    pub servers: Vec<String>,
    /// Where one looks: topics, tables, dead letters.
    pub ends: Vec<End>,
    /// What the crash-free run left there.
    pub baseline: Vec<EndReport>,
    pub cases: Vec<CaseReport>,
    /// The whole input once more.
    pub replay: CaseReport,
    pub elapsed: Duration,
}

/// How a crash and the run after it went.
#[derive(Clone, Debug)]
pub struct CaseReport {
    pub name: String,
    /// None: the whole job.
    pub stage: Option<String>,
    /// As `SEMEL_CRASH` had it.
    pub crash: Option<Crash>,
    pub fate: Fate,
    /// Why it did not come to its end.
    pub failure: Option<String>,
    /// The ends that it reaches.
    pub ends: Vec<EndReport>,
    /// Partitions whose position is not at their end.
    pub behind: u64,
    /// The processes did not get through together; the next one alone did.
    pub stalled: bool,
    pub elapsed: Duration,
}

/// What became of the process that was to crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Killed,
    /// Killed between a commit and its answer.
    InFlight,
    /// It came to its end without coming by that place.
    NotReached,
    /// A replay: nothing was to crash.
    Unharmed,
}

impl Fate {
    pub fn as_str(self) -> &'static str {
        match self {
            Fate::Killed => "killed",
            Fate::InFlight => "killed in flight",
            Fate::NotReached => "not reached",
            Fate::Unharmed => "not killed",
        }
    }
}

/// What was found at one end.
#[derive(Clone, Debug)]
pub struct EndReport {
    pub end: End,
    pub tally: Tally,
    /// The most that this crash may do, where the end's promise allows it.
    pub bound: Bound,
}

impl EndReport {
    pub fn right(end: &End, found: u64) -> EndReport {
        let tally = Tally { expected: found, found, ..Tally::default() };
        EndReport { end: end.clone(), tally, bound: Bound::default() }
    }

    pub fn is_broken(&self) -> bool {
        self.tally.breaks(self.end.promise, self.bound)
    }

    /// A few words: `right`, `1 lost`.
    pub fn text(&self) -> String {
        let counts = [
            (self.tally.lost, "lost"),
            (self.tally.doubled, "doubled"),
            (self.tally.different, "different"),
            (self.tally.disordered, "out of order"),
        ];
        let said: Vec<String> = counts.iter().filter(|(n, _)| *n > 0).map(|(n, word)| format!("{n} {word}")).collect();
        match (said.is_empty(), self.is_broken()) {
            (true, _) => "right".to_owned(),
            (false, false) => said.join(", "),
            (false, true) => format!("BROKEN: {}", said.join(", ")),
        }
    }
}

impl CaseReport {
    pub fn new(case: &Case, crash: Crash) -> CaseReport {
        CaseReport {
            name: case.name(),
            stage: case.stage.clone(),
            crash: Some(crash),
            fate: Fate::Killed,
            failure: None,
            ends: Vec::new(),
            behind: 0,
            stalled: false,
            elapsed: Duration::ZERO,
        }
    }

    pub fn replay() -> CaseReport {
        CaseReport {
            name: "replay".to_owned(),
            stage: None,
            crash: None,
            fate: Fate::Unharmed,
            failure: None,
            ends: Vec::new(),
            behind: 0,
            stalled: false,
            elapsed: Duration::ZERO,
        }
    }

    /// A process that should have come to its end and did not.
    pub fn failed(self, ended: &Ended, elapsed: Duration) -> CaseReport {
        CaseReport { failure: Some(format!("{}\n{}", ended.status, ended.tail())), elapsed, ..self }
    }

    pub fn is_broken(&self) -> bool {
        self.trouble().is_some() || self.ends.iter().any(EndReport::is_broken)
    }

    /// Whether the process was killed, or had to be.
    pub fn was_killed(&self) -> bool {
        matches!(self.fate, Fate::Killed | Fate::InFlight)
    }

    /// What is wrong besides what was found at the ends: in a word, and in a sentence.
    fn trouble(&self) -> Option<(String, String)> {
        if let Some(failure) = &self.failure {
            return Some(("FAILED".to_owned(), failure.clone()));
        }
        if self.fate == Fate::NotReached {
            let why = "the process never came by that place, so nothing is proven of it";
            return Some(("BROKEN: not reached".to_owned(), why.to_owned()));
        }
        if self.stalled {
            let why = "the process that came back and the one beside it stood still: a partition was read by nobody until \
                       the group was rebalanced again";
            return Some(("BROKEN: stood still".to_owned(), why.to_owned()));
        }
        let behind = self.behind;
        (behind > 0).then(|| {
            (format!("BROKEN: {behind} behind"), format!("the positions of {behind} partitions are not at their ends"))
        })
    }

    /// What was found at an end, if the crash reaches it.
    pub fn at(&self, end: &End) -> Option<&EndReport> {
        self.ends.iter().find(|found| found.end.kind == end.kind && found.end.name == end.name)
    }

    /// Of the committed positions, and whether that cell is broken.
    pub fn positions(&self) -> (String, bool) {
        match self.trouble() {
            Some((word, _)) => (word, true),
            None => ("at the end".to_owned(), false),
        }
    }

    /// What is wrong besides what was found at the ends.
    pub fn what_is_wrong(&self) -> Option<String> {
        self.trouble().map(|(_, sentence)| sentence)
    }
}

impl Report {
    /// Every case kept what the file promises.
    pub fn is_right(&self) -> bool {
        !self.all().any(CaseReport::is_broken)
    }

    fn all(&self) -> impl Iterator<Item = &CaseReport> {
        self.cases.iter().chain([&self.replay])
    }

    /// Remarks on what the comparison could not see.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for (end, why) in self.ends.iter().filter_map(|end| Some((end, end.varies?))) {
            notes.push(format!("{}: {why}; so it is counted, and contents are not compared", title(end)));
        }
        notes.dedup();
        notes
    }

    /// A readable matrix.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{}: {}, seed {}, {} crashes in {:.0} s",
            self.file,
            self.guarantee.as_str(),
            self.seed,
            self.cases.len(),
            self.elapsed.as_secs_f64()
        );
        let _ = writeln!(out, "  {}\n", self.input);
        let mut rows = vec![self.header()];
        let mut without = vec!["no crash".to_owned(), String::new()];
        without.extend(self.baseline.iter().map(|end| format!("{} found", end.tally.found)));
        without.push("at the end".to_owned());
        rows.push(without);
        rows.extend(self.all().map(|case| self.row(case)));
        out.push_str(&aligned(&rows));
        for case in self.all().filter(|case| case.is_broken()) {
            let _ = writeln!(out, "\n{} {}", case.name, case.stage.as_deref().unwrap_or_default());
            if let Some(crash) = case.crash {
                let _ = writeln!(out, "  {VARIABLE}={crash}");
            }
            if let Some(wrong) = case.what_is_wrong() {
                let _ = writeln!(out, "  {}", wrong.replace('\n', "\n  "));
            }
            for found in case.ends.iter().filter(|found| found.is_broken()) {
                let _ = writeln!(out, "  {}: {}", title(&found.end), found.text());
                for example in &found.tally.examples {
                    let _ = writeln!(out, "    {example}");
                }
            }
        }
        for note in self.notes() {
            let _ = writeln!(out, "\nnote: {note}");
        }
        let verdict = self.verdict();
        let _ = writeln!(out, "\n{verdict}");
        out
    }

    /// In one sentence.
    pub fn verdict(&self) -> String {
        let killed = self.cases.iter().filter(|case| case.was_killed()).count();
        match self.all().filter(|case| case.is_broken()).count() {
            0 => format!("every guarantee was kept in {killed} crashes and a replay"),
            broken => format!("a guarantee was broken in {broken} cases; --seed {} repeats it", self.seed),
        }
    }

    /// Titles of the matrix's columns.
    pub fn header(&self) -> Vec<String> {
        let mut header = vec!["killed at".to_owned(), "stage".to_owned()];
        header.extend(self.ends.iter().map(title));
        header.push("positions".to_owned());
        header
    }

    /// A row of the matrix.
    pub fn row(&self, case: &CaseReport) -> Vec<String> {
        let name = match case.fate {
            Fate::NotReached => format!("{} (not reached)", case.name),
            Fate::Killed if case.name == "commit-in-flight" => "commit-in-flight (answered)".to_owned(),
            _ => case.name.clone(),
        };
        let mut row = vec![name, case.stage.clone().unwrap_or_else(|| "all".to_owned())];
        row.extend(self.ends.iter().map(|end| case.at(end).map_or_else(|| "-".to_owned(), EndReport::text)));
        row.push(case.positions().0);
        row
    }

    /// One object.
    pub fn json(&self) -> Value {
        json!({
            "file": self.file,
            "guarantee": self.guarantee.as_str(),
            "seed": self.seed,
            "input": self.input,
            "servers": self.servers,
            "broken": !self.is_right(),
            "seconds": (self.elapsed.as_secs_f64() * 1000.0).round() / 1000.0,
            "without_crash": self.baseline.iter().map(end_json).collect::<Vec<_>>(),
            "crashes": self.cases.iter().map(case_json).collect::<Vec<_>>(),
            "replay": case_json(&self.replay),
            "notes": self.notes(),
        })
    }
}

/// `topic orders.priced`, `table orders`, `dead letters`.
pub fn title(end: &End) -> String {
    match end.kind {
        EndKind::Topic => format!("topic {}", end.name),
        EndKind::Table(_) => format!("table {}", end.name),
        EndKind::Ledger(_) => format!("ledger {}", end.name),
        EndKind::DeadLetters => end.name.clone(),
    }
}

fn case_json(case: &CaseReport) -> Value {
    json!({
        "point": case.name,
        "stage": case.stage,
        "crash": case.crash.map(|crash| crash.to_string()),
        "fate": case.fate.as_str(),
        "failure": case.failure,
        "positions_behind": case.behind,
        "stalled": case.stalled,
        "ends": case.ends.iter().map(end_json).collect::<Vec<_>>(),
        "broken": case.is_broken(),
    })
}

fn end_json(found: &EndReport) -> Value {
    let mut value = serde_json::to_value(&found.tally).unwrap_or_default();
    value["end"] = title(&found.end).into();
    value["may_lose"] = found.end.promise.may_lose.into();
    value["may_double"] = found.end.promise.may_double.into();
    value["most"] = serde_json::to_value(found.bound).unwrap_or_default();
    value["broken"] = found.is_broken().into();
    value
}

/// Cells in columns.
pub fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|r| r.get(column)).map(|c| c.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let line: String = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}  ")).collect();
        out.push_str("  ");
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::cases::Kill;
    use super::*;
    use crate::crash::Point;

    fn report(change: impl Fn(&mut CaseReport)) -> Report {
        let case = Case { kill: Kill::At(Point::AfterCommit), stage: Some("t".to_owned()) };
        let mut crashed = CaseReport::new(&case, Crash::at(Point::AfterCommit, 1));
        change(&mut crashed);
        Report {
            file: "t.toml".to_owned(),
            guarantee: Guarantee::ExactlyOnce,
            seed: 1,
            input: "3 records".to_owned(),
            servers: Vec::new(),
            ends: Vec::new(),
            baseline: Vec::new(),
            cases: vec![crashed],
            replay: CaseReport::replay(),
            elapsed: Duration::ZERO,
        }
    }

    #[test]
    fn a_crash_that_did_not_come_about_or_left_a_partition_to_nobody_proves_nothing() {
        let right = report(|_| {});
        assert!(right.is_right(), "{}", right.text());
        assert!(right.text().ends_with("every guarantee was kept in 1 crashes and a replay\n"), "{}", right.text());
        let broken = |change: fn(&mut CaseReport), word: &str| {
            let report = report(change);
            let (text, page) = (report.text(), report.html());
            assert!(!report.is_right() && text.contains(word), "{text}");
            assert!(page.contains(&format!("<td class=\"broken\">{word}</td>")), "{page}");
            assert!(text.ends_with("a guarantee was broken in 1 cases; --seed 1 repeats it\n"), "{text}");
        };
        broken(|case| case.fate = Fate::NotReached, "BROKEN: not reached");
        broken(|case| case.stalled = true, "BROKEN: stood still");
        broken(|case| case.behind = 2, "BROKEN: 2 behind");
        broken(|case| case.failure = Some("exit 5".to_owned()), "FAILED");
    }
}
