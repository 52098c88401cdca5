//! `semel check`.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::file::{self, File};
use super::output;
use crate::error::{Exit, Failure};
use crate::runtime::{app, job_topic, past, preflight};
use crate::sink::postgres;
use crate::topology::finding::{Finding, Findings, Severity, code};
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::Topology;
use crate::topology::{self, report};

const ANSWER: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Topology files.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Ask the broker and the database too: topics, tables, columns, privileges.
    #[arg(long)]
    online: bool,
    /// Fail on warnings, as on errors.
    #[arg(long)]
    deny_warnings: bool,
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Short for --format json.
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Text,
    Json,
}

/// Runs the command: exit 1 on errors (with `--deny-warnings` on warnings), 2 where a file cannot be read; the other
/// files are checked all the same.
pub fn run(args: Args) -> Result<Exit, Failure> {
    let mut files: Vec<File> = Vec::new();
    let mut unreadable: Option<Failure> = None;
    for path in &args.files {
        match file::open(path) {
            Ok(file) => files.push(file),
            Err(failure) => {
                if let Some(earlier) = unreadable.replace(failure) {
                    eprintln!("semel: {}", earlier.message);
                }
            }
        }
    }
    shared_names(&mut files);
    if args.online {
        for file in &mut files {
            if let Some(topology) = &file.loaded.topology {
                let found = online(topology, &file.text)?;
                file.loaded.findings.extend(found);
            }
        }
    }
    print(&files, args.json || args.format == Format::Json);
    if let Some(failure) = unreadable {
        return Err(failure);
    }
    let limit = if args.deny_warnings { Severity::Warning } else { Severity::Error };
    let bad = files.iter().flat_map(|file| &file.loaded.findings).any(|finding| finding.severity >= limit);
    Ok(if bad { Exit::Findings } else { Exit::Done })
}

/// Findings that only the broker and the database can tell of; `text` is the file's, to place them in. Exit 3 where
/// one of them does not answer.
fn online(topology: &Topology, text: &str) -> Result<Vec<Finding>, Failure> {
    let mut found = Findings::new(&topology.file, text);
    if !topology.unset.is_empty() {
        for variable in &topology.unset {
            let path: Vec<&str> = variable.node.as_deref().map_or(vec!["kafka"], |node| vec!["sinks", node]);
            let message = format!("the environment variable {} is not set (line {})", variable.name, variable.line);
            found.error(code::UNSET_VARIABLE, topology::locate(text, &path), message);
        }
        return Ok(found.finish());
    }
    let plan = Plan::new(Arc::new(topology.clone()));
    let (connection, admin) = app::connect(topology)?;
    let memory = job_topic::read(&topology.job_topic(), &connection, &admin, ANSWER)?;
    let stages: Vec<&Stage> = plan.stages.iter().collect();
    for problem in preflight::problems(&plan, &stages, &admin)? {
        let path: Vec<&str> = problem.setting.iter().map(String::as_str).collect();
        found.error(code::BROKER, topology::locate(text, &path), problem.message);
    }
    for stage in &plan.stages {
        for problem in past::state(&plan, stage, &preflight::changelogs(&plan, stage, &admin)?, &memory) {
            let path: Vec<&str> = problem.setting.iter().map(String::as_str).collect();
            found.error(code::STATE, topology::locate(text, &path), problem.message);
        }
        for (sink, problem) in preflight::retention_problems(&plan, stage, &admin)? {
            found.warning(code::RETENTION, topology::locate(text, &["sinks", &sink, "topic"]), problem);
        }
        let StageKind::Postgres { sink, .. } = &stage.kind else { continue };
        let ledger = topology::locate(text, &["sinks", &topology.nodes[sink.0].name, "dedupe"]);
        for problem in preflight::ledger_problems(&plan, stage, &admin)? {
            found.warning(code::LEDGER_RETENTION, ledger.clone(), problem);
        }
        let span = topology::locate(text, &["sinks", &topology.nodes[sink.0].name, "table"]);
        match postgres::preflight(topology, *sink, &stage.group) {
            Ok(checked) => {
                for warning in checked.warnings {
                    found.warning(code::DATABASE, span.clone(), warning);
                }
            }
            Err(failure) if failure.exit == Exit::Refused => {
                found.error(code::DATABASE, span, failure.message);
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok(found.finish())
}

/// Reports files that call themselves alike.
fn shared_names(files: &mut [File]) {
    for i in 1..files.len() {
        let (earlier, later) = files.split_at_mut(i);
        let Some(name) = later[0].loaded.topology.as_ref().map(|topology| topology.name.clone()) else { continue };
        let of = |file: &&File| file.loaded.topology.as_ref().is_some_and(|topology| topology.name == name);
        if let Some(other) = earlier.iter().find(of) {
            let file = &mut later[0];
            let mut found = Findings::new(&file.name, &file.text);
            let span = topology::locate(&file.text, &["name"]);
            found
                .error(code::DUPLICATE_TOPOLOGY, span, format!("{} has the same `name`", other.name))
                .help("two topologies need two names: the name is their consumer group");
            file.loaded.findings.splice(0..0, found.finish());
        }
    }
}

fn print(files: &[File], json: bool) {
    if json {
        let all: Vec<&Finding> = files.iter().flat_map(|file| &file.loaded.findings).collect();
        let all = serde_json::to_string_pretty(&all).expect("findings are plain data");
        return output::write(&format!("{all}\n"));
    }
    let colour = std::io::stdout().is_terminal();
    let mut text = String::new();
    for file in files {
        text += &report::render(&file.text, &file.loaded.findings, colour);
    }
    for file in files {
        text += &format!("{}: {}\n", file.name, report::summary(&file.loaded.findings));
    }
    output::write(&text);
}
