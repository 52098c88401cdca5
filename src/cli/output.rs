//! Results on stdout.

use std::fmt;
use std::io::Write;
use std::path::Path;

use crate::error::Failure;

/// Writes a result. A reader that went away (`| head`) is no error, and no reason to panic as `print!` would.
pub fn write(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Writes a report to a file.
pub fn save(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|e| Failure::refused(format!("cannot write {}: {e}", path.display())))
}

/// What the user should know besides, on stderr.
pub fn warn(warnings: impl IntoIterator<Item = String>) {
    warnings.into_iter().for_each(|warning| eprintln!("warning: {warning}"));
}

/// Rows as a table, each column as wide as its widest cell.
pub fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let _ = fmt::Write::write_fmt(&mut line, format_args!("{cell:<width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
