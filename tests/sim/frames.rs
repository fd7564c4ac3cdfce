//! The server's half of the wire: pgoutput messages and what carries them, as bytes.

use walrelay::lsn::{Lsn, PgTimestamp, Triple};

/// A relation of the outbox's shape. Foreign tables have one column.
pub struct Table {
    pub oid: u32,
    pub name: &'static str,
    pub columns: &'static [(&'static str, u32)],
}

const TEXT: u32 = 25;
const JSONB: u32 = 3802;
const UUID: u32 = 2950;

pub const OUTBOX: Table = Table {
    oid: 16_400,
    name: "outbox",
    columns: &[
        ("id", 20),
        ("event_id", UUID),
        ("aggregate_type", TEXT),
        ("aggregate_id", TEXT),
        ("event_type", TEXT),
        ("payload", JSONB),
        ("headers", JSONB),
    ],
};

pub const FOREIGN: Table = Table {
    oid: 16_999,
    name: "audit",
    columns: &[("id", 20)],
};

pub fn begin(triple: &Triple) -> Vec<u8> {
    let mut out = vec![b'B'];
    out.extend(triple.commit_lsn.0.to_be_bytes());
    out.extend(triple.commit_time.0.to_be_bytes());
    out.extend(triple.xid.0.to_be_bytes());
    out
}

pub fn commit(triple: &Triple, end_lsn: Lsn) -> Vec<u8> {
    let mut out = vec![b'C', 0];
    out.extend(triple.commit_lsn.0.to_be_bytes());
    out.extend(end_lsn.0.to_be_bytes());
    out.extend(triple.commit_time.0.to_be_bytes());
    out
}

pub fn relation(table: &Table) -> Vec<u8> {
    let mut out = vec![b'R'];
    out.extend(table.oid.to_be_bytes());
    out.extend(b"public\0");
    out.extend(table.name.as_bytes());
    out.push(0);
    out.push(b'd');
    let count = i16::try_from(table.columns.len()).expect("few columns");
    out.extend(count.to_be_bytes());
    for (name, oid) in table.columns {
        out.push(0);
        out.extend(name.as_bytes());
        out.push(0);
        out.extend(oid.to_be_bytes());
        out.extend((-1i32).to_be_bytes());
    }
    out
}

pub fn insert(oid: u32, columns: &[Option<&[u8]>]) -> Vec<u8> {
    let mut out = vec![b'I'];
    out.extend(oid.to_be_bytes());
    out.push(b'N');
    let count = i16::try_from(columns.len()).expect("few columns");
    out.extend(count.to_be_bytes());
    for column in columns {
        match column {
            None => out.push(b'n'),
            Some(value) => {
                out.push(b't');
                let length = i32::try_from(value.len()).expect("a short value");
                out.extend(length.to_be_bytes());
                out.extend(*value);
            }
        }
    }
    out
}

/// A message that carries nothing for us: a Truncate of the outbox.
pub fn truncate(oid: u32) -> Vec<u8> {
    let mut out = vec![b'T'];
    out.extend(1i32.to_be_bytes());
    out.push(0);
    out.extend(oid.to_be_bytes());
    out
}

pub fn xlog_data(wal_start: Lsn, clock: PgTimestamp, data: &[u8]) -> Vec<u8> {
    let mut out = vec![b'w'];
    out.extend(wal_start.0.to_be_bytes());
    out.extend(wal_start.0.to_be_bytes());
    out.extend(clock.0.to_be_bytes());
    out.extend(data);
    out
}

pub fn keepalive(wal_end: Lsn, clock: PgTimestamp, reply: bool) -> Vec<u8> {
    let mut out = vec![b'k'];
    out.extend(wal_end.0.to_be_bytes());
    out.extend(clock.0.to_be_bytes());
    out.push(u8::from(reply));
    out
}
