//! Where a record comes in: decoding, its event's time and its event's id.

use uuid::Uuid;

use crate::expr::{Fault, Metadata, Program, Runtime, Value};
use crate::ids::{self, EventId, Identity};
use crate::record::Input;
use crate::topology::spec::{self, Format};

use super::Record;
use super::scalar::{Scalar, scalar};
use super::time::{rfc3339, rfc3339_ms};

/// A source node.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) name: String,
    format: Format,
    event_id: Option<Program>,
    event_time: Option<Program>,
    max_ahead_ms: Option<i64>,
    topics: Vec<Topic>,
}

#[derive(Clone, Debug)]
pub(super) struct Topic {
    pub(super) name: String,
    pub(super) id: Uuid,
    /// This file's job writes it: what its headers say is our own word.
    pub(super) own: bool,
}

/// What is known of the event that a record carries.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Event {
    pub(super) identity: Identity,
    /// The declared time, in milliseconds since the epoch.
    pub(super) time_ms: Option<i64>,
    /// Outputs carry an id in their headers.
    pub(super) tell: bool,
}

/// The last millisecond of the year 9999: RFC 3339 ends there.
const END_OF_TIME: i64 = 253_402_300_799_999;

impl Source {
    pub(super) fn new(name: &str, spec: &spec::Source, topics: Vec<Topic>) -> Source {
        Source {
            name: name.to_owned(),
            format: spec.format,
            event_id: spec.event_id.clone(),
            event_time: spec.event_time.clone(),
            max_ahead_ms: spec.max_ahead_ms,
            topics,
        }
    }

    /// Whether its events have a time of their own.
    pub(super) fn declares_time(&self) -> bool {
        self.event_time.is_some()
    }

    /// Takes a record in. `event` holds what was found out even where the record then fails, for its dead letter. False if
    /// an expression aborted.
    pub(super) fn take(
        &self,
        input: &Input<'_>,
        record: &mut Record,
        runtime: &mut Runtime,
        event: &mut Event,
    ) -> Result<bool, Fault> {
        let carried = input.headers.last(ids::HEADER).flatten();
        *event = Event { identity: Identity::Unknown, time_ms: None, tell: self.event_id.is_some() };
        record.start();
        if let Err(fault) = record.body.decode(self.format, input.value) {
            // Only a declared id needs the value that nobody could read.
            let place = if self.event_id.is_none() { self.place(input) } else { Identity::Unknown };
            event.identity = self.carried(carried, event).unwrap_or(place);
            return Err(fault);
        }
        let metadata = Metadata::new(input, input.key, None);
        let readable = |program: &&Program| !record.body.is_null() || !program.uses().value;
        if let Some(program) = self.event_time.as_ref().filter(readable) {
            match scalar(program, record, runtime, &metadata)? {
                None => return Ok(false),
                Some(time) => event.time_ms = Some(time_ms(time)?),
            }
        }
        let own = self.topic(input).is_some_and(|topic| topic.own);
        if own && let Some(identity) = self.carried(carried, event) {
            event.identity = identity;
        } else if let Some(program) = self.event_id.as_ref().filter(readable) {
            match scalar(program, record, runtime, &metadata)? {
                None => return Ok(false),
                Some(id) => event.identity = Identity::Known(self.declared(&id, event.time_ms)?),
            }
        } else {
            event.identity = self.carried(carried, event).unwrap_or_else(|| self.place(input));
        }
        self.bound(input, event)?;
        Ok(true)
    }

    /// Measured against the time that the record has in its topic: a replay finds the same.
    fn bound(&self, input: &Input<'_>, event: &Event) -> Result<(), Fault> {
        let (Some(most), Some(time), Some(written)) = (self.max_ahead_ms, event.time_ms, input.timestamp) else {
            return Ok(());
        };
        if time <= written.saturating_add(most) {
            return Ok(());
        }
        let message = format!(
            "the event's time {} lies {} ms past its record's own, {} ms are taken (max_ahead)",
            rfc3339(time),
            time - written,
            most
        );
        Err(Fault::new("ahead", message))
    }

    fn carried(&self, value: Option<&[u8]>, event: &mut Event) -> Option<Identity> {
        let id = EventId::carried(&self.name, value?, event.time_ms)?;
        event.tell = true;
        Some(Identity::Known(id))
    }

    fn declared(&self, id: &Scalar<'_>, time_ms: Option<i64>) -> Result<EventId, Fault> {
        let text = match id {
            Scalar::Text(bytes) | Scalar::Integer(bytes) => {
                std::str::from_utf8(bytes).ok().filter(|text| !text.is_empty())
            }
            _ => None,
        };
        let declared = text.map(|text| EventId::declared(&self.name, text, time_ms));
        declared.ok_or_else(|| {
            let found = if matches!(id, Scalar::Text(_)) { "empty or not UTF-8" } else { id.described() };
            Fault::new("event-id", format!("the event id must be a string or an integer, it is {found}"))
        })
    }

    fn topic(&self, input: &Input<'_>) -> Option<&Topic> {
        self.topics.iter().find(|topic| topic.name == input.topic)
    }

    fn place(&self, input: &Input<'_>) -> Identity {
        self.topic(input).map_or(Identity::Unknown, |topic| Identity::Place(topic.id, input.partition, input.offset))
    }
}

/// An RFC 3339 string, integer milliseconds since the epoch, or a timestamp of VRL.
fn time_ms(time: Scalar<'_>) -> Result<i64, Fault> {
    let ms = match &time {
        Scalar::Text(bytes) => rfc3339_ms(bytes),
        Scalar::Integer(digits) => std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok()),
        Scalar::Value(Value::Timestamp(time)) => Some(time.timestamp_millis()),
        Scalar::Null | Scalar::Value(_) => None,
    };
    ms.filter(|ms| (0..=END_OF_TIME).contains(ms)).ok_or_else(|| {
        let found = match &time {
            Scalar::Text(text) | Scalar::Integer(text) => String::from_utf8_lossy(text).into_owned(),
            other => other.described().to_owned(),
        };
        let message =
            format!("the event time must be an RFC 3339 string or milliseconds, between 1970 and 9999, it is {found}");
        Fault::new("event-time", message)
    })
}
