//! Which keys are parked, and from which position on. The dead letters themselves are in the
//! table; of a key there is one entry here, of its bytes and some sixty more.

use std::collections::{HashMap, HashSet};

use super::outbox::key_hash;
use crate::dead_letter::{EventKey, Parked, Position, Settled};
use crate::lsn::Xid;

#[derive(Debug)]
struct Entry {
    from: Position,
    is_retried: bool,
    /// The look at the database that was the last one begun when the key was parked.
    since_look: u64,
}

#[derive(Debug, Default)]
pub struct ParkedKeys {
    /// By hash; two keys that share one stand in one list.
    keys: HashMap<u64, Vec<(EventKey, Entry)>>,
    count: usize,
    retried: usize,
    /// Events that are settled, or parked without a key, and may be sent again, by their position.
    settled: HashMap<Position, Settled>,
    /// The same, for rows that are read from the table: these have other positions.
    healed: HashMap<Vec<u8>, Option<Xid>>,
    looks: u64,
    /// Keys that were set free since the look began whose answer is awaited: it may still show them.
    freed: Option<HashSet<EventKey>>,
}

/// The key's hash, as `Held` and all else that keeps order has it.
#[must_use]
pub fn hash_of(key: &EventKey) -> u64 {
    key_hash(key.aggregate_type.as_deref(), &key.aggregate_id)
}

impl ParkedKeys {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0 && self.settled.is_empty()
    }

    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Keys whose retry was asked for.
    #[must_use]
    pub fn retried(&self) -> usize {
        self.retried
    }

    fn entry(&self, hash: u64, aggregate_type: Option<&[u8]>, id: &[u8]) -> Option<&Entry> {
        let list = self.keys.get(&hash)?;
        let found = list.iter().find(|(key, _)| {
            *key.aggregate_id == *id && key.aggregate_type.as_deref() == aggregate_type
        })?;
        Some(&found.1)
    }

    fn entry_mut(&mut self, key: &EventKey) -> Option<&mut Entry> {
        let list = self.keys.get_mut(&hash_of(key))?;
        let found = list.iter_mut().find(|(own, _)| own == key)?;
        Some(&mut found.1)
    }

    /// Is an event of this key at this position to be parked behind another?
    #[must_use]
    pub fn holds(
        &self,
        hash: u64,
        aggregate_type: Option<&[u8]>,
        aggregate_id: &[u8],
        at: Position,
    ) -> bool {
        self.count > 0
            && self
                .entry(hash, aggregate_type, aggregate_id)
                .is_some_and(|entry| at >= entry.from)
    }

    #[must_use]
    pub fn is_parked(&self, key: &EventKey) -> bool {
        self.entry(
            hash_of(key),
            key.aggregate_type.as_deref(),
            &key.aggregate_id,
        )
        .is_some()
    }

    #[must_use]
    pub fn is_retried(&self, key: &EventKey) -> bool {
        self.entry(
            hash_of(key),
            key.aggregate_type.as_deref(),
            &key.aggregate_id,
        )
        .is_some_and(|entry| entry.is_retried)
    }

    /// Was this very event delivered, discarded, or parked without a key before? Another one may
    /// bear the same id: whoever emits an event again wants it published.
    #[must_use]
    pub fn is_settled(&self, event_id: &[u8], at: Position) -> bool {
        !self.settled.is_empty()
            && self
                .settled
                .get(&at)
                .is_some_and(|known| known.event_id.starts_with(event_id))
    }

    /// As [`ParkedKeys::is_settled`], of a row that is read from the table, which its transaction
    /// wrote.
    #[must_use]
    pub fn is_settled_row(&self, event_id: &[u8], xid: Xid) -> bool {
        let known = self.healed.get(event_id);
        known.is_some_and(|known| known.is_none_or(|known| known == xid))
    }

    /// Parks a key from here on. Returns whether it was not before.
    pub fn park(&mut self, key: &EventKey, from: Position) -> bool {
        let since_look = self.looks;
        if let Some(entry) = self.entry_mut(key) {
            entry.from = entry.from.min(from);
            // A look that began before may miss this event, and find the others gone.
            entry.since_look = since_look;
            return false;
        }
        self.insert(key.clone(), from, false, since_look);
        true
    }

    fn insert(&mut self, key: EventKey, from: Position, is_retried: bool, since_look: u64) {
        let entry = Entry {
            from,
            is_retried,
            since_look,
        };
        self.keys
            .entry(hash_of(&key))
            .or_default()
            .push((key, entry));
        self.count += 1;
        self.retried += usize::from(is_retried);
    }

    /// The key's events are published again.
    pub fn unpark(&mut self, key: &EventKey) {
        if let Some(freed) = &mut self.freed {
            freed.insert(key.clone());
        }
        let hash = hash_of(key);
        let Some(list) = self.keys.get_mut(&hash) else {
            return;
        };
        if let Some(index) = list.iter().position(|(own, _)| own == key) {
            let (_, entry) = list.swap_remove(index);
            self.count -= 1;
            self.retried -= usize::from(entry.is_retried);
        }
        if list.is_empty() {
            self.keys.remove(&hash);
        }
    }

    /// The retry of the key failed: it is not tried again by itself.
    pub fn give_up_retry(&mut self, key: &EventKey) {
        if let Some(entry) = self.entry_mut(key)
            && std::mem::take(&mut entry.is_retried)
        {
            self.retried -= 1;
        }
    }

    /// A look at the database begins: what is parked from now on it need not show.
    pub fn look(&mut self) {
        self.looks += 1;
        self.freed = Some(HashSet::new());
    }

    /// What the look showed. A key that it does not show has no dead letter any more (they were
    /// discarded), unless it was parked since, or some of it `is_under_way` to the table or from
    /// it.
    pub fn looked(&mut self, parked: Parked, is_under_way: impl Fn(&EventKey) -> bool) {
        let mut old = std::mem::take(self);
        self.looks = old.looks;
        for settled in parked.settled {
            self.healed.insert(settled.event_id.clone(), settled.xid);
            self.settled.insert(settled.position, settled);
        }
        let freed = old.freed.take().unwrap_or_default();
        for shown in parked.keys {
            if freed.contains(&shown.key) {
                continue;
            }
            self.insert(shown.key, shown.from, shown.is_retried, 0);
        }
        for (key, entry) in old.keys.drain().flat_map(|(_, list)| list) {
            if self.is_parked(&key) {
                continue;
            }
            if entry.since_look >= old.looks || is_under_way(&key) {
                self.insert(key, entry.from, entry.is_retried, entry.since_look);
            }
        }
    }

    /// Everything, for another history or another leader.
    pub fn clear(&mut self) {
        let looks = self.looks;
        *self = ParkedKeys {
            looks,
            ..ParkedKeys::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lsn::Lsn;

    fn key(id: &str) -> EventKey {
        EventKey {
            aggregate_type: Some(Box::from(&b"order"[..])),
            aggregate_id: Box::from(id.as_bytes()),
        }
    }

    fn at(commit_lsn: u64) -> Position {
        Position {
            generation: 1,
            commit_lsn: Lsn(commit_lsn),
            ordinal: 0,
        }
    }

    #[test]
    fn a_key_that_a_look_does_not_show_is_free() {
        let mut parked = ParkedKeys::default();
        assert!(parked.park(&key("a"), at(10)));
        parked.look();
        parked.looked(Parked::default(), |_| false);
        assert!(!parked.is_parked(&key("a")));
    }

    #[test]
    fn an_event_parked_behind_others_since_the_look_began_keeps_its_key() {
        let mut parked = ParkedKeys::default();
        parked.park(&key("a"), at(10));
        parked.look();
        // Somebody has discarded the first; the look was made before this one was written.
        assert!(!parked.park(&key("a"), at(20)));
        parked.looked(Parked::default(), |_| false);
        assert!(parked.is_parked(&key("a")));
    }
}
