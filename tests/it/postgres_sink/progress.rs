//! Positions beside the rows: who owns them, and who only thinks so.

use std::collections::HashMap;
use std::time::Duration;

use semel::error::Exit;
use semel::record::{Offset, Position, TopicPartition};
use semel::sink::postgres::{Address, Advance, Applied, Moves, Seed, StageName, Store, Writer};
use semel::topology::spec::{Ledger, Mode, PostgresSink, Progress};

use super::fixture::{Database, PASSES, PATIENCE, Session, Target, check, writer_of};
use super::proxy::{Cut, Proxy};
use crate::support;

const TABLE: &str = "CREATE TABLE t (id text PRIMARY KEY, n int8 NOT NULL)";

fn sink(db: &Database) -> PostgresSink {
    PostgresSink { mode: Mode::Add, version: None, progress: Progress::Postgres, ..db.sink("t") }
}

fn partition(number: i32) -> TopicPartition {
    TopicPartition::new("in", number)
}

fn seed(number: i32, had: bool) -> Seed {
    Seed { partition: partition(number), position: Position(0), had }
}

/// An owner of partitions: a writer with its claims.
struct Owner {
    target: Target,
    store: Store,
}

impl Owner {
    fn new(db: &Database, sink: PostgresSink) -> Owner {
        let checked = check(sink.clone()).unwrap_or_else(|e| panic!("{e}"));
        let name = StageName::new(&db.schema, HashMap::from([("in".into(), uuid::Uuid::from_u128(7))]));
        let writer: Writer = writer_of(&checked, &sink, Some(name.clone()));
        let store = Store::new(name, checked.address.clone(), true, "test");
        Owner { target: Target { checked, writer }, store }
    }

    /// Claims partitions; answers where they are.
    fn claim(&self, partitions: &[i32]) -> Vec<i64> {
        let seeds: Vec<_> = partitions.iter().map(|p| seed(*p, false)).collect();
        let mut claims = self.store.claim(&seeds).unwrap().unwrap();
        claims.sort_by_key(|claim| claim.partition.partition);
        claims.into_iter().map(|claim| claim.position.0).collect()
    }

    /// Adds 10 for each partition, whose position moves by one.
    fn submit(&mut self, moves: &[(i32, i64)]) {
        let records: Vec<String> =
            moves.iter().map(|(p, from)| format!(r#"{{"event":"{p}-{from}","id":"p{p}","n":10}}"#)).collect();
        let advances = moves.iter().map(|(p, from)| Advance {
            partition: partition(*p),
            epoch: self.store.claimed(&partition(*p)).unwrap().epoch,
            from: Position(*from),
            to: Offset(*from).next(),
        });
        let moves = Moves { advances: advances.collect(), ..Moves::default() };
        let batch = self.target.batch(&records.iter().map(String::as_str).collect::<Vec<_>>());
        self.target.writer.submit_with(batch, moves);
    }

    fn add(&mut self, moves: &[(i32, i64)]) -> Applied {
        self.submit(moves);
        self.target.answer().unwrap_or_else(|e| panic!("{e}"))
    }
}

#[test]
fn an_owner_of_a_former_epoch_adds_nothing() {
    let Some(db) = Database::new("zombie") else { return };
    support::progress_tables(&db.url);
    db.session.execute(TABLE);
    let (mut old, mut new) = (Owner::new(&db, sink(&db)), Owner::new(&db, sink(&db)));
    assert_eq!(old.claim(&[0, 1]), [0, 0]);
    assert!(!old.add(&[(0, 0), (1, 0)]).fenced);
    assert_eq!(new.claim(&[1]), [1]);
    // A batch over both is refused whole, for one of them; the other is still its own.
    assert!(old.add(&[(0, 1), (1, 1)]).fenced);
    assert_eq!(db.table(), ["p0|10", "p1|10"]);
    assert!(!old.add(&[(0, 1)]).fenced);
    assert!(!new.add(&[(1, 1)]).fenced);
    assert_eq!(db.table(), ["p0|20", "p1|20"]);
    // A position that is not where the batch began: a rewind, or an attempt before this one.
    assert!(new.add(&[(1, 1)]).fenced);
    assert!(new.add(&[(1, 3)]).fenced);
    assert_eq!(db.table(), ["p0|20", "p1|20"]);
}

#[test]
fn a_fenced_transaction_leaves_nothing_in_the_ledger() {
    let Some(db) = Database::new("ledger_beside") else { return };
    support::progress_tables(&db.url);
    db.session.execute(&format!(
        "{TABLE}; CREATE TABLE seen (event_id uuid PRIMARY KEY, seen_at timestamptz NOT NULL DEFAULT now())"
    ));
    let ledger = Ledger { table: format!("{}.seen", db.schema), retention: Duration::from_secs(86_400) };
    let sink = PostgresSink { dedupe: Some(ledger), ..sink(&db) };
    let (mut old, mut new) = (Owner::new(&db, sink.clone()), Owner::new(&db, sink));
    let seen = || db.session.value("SELECT count(*) FROM seen");
    old.claim(&[0]);
    assert!(!old.add(&[(0, 0)]).fenced);
    assert_eq!(new.claim(&[0]), [1]);
    assert!(old.add(&[(0, 1)]).fenced);
    assert_eq!((db.table(), seen()), (vec!["p0|10".to_owned()], "1".to_owned()));
    let applied = new.add(&[(0, 1)]);
    assert_eq!((applied.fenced, applied.rows, applied.duplicates), (false, 1, 0));
    assert_eq!((db.table(), seen()), (vec!["p0|20".to_owned()], "2".to_owned()));
}

#[test]
fn a_sum_that_is_tried_again_moves_its_position_once() {
    let Some(db) = Database::new("tried_beside") else { return };
    support::progress_tables(&db.url);
    db.session.execute(TABLE);
    let mut owner = Owner::new(&db, sink(&db));
    owner.claim(&[0, 1]);
    for (at, sqlstate) in (0..).zip(PASSES) {
        db.refuses_twice(sqlstate);
        assert!(!owner.add(&[(0, at), (1, at)]).fenced, "{sqlstate}");
        assert_eq!(db.table(), [format!("p0|{}", (at + 1) * 10), format!("p1|{}", (at + 1) * 10)], "{sqlstate}");
    }
    assert_eq!(owner.target.writer.status().counts().retries, 2 * PASSES.len() as u64);
}

#[test]
fn a_claim_waits_for_the_former_owners_transaction_and_sees_its_end() {
    let Some(db) = Database::new("handover") else { return };
    support::progress_tables(&db.url);
    db.session.execute(&format!("{TABLE}; INSERT INTO t VALUES ('p0', 0)"));
    let (mut old, new) = (Owner::new(&db, sink(&db)), Owner::new(&db, sink(&db)));
    old.claim(&[0]);
    let holder = Session::open(&db.url);
    holder.execute(&format!("BEGIN; SELECT * FROM {}.t FOR UPDATE", db.schema));
    old.submit(&[(0, 0)]);
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'semel-test' AND wait_event_type = 'Lock' \
                   AND query LIKE '%PATTERN%'";
    let waits = |pattern: &str| db.session.value(&waiting.replace("PATTERN", pattern)) == "1";
    support::eventually(PATIENCE, "the old owner stands in its transaction", || waits(&db.schema));
    std::thread::scope(|scope| {
        let claim = scope.spawn(|| new.claim(&[0]));
        support::eventually(PATIENCE, "the claim waits", || waits("sink_offsets AS o (stage"));
        holder.execute("COMMIT");
        assert_eq!(claim.join().unwrap(), [1]);
    });
    assert!(!old.target.answer().unwrap().fenced);
    assert!(old.add(&[(0, 1)]).fenced);
    assert_eq!(db.table(), ["p0|10"]);
}

/// Case 18: no reasoning about what became of a COMMIT; the positions tell.
#[test]
fn a_lost_commit_adds_once_with_positions_beside_the_rows() {
    let Some(db) = Database::new("lost_beside") else { return };
    support::progress_tables(&db.url);
    db.session.execute(TABLE);
    for cut in [Cut::Before, Cut::After] {
        db.session.execute(&format!("TRUNCATE t; DELETE FROM semel.sink_offsets WHERE stage = '{}'", db.schema));
        let proxy = Proxy::to(&db.url, cut, 1);
        // The check and the claims go to the server itself.
        let mut owner = Owner::new(&db, sink(&db));
        let through = check(PostgresSink { url: proxy.url(&db.url), ..sink(&db) }).unwrap();
        owner.target.writer = writer_of(&through, &sink(&db), Some(owner.store.name.clone()));
        assert_eq!(owner.claim(&[0]), [0]);
        let fenced = owner.add(&[(0, 0)]).fenced;
        assert!(proxy.done());
        assert_eq!(fenced, cut == Cut::After, "what was committed already is found so");
        assert_eq!(owner.claim(&[0]), [1]);
        assert!(!owner.add(&[(0, 1)]).fenced);
        assert_eq!(db.table(), ["p0|20"], "{cut:?}");
    }
}

#[test]
fn letters_of_a_partition_that_was_given_up_are_left_to_its_next_owner() {
    let Some(db) = Database::new("given_up") else { return };
    support::progress_tables(&db.url);
    db.session.execute(TABLE);
    let (old, new) = (Owner::new(&db, sink(&db)), Owner::new(&db, sink(&db)));
    for p in 0..2 {
        db.session.execute(&format!(
            "INSERT INTO semel.dead_letters (stage, topic, topic_id, partition, record_offset, target_partition, \
             header_names, header_values) VALUES ('{}', 'in', '{}', {p}, 3, 0, '{{}}', '{{}}')",
            db.schema,
            uuid::Uuid::from_u128(7)
        ));
    }
    old.claim(&[0, 1]);
    old.store.give_up(&[partition(1)]);
    assert_eq!((old.store.has_letters(&partition(1)), old.store.claimed(&partition(1))), (false, None));
    new.claim(&[1]);
    let of = |owner: &Owner| owner.store.take_letters().into_iter().map(|l| l.origin.partition).collect::<Vec<_>>();
    assert_eq!((of(&old), of(&new)), (vec![partition(0)], vec![partition(1)]));
}

/// A thread that waits for ever for its claim would leave its group and never say why.
#[test]
fn a_claim_whose_commit_is_not_answered_is_asked_again() {
    let Some(db) = Database::new("silent") else { return };
    support::progress_tables(&db.url);
    db.session.execute(TABLE);
    let proxy = Proxy::to(&db.url, Cut::Silent, 1);
    let mut owner = Owner::new(&db, sink(&db));
    let address = Address::parse(&proxy.url(&db.url), "semel-test").unwrap();
    owner.store = Store::new(owner.store.name.clone(), address, true, "test");
    let why = owner.store.claim(&[seed(0, false)]).unwrap().unwrap_err();
    assert!(why.contains("no answer within 15 s"), "{why}");
    assert!(proxy.done());
    assert_eq!(owner.claim(&[0]), [0]);
    assert!(!owner.add(&[(0, 0)]).fenced);
    assert_eq!(db.table(), ["p0|10"]);
}

#[test]
fn positions_beside_the_rows_need_their_tables_and_allow_asynchronous_commits() {
    let Some(db) = Database::new("beside_checks") else { return };
    let name = format!("{}_db", db.schema);
    db.session.execute(&format!("CREATE DATABASE {name}"));
    let (place, old) = db.url.rsplit_once('/').unwrap();
    let parameters = old.split_once('?').map_or(String::new(), |(_, parameters)| format!("?{parameters}"));
    let url = format!("{place}/{name}{parameters}");
    let session = Session::open(&url);
    session.execute(&TABLE.replace("TABLE t", "TABLE public.t"));
    let sink = PostgresSink { url: url.clone(), table: "public.t".into(), ..sink(&db) };
    let failure = check(sink.clone()).unwrap_err();
    assert_eq!(failure.exit, Exit::Refused);
    let created: Vec<&str> = failure.message.split("\n\n").filter(|part| part.starts_with("CREATE")).collect();
    assert_eq!(created.len(), 2, "{failure}");
    created.iter().for_each(|create| session.execute(create));
    check(sink.clone()).unwrap();
    let separator = if parameters.is_empty() { '?' } else { '&' };
    let lazy = PostgresSink { url: format!("{url}{separator}options=-c%20synchronous_commit%3Doff"), ..sink.clone() };
    check(lazy).unwrap();
    session.execute("ALTER TABLE semel.dead_letters DROP COLUMN record_offset");
    let failure = check(sink).unwrap_err();
    assert!(failure.message.contains("table semel.sink_offsets or semel.dead_letters: 42703"), "{failure}");
    drop(session);
    support::eventually(Duration::from_secs(20), "the database goes", || {
        db.session.try_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).is_ok()
    });
}
