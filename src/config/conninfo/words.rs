//! libpq's vocabulary: which words there are, which variable stands in for each, and what becomes
//! of it here.

use super::super::layers::Surroundings;
use crate::error::Failure;

/// What becomes of a word.
#[derive(Clone, Copy)]
enum Fate {
    Honoured,
    /// Taken, and of no effect: see beside it why that harms nobody.
    PassedOver,
    /// Cannot be honoured: what to do instead.
    Refused(&'static str),
}

use Fate::{Honoured, PassedOver, Refused};

const NO_OAUTH: &str = "leave it out: OAuth is not spoken to Postgres; let pg_hba.conf ask this \
                        role for scram-sha-256 or a client certificate";
const NO_KEYS: &str = "leave it out, and give the password itself (PGPASSWORD, a password file)";

/// Word, variable (empty where there is none), fate. In the manual's order.
const KEYS: [(&str, &str, Fate); 54] = [
    ("host", "PGHOST", Honoured),
    ("hostaddr", "PGHOSTADDR", Honoured),
    ("port", "PGPORT", Honoured),
    ("dbname", "PGDATABASE", Honoured),
    ("user", "PGUSER", Honoured),
    ("password", "PGPASSWORD", Honoured),
    ("passfile", "PGPASSFILE", Honoured),
    ("require_auth", "PGREQUIREAUTH", Honoured),
    ("channel_binding", "PGCHANNELBINDING", Honoured),
    ("connect_timeout", "PGCONNECT_TIMEOUT", Honoured),
    // Both sessions set their own: what is read must be understood, whatever a shell has set.
    ("client_encoding", "PGCLIENTENCODING", PassedOver),
    ("options", "PGOPTIONS", Honoured),
    ("application_name", "PGAPPNAME", Honoured),
    ("fallback_application_name", "", Honoured),
    ("keepalives", "", Honoured),
    ("keepalives_idle", "", Honoured),
    ("keepalives_interval", "", Honoured),
    ("keepalives_count", "", Honoured),
    ("tcp_user_timeout", "", Honoured),
    (
        "replication",
        "",
        Refused("leave it out: walrelay sets it where it is needed"),
    ),
    ("gssencmode", "PGGSSENCMODE", Honoured),
    ("sslmode", "PGSSLMODE", Honoured),
    (
        "requiressl",
        "PGREQUIRESSL",
        Refused("write sslmode=require"),
    ),
    ("sslnegotiation", "PGSSLNEGOTIATION", Honoured),
    // No OpenSSL of today compresses.
    ("sslcompression", "PGSSLCOMPRESSION", PassedOver),
    ("sslcert", "PGSSLCERT", Honoured),
    ("sslkey", "PGSSLKEY", Honoured),
    ("sslpassword", "", Honoured),
    ("sslcertmode", "PGSSLCERTMODE", Honoured),
    ("sslrootcert", "PGSSLROOTCERT", Honoured),
    ("sslcrl", "PGSSLCRL", Honoured),
    ("sslcrldir", "PGSSLCRLDIR", Honoured),
    ("sslsni", "PGSSLSNI", Honoured),
    (
        "sslkeylogfile",
        "",
        Refused("leave it out: the keys of a session are not written to a file"),
    ),
    (
        "requirepeer",
        "PGREQUIREPEER",
        Refused(
            "leave it out: who owns the server behind a socket is not asked; keep the socket in a \
             directory that only the server's user can write to",
        ),
    ),
    (
        "ssl_min_protocol_version",
        "PGSSLMINPROTOCOLVERSION",
        Honoured,
    ),
    (
        "ssl_max_protocol_version",
        "PGSSLMAXPROTOCOLVERSION",
        Honoured,
    ),
    ("min_protocol_version", "PGMINPROTOCOLVERSION", Honoured),
    // Protocol 3.0 is spoken, which every server understands.
    ("max_protocol_version", "PGMAXPROTOCOLVERSION", PassedOver),
    // Three words of GSSAPI, which is never begun.
    ("krbsrvname", "PGKRBSRVNAME", PassedOver),
    ("gsslib", "PGGSSLIB", PassedOver),
    ("gssdelegation", "PGGSSDELEGATION", PassedOver),
    ("scram_client_key", "", Refused(NO_KEYS)),
    ("scram_server_key", "", Refused(NO_KEYS)),
    ("service", "PGSERVICE", Honoured),
    ("servicefile", "PGSERVICEFILE", Honoured),
    ("target_session_attrs", "PGTARGETSESSIONATTRS", Honoured),
    // One of the hosts is the primary, in whatever order they are asked.
    ("load_balance_hosts", "PGLOADBALANCEHOSTS", PassedOver),
    ("authtype", "", PassedOver),
    ("tty", "PGTTY", PassedOver),
    ("oauth_issuer", "", Refused(NO_OAUTH)),
    ("oauth_client_id", "", Refused(NO_OAUTH)),
    ("oauth_client_secret", "", Refused(NO_OAUTH)),
    ("oauth_scope", "", Refused(NO_OAUTH)),
];

/// One word of a connection string or a service, with the value as the server is to see it.
pub struct Word {
    pub key: &'static str,
    pub value: String,
    /// Where it stands, for messages.
    pub place: String,
}

/// All that was said: the later of the same word wins, and variables stand beneath.
pub struct Words<'a> {
    pub given: Vec<Word>,
    pub around: &'a Surroundings,
}

/// A value, and the name of the place that it came from.
#[derive(Clone)]
pub struct Found {
    pub value: String,
    pub place: String,
}

impl Words<'_> {
    /// As in libpq, an empty word is an absent one.
    pub fn find(&self, key: &str) -> Option<Found> {
        let word = self.given.iter().rev().find(|word| word.key == key);
        if let Some(word) = word.filter(|word| !word.value.is_empty()) {
            return Some(Found {
                value: word.value.clone(),
                place: word.place.clone(),
            });
        }
        let (_, variable, _) = KEYS.iter().find(|(known, _, _)| *known == key)?;
        let value = self.around.pg_variable(variable)?;
        Some(Found {
            value: value.to_owned(),
            place: (*variable).to_owned(),
        })
    }

    pub fn text(&self, key: &str) -> Option<String> {
        self.find(key).map(|found| found.value)
    }
}

impl Found {
    /// A usage failure that shows the value: not for secrets.
    pub fn wrong(&self, what: &str, remedy: &str) -> Failure {
        Failure::usage(format!("{}: {:?} {what}", self.place, self.value), remedy)
    }

    /// A whole number that is at least 0, as libpq takes it.
    pub fn number(&self) -> Result<u32, Failure> {
        let number = self.value.trim().parse();
        number.map_err(|_| self.wrong("is no whole number", "write 0 or a positive whole number"))
    }

    /// `0` or `1`.
    pub fn switch(&self) -> Result<bool, Failure> {
        match self.value.trim() {
            "0" => Ok(false),
            "1" => Ok(true),
            _ => Err(self.wrong("is neither 0 nor 1", "write 0 or 1")),
        }
    }

    /// One of a few words.
    pub fn one_of<T: Copy>(&self, known: &[(&str, T)]) -> Result<T, Failure> {
        let found = known.iter().find(|(word, _)| *word == self.value);
        found.map(|(_, meaning)| *meaning).ok_or_else(|| {
            let words: Vec<&str> = known.iter().map(|(word, _)| *word).collect();
            self.wrong("is not known", &format!("use one of {}", words.join(", ")))
        })
    }
}

/// A variable that we cannot honour is not passed over in silence.
pub fn refuse_variables(around: &Surroundings) -> Result<(), Failure> {
    for (_, variable, fate) in KEYS {
        if let Refused(remedy) = fate
            && around.pg_variable(variable).is_some()
        {
            return Err(Failure::usage(
                format!("{variable} is set, and cannot be honoured"),
                remedy,
            ));
        }
    }
    Ok(())
}

pub fn is_known(name: &str) -> bool {
    KEYS.iter().any(|(key, _, _)| *key == name)
}

/// The key as we know it, or why not.
pub fn known_key(name: &str, origin: &str) -> Result<&'static str, Failure> {
    match KEYS.into_iter().find(|(key, _, _)| *key == name) {
        Some((key, _, Honoured | PassedOver)) => return Ok(key),
        Some((key, _, Refused(remedy))) => {
            return Err(Failure::usage(
                format!("{key} in {origin} cannot be honoured"),
                remedy,
            ));
        }
        None => {}
    }
    let nearest = KEYS
        .into_iter()
        .filter(|(_, _, fate)| matches!(fate, Honoured))
        .map(|(key, _, _)| (strsim::jaro_winkler(key, name), key))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .filter(|(likeness, _)| *likeness > 0.85);
    match nearest {
        Some((_, key)) => Err(Failure::usage(
            format!("{origin}: unknown key {name}"),
            format!("did you mean {key}?"),
        )),
        // Far from any key, it may be a piece of a password: not shown.
        None => Err(Failure::usage(
            format!("{origin}: a word that is no key of libpq's"),
            "the keys are libpq's (host, port, user, password, dbname, sslmode, …); a value with \
             blanks stands in 'quotes'",
        )),
    }
}
