//! A million parked events: what the next leader holds of them, how long it takes it to learn them,
//! and what a retry of all of them needs.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::args::Args;
use crate::load;
use crate::relay::{Relay, run_to_end};
use crate::report::{Goal, Report, median};
use crate::rig::{MINUTE, Rig, Servers, Socket};
use crate::say;
use crate::usage::{count, megabytes};

const EVENTS_A_KEY: usize = 10;

#[derive(Clone, Copy)]
struct Round {
    /// From the start of the process to the stream, nothing parked.
    start_empty: f64,
    start: f64,
    rss_empty: f64,
    rss: f64,
    peak_start: f64,
    peak_retry: f64,
    retried_a_second: f64,
}

pub fn measure(servers: &Servers, args: &Args, report: &mut Report) {
    let events = args.pick(1_000_000, 100_000);
    let rounds: Vec<Round> = (0..args.rounds.min(args.pick(3, 1)))
        .map(|_| one(servers, events))
        .collect();
    let of = |pick: fn(&Round) -> f64| median(rounds.iter().map(pick));
    let keys = events / EVENTS_A_KEY;
    let goal = Goal::at_most(96.0, Some(48.0));
    report.row(
        format!("peak RSS at the start, {events} events of {keys} keys parked"),
        of(|r| r.peak_start),
        "MB",
        Some(goal),
        format!(
            "then {:.0} MB; {:.0} MB where nothing is parked",
            of(|r| r.rss),
            of(|r| r.rss_empty)
        ),
    );
    report.row(
        "… peak RSS while all of them are retried".to_owned(),
        of(|r| r.peak_retry),
        "MB",
        Some(goal),
        format!("{:.0} events/s", of(|r| r.retried_a_second)),
    );
    report.row(
        "… start to stream".to_owned(),
        of(|r| r.start),
        "s",
        None,
        format!("{:.2} s where nothing is parked", of(|r| r.start_empty)),
    );
    let each: Vec<_> = rounds
        .iter()
        .map(|r| {
            json!({
                "start_s": r.start,
                "start_empty_s": r.start_empty,
                "rss_mb": r.rss,
                "rss_empty_mb": r.rss_empty,
                "peak_start_mb": r.peak_start,
                "peak_retry_mb": r.peak_retry,
                "retried_per_second": r.retried_a_second,
            })
        })
        .collect();
    report.detail("parked", json!({ "events": events, "rounds": each }));
}

fn one(servers: &Servers, events: usize) -> Round {
    let rig = Rig::new(servers, Socket::Tcp);
    // Makes the pool of payloads, and a position that has passed.
    load::backlog(&rig.db, 200, 100);
    let sql = rig.db.connect();
    let end = load::end_of_log(&sql);
    let mut relay = rig.relay();
    rig.wait_confirmed(&sql, &end, &mut relay, || {});
    relay.stop();
    let (mut relay, start_empty) = streaming(&rig);
    let rss_empty = settled(&relay);
    relay.stop();
    fill(&rig, events);
    let (mut relay, start) = streaming(&rig);
    let rss = settled(&relay);
    let peak_start = megabytes(relay.memory().peak);
    let begun = Instant::now();
    let (url, slot) = (rig.url(), rig.db.slot());
    let all = ["dead-letters", "retry", "--all"];
    let place = ["--database-url", &url, "--slot", &slot];
    run_to_end(&[&all[..], &place].concat(), &[], 2 * MINUTE).expect_code(0);
    rig.broker
        .wait_count_while(&rig.topic(), events + 200, 20 * MINUTE, || {});
    let until = Instant::now() + 5 * MINUTE;
    let left = "select exists (select from walrelay.dead_letter where status = 'parked')";
    while sql.one(left) == "t" {
        assert!(Instant::now() < until, "not all of them are settled");
        thread::sleep(Duration::from_millis(20));
    }
    let span = begun.elapsed();
    let peak_retry = megabytes(relay.memory().peak);
    relay.stop();
    assert_eq!(rig.broker.count(&rig.topic()), events + 200, "each once");
    rig.broker.delete_topic(&rig.topic());
    let round = Round {
        start_empty: start_empty.as_secs_f64(),
        start: start.as_secs_f64(),
        rss_empty,
        rss,
        peak_start,
        peak_retry,
        retried_a_second: count(events) / span.as_secs_f64(),
    };
    say(&format!(
        "{events} parked: start {:.2} s ({:.2} with none), RSS {:.0} MB ({:.0} with none, peak {:.0}); retried at {:.0}/s, peak {:.0} MB",
        round.start,
        round.start_empty,
        round.rss,
        round.rss_empty,
        round.peak_start,
        round.retried_a_second,
        round.peak_retry
    ));
    round
}

fn streaming(rig: &Rig<'_>) -> (Relay, Duration) {
    let begun = Instant::now();
    let relay = rig.relay_streaming();
    (relay, begun.elapsed())
}

/// Resident memory some seconds after the start.
fn settled(relay: &Relay) -> f64 {
    thread::sleep(Duration::from_secs(3));
    megabytes(relay.memory().resident)
}

/// As if the relay had parked them, below everything that the slot will send.
fn fill(rig: &Rig<'_>, events: usize) {
    let keys = events / EVENTS_A_KEY;
    let sql = rig.db.connect();
    sql.run(&format!(
        "set synchronous_commit = off;
         insert into walrelay.dead_letter (table_oid, event_id, aggregate_type, aggregate_id,
           slot_generation, commit_lsn, ordinal, xid, commit_time, topic, key, value,
           header_names, header_values, timestamp_ms, reason)
         select r.table_oid, gen_random_uuid(), 't', 'order-' || n % {keys}, r.slot_generation,
           '0/9'::pg_lsn + n, 0, 1, now(), '{}', convert_to('order-' || n % {keys}, 'UTF8'),
           convert_to(p.payload::text, 'UTF8'), '{{event_type}}', array['placed'::bytea], 1, 'behind'
         from walrelay.relay r, generate_series(1, {events}) n
         join pool p on p.i = n % 1000",
        rig.topic()
    ));
    sql.run("checkpoint");
}
