//! Single requests between a job and its broker that are cut before they arrive, lose their answer, or come late.

use std::time::Duration;

use super::harness::{Job, Load, PATIENCE};
use super::kafka_proxy::{Fault, KafkaProxy, Kind};
use super::kill::{TABLE, TOPOLOGY, check, order};
use crate::support;

/// Longer than the transaction timeout of the job.
const LATE: Duration = Duration::from_secs(5);

#[test]
fn requests_that_are_cut_lose_their_answer_or_come_late_lose_and_double_nothing() {
    if !support::online("faults of single requests") {
        return;
    }
    let proxy = KafkaProxy::start();
    let cluster = support::private_cluster(&[("advertised.listeners", &format!("PLAINTEXT://{}", proxy.address))]);
    proxy.forward_to(&cluster.brokers);
    let job = Job::new(&cluster, "requests", 4);
    job.sql(TABLE);
    let text = TOPOLOGY.replace("[kafka]\n", "transaction_timeout = \"4s\"\nsession_timeout = \"6s\"\n[kafka]\n");
    let file = job.file(&text);
    let count = std::thread::scope(|scope| {
        let load = Load::start(scope, &job, 2_000, 4, order);
        let mut process = job.start(&file);
        let moved = |what: &str| {
            let table_group = format!("{}.orders_table", job.name);
            for (group, suffix) in [(&job.name, "in"), (&table_group, "out")] {
                let before = job.progress(group, suffix);
                support::eventually(PATIENCE, what, || job.progress(group, suffix) > before);
            }
        };
        moved("the job works");
        let kinds = [
            Kind::Produce,
            Kind::AddPartitionsToTxn,
            Kind::AddOffsetsToTxn,
            Kind::TxnOffsetCommit,
            Kind::EndTxn,
            Kind::Fetch,
            Kind::Heartbeat,
        ];
        for kind in kinds {
            for fault in [Fault::CutBefore, Fault::CutAfter, Fault::Delay(LATE)] {
                // Twice: once for each stage or producer, as it comes.
                for _ in 0..2 {
                    proxy.next(kind, fault);
                    support::eventually(PATIENCE, &format!("{fault:?} of {kind:?}"), || proxy.done());
                }
                moved(&format!("the job goes on after {fault:?} of {kind:?}"));
                assert!(process.is_running(), "{}", process.log());
            }
        }
        // These come at a start only.
        for kind in [Kind::InitProducerId, Kind::OffsetFetch, Kind::JoinGroup, Kind::SyncGroup, Kind::Metadata] {
            for fault in [Fault::CutBefore, Fault::CutAfter, Fault::Delay(Duration::from_secs(2))] {
                process.kill();
                proxy.next(kind, fault);
                process = job.start(&file);
                support::eventually(PATIENCE, &format!("{fault:?} of {kind:?}"), || proxy.done());
                moved(&format!("the job starts in spite of {fault:?} of {kind:?}"));
            }
        }
        process.stop();
        load.stop()
    });
    job.drain(&file);
    check(&job, count);
}
