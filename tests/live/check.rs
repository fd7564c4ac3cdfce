//! The judge. It reads only two things: the records a consumer saw, and what the writers say was
//! committed. It knows nothing of the relay.

use std::collections::{HashMap, HashSet};

use crate::kafka::Rec;

/// Committed events of each key, in commit order within the key.
#[derive(Clone, Debug, Default)]
pub struct Committed {
    by_key: HashMap<String, Vec<String>>,
}

impl Committed {
    pub fn new() -> Committed {
        Committed::default()
    }

    pub fn push(&mut self, key: impl Into<String>, event_id: impl Into<String>) {
        self.by_key
            .entry(key.into())
            .or_default()
            .push(event_id.into());
    }

    /// Takes in what another writer committed; writers do not share keys.
    pub fn merge(&mut self, other: Committed) {
        for (key, events) in other.by_key {
            let before = self.by_key.insert(key, events);
            assert!(before.is_none(), "two writers wrote one key");
        }
    }

    /// Every event, in no order.
    pub fn events(&self) -> impl Iterator<Item = &String> {
        self.by_key.values().flatten()
    }

    pub fn len(&self) -> usize {
        self.by_key.values().map(Vec::len).sum()
    }
}

/// What is wrong with what was consumed, and how many records came more than once.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub lost: Vec<String>,
    /// Records of events that no writer committed.
    pub invented: Vec<String>,
    /// Keys whose first deliveries are not in commit order.
    pub reordered: Vec<String>,
    /// Records beyond the first of an event.
    pub duplicates: usize,
    pub records: usize,
}

pub fn check(records: &[Rec], committed: &Committed) -> Verdict {
    let mut verdict = Verdict {
        records: records.len(),
        ..Verdict::default()
    };
    let mut sorted: Vec<&Rec> = records.iter().collect();
    sorted.sort_by_key(|r| (r.partition, r.offset));

    let mut seen = HashSet::new();
    let mut partition_of: HashMap<String, i32> = HashMap::new();
    let mut first_deliveries: HashMap<String, Vec<String>> = HashMap::new();
    for record in sorted {
        let (key, event) = (record.key_text(), record.event_id());
        let partition = *partition_of.entry(key.clone()).or_insert(record.partition);
        if partition != record.partition {
            verdict.reordered.push(format!("{key}: in two partitions"));
        }
        if seen.insert(event.clone()) {
            first_deliveries.entry(key).or_default().push(event);
        } else {
            verdict.duplicates += 1;
        }
    }

    for (key, events) in &committed.by_key {
        let delivered = first_deliveries.remove(key).unwrap_or_default();
        let there: HashSet<&String> = delivered.iter().collect();
        let known: HashSet<&String> = events.iter().collect();
        verdict
            .lost
            .extend(events.iter().filter(|e| !there.contains(e)).cloned());
        verdict
            .invented
            .extend(delivered.iter().filter(|e| !known.contains(e)).cloned());
        let expected = events.iter().filter(|e| there.contains(e));
        let came = delivered.iter().filter(|e| known.contains(e));
        if !expected.eq(came) {
            verdict.reordered.push(key.clone());
        }
    }
    verdict
        .invented
        .extend(first_deliveries.into_values().flatten());
    verdict
}

impl Verdict {
    /// Nothing lost, nothing invented, order kept; repeats are allowed.
    #[track_caller]
    pub fn assert_complete_and_ordered(&self) {
        let Verdict {
            lost,
            invented,
            reordered,
            duplicates,
            records,
        } = self;
        assert!(
            lost.is_empty() && invented.is_empty() && reordered.is_empty(),
            "{} lost {:?}, {} invented {:?}, {} keys out of order {:?}; {records} records, {duplicates} duplicates",
            lost.len(),
            first(lost),
            invented.len(),
            first(invented),
            reordered.len(),
            first(reordered),
        );
    }

    /// The same, and every event exactly once.
    #[track_caller]
    pub fn assert_exactly_once(&self) {
        self.assert_complete_and_ordered();
        assert_eq!(
            self.duplicates, 0,
            "duplicates among {} records",
            self.records
        );
    }
}

fn first(all: &[String]) -> &[String] {
    &all[..all.len().min(5)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(partition: i32, offset: i64, key: &str, event: &str) -> Rec {
        Rec {
            partition,
            offset,
            key: Some(key.into()),
            value: None,
            headers: vec![("event_id".into(), Some(event.into()))],
            timestamp_ms: None,
        }
    }

    fn committed() -> Committed {
        let mut committed = Committed::new();
        for event in ["1", "2", "3"] {
            committed.push("k", event);
        }
        committed
    }

    #[test]
    fn the_judge_accepts_a_repeated_suffix_and_counts_it() {
        let events = ["1", "2", "2", "3"];
        let records: Vec<Rec> = (0..)
            .zip(events)
            .map(|(o, e)| record(0, o, "k", e))
            .collect();
        let verdict = check(&records, &committed());
        verdict.assert_complete_and_ordered();
        assert_eq!(verdict.duplicates, 1);
    }

    #[test]
    fn the_judge_sees_what_is_lost_reordered_or_invented() {
        let lost = check(
            &[record(0, 0, "k", "1"), record(0, 1, "k", "3")],
            &committed(),
        );
        assert_eq!(lost.lost, ["2"]);
        assert!(lost.reordered.is_empty());
        let events = ["1", "3", "2", "4"];
        let records: Vec<Rec> = (0..)
            .zip(events)
            .map(|(o, e)| record(0, o, "k", e))
            .collect();
        let verdict = check(&records, &committed());
        assert_eq!(verdict.reordered, ["k"]);
        assert_eq!(verdict.invented, ["4"]);
        let split = [
            record(0, 0, "k", "1"),
            record(1, 0, "k", "2"),
            record(0, 1, "k", "3"),
        ];
        assert!(!check(&split, &committed()).reordered.is_empty());
    }
}
