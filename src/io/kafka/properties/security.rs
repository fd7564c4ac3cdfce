//! Protocol, login and certificates: what of them goes together, and what others could read.

use std::fs::File;
use std::io::Read as _;

use openssl::pkey::PKey;
use openssl::x509::X509;

use super::canonical;
use crate::error::Failure;

/// Protocol, login and certificates, as they were given.
pub struct Security<'v> {
    pub values: &'v [(String, String)],
    pub has_token_command: bool,
}

const CERTIFICATE: [&str; 2] = ["ssl.certificate.location", "ssl.certificate.pem"];
const KEY: [&str; 2] = ["ssl.key.location", "ssl.key.pem"];
/// Where to trust, and who we are: of no use without TLS.
const TLS: [&str; 8] = [
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.key.location",
    "ssl.key.pem",
    "ssl.keystore.location",
    "ssl.key.password",
];
const FILES: [&str; 5] = [
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.keystore.location",
    "ssl.crl.location",
];
/// How a keystore of Java's own kinds begins: JKS, JCEKS.
const JAVA_KEYSTORES: [[u8; 4]; 2] = [[0xFE, 0xED, 0xFE, 0xED], [0xCE, 0xCE, 0xCE, 0xCE]];

impl Security<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        let (_, value) = self.values.iter().find(|(own, _)| canonical(own) == name)?;
        Some(value)
    }

    fn first_of(&self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().copied().find(|name| self.get(name).is_some())
    }

    fn protocol(&self) -> String {
        let given = self.get("security.protocol").unwrap_or("plaintext");
        given.trim().to_ascii_lowercase()
    }

    pub fn has_tls(&self) -> bool {
        self.protocol().ends_with("ssl")
    }

    pub fn has_sasl(&self) -> bool {
        self.protocol().starts_with("sasl")
    }

    pub fn check(&self) -> Result<(), Failure> {
        if self.has_sasl() {
            self.check_mechanism()?;
        } else {
            self.check_no_sasl()?;
        }
        if self.has_tls() {
            self.check_pair(&CERTIFICATE, &KEY)?;
            self.check_pair(&KEY, &CERTIFICATE)?;
            self.check_key()?;
        } else if let Some(name) = self.first_of(&TLS) {
            return Err(Failure::usage(
                format!(
                    "{name} is given, and security.protocol is {}: no TLS is spoken",
                    self.protocol()
                ),
                "set security.protocol=ssl (sasl_ssl with a user), or leave it out",
            ));
        }
        FILES.iter().try_for_each(|name| self.check_file(name))
    }

    fn check_mechanism(&self) -> Result<(), Failure> {
        let protocol = self.protocol();
        let Some(mechanism) = self.get("sasl.mechanisms") else {
            return Err(Failure::usage(
                format!("security.protocol={protocol} without sasl.mechanism"),
                "add sasl.mechanism=SCRAM-SHA-512 (or SCRAM-SHA-256, PLAIN, OAUTHBEARER)",
            ));
        };
        match mechanism {
            "OAUTHBEARER" if self.has_token_command => Ok(()),
            "OAUTHBEARER" => Err(Failure::usage(
                "sasl.mechanism=OAUTHBEARER, and nothing that gives a token",
                "add --kafka-token-command: a command that prints one",
            )),
            "PLAIN" | "SCRAM-SHA-256" | "SCRAM-SHA-512" => self.check_user(mechanism),
            "GSSAPI" => Err(Failure::usage(
                "sasl.mechanism=GSSAPI: Kerberos is not built in",
                "use SCRAM-SHA-512, SCRAM-SHA-256, PLAIN or OAUTHBEARER",
            )),
            other => Err(Failure::usage(
                format!("sasl.mechanism={other}: there is no such mechanism"),
                "write SCRAM-SHA-512, SCRAM-SHA-256, PLAIN or OAUTHBEARER, in capitals",
            )),
        }
    }

    fn check_user(&self, mechanism: &str) -> Result<(), Failure> {
        for name in ["sasl.username", "sasl.password"] {
            if self.get(name).is_none_or(str::is_empty) {
                return Err(Failure::usage(
                    format!("sasl.mechanism={mechanism} without {name}"),
                    format!(
                        "add {name}; ${{env:NAME}} and ${{file:/path}} stand for what is there"
                    ),
                ));
            }
        }
        if self.has_token_command {
            return Err(Failure::usage(
                format!("--kafka-token-command is given, and sasl.mechanism is {mechanism}"),
                "set sasl.mechanism=OAUTHBEARER, or leave the command out",
            ));
        }
        Ok(())
    }

    fn check_no_sasl(&self) -> Result<(), Failure> {
        let names = ["sasl.username", "sasl.password", "sasl.mechanisms"];
        let given = match self.first_of(&names) {
            Some("sasl.mechanisms") => "sasl.mechanism",
            Some(name) => name,
            None if self.has_token_command => "--kafka-token-command",
            None => return Ok(()),
        };
        Err(Failure::usage(
            format!(
                "{given} is given, and security.protocol is {}: nobody logs in",
                self.protocol()
            ),
            "set security.protocol=sasl_ssl (sasl_plaintext without TLS), or leave it out",
        ))
    }

    fn check_pair(&self, given: &[&'static str], wanted: &[&'static str]) -> Result<(), Failure> {
        match (self.first_of(given), self.first_of(wanted)) {
            (Some(name), None) => Err(Failure::usage(
                format!("{name} is given without {}", wanted[0]),
                format!("add {}: a certificate and its key go together", wanted[0]),
            )),
            (Some(_), Some(_)) | (None, _) => Ok(()),
        }
    }

    /// The client library says of a key that it cannot open no more than "PEM lib".
    fn check_key(&self) -> Result<(), Failure> {
        let Some(pem) = self.pem(&KEY)? else {
            return Ok(());
        };
        let password = self.get("ssl.key.password");
        // The empty password is not asked for on a terminal, as none would be.
        let opened =
            PKey::private_key_from_pem_passphrase(&pem, password.unwrap_or_default().as_bytes());
        let name = self.first_of(&KEY).unwrap_or(KEY[0]);
        let Ok(key) = opened else {
            let is_locked = String::from_utf8_lossy(&pem).contains("ENCRYPTED");
            return Err(match (is_locked, password) {
                (true, None) => Failure::usage(
                    format!("{name}: the key is encrypted"),
                    "add ssl.key.password; ${env:NAME} and ${file:/path} stand for what is there",
                ),
                (true, Some(_)) => Failure::usage(
                    format!("{name}: ssl.key.password does not open this key"),
                    "give the password that the key was encrypted with",
                ),
                (false, _) => Failure::usage(
                    format!("{name} holds no private key"),
                    "name a PEM file with -----BEGIN PRIVATE KEY----- in it",
                ),
            });
        };
        let certificate = self.pem(&CERTIFICATE)?.unwrap_or_default();
        let Ok(certificate) = X509::from_pem(&certificate) else {
            let name = self.first_of(&CERTIFICATE).unwrap_or(CERTIFICATE[0]);
            return Err(Failure::usage(
                format!("{name} holds no certificate"),
                "name a PEM file with -----BEGIN CERTIFICATE----- in it",
            ));
        };
        if certificate
            .public_key()
            .is_ok_and(|public| !public.public_eq(&key))
        {
            return Err(Failure::usage(
                format!("{name}: certificate and key mismatch: they are not of one pair"),
                "name the key that belongs to this certificate",
            ));
        }
        Ok(())
    }

    /// What the first of these names, a `….location` or a `….pem`, stands for.
    fn pem(&self, names: &[&'static str]) -> Result<Option<Vec<u8>>, Failure> {
        let Some(name) = self.first_of(names) else {
            return Ok(None);
        };
        let value = self.get(name).unwrap_or_default();
        if name.ends_with(".pem") {
            return Ok(Some(value.as_bytes().to_vec()));
        }
        self.check_file(name)?;
        std::fs::read(value)
            .map(Some)
            .map_err(|error| unreadable(name, value, &error))
    }

    /// The client library says of a file that is not there only what OpenSSL does.
    fn check_file(&self, name: &str) -> Result<(), Failure> {
        let path = match self.get(name) {
            // The system's own certificates.
            None | Some("probe") => return Ok(()),
            Some(path) => path,
        };
        let unreadable = |error: std::io::Error| unreadable(name, path, &error);
        let mut file = File::open(path).map_err(unreadable)?;
        if name == "ssl.ca.location" && file.metadata().is_ok_and(|found| found.is_dir()) {
            return Ok(());
        }
        let mut start = [0; 4];
        let is_short = match file.read_exact(&mut start) {
            Ok(()) => false,
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => true,
            Err(error) => return Err(unreadable(error)),
        };
        if is_short {
            return Err(Failure::usage(
                format!("{name}: {path} is empty"),
                "name the file with the certificate or key",
            ));
        }
        if JAVA_KEYSTORES.contains(&start) {
            return Err(Failure::usage(
                format!("{name}: {path} is a Java keystore (JKS)"),
                "write ssl.certificate.location, ssl.key.location and ssl.ca.location with PEM \
                 files, or convert it: keytool -importkeystore -deststoretype pkcs12",
            ));
        }
        Ok(())
    }
}

fn unreadable(name: &str, path: &str, error: &std::io::Error) -> Failure {
    Failure::usage(
        format!("{name}: cannot read {path}: {error}"),
        "name a file that this user can read",
    )
}

/// What others on the network could read or pretend to be: what, and what to do.
pub fn exposures(values: &[(String, String)]) -> Vec<(&'static str, &'static str)> {
    let security = Security {
        values,
        has_token_command: false,
    };
    let mut exposures = Vec::new();
    let mechanism = security.get("sasl.mechanisms").unwrap_or_default();
    if security.protocol() == "sasl_plaintext" && matches!(mechanism, "PLAIN" | "OAUTHBEARER") {
        exposures.push((
            "the password or token is sent in the clear: there is no TLS",
            "use a listener with TLS and --kafka security.protocol=sasl_ssl, or a SCRAM mechanism",
        ));
    }
    if security.has_tls() {
        let is_off = |name: &str, off: &[&str]| {
            let value = security.get(name).unwrap_or_default().to_ascii_lowercase();
            off.contains(&value.trim())
        };
        if is_off("enable.ssl.certificate.verification", &["false", "f", "0"]) {
            exposures.push((
                "no certificate is verified: anybody can pretend to be the broker",
                "leave enable.ssl.certificate.verification out, and give ssl.ca.location",
            ));
        } else if is_off("ssl.endpoint.identification.algorithm", &["none"]) {
            exposures.push((
                "the broker's certificate may be of any name",
                "leave ssl.endpoint.identification.algorithm out",
            ));
        }
    }
    exposures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_can_read_or_pretend_is_told() {
        let count = |pairs: &[(&str, &str)]| {
            let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            exposures(&pairs.iter().map(own).collect::<Vec<_>>()).len()
        };
        let clear = ("security.protocol", "SASL_PLAINTEXT");
        let tls = ("security.protocol", "sasl_ssl");
        let plain = ("sasl.mechanism", "PLAIN");
        assert_eq!(count(&[clear, plain]), 1);
        assert_eq!(count(&[clear, ("sasl.mechanism", "OAUTHBEARER")]), 1);
        assert_eq!(count(&[clear, ("sasl.mechanism", "SCRAM-SHA-256")]), 0);
        assert_eq!(count(&[tls, plain]), 0);
        assert_eq!(
            count(&[tls, ("enable.ssl.certificate.verification", "false")]),
            1
        );
        assert_eq!(
            count(&[tls, ("ssl.endpoint.identification.algorithm", "none")]),
            1
        );
        assert_eq!(count(&[]), 0);
    }
}
