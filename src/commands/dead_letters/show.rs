//! One dead letter in full: why it is parked, what to do about it, what would have been sent.

use serde::Serialize;

use super::age;
use super::words::{self, LineJson, safe, shell};
use crate::dead_letter::Reason;
use crate::error::kafka;
use crate::io::dead_letters::by_hand::{Details, Line};
use crate::record::KafkaCode;

/// Bytes of a payload that are shown.
pub const PREVIEW_BYTES: i32 = 1_024;

/// Bytes of a header's value that are shown.
const HEADER_BYTES: usize = 256;

/// For a person.
pub fn text(details: &Details) -> String {
    let line = &details.line;
    let mut rows: Vec<(&str, String)> = vec![
        ("id", format!("row:{}", line.id)),
        ("event_id", safe(&line.event_id, 1_000)),
        ("status", status(details)),
        ("reason", line.reason.clone()),
    ];
    if let Some(code) = line.error_code {
        let name = kafka::entry(KafkaCode(code)).name;
        rows.push(("kafka error", format!("{name} ({code})")));
    }
    if let Some(message) = &line.error_message {
        rows.push(("message", safe(message.as_bytes(), 2_000)));
    }
    rows.push(("remedy", remedy(details)));
    rows.extend(place(details));
    rows.extend(record(details));
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter()
        .map(|(name, value)| format!("{name:<width$}  {value}\n"))
        .collect()
}

fn status(details: &Details) -> String {
    let line = &details.line;
    let mut text = format!(
        "{}, parked at {} ({} ago), {} attempts to retry it",
        line.status,
        line.parked_at,
        age(line.age_seconds),
        line.attempts
    );
    if let Some(at) = &line.settled_at {
        text.push_str(&format!(", {} at {at}", line.status));
    }
    if let Some(who) = &line.settled_by {
        text.push_str(&format!(" by {}", safe(who.as_bytes(), 100)));
    }
    if let Some(at) = &details.retry_requested_at {
        let who = details.retry_requested_by.as_deref().unwrap_or("the relay");
        text.push_str(&format!(
            ", retry requested at {at} by {}",
            safe(who.as_bytes(), 100)
        ));
    }
    text
}

/// Whose it is and where it stands.
fn place(details: &Details) -> Vec<(&'static str, String)> {
    let line = &details.line;
    let key = match &line.aggregate_id {
        Some(id) => safe(id, 1_000),
        None => "(none: it has no order and is parked alone)".to_owned(),
    };
    let mut rows = vec![("aggregate_id", key)];
    if let Some(name) = &line.aggregate_type {
        rows.push(("aggregate_type", safe(name, 1_000)));
    }
    if let (Some((first, event)), Some(events)) = (&details.first, line.events) {
        let event = safe(event, 200);
        rows.push((
            "key",
            format!(
                "{} parked, from row:{first} (event_id {event}) on",
                words::events(events)
            ),
        ));
    }
    let xid = details
        .xid
        .map_or(String::new(), |xid| format!(", xid {xid}"));
    let time = details.commit_time.as_deref();
    rows.push((
        "position",
        format!(
            "commit {} row {}, slot generation {}{xid}{}",
            details.commit_lsn,
            details.ordinal,
            details.generation,
            time.map_or(String::new(), |time| format!(", committed at {time}"))
        ),
    ));
    rows
}

/// What would have been sent.
fn record(details: &Details) -> Vec<(&'static str, String)> {
    let line = &details.line;
    let mut rows = vec![("topic", safe(line.topic.as_bytes(), 1_000))];
    if let Some(partition) = details.partition {
        rows.push(("partition", partition.to_string()));
    }
    if let Some(time) = details.timestamp_ms {
        rows.push(("timestamp_ms", time.to_string()));
    }
    let key = details.key.as_deref().unwrap_or_default();
    rows.push((
        "record key",
        format!("{} bytes: {}", key.len(), safe(key, 200)),
    ));
    for (name, value) in &details.headers {
        let value = value.as_ref().map_or("null".to_owned(), |value| {
            let shown = &value[..value.len().min(HEADER_BYTES)];
            let more = if value.len() > HEADER_BYTES {
                "…"
            } else {
                ""
            };
            format!("{}{more}", safe(shown, HEADER_BYTES))
        });
        rows.push(("header", format!("{}: {value}", safe(name.as_bytes(), 200))));
    }
    rows.push(("payload", payload(details)));
    rows
}

fn payload(details: &Details) -> String {
    if details.value_in_table {
        return "too large to keep twice: it is in the outbox row alone".to_owned();
    }
    let (Some(value), Some(length)) = (&details.value, details.value_bytes) else {
        return "null (a tombstone)".to_owned();
    };
    let is_cut = i64::try_from(value.len()).is_ok_and(|shown| shown < length);
    let more = if is_cut { "…" } else { "" };
    // A character that the cut went through is not the payload's fault.
    let end = match std::str::from_utf8(value) {
        Err(error) if is_cut && error.error_len().is_none() => error.valid_up_to(),
        Ok(_) | Err(_) => value.len(),
    };
    format!("{length} bytes: {}{more}", safe(&value[..end], value.len()))
}

/// The one table from reason to what a person can do.
pub fn remedy(details: &Details) -> String {
    let line = &details.line;
    if line.status != "parked" {
        return "nothing to do: it is settled".to_owned();
    }
    let (retry, discard) = (
        format!("walrelay dead-letters retry row:{}", line.id),
        format!("walrelay dead-letters discard row:{}", line.id),
    );
    let of_code = line
        .error_code
        .map(|code| kafka::entry(KafkaCode(code)).remedy);
    match Reason::of(&line.reason) {
        Some(Reason::TooLarge) => format!(
            "raise max.message.bytes of the topic (and message.max.bytes of the relay, --kafka), then: \
             {retry}; or give it up: {discard}"
        ),
        Some(Reason::InvalidTopic) => format!(
            "no cluster can have this topic: correct what writes the column that --topic names, write \
             the event again with an event_id of its own, then: {discard}"
        ),
        Some(Reason::MalformedRow) => format!(
            "the row can be no record (see the message): correct what writes it, write the event again \
             with an event_id of its own, then: {discard}"
        ),
        Some(Reason::TopicAbsent) => format!(
            "create topic {}, then: {retry}",
            shell(&safe(line.topic.as_bytes(), 249))
        ),
        Some(Reason::Behind) => behind(details, line),
        Some(Reason::ByHand) => format!("when the topic takes events again: {retry}"),
        Some(Reason::Refused) | None => format!(
            "{}; then: {retry}; or give it up: {discard}",
            of_code.unwrap_or("see the message, and the broker's log")
        ),
    }
}

fn behind(details: &Details, line: &Line) -> String {
    match &details.first {
        Some((first, _)) if *first != line.id => format!(
            "it waits behind row:{first}, which says why: walrelay dead-letters show row:{first}"
        ),
        Some(_) | None => format!(
            "what it waited behind is settled: walrelay dead-letters retry row:{}",
            line.id
        ),
    }
}

/// For a program. Bytes are lossy text; `value_preview` is the beginning alone.
#[derive(Serialize)]
pub struct Json {
    #[serde(flatten)]
    line: LineJson,
    kafka_error: Option<&'static str>,
    remedy: String,
    slot_generation: i64,
    commit_lsn: String,
    ordinal: i64,
    xid: Option<i64>,
    commit_time: Option<String>,
    partition: Option<i32>,
    record_key: Option<String>,
    timestamp_ms: Option<i64>,
    headers: Vec<HeaderJson>,
    value_bytes: Option<i64>,
    value_preview: Option<String>,
    value_in_table: bool,
    retry_requested_at: Option<String>,
    retry_requested_by: Option<String>,
    /// The row that the key is parked from.
    first_of_key: Option<i64>,
}

#[derive(Serialize)]
struct HeaderJson {
    name: String,
    value: Option<String>,
}

pub fn json(details: &Details) -> Json {
    let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
    Json {
        line: words::line_json(&details.line),
        kafka_error: details
            .line
            .error_code
            .map(|code| kafka::entry(KafkaCode(code)).name),
        remedy: remedy(details),
        slot_generation: details.generation,
        commit_lsn: details.commit_lsn.to_string(),
        ordinal: details.ordinal,
        xid: details.xid,
        commit_time: details.commit_time.clone(),
        partition: details.partition,
        record_key: details.key.as_ref().map(text),
        timestamp_ms: details.timestamp_ms,
        headers: details
            .headers
            .iter()
            .map(|(name, value)| HeaderJson {
                name: name.clone(),
                value: value.as_ref().map(text),
            })
            .collect(),
        value_bytes: details.value_bytes,
        value_preview: details.value.as_ref().map(text),
        value_in_table: details.value_in_table,
        retry_requested_at: details.retry_requested_at.clone(),
        retry_requested_by: details.retry_requested_by.clone(),
        first_of_key: details.first.as_ref().map(|(row, _)| *row),
    }
}
