//! House rules that no compiler checks: layers point one way, files stay small, nothing unfinished, no machine's paths.

use std::fs;
use std::path::{Path, PathBuf};

const LONGEST_FILE: usize = 600;
const LONGEST_LINE: usize = 120;

/// The modules of each layer, the lowest first. A module names its own layer and those before it.
const LAYERS: &[(&str, &[&str])] = &[
    (
        "pure",
        &[
            "chunk", "clock", "commit", "decimal", "error", "expr", "ids", "json", "operator", "record", "reject",
            "topology",
        ],
    ),
    ("edge", &["crash", "kafka", "store", "sink", "dlq", "inspect"]),
    ("run", &["audit", "runtime", "observe", "testing", "cluster", "quickstart", "scratch", "drill", "bench"]),
    ("shell", &["cli"]),
];

/// What the pure layer does not name: clients, files, the clock.
const IMPURE: &[&str] = &["rdkafka", "tokio", "tokio_postgres", "std::fs", "std::net", "SystemTime", "Instant::now"];

/// Split so that this file passes its own checks.
const UNFINISHED: &[&str] =
    &[concat!("todo", "!("), concat!("unimplemented", "!("), concat!("#[", "ignore"), concat!("dbg", "!(")];
const MACHINE_PATHS: &[&str] = &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];
const REGISTRIES: &[&str] = &[
    concat!("repo1.", "maven"),
    concat!("repo.", "maven"),
    concat!("index.", "crates.io"),
    concat!("static.", "crates.io"),
    concat!("registry.", "npmjs"),
    concat!("deb.", "debian"),
    concat!("registry-1.", "docker"),
];

#[test]
fn layers_point_one_way() {
    let mut wrong = Vec::new();
    for (path, text) in rust_files("src") {
        let Some(own) = layer_of(module_of(&path)) else { continue };
        for (number, line) in code_lines(&text) {
            for module in named_modules(line, depth_of(&path)) {
                if layer_of(module).is_some_and(|layer| layer > own) {
                    wrong.push(format!("{}:{number}: {} names {module}", path.display(), LAYERS[own].0));
                }
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn every_module_has_a_layer() {
    let known = |module: &str| layer_of(module).is_some() || ["lib", "main"].contains(&module);
    let files = rust_files("src");
    let mut wrong: Vec<String> =
        files.iter().map(|(path, _)| module_of(path)).filter(|m| !known(m)).map(str::to_owned).collect();
    wrong.dedup();
    assert_none(&wrong);
}

#[test]
fn only_src_kafka_names_the_client() {
    let mut wrong = Vec::new();
    for (path, text) in rust_files("src") {
        for (number, line) in code_lines(&text) {
            let names = ["rdkafka::", "rdkafka_sys"].iter().any(|word| line.contains(word));
            if names && module_of(&path) != "kafka" {
                wrong.push(format!("{}:{number}", path.display()));
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn pure_modules_touch_no_client_file_or_clock() {
    let mut wrong = Vec::new();
    for (path, text) in rust_files("src") {
        if layer_of(module_of(&path)) != Some(0) || path.ends_with("clock.rs") || is_tests(&path) {
            continue;
        }
        for (number, line) in code_lines(&text).take_while(|(_, line)| !line.starts_with("mod tests")) {
            let found = IMPURE.iter().filter(|word| has_word(line, word));
            wrong.extend(found.map(|word| format!("{}:{number}: {word}", path.display())));
        }
    }
    assert_none(&wrong);
}

#[test]
fn files_and_lines_stay_short() {
    let mut wrong = Vec::new();
    for (path, text) in all_rust_files() {
        let length = text.lines().count();
        if length > LONGEST_FILE {
            wrong.push(format!("{}: {length} lines, at most {LONGEST_FILE}", path.display()));
        }
        // Text in quotes is as long as it is, and the formatter leaves comments to their writers.
        let exempt = |line: &str| line.contains('"') || line.trim_start().starts_with("//");
        let long = |line: &str| line.chars().count() > LONGEST_LINE && !exempt(line);
        for (number, line) in numbered(&text).filter(|(_, line)| long(line)) {
            wrong.push(format!("{}:{number}: {} characters", path.display(), line.chars().count()));
        }
    }
    assert_none(&wrong);
}

#[test]
fn nothing_is_unfinished_or_left_out() {
    let mut wrong = Vec::new();
    for (path, text) in all_rust_files() {
        for (number, line) in numbered(&text) {
            let found = UNFINISHED.iter().filter(|word| line.contains(**word));
            wrong.extend(found.map(|word| format!("{}:{number}: {word}", path.display())));
        }
    }
    assert_none(&wrong);
}

#[test]
fn tests_wait_for_what_they_mean_instead_of_sleeping() {
    let sleep = concat!("sleep", "(");
    let wrong: Vec<String> = rust_files("tests")
        .iter()
        .filter(|(path, _)| !path.ends_with("support.rs"))
        .flat_map(|(path, text)| {
            code_lines(text)
                .filter(|(_, line)| line.contains(sleep))
                .map(move |(number, _)| format!("{}:{number}: use support::eventually", path.display()))
        })
        .collect();
    assert_none(&wrong);
}

#[test]
fn no_file_knows_a_machine_or_a_registry() {
    let mut wrong = Vec::new();
    for (path, text) in text_files() {
        for (number, line) in numbered(&text) {
            let found = MACHINE_PATHS.iter().chain(REGISTRIES).filter(|word| line.contains(**word));
            wrong.extend(found.map(|word| format!("{}:{number}: {word}", path.display())));
        }
    }
    assert_none(&wrong);
}

#[test]
fn no_line_ends_in_white_space_and_files_end_in_one_newline() {
    let mut wrong = Vec::new();
    // Expected outputs are compared byte for byte: theirs are not ours to tidy.
    for (path, text) in text_files().into_iter().filter(|(path, _)| path.extension().is_none_or(|x| x != "txt")) {
        let ends = numbered(&text).filter(|(_, line)| line.ends_with([' ', '\t']));
        wrong.extend(ends.map(|(number, _)| format!("{}:{number}: white space at the end", path.display())));
        if !text.is_empty() && (!text.ends_with('\n') || text.ends_with("\n\n")) {
            wrong.push(format!("{}: does not end in one newline", path.display()));
        }
    }
    assert_none(&wrong);
}

#[test]
fn every_shipped_topology_has_tests() {
    let wrong: Vec<String> = text_files()
        .iter()
        .filter(|(path, _)| path.starts_with("topologies") && path.extension().is_some_and(|x| x == "toml"))
        .filter(|(_, text)| !text.lines().any(|line| line.trim() == "[[tests]]"))
        .map(|(path, _)| format!("{}: no [[tests]]", path.display()))
        .collect();
    assert_none(&wrong);
}

#[test]
fn modules_and_public_types_say_what_they_are() {
    let mut wrong = Vec::new();
    for (path, text) in rust_files("src") {
        if !text.starts_with("//!") && !path.ends_with("main.rs") && !is_tests(&path) {
            wrong.push(format!("{}: does not begin with //!", path.display()));
        }
        let mut documented = false;
        for (number, line) in numbered(&text) {
            let declares = ["pub struct ", "pub enum ", "pub trait "].iter().any(|start| line.starts_with(start));
            if declares && !documented && !self_evident(&path, line) {
                wrong.push(format!("{}:{number}: {line}", path.display()));
            }
            documented = line.starts_with("///") || (documented && line.starts_with(['#', ' ', ')', ']']));
        }
    }
    assert_none(&wrong);
}

/// Arguments of a command are documented by its help, and the spec and the plan are the file's own words.
fn self_evident(path: &Path, line: &str) -> bool {
    line.starts_with("pub struct Args") || path.ends_with("topology/spec.rs") || path.ends_with("topology/plan.rs")
}

#[track_caller]
fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n  {}", wrong.join("\n  "));
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// `src/kafka/admin.rs` and `src/kafka.rs` belong to `kafka`.
fn module_of(path: &Path) -> &str {
    let first = path.iter().nth(1).and_then(|part| part.to_str()).unwrap_or_default();
    first.strip_suffix(".rs").unwrap_or(first)
}

/// `tests.rs` and `error_tests.rs`, which stand beside the file that they test.
fn is_tests(path: &Path) -> bool {
    path.to_string_lossy().ends_with("tests.rs")
}

/// How many modules deep a file is: `src/chunk.rs` and `src/kafka/mod.rs` 1, `src/kafka/admin.rs` 2.
fn depth_of(path: &Path) -> usize {
    path.iter().count() - 1 - usize::from(path.ends_with("mod.rs"))
}

fn layer_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|(_, modules)| modules.contains(&module))
}

/// The crate's modules that a line names by `crate::x`, `crate::{x, y}`, or by as many `super::` as lead to the root.
fn named_modules(line: &str, depth: usize) -> Vec<&str> {
    let up = "super::".repeat(depth);
    let mut modules = Vec::new();
    for start in ["crate::", up.as_str()] {
        for (at, _) in line.match_indices(start) {
            let rest = &line[at + start.len()..];
            match rest.strip_prefix('{') {
                Some(group) => modules.extend(group.split([',', '}']).map(|part| first_word(part.trim()))),
                None => modules.push(first_word(rest)),
            }
        }
    }
    modules
}

fn first_word(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
}

/// `word` stands in the line on its own, not as a part of another identifier.
fn has_word(line: &str, word: &str) -> bool {
    let inside = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let (before, after) = (line[..at].chars().next_back(), line[at + word.len()..].chars().next());
        !before.is_some_and(inside) && !after.is_some_and(inside)
    })
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(n, line)| (n + 1, line))
}

/// Lines without those that are comments only.
fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    numbered(text).filter(|(_, line)| !line.trim_start().starts_with("//"))
}

fn all_rust_files() -> Vec<(PathBuf, String)> {
    ["src", "tests", "benches"].iter().flat_map(|folder| rust_files(folder)).collect()
}

fn rust_files(folder: &str) -> Vec<(PathBuf, String)> {
    let files: Vec<_> = text_files()
        .into_iter()
        .filter(|(p, _)| p.starts_with(folder) && p.extension().is_some_and(|x| x == "rs"))
        .collect();
    assert!(!files.is_empty(), "no Rust file under {folder}");
    files
}

/// All of the repository's own text, by path from its root. Snapshots and the lock file are written by tools.
fn text_files() -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            let skipped = ["target", ".git", "Cargo.lock"].contains(&name.as_str()) || name.ends_with(".snap");
            if skipped {
                continue;
            }
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else if let Ok(text) = fs::read_to_string(&path) {
                files.push((path.strip_prefix(root()).unwrap().to_owned(), text));
            }
        }
    }
    files.sort();
    files
}
