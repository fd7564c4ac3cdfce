//! From a [`Database`] to a session: which of the hosts, with or without TLS, logged in. Both
//! connections of the relay come from here.
//!
//! # Invariants
//! - Hosts are tried in their order, as libpq tries them: a server that cannot be reached or is not
//!   the primary is passed over, one that refuses us ends the search.
//! - [`Session::database`] leads to the very server that the session is on.

mod open;
mod stream;

use std::sync::Once;
use std::time::Duration;

use super::conversation::Conversation;
use super::login::{self, Credentials, Login, Secrecy};
use crate::config::{Database, Host, SslMode, Target};
use crate::error::postgres::{self, Peer};
use crate::error::{DbError, Failure};
use open::{Address, Deadline, Encrypt, LazySetup, Missed, addresses, open};
pub use stream::{Gulp, Stream};

/// A session, ready for queries.
pub struct Session {
    pub conversation: Conversation<Stream>,
    pub login: Login,
    /// The same database, narrowed to the server and the address that this session is on.
    pub database: Database,
}

/// Connects and logs in, with `parameters` in the start-up message beside user and database.
///
/// # Errors
/// [`DbError::Unreachable`] names each host and what failed: the name, a refusal, the time;
/// [`DbError::Tls`] names the check; or what the server refused.
pub async fn session(db: &Database, parameters: &[(&str, &str)]) -> Result<Session, DbError> {
    let setup = LazySetup::new();
    let [host] = db.hosts.as_slice() else {
        return search(db, parameters, &setup).await;
    };
    // The only one is taken as it is: that it is a standby is for its user to say, and definite.
    on_host(db, host, parameters, &setup).await
}

/// The primary among several hosts.
async fn search(
    db: &Database,
    parameters: &[(&str, &str)],
    setup: &LazySetup,
) -> Result<Session, DbError> {
    let mut passed_over = Vec::new();
    for host in &db.hosts {
        let why = match on_host(db, host, parameters, setup).await {
            Ok(session) if session.login.in_hot_standby => {
                format!("{host} is a standby")
            }
            Ok(session)
                if db.target == Target::ReadWrite
                    && session.login.default_transaction_read_only =>
            {
                format!("{host} is read-only")
            }
            Ok(session) => return Ok(session),
            Err(error @ DbError::Unreachable(_)) => error.to_string(),
            Err(error) if error.heals_with_time() => format!("{host}: {error}"),
            Err(error) => return Err(said_by(error, host)),
        };
        tracing::debug!(why, "passed over");
        passed_over.push(why);
    }
    // A standby may be promoted, a server come back.
    Err(DbError::Unreachable(format!(
        "none of the hosts is the primary: {}",
        passed_over.join("; ")
    )))
}

/// With several hosts the text has to tell whose it is.
fn said_by(mut error: DbError, host: &Host) -> DbError {
    match &mut error {
        DbError::Unreachable(text)
        | DbError::Tls(text)
        | DbError::Auth(text)
        | DbError::Protocol(text)
        | DbError::Server { message: text, .. } => *text = format!("{text} (so says {host})"),
    }
    error
}

/// The end of a program that an error on a connection to `db` stops: cause, place, remedy.
pub fn failure(error: &DbError, db: &Database) -> Failure {
    let places: Vec<String> = db.hosts.iter().map(Host::to_string).collect();
    let peer = Peer {
        places: &places.join(", "),
        user: &db.user,
        dbname: &db.dbname,
    };
    postgres::failure(error, peer)
}

/// The first address of a host at which a server can be reached.
async fn on_host(
    db: &Database,
    host: &Host,
    parameters: &[(&str, &str)],
    setup: &LazySetup,
) -> Result<Session, DbError> {
    let mut failures: Vec<String> = Vec::new();
    for address in addresses(db, host).await? {
        match at_address(db, host, address, parameters, setup).await {
            Err(DbError::Unreachable(failure)) => {
                if !failures.contains(&failure) {
                    failures.push(failure);
                }
            }
            done => return done,
        }
    }
    Err(DbError::Unreachable(failures.join("; ")))
}

async fn at_address(
    db: &Database,
    host: &Host,
    address: Address,
    parameters: &[(&str, &str)],
    setup: &LazySetup,
) -> Result<Session, DbError> {
    let (first, second) = match (db.tls.sslmode, address) {
        (SslMode::Disable, _) | (_, Address::Socket) => (Encrypt::Never, None),
        (SslMode::Allow, Address::Ip(_)) => (Encrypt::Never, Some(Encrypt::Always)),
        (SslMode::Prefer, Address::Ip(_)) => (Encrypt::IfOffered, Some(Encrypt::Never)),
        (SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull, Address::Ip(_)) => {
            (Encrypt::Always, None)
        }
    };
    let attempt = |encrypt| log_in(db, host, address, encrypt, parameters, setup);
    let missed = match attempt(first).await {
        Ok(session) => return Ok(session),
        Err(missed) => missed,
    };
    match second {
        Some(second) if missed.is_of_encryption => {
            tracing::debug!(error = %missed.error, ?second, "another attempt, as sslmode allows");
            let again = attempt(second).await;
            again.map_err(|again| both(missed.error, again.error, second))
        }
        Some(_) | None => Err(missed.error),
    }
}

/// Of two attempts the second one's error, unless it says only that there is no second way.
fn both(first: DbError, second: DbError, way: Encrypt) -> DbError {
    match (first, second) {
        (first, DbError::Tls(_)) if way == Encrypt::Always => first,
        // Why there was no TLS is half of the reason.
        (
            DbError::Tls(reason),
            DbError::Server {
                sqlstate,
                message,
                detail,
                hint,
            },
        ) => DbError::Server {
            sqlstate,
            message: format!("{message} (without TLS, which failed: {reason})"),
            detail,
            hint,
        },
        (_, second) => second,
    }
}

async fn log_in(
    db: &Database,
    host: &Host,
    address: Address,
    encrypt: Encrypt,
    parameters: &[(&str, &str)],
    setup: &LazySetup,
) -> Result<Session, Missed> {
    let deadline = Deadline::new(db.connect_timeout);
    let stream = open(db, host, address, encrypt, setup, deadline).await?;
    let is_tls = matches!(stream, Stream::Tls(_));
    let (password, passfile_ignored) = match db.password_for(host) {
        Ok(password) => (password, None),
        Err(ignored) => {
            // Once: each connect would say it again.
            static WARNED: Once = Once::new();
            WARNED.call_once(|| tracing::warn!("{}", ignored.0));
            (None, Some(ignored.0))
        }
    };
    let credentials = Credentials {
        user: &db.user,
        password,
        passfile_ignored,
        auth: &db.auth,
        binding_data: stream.channel_binding(),
        secrecy: match &stream {
            Stream::Tcp(_) => Secrecy::Overheard,
            Stream::Unix(_) | Stream::Tls(_) => Secrecy::Private,
        },
    };
    let mut startup = vec![
        ("user", db.user.as_str()),
        ("database", &db.dbname),
        ("application_name", &db.application_name),
    ];
    startup.extend(db.options.as_deref().map(|options| ("options", options)));
    startup.extend_from_slice(parameters);
    let mut conversation = Conversation::new(stream);
    let what = || format!("logging in to {host}");
    let login = login::login(&mut conversation, &startup, &credentials);
    match deadline.bound(what, login).await? {
        Ok(login) => Ok(Session {
            conversation,
            login,
            database: narrowed(db, host, address),
        }),
        Err(error) => Err(Missed {
            is_of_encryption: is_of_the_way(&error) && (is_tls || encrypt == Encrypt::Never),
            error: if is_tls { alerted(error) } else { error },
        }),
    }
}

/// A line of `pg_hba.conf` refuses this client the way it came
/// (`invalid_authorization_specification`), or we do not say a password there.
fn is_of_the_way(error: &DbError) -> bool {
    match error {
        DbError::Server { sqlstate, .. } => sqlstate == "28000",
        DbError::Auth(text) => text.contains("without TLS"),
        DbError::Unreachable(_) | DbError::Tls(_) | DbError::Protocol(_) => false,
    }
}

/// With TLS 1.3 the server looks at our certificate when for us the handshake is over: its refusal
/// is what is read instead of an answer.
fn alerted(error: DbError) -> DbError {
    match error {
        DbError::Unreachable(text) if text.contains("alert") => {
            DbError::Tls(format!("the server refuses our side of TLS: {text}"))
        }
        other => other,
    }
}

fn narrowed(db: &Database, host: &Host, address: Address) -> Database {
    let address = match address {
        Address::Socket => None,
        Address::Ip(ip) => Some(ip),
    };
    Database {
        hosts: vec![Host {
            address,
            ..host.clone()
        }],
        ..db.clone()
    }
}

/// Bounds a step on a session that is being made.
pub(super) async fn within<F: Future>(
    limit: Duration,
    what: impl FnOnce() -> String,
    step: F,
) -> Result<F::Output, DbError> {
    Deadline::new(limit).bound(what, step).await
}

#[cfg(test)]
mod tests;
