//! Joining a group in which the broker assigns (KIP-848) as a static member: nobody is let in under the name of one that
//! is there.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Exit, Failure};
use crate::kafka::{Admin, Connection, Consumer, ConsumerOptions, Error};

/// Between two tries, and between two looks.
const PAUSE: Duration = Duration::from_millis(300);
const LOOK: Duration = Duration::from_millis(20);
/// The broker's, and the default.
const SESSION: (&str, Duration) = ("group.consumer.session.timeout.ms", Duration::from_secs(45));
/// The broker looks at sessions when it likes, and a first answer takes its time.
const MARGIN: Duration = Duration::from_secs(5);

/// Joins, and blocks until the group has let the member in: where its former self crashed that takes a session.
///
/// # Errors
/// Exit 6 when it is not let in for longer than a session: the other is alive.
pub fn join(
    connection: &Connection,
    options: &ConsumerOptions<'_>,
    topics: &[&str],
    admin: &Admin,
    stop: &AtomicBool,
) -> Result<Consumer, Failure> {
    let refused = |e: Error| Failure::refused(e.to_string());
    let session = admin.broker_config(SESSION.0).map_err(refused)?.and_then(|ms| ms.parse().ok());
    let session = session.map_or(SESSION.1, Duration::from_millis);
    let deadline = Instant::now() + session + MARGIN;
    loop {
        // A client that was refused is dead.
        let consumer = Consumer::new(connection, options).map_err(refused)?;
        consumer.subscribe(topics).map_err(refused)?;
        let error = loop {
            match consumer.has_joined() {
                Ok(true) => return Ok(consumer),
                Ok(false) if stop.load(Ordering::Relaxed) => {
                    return Err(Failure::new(Exit::Done, "stopped before the group let this process in"));
                }
                Ok(false) => std::thread::sleep(LOOK),
                Err(error) => break error,
            }
        };
        if !error.is_unreleased_instance() {
            return Err(refused(error));
        }
        if Instant::now() >= deadline {
            let message =
                format!("{error}; it is still there after {} s, the broker's {}", session.as_secs(), SESSION.0);
            return Err(Failure::new(Exit::Twin, message));
        }
        std::thread::sleep(PAUSE);
    }
}
