//! Events that wait in our own memory: for a topic that is not there (yet), or behind another
//! event of their key that waits.
//!
//! # Invariants
//! Events of one key leave in the order in which they came.

use std::collections::{HashMap, HashSet, VecDeque};

use super::orders::Absent;
use super::topics::Topics;
use crate::record::{Record, Ticket};

#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    topic: u16,
    key: u64,
    record: Record<'static>,
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

    /// Must an event of this key wait because an earlier one does?
    #[must_use]
    pub fn has_key(&self, key: u64) -> bool {
        !self.keys.is_empty() && self.keys.contains_key(&key)
    }

    pub fn push(&mut self, ticket: Ticket, topic: u16, key: u64, record: Record<'static>) {
        *self.keys.entry(key).or_default() += 1;
        self.queue.push_back(Waiting {
            ticket,
            topic,
            key,
            record,
        });
    }

    pub fn clear(&mut self) {
        self.queue.clear();
        self.keys.clear();
    }

    /// Takes out, in order, what may go now: at most `room` events and about `room_bytes`.
    /// Returns beside it whether the room ended before the queue did.
    pub fn release(
        &mut self,
        topics: &Topics,
        room: usize,
        room_bytes: usize,
    ) -> (Vec<(Ticket, u16, Record<'static>)>, bool) {
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
            match topics.partitions(waiting.topic) {
                Some(_) if !blocked.contains(&waiting.key) => {
                    released_bytes += waiting.record.footprint();
                    self.forget_key(waiting.key);
                    released.push((waiting.ticket, waiting.topic, waiting.record));
                }
                Some(_) | None => {
                    blocked.insert(waiting.key);
                    staying.push_back(waiting);
                }
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
        let mut events: HashMap<u16, usize> = HashMap::new();
        for waiting in &self.queue {
            *events.entry(waiting.topic).or_default() += 1;
        }
        let mut absent: Vec<Absent> = events
            .into_iter()
            .filter_map(|(topic, events)| {
                Some(Absent {
                    topic: topics.name(topic).to_owned(),
                    unanswered: topics.why_not(topic)?,
                    events,
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
