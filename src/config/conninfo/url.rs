//! `postgresql://user:password@host:port,host:port/dbname?key=value&…`, and the complaint about one
//! whose password was not encoded: it names no piece of the password.

use super::super::layers::Given;
use super::scheme;
use super::words::{Word, is_known, known_key};
use crate::error::Failure;

const ENCODE: &str =
    "percent-encode @ : / # % ? in the password (@ is %40, / is %2F), or give it in PGPASSWORD";

pub fn parse(given: &Given, rest: &str) -> Result<Vec<Word>, Failure> {
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
    let mut words: Vec<Word> = Vec::new();
    let mut put = |key: &'static str, encoded: &str| -> Result<(), Failure> {
        let value = percent_decode(encoded).map_err(refuse)?;
        if !value.is_empty() {
            words.push(Word {
                key,
                value,
                place: format!("{key} in {}", given.origin),
            });
        }
        Ok(())
    };
    let hosts = match authority.split_once('@') {
        None => authority,
        Some((userinfo, hosts)) => {
            let (user, password) = userinfo.split_once(':').unwrap_or((userinfo, ""));
            put("user", user)?;
            put("password", password)?;
            hosts
        }
    };
    let (hosts, ports) = split_hosts(hosts).map_err(refuse)?;
    put("host", &hosts)?;
    put("port", &ports)?;
    if let Some(path) = path {
        if path.contains(['/', '@', ':']) {
            return Err(refuse("a / or an @ or a : in the database's name"));
        }
        put("dbname", path)?;
    }
    for pair in query.unwrap_or_default().split('&') {
        if !pair.is_empty() {
            let (key, value) = query_word(pair, given)?;
            put(key, value)?;
        }
    }
    Ok(words)
}

fn query_word<'q>(pair: &'q str, given: &Given) -> Result<(&'static str, &'q str), Failure> {
    let refuse = |what: &str| bad_url(given, what);
    let Some((name, value)) = pair.split_once('=') else {
        return Err(refuse("a word after the ? that is followed by no ="));
    };
    let name = percent_decode(name).map_err(refuse)?;
    // JDBC's spelling, which libpq takes too.
    if name == "ssl" && value == "true" {
        return Ok(("sslmode", "require"));
    }
    // With an @ behind the ?, what looks like a key may be the rest of a password.
    if value.contains('@') && !is_known(&name) {
        return Err(refuse("a ? or an @ that is out of place"));
    }
    Ok((known_key(&name, &given.origin)?, value))
}

/// The hosts and the ports as libpq's two lists; no ports where none is named.
fn split_hosts(list: &str) -> Result<(String, String), &'static str> {
    let mut hosts = Vec::new();
    let mut ports = Vec::new();
    for host_port in list.split(',') {
        let (host, port) = split_port(host_port)?;
        if !port.is_empty() && port.parse::<u16>().is_err() {
            return Err("what stands for the port is no number from 1 to 65535");
        }
        hosts.push(host);
        ports.push(port);
    }
    let ports = if ports.iter().all(|port| port.is_empty()) {
        String::new()
    } else {
        ports.join(",")
    };
    Ok((hosts.join(","), ports))
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
