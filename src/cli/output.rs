//! Results on stdout.

use std::io::Write;

/// Writes a result. A reader that went away (`| head`) is no error, and no reason to panic as `print!` would.
pub fn write(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
