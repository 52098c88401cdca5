//! What keeps a Postgres sink from having an effect twice: its version, its ledger, its progress.

use std::time::Duration;

use super::cx::Cx;
use super::nodes::Draft;
use super::read::duration_text;
use crate::topology::finding::{Severity, code};
use crate::topology::spec::{Guarantee, Ledger, Mode, NodeKind, Port, PostgresSink, Progress, Source};

/// How long dead letters stay and may be replayed.
pub const REPLAY_WINDOW: Duration = Duration::from_secs(14 * 24 * 3600);

pub fn check(
    cx: &mut Cx<'_>,
    guarantee: Guarantee,
    drafts: &[Draft],
    draft: &Draft,
    sink: &PostgresSink,
    inputs: &[Vec<Port>],
) {
    // At-most-once delivers nothing again.
    if sink.once_by().is_none() && guarantee != Guarantee::AtMostOnce {
        redelivered(cx, draft, sink);
    }
    if sink.progress == Progress::Postgres && guarantee == Guarantee::AtMostOnce {
        let message = format!("{} keeps positions beside its rows, which is no at-most-once", draft.what());
        cx.found.error(code::MODE_SETTING, draft.name_span.clone(), message).help(
            "at-most-once commits positions before rows are written: leave `progress` out, or take another `guarantee`",
        );
    }
    let Some(ledger) = &sink.dedupe else { return };
    let index = drafts.iter().position(|other| std::ptr::eq(other, draft)).unwrap_or(0);
    let sources = sources(drafts, inputs, index);
    for (name, source) in &sources {
        if source.event_id.is_none() {
            let message =
                format!("{} has a ledger, but events of source `{name}` have no id of their own", draft.what());
            cx.found.error(code::LEDGER_IDENTITY, draft.name_span.clone(), message).help(
                "a place in the log is no identity: what a producer sends twice has two. Name the member that \
                 identifies an event: event_id = \".id\"",
            );
        }
    }
    let timed = sources.iter().all(|(_, source)| source.event_time.is_some());
    let layout = match timed {
        true => "in a partition a day, by the time of their events",
        false => "in one flat table, since a source declares no `event_time`",
    };
    let message = format!("the ledger {} of {} keeps ids {layout}", ledger.table, draft.what());
    cx.found.add(Severity::Note, code::LEDGER_LAYOUT, draft.name_span.clone(), message);
    retention(cx, draft, ledger);
    shared(cx, drafts, draft, ledger);
}

fn redelivered(cx: &mut Cx<'_>, draft: &Draft, sink: &PostgresSink) {
    let help = "keep the positions beside the rows: progress = \"postgres\"; or keep a ledger, which also knows what a \
                producer sent twice: dedupe = { table = \"processed_events\", retention = \"21d\" }";
    let effect = match sink.mode {
        Mode::Add => {
            let message = format!("{} adds again what a crash delivers again", draft.what());
            cx.found.error(code::REDELIVERY, draft.name_span.clone(), message).help(help);
            return;
        }
        Mode::Update => "sets again what a crash delivers again, and lets an older record overwrite a newer one",
        Mode::Insert | Mode::Upsert => "inserts again what a crash delivers again",
    };
    let message = format!("{} {effect}: it is at-least-once", draft.what());
    cx.found.warning(code::REDELIVERY, draft.name_span.clone(), message).help(help);
}

/// The sources that a node's records come from, each once.
fn sources<'d>(drafts: &'d [Draft], inputs: &[Vec<Port>], of: usize) -> Vec<(&'d str, &'d Source)> {
    let (mut waiting, mut seen) = (vec![of], vec![false; drafts.len()]);
    let mut sources = Vec::new();
    while let Some(id) = waiting.pop() {
        if std::mem::replace(&mut seen[id], true) {
            continue;
        }
        if let Some(NodeKind::Source(source)) = &drafts[id].kind {
            sources.push((drafts[id].name.as_str(), source));
        }
        waiting.extend(inputs[id].iter().map(|port| port.node.0));
    }
    sources.reverse();
    sources
}

fn retention(cx: &mut Cx<'_>, draft: &Draft, ledger: &Ledger) {
    let message = format!(
        "the ledger {} of {} forgets an id after {}",
        ledger.table,
        draft.what(),
        duration_text(ledger.retention)
    );
    cx.found.add(Severity::Note, code::LEDGER_RETENTION, draft.name_span.clone(), message).help(format!(
        "what comes again later has its effect again, or is rejected: keep it longer than the retention of the topics \
         that are read plus the {} in which dead letters may be replayed (`check --online` compares)",
        duration_text(REPLAY_WINDOW)
    ));
}

/// Two sinks with one ledger would each take the other's events for their own.
fn shared(cx: &mut Cx<'_>, drafts: &[Draft], draft: &Draft, ledger: &Ledger) {
    let earlier = drafts.iter().take_while(|other| !std::ptr::eq(*other, draft)).find(|other| match &other.kind {
        Some(NodeKind::PostgresSink(sink)) => sink.dedupe.as_ref().is_some_and(|other| other.table == ledger.table),
        _ => false,
    });
    if let Some(other) = earlier {
        let message = format!("{} has the ledger of {}", draft.what(), other.what());
        cx.found
            .error(code::SHARED_LEDGER, draft.name_span.clone(), message)
            .help("an event that one of them has seen would have no effect in the other: a ledger for each");
    }
}
