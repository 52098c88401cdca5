//! Membership of consumer groups, on a real broker.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use semel::commit::metadata::TopicIds;
use semel::error::Disposition;
use semel::kafka::{Code, Consumer, ConsumerOptions, Group, Polled};
use semel::record::{Position, TopicPartition};

use crate::job::harness::is_busy;
use crate::kafka_support::*;
use crate::support::{eventually, unique};

#[test]
fn a_member_has_a_generation_only_after_it_joined() {
    if !online() {
        return;
    }
    let topic = Topic::new("generation", 1);
    let group = unique("group");
    let consumer = Consumer::new(&connection(), &ConsumerOptions::new(&group)).unwrap();
    let handle = consumer.group();
    let before = handle.metadata().unwrap();
    assert_eq!((before.generation(), before.member_id(), before.is_member()), (-1, "", false));
    consumer.subscribe(&[&topic.name]).unwrap();
    eventually(SECONDS, "a member", || {
        let _ = consumer.poll(Duration::from_millis(10));
        handle.metadata().unwrap().is_member()
    });
    consumer.close(SECONDS);
    assert!(handle.metadata().is_none());
}

#[test]
fn a_stale_generation_aborts_and_waits_for_the_group() {
    if !online() {
        return;
    }
    let topic = Topic::new("stale", 1);
    let reader = Reader::new(&topic, &[(0, 0)]);
    let producer = transactional(&unique("id"), &[topic.target()]);
    let metadata = reader.consumer.group().metadata().unwrap();
    // The group is empty from here on, so that the member is unknown.
    reader.consumer.close(SECONDS);
    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"x"), &[]);
    let error = producer
        .send_offsets(&[(topic.partition(0), Position(1))], &TopicIds::default(), &metadata, SECONDS)
        .unwrap_err();
    assert_eq!(error.disposition(), Disposition::AbortTxn { rejoin: true }, "{error}");
    producer.abort(SECONDS).unwrap();
}

/// A client that is destroyed over an open question of its group never ends, and its thread never rests.
#[test]
fn a_fenced_member_ends_though_it_owes_the_group_an_answer() {
    if !online() {
        return;
    }
    let topic = Topic::new("owing", 2);
    let group = unique("group");
    let member = || {
        let options = ConsumerOptions { instance_id: Some("one"), ..ConsumerOptions::new(&group) };
        let consumer = Consumer::new(&connection(), &options).unwrap();
        consumer.subscribe(&[&topic.name]).unwrap();
        consumer
    };
    let asked = |consumer: &mut Consumer| {
        poll_until(consumer, |c| match c.poll(Duration::from_millis(100)) {
            Polled::Assign(_) => Some(()),
            _ => None,
        });
    };
    let mut first = member();
    asked(&mut first);
    let mut second = member();
    asked(&mut second);
    poll_until(&mut first, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Failed(error) if error.is_fatal() => Some(()),
        _ => None,
    });
    drop(first);
    // Nor does one that is in the group and owes an answer.
    drop(second);
    eventually(SECONDS, "the clients rest", || !is_busy(std::process::id(), "rdk:main"));
}

#[test]
fn a_cooperative_rebalance_moves_only_what_it_must() {
    if !online() {
        return;
    }
    let topic = Topic::new("cooperative", 4);
    let group = unique("group");
    let member = || {
        let consumer = Consumer::new(&connection(), &ConsumerOptions::new(&group)).unwrap();
        consumer.subscribe(&[&topic.name]).unwrap();
        consumer
    };
    let mut first = member();
    let given = poll_until(&mut first, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Assign(partitions) => Some(partitions),
        _ => None,
    });
    assert!(first.is_cooperative());
    assert_eq!(given.len(), 4);
    // Three have a position, the fourth is added from the loop.
    let at_start = |p: &[TopicPartition]| p.iter().map(|p| (p.clone(), Position(0))).collect::<Vec<_>>();
    first.assign(&at_start(&given[..3])).unwrap();
    assert_eq!(first.assignment().len(), 3);
    first.add(&at_start(&given[3..])).unwrap();
    assert_eq!(first.assignment().len(), 4);

    let mut second = member();
    let mut held = BTreeSet::new();
    let mut revoked = Vec::new();
    poll_until(&mut second, |second| {
        match first.poll(Duration::from_millis(20)) {
            Polled::Revoke { partitions, lost } => {
                assert!(!lost);
                first.unassign(&partitions).unwrap();
                revoked.extend(partitions);
            }
            Polled::Assign(partitions) => first.assign(&at_start(&partitions)).unwrap(),
            Polled::Nothing => {}
            other => panic!("{other:?}"),
        }
        match second.poll(Duration::from_millis(20)) {
            Polled::Assign(partitions) => {
                held.extend(partitions.clone());
                second.assign(&at_start(&partitions)).unwrap();
            }
            Polled::Nothing => {}
            other => panic!("{other:?}"),
        }
        (held.len() == 2).then_some(())
    });
    assert_eq!(revoked.iter().cloned().collect::<BTreeSet<_>>(), held);
    assert_eq!(first.assignment().len(), 2);
    // A dynamic member leaves when it closes: the other has its partitions back at once.
    second.close(SECONDS);
    let back = poll_until(&mut first, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Assign(partitions) if !partitions.is_empty() => Some(partitions),
        Polled::Assign(_) => {
            c.assign(&[]).unwrap();
            None
        }
        _ => None,
    });
    assert_eq!(back.into_iter().collect::<BTreeSet<_>>(), held);
}

#[test]
fn a_member_that_polls_too_late_has_lost_its_partitions() {
    if !online() {
        return;
    }
    let topic = Topic::new("late", 1);
    let group = unique("group");
    let options = ConsumerOptions {
        session_timeout: Duration::from_secs(6),
        max_poll_interval: Duration::from_secs(6),
        ..ConsumerOptions::new(&group)
    };
    let mut consumer = Consumer::new(&connection(), &options).unwrap();
    consumer.subscribe(&[&topic.name]).unwrap();
    poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(50)) {
        Polled::Assign(_) => c.assign(&[(topic.partition(0), Position(0))]).ok(),
        _ => None,
    });
    let membership = consumer.group();
    eventually(SECONDS, "not a member any more", || !membership.metadata().unwrap().is_member());
    let error = poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(50)) {
        Polled::Failed(error) => Some(error),
        _ => None,
    });
    assert_eq!(error.disposition(), Disposition::Retry, "{error}");
    assert!(error.to_string().contains("maximum poll interval (6000ms) exceeded"), "{error}");
    let (partitions, lost) = poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(50)) {
        Polled::Revoke { partitions, lost } => Some((partitions, lost)),
        _ => None,
    });
    assert_eq!((&partitions[..], lost), (&[topic.partition(0)][..], true));
    consumer.unassign(&partitions).unwrap();
    assert_eq!(consumer.assignment(), []);
    // It polls again, so it joins again.
    poll_until(&mut consumer, |c| matches!(c.poll(Duration::from_millis(50)), Polled::Assign(_)).then_some(()));
    assert!(membership.metadata().unwrap().is_member());
}

#[test]
fn an_eager_assignor_takes_additions_too() {
    if !online() {
        return;
    }
    let topic = Topic::new("eager", 2);
    let producer = plain(&[topic.target()]);
    for partition in [0, 0, 1] {
        send(&producer, partition, None, Some(format!("p{partition}").as_bytes()), &[]);
    }
    producer.flush(SECONDS).unwrap();
    let mut connection = connection();
    connection.properties.insert("partition.assignment.strategy".into(), "range".into());
    let group = unique("group");
    let mut consumer = Consumer::new(&connection, &ConsumerOptions::new(&group)).unwrap();
    consumer.subscribe(&[&topic.name]).unwrap();
    poll_until(&mut consumer, |c| matches!(c.poll(Duration::from_millis(100)), Polled::Assign(_)).then_some(()));
    assert!(!consumer.is_cooperative());
    consumer.assign(&[(topic.partition(0), Position(0))]).unwrap();
    let next = |c: &mut Consumer| match c.poll(Duration::from_millis(100)) {
        Polled::Record(message) => Some((message.partition(), message.offset().0)),
        Polled::Nothing => None,
        other => panic!("{other:?}"),
    };
    assert_eq!(poll_until(&mut consumer, next), (0, 0));
    consumer.add(&[(topic.partition(1), Position(0))]).unwrap();
    let rest = BTreeSet::from([poll_until(&mut consumer, next), poll_until(&mut consumer, next)]);
    assert_eq!(rest, BTreeSet::from([(0, 1), (1, 0)]));
    consumer.unassign(&[topic.partition(0), topic.partition(1)]).unwrap();
    assert_eq!(consumer.assignment(), []);
}

#[test]
fn a_static_member_that_closes_has_its_partitions_back() {
    if !online() {
        return;
    }
    let topic = Topic::new("static", 2);
    let group = unique("group");
    let member = |instance| {
        let options = ConsumerOptions { instance_id: Some(instance), ..ConsumerOptions::new(&group) };
        let consumer = Consumer::new(&connection(), &options).unwrap();
        consumer.subscribe(&[&topic.name]).unwrap();
        consumer
    };
    let assigned = |consumer: &mut Consumer| {
        let partitions = poll_until(consumer, |c| match c.poll(Duration::from_millis(100)) {
            Polled::Assign(partitions) => Some(partitions),
            _ => None,
        });
        let positions: Vec<_> = partitions.iter().map(|p| (p.clone(), Position(0))).collect();
        consumer.assign(&positions).unwrap();
        partitions
    };
    let mut first = member("a");
    assert_eq!(assigned(&mut first).len(), 2);
    let generation = first.group().metadata().unwrap().generation();
    let start = Instant::now();
    first.close(SECONDS);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    let mut again = member("a");
    assert_eq!(assigned(&mut again).len(), 2);
    // It had not left: the group did not even change its generation.
    assert_eq!(again.group().metadata().unwrap().generation(), generation);
    let found = topic.admin.assignments(&group).unwrap().expect("the members decide");
    assert!(found.stable);
    let id = again.group().metadata().unwrap().member_id().to_owned();
    let mut read: Vec<_> = found.members.into_iter().map(|member| (member.id, member.partitions)).collect();
    read.iter_mut().for_each(|(_, partitions)| partitions.sort());
    assert_eq!(read, [(id, vec![topic.partition(0), topic.partition(1)])]);
    assert_eq!(topic.admin.assignments(&unique("nobody")).unwrap(), Some(Group::default()));

    // A twin takes the name over; the older one learns that it is fenced.
    let mut twin = member("a");
    assigned(&mut twin);
    let error = poll_until(&mut again, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Failed(error) => Some(error),
        _ => None,
    });
    assert!(error.is_fenced_instance(), "{error}");
    assert_eq!(error.disposition(), Disposition::Rebuild, "{error}");
}

/// A request that was on its way while we joined anew names a member that is no more: no twin, but a batch to redo.
#[test]
fn who_a_static_member_was_before_it_joined_anew_is_no_twin() {
    if !online() {
        return;
    }
    let topic = Topic::new("static-again", 1);
    let group = unique("group");
    let options = ConsumerOptions { instance_id: Some("a"), ..ConsumerOptions::new(&group) };
    let mut member = Consumer::new(&connection(), &options).unwrap();
    member.subscribe(&[&topic.name]).unwrap();
    let joined = |member: &mut Consumer, not: &str| {
        poll_until(member, |c| {
            match c.poll(Duration::from_millis(100)) {
                Polled::Assign(partitions) => {
                    let start: Vec<_> = partitions.into_iter().map(|p| (p, Position(0))).collect();
                    c.assign(&start).unwrap();
                }
                Polled::Revoke { partitions, .. } => c.unassign(&partitions).unwrap(),
                Polled::Failed(error) => panic!("{error}"),
                _ => {}
            }
            c.group().metadata().filter(|m| m.is_member() && m.member_id() != not && !c.assignment().is_empty())
        })
    };
    let before = joined(&mut member, "");
    member.group().unsubscribe().unwrap();
    poll_until(&mut member, |c| {
        if let Polled::Revoke { partitions, .. } = c.poll(Duration::from_millis(100)) {
            c.unassign(&partitions).unwrap();
        }
        c.group().metadata().is_none_or(|m| !m.is_member()).then_some(())
    });
    member.subscribe(&[&topic.name]).unwrap();
    let now = joined(&mut member, before.member_id());

    let producer = transactional(&unique("id"), &[topic.target()]);
    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"x"), &[]);
    let positions = [(topic.partition(0), Position(1))];
    let error = producer.send_offsets(&positions, &TopicIds::default(), &before, SECONDS).unwrap_err();
    assert_eq!(error.code(), Code::FENCED_INSTANCE, "{error}");
    assert_eq!(error.disposition(), Disposition::AbortTxn { rejoin: true });
    producer.abort(SECONDS).unwrap();
    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"x"), &[]);
    producer.send_offsets(&positions, &TopicIds::default(), &now, SECONDS).unwrap();
    producer.commit(SECONDS).unwrap();
}

#[test]
fn the_new_group_protocol_works_too() {
    if !online() {
        return;
    }
    let topic = Topic::new("kip-848", 1);
    let mut connection = connection();
    connection.properties.insert("group.protocol".into(), "consumer".into());
    let group = unique("group");
    let mut consumer = Consumer::new(&connection, &ConsumerOptions::new(&group)).unwrap();
    consumer.subscribe(&[&topic.name]).unwrap();
    let partitions = poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Assign(partitions) if !partitions.is_empty() => Some(partitions),
        Polled::Assign(_) => {
            c.assign(&[]).unwrap();
            None
        }
        _ => None,
    });
    assert_eq!(partitions, [topic.partition(0)]);
    assert!(consumer.is_cooperative());
    assert_eq!(topic.admin.assignments(&group).unwrap(), None);
    let members: Vec<_> =
        topic.admin.group(&group).unwrap().members.into_iter().map(|member| member.partitions).collect();
    assert_eq!(members, std::slice::from_ref(&partitions));
    assert_eq!(consumer.committed(&partitions, SECONDS).unwrap(), [(topic.partition(0), Ok(None))]);
    consumer.assign(&[(topic.partition(0), Position(0))]).unwrap();
    let producer = transactional(&unique("id"), &[topic.target()]);
    producer.begin().unwrap();
    send(&producer, 0, None, Some(b"x"), &[]);
    let metadata = consumer.group().metadata().unwrap();
    assert!(metadata.is_member());
    producer.send_offsets(&[(topic.partition(0), Position(1))], &TopicIds::default(), &metadata, SECONDS).unwrap();
    producer.commit(SECONDS).unwrap();
    assert_eq!(consumer.committed(&partitions, SECONDS).unwrap(), [(topic.partition(0), Ok(Some(Position(1))))]);
    consumer.close(SECONDS);
}

#[test]
fn under_the_new_protocol_it_is_the_newcomer_that_is_refused() {
    if !online() {
        return;
    }
    let topic = Topic::new("kip-848-twin", 1);
    let mut connection = connection();
    connection.properties.insert("group.protocol".into(), "consumer".into());
    let group = unique("group");
    let options = ConsumerOptions { instance_id: Some("a"), ..ConsumerOptions::new(&group) };
    let join = || {
        let consumer = Consumer::new(&connection, &options).unwrap();
        consumer.subscribe(&[&topic.name]).unwrap();
        consumer
    };
    let mut old = join();
    poll_until(&mut old, |c| matches!(c.poll(Duration::from_millis(100)), Polled::Assign(_)).then_some(()));
    let error = poll_until(&mut join(), |c| match c.poll(Duration::from_millis(100)) {
        Polled::Failed(error) => Some(error),
        _ => None,
    });
    assert!(error.is_unreleased_instance() && error.is_fatal(), "{error:?}");
    assert_eq!(error.disposition(), Disposition::Rebuild);
}

#[test]
fn positions_are_committed_without_a_transaction() {
    if !online() {
        return;
    }
    let topic = Topic::new("plain-commit", 1);
    let reader = Reader::new(&topic, &[(0, 0)]);
    let positions = [(topic.partition(0), Position(5))];
    reader.consumer.group().commit(&positions, &TopicIds::default(), SECONDS).unwrap();
    assert_eq!(
        reader.consumer.committed(&[topic.partition(0)], SECONDS).unwrap(),
        [(topic.partition(0), Ok(Some(Position(5))))]
    );
    let handle = reader.consumer.group();
    reader.consumer.close(SECONDS);
    assert!(handle.commit(&positions, &TopicIds::default(), SECONDS).unwrap_err().to_string().contains("closed"));
}

#[test]
fn a_paused_partition_delivers_nothing_until_it_is_resumed() {
    if !online() {
        return;
    }
    let topic = Topic::new("pause", 1);
    let producer = plain(&[topic.target()]);
    let reader = Reader::new(&topic, &[(0, 0)]);
    reader.consumer.pause(&[topic.partition(0)]);
    send(&producer, 0, None, Some(b"x"), &[]);
    producer.flush(SECONDS).unwrap();
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        assert!(matches!(reader.consumer.poll(Duration::from_millis(50)), Polled::Nothing));
    }
    reader.consumer.resume(&[topic.partition(0)]);
    assert_eq!(reader.values(1), ["x"]);
}

#[test]
fn the_end_of_a_partition_is_reported_when_asked_for() {
    if !online() {
        return;
    }
    let topic = Topic::new("eof", 1);
    let group = unique("group");
    let options = ConsumerOptions { end_of_partition: true, ..ConsumerOptions::new(&group) };
    let mut consumer = Consumer::new(&connection(), &options).unwrap();
    consumer.subscribe(&[&topic.name]).unwrap();
    let end = poll_until(&mut consumer, |c| match c.poll(Duration::from_millis(100)) {
        Polled::Assign(_) => {
            c.assign(&[(topic.partition(0), Position(0))]).unwrap();
            None
        }
        Polled::EndOfPartition(partition, _) => Some(partition),
        _ => None,
    });
    assert_eq!(end, topic.partition(0));
}

#[test]
fn a_waiting_poll_can_be_woken() {
    if !online() {
        return;
    }
    let topic = Topic::new("wake", 1);
    let reader = Reader::new(&topic, &[(0, 0)]);
    let group = reader.consumer.group();
    let woken = AtomicBool::new(false);
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !woken.load(Ordering::Relaxed) {
                group.wake();
            }
        });
        let polled = reader.consumer.poll(SECONDS);
        woken.store(true, Ordering::Relaxed);
        assert!(matches!(polled, Polled::Nothing));
    });
    assert!(start.elapsed() < SECONDS / 2, "{:?}", start.elapsed());
}
