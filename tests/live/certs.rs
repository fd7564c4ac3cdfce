//! Certificates of one test: an authority, and what it signs.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use openssl::asn1::Asn1Time;
use openssl::bn::BigNum;
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::rsa::Rsa;
use openssl::symm::Cipher;
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509Builder, X509Name};

use crate::proc;

/// A certificate authority.
pub struct Authority {
    /// Its certificate.
    pub file: PathBuf,
    dir: PathBuf,
    own: Signed,
}

/// A certificate and its key.
pub struct Signed {
    certificate: X509,
    key: PKey<Private>,
}

impl Authority {
    pub fn new(name: &str) -> Authority {
        let dir = proc::dir("ca");
        let own = make(name, &[], 0, None).expect("a certificate of plain parts");
        let file = dir.join("ca.crt");
        fs::write(&file, own.certificate()).expect("the directory is ours");
        Authority { file, dir, own }
    }

    /// A certificate for a common name and, beside it, names and addresses.
    pub fn sign(&self, common_name: &str, alternatives: &[&str]) -> Signed {
        self.sign_from(common_name, alternatives, 0)
    }

    /// One that expired yesterday.
    pub fn sign_expired(&self, common_name: &str, alternatives: &[&str]) -> Signed {
        self.sign_from(common_name, alternatives, -3)
    }

    fn sign_from(&self, common_name: &str, alternatives: &[&str], from: i64) -> Signed {
        let signed = make(common_name, alternatives, from, Some(&self.own));
        signed.expect("a certificate of plain parts")
    }

    /// A list of what this authority takes back: one certificate.
    pub fn revoke(&self, certificate: &[u8]) -> PathBuf {
        let certificate = X509::from_pem(certificate).expect("PEM");
        let serial = certificate.serial_number().to_bn();
        let serial = serial.and_then(|n| n.to_hex_str()).expect("a number");
        let dir = self.dir.join(format!("crl-{}", proc::unique()));
        fs::create_dir(&dir).expect("a new name");
        let put = |name: &str, content: &str| {
            let path = dir.join(name);
            fs::write(&path, content).expect("the directory is ours");
            path
        };
        let line = format!("R\t391231235959Z\t200101000000Z\t{serial}\tunknown\t/CN=x\n");
        let (index, number) = (put("index", &line), put("number", "01\n"));
        let config = format!(
            "[ca]\ndefault_ca=d\n[d]\ndatabase={}\ncrlnumber={}\ndefault_md=sha256\n\
             default_crl_days=2\n",
            index.display(),
            number.display()
        );
        let key = self.put("ca.key", &self.own.key());
        let list = dir.join("list.crl");
        // The crate reads such lists and does not write them.
        let mut openssl = std::process::Command::new("openssl");
        openssl.args(["ca", "-gencrl", "-config"]);
        openssl.arg(put("config", &config)).arg("-keyfile").arg(key);
        openssl.arg("-cert").arg(&self.file).arg("-out").arg(&list);
        proc::output(openssl);
        list
    }

    /// A file of this authority that only its owner may read.
    pub fn put(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.dir.join(name);
        fs::write(&path, content).expect("the directory is ours");
        chmod(&path, 0o600);
        path
    }
}

pub fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
}

impl Signed {
    /// As PEM.
    pub fn certificate(&self) -> Vec<u8> {
        self.certificate.to_pem().expect("PEM")
    }

    /// As PEM.
    pub fn key(&self) -> Vec<u8> {
        self.key.private_key_to_pem_pkcs8().expect("PEM")
    }

    /// As PEM that a password opens.
    pub fn locked_key(&self, password: &str) -> Vec<u8> {
        let cipher = Cipher::aes_256_cbc();
        let pem = self
            .key
            .private_key_to_pem_pkcs8_passphrase(cipher, password.as_bytes());
        pem.expect("PEM")
    }
}

/// Valid for two days from `from`, in days from now.
fn make(
    common_name: &str,
    alternatives: &[&str],
    from: i64,
    signer: Option<&Signed>,
) -> Result<Signed, ErrorStack> {
    const DAY: i64 = 24 * 3600;
    let key = PKey::from_rsa(Rsa::generate(2048)?)?;
    let mut subject = X509Name::builder()?;
    subject.append_entry_by_text("CN", common_name)?;
    let subject = subject.build();
    let now = std::time::UNIX_EPOCH.elapsed().map_or(0, |d| d.as_secs());
    let now = i64::try_from(now).unwrap_or_default();
    let mut builder = X509::builder()?;
    builder.set_version(2)?;
    let serial = BigNum::from_u32(u32::try_from(proc::unique()).unwrap_or(1))?;
    builder.set_serial_number(serial.to_asn1_integer()?.as_ref())?;
    builder.set_subject_name(&subject)?;
    builder.set_pubkey(&key)?;
    // From a minute ago: clocks are compared to the second.
    builder.set_not_before(Asn1Time::from_unix(now + from * DAY - 60)?.as_ref())?;
    builder.set_not_after(Asn1Time::from_unix(now + (from + 2) * DAY)?.as_ref())?;
    match signer {
        None => {
            builder.set_issuer_name(&subject)?;
            builder.append_extension(BasicConstraints::new().critical().ca().build()?)?;
            builder.sign(&key, MessageDigest::sha256())?;
        }
        Some(ca) => {
            builder.set_issuer_name(ca.certificate.subject_name())?;
            name_all(&mut builder, ca, alternatives)?;
            builder.sign(&ca.key, MessageDigest::sha256())?;
        }
    }
    Ok(Signed {
        certificate: builder.build(),
        key,
    })
}

fn name_all(
    builder: &mut X509Builder,
    ca: &Signed,
    alternatives: &[&str],
) -> Result<(), ErrorStack> {
    if alternatives.is_empty() {
        return Ok(());
    }
    let mut names = SubjectAlternativeName::new();
    for name in alternatives {
        match name.parse::<IpAddr>() {
            Ok(_) => names.ip(name),
            Err(_) => names.dns(name),
        };
    }
    let extension = names.build(&builder.x509v3_context(Some(&ca.certificate), None))?;
    builder.append_extension(extension)
}
