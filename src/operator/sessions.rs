//! Windows that last as long as the records of a key go on.
//!
//! | key | value, behind the stamp |
//! |---|---|
//! | `3` | the partition's time; before which nothing is due; the arrivals so far |
//! | `4`, start, group | a session: its end, its revision, its cells |
//! | `5`, group | when the group is due, then the starts of its sessions |
//! | `6`, time, group | the group is due: no session of it ends before |
//!
//! A session that goes on is one write: it stays due when it was, and only then is looked at and made due at its end.

use std::collections::BTreeSet;

use crate::expr::{Fault, Runtime};
use crate::ids::{EventId, Identity};
use crate::record::Offset;
use crate::topology::spec::Window;

use super::aggregate::{Aggregate, Folded, Folding, Place};
use super::coding::{Coded, put_number};
use super::fold::Cell;
use super::windows::{CLOCK, Final, ordered, timed, untimed};

const SESSION: u8 = 4;
const GROUP: u8 = 5;
const DUE: u8 = 6;

/// What a partition knows of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Clock {
    /// The greatest time of a record.
    time: i64,
    /// No group is due before.
    due: i64,
    /// How many records were folded.
    arrivals: u64,
}

/// The sessions of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    /// Under which time it is due: none of its sessions ends before.
    due: i64,
    /// In their order; sessions lie further apart than the gap.
    starts: Vec<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Session {
    start: i64,
    /// The time of its last record, which is in it.
    end: i64,
    revision: u64,
    cells: Vec<Cell>,
}

impl Aggregate {
    /// Folds a record into the session that it is in, with those that it joins.
    pub(super) fn fold_session(
        &mut self,
        gap: i64,
        window: Window,
        time: i64,
        folding: &Folding<'_>,
        runtime: &mut Runtime,
        place: &mut Place<'_>,
    ) -> Result<Folded, Fault> {
        let mut clock = self.clock(place)?;
        clock.time = clock.time.max(time);
        // Sessions that ended before have closed.
        let close = clock.time - gap - window.grace_ms;
        let known = self.group(folding.group, place)?;
        let near = self.near(&known, time, gap, close, folding.group, place)?;
        if near.is_empty() && time < close {
            return Ok(Folded::Late);
        }
        if !self.evaluate(folding, runtime)? {
            return Ok(Folded::Dropped);
        }
        let fresh = || self.spec.fields.iter().map(|field| Cell::of_session(field.function)).collect();
        let mut one = Session { start: time, end: time, revision: 1, cells: fresh() };
        for (i, session) in near.iter().enumerate() {
            one.start = one.start.min(session.start);
            one.end = one.end.max(session.end);
            one.revision += session.revision;
            if i == 0 {
                one.cells.clone_from(&session.cells);
            } else if !self.merge(&mut one.cells, session.cells.clone(), folding, runtime)? {
                return Ok(Folded::Dropped);
            }
        }
        if !self.apply(&mut one.cells, folding, runtime, clock.arrivals)? {
            return Ok(Folded::Dropped);
        }
        clock.arrivals += 1;
        // A record that is dropped closes nothing.
        if clock.due < close {
            // The clock tells from where on.
            self.closing.entry(place.partition).or_insert((Vec::new(), folding.input.offset));
        }
        for session in near.iter().filter(|session| session.start != one.start) {
            self.put(place, &timed(SESSION, session.start, folding.group), None);
            if !self.waits() {
                let id = self.id_of(session, folding.group, session.revision + 1, folding.cause, folding.time_ms);
                self.retract(folding.group, (session.start, session.end), id);
            }
        }
        let mut group = known.clone();
        group.starts.retain(|start| near.iter().all(|session| session.start != *start));
        group.starts.insert(group.starts.partition_point(|start| *start < one.start), one.start);
        group.due = group.due.min(one.end);
        clock.due = clock.due.min(group.due);
        self.set_clock(clock, place);
        self.set_group(&known, Some(&group), folding.group, place)?;
        self.set_session(&one, folding.group, place)?;
        if !self.waits() {
            let id = self.id_of(&one, folding.group, one.revision, folding.cause, folding.time_ms);
            self.show(folding.group, Some((one.start, one.end)), &one.cells, id);
        }
        Ok(Folded::Applied)
    }

    /// The open sessions of a group that a record of that time is in or joins, in their order: no more than one begins before
    /// it, and one after.
    fn near(
        &mut self,
        group: &Group,
        time: i64,
        gap: i64,
        close: i64,
        name: &str,
        place: &Place<'_>,
    ) -> Result<Vec<Session>, Fault> {
        let after = group.starts.partition_point(|start| *start <= time);
        let before = after.checked_sub(1).map(|before| group.starts[before]);
        let after = group.starts.get(after).copied().filter(|start| *start <= time + gap);
        let mut near = Vec::new();
        for start in before.into_iter().chain(after) {
            let session = self.session(start, name, place)?;
            // One that has closed is put out, or will be, as it is.
            if session.end >= time - gap && session.end >= close {
                near.push(session);
            }
        }
        Ok(near)
    }

    /// Ends the next sessions that have closed, so many at most, and answers what is put out of them: in the order of their
    /// ends, then of their keys. The second says whether there may be more.
    pub(super) fn close_sessions(
        &mut self,
        gap: i64,
        window: Window,
        most: usize,
        place: &mut Place<'_>,
    ) -> Result<(Vec<Final>, bool), Fault> {
        let mut clock = self.clock(place)?;
        let close = clock.time.saturating_sub(gap + window.grace_ms);
        let below = ordered(DUE, close);
        let keys = place.states.keys(self.store, place.partition, &ordered(DUE, clock.due), &below, most);
        let full = keys.len() == most;
        let mut due: BTreeSet<(i64, String)> = keys.iter().map(|key| untimed(key)).map(owned).collect();
        // What is due later than all that was read may come behind something that was not.
        let horizon = due.last().filter(|_| full).cloned();
        let mut finals = Vec::new();
        // A group that is only looked at costs as much as one that ends.
        let mut left = 2 * most;
        while left > 0
            && let Some((time, name)) = due.pop_first()
        {
            left -= 1;
            let known = self.group(&name, place)?;
            let mut group = known.clone();
            let first = group.starts.first().map(|start| self.session(*start, &name, place)).transpose()?;
            let Some(session) = first.filter(|_| known.due == time) else {
                debug_assert!(false, "a group is due under one time, and has sessions");
                self.put(place, &timed(DUE, time, &name), None);
                continue;
            };
            if session.end == time {
                group.starts.remove(0);
                self.put(place, &timed(SESSION, session.start, &name), None);
                if self.waits() {
                    let id = self.id_of(&session, &name, session.revision, Identity::Unknown, Some(session.end));
                    let window = (session.start, session.end);
                    finals.push(self.last_of(name.clone(), window, &session.cells, id, session.end));
                }
            }
            let next = group.starts.first().map(|start| self.session(*start, &name, place)).transpose()?;
            if let Some(next) = &next {
                group.due = next.end;
                let later = (next.end, name.clone());
                if next.end < close && horizon.as_ref().is_none_or(|horizon| later < *horizon) {
                    due.insert(later);
                }
            }
            self.set_group(&known, next.map(|_| &group), &name, place)?;
        }
        // Where nothing is left that is due, what comes next says when to look again.
        let end = ordered(DUE, i64::MAX);
        let next = place.states.keys(self.store, place.partition, &ordered(DUE, clock.due), &end, 1);
        clock.due = next.first().map_or(i64::MAX, |key| untimed(key).0);
        self.set_clock(clock, place);
        Ok((finals, clock.due < close))
    }

    /// As [`Aggregate::time`].
    pub(super) fn time_session(&mut self, place: &Place<'_>) -> Result<Option<i64>, Fault> {
        let clock = self.clock(place)?;
        Ok((clock.arrivals > 0).then_some(clock.time))
    }

    /// As [`Aggregate::advance`].
    pub(super) fn advance_session(
        &mut self,
        gap: i64,
        window: Window,
        time: i64,
        offset: Offset,
        place: &mut Place<'_>,
    ) -> Result<bool, Fault> {
        let mut clock = self.clock(place)?;
        if clock.due >= time - gap - window.grace_ms {
            return Ok(false);
        }
        clock.time = clock.time.max(time);
        self.set_clock(clock, place);
        self.closing.entry(place.partition).or_insert((Vec::new(), offset));
        Ok(true)
    }

    fn clock(&mut self, place: &Place<'_>) -> Result<Clock, Fault> {
        if !self.get(place, &CLOCK)? {
            return Ok(Clock { time: i64::MIN / 2, due: i64::MAX, arrivals: 0 });
        }
        let mut coded = Coded(self.state.strip_prefix(&self.stamp).unwrap_or_default());
        let mut next = || coded.array().copied().expect("what is restored has the stamp of this window");
        let [time, due] = [i64::from_be_bytes(next()), i64::from_be_bytes(next())];
        Ok(Clock { time, due, arrivals: u64::from_be_bytes(next()) })
    }

    /// Every record moves the clock: it goes into the changelog when the batch ends.
    fn set_clock(&mut self, clock: Clock, place: &mut Place<'_>) {
        let Clock { time, due, arrivals } = clock;
        let value = [&self.stamp[..], &time.to_be_bytes(), &due.to_be_bytes(), &arrivals.to_be_bytes()].concat();
        place.states.write(self.store, place.partition, &CLOCK, Some(&value));
        self.moved.insert(place.partition);
    }

    fn group(&mut self, name: &str, place: &Place<'_>) -> Result<Group, Fault> {
        if !self.get(place, &grouped(name))? {
            return Ok(Group { due: i64::MAX, starts: Vec::new() });
        }
        let times = self.state.strip_prefix(&self.stamp).unwrap_or_default().chunks_exact(8);
        let mut times = times.map(|bytes| i64::from_be_bytes(bytes.try_into().expect("chunks of eight bytes")));
        let due = times.next().expect("what is restored has the stamp of this window");
        Ok(Group { due, starts: times.collect() })
    }

    /// Writes what changed of a group; none of it is left where it has no sessions.
    fn set_group(
        &mut self,
        known: &Group,
        group: Option<&Group>,
        name: &str,
        place: &mut Place<'_>,
    ) -> Result<(), Fault> {
        if Some(known) == group {
            return Ok(());
        }
        let due = group.map(|group| group.due);
        if Some(known.due) != due {
            if !known.starts.is_empty() {
                self.put(place, &timed(DUE, known.due, name), None);
            }
            if let Some(due) = due {
                self.put(place, &timed(DUE, due, name), Some(&self.stamp));
            }
        }
        let key = grouped(name);
        let Some(Group { due, starts }) = group else {
            self.put(place, &key, None);
            return Ok(());
        };
        self.state.clear();
        self.state.extend_from_slice(&self.stamp);
        [due].into_iter().chain(starts).for_each(|time| self.state.extend_from_slice(&time.to_be_bytes()));
        self.put_state(&key, place)
    }

    fn session(&mut self, start: i64, name: &str, place: &Place<'_>) -> Result<Session, Fault> {
        let found = self.get(place, &timed(SESSION, start, name))?;
        let session = found.then(|| self.decode_session(start)).flatten();
        Ok(session.expect("a group's session is there, with the stamp of these fields"))
    }

    fn decode_session(&self, start: i64) -> Option<Session> {
        let mut coded = Coded(self.state.strip_prefix(&self.stamp)?);
        let end = i64::from_be_bytes(*coded.array()?);
        let revision = coded.number()?;
        let cells = self.spec.fields.iter().map(|field| Cell::of_session(field.function).decode(&mut coded));
        Some(Session { start, end, revision, cells: cells.collect::<Option<_>>()? })
    }

    fn set_session(&mut self, session: &Session, name: &str, place: &mut Place<'_>) -> Result<(), Fault> {
        self.state.clear();
        self.state.extend_from_slice(&self.stamp);
        self.state.extend_from_slice(&session.end.to_be_bytes());
        put_number(session.revision, &mut self.state);
        session.cells.iter().for_each(|cell| cell.encode(&mut self.state));
        self.put_state(&timed(SESSION, session.start, name), place)
    }

    /// A session may begin where one that has closed began, but none ends there then.
    fn id_of(&self, session: &Session, name: &str, revision: u64, cause: Identity, time_ms: Option<i64>) -> EventId {
        let key = [&timed(SESSION, session.start, name)[..], &session.end.to_be_bytes()].concat();
        EventId::of_state(&self.name, &key, revision, cause, time_ms)
    }
}

fn grouped(name: &str) -> Vec<u8> {
    [&[GROUP], name.as_bytes()].concat()
}

fn owned((time, name): (i64, &str)) -> (i64, String) {
    (time, name.to_owned())
}
