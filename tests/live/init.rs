//! `walrelay init`: what it makes, that a second run changes nothing, and what it refuses.

use std::time::Duration;

use crate::kafka::Broker;
use crate::postgres::{Cluster, Database, Pg, Sql};
use crate::relay::{Ended, Relay, run_to_end};
use crate::stage::{MINUTE, Stage};

fn init(db: &Database<'_>, user: &str, more: &[&str]) -> Ended {
    let (url, slot) = (db.url_as(user), db.slot());
    let mut args = vec!["init", "--database-url", &url, "--slot", &slot];
    args.extend(more);
    run_to_end(&args, &[], MINUTE)
}

/// Everything that `init` could have touched.
fn catalog(sql: &Sql, slot: &str) -> Vec<Vec<Option<String>>> {
    let mut all = sql.rows(
        "select 'class', oid::text, relname::text, reloptions::text from pg_class
           where relnamespace::regnamespace::text in ('public', 'walrelay')
         union all
         select 'proc', oid::text, proname::text, xmin::text from pg_proc
           where pronamespace::regnamespace::text in ('public', 'walrelay')
         union all
         select 'pub', oid::text, pubname::text, xmin::text from pg_publication
         order by 1, 2",
    );
    all.extend(sql.rows("select ctid, xmin, to_jsonb(r) from walrelay.relay r"));
    all.extend(sql.rows(&format!(
        "select plugin, restart_lsn, two_phase from pg_replication_slots where slot_name = '{slot}'"
    )));
    all
}

fn slots(db: &Database<'_>) -> String {
    db.connect().one(&format!(
        "select count(*) from pg_replication_slots where slot_name = '{}'",
        db.slot()
    ))
}

#[test]
fn a_second_init_changes_nothing_and_says_so() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        init(&db, "postgres", &[]).expect_code(0);
        let sql = db.connect();
        let before = catalog(&sql, &db.slot());
        let second = init(&db, "postgres", &[]).expect_code(0);
        assert!(
            second.stdout.to_lowercase().contains("nothing to"),
            "{}",
            second.stdout
        );
        assert_eq!(before, catalog(&sql, &db.slot()));
        if pg >= Pg::V17 {
            let slot = db.slot();
            let failover =
                format!("select failover from pg_replication_slots where slot_name = '{slot}'");
            assert_eq!(sql.one(&failover), "t");
        }
    }
}

#[test]
fn printed_sql_changes_nothing_and_is_what_init_would_run() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        let printed = init(&db, "postgres", &["--print-sql"])
            .expect_code(0)
            .stdout;
        let sql = db.connect();
        assert_eq!(sql.one("select to_regclass('outbox') is null"), "t");
        assert_eq!(slots(&db), "0");
        assert!(printed.contains("CREATE_REPLICATION_SLOT"), "{printed}");
        sql.run(&printed);
        assert_eq!(sql.one("select to_regclass('outbox') is not null"), "t");
        assert_eq!(sql.one("select count(*) from pg_publication"), "1");
        assert_eq!(slots(&db), "0");
        init(&db, "postgres", &[]).expect_code(0);
        assert_eq!(slots(&db), "1");
    }
}

#[test]
fn a_role_that_is_no_superuser_can_init_and_another_can_run() {
    let cluster = Cluster::shared(Pg::V15);
    let mut stage = Stage::on(cluster, Broker::shared());
    let (owner, runner) = (
        format!("owner_{}", stage.db.name),
        format!("runner_{}", stage.db.name),
    );
    let sql = stage.db.connect();
    sql.run(&format!(
        "create role {owner} login replication;
         create role {runner} login replication;
         grant create on database {} to {owner};
         grant create on schema public to {owner}",
        stage.db.name
    ));
    stage.user = owner.clone();
    stage.init();
    stage.user = runner.clone();
    sql.run(&format!(
        "grant usage on schema walrelay to {runner};
         grant select, insert, update, delete on all tables in schema walrelay to {runner};
         grant select on outbox to {runner}"
    ));
    let mut relay = stage.run();
    sql.run(&format!(
        "set role {owner};
         insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k', 'e', '{{}}')"
    ));
    assert_eq!(stage.records(1).len(), 1);
    relay.stop();
    let (broker, name) = (stage.broker, stage.db.name.clone());
    drop(sql);
    drop(stage);
    let _ = (broker, name);
    cluster
        .connect("postgres")
        .run(&format!("drop role {owner}, {runner}"));
}

#[test]
fn init_without_the_rights_says_which_one_is_missing() {
    let db = Cluster::shared(Pg::V15).database();
    let sql = db.connect();
    let role = format!("plain_{}", db.name);
    sql.run(&format!("create role {role} login"));
    let ended = init(&db, &role, &[]).expect_code(3);
    assert!(ended.stderr.contains("REPLICATION"), "{}", ended.stderr);
    assert_eq!(slots(&db), "0");
    sql.run(&format!("alter role {role} replication"));
    let ended = init(&db, &role, &[]).expect_code(3);
    assert!(
        ended.stderr.to_lowercase().contains("create on"),
        "{}",
        ended.stderr
    );
    assert_eq!(slots(&db), "0");
    sql.run(&format!("drop role {role}"));
}

#[test]
fn a_transaction_that_blocks_the_slot_is_named() {
    // A cluster of its own: the blockers block every slot's creation.
    let cluster = Cluster::start(Pg::V15);
    let db = cluster.database();
    let blocker = cluster.connect("postgres");
    blocker.run("create table t (n int); begin; insert into t values (1)");
    let pid = blocker.backend_pid();
    let ended = init(&db, "postgres", &["--lock-timeout", "1s"]).expect_code(3);
    assert!(ended.stderr.contains(&pid), "{}", ended.stderr);
    assert!(ended.stderr.contains("postgres"), "{}", ended.stderr);
    nothing_half_made(&db);

    blocker.run("prepare transaction 'forgotten'");
    let ended = init(&db, "postgres", &["--lock-timeout", "1s"]).expect_code(3);
    assert!(
        ended.stderr.contains("rollback prepared 'forgotten'")
            || ended.stderr.contains("ROLLBACK PREPARED 'forgotten'"),
        "{}",
        ended.stderr
    );
    nothing_half_made(&db);

    blocker.run("rollback prepared 'forgotten'");
    init(&db, "postgres", &[]).expect_code(0);
}

fn nothing_half_made(db: &Database<'_>) {
    assert_eq!(slots(db), "0");
    let senders = db
        .connect()
        .one("select count(*) from pg_stat_activity where backend_type = 'walsender'");
    assert_eq!(senders, "0", "a walsender is left behind");
}

#[test]
fn init_does_not_replace_a_slot_that_is_gone() {
    let db = Cluster::shared(Pg::V15).database();
    init(&db, "postgres", &[]).expect_code(0);
    db.connect()
        .run(&format!("select pg_drop_replication_slot('{}')", db.slot()));
    let ended = init(&db, "postgres", &[]).expect_code(4);
    assert!(ended.stderr.contains(&db.slot()), "{}", ended.stderr);
    assert_eq!(slots(&db), "0");
}

#[test]
fn a_table_that_holds_rows_needs_a_decision() {
    let stage = Stage::shared(Pg::V15);
    let printed = init(&stage.db, "postgres", &["--print-sql"]).expect_code(0);
    let sql = stage.db.connect();
    sql.run(&printed.stdout);
    let ins = |id: &str| {
        sql.run(&format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (md5('{id}')::uuid, 't', 'k', 'e', '\"{id}\"')"
        ));
    };
    ins("old");
    let ended = init(&stage.db, "postgres", &[]);
    assert!([2, 3, 4].contains(&ended.code), "{ended:?}");
    assert!(ended.stderr.contains("--existing"), "{}", ended.stderr);
    assert_eq!(slots(&stage.db), "0");
    init(&stage.db, "postgres", &["--existing", "publish"]).expect_code(2);
    init(&stage.db, "postgres", &["--existing", "leave"]).expect_code(0);
    stage.broker.create_topic(&stage.topic("t"), 6);
    ins("new");
    let mut relay = stage.run();
    let records = stage.records(1);
    relay.stop();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].value_text(), "\"new\"");
}

#[test]
fn an_init_killed_anywhere_is_repaired_by_the_next() {
    let stage = Stage::shared(Pg::V15);
    let (url, slot) = (stage.db.url(), stage.db.slot());
    for round in 0..12_u32 {
        let mut command = Relay::start(&["init", "--database-url", &url, "--slot", &slot], &[]);
        // A kill at another moment each time; the moment itself is the point.
        std::thread::sleep(Duration::from_millis(u64::from(round) * 8));
        command.kill9();
    }
    stage.init();
    assert_eq!(slots(&stage.db), "1");
    let mut relay = stage.run();
    stage.db.connect().run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k', 'e', '{}')",
    );
    assert_eq!(stage.records(1).len(), 1);
    relay.stop();
}

#[test]
fn init_wants_wal_level_logical() {
    let cluster = Cluster::with(Pg::V18, &["wal_level = replica"]);
    let db = cluster.database();
    let ended = init(&db, "postgres", &[]).expect_code(3);
    assert!(ended.stderr.contains("wal_level"), "{}", ended.stderr);
    assert!(ended.stderr.contains("restart"), "{}", ended.stderr);
}
