//! The HTTP server for metrics and health: small answers to GET, on a thread of its own.
//!
//! # Invariants
//! - Whoever answers reads shared state and waits for nobody: a relay that is stuck is described
//!   as readily as one that runs, and a scrape costs the loop nothing.
//! - Nothing that a client does is kept for long: a connection carries one request and lives for
//!   seconds, and where there are too many the oldest is cut.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet};

/// How long the request's head may take.
const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// How long a connection lives: a client that does not read its answer is cut off.
const CONNECTION_WITHIN: Duration = Duration::from_secs(10);
/// A request's head, and what is read from the socket at once.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// More open connections than this, and the oldest is cut: probes come and go in milliseconds.
const CONNECTIONS_MAX: usize = 64;
/// After an accept that failed (no file descriptor left): the next one would fail as well.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a path answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub content_type: &'static str,
    pub body: String,
}

/// Path to answer; `None` where there is no such path. Called on the server's thread.
pub type Handler = dyn Fn(&str) -> Option<Answer> + Send + Sync;

/// A running server. It ends when this is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    /// Dropped with us, which the thread sees.
    _stop: oneshot::Sender<()>,
}

impl Server {
    /// Binds the address, then serves. `paths` are named where a client asks for another.
    ///
    /// # Errors
    /// The address cannot be bound, or the system has no thread left.
    pub fn start(
        address: SocketAddr,
        paths: &'static [&'static str],
        handler: Arc<Handler>,
    ) -> io::Result<Server> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (stop, stopped) = oneshot::channel();
        std::thread::Builder::new()
            .name("http".into())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        _ = stopped => {}
                        () = serve(listener, paths, handler) => {}
                    }
                });
            })?;
        Ok(Server {
            address,
            _stop: stop,
        })
    }

    /// Where it listens: the real port where port 0 was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

async fn serve(
    listener: std::net::TcpListener,
    paths: &'static [&'static str],
    handler: Arc<Handler>,
) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "http: the listener cannot be used");
            return;
        }
    };
    let mut connections = JoinSet::new();
    let mut oldest: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "http: accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        oldest.retain(|connection| !connection.is_finished());
        if oldest.len() >= CONNECTIONS_MAX
            && let Some(connection) = oldest.pop_front()
        {
            connection.abort();
        }
        let handler = Arc::clone(&handler);
        oldest.push_back(connections.spawn(one(stream, paths, handler)));
    }
}

async fn one(stream: TcpStream, paths: &'static [&'static str], handler: Arc<Handler>) {
    let service = service_fn(|request: Request<Incoming>| {
        let response = respond(&request, paths, &*handler);
        async { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(HEAD_BYTES_MAX)
        .keep_alive(false)
        // `nc` closes its side once it has asked.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    // What a client does wrong is its own affair, and no line in our log.
    let ended = tokio::time::timeout(CONNECTION_WITHIN, connection).await;
    tracing::trace!(?ended, "http: a connection ended");
}

/// HEAD is answered as GET; hyper leaves the body out.
fn respond(
    request: &Request<Incoming>,
    paths: &[&str],
    handler: &Handler,
) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    let text = |status: StatusCode, body: String| plain(status, "text/plain; charset=utf-8", body);
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = text(
            StatusCode::METHOD_NOT_ALLOWED,
            "only GET and HEAD\n".to_owned(),
        );
        let allow = HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allow);
        return response;
    }
    if !request.body().is_end_stream() {
        return text(
            StatusCode::PAYLOAD_TOO_LARGE,
            "a request has no body here\n".to_owned(),
        );
    }
    match handler(path) {
        Some(answer) => {
            let status =
                StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            plain(status, answer.content_type, answer.body)
        }
        None => text(
            StatusCode::NOT_FOUND,
            format!("there is no such path; there are {}\n", paths.join(", ")),
        ),
    }
}

fn plain(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
