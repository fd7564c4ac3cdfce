//! Dead letters on their way back: published in their order, settled, the key set free.
//!
//! ```text
//!            a retry was asked for             every letter has its answer
//!   Idle ─────▶ Loading ─────▶ Sending ─────────────▶ Settling ─────▶ Idle
//!               (a batch of whole                     (one commit; a key of which
//!                keys' beginnings)                     nothing is left is free)
//! ```
//!
//! # Invariants
//! - A key's dead letters are sent only when everything of it that comes before them is delivered.
//! - Until the table says that none is left, what comes of the key is parked behind them.

use std::collections::HashSet;
use std::time::Duration;

use super::{Ill, Lead, Machine, Moment, Notice, Order};
use crate::dead_letter::{EventKey, Reason, Settlement, Stored, Why};
use crate::lsn::Lsn;
use crate::relay::orders::{Statement, WhyNot};
use crate::relay::parked::hash_of;
use crate::relay::trial::{Item, Source};

/// Where nothing could be done yet, or the database refused, it is asked again after this.
const ASK_AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug, Default, PartialEq, Eq, Clone, Copy)]
enum State {
    #[default]
    Idle,
    Loading,
    Sending,
    Settling,
}

#[derive(Debug, Default)]
pub(super) struct Retry {
    state: State,
    batch: Vec<Stored>,
    /// Letters that have no answer yet.
    open: HashSet<usize>,
    settlement: Settlement,
    /// Keys of which something may reach the table after the settlement: answers come in any order.
    parked_since: HashSet<EventKey>,
    ask_at: Moment,
    /// A retry of an event without a key was asked for.
    pub(super) is_keyless_asked: bool,
}

impl Retry {
    /// An event of this key is on its way to the table.
    pub(super) fn parks(&mut self, key: &EventKey) {
        if self.state == State::Settling {
            self.parked_since.insert(key.clone());
        }
    }

    /// Is the key among those that are being published or settled?
    pub(super) fn is_about(&self, key: &EventKey) -> bool {
        let mut batch = self.batch.iter();
        batch.any(|stored| stored.letter.key.as_ref() == Some(key))
    }
}

impl Machine {
    pub(super) fn pump_retry(&mut self, now: Moment) {
        if self.lead != Lead::Held || !self.parked_is_known || !self.is_server_known {
            return;
        }
        match self.retry.state {
            State::Idle if self.ending.is_some() => {}
            State::Idle => {
                let passed = self.passed_lsn();
                if self.is_retry_asked() && now >= self.retry.ask_at && passed != Lsn::INVALID {
                    self.retry.state = State::Loading;
                    self.orders
                        .push_back(Order::Letters(Statement::LoadRetry { passed }));
                }
            }
            State::Sending => {
                self.fail_unsendable();
                if self.retry.open.is_empty() {
                    self.retry.state = State::Settling;
                    self.retry.ask_at = Moment::ZERO;
                }
                self.pump_settling(now);
            }
            State::Settling => self.pump_settling(now),
            State::Loading => {}
        }
    }

    /// Nothing more is published; what was is still settled.
    pub(super) fn wind_up_retry(&mut self) {
        let given_up = self.trial.take(|item| match &item.source {
            Source::Letter { .. } => true,
            Source::Event(_) => false,
        });
        for item in given_up {
            if let Source::Letter { index, .. } = item.source {
                self.retry.open.remove(&index);
            }
        }
    }

    fn is_retry_asked(&self) -> bool {
        self.parked.retried() > 0 || self.retry.is_keyless_asked
    }

    pub(super) fn is_retry_over(&self) -> bool {
        self.retry.state == State::Idle
    }

    /// Every transaction that commits below this is delivered or parked.
    fn passed_lsn(&self) -> Lsn {
        self.confirmed.max(self.ledger.flush())
    }

    pub(super) fn retry_due_at(&self) -> Option<Moment> {
        let is_waiting = match self.retry.state {
            State::Idle => self.is_retry_asked() && self.passed_lsn() != Lsn::INVALID,
            State::Settling => self.retry.ask_at != Moment::MAX,
            State::Loading | State::Sending => false,
        };
        (is_waiting && self.lead == Lead::Held).then_some(self.retry.ask_at)
    }

    /// The next dead letters to publish; none where nothing may go yet.
    pub fn on_retry_loaded(&mut self, letters: Vec<Stored>, now: Moment) {
        if self.retry.state != State::Loading {
            return;
        }
        self.retry.state = State::Idle;
        if letters.is_empty() || self.ending.is_some() {
            // Not passed yet, or there is nothing (any more): the table says which.
            self.is_touched = true;
            self.retry.ask_at = now + ASK_AGAIN;
            self.advance(now);
            return;
        }
        self.retry.state = State::Sending;
        self.retry.settlement = Settlement::default();
        self.retry.open = (0..letters.len()).collect();
        self.retry.batch = letters;
        for index in 0..self.retry.batch.len() {
            self.try_letter(index, now);
        }
        self.advance(now);
    }

    pub fn on_retry_not_loaded(&mut self, now: Moment) {
        if self.retry.state == State::Loading {
            self.retry.state = State::Idle;
            self.retry.ask_at = now + ASK_AGAIN;
        }
        self.advance(now);
    }

    fn try_letter(&mut self, index: usize, now: Moment) {
        if !self.retry.open.contains(&index) {
            return;
        }
        let letter = &self.retry.batch[index].letter;
        let is_record = !matches!(
            letter.why.reason,
            Reason::MalformedRow | Reason::InvalidTopic
        );
        let name = letter.record.topic.to_string();
        let key = letter.key.as_ref().map_or(index as u64, hash_of);
        let record = letter.record.clone();
        let why = letter.why.clone();
        match self.topics.id(&name).filter(|_| is_record) {
            Some(topic) => {
                self.topics.ask_anew(topic, now);
                self.trial.push(Item::letter(index, record, topic, key));
            }
            None => self.letter_failed(index, why),
        }
    }

    /// Letters whose topic is not to be had have failed; one that was not asked for yet is waited for.
    fn fail_unsendable(&mut self) {
        let mut failed = Vec::new();
        for item in self.trial.waiting() {
            let Source::Letter { index, .. } = &item.source else {
                continue;
            };
            let name = self.topics.name(item.topic);
            let message = if self.breaker.is_tripped(name) {
                format!("topic {name} is tripped")
            } else {
                match self.topics.why_not(item.topic) {
                    Some(WhyNot::Absent) => format!("topic {name} does not exist"),
                    Some(WhyNot::Denied(right)) => right.refusal(name),
                    Some(WhyNot::Silent(_)) | None => continue,
                }
            };
            failed.push((*index, message));
        }
        for (index, message) in failed {
            let why = Why {
                reason: Reason::TopicAbsent,
                code: None,
                message,
            };
            self.letter_failed(index, why);
        }
    }

    pub(super) fn letter_delivered(&mut self, index: usize, now: Moment) {
        if self.retry.open.remove(&index) {
            self.progress_at = now;
            self.retry
                .settlement
                .delivered
                .push(self.retry.batch[index].id);
        }
    }

    /// The letter was refused again: what stands behind it of its key stays as well.
    pub(super) fn letter_failed(&mut self, index: usize, why: Why) {
        if !self.retry.open.remove(&index) {
            return;
        }
        let letter = &self.retry.batch[index].letter;
        self.say(Notice::RetryFailed {
            event_id: String::from_utf8_lossy(&letter.event_id).into_owned(),
            message: why.message.clone(),
        });
        let Stored { id, letter } = &self.retry.batch[index];
        self.retry.settlement.failed.push((*id, why));
        let Some(key) = letter.key.clone() else {
            return;
        };
        self.parked.give_up_retry(&key);
        let batch = &self.retry.batch;
        let is_of_it = |index: usize| batch[index].letter.key.as_ref() == Some(&key);
        // One that is with the producer may be delivered, and then has to be settled.
        let out: HashSet<usize> = self.trial.out().filter_map(Item::letter_index).collect();
        self.retry
            .open
            .retain(|index| !is_of_it(*index) || out.contains(index));
        self.trial.take(|item| match &item.source {
            Source::Letter { index, .. } => is_of_it(*index),
            Source::Event(_) => false,
        });
    }

    fn pump_settling(&mut self, now: Moment) {
        if self.retry.state == State::Settling && now >= self.retry.ask_at {
            self.retry.ask_at = Moment::MAX;
            self.retry.parked_since = self.parking.keys_under_way();
            let settlement = self.retry.settlement.clone();
            self.orders.push_back(Order::Letters(Statement::Settle {
                epoch: self.parking.epoch,
                settlement,
            }));
        }
    }

    /// It is in the table; of these keys nothing is parked there any more.
    pub fn on_settled(&mut self, epoch: u64, free: &[EventKey], now: Moment) {
        if epoch != self.parking.epoch || self.retry.state != State::Settling {
            return;
        }
        let delivered = self.retry.settlement.delivered.len();
        for key in free {
            // What was parked of it since is retried next.
            if !self.retry.parked_since.contains(key) {
                self.parked.unpark(key);
            }
        }
        self.deliveries.retried += u64::try_from(delivered).unwrap_or_default();
        if delivered > 0 {
            self.say(Notice::Retried {
                letters: delivered,
                free: free.len(),
            });
        }
        self.retry.state = State::Idle;
        self.retry.batch.clear();
        self.retry.parked_since.clear();
        self.retry.ask_at = now;
        self.advance(now);
    }

    /// It is not: it is written again, for what was delivered must not be sent twice.
    pub fn on_not_settled(&mut self, epoch: u64, why: Ill, now: Moment) {
        if epoch != self.parking.epoch || self.retry.state != State::Settling {
            return;
        }
        self.remind(Notice::NotParked(why.what, why.remedy), now);
        self.retry.ask_at = now + ASK_AGAIN;
        self.advance(now);
    }
}
