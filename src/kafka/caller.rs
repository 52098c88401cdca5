//! Calls that may not come back, on a thread of their own, so that whoever waits for them is free after a while.

use std::io;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Sender, bounded, unbounded};

type Call = Box<dyn FnOnce() + Send>;

/// A thread that carries out one call after the other. Ends once it is dropped and its last call came back.
pub(super) struct Caller(Sender<Call>);

impl Caller {
    pub fn new(name: &str) -> io::Result<Caller> {
        let (calls, called) = unbounded::<Call>();
        thread::Builder::new().name(name.into()).spawn(move || called.into_iter().for_each(|call| call()))?;
        Ok(Caller(calls))
    }

    /// What the call answers; `None` if it does not come back within that time. Then everything that it holds stays
    /// with it.
    pub fn call<T: Send + 'static>(&self, within: Duration, call: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (answer, answered) = bounded(1);
        let _ = self.0.send(Box::new(move || drop(answer.send(call()))));
        answered.recv_timeout(within).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_does_not_come_back_frees_its_caller() {
        let caller = Caller::new("caller").unwrap();
        let (release, held) = bounded::<()>(0);
        assert_eq!(caller.call(Duration::from_secs(10), || 7), Some(7));
        assert_eq!(caller.call(Duration::from_millis(20), move || held.recv().is_ok()), None);
        drop(release);
        assert_eq!(caller.call(Duration::from_secs(10), || 8), Some(8));
    }
}
