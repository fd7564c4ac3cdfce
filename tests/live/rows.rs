//! What is written, and the exact record that comes of it (cases R01 to R18).

use std::time::Duration;

use crate::kafka::{Broker, Rec};
use crate::poison::halting;
use crate::postgres::{Cluster, Pg, Sql};
use crate::stage::{MINUTE, Stage};

/// An outbox row of topic `t`; key and payload are SQL expressions.
fn ins(sql: &Sql, key: &str, payload: &str) {
    sql.run(&insert(key, payload));
}

fn insert(key: &str, payload: &str) -> String {
    format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', {key}, 'e', {payload})"
    )
}

/// The records that these statements make, in the order of their partitions.
fn relayed(pg: Pg, prepare: &str, rows: &[(&str, &str)]) -> Vec<Rec> {
    let stage = Stage::shared(pg);
    let sql = stage.init();
    sql.run(prepare);
    for (key, payload) in rows {
        ins(&sql, key, payload);
    }
    let mut relay = stage.run();
    let records = stage.records(rows.len());
    relay.stop();
    assert_eq!(records.len(), rows.len());
    records
}

fn one(pg: Pg, prepare: &str, key: &str, payload: &str) -> Rec {
    relayed(pg, prepare, &[(key, payload)]).remove(0)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn by_key<'a>(records: &'a [Rec], key: &str) -> &'a Rec {
    records
        .iter()
        .find(|r| r.key.as_deref() == Some(key.as_bytes()))
        .unwrap_or_else(|| panic!("no record of key {key}"))
}

#[test]
fn r01_jsonb_is_passed_on_as_postgres_prints_it() {
    for pg in Pg::ALL {
        let record = one(
            pg,
            "",
            "'order-1'",
            r#"'{"b":1.10,"a":1e3,"a":2,"c":1.5e-7,"n":-0.0,"big":12345678901234567890.12}'"#,
        );
        let right =
            r#"{"a": 2, "b": 1.10, "c": 0.00000015, "n": 0.0, "big": 12345678901234567890.12}"#;
        assert_eq!(right.len(), 78);
        assert_eq!(record.value_text(), right);
        assert_eq!(
            (record.key_text().as_str(), record.partition),
            ("order-1", 4)
        );
    }
}

#[test]
fn r02_unicode_is_neither_escaped_nor_split() {
    let record = one(Pg::V15, "", "'k'", r#"'{"é":"\u00e9\ud83d\ude00\/<>&"}'"#);
    assert_eq!(
        hex(&record.value.expect("a value")),
        "7b22c3a9223a2022c3a9f09f98802f3c3e26227d"
    );
}

#[test]
fn r03_sql_null_json_null_empty_and_string_stay_apart() {
    let rows = [
        ("'1'", "null"),
        ("'2'", "'null'"),
        ("'3'", "'{}'"),
        ("'4'", r#"'"x"'"#),
    ];
    let records = relayed(Pg::V18, "", &rows);
    let value = |key| by_key(&records, key).value.clone();
    assert_eq!(value("1"), None);
    assert_eq!(value("2").as_deref(), Some(&b"null"[..]));
    assert_eq!(value("3").as_deref(), Some(&b"{}"[..]));
    assert_eq!(value("4").as_deref(), Some(&b"\"x\""[..]));
    let tombstone = by_key(&records, "1");
    assert_eq!(tombstone.header("event_type").as_deref(), Some("e"));
    assert_eq!(tombstone.event_id().len(), 36);
}

#[test]
fn r04_json_is_verbatim() {
    let record = one(
        Pg::V15,
        "alter table outbox alter column payload type json",
        "'k'",
        r#"E'{ "b":1,\n "a":1.10, "a":"\\u0000"}'"#,
    );
    assert_eq!(
        record.value_text(),
        "{ \"b\":1,\n \"a\":1.10, \"a\":\"\\u0000\"}"
    );
}

#[test]
fn r05_thirty_stored_bytes_become_a_huge_event() {
    let record = one(Pg::V15, "", "'k'", r#"'{"a":1e131071}'"#);
    let value = record.value_text();
    assert_eq!(value.len(), 131_079);
    assert!(value.starts_with(r#"{"a": 1000"#) && value.ends_with("000}"));
}

#[test]
fn r06_bytea_is_raw_even_for_a_role_that_prints_it_the_old_way() {
    for pg in Pg::ALL {
        let mut stage = Stage::shared(pg);
        let sql = stage.init();
        stage.user = format!("r06_{}", stage.db.name);
        sql.run(&format!(
            "create role {0} superuser login replication;
             alter role {0} set bytea_output = 'escape';
             alter table outbox alter column payload type bytea using null",
            stage.user
        ));
        ins(&sql, "'k'", r"'\x00ff80'");
        let mut relay = stage.run();
        let records = stage.records(1);
        relay.stop();
        assert_eq!(hex(records[0].value.as_deref().expect("a value")), "00ff80");
        sql.run(&format!("drop role {}", stage.user));
    }
}

#[test]
fn r07_control_characters_and_emoji_pass_in_the_key() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    ins(&sql, r#"E'a\tb\n"q" \U0001F600é'"#, "'{}'");
    let mut relay = stage.run();
    let records = stage.records(1);
    relay.stop();
    assert_eq!(
        hex(records[0].key.as_deref().expect("a key")),
        "6109620a22712220f09f9880c3a9"
    );
    assert_eq!(records[0].partition, 0);
    // One line an entry, whatever the entry says.
    let (said, lines) = (relay.said(), relay.lines());
    assert_eq!(said.lines().count(), lines.len(), "{said}");
}

#[test]
fn r08_an_empty_key_is_a_key() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let compacted = stage.topic("c");
    stage
        .broker
        .create_topic_with(&compacted, 6, &[("cleanup.policy", "compact")]);
    ins(&sql, "''", "'{}'");
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 'c', '', 'e', '{}')",
    );
    let mut relay = stage.run();
    let mut records = stage.records(1);
    stage.broker.wait_count(&compacted, 1, MINUTE);
    records.extend(stage.broker.read_all(&compacted));
    relay.stop();
    for record in records {
        assert_eq!((record.key, record.partition), (Some(Vec::new()), 3));
    }
}

#[test]
fn r10_header_values_are_as_postgres_prints_them() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    sql.run(
        r#"insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
           values ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 't', 'k', 'e', '{}',
                   '{"z":null,"n":1.10,"b":true,"o":{"x":1},"e":"","s":"é"}')"#,
    );
    let mut relay = stage.run();
    let records = stage.records(1);
    relay.stop();
    let text = |t: &str| Some(t.as_bytes().to_vec());
    let right = [
        ("event_id", text("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")),
        ("event_type", text("e")),
        ("aggregate_type", text("t")),
        ("b", text("true")),
        ("e", text("")),
        ("n", text("1.10")),
        ("o", text(r#"{"x": 1}"#)),
        ("s", text("é")),
        ("z", None),
    ];
    let right: Vec<(String, Option<Vec<u8>>)> =
        right.into_iter().map(|(n, v)| (n.to_owned(), v)).collect();
    assert_eq!(records[0].headers, right);
}

#[test]
fn r12_a_row_cannot_forge_the_dedupe_key() {
    let stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    sql.run(
        r#"insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
           values ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 't', 'k', 'e', '{}',
                   '{"event_id":"forged","event_type":"forged","aggregate_type":"forged",
                     "traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}')"#,
    );
    let mut relay = stage.run();
    let records = stage.records(1);
    relay.wait_for("a warning names the dropped header", MINUTE, |line| {
        line.level() == "WARN" && line.has("event_id")
    });
    relay.stop();
    // `header` fails on a name that comes twice.
    let header = |name| records[0].header(name).expect("it is there");
    assert_eq!(header("event_id"), "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11");
    assert_eq!(header("event_type"), "e");
    assert_eq!(header("aggregate_type"), "t");
    assert_eq!(
        header("traceparent"),
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    );
    assert_eq!(records[0].headers.len(), 4);
}

/// Exit 4 at a row whose topic has no legal name: the row before it is delivered and confirmed,
/// the one behind it is not sent, and a restart says the same.
fn halts_at_topic(template: Option<&str>, aggregate_type: &str, topic: &str) {
    let mut stage = halting(Pg::V15);
    stage.template = template.map(str::to_owned);
    let good = format!("good-{}", stage.prefix);
    let sql = stage.init();
    stage.broker.create_topic(&good, 1);
    let good_type = match template {
        None => "t".to_owned(),
        Some("{aggregate_type}") => good.clone(),
        Some(other) => panic!("{other} is not foreseen here"),
    };
    let good_topic = template.map_or_else(|| stage.topic("t"), |_| good.clone());
    for kind in [good_type.as_str(), aggregate_type, good_type.as_str()] {
        sql.exec(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (gen_random_uuid(), $1, 'k', 'e', '{}')",
            &[&kind],
        )
        .expect("a row");
    }
    for _ in 0..2 {
        let ended = stage.run_to_end().expect_code(4);
        assert!(ended.stderr.contains(topic), "{}", ended.stderr);
        assert!(ended.stderr.contains("249"), "{}", ended.stderr);
        assert_eq!(stage.broker.count(&good_topic), 1);
    }
}

#[test]
fn r13_illegal_topic_names_halt_and_are_not_mended() {
    halts_at_topic(None, "a b/c", "a b/c");
    halts_at_topic(None, "né", "né");
    halts_at_topic(None, &"a".repeat(250), &"a".repeat(250));
}

#[test]
fn r13_dot_dot_dot_and_nothing_are_no_topics() {
    for name in [".", "..", ""] {
        halts_at_topic(Some("{aggregate_type}"), name, name);
    }
}

#[test]
fn r13_odd_but_legal_topic_names_are_delivered() {
    let mut stage = Stage::shared(Pg::V15);
    stage.template = Some("outbox.event.{aggregate_type}".to_owned());
    let sql = stage.init();
    let longest = "a".repeat(236);
    for kind in [longest.as_str(), "."] {
        stage
            .broker
            .create_topic(&format!("outbox.event.{kind}"), 1);
        sql.exec(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (gen_random_uuid(), $1, 'k', 'e', '{}')",
            &[&kind],
        )
        .expect("a row");
    }
    let mut relay = stage.run();
    for kind in [longest.as_str(), "."] {
        stage
            .broker
            .wait_count(&format!("outbox.event.{kind}"), 1, MINUTE);
    }
    relay.stop();
}

#[test]
fn r14_what_the_transaction_does_to_the_row_afterwards_is_not_seen() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    sql.run(&format!(
        "begin; {}; update outbox set payload = '{{\"v\":2}}'; commit",
        insert("'k'", r#"'{"v":1}'"#)
    ));
    sql.run(&format!(
        "begin; {}; delete from outbox where payload->>'v' = '3'; commit",
        insert("'k'", r#"'{"v":3}'"#)
    ));
    ins(&sql, "'k'", r#"'{"v":4}'"#);
    let mut relay = stage.run();
    let records = stage.records(3);
    relay.stop();
    let values: Vec<String> = records.iter().map(Rec::value_text).collect();
    assert_eq!(values, [r#"{"v": 1}"#, r#"{"v": 3}"#, r#"{"v": 4}"#]);
}

#[test]
fn r15_conflicting_upserts_and_rolled_back_savepoints_send_nothing() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let row = |key: &str| {
        format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (outbox_event_id('{key}', '1'), 't', '{key}', 'e', '{{}}')"
        )
    };
    sql.run(&row("a"));
    sql.run(&format!("{} on conflict (event_id) do nothing", row("a")));
    sql.run(&format!(
        "{} on conflict (event_id) do update set payload = '{{\"u\":1}}'",
        row("a")
    ));
    sql.run(&format!(
        "begin; {}; savepoint s; {}; rollback to s; {}; commit",
        row("b1"),
        row("lost"),
        row("b2")
    ));
    assert_eq!(
        sql.one("select count(distinct xid) from outbox where aggregate_id in ('b1', 'b2')"),
        "1"
    );
    ins(&sql, "'end'", "'{}'");
    let mut relay = stage.run();
    let records = stage.records(4);
    relay.stop();
    let mut keys: Vec<String> = records.iter().map(Rec::key_text).collect();
    keys.sort();
    assert_eq!(keys, ["a", "b1", "b2", "end"]);
    assert_eq!(by_key(&records, "a").value_text(), "{}");
}

#[test]
fn r16_rows_of_one_copy_share_an_lsn_and_none_is_lost_to_a_kill() {
    let broker = Broker::start();
    let stage = Stage::on(Cluster::shared(Pg::V15), &broker);
    let sql = stage.init();
    let copy = |rows: [&str; 3]| {
        let text: String = rows
            .iter()
            .map(|n| format!("00000000-0000-0000-0000-00000000000{n}\tt\tk\te\t{{\"n\":{n}}}\n"))
            .collect();
        sql.copy_in(
            "copy outbox (event_id, aggregate_type, aggregate_id, event_type, payload) from stdin",
            &text,
        )
        .expect("three rows");
    };
    let order = |records: &[Rec]| {
        let mut first = Vec::new();
        for record in records {
            if !first.contains(&record.event_id()) {
                first.push(record.event_id());
            }
        }
        let numbers: Vec<String> = first.iter().map(|id| id[35..].to_owned()).collect();
        numbers.concat()
    };

    // None acked: the broker answers nobody while the relay has the rows and is killed.
    let mut relay = stage.run();
    stage.wait_confirmed(MINUTE);
    broker.freeze();
    copy(["1", "2", "3"]);
    relay.kill9();
    broker.thaw();
    let mut relay = stage.run();
    assert_eq!(order(&stage.records(3)), "123");

    // Some acked: killed as soon as the first is in the log.
    copy(["4", "5", "6"]);
    stage.wait_count("t", 4, MINUTE);
    relay.kill9();
    let mut relay = stage.run();
    copy(["7", "8", "9"]);
    stage.wait_count("t", 9, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert_eq!(order(&broker.read_all(&stage.topic("t"))), "123456789");
}

#[test]
fn r17_latin1_is_converted() {
    let db =
        Cluster::shared(Pg::V15).database_with("encoding 'LATIN1' locale 'C' template template0");
    let stage = Stage::of(db, Broker::shared());
    let sql = stage.init();
    ins(&sql, "'café'", "'{}'");
    let mut relay = stage.run();
    let records = stage.records(1);
    relay.stop();
    assert_eq!(hex(records[0].key.as_deref().expect("a key")), "636166c3a9");
}

#[test]
fn r17_sql_ascii_passes_its_bytes_as_they_are() {
    for pg in Pg::ALL {
        let db =
            Cluster::shared(pg).database_with("encoding 'SQL_ASCII' locale 'C' template template0");
        let stage = Stage::of(db, Broker::shared());
        let sql = stage.init();
        sql.run("set client_encoding to 'SQL_ASCII'");
        ins(&sql, r"E'caf\xe9'", "'{}'");
        ins(&sql, "'ok'", "'{}'");
        let mut relay = stage.run();
        let records = stage.records(2);
        relay.stop();
        let odd = records
            .iter()
            .find(|r| r.key.as_deref() == Some(b"caf\xe9"))
            .expect("the key's bytes are untouched");
        assert_eq!(odd.partition, 0);
        by_key(&records, "ok");
    }
}

#[test]
fn r18_times_are_iso_and_utc_whatever_the_role_says() {
    let mut stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    stage.user = format!("r18_{}", stage.db.name);
    sql.run(&format!(
        "create role {0} superuser login replication;
         alter role {0} set datestyle = 'SQL,DMY';
         alter role {0} set timezone = 'Asia/Kolkata'",
        stage.user
    ));
    stage.run_args = vec!["--header".to_owned(), "at=created_at".to_owned()];
    let times = [
        "2026-03-29 01:30:00.123456+00",
        "infinity",
        "0044-03-15 12:00:00+00 BC",
    ];
    for at in times {
        sql.run(&format!(
            "insert into outbox
               (event_id, aggregate_type, aggregate_id, event_type, payload, created_at)
             values (gen_random_uuid(), 't', 'k', 'e', '{{}}', '{at}')"
        ));
    }
    let now = || -> i64 {
        sql.one("select floor(extract(epoch from clock_timestamp()) * 1000)::bigint")
            .parse()
            .expect("a number")
    };
    let after = now();
    let mut relay = stage.run();
    let records = stage.records(3);
    relay.stop();
    let seen: Vec<String> = records
        .iter()
        .map(|r| r.header("at").expect("mapped"))
        .collect();
    assert_eq!(seen, times);
    for record in &records {
        let at = record.timestamp_ms.expect("the commit time");
        let age = after - at;
        assert!(
            (0..=i64::try_from(Duration::from_secs(60).as_millis()).expect("small")).contains(&age),
            "the commit time, not another: {at}, now {after}"
        );
    }
    sql.run(&format!("drop role {}", stage.user));
}
