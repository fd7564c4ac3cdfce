//! What happened, as plain facts: all that the checker reads. Beside it the clock that everything
//! in the simulated world shares.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use walrelay::dead_letter::Reason;
use walrelay::lsn::{Lsn, PgTimestamp, Triple, Xid};

use crate::rng::Rng;
use crate::world::Event;

pub type Moment = Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(pub u64);

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{:06}", self.0)
    }
}

/// (`aggregate_type`, `aggregate_id`)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub u8, pub u8);

impl Key {
    pub fn kind(self) -> &'static str {
        ["a", "b", "c", "no topic!"][usize::from(self.0 % 4)]
    }
}

pub type ProcId = u32;
pub type SessionId = u32;

#[derive(Clone, Debug)]
#[expect(
    dead_code,
    reason = "what the checker does not need is told with the story"
)]
pub enum Fact {
    /// A transaction of the outbox. Empty ones are not facts.
    Committed {
        triple: Triple,
        end_lsn: Lsn,
        rows: Vec<(EventId, Key)>,
    },
    /// The database is what it was when it held only the first `kept` of its transactions.
    Restored {
        kept: usize,
        parked: Vec<EventId>,
    },
    /// It is larger than its topic takes.
    TooLarge {
        event: EventId,
    },
    /// A record is in the broker's log.
    Appended {
        event: EventId,
        proc: ProcId,
    },
    /// A record is in the log, or may yet get there, and its producer was told that it failed.
    SaidFailed {
        event: EventId,
    },
    Started {
        proc: ProcId,
        instance: usize,
    },
    Killed {
        proc: ProcId,
    },
    Paused {
        proc: ProcId,
    },
    Resumed {
        proc: ProcId,
    },
    /// A process ended by itself. `halted`: by an event that was poison.
    Exited {
        proc: ProcId,
        ok: bool,
        halted: bool,
        text: String,
    },
    /// What a process left in the registry when it stopped.
    StopStored {
        proc: ProcId,
        complete: bool,
    },
    /// This event stopped the relay, and the registry says so.
    HaltStored {
        event: EventId,
    },
    HaltCleared,
    /// The server gave up on a silent client.
    TimedOut {
        proc: ProcId,
    },
    LeaderChanged {
        from: Option<ProcId>,
        to: ProcId,
    },
    SessionOpened {
        session: SessionId,
        proc: ProcId,
        confirmed: Lsn,
    },
    /// The server sent a position that may be confirmed.
    Sent {
        session: SessionId,
        lsn: Lsn,
    },
    /// A status arrived.
    Status {
        session: SessionId,
        flush: Lsn,
        write: Lsn,
    },
    /// confirmed_flush_lsn after a restart.
    SlotBack {
        to: Lsn,
    },
    Stopping {
        fast: bool,
    },
    Down,
    Up,
    /// The broker takes it now.
    Mended {
        event: EventId,
    },
    PoisonMade {
        event: EventId,
    },
    /// Everything of this topic is refused from here on, for a while.
    Refusing {
        topic: String,
    },
    /// A row that can never be a record was committed.
    BadRow {
        event: EventId,
        is_keyless: bool,
    },
    /// The broker has told the producer of a record that it has it.
    Acked {
        event: EventId,
    },
    /// Everything the topic has is gone with it.
    TopicGone {
        topic: String,
    },
    TopicMade {
        topic: String,
    },
    /// A dead letter is in the table.
    Parked {
        event: EventId,
        reason: Reason,
        topic: String,
        /// It says that it was held, and parked because somebody asked for its topic.
        is_asked: bool,
    },
    /// Somebody asked to park what is held of the topic.
    ParkAsked {
        topic: String,
    },
    /// The table has it as delivered.
    Settled {
        event: EventId,
    },
    /// By hand.
    Discarded {
        event: EventId,
    },
    /// A process is about to publish these dead letters.
    RetryLoaded {
        proc: ProcId,
        events: Vec<EventId>,
    },
    /// What a process was told that a topic's end holds.
    TailRead {
        topic: String,
        events: Vec<EventId>,
        is_failed: bool,
    },
    /// What these worlds are like: a bad event halts the relay, tails may be read and to any length,
    /// the grace time.
    World {
        halts: bool,
        is_tail_whole: bool,
        is_left_parked: bool,
        grace: Duration,
    },
    /// From here on nothing fails.
    Calm,
    Note(String),
    End {
        confirmed: Lsn,
        wal_end: Lsn,
    },
}

/// What everybody shares: time, chance, what is to come, what has been.
pub struct Ctx {
    pub now: Moment,
    pub rng: Rng,
    pub facts: Vec<(Moment, Fact)>,
    pub reached: BTreeMap<&'static str, u64>,
    queue: BTreeMap<(Moment, u64), Event>,
    count: u64,
}

impl Ctx {
    pub fn new(seed: u64) -> Self {
        Ctx {
            now: Duration::from_secs(1_000),
            rng: Rng::new(seed),
            facts: Vec::new(),
            reached: BTreeMap::new(),
            queue: BTreeMap::new(),
            count: 0,
        }
    }

    pub fn at(&mut self, at: Moment, event: Event) {
        self.count += 1;
        self.queue.insert((at.max(self.now), self.count), event);
    }

    pub fn after(&mut self, pause: Duration, event: Event) {
        self.at(self.now + pause, event);
    }

    pub fn next(&mut self) -> Option<Event> {
        let ((at, _), event) = self.queue.pop_first()?;
        self.now = at;
        Some(event)
    }

    pub fn fact(&mut self, fact: Fact) {
        self.facts.push((self.now, fact));
    }

    pub fn note(&mut self, text: String) {
        self.fact(Fact::Note(text));
    }

    /// An interesting situation came about.
    pub fn reach(&mut self, what: &'static str) {
        *self.reached.entry(what).or_default() += 1;
    }

    pub fn clock(&self) -> PgTimestamp {
        let micros = i64::try_from(self.now.as_micros()).expect("a short run");
        PgTimestamp(800_000_000_000_000 + micros)
    }
}

pub fn triple(commit_lsn: u64, xid: u32, time: PgTimestamp) -> Triple {
    Triple {
        commit_lsn: Lsn(commit_lsn),
        xid: Xid(xid),
        commit_time: time,
    }
}
