//! The table changes while the relay lags or runs (cases D01 to D06).

use crate::kafka::{Broker, Rec};
use crate::mapping::maps;
use crate::postgres::{Cluster, Pg, Sql};
use crate::refusals::says;
use crate::stage::{MINUTE, Stage};

/// Runs the statements with the relay stopped, then again (on another database) with it running.
fn both_ways(pg: Pg, records: usize, statements: impl Fn(&Sql), right: impl Fn(&[Rec])) {
    for running in [false, true] {
        let stage = Stage::shared(pg);
        let sql = stage.init();
        let early = running.then(|| stage.run());
        statements(&sql);
        let mut relay = early.unwrap_or_else(|| stage.run());
        let found = stage.records(records);
        stage.wait_confirmed(MINUTE);
        relay.stop();
        assert_eq!(stage.broker.count(&stage.topic("t")), records);
        right(&found);
    }
}

fn ins(sql: &Sql, key: &str, payload: &str) {
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', '{key}', 'e', '{payload}')"
    ));
}

#[test]
fn d01_columns_come_go_and_move() {
    for pg in Pg::ALL {
        both_ways(
            pg,
            3,
            |sql| {
                ins(sql, "k", r#"{"n":1}"#);
                sql.run("alter table outbox add column tenant text not null default 'x'");
                ins(sql, "k", r#"{"n":2}"#);
                sql.run(
                    "alter table outbox drop column event_type;
                     alter table outbox add column event_type text not null default 'late'",
                );
                sql.run(
                    "insert into outbox (event_id, aggregate_type, aggregate_id, payload)
                     values (gen_random_uuid(), 't', 'k', '{\"n\":3}')",
                );
            },
            |records| {
                let seen: Vec<_> = records
                    .iter()
                    .map(|r| (r.key_text(), r.value_text(), r.header("event_type")))
                    .collect();
                let right: Vec<_> = [("1", "e"), ("2", "e"), ("3", "late")]
                    .map(|(n, kind)| ("k".into(), format!("{{\"n\": {n}}}"), Some(kind.to_owned())))
                    .into();
                assert_eq!(seen, right);
            },
        );
    }
}

/// Sends what it can, stops in front of a row whose column is not there by that name, and says so;
/// nothing behind it is sent.
fn stops_at(stage: &Stage<'_>, sent: usize, column: &str, has: &str) {
    let ended = stage.run_to_end();
    let shape = format!("columns were {has}");
    says(
        &ended,
        3,
        &[column, "public.o", " at 0/", &shape, "--column"],
    );
    assert_eq!(
        stage.broker.count(&stage.topic("t")),
        sent,
        "{}",
        ended.stderr
    );
}

#[test]
fn d02_a_renamed_column_stops_the_relay_until_it_is_mapped_by_its_name() {
    for pg in Pg::ALL {
        let mut stage = Stage::shared(pg);
        let columns = |key: &str| {
            format!(
                "[columns]\nevent_id = 'id'\naggregate_id = '{key}'\npayload = 'p'\n\
                 aggregate_type = ''\nevent_type = ''\nheaders = ''\n"
            )
        };
        stage.template = Some(stage.topic("t"));
        maps(&mut stage, "o", &columns("k"));
        stage
            .db
            .connect()
            .run("create table o (id int, k text, p text)");
        let sql = stage.init();
        let put = |n: usize| sql.run(&format!("insert into o values ({n}, 'key', '{n}')"));
        put(1);
        sql.run("alter table o rename k to \"Ké\"");
        put(2);
        put(3);
        sql.run("alter table o rename \"Ké\" to k");
        put(4);
        stops_at(&stage, 1, "\"k\"", "id, Ké, p");
        stops_at(&stage, 1, "\"k\"", "id, Ké, p");
        // What the table is called by now does not matter to the rows of then.
        maps(&mut stage, "o", &columns("Ké"));
        stops_at(&stage, 3, "\"Ké\"", "id, k, p");
        maps(&mut stage, "o", &columns("k"));
        let mut relay = stage.run();
        stage.wait_count("t", 4, MINUTE);
        // And while it runs: dropped for good, with a row before and one behind.
        put(5);
        sql.run("alter table o drop k");
        sql.run("insert into o values (6, '6')");
        assert_eq!(relay.wait_exit(MINUTE), 3, "{}", relay.said());
        assert!(
            relay.said().contains("columns were id, p"),
            "{}",
            relay.said()
        );
        let records = stage.records(5);
        let values: Vec<String> = records.iter().map(Rec::value_text).collect();
        assert_eq!(values, ["1", "2", "3", "4", "5"]);
        assert!(records.iter().all(|r| r.key_text() == "key"));
        let slot = stage.db.slot();
        let is_below = format!(
            "select confirmed_flush_lsn < pg_current_wal_lsn() from pg_replication_slots
             where slot_name = '{slot}'"
        );
        assert_eq!(sql.one(&is_below), "t");
        // Where nothing is on its way the table's own state is judged at once.
        maps(&mut stage, "o", &columns("p"));
        let mut relay = stage.run();
        stage.wait_count("t", 6, MINUTE);
        relay.stop();
        maps(&mut stage, "o", &columns("k"));
        let words = ["public.o lacks the columns: k", "--column aggregate_id="];
        says(&stage.run_to_end(), 3, &words);
    }
}

#[test]
fn d04_d05_partitions_in_another_column_order_and_a_row_that_moves() {
    for pg in Pg::ALL {
        let mut stage = Stage::shared(pg);
        stage.template = Some(stage.topic("t"));
        let columns = "[columns]\nevent_id = 'id'\naggregate_id = 'agg'\npayload = 'p'\n\
                       aggregate_type = ''\nevent_type = ''\nheaders = ''\n";
        maps(&mut stage, "o", columns);
        let sql = stage.db.connect();
        sql.run(
            "create table o (id bigint, day date, agg text, p jsonb) partition by range (day);
             create table leaf (p jsonb, junk text, agg text, id bigint, day date);
             alter table leaf drop column junk;
             alter table o attach partition leaf for values from ('2026-01-01') to ('2026-01-02');
             create table next partition of o for values from ('2026-01-02') to ('2026-01-03')",
        );
        stage.init();
        let mut relay = stage.run();
        sql.run(
            r#"insert into o values (1, '2026-01-01', 'a', '{"n": 1}');
               insert into leaf (id, day, agg, p) values (2, '2026-01-01', 'b', '{"n": 2}')"#,
        );
        stage.wait_count("t", 2, MINUTE);
        sql.run("update o set day = day + 1 where id = 1");
        let mut records = stage.records(3);
        stage.wait_confirmed(MINUTE);
        relay.stop();
        assert_eq!(stage.broker.count(&stage.topic("t")), 3);
        records.sort_by_key(Rec::event_id);
        let seen: Vec<_> = records
            .iter()
            .map(|r| (r.event_id(), r.key_text(), r.value_text()))
            .collect();
        // The move is an insert to the stream; consumers know it by its id.
        let right = [("1", "a"), ("1", "a"), ("2", "b")]
            .map(|(id, key)| (id.to_owned(), key.to_owned(), format!("{{\"n\": {id}}}")));
        assert_eq!(seen, right);
    }
}

#[test]
fn d03_types_change_and_rewrites_send_nothing_again() {
    both_ways(
        Pg::V15,
        7,
        |sql| {
            ins(sql, "1", r#"{"n":1}"#);
            sql.run("alter table outbox alter column payload type text");
            ins(sql, "1", "plain text");
            sql.run("alter table outbox alter column aggregate_id type bigint using aggregate_id::bigint");
            ins(sql, "1", "3");
            sql.run(
                "create type colour as enum ('red', 'green');
                 alter table outbox add column colour colour default 'red'",
            );
            ins(sql, "1", "4");
            sql.run("alter table outbox replica identity nothing");
            ins(sql, "1", "5");
            sql.run("alter table outbox drop constraint outbox_pkey");
            ins(sql, "1", "6");
            sql.run("alter table outbox alter column event_type type colour using 'green'");
            sql.run(
                "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
                 values (gen_random_uuid(), 't', 1, 'green', '7')",
            );
        },
        |records| {
            let values: Vec<String> = records.iter().map(Rec::value_text).collect();
            assert_eq!(
                values,
                [r#"{"n": 1}"#, "plain text", "3", "4", "5", "6", "7"]
            );
            assert!(records.iter().all(|r| r.key_text() == "1"));
            assert_eq!(records[6].header("event_type").as_deref(), Some("green"));
        },
    );
}

/// One hundred rows, one of them with a payload that lives outside of the table proper.
fn hundred(sql: &Sql) {
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         select gen_random_uuid(), 't', 'k', 'e',
                case when n = 50 then jsonb_build_object('n', n, 'big', repeat(md5(n::text), 6250))
                     else jsonb_build_object('n', n) end
         from generate_series(1, 100) n order by n",
    );
}

fn assert_hundred(records: &[Rec]) {
    assert_eq!(records.len(), 100);
    for (n, record) in (1..).zip(records) {
        let value = record.value_text();
        assert!(value.contains(&format!("\"n\": {n}")), "{n}: {value:.40}");
        assert_eq!(value.len() > 200_000, n == 50);
    }
}

#[test]
fn d06_rows_truncated_before_delivery_are_delivered() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    hundred(&sql);
    sql.run("truncate outbox");
    let mut relay = stage.run();
    assert_hundred(&stage.records(100));
    relay.stop();
}

#[test]
fn d06_rows_of_a_dropped_or_detached_partition_are_delivered() {
    for pg in Pg::ALL {
        for farewell in [
            "drop table outbox_now",
            "alter table outbox detach partition outbox_now; drop table outbox_now",
        ] {
            let stage = Stage::of(Cluster::shared(pg).database(), Broker::shared());
            let sql = stage.db.connect();
            sql.run(
                "create sequence outbox_ids;
                 create table outbox (
                   id bigint not null default nextval('outbox_ids'),
                   event_id uuid not null,
                   aggregate_type text not null,
                   aggregate_id text not null,
                   event_type text not null,
                   payload jsonb,
                   headers jsonb not null default '{}',
                   created_at timestamptz not null default now(),
                   xid xid8 not null default pg_current_xact_id(),
                   primary key (id, created_at),
                   unique (event_id, created_at)
                 ) partition by range (created_at);
                 create table outbox_now partition of outbox
                   for values from ('2020-01-01') to ('2100-01-01')",
            );
            stage.init();
            hundred(&sql);
            sql.run(farewell);
            let mut relay = stage.run();
            assert_hundred(&stage.records(100));
            relay.stop();
        }
    }
}
