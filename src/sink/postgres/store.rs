//! A worker's hold on its positions in the database.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::timeout;

use super::address::Address;
use super::connect::Connection;
use super::error::Error;
use super::offsets::{self, Claim, Letter, Origin, Seed, StageName};
use super::transaction::Transaction;
use crate::error::{Disposition, Failure};
use crate::record::{Position, TopicPartition};

/// Claims are asked for by the thread that polls Kafka: a member that is silent for long is put out of its group.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Claims partitions for one worker, on a connection of its own for each question.
#[derive(Debug)]
pub struct Store {
    pub name: StageName,
    address: Address,
    prepared: bool,
    /// For people who look at the table.
    owner: String,
    claims: Mutex<HashMap<TopicPartition, Claim>>,
    /// Letters found with a claim, which have yet to be relayed.
    letters: Mutex<HashMap<TopicPartition, Vec<Letter>>>,
}

impl Store {
    pub fn new(name: StageName, address: Address, prepared: bool, owner: &str) -> Store {
        let (claims, letters) = (Mutex::default(), Mutex::default());
        Store { name, address, prepared, owner: owner.to_owned(), claims, letters }
    }

    /// Takes partitions over. `Ok(Err)`: the database is away or a former owner is still at it; ask again. Blocks, for
    /// 15 seconds at most.
    ///
    /// # Errors
    /// What asking again does not mend: the tables are gone, a position is, or a topic was made anew.
    pub fn claim(&self, seeds: &[Seed]) -> Result<Result<Vec<Claim>, String>, Failure> {
        let partitions = || seeds.iter().map(|seed| &seed.partition);
        let claimed = self.run(async |transaction| {
            let (transaction, other) = offsets::made_anew(transaction, &self.name, partitions()).await?;
            if let Some(topic) = other {
                return Ok((transaction, Err(self.made_anew(&topic))));
            }
            let had = seeds.iter().filter(|seed| seed.had).map(|seed| &seed.partition);
            let (transaction, absent) = offsets::absent(transaction, &self.name, had).await?;
            if let Some(partition) = absent {
                return Ok((transaction, Err(self.absent(&partition))));
            }
            let (transaction, claims) = offsets::claim(transaction, &self.name, &self.owner, seeds).await?;
            let (transaction, letters) = offsets::pending(transaction, &self.name, partitions()).await?;
            Ok((transaction, Ok((claims, letters))))
        });
        let (claims, letters) = match claimed {
            Ok(claimed) => claimed?,
            Err(error) => return self.passes(error).map(Err),
        };
        let mut held = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        held.extend(claims.iter().map(|claim| (claim.partition.clone(), claim.clone())));
        let mut waiting = self.letters.lock().unwrap_or_else(PoisonError::into_inner);
        partitions().for_each(|partition| drop(waiting.remove(partition)));
        for letter in letters {
            waiting.entry(letter.origin.partition.clone()).or_default().push(letter);
        }
        Ok(Ok(claims))
    }

    fn made_anew(&self, topic: &str) -> Failure {
        Failure::stopped(format!(
            "topic {topic:?} was deleted and made anew: {} holds the positions of stage {} in the former one. Nothing \
             was skipped; once you know what is missing, semel reset sets positions in the new one",
            offsets::OFFSETS,
            self.name.stage
        ))
    }

    /// Where the group would go on is past what a table that was put back holds.
    fn absent(&self, partition: &TopicPartition) -> Failure {
        Failure::stopped(format!(
            "{} has no row of stage {} for {partition}, although the stage has started it: rows were deleted, or the \
             database was put back without them. Nothing was skipped; put them back together with the sink's table, or \
             have semel reset set a position anew",
            offsets::OFFSETS,
            self.name.stage
        ))
    }

    /// The claim on a partition.
    pub fn claimed(&self, partition: &TopicPartition) -> Option<Claim> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).get(partition).cloned()
    }

    /// All claims, of partitions that are still this worker's.
    pub fn claims(&self) -> Vec<Claim> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub fn has_claims(&self) -> bool {
        !self.claims.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Whether letters of a partition wait to be relayed.
    pub fn has_letters(&self, partition: &TopicPartition) -> bool {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner).contains_key(partition)
    }

    /// Letters that a former owner left.
    pub fn take_letters(&self) -> Vec<Letter> {
        let mut letters = self.letters.lock().unwrap_or_else(PoisonError::into_inner);
        letters.drain().flat_map(|(_, letters)| letters).collect()
    }

    /// Forgets what was claimed: the next owner relays the letters.
    pub fn give_up(&self, partitions: &[TopicPartition]) {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).retain(|p, _| !partitions.contains(p));
        self.letters.lock().unwrap_or_else(PoisonError::into_inner).retain(|p, _| !partitions.contains(p));
    }

    /// Forgets letters that the database has forgotten.
    pub fn relayed(&self, origins: &[Origin]) {
        let mut letters = self.letters.lock().unwrap_or_else(PoisonError::into_inner);
        letters.values_mut().for_each(|letters| letters.retain(|letter| !origins.contains(&letter.origin)));
    }

    /// Every position of the stage; `Ok(Err)` where the database is away. Blocks.
    pub fn positions(&self) -> Result<Result<HashMap<TopicPartition, Position>, String>, Failure> {
        match self.run(async |transaction| offsets::read(transaction, &self.name).await) {
            Ok(positions) => Ok(Ok(positions.into_iter().collect())),
            Err(error) => self.passes(error).map(Err),
        }
    }

    /// Forgets the positions of partitions; the group's count then. `Ok(Err)` where the database is away. Blocks.
    pub fn forget(&self, partitions: &[TopicPartition]) -> Result<Result<(), String>, Failure> {
        let forgotten =
            self.run(async |transaction| Ok((offsets::forget(transaction, &self.name, partitions.iter()).await?, ())));
        forgotten.map(Ok).or_else(|error| self.passes(error).map(Err))
    }

    fn passes(&self, error: Error) -> Result<String, Failure> {
        match error.disposition() {
            Disposition::Retry | Disposition::Rebuild => Ok(error.to_string()),
            Disposition::AbortTxn { .. } | Disposition::Fenced | Disposition::Reject { .. } | Disposition::Fatal(_) => {
                Err(Failure::stopped(format!(
                    "positions of stage {} in {}: {error}",
                    self.name.stage,
                    offsets::OFFSETS
                )))
            }
        }
    }

    /// Runs one transaction on a thread with a connection of its own and commits it, within 15 seconds. What became of
    /// a COMMIT that went unanswered does not matter: asking again raises the epoch.
    fn run<T: Send>(
        &self,
        work: impl AsyncFnOnce(Transaction<'_>) -> Result<(Transaction<'_>, T), Error> + Send,
    ) -> Result<T, Error> {
        let asked = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|e| Error::Client(e.to_string()))?;
            let asked = async {
                let mut connection = Connection::reopen(&self.address, self.prepared).await?;
                let transaction = Transaction::begin(&mut connection).await?;
                let (transaction, result) = work(transaction).await?;
                transaction.commit().await?;
                connection.close().await;
                Ok(result)
            };
            let seconds = TIMEOUT.as_secs();
            let late = |_| Err(Error::Connection(format!("no answer within {seconds} s")));
            let answer = runtime.block_on(async { timeout(TIMEOUT, asked).await.unwrap_or_else(late) });
            // Takes the connection along; a name that is still being resolved is not waited for.
            runtime.shutdown_background();
            answer
        };
        std::thread::scope(|scope| {
            scope.spawn(asked).join().unwrap_or_else(|_| Err(Error::Client("the question itself failed".into())))
        })
    }
}
