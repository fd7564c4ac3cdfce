//! The odd and the large: names that want quotes, rows beyond every limit, a publication that goes
//! away under the stream, a slot that lost its WAL, clocks that the broker does not like.

use std::fs;
use std::time::Duration;

use rustix::process::Signal;

use crate::check::{Committed, check};
use crate::kafka::{Broker, Rec};
use crate::load::{Load, Plan, Shape};
use crate::poison::halting;
use crate::postgres::{Cluster, Pg, Sql};
use crate::proc::{self, eventually};
use crate::relay::{Relay, run_to_end};
use crate::stage::{MINUTE, ON_GAP_HALT, Stage};

fn ins(sql: &Sql, key: &str, payload: &str) {
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', '{key}', 'e', {payload})"
    ));
}

/// Inserts that the slot would still send.
fn pending(stage: &Stage<'_>) -> usize {
    let count = stage.db.connect().one(&format!(
        "select count(*) from pg_logical_slot_peek_binary_changes('{}', null, null,
           'proto_version', '1', 'publication_names', '\"walrelay\"')
         where get_byte(data, 0) = ascii('I')",
        stage.db.slot()
    ));
    count.parse().expect("a number")
}

#[test]
fn names_that_want_quotes_work_in_every_setting() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        let broker = Broker::shared();
        db.connect().run("create schema \"Sales\"");
        let topic = format!("{}.Order", db.name);
        broker.create_topic(&topic, 2);
        let dir = proc::dir("config");
        let file = dir.join("walrelay.toml");
        let text = format!(
            "database_url = \"{}\"\ntable = '\"Sales\".\"Out \"\"box\"'\nslot = \"{}\"\n\
             publication = '\"My Pub, 1\"'\nbrokers = \"{}\"\n\
             topic = \"{}.{{aggregate_type}}\"\n",
            db.url(),
            db.slot(),
            broker.bootstrap(),
            db.name
        );
        fs::write(&file, text).expect("the directory is ours");
        let file = file.to_string_lossy().into_owned();
        // A file that holds settings of `run` as well serves `init`.
        run_to_end(&["init", "--config", &file], &[], MINUTE).expect_code(0);
        run_to_end(&["init", "--config", &file], &[], MINUTE).expect_code(0);
        let mut relay = Relay::start(&["run", "--config", &file], &[]);
        db.connect().run(
            r#"insert into "Sales"."Out ""box"
                 (event_id, aggregate_type, aggregate_id, event_type, payload)
               values (gen_random_uuid(), 'Order', 'k', 'e', '{}')"#,
        );
        broker.wait_count_while(&topic, 1, MINUTE, || {
            assert!(!proc::ended_unnoticed(relay.pid()), "{}", relay.said());
        });
        relay.stop();
    }
}

#[test]
fn events_of_megabytes_pass_where_the_topic_takes_them() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let topic = stage.topic("t");
    sql.run("alter table outbox alter column payload type text");
    // The broker judges the compressed batch: far above its limit as it stands, far below packed.
    ins(&sql, "a", "repeat('a', 2000000)");
    let mut relay = stage.run();
    stage.wait_count("t", 1, MINUTE);
    relay.stop();
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", "9000000")]);
    // And one that no codec makes smaller than the default limit.
    ins(
        &sql,
        "a",
        "(select string_agg(md5(random()::text), '') from generate_series(1, 160000))",
    );
    ins(&sql, "a", "'small'");
    let mut relay = stage.run();
    let records = stage.records(3);
    relay.stop();
    let sizes: Vec<usize> = records.iter().map(|r| r.value_text().len()).collect();
    assert_eq!(sizes, [2_000_000, 5_120_000, 5]);
}

#[test]
fn a_row_beyond_the_frame_limit_halts_within_bounded_memory() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    sql.run("alter table outbox alter column payload type text");
    ins(&sql, "before", "'1'");
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 't', 'k', 'e', repeat('x', 100 << 20))",
    );
    ins(&sql, "behind", "'2'");
    let mut relay = stage.run();
    let mut peak = 0;
    eventually(MINUTE, "it halts", || {
        peak = peak.max(relay.memory().peak);
        (!relay.is_alive()).then_some(())
    });
    assert_eq!(relay.wait_exit(MINUTE), 4, "{}", relay.said());
    let said = relay.said();
    assert!(said.contains("64"), "the limit is not named: {said}");
    assert!(peak < 96 << 20, "peak RSS {} MB", peak >> 20);
    let keys: Vec<String> = stage.records(1).iter().map(Rec::key_text).collect();
    assert_eq!(keys, ["before"]);
    assert_eq!(pending(&stage), 2);
}

#[test]
fn headers_that_are_no_object_halt_at_their_row() {
    let stage = halting(Pg::V15);
    let sql = stage.init();
    ins(&sql, "good", "'{}'");
    sql.run(
        "insert into outbox
           (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
         values ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 't', 'bad', 'e', '{}', '[1]')",
    );
    let ended = stage.run_to_end().expect_code(4);
    for word in [
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        "headers",
        "not a JSON object",
    ] {
        assert!(ended.stderr.contains(word), "{}", ended.stderr);
    }
    assert_eq!(stage.records(1).len(), 1);
}

#[test]
fn a_publication_that_was_away_for_a_row_skips_nothing() {
    for pg in Pg::ALL {
        for running in [false, true] {
            let mut stage = Stage::shared(pg);
            stage.run_args.extend(ON_GAP_HALT.map(str::to_owned));
            let sql = stage.init();
            let early = running.then(|| stage.run());
            ins(&sql, "1", "'1'");
            if running {
                stage.records(1);
                stage.wait_confirmed(MINUTE);
            }
            sql.run("drop publication walrelay");
            ins(&sql, "2", "'2'");
            // Where the row's commit ends.
            let hole = sql.one("select pg_current_wal_insert_lsn()");
            sql.run(
                "create publication walrelay for table outbox
                   with (publish = 'insert', publish_via_partition_root = true)",
            );
            ins(&sql, "3", "'3'");
            let mut relay = early.unwrap_or_else(|| stage.run());
            let code = relay.wait_exit(MINUTE);
            let said = relay.said();
            assert_eq!(code, 4, "{said}");
            assert!(said.contains("publication"), "{said}");
            assert!(said.contains("run with --on-gap heal"), "{said}");
            // Whatever was delivered: nothing from the hole on is confirmed.
            let confirmed = stage.db.confirmed();
            let unconfirmed = sql.one(&format!("select '{confirmed}'::pg_lsn < '{hole}'::pg_lsn"));
            assert_eq!(
                unconfirmed, "t",
                "confirmed up to {confirmed}, the hole ends at {hole}"
            );
            // A second start says the same again, and passes nothing over.
            let again = stage.run_to_end();
            assert_eq!(again.code, 4, "{}", again.stderr);
            assert_eq!(stage.db.confirmed(), confirmed);
            // What it says to do does it.
            stage.run_args.clear();
            let mut relay = stage.run();
            stage.records(3);
            relay.stop();
        }
    }
}

#[test]
fn a_slot_that_lost_its_wal_halts_and_is_healed() {
    let cluster = Cluster::with(
        Pg::V15,
        &["max_slot_wal_keep_size = 1MB", "max_wal_size = 64MB"],
    );
    let mut stage = Stage::on(&cluster, Broker::shared());
    stage.run_args.extend(ON_GAP_HALT.map(str::to_owned));
    let sql = stage.init();
    ins(&sql, "1", "'1'");
    sql.run("create table filler (t text)");
    eventually(MINUTE, "the slot is lost", || {
        sql.run(
            "insert into filler select repeat(md5(n::text), 30) from generate_series(1, 20000) n",
        );
        sql.run("select pg_switch_wal()");
        sql.run("checkpoint");
        let status = sql.one("select wal_status from pg_replication_slots");
        (status == "lost").then_some(())
    });
    let ended = stage.run_to_end();
    assert!([3, 4].contains(&ended.code), "{}", ended.stderr);
    assert!(ended.stderr.contains(&stage.db.slot()), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("lost") || ended.stderr.contains("removed"),
        "{}",
        ended.stderr
    );
    stage.run_args.clear();
    let mut relay = stage.run();
    stage.records(1);
    ins(&sql, "2", "'2'");
    stage.records(2);
    relay.stop();
}

/// README: the database's clock is ahead of the brokers'.
#[test]
fn a_time_that_the_broker_refuses_is_no_poison() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let topic = stage.topic("t");
    stage
        .broker
        .alter_topic(&topic, &[("message.timestamp.before.max.ms", "4000")]);
    for n in 0..20 {
        ins(&sql, &format!("k{}", n % 3), &format!("'{n}'"));
    }
    // Commit times grow old enough to be refused.
    eventually(MINUTE, "the rows are five seconds old", || {
        let old = sql.one("select now() - max(created_at) > interval '5 s' from outbox");
        (old == "t").then_some(())
    });
    let mut relay = stage.run();
    let records = stage.records(20);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert_eq!(records.len(), 20);
    for key in ["k0", "k1", "k2"] {
        let values: Vec<u32> = records
            .iter()
            .filter(|r| r.key_text() == key)
            .map(|r| r.value_text().parse().expect("a number"))
            .collect();
        assert!(values.is_sorted(), "{key}: {values:?}");
    }
    assert!(
        relay
            .lines()
            .iter()
            .any(|line| line.level() == "WARN" && line.has("INVALID_TIMESTAMP")),
        "{}",
        relay.said()
    );
}

#[test]
fn sigterm_without_a_broker_ends_in_time_and_loses_nothing() {
    let broker = Broker::start();
    let mut stage = Stage::on(Cluster::shared(Pg::V18), &broker);
    stage.run_args = vec!["--shutdown-timeout".to_owned(), "2s".to_owned()];
    stage.init();
    let mut relay = stage.run();
    stage.wait_confirmed(MINUTE);
    broker.freeze();
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).transactions(200));
    let committed = load.finish();
    relay.signal(Signal::INT);
    let started = std::time::Instant::now();
    assert_eq!(relay.wait_exit(MINUTE), 0, "{}", relay.said());
    assert!(started.elapsed() < Duration::from_secs(8));
    broker.thaw();
    let mut relay = stage.run();
    stage.wait_confirmed(MINUTE);
    relay.stop();
    check(&broker.read_all(&stage.topic("t")), &committed).assert_complete_and_ordered();
}

#[test]
fn several_topics_keep_the_order_of_each_key() {
    let stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    for n in 0..5 {
        stage.broker.create_topic(&stage.topic(&format!("n{n}")), 3);
    }
    let mut relay = stage.run();
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         select ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid, 'n' || n % 5,
                'k' || n % 35, 'e', to_jsonb(n)
         from generate_series(1, 20000) n order by n",
    );
    for kind in 0..5 {
        let kind = format!("n{kind}");
        stage.wait_count(&kind, 4_000, MINUTE);
        let mut committed = Committed::new();
        for n in 1..=20_000 {
            if format!("n{}", n % 5) == kind {
                committed.push(
                    format!("k{}", n % 35),
                    format!("00000000-0000-4000-8000-{n:012}"),
                );
            }
        }
        check(&stage.broker.read_all(&stage.topic(&kind)), &committed).assert_exactly_once();
    }
    relay.stop();
}
