//! What an expression sees as `%`: the record's place, key and headers.

use std::cell::OnceCell;

use chrono::DateTime;
use vrl::compiler::state::ExternalEnv;
use vrl::path::OwnedSegment;
use vrl::value::kind::{Collection, Field};
use vrl::value::{Kind, ObjectMap, Value};

use crate::ids::Identity;
use crate::record::Input;

/// The names behind `%`.
pub(super) const NAMES: [&str; 7] = ["key", "topic", "partition", "offset", "timestamp", "headers", "event_id"];

/// The metadata of one record. A value is made when it is read.
#[derive(Clone, Debug)]
pub struct Metadata<'a> {
    input: &'a Input<'a>,
    key: Option<&'a [u8]>,
    identity: Identity,
    /// Boxed, since most expressions read none of it.
    values: OnceCell<Box<Values>>,
}

#[derive(Clone, Debug, Default)]
struct Values {
    each: [OnceCell<Value>; NAMES.len()],
    whole: OnceCell<Value>,
}

impl<'a> Metadata<'a> {
    /// `key` is the record's key where the expression runs: a `rekey` may have changed it. The identity is unknown while it
    /// is being made.
    pub fn new(input: &'a Input<'a>, key: Option<&'a [u8]>, identity: impl Into<Identity>) -> Metadata<'a> {
        Metadata { input, key, identity: identity.into(), values: OnceCell::new() }
    }

    pub(super) fn get(&self, path: &[OwnedSegment]) -> Option<&Value> {
        let Some((first, rest)) = path.split_first() else { return Some(self.whole()) };
        let OwnedSegment::Field(name) = first else { return None };
        let value = self.value(NAMES.iter().position(|n| *n == name.as_str())?);
        if rest.is_empty() { Some(value) } else { value.get(rest) }
    }

    fn values(&self) -> &Values {
        self.values.get_or_init(Box::default)
    }

    fn whole(&self) -> &Value {
        self.values().whole.get_or_init(|| {
            let values = NAMES.iter().enumerate().map(|(i, name)| ((*name).into(), self.value(i).clone()));
            Value::Object(values.collect::<ObjectMap>())
        })
    }

    fn value(&self, name: usize) -> &Value {
        self.values().each[name].get_or_init(|| match NAMES[name] {
            "key" => self.key.map_or(Value::Null, text),
            "topic" => Value::from(self.input.topic),
            "partition" => Value::from(i64::from(self.input.partition)),
            "offset" => Value::from(self.input.offset.0),
            "timestamp" => {
                self.input.timestamp.and_then(DateTime::from_timestamp_millis).map_or(Value::Null, Value::from)
            }
            "headers" => self.headers(),
            _ => self.identity.id().map_or(Value::Null, |id| Value::from(id.text(&mut [0; 36]) as &str)),
        })
    }

    /// `[[name, value], …]`: order and repeats matter, so it is no object. A name that is not UTF-8 shows replacement
    /// characters.
    fn headers(&self) -> Value {
        let pair = |(name, value): &(&[u8], Option<&[u8]>)| {
            Value::Array(vec![Value::from(&*String::from_utf8_lossy(name)), value.map_or(Value::Null, text)])
        };
        Value::Array(self.input.headers.0.iter().map(pair).collect())
    }
}

fn text(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => Value::from(text),
        Err(_) => Value::from(bytes),
    }
}

/// The types that the compiler may count on, for a value of the given kind.
pub(super) fn environment(value: Kind) -> ExternalEnv {
    let text = Kind::bytes;
    let kinds = [
        text().or_null(),
        text(),
        Kind::integer(),
        Kind::integer(),
        Kind::timestamp().or_null(),
        Kind::array(Collection::from_unknown(Kind::array(Collection::from_unknown(text().or_null())))),
        text().or_null(),
    ];
    let known = NAMES.iter().zip(kinds).map(|(name, kind)| (Field::from(*name), kind)).collect();
    ExternalEnv::new_with_kind(value, Kind::object(Collection::from_parts(known, Kind::undefined())))
}
