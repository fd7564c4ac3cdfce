//! Bad input: one clear message with cause and remedy, the right exit code, never a panic, never a
//! skipped row.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::poison::halting;
use crate::postgres::{Cluster, Pg};
use crate::proc;
use crate::relay::{Ended, Relay, run_to_end};
use crate::stage::{MINUTE, ON_GAP_HALT, Stage};

#[track_caller]
pub fn says(ended: &Ended, code: i32, words: &[&str]) {
    assert_eq!(ended.code, code, "{}", ended.stderr);
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    for word in words {
        assert!(
            ended.stderr.contains(word),
            "no {word} in:\n{}",
            ended.stderr
        );
    }
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("remedy: "), "the last line is: {last}");
}

fn walrelay(args: &[&str]) -> Ended {
    run_to_end(args, &[], MINUTE)
}

#[test]
fn wrong_usage_is_named_before_anything_is_contacted() {
    let nowhere = ["--database-url", "postgresql://u@127.0.0.1:1/d"];
    let run = |more: &[&str]| {
        let mut args = vec!["run"];
        args.extend(nowhere);
        args.extend(more);
        walrelay(&args)
    };
    let brokers = ["--brokers", "127.0.0.1:1"];
    let with = |more: &[&str]| run(&[&brokers[..], more].concat());
    says(&run(&[]), 2, &["brokers"]);
    says(
        &run(&["--brokers", "http://127.0.0.1:9092"]),
        2,
        &["host:port"],
    );
    says(&run(&["--brokers", ""]), 2, &["--brokers"]);
    says(&with(&["--shutdown-timeout", "10"]), 2, &["10", "unit"]);
    says(&with(&["--in-flight-bytes", "1000000"]), 2, &["unit"]);
    says(&with(&["--on-poison", "prak"]), 2, &["park", "halt"]);
    says(&with(&["--on-gap", "mend"]), 2, &["heal"]);
    says(&with(&["--slot", "Not-A-Slot"]), 2, &["Not-A-Slot"]);
    for (property, why) in [
        ("message.timeout.ms=5000", "lose"),
        ("acks=1", "lose"),
        ("enable.idempotence=false", "lose"),
        ("linger=5", "linger"),
        ("compression.codec=brotli", "brotli"),
    ] {
        says(&with(&["--kafka", property]), 2, &[why]);
    }
}

#[test]
fn an_unknown_flag_or_key_is_answered_with_the_nearest() {
    let ended = walrelay(&["run", "--broker", "x"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("--brokers"), "{}", ended.stderr);
    let dir = proc::dir("config");
    let file = dir.join("walrelay.toml");
    fs::write(&file, "brokers = \"a:1\"\ntopik = \"x\"\n").expect("the directory is ours");
    let file = file.to_string_lossy();
    let ended = walrelay(&["run", "--config", &file]);
    says(&ended, 2, &["topik", "topic"]);
}

#[test]
fn init_ends_where_run_waits() {
    let url = format!("postgresql://u@127.0.0.1:{}/d", proc::free_port());
    says(
        &walrelay(&["init", "--database-url", &url]),
        3,
        &["127.0.0.1"],
    );
    let host = "postgresql://u@no-such-host.invalid/d";
    says(
        &walrelay(&["init", "--database-url", host]),
        3,
        &["no-such-host.invalid"],
    );
    let mut relay = Relay::start(
        &["run", "--database-url", &url, "--brokers", "127.0.0.1:1"],
        &[],
    );
    relay.wait_for("it says what it waits for", MINUTE, |line| {
        (line.level() == "WARN" || line.level() == "INFO") && line.has("127.0.0.1")
    });
    relay.assert_alive();
    relay.stop();
}

#[test]
fn a_wrong_password_or_database_is_definite() {
    let cluster = Cluster::start(Pg::V15);
    cluster.connect("postgres").run(
        "set password_encryption = 'scram-sha-256';
         create role app login replication superuser password 'right'",
    );
    cluster.hba(&[
        "local all all trust",
        "host all app 127.0.0.1/32 scram-sha-256",
        "host all all 127.0.0.1/32 trust",
    ]);
    let db = cluster.database();
    let url = db.url_as("app");
    let with =
        |password: &str, args: &[&str]| run_to_end(args, &[("PGPASSWORD", password)], MINUTE);
    let run = ["run", "--database-url", &url, "--brokers", "127.0.0.1:1"];
    let wrong = with("wrong", &run);
    says(&wrong, 3, &["password"]);
    assert!(!wrong.stderr.contains("wrong"), "the password is printed");
    says(
        &with("wrong", &["init", "--database-url", &url]),
        3,
        &["password"],
    );
    assert_eq!(with("right", &["init", "--database-url", &url]).code, 0);
    let nowhere = url.replace(&db.name, "no_such_database");
    says(
        &with(
            "right",
            &[
                "run",
                "--database-url",
                &nowhere,
                "--brokers",
                "127.0.0.1:1",
            ],
        ),
        3,
        &["no_such_database"],
    );
}

/// README: the slot is gone, or has lost its WAL.
#[test]
fn a_missing_slot_is_refused_and_a_lost_one_halts() {
    let mut stage = Stage::shared(Pg::V15);
    stage.run_args.extend(ON_GAP_HALT.map(str::to_owned));
    // Nothing was ever made here.
    stage.refused_by_both(3, &["walrelay init"]);
    stage.init();
    stage.db.connect().run(&format!(
        "select pg_drop_replication_slot('{}')",
        stage.db.slot()
    ));
    stage.refused_by_both(4, &[&stage.db.slot()]);
}

#[test]
fn a_slot_that_is_not_ours_is_refused() {
    for pg in Pg::ALL {
        let stage = Stage::shared(pg);
        let sql = stage.init();
        let slot = stage.db.slot();
        let make = |how: &str| {
            sql.run(&format!("select pg_drop_replication_slot('{slot}')"));
            sql.run(how);
        };
        make(&format!(
            "select pg_create_logical_replication_slot('{slot}', 'pgoutput', false, true)"
        ));
        stage.refused_by_both(3, &[&slot, "two_phase"]);
        make(&format!(
            "select pg_create_physical_replication_slot('{slot}')"
        ));
        stage.refused_by_both(3, &[&slot, "physical"]);
        make(&format!(
            "select pg_create_logical_replication_slot('{slot}', 'test_decoding')"
        ));
        stage.refused_by_both(3, &[&slot, "test_decoding"]);
        let other = stage.db.cluster.database();
        sql.run(&format!("select pg_drop_replication_slot('{slot}')"));
        other.connect().run(&format!(
            "select pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        ));
        stage.refused_by_both(3, &[&slot, &other.name]);
    }
}

#[test]
fn a_publication_that_is_gone_or_covers_another_table_is_refused() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    sql.run("drop publication walrelay");
    stage.refused_by_both(3, &["publication", "walrelay"]);
    sql.run("create table other (n int); create publication walrelay for table other");
    stage.refused_by_both(3, &["publication", "outbox"]);
}

#[test]
fn a_role_without_replication_is_refused() {
    let mut stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    stage.user = format!("weak_{}", stage.db.name);
    sql.run(&format!(
        "create role {} login superuser noreplication",
        stage.user
    ));
    // A superuser may replicate anyway: take that away as well.
    sql.run(&format!(
        "alter role {0} nosuperuser;
         grant usage on schema walrelay to {0};
         grant all on all tables in schema walrelay to {0};
         grant select on outbox to {0}",
        stage.user
    ));
    let alter = format!("alter role \"{}\" replication", stage.user);
    stage.refused_by_both(3, &["42501", "REPLICATION", &alter]);
    sql.run(&format!("drop owned by {0}; drop role {0}", stage.user));
}

#[test]
fn a_held_slot_is_waited_for() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    // A foreign reader that takes no lock of ours.
    let holder = Holder::start(&stage);
    let held_by = sql.one(&format!(
        "select active_pid from pg_replication_slots where slot_name = '{}'",
        stage.db.slot()
    ));
    let mut relay = stage.run();
    relay.wait_for("who holds the slot", MINUTE, |line| line.has(&held_by));
    relay.assert_alive();
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k', 'e', '{}')",
    );
    drop(holder);
    stage.records(1);
    relay.stop();
}

/// A foreign reader of a slot: a replication connection that starts and then says nothing, which
/// the server puts up with for `wal_sender_timeout`.
pub struct Holder {
    _connection: TcpStream,
}

impl Holder {
    pub fn start(stage: &Stage<'_>) -> Holder {
        let mut connection =
            TcpStream::connect(("127.0.0.1", stage.db.cluster.port)).expect("the server listens");
        let mut startup = 196_608_u32.to_be_bytes().to_vec();
        for word in [
            "user",
            "postgres",
            "database",
            &stage.db.name,
            "replication",
            "database",
            "application_name",
            "foreign",
            "",
        ] {
            startup.extend(word.as_bytes());
            startup.push(0);
        }
        send(&mut connection, &startup);
        until(&mut connection, b'Z');
        let query = format!(
            "START_REPLICATION SLOT {} LOGICAL 0/0
             (proto_version '1', publication_names '\"walrelay\"')\0",
            stage.db.slot()
        );
        connection.write_all(b"Q").expect("the server reads");
        send(&mut connection, query.as_bytes());
        until(&mut connection, b'W');
        Holder {
            _connection: connection,
        }
    }
}

/// A length that counts itself, then the body.
fn send(connection: &mut TcpStream, body: &[u8]) {
    let length = u32::try_from(body.len() + 4).expect("short").to_be_bytes();
    connection
        .write_all(&[&length[..], body].concat())
        .expect("the server reads");
}

/// Reads messages up to one of this type.
fn until(connection: &mut TcpStream, wanted: u8) {
    loop {
        let mut head = [0; 5];
        connection.read_exact(&mut head).expect("a message");
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
        let mut body = vec![0; usize::try_from(length).expect("short") - 4];
        connection.read_exact(&mut body).expect("its body");
        assert_ne!(head[0], b'E', "{}", String::from_utf8_lossy(&body));
        if head[0] == wanted {
            return;
        }
    }
}

#[test]
fn an_unreachable_broker_is_waited_for_and_named() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k', 'e', '{}')",
    );
    let (url, slot) = (stage.db.url(), stage.db.slot());
    let nowhere = format!("127.0.0.1:{}", proc::free_port());
    let mut relay = Relay::start(
        &[
            "run",
            "--database-url",
            &url,
            "--slot",
            &slot,
            "--brokers",
            &nowhere,
        ],
        &[],
    );
    relay.wait_for("the broker's name", MINUTE, |line| {
        line.level() != "DEBUG" && line.has(&nowhere)
    });
    relay.assert_alive();
    relay.stop();
    // Nothing was passed over.
    let mut relay = stage.run();
    stage.records(1);
    relay.stop();
}

// Case K04.
/// README: a topic does not exist.
#[test]
fn an_absent_topic_is_named_and_waited_for() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let ins = |kind: &str, key: &str| {
        sql.run(&format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (gen_random_uuid(), '{kind}', '{key}', 'e', '{{}}')"
        ));
    };
    let mut relay = stage.run();
    ins("t", "1");
    ins("typo", "2");
    ins("t", "3");
    let typo = stage.topic("typo");
    let event = sql.one("select event_id from outbox where aggregate_type = 'typo'");
    relay.wait_for("the absent topic", Duration::from_secs(15), |line| {
        line.level() == "ERROR"
            && line.has(&typo)
            && line.has(&event)
            && line.has(&format!("create {typo}, or run with --create-topics"))
    });
    // The others flow, and the slot stays below the one that waits.
    stage.records(2);
    relay.assert_alive();
    stage.broker.create_topic(&typo, 3);
    stage.broker.wait_count(&typo, 1, Duration::from_secs(30));
    stage.wait_confirmed(Duration::from_secs(10));
    relay.stop();
    assert_eq!(stage.broker.count(&typo), 1);
    assert_eq!(stage.broker.count(&stage.topic("t")), 2);
    assert_eq!(sql.one("select count(*) from walrelay.dead_letter"), "0");
}

#[test]
fn create_topics_makes_what_is_missing() {
    let mut stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    stage.run_args = vec!["--create-topics".to_owned(), "6".to_owned()];
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 'made', 'k', 'e', '{}')",
    );
    let mut relay = stage.run();
    stage.wait_count("made", 1, MINUTE);
    relay.stop();
    assert_eq!(stage.broker.partitions(&stage.topic("made")), Some(6));
}

#[test]
fn a_null_key_halts_at_its_row() {
    let stage = halting(Pg::V18);
    let sql = stage.init();
    sql.run("alter table outbox alter column aggregate_id drop not null");
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload) values
           (gen_random_uuid(), 't', 'good', 'e', '{}'),
           ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 't', null, 'e', '{}'),
           (gen_random_uuid(), 't', 'behind', 'e', '{}')",
    );
    for _ in 0..2 {
        let ended = stage.run_to_end();
        says(
            &ended,
            4,
            &["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "aggregate_id"],
        );
    }
    let records = stage.records(1);
    assert!(
        records.iter().all(|r| r.key_text() == "good"),
        "{records:?}"
    );
}
