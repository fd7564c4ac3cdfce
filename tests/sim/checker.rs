//! Was every promise kept? Reads only the history.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

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

#[derive(Default)]
struct Checker {
    wal: Vec<Txn>,
    /// `wal[..checked]` is known to be in the broker's log.
    checked: usize,
    /// How often an event is in the log, and when it came there first.
    appended: HashMap<EventId, (u32, usize)>,
    appends: usize,
    said_failed: HashMap<EventId, u32>,
    /// Why a duplicate may come about from here on.
    excuse: Option<&'static str>,
    stopped_whole: BTreeSet<ProcId>,
    ended: HashMap<ProcId, bool>,
    paused: BTreeMap<ProcId, Moment>,
    was_paused: bool,
    sent: HashMap<SessionId, HashSet<Lsn>>,
    poison: BTreeSet<EventId>,
    stopping_since: Option<Moment>,
    /// The event that stopped the relay: nothing behind it may be published before it.
    halted: Option<EventId>,
    /// Nothing from this row on can be published.
    bad_row: Option<EventId>,
    pub duplicates: usize,
}

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
            Fact::Committed { triple, rows, .. } => {
                self.wal.push(Txn {
                    triple: *triple,
                    rows: rows.clone(),
                });
            }
            Fact::Restored { kept } => {
                self.wal.truncate(*kept);
                self.checked = self.checked.min(*kept);
                self.halted = None;
                self.excuse = Some("another history");
            }
            Fact::Appended { event, .. } => return self.appended(*event),
            Fact::SaidFailed { event } => *self.said_failed.entry(*event).or_default() += 1,
            Fact::Killed { proc } => {
                self.excuse = Some("a crash");
                self.ended.insert(*proc, false);
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
            } => return self.exited(*proc, *ok, *halted, text),
            Fact::StopStored { proc, complete } => {
                if *complete {
                    self.stopped_whole.insert(*proc);
                }
            }
            Fact::LeaderChanged { from, .. } => self.leader_changed(*from),
            Fact::Sent { session, lsn } => {
                self.sent.entry(*session).or_default().insert(*lsn);
            }
            Fact::Status {
                session,
                flush,
                write,
            } => return self.status(*session, *flush, *write),
            Fact::Stopping { .. } => self.stopping_since = Some(at),
            Fact::Down => {
                let since = self.stopping_since.take();
                let took = since.map_or(Duration::ZERO, |since| at - since);
                // A client that does not run is noticed when it has been silent for long enough.
                if took > SHUTDOWN_MAX && !self.was_paused {
                    return Err(format!("the server's shutdown was held up for {took:?}"));
                }
            }
            Fact::PoisonMade { event } => {
                self.poison.insert(*event);
            }
            Fact::HaltStored { event } => {
                let is_known = self
                    .wal
                    .iter()
                    .any(|t| t.rows.iter().any(|r| r.0 == *event));
                self.halted = Some(*event).filter(|_| is_known);
            }
            Fact::BadRow { event } => {
                self.poison.insert(*event);
                self.bad_row = Some(*event);
            }
            Fact::HaltCleared => self.halted = None,
            Fact::TimedOut { proc } => {
                if !self.was_paused {
                    return Err(format!("p{proc} was silent for too long"));
                }
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

    fn appended(&mut self, event: EventId) -> Result<(), String> {
        self.appends += 1;
        let appends = self.appends;
        let count = self.appended.entry(event).or_insert((0, appends));
        count.0 += 1;
        if self.halted == Some(event) {
            self.halted = None;
        }
        if count.0 == 1 {
            return self.is_not_behind_halted(event);
        }
        self.duplicates += 1;
        let allowed = self.said_failed.get(&event).copied().unwrap_or_default();
        if self.excuse.is_none() && count.0 > 1 + allowed {
            return Err(format!("{event} is a duplicate without an excuse"));
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
            Some(_) => self.excuse = Some("an incomplete stop"),
        }
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
                if !self.appended.contains_key(event) {
                    return Err(format!(
                        "flush {flush} passes {event} of {}, which is in no topic",
                        txn.triple
                    ));
                }
            }
            self.checked += 1;
        }
        Ok(())
    }

    fn end(&mut self, confirmed: Lsn, wal_end: Lsn) -> Result<(), String> {
        let mut last: HashMap<Key, (EventId, usize)> = HashMap::new();
        let mut is_behind = false;
        for txn in &self.wal {
            for (event, key) in &txn.rows {
                is_behind |= self.bad_row == Some(*event);
                if is_behind && self.appended.contains_key(event) {
                    return Err(format!(
                        "{event} is published, behind a row that is no record"
                    ));
                }
                if is_behind {
                    continue;
                }
                let Some((_, first)) = self.appended.get(event) else {
                    return Err(format!("{event} of {} was never delivered", txn.triple));
                };
                if let Some((before, place)) = last.insert(*key, (*event, *first))
                    && place > *first
                {
                    return Err(format!("key {key:?}: {event} overtook {before}"));
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
