//! The producer, transactional or plain. All calls block; transactional ones belong on one thread.

use std::ffi::CStr;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rdkafka::bindings as rd;
use rdkafka::bindings::rd_kafka_vtype_t as VType;

use super::caller::Caller;
use super::client::{Client, Event, Kind};
use super::code::Code;
use super::config::{Connection, millis};
use super::error::{Error, Operation};
use super::group::GroupMetadata;
use super::list::List;
use super::options::{ProducerOptions, request_bytes};
use super::round::Round;
use super::topics::Topics;
use crate::chunk::{Output, Target};
use crate::commit::metadata::TopicIds;
use crate::record::{Position, TopicPartition};

/// How long past its time limit and a transaction timeout a call may take.
const GRACE: Duration = Duration::from_secs(5);

/// A producer to a fixed set of targets. A thread of its own serves its events.
pub struct Producer {
    // Before the client: the handles refer into it.
    topics: Topics,
    client: Arc<Client>,
    shared: Arc<Shared>,
    server: Option<JoinHandle<()>>,
    targets: Vec<Target>,
    transactional_id: Option<String>,
    transaction_timeout: Duration,
    caller: Caller,
}

#[derive(Default)]
struct Shared {
    transactional: bool,
    stop: AtomicBool,
    /// The first of them, and how many there were.
    failures: Mutex<(Option<Error>, u64)>,
}

impl Producer {
    /// Creates the client; it connects in the background. `targets` are those that outputs name by their index. Errors:
    /// settings that the client does not take.
    pub fn new(connection: &Connection, options: &ProducerOptions, targets: &[Target]) -> Result<Producer, Error> {
        let client = Arc::new(Client::new(Kind::Producer, &options.settings(connection, targets))?);
        // SAFETY: fields drop in their order, the handles before this reference to the client.
        let topics = unsafe { Topics::new(&client, targets)? };
        let shared = Arc::new(Shared { transactional: options.transactional_id.is_some(), ..Shared::default() });
        let serve = {
            let (client, shared) = (client.clone(), shared.clone());
            move || serve(&client, &shared)
        };
        let server = thread::Builder::new().name("kafka-producer".into()).spawn(serve).map_err(no_thread)?;
        Ok(Producer {
            caller: Caller::new("kafka-transactions").map_err(no_thread)?,
            topics,
            client,
            shared,
            server: Some(server),
            targets: targets.to_vec(),
            transactional_id: options.transactional_id.clone(),
            transaction_timeout: options.transaction_timeout,
        })
    }

    /// Registers the transactional id: the broker ends what a predecessor left open and fences it. A call that timed
    /// out goes on in the background; call again to resume.
    pub fn init(&self, timeout: Duration) -> Result<(), Error> {
        let started = Instant::now();
        // Asked before there is a connection, the client would look for the coordinator only half a second later.
        self.client.any_broker(timeout).map_err(|error| self.client.unreachable(&error, timeout))?;
        let timeout = timeout.saturating_sub(started.elapsed());
        // SAFETY: the client is alive; the error that is returned is ours.
        let done = self.call(Operation::Init, timeout, move |client| unsafe {
            Error::check(Operation::Init, rd::rd_kafka_init_transactions(client.ptr(), millis(timeout)))
        });
        done.map_err(|error| {
            let id = self.transactional_id.as_deref().unwrap_or("none");
            let timeout = self.transaction_timeout.as_millis();
            let text = format!("{} (transactional.id {id}, transaction.timeout.ms {timeout})", error.text());
            self.client.explain(error.with_text(text))
        })
    }

    /// Local: the broker hears of a transaction with its first record or position.
    pub fn begin(&self) -> Result<(), Error> {
        self.failed_deliveries();
        // SAFETY: the client is alive; the error that is returned is ours.
        let done = unsafe { Error::check(Operation::Begin, rd::rd_kafka_begin_transaction(self.client.ptr())) };
        done.map_err(|error| self.client.explain(error))
    }

    /// Queues one output; its bytes are copied. Does not block: an error that [`is_queue_full`](Error::is_queue_full)
    /// asks to come back in a millisecond. A timestamp of 0 becomes now, as librdkafka takes it.
    pub fn produce(&self, output: &Output<'_>) -> Result<(), Error> {
        let Some(topic) = self.topics.get(output.target) else {
            let text = format!("there is no target {}", output.target.0);
            return Err(Error::new(Operation::Produce, Code::INVALID_ARGUMENT, text));
        };
        let headers = headers_of(output);
        let mut fields = [
            field(VType::RD_KAFKA_VTYPE_RKT, |u| u.rkt = topic.as_ptr()),
            field(VType::RD_KAFKA_VTYPE_PARTITION, |u| u.i32_ = output.partition),
            field(VType::RD_KAFKA_VTYPE_MSGFLAGS, |u| u.i = rd::RD_KAFKA_MSG_F_COPY),
            field(VType::RD_KAFKA_VTYPE_TIMESTAMP, |u| u.i64_ = output.timestamp.unwrap_or(0)),
            field(VType::RD_KAFKA_VTYPE_KEY, |u| u.mem = memory(output.key)),
            field(VType::RD_KAFKA_VTYPE_VALUE, |u| u.mem = memory(output.value)),
            field(VType::RD_KAFKA_VTYPE_HEADERS, |_| {}),
        ];
        let mut count = fields.len() - 1;
        if let Some(headers) = &headers {
            fields[count].u.headers = headers.0;
            count += 1;
        }
        // SAFETY: the client is alive, every field holds the member of the union that its type names, and the slices
        // behind the pointers outlive the call, which copies them (F_COPY). The error that is returned is ours.
        let queued = unsafe {
            let error = rd::rd_kafka_produceva(self.client.ptr(), fields.as_ptr(), count);
            Error::check(Operation::Produce, error)
        };
        match queued {
            Ok(()) => {
                // The queued message owns them now.
                std::mem::forget(headers);
                Ok(())
            }
            Err(error) => {
                let topic = self.targets[output.target.0 as usize].topic.clone();
                Err(self.client.explain(error).at(topic, Some(output.partition)))
            }
        }
    }

    /// To count what it is handed between two flushes.
    pub fn round(&self) -> Round {
        Round::new(request_bytes(&self.targets), &self.targets)
    }

    /// Waits until every queued record is acknowledged or has failed; `linger.ms` is suspended meanwhile. A time-out
    /// means that records are still under way: call again. A failed record shows in
    /// [`failed_deliveries`](Self::failed_deliveries) and, in a transaction, in its commit.
    pub fn flush(&self, timeout: Duration) -> Result<(), Error> {
        // SAFETY: the client is alive. Its events are served by the thread of `serve`, for which the call waits.
        let code = Code(unsafe { rd::rd_kafka_flush(self.client.ptr(), millis(timeout)) } as i32);
        if code.is_error() { Err(Error::of_code(Operation::Flush, code)) } else { Ok(()) }
    }

    /// Makes positions part of the transaction, each with the id of its topic, as the member that `group` says. An empty
    /// list sends nothing and so proves nothing. librdkafka takes the time limit for a wish and may wait for the
    /// coordinator for longer.
    pub fn send_offsets(
        &self,
        positions: &[(TopicPartition, Position)],
        ids: &TopicIds,
        group: &GroupMetadata,
        timeout: Duration,
    ) -> Result<(), Error> {
        let list = List::of_commit(positions, ids);
        let group = group.clone();
        let sent = self.call(Operation::SendOffsets, timeout, move |client| {
            // SAFETY: client, list and metadata are alive and are copied; the error that is returned is ours.
            unsafe {
                let error = rd::rd_kafka_send_offsets_to_transaction(
                    client.ptr(),
                    list.as_ptr(),
                    group.as_ptr(),
                    millis(timeout),
                );
                Error::check(Operation::SendOffsets, error)
            }
        });
        sent.map_err(|error| self.enrich(error))
    }

    /// Commits. On a time-out nothing is decided: the same call again resumes; never an abort in between.
    pub fn commit(&self, timeout: Duration) -> Result<(), Error> {
        // SAFETY: the client is alive; the error that is returned is ours.
        let done = self.call(Operation::Commit, timeout, move |client| unsafe {
            Error::check(Operation::Commit, rd::rd_kafka_commit_transaction(client.ptr(), millis(timeout)))
        });
        done.map_err(|error| self.enrich(error))
    }

    /// Aborts, dropping what is queued. On a time-out call again to resume.
    pub fn abort(&self, timeout: Duration) -> Result<(), Error> {
        // SAFETY: the client is alive; the error that is returned is ours.
        let done = self.call(Operation::Abort, timeout, move |client| unsafe {
            Error::check(Operation::Abort, rd::rd_kafka_abort_transaction(client.ptr(), millis(timeout)))
        });
        done.map_err(|error| self.client.explain(error))
    }

    /// A transactional call may ignore its time limit (librdkafka #5456, #5511). One that does not come back for long
    /// past it is left behind, and with it this producer: the error is fatal, and only a new producer helps.
    fn call(
        &self,
        operation: Operation,
        timeout: Duration,
        call: impl FnOnce(&Client) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let client = Arc::clone(&self.client);
        let within = timeout + self.transaction_timeout + GRACE;
        self.caller.call(within, move || call(&client)).unwrap_or_else(|| {
            let text = format!("the client does not come back from this call within {} s", within.as_secs());
            Err(Error::new(operation, Code::TIMED_OUT, text).with_fatal(true))
        })
    }

    /// The first delivery that failed since the last call, purged records left out.
    pub fn failed_deliveries(&self) -> Option<Error> {
        self.count_failed_deliveries().map(|(first, _)| first)
    }

    /// [`failed_deliveries`](Producer::failed_deliveries), and how many failed.
    pub fn count_failed_deliveries(&self) -> Option<(Error, u64)> {
        let (first, count) = std::mem::take(&mut *self.shared.failures.lock().unwrap_or_else(PoisonError::into_inner));
        first.map(|first| (first, count))
    }

    /// The error that killed the producer, if one did.
    pub fn fatal(&self) -> Option<Error> {
        self.client.fatal(Operation::Produce)
    }

    /// Records that wait to be acknowledged.
    pub fn in_flight(&self) -> usize {
        // SAFETY: the client is alive.
        unsafe { rd::rd_kafka_outq_len(self.client.ptr()) }.max(0) as usize
    }

    /// A transaction says without a place, or only in general (`_INCONSISTENT`), that a delivery failed: the delivery
    /// knows more.
    fn enrich(&self, error: Error) -> Error {
        let error = self.client.explain(error);
        if !error.is_abortable() {
            return error;
        }
        match self.failed_deliveries() {
            Some(cause) if [Code::INCONSISTENT, cause.code()].contains(&error.code()) => error.caused_by(cause),
            _ => error,
        }
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        // SAFETY: the client is alive. What is queued goes nowhere any more: the broker aborts an open transaction.
        unsafe {
            rd::rd_kafka_purge(
                self.client.ptr(),
                rd::RD_KAFKA_PURGE_F_QUEUE | rd::RD_KAFKA_PURGE_F_INFLIGHT | rd::RD_KAFKA_PURGE_F_NON_BLOCKING,
            );
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        self.client.queue().wake();
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

impl fmt::Debug for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("client", &self.client)
            .field("transactional_id", &self.transactional_id)
            .finish_non_exhaustive()
    }
}

fn no_thread(error: std::io::Error) -> Error {
    Error::new(Operation::Connect, Code::INVALID_ARGUMENT, format!("no thread to be had: {error}"))
}

/// Serves the producer's events until it is told to stop. `flush` and `abort` wait for this.
fn serve(client: &Client, shared: &Shared) {
    while !shared.stop.load(Ordering::Relaxed) {
        let Some(event) = client.poll(Duration::from_millis(100)) else { continue };
        match event.kind() {
            rd::RD_KAFKA_EVENT_DR => note_failures(&event, shared),
            rd::RD_KAFKA_EVENT_ERROR => client.note_trouble(event.code(), &event.text()),
            _ => {}
        }
    }
}

/// Only failures are reported (`delivery.report.only.error`).
fn note_failures(event: &Event, shared: &Shared) {
    loop {
        // SAFETY: the event is alive and owns the message. Only the error field is read before its code is known, as an
        // integer: see `code.rs`.
        let (code, error) = unsafe {
            let message = rd::rd_kafka_event_message_next(event.as_ptr());
            if message.is_null() {
                return;
            }
            let code = Code((&raw const (*message).err).cast::<i32>().read());
            let topic = CStr::from_ptr(rd::rd_kafka_topic_name((*message).rkt)).to_string_lossy();
            // Not `rd_kafka_message_produce_errstr`: librdkafka 2.12 has freed what it points to by now.
            (code, Error::of_code(Operation::Produce, code).at(&*topic, Some((*message).partition)))
        };
        // An abort purges, and a neighbour's fault is no record's own. Without transactions nothing is aborted: there the
        // client itself has given the records up.
        let purged = matches!(code, Code::PURGE_QUEUE | Code::PURGE_INFLIGHT);
        let incidental = (purged && shared.transactional) || code == Code::INVALID_DIFFERENT_RECORD;
        if code.is_error() && !incidental {
            let mut failures = shared.failures.lock().unwrap_or_else(PoisonError::into_inner);
            failures.0.get_or_insert(error);
            failures.1 += 1;
        }
    }
}

/// Headers that we own until a message takes them over.
struct Headers(*mut rd::rd_kafka_headers_t);

impl Drop for Headers {
    fn drop(&mut self) {
        // SAFETY: ours; a message that took them over made us forget them.
        unsafe { rd::rd_kafka_headers_destroy(self.0) }
    }
}

fn headers_of(output: &Output<'_>) -> Option<Headers> {
    let headers = output.headers();
    if headers.len() == 0 {
        return None;
    }
    // SAFETY: no precondition.
    let native = Headers(unsafe { rd::rd_kafka_headers_new(headers.len()) });
    for (name, value) in headers {
        let (start, len) = value.map_or((std::ptr::null(), 0), |v| (v.as_ptr(), v.len()));
        // SAFETY: names and values are copied, by the lengths that are told; a null value stays null.
        unsafe {
            rd::rd_kafka_header_add(native.0, name.as_ptr().cast(), name.len() as isize, start.cast(), len as isize);
        }
    }
    Some(native)
}

#[inline]
fn field(vtype: VType, set: impl FnOnce(&mut rd::rd_kafka_vu_s__bindgen_ty_1)) -> rd::rd_kafka_vu_t {
    let mut field = rd::rd_kafka_vu_t { vtype, u: rd::rd_kafka_vu_s__bindgen_ty_1 { ptr: std::ptr::null_mut() } };
    set(&mut field.u);
    field
}

/// Null stays apart from empty: an empty slice still has an address.
#[inline]
fn memory(bytes: Option<&[u8]>) -> rd::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 {
    let (start, size) = bytes.map_or((std::ptr::null(), 0), |b| (b.as_ptr(), b.len()));
    rd::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 { ptr: start.cast_mut().cast(), size }
}
