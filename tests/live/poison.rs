//! Events that Kafka will never take, under `--on-poison halt`: everything before is delivered and
//! confirmed, nothing behind is sent, and a restart tries that event alone.

use crate::check::{Committed, check};
use crate::kafka::Rec;
use crate::postgres::{Pg, Sql};
use crate::stage::{MINUTE, Stage};

pub const TINY: &str = "20000";
pub const HALT: [&str; 2] = ["--on-poison", "halt"];

/// A row whose payload does not compress below `bytes`.
pub fn ins(sql: &Sql, committed: &mut Committed, n: u32, key: &str, bytes: u32) {
    let id = format!("00000000-0000-4000-8000-{n:012}");
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values ('{id}', 't', '{key}', 'e', (
           select jsonb_build_object('n', {n}, 'noise', string_agg(md5(random()::text), ''))
           from generate_series(0, {bytes} / 32)))"
    ));
    committed.push(key, id);
}

/// As somebody runs it who wants no event set aside.
pub fn halting(pg: Pg) -> Stage<'static> {
    let mut stage = Stage::shared(pg);
    stage.run_args = HALT.map(str::to_owned).to_vec();
    stage
}

fn ids(records: &[Rec]) -> Vec<String> {
    records.iter().map(Rec::event_id).collect()
}

/// README: an event is refused by Kafka for good.
#[test]
fn an_event_that_is_too_large_halts_and_goes_first_when_there_is_room() {
    let stage = halting(Pg::V15);
    let sql = stage.init();
    let topic = stage.topic("t");
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", TINY)]);
    let mut committed = Committed::new();
    // Small ones of all keys around it, enough of them that they share its batches.
    for n in 0..60 {
        ins(&sql, &mut committed, n, &format!("k{}", n % 7), 100);
    }
    ins(&sql, &mut committed, 60, "k3", 100_000);
    for n in 61..120 {
        ins(&sql, &mut committed, n, &format!("k{}", n % 7), 100);
    }
    let culprit = "00000000-0000-4000-8000-000000000060";
    let mut after_first = 0;
    for round in 0..3 {
        let ended = stage.run_to_end().expect_code(4);
        assert!(ended.stderr.contains(culprit), "{}", ended.stderr);
        assert!(
            ended.stderr.contains("max.message.bytes"),
            "{}",
            ended.stderr
        );
        let records = stage.broker.read_all(&topic);
        let delivered = ids(&records);
        for n in 0..60 {
            assert!(delivered.contains(&format!("00000000-0000-4000-8000-{n:012}")));
        }
        assert!(!delivered.contains(&culprit.to_owned()));
        // Other partitions' batches were on their way when it was refused; its own has stopped.
        let own = records.iter().filter(|r| r.key_text() == "k3");
        assert_eq!(own.count(), (0..60).filter(|n| n % 7 == 3).count());
        if round == 0 {
            after_first = records.len();
        }
        assert_eq!(records.len(), after_first, "a restart sends it alone");
    }
    // Everything before it is confirmed, it and what is behind it is not.
    let pending = sql.one(&format!(
        "select count(*) from pg_logical_slot_peek_binary_changes('{}', null, null,
           'proto_version', '1', 'publication_names', '\"walrelay\"')
         where get_byte(data, 0) = ascii('I')",
        stage.db.slot()
    ));
    assert_eq!(pending, "60");
    assert_eq!(
        sql.one(&format!(
            "select count(*) from walrelay.relay r where to_jsonb(r)::text like '%{culprit}%'"
        )),
        "1",
        "the registry does not name the halted event"
    );

    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", "1000000")]);
    let mut relay = stage.run();
    stage.wait_count("t", 120, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    check(&stage.broker.read_all(&topic), &committed).assert_exactly_once();
}

#[test]
fn the_first_of_two_poisoned_events_is_named_whatever_the_broker_answers_first() {
    let stage = halting(Pg::V18);
    let sql = stage.init();
    let topic = stage.topic("t");
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", TINY)]);
    let mut committed = Committed::new();
    for n in 0..30 {
        // Two large ones of different partitions, small ones around them.
        let bytes = if n == 10 || n == 12 { 50_000 } else { 100 };
        ins(&sql, &mut committed, n, &format!("k{n}"), bytes);
    }
    let ended = stage.run_to_end().expect_code(4);
    assert!(ended.stderr.contains("-000000000010"), "{}", ended.stderr);
    let delivered = ids(&stage.broker.read_all(&topic));
    for n in 0..10 {
        assert!(delivered.contains(&format!("00000000-0000-4000-8000-{n:012}")));
    }
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", "1000000")]);
    let mut relay = stage.run();
    stage.wait_count("t", 30, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    check(&stage.broker.read_all(&topic), &committed).assert_exactly_once();
}

#[test]
fn a_tombstone_without_a_key_on_a_compacted_topic_does_not_pass() {
    let stage = halting(Pg::V15);
    let sql = stage.init();
    let topic = stage.topic("c");
    stage
        .broker
        .create_topic_with(&topic, 3, &[("cleanup.policy", "compact")]);
    sql.run("alter table outbox alter column aggregate_id drop not null");
    for (key, n) in [("'k'", 1), ("''", 2), ("null", 3), ("'k'", 4)] {
        sql.run(&format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values ('00000000-0000-4000-8000-{n:012}', 'c', {key}, 'e', null)"
        ));
    }
    let ended = stage.run_to_end().expect_code(4);
    assert!(ended.stderr.contains("-000000000003"), "{}", ended.stderr);
    assert_eq!(stage.broker.count(&topic), 2);
}
