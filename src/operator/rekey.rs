//! `rekey`: gives a record another key.

use crate::expr::{Fault, Metadata, Program, Runtime};

use super::key::{self, Made};
use super::{Key, Record};

#[derive(Clone, Debug)]
pub(super) struct Rekey {
    pub(super) key: Program,
}

impl Rekey {
    /// The new key, written to `out`; `None` drops the record.
    pub(super) fn key(
        &self,
        record: &Record,
        runtime: &mut Runtime,
        metadata: &Metadata<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<Key>, Fault> {
        Ok(match key::make(&self.key, record, runtime, metadata, out)? {
            Made::Key => Some(Key::Own),
            Made::Null => Some(Key::Null),
            Made::Aborted => None,
        })
    }
}
