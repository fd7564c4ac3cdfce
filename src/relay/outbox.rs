//! A row of the outbox to a record.
//!
//! # Invariants
//! The payload is never parsed and never copied (bytea excepted: it comes in hex). A row that
//! cannot be a record is an error with its reason; nothing is repaired.

use std::borrow::Cow;
use std::fmt;
use std::hash::{DefaultHasher, Hasher};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::route::Template;
use crate::record::Header;
use crate::wire::pgoutput::{Column, Oid, Relation, Tuple};

/// `bytea`'s type oid, fixed in every Postgres.
const BYTEA: Oid = Oid(17);
/// Headers that name the event: no row may set them itself.
pub const OWN_HEADERS: [&str; 3] = ["event_id", "event_type", "aggregate_type"];

/// Which columns make the record.
#[derive(Clone, Debug)]
pub struct Mapping {
    pub topic: Template,
    /// (header, column): columns that become headers of their own.
    pub headers: Vec<(String, String)>,
}

/// What a column of the current shape is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    EventId,
    AggregateType,
    AggregateId,
    EventType,
    Payload,
    Headers,
}

/// Where the mapped columns stand in the rows that follow a Relation message.
#[derive(Clone, Debug)]
pub struct Shape {
    event_id: usize,
    aggregate_type: usize,
    aggregate_id: usize,
    event_type: usize,
    payload: usize,
    payload_is_bytea: bool,
    headers: usize,
    /// For each column of the topic template.
    topic: Vec<usize>,
    /// For each mapped header.
    extra: Vec<usize>,
}

/// A mapped column that the table does not have (any more).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("column {column:?} of {table} is mapped and not there")]
pub struct MissingColumn {
    pub column: String,
    pub table: String,
}

/// Why this row can never be a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct BadRow {
    pub reason: String,
}

fn bad(reason: impl Into<String>) -> BadRow {
    BadRow {
        reason: reason.into(),
    }
}

/// A record that has no topic number and no partition yet.
#[derive(Debug)]
pub struct Draft<'a> {
    pub key: &'a [u8],
    /// Of (`aggregate_type`, `aggregate_id`): what keeps its order.
    pub key_hash: u64,
    pub value: Option<Cow<'a, [u8]>>,
    pub headers: Vec<Header<'a>>,
    /// Names in `headers` that the row may not set, and that were dropped.
    pub forged_headers: usize,
}

impl Shape {
    /// Finds the mapped columns by name.
    ///
    /// # Errors
    /// One of them is not there.
    pub fn resolve(relation: &Relation<'_>, mapping: &Mapping) -> Result<Self, MissingColumn> {
        let find = |column: &str| {
            relation
                .columns()
                .position(|c| c.name == column.as_bytes())
                .ok_or_else(|| MissingColumn {
                    column: column.to_owned(),
                    table: format!(
                        "{}.{}",
                        String::from_utf8_lossy(relation.namespace),
                        String::from_utf8_lossy(relation.name)
                    ),
                })
        };
        let payload = find("payload")?;
        let payload_type = relation.columns().nth(payload).map(|c| c.type_oid);
        Ok(Shape {
            event_id: find("event_id")?,
            aggregate_type: find("aggregate_type")?,
            aggregate_id: find("aggregate_id")?,
            event_type: find("event_type")?,
            payload,
            payload_is_bytea: payload_type == Some(BYTEA),
            headers: find("headers")?,
            topic: mapping
                .topic
                .columns()
                .map(find)
                .collect::<Result<_, _>>()?,
            extra: mapping
                .headers
                .iter()
                .map(|(_, column)| find(column))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// A row, its columns found.
pub struct Row<'a> {
    columns: Vec<Option<&'a [u8]>>,
}

impl<'a> Row<'a> {
    /// A list of its own for each row: reusing one is not worth a lifetime for a dozen columns.
    #[must_use]
    pub fn read(tuple: &Tuple<'a>) -> Self {
        let columns = tuple.columns().map(|column| match column {
            Column::Null | Column::UnchangedToast => None,
            Column::Text(bytes) | Column::Binary(bytes) => Some(bytes),
        });
        Row {
            columns: columns.collect(),
        }
    }

    fn get(&self, index: usize) -> Option<&'a [u8]> {
        self.columns.get(index).copied().flatten()
    }

    /// Empty where the column is null; [`Row::draft`] then says so.
    #[must_use]
    pub fn event_id(&self, shape: &Shape) -> &'a [u8] {
        self.get(shape.event_id).unwrap_or_default()
    }

    /// The topic's name into `topic`, the rest of the record as a draft.
    ///
    /// # Errors
    /// The row can never be a record: the reason names the column and the rule.
    pub fn draft(
        &self,
        shape: &Shape,
        mapping: &Mapping,
        topic: &mut String,
    ) -> Result<Draft<'a>, BadRow> {
        let need = |index, part: Part| {
            self.get(index)
                .ok_or_else(|| bad(format!("column {part} is null")))
        };
        let event_id = need(shape.event_id, Part::EventId)?;
        let aggregate_type = need(shape.aggregate_type, Part::AggregateType)?;
        let event_type = need(shape.event_type, Part::EventType)?;
        let key = need(shape.aggregate_id, Part::AggregateId)?;
        mapping
            .topic
            .render(shape.topic.iter().map(|i| self.get(*i)), topic)
            .map_err(|e| bad(e.to_string()))?;
        let value = match self.get(shape.payload) {
            None => None,
            Some(hex) if shape.payload_is_bytea => Some(Cow::Owned(from_hex(hex)?)),
            Some(text) => Some(Cow::Borrowed(text)),
        };
        let mut headers = Vec::with_capacity(3 + mapping.headers.len());
        headers.push(own_header("event_id", event_id));
        headers.push(own_header("event_type", event_type));
        headers.push(own_header("aggregate_type", aggregate_type));
        for (index, (name, _)) in shape.extra.iter().zip(&mapping.headers) {
            headers.push(Header {
                name: Cow::Owned(name.clone()),
                value: self.get(*index).map(Cow::Borrowed),
            });
        }
        let forged_headers = match self.get(shape.headers) {
            None | Some(b"{}") => 0,
            Some(json) => read_headers(json, &mut headers)?,
        };
        Ok(Draft {
            key,
            key_hash: key_hash(aggregate_type, key),
            value,
            headers,
            forged_headers,
        })
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::EventId => "event_id",
            Part::AggregateType => "aggregate_type",
            Part::AggregateId => "aggregate_id",
            Part::EventType => "event_type",
            Part::Payload => "payload",
            Part::Headers => "headers",
        })
    }
}

fn own_header<'a>(name: &'static str, value: &'a [u8]) -> Header<'a> {
    Header {
        name: Cow::Borrowed(name),
        value: Some(Cow::Borrowed(value)),
    }
}

fn key_hash(aggregate_type: &[u8], aggregate_id: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(aggregate_type);
    hasher.write_u8(0);
    hasher.write(aggregate_id);
    hasher.finish()
}

fn from_hex(text: &[u8]) -> Result<Vec<u8>, BadRow> {
    let malformed = || bad(format!("column {} is not bytea in hex", Part::Payload));
    let digits = text.strip_prefix(b"\\x").ok_or_else(malformed)?;
    if !digits.len().is_multiple_of(2) {
        return Err(malformed());
    }
    let nibble = |digit: u8| match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        _ => Err(malformed()),
    };
    digits
        .chunks_exact(2)
        .map(|pair| Ok(nibble(pair[0])? << 4 | nibble(pair[1])?))
        .collect()
}

/// Adds the members of a JSON object as headers: a string as its text, null as null, everything
/// else as Postgres printed it. Returns how many forged names were dropped.
fn read_headers<'a>(json: &'a [u8], headers: &mut Vec<Header<'a>>) -> Result<usize, BadRow> {
    let Ok(text) = std::str::from_utf8(json) else {
        return read_byte_headers(json, headers);
    };
    read_text_headers(text, headers)
}

/// A SQL_ASCII database holds whatever bytes a client wrote. They are read as if each were a
/// character, and written as bytes again: what is not ASCII passes as it is.
fn read_byte_headers(json: &[u8], headers: &mut Vec<Header<'_>>) -> Result<usize, BadRow> {
    let text: String = json.iter().map(|byte| char::from(*byte)).collect();
    let mut found = Vec::new();
    let mut forged = read_text_headers(&text, &mut found)?;
    let columns = headers.len();
    for header in found {
        if headers[..columns].iter().any(|h| h.name == header.name) {
            forged += 1;
            continue;
        }
        if !header.name.is_ascii() {
            let column = Part::Headers;
            return Err(bad(format!("column {column} has a name that is not UTF-8")));
        }
        headers.push(Header {
            name: Cow::Owned(header.name.into_owned()),
            value: header.value.map(|value| Cow::Owned(bytes_again(&value))),
        });
    }
    Ok(forged)
}

/// The inverse of reading each byte as a character. (A `\u` escape beyond them stays UTF-8.)
fn bytes_again(value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(value.len());
    for c in String::from_utf8_lossy(value).chars() {
        match u8::try_from(u32::from(c)) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend(c.encode_utf8(&mut [0; 4]).bytes()),
        }
    }
    bytes
}

fn read_text_headers<'a>(json: &'a str, headers: &mut Vec<Header<'a>>) -> Result<usize, BadRow> {
    let column = Part::Headers;
    let members: Members<'a> = serde_json::from_str(json)
        .map_err(|_| bad(format!("column {column} is not a JSON object")))?;
    // Those before are made of columns, and columns count.
    let columns = headers.len();
    let mut forged = 0;
    for (name, raw) in members.0 {
        let is_taken = headers[..columns].iter().any(|h| h.name == name);
        if is_taken || OWN_HEADERS.contains(&name.as_ref()) {
            forged += 1;
            continue;
        }
        if name.contains('\0') {
            return Err(bad(format!("column {column} has a name with a NUL in it")));
        }
        let value = match raw.get() {
            "null" => None,
            text if text.starts_with('"') => {
                let text: JsonText<'a> = serde_json::from_str(text)
                    .map_err(|e| bad(format!("column {column} has a bad string: {e}")))?;
                Some(match text.0 {
                    Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
                    Cow::Owned(text) => Cow::Owned(text.into_bytes()),
                })
            }
            text => Some(Cow::Borrowed(text.as_bytes())),
        };
        headers.push(Header { name, value });
    }
    Ok(forged)
}

/// An object's members in the order in which they stand, their values unread.
struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Members<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some((JsonText(name), value)) = map.next_entry()? {
                    members.push((name, value));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

/// A JSON string, borrowed where it has no escapes.
struct JsonText<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for JsonText<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl<'de> Visitor<'de> for Text {
            type Value = JsonText<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<JsonText<'de>, E> {
                Ok(JsonText(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<JsonText<'de>, E> {
                Ok(JsonText(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(json: &str) -> Result<Vec<(String, Option<String>)>, BadRow> {
        let mut headers = Vec::new();
        read_headers(json.as_bytes(), &mut headers)?;
        Ok(headers
            .into_iter()
            .map(|h| {
                let value = h
                    .value
                    .map(|v| String::from_utf8(v.into_owned()).expect("UTF-8"));
                (h.name.into_owned(), value)
            })
            .collect())
    }

    #[test]
    fn header_values_are_what_postgres_prints() {
        let found = headers(
            r#"{"b": true, "e": "", "n": 1.10, "o": {"x": 1}, "s": "é", "z": null, "q": "a\"b"}"#,
        );
        let expected = [
            ("b", Some("true")),
            ("e", Some("")),
            ("n", Some("1.10")),
            ("o", Some(r#"{"x": 1}"#)),
            ("s", Some("é")),
            ("z", None),
            ("q", Some("a\"b")),
        ]
        .map(|(n, v)| (n.to_owned(), v.map(str::to_owned)));
        assert_eq!(found, Ok(expected.to_vec()));
    }

    #[test]
    fn headers_that_are_no_object_are_refused() {
        for json in ["[1]", "\"x\"", "null", "1"] {
            let error = headers(json).expect_err(json);
            assert!(error.reason.contains("headers"), "{error}");
            assert!(error.reason.contains("not a JSON object"), "{error}");
        }
    }

    #[test]
    fn a_row_cannot_forge_a_mapped_header() {
        let mapped = || own_header("created", b"column");
        for json in [
            &b"{\"created\": \"row\", \"x\": \"1\"}"[..],
            b"{\"created\": \"\xff\", \"x\": \"1\"}",
        ] {
            let mut found = vec![mapped()];
            assert_eq!(read_headers(json, &mut found), Ok(1));
            assert_eq!((found.len(), &found[0]), (2, &mapped()));
        }
    }

    #[test]
    fn bytes_of_no_encoding_pass_as_they_are() {
        let mut found = Vec::new();
        let forged = read_headers(
            b"{\"a\": \"x\xff\xe9\", \"event_id\": \"\xe9\"}",
            &mut found,
        );
        assert_eq!(forged, Ok(1));
        assert_eq!(found[0].value.as_deref(), Some(&b"x\xff\xe9"[..]));
    }

    #[test]
    fn a_row_cannot_forge_the_dedupe_key() {
        let mut found = Vec::new();
        let forged = read_headers(br#"{"event_id": "x", "traceparent": "y"}"#, &mut found);
        assert_eq!((forged, found.len()), (Ok(1), 1));
    }

    #[test]
    fn bytea_comes_out_of_its_hex() {
        assert_eq!(from_hex(b"\\x00ff80"), Ok(vec![0, 0xff, 0x80]));
        assert!(from_hex(b"\\x0").is_err());
        assert!(from_hex(b"00").is_err());
    }
}
