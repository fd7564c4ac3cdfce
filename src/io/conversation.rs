//! Frames in, frames out, over any stream: what login, queries and the replication stream share.
//!
//! # Invariants
//! - Nothing is lost when a future of [`Conversation::turn`] is dropped: what was read lies in
//!   the buffer, what was not written lies in the queue.
//! - At most one status waits besides the one that is on its way out.

use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::BytesMut;
use postgres_protocol::message::backend::{ErrorField, ErrorFields, Message};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::fallible_iterator::FallibleIterator;

use super::frames::{FrameError, Frames, HEADER_BYTES, Phase};
use crate::error::DbError;

/// What is read after a failed write has arrived already.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(1);

/// Whether more WAL is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intake {
    Open,
    Closed,
}

/// Why [`Conversation::turn`] came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// So many bytes were read. Zero: there is no room, whole frames wait to be taken.
    Read(usize),
    /// The server closed the connection; what it said before lies in the buffer.
    Ended,
}

pub struct Conversation<S> {
    stream: S,
    frames: Frames,
    /// On its way out; the first `sent` bytes are gone.
    sending: Vec<u8>,
    sent: usize,
    /// A status that no byte of was written, or empty.
    waiting: Vec<u8>,
    /// How the connection ended, met while a gulp had already brought bytes.
    end: Option<io::Result<()>>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Conversation<S> {
    pub fn new(stream: S) -> Self {
        Conversation {
            stream,
            frames: Frames::default(),
            sending: Vec::new(),
            sent: 0,
            waiting: Vec::new(),
            end: None,
        }
    }

    pub fn stream(&self) -> &S {
        &self.stream
    }

    /// The stream, and what was read of it and not taken.
    pub fn into_parts(self) -> (S, Vec<u8>) {
        (self.stream, self.frames.rest().to_vec())
    }

    pub fn buffered(&self) -> usize {
        self.frames.buffered()
    }

    pub fn enter(&mut self, phase: Phase) {
        self.frames.enter(phase);
    }

    /// See [`Frames::take`].
    pub fn take(&mut self) -> Result<Option<Range<usize>>, FrameError> {
        self.frames.take()
    }

    /// A frame that [`Conversation::take`] or [`Conversation::recv`] returned: tag and body.
    pub fn frame(&self, range: Range<usize>) -> (u8, &[u8]) {
        let frame = self.frames.bytes(range);
        (frame[0], &frame[HEADER_BYTES..])
    }

    /// The same, parsed. The frame is whole and small by now, so that the parser reserves nothing.
    pub fn message(&self, range: Range<usize>) -> Result<Message, DbError> {
        let mut bytes = BytesMut::from(self.frames.bytes(range));
        let parsed = Message::parse(&mut bytes).map_err(|e| DbError::Protocol(e.to_string()))?;
        parsed.ok_or_else(|| DbError::Protocol("a message ends early".to_owned()))
    }

    /// Writes what is queued and, with [`Intake::Open`], reads at most one gulp.
    ///
    /// # Errors
    /// The connection broke. A broken write is reported only after what the server said last was
    /// read, for it may say why.
    pub async fn turn(&mut self, intake: Intake) -> Result<Turn, DbError> {
        poll_fn(|cx| self.poll_turn(cx, intake)).await
    }

    /// The next whole frame, waiting for it.
    pub async fn recv(&mut self) -> Result<Range<usize>, DbError> {
        loop {
            if let Some(range) = self.frames.take().map_err(malformed)? {
                return Ok(range);
            }
            match self.turn(Intake::Open).await? {
                Turn::Read(_) => {}
                Turn::Ended => {
                    return Err(DbError::Unreachable(
                        "the server closed the connection".to_owned(),
                    ));
                }
            }
        }
    }

    /// Writes one message, `build` being one of `postgres_protocol`'s builders.
    pub async fn send<E: std::fmt::Display>(
        &mut self,
        build: impl FnOnce(&mut BytesMut) -> Result<(), E>,
    ) -> Result<(), DbError> {
        let mut message = BytesMut::new();
        build(&mut message).map_err(|e| DbError::Protocol(e.to_string()))?;
        self.flush().await?;
        self.sending.extend_from_slice(&message);
        match self.flush().await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.last_words(error).await),
        }
    }

    /// A write that fails is mostly the second thing to happen: why the server broke off may lie
    /// there to be read (a refused certificate, in TLS 1.3).
    async fn last_words(&mut self, broken: DbError) -> DbError {
        let read = poll_fn(|cx| self.poll_in(cx));
        match tokio::time::timeout(LAST_WORDS_WITHIN, read).await {
            Ok(Err(told)) => lost(&told),
            Ok(Ok(Turn::Ended)) | Err(_) => broken,
            Ok(Ok(Turn::Read(_))) => match self.frames.take() {
                Ok(Some(range)) => match self.message(range) {
                    Ok(Message::ErrorResponse(body)) => server_error(body.fields()),
                    Ok(_) | Err(_) => broken,
                },
                Ok(None) | Err(_) => broken,
            },
        }
    }

    /// Waits until all that is queued is written.
    pub async fn flush(&mut self) -> Result<(), DbError> {
        poll_fn(|cx| self.poll_out(cx)).await.map_err(|e| lost(&e))
    }

    /// Queues one CopyData frame and tries to write it at once. A status that waited is replaced:
    /// the later one says all that it said.
    pub fn queue_status(&mut self, body: &[u8]) {
        let length = u32::try_from(body.len() + 4).expect("a status is 34 bytes");
        self.waiting.clear();
        self.waiting.push(b'd');
        self.waiting.extend_from_slice(&length.to_be_bytes());
        self.waiting.extend_from_slice(body);
        // The waker is lost on purpose: the next turn polls the write again with its own. An
        // error is met there again, too.
        let _ = self.poll_out(&mut Context::from_waker(Waker::noop()));
    }

    pub async fn shutdown(&mut self) {
        let _ = poll_fn(|cx| Pin::new(&mut self.stream).poll_shutdown(cx)).await;
    }

    fn poll_turn(&mut self, cx: &mut Context<'_>, intake: Intake) -> Poll<Result<Turn, DbError>> {
        let written = self.poll_out(cx);
        let read = match intake {
            Intake::Open => self.poll_in(cx),
            Intake::Closed => Poll::Pending,
        };
        match (read, written) {
            (Poll::Ready(Ok(turn)), _) => Poll::Ready(Ok(turn)),
            (Poll::Ready(Err(e)), _) | (Poll::Pending, Poll::Ready(Err(e))) => {
                Poll::Ready(Err(lost(&e)))
            }
            (Poll::Pending, Poll::Pending | Poll::Ready(Ok(()))) => Poll::Pending,
        }
    }

    /// Ready when nothing is left to write.
    fn poll_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.sent < self.sending.len() {
                let rest = &self.sending[self.sent..];
                match ready!(Pin::new(&mut self.stream).poll_write(cx, rest))? {
                    0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    n => self.sent += n,
                }
                continue;
            }
            self.sending.clear();
            self.sent = 0;
            if self.waiting.is_empty() {
                return Pin::new(&mut self.stream).poll_flush(cx);
            }
            std::mem::swap(&mut self.sending, &mut self.waiting);
        }
    }

    /// One gulp: reads until the room is full or the stream has no more. A plain socket is asked
    /// once (tokio remembers that it gave less than was asked for); TLS gives a record a call.
    fn poll_in(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Turn>> {
        if let Some(end) = self.end.take() {
            return Poll::Ready(end.map(|()| Turn::Ended));
        }
        let mut gulp = 0;
        loop {
            let mut room = ReadBuf::new(self.frames.room());
            if room.remaining() == 0 {
                return Poll::Ready(Ok(Turn::Read(gulp)));
            }
            let end = match Pin::new(&mut self.stream).poll_read(cx, &mut room) {
                Poll::Pending if gulp == 0 => return Poll::Pending,
                Poll::Pending => return Poll::Ready(Ok(Turn::Read(gulp))),
                Poll::Ready(Ok(())) if !room.filled().is_empty() => {
                    let bytes = room.filled().len();
                    let full = room.remaining() == 0;
                    self.frames.filled(bytes);
                    gulp += bytes;
                    if full {
                        return Poll::Ready(Ok(Turn::Read(gulp)));
                    }
                    continue;
                }
                Poll::Ready(end) => end,
            };
            if gulp == 0 {
                return Poll::Ready(end.map(|()| Turn::Ended));
            }
            self.end = Some(end);
            return Poll::Ready(Ok(Turn::Read(gulp)));
        }
    }
}

/// An input or output error in the middle of a conversation.
pub fn lost(error: &io::Error) -> DbError {
    DbError::Unreachable(format!("the connection broke: {error}"))
}

/// A frame that cannot be, outside the stream.
pub fn malformed(error: FrameError) -> DbError {
    DbError::Protocol(error.to_string())
}

/// The fields of an ErrorResponse or NoticeResponse. The server may speak before it knows our
/// encoding, so that the text need not be UTF-8.
pub fn server_error(mut fields: ErrorFields<'_>) -> DbError {
    let text = |field: &ErrorField<'_>| String::from_utf8_lossy(field.value_bytes()).into_owned();
    let (mut sqlstate, mut message) = (String::new(), String::new());
    let (mut detail, mut hint) = (None, None);
    while let Ok(Some(field)) = fields.next() {
        match field.type_() {
            b'C' => sqlstate = text(&field),
            b'M' => message = text(&field),
            b'D' => detail = Some(text(&field)),
            b'H' => hint = Some(text(&field)),
            _ => {}
        }
    }
    DbError::Server {
        sqlstate,
        message,
        detail,
        hint,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Poll;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    fn frame(tag: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).expect("test bodies are small");
        [&[tag][..], &length.to_be_bytes(), body].concat()
    }

    fn pair(bytes: usize) -> (Conversation<DuplexStream>, DuplexStream) {
        let (ours, theirs) = duplex(bytes);
        (Conversation::new(ours), theirs)
    }

    /// Polls once, as `select!` does before it drops the loser.
    fn poll_once(
        conversation: &mut Conversation<DuplexStream>,
        intake: Intake,
    ) -> Poll<Result<Turn, DbError>> {
        conversation.poll_turn(&mut Context::from_waker(Waker::noop()), intake)
    }

    fn bodies(conversation: &mut Conversation<DuplexStream>) -> Vec<Vec<u8>> {
        let mut bodies = Vec::new();
        while let Some(range) = conversation.take().expect("legal frames") {
            bodies.push(conversation.frame(range).1.to_vec());
        }
        bodies
    }

    #[tokio::test]
    async fn a_dropped_turn_loses_nothing() {
        let (mut ours, mut theirs) = pair(1 << 16);
        let wanted: Vec<Vec<u8>> = (0..50u8).map(|n| vec![n; usize::from(n)]).collect();
        let bytes: Vec<u8> = wanted.iter().flat_map(|body| frame(b'd', body)).collect();
        let mut taken = Vec::new();
        for piece in bytes.chunks(7) {
            theirs.write_all(piece).await.expect("the pipe is wide");
            assert!(poll_once(&mut ours, Intake::Closed).is_pending());
            assert!(poll_once(&mut ours, Intake::Open).is_ready());
            assert!(poll_once(&mut ours, Intake::Open).is_pending());
            taken.extend(bodies(&mut ours));
        }
        assert_eq!(taken, wanted);
    }

    #[tokio::test]
    async fn statuses_that_cannot_be_written_are_replaced_and_never_torn() {
        let (mut ours, mut theirs) = pair(10);
        for n in 0..100u8 {
            ours.queue_status(&[n; 34]);
            assert!(ours.sending.len() + ours.waiting.len() <= 2 * 39);
        }
        let reader = tokio::spawn(async move {
            let mut bytes = Vec::new();
            theirs.read_to_end(&mut bytes).await.map(|_| bytes)
        });
        ours.flush().await.expect("the reader reads");
        drop(ours);
        let bytes = reader.await.expect("no panic").expect("no error");
        assert_eq!(
            bytes,
            [frame(b'd', &[0; 34]), frame(b'd', &[99; 34])].concat()
        );
    }

    #[tokio::test]
    async fn a_status_is_on_its_way_before_the_next_turn() {
        let (mut ours, mut theirs) = pair(1 << 10);
        ours.queue_status(b"now");
        let mut bytes = [0; 8];
        theirs.read_exact(&mut bytes).await.expect("it was written");
        assert_eq!(&bytes[5..], b"now");
    }

    #[tokio::test]
    async fn what_the_server_said_last_is_read_before_its_end() {
        let (mut ours, mut theirs) = pair(1 << 10);
        theirs
            .write_all(&frame(b'E', b"C57P01\0\0"))
            .await
            .expect("the pipe is wide");
        drop(theirs);
        ours.queue_status(b"nobody reads this");
        assert!(matches!(ours.turn(Intake::Open).await, Ok(Turn::Read(13))));
        assert_eq!(bodies(&mut ours), [b"C57P01\0\0".to_vec()]);
        assert!(!matches!(ours.turn(Intake::Open).await, Ok(Turn::Read(_))));
    }

    #[tokio::test]
    async fn with_closed_intake_only_a_broken_write_ends_a_turn() {
        let (mut ours, theirs) = pair(16);
        assert!(poll_once(&mut ours, Intake::Closed).is_pending());
        drop(theirs);
        ours.queue_status(b"anyone?");
        assert!(matches!(
            ours.turn(Intake::Closed).await,
            Err(DbError::Unreachable(_))
        ));
    }

    #[tokio::test]
    async fn a_full_buffer_of_whole_frames_ends_a_turn_without_reading() {
        let (mut ours, mut theirs) = pair(1 << 20);
        let body = vec![b'x'; (1 << 14) - HEADER_BYTES];
        let whole = frame(b'd', &body);
        for _ in 0..20 {
            theirs.write_all(&whole).await.expect("the pipe is wide");
        }
        assert!(matches!(ours.turn(Intake::Open).await, Ok(Turn::Read(n)) if n > 0));
        assert!(matches!(ours.turn(Intake::Open).await, Ok(Turn::Read(0))));
        let mut taken = bodies(&mut ours).len();
        assert_eq!(taken, 16);
        assert!(matches!(ours.turn(Intake::Open).await, Ok(Turn::Read(_))));
        taken += bodies(&mut ours).len();
        assert_eq!(taken, 20);
    }
}
