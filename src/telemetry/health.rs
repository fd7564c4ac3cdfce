//! Is the relay ready, and if not, why and what to do: computed from progress, never from "the
//! process is up".
//!
//! The loop hands over what it knows ([`Facts`], [`Sample`]) and stores a heartbeat; whoever asks
//! gets it judged at the moment of asking, so that ages grow and silence is noticed while the loop
//! hangs.
//!
//! # Invariants
//! - What is not known is said as unknown (`null`, NaN), never as zero or as fine.
//! - Ready is: every condition is known to hold.

mod conditions;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::progress::{Amount, Leader};
use crate::lsn::{Lsn, PgTimestamp};
use conditions::{CONDITIONS, Verdict};

/// The loop turns every second; after so long without a turn the process is to be restarted.
const LIVE_WITHIN: Duration = Duration::from_secs(30);
/// What lasts is said again after this.
const SAID_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// `/readyz` and `/livez`: the JSON body, and what `walrelay status` reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Health {
    pub ready: bool,
    /// The loop turns.
    pub live: bool,
    pub slot: String,
    pub publication: String,
    pub table: String,
    pub process_id: String,
    pub version: String,
    /// `leading`, `standby` or `unknown`.
    pub leader: String,
    /// Since when it is (not) ready.
    pub since: String,
    pub conditions: Vec<Condition>,
    pub progress: Numbers,
}

/// One condition of being ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    pub name: String,
    /// `None`: not known.
    pub ok: Option<bool>,
    /// Since when `ok` is what it is.
    pub since: String,
    pub what: String,
    pub remedy: Option<String>,
}

/// Numbers; `None` is not known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Numbers {
    /// Commit position and time of the last transaction before which everything is delivered.
    pub delivered_lsn: Option<String>,
    pub delivered_commit_time: Option<String>,
    /// As the server has it.
    pub confirmed_flush_lsn: Option<String>,
    pub restart_lsn: Option<String>,
    pub received_lsn: Option<String>,
    /// The end of the server's WAL.
    pub wal_end: Option<String>,
    /// From `confirmed_flush_lsn` to `wal_end`.
    pub lag_bytes: Option<u64>,
    /// From `restart_lsn` to `wal_end`: what the slot keeps on the server's disk.
    pub retained_bytes: Option<u64>,
    /// How much may still be written before the slot is lost; `None` also where there is no limit.
    pub safe_wal_size: Option<i64>,
    /// `None` also where it is unlimited.
    pub max_slot_wal_keep_size_bytes: Option<u64>,
    pub wal_status: Option<String>,
    pub wal_bytes_per_second: Option<f64>,
    pub oldest_undelivered_age_seconds: Option<f64>,
    pub in_flight_events: u64,
    pub in_flight_bytes: u64,
    pub held_events: u64,
    pub held_bytes: u64,
    /// Topics that events wait for; the first of them where there are many.
    #[serde(default)]
    pub waiting: Vec<Waiting>,
    pub delivered_events: u64,
    pub brokers_known: Option<u64>,
    pub brokers_up: Option<u64>,
    pub broker_rtt_p50_seconds: Option<f64>,
    pub broker_rtt_p99_seconds: Option<f64>,
    /// The oldest running transaction that has written; 0 where there is none.
    pub oldest_transaction_age_seconds: Option<f64>,
    pub prepared_transaction_age_seconds: Option<f64>,
    /// What keeps `restart_lsn` from moving, if anything does.
    pub restart_lsn_held_by: Option<String>,
    /// The stream stands still for these standby slots, which nobody follows.
    #[serde(default)]
    pub waits_for_standbys: Option<String>,
    /// How old what the database said is.
    pub sample_age_seconds: Option<f64>,
}

/// Both clocks: the wall's for what is shown, and one that does not jump.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub wall: SystemTime,
    /// Since boot.
    pub boot: Duration,
}

/// Something that is wrong, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    pub what: String,
    pub remedy: String,
}

/// What the loop knows; handed over about once a second.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub lead: Lead,
    pub stream: Stream,
    pub ending: Option<Trouble>,
    /// An event that stands in the way of all behind it.
    pub stuck_event: Option<Trouble>,
    pub kafka: Kafka,
    /// Topics that the cluster does not have, or says nothing about.
    pub topics: Vec<Waiting>,
    /// So many events wait for topics that nothing more is taken.
    pub is_full: bool,
    /// Why dead letters cannot be written.
    pub not_parked: Option<Trouble>,
    /// Topics whose events are held.
    pub tripped: Vec<Trouble>,
    pub parked_keys: usize,
    pub in_flight: Amount,
    pub held: Amount,
    pub oldest_undelivered: Option<PgTimestamp>,
    pub received: Lsn,
    pub delivered: Option<(Lsn, PgTimestamp)>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Lead {
    /// Nothing was asked yet.
    #[default]
    Starting,
    Leading,
    /// Why we do not lead: who does.
    Standby(String),
    NoDatabase(Trouble),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Stream {
    #[default]
    Opening,
    Open,
    Closed(String),
    /// Closed so that a silent Kafka does not block the server's shutdown.
    WaitsForKafka,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kafka {
    /// What the client library complains of.
    pub trouble: Option<Trouble>,
    /// The broker's last refusal, if nothing was delivered since.
    pub refused: Option<Trouble>,
    /// Since when nothing was delivered although something could be.
    pub silent_since: Option<SystemTime>,
    pub brokers: Option<Brokers>,
    /// The cluster was looked at and found well, or something was delivered.
    pub has_answered: bool,
}

/// From the client library's statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Brokers {
    pub known: usize,
    pub up: usize,
    pub rtt_p50: Duration,
    pub rtt_p99: Duration,
}

/// A topic for which events wait.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    pub topic: String,
    /// Why the cluster says nothing; `None` where it has answered.
    pub unanswered: Option<String>,
    /// The cluster refuses it to us; without this and `unanswered` there is no such topic.
    pub denied: Option<Trouble>,
    pub events: usize,
    pub first_event_id: String,
}

/// What the database says about slot and publication; asked every few seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub at: SystemTime,
    pub wal_end: Lsn,
    /// The end of the WAL one sample ago.
    pub wal_end_before: Option<Lsn>,
    pub wal_bytes_per_second: Option<f64>,
    /// `None`: there is no such slot.
    pub slot: Option<SlotSample>,
    /// Since when `confirmed_flush_lsn` has not moved.
    pub confirmed_since: SystemTime,
    pub publication: Option<Trouble>,
    /// Who has the lock, where that is not this process.
    pub leader: Option<String>,
    /// Standby slots that hold the stream back, because nobody follows them.
    pub dead_standbys: Option<String>,
    pub oldest_transaction: Held,
    pub prepared_transaction: Held,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotSample {
    pub confirmed_flush: Option<Lsn>,
    pub restart: Option<Lsn>,
    pub wal_status: Option<String>,
    pub safe_wal_size: Option<i64>,
    pub max_keep_bytes: Option<u64>,
    /// The pid of whoever streams from it.
    pub holder: Option<i32>,
}

/// A transaction that may keep `restart_lsn` from moving.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Held {
    /// This role may not see others' transactions.
    #[default]
    Unknown,
    None,
    By {
        who: String,
        /// When it was asked.
        age: Duration,
    },
}

/// What does not change while the relay runs.
#[derive(Clone, Debug)]
pub struct Identity {
    pub slot: String,
    pub publication: String,
    pub table: String,
    pub process_id: String,
}

/// A condition that changed, or that is said again: for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    pub name: &'static str,
    pub ok: bool,
    pub what: String,
    pub remedy: Option<String>,
}

/// Where the loop writes and everybody reads.
pub struct Board {
    identity: Identity,
    /// Of the loop, in milliseconds since boot.
    heartbeat: AtomicU64,
    state: Mutex<State>,
}

struct State {
    facts: Arc<Facts>,
    sample: Option<Arc<Sample>>,
    /// A condition's last verdict and since when it is that.
    since: [(Option<bool>, SystemTime); CONDITIONS.len()],
    ready: (bool, SystemTime),
    /// When the failing condition was last said in the log.
    said: [Option<Duration>; CONDITIONS.len()],
}

/// All that a judgement rests on.
struct Evidence {
    facts: Arc<Facts>,
    sample: Option<Arc<Sample>>,
    slot: String,
    publication: String,
    table: String,
    now: SystemTime,
    /// Since the loop last turned.
    quiet: Duration,
}

impl Board {
    #[must_use]
    pub fn new(identity: Identity, now: Now) -> Self {
        Board {
            identity,
            heartbeat: AtomicU64::new(millis(now.boot)),
            state: Mutex::new(State {
                facts: Arc::default(),
                sample: None,
                since: [(None, now.wall); CONDITIONS.len()],
                ready: (false, now.wall),
                said: [None; CONDITIONS.len()],
            }),
        }
    }

    /// In every turn of the loop.
    pub fn turned(&self, boot: Duration) {
        self.heartbeat.store(millis(boot), Ordering::Relaxed);
    }

    pub fn facts(&self, facts: Facts) {
        self.lock().facts = Arc::new(facts);
    }

    /// Takes a sample; what only a row of samples can tell is filled in here.
    pub fn sample(&self, mut sample: Sample) {
        let mut state = self.lock();
        if let Some(before) = &state.sample {
            sample.wal_end_before = Some(before.wal_end);
            let seconds = span(before.at, sample.at).as_secs_f64();
            let written = sample.wal_end.bytes_since(before.wal_end);
            sample.wal_bytes_per_second = (seconds > 0.0).then(|| approximate(written) / seconds);
            let confirmed = |s: &Sample| s.slot.as_ref().and_then(|slot| slot.confirmed_flush);
            if confirmed(before) == confirmed(&sample) {
                sample.confirmed_since = before.confirmed_since;
            }
        }
        state.sample = Some(Arc::new(sample));
    }

    /// Does the loop turn?
    #[must_use]
    pub fn is_live(&self, now: Now) -> bool {
        self.quiet(now) < LIVE_WITHIN
    }

    fn quiet(&self, now: Now) -> Duration {
        let turned = Duration::from_millis(self.heartbeat.load(Ordering::Relaxed));
        now.boot.saturating_sub(turned)
    }

    /// How things stand, true at `now`.
    #[must_use]
    pub fn report(&self, delivered_events: u64, now: Now) -> Health {
        let evidence = self.evidence(now);
        let verdicts = CONDITIONS.map(|(name, judge)| (name, judge(&evidence)));
        let ready = verdicts.iter().all(|(_, verdict)| verdict.ok == Some(true));
        let (ready_since, since) = self.note(&verdicts, ready, now.wall);
        let conditions = verdicts
            .into_iter()
            .zip(since)
            .map(|((name, verdict), since)| Condition {
                name: name.to_owned(),
                ok: verdict.ok,
                since: rfc3339(since),
                what: verdict.what,
                remedy: verdict.remedy,
            })
            .collect();
        Health {
            ready,
            live: self.is_live(now),
            slot: self.identity.slot.clone(),
            publication: self.identity.publication.clone(),
            table: self.identity.table.clone(),
            process_id: self.identity.process_id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            leader: evidence.leader().label().to_owned(),
            since: rfc3339(ready_since),
            conditions,
            progress: evidence.numbers(delivered_events),
        }
    }

    /// Looks at every condition, so that it is known since when it is what it is whoever asks
    /// later, and tells what the log has to say of those that nobody else speaks of. For the loop,
    /// about once a second.
    #[must_use]
    pub fn look(&self, now: Now) -> Vec<Said> {
        let evidence = self.evidence(now);
        let verdicts = CONDITIONS.map(|(name, judge)| (name, judge(&evidence)));
        let ready = verdicts.iter().all(|(_, verdict)| verdict.ok == Some(true));
        self.note(&verdicts, ready, now.wall);
        let mut state = self.lock();
        let mut all = Vec::new();
        for (at, (name, verdict)) in verdicts.into_iter().enumerate() {
            if !conditions::IS_LOGGED.contains(&name) {
                continue;
            }
            let Verdict { ok, what, remedy } = verdict;
            let is_due = match (ok, state.said[at]) {
                (Some(false), None) => true,
                (Some(false), Some(said)) => now.boot >= said + SAID_AGAIN_AFTER,
                (Some(true), Some(_)) => true,
                (Some(true) | None, _) => false,
            };
            let Some(ok) = ok.filter(|_| is_due) else {
                continue;
            };
            state.said[at] = (!ok).then_some(now.boot);
            all.push(Said {
                name,
                ok,
                what,
                remedy,
            });
        }
        all
    }

    fn evidence(&self, now: Now) -> Evidence {
        let state = self.lock();
        Evidence {
            facts: Arc::clone(&state.facts),
            sample: state.sample.clone(),
            slot: self.identity.slot.clone(),
            publication: self.identity.publication.clone(),
            table: self.identity.table.clone(),
            now: now.wall,
            quiet: self.quiet(now),
        }
    }

    /// Keeps since when each condition is what it is.
    fn note(
        &self,
        verdicts: &[(&'static str, Verdict); CONDITIONS.len()],
        ready: bool,
        now: SystemTime,
    ) -> (SystemTime, [SystemTime; CONDITIONS.len()]) {
        let mut state = self.lock();
        for (at, (_, verdict)) in verdicts.iter().enumerate() {
            if state.since[at].0 != verdict.ok {
                state.since[at] = (verdict.ok, now);
            }
        }
        if state.ready.0 != ready {
            state.ready = (ready, now);
        }
        (state.ready.1, state.since.map(|(_, since)| since))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each field is whole by itself, whatever a panic has cut short.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn millis(boot: Duration) -> u64 {
    u64::try_from(boot.as_millis()).unwrap_or(u64::MAX)
}

/// From `earlier` to `later`, zero where the clock was set back.
fn span(earlier: SystemTime, later: SystemTime) -> Duration {
    later.duration_since(earlier).unwrap_or_default()
}

fn rfc3339(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}

fn wall(at: PgTimestamp) -> SystemTime {
    let micros = u64::try_from(at.unix_micros()).unwrap_or(0);
    SystemTime::UNIX_EPOCH + Duration::from_micros(micros)
}

/// A count as a number for a metric or a rate, where the last digits do not matter.
pub(super) fn approximate(count: u64) -> f64 {
    let high = u32::try_from(count >> 32).unwrap_or(u32::MAX);
    let low = u32::try_from(count & 0xFFFF_FFFF).unwrap_or(u32::MAX);
    f64::from(high) * 4_294_967_296.0 + f64::from(low)
}
