//! From where changelogs have to be read after a crash: their ends, asked for every now and then.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use crate::kafka::{Admin, At, Isolation};
use crate::operator::StoreId;
use crate::record::{Position, TopicPartition};

const ASK_EVERY: Duration = Duration::from_secs(5);
const WAIT: Duration = Duration::from_secs(5);

/// A changelog's partition, and whose state it holds.
pub type Held = (StoreId, TopicPartition);

/// The end of a changelog's partition, what is not committed included.
pub type End = (StoreId, i32, Position);

/// Asks in the background.
#[derive(Debug)]
pub struct Bounds {
    admin: Arc<Admin>,
    asked: Option<Instant>,
    answer: Option<Receiver<Vec<End>>>,
}

impl Bounds {
    pub fn new(admin: Arc<Admin>) -> Bounds {
        Bounds { admin, asked: None, answer: None }
    }

    /// What was asked for last, once it is there. Does not block.
    pub fn told(&mut self) -> Vec<End> {
        let Some(answer) = &self.answer else { return Vec::new() };
        match answer.try_recv() {
            Err(TryRecvError::Empty) => Vec::new(),
            told => {
                self.answer = None;
                told.unwrap_or_default()
            }
        }
    }

    /// Asks where that is due. Does not block.
    pub fn ask(&mut self, held: impl FnOnce() -> Vec<Held>) {
        if self.answer.is_some() || self.asked.is_some_and(|asked| asked.elapsed() < ASK_EVERY) {
            return;
        }
        self.asked = Some(Instant::now());
        let (held, admin) = (held(), self.admin.within(WAIT));
        let (answers, answer) = channel();
        let ask = move || {
            // Nobody may wait for it any more.
            let _ = answers.send(ends(&admin, &held));
        };
        // Without an answer the bounds stay where they are.
        self.answer = std::thread::Builder::new().name("bounds".to_owned()).spawn(ask).is_ok().then_some(answer);
    }
}

fn ends(admin: &Admin, held: &[Held]) -> Vec<End> {
    let asked: Vec<_> = held.iter().map(|(_, partition)| (partition.clone(), At::Latest)).collect();
    let told = admin.offsets(&asked, Isolation::ReadUncommitted).unwrap_or_default();
    let end = |(partition, end): (TopicPartition, Option<Position>)| {
        let (store, _) = held.iter().find(|(_, held)| *held == partition)?;
        Some((*store, partition.partition, end?))
    };
    told.into_iter().filter_map(end).collect()
}
