//! Running an expression on a record.

use std::cell::OnceCell;
use std::fmt;
use std::sync::Arc;

use vrl::compiler::state::RuntimeState;
use vrl::compiler::{Context, ExpressionError, TimeZone};
use vrl::path::{OwnedSegment, OwnedTargetPath, PathPrefix};
use vrl::value::Value;

use super::analysis::Comparison;
use super::body::described;
use super::functions::FAILED;
use super::target::{Access, Subject};
use super::{Body, Fault, Metadata, Role, Uses};

/// A compiled expression. Cheap to clone; threads share it.
#[derive(Clone)]
pub struct Program {
    pub(super) inner: Arc<Compiled>,
}

#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) source: String,
    pub(super) role: Role,
    pub(super) program: vrl::compiler::Program,
    pub(super) uses: Uses,
    pub(super) discards: Vec<OwnedTargetPath>,
    pub(super) path: Option<OwnedTargetPath>,
    pub(super) comparison: Option<Comparison>,
    /// Reads must be exact: what was read may become output.
    pub(super) exact: bool,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program")
            .field("source", &self.inner.source)
            .field("role", &self.inner.role)
            .finish_non_exhaustive()
    }
}

/// What programs keep between runs: one for each thread.
#[derive(Debug)]
pub struct Runtime {
    state: RuntimeState,
    timezone: TimeZone,
}

impl Default for Runtime {
    fn default() -> Runtime {
        // The machine's own zone would make the same record read differently on another machine.
        Runtime { state: RuntimeState::default(), timezone: TimeZone::parse("UTC").unwrap_or_default() }
    }
}

impl Clone for Runtime {
    fn clone(&self) -> Runtime {
        // Variables do not outlive a run.
        Runtime { state: RuntimeState::default(), timezone: self.timezone }
    }
}

impl Program {
    /// The expression as written.
    pub fn source(&self) -> &str {
        &self.inner.source
    }

    pub fn role(&self) -> Role {
        self.inner.role
    }

    /// Functions and paths that the expression uses, whether or not a run comes by them.
    pub fn uses(&self) -> &Uses {
        &self.inner.uses
    }

    /// The path, of an expression that is nothing but a path of the record's value (`.customer.id`).
    pub(crate) fn path(&self) -> Option<&[OwnedSegment]> {
        let path = self.inner.path.as_ref().filter(|path| path.prefix == PathPrefix::Event)?;
        Some(&path.path.segments)
    }

    /// The name, of an expression that is nothing but a top-level member (`.amount`): its JSON text is the exact value.
    pub fn member(&self) -> Option<&str> {
        match self.path()? {
            [OwnedSegment::Field(name)] => Some(name),
            _ => None,
        }
    }

    /// The answer of a condition; `None` if the program aborted.
    ///
    /// # Errors
    /// `expression`: it failed, or gave no boolean.
    pub fn condition(
        &self,
        runtime: &mut Runtime,
        body: &Body,
        metadata: &Metadata<'_>,
    ) -> Result<Option<bool>, Fault> {
        if let Some(answer) = self.inner.comparison.as_ref().and_then(|comparison| comparison.on(body)) {
            return Ok(Some(answer));
        }
        match self.run(runtime, Access::Read(body), metadata)? {
            None => Ok(None),
            Some(Value::Boolean(answer)) => Ok(Some(answer)),
            Some(other) => {
                Err(Fault::new("expression", format!("the condition gave {}, not true or false", described(&other))))
            }
        }
    }

    /// The value of an expression; `None` if the program aborted.
    ///
    /// # Errors
    /// `expression`: it failed. `inexact-number`: it read a number that it cannot hold.
    pub fn value(&self, runtime: &mut Runtime, body: &Body, metadata: &Metadata<'_>) -> Result<Option<Value>, Fault> {
        self.run(runtime, Access::Read(body), metadata)
    }

    /// Changes the record; false if the program aborted.
    ///
    /// # Errors
    /// `expression`: it failed, or left what is no record. `inexact-number`: it read a number that it cannot hold. The body
    /// may be half changed then.
    pub fn transform(&self, runtime: &mut Runtime, body: &mut Body, metadata: &Metadata<'_>) -> Result<bool, Fault> {
        let kept = self.run(runtime, Access::Write(body), metadata)?.is_some();
        if kept {
            body.settle()?;
        }
        Ok(kept)
    }

    /// The elements that a `flat_map` makes of a record; `None` if the program aborted. The body is scratch space then.
    ///
    /// # Errors
    /// As [`Program::transform`]; also where the program gave no array.
    pub fn expand(
        &self,
        runtime: &mut Runtime,
        body: &mut Body,
        metadata: &Metadata<'_>,
    ) -> Result<Option<Vec<Value>>, Fault> {
        match self.run(runtime, Access::Write(body), metadata)? {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => {
                Err(Fault::new("expression", format!("the expression gave {}, not an array", described(&other))))
            }
        }
    }

    /// `Program::resolve` and not `Runtime::resolve`, which reads the root and so would parse all of every record.
    fn run(&self, runtime: &mut Runtime, body: Access<'_>, metadata: &Metadata<'_>) -> Result<Option<Value>, Fault> {
        let Compiled { program, discards, exact, .. } = &*self.inner;
        if !runtime.state.is_empty() {
            runtime.state.clear();
        }
        let mut subject = Subject { body, metadata, exact: *exact, discards, fault: OnceCell::new(), passed: None };
        let result = program.resolve(&mut Context::new(&mut subject, &mut runtime.state, &runtime.timezone));
        if let Some(fault) = subject.fault.into_inner() {
            return Err(fault);
        }
        match (result, subject.passed) {
            (_, Some((FAILED, message))) => Err(Fault::new("expression", plain(&message))),
            (_, Some(_)) | (Err(ExpressionError::Abort { .. }), _) => Ok(None),
            (Ok(value) | Err(ExpressionError::Return { value, .. }), None) => Ok(Some(value)),
            (Err(error), None) => Err(Fault::new("expression", plain(&error.to_string()))),
        }
    }
}

impl Comparison {
    /// The answer, read off the JSON text of a member that nobody wrote; `None` where the expression has to run.
    fn on(&self, body: &Body) -> Option<bool> {
        let same = match body.json()?.kept(&self.member) {
            None => false,
            Some([b'"', inside @ .., b'"']) if memchr::memchr(b'\\', inside).is_none() => {
                inside == self.text.as_bytes()
            }
            Some([] | [b'"', ..]) => return None,
            Some(_) => false,
        };
        Some(same == self.equal)
    }
}

/// VRL's message without the positions in the program: `function call error for "to_int" at (5:18): …` is `to_int: …`.
fn plain(message: &str) -> String {
    let mut rest = message;
    let mut function = None;
    while let Some((name, tail)) = rest.strip_prefix("function call error for \"").and_then(|r| r.split_once("\" at ("))
    {
        let Some((_, inner)) = tail.split_once("): ") else { break };
        function = Some(name);
        rest = inner;
    }
    match function {
        Some(name) => format!("{name}: {rest}"),
        None => rest.to_owned(),
    }
}
