//! What parking costs those who are not parked: a stream without poison, beside a build without
//! parking, and the neighbours of one poison key in a backlog.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::json;

use crate::args::Args;
use crate::drain::{Drained, drain_relay};
use crate::load;
use crate::raw;
use crate::report::{Goal, Report, median};
use crate::rig::{MINUTE, Rig, Servers, Socket};
use crate::say;
use crate::usage::per_event;

/// `BENCH_BASE`: the `walrelay` of another build, without parking.
const BASE: &str = "BENCH_BASE";
const KEYS: usize = 10_000;
/// Of this key one event is too large, in the middle of the backlog.
const POISON: &str = "order-7";
/// What the topic takes before its limit is lowered: the large event, too.
const ROOM: &str = "3000000";
const LIMIT: &str = "1048588";

pub fn measure(servers: &Servers, args: &Args, report: &mut Report) {
    if args.wants_exactly("poison-none") {
        match std::env::var(BASE) {
            Ok(base) => without_poison(servers, args, &base, report),
            Err(_) => report.note(format!(
                "a stream without poison: {BASE} names no build to compare with"
            )),
        }
    }
    if args.wants_exactly("poison-neighbours") {
        neighbours(servers, args, report);
    }
}

// ---- a stream without poison ---------------------------------------------------------------

fn without_poison(servers: &Servers, args: &Args, base: &str, report: &mut Report) {
    let events = args.pick(500_000, 100_000);
    let rounds: Vec<(Drained, Drained)> = (0..args.rounds)
        .map(|number| pair(servers, base, events, number))
        .collect();
    let us = |drained: &Drained| per_event(drained.cpu.total(), events);
    let ratio = |(own, base): &(Drained, Drained)| us(own) / us(base);
    report.row(
        "CPU an event without poison ÷ of a build without parking".to_owned(),
        median(rounds.iter().map(ratio)),
        "×",
        Some(Goal::at_most(1.01, None)),
        format!(
            "{:.2} ÷ {:.2} µs",
            median(rounds.iter().map(|(own, _)| us(own))),
            median(rounds.iter().map(|(_, base)| us(base)))
        ),
    );
    let each: Vec<_> = rounds
        .iter()
        .map(|(own, base)| json!({ "own_us": us(own), "base_us": us(base) }))
        .collect();
    report.detail("poison-none", json!({ "events": events, "rounds": each }));
}

fn pair(servers: &Servers, base: &str, events: usize, number: usize) -> (Drained, Drained) {
    let filled = |program: Option<&str>| {
        let mut rig = Rig::bare(servers, Socket::Tcp);
        rig.program = program.map(str::to_owned);
        rig.init();
        load::backlog(&rig.db, events, 100);
        rig
    };
    let (own, base) = (filled(None), filled(Some(base)));
    let drain = |rig: &Rig<'_>| {
        let sql = servers.cluster.connect(&rig.db.name);
        drain_relay(rig, &load::end_of_log(&sql), events)
    };
    let drained = if number.is_multiple_of(2) {
        let first = drain(&own);
        (first, drain(&base))
    } else {
        let first = drain(&base);
        (drain(&own), first)
    };
    for rig in [&own, &base] {
        rig.broker.delete_topic(&rig.topic());
    }
    let us = |drained: &Drained| per_event(drained.cpu.total(), events);
    say(&format!(
        "without poison #{}: {:.2} µs an event, {:.2} without parking",
        number + 1,
        us(&drained.0),
        us(&drained.1)
    ));
    drained
}

// ---- the neighbours of a poison key --------------------------------------------------------

/// What the relay knows of the topic's limit when it meets the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    /// There is no event that is too large.
    NoPoison,
    /// The event is sent apart at once.
    Known,
    /// Its batch is refused, and searched.
    LoweredMeanwhile,
}

/// When each event of each key was appended, in milliseconds since the first of all.
type Times = HashMap<String, Vec<i64>>;

fn neighbours(servers: &Servers, args: &Args, report: &mut Report) {
    let events = args.pick(300_000, 60_000);
    let mut rounds: Vec<[f64; 5]> = Vec::new();
    for number in 0..args.rounds {
        let clean = drained_at(servers, events, Limit::NoPoison);
        let known = drained_at(servers, events, Limit::Known);
        let lowered = drained_at(servers, events, Limit::LoweredMeanwhile);
        let round = [
            waits_longer(&known, &clean),
            waits_longer(&lowered, &clean),
            longest_pause(&clean),
            longest_pause(&known),
            longest_pause(&lowered),
        ];
        say(&format!(
            "one poison key among {KEYS} #{}: others wait {:.2} s longer, {:.2} where its batch is refused; pauses {:.2}, {:.2} and {:.2} s",
            number + 1,
            round[0],
            round[1],
            round[2],
            round[3],
            round[4]
        ));
        rounds.push(round);
    }
    let of = |column: usize| median(rounds.iter().map(|round| round[column]));
    let titles = [
        "one poison key of 10,000: longest wait of others beyond none",
        "… where the batch is refused and searched",
    ];
    for (column, title) in titles.into_iter().enumerate() {
        report.row(
            title.to_owned(),
            of(column),
            "s",
            Some(Goal::at_most(1.0, None)),
            format!(
                "longest pause {:.2} s, without poison {:.2} s",
                of(3 + column),
                of(2)
            ),
        );
    }
    report.detail(
        "poison-neighbours",
        json!({ "events": events, "seconds": rounds }),
    );
}

fn drained_at(servers: &Servers, events: usize, limit: Limit) -> Times {
    let rig = Rig::new(servers, Socket::Tcp);
    let takes = |bytes: &str| {
        let settings = [
            ("message.timestamp.type", "LogAppendTime"),
            ("max.message.bytes", bytes),
        ];
        rig.broker.alter_topic(&rig.topic(), &settings);
    };
    takes(match limit {
        Limit::LoweredMeanwhile => ROOM,
        Limit::NoPoison | Limit::Known => LIMIT,
    });
    let sql = rig.db.connect();
    load::backlog_of_keys(&sql, 0, events * 6 / 10, KEYS);
    if limit != Limit::NoPoison {
        sql.run(&format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             select gen_random_uuid(), 't', '{POISON}', 'placed',
                    to_jsonb(string_agg(md5(g::text), ''))
             from generate_series(1, 50000) g"
        ));
    }
    load::backlog_of_keys(&sql, events * 6 / 10, events, KEYS);
    let end = load::end_of_log(&sql);
    let mut relay = rig.relay();
    if limit == Limit::LoweredMeanwhile {
        rig.broker
            .wait_count_while(&rig.topic(), events / 20, 10 * MINUTE, || {});
        takes(LIMIT);
    }
    rig.wait_confirmed(&sql, &end, &mut relay, || {});
    relay.stop();
    let parked = sql.one("select count(*) from walrelay.dead_letter");
    let parked: usize = parked.parse().expect("a number");
    assert_eq!(parked > 0, limit != Limit::NoPoison, "{limit:?}: {parked}");
    let sent = events + usize::from(limit != Limit::NoPoison) - parked;
    assert_eq!(rig.broker.count(&rig.topic()), sent, "each once, or parked");
    let mut times = raw::append_times(rig.broker, &rig.topic());
    rig.broker.delete_topic(&rig.topic());
    times.remove(POISON);
    let first = times.values().flatten().copied().min().unwrap_or_default();
    for at in times.values_mut().flatten() {
        *at -= first;
    }
    times
}

/// The longest that an event waits beyond its twin in the other run, in seconds.
fn waits_longer(with: &Times, without: &Times) -> f64 {
    let pairs = with.iter().filter_map(|(key, own)| {
        let other = without.get(key)?;
        own.iter().zip(other).map(|(own, other)| own - other).max()
    });
    seconds(pairs.max().unwrap_or_default())
}

/// The longest time without any event.
fn longest_pause(times: &Times) -> f64 {
    let mut all: Vec<i64> = times.values().flatten().copied().collect();
    all.sort_unstable();
    let pauses = all.windows(2).map(|pair| pair[1] - pair[0]);
    seconds(pauses.max().unwrap_or_default())
}

fn seconds(millis: i64) -> f64 {
    let millis = u64::try_from(millis).unwrap_or_default();
    Duration::from_millis(millis).as_secs_f64()
}
