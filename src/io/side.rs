//! The side connection: ordinary statements beside the stream, and the session that holds the
//! leader's lock.
//!
//! # Invariants
//! It reaches the server by the same [`connect::open`] as the stream does: one way to resolve, to
//! encrypt, to judge certificates.

use std::convert::Infallible;
use std::error::Error as _;
use std::future::{Ready, ready};
use std::io;
use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_postgres::config::{SslMode, SslNegotiation};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};
use tokio_postgres::{Client, NoTls};

use super::connect::{self, Stream, within};
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
    /// See [`connect::open`]; or what the server refused.
    pub async fn connect(db: &Database, client_encoding: Option<&str>) -> Result<Side, DbError> {
        let stream = connect::open(db).await?;
        let plain = connect::without_tls(db, &stream);
        let done = Side::log_in(db, stream, client_encoding).await;
        match (done, plain) {
            (Err(error), Some(db)) if connect::is_refused(&error) => {
                let stream = connect::open(&db).await?;
                Side::log_in(&db, stream, client_encoding).await
            }
            (done, _) => done,
        }
    }

    async fn log_in(
        db: &Database,
        stream: Stream,
        client_encoding: Option<&str>,
    ) -> Result<Side, DbError> {
        let what = || format!("logging in to host \"{}\" port {}", db.host, db.port);
        let start = Side::start(db, stream, client_encoding);
        within(db.connect_timeout, what, start).await?
    }

    async fn start(
        db: &Database,
        stream: Stream,
        client_encoding: Option<&str>,
    ) -> Result<Side, DbError> {
        let mut config = tokio_postgres::Config::new();
        config.user(&db.user).dbname(&db.dbname);
        config.application_name(&db.application_name);
        if let Some(password) = &db.password {
            config.password(password);
        }
        let (client, connection) = match &stream {
            Stream::Tls(_) => {
                // "Direct" keeps the driver from asking for what was agreed on already.
                config.ssl_mode(SslMode::Require);
                config.ssl_negotiation(SslNegotiation::Direct);
                let made = config.connect_raw(stream, AlreadyTls).await;
                let (client, connection) = made.map_err(|e| login_error(&e))?;
                (client, tokio::spawn(connection))
            }
            Stream::Tcp(_) | Stream::Unix(_) => {
                config.ssl_mode(SslMode::Disable);
                let made = config.connect_raw(stream, NoTls).await;
                let (client, connection) = made.map_err(|e| login_error(&e))?;
                (client, tokio::spawn(connection))
            }
        };
        let side = Side {
            client: Arc::new(client),
            connection,
            ended: None,
        };
        side.run(SETTINGS).await?;
        if let Some(encoding) = client_encoding {
            let encoding = encoding.replace('\'', "''");
            side.run(&format!("set client_encoding = '{encoding}'"))
                .await?;
        }
        Ok(side)
    }

    /// Statements without parameters and without an answer.
    ///
    /// # Errors
    /// The first one that fails; those before it have happened.
    pub async fn run(&self, sql: &str) -> Result<(), DbError> {
        let done = self.client.batch_execute(sql).await;
        done.map_err(|e| db_error(&e))
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

/// While logging in, what is neither the server's word nor the network's is about credentials.
fn login_error(error: &tokio_postgres::Error) -> DbError {
    match db_error(error) {
        DbError::Protocol(text) if text.contains("password missing") => {
            DbError::Auth("no password supplied".to_owned())
        }
        DbError::Protocol(text) if text.starts_with("authentication error") => DbError::Auth(text),
        other => other,
    }
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

/// Tells the driver that the stream is TLS by now, so that it can bind SCRAM to the certificate.
struct AlreadyTls;

impl TlsConnect<Stream> for AlreadyTls {
    type Stream = Stream;
    type Error = Infallible;
    type Future = Ready<Result<Stream, Infallible>>;

    fn connect(self, stream: Stream) -> Self::Future {
        ready(Ok(stream))
    }
}

impl TlsStream for Stream {
    fn channel_binding(&self) -> ChannelBinding {
        match Stream::channel_binding(self) {
            Some(data) => ChannelBinding::tls_server_end_point(data),
            None => ChannelBinding::none(),
        }
    }
}
