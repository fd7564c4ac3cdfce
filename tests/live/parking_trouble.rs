//! Where parking itself is in trouble: the database takes no dead letters, a standby has not got
//! them, too many keys would be parked, a topic is away.

use std::time::Duration;

use rustix::process::Signal;

use crate::check::{Committed, check};
use crate::http::Ready;
use crate::kafka::Broker;
use crate::parked::{
    count, good, id, malformed, parked, parked_ids, put, retry_all, wait_parked, wait_until,
};
use crate::postgres::{Cluster, Pg, Sql, Stop};
use crate::proc::{self, eventually};
use crate::relay::Relay;
use crate::stage::{MINUTE, Stage};

/// A stage whose relay answers at an address of its own, and that address.
fn with_http(mut stage: Stage<'_>) -> (Stage<'_>, String) {
    let address = format!("127.0.0.1:{}", proc::free_port());
    stage
        .run_args
        .extend(["--http".to_owned(), address.clone()]);
    (stage, address)
}

/// What `/readyz` says of dead letters, once it holds or not.
#[track_caller]
fn letters_are(address: &str, well: bool) -> String {
    eventually(2 * MINUTE, format!("dead letters are well: {well}"), || {
        let ready = Ready::of(address);
        let is = ready.holds("dead letters") == Some(well);
        is.then(|| ready.condition("dead letters").to_string())
    })
}

/// Nothing moves on while `what` is wrong with the table, everything else flows, and it heals by
/// itself.
fn holds_still(
    stage: &Stage<'_>,
    address: &str,
    sql: &Sql,
    break_it: &str,
    words: &[&str],
    mend_it: &str,
) {
    let mut flowing = Committed::new();
    let mut relay = stage.run();
    good(sql, &mut flowing, 0, "free");
    stage.wait_count("t", 1, MINUTE);
    stage.wait_confirmed(MINUTE);
    sql.run(break_it);
    malformed(sql, 1, "k");
    // The end of its transaction, or before it.
    let reached = sql.one("select pg_current_wal_insert_lsn()");
    put(sql, 2, "t", "'k'", "'{}'", "'{}'");
    relay.wait_for_text("dead letters cannot be written", MINUTE);
    let said = letters_are(address, false);
    for word in words {
        assert!(said.contains(word), "{said}");
        assert!(relay.said().contains(word), "{}", relay.said());
    }
    assert_eq!(Ready::of(address).status, 503);
    let is_below = |confirmed: &str| {
        let confirmed = sql.one(&format!("select '{confirmed}'::pg_lsn < '{reached}'"));
        confirmed == "t"
    };
    for n in 3..6 {
        good(sql, &mut flowing, n, "free");
        stage.wait_count("t", n - 1, MINUTE);
        // Several times over what the relay takes to confirm.
        eventually(MINUTE, "the relay reports", || {
            let sent = sql.one(&format!(
                "select r.reply_time > clock_timestamp() - interval '1 s'
                 from pg_stat_replication r join pg_replication_slots s on s.active_pid = r.pid
                 where s.slot_name = '{}'",
                stage.db.slot()
            ));
            (sent == "t").then_some(())
        });
        assert!(is_below(&stage.db.confirmed()), "it passed {reached}");
    }
    assert_eq!(parked(sql), []);
    // Neither does another life.
    relay.kill9();
    let mut relay = stage.run();
    good(sql, &mut flowing, 6, "free");
    stage.wait_count("t", 5, MINUTE);
    letters_are(address, false);
    assert!(is_below(&stage.db.confirmed()), "it passed {reached}");
    sql.run(mend_it);
    letters_are(address, true);
    wait_parked(stage, sql, 2);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert_eq!(parked_ids(sql), [id(1), id(2)]);
    check(&stage.broker.read_all(&stage.topic("t")), &flowing).assert_exactly_once();
}

#[test]
fn while_the_disk_is_full_nothing_is_parked_and_nothing_passes() {
    let (stage, address) = with_http(Stage::shared(Pg::V15));
    let sql = stage.init();
    holds_still(
        &stage,
        &address,
        &sql,
        "create function full_disk() returns trigger language plpgsql as $$ begin
           raise exception 'could not extend file: No space left on device' using errcode = '53100';
         end $$;
         create trigger full_disk before insert on walrelay.dead_letter
           for each statement execute function full_disk()",
        &["No space left on device"],
        "drop trigger full_disk on walrelay.dead_letter",
    );
}

#[test]
fn without_the_right_to_write_dead_letters_nothing_passes() {
    let (mut stage, address) = with_http(Stage::shared(Pg::V18));
    let sql = stage.init();
    let role = format!("walrelay_{}", stage.db.name);
    sql.run(&format!(
        "create role {role} login replication;
         grant usage on schema public, walrelay to {role};
         grant select on all tables in schema public, walrelay to {role};
         grant insert, update, delete on all tables in schema walrelay to {role}"
    ));
    stage.user.clone_from(&role);
    let grant = format!("grant insert on walrelay.dead_letter to {role}");
    holds_still(
        &stage,
        &address,
        &sql,
        &format!("revoke insert on walrelay.dead_letter from {role}"),
        &["permission denied", "dead_letter"],
        &grant,
    );
    sql.run(&format!("drop owned by {role}; drop role {role}"));
}

/// A standby that is on the primary, through a physical slot.
fn standby_on(primary: &Cluster) -> Cluster {
    let standby = Cluster::standby(primary);
    standby.stop(Stop::Fast);
    let sql = primary.connect("postgres");
    sql.run("select pg_create_physical_replication_slot('sb', true)");
    standby.configure(&[
        &format!(
            "primary_conninfo = 'host=127.0.0.1 port={} user=postgres'",
            primary.port
        ),
        "primary_slot_name = 'sb'",
    ]);
    standby.up();
    eventually(MINUTE, "the standby is on it", || {
        let active = "select active from pg_replication_slots where slot_name = 'sb'";
        (sql.one(active) == "t").then_some(())
    });
    standby
}

#[test]
fn a_failover_slot_does_not_pass_a_dead_letter_that_its_standby_has_not() {
    let primary = Cluster::start(Pg::V17);
    let standby = standby_on(&primary);
    let (stage, address) = with_http(Stage::on(&primary, Broker::shared()));
    let sql = stage.init();
    let mut flowing = Committed::new();
    let mut relay = stage.run();
    good(&sql, &mut flowing, 0, "free");
    stage.wait_count("t", 1, MINUTE);
    stage.wait_confirmed(MINUTE);
    // It stays connected and takes nothing. No setting names it, so the server sends on.
    let frozen = proc::children(standby.pid());
    for pid in &frozen {
        proc::send(*pid, Signal::STOP);
    }
    malformed(&sql, 1, "k");
    let reached = sql.one("select pg_current_wal_insert_lsn()");
    good(&sql, &mut flowing, 2, "free");
    wait_parked(&stage, &sql, 1);
    stage.wait_count("t", 2, MINUTE);
    let said = letters_are(&address, false);
    assert!(said.contains("standby"), "{said}");
    assert!(relay.said().contains("standby has not received"));
    let below = format!("select '{}'::pg_lsn < '{reached}'", stage.db.confirmed());
    assert_eq!(sql.one(&below), "t", "passed, and a failover would lose it");
    for pid in frozen {
        proc::send(pid, Signal::CONT);
    }
    letters_are(&address, true);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert_eq!(parked_ids(&sql), [id(1)]);
    check(&stage.broker.read_all(&stage.topic("t")), &flowing).assert_exactly_once();
}

// ---- the breaker ---------------------------------------------------------------------------

const KEYS_PARKED: usize = 99;

/// So many rows of as many keys, none of which the topic takes.
fn all_refused(stage: &Stage<'_>, sql: &Sql, rows: usize) -> Committed {
    let topic = stage.topic("t");
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", "100")]);
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         select ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid, 't', 'k' || n, 'e',
           '{{}}' from generate_series(0, {rows} - 1) n order by n"
    ));
    let mut all = Committed::new();
    for n in 0..rows {
        all.push(format!("k{n}"), id(n));
    }
    all
}

/// Waits until the topic is tripped, and looks whether it is said everywhere.
#[track_caller]
fn trips(stage: &Stage<'_>, sql: &Sql, relay: &mut Relay, address: &str) {
    let topic = stage.topic("t");
    relay.wait_for("the breaker trips", 2 * MINUTE, |line| {
        line.has("are held") && line.has(&topic) && line.has("dead-letters park --topic")
    });
    let said = letters_are(address, false);
    for word in [topic.as_str(), "too_large", "dead-letters park --topic"] {
        assert!(said.contains(word), "{said}");
    }
    assert_eq!(Ready::of(address).status, 503);
    let status = stage.status(&["--http", address]);
    let status = format!("{}{}", status.stdout, status.stderr);
    assert!(status.contains("are held"), "{status}");
    eventually(MINUTE, "what is parked is written", || {
        (count(sql, "parked") == KEYS_PARKED).then_some(())
    });
}

#[test]
fn k10_when_everything_is_poison_99_keys_are_parked_and_the_rest_waits() {
    let (stage, address) = with_http(Stage::shared(Pg::V18));
    let sql = stage.init();
    stage.broker.create_topic(&stage.topic("other"), 1);
    let all = all_refused(&stage, &sql, 10_000);
    let mut relay = stage.run();
    trips(&stage, &sql, &mut relay, &address);
    // Other topics flow, and the next life knows.
    put(&sql, 20_000, "other", "'k'", "'{}'", "'{}'");
    stage.wait_count("other", 1, MINUTE);
    relay.kill9();
    let mut relay = stage.run();
    trips(&stage, &sql, &mut relay, &address);
    put(&sql, 20_001, "other", "'k'", "'{}'", "'{}'");
    stage.wait_count("other", 2, MINUTE);
    assert_eq!(count(&sql, "parked"), KEYS_PARKED);
    let list = stage.dead_letters(&["list"]).expect_code(0).stdout;
    assert!(list.contains("are held"), "{list}");
    // Somebody wants them in the table.
    let topic = stage.topic("t");
    stage
        .dead_letters(&["park", "--topic", &topic])
        .expect_code(0);
    wait_parked(&stage, &sql, 10_000);
    stage.wait_confirmed(2 * MINUTE);
    letters_are(&address, true);
    assert_eq!(stage.broker.count(&topic), 0);
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", "1000000")]);
    retry_all(&stage, &sql);
    put(&sql, 10_000, "t", "'k0'", "'{}'", "'{}'");
    stage.wait_count("t", 10_001, 2 * MINUTE);
    relay.stop();
    let mut all = all;
    all.push("k0", id(10_000));
    check(&stage.broker.read_all(&topic), &all).assert_exactly_once();
}

#[test]
#[ignore = "waits for the breaker's minute, twice: make soak"]
fn soak_k10_a_held_event_is_tried_each_minute_and_the_first_success_lets_all_go() {
    let (stage, address) = with_http(Stage::shared(Pg::V15));
    let sql = stage.init();
    let all = all_refused(&stage, &sql, 10_000);
    let mut relay = stage.run();
    trips(&stage, &sql, &mut relay, &address);
    let topic = stage.topic("t");
    // The first trial comes too early, and parks nothing.
    let refused = "select count(*) from walrelay.relay where tripped_topics <> '{}'";
    relay.wait_for_text("the broker refuses", 2 * MINUTE);
    assert_eq!(count(&sql, "parked"), KEYS_PARKED);
    assert_eq!(sql.one(refused), "1");
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", "1000000")]);
    relay.wait_for_text("is open again", 3 * MINUTE);
    stage.wait_count("t", 10_000 - KEYS_PARKED, 3 * MINUTE);
    letters_are(&address, true);
    assert_eq!(count(&sql, "parked"), KEYS_PARKED);
    retry_all(&stage, &sql);
    stage.wait_count("t", 10_000, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    check(&stage.broker.read_all(&topic), &all).assert_exactly_once();
}

// ---- topics that are away ------------------------------------------------------------------

#[test]
fn k04_keys_of_an_absent_topic_are_parked_after_the_grace_time() {
    let mut stage = Stage::shared(Pg::V18);
    stage.run_args = ["--topic-grace", "3s"].map(str::to_owned).to_vec();
    let sql = stage.init();
    for (n, key) in ["a", "a", "b"].into_iter().enumerate() {
        put(&sql, n, "later", &format!("'{key}'"), "'{}'", "'{}'");
    }
    let mut flowing = Committed::new();
    good(&sql, &mut flowing, 3, "c");
    let mut relay = stage.run();
    stage.wait_count("t", 1, MINUTE);
    wait_parked(&stage, &sql, 3);
    put(&sql, 4, "later", "'a'", "'{}'", "'{}'");
    put(&sql, 5, "later", "'d'", "'{}'", "'{}'");
    wait_parked(&stage, &sql, 5);
    stage.wait_confirmed(MINUTE);
    let letters = parked(&sql);
    let told: Vec<_> = letters
        .iter()
        .map(|letter| (letter.key.as_str(), letter.reason.as_str()))
        .collect();
    let absent = "topic_absent";
    assert_eq!(
        told,
        [
            ("a", absent),
            ("a", "behind"),
            ("b", absent),
            ("a", "behind"),
            ("d", absent)
        ]
    );
    for word in [&stage.topic("later"), "3s", "--topic-grace"] {
        assert!(letters[0].message.contains(word), "{letters:?}");
    }
    stage.broker.create_topic(&stage.topic("later"), 3);
    retry_all(&stage, &sql);
    put(&sql, 6, "later", "'a'", "'{}'", "'{}'");
    stage.wait_count("later", 6, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    let mut all = Committed::new();
    for (n, key) in [(0, "a"), (1, "a"), (2, "b"), (4, "a"), (5, "d"), (6, "a")] {
        all.push(key, id(n));
    }
    check(&stage.broker.read_all(&stage.topic("later")), &all).assert_exactly_once();
    check(&stage.broker.read_all(&stage.topic("t")), &flowing).assert_exactly_once();
}

#[test]
fn k04_a_cluster_that_is_away_or_restarts_parks_nothing() {
    let broker = Broker::start();
    let mut stage = Stage::on(Cluster::shared(Pg::V15), &broker);
    stage.run_args = ["--topic-grace", "1s"].map(str::to_owned).to_vec();
    let sql = stage.init();
    let mut all = Committed::new();
    let mut relay = stage.run();
    good(&sql, &mut all, 0, "a");
    stage.wait_count("t", 1, MINUTE);
    for round in 0..2 {
        broker.kill9();
        for n in 1..20 {
            let n = 20 * round + n;
            good(&sql, &mut all, n, &format!("k{}", n % 5));
        }
        // Another life knows nothing of the topic, and the cluster does not say.
        if round == 1 {
            relay.kill9();
            relay = stage.run();
            relay.wait_for_text("streaming from", MINUTE);
        }
        good(&sql, &mut all, 20 * round + 20, "a");
        // Longer than the grace time: that is what it has to stand.
        std::thread::sleep(Duration::from_secs(2));
        broker.up();
        stage.wait_count("t", 20 * (round + 1) + 1, 2 * MINUTE);
    }
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert_eq!(parked(&sql), []);
    wait_until(&stage, &sql, "discarded", 0);
    check(&broker.read_all(&stage.topic("t")), &all).assert_complete_and_ordered();
}
