//! `walrelay status`: from the database, from the relay, with either of them away.

use serde_json::Value;

use crate::check_command::Said;
use crate::kafka::Broker;
use crate::poison::HALT;
use crate::postgres::{Cluster, Pg, Sql, Stop};
use crate::proc::{self, eventually};
use crate::refusals::{Holder, says};
use crate::relay::{Ended, Relay, run_to_end};
use crate::stage::{MINUTE, Stage};

fn json(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}\n{}", ended.stdout, ended.stderr))
}

fn insert(sql: &Sql, event_type: &str, rows: usize) {
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         select gen_random_uuid(), 't', 'k', '{event_type}', '{{}}' from generate_series(1, {rows})"
    ));
}

/// A stage whose relay answers at an address of its own, and that address.
fn with_http(pg: Pg) -> (Stage<'static>, String) {
    let mut stage = Stage::shared(pg);
    let address = format!("127.0.0.1:{}", proc::free_port());
    stage.run_args = vec!["--http".to_owned(), address.clone()];
    (stage, address)
}

#[test]
fn a_relay_that_streams_is_0_and_all_is_known_of_it() {
    let (stage, address) = with_http(Pg::V18);
    let sql = stage.init();
    let mut relay = stage.run();
    insert(&sql, "placed", 3);
    stage.records(3);
    stage.wait_confirmed(MINUTE);
    // Ready is: every condition is known to hold, and the database is asked every few seconds.
    let ended = eventually(MINUTE, "all is known to be well", || {
        let ended = stage.status(&["--json", "--http", &address]);
        // (It hands over what it knows once a second.)
        let tells = json(&ended)["last_delivered_lsn"].is_string();
        (ended.code == 0 && tells).then_some(ended)
    });
    let said = json(&ended);
    assert_eq!(said["ok"], true);
    assert_eq!(said["relay"]["ready"], true);
    assert_eq!(said["slot"], stage.db.slot());
    let holder = sql.one(
        "select pid from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock'
         and database = (select oid from pg_database where datname = current_database())",
    );
    assert_eq!(said["leader"]["pid"].to_string(), holder);
    assert_eq!(said["standbys"], Value::Array(Vec::new()));
    assert!(said["retained_bytes"].is_u64(), "{said:#}");
    assert!(said["safe_wal_size"].is_u64(), "{said:#}");
    let text = stage.status(&["--http", &address]).stdout;
    assert!(text.contains("ready since"), "{text}");
    relay.stop();
}

#[test]
fn while_the_relay_is_down_the_rows_that_wait_are_counted_by_event_type() {
    for pg in [Pg::V15, Pg::V18] {
        let (stage, address) = with_http(pg);
        let sql = stage.init();
        let mut relay = stage.run();
        insert(&sql, "placed", 5);
        stage.records(5);
        stage.wait_confirmed(MINUTE);
        relay.stop();
        insert(&sql, "placed", 2);
        insert(&sql, "paid", 1);
        let ended = stage.status(&["--json", "--http", &address]);
        says(
            &ended,
            3,
            &["no relay of public.outbox runs", "walrelay run"],
        );
        let said = json(&ended);
        // The stop that is stored tells what was delivered: none of the five is counted again.
        assert_eq!(said["waiting_rows"], 3, "{said:#}");
        assert_eq!(said["waiting_is_at_most"], false);
        let mut by_type: Vec<(String, i64)> = said["waiting_by_event_type"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|w| {
                (
                    w["event_type"].to_string(),
                    w["rows"].as_i64().unwrap_or(-1),
                )
            })
            .collect();
        by_type.sort();
        assert_eq!(
            by_type,
            [("\"paid\"".to_owned(), 1), ("\"placed\"".to_owned(), 2)]
        );
        assert!(said["lag_seconds"].is_f64(), "{said:#}");
        assert_eq!(said["relay"], Value::Null);
        assert_eq!(said["leader"], Value::Null);
        Said::of(&ended).expect("process", "unknown", &[&address]);
    }
}

#[test]
fn an_age_grows_while_nothing_moves() {
    let (stage, address) = with_http(Pg::V16);
    let sql = stage.init();
    insert(&sql, "placed", 1);
    let age = || {
        let said = json(&stage.status(&["--json", "--http", &address]));
        said["lag_seconds"].as_f64().expect("an age")
    };
    let first = age();
    eventually(MINUTE, "it is older", || {
        (age() > first + 0.5).then_some(())
    });
}

#[test]
fn what_nobody_tells_is_unknown_and_never_zero() {
    let (stage, address) = with_http(Pg::V17);
    let sql = stage.init();
    insert(&sql, "placed", 2);
    sql.run("alter table outbox drop column xid; alter table outbox drop column created_at");
    let ended = stage.status(&["--json", "--http", &address]);
    let said = json(&ended);
    assert_eq!(said["waiting_rows"], Value::Null);
    assert_eq!(said["lag_seconds"], Value::Null);
    assert_eq!(said["last_delivered_commit_time"], Value::Null);
    Said::of(&ended).expect("undelivered rows", "unknown", &["no column xid"]);
    Said::of(&ended).expect("last delivered", "unknown", &[]);
}

#[test]
fn without_the_database_the_relay_still_tells() {
    let cluster = Cluster::start(Pg::V15);
    let mut stage = Stage::on(&cluster, Broker::shared());
    let address = format!("127.0.0.1:{}", proc::free_port());
    stage.run_args = vec!["--http".to_owned(), address.clone()];
    let sql = stage.init();
    let relay = stage.run();
    insert(&sql, "placed", 1);
    stage.records(1);
    stage.wait_confirmed(MINUTE);
    drop(sql);
    cluster.stop(Stop::Fast);
    let ended = stage.status(&["--json", "--http", &address]);
    says(&ended, 3, &["refused the connection"]);
    let said = json(&ended);
    assert_eq!(said["relay"]["slot"], stage.db.slot());
    assert!(said["last_delivered_lsn"].is_string(), "{said:#}");
    assert_eq!(said["leader"], Value::Null);
    cluster.up();
    drop(relay);
    // And with both away.
    let nowhere = format!("postgresql://u@127.0.0.1:{}/d", proc::free_port());
    let args = ["status", "--database-url", &nowhere, "--http", &address];
    says(
        &run_to_end(&args, &[], MINUTE),
        3,
        &["refused the connection"],
    );
}

#[test]
fn leader_and_standbys_are_named_and_a_strange_relay_is_not_believed() {
    let (stage, address) = with_http(Pg::V18);
    stage.init();
    let mut first = stage.run();
    first.wait_for("it leads", MINUTE, |line| line.has("lead"));
    let other = format!("127.0.0.1:{}", proc::free_port());
    let (url, slot, brokers) = (stage.db.url(), stage.db.slot(), stage.broker.bootstrap());
    let topic = format!("{}.t", stage.prefix);
    let mut second = Relay::start(
        &[
            "run",
            "--database-url",
            &url,
            "--slot",
            &slot,
            "--brokers",
            &brokers,
            "--topic",
            &topic,
            "--http",
            &other,
        ],
        &[],
    );
    let said = eventually(MINUTE, "both are there", || {
        let said = json(&stage.status(&["--json", "--http", &address]));
        (said["standbys"].as_array().map(Vec::len) == Some(1)).then_some(said)
    });
    assert_ne!(said["leader"]["pid"], said["standbys"][0]["pid"]);
    // The standby's own address is as good.
    let ended = eventually(MINUTE, "the standby answers", || {
        let ended = stage.status(&["--json", "--http", &other]);
        (json(&ended)["relay"] != Value::Null).then_some(ended)
    });
    Said::of(&ended).expect("process", "ok", &["stands by"]);
    // Another slot's relay at the address that was asked.
    let (stranger, _) = with_http(Pg::V18);
    stranger.init();
    let ended = stranger.status(&["--json", "--http", &address]);
    Said::of(&ended).expect("process", "unknown", &[&slot, "not this one"]);
    assert_eq!(json(&ended)["last_delivered_lsn"], Value::Null);
    // Nor the relay of a slot of the same name on another server.
    let elsewhere = Cluster::shared(Pg::V17).database();
    let source = ["--database-url", &elsewhere.url(), "--slot", &slot];
    run_to_end(&[&["init"], &source[..]].concat(), &[], MINUTE).expect_code(0);
    let args = [&["status", "--json", "--http", &address], &source[..]].concat();
    let ended = run_to_end(&args, &[], MINUTE);
    Said::of(&ended).expect("process", "unknown", &["the registry has none"]);
    second.stop();
    first.stop();
}

#[test]
fn a_missing_slot_is_3_or_4_as_for_run_and_a_strange_reader_is_3() {
    let (stage, address) = with_http(Pg::V16);
    let http = ["--http", &address];
    let ended = stage.status(&http);
    says(&ended, 3, &["walrelay init"]);
    let remedy = ended.stderr.lines().last().expect("a remedy");
    let at = |command: &str| remedy.find(command).expect("it is named");
    assert!(at("walrelay init") < at("walrelay run"), "{remedy}");
    let sql = stage.init();
    let holder = Holder::start(&stage);
    says(&stage.status(&http), 3, &["no walrelay"]);
    drop(holder);
    let slot = stage.db.slot();
    eventually(MINUTE, "the slot is dropped", || {
        sql.try_run(&format!("select pg_drop_replication_slot('{slot}')"))
            .ok()
    });
    insert(&sql, "placed", 4);
    let ended = stage.status(&[&http[..], &["--json"]].concat());
    says(&ended, 4, &[&format!("slot {slot} is gone")]);
    // Nobody tells which rows are delivered: all of them may not be.
    assert_eq!(json(&ended)["waiting_rows"], 4);
    assert_eq!(json(&ended)["waiting_is_at_most"], true);
    assert_eq!(json(&ended)["lag_bytes"], Value::Null);
}

#[test]
fn a_monitor_without_rights_of_its_own_is_told_what_it_may_see() {
    let (mut stage, address) = with_http(Pg::V15);
    let sql = stage.init();
    stage.user = format!("monitor_{}", stage.db.name);
    sql.run(&format!(
        "create role {0} login; grant pg_monitor to {0}",
        stage.user
    ));
    let ended = stage.status(&["--json", "--http", &address]);
    says(&ended, 3, &["no relay of public.outbox runs"]);
    assert!(!ended.stderr.contains("REPLICATION"), "{}", ended.stderr);
    let said = Said::of(&ended);
    said.expect("registry", "unknown", &["permission denied"]);
    said.expect("undelivered rows", "unknown", &["permission denied"]);
    said.expect("retained WAL", "ok", &["reserved"]);
    sql.run(&format!("drop owned by {0}; drop role {0}", stage.user));
}

#[test]
fn an_event_that_stopped_the_relay_is_4_with_its_id() {
    let (mut stage, address) = with_http(Pg::V18);
    stage.run_args.extend(HALT.map(str::to_owned));
    let sql = stage.init();
    sql.run(
        "alter table outbox alter column aggregate_id drop not null;
         insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12', 't', null, 'e', '{}')",
    );
    assert_eq!(stage.run_to_end().code, 4);
    let ended = stage.status(&["--http", &address, "--json"]);
    let event = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12";
    says(&ended, 4, &[event, "see to its cause"]);
    Said::of(&stage.check(&["--json"])).expect("halted event", "warning", &[event]);
    assert_eq!(
        json(&ended)["halted_event"],
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12"
    );
}

#[test]
fn a_relay_that_takes_the_connection_and_never_answers_is_3() {
    let (stage, address) = with_http(Pg::V17);
    let sql = stage.init();
    let mut relay = stage.run();
    insert(&sql, "placed", 1);
    stage.records(1);
    eventually(MINUTE, "it is well", || {
        (stage.status(&["--http", &address]).code == 0).then_some(())
    });
    relay.freeze();
    let ended = stage.status(&["--json", "--http", &address]);
    says(&ended, 3, &["hangs", "restart it"]);
    Said::of(&ended).expect("process", "failed", &["no answer comes within"]);
    relay.thaw();
    eventually(MINUTE, "it is well again", || {
        (stage.status(&["--http", &address]).code == 0).then_some(())
    });
    relay.stop();
}
