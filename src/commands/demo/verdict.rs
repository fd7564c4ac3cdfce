//! Judges a demo by its history alone: what the shop knows it committed, and what the consumer
//! got. Pure, so that it can be seen to fail.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// An event whose commit was confirmed to the shop.
#[derive(Clone, Debug)]
pub struct Written {
    pub event_id: u128,
    pub key: String,
    /// From 1, without gaps, per key.
    pub seq: u64,
    /// When the commit had returned.
    pub at: Instant,
}

/// An event as the consumer got it.
#[derive(Clone, Debug)]
pub struct Received {
    pub event_id: u128,
    pub key: String,
    pub seq: u64,
    pub at: Instant,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub written: usize,
    /// Rows of the outbox at the end, as Postgres counts them.
    pub in_table: usize,
    /// Different events that were written and arrived.
    pub delivered: usize,
    pub lost: usize,
    pub out_of_order: usize,
    pub duplicates: usize,
    /// Arrived and were never committed: rolled back, or nobody's.
    pub strangers: usize,
    /// Arrived with another key or number than was written.
    pub altered: usize,
    /// From the return of the commit to the consumer, of first deliveries; sorted.
    pub latencies: Vec<Duration>,
}

impl Verdict {
    /// `received` is in the order of arrival.
    pub fn of(written: &[Written], received: &[Received], in_table: usize) -> Self {
        let known: HashMap<u128, &Written> = written.iter().map(|w| (w.event_id, w)).collect();
        let mut verdict = Verdict {
            written: written.len(),
            in_table,
            ..Verdict::default()
        };
        let mut seen = HashSet::new();
        let mut highest: HashMap<&str, u64> = HashMap::new();
        for event in received {
            let Some(origin) = known.get(&event.event_id) else {
                verdict.strangers += 1;
                continue;
            };
            if !seen.insert(event.event_id) {
                verdict.duplicates += 1;
                continue;
            }
            verdict.delivered += 1;
            if event.key != origin.key || event.seq != origin.seq {
                verdict.altered += 1;
            }
            let highest = highest.entry(event.key.as_str()).or_default();
            if event.seq < *highest {
                verdict.out_of_order += 1;
            }
            *highest = event.seq.max(*highest);
            // A record may be there before the writer hears that its commit is done: zero.
            let latency = event.at.saturating_duration_since(origin.at);
            verdict.latencies.push(latency);
        }
        verdict.lost = verdict.written - verdict.delivered;
        verdict.latencies.sort_unstable();
        verdict
    }

    /// Is everything as it was promised?
    #[must_use]
    pub fn holds(&self) -> bool {
        self.written == self.delivered
            && self.written == self.in_table
            && self.lost == 0
            && self.out_of_order == 0
            && self.duplicates == 0
            && self.strangers == 0
            && self.altered == 0
    }

    /// The latency that `percent` of the events did not exceed; `None` without events.
    #[must_use]
    pub fn latency(&self, percent: usize) -> Option<Duration> {
        let rank = (self.latencies.len() * percent).div_ceil(100);
        self.latencies.get(rank.saturating_sub(1)).copied()
    }

    /// What is wrong, one thing a line.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let counts = [
            (self.lost, "written and not delivered"),
            (self.out_of_order, "delivered behind a later one of its key"),
            (self.duplicates, "delivered again"),
            (self.strangers, "delivered without having been committed"),
            (
                self.altered,
                "delivered with another key or number than written",
            ),
            (
                self.written.abs_diff(self.in_table),
                "more or fewer in the outbox table than the shop committed",
            ),
        ];
        counts
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three events of each of two keys, delivered key by key.
    fn history() -> (Vec<Written>, Vec<Received>) {
        let at = Instant::now();
        let mut written = Vec::new();
        for (n, key) in ["ada", "bela"].into_iter().enumerate() {
            for seq in 1..=3 {
                written.push(Written {
                    event_id: u128::try_from(n).expect("small") * 10 + u128::from(seq),
                    key: key.to_owned(),
                    seq,
                    at,
                });
            }
        }
        let received = written
            .iter()
            .map(|w| Received {
                event_id: w.event_id,
                key: w.key.clone(),
                seq: w.seq,
                at: at + Duration::from_millis(w.seq),
            })
            .collect();
        (written, received)
    }

    #[test]
    fn a_whole_history_holds() {
        let (written, received) = history();
        let verdict = Verdict::of(&written, &received, 6);
        assert!(verdict.holds(), "{verdict:?}");
        assert_eq!(verdict.delivered, 6);
        assert_eq!(verdict.latency(50), Some(Duration::from_millis(2)));
        assert_eq!(verdict.latency(99), Some(Duration::from_millis(3)));
        assert!(Verdict::of(&[], &[], 0).holds());
        assert_eq!(Verdict::of(&[], &[], 0).latency(50), None);
    }

    #[test]
    fn a_lost_event_is_seen() {
        let (written, mut received) = history();
        received.remove(4);
        let verdict = Verdict::of(&written, &received, 6);
        assert_eq!((verdict.lost, verdict.out_of_order), (1, 0));
        assert!(!verdict.holds());
        assert_eq!(verdict.complaints(), ["1 written and not delivered"]);
    }

    #[test]
    fn a_swap_within_a_key_is_seen_and_between_keys_is_none() {
        let (written, mut received) = history();
        received.swap(1, 2);
        let verdict = Verdict::of(&written, &received, 6);
        assert_eq!(verdict.out_of_order, 1);
        assert!(!verdict.holds());
        let (written, mut received) = history();
        received.swap(2, 3);
        assert!(Verdict::of(&written, &received, 6).holds());
    }

    #[test]
    fn a_repeated_event_is_a_duplicate_and_not_out_of_order() {
        let (written, mut received) = history();
        received.push(received[0].clone());
        let verdict = Verdict::of(&written, &received, 6);
        assert_eq!((verdict.duplicates, verdict.out_of_order), (1, 0));
        assert!(!verdict.holds());
    }

    #[test]
    fn an_event_that_was_never_committed_is_seen() {
        let (written, mut received) = history();
        received[5].event_id = 99;
        let verdict = Verdict::of(&written, &received, 6);
        assert_eq!((verdict.strangers, verdict.lost), (1, 1));
        assert!(!verdict.holds());
    }

    #[test]
    fn a_changed_event_and_a_table_that_disagrees_are_seen() {
        let (written, mut received) = history();
        received[5].key = "cleo".to_owned();
        assert_eq!(Verdict::of(&written, &received, 6).altered, 1);
        let (written, received) = history();
        assert!(!Verdict::of(&written, &received, 7).holds());
    }
}
