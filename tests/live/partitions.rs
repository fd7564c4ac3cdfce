//! A topic that grows under its events (case K09), or comes again with fewer partitions.

use crate::check::{Committed, check};
use crate::kafka::{Broker, Rec};
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg, Sql};
use crate::stage::{MINUTE, Stage};

/// In the order in which the broker wrote them (the topic stamps its records so): of one
/// millisecond, the old partitions first.
fn as_written(mut records: Vec<Rec>, before: i32) -> Vec<Rec> {
    records.sort_by_key(|r| (r.timestamp_ms, r.partition >= before, r.partition, r.offset));
    for (record, offset) in records.iter_mut().zip(0..) {
        (record.partition, record.offset) = (0, offset);
    }
    records
}

fn partitions_of(records: &[Rec], key: &str) -> Vec<i32> {
    let mut all: Vec<i32> = records
        .iter()
        .filter(|r| r.key_text() == key)
        .map(|r| r.partition)
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// README: partitions are added to a topic.
#[test]
fn k09_a_key_moves_to_a_new_partition_behind_all_its_earlier_events() {
    let mut stage = Stage::on(Cluster::shared(Pg::V17), Broker::shared());
    stage.try_init().expect_code(0);
    let topic = stage.topic("t");
    let stamped = [("message.timestamp.type", "LogAppendTime")];
    stage.broker.create_topic_with(&topic, 6, &stamped);
    stage.run_args = [
        "topic.metadata.refresh.interval.ms=1000",
        "statistics.interval.ms=500",
    ]
    .iter()
    .flat_map(|property| ["--kafka".to_owned(), (*property).to_owned()])
    .collect();
    let mut relay = stage.run();
    let sql = stage.db.connect();
    let mut named = Committed::new();
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Mixed).a_second(200));
    stage.wait_count("t", 200, MINUTE);
    orders(&sql, &mut named, 0);
    stage.broker.add_partitions(&topic, 12);
    relay.wait_for("that it has grown", MINUTE, |line| {
        line.level() == "INFO" && line.has("has grown from 6 to 12 partitions")
    });
    orders(&sql, &mut named, 1);
    let goal = load.committed() + 400;
    stage.wait_count("t", goal, MINUTE);
    let mut committed = load.stop();
    committed.merge(named);
    stage.wait_count("t", committed.len(), MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    let records = stage.broker.read_all(&topic);
    assert_eq!(partitions_of(&records, "order-1"), [4, 10]);
    assert_eq!(partitions_of(&records, "order-2"), [3]);
    check(&as_written(records, 6), &committed).assert_exactly_once();
}

/// Twenty events of each of the case's two keys.
fn orders(sql: &Sql, committed: &mut Committed, round: u32) {
    for n in 0..20 {
        for key in 1..=2 {
            let id = format!("0000000{key}-000{round}-4000-8000-{n:012}");
            sql.run(&format!(
                "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
                 values ('{id}', 't', 'order-{key}', 'e', '{n}')"
            ));
            committed.push(format!("order-{key}"), id);
        }
    }
}

/// README: a topic is deleted and made again.
#[test]
fn a_topic_made_again_with_other_partitions_gets_what_is_still_undelivered() {
    let stage = Stage::on(Cluster::shared(Pg::V16), Broker::shared());
    let sql = stage.init();
    let topic = stage.topic("t");
    let mut relay = stage.run();
    let mut committed = Committed::new();
    orders(&sql, &mut committed, 0);
    stage.wait_count("t", 40, MINUTE);
    stage.wait_confirmed(MINUTE);
    for (round, partitions) in [(1, 2), (2, 9)] {
        stage.broker.delete_topic(&topic);
        let mut committed = Committed::new();
        orders(&sql, &mut committed, round);
        relay.wait_for("the topic that is gone", MINUTE, |line| {
            line.level() == "ERROR" && line.has(&topic) && line.has("does not exist")
        });
        stage.broker.create_topic(&topic, partitions);
        stage.wait_count("t", 40, MINUTE);
        stage.wait_confirmed(MINUTE);
        check(&stage.broker.read_all(&topic), &committed).assert_exactly_once();
    }
    relay.stop();
}
