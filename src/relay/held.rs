//! Events that wait in our own memory: for a topic that is not there (yet), or behind another
//! event of their key that waits.
//!
//! # Invariants
//! Events of one key leave in the order in which they came.

use std::collections::{HashMap, HashSet, VecDeque};

use super::orders::Absent;
use super::topics::Topics;
use crate::dead_letter::{DeadLetter, EventKey, Position, Why};
use crate::lsn::{PgTimestamp, Xid};
use crate::record::{Record, Ticket};

/// Which event it is: what is kept beside the record for the case that it has to be parked.
#[derive(Clone, Debug)]
pub struct Origin {
    pub event_id: Vec<u8>,
    pub key: Option<EventKey>,
    /// The type of an event without a key.
    pub aggregate_type: Option<Box<[u8]>>,
    pub position: Position,
    pub xid: Xid,
    pub commit_time: PgTimestamp,
}

#[derive(Debug)]
pub struct Waiting {
    pub ticket: Ticket,
    pub topic: u16,
    /// The hash of what keeps its order.
    pub key: u64,
    /// The partition that the row itself asks for.
    pub partition: Option<i64>,
    pub record: Record<'static>,
    pub origin: Origin,
    /// It can be no record, and would be parked if its topic were not tripped.
    pub verdict: Option<Why>,
}

impl Waiting {
    #[must_use]
    pub fn into_letter(self, why: Why, is_retried: bool) -> DeadLetter {
        let Origin {
            event_id,
            key,
            aggregate_type,
            position,
            xid,
            commit_time,
        } = self.origin;
        let asked = self.partition.and_then(|asked| i32::try_from(asked).ok());
        DeadLetter {
            event_id,
            key,
            aggregate_type,
            position,
            xid,
            commit_time,
            record: Record {
                partition: asked.unwrap_or(-1),
                ..self.record
            },
            why,
            is_retried,
        }
    }
}

#[derive(Debug, Default)]
pub struct Held {
    queue: VecDeque<Waiting>,
    /// How many events of a key (by hash: a collision only makes an event wait) are waiting.
    keys: HashMap<u64, usize>,
}

impl Held {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub fn waiting(&self) -> impl Iterator<Item = &Waiting> {
        self.queue.iter()
    }

    /// Must an event of this key wait because an earlier one does?
    #[must_use]
    pub fn has_key(&self, key: u64) -> bool {
        !self.keys.is_empty() && self.keys.contains_key(&key)
    }

    /// Does an earlier event of its key wait?
    #[must_use]
    pub fn has_before(&self, waiting: &Waiting) -> bool {
        self.has_key(waiting.key)
            && self
                .queue
                .iter()
                .any(|own| own.key == waiting.key && own.ticket < waiting.ticket)
    }

    pub fn push(&mut self, waiting: Waiting) {
        *self.keys.entry(waiting.key).or_default() += 1;
        self.queue.push_back(waiting);
    }

    /// The id of the first event that waits for this topic.
    #[must_use]
    pub fn first_for(&self, topic: &str, topics: &Topics) -> Option<String> {
        let mut queue = self.queue.iter();
        let first = queue.find(|waiting| topics.name(waiting.topic) == topic)?;
        Some(first.record.event_id())
    }

    /// Forgets this event and all that came after it.
    pub fn forget_from(&mut self, ticket: Ticket) {
        while let Some(last) = self.queue.back()
            && last.ticket >= ticket
        {
            let key = last.key;
            self.queue.pop_back();
            self.forget_key(key);
        }
    }

    pub fn clear(&mut self) {
        self.queue.clear();
        self.keys.clear();
    }

    /// Puts one back that was taken out, where it stood.
    pub fn put_back(&mut self, waiting: Waiting) {
        *self.keys.entry(waiting.key).or_default() += 1;
        let at = self.queue.partition_point(|w| w.ticket < waiting.ticket);
        self.queue.insert(at, waiting);
    }

    /// Takes out, in order, all that are meant.
    pub fn take(&mut self, mut is_meant: impl FnMut(&Waiting) -> bool) -> Vec<Waiting> {
        let mut taken = Vec::new();
        let mut staying = VecDeque::with_capacity(self.queue.len());
        while let Some(waiting) = self.queue.pop_front() {
            if is_meant(&waiting) {
                self.forget_key(waiting.key);
                taken.push(waiting);
            } else {
                staying.push_back(waiting);
            }
        }
        self.queue = staying;
        taken
    }

    /// Takes out the first event that is meant and is the first of its key.
    pub fn take_head(&mut self, mut is_meant: impl FnMut(&Waiting) -> bool) -> Option<Waiting> {
        let mut seen: HashSet<u64> = HashSet::new();
        let at = self
            .queue
            .iter()
            .position(|waiting| seen.insert(waiting.key) && is_meant(waiting))?;
        let waiting = self.queue.remove(at)?;
        self.forget_key(waiting.key);
        Some(waiting)
    }

    /// Takes out, in order, what may go now: at most `room` events and about `room_bytes`.
    /// Returns beside it whether the room ended before the queue did.
    pub fn release(
        &mut self,
        may_be_sent: impl Fn(&Waiting) -> bool,
        is_busy: impl Fn(&Waiting) -> bool,
        room: usize,
        room_bytes: usize,
    ) -> (Vec<Waiting>, bool) {
        let mut released = Vec::new();
        let mut ran_out = false;
        let mut released_bytes = 0;
        let mut blocked: HashSet<u64> = HashSet::new();
        let mut staying = VecDeque::new();
        while let Some(waiting) = self.queue.pop_front() {
            let is_full = released.len() >= room || released_bytes >= room_bytes;
            if is_full {
                ran_out = true;
                staying.push_back(waiting);
                staying.append(&mut self.queue);
                break;
            }
            let may_go =
                may_be_sent(&waiting) && !blocked.contains(&waiting.key) && !is_busy(&waiting);
            if may_go {
                released_bytes += waiting.record.footprint();
                self.forget_key(waiting.key);
                released.push(waiting);
            } else {
                blocked.insert(waiting.key);
                staying.push_back(waiting);
            }
        }
        self.queue = staying;
        (released, ran_out)
    }

    /// Is there one that waits for no more than an answer about its topic, or for its turn?
    #[must_use]
    pub fn may_go(&self, topics: &Topics) -> bool {
        let mut blocked: HashSet<u64> = HashSet::new();
        self.queue.iter().any(|waiting| {
            let may_go = topics.may_come(waiting.topic) && !blocked.contains(&waiting.key);
            if !may_go {
                blocked.insert(waiting.key);
            }
            may_go
        })
    }

    /// Topics without which events wait, each with their number.
    #[must_use]
    pub fn waits_for(&self, topics: &Topics, topics_max: usize) -> Vec<Absent> {
        let mut events: HashMap<u16, (usize, &Waiting)> = HashMap::new();
        for waiting in &self.queue {
            events.entry(waiting.topic).or_insert((0, waiting)).0 += 1;
        }
        let mut absent: Vec<Absent> = events
            .into_iter()
            .filter_map(|(topic, (events, first))| {
                Some(Absent {
                    topic: topics.name(topic).to_owned(),
                    why: topics.why_not(topic)?,
                    events,
                    first_event_id: first.record.event_id(),
                })
            })
            .collect();
        absent.sort_by(|a, b| a.topic.cmp(&b.topic));
        absent.truncate(topics_max);
        absent
    }

    fn forget_key(&mut self, key: u64) {
        if let Some(count) = self.keys.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.keys.remove(&key);
            }
        }
    }
}
