//! What is committed beside a position: of which topic it is, since a name can be given to another one, and which revision of
//! the partition's state belongs to it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use uuid::Uuid;

use crate::record::TopicPartition;

/// The format byte.
const FORMAT: char = '1';
/// Characters of a topic id.
const ID: usize = 22;
/// Follows the id where the position is a copy of one that the sink keeps.
const COPY: char = 'c';
/// Follows the id where the partition has state: its revision in decimals.
const REVISION: char = 'r';

/// The metadata of a position for the topic with this id: a format byte and the id as Kafka's tools write it. What a
/// later format adds follows these.
pub fn position_metadata(topic_id: Uuid) -> String {
    format!("{FORMAT}{}", topic_id_text(topic_id))
}

/// The topic id of a position's metadata; `None` of what semel did not write.
pub fn topic_id_of(metadata: &[u8]) -> Option<Uuid> {
    let text = std::str::from_utf8(metadata).ok()?;
    let id = URL_SAFE_NO_PAD.decode(text.strip_prefix(FORMAT)?.get(..ID)?).ok()?;
    Uuid::from_slice(&id).ok()
}

/// Which revision of the state the position belongs to, 0 where it has none; `None` of what semel did not write.
pub fn revision_of(metadata: &[u8]) -> Option<u64> {
    topic_id_of(metadata)?;
    let rest = std::str::from_utf8(&metadata[FORMAT.len_utf8() + ID..]).ok()?;
    Some(rest.strip_prefix(REVISION).and_then(|revision| revision.parse().ok()).unwrap_or(0))
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
    /// Of the partitions' state, as it is with these positions.
    revisions: BTreeMap<TopicPartition, u64>,
}

impl TopicIds {
    /// Beside positions that are copies of what the sink keeps.
    pub fn of_copies() -> TopicIds {
        TopicIds { copies: true, ..TopicIds::default() }
    }

    /// Beside positions that belong to these revisions of the partitions' state.
    pub fn with(&self, revisions: &[(TopicPartition, u64)]) -> TopicIds {
        TopicIds { revisions: revisions.iter().cloned().collect(), ..self.clone() }
    }

    pub fn set(&self, topic: &str, id: Uuid) {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).insert(topic.to_owned(), id);
    }

    pub fn get(&self, topic: &str) -> Option<Uuid> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).get(topic).copied()
    }

    /// The metadata of a position in the partition.
    pub fn metadata(&self, partition: &TopicPartition) -> Option<String> {
        let mut metadata = position_metadata(self.get(&partition.topic)?);
        metadata.extend(self.copies.then_some(COPY));
        metadata.extend(self.revisions.get(partition).map(|revision| format!("{REVISION}{revision}")));
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
    fn a_position_says_which_revision_of_the_state_belongs_to_it() {
        let ids = TopicIds::default();
        ids.set("in", Uuid::from_u128(0x0123_4567_89ab_cdef_fedc_ba98_7654_3210));
        let (with, without) = (TopicPartition::new("in", 3), TopicPartition::new("in", 4));
        let ids = ids.with(&[(with.clone(), 42)]);
        let metadata = ids.metadata(&with).unwrap();
        assert_eq!(metadata, "1ASNFZ4mrze_-3LqYdlQyEAr42");
        assert_eq!(topic_id_of(metadata.as_bytes()), ids.get("in"));
        assert_eq!(revision_of(metadata.as_bytes()), Some(42));
        assert_eq!(revision_of(ids.metadata(&without).unwrap().as_bytes()), Some(0));
        assert_eq!([revision_of(b""), revision_of(b"from a tool"), revision_of(b"r42")], [None; 3]);
    }

    #[test]
    fn a_copy_of_what_the_sink_keeps_says_so() {
        let id = Uuid::from_u128(0x0123_4567_89ab_cdef_fedc_ba98_7654_3210);
        for (ids, copy, text) in [
            (TopicIds::default(), false, "1ASNFZ4mrze_-3LqYdlQyEA"),
            (TopicIds::of_copies(), true, "1ASNFZ4mrze_-3LqYdlQyEAc"),
        ] {
            ids.set("in", id);
            let metadata = ids.metadata(&TopicPartition::new("in", 3)).unwrap();
            assert_eq!(metadata, text);
            assert_eq!(topic_id_of(metadata.as_bytes()), Some(id));
            assert_eq!(is_copy(metadata.as_bytes()), copy);
        }
        assert!(!is_copy(b"1ASNFZ4mrze_-3LqYdlQyEA;c") && !is_copy(b"from a tool"));
    }
}
