//! The topology of one run: the user's file with names, topics and tables that nobody else has.

use toml::{Table, Value};

use super::input::PARTITIONS;
use crate::error::Failure;
use crate::topology::spec::{NodeKind, Topology};

/// What one run's file says otherwise than the user's.
#[derive(Clone, Debug)]
pub struct Changes<'a> {
    /// Name of the topology, so of its groups, ids and dead letters.
    pub name: &'a str,
    /// Prefixes of source topics and of the topics that the job writes.
    pub sources: &'a str,
    pub outputs: &'a str,
    /// Schema of its tables.
    pub schema: &'a str,
    pub brokers: &'a str,
    pub database_url: &'a str,
    pub state_dir: &'a str,
    /// Keeps what the file says of security; the broker is the user's own.
    pub external: bool,
    /// Top-level settings, such as `batch_records`; none is taken away.
    pub settings: Vec<(&'static str, Option<Value>)>,
}

/// Properties that speak of the user's broker and not of the job.
const OF_THE_BROKER: &[&str] = &["security.", "sasl.", "ssl.", "enable.ssl", "client.rack", "broker.address"];

/// The text of the run's file. `text` is the user's, `topology` what it says.
pub fn rewrite(text: &str, topology: &Topology, changes: &Changes<'_>) -> Result<String, Failure> {
    let mut file: Table = text.parse().map_err(|e| Failure::refused(format!("{}: {e}", topology.file)))?;
    for name in ["tests", "drill", "instance"] {
        file.remove(name);
    }
    file.insert("name".into(), changes.name.into());
    file.insert("state_dir".into(), escaped(changes.state_dir));
    for (name, value) in &changes.settings {
        match value {
            Some(value) => drop(file.insert((*name).into(), value.clone())),
            None => drop(file.remove(*name)),
        }
    }
    let kafka = file.entry("kafka").or_insert_with(|| Table::new().into());
    if let Value::Table(kafka) = kafka {
        kafka.insert("brokers".into(), escaped(changes.brokers));
        if let (Some(Value::Table(properties)), false) = (kafka.get_mut("properties"), changes.external) {
            properties.retain(|name, _| !OF_THE_BROKER.iter().any(|start| name.starts_with(start)));
        }
    }
    for node in &topology.nodes {
        let part = match node.kind {
            NodeKind::Source(_) => "sources",
            NodeKind::KafkaSink(_) | NodeKind::PostgresSink(_) => "sinks",
            _ => continue,
        };
        let Some(Value::Table(table)) = file.get_mut(part).and_then(|nodes| nodes.get_mut(&node.name)) else {
            continue;
        };
        match &node.kind {
            NodeKind::Source(source) => {
                let topics = source.topics.iter().map(|topic| Value::from(changes.topic(topology, topic)));
                table.insert("topics".into(), topics.collect::<Vec<_>>().into());
                // The input is there before the job.
                table.insert("start".into(), "earliest".into());
            }
            NodeKind::KafkaSink(sink) => {
                table.insert("topic".into(), changes.topic(topology, &sink.topic).into());
                make_by_itself(table);
            }
            NodeKind::PostgresSink(sink) => {
                table.insert("url".into(), escaped(changes.database_url));
                table.insert("table".into(), changes.table(&sink.table).into());
                if let (Some(ledger), Some(Value::Table(dedupe))) = (&sink.dedupe, table.get_mut("dedupe")) {
                    dedupe.insert("table".into(), changes.table(&ledger.table).into());
                }
                // What a real job should stop for is what a drill is fed with.
                table.insert("max_rejects_per_minute".into(), i64::MAX.into());
            }
            _ => {}
        }
    }
    toml::to_string(&file).map_err(|e| Failure::refused(format!("{}: {e}", topology.file)))
}

impl Changes<'_> {
    /// What the run calls a topic of the file.
    pub fn topic(&self, topology: &Topology, topic: &str) -> String {
        let written =
            topology.nodes.iter().any(|n| matches!(&n.kind, NodeKind::KafkaSink(sink) if sink.topic == topic));
        format!("{}.{topic}", if written { self.outputs } else { self.sources })
    }

    /// What the run calls a table of the file.
    pub fn table(&self, table: &str) -> String {
        format!("{}.{}", self.schema, table.replace('.', "_"))
    }
}

/// The scratch broker is one, and has no topics of the user.
fn make_by_itself(sink: &mut Table) {
    let create = sink.entry("create").or_insert_with(|| Table::new().into());
    let Value::Table(create) = create else { return };
    create.remove("replication");
    create.entry("partitions").or_insert(i64::from(PARTITIONS).into());
    let config = create.entry("config").or_insert_with(|| Table::new().into());
    if let Value::Table(config) = config {
        config.remove("min.insync.replicas");
        for (name, value) in FOR_EVER {
            config.insert((*name).into(), (*value).into());
        }
    }
}

/// Scratch topics keep their records: those of tests are as old as somebody wrote them.
pub const FOR_EVER: &[(&str, i64)] = &[("retention.ms", -1), ("retention.bytes", -1)];

/// Text that is not interpolated.
fn escaped(text: &str) -> Value {
    text.replace('$', "$$").into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::load;

    const FILE: &str = r#"
name = "shop"
instance = "a"
batch_records = 7
[kafka]
brokers = "${BROKERS:-b:1}"
properties = { "sasl.password" = "${PASSWORD:-x}", "linger.ms" = 1 }
[sources.in]
type = "kafka"
topics = ["in-${ZONE:-eu}"]
event_id = ".id"
[sinks.out]
type = "kafka"
inputs = ["in"]
topic = "out"
create = { partitions = 8, replication = 3, config = { "min.insync.replicas" = 2, "retention.ms" = 5 } }
[sinks.rows]
type = "postgres"
inputs = ["out"]
url = "${DATABASE_URL}"
table = "shop.rows"
key = ["id"]
version = "version"
dedupe = { table = "shop.seen", retention = "2d" }
[drill]
guarantees = ["at-least-once"]
[[tests]]
name = "none"
inputs = [{ source = "in", text = "x" }]
outputs = []
"#;

    #[test]
    fn a_run_has_names_topics_and_tables_of_its_own_and_keeps_the_rest() {
        let topology = load(FILE, "t.toml", &|_| None).topology.unwrap();
        let changes = Changes {
            name: "drill_1_2",
            sources: "drill_1",
            outputs: "drill_1_0",
            schema: "drill_1_2",
            brokers: "localhost:1",
            database_url: "postgres://u:p$w@localhost/x",
            state_dir: "/tmp/x",
            external: false,
            settings: vec![("batch_records", None), ("commit_interval", Some("1s".into()))],
        };
        let text = rewrite(FILE, &topology, &changes).unwrap();
        let loaded = load(&text, "run.toml", &|_| None);
        let run = loaded.topology.unwrap_or_else(|| panic!("{text}\n{:#?}", loaded.findings));
        assert_eq!((run.name.as_str(), run.instance, run.batch_records), ("drill_1_2", None, None));
        assert_eq!(run.commit_interval.as_millis(), 1000);
        assert_eq!(run.kafka.brokers, "localhost:1");
        assert_eq!(run.kafka.properties.into_iter().collect::<Vec<_>>(), [("linger.ms".into(), "1".into())]);
        assert!(run.unset.is_empty() && run.tests.is_empty() && run.drill.is_empty());
        let node = |name: &str| &run.nodes.iter().find(|node| node.name == name).unwrap().kind;
        let NodeKind::Source(source) = node("in") else { panic!() };
        assert_eq!(source.topics, ["drill_1.in-eu"]);
        let NodeKind::KafkaSink(out) = node("out") else { panic!() };
        let create = out.create.as_ref().unwrap();
        assert_eq!((out.topic.as_str(), create.partitions, create.replication), ("drill_1_0.out", 8, None));
        assert_eq!(
            create.config.clone().into_iter().collect::<Vec<_>>(),
            [("retention.bytes".into(), "-1".into()), ("retention.ms".into(), "-1".into()),]
        );
        let NodeKind::PostgresSink(rows) = node("rows") else { panic!() };
        assert_eq!(rows.dedupe.as_ref().unwrap().table, "drill_1_2.shop_seen");
        assert_eq!((rows.table.as_str(), rows.url.as_str()), ("drill_1_2.shop_rows", "postgres://u:p$w@localhost/x"));
    }
}
