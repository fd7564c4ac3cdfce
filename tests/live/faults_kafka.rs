//! Kafka hangs, dies, comes late or loses a topic; the relay waits, within bounds.

use std::thread;
use std::time::Duration;

use crate::faults_postgres::{STOP_MAX, ends_exactly_once, more};
use crate::kafka::{Broker, Rec};
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg, Sql, Stop};
use crate::proc::eventually;
use crate::relay::Relay;
use crate::stage::{MINUTE, Stage};

/// The documented ceiling of resident memory, in bytes.
const RSS_MAX: u64 = 96 << 20;

/// A fault's duration is what is tested.
fn for_the_fault(duration: Duration) {
    thread::sleep(duration);
}

fn catches_up(stage: &Stage<'_>, load: &Load) {
    stage.wait_count("t", load.committed(), 2 * MINUTE);
}

fn is_streaming(sql: &Sql, stage: &Stage<'_>) -> bool {
    sql.one(&format!(
        "select active from pg_replication_slots where slot_name = '{}'",
        stage.db.slot()
    )) == "t"
}

pub fn times_said(relay: &Relay, text: &str) -> usize {
    relay.lines().iter().filter(|line| line.has(text)).count()
}

/// README: Kafka is away: it is down, refuses or hangs.
#[test]
fn a_broker_that_hangs_for_30_s_and_is_killed_costs_nothing() {
    let broker = Broker::start();
    let stage = Stage::on(Cluster::shared(Pg::V18), &broker);
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(4, Shape::Mixed).a_second(400));
    more(&load, 400);
    broker.freeze();
    for_the_fault(Duration::from_secs(30));
    relay.assert_alive();
    broker.thaw();
    catches_up(&stage, &load);
    broker.kill9();
    for_the_fault(Duration::from_secs(3));
    broker.up();
    more(&load, 200);
    catches_up(&stage, &load);
    ends_exactly_once(&stage, load, &mut relay);
}

#[test]
fn a_broker_that_comes_late_or_hangs_is_waited_for_without_holding_the_slot() {
    let broker = Broker::start();
    let mut stage = Stage::on(Cluster::shared(Pg::V15), &broker);
    stage.run_args = vec!["--stall-timeout".to_owned(), "5s".to_owned()];
    let sql = stage.init();
    broker.kill9();
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(100));
    more(&load, 50);
    let mut relay = stage.run();
    let address = broker.bootstrap();
    relay.wait_for("who is waited for", Duration::from_secs(20), |line| {
        line.level() != "DEBUG" && line.has(&address)
    });
    relay.assert_alive();
    broker.up();
    catches_up(&stage, &load);
    stage.wait_confirmed(MINUTE);

    // The un-acked connection is given up after the stall timeout, and taken again.
    broker.freeze();
    let patience = Duration::from_secs(15);
    eventually(patience, "the replication connection is closed", || {
        (!is_streaming(&sql, &stage)).then_some(())
    });
    relay.wait_for_text("delivered nothing for", Duration::from_secs(5));
    let answers = times_said(&relay, "kafka answers again");
    for_the_fault(Duration::from_secs(8));
    assert!(!is_streaming(&sql, &stage), "reopened before Kafka answers");
    assert_eq!(times_said(&relay, "kafka answers again"), answers);
    broker.thaw();
    eventually(patience, "the replication connection is back", || {
        is_streaming(&sql, &stage).then_some(())
    });
    catches_up(&stage, &load);
    ends_exactly_once(&stage, load, &mut relay);
}

/// One event of topic `t`, of one of three keys.
fn ins(sql: &Sql, n: usize) {
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k{}', 'e', '{n}')",
        n % 3
    ));
}

/// README: a topic is deleted and made again.
#[test]
fn k05_a_topic_deleted_and_made_again_gets_everything_in_order() {
    let broker = Broker::start();
    let stage = Stage::on(Cluster::shared(Pg::V15), &broker);
    let sql = stage.init();
    let topic = stage.topic("t");
    let mut relay = stage.run();
    for n in 0..10 {
        ins(&sql, n);
    }
    stage.wait_count("t", 10, MINUTE);
    stage.wait_confirmed(MINUTE);
    broker.delete_topic(&topic);
    ins(&sql, 10);
    let first_undelivered = sql.one("select pg_current_wal_insert_lsn()");
    for n in 11..20 {
        ins(&sql, n);
    }
    relay.wait_for("the topic that is gone", Duration::from_secs(15), |line| {
        line.level() == "ERROR" && line.has(&topic) && line.has("does not exist")
    });
    for_the_fault(Duration::from_secs(15));
    relay.assert_alive();
    let is_below = sql.one(&format!(
        "select confirmed_flush_lsn < '{first_undelivered}' from pg_replication_slots
         where slot_name = '{}'",
        stage.db.slot()
    ));
    assert_eq!(is_below, "t", "the slot moved past what is not delivered");
    broker.create_topic(&topic, 6);
    stage.wait_count("t", 10, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    let mut records = broker.read_all(&topic);
    records.sort_by_key(|r| (r.key_text(), r.offset));
    let values: Vec<String> = records.iter().map(Rec::value_text).collect();
    let right = ["12", "15", "18", "10", "13", "16", "19", "11", "14", "17"];
    assert_eq!(values, right);
}

/// Case K11, with two minutes for its ten.
#[test]
fn k11_two_minutes_without_a_broker_and_a_restart_of_postgres_cost_nothing() {
    let cluster = Cluster::start(Pg::V15);
    let broker = Broker::start();
    let stage = Stage::on(&cluster, &broker);
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(4, Shape::Single).a_second(500));
    more(&load, 1000);
    broker.kill9();
    for_the_fault(Duration::from_secs(30));
    cluster.ask_to_stop(Stop::Fast);
    assert!(cluster.stopped_within(STOP_MAX), "the stop hangs on us");
    cluster.up();
    for_the_fault(Duration::from_secs(20));
    let early = relay.memory();
    for_the_fault(Duration::from_secs(70));
    relay.assert_alive();
    let late = relay.memory();
    assert!(late.peak <= RSS_MAX, "peak RSS {} MB", late.peak >> 20);
    assert!(
        late.resident <= early.resident + (4 << 20),
        "memory grew from {} to {} MB while nothing could be delivered",
        early.resident >> 20,
        late.resident >> 20
    );
    assert!(
        times_said(&relay, "brokers are down") <= 8,
        "an outage is no flood of log lines:\n{}",
        relay.said()
    );
    assert_eq!(
        times_said(&relay, "kafka answers again"),
        0,
        "there was no Kafka that could answer:\n{}",
        relay.said()
    );
    broker.up();
    catches_up(&stage, &load);
    let peak = relay.memory().peak;
    assert!(peak <= RSS_MAX, "peak RSS {} MB", peak >> 20);
    ends_exactly_once(&stage, load, &mut relay);
}
