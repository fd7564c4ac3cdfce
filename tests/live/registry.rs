//! The registry and the leader's questions, against real servers.

use std::time::Duration;

use walrelay::config::{self, Mapping, TableName};
use walrelay::gap::OnGap;
use walrelay::io::preflight::{self, NotReady};
use walrelay::io::registry::{self, Found, Halted, OpenStop, Prober, Registered, Stop};
use walrelay::io::rival;
use walrelay::io::side::Side;
use walrelay::lsn::{Lsn, PgTimestamp, Triple, Xid};

use crate::postgres::{Cluster, Database, Pg, runtime};
use crate::relay::run_to_end;

const DEADLINE: Duration = Duration::from_secs(60);

fn source(db: &Database<'_>, user: &str) -> config::Source {
    config::Source {
        database: config::Database::plain("127.0.0.1", db.cluster.port, user, &db.name),
        table: TableName {
            schema: "public".to_owned(),
            name: "outbox".to_owned(),
        },
        slot: db.slot(),
        publication: "walrelay".to_owned(),
    }
}

fn init(db: &Database<'_>) {
    run_to_end(
        &["init", "--database-url", &db.url(), "--slot", &db.slot()],
        &[],
        DEADLINE,
    )
    .expect_code(0);
}

async fn side(source: &config::Source) -> Side {
    Side::connect(&source.database, None)
        .await
        .expect("the server is up")
}

async fn row(side: &Side, source: &config::Source) -> Registered {
    match registry::load_by_table(&side.client, &source.table).await {
        Ok(Found::Row(row)) => *row,
        other => panic!("no row: {other:?}"),
    }
}

#[test]
fn what_is_stored_is_what_is_read() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        let source = source(&db, "postgres");
        runtime().block_on(async {
            let side = side(&source).await;
            let found = registry::load_by_table(&side.client, &source.table).await;
            assert_eq!(found, Ok(Found::NoTable));
        });
        init(&db);
        runtime().block_on(async {
            let side = side(&source).await;
            let client = &side.client;
            let fresh = row(&side, &source).await;
            let oid = fresh.table_oid;
            assert_eq!(
                (fresh.generation, fresh.intent, &fresh.stop),
                (1, false, &None)
            );
            assert_eq!(
                registry::claim_lead(client, oid, "one").await,
                Ok((None, 1))
            );
            let one = || Some("one".to_owned());
            assert_eq!(
                registry::claim_lead(client, oid, "one").await,
                Ok((one(), 1)),
                "nobody else has led"
            );
            assert_eq!(
                registry::claim_lead(client, oid, "two").await,
                Ok((one(), 2))
            );
            let stop = Stop {
                last: Some(Triple {
                    commit_lsn: Lsn(u64::MAX - 1),
                    xid: Xid(u32::MAX),
                    commit_time: PgTimestamp(849_403_803_894_564),
                }),
                reported: Lsn(u64::MAX),
                complete: true,
                open: Some(OpenStop {
                    triple: Triple {
                        commit_lsn: Lsn(9),
                        xid: Xid(8),
                        commit_time: PgTimestamp(i64::MAX),
                    },
                    count: 500_000,
                    event_id: "é\"\\".to_owned(),
                }),
            };
            registry::store_stop(client, oid, &stop)
                .await
                .expect("stored");
            let halted = Halted {
                event_id: "e-1".to_owned(),
                reason: "too large".to_owned(),
            };
            registry::store_halted(client, oid, &halted)
                .await
                .expect("stored");
            let stored = row(&side, &source).await;
            assert_eq!(stored.stop, Some(stop));
            assert_eq!(stored.halted, Some(halted));
            assert_eq!(stored.leader.as_deref(), Some("two"));
            let nothing = Stop {
                last: None,
                reported: Lsn(7),
                complete: false,
                open: None,
            };
            registry::store_stop(client, oid, &nothing)
                .await
                .expect("stored");
            assert_eq!(row(&side, &source).await.stop, Some(nothing));
            registry::erase_stop(client, oid).await.expect("erased");
            registry::clear_halted(client, oid).await.expect("erased");
            let erased = row(&side, &source).await;
            assert_eq!((erased.stop, erased.halted), (None, None));
        });
    }
}

#[test]
fn the_probe_tells_a_leader_from_one_that_was() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        init(&db);
        let source = source(&db, "postgres");
        runtime().block_on(async {
            let (leader, standby) = (side(&source).await, side(&source).await);
            // Larger than any i32: its bits must come back from pg_locks as they went in.
            for oid in [row(&leader, &source).await.table_oid, u32::MAX - 1] {
                let prober = Prober::prepare(&leader.client, oid, &source.slot)
                    .await
                    .expect("prepared");
                let before = prober.ask(&leader.client).await.expect("an answer");
                assert!(!before.lock_held);
                assert_eq!(registry::try_lock(&leader.client, oid).await, Ok(true));
                assert_eq!(registry::try_lock(&standby.client, oid).await, Ok(false));
                let after = prober.ask(&leader.client).await.expect("an answer");
                assert!(after.lock_held);
                assert_eq!(after.backend_pid, before.backend_pid);
                assert_eq!(after.slot_active_pid, None);
                for (idle_max, is_idle) in
                    [(Duration::from_secs(600), false), (Duration::ZERO, true)]
                {
                    let found = rival::of_lock(&standby.client, oid, idle_max).await;
                    let found = found.expect("an answer").expect("somebody has it");
                    assert_eq!((found.pid, found.is_idle), (after.backend_pid, is_idle));
                }
                let limit = Duration::from_millis(300);
                let began = std::time::Instant::now();
                rival::await_lock(&standby.client, oid, limit)
                    .await
                    .expect("an answer");
                assert!(began.elapsed() >= limit, "it is held all the time");
                assert_eq!(registry::unlock(&leader.client, oid).await, Ok(true));
            }
            let server = registry::server(&leader.client).await.expect("an answer");
            let registered = row(&leader, &source).await;
            assert_eq!(server.system_identifier, registered.system_identifier);
            assert_eq!(server.timeline, registered.timeline);
        });
    }
}

#[test]
fn a_role_with_the_printed_grants_sees_and_writes_what_run_needs() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        init(&db);
        let (sql, role) = (db.connect(), format!("run_{}", db.name));
        sql.run(&format!("create role {role} login"));
        let source = source(&db, &role);
        let ready = || {
            runtime().block_on(async {
                let side = side(&source).await;
                preflight::before_run(&side.client, &source, &Mapping::default(), None).await
            })
        };
        let Err(NotReady::Refused(failure)) = ready() else {
            panic!("ready without any right");
        };
        let text = failure.to_string();
        assert!(
            text.contains("replication") && text.contains("grant usage on schema walrelay"),
            "{text}"
        );
        sql.run(&format!(
            "alter role {role} replication; grant usage on schema walrelay to {role}"
        ));
        sql.run(&format!(
            "grant select on all tables in schema walrelay to {role}"
        ));
        assert!(ready().is_ok());
        let write = || {
            runtime().block_on(async {
                let side = side(&source).await;
                let server = registry::server(&side.client).await.expect("an answer");
                assert!(
                    server.system_identifier.is_some(),
                    "a plain role may not ask"
                );
                let oid = row(&side, &source).await.table_oid;
                registry::erase_stop(&side.client, oid).await
            })
        };
        let refused = write().expect_err("no right to write");
        assert_eq!(refused.sqlstate(), "42501");
        sql.run(&format!(
            "grant select, insert, update, delete on all tables in schema walrelay to {role}"
        ));
        assert_eq!(write(), Ok(()));
        sql.run(&format!("drop owned by {role}; drop role {role}"));
    }
}

#[test]
fn an_unmet_need_of_run_has_its_exit_code() {
    let halt = Some(OnGap::Halt);
    let db = Cluster::shared(Pg::V15).database();
    let source = source(&db, "postgres");
    let refused = |exit: i32, part: &str| {
        let result = runtime().block_on(async {
            let side = side(&source).await;
            preflight::before_run(&side.client, &source, &Mapping::default(), halt).await
        });
        let Err(NotReady::Refused(failure)) = result else {
            panic!("not refused: {result:?}");
        };
        let text = failure.to_string();
        assert!(text.contains(part), "{text}");
        assert_eq!(failure.exit as i32, exit, "{text}");
    };
    refused(3, "table public.outbox does not exist");
    let sql = db.connect();
    sql.run(include_str!("../../migrations/0001_outbox.sql"));
    refused(3, "the registry has no row");
    sql.run("drop table outbox");
    init(&db);
    sql.run("update walrelay.relay set intent = '{}'");
    refused(3, "was interrupted");
    sql.run("update walrelay.relay set intent = null");
    sql.run("update walrelay.relay set system_identifier = '1'");
    refused(4, "another cluster");
    sql.run("update walrelay.relay set system_identifier = null");
    sql.run("alter publication walrelay set table outbox where (id > 7)");
    refused(3, "row filter");
    sql.run("alter publication walrelay set table outbox (id, payload)");
    refused(3, "column list");
    sql.run("drop publication walrelay");
    refused(3, "publication walrelay does not exist");
    sql.run("create publication walrelay for table outbox with (publish = 'insert')");
    let slot = db.slot();
    sql.run(&format!("select pg_drop_replication_slot('{slot}')"));
    refused(4, "is gone");
    let remake = |plugin: &str, two_phase: bool| {
        sql.run(&format!(
            "select pg_create_logical_replication_slot('{slot}', '{plugin}', false, {two_phase})"
        ));
    };
    let forget = || sql.run(&format!("select pg_drop_replication_slot('{slot}')"));
    remake("test_decoding", false);
    refused(3, "test_decoding");
    forget();
    remake("pgoutput", true);
    refused(3, "two_phase");
    forget();
    sql.run(&format!(
        "select pg_create_physical_replication_slot('{slot}')"
    ));
    refused(3, "physical");
    forget();
    let elsewhere = db.cluster.database();
    elsewhere.connect().run(&format!(
        "select pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
    refused(3, &format!("belongs to database \"{}\"", elsewhere.name));
    elsewhere
        .connect()
        .run(&format!("select pg_drop_replication_slot('{slot}')"));
    remake("pgoutput", false);
    // Case D07.
    sql.run("alter table outbox rename to outbox_old; create table outbox (like outbox_old including all)");
    refused(3, "the published one is public.outbox_old");
}
