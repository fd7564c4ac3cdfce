//! What the end of a topic holds: the `event_id`s by which a re-sent event is known again as one
//! that Kafka already has.
//!
//! # Invariants
//! - Exact: an event counts as delivered only where the very bytes of its id were read. A digest
//!   that two ids share would lose an event.
//! - Bounded, whatever other producers write into the same header.

use std::collections::HashSet;

/// For ids that are no UUIDs. 200,000 of 64 bytes, each with what a set and an allocation add, are
/// about 20 MB; whoever writes longer ones gets fewer of them.
const OTHER_BYTES_MAX: usize = 16 << 20;
/// What an id that is kept as its bytes costs beside them: pointer, length, the allocator's share.
const OTHER_OVERHEAD: usize = 32;

/// The `event_id`s that were read from a topic's end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// In the spelling that Postgres prints, and in no other: that one can be told from its number.
    uuids: HashSet<u128>,
    /// Everything else, as it came.
    others: HashSet<Box<[u8]>>,
    other_bytes: usize,
}

/// Whether there was room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    New,
    Known,
    NoRoom,
}

impl Tail {
    #[must_use]
    pub fn contains(&self, event_id: &[u8]) -> bool {
        match canonical_uuid(event_id) {
            Some(uuid) => self.uuids.contains(&uuid),
            None => self.others.contains(event_id),
        }
    }

    pub fn insert(&mut self, event_id: &[u8]) -> Kept {
        if let Some(uuid) = canonical_uuid(event_id) {
            return if self.uuids.insert(uuid) {
                Kept::New
            } else {
                Kept::Known
            };
        }
        if self.others.contains(event_id) {
            return Kept::Known;
        }
        let cost = event_id.len() + OTHER_OVERHEAD;
        if self.other_bytes + cost > OTHER_BYTES_MAX {
            return Kept::NoRoom;
        }
        self.other_bytes += cost;
        self.others.insert(event_id.into());
        Kept::New
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.uuids.len() + self.others.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.uuids.is_empty() && self.others.is_empty()
    }
}

impl<'a> FromIterator<&'a [u8]> for Tail {
    fn from_iter<I: IntoIterator<Item = &'a [u8]>>(ids: I) -> Self {
        let mut tail = Tail::default();
        for id in ids {
            tail.insert(id);
        }
        tail
    }
}

/// What came of reading a topic's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TailAnswer {
    Read {
        tail: Tail,
        /// False: there was more than is ever read, and only the newest is here.
        complete: bool,
    },
    /// This principal may not read the topic.
    Denied,
    /// Nobody answered, or the answer was an error: ask again.
    Failed(String),
}

/// The number of a UUID in lower case with its four dashes; `None` for any other text.
fn canonical_uuid(text: &[u8]) -> Option<u128> {
    const LENGTH: usize = 36;
    const DASHES: [usize; 4] = [8, 13, 18, 23];
    if text.len() != LENGTH {
        return None;
    }
    let mut number = 0;
    for (at, byte) in text.iter().enumerate() {
        let is_dash = DASHES.contains(&at);
        let digit = match byte {
            b'-' if is_dash => continue,
            b'0'..=b'9' if !is_dash => byte - b'0',
            b'a'..=b'f' if !is_dash => byte - b'a' + 10,
            _ => return None,
        };
        number = number << 4 | u128::from(digit);
    }
    Some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123abcd-4567-89ef-0123-456789abcdef";

    #[test]
    fn an_id_is_known_again_by_its_very_bytes_alone() {
        let mut tail = Tail::default();
        assert!(tail.is_empty());
        assert_eq!(tail.insert(ID.as_bytes()), Kept::New);
        assert_eq!(tail.insert(ID.as_bytes()), Kept::Known);
        let others = [
            ID.to_uppercase(),
            format!("{{{ID}}}"),
            ID.replace('-', ""),
            "0123abcd45-67-89ef-0123-456789abcdef".to_owned(),
            "0123abcd-4567-89ef-0123-456789abcdeg".to_owned(),
            "42".to_owned(),
            String::new(),
        ];
        for other in &others {
            assert!(!tail.contains(other.as_bytes()), "{other}");
        }
        for other in &others {
            assert_eq!(tail.insert(other.as_bytes()), Kept::New, "{other}");
            assert_eq!(tail.insert(other.as_bytes()), Kept::Known, "{other}");
            assert!(tail.contains(other.as_bytes()), "{other}");
        }
        assert!(tail.contains(ID.as_bytes()));
        assert!(!tail.contains(b"\xff"));
        assert_eq!(tail.len(), 1 + others.len());
        assert_eq!(
            canonical_uuid(ID.as_bytes()),
            Some(0x0123_abcd_4567_89ef_0123_4567_89ab_cdef)
        );
    }

    #[test]
    fn foreign_ids_have_an_end() {
        let mut tail = Tail::default();
        let id = |n: u32| [&n.to_be_bytes()[..], &[b'x'; 1 << 20]].concat();
        assert!((0..15).all(|n| tail.insert(&id(n)) == Kept::New));
        assert_eq!(tail.insert(&id(15)), Kept::NoRoom);
        assert!(!tail.contains(&id(15)), "what was not kept is sent again");
        assert_eq!(tail.insert(&id(3)), Kept::Known);
        assert_eq!(tail.insert(ID.as_bytes()), Kept::New);
    }
}
