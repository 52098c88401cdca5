//! Reports as pages that need nothing else.

const STYLE: &str = include_str!("page.css");

/// A page about a topology file that needs nothing else.
pub fn page(command: &str, file: &str, body: &str) -> String {
    let file = escaped(file);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{command} {file}</title>\
         <style>{STYLE}</style></head><body>\n<h1>{command} <code>{file}</code></h1>\n{body}</body></html>\n"
    )
}

/// Text that is no markup.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
