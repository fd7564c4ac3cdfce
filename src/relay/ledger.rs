//! Which events were taken from the stream and which are delivered: the one place that moves the
//! LSN.
//!
//! A transaction is recognised across reconnects by its [`Triple`]. W is the triple of the last
//! transaction of the contiguous delivered prefix; what the server sends again up to W is passed
//! over, what it sends again after W is matched against what was taken, one by one. Before there is
//! a W, what comes again in front of the first one taken is passed over: another leader delivered it.
//!
//! ```text
//!   re-sent below W │ W │ taken, not yet all delivered │ new
//!   passed over     │   │ matched by triple, in order  │ taken
//! ```
//!
//! # Invariants
//! - `flush()` never passes an undelivered event, and is only ever a position that the server sent
//!   in this session (a Commit's `end_lsn`, or a keepalive's `wal_end` with nothing pending that
//!   came before it).
//! - Nothing is flushed while a transaction that must come by again (W, or one that was taken) has
//!   not: what came instead would be another history.
//! - A ticket is given once, to one event, and never reused.

use std::collections::VecDeque;

use crate::lsn::{Lsn, PgTimestamp, Triple};
use crate::record::{Size, Ticket};

/// What to do with an insert of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// An event that was never taken before.
    New(Ticket),
    /// Taken before, purged undelivered since: to be sent again under its old ticket.
    Again(Ticket),
    /// Delivered, or still on its way: nothing to do.
    PassOver,
}

/// The server's log is not the one that this ledger knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OtherHistory {
    #[error("expected {expected}, the server sent {found}")]
    Different { expected: Triple, found: Triple },
    #[error("expected {expected}, the server has gone on to {at} without it")]
    Missing { expected: Triple, at: Lsn },
    #[error("{triple} came again with other rows")]
    OtherRows { triple: Triple },
    #[error("{found} does not come after {last}")]
    Backwards { last: Triple, found: Triple },
}

/// Where an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Taken, and not yet given to anybody.
    Taken,
    /// Given to the Kafka client.
    InFlight,
    /// Waits in our own memory (for its topic).
    Held,
    /// In our own memory too, and not given up when the producer is: sent apart from all others,
    /// or on its way to the dead-letter table.
    Aside,
    Delivered,
    /// Purged undelivered; the server has it still.
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct Event {
    state: State,
    topic: u16,
    /// Bytes in memory while in flight or held.
    footprint: u32,
    /// Key and value bytes.
    content: u32,
    /// Sequence number of its transaction, modulo 2^32.
    transaction: u32,
}

#[derive(Clone, Debug)]
struct Transaction {
    triple: Triple,
    /// Ticket of its first insert.
    first: usize,
    /// Inserts taken so far.
    count: usize,
    /// `None` until its Commit was seen.
    end_lsn: Option<Lsn>,
}

/// How the transaction that is being received relates to what the ledger knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// No insert of ours was seen yet.
    Unknown,
    BelowW,
    W,
    /// Taken in an earlier session. It is `taken[next]`.
    Resent,
    New,
}

#[derive(Clone, Debug)]
struct Current {
    triple: Triple,
    kind: Kind,
    /// Inserts seen of it in this session.
    seen: usize,
}

/// What is known about an event at the moment it is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivered {
    pub topic: u16,
    /// Key and value bytes.
    pub content: u32,
    pub commit_time: PgTimestamp,
}

/// A transaction of which only the beginning was taken: how to go on with it after a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenTransaction {
    pub triple: Triple,
    pub count: usize,
    /// The `event_id` of its `count`-th insert.
    pub last_event_id: Vec<u8>,
}

/// How much is where, in events and in bytes of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub in_flight_events: usize,
    pub in_flight_bytes: usize,
    pub held_events: usize,
    pub held_bytes: usize,
}

#[derive(Debug, Default)]
pub struct Ledger {
    w: Option<Triple>,
    /// Transactions after W, in commit order; only the last can be without its Commit.
    taken: VecDeque<Transaction>,
    /// Sequence number of `taken[0]`, modulo 2^32.
    taken_base: u32,
    /// Events from the oldest undelivered one on.
    events: VecDeque<Event>,
    /// Ticket of `events[0]`: everything below is delivered.
    base: usize,
    load: Load,
    lost: usize,
    /// The `event_id` of the newest insert taken: the one to compare when a transaction that was
    /// open at the break comes again.
    newest_event_id: Vec<u8>,

    // This session.
    current: Option<Current>,
    /// W has come by in this session, or cannot.
    w_seen: bool,
    /// `taken[..next]` have come by in this session.
    next: usize,
    /// Positions that may be flushed once everything below a ticket is delivered.
    markers: VecDeque<(Lsn, usize)>,
    flush: Lsn,
}

impl Ledger {
    /// A ledger that goes on after a stop.
    #[must_use]
    pub fn resumed(w: Option<Triple>, open: Option<OpenTransaction>) -> Self {
        let mut ledger = Ledger::default();
        ledger.resume(w, open);
        ledger
    }

    /// Goes on after a stop, W and the open transaction as they were stored. The ledger is empty.
    pub fn resume(&mut self, w: Option<Triple>, open: Option<OpenTransaction>) {
        self.w = w;
        if let Some(open) = open {
            let first = self.base;
            self.base += open.count;
            self.taken.push_back(Transaction {
                triple: open.triple,
                first,
                count: open.count,
                end_lsn: None,
            });
            self.newest_event_id = open.last_event_id;
        }
    }

    /// A new replication session: `confirmed_flush` is the slot's, as read before START.
    pub fn session_started(&mut self, confirmed_flush: Lsn) {
        self.current = None;
        self.markers.clear();
        self.flush = Lsn::INVALID;
        self.next = 0;
        // A transaction whose commit record starts below confirmed_flush is never sent again.
        self.w_seen = self.w.is_none_or(|w| confirmed_flush > w.commit_lsn);
    }

    /// Another history: nothing that this ledger knows means anything any more. Tickets go on.
    pub fn forget(&mut self) {
        *self = Ledger {
            base: self.next_ticket(),
            ..Ledger::default()
        };
    }

    pub fn begin(&mut self, triple: Triple) {
        self.current = Some(Current {
            triple,
            kind: Kind::Unknown,
            seen: 0,
        });
    }

    /// An insert into the outbox, carrying this `event_id`.
    ///
    /// # Errors
    /// The transaction is not the one that has to come now.
    ///
    /// # Panics
    /// If no transaction was begun; the caller checks.
    pub fn insert(&mut self, event_id: &[u8]) -> Result<Take, OtherHistory> {
        let mut current = self.current.take().expect("the caller saw a Begin");
        if current.kind == Kind::Unknown {
            current.kind = self.classify(current.triple)?;
            if current.kind == Kind::New {
                self.taken.push_back(Transaction {
                    triple: current.triple,
                    first: self.next_ticket(),
                    count: 0,
                    end_lsn: None,
                });
            }
        }
        let ordinal = current.seen;
        current.seen += 1;
        let take = match current.kind {
            Kind::Unknown | Kind::BelowW | Kind::W => Ok(Take::PassOver),
            Kind::Resent => self.insert_again(current.triple, ordinal, event_id),
            Kind::New => Ok(self.take_new(event_id)),
        };
        self.current = Some(current);
        take
    }

    fn classify(&self, found: Triple) -> Result<Kind, OtherHistory> {
        if let Some(w) = self.w
            && !self.w_seen
        {
            return if found == w {
                Ok(Kind::W)
            } else if found.commit_lsn < w.commit_lsn {
                Ok(Kind::BelowW)
            } else {
                Err(OtherHistory::Different { expected: w, found })
            };
        }
        if let Some(expected) = self.taken.get(self.next).map(|t| t.triple) {
            // Nothing that we took is delivered yet: what stands before it another leader delivered.
            let is_first = self.w.is_none() && self.next == 0;
            return if found == expected {
                Ok(Kind::Resent)
            } else if is_first && found.commit_lsn < expected.commit_lsn {
                Ok(Kind::BelowW)
            } else {
                Err(OtherHistory::Different { expected, found })
            };
        }
        match self.taken.back().map(|t| t.triple).or(self.w) {
            Some(last) if found.commit_lsn <= last.commit_lsn => {
                Err(OtherHistory::Backwards { last, found })
            }
            Some(_) | None => Ok(Kind::New),
        }
    }

    fn insert_again(
        &mut self,
        triple: Triple,
        ordinal: usize,
        event_id: &[u8],
    ) -> Result<Take, OtherHistory> {
        let transaction = &self.taken[self.next];
        if ordinal >= transaction.count {
            return match transaction.end_lsn {
                // It was open when the connection broke: here the part begins that never came.
                None => Ok(self.take_new(event_id)),
                Some(_) => Err(OtherHistory::OtherRows { triple }),
            };
        }
        let is_break = transaction.end_lsn.is_none() && ordinal + 1 == transaction.count;
        if is_break && event_id != self.newest_event_id {
            return Err(OtherHistory::OtherRows { triple });
        }
        let ticket = transaction.first + ordinal;
        let Some(index) = ticket.checked_sub(self.base) else {
            return Ok(Take::PassOver);
        };
        let event = &mut self.events[index];
        match event.state {
            State::Lost => {
                event.state = State::Taken;
                self.lost -= 1;
                Ok(Take::Again(Ticket(ticket)))
            }
            State::Taken | State::InFlight | State::Held | State::Aside | State::Delivered => {
                Ok(Take::PassOver)
            }
        }
    }

    fn take_new(&mut self, event_id: &[u8]) -> Take {
        let ticket = self.next_ticket();
        let last = u32::try_from(self.taken.len() - 1).expect("bounded by the span");
        let transaction = self
            .taken
            .back_mut()
            .expect("a new event belongs to the last transaction");
        transaction.count += 1;
        self.events.push_back(Event {
            state: State::Taken,
            topic: 0,
            footprint: 0,
            content: 0,
            transaction: self.taken_base.wrapping_add(last),
        });
        self.newest_event_id.clear();
        self.newest_event_id.extend_from_slice(event_id);
        Take::New(Ticket(ticket))
    }

    /// The Commit of the current transaction.
    ///
    /// # Errors
    /// A transaction that was taken before came again with fewer rows or another end.
    pub fn commit(&mut self, end_lsn: Lsn) -> Result<(), OtherHistory> {
        let Some(current) = self.current.take() else {
            return Ok(());
        };
        let below = match current.kind {
            // Not one row of ours: it only moves the position.
            Kind::Unknown if self.awaits().is_some() => return Ok(()),
            Kind::Unknown => self.next_ticket(),
            Kind::BelowW => return Ok(()),
            // While it came by, more was delivered: W is a later one now, still to come.
            Kind::W if self.w != Some(current.triple) => return Ok(()),
            Kind::W => {
                self.w_seen = true;
                self.base
            }
            Kind::Resent => {
                let transaction = &mut self.taken[self.next];
                let same_end = transaction.end_lsn.is_none_or(|known| known == end_lsn);
                if current.seen != transaction.count || !same_end {
                    return Err(OtherHistory::OtherRows {
                        triple: current.triple,
                    });
                }
                transaction.end_lsn = Some(end_lsn);
                self.next += 1;
                transaction.first + transaction.count
            }
            Kind::New => {
                self.next = self.taken.len();
                let transaction = self.taken.back_mut().expect("pushed at its first insert");
                transaction.end_lsn = Some(end_lsn);
                transaction.first + transaction.count
            }
        };
        self.mark(end_lsn, below);
        self.settle();
        Ok(())
    }

    /// A primary keepalive, outside or inside of a transaction.
    ///
    /// # Errors
    /// The server has decoded past a transaction that it should have sent.
    pub fn keepalive(&mut self, wal_end: Lsn) -> Result<(), OtherHistory> {
        if let Some(expected) = self.awaits() {
            let receiving_it = self.current.as_ref().is_some_and(|c| c.triple == expected);
            if wal_end > expected.commit_lsn && !receiving_it {
                return Err(OtherHistory::Missing {
                    expected,
                    at: wal_end,
                });
            }
            return Ok(());
        }
        // Inside of a transaction wal_end is that transaction's commit_lsn: nothing is gained.
        if self.current.is_none() {
            // Every transaction that commits below wal_end has come by: once all of them are
            // delivered it is as good as a Commit's end. It has to be kept until then, for the
            // server does not send another while it sees that we have *received* this one.
            let below = self.next_ticket();
            let at = self.markers.back().map_or(wal_end, |m| m.0.max(wal_end));
            self.mark(at, below);
            self.settle();
        }
        Ok(())
    }

    /// The transaction that has to come by before anything may be flushed, be it the one that is
    /// being received.
    fn awaits(&self) -> Option<Triple> {
        if !self.w_seen {
            return self.w;
        }
        self.taken.get(self.next).map(|t| t.triple)
    }

    fn mark(&mut self, lsn: Lsn, below: usize) {
        match self.markers.back_mut().filter(|last| last.1 == below) {
            Some(last) => last.0 = lsn,
            None => self.markers.push_back((lsn, below)),
        }
    }

    /// Moves the delivered prefix on. Follows every change of what is delivered.
    pub fn settle(&mut self) {
        while self
            .events
            .front()
            .is_some_and(|e| e.state == State::Delivered)
        {
            self.events.pop_front();
            self.base += 1;
        }
        while let Some(front) = self.taken.front() {
            let receiving = self
                .current
                .as_ref()
                .is_some_and(|c| c.triple == front.triple);
            let whole = front.end_lsn.is_some() && front.first + front.count <= self.base;
            if receiving || !whole {
                break;
            }
            self.w = Some(front.triple);
            self.taken.pop_front();
            self.taken_base = self.taken_base.wrapping_add(1);
            if self.next == 0 {
                // Delivered before it came by again: it is W now, and still has to come by.
                self.w_seen = false;
            } else {
                self.next -= 1;
            }
        }
        while let Some((lsn, below)) = self.markers.front().copied() {
            if below > self.base {
                break;
            }
            self.markers.pop_front();
            self.flush = self.flush.max(lsn);
        }
    }

    fn next_ticket(&self) -> usize {
        self.base + self.events.len()
    }

    fn event_mut(&mut self, ticket: Ticket) -> Option<&mut Event> {
        let index = ticket.0.checked_sub(self.base)?;
        self.events.get_mut(index)
    }

    /// The event was given to the Kafka client.
    pub fn sent(&mut self, ticket: Ticket, topic: u16, size: Size) {
        self.place(ticket, State::InFlight, topic, size);
    }

    /// The event waits in our memory.
    pub fn held(&mut self, ticket: Ticket, topic: u16, size: Size) {
        self.place(ticket, State::Held, topic, size);
    }

    /// The event is kept whatever becomes of the producer.
    pub fn aside(&mut self, ticket: Ticket, topic: u16, size: Size) {
        self.place(ticket, State::Aside, topic, size);
    }

    fn place(&mut self, ticket: Ticket, state: State, topic: u16, size: Size) {
        let footprint = u32::try_from(size.footprint).unwrap_or(u32::MAX);
        let Some(event) = self.event_mut(ticket) else {
            return;
        };
        let before = *event;
        event.state = state;
        event.topic = topic;
        event.footprint = footprint;
        event.content = u32::try_from(size.content).unwrap_or(u32::MAX);
        self.unload(before);
        match state {
            State::InFlight => {
                self.load.in_flight_events += 1;
                self.load.in_flight_bytes += footprint as usize;
            }
            State::Held | State::Aside => {
                self.load.held_events += 1;
                self.load.held_bytes += footprint as usize;
            }
            State::Taken | State::Delivered | State::Lost => {}
        }
    }

    fn unload(&mut self, event: Event) {
        match event.state {
            State::InFlight => {
                self.load.in_flight_events -= 1;
                self.load.in_flight_bytes -= event.footprint as usize;
            }
            State::Held | State::Aside => {
                self.load.held_events -= 1;
                self.load.held_bytes -= event.footprint as usize;
            }
            State::Lost => self.lost -= 1,
            State::Taken | State::Delivered => {}
        }
    }

    /// The broker has acknowledged the event; `None` where that is known already.
    /// [`Ledger::settle`] must follow before `flush()` is read.
    pub fn delivered(&mut self, ticket: Ticket) -> Option<Delivered> {
        let event = self.event_mut(ticket)?;
        if event.state == State::Delivered {
            return None;
        }
        let before = *event;
        event.state = State::Delivered;
        self.unload(before);
        Some(Delivered {
            topic: before.topic,
            content: before.content,
            commit_time: self.transaction_of(before).triple.commit_time,
        })
    }

    fn transaction_of(&self, event: Event) -> &Transaction {
        &self.taken[event.transaction.wrapping_sub(self.taken_base) as usize]
    }

    /// The event left the Kafka client undelivered: it is read from the server again.
    pub fn lost(&mut self, ticket: Ticket) {
        let Some(event) = self.event_mut(ticket) else {
            return;
        };
        if matches!(event.state, State::Delivered | State::Lost) {
            return;
        }
        let before = *event;
        event.state = State::Lost;
        self.unload(before);
        self.lost += 1;
    }

    /// Everything that is not delivered and not set aside is lost: it is read from the server again.
    pub fn lose_all(&mut self) {
        for index in self.base..self.next_ticket() {
            if self.events[index - self.base].state != State::Aside {
                self.lost(Ticket(index));
            }
        }
    }

    /// The oldest event that is with the producer, or must come again to be given to it: what
    /// stands behind it and is sent by another producer could overtake it.
    #[must_use]
    pub fn at_risk(&self) -> Ticket {
        let index = self.events.iter().position(|event| match event.state {
            State::Taken | State::InFlight | State::Lost => true,
            State::Held | State::Aside | State::Delivered => false,
        });
        Ticket(self.base + index.unwrap_or(self.events.len()))
    }

    /// The topic of an event that is on its way.
    #[must_use]
    pub fn topic(&self, ticket: Ticket) -> Option<u16> {
        let index = ticket.0.checked_sub(self.base)?;
        let event = self.events.get(index)?;
        (event.state == State::InFlight).then_some(event.topic)
    }

    /// Is the event kept, whatever becomes of the producer?
    #[must_use]
    pub fn is_aside(&self, ticket: Ticket) -> bool {
        let index = ticket.0.checked_sub(self.base);
        let event = index.and_then(|index| self.events.get(index));
        event.is_some_and(|event| event.state == State::Aside)
    }

    /// The number of the insert that came last, in its transaction.
    #[must_use]
    pub fn ordinal(&self) -> u64 {
        let seen = self.current.as_ref().map_or(0, |current| current.seen);
        u64::try_from(seen.saturating_sub(1)).unwrap_or(u64::MAX)
    }

    /// What may be reported as flushed; [`Lsn::INVALID`] while nothing may.
    #[must_use]
    pub fn flush(&self) -> Lsn {
        self.flush
    }

    #[must_use]
    pub fn w(&self) -> Option<Triple> {
        self.w
    }

    #[must_use]
    pub fn load(&self) -> Load {
        self.load
    }

    /// Is an event of this topic given to the Kafka client and not delivered?
    #[must_use]
    pub fn is_in_flight(&self, topic: u16) -> bool {
        let mut events = self.events.iter();
        self.load.in_flight_events > 0
            && events.any(|e| e.state == State::InFlight && e.topic == topic)
    }

    /// From the oldest undelivered event to the newest taken one.
    #[must_use]
    pub fn span(&self) -> usize {
        self.events.len()
    }

    /// Events that were purged and have to be read again.
    #[must_use]
    pub fn lost_events(&self) -> usize {
        self.lost
    }

    /// Everything below this ticket is delivered.
    #[must_use]
    pub fn delivered_below(&self) -> Ticket {
        Ticket(self.base)
    }

    /// Everything taken is below this ticket.
    #[must_use]
    pub fn taken_below(&self) -> Ticket {
        Ticket(self.next_ticket())
    }

    /// When the oldest undelivered event was committed.
    #[must_use]
    pub fn oldest_undelivered(&self) -> Option<PgTimestamp> {
        let event = self.events.front()?;
        Some(self.transaction_of(*event).triple.commit_time)
    }

    /// The transaction whose Commit has not come yet, when all that was taken of it is delivered.
    #[must_use]
    pub fn open_transaction(&self) -> Option<OpenTransaction> {
        let last = self.taken.back().filter(|t| t.end_lsn.is_none())?;
        (last.first + last.count <= self.base).then(|| OpenTransaction {
            triple: last.triple,
            count: last.count,
            last_event_id: self.newest_event_id.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lsn::Xid;

    fn triple(commit_lsn: u64) -> Triple {
        Triple {
            commit_lsn: Lsn(commit_lsn),
            xid: Xid(7),
            commit_time: PgTimestamp(1),
        }
    }

    fn transaction(ledger: &mut Ledger, commit_lsn: u64) -> Result<Take, OtherHistory> {
        ledger.begin(triple(commit_lsn));
        let take = ledger.insert(b"id")?;
        ledger.commit(Lsn(commit_lsn + 10))?;
        Ok(take)
    }

    /// The slot went back, below the first transaction that this process was ever sent.
    #[test]
    fn what_another_leader_had_delivered_is_passed_over_until_ours_comes_by() {
        let mut ledger = Ledger::default();
        ledger.session_started(Lsn(90));
        let first = transaction(&mut ledger, 100);
        assert!(matches!(first, Ok(Take::New(_))));
        ledger.session_started(Lsn(50));
        assert_eq!(transaction(&mut ledger, 60), Ok(Take::PassOver));
        assert_eq!(ledger.flush(), Lsn::INVALID);
        assert_eq!(transaction(&mut ledger, 100), Ok(Take::PassOver));
        assert!(matches!(transaction(&mut ledger, 120), Ok(Take::New(_))));
    }

    #[test]
    fn what_comes_instead_of_the_first_transaction_taken_is_another_history() {
        let mut ledger = Ledger::default();
        ledger.session_started(Lsn(90));
        assert!(transaction(&mut ledger, 100).is_ok());
        ledger.session_started(Lsn(50));
        assert!(transaction(&mut ledger, 60).is_ok());
        assert!(transaction(&mut ledger, 110).is_err());
    }
}
