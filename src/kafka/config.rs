//! Settings of the clients, and what to say when a broker refuses them.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::config::NativeClientConfig;
use rdkafka::error::KafkaError;

use super::code::Code;
use super::error::{Error, Operation};

/// Where the cluster is and what every client shares.
#[derive(Clone)]
pub struct Connection {
    /// `host:port`, several separated by commas.
    pub brokers: String,
    /// librdkafka properties of the user: security, tuning.
    pub properties: BTreeMap<String, String>,
    /// `client.id`, for the broker's logs and quotas.
    pub client_id: String,
}

/// Without the properties' values: they hold passwords.
impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("brokers", &self.brokers)
            .field("properties", &self.properties.keys().collect::<Vec<_>>())
            .field("client_id", &self.client_id)
            .finish()
    }
}

impl Connection {
    pub fn new(brokers: impl Into<String>, client_id: impl Into<String>) -> Connection {
        Connection { brokers: brokers.into(), properties: BTreeMap::new(), client_id: client_id.into() }
    }

    /// Settings of one client: our defaults, then the user's properties, then what nobody may change.
    pub(super) fn settings(&self) -> Settings {
        Settings { connection: self.clone(), defaults: BTreeMap::new(), fixed: BTreeMap::new() }
    }
}

/// Settings in the making.
pub(super) struct Settings {
    connection: Connection,
    defaults: BTreeMap<&'static str, String>,
    fixed: BTreeMap<&'static str, String>,
}

impl Settings {
    /// Counts unless the user says otherwise.
    pub fn default(&mut self, name: &'static str, value: impl ToString) -> &mut Settings {
        self.defaults.insert(name, value.to_string());
        self
    }

    /// Counts whatever the user says.
    pub fn fixed(&mut self, name: &'static str, value: impl ToString) -> &mut Settings {
        self.fixed.insert(name, value.to_string());
        self
    }

    /// What the user set, if anything.
    pub fn user(&self, name: &str) -> Option<&str> {
        self.connection.properties.get(name).map(String::as_str)
    }

    pub fn client_id(&self) -> &str {
        &self.connection.client_id
    }

    pub fn brokers(&self) -> &str {
        &self.connection.brokers
    }

    /// Errors: an unknown property, a value that the client does not take, by name.
    pub fn build(&self) -> Result<NativeClientConfig, Error> {
        let mut config = ClientConfig::new();
        for (name, value) in &self.defaults {
            config.set(*name, value);
        }
        for (name, value) in &self.connection.properties {
            config.set(name, value);
        }
        config
            .set("bootstrap.servers", &self.connection.brokers)
            .set("client.id", &self.connection.client_id)
            // Logs become events, so that they go through `tracing` under the client's name.
            .set("log.queue", "true")
            // librdkafka's producers would make missing topics.
            .set("allow.auto.create.topics", "false");
        for (name, value) in &self.fixed {
            config.set(*name, value);
        }
        config.create_native_config().map_err(|error| refused(&error))
    }
}

/// A property that the client does not take. Its value is left out: it may be a password.
fn refused(error: &KafkaError) -> Error {
    let text = match error {
        KafkaError::ClientConfig(_, text, name, _) => {
            // The client's own words repeat the value only for numbers and choices.
            let secret = ["password", "secret", "key.pem", "jaas"].iter().any(|word| name.contains(word));
            if secret { format!("property {name} is not valid") } else { format!("property {name}: {text}") }
        }
        other => other.to_string(),
    };
    Error::new(Operation::Connect, Code::INVALID_ARGUMENT, text)
}

/// Milliseconds as librdkafka takes them: a remainder counts as one, so that a short wait is still a wait.
pub(super) fn millis(duration: Duration) -> i32 {
    let rounded = duration.as_micros().div_ceil(1000);
    rounded.min(i32::MAX as u128) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(properties: &[(&str, &str)]) -> Connection {
        let mut connection = Connection::new("localhost:9092", "test");
        connection.properties = properties.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        connection
    }

    #[test]
    fn defaults_give_way_to_the_user_and_the_user_to_what_is_fixed() {
        let mut settings =
            connection(&[("linger.ms", "7"), ("acks", "1"), ("allow.auto.create.topics", "true")]).settings();
        settings.default("linger.ms", 5).default("retry.backoff.ms", 3).fixed("acks", "all");
        let native = settings.build().unwrap();
        let get = |name| native.get(name).unwrap();
        assert_eq!(get("linger.ms"), "7");
        assert_eq!(get("retry.backoff.ms"), "3");
        assert_eq!(get("acks"), "-1");
        assert_eq!(get("allow.auto.create.topics"), "false");
    }

    #[test]
    fn an_unknown_property_is_named() {
        let error = connection(&[("fetch.wiat.max.ms", "5")]).settings().build().err().unwrap();
        assert_eq!(
            error.to_string(),
            "connecting to Kafka: property fetch.wiat.max.ms: No such configuration property: \"fetch.wiat.max.ms\""
        );
    }

    #[test]
    fn secrets_are_printed_nowhere() {
        let connection = connection(&[("sasl.password", "hunter2")]);
        assert!(!format!("{connection:?}").contains("hunter2"));
    }

    #[test]
    fn a_part_of_a_millisecond_is_still_a_wait() {
        assert_eq!(millis(Duration::ZERO), 0);
        assert_eq!(millis(Duration::from_micros(200)), 1);
        assert_eq!(millis(Duration::from_millis(20)), 20);
        assert_eq!(millis(Duration::from_secs(u64::MAX / 2)), i32::MAX);
    }
}
