//! Who a worker is across restarts: a random instance id, made once and kept in the state directory, and the highest
//! worker count that ever ran under it.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use crate::error::{Exit, Failure};

/// An instance of a stage. Its file stays locked while this lives.
#[derive(Debug)]
pub struct Identity {
    /// Part of transactional ids and `group.instance.id`.
    pub instance: String,
    /// The largest worker count that ran as this instance, the present one included.
    pub workers_ever: u32,
    /// The folder of the slot.
    pub folder: PathBuf,
    _lock: File,
}

/// Slots looked at before giving up: more processes than this of one job on one host are a mistake.
const SLOTS: usize = 1000;

impl Identity {
    /// Takes the lowest free slot under `<state_dir>/<topology>/<stage>/`. A given `instance` has a slot of that name
    /// and is refused (exit 6) while another process holds it.
    pub fn take(
        state_dir: &Path,
        topology: &str,
        stage: &str,
        given: Option<&str>,
        workers: u32,
    ) -> Result<Identity, Failure> {
        let folder = state_dir.join(topology).join(stage);
        if let Some(given) = given {
            let slot = folder.join(format!("as-{given}"));
            return match Identity::try_slot(&slot, Some(given), workers)? {
                Some(identity) => Ok(identity),
                None => Err(Failure::new(
                    Exit::Twin,
                    format!(
                        "another process on this host runs as instance {given:?} of {topology}; stop it or choose another instance"
                    ),
                )),
            };
        }
        for slot in 0..SLOTS {
            if let Some(identity) = Identity::try_slot(&folder.join(slot.to_string()), None, workers)? {
                return Ok(identity);
            }
        }
        Err(Failure::refused(format!("all {SLOTS} slots under {} are in use", folder.display())))
    }

    fn try_slot(slot: &Path, given: Option<&str>, workers: u32) -> Result<Option<Identity>, Failure> {
        let failed = |error: io::Error| {
            Failure::refused(format!(
                "cannot keep the instance id in {}: {error}; set state_dir to a folder of yours",
                slot.display()
            ))
        };
        fs::create_dir_all(slot).map_err(failed)?;
        let lock = File::options().create(true).truncate(false).write(true).open(slot.join("lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let instance = match given {
            Some(given) => given.to_owned(),
            None => {
                kept(&slot.join("instance"), || Uuid::new_v4().simple().to_string()[..12].to_owned()).map_err(failed)?
            }
        };
        let count = slot.join("workers");
        let former = fs::read_to_string(&count).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        let workers_ever = workers.max(former);
        if workers_ever != former {
            replace(&count, &workers_ever.to_string()).map_err(failed)?;
        }
        Ok(Some(Identity { instance, workers_ever, folder: slot.to_owned(), _lock: lock }))
    }
}

/// The text of a file, made the first time.
fn kept(path: &Path, make: impl FnOnce() -> String) -> io::Result<String> {
    match fs::read_to_string(path) {
        Ok(text) if !text.trim().is_empty() => return Ok(text.trim().to_owned()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let text = make();
    replace(path, &text)?;
    Ok(text)
}

/// Writes a file so that a crash leaves the old one or the new one.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(new, path)
}

/// `$XDG_STATE_HOME/semel`, else `~/.local/state/semel`.
pub fn default_state_dir() -> Result<PathBuf, Failure> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("XDG_STATE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".local/state")))
        .map(|base| base.join("semel"))
        .ok_or_else(|| Failure::refused("neither XDG_STATE_HOME nor HOME is set: set state_dir in the file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_keeps_its_id_and_is_never_shared() {
        let dir = tempfile::tempdir().unwrap();
        let take = || Identity::take(dir.path(), "orders", "orders", None, 2).unwrap();
        let first = take();
        let second = take();
        assert_ne!(first.instance, second.instance);
        let id = first.instance.clone();
        drop(first);
        assert_eq!(take().instance, id);
    }

    #[test]
    fn the_largest_worker_count_is_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let take = |workers| Identity::take(dir.path(), "orders", "orders", None, workers).unwrap().workers_ever;
        assert_eq!([take(4), take(1), take(5)], [4, 4, 5]);
    }

    #[test]
    fn a_given_instance_is_refused_while_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        let take = || Identity::take(dir.path(), "orders", "orders", Some("blue"), 1);
        let held = take().unwrap();
        assert_eq!(held.instance, "blue");
        assert_eq!(take().unwrap_err().exit, Exit::Twin);
        drop(held);
        take().unwrap();
    }
}
