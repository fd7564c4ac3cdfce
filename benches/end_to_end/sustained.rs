//! 5,000 single-row commits a second, each with its own fsync, beside what the same writer reaches
//! with `pg_recvlogical` in the relay's place.

use std::time::Duration;

use serde_json::json;

use crate::args::Args;
use crate::latency::{Spread, wait_seen, warm_seen};
use crate::load::{Plan, Times, Writer, Written};
use crate::raw::{Recvlogical, Watcher};
use crate::report::{Goal, Report, median};
use crate::rig::{Rig, Servers, Socket};
use crate::say;

const A_SECOND: u32 = 5_000;
/// Enough that commits share fsyncs.
const SESSIONS: usize = 32;
/// Two runs of one writer differ by more than this without any cause of ours.
const TOLERANCE: f64 = 0.97;

struct Round {
    relay: Written,
    latency: Spread,
    reader: Written,
}

pub fn measure(servers: &Servers, args: &Args, report: &mut Report) {
    let plan = Plan {
        a_second: A_SECOND,
        span: Duration::from_secs(args.pick(60, 10)),
        sessions: SESSIONS,
        key: 'k',
    };
    let rounds: Vec<Round> = (0..args.rounds)
        .map(|number| {
            let round = one(servers, plan, number);
            say(&format!(
                "{A_SECOND}/s #{}: {:.0}/s with the relay, {:.0}/s with pg_recvlogical; p50 {:.1} p99 {:.1} max {:.0} ms",
                number + 1,
                round.relay.a_second(),
                round.reader.a_second(),
                round.latency.p50,
                round.latency.p99,
                round.latency.max
            ));
            round
        })
        .collect();
    describe(&rounds, report);
}

fn one(servers: &Servers, plan: Plan, number: usize) -> Round {
    let reader_first = !number.is_multiple_of(2);
    let before = reader_first.then(|| with_reader(servers, plan));
    let (relay, latency) = with_relay(servers, plan);
    Round {
        relay,
        latency,
        reader: before.unwrap_or_else(|| with_reader(servers, plan)),
    }
}

fn with_relay(servers: &Servers, plan: Plan) -> (Written, Spread) {
    let rig = Rig::new(servers, Socket::Tcp);
    let mut relay = rig.relay_streaming();
    let times = Times::new(plan.events());
    let consumer = Watcher::of_topic(rig.broker, &rig.topic(), times.clone());
    warm_seen(&rig, &times);
    let written = Writer::start(&rig.db, plan, times.clone()).wait();
    wait_seen(&times, written.events);
    consumer.stop();
    relay.stop();
    rig.broker.delete_topic(&rig.topic());
    (written, Spread::of(&times.latencies()))
}

fn with_reader(servers: &Servers, plan: Plan) -> Written {
    let rig = Rig::new(servers, Socket::Tcp);
    let slot = rig.raw_slot();
    let mut reader = Recvlogical::start(&rig, &slot, None);
    let written = Writer::start(&rig.db, plan, Times::new(plan.events())).wait();
    assert!(reader.is_alive(), "pg_recvlogical ended");
    rig.broker.delete_topic(&rig.topic());
    written
}

fn describe(rounds: &[Round], report: &mut Report) {
    let of = |pick: fn(&Round) -> f64| median(rounds.iter().map(pick));
    let reached = of(|r| r.relay.a_second());
    let reference = of(|r| r.reader.a_second());
    let asked = f64::from(A_SECOND).min(reference) * TOLERANCE;
    report.row(
        format!("{A_SECOND} single-row commits/s, reached"),
        reached,
        "/s",
        Some(Goal::at_least(asked.floor(), None)),
        format!("{reference:.0}/s with pg_recvlogical in the relay's place"),
    );
    report.row(
        "… commit → consumer, p99".to_owned(),
        of(|r| r.latency.p99),
        "ms",
        Some(Goal::aim_at_most(300.0)),
        format!(
            "p50 {:.1} ms, max {:.0} ms",
            of(|r| r.latency.p50),
            of(|r| r.latency.max)
        ),
    );
    let rounds: Vec<_> = rounds
        .iter()
        .map(|r| {
            json!({
                "relay_commits_per_second": r.relay.a_second(),
                "pg_recvlogical_commits_per_second": r.reader.a_second(),
                "latency": r.latency.json(),
            })
        })
        .collect();
    report.detail("sustained", json!({ "rounds": rounds }));
}
