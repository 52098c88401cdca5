//! State on disk: one database for a process and stage, a keyspace for each partition of a store.
//!
//! Beside the state of a partition stands its checkpoint: which changelog it is of, and a bound below which nothing has to be
//! read again. Changes and checkpoint go to disk together or not at all, in the order of the commits, so that what a crash
//! leaves is the state as it was at some commit; whole values from the bound on make it the present one.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::fs;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};
use uuid::Uuid;

use crate::crash::{self, Point};
use crate::error::Failure;
use crate::operator::{Stamp, Store, Writes};
use crate::record::{Position, TopicPartition};

/// The format byte of checkpoints.
const FORMAT: u8 = 2;
/// Partitions that were with another process for so long are restored in full when they come back.
pub const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
const CHECKPOINTS: &str = "checkpoints";
/// Blocks of files that are kept in memory, for the whole database.
const CACHE: u64 = 16 << 20;
/// Changes of a partition that are kept in memory until they are sorted into files.
const MEMTABLE: u64 = 4 << 20;
const JOURNAL: u64 = 64 << 20;

/// The database of a process and stage.
#[derive(Clone)]
pub struct Disk {
    folder: PathBuf,
    database: Database,
    checkpoints: Keyspace,
    /// Names of parts that are in use: whoever still writes to one is waited for.
    taken: Arc<Mutex<BTreeSet<String>>>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk").finish_non_exhaustive()
    }
}

impl Disk {
    /// Opens the database in a folder, or makes one. What cannot be read is thrown away, and partitions that nobody has asked
    /// for in a week: the changelogs hold all of it. Blocks.
    ///
    /// # Errors
    /// Refused: the folder cannot be written, or another process has it.
    pub fn open(folder: &Path) -> Result<Disk, Failure> {
        Disk::open_at(folder, now())
    }

    fn open_at(folder: &Path, now: Duration) -> Result<Disk, Failure> {
        Disk::try_open(folder, now).or_else(|error| {
            if matches!(error, fjall::Error::Io(_) | fjall::Error::Locked) {
                return Err(error);
            }
            tracing::warn!(folder = %folder.display(), %error, "state on disk cannot be read; it is restored in full");
            fs::remove_dir_all(folder).map_err(fjall::Error::Io)?;
            Disk::try_open(folder, now)
        })
        .map_err(|error| {
            let error = cause(&error);
            Failure::refused(format!(
                "cannot keep state in {}: {error}; set state_dir to a folder of yours, or stores = \"memory\"",
                folder.display()
            ))
        })
    }

    fn try_open(folder: &Path, now: Duration) -> fjall::Result<Disk> {
        fs::create_dir_all(folder)?;
        let database =
            Database::builder(folder).cache_size(CACHE).max_journaling_size(JOURNAL).worker_threads(1).open()?;
        let checkpoints = database.keyspace(CHECKPOINTS, KeyspaceCreateOptions::default)?;
        let disk = Disk { folder: folder.to_owned(), database, checkpoints, taken: Arc::default() };
        for name in disk.database.list_keyspace_names() {
            let last = disk.checkpoints.get(&*name)?.and_then(|bytes| Checkpoint::decode(&bytes)).map(|at| at.time);
            if &*name != CHECKPOINTS && last.is_none_or(|time| time + KEPT < now) {
                disk.delete(&name, disk.database.keyspace(&name, options)?)?;
            }
        }
        Ok(disk)
    }

    /// Deletes the state of a partition.
    fn delete(&self, name: &str, keyspace: Keyspace) -> fjall::Result<()> {
        // The checkpoint goes first, and for good: one that came back after a crash would vouch for what is not there.
        self.checkpoints.remove(name)?;
        self.database.persist(PersistMode::SyncAll)?;
        self.database.delete_keyspace(keyspace)
    }

    /// The state of a partition, as far as it is there; else it is empty and has to be restored in full. `id` is the topic's,
    /// `log` what it holds. `None`: somebody has it still, such as a restore that is on its way to its end.
    ///
    /// # Errors
    /// The disk does.
    pub fn part(
        &self,
        changelog: &TopicPartition,
        id: Uuid,
        stamp: Stamp,
        log: (Position, Position),
    ) -> Result<Option<DiskPart>, Failure> {
        let name = changelog.to_string();
        if !self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone()) {
            return Ok(None);
        }
        let guard = Guard { name, taken: Arc::clone(&self.taken) };
        self.try_part(changelog, id, stamp, log, guard).map(Some).map_err(|error| self.failed(changelog, &error))
    }

    fn try_part(
        &self,
        changelog: &TopicPartition,
        id: Uuid,
        stamp: Stamp,
        (low, high): (Position, Position),
        guard: Guard,
    ) -> fjall::Result<DiskPart> {
        let name = guard.name.clone();
        let mut keyspace = self.database.keyspace(&name, options)?;
        let checkpoint = self.checkpoints.get(&name)?.and_then(|bytes| Checkpoint::decode(&bytes));
        // What was deleted meanwhile is told by tombstones that the changelog keeps for twice as long. A clock that went back
        // tells no age.
        let (now, skew) = (now(), Duration::from_secs(60));
        let young = |at: &Checkpoint| at.time <= now + skew && now < at.time + KEPT;
        let fits =
            |at: &Checkpoint| at.id == id && at.stamp == stamp && at.bound >= low && at.bound <= high && young(at);
        let bound = checkpoint.filter(fits).map(|at| at.bound);
        if bound.is_none() {
            self.delete(&name, keyspace)?;
            keyspace = self.database.keyspace(&name, options)?;
        }
        Ok(DiskPart { disk: self.clone(), keyspace, changelog: changelog.clone(), id, stamp, bound, _guard: guard })
    }

    fn failed(&self, changelog: &TopicPartition, error: &fjall::Error) -> Failure {
        let (folder, error) = (self.folder.display(), cause(error));
        Failure::stopped(format!("the state of {changelog} cannot be read or written in {folder}: {error}"))
    }
}

fn options() -> KeyspaceCreateOptions {
    KeyspaceCreateOptions::default().max_memtable_size(MEMTABLE)
}

/// What the system says of an error, where it says something.
fn cause(error: &fjall::Error) -> String {
    let mut cause: &dyn Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    match error {
        fjall::Error::Poisoned => "an earlier write has failed".to_owned(),
        _ => cause.to_string(),
    }
}

/// Since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// What is known of a partition's state on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Checkpoint {
    id: Uuid,
    stamp: Stamp,
    /// Every committed record of the changelog below is in the state.
    bound: Position,
    /// When it was written, in seconds since 1970.
    time: Duration,
}

impl Checkpoint {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![FORMAT];
        bytes.extend_from_slice(self.id.as_bytes());
        bytes.extend_from_slice(&self.stamp);
        bytes.extend_from_slice(&self.bound.0.to_be_bytes());
        bytes.extend_from_slice(&self.time.as_secs().to_be_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Checkpoint> {
        let (id, rest) = bytes.strip_prefix(&[FORMAT])?.split_first_chunk()?;
        let (stamp, rest) = rest.split_first_chunk()?;
        let (bound, rest) = rest.split_first_chunk()?;
        let bound = Position(i64::from_be_bytes(*bound));
        let time = Duration::from_secs(u64::from_be_bytes(rest.try_into().ok()?));
        Some(Checkpoint { id: Uuid::from_bytes(*id), stamp: *stamp, bound, time })
    }
}

/// The state of one partition of a store.
pub struct DiskPart {
    disk: Disk,
    keyspace: Keyspace,
    changelog: TopicPartition,
    id: Uuid,
    stamp: Stamp,
    /// From where the changelog has to be read; none: from its beginning.
    pub bound: Option<Position>,
    _guard: Guard,
}

/// Frees its name when it goes.
struct Guard {
    name: String,
    taken: Arc<Mutex<BTreeSet<String>>>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

impl fmt::Debug for DiskPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskPart")
            .field("changelog", &self.changelog)
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}

impl DiskPart {
    /// Takes in records of the changelog; null removes a key.
    pub fn restore(&self, records: &mut Vec<(Vec<u8>, Option<Vec<u8>>)>) -> Result<(), Failure> {
        // Should a crash take them, they are read again from the bound: nothing waits for the disk.
        let mut batch = self.disk.database.batch().durability(None);
        for (key, value) in records.drain(..) {
            match value {
                Some(value) => batch.insert(&self.keyspace, key, value),
                None => batch.remove(&self.keyspace, key),
            }
        }
        batch.commit().map_err(|error| self.disk.failed(&self.changelog, &error))
    }

    /// Everything up to `end` is there.
    pub fn complete(&mut self, end: Position) -> Result<(), Failure> {
        self.write(Writes::new(), Some(end)).map_err(|error| self.disk.failed(&self.changelog, &error))
    }

    fn write(&mut self, writes: Writes, bound: Option<Position>) -> fjall::Result<()> {
        let mut batch = self.disk.database.batch();
        for (key, value) in writes {
            match value {
                Some(value) => batch.insert(&self.keyspace, key, value),
                None => batch.remove(&self.keyspace, key),
            }
        }
        if let Some(bound) = bound {
            let checkpoint = Checkpoint { id: self.id, stamp: self.stamp, bound, time: now() };
            batch.insert(&self.disk.checkpoints, self.changelog.to_string(), checkpoint.encode());
            self.bound = Some(bound);
            crash::at(Point::BeforeCheckpoint);
        }
        batch.commit()
    }
}

impl Store for DiskPart {
    fn read(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        let value = self.keyspace.get(key).unwrap_or_else(|error| self.broken(&error));
        value.inspect(|value| out.extend_from_slice(value)).is_some()
    }

    fn keys(&self, from: &[u8], below: &[u8], most: usize) -> Vec<Vec<u8>> {
        let keys = self.keyspace.range(from..below).take(most).map(|entry| entry.key().map(|key| key.to_vec()));
        keys.collect::<fjall::Result<_>>().unwrap_or_else(|error| self.broken(&error))
    }

    fn apply(&mut self, writes: Writes, bound: Option<Position>) {
        if let Err(error) = self.write(writes, bound) {
            self.broken(&error)
        }
    }
}

impl DiskPart {
    /// A disk that fails leaves nothing to go on with: the worker's thread ends here, before anything else is committed, and
    /// whoever waits for it finds this failure.
    fn broken(&self, error: &fjall::Error) -> ! {
        resume_unwind(Box::new(self.disk.failed(&self.changelog, error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = [1, 2, 3, 4, 5];
    const LOG: (Position, Position) = (Position(0), Position(100));

    fn part(disk: &Disk) -> DiskPart {
        disk.part(&TopicPartition::new("t.n.changelog", 2), Uuid::from_u128(7), STAMP, LOG)
            .unwrap()
            .expect("it is free")
    }

    fn get(part: &DiskPart, key: &[u8]) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        part.read(key, &mut out).then_some(out)
    }

    fn writes(pairs: &[(&[u8], &[u8])]) -> Writes {
        pairs.iter().map(|(key, value)| (key.to_vec(), Some(value.to_vec()))).collect()
    }

    #[test]
    fn state_with_a_checkpoint_is_there_after_the_process_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::open(folder.path()).unwrap();
        let mut state = part(&disk);
        assert_eq!(state.bound, None);
        state
            .restore(&mut vec![
                (b"a".to_vec(), Some(b"1".to_vec())),
                (b"b".to_vec(), Some(b"1".to_vec())),
                (b"b".to_vec(), None),
            ])
            .unwrap();
        state.apply(Writes::new(), Some(Position(40)));
        state.apply(writes(&[(b"a", b"2"), (b"c", b"")]), None);
        assert!(Disk::open(folder.path()).is_err(), "two processes do not write one database");
        drop((state, disk));
        let disk = Disk::open(folder.path()).unwrap();
        let state = part(&disk);
        assert_eq!(state.bound, Some(Position(40)));
        assert_eq!(
            [get(&state, b"a"), get(&state, b"b"), get(&state, b"c")],
            [Some(b"2".to_vec()), None, Some(Vec::new())]
        );
    }

    #[test]
    fn what_no_checkpoint_vouches_for_is_thrown_away() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::open(folder.path()).unwrap();
        let changelog = TopicPartition::new("t.n.changelog", 2);
        let id = Uuid::from_u128(7);
        let filled = || {
            let mut state = part(&disk);
            state.apply(writes(&[(b"a", b"1")]), Some(Position(40)));
        };
        for (what, id, stamp, log) in [
            ("a topic made anew", Uuid::from_u128(8), STAMP, LOG),
            ("other fields", id, [1, 2, 3, 4, 6], LOG),
            ("a bound before the log", id, STAMP, (Position(41), Position(100))),
            ("a bound behind the log", id, STAMP, (Position(0), Position(39))),
        ] {
            filled();
            assert_eq!(part(&disk).bound, Some(Position(40)));
            let state = disk.part(&changelog, id, stamp, log).unwrap().unwrap();
            assert_eq!((state.bound, get(&state, b"a")), (None, None), "{what}");
        }
        // Half a restore has no checkpoint, and has its part alone.
        let state = part(&disk);
        state.restore(&mut vec![(b"a".to_vec(), Some(b"1".to_vec()))]).unwrap();
        assert!(disk.part(&changelog, id, STAMP, LOG).unwrap().is_none());
        drop(state);
        assert_eq!(get(&part(&disk), b"a"), None);
    }

    #[test]
    fn partitions_that_nobody_has_asked_for_in_a_week_are_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let after = |days: u64| {
            let disk = Disk::open_at(folder.path(), now() + Duration::from_secs(days * 24 * 3600)).unwrap();
            let names = disk.database.list_keyspace_names();
            let mut names: Vec<_> =
                names.iter().map(|name| name.to_string()).filter(|name| name != CHECKPOINTS).collect();
            names.sort();
            names
        };
        let disk = Disk::open(folder.path()).unwrap();
        part(&disk).apply(writes(&[(b"a", b"1")]), Some(Position(40)));
        // Half a restore, which no checkpoint vouches for.
        let half = TopicPartition::new("t.n.changelog", 3);
        let half = disk.part(&half, Uuid::from_u128(7), STAMP, LOG).unwrap().unwrap();
        half.restore(&mut vec![(b"a".to_vec(), Some(b"1".to_vec()))]).unwrap();
        drop((half, disk));
        assert_eq!(after(6), ["t.n.changelog-2"]);
        assert_eq!(part(&Disk::open(folder.path()).unwrap()).bound, Some(Position(40)));
        assert_eq!(after(8), [""; 0]);
        assert_eq!(part(&Disk::open(folder.path()).unwrap()).bound, None);
    }

    /// Another process may have deleted keys whose tombstones are gone by now.
    #[test]
    fn files_that_are_old_or_of_a_time_to_come_are_not_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::open(folder.path()).unwrap();
        let bound_of_a_checkpoint_at = |time: Duration| {
            part(&disk).apply(writes(&[(b"a", b"1")]), Some(Position(40)));
            let checkpoint = Checkpoint { id: Uuid::from_u128(7), stamp: STAMP, bound: Position(40), time };
            disk.checkpoints.insert("t.n.changelog-2", checkpoint.encode()).unwrap();
            part(&disk).bound
        };
        let day = Duration::from_secs(24 * 3600);
        assert_eq!(bound_of_a_checkpoint_at(now() - 6 * day), Some(Position(40)));
        assert_eq!(bound_of_a_checkpoint_at(now() - 8 * day), None);
        assert_eq!(bound_of_a_checkpoint_at(now() + day), None);
    }

    #[test]
    fn a_folder_that_is_none_is_named_with_what_the_system_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stores");
        fs::write(&path, b"a file").unwrap();
        let failure = Disk::open(&path).unwrap_err();
        assert_eq!(failure.exit, crate::error::Exit::Refused);
        let message = failure.message;
        assert!(message.contains(&path.display().to_string()) && message.contains("os error"), "{message}");
    }

    #[test]
    fn a_database_that_cannot_be_read_is_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::open(folder.path()).unwrap();
        part(&disk).apply(writes(&[(b"a", b"1")]), Some(Position(40)));
        drop(disk);
        fs::write(folder.path().join("version"), b"no version of it").unwrap();
        let disk = Disk::open(folder.path()).unwrap();
        assert_eq!(part(&disk).bound, None);
    }

    #[test]
    fn checkpoints_come_back_from_their_bytes() {
        let time = Duration::from_secs(1_700_000_000);
        let checkpoint = Checkpoint { id: Uuid::from_u128(7), stamp: STAMP, bound: Position(40), time };
        let bytes = checkpoint.encode();
        assert_eq!(Checkpoint::decode(&bytes), Some(checkpoint));
        assert_eq!(Checkpoint::decode(&bytes[1..]), None);
        assert_eq!(Checkpoint::decode(&[&[3], &bytes[1..]].concat()), None, "a later format");
    }
}
