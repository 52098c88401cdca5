//! The orders that the quick start produces: made from a seed, with the trouble that real topics hold.

use chrono::DateTime;

/// Orders that change at the same time, at most: their updates interleave.
const OPEN_ORDERS: usize = 400;
const CUSTOMERS: u64 = 2_000;
/// Between two events, in milliseconds of event time.
const STEP_MS: i64 = 10;

/// Values that no JSON source takes, each for another reason.
const BROKEN: [&[u8]; 6] = [
    b"order 17, two pieces, please",
    b"{\"event_id\":\"e-cut-off\",\"order_id\":\"o-00",
    b"{\"event_id\":\"e-not-utf-8\",\"note\":\"caf\xe9\"}",
    b"{\"event_id\":\"e-lone-surrogate\",\"note\":\"\\ud83d\"}",
    b"[\"an array\",\"not an object\"]",
    b"",
];

/// A record of the source topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The order's id.
    pub key: String,
    pub value: Vec<u8>,
    /// Event time in milliseconds since the epoch.
    pub timestamp: i64,
}

/// Makes `count` records in the order in which they are sent. Event times rise by [`STEP_MS`] and end at `end_ms`;
/// some events are sent late, some twice, a few values are no JSON, and one order has a quantity of 0, which the
/// table's CHECK refuses. The same seed makes the same records.
pub fn generate(count: usize, seed: u64, end_ms: i64) -> Vec<Record> {
    let mut random = Random(seed);
    let sound = count - BROKEN.len();
    let start_ms = end_ms - sound as i64 * STEP_MS;
    let mut shop = Shop { open: Vec::new(), open_most: OPEN_ORDERS.min(sound / 25).max(1), orders: 0 };
    let refused = sound / 2;
    // Where in the stream each record is sent; most events at once.
    let mut sent: Vec<(usize, Record)> = Vec::with_capacity(count);
    let latest = (sound as u64 / 10).clamp(1, 4_000);
    let mut at = 0;
    while sent.len() < sound {
        at += 1;
        let time = start_ms + at as i64 * STEP_MS;
        let record = if at == refused { shop.refused(at, time) } else { shop.next(&mut random, at, time) };
        // Late enough to overtake: the next update of an order is on average as many events away as orders are open.
        let delay = if random.percent(10) { random.below(latest) } else { 0 };
        if sent.len() + 1 < sound && at != refused && random.percent(2) {
            let again = delay + 1 + random.below(latest);
            sent.push((at + again as usize, record.clone()));
        }
        sent.push((at + delay as usize, record));
    }
    sent.sort_by_key(|(at, _)| *at);
    let mut records: Vec<Record> = sent.into_iter().map(|(_, record)| record).collect();
    for (i, value) in BROKEN.iter().enumerate() {
        let at = (i + 1) * sound / (BROKEN.len() + 1);
        let neighbour = &records[at];
        let broken = Record { key: neighbour.key.clone(), value: value.to_vec(), timestamp: neighbour.timestamp };
        records.insert(at, broken);
    }
    records
}

/// What happens to an order, one version after the other.
struct Order {
    number: u64,
    customer: u64,
    version: u64,
    qty: u64,
    cents: u64,
}

struct Shop {
    open: Vec<Order>,
    open_most: usize,
    orders: u64,
}

impl Shop {
    /// The next event of one of the open orders.
    fn next(&mut self, random: &mut Random, event: usize, time: i64) -> Record {
        while self.open.len() < self.open_most {
            self.orders += 1;
            self.open.push(Order {
                number: self.orders,
                customer: 1 + random.below(CUSTOMERS),
                version: 0,
                qty: 1 + random.below(9),
                cents: 100 + random.below(20_000),
            });
        }
        let at = random.below(self.open.len() as u64) as usize;
        let order = &mut self.open[at];
        order.version += 1;
        let status = match order.version {
            1 => "placed",
            _ if random.percent(3) => "cancelled",
            _ if random.percent(4) => "deleted",
            2 => "paid",
            3 => "packed",
            4 => "shipped",
            _ => "delivered",
        };
        if order.version == 2 && random.percent(20) {
            order.qty = 1 + random.below(9);
        }
        let record = record(event, order, status, time);
        if ["cancelled", "deleted", "delivered"].contains(&status) {
            self.open.swap_remove(at);
        }
        record
    }

    /// An order that no table takes. It has one version: a later one could spare the database the sight of it.
    fn refused(&mut self, event: usize, time: i64) -> Record {
        self.orders += 1;
        record(event, &Order { number: self.orders, customer: 1, version: 1, qty: 0, cents: 1990 }, "placed", time)
    }
}

fn record(event: usize, order: &Order, status: &str, time: i64) -> Record {
    let key = format!("o-{:06}", order.number);
    let created_at = DateTime::from_timestamp_millis(time).unwrap_or_default().format("%Y-%m-%dT%H:%M:%S%.3fZ");
    let Order { customer, version, qty, cents, .. } = order;
    let who = format!(r#""event_id":"e-{event:07}","order_id":"{key}","customer_id":"c-{customer:04}""#);
    let what = format!(r#""status":"{status}","qty":{qty},"price":{}.{:02}"#, cents / 100, cents % 100);
    let note = NOTES[event % NOTES.len()];
    let value = format!(r#"{{{who},{what},"version":{version},"created_at":"{created_at}","note":"{note}"}}"#);
    Record { key, value: value.into_bytes(), timestamp: time }
}

/// Free text that the topology removes.
const NOTES: [&str; 4] = [
    "please ring twice, the bell is quiet",
    "leave it with the neighbour on the left",
    "a gift: no invoice in the parcel",
    "caf\\u00e9 on the ground floor",
];

/// SplitMix64: the same numbers on every machine and with every version of every library.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to `n` - 1. The bias of the remainder does not matter here.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    const END: i64 = 1_767_600_000_000;

    #[test]
    fn the_same_seed_makes_the_same_records() {
        let records = generate(3_000, 7, END);
        assert_eq!(records.len(), 3_000);
        assert_eq!(records, generate(3_000, 7, END));
        assert_ne!(records, generate(3_000, 8, END));
        assert!(records.iter().all(|r| (END - 30_000..=END).contains(&r.timestamp)));
    }

    #[test]
    fn every_kind_of_trouble_is_there_even_in_a_small_run() {
        let records = generate(1_000, 1, END);
        let parsed: Vec<serde_json::Value> = records
            .iter()
            .filter_map(|r| serde_json::from_slice(&r.value).ok())
            .filter(|v: &serde_json::Value| v.is_object())
            .collect();
        assert_eq!(records.len() - parsed.len(), BROKEN.len());
        let of = |status: &str| parsed.iter().filter(|v| v["status"] == status).count();
        assert!(of("cancelled") > 0 && of("deleted") > 0 && of("delivered") > 0);
        assert_eq!(parsed.iter().filter(|v| v["qty"] == 0).count(), 1);

        let ids: HashSet<&str> = parsed.iter().map(|v| v["event_id"].as_str().unwrap()).collect();
        assert!(ids.len() < parsed.len(), "some are sent twice");
        let mut highest: HashMap<&str, u64> = HashMap::new();
        let late = parsed.iter().filter(|v| {
            let (order, version) = (v["order_id"].as_str().unwrap(), v["version"].as_u64().unwrap());
            let before = highest.insert(order, version.max(highest.get(order).copied().unwrap_or(0)));
            before.is_some_and(|before| before > version)
        });
        assert!(late.count() > 0, "some updates overtake others");
    }
}
