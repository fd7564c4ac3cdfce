//! Bad input, second part: a role with too few rights, a server that is set up for something else,
//! a slot that was moved, a broker that has no address.

use std::time::Duration;

use crate::kafka::Broker;
use crate::postgres::{Cluster, Pg, Stop};
use crate::proc::eventually;
use crate::refusals::says;
use crate::relay::Relay;
use crate::stage::{MINUTE, ON_GAP_HALT, Stage};

#[test]
fn a_role_that_may_not_write_the_registry_streams_with_one_warning() {
    let mut stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    stage.user = format!("reader_{}", stage.db.name);
    sql.run(&format!(
        "create role {0} login replication;
         grant usage on schema walrelay to {0};
         grant select on all tables in schema walrelay to {0};
         grant select on outbox to {0}",
        stage.user
    ));
    // Who may write nothing can park nothing.
    stage.run_args = vec!["--on-poison".to_owned(), "halt".to_owned()];
    let ins = || {
        sql.run(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (gen_random_uuid(), 't', 'k', 'e', '{}')",
        );
    };
    for total in [1, 2] {
        let mut relay = stage.run();
        ins();
        assert_eq!(stage.records(total).len(), total);
        stage.wait_confirmed(MINUTE);
        relay.stop();
        let warnings: Vec<_> = relay
            .lines()
            .into_iter()
            .filter(|line| line.level() == "WARN" && line.text("target").starts_with("walrelay"))
            .collect();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].has("may not write"), "{warnings:?}");
        assert!(warnings[0].has("remedy"), "{warnings:?}");
    }
    sql.run(&format!("drop owned by {0}; drop role {0}", stage.user));
}

#[test]
fn a_server_without_logical_wal_is_refused_by_run_too() {
    let cluster = Cluster::start(Pg::V15);
    let stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    sql.run(&format!(
        "select pg_drop_replication_slot('{}')",
        stage.db.slot()
    ));
    drop(sql);
    cluster.configure(&["wal_level = replica"]);
    cluster.restart(Stop::Fast);
    says(&stage.run_to_end(), 3, &["wal_level", "logical"]);
}

#[test]
fn a_broker_whose_name_does_not_resolve_is_named_and_waited_for() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k', 'e', '{}')",
    );
    let (url, slot) = (stage.db.url(), stage.db.slot());
    let mut relay = Relay::start(
        &[
            "run",
            "--database-url",
            &url,
            "--slot",
            &slot,
            "--brokers",
            "no-such-host.invalid:9092",
        ],
        &[],
    );
    relay.wait_for("the name", Duration::from_secs(20), |line| {
        line.level() != "DEBUG" && line.has("no-such-host.invalid") && line.has("resolve")
    });
    relay.assert_alive();
    relay.stop();
}

#[test]
fn a_slot_that_somebody_advanced_after_a_clean_stop_is_a_gap() {
    let mut stage = Stage::shared(Pg::V15);
    stage.run_args.extend(ON_GAP_HALT.map(str::to_owned));
    let sql = stage.init();
    let ins = || {
        sql.run(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (gen_random_uuid(), 't', 'k', 'e', '{}')",
        );
    };
    let mut relay = stage.run();
    ins();
    stage.records(1);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    ins();
    let slot = stage.db.slot();
    eventually(MINUTE, "the slot is free", || {
        let free = sql.one(&format!(
            "select not active from pg_replication_slots where slot_name = '{slot}'"
        ));
        (free == "t").then_some(())
    });
    sql.run(&format!(
        "select pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
    ));
    let words = ["confirmed_flush_lsn", "in no stream", "to go on from where"];
    stage.refused_by_both(4, &words);
    says(&stage.status(&["--http", "off"]), 4, &words);
    assert_eq!(stage.broker.count(&stage.topic("t")), 1);
    // What it says to do does it.
    let said = stage.run_to_end().stderr;
    sql.run(between(&said, "where the slot is: ", "; then start again"));
    stage.check(&[]).expect_code(0);
    ins();
    let mut relay = stage.run();
    stage.records(2);
    relay.stop();
}

#[test]
fn a_slot_that_was_made_anew_by_hand_is_a_gap_even_before_a_relay_ran() {
    let mut stage = Stage::shared(Pg::V17);
    stage.run_args.extend(ON_GAP_HALT.map(str::to_owned));
    let sql = stage.init();
    stage.check(&[]).expect_code(0);
    let slot = stage.db.slot();
    sql.run(&format!("select pg_drop_replication_slot('{slot}')"));
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k', 'e', '{}')",
    );
    sql.run(&format!(
        "select pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
    stage.refused_by_both(4, &["re-created the slot"]);
    says(
        &stage.status(&["--http", "off"]),
        4,
        &["re-created the slot"],
    );
}

/// What stands between two phrases of a message.
#[track_caller]
fn between<'a>(text: &'a str, before: &str, after: &str) -> &'a str {
    let found = text
        .split_once(before)
        .and_then(|(_, rest)| rest.split_once(after));
    found
        .unwrap_or_else(|| panic!("no {before:?} … {after:?} in {text}"))
        .0
}
