//! A Kafka with every kind of listener, and the certificates that go with it.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::certs::{Authority, Signed};
use crate::kafka::Broker;
use crate::proc;

/// The password of every user that may do everything.
pub const PASSWORD: &str = "s3cr3t-of-relay";

pub struct Secured {
    pub broker: Broker,
    pub ca: Authority,
    /// PLAIN (user `plain`), SCRAM-SHA-256 (`scram256`; `guest`, who may do nothing; `scribe`, who
    /// may do what he is allowed to) and SCRAM-SHA-512 (`scram512`).
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
        put_keystore(&keystore, &good(&ca));
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
            format!("SCRAM-SHA-256=[name=scribe,password={PASSWORD}]"),
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

    /// Grants a user operations on a topic. (The client library in use here cannot.)
    pub fn allow(&self, user: &str, operations: &[&str], topic: &str) {
        let mut request = Vec::new();
        let put_text = |request: &mut Vec<u8>, text: &str| {
            let length = i16::try_from(text.len()).expect("short");
            request.extend(length.to_be_bytes());
            request.extend(text.as_bytes());
        };
        // Kafka's protocol: CreateAcls is request 30; its version 1, as the test's correlation 7.
        request.extend([0, 30, 0, 1, 0, 0, 0, 7]);
        put_text(&mut request, "test");
        request.extend(i32::try_from(operations.len()).expect("few").to_be_bytes());
        for operation in operations {
            request.push(2); // a topic
            put_text(&mut request, topic);
            request.push(3); // of exactly that name
            put_text(&mut request, &format!("User:{user}"));
            put_text(&mut request, "*");
            request.push(match *operation {
                "Read" => 3,
                "Write" => 4,
                "Describe" => 8,
                other => panic!("no number for {other}"),
            });
            request.push(3); // allow
        }
        let mut broker = TcpStream::connect(self.broker.bootstrap()).expect("the broker listens");
        let length = u32::try_from(request.len()).expect("short");
        let framed = [&length.to_be_bytes()[..], &request].concat();
        broker.write_all(&framed).expect("the broker reads");
        let mut length = [0; 4];
        broker.read_exact(&mut length).expect("the broker answers");
        let mut answer = vec![0; u32::from_be_bytes(length) as usize];
        broker.read_exact(&mut answer).expect("the broker answers");
        // Correlation, throttle time, a count; for each an error code, and an empty message.
        assert_eq!(&answer[12..], vec![0; 4 * operations.len()], "{answer:?}");
    }

    /// Gives the broker another certificate; it counts from the next `up`.
    pub fn show(&self, signed: &Signed) {
        put_keystore(&self.keystore, signed);
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

/// What a broker that is reached at 127.0.0.1 shows of itself.
pub fn good(ca: &Authority) -> Signed {
    ca.sign("localhost", &["localhost", "127.0.0.1"])
}

fn put_keystore(path: &Path, signed: &Signed) {
    let pem = [signed.key(), signed.certificate()].concat();
    fs::write(path, pem).expect("the directory is ours");
}

/// A client's certificate and key, as files.
pub struct Client {
    pub certificate: String,
    pub key: String,
}

impl Client {
    /// The key is encrypted where there is a password.
    pub fn of(ca: &Authority, name: &str, password: Option<&str>) -> Client {
        let signed = ca.sign(name, &[]);
        let key = match password {
            None => signed.key(),
            Some(password) => signed.locked_key(password),
        };
        let put = |what: &str, pem: &[u8]| {
            let path = ca.put(&format!("{name}-{}.{what}", proc::unique()), pem);
            path.to_string_lossy().into_owned()
        };
        Client {
            certificate: put("crt", &signed.certificate()),
            key: put("key", &key),
        }
    }
}

pub fn path(ca: &Authority) -> String {
    ca.file.to_string_lossy().into_owned()
}
