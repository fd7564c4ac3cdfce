//! One small GET over HTTP, for `status`: what a relay says about itself.

use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// More than any answer of ours.
const BODY_BYTES_MAX: usize = 1 << 20;

/// Why there is no answer, for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// Nobody is there, or what is there does not speak HTTP.
    Away(String),
    /// The connection is taken, and then nothing comes.
    Hangs(String),
}

/// The body of an answer, whatever its status. Takes `within` at most, once to connect and once to
/// be answered.
///
/// # Errors
/// There is none.
pub async fn get(address: SocketAddr, path: &str, within: Duration) -> Result<Vec<u8>, NoAnswer> {
    let stream = match tokio::time::timeout(within, TcpStream::connect(address)).await {
        Ok(connected) => connected.map_err(|error| NoAnswer::Away(error.to_string()))?,
        Err(_) => {
            let why = format!("no connection within {} s", within.as_secs());
            return Err(NoAnswer::Away(why));
        }
    };
    match tokio::time::timeout(within, exchange(stream, address, path)).await {
        Ok(done) => done.map_err(NoAnswer::Away),
        Err(_) => Err(NoAnswer::Hangs(format!(
            "the connection is taken, and no answer comes within {} s",
            within.as_secs()
        ))),
    }
}

async fn exchange(stream: TcpStream, address: SocketAddr, path: &str) -> Result<Vec<u8>, String> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    let request = Request::builder()
        .method(Method::GET)
        .uri(path)
        .header(HOST, address.to_string())
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    let answer = async {
        let response = sender.send_request(request).await;
        let body = response.map_err(|error| error.to_string())?.into_body();
        let body = Limited::new(body, BODY_BYTES_MAX).collect().await;
        body.map(|body| body.to_bytes().to_vec())
            .map_err(|error| error.to_string())
    };
    // The connection moves only while it is polled, and may end before the answer is read.
    let mut connection = std::pin::pin!(connection);
    let mut answer = std::pin::pin!(answer);
    tokio::select! {
        answer = &mut answer => answer,
        ended = &mut connection => match ended {
            Ok(()) => answer.await,
            Err(error) => Err(error.to_string()),
        },
    }
}
