//! Progress, lag and latency, as counters and gauges.
//!
//! # Invariants
//! - Time is an argument; a value that ages (the oldest undelivered event) is computed when it is
//!   read, so that it stays true while nothing moves.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus::core::Collector;
use prometheus::local::LocalHistogram;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, TextEncoder,
};

use super::health::{Health, approximate};
use crate::dead_letter::Reason;
use crate::error::Class;
use crate::lsn::{Lsn, PgTimestamp};

/// Metric names, each with its unit last.
pub mod name {
    /// Counter; label `topic`.
    pub const DELIVERED_EVENTS: &str = "walrelay_delivered_events_total";
    /// Counter, key and value bytes; label `topic`.
    pub const DELIVERED_BYTES: &str = "walrelay_delivered_bytes_total";
    /// Histogram, from the commit's time on the server to the delivery report here.
    pub const DELIVERY_LATENCY: &str = "walrelay_delivery_latency_seconds";
    /// Gauges: given to the producer, not yet delivered.
    pub const IN_FLIGHT_EVENTS: &str = "walrelay_in_flight_events";
    pub const IN_FLIGHT_BYTES: &str = "walrelay_in_flight_bytes";
    /// Gauges: taken from the stream, not yet given to the producer.
    pub const HELD_EVENTS: &str = "walrelay_held_events";
    pub const HELD_BYTES: &str = "walrelay_held_bytes";
    /// Gauge, 0 when everything is delivered, NaN when that is not known.
    pub const OLDEST_UNDELIVERED_AGE: &str = "walrelay_oldest_undelivered_age_seconds";
    /// Gauges on the slot; NaN when not known.
    pub const CONFIRMED_FLUSH_LAG: &str = "walrelay_confirmed_flush_lag_bytes";
    pub const RETAINED_WAL: &str = "walrelay_slot_retained_wal_bytes";
    /// NaN also where `max_slot_wal_keep_size` sets no limit.
    pub const SAFE_WAL_SIZE: &str = "walrelay_slot_safe_wal_size_bytes";
    /// Gauge, 1 for the status that the slot has, else 0; label `status`.
    pub const WAL_STATUS: &str = "walrelay_slot_wal_status";
    /// Gauge, what the whole cluster writes; NaN when not known.
    pub const WAL_RATE: &str = "walrelay_wal_bytes_per_second";
    /// Gauges on what may hold `restart_lsn` back: 0 where there is none, NaN when not known.
    pub const OLDEST_TRANSACTION_AGE: &str = "walrelay_oldest_transaction_age_seconds";
    pub const PREPARED_TRANSACTION_AGE: &str = "walrelay_prepared_transaction_age_seconds";
    /// Gauge, 1 while the server holds the stream back for a standby that nobody runs; NaN when
    /// not known.
    pub const WAITS_FOR_STANDBY: &str = "walrelay_waits_for_standby";
    /// Gauge, 1 when every condition holds, else 0.
    pub const READY: &str = "walrelay_ready";
    /// Gauge, 1 where the condition holds, 0 where it does not, NaN when not known; label
    /// `condition`.
    pub const CONDITION: &str = "walrelay_condition";
    /// Gauge, events that wait for a topic that is not there; label `topic`, only while they do,
    /// and of at most 20 topics.
    pub const TOPIC_WAITING: &str = "walrelay_topic_waiting_events";
    /// Gauge; NaN when not known.
    pub const BROKERS_UP: &str = "walrelay_brokers_up";
    /// Gauge, the slowest broker's; label `quantile`.
    pub const BROKER_RTT: &str = "walrelay_broker_rtt_seconds";
    /// Gauge, 1 for the state that holds, else 0; label `state`.
    pub const LEADER_STATE: &str = "walrelay_leader_state";
    /// Counter, events that were parked; label `reason`.
    pub const PARKED_EVENTS: &str = "walrelay_parked_events_total";
    /// Gauges: keys that are parked, and of how many of them a retry is under way.
    pub const PARKED_KEYS: &str = "walrelay_parked_keys";
    pub const RETRIED_KEYS: &str = "walrelay_retried_keys";
    /// Gauge, topics whose events are held because too many keys would have been parked.
    pub const TRIPPED_TOPICS: &str = "walrelay_tripped_topics";
    /// Counter, dead letters that were delivered.
    pub const RETRIED_EVENTS: &str = "walrelay_retried_events_total";
    /// Counter, events that came again and were found in their topic.
    pub const PASSED_OVER_EVENTS: &str = "walrelay_passed_over_events_total";
    /// Counter; label `peer`.
    pub const RECONNECTS: &str = "walrelay_reconnects_total";
    /// Counter; labels `peer`, `class`.
    pub const ERRORS: &str = "walrelay_errors_total";
}

/// 0.5 ms is a good commit-to-delivered time; ten minutes is an outage.
const LATENCY_BUCKETS: [f64; 17] = [
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 5.0, 15.0,
    60.0, 180.0, 600.0,
];

/// The counters and gauges of one relay.
pub struct Progress {
    registry: Registry,
    delivered_events: IntCounterVec,
    delivered_bytes: IntCounterVec,
    latency: Histogram,
    in_flight_events: IntGauge,
    in_flight_bytes: IntGauge,
    held_events: IntGauge,
    held_bytes: IntGauge,
    leader_state: IntGaugeVec,
    reconnects: IntCounterVec,
    errors: IntCounterVec,
    letters: Letters,
    health: HealthGauges,
    state: Mutex<State>,
}

/// Of what cannot be published, and of what need not be.
struct Letters {
    parked: IntCounterVec,
    keys: IntGauge,
    retried_keys: IntGauge,
    tripped: IntGauge,
    retried: IntCounter,
    passed_over: IntCounter,
}

impl Letters {
    fn new(registry: &Registry) -> Self {
        let gauge = |name, help| register(registry, IntGauge::new(name, help));
        let counter = |name, help| register(registry, IntCounter::new(name, help));
        let opts = Opts::new(name::PARKED_EVENTS, "Events parked.");
        let parked = register(registry, IntCounterVec::new(opts, &["reason"]));
        for reason in Reason::ALL {
            parked.with_label_values(&[reason.as_str()]);
        }
        Letters {
            parked,
            keys: gauge(name::PARKED_KEYS, "Keys that are parked."),
            retried_keys: gauge(name::RETRIED_KEYS, "Parked keys that are being retried."),
            tripped: gauge(name::TRIPPED_TOPICS, "Topics that are tripped."),
            retried: counter(name::RETRIED_EVENTS, "Dead letters delivered."),
            passed_over: counter(name::PASSED_OVER_EVENTS, "Events found in their topic."),
        }
    }
}

struct State {
    /// Counters by topic: a batch costs one look-up, and no allocation once its topic is known.
    topics: HashMap<String, (IntCounter, IntCounter)>,
    delivered_events: u64,
    latency: LocalHistogram,
    gauges: Gauges,
    /// When the live line was last made, and how many events had been delivered then.
    live_mark: Option<(SystemTime, u64)>,
}

/// What the loop knows; the loop hands it over when it changed, at most a few times a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Given to the producer, not yet delivered.
    pub in_flight: Amount,
    /// Taken from the stream, not yet given to the producer.
    pub held: Amount,
    /// Commit time of the oldest event that is taken and not delivered.
    pub oldest_undelivered: Option<PgTimestamp>,
    /// The end of the server's WAL, as the server last told.
    pub wal_end: Lsn,
    /// The position last reported as flushed.
    pub confirmed_flush: Lsn,
    pub leader: Leader,
    pub parked_keys: usize,
    pub retried_keys: usize,
    pub tripped_topics: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub events: usize,
    pub bytes: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leader {
    /// Not connected, or connected and not yet told.
    #[default]
    Unknown,
    Standby,
    Leading,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    Postgres,
    Kafka,
}

impl Leader {
    const ALL: [Leader; 3] = [Leader::Unknown, Leader::Standby, Leader::Leading];

    pub(super) fn label(self) -> &'static str {
        match self {
            Leader::Unknown => "unknown",
            Leader::Standby => "standby",
            Leader::Leading => "leading",
        }
    }
}

impl Peer {
    const ALL: [Peer; 2] = [Peer::Postgres, Peer::Kafka];

    fn label(self) -> &'static str {
        match self {
            Peer::Postgres => "postgres",
            Peer::Kafka => "kafka",
        }
    }
}

const CLASSES: [Class; 5] = [
    Class::Transient,
    Class::Poison,
    Class::Definite,
    Class::Fatal,
    Class::Consequence,
];

fn class_label(class: Class) -> &'static str {
    match class {
        Class::Transient => "transient",
        Class::Poison => "poison",
        Class::Definite => "definite",
        Class::Fatal => "fatal",
        Class::Consequence => "consequence",
    }
}

impl Default for Progress {
    fn default() -> Self {
        Progress::new()
    }
}

impl Progress {
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new();
        let latency = register(
            &registry,
            Histogram::with_opts(
                HistogramOpts::new(name::DELIVERY_LATENCY, "From commit to delivery.")
                    .buckets(LATENCY_BUCKETS.to_vec()),
            ),
        );
        let gauge = |name, help| register(&registry, IntGauge::new(name, help));
        let counters = |name, help, labels: &[&str]| {
            register(&registry, IntCounterVec::new(Opts::new(name, help), labels))
        };
        let reconnects = counters(name::RECONNECTS, "Connections made again.", &["peer"]);
        let errors = counters(name::ERRORS, "Errors by class.", &["peer", "class"]);
        // A series that starts at its first error has no increase to be alerted on.
        for peer in Peer::ALL {
            reconnects.with_label_values(&[peer.label()]);
            for class in CLASSES {
                errors.with_label_values(&[peer.label(), class_label(class)]);
            }
        }
        Progress {
            delivered_events: counters(name::DELIVERED_EVENTS, "Events delivered.", &["topic"]),
            delivered_bytes: counters(
                name::DELIVERED_BYTES,
                "Key and value bytes delivered.",
                &["topic"],
            ),
            in_flight_events: gauge(name::IN_FLIGHT_EVENTS, "Events sent, not yet delivered."),
            in_flight_bytes: gauge(name::IN_FLIGHT_BYTES, "Bytes sent, not yet delivered."),
            held_events: gauge(name::HELD_EVENTS, "Events taken, not yet sent."),
            held_bytes: gauge(name::HELD_BYTES, "Bytes taken, not yet sent."),
            leader_state: register(
                &registry,
                IntGaugeVec::new(
                    Opts::new(name::LEADER_STATE, "1 for the state that holds."),
                    &["state"],
                ),
            ),
            reconnects,
            errors,
            letters: Letters::new(&registry),
            health: HealthGauges::new(&registry),
            state: Mutex::new(State {
                topics: HashMap::new(),
                delivered_events: 0,
                latency: latency.local(),
                gauges: Gauges::default(),
                live_mark: None,
            }),
            latency,
            registry,
        }
    }

    /// A batch of one topic was delivered. Once a batch, not once an event.
    pub fn delivered(&self, topic: &str, events: u64, bytes: u64) {
        let mut state = self.lock();
        state.delivered_events += events;
        if let Some((event_counter, byte_counter)) = state.topics.get(topic) {
            event_counter.inc_by(events);
            byte_counter.inc_by(bytes);
            return;
        }
        let counters = (
            self.delivered_events.with_label_values(&[topic]),
            self.delivered_bytes.with_label_values(&[topic]),
        );
        counters.0.inc_by(events);
        counters.1.inc_by(bytes);
        state.topics.insert(topic.to_owned(), counters);
    }

    /// So many events of one commit were delivered at `now`. The two clocks are the server's and
    /// ours: where ours is behind, the latency is taken as zero.
    pub fn latency(&self, committed: PgTimestamp, now: SystemTime, events: u64) {
        let seconds = age(committed, now).as_secs_f64();
        let state = self.lock();
        for _ in 0..events {
            state.latency.observe(seconds);
        }
    }

    pub fn gauges(&self, gauges: Gauges) {
        self.lock().gauges = gauges;
    }

    /// A connection was made again after it was lost.
    pub fn reconnected(&self, peer: Peer) {
        self.reconnects.with_label_values(&[peer.label()]).inc();
    }

    pub fn failed(&self, peer: Peer, class: Class) {
        self.errors
            .with_label_values(&[peer.label(), class_label(class)])
            .inc();
    }

    /// An event was parked.
    pub fn parked(&self, reason: Reason) {
        self.letters
            .parked
            .with_label_values(&[reason.as_str()])
            .inc();
    }

    /// Dead letters were delivered, and events passed over that are in their topic already.
    pub fn spared(&self, retried: u64, passed_over: u64) {
        self.letters.retried.inc_by(retried);
        self.letters.passed_over.inc_by(passed_over);
    }

    #[must_use]
    pub fn delivered_so_far(&self) -> u64 {
        self.lock().delivered_events
    }

    /// Everything, in Prometheus's text format, as true as `health` is.
    #[must_use]
    pub fn gather(&self, health: &Health) -> String {
        let gauges = {
            let state = self.lock();
            state.latency.flush();
            state.gauges
        };
        self.in_flight_events.set(signed(gauges.in_flight.events));
        self.in_flight_bytes.set(signed(gauges.in_flight.bytes));
        self.held_events.set(signed(gauges.held.events));
        self.held_bytes.set(signed(gauges.held.bytes));
        self.letters.keys.set(signed(gauges.parked_keys));
        self.letters.retried_keys.set(signed(gauges.retried_keys));
        self.letters.tripped.set(signed(gauges.tripped_topics));
        for leader in Leader::ALL {
            self.leader_state
                .with_label_values(&[leader.label()])
                .set(i64::from(leader.label() == health.leader));
        }
        self.health.set(health);
        TextEncoder::new()
            .encode_to_string(&self.registry.gather())
            .expect("every metric here has a name and a value")
    }

    /// The line for a terminal. The rate is that since the line was last made: call it once a
    /// second.
    #[must_use]
    pub fn live_line(&self, now: SystemTime) -> String {
        let mut state = self.lock();
        let total = state.delivered_events;
        let (since, before) = state
            .live_mark
            .replace((now, total))
            .unwrap_or((now, total));
        let gauges = state.gauges;
        drop(state);
        let elapsed = now.duration_since(since).unwrap_or_default().as_millis();
        let events = u128::from(total - before);
        let rate = (events * 1000).checked_div(elapsed).unwrap_or(0);
        let mut line = format!(
            "{}  {} events/s  lag {:.1} s, {}  in flight {}",
            gauges.leader.label(),
            thousands(rate),
            gauges.oldest_age(now).as_secs_f64(),
            bytes_for_people(gauges.lag_bytes()),
            thousands(gauges.in_flight.events as u128),
        );
        if gauges.held.events > 0 {
            let _ = write!(line, "  held {}", thousands(gauges.held.events as u128));
        }
        let _ = write!(line, "  delivered {}", thousands(u128::from(total)));
        line
    }

    /// Commit-to-delivered times so far: how many, and their sum.
    #[must_use]
    pub fn latency_so_far(&self) -> (u64, Duration) {
        self.lock().latency.flush();
        let seconds = self.latency.get_sample_sum().max(0.0);
        (
            self.latency.get_sample_count(),
            Duration::try_from_secs_f64(seconds).unwrap_or_default(),
        )
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Counters hold no invariant that a panic could have broken.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What health knows, as gauges.
struct HealthGauges {
    oldest_undelivered_age: Gauge,
    confirmed_flush_lag: Gauge,
    retained_wal: Gauge,
    safe_wal_size: Gauge,
    wal_status: GaugeVec,
    wal_rate: Gauge,
    oldest_transaction_age: Gauge,
    prepared_transaction_age: Gauge,
    waits_for_standby: Gauge,
    ready: Gauge,
    condition: GaugeVec,
    topic_waiting: GaugeVec,
    brokers_up: Gauge,
    broker_rtt: GaugeVec,
}

/// What `pg_replication_slots.wal_status` can be.
const WAL_STATUSES: [&str; 4] = ["reserved", "extended", "unreserved", "lost"];

impl HealthGauges {
    fn new(registry: &Registry) -> Self {
        let gauge = |name, help| register(registry, Gauge::new(name, help));
        let by =
            |name, help, label| register(registry, GaugeVec::new(Opts::new(name, help), &[label]));
        HealthGauges {
            oldest_undelivered_age: gauge(
                name::OLDEST_UNDELIVERED_AGE,
                "Age of the oldest undelivered event, 0 when all is delivered.",
            ),
            confirmed_flush_lag: gauge(
                name::CONFIRMED_FLUSH_LAG,
                "From the slot's confirmed_flush_lsn to the end of the WAL.",
            ),
            retained_wal: gauge(
                name::RETAINED_WAL,
                "WAL that the slot keeps on the server's disk: from restart_lsn to the end.",
            ),
            safe_wal_size: gauge(
                name::SAFE_WAL_SIZE,
                "WAL that may still be written before the slot is lost; NaN without a limit.",
            ),
            wal_status: by(name::WAL_STATUS, "1 for the status of the slot.", "status"),
            wal_rate: gauge(name::WAL_RATE, "WAL that the whole cluster writes."),
            oldest_transaction_age: gauge(
                name::OLDEST_TRANSACTION_AGE,
                "Age of the oldest running transaction that has written; it may hold restart_lsn back.",
            ),
            prepared_transaction_age: gauge(
                name::PREPARED_TRANSACTION_AGE,
                "Age of the oldest prepared transaction; it holds restart_lsn back.",
            ),
            waits_for_standby: gauge(
                name::WAITS_FOR_STANDBY,
                "1 while the stream stands still for a slot of synchronized_standby_slots.",
            ),
            ready: gauge(name::READY, "1 when every condition of being ready holds."),
            condition: by(
                name::CONDITION,
                "1 where the condition holds, 0 where not, NaN where unknown.",
                "condition",
            ),
            topic_waiting: by(
                name::TOPIC_WAITING,
                "Events that wait for a topic that does not exist or cannot be used.",
                "topic",
            ),
            brokers_up: gauge(name::BROKERS_UP, "Kafka brokers that are connected."),
            broker_rtt: by(
                name::BROKER_RTT,
                "The slowest Kafka broker's round trip.",
                "quantile",
            ),
        }
    }

    fn set(&self, health: &Health) {
        let numbers = &health.progress;
        let or_nan = |value: Option<f64>| value.unwrap_or(f64::NAN);
        let count = |value: Option<u64>| or_nan(value.map(approximate));
        let flag = |value: Option<bool>| or_nan(value.map(|v| f64::from(u8::from(v))));
        self.oldest_undelivered_age
            .set(or_nan(numbers.oldest_undelivered_age_seconds));
        self.confirmed_flush_lag.set(count(numbers.lag_bytes));
        self.retained_wal.set(count(numbers.retained_bytes));
        let safe = numbers.safe_wal_size.map(|size| {
            let bytes = approximate(size.unsigned_abs());
            if size < 0 { -bytes } else { bytes }
        });
        self.safe_wal_size.set(or_nan(safe));
        for status in WAL_STATUSES {
            let has = numbers.wal_status.as_deref().map(|known| known == status);
            self.wal_status.with_label_values(&[status]).set(flag(has));
        }
        self.wal_rate.set(or_nan(numbers.wal_bytes_per_second));
        self.oldest_transaction_age
            .set(or_nan(numbers.oldest_transaction_age_seconds));
        self.prepared_transaction_age
            .set(or_nan(numbers.prepared_transaction_age_seconds));
        let waits = numbers
            .sample_age_seconds
            .map(|_| numbers.waits_for_standbys.is_some());
        self.waits_for_standby.set(flag(waits));
        self.ready.set(flag(Some(health.ready)));
        for condition in &health.conditions {
            self.condition
                .with_label_values(&[condition.name.as_str()])
                .set(flag(condition.ok));
        }
        self.topic_waiting.reset();
        for waiting in &numbers.waiting {
            self.topic_waiting
                .with_label_values(&[waiting.topic.as_str()])
                .set(approximate(
                    u64::try_from(waiting.events).unwrap_or(u64::MAX),
                ));
        }
        self.brokers_up.set(count(numbers.brokers_up));
        for (quantile, rtt) in [
            ("0.5", numbers.broker_rtt_p50_seconds),
            ("0.99", numbers.broker_rtt_p99_seconds),
        ] {
            self.broker_rtt
                .with_label_values(&[quantile])
                .set(or_nan(rtt));
        }
    }
}

impl Gauges {
    /// Age of the oldest undelivered event; zero when there is none.
    #[must_use]
    pub fn oldest_age(&self, now: SystemTime) -> Duration {
        self.oldest_undelivered
            .map_or(Duration::ZERO, |committed| age(committed, now))
    }

    #[must_use]
    pub fn lag_bytes(&self) -> u64 {
        if self.confirmed_flush == Lsn::INVALID {
            return 0;
        }
        self.wal_end.0.saturating_sub(self.confirmed_flush.0)
    }
}

fn register<M: Collector + Clone + 'static>(registry: &Registry, made: prometheus::Result<M>) -> M {
    let metric = made.expect("the names and labels above are legal");
    registry
        .register(Box::new(metric.clone()))
        .expect("each name above is used once");
    metric
}

fn age(committed: PgTimestamp, now: SystemTime) -> Duration {
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let committed = u64::try_from(committed.unix_micros()).unwrap_or(0);
    now.saturating_sub(Duration::from_micros(committed))
}

/// Prometheus's integers are signed; ours that do not fit are beyond any machine.
fn signed(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

/// `1234567` as `1,234,567`.
fn thousands(number: u128) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn bytes_for_people(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    for (unit, size) in UNITS {
        if bytes >= size {
            return format!("{}.{} {unit}", bytes / size, bytes % size * 10 / size);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::super::health::{Board, Identity, Now, Waiting};
    use super::*;

    fn at(millis: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(1_700_000_000_000 + millis)
    }

    fn committed(millis: i64) -> PgTimestamp {
        PgTimestamp::from_unix_micros((1_700_000_000_000 + millis) * 1000)
    }

    /// Of a relay that knows nothing yet.
    fn unknown() -> Health {
        let identity = Identity {
            slot: "s".into(),
            publication: "p".into(),
            table: "t".into(),
            process_id: "id".into(),
        };
        let now = Now {
            wall: at(0),
            boot: Duration::ZERO,
        };
        Board::new(identity, now).report(0, now)
    }

    #[test]
    fn what_is_not_known_is_no_number() {
        let text = Progress::new().gather(&unknown());
        for line in [
            "walrelay_oldest_undelivered_age_seconds NaN\n",
            "walrelay_confirmed_flush_lag_bytes NaN\n",
            "walrelay_slot_wal_status{status=\"lost\"} NaN\n",
            "walrelay_condition{condition=\"slot\"} NaN\n",
            "walrelay_ready 0\n",
            "walrelay_leader_state{state=\"unknown\"} 1\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }

    #[test]
    fn a_topic_is_named_only_while_events_wait_for_it() {
        let progress = Progress::new();
        let mut health = unknown();
        health.progress.waiting = vec![Waiting {
            topic: "orders".to_owned(),
            unanswered: None,
            denied: None,
            events: 3,
            first_event_id: "id".to_owned(),
        }];
        let line = "walrelay_topic_waiting_events{topic=\"orders\"} 3\n";
        assert!(progress.gather(&health).contains(line));
        assert!(!progress.gather(&unknown()).contains("orders"));
    }

    #[test]
    fn health_is_shown_as_numbers() {
        let mut health = unknown();
        health.ready = true;
        health.leader = "leading".to_owned();
        health.conditions[0].ok = Some(true);
        health.progress.lag_bytes = Some(5 << 32);
        health.progress.safe_wal_size = Some(-7);
        health.progress.wal_status = Some("extended".to_owned());
        health.progress.oldest_undelivered_age_seconds = Some(2.5);
        health.progress.broker_rtt_p99_seconds = Some(0.25);
        let text = Progress::new().gather(&health);
        for line in [
            "walrelay_oldest_undelivered_age_seconds 2.5\n",
            "walrelay_confirmed_flush_lag_bytes 21474836480\n",
            "walrelay_slot_safe_wal_size_bytes -7\n",
            "walrelay_slot_wal_status{status=\"extended\"} 1\n",
            "walrelay_slot_wal_status{status=\"reserved\"} 0\n",
            "walrelay_condition{condition=\"loop\"} 1\n",
            "walrelay_broker_rtt_seconds{quantile=\"0.99\"} 0.25\n",
            "walrelay_leader_state{state=\"leading\"} 1\n",
            "walrelay_leader_state{state=\"standby\"} 0\n",
            "walrelay_ready 1\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }

    #[test]
    fn events_are_counted_by_topic() {
        let progress = Progress::new();
        progress.delivered("a", 2, 20);
        progress.delivered("b", 1, 5);
        progress.delivered("a", 3, 30);
        let text = progress.gather(&unknown());
        assert!(text.contains("walrelay_delivered_events_total{topic=\"a\"} 5\n"));
        assert!(text.contains("walrelay_delivered_bytes_total{topic=\"a\"} 50\n"));
        assert!(text.contains("walrelay_delivered_events_total{topic=\"b\"} 1\n"));
    }

    #[test]
    fn latency_is_counted_an_event_and_never_negative() {
        let progress = Progress::new();
        progress.latency(committed(0), at(3), 4);
        progress.latency(committed(10), at(3), 1);
        let (count, sum) = progress.latency_so_far();
        assert_eq!((count, sum.as_millis()), (5, 12));
        let text = progress.gather(&unknown());
        assert!(text.contains("walrelay_delivery_latency_seconds_bucket{le=\"0.004\"} 5\n"));
        assert!(text.contains("walrelay_delivery_latency_seconds_bucket{le=\"0.002\"} 1\n"));
    }

    #[test]
    fn errors_and_reconnects_are_counted_by_peer() {
        let progress = Progress::new();
        progress.failed(Peer::Kafka, Class::Transient);
        progress.reconnected(Peer::Postgres);
        let text = progress.gather(&unknown());
        assert!(
            text.contains("walrelay_errors_total{class=\"transient\",peer=\"kafka\"} 1\n"),
            "{text}"
        );
        assert!(text.contains("walrelay_reconnects_total{peer=\"postgres\"} 1\n"));
    }

    #[test]
    fn the_live_line_shows_the_rate_since_the_last_one() {
        let progress = Progress::new();
        let _ = progress.live_line(at(0));
        progress.delivered("a", 2_500, 1);
        progress.gauges(Gauges {
            in_flight: Amount {
                events: 1_234,
                bytes: 9,
            },
            oldest_undelivered: Some(committed(200)),
            wal_end: Lsn(3 << 20),
            confirmed_flush: Lsn(1 << 20),
            leader: Leader::Leading,
            ..Gauges::default()
        });
        assert_eq!(
            progress.live_line(at(500)),
            "leading  5,000 events/s  lag 0.3 s, 2.0 MiB  in flight 1,234  delivered 2,500"
        );
        assert!(progress.live_line(at(1_500)).contains("  0 events/s"));
    }

    #[test]
    fn a_lag_before_the_first_confirmation_is_not_made_up() {
        let gauges = Gauges {
            wal_end: Lsn(99),
            ..Gauges::default()
        };
        assert_eq!(gauges.lag_bytes(), 0);
    }
}
