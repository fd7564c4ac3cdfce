//! Events that cannot be published: parked with all that follows of their key, held because too
//! many keys would be, or the reason for a halt.
//!
//! # Invariants
//! - A parked event counts as delivered only when the database (and, for a failover slot, the
//!   standbys) has it.
//! - From a parked event on, nothing of its key is published.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::{Ill, Lead, Machine, Moment, Notice, Order, Poisoned, Reopen, Stream};
use crate::dead_letter::{DeadLetter, EventKey, Parked, Reason, Tripped, Why, Written};
use crate::record::Ticket;
use crate::relay::held::Waiting;
use crate::relay::orders::{OnPoison, Statement};
use crate::relay::parked::ParkedKeys;
use crate::relay::trial::Source;

/// Dead letters that are written in one transaction.
const BATCH_LETTERS: usize = 1_000;
const BATCH_BYTES: usize = 8 << 20;
/// How soon a refused writing is tried again, and how long the pause grows.
const REST_MIN: Duration = Duration::from_millis(200);
const REST_MAX: Duration = Duration::from_secs(5);
/// Events of one topic that did not wait long enough for it are looked for this often.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Dead letters on their way to the table.
#[derive(Debug, Default)]
pub(super) struct Parking {
    queue: VecDeque<(Ticket, DeadLetter)>,
    /// The batch that is being written.
    out: Vec<(Ticket, Option<EventKey>)>,
    /// Of how many events of each key that is true.
    under_way: HashMap<EventKey, usize>,
    under_way_at_look: HashSet<EventKey>,
    /// The highest number of a dead letter that was known when the look began.
    last_at_look: i64,
    /// Answers to what was asked before everything was forgotten say nothing.
    pub(super) epoch: u64,
    rest: Duration,
    rests_until: Moment,
    /// Why nothing can be written.
    pub(super) trouble: Option<Ill>,
    /// The event at which an earlier run halted, where it is among them.
    halted: Option<Ticket>,
    looked_at: Moment,
}

impl Parking {
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.out.is_empty()
    }

    pub(super) fn is_under_way(&self, key: &EventKey) -> bool {
        self.under_way.contains_key(key)
    }

    pub(super) fn keys_under_way(&self) -> HashSet<EventKey> {
        self.under_way.keys().cloned().collect()
    }

    fn clear(&mut self) {
        *self = Parking {
            epoch: self.epoch + 1,
            ..Parking::default()
        };
    }

    fn done_with(&mut self, key: Option<&EventKey>) {
        let Some(key) = key else {
            return;
        };
        if let Some(count) = self.under_way.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.under_way.remove(key);
            }
        }
    }
}

impl Machine {
    /// An event that can never be published as it is.
    pub(in crate::relay) fn condemn(&mut self, waiting: Waiting, why: Why, now: Moment) {
        match self.settings.on_poison {
            OnPoison::Halt => self.halt_at(&waiting, why),
            OnPoison::Park => {
                let topic = self.topics.name(waiting.topic).to_owned();
                let may_park = !self.breaker.is_tripped(&topic)
                    && self.breaker.may_park(why.reason, &topic, waiting.key, now);
                if may_park {
                    self.park(waiting, why);
                } else {
                    self.hold_back(waiting, why, &topic, now);
                }
            }
        }
    }

    fn halt_at(&mut self, waiting: &Waiting, why: Why) {
        let is_first = self
            .poisoned
            .as_ref()
            .is_none_or(|known| waiting.ticket < known.ticket);
        if !is_first {
            return;
        }
        let remedy = match why.code {
            Some(code) => crate::error::kafka::entry(code).remedy.to_owned(),
            None => "a row in the log cannot be changed: insert a corrected event under a new event_id and run with --on-poison park, which sets this one aside, or change what makes it unpublishable (mapping, topic template, topic limit)".to_owned(),
        };
        // Nothing behind it is sent: the relay ends, and all of it comes again.
        self.held.forget_from(Ticket(waiting.ticket.0 + 1));
        let behind = self.trial.take(|item| match &item.source {
            Source::Event(other) => other.ticket > waiting.ticket,
            Source::Letter { .. } => false,
        });
        for item in behind {
            if let Source::Event(other) = item.source {
                self.ledger.lost(other.ticket);
            }
        }
        self.poisoned = Some(Poisoned {
            ticket: waiting.ticket,
            event_id: String::from_utf8_lossy(&waiting.origin.event_id).into_owned(),
            lsn: waiting.origin.position.commit_lsn,
            reason: why.message,
            remedy,
        });
    }

    /// Parks an event, and what follows of its key with it.
    pub(in crate::relay) fn park(&mut self, waiting: Waiting, why: Why) {
        let hash = waiting.key;
        let key = waiting.origin.key.clone();
        let is_new = match &key {
            Some(key) => self.parked.park(key, waiting.origin.position),
            None => true,
        };
        if is_new {
            self.say(Notice::Parked {
                event_id: String::from_utf8_lossy(&waiting.origin.event_id).into_owned(),
                key: key.as_ref().map(words),
                topic: self.topics.name(waiting.topic).to_owned(),
                reason: why.reason,
                message: why.message.clone(),
            });
        }
        self.ledger
            .aside(waiting.ticket, waiting.topic, waiting.record.size());
        self.deliveries.parked.push(why.reason);
        let is_retried = key.as_ref().is_some_and(|key| self.parked.is_retried(key));
        if let Some(key) = &key {
            *self.parking.under_way.entry(key.clone()).or_default() += 1;
            self.retry.parks(key);
        }
        let ticket = waiting.ticket;
        if self.is_halted(&waiting.origin.event_id) {
            self.parking.halted = Some(ticket);
        }
        let letter = waiting.into_letter(why, is_retried);
        self.parking.queue.push_back((ticket, letter));
        if is_new && (self.held.has_key(hash) || self.trial.has_key(hash)) {
            self.park_followers();
        }
    }

    pub(in crate::relay) fn is_behind(&self, waiting: &Waiting) -> bool {
        holds(&self.parked, waiting)
    }

    /// What waits behind an event that was just parked is parked behind it.
    fn park_followers(&mut self) {
        if self.parked.is_empty() {
            return;
        }
        let parked = &self.parked;
        let is_behind = |waiting: &Waiting| holds(parked, waiting);
        let mut behind = self.held.take(&is_behind);
        let tried = self.trial.take(|item| match &item.source {
            Source::Event(waiting) => is_behind(waiting),
            Source::Letter { .. } => false,
        });
        behind.extend(tried.into_iter().filter_map(|item| match item.source {
            Source::Event(waiting) => Some(*waiting),
            Source::Letter { .. } => None,
        }));
        behind.sort_by_key(|waiting| waiting.ticket);
        for waiting in behind {
            let why = behind_another();
            self.park(waiting, why);
        }
    }

    /// One key too many would be parked: its topic is tripped, its events wait.
    fn hold_back(&mut self, mut waiting: Waiting, why: Why, topic: &str, now: Moment) {
        if matches!(why.reason, Reason::MalformedRow | Reason::InvalidTopic) {
            waiting.verdict = Some(why.clone());
        }
        self.back_to_held(waiting);
        if self.breaker.is_tripped(topic) {
            return;
        }
        let tripped = Tripped {
            topic: topic.to_owned(),
            reason: why.reason,
            message: why.message,
            since: self.sent_at,
            is_park_asked: false,
        };
        self.say(Notice::Tripped(tripped.clone()));
        self.orders
            .push_back(Order::Letters(Statement::Trip(tripped.clone())));
        self.breaker.trip(tripped, now);
        self.topics.trip(topic);
        let id = self.topics.id(topic);
        let tried = self.trial.take(|item| Some(item.topic) == id);
        for item in tried {
            match item.source {
                Source::Event(waiting) => self.back_to_held(*waiting),
                Source::Letter { index, .. } => {
                    self.letter_failed(
                        index,
                        Why {
                            reason: why.reason,
                            code: None,
                            message: format!("topic {topic} is tripped"),
                        },
                    );
                }
            }
        }
    }

    pub(super) fn back_to_held(&mut self, waiting: Waiting) {
        self.ledger
            .held(waiting.ticket, waiting.topic, waiting.record.size());
        self.held.put_back(waiting);
    }

    /// A tripped topic is open again: an event of it was delivered, or somebody wants the rest parked.
    fn open_topic(&mut self, topic: &str, how: Opened) {
        if !self.breaker.open(topic) {
            return;
        }
        self.topics.untrip(topic);
        self.orders
            .push_back(Order::Letters(Statement::Untrip(topic.to_owned())));
        self.say(Notice::TopicOpen {
            topic: topic.to_owned(),
            is_by_hand: how == Opened::ByHand,
        });
        self.release_due = true;
    }

    /// An event of a tripped topic was delivered.
    pub(super) fn probe_passed(&mut self, topic: u16) {
        let topic = self.topics.name(topic).to_owned();
        self.open_topic(&topic, Opened::Delivered);
    }

    /// `dead-letters park --topic`: what is held of the topic is parked.
    fn park_topic(&mut self, tripped: &Tripped) {
        let Some(id) = self.topics.id(&tripped.topic) else {
            return;
        };
        let held = self.held.take(|waiting| waiting.topic == id);
        for waiting in held {
            let why = waiting.verdict.clone().unwrap_or_else(|| Why {
                reason: Reason::ByHand,
                code: None,
                message: format!(
                    "its topic was tripped, and what was held of it is parked by hand: {}",
                    tripped.message
                ),
            });
            self.park(waiting, why);
        }
        self.open_topic(&tripped.topic, Opened::ByHand);
    }

    /// What the table and the registry say about dead letters.
    pub fn on_parked_known(&mut self, parked: Parked, now: Moment) {
        self.learn_parked(parked, now);
        self.advance(now);
    }

    pub(super) fn learn_parked(&mut self, parked: Parked, now: Moment) {
        let is_older = parked.last_id < self.parking.last_at_look;
        self.last_letter = self.last_letter.max(parked.last_id);
        self.touched = parked.touched;
        self.is_looking = false;
        self.parked_is_known = true;
        let tripped = parked.tripped.clone();
        self.retry.is_keyless_asked = parked.is_keyless_retried;
        let (parking, retry) = (&self.parking, &self.retry);
        let is_under_way = |key: &EventKey| {
            parking.is_under_way(key)
                || parking.under_way_at_look.contains(key)
                || retry.is_about(key)
        };
        self.parked.looked(parked, is_under_way);
        if is_older {
            // Committed, and not there: this is not the table that they were written to.
            let what = "dead letters that were written are gone".to_owned();
            self.other_history(what, now);
        }
        for tripped in tripped {
            if !self.breaker.is_tripped(&tripped.topic) {
                self.breaker.trip(tripped.clone(), now);
                self.topics.trip(&tripped.topic);
                self.say(Notice::Tripped(tripped.clone()));
            }
            if tripped.is_park_asked {
                self.park_topic(&tripped);
            }
        }
        self.park_followers();
    }

    /// The look failed; the side session's end says why, or the next second's question asks again.
    pub fn on_parked_unknown(&mut self, now: Moment) {
        self.is_looking = false;
        self.look_at = now + REST_MAX;
        self.advance(now);
    }

    /// Everything that is under way or known about dead letters, for another history or leader.
    pub(super) fn forget_parked(&mut self) {
        self.parking.clear();
        self.parked.clear();
        self.breaker.clear();
        self.topics.untrip_all();
        self.retry = super::retry::Retry::default();
        self.parked_is_known = false;
        self.last_letter = 0;
        self.is_looking = false;
        self.is_trial_purged = false;
        if self.trial.clear() {
            self.orders.push_back(Order::RebuildTrial);
        }
    }

    /// What is with the producer of what is sent apart is taken back: its reports say so.
    pub(super) fn purge_trial(&mut self) {
        if self.trial.is_out() && !self.is_trial_purged {
            self.is_trial_purged = true;
            self.orders.push_back(Order::RebuildTrial);
        }
    }

    // ---- to the table ----------------------------------------------------------------------

    pub(super) fn pump_parking(&mut self, now: Moment) {
        self.pump_look(now);
        self.pump_grace(now);
        self.pump_probes(now);
        let may_write = self.lead == Lead::Held
            && self.parking.out.is_empty()
            && now >= self.parking.rests_until;
        if !may_write || self.parking.queue.is_empty() {
            return;
        }
        if !self.is_server_known {
            // The copy of another history has no place for these. A stream shows which it is.
            if self.stream == Stream::Closed(Reopen::WhenKafkaAnswers) {
                self.stream = Stream::Closed(Reopen::At(now));
            }
            return;
        }
        let mut letters = Vec::new();
        let mut bytes = 0;
        while letters.len() < BATCH_LETTERS
            && bytes < BATCH_BYTES
            && let Some((ticket, letter)) = self.parking.queue.pop_front()
        {
            bytes += letter.record.footprint();
            self.parking.out.push((ticket, letter.key.clone()));
            letters.push(letter);
        }
        self.orders.push_back(Order::Letters(Statement::Park {
            epoch: self.parking.epoch,
            letters,
        }));
    }

    /// When something about dead letters is due.
    pub(super) fn parking_due_at(&self) -> Option<Moment> {
        let rest = (!self.parking.queue.is_empty() && self.parking.out.is_empty())
            .then_some(self.parking.rests_until);
        let look = (self.lead == Lead::Held && !self.parked_is_known && !self.is_looking)
            .then_some(self.look_at);
        [rest, look, self.breaker.next_try_at()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Letters are in the table for good: a server that is not so far is a copy that lacks them.
    pub fn on_parked(&mut self, epoch: u64, written: Written, now: Moment) {
        if epoch != self.parking.epoch {
            return;
        }
        self.received_ever = self.received_ever.max(written.flushed);
        self.last_letter = self.last_letter.max(written.last_id);
        self.parking.trouble = None;
        self.parking.rest = REST_MIN;
        for (ticket, key) in std::mem::take(&mut self.parking.out) {
            self.parking.done_with(key.as_ref());
            self.ledger.delivered(ticket);
            self.passed_gate(ticket);
            if self.parking.halted == Some(ticket) {
                self.parking.halted = None;
                self.clear_halted();
            }
        }
        self.ledger.settle();
        self.progress_at = now;
        self.advance(now);
    }

    /// They are not: here they are again.
    pub fn on_not_parked(&mut self, epoch: u64, letters: Vec<DeadLetter>, why: Ill, now: Moment) {
        if epoch != self.parking.epoch {
            return;
        }
        let tickets = std::mem::take(&mut self.parking.out);
        for ((ticket, _), letter) in tickets.into_iter().zip(letters).rev() {
            self.parking.queue.push_front((ticket, letter));
        }
        self.remind(Notice::NotParked(why.what.clone(), why.remedy.clone()), now);
        self.parking.trouble = Some(why);
        self.parking.rest = (self.parking.rest * 2).clamp(REST_MIN, REST_MAX);
        self.parking.rests_until = now + self.parking.rest;
        self.advance(now);
    }

    /// The table is looked at from now on: what is on its way to it may be missed, and may have
    /// arrived before the answer does.
    pub(super) fn look_begins(&mut self) {
        self.parked.look();
        self.parking.under_way_at_look = self.parking.keys_under_way();
        self.parking.last_at_look = self.last_letter;
    }

    fn pump_look(&mut self, now: Moment) {
        let is_wanted = !self.parked_is_known || self.is_touched;
        if self.lead == Lead::Held && is_wanted && !self.is_looking && now >= self.look_at {
            self.is_looking = true;
            self.is_touched = false;
            self.look_begins();
            self.orders.push_back(Order::Letters(Statement::Look));
        }
    }

    /// Topics that have been absent for longer than the grace time: their keys are poisoned.
    fn pump_grace(&mut self, now: Moment) {
        if self.held.is_empty() || now < self.parking.looked_at + LOOK_AGAIN {
            return;
        }
        self.parking.looked_at = now;
        let given_up = self.topics.given_up(now, self.settings.topic_grace);
        for topic in given_up {
            let held = self.held.take(|waiting| waiting.topic == topic);
            for waiting in held {
                // Parked behind another meanwhile? Then this is one of its followers.
                let why = self.absent(topic);
                self.condemn_or_follow(waiting, why, now);
            }
        }
    }

    fn condemn_or_follow(&mut self, waiting: Waiting, why: Why, now: Moment) {
        if self.is_behind(&waiting) {
            self.park(waiting, behind_another());
        } else {
            self.condemn(waiting, why, now);
        }
    }

    pub(in crate::relay) fn absent(&self, topic: u16) -> Why {
        let grace = self.settings.topic_grace;
        Why {
            reason: Reason::TopicAbsent,
            code: None,
            message: format!(
                "topic {} has not been there for {grace:.0?} (--topic-grace)",
                self.topics.name(topic)
            ),
        }
    }

    /// One event a minute of a tripped topic is tried, each time of another key.
    fn pump_probes(&mut self, now: Moment) {
        if self.breaker.is_quiet() || self.lead != Lead::Held || self.ending.is_some() {
            return;
        }
        for topic in self.breaker.due(now) {
            // What has no topic cannot be tried.
            let Some(id) = self.topics.id(&topic).filter(|_| !topic.is_empty()) else {
                continue;
            };
            let breaker = &self.breaker;
            let fits = |waiting: &Waiting| {
                waiting.topic == id
                    && waiting.verdict.is_none()
                    && !breaker.was_tried(&topic, waiting.key)
            };
            match self.held.take_head(fits) {
                Some(waiting) => {
                    self.breaker.tries(&topic, waiting.key);
                    self.try_apart(waiting, super::Try::Probe);
                }
                None => self.breaker.try_all_again(&topic),
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Opened {
    Delivered,
    ByHand,
}

fn holds(parked: &ParkedKeys, waiting: &Waiting) -> bool {
    waiting.origin.key.as_ref().is_some_and(|key| {
        let aggregate_type = key.aggregate_type.as_deref();
        let at = waiting.origin.position;
        parked.holds(waiting.key, aggregate_type, &key.aggregate_id, at)
    })
}

pub(in crate::relay) fn behind_another() -> Why {
    Why {
        reason: Reason::Behind,
        code: None,
        message: "an earlier event of its key is parked".to_owned(),
    }
}

/// A key for people: no payload, and bounded.
fn words(key: &EventKey) -> String {
    const SHOWN_MAX: usize = 200;
    let id = String::from_utf8_lossy(&key.aggregate_id);
    let id: String = id.chars().take(SHOWN_MAX).collect();
    match &key.aggregate_type {
        Some(kind) => {
            let kind = String::from_utf8_lossy(kind);
            let kind: String = kind.chars().take(SHOWN_MAX).collect();
            format!("{} {id:?}", kind.escape_debug())
        }
        None => format!("{id:?}"),
    }
}
