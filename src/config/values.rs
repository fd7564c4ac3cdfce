//! The text of one setting becomes its value, or a message that says how to write it.

use std::collections::HashMap;
use std::time::Duration;

use super::layers::Given;
use super::{CreateTopics, TableName};
use crate::error::Failure;
use crate::relay::route::{Template, quoted_name};

/// `NAMEDATALEN - 1`: Postgres would cut a longer name off, silently.
const NAME_BYTES_MAX: usize = 63;

/// Nothing that walrelay waits for is bounded by less than a second or more than a day.
const DURATION_MIN: Duration = Duration::from_secs(1);
const DURATION_MAX: Duration = Duration::from_secs(24 * 3600);

pub(super) fn duration(given: &Given) -> Result<Duration, Failure> {
    let text = given.value.trim();
    if is_number(text) {
        return Err(given.wrong("has no unit", &format!("write {text}s")));
    }
    let duration = humantime::parse_duration(text).map_err(|error| {
        given.wrong(
            &format!("is no duration ({error})"),
            "write 10s, 1m 30s, 5m, …",
        )
    })?;
    if !(DURATION_MIN..=DURATION_MAX).contains(&duration) {
        return Err(given.wrong("is out of range", "write a duration from 1s to 24h"));
    }
    Ok(duration)
}

pub(super) fn size(given: &Given, min: usize, max: usize) -> Result<usize, Failure> {
    let text = given.value.trim();
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = text[digits.len()..].trim();
    let factor: usize = match unit.to_ascii_lowercase().as_str() {
        "" => {
            // Whoever wrote a large number meant bytes.
            let unit = if digits.len() > 3 { "B" } else { "MiB" };
            return Err(given.wrong("has no unit", &format!("write {text}{unit}")));
        }
        "b" => 1,
        "kb" => 1_000,
        "kib" => 1 << 10,
        "mb" => 1_000_000,
        "mib" => 1 << 20,
        "gb" => 1_000_000_000,
        "gib" => 1 << 30,
        _ => return Err(given.wrong("is no size", "write a whole number and a unit: 16MiB")),
    };
    let number: usize = digits
        .parse()
        .map_err(|_| given.wrong("is no size", "write a whole number and a unit: 16MiB"))?;
    match number.checked_mul(factor) {
        Some(bytes) if (min..=max).contains(&bytes) => Ok(bytes),
        _ => Err(given.wrong(
            "is out of range",
            &format!("write a size from {}MiB to {}MiB", min >> 20, max >> 20),
        )),
    }
}

/// `off`, `P` or `P:R`.
pub(super) fn create_topics(given: &Given) -> Result<Option<CreateTopics>, Failure> {
    let text = given.value.trim();
    if text == "off" {
        return Ok(None);
    }
    let (partitions, replication) = match text.split_once(':') {
        Some((partitions, replication)) => (partitions, Some(replication)),
        None => (text, None),
    };
    let count = |text: &str| {
        text.parse::<i32>().ok().filter(|n| *n >= 1).ok_or_else(|| {
            given.wrong(
                "is not P or P:R",
                "write the number of partitions, and of replicas where the cluster's default will not do: 12:3",
            )
        })
    };
    Ok(Some(CreateTopics {
        partitions: count(partitions)?,
        replication: replication.map(count).transpose()?,
    }))
}

/// Braces must match; which columns there are is known only when the table has been seen.
pub(super) fn topic(given: &Given) -> Result<Template, Failure> {
    let remedy = "write a template over columns: outbox.event.{aggregate_type}";
    let template =
        Template::parse(&given.value).map_err(|error| given.wrong(&error.to_string(), remedy))?;
    if template.columns().next().is_none() {
        // Without columns every event has the same topic: better known now than at the first one.
        template
            .render(std::iter::empty(), &HashMap::new(), &mut String::new())
            .map_err(|error| given.wrong(&error.to_string(), remedy))?;
    }
    Ok(template)
}

/// A column's name: the catalog's to the byte, or in double quotes as in SQL. `None`: an empty one.
pub(super) fn column(origin: &str, written: &str) -> Result<Option<String>, Failure> {
    let bad = |what: &str| {
        Failure::usage(
            format!("{origin}: {written:?} {what}"),
            "write the column's name as the catalog has it (nothing is folded), or in double quotes \
             as in SQL",
        )
    };
    let trimmed = written.trim();
    let name = match trimmed.strip_prefix('"') {
        None => trimmed.to_owned(),
        Some(quoted) => match quoted_name(quoted) {
            Some((name, "")) if !name.is_empty() => name,
            Some((name, _)) if name.is_empty() => return Err(bad("is an empty name")),
            Some(_) => return Err(bad("goes on after a closing quote")),
            None => return Err(bad("has a quote that is not closed")),
        },
    };
    if name.contains('\0') {
        return Err(bad("has a NUL in it"));
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(bad("is longer than 63 bytes, which no column's name is"));
    }
    Ok(Some(name).filter(|name| !name.is_empty()))
}

pub(super) fn slot(given: &Given) -> Result<String, Failure> {
    let name = given.value.as_str();
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if name.len() > NAME_BYTES_MAX || !name.chars().all(legal) {
        return Err(given.wrong(
            "cannot be a slot's name",
            "write lower-case letters, digits and underscores, at most 63",
        ));
    }
    Ok(name.to_owned())
}

pub(super) fn publication(given: &Given) -> Result<String, Failure> {
    let mut parts = identifiers(given)?;
    match (parts.pop(), parts.pop()) {
        (Some(name), None) => Ok(name),
        _ => Err(given.wrong(
            "is more than one name",
            "a publication has no schema; a name with a dot in it stands in double quotes",
        )),
    }
}

pub(super) fn table(given: &Given) -> Result<TableName, Failure> {
    let mut parts = identifiers(given)?;
    match (parts.pop(), parts.pop(), parts.pop()) {
        (Some(name), Some(schema), None) => Ok(TableName { schema, name }),
        (Some(name), None, None) => Ok(TableName {
            schema: "public".to_owned(),
            name,
        }),
        _ => Err(given.wrong(
            "is more than a schema and a name",
            "write schema.table; a name with a dot in it stands in double quotes",
        )),
    }
}

/// Dotted SQL identifiers: folded to lower case unless they are quoted.
fn identifiers(given: &Given) -> Result<Vec<String>, Failure> {
    let bad = |what: &str| {
        given.wrong(
            what,
            "write names as in SQL: schema.table, or \"Schema\".\"A table\" in double quotes",
        )
    };
    let mut parts = Vec::new();
    let mut rest = given.value.trim();
    loop {
        let (name, after) = if let Some(quoted) = rest.strip_prefix('"') {
            quoted_name(quoted).ok_or_else(|| bad("has a quote that is not closed"))?
        } else {
            let end = rest.find('.').unwrap_or(rest.len());
            let plain = rest[..end].to_ascii_lowercase();
            if !is_plain_identifier(&plain) {
                return Err(bad("holds a name that must be quoted"));
            }
            (plain, &rest[end..])
        };
        if name.is_empty() || name.contains('\0') {
            return Err(bad("holds an empty name"));
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(bad("holds a name longer than 63 bytes"));
        }
        parts.push(name);
        match after.strip_prefix('.') {
            Some(next) => rest = next,
            None if after.is_empty() => return Ok(parts),
            None => return Err(bad("goes on after a closing quote")),
        }
    }
}

/// Would SQL take this name unquoted, and leave it as it is? (Key words aside.)
pub(super) fn is_plain_identifier(name: &str) -> bool {
    let first = |c: char| c.is_ascii_lowercase() || c == '_' || !c.is_ascii();
    name.chars().next().is_some_and(first)
        && name
            .chars()
            .all(|c| first(c) || c.is_ascii_digit() || c == '$')
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_digit() || c == '.')
}
