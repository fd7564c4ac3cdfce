//! One connection to one address: the socket, and the agreement on TLS.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;
use std::time::Duration;

use bytes::BytesMut;
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::Instant;

use super::Stream;
use super::stream::prepare;
use crate::config::{Database, Host, Negotiation};
use crate::error::DbError;
use crate::io::tls::Setup;

/// Whether an attempt is made with TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encrypt {
    Never,
    IfOffered,
    Always,
}

/// Where a host is, one of its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Socket,
    Ip(IpAddr),
}

/// An attempt that came to nothing.
pub(super) struct Missed {
    pub error: DbError,
    /// With TLS instead of without, or the other way round, it may be different.
    pub is_of_encryption: bool,
}

impl From<DbError> for Missed {
    fn from(error: DbError) -> Self {
        Missed {
            error,
            is_of_encryption: false,
        }
    }
}

/// Certificates are read when TLS is about to be spoken, once a connect.
pub(super) type LazySetup = OnceLock<Result<Setup, DbError>>;

/// What the server answers to an SSLRequest.
enum Offer {
    Tls(TcpStream),
    Plain(TcpStream),
    /// An ErrorResponse, of which nothing is read: nobody vouches for it (CVE-2024-10977).
    Error,
}

/// The end of the time for one address.
#[derive(Clone, Copy)]
pub(super) struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    pub fn new(limit: Duration) -> Self {
        Deadline {
            at: Instant::now() + limit,
            limit,
        }
    }

    /// Bounds a step of connecting.
    pub async fn bound<F: Future>(
        self,
        what: impl FnOnce() -> String,
        step: F,
    ) -> Result<F::Output, DbError> {
        tokio::time::timeout_at(self.at, step).await.map_err(|_| {
            DbError::Unreachable(format!(
                "{} timed out after {} s",
                what(),
                self.limit.as_secs_f64()
            ))
        })
    }
}

/// Connects, and agrees on TLS.
pub(super) async fn open(
    db: &Database,
    host: &Host,
    address: Address,
    encrypt: Encrypt,
    setup: &LazySetup,
    deadline: Deadline,
) -> Result<Stream, Missed> {
    let ip = match address {
        Address::Socket => return Ok(Stream::Unix(open_unix(host, deadline).await?)),
        Address::Ip(ip) => ip,
    };
    if encrypt == Encrypt::Never {
        return Ok(Stream::Tcp(open_tcp(db, host, ip, deadline).await?));
    }
    // An error: a file is missing or not as it should be.
    let setup = setup.get_or_init(|| Setup::read(&db.tls));
    let setup = setup.as_ref().map_err(|error| Missed {
        error: error.clone(),
        is_of_encryption: true,
    })?;
    let tcp = open_tcp(db, host, ip, deadline).await?;
    if db.tls.negotiation == Negotiation::Direct {
        return within_handshake(setup, host, tcp, deadline).await;
    }
    match request_tls(host, tcp, deadline).await? {
        Offer::Tls(tcp) => within_handshake(setup, host, tcp, deadline).await,
        Offer::Plain(tcp) if encrypt == Encrypt::IfOffered => Ok(Stream::Tcp(tcp)),
        Offer::Plain(_) => Err(Missed::from(DbError::Tls(format!(
            "the server at {host} offers no TLS, and sslmode asks for it"
        )))),
        Offer::Error => Err(Missed {
            error: DbError::Unreachable(format!(
                "the server at {host} answers the request for TLS with an error"
            )),
            is_of_encryption: true,
        }),
    }
}

async fn within_handshake(
    setup: &Setup,
    host: &Host,
    tcp: TcpStream,
    deadline: Deadline,
) -> Result<Stream, Missed> {
    let what = || format!("the TLS handshake with {host}");
    let done = deadline.bound(what, setup.handshake(host, tcp)).await?;
    done.map(Stream::Tls).map_err(|error| Missed {
        error,
        is_of_encryption: true,
    })
}

async fn request_tls(
    host: &Host,
    mut tcp: TcpStream,
    deadline: Deadline,
) -> Result<Offer, DbError> {
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
    let what = || format!("the request for TLS to {host}");
    let answer = deadline.bound(what, answer).await?;
    match answer.map_err(|e| DbError::Unreachable(format!("{host}: {}", reason(&e))))? {
        (0, _) => Err(DbError::Unreachable(format!(
            "the server at {host} closed the connection on the request for TLS"
        ))),
        (1, b'S') => Ok(Offer::Tls(tcp)),
        (1, b'N') => Ok(Offer::Plain(tcp)),
        (_, b'E') => Ok(Offer::Error),
        (2, b'S' | b'N') => Err(DbError::Tls(format!(
            "unencrypted bytes after the answer of {host} to the request for TLS: someone may be \
             in between"
        ))),
        (_, byte) => Err(DbError::Protocol(format!(
            "what listens at {host} is no Postgres: it answers the request for TLS with {byte:#04x}"
        ))),
    }
}

async fn open_unix(host: &Host, deadline: Deadline) -> Result<UnixStream, DbError> {
    let shown = format!("{}/.s.PGSQL.{}", host.name, host.port);
    // libpq's sign for an abstract socket is an @, the kernel's a zero byte.
    let path = match shown.strip_prefix('@') {
        Some(name) => format!("\0{name}"),
        None => shown.clone(),
    };
    let what = || format!("connecting to the Unix socket {shown}");
    match deadline.bound(what, UnixStream::connect(&path)).await? {
        Ok(stream) => Ok(stream),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(DbError::Unreachable(format!(
            "no server: the Unix socket {shown} does not exist"
        ))),
        Err(e) => Err(DbError::Unreachable(format!(
            "cannot connect to the Unix socket {shown}: {}",
            reason(&e)
        ))),
    }
}

async fn open_tcp(
    db: &Database,
    host: &Host,
    ip: IpAddr,
    deadline: Deadline,
) -> Result<TcpStream, DbError> {
    let connect = TcpStream::connect(SocketAddr::new(ip, host.port));
    let failed = |what: String| DbError::Unreachable(format!("cannot connect to {host}: {what}"));
    let connected = match deadline.bound(|| ip.to_string(), connect).await {
        Ok(connected) => connected,
        Err(timed_out) => return Err(failed(format!("{timed_out} without an answer"))),
    };
    let tcp = connected.map_err(|e| failed(format!("{ip} {}", reason(&e))))?;
    prepare(&tcp, &db.tcp).map_err(|e| failed(format!("{ip} {}", reason(&e))))?;
    Ok(tcp)
}

/// Where a host is. Never empty.
pub(super) async fn addresses(db: &Database, host: &Host) -> Result<Vec<Address>, DbError> {
    if let Some(ip) = host.address {
        return Ok(vec![Address::Ip(ip)]);
    }
    if host.is_socket() {
        return Ok(vec![Address::Socket]);
    }
    let lookup = tokio::net::lookup_host((host.name.as_str(), host.port));
    let what = || format!("resolving the host name \"{}\"", host.name);
    let found = Deadline::new(db.connect_timeout)
        .bound(what, lookup)
        .await?;
    let unresolved = |why: String| {
        DbError::Unreachable(format!(
            "cannot resolve the host name \"{}\": {why}",
            host.name
        ))
    };
    let mut addresses: Vec<Address> = Vec::new();
    for found in found.map_err(|e| unresolved(e.to_string()))? {
        let address = Address::Ip(found.ip());
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() {
        return Err(unresolved("it has no address".to_owned()));
    }
    Ok(addresses)
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
