//! A relay that dies repeats nothing: what it had delivered without hearing of it, or without having
//! confirmed it, its successor finds in the topics. Where it may not look there, events come again,
//! and never in another order.

use std::thread;
use std::time::Duration;

use crate::check::{Committed, Verdict, check};
use crate::faults_postgres::more;
use crate::kafka::Broker;
use crate::kafka_secured::{PASSWORD, Secured};
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg};
use crate::proc;
use crate::relay::Relay;
use crate::stage::{MINUTE, Stage};
use crate::trio::Trio;

/// Events a second, all writers together.
const RATE: u32 = 2_000;
const ROWS: usize = 5;

/// How many records the next relay may deliver before it is killed: few, or many, never the same.
fn step(kill: usize) -> usize {
    50 + (kill * 7_919) % 2_500
}

/// Kills it when it has delivered so many records, or all that there is.
fn kill_after(stage: &Stage<'_>, relay: &mut Relay, records: usize, most: usize) {
    let topic = stage.topic("t");
    let goal = most.min(stage.broker.count(&topic) + records);
    stage.broker.wait_count_while(&topic, goal, 2 * MINUTE, || {
        assert!(!proc::ended_unnoticed(relay.pid()), "it ended by itself");
    });
    relay.kill9();
}

/// Everything arrives, and is judged.
fn verdict(stage: &Stage<'_>, committed: &Committed, relay: &mut Relay) -> Verdict {
    let topic = stage.topic("t");
    stage.wait_count("t", committed.len(), 3 * MINUTE);
    stage.wait_confirmed(2 * MINUTE);
    relay.stop();
    check(&stage.broker.read_all(&topic), committed)
}

/// A backlog is drained by relays that are killed in the middle of it.
fn kills_in_a_drain(stage: &Stage<'_>, kills: usize) -> Verdict {
    // A relay that drains is seen, and killed, some thousands of events late.
    let transactions = 20 + 15 * kills;
    let plan = Plan::new(4, Shape::Rows(250)).transactions(transactions);
    let committed = Load::start(&stage.db, &plan).finish();
    let mut relay = stage.run();
    for kill in 0..kills {
        kill_after(stage, &mut relay, step(kill), committed.len());
        relay = stage.run();
    }
    verdict(stage, &committed, &mut relay)
}

fn at_a_rate(stage: &Stage<'_>) -> Load {
    let rows = u32::try_from(ROWS).expect("a few");
    let plan = Plan::new(4, Shape::Rows(ROWS)).a_second(RATE / rows);
    Load::start(&stage.db, &plan)
}

/// The same while writers write at a steady rate.
fn kills_at_a_rate(stage: &Stage<'_>, kills: usize) -> Verdict {
    let mut relay = stage.run();
    let load = at_a_rate(stage);
    for kill in 0..kills {
        kill_after(stage, &mut relay, step(kill), usize::MAX);
        relay = stage.run();
    }
    verdict(stage, &load.stop(), &mut relay)
}

/// On three nodes, one of which goes, and with it the leaders that it has, before each kill.
fn kills_while_leaders_move(kills: usize) -> Verdict {
    let trio = Trio::lent();
    let stage = Stage::on(Cluster::shared(Pg::V18), &trio.nodes[0]);
    stage.try_init().expect_code(0);
    let topic = stage.topic("t");
    let two = [("min.insync.replicas", "2")];
    trio.nodes[0].create_replicated(&topic, 6, 3, &two);
    let mut relay = stage.run();
    let load = at_a_rate(&stage);
    for kill in 0..kills {
        trio.wait_in_sync(&topic, 3);
        stage.wait_count("t", load.committed(), 3 * MINUTE);
        let node = trio.node(trio.leader(&topic, kill % 6));
        // In turn: what is in flight at the moment, and what is sent to the new leaders.
        if kill % 2 == 0 {
            node.kill9();
            relay.kill9();
        } else {
            node.stop();
            kill_after(&stage, &mut relay, step(kill) / 10, usize::MAX);
        }
        relay = stage.run();
        more(&load, 200);
        node.up();
    }
    verdict(&stage, &load.stop(), &mut relay)
}

/// A relay whose user may write to the topic and not read it.
fn without_the_right(kills: usize) -> Verdict {
    let secured = Secured::shared();
    let mut stage = Stage::on(Cluster::shared(Pg::V15), &secured.broker);
    let topic = stage.topic("t");
    stage.init();
    secured.allow("scribe", &["Write", "Describe"], &topic);
    stage.brokers = Some(secured.sasl_plaintext.clone());
    for property in [
        "security.protocol=sasl_plaintext",
        "sasl.mechanism=SCRAM-SHA-256",
        "sasl.username=scribe",
        &format!("sasl.password={PASSWORD}"),
    ] {
        let argument = ["--kafka".to_owned(), property.to_owned()];
        stage.run_args.extend(argument);
    }
    kills_in_a_drain(&stage, kills)
}

/// What a killed relay had put into the socket of a broker that did not move is appended when the
/// broker wakes: before the next relay starts, or while it waits for an answer.
fn kills_while_the_broker_is_frozen(broker: &Broker, rounds: usize) -> Verdict {
    let stage = Stage::on(Cluster::shared(Pg::V17), broker);
    stage.init();
    let mut relay = stage.run();
    let load = at_a_rate(&stage);
    for round in 0..rounds {
        stage.wait_count("t", load.committed(), 2 * MINUTE);
        broker.freeze();
        // The client has what it takes: requests of each kind in the socket, the rest behind them.
        more(&load, 1_000);
        relay.kill9();
        if round % 2 == 0 {
            broker.thaw();
            relay = stage.run();
        } else {
            relay = stage.run();
            // For the fault: it has found that nobody answers.
            thread::sleep(Duration::from_secs(3));
            broker.thaw();
        }
    }
    verdict(&stage, &load.stop(), &mut relay)
}

// ---- in `make test` ------------------------------------------------------------------------

#[test]
fn kills_in_the_middle_of_a_drain_repeat_nothing() {
    let stage = Stage::shared(Pg::V15);
    stage.init();
    kills_in_a_drain(&stage, 4).assert_exactly_once();
}

#[test]
fn kills_at_a_steady_rate_repeat_nothing() {
    let stage = Stage::shared(Pg::V18);
    stage.init();
    kills_at_a_rate(&stage, 4).assert_exactly_once();
}

#[test]
fn kills_while_leaders_move_repeat_nothing() {
    kills_while_leaders_move(2).assert_exactly_once();
}

#[test]
fn late_writes_of_a_killed_relay_repeat_nothing() {
    kills_while_the_broker_is_frozen(&Broker::to_be_frozen(), 2).assert_exactly_once();
}

#[test]
fn without_the_read_right_events_come_again_and_never_in_another_order() {
    let verdict = without_the_right(4);
    verdict.assert_complete_and_ordered();
    assert!(verdict.duplicates > 0, "nothing was in flight: no proof");
}

/// A stop is no crash: nobody looks into the topics, and nothing comes again.
#[test]
fn a_clean_stop_needs_no_look_into_the_topics() {
    let stage = Stage::shared(Pg::V15);
    stage.init();
    let mut relay = stage.run();
    let load = at_a_rate(&stage);
    for _ in 0..2 {
        more(&load, 500);
        relay.stop();
        relay = stage.run();
    }
    verdict(&stage, &load.stop(), &mut relay).assert_exactly_once();
}

// ---- in `make soak` ------------------------------------------------------------------------

#[test]
#[ignore = "half an hour: make soak"]
fn soak_a_hundred_kills_in_drains_repeat_nothing() {
    // Ten backlogs, each on a server of another version than the one before.
    for turn in 0..10 {
        let stage = Stage::shared(Pg::ALL[turn % Pg::ALL.len()]);
        stage.init();
        kills_in_a_drain(&stage, 10).assert_exactly_once();
    }
}

#[test]
#[ignore = "ten minutes: make soak"]
fn soak_a_hundred_kills_at_a_rate_repeat_nothing() {
    for pg in Pg::ALL {
        let stage = Stage::shared(pg);
        stage.init();
        kills_at_a_rate(&stage, 25).assert_exactly_once();
    }
}

#[test]
#[ignore = "an hour: make soak"]
fn soak_a_hundred_kills_while_leaders_move_repeat_nothing() {
    kills_while_leaders_move(100).assert_exactly_once();
}

#[test]
#[ignore = "ten minutes: make soak"]
fn soak_late_writes_repeat_nothing() {
    kills_while_the_broker_is_frozen(&Broker::to_be_frozen(), 30).assert_exactly_once();
}

#[test]
#[ignore = "ten minutes: make soak"]
fn soak_a_hundred_kills_without_the_read_right_keep_the_order() {
    let mut duplicates = 0;
    for _ in 0..10 {
        let verdict = without_the_right(10);
        verdict.assert_complete_and_ordered();
        duplicates += verdict.duplicates;
    }
    assert!(duplicates > 0, "nothing was in flight: no proof");
}
