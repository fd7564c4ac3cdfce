//! The breaker: when many different keys would be parked for one and the same reason, it is no
//! poison but an outage or a bad deploy.
//!
//! ```text
//!   closed ── 100th key within 10 minutes, same (reason, topic) ──▶ tripped (latched: the registry)
//!     ▲                                                               │ events of the topic are held;
//!     └── one of them is delivered, or `park --topic` was asked for ──┘ one a minute is tried
//! ```

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::Moment;
use crate::dead_letter::{Reason, Tripped};

/// So many different keys, and it is not about any one event.
pub const KEYS_MAX: usize = 100;
pub const WINDOW: Duration = Duration::from_secs(600);
/// How often a held event of a tripped topic is tried.
pub const TRY_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Open {
    tripped: Tripped,
    try_at: Moment,
    /// Keys that were tried already: each time it is another.
    tried: HashSet<u64>,
}

#[derive(Debug, Default)]
pub struct Breaker {
    /// Keys that were parked lately, by what they were parked for.
    recent: HashMap<(Reason, String), VecDeque<(Moment, u64)>>,
    tripped: HashMap<String, Open>,
}

impl Breaker {
    /// May a key be parked? `false`: it would be one too many, the topic is to be tripped.
    pub fn may_park(&mut self, reason: Reason, topic: &str, key: u64, now: Moment) -> bool {
        if reason == Reason::Behind {
            return true;
        }
        let recent = self.recent.entry((reason, topic.to_owned())).or_default();
        while recent.front().is_some_and(|(at, _)| now >= *at + WINDOW) {
            recent.pop_front();
        }
        if recent.iter().any(|(_, known)| *known == key) {
            return true;
        }
        if recent.len() + 1 >= KEYS_MAX {
            return false;
        }
        recent.push_back((now, key));
        true
    }

    /// From the registry, or just now.
    pub fn trip(&mut self, tripped: Tripped, now: Moment) {
        let open = Open {
            try_at: now + TRY_INTERVAL,
            tried: HashSet::new(),
            tripped: tripped.clone(),
        };
        self.tripped.insert(tripped.topic, open);
    }

    /// Events of the topic go again. Returns whether they did not before.
    pub fn open(&mut self, topic: &str) -> bool {
        self.recent.retain(|(_, of), _| of != topic);
        self.tripped.remove(topic).is_some()
    }

    #[must_use]
    pub fn is_tripped(&self, topic: &str) -> bool {
        self.tripped.contains_key(topic)
    }

    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.tripped.is_empty()
    }

    pub fn tripped(&self) -> impl Iterator<Item = &Tripped> {
        self.tripped.values().map(|open| &open.tripped)
    }

    /// Topics of which an event is to be tried now.
    pub fn due(&mut self, now: Moment) -> Vec<String> {
        let mut due = Vec::new();
        for (topic, open) in &mut self.tripped {
            if now >= open.try_at {
                open.try_at = now + TRY_INTERVAL;
                due.push(topic.clone());
            }
        }
        due
    }

    #[must_use]
    pub fn next_try_at(&self) -> Option<Moment> {
        self.tripped.values().map(|open| open.try_at).min()
    }

    #[must_use]
    pub fn was_tried(&self, topic: &str, key: u64) -> bool {
        let open = self.tripped.get(topic);
        open.is_some_and(|open| open.tried.contains(&key))
    }

    pub fn tries(&mut self, topic: &str, key: u64) {
        if let Some(open) = self.tripped.get_mut(topic) {
            open.tried.insert(key);
        }
    }

    /// All of its keys were tried: from the beginning again.
    pub fn try_all_again(&mut self, topic: &str) {
        if let Some(open) = self.tripped.get_mut(topic) {
            open.tried.clear();
        }
    }

    pub fn clear(&mut self) {
        *self = Breaker::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minutes(n: u64) -> Moment {
        Duration::from_secs(60 * n)
    }

    #[test]
    fn the_hundredth_key_is_not_parked_and_a_known_one_is() {
        let mut breaker = Breaker::default();
        for key in 0..99 {
            assert!(breaker.may_park(Reason::TooLarge, "t", key, minutes(0)));
        }
        assert!(!breaker.may_park(Reason::TooLarge, "t", 99, minutes(0)));
        assert!(breaker.may_park(Reason::TooLarge, "t", 98, minutes(0)));
        assert!(breaker.may_park(Reason::Behind, "t", 99, minutes(0)));
        assert!(breaker.may_park(Reason::Refused, "t", 99, minutes(0)));
        assert!(breaker.may_park(Reason::TooLarge, "u", 99, minutes(0)));
    }

    #[test]
    fn ten_minutes_later_they_are_forgotten() {
        let mut breaker = Breaker::default();
        for key in 0..99 {
            assert!(breaker.may_park(Reason::TooLarge, "t", key, minutes(0)));
        }
        assert!(!breaker.may_park(Reason::TooLarge, "t", 99, minutes(9)));
        assert!(breaker.may_park(Reason::TooLarge, "t", 99, minutes(10)));
    }

    #[test]
    fn an_event_is_tried_each_minute_until_the_topic_opens() {
        let mut breaker = Breaker::default();
        let tripped = Tripped {
            topic: "t".to_owned(),
            reason: Reason::TooLarge,
            message: String::new(),
            since: crate::lsn::PgTimestamp(0),
            is_park_asked: false,
        };
        breaker.trip(tripped, minutes(0));
        assert!(breaker.due(minutes(0)).is_empty());
        assert_eq!(breaker.due(minutes(1)), ["t"]);
        assert!(breaker.due(minutes(1)).is_empty());
        assert!(breaker.open("t"));
        assert!(breaker.due(minutes(9)).is_empty());
    }
}
