//! Servers of the test's own: one that speaks TLS, and one that goes away and comes back.

use semel::cluster::Cluster;
use semel::error::Exit;
use semel::topology::spec::PostgresSink;

use super::fixture::{Database, Session, Target, check};
use crate::support;

const CERTIFICATE: &str = include_str!("tls/server.pem");
const KEY: &str = include_str!("tls/server.key");

/// One server for the suite: bringing it up takes seconds.
#[test]
fn a_server_with_tls_that_restarts_and_crashes() {
    if !support::online("a_server_with_tls_that_restarts_and_crashes") {
        return;
    }
    let cluster = support::private_cluster(&[]);
    let db = Database::on(&cluster.database_url, "private");
    db.session.execute("CREATE TABLE t (id text PRIMARY KEY, version int8 NOT NULL, amount int8)");
    only_trusted_servers_are_written_to(&db);
    restarts_and_crashes_are_waited_out(&cluster, &db);
}

fn only_trusted_servers_are_written_to(db: &Database) {
    let file = |text: &str, name: &str| {
        let lines: Vec<String> = text.lines().map(|line| format!("'{line}'")).collect();
        let program = format!("umask 077; cat > {name}");
        db.session.execute(&format!("COPY (SELECT unnest(ARRAY[{}])) TO PROGRAM '{program}'", lines.join(",")));
    };
    file(CERTIFICATE, "semel.pem");
    file(KEY, "semel.key");
    for setting in ["ssl_cert_file = 'semel.pem'", "ssl_key_file = 'semel.key'", "ssl = on"] {
        db.session.execute(&format!("ALTER SYSTEM SET {setting}"));
    }
    db.session.rows("SELECT pg_reload_conf()");
    support::eventually(super::fixture::PATIENCE, "the server offers TLS", || {
        Session::open(&db.url).value("SHOW ssl") == "on"
    });

    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/postgres_sink/tls/ca.pem");
    let sink = |host: &str, parameters: &str| {
        let url = db.url.replace("127.0.0.1", host);
        PostgresSink { url: format!("{url}?{parameters}"), ..db.sink("t") }
    };
    let mut target = Target::new(sink("localhost", &format!("sslmode=verify-full&sslrootcert={root}"))).unwrap();
    assert_eq!(target.write(&[r#"{"id":"tls","version":1}"#], 1).rows, 1);
    let ssl = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE ssl AND \
               application_name = 'semel-test'";
    assert_eq!(db.session.value(ssl), "1");

    // Signed by nobody that the machine trusts, if it trusts anybody; of another name; no file.
    let unknown = check(sink("localhost", "sslmode=require")).unwrap_err();
    assert_eq!(unknown.exit, Exit::Refused, "{unknown}");
    assert!(["UnknownIssuer", "no trusted certificates"].iter().any(|w| unknown.message.contains(w)), "{unknown}");
    for (sink, words) in [
        (sink("127.0.0.1", &format!("sslrootcert={root}")), "certificate not valid for name \"127.0.0.1\""),
        (sink("localhost", "sslrootcert=/no/such/file.pem"), "sslrootcert /no/such/file.pem: "),
    ] {
        let failure = check(sink).unwrap_err();
        assert_eq!(failure.exit, Exit::Refused, "{failure}");
        assert!(failure.message.contains(words), "{failure}");
    }
}

fn restarts_and_crashes_are_waited_out(cluster: &Cluster, db: &Database) {
    let mut target = Target::new(db.sink("t")).unwrap();
    for (version, fault) in (1..).zip([Cluster::restart_postgres, |c: &Cluster| {
        c.kill_postgres()?;
        c.start_postgres()
    }]) {
        let record = |i: i32| format!(r#"{{"id":"{i}","version":{version},"amount":{i}}}"#);
        let written = std::thread::scope(|scope| {
            let restart = scope.spawn(|| fault(cluster).unwrap_or_else(|e| panic!("{e}")));
            let mut written = 0;
            // Through the whole of it, and once more afterwards.
            let mut after = false;
            while !after {
                after = restart.is_finished();
                let records: Vec<String> = (written..written + 100).map(record).collect();
                let records: Vec<&str> = records.iter().map(String::as_str).collect();
                let summary = target.write(&records, 100);
                assert_eq!((summary.rows + summary.stale, summary.ties), (100, 0));
                written += 100;
            }
            written
        });
        let session = Session::open(&db.url);
        let found = session.value(&format!(
            "SELECT count(*), sum(amount) FROM {}.t WHERE version = {version} AND amount IS NOT NULL",
            db.schema
        ));
        assert_eq!(found, format!("{written}|{}", i64::from(written) * i64::from(written - 1) / 2));
    }
    assert!(target.writer.status().counts().retries > 0);
}
