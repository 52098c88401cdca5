//! What the quick start found, for people and for programs.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::compare::Comparison;
use super::topics::Standing;
use super::{FILE, OUTPUT, SOURCE};
use crate::observe::progress::grouped;
use crate::topology::plan::{Edge, EdgeEnd};

/// What came of a run.
#[derive(Debug)]
pub struct Report {
    /// A line a server: what it is.
    pub servers: Vec<String>,
    /// Addresses of broker and database, if they stay up.
    pub kept: Option<(String, String)>,
    /// Records produced.
    pub records: u64,
    /// Records of the source that the job's committed positions have behind them.
    pub read: u64,
    /// Records in the output topic, for a reader with `isolation.level=read_committed`.
    pub out: u64,
    /// Dead letters by node and reason.
    pub rejected: BTreeMap<(String, String), u64>,
    /// Records that the topology filters.
    pub cancelled: u64,
    /// Records that were sent twice on purpose, counted from their second copy on.
    pub repeated: u64,
    /// Records that were sent after a higher version of their order.
    pub late: u64,
    pub rows: u64,
    /// Of them, marked as deleted.
    pub deleted: u64,
    /// Updates that reached their row.
    pub written: u64,
    /// Updates whose batch held a higher version of their row.
    pub superseded: u64,
    /// Updates that the version guard ignored.
    pub stale: u64,
    /// Of the same version with other content, ignored as well.
    pub ties: u64,
    /// Commits of all stages.
    pub transactions: u64,
    pub standings: Vec<Standing>,
    pub comparison: Comparison,
    pub edges: Vec<Edge>,
    /// From the job's start to its end.
    pub job: Duration,
    /// All of it, servers included.
    pub elapsed: Duration,
}

impl Report {
    /// Nothing lost, doubled or different, and every position at its end.
    pub fn is_right(&self) -> bool {
        self.comparison.is_right() && self.behind() == 0
    }

    /// Partitions whose committed position is not their end.
    fn behind(&self) -> u64 {
        self.standings.iter().filter(|standing| !standing.is_at_end()).count() as u64
    }

    fn rejects(&self) -> u64 {
        self.rejected.values().sum()
    }

    /// One object.
    pub fn json(&self) -> Value {
        let rejected: Vec<Value> = self
            .rejected
            .iter()
            .map(|((node, reason), count)| json!({ "node": node, "reason": reason, "count": count }))
            .collect();
        let positions: Vec<Value> = self
            .standings
            .iter()
            .map(|s| {
                json!({
                    "group": s.group, "topic": &*s.partition.topic, "partition": s.partition.partition,
                    "position": s.position.map(|p| p.0), "end": s.end.0,
                })
            })
            .collect();
        let edges: Vec<Value> = self
            .edges
            .iter()
            .map(|e| {
                json!({
                    "stage": e.stage, "from": end(&e.from), "to": end(&e.to), "guarantee": e.guarantee.as_str(),
                    "by": e.by,
                })
            })
            .collect();
        json!({
            "in": self.read,
            "out": self.out,
            "rejected": self.rejects(),
            "lost": self.comparison.lost,
            "doubled": self.comparison.doubled,
            "different": self.comparison.different,
            "rows": self.rows,
            "deleted_rows": self.deleted,
            "stale": self.stale,
            "dead_letters": self.rejects(),
            "rejects": rejected,
            "produced": self.records,
            "filtered": self.cancelled,
            "sent_twice": self.repeated,
            "sent_late": self.late,
            "updates_applied": self.written,
            "updates_superseded": self.superseded,
            "ties": self.ties,
            "transactions": self.transactions,
            "positions": positions,
            "positions_behind": self.behind(),
            "examples": self.comparison.examples,
            "edges": edges,
            "servers": self.servers,
            "job_seconds": seconds(self.job),
            "seconds": seconds(self.elapsed),
        })
    }

    /// The summary. `program` is how the user calls semel.
    pub fn text(&self, program: &str) -> String {
        let mut out = String::new();
        self.records(&mut out);
        self.table(&mut out);
        self.positions(&mut out);
        self.verdict(&mut out);
        self.guarantees(&mut out);
        self.next(&mut out, program);
        out
    }

    fn records(&self, out: &mut String) {
        let speed = self.read as f64 / self.job.as_secs_f64().max(0.001);
        let _ = writeln!(
            out,
            "\n{FILE} ran to its end in {:.1} s: {} records/s, {} transactions, Kafka and Postgres stage together\n",
            self.job.as_secs_f64(),
            grouped(speed as u64),
            grouped(self.transactions),
        );
        let mut line = |count: u64, what: &str| counted(out, count, what);
        line(self.read, &format!("records in, from topic {SOURCE}"));
        line(self.late, "  of them sent after a higher version of their order");
        line(self.repeated, "  of them sent a second time");
        line(self.out, &format!("records out, to topic {OUTPUT} (read_committed)"));
        line(self.cancelled, "filtered: the order was cancelled");
        for ((node, reason), count) in &self.rejected {
            line(*count, &format!("rejected to topic orders.dead-letters by {node}: {reason}"));
        }
    }

    fn table(&self, out: &mut String) {
        let mut line = |count: u64, what: &str| counted(out, count, what);
        line(self.rows, "rows in table orders, one an order");
        line(self.deleted, "  of them marked as deleted");
        line(self.written, "updates written to them");
        line(self.superseded, "updates passed over: their batch held a higher version");
        line(self.stale, "stale updates ignored by the version guard");
        if self.ties > 0 {
            line(self.ties, "updates of an equal version with other content, ignored as well");
        }
    }

    fn positions(&self, out: &mut String) {
        let mut groups: Vec<(&str, &str, u64, u64)> = Vec::new();
        for s in &self.standings {
            let behind = u64::from(!s.is_at_end());
            match groups.last_mut().filter(|(group, ..)| *group == s.group) {
                Some((_, _, partitions, late)) => (*partitions, *late) = (*partitions + 1, *late + behind),
                None => groups.push((&s.group, &s.partition.topic, 1, behind)),
            }
        }
        let _ = writeln!(out, "\npositions");
        for (group, topic, partitions, behind) in groups {
            let at = if behind == 0 { "at the end of".to_owned() } else { format!("{behind} not at the end of") };
            let _ = writeln!(out, "  group {group:<20}  {at} all {partitions} partitions of {topic}");
        }
    }

    fn verdict(&self, out: &mut String) {
        let c = &self.comparison;
        let _ = writeln!(
            out,
            "\ncompared with an independent fold of the records: {} lost, {} doubled, {} different",
            c.lost, c.doubled, c.different
        );
        for example in &c.examples {
            let _ = writeln!(out, "  {example}");
        }
    }

    fn guarantees(&self, out: &mut String) {
        let width = |end_of: fn(&Edge) -> &EdgeEnd| {
            self.edges.iter().map(|e| end(end_of(e)).chars().count()).max().unwrap_or(0)
        };
        let (from, to) = (width(|e| &e.from), width(|e| &e.to));
        let _ = writeln!(out, "\nguarantee of each edge");
        for e in &self.edges {
            let _ = writeln!(out, "  {:<from$} → {:<to$}  {}", end(&e.from), end(&e.to), e.guarantee.as_str());
        }
    }

    fn next(&self, out: &mut String, program: &str) {
        let _ = writeln!(out, "\nwhat to try next");
        let file = |command: &str| format!("{program} {command} {FILE}");
        let mut commands = vec![
            (file("explain"), "the plan, and why each edge has its guarantee"),
            (file("test"), "the file's own tests, without a broker"),
        ];
        match &self.kept {
            None => commands.push((format!("{program} quickstart --keep"), "again, and leave broker and database up")),
            Some((brokers, url)) => {
                commands.push((format!("export KAFKA_BROKERS={brokers}"), ""));
                commands.push((format!("export DATABASE_URL={url}"), ""));
                commands.push(("psql \"$DATABASE_URL\" -c 'TABLE orders LIMIT 5'".to_owned(), "look at the table"));
                commands.push((file("run"), "run the job; Ctrl-C stops it in good order"));
                commands.push((format!("{program} dev down"), "stop broker and database, throw their data away"));
            }
        }
        let lengths = commands.iter().filter(|(_, what)| !what.is_empty()).map(|(command, _)| command.chars().count());
        let width = lengths.max().unwrap_or(0);
        for (command, what) in commands {
            let line = format!("  {command:<width$}  {what}");
            let _ = writeln!(out, "{}", line.trim_end());
        }
    }
}

fn counted(out: &mut String, count: u64, what: &str) {
    let _ = writeln!(out, "  {:>9}  {what}", grouped(count));
}

fn end(end: &EdgeEnd) -> String {
    match end {
        EdgeEnd::Topic(name) => format!("topic {name}"),
        EdgeEnd::Node(name) => name.clone(),
        EdgeEnd::Table(name) => format!("table {name}"),
        EdgeEnd::Rejects => "rejects".to_owned(),
    }
}

fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}
