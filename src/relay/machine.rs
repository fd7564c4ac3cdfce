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

mod delivery;
mod ending;
mod gap;
mod isolation;
mod lead;
mod poison;
mod retry;
mod session;
mod standing;
mod tail;

pub(super) use delivery::record_bytes;
pub(super) use isolation::Try;
pub(super) use poison::behind_another;

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::Moment;
use super::breaker::Breaker;
use super::feedback::Feedback;
use super::held::Held;
use super::ledger::{Ledger, OtherHistory};
use super::orders::{
    Close, Deliveries, Halted, Ill, Leadership, Led, Notice, OpenError, Opened, Order, Probed,
    Purge, Seek, Settings, Stamps, Stop, StreamEnd,
};
use super::outbox::{Domains, Shape, Unmapped};
use super::parked::ParkedKeys;
use super::tails::Tails;
use super::topics::Topics;
use super::trial::Trial;
use crate::error::{Class, Exit, Failure};
use crate::lsn::{Lsn, PgTimestamp, Xid};
use crate::record::{KafkaCode, Report, Ticket, TopicState};

/// How soon the first attempt to reconnect is made, and how long the pause may grow.
const RECONNECT_MIN: Duration = Duration::from_millis(100);
/// Below the time that a standby leaves the lock to the old leader after a restart of Postgres.
const RECONNECT_MAX: Duration = Duration::from_secs(2);
/// The pause of a standby between two waits for the lock: it waits on the server, and is woken there.
const SEEK_INTERVAL: Duration = Duration::from_millis(50);
/// How often the leader proves that it leads.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// How long a server that shuts down is held up by what is on its way to Kafka.
const SERVER_SHUTDOWN_DRAIN: Duration = Duration::from_secs(5);
/// How long the database may take to store a stop.
const STORE_WITHIN: Duration = Duration::from_secs(2);
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
    /// The open transaction is read to its commit, at most until then: its events that are
    /// delivered already would else stay unconfirmed.
    commit_by: Option<Moment>,
    /// The stored stop could not be erased: nothing above it is reported.
    is_erase_refused: bool,
    /// The stop was handed over to be stored.
    is_storing: bool,
}

/// The event to halt at: everything before it is delivered first.
#[derive(Clone, Debug)]
pub(super) struct Poisoned {
    pub ticket: Ticket,
    pub event_id: String,
    pub lsn: Lsn,
    pub reason: String,
    pub remedy: String,
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
    /// Boxed: it is taken out and put back for each row.
    pub(super) shape: Option<Result<Box<Shape>, Unmapped>>,
    pub(super) domains: Domains,
    /// The table is no outbox to the mapping for rows that come behind this position.
    pub(super) unfit_from: Option<(Lsn, Failure)>,
    pub(super) topic_name: String,
    pub(super) current_lsn: Lsn,
    pub(super) current_xid: Xid,
    pub(super) current_time: PgTimestamp,
    /// The server's clock when it sent the last message.
    pub(super) sent_at: PgTimestamp,
    pub(super) in_transaction: bool,
    pub(super) foreign: HashSet<u32>,
    pub(super) forged_said: bool,
    pub(super) timeless_said: bool,

    // Poison.
    pub(super) poisoned: Option<Poisoned>,
    /// Events of batches that were refused, with what: sent apart when they come again.
    pub(super) suspects: HashMap<Ticket, KafkaCode>,
    /// What made suspects of them, while each of them was taken so far.
    suspicion: Option<KafkaCode>,
    pub(super) trial: Trial,
    /// Its producer was told to give up what it has; the reports are still to come.
    is_trial_purged: bool,
    pub(super) parked: ParkedKeys,
    parking: poison::Parking,
    breaker: Breaker,
    retry: retry::Retry,
    /// What the table has is in `parked`; before that nothing is taken.
    parked_is_known: bool,
    is_looking: bool,
    look_at: Moment,
    /// The registry's count of changes by hand, as it was looked at; and whether it has moved.
    touched: i64,
    /// The highest number of a dead letter that was seen.
    last_letter: i64,
    is_touched: bool,
    pub(super) tails: Tails,
    /// A stream was opened since the lead was taken: the server is the one whose events we have.
    is_server_known: bool,
    /// The event at which an earlier run halted, and its ticket once it is met.
    pub(super) halted: Option<Halted>,
    pub(super) gate: Option<Ticket>,
    /// Which timestamps are given, and until when it is not all of them.
    stamps: (Stamps, Moment),

    // Kafka's progress.
    /// The first code that is no consequence of another.
    cause: Option<KafkaCode>,
    is_refused: bool,
    progress_at: Moment,
    recheck_at: Moment,
    is_stalled: bool,
    rest: Duration,
    /// The broker's last refusal, until something is delivered.
    refused: Option<Ill>,
    release_due: bool,
    deliveries: Deliveries,
    tally: Vec<(u64, u64)>,

    /// The present session, or the last one, carries the rows of a gap.
    pub(super) is_healing: bool,
    is_provable: bool,

    // This process's past.
    has_led: bool,
    /// [`Led::term`] as it was when we led last.
    term: Option<i64>,
    pub(super) generation: i64,
    is_writable: bool,
    identity: Option<(String, i32)>,
    received_ever: Lsn,
    /// As it was when the present session was begun.
    received_before: Lsn,
    /// The highest position reported on this slot, where it is known.
    highest_reported: Option<Lsn>,
    /// The slot's position when the session began.
    confirmed: Lsn,
    /// A stop that is still in the registry, with the position that it reports.
    stored_stop: Option<Lsn>,
    /// Where another leader stopped in order: taken over once what we knew is forgotten.
    resume: Option<Stop>,
    is_erasing: bool,
    reconnect: Duration,
    last_turn: Moment,
    probe_at: Moment,
    probe_sent_at: Option<Moment>,
    /// When each lasting condition was last said.
    reminders: HashMap<String, Moment>,
    /// Behind whom we were last said to stand by.
    standby_said: Option<String>,
    leadership: Leadership,
    /// Why the stream is not open; kept until it is.
    closed_because: Option<String>,
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
            domains: Domains::default(),
            unfit_from: None,
            topic_name: String::new(),
            current_lsn: Lsn::INVALID,
            current_xid: Xid::default(),
            current_time: PgTimestamp::default(),
            sent_at: PgTimestamp::default(),
            in_transaction: false,
            foreign: HashSet::new(),
            forged_said: false,
            timeless_said: false,
            poisoned: None,
            suspects: HashMap::new(),
            suspicion: None,
            trial: Trial::default(),
            is_trial_purged: false,
            parked: ParkedKeys::default(),
            parking: poison::Parking::default(),
            breaker: Breaker::default(),
            retry: retry::Retry::default(),
            parked_is_known: false,
            is_looking: false,
            look_at: Moment::ZERO,
            touched: 0,
            last_letter: 0,
            is_touched: false,
            tails: Tails::default(),
            is_server_known: false,
            halted: None,
            gate: None,
            stamps: (Stamps::All, Moment::ZERO),
            cause: None,
            is_refused: false,
            progress_at: now,
            recheck_at: now,
            is_stalled: false,
            rest: REST_MIN,
            refused: None,
            release_due: false,
            deliveries: Deliveries::default(),
            tally: Vec::new(),
            is_healing: false,
            is_provable: false,
            has_led: false,
            term: None,
            generation: 0,
            is_writable: true,
            identity: None,
            received_ever: Lsn::INVALID,
            received_before: Lsn::INVALID,
            highest_reported: None,
            confirmed: Lsn::INVALID,
            stored_stop: None,
            resume: None,
            is_erasing: false,
            reconnect: RECONNECT_MIN,
            last_turn: now,
            probe_at: now,
            probe_sent_at: None,
            reminders: HashMap::new(),
            standby_said: None,
            leadership: Leadership::Unknown,
            closed_because: None,
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
            self.purge_trial();
            self.lose_lead("this process did not run", now);
        }
    }

    /// Does the machine want the next WAL message? While not, nothing is read.
    #[must_use]
    pub fn wants_wal(&self) -> bool {
        // What was released goes first: a record that is handed over while one of its key still
        // stands among the orders would overtake it.
        let is_releasing = self.orders.iter().any(|o| matches!(o, Order::Send(..)));
        !is_releasing && self.has_room()
    }

    fn has_room(&self) -> bool {
        let load = self.ledger.load();
        self.stream == Stream::Open
            && self.producer == Producer::Ready
            && (self.ending.is_none() || self.awaits_commit())
            && self.poisoned.is_none()
            // Nothing behind the event to halt at was taken: what was lost stands before it.
            && (self.gate.is_none() || self.ledger.lost_events() > 0)
            && self.parked_is_known
            && load.in_flight_events < self.settings.in_flight_events_max
            && load.in_flight_bytes + load.held_bytes < self.settings.in_flight_bytes_max
            // What was lost comes again from inside the span: reading it makes that no longer.
            && (self.ledger.lost_events() > 0 || self.ledger.span() < self.span_events_max())
    }

    /// While ending: is the open transaction still read to its commit?
    fn awaits_commit(&self) -> bool {
        self.in_transaction
            && self.stream == Stream::Open
            && self.ending.as_ref().is_some_and(|e| e.commit_by.is_some())
    }

    /// While Kafka says nothing about a topic or its end, no more is held than could be in flight: an outage
    /// must not fill the memory that is meant for a missing topic.
    fn span_events_max(&self) -> usize {
        if !self.held.is_empty() && (self.topics.is_unanswered() || self.tails.is_on()) {
            self.settings.in_flight_events_max
        } else {
            self.settings.span_events_max
        }
    }

    // ---- time ------------------------------------------------------------------------------

    /// Whatever is due by now.
    pub fn advance(&mut self, now: Moment) {
        self.pump_lead(now);
        self.pump_kafka(now);
        self.pump_parking(now);
        self.pump_retry(now);
        self.pump_trial(now);
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
        let due = [
            self.topics.next_question_at(),
            self.tails.next_question_at(),
            self.trial.rests_until(),
            self.parking_due_at(),
            self.retry_due_at(),
        ];
        // What is due was done, or waits for something else than time.
        let later = due.into_iter().flatten().filter(|at| *at > now);
        later.for_each(&mut sooner);
        if let Some(ending) = &self.ending {
            sooner(ending.deadline);
            if let Some(commit_by) = ending.commit_by {
                sooner(commit_by);
            }
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
        let condition = notice.condition();
        let is_due = self
            .reminders
            .get(&condition)
            .is_none_or(|at| now >= *at + REMIND_INTERVAL);
        if is_due {
            self.reminders.insert(condition, now);
            self.say(notice);
        }
    }

    pub fn take_deliveries(&mut self) -> Deliveries {
        std::mem::take(&mut self.deliveries)
    }
}
