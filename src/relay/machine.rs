//! The decider: events in, orders out, time as an argument. `service` runs it on real sockets, the
//! simulation on invented ones.
//!
//! ```text
//!            SeekLead           Open                      stop asked, 57P01, poison
//!  Seeking ───────────▶ Held ─────────▶ Opening ─▶ Open ───────────────────────────▶ draining
//!     ▲                  │ ▲                        │  │                               │
//!     │   lead lost      │ └── reopen ── Closed ◀────┘  │ Kafka refuses: Rebuild        ▼
//!     └──────────────────┘       (back-off, or Kafka    └───────────────▶ Rebuilding   Close, Store,
//!                                 answers again)                            │          Exit
//!                                                  everything undelivered is read again
//! ```
//!
//! # Invariants
//! - A record is handed over only while leading, to a topic that exists, inside the bounds.
//! - After a bad delivery report nothing is handed over until the producer was rebuilt; then all
//!   that is undelivered comes again from the server, in order.
//! - Nothing is reported that the ledger does not allow.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use super::Moment;
use super::feedback::Feedback;
use super::held::Held;
use super::ledger::{Ledger, OtherHistory};
use super::orders::{
    Close, Deliveries, Halted, Led, Notice, OpenError, Opened, Order, Probed, Purge, Seek,
    Settings, Standing, Stop, StreamEnd,
};
use super::outbox::{MissingColumn, Shape};
use super::topics::Topics;
use crate::error::{Class, Exit, Failure, kafka};
use crate::lsn::{Lsn, PgTimestamp};
use crate::record::{KafkaCode, Report, Ticket, TopicState};

/// How soon the first attempt to reconnect is made, and how long the pause may grow.
const RECONNECT_MIN: Duration = Duration::from_millis(100);
/// Below the time that a standby leaves the lock to the old leader after a restart of Postgres.
const RECONNECT_MAX: Duration = Duration::from_secs(2);
/// How often a standby asks for the lock.
const SEEK_INTERVAL: Duration = Duration::from_millis(250);
/// How often the leader proves that it leads.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// How long a server that shuts down is held up by what is on its way to Kafka.
const SERVER_SHUTDOWN_DRAIN: Duration = Duration::from_secs(5);
/// A reminder of a condition that lasts.
const REMIND_INTERVAL: Duration = Duration::from_secs(60);
/// For how long records carry their time of sending after the broker refused commit times.
const STAMPLESS: Duration = Duration::from_secs(60);
/// How often, while nothing is delivered, the cluster is asked whether the topics are still there.
const RECHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Pauses after a refusal: the first, and how long they grow.
const REST_MIN: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lead {
    Waiting { until: Moment },
    Seeking,
    Held,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reopen {
    At(Moment),
    WhenKafkaAnswers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Closed(Reopen),
    Opening,
    Open,
    Closing(Reopen),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Producer {
    Ready,
    Rebuilding { forget: bool },
    Resting { until: Moment },
}

#[derive(Clone, Debug)]
enum Why {
    /// SIGTERM or SIGINT.
    Asked,
    /// The server told the side session that it shuts down.
    ServerStops,
    Failed(Failure, Option<Halted>),
}

#[derive(Clone, Debug)]
struct Ending {
    why: Why,
    deadline: Moment,
    /// The stop was handed over to be stored.
    is_storing: bool,
}

/// An event that can never be published: everything before it is delivered first.
#[derive(Clone, Debug)]
pub(super) struct Poisoned {
    pub ticket: Ticket,
    pub event_id: String,
    pub lsn: Lsn,
    pub reason: String,
    pub remedy: String,
}

/// Events are sent one at a time up to `below`, to find the one that the broker refuses.
#[derive(Clone, Debug)]
pub(super) struct Solo {
    pub below: Ticket,
    /// The event on its way.
    pub sent: Option<(Ticket, String)>,
    /// The one that failed alone: how often, and with what.
    pub suspect: Option<(Ticket, KafkaCode, u32)>,
    /// The code that made us look.
    pub code: KafkaCode,
}

pub struct Machine {
    pub(super) settings: Settings,
    pub(super) ledger: Ledger,
    pub(super) topics: Topics,
    pub(super) held: Held,
    pub(super) feedback: Feedback,
    pub(super) orders: VecDeque<Order>,

    pub(super) lead: Lead,
    pub(super) stream: Stream,
    pub(super) producer: Producer,
    ending: Option<Ending>,

    // The row being read.
    pub(super) table_oid: u32,
    pub(super) shape: Option<Result<Shape, MissingColumn>>,
    pub(super) topic_name: String,
    pub(super) current_lsn: Lsn,
    pub(super) current_time: PgTimestamp,
    pub(super) in_transaction: bool,
    pub(super) foreign: HashSet<u32>,
    pub(super) forged_said: bool,

    // Poison.
    pub(super) poisoned: Option<Poisoned>,
    pub(super) solo: Option<Solo>,
    /// The event at which an earlier run halted, and its ticket once it is met.
    pub(super) halted: Option<Halted>,
    pub(super) gate: Option<Ticket>,
    pub(super) stampless_until: Moment,

    // Kafka's progress.
    cause: Option<KafkaCode>,
    progress_at: Moment,
    recheck_at: Moment,
    is_stalled: bool,
    rest: Duration,
    release_due: bool,
    deliveries: Deliveries,
    tally: Vec<(u64, u64)>,

    // This process's past.
    has_led: bool,
    generation: i64,
    is_writable: bool,
    identity: Option<(String, i32)>,
    received_ever: Lsn,
    /// The highest position reported on this slot, where it is known.
    highest_reported: Option<Lsn>,
    /// A stop that is still in the registry, with the position that it reports.
    stored_stop: Option<Lsn>,
    is_erasing: bool,
    reconnect: Duration,
    last_turn: Moment,
    probe_at: Moment,
    probe_sent_at: Option<Moment>,
    reminded_at: Option<Moment>,
    standby_said: bool,
}

impl Machine {
    #[must_use]
    pub fn new(settings: Settings, now: Moment) -> Self {
        Machine {
            settings,
            ledger: Ledger::default(),
            topics: Topics::default(),
            held: Held::default(),
            feedback: Feedback::new(now),
            orders: VecDeque::new(),
            lead: Lead::Waiting { until: now },
            stream: Stream::Closed(Reopen::At(now)),
            producer: Producer::Ready,
            ending: None,
            table_oid: 0,
            shape: None,
            topic_name: String::new(),
            current_lsn: Lsn::INVALID,
            current_time: PgTimestamp::default(),
            in_transaction: false,
            foreign: HashSet::new(),
            forged_said: false,
            poisoned: None,
            solo: None,
            halted: None,
            gate: None,
            stampless_until: Moment::ZERO,
            cause: None,
            progress_at: now,
            recheck_at: now,
            is_stalled: false,
            rest: REST_MIN,
            release_due: false,
            deliveries: Deliveries::default(),
            tally: Vec::new(),
            has_led: false,
            generation: 0,
            is_writable: true,
            identity: None,
            received_ever: Lsn::INVALID,
            highest_reported: None,
            stored_stop: None,
            is_erasing: false,
            reconnect: RECONNECT_MIN,
            last_turn: now,
            probe_at: now,
            probe_sent_at: None,
            reminded_at: None,
            standby_said: false,
        }
    }

    /// The next thing to do. Call until `None` after every event.
    pub fn poll_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// First thing in every turn of the loop: was this process away (stopped, suspended)?
    pub fn turned(&mut self, now: Moment) {
        let away = now.saturating_sub(self.last_turn);
        self.last_turn = now;
        if away > self.settings.wal_sender_timeout / 2 && self.lead == Lead::Held {
            self.say(Notice::WasAway(away));
            self.rebuild(Purge::Queue, false);
            self.lose_lead("this process did not run", now);
        }
    }

    /// Does the machine want the next WAL message? While not, nothing is read.
    #[must_use]
    pub fn wants_wal(&self) -> bool {
        let load = self.ledger.load();
        self.stream == Stream::Open
            && self.producer == Producer::Ready
            && self.ending.is_none()
            && self.poisoned.is_none()
            && self.gate.is_none()
            && load.in_flight_events < self.in_flight_events_max()
            && load.in_flight_bytes + load.held_bytes < self.settings.in_flight_bytes_max
            && self.ledger.span() < self.span_events_max()
    }

    fn in_flight_events_max(&self) -> usize {
        if self.solo.is_some() {
            1
        } else {
            self.settings.in_flight_events_max
        }
    }

    /// While Kafka says nothing about a topic, no more is held than could be in flight: an outage
    /// must not fill the memory that is meant for a missing topic.
    fn span_events_max(&self) -> usize {
        if !self.held.is_empty() && self.topics.is_unanswered() {
            self.settings.in_flight_events_max
        } else {
            self.settings.span_events_max
        }
    }

    // ---- leadership ----------------------------------------------------------------------

    pub fn on_seek(&mut self, seek: Seek, now: Moment) {
        match seek {
            Seek::Led(led) => self.take_lead(led, now),
            Seek::Elsewhere(why) => {
                if !self.standby_said {
                    self.standby_said = true;
                    self.say(Notice::Standby(why));
                }
                self.wait_for_lead(SEEK_INTERVAL, now);
            }
            Seek::Later(why) => {
                self.remind(Notice::LeadLost(why), now);
                let pause = self.next_reconnect();
                self.wait_for_lead(pause, now);
            }
            // What was right at the start and is not now may be put right again: the database
            // waits in its slot, nothing is lost by asking again.
            Seek::Refused(failure) if self.has_led && failure.exit == Exit::Refused => {
                self.remind(Notice::LeadLost(failure.to_string()), now);
                let pause = self.next_reconnect();
                self.wait_for_lead(pause, now);
            }
            Seek::Refused(failure) => self.orders.push_back(Order::Exit(Err(failure))),
        }
        self.advance(now);
    }

    fn wait_for_lead(&mut self, pause: Duration, now: Moment) {
        self.lead = Lead::Waiting { until: now + pause };
    }

    fn next_reconnect(&mut self) -> Duration {
        let pause = self.reconnect;
        self.reconnect = (self.reconnect * 2).min(RECONNECT_MAX);
        pause
    }

    fn take_lead(&mut self, led: Led, now: Moment) {
        self.lead = Lead::Held;
        self.standby_said = false;
        self.reminded_at = None;
        self.probe_sent_at = None;
        self.probe_at = now + PROBE_INTERVAL;
        self.table_oid = led.table_oid;
        let was_ours = led.previous_leader.as_deref() == Some(&self.settings.process_id);
        let is_same_slot = led.generation == self.generation;
        if self.has_led && !(was_ours && is_same_slot) {
            // Somebody else may have led in between: what we know may be what he has sent.
            self.rebuild(Purge::Everything, true);
        }
        if !self.has_led {
            if let Some(stop) = &led.stop {
                self.ledger = Ledger::resumed(stop.last, stop.open.clone());
            }
            self.halted = led.halted;
        }
        if !(self.has_led && was_ours && is_same_slot) {
            self.highest_reported = match (&led.stop, &led.previous_leader) {
                (Some(stop), _) => Some(stop.reported),
                (None, None) => led.consistent_point,
                (None, Some(_)) => None,
            };
            self.stored_stop = led.stop.map(|stop| stop.reported);
        }
        self.has_led = true;
        self.generation = led.generation;
        self.is_writable = led.is_writable;
        self.say(Notice::Leading);
        if matches!(self.stream, Stream::Closed(Reopen::At(_))) {
            self.stream = Stream::Closed(Reopen::At(now));
        }
    }

    fn lose_lead(&mut self, why: &str, now: Moment) {
        if self.lead != Lead::Held {
            return;
        }
        self.say(Notice::LeadLost(why.to_owned()));
        self.lead = Lead::Waiting { until: now };
        self.probe_sent_at = None;
        self.is_erasing = false;
        self.close(Close::Abort, Reopen::At(now));
    }

    /// The side session is gone, with the SQLSTATE that the server gave, if any.
    pub fn on_side_end(&mut self, sqlstate: &str, why: &str, now: Moment) {
        if self.lead != Lead::Held {
            return;
        }
        let is_storing = self.ending.as_ref().is_some_and(|e| e.is_storing);
        if is_storing {
            // What was to be stored cannot be: the next start is one after a crash.
            self.exit();
        } else if sqlstate == "57P01" && self.stream == Stream::Open && self.ending.is_none() {
            self.end(
                Why::ServerStops,
                format!("the database server ends this session ({why})"),
                SERVER_SHUTDOWN_DRAIN,
                now,
            );
        } else if self.ending.is_none() {
            self.lose_lead(why, now);
        }
        self.advance(now);
    }

    /// `stream_open` says whether the replication session is the one that was asked about.
    pub fn on_probe(&mut self, probed: &Probed, now: Moment) {
        self.probe_sent_at = None;
        self.probe_at = now + PROBE_INTERVAL;
        if !probed.has_lock {
            self.lose_lead("the side session has lost the lock", now);
        } else if !probed.has_slot && self.stream == Stream::Open {
            self.lose_lead("the slot is not held by our walsender", now);
        }
        self.advance(now);
    }

    fn pump_lead(&mut self, now: Moment) {
        match self.lead {
            Lead::Waiting { until } if now >= until && self.ending.is_none() => {
                self.lead = Lead::Seeking;
                self.orders.push_back(Order::SeekLead);
            }
            Lead::Held => {
                let silent = self
                    .probe_sent_at
                    .is_some_and(|at| now >= at + self.settings.wal_sender_timeout / 2);
                if silent {
                    self.lose_lead("the side session does not answer", now);
                } else if self.probe_sent_at.is_none() && now >= self.probe_at {
                    self.probe_sent_at = Some(now);
                    self.orders.push_back(Order::Probe);
                }
            }
            Lead::Waiting { .. } | Lead::Seeking => {}
        }
    }

    // ---- the replication session -----------------------------------------------------------

    pub fn on_opened(&mut self, opened: &Opened, now: Moment) {
        if self.stream != Stream::Opening {
            return;
        }
        self.stream = Stream::Open;
        // Before anything else: no position of an earlier session may be reported in this one.
        self.ledger.session_started(opened.confirmed_flush);
        self.feedback = Feedback::new(now);
        self.shape = None;
        self.current_lsn = Lsn::INVALID;
        self.in_transaction = false;
        self.progress_at = now;
        let identity = (opened.system_identifier.clone(), opened.timeline);
        let is_other = self
            .identity
            .as_ref()
            .is_some_and(|known| *known != identity);
        if is_other || opened.xlogpos < self.received_ever {
            let what = format!(
                "system {} timeline {} at {}, after {} was received",
                opened.system_identifier, opened.timeline, opened.xlogpos, self.received_ever
            );
            self.identity = Some(identity);
            self.other_history(what, now);
            self.advance(now);
            return;
        }
        self.identity = Some(identity);
        if let Some(highest) = self.highest_reported
            && opened.confirmed_flush > highest
        {
            let failure = moved_slot(opened.confirmed_flush, highest);
            self.fail(failure, None, now);
            self.advance(now);
            return;
        }
        self.highest_reported = self.highest_reported.max(Some(opened.confirmed_flush));
        self.say(Notice::Streaming {
            from: opened.confirmed_flush,
            again: self.ledger.span(),
        });
        self.advance(now);
    }

    pub fn on_open_failed(&mut self, error: OpenError, now: Moment) {
        if self.stream != Stream::Opening {
            return;
        }
        let pause = self.next_reconnect();
        self.stream = Stream::Closed(Reopen::At(now + pause));
        match error {
            OpenError::Later(why) => self.remind(Notice::StreamEnded(why), now),
            OpenError::Never(failure) => self.fail(failure, None, now),
        }
        self.advance(now);
    }

    pub fn on_stream_end(&mut self, end: StreamEnd, now: Moment) {
        let pause = self.next_reconnect();
        match self.stream {
            Stream::Closing(reopen) => self.stream = Stream::Closed(reopen),
            Stream::Open | Stream::Opening => {
                self.stream = Stream::Closed(Reopen::At(now + pause));
                match end {
                    StreamEnd::Lost(why) => self.say(Notice::StreamEnded(why)),
                    StreamEnd::Never(failure) => self.fail(failure, None, now),
                }
            }
            Stream::Closed(_) => {}
        }
        self.advance(now);
    }

    /// A warning that means that rows are being skipped: nothing more may be flushed.
    pub fn on_rows_skipped(&mut self, failure: Failure, now: Moment) {
        self.ledger.session_started(Lsn::INVALID);
        self.fail(failure, None, now);
        self.advance(now);
    }

    pub(super) fn close(&mut self, how: Close, reopen: Reopen) {
        match self.stream {
            Stream::Open => {
                self.orders.push_back(Order::Close(how));
                self.stream = Stream::Closing(reopen);
            }
            Stream::Opening => {
                self.orders.push_back(Order::Close(Close::Abort));
                self.stream = Stream::Closing(reopen);
            }
            Stream::Closing(_) => self.stream = Stream::Closing(reopen),
            Stream::Closed(_) => self.stream = Stream::Closed(reopen),
        }
    }

    fn pump_stream(&mut self, now: Moment) {
        if let Producer::Resting { until } = self.producer
            && now >= until
        {
            self.producer = Producer::Ready;
        }
        let may_open =
            self.lead == Lead::Held && self.producer == Producer::Ready && self.ending.is_none();
        if let Stream::Closed(Reopen::At(at)) = self.stream
            && may_open
            && now >= at
        {
            self.stream = Stream::Opening;
            self.orders.push_back(Order::Open);
        }
    }

    pub(super) fn other_history(&mut self, what: String, now: Moment) {
        self.say(Notice::OtherHistory(what));
        self.rebuild(Purge::Everything, true);
        self.close(Close::Abort, Reopen::At(now));
    }

    pub(super) fn on_ledger_error(&mut self, error: &OtherHistory, now: Moment) {
        self.other_history(error.to_string(), now);
    }

    // ---- Kafka -----------------------------------------------------------------------------

    pub fn on_reports(&mut self, reports: &[Report], now: Moment) {
        let mut has_failed = false;
        for report in reports {
            match report.result {
                Ok(()) => self.on_delivered(report.ticket, now),
                Err(code) => {
                    has_failed = true;
                    self.on_refused(report.ticket, code);
                }
            }
        }
        self.flush_tally();
        self.ledger.settle();
        if has_failed && self.producer == Producer::Ready {
            self.rebuild(Purge::Queue, false);
        }
        self.advance(now);
    }

    fn on_delivered(&mut self, ticket: Ticket, now: Moment) {
        let Some(delivered) = self.ledger.delivered(ticket) else {
            return;
        };
        self.progress_at = now;
        let topic = usize::from(delivered.topic);
        if self.tally.len() <= topic {
            self.tally.resize(topic + 1, (0, 0));
        }
        self.tally[topic].0 += 1;
        self.tally[topic].1 += u64::from(delivered.footprint);
        match self.deliveries.commit_times.last_mut() {
            Some(last) if last.0 == delivered.commit_time => last.1 += 1,
            Some(_) | None => self
                .deliveries
                .commit_times
                .push((delivered.commit_time, 1)),
        }
        if self.gate == Some(ticket) {
            self.gate = None;
            if let Some(halted) = self.halted.take() {
                self.say(Notice::HaltedEventPassed(halted.event_id));
                self.orders.push_back(Order::ClearHalted);
            }
        }
    }

    fn flush_tally(&mut self) {
        for (topic, (events, bytes)) in self.tally.iter_mut().enumerate() {
            if *events > 0 {
                let topic = u16::try_from(topic).expect("a topic's number");
                let name = self.topics.name(topic).to_owned();
                self.deliveries.by_topic.push((name, *events, *bytes));
                (*events, *bytes) = (0, 0);
            }
        }
    }

    fn on_refused(&mut self, ticket: Ticket, code: KafkaCode) {
        self.ledger.lost(ticket);
        let class = kafka::entry(code).class;
        let is_cause = class != Class::Consequence && code != kafka::FATAL;
        if is_cause && self.cause.is_none() {
            self.cause = Some(code);
        }
        if let Some(solo) = &mut self.solo
            && class == Class::Poison
            && solo.sent.as_ref().is_some_and(|sent| sent.0 == ticket)
        {
            solo.suspect = match solo.suspect {
                Some((known, _, times)) if known == ticket => Some((ticket, code, times + 1)),
                Some(_) | None => Some((ticket, code, 1)),
            };
        }
    }

    /// Stops handing over until the producer was built anew.
    pub(super) fn rebuild(&mut self, purge: Purge, forget: bool) {
        let forgets = match self.producer {
            Producer::Rebuilding { forget } => forget,
            Producer::Ready | Producer::Resting { .. } => false,
        };
        self.producer = Producer::Rebuilding {
            forget: forget || forgets,
        };
        self.orders.push_back(Order::Rebuild(purge));
    }

    /// The producer is new, every report of the old one has been seen.
    pub fn on_rebuilt(&mut self, now: Moment) {
        let Producer::Rebuilding { forget } = self.producer else {
            return;
        };
        self.held.clear();
        self.poisoned = None;
        self.gate = None;
        self.release_due = false;
        self.producer = Producer::Ready;
        let cause = self.cause.take();
        if forget {
            self.forget();
            self.close(Close::Abort, Reopen::At(now));
        } else {
            self.ledger.lose_all();
            let rest = self.classify_cause(cause, now);
            if self.ledger.lost_events() > 0 {
                if rest > Duration::ZERO {
                    self.producer = Producer::Resting { until: now + rest };
                }
                self.last_status(now);
                self.close(Close::Finish, Reopen::At(now + rest));
            }
        }
        self.advance(now);
    }

    fn forget(&mut self) {
        self.ledger.forget();
        self.solo = None;
        self.received_ever = Lsn::INVALID;
        self.highest_reported = None;
    }

    /// What to do about the refusal, and how long to rest before everything is read again.
    fn classify_cause(&mut self, cause: Option<KafkaCode>, now: Moment) -> Duration {
        let Some(code) = cause else {
            return Duration::ZERO;
        };
        let entry = kafka::entry(code);
        self.remind(
            Notice::ProducerRebuilt {
                cause: format!("{} ({})", entry.name, code.0),
                remedy: entry.remedy.to_owned(),
            },
            now,
        );
        match entry.class {
            Class::Poison => self.isolate(code, now),
            Class::Transient | Class::Fatal | Class::Definite | Class::Consequence => {
                self.topics.doubt_all();
                let rest = self.rest;
                self.rest = (self.rest * 2).min(REST_MAX);
                rest
            }
        }
    }

    fn isolate(&mut self, code: KafkaCode, now: Moment) -> Duration {
        const INVALID_TIMESTAMP: KafkaCode = KafkaCode(32);
        if code == INVALID_TIMESTAMP && now >= self.stampless_until {
            self.stampless_until = now + STAMPLESS;
            self.say(Notice::ClockSkew);
            return Duration::ZERO;
        }
        let below = self.ledger.taken_below();
        match &mut self.solo {
            Some(solo) => {
                solo.below = solo.below.max(below);
                if let Some((ticket, code, times)) = solo.suspect
                    && times >= 2
                    && let Some((_, event_id)) = solo.sent.clone().filter(|s| s.0 == ticket)
                {
                    let entry = kafka::entry(code);
                    let poisoned = Poisoned {
                        ticket,
                        event_id,
                        lsn: self.current_lsn,
                        reason: format!("the broker refuses it alone: {} ({})", entry.name, code.0),
                        remedy: entry.remedy.to_owned(),
                    };
                    self.halt(&poisoned, now);
                }
            }
            None => {
                self.solo = Some(Solo {
                    below,
                    sent: None,
                    suspect: None,
                    code,
                });
            }
        }
        Duration::ZERO
    }

    /// What the cluster says about a topic.
    pub fn on_topic(&mut self, name: &str, state: &TopicState, now: Moment) {
        let is_usable = self.topics.answer(name, state, now);
        match state {
            TopicState::Present { partitions, .. } if is_usable => {
                self.say(Notice::TopicPresent {
                    topic: name.to_owned(),
                    partitions: *partitions,
                });
            }
            TopicState::Present { .. } => {}
            TopicState::Absent => self.remind(Notice::TopicAbsent(name.to_owned()), now),
            TopicState::Unknown(why) => self.remind(
                Notice::TopicUnanswered {
                    topic: name.to_owned(),
                    why: why.clone(),
                },
                now,
            ),
        }
        if is_usable {
            self.release_due = true;
            self.progress_at = now;
            self.reminded_at = None;
        }
        self.advance(now);
    }

    fn pump_kafka(&mut self, now: Moment) {
        for name in self.topics.questions(now) {
            self.orders.push_back(Order::Lookup(name));
        }
        self.pump_held(now);
        let load = self.ledger.load();
        if self.solo.as_ref().is_some_and(|solo| {
            self.ledger.delivered_below() >= solo.below && load.in_flight_events == 0
        }) {
            let solo = self.solo.take().expect("checked above");
            if solo.suspect.is_none() && matches!(solo.code.0, 10 | 18) {
                self.say(Notice::BatchTooLarge);
            }
        }
        self.pump_stall(now);
    }

    fn pump_stall(&mut self, now: Moment) {
        let is_in_flight = self.ledger.load().in_flight_events > 0;
        let is_blocked = is_in_flight || (!self.held.is_empty() && !self.wants_wal());
        if !is_blocked {
            self.progress_at = now;
            self.rest = REST_MIN;
        }
        let silent = now.saturating_sub(self.progress_at);
        if is_in_flight && silent >= RECHECK_INTERVAL && now >= self.recheck_at {
            // The client library keeps silent about a topic that was deleted: ask.
            self.recheck_at = now + RECHECK_INTERVAL;
            let names = self.topics.names().map(str::to_owned);
            self.orders.extend(names.map(Order::Lookup));
        }
        if is_blocked && silent >= self.settings.stall_timeout {
            if !self.is_stalled && self.stream == Stream::Open && self.ending.is_none() {
                self.is_stalled = true;
                self.say(Notice::KafkaStalled { silent });
                self.last_status(now);
                self.close(Close::Finish, Reopen::WhenKafkaAnswers);
            }
        } else if self.is_stalled {
            self.is_stalled = false;
            self.say(Notice::KafkaAnswers);
            let waits_for_kafka = matches!(
                self.stream,
                Stream::Closed(Reopen::WhenKafkaAnswers)
                    | Stream::Closing(Reopen::WhenKafkaAnswers)
            );
            if waits_for_kafka {
                self.close(Close::Finish, Reopen::At(now));
            }
        }
    }

    fn pump_held(&mut self, now: Moment) {
        if self.held.is_empty() || self.producer != Producer::Ready || self.lead != Lead::Held {
            return;
        }
        let load = self.ledger.load();
        let room = if self.gate.is_some() {
            // The event at which an earlier run halted goes alone.
            usize::from(load.in_flight_events == 0)
        } else {
            self.in_flight_events_max()
                .saturating_sub(load.in_flight_events)
        };
        let is_worth_it =
            load.in_flight_events == 0 || room >= self.settings.in_flight_events_max / 4;
        if !(self.release_due || self.gate.is_some()) || !is_worth_it || room == 0 {
            return;
        }
        let room_bytes = self
            .settings
            .in_flight_bytes_max
            .saturating_sub(load.in_flight_bytes);
        let (released, ran_out) = self.held.release(&self.topics, room, room_bytes);
        self.release_due = ran_out;
        for (ticket, topic, mut record) in released {
            let partitions = self.topics.partitions(topic).expect("released as present");
            record.partition = super::route::partition(&record.key, partitions);
            if now < self.stampless_until {
                record.timestamp_ms = None;
            }
            self.note_sent(ticket, &record, topic, now);
            self.orders.push_back(Order::Send(ticket, record));
        }
    }

    pub(super) fn note_sent(
        &mut self,
        ticket: Ticket,
        record: &crate::record::Record<'_>,
        topic: u16,
        now: Moment,
    ) {
        if self.ledger.load().in_flight_events == 0 {
            self.progress_at = now;
        }
        self.ledger.sent(ticket, topic, record.footprint());
        if let Some(solo) = &mut self.solo {
            let event_id = record.headers.first().and_then(|h| h.value.as_deref());
            let event_id = String::from_utf8_lossy(event_id.unwrap_or_default()).into_owned();
            solo.sent = Some((ticket, event_id));
        } else if self.gate == Some(ticket) {
            let event_id = self.halted.as_ref().map(|h| h.event_id.clone());
            self.solo = Some(Solo {
                below: Ticket(ticket.0 + 1),
                sent: Some((ticket, event_id.unwrap_or_default())),
                suspect: None,
                code: KafkaCode(0),
            });
        }
    }

    // ---- ends ------------------------------------------------------------------------------

    /// SIGTERM or SIGINT.
    pub fn on_stop_asked(&mut self, now: Moment) {
        let is_ending = self
            .ending
            .as_ref()
            .is_some_and(|e| !matches!(e.why, Why::ServerStops));
        if !is_ending {
            let deadline = self.settings.shutdown_timeout;
            self.end(Why::Asked, "asked to stop".to_owned(), deadline, now);
        }
        self.advance(now);
    }

    fn end(&mut self, why: Why, text: String, deadline: Duration, now: Moment) {
        self.say(Notice::Draining {
            why: text,
            deadline,
        });
        self.ending = Some(Ending {
            why,
            deadline: now + deadline,
            is_storing: false,
        });
    }

    /// Ends with this failure once what is on its way has arrived.
    pub(super) fn fail(&mut self, failure: Failure, halted: Option<Halted>, now: Moment) {
        let is_failing = self
            .ending
            .as_ref()
            .is_some_and(|e| matches!(e.why, Why::Failed(..)));
        if !is_failing {
            let text = failure.causes.first().cloned().unwrap_or_default();
            let deadline = self.settings.shutdown_timeout;
            self.end(Why::Failed(failure, halted), text, deadline, now);
        }
    }

    fn halt(&mut self, poisoned: &Poisoned, now: Moment) {
        let Poisoned {
            event_id,
            lsn,
            reason,
            remedy,
            ..
        } = poisoned;
        let failure = Failure::halted(
            format!("event {event_id} (transaction at {lsn}) cannot be published: {reason}"),
            format!(
                "{remedy}; then start again: this event is tried alone, nothing behind it is sent before it is delivered"
            ),
        )
        .because("policy --on-poison halt: everything before it is delivered and confirmed");
        let halted = Halted {
            event_id: event_id.clone(),
            reason: reason.clone(),
        };
        self.fail(failure, Some(halted), now);
    }

    fn pump_end(&mut self, now: Moment) {
        if let Some(poisoned) = self.poisoned.clone()
            && self.ending.is_none()
            && self.ledger.delivered_below() >= poisoned.ticket
        {
            self.halt(&poisoned, now);
        }
        let Some(ending) = &self.ending else {
            return;
        };
        let is_drained = self.ledger.load().in_flight_events == 0
            && !matches!(self.producer, Producer::Rebuilding { .. });
        if ending.is_storing || !(is_drained || now >= ending.deadline) {
            return;
        }
        match self.stream {
            Stream::Open => {
                self.last_status(now);
                self.close(Close::Finish, Reopen::At(now));
            }
            Stream::Opening => self.close(Close::Abort, Reopen::At(now)),
            Stream::Closing(_) => {}
            Stream::Closed(_) => self.ended(now),
        }
    }

    /// The stream is closed and what could be delivered is.
    fn ended(&mut self, now: Moment) {
        let why = self.ending.as_ref().map(|e| e.why.clone());
        match why {
            None => {}
            Some(Why::ServerStops) => {
                self.ending = None;
                self.lose_lead("the database server shut down", now);
                let pause = self.next_reconnect();
                self.wait_for_lead(pause, now);
            }
            Some(Why::Asked | Why::Failed(..))
                if self.lead != Lead::Held
                    || !self.is_writable
                    || self.highest_reported.is_none() =>
            {
                self.exit();
            }
            Some(why) => {
                if let Some(ending) = &mut self.ending {
                    ending.is_storing = true;
                }
                let halted = match why {
                    Why::Failed(_, halted) => halted,
                    Why::Asked | Why::ServerStops => None,
                };
                self.orders.push_back(Order::Store {
                    stop: self.stop(),
                    halted,
                });
            }
        }
    }

    fn stop(&self) -> Stop {
        Stop {
            last: self.ledger.w(),
            reported: self.highest_reported.unwrap_or_default(),
            complete: self.ledger.span() == 0,
            open: self.ledger.open_transaction(),
        }
    }

    /// The stop is in the registry, or could not be written.
    pub fn on_stored(&mut self) {
        self.exit();
    }

    /// A statement on the lock's session failed. Its end, or the next probe, says what is wrong.
    pub fn on_not_written(&mut self, now: Moment) {
        self.is_erasing = false;
        if self.ending.as_ref().is_some_and(|e| e.is_storing) {
            self.exit();
        }
        self.advance(now);
    }

    fn exit(&mut self) {
        self.say(Notice::Stopped {
            flush: self.highest_reported.unwrap_or_default(),
            complete: self.ledger.span() == 0,
        });
        let result = match self.ending.take().map(|e| e.why) {
            Some(Why::Failed(failure, _)) => Err(failure),
            Some(Why::Asked | Why::ServerStops) | None => Ok(()),
        };
        self.orders.push_back(Order::Exit(result));
    }

    /// The registry holds no stop any more.
    pub fn on_stop_erased(&mut self, now: Moment) {
        self.stored_stop = None;
        self.is_erasing = false;
        self.advance(now);
    }

    // ---- time ------------------------------------------------------------------------------

    /// Whatever is due by now.
    pub fn advance(&mut self, now: Moment) {
        self.pump_lead(now);
        self.pump_kafka(now);
        self.pump_end(now);
        self.pump_stream(now);
        self.pump_feedback(now);
    }

    /// The latest time for the next call of [`Machine::advance`].
    #[must_use]
    pub fn next_timeout(&self, now: Moment) -> Moment {
        let mut at = now + PROBE_INTERVAL;
        let mut sooner = |other: Moment| at = at.min(other);
        match self.lead {
            Lead::Waiting { until } => sooner(until),
            Lead::Held if self.probe_sent_at.is_none() => sooner(self.probe_at),
            Lead::Held | Lead::Seeking => {}
        }
        if let Stream::Closed(Reopen::At(reopen)) = self.stream
            && self.lead == Lead::Held
        {
            sooner(reopen);
        }
        if let Producer::Resting { until } = self.producer {
            sooner(until);
        }
        if self.stream == Stream::Open {
            sooner(self.feedback.due_at());
        }
        if let Some(question) = self.topics.next_question_at() {
            sooner(question);
        }
        if let Some(ending) = &self.ending {
            sooner(ending.deadline);
        }
        at.max(now)
    }

    fn pump_feedback(&mut self, now: Moment) {
        if self.stream != Stream::Open {
            return;
        }
        let flush = self.flush();
        self.feedback.flush_is(flush, now);
        if now >= self.feedback.due_at() {
            self.last_status(now);
        }
    }

    fn last_status(&mut self, now: Moment) {
        if self.stream != Stream::Open {
            return;
        }
        let flush = self.flush();
        let status = self.feedback.status(flush, now);
        if flush != Lsn::INVALID {
            self.reconnect = RECONNECT_MIN;
            self.highest_reported = self.highest_reported.max(Some(flush));
        }
        self.orders.push_back(Order::Status(status));
    }

    /// What the ledger allows, unless a stored stop would be passed: that is erased first.
    fn flush(&mut self) -> Lsn {
        let flush = self.ledger.flush();
        match self.stored_stop {
            Some(stored) if flush > stored => {
                if !self.is_erasing {
                    self.is_erasing = true;
                    self.orders.push_back(Order::EraseStop);
                }
                self.feedback.told_flush()
            }
            Some(_) | None => flush,
        }
    }

    pub(super) fn received(&mut self, lsn: Lsn) {
        self.feedback.received(lsn);
        self.received_ever = self.received_ever.max(lsn);
    }

    pub(super) fn say(&mut self, notice: Notice) {
        self.orders.push_back(Order::Notice(notice));
    }

    /// A condition that lasts is said at once and then once a minute.
    fn remind(&mut self, notice: Notice, now: Moment) {
        if self
            .reminded_at
            .is_none_or(|at| now >= at + REMIND_INTERVAL)
        {
            self.reminded_at = Some(now);
            self.say(notice);
        }
    }

    pub fn take_deliveries(&mut self) -> Deliveries {
        std::mem::take(&mut self.deliveries)
    }

    #[must_use]
    pub fn standing(&self) -> Standing {
        Standing {
            is_leading: self.lead == Lead::Held,
            is_streaming: self.stream == Stream::Open,
            load: self.ledger.load(),
            span: self.ledger.span(),
            received: self.feedback.received_lsn(),
            flush: self.highest_reported.unwrap_or_default(),
            oldest_undelivered: self.oldest_undelivered(),
        }
    }

    fn oldest_undelivered(&self) -> Option<PgTimestamp> {
        self.ledger.oldest_undelivered()
    }
}

fn moved_slot(confirmed: Lsn, reported: Lsn) -> Failure {
    Failure::halted(
        format!(
            "the slot's confirmed_flush_lsn is {confirmed}, above {reported}, the highest position that was ever reported: somebody advanced or re-created the slot, events in between were never streamed"
        ),
        "find out who moved the slot and publish what is missing from the table; then `walrelay init` again after the registry row and the slot are dropped",
    )
}
