//! What must come out, worked out from the records alone: plain Rust and serde_json, no code of the operators, the
//! commit protocol or the sinks. It knows `topologies/orders.toml` only as a person would tell it.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::orders::Record;

/// A row of the table, or an output record: the same members.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    pub event_id: String,
    pub order_id: String,
    pub customer_id: String,
    pub status: String,
    pub qty: i64,
    /// In its own digits: 19.90 stays 19.90.
    pub price: String,
    pub total: f64,
    pub version: i64,
    pub created_at: String,
    /// Only in the table.
    pub deleted: bool,
}

/// What must come out of the records.
#[derive(Debug, Default)]
pub struct Expected {
    /// What `orders.priced` holds for an event: the order, and how many times its event was sent.
    pub outputs: HashMap<String, (Order, u64)>,
    /// Records of `orders.priced`.
    pub out: u64,
    /// The table by order.
    pub rows: BTreeMap<String, Order>,
    /// Values that are no JSON object, in the order sent.
    pub undecodable: Vec<Vec<u8>>,
    /// Events that the table's CHECK refuses.
    pub refused: Vec<String>,
    /// Records without an output: the order was cancelled.
    pub cancelled: u64,
    /// Records whose event was sent before.
    pub repeated: u64,
    /// Records with a lower version than one of their order that was sent before.
    pub late: u64,
}

/// Works out what must come out.
pub fn fold(records: &[Record]) -> Expected {
    let mut expected = Expected::default();
    let mut highest: HashMap<String, i64> = HashMap::new();
    for record in records {
        let Some(mut order) = read(&record.value, true) else {
            expected.undecodable.push(record.value.clone());
            continue;
        };
        let seen = highest.entry(order.order_id.clone()).or_insert(order.version);
        expected.late += u64::from(order.version < *seen);
        *seen = order.version.max(*seen);
        if order.status == "cancelled" {
            expected.cancelled += 1;
            continue;
        }
        expected.out += 1;
        let sent = expected.outputs.entry(order.event_id.clone()).or_insert_with(|| (order.clone(), 0));
        sent.1 += 1;
        expected.repeated += u64::from(sent.1 > 1);
        if order.qty <= 0 {
            expected.refused.push(order.event_id);
            continue;
        }
        order.deleted = order.status == "deleted";
        // The highest version wins; of equal ones the first.
        let row = expected.rows.get(&order.order_id);
        if row.is_none_or(|row| row.version < order.version) {
            expected.rows.insert(order.order_id.clone(), order);
        }
    }
    expected
}

/// Reads an order from JSON: one as it was sent, whose total is worked out here, or one as it came out, which has its
/// total and no note. `None`: no JSON object with these members and no others.
pub fn read(json: &[u8], sent: bool) -> Option<Order> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Members<'a> {
        event_id: String,
        order_id: String,
        customer_id: String,
        status: String,
        qty: i64,
        #[serde(borrow)]
        price: &'a RawValue,
        version: i64,
        created_at: String,
        note: Option<String>,
        #[serde(borrow)]
        total: Option<&'a RawValue>,
    }
    let m: Members<'_> = serde_json::from_slice(json).ok()?;
    let total = match (sent, m.note, m.total) {
        (true, Some(_), None) => m.qty as f64 * m.price.get().parse::<f64>().ok()?,
        // By the standard library, which rounds right: serde_json's own reading of a float may be off by a digit.
        (false, None, Some(total)) => total.get().parse().ok()?,
        _ => return None,
    };
    Some(Order {
        event_id: m.event_id,
        order_id: m.order_id,
        customer_id: m.customer_id,
        status: m.status,
        qty: m.qty,
        price: m.price.get().to_owned(),
        total,
        version: m.version,
        created_at: m.created_at,
        deleted: false,
    })
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn sent(event: &str, order: &str, version: i64, status: &str, qty: i64) -> Record {
        let who = format!(r#""event_id":"{event}","order_id":"{order}","customer_id":"c""#);
        let what = format!(r#""status":"{status}","qty":{qty},"price":19.90,"version":{version}"#);
        let value = format!(r#"{{{who},{what},"created_at":"2026-01-05T00:00:00.000Z","note":""}}"#);
        Record { key: order.into(), value: value.into_bytes(), timestamp: 0 }
    }

    #[test]
    fn the_highest_version_wins_and_of_equal_ones_the_first() {
        let expected = fold(&[
            sent("e2", "a", 2, "paid", 3),
            sent("e1", "a", 1, "placed", 1),
            sent("e2", "a", 2, "paid", 3),
            sent("e4", "b", 1, "placed", 1),
            sent("e5", "b", 1, "placed", 2),
            sent("e6", "c", 1, "placed", 1),
            sent("e7", "c", 2, "deleted", 1),
            sent("e8", "d", 1, "placed", 1),
            sent("e9", "d", 2, "cancelled", 1),
            sent("e10", "d", 3, "paid", 0),
            Record { value: b"{".to_vec(), ..sent("", "", 0, "", 0) },
        ]);
        let rows: Vec<_> =
            expected.rows.values().map(|r| (r.order_id.as_str(), r.event_id.as_str(), r.deleted)).collect();
        assert_eq!(rows, [("a", "e2", false), ("b", "e4", false), ("c", "e7", true), ("d", "e8", false)]);
        assert_eq!(expected.rows["a"].total, 3.0 * 19.90);
        assert_eq!((expected.out, expected.outputs["e2"].1), (9, 2));
        assert_eq!((expected.cancelled, expected.repeated, expected.late), (1, 1, 1));
        assert_eq!((expected.undecodable, expected.refused), (vec![b"{".to_vec()], vec!["e10".to_owned()]));
    }

    #[test]
    fn an_output_has_its_total_and_no_note() {
        let json = |tail: &str| {
            let head = r#""event_id":"e","order_id":"o","customer_id":"c","status":"paid","qty":3,"price":19.90"#;
            format!(r#"{{{head},"version":1,"created_at":"t",{tail}}}"#).into_bytes()
        };
        assert_eq!(read(&json("\"total\":59.699999999999996"), false).unwrap().total, 3.0 * 19.90);
        for wrong in ["\"note\":\"\"", "\"total\":1.0,\"note\":\"\"", "\"total\":1.0,\"more\":1", "\"total\":\"1\""] {
            assert_eq!(read(&json(wrong), false), None, "{wrong}");
        }
    }
}
