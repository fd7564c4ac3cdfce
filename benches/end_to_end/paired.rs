//! The same drain twice, with one thing changed: what a mapped table costs, and TLS to both sides.
//!
//! Each pair has two databases with the same backlog; who drains first alternates.

use crate::args::Args;
use crate::drain::{Drained, drain_relay};
use crate::load;
use crate::report::{Goal, Report, median};
use crate::rig::{Rig, Servers, Socket};
use crate::say;
use crate::usage::per_event;

const ROWS: usize = 100;

struct Pair {
    name: &'static str,
    title: &'static str,
    goal: Goal,
    /// The changed one, its backlog written.
    changed: for<'a> fn(&'a Servers, usize) -> Rig<'a>,
}

const PAIRS: [Pair; 2] = [
    Pair {
        name: "paired-mapping",
        title: "drain of a mapped table ÷ of our own",
        goal: Goal::at_least(0.98, None),
        changed: mapped,
    },
    Pair {
        name: "paired-tls",
        title: "drain with TLS to both sides ÷ in the clear",
        goal: Goal::at_least(0.75, None),
        changed: encrypted,
    },
];

pub fn measure(servers: &Servers, args: &Args, report: &mut Report) {
    let events = args.pick(500_000, 50_000);
    for pair in PAIRS {
        if args.wants_exactly(pair.name) {
            let rounds: Vec<(Drained, Drained)> = (0..args.rounds)
                .map(|number| one(servers, &pair, events, number))
                .collect();
            describe(&pair, events, &rounds, report);
        }
    }
}

/// Ours, then the changed one's.
fn one(servers: &Servers, pair: &Pair, events: usize, number: usize) -> (Drained, Drained) {
    let mut own = own(servers, events);
    own.url_words = "sslmode=disable";
    let changed = (pair.changed)(servers, events);
    let drain = |rig: &Rig<'_>| {
        let sql = servers.cluster.connect(&rig.db.name);
        drain_relay(rig, &load::end_of_log(&sql), events)
    };
    let (first, second) = if number.is_multiple_of(2) {
        let first = drain(&own);
        (first, drain(&changed))
    } else {
        let second = drain(&changed);
        (drain(&own), second)
    };
    servers.offer_tls("off");
    for rig in [&own, &changed] {
        rig.broker.delete_topic(&rig.topic());
    }
    say(&format!(
        "{} #{}: {:.0}/s ({:.1} µs) and {:.0}/s ({:.1} µs), ratio {:.3}",
        pair.title,
        number + 1,
        first.rate,
        per_event(first.cpu.total(), events),
        second.rate,
        per_event(second.cpu.total(), events),
        second.rate / first.rate
    ));
    (first, second)
}

fn own(servers: &Servers, events: usize) -> Rig<'_> {
    let rig = Rig::new(servers, Socket::Tcp);
    load::backlog(&rig.db, events, ROWS);
    rig
}

/// The same record, from columns of other names in another order.
fn mapped(servers: &Servers, events: usize) -> Rig<'_> {
    let mut rig = Rig::bare(servers, Socket::Tcp);
    rig.db.connect().run(
        "create table \"Out Box\" (
           body jsonb, \"Kind\" text not null, uid uuid not null unique, meta jsonb not null default '{}',
           happened text not null, order_no text not null, written timestamptz not null default now(),
           no bigint generated always as identity primary key,
           xid xid8 not null default pg_current_xact_id());
         create index on \"Out Box\" using brin ((xid::text::bigint))",
    );
    rig.mapping = vec![
        "--table",
        "\"Out Box\"",
        "--column",
        "event_id=uid",
        "--column",
        "aggregate_type=Kind",
        "--column",
        "aggregate_id=order_no",
        "--column",
        "event_type=happened",
        "--column",
        "payload=body",
        "--column",
        "headers=meta",
    ];
    rig.init();
    let columns = ["uid", "\"Kind\"", "order_no", "happened", "body"];
    load::backlog_in(&rig.db, "\"Out Box\"", &columns, events, ROWS);
    rig
}

fn encrypted(servers: &Servers, events: usize) -> Rig<'_> {
    let mut rig = own(servers, events);
    servers.offer_tls("on");
    rig.url_words = "sslmode=require";
    rig.kafka = servers.kafka_over_tls();
    rig
}

fn describe(pair: &Pair, events: usize, rounds: &[(Drained, Drained)], report: &mut Report) {
    let us = |drained: &Drained| per_event(drained.cpu.total(), events);
    report.row(
        pair.title.to_owned(),
        median(rounds.iter().map(|(own, changed)| changed.rate / own.rate)),
        "×",
        Some(pair.goal),
        format!(
            "{:.0} ÷ {:.0} events/s, {:.2} and {:.2} µs of CPU an event",
            median(rounds.iter().map(|(_, changed)| changed.rate)),
            median(rounds.iter().map(|(own, _)| own.rate)),
            median(rounds.iter().map(|(_, changed)| us(changed))),
            median(rounds.iter().map(|(own, _)| us(own))),
        ),
    );
}
