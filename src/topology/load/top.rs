//! The settings at the top of the file.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use super::cx::{Cx, Table};
use super::nodes;
use super::read::{duration_text, one_of};
use crate::topology::finding::code;
use crate::topology::keys;
use crate::topology::spec::{Guarantee, Membership, OnError, Stores};

/// What the broker accepts by default (`transaction.max.timeout.ms`, `group.min.session.timeout.ms`,
/// `group.max.session.timeout.ms`).
const TRANSACTION_MAX: Duration = Duration::from_secs(15 * 60);
const SESSION_MIN: Duration = Duration::from_secs(6);
const SESSION_MAX: Duration = Duration::from_secs(30 * 60);

const MS: Duration = Duration::from_millis(1);

/// The settings of the top level, with their defaults.
pub struct Settings {
    pub guarantee: Guarantee,
    pub commit_interval: Duration,
    pub batch_records: Option<NonZeroU64>,
    pub workers: u32,
    pub memory: u64,
    pub shutdown_timeout: Duration,
    pub transaction_timeout: Duration,
    pub session_timeout: Duration,
    pub membership: Option<Membership>,
    pub instance: Option<String>,
    pub state_dir: Option<PathBuf>,
    pub stores: Stores,
    pub max_task_idle: Duration,
    pub on_error: OnError,
    pub audit: bool,
}

pub fn settings(cx: &mut Cx<'_>, top: &Table<'_>) -> Settings {
    let guarantee = cx.choice(top, "guarantee", &Guarantee::WORDS).unwrap_or(Guarantee::ExactlyOnce);
    let batch_records = cx.integer(top, "batch_records", 1..=i64::MAX);
    let settings = Settings {
        guarantee,
        commit_interval: cx.duration(top, "commit_interval", MS).unwrap_or(Duration::from_millis(100)),
        batch_records: batch_records.and_then(|records| NonZeroU64::new(records as u64)),
        workers: cx.integer(top, "workers", 1..=256).unwrap_or(1) as u32,
        memory: cx.size(top, "memory", 1 << 20).unwrap_or(12 << 20),
        shutdown_timeout: cx.duration(top, "shutdown_timeout", MS).unwrap_or(Duration::from_secs(30)),
        transaction_timeout: cx
            .duration(top, "transaction_timeout", Duration::from_secs(1))
            .unwrap_or(Duration::from_secs(10)),
        session_timeout: cx.duration(top, "session_timeout", Duration::from_secs(1)).unwrap_or(Duration::from_secs(15)),
        membership: cx.choice(top, "membership", &Membership::WORDS),
        instance: instance(cx, top),
        state_dir: cx.string(top, "state_dir").filter(|dir| !dir.unset).map(|dir| PathBuf::from(dir.value)),
        stores: cx.choice(top, "stores", &[("disk", Stores::Disk), ("memory", Stores::Memory)]).unwrap_or(Stores::Disk),
        max_task_idle: cx.duration(top, "max_task_idle", Duration::ZERO).unwrap_or(Duration::ZERO),
        on_error: nodes::on_error(cx, top).unwrap_or(OnError::Reject),
        audit: cx.boolean(top, "audit").unwrap_or(false),
    };
    check_timeouts(cx, top, &settings);
    settings
}

/// The guarantees that a drill compares.
pub fn drill(cx: &mut Cx<'_>, top: &Table<'_>) -> Vec<Guarantee> {
    let Some(item) = top.get("drill") else { return Vec::new() };
    let Some(table) = cx.table(item, top.key_span("drill"), &keys::DRILL, "`[drill]`") else { return Vec::new() };
    let names = cx.required_strings(&table, "guarantees", "such as guarantees = [\"at-least-once\", \"exactly-once\"]");
    let mut guarantees = Vec::new();
    for name in names {
        match Guarantee::WORDS.iter().find(|(word, _)| *word == name.value) {
            Some((_, guarantee)) => guarantees.push(*guarantee),
            None => {
                let list: Vec<_> = Guarantee::WORDS.iter().map(|(word, _)| format!("\"{word}\"")).collect();
                let message = format!("a guarantee is {}, not {}", one_of(&list), name.shown);
                cx.found.error(code::INVALID_VALUE, name.span, message);
            }
        }
    }
    guarantees
}

fn instance(cx: &mut Cx<'_>, top: &Table<'_>) -> Option<String> {
    let text = cx.string(top, "instance")?;
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if text.unset {
        return None;
    }
    if text.value.is_empty() || text.value.len() > 100 || !text.value.chars().all(good) {
        cx.found
            .error(code::INVALID_VALUE, text.span, format!("`instance` cannot be {}", text.shown))
            .help("1 to 100 letters, digits, `.`, `_` or `-`: transactional ids are made of it");
        return None;
    }
    Some(text.value)
}

fn check_timeouts(cx: &mut Cx<'_>, top: &Table<'_>, settings: &Settings) {
    let (transaction, session) = (settings.transaction_timeout, settings.session_timeout);
    let at = |names: [&str; 2]| {
        let name = names.into_iter().find(|name| top.get(name).is_some());
        name.and_then(|name| top.get(name)).map_or(0..0, |item| item.span())
    };
    if settings.commit_interval * 2 >= transaction {
        let message = format!(
            "`commit_interval` ({}) must be below half of `transaction_timeout` ({})",
            duration_text(settings.commit_interval),
            duration_text(transaction)
        );
        cx.found
            .error(code::COMMIT_INTERVAL, at(["commit_interval", "transaction_timeout"]), message)
            .help("a transaction that is open for that long would be timed out by the broker under load");
    }
    if transaction >= session {
        let message = format!(
            "`transaction_timeout` ({}) must be below `session_timeout` ({})",
            duration_text(transaction),
            duration_text(session)
        );
        cx.found
            .error(code::TRANSACTION_TIMEOUT, at(["transaction_timeout", "session_timeout"]), message)
            .help("else a hanging process keeps its transaction open after its partitions went to another");
    }
    if transaction > TRANSACTION_MAX {
        cx.found
            .warning(
                code::TRANSACTION_TIMEOUT,
                at(["transaction_timeout"; 2]),
                "`transaction_timeout` is above what brokers accept by default (15m)",
            )
            .help("raise transaction.max.timeout.ms on the brokers, or the job is refused at start");
    }
    if session < SESSION_MIN || session > SESSION_MAX {
        cx.found
            .warning(
                code::SESSION_TIMEOUT,
                at(["session_timeout"; 2]),
                "`session_timeout` is outside what brokers accept by default (6s to 30m)",
            )
            .help("change group.min.session.timeout.ms or group.max.session.timeout.ms on the brokers");
    }
}
