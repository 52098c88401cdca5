//! Administration: is the cluster there, topics, positions.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::bindings as rd;
use rdkafka::types::{RDKafkaAdminOp as AdminOp, RDKafkaResourceType as ResourceType};
use uuid::Uuid;

use super::client::{Client, Event, Kind};
use super::code::Code;
use super::config::Connection;
use super::describe::{self, Shape, TopicInfo};
use super::error::{Error, Operation};
use super::groups::{self, Group};
use super::list::{self, List};
use super::offsets::{self, At, Committed, CommittedWith, Isolation};
use super::options::ConsumerOptions;
use super::request::{c_string, construct, request, with_trouble};
use crate::record::{Position, TopicPartition};

// As an integer: see `code.rs`.
unsafe extern "C" {
    fn rd_kafka_topic_result_error(result: *const rd::rd_kafka_topic_result_t) -> c_int;
}

/// How long one broker may take to say what it knows of a topic.
const LOOK: Duration = Duration::from_secs(1);

/// A client for administration. Every call blocks up to its time limit, plus half a second.
#[derive(Debug)]
pub struct Admin {
    client: Arc<Client>,
    connection: Arc<Connection>,
    askers: Arc<Mutex<Askers>>,
    timeout: Duration,
}

/// Clients that ask for a group's positions, by the group's name and whether they wait for open transactions.
type Askers = HashMap<(String, bool), Arc<Client>>;

impl Admin {
    /// Creates the client with a time limit for each call; it connects in the background.
    pub fn new(connection: &Connection, timeout: Duration) -> Result<Admin, Error> {
        let client = Client::new(Kind::Plain, &connection.settings())?;
        Ok(Admin {
            client: Arc::new(client),
            connection: Arc::new(connection.clone()),
            askers: Arc::default(),
            timeout,
        })
    }

    /// The same client with another time limit.
    pub fn within(&self, timeout: Duration) -> Admin {
        Admin {
            client: Arc::clone(&self.client),
            connection: Arc::clone(&self.connection),
            askers: Arc::clone(&self.askers),
            timeout,
        }
    }

    /// Makes sure that the cluster is there: asks for its brokers, then asks one of them something at the address under
    /// which it names itself. Errors: why not, once `timeout` has passed.
    pub fn ping(&self, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + timeout;
        let broker = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = self.client.any_broker(left.min(Duration::from_millis(500)));
            self.client.serve();
            match answer {
                Ok(broker) => break broker,
                Err(error) if left.is_zero() || !error.code().is_transient() => {
                    return Err(self.client.unreachable(&error, timeout));
                }
                Err(_) => {}
            }
        };
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(100));
        match self.broker_settings(broker, left) {
            // Any answer of the broker will do, a refusal included.
            Err(error) if error.code().is_transient() => Err(self.client.unreachable(&error, timeout)),
            _ => Ok(()),
        }
    }

    fn broker_settings(&self, broker: i32, timeout: Duration) -> Result<BTreeMap<String, String>, Error> {
        let name = broker.to_string();
        let mut all = describe::configs(&self.client, ResourceType::RD_KAFKA_RESOURCE_BROKER, &[&name], timeout)?;
        Ok(all.remove(&name).unwrap_or_default())
    }

    /// A setting of some broker, such as `transaction.max.timeout.ms`; `None` where it has none of that name.
    pub fn broker_config(&self, name: &str) -> Result<Option<String>, Error> {
        let broker = self.client.any_broker(self.timeout).map_err(|error| with_trouble(&self.client, error))?;
        Ok(self.broker_settings(broker, self.timeout)?.remove(name))
    }

    /// Topics by name; one that does not exist is `None`.
    pub fn topics(&self, names: &[&str]) -> Result<BTreeMap<String, Option<TopicInfo>>, Error> {
        describe::topics(&self.client, names, self.timeout)
    }

    /// One topic.
    pub fn topic(&self, name: &str) -> Result<Option<TopicInfo>, Error> {
        Ok(self.topics(&[name])?.remove(name).flatten())
    }

    /// Makes a topic and waits until the brokers know it; false if it was there already, as it may be.
    /// `replication` below 1 takes the broker's default.
    pub fn create_topic(
        &self,
        name: &str,
        partitions: i32,
        replication: i32,
        config: &BTreeMap<String, String>,
    ) -> Result<bool, Error> {
        let operation = Operation::Admin("creating a topic");
        let topic = c_string(operation, name)?;
        let config = config
            .iter()
            .map(|(key, value)| Ok((c_string(operation, key)?, c_string(operation, value)?)))
            .collect::<Result<Vec<_>, Error>>()?;
        let replication = if replication < 1 { -1 } else { replication };
        // SAFETY: the name is alive; the text buffer is of the size that is told.
        let new = construct(operation, |text, size| unsafe {
            rd::rd_kafka_NewTopic_new(topic.as_ptr(), partitions, replication, text, size)
        })
        .map_err(|error| error.at(name, None))?;
        let answer = self.request(operation, AdminOp::RD_KAFKA_ADMIN_OP_CREATETOPICS, |options, queue| {
            // SAFETY: everything is alive; the calls copy, and what was made above is freed here.
            unsafe {
                for (key, value) in &config {
                    rd::rd_kafka_NewTopic_set_config(new.as_ptr(), key.as_ptr(), value.as_ptr());
                }
                let mut new = new.as_ptr();
                rd::rd_kafka_CreateTopics(self.client.ptr(), &mut new, 1, options, queue);
                rd::rd_kafka_NewTopic_destroy(new);
            }
        })?;
        // SAFETY: the event is alive and of the kind that was asked for; it owns the results.
        let refused = unsafe {
            let mut count = 0;
            let result = rd::rd_kafka_event_CreateTopics_result(answer.as_ptr());
            let results = rd::rd_kafka_CreateTopics_result_topics(result, &mut count);
            refusals(operation, results, count)
        };
        let made = refused.is_empty();
        first_but(refused, Code::TOPIC_EXISTS)?;
        self.until(name, |shape| shape.is_some())?;
        Ok(made)
    }

    /// As [`internal_topic`](Admin::internal_topic), where records stay until they are read, whatever the broker's defaults.
    pub fn unread_topic(&self, name: &str, partitions: i32, max_message_bytes: usize) -> Result<TopicInfo, Error> {
        let config = [
            ("cleanup.policy", "delete".to_owned()),
            ("retention.ms", "-1".to_owned()),
            ("retention.bytes", "-1".to_owned()),
            ("max.message.bytes", max_message_bytes.to_string()),
        ];
        self.internal_topic(name, partitions, &config)
    }

    /// Makes a topic of semel's own, if it is not there, with the broker's replication. It takes any time that a record
    /// may have, and keeps it. Answers the topic.
    pub fn internal_topic(&self, name: &str, partitions: i32, config: &[(&str, String)]) -> Result<TopicInfo, Error> {
        if let Some(info) = self.topic(name)? {
            return Ok(info);
        }
        let mut config: BTreeMap<String, String> =
            config.iter().map(|(setting, value)| ((*setting).to_owned(), value.clone())).collect();
        config.insert("message.timestamp.before.max.ms".to_owned(), i64::MAX.to_string());
        config.insert("message.timestamp.after.max.ms".to_owned(), i64::MAX.to_string());
        if let Err(error) = self.create_topic(name, partitions, -1, &config) {
            // Brokers before 3.6 do not know the limits of times, and have none.
            config.retain(|setting, _| !setting.starts_with("message.timestamp."));
            self.create_topic(name, partitions, -1, &config).map_err(|_| error)?;
        }
        let operation = Operation::Admin("making a topic");
        self.topic(name)?.ok_or_else(|| Error::of_code(operation, Code::UNKNOWN_TOPIC).at(name, None))
    }

    /// Deletes topics and waits until the brokers have forgotten them. Those that do not exist are no matter.
    pub fn delete_topics(&self, names: &[&str]) -> Result<(), Error> {
        let operation = Operation::Admin("deleting a topic");
        if names.is_empty() {
            return Ok(());
        }
        let topics = names.iter().map(|name| c_string(operation, name)).collect::<Result<Vec<_>, _>>()?;
        let answer = self.request(operation, AdminOp::RD_KAFKA_ADMIN_OP_DELETETOPICS, |options, queue| {
            // SAFETY: everything is alive; the calls copy, and what is made here is freed here.
            unsafe {
                let mut old: Vec<_> = topics.iter().map(|name| rd::rd_kafka_DeleteTopic_new(name.as_ptr())).collect();
                let count = old.len();
                rd::rd_kafka_DeleteTopics(self.client.ptr(), old.as_mut_ptr(), count, options, queue);
                rd::rd_kafka_DeleteTopic_destroy_array(old.as_mut_ptr(), count);
            }
        })?;
        // SAFETY: the event is alive and of the kind that was asked for; it owns the results.
        let refused = unsafe {
            let mut count = 0;
            let result = rd::rd_kafka_event_DeleteTopics_result(answer.as_ptr());
            let results = rd::rd_kafka_DeleteTopics_result_topics(result, &mut count);
            refusals(operation, results, count)
        };
        first_but(refused, Code::UNKNOWN_TOPIC)?;
        names.iter().try_for_each(|name| self.until(name, |shape| shape.is_none()))
    }

    /// Raises a topic's partition count to `total` and waits until the brokers know it.
    pub fn create_partitions(&self, name: &str, total: i32) -> Result<(), Error> {
        let operation = Operation::Admin("adding partitions");
        let topic = c_string(operation, name)?;
        // SAFETY: the name is alive; the text buffer is of the size that is told.
        let new = construct(operation, |text, size| unsafe {
            rd::rd_kafka_NewPartitions_new(topic.as_ptr(), total.max(0) as usize, text, size)
        })
        .map_err(|error| error.at(name, None))?;
        let answer = self.request(operation, AdminOp::RD_KAFKA_ADMIN_OP_CREATEPARTITIONS, |options, queue| {
            // SAFETY: everything is alive; the call copies, and what was made above is freed here.
            unsafe {
                let mut new = new.as_ptr();
                rd::rd_kafka_CreatePartitions(self.client.ptr(), &mut new, 1, options, queue);
                rd::rd_kafka_NewPartitions_destroy(new);
            }
        })?;
        // SAFETY: the event is alive and of the kind that was asked for; it owns the results.
        let refused = unsafe {
            let mut count = 0;
            let result = rd::rd_kafka_event_CreatePartitions_result(answer.as_ptr());
            let results = rd::rd_kafka_CreatePartitions_result_topics(result, &mut count);
            refusals(operation, results, count)
        };
        first_but(refused, Code::NONE)?;
        self.until(name, |shape| shape.is_some_and(|s| s.partitions >= total))
    }

    /// Deletes the records before each position.
    pub fn delete_records(&self, before: &[(TopicPartition, Position)]) -> Result<(), Error> {
        let operation = Operation::Admin("deleting records");
        let list = List::of_positions(before);
        let answer = self.request(operation, AdminOp::RD_KAFKA_ADMIN_OP_DELETERECORDS, |options, queue| {
            // SAFETY: everything is alive; the calls copy, and what is made here is freed here.
            unsafe {
                let mut records = rd::rd_kafka_DeleteRecords_new(list.as_ptr());
                rd::rd_kafka_DeleteRecords(self.client.ptr(), &mut records, 1, options, queue);
                rd::rd_kafka_DeleteRecords_destroy(records);
            }
        })?;
        // SAFETY: the event is alive and of the kind that was asked for; it owns the list, which is copied.
        let entries = unsafe {
            let result = rd::rd_kafka_event_DeleteRecords_result(answer.as_ptr());
            list::entries(rd::rd_kafka_DeleteRecords_result_offsets(result))
        };
        match entries.into_iter().find(|e| e.code.is_error()) {
            Some(e) => Err(Error::of_code(operation, e.code).at(e.partition.topic, Some(e.partition.partition))),
            None => Ok(()),
        }
    }

    /// Positions in the log; `None` where no record is that young.
    pub fn offsets(
        &self,
        asked: &[(TopicPartition, At)],
        isolation: Isolation,
    ) -> Result<Vec<(TopicPartition, Option<Position>)>, Error> {
        offsets::in_log(&self.client, asked, isolation, self.timeout)
    }

    /// [`offsets`](Self::offsets), with an error for each partition that cannot be told. Takes twice the time limit at
    /// most.
    pub fn each_offset(&self, asked: &[(TopicPartition, At)], isolation: Isolation) -> Vec<Committed> {
        offsets::each_in_log(&self.client, asked, isolation, self.timeout)
    }

    /// Any group's positions. With `stable`, those that an open transaction holds are waited for.
    pub fn committed(&self, group: &str, partitions: &[TopicPartition], stable: bool) -> Result<Vec<Committed>, Error> {
        let client = self.asker(group, stable)?;
        client.serve();
        offsets::committed(&client, partitions, stable, self.timeout)
    }

    /// [`committed`](Self::committed), and what was committed beside each position.
    pub fn commits(
        &self,
        group: &str,
        partitions: &[TopicPartition],
        stable: bool,
    ) -> Result<Vec<CommittedWith>, Error> {
        let client = self.asker(group, stable)?;
        client.serve();
        offsets::commits(&client, partitions, stable, self.timeout)
    }

    /// The ids and partition counts of topics that exist, by name.
    pub fn shapes(&self, names: &[&str]) -> Result<BTreeMap<String, (Uuid, i32)>, Error> {
        let shapes = describe::shapes(&self.client, names, None, self.timeout)?;
        Ok(shapes.into_iter().filter_map(|(name, shape)| shape.map(|s| (name, (s.id, s.partitions)))).collect())
    }

    /// A consumer of the group that never joins it.
    fn asker(&self, group: &str, stable: bool) -> Result<Arc<Client>, Error> {
        let mut askers = self.askers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = askers.get(&(group.to_owned(), stable)) {
            return Ok(Arc::clone(client));
        }
        let options = ConsumerOptions { read_committed: stable, ..ConsumerOptions::new(group) };
        let client = Arc::new(Client::new(Kind::Member, &options.settings(&self.connection))?);
        askers.insert((group.to_owned(), stable), Arc::clone(&client));
        Ok(client)
    }

    /// What each member of a group reads; `None` where the broker assigns (KIP-848). For a running job:
    /// [`group`](Self::group) may end the process there if the coordinator goes away.
    pub fn assignments(&self, group: &str) -> Result<Option<Group>, Error> {
        groups::assignments(&self.client, group, self.timeout)
    }

    /// A consumer group with its members; one that does not exist has none.
    pub fn group(&self, group: &str) -> Result<Group, Error> {
        match self.assignments(group)? {
            Some(found) => Ok(found),
            None => groups::describe(&self.client, group, self.timeout),
        }
    }

    fn request(
        &self,
        operation: Operation,
        native: AdminOp,
        send: impl FnOnce(*const rd::rd_kafka_AdminOptions_t, *mut rd::rd_kafka_queue_t),
    ) -> Result<Event, Error> {
        request(&self.client, operation, native, self.timeout, |options, queue| send(options.as_ptr(), queue))
    }

    /// A change is made at the controller first: waits until every broker shows it, since any of them may answer the next
    /// question. One that went away is among them until the others miss it.
    fn until(&self, name: &str, shown: impl Fn(Option<Shape>) -> bool) -> Result<(), Error> {
        let deadline = Instant::now() + self.timeout;
        let shows = |broker: &i32| match describe::shapes(&self.client, &[name], Some(*broker), LOOK) {
            Ok(mut shapes) => Ok(shown(shapes.remove(name).flatten())),
            Err(error) if error.code().is_transient() => Ok(false),
            Err(error) => Err(error),
        };
        loop {
            let brokers = self.client.brokers(self.timeout)?;
            let answers: Vec<bool> = brokers.iter().map(shows).collect::<Result<_, _>>()?;
            if !answers.is_empty() && answers.into_iter().all(|shown| shown) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let operation = Operation::Admin("waiting for a change to a topic");
                return Err(Error::of_code(operation, Code::TIMED_OUT).at(name, None));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// What each topic met that was refused.
///
/// # Safety
/// `results` points to `count` live results.
unsafe fn refusals(operation: Operation, results: *mut *const rd::rd_kafka_topic_result_t, count: usize) -> Vec<Error> {
    let text = |text: *const c_char| {
        // SAFETY: null or NUL-terminated, owned by a result that is alive.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    let read = |index| {
        // SAFETY: alive by the caller's word; strings are copied.
        unsafe {
            let result = *results.add(index);
            let code = Code(rd_kafka_topic_result_error(result));
            let said = text(rd::rd_kafka_topic_result_error_string(result)).unwrap_or_else(|| code.text());
            let name = text(rd::rd_kafka_topic_result_name(result)).unwrap_or_default();
            code.is_error().then(|| Error::new(operation, code, said).at(name, None))
        }
    };
    (0..count).filter_map(read).collect()
}

/// The first refusal but those for which the topic is as it should be.
fn first_but(refusals: Vec<Error>, fine: Code) -> Result<(), Error> {
    refusals.into_iter().find(|error| error.code() != fine).map_or(Ok(()), Err)
}
