//! Rows that are in no stream: noticed, named, healed or refused.

use crate::check::{Committed, check};
use crate::kafka::Broker;
use crate::postgres::{Cluster, Pg, Sql};
use crate::relay::Relay;
use crate::stage::{MINUTE, Stage};

fn emit(sql: &Sql, committed: &mut Committed, from: u32, count: u32) {
    for n in from..from + count {
        let key = n % 7;
        let id = sql.one(&format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload) \
             values (gen_random_uuid(), 't', 'k{key}', 'made', '{{\"n\": {n}}}') returning event_id"
        ));
        committed.push(format!("k{key}"), id);
    }
}

/// S05.
#[test]
fn s05_a_slot_that_was_dropped_is_made_anew_and_its_rows_are_published_once() {
    for pg in [Pg::V15, Pg::V18] {
        let stage = Stage::on(Cluster::shared(pg), Broker::shared());
        let sql = stage.init();
        let mut committed = Committed::new();
        delivered_and_stopped(&stage, &sql, &mut committed, 20);
        dropped(&stage, &sql);
        emit(&sql, &mut committed, 20, 10);
        let mut relay = stage.run();
        relay.wait_for("the gap", MINUTE, |line| {
            line.level() == "ERROR" && line.has("gap: the slot is gone")
        });
        relay.wait_for("the heal's end", MINUTE, |line| line.has("healed: "));
        emit(&sql, &mut committed, 30, 10);
        each_arrived_once(&stage, relay, &committed, 40);
    }
}

/// A relay delivers the first rows, and ends in order.
fn delivered_and_stopped(stage: &Stage<'_>, sql: &Sql, committed: &mut Committed, rows: u32) {
    let mut relay = stage.run();
    emit(sql, committed, 0, rows);
    stage.wait_count("t", committed.len(), MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
}

fn each_arrived_once(stage: &Stage<'_>, mut relay: Relay, committed: &Committed, records: usize) {
    stage.wait_count("t", records, MINUTE);
    stage.wait_confirmed(MINUTE);
    check(&stage.broker.read_all(&stage.topic("t")), committed).assert_exactly_once();
    relay.stop();
}

fn dropped(stage: &Stage<'_>, sql: &Sql) {
    sql.run(&format!(
        "select pg_drop_replication_slot('{}')",
        stage.db.slot()
    ));
}

/// S05, the other policies.
#[test]
fn s05_halt_says_what_may_be_missing_and_skip_gives_it_up() {
    let mut stage = Stage::shared(Pg::V17);
    let sql = stage.init();
    let mut committed = Committed::new();
    delivered_and_stopped(&stage, &sql, &mut committed, 5);
    dropped(&stage, &sql);
    emit(&sql, &mut Committed::new(), 5, 10);
    stage.run_args = vec!["--on-gap".into(), "halt".into()];
    let ended = stage.run_to_end();
    assert_eq!(ended.code, 4, "{}", ended.stderr);
    assert!(ended.stderr.contains("is gone"), "{}", ended.stderr);
    stage.run_args = vec!["--on-gap".into(), "skip".into()];
    let mut relay = stage.run();
    relay.wait_for("what is given up", MINUTE, |line| {
        line.has("15 rows lie outside of the last checkpoint") && line.has("are given up")
    });
    relay.wait_for("the new slot", MINUTE, |line| line.has("the gap is behind"));
    emit(&sql, &mut committed, 15, 5);
    each_arrived_once(&stage, relay, &committed, 10);
}

/// S06: somebody makes the slot again, after the inserts.
#[test]
fn s06_a_slot_made_again_by_somebody_else_is_noticed_and_healed() {
    let stage = Stage::shared(Pg::V16);
    let sql = stage.init();
    let mut committed = Committed::new();
    delivered_and_stopped(&stage, &sql, &mut committed, 5);
    dropped(&stage, &sql);
    emit(&sql, &mut committed, 5, 10);
    sql.run(&format!(
        "select pg_create_logical_replication_slot('{}', 'pgoutput')",
        stage.db.slot()
    ));
    emit(&sql, &mut committed, 15, 5);
    let mut relay = stage.run();
    relay.wait_for("the heal's end", MINUTE, |line| line.has("healed: "));
    each_arrived_once(&stage, relay, &committed, 20);
}

/// S07: the publication is away while rows are written.
#[test]
fn s07_rows_written_without_a_publication_are_published_from_the_table() {
    for pg in [Pg::V15, Pg::V17, Pg::V18] {
        let stage = Stage::on(Cluster::shared(pg), Broker::shared());
        let sql = stage.init();
        let mut committed = Committed::new();
        delivered_and_stopped(&stage, &sql, &mut committed, 5);
        emit(&sql, &mut committed, 5, 1);
        let publication = sql.one("select pubname from pg_publication");
        sql.run(&format!("drop publication \"{publication}\""));
        emit(&sql, &mut committed, 6, 1);
        sql.run(&format!(
            "create publication \"{publication}\" for table only outbox \
             with (publish = 'insert', publish_via_partition_root = true)"
        ));
        emit(&sql, &mut committed, 7, 1);
        let mut relay = stage.run();
        stage.wait_count("t", 8, MINUTE);
        relay.wait_for("the heal's end", MINUTE, |line| line.has("healed: "));
        emit(&sql, &mut committed, 8, 3);
        each_arrived_once(&stage, relay, &committed, 11);
    }
}

/// kill -9 anywhere in a heal: it goes on, and nothing is lost.
#[test]
fn a_heal_that_is_killed_goes_on() {
    let stage = Stage::shared(Pg::V17);
    let sql = stage.init();
    let mut committed = Committed::new();
    delivered_and_stopped(&stage, &sql, &mut committed, 5);
    dropped(&stage, &sql);
    let rows = sql.rows(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload) \
         select gen_random_uuid(), 't', 'k' || n % 7, 'made', jsonb_build_object('n', n) \
         from generate_series(5, 30004) n returning aggregate_id, event_id::text",
    );
    for row in rows {
        let text = |column: usize| row[column].clone().expect("not null");
        committed.push(text(0), text(1));
    }
    for step in 1..=6 {
        let mut relay = stage.run();
        let goal = (5 + step * 3_000).min(committed.len());
        stage.wait_count("t", goal, MINUTE);
        relay.kill9();
    }
    let mut relay = stage.run();
    relay.wait_for("the heal's end", MINUTE, |line| line.has("healed: "));
    emit(&sql, &mut committed, 30_005, 5);
    each_arrived_once(&stage, relay, &committed, committed.len());
}

/// Nobody has asked for a whole table to be published again.
#[test]
fn more_rows_than_the_topics_ends_can_tell_are_not_healed_unasked() {
    let mut stage = Stage::shared(Pg::V16);
    let sql = stage.init();
    dropped(&stage, &sql);
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload) \
         select gen_random_uuid(), 't', 'k' || n % 7, 'made', '1' from generate_series(1, 100001) n",
    );
    for _ in 0..2 {
        let ended = stage.run_to_end();
        assert_eq!(ended.code, 4, "{}", ended.stderr);
        let said = "100001 rows lie outside of the last checkpoint";
        assert!(ended.stderr.contains(said), "{}", ended.stderr);
        let last = ended.stderr.lines().last().unwrap_or_default();
        assert!(last.contains("--on-gap heal"), "{last}");
    }
    stage.run_args = vec!["--on-gap".into(), "heal".into()];
    let mut relay = stage.run();
    stage.wait_count("t", 100_001, 2 * MINUTE);
    relay.stop();
}
