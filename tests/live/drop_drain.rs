//! The slot's end: `walrelay drop`, and `walrelay drain` for an upgrade or a move.

use std::time::Duration;

use serde_json::Value;

use crate::check::check;
use crate::faults_postgres::more;
use crate::kafka::Broker;
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg, Sql, Stop};
use crate::proc::eventually;
use crate::refusals::says;
use crate::stage::{MINUTE, Stage};

fn ins(sql: &Sql, n: usize) {
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         select gen_random_uuid(), 't', 'k', 'e', '{{}}' from generate_series(1, {n})"
    ));
}

fn slots(stage: &Stage<'_>) -> String {
    stage.db.connect().one(&format!(
        "select count(*) from pg_replication_slots where slot_name = '{}'",
        stage.db.slot()
    ))
}

fn publications(stage: &Stage<'_>) -> String {
    stage
        .db
        .connect()
        .one("select count(*) from pg_publication")
}

// ---- drop ----------------------------------------------------------------------------------

#[test]
fn drop_shows_what_is_undelivered_and_leaves_no_slot_and_no_publication() {
    for pg in [Pg::V15, Pg::V18] {
        let stage = Stage::shared(pg);
        let sql = stage.init();
        let mut relay = stage.run();
        ins(&sql, 2);
        stage.wait_count("t", 2, MINUTE);
        stage.wait_confirmed(MINUTE);
        relay.stop();
        ins(&sql, 3);
        sql.run(
            "begin; insert into outbox (event_id, aggregate_type, aggregate_id, event_type)
                 values (gen_random_uuid(), 't', 'k', 'e'); rollback",
        );

        // Nobody can be asked.
        let asked = stage.drop_slot(&[]);
        says(&asked, 2, &["no terminal", "--yes"]);
        assert!(
            asked.stdout.contains("3 events not confirmed"),
            "{}",
            asked.stdout
        );
        assert_eq!(
            (slots(&stage), publications(&stage)),
            ("1".into(), "1".into())
        );

        let dropped = stage.drop_slot(&["--yes"]).expect_code(0);
        for words in ["3 events not confirmed", "dropped slot", "and publication"] {
            assert!(dropped.stdout.contains(words), "{}", dropped.stdout);
        }
        assert_eq!(
            (slots(&stage), publications(&stage)),
            ("0".into(), "0".into())
        );

        // A second time there is nothing to do, and whoever wants to run is told.
        let again = stage.drop_slot(&["--yes"]).expect_code(0);
        assert!(
            again.stdout.contains("nothing to do: slot"),
            "{}",
            again.stdout
        );
        says(
            &stage.run_to_end(),
            3,
            &["was dropped with `walrelay drop`", "walrelay init"],
        );
        says(&stage.try_init(), 3, &["5 rows", "--existing leave"]);
    }
}

/// The generation goes on, so that dead letters keep their order; what lay in between is said.
#[test]
fn init_after_drop_makes_the_next_generation_and_says_that_there_was_one() {
    let mut stage = Stage::shared(Pg::V17);
    let sql = stage.init();
    ins(&sql, 1);
    stage
        .drop_slot(&["--yes", "--keep-publication"])
        .expect_code(0);
    assert_eq!(
        (slots(&stage), publications(&stage)),
        ("0".into(), "1".into())
    );
    ins(&sql, 1);
    let args = stage.source_args.clone();
    stage
        .source_args
        .extend(["--existing".to_owned(), "leave".to_owned()]);
    let made = stage.try_init().expect_code(0);
    stage.source_args = args;
    assert!(
        made.stdout.contains("was dropped with `walrelay drop`"),
        "{}",
        made.stdout
    );
    assert_eq!(
        sql.one("select slot_generation from walrelay.relay where intent is null"),
        "2"
    );
    let mut relay = stage.run();
    ins(&sql, 1);
    stage.wait_count("t", 1, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert_eq!(stage.records(1).len(), 1, "what was left stays where it is");
}

#[test]
fn drop_is_refused_under_a_relay_which_is_named() {
    let stage = Stage::shared(Pg::V18);
    stage.init();
    let mut relay = stage.run();
    relay.wait_for_text("streaming from", MINUTE);
    let mut standby = stage.run();
    standby.wait_for_text("standing by", MINUTE);
    let refused = stage.drop_slot(&["--yes"]);
    let pid = stage
        .db
        .connect()
        .one("select pid from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock'
              and granted and database = (select oid from pg_database where datname = current_database())");
    says(
        &refused,
        3,
        &[
            &format!("the leader: pid {pid}"),
            "client 127.0.0.1",
            "connected for",
            "a standby: pid",
        ],
    );
    assert_eq!(slots(&stage), "1");
    standby.stop();
    relay.stop();
}

#[test]
fn drop_ends_what_a_lost_slot_and_a_missing_one_left() {
    let cluster = Cluster::with(Pg::V17, &["max_slot_wal_keep_size = '16MB'"]);
    let stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    ins(&sql, 1);
    for _ in 0..4 {
        sql.run("select pg_switch_wal(); create table if not exists x (n int); insert into x select generate_series(1, 1000)");
    }
    sql.run("checkpoint; checkpoint");
    let status = sql.one("select wal_status from pg_replication_slots");
    assert_eq!(status, "lost");
    let dropped = stage.drop_slot(&["--yes"]).expect_code(0);
    assert!(dropped.stdout.contains("is lost"), "{}", dropped.stdout);
    assert_eq!(slots(&stage), "0");

    // The slot and the publication went by other hands.
    sql.run("delete from outbox");
    stage.try_init().expect_code(0);
    sql.run(&format!(
        "select pg_drop_replication_slot('{}'); drop publication walrelay",
        stage.db.slot()
    ));
    let dropped = stage.drop_slot(&["--yes"]).expect_code(0);
    assert!(
        dropped.stdout.contains("is gone already"),
        "{}",
        dropped.stdout
    );
    stage.try_init().expect_code(0);
}

#[test]
fn drop_is_refused_where_there_is_nothing_of_ours() {
    let stage = Stage::shared(Pg::V16);
    says(
        &stage.drop_slot(&["--yes"]),
        3,
        &["there is nothing to drop"],
    );
    let sql = stage.db.connect();
    sql.run(&format!(
        "select pg_create_logical_replication_slot('{}', 'pgoutput')",
        stage.db.slot()
    ));
    says(
        &stage.drop_slot(&["--yes"]),
        3,
        &["walrelay did not make it"],
    );
    assert_eq!(slots(&stage), "1");
}

#[test]
fn drop_does_not_touch_a_standby() {
    let primary = Cluster::start(Pg::V18);
    let mut stage = Stage::on(&primary, Broker::shared());
    stage.init();
    let standby = Cluster::standby(&primary);
    stage.database_url = Some(format!(
        "postgresql://postgres@127.0.0.1:{}/{}",
        standby.port, stage.db.name
    ));
    says(
        &stage.drop_slot(&["--yes"]),
        3,
        &["is a standby", "primary"],
    );
}

#[test]
fn a_drop_that_was_interrupted_is_ended_by_the_next_one_or_by_init() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    // As after a kill between the registry's commit and the slot's end.
    let half = "begin; drop publication walrelay; update walrelay.relay set consistent_point = null,
         system_identifier = null, intent = jsonb_build_object('action', 'drop', 'since', now(), 'by', 'x'); commit";
    sql.run(half);
    says(&stage.run_to_end(), 3, &["`walrelay drop` was interrupted"]);
    stage.drop_slot(&["--yes"]).expect_code(0);
    assert_eq!(slots(&stage), "0");
    stage.try_init().expect_code(0);
    sql.run(half);
    stage.try_init().expect_code(0);
    assert_eq!(
        (slots(&stage), publications(&stage)),
        ("1".into(), "1".into())
    );
}

// ---- drain ---------------------------------------------------------------------------------

#[test]
fn drain_delivers_what_is_left_once_and_leaves_a_clean_stop() {
    for pg in [Pg::V15, Pg::V17] {
        let stage = Stage::shared(pg);
        let sql = stage.init();
        let mut relay = stage.run();
        let load = Load::start(&stage.db, &Plan::new(4, Shape::Mixed).a_second(300));
        more(&load, 500);
        relay.stop();
        // What commits while it drains is drained, too.
        let mut drain = stage.draining(&["--json"]);
        more(&load, 500);
        assert!(drain.is_alive(), "{}", drain.said());
        let committed = load.stop();
        assert_eq!(drain.wait_exit(MINUTE), 0, "{}", drain.said());
        let said = drain.said();
        let at = said.find("{\n").expect("a report");
        let report: Value = serde_json::from_str(&said[at..]).expect("JSON");
        assert_eq!(report["safe"], true, "{report}");
        assert_eq!(report["stop_stored"], true, "{report}");
        check(&stage.broker.read_all(&stage.topic("t")), &committed).assert_exactly_once();
        assert_eq!(sql.one("select stop_complete from walrelay.relay"), "t");
        let confirmed = stage.db.confirmed();
        let position = report["position"].as_str().expect("text");
        assert_eq!(
            sql.one(&format!(
                "select '{confirmed}'::pg_lsn >= '{position}'::pg_lsn"
            )),
            "t"
        );
    }
}

#[test]
fn drain_is_refused_beside_a_relay_which_is_named() {
    let stage = Stage::shared(Pg::V15);
    stage.init();
    let mut relay = stage.run();
    relay.wait_for_text("streaming from", MINUTE);
    says(
        &stage.drain(&[]),
        3,
        &[
            "a relay of this table runs",
            "the leader: pid",
            "client 127.0.0.1",
        ],
    );
    relay.stop();
}

#[test]
fn drain_is_not_safe_while_somebody_may_still_write() {
    let stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    let writer = stage.db.connect();
    let pid = writer.backend_pid();
    writer.run("begin");
    ins(&writer, 1);
    let late = stage.drain(&["--deadline", "4s"]);
    says(
        &late,
        3,
        &[
            "not drained within",
            &format!("the transaction of pid {pid}"),
            "which writes to the outbox",
        ],
    );
    let gid = format!("g{}", stage.db.name);
    writer.run(&format!("prepare transaction '{gid}'"));
    says(
        &stage.drain(&["--deadline", "4s"]),
        3,
        &[&format!("prepared transaction '{gid}'")],
    );
    // It ends well once that is over, with the row in Kafka.
    let mut drain = stage.draining(&[]);
    drain.wait_for_text("draining: prepared transaction", MINUTE);
    sql.run(&format!("commit prepared '{gid}'"));
    assert_eq!(drain.wait_exit(MINUTE), 0, "{}", drain.said());
    assert_eq!(stage.records(1).len(), 1);
}

/// What `pg_upgrade` asks of each slot, asked of the server in the same way: the binaries that
/// tests fetch have no `pg_upgrade`.
#[test]
fn a_slot_that_was_drained_with_hold_is_one_that_pg_upgrade_keeps() {
    for pg in [Pg::V17, Pg::V18] {
        let cluster = Cluster::start(pg);
        let stage = Stage::on(&cluster, Broker::shared());
        let sql = stage.init();
        ins(&sql, 20);
        let caught_up = || {
            cluster.up_for_upgrade();
            let caught_up = cluster.connect(&stage.db.name).one(&format!(
                "select binary_upgrade_logical_slot_has_caught_up('{}')",
                stage.db.slot()
            ));
            cluster.stop(Stop::Fast);
            caught_up
        };
        // A plain drain stores its stop behind what it has confirmed.
        stage.drain(&[]).expect_code(0);
        drop(sql);
        cluster.stop(Stop::Fast);
        assert_eq!(caught_up(), "f", "if so, --hold is not needed");
        cluster.up();

        let mut drain = stage.draining(&["--hold"]);
        eventually(MINUTE, "it is safe", || {
            drain.said().contains("now stop the server").then_some(())
        });
        // A database that nobody writes to still writes some.
        cluster
            .connect(&stage.db.name)
            .run("create table beside (n int)");
        cluster.stop(Stop::Fast);
        assert_eq!(drain.wait_exit(MINUTE), 0, "{}", drain.said());
        assert_eq!(caught_up(), "t", "{pg:?}: {}", drain.said());
        cluster.up();
    }
}

#[test]
fn nobody_is_told_that_a_stream_is_drained_that_waits_for_a_topic() {
    let stage = Stage::shared(Pg::V17);
    let sql = stage.init();
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 'absent', 'k', 'e', '{}')",
    );
    says(
        &stage.drain(&["--deadline", "5s", "--shutdown-timeout", "1s"]),
        3,
        &["not drained within", "confirmed up to"],
    );
    eventually(Duration::from_secs(10), "the slot is free", || {
        (sql.one(&format!(
            "select active_pid is null from pg_replication_slots where slot_name = '{}'",
            stage.db.slot()
        )) == "t")
            .then_some(())
    });
}
