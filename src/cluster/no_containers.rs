//! Stands in for `containers` in a build without that feature: no engine ever answers.

use std::path::Path;

use super::keeper::{Backend, Setup};

pub(super) fn kafka(_setup: &Setup, _progress: &dyn Fn(&str)) -> Option<Box<dyn Backend>> {
    None
}

pub(super) fn postgres(_setup: &Setup, _progress: &dyn Fn(&str)) -> Option<Box<dyn Backend>> {
    None
}

pub(super) fn remove_left_behind(_directory: &Path) {}
