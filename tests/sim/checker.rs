//! Was every promise kept? Reads only the history.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use walrelay::dead_letter::Reason;
use walrelay::lsn::{Lsn, Triple};

use crate::history::{EventId, Fact, Key, Moment, ProcId, SessionId};

/// A pause of this length may cost the lead.
const HANG: Duration = Duration::from_secs(7);
/// Draining (5 s), the last status (2 s), and what the network takes.
const SHUTDOWN_MAX: Duration = Duration::from_secs(9);
struct Txn {
    triple: Triple,
    rows: Vec<(EventId, Key)>,
}

/// The events of a key in commit order, and how many of them need nothing more: they are in their
/// topic, or somebody discarded them.
#[derive(Default)]
struct Lane {
    events: Vec<EventId>,
    done: usize,
}

#[derive(Default)]
struct Checker {
    wal: Vec<Txn>,
    lanes: HashMap<Key, Lane>,
    place: HashMap<EventId, (Key, usize)>,
    /// `wal[..checked]` is known to be durable.
    checked: usize,
    /// How often an event is in the log, and of which process it came last.
    appended: HashMap<EventId, u32>,
    /// Somebody knows that it is: its producer was told, or a tail was read.
    known: HashSet<EventId>,
    /// Why an event may be there once more.
    allowed: HashMap<EventId, u32>,
    /// Why a duplicate may come about from here on.
    excuse: Option<&'static str>,
    stopped_whole: BTreeSet<ProcId>,
    ended: HashMap<ProcId, bool>,
    paused: BTreeMap<ProcId, Moment>,
    was_paused: bool,
    sent: HashMap<SessionId, HashSet<Lsn>>,
    /// Events that no broker takes, for what the world knows.
    poison: HashSet<EventId>,
    keyless: HashSet<EventId>,
    stopping_since: Option<Moment>,
    /// The event that stopped the relay: nothing behind it may be published before it.
    halted: Option<EventId>,
    /// Nothing from this row on can be published.
    bad_row: Option<EventId>,
    // The dead letters.
    world: World,
    parked: HashSet<EventId>,
    settled: HashSet<EventId>,
    discarded: HashSet<EventId>,
    /// Events for whose own sake their keys were parked.
    roots: HashSet<EventId>,
    /// Letters that a process is publishing.
    retrying: HashMap<ProcId, Vec<EventId>>,
    refused_topics: HashSet<String>,
    /// Topics of which what was held is parked, guilty or not, because somebody asked for it.
    park_asked: HashSet<String>,
    absent: HashMap<String, Absence>,
    unread: HashMap<String, u32>,
    duplicates: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct World {
    halts: bool,
    is_tail_whole: bool,
    is_left_parked: bool,
    grace: Duration,
}

/// How long a topic was not there, short returns not counted.
#[derive(Clone, Copy, Debug)]
struct Absence {
    since: Moment,
    until: Option<Moment>,
    longest: Duration,
}

/// Letters that a crash in the middle of a retry may repeat.
const RETRY_BATCH: usize = crate::process::RETRY_ROWS;
/// Within this nobody need have noticed that a topic was back.
const RETURN_MAX: Duration = Duration::from_secs(60);
/// So many tails in a row that cannot be read, and the relay goes on without.
const TAIL_ATTEMPTS: u32 = 15;

/// The first promise that was broken, if any.
pub fn check(facts: &[(Moment, Fact)]) -> Result<usize, String> {
    let mut checker = Checker::default();
    for (at, fact) in facts {
        checker
            .fact(*at, fact)
            .map_err(|broken| format!("at {at:?}: {broken}"))?;
    }
    Ok(checker.duplicates)
}

impl Checker {
    fn fact(&mut self, at: Moment, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Committed { triple, rows, .. } => self.committed(*triple, rows.clone()),
            Fact::Restored { kept, parked } => self.restored(*kept, parked),
            Fact::Appended { event, .. } => return self.appended(*event),
            Fact::Acked { event } => {
                self.known.insert(*event);
            }
            Fact::SaidFailed { event } => self.allow(*event),
            Fact::Killed { .. }
            | Fact::Paused { .. }
            | Fact::Resumed { .. }
            | Fact::Exited { .. }
            | Fact::StopStored { .. }
            | Fact::LeaderChanged { .. } => return self.life(at, fact),
            Fact::Sent { session, lsn } => {
                self.sent.entry(*session).or_default().insert(*lsn);
            }
            Fact::Status {
                session,
                flush,
                write,
            } => return self.status(*session, *flush, *write),
            Fact::Stopping { .. } => self.stopping_since = Some(at),
            Fact::Down => return self.down(at),
            Fact::TimedOut { proc } if !self.was_paused => {
                return Err(format!("p{proc} was silent for too long"));
            }
            Fact::TimedOut { .. } => {}
            Fact::HaltStored { event } => {
                self.halted = Some(*event).filter(|event| self.place.contains_key(event));
            }
            Fact::HaltCleared => self.halted = None,
            Fact::World { .. }
            | Fact::PoisonMade { .. }
            | Fact::TooLarge { .. }
            | Fact::BadRow { .. }
            | Fact::Refusing { .. }
            | Fact::TopicGone { .. }
            | Fact::TopicMade { .. }
            | Fact::TailRead { .. } => self.surroundings(at, fact),
            Fact::Parked {
                event,
                reason,
                topic,
                is_asked,
            } => {
                if *is_asked && !self.park_asked.contains(topic) {
                    return Err(format!(
                        "{event} is parked by hand, and nobody asked for it"
                    ));
                }
                return self.park(at, *event, *reason, topic, *is_asked);
            }
            Fact::ParkAsked { topic } => {
                self.park_asked.insert(topic.clone());
            }
            Fact::Settled { event } => return self.settle(*event),
            Fact::Discarded { event } => {
                self.parked.remove(event);
                self.discarded.insert(*event);
                self.walk(*event);
            }
            Fact::RetryLoaded { proc, events } => {
                if events.len() > RETRY_BATCH {
                    return Err(format!("{} letters are retried at a time", events.len()));
                }
                self.retrying.insert(*proc, events.clone());
            }
            Fact::End { confirmed, wal_end } => return self.end(*confirmed, *wal_end),
            Fact::Started { .. }
            | Fact::SessionOpened { .. }
            | Fact::SlotBack { .. }
            | Fact::Up
            | Fact::Mended { .. }
            | Fact::Calm
            | Fact::Note(_) => {}
        }
        Ok(())
    }

    /// What the world does.
    fn surroundings(&mut self, at: Moment, fact: &Fact) {
        match fact {
            Fact::World {
                halts,
                is_tail_whole,
                is_left_parked,
                grace,
            } => {
                self.world = World {
                    halts: *halts,
                    is_tail_whole: *is_tail_whole,
                    is_left_parked: *is_left_parked,
                    grace: *grace,
                };
            }
            Fact::PoisonMade { event } | Fact::TooLarge { event } => {
                self.poison.insert(*event);
            }
            Fact::BadRow { event, is_keyless } => {
                self.poison.insert(*event);
                if self.world.halts {
                    self.bad_row = Some(*event);
                }
                if *is_keyless {
                    self.keyless.insert(*event);
                }
            }
            Fact::Refusing { topic } => {
                self.refused_topics.insert(topic.clone());
            }
            Fact::TopicGone { topic } => {
                self.absence(topic, at).until = None;
                // What was in it is gone, and may be sent to the next one of its name.
                let events: Vec<EventId> = self.appended.keys().copied().collect();
                events.into_iter().for_each(|event| self.allow(event));
            }
            Fact::TopicMade { topic } => {
                let absence = self.absence(topic, Duration::ZERO);
                absence.longest = absence.longest.max(at - absence.since);
                absence.until = Some(at);
            }
            Fact::TailRead {
                topic,
                events,
                is_failed,
            } => {
                self.known.extend(events);
                let unread = self.unread.entry(topic.clone()).or_default();
                *unread = if *is_failed { *unread + 1 } else { 0 };
                if *unread >= TAIL_ATTEMPTS {
                    self.excuse = Some("a tail could not be read");
                }
            }
            _ => {}
        }
    }

    fn absence(&mut self, topic: &str, now: Moment) -> &mut Absence {
        let absence = self.absent.entry(topic.to_owned()).or_insert(Absence {
            since: now,
            until: None,
            longest: Duration::ZERO,
        });
        if absence.until.is_some_and(|until| now > until + RETURN_MAX) {
            absence.since = now;
        }
        absence
    }

    /// What becomes of processes.
    fn life(&mut self, at: Moment, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Killed { proc } => {
                self.crash_excuse("a crash");
                self.ended.insert(*proc, false);
                self.retry_ends(*proc);
            }
            Fact::Paused { proc } => {
                self.was_paused = true;
                self.paused.insert(*proc, at);
            }
            Fact::Resumed { proc } => {
                let since = self.paused.remove(proc);
                if since.is_some_and(|since| at - since >= HANG) {
                    self.excuse = Some("a hang");
                }
            }
            Fact::Exited {
                proc,
                ok,
                halted,
                text,
            } => {
                self.retry_ends(*proc);
                return self.exited(*proc, *ok, *halted, text);
            }
            Fact::StopStored {
                proc,
                complete: true,
            } => {
                self.stopped_whole.insert(*proc);
            }
            Fact::StopStored {
                complete: false, ..
            } => {}
            Fact::LeaderChanged { from, .. } => self.leader_changed(*from),
            _ => {}
        }
        Ok(())
    }

    /// Nobody repeats an event after a crash where the topics' ends may be read.
    fn crash_excuse(&mut self, excuse: &'static str) {
        if !self.world.is_tail_whole {
            self.excuse = Some(excuse);
        }
    }

    /// What a process was publishing of the table comes again: a batch at most.
    fn retry_ends(&mut self, proc: ProcId) {
        for event in self.retrying.remove(&proc).unwrap_or_default() {
            self.allow(event);
        }
    }

    fn allow(&mut self, event: EventId) {
        *self.allowed.entry(event).or_default() += 1;
    }

    fn committed(&mut self, triple: Triple, rows: Vec<(EventId, Key)>) {
        for (event, key) in &rows {
            if !self.keyless.contains(event) {
                let lane = self.lanes.entry(*key).or_default();
                self.place.insert(*event, (*key, lane.events.len()));
                lane.events.push(*event);
            }
        }
        self.wal.push(Txn { triple, rows });
    }

    /// The database is what it was, its dead letters with it.
    fn restored(&mut self, kept: usize, parked: &[EventId]) {
        let mut wal = std::mem::take(&mut self.wal);
        wal.truncate(kept);
        self.lanes.clear();
        self.place.clear();
        for txn in wal {
            self.committed(txn.triple, txn.rows);
        }
        self.checked = 0;
        self.halted = None;
        self.excuse = Some("another history");
        self.parked = parked.iter().copied().collect();
    }

    /// Is nothing more to be done for this event?
    fn is_done(&self, event: EventId) -> bool {
        self.appended.contains_key(&event) || self.discarded.contains(&event)
    }

    /// Walks the event's key on as far as it is done.
    fn walk(&mut self, event: EventId) -> Option<(Key, usize, usize)> {
        let (key, at) = *self.place.get(&event)?;
        let mut done = self.lanes[&key].done;
        while let Some(next) = self.lanes[&key].events.get(done)
            && self.is_done(*next)
        {
            done += 1;
        }
        self.lanes.get_mut(&key).expect("looked up").done = done;
        Some((key, at, done))
    }

    fn appended(&mut self, event: EventId) -> Result<(), String> {
        let count = self.appended.entry(event).or_insert(0);
        *count += 1;
        let count = *count;
        if self.halted == Some(event) {
            self.halted = None;
        }
        if count == 1 {
            if let Some((key, at, done)) = self.walk(event)
                && done <= at
            {
                let before = self.lanes[&key].events[done];
                let is_parked = self.parked.contains(&before);
                let how = if is_parked { ", which is parked" } else { "" };
                return Err(format!("key {key:?}: {event} overtook {before}{how}"));
            }
            return self.is_not_behind_halted(event);
        }
        self.duplicates += 1;
        let allowed = self.allowed.get(&event).copied().unwrap_or_default();
        if self.excuse.is_none() && count > 1 + allowed {
            return Err(format!("{event} is a duplicate without an excuse"));
        }
        Ok(())
    }

    fn park(
        &mut self,
        at: Moment,
        event: EventId,
        reason: Reason,
        topic: &str,
        is_asked: bool,
    ) -> Result<(), String> {
        self.parked.insert(event);
        if self.world.halts {
            return Err(format!("{event} is parked, and the policy is to halt"));
        }
        let Some((key, place)) = self.place.get(&event).copied() else {
            let is_keyless = self.keyless.contains(&event);
            return if is_keyless || reason == Reason::Behind {
                Ok(())
            } else {
                Err(format!("{event} is parked and was never committed"))
            };
        };
        let is_guilty = match reason {
            Reason::Behind => {
                let mut before = self.lanes[&key].events[..place].iter();
                before.any(|event| self.roots.contains(event))
            }
            Reason::TooLarge | Reason::Refused => {
                self.poison.contains(&event) || self.refused_topics.contains(topic)
            }
            Reason::MalformedRow => self.poison.contains(&event),
            Reason::InvalidTopic => key.0 == 3,
            Reason::ByHand => is_asked,
            Reason::TopicAbsent => {
                let absence = self.absent.get(topic);
                absence.is_none_or(|absence| {
                    let running = at - absence.since;
                    let longest = match absence.until {
                        None => absence.longest.max(running),
                        Some(_) => absence.longest,
                    };
                    longest >= self.world.grace
                })
            }
        };
        if !is_guilty && !is_asked {
            return Err(format!("{event} is parked ({reason}) and is innocent"));
        }
        if reason != Reason::Behind {
            self.roots.insert(event);
        }
        Ok(())
    }

    fn settle(&mut self, event: EventId) -> Result<(), String> {
        self.parked.remove(&event);
        self.settled.insert(event);
        if self.known.contains(&event) {
            Ok(())
        } else {
            Err(format!("{event} is settled and not known to be delivered"))
        }
    }

    fn down(&mut self, at: Moment) -> Result<(), String> {
        let since = self.stopping_since.take();
        let took = since.map_or(Duration::ZERO, |since| at - since);
        // A client that does not run is noticed when it has been silent for long enough.
        if took > SHUTDOWN_MAX && !self.was_paused {
            return Err(format!("the server's shutdown was held up for {took:?}"));
        }
        Ok(())
    }

    fn is_not_behind_halted(&self, event: EventId) -> Result<(), String> {
        let Some(halted) = self.halted else {
            return Ok(());
        };
        let place = |of: EventId| {
            let places = self.wal.iter().enumerate();
            places
                .flat_map(|(i, txn)| {
                    txn.rows
                        .iter()
                        .enumerate()
                        .map(move |(j, row)| (i, j, row.0))
                })
                .find(|(_, _, found)| *found == of)
                .map(|(i, j, _)| (i, j))
        };
        match (place(event), place(halted)) {
            (Some(event_at), Some(halted_at)) if event_at > halted_at => Err(format!(
                "{event} is published while the relay is halted at {halted} before it"
            )),
            _ => Ok(()),
        }
    }

    fn exited(&mut self, proc: ProcId, ok: bool, halted: bool, text: &str) -> Result<(), String> {
        self.ended.insert(proc, ok);
        if halted {
            let is_known = self.poison.iter().any(|e| text.contains(&e.to_string()));
            if !is_known {
                return Err(format!(
                    "p{proc} halted at an event that is no poison: {text}"
                ));
            }
            return Ok(());
        }
        if ok {
            return Ok(());
        }
        Err(format!("p{proc} exited: {text}"))
    }

    fn leader_changed(&mut self, from: Option<ProcId>) {
        let Some(from) = from else { return };
        match self.ended.get(&from) {
            None => self.excuse = Some("a living leader lost its lead"),
            Some(_) if self.stopped_whole.contains(&from) => {}
            Some(_) => self.crash_excuse("an incomplete stop"),
        }
    }

    /// Does somebody know that it is in Kafka, or is it in the table?
    fn is_durable(&self, event: EventId) -> bool {
        self.known.contains(&event)
            || self.parked.contains(&event)
            || self.settled.contains(&event)
            || self.discarded.contains(&event)
    }

    fn status(&mut self, session: SessionId, flush: Lsn, write: Lsn) -> Result<(), String> {
        if flush == Lsn::INVALID {
            return Ok(());
        }
        if flush > write {
            return Err(format!("flush {flush} passes write {write}"));
        }
        let is_sent = self.sent.get(&session).is_some_and(|s| s.contains(&flush));
        if !is_sent {
            return Err(format!("session {session} never sent {flush}"));
        }
        while let Some(txn) = self.wal.get(self.checked) {
            if txn.triple.commit_lsn >= flush {
                break;
            }
            for (event, _) in &txn.rows {
                if !self.is_durable(*event) {
                    return Err(format!(
                        "flush {flush} passes {event} of {}, which is neither delivered nor parked",
                        txn.triple
                    ));
                }
            }
            self.checked += 1;
        }
        Ok(())
    }

    fn end(&mut self, confirmed: Lsn, wal_end: Lsn) -> Result<(), String> {
        let mut is_behind = false;
        for txn in &self.wal {
            for (event, _) in &txn.rows {
                is_behind |= self.bad_row == Some(*event);
                if is_behind && self.appended.contains_key(event) {
                    return Err(format!(
                        "{event} is published, behind a row that is no record"
                    ));
                }
                let may_stay = self.world.is_left_parked && self.parked.contains(event);
                if !is_behind && !may_stay && !self.is_done(*event) {
                    return Err(format!("{event} of {} was never delivered", txn.triple));
                }
            }
        }
        if confirmed < wal_end && !is_behind {
            return Err(format!(
                "an idle slot stays at {confirmed}, the log ends at {wal_end}"
            ));
        }
        Ok(())
    }
}
