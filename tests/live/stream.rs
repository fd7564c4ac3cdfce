//! The stream: the main path, huge transactions, restarts of Postgres, kills of the relay.

use std::time::Duration;

use crate::check::{Committed, check};
use crate::kafka::{Broker, Rec};
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg, Stop};
use crate::proc::eventually;
use crate::relay::Relay;
use crate::stage::{MINUTE, Stage};

/// The documented ceiling of resident memory, in bytes.
const RSS_MAX: u64 = 96 << 20;

/// Waits until all that was committed has arrived, and hands it to the judge.
fn judged(stage: &Stage<'_>, committed: &Committed) -> crate::check::Verdict {
    stage.wait_count("t", committed.len(), 2 * MINUTE);
    stage.wait_confirmed(MINUTE);
    check(&stage.broker.read_all(&stage.topic("t")), committed)
}

#[test]
fn committed_rows_become_records_and_the_slot_follows() {
    for pg in Pg::ALL {
        let stage = Stage::shared(pg);
        let sql = stage.init();
        let mut relay = stage.run();
        sql.run(
            r#"insert into outbox
                 (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
               values ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 't', 'order-1', 'created',
                       '{"total": 1.10}', '{"tenant": "x"}')"#,
        );
        let records = stage.records(1);
        let record = &records[0];
        assert_eq!(record.key_text(), "order-1");
        assert_eq!(record.value_text(), r#"{"total": 1.10}"#);
        assert_eq!(record.partition, 4);
        assert_eq!(record.event_id(), "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11");
        assert_eq!(record.header("event_type").as_deref(), Some("created"));
        assert_eq!(record.header("aggregate_type").as_deref(), Some("t"));
        assert_eq!(record.header("tenant").as_deref(), Some("x"));
        stage.wait_confirmed(Duration::from_secs(5));
        relay.stop();
        // A clean stop and a start repeat nothing.
        let mut relay = stage.run();
        sql.run(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (gen_random_uuid(), 't', 'order-1', 'paid', null)",
        );
        assert_eq!(stage.records(2).len(), 2);
        relay.stop();
        assert_eq!(stage.broker.count(&stage.topic("t")), 2);
    }
}

#[test]
fn ten_thousand_transactions_of_every_shape_arrive_once_and_in_order() {
    for pg in Pg::ALL {
        let stage = Stage::shared(pg);
        stage.init();
        let mut relay = stage.run();
        let load = Load::start(&stage.db, &Plan::new(8, Shape::Mixed).transactions(1250));
        let committed = load.finish();
        judged(&stage, &committed).assert_exactly_once();
        relay.stop();
    }
}

/// 500,000 rows in one transaction, of 1,000 keys.
fn half_a_million(stage: &Stage<'_>) -> Committed {
    stage.db.connect().run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         select ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid, 't',
                'k' || n % 1000, 'e', jsonb_build_object('n', n)
         from generate_series(1, 500000) n order by n",
    );
    let mut committed = Committed::new();
    for n in 1..=500_000 {
        committed.push(
            format!("k{}", n % 1000),
            format!("00000000-0000-4000-8000-{n:012}"),
        );
    }
    committed
}

#[test]
fn a_connection_cut_inside_a_huge_transaction_repeats_nothing() {
    let stage = Stage::shared(Pg::V15);
    stage.init();
    let committed = half_a_million(&stage);
    let before = stage.db.confirmed();
    let mut relay = stage.run();
    for reached in [50_000, 200_000] {
        stage.wait_count("t", reached, 2 * MINUTE);
        let cut = stage.db.connect().one(&format!(
            "select count(pg_terminate_backend(active_pid)) from pg_replication_slots
             where slot_name = '{}'",
            stage.db.slot()
        ));
        assert_eq!(cut, "1");
        assert_eq!(stage.db.confirmed(), before, "the slot moved inside of it");
    }
    judged(&stage, &committed).assert_exactly_once();
    let peak = relay.memory().peak;
    assert!(peak <= RSS_MAX, "peak RSS {} MB", peak >> 20);
    relay.stop();
}

#[test]
fn s04_a_huge_transaction_survives_a_kill_in_the_middle() {
    let stage = Stage::shared(Pg::V18);
    stage.init();
    let committed = half_a_million(&stage);
    let before = stage.db.confirmed();
    let mut relay = stage.run();
    stage.wait_count("t", 100_000, 2 * MINUTE);
    assert_eq!(stage.db.confirmed(), before, "the slot moved inside of it");
    let peak = relay.memory().peak;
    assert!(peak <= RSS_MAX, "peak RSS {} MB", peak >> 20);
    relay.kill9();
    let mut relay = stage.run();
    stage.wait_confirmed(3 * MINUTE);
    // What is delivered of it may be more than is read of a topic's end: that part may repeat.
    check(&stage.broker.read_all(&stage.topic("t")), &committed).assert_complete_and_ordered();
    let peak = relay.memory().peak;
    assert!(peak <= RSS_MAX, "peak RSS {} MB", peak >> 20);
    relay.stop();
}

#[test]
fn s01_an_idle_outbox_holds_no_wal() {
    let cluster = Cluster::start(Pg::V15);
    let mut stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    // A role that may write nothing: keepalives alone must move the slot.
    stage.user = "reader".to_owned();
    sql.run(
        "create role reader login replication;
         grant usage on schema walrelay to reader;
         grant select on all tables in schema walrelay to reader;
         grant select on outbox to reader;
         create table elsewhere (n int)",
    );
    let other = cluster.database();
    let (here, there) = (stage.db.connect(), other.connect());
    there.run("create table elsewhere (n int)");
    let mut relay = stage.run();
    stage.wait_confirmed(MINUTE);
    let slot = stage.db.slot();
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while std::time::Instant::now() < until {
        for sql in [&here, &there] {
            sql.run("insert into elsewhere values (1)");
        }
        let target = sql.one("select pg_current_wal_lsn()");
        eventually(
            Duration::from_secs(2),
            "the slot within two seconds",
            || {
                let reached = sql.one(&format!(
                    "select confirmed_flush_lsn >= '{target}' from pg_replication_slots
                 where slot_name = '{slot}'"
                ));
                (reached == "t").then_some(())
            },
        );
        relay.assert_alive();
    }
    assert_eq!(sql.one("select count(*) from outbox"), "0");
    relay.stop();
}

/// Restarts Postgres under load; nothing may come twice while the relay lives.
fn restarts_repeat_nothing(pg: Pg, ends: &[Stop]) {
    let cluster = Cluster::start(pg);
    let stage = Stage::on(&cluster, Broker::shared());
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(4, Shape::Mixed).a_second(400));
    for end in ends {
        let goal = load.committed() + 400;
        eventually(MINUTE, "writers go on", || {
            (load.committed() >= goal).then_some(())
        });
        cluster.restart(*end);
        relay.assert_alive();
    }
    let goal = load.committed() + 400;
    eventually(MINUTE, "writers go on", || {
        (load.committed() >= goal).then_some(())
    });
    let committed = load.stop();
    judged(&stage, &committed).assert_exactly_once();
    relay.stop();
}

#[test]
fn restarts_of_postgres_15_repeat_nothing() {
    restarts_repeat_nothing(
        Pg::V15,
        &[Stop::Fast, Stop::Immediate, Stop::Fast, Stop::Immediate],
    );
}

#[test]
fn restarts_of_postgres_18_repeat_nothing() {
    restarts_repeat_nothing(Pg::V18, &[Stop::Fast, Stop::Immediate]);
}

#[test]
fn s02_events_acked_one_by_one_do_not_come_again_after_a_restart() {
    let cluster = Cluster::start(Pg::V15);
    let stage = Stage::on(&cluster, Broker::shared());
    stage.init();
    let mut relay = stage.run();
    let mut total = 0;
    for end in [Stop::Fast, Stop::Immediate] {
        let sql = stage.db.connect();
        for _ in 0..20 {
            sql.run(
                "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
                 values (gen_random_uuid(), 't', 'k', 'e', '{}')",
            );
            total += 1;
            stage.records(total);
        }
        stage.wait_confirmed(Duration::from_secs(5));
        cluster.restart(end);
        relay.assert_alive();
        stage.wait_confirmed(MINUTE);
    }
    assert_eq!(stage.broker.count(&stage.topic("t")), total);
    relay.stop();
}

#[test]
fn s03_twenty_kills_lose_nothing_and_keep_the_order() {
    let stage = Stage::shared(Pg::V15);
    stage.init();
    let load = Load::start(&stage.db, &Plan::new(4, Shape::Mixed).a_second(600));
    for round in 0..20_usize {
        let mut relay = stage.run();
        let seen = stage.broker.count(&stage.topic("t"));
        // At another moment each time: after the first delivery, and a varying number of events on.
        let goal = load.committed() + 50 + round * 37 % 200;
        stage.wait_count("t", seen + 1, MINUTE);
        eventually(MINUTE, "writers go on", || {
            (load.committed() >= goal).then_some(())
        });
        relay.assert_alive();
        relay.kill9();
    }
    let committed = load.stop();
    let mut relay = stage.run();
    stage.wait_confirmed(2 * MINUTE);
    let verdict = check(&stage.broker.read_all(&stage.topic("t")), &committed);
    verdict.assert_complete_and_ordered();
    // What was in flight and a tenth of a second of confirmed but untold, each time.
    let most = 20 * 300;
    assert!(verdict.duplicates <= most, "{} repeats", verdict.duplicates);
    relay.stop();
}

#[test]
fn s03_sigterm_under_load_is_clean_and_repeats_nothing() {
    for pg in Pg::ALL {
        let stage = Stage::shared(pg);
        stage.init();
        let load = Load::start(&stage.db, &Plan::new(4, Shape::Single).a_second(800));
        for _ in 0..5 {
            let mut relay = stage.run();
            let seen = stage.broker.count(&stage.topic("t"));
            stage.wait_count("t", seen + 300, MINUTE);
            relay.stop();
            confirmed_is_all_that_was_delivered(&stage);
        }
        let committed = load.stop();
        let mut relay = stage.run();
        judged(&stage, &committed).assert_exactly_once();
        relay.stop();
    }
}

/// After a clean stop the slot stands behind every event that is in Kafka, and before every other.
fn confirmed_is_all_that_was_delivered(stage: &Stage<'_>) {
    let sql = stage.db.connect();
    // What the slot would send next, without moving it.
    let pending = sql.one(&format!(
        "select coalesce(string_agg(encode(data, 'escape'), ''), '')
         from pg_logical_slot_peek_binary_changes('{}', null, 2000,
           'proto_version', '1', 'publication_names', '\"walrelay\"')",
        stage.db.slot()
    ));
    let delivered = stage.broker.read_all(&stage.topic("t"));
    let last_of_keys: Vec<&Rec> = delivered.iter().rev().take(200).collect();
    for record in last_of_keys {
        let id = record.event_id();
        assert!(
            !pending.contains(&id),
            "{id} is delivered and not confirmed"
        );
    }
}

#[test]
fn a_server_rolled_back_to_a_copy_skips_nothing_of_its_new_history() {
    let cluster = Cluster::start(Pg::V15);
    let stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    let ins = |sql: &crate::postgres::Sql, name: &str| {
        sql.run(&format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (md5('{name}')::uuid, 't', 'k', 'e', '{{\"n\":\"{name}\"}}')"
        ));
    };
    let mut relay = stage.run();
    ins(&sql, "before");
    stage.records(1);
    stage.wait_confirmed(MINUTE);
    drop(sql);
    cluster.stop(Stop::Fast);
    let copy = cluster.copy_data();
    cluster.up();
    let sql = stage.db.connect();
    for n in 0..9 {
        ins(&sql, &format!("old-{n}"));
    }
    stage.records(10);
    stage.wait_confirmed(MINUTE);
    drop(sql);
    cluster.kill9();
    cluster.roll_back_to(&copy);
    cluster.up();
    // The same log positions and transaction ids again, with other rows.
    let sql = stage.db.connect();
    for n in 0..12 {
        ins(&sql, &format!("new-{n}"));
    }
    arrives_or_halts(&stage, &mut relay);
}

/// Policy `halt` stops at another history with exit 4; whatever it does, nothing is passed over:
/// what is confirmed is delivered.
fn arrives_or_halts(stage: &Stage<'_>, relay: &mut Relay) {
    let all_there = || {
        let values: Vec<String> = stage
            .broker
            .read_all(&stage.topic("t"))
            .iter()
            .map(Rec::value_text)
            .collect();
        (0..12).all(|n| values.contains(&format!("{{\"n\": \"new-{n}\"}}")))
    };
    let halted = eventually(
        MINUTE,
        "the new history arrives, or the relay halts",
        || {
            if !relay.is_alive() {
                return Some(true);
            }
            all_there().then_some(false)
        },
    );
    if halted {
        assert_eq!(relay.wait_exit(MINUTE), 4, "{}", relay.said());
        let pending = stage.db.connect().one(&format!(
            "select count(*) from pg_logical_slot_peek_binary_changes('{}', null, null,
               'proto_version', '1', 'publication_names', '\"walrelay\"')
             where get_byte(data, 0) = ascii('I')",
            stage.db.slot()
        ));
        let delivered = stage.broker.count(&stage.topic("t"));
        let pending: usize = pending.parse().expect("a number");
        assert!(
            all_there() || pending >= 12,
            "{pending} events wait in the slot, {delivered} records are delivered"
        );
    } else {
        relay.stop();
    }
}
