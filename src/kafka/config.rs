//! Settings of the clients, and what to say when a broker refuses them.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::fmt;
use std::time::Duration;

use rdkafka::bindings as rd;

use super::client::text_of;
use super::code::Code;
use super::error::{Error, Operation};
use super::request::c_string;

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

    /// What counts, where it is known here: fixed, else the user's, else our default.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.fixed.get(name).map(String::as_str).or(self.user(name)).or(self.defaults.get(name).map(String::as_str))
    }

    pub fn client_id(&self) -> &str {
        &self.connection.client_id
    }

    pub fn brokers(&self) -> &str {
        &self.connection.brokers
    }

    /// Errors: an unknown property, a value that the client does not take, by name.
    pub fn build(&self) -> Result<Config, Error> {
        if self.connection.brokers.trim().is_empty() {
            return Err(Error::new(Operation::Connect, Code::INVALID_ARGUMENT, "`brokers` under [kafka] is empty"));
        }
        // One after the other: a later one also overrides an earlier one of another name (`request.required.acks`).
        let config = Config::new();
        // A broker that comes back is met within a second; the default waits up to ten.
        config.set("reconnect.backoff.max.ms", "1000")?;
        for (name, value) in &self.defaults {
            config.set(name, value)?;
        }
        for (name, value) in &self.connection.properties {
            config.set(name, value)?;
        }
        config.set("bootstrap.servers", &self.connection.brokers)?;
        config.set("client.id", &self.connection.client_id)?;
        // Logs become events, so that they go through `tracing` under the client's name.
        config.set("log.queue", "true")?;
        // librdkafka's producers would make missing topics.
        config.set("allow.auto.create.topics", "false")?;
        for (name, value) in &self.fixed {
            config.set(name, value)?;
        }
        Ok(config)
    }
}

/// librdkafka's configuration, ours until a client takes it over.
pub(super) struct Config(*mut rd::rd_kafka_conf_t);

impl Config {
    fn new() -> Config {
        // SAFETY: no precondition.
        Config(unsafe { rd::rd_kafka_conf_new() })
    }

    pub fn as_ptr(&self) -> *mut rd::rd_kafka_conf_t {
        self.0
    }

    fn set(&self, name: &str, value: &str) -> Result<(), Error> {
        let c_name = c_string(Operation::Connect, name)?;
        let mut text = [0 as c_char; 512];
        let Ok(c_value) = CString::new(value) else { return Err(refused(name, "a NUL byte in its value")) };
        // SAFETY: the configuration is ours, the strings are alive, the text buffer has the size that is told.
        let set =
            unsafe { rd::rd_kafka_conf_set(self.0, c_name.as_ptr(), c_value.as_ptr(), text.as_mut_ptr(), text.len()) };
        if set == rd::rd_kafka_conf_res_t::RD_KAFKA_CONF_OK { Ok(()) } else { Err(refused(name, &text_of(&text))) }
    }

    #[cfg(test)]
    pub fn get(&self, name: &str) -> String {
        let name = CString::new(name).unwrap();
        let mut value = [0 as c_char; 512];
        let mut size = value.len();
        // SAFETY: the configuration is ours, the name is alive, the buffer has the size that is told.
        let got = unsafe { rd::rd_kafka_conf_get(self.0, name.as_ptr(), value.as_mut_ptr(), &mut size) };
        assert_eq!(got, rd::rd_kafka_conf_res_t::RD_KAFKA_CONF_OK);
        text_of(&value)
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: ours; a client that took it over made us forget it.
        unsafe { rd::rd_kafka_conf_destroy(self.0) }
    }
}

/// A property that the client does not take. What it says of a secret may hold the secret.
fn refused(name: &str, said: &str) -> Error {
    let secret = ["password", "secret", "key.pem", "jaas", "sasl.oauthbearer.config"].iter().any(|w| name.contains(w));
    let said = if secret { "its value is not valid" } else { said };
    Error::new(Operation::Connect, Code::INVALID_ARGUMENT, format!("property {name}: {said}"))
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
            connection(&[("linger.ms", "7"), ("request.required.acks", "1"), ("allow.auto.create.topics", "true")])
                .settings();
        settings.default("linger.ms", 5).default("retry.backoff.ms", 3).fixed("acks", "all");
        let config = settings.build().unwrap();
        let get = |name| config.get(name);
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
        let secret = connection(&[("sasl.password", "hunter2")]);
        assert!(!format!("{secret:?}").contains("hunter2"));
        let error = connection(&[("ssl.key.pem", "hunter2")]).settings().build().err();
        assert!(!error.is_some_and(|e| e.to_string().contains("hunter2")));
        let error = connection(&[("sasl.password", "hunter2\0")]).settings().build().err().unwrap();
        assert_eq!(error.to_string(), "connecting to Kafka: property sasl.password: its value is not valid");
    }

    #[test]
    fn no_address_is_said_so() {
        let error = Connection::new(" ", "c").settings().build().err().unwrap();
        assert_eq!(error.to_string(), "connecting to Kafka: `brokers` under [kafka] is empty");
    }

    #[test]
    fn a_part_of_a_millisecond_is_still_a_wait() {
        assert_eq!(millis(Duration::ZERO), 0);
        assert_eq!(millis(Duration::from_micros(200)), 1);
        assert_eq!(millis(Duration::from_millis(20)), 20);
        assert_eq!(millis(Duration::from_secs(u64::MAX / 2)), i32::MAX);
    }
}
