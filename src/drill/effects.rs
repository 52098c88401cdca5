//! How often each record had its effect, judged by what each one leaves in a run without a crash.

use std::collections::BTreeMap;

use serde_json::Value;

use super::observe::Contents;

/// What is there that is no record's effect.
const SOMETHING: &str = "something";
/// Sums are read as floats: what is no whole multiple differs by more than their last digits.
const NEAR: f64 = 1e-9;

/// What became of a record at one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fate {
    /// How often its effect is there.
    pub times: usize,
    /// Something of it is there that it does not leave without a crash.
    pub different: bool,
    /// It has a dead letter.
    pub rejected: bool,
}

impl Fate {
    pub const ONCE: Fate = Fate::of(1);
    const DIFFERENT: Fate = Fate { different: true, ..Fate::of(0) };

    pub const fn of(times: usize) -> Fate {
        Fate { times, different: false, rejected: false }
    }

    /// `lost`, `twice`, `lost and rejected`.
    fn text(self) -> String {
        let times = match self.times {
            _ if self.different => "other than without a crash".to_owned(),
            0 => "lost".to_owned(),
            1 => "once".to_owned(),
            2 => "twice".to_owned(),
            times => format!("{times} times"),
        };
        if self.rejected { format!("{times} and rejected") } else { times }
    }
}

/// What became of each record, but for those that had their effect once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    pub records: usize,
    /// By the record's key.
    pub other: BTreeMap<String, Fate>,
}

impl Effects {
    /// Every record once, but `name` so often.
    pub fn expected(names: &[String], name: &str, times: usize) -> Effects {
        Effects::observed(names, |other| if other == name { Fate::of(times) } else { Fate::ONCE })
    }

    pub fn observed(names: &[String], fate: impl Fn(&str) -> Fate) -> Effects {
        let fates = names.iter().map(|name| (name.clone(), fate(name)));
        Effects { records: names.len(), other: fates.filter(|(_, fate)| *fate != Fate::ONCE).collect() }
    }

    pub fn lost(&self) -> usize {
        self.other.values().filter(|fate| fate.times == 0 && !fate.different).count()
    }

    pub fn doubled(&self) -> usize {
        self.other.values().filter(|fate| fate.times > 1).count()
    }

    pub fn right(&self) -> usize {
        self.records.saturating_sub(self.other.len())
    }

    /// `each once`, `order-3 lost`, `order-3 twice`.
    pub fn text(&self) -> String {
        let said = self.other.iter().map(|(name, fate)| format!("{name} {}", fate.text()));
        if self.other.is_empty() { "each once".to_owned() } else { said.collect::<Vec<_>>().join(", ") }
    }
}

/// What each record leaves at an end, by its key: contents of records, or rows as JSON.
#[derive(Clone, Debug)]
pub struct Traces {
    names: Vec<String>,
    /// In the order of the names.
    left: Vec<Vec<String>>,
    how: How,
}

/// How what is there is compared with what a record leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum How {
    /// The same, so often.
    Same,
    /// It is only counted: another attempt makes something else.
    Counted,
    /// By columns that are sums, which are so many times as large; the others are the key.
    Sums(Vec<String>),
}

impl Traces {
    /// `contents`: what a run without a crash left. Refuses an end at which effects cannot be told apart by the records'
    /// keys, with a sentence that says why.
    pub fn new(names: &[String], contents: &Contents, how: How) -> Result<Traces, String> {
        let mut left = vec![Vec::new(); names.len()];
        for content in texts(contents) {
            match &owners(contents, content, names)[..] {
                [owner] => left[*owner].push(content.clone()),
                [] => return Err(format!("no record's key is in {content}")),
                _ => return Err(format!("the keys of several records are in {content}")),
            }
        }
        if let Some((name, _)) = names.iter().zip(&left).find(|(_, left)| left.is_empty()) {
            return Err(format!("record {name} leaves nothing there with its key"));
        }
        let traces = Traces { names: names.to_vec(), left, how };
        match traces.names.iter().find(|name| traces.fate(contents, name) != Fate::ONCE) {
            Some(name) => Err(format!("record {name} adds nothing to any sum")),
            None => Ok(traces),
        }
    }

    /// The same, where what is there is only counted.
    pub fn counted(self) -> Traces {
        Traces { how: if self.how == How::Same { How::Counted } else { self.how }, ..self }
    }

    /// What became of each record.
    pub fn effects(&self, contents: &Contents) -> Effects {
        let mut effects = Effects::observed(&self.names, |name| self.fate(contents, name));
        if texts(contents).iter().any(|content| owners(contents, content, &self.names).len() != 1) {
            effects.other.insert(SOMETHING.to_owned(), Fate::DIFFERENT);
        }
        effects
    }

    fn fate(&self, contents: &Contents, name: &str) -> Fate {
        let index = self.names.iter().position(|known| known == name).expect("a record of the drill");
        let found: Vec<&String> =
            texts(contents).into_iter().filter(|content| owners(contents, content, &self.names) == [index]).collect();
        let left = &self.left[index];
        match &self.how {
            How::Counted if found.len().is_multiple_of(left.len()) => Fate::of(found.len() / left.len()),
            How::Counted => Fate::DIFFERENT,
            How::Same => {
                let times = |content: &String| {
                    let count =
                        |contents: &mut dyn Iterator<Item = &String>| contents.filter(|c| *c == content).count();
                    let (is, once) = (count(&mut found.iter().copied()), count(&mut left.iter()));
                    (is % once == 0).then_some(is / once)
                };
                let first = times(&left[0]);
                let whole = left.iter().all(|content| times(content) == first);
                match first.filter(|_| whole && found.iter().all(|content| left.contains(content))) {
                    Some(times) => Fate::of(times),
                    None => Fate::DIFFERENT,
                }
            }
            How::Sums(key) => match (&left[..], &found[..]) {
                (_, []) => Fate::of(0),
                ([once], [is]) => multiple(once, is, key).map_or(Fate::DIFFERENT, Fate::of),
                _ => Fate::DIFFERENT,
            },
        }
    }
}

/// How many times the sums of a row are those of another; none where they are no whole multiple, or nothing.
pub fn multiple(once: &str, is: &str, key: &[String]) -> Option<usize> {
    let row = |text: &str| serde_json::from_str::<serde_json::Map<String, Value>>(text).ok();
    let (once, is) = (row(once)?, row(is)?);
    let mut times = None;
    for (column, once) in once.iter().filter(|(column, _)| !key.contains(column)) {
        let (once, is) = (once.as_f64()?, is.get(column)?.as_f64()?);
        if once == 0.0 {
            if is != 0.0 {
                return None;
            }
            continue;
        }
        let ratio = is / once;
        let whole = ratio.round();
        if whole < 0.0 || (ratio - whole).abs() > NEAR || times.is_some_and(|times| times != whole) {
            return None;
        }
        times = Some(whole);
    }
    times.map(|times| times as usize)
}

fn texts(contents: &Contents) -> Vec<&String> {
    match contents {
        Contents::Records(records) => records.iter().map(|record| &record.content).collect(),
        Contents::Rows(rows) => rows.values().collect(),
        Contents::Heap(rows) => rows.iter().collect(),
    }
}

/// The records whose keys are in a content: by its own key, or as the value of a column.
fn owners(contents: &Contents, content: &str, names: &[String]) -> Vec<usize> {
    let indices = |is: &dyn Fn(&str) -> bool| {
        names.iter().enumerate().filter(|(_, name)| is(name)).map(|(index, _)| index).collect()
    };
    if let Contents::Records(_) = contents {
        // The contents begin with the key, as text in quotes.
        return indices(&|name| content.strip_prefix(&format!("{name:?}")).is_some_and(|rest| rest.starts_with(" = ")));
    }
    let row: Value = serde_json::from_str(content).unwrap_or_default();
    indices(&|name| row.as_object().is_some_and(|row| row.values().any(|value| value == name)))
}

#[cfg(test)]
mod tests {
    use super::super::verdict::Seen;
    use super::*;

    fn names() -> Vec<String> {
        ["a", "b", "c"].map(str::to_owned).to_vec()
    }

    fn heap(rows: &[&str]) -> Contents {
        Contents::Heap(rows.iter().map(|row| (*row).to_owned()).collect())
    }

    fn text(traces: &Traces, rows: &[&str]) -> String {
        traces.effects(&heap(rows)).text()
    }

    const A: &str = r#"{"id":"a","n":1}"#;
    const B: &str = r#"{"id":"b","n":2}"#;
    const C: &str = r#"{"id":"c","n":3}"#;

    #[test]
    fn effects_name_what_is_not_there_once() {
        let effects = Effects::observed(&names(), |name| match name {
            "a" => Fate { rejected: true, ..Fate::of(0) },
            "b" => Fate::ONCE,
            _ => Fate::of(2),
        });
        assert_eq!((effects.lost(), effects.doubled(), effects.right()), (1, 1, 1));
        assert_eq!(effects.text(), "a lost and rejected, c twice");
        assert_eq!(Effects::expected(&names(), "b", 1).text(), "each once");
        assert_eq!(Effects::expected(&names(), "b", 0).text(), "b lost");
    }

    #[test]
    fn an_effect_is_what_is_the_same_as_without_a_crash() {
        let traces = Traces::new(&names(), &heap(&[A, B, C]), How::Same).unwrap();
        assert_eq!(text(&traces, &[C, B, A]), "each once");
        assert_eq!(text(&traces, &[A, A, A, C]), "a 3 times, b lost");
        let wrong = r#"{"id":"b","n":4}"#;
        assert_eq!(text(&traces, &[A, wrong, C]), "b other than without a crash");
        assert_eq!(text(&traces, &[A, B, wrong, C]), "b other than without a crash", "one right, one wrong");
        assert_eq!(text(&traces, &[A, B, C, r#"{"id":"d"}"#]), "something other than without a crash");
        let counted = traces.counted();
        assert_eq!(text(&counted, &[A, wrong, wrong, C]), "b twice");
    }

    #[test]
    fn a_record_that_leaves_two_things_has_its_effect_when_both_are_there() {
        let (first, second) = (r#"{"id":"a","line":1}"#, r#"{"id":"a","line":2}"#);
        let traces = Traces::new(&names(), &heap(&[first, second, B, C]), How::Same).unwrap();
        assert_eq!(text(&traces, &[first, second, B, C]), "each once");
        assert_eq!(text(&traces, &[first, second, first, second, B, C]), "a twice");
        assert_eq!(text(&traces, &[first, B, C]), "a other than without a crash");
        assert_eq!(text(&traces, &[first, first, B, C]), "a other than without a crash");
    }

    #[test]
    fn a_sum_is_so_many_times_that_of_the_record() {
        let once = [r#"{"id":"a","amount":200,"tax":0}"#, r#"{"id":"b","amount":0.1,"tax":-2}"#, C];
        let traces = Traces::new(&names(), &heap(&once), How::Sums(vec!["id".into()])).unwrap();
        let with = |a: &str, b: &str| text(&traces, &[a, b, C]);
        assert_eq!(with(r#"{"id":"a","amount":400,"tax":0}"#, once[1]), "a twice");
        assert_eq!(with(r#"{"id":"a","amount":201,"tax":0}"#, once[1]), "a other than without a crash");
        assert_eq!(with(r#"{"id":"a","amount":400,"tax":1}"#, once[1]), "a other than without a crash");
        assert_eq!(with(once[0], r#"{"id":"b","amount":0.3,"tax":-6}"#), "b 3 times");
        assert_eq!(with(once[0], r#"{"id":"b","amount":0.3,"tax":-4}"#), "b other than without a crash");
        assert_eq!(text(&traces, &[once[0], C]), "b lost");
    }

    #[test]
    fn an_end_that_does_not_show_whose_effects_are_there_is_refused() {
        let refused = |rows: &[&str], how: How| Traces::new(&names(), &heap(rows), how).unwrap_err();
        assert_eq!(refused(&[A, C], How::Same), "record b leaves nothing there with its key");
        assert_eq!(refused(&[A, B, C, "{}"], How::Same), "no record's key is in {}");
        assert!(refused(&[r#"{"x":"a","y":"b"}"#], How::Same).starts_with("the keys of several records"));
        let nothing = r#"{"id":"b","n":0}"#;
        let sums = How::Sums(vec!["id".into()]);
        assert_eq!(refused(&[A, nothing, C], sums), "record b adds nothing to any sum");
    }

    #[test]
    fn a_record_of_a_topic_is_known_by_its_whole_key() {
        let seen = |content: &str| Seen {
            content: content.into(),
            line: String::new(),
            event_id: None,
            source: None,
            node: None,
        };
        let names = ["o1".to_owned(), "o10".to_owned()];
        let topic = Contents::Records(vec![seen("\"o1\" = \"{}\""), seen("\"o10\" = \"{}\"")]);
        let traces = Traces::new(&names, &topic, How::Same).unwrap();
        assert_eq!(traces.effects(&topic).text(), "each once");
    }
}
