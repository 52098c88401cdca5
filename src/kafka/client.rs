//! A librdkafka client, its events, and its end within a bound.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::bindings as rd;

use super::code::Code;
use super::config::{Settings, millis};
use super::error::{Error, Operation};
use super::logs;

// As an integer: see `code.rs`.
unsafe extern "C" {
    fn rd_kafka_event_error(event: *mut rd::rd_kafka_event_t) -> c_int;
    fn rd_kafka_fatal_error(client: *mut rd::rd_kafka_t, text: *mut c_char, size: usize) -> c_int;
    fn rd_kafka_metadata(
        client: *mut rd::rd_kafka_t,
        all_topics: c_int,
        topic: *mut rd::rd_kafka_topic_t,
        metadata: *mut *const rd::rd_kafka_metadata_t,
        timeout_ms: c_int,
    ) -> c_int;
}

/// How long the end of a client may hold its owner up. Threads inside librdkafka may sit in a name look-up.
const DESTROY_WITHIN: Duration = Duration::from_secs(2);

/// How often a client that has nothing to say is looked after.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The longest pause between two tries to give a client its first brokers back.
const REMIND_MAX: Duration = Duration::from_secs(60);

const TEXT_SIZE: usize = 512;

/// Which kind of client, and so which events it makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Producer,
    /// A member of a group: its main queue is the group's.
    Member,
    /// A client without a group, for administration.
    Plain,
}

/// A client with the queue from which its events come. librdkafka's calls are safe from any thread; which thread polls
/// is up to the owner.
pub(super) struct Client {
    ptr: NonNull<rd::rd_kafka_t>,
    queue: Queue,
    kind: Kind,
    name: String,
    brokers: String,
    /// The last connection trouble, to say why a call ran out of time.
    trouble: Mutex<Option<(Code, String)>>,
    care: Mutex<Care>,
}

/// When a client is looked after next, and the pause after that.
#[derive(Debug)]
struct Care {
    next: Instant,
    /// Nothing while it knows a broker.
    remind: Option<Duration>,
}

/// The version of librdkafka.
pub fn version() -> String {
    // SAFETY: no precondition; the text is static.
    unsafe { CStr::from_ptr(rd::rd_kafka_version_str()) }.to_string_lossy().into_owned()
}

// SAFETY: librdkafka promises that a client handle and its queues may be used from several threads at once.
unsafe impl Send for Client {}
// SAFETY: as above.
unsafe impl Sync for Client {}

impl Client {
    /// Creates the client; connecting goes on in the background. Errors: settings that the client does not take.
    pub fn new(kind: Kind, settings: &Settings) -> Result<Client, Error> {
        let config = settings.build()?;
        let mut text = [0 as c_char; TEXT_SIZE];
        let native = match kind {
            Kind::Producer => rd::rd_kafka_type_t::RD_KAFKA_PRODUCER,
            Kind::Member | Kind::Plain => rd::rd_kafka_type_t::RD_KAFKA_CONSUMER,
        };
        let events = match kind {
            Kind::Producer => rd::RD_KAFKA_EVENT_DR | rd::RD_KAFKA_EVENT_ERROR,
            Kind::Member => rd::RD_KAFKA_EVENT_REBALANCE | rd::RD_KAFKA_EVENT_OFFSET_COMMIT | rd::RD_KAFKA_EVENT_ERROR,
            Kind::Plain => rd::RD_KAFKA_EVENT_ERROR,
        };
        // SAFETY: the configuration is alive; a created client takes it over, so it is forgotten then and only then.
        // The text buffer has the size that is told.
        let ptr = unsafe {
            rd::rd_kafka_conf_set_events(config.as_ptr(), events);
            rd::rd_kafka_new(native, config.as_ptr(), text.as_mut_ptr(), text.len())
        };
        let Some(ptr) = NonNull::new(ptr) else {
            return Err(Error::new(Operation::Connect, Code::INVALID_ARGUMENT, text_of(&text)));
        };
        mem::forget(config);
        // SAFETY: the client is alive. A null queue stands for the main queue, to which logs then go; each queue
        // handle is a reference that `Queue` gives back. The group's queue exists, since a member has a `group.id`.
        let queue = unsafe {
            rd::rd_kafka_set_log_queue(ptr.as_ptr(), ptr::null_mut());
            match kind {
                Kind::Member => {
                    rd::rd_kafka_poll_set_consumer(ptr.as_ptr());
                    Queue::new(rd::rd_kafka_queue_get_consumer(ptr.as_ptr()))
                }
                Kind::Producer | Kind::Plain => Queue::new(rd::rd_kafka_queue_get_main(ptr.as_ptr())),
            }
        };
        Ok(Client {
            ptr,
            queue,
            kind,
            name: settings.client_id().to_owned(),
            brokers: settings.brokers().to_owned(),
            trouble: Mutex::new(None),
            care: Mutex::new(Care { next: Instant::now() + LOOK_EVERY, remind: None }),
        })
    }

    pub fn ptr(&self) -> *mut rd::rd_kafka_t {
        self.ptr.as_ptr()
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// A queue of our own, for the answer of one call.
    pub fn new_queue(&self) -> Queue {
        // SAFETY: the client is alive, and the new queue is ours.
        unsafe { Queue::new(rd::rd_kafka_queue_new(self.ptr())) }
    }

    /// Waits for an event. Log lines are passed on here and answer `None`, so `None` does not mean that time is up.
    #[inline]
    pub fn poll(&self, timeout: Duration) -> Option<Event> {
        let Some(event) = self.queue.poll(timeout) else {
            self.look_after();
            return None;
        };
        if event.kind() == rd::RD_KAFKA_EVENT_LOG {
            event.log(&self.name);
            return None;
        }
        Some(event)
    }

    /// Serves what has gathered on the queue of a client that nobody polls: logs are passed on, errors noted.
    pub fn serve(&self) {
        while let Some(event) = self.queue.poll(Duration::ZERO) {
            match event.kind() {
                rd::RD_KAFKA_EVENT_LOG => event.log(&self.name),
                rd::RD_KAFKA_EVENT_ERROR => self.note_trouble(event.code(), &event.text()),
                _ => {}
            }
        }
        self.look_after();
    }

    /// Gives a client that knows no broker any more its first ones back. A broker that goes down in good order takes
    /// itself out of the cluster first: where it is the only one, librdkafka learns from it that there are no brokers
    /// and forgets them all, and where that meets its own return to the first ones (KIP-899) it stays so for ever.
    pub fn look_after(&self) {
        let now = Instant::now();
        let Ok(mut care) = self.care.try_lock() else { return };
        if now < care.next {
            return;
        }
        // SAFETY: the client is alive; with a timeout of 0 this answers what the last metadata said.
        if unsafe { rd::rd_kafka_controllerid(self.ptr(), 0) } >= 0 {
            *care = Care { next: now + LOOK_EVERY, remind: None };
            return;
        }
        // Not at the first look: it may be about to connect.
        let Some(pause) = care.remind else {
            *care = Care { next: now + LOOK_EVERY, remind: Some(LOOK_EVERY) };
            return;
        };
        *care = Care { next: now + pause, remind: Some((pause * 2).min(REMIND_MAX)) };
        drop(care);
        tracing::debug!(client = self.name, brokers = self.brokers, "knows no broker; told again");
        let Ok(brokers) = CString::new(self.brokers.as_str()) else { return };
        // SAFETY: the client is alive and the text outlives the call, which copies it.
        unsafe { rd::rd_kafka_brokers_add(self.ptr(), brokers.as_ptr()) };
        // A broker that is known but not connected to is connected to when somebody asks for metadata.
        let _ = self.any_broker(Duration::from_millis(50));
    }

    /// The id of some broker, once there is a connection to one.
    pub fn any_broker(&self, timeout: Duration) -> Result<i32, Error> {
        let broker = self.brokers(timeout)?.into_iter().next();
        broker.ok_or_else(|| Error::of_code(Operation::Connect, Code::ALL_BROKERS_DOWN))
    }

    /// The ids of the brokers that are up, as one of them says.
    pub fn brokers(&self, timeout: Duration) -> Result<Vec<i32>, Error> {
        let mut metadata = ptr::null();
        // SAFETY: the client is alive; without a topic only brokers are asked for. Metadata that is set is ours.
        let code = Code(unsafe { rd_kafka_metadata(self.ptr(), 0, ptr::null_mut(), &mut metadata, millis(timeout)) });
        if code.is_error() || metadata.is_null() {
            return Err(Error::of_code(Operation::Connect, code));
        }
        // SAFETY: metadata is alive until it is freed here, and holds that many brokers.
        unsafe {
            let count = usize::try_from((*metadata).broker_cnt).unwrap_or(0);
            let ids = (0..count).map(|index| (*(*metadata).brokers.add(index)).id).collect();
            rd::rd_kafka_metadata_destroy(metadata);
            Ok(ids)
        }
    }

    /// Asks for a topic's leaders anew. What the client keeps of them would go out of date unnoticed where nothing is
    /// read or written.
    pub fn refresh(&self, topic: &CStr, timeout: Duration) -> Result<(), Error> {
        let mut metadata = ptr::null();
        // SAFETY: the client is alive, name and topic handle too; handle and metadata are freed here.
        let code = unsafe {
            let handle = rd::rd_kafka_topic_new(self.ptr(), topic.as_ptr(), ptr::null_mut());
            if handle.is_null() {
                return Err(Error::new(Operation::Connect, Code::INVALID_ARGUMENT, "no such topic"));
            }
            let code = Code(rd_kafka_metadata(self.ptr(), 0, handle, &mut metadata, millis(timeout)));
            if !metadata.is_null() {
                rd::rd_kafka_metadata_destroy(metadata);
            }
            rd::rd_kafka_topic_destroy(handle);
            code
        };
        if code.is_error() { Err(Error::of_code(Operation::Connect, code)) } else { Ok(()) }
    }

    /// That there was no answer, from where, and why.
    pub fn unreachable(&self, error: &Error, timeout: Duration) -> Error {
        let (code, reason) = self.trouble().unwrap_or_else(|| (error.code(), error.text().to_owned()));
        let text = format!("no answer from {} within {} s: {reason}", self.brokers, timeout.as_secs_f32());
        Error::new(Operation::Connect, code, text)
    }

    /// Remembers why the cluster cannot be reached.
    pub fn note_trouble(&self, code: Code, text: &str) {
        tracing::debug!(client = self.name, "{text}");
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        // That all brokers are down follows the reason and does not say it.
        if code != Code::ALL_BROKERS_DOWN || trouble.is_none() {
            // What follows counts milliseconds and repetitions.
            let text = text.split(" (after ").next().unwrap_or(text);
            *trouble = Some((code, text.to_owned()));
        }
    }

    pub fn trouble(&self) -> Option<(Code, String)> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The error that killed the client, if one did.
    pub fn fatal(&self, operation: Operation) -> Option<Error> {
        let mut text = [0 as c_char; TEXT_SIZE];
        // SAFETY: the client is alive and the buffer has the size that is told.
        let code = Code(unsafe { rd_kafka_fatal_error(self.ptr(), text.as_mut_ptr(), text.len()) });
        code.is_error().then(|| Error::new(operation, code, text_of(&text)).with_fatal(true))
    }

    /// `_FATAL` only points to another error: put that in its place.
    pub fn explain(&self, error: Error) -> Error {
        if error.code() != Code::FATAL {
            return error;
        }
        self.fatal(error.operation()).unwrap_or(error.with_fatal(true))
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.queue.release();
        let client = Handle(self.ptr);
        let name = self.name.clone();
        let (done, ended) = crossbeam_channel::bounded::<()>(1);
        let destroy = move || {
            let client = client;
            // SAFETY: this was the last owner, and the queue reference is back. The flag leaves out the consumer's
            // close, which has no bound: who wants it has done it before.
            unsafe { rd::rd_kafka_destroy_flags(client.0.as_ptr(), rd::RD_KAFKA_DESTROY_F_NO_CONSUMER_CLOSE) };
            drop(done);
        };
        // No thread to be had: better to leak a client than to hang.
        if thread::Builder::new().name("kafka-destroy".into()).spawn(destroy).is_ok()
            && ended.recv_timeout(DESTROY_WITHIN) == Err(crossbeam_channel::RecvTimeoutError::Timeout)
        {
            tracing::debug!(client = name, "the client ends in the background");
        }
    }
}

/// The pointer on its way to the thread that ends the client.
struct Handle(NonNull<rd::rd_kafka_t>);

// SAFETY: librdkafka's handles may be used from any thread.
unsafe impl Send for Handle {}

/// A reference to a queue of events.
pub(super) struct Queue(*mut rd::rd_kafka_queue_t);

impl Queue {
    /// # Safety
    /// `queue` is a queue reference that nobody else gives back, and its client outlives it.
    unsafe fn new(queue: *mut rd::rd_kafka_queue_t) -> Queue {
        assert!(!queue.is_null(), "librdkafka returns a queue");
        Queue(queue)
    }

    pub fn as_ptr(&self) -> *mut rd::rd_kafka_queue_t {
        self.0
    }

    #[inline]
    pub fn poll(&self, timeout: Duration) -> Option<Event> {
        // SAFETY: the queue is alive; an event that is returned is ours.
        NonNull::new(unsafe { rd::rd_kafka_queue_poll(self.0, millis(timeout)) }).map(Event)
    }

    /// Wakes a thread that polls this queue.
    pub fn wake(&self) {
        // SAFETY: the queue is alive.
        unsafe { rd::rd_kafka_queue_yield(self.0) }
    }

    /// Gives the reference back early: a client cannot end while one is out.
    fn release(&mut self) {
        if !self.0.is_null() {
            // SAFETY: ours, and nulled so that it is given back once.
            unsafe { rd::rd_kafka_queue_destroy(self.0) };
            self.0 = ptr::null_mut();
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.release();
    }
}

/// An event that we own.
pub(super) struct Event(NonNull<rd::rd_kafka_event_t>);

impl Event {
    pub fn as_ptr(&self) -> *mut rd::rd_kafka_event_t {
        self.0.as_ptr()
    }

    /// One of `RD_KAFKA_EVENT_*`.
    #[inline]
    pub fn kind(&self) -> i32 {
        // SAFETY: the event is ours.
        unsafe { rd::rd_kafka_event_type(self.as_ptr()) }
    }

    pub fn code(&self) -> Code {
        // SAFETY: the event is ours.
        Code(unsafe { rd_kafka_event_error(self.as_ptr()) })
    }

    pub fn text(&self) -> String {
        // SAFETY: the event is ours; the string is NUL-terminated and copied.
        unsafe { CStr::from_ptr(rd::rd_kafka_event_error_string(self.as_ptr())) }.to_string_lossy().into_owned()
    }

    /// Only for error events: the client is dead.
    pub fn is_fatal(&self) -> bool {
        // SAFETY: the event is ours and, by the caller's word, an error event: only those hold the flag.
        unsafe { rd::rd_kafka_event_error_is_fatal(self.as_ptr()) != 0 }
    }

    fn log(&self, client: &str) {
        let (mut facility, mut line, mut level) = (ptr::null(), ptr::null(), 0);
        // SAFETY: the event is ours; on success (0) both strings are set, NUL-terminated, and live as long as it does.
        unsafe {
            if rd::rd_kafka_event_log(self.as_ptr(), &mut facility, &mut line, &mut level) == 0 {
                let (facility, line) = (CStr::from_ptr(facility), CStr::from_ptr(line));
                logs::record(client, level, &facility.to_string_lossy(), &line.to_string_lossy());
            }
        }
    }
}

impl Drop for Event {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: ours, and freed only here.
        unsafe { rd::rd_kafka_event_destroy(self.as_ptr()) }
    }
}

/// What a call wrote into its text buffer.
pub(super) fn text_of(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
