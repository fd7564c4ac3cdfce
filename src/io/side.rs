//! The side connection: ordinary statements beside the stream, and the session that holds the
//! leader's lock.
//!
//! # Invariants
//! It reaches the server and logs in by the same [`connect::session`] as the stream does: one way
//! to choose a host, to encrypt, to judge certificates, to say a password.

use std::error::Error as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::JoinHandle;
use tokio_postgres::config::SslMode;
use tokio_postgres::{Client, NoTls};

use super::connect::{self, Stream, within};
use super::conversation::Conversation;
use super::login::Login;
use crate::config::Database;
use crate::error::DbError;

/// What a session needs, whatever role and database have for defaults.
/// - `row_security`: an error instead of rows that are silently hidden.
/// - `search_path`: no name that we use can be caught by somebody's schema.
/// - `synchronous_commit`: what is stored here is what promises rest on.
/// - `lock_timeout`: a relay that waits for a table lock is stuck; better that it says so.
/// - `idle_*`: the session that holds the lock is idle most of its life.
/// - `tcp_*`: the server notices within half a minute that our machine is gone, and frees the lock.
const SETTINGS: &str = "\
    set row_security = off; \
    set default_transaction_read_only = off; \
    set default_transaction_isolation = 'read committed'; \
    set default_transaction_deferrable = off; \
    set search_path = pg_catalog; \
    set synchronous_commit = on; \
    set statement_timeout = 0; \
    set lock_timeout = '10s'; \
    set idle_session_timeout = 0; \
    set idle_in_transaction_session_timeout = 0; \
    set client_min_messages = warning; \
    set standard_conforming_strings = on; \
    set TimeZone = 'UTC'; \
    set DateStyle = 'ISO'; \
    set IntervalStyle = 'postgres'; \
    set bytea_output = 'hex'; \
    set extra_float_digits = 1; \
    set tcp_keepalives_idle = 10; \
    set tcp_keepalives_interval = 5; \
    set tcp_keepalives_count = 3; \
    set tcp_user_timeout = 30000; \
    select set_config(name, '0', false) from pg_catalog.pg_settings where name = 'transaction_timeout'";

/// An ordinary session and the task that drives it.
pub struct Side {
    /// Shared with the tasks that run statements on it.
    pub client: Arc<Client>,
    /// The same database, narrowed to the server that this session is on: where the stream has to
    /// go, too.
    pub database: Arc<Database>,
    connection: JoinHandle<Result<(), tokio_postgres::Error>>,
    ended: Option<DbError>,
}

impl Side {
    /// Connects, logs in and makes the session's settings.
    ///
    /// `client_encoding`: `None` is UTF-8; `SQL_ASCII` for a database of that encoding, whose
    /// bytes need not be UTF-8.
    ///
    /// # Errors
    /// See [`connect::session`]; or what the server refused.
    pub async fn connect(db: &Database, client_encoding: Option<&str>) -> Result<Side, DbError> {
        // A pooler refuses the second one, and is found out before our settings reach a session
        // that others get next.
        let parameters = [("client_encoding", "UTF8"), ("row_security", "off")];
        let session = connect::session(db, &parameters).await?;
        let what = || format!("beginning the session on {}", session.database.hosts[0]);
        let started = Side::start(session.conversation, session.login);
        let (client, connection) = within(db.connect_timeout, what, started).await??;
        let side = Side {
            client: Arc::new(client),
            connection,
            ended: None,
            database: Arc::new(session.database.clone()),
        };
        let settings = async {
            side.run(SETTINGS).await?;
            let Some(encoding) = client_encoding else {
                return Ok(());
            };
            let encoding = encoding.replace('\'', "''");
            side.run(&format!("set client_encoding = '{encoding}'"))
                .await
        };
        within(db.connect_timeout, what, settings).await??;
        Ok(side)
    }

    async fn start(
        conversation: Conversation<Stream>,
        login: Login,
    ) -> Result<(Client, JoinHandle<Result<(), tokio_postgres::Error>>), DbError> {
        let (stream, rest) = conversation.into_parts();
        let mut config = tokio_postgres::Config::new();
        // For the driver the session has neither TLS nor a password: both have been seen to.
        config.user("-").ssl_mode(SslMode::Disable);
        let stream = LoggedIn::new(stream, login, &rest);
        let made = config.connect_raw(stream, NoTls).await;
        let (client, connection) = made.map_err(|e| db_error(&e))?;
        Ok((client, tokio::spawn(connection)))
    }

    /// Statements without parameters and without an answer.
    ///
    /// # Errors
    /// The first one that fails; those before it have happened.
    pub async fn run(&self, sql: &str) -> Result<(), DbError> {
        let done = self.client.batch_execute(sql).await;
        done.map_err(|e| db_error(&e))
    }

    /// Closes the connection without a word: for one that is dead. Statements that wait on it end.
    pub fn abandon(self) {
        self.connection.abort();
    }

    /// Waits for the end of the connection and says why it ended: 57P01 for a shutdown. (An end
    /// that came in answer to a statement is told to that statement; here it is then only an
    /// end.) Cancel-safe; once ended, it answers at once.
    pub async fn closed(&mut self) -> DbError {
        if let Some(error) = &self.ended {
            return error.clone();
        }
        let error = match (&mut self.connection).await {
            Ok(Ok(())) => DbError::Unreachable("the connection was closed".to_owned()),
            Ok(Err(error)) => db_error(&error),
            Err(stopped) => DbError::Unreachable(format!("the connection's task ended: {stopped}")),
        };
        self.ended.insert(error).clone()
    }
}

/// What an error of the driver is in our words.
pub fn db_error(error: &tokio_postgres::Error) -> DbError {
    if let Some(server) = error.as_db_error() {
        return DbError::Server {
            sqlstate: server.code().code().to_owned(),
            message: server.message().to_owned(),
            detail: server.detail().map(str::to_owned),
            hint: server.hint().map(str::to_owned),
        };
    }
    if let Some(io) = error.source().and_then(|s| s.downcast_ref::<io::Error>()) {
        return DbError::Unreachable(format!("the connection broke: {io}"));
    }
    if error.is_closed() {
        return DbError::Unreachable("the server closed the connection".to_owned());
    }
    DbError::Protocol(described(error))
}

/// The driver's words with their causes: alone they say only "error deserializing column 2".
fn described(error: &tokio_postgres::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// A session that is logged in, for the driver, which would log in by itself and knows only a part
/// of how: its start-up message goes nowhere, and it is shown a server that asks for nothing.
struct LoggedIn {
    stream: Stream,
    /// What the driver is to read first.
    shown: Vec<u8>,
    taken: usize,
    has_started: bool,
}

impl LoggedIn {
    /// `rest`: what the server said after it was ready for queries.
    fn new(stream: Stream, login: Login, rest: &[u8]) -> Self {
        let mut shown = b"R\0\0\0\x08\0\0\0\0K\0\0\0\x0c".to_vec();
        shown.extend_from_slice(&login.process_id.to_be_bytes());
        shown.extend_from_slice(&login.secret_key.to_be_bytes());
        shown.extend_from_slice(b"Z\0\0\0\x05I");
        shown.extend_from_slice(rest);
        LoggedIn {
            stream,
            shown,
            taken: 0,
            has_started: false,
        }
    }
}

impl AsyncRead for LoggedIn {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.taken == this.shown.len() {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        }
        let left = &this.shown[this.taken..];
        let now = &left[..left.len().min(buf.remaining())];
        buf.put_slice(now);
        this.taken += now.len();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for LoggedIn {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.has_started {
            return Pin::new(&mut this.stream).poll_write(cx, bytes);
        }
        // The driver writes its start-up message whole and waits for the answer.
        let length = bytes.first_chunk().map(|head| u32::from_be_bytes(*head));
        if length.and_then(|n| usize::try_from(n).ok()) != Some(bytes.len()) {
            return Poll::Ready(Err(io::Error::other("the driver starts in another way")));
        }
        this.has_started = true;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
