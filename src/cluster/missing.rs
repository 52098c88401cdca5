//! What a machine lacks to bring a server up, and how to get it.

use crate::error::Failure;

/// Collected, so that one message names everything.
#[derive(Debug, Default)]
pub(super) struct Missing {
    things: Vec<&'static str>,
    /// Names in apt, dnf and brew.
    packages: Vec<[&'static str; 3]>,
}

impl Missing {
    /// `packages`: its names in apt, dnf and brew.
    pub(super) fn needs(&mut self, thing: &'static str, packages: [&'static str; 3]) {
        self.things.push(thing);
        self.packages.push(packages);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.things.is_empty()
    }

    /// `variable` names the environment variable that gives a running server instead.
    pub(super) fn failure(&self, server: &str, variable: &str) -> Failure {
        let list = |n: usize| self.packages.iter().map(|p| p[n]).collect::<Vec<_>>().join(" ");
        Failure::refused(format!(
            "{server} cannot be brought up on this machine; missing: {}.\n  \
             Debian, Ubuntu:  apt-get install {}\n  \
             Fedora:          dnf install {}\n  \
             macOS:           brew install {}\n\
             Or start a container engine (Docker, Podman), or give a running one's address in {variable}.",
            self.things.join("; "),
            list(0),
            list(1),
            list(2),
        ))
    }
}
