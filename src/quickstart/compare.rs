//! What came out against what must: lost, doubled, different.

use std::collections::{BTreeMap, HashMap};

use super::fold::{Expected, Order, read};

/// What was found in the topics and the table.
#[derive(Debug, Default)]
pub struct Found {
    /// Values of `orders.priced`.
    pub outputs: Vec<Vec<u8>>,
    pub rows: Vec<Order>,
    pub dead_letters: Vec<DeadLetter>,
}

/// A record of the dead-letter topic: who rejected it, why, and its value as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    pub node: String,
    pub reason: String,
    pub value: Vec<u8>,
}

/// The verdict. All zero: every record had its effect once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Per event, the outputs that are missing, summed.
    pub lost: u64,
    /// Per event, the outputs that are too many, summed.
    pub doubled: u64,
    /// Outputs with another content, rows that are missing, too many or other, dead letters missing or too many.
    pub different: u64,
    /// The first few findings in words.
    pub examples: Vec<String>,
}

const EXAMPLES: usize = 5;

impl Comparison {
    pub fn is_right(&self) -> bool {
        (self.lost, self.doubled, self.different) == (0, 0, 0)
    }

    fn example(&mut self, text: impl FnOnce() -> String) {
        if self.examples.len() < EXAMPLES {
            self.examples.push(text());
        }
    }

    fn differs(&mut self, text: impl FnOnce() -> String) {
        self.different += 1;
        self.example(text);
    }
}

/// Compares what was found with what must be there.
pub fn compare(expected: &Expected, found: &Found) -> Comparison {
    let mut result = Comparison::default();
    outputs(expected, &found.outputs, &mut result);
    rows(&expected.rows, &found.rows, &mut result);
    dead_letters(expected, &found.dead_letters, &mut result);
    result
}

fn outputs(expected: &Expected, found: &[Vec<u8>], result: &mut Comparison) {
    let mut came: HashMap<&str, u64> = HashMap::new();
    for value in found {
        let event = event_id(value);
        match event.as_ref().and_then(|event| expected.outputs.get_key_value(event)) {
            Some((event, (must, _))) => {
                *came.entry(event).or_default() += 1;
                if read(value, false).as_ref() != Some(must) {
                    result.differs(|| format!("output {event}: {}", String::from_utf8_lossy(value)));
                }
            }
            None => {
                result.doubled += 1;
                result.example(|| format!("an output that nothing asks for: {}", String::from_utf8_lossy(value)));
            }
        }
    }
    for (event, (_, must)) in &expected.outputs {
        let came = came.get(event.as_str()).copied().unwrap_or(0);
        if came != *must {
            result.lost += must.saturating_sub(came);
            result.doubled += came.saturating_sub(*must);
            result.example(|| format!("output {event}: {came} times instead of {must}"));
        }
    }
}

fn event_id(value: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Event {
        event_id: String,
    }
    serde_json::from_slice(value).ok().map(|event: Event| event.event_id)
}

fn rows(expected: &BTreeMap<String, Order>, found: &[Order], result: &mut Comparison) {
    let found: BTreeMap<&str, &Order> = found.iter().map(|row| (row.order_id.as_str(), row)).collect();
    for (key, must) in expected {
        match found.get(key.as_str()) {
            Some(row) if *row == must => {}
            Some(row) => result.differs(|| format!("row {key}: {row:?} instead of {must:?}")),
            None => result.differs(|| format!("row {key} is missing")),
        }
    }
    for key in found.keys().filter(|key| !expected.contains_key(**key)) {
        result.differs(|| format!("row {key} should not be there"));
    }
}

/// An undecodable value must come back as it was, a refused order by its event.
fn dead_letters(expected: &Expected, found: &[DeadLetter], result: &mut Comparison) {
    let refused = |value: &[u8]| read(value, false).map(|order| order.event_id);
    // How often each must be there, minus how often it is.
    let mut open: BTreeMap<(&str, Vec<u8>), i64> = BTreeMap::new();
    for value in &expected.undecodable {
        *open.entry(("undecodable", value.clone())).or_default() += 1;
    }
    for event in &expected.refused {
        *open.entry(("database", event.clone().into_bytes())).or_default() += 1;
    }
    for letter in found {
        let identity = match letter.reason.as_str() {
            "database" => refused(&letter.value).unwrap_or_default().into_bytes(),
            _ => letter.value.clone(),
        };
        *open.entry((&letter.reason, identity)).or_default() -= 1;
    }
    for ((reason, value), balance) in open.into_iter().filter(|(_, balance)| *balance != 0) {
        result.different += balance.unsigned_abs();
        let (word, value) =
            (if balance > 0 { "missing" } else { "too many" }, String::from_utf8_lossy(&value).into_owned());
        result.example(|| format!("dead letter {word} ({reason}): {value}"));
    }
}

#[cfg(test)]
mod tests {
    use super::super::fold::{fold, tests::sent};
    use super::*;

    fn output(event: &str, version: i64, total: &str) -> Vec<u8> {
        let what = format!(r#""status":"paid","qty":1,"price":19.90,"version":{version},"total":{total}"#);
        let when = r#""created_at":"2026-01-05T00:00:00.000Z""#;
        format!(r#"{{"event_id":"{event}","order_id":"a","customer_id":"c",{what},{when}}}"#).into_bytes()
    }

    /// Event e1 once, e2 twice, a broken value, e3 refused.
    fn expected() -> Expected {
        let broken = super::super::orders::Record { value: b"{".to_vec(), ..sent("", "", 0, "", 0) };
        let refused = sent("e3", "a", 3, "paid", 0);
        fold(&[
            sent("e1", "a", 1, "paid", 1),
            sent("e2", "a", 2, "paid", 1),
            sent("e2", "a", 2, "paid", 1),
            broken,
            refused,
        ])
    }

    fn found() -> Found {
        let zero = String::from_utf8(output("e3", 3, "0.0")).unwrap().replace("\"qty\":1", "\"qty\":0").into_bytes();
        let letter = |node: &str, reason: &str, value: &[u8]| DeadLetter {
            node: node.into(),
            reason: reason.into(),
            value: value.to_vec(),
        };
        Found {
            outputs: vec![output("e1", 1, "19.9"), output("e2", 2, "19.9"), output("e2", 2, "19.9"), zero.clone()],
            rows: expected().rows.into_values().collect(),
            dead_letters: vec![letter("orders", "undecodable", b"{"), letter("orders_table", "database", &zero)],
        }
    }

    fn verdict(change: impl FnOnce(&mut Found)) -> (u64, u64, u64) {
        let mut found = found();
        change(&mut found);
        let c = compare(&expected(), &found);
        assert_eq!(c.is_right(), c.examples.is_empty());
        (c.lost, c.doubled, c.different)
    }

    #[test]
    fn what_is_right_is_right() {
        assert_eq!(verdict(|_| {}), (0, 0, 0));
    }

    #[test]
    fn outputs_are_counted_by_event_and_read_by_content() {
        assert_eq!(verdict(|f| drop(f.outputs.remove(1))), (1, 0, 0));
        assert_eq!(verdict(|f| f.outputs.push(output("e1", 1, "19.9"))), (0, 1, 0));
        assert_eq!(verdict(|f| f.outputs.push(output("e9", 1, "19.9"))), (0, 1, 0), "an event that nobody sent");
        assert_eq!(verdict(|f| f.outputs.push(b"{".to_vec())), (0, 1, 0));
        assert_eq!(
            verdict(|f| f.outputs[0] = output("e2", 2, "19.9")),
            (1, 1, 0),
            "one lost is not made up by another"
        );
        assert_eq!(verdict(|f| f.outputs[0] = output("e1", 1, "19.91")), (0, 0, 1));
        assert_eq!(verdict(|f| f.outputs[0] = b"{\"event_id\":\"e1\"}".to_vec()), (0, 0, 1));
    }

    #[test]
    fn rows_and_dead_letters_count_too() {
        assert_eq!(verdict(|f| f.rows.clear()), (0, 0, 1));
        assert_eq!(verdict(|f| f.rows[0].version = 1), (0, 0, 1));
        assert_eq!(verdict(|f| f.rows.push(Order { order_id: "z".into(), ..f.rows[0].clone() })), (0, 0, 1));
        assert_eq!(verdict(|f| drop(f.dead_letters.pop())), (0, 0, 1));
        assert_eq!(verdict(|f| f.dead_letters[0].value = b"}".to_vec()), (0, 0, 2), "one missing, one too many");
        assert_eq!(verdict(|f| f.dead_letters[0].reason = "expression".into()), (0, 0, 2));
    }
}
