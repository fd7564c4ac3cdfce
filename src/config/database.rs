//! What is known of a database before anything is contacted: where it may be, and how it is to be
//! spoken to.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::passfile::{self, Ignored};

/// How to reach Postgres. Both connections (replication and side) are made from this.
#[derive(Clone, PartialEq, Eq)]
pub struct Database {
    /// In the order in which they are tried; never empty.
    pub hosts: Vec<Host>,
    pub user: String,
    pub dbname: String,
    /// `None`: the password file is asked, at each connect anew.
    pub password: Option<String>,
    pub passfile: Option<PathBuf>,
    pub tls: Tls,
    pub auth: Auth,
    pub target: Target,
    /// Command-line options for both sessions, as `PGOPTIONS` has them.
    pub options: Option<String>,
    pub application_name: String,
    /// For each address that is tried, the log-in included.
    pub connect_timeout: Duration,
    pub tcp: Tcp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// A name, an address, or a directory that holds the Unix socket (it starts with `/`, or with
    /// `@` for an abstract one).
    pub name: String,
    /// Where to connect to, without asking what `name` resolves to.
    pub address: Option<IpAddr>,
    pub port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    Disable,
    Allow,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

/// TLS, in libpq's words. Files are read at each connect: they are renewed while we run.
#[derive(Clone, PartialEq, Eq)]
pub struct Tls {
    pub sslmode: SslMode,
    pub negotiation: Negotiation,
    pub root: Root,
    pub cert: Option<Pem>,
    pub key: Option<Pem>,
    pub password: Option<String>,
    pub crl: Option<Pem>,
    pub crl_dir: Option<PathBuf>,
    pub version_min: TlsVersion,
    pub version_max: Option<TlsVersion>,
    /// The host's name is sent in clear before the handshake, for a proxy to choose by.
    pub sni: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Negotiation {
    /// Postgres's own request first.
    Postgres,
    /// TLS from the first byte (Postgres 17 and later).
    Direct,
}

/// A file of certificates or keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pem {
    /// Somebody named it.
    Named(PathBuf),
    /// libpq's place in the home directory, where there may be nothing.
    Usual(PathBuf),
}

/// Whom we trust to sign the server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Root {
    None,
    /// What the operating system trusts.
    System,
    File(Pem),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TlsVersion {
    V1,
    V1_1,
    V1_2,
    V1_3,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Auth {
    pub channel_binding: ChannelBinding,
    /// `require_auth`; `None`: what is safe on the stream that it is asked on.
    pub methods: Option<Methods>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChannelBinding {
    Disable,
    #[default]
    Prefer,
    Require,
}

/// How a server may ask us who we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Not at all.
    None,
    Password,
    Md5,
    ScramSha256,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Methods {
    /// As it was written.
    pub written: String,
    pub allowed: Vec<Method>,
    /// `password` was asked for by name: then it may cross a network in clear.
    pub clear_password: bool,
}

/// `target_session_attrs`, as far as it can be of use to a relay, which needs the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Primary,
    /// A primary whose sessions are not read-only by default.
    ReadWrite,
}

/// How a peer that vanished without a word is noticed. `None`: the kernel's own default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tcp {
    pub keepalives: bool,
    pub idle: Option<Duration>,
    pub interval: Option<Duration>,
    pub count: Option<u32>,
    pub user_timeout_ms: Option<u32>,
}

impl Host {
    /// A Unix socket, over which TLS is never spoken.
    #[must_use]
    pub fn is_socket(&self) -> bool {
        self.address.is_none() && self.name.starts_with(['/', '@'])
    }
}

/// For messages.
impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host \"{}\" port {}", self.name, self.port)
    }
}

impl Method {
    /// libpq's word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Method::None => "none",
            Method::Password => "password",
            Method::Md5 => "md5",
            Method::ScramSha256 => "scram-sha-256",
        }
    }
}

impl Default for Tcp {
    /// 10 + 3 × 5 s of silence, or 30 s in which nothing of what we sent was taken in. The server
    /// is told the same of us.
    fn default() -> Self {
        Tcp {
            keepalives: true,
            idle: Some(Duration::from_secs(10)),
            interval: Some(Duration::from_secs(5)),
            count: Some(3),
            user_timeout_ms: Some(30_000),
        }
    }
}

impl Default for Tls {
    fn default() -> Self {
        Tls {
            sslmode: SslMode::Prefer,
            negotiation: Negotiation::Postgres,
            root: Root::None,
            cert: None,
            key: None,
            password: None,
            crl: None,
            crl_dir: None,
            version_min: TlsVersion::V1_2,
            version_max: None,
            sni: true,
        }
    }
}

pub const CONNECT_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);

impl Database {
    /// One server, spoken to without TLS and without a password.
    #[must_use]
    pub fn plain(host: &str, port: u16, user: &str, dbname: &str) -> Self {
        Database {
            hosts: vec![Host {
                name: host.to_owned(),
                address: None,
                port,
            }],
            user: user.to_owned(),
            dbname: dbname.to_owned(),
            password: None,
            passfile: None,
            tls: Tls {
                sslmode: SslMode::Disable,
                ..Tls::default()
            },
            auth: Auth::default(),
            target: Target::Primary,
            options: None,
            application_name: "walrelay".to_owned(),
            connect_timeout: CONNECT_TIMEOUT_DEFAULT,
            tcp: Tcp::default(),
        }
    }

    /// The password for one of the hosts, as it is now.
    ///
    /// # Errors
    /// There is a password file, and it must not be used.
    pub fn password_for(&self, host: &Host) -> Result<Option<Vec<u8>>, Ignored> {
        match (&self.password, &self.passfile) {
            (Some(password), _) => Ok(Some(password.clone().into_bytes())),
            (None, Some(file)) => passfile::find(file, host, &self.dbname, &self.user),
            (None, None) => Ok(None),
        }
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database")
            .field("hosts", &self.hosts)
            .field("user", &self.user)
            .field("dbname", &self.dbname)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .field("passfile", &self.passfile)
            .field("tls", &self.tls)
            .field("auth", &self.auth)
            .field("target", &self.target)
            .field("options", &self.options)
            .field("application_name", &self.application_name)
            .field("connect_timeout", &self.connect_timeout)
            .field("tcp", &self.tcp)
            .finish()
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("sslmode", &self.sslmode)
            .field("negotiation", &self.negotiation)
            .field("root", &self.root)
            .field("cert", &self.cert)
            .field("key", &self.key)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .field("crl", &self.crl)
            .field("crl_dir", &self.crl_dir)
            .field("version_min", &self.version_min)
            .field("version_max", &self.version_max)
            .field("sni", &self.sni)
            .finish()
    }
}
