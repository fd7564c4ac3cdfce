//! Who leads: how fast another takes over, and what a leader that comes back may do.

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::check::{Verdict, check};
use crate::faults_kafka::times_said;
use crate::faults_postgres::more;
use crate::kafka::Broker;
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg, Sql, Stop};
use crate::proc::{eventually, eventually_says};
use crate::relay::Relay;
use crate::stage::{MINUTE, Stage};

fn streaming(relay: &mut Relay) {
    relay.wait_for_text("streaming from", MINUTE);
}

fn standing_by(relay: &mut Relay) {
    relay.wait_for_text("standing by", MINUTE);
}

/// Asks often enough to be exact to some milliseconds.
fn until_it_streams(relay: &Relay, since: Instant) -> Duration {
    loop {
        if times_said(relay, "streaming from") > 0 {
            return since.elapsed();
        }
        assert!(
            since.elapsed() < MINUTE,
            "nobody streams:\n{}",
            relay.said()
        );
        thread::sleep(Duration::from_millis(2));
    }
}

fn quantile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    let index = (times.len() * percent).div_ceil(100).max(1) - 1;
    times[index]
}

/// For whoever runs it by hand.
#[allow(clippy::print_stdout)]
fn tell(what: &str, times: &mut [Duration]) {
    println!(
        "{what}: {} trials, p50 {:?}, p99 {:?}, worst {:?}",
        times.len(),
        quantile(times, 50),
        quantile(times, 99),
        quantile(times, 100)
    );
}

// ---- a crash, a stop -----------------------------------------------------------------------

/// How long after the end of each leader the next one streams. Under load; nothing is lost.
fn takeovers(trials: usize, end: fn(&mut Relay)) -> (Vec<Duration>, usize) {
    let stage = Stage::shared(Pg::V18);
    stage.init();
    let mut leader = stage.run();
    streaming(&mut leader);
    let load = Load::start(&stage.db, &Plan::new(4, Shape::Mixed).a_second(400));
    let mut times = Vec::new();
    for _ in 0..trials {
        let mut standby = stage.run();
        standing_by(&mut standby);
        more(&load, 100);
        end(&mut leader);
        let (ended, wall) = (Instant::now(), std::time::SystemTime::now());
        times.push(until_it_streams(&standby, ended));
        phases(&standby, wall);
        leader = standby;
    }
    let verdict = verdict(&stage, load, &mut leader);
    verdict.assert_complete_and_ordered();
    (times, verdict.duplicates)
}

/// The load ends, everything arrives, and is judged.
fn verdict(stage: &Stage<'_>, load: Load, leader: &mut Relay) -> Verdict {
    let committed = load.stop();
    stage.wait_count("t", committed.len(), MINUTE);
    stage.wait_confirmed(MINUTE);
    leader.stop();
    check(&stage.broker.read_all(&stage.topic("t")), &committed)
}

/// What a takeover was made of, for whoever runs it by hand.
#[allow(clippy::print_stdout)]
fn phases(relay: &Relay, since: std::time::SystemTime) {
    for line in relay.lines() {
        let at = humantime::parse_rfc3339_weak(&line.text("timestamp")).expect("a time");
        if let Ok(after) = at.duration_since(since) {
            println!("  {after:?}: {}", line.text("message"));
        }
    }
}

/// A hang of this machine is no fault of the relay's: one in five may be late in the usual run.
#[test]
fn a_standby_streams_within_a_second_of_a_kill() {
    let (mut times, _) = takeovers(5, Relay::kill9);
    tell("takeover after a kill", &mut times);
    assert!(
        quantile(&mut times, 80) <= Duration::from_secs(1),
        "{times:?}"
    );
}

#[test]
#[ignore = "minutes: make soak"]
fn soak_takeover_after_a_kill_is_within_a_second_at_p99() {
    let (mut times, _) = takeovers(50, Relay::kill9);
    tell("takeover after a kill", &mut times);
    assert!(
        quantile(&mut times, 99) <= Duration::from_secs(1),
        "{times:?}"
    );
}

/// The process has ended when the clock starts; whoever waits for the lock has had it for a while.
fn term(relay: &mut Relay) {
    relay.signal(Signal::TERM);
    assert_eq!(relay.wait_exit(MINUTE), 0, "{}", relay.said());
}

#[test]
fn a_rolling_deploy_repeats_nothing_and_leaves_no_gap() {
    let gaps = |pg: Pg, trials: usize| {
        let stage = Stage::shared(pg);
        stage.init();
        let mut leader = stage.run();
        streaming(&mut leader);
        let load = Load::start(&stage.db, &Plan::new(4, Shape::Mixed).a_second(400));
        let mut times = Vec::new();
        for _ in 0..trials {
            let mut standby = stage.run();
            standing_by(&mut standby);
            more(&load, 100);
            leader.signal(Signal::TERM);
            streaming(&mut standby);
            assert_eq!(leader.wait_exit(MINUTE), 0, "{}", leader.said());
            times.push(between(&leader, "stopped", &standby, "streaming from"));
            leader = standby;
        }
        verdict(&stage, load, &mut leader).assert_exactly_once();
        times
    };
    let mut times = [gaps(Pg::V15, 3), gaps(Pg::V18, 3)].concat();
    tell("without a leader in a rolling deploy", &mut times);
    // What a machine under load adds to single ones is no fault of the relay's.
    assert!(
        quantile(&mut times, 50) <= Duration::from_millis(200),
        "{times:?}"
    );
}

/// By the clocks of the two logs, which are one.
fn between(one: &Relay, said: &str, other: &Relay, then: &str) -> Duration {
    let at = |relay: &Relay, text: &str| {
        let lines = relay.lines();
        let line = lines.iter().rev().find(|line| line.has(text));
        let time = line.expect("it was said").text("timestamp");
        humantime::parse_rfc3339_weak(&time).unwrap_or_else(|e| panic!("{time}: {e}"))
    };
    at(other, then)
        .duration_since(at(one, said))
        .unwrap_or_default()
}

// ---- who holds what ------------------------------------------------------------------------

#[test]
fn a_standby_says_behind_whom_it_stands() {
    let stage = Stage::shared(Pg::V17);
    let sql = stage.init();
    let mut leader = stage.run();
    streaming(&mut leader);
    let mut standby = stage.run();
    let line = standby.wait_for_text("standing by", MINUTE).text("message");
    let pid = sql.one(
        "select pid from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock' and granted
         and database = (select oid from pg_database where datname = current_database())",
    );
    for words in [
        &format!("pid {pid}"),
        "client 127.0.0.1",
        "connected since 20",
        "application_name walrelay",
    ] {
        assert!(line.contains(words), "{words}: {line}");
    }
    let status = stage.status(&["--http", "off"]);
    assert!(
        status.stdout.contains(&format!("pid {pid}")) && status.stdout.contains("connected for"),
        "{}",
        status.stdout
    );
    standby.stop();
    leader.stop();
}

/// Somebody reads the slot with what the registry calls the leader's lock in our hands.
#[test]
fn a_walsender_that_is_ours_and_leads_no_more_is_ended() {
    let stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    let mut first = stage.run();
    streaming(&mut first);
    // It hangs, its lock is taken from it, and its stream is kept: by a server whose time-out is long.
    let walsender = sql.one(&format!(
        "select active_pid from pg_replication_slots where slot_name = '{}'",
        stage.db.slot()
    ));
    first.freeze();
    sql.run(
        "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory'
         and mode = 'ExclusiveLock' and granted
         and database = (select oid from pg_database where datname = current_database())",
    );
    let mut second = stage.run();
    second.wait_for_text("leading: the lock is ours", MINUTE);
    let held = second.wait_for("who holds the slot", MINUTE, |line| {
        line.has("is held by pid") && !line.has("`run` waits")
    });
    let held = held.text("message");
    assert!(
        held.contains(&format!("pid {walsender}")) && held.contains(", for "),
        "{held}"
    );
    // The server cuts it after wal_sender_timeout, or the new leader does, whoever is first.
    streaming(&mut second);
    second.stop();
    first.kill9();
}

// ---- Kafka is away -------------------------------------------------------------------------

/// While Kafka is away there is no stream to hold: the lead stays where it is.
#[test]
fn the_lead_does_not_wander_while_kafka_is_away() {
    let broker = Broker::start();
    let mut stage = Stage::on(Cluster::shared(Pg::V18), &broker);
    stage.run_args = vec!["--stall-timeout".to_owned(), "3s".to_owned()];
    stage.init();
    let mut leader = stage.run();
    streaming(&mut leader);
    let mut standby = stage.run();
    standing_by(&mut standby);
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(200));
    more(&load, 100);
    stage.wait_count("t", 100, MINUTE);
    broker.freeze();
    more(&load, 200);
    leader.wait_for_text("closed", MINUTE);
    // Longer than any time-out after which a lead is given up.
    thread::sleep(Duration::from_secs(20));
    assert_eq!(times_said(&standby, "leading: the lock is ours"), 0);
    assert_eq!(times_said(&leader, "leading: the lock is ours"), 1);
    assert_eq!(times_said(&leader, "no longer leading"), 0);
    broker.thaw();
    let verdict = verdict(&stage, load, &mut leader);
    standby.stop();
    verdict.assert_exactly_once();
}

// ---- a primary and its standby -------------------------------------------------------------

struct Pair {
    primary: Cluster,
    standby: Cluster,
}

fn pair(pg: Pg, dbname: impl Fn(&Cluster)) -> Pair {
    let primary = Cluster::with(pg, &["wal_keep_size = '256MB'"]);
    dbname(&primary);
    let standby = Cluster::replica(&primary);
    let sql = primary.connect("postgres");
    eventually(MINUTE, "the standby follows", || {
        (sql.one("select active from pg_replication_slots where slot_name = 'sb'") == "t")
            .then_some(())
    });
    Pair { primary, standby }
}

fn set(cluster: &Cluster, setting: &str) {
    cluster.configure(&[setting]);
    cluster.reload();
}

/// A standby that is listed and dead stops the stream: `status`, health and metrics say which.
#[test]
fn a_dead_listed_standby_is_named() {
    let Pair { primary, standby } = pair(Pg::V18, |_| {});
    set(&primary, "synchronized_standby_slots = 'sb'");
    let mut stage = Stage::on(&primary, Broker::shared());
    let address = format!("127.0.0.1:{}", crate::proc::free_port());
    stage.run_args = vec!["--http".to_owned(), address.clone()];
    let sql = stage.init();
    let mut relay = stage.run();
    streaming(&mut relay);
    ins(&sql, "before");
    stage.wait_count("t", 1, MINUTE);
    standby.stop(Stop::Fast);
    ins(&sql, "held");
    relay.wait_for_text("the server holds the stream back", MINUTE);
    // Health says it too, and since when; it asks every ten seconds.
    eventually(MINUTE, "health names the standby", || {
        let status = stage.status(&["--http", &address, "--json"]);
        status
            .stdout
            .contains("nobody has followed it since")
            .then_some(())
    });
    let status = stage.status(&["--http", &address]);
    assert_eq!(status.code, 3, "{}", status.stdout);
    for words in ["WaitForStandbyConfirmation", "sb (nobody follows it)"] {
        let flat = status
            .stdout
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        assert!(flat.contains(words), "{words}: {}", status.stdout);
    }
    assert_eq!(stage.broker.count(&stage.topic("t")), 1);
    standby.up();
    stage.wait_count("t", 2, MINUTE);
    relay.stop();
}

fn ins(sql: &Sql, key: &str) {
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', '{key}', 'e', '{{}}')"
    ));
}

#[derive(Debug)]
struct Failover {
    lost: usize,
    duplicates: usize,
    phantoms: usize,
    rows: usize,
}

/// The primary dies under load and the standby is promoted: what Kafka has, against what the new
/// primary has.
fn failover(pg: Pg, listed: bool) -> Failover {
    let Pair { primary, standby } = pair(pg, |_| {});
    if listed {
        set(&primary, "synchronized_standby_slots = 'sb'");
    }
    let mut stage = Stage::on(&primary, Broker::shared());
    stage.init();
    stage.database_url = Some(format!(
        "postgresql://postgres@127.0.0.1:{},127.0.0.1:{}/{}?target_session_attrs=read-write",
        primary.port, standby.port, stage.db.name
    ));
    let mut relay = stage.run();
    streaming(&mut relay);
    let slot = stage.db.slot();
    let over_there = standby.connect("postgres");
    eventually(2 * MINUTE, "the slot is copied", || {
        let rows = over_there.rows(&format!(
            "select 1 from pg_replication_slots where slot_name = '{slot}'
             and (to_jsonb(pg_replication_slots)->>'synced')::bool and not temporary"
        ));
        (!rows.is_empty()).then_some(())
    });
    // Writers of their own, which do not come back to a server that is gone.
    let load = thread::spawn({
        let (port, dbname) = (primary.port, stage.db.name.clone());
        move || write_until_it_dies(port, &dbname)
    });
    stage.wait_count("t", 2_000, MINUTE);
    primary.kill9();
    load.join().expect("a writer ends with its server");
    over_there.run("select pg_promote()");
    let after = Sql::connect(standby.port, &stage.db.name, "postgres");
    eventually(MINUTE, "it is promoted", || {
        after.try_run("create table promoted (n int)").ok()
    });
    ins(&after, "after");
    let count = || after.one("select count(*) from outbox");
    let rows: usize = count().parse().expect("a number");
    let last = after.one("select event_id from outbox where aggregate_id = 'after'");
    eventually_says(
        MINUTE,
        || relay.said(),
        || {
            let records = stage.broker.read_all(&stage.topic("t"));
            records.iter().any(|r| r.event_id() == last).then_some(())
        },
    );
    relay.kill9();
    let records = stage.broker.read_all(&stage.topic("t"));
    let mut ids: Vec<String> = records.iter().map(crate::kafka::Rec::event_id).collect();
    let all = ids.len();
    ids.sort();
    ids.dedup();
    let there: std::collections::HashSet<String> = after
        .rows("select event_id from outbox")
        .into_iter()
        .filter_map(|row| row.into_iter().next().flatten())
        .collect();
    let sent: std::collections::HashSet<String> = ids.iter().cloned().collect();
    Failover {
        lost: there.difference(&sent).count(),
        duplicates: all - ids.len(),
        phantoms: sent.difference(&there).count(),
        rows,
    }
}

fn write_until_it_dies(port: u16, dbname: &str) {
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let dbname = dbname.to_owned();
            thread::spawn(move || {
                let sql = Sql::connect(port, &dbname, "postgres");
                let insert = format!(
                    "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
                     select gen_random_uuid(), 't', 'w{writer}', 'e', '{{}}' from generate_series(1, 5)"
                );
                while sql.try_run(&insert).is_ok() {
                    thread::sleep(Duration::from_millis(10));
                }
            })
        })
        .collect();
    for writer in writers {
        writer.join().expect("it only writes");
    }
}

#[test]
fn a_promoted_standby_that_was_waited_for_has_every_event() {
    let found = failover(Pg::V18, true);
    tell_failover("18, listed", &found);
    assert_eq!((found.lost, found.phantoms), (0, 0), "{found:?}");
}

#[test]
fn a_promoted_standby_that_nobody_waited_for_loses_none_of_its_rows() {
    let found = failover(Pg::V17, false);
    tell_failover("17, not listed", &found);
    assert_eq!(found.lost, 0, "{found:?}");
}

#[allow(clippy::print_stdout)]
fn tell_failover(what: &str, found: &Failover) {
    println!("failover, {what}: {found:?}");
}
