//! Peak resident memory where it is hardest: one huge transaction, a broker that is away.

use std::time::Duration;

use serde_json::json;

use crate::args::Args;
use crate::load::{self, Plan, Times, Writer};
use crate::report::{Goal, Report, median};
use crate::rig::{MINUTE, Rig, Servers, Socket};
use crate::say;
use crate::usage::megabytes;

pub fn measure(servers: &Servers, args: &Args, report: &mut Report) {
    let goal = Goal::at_most(96.0, Some(48.0));
    let events = args.pick(500_000, 50_000);
    let peaks: Vec<f64> = (0..args.rounds)
        .map(|_| one_transaction(servers, events))
        .collect();
    say(&format!(
        "one transaction of {events} rows: peaks {peaks:.0?} MB"
    ));
    let title = format!("peak RSS, one transaction of {events} rows");
    report.row(
        title,
        median(peaks.iter().copied()),
        "MB",
        Some(goal),
        String::new(),
    );
    report.detail(
        "memory-transaction",
        json!({ "events": events, "peak_rss_mb": peaks }),
    );

    let away = Duration::from_secs(args.pick(120, 25));
    let peaks: Vec<f64> = (0..args.rounds.min(args.pick(3, 1)))
        .map(|_| broker_away(servers, away))
        .collect();
    say(&format!("broker away for {away:?}: peaks {peaks:.0?} MB"));
    report.row(
        format!("peak RSS, broker away for {away:?} at 2,000/s"),
        median(peaks.iter().copied()),
        "MB",
        Some(goal),
        "0 lost, 0 duplicates afterwards".to_owned(),
    );
    let seconds = away.as_secs();
    report.detail(
        "memory-broker-away",
        json!({ "seconds": seconds, "peak_rss_mb": peaks }),
    );
}

fn one_transaction(servers: &Servers, events: usize) -> f64 {
    let rig = Rig::new(servers, Socket::Tcp);
    let mut relay = rig.relay_streaming();
    // Makes the pool of payloads and a few rows.
    load::backlog(&rig.db, 200, 100);
    rig.db.connect().run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         select gen_random_uuid(), 't', 'order-' || g % 20011, 'placed',
                (select payload from pool where i = g % 1000)
         from generate_series(1, {events}) g"
    ));
    rig.broker
        .wait_count_while(&rig.topic(), events + 200, 10 * MINUTE, || {});
    let peak = megabytes(relay.memory().peak);
    relay.stop();
    assert_eq!(rig.broker.count(&rig.topic()), events + 200, "each once");
    rig.broker.delete_topic(&rig.topic());
    peak
}

fn broker_away(servers: &Servers, away: Duration) -> f64 {
    let rig = Rig::new(servers, Socket::Tcp);
    let mut relay = rig.relay_streaming();
    let around = Duration::from_secs(5);
    let plan = Plan {
        a_second: 2_000,
        span: away + 2 * around,
        sessions: 16,
        key: 'k',
    };
    let writer = Writer::start(&rig.db, plan, Times::new(plan.events()));
    std::thread::sleep(around);
    rig.broker.freeze();
    std::thread::sleep(away);
    rig.broker.thaw();
    let written = writer.wait();
    rig.broker
        .wait_count_while(&rig.topic(), written.events, 5 * MINUTE, || {});
    let peak = megabytes(relay.memory().peak);
    relay.stop();
    let delivered = rig.broker.count(&rig.topic());
    assert_eq!(
        delivered, written.events,
        "each event is delivered, and once"
    );
    rig.broker.delete_topic(&rig.topic());
    peak
}
