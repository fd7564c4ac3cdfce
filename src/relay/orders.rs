//! What the machine asks for and what it has to say. Data only.

use std::fmt;
use std::time::Duration;

use super::ledger::{Load, OpenTransaction};
use super::mapping::Mapping;
use super::topics::Grown;
pub use crate::dead_letter::OnPoison;
use crate::dead_letter::{DeadLetter, Parked, Reason, Settlement, Tripped};
use crate::error::Failure;
use crate::gap::{Gap, OnGap};
use crate::lsn::{Lsn, PgTimestamp, Triple};
use crate::record::{Record, Right, Ticket};
use crate::wire::replication::StatusUpdate;

/// Limits and deadlines.
#[derive(Clone, Debug)]
pub struct Settings {
    pub mapping: Mapping,
    pub on_poison: OnPoison,
    /// `None`: heal where it can be proved to be complete.
    pub on_gap: Option<OnGap>,
    /// For how long a topic may be absent before its keys are poisoned.
    pub topic_grace: Duration,
    /// Events given to the Kafka client and not delivered.
    pub in_flight_events_max: usize,
    /// Bytes of memory for events in flight and held, together.
    pub in_flight_bytes_max: usize,
    /// From the oldest undelivered event to the newest taken one.
    pub span_events_max: usize,
    /// Kafka silent for longer than this: the replication connection is closed.
    pub stall_timeout: Duration,
    pub shutdown_timeout: Duration,
    pub wal_sender_timeout: Duration,
}

/// How a replication connection is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// CopyDone, the server's answer awaited: it has read the last status.
    Finish,
    Abort,
}

/// What is taken out of the Kafka client before it is built anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purge {
    /// What was not sent; what is on its way may come back delivered.
    Queue,
    Everything,
}

/// Whether a producer that was replaced had heard from the broker about all that it had sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    All,
    NotAll,
}

/// Where a relay stopped, as the registry keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stop {
    /// W: the last transaction of the contiguous delivered prefix.
    pub last: Option<Triple>,
    /// The highest position reported as flushed.
    pub reported: Lsn,
    /// Was all that had been taken delivered?
    pub complete: bool,
    pub open: Option<OpenTransaction>,
}

/// What the machine asks the service to do.
#[derive(Debug)]
pub enum Order {
    /// Connect the side session if there is none, take the lock, read the registry.
    SeekLead,
    /// Connect, IDENTIFY_SYSTEM, read the slot, START_REPLICATION at 0/0.
    Open,
    Close(Close),
    Status(StatusUpdate),
    /// Ask the side session for its backend pid, the lock and the slot's `active_pid`.
    Probe,
    Send(Ticket, Record<'static>),
    Rebuild(Purge),
    /// To the producer of what is sent apart; the number is good for its present group only.
    Try(Ticket, Record<'static>),
    /// That producer is built anew, with what it holds given up.
    RebuildTrial,
    Letters(Statement),
    /// Read the ids of what a topic's end holds, from this time on.
    ReadTail {
        topic: String,
        since: PgTimestamp,
    },
    /// Ask the cluster for a topic (and create it where that was asked for).
    Lookup(String),
    EraseStop,
    Store {
        stop: Stop,
        halted: Option<Halted>,
    },
    ClearHalted,
    /// Commit to heal this gap, or to give it up; the next `Open` does it.
    BeginHeal(Gap, OnGap),
    Notice(Notice),
    Exit(Result<(), Failure>),
}

/// A statement about dead letters, on the lock's session.
#[derive(Clone, Debug)]
pub enum Statement {
    /// Commit these, wait for the standbys where the slot fails over.
    Park {
        epoch: u64,
        letters: Vec<DeadLetter>,
    },
    /// Read what is parked, settled and tripped.
    Look,
    /// Read the next dead letters whose retry was asked for, of keys that are passed.
    LoadRetry {
        passed: Lsn,
    },
    Settle {
        epoch: u64,
        settlement: Settlement,
    },
    Trip(Tripped),
    Untrip(String),
}

/// The event that stopped the relay: a restart tries it alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Halted {
    pub event_id: String,
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    Info,
    Warning,
    /// A human must act.
    Error,
}

/// Which record timestamps are given to Kafka; the rest becomes the time of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stamps {
    All,
    /// A column's, where they are not ahead of the commit.
    Past,
    None,
}

/// A change of state worth a log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    Leading,
    Standby(String),
    LeadLost(String),
    NoDatabase(String),
    Streaming {
        from: Lsn,
        again: usize,
    },
    StreamEnded(String),
    KafkaStalled {
        silent: Duration,
    },
    KafkaAnswers,
    ProducerRebuilt {
        cause: String,
        remedy: String,
    },
    OtherHistory(String),
    Gap(Gap, OnGap),
    /// So many rows were healed before.
    Healing(u64),
    Healed(u64),
    TopicAbsent {
        topic: String,
        /// The first event that waits for it.
        event_id: Option<String>,
    },
    TopicDenied {
        topic: String,
        right: Right,
    },
    TopicUnanswered {
        topic: String,
        why: String,
    },
    TopicPresent {
        topic: String,
        partitions: i32,
    },
    TopicGrown(Grown),
    /// A key is parked, or an event that has none.
    Parked {
        event_id: String,
        key: Option<String>,
        topic: String,
        reason: Reason,
        message: String,
    },
    /// What is wrong, and its remedy.
    NotParked(String, String),
    Tripped(Tripped),
    TopicOpen {
        topic: String,
        is_by_hand: bool,
    },
    Retried {
        letters: usize,
        free: usize,
    },
    RetryFailed {
        event_id: String,
        message: String,
    },
    TailRead {
        topic: String,
        events: usize,
        is_complete: bool,
    },
    TailUnread {
        topic: String,
        why: String,
    },
    /// Repeats are not looked for, and why.
    AtLeastOnce {
        why: String,
    },
    Blocked {
        topics: Vec<String>,
    },
    ForgedHeader {
        event_id: String,
    },
    NoTimestamp {
        event_id: String,
    },
    ForeignTable {
        oid: u32,
    },
    ClockSkew {
        kept: Stamps,
    },
    BatchTooLarge,
    WasAway(Duration),
    Draining {
        why: String,
        deadline: Duration,
    },
    /// The relay will end with this.
    Failing(String),
    Stopped {
        flush: Lsn,
        complete: bool,
    },
    HaltedEventPassed(String),
}

impl Notice {
    /// What lasts: two notices of one condition need not both be said.
    #[must_use]
    pub fn condition(&self) -> String {
        match self {
            Notice::TopicAbsent { topic, .. }
            | Notice::TopicDenied { topic, .. }
            | Notice::TopicUnanswered { topic, .. }
            | Notice::TailUnread { topic, .. } => topic.clone(),
            other => format!("{:?}", std::mem::discriminant(other)),
        }
    }

    #[must_use]
    pub fn severity(&self) -> Severity {
        match self {
            Notice::Leading
            | Notice::Standby(_)
            | Notice::Streaming { .. }
            | Notice::KafkaAnswers
            | Notice::Healing(_)
            | Notice::TopicPresent { .. }
            | Notice::TopicGrown(_)
            | Notice::TopicOpen { .. }
            | Notice::Retried { .. }
            | Notice::TailRead {
                is_complete: true, ..
            }
            | Notice::Draining { .. }
            | Notice::Stopped { .. }
            | Notice::HaltedEventPassed(_) => Severity::Info,
            Notice::LeadLost(_)
            | Notice::Healed(_)
            | Notice::NoDatabase(_)
            | Notice::StreamEnded(_)
            | Notice::KafkaStalled { .. }
            | Notice::TopicUnanswered { .. }
            | Notice::ProducerRebuilt { .. }
            | Notice::ForgedHeader { .. }
            | Notice::NoTimestamp { .. }
            | Notice::ForeignTable { .. }
            | Notice::ClockSkew { .. }
            | Notice::BatchTooLarge
            | Notice::RetryFailed { .. }
            | Notice::TailRead { .. }
            | Notice::TailUnread { .. }
            | Notice::AtLeastOnce { .. }
            | Notice::WasAway(_) => Severity::Warning,
            Notice::OtherHistory(_)
            | Notice::Gap(..)
            | Notice::Parked { .. }
            | Notice::NotParked(..)
            | Notice::Tripped(_)
            | Notice::Failing(_)
            | Notice::TopicAbsent { .. }
            | Notice::TopicDenied { .. }
            | Notice::Blocked { .. } => Severity::Error,
        }
    }
}

impl Notice {
    fn fmt_parked(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Parked {
                event_id,
                key,
                topic,
                reason,
                message,
            } => {
                let of = match key {
                    Some(key) => format!("key {key} is parked from event {event_id} on"),
                    None => format!("event {event_id} (it has no key) is parked"),
                };
                let topic = if topic.is_empty() { "no topic" } else { topic };
                write!(
                    f,
                    "{of}, {reason}, {topic}: {message}; remedy: walrelay dead-letters show {event_id}"
                )
            }
            Notice::NotParked(what, remedy) => write!(
                f,
                "dead letters cannot be written, what they belong to is not confirmed: {what}; remedy: {remedy}"
            ),
            Notice::Tripped(tripped) => write!(
                f,
                "{} are held: {} different keys within 10 minutes would be parked, {} ({}); that is no single bad event but an outage or a bad deploy; remedy: mend its cause, one held event a minute is tried and the first success lets all go; or park them: {}",
                tripped.events(),
                super::breaker::KEYS_MAX,
                tripped.reason,
                tripped.message,
                tripped.park_command()
            ),
            Notice::TopicOpen { topic, is_by_hand } => write!(
                f,
                "topic {topic} is open again: {}",
                if *is_by_hand {
                    "what was held of it is parked, as was asked for"
                } else {
                    "an event of it was delivered"
                }
            ),
            Notice::Retried { letters, free } => write!(
                f,
                "{letters} dead letters are delivered, {free} keys are free of them"
            ),
            Notice::RetryFailed { event_id, message } => write!(
                f,
                "the retry of event {event_id} failed, its key stays parked: {message}; remedy: walrelay dead-letters show {event_id}"
            ),
            _ => Ok(()),
        }
    }

    fn fmt_tail(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::TailRead {
                topic,
                events,
                is_complete,
            } => {
                write!(
                    f,
                    "the end of topic {topic} holds {events} events that may come again: those are passed over"
                )?;
                if *is_complete {
                    Ok(())
                } else {
                    write!(
                        f,
                        "; there were more than are looked at, older ones may be repeated (consumers drop them by event_id)"
                    )
                }
            }
            Notice::TailUnread { topic, why } => write!(
                f,
                "the end of topic {topic} cannot be read, its events wait: {why}"
            ),
            Notice::AtLeastOnce { why } => write!(
                f,
                "{why}: after a crash of the relay events may be repeated (consumers drop them by event_id)"
            ),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Leading => write!(f, "leading: the lock is ours"),
            Notice::Standby(why) => write!(f, "standing by: {why}"),
            Notice::LeadLost(why) => write!(f, "no longer leading: {why}"),
            Notice::NoDatabase(why) => write!(f, "waiting for the database: {why}"),
            Notice::Streaming { from, again: 0 } => {
                write!(f, "streaming from confirmed_flush_lsn {from}")
            }
            Notice::Streaming { from, again } => write!(
                f,
                "streaming from confirmed_flush_lsn {from}; {again} events taken before are recognised, not repeated"
            ),
            Notice::StreamEnded(why) => write!(f, "the replication connection ended: {why}"),
            Notice::KafkaStalled { silent } => write!(
                f,
                "kafka has delivered nothing for {silent:.0?}: the replication connection is closed until it answers, events stay in memory and in the slot"
            ),
            Notice::KafkaAnswers => write!(f, "kafka answers again"),
            Notice::ProducerRebuilt { cause, remedy } => {
                write!(f, "the broker refused a batch: {cause}; remedy: {remedy}")
            }
            Notice::OtherHistory(what) => write!(
                f,
                "the server's log is not the one seen before (restored copy or promoted standby): {what}; its stream is taken from the slot's own position, events published from the old log may have no row any more"
            ),
            Notice::Gap(gap, OnGap::Skip) => write!(
                f,
                "gap: {gap}; these rows are given up (--on-gap skip), a new slot is made"
            ),
            Notice::Gap(gap, OnGap::Heal | OnGap::Halt) => write!(
                f,
                "gap: {gap}; a new slot is made, and what the stream does not carry is published from the table"
            ),
            Notice::Healing(0) => write!(f, "healing: the rows of the gap are read from the table"),
            Notice::Healing(rows) => write!(
                f,
                "healing: {rows} rows of the gap were delivered before, the next are read from the table"
            ),
            Notice::Healed(0) => write!(
                f,
                "the gap is behind: no row was taken from the table, the new slot's stream goes on from here"
            ),
            Notice::Healed(rows) => write!(
                f,
                "healed: {rows} rows were taken from the table, the new slot's stream goes on from there"
            ),
            Notice::TopicAbsent { topic, event_id } => {
                let first = event_id.as_ref().map_or_else(String::new, |event_id| {
                    format!(" (event {event_id} is the first)")
                });
                write!(
                    f,
                    "topic {topic} does not exist, its events wait{first}; remedy: create {topic}, or run with --create-topics PARTITIONS"
                )
            }
            Notice::TopicDenied { topic, right } => write!(
                f,
                "{}, its events wait; remedy: {}",
                right.refusal(topic),
                right.remedy(topic)
            ),
            Notice::TopicUnanswered { topic, why } => {
                write!(
                    f,
                    "topic {topic} cannot be used yet, its events wait: {why}"
                )
            }
            Notice::TopicPresent { topic, partitions } => {
                write!(f, "topic {topic} has {partitions} partitions")
            }
            Notice::TopicGrown(Grown { topic, before, now }) => write!(
                f,
                "topic {topic} has grown from {before} to {now} partitions: keys are spread over all of them from now on"
            ),
            Notice::Parked { .. }
            | Notice::NotParked(..)
            | Notice::Tripped(_)
            | Notice::TopicOpen { .. }
            | Notice::Retried { .. }
            | Notice::RetryFailed { .. } => self.fmt_parked(f),
            Notice::TailRead { .. } | Notice::TailUnread { .. } | Notice::AtLeastOnce { .. } => {
                self.fmt_tail(f)
            }
            Notice::Blocked { topics } => write!(
                f,
                "everything waits: too many events are held for {}; remedy: create these topics, or run with --create-topics PARTITIONS, or grant this principal Write and Describe on them",
                topics.join(", ")
            ),
            Notice::ForgedHeader { event_id } => write!(
                f,
                "headers of event {event_id} set event_id, event_type or aggregate_type: dropped, the columns count (said once)"
            ),
            Notice::NoTimestamp { event_id } => write!(
                f,
                "event {event_id} has no time in its timestamp column that Kafka can hold (null, infinity, before 1970): such records carry their time of sending (said once)"
            ),
            Notice::ForeignTable { oid } => write!(
                f,
                "the publication also carries table oid {oid}: its rows are not published (said once)"
            ),
            Notice::ClockSkew { kept } => write!(
                f,
                "the broker refuses record timestamps (INVALID_TIMESTAMP): {} carry their time of sending for a minute; remedy: look at the database server's clock, at the timestamp column where one is mapped, and at the topic's message.timestamp.after.max.ms",
                match kept {
                    Stamps::Past => "records whose time is ahead of their commit",
                    Stamps::All | Stamps::None => "records",
                }
            ),
            Notice::BatchTooLarge => write!(
                f,
                "a batch was refused as too large and each of its records was taken: batches are made smaller; remedy: raise the topic's max.message.bytes"
            ),
            Notice::WasAway(span) => write!(
                f,
                "this process did not run for {span:.1?}: its queue is purged and the lead proved again"
            ),
            Notice::Draining { why, deadline } => {
                write!(
                    f,
                    "{why}: intake is shut, draining for at most {deadline:.0?}"
                )
            }
            Notice::Failing(why) => write!(f, "stopping: {why}"),
            Notice::Stopped {
                flush,
                complete: true,
            } => {
                write!(
                    f,
                    "stopped: all that was taken is delivered, flushed {flush}"
                )
            }
            Notice::Stopped {
                flush,
                complete: false,
            } => write!(
                f,
                "stopped with undelivered events (the slot keeps them), flushed {flush}"
            ),
            Notice::HaltedEventPassed(event_id) => {
                write!(
                    f,
                    "event {event_id}, at which the relay had halted, is delivered or parked"
                )
            }
        }
    }
}

/// The lock is ours: what the registry says.
#[derive(Clone, Debug, Default)]
pub struct Led {
    pub table_oid: u32,
    pub generation: i64,
    /// How often the lead has passed from one process to another, this time included: as before
    /// where nobody else has led since. (Who led last would not tell: we may have claimed the lead
    /// and never heard of it.) `None` where this role may not write it.
    pub term: Option<i64>,
    /// Who led last; `None` when nobody ever did on this slot.
    pub previous_leader: Option<String>,
    /// May this role write the registry?
    pub is_writable: bool,
    pub stop: Option<Stop>,
    pub halted: Option<Halted>,
    pub consistent_point: Option<Lsn>,
    pub parked: Parked,
    /// Nobody but our own retention deletes rows, and their xids are known: what a heal publishes is
    /// all that is missing.
    pub is_provable: bool,
}

/// What came of [`Order::SeekLead`].
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one at a time")]
pub enum Seek {
    Led(Led),
    /// Another instance holds the lock.
    Elsewhere(String),
    /// Time may heal it.
    Later(String),
    Refused(Failure),
}

/// The replication session stands.
#[derive(Clone, Debug)]
pub struct Opened {
    pub system_identifier: String,
    pub timeline: i32,
    /// `IDENTIFY_SYSTEM`'s: how far the server's log is flushed.
    pub xlogpos: Lsn,
    /// The slot's, read before START.
    pub confirmed_flush: Lsn,
    /// The table's columns, as they were before `xlogpos`, are not what the mapping names.
    pub unfit: Option<Failure>,
    /// It carries no stream but the rows of a gap, in this generation of positions.
    pub heals: Option<i64>,
}

/// Why there is no replication session.
#[derive(Debug)]
pub enum OpenError {
    Later(String),
    Never(Failure),
    Gap(Gap),
}

/// How a replication session ended.
#[derive(Debug)]
pub enum StreamEnd {
    Lost(String),
    /// Repeating it would end the same way.
    Never(Failure),
    Gap(Gap),
}

/// What the side session answered to [`Order::Probe`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probed {
    /// The session is the one that took the lock, and has it.
    pub has_lock: bool,
    /// The slot's `active_pid` is our walsender (asked only while streaming).
    pub has_slot: bool,
    /// How often something was changed by hand among the dead letters.
    pub touched: i64,
}

/// What was delivered since it was last asked.
#[derive(Debug, Default)]
pub struct Deliveries {
    /// (topic, events, key and value bytes)
    pub by_topic: Vec<(String, u64, u64)>,
    /// The commit times of what was delivered, with the number of events of each.
    pub commit_times: Vec<(PgTimestamp, u64)>,
    /// Events that were parked, by why.
    pub parked: Vec<Reason>,
    /// Dead letters that were delivered.
    pub retried: u64,
    /// Events that were found in their topic's end.
    pub passed_over: u64,
}

/// How things stand, for metrics, `/readyz` and the live line.
#[derive(Clone, Debug, Default)]
pub struct Standing {
    pub is_leading: bool,
    pub is_streaming: bool,
    pub load: Load,
    pub span: usize,
    pub received: Lsn,
    pub flush: Lsn,
    pub oldest_undelivered: Option<PgTimestamp>,
    /// W: everything up to this transaction is delivered.
    pub delivered: Option<Triple>,
    pub leadership: Leadership,
    /// Why there is no stream, while there is none.
    pub closed: Option<Closed>,
    /// What ends the relay, and what its operator is to do.
    pub ending: Option<Ill>,
    /// An event in front of which everything waits.
    pub stuck_event: Option<Ill>,
    /// The broker's last refusal, while nothing has been delivered since.
    pub refused: Option<Ill>,
    /// For how long nothing was delivered, although something could be.
    pub silent: Option<Duration>,
    /// So many events are held that nothing more is taken.
    pub is_full: bool,
    pub parked_keys: usize,
    /// Keys that are being retried.
    pub retried_keys: usize,
    /// Why dead letters cannot be written.
    pub not_parked: Option<Ill>,
    /// Topics whose events are held, with how many are.
    pub tripped: Vec<Tripped>,
}

/// Something that is wrong, and its remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ill {
    pub what: String,
    pub remedy: String,
}

impl Ill {
    #[must_use]
    pub fn of(failure: &Failure) -> Self {
        Ill {
            what: failure.causes.join("; "),
            remedy: failure.remedy.clone(),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Leadership {
    /// Not asked yet.
    #[default]
    Unknown,
    Leading,
    /// Who leads, or why we leave it to another.
    Elsewhere(String),
    /// There is no session that could be asked.
    NoDatabase(Ill),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closed {
    /// It is being opened for the first time, or was closed by ourselves for a moment.
    Opening,
    UntilKafkaAnswers,
    Because(String),
}

/// A topic without which events wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent {
    pub topic: String,
    pub why: WhyNot,
    pub events: usize,
    pub first_event_id: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhyNot {
    /// The cluster has no such topic.
    Absent,
    Denied(Right),
    /// The cluster did not answer, and why.
    Silent(String),
}
