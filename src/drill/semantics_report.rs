//! The comparison of guarantees, as text, as JSON and as a page.

use std::fmt::Write;

use serde_json::{Value, json};

use super::effects::Effects;
use super::report::aligned;
use super::semantics::{Chapter, Row, Semantics};
use crate::scratch::page::{escaped, page};

/// A chapter, its title for a record, and the names of its first columns.
type Part = (Chapter, fn(&str) -> String, [&'static str; 4]);

const PARTS: [Part; 3] = [
    (
        Chapter::Crash,
        |at| format!("killed at {at} and started again"),
        ["guarantee", "effect", "kept once by", "killed"],
    ),
    (Chapter::Sends, |at| format!("{at} sent twice by its producer"), ["second send", "effect", "kept once by", ""]),
    (
        Chapter::AutoCommit,
        |at| format!("a client that commits by itself, killed at {at}"),
        ["client", "effect", "", "it had"],
    ),
];

impl Semantics {
    /// Everything was as expected.
    pub fn is_right(&self) -> bool {
        self.rows.iter().all(Row::is_right)
    }

    fn verdict(&self) -> String {
        match self.rows.iter().filter(|row| !row.is_right()).count() {
            0 => "everything as expected".to_owned(),
            wrong => format!("{wrong} not as expected"),
        }
    }

    fn title(&self) -> String {
        let seconds = self.elapsed.as_secs_f64();
        format!("{}: at {}, {} observations in {seconds:.0} s", self.file, self.at, self.rows.len())
    }

    /// Tables of what was observed beside what was expected.
    pub fn text(&self) -> String {
        let mut out = format!("{}\n", self.title());
        for (chapter, title, names) in PARTS {
            let _ = writeln!(out, "\n{}", title(&self.at));
            let mut lines = vec![header(names)];
            lines.extend(self.rows.iter().filter(|row| row.chapter == chapter).map(cells));
            out.push_str(&aligned(&without_empty_columns(lines)));
        }
        let _ = writeln!(out, "\n{}", self.verdict());
        out
    }

    /// One object.
    pub fn json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            json!({
                "chapter": match row.chapter {
                    Chapter::Crash => "crash",
                    Chapter::Sends => "second-send",
                    Chapter::AutoCommit => "auto-commit",
                },
                "how": row.how,
                "end": row.end,
                "by": row.by,
                "killed": row.killed,
                "expected": effects(&row.expected),
                "observed": effects(&row.observed),
                "skipped": row.skipped,
                "as_expected": row.is_right(),
            })
        });
        json!({
            "file": self.file,
            "seed": self.seed,
            "servers": self.servers,
            "at": self.at,
            "rows": rows.collect::<Vec<_>>(),
            "broken": !self.is_right(),
        })
    }

    /// A page that needs nothing else.
    pub fn html(&self) -> String {
        let mut out = format!(
            "<p class=\"verdict\">{}</p>\n<p>{}; {}.</p>\n",
            escaped(&self.verdict()),
            escaped(&self.title()),
            escaped(&self.servers.join(", "))
        );
        for (chapter, title, names) in PARTS {
            let _ = writeln!(out, "<h2>{}</h2>\n<table><thead><tr>", escaped(&title(&self.at)));
            for cell in header(names) {
                let _ = write!(out, "<th>{}</th>", escaped(&cell));
            }
            out.push_str("</tr></thead><tbody>\n");
            for row in self.rows.iter().filter(|row| row.chapter == chapter) {
                let class = match row {
                    row if !row.is_right() => "broken",
                    row if row.observed.other.is_empty() => "right",
                    _ => "allowed",
                };
                let _ = write!(out, "<tr class=\"{class}\">");
                for cell in cells(row) {
                    let _ = write!(out, "<td>{}</td>", escaped(&cell));
                }
                out.push_str("</tr>\n");
            }
            out.push_str("</tbody></table>\n");
        }
        out.push_str(
            "<p>Green: each record had its effect once. Yellow: lost or doubled, as this way of doing it must. Red: not \
             what was expected.</p>\n",
        );
        page("semel drill", &self.file, &out)
    }
}

fn header(names: [&str; 4]) -> Vec<String> {
    let names = names.into_iter().chain(["expected", "observed", "lost", "doubled", "right", "skipped"]);
    names.map(str::to_owned).collect()
}

fn cells(row: &Row) -> Vec<String> {
    let observed = match row.is_right() {
        true => row.observed.text(),
        false => format!("BROKEN: {}", row.observed.text()),
    };
    let counts = [row.observed.lost(), row.observed.doubled(), row.observed.right(), row.skipped as usize];
    let killed = if row.chapter == Chapter::Sends { String::new() } else { row.killed.clone() };
    let mut cells = vec![row.how.clone(), row.end.clone(), row.by.to_owned(), killed, row.expected.text(), observed];
    cells.extend(counts.map(|count| count.to_string()));
    cells
}

/// A column that says nothing is left out.
fn without_empty_columns(mut lines: Vec<Vec<String>>) -> Vec<Vec<String>> {
    let columns = lines.first().map_or(0, Vec::len);
    for column in (0..columns).rev() {
        if lines.iter().all(|line| line[column].is_empty()) {
            lines.iter_mut().for_each(|line| drop(line.remove(column)));
        }
    }
    lines
}

fn effects(effects: &Effects) -> Value {
    json!({
        "text": effects.text(),
        "lost": effects.lost(),
        "doubled": effects.doubled(),
        "right": effects.right(),
    })
}
