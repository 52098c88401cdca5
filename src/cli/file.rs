//! Topology files on the command line: read, checked, and their findings printed.

use std::io::IsTerminal;
use std::path::Path;

use crate::error::{Exit, Failure};
use crate::topology::finding::Finding;
use crate::topology::spec::Topology;
use crate::topology::{self, Loaded, report};

/// A topology file and what loading it said.
#[derive(Debug)]
pub struct File {
    pub name: String,
    pub text: String,
    pub loaded: Loaded,
}

/// Reads and checks a file, with the variables of this process. `Err` where it cannot be read as text.
pub fn open(path: &Path) -> Result<File, Failure> {
    let name = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|error| Failure::refused(format!("cannot read {name}: {error}")))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::refused(format!("cannot read {name}: not UTF-8 text from byte {at} on"))
    })?;
    let loaded = topology::load(&text, &name, &|variable| std::env::var(variable).ok());
    Ok(File { name, text, loaded })
}

/// The topology of a file that must be right: its errors go to stderr, and `exit` tells of them. Warnings and notes
/// are for `semel check`.
pub fn checked(path: &Path, exit: Exit) -> Result<Topology, Failure> {
    let File { name, text, loaded } = open(path)?;
    if let Some(topology) = loaded.topology {
        return Ok(topology);
    }
    let errors: Vec<Finding> = loaded.findings.into_iter().filter(Finding::is_error).collect();
    eprint!("{}", report::render(&text, &errors, std::io::stderr().is_terminal()));
    Err(Failure::new(exit, format!("{name} has {}; `semel check` shows all findings", report::summary(&errors))))
}
