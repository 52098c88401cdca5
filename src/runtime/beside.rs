//! Positions and dead letters of a Postgres stage that keeps them beside its rows. A dead letter lies in the database
//! until the Kafka transaction that relays it is committed; whoever owns the partition relays what lies there.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::chunk::{Chunk, Target, TargetId};
use crate::commit::progress::BatchId;
use crate::error::Failure;
use crate::ids::{self, EventId};
use crate::record::{Input, Offset, Position, TopicPartition};
use crate::reject::{Reject, dead_letter};
use crate::runtime::kept::Kept;
use crate::runtime::postgres_task::stopped;
use crate::sink::postgres::{Advance, Letter, Moves, Origin, Store};
use crate::topology::spec::OnError;

/// How often a transaction compares the positions of every claimed partition. A database that went back in time (a
/// standby promoted without the last commits, a backup put back) is noticed so, also where no record comes in any more.
const COMPARE_EVERY: Duration = Duration::from_secs(10);

/// What the transactions of a stage carry beside rows.
pub struct Beside {
    store: Arc<Store>,
    writer: Arc<LetterWriter>,
    advances: Vec<Advance>,
    /// The record at hand, by where it was read.
    at: Option<Origin>,
    /// The records of the open batch's rows.
    origins: Vec<Origin>,
    /// Of records that became no row, for the next transaction.
    letters: Vec<Letter>,
    /// Among the outputs of the open batch.
    relaying: Vec<Origin>,
    sealed: VecDeque<(BatchId, Vec<Origin>)>,
    /// In Kafka: the next transaction forgets them.
    relayed: Vec<Origin>,
    /// What each transaction under way forgets.
    forgetting: VecDeque<Vec<Origin>>,
    /// A transaction found its positions elsewhere.
    pub fenced: bool,
    compared: Instant,
}

/// Makes letters that carry an id, the same however often they are relayed.
pub struct LetterWriter {
    pub topology: String,
    pub on_error: OnError,
    pub target: Target,
    pub topic_ids: HashMap<String, Uuid>,
}

impl LetterWriter {
    fn letter(&self, origin: Origin, input: &Input<'_>, reject: &Reject) -> Letter {
        let carried = input.headers.last(ids::HEADER).flatten().and_then(|id| std::str::from_utf8(id).ok());
        let topic_id = self.topic_ids.get(input.topic).copied().unwrap_or_default();
        let place = EventId::at(topic_id, input.partition, input.offset).to_string();
        let mut chunk = Chunk::default();
        let id = Some(carried.unwrap_or(&place));
        dead_letter(&mut chunk, TargetId(0), &self.target, &self.topology, id, input, reject);
        Letter::new(origin, &chunk.get(0))
    }

    /// The letter of a row that the database refused.
    fn refused(&self, origin: &Origin, input: &Input<'_>, reject: &Reject) -> Result<Option<Letter>, Failure> {
        match self.on_error {
            OnError::Reject => Ok(Some(self.letter(origin.clone(), input, reject))),
            OnError::Skip => Ok(None),
            OnError::Stop => Err(stopped(input, reject)),
        }
    }
}

impl Beside {
    pub fn new(store: Arc<Store>, writer: LetterWriter) -> Beside {
        Beside {
            store,
            writer: Arc::new(writer),
            advances: Vec::new(),
            at: None,
            origins: Vec::new(),
            letters: Vec::new(),
            relaying: Vec::new(),
            sealed: VecDeque::new(),
            relayed: Vec::new(),
            forgetting: VecDeque::new(),
            fenced: false,
            compared: Instant::now(),
        }
    }

    /// A partition was claimed anew: what was known of it is of a former claim.
    pub fn assigned(&mut self, partition: &TopicPartition) {
        self.advances.retain(|advance| advance.partition != *partition);
    }

    /// Partitions were given up: what is left to do is their next owner's.
    pub fn unassigned(&mut self, partitions: &[TopicPartition]) {
        self.advances.retain(|advance| !partitions.contains(&advance.partition));
        self.store.give_up(partitions);
    }

    /// The record that is processed next.
    pub fn reading(&mut self, partition: &TopicPartition, offset: Offset) {
        self.at = Some(Origin { partition: partition.clone(), offset });
    }

    /// The record at hand has become a row of the open batch.
    pub fn row(&mut self) {
        self.origins.extend(self.at.clone());
    }

    /// The record at hand is through.
    pub fn processed(&mut self) {
        if let Some(Origin { partition, offset }) = self.at.take() {
            self.advance(&partition, offset.next());
        }
    }

    /// Moves the position of a claimed partition.
    pub fn advance(&mut self, partition: &TopicPartition, to: Position) {
        if let Some(advance) = self.advances.iter_mut().find(|advance| advance.partition == *partition) {
            advance.to = advance.to.max(to);
            return;
        }
        let partition = partition.clone();
        match self.store.claimed(&partition) {
            Some(claim) => {
                let (epoch, from) = (claim.epoch, claim.position);
                self.advances.push(Advance { partition, epoch, from, to: to.max(from) });
            }
            // Rows without their position must not be written.
            None => self.fenced = true,
        }
    }

    pub fn letter(&mut self, input: &Input<'_>, reject: &Reject) {
        if let Some(origin) = self.at.clone() {
            self.letters.push(self.writer.letter(origin, input, reject));
        }
    }

    /// Whether a transaction has anything to do but rows.
    pub fn is_open(&self) -> bool {
        !self.letters.is_empty() || !self.relayed.is_empty() || self.advances.iter().any(|a| a.to > a.from)
    }

    /// Whether the next transaction compares every position, so that one is wanted though nothing is open.
    pub fn compares(&self) -> bool {
        self.compared.elapsed() >= COMPARE_EVERY && self.store.has_claims()
    }

    /// What goes with the rows of these records.
    pub fn moves(&mut self, kept: &Arc<Kept>) -> Moves {
        let all = self.compares();
        if all {
            self.compared = Instant::now();
            self.store.claims().iter().for_each(|claim| self.advance(&claim.partition, claim.position));
        }
        let advances = self.advances.iter().filter(|advance| all || advance.to > advance.from).cloned().collect();
        self.advances.iter_mut().for_each(|advance| advance.from = advance.to);
        let (writer, kept) = (Arc::clone(&self.writer), Arc::clone(kept));
        let origins = std::mem::take(&mut self.origins);
        let relayed = std::mem::take(&mut self.relayed);
        self.forgetting.push_back(relayed.clone());
        Moves {
            advances,
            letters: std::mem::take(&mut self.letters),
            relayed,
            refused: Some(Box::new(move |row, reject| writer.refused(&origins[row], &kept.input(row), reject))),
        }
    }

    /// The oldest transaction under way is answered; a fenced one has forgotten nothing.
    pub fn answered(&mut self, fenced: bool) {
        let origins = self.forgetting.pop_front().unwrap_or_default();
        match fenced {
            true => self.relayed.extend(origins),
            false => self.store.relayed(&origins),
        }
    }

    /// Puts letters among the outputs of the open batch.
    pub fn relay(&mut self, letters: Vec<Letter>, chunk: &mut Chunk, target: TargetId) {
        for letter in letters {
            letter.put(chunk, target, self.writer.target.partitions);
            self.relaying.push(letter.origin);
        }
    }

    /// The same with what a former owner left. What is in Kafka already only waits to be forgotten.
    pub fn relay_former(&mut self, chunk: &mut Chunk, target: TargetId) {
        let mut letters = self.store.take_letters();
        letters.retain(|letter| {
            let is = |origin: &Origin| *origin == letter.origin;
            !self.relayed.iter().any(is) && !self.forgetting.iter().flatten().any(is)
        });
        self.relay(letters, chunk, target);
    }

    pub fn sealed(&mut self, batch: BatchId) {
        if !self.relaying.is_empty() {
            self.sealed.push_back((batch, std::mem::take(&mut self.relaying)));
        }
    }

    /// True where letters can be forgotten now.
    pub fn committed(&mut self, batch: BatchId) -> bool {
        while let Some((_, origins)) = self.sealed.pop_front_if(|(sealed, _)| *sealed <= batch) {
            self.relayed.extend(origins);
        }
        !self.relayed.is_empty()
    }

    /// Everything but what is in Kafka already is found again with the next claim.
    pub fn abandon(&mut self) {
        self.advances.clear();
        self.origins.clear();
        self.letters.clear();
        self.relaying.clear();
        self.sealed.clear();
        self.fenced = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::postgres::{Address, StageName};

    fn beside() -> Beside {
        let address = Address::parse("postgres://semel@localhost/semel", "semel").unwrap();
        let store = Store::new(StageName::new("s", HashMap::new()), address, true, "test");
        let target = Target {
            topic: "dead".into(),
            partitions: 1,
            max_message_bytes: 1 << 20,
            compacted: false,
            timestamp_before_max_ms: i64::MAX,
            timestamp_after_max_ms: i64::MAX,
        };
        let (topology, topic_ids) = ("t".into(), HashMap::new());
        Beside::new(Arc::new(store), LetterWriter { topology, on_error: OnError::Reject, target, topic_ids })
    }

    #[test]
    fn letters_that_a_fenced_transaction_was_to_forget_are_forgotten_by_the_next() {
        let (mut beside, kept, mut chunk) = (beside(), Arc::default(), Chunk::default());
        let mut out = chunk.push(TargetId(0));
        out.partition(5);
        out.finish();
        let origin = Origin { partition: TopicPartition::new("in", 0), offset: Offset(3) };
        let letter = Letter::new(origin.clone(), &chunk.get(0));
        let mut relayed = Chunk::default();
        beside.relay(vec![letter], &mut relayed, TargetId(0));
        assert_eq!(relayed.get(0).partition, 0, "the topic has one partition by now");
        beside.sealed(BatchId(0));
        assert!(beside.committed(BatchId(0)));
        assert_eq!(beside.moves(&kept).relayed, std::slice::from_ref(&origin));
        assert_eq!(beside.moves(&kept).relayed, []);
        beside.abandon();
        beside.answered(true);
        beside.answered(true);
        assert!(beside.is_open());
        assert_eq!(beside.moves(&kept).relayed, [origin]);
        beside.answered(false);
        assert!(!beside.is_open());
    }
}
