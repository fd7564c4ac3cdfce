//! From a [`Database`] to a stream that Postgres listens on: names, addresses, sockets, TLS.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use postgres_protocol::message::frontend;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_openssl::SslStream;

use super::tls;
use crate::config::{Database, SslMode};
use crate::error::postgres::{self, Peer};
use crate::error::{DbError, Failure};

/// A peer that vanished without a word is noticed after 10 + 3 × 5 s of silence, or when it has
/// not taken in what we sent for 30 s. The server is told the same of us.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_COUNT: u32 = 3;
const USER_TIMEOUT_MS: u32 = 30_000;

/// On the loopback each small send of the server runs the whole way to our buffer, on its own time:
/// 25 µs a single-row transaction. Into a closed window it is only copied behind the one before
/// it: 12 µs. So the buffer is kept small, and a backlog is read in [`LOCAL_GULP`]s that leave the
/// window closed in between. (Half of it stalls the server; twice as much closes too late.)
const LOCAL_RECEIVE_BYTES: usize = 128 << 10;

/// Long enough that most of a gulp is sent into a closed window, short enough that the sender's
/// buffer, 4 MiB at most, does not fill.
const LOCAL_GULP: Gulp = Gulp {
    nap: Duration::from_millis(16),
    enough: 64 << 10,
};

/// How to read a stream that is behind: everything, until less than `enough` is there, then a nap.
/// A nap must not be longer than the connection can hold what comes meanwhile: a window may be as
/// small as 64 KiB (on a network), and a Unix socket holds 208 KiB, the kernel's bookkeeping of each
/// row included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gulp {
    pub nap: Duration,
    pub enough: usize,
}

/// An open connection, nothing said on it yet but the agreement on TLS.
///
/// The kernel's receive buffer is left alone on a network, where it grows by itself with a fast
/// sender, and on a Unix socket, where the sender's counts. For the loopback see
/// [`LOCAL_RECEIVE_BYTES`].
pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(SslStream<TcpStream>),
}

impl Stream {
    /// Bytes in the kernel's receive buffer (of TLS: still encrypted).
    pub fn waiting(&self) -> usize {
        let bytes = match self {
            Stream::Tcp(stream) => rustix::io::ioctl_fionread(stream),
            Stream::Unix(stream) => rustix::io::ioctl_fionread(stream),
            Stream::Tls(stream) => rustix::io::ioctl_fionread(stream.get_ref()),
        };
        // An error is met again by the read.
        let bytes = bytes.unwrap_or(0);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// How a backlog is best read from it.
    pub fn gulp(&self) -> Gulp {
        match self {
            Stream::Unix(_) => Gulp {
                nap: Duration::from_millis(2),
                enough: 32 << 10,
            },
            Stream::Tcp(tcp) if is_local(tcp) => LOCAL_GULP,
            Stream::Tls(tls) if is_local(tls.get_ref()) => LOCAL_GULP,
            Stream::Tcp(_) | Stream::Tls(_) => Gulp {
                nap: Duration::from_millis(2),
                enough: 64 << 10,
            },
        }
    }

    /// Channel binding data, where the stream is TLS.
    pub fn channel_binding(&self) -> Option<Vec<u8>> {
        match self {
            Stream::Tcp(_) | Stream::Unix(_) => None,
            Stream::Tls(stream) => tls::server_end_point(stream.ssl()),
        }
    }
}

/// The second attempt that `sslmode=prefer` makes, as libpq's does: without TLS, where a line of
/// `pg_hba.conf` refuses this client with it.
pub(super) fn without_tls(db: &Database, stream: &Stream) -> Option<Database> {
    match (db.sslmode, stream) {
        (SslMode::Prefer, Stream::Tls(_)) => Some(Database {
            sslmode: SslMode::Disable,
            ..db.clone()
        }),
        (SslMode::Prefer | SslMode::Disable | SslMode::Require | SslMode::VerifyFull, _) => None,
    }
}

/// Does `pg_hba.conf` refuse this client the way it came? (`invalid_authorization_specification`)
pub(super) fn is_refused(error: &DbError) -> bool {
    error.sqlstate() == "28000"
}

/// What the server answers to an SSLRequest.
enum Offer {
    Tls(TcpStream),
    Plain(TcpStream),
    /// An ErrorResponse, of which nothing is read: nobody vouches for it (CVE-2024-10977).
    Error,
}

/// Connects, and agrees on TLS as `sslmode` asks for.
///
/// # Errors
/// [`DbError::Unreachable`] names host, port and what failed: the name, a refusal, the time.
/// [`DbError::Tls`] names the check.
pub async fn open(db: &Database) -> Result<Stream, DbError> {
    if db.host.starts_with('/') {
        // TLS is never spoken over a Unix socket, whatever sslmode says: so libpq.
        return open_unix(db).await;
    }
    match db.sslmode {
        SslMode::Disable => Ok(Stream::Tcp(open_tcp(db).await?)),
        SslMode::Prefer => open_preferring_tls(db).await,
        SslMode::Require | SslMode::VerifyFull => match request_tls(db).await? {
            Offer::Tls(tcp) => within_handshake(db, tcp).await,
            Offer::Plain(_) => Err(DbError::Tls(format!(
                "the server at {} offers no TLS, and sslmode asks for it",
                place(db)
            ))),
            Offer::Error => Err(DbError::Unreachable(format!(
                "the server at {} answers the request for TLS with an error",
                place(db)
            ))),
        },
    }
}

/// The end of a program that an error on a connection to `db` stops: cause, place, remedy.
pub fn failure(error: &DbError, db: &Database) -> Failure {
    let peer = Peer {
        host: &db.host,
        port: db.port,
        user: &db.user,
        dbname: &db.dbname,
    };
    postgres::failure(error, peer)
}

/// Encrypted where it can be had; as libpq does, a second, plain attempt where it cannot.
async fn open_preferring_tls(db: &Database) -> Result<Stream, DbError> {
    let reason = match request_tls(db).await? {
        Offer::Plain(tcp) => return Ok(Stream::Tcp(tcp)),
        Offer::Tls(tcp) => match within_handshake(db, tcp).await {
            Ok(stream) => return Ok(stream),
            Err(error) => error.to_string(),
        },
        Offer::Error => "the server answered with an error".to_owned(),
    };
    tracing::debug!(reason, "no TLS with this server, going on without");
    Ok(Stream::Tcp(open_tcp(db).await?))
}

async fn within_handshake(db: &Database, tcp: TcpStream) -> Result<Stream, DbError> {
    let what = || format!("the TLS handshake with {}", place(db));
    let stream = within(db.connect_timeout, what, tls::handshake(db, tcp)).await??;
    Ok(Stream::Tls(stream))
}

async fn request_tls(db: &Database) -> Result<Offer, DbError> {
    let mut tcp = open_tcp(db).await?;
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    let answer = async {
        tcp.write_all(&request).await?;
        // One byte is the whole answer. A second one did not come from a server that waits for
        // our hello: somebody on the way put it there to be taken for encrypted (CVE-2021-23222).
        let mut answer = [0; 2];
        let n = tcp.read(&mut answer).await?;
        Ok::<_, io::Error>((n, answer[0]))
    };
    let what = || format!("the request for TLS to {}", place(db));
    let answer = within(db.connect_timeout, what, answer).await?;
    match answer.map_err(|e| unreachable(db, &e))? {
        (0, _) => Err(DbError::Unreachable(format!(
            "the server at {} closed the connection on the request for TLS",
            place(db)
        ))),
        (1, b'S') => Ok(Offer::Tls(tcp)),
        (1, b'N') => Ok(Offer::Plain(tcp)),
        (_, b'E') => Ok(Offer::Error),
        (2, b'S' | b'N') => Err(DbError::Tls(format!(
            "unencrypted bytes after the answer of {} to the request for TLS: someone may be \
             in between",
            place(db)
        ))),
        (_, byte) => Err(DbError::Protocol(format!(
            "what listens at {} is no Postgres: it answers the request for TLS with {byte:#04x}",
            place(db)
        ))),
    }
}

async fn open_unix(db: &Database) -> Result<Stream, DbError> {
    let path = format!("{}/.s.PGSQL.{}", db.host, db.port);
    let what = || format!("connecting to the Unix socket {path}");
    match within(db.connect_timeout, what, UnixStream::connect(&path)).await? {
        Ok(stream) => Ok(Stream::Unix(stream)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(DbError::Unreachable(format!(
            "no server: the Unix socket {path} does not exist"
        ))),
        Err(e) => Err(DbError::Unreachable(format!(
            "cannot connect to the Unix socket {path}: {}",
            reason(&e)
        ))),
    }
}

async fn open_tcp(db: &Database) -> Result<TcpStream, DbError> {
    let mut failures: Vec<String> = Vec::new();
    for address in resolve(db).await? {
        let what = || address.ip().to_string();
        let failure = match within(db.connect_timeout, what, TcpStream::connect(address)).await {
            Ok(Ok(tcp)) => {
                prepare(&tcp).map_err(|e| unreachable(db, &e))?;
                return Ok(tcp);
            }
            Ok(Err(e)) => format!("{} {}", address.ip(), reason(&e)),
            Err(timed_out) => timed_out.to_string(),
        };
        if !failures.contains(&failure) {
            failures.push(failure);
        }
    }
    Err(DbError::Unreachable(format!(
        "cannot connect to {}: {}",
        place(db),
        failures.join(", ")
    )))
}

async fn resolve(db: &Database) -> Result<Vec<SocketAddr>, DbError> {
    let lookup = tokio::net::lookup_host((db.host.as_str(), db.port));
    let what = || format!("resolving the host name \"{}\"", db.host);
    let found = within(db.connect_timeout, what, lookup).await?;
    let addresses: Vec<SocketAddr> = found
        .map_err(|e| {
            DbError::Unreachable(format!("cannot resolve the host name \"{}\": {e}", db.host))
        })?
        .collect();
    if addresses.is_empty() {
        return Err(DbError::Unreachable(format!(
            "cannot resolve the host name \"{}\": it has no address",
            db.host
        )));
    }
    Ok(addresses)
}

fn is_local(tcp: &TcpStream) -> bool {
    tcp.peer_addr().is_ok_and(|peer| peer.ip().is_loopback())
}

fn prepare(tcp: &TcpStream) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    if is_local(tcp) {
        sockopt::set_socket_recv_buffer_size(tcp, LOCAL_RECEIVE_BYTES)?;
    }
    sockopt::set_socket_keepalive(tcp, true)?;
    sockopt::set_tcp_keepidle(tcp, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(tcp, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(tcp, KEEPALIVE_COUNT)?;
    sockopt::set_tcp_user_timeout(tcp, USER_TIMEOUT_MS)?;
    Ok(())
}

/// Bounds a step of connecting.
pub(super) async fn within<F: Future>(
    limit: Duration,
    what: impl FnOnce() -> String,
    step: F,
) -> Result<F::Output, DbError> {
    tokio::time::timeout(limit, step).await.map_err(|_| {
        DbError::Unreachable(format!(
            "{} timed out after {} s",
            what(),
            limit.as_secs_f64()
        ))
    })
}

/// Where the server should be, for messages.
fn place(db: &Database) -> String {
    format!("host \"{}\" port {}", db.host, db.port)
}

fn unreachable(db: &Database, error: &io::Error) -> DbError {
    DbError::Unreachable(format!("{}: {}", place(db), reason(error)))
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            "refused the connection (nothing listens there)".to_owned()
        }
        io::ErrorKind::TimedOut => "timed out".to_owned(),
        _ => error.to_string(),
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    fn db(port: u16, sslmode: SslMode) -> Database {
        Database {
            host: "127.0.0.1".to_owned(),
            port,
            user: "u".to_owned(),
            password: None,
            dbname: "d".to_owned(),
            sslmode,
            sslrootcert: None,
            application_name: "test".to_owned(),
            connect_timeout: Duration::from_secs(5),
        }
    }

    /// What `open` makes of a server that answers every request for TLS with `answer`.
    async fn open_with(answer: &'static [u8], sslmode: SslMode) -> Result<Stream, DbError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let server = tokio::spawn(async move {
            let mut kept = Vec::new();
            while let Ok((mut tcp, _)) = listener.accept().await {
                let mut request = [0; 8];
                if tcp.read_exact(&mut request).await.is_ok() {
                    let _ = tcp.write_all(answer).await;
                    kept.push(tcp);
                }
            }
        });
        let opened = open(&db(port, sslmode)).await;
        server.abort();
        opened
    }

    #[tokio::test]
    async fn bytes_slipped_in_before_the_handshake_are_refused() {
        let opened = open_with(b"SZ", SslMode::Require).await;
        assert!(matches!(opened, Err(DbError::Tls(text)) if text.contains("in between")));
        let opened = open_with(b"NZ", SslMode::Prefer).await;
        assert!(matches!(opened, Err(DbError::Tls(text)) if text.contains("in between")));
    }

    #[tokio::test]
    async fn a_server_without_tls_is_enough_for_prefer_only() {
        let opened = open_with(b"N", SslMode::Prefer).await;
        assert!(matches!(opened, Ok(Stream::Tcp(_))));
        for sslmode in [SslMode::Require, SslMode::VerifyFull] {
            let opened = open_with(b"N", sslmode).await;
            assert!(matches!(opened, Err(DbError::Tls(text)) if text.contains("offers no TLS")));
        }
    }

    #[tokio::test]
    async fn an_error_in_place_of_an_answer_is_not_read_and_may_heal() {
        let error = b"E\0\0\0\x20SFATAL\0C53300\0Mtoo many\0\0";
        let Err(refused) = open_with(error, SslMode::Require).await else {
            panic!("there is no TLS");
        };
        assert!(refused.heals_with_time() && !refused.to_string().contains("too many"));
        let opened = open_with(error, SslMode::Prefer).await;
        assert!(matches!(opened, Ok(Stream::Tcp(_))));
    }

    #[tokio::test]
    async fn what_is_no_postgres_is_said_to_be_none() {
        let opened = open_with(b"HTTP/1.1 400 Bad Request", SslMode::Prefer).await;
        assert!(matches!(opened, Err(DbError::Protocol(text)) if text.contains("no Postgres")));
    }

    #[tokio::test]
    async fn a_closed_port_and_a_missing_socket_are_named() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        drop(listener);
        let closed = open(&db(port, SslMode::Prefer)).await;
        let wanted = format!("port {port}: 127.0.0.1 refused");
        assert!(matches!(closed, Err(DbError::Unreachable(text)) if text.contains(&wanted)));
        let mut local = db(5432, SslMode::Prefer);
        local.host = "/nowhere".to_owned();
        let missing = open(&local).await;
        let wanted = "/nowhere/.s.PGSQL.5432 does not exist";
        assert!(matches!(missing, Err(DbError::Unreachable(text)) if text.contains(wanted)));
    }
}
