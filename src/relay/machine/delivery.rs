//! Kafka: what was delivered, what was refused and why, topics, silence.

use std::time::Duration;

use super::poison::behind_another;
use super::{
    Class, Close, Ill, KafkaCode, Lead, Lsn, Machine, Moment, Notice, Order, PgTimestamp, Poisoned,
    Producer, Purge, RECHECK_INTERVAL, REST_MAX, REST_MIN, Reopen, Report, STAMPLESS, Stamps,
    Stream, Ticket, TopicState,
};
use crate::error::kafka;
use crate::record::{Record, Right};
use crate::relay::held::Waiting;
use crate::relay::mapping::Part;
use crate::relay::orders::Heard;
use crate::relay::route;

impl Machine {
    pub fn on_reports(&mut self, reports: &[Report], now: Moment) {
        let mut has_failed = false;
        for report in reports {
            match report.result {
                Ok(()) => self.on_delivered(report.ticket, now),
                Err(code) => {
                    has_failed = true;
                    self.on_refused(report.ticket, code, now);
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

    pub(super) fn on_delivered(&mut self, ticket: Ticket, now: Moment) {
        let Some(delivered) = self.ledger.delivered(ticket) else {
            return;
        };
        self.progress_at = now;
        self.refused = None;
        if !self.suspects.is_empty() {
            self.suspects.remove(&ticket);
        }
        let topic = usize::from(delivered.topic);
        if self.tally.len() <= topic {
            self.tally.resize(topic + 1, (0, 0));
        }
        self.tally[topic].0 += 1;
        self.tally[topic].1 += u64::from(delivered.content);
        match self.deliveries.commit_times.last_mut() {
            Some(last) if last.0 == delivered.commit_time => last.1 += 1,
            Some(_) | None => self
                .deliveries
                .commit_times
                .push((delivered.commit_time, 1)),
        }
        self.passed_gate(ticket);
    }

    pub(super) fn flush_tally(&mut self) {
        for (topic, (events, bytes)) in self.tally.iter_mut().enumerate() {
            if *events > 0 {
                let topic = u16::try_from(topic).expect("a topic's number");
                let name = self.topics.name(topic).to_owned();
                self.deliveries.by_topic.push((name, *events, *bytes));
                (*events, *bytes) = (0, 0);
            }
        }
    }

    pub(super) fn on_refused(&mut self, ticket: Ticket, code: KafkaCode, now: Moment) {
        if code == kafka::TOPIC_AUTHORIZATION_FAILED
            && let Some(topic) = self.ledger.topic(ticket)
        {
            self.topics.refuses(topic, now);
        }
        self.ledger.lost(ticket);
        self.is_refused = true;
        let class = kafka::entry(code).class;
        let is_cause = class != Class::Consequence && code != kafka::FATAL;
        if is_cause && self.cause.is_none() {
            self.cause = Some(code);
        }
        if class == Class::Poison {
            self.suspects.insert(ticket, code);
        }
    }

    /// Stops handing over until the producer was built anew.
    pub(in crate::relay) fn rebuild(&mut self, purge: Purge, forget: bool) {
        let forgets = match self.producer {
            Producer::Rebuilding { forget } => forget,
            Producer::Ready | Producer::Resting { .. } => false,
        };
        self.producer = Producer::Rebuilding {
            forget: forget || forgets,
        };
        self.orders.push_back(Order::Rebuild(purge));
    }

    /// The producer is new, every report of the old one has been seen. `heard`: the broker was
    /// heard out; else what was reported as purged may have been written.
    pub fn on_rebuilt(&mut self, heard: Heard, now: Moment) {
        let Producer::Rebuilding { forget } = self.producer else {
            return;
        };
        self.held.clear();
        // What is before the event to halt at has to come again, and then that as well.
        if let Some(poisoned) = self.poisoned.take() {
            self.ledger.lost(poisoned.ticket);
        }
        // One that is tried is not read again.
        self.gate = self.gate.filter(|gate| self.ledger.is_aside(*gate));
        self.release_due = false;
        self.producer = Producer::Ready;
        // Refused without a reason of its own: the producer itself was dead.
        let is_refused = std::mem::take(&mut self.is_refused);
        let cause = self.cause.take().or(is_refused.then_some(kafka::FATAL));
        if forget {
            self.forget();
            self.close(Close::Abort, Reopen::At(now));
        } else {
            self.ledger.lose_all();
            if heard == Heard::NotAll && self.ledger.lost_events() > 0 {
                self.start_tails();
            }
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

    pub(super) fn forget(&mut self) {
        self.ledger.forget();
        self.refused = None;
        self.suspects.clear();
        self.suspicion = None;
        self.gate = None;
        self.poisoned = None;
        self.forget_parked();
        self.start_tails();
        self.received_ever = Lsn::INVALID;
        self.received_before = Lsn::INVALID;
        self.highest_reported = None;
        if let Some(stop) = self.resume.take() {
            if stop.complete {
                self.tails.stop();
            }
            self.ledger.resume(stop.last, stop.open);
            self.highest_reported = Some(stop.reported);
        }
    }

    /// What to do about the refusal, and how long to rest before everything is read again.
    pub(super) fn classify_cause(&mut self, cause: Option<KafkaCode>, now: Moment) -> Duration {
        let Some(code) = cause else {
            return Duration::ZERO;
        };
        let entry = kafka::entry(code);
        self.say_refused(code, now);
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

    pub(super) fn say_refused(&mut self, code: KafkaCode, now: Moment) {
        let entry = kafka::entry(code);
        self.refused = Some(Ill {
            what: format!("the broker refuses: {} ({})", entry.name, code.0),
            remedy: entry.remedy.to_owned(),
        });
        self.remind(
            Notice::ProducerRebuilt {
                cause: format!("{} ({})", entry.name, code.0),
                remedy: entry.remedy.to_owned(),
            },
            now,
        );
    }

    /// Who of the refused batch was it? They are sent apart when they come again.
    pub(super) fn isolate(&mut self, code: KafkaCode, now: Moment) -> Duration {
        const INVALID_TIMESTAMP: KafkaCode = KafkaCode(32);
        if code == INVALID_TIMESTAMP
            && let Some(kept) = self.drop_stamps(now)
        {
            self.say(Notice::ClockSkew { kept });
            self.suspects.clear();
            return Duration::ZERO;
        }
        self.suspicion = Some(code);
        // Its limits may have changed.
        let names = self.topics.names().map(str::to_owned);
        self.orders.extend(names.map(Order::Lookup));
        Duration::ZERO
    }

    /// For a minute, the timestamps that the broker is likely to have refused are not given: of a
    /// column's first those that are ahead of the commit, so that one wrong date does not take its
    /// neighbours' times. `None`: nothing was given any more.
    pub(super) fn drop_stamps(&mut self, now: Moment) -> Option<Stamps> {
        let is_column = self.settings.mapping.columns.get(Part::Timestamp).is_some();
        let kept = match self.stamps(now) {
            Stamps::All if is_column => Stamps::Past,
            Stamps::All | Stamps::Past => Stamps::None,
            Stamps::None => return None,
        };
        self.stamps = (kept, now + STAMPLESS);
        Some(kept)
    }

    fn stamps(&self, now: Moment) -> Stamps {
        let (stamps, until) = self.stamps;
        if now < until { stamps } else { Stamps::All }
    }

    /// The timestamp that a record is given; `None` is the time of sending.
    pub(in crate::relay) fn stamp(
        &self,
        millis: i64,
        committed: PgTimestamp,
        now: Moment,
    ) -> Option<i64> {
        let is_given = match self.stamps(now) {
            Stamps::All => true,
            Stamps::Past => millis <= committed.unix_millis(),
            Stamps::None => false,
        };
        (millis >= 0 && is_given).then_some(millis)
    }

    /// What the cluster says about a topic.
    pub fn on_topic(&mut self, name: &str, state: &TopicState, now: Moment) {
        let denied = TopicState::Denied(Right::Write);
        let is_there = matches!(state, TopicState::Present { .. });
        let state = if is_there && self.topics.is_left_alone(name, now) {
            &denied
        } else {
            state
        };
        let is_usable = self.topics.answer(name, state, now);
        self.review_sizes(name);
        match state {
            TopicState::Present { partitions, .. } if is_usable => {
                self.say(Notice::TopicPresent {
                    topic: name.to_owned(),
                    partitions: *partitions,
                });
            }
            TopicState::Present { .. } => {}
            TopicState::Absent => {
                let notice = Notice::TopicAbsent {
                    topic: name.to_owned(),
                    event_id: self.held.first_for(name, &self.topics),
                };
                self.remind(notice, now);
            }
            TopicState::Denied(right) => self.remind(
                Notice::TopicDenied {
                    topic: name.to_owned(),
                    right: *right,
                },
                now,
            ),
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
            self.reminders.remove(name);
        }
        self.advance(now);
    }

    /// How many partitions the producer knows of its topics.
    pub fn on_partitions(&mut self, known: &[(String, i32)], now: Moment) {
        for (topic, partitions) in known {
            self.topics.has_partitions(topic, *partitions);
        }
        self.advance(now);
    }

    fn pump_growth(&mut self) {
        for grown in self.topics.grow(|topic| self.ledger.is_in_flight(topic)) {
            self.say(Notice::TopicGrown(grown));
            self.release_due = true;
        }
    }

    pub(super) fn pump_kafka(&mut self, now: Moment) {
        for name in self.topics.questions(now) {
            self.orders.push_back(Order::Lookup(name));
        }
        self.pump_growth();
        self.pump_held(now);
        self.pump_tails(now);
        self.pump_stall(now);
    }

    pub(super) fn pump_stall(&mut self, now: Moment) {
        let is_in_flight = self.ledger.load().in_flight_events > 0 || self.trial.is_out();
        let is_held_up = !self.has_room() || self.topics.is_unanswered();
        let is_blocked = is_in_flight || (!self.held.is_empty() && is_held_up);
        if !is_blocked {
            self.progress_at = now;
            self.rest = REST_MIN;
        }
        if !self.held.is_empty() && self.ledger.span() >= self.span_events_max() {
            // While the cluster is only being asked (for a topic, or for its end) nobody has to act.
            let topics: Vec<String> = self.topics.absent().map(str::to_owned).collect();
            if !topics.is_empty() {
                self.remind(Notice::Blocked { topics }, now);
            }
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

    pub(super) fn pump_held(&mut self, now: Moment) {
        if self.held.is_empty() || self.producer != Producer::Ready || self.lead != Lead::Held {
            return;
        }
        let load = self.ledger.load();
        let room = self
            .settings
            .in_flight_events_max
            .saturating_sub(load.in_flight_events);
        let is_worth_it =
            load.in_flight_events == 0 || room >= self.settings.in_flight_events_max / 4;
        if !self.release_due || !is_worth_it || room == 0 {
            return;
        }
        let room_bytes = self
            .settings
            .in_flight_bytes_max
            .saturating_sub(load.in_flight_bytes);
        let (topics, tails, trial) = (&self.topics, &self.tails, &self.trial);
        let (released, ran_out) = self.held.release(
            |waiting| {
                let at = waiting.origin.position.commit_lsn;
                // What can be no record waits for no topic, unless that is tripped.
                let is_condemned = waiting.verdict.is_some() && !topics.is_tripped(waiting.topic);
                is_condemned
                    // What is in its topic already waits for nothing, a tripped topic included.
                    || tails.has(waiting.topic, at, &waiting.origin.event_id)
                    || (topics.partitions(waiting.topic).is_some()
                        && tails.is_read(waiting.topic, at))
            },
            |waiting| trial.has_before(waiting.key, waiting.ticket),
            room,
            room_bytes,
        );
        self.release_due = ran_out;
        for waiting in released {
            self.send_released(waiting, now);
        }
    }

    fn send_released(&mut self, mut waiting: Waiting, now: Moment) {
        // One that was released with it is halted at: this one comes again.
        let is_behind_halt = |poisoned: &Poisoned| poisoned.ticket < waiting.ticket;
        if self.poisoned.as_ref().is_some_and(is_behind_halt) {
            return;
        }
        // One that was released with it may have been parked, or is tried, since.
        if self.is_behind(&waiting) {
            self.park(waiting, behind_another());
            return;
        }
        if self.trial.has_before(waiting.key, waiting.ticket) || self.held.has_before(&waiting) {
            self.back_to_held(waiting);
            return;
        }
        if let Some(why) = waiting.verdict.take() {
            self.condemn(waiting, why, now);
            return;
        }
        let origin = &waiting.origin;
        let at = origin.position.commit_lsn;
        if self.tails.has(waiting.topic, at, &origin.event_id) {
            self.found_in_tail(waiting.ticket, now);
            return;
        }
        let topic = waiting.topic;
        let partitions = self.topics.partitions(topic).expect("released as present");
        let record = &mut waiting.record;
        match route::choose(waiting.partition, &record.key, &record.topic, partitions) {
            Ok(partition) => record.partition = partition,
            Err(error) => {
                let why = self.no_partition(&error);
                self.condemn(waiting, why, now);
                return;
            }
        }
        if let Some(why) = self.apart(waiting.ticket, topic, record_bytes(&waiting.record)) {
            self.try_apart(waiting, why);
            return;
        }
        let committed = waiting.origin.commit_time;
        let mut record = waiting.record;
        record.timestamp_ms = record
            .timestamp_ms
            .and_then(|ms| self.stamp(ms, committed, now));
        self.note_sent(waiting.ticket, &record, topic, now);
        self.orders.push_back(Order::Send(waiting.ticket, record));
    }

    pub(in crate::relay) fn note_sent(
        &mut self,
        ticket: Ticket,
        record: &Record<'_>,
        topic: u16,
        now: Moment,
    ) {
        if self.ledger.load().in_flight_events == 0 {
            self.progress_at = now;
        }
        self.ledger.sent(ticket, topic, record.size());
    }
}

/// What a record takes of its topic's limit before it is compressed, in bytes.
pub(in crate::relay) fn record_bytes(record: &Record<'_>) -> usize {
    let headers = record.headers.iter();
    let headers = headers.map(|h| h.name.len() + h.value.as_ref().map_or(0, |v| v.len()) + 4);
    record.size().content + headers.sum::<usize>()
}
