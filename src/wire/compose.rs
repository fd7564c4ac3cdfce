//! Messages of the stream, written: rows that are read from the table come to the decider in the
//! very shape in which the server would have sent them.

use crate::lsn::{Lsn, PgTimestamp, Triple};

/// A column of a Relation message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnType {
    pub name: Vec<u8>,
    pub type_oid: u32,
}

/// The body of a CopyData message that carries `data`.
fn xlog_data(clock: PgTimestamp, data: impl FnOnce(&mut Vec<u8>), out: &mut Vec<u8>) {
    out.push(b'w');
    out.extend(0_u64.to_be_bytes());
    out.extend(0_u64.to_be_bytes());
    out.extend(clock.0.to_be_bytes());
    data(out);
}

pub fn begin(triple: Triple, clock: PgTimestamp, out: &mut Vec<u8>) {
    xlog_data(
        clock,
        |out| {
            out.push(b'B');
            out.extend(triple.commit_lsn.0.to_be_bytes());
            out.extend(triple.commit_time.0.to_be_bytes());
            out.extend(triple.xid.0.to_be_bytes());
        },
        out,
    );
}

pub fn commit(triple: Triple, end_lsn: Lsn, clock: PgTimestamp, out: &mut Vec<u8>) {
    xlog_data(
        clock,
        |out| {
            out.extend([b'C', 0]);
            out.extend(triple.commit_lsn.0.to_be_bytes());
            out.extend(end_lsn.0.to_be_bytes());
            out.extend(triple.commit_time.0.to_be_bytes());
        },
        out,
    );
}

pub fn relation(oid: u32, columns: &[ColumnType], clock: PgTimestamp, out: &mut Vec<u8>) {
    xlog_data(
        clock,
        |out| {
            out.push(b'R');
            out.extend(oid.to_be_bytes());
            // Namespace and name: nobody reads them.
            out.extend([0, 0]);
            out.push(b'd');
            out.extend(count(columns.len()).to_be_bytes());
            for column in columns {
                out.push(0);
                out.extend(&column.name);
                out.push(0);
                out.extend(column.type_oid.to_be_bytes());
                out.extend((-1_i32).to_be_bytes());
            }
        },
        out,
    );
}

pub fn insert<'a>(
    oid: u32,
    columns: impl ExactSizeIterator<Item = Option<&'a [u8]>>,
    clock: PgTimestamp,
    out: &mut Vec<u8>,
) {
    xlog_data(
        clock,
        |out| {
            out.push(b'I');
            out.extend(oid.to_be_bytes());
            out.push(b'N');
            out.extend(count(columns.len()).to_be_bytes());
            for column in columns {
                match column {
                    None => out.push(b'n'),
                    Some(text) => {
                        out.push(b't');
                        let length = i32::try_from(text.len()).unwrap_or(i32::MAX);
                        out.extend(length.to_be_bytes());
                        out.extend(text);
                    }
                }
            }
        },
        out,
    );
}

pub fn keepalive(wal_end: Lsn, clock: PgTimestamp, out: &mut Vec<u8>) {
    out.push(b'k');
    out.extend(wal_end.0.to_be_bytes());
    out.extend(clock.0.to_be_bytes());
    out.push(1);
}

/// A table has at most 1,600 columns.
fn count(columns: usize) -> i16 {
    i16::try_from(columns).unwrap_or(i16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lsn::Xid;
    use crate::wire::pgoutput::{Column, Message, Oid};
    use crate::wire::replication::ReplicationMessage;

    fn data(body: &[u8]) -> &[u8] {
        match ReplicationMessage::decode(body) {
            Ok(ReplicationMessage::XLogData { data, .. }) => data,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let triple = Triple {
            commit_lsn: Lsn(7),
            xid: Xid(9),
            commit_time: PgTimestamp(11),
        };
        let mut body = Vec::new();
        begin(triple, PgTimestamp(1), &mut body);
        assert_eq!(Message::decode(data(&body)), Ok(Message::Begin(triple)));

        let columns = [("id", 20), ("payload", 3802)].map(|(name, type_oid)| ColumnType {
            name: name.as_bytes().to_vec(),
            type_oid,
        });
        let mut body = Vec::new();
        relation(42, &columns, PgTimestamp(1), &mut body);
        let Ok(Message::Relation(read)) = Message::decode(data(&body)) else {
            panic!("no Relation");
        };
        assert_eq!(read.oid, Oid(42));
        let names: Vec<_> = read.columns().map(|c| (c.name, c.type_oid.0)).collect();
        assert_eq!(names, [(&b"id"[..], 20), (&b"payload"[..], 3802)]);

        let mut body = Vec::new();
        let row = [Some(&b"1"[..]), None];
        insert(42, row.into_iter(), PgTimestamp(1), &mut body);
        let Ok(Message::Insert { relation, tuple }) = Message::decode(data(&body)) else {
            panic!("no Insert");
        };
        assert_eq!(relation, Oid(42));
        assert_eq!(
            tuple.columns().collect::<Vec<_>>(),
            [Column::Text(b"1"), Column::Null]
        );
    }
}
