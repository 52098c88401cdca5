//! Windows against a plain model that keeps every record: all kinds, both ways of putting out, times in any order, and batches
//! that are given up or lost with the process.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::commit::progress::BatchId;
use crate::commit::simulation::Random;

use super::*;

pub(super) fn tumbling(size_ms: i64, grace_ms: i64) -> Window {
    hopping(size_ms, size_ms, grace_ms)
}

fn hopping(size_ms: i64, advance_ms: i64, grace_ms: i64) -> Window {
    window(WindowKind::Aligned { size_ms, advance_ms }, grace_ms)
}

fn session(gap_ms: i64, grace_ms: i64) -> Window {
    window(WindowKind::Session { gap_ms }, grace_ms)
}

fn window(kind: WindowKind, grace_ms: i64) -> Window {
    Window { kind, grace_ms, emit: Emit::Update, late: Late::Drop, idle_ms: None }
}

fn on_close(window: Window) -> Window {
    Window { emit: Emit::Close, ..window }
}

const FIELDS: &[(&str, Function, Option<&str>)] = &[
    ("n", Function::Count, None),
    ("all", Function::Collect, Some(".v")),
    ("sum", Function::Sum, Some(".v")),
    ("least", Function::Min, Some(".v")),
    ("first", Function::First, Some(".v")),
    ("last", Function::Last, Some(".v")),
    ("kinds", Function::DistinctCount, Some(".v")),
    ("twice", Function::Reduce, Some("(int(.acc) ?? 0) + 2 * int!(.value.v)")),
];

fn rig(window: Window) -> Rig {
    let mut rig = Build::new()
        .source("in", Format::Json, None, Some(".at"))
        .aggregate("w", "in", FIELDS)
        .window(window)
        .sink("out", &["w"], None)
        .run();
    rig.pipeline.close_at_once = 2;
    rig
}

/// A record of the input; without a value it is one that no window takes.
#[derive(Clone, Copy, Debug)]
struct Event {
    partition: i32,
    key: char,
    at: i64,
    value: Option<u64>,
}

/// What is kept of a window: all its values in the order of their arrival.
#[derive(Clone, Debug, PartialEq)]
struct Group {
    start: i64,
    end: i64,
    values: Vec<(usize, u64)>,
}

impl Group {
    fn shown(&self, key: char) -> String {
        let numbers: Vec<u64> = self.values.iter().map(|(_, value)| *value).collect();
        let all: Vec<String> = numbers.iter().map(u64::to_string).collect();
        let sum: u64 = numbers.iter().sum();
        format!(
            r#"{},"n":{},"all":[{}],"sum":{sum},"least":{},"first":{},"last":{},"kinds":{},"twice":{}}}"#,
            self.head(key),
            numbers.len(),
            all.join(","),
            numbers.iter().min().unwrap(),
            all[0],
            all.last().unwrap(),
            numbers.iter().collect::<BTreeSet<_>>().len(),
            2 * sum
        )
    }

    fn head(&self, key: char) -> String {
        let time = |ms: i64| super::super::time::rfc3339(ms);
        format!(r#"{{"key":"{key}","window_start":"{}","window_end":"{}""#, time(self.start), time(self.end))
    }
}

/// One partition, as the documentation says it.
#[derive(Clone, Debug)]
struct Model {
    window: Window,
    time: i64,
    groups: BTreeMap<char, Vec<Group>>,
    arrivals: usize,
}

impl Model {
    fn new(window: Window) -> Model {
        Model { window, time: i64::MIN / 2, groups: BTreeMap::new(), arrivals: 0 }
    }

    /// The first time at which a window that ends then has closed.
    fn closes_at(&self, end: i64) -> i64 {
        match self.window.kind {
            WindowKind::Aligned { .. } => end + self.window.grace_ms,
            // The last record is in the session, and the gap still is.
            WindowKind::Session { gap_ms } => end + gap_ms + self.window.grace_ms + 1,
        }
    }

    fn is_open(&self, end: i64) -> bool {
        self.time < self.closes_at(end)
    }

    /// What a record puts out; `None`: it is late.
    fn take(&mut self, event: Event) -> Option<Vec<(char, String)>> {
        let Event { key, at, value: Some(value), .. } = event else { return Some(Vec::new()) };
        let before = self.time;
        self.time = self.time.max(at);
        let value = (self.arrivals, value);
        let mut outs = Vec::new();
        match self.window.kind {
            WindowKind::Aligned { size_ms, advance_ms } => {
                let starts = (0..=at).step_by(advance_ms as usize).filter(|start| at < start + size_ms);
                let starts: Vec<i64> = starts.filter(|start| self.is_open(start + size_ms)).collect();
                if starts.is_empty() {
                    return None;
                }
                for start in starts {
                    let groups = self.groups.entry(key).or_default();
                    let found = groups.iter().position(|group| group.start == start);
                    let at = found.unwrap_or_else(|| {
                        groups.push(Group { start, end: start + size_ms, values: Vec::new() });
                        groups.len() - 1
                    });
                    groups[at].values.push(value);
                    outs.push((key, groups[at].shown(key)));
                }
            }
            WindowKind::Session { gap_ms } => {
                let groups = self.groups.entry(key).or_default();
                let near = |group: &&Group| group.start - gap_ms <= at && at <= group.end + gap_ms;
                let (joined, rest): (Vec<Group>, Vec<Group>) = groups.iter().cloned().partition(|group| near(&group));
                let mut one = Group { start: at, end: at, values: vec![value] };
                for group in &joined {
                    one.start = one.start.min(group.start);
                    one.end = one.end.max(group.end);
                    one.values.extend(&group.values);
                }
                one.values.sort();
                if !self.is_open(one.end) {
                    self.time = before;
                    return None;
                }
                let mut joined = joined;
                joined.sort_by_key(|group| group.start);
                for group in joined.iter().filter(|group| group.start != one.start) {
                    outs.push((key, format!(r#"{},"retracted":true}}"#, group.head(key))));
                }
                outs.push((key, one.shown(key)));
                let groups = self.groups.get_mut(&key).unwrap();
                *groups = rest;
                groups.push(one);
            }
        }
        self.arrivals += 1;
        let mut closed = Vec::new();
        let (time, model) = (self.time, self.clone());
        for (key, groups) in &mut self.groups {
            let over = |group: &Group| time >= model.closes_at(group.end);
            closed.extend(groups.iter().filter(|group| over(group)).map(|group| (group.end, *key, group.shown(*key))));
            groups.retain(|group| !over(group));
        }
        if self.window.emit == Emit::Update {
            return Some(outs);
        }
        closed.sort();
        Some(closed.into_iter().map(|(_, key, shown)| (key, shown)).collect())
    }
}

fn events(random: &mut Random) -> Vec<Event> {
    let mut now = 0;
    let spread = 1 + random.below(60) as i64;
    let event = |_| {
        // Time goes on unevenly; records come out of order, a few by far.
        now += match random.below(20) {
            0 => random.below(120) as i64,
            _ => random.below(6) as i64,
        };
        let behind = match random.below(4) {
            0 => random.below(spread as u64) as i64,
            _ => 0,
        };
        let value = Some(random.below(5)).filter(|_| random.below(15) > 0);
        let far = if value.is_none() { 1000 } else { 0 };
        let key = ['a', 'b', 'c', 'd', 'e', 'f'][random.below(6) as usize];
        Event { partition: if key == 'f' { 15 } else { 14 }, key, at: (now - behind).max(0) + far, value }
    };
    (0..90).map(event).collect()
}

/// Runs the events in batches that are committed, given up, or lost with the process, and compares what the committed ones put
/// out with the model.
fn compare(window: Window, seed: u64) {
    let mut random = Random(seed);
    let events = events(&mut random);
    let mut models: HashMap<i32, Model> = [14, 15].map(|partition| (partition, Model::new(window))).into();
    let mut rig = rig(window);
    let mut changelog: HashMap<i32, Memory> = [14, 15].map(|partition| (partition, Memory::default())).into();
    rig.pipeline.hold(StoreId(0), 15, Box::new(Memory::default()));
    let (mut next, mut batch) = (0, 0);
    let mut known: HashMap<String, String> = HashMap::new();
    let mut committed_ids = BTreeSet::new();
    while next < events.len() {
        let end = events.len().min(next + 1 + random.below(8) as usize);
        let mut outs: Vec<(i32, Vec<(char, String)>)> = Vec::new();
        let mut state = Vec::new();
        let mut ids = Vec::new();
        let mut after = models.clone();
        let mut take = |rig: &Rig| {
            let mut out = Vec::new();
            for output in rig.chunk.iter() {
                let key = || text(output.key.unwrap());
                match &*rig.targets[output.target.0 as usize].topic {
                    "out" => {
                        let header = output.headers().find(|(name, _)| *name == b"semel-event-id").unwrap();
                        let (id, value) = (text(header.1.unwrap()), text(output.value.unwrap()));
                        let former = known.insert(id.clone(), value.clone());
                        assert!(former.is_none_or(|former| former == value), "{window:?} {seed}: {id}");
                        ids.push(id);
                        out.push((key().chars().next().unwrap(), value));
                    }
                    "shop.w.changelog" => {
                        state.push((output.partition, output.key.unwrap().to_vec(), output.value.map(<[u8]>::to_vec)))
                    }
                    _ => assert!(text(output.value.unwrap()).contains("bad"), "a dead letter"),
                }
            }
            out
        };
        for (offset, event) in events.iter().enumerate().take(end).skip(next) {
            let value = event.value.map_or("\"bad\"".to_owned(), |value| value.to_string());
            let json = format!(r#"{{"at":{},"v":{value}}}"#, event.at);
            let key = event.key.to_string();
            let record = Input {
                partition: event.partition,
                offset: Offset(offset as i64),
                ..input("in", Some(&key), Some(&json))
            };
            let outcome = rig.process(&record).unwrap();
            let out = take(&rig);
            let expected = after.get_mut(&event.partition).unwrap().take(*event);
            let what = format!("{window:?} seed {seed} record {offset} {event:?}");
            assert_eq!(outcome == Outcome::Late, expected.is_none(), "{what}: {outcome:?}");
            assert_eq!(out, expected.unwrap_or_default(), "{what}");
            outs.push((event.partition, out));
        }
        rig.chunk.clear();
        rig.pipeline.settle(&mut rig.chunk);
        assert_eq!(take(&rig), []);
        rig.pipeline.sealed(BatchId(batch));
        batch += 1;
        match random.below(5) {
            0 => {
                rig.pipeline.abandon();
                for (partition, memory) in &changelog {
                    rig.pipeline.hold(StoreId(0), *partition, Box::new(memory.clone()));
                }
                continue;
            }
            fate => {
                rig.pipeline.committed(BatchId(batch - 1));
                for (partition, key, value) in state {
                    changelog.get_mut(&partition).unwrap().restore(&key, value.as_deref());
                }
                for id in ids {
                    assert!(committed_ids.insert(id.clone()), "{window:?} seed {seed}: {id} is there twice");
                }
                models = after;
                next = end;
                if fate == 1 {
                    // Another process takes over, from what the changelog holds.
                    rig = self::rig(window);
                    for (partition, memory) in &changelog {
                        rig.pipeline.hold(StoreId(0), *partition, Box::new(memory.clone()));
                    }
                }
            }
        }
    }
    // What is left is what is open: nothing of windows that have closed.
    for (partition, memory) in changelog {
        let groups: Vec<usize> = models[&partition].groups.values().map(Vec::len).filter(|len| *len > 0).collect();
        let open: usize = groups.iter().sum();
        let clock = usize::from(models[&partition].arrivals > 0);
        let most = match window.kind {
            WindowKind::Aligned { .. } => open + clock,
            WindowKind::Session { .. } => open + 2 * groups.len() + clock,
        };
        assert_eq!(memory.len(), most, "{window:?} seed {seed}");
    }
}

#[test]
fn windows_of_every_kind_are_what_a_plain_model_says() {
    let kinds = [
        tumbling(10, 0),
        tumbling(30, 15),
        hopping(30, 10, 0),
        hopping(25, 10, 20),
        hopping(20, 19, 5),
        session(5, 0),
        session(8, 20),
        session(0, 3),
    ];
    for kind in kinds {
        for window in [kind, on_close(kind)] {
            (0..150).for_each(|seed| compare(window, seed));
        }
    }
}

/// A pipeline of counts, to which a filter, a program and a late sink may be added.
fn counts(window: Window) -> Build {
    Build::new()
        .source("in", Format::Json, Some(".id"), Some(".at"))
        .aggregate("w", "in", &[("n", Function::Count, None)])
        .window(window)
}

fn at(rig: &mut Rig, key: &str, at: i64) -> (Outcome, Vec<Out>) {
    let outcome = rig.process(&input("in", Some(key), Some(&format!(r#"{{"id":"x{at}","at":{at}}}"#)))).unwrap();
    (outcome, rig.outs().into_iter().filter(|out| !out.0.ends_with(".changelog")).collect())
}

fn shown(key: &str, start: i64, end: i64, n: u64) -> String {
    let time = |ms: i64| super::super::time::rfc3339(ms);
    format!(r#"{{"key":"{key}","window_start":"{}","window_end":"{}","n":{n}}}"#, time(start), time(end))
}

#[test]
fn a_window_is_put_out_by_the_record_that_closes_it_with_a_time_and_an_id_of_its_own() {
    let mut rig = counts(on_close(tumbling(10, 5))).sink("out", &["w"], None).run();
    assert_eq!(at(&mut rig, "b", 3), (Outcome::Kept, vec![]));
    assert_eq!(at(&mut rig, "a", 9), (Outcome::Kept, vec![]));
    assert_eq!(at(&mut rig, "a", 14), (Outcome::Kept, vec![]), "the grace is not over");
    let outs = ["a", "b"].map(|key| out("out", Some(key), Some(&shown(key, 0, 10, 1))));
    assert_eq!(at(&mut rig, "a", 15), (Outcome::Kept, outs.to_vec()));
    // The record that closed it has headers, an id and a time of its own: a window has none of them.
    let last = rig.chunk.iter().find(|output| output.key == Some(b"a") && output.headers().len() > 0).unwrap();
    assert_eq!((last.timestamp, last.headers().len()), (Some(9), 1));
    let id = EventId::of_state("shop.w", b"\x02\x80\0\0\0\0\0\0\0a", 1, Identity::Unknown, Some(9))
        .derived("shop", "out", 0);
    assert_eq!(last.headers().next().unwrap().1.map(text), Some(id.to_string()));
    assert_eq!(at(&mut rig, "a", 9), (Outcome::Late, vec![]));
    assert_eq!(rig.pipeline.counts().node(rig.id("w")).late, 1);
}

#[test]
fn late_records_are_dead_letters_where_the_file_says_so() {
    let mut rig = counts(Window { late: Late::Reject, ..session(5, 0) }).sink("out", &["w"], None).run();
    at(&mut rig, "a", 100);
    // It lies at the edge of what is open: a session that ends there would close now.
    assert_eq!(at(&mut rig, "b", 95).0, Outcome::Processed { outputs: 1 });
    let late = rig.rejected(&input("in", Some("b"), Some(r#"{"id":"y","at":89}"#)));
    assert_eq!(late, rejection("w", "late", "the time 1970-01-01T00:00:00.089Z is late: its windows have closed"));
}

#[test]
fn a_window_that_a_later_node_refuses_is_rejected_alone_and_closed_all_the_same() {
    let mut rig = counts(on_close(tumbling(10, 0)))
        .remap("strict", "w", "assert!(.key != \"b\", \"not b\")")
        .sink("out", &["strict"], None)
        .run();
    for key in ["a", "b", "c"] {
        at(&mut rig, key, 1);
    }
    let (outcome, outs) = at(&mut rig, "z", 10);
    assert_eq!(outcome, Outcome::Kept, "the record that closed them is in its own window");
    let expected = ["a", "b", "c"].map(|key| {
        let topic = if key == "b" { "shop.dead-letters" } else { "out" };
        out(topic, Some(key), Some(&shown(key, 0, 10, 1)))
    });
    assert_eq!(outs, expected);
    // The letter says that it is of the changelog: no source reads that, so that a replay takes it for no input.
    let letter = rig.chunk.iter().find(|output| output.target == TargetId(0)).unwrap();
    let header = |name: &str| letter.headers().find(|(n, _)| *n == name.as_bytes()).and_then(|(_, v)| v).map(text);
    assert_eq!(header("semel-error-topic").as_deref(), Some("shop.w.changelog"));
    assert_eq!(header("semel-error-node").as_deref(), Some("strict"));
    assert_eq!(at(&mut rig, "z", 11), (Outcome::Kept, vec![]), "it does not come again");
    let rejects: Vec<_> = rig.pipeline.counts().rejects().collect();
    assert_eq!(rejects, [(rig.id("strict"), "expression", 1)]);
}

#[test]
fn many_windows_close_in_turns_and_in_the_order_of_their_ends() {
    for window in [tumbling(10, 0), session(5, 0)] {
        let mut rig = counts(on_close(window)).sink("out", &["w"], None).run();
        rig.pipeline.close_at_once = 7;
        for i in 0..50 {
            at(&mut rig, &format!("k{:02}", 49 - i), i % 3);
        }
        let record = input("in", Some("z"), Some(r#"{"id":"x","at":100}"#));
        rig.chunk.clear();
        rig.pipeline.process(NodeId(0), &record, &mut rig.chunk).unwrap();
        let (mut turns, mut sizes) = (0, Vec::new());
        assert!(rig.pipeline.is_closing());
        while let Some(closed) = rig.pipeline.close(&mut rig.chunk).unwrap() {
            sizes.push(closed.windows);
            turns += 1;
        }
        assert!(turns > 7 && sizes.iter().all(|size| *size <= 7), "{sizes:?}");
        assert_eq!(sizes.iter().sum::<u32>(), 50);
        let found: Vec<(String, String)> = rig
            .outs()
            .into_iter()
            .filter(|out| out.0 == "out")
            .map(|out| (out.2.unwrap().split_off(65), out.1.unwrap()))
            .collect();
        assert_eq!(found.len(), 50);
        assert!(found.is_sorted(), "by the end, which the text goes on with, then by the key: {found:?}");
    }
}

#[test]
fn windows_of_windows_have_the_times_of_those_that_they_are_made_of() {
    let mut rig = counts(on_close(tumbling(10, 0)))
        .aggregate("more", "w", &[("windows", Function::Count, None), ("n", Function::Sum, Some(".n"))])
        .window(on_close(tumbling(30, 0)))
        .sink("out", &["more"], None)
        .run();
    for time in [1, 2, 11, 25] {
        assert_eq!(at(&mut rig, "a", time), (Outcome::Kept, vec![]));
    }
    // The window from 20 to 30 has the time 29: it closes none of those it belongs to.
    assert_eq!(at(&mut rig, "a", 35).1, []);
    assert_eq!(
        at(&mut rig, "a", 40).1,
        [out("out", Some("a"), Some(&shown("a", 0, 30, 4).replace("\"n\"", "\"windows\":3,\"n\"")))]
    );
}

#[test]
fn an_event_far_past_its_record_is_rejected_and_closes_nothing() {
    let mut build = counts(on_close(tumbling(10, 0))).sink("out", &["w"], None);
    match &mut build.nodes[0].kind {
        NodeKind::Source(source) => source.max_ahead_ms = Some(50),
        _ => panic!("a source"),
    }
    let mut rig = build.run();
    let record = |json: &'static str| Input { timestamp: Some(100), ..input("in", Some("a"), Some(json)) };
    assert_eq!(rig.process(&record(r#"{"id":"x","at":91}"#)), Ok(Outcome::Kept));
    let message =
        "the event's time 1970-01-01T00:00:00.151Z lies 51 ms past its record's own, 50 ms are taken (max_ahead)";
    assert_eq!(rig.rejected(&record(r#"{"id":"y","at":151}"#)), rejection("in", "ahead", message));
    assert_eq!(rig.process(&record(r#"{"id":"z","at":92}"#)), Ok(Outcome::Kept), "its window is open");
    assert_eq!(rig.process(&record(r#"{"id":"z","at":150}"#)), Ok(Outcome::Kept));
    assert_eq!(rig.outs().last().unwrap().2.as_deref(), Some(&*shown("a", 90, 100, 2)));
}

#[test]
fn a_record_that_a_field_drops_moves_no_time_and_closes_nothing() {
    for window in [hopping(10, 5, 5), session(4, 2)] {
        let sum = [("sum", Function::Sum, Some("if .v == null { abort }\n.v"))];
        let mut rig = Build::new()
            .source("in", Format::Json, None, Some(".at"))
            .aggregate("w", "in", &sum)
            .window(on_close(window))
            .sink("out", &["w"], None)
            .run();
        let mut process = |value: &str| rig.process(&input("in", Some("a"), Some(value))).unwrap();
        assert_eq!(process(r#"{"at":7,"v":1}"#), Outcome::Kept);
        process(r#"{"at":1000}"#);
        assert_eq!(process(r#"{"at":8,"v":1}"#), Outcome::Kept, "{window:?}");
        assert_eq!(rig.outs().iter().filter(|out| out.0 == "out").count(), 0, "{window:?}");
    }
}

#[test]
fn a_partition_without_records_closes_its_windows_as_time_goes_on() {
    for (window, last, over) in [(hopping(10, 5, 5), 10, 15), (session(4, 2), 7, 14)] {
        let window = Window { idle_ms: Some(1_000), ..on_close(window) };
        let mut rig = counts(window).sink("out", &["w"], None).run();
        assert_eq!(rig.pipeline.idle_ms(StoreId(0)), Some(1_000));
        assert_eq!(rig.pipeline.stream_time(StoreId(0), 14, &mut rig.chunk), None, "no record, no time");
        for time in [3, 7, 5] {
            at(&mut rig, "a", time);
        }
        assert_eq!(rig.pipeline.stream_time(StoreId(0), 14, &mut rig.chunk), Some(7));
        let advance = |rig: &mut Rig, time| {
            rig.chunk.clear();
            let moved = rig.pipeline.advance(StoreId(0), 14, time, Offset(41), &mut rig.chunk);
            while rig.pipeline.close(&mut rig.chunk).unwrap().is_some() {}
            let ends =
                rig.outs().into_iter().filter(|out| out.0 == "out").map(|out| out.2.unwrap()).collect::<Vec<_>>();
            assert!(moved || rig.chunk.is_empty(), "nothing is written where nothing closes");
            ends
        };
        assert_eq!(advance(&mut rig, over - 1), [""; 0]);
        assert_eq!(advance(&mut rig, over), [shown("a", if last == 10 { 0 } else { 3 }, last, 3)], "{window:?}");
        assert_eq!(advance(&mut rig, over), [""; 0], "once");
        assert_eq!(advance(&mut rig, over - 1), [""; 0], "never back");
        // What is closed stays closed for what comes.
        let outcome = at(&mut rig, "a", 4).0;
        assert_eq!(outcome, Outcome::Late, "{window:?}");
        assert_eq!(at(&mut rig, "a", 200).0, Outcome::Kept);
    }
}
