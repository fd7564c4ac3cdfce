//! What is away, broken or lying, and what comes of it: the rows of the README's table that have
//! no test elsewhere. Each ends with every event in its topic once, in the order of its key.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use crate::check::check;
use crate::faults_postgres::{ends_exactly_once, more};
use crate::http::{self, Ready};
use crate::kafka::Broker;
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg, Stop};
use crate::proc::{eventually_says, free_port};
use crate::proxy::Proxy;
use crate::stage::{MINUTE, Stage};
use crate::trio::Trio;

/// A fault's duration is what is tested.
fn for_the_fault(duration: Duration) {
    thread::sleep(duration);
}

fn serve_http(stage: &mut Stage<'_>) {
    stage
        .run_args
        .extend(["--http".to_owned(), "127.0.0.1:0".to_owned()]);
}

/// Waits until `/readyz` names this condition.
#[track_caller]
fn names(address: &str, condition: &str) {
    let what = || format!("not ready for {condition}: {}", Ready::of(address).body);
    eventually_says(MINUTE, what, || {
        (Ready::of(address).holds(condition) == Some(false)).then_some(())
    });
}

#[track_caller]
fn is_ready(address: &str) {
    let what = || format!("ready: {}", Ready::of(address).body);
    eventually_says(2 * MINUTE, what, || {
        (Ready::of(address).status == 200).then_some(())
    });
}

/// What was committed by now arrives.
#[track_caller]
fn catches_up(stage: &Stage<'_>, load: &Load) {
    stage.wait_count("t", load.committed(), 2 * MINUTE);
}

// ---- brokers -------------------------------------------------------------------------------

/// README: brokers are restarted one after the other; a partition's leader changes.
#[test]
fn three_brokers_restarted_one_after_the_other_cost_nothing() {
    let trio = Trio::lent();
    let stage = Stage::on(Cluster::shared(Pg::V18), &trio.nodes[0]);
    stage.try_init().expect_code(0);
    let topic = stage.topic("t");
    let two = [("min.insync.replicas", "2")];
    trio.nodes[0].create_replicated(&topic, 6, 3, &two);
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(3, Shape::Mixed).a_second(200));
    more(&load, 200);
    for (node, is_orderly) in trio.nodes.iter().zip([true, false, true]) {
        trio.wait_in_sync(&topic, 3);
        catches_up(&stage, &load);
        if is_orderly {
            node.stop();
        } else {
            node.kill9();
        }
        // While it is down, the others lead.
        more(&load, 50);
        catches_up(&stage, &load);
        node.up();
    }
    ends_exactly_once(&stage, load, &mut relay);
}

/// README: fewer replicas are in sync than `min.insync.replicas`.
#[test]
fn too_few_replicas_hold_up_their_topic_and_lose_nothing() {
    let trio = Trio::lent();
    let mut stage = Stage::on(Cluster::shared(Pg::V15), &trio.nodes[0]);
    serve_http(&mut stage);
    stage.try_init().expect_code(0);
    let topic = stage.topic("t");
    trio.nodes[0].create_replicated(&topic, 6, 3, &[("min.insync.replicas", "3")]);
    let mut relay = stage.run();
    let address = http::address(&mut relay);
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(100));
    catches_up(&stage, &load);
    is_ready(&address);
    let victim = trio.node(trio.leader(&topic, 0));
    victim.kill9();
    names(&address, "kafka");
    let held_up = stage.db.confirmed();
    more(&load, 100);
    relay.assert_alive();
    assert_eq!(stage.db.confirmed(), held_up, "the slot moved meanwhile");
    victim.up();
    catches_up(&stage, &load);
    is_ready(&address);
    ends_exactly_once(&stage, load, &mut relay);
}

/// README: Kafka is away. Ten real minutes of it under load (case K11), with a restart of Postgres.
#[test]
#[ignore = "a quarter of an hour: make soak"]
fn soak_ten_minutes_without_a_broker_cost_nothing() {
    const RSS_MAX: u64 = 96 << 20;
    let cluster = Cluster::start(Pg::V17);
    let broker = Broker::start();
    let stage = Stage::on(&cluster, &broker);
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(4, Shape::Single).a_second(500));
    more(&load, 1000);
    broker.kill9();
    for_the_fault(2 * MINUTE);
    cluster.restart(Stop::Fast);
    let early = relay.memory();
    for_the_fault(8 * MINUTE);
    relay.assert_alive();
    let late = relay.memory();
    assert!(late.peak <= RSS_MAX, "peak RSS {} MB", late.peak >> 20);
    assert!(late.resident <= early.resident + (4 << 20), "memory grew");
    broker.up();
    let committed = load.stop();
    stage.wait_count("t", committed.len(), 10 * MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert!(relay.memory().peak <= RSS_MAX);
    check(&stage.broker.read_all(&stage.topic("t")), &committed).assert_exactly_once();
}

/// README: Kafka hangs, for seconds up to half a minute, again and again; sometimes Postgres is
/// restarted meanwhile.
#[test]
#[ignore = "ten minutes: make soak"]
fn soak_a_broker_that_hangs_again_and_again_costs_nothing() {
    let cluster = Cluster::start(Pg::V18);
    let broker = Broker::start();
    let stage = Stage::on(&cluster, &broker);
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(200));
    let began = Instant::now();
    let mut round = 0;
    while began.elapsed() < 10 * MINUTE {
        round += 1;
        catches_up(&stage, &load);
        broker.freeze();
        // The client's own time-outs lie at 10 and 15 s, ours at 20: before, at and behind each.
        for_the_fault(Duration::from_millis(1_000 + (round * 2_700) % 27_000));
        if round % 2 == 0 {
            cluster.restart(Stop::Fast);
        }
        broker.thaw();
        relay.assert_alive();
    }
    ends_exactly_once(&stage, load, &mut relay);
}

// ---- the network ---------------------------------------------------------------------------

/// README: packets are dropped without a word (to Kafka).
#[test]
fn connections_to_kafka_that_are_dropped_without_a_word_are_made_anew() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let seen_as = listener.local_addr().expect("it is bound").port();
    let port = free_port();
    // Every client is led to the proxy, whomever it asked first.
    let advertised = format!("advertised.listeners=PLAINTEXT://127.0.0.1:{seen_as}");
    let proxy = Proxy::on(listener, port);
    let broker = Broker::with_users(&[&advertised], &[], port);
    let mut stage = Stage::on(Cluster::shared(Pg::V16), &broker);
    serve_http(&mut stage);
    stage.init();
    let mut relay = stage.run();
    let address = http::address(&mut relay);
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(100));
    stage.wait_count("t", 100, MINUTE);
    is_ready(&address);
    assert!(proxy.forget() > 0);
    names(&address, "kafka");
    catches_up(&stage, &load);
    is_ready(&address);
    ends_exactly_once(&stage, load, &mut relay);
}

/// README: packets are dropped without a word (to Postgres). The server still holds the lock and
/// the slot for the sessions that it does not know to be dead.
#[test]
fn connections_to_postgres_that_are_dropped_without_a_word_are_made_anew() {
    let mut stage = Stage::shared(Pg::V17);
    let proxy = Proxy::before(stage.db.cluster.port);
    stage.database_url = Some(format!(
        "postgresql://postgres@127.0.0.1:{}/{}",
        proxy.port(),
        stage.db.name
    ));
    serve_http(&mut stage);
    stage.init();
    let mut relay = stage.run();
    let address = http::address(&mut relay);
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(100));
    stage.wait_count("t", 100, MINUTE);
    is_ready(&address);
    assert!(proxy.forget() > 0);
    names(&address, "database");
    catches_up(&stage, &load);
    is_ready(&address);
    ends_exactly_once(&stage, load, &mut relay);
}

// ---- Postgres ------------------------------------------------------------------------------

/// README: Postgres restarts again and again.
#[test]
fn a_postgres_that_restarts_in_a_loop_costs_nothing() {
    let cluster = Cluster::start(Pg::V16);
    let stage = Stage::on(&cluster, Broker::shared());
    stage.init();
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(3, Shape::Mixed).a_second(300));
    more(&load, 100);
    for round in 0..9 {
        match round % 3 {
            0 => cluster.stop(Stop::Fast),
            1 => cluster.stop(Stop::Immediate),
            _ => cluster.kill9(),
        }
        cluster.up();
        // Sometimes it lives for as long as it takes to connect, sometimes for a second.
        for_the_fault(Duration::from_millis(round * 130));
        relay.assert_alive();
    }
    more(&load, 100);
    ends_exactly_once(&stage, load, &mut relay);
}
