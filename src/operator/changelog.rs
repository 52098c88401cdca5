//! The topic that the state of a node is restored from.

use crate::chunk::{Chunk, Target, TargetId};
use crate::expr::Fault;

use super::sink::record_size;

#[derive(Clone, Debug)]
pub(super) struct Changelog {
    pub(super) id: TargetId,
    pub(super) target: Target,
}

impl Changelog {
    /// Writes a key; none removes it.
    pub(super) fn put(&self, partition: i32, key: &[u8], value: Option<&[u8]>, chunk: &mut Chunk) {
        let mut out = chunk.push(self.id);
        out.partition(partition).key(Some(key)).value(value);
        out.finish();
    }

    /// # Errors
    /// `too-large`: the topic does not take `what` lies under that key.
    pub(super) fn check(&self, what: &str, key: &[u8], value: Option<&[u8]>) -> Result<(), Fault> {
        let Target { topic, max_message_bytes, .. } = &self.target;
        let size = record_size(key.len(), value.map_or(0, <[u8]>::len));
        if size <= *max_message_bytes {
            return Ok(());
        }
        let message =
            format!("{what} takes {size} bytes, the topic `{topic}` takes {max_message_bytes} (max.message.bytes)");
        Err(Fault::new("too-large", message))
    }
}
