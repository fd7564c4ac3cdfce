//! Frames that real servers sent, and what they mean; and bytes that nobody would send.
//!
//! `tests/golden/capture.sh` makes the frames anew; with `GOLDEN_BLESS=1` the texts are written
//! anew, for a person to read.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use walrelay::lsn::{Lsn, PgTimestamp, Triple, Xid};
use walrelay::wire::DecodeError;
use walrelay::wire::pgoutput::{Column, Message, Oid};
use walrelay::wire::replication::{ReplicationMessage, Reply};

use crate::frames;

fn file(name: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.join("tests/golden").join(name)
}

/// The frames of a capture: (lsn, bytes).
fn split(mut rest: &[u8]) -> Vec<(Lsn, Vec<u8>)> {
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let (lsn, tail) = rest.split_at(8);
        let (length, tail) = tail.split_at(4);
        let length = u32::from_be_bytes(length.try_into().expect("four bytes"));
        let (frame, tail) = tail.split_at(length as usize);
        let lsn = u64::from_be_bytes(lsn.try_into().expect("eight bytes"));
        frames.push((Lsn(lsn), frame.to_vec()));
        rest = tail;
    }
    frames
}

fn value(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    if bytes.len() <= 60 {
        return format!("{text:?}");
    }
    let sum = bytes.iter().fold(0u64, |sum, b| {
        sum.wrapping_mul(31).wrapping_add(u64::from(*b))
    });
    let start: String = text.chars().take(16).collect();
    format!("{start:?}... {} bytes, sum {sum:016x}", bytes.len())
}

fn describe(frame: &[u8]) -> String {
    match Message::decode(frame).expect("a real server's frame") {
        Message::Begin(triple) => format!("begin {triple}"),
        Message::Commit {
            commit_lsn,
            end_lsn,
            commit_time,
        } => format!("commit {commit_lsn} end {end_lsn} at {} µs", commit_time.0),
        Message::Relation(relation) => {
            let columns = relation
                .columns()
                .map(|c| format!("{} {}", String::from_utf8_lossy(c.name), c.type_oid.0));
            format!(
                "relation {} {}.{} ({})",
                relation.oid.0,
                String::from_utf8_lossy(relation.namespace),
                String::from_utf8_lossy(relation.name),
                columns.collect::<Vec<_>>().join(", ")
            )
        }
        Message::Type {
            oid,
            namespace,
            name,
        } => {
            let text = |bytes| String::from_utf8_lossy(bytes);
            format!("type {} is {}.{}", oid.0, text(namespace), text(name))
        }
        Message::Insert { relation, tuple } => {
            let columns = tuple.columns().map(|column| match column {
                Column::Null => "null".to_owned(),
                Column::UnchangedToast => "unchanged".to_owned(),
                Column::Text(bytes) => value(bytes),
                Column::Binary(bytes) => format!("binary {}", value(bytes)),
            });
            let columns = columns.collect::<Vec<_>>().join(", ");
            format!("insert into {} ({columns})", relation.0)
        }
        Message::Other(tag) => format!("passed over: {:?}", char::from(tag)),
    }
}

fn check_golden(version: &str) {
    let frames = split(&fs::read(file(&format!("pg{version}.bin"))).expect("a capture"));
    assert!(frames.len() > 50, "a whole capture");
    let mut text = String::new();
    for (lsn, frame) in &frames {
        let _ = writeln!(text, "{lsn} {}", describe(frame));
    }
    let path = file(&format!("pg{version}.txt"));
    if std::env::var_os("GOLDEN_BLESS").is_some() {
        fs::write(&path, &text).expect("tests/golden can be written");
    }
    let expected = fs::read_to_string(&path).expect("what the frames mean");
    for (found, expected) in text.lines().zip(expected.lines()) {
        assert_eq!(found, expected);
    }
    assert_eq!(text.lines().count(), expected.lines().count());
}

#[test]
fn frames_of_postgres_15_mean_what_is_written_beside_them() {
    check_golden("15");
}

#[test]
fn frames_of_postgres_18_mean_what_is_written_beside_them() {
    check_golden("18");
}

/// Each message that we decode, in full, with its last byte not to be missed.
fn whole_messages() -> Vec<Vec<u8>> {
    let triple = Triple {
        commit_lsn: Lsn(0x1_0203_0405),
        xid: Xid(77),
        commit_time: PgTimestamp(-5),
    };
    let long = vec![b'v'; 300];
    vec![
        frames::begin(&triple),
        frames::commit(&triple, Lsn(9)),
        frames::relation(&frames::OUTBOX),
        frames::insert(5, &[Some(b"a"), None, Some(&long), Some(b"")]),
    ]
}

#[test]
fn every_truncation_is_an_error_that_names_the_offset() {
    let mut whole = whole_messages();
    for version in ["15", "18"] {
        let frames = split(&fs::read(file(&format!("pg{version}.bin"))).expect("a capture"));
        let short = frames
            .into_iter()
            .map(|(_, frame)| frame)
            .filter(|f| f.len() < 1_000);
        whole.extend(short);
    }
    for message in whole {
        if matches!(Message::decode(&message), Ok(Message::Other(_))) {
            continue;
        }
        for length in 0..message.len() {
            match Message::decode(&message[..length]) {
                Err(DecodeError::Truncated { at, have, want }) => {
                    assert_eq!(at + have, length, "of {message:02x?}");
                    assert!(want > 0);
                }
                other => panic!("{length} bytes of {message:02x?}: {other:?}"),
            }
        }
        assert!(Message::decode(&message).is_ok());
    }
}

#[test]
fn every_truncation_of_what_carries_them_too() {
    let clock = PgTimestamp(3);
    let keepalive = frames::keepalive(Lsn(7), clock, true);
    for length in 0..keepalive.len() {
        let cut = ReplicationMessage::decode(&keepalive[..length]);
        assert!(
            matches!(cut, Err(DecodeError::Truncated { .. })),
            "{length}: {cut:?}"
        );
    }
    let whole = ReplicationMessage::decode(&keepalive);
    let expected = ReplicationMessage::Keepalive {
        wal_end: Lsn(7),
        clock,
        reply: Reply::Requested,
    };
    assert_eq!(whole, Ok(expected));
    let data = frames::xlog_data(Lsn(8), clock, b"");
    for length in 0..data.len() {
        let cut = ReplicationMessage::decode(&data[..length]);
        assert!(
            matches!(cut, Err(DecodeError::Truncated { .. })),
            "{length}: {cut:?}"
        );
    }
}

/// Walks all that a message borrows: nothing may reach outside of the bytes it was made of.
fn walk(bytes: &[u8]) -> Result<usize, DecodeError> {
    let inside = |part: &[u8]| {
        let (start, end) = (bytes.as_ptr_range().start, bytes.as_ptr_range().end);
        part.is_empty() || (part.as_ptr_range().start >= start && part.as_ptr_range().end <= end)
    };
    let mut count = 0;
    match Message::decode(bytes)? {
        Message::Relation(relation) => {
            assert!(inside(relation.name) && inside(relation.namespace));
            for column in relation.columns() {
                assert!(inside(column.name));
                count += 1;
            }
        }
        Message::Insert { tuple, .. } => {
            for column in tuple.columns() {
                match column {
                    Column::Null | Column::UnchangedToast => {}
                    Column::Text(part) | Column::Binary(part) => assert!(inside(part)),
                }
                count += 1;
            }
            assert_eq!(count, tuple.len());
        }
        Message::Type {
            namespace, name, ..
        } => assert!(inside(namespace) && inside(name)),
        Message::Begin(_) | Message::Commit { .. } | Message::Other(_) => {}
    }
    // A column takes a byte at least: nothing is counted that is not there.
    assert!(count <= bytes.len());
    Ok(count)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = walk(&bytes);
        let _ = ReplicationMessage::decode(&bytes);
    }

    #[test]
    fn arbitrary_bytes_behind_a_true_tag_never_panic(
        tag in prop::sample::select(b"BCRIYTUDOMbPKrSEcAwk".to_vec()),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut message = vec![tag];
        message.extend(bytes);
        let _ = walk(&message);
        let _ = ReplicationMessage::decode(&message);
    }

    #[test]
    fn a_message_with_one_byte_changed_never_panics(
        which in 0..4usize, at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let mut message = whole_messages().swap_remove(which);
        let at = at.index(message.len());
        message[at] = byte;
        let _ = walk(&message);
    }

    #[test]
    fn an_insert_is_read_as_it_was_written(
        values in prop::collection::vec(prop::option::of(prop::collection::vec(any::<u8>(), 0..50)), 0..12),
    ) {
        let columns: Vec<Option<&[u8]>> = values.iter().map(Option::as_deref).collect();
        let message = frames::insert(42, &columns);
        let decoded = Message::decode(&message);
        let Ok(Message::Insert { relation, tuple }) = decoded else {
            panic!("{decoded:?}");
        };
        prop_assert_eq!(relation, Oid(42));
        let found: Vec<Option<&[u8]>> = tuple.columns().map(|column| match column {
            Column::Text(bytes) => Some(bytes),
            Column::Null | Column::UnchangedToast | Column::Binary(_) => None,
        }).collect();
        prop_assert_eq!(found, columns);
    }
}
