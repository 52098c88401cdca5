//! A record as VRL's target.

use std::cell::OnceCell;

use vrl::compiler::{SecretTarget, Target};
use vrl::path::{OwnedSegment, OwnedTargetPath, PathPrefix};
use vrl::value::Value;

use super::functions::{ABORTED, FAILED};
use super::{Body, Fault, Metadata};

/// A record while a program runs on it.
#[derive(Debug)]
pub(super) struct Subject<'a> {
    pub(super) body: Access<'a>,
    pub(super) metadata: &'a Metadata<'a>,
    /// A number that VRL cannot hold exactly is a fault when it is read.
    pub(super) exact: bool,
    /// See `Analysis::discards`.
    pub(super) discards: &'a [OwnedTargetPath],
    /// The first fault. VRL swallows the errors of a target, so it is looked at after the run.
    pub(super) fault: OnceCell<Fault>,
    /// An error that `??` swallowed, by the key that `Attempt` gives it.
    pub(super) passed: Option<(&'static str, String)>,
}

#[derive(Debug)]
pub(super) enum Access<'a> {
    Read(&'a Body),
    Write(&'a mut Body),
}

impl Subject<'_> {
    fn body(&self) -> &Body {
        match &self.body {
            Access::Read(body) => body,
            Access::Write(body) => body,
        }
    }

    /// The body, where the path is one that may be written. The compiler refuses other writes.
    fn body_mut(&mut self, prefix: PathPrefix) -> Result<&mut Body, String> {
        match &mut self.body {
            Access::Write(body) if prefix == PathPrefix::Event => Ok(body),
            _ => Err("read-only".into()),
        }
    }

    fn note<T>(&self, result: Result<T, Fault>) -> Result<T, String> {
        result.map_err(|fault| {
            let message = fault.message.clone();
            let _ = self.fault.set(fault);
            message
        })
    }
}

impl Target for Subject<'_> {
    fn target_insert(&mut self, path: &OwnedTargetPath, value: Value) -> Result<(), String> {
        let result = self.body_mut(path.prefix)?.set(&path.path.segments, value);
        self.note(result)
    }

    fn target_get(&self, path: &OwnedTargetPath) -> Result<Option<&Value>, String> {
        if path.prefix == PathPrefix::Metadata {
            return Ok(self.metadata.get(&path.path.segments));
        }
        let (value, inexact) = self.body().get(&path.path.segments);
        if self.exact
            && let Some(inexact) = inexact
        {
            let _ = self.fault.set(inexact.into());
        }
        Ok(value)
    }

    fn target_get_mut(&mut self, _: &OwnedTargetPath) -> Result<Option<&mut Value>, String> {
        // Neither the language nor its library asks for it, and a write behind our back would not be encoded.
        Err("a record is written by assignment only".into())
    }

    fn target_remove(&mut self, path: &OwnedTargetPath, compact: bool) -> Result<Option<Value>, String> {
        let discard = self.discards.contains(path);
        let body = self.body_mut(path.prefix)?;
        if discard && let [OwnedSegment::Field(name)] = &path.path.segments[..] {
            body.discard(name);
            return Ok(None);
        }
        let result = body.unset(&path.path.segments, compact);
        self.note(result)
    }
}

impl SecretTarget for Subject<'_> {
    fn get_secret(&self, _: &str) -> Option<&str> {
        None
    }

    fn insert_secret(&mut self, key: &str, value: &str) {
        if let Some(key) = [FAILED, ABORTED].into_iter().find(|k| *k == key) {
            self.passed = Some((key, value.to_owned()));
        }
    }

    fn remove_secret(&mut self, _: &str) {}
}
