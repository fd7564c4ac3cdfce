//! The machine's reading side: one WAL message to at most one record.

use std::time::Duration;

use super::Moment;
use super::held::{Origin, Waiting};
use super::ledger::Take;
use super::machine::{Machine, Try, behind_another, record_bytes};
use super::mapping::{Clock, Part};
use super::orders::{Notice, OnPoison};
use super::outbox::{BadRow, Draft, Row, Shape, Stamp, Unmapped};
use super::parked::hash_of;
use super::route::{self, NoPartition};
use crate::dead_letter::{EventKey, Position, Reason, Why};
use crate::error::{Exit, Failure};
use crate::lsn::Lsn;
use crate::record::{Record, Ticket};
use crate::wire::DecodeError;
use crate::wire::pgoutput::{Message, Oid, Relation, Tuple};
use crate::wire::replication::{ReplicationMessage, Reply};

/// Takes records; never refuses to the caller's face: what went wrong comes back as a report.
pub trait Outlet {
    fn send(&mut self, record: &Record<'_>, ticket: Ticket);
}

/// What is done with an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Send,
    /// It is in its topic already.
    Known,
    /// For its topic, or behind another event of its key.
    Wait,
    /// An earlier run halted at it: it goes alone, and nothing behind it.
    Halted,
    Apart(Try),
    /// Its key is parked.
    Park,
    /// Its topic has not the partition that it asks for.
    NoPartition,
}

impl Machine {
    /// The body of one CopyData message of the stream.
    pub fn on_copy_data(&mut self, body: &[u8], now: Moment, outlet: &mut impl Outlet) {
        if let Err(error) = self.read(body, now, outlet) {
            let failure = self.undecodable(&error);
            self.fail(failure, None, now);
        }
    }

    /// How long the row that came last had been committed when the server sent it: how far behind
    /// the stream is. Both times are the server's, so that no two clocks are compared.
    #[must_use]
    pub fn lag(&self) -> Duration {
        let micros = self.sent_at.0.saturating_sub(self.current_time.0);
        Duration::from_micros(u64::try_from(micros).unwrap_or(0))
    }

    fn read(
        &mut self,
        body: &[u8],
        now: Moment,
        outlet: &mut impl Outlet,
    ) -> Result<(), DecodeError> {
        match ReplicationMessage::decode(body)? {
            ReplicationMessage::Keepalive { wal_end, reply, .. } => {
                self.received(wal_end);
                if reply == Reply::Requested {
                    self.feedback.reply_requested();
                }
                if let Err(error) = self.ledger.keepalive(wal_end) {
                    self.on_ledger_error(&error, now);
                }
                self.passed(wal_end, now);
                Ok(())
            }
            ReplicationMessage::XLogData {
                wal_start,
                clock,
                data,
                ..
            } => {
                self.received(wal_start);
                self.sent_at = clock;
                self.on_message(Message::decode(data)?, now, outlet)
            }
        }
    }

    /// Everything before this position has come by. Rows that were written before a column was
    /// renamed or dropped are behind us; what the table is now, it is for good.
    fn passed(&mut self, wal_end: Lsn, now: Moment) {
        if let Some((from, why)) = &self.unfit_from
            && wal_end >= *from
        {
            let why = why.clone();
            self.fail(why, None, now);
        }
    }

    fn on_message(
        &mut self,
        message: Message<'_>,
        now: Moment,
        outlet: &mut impl Outlet,
    ) -> Result<(), DecodeError> {
        match message {
            Message::Begin(triple) => {
                self.current_lsn = triple.commit_lsn;
                self.current_xid = triple.xid;
                self.current_time = triple.commit_time;
                self.in_transaction = true;
                self.ledger.begin(triple);
            }
            Message::Commit { end_lsn, .. } => {
                self.in_transaction = false;
                self.received(end_lsn);
                if let Err(error) = self.ledger.commit(end_lsn) {
                    self.on_ledger_error(&error, now);
                }
            }
            Message::Relation(relation) => self.on_relation(&relation),
            Message::Type {
                oid,
                namespace,
                name,
            } => self.domains.learn(oid, namespace, name),
            Message::Insert { .. } if !self.in_transaction => {
                return Err(DecodeError::Malformed {
                    at: 0,
                    what: "an Insert outside of a transaction",
                });
            }
            Message::Insert { relation, tuple } => {
                self.on_insert(relation, &tuple, now, outlet);
            }
            Message::Other(_) => {}
        }
        Ok(())
    }

    fn on_relation(&mut self, relation: &Relation<'_>) {
        if relation.oid == Oid(self.table_oid) {
            let shape = Shape::resolve(relation, &self.settings.mapping, &self.domains);
            self.shape = Some(shape.map(Box::new));
        }
    }

    fn on_insert(
        &mut self,
        relation: Oid,
        tuple: &Tuple<'_>,
        now: Moment,
        outlet: &mut impl Outlet,
    ) {
        if relation != Oid(self.table_oid) {
            if self.foreign.insert(relation.0) {
                self.say(Notice::ForeignTable { oid: relation.0 });
            }
            return;
        }
        let shape = match self.shape.take() {
            Some(Ok(shape)) => shape,
            Some(Err(unmapped)) => {
                let failure = self.unmapped(&unmapped);
                self.shape = Some(Err(unmapped));
                self.fail(failure, None, now);
                return;
            }
            None => {
                let error = DecodeError::Malformed {
                    at: 0,
                    what: "an Insert before its Relation message",
                };
                let failure = self.undecodable(&error);
                self.fail(failure, None, now);
                return;
            }
        };
        let row = Row::read(tuple);
        match self.ledger.insert(row.event_id(&shape)) {
            Err(error) => self.on_ledger_error(&error, now),
            Ok(Take::PassOver) => {}
            Ok(Take::New(ticket) | Take::Again(ticket)) => {
                self.offer(ticket, &row, &shape, now, outlet);
            }
        }
        self.shape = Some(Ok(shape));
    }

    fn unmapped(&self, unmapped: &Unmapped) -> Failure {
        let remedy = match unmapped {
            Unmapped::Missing { setting, has, .. } => format!(
                "the row was written when the columns were {has}: run with {setting} until it is past, then with the present name"
            ),
            Unmapped::WrongType { part, .. } => {
                format!(
                    "name another column with --column {part}=COLUMN, or none: --column {part}="
                )
            }
        };
        Failure::refused(
            format!("{unmapped} in the transaction at {}", self.current_lsn),
            format!("{remedy}; nothing was skipped, the slot waits in front of this row"),
        )
    }

    fn offer(
        &mut self,
        ticket: Ticket,
        row: &Row<'_>,
        shape: &Shape,
        now: Moment,
        outlet: &mut impl Outlet,
    ) {
        let event_id = row.event_id(shape);
        let is_settled = if self.is_healing {
            self.parked.is_settled_row(event_id, self.current_xid)
        } else {
            self.parked.is_settled(event_id, self.position())
        };
        if is_settled {
            self.pass_over(ticket, now);
            return;
        }
        let mut name = std::mem::take(&mut self.topic_name);
        name.clear();
        match row.draft(shape, &self.settings.mapping, &mut name) {
            Ok(draft) => match self.topics.id(&name) {
                Some(topic) => {
                    self.hand_over(ticket, draft, row, shape, (&name, topic), now, outlet);
                }
                None => {
                    let bad = BadRow {
                        kind: Reason::InvalidTopic,
                        reason: "more than 10,000 topics: an id in the topic's name?".to_owned(),
                    };
                    self.bad_row(ticket, row, shape, "", bad, now);
                }
            },
            Err(bad) => self.bad_row(ticket, row, shape, &name, bad, now),
        }
        self.topic_name = name;
    }

    /// A row that can be no record. `name` is its topic, where the row gives a legal one.
    fn bad_row(
        &mut self,
        ticket: Ticket,
        row: &Row<'_>,
        shape: &Shape,
        name: &str,
        bad: BadRow,
        now: Moment,
    ) {
        let name = match bad.kind {
            Reason::InvalidTopic => "",
            _ => name,
        };
        let id = self.topics.id(name).or_else(|| self.topics.id(""));
        let Some(topic) = id else {
            let failure = Failure::halted(
                bad.reason,
                "put no id into the topic template: more than 10,000 topics are more than any cluster likes",
            );
            self.fail(failure, None, now);
            return;
        };
        let origin = self.origin(row, shape);
        let key = match &origin.key {
            Some(key) => hash_of(key),
            None => u64::try_from(ticket.0).unwrap_or(u64::MAX),
        };
        let waiting = Waiting {
            ticket,
            topic,
            key,
            partition: None,
            record: Record {
                topic: name.to_owned().into(),
                ..row.remains(shape)
            },
            origin,
            verdict: None,
        };
        let why = Why {
            reason: bad.kind,
            code: None,
            message: bad.reason,
        };
        self.ledger.aside(ticket, topic, waiting.record.size());
        if self.is_behind(&waiting) {
            let why = Why {
                message: format!("{}; an earlier event of its key is parked", why.message),
                ..why
            };
            self.park(waiting, why);
        } else if self.settings.on_poison == OnPoison::Park
            && (self.held.has_key(key) || self.trial.has_before(key, ticket))
        {
            self.ledger.held(ticket, topic, waiting.record.size());
            self.held.push(Waiting {
                verdict: Some(why),
                ..waiting
            });
        } else {
            self.condemn(waiting, why, now);
        }
    }

    /// What is kept of an event beside its record for the case that it has to be parked.
    fn origin(&self, row: &Row<'_>, shape: &Shape) -> Origin {
        let (aggregate_type, aggregate_id) = row.key(shape);
        let position = self.position();
        let mut event_id = row.event_id(shape).to_vec();
        if event_id.is_empty() {
            event_id = format!("lsn:{}#{}", position.commit_lsn, position.ordinal).into_bytes();
        }
        Origin {
            event_id,
            key: aggregate_id.map(|id| EventKey {
                aggregate_type: aggregate_type.map(Box::from),
                aggregate_id: Box::from(id),
            }),
            aggregate_type: aggregate_type.map(Box::from),
            position,
            xid: self.current_xid,
            commit_time: self.current_time,
        }
    }

    fn position(&self) -> Position {
        Position {
            generation: self.generation,
            commit_lsn: self.current_lsn,
            ordinal: self.ledger.ordinal(),
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one caller, split off for its length"
    )]
    fn hand_over(
        &mut self,
        ticket: Ticket,
        draft: Draft<'_>,
        row: &Row<'_>,
        shape: &Shape,
        (name, topic): (&str, u16),
        now: Moment,
        outlet: &mut impl Outlet,
    ) {
        let event_id = row.event_id(shape);
        if draft.forged_headers > 0 && !self.forged_said {
            self.forged_said = true;
            let event_id = String::from_utf8_lossy(event_id).into_owned();
            self.say(Notice::ForgedHeader { event_id });
        }
        let partitions = self.topics.partitions(topic);
        let chosen = partitions.map(|n| route::choose(draft.partition, &draft.key, name, n));
        let hash = draft.key_hash;
        let asked = draft.partition;
        let record = Record {
            topic: name.into(),
            // Chosen when its topic is known.
            partition: chosen.clone().and_then(Result::ok).unwrap_or(-1),
            timestamp_ms: self.timestamp(draft.stamp, event_id, now),
            key: draft.key,
            value: draft.value,
            headers: draft.headers,
        };
        let fate = self.fate(ticket, row, shape, hash, topic, &record);
        let (fate, error) = match (fate, chosen) {
            (Fate::Send, Some(Err(error))) => (Fate::NoPartition, Some(error)),
            (fate, _) => (fate, None),
        };
        match fate {
            Fate::Send => {
                self.note_sent(ticket, &record, topic, now);
                outlet.send(&record, ticket);
                return;
            }
            Fate::Known => {
                self.found_in_tail(ticket, now);
                return;
            }
            Fate::Wait | Fate::Halted | Fate::Apart(_) | Fate::Park | Fate::NoPartition => {}
        }
        let waiting = Waiting {
            ticket,
            topic,
            key: hash,
            partition: asked,
            record: record.into_owned(),
            origin: self.origin(row, shape),
            verdict: None,
        };
        match fate {
            Fate::Send | Fate::Known => {}
            Fate::Park => self.park(waiting, behind_another()),
            Fate::Apart(why) => self.try_apart(waiting, why),
            Fate::Halted => {
                self.gate = Some(ticket);
                self.try_apart(waiting, Try::Halted);
            }
            Fate::NoPartition => {
                if let Some(error) = error {
                    let why = self.no_partition(&error);
                    self.ledger.aside(ticket, topic, waiting.record.size());
                    self.condemn(waiting, why, now);
                }
            }
            Fate::Wait => {
                self.ledger.held(ticket, topic, waiting.record.size());
                self.held.push(waiting);
            }
        }
    }

    /// What is to be done with an event that can be a record.
    fn fate(
        &mut self,
        ticket: Ticket,
        row: &Row<'_>,
        shape: &Shape,
        hash: u64,
        topic: u16,
        record: &Record<'_>,
    ) -> Fate {
        if !self.parked.is_empty()
            && let (aggregate_type, Some(id)) = row.key(shape)
            && self.parked.holds(hash, aggregate_type, id, self.position())
        {
            return Fate::Park;
        }
        let (at, time) = (self.current_lsn, self.current_time);
        let is_ready = !self.tails.is_on() || self.tails.is_ready(topic, at, time);
        if self.is_halted(row.event_id(shape)) {
            return Fate::Halted;
        }
        // What is tried stays when everything else has to come again: this may be an earlier one.
        let is_behind = self.held.has_key(hash) || self.trial.has_before(hash, ticket);
        let is_usable = self.topics.partitions(topic).is_some();
        if self.tails.is_on() {
            if !is_ready {
                return Fate::Wait;
            }
            if !is_behind && self.tails.has(topic, at, row.event_id(shape)) {
                return Fate::Known;
            }
        }
        if is_behind || !is_usable {
            return Fate::Wait;
        }
        match self.apart(ticket, topic, record_bytes(record)) {
            Some(why) => Fate::Apart(why),
            None => Fate::Send,
        }
    }

    pub(super) fn no_partition(&self, error: &NoPartition) -> Why {
        let column = self.settings.mapping.columns.get(Part::Partition);
        let column = column.unwrap_or("partition");
        // Some topic may have it some day, unless its number can be none.
        let reason = match i32::try_from(error.asked) {
            Ok(0..) => Reason::Refused,
            Ok(_) | Err(_) => Reason::MalformedRow,
        };
        Why {
            reason,
            code: None,
            message: format!("column {column}: {error}"),
        }
    }

    /// What the mapping says, unless Kafka cannot hold it or the broker has just refused such times.
    fn timestamp(&mut self, stamp: Stamp, event_id: &[u8], now: Moment) -> Option<i64> {
        let millis = match stamp {
            Stamp::Clock(Clock::Commit) => self.current_time.unix_millis(),
            Stamp::Clock(Clock::Publish) => return None,
            Stamp::At(millis) => millis,
            Stamp::None => {
                if !self.timeless_said {
                    self.timeless_said = true;
                    let event_id = String::from_utf8_lossy(event_id).into_owned();
                    self.say(Notice::NoTimestamp { event_id });
                }
                return None;
            }
        };
        self.stamp(millis, self.current_time, now)
    }

    fn undecodable(&self, error: &DecodeError) -> Failure {
        match error {
            DecodeError::TwoPhase { .. } => Failure::refused(
                error.to_string(),
                "make the slot anew without two_phase: `walrelay init` does",
            ),
            DecodeError::Truncated { .. }
            | DecodeError::UnknownTag { .. }
            | DecodeError::Malformed { .. } => Failure::new(
                Exit::Unexpected,
                format!(
                    "a message of the stream cannot be read (transaction at {}): {error}",
                    self.current_lsn
                ),
                "nothing was skipped, the slot waits in front of it; report this with the server's version",
            ),
        }
    }
}
