//! What is fed to a scratch run: records of a file, the inputs of the topology's own tests multiplied, or a sample of the topic.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use base64::Engine;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::Failure;
use crate::kafka::{Admin, At, Connection, Consumer, ConsumerOptions, Isolation, Polled};
use crate::operator::partition;
use crate::record::{Position, TopicPartition};
use crate::topology::spec::{NodeKind, TestInput, Topology};

/// Partitions of the source topics: two can be asked back one by one, and show what order is worth.
pub const PARTITIONS: i32 = 2;
/// A broker that delivers nothing for this long is gone.
const PATIENCE: Duration = Duration::from_secs(20);

/// A record for a source topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// As the topology's file names it.
    pub topic: String,
    pub partition: i32,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    pub timestamp: Option<i64>,
}

/// Where the input comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// JSON lines.
    File(PathBuf),
    /// The inputs of the file's tests, over and over with other ids and keys until there are so many.
    Tests { at_least: usize },
    /// So many records of the source topics, from their beginning.
    Sample(usize),
}

/// The input, and where it came from in words.
pub fn gather(topology: &Topology, origin: &Origin) -> Result<(Vec<Record>, String), Failure> {
    let (records, from) = match origin {
        Origin::File(path) => {
            let name = path.display();
            let text =
                std::fs::read_to_string(path).map_err(|e| Failure::refused(format!("cannot read {name}: {e}")))?;
            (lines(topology, &text, &name.to_string())?, format!("from {name}"))
        }
        Origin::Tests { at_least } => {
            let inputs: Vec<&TestInput> = topology.tests.iter().flat_map(|case| &case.inputs).collect();
            let copies = at_least.div_ceil(inputs.len().max(1)).max(1);
            let times = if copies > 1 { format!(", {copies} times with other ids and keys") } else { String::new() };
            (multiplied(topology, &inputs, copies), format!("from the inputs of the file's [[tests]]{times}"))
        }
        Origin::Sample(most) => (sample(topology, *most)?, "from the beginning of the source topics".to_owned()),
    };
    if records.is_empty() {
        return Err(Failure::refused(format!(
            "there is nothing to feed {} with: give its records by --input FILE, as [[tests]] of the file, or by \
             --sample N from its topics",
            topology.file
        )));
    }
    Ok((records, from))
}

/// A line of an input file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line<'a> {
    /// Default: the only source topic of the file.
    topic: Option<String>,
    /// Default: that of the key.
    partition: Option<i32>,
    key: Option<String>,
    /// Kept character by character; null is a tombstone.
    #[serde(borrow, default)]
    value: Option<&'a RawValue>,
    text: Option<String>,
    base64: Option<String>,
    #[serde(default)]
    headers: Vec<(String, Option<String>)>,
    timestamp: Option<i64>,
}

fn lines(topology: &Topology, text: &str, file: &str) -> Result<Vec<Record>, Failure> {
    let topics = source_topics(topology);
    let mut records = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |what: String| Failure::refused(format!("{file}:{}: {what}", number + 1));
        let line: Line<'_> = serde_json::from_str(line).map_err(|e| wrong(e.to_string()))?;
        let topic = match (&line.topic, &topics[..]) {
            (Some(topic), _) if topics.contains(topic) => topic.clone(),
            (Some(topic), _) => return Err(wrong(format!("no source reads a topic {topic}"))),
            (None, [only]) => only.clone(),
            (None, _) => return Err(wrong(format!("name the topic, one of {}", topics.join(", ")))),
        };
        let value = match (line.value, line.text, line.base64) {
            (value, None, None) => value.map(|raw| raw.get().as_bytes().to_vec()),
            (None, Some(text), None) => Some(text.into_bytes()),
            (None, None, Some(code)) => {
                let bytes = base64::engine::general_purpose::STANDARD.decode(code);
                Some(bytes.map_err(|e| wrong(format!("base64: {e}")))?)
            }
            _ => return Err(wrong("give one of value, text and base64".to_owned())),
        };
        let key = line.key.map(String::into_bytes);
        let headers = line.headers.into_iter().map(|(name, value)| (name, value.map(String::into_bytes)));
        records.push(Record {
            topic,
            partition: line
                .partition
                .unwrap_or_else(|| partition(key.as_deref(), 0, PARTITIONS))
                .rem_euclid(PARTITIONS),
            key,
            value,
            headers: headers.collect(),
            timestamp: line.timestamp,
        });
    }
    Ok(records)
}

fn source_topics(topology: &Topology) -> Vec<String> {
    let sources = topology.nodes.iter().filter_map(|node| match &node.kind {
        NodeKind::Source(source) => Some(&source.topics),
        _ => None,
    });
    sources.flatten().cloned().collect()
}

/// The first copy is as it is written; the others are other events of other entities.
fn multiplied(topology: &Topology, inputs: &[&TestInput], copies: usize) -> Vec<Record> {
    let names = identifying(topology);
    let mut records = Vec::new();
    for copy in 0..copies {
        for input in inputs {
            let NodeKind::Source(source) = &topology.nodes[input.source.0].kind else { continue };
            let record = Record {
                topic: input.topic.clone().unwrap_or_else(|| source.topics[0].clone()),
                partition: 0,
                key: input.key.clone(),
                value: input.value.clone(),
                headers: input.headers.clone(),
                timestamp: input.timestamp,
            };
            let mut record = again(&record, &names, copy);
            record.partition = match &record.key {
                Some(key) => partition(Some(key), 0, PARTITIONS),
                None => (input.partition + copy as i32).rem_euclid(PARTITIONS),
            };
            records.push(record);
        }
    }
    records
}

/// A record once more: from the second copy on another event of another entity. `names` are the members that say which.
pub fn again(record: &Record, names: &[String], copy: usize) -> Record {
    Record {
        key: record.key.as_ref().map(|key| other_key(key, copy)),
        value: record.value.as_ref().map(|value| other_value(value, names, copy)),
        ..record.clone()
    }
}

/// Members that say which event and which entity a record is about.
pub fn identifying(topology: &Topology) -> Vec<String> {
    let mut names = Vec::new();
    for node in &topology.nodes {
        match &node.kind {
            NodeKind::Source(source) => {
                names.extend(source.event_id.iter().filter_map(|id| id.member()).map(str::to_owned))
            }
            NodeKind::PostgresSink(sink) => names.extend(sink.key.iter().cloned()),
            _ => {}
        }
    }
    names
}

fn other_key(key: &[u8], copy: usize) -> Vec<u8> {
    match copy {
        0 => key.to_vec(),
        _ => [key, format!(".{copy}").as_bytes()].concat(),
    }
}

fn other_value(value: &[u8], names: &[String], copy: usize) -> Vec<u8> {
    if copy == 0 {
        return value.to_vec();
    }
    let Ok(Value::Object(mut members)) = serde_json::from_slice(value) else { return value.to_vec() };
    for name in names {
        match members.get_mut(name) {
            Some(Value::String(text)) => text.push_str(&format!(".{copy}")),
            Some(Value::Number(number)) => {
                let other = number.as_i64().and_then(|n| n.checked_add(1_000 * copy as i64));
                *number = other.map_or_else(|| number.clone(), Into::into);
            }
            _ => {}
        }
    }
    Value::Object(members).to_string().into_bytes()
}

/// Up to `most` records of the source topics of the topology's own broker, from the beginning.
fn sample(topology: &Topology, most: usize) -> Result<Vec<Record>, Failure> {
    let failed = |e: crate::kafka::Error| Failure::unreachable(e.to_string());
    let connection = Connection {
        properties: topology.kafka.properties.clone(),
        ..Connection::new(&topology.kafka.brokers, "semel-sample")
    };
    let admin = Admin::new(&connection, Duration::from_secs(10)).map_err(failed)?;
    admin.ping(Duration::from_secs(8)).map_err(failed)?;
    let mut partitions = Vec::new();
    for topic in source_topics(topology) {
        let missing = || Failure::refused(format!("no topic {topic} on {} to take a sample of", connection.brokers));
        let info = admin.topic(&topic).map_err(failed)?.ok_or_else(missing)?;
        partitions.extend((0..info.partitions).map(|p| TopicPartition::new(topic.as_str(), p)));
    }
    let asked: Vec<_> = partitions.iter().map(|p| (p.clone(), At::Earliest)).collect();
    let starts = admin.offsets(&asked, Isolation::ReadCommitted).map_err(failed)?;
    let starts: Vec<_> = starts.into_iter().map(|(p, at)| (p, at.unwrap_or(Position(0)))).collect();
    let options = ConsumerOptions { end_of_partition: true, ..ConsumerOptions::new("semel-sample") };
    let mut consumer = Consumer::new(&connection, &options).map_err(failed)?;
    consumer.assign(&starts).map_err(failed)?;
    let (mut records, mut moved) = (Vec::new(), Instant::now());
    while records.len() < most && !partitions.is_empty() {
        match consumer.poll(Duration::from_millis(100)) {
            Polled::Record(message) => {
                let input = message.to_input(Vec::new());
                let headers = input.headers.0.iter();
                records.push(Record {
                    topic: input.topic.to_owned(),
                    partition: input.partition.rem_euclid(PARTITIONS),
                    key: input.key.map(<[u8]>::to_vec),
                    value: input.value.map(<[u8]>::to_vec),
                    headers: headers
                        .map(|(name, value)| (String::from_utf8_lossy(name).into_owned(), value.map(<[u8]>::to_vec)))
                        .collect(),
                    timestamp: input.timestamp,
                });
                moved = Instant::now();
            }
            Polled::EndOfPartition(partition, _) => partitions.retain(|p| *p != partition),
            Polled::Failed(error) => return Err(failed(error)),
            Polled::Nothing | Polled::Assign(_) | Polled::Revoke { .. } => {}
        }
        if moved.elapsed() > PATIENCE {
            return Err(Failure::unreachable("the broker delivers nothing of the source topics"));
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::load;

    fn topology() -> Topology {
        let text = r#"
name = "t"
kafka.brokers = "localhost:9092"
[sources.in]
type = "kafka"
topics = ["in"]
event_id = ".id"
[sinks.rows]
type = "postgres"
inputs = ["in"]
url = "postgres://localhost/x"
table = "rows"
key = ["customer", "line"]
version = "version"
[[tests]]
name = "one"
inputs = [
  { source = "in", key = "k", value = { id = "e1", customer = "c", line = 7, version = 1 } },
  { source = "in", text = "no JSON" },
]
outputs = []
"#;
        let loaded = load(text, "t.toml", &|_| None);
        loaded.topology.unwrap_or_else(|| panic!("{:#?}", loaded.findings))
    }

    fn text(record: &Record) -> (&str, i32, &str) {
        let key = record.key.as_deref().map_or("", |k| std::str::from_utf8(k).unwrap());
        (key, record.partition, std::str::from_utf8(record.value.as_deref().unwrap()).unwrap())
    }

    #[test]
    fn tests_are_multiplied_into_other_events_of_other_entities() {
        let (records, from) = gather(&topology(), &Origin::Tests { at_least: 3 }).unwrap();
        assert_eq!(from, "from the inputs of the file's [[tests]], 2 times with other ids and keys");
        let shown: Vec<_> = records.iter().map(text).collect();
        let (k, k1) = (partition(Some(b"k"), 0, 2), partition(Some(b"k.1"), 0, 2));
        assert_eq!(
            shown,
            [
                ("k", k, r#"{"id":"e1","customer":"c","line":7,"version":1}"#),
                ("", 0, "no JSON"),
                ("k.1", k1, r#"{"customer":"c.1","id":"e1.1","line":1007,"version":1}"#),
                ("", 1, "no JSON"),
            ]
        );
    }

    #[test]
    fn lines_keep_the_characters_of_a_value() {
        let text = "{\"key\":\"k\",\"value\":{\"a\": 1e3},\"headers\":[[\"h\",null]],\"timestamp\":5}\n\n\
                    {\"text\":\"x\",\"partition\":3}\n{\"key\":\"k\",\"value\":null}\n";
        let records = lines(&topology(), text, "f").unwrap();
        assert_eq!(records[0].value.as_deref(), Some(&b"{\"a\": 1e3}"[..]));
        assert_eq!((&records[0].headers[..], records[0].timestamp), (&[("h".to_owned(), None)][..], Some(5)));
        assert_eq!((records[1].partition, records[1].value.as_deref()), (1, Some(&b"x"[..])));
        assert_eq!(records[2].value, None);
        let wrong = |text: &str| lines(&topology(), text, "f").unwrap_err().message;
        assert!(wrong("{\"value\":1}\n{\"valeu\":1}").starts_with("f:2: unknown field `valeu`"));
        assert_eq!(wrong("{\"value\":1,\"text\":\"x\"}"), "f:1: give one of value, text and base64");
        assert_eq!(wrong("{\"topic\":\"other\"}"), "f:1: no source reads a topic other");
    }
}
