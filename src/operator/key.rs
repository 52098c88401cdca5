//! A record's key, made by an expression: a string is its bytes, a number or boolean its JSON text, null is no key.

use crate::expr::{Fault, Metadata, Program, Runtime, Value, described};
use crate::json;

use super::Record;
use super::scalar::{Scalar, scalar};

/// What a key expression gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Made {
    /// The key is in the buffer.
    Key,
    Null,
    /// The expression aborted: the record is dropped.
    Aborted,
}

/// Evaluates a key expression into `out`.
///
/// # Errors
/// `tombstone-key` where the value is null and the expression reads it, `key` for an object or array, and those of the
/// expression.
pub(super) fn make(
    program: &Program,
    record: &Record,
    runtime: &mut Runtime,
    metadata: &Metadata<'_>,
    out: &mut Vec<u8>,
) -> Result<Made, Fault> {
    out.clear();
    if record.body.is_null() && program.uses().value {
        let message = format!("the value is null, but the key `{}` is made from it", program.source());
        return Err(Fault::new("tombstone-key", message));
    }
    match scalar(program, record, runtime, metadata)? {
        None => return Ok(Made::Aborted),
        Some(Scalar::Null) => return Ok(Made::Null),
        Some(Scalar::Text(bytes) | Scalar::Integer(bytes)) => out.extend_from_slice(&bytes),
        Some(Scalar::Value(value)) => match value {
            Value::Boolean(_) | Value::Float(_) if json::unwritable(&value).is_none() => json::write(&value, out),
            Value::Timestamp(_) | Value::Regex(_) => out.extend_from_slice(&value.coerce_to_bytes()),
            other => {
                let message = format!("the key must be a string, a number or a boolean, it is {}", described(&other));
                return Err(Fault::new("key", message));
            }
        },
    }
    Ok(Made::Key)
}
