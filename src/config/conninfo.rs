//! How to reach Postgres: libpq's URL and keyword strings, the service beneath them, the `PG*`
//! variables beneath that. Our own parser, because the driver's knows a part of it only, a refused
//! string has to be shown with its password masked, and a word that we cannot honour has to be
//! refused by name.
//!
//! Source: the Postgres manual, "Connection Strings", "Parameter Key Words", "Environment
//! Variables", "The Connection Service File".

mod auth;
mod hosts;
mod keywords;
mod service;
mod tls;
mod url;
mod words;

use std::path::PathBuf;
use std::time::Duration;

use super::database::{CONNECT_TIMEOUT_DEFAULT, Database, Target, Tcp};
use super::layers::{Given, Surroundings};
use crate::error::Failure;
use words::{Found, Words};

/// libpq's own floor: a name that resolves to several addresses needs more than one second.
const CONNECT_TIMEOUT_MIN: u64 = 2;

pub(super) fn parse(raw: Option<&Given>, around: &Surroundings) -> Result<Database, Failure> {
    words::refuse_variables(around)?;
    let mut words = Words {
        given: match raw {
            None => Vec::new(),
            Some(given) => match scheme(&given.value) {
                Some(rest) => url::parse(given, rest)?,
                None => keywords::parse(given)?,
            },
        },
        around,
    };
    if let Some(service) = words.find("service") {
        // Beneath the string, above the variables.
        let mut beneath = service::read(&service, words.find("servicefile").as_ref(), around)?;
        beneath.append(&mut words.given);
        words.given = beneath;
    }
    build(&words)
}

/// What comes after `postgres://` or `postgresql://`.
fn scheme(raw: &str) -> Option<&str> {
    raw.strip_prefix("postgresql://")
        .or_else(|| raw.strip_prefix("postgres://"))
}

fn build(words: &Words<'_>) -> Result<Database, Failure> {
    let around = words.around;
    let user = words
        .text("user")
        .or_else(|| around.os_user.clone())
        .ok_or_else(|| {
            Failure::usage(
                "no database user, and the system does not name this one",
                "add user to the database URL, or set PGUSER",
            )
        })?;
    let hosts = hosts::parse(words)?;
    let passfile = words.text("passfile").map(PathBuf::from);
    Ok(Database {
        tls: tls::parse(words, &hosts)?,
        auth: auth::parse(words)?,
        password: words.text("password"),
        passfile: passfile.or_else(|| Some(around.home()?.join(".pgpass"))),
        dbname: words.text("dbname").unwrap_or_else(|| user.clone()),
        target: target(words)?,
        options: words.text("options"),
        application_name: words
            .text("application_name")
            .or_else(|| words.text("fallback_application_name"))
            .unwrap_or_else(|| "walrelay".to_owned()),
        connect_timeout: words
            .find("connect_timeout")
            .map_or(Ok(CONNECT_TIMEOUT_DEFAULT), |found| connect_timeout(&found))?,
        tcp: tcp(words)?,
        hosts,
        user,
    })
}

fn connect_timeout(found: &Found) -> Result<Duration, Failure> {
    match found.value.trim().parse::<i64>() {
        // To libpq it means to wait for ever; everything here has a bound.
        Ok(..=0) => Ok(CONNECT_TIMEOUT_DEFAULT),
        Ok(seconds @ 1..=3600) => Ok(Duration::from_secs(
            seconds.unsigned_abs().max(CONNECT_TIMEOUT_MIN),
        )),
        Ok(_) | Err(_) => Err(found.wrong(
            "is no number of seconds up to 3600",
            "write whole seconds, as for libpq: connect_timeout=10",
        )),
    }
}

/// `any` is the primary here, too: nothing else can be relayed from.
fn target(words: &Words<'_>) -> Result<Target, Failure> {
    let Some(found) = words.find("target_session_attrs") else {
        return Ok(Target::Primary);
    };
    match found.value.as_str() {
        "any" | "primary" => Ok(Target::Primary),
        "read-write" => Ok(Target::ReadWrite),
        "read-only" | "standby" | "prefer-standby" => Err(found.wrong(
            "asks for a server that cannot be written to, and the relay needs the primary",
            "leave target_session_attrs out, or write primary",
        )),
        _ => Err(found.wrong("is not known", "use primary, read-write or any")),
    }
}

fn tcp(words: &Words<'_>) -> Result<Tcp, Failure> {
    let usual = Tcp::default();
    // As in libpq, 0 leaves it to the kernel.
    let number = |key: &str, usual: Option<u32>| match words.find(key) {
        None => Ok(usual),
        Some(found) => found.number().map(|n| (n > 0).then_some(n)),
    };
    let seconds = |key: &str, usual: Option<Duration>| match words.find(key) {
        None => Ok(usual),
        Some(found) => found
            .number()
            .map(|n| (n > 0).then(|| Duration::from_secs(n.into()))),
    };
    Ok(Tcp {
        keepalives: words
            .find("keepalives")
            .map_or(Ok(true), |found| found.switch())?,
        idle: seconds("keepalives_idle", usual.idle)?,
        interval: seconds("keepalives_interval", usual.interval)?,
        count: number("keepalives_count", usual.count)?,
        user_timeout_ms: number("tcp_user_timeout", usual.user_timeout_ms)?,
    })
}
