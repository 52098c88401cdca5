//! Downloads through `mvn`, which knows the user's mirrors and keeps its own cache of artifacts.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{place, process};
use crate::error::Failure;

/// Maven artifacts that are fetched together.
#[derive(Debug)]
pub(super) struct Bundle {
    /// Name of its directory in the cache.
    pub(super) name: String,
    /// For the user: "Apache Kafka 4.2.0".
    pub(super) title: &'static str,
    /// group, artifact, version
    pub(super) artifacts: Vec<(&'static str, &'static str, &'static str)>,
    /// Unpack the jars instead of copying them.
    pub(super) unpack: bool,
}

impl Bundle {
    /// The bundle's directory, when it was fetched before.
    pub(super) fn cached(&self) -> Option<PathBuf> {
        place::cache().ok().map(|cache| cache.join(&self.name)).filter(|directory| directory.is_dir())
    }

    /// The bundle's directory, fetched if need be. Processes that want the same one wait for each other.
    pub(super) fn fetch(&self, log: &Path, progress: &dyn Fn(&str)) -> Result<PathBuf, Failure> {
        let cache = place::cache()?;
        let directory = cache.join(&self.name);
        let in_cache = |error| Failure::refused(format!("the cache {} cannot be used: {error}", cache.display()));
        let lock = File::create(cache.join(format!("{}.lock", self.name))).map_err(in_cache)?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            progress(&format!("waiting for another process that fetches {} …", self.title));
            lock.lock().map_err(in_cache)?;
        }
        if directory.is_dir() {
            return Ok(directory);
        }
        progress(&format!("fetching {} with mvn into {} (once) …", self.title, cache.display()));
        let part = cache.join(format!("{}.part", self.name));
        let _ = fs::remove_dir_all(&part);
        fs::create_dir(&part).map_err(in_cache)?;
        fs::write(part.join("pom.xml"), self.pom()).map_err(in_cache)?;
        let goal = if self.unpack { "dependency:unpack-dependencies" } else { "dependency:copy-dependencies" };
        let mut command = Command::new("mvn");
        command.args(["--batch-mode", "--quiet", "-Dstyle.color=never", goal, "-DoutputDirectory=files"]);
        command.current_dir(&part);
        process::run(command, &format!("fetching {} with mvn", self.title), log)?;
        fs::rename(&part, &directory).map_err(in_cache)?;
        Ok(directory)
    }

    fn pom(&self) -> String {
        let dependencies: String = self
            .artifacts
            .iter()
            .map(|(group, artifact, version)| {
                format!(
                    "    <dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>\
                     <version>{version}</version></dependency>\n"
                )
            })
            .collect();
        format!(
            "<project xmlns=\"http://maven.apache.org/POM/4.0.0\">\n  <modelVersion>4.0.0</modelVersion>\n  \
             <groupId>semel</groupId>\n  <artifactId>cluster</artifactId>\n  <version>1</version>\n  \
             <packaging>pom</packaging>\n  <dependencies>\n{dependencies}  </dependencies>\n</project>\n"
        )
    }
}

/// `mvn` is on the PATH.
pub(super) fn is_installed() -> bool {
    on_path("mvn").is_some()
}

/// The first file of this name on the PATH.
pub(super) fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|d| d.join(name)).find(|f| f.is_file())
}
