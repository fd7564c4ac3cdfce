//! Postgres stops while Kafka is away or slow, and is cut off inside of transactions.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::check::{Committed, check};
use crate::kafka::{Broker, Rec};
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg, Sql, Stop};
use crate::proc::eventually;
use crate::relay::Relay;
use crate::stage::{MINUTE, Stage};

/// Five seconds in which what is on its way may arrive, the closing of the connection, and what
/// a server on a machine under load takes to stop. One that we hold up never stops.
pub const STOP_MAX: Duration = Duration::from_secs(30);

/// Waits until the writers have committed so many more events.
#[track_caller]
pub fn more(load: &Load, events: usize) {
    let goal = load.committed() + events;
    eventually(2 * MINUTE, "writers go on", || {
        (load.committed() >= goal).then_some(())
    });
}

/// Stops the writers; then everything has to arrive and be confirmed, each event once.
#[track_caller]
pub fn ends_exactly_once(stage: &Stage<'_>, load: Load, relay: &mut Relay) {
    let committed = load.stop();
    stage.wait_count("t", committed.len(), 2 * MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    check(&stage.broker.read_all(&stage.topic("t")), &committed).assert_exactly_once();
}

#[track_caller]
fn stops_in_time(cluster: &Cluster) {
    let asked = Instant::now();
    cluster.ask_to_stop(Stop::Fast);
    assert!(
        cluster.stopped_within(STOP_MAX),
        "pg_ctl stop -m fast hangs on us:\n{}",
        cluster.log()
    );
    assert!(asked.elapsed() <= STOP_MAX);
}

/// An un-acked client that talks holds a server's shutdown up for ever: ours must let it go.
fn a_stop_is_not_held_up(pg: Pg, broker: &Broker, take_away: fn(&Broker), give_back: fn(&Broker)) {
    let cluster = Cluster::start(pg);
    let stage = Stage::on(&cluster, broker);
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(300));
    stage.wait_count("t", 200, MINUTE);
    take_away(broker);
    more(&load, 300);
    stops_in_time(&cluster);
    relay.assert_alive();
    cluster.up();
    give_back(broker);
    more(&load, 100);
    ends_exactly_once(&stage, load, &mut relay);
}

#[test]
fn a_stop_of_postgres_15_is_not_held_up_by_a_broker_that_is_down() {
    a_stop_is_not_held_up(Pg::V15, &Broker::start(), Broker::kill9, Broker::up);
}

#[test]
fn a_stop_of_postgres_18_is_not_held_up_by_a_broker_that_hangs() {
    let broker = Broker::to_be_frozen();
    a_stop_is_not_held_up(Pg::V18, &broker, Broker::freeze, Broker::thaw);
}

#[test]
fn a_stop_of_postgres_is_not_held_up_by_a_slow_broker() {
    let cluster = Cluster::start(Pg::V15);
    let broker = Broker::to_be_frozen();
    let stage = Stage::on(&cluster, &broker);
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Rows(50)).a_second(60));
    stage.wait_count("t", 200, MINUTE);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        // A broker that gets a few milliseconds of each half second.
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                broker.freeze();
                thread::sleep(Duration::from_millis(500));
                broker.thaw();
                thread::sleep(Duration::from_millis(5));
            }
        });
        more(&load, 3000);
        stops_in_time(&cluster);
        is_over.store(true, Ordering::Relaxed);
    });
    relay.assert_alive();
    cluster.up();
    more(&load, 100);
    ends_exactly_once(&stage, load, &mut relay);
}

#[test]
fn a_stop_inside_of_a_huge_transaction_remembers_where() {
    const ROWS: usize = 500_000;
    let stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         select ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid, 't',
                'k' || n % 500, 'e', jsonb_build_object('n', n)
         from generate_series(1, {ROWS}) n order by n"
    ));
    let mut committed = Committed::new();
    for n in 1..=ROWS {
        let id = format!("00000000-0000-4000-8000-{n:012}");
        committed.push(format!("k{}", n % 500), id);
    }
    let before = stage.db.confirmed();
    for reached in [1, 200_000] {
        let mut relay = stage.run();
        stage.wait_count("t", reached, MINUTE);
        relay.stop();
        if stage.broker.count(&stage.topic("t")) < ROWS {
            assert_eq!(stage.db.confirmed(), before, "the slot moved inside of it");
        }
    }
    let mut relay = stage.run();
    stage.wait_count("t", ROWS, 2 * MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    check(&stage.broker.read_all(&stage.topic("t")), &committed).assert_exactly_once();
}

/// Postgres 15 re-sends events far below what was confirmed, also to a relay that was not there.
fn a_restart_between_stop_and_start_repeats_nothing(pg: Pg) {
    let cluster = Cluster::start(pg);
    let stage = Stage::on(&cluster, Broker::shared());
    stage.init();
    let mut total = 0;
    for end in [Stop::Fast, Stop::Immediate] {
        let mut relay = stage.run();
        let sql = stage.db.connect();
        for _ in 0..20 {
            total += 1;
            ins(&sql, &[format!("event {total}")]);
            stage.wait_count("t", total, MINUTE);
        }
        relay.stop();
        drop(sql);
        cluster.restart(end);
    }
    let mut relay = stage.run();
    ins(&stage.db.connect(), &["last".to_owned()]);
    stage.wait_count("t", total + 1, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert_eq!(stage.broker.count(&stage.topic("t")), total + 1);
}

#[test]
fn a_restart_of_postgres_15_between_stop_and_start_repeats_nothing() {
    a_restart_between_stop_and_start_repeats_nothing(Pg::V15);
}

#[test]
fn a_restart_of_postgres_18_between_stop_and_start_repeats_nothing() {
    a_restart_between_stop_and_start_repeats_nothing(Pg::V18);
}

/// README: the connection breaks in a transaction.
#[test]
fn sessions_that_are_terminated_under_load_repeat_nothing() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(4, Shape::Mixed).a_second(400));
    // The walsender, the side session that holds the lock, and both at once.
    for kinds in [
        "'walsender'",
        "'client backend'",
        "'walsender', 'client backend'",
    ] {
        more(&load, 200);
        stage.wait_count("t", load.committed(), MINUTE);
        let ended = sql.one(&format!(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity
             where datname = current_database() and application_name like 'walrelay%'
               and backend_type in ({kinds})"
        ));
        assert_ne!(ended, "0", "nobody to terminate among {kinds}");
        more(&load, 200);
        stage.wait_count("t", load.committed(), MINUTE);
        relay.assert_alive();
    }
    ends_exactly_once(&stage, load, &mut relay);
}

#[test]
fn events_of_an_absent_topic_survive_a_restart_of_postgres() {
    let cluster = Cluster::start(Pg::V15);
    let stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    let mut relay = stage.run();
    let late = |sql: &Sql, n: usize| {
        sql.run(&format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (gen_random_uuid(), 'late', 'k', 'e', '{n}')"
        ));
    };
    late(&sql, 1);
    ins(&sql, &names("other", 20));
    stage.wait_count("t", 20, MINUTE);
    relay.wait_for_text(&stage.topic("late"), MINUTE);
    drop(sql);
    cluster.restart(Stop::Fast);
    let sql = stage.db.connect();
    late(&sql, 2);
    ins(&sql, &names("another", 20));
    stage.wait_count("t", 40, MINUTE);
    cluster.kill9();
    cluster.up();
    stage.broker.create_topic(&stage.topic("late"), 3);
    stage.wait_count("late", 2, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    let late = stage.broker.read_all(&stage.topic("late"));
    let values: Vec<String> = late.iter().map(Rec::value_text).collect();
    assert_eq!(values, ["1", "2"]);
    assert_eq!(stage.broker.count(&stage.topic("t")), 40);
}

/// Events of one key, whose payload is their name.
fn ins(sql: &Sql, names: &[String]) {
    for name in names {
        sql.run(&format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (md5('{name}')::uuid, 't', 'k', 'e', to_jsonb('{name}'::text))"
        ));
    }
}

fn names(what: &str, count: usize) -> Vec<String> {
    (0..count).map(|n| format!("{what} {n:03}")).collect()
}

/// The relay holds events of the old history that are not delivered when the server goes back to
/// a copy: the same positions and transaction ids come again with other rows.
#[test]
fn a_server_rolled_back_while_kafka_hangs_skips_nothing_of_its_new_history() {
    let cluster = Cluster::start(Pg::V18);
    let broker = Broker::to_be_frozen();
    let stage = Stage::on(&cluster, &broker);
    let sql = stage.init();
    let mut relay = stage.run();
    ins(&sql, &names("before", 20));
    stage.wait_count("t", 20, MINUTE);
    stage.wait_confirmed(MINUTE);
    drop(sql);
    cluster.stop(Stop::Fast);
    let copy = cluster.copy_data();
    cluster.up();
    let sql = stage.db.connect();
    ins(&sql, &names("delivered", 20));
    stage.wait_count("t", 40, MINUTE);
    broker.freeze();
    ins(&sql, &names("pending", 20));
    drop(sql);
    cluster.kill9();
    cluster.roll_back_to(&copy);
    cluster.up();
    let sql = stage.db.connect();
    ins(&sql, &names("new", 60));
    broker.thaw();
    let right: Vec<String> = names("new", 60)
        .iter()
        .map(|name| format!("\"{name}\""))
        .collect();
    eventually(MINUTE, "the new history arrives", || {
        relay.assert_alive();
        let records = broker.read_all(&stage.topic("t"));
        let values = records.iter().map(Rec::value_text);
        let mut seen = HashSet::new();
        let first: Vec<String> = values
            .filter(|value| value.starts_with("\"new") && seen.insert(value.clone()))
            .collect();
        (first == right).then_some(())
    });
    stage.wait_confirmed(MINUTE);
    relay.stop();
}
