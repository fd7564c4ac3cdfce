//! Two instances: who leads, and what becomes of one that is killed or hangs.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::check::check;
use crate::faults_kafka::times_said;
use crate::faults_postgres::{ends_exactly_once, more};
use crate::kafka::Broker;
use crate::load::{Load, Plan, Shape};
use crate::postgres::{Cluster, Pg, Sql, Stop};
use crate::proc::eventually;
use crate::relay::{Relay, run_to_end};
use crate::stage::{MINUTE, Stage};

/// What a relay may have given to its Kafka client.
const WINDOW: usize = 10_000;
/// After this without a word from a leader a standby ends its session.
const WAL_SENDER_TIMEOUT: Duration = Duration::from_secs(15);

fn leading(relay: &mut Relay, within: Duration) {
    relay.wait_for_text("leading: the lock is ours", within);
}

fn standing_by(relay: &mut Relay) {
    relay.wait_for_text("standing by", MINUTE);
}

fn has_said(relay: &Relay, text: &str) -> bool {
    relay.lines().iter().any(|line| line.has(text))
}

/// README: the relay is killed.
#[test]
fn a_standby_takes_over_at_once_after_a_stop_or_a_kill() {
    let stage = Stage::shared(Pg::V15);
    stage.init();
    let mut leader = stage.run();
    leading(&mut leader, MINUTE);
    let mut standby = stage.run();
    standing_by(&mut standby);
    let load = Load::start(&stage.db, &Plan::new(4, Shape::Mixed).a_second(400));
    stage.wait_count("t", 400, MINUTE);
    assert!(!has_said(&standby, "leading"), "two lead at once");

    // Told to stop, the leader leaves a position behind: nothing comes twice.
    leader.stop();
    let asked = Instant::now();
    standby.wait_for_text("streaming from", Duration::from_secs(10));
    let after_stop = asked.elapsed();
    let (mut leader, mut standby) = (standby, stage.run());
    standing_by(&mut standby);
    more(&load, 400);
    let seen = stage.broker.read_all(&stage.topic("t"));
    let mut ids: Vec<String> = seen.iter().map(crate::kafka::Rec::event_id).collect();
    ids.sort();
    let all = ids.len();
    ids.dedup();
    assert_eq!(ids.len(), all, "a hand-over repeated events");

    leader.kill9();
    let killed = Instant::now();
    standby.wait_for_text("streaming from", Duration::from_secs(10));
    let after_kill = killed.elapsed();
    more(&load, 400);
    let committed = load.stop();
    stage.wait_count("t", committed.len(), MINUTE);
    stage.wait_confirmed(MINUTE);
    standby.stop();
    check(&stage.broker.read_all(&stage.topic("t")), &committed).assert_complete_and_ordered();
    // "About a second", with what a busy machine adds.
    let bound = Duration::from_secs(4);
    assert!(
        after_stop < bound && after_kill < bound,
        "{after_stop:?} {after_kill:?}"
    );
}

/// Waits until the leader has told the server that it has read as far as this.
fn has_read(stage: &Stage<'_>, lsn: &str) {
    let sql = stage.db.connect();
    eventually(MINUTE, "the leader's queue fills", || {
        let rows = sql.rows(&format!(
            "select r.write_lsn >= '{lsn}' from pg_stat_replication r
             join pg_replication_slots s on s.active_pid = r.pid
             where s.slot_name = '{}'",
            stage.db.slot()
        ));
        (rows.first()?.first()?.as_deref() == Some("t")).then_some(())
    });
}

#[test]
fn a_leader_that_wakes_from_a_hang_adds_late_copies_and_nothing_else() {
    let cluster = Cluster::shared(Pg::V18);
    let broker = Broker::start();
    let stage = Stage::on(cluster, &broker);
    let sql = stage.init();
    let mut leader = stage.run();
    leading(&mut leader, MINUTE);
    let mut standby = stage.run();
    standing_by(&mut standby);
    let first = Load::start(&stage.db, &Plan::new(2, Shape::Single).transactions(100));
    let mut committed = first.finish();
    stage.wait_count("t", committed.len(), MINUTE);

    // The leader's queue fills, then both are frozen, and the broker comes back first.
    broker.freeze();
    committed
        .merge(Load::start(&stage.db, &Plan::new(2, Shape::Rows(100)).transactions(48)).finish());
    let nearly_full = sql.one("select pg_current_wal_lsn()");
    committed
        .merge(Load::start(&stage.db, &Plan::new(2, Shape::Rows(100)).transactions(50)).finish());
    has_read(&stage, &nearly_full);
    leader.freeze();
    broker.thaw();
    let hangs_since = Instant::now();
    leading(&mut standby, 3 * WAL_SENDER_TIMEOUT);
    let taken_over = hangs_since.elapsed();
    stage.wait_count("t", committed.len(), MINUTE);
    stage.wait_confirmed(MINUTE);

    leader.thaw();
    leader.wait_for_text("did not run", MINUTE);
    standing_by(&mut leader);
    let last = Load::start(&stage.db, &Plan::new(2, Shape::Single).transactions(200));
    committed.merge(last.finish());
    stage.wait_confirmed(MINUTE);
    standby.stop();
    // Whatever it may still have sent has been sent: it leads again, and ends cleanly.
    leading(&mut leader, MINUTE);
    leader.stop();
    let verdict = check(&stage.broker.read_all(&stage.topic("t")), &committed);
    verdict.assert_complete_and_ordered();
    assert!(
        verdict.duplicates <= WINDOW,
        "{} copies",
        verdict.duplicates
    );
    let bound = WAL_SENDER_TIMEOUT + Duration::from_secs(5);
    assert!(taken_over <= bound, "taken over after {taken_over:?}");
}

#[test]
fn a_restarted_postgres_is_left_to_the_leader_that_it_had() {
    let cluster = Cluster::start(Pg::V15);
    let stage = Stage::on(&cluster, Broker::shared());
    stage.init();
    let mut leader = stage.run();
    leading(&mut leader, MINUTE);
    let mut standby = stage.run();
    standing_by(&mut standby);
    let load = Load::start(&stage.db, &Plan::new(4, Shape::Mixed).a_second(400));
    for end in [Stop::Fast, Stop::Immediate, Stop::Fast] {
        more(&load, 300);
        cluster.restart(end);
        more(&load, 100);
        stage.wait_count("t", load.committed(), MINUTE);
    }
    leader.assert_alive();
    standby.assert_alive();
    assert!(!has_said(&standby, "leading"), "the standby knows less");
    ends_exactly_once(&stage, load, &mut leader);
    standby.stop();
}

/// Postgres 15 re-sends what the other has delivered; what he left behind at his stop tells it.
#[test]
fn a_leader_of_old_goes_on_where_the_other_stopped() {
    let cluster = Cluster::start(Pg::V15);
    let stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    let ins = |sql: &Sql| {
        sql.run(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (gen_random_uuid(), 't', 'k', 'e', '{}')",
        );
    };
    let mut first = stage.run();
    leading(&mut first, MINUTE);
    ins(&sql);
    stage.wait_count("t", 1, MINUTE);
    let mut second = stage.run();
    standing_by(&mut second);
    // Whoever comes first takes the lock; a server that has just started is left to the first.
    let led = |relay: &Relay| times_said(relay, "leading: the lock is ours");
    while led(&second) == 0 {
        let before = led(&first);
        sql.run(
            "select pg_terminate_backend(pid) from pg_locks
             where locktype = 'advisory' and mode = 'ExclusiveLock' and granted
               and database = (select oid from pg_database where datname = current_database())",
        );
        eventually(MINUTE, "somebody leads", || {
            (led(&first) + led(&second) > before).then_some(())
        });
    }
    standing_by(&mut first);
    for n in 2..22 {
        ins(&sql);
        stage.wait_count("t", n, MINUTE);
    }
    second.stop();
    drop(sql);
    cluster.restart(Stop::Fast);
    ins(&stage.db.connect());
    stage.wait_confirmed(MINUTE);
    first.stop();
    assert_eq!(stage.broker.count(&stage.topic("t")), 22);
}

/// SIGTERM; the exit code within so much time.
fn stops_within(relay: &mut Relay, bound: Duration) {
    relay.signal(Signal::TERM);
    assert_eq!(relay.wait_exit(bound), 0, "{}", relay.said());
}

#[test]
fn sigterm_ends_in_time_whoever_is_away() {
    let cluster = Cluster::start(Pg::V15);
    let broker = Broker::start();
    let mut stage = Stage::on(&cluster, &broker);
    stage.run_args = vec!["--shutdown-timeout".to_owned(), "3s".to_owned()];
    stage.init();
    let bound = Duration::from_secs(12);

    // Kafka hangs: what is on its way cannot be delivered.
    let mut relay = stage.run();
    let load = Load::start(&stage.db, &Plan::new(2, Shape::Single).a_second(200));
    stage.wait_count("t", 200, MINUTE);
    broker.freeze();
    more(&load, 200);
    stops_within(&mut relay, bound);
    broker.thaw();

    // Postgres is away.
    let mut relay = stage.run();
    more(&load, 200);
    stage.wait_count("t", load.committed(), MINUTE);
    cluster.stop(Stop::Fast);
    relay.wait_for_text("no longer leading", MINUTE);
    stops_within(&mut relay, bound);

    // Both are, from the start.
    broker.kill9();
    let mut relay = stage.run();
    relay.wait_for_text("waiting for the database", MINUTE);
    stops_within(&mut relay, bound);
    cluster.up();
    broker.up();

    let mut relay = stage.run();
    more(&load, 200);
    let committed = load.stop();
    stage.wait_count("t", committed.len(), MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    check(&broker.read_all(&stage.topic("t")), &committed).assert_complete_and_ordered();
}

#[test]
fn s10_a_second_relay_with_another_slot_is_refused() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let mut relay = stage.run();
    relay.wait_for_text("streaming from", MINUTE);
    let (url, slot) = (stage.db.url(), stage.db.slot());
    let brokers = stage.broker.bootstrap();
    let other = format!("{slot}_2");
    let args = [
        "run",
        "--database-url",
        &url,
        "--slot",
        &other,
        "--brokers",
        &brokers,
    ];
    let refused = || {
        let ended = run_to_end(&args, &[], MINUTE).expect_code(3);
        for words in ["already relayed through slot", &slot] {
            assert!(ended.stderr.contains(words), "{}", ended.stderr);
        }
        let last = ended.stderr.lines().last().unwrap_or_default().to_owned();
        assert!(last.starts_with("remedy: "), "{last}");
    };
    refused();
    sql.run(&format!(
        "select pg_create_logical_replication_slot('{other}', 'pgoutput')"
    ));
    refused();
    relay.stop();
}
