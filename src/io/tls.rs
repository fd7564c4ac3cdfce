//! TLS to Postgres, with libpq's meaning of every `ssl…` word. The one place where
//! certificates are judged, for both connections.

mod credentials;

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::ssl::{
    SslConnector, SslConnectorBuilder, SslFiletype, SslMethod, SslRef, SslVerifyMode, SslVersion,
};
use openssl::x509::store::{X509Lookup, X509Store, X509StoreBuilder};
use openssl::x509::verify::X509VerifyFlags;
use openssl::x509::{X509, X509Ref, X509VerifyResult};
use tokio::net::TcpStream;
use tokio_openssl::SslStream;

use crate::config::{Host, Negotiation, Pem, Root, SslMode, Tls, TlsVersion};
use crate::error::DbError;

/// The protocol's name in TLS, with its length before it.
const ALPN: &[u8] = b"\x0apostgresql";

/// `X509_V_ERR_HOSTNAME_MISMATCH` and `X509_V_ERR_IP_ADDRESS_MISMATCH` of OpenSSL.
const NAME_MISMATCHES: [i32; 2] = [62, 64];

/// `X509_V_ERR_*` of OpenSSL that say: the chain leads to no authority that we trust.
const UNKNOWN_AUTHORITY: [i32; 6] = [2, 18, 19, 20, 21, 27];

/// What is asked of the server's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    /// Encrypted, to whoever answers.
    Nothing,
    Authority,
    AuthorityAndName,
}

/// libpq's settings with the files read: for one connect, so that what was renewed counts.
pub struct Setup {
    connector: SslConnector,
    check: Check,
    negotiation: Negotiation,
    sni: bool,
}

impl Setup {
    /// Reads the files.
    ///
    /// # Errors
    /// [`DbError::Tls`] names the setting and its file, and what is wrong with it.
    pub fn read(tls: &Tls) -> Result<Setup, DbError> {
        let mut builder = SslConnector::builder(SslMethod::tls_client()).map_err(|e| setup(&e))?;
        builder
            .set_min_proto_version(Some(version(tls.version_min)))
            .and_then(|()| builder.set_max_proto_version(tls.version_max.map(version)))
            .map_err(|e| setup(&e))?;
        builder.set_alpn_protos(ALPN).map_err(|e| setup(&e))?;
        // A record is read by one call instead of two, and several short ones by one.
        builder.set_read_ahead(true);
        let check = trust(&mut builder, tls)?;
        credentials::set(&mut builder, tls)?;
        Ok(Setup {
            connector: builder.build(),
            check,
            negotiation: tls.negotiation,
            sni: tls.sni,
        })
    }

    /// Makes the handshake on a stream whose server has agreed to TLS.
    ///
    /// # Errors
    /// [`DbError::Tls`] says which check failed; [`DbError::Unreachable`] when the connection
    /// broke.
    pub async fn handshake(
        &self,
        host: &Host,
        tcp: TcpStream,
    ) -> Result<SslStream<TcpStream>, DbError> {
        let mut configuration = self.connector.configure().map_err(|e| setup(&e))?;
        configuration.set_verify_hostname(self.check == Check::AuthorityAndName);
        configuration.set_use_server_name_indication(self.sni);
        // OpenSSL forgets a certificate that it refuses; for whom it was is worth telling.
        let refused: Arc<OnceLock<String>> = Arc::default();
        if self.check != Check::Nothing {
            let refused = Arc::clone(&refused);
            configuration.set_verify_callback(SslVerifyMode::PEER, move |good, context| {
                if let (false, Some(certificate)) = (good, context.current_cert()) {
                    refused.get_or_init(|| names(certificate));
                }
                good
            });
        }
        let ssl = configuration.into_ssl(&host.name).map_err(|e| setup(&e))?;
        let mut stream = SslStream::new(ssl, tcp).map_err(|e| setup(&e))?;
        if let Err(error) = Pin::new(&mut stream).connect().await {
            let names = refused.get().map_or("", String::as_str);
            return Err(self.refusal(host, stream.ssl(), names, &error));
        }
        // What speaks TLS on this port and not Postgres in it must not be taken for one.
        let is_postgres = stream.ssl().selected_alpn_protocol() == Some(&ALPN[1..]);
        if self.negotiation == Negotiation::Direct && !is_postgres {
            return Err(DbError::Tls(format!(
                "sslnegotiation=direct: the server at {host} does not speak Postgres in TLS"
            )));
        }
        Ok(stream)
    }

    /// Why the handshake failed, in the words of the check that failed.
    fn refusal(
        &self,
        host: &Host,
        ssl: &SslRef,
        names: &str,
        error: &openssl::ssl::Error,
    ) -> DbError {
        let verdict = ssl.verify_result();
        let text = if verdict == X509VerifyResult::OK || self.check == Check::Nothing {
            if error.ssl_error().is_none() && self.negotiation == Negotiation::Direct {
                return DbError::Tls(format!(
                    "sslnegotiation=direct: {host} ends the connection when TLS is begun"
                ));
            }
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
                host.name
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
}

/// Whom to trust, and how much is looked at. As in libpq, authorities that are there are asked in
/// every mode: `require` then means `verify-ca`.
fn trust(builder: &mut SslConnectorBuilder, tls: &Tls) -> Result<Check, DbError> {
    let store = match &tls.root {
        // The connector starts out with the system's store.
        Root::System => return Ok(Check::AuthorityAndName),
        Root::File(pem) => authorities(pem, tls)?,
        Root::None => None,
    };
    let check = match (tls.sslmode, &store) {
        (SslMode::VerifyCa | SslMode::VerifyFull, None) => {
            let place = match &tls.root {
                Root::File(Pem::Named(path) | Pem::Usual(path)) => path.display().to_string(),
                Root::System | Root::None => "none".to_owned(),
            };
            return Err(DbError::Tls(format!(
                "sslrootcert {place}: there is no such file to verify the server's certificate by"
            )));
        }
        (SslMode::VerifyFull, Some(_)) => Check::AuthorityAndName,
        (_, Some(_)) => Check::Authority,
        (_, None) => Check::Nothing,
    };
    match store {
        Some(store) => builder.set_cert_store(store),
        None => builder.set_verify(SslVerifyMode::NONE),
    }
    Ok(check)
}

/// As libpq, we go on without a file of `sslrootcert` or `sslcrl` that is not there, unless
/// certificates are to be verified. One that was named is missed aloud.
fn is_absent(pem: &Pem, tls: &Tls) -> bool {
    let (Pem::Named(path) | Pem::Usual(path)) = pem;
    if path.exists() {
        return false;
    }
    match (pem, tls.sslmode) {
        (Pem::Usual(_), _) => true,
        (Pem::Named(_), SslMode::Disable | SslMode::Allow | SslMode::Prefer | SslMode::Require) => {
            let path = path.display();
            tracing::warn!("{path} does not exist: the server's certificate is not checked by it");
            true
        }
        (Pem::Named(_), SslMode::VerifyCa | SslMode::VerifyFull) => false,
    }
}

/// Only what the file holds is trusted, not the system's authorities besides. `None`: there is no
/// such file.
fn authorities(pem: &Pem, tls: &Tls) -> Result<Option<X509Store>, DbError> {
    let (Pem::Named(path) | Pem::Usual(path)) = pem;
    let unusable = |reason: &dyn std::fmt::Display| {
        DbError::Tls(format!("sslrootcert {}: {reason}", path.display()))
    };
    if is_absent(pem, tls) {
        return Ok(None);
    }
    let text = fs::read(path).map_err(|e| unusable(&e))?;
    let certificates = X509::stack_from_pem(&text).map_err(|e| unusable(&e))?;
    if certificates.is_empty() {
        return Err(unusable(&"no certificate in it (PEM is expected)"));
    }
    let mut store = X509StoreBuilder::new().map_err(|e| setup(&e))?;
    for certificate in certificates {
        store.add_cert(certificate).map_err(|e| setup(&e))?;
    }
    revocations(&mut store, tls)?;
    Ok(Some(store.build()))
}

/// Lists of certificates that were taken back. Without one nothing is looked up.
fn revocations(store: &mut X509StoreBuilder, tls: &Tls) -> Result<(), DbError> {
    let unusable = |key: &str, path: &Path, e: &dyn std::fmt::Display| {
        DbError::Tls(format!("{key} {}: {e}", path.display()))
    };
    let mut has_any = false;
    match &tls.crl {
        Some(pem) if is_absent(pem, tls) => {}
        Some(Pem::Named(path) | Pem::Usual(path)) => {
            fs::metadata(path).map_err(|e| unusable("sslcrl", path, &e))?;
            let lookup = store
                .add_lookup(X509Lookup::file())
                .map_err(|e| setup(&e))?;
            let loaded = lookup.load_crl_file(path, SslFiletype::PEM);
            loaded.map_err(|e| unusable("sslcrl", path, &e))?;
            has_any = true;
        }
        None => {}
    }
    if let Some(path) = &tls.crl_dir {
        let lookup = store
            .add_lookup(X509Lookup::hash_dir())
            .map_err(|e| setup(&e))?;
        let added = lookup.add_dir(&path.to_string_lossy(), SslFiletype::PEM);
        added.map_err(|e| unusable("sslcrldir", path, &e))?;
        has_any = true;
    }
    if has_any {
        let flags = X509VerifyFlags::CRL_CHECK | X509VerifyFlags::CRL_CHECK_ALL;
        store.set_flags(flags).map_err(|e| setup(&e))?;
    }
    Ok(())
}

fn version(version: TlsVersion) -> SslVersion {
    match version {
        TlsVersion::V1 => SslVersion::TLS1,
        TlsVersion::V1_1 => SslVersion::TLS1_1,
        TlsVersion::V1_2 => SslVersion::TLS1_2,
        TlsVersion::V1_3 => SslVersion::TLS1_3,
    }
}

fn setup(error: &dyn std::fmt::Display) -> DbError {
    DbError::Tls(format!("cannot set up: {error}"))
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
