//! One administrative request and its answer.

use std::ffi::{CString, c_char};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::bindings as rd;
use rdkafka::types::RDKafkaAdminOp;

use super::client::{Client, Event, Kind, text_of};
use super::code::Code;
use super::config::millis;
use super::error::{Error, Operation};

/// Before a question is put again.
const AGAIN: Duration = Duration::from_millis(100);

/// How long a question waits for one broker.
const ATTEMPT: Duration = Duration::from_secs(3);
/// How long metadata are waited for.
const METADATA: Duration = Duration::from_millis(500);

/// Options of a request.
pub(super) struct Options(*mut rd::rd_kafka_AdminOptions_t);

impl Options {
    fn new(client: &Client, operation: RDKafkaAdminOp, timeout: Duration) -> Options {
        let mut text = [0 as c_char; 128];
        // SAFETY: the client is alive, the options are ours, the text buffer has the size that is told. The operation
        // time-out, which only some requests have, is how long the broker itself waits for the change to be made.
        unsafe {
            let options = Options(rd::rd_kafka_AdminOptions_new(client.ptr(), operation));
            rd::rd_kafka_AdminOptions_set_request_timeout(options.0, millis(timeout), text.as_mut_ptr(), text.len());
            rd::rd_kafka_AdminOptions_set_operation_timeout(
                options.0,
                millis(timeout / 2),
                text.as_mut_ptr(),
                text.len(),
            );
            options
        }
    }

    pub fn isolation(&self, level: rd::rd_kafka_IsolationLevel_t) {
        // SAFETY: the options are alive; an error (not for this request) is ours to free.
        unsafe {
            let error = rd::rd_kafka_AdminOptions_set_isolation_level(self.0, level);
            let _ = Error::check(Operation::Positions, error);
        }
    }

    /// Asks this broker instead of whichever the client takes for the controller.
    pub fn broker(&self, id: i32) {
        let mut text = [0 as c_char; 128];
        // SAFETY: the options are alive, the text buffer has the size that is told.
        unsafe { rd::rd_kafka_AdminOptions_set_broker(self.0, id, text.as_mut_ptr(), text.len()) };
    }

    pub fn as_ptr(&self) -> *const rd::rd_kafka_AdminOptions_t {
        self.0
    }
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: ours, and freed only here.
        unsafe { rd::rd_kafka_AdminOptions_destroy(self.0) }
    }
}

/// Sends a request and waits for its answer. `send` starts it on the client with options and queue. Errors: what the
/// request as a whole met; single topics and partitions answer for themselves inside the event.
pub(super) fn request(
    client: &Client,
    operation: Operation,
    native: RDKafkaAdminOp,
    timeout: Duration,
    send: impl FnOnce(&Options, *mut rd::rd_kafka_queue_t),
) -> Result<Event, Error> {
    // A request goes to the broker that metadata called the controller, and waits for it although it is gone.
    let _ = client.any_broker(METADATA.min(timeout / 4));
    let queue = client.new_queue();
    let options = Options::new(client, native, timeout);
    send(&options, queue.as_ptr());
    // The client's own time-out comes first and says more.
    let deadline = Instant::now() + timeout + Duration::from_millis(500);
    loop {
        // A client without a group has nobody else to serve its errors, and they say why there is no answer.
        if client.kind() == Kind::Plain {
            client.serve();
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let code = match queue.poll(left.min(Duration::from_millis(100))) {
            Some(event) if event.kind() == rd::RD_KAFKA_EVENT_LOG => continue,
            Some(event) if !event.code().is_error() => return Ok(event),
            Some(event) => Error::new(operation, event.code(), event.text()),
            None if left.is_zero() => Error::of_code(operation, Code::TIMED_OUT),
            None => continue,
        };
        return Err(with_trouble(client, code));
    }
}

/// A request that changes nothing: asked again where its connection breaks or no answer comes, until `timeout`.
pub(super) fn question(
    client: &Client,
    operation: Operation,
    native: RDKafkaAdminOp,
    timeout: Duration,
    mut send: impl FnMut(&Options, *mut rd::rd_kafka_queue_t),
) -> Result<Event, Error> {
    again(timeout, |left| request(client, operation, native, left, &mut send))
}

/// Asks until there is an answer or an error that does not go by itself, for as long as `timeout` lasts.
pub(super) fn again<T>(timeout: Duration, mut ask: impl FnMut(Duration) -> Result<T, Error>) -> Result<T, Error> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match ask(left.min(ATTEMPT)) {
            Err(error) if error.code().is_transient() && left > AGAIN => thread::sleep(AGAIN),
            answer => return answer,
        }
    }
}

/// Says why time ran out, if the client knows.
pub(super) fn with_trouble(client: &Client, error: Error) -> Error {
    match client.trouble() {
        Some((_, trouble)) if error.code().is_transient() => {
            let text = format!("{} ({trouble})", error.text());
            error.with_text(text)
        }
        _ => error,
    }
}

/// A name for C. One with a NUL byte is no topic's or group's.
pub(super) fn c_string(operation: Operation, name: &str) -> Result<CString, Error> {
    CString::new(name).map_err(|_| Error::new(operation, Code::INVALID_ARGUMENT, format!("{name:?} is not a name")))
}

/// Calls a constructor that writes its refusal into a text buffer.
pub(super) fn construct<T>(
    operation: Operation,
    make: impl FnOnce(*mut c_char, usize) -> *mut T,
) -> Result<ptr::NonNull<T>, Error> {
    let mut text = [0 as c_char; 256];
    let made = make(text.as_mut_ptr(), text.len());
    ptr::NonNull::new(made).ok_or_else(|| Error::new(operation, Code::INVALID_ARGUMENT, text_of(&text)))
}
