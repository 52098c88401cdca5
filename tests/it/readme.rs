//! The README tells the truth: its commands run, what it shows of them is what they print, its topology is the one that
//! ships, and its guarantees are those of the plan.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use semel::topology::load;
use semel::topology::plan::Plan;

use crate::quickstart::DownAtTheEnd;
use crate::support::{self, SEMEL};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn file(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The fenced blocks of a language.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let fence = format!("```{language}\n");
    text.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

/// Commands of the README with what is shown below each.
fn commands(text: &str) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    for block in blocks(text, "console") {
        for line in block.lines() {
            match line.strip_prefix("$ ") {
                Some(command) => commands.push((command.to_owned(), String::new())),
                None => {
                    let (_, shown) = commands.last_mut().expect("a console block begins with a command");
                    shown.push_str(line);
                    shown.push('\n');
                }
            }
        }
    }
    commands
}

/// Runs a line of the README as a shell would, with the binary of this build and servers of the test's own.
fn run(home: &Path, exports: &str, line: &str) -> Output {
    let folder = Path::new(SEMEL).parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command.arg("-ec").arg(format!("{exports}\n{line}")).current_dir(root()).stdin(Stdio::null());
    command.env("PATH", path).env("XDG_RUNTIME_DIR", home).env("XDG_STATE_HOME", home.join("state"));
    command.env("COLUMNS", "100").env_remove("KAFKA_BROKERS").env_remove("DATABASE_URL");
    command.output().unwrap()
}

/// What does not depend on a machine is shown as it is printed.
fn is_stable(command: &str) -> bool {
    ["semel check ", "semel explain ", "semel test "].iter().any(|start| command.starts_with(start))
}

#[test]
fn the_two_first_commands_are_those_of_ci_and_of_this_package() {
    let readme = file("README.md");
    let cargo: Vec<&str> = readme.lines().filter(|line| line.starts_with("cargo ")).collect();
    assert_eq!(cargo, ["cargo run --release -- quickstart", "cargo test"]);
    assert!(file(".ci/run").lines().any(|line| line == "cargo test"), ".ci/run tests something else");
    assert!(
        file("Cargo.toml").lines().any(|line| line == "default-run = \"semel\""),
        "`cargo run` runs something else"
    );
}

#[test]
fn what_the_readme_shows_is_what_the_commands_print() {
    let home = tempfile::tempdir_in("/tmp").unwrap();
    let readme = file("README.md");
    let stable: Vec<_> = commands(&readme).into_iter().filter(|(command, _)| is_stable(command)).collect();
    assert!(stable.len() >= 3, "{stable:?}");
    for (command, shown) in stable {
        let output = run(home.path(), "", &format!("{command} 2>&1"));
        assert_eq!(String::from_utf8(output.stdout).unwrap().trim_end(), shown.trim_end(), "$ {command}");
        assert_eq!(output.status.code(), Some(0), "$ {command}");
    }
}

#[test]
fn the_commands_that_need_servers_run_in_their_order() {
    if !support::online("the_commands_that_need_servers_run_in_their_order") {
        return;
    }
    let home = tempfile::tempdir_in("/tmp").unwrap();
    let _down = DownAtTheEnd(home.path());
    // What `eval` sets in a shell holds for the lines after it.
    let mut exports = String::new();
    let mut ran = 0;
    for (line, _) in commands(&file("README.md")) {
        if is_stable(&line) || !line.contains("semel ") {
            continue;
        }
        let inner = line.strip_prefix("eval \"$(").and_then(|rest| rest.strip_suffix(")\""));
        let output = run(home.path(), &exports, inner.unwrap_or(&line));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "$ {line}\n{said}");
        if inner.is_some() {
            exports = String::from_utf8(output.stdout).unwrap();
        }
        ran += 1;
    }
    assert!(ran >= 4, "{ran} commands");
    let status = run(home.path(), "", "semel dev status");
    assert!(String::from_utf8_lossy(&status.stdout).contains("is not up"), "the README leaves servers running");
}

#[test]
fn the_topology_of_the_readme_is_the_one_that_ships() {
    let shipped = file("topologies/orders.toml");
    let shown = blocks(&file("README.md"), "toml");
    let [shown] = &shown[..] else { panic!("one topology, not {}", shown.len()) };
    let code = |text: &str| {
        let lines = text.lines().map(str::trim_end).filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let (shown, shipped) = (code(shown), code(&shipped));
    assert_eq!(shown[..], shipped[..shown.len()]);
    assert_eq!(shipped[shown.len()], "[[tests]]", "the README leaves out more than the tests");
}

#[test]
fn the_guarantees_of_the_readme_are_those_of_the_plan() {
    let loaded = load(&file("topologies/orders.toml"), "topologies/orders.toml", &|_| Some("postgres://u@h/d".into()));
    let plan = Plan::new(std::sync::Arc::new(loaded.topology.unwrap()));
    let readme = file("README.md");
    let row = |start: &str| {
        let line = readme.lines().find(|line| line.starts_with(start));
        line.unwrap_or_else(|| panic!("no row {start}")).split('|').nth(2).unwrap().trim().to_owned()
    };
    let of = |stage: &str| plan.edges.iter().find(|edge| edge.stage == stage).unwrap().guarantee.as_str();
    assert!(row("| Kafka → transforms → Kafka").starts_with(of("orders")));
    assert!(row("| Kafka → Postgres").starts_with(of("orders_table")));
}

#[test]
fn links_of_the_readme_and_the_docs_lead_somewhere() {
    for name in ["README.md", "docs/architecture.md", "docs/guarantees.md", "docs/reference.md"] {
        let text = file(name);
        let folder = root().join(name).parent().unwrap().to_owned();
        let targets = text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap());
        for target in targets.filter(|target| !target.contains("://") && !target.starts_with('#')) {
            let path = folder.join(target.split('#').next().unwrap());
            assert!(path.exists(), "{name} links to {target}");
        }
    }
}

#[test]
fn every_guarantee_names_tests_that_exist() {
    let text = file("docs/guarantees.md");
    let mut tests = String::new();
    for folder in ["src", "tests"] {
        collect(&root().join(folder), &mut tests);
    }
    let promises = text.split("\n## What is not promised").next().unwrap();
    for paragraph in promises.split("\n\n").filter(|paragraph| paragraph.starts_with("**")) {
        let paragraph = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
        let named = paragraph.rsplit_once(" Test").map(|(_, names)| names).unwrap_or_default();
        let named = named.split('`').skip(1).step_by(2).collect::<Vec<_>>();
        assert!(!named.is_empty(), "no test is named: {paragraph}");
        for name in named {
            assert!(tests.contains(&format!("#[test]\nfn {name}(")), "there is no test {name}");
        }
    }
}

/// All Rust text under a folder, without indentation.
fn collect(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            collect(&entry.path(), text);
        } else if entry.path().extension().is_some_and(|x| x == "rs") {
            let code = std::fs::read_to_string(entry.path()).unwrap();
            code.lines().for_each(|line| text.extend([line.trim_start(), "\n"]));
        }
    }
}
