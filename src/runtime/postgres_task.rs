//! A Postgres stage's task: rows go to the database in batches as they fill, each in its own transaction; a seal waits
//! until all of them are committed there. What the database refused goes out with the positions.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::chunk::{Chunk, Target, TargetId};
use crate::commit::progress::BatchId;
use crate::crash::{self, Point};
use crate::error::Failure;
use crate::observe::status::StageStatus;
use crate::operator::row::{Mapped, RowMapper};
use crate::record::{Input, Offset, Position, TopicPartition};
use crate::reject::{Reject, dead_letter};
use crate::runtime::beside::{Beside, LetterWriter};
use crate::runtime::kept::Kept;
use crate::runtime::preflight::StageTopics;
use crate::runtime::task::Task;
use crate::sink::postgres::{Applied, Batch, Breaker, Checked, Store, Writer, WriterConfig};
use crate::topology::plan::{Plan, Stage, StageKind};
use crate::topology::spec::{Guarantee, NodeKind, OnError};

/// One batch is written while the next fills.
const IN_FLIGHT: usize = 2;

/// Maps records to rows and has them written.
pub struct PostgresTask {
    topology: String,
    sink: String,
    on_error: OnError,
    /// Rows may be written before the batch is sealed. Not under at-most-once: positions come first.
    eager: bool,
    batch_rows: usize,
    batch_bytes: usize,
    mapper: RowMapper,
    breaker: Arc<Breaker>,
    writer: Writer,
    batch: Batch,
    spare: Vec<Batch>,
    /// The records of `batch`, row by row, as long as the database may refuse them.
    kept: Kept,
    /// The records of the batches being written; none where they were given up meanwhile.
    flying: VecDeque<Option<Arc<Kept>>>,
    /// The oldest of them only compares positions: nothing waits for it.
    comparing: bool,
    /// Where positions are kept beside the rows.
    beside: Option<Beside>,
    letters: Chunk,
    dead_letters: (TargetId, Target),
    /// What the database ended the stage with. Nothing may be sealed after it: the rows of that batch are not there.
    failed: Option<Failure>,
    status: Arc<StageStatus>,
}

impl PostgresTask {
    /// A task for one worker, with a connection of its own.
    pub fn new(
        plan: &Plan,
        stage: &Stage,
        topics: &StageTopics,
        checked: &Checked,
        store: Option<Arc<Store>>,
        status: Arc<StageStatus>,
    ) -> PostgresTask {
        let StageKind::Postgres { sink, .. } = &stage.kind else { unreachable!("a task of a Postgres stage") };
        let node = &plan.topology.nodes[sink.0];
        let NodeKind::PostgresSink(spec) = &node.kind else { unreachable!("a Postgres stage has a Postgres sink") };
        let target = topics.targets[topics.dead_letters.0 as usize].clone();
        let letters = LetterWriter {
            topology: plan.topology.name.clone(),
            on_error: node.on_error,
            target: target.clone(),
            topic_ids: topics.topic_ids.clone(),
        };
        let breaker = Arc::new(Breaker::new(&node.name, spec.max_rejects_per_minute));
        PostgresTask {
            topology: plan.topology.name.clone(),
            sink: node.name.clone(),
            on_error: node.on_error,
            eager: plan.topology.guarantee != Guarantee::AtMostOnce,
            batch_rows: spec.batch_rows,
            batch_bytes: spec.batch_bytes as usize,
            mapper: RowMapper::new(&node.name, spec, plan.formats(stage), Some(checked.layout.specs())).with_events(
                plan,
                stage,
                &topics.topic_ids,
            ),
            writer: Writer::spawn(WriterConfig {
                address: checked.address.clone(),
                layout: Arc::clone(&checked.layout),
                ledger: checked.ledger.clone(),
                progress: store.as_ref().map(|store| store.name.clone()),
                prepared: spec.prepared,
                breaker: Arc::clone(&breaker),
            }),
            breaker,
            batch: Batch::new(Arc::clone(&checked.layout)),
            spare: Vec::new(),
            kept: Kept::default(),
            flying: VecDeque::new(),
            comparing: false,
            beside: store.map(|store| Beside::new(store, letters)),
            letters: Chunk::default(),
            dead_letters: (topics.dead_letters, target),
            failed: None,
            status,
        }
    }

    fn check(&self) -> Result<(), Failure> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn refuse(&mut self, input: &Input<'_>, reject: &Reject) -> Result<(), Failure> {
        match self.on_error {
            OnError::Skip => self.status.skipped.add(1),
            OnError::Stop => return Err(stopped(input, reject)),
            OnError::Reject => {
                self.breaker.check(1, &reject.message)?;
                self.breaker.count(1);
                self.letter(input, reject);
            }
        }
        Ok(())
    }

    fn letter(&mut self, input: &Input<'_>, reject: &Reject) {
        self.status.reject(&reject.node, reject.reason);
        if let Some(beside) = &mut self.beside {
            return beside.letter(input, reject);
        }
        let (id, target) = &self.dead_letters;
        let event_id = input.headers.last("semel-event-id").flatten().and_then(|id| std::str::from_utf8(id).ok());
        dead_letter(&mut self.letters, *id, target, &self.topology, event_id, input, reject);
    }

    fn submit(&mut self) {
        let next = self.spare.pop().unwrap_or_else(|| self.batch.like());
        let kept = Arc::new(std::mem::take(&mut self.kept));
        let moves = self.beside.as_mut().map(|beside| beside.moves(&kept)).unwrap_or_default();
        self.writer.submit_with(std::mem::replace(&mut self.batch, next), moves);
        self.flying.push_back(Some(kept));
    }

    /// Whether a transaction would do anything.
    fn is_open(&self) -> bool {
        !self.batch.is_empty() || self.beside.as_ref().is_some_and(Beside::is_open)
    }

    /// Takes the answer to the oldest batch, if it comes within `wait`.
    fn answer(&mut self, wait: Duration) -> Result<bool, Failure> {
        let answered = self.take_answer(wait);
        if let Err(failure) = &answered {
            self.failed = Some(failure.clone());
        }
        answered
    }

    fn take_answer(&mut self, wait: Duration) -> Result<bool, Failure> {
        let Some(answer) = self.writer.poll(wait) else { return Ok(false) };
        self.comparing = false;
        let Applied { rows, superseded, stale, ties, duplicates, rejects, letters, fenced, batch, .. } = answer?;
        self.status.rows.add(rows);
        self.status.superseded.add(superseded);
        self.status.stale.add(stale);
        self.status.ties.add(ties);
        self.status.duplicates.add(duplicates);
        self.spare.push(batch);
        if let Some(beside) = &mut self.beside {
            beside.answered(fenced);
        }
        let Some(kept) = self.flying.pop_front().flatten() else { return Ok(true) };
        let Some(beside) = &mut self.beside else {
            for (index, reject) in rejects {
                self.refused_by_database(&kept.input(index), &reject)?;
            }
            return Ok(true);
        };
        beside.fenced |= fenced;
        beside.relay(letters, &mut self.letters, self.dead_letters.0);
        for (_, reject) in rejects {
            match self.on_error {
                OnError::Skip => self.status.skipped.add(1),
                OnError::Reject | OnError::Stop => self.status.reject(&reject.node, reject.reason),
            }
        }
        Ok(true)
    }

    /// The writer's breaker has counted these already.
    fn refused_by_database(&mut self, input: &Input<'_>, reject: &Reject) -> Result<(), Failure> {
        match self.on_error {
            OnError::Reject => {
                self.letter(input, reject);
                Ok(())
            }
            OnError::Skip | OnError::Stop => self.refuse(input, reject),
        }
    }
}

impl Task for PostgresTask {
    fn process(&mut self, input: &Input<'_>, _chunk: &mut Chunk) -> Result<(), Failure> {
        let pushed = match self.mapper.map(input) {
            Ok(Mapped::Row(row)) => self.batch.push(&row).map(Some),
            Ok(Mapped::Ignored) => {
                self.status.dropped.add(1);
                Ok(None)
            }
            Err(reject) => Err(reject),
        };
        match pushed {
            Ok(Some(_)) => {
                self.kept.push(input);
                if let Some(beside) = &mut self.beside {
                    beside.row();
                }
            }
            Ok(None) => {}
            Err(reject) => self.refuse(input, &reject)?,
        }
        Ok(())
    }

    fn reject(
        &mut self,
        input: &Input<'_>,
        reason: &'static str,
        message: String,
        _chunk: &mut Chunk,
    ) -> Result<(), Failure> {
        self.letter(input, &Reject { node: self.sink.clone(), reason, message });
        Ok(())
    }

    fn has_room(&mut self) -> Result<bool, Failure> {
        self.check()?;
        while self.writer.in_flight() > 0 && self.answer(Duration::ZERO)? {}
        self.submit_full();
        if self.writer.in_flight() == 0 && self.batch.is_empty() && self.beside.as_ref().is_some_and(Beside::compares) {
            self.comparing = !self.is_open();
            self.submit();
        }
        Ok(!self.batch_is_full())
    }

    fn is_full(&self) -> bool {
        !self.eager && self.batch_is_full()
    }

    fn streams(&self) -> bool {
        // A transaction that waits for the database would time out.
        false
    }

    fn settle(&mut self, chunk: &mut Chunk, wait: Duration) -> Result<bool, Failure> {
        self.check()?;
        let deadline = Instant::now() + wait;
        if self.is_open() && self.writer.in_flight() < IN_FLIGHT {
            self.submit();
        }
        while self.writer.in_flight() > usize::from(self.comparing) {
            if !self.answer(deadline.saturating_duration_since(Instant::now()))? {
                return Ok(false);
            }
            if self.is_open() && !self.is_fenced() {
                self.submit();
            }
        }
        if self.is_fenced() {
            return Ok(false);
        }
        if let Some(beside) = &mut self.beside {
            beside.relay_former(&mut self.letters, self.dead_letters.0);
        }
        crash::at(Point::BeforePositions);
        debug_assert!(chunk.is_empty(), "letters are kept here until the batch is settled");
        std::mem::swap(chunk, &mut self.letters);
        Ok(true)
    }

    fn assigned(&mut self, partition: &TopicPartition) {
        if let Some(beside) = &mut self.beside {
            beside.assigned(partition);
        }
    }

    fn unassigned(&mut self, partitions: &[TopicPartition]) {
        if let Some(beside) = &mut self.beside {
            beside.unassigned(partitions);
        }
    }

    fn reading(&mut self, partition: &TopicPartition, offset: Offset) {
        if let Some(beside) = &mut self.beside {
            beside.reading(partition, offset);
        }
    }

    fn processed(&mut self) {
        if let Some(beside) = &mut self.beside {
            beside.processed();
        }
        self.submit_full();
    }

    fn step_over(&mut self, partition: &TopicPartition, to: Position) {
        if let Some(beside) = &mut self.beside {
            beside.advance(partition, to);
        }
    }

    fn is_fenced(&self) -> bool {
        self.beside.as_ref().is_some_and(|beside| beside.fenced)
    }

    fn sealed(&mut self, batch: BatchId) {
        if let Some(beside) = &mut self.beside {
            beside.sealed(batch);
        }
    }

    fn committed(&mut self, batch: BatchId) {
        if self.status.has_moved_on() {
            self.writer.status().positions_committed();
        }
        if self.beside.as_mut().is_some_and(|beside| beside.committed(batch)) {
            self.submit();
        }
    }

    fn close(&mut self, wait: Duration) {
        let deadline = Instant::now() + wait;
        while self.writer.in_flight() > 0 && Instant::now() < deadline {
            if self.answer(deadline.saturating_duration_since(Instant::now())).is_err() {
                return;
            }
        }
    }

    fn held(&self) -> u64 {
        self.kept.len() as u64 + self.flying.iter().flatten().map(|kept| kept.len() as u64).sum::<u64>()
    }

    fn abandon(&mut self) {
        self.batch.clear();
        self.kept.clear();
        self.letters.clear();
        if let Some(beside) = &mut self.beside {
            beside.abandon();
        }
        // What is being written is committed or not; the records come again and meet the guard.
        self.flying.iter_mut().for_each(|kept| *kept = None);
    }
}

/// The end that `on_error = "stop"` asks for.
pub fn stopped(input: &Input<'_>, reject: &Reject) -> Failure {
    Failure::stopped(format!(
        "{}-{} offset {}: {} ({}): {}; on_error = \"stop\"",
        input.topic, input.partition, input.offset, reject.node, reject.reason, reject.message
    ))
}

impl PostgresTask {
    fn submit_full(&mut self) {
        if self.eager && self.batch_is_full() && self.writer.in_flight() < IN_FLIGHT {
            self.submit();
        }
    }

    fn batch_is_full(&self) -> bool {
        self.batch.len() >= self.batch_rows || self.batch.bytes() >= self.batch_bytes
    }
}
