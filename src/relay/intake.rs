//! The machine's reading side: one WAL message to at most one record.

use std::time::Duration;

use super::Moment;
use super::held::Waiting;
use super::ledger::Take;
use super::machine::{Machine, Poisoned};
use super::mapping::{Clock, Part};
use super::orders::Notice;
use super::outbox::{Draft, Row, Shape, Stamp, Unmapped};
use super::route::{self, NoPartition};
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
        let mut name = std::mem::take(&mut self.topic_name);
        match row.draft(shape, &self.settings.mapping, &mut name) {
            Ok(draft) => match self.topics.id(&name) {
                Some(topic) => self.hand_over(ticket, draft, &name, topic, now, outlet),
                None => self.poison(
                    ticket,
                    row.event_id(shape),
                    "more than 10,000 topics: an id in the topic's name?",
                ),
            },
            Err(bad) => self.poison(ticket, row.event_id(shape), &bad.reason),
        }
        self.topic_name = name;
    }

    fn poison(&mut self, ticket: Ticket, event_id: &[u8], reason: &str) {
        self.poisoned = Some(Poisoned {
            ticket,
            event_id: String::from_utf8_lossy(event_id).into_owned(),
            lsn: self.current_lsn,
            reason: reason.to_owned(),
            remedy: "a row in the log cannot be changed: insert a corrected event under a new event_id and park this one (parking is not built yet), or change what makes it unpublishable (mapping, topic template, topic limit)".to_owned(),
        });
    }

    fn hand_over(
        &mut self,
        ticket: Ticket,
        draft: Draft<'_>,
        name: &str,
        topic: u16,
        now: Moment,
        outlet: &mut impl Outlet,
    ) {
        let event_id = draft.headers[0].value.as_deref().unwrap_or_default();
        if draft.forged_headers > 0 && !self.forged_said {
            self.forged_said = true;
            let event_id = String::from_utf8_lossy(event_id).into_owned();
            self.say(Notice::ForgedHeader { event_id });
        }
        let was_halted_at = self
            .halted
            .as_ref()
            .is_some_and(|h| h.event_id.as_bytes() == event_id);
        let partitions = self.topics.partitions(topic);
        let partition = match partitions {
            // Chosen when its topic is known.
            None => -1,
            Some(n) => match route::choose(draft.partition, &draft.key, name, n) {
                Ok(partition) => partition,
                Err(error) => return self.no_partition(ticket, event_id, &error),
            },
        };
        let record = Record {
            topic: name.into(),
            partition,
            timestamp_ms: self.timestamp(draft.stamp, event_id, now),
            key: draft.key,
            value: draft.value,
            headers: draft.headers,
        };
        let must_wait = was_halted_at || partitions.is_none() || self.held.has_key(draft.key_hash);
        if must_wait {
            if was_halted_at {
                self.gate = Some(ticket);
            }
            self.ledger.held(ticket, topic, record.size());
            let record = record.into_owned();
            self.held.push(Waiting {
                ticket,
                topic,
                key: draft.key_hash,
                partition: draft.partition,
                record,
            });
        } else {
            self.note_sent(ticket, &record, topic, now);
            outlet.send(&record, ticket);
        }
    }

    pub(super) fn no_partition(&mut self, ticket: Ticket, event_id: &[u8], error: &NoPartition) {
        let column = self.settings.mapping.columns.get(Part::Partition);
        let column = column.unwrap_or("partition");
        self.poison(ticket, event_id, &format!("column {column}: {error}"));
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
        self.stamp(millis, now)
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
