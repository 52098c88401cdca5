//! The tables of `docs/reference.md` are made of the declarations in the code.

use std::fmt::Write;

use semel::reject::REASONS;
use semel::topology::finding::FINDINGS;
use semel::topology::keys::SECTIONS;

use crate::golden::golden;

#[test]
fn the_reference_holds_every_key_finding_and_reason() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference.md");
    let mut text = std::fs::read_to_string(path).unwrap();
    for (name, table) in [("keys", keys()), ("findings", pairs(FINDINGS)), ("reasons", pairs(REASONS))] {
        let (begin, end) =
            (format!("<!-- {name}: made by tests/it/reference.rs -->\n"), format!("<!-- end of {name} -->\n"));
        let start = text.find(&begin).unwrap_or_else(|| panic!("no {begin}")) + begin.len();
        let stop = text.find(&end).unwrap_or_else(|| panic!("no {end}"));
        text.replace_range(start..stop, &format!("\n{table}\n"));
    }
    golden("docs/reference.md", &text);
}

fn keys() -> String {
    let mut out = String::new();
    for section in SECTIONS {
        let _ =
            write!(out, "### {}\n\n{}\n\n| key | takes | default | |\n|---|---|---|---|\n", section.title, section.doc);
        for key in section.keys {
            let default = match key.default {
                "" => String::new(),
                plain if plain.contains(['`', ' ']) || plain == "required" => plain.to_owned(),
                value => format!("`{value}`"),
            };
            let _ = writeln!(out, "| `{}` | {} | {default} | {} |", key.name, key.takes, key.doc);
        }
        out.push('\n');
    }
    out.trim_end().to_owned() + "\n"
}

fn pairs(pairs: &[(&str, &str)]) -> String {
    let mut out = String::from("| slug | means |\n|---|---|\n");
    for (slug, means) in pairs {
        let _ = writeln!(out, "| `{slug}` | {} |", means.replace('|', "\\|"));
    }
    out
}
