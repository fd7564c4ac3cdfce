//! A list of dead letters, for people and for programs.

use serde::Serialize;

use super::{Shown, age};
use crate::config::{KeyName, LetterId, ListLetters, Source, Status};
use crate::io::dead_letters::by_hand::{Changed, Line};
use crate::io::sql::show_table;

/// Characters of a cell: an id of 36 has room.
const CELL: usize = 40;

/// Text from a row for a terminal: what is not UTF-8 is replaced, what is no visible character is
/// escaped, and it has an end.
pub fn safe(bytes: &[u8], chars_max: usize) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut out = String::new();
    for (n, c) in text.chars().enumerate() {
        if n == chars_max {
            out.push('…');
            break;
        }
        if c.is_control() || is_invisible(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// Characters that turn what stands around them about, or hide in it.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

pub fn events(count: i64) -> String {
    if count == 1 {
        "1 event".to_owned()
    } else {
        format!("{count} events")
    }
}

fn keys(count: i64) -> String {
    if count == 1 {
        "1 key".to_owned()
    } else {
        format!("{count} keys")
    }
}

pub fn amount(changed: Changed) -> String {
    format!("{} of {}", events(changed.events), keys(changed.keys))
}

pub fn topic(name: &str) -> String {
    if name.is_empty() {
        return "topic '' (events whose row gives none)".to_owned();
    }
    format!("topic {}", safe(name.as_bytes(), 249))
}

pub fn id(id: &LetterId) -> String {
    match id {
        LetterId::Row(row) => format!("row:{row}"),
        LetterId::Event(event) => format!("event:{}", safe(event.as_bytes(), 200)),
        LetterId::Either(text) => safe(text.as_bytes(), 200),
    }
}

pub fn key_name(key: &KeyName) -> String {
    let of_type = key.aggregate_type.as_ref().map_or(String::new(), |name| {
        format!(" of type {}", safe(name.as_bytes(), 200))
    });
    format!("key {}{of_type}", safe(key.aggregate_id.as_bytes(), 200))
}

/// A name as a POSIX shell takes it.
pub fn shell(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-/:@".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) && !text.starts_with('-') {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// The command that opens a topic.
pub fn park_command(topic: &str) -> String {
    format!("walrelay dead-letters park --topic={}", shell(topic))
}

/// What there is, for a person.
pub fn list(shown: &Shown, asked: &ListLetters, table: &str) -> String {
    let mut text = summary(shown, table);
    for held in &shown.tripped {
        let park = if held.is_park_asked {
            "it was asked to park them".to_owned()
        } else {
            format!("to park them: {}", park_command(&held.topic))
        };
        text.push_str(&format!(
            "events of {} are held, too many keys would have been parked as {}: {}\n  {park}\n",
            topic(&held.topic),
            held.reason,
            safe(held.message.as_bytes(), 300),
        ));
    }
    if shown.lines.is_empty() {
        if asked.key.is_some() || asked.topic.is_some() || asked.status != Status::Parked {
            text.push_str(&format!("no {} event matches\n", asked.status.as_str()));
        }
        return text;
    }
    text.push('\n');
    text.push_str(&table_of(&shown.lines));
    if i64::try_from(shown.lines.len()) == Ok(asked.limit) {
        text.push_str(&format!(
            "\nno more than {} are shown: --limit shows more\n",
            asked.limit
        ));
    }
    text.push_str("\nwhy, and what to do: walrelay dead-letters show ID\n");
    text
}

fn summary(shown: &Shown, table: &str) -> String {
    let totals = &shown.totals;
    let mut text = if totals.parked == 0 {
        format!("{table}: nothing is parked")
    } else {
        let oldest = totals.oldest_seconds.map_or(String::new(), |seconds| {
            format!(", the oldest for {}", age(seconds))
        });
        format!(
            "{table}: {} of {} parked{oldest}",
            events(totals.parked),
            keys(totals.keys)
        )
    };
    if totals.retried_keys > 0 {
        let who = if shown.is_led {
            ""
        } else {
            " (no relay leads at the moment: start `walrelay run`)"
        };
        text.push_str(&format!(
            "; retry requested for {}{who}",
            keys(totals.retried_keys)
        ));
    }
    if totals.delivered + totals.discarded > 0 {
        text.push_str(&format!(
            "; remembered: {} delivered, {} discarded",
            totals.delivered, totals.discarded
        ));
    }
    text.push('\n');
    text
}

const HEAD: [&str; 9] = [
    "ID", "KEY", "TYPE", "EVENTS", "EVENT_ID", "TOPIC", "REASON", "AGE", "ATTEMPTS",
];

fn table_of(lines: &[Line]) -> String {
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(lines.iter().map(cells));
    let width = |n: usize| rows.iter().map(|row| row[n].chars().count()).max();
    let widths: Vec<usize> = (0..HEAD.len()).map(|n| width(n).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths);
        let padded: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        text.push_str(padded.join("  ").trim_end());
        text.push('\n');
    }
    text
}

fn cells(line: &Line) -> [String; 9] {
    let key = match &line.aggregate_id {
        Some(key) => safe(key, CELL),
        None => "(none)".to_owned(),
    };
    let mut attempts = line.attempts.to_string();
    if line.is_retried && line.status == "parked" {
        attempts.push_str(", retry requested");
    }
    if let Some(who) = &line.settled_by {
        attempts.push_str(&format!(", by {}", safe(who.as_bytes(), CELL)));
    }
    [
        format!("row:{}", line.id),
        key,
        safe(line.aggregate_type.as_deref().unwrap_or_default(), CELL),
        line.events.map_or("1".to_owned(), |n| n.to_string()),
        safe(&line.event_id, CELL),
        safe(line.topic.as_bytes(), CELL),
        line.reason.clone(),
        age(line.age_seconds),
        attempts,
    ]
}

/// What there is, for a program.
#[derive(Serialize)]
pub struct ListJson {
    table: String,
    parked_events: i64,
    parked_keys: i64,
    retry_requested_keys: i64,
    oldest_seconds: Option<f64>,
    delivered_events: i64,
    discarded_events: i64,
    leader: bool,
    tripped_topics: Vec<TrippedJson>,
    dead_letters: Vec<LineJson>,
}

#[derive(Serialize)]
struct TrippedJson {
    topic: String,
    reason: &'static str,
    message: String,
    park_requested: bool,
    command: String,
}

/// Texts that are not UTF-8 have replacement characters in them; `id` names the row.
#[derive(Serialize)]
pub struct LineJson {
    id: i64,
    event_id: String,
    aggregate_type: Option<String>,
    aggregate_id: Option<String>,
    topic: String,
    reason: String,
    error_code: Option<i32>,
    error_message: Option<String>,
    status: String,
    attempts: i32,
    parked_at: String,
    age_seconds: f64,
    retry_requested: bool,
    settled_at: Option<String>,
    settled_by: Option<String>,
    /// Parked events of its key; null where each event is listed.
    key_events: Option<i64>,
}

pub fn list_json(shown: &Shown, source: &Source) -> ListJson {
    let totals = &shown.totals;
    ListJson {
        table: show_table(&source.table),
        parked_events: totals.parked,
        parked_keys: totals.keys,
        retry_requested_keys: totals.retried_keys,
        oldest_seconds: totals.oldest_seconds,
        delivered_events: totals.delivered,
        discarded_events: totals.discarded,
        leader: shown.is_led,
        tripped_topics: shown
            .tripped
            .iter()
            .map(|held| TrippedJson {
                topic: held.topic.clone(),
                reason: held.reason.as_str(),
                message: held.message.clone(),
                park_requested: held.is_park_asked,
                command: park_command(&held.topic),
            })
            .collect(),
        dead_letters: shown.lines.iter().map(line_json).collect(),
    }
}

pub fn line_json(line: &Line) -> LineJson {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    LineJson {
        id: line.id,
        event_id: text(&line.event_id),
        aggregate_type: line.aggregate_type.as_deref().map(text),
        aggregate_id: line.aggregate_id.as_deref().map(text),
        topic: line.topic.clone(),
        reason: line.reason.clone(),
        error_code: line.error_code,
        error_message: line.error_message.clone(),
        status: line.status.clone(),
        attempts: line.attempts,
        parked_at: line.parked_at.clone(),
        age_seconds: line.age_seconds,
        retry_requested: line.is_retried,
        settled_at: line.settled_at.clone(),
        settled_by: line.settled_by.clone(),
        key_events: line.events,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_a_row_moves_the_cursor_or_turns_the_line() {
        assert_eq!(
            safe("a\u{1b}[2J\r\n\t\u{202e}é\u{9b}".as_bytes(), 99),
            "a\\u{1b}[2J\\r\\n\\t\\u{202e}é\\u{9b}"
        );
        assert_eq!(safe(b"\xff\xfe", 99), "\u{fffd}\u{fffd}");
        assert_eq!(safe("abcd".as_bytes(), 3), "abc…");
        assert_eq!(safe("abc".as_bytes(), 3), "abc");
    }

    #[test]
    fn a_topic_in_a_command_is_one_word_of_the_shell() {
        assert_eq!(
            park_command("outbox.event.a"),
            "walrelay dead-letters park --topic=outbox.event.a"
        );
        assert_eq!(shell("it's; $(x)"), "'it'\\''s; $(x)'");
        assert_eq!(shell(""), "''");
    }
}
