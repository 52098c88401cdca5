//! The fields of an aggregate: what each keeps of the values that it has seen.

use std::collections::BTreeSet;

use crate::decimal::Decimal;
use crate::json::{unescape, write_string};
use crate::topology::spec::Function;

use super::coding::{Coded, put_bytes, put_number};
use super::number::Number;

/// What one field of one group keeps. Values are JSON texts; an empty one is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cell {
    Count(u64),
    Sum(Number),
    Average(Number, u64),
    /// The least, greatest, first or last, or what a reduction has come to.
    One(Vec<u8>),
    /// In the one spelling that equal values share.
    Distinct(BTreeSet<Vec<u8>>),
    List(Vec<Vec<u8>>),
    /// Of a session: values with the order of their arrival, so that two sessions merge as if they had always been one.
    Arrivals(Vec<(u64, Vec<u8>)>),
}

/// Why a field does not take a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It takes values like these.
    Takes(&'static str),
    /// 128 bits do not hold it.
    Overflow,
    /// So many values are all that it keeps.
    Limit,
}

const NUMBERS: Refusal = Refusal::Takes("numbers");
const ORDERED: Refusal = Refusal::Takes("numbers or strings, and not both");
const SCALARS: Refusal = Refusal::Takes("strings, numbers and booleans");

impl Cell {
    /// Of a group that has seen nothing.
    pub(super) fn new(function: Function) -> Cell {
        match function {
            Function::Count => Cell::Count(0),
            Function::Sum => Cell::Sum(Number::default()),
            Function::Avg => Cell::Average(Number::default(), 0),
            Function::Min | Function::Max | Function::First | Function::Last | Function::Reduce => {
                Cell::One(Vec::new())
            }
            Function::DistinctCount => Cell::Distinct(BTreeSet::new()),
            Function::Collect => Cell::List(Vec::new()),
        }
    }

    /// Of a session that has seen nothing.
    pub(super) fn of_session(function: Function) -> Cell {
        match function {
            Function::Min | Function::Max | Function::First | Function::Last | Function::Collect => {
                Cell::Arrivals(Vec::new())
            }
            _ => Cell::new(function),
        }
    }

    /// Takes the JSON text of a value that is not null. `limit`: how many values a cell that keeps several may hold.
    /// `arrival`: rises with each record, where sessions are kept.
    ///
    /// # Errors
    /// Why it does not; the cell is as it was.
    pub(super) fn take(&mut self, function: Function, limit: usize, text: &[u8], arrival: u64) -> Result<(), Refusal> {
        match self {
            Cell::Arrivals(_) => {
                let one = Cell::Arrivals(vec![(arrival, text.to_vec())]);
                if matches!(function, Function::Min | Function::Max) {
                    // What has no order is refused also where it comes first.
                    less(text, &[])?;
                }
                self.merge(function, limit, one)?;
            }
            Cell::Count(count) => *count += 1,
            Cell::Sum(sum) => *sum = sum.plus(number(text)?).ok_or(Refusal::Overflow)?,
            Cell::Average(sum, count) => {
                *sum = sum.plus(number(text)?).ok_or(Refusal::Overflow)?;
                *count += 1;
            }
            Cell::One(one) => {
                let takes = match function {
                    Function::First => one.is_empty(),
                    Function::Min => less(text, one)?,
                    Function::Max => less(one, text)? || one.is_empty(),
                    _ => true,
                };
                if takes {
                    one.clear();
                    one.extend_from_slice(text);
                }
            }
            Cell::Distinct(seen) => {
                let value = canonical(text)?;
                if !seen.contains(&value) {
                    if seen.len() >= limit {
                        return Err(Refusal::Limit);
                    }
                    seen.insert(value);
                }
            }
            Cell::List(list) if list.len() >= limit => return Err(Refusal::Limit),
            Cell::List(list) => list.push(text.to_vec()),
        }
        Ok(())
    }

    /// Takes in what another session has kept, of the same function; a reduction has its own way. `limit`: how many values a
    /// cell that keeps several may hold.
    ///
    /// # Errors
    /// Why it does not; the cell is as it was.
    pub(super) fn merge(&mut self, function: Function, limit: usize, other: Cell) -> Result<(), Refusal> {
        match (self, other) {
            (Cell::Count(count), Cell::Count(other)) => *count += other,
            (Cell::Sum(sum), Cell::Sum(other)) => *sum = sum.plus(other).ok_or(Refusal::Overflow)?,
            (Cell::Average(sum, count), Cell::Average(other, others)) => {
                *sum = sum.plus(other).ok_or(Refusal::Overflow)?;
                *count += others;
            }
            (Cell::Distinct(seen), Cell::Distinct(other)) => {
                if seen.union(&other).count() > limit {
                    return Err(Refusal::Limit);
                }
                seen.extend(other);
            }
            (Cell::Arrivals(list), Cell::Arrivals(mut other)) => {
                if function == Function::Collect && list.len() + other.len() > limit {
                    return Err(Refusal::Limit);
                }
                let before = |a: &(u64, Vec<u8>), b: &(u64, Vec<u8>)| match function {
                    Function::Min => Ok(less(&a.1, &b.1)? || (!less(&b.1, &a.1)? && a.0 < b.0)),
                    Function::Max => Ok(less(&b.1, &a.1)? || (!less(&a.1, &b.1)? && a.0 < b.0)),
                    Function::Last => Ok(a.0 > b.0),
                    _ => Ok(a.0 < b.0),
                };
                match (function, list.first(), other.first()) {
                    (_, _, None) => {}
                    (Function::Collect, ..) => {
                        list.append(&mut other);
                        list.sort_by_key(|(arrival, _)| *arrival);
                    }
                    (_, Some(own), Some(new)) if before(own, new)? => {}
                    (_, _, Some(_)) => *list = other,
                }
            }
            _ => debug_assert!(false, "two cells of one function are alike"),
        }
        Ok(())
    }

    /// Writes what the field shows, as JSON.
    pub(super) fn write(&self, function: Function, out: &mut Vec<u8>) {
        match self {
            Cell::Arrivals(list) if function == Function::Collect => {
                let values: Vec<&[u8]> = list.iter().map(|(_, value)| &value[..]).collect();
                out.push(b'[');
                out.extend_from_slice(&values.join(&b','));
                out.push(b']');
            }
            Cell::Arrivals(list) => out.extend_from_slice(list.first().map_or(b"null", |(_, value)| &value[..])),
            Cell::Count(count) => out.extend_from_slice(count.to_string().as_bytes()),
            Cell::Sum(sum) => sum.write(out),
            Cell::Average(_, 0) => out.extend_from_slice(b"null"),
            Cell::Average(sum, count) => sum.over(*count).write(out),
            Cell::One(one) if one.is_empty() => out.extend_from_slice(b"null"),
            Cell::One(one) => out.extend_from_slice(one),
            Cell::Distinct(seen) => out.extend_from_slice(seen.len().to_string().as_bytes()),
            Cell::List(list) => {
                out.push(b'[');
                out.extend_from_slice(&list.join(&b','));
                out.push(b']');
            }
        }
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Cell::Count(count) => put_number(*count, out),
            Cell::Sum(sum) => sum.encode(out),
            Cell::Average(sum, count) => {
                sum.encode(out);
                put_number(*count, out);
            }
            Cell::One(one) => put_bytes(one, out),
            Cell::Distinct(seen) => put_all(seen.len(), seen.iter(), out),
            Cell::List(list) => put_all(list.len(), list.iter(), out),
            Cell::Arrivals(list) => {
                put_number(list.len() as u64, out);
                for (arrival, value) in list {
                    put_number(*arrival, out);
                    put_bytes(value, out);
                }
            }
        }
    }

    /// Reads what [`Cell::encode`] wrote of a cell like this empty one; `None` of anything else.
    pub(super) fn decode(mut self, coded: &mut Coded<'_>) -> Option<Cell> {
        match &mut self {
            Cell::Count(count) => *count = coded.number()?,
            Cell::Sum(sum) => *sum = Number::decode(coded.array()?),
            Cell::Average(sum, count) => (*sum, *count) = (Number::decode(coded.array()?), coded.number()?),
            Cell::One(one) => one.extend_from_slice(coded.bytes()?),
            Cell::Distinct(seen) => {
                for _ in 0..coded.number()? {
                    seen.insert(coded.bytes()?.to_vec());
                }
            }
            Cell::List(list) => {
                for _ in 0..coded.number()? {
                    list.push(coded.bytes()?.to_vec());
                }
            }
            Cell::Arrivals(list) => {
                for _ in 0..coded.number()? {
                    list.push((coded.number()?, coded.bytes()?.to_vec()));
                }
            }
        }
        Some(self)
    }
}

fn put_all<'a>(len: usize, values: impl Iterator<Item = &'a Vec<u8>>, out: &mut Vec<u8>) {
    put_number(len as u64, out);
    values.for_each(|value| put_bytes(value, out));
}

fn decimal(text: &[u8]) -> Option<Decimal<'_>> {
    std::str::from_utf8(text).ok().and_then(Decimal::parse)
}

fn number(text: &[u8]) -> Result<Number, Refusal> {
    Number::of(&decimal(text).ok_or(NUMBERS)?).ok_or(Refusal::Overflow)
}

/// The inside of a JSON string.
fn string(text: &[u8]) -> Option<String> {
    text.strip_prefix(b"\"")?.strip_suffix(b"\"").map(unescape)
}

/// Whether a value comes before another; before none comes any.
fn less(text: &[u8], other: &[u8]) -> Result<bool, Refusal> {
    match (string(text), string(other)) {
        (Some(text), Some(other)) => Ok(text < other),
        (Some(_), None) if other.is_empty() => Ok(true),
        (None, Some(_)) if text.is_empty() => Ok(false),
        (Some(_), None) | (None, Some(_)) => Err(ORDERED),
        (None, None) => {
            let read = |text: &[u8]| match text.is_empty() {
                true => Ok(None),
                false => Number::of(&decimal(text).ok_or(ORDERED)?).ok_or(Refusal::Overflow).map(Some),
            };
            Ok(match (read(text)?, read(other)?) {
                (Some(text), Some(other)) => text.compare(other).is_lt(),
                (text, None) => text.is_some(),
                (None, Some(_)) => false,
            })
        }
    }
}

/// The one spelling of a string, a number or a boolean.
fn canonical(text: &[u8]) -> Result<Vec<u8>, Refusal> {
    if let Some(inside) = string(text) {
        let mut out = Vec::with_capacity(text.len());
        write_string(&inside, &mut out);
        return Ok(out);
    }
    if let Some(number) = decimal(text) {
        let mut out = String::new();
        number.write_canonical(&mut out);
        return Ok(out.into_bytes());
    }
    if matches!(text, b"true" | b"false") { Ok(text.to_vec()) } else { Err(SCALARS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a field shows after each of these values.
    fn shown(function: Function, values: &[&str]) -> Vec<Result<String, Refusal>> {
        let shown = |new: fn(Function) -> Cell| {
            let mut cell = new(function);
            let show = |(arrival, value): (u64, &&str)| {
                let taken = cell.take(function, 3, value.as_bytes(), arrival);
                // It comes back from its bytes, whatever it holds.
                let mut bytes = Vec::new();
                cell.encode(&mut bytes);
                let mut coded = Coded(&bytes);
                assert_eq!(new(function).decode(&mut coded), Some(cell.clone()));
                assert!(coded.0.is_empty());
                taken.map(|()| written(&cell, function))
            };
            (0..).zip(values).map(show).collect::<Vec<_>>()
        };
        assert_eq!(shown(Cell::new), shown(Cell::of_session), "{function:?} shows the same of sessions");
        shown(Cell::new)
    }

    fn written(cell: &Cell, function: Function) -> String {
        let mut out = Vec::new();
        cell.write(function, &mut out);
        String::from_utf8(out).unwrap()
    }

    fn ok(texts: &[&str]) -> Vec<Result<String, Refusal>> {
        texts.iter().map(|text| Ok((*text).to_owned())).collect()
    }

    #[test]
    fn before_the_first_value_a_field_shows_nothing_or_zero() {
        for (function, shown) in [
            (Function::Count, "0"),
            (Function::Sum, "0"),
            (Function::Avg, "null"),
            (Function::Min, "null"),
            (Function::Max, "null"),
            (Function::First, "null"),
            (Function::Last, "null"),
            (Function::DistinctCount, "0"),
            (Function::Collect, "[]"),
        ] {
            assert_eq!(written(&Cell::new(function), function), shown);
            assert_eq!(written(&Cell::of_session(function), function), shown);
        }
    }

    #[test]
    fn numbers_keep_their_digits() {
        assert_eq!(shown(Function::Sum, &["9007199254740993", "0.1"]), ok(&["9007199254740993", "9007199254740993.1"]));
        assert_eq!(shown(Function::Avg, &["1", "2", "2"]), ok(&["1", "1.5", "1.666667"]));
        assert_eq!(shown(Function::Min, &["2", "10", "1.50", "1.5"]), ok(&["2", "2", "1.50", "1.50"]));
        assert_eq!(
            shown(Function::Max, &["2", "10", "1e1", "18446744073709551615"])[2..],
            ok(&["10", "18446744073709551615"])
        );
        let overflow = shown(Function::Sum, &["1e38", "9e37", "1"]);
        assert_eq!(overflow[1], Err(Refusal::Overflow));
        assert_eq!(overflow[2], Ok("100000000000000000000000000000000000001".to_owned()), "the sum is as it was");
    }

    #[test]
    fn strings_have_an_order_too_but_none_with_numbers() {
        assert_eq!(
            shown(Function::Min, &[r#""b""#, r#""\u0061""#, r#""aa""#]),
            ok(&[r#""b""#, r#""\u0061""#, r#""\u0061""#])
        );
        assert_eq!(shown(Function::Max, &[r#""2026-01-02""#, "7"])[1], Err(ORDERED));
        assert_eq!(shown(Function::Max, &["7", r#""7""#])[1], Err(ORDERED));
        assert_eq!(shown(Function::Min, &["true"])[0], Err(ORDERED));
        assert_eq!(shown(Function::Sum, &[r#""7""#])[0], Err(NUMBERS));
    }

    #[test]
    fn first_last_and_collect_take_any_value() {
        assert_eq!(shown(Function::First, &["[1, 2]", "2"]), ok(&["[1, 2]", "[1, 2]"]));
        assert_eq!(shown(Function::Last, &["1", r#"{"a":1}"#]), ok(&["1", r#"{"a":1}"#]));
        let collected = shown(Function::Collect, &["1", "true", r#""x""#, "4"]);
        assert_eq!(collected[2], Ok(r#"[1,true,"x"]"#.to_owned()));
        assert_eq!(collected[3], Err(Refusal::Limit));
    }

    #[test]
    fn equal_values_are_counted_once_up_to_the_limit() {
        let counted = shown(Function::DistinctCount, &["1", "1.0", r#""1""#, r#""\u0031""#, "true", "2", "1e0"]);
        assert_eq!(counted[..5], ok(&["1", "1", "2", "2", "3"]));
        assert_eq!((&counted[5], &counted[6]), (&Err(Refusal::Limit), &Ok("3".to_owned())));
        assert_eq!(shown(Function::DistinctCount, &["[1]"])[0], Err(SCALARS));
    }

    #[test]
    fn two_sessions_merge_as_if_they_had_always_been_one() {
        let values = ["2", "1.50", "9", "1.5", "9.0", "2"];
        for function in Function::WORDS.map(|(_, function)| function).into_iter().filter(|f| *f != Function::Reduce) {
            for sides in 0..1_u32 << values.len() {
                let mut cells = [(); 3].map(|()| Cell::of_session(function));
                for (arrival, value) in (0..).zip(values) {
                    for side in [usize::from(sides & (1 << arrival) == 0), 2] {
                        cells[side].take(function, 6, value.as_bytes(), arrival).unwrap();
                    }
                }
                let [mut left, right, one] = cells;
                left.merge(function, 6, right).unwrap();
                assert_eq!(left, one, "{function:?} {sides:b}");
            }
        }
    }

    #[test]
    fn sessions_that_do_not_fit_together_stay_as_they_are() {
        let cell = |function, value: &str| {
            let mut cell = Cell::of_session(function);
            cell.take(function, 1, value.as_bytes(), 7).unwrap();
            cell
        };
        for (function, values, refusal) in [
            (Function::Sum, ["1e38", "1e38"], Refusal::Overflow),
            (Function::Avg, ["1e38", "1e38"], Refusal::Overflow),
            (Function::Min, ["1", "\"a\""], ORDERED),
            (Function::DistinctCount, ["1", "2"], Refusal::Limit),
            (Function::Collect, ["1", "1"], Refusal::Limit),
        ] {
            let mut left = cell(function, values[0]);
            assert_eq!(left.merge(function, 1, cell(function, values[1])), Err(refusal), "{function:?}");
            assert_eq!(left, cell(function, values[0]));
        }
    }
}
