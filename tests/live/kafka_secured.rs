//! A Kafka with every kind of listener, and the certificates that go with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use openssl::asn1::Asn1Time;
use openssl::bn::BigNum;
use openssl::ec::{EcGroup, EcKey};
use openssl::error::ErrorStack;
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Private};
use openssl::symm::Cipher;
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509Builder, X509Name};

use crate::kafka::Broker;
use crate::proc;

/// The password of every user that may do everything.
pub const PASSWORD: &str = "s3cr3t-of-relay";

pub struct Secured {
    pub broker: Broker,
    pub ca: Authority,
    /// PLAIN (user `plain`), SCRAM-SHA-256 (`scram256`, and `guest`, who may do nothing) and
    /// SCRAM-SHA-512 (`scram512`).
    pub sasl_plaintext: String,
    /// The same.
    pub sasl_ssl: String,
    /// With a client certificate of `ca`.
    pub ssl: String,
    /// With a token that is signed by nobody.
    pub oauth: String,
    /// What the broker shows of itself; read again when it starts.
    keystore: PathBuf,
}

impl Secured {
    /// The one that tests share. Never stop it.
    pub fn shared() -> &'static Secured {
        static SHARED: OnceLock<Secured> = OnceLock::new();
        SHARED.get_or_init(Secured::start)
    }

    pub fn start() -> Secured {
        let ca = Authority::new("right");
        let dir = proc::dir("secured");
        let keystore = dir.join("broker.pem");
        put_keystore(&keystore, &ca);
        let [plain, tls, mutual, oauth, open, controller] =
            std::array::from_fn(|_| proc::free_port());
        let at = |port: u16| format!("127.0.0.1:{port}");
        let advertised = format!(
            "PLAINTEXT://{},SASL_PLAINTEXT://{},SASL_SSL://{},SSL://{},OAUTH://{}",
            at(open),
            at(plain),
            at(tls),
            at(mutual),
            at(oauth)
        );
        let mut lines = vec![
            format!("listeners={advertised},CONTROLLER://{}", at(controller)),
            format!("advertised.listeners={advertised}"),
            format!("controller.quorum.voters=1@{}", at(controller)),
            format!("ssl.keystore.location={}", keystore.display()),
            format!("ssl.truststore.location={}", ca.file.display()),
        ];
        lines.extend(SECURITY.lines().map(str::to_owned));
        for listener in ["sasl_plaintext", "sasl_ssl"] {
            lines.push(format!(
                "listener.name.{listener}.plain.sasl.jaas.config=org.apache.kafka.common.security.\
                 plain.PlainLoginModule required user_plain=\"{PASSWORD}\";"
            ));
            for mechanism in ["scram-sha-256", "scram-sha-512"] {
                lines.push(format!(
                    "listener.name.{listener}.{mechanism}.sasl.jaas.config=org.apache.kafka.\
                     common.security.scram.ScramLoginModule required;"
                ));
            }
        }
        let users = [
            format!("SCRAM-SHA-256=[name=scram256,password={PASSWORD}]"),
            format!("SCRAM-SHA-512=[name=scram512,password={PASSWORD}]"),
            format!("SCRAM-SHA-256=[name=guest,password={PASSWORD}]"),
        ];
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let users: Vec<&str> = users.iter().map(String::as_str).collect();
        Secured {
            broker: Broker::with_users(&lines, &users, open),
            ca,
            sasl_plaintext: at(plain),
            sasl_ssl: at(tls),
            ssl: at(mutual),
            oauth: at(oauth),
            keystore,
        }
    }

    /// Gives the broker a certificate of this authority; it counts from the next `up`.
    pub fn sign_broker(&self, ca: &Authority) {
        put_keystore(&self.keystore, ca);
    }
}

/// The rest of the recipe, the same for everyone. PLAINTEXT stays the harness's own door.
const SECURITY: &str = "\
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL,OAUTH:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
sasl.enabled.mechanisms=SCRAM-SHA-256,SCRAM-SHA-512,PLAIN
ssl.keystore.type=PEM
ssl.truststore.type=PEM
listener.name.ssl.ssl.client.auth=required
ssl.principal.mapping.rules=RULE:^CN=(.*?)(,.*)?$/$1/,DEFAULT
listener.name.oauth.sasl.enabled.mechanisms=OAUTHBEARER
listener.name.oauth.oauthbearer.sasl.jaas.config=org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub=\"admin\";
listener.name.oauth.oauthbearer.sasl.server.callback.handler.class=org.apache.kafka.common.security.oauthbearer.internals.unsecured.OAuthBearerUnsecuredValidatorCallbackHandler
listener.name.oauth.connections.max.reauth.ms=3600000
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:plain;User:scram256;User:scram512;User:client;User:token";

fn put_keystore(path: &Path, ca: &Authority) {
    let (certificate, key) = ca.sign("localhost", None);
    fs::write(path, [key, certificate].concat()).expect("the directory is ours");
}

/// A certificate authority of one test.
pub struct Authority {
    pub file: PathBuf,
    certificate: X509,
    key: PKey<Private>,
}

/// A client's certificate and key, as files.
pub struct Client {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new(name: &str) -> Authority {
        let key = new_key();
        let certificate = certificate(name, &key, None);
        let file = proc::dir("kafka-ca").join("ca.pem");
        fs::write(&file, certificate.to_pem().expect("PEM")).expect("the directory is ours");
        Authority {
            file,
            certificate,
            key,
        }
    }

    pub fn path(&self) -> String {
        self.file.to_string_lossy().into_owned()
    }

    /// For the client of that name; the key is encrypted where there is a password.
    pub fn client(&self, name: &str, password: Option<&str>) -> Client {
        let dir = proc::dir("kafka-client");
        let (certificate, key) = self.sign(name, password);
        let put = |name: &str, pem: Vec<u8>| {
            fs::write(dir.join(name), pem).expect("the directory is ours");
            dir.join(name).to_string_lossy().into_owned()
        };
        Client {
            certificate: put("client.crt", certificate),
            key: put("client.key", key),
        }
    }

    /// Certificate and key, as PEM.
    fn sign(&self, name: &str, password: Option<&str>) -> (Vec<u8>, Vec<u8>) {
        let key = new_key();
        let signed = certificate(name, &key, Some(self)).to_pem().expect("PEM");
        let key = match password {
            None => key.private_key_to_pem_pkcs8(),
            Some(password) => {
                key.private_key_to_pem_pkcs8_passphrase(Cipher::aes_256_cbc(), password.as_bytes())
            }
        };
        (signed, key.expect("PEM"))
    }
}

fn new_key() -> PKey<Private> {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).expect("a known curve");
    PKey::from_ec_key(EcKey::generate(&group).expect("a key")).expect("a key")
}

fn certificate(name: &str, key: &PKey<Private>, signer: Option<&Authority>) -> X509 {
    let make = || -> Result<X509, ErrorStack> {
        let mut subject = X509Name::builder()?;
        subject.append_entry_by_text("CN", name)?;
        let subject = subject.build();
        let mut builder = X509Builder::new()?;
        builder.set_version(2)?;
        let serial = BigNum::from_u32(u32::try_from(proc::unique()).unwrap_or(1))?;
        builder.set_serial_number(serial.to_asn1_integer()?.as_ref())?;
        builder.set_subject_name(&subject)?;
        builder.set_pubkey(key)?;
        builder.set_not_before(Asn1Time::days_from_now(0)?.as_ref())?;
        builder.set_not_after(Asn1Time::days_from_now(2)?.as_ref())?;
        match signer {
            None => {
                builder.set_issuer_name(&subject)?;
                builder.append_extension(BasicConstraints::new().critical().ca().build()?)?;
                builder.sign(key, MessageDigest::sha256())?;
            }
            Some(ca) => {
                builder.set_issuer_name(ca.certificate.subject_name())?;
                let context = builder.x509v3_context(Some(&ca.certificate), None);
                let names = SubjectAlternativeName::new()
                    .dns("localhost")
                    .ip("127.0.0.1")
                    .build(&context)?;
                builder.append_extension(names)?;
                builder.sign(&ca.key, MessageDigest::sha256())?;
            }
        }
        Ok(builder.build())
    };
    make().expect("a certificate of plain parts")
}
