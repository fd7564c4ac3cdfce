//! Why is a broker's certificate not good enough? The client library says only that it is not.

use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use openssl::ssl::{SslConnector, SslMethod};
use openssl::x509::X509;

use super::address::Address;

const CONNECT_WITHIN: Duration = Duration::from_secs(1);
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Connecting, and the handshake's two answers.
pub const DISTRUST_WITHIN: Duration = Duration::from_secs(3);

/// What is trusted, as the client library's properties have it.
#[derive(Debug, Default)]
pub struct Trust {
    /// `ssl.ca.location`; where it is no file, the system's certificates.
    pub file: Option<String>,
    /// `ssl.ca.pem`.
    pub pem: Option<String>,
}

/// OpenSSL's reason for not trusting this broker: "certificate has expired", "hostname mismatch".
/// `None` where it cannot be told. Blocks for [`DISTRUST_WITHIN`] at most.
pub fn distrust(address: &Address, trust: &Trust) -> Option<String> {
    let mut connector = SslConnector::builder(SslMethod::tls_client()).ok()?;
    if let Some(file) = &trust.file
        && Path::new(file).is_file()
    {
        connector.set_ca_file(file).ok()?;
    }
    if let Some(pem) = &trust.pem {
        for certificate in X509::stack_from_pem(pem.as_bytes()).ok()? {
            connector.cert_store_mut().add_cert(certificate).ok()?;
        }
    }
    let at = (address.host.as_str(), address.port)
        .to_socket_addrs()
        .ok()?
        .next()?;
    let stream = TcpStream::connect_timeout(&at, CONNECT_WITHIN).ok()?;
    stream.set_read_timeout(Some(ANSWER_WITHIN)).ok()?;
    stream.set_write_timeout(Some(ANSWER_WITHIN)).ok()?;
    match connector.build().connect(&address.host, stream) {
        Ok(_) => None,
        Err(openssl::ssl::HandshakeError::Failure(stream)) => {
            let verdict = stream.ssl().verify_result();
            let is_bad = verdict != openssl::x509::X509VerifyResult::OK;
            is_bad.then(|| verdict.error_string().to_owned())
        }
        Err(_) => None,
    }
}
