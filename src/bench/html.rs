//! A benchmark's report as one page that needs nothing else.

use std::fmt::Write;

use super::plot::plots;
use super::report::Report;
use crate::error::Failure;
use crate::scratch::page::{escaped, page};

impl Report {
    /// The page, plots in it.
    pub fn html(&self) -> Result<String, Failure> {
        let mut out = format!("<p class=\"verdict\">{}</p>\n", escaped(&self.verdict()));
        let _ = writeln!(out, "<p>Stage {}, {}.</p>\n<table>", escaped(&self.stage), self.kind);
        for (name, value) in self.conditions() {
            let _ = writeln!(out, "<tr><th>{}</th><td>{}</td></tr>", escaped(&name), escaped(&value));
        }
        out.push_str("</table>\n");
        for plot in plots(self)? {
            let _ = writeln!(out, "<h2>{}</h2>\n<figure>{}</figure>", escaped(&plot.title), plot.svg);
        }
        out.push_str("<h2>Throughput</h2>\n");
        table(&mut out, &self.throughput_rows());
        let latency = self.latency_rows();
        if !latency.is_empty() {
            out.push_str(
                "<h2>Latency</h2>\n<p>From before a record is sent until a reader with isolation.level=read_committed has \
                 its output.</p>\n",
            );
            table(&mut out, &latency);
        }
        Ok(page("semel bench", &self.file, &out))
    }
}

fn table<const N: usize>(out: &mut String, rows: &[[String; N]]) {
    out.push_str("<table>\n");
    for (number, row) in rows.iter().enumerate() {
        let cell = if number == 0 { "th" } else { "td" };
        let cells = row.iter().map(|text| format!("<{cell}>{}</{cell}>", escaped(text)));
        let _ = writeln!(out, "<tr>{}</tr>", cells.collect::<String>());
    }
    out.push_str("</table>\n");
}
