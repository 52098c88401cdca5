//! Values of test records: five forms, and TOML as JSON.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value as Json;
use toml::de::DeValue;

use super::cx::{Cx, Item, Table, in_order, is_hole};
use crate::topology::finding::code;
use crate::topology::spec::ExpectedValue;

const FORMS: [&str; 5] = ["value", "json", "text", "base64", "tombstone"];

/// A value as a test gives it.
pub enum Value {
    /// Written in TOML: its JSON text.
    Toml(String),
    Bytes(Vec<u8>),
    Tombstone,
}

impl Value {
    /// As the broker has it.
    pub fn into_bytes(self) -> Option<Vec<u8>> {
        match self {
            Value::Toml(json) => Some(json.into_bytes()),
            Value::Bytes(bytes) => Some(bytes),
            Value::Tombstone => None,
        }
    }

    pub fn into_expected(self) -> ExpectedValue {
        match self {
            Value::Toml(json) => ExpectedValue::Json(serde_json::from_str(&json).unwrap_or(Json::Null)),
            Value::Bytes(bytes) => ExpectedValue::Bytes(bytes),
            Value::Tombstone => ExpectedValue::Tombstone,
        }
    }
}

/// Whether any form is there.
pub fn given(table: &Table<'_>) -> bool {
    FORMS.iter().any(|form| table.get(form).is_some())
}

/// The value of a test record, if one is given.
pub fn read(cx: &mut Cx<'_>, table: &Table<'_>) -> Option<Value> {
    let forms: Vec<_> = FORMS.into_iter().filter(|form| table.get(form).is_some()).collect();
    if let [first, second, ..] = forms[..] {
        let message = format!("a record has one value, but both `{first}` and `{second}` are given");
        cx.found.error(code::TEST_VALUE, table.key_span(second), message);
        return None;
    }
    let form = *forms.first()?;
    match form {
        "value" => {
            let item = table.get(form)?;
            let mut json = String::new();
            write_json(cx, item, &mut json).then_some(Value::Toml(json))
        }
        "tombstone" => {
            let set = cx.boolean(table, form)?;
            if !set {
                let span = table.get(form)?.span();
                cx.found.error(code::TEST_VALUE, span, "a record without a tombstone has another form of value");
            }
            set.then_some(Value::Tombstone)
        }
        // The exact text: nothing is put in, since a test shows what a record really holds.
        _ => {
            let item = table.get(form)?;
            let DeValue::String(text) = item.get_ref() else {
                cx.wrong_type(form, item, "a string");
                return None;
            };
            if form != "base64" {
                return Some(Value::Bytes(text.as_bytes().to_vec()));
            }
            let decoded = STANDARD.decode(text.trim());
            if let Err(problem) = &decoded {
                cx.found.error(code::TEST_VALUE, item.span(), format!("no base64: {problem}"));
            }
            decoded.ok().map(Value::Bytes)
        }
    }
}

/// The key `headers`: pairs in order, one without a second element is null.
pub fn headers(cx: &mut Cx<'_>, table: &Table<'_>) -> Option<Vec<(String, Option<Vec<u8>>)>> {
    let item = table.get("headers")?;
    let wanted = "an array of pairs, such as [[\"name\", \"value\"]]";
    let DeValue::Array(pairs) = item.get_ref() else {
        cx.wrong_type("headers", item, wanted);
        return None;
    };
    let mut headers = Vec::new();
    for pair in pairs.iter() {
        let DeValue::Array(parts) = pair.get_ref() else {
            cx.wrong_type("headers", pair, wanted);
            continue;
        };
        let texts: Option<Vec<_>> = parts.iter().map(|part| part.get_ref().as_str()).collect();
        match texts.as_deref() {
            Some([name]) => headers.push(((*name).to_owned(), None)),
            Some([name, value]) => headers.push(((*name).to_owned(), Some(value.as_bytes().to_vec()))),
            _ => {
                let message = "a header is [\"name\", \"value\"], or [\"name\"] for a null value";
                cx.found.error(code::WRONG_TYPE, pair.span(), message);
            }
        }
    }
    Some(headers)
}

/// A TOML value as JSON.
pub fn json(cx: &mut Cx<'_>, item: &Item<'_>) -> Option<Json> {
    let mut text = String::new();
    write_json(cx, item, &mut text).then(|| serde_json::from_str(&text).ok()).flatten()
}

/// An expected row.
pub fn row(cx: &mut Cx<'_>, item: &Item<'_>) -> Option<serde_json::Map<String, Json>> {
    match json(cx, item)? {
        Json::Object(row) => Some(row),
        _ => None,
    }
}

/// Writes a value as JSON, members in the order of the file, numbers with the digits they have there. `false` after
/// a finding.
fn write_json(cx: &mut Cx<'_>, item: &Item<'_>, out: &mut String) -> bool {
    match item.get_ref() {
        DeValue::String(text) => push_string(text, out),
        DeValue::Boolean(value) => out.push_str(if *value { "true" } else { "false" }),
        DeValue::Datetime(at) => push_string(&at.to_string(), out),
        DeValue::Float(float) if float.as_str().contains(['n', 'i']) => {
            cx.found.error(code::TEST_VALUE, item.span(), "JSON has no infinity and no NaN");
            return false;
        }
        DeValue::Float(float) => out.push_str(float.as_str().trim_start_matches('+')),
        DeValue::Integer(_) if is_hole(item) => return false,
        DeValue::Integer(integer) if integer.radix() == 10 => out.push_str(integer.as_str().trim_start_matches('+')),
        DeValue::Integer(integer) => match i64::from_str_radix(integer.as_str(), integer.radix()) {
            Ok(value) => out.push_str(&value.to_string()),
            Err(_) => {
                cx.found.error(code::TEST_VALUE, item.span(), "too large; write its decimal digits");
                return false;
            }
        },
        DeValue::Array(array) => {
            out.push('[');
            for (i, item) in array.iter().enumerate() {
                out.push_str(if i > 0 { "," } else { "" });
                if !write_json(cx, item, out) {
                    return false;
                }
            }
            out.push(']');
        }
        DeValue::Table(entries) => {
            out.push('{');
            for (i, (key, item)) in in_order(entries).into_iter().enumerate() {
                out.push_str(if i > 0 { "," } else { "" });
                push_string(key.get_ref(), out);
                out.push(':');
                if !write_json(cx, item, out) {
                    return false;
                }
            }
            out.push('}');
        }
    }
    true
}

fn push_string(text: &str, out: &mut String) {
    out.push_str(&Json::from(text).to_string());
}
