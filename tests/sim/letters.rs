//! The dead-letter table and the tripped topics of the fake Postgres, as `io::dead_letters` keeps
//! them; and the operator, who changes them by hand.

use std::collections::{BTreeMap, BTreeSet};

use walrelay::dead_letter::{
    DeadLetter, EventKey, Parked, ParkedKey, Position, Reason, Settled, Settlement, Stored, Tripped,
};
use walrelay::lsn::Lsn;

use crate::history::{Ctx, EventId, Fact};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Parked,
    Delivered,
    Discarded,
}

#[derive(Clone, Debug)]
struct Row {
    id: i64,
    letter: DeadLetter,
    status: Status,
    is_marked: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Letters {
    rows: Vec<Row>,
    tripped: BTreeMap<String, Tripped>,
    /// Grows with each change by hand.
    pub touched: i64,
}

/// What somebody does by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hand {
    RetryOne,
    RetryAll,
    Discard,
    ParkTopic,
}

impl Letters {
    fn parked(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.status == Status::Parked)
    }

    /// The parked rows of each key, in their order.
    fn by_key(&self) -> BTreeMap<&EventKey, Vec<&Row>> {
        let mut keys: BTreeMap<&EventKey, Vec<&Row>> = BTreeMap::new();
        for row in self.parked() {
            if let Some(key) = &row.letter.key {
                keys.entry(key).or_default().push(row);
            }
        }
        for rows in keys.values_mut() {
            rows.sort_by_key(|row| row.letter.position);
        }
        keys
    }

    /// What is parked.
    pub fn events(&self) -> Vec<EventId> {
        self.parked().map(|row| event_of(&row.letter)).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.parked().next().is_none()
    }

    pub fn load(&self, generation: i64, confirmed: Lsn) -> Parked {
        let keys = self.by_key().into_iter().map(|(key, rows)| ParkedKey {
            key: key.clone(),
            from: rows[0].letter.position,
            is_retried: rows.iter().any(|row| row.is_marked),
        });
        let from = Position {
            generation,
            commit_lsn: confirmed,
            ordinal: 0,
        };
        let is_settled = |row: &&Row| {
            let may_come = row.letter.position >= from;
            may_come && (row.status != Status::Parked || row.letter.key.is_none())
        };
        let settled = self.rows.iter().filter(is_settled);
        Parked {
            keys: keys.collect(),
            settled: settled.map(settled_event).collect(),
            tripped: self.tripped.values().cloned().collect(),
            is_keyless_retried: self
                .parked()
                .any(|row| row.letter.key.is_none() && row.is_marked),
            touched: self.touched,
            last_id: self.last_id(),
        }
    }

    pub fn last_id(&self) -> i64 {
        i64::try_from(self.rows.len()).expect("few rows")
    }

    /// An event that has a row keeps that one.
    pub fn park(&mut self, letters: &[DeadLetter], ctx: &mut Ctx) {
        for letter in letters {
            let is_known = |row: &Row| row.letter.event_id == letter.event_id;
            if self.rows.iter().any(is_known) {
                ctx.reach("parked twice");
                continue;
            }
            let event = event_of(letter);
            ctx.reach(match letter.why.reason {
                Reason::TooLarge => "parked: too large",
                Reason::InvalidTopic => "parked: no such topic can be",
                Reason::MalformedRow => "parked: a malformed row",
                Reason::Refused => "parked: refused",
                Reason::TopicAbsent => "parked: its topic was absent",
                Reason::Behind => "parked: behind another",
                Reason::ByHand => "parked: by hand",
            });
            ctx.fact(Fact::Parked {
                event,
                reason: letter.why.reason,
                topic: letter.record.topic.to_string(),
                is_asked: letter.why.reason == Reason::ByHand,
            });
            let id = i64::try_from(self.rows.len() + 1).expect("few rows");
            self.rows.push(Row {
                id,
                letter: letter.clone(),
                status: Status::Parked,
                is_marked: letter.is_retried,
            });
        }
    }

    pub fn next_retry(&self, generation: i64, passed: Lsn, rows_max: usize) -> Vec<Stored> {
        let below = Position {
            generation,
            commit_lsn: passed,
            ordinal: 0,
        };
        let mut due: Vec<&Row> = Vec::new();
        for rows in self.by_key().values() {
            if rows.iter().any(|row| row.is_marked) {
                due.extend(rows.iter().filter(|row| row.letter.position < below));
            }
        }
        due.extend(self.parked().filter(|row| {
            row.letter.key.is_none() && row.is_marked && row.letter.position < below
        }));
        due.truncate(rows_max);
        due.into_iter()
            .map(|row| Stored {
                id: row.id,
                letter: row.letter.clone(),
            })
            .collect()
    }

    /// One commit. Returns the keys of which nothing is left.
    pub fn settle(&mut self, settlement: &Settlement, ctx: &mut Ctx) -> Vec<EventKey> {
        let mut asked: BTreeMap<EventKey, bool> = BTreeMap::new();
        let mut failed: BTreeSet<EventKey> = BTreeSet::new();
        for row in self.rows.iter_mut().filter(|r| r.status == Status::Parked) {
            let why = settlement.failed.iter().find(|(id, _)| *id == row.id);
            if settlement.delivered.contains(&row.id) {
                row.status = Status::Delivered;
                ctx.fact(Fact::Settled {
                    event: event_of(&row.letter),
                });
                if let Some(key) = row.letter.key.clone() {
                    *asked.entry(key).or_default() |= row.is_marked;
                }
            } else if let Some((_, why)) = why {
                row.letter.why = why.clone();
                row.is_marked = false;
                failed.extend(row.letter.key.clone());
                ctx.reach("a retry failed");
            }
        }
        for row in self.rows.iter_mut().filter(|r| r.status == Status::Parked) {
            if row.letter.key.as_ref().is_some_and(|k| failed.contains(k)) {
                row.is_marked = false;
            }
        }
        let mut free = Vec::new();
        for (key, was_asked) in asked {
            let next = self.by_key().get(&key).map(|rows| rows[0].id);
            match next {
                None => {
                    ctx.reach("a key was set free");
                    free.push(key);
                }
                Some(id) if was_asked && !failed.contains(&key) => {
                    let index = usize::try_from(id - 1).expect("counted from one");
                    self.rows[index].is_marked = true;
                }
                Some(_) => {}
            }
        }
        free
    }

    pub fn trip(&mut self, tripped: &Tripped) {
        self.tripped.insert(tripped.topic.clone(), tripped.clone());
    }

    pub fn untrip(&mut self, topic: &str) {
        self.tripped.remove(topic);
    }

    // ---- by hand ---------------------------------------------------------------------------

    pub fn by_hand(&mut self, hand: Hand, ctx: &mut Ctx) {
        let parked: Vec<usize> = (0..self.rows.len())
            .filter(|index| self.rows[*index].status == Status::Parked)
            .collect();
        let is_done = match hand {
            Hand::RetryOne if !parked.is_empty() => {
                let index = *ctx.rng.pick(&parked);
                self.rows[index].is_marked = true;
                true
            }
            Hand::RetryAll => {
                for index in &parked {
                    self.rows[*index].is_marked = true;
                }
                !parked.is_empty()
            }
            Hand::Discard if !parked.is_empty() => {
                let index = *ctx.rng.pick(&parked);
                self.discard(index, ctx);
                true
            }
            Hand::ParkTopic => {
                for tripped in self.tripped.values_mut() {
                    tripped.is_park_asked = true;
                    let topic = tripped.topic.clone();
                    ctx.fact(Fact::ParkAsked { topic });
                    ctx.reach("a topic was parked by hand");
                }
                !self.tripped.is_empty()
            }
            Hand::RetryOne | Hand::Discard => false,
        };
        if is_done {
            self.touched += 1;
            ctx.note(format!("by hand: {hand:?}"));
        }
    }

    /// What no retry will ever publish.
    pub fn discard_hopeless(&mut self, ctx: &mut Ctx) {
        for index in 0..self.rows.len() {
            let row = &self.rows[index];
            let reason = row.letter.why.reason;
            let is_hopeless = matches!(reason, Reason::MalformedRow | Reason::InvalidTopic);
            if row.status == Status::Parked && is_hopeless {
                self.discard(index, ctx);
                self.touched += 1;
            }
        }
    }

    fn discard(&mut self, index: usize, ctx: &mut Ctx) {
        ctx.reach("discarded");
        let row = &mut self.rows[index];
        row.status = Status::Discarded;
        ctx.fact(Fact::Discarded {
            event: event_of(&row.letter),
        });
    }
}

pub fn event_of(letter: &DeadLetter) -> EventId {
    let text = std::str::from_utf8(&letter.event_id).expect("ours");
    EventId(text[1..].parse().expect("e and a number"))
}

fn settled_event(row: &Row) -> Settled {
    Settled {
        event_id: row.letter.event_id.clone(),
        position: row.letter.position,
        xid: Some(row.letter.xid),
    }
}
