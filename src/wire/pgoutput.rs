//! `pgoutput`, protocol version 1 (Postgres manual, section "Logical Replication Message
//! Formats").
//!
//! # Invariants
//! Nothing is copied out of the message and nothing is allocated: every part borrows.

use super::{DecodeError, Reader};
use crate::lsn::{Lsn, PgTimestamp, Triple, Xid};

/// A table's oid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Oid(pub u32);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// `commit_lsn` is the manual's *final LSN*: where the commit record starts.
    Begin(Triple),
    Commit {
        commit_lsn: Lsn,
        end_lsn: Lsn,
        commit_time: PgTimestamp,
    },
    Relation(Relation<'a>),
    /// Precedes the Relation of a table with a column of this type, unless it is a built-in one.
    Type {
        oid: Oid,
        /// Empty: `pg_catalog`. Of a domain, namespace and name are those of the type it is over.
        namespace: &'a [u8],
        name: &'a [u8],
    },
    Insert {
        relation: Oid,
        tuple: Tuple<'a>,
    },
    /// Messages that carry nothing for us: Origin, Truncate, Update, Delete, Message.
    Other(u8),
}

/// A Relation message: precedes the first row of each shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relation<'a> {
    pub oid: Oid,
    pub namespace: &'a [u8],
    pub name: &'a [u8],
    column_count: usize,
    columns: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelationColumn<'a> {
    pub name: &'a [u8],
    pub type_oid: Oid,
}

/// One column's value, with the tag it came with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column<'a> {
    Null,
    UnchangedToast,
    Text(&'a [u8]),
    Binary(&'a [u8]),
}

/// A row. Checked whole when the message was decoded, so that walking it cannot fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuple<'a> {
    column_count: usize,
    columns: &'a [u8],
}

impl<'a> Message<'a> {
    /// Decodes one message.
    ///
    /// # Errors
    /// Missing bytes (with the offset), a malformed tuple, a two-phase message.
    pub fn decode(data: &'a [u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(data);
        let tag = reader.u8()?;
        match tag {
            b'B' => {
                let commit_lsn = Lsn(reader.u64()?);
                let commit_time = PgTimestamp(reader.i64()?);
                let xid = Xid(reader.u32()?);
                Ok(Message::Begin(Triple {
                    commit_lsn,
                    xid,
                    commit_time,
                }))
            }
            b'C' => {
                let _flags = reader.u8()?;
                Ok(Message::Commit {
                    commit_lsn: Lsn(reader.u64()?),
                    end_lsn: Lsn(reader.u64()?),
                    commit_time: PgTimestamp(reader.i64()?),
                })
            }
            b'R' => Relation::decode(&mut reader).map(Message::Relation),
            b'Y' => Ok(Message::Type {
                oid: Oid(reader.u32()?),
                namespace: reader.cstr()?,
                name: reader.cstr()?,
            }),
            b'I' => {
                let relation = Oid(reader.u32()?);
                let at = reader.at();
                if reader.u8()? != b'N' {
                    return Err(DecodeError::Malformed {
                        at,
                        what: "an Insert holds no new tuple",
                    });
                }
                let tuple = Tuple::decode(&mut reader)?;
                Ok(Message::Insert { relation, tuple })
            }
            // Begin Prepare, Prepare, Commit Prepared, Rollback Prepared: rows that can still be
            // rolled back.
            b'b' | b'P' | b'K' | b'r' => Err(DecodeError::TwoPhase { tag }),
            // Streamed blocks of transactions that are still open: we never ask for them, and
            // passing one over would lose its rows.
            b'S' | b'E' | b'c' | b'A' => Err(DecodeError::UnknownTag { at: 0, tag }),
            _ => Ok(Message::Other(tag)),
        }
    }
}

impl<'a> Relation<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let oid = Oid(reader.u32()?);
        let namespace = reader.cstr()?;
        let name = reader.cstr()?;
        let _replica_identity = reader.u8()?;
        let column_count = column_count(reader)?;
        let columns = reader.rest();
        for _ in 0..column_count {
            relation_column(reader)?;
        }
        Ok(Relation {
            oid,
            namespace,
            name,
            column_count,
            columns,
        })
    }

    pub fn columns(&self) -> impl Iterator<Item = RelationColumn<'a>> + use<'a> {
        let mut reader = Reader::new(self.columns);
        (0..self.column_count)
            .map(move |_| relation_column(&mut reader).expect("columns were checked by decode()"))
    }
}

impl<'a> Tuple<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let column_count = column_count(reader)?;
        let columns = reader.rest();
        for _ in 0..column_count {
            tuple_column(reader)?;
        }
        Ok(Tuple {
            column_count,
            columns,
        })
    }

    pub fn len(&self) -> usize {
        self.column_count
    }

    pub fn is_empty(&self) -> bool {
        self.column_count == 0
    }

    pub fn columns(&self) -> impl Iterator<Item = Column<'a>> + use<'a> {
        let mut reader = Reader::new(self.columns);
        (0..self.column_count)
            .map(move |_| tuple_column(&mut reader).expect("columns were checked by decode()"))
    }
}

fn column_count(reader: &mut Reader<'_>) -> Result<usize, DecodeError> {
    let at = reader.at();
    usize::try_from(reader.i16()?).map_err(|_| DecodeError::Malformed {
        at,
        what: "a negative number of columns",
    })
}

fn relation_column<'a>(reader: &mut Reader<'a>) -> Result<RelationColumn<'a>, DecodeError> {
    let _flags = reader.u8()?;
    let name = reader.cstr()?;
    let type_oid = Oid(reader.u32()?);
    let _type_modifier = reader.i32()?;
    Ok(RelationColumn { name, type_oid })
}

fn tuple_column<'a>(reader: &mut Reader<'a>) -> Result<Column<'a>, DecodeError> {
    let at = reader.at();
    let tag = reader.u8()?;
    match tag {
        b'n' => Ok(Column::Null),
        b'u' => Ok(Column::UnchangedToast),
        b't' | b'b' => {
            let length_at = reader.at();
            let length = usize::try_from(reader.i32()?).map_err(|_| DecodeError::Malformed {
                at: length_at,
                what: "a negative length",
            })?;
            let bytes = reader.bytes(length)?;
            Ok(if tag == b't' {
                Column::Text(bytes)
            } else {
                Column::Binary(bytes)
            })
        }
        tag => Err(DecodeError::UnknownTag { at, tag }),
    }
}
