//! TLS: `sslmode` and what goes with it.

use std::path::{Path, PathBuf};

use super::super::{Host, Negotiation, Pem, Root, SslMode, Tls, TlsVersion};
use super::words::{Found, Words};
use crate::error::Failure;

const SSLMODES: [(&str, SslMode); 6] = [
    ("disable", SslMode::Disable),
    ("allow", SslMode::Allow),
    ("prefer", SslMode::Prefer),
    ("require", SslMode::Require),
    ("verify-ca", SslMode::VerifyCa),
    ("verify-full", SslMode::VerifyFull),
];

const VERSIONS: [(&str, TlsVersion); 4] = [
    ("TLSv1", TlsVersion::V1),
    ("TLSv1.1", TlsVersion::V1_1),
    ("TLSv1.2", TlsVersion::V1_2),
    ("TLSv1.3", TlsVersion::V1_3),
];

pub fn parse(words: &Words<'_>, hosts: &[Host]) -> Result<Tls, Failure> {
    let files = words.around.home().map(|home| home.join(".postgresql"));
    let pem = |key: &str, usual: &str| pem(words.find(key), files.as_deref(), usual);
    let (sslmode, root) = mode_and_root(words, pem("sslrootcert", "root.crt"), hosts)?;
    let negotiation = negotiation(words, sslmode)?;
    let (version_min, version_max) = versions(words)?;
    let has_cert = match words.find("sslcertmode") {
        None => true,
        Some(found) => match found.value.as_str() {
            "disable" => false,
            "allow" => true,
            _ => {
                return Err(found.wrong(
                    "cannot be honoured",
                    "write allow or disable; the server's pg_hba.conf can require a certificate",
                ));
            }
        },
    };
    let crl_dir = words.text("sslcrldir").map(PathBuf::from);
    Ok(Tls {
        sslmode,
        negotiation,
        root,
        cert: pem("sslcert", "postgresql.crt").filter(|_| has_cert),
        key: pem("sslkey", "postgresql.key").filter(|_| has_cert),
        password: words.text("sslpassword"),
        // As in libpq, a directory alone stands in for the usual file.
        crl: pem("sslcrl", "root.crl")
            .filter(|crl| matches!(crl, Pem::Named(_)) || crl_dir.is_none()),
        crl_dir,
        version_min,
        version_max,
        sni: words
            .find("sslsni")
            .map_or(Ok(true), |found| found.switch())?,
    })
}

fn pem(found: Option<Found>, files: Option<&Path>, usual: &str) -> Option<Pem> {
    match found {
        Some(found) => Some(Pem::Named(PathBuf::from(found.value))),
        None => files.map(|dir| Pem::Usual(dir.join(usual))),
    }
}

fn mode_and_root(
    words: &Words<'_>,
    root: Option<Pem>,
    hosts: &[Host],
) -> Result<(SslMode, Root), Failure> {
    let found = words.find("sslmode");
    let mode = found.as_ref().map(|found| found.one_of(&SSLMODES));
    let mode = mode.transpose()?;
    match (mode, root) {
        // Anyone can have a certificate that the system trusts: the name has to be looked at.
        (None | Some(SslMode::VerifyFull), Some(Pem::Named(file)))
            if file.as_os_str() == "system" =>
        {
            Ok((SslMode::VerifyFull, Root::System))
        }
        (Some(_), Some(Pem::Named(file))) if file.as_os_str() == "system" => {
            let written = found.map(|found| found.value).unwrap_or_default();
            Err(Failure::usage(
                format!("sslmode={written} is too weak for sslrootcert=system"),
                "set sslmode=verify-full, or name a file with the authority's certificate",
            ))
        }
        // TLS is left out on a Unix socket, whatever was asked for.
        (Some(SslMode::VerifyCa | SslMode::VerifyFull), None)
            if !hosts.iter().all(Host::is_socket) =>
        {
            let written = found.map(|found| found.value).unwrap_or_default();
            Err(Failure::usage(
                format!("sslmode={written} has no certificate to verify by"),
                "add sslrootcert=FILE, the certificate of the server's authority, or \
                 sslrootcert=system",
            ))
        }
        (mode, root) => Ok((
            mode.unwrap_or(SslMode::Prefer),
            root.map_or(Root::None, Root::File),
        )),
    }
}

fn negotiation(words: &Words<'_>, sslmode: SslMode) -> Result<Negotiation, Failure> {
    let Some(found) = words.find("sslnegotiation") else {
        return Ok(Negotiation::Postgres);
    };
    let negotiation = found.one_of(&[
        ("postgres", Negotiation::Postgres),
        ("direct", Negotiation::Direct),
    ])?;
    let is_weak = matches!(sslmode, SslMode::Disable | SslMode::Allow | SslMode::Prefer);
    if negotiation == Negotiation::Direct && is_weak {
        return Err(found.wrong(
            "needs TLS, and sslmode leaves it open",
            "set sslmode=require, verify-ca or verify-full",
        ));
    }
    Ok(negotiation)
}

fn versions(words: &Words<'_>) -> Result<(TlsVersion, Option<TlsVersion>), Failure> {
    let least = words.find("ssl_min_protocol_version");
    let most = words.find("ssl_max_protocol_version");
    let least = least.map_or(Ok(TlsVersion::V1_2), |found| found.one_of(&VERSIONS))?;
    let version_max = most
        .as_ref()
        .map(|found| found.one_of(&VERSIONS))
        .transpose()?;
    match (&most, version_max) {
        (Some(found), Some(version)) if version < least => Err(found.wrong(
            "is below the least version",
            "raise it, or lower ssl_min_protocol_version",
        )),
        _ => Ok((least, version_max)),
    }
}
