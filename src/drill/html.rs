//! A drill's report as one page that needs nothing else.

use std::fmt::Write;

use super::report::{CaseReport, EndReport, Report, title};
use crate::crash::VARIABLE;
use crate::scratch::page::{escaped, page};

impl Report {
    /// The page.
    pub fn html(&self) -> String {
        let verdict = self.verdict();
        let mut out = format!(
            "<p class=\"verdict\">{verdict}</p>\n<p>{guarantee}; seed {seed}; {input}; {count} crashes in {seconds:.0} s; \
             {servers}.</p>\n",
            guarantee = self.guarantee.as_str(),
            seed = self.seed,
            input = escaped(&self.input),
            count = self.cases.len(),
            seconds = self.elapsed.as_secs_f64(),
            servers = escaped(&self.servers.join(", ")),
        );
        self.matrix(&mut out);
        out.push_str(
            "<p>Green: as in the run without a crash. Yellow: other, as this guarantee allows. Red: a promise was broken. \
             Replay: the whole input once more; topics get the same again, tables are as they were.</p>\n",
        );
        for case in self.cases.iter().chain([&self.replay]).filter(|case| case.is_broken()) {
            broken(&mut out, case);
        }
        for note in self.notes() {
            let _ = writeln!(out, "<p>Note: {}.</p>", escaped(&note));
        }
        page("semel drill", &self.file, &out)
    }

    fn matrix(&self, out: &mut String) {
        out.push_str("<table><thead><tr>");
        for cell in self.header() {
            let _ = write!(out, "<th>{}</th>", escaped(&cell));
        }
        out.push_str("</tr></thead><tbody>\n<tr><td>no crash</td><td></td>");
        for end in &self.baseline {
            let _ = write!(out, "<td>{} found</td>", end.tally.found);
        }
        out.push_str("<td>at the end</td></tr>\n");
        for case in self.cases.iter().chain([&self.replay]) {
            let row = self.row(case);
            let _ = write!(out, "<tr><td>{}</td><td>{}</td>", escaped(&row[0]), escaped(&row[1]));
            for (end, text) in self.ends.iter().zip(&row[2..]) {
                let class = match case.at(end) {
                    None => "none",
                    Some(found) if found.is_broken() => "broken",
                    Some(found) if found.tally.is_right() => "right",
                    Some(_) => "allowed",
                };
                let _ = write!(out, "<td class=\"{class}\">{}</td>", escaped(text));
            }
            let (positions, is_broken) = case.positions();
            let class = if is_broken { "broken" } else { "right" };
            let _ = writeln!(out, "<td class=\"{class}\">{}</td></tr>", escaped(&positions));
        }
        out.push_str("</tbody></table>\n");
    }
}

fn broken(out: &mut String, case: &CaseReport) {
    let _ = writeln!(out, "<h2>{} {}</h2>", escaped(&case.name), escaped(case.stage.as_deref().unwrap_or_default()));
    if let Some(crash) = case.crash {
        let _ = writeln!(out, "<p><code>{VARIABLE}={crash}</code></p>");
    }
    if let Some(wrong) = case.what_is_wrong() {
        let _ = writeln!(out, "<pre>{}</pre>", escaped(&wrong));
    }
    for found in case.ends.iter().filter(|found| found.is_broken()) {
        let EndReport { end, tally, .. } = found;
        let examples = tally.examples.join("\n");
        let _ = writeln!(out, "<p>{}: {}</p><pre>{}</pre>", escaped(&title(end)), found.text(), escaped(&examples));
    }
}
