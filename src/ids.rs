//! Event identity: a UUID made once at the event's source, the same on every attempt.
//!
//! A UUIDv7 that the source declares is used as it is. Everything else is hashed (SHA-256 over length-prefixed parts)
//! into a UUID of the same shape: version 7 where the event has a time of its own, else version 8.

use std::fmt;

use sha2::{Digest, Sha256};
use uuid::{Uuid, Variant};

use crate::record::Offset;

/// The header that carries an event id, as hyphenated lower-case text.
pub const HEADER: &str = "semel-event-id";

/// The identity of an event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(Uuid);

impl EventId {
    /// The id of an event that its source declares: a UUIDv7 as it is; any other text is scoped by the source node and
    /// hashed, with the milliseconds of the event's declared time if there is one.
    pub fn declared(source: &str, id: &str, time_ms: Option<i64>) -> EventId {
        match Uuid::try_parse(id) {
            Ok(uuid) if is_v7(&uuid) => EventId(uuid),
            _ => EventId(shaped(hash("declared", &[source.as_bytes(), id.as_bytes()]), time_ms)),
        }
    }

    /// The id that a header carries: a UUID as it is, any other text as if it had been declared. `None` for what is
    /// empty or not UTF-8.
    pub fn carried(source: &str, value: &[u8], time_ms: Option<i64>) -> Option<EventId> {
        if let Ok(uuid) = Uuid::try_parse_ascii(value) {
            return Some(EventId(uuid));
        }
        let text = std::str::from_utf8(value).ok().filter(|text| !text.is_empty())?;
        Some(EventId::declared(source, text, time_ms))
    }

    /// The id of a record by its place in the log: it survives redelivery, but not a producer's second send.
    pub fn at(topic: Uuid, partition: i32, offset: Offset) -> EventId {
        let parts = [&topic.as_bytes()[..], &partition.to_be_bytes(), &offset.0.to_be_bytes()];
        EventId(shaped(hash("coordinates", &parts), None))
    }

    /// The id of an update of a stateful operator: the same on every attempt, since the revision of a key is kept with its
    /// state. `cause` is the event that caused it: state that begins anew at another record counts its revisions from 1 again.
    /// `time_ms` is the event's declared time.
    pub fn of_state(store: &str, key: &[u8], revision: u64, cause: Identity, time_ms: Option<i64>) -> EventId {
        let cause = cause.or_nil();
        let parts = [store.as_bytes(), key, &revision.to_be_bytes(), cause.0.as_bytes()];
        EventId(shaped(hash("state", &parts), time_ms))
    }

    /// The id of what a join makes of a record and the row that it found, with the record's time.
    pub fn joined(self, join: &str, row: Option<EventId>) -> EventId {
        let row = row.as_ref().map_or(&[][..], |row| row.0.as_bytes());
        EventId(shaped(hash("joined", &[join.as_bytes(), self.0.as_bytes(), row]), self.time_ms()))
    }

    /// The id from its bytes, as [`EventId::bytes`] gives them.
    pub fn from_bytes(bytes: [u8; 16]) -> EventId {
        EventId(Uuid::from_bytes(bytes))
    }

    /// The id of an output: see [`Deriver`].
    pub fn derived(self, topology: &str, sink: &str, index: u32) -> EventId {
        Deriver::new(topology, sink).derive(self, index)
    }

    /// Milliseconds since the epoch, of an id that has a time.
    pub fn time_ms(self) -> Option<i64> {
        is_v7(&self.0).then(|| (self.0.as_u128() >> 80) as i64)
    }

    /// The id as a UUID.
    pub fn uuid(self) -> Uuid {
        self.0
    }

    /// The id as bytes.
    pub fn bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// The text of the header.
    pub fn text(self, buffer: &mut [u8; 36]) -> &str {
        self.0.hyphenated().encode_lower(buffer)
    }
}

/// Makes the ids of a sink's outputs, from (input id, topology, sink, index). What is the same for all of them is hashed
/// once, and fills whole blocks, so that an id costs one block.
#[derive(Clone, Debug)]
pub struct Deriver {
    prefix: Sha256,
}

impl Deriver {
    pub fn new(topology: &str, sink: &str) -> Deriver {
        const BLOCK: usize = 64;
        let mut prefix = Sha256::new();
        let mut size = 0;
        for part in ["derived", topology, sink] {
            prefix.update((part.len() as u32).to_be_bytes());
            prefix.update(part);
            size += 4 + part.len();
        }
        prefix.update(&[0; BLOCK][..(BLOCK - size % BLOCK) % BLOCK]);
        Deriver { prefix }
    }

    /// `index` counts the outputs that one input has in the sink.
    pub fn derive(&self, input: EventId, index: u32) -> EventId {
        let mut hash = self.prefix.clone();
        hash.update(input.0.as_bytes());
        hash.update(index.to_be_bytes());
        EventId(shaped(head(hash), input.time_ms()))
    }
}

/// What stands for a record's identity until somebody asks for it: hashing every record's place would be for nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Identity {
    /// Not known, or not yet.
    #[default]
    Unknown,
    Known(EventId),
    /// The record's place: topic id, partition, offset.
    Place(Uuid, i32, Offset),
}

impl Identity {
    pub fn id(self) -> Option<EventId> {
        match self {
            Identity::Unknown => None,
            Identity::Known(id) => Some(id),
            Identity::Place(topic, partition, offset) => Some(EventId::at(topic, partition, offset)),
        }
    }

    /// The nil id where there is none.
    pub fn or_nil(self) -> EventId {
        self.id().unwrap_or(EventId(Uuid::nil()))
    }
}

impl From<Option<EventId>> for Identity {
    fn from(id: Option<EventId>) -> Identity {
        id.map_or(Identity::Unknown, Identity::Known)
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn is_v7(uuid: &Uuid) -> bool {
    uuid.get_version_num() == 7 && uuid.get_variant() == Variant::RFC4122
}

/// The kind keeps the ways of making an id apart, the lengths keep the parts apart.
fn hash(kind: &str, parts: &[&[u8]]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for part in [kind.as_bytes()].iter().chain(parts) {
        hash.update((part.len() as u32).to_be_bytes());
        hash.update(part);
    }
    head(hash)
}

fn head(hash: Sha256) -> [u8; 16] {
    let mut head = [0; 16];
    head.copy_from_slice(&hash.finalize()[..16]);
    head
}

fn shaped(hash: [u8; 16], time_ms: Option<i64>) -> Uuid {
    match time_ms.and_then(|ms| u64::try_from(ms).ok()) {
        Some(ms) => {
            let mut rest = [0; 10];
            rest.copy_from_slice(&hash[6..]);
            uuid::Builder::from_unix_timestamp_millis(ms, &rest).into_uuid()
        }
        None => uuid::Builder::from_custom_bytes(hash).into_uuid(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const V7: &str = "0190b5a1-7c3e-7cc4-9d7a-3f1f0a9d2b11";

    #[test]
    fn a_uuid_of_version_7_is_used_as_it_is() {
        assert_eq!(EventId::declared("orders", V7, Some(5)).to_string(), V7);
        assert_eq!(EventId::declared("orders", &V7.to_uppercase(), None).to_string(), V7);
        assert_eq!(EventId::declared("orders", V7, None).time_ms(), Some(0x0190_b5a1_7c3e));
    }

    #[test]
    fn any_other_id_is_scoped_by_its_source_and_keeps_the_time_of_the_event() {
        let timed = EventId::declared("orders", "order-3", Some(1_700_000_000_000));
        assert_eq!(timed.uuid().get_version_num(), 7);
        assert_eq!(timed.time_ms(), Some(1_700_000_000_000));
        let timeless = EventId::declared("orders", "order-3", None);
        assert_eq!(timeless.uuid().get_version_num(), 8);
        assert_eq!(timeless.time_ms(), None);
        assert_ne!(timeless, EventId::declared("payments", "order-3", None));
        assert_ne!(timeless, EventId::declared("orders", "order-4", None));
        // A random UUID has no time and may be used by another source too.
        let v4 = "7f2c1d0e-9a64-4b3f-8f21-2d6b1c0a9e55";
        assert_ne!(EventId::declared("orders", v4, None).to_string(), v4);
    }

    #[test]
    fn a_header_is_believed() {
        let v8 = EventId::declared("orders", "order-3", None);
        assert_eq!(EventId::carried("other", v8.to_string().as_bytes(), None), Some(v8));
        assert_eq!(EventId::carried("orders", b"order-3", None), Some(v8));
        assert_eq!(EventId::carried("orders", b"", None), None);
        assert_eq!(EventId::carried("orders", b"\xff", None), None);
    }

    /// Ids are stored in topics and tables: another hash would double what is already there.
    #[test]
    fn ids_are_the_same_in_every_version() {
        let declared = EventId::declared("orders", "order-3", None);
        let coordinates = EventId::at(Uuid::from_u128(7), 3, Offset(42));
        let text = |id: EventId| id.to_string();
        let update = EventId::of_state("shop.revenue", b"\x01c1", 3, Identity::Known(declared), None);
        assert_eq!(text(update), "75ea6403-2ab3-8be1-a8ba-b3a91135a9a8");
        assert_eq!(text(declared), "8773c46e-1ed8-8984-bbd0-65dfff2ca466");
        assert_eq!(
            text(EventId::declared("orders", "order-3", Some(1_700_000_000_000))),
            "018bcfe5-6800-7984-bbd0-65dfff2ca466"
        );
        assert_eq!(text(coordinates), "4a8e581e-08d1-8060-b2de-1fce0897c198");
        assert_eq!(text(declared.derived("shop", "orders_priced", 0)), "fd1f7b01-bc5b-8515-9e61-0c9b96e2bcc3");
        assert_eq!(
            text(EventId::declared("orders", V7, None).derived("shop", "orders_priced", 1)),
            "0190b5a1-7c3e-76c7-9f21-211c427e3c0c"
        );
    }

    proptest! {
        #[test]
        fn parts_do_not_run_into_each_other(a in "[ab]{0,3}", b in "[ab]{0,3}", c in "[ab]{0,3}", d in "[ab]{0,3}", i in 0..2u32) {
            let id = EventId::at(Uuid::nil(), 0, Offset(0));
            prop_assert_eq!(id.derived(&a, &b, i) == id.derived(&c, &d, 0), (&a, &b, i) == (&c, &d, 0));
            prop_assert_eq!(EventId::declared(&a, &b, None) == EventId::declared(&c, &d, None), (a, b) == (c, d));
        }

        #[test]
        fn a_time_survives_all_derivations(ms in 0..253_402_300_800_000i64, index in any::<u32>()) {
            let id = EventId::declared("s", "x", Some(ms)).derived("t", "sink", index);
            prop_assert_eq!(id.time_ms(), Some(ms));
            let mut buffer = [0; 36];
            prop_assert_eq!(EventId::carried("s", id.text(&mut buffer).as_bytes(), None), Some(id));
        }
    }
}
