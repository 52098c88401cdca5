//! Topic handles of a producer, so that producing a record looks no topic up.

use std::ffi::CString;
use std::ptr::NonNull;

use rdkafka::bindings as rd;

use super::client::Client;
use super::code::Code;
use super::error::{Error, Operation};
use crate::chunk::{Target, TargetId};

/// One handle a target, in the targets' order. They belong to one client and must go before it.
pub(super) struct Topics(Vec<NonNull<rd::rd_kafka_topic_t>>);

// SAFETY: topic handles may be used from any thread, as the client that they belong to.
unsafe impl Send for Topics {}
// SAFETY: as above.
unsafe impl Sync for Topics {}

impl Topics {
    /// # Safety
    /// The handles are dropped before `client` is.
    pub unsafe fn new(client: &Client, targets: &[Target]) -> Result<Topics, Error> {
        let mut topics = Topics(Vec::with_capacity(targets.len()));
        for target in targets {
            let refused =
                || Error::new(Operation::Produce, Code::INVALID_ARGUMENT, "not a topic name").at(&*target.topic, None);
            let name = CString::new(&*target.topic).map_err(|_| refused())?;
            // SAFETY: the client is alive; without a configuration of its own the topic takes the client's defaults.
            let topic = unsafe { rd::rd_kafka_topic_new(client.ptr(), name.as_ptr(), std::ptr::null_mut()) };
            topics.0.push(NonNull::new(topic).ok_or_else(refused)?);
        }
        Ok(topics)
    }

    /// `None`: the id is not one of this producer's targets.
    #[inline]
    pub fn get(&self, target: TargetId) -> Option<NonNull<rd::rd_kafka_topic_t>> {
        self.0.get(target.0 as usize).copied()
    }
}

impl Drop for Topics {
    fn drop(&mut self) {
        for topic in &self.0 {
            // SAFETY: ours, freed only here, and the client is alive by the constructor's contract.
            unsafe { rd::rd_kafka_topic_destroy(topic.as_ptr()) }
        }
    }
}
