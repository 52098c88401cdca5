//! Where a record comes in: decoding, its event's time and its event's id.

use uuid::Uuid;

use chrono::DateTime;

use crate::expr::{Fault, Metadata, Program, Runtime, Value};
use crate::ids::{self, EventId};
use crate::record::Input;
use crate::topology::spec::{self, Format};

use super::Record;
use super::scalar::{Scalar, scalar};

/// A source node.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) name: String,
    format: Format,
    event_id: Option<Program>,
    event_time: Option<Program>,
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
    pub(super) id: Option<EventId>,
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
            topics,
        }
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
        *event = Event { id: None, time_ms: None, tell: self.event_id.is_some() };
        record.start();
        if let Err(fault) = record.body.decode(self.format, input.value) {
            event.id = self.without_value(input, carried, event);
            return Err(fault);
        }
        let metadata = Metadata::new(input, input.key, None);
        if let Some(program) = self.event_time.as_ref().filter(|p| !record.body.is_null() || !p.uses().value) {
            match scalar(program, record, runtime, &metadata)? {
                None => return Ok(false),
                Some(time) => event.time_ms = Some(time_ms(time)?),
            }
        }
        if self.own(input) {
            event.id = self.carried(carried, event);
        }
        if event.id.is_none()
            && let Some(program) = self.event_id.as_ref().filter(|p| !record.body.is_null() || !p.uses().value)
        {
            match scalar(program, record, runtime, &metadata)? {
                None => return Ok(false),
                Some(id) => event.id = Some(EventId::declared(&self.name, &id_text(id)?, event.time_ms)),
            }
        }
        if event.id.is_none() {
            event.id = self.carried(carried, event).or_else(|| self.coordinates(input));
        }
        Ok(true)
    }

    /// The id of a record whose value nobody could read: only a declared id needs the value.
    fn without_value(&self, input: &Input<'_>, carried: Option<&[u8]>, event: &mut Event) -> Option<EventId> {
        self.carried(carried, event).or_else(|| if self.event_id.is_none() { self.coordinates(input) } else { None })
    }

    fn carried(&self, value: Option<&[u8]>, event: &mut Event) -> Option<EventId> {
        let id = EventId::carried(&self.name, value?, event.time_ms)?;
        event.tell = true;
        Some(id)
    }

    fn topic(&self, input: &Input<'_>) -> Option<&Topic> {
        self.topics.iter().find(|topic| topic.name == input.topic)
    }

    fn own(&self, input: &Input<'_>) -> bool {
        self.topic(input).is_some_and(|topic| topic.own)
    }

    fn coordinates(&self, input: &Input<'_>) -> Option<EventId> {
        self.topic(input).map(|topic| EventId::at(topic.id, input.partition, input.offset))
    }
}

fn id_text(id: Scalar<'_>) -> Result<String, Fault> {
    let text = match &id {
        Scalar::Text(bytes) | Scalar::Integer(bytes) => std::str::from_utf8(bytes).ok().filter(|text| !text.is_empty()),
        _ => None,
    };
    text.map(str::to_owned).ok_or_else(|| {
        let found = if matches!(id, Scalar::Text(_)) { "empty or not UTF-8" } else { id.described() };
        Fault::new("event-id", format!("the event id must be a string or an integer, it is {found}"))
    })
}

/// An RFC 3339 string, integer milliseconds since the epoch, or a timestamp of VRL.
fn time_ms(time: Scalar<'_>) -> Result<i64, Fault> {
    let ms = match &time {
        Scalar::Text(bytes) => std::str::from_utf8(bytes)
            .ok()
            .and_then(|text| DateTime::parse_from_rfc3339(text).ok())
            .map(|time| time.timestamp_millis()),
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
