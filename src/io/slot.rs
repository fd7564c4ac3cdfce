//! The replication connection: a client of our own for `replication=database` sessions, because
//! the stream wants what no driver gives: rows borrowed from the read buffer, statuses written
//! while nothing is read, a bound on what one frame may take.
//!
//! # Invariants
//! - Dropping a future of [`Slot::turn`] loses nothing.
//! - A [`Frame`] borrows from the read buffer: it is gone before the next turn.
//! - Memory: the read buffer (256 KiB, or one frame of at most 64 MiB) and two statuses.

use std::ops::Range;
use std::time::Duration;

use postgres_protocol::message::backend::{DataRowBody, Field, Message};
use postgres_protocol::message::frontend;
use tokio_postgres::fallible_iterator::FallibleIterator;

pub use super::connect::Gulp;
use super::connect::{self, Stream, within};
use super::conversation::{Conversation, malformed, server_error};
use super::frames::{FrameError, Phase};
use crate::config::Database;
use crate::error::DbError;
use crate::lsn::Lsn;
use crate::wire::compose::ColumnType;

pub use super::conversation::{Intake, Turn};

/// How long the server waits for a word of ours before it gives the slot to another. Asked for
/// at half of it; the manual's default is 60 s, too long for a standby to wait.
pub const WAL_SENDER_TIMEOUT: Duration = Duration::from_secs(15);

/// IDENTIFY_SYSTEM and START_REPLICATION wait for nothing: a server that takes longer is hung.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// What `IDENTIFY_SYSTEM` answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentifySystem {
    pub system_identifier: String,
    pub timeline: i32,
    /// How far the server's log is flushed.
    pub xlogpos: Lsn,
    /// `None`: a connection for physical replication.
    pub dbname: Option<String>,
}

/// One frame of the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// The body of a CopyData frame, for `wire::replication`.
    Copy(&'a [u8]),
    /// A NoticeResponse: PG 18 says by one that it skips rows.
    Notice {
        sqlstate: String,
        message: String,
        detail: Option<String>,
    },
    /// An ErrorResponse. The connection may live on (the error was not FATAL) but the stream
    /// does not.
    Error(DbError),
    /// The server ends its half of the stream.
    CopyDone,
    /// `COPY 0`: an orderly end, of a shutdown or after our own CopyDone.
    CommandComplete,
}

/// Why no next frame can be had.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// A CopyData body above [`super::frames::FRAME_BYTES_MAX`]. The stream cannot go on.
    #[error("a row of {length} bytes is in the stream, and at most 64 MiB are taken")]
    FrameTooLarge { length: usize },
    #[error(transparent)]
    Db(#[from] DbError),
}

/// How a stream that we ended has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The server has read all that we wrote, the last status included.
    Confirmed,
    /// The deadline passed or the connection broke: whether the last status arrived is unknown.
    Unconfirmed,
}

pub struct Slot {
    conversation: Conversation<Stream>,
    backend_pid: i32,
    gulp: Gulp,
}

impl Slot {
    /// Connects and logs in, every setting of the session in the start-up message: there they
    /// outrank the defaults of role and database, and cost no round trip.
    ///
    /// # Errors
    /// See [`connect::session`].
    pub async fn connect(
        db: &Database,
        client_encoding: &str,
        wal_sender_timeout: Duration,
    ) -> Result<Slot, DbError> {
        let timeout = format!("{}ms", wal_sender_timeout.as_millis());
        // All of these are known to every server from 15 on.
        let parameters = [
            ("replication", "database"),
            ("client_encoding", client_encoding),
            ("TimeZone", "UTC"),
            ("DateStyle", "ISO"),
            ("IntervalStyle", "postgres"),
            ("bytea_output", "hex"),
            ("extra_float_digits", "1"),
            ("client_min_messages", "warning"),
            ("wal_sender_timeout", &timeout),
            ("tcp_user_timeout", "30000"),
            ("tcp_keepalives_idle", "10"),
            // A connection that is made ahead of its START may wait for long.
            ("idle_session_timeout", "0"),
            ("idle_in_transaction_session_timeout", "0"),
        ];
        let session = connect::session(db, &parameters).await?;
        Ok(Slot {
            gulp: session.conversation.stream().gulp(),
            backend_pid: session.login.process_id,
            conversation: session.conversation,
        })
    }

    /// The walsender's process id, as it said at the start.
    pub fn backend_pid(&self) -> i32 {
        self.backend_pid
    }

    /// # Errors
    /// The server's, or an answer that is none.
    pub async fn identify_system(&mut self) -> Result<IdentifySystem, DbError> {
        let query = self.simple_query("IDENTIFY_SYSTEM");
        let what = || "IDENTIFY_SYSTEM".to_owned();
        let rows = within(ANSWER_TIMEOUT, what, query).await??;
        identified(rows).ok_or_else(|| {
            DbError::Protocol("the answer to IDENTIFY_SYSTEM is not understood".to_owned())
        })
    }

    /// Runs SQL or replication commands and returns the rows of all of them. Waits as long as the
    /// server does: slot creation waits for other transactions, bounded by `lock_timeout`.
    ///
    /// # Errors
    /// An ErrorResponse leaves the connection usable.
    pub async fn simple_query(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>, DbError> {
        self.conversation
            .send(|buf| frontend::query(sql, buf))
            .await?;
        let mut rows = Vec::new();
        let mut refused = None;
        loop {
            let range = self.conversation.recv().await?;
            match self.conversation.message(range)? {
                Message::DataRow(row) => rows.push(columns(&row)?),
                // The first one is the cause.
                Message::ErrorResponse(body) if refused.is_none() => {
                    refused = Some(server_error(body.fields()));
                }
                Message::ReadyForQuery(_) => return refused.map_or(Ok(rows), Err),
                _ => {}
            }
        }
    }

    /// Runs one statement and shows each of its rows, in the text of the types' output functions.
    /// A domain shows as the type that it is over.
    ///
    /// # Errors
    /// As [`Slot::simple_query`].
    pub async fn each_row(
        &mut self,
        sql: &str,
        each: &mut impl FnMut(&[ColumnType], &DataRowBody),
    ) -> Result<(), DbError> {
        self.conversation
            .send(|buf| frontend::query(sql, buf))
            .await?;
        let mut columns = Vec::new();
        let mut refused = None;
        loop {
            let range = self.conversation.recv().await?;
            match self.conversation.message(range)? {
                Message::RowDescription(body) => {
                    let field = |field: Field<'_>| {
                        Ok(ColumnType {
                            name: field.name().as_bytes().to_vec(),
                            type_oid: field.type_oid(),
                        })
                    };
                    let fields = body.fields().map(field).collect();
                    columns = fields.map_err(|e| DbError::Protocol(e.to_string()))?;
                }
                Message::DataRow(row) => each(&columns, &row),
                Message::ErrorResponse(body) if refused.is_none() => {
                    refused = Some(server_error(body.fields()));
                }
                Message::ReadyForQuery(_) => return refused.map_or(Ok(()), Err),
                _ => {}
            }
        }
    }

    /// Starts the stream at 0/0: the slot knows where it stands. A position of ours that is too
    /// high would make the server skip events without a word.
    ///
    /// # Errors
    /// The server's (55006: the slot is held); the connection stays usable.
    pub async fn start_replication(
        &mut self,
        slot: &str,
        publication: &str,
    ) -> Result<(), DbError> {
        let command = start_command(slot, publication);
        let what = || "START_REPLICATION".to_owned();
        within(ANSWER_TIMEOUT, what, self.start(&command)).await?
    }

    async fn start(&mut self, command: &str) -> Result<(), DbError> {
        self.conversation
            .send(|buf| frontend::query(command, buf))
            .await?;
        let mut refused = None;
        loop {
            let range = self.conversation.recv().await?;
            let (tag, _) = self.conversation.frame(range.clone());
            match tag {
                // CopyBothResponse.
                b'W' => {
                    self.conversation.enter(Phase::Streaming);
                    return Ok(());
                }
                b'E' => refused = refused.or(Some(self.error(range)?)),
                b'Z' => {
                    return Err(refused.unwrap_or_else(|| {
                        DbError::Protocol("START_REPLICATION started no stream".to_owned())
                    }));
                }
                _ => {}
            }
        }
    }

    /// Writes what is queued and, with [`Intake::Open`], reads at most one gulp from the socket.
    /// Resolves when bytes were read or the connection ended; with [`Intake::Closed`] only when
    /// writing shows that it broke. Cancel-safe. To be called when [`Slot::next_frame`] has
    /// nothing left.
    ///
    /// # Errors
    /// [`DbError::Unreachable`]: the connection broke.
    pub async fn turn(&mut self, intake: Intake) -> Result<Turn, DbError> {
        self.conversation.turn(intake).await
    }

    /// The next whole frame that the buffer holds.
    ///
    /// # Errors
    /// A frame above the limit, or bytes that are no frame: the connection is of no more use.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, SlotError> {
        let Some(range) = next_of_interest(&mut self.conversation)? else {
            return Ok(None);
        };
        let frame = match self.conversation.frame(range.clone()).0 {
            b'd' => Frame::Copy(self.conversation.frame(range).1),
            b'c' => Frame::CopyDone,
            b'C' => Frame::CommandComplete,
            b'E' => Frame::Error(self.error(range)?),
            b'N' => match self.error(range)? {
                DbError::Server {
                    sqlstate,
                    message,
                    detail,
                    hint: _,
                } => Frame::Notice {
                    sqlstate,
                    message,
                    detail,
                },
                other => Frame::Error(other),
            },
            tag => {
                let text = format!("an unexpected message {tag:#04x} in the stream");
                return Err(SlotError::Db(DbError::Protocol(text)));
            }
        };
        Ok(Some(frame))
    }

    /// Bytes that were read and not yet taken.
    pub fn buffered(&self) -> usize {
        self.conversation.buffered()
    }

    /// Bytes that the server has sent and that were not read yet.
    pub fn waiting(&self) -> usize {
        self.conversation.stream().waiting()
    }

    /// How to read it when it is behind.
    pub fn gulp(&self) -> Gulp {
        self.gulp
    }

    /// Queues a standby status update and tries to write it at once. One that is still wholly
    /// unwritten is replaced by it.
    pub fn queue_status(&mut self, body: &[u8]) {
        self.conversation.queue_status(body);
    }

    /// Ends the stream in order: writes what is queued, says CopyDone, waits until the server has
    /// read all of it, says goodbye. Takes `deadline` at most.
    pub async fn finish(mut self, deadline: Duration) -> Ending {
        match tokio::time::timeout(deadline, self.end_stream()).await {
            Ok(Ok(())) => Ending::Confirmed,
            Ok(Err(error)) => {
                tracing::debug!(%error, "the stream did not end in order");
                Ending::Unconfirmed
            }
            Err(_) => Ending::Unconfirmed,
        }
    }

    /// Ends a session that carries no stream, best effort.
    pub async fn say_goodbye(mut self) {
        self.terminate().await.unwrap_or_default();
    }

    async fn terminate(&mut self) -> Result<(), DbError> {
        self.conversation
            .send(|buf| {
                frontend::terminate(buf);
                Ok::<(), std::convert::Infallible>(())
            })
            .await?;
        self.conversation.shutdown().await;
        Ok(())
    }

    async fn end_stream(&mut self) -> Result<(), DbError> {
        self.conversation.enter(Phase::Ending);
        self.conversation
            .send(|buf| {
                frontend::copy_done(buf);
                Ok::<(), std::convert::Infallible>(())
            })
            .await?;
        loop {
            let range = self.conversation.recv().await?;
            match self.conversation.frame(range.clone()).0 {
                b'C' => break,
                b'E' => return Err(self.error(range)?),
                _ => {}
            }
        }
        self.terminate().await
    }

    /// An ErrorResponse or a NoticeResponse as an error.
    fn error(&self, range: Range<usize>) -> Result<DbError, DbError> {
        match self.conversation.message(range)? {
            Message::ErrorResponse(body) => Ok(server_error(body.fields())),
            Message::NoticeResponse(body) => Ok(server_error(body.fields())),
            _ => Err(DbError::Protocol("an error was expected".to_owned())),
        }
    }
}

/// Passes over what says nothing to the stream: ParameterStatus, NotificationResponse,
/// ReadyForQuery.
fn next_of_interest(
    conversation: &mut Conversation<Stream>,
) -> Result<Option<Range<usize>>, SlotError> {
    loop {
        let range = match conversation.take() {
            Ok(Some(range)) => range,
            Ok(None) => return Ok(None),
            Err(FrameError::TooLarge {
                tag: b'd', length, ..
            }) => return Err(SlotError::FrameTooLarge { length }),
            Err(error) => return Err(SlotError::Db(malformed(error))),
        };
        if !matches!(conversation.frame(range.clone()).0, b'S' | b'A' | b'Z') {
            return Ok(Some(range));
        }
    }
}

fn identified(rows: Vec<Vec<Option<String>>>) -> Option<IdentifySystem> {
    let mut columns = rows.into_iter().next()?.into_iter();
    Some(IdentifySystem {
        system_identifier: columns.next()??,
        timeline: columns.next()??.parse().ok()?,
        xlogpos: columns.next()??.parse().ok()?,
        dbname: columns.next()?,
    })
}

fn columns(row: &DataRowBody) -> Result<Vec<Option<String>>, DbError> {
    let text = |range: Range<usize>| String::from_utf8_lossy(&row.buffer()[range]).into_owned();
    row.ranges()
        .map(|range| Ok(range.map(text)))
        .collect()
        .map_err(|e| DbError::Protocol(e.to_string()))
}

/// `publication_names` is a list of identifiers inside a string literal: without the inner double
/// quotes a name with capitals would be looked up in lower case, and only at the first row.
fn start_command(slot: &str, publication: &str) -> String {
    let publication = quoted(publication).replace('\'', "''");
    format!(
        "START_REPLICATION SLOT {} LOGICAL 0/0 (proto_version '1', publication_names '{publication}')",
        quoted(slot)
    )
}

/// An identifier between double quotes.
fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_need_quotes_are_quoted_twice() {
        assert_eq!(
            start_command("walrelay", "My\"Pub's"),
            "START_REPLICATION SLOT \"walrelay\" LOGICAL 0/0 \
             (proto_version '1', publication_names '\"My\"\"Pub''s\"')"
        );
    }

    #[test]
    fn an_identify_system_row_is_read_by_position() {
        let row = ["7300", "2", "1/B7736F0"].map(|text| Some(text.to_owned()));
        let mut row = row.to_vec();
        row.push(None);
        let identified = identified(vec![row]).expect("four columns");
        assert_eq!(identified.timeline, 2);
        assert_eq!(identified.xlogpos, Lsn(0x1_0B77_36F0));
        assert_eq!(identified.dbname, None);
        assert_eq!(super::identified(vec![]), None);
    }
}
