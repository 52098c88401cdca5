//! `[kafka]`: brokers, and which librdkafka properties a file may set.

use std::time::Duration;

use super::cx::{Cx, Item, Text};
use super::kafka_properties::{CALLBACKS, KNOWN, OWN};
use super::read::into_map;
use crate::topology::finding::{code, did_you_mean};
use crate::topology::keys;
use crate::topology::spec::Kafka;

/// What bounds some properties.
pub struct Timeouts {
    pub transaction: Duration,
    pub session: Duration,
}

/// The property that says how members divide partitions.
pub const STRATEGY: &str = "partition.assignment.strategy";
/// The strategies that semel is tested with. Members of a group cannot mix them.
const STRATEGIES: [&str; 2] = ["cooperative-sticky", "range"];

/// Reads `[kafka]`.
pub fn read(cx: &mut Cx<'_>, item: &Item<'_>, span: std::ops::Range<usize>, timeouts: &Timeouts) -> Option<Kafka> {
    let table = cx.table(item, span, &keys::KAFKA, "`[kafka]`")?;
    let help = "such as brokers = \"${KAFKA_BROKERS:-localhost:9092}\"";
    let brokers = cx.required_string(&table, "brokers", help);
    if let Some(brokers) = &brokers {
        check_brokers(cx, brokers);
    }
    let properties = cx.settings(&table, "properties");
    for (name, span, value) in &properties {
        check_property(cx, name, span.clone(), value, timeouts);
    }
    let strategy = properties.iter().find(|(name, ..)| name == STRATEGY).map(|(_, span, _)| span.clone());
    let properties = into_map(properties);
    let kafka = brokers.map(|brokers| Kafka { brokers: brokers.value, properties });
    if let Some(span) = strategy
        && kafka.as_ref().is_some_and(Kafka::broker_assigns)
    {
        let message = format!("`{STRATEGY}` has no place beside `group.protocol` = \"consumer\": the broker assigns");
        cx.found.error(code::KAFKA_PROPERTY, span, message).help("leave one of them out");
    }
    kafka
}

fn check_brokers(cx: &mut Cx<'_>, brokers: &Text) {
    if brokers.unset {
        return;
    }
    let bad = brokers.value.split(',').find(|broker| !is_broker(broker.trim()));
    if bad.is_some() {
        let message = format!("`brokers` must be host:port, several by comma, not {}", brokers.shown);
        cx.found.error(code::INVALID_VALUE, brokers.span.clone(), message);
    }
}

fn is_broker(broker: &str) -> bool {
    let address = broker.split_once("://").map_or(broker, |(_, address)| address);
    // An IPv6 address stands in brackets; its colons are no ports.
    let (host, port) = match address.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (address, None),
    };
    let port = port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
    !host.is_empty() && !host.contains(char::is_whitespace) && port
}

fn check_property(cx: &mut Cx<'_>, name: &str, span: std::ops::Range<usize>, value: &Text, timeouts: &Timeouts) {
    if let Some((_, why, instead)) = OWN.iter().find(|(names, ..)| names.contains(&name)) {
        cx.found.error(code::KAFKA_PROPERTY, span, format!("`{name}` is semel's to set: {why}")).help(*instead);
    } else if CALLBACKS.contains(&name) {
        cx.found.error(
            code::KAFKA_PROPERTY,
            span,
            format!("`{name}` takes code or is read-only; a file cannot set it"),
        );
    } else if !KNOWN.contains(&name) {
        let known = KNOWN.iter().copied().chain(OWN.iter().flat_map(|(names, ..)| names.iter().copied()));
        let help = did_you_mean(name, known).unwrap_or_else(|| {
            "properties are librdkafka's, listed in its CONFIGURATION.md; settings of the Java client are none"
                .to_owned()
        });
        cx.found.error(code::UNKNOWN_PROPERTY, span, format!("librdkafka has no property `{name}`")).help(help);
    } else {
        check_bound(cx, name, value, timeouts);
        let secret = name.contains("password") || name.contains("secret") || name.ends_with(".key.pem");
        if secret && value.shown.starts_with('`') {
            cx.secret(value.span.clone(), &format!("`{name}` is written into the file"));
        }
    }
}

/// Properties that are free within bounds that the timeouts set.
fn check_bound(cx: &mut Cx<'_>, name: &str, value: &Text, timeouts: &Timeouts) {
    let (transaction, session) = (timeouts.transaction.as_millis() as i64, timeouts.session.as_millis() as i64);
    if name == STRATEGY && !value.unset && !STRATEGIES.contains(&value.value.as_str()) {
        let message = format!("`{STRATEGY}` must be \"cooperative-sticky\" or \"range\", not {}", value.shown);
        cx.found.error(code::KAFKA_PROPERTY, value.span.clone(), message).help("one of them, the same in all members");
        return;
    }
    let Ok(ms) = value.value.trim().parse::<i64>() else { return };
    let problem = match name {
        "max.poll.interval.ms" if ms < 2 * transaction => format!(
            "must be at least twice `transaction_timeout` ({}): a worker that finishes a transaction in a rebalance \
             would lose its partitions",
            2 * transaction
        ),
        "max.poll.interval.ms" if ms < session => {
            format!("must be at least `session_timeout` ({session}), or the client refuses to start")
        }
        "heartbeat.interval.ms" if ms >= session => {
            format!("must be below `session_timeout` ({session}), or the group gives the partitions away")
        }
        "socket.timeout.ms" if ms > transaction - 100 => format!(
            "must be at most `transaction_timeout` less 100 ({}), or the client refuses to start",
            transaction - 100
        ),
        _ => return,
    };
    cx.found.error(code::KAFKA_PROPERTY, value.span.clone(), format!("`{name}` {problem}"));
}
