//! What is committed beside a position: of which topic it is, since a name can be given to another one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use uuid::Uuid;

/// The format byte.
const FORMAT: char = '1';
/// Characters of a topic id.
const ID: usize = 22;
/// Follows the id where the position is a copy of one that the sink keeps.
const COPY: char = 'c';

/// The metadata of a position for the topic with this id: a format byte and the id as Kafka's tools write it. What a
/// later format adds follows these (a task's stream time, its state revision).
pub fn position_metadata(topic_id: Uuid) -> String {
    format!("{FORMAT}{}", topic_id_text(topic_id))
}

/// The topic id of a position's metadata; `None` of what semel did not write.
pub fn topic_id_of(metadata: &[u8]) -> Option<Uuid> {
    let text = std::str::from_utf8(metadata).ok()?;
    let id = URL_SAFE_NO_PAD.decode(text.strip_prefix(FORMAT)?.get(..ID)?).ok()?;
    Uuid::from_slice(&id).ok()
}

/// Whether the position is a copy of one that the sink keeps.
pub fn is_copy(metadata: &[u8]) -> bool {
    topic_id_of(metadata).is_some() && metadata.get(FORMAT.len_utf8() + ID) == Some(&(COPY as u8))
}

/// A topic id as Kafka's tools write it.
pub fn topic_id_text(id: Uuid) -> String {
    URL_SAFE_NO_PAD.encode(id.as_bytes())
}

/// The ids of the topics that a worker reads, as they were when it was assigned their partitions: its committer commits
/// them beside the positions.
#[derive(Clone, Debug, Default)]
pub struct TopicIds {
    ids: Arc<Mutex<BTreeMap<String, Uuid>>>,
    /// The sink keeps the positions, the group gets copies.
    copies: bool,
}

impl TopicIds {
    /// Beside positions that are copies of what the sink keeps.
    pub fn of_copies() -> TopicIds {
        TopicIds { copies: true, ..TopicIds::default() }
    }

    pub fn set(&self, topic: &str, id: Uuid) {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).insert(topic.to_owned(), id);
    }

    pub fn get(&self, topic: &str) -> Option<Uuid> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).get(topic).copied()
    }

    /// The metadata of a position in the topic.
    pub fn metadata(&self, topic: &str) -> Option<String> {
        let mut metadata = position_metadata(self.get(topic)?);
        metadata.extend(self.copies.then_some(COPY));
        Some(metadata)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Committed positions outlive a version of semel.
    #[test]
    fn metadata_is_the_same_in_every_version() {
        let id = Uuid::from_u128(0x0123_4567_89ab_cdef_fedc_ba98_7654_3210);
        assert_eq!(position_metadata(id), "1ASNFZ4mrze_-3LqYdlQyEA");
        assert_eq!(topic_id_of(b"1ASNFZ4mrze_-3LqYdlQyEA"), Some(id));
        assert_eq!(topic_id_of(b"1ASNFZ4mrze_-3LqYdlQyEA;later=1"), Some(id));
        for other in [&b""[..], b"1", b"2ASNFZ4mrze_-3LqYdlQyEA", b"1ASNFZ4mrze_-3LqYdlQyE", b"\xff", b"from a tool"] {
            assert_eq!(topic_id_of(other), None);
        }
    }

    #[test]
    fn a_copy_of_what_the_sink_keeps_says_so() {
        let id = Uuid::from_u128(0x0123_4567_89ab_cdef_fedc_ba98_7654_3210);
        for (ids, copy, text) in [
            (TopicIds::default(), false, "1ASNFZ4mrze_-3LqYdlQyEA"),
            (TopicIds::of_copies(), true, "1ASNFZ4mrze_-3LqYdlQyEAc"),
        ] {
            ids.set("in", id);
            let metadata = ids.metadata("in").unwrap();
            assert_eq!(metadata, text);
            assert_eq!(topic_id_of(metadata.as_bytes()), Some(id));
            assert_eq!(is_copy(metadata.as_bytes()), copy);
        }
        assert!(!is_copy(b"1ASNFZ4mrze_-3LqYdlQyEA;c") && !is_copy(b"from a tool"));
    }
}
