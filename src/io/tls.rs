//! TLS to Postgres, with libpq's meaning of `sslmode` and `sslrootcert`. The one place where
//! certificates are judged, for both connections.

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::ssl::{
    ConnectConfiguration, SslConnector, SslMethod, SslRef, SslVerifyMode, SslVersion,
};
use openssl::x509::store::{X509Store, X509StoreBuilder};
use openssl::x509::{X509, X509Ref, X509VerifyResult};
use tokio::net::TcpStream;
use tokio_openssl::SslStream;

use crate::config::{Database, SslMode};
use crate::error::DbError;

/// `X509_V_ERR_HOSTNAME_MISMATCH` and `X509_V_ERR_IP_ADDRESS_MISMATCH` of OpenSSL.
const NAME_MISMATCHES: [i32; 2] = [62, 64];

/// `X509_V_ERR_*` of OpenSSL that say: the chain leads to no authority that we trust.
const UNKNOWN_AUTHORITY: [i32; 6] = [2, 18, 19, 20, 21, 27];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    /// Encrypted, to whoever answers.
    Nothing,
    /// libpq's `verify-ca`: what `require` means once a root certificate is given.
    Authority,
    AuthorityAndName,
}

fn check(db: &Database) -> Check {
    match db.sslmode {
        SslMode::VerifyFull => Check::AuthorityAndName,
        SslMode::Require if db.sslrootcert.is_some() => Check::Authority,
        SslMode::Require | SslMode::Prefer | SslMode::Disable => Check::Nothing,
    }
}

/// Makes the handshake on a stream whose server has agreed to TLS.
///
/// # Errors
/// [`DbError::Tls`] says which check failed; [`DbError::Unreachable`] when the connection broke.
pub async fn handshake(db: &Database, tcp: TcpStream) -> Result<SslStream<TcpStream>, DbError> {
    let mut configuration = configuration(db)?;
    // OpenSSL forgets a certificate that it refuses; for whom it was is worth telling.
    let refused: Arc<OnceLock<String>> = Arc::default();
    if check(db) != Check::Nothing {
        let refused = Arc::clone(&refused);
        configuration.set_verify_callback(SslVerifyMode::PEER, move |good, context| {
            if let (false, Some(certificate)) = (good, context.current_cert()) {
                refused.get_or_init(|| names(certificate));
            }
            good
        });
    }
    let ssl = configuration.into_ssl(&db.host).map_err(|e| setup(&e))?;
    let mut stream = SslStream::new(ssl, tcp).map_err(|e| setup(&e))?;
    match Pin::new(&mut stream).connect().await {
        Ok(()) => Ok(stream),
        Err(error) => {
            let names = refused.get().map_or("", String::as_str);
            Err(refusal(db, stream.ssl(), names, &error))
        }
    }
}

fn configuration(db: &Database) -> Result<ConnectConfiguration, DbError> {
    let check = check(db);
    let mut builder = SslConnector::builder(SslMethod::tls_client()).map_err(|e| setup(&e))?;
    builder
        .set_min_proto_version(Some(SslVersion::TLS1_2))
        .map_err(|e| setup(&e))?;
    // A record is read by one call instead of two, and several short ones by one.
    builder.set_read_ahead(true);
    match (check, &db.sslrootcert) {
        (Check::Nothing, _) => builder.set_verify(SslVerifyMode::NONE),
        (Check::Authority | Check::AuthorityAndName, Some(path)) if path != Path::new("system") => {
            builder.set_cert_store(authorities(path)?);
        }
        (Check::Authority, _) => {
            return Err(DbError::Tls(
                "sslrootcert=system needs sslmode=verify-full: anyone can have a certificate \
                 that the system trusts"
                    .to_owned(),
            ));
        }
        // The connector starts out with the system's store.
        (Check::AuthorityAndName, _) => {}
    }
    let mut configuration = builder.build().configure().map_err(|e| setup(&e))?;
    configuration.set_verify_hostname(check == Check::AuthorityAndName);
    Ok(configuration)
}

/// Only what the file holds is trusted, not the system's authorities besides.
fn authorities(path: &Path) -> Result<X509Store, DbError> {
    let unusable = |reason: &dyn std::fmt::Display| {
        DbError::Tls(format!("sslrootcert {}: {reason}", path.display()))
    };
    let pem = fs::read(path).map_err(|e| unusable(&e))?;
    let certificates = X509::stack_from_pem(&pem).map_err(|e| unusable(&e))?;
    if certificates.is_empty() {
        return Err(unusable(&"no certificate in it (PEM is expected)"));
    }
    let mut store = X509StoreBuilder::new().map_err(|e| setup(&e))?;
    for certificate in certificates {
        store.add_cert(certificate).map_err(|e| setup(&e))?;
    }
    Ok(store.build())
}

fn setup(error: &dyn std::fmt::Display) -> DbError {
    DbError::Tls(format!("cannot set up: {error}"))
}

/// Why the handshake failed, in the words of the check that failed.
fn refusal(db: &Database, ssl: &SslRef, names: &str, error: &openssl::ssl::Error) -> DbError {
    let verdict = ssl.verify_result();
    let text = if verdict == X509VerifyResult::OK || check(db) == Check::Nothing {
        if let Some(io) = error.io_error() {
            return DbError::Unreachable(format!("the connection broke during TLS: {io}"));
        }
        if error.ssl_error().is_none() {
            return DbError::Unreachable(
                "the server closed the connection during the TLS handshake".to_owned(),
            );
        }
        format!("handshake failed: {error}")
    } else if NAME_MISMATCHES.contains(&verdict.as_raw()) {
        format!(
            "name mismatch: the server's certificate is not for \"{}\" but for {names}",
            db.host
        )
    } else if UNKNOWN_AUTHORITY.contains(&verdict.as_raw()) {
        format!(
            "unknown authority: the server's certificate is signed by none that is trusted ({verdict})"
        )
    } else {
        format!("the server's certificate is refused: {verdict}")
    };
    DbError::Tls(text)
}

/// What a certificate is for.
fn names(certificate: &X509Ref) -> String {
    let alternatives = certificate.subject_alt_names();
    let mut names: Vec<String> = alternatives
        .iter()
        .flatten()
        .filter_map(|name| match (name.dnsname(), name.ipaddress()) {
            (Some(dns), _) => Some(dns.to_owned()),
            (None, Some(ip)) => address(ip),
            (None, None) => None,
        })
        .collect();
    if names.is_empty() {
        let common = certificate.subject_name().entries_by_nid(Nid::COMMONNAME);
        names.extend(common.filter_map(|name| name.data().to_string().ok()));
    }
    if names.is_empty() {
        return "no name at all".to_owned();
    }
    names.join(", ")
}

fn address(bytes: &[u8]) -> Option<String> {
    let address = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
        _ => return None,
    };
    Some(address.to_string())
}

/// `tls-server-end-point` channel binding data (RFC 5929, section 4.1): binds the password's
/// proof to this very certificate.
pub fn server_end_point(ssl: &SslRef) -> Option<Vec<u8>> {
    let certificate = ssl.peer_certificate()?;
    let algorithm = certificate.signature_algorithm().object().nid();
    let digest = match algorithm.signature_algorithms()?.digest {
        Nid::MD5 | Nid::SHA1 => MessageDigest::sha256(),
        nid => MessageDigest::from_nid(nid)?,
    };
    Some(certificate.digest(digest).ok()?.to_vec())
}
