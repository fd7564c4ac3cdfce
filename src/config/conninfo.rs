//! How to reach Postgres: libpq's URL and keyword strings, with the `PG*` variables beneath them.
//! Our own parser, because a refused string has to be shown with its password masked, and because
//! a word of libpq's that we do not honour yet has to be refused by name.
//!
//! Source: the Postgres manual, "Connection Strings", "Parameter Key Words", "Environment
//! Variables".

use std::path::PathBuf;
use std::time::Duration;

use super::layers::{Given, Surroundings};
use super::{Database, SslMode};
use crate::error::Failure;

/// The words that we honour, and the variable that stands in for each.
const KEYS: [(&str, &str); 9] = [
    ("host", "PGHOST"),
    ("port", "PGPORT"),
    ("user", "PGUSER"),
    ("password", "PGPASSWORD"),
    ("dbname", "PGDATABASE"),
    ("sslmode", "PGSSLMODE"),
    ("sslrootcert", "PGSSLROOTCERT"),
    ("application_name", "PGAPPNAME"),
    ("connect_timeout", "PGCONNECT_TIMEOUT"),
];

/// The rest of libpq's vocabulary: known, refused. The variable is empty where there is none.
const KEYS_NOT_BUILT: [(&str, &str); 38] = [
    ("hostaddr", "PGHOSTADDR"),
    ("passfile", "PGPASSFILE"),
    ("require_auth", "PGREQUIREAUTH"),
    ("channel_binding", "PGCHANNELBINDING"),
    ("client_encoding", "PGCLIENTENCODING"),
    ("options", "PGOPTIONS"),
    ("fallback_application_name", ""),
    ("keepalives", ""),
    ("keepalives_idle", ""),
    ("keepalives_interval", ""),
    ("keepalives_count", ""),
    ("tcp_user_timeout", ""),
    ("replication", ""),
    ("gssencmode", "PGGSSENCMODE"),
    ("krbsrvname", "PGKRBSRVNAME"),
    ("gsslib", "PGGSSLIB"),
    ("gssdelegation", "PGGSSDELEGATION"),
    ("sslnegotiation", "PGSSLNEGOTIATION"),
    ("sslcompression", "PGSSLCOMPRESSION"),
    ("sslcert", "PGSSLCERT"),
    ("sslkey", "PGSSLKEY"),
    ("sslkeylogfile", ""),
    ("sslpassword", ""),
    ("sslcertmode", "PGSSLCERTMODE"),
    ("sslcrl", "PGSSLCRL"),
    ("sslcrldir", "PGSSLCRLDIR"),
    ("sslsni", "PGSSLSNI"),
    ("requirepeer", "PGREQUIREPEER"),
    ("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION"),
    ("ssl_max_protocol_version", "PGSSLMAXPROTOCOLVERSION"),
    ("min_protocol_version", "PGMINPROTOCOLVERSION"),
    ("max_protocol_version", "PGMAXPROTOCOLVERSION"),
    ("service", "PGSERVICE"),
    ("servicefile", "PGSERVICEFILE"),
    ("target_session_attrs", "PGTARGETSESSIONATTRS"),
    ("load_balance_hosts", "PGLOADBALANCEHOSTS"),
    ("scram_client_key", ""),
    ("scram_server_key", ""),
];

const PORT_DEFAULT: u16 = 5432;
const CONNECT_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
/// libpq's own floor: a name that resolves to several addresses needs more than one second.
const CONNECT_TIMEOUT_MIN: u64 = 2;
const ENCODE: &str =
    "percent-encode @ : / # % ? in the password (@ is %40, / is %2F), or give it in PGPASSWORD";

/// The words of one connection string, each with the value as the server is to see it.
type Words = Vec<(&'static str, String)>;

pub(super) fn parse(raw: Option<&Given>, around: &Surroundings) -> Result<Database, Failure> {
    let words = match raw {
        None => Words::new(),
        Some(given) => match scheme(&given.value) {
            Some(rest) => url(given, rest)?,
            None => keywords(given)?,
        },
    };
    for (key, variable) in KEYS_NOT_BUILT {
        // A variable that the string's own word would override does not count for less: we have
        // no such words.
        if !variable.is_empty() && around.pg_variable(variable).is_some() {
            return Err(not_built(variable, key));
        }
    }
    build(&words, raw, around)
}

/// What comes after `postgres://` or `postgresql://`.
fn scheme(raw: &str) -> Option<&str> {
    raw.strip_prefix("postgresql://")
        .or_else(|| raw.strip_prefix("postgres://"))
}

fn build(words: &Words, raw: Option<&Given>, around: &Surroundings) -> Result<Database, Failure> {
    let origin = raw.map_or("database_url", |given| given.origin.as_str());
    // The value, and the name of the place that it came from. As in libpq, an empty word is an
    // absent one.
    let find = |key: &str| -> Option<(&str, String)> {
        let word = words.iter().rev().find(|(known, _)| *known == key);
        if let Some((_, value)) = word.filter(|(_, value)| !value.is_empty()) {
            return Some((value, format!("{key} in {origin}")));
        }
        let (_, variable) = KEYS.iter().find(|(known, _)| *known == key)?;
        let value = around.pg_variable(variable)?;
        Some((value, (*variable).to_owned()))
    };
    let text = |key: &str| find(key).map(|(value, _)| value.to_owned());

    let host = match find("host") {
        Some((value, place)) => check_host(value, &place)?,
        None => around.socket_dir.clone().unwrap_or("localhost".to_owned()),
    };
    let user = text("user")
        .or_else(|| around.os_user.clone())
        .ok_or_else(|| {
            Failure::usage(
                "no database user, and the system does not name this one",
                "add user to the database URL, or set PGUSER",
            )
        })?;
    let (sslmode, sslrootcert) = tls(
        find("sslmode").as_ref(),
        find("sslrootcert").as_ref(),
        host.starts_with('/'),
    )?;
    Ok(Database {
        port: match find("port") {
            Some((value, place)) => port(value, &place)?,
            None => PORT_DEFAULT,
        },
        password: text("password"),
        dbname: text("dbname").unwrap_or_else(|| user.clone()),
        sslmode,
        sslrootcert,
        application_name: text("application_name").unwrap_or("walrelay".to_owned()),
        connect_timeout: match find("connect_timeout") {
            Some((value, place)) => connect_timeout(value, &place)?,
            None => CONNECT_TIMEOUT_DEFAULT,
        },
        host,
        user,
    })
}

fn check_host(host: &str, place: &str) -> Result<String, Failure> {
    if host.contains(',') {
        return Err(Failure::usage(
            format!("{place}: several hosts are not built yet"),
            "name one host: the primary",
        ));
    }
    if host.starts_with('@') {
        return Err(Failure::usage(
            format!("{place}: abstract sockets are not built yet"),
            "name the directory of the socket, a name or an address",
        ));
    }
    Ok(host.to_owned())
}

fn port(text: &str, place: &str) -> Result<u16, Failure> {
    if text.contains(',') {
        return Err(Failure::usage(
            format!("{place}: several ports are not built yet"),
            "name one host and its port: the primary's",
        ));
    }
    text.parse().ok().filter(|port| *port > 0).ok_or_else(|| {
        Failure::usage(
            format!("{place}: {text:?} is no port"),
            "write a number from 1 to 65535",
        )
    })
}

fn connect_timeout(text: &str, place: &str) -> Result<Duration, Failure> {
    match text.trim().parse::<u64>() {
        Ok(seconds) if (1..=3600).contains(&seconds) => {
            Ok(Duration::from_secs(seconds.max(CONNECT_TIMEOUT_MIN)))
        }
        // libpq's 0 waits for ever; everything here has a bound.
        Ok(_) | Err(_) => Err(Failure::usage(
            format!("{place}: {text:?} is no number of seconds from 1 to 3600"),
            "write whole seconds, as for libpq: connect_timeout=10",
        )),
    }
}

fn tls(
    mode: Option<&(&str, String)>,
    root: Option<&(&str, String)>,
    local: bool,
) -> Result<(SslMode, Option<PathBuf>), Failure> {
    const TODAY: &str = "use disable, prefer, require or verify-full";
    let sslmode = match mode {
        None => SslMode::Prefer,
        Some((text, place)) => match *text {
            "disable" => SslMode::Disable,
            "prefer" => SslMode::Prefer,
            "require" => SslMode::Require,
            "verify-full" => SslMode::VerifyFull,
            "allow" | "verify-ca" => {
                return Err(Failure::usage(
                    format!("{place}: sslmode {text} is not built yet"),
                    TODAY,
                ));
            }
            _ => {
                return Err(Failure::usage(
                    format!("{place}: {text:?} is no sslmode"),
                    TODAY,
                ));
            }
        },
    };
    // libpq leaves TLS out on a Unix socket, whatever was asked for.
    if local {
        return Ok((SslMode::Disable, None));
    }
    match (sslmode, root) {
        (SslMode::VerifyFull, None) => Err(Failure::usage(
            "sslmode=verify-full has no certificate to verify by",
            "add sslrootcert=FILE, the certificate of the server's authority",
        )),
        (SslMode::VerifyFull, Some(("system", place))) => Err(Failure::usage(
            format!("{place}: the system's certificates are not built yet"),
            "name a file: sslrootcert=/etc/ssl/certs/ca-certificates.crt",
        )),
        (SslMode::VerifyFull, Some((file, _))) => Ok((sslmode, Some(PathBuf::from(file)))),
        // To libpq this means verify-ca: nothing less may be taken for it.
        (SslMode::Prefer | SslMode::Require, Some((_, place))) => Err(Failure::usage(
            format!("{place}: sslrootcert without sslmode=verify-full is not built yet"),
            "add sslmode=verify-full, or leave sslrootcert out",
        )),
        (SslMode::Disable | SslMode::Prefer | SslMode::Require, _) => Ok((sslmode, None)),
    }
}

fn not_built(written: &str, key: &str) -> Failure {
    let remedy = match key {
        "replication" => "leave it out: walrelay sets it where it is needed",
        "passfile" => "leave it out, and give the password in PGPASSWORD or the database URL",
        "target_session_attrs" | "load_balance_hosts" => "leave it out, and name the primary alone",
        _ => {
            "leave it out; host, port, user, password, dbname, sslmode, sslrootcert, \
              application_name and connect_timeout are"
        }
    };
    Failure::usage(format!("{written} is not built yet"), remedy)
}

/// The key as we know it, or why not.
fn known_key(name: &str, given: &Given) -> Result<&'static str, Failure> {
    if let Some((key, _)) = KEYS.into_iter().find(|(key, _)| *key == name) {
        return Ok(key);
    }
    if KEYS_NOT_BUILT.iter().any(|(key, _)| *key == name) {
        return Err(not_built(&format!("{name} in {}", given.origin), name));
    }
    let nearest = KEYS
        .into_iter()
        .map(|(key, _)| (strsim::jaro_winkler(key, name), key))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .filter(|(likeness, _)| *likeness > 0.85);
    match nearest {
        Some((_, key)) => Err(Failure::usage(
            format!("{}: unknown key {name}", given.origin),
            format!("did you mean {key}?"),
        )),
        // Far from any key, it may be a piece of a password: not shown.
        None => Err(Failure::usage(
            format!("{}: a word that is no key of libpq's", given.origin),
            "the keys are host, port, user, password, dbname, sslmode, sslrootcert, \
             application_name, connect_timeout; a value with blanks stands in 'quotes'",
        )),
    }
}

// ---- keyword/value strings

/// `key = value`, `key='it\'s'`; blanks around `=` are allowed.
fn keywords(given: &Given) -> Result<Words, Failure> {
    let malformed = |what: &str| {
        // Never quotes the string: it may hold a password.
        Failure::usage(
            format!("{}: {what}", given.origin),
            "write postgresql://user@host:5432/dbname or host=… port=… user=… dbname=…",
        )
    };
    if let Some((other, _)) = given.value.split_once("://") {
        let other: String = other.chars().take(20).collect();
        return Err(malformed(&format!("{other}:// is not Postgres's scheme")));
    }
    let mut words = Words::new();
    let mut rest = given.value.trim_start();
    while !rest.is_empty() {
        let end = rest
            .find(|c: char| c == '=' || c.is_whitespace())
            .ok_or_else(|| malformed("a word is followed by no ="))?;
        let (name, after) = rest.split_at(end);
        let after = after
            .trim_start()
            .strip_prefix('=')
            .ok_or_else(|| malformed("a word is followed by no ="))?;
        let key = known_key(name, given)?;
        let (value, after) = keyword_value(after.trim_start())
            .ok_or_else(|| malformed("a quote or a backslash is left open"))?;
        words.push((key, value));
        rest = after.trim_start();
    }
    Ok(words)
}

fn keyword_value(text: &str) -> Option<(String, &str)> {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut chars = text.char_indices().skip(usize::from(quoted));
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => value.push(chars.next()?.1),
            '\'' if quoted => return Some((value, &text[at + 1..])),
            c if !quoted && c.is_whitespace() => return Some((value, &text[at..])),
            c => value.push(c),
        }
    }
    (!quoted).then_some((value, ""))
}

// ---- URLs

fn url(given: &Given, rest: &str) -> Result<Words, Failure> {
    let refuse = |what: &str| bad_url(given, what);
    if rest.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err(refuse("white space in the URL"));
    }
    if rest.contains('#') {
        return Err(refuse("a # in the URL"));
    }
    let (before_query, query) = match rest.split_once('?') {
        Some((before, query)) => (before, Some(query)),
        None => (rest, None),
    };
    if before_query.matches('@').count() > 1 {
        return Err(refuse("more than one @ in the URL"));
    }
    // The first @ behind the ? would be the one before the host, and the ? in the password.
    if !before_query.contains('@') && query.is_some_and(|query| query.contains('@')) {
        return Err(refuse("a ? before the @ in the URL"));
    }
    let (authority, path) = match before_query.split_once('/') {
        Some((authority, path)) => (authority, Some(path)),
        None => (before_query, None),
    };
    let mut words = Words::new();
    let mut put = |key: &'static str, encoded: &str| -> Result<(), Failure> {
        let value = percent_decode(encoded).map_err(refuse)?;
        if !value.is_empty() {
            words.push((key, value));
        }
        Ok(())
    };
    let host_port = match authority.split_once('@') {
        None => authority,
        Some((userinfo, host_port)) => {
            let (user, password) = userinfo.split_once(':').unwrap_or((userinfo, ""));
            put("user", user)?;
            put("password", password)?;
            host_port
        }
    };
    let (host, port) = split_port(host_port).map_err(refuse)?;
    put("host", host)?;
    if !port.is_empty() && port.parse::<u16>().is_err() && !port.contains(',') {
        return Err(refuse(
            "what stands for the port is no number from 1 to 65535",
        ));
    }
    put("port", port)?;
    if let Some(path) = path {
        if path.contains(['/', '@', ':']) {
            return Err(refuse("a / or an @ or a : in the database's name"));
        }
        put("dbname", path)?;
    }
    for pair in query
        .unwrap_or_default()
        .split('&')
        .filter(|p| !p.is_empty())
    {
        let Some((name, value)) = pair.split_once('=') else {
            return Err(refuse("a word after the ? that is followed by no ="));
        };
        let name = percent_decode(name).map_err(refuse)?;
        // JDBC's spelling, which libpq takes too.
        if name == "ssl" && value == "true" {
            put("sslmode", "require")?;
            continue;
        }
        // With an @ behind the ?, what looks like a key may be the rest of a password.
        if value.contains('@') && KEYS.iter().all(|(key, _)| *key != name) {
            return Err(refuse("a ? or an @ that is out of place"));
        }
        put(known_key(&name, given)?, value)?;
    }
    Ok(words)
}

/// `name`, `name:port`, `[v6]`, `[v6]:port`.
fn split_port(host_port: &str) -> Result<(&str, &str), &'static str> {
    if let Some(rest) = host_port.strip_prefix('[') {
        let (address, after) = rest.split_once(']').ok_or("a [ without its ]")?;
        return match after.strip_prefix(':') {
            Some(port) => Ok((address, port)),
            None if after.is_empty() => Ok((address, "")),
            None => Err("something between ] and the port"),
        };
    }
    // With several hosts, the list is left whole: it is refused by name.
    if host_port.contains(',') {
        return Ok((host_port, ""));
    }
    match host_port.split_once(':') {
        Some((_, port)) if port.contains(':') => {
            Err("more than one : after the user (an IPv6 address stands in brackets)")
        }
        Some((host, port)) => Ok((host, port)),
        None => Ok((host_port, "")),
    }
}

fn percent_decode(text: &str) -> Result<String, &'static str> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if byte != b'%' {
            bytes.push(byte);
            rest = after;
            continue;
        }
        let hex = |at: usize| after.get(at).and_then(|c| char::from(*c).to_digit(16));
        let (Some(high), Some(low)) = (hex(0), hex(1)) else {
            return Err("a % that no two hexadecimal digits follow");
        };
        let decoded = u8::try_from(high * 16 + low).expect("two hexadecimal digits make a byte");
        if decoded == 0 {
            return Err("a zero byte");
        }
        bytes.push(decoded);
        rest = &after[2..];
    }
    String::from_utf8(bytes).map_err(|_| "percent-encoded bytes that are not UTF-8")
}

fn bad_url(given: &Given, what: &str) -> Failure {
    let remedy = if given.value.contains('@') {
        ENCODE
    } else {
        "write postgresql://user@host:5432/dbname?key=value"
    };
    Failure::usage(
        format!("{}: {what}: {}", given.origin, masked(&given.value)),
        remedy,
    )
}

/// The URL without anything that can be (a part of) a password: from the first colon after the
/// scheme to the last `@`, and from `password=` to the end. Rather too much than too little.
fn masked(url: &str) -> String {
    const MASK: &str = "***";
    let Some(rest) = scheme(url) else {
        return MASK.to_owned();
    };
    let start = url.len() - rest.len();
    let colon = rest.find(':').map(|at| start + at + 1);
    let query = url.find('?').unwrap_or(url.len());
    let hidden = match (colon, url.rfind('@')) {
        // Which of the two the password is in, or whether it is the one that holds the ?, cannot
        // be told.
        (_, Some(at)) if query < at => colon.unwrap_or(query).min(query)..url.len(),
        (Some(colon), Some(at)) if colon <= at => colon..at,
        // No @ at all: a port, unless the host was forgotten and this is the password.
        (Some(colon), None) if !rest.starts_with('[') => {
            let end = url[colon..]
                .find(['/', '?'])
                .map_or(url.len(), |at| colon + at);
            if url[colon..end].chars().all(|c| c.is_ascii_digit()) {
                colon..colon
            } else {
                colon..url.len()
            }
        }
        _ => start..start,
    };
    let mut shown = url.to_owned();
    // The word itself may be percent-encoded: then all of it goes.
    let word = ["pass", "%"]
        .iter()
        .filter_map(|word| url[query..].find(word))
        .min();
    if let Some(word) = word
        && query + word >= hidden.end
    {
        shown.replace_range(query + word.., MASK);
    }
    if !hidden.is_empty() {
        shown.replace_range(hidden, MASK);
    }
    shown
}
