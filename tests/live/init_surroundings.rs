//! `walrelay init` on real servers, more closely: the very objects it makes, and every surrounding
//! that it refuses.

use std::time::Duration;

use crate::postgres::{Cluster, Database, Pg};
use crate::proc::eventually;
use crate::relay::{Ended, run_to_end};
use crate::stage::MINUTE;

const DEADLINE: Duration = Duration::from_secs(60);

/// `walrelay init` in that database, with its own slot and whatever else is given.
fn init_as(db: &Database<'_>, user: &str, more: &[&str]) -> Ended {
    let (url, slot) = (db.url_as(user), db.slot());
    let mut args = vec!["init", "--database-url", &url];
    if !more.contains(&"--slot") {
        args.extend(["--slot", &slot]);
    }
    args.extend(more);
    run_to_end(&args, &[], DEADLINE)
}

fn init(db: &Database<'_>, more: &[&str]) -> Ended {
    init_as(db, "postgres", more)
}

/// Everything that init makes, as text: to compare two databases, or one before and after.
fn made(db: &Database<'_>) -> String {
    let sql = db.connect();
    let one = |what: &str| {
        sql.one(&format!(
            "select coalesce(string_agg(t, E'\n'), '') from ({what}) s"
        ))
    };
    [
        one("select format('%s.%s %s %s %s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), \
             a.attnotnull, pg_get_expr(d.adbin, d.adrelid)) t from pg_class c \
             join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 \
             left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum \
             where c.relnamespace in (select oid from pg_namespace where nspname in ('public', 'walrelay')) \
             and c.relkind in ('r', 'i', 'S') order by c.relname, a.attnum"),
        one("select pg_get_indexdef(indexrelid) t from pg_index join pg_class c on c.oid = indrelid \
             where c.relnamespace in (select oid from pg_namespace where nspname in ('public', 'walrelay')) \
             order by 1"),
        one("select conname || pg_get_constraintdef(oid) t from pg_constraint \
             where connamespace in (select oid from pg_namespace where nspname in ('public', 'walrelay')) \
             order by 1"),
        one("select pg_get_functiondef(p.oid) t from pg_proc p where p.pronamespace = 'public'::regnamespace \
             order by p.proname"),
        one("select format('%s %s', c.relname, c.reloptions) t from pg_class c \
             where c.relname = 'outbox'"),
        one("select format('%s %s %s %s %s %s', p.pubname, pubinsert, pubupdate, pubdelete, pubtruncate, \
             pubviaroot) t from pg_publication p order by 1"),
        one("select format('%s %s.%s', pubname, schemaname, tablename) t from pg_publication_tables order by 1"),
    ]
    .join("\n\n")
}

fn slots(db: &Database<'_>) -> String {
    db.connect().one(&format!(
        "select coalesce(string_agg(format('%s %s %s', slot_name, plugin, confirmed_flush_lsn), ',' \
         order by slot_name), '') from pg_replication_slots where database = '{}'",
        db.name
    ))
}

#[test]
fn the_helper_functions_guard_against_a_second_emission() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        init(&db, &[]).expect_code(0);
        let sql = db.connect();
        for _ in 0..2 {
            sql.run(
                "select outbox_emit('order', '7', 'paid', '{}', event_id => outbox_event_id('7', 'paid'))",
            );
        }
        sql.run("select outbox_emit('order', '7', 'paid', '{}')");
        assert_eq!(sql.one("select count(*)::text from outbox"), "2");
        // A bound function body would stand in the way of these.
        sql.run("alter table outbox drop column event_type");
        sql.run("alter table outbox alter payload type text");
    }
}

#[test]
fn a_role_that_is_no_superuser_suffices() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        let (sql, role) = (db.connect(), format!("own_{}", db.name));
        sql.run(&format!("create role {role} login"));
        let refused = init_as(&db, &role, &[]).expect_code(3).stderr;
        // All that is missing, at once.
        for remedy in [
            format!("alter role \"{role}\" replication"),
            format!("grant create on database \"{}\" to \"{role}\"", db.name),
            format!("grant create on schema \"public\" to \"{role}\""),
        ] {
            assert!(refused.contains(&remedy), "{remedy}:\n{refused}");
        }
        assert_eq!(
            sql.one("select count(*)::text from pg_namespace where nspname = 'walrelay'"),
            "0"
        );
        sql.run(&format!("alter role {role} replication"));
        sql.run(&format!("grant create on database {} to {role}", db.name));
        sql.run(&format!("grant create on schema public to {role}"));
        init_as(&db, &role, &[]).expect_code(0);
        sql.run(&format!("select pg_drop_replication_slot('{}')", db.slot()));
        sql.run(&format!("drop owned by {role} cascade; drop role {role}"));
    }
}

/// Case S09.
#[test]
fn who_blocks_slot_creation_is_named_and_nothing_half_made_is_left() {
    for pg in Pg::ALL {
        let cluster = Cluster::start(pg);
        let (db, elsewhere) = (cluster.database(), cluster.database());
        let blocker = elsewhere.connect();
        blocker.run("create table t (a int)");
        blocker.run("begin; insert into t values (1); prepare transaction 'it''s forgotten'");
        let open = elsewhere.connect();
        open.run("begin; insert into t values (2)");
        let refused = init(&db, &["--lock-timeout", "2s"]).expect_code(3).stderr;
        assert!(refused.contains("'it''s forgotten'"), "{refused}");
        assert!(
            refused.contains(&format!("database \"{}\"", elsewhere.name)),
            "{refused}"
        );
        assert!(
            refused.contains(&format!("pid {}, user \"postgres\"", open.backend_pid()))
                && refused.contains("idle in transaction"),
            "{refused}"
        );
        let remedy = refused.lines().last().unwrap_or_default();
        assert!(
            remedy.contains("rollback prepared 'it''s forgotten'"),
            "{refused}"
        );
        assert_eq!(slots(&db), "");
        let walsenders = "select count(*)::text from pg_stat_replication";
        // The server notices the end of a connection a moment after its other side is gone.
        let sql = db.connect();
        eventually(MINUTE, "no walsender is left", || {
            (sql.one(walsenders) == "0").then_some(())
        });
        // A role that may not see it is told how to.
        sql.run("create role weak login replication; grant usage on schema walrelay to weak");
        sql.run(
            "grant all on all tables in schema walrelay to weak; grant select on outbox to weak",
        );
        let hidden = init_as(&db, "weak", &["--lock-timeout", "1s"])
            .expect_code(3)
            .stderr;
        assert!(
            hidden.contains("grant pg_read_all_stats to \"weak\""),
            "{hidden}"
        );
        blocker.run("rollback prepared 'it''s forgotten'");
        open.run("rollback");
        init(&db, &[]).expect_code(0);
    }
}

#[test]
fn a_crash_between_slot_and_registry_row_is_repaired_by_the_next_run() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        init(&db, &[]).expect_code(0);
        let sql = db.connect();
        let half = "update walrelay.relay set intent = '{\"action\": \"init\"}', slot_generation = 0, \
                    lower_bound = null, consistent_point = null, system_identifier = null";
        // Before the slot was made, and after.
        for drop_slot in [false, true] {
            sql.run(half);
            let before = slots(&db);
            if drop_slot {
                sql.run(&format!("select pg_drop_replication_slot('{}')", db.slot()));
            }
            init(&db, &[]).expect_code(0);
            assert_ne!(slots(&db), before, "the slot was not made anew");
            assert_eq!(
                sql.one(
                    "select format('%s %s %s', intent is null, slot_generation, \
                     lower_bound is not null and consistent_point is not null \
                     and system_identifier is not null) from walrelay.relay"
                ),
                "t 1 t"
            );
        }
    }
}

#[test]
fn what_print_sql_prints_makes_what_init_makes() {
    for pg in Pg::ALL {
        let cluster = Cluster::shared(pg);
        let (by_init, by_hand) = (cluster.database(), cluster.database());
        let script = init(&by_hand, &["--print-sql"]).expect_code(0).stdout;
        assert_eq!(
            by_hand
                .connect()
                .one("select count(*)::text from pg_namespace where nspname = 'walrelay'"),
            "0"
        );
        assert!(script.contains("--   CREATE_REPLICATION_SLOT"), "{script}");
        assert!(
            script.contains("--   grant usage on schema walrelay to ROLE"),
            "{script}"
        );
        by_hand.connect().run(&script);
        init(&by_init, &[]).expect_code(0);
        assert_eq!(made(&by_hand), made(&by_init));
        let rest = init(&by_hand, &[]).expect_code(0).stdout;
        assert!(rest.contains("created        slot"), "{rest}");
        let row = "select format('%s %s %s', made_table, slot_generation, intent is null) from walrelay.relay";
        assert_eq!(by_hand.connect().one(row), by_init.connect().one(row));
    }
}

#[test]
fn rows_from_before_the_slot_want_a_decision() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        let sql = db.connect();
        sql.run(include_str!("../../migrations/0001_outbox.sql"));
        sql.run(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type) \
             select gen_random_uuid(), 't', g::text, 'e' from generate_series(1, 3) g",
        );
        let refused = init(&db, &[]).expect_code(3).stderr;
        assert!(refused.contains("holds 3 rows"), "{refused}");
        assert!(refused.contains("--existing leave"), "{refused}");
        assert_eq!(sql.one("select count(*)::text from pg_publication"), "0");
        assert_ne!(init(&db, &["--existing", "publish"]).code, 0);
        init(&db, &["--existing", "leave"]).expect_code(0);
        assert_eq!(
            sql.one(
                "select format('%s %s', made_table, (select bool_and(pg_visible_in_snapshot(xid, \
                 lower_bound)) from outbox)) from walrelay.relay"
            ),
            "f t"
        );
    }
}

#[test]
fn rows_written_between_the_tables_and_the_slot_want_a_decision_too() {
    let db = Cluster::shared(Pg::V18).database();
    let sql = db.connect();
    sql.run(&init(&db, &["--print-sql"]).expect_code(0).stdout);
    sql.run("select outbox_emit('t', '1', 'e', '{}')");
    let refused = init(&db, &[]).expect_code(3).stderr;
    assert!(refused.contains("holds 1 row"), "{refused}");
    assert_eq!(slots(&db), "");
    init(&db, &["--existing", "leave"]).expect_code(0);
}

#[test]
fn a_slot_or_publication_of_somebody_else_is_left_alone() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        let sql = db.connect();
        sql.run(&format!(
            "select pg_create_logical_replication_slot('{}', 'pgoutput')",
            db.slot()
        ));
        let before = slots(&db);
        let refused = init(&db, &[]).expect_code(3).stderr;
        assert!(refused.contains("walrelay did not make it"), "{refused}");
        assert_eq!(slots(&db), before);
        sql.run(&format!("select pg_drop_replication_slot('{}')", db.slot()));
        sql.run("create publication walrelay for all tables");
        let refused = init(&db, &[]).expect_code(3).stderr;
        assert!(refused.contains("publication walrelay exists"), "{refused}");
        sql.run("drop publication walrelay");
        assert_eq!(
            sql.one("select count(*)::text from pg_class where relname = 'outbox'"),
            "0"
        );
    }
}

/// Case S10.
#[test]
fn a_second_slot_on_the_same_outbox_is_refused() {
    let db = Cluster::shared(Pg::V15).database();
    init(&db, &[]).expect_code(0);
    let other = format!("{}_b", db.slot());
    let refused = init(&db, &["--slot", &other]).expect_code(3).stderr;
    assert!(
        refused.contains(&format!("already relayed through slot {}", db.slot())),
        "{refused}"
    );
    let refused = init(&db, &["--table", "public.other", "--publication", "other"])
        .expect_code(3)
        .stderr;
    assert!(refused.contains("public.outbox"), "{refused}");
}

/// Cases D08, D09, and what else a table or a publication can be.
#[test]
fn an_unfit_table_or_publication_is_refused_with_the_statement_that_mends_it() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        let sql = db.connect();
        sql.run(
            "create table half (event_id uuid, aggregate_id text generated always as (payload->>'id') \
             stored, event_type text, payload jsonb)",
        );
        let refused = init(&db, &["--table", "half"]).expect_code(3).stderr;
        assert!(
            refused.contains("column aggregate_id of public.half is generated"),
            "{refused}"
        );
        assert!(
            refused.contains("lacks the columns: aggregate_type, headers"),
            "{refused}"
        );
        init(&db, &[]).expect_code(0);
        sql.run("alter publication walrelay add table half");
        let refused = init(&db, &[]).expect_code(3).stderr;
        let mend = "alter publication \"walrelay\" set table only \"public\".\"outbox\"";
        assert!(
            refused.contains("public.half") && refused.contains(mend),
            "{refused}"
        );
        sql.run(mend);
        sql.run("alter publication walrelay set (publish = 'insert, update')");
        let refused = init(&db, &[]).expect_code(3).stderr;
        assert!(refused.contains("set (publish = 'insert')"), "{refused}");
    }
}

/// Case C10.
#[test]
fn names_that_need_quotes_work_and_a_second_time_too() {
    let db = Cluster::shared(Pg::V15).database();
    db.connect().run("create schema \"a.b\"");
    let names = [
        "--table",
        "\"a.b\".\"Out \"\"Box\"",
        "--publication",
        "\"My'Pub\"",
    ];
    init(&db, &names).expect_code(0);
    db.connect()
        .run("select \"a.b\".outbox_emit('t', 'k', 'e', '{}')");
    let again = init(&db, &names).expect_code(0).stdout;
    assert!(again.contains("nothing was changed"), "{again}");
    let refused = init(&db, &["--slot", "My-Slot"]).expect_code(2).stderr;
    assert!(refused.contains("My-Slot"), "{refused}");
}

/// Case C11.
#[test]
fn a_server_without_a_free_slot_lists_the_idle_ones() {
    let cluster = Cluster::with(Pg::V18, &["max_replication_slots = 1"]);
    let db = cluster.database();
    db.connect()
        .run("select pg_create_logical_replication_slot('forgotten', 'test_decoding')");
    let refused = init(&db, &[]).expect_code(3).stderr;
    assert!(refused.contains("forgotten (retains "), "{refused}");
}

/// Case R17's databases.
#[test]
fn a_database_need_not_be_utf8() {
    let cluster = Cluster::shared(Pg::V15);
    for encoding in ["LATIN1", "SQL_ASCII"] {
        let db = cluster.database_with(&format!(
            "encoding '{encoding}' locale 'C' template template0"
        ));
        let script = init(&db, &["--print-sql"]).expect_code(0).stdout;
        assert!(script.is_ascii());
        init(&db, &[]).expect_code(0);
        let again = init(&db, &[]).expect_code(0).stdout;
        assert!(again.contains("nothing was changed"), "{again}");
    }
}

#[test]
fn a_table_partitioned_by_day_is_published_as_one() {
    for pg in Pg::ALL {
        let db = Cluster::shared(pg).database();
        let sql = db.connect();
        sql.run(
            "create sequence outbox_ids;
             create table outbox (
               id bigint not null default nextval('outbox_ids'), event_id uuid not null,
               aggregate_type text not null, aggregate_id text not null, event_type text not null,
               payload jsonb, headers jsonb not null default '{}',
               created_at timestamptz not null default now(),
               xid xid8 not null default pg_current_xact_id(),
               primary key (id, created_at), unique (event_id, created_at)
             ) partition by range (created_at);
             create table outbox_all partition of outbox for values from (minvalue) to (maxvalue)",
        );
        init(&db, &[]).expect_code(0);
        sql.run("select outbox_emit('t', 'k', 'e', '{}')");
        assert_eq!(
            sql.one(
                "select format('%s %s', pubviaroot, tablename) from pg_publication_tables
                 join pg_publication using (pubname)"
            ),
            "t outbox"
        );
        sql.run("alter publication walrelay set (publish_via_partition_root = false)");
        let refused = init(&db, &[]).expect_code(3).stderr;
        assert!(
            refused.contains("publish_via_partition_root = true"),
            "{refused}"
        );
    }
}
