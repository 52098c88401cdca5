//! Where a cluster keeps its things: a private runtime directory (lock, socket, logs) and a data directory that is
//! thrown away with it.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::unistd::geteuid;

use super::wire;
use crate::error::Failure;

/// Longest directory under which a unix socket still fits into the 104 bytes that the strictest kernels allow.
const LONGEST_DIRECTORY: usize = 70;

/// The runtime directory of one cluster. Whoever holds its lock file is its supervisor; nothing else tells liveness,
/// so that files left by a crash or a reboot mean nothing.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) directory: PathBuf,
}

impl Place {
    /// The cluster that all processes of this user share.
    pub(super) fn shared(home: &Path) -> Place {
        Place { directory: home.join(format!("shared-{}", wire::VERSION)) }
    }

    /// A place of its own for one process.
    pub(super) fn private(home: &Path) -> Place {
        Place { directory: home.join(format!("private-{}", random_name())) }
    }

    pub(super) fn lock(&self) -> PathBuf {
        self.directory.join("lock")
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    pub(super) fn log(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.log"))
    }

    /// A supervisor is there (also while it starts or stops).
    pub(super) fn is_alive(&self) -> bool {
        File::open(self.lock()).is_ok_and(|lock| matches!(lock.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Makes the data directory and writes its name down, so that [`sweep`] finds it after a crash.
    pub(super) fn make_data(&self) -> io::Result<PathBuf> {
        let data = data_base().join(format!("semel-{}-{}", geteuid(), random_name()));
        fs::write(self.directory.join("data"), data.as_os_str().as_encoded_bytes())?;
        // As root Postgres runs as another user, who must be able to pass through.
        DirBuilder::new().mode(if geteuid().is_root() { 0o711 } else { 0o700 }).create(&data)?;
        Ok(data)
    }

    /// Removes the data directory that `make_data` wrote down, and nothing that this user did not make.
    pub(super) fn remove_data(&self) {
        let Ok(text) = fs::read_to_string(self.directory.join("data")) else { return };
        let data = PathBuf::from(text);
        let ours = data.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&format!("semel-{}-", geteuid())));
        if ours && fs::symlink_metadata(&data).is_ok_and(|m| m.is_dir() && m.uid() == geteuid().as_raw()) {
            let _ = fs::remove_dir_all(&data);
        }
    }

    pub(super) fn remove(&self) {
        self.remove_data();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Removes what clusters left behind whose supervisor was killed. Young directories are left alone: their supervisor
/// may be about to take the lock.
pub(super) fn sweep(home: &Path, except: &Path) {
    let Ok(entries) = fs::read_dir(home) else { return };
    for entry in entries.flatten() {
        let place = Place { directory: entry.path() };
        let Ok(metadata) = fs::symlink_metadata(&place.directory) else { continue };
        let age = metadata.modified().ok().and_then(|m| SystemTime::now().duration_since(m).ok()).unwrap_or_default();
        if place.directory == except || !metadata.is_dir() || age < Duration::from_secs(60) {
            continue;
        }
        let Ok(lock) = File::options().create(true).truncate(false).write(true).open(place.lock()) else { continue };
        if lock.try_lock().is_ok() {
            super::containers::remove_left_behind(&place.directory);
            place.remove();
        }
    }
}

/// The directory of this user's clusters: `$XDG_RUNTIME_DIR/semel-<uid>`, else `<temp>/semel-<uid>`; mode 0700.
pub(super) fn home() -> Result<PathBuf, Failure> {
    let uid = geteuid();
    let usable = |d: &PathBuf| d.as_os_str().len() < LONGEST_DIRECTORY - 30;
    let runtime = directory_variable("XDG_RUNTIME_DIR")
        .filter(|d| usable(d) && nix::unistd::access(d, nix::unistd::AccessFlags::W_OK).is_ok());
    let base = runtime.unwrap_or_else(|| Some(std::env::temp_dir()).filter(usable).unwrap_or_else(|| "/tmp".into()));
    let home = base.join(format!("semel-{uid}"));
    make_private(&home)?;
    Ok(home)
}

/// Makes a directory of mode 0700, or checks that the one which is there is this user's own: a directory with a
/// guessable name in /tmp could have been laid there by somebody else.
pub(super) fn make_private(directory: &Path) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::refused(format!("cannot make {}: {error}", directory.display()));
    if directory.as_os_str().len() > LONGEST_DIRECTORY {
        let message = "is too long a path for a unix socket: give a shorter one";
        return Err(Failure::refused(format!("{} {message}", directory.display())));
    }
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let metadata = fs::symlink_metadata(directory).map_err(failed)?;
    if !metadata.is_dir() || metadata.uid() != geteuid().as_raw() {
        let message = "is not a directory of this user: remove it, or set XDG_RUNTIME_DIR";
        return Err(Failure::refused(format!("{} {message}", directory.display())));
    }
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700)).map_err(failed)
}

/// Where downloads are kept: `$XDG_CACHE_HOME/semel`, else `~/.cache/semel`.
pub(super) fn cache() -> Result<PathBuf, Failure> {
    let base = directory_variable("XDG_CACHE_HOME")
        .or_else(|| directory_variable("HOME").map(|home| home.join(".cache")))
        .ok_or_else(|| Failure::refused("neither XDG_CACHE_HOME nor HOME is set: there is no place for downloads"))?;
    let cache = base.join("semel");
    fs::create_dir_all(&cache)
        .map_err(|error| Failure::refused(format!("cannot make the cache {}: {error}", cache.display())))?;
    Ok(cache)
}

/// The last lines of a log, for a message about a failed start.
pub(super) fn tail(log: &Path, lines: usize) -> String {
    let text = fs::read(log).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
    let all: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    let last: Vec<String> = all[all.len().saturating_sub(lines)..].iter().map(|l| format!("  | {l}")).collect();
    format!("the end of {}:\n{}", log.display(), last.join("\n"))
}

/// A free TCP port of 127.0.0.1, below the ports that kernels give to outgoing connections: a client that reconnects
/// to a stopped server would else sooner or later be given the server's own port and keep it from coming back.
pub(super) fn free_port() -> io::Result<u16> {
    for _ in 0..200 {
        let port = 15_000 + (random() % 15_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, "no free port between 15000 and 30000"))
}

pub(super) fn random_name() -> String {
    format!("{:08x}", random())
}

/// 32 random bits: the part of a version 7 UUID that holds neither time nor counter.
pub(super) fn random() -> u32 {
    uuid::Uuid::now_v7().as_u64_pair().1 as u32
}

/// Postgres' user must reach its data, and root's own temporary directory may be closed to it.
fn data_base() -> PathBuf {
    let temp = std::env::temp_dir();
    if geteuid().is_root() || temp.as_os_str().len() > LONGEST_DIRECTORY - 30 { "/tmp".into() } else { temp }
}

/// A directory from the environment; empty and relative ones count as unset.
fn directory_variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).filter(|d| d.is_absolute())
}
