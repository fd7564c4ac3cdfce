//! The stream that a session runs over: TCP, a Unix socket, or TLS.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_openssl::SslStream;

use crate::config::Tcp;
use crate::io::tls;

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
                nap: Duration::from_micros(300),
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

fn is_local(tcp: &TcpStream) -> bool {
    tcp.peer_addr().is_ok_and(|peer| peer.ip().is_loopback())
}

/// What is asked of a connection before anything is said on it.
pub(super) fn prepare(tcp: &TcpStream, how: &Tcp) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    if is_local(tcp) {
        sockopt::set_socket_recv_buffer_size(tcp, LOCAL_RECEIVE_BYTES)?;
    }
    if how.keepalives {
        sockopt::set_socket_keepalive(tcp, true)?;
        if let Some(idle) = how.idle {
            sockopt::set_tcp_keepidle(tcp, idle)?;
        }
        if let Some(interval) = how.interval {
            sockopt::set_tcp_keepintvl(tcp, interval)?;
        }
        if let Some(count) = how.count {
            sockopt::set_tcp_keepcnt(tcp, count)?;
        }
    }
    if let Some(timeout) = how.user_timeout_ms {
        sockopt::set_tcp_user_timeout(tcp, timeout)?;
    }
    Ok(())
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
