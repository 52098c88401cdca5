use super::*;

fn column(ty: Type) -> Column {
    Column { name: "c".into(), ty, required: false, default: None, may_be_filled: false }
}

/// The value's text, as it goes to the server.
fn stored(ty: Type, key: bool, json: &str) -> Result<String, String> {
    let mut arena = Arena::default();
    Ok(match convert(&column(ty), key, json, &mut arena).map_err(Cow::into_owned)? {
        Value::Null => "NULL".into(),
        Value::Bool(b) => b.to_string(),
        Value::Int(n) => n.to_string(),
        Value::Float(n) => n.to_string(),
        Value::Uuid(id) => Uuid::from_bytes(id).to_string(),
        Value::Text(span) => arena.text(span).into(),
        Value::Bytes(span) => format!("{:?}", arena.bytes(span)),
    })
}

fn ok(ty: Type, json: &str) -> String {
    stored(ty, false, json).unwrap()
}

fn problem(ty: Type, json: &str) -> String {
    stored(ty, false, json).unwrap_err()
}

const NUMERIC: Type = Type::Numeric { limits: None };
const TEXT: Type = Type::Text { max: None };

#[test]
fn numbers_keep_their_digits() {
    for json in ["9007199254740993", "123456789012345678901234567890", "0.10", "-1.2300", "1e3", "18446744073709551615"]
    {
        assert_eq!(ok(NUMERIC, json), json);
    }
    assert_eq!(ok(NUMERIC, "\"19.90\""), "19.90");
    let money = Type::Numeric { limits: Some((5, 2)) };
    assert_eq!(ok(money.clone(), "999.99"), "999.99");
    assert_eq!(ok(money.clone(), "1.500"), "1.500", "zeros are no digits that could be lost");
    assert_eq!(problem(money.clone(), "1000"), "out of range");
    assert_eq!(problem(money.clone(), "1.005"), "digits behind its scale would be lost");
    assert_eq!(problem(money, "\"1,5\""), "no number");
    assert_eq!(problem(NUMERIC, "1e200000"), "out of range");
    assert_eq!(problem(NUMERIC, "1e-20000"), "digits behind its scale would be lost");
    let thousands = Type::Numeric { limits: Some((2, -3)) };
    assert_eq!(ok(thousands.clone(), "12000"), "12000");
    assert_eq!(problem(thousands.clone(), "12500"), "digits behind its scale would be lost");
    assert_eq!(problem(thousands, "100000"), "out of range");
}

#[test]
fn integers_are_neither_wrapped_nor_rounded() {
    assert_eq!(ok(Type::Int8, "-9223372036854775808"), "-9223372036854775808");
    assert_eq!(ok(Type::Int8, "1e3"), "1000");
    assert_eq!(ok(Type::Int8, "\"228930314431312345\""), "228930314431312345");
    assert_eq!(problem(Type::Int8, "18446744073709551615"), "out of range");
    assert_eq!(ok(Type::Int4, "2147483647"), "2147483647");
    assert_eq!(problem(Type::Int4, "2147483648"), "out of range");
    assert_eq!(problem(Type::Int2, "-32769"), "out of range");
    assert_eq!(problem(Type::Int8, "0.1"), "it is no integer");
    assert_eq!(problem(Type::Int8, "true"), "no number");
    assert_eq!(problem(Type::Int8, "{}"), "no number");
}

#[test]
fn floats_beyond_the_type_are_refused_at_both_ends() {
    assert_eq!(ok(Type::Float8, "1e308"), 1e308.to_string());
    assert_eq!(problem(Type::Float8, "1e400"), "out of range");
    assert_eq!(problem(Type::Float8, "1e-400"), "out of range");
    assert_eq!(problem(Type::Float4, "1e39"), "out of range");
    assert_eq!(ok(Type::Float4, "0.1"), f64::from(0.1f32).to_string());
    assert_eq!(ok(Type::Float8, "-0.0"), "0");
}

#[test]
fn text_takes_strings_unescaped_and_anything_else_as_json() {
    assert_eq!(ok(TEXT, r#""a\"b\u00e9\n""#), "a\"bé\n");
    assert_eq!(ok(TEXT, "1.50"), "1.50");
    assert_eq!(ok(TEXT, r#"{"a": [1]}"#), r#"{"a": [1]}"#);
    assert_eq!(ok(TEXT, "true"), "true");
    assert_eq!(ok(TEXT, "null"), "NULL");
    assert_eq!(ok(TEXT, "\"null\""), "null");
    assert_eq!(ok(TEXT, "\"\""), "");
    assert_eq!(problem(TEXT, r#""a\u0000b""#), "it holds a NUL character, which Postgres cannot store in text");
    assert!(problem(TEXT, r#""\ud800""#).starts_with("no valid string"));
    let short = Type::Text { max: Some(3) };
    assert_eq!(ok(short.clone(), "\"äöü\""), "äöü", "characters count, not bytes");
    assert_eq!(problem(short, "\"äöüß\""), "it has 4 characters");
    assert_eq!(ok(Type::Char { max: 3 }, "\"ab   \""), "ab", "blanks at the end of a char(n) mean nothing");
    assert_eq!(problem(Type::Char { max: 3 }, "\"abcd\""), "it has 4 characters");
}

#[test]
fn other_types_take_what_they_say() {
    assert_eq!(ok(Type::Bool, "true"), "true");
    assert_eq!(problem(Type::Bool, "\"true\""), "only true and false do");
    assert_eq!(problem(Type::Bool, "1"), "only true and false do");
    let id = "\"A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11\"";
    assert_eq!(ok(Type::Uuid, id), "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11");
    assert_eq!(problem(Type::Uuid, "\"a0eebc99\""), "no uuid");
    assert_eq!(ok(Type::Date, "\"2024-02-29\""), "2024-02-29");
    assert_eq!(problem(Type::Date, "\"2023-02-29\""), "no date as YYYY-MM-DD");
    assert_eq!(ok(Type::Bytea, "\"AAEC/w==\""), "[0, 1, 2, 255]");
    assert_eq!(problem(Type::Bytea, "\"*\""), "no base64");
    let mood = Type::Enum { sql: "m".into(), labels: vec!["sad".into(), "glad".into()] };
    assert_eq!(ok(mood.clone(), "\"glad\""), "glad");
    assert_eq!(problem(mood, "\"Glad\""), "none of the enum's labels");
    assert_eq!(ok(Type::Json, r#"{"a":1.10,"a":2e1}"#), r#"{"a":1.10,"a":2e1}"#);
    assert!(problem(Type::Jsonb, r#"["\u0000"]"#).contains("\\u0000"));
    let time = Type::TimestampTz { digits: 3 };
    assert_eq!(
        ok(time.clone(), "\"2000-01-01T00:00:00.0015Z\""),
        "946684800002000",
        "rounded to the column's milliseconds"
    );
    assert_eq!(ok(time.clone(), "1500"), "1500000");
    assert_eq!(problem(time, "1.5"), "no integer of milliseconds since 1970");
    assert_eq!(problem(Type::Timestamp { digits: 6 }, "true"), "neither a string nor an integer");
}

#[test]
fn equal_keys_become_the_same_value() {
    let key = |ty: Type, json: &str| stored(ty, true, json).unwrap();
    assert_eq!(key(NUMERIC, "1.0"), key(NUMERIC, "1"));
    assert_eq!(key(NUMERIC, "\"100\""), key(NUMERIC, "1e2"));
    assert_eq!(key(Type::Char { max: 3 }, "\"a\""), key(Type::Char { max: 3 }, "\"a \""));
    let time = Type::TimestampTz { digits: 6 };
    assert_eq!(key(time.clone(), "\"2024-01-01T02:00:00+02:00\""), key(time, "\"2024-01-01T00:00:00Z\""));
    let upper = "\"A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11\"";
    assert_eq!(key(Type::Uuid, upper), key(Type::Uuid, &upper.to_lowercase()));
    assert_eq!(key(Type::Float8, "-0"), key(Type::Float8, "0"));
}
