//! A table that was there before the relay: its names, its types, its lacks (cases R03, R09, R11,
//! R17 on mapped tables, D08).

use std::fs;

use crate::kafka::{Broker, Rec};
use crate::parked::{parked, wait_parked};
use crate::poison::halting;
use crate::postgres::{Cluster, Pg, Sql};
use crate::proc::{self, eventually};
use crate::refusals::says;
use crate::stage::{MINUTE, Stage};

/// The stage's relay reads this table, with these settings of its file.
pub fn maps(stage: &mut Stage<'_>, table: &str, settings: &str) {
    let file = proc::dir("mapping").join("walrelay.toml");
    let publication = format!("\"P {}\"", stage.db.name);
    // The topic is for `init`, which looks at the template's columns too.
    let text = format!(
        "table = '{table}'\npublication = '{publication}'\ntopic = '{}.t'\n{settings}",
        stage.prefix
    );
    fs::write(&file, text).expect("the directory is ours");
    let file = file.to_str().expect("UTF-8").to_owned();
    stage.source_args = vec!["--config".to_owned(), file];
}

fn key(record: &Rec) -> &[u8] {
    record.key.as_deref().expect("a key")
}

#[test]
fn names_of_any_kind_are_mapped_and_the_table_is_left_as_it_is() {
    for pg in [Pg::V15, Pg::V18] {
        let mut stage = Stage::shared(pg);
        maps(
            &mut stage,
            r#""Ört 日"."Out ""Bóx""""#,
            r#"
[columns]
event_id = "UID"
aggregate_id = "Schlüssel"
aggregate_type = "種別"
event_type = ""
payload = '"Bo""dy"'
headers = ""
timestamp = "Wann"
partition = "part"
[headers]
tenant = "Mandant ID"
"#,
        );
        stage.template = Some(format!("{}.{{種別}}-{{Mandant ID}}", stage.prefix));
        let topic = format!("{}.x-7", stage.prefix);
        let odd = format!("{}.né x-7", stage.prefix);
        stage.run_args = vec!["--topic-for".to_owned(), format!("{odd}={topic}")];
        stage.broker.create_topic(&topic, 6);
        let sql = stage.db.connect();
        sql.run(
            r#"create schema "Ört 日";
               create domain "Ört 日".doc as bytea;
               create table "Ört 日"."Out ""Bóx""" (
                 "Bo""dy" "Ört 日".doc, "Mandant ID" int not null, part smallint,
                 "Wann" timestamptz, "種別" text not null, "Schlüssel" uuid not null,
                 "UID" bigint primary key)"#,
        );
        let columns = "select string_agg(format('%s %s %s', attname, atttypid, attnum), ',')
             from pg_attribute where attrelid = '\"Ört 日\".\"Out \"\"Bóx\"\"\"'::regclass";
        let before = sql.one(columns);
        let ended = stage.try_init().expect_code(0);
        assert!(ended.stdout.contains("no column xid"), "{}", ended.stdout);
        assert!(
            ended.stdout.contains("no column created_at"),
            "{}",
            ended.stdout
        );
        assert_eq!(sql.one(columns), before);
        let again = stage.try_init().expect_code(0);
        assert!(again.stdout.contains("nothing to do"), "{}", again.stdout);

        sql.run(
            r#"insert into "Ört 日"."Out ""Bóx""" ("UID", "種別", "Schlüssel", "Bo""dy",
                 "Mandant ID", "Wann", part)
               values (1, 'x', 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11', '\x00ff80', 7,
                       now() - interval '1 hour', 5),
                      (2, 'né x', 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11', null, 7, null, null)"#,
        );
        let mut relay = stage.run();
        stage.broker.wait_count(&topic, 2, MINUTE);
        relay.stop();
        let mut records = stage.broker.read_all(&topic);
        records.sort_by_key(Rec::event_id);
        assert_eq!(records.len(), 2);
        let text = |text: &str| Some(text.as_bytes().to_vec());
        for (record, id, value, partition) in [
            (&records[0], "1", Some(vec![0, 0xff, 0x80]), 5),
            (&records[1], "2", None, 3),
        ] {
            assert_eq!(key(record), b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11");
            assert_eq!((record.value.clone(), record.partition), (value, partition));
            let kind = if id == "1" { "x" } else { "né x" };
            let headers = [("event_id", id), ("aggregate_type", kind), ("tenant", "7")];
            let headers = headers.map(|(name, value)| (name.to_owned(), text(value)));
            assert_eq!(record.headers, headers);
        }
        let age =
            records[1].timestamp_ms.expect("sent at") - records[0].timestamp_ms.expect("mapped");
        assert!(
            (3_590_000..3_700_000).contains(&age),
            "an hour apart: {age} ms"
        );
        assert!(relay.said().contains("time of sending"), "{}", relay.said());
    }
}

/// Adds a row with this key; its id is its number.
fn keyed(sql: &Sql, n: usize, key: &str) {
    sql.run(&format!("insert into o values ({n}, {key}, '{{}}')"));
}

const BARE: &str = "[columns]\nevent_id = 'id'\naggregate_id = 'k'\npayload = 'p'\n\
                    aggregate_type = ''\nevent_type = ''\nheaders = ''\n";

/// A stage over `o (id, k, p)`, with more settings.
fn bare<'a>(mut stage: Stage<'a>, types: &str, more: &str) -> (Stage<'a>, Sql) {
    maps(&mut stage, "o", &format!("{BARE}{more}"));
    stage.template = Some(stage.topic("t"));
    stage.db.connect().run(&format!("create table o ({types})"));
    let sql = stage.init();
    (stage, sql)
}

#[test]
fn r09_a_key_of_any_type_is_the_text_that_its_type_prints() {
    for pg in [Pg::V15, Pg::V18] {
        let (stage, sql) = bare(Stage::shared(pg), "id int, k uuid, p json", "");
        let keys: [(&str, &str, &str, &[u8], i32); 9] = [
            (
                "uuid",
                "null",
                "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'",
                b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
                3,
            ),
            ("bigint", "0", "-5", b"-5", 3),
            ("char(6)", "''", "'ab'", b"ab    ", 3),
            ("bool", "true", "true", b"t", -1),
            ("numeric(8,2)", "0", "1.5", b"1.50", -1),
            ("bytea", "''", r"'\x00ff'", b"\x00\xff", -1),
            (
                "timestamptz",
                "now()",
                "'2026-03-29 01:30+02'",
                b"2026-03-28 23:30:00+00",
                -1,
            ),
            ("text[]", "'{}'", "array['a b', 'c']", br#"{"a b",c}"#, -1),
            ("float8", "0", "0.1", b"0.1", -1),
        ];
        for (n, (kind, using, value, _, _)) in keys.iter().enumerate() {
            sql.run(&format!("alter table o alter k type {kind} using {using}"));
            keyed(&sql, n, value);
        }
        // A domain over bytea has an oid of its own.
        sql.run("create domain raw as bytea; alter table o alter k type raw using ''");
        keyed(&sql, 9, r"'\x0102'");
        let mut relay = stage.run();
        let mut records = stage.records(10);
        relay.stop();
        records.sort_by_key(Rec::event_id);
        for (n, (kind, _, _, right, partition)) in keys.iter().enumerate() {
            assert_eq!(key(&records[n]), *right, "{kind}");
            if *partition >= 0 {
                assert_eq!(records[n].partition, *partition, "{kind}");
            }
            assert_eq!(records[n].headers.len(), 1, "event_id and no more");
        }
        assert_eq!(key(&records[9]), [1, 2]);
    }
}

#[test]
fn a_date_that_the_broker_refuses_does_not_take_its_neighbours_times() {
    let (stage, sql) = bare(
        Stage::shared(Pg::V16),
        "id int, k text, p text, at timestamptz",
        "timestamp = 'at'\n",
    );
    sql.run(
        "insert into o values (0, 'k', 'p', '2024-03-05 06:07:08.125+00');
         insert into o values (1, 'k', 'p', now() + interval '5 years');
         insert into o values (2, 'k', 'p', '1970-01-01 00:00:00.001+00');
         insert into o values (3, 'k', 'p', '2024-03-05 06:07:09+00')",
    );
    let mut relay = stage.run();
    let mut records = stage.records(4);
    relay.stop();
    records.sort_by_key(|r| r.event_id().parse::<usize>().expect("a number"));
    let times: Vec<i64> = records.iter().filter_map(|r| r.timestamp_ms).collect();
    assert_eq!(
        [times[0], times[2], times[3]],
        [1_709_618_828_125, 1, 1_709_618_829_000]
    );
    let year = 365 * 24 * 3600 * 1000;
    assert!(times[1] > times[0] + year, "the time of sending: {times:?}");
    assert!(
        relay.said().contains("ahead of their commit"),
        "{}",
        relay.said()
    );
}

#[test]
fn a_timestamp_column_of_each_type_is_read_to_the_millisecond() {
    let (stage, sql) = bare(
        Stage::shared(Pg::V18),
        "id int, k text, p text, at timestamptz",
        "timestamp = 'at'\n",
    );
    let mut expected: Vec<Option<i64>> = Vec::new();
    let mut put = |value: &str, is_held: bool| {
        let n = expected.len();
        sql.run(&format!("insert into o values ({n}, 'k', 'p', {value})"));
        let epoch =
            format!("select floor(extract(epoch from at) * 1000)::int8 from o where id = {n}");
        expected.push(is_held.then(|| sql.one(&epoch).parse().expect("a number")));
    };
    let floor = "'2026-03-29 01:30:00.123999+05:45'";
    put(floor, true);
    put("'1970-01-01 00:00:00.001+00'", true);
    put("'1969-12-31 23:59:59.999999+00'", false);
    put("'infinity'", false);
    put("'-infinity'", false);
    put("'0044-03-15 12:00:00+00 BC'", false);
    put("null", false);
    sql.run("alter table o alter at type timestamp using null");
    put("'2026-03-29 01:30:00.1'", true);
    sql.run("alter table o alter at type date using null");
    put("'2026-03-29'", true);
    sql.run("create domain moment as timestamptz; alter table o alter at type moment using null");
    put(floor, true);
    sql.run("alter table o alter at type bigint using null");
    sql.run("insert into o values (10, 'k', 'p', 1774747800123)");
    expected.push(Some(1_774_747_800_123));

    let before: i64 = sql
        .one("select floor(extract(epoch from clock_timestamp()) * 1000)::int8")
        .parse()
        .expect("a number");
    let mut relay = stage.run();
    let mut records = stage.records(expected.len());
    relay.stop();
    records.sort_by_key(|r| r.event_id().parse::<usize>().expect("a number"));
    for (n, (record, right)) in records.iter().zip(&expected).enumerate() {
        let found = record.timestamp_ms.expect("a timestamp");
        match right {
            Some(right) => assert_eq!(found, *right, "row {n}"),
            None => assert!(found >= before, "row {n} has the time of sending: {found}"),
        }
    }
    let warnings = relay.lines();
    let warnings = warnings.iter().filter(|line| line.has("time of sending"));
    assert_eq!(warnings.count(), 1, "said once:\n{}", relay.said());

    // What is no time is refused, and stops the relay in front of a row, whatever it is by now.
    sql.run("alter table o alter at type text using null");
    says(
        &stage.run_to_end(),
        3,
        &["column at of public.o is of type text"],
    );
    sql.run(
        "insert into o values (11, 'k', 'p', 'noon'); alter table o alter at type date using null",
    );
    let words = [
        "\"at\" of public.o",
        "no timestamp in the transaction at",
        "--column timestamp=",
    ];
    says(&stage.run_to_end(), 3, &words);
    assert_eq!(stage.broker.count(&stage.topic("t")), expected.len());
}

#[test]
fn the_time_of_sending_is_to_be_had_too() {
    let (mut stage, sql) = bare(Stage::shared(Pg::V15), "id int, k text, p text", "");
    stage.run_args = vec!["--timestamp".to_owned(), "publish".to_owned()];
    keyed(&sql, 1, "'k'");
    let committed: i64 = sql
        .one("select floor(extract(epoch from clock_timestamp()) * 1000)::int8")
        .parse()
        .expect("a number");
    let mut relay = stage.run();
    let record = stage.records(1).remove(0);
    relay.stop();
    assert!(record.timestamp_ms.expect("sent") >= committed);
}

#[test]
fn a_partition_that_the_topic_has_not_is_parked_with_its_key() {
    let mut shared = Stage::shared(Pg::V15);
    // It is to be seen soon that the topic has grown.
    shared.run_args = [
        "topic.metadata.refresh.interval.ms=1000",
        "statistics.interval.ms=500",
    ]
    .iter()
    .flat_map(|property| ["--kafka".to_owned(), (*property).to_owned()])
    .collect();
    let (stage, sql) = bare(
        shared,
        "id int, k text, p text, part bigint",
        "partition = 'part'\n",
    );
    let put = |n: usize, key: &str, part: &str| {
        sql.run(&format!("insert into o values ({n}, '{key}', 'p', {part})"));
    };
    // Some of them before the topic is known, some when it is.
    put(0, "order-1", "5");
    put(1, "order-1", "6");
    let mut relay = stage.run();
    wait_parked(&stage, &sql, 1);
    put(2, "order-1", "0");
    put(3, "order-2", "-1");
    put(4, "order-3", "1");
    put(5, "order-4", "3000000000");
    stage.wait_confirmed(MINUTE);
    let records = stage.broker.read_all(&stage.topic("t"));
    let mut at: Vec<_> = records
        .iter()
        .map(|r| (r.key_text(), r.partition))
        .collect();
    at.sort();
    assert_eq!(at, [("order-1".to_owned(), 5), ("order-3".to_owned(), 1)]);
    let letters = parked(&sql);
    let told: Vec<_> = letters
        .iter()
        .map(|letter| (letter.id.as_str(), letter.reason.as_str()))
        .collect();
    assert_eq!(
        told,
        [
            ("1", "refused"),
            ("2", "behind"),
            ("3", "malformed_row"),
            ("5", "malformed_row")
        ]
    );
    for word in ["column part", "partition 6", "has 6 (0 to 5)"] {
        assert!(letters[0].message.contains(word), "{letters:?}");
    }
    assert!(letters[2].message.contains("partition -1"), "{letters:?}");
    // What its column asked for is kept.
    let asked = "select partition from walrelay.dead_letter where event_id = '1'";
    assert_eq!(sql.one(asked), "6");
    // None of them is ever sent to another partition.
    stage.dead_letters(&["retry", "--all"]).expect_code(0);
    eventually(MINUTE, "all retries have failed", || {
        let failed = "select count(*) from walrelay.dead_letter
                      where attempts = 1 and retry_requested_at is null";
        (sql.one(failed) == "3").then_some(())
    });
    assert_eq!(stage.broker.count(&stage.topic("t")), 2);
    stage.broker.add_partitions(&stage.topic("t"), 7);
    relay.wait_for_text("7 partitions", MINUTE);
    stage
        .dead_letters(&["retry", "--key", "order-1"])
        .expect_code(0);
    stage.wait_count("t", 4, MINUTE);
    relay.stop();
    let records = stage.broker.read_all(&stage.topic("t"));
    let mut at: Vec<_> = records
        .iter()
        .map(|r| (r.event_id(), r.partition))
        .collect();
    at.sort();
    let expected = [("0", 5), ("1", 6), ("2", 0), ("4", 1)];
    assert_eq!(
        at,
        expected.map(|(id, partition)| (id.to_owned(), partition))
    );
    assert_eq!(parked(&sql).len(), 2);
}

#[test]
fn a_partition_that_the_topic_has_not_halts_in_front_of_the_row() {
    let (stage, sql) = bare(
        halting(Pg::V15),
        "id int, k text, p text, part bigint",
        "partition = 'part'\n",
    );
    let put = |n: usize, part: &str| {
        sql.run(&format!(
            "insert into o values ({n}, 'order-1', 'p', {part})"
        ));
    };
    for (n, part) in ["5", "0", "null", "6", "1"].into_iter().enumerate() {
        put(n, part);
    }
    // All of them are held until the topic is known, and again after the restart.
    for _ in 0..2 {
        let words = ["event 3 ", "column part", "partition 6", "has 6 (0 to 5)"];
        says(&stage.run_to_end(), 4, &words);
        assert_eq!(stage.broker.count(&stage.topic("t")), 3);
    }
    let mut records = stage.broker.read_all(&stage.topic("t"));
    records.sort_by_key(Rec::event_id);
    let partitions: Vec<i32> = records.iter().map(|r| r.partition).collect();
    assert_eq!(partitions, [5, 0, 4]);

    // Without the column the row passes, alone and first; then one is refused whose topic is known.
    let (stage, sql) = bare(
        halting(Pg::V15),
        "id int, k text, p text, part bigint",
        "partition = 'part'\n",
    );
    let mut relay = stage.run();
    sql.run("insert into o values (1, 'order-1', 'p', 1)");
    stage.records(1);
    sql.run("insert into o values (2, 'order-1', 'p', -1), (3, 'order-1', 'p', 1)");
    assert_eq!(relay.wait_exit(MINUTE), 4, "{}", relay.said());
    let said = relay.said();
    assert!(
        said.contains("event 2 ") && said.contains("partition -1"),
        "{said}"
    );
    assert_eq!(stage.broker.count(&stage.topic("t")), 1);
    let mut stage = stage;
    stage.run_args = vec!["--column".to_owned(), "partition=".to_owned()];
    let mut relay = stage.run();
    stage.records(3);
    relay.stop();
}

#[test]
fn payloads_of_each_type_and_headers_that_are_null_or_no_object() {
    let mut stage = halting(Pg::V18);
    maps(
        &mut stage,
        "o",
        "[columns]\nevent_id = 'id'\naggregate_id = 'k'\npayload = 'p'\n\
         aggregate_type = ''\nevent_type = ''\nheaders = 'Head'\n[headers]\nopt = 'opt'\n",
    );
    stage.template = Some(stage.topic("t"));
    stage
        .db
        .connect()
        .run(r#"create table o (id text, k text, p json, "Head" json, opt text)"#);
    let sql = stage.init();
    let put = |id: &str, value: &str, head: &str| {
        sql.run(&format!(
            "insert into o values ('{id}', 'k', {value}, {head}, null)"
        ));
    };
    put("1", "'{ \"b\":1,  \"a\":1.10}'", "null");
    put(
        "2",
        "null",
        "'{\"aggregate_type\": \"row\", \"event_id\": \"forged\"}'",
    );
    sql.run("alter table o alter p type jsonb using null");
    put("3", "'null'", "'{}'");
    sql.run("alter table o alter p type text using null");
    put("4", "''", "null");
    sql.run("alter table o alter p type varchar(9) using null");
    put("5", "'é'", "null");
    sql.run("alter table o alter p type bytea using null");
    put("6", r"'\x00'", "null");
    sql.run("alter table o alter p type text using null");
    put("7", r"'\x00'", "'[1]'");
    let ended = stage.run_to_end();
    says(&ended, 4, &["event 7 ", "column Head is not a JSON object"]);
    let records = stage.records(6);
    let values: Vec<Option<&[u8]>> = records.iter().map(|r| r.value.as_deref()).collect();
    let right: [Option<&[u8]>; 6] = [
        Some(b"{ \"b\":1,  \"a\":1.10}"),
        None,
        Some(b"null"),
        Some(b""),
        Some("é".as_bytes()),
        Some(b"\x00"),
    ];
    assert_eq!(values, right);
    for (n, record) in (1..).zip(&records) {
        assert_eq!(record.event_id(), n.to_string());
        assert!(
            record.headers.contains(&("opt".to_owned(), None)),
            "a null header"
        );
        assert_eq!(record.headers.len(), if n == 2 { 3 } else { 2 });
    }
    // No column gives it, so that the row may.
    assert_eq!(records[1].header("aggregate_type").as_deref(), Some("row"));
}

#[test]
fn columns_that_will_not_do_are_refused_all_at_once() {
    for pg in [Pg::V15, Pg::V18] {
        let mut stage = Stage::shared(pg);
        maps(
            &mut stage,
            "o",
            "[columns]\nevent_id = 'EventID'\nevent_type = 'kind'\ntimestamp = 'at'\n\
             partition = 'part'\nxid = 'tx'\n",
        );
        stage.template = Some(stage.topic("t"));
        let virtual_too = if pg == Pg::V18 { "virtual" } else { "stored" };
        let sql = stage.db.connect();
        sql.run(&format!(
            "create table o (event_id uuid, aggregate_id text generated always as (p ->> 'id') stored,
               kind text generated always as ('e') {virtual_too}, p jsonb, payload int, at time, part text)"
        ));
        let ended = stage.try_init();
        let words = [
            "column aggregate_id of public.o is generated; Postgres 17 and older do not publish it",
            "column kind of public.o is generated",
            "column payload of public.o is of type integer",
            "column at of public.o is of type time without time zone, which is no timestamp",
            "column part of public.o is of type text, which is no partition",
            "public.o lacks the columns: \"EventID\", aggregate_type, headers, tx",
            "--column event_id=event_id (did you mean that one?)",
            "--column headers=COLUMN (--column headers= if there is none)",
            "the table has event_id, aggregate_id,",
        ];
        says(&ended, 3, &words);
        // A table that is to be made cannot have other people's columns.
        sql.run("drop table o");
        let words = [
            "public.o does not exist",
            "no column \"EventID\", kind, at, part, tx",
        ];
        says(&stage.try_init(), 3, &words);
        assert_eq!(
            sql.one("select count(*) from pg_tables where schemaname = 'public'"),
            "0"
        );
    }
}

#[test]
fn two_tables_of_one_database_are_relayed_side_by_side() {
    let mut one = Stage::shared(Pg::V15);
    let sql = one.db.connect();
    sql.run(
        "create table o (id int, k text, p json); create table q (uid uuid, \"Key\" int, body bytea)",
    );
    maps(&mut one, "o", BARE);
    one.template = Some(one.topic("t"));
    one.init();
    // The second one: the same database, names of its own.
    let file = proc::dir("mapping").join("second.toml");
    let text = format!(
        "table = 'q'\nslot = 's2_{0}'\npublication = 'second'\ntopic = '{1}'\n[columns]\n\
         event_id = 'uid'\naggregate_id = 'Key'\npayload = 'body'\naggregate_type = ''\n\
         event_type = ''\nheaders = ''\n",
        one.db.name,
        one.topic("q")
    );
    fs::write(&file, text).expect("ours");
    let file = file.to_str().expect("UTF-8");
    one.broker.create_topic(&one.topic("q"), 3);
    let url = one.db.url();
    let second = ["--config", file, "--database-url", &url];
    let init = [&["init", "--lock-timeout", "50s"], &second[..]].concat();
    crate::relay::run_to_end(&init, &[], MINUTE).expect_code(0);
    let brokers = one.broker.bootstrap();
    let run = [&["run", "--brokers", &brokers], &second[..]].concat();
    let mut first = one.run();
    let mut other = crate::relay::Relay::start(&run, &[]);
    for n in 0..10 {
        sql.run(&format!(
            "begin; insert into o values ({n}, 'k', '{{}}');
             insert into q values (gen_random_uuid(), {n}, '\\x00'); commit"
        ));
    }
    one.wait_count("t", 10, MINUTE);
    one.broker.wait_count(&one.topic("q"), 10, MINUTE);
    first.stop();
    other.stop();
    assert_eq!(one.broker.count(&one.topic("t")), 10);
    let keys: Vec<String> = one
        .broker
        .read_all(&one.topic("q"))
        .iter()
        .map(Rec::key_text)
        .collect();
    assert_eq!(keys.len(), 10);
    assert!(
        (0..10).all(|n: i32| keys.contains(&n.to_string())),
        "{keys:?}"
    );
}

#[test]
fn r17_mapped_names_and_values_outside_of_utf8() {
    let latin =
        Cluster::shared(Pg::V15).database_with("encoding 'LATIN1' locale 'C' template template0");
    let settings = "[columns]\nevent_id = 'id'\naggregate_id = 'Clé'\npayload = 'p'\n\
                    aggregate_type = ''\nevent_type = ''\nheaders = ''\n[headers]\nh = 'pièce'\n";
    let create = r#"create table "Boîte" (id int, "Clé" text, p bytea, "pièce" text)"#;
    let insert = |sql: &Sql, key: &str| {
        sql.run(&format!(
            r#"insert into "Boîte" values (1, {key}, '\x00', 'à')"#
        ));
    };
    let mut stage = Stage::of(latin, Broker::shared());
    maps(&mut stage, r#""Boîte""#, settings);
    stage.template = Some(stage.topic("t"));
    stage.db.connect().run(create);
    let sql = stage.init();
    insert(&sql, "'café'");
    let mut relay = stage.run();
    let record = stage.records(1).remove(0);
    relay.stop();
    assert_eq!(record.key_text(), "café");
    assert_eq!(record.header("h").as_deref(), Some("à"));

    let ascii = Cluster::shared(Pg::V18)
        .database_with("encoding 'SQL_ASCII' locale 'C' template template0");
    let mut stage = Stage::of(ascii, Broker::shared());
    maps(&mut stage, r#""Boîte""#, settings);
    stage.template = Some(stage.topic("t"));
    stage.db.connect().run(create);
    let sql = stage.init();
    sql.run("set client_encoding to 'SQL_ASCII'");
    insert(&sql, r"E'caf\xe9'");
    let mut relay = stage.run();
    let record = stage.records(1).remove(0);
    relay.stop();
    assert_eq!(key(&record), b"caf\xe9");
    assert_eq!(
        record.header("h").as_deref(),
        Some("à"),
        "the bytes as they were written"
    );
}

#[test]
fn d09_a_second_table_in_the_publication_is_never_published_as_ours() {
    let (stage, sql) = bare(Stage::shared(Pg::V15), "id int, k text, p text", "");
    let mut relay = stage.run();
    keyed(&sql, 1, "'k'");
    stage.records(1);
    let publication = format!("\"P {}\"", stage.db.name);
    sql.run(&format!(
        "create schema b; create table b.o (like public.o including all);
         alter publication {publication} add table b.o;
         insert into b.o values (90, 'k', '{{}}'), (91, 'k', '{{}}')"
    ));
    keyed(&sql, 2, "'k'");
    let records = stage.records(2);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    let ids: Vec<String> = records.iter().map(Rec::event_id).collect();
    assert_eq!(ids, ["1", "2"]);
    let lines = relay.lines();
    let foreign = lines
        .iter()
        .filter(|l| l.level() == "WARN" && l.has("also carries table"));
    assert_eq!(foreign.count(), 1, "{}", relay.said());
    says(
        &stage.run_to_end(),
        3,
        &["b.o beside public.o", "alter publication"],
    );
    // Taken out again, the relay goes on.
    sql.run(&format!("alter publication {publication} drop table b.o"));
    keyed(&sql, 3, "'k'");
    let mut relay = stage.run();
    stage.records(3);
    eventually(MINUTE, "nothing of it came", || {
        (stage.broker.count(&stage.topic("t")) == 3).then_some(())
    });
    relay.stop();
}
