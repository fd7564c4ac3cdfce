//! Events that could not be published, as `relay` and `io` speak of them: where an event stands in
//! its key's order, why it was parked, and what is kept of it.

use std::fmt;

use crate::lsn::{Lsn, PgTimestamp, Xid};
use crate::record::{KafkaCode, Record};

/// What becomes of an event that Kafka will never take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnPoison {
    /// It goes to the dead-letter table, and so does what follows it of its key.
    Park,
    /// The relay ends with exit code 4.
    Halt,
}

/// Where an event stands: positions of one key are in commit order. The rows of one COPY share an
/// LSN, hence the ordinal; another slot's LSNs may be lower, hence the generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The slot's generation, as the registry counts them.
    pub generation: i64,
    pub commit_lsn: Lsn,
    /// The insert's number in its transaction, from 0.
    pub ordinal: u64,
}

/// What is parked as a whole: `aggregate_type` and `aggregate_id` as they are stored, in the
/// stream's encoding.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventKey {
    /// `None` where no column is mapped to it.
    pub aggregate_type: Option<Box<[u8]>>,
    pub aggregate_id: Box<[u8]>,
}

/// Why an event is parked. The names are what the table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// Larger than its topic takes.
    TooLarge,
    /// The name that the row gives its topic can be none.
    InvalidTopic,
    /// The row can be no record: headers that are no object, a key that is null.
    MalformedRow,
    /// The broker refuses the record for another cause.
    Refused,
    /// Its topic has not been there for longer than the grace time.
    TopicAbsent,
    /// An earlier event of its key is parked.
    Behind,
    /// Its topic was tripped, and somebody asked for what was held of it to be parked.
    ByHand,
}

impl Reason {
    pub const ALL: [Reason; 7] = [
        Reason::TooLarge,
        Reason::InvalidTopic,
        Reason::MalformedRow,
        Reason::Refused,
        Reason::TopicAbsent,
        Reason::Behind,
        Reason::ByHand,
    ];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::TooLarge => "too_large",
            Reason::InvalidTopic => "invalid_topic",
            Reason::MalformedRow => "malformed_row",
            Reason::Refused => "refused",
            Reason::TopicAbsent => "topic_absent",
            Reason::Behind => "behind",
            Reason::ByHand => "by_hand",
        }
    }

    /// `None`: a name that this version does not know.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Reason::ALL
            .into_iter()
            .find(|reason| reason.as_str() == name)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reason, the broker's code where there is one, and the whole story in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Why {
    pub reason: Reason,
    pub code: Option<KafkaCode>,
    pub message: String,
}

/// An event on its way to the dead-letter table, or back from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// As the row has it. Where the column is null: `lsn:COMMIT_LSN#ORDINAL`, which no other has.
    pub event_id: Vec<u8>,
    /// `None` has no order and is parked alone.
    pub key: Option<EventKey>,
    /// The type of an event without a key.
    pub aggregate_type: Option<Box<[u8]>>,
    pub position: Position,
    pub xid: Xid,
    pub commit_time: PgTimestamp,
    /// What would have been sent. The topic is empty where the row gives none; `partition` is the
    /// one that a column asks for, else -1.
    pub record: Record<'static>,
    pub why: Why,
    /// Its key is being retried: this one is to be, too.
    pub is_retried: bool,
}

/// A parked key, as the table has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParkedKey {
    pub key: EventKey,
    /// From here on everything of the key is parked; below it, it is published.
    pub from: Position,
    /// Somebody asked for a retry.
    pub is_retried: bool,
}

/// A topic whose events are held because too many different keys would have been parked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tripped {
    /// Empty: of events whose row gives no topic.
    pub topic: String,
    pub reason: Reason,
    pub message: String,
    /// When, for people.
    pub since: PgTimestamp,
    /// Somebody asked to park what is held (`walrelay dead-letters park --topic`).
    pub is_park_asked: bool,
}

impl Tripped {
    /// What is held, for people.
    #[must_use]
    pub fn events(&self) -> String {
        if self.topic.is_empty() {
            "events without a topic".to_owned()
        } else {
            format!("events of topic {}", self.topic)
        }
    }

    /// The command that parks it.
    #[must_use]
    pub fn park_command(&self) -> String {
        let topic = if self.topic.is_empty() {
            "''"
        } else {
            &self.topic
        };
        format!("walrelay dead-letters park --topic {topic}")
    }
}

/// An event that is delivered or discarded, as its dead letter has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled {
    pub event_id: Vec<u8>,
    pub position: Position,
    /// `None` where the letter does not say.
    pub xid: Option<Xid>,
}

/// What the database knows of dead letters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parked {
    pub keys: Vec<ParkedKey>,
    /// Events at or above the slot's position that are delivered or discarded: passed over
    /// when they come again. Those without a key that are still parked are among them.
    pub settled: Vec<Settled>,
    pub tripped: Vec<Tripped>,
    /// Somebody asked for a retry of an event that has no key.
    pub is_keyless_retried: bool,
    /// The registry's count of changes by hand, as of this look.
    pub touched: i64,
    /// The highest number that a dead letter has; 0 where there is none.
    pub last_id: i64,
}

/// How far the database was when dead letters had been committed: one that is not so far any more is
/// a copy of an earlier time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Its log was flushed up to there.
    pub flushed: Lsn,
    /// As [`Parked::last_id`].
    pub last_id: i64,
}

/// A dead letter to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub id: i64,
    pub letter: DeadLetter,
}

/// What became of dead letters that were retried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// Ids of rows.
    pub delivered: Vec<i64>,
    /// Rows that were refused again, and why: the marks of their whole keys are cleared.
    pub failed: Vec<(i64, Why)>,
}
