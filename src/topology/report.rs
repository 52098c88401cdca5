//! Findings as text, with the place in the file drawn under them.

use codespan_reporting::diagnostic::{Diagnostic, Label, Severity as Level};
use codespan_reporting::files::SimpleFile;
use codespan_reporting::term::termcolor::Buffer;
use codespan_reporting::term::{self, Config};

use super::finding::{Finding, Severity, code};

/// The findings of one file as text, each with its lines of the file; `colour` adds ANSI escapes. What was found to
/// be a secret is shown as stars.
pub fn render(text: &str, findings: &[Finding], colour: bool) -> String {
    let Some(first) = findings.first() else { return String::new() };
    let file = SimpleFile::new(first.file.as_str(), blank_secrets(text, findings));
    let mut buffer = if colour { Buffer::ansi() } else { Buffer::no_color() };
    for finding in findings {
        let level = match finding.severity {
            Severity::Error => Level::Error,
            Severity::Warning => Level::Warning,
            Severity::Note => Level::Note,
        };
        let (headline, rest) = match finding.message.split_once('\n') {
            Some((headline, rest)) => (headline, Some(rest.to_owned())),
            None => (finding.message.as_str(), None),
        };
        let help = finding.help.as_ref().map(|help| format!("help: {help}"));
        let diagnostic = Diagnostic::new(level)
            .with_code(finding.code)
            .with_message(headline)
            .with_label(Label::primary((), finding.span.clone()))
            .with_notes(rest.into_iter().chain(help).collect());
        // Writing to memory does not fail, and every span lies in the text.
        let _ = term::emit_to_write_style(&mut buffer, &Config::default(), &file, &diagnostic);
    }
    String::from_utf8_lossy(buffer.as_slice()).into_owned()
}

/// Stars in the place of every secret, byte for byte, so that spans stay right.
fn blank_secrets(text: &str, findings: &[Finding]) -> String {
    let mut text = text.to_owned();
    for finding in findings.iter().filter(|finding| finding.code == code::SECRET) {
        let secret = &text[finding.span.clone()];
        let stars: String = secret
            .chars()
            .map(|c| if matches!(c, '\n' | '\r' | '"' | '\'') { c.to_string() } else { "*".repeat(c.len_utf8()) })
            .collect();
        text.replace_range(finding.span.clone(), &stars);
    }
    text
}

/// "1 error, 2 warnings", or "ok".
pub fn summary(findings: &[Finding]) -> String {
    let of = |severity, word: &str| {
        let n = findings.iter().filter(|finding| finding.severity == severity).count();
        (n > 0).then(|| format!("{n} {word}{}", if n == 1 { "" } else { "s" }))
    };
    let parts: Vec<_> = [of(Severity::Error, "error"), of(Severity::Warning, "warning"), of(Severity::Note, "note")]
        .into_iter()
        .flatten()
        .collect();
    if parts.is_empty() { "ok".to_owned() } else { parts.join(", ") }
}
