//! The streaming replication protocol inside CopyData (Postgres manual, section "Streaming
//! Replication Protocol").

use super::{DecodeError, Reader};
use crate::lsn::{Lsn, PgTimestamp};

/// Whether the other side wants an answer at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    Requested,
    NotRequested,
}

/// What the server sends inside CopyData.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicationMessage<'a> {
    XLogData {
        wal_start: Lsn,
        wal_end: Lsn,
        clock: PgTimestamp,
        data: &'a [u8],
    },
    /// *Primary keepalive*: `wal_end` is how far the walsender has decoded.
    Keepalive {
        wal_end: Lsn,
        clock: PgTimestamp,
        reply: Reply,
    },
}

impl<'a> ReplicationMessage<'a> {
    /// Decodes the body of one CopyData message.
    ///
    /// # Errors
    /// Bytes missing or a tag other than `w` and `k`.
    pub fn decode(body: &'a [u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        match reader.u8()? {
            b'w' => Ok(ReplicationMessage::XLogData {
                wal_start: Lsn(reader.u64()?),
                wal_end: Lsn(reader.u64()?),
                clock: PgTimestamp(reader.i64()?),
                data: reader.rest(),
            }),
            b'k' => Ok(ReplicationMessage::Keepalive {
                wal_end: Lsn(reader.u64()?),
                clock: PgTimestamp(reader.i64()?),
                reply: match reader.u8()? {
                    0 => Reply::NotRequested,
                    _ => Reply::Requested,
                },
            }),
            tag => Err(DecodeError::UnknownTag { at: 0, tag }),
        }
    }
}

/// *Standby status update*. `flush` and `apply` are the same for us: delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusUpdate {
    pub write: Lsn,
    pub flush: Lsn,
    pub reply: Reply,
}

impl StatusUpdate {
    /// The CopyData body of this status, `clock` being the sender's time.
    #[must_use]
    pub fn encode(&self, clock: PgTimestamp) -> [u8; 34] {
        let mut body = [0u8; 34];
        body[0] = b'r';
        body[1..9].copy_from_slice(&self.write.0.to_be_bytes());
        body[9..17].copy_from_slice(&self.flush.0.to_be_bytes());
        body[17..25].copy_from_slice(&self.flush.0.to_be_bytes());
        body[25..33].copy_from_slice(&clock.0.to_be_bytes());
        body[33] = u8::from(self.reply == Reply::Requested);
        body
    }
}
