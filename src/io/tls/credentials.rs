//! Our own certificate and its key, for a server that asks for them.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use openssl::pkey::{PKey, Private};
use openssl::ssl::SslConnectorBuilder;

use crate::config::{Pem, Tls};
use crate::error::DbError;

/// Puts `sslcert` and `sslkey` to use. As in libpq, a certificate that is not there is none.
pub fn set(builder: &mut SslConnectorBuilder, tls: &Tls) -> Result<(), DbError> {
    let Some(Pem::Named(cert) | Pem::Usual(cert)) = &tls.cert else {
        return Ok(());
    };
    if !cert.exists() {
        if matches!(tls.cert, Some(Pem::Named(_))) {
            let cert = cert.display();
            tracing::warn!("sslcert {cert} does not exist: no certificate is shown to the server");
        }
        return Ok(());
    }
    let unusable =
        |e: &dyn std::fmt::Display| DbError::Tls(format!("sslcert {}: {e}", cert.display()));
    builder
        .set_certificate_chain_file(cert)
        .map_err(|e| unusable(&e))?;
    let Some(Pem::Named(key) | Pem::Usual(key)) = &tls.key else {
        return Err(unusable(&"sslkey is missing, the key that belongs to it"));
    };
    let private = private_key(key, tls.password.as_deref())?;
    let is_its_own =
        builder.set_private_key(&private).is_ok() && builder.check_private_key().is_ok();
    if !is_its_own {
        return Err(DbError::Tls(format!(
            "sslkey {}: it does not belong to sslcert {}",
            key.display(),
            cert.display()
        )));
    }
    Ok(())
}

fn private_key(path: &Path, password: Option<&str>) -> Result<PKey<Private>, DbError> {
    let unusable =
        |e: &dyn std::fmt::Display| DbError::Tls(format!("sslkey {}: {e}", path.display()));
    let metadata = fs::metadata(path).map_err(|e| unusable(&e))?;
    if !metadata.is_file() {
        return Err(unusable(&"it is no plain file"));
    }
    // libpq's rule: one that the system keeps for a group of services may be read by the group.
    let forbidden = if metadata.uid() == 0 { 0o037 } else { 0o077 };
    if metadata.permissions().mode() & forbidden != 0 {
        return Err(unusable(
            &"group or others may use it; its mode must be 0600, or 0640 if root owns it",
        ));
    }
    let bytes = fs::read(path).map_err(|e| unusable(&e))?;
    let mut is_encrypted = false;
    // Without this OpenSSL would ask on the terminal.
    let pem = PKey::private_key_from_pem_callback(&bytes, |room| {
        is_encrypted = true;
        let password = password.unwrap_or_default().as_bytes();
        let fits = password.len().min(room.len());
        room[..fits].copy_from_slice(&password[..fits]);
        Ok(fits)
    });
    match (pem, is_encrypted, password) {
        (Ok(key), _, _) => Ok(key),
        (Err(_), true, None) => Err(unusable(&"it is encrypted, and sslpassword is missing")),
        (Err(_), true, Some(_)) => Err(unusable(&"sslpassword does not open it")),
        (Err(error), false, _) => PKey::private_key_from_der(&bytes).map_err(|_| unusable(&error)),
    }
}
