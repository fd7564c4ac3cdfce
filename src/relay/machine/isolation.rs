//! Events that are sent apart from all others: which, when, and what comes of it.

use super::delivery::record_bytes;
use super::{Class, KafkaCode, Lead, Machine, Moment, Notice, Order, REST_MIN, Ticket};
use crate::dead_letter::{Reason, Why};
use crate::error::kafka;
use crate::record::Report;
use crate::relay::held::Waiting;
use crate::relay::route;
use crate::relay::trial::{Bounds, Item, Judged, Outcome, Source};

/// What a record costs in a batch beside its own bytes: the batch's header, lengths and deltas.
const BATCH_OVERHEAD: usize = 61 + 35;

/// Why an event is sent apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum Try {
    /// One of a batch that was refused.
    Suspect,
    /// Larger than its topic's limit, before compression.
    Oversize,
    /// An earlier run halted at it.
    Halted,
    /// Its topic is tripped.
    Probe,
}

impl Machine {
    /// Is this event to be sent apart, for its size or because its batch was refused?
    pub(in crate::relay) fn apart(&self, ticket: Ticket, topic: u16, bytes: usize) -> Option<Try> {
        if !self.suspects.is_empty() && self.suspects.contains_key(&ticket) {
            return Some(Try::Suspect);
        }
        self.is_over(topic, bytes).then_some(Try::Oversize)
    }

    /// Is a record of this size more than its topic takes, before it is compressed?
    fn is_over(&self, topic: u16, bytes: usize) -> bool {
        let limit = self.topics.limit(topic);
        limit.is_some_and(|limit| bytes + BATCH_OVERHEAD > limit)
    }

    /// The cluster has told a topic's limit: what is sent alone for its size may share batches.
    pub(super) fn review_sizes(&mut self, name: &str) {
        if self.trial.is_empty() {
            return;
        }
        let Some(topic) = self.topics.id(name) else {
            return;
        };
        let Some(limit) = self.topics.limit(topic) else {
            return;
        };
        self.trial.review(topic, |record| {
            record_bytes(record) + BATCH_OVERHEAD > limit
        });
    }

    pub(in crate::relay) fn try_apart(&mut self, waiting: Waiting, why: Try) {
        self.ledger
            .aside(waiting.ticket, waiting.topic, waiting.record.size());
        let is_alone = match why {
            Try::Suspect => false,
            Try::Oversize | Try::Halted | Try::Probe => true,
        };
        let mut item = Item::event(waiting, is_alone, why == Try::Probe);
        item.is_gate = why == Try::Halted;
        self.trial.push(item);
    }

    pub(super) fn pump_trial(&mut self, now: Moment) {
        if self.trial.is_empty() || self.lead != Lead::Held {
            return;
        }
        self.pass_over_tried(now);
        self.fail_misplaced(now);
        let bounds = Bounds {
            at_risk: self.ledger.at_risk(),
            delivered_below: self.ledger.delivered_below(),
        };
        let (topics, tails, held) = (&self.topics, &self.tails, &self.held);
        let sent = self.trial.next_group(bounds, now, |item| {
            let partitions = if item.is_probe {
                topics.partitions_anyway(item.topic)
            } else {
                topics.partitions(item.topic)
            }?;
            if let Source::Event(waiting) = &item.source
                && (!tails.is_read(item.topic, waiting.origin.position.commit_lsn)
                    || held.has_before(waiting))
            {
                return None;
            }
            let record = item.record();
            route::choose(item.asked, &record.key, &record.topic, partitions).ok()
        });
        if sent == 0 {
            return;
        }
        self.progress_at = now;
        let mut orders = Vec::new();
        for (number, item) in self.trial.out().enumerate() {
            let partitions = self.topics.partitions_anyway(item.topic).unwrap_or(0);
            let mut record = item.record().clone();
            record.partition = route::choose(item.asked, &record.key, &record.topic, partitions)
                .expect("else it had not been chosen for the group");
            let committed = match &item.source {
                Source::Event(waiting) => waiting.origin.commit_time,
                Source::Letter { .. } => self.sent_at,
            };
            record.timestamp_ms = record
                .timestamp_ms
                .and_then(|ms| self.stamp(ms, committed, now));
            orders.push(Order::Try(Ticket(number), record));
        }
        self.orders.extend(orders);
    }

    /// What asks for a partition that its topic has not is sent to no other.
    fn fail_misplaced(&mut self, now: Moment) {
        let topics = &self.topics;
        let place = |item: &Item| {
            let partitions = topics.partitions_anyway(item.topic)?;
            let record = item.record();
            route::choose(item.asked, &record.key, &record.topic, partitions).err()
        };
        if !self.trial.waiting().any(|item| place(item).is_some()) {
            return;
        }
        let mut errors = Vec::new();
        let misplaced = self.trial.take(|item| {
            let error = place(item);
            let is_misplaced = error.is_some();
            errors.extend(error);
            is_misplaced
        });
        self.release_due = true;
        for (item, error) in misplaced.into_iter().zip(errors) {
            let why = self.no_partition(&error);
            self.failed_alone(item, why, now);
        }
    }

    /// What a dead producer had delivered before, tails read meanwhile say.
    fn pass_over_tried(&mut self, now: Moment) {
        if !self.tails.is_on() {
            return;
        }
        for item in self.trial.waiting() {
            if let Source::Event(waiting) = &item.source {
                let (at, time) = (
                    waiting.origin.position.commit_lsn,
                    waiting.origin.commit_time,
                );
                self.tails.is_ready(item.topic, at, time);
            }
        }
        let tails = &self.tails;
        let known = self.trial.take(|item| match &item.source {
            Source::Event(waiting) => tails.has(
                item.topic,
                waiting.origin.position.commit_lsn,
                &waiting.origin.event_id,
            ),
            Source::Letter { .. } => false,
        });
        for item in known {
            if let Source::Event(waiting) = item.source {
                self.found_in_tail(waiting.ticket, now);
                self.release_due = true;
            }
        }
    }

    pub fn on_trial_reports(&mut self, reports: &[Report], now: Moment) {
        for report in reports {
            self.trial.report(report.ticket.0, report.result);
        }
        self.finish_trial(now);
        self.advance(now);
    }

    fn finish_trial(&mut self, now: Moment) {
        let mut codes = Vec::new();
        let topics = &self.topics;
        let mut denied = Vec::new();
        let finished = self.trial.finish(now, |item, code| {
            codes.push(code);
            if code == kafka::TOPIC_AUTHORIZATION_FAILED {
                denied.push(item.topic);
            }
            let over = |limit| item.record().footprint() > limit;
            match kafka::entry(code).class {
                Class::Poison if matches!(code.0, 10 | 18) => {
                    match topics.limit(item.topic).is_some_and(over) {
                        true => Judged::PoisonAtOnce,
                        false => Judged::Poison,
                    }
                }
                Class::Poison => Judged::Poison,
                Class::Consequence => Judged::Consequence,
                Class::Transient | Class::Definite | Class::Fatal => Judged::Trouble,
            }
        });
        let Some(finished) = finished else {
            return;
        };
        for topic in denied {
            self.topics.refuses(topic, now);
        }
        let is_dead = codes.iter().any(|code| {
            let class = kafka::entry(*code).class;
            matches!(class, Class::Fatal | Class::Definite)
        });
        if std::mem::take(&mut self.is_trial_purged) {
            self.trial.rebuilding();
        } else if is_dead {
            self.trial.rebuilding();
            self.orders.push_back(Order::RebuildTrial);
        }
        if let Some(code) = finished.trouble {
            self.say_refused(code, now);
            self.doubt_tried();
        } else if codes.iter().any(|code| matches!(code.0, 10 | 18)) {
            // The limit may be another than we think.
            self.ask_for_tried();
        }
        for outcome in finished.outcomes {
            match outcome {
                Outcome::Delivered(item) => self.on_tried(item, now),
                Outcome::Poison(item, code) => self.on_poison(item, code, now),
            }
        }
        self.flush_tally();
        self.ledger.settle();
    }

    fn tried_topics(&self) -> Vec<u16> {
        let mut topics: Vec<u16> = self.trial.topics().collect();
        topics.sort_unstable();
        topics.dedup();
        topics
    }

    /// What was refused may be because a topic was made anew. Its partitions are counted again when
    /// nothing of it is on its way.
    fn doubt_tried(&mut self) {
        for topic in self.tried_topics() {
            if !self.ledger.is_in_flight(topic) {
                self.topics.doubt(topic);
            }
        }
    }

    fn ask_for_tried(&mut self) {
        for topic in self.tried_topics() {
            let name = self.topics.name(topic).to_owned();
            self.orders.push_back(Order::Lookup(name));
        }
    }

    fn on_tried(&mut self, item: Item, now: Moment) {
        self.release_due = true;
        match item.source {
            Source::Event(waiting) => {
                self.suspects.remove(&waiting.ticket);
                let bytes = record_bytes(&waiting.record);
                if self.is_over(item.topic, bytes) && self.topics.may_ask_limit(item.topic, now) {
                    // It packs well, or the limit is another by now.
                    let name = self.topics.name(item.topic).to_owned();
                    self.orders.push_back(Order::Lookup(name));
                }
                self.on_delivered(waiting.ticket, now);
                if item.is_probe {
                    self.probe_passed(item.topic);
                }
            }
            Source::Letter { index, .. } => self.letter_delivered(index, now),
        }
        self.suspicion_ends();
    }

    /// All of a refused batch were taken one by one: it was the batch that was too large.
    fn suspicion_ends(&mut self) {
        if self.suspects.is_empty()
            && let Some(code) = self.suspicion.take()
            && matches!(code.0, 10 | 18)
        {
            self.say(Notice::BatchTooLarge);
        }
    }

    fn on_poison(&mut self, item: Item, code: KafkaCode, now: Moment) {
        const INVALID_TIMESTAMP: KafkaCode = KafkaCode(32);
        self.release_due = true;
        if code == INVALID_TIMESTAMP
            && let Some(kept) = self.drop_stamps(now)
        {
            self.say(Notice::ClockSkew { kept });
            self.trial.push(item);
            return;
        }
        let why = refusal(code, &item, self.topics.limit(item.topic));
        self.failed_alone(item, why, now);
    }

    /// An item can never be published as it is.
    fn failed_alone(&mut self, item: Item, why: Why, now: Moment) {
        match item.source {
            Source::Letter { index, .. } => self.letter_failed(index, why),
            Source::Event(waiting) => {
                self.suspects.remove(&waiting.ticket);
                self.suspicion = None;
                if item.is_probe {
                    // As it was: it waits, and none is parked.
                    self.back_to_held(*waiting);
                } else {
                    self.condemn(*waiting, why, now);
                }
            }
        }
    }

    /// The producer of what is sent apart is new.
    pub fn on_trial_rebuilt(&mut self, now: Moment) {
        self.trial.rebuilt();
        self.advance(now);
    }

    /// The event at which an earlier run halted has gone its way.
    pub(super) fn passed_gate(&mut self, ticket: Ticket) {
        if self.gate != Some(ticket) {
            return;
        }
        self.gate = None;
        self.release_due = true;
        self.clear_halted();
        self.rest = REST_MIN;
    }

    pub(in crate::relay) fn is_halted(&self, event_id: &[u8]) -> bool {
        let halted = self.halted.as_ref();
        halted.is_some_and(|halted| halted.event_id.as_bytes() == event_id)
    }

    pub(super) fn clear_halted(&mut self) {
        if let Some(halted) = self.halted.take() {
            self.say(Notice::HaltedEventPassed(halted.event_id));
            self.orders.push_back(Order::ClearHalted);
        }
    }
}

fn refusal(code: KafkaCode, item: &Item, limit: Option<usize>) -> Why {
    let entry = kafka::entry(code);
    let record = item.record();
    let (reason, what) = match code.0 {
        10 | 18 => (
            Reason::TooLarge,
            format!(
                " (key and value of {} bytes, topic {}{})",
                record.size().content,
                record.topic,
                limit.map_or(String::new(), |limit| format!(
                    " takes {limit} bytes, compressed"
                )),
            ),
        ),
        17 => (Reason::InvalidTopic, String::new()),
        _ => (Reason::Refused, String::new()),
    };
    Why {
        reason,
        code: Some(code),
        message: format!(
            "the broker refuses it alone: {} ({}){what}",
            entry.name, code.0
        ),
    }
}
