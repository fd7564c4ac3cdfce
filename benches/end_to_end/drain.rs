//! How fast a backlog is drained, beside `pg_recvlogical` on the same backlog and the bare
//! producer on the same topic.
//!
//! A drain of the relay lasts from the start of its process until the slot's
//! `confirmed_flush_lsn` has reached the end of the backlog (the broker's high watermarks are
//! compared with the number of rows afterwards); one of `pg_recvlogical` from the start of its
//! process to its end at that position.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::args::Args;
use crate::load;
use crate::raw::{self, Recvlogical};
use crate::report::{Goal, Report, median};
use crate::rig::{MINUTE, Rig, Servers, Socket};
use crate::say;
use crate::usage::{Cpu, count, megabytes, per_event};

#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    /// In the table.
    title: &'static str,
    rows: usize,
    socket: Socket,
    ratio: Option<Goal>,
}

const SHAPES: [Shape; 3] = [
    Shape {
        name: "drain-hundred",
        title: "drain, 100 rows a transaction",
        rows: 100,
        socket: Socket::Tcp,
        ratio: Some(Goal::at_least(1.0, Some(1.5))),
    },
    Shape {
        name: "drain-single",
        title: "drain, single-row transactions",
        rows: 1,
        socket: Socket::Tcp,
        ratio: Some(Goal::at_least(1.1, Some(1.6))),
    },
    Shape {
        name: "drain-unix",
        title: "drain, 100 rows, Unix socket",
        rows: 100,
        socket: Socket::Unix,
        ratio: None,
    },
];

/// One drain.
#[derive(Clone, Copy, Default)]
pub struct Drained {
    pub rate: f64,
    pub cpu: Cpu,
    walsender: Cpu,
    broker: Cpu,
    peak_mb: f64,
}

struct Round {
    relay: Drained,
    reader: Drained,
    producer_rate: f64,
    producer_cpu: Cpu,
}

pub fn measure(servers: &Servers, args: &Args, report: &mut Report) {
    let events = args.pick(1_000_000, 100_000);
    warm(servers);
    for shape in SHAPES {
        if !args.wants_exactly(shape.name) {
            continue;
        }
        let rounds: Vec<Round> = (0..args.rounds)
            .map(|number| {
                let round = one(servers, shape, events, number);
                tell(shape, number, events, &round);
                round
            })
            .collect();
        describe(shape, events, &rounds, report);
    }
}

/// A fresh JVM runs at a fraction of its speed for its first million records, and that would be
/// charged to whoever comes first.
fn warm(servers: &Servers) {
    say("warming the broker up");
    let topic = "warm";
    servers.broker.create_topic(topic, crate::rig::PARTITIONS);
    raw::produce(&servers.broker, topic, 1_000_000);
    servers.broker.delete_topic(topic);
}

fn one(servers: &Servers, shape: Shape, events: usize, number: usize) -> Round {
    let rig = Rig::new(servers, shape.socket);
    let raw_slot = rig.raw_slot();
    load::backlog(&rig.db, events, shape.rows);
    let sql = servers.cluster.connect(&rig.db.name);
    let end = load::end_of_log(&sql);
    let relay = || drain_relay(&rig, &end, events);
    let reader = || drain_reader(&rig, &raw_slot, &end, events);
    // Who comes first alternates: the second finds the log in warmer caches.
    let (relay, reader) = if number.is_multiple_of(2) {
        let relay = relay();
        (relay, reader())
    } else {
        let reader = reader();
        (relay(), reader)
    };
    let topic = format!("{}.raw", rig.db.name);
    rig.broker.create_topic(&topic, crate::rig::PARTITIONS);
    let produced = raw::produce(rig.broker, &topic, events);
    rig.broker.delete_topic(&topic);
    rig.broker.delete_topic(&rig.topic());
    Round {
        relay,
        reader,
        producer_rate: count(events) / produced.span.as_secs_f64(),
        producer_cpu: produced.cpu,
    }
}

pub fn drain_relay(rig: &Rig<'_>, end: &str, events: usize) -> Drained {
    let sql = rig.db.connect();
    let slot = rig.db.slot();
    let broker_before = Cpu::of(rig.broker.pid());
    let start = Instant::now();
    let mut relay = rig.relay();
    let mut walsender = Cpu::default();
    let pid = wait_for_walsender(rig, &sql, &slot);
    rig.wait_confirmed(&sql, end, &mut relay, || {
        walsender = walsender.or(Cpu::of(pid));
    });
    let span = start.elapsed();
    let drained = Drained {
        rate: count(events) / span.as_secs_f64(),
        cpu: Cpu::of(relay.pid()),
        walsender,
        broker: Cpu::of(rig.broker.pid()) - broker_before,
        peak_mb: megabytes(relay.memory().peak),
    };
    let delivered = rig.broker.count(&rig.topic());
    assert_eq!(delivered, events, "each event is delivered, and once");
    relay.stop();
    drained
}

fn drain_reader(rig: &Rig<'_>, slot: &str, end: &str, events: usize) -> Drained {
    let sql = rig.db.connect();
    let start = Instant::now();
    let mut reader = Recvlogical::start(rig, slot, Some(end));
    let pid = wait_for_walsender(rig, &sql, slot);
    let (mut cpu, mut walsender) = (Cpu::default(), Cpu::default());
    reader.wait(|own| {
        cpu = cpu.or(Cpu::of(own));
        walsender = walsender.or(Cpu::of(pid));
    });
    Drained {
        rate: count(events) / start.elapsed().as_secs_f64(),
        cpu,
        walsender,
        ..Drained::default()
    }
}

fn wait_for_walsender(rig: &Rig<'_>, sql: &crate::postgres::Sql, slot: &str) -> u32 {
    let until = Instant::now() + MINUTE;
    loop {
        if let Some(pid) = rig.walsender(sql, slot) {
            return pid;
        }
        assert!(Instant::now() < until, "nobody reads slot {slot}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn tell(shape: Shape, number: usize, events: usize, round: &Round) {
    let Round { relay, reader, .. } = round;
    let us = |cpu: Cpu| per_event(cpu.total(), events);
    say(&format!(
        "{} #{}: relay {:.0}/s ({:.1} user + {:.1} system µs, walsender {:.1}, broker {:.1}, peak {:.0} MB), \
         pg_recvlogical {:.0}/s ({:.1} µs, walsender {:.1}), ratio {:.2}; producer alone {:.0}/s, {:.1} µs",
        shape.title,
        number + 1,
        relay.rate,
        per_event(relay.cpu.user, events),
        per_event(relay.cpu.system, events),
        us(relay.walsender),
        us(relay.broker),
        relay.peak_mb,
        reader.rate,
        us(reader.cpu),
        us(reader.walsender),
        relay.rate / reader.rate,
        round.producer_rate,
        us(round.producer_cpu),
    ));
}

fn describe(shape: Shape, events: usize, rounds: &[Round], report: &mut Report) {
    let of = |pick: fn(&Round) -> f64| median(rounds.iter().map(pick));
    let us = |pick: fn(&Round) -> Duration| {
        median(rounds.iter().map(|round| per_event(pick(round), events)))
    };
    let ratio = of(|r| r.relay.rate / r.reader.rate);
    let relay_rate = of(|r| r.relay.rate);
    let reader_rate = of(|r| r.reader.rate);
    report.row(
        format!("{} ÷ pg_recvlogical", shape.title),
        ratio,
        "×",
        shape.ratio,
        format!("{relay_rate:.0} ÷ {reader_rate:.0} events/s"),
    );
    let cpu = us(|r| r.relay.cpu.total());
    let beside = format!(
        "librdkafka alone {:.1} µs at {:.0}/s; pg_recvlogical {:.1}",
        us(|r| r.producer_cpu.total()),
        of(|r| r.producer_rate),
        us(|r| r.reader.cpu.total()),
    );
    let is_judged = shape.name == "drain-hundred";
    report.row(
        format!("… relay CPU an event ({} rows)", shape.rows),
        cpu,
        "µs",
        is_judged.then(|| Goal::at_most(8.0, Some(5.0))),
        beside,
    );
    report.row(
        format!("… peak RSS ({} rows)", shape.rows),
        of(|r| r.relay.peak_mb),
        "MB",
        Some(Goal::at_most(96.0, Some(48.0))),
        format!(
            "walsender {:.1} µs an event (under pg_recvlogical {:.1}), broker {:.1}",
            us(|r| r.relay.walsender.total()),
            us(|r| r.reader.walsender.total()),
            us(|r| r.relay.broker.total()),
        ),
    );
    let rounds: Vec<_> = rounds
        .iter()
        .map(|r| {
            json!({
                "relay_events_per_second": r.relay.rate,
                "pg_recvlogical_events_per_second": r.reader.rate,
                "producer_events_per_second": r.producer_rate,
                "relay_user_us": per_event(r.relay.cpu.user, events),
                "relay_system_us": per_event(r.relay.cpu.system, events),
                "pg_recvlogical_us": per_event(r.reader.cpu.total(), events),
                "producer_us": per_event(r.producer_cpu.total(), events),
                "walsender_us": per_event(r.relay.walsender.total(), events),
                "walsender_us_under_pg_recvlogical": per_event(r.reader.walsender.total(), events),
                "broker_us": per_event(r.relay.broker.total(), events),
                "peak_rss_mb": r.relay.peak_mb,
            })
        })
        .collect();
    report.detail(shape.name, json!({ "events": events, "rounds": rounds }));
}
