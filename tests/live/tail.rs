//! The end of a topic, read for what it holds, on real brokers.

use std::collections::HashSet;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rdkafka::config::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use walrelay::config::{Kafka, Property};
use walrelay::io::kafka::{Settings, may_read, read_tail};
use walrelay::lsn::PgTimestamp;
use walrelay::tail::{Tail, TailAnswer};

use crate::kafka::{Broker, Rec};
use crate::kafka_secured::{PASSWORD, Secured};
use crate::postgres::runtime;
use crate::proc::{self, eventually};
use crate::stage::MINUTE;

/// The most that is read of one topic.
const BOUND: usize = 200_000;
const SECOND: i64 = 1_000;
const HOUR: i64 = 3_600 * SECOND;

fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    i64::try_from(now.expect("after 1970").as_millis()).expect("small")
}

fn settings(brokers: &str, properties: &[(&str, &str)]) -> Settings {
    let kafka = Kafka {
        brokers: brokers.to_owned(),
        properties: properties
            .iter()
            .map(|(name, value)| Property::plain(name, value))
            .collect(),
        token_command: None,
        create_topics: None,
    };
    Settings::new(&kafka, "tail").expect("nothing is wrong in itself")
}

fn answer(settings: &Settings, topic: &str, since_ms: i64) -> TailAnswer {
    let since = PgTimestamp::from_unix_micros(since_ms * 1_000);
    runtime().block_on(read_tail(settings, topic, since))
}

#[track_caller]
fn read(broker: &Broker, topic: &str, since_ms: i64) -> (Tail, bool) {
    match answer(&settings(&broker.bootstrap(), &[]), topic, since_ms) {
        TailAnswer::Read { tail, complete } => (tail, complete),
        other => panic!("{other:?}"),
    }
}

fn topic() -> String {
    format!("tail-{}-{}", std::process::id(), proc::unique())
}

fn id(n: usize) -> String {
    format!("{n:08x}-0000-4000-8000-000000000000")
}

/// Another producer.
struct Writer {
    producer: BaseProducer,
    topic: String,
}

impl Writer {
    fn new(broker: &Broker, topic: &str, more: &[(&str, &str)]) -> Writer {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", broker.bootstrap())
            .set("queue.buffering.max.messages", "1000000")
            .set("log_level", "2");
        for (name, value) in more {
            config.set(*name, *value);
        }
        Writer {
            producer: config.create().expect("a producer"),
            topic: topic.to_owned(),
        }
    }

    fn put(&self, partition: i32, at_ms: i64, headers: &[(&str, Option<&str>)]) {
        let mut own = OwnedHeaders::new();
        for (key, value) in headers {
            own = own.insert(Header { key, value: *value });
        }
        let record = BaseRecord::<str, str>::to(&self.topic)
            .partition(partition)
            .timestamp(at_ms)
            .payload("x")
            .headers(own);
        self.producer
            .send(record)
            .map_err(|(error, _)| error)
            .expect("there is room");
    }

    fn event(&self, partition: i32, at_ms: i64, event_id: &str) {
        self.put(partition, at_ms, &[("event_id", Some(event_id))]);
    }

    fn flush(&self) {
        self.producer.flush(MINUTE).expect("the broker takes it");
    }
}

#[test]
fn a_tail_holds_the_ids_of_its_time_and_nothing_else() {
    let broker = Broker::shared();
    let name = topic();
    broker.create_topic(&name, 12);
    // A partition that stays empty, one that has only what is old, ten with both.
    let (empty, complete) = read(broker, &name, now());
    assert!(empty.is_empty() && complete);
    let writer = Writer::new(broker, &name, &[]);
    let then = now();
    for n in 0..1_100 {
        writer.event(i32::try_from(n % 11).expect("small"), then - HOUR, &id(n));
    }
    writer.flush();
    for n in 2_000..3_000 {
        writer.event(i32::try_from(n % 10).expect("small"), then, &id(n));
    }
    writer.event(0, then - 5 * SECOND, "an id that is no UUID");
    writer.event(1, then, &id(7).to_uppercase().replace('-', "_"));
    writer.put(2, then, &[("event_id", None)]);
    writer.put(3, then, &[("trace", Some(&id(9)))]);
    writer.put(4, then, &[]);
    writer.flush();
    let (tail, complete) = read(broker, &name, then);
    assert!(complete);
    for n in 2_000..3_000 {
        assert!(tail.contains(id(n).as_bytes()), "{n}");
    }
    assert!(tail.contains(b"an id that is no UUID"));
    assert!(!tail.contains(id(9).as_bytes()), "another header");
    assert_eq!(tail.len(), 1_002, "nothing of an hour ago");
    let (all, _) = read(broker, &name, then - HOUR);
    assert_eq!(all.len(), 2_102);
    // A database whose clock is ahead of the world's.
    let (tail, _) = read(broker, &name, then + HOUR);
    assert_eq!(tail.len(), 1_002);
}

#[test]
fn where_brokers_stamp_records_their_time_is_what_counts() {
    let broker = Broker::shared();
    let name = topic();
    broker.create_topic_with(&name, 2, &[("message.timestamp.type", "LogAppendTime")]);
    let writer = Writer::new(broker, &name, &[]);
    let then = now();
    for n in 0..100 {
        writer.event(i32::try_from(n % 2).expect("small"), then - HOUR, &id(n));
    }
    writer.flush();
    assert_eq!(read(broker, &name, then).0.len(), 100);
    assert!(
        read(broker, &name, then + HOUR).0.len() == 100,
        "never later than now"
    );
}

#[test]
fn more_than_the_bound_is_cut_at_the_old_end() {
    let broker = Broker::shared();
    let name = topic();
    broker.create_topic(&name, 12);
    let writer = Writer::new(broker, &name, &[("compression.codec", "lz4")]);
    let then = now();
    // Eleven partitions of 1,000 and one that is far longer.
    let long = BOUND + 10_000;
    for n in 0..long {
        writer.event(0, then, &id(n));
        if n % 1_024 == 0 {
            writer.producer.poll(Duration::ZERO);
        }
    }
    for n in 0..11_000 {
        writer.event(
            i32::try_from(1 + n % 11).expect("small"),
            then,
            &id(long + n),
        );
    }
    writer.flush();
    let (tail, complete) = read(broker, &name, then);
    assert!(!complete);
    assert_eq!(tail.len(), BOUND);
    let oldest = long - (BOUND - 11_000);
    assert!(!tail.contains(id(oldest - 1).as_bytes()));
    for n in oldest..long + 11_000 {
        assert!(tail.contains(id(n).as_bytes()), "{n}");
    }
}

#[test]
fn only_what_consumers_can_see_counts_and_markers_do_not_hold_it_up() {
    let broker = Broker::shared();
    let name = topic();
    broker.create_topic(&name, 1);
    let others = Writer::new(broker, &name, &[("transactional.id", &name)]);
    others.producer.init_transactions(MINUTE).expect("answered");
    for (n, commits) in [(1, false), (2, true), (3, false), (4, true)] {
        others.producer.begin_transaction().expect("begun");
        others.event(0, now(), &id(n));
        others.flush();
        let end = if commits {
            others.producer.commit_transaction(MINUTE)
        } else {
            others.producer.abort_transaction(MINUTE)
        };
        end.expect("answered");
    }
    let (tail, complete) = read(broker, &name, now());
    let has: Vec<usize> = (0..6)
        .filter(|n| tail.contains(id(*n).as_bytes()))
        .collect();
    assert_eq!((has, complete), (vec![2, 4], true));
    // One that stays open ends what is visible.
    others.producer.begin_transaction().expect("begun");
    others.event(0, now(), &id(5));
    others.flush();
    assert_eq!(read(broker, &name, now()).0.len(), 2);
    others.producer.abort_transaction(MINUTE).expect("answered");
}

#[test]
fn records_that_retention_took_are_not_waited_for() {
    let broker = Broker::shared();
    let name = topic();
    let config = [
        ("cleanup.policy", "compact"),
        ("min.cleanable.dirty.ratio", "0.0"),
        ("segment.bytes", "1048576"),
        ("file.delete.delay.ms", "0"),
    ];
    broker.create_topic_with(&name, 1, &config);
    let writer = Writer::new(broker, &name, &[]);
    for n in 0..1_000 {
        writer.event(0, now(), &id(n));
    }
    writer.flush();
    broker.alter_topic(
        &name,
        &[
            ("cleanup.policy", "delete"),
            ("retention.bytes", "1"),
            ("segment.ms", "100"),
            ("segment.bytes", "1048576"),
        ],
    );
    // Rolls the segment that was written to.
    thread::sleep(Duration::from_millis(200));
    writer.event(0, now(), &id(1_000));
    writer.flush();
    assert!(read(broker, &name, now()).0.contains(id(1_000).as_bytes()));
}

#[test]
fn a_broker_that_is_away_is_said_to_be_at_once() {
    let nobody = settings(&format!("127.0.0.1:{}", proc::free_port()), &[]);
    let from = std::time::Instant::now();
    let TailAnswer::Failed(words) = answer(&nobody, "t", now()) else {
        panic!("nobody can have answered");
    };
    assert!(words.contains("refused"), "{words}");
    assert!(
        from.elapsed() < Duration::from_secs(8),
        "{:?}",
        from.elapsed()
    );
    let absent = settings(&Broker::shared().bootstrap(), &[]);
    let TailAnswer::Failed(words) = answer(&absent, "no-such-topic", now()) else {
        panic!("there is no such topic");
    };
    assert!(words.contains("Unknown topic"), "{words}");
}

// What a producer that is gone had put into the socket of a broker that did not move.
#[test]
fn late_writes_of_a_dead_producer_are_in_the_tail() {
    let broker = Broker::to_be_frozen();
    let name = topic();
    broker.create_topic(&name, 6);
    let idempotent = [("enable.idempotence", "true"), ("linger.ms", "1")];
    let writer = Writer::new(&broker, &name, &idempotent);
    let then = now();
    let mut next = 0;
    let mut some = |many: usize| {
        for n in next..next + many {
            writer.event(i32::try_from(n % 6).expect("small"), then, &id(n));
        }
        next += many;
    };
    some(600);
    writer.flush();
    broker.freeze();
    some(600);
    let _ = writer.producer.flush(Duration::from_millis(300));
    drop(writer);
    let settings = settings(&broker.bootstrap(), &[]);
    let reader = {
        let name = name.clone();
        thread::spawn(move || answer(&settings, &name, then))
    };
    // For the fault: the reader has begun, and is not answered.
    thread::sleep(Duration::from_millis(1_500));
    assert!(!reader.is_finished());
    broker.thaw();
    let TailAnswer::Read { tail, .. } = reader.join().expect("no panic") else {
        panic!("the broker answers");
    };
    // For the fault: whatever may still come.
    thread::sleep(Duration::from_secs(1));
    let there: HashSet<String> = broker.read_all(&name).iter().map(Rec::event_id).collect();
    let missed: Vec<_> = there
        .iter()
        .filter(|id| !tail.contains(id.as_bytes()))
        .collect();
    assert!(
        missed.is_empty(),
        "{} of {} came late",
        missed.len(),
        there.len()
    );
    assert!(
        there.len() > 600,
        "nothing was in the socket: {}",
        there.len()
    );
}

#[test]
fn a_topic_that_may_not_be_read_is_told_from_one_that_is_empty() {
    let secured = Secured::shared();
    let (closed, open) = (topic(), topic());
    for name in [&closed, &open] {
        secured.broker.create_topic(name, 3);
        secured.allow("scribe", &["Write", "Describe"], name);
    }
    secured.allow("scribe", &["Read"], &open);
    let scribe = [
        ("security.protocol", "sasl_plaintext"),
        ("sasl.mechanism", "SCRAM-SHA-256"),
        ("sasl.username", "scribe"),
        ("sasl.password", PASSWORD),
    ];
    let settings = settings(&secured.sasl_plaintext, &scribe);
    for (name, readable) in [(&closed, false), (&open, true)] {
        let writer = Writer::new(&secured.broker, name, &[]);
        writer.event(0, now(), &id(1));
        writer.flush();
        // A grant takes a moment to be known.
        eventually(MINUTE, format!("{name}: {readable}"), || {
            (runtime().block_on(may_read(&settings, name)) == Ok(readable)).then_some(())
        });
        match answer(&settings, name, now()) {
            TailAnswer::Read { tail, complete } => {
                assert!(readable && complete && tail.len() == 1, "{tail:?}");
            }
            TailAnswer::Denied => assert!(!readable),
            TailAnswer::Failed(words) => panic!("{name}: {words}"),
        }
    }
}
