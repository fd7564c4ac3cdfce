//! How long after a death until events flow again: the relay's, with and without another that stands
//! by, and Postgres's. And what the look into the topics costs in it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use serde_json::json;
use walrelay::config;
use walrelay::io::kafka::{Settings, read_tail};
use walrelay::lsn::PgTimestamp;
use walrelay::tail::TailAnswer;

use crate::args::Args;
use crate::kafka::Broker;
use crate::latency::{Spread, wait_seen};
use crate::load::{Plan, Times, Writer};
use crate::postgres::{Sql, Stop, runtime};
use crate::raw::Watcher;
use crate::relay::Relay;
use crate::report::{Goal, Report};
use crate::rig::{MINUTE, PARTITIONS, Rig, Servers, Socket};
use crate::say;

/// Events a second meanwhile.
const RATE: u32 = 500;
/// Between two deaths the relay delivers so many.
const BETWEEN: usize = 300;

pub fn measure(servers: &Servers, args: &Args, report: &mut Report) {
    let kills = args.pick(50, 5);
    for (standby, what, must) in [
        (Standby::None, "cold", 2_000.0),
        (Standby::Warm, "with a warm standby", 1_000.0),
    ] {
        let name = format!("kill -9 → first new record, {what}, p95 of {kills}");
        let (spread, repeated) = after_kills(servers, kills, standby);
        row(report, &name, spread, must, repeated);
    }
    let restarts = args.pick(20, 3);
    let name = format!("Postgres accepts → first new record, p95 of {restarts}");
    let (spread, repeated) = after_postgres(servers, restarts);
    row(report, &name, spread, 1_000.0, repeated);
    for events in [0, 5_000, args.pick(200_000, 20_000)] {
        let name = format!("read of the tail, {PARTITIONS} partitions, {events} records, p95");
        let spread = tails(&servers.broker, events, args.pick(20, 5));
        let must = if events <= 5_000 { 500.0 } else { 5_000.0 };
        row(report, &name, spread, must, 0);
    }
}

fn row(report: &mut Report, name: &str, spread: Spread, must: f64, repeated: usize) {
    let Spread { p50, p95, max, .. } = spread;
    let beside = format!("p50 {p50:.0} ms, max {max:.0} ms, {repeated} duplicates");
    say(&format!("{name}: {p95:.0} ms; {beside}"));
    let goal = Goal::at_most(must, None);
    report.row(name.to_owned(), p95, "ms", Some(goal), beside);
    report.detail(
        name,
        json!({ "spread": spread.json(), "duplicates": repeated }),
    );
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Standby {
    None,
    Warm,
}

/// Writers, and a consumer that sees probes; each probe's time begins when it is set off.
struct Under<'a> {
    rig: &'a Rig<'a>,
    probes: Arc<Times>,
    watcher: Watcher,
    writer: Writer,
}

impl<'a> Under<'a> {
    fn load(rig: &'a Rig<'a>, probes: usize, writes: Duration) -> Self {
        let times = Times::new(probes);
        let plan = Plan {
            a_second: RATE,
            span: writes,
            sessions: 4,
            key: 'w',
        };
        Under {
            rig,
            watcher: Watcher::of_topic(rig.broker, &rig.topic(), Arc::clone(&times)),
            probes: times,
            writer: Writer::start(&rig.db, plan, Times::new(plan.events())),
        }
    }

    fn wait_delivering(&self) {
        let goal = self.probes.others() + BETWEEN;
        let until = Instant::now() + MINUTE;
        while self.probes.others() < goal {
            assert!(Instant::now() < until, "nothing is delivered");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// How it went, and how many records came more than once.
    fn end(self, mut relay: Relay) -> (Spread, usize) {
        let _ = self.writer.stop();
        let spread = Spread::of(&self.probes.latencies());
        let repeated = end(self.rig, &mut relay);
        self.watcher.stop();
        (spread, repeated)
    }
}

/// Waits until all is delivered; how many records came more than once.
fn end(rig: &Rig<'_>, relay: &mut Relay) -> usize {
    let sql = rig.db.connect();
    let end = sql.one("select pg_current_wal_flush_lsn()");
    rig.wait_confirmed(&sql, &end, relay, || {});
    relay.stop();
    let events: usize = sql
        .one("select count(*) from outbox")
        .parse()
        .expect("a number");
    let records = rig.broker.count(&rig.topic());
    rig.broker.delete_topic(&rig.topic());
    records.checked_sub(events).expect("nothing is lost")
}

fn probe(sql: &Sql, n: usize) {
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k{n}', 'probe', '{{}}')"
    ));
}

fn standing_by(rig: &Rig<'_>) -> Relay {
    let mut relay = rig.relay();
    relay.wait_for_text("standing by", MINUTE);
    relay
}

fn after_kills(servers: &Servers, kills: usize, standby: Standby) -> (Spread, usize) {
    let rig = Rig::new(servers, Socket::Tcp);
    let mut relay = rig.relay_streaming();
    let mut next = (standby == Standby::Warm).then(|| standing_by(&rig));
    let under = Under::load(&rig, kills, 60 * MINUTE);
    let sql = rig.db.connect();
    for n in 0..kills {
        under.wait_delivering();
        under.probes.committed(n);
        relay.kill9();
        relay = next.take().unwrap_or_else(|| rig.relay());
        probe(&sql, n);
        wait_seen(&under.probes, n + 1);
        if standby == Standby::Warm {
            next = Some(standing_by(&rig));
        }
    }
    drop(next);
    under.end(relay)
}

/// The relay lives, the database comes back; nobody else writes, for writers die with it.
fn after_postgres(servers: &Servers, restarts: usize) -> (Spread, usize) {
    let rig = Rig::new(servers, Socket::Tcp);
    let mut relay = rig.relay_streaming();
    let probes = Times::new(restarts);
    let watcher = Watcher::of_topic(rig.broker, &rig.topic(), Arc::clone(&probes));
    for n in 0..restarts {
        let how = if n % 2 == 0 {
            Stop::Fast
        } else {
            Stop::Immediate
        };
        servers.cluster.stop(how);
        thread::scope(|scope| {
            scope.spawn(|| servers.cluster.up());
            let sql = accepted(&rig);
            probes.committed(n);
            probe(&sql, n);
        });
        wait_seen(&probes, n + 1);
    }
    let spread = Spread::of(&probes.latencies());
    let repeated = end(&rig, &mut relay);
    watcher.stop();
    (spread, repeated)
}

fn accepted(rig: &Rig<'_>) -> Sql {
    let until = Instant::now() + MINUTE;
    loop {
        if let Ok(sql) = Sql::try_connect(rig.db.cluster.port, &rig.db.name, "postgres") {
            return sql;
        }
        assert!(Instant::now() < until, "Postgres does not start");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A topic with so many events of this minute, read by one new client after the other.
fn tails(broker: &Broker, events: usize, rounds: usize) -> Spread {
    let topic = format!("tail-{}", crate::proc::unique());
    broker.create_topic(&topic, PARTITIONS);
    fill(broker, &topic, events);
    let kafka = config::Kafka {
        brokers: broker.bootstrap(),
        properties: Vec::new(),
        token_command: None,
        create_topics: None,
    };
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let since = i64::try_from(since.expect("after 1970").as_micros()).expect("small") - 60_000_000;
    let mut spans: Vec<Duration> = (0..rounds)
        .map(|_| {
            let settings = Settings::new(&kafka, "bench").expect("no mock broker to start");
            let from = Instant::now();
            let read = read_tail(&settings, &topic, PgTimestamp::from_unix_micros(since));
            let TailAnswer::Read { tail, complete } = runtime().block_on(read) else {
                panic!("the broker answers");
            };
            let span = from.elapsed();
            assert!(
                complete && tail.len() == events,
                "{} of {events}",
                tail.len()
            );
            span
        })
        .collect();
    spans.sort_unstable();
    broker.delete_topic(&topic);
    Spread::of(&spans)
}

fn fill(broker: &Broker, topic: &str, events: usize) {
    let producer: BaseProducer = ClientConfig::new()
        .set("bootstrap.servers", broker.bootstrap())
        .set("queue.buffering.max.messages", "1000000")
        .set("compression.codec", "lz4")
        .create()
        .expect("a producer");
    let payload = crate::load::payload(0);
    for n in 0..events {
        let id = format!("{n:08x}-0000-4000-8000-000000000000");
        let headers = OwnedHeaders::new().insert(Header {
            key: "event_id",
            value: Some(&id),
        });
        let record = BaseRecord::<str, str>::to(topic)
            .partition(i32::try_from(n % 12).expect("a remainder"))
            .payload(&payload)
            .headers(headers);
        let sent = producer.send(record);
        sent.map_err(|(error, _)| error).expect("there is room");
    }
    producer.flush(MINUTE).expect("the broker takes it");
}
