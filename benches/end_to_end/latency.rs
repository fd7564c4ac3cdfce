//! Commit returned → the consumer has it, at a steady rate on a schedule; beside it the two halves
//! that no relay can undercut: commit → a bare reader of the stream, and produce → ack.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::args::Args;
use crate::load::{Plan, Times, Writer};
use crate::raw::{self, Watcher};
use crate::report::{Goal, Report, median};
use crate::rig::{MINUTE, PARTITIONS, Rig, Servers, Socket};
use crate::say;
use crate::usage::millis;

/// What is expected at a rate: of p50 and of p99, in milliseconds.
struct Level {
    a_second: u32,
    p50: Goal,
    p99: Goal,
}

const LEVELS: [Level; 2] = [
    Level {
        a_second: 200,
        p50: Goal::at_most(1.0, Some(0.7)),
        p99: Goal::at_most(4.0, Some(2.0)),
    },
    Level {
        a_second: 1_000,
        p50: Goal::at_most(2.0, Some(1.0)),
        p99: Goal::at_most(20.0, Some(8.0)),
    },
];

/// The first second of a run: connections, caches, the first look at the topic.
const WARM_UP: Duration = Duration::from_secs(2);

/// A distribution, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spread {
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl Spread {
    /// Of sorted spans.
    pub fn of(sorted: &[Duration]) -> Spread {
        let at = |percent: usize| {
            let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
            millis(sorted.get(index).copied().unwrap_or_default())
        };
        Spread {
            p50: at(50),
            p95: at(95),
            p99: at(99),
            max: at(100),
        }
    }

    pub fn json(self) -> serde_json::Value {
        json!({ "p50_ms": self.p50, "p95_ms": self.p95, "p99_ms": self.p99, "max_ms": self.max })
    }
}

struct Round {
    relay: Spread,
    reader: Spread,
    producer: Spread,
}

pub fn measure(servers: &Servers, args: &Args, report: &mut Report) {
    let span = Duration::from_secs(args.pick(20, 5));
    for level in LEVELS {
        let rounds: Vec<Round> = (0..args.rounds)
            .map(|number| {
                let round = one(servers, level.a_second, span);
                say(&format!(
                    "latency at {}/s #{}: {}; to the stream's reader {}; produce → ack {}",
                    level.a_second,
                    number + 1,
                    words(round.relay),
                    words(round.reader),
                    words(round.producer)
                ));
                round
            })
            .collect();
        describe(&level, &rounds, report);
    }
}

fn words(spread: Spread) -> String {
    let Spread { p50, p95, p99, max } = spread;
    format!("p50 {p50:.2} p95 {p95:.2} p99 {p99:.2} max {max:.1} ms")
}

fn one(servers: &Servers, a_second: u32, span: Duration) -> Round {
    let plan = Plan {
        a_second,
        span,
        sessions: 8,
        key: 'k',
    };
    let relay = {
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
        Spread::of(&times.latencies())
    };
    let reader = {
        let rig = Rig::new(servers, Socket::Tcp);
        let slot = rig.raw_slot();
        let times = Times::new(plan.events());
        let reader = Watcher::of_slot(&rig, &slot, times.clone());
        warm_seen(&rig, &times);
        let written = Writer::start(&rig.db, plan, times.clone()).wait();
        wait_seen(&times, written.events);
        reader.stop();
        rig.broker.delete_topic(&rig.topic());
        Spread::of(&times.latencies())
    };
    let producer = {
        let topic = format!("ack-{}", crate::proc::unique());
        servers.broker.create_topic(&topic, PARTITIONS);
        let times = Times::new(plan.events());
        raw::produce_on_schedule(&servers.broker, &topic, a_second, &times, plan.events());
        servers.broker.delete_topic(&topic);
        Spread::of(&times.latencies())
    };
    Round {
        relay,
        reader,
        producer,
    }
}

/// Some events that are not counted, up to the topic.
pub fn warm(rig: &Rig<'_>) {
    let written = write_some(rig);
    rig.broker.wait_count(&rig.topic(), written, MINUTE);
}

/// Some events that are not counted, up to the watcher: its own connections are warm as well.
pub fn warm_seen(rig: &Rig<'_>, times: &Times) {
    let written = write_some(rig);
    let until = Instant::now() + MINUTE;
    while times.others() < written {
        assert!(
            Instant::now() < until,
            "{} of {written} were seen",
            times.others()
        );
        thread::sleep(Duration::from_millis(5));
    }
}

fn write_some(rig: &Rig<'_>) -> usize {
    let plan = Plan {
        a_second: 500,
        span: WARM_UP,
        sessions: 4,
        key: 'w',
    };
    let times = Times::new(plan.events());
    Writer::start(&rig.db, plan, times).wait().events
}

pub fn wait_seen(times: &Times, events: usize) {
    let until = Instant::now() + 3 * MINUTE;
    while times.seen_count() < events {
        let seen = times.seen_count();
        assert!(Instant::now() < until, "{seen} of {events} were seen");
        thread::sleep(Duration::from_millis(20));
    }
}

fn describe(level: &Level, rounds: &[Round], report: &mut Report) {
    let of = |pick: fn(&Round) -> f64| median(rounds.iter().map(pick));
    let floor = |name: &str, reader: f64, producer: f64| {
        format!("{name}: to the stream's reader {reader:.2} ms, produce → ack {producer:.2} ms")
    };
    let a_second = level.a_second;
    report.row(
        format!("commit → consumer at {a_second}/s, p50"),
        of(|r| r.relay.p50),
        "ms",
        Some(level.p50),
        floor("p50", of(|r| r.reader.p50), of(|r| r.producer.p50)),
    );
    report.row(
        "… p99".to_owned(),
        of(|r| r.relay.p99),
        "ms",
        Some(level.p99),
        floor("p99", of(|r| r.reader.p99), of(|r| r.producer.p99)),
    );
    let (p95, max) = (of(|r| r.relay.p95), of(|r| r.relay.max));
    report.note(format!("at {a_second}/s: p95 {p95:.2} ms, max {max:.1} ms"));
    let rounds: Vec<_> = rounds
        .iter()
        .map(|r| {
            json!({
                "relay": r.relay.json(),
                "stream_reader": r.reader.json(),
                "produce_ack": r.producer.json(),
            })
        })
        .collect();
    report.detail(&format!("latency-{a_second}"), json!({ "rounds": rounds }));
}
