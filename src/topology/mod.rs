//! From a TOML file to a plan: `load` parses and checks (every finding of a file in one run), `plan` derives stages,
//! topics and the guarantee of each edge, `describe` prints it.

pub mod describe;
pub mod finding;
pub mod keys;
mod load;
pub mod meaning;
pub mod plan;
pub mod report;
pub mod spec;

pub use load::{DEAD_LETTERS, Loaded, REPLAY_WINDOW, UNMATCHED, duration_text, load, locate, units};
