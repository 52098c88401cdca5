//! Which row stands in the table after which records.

use super::fixture::{Database, Summary, Target};

const TABLE: &str = "id text PRIMARY KEY, version int8 NOT NULL, amount int8, note text";

#[test]
fn a_key_many_times_in_a_batch_gives_the_same_table_at_every_batch_size() {
    let Some(db) = Database::new("same_key") else { return };
    let records = [
        r#"{"id":"a","version":1,"amount":1}"#,
        r#"{"id":"a","version":3,"amount":3}"#,
        r#"{"id":"a","version":2,"amount":2}"#,
        r#"{"id":"b","version":1,"amount":10}"#,
        r#"{"id":"b","version":1,"amount":10}"#,
    ];
    let mut target = db.target(TABLE);
    let summary = target.write(&records, 500);
    assert_eq!(summary, Summary { rows: 2, superseded: 2, stale: 1, ..Summary::default() });
    let expected = ["a|3|3|-", "b|1|10|-"];
    assert_eq!(db.table(), expected);

    db.session.execute("TRUNCATE t");
    let summary = target.write(&records, 1);
    assert_eq!(summary, Summary { rows: 3, stale: 2, ..Summary::default() });
    assert_eq!(db.table(), expected);
}

#[test]
fn of_a_version_with_two_contents_the_first_stays_and_the_other_is_counted() {
    let Some(db) = Database::new("ties") else { return };
    let (x, y) = (r#"{"id":"a","version":7,"note":"x"}"#, r#"{"id":"a","version":7,"note":"y"}"#);
    let mut target = db.target(TABLE);
    for (records, size, stays) in [([x, y, x, y], 4, "x"), ([y, x, y, x], 4, "y"), ([x, y, x, y], 1, "x")] {
        db.session.execute("TRUNCATE t");
        let summary = target.write(&records, size);
        assert_eq!(summary, Summary { rows: 1, stale: 1, ties: 2, ..Summary::default() });
        assert_eq!(db.table(), [format!("a|7|-|{stays}")]);
    }
}

#[test]
fn a_record_replaces_the_whole_row() {
    let Some(db) = Database::new("full_row") else { return };
    let mut target = db.target(TABLE);
    target.write(&[r#"{"id":"1","version":1,"note":"x"}"#], 1);
    target.write(&[r#"{"id":"1","version":2,"amount":5}"#], 1);
    assert_eq!(db.table(), ["1|2|5|-"]);
    target.write(&[r#"{"id":"1","version":3,"amount":null,"note":"z"}"#], 1);
    assert_eq!(db.table(), ["1|3|-|z"]);
}

#[test]
fn a_tombstone_keeps_late_older_records_out() {
    let Some(db) = Database::new("tombstones") else { return };
    db.session.execute(&format!("CREATE TABLE t ({TABLE}, deleted boolean NOT NULL)"));
    let mut sink = db.sink("t");
    sink.deleted = Some("deleted".into());
    let mut target = Target::new(sink).unwrap();
    target.write(&[r#"{"id":"a","version":1,"amount":1}"#, r#"{"id":"a","version":5,"deleted":true}"#], 1);
    let late = target.write(&[r#"{"id":"a","version":4,"amount":4}"#, r#"{"id":"new","version":2,"deleted":true}"#], 2);
    assert_eq!((late.rows, late.stale), (1, 1));
    assert_eq!(db.table(), ["a|5|-|-|t", "new|2|-|-|t"]);
    target.write(&[r#"{"id":"a","version":6,"amount":6}"#], 1);
    assert_eq!(db.table(), ["a|6|6|-|f", "new|2|-|-|t"]);
}

#[test]
fn twelve_columns_and_any_number_of_rows() {
    let Some(db) = Database::new("wide") else { return };
    let columns: Vec<String> = (0..10).map(|i| format!("c{i} int8")).collect();
    let mut target = db.target(&format!("id text PRIMARY KEY, version int8 NOT NULL, {}", columns.join(", ")));
    for count in [32767 / 12, 32767 / 12 + 1, 65535 / 12, 65535 / 12 + 1, 10_000] {
        db.session.execute("TRUNCATE t");
        let members: String = (0..10).map(|i| format!(",\"c{i}\":{i}")).collect();
        let records: Vec<String> = (0..count).map(|i| format!("{{\"id\":\"{i}\",\"version\":1{members}}}")).collect();
        let records: Vec<&str> = records.iter().map(String::as_str).collect();
        assert_eq!(target.write(&records, count).rows, count as u64);
        assert_eq!(db.session.value("SELECT count(*), sum(c9) FROM t"), format!("{count}|{}", 9 * count));
    }
}

#[test]
fn bad_rows_are_named_with_their_sqlstate_and_their_neighbours_are_written() {
    let Some(db) = Database::new("neighbours") else { return };
    let mut target = db.target(
        "id int4 PRIMARY KEY, version int8 NOT NULL, amount int8 CONSTRAINT positive CHECK (amount > 0), code text UNIQUE, \
         parent int4 REFERENCES t DEFERRABLE INITIALLY DEFERRED",
    );
    let record = |i: i32| match i {
        37 => format!(r#"{{"id":{i},"version":1,"amount":-1,"code":"{i}"}}"#),
        60 => format!(r#"{{"id":{i},"version":1,"amount":1,"code":"12"}}"#),
        61 => format!(r#"{{"id":{i},"version":1,"amount":1,"code":"{i}","parent":1000}}"#),
        _ => format!(r#"{{"id":{i},"version":1,"amount":1,"code":"{i}"}}"#),
    };
    let records: Vec<String> = (0..100).map(record).collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    for size in [100, 3, 1] {
        db.session.execute("TRUNCATE t");
        let summary = target.write(&records, size);
        assert_eq!(summary.rows, 97);
        let rejects: Vec<(usize, &str)> =
            summary.rejects.iter().map(|(at, m)| (*at, m.split_once(".t: ").unwrap().1)).collect();
        assert_eq!(
            rejects,
            [
                (37, "23514 new row for relation \"t\" violates check constraint \"positive\""),
                (
                    60,
                    "23505 duplicate key value violates unique constraint \"t_code_key\" (Key (code)=(12) already exists)"
                ),
                (
                    61,
                    "23503 insert or update on table \"t\" violates foreign key constraint \"t_parent_fkey\" \
                     (Key (parent)=(1000) is not present in table \"t\")"
                ),
            ]
        );
        assert_eq!(db.session.value("SELECT count(*) FROM t"), "97");
    }
}

#[test]
fn a_refused_winner_gives_way_to_the_next_version_of_its_key() {
    let Some(db) = Database::new("refold") else { return };
    let mut target = db.target("id text PRIMARY KEY, version int8 NOT NULL, amount int8 CHECK (amount < 100)");
    let records = [
        r#"{"id":"a","version":1,"amount":1}"#,
        r#"{"id":"a","version":4,"amount":400}"#,
        r#"{"id":"a","version":3,"amount":300}"#,
        r#"{"id":"a","version":2,"amount":2}"#,
        r#"{"id":"b","version":1,"amount":100}"#,
        r#"{"id":"c","version":1,"amount":7}"#,
    ];
    for size in [6, 3, 1] {
        db.session.execute("TRUNCATE t");
        let summary = target.write(&records, size);
        assert_eq!(summary.rejects.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [1, 2, 4], "batches of {size}");
        assert_eq!(db.table(), ["a|2|2", "c|1|7"], "batches of {size}");
    }
}

#[test]
fn a_row_that_waits_for_another_of_its_batch_is_no_poison() {
    let Some(db) = Database::new("conflicts") else { return };
    let mut target = db.target(
        "id int4 PRIMARY KEY, version int8 NOT NULL, email text UNIQUE, boss int4 REFERENCES t, \
         amount int4 CHECK (amount > 0)",
    );
    target.write(&[r#"{"id":9,"version":1,"email":"x"}"#], 1);
    // The poison row makes the batch go by halves; 1 takes the address that 9 gives up, 2 needs 8 to be there.
    let records = [
        r#"{"id":9,"version":2,"email":"y"}"#,
        r#"{"id":1,"version":1,"email":"x"}"#,
        r#"{"id":8,"version":1}"#,
        r#"{"id":2,"version":1,"boss":8}"#,
        r#"{"id":5,"version":1,"amount":0}"#,
    ];
    let summary = target.write(&records, 5);
    assert_eq!(summary.rejects.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [4]);
    assert_eq!(db.session.rows("SELECT id, email, boss FROM t ORDER BY id"), ["1|x|-", "2|-|8", "8|-|-", "9|y|-"]);
}

#[test]
fn any_cut_into_batches_gives_the_sequential_table() {
    let Some(db) = Database::new("model") else { return };
    db.session
        .execute("CREATE TABLE t (id text PRIMARY KEY, version int8 NOT NULL, amount int8 CHECK (amount < 1000))");
    let mut random = Random(20_240_601);
    let records: Vec<(u64, i64, u64)> = (0..1500)
        .map(|_| {
            let amount = if random.below(50) == 0 { 5000 } else { random.below(1000) };
            (random.below(300), random.below(40) as i64, amount)
        })
        .collect();
    let mut model = std::collections::BTreeMap::new();
    for (id, version, amount) in records.iter().filter(|(_, _, amount)| *amount < 1000) {
        let row = model.entry(id.to_string()).or_insert((*version, *amount));
        if row.0 < *version {
            *row = (*version, *amount);
        }
    }
    let expected: Vec<String> =
        model.iter().map(|(id, (version, amount))| format!("{id}|{version}|{amount}")).collect();
    let texts: Vec<String> = records
        .iter()
        .map(|(id, version, amount)| format!(r#"{{"id":"{id}","version":{version},"amount":{amount}}}"#))
        .collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    for (size, prepared) in [(1, true), (3, true), (500, true), (500, false), (1500, true)] {
        db.session.execute("TRUNCATE t");
        let mut target = Target::new(semel::topology::spec::PostgresSink { prepared, ..db.sink("t") }).unwrap();
        let mut summary = target.write(&texts, size);
        assert_eq!(db.session.rows("SELECT * FROM t ORDER BY id COLLATE \"C\""), expected, "batches of {size}");
        // The last tenth again, as after a crash.
        let again = target.write(&texts[1350..], size);
        summary.rejects.iter().for_each(|(at, message)| {
            assert_eq!(records[*at].2, 5000, "{message}");
        });
        summary.rows += summary.superseded + summary.stale + summary.ties + summary.rejects.len() as u64;
        assert_eq!(summary.rows, 1500, "each record counts once");
        assert_eq!(again.rows, 0);
        assert_eq!(db.session.rows("SELECT * FROM t ORDER BY id COLLATE \"C\""), expected, "batches of {size}, again");
    }
}

/// A generator with the same numbers every time (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }
}
