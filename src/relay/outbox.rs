//! A row of the outbox to a record.
//!
//! # Invariants
//! The payload is never parsed and never copied (bytea excepted: it comes in hex). A row that
//! cannot be a record is an error with its reason; nothing is repaired.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};

use super::headers::read_headers;
use super::mapping::{Clock, Mapping, Part};
use super::stamp::{self, Kind};
use crate::dead_letter::Reason;
use crate::record::{Header, OWN_HEADERS, Record};
use crate::wire::pgoutput::{Column, Oid, Relation, Tuple};

/// Type oids that are fixed in every Postgres, and the names that a Type message has for them.
const BYTEA: Oid = Oid(17);
const INT8: Oid = Oid(20);
const INT2: Oid = Oid(21);
const INT4: Oid = Oid(23);
const DATE: Oid = Oid(1082);
const TIMESTAMP: Oid = Oid(1114);
const TIMESTAMPTZ: Oid = Oid(1184);
const NAMED: [(&[u8], Oid); 7] = [
    (b"bytea", BYTEA),
    (b"int8", INT8),
    (b"int2", INT2),
    (b"int4", INT4),
    (b"date", DATE),
    (b"timestamp", TIMESTAMP),
    (b"timestamptz", TIMESTAMPTZ),
];

/// The domains that the stream has announced, and the built-in type that each is over.
#[derive(Clone, Debug, Default)]
pub struct Domains(HashMap<u32, Oid>);

impl Domains {
    /// A Type message: of a domain it has the name of the type below.
    pub fn learn(&mut self, oid: Oid, namespace: &[u8], name: &[u8]) {
        let known = NAMED.iter().find(|(known, _)| *known == name);
        match known.filter(|_| namespace.is_empty()) {
            Some((_, base)) => self.0.insert(oid.0, *base),
            None => self.0.remove(&oid.0),
        };
    }

    fn base(&self, oid: Oid) -> Oid {
        self.0.get(&oid.0).copied().unwrap_or(oid)
    }
}

/// Where the mapped columns stand in the rows that follow a Relation message.
#[derive(Clone, Debug)]
pub struct Shape {
    event_id: usize,
    aggregate_type: Option<usize>,
    aggregate_id: usize,
    key_is_bytea: bool,
    event_type: Option<usize>,
    payload: usize,
    payload_is_bytea: bool,
    headers: Option<usize>,
    partition: Option<usize>,
    stamp: Source,
    /// For each column of the topic template.
    topic: Vec<usize>,
    /// Headers from columns.
    extra: Vec<(String, usize)>,
}

/// Where a timestamp comes from, found.
#[derive(Clone, Copy, Debug)]
enum Source {
    Clock(Clock),
    Column(usize, Kind),
}

/// A table that has not (any more) what the mapping names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmapped {
    #[error("column {column:?} of {table} is mapped and not there")]
    Missing {
        column: String,
        table: String,
        /// How the mapping would name another one.
        setting: String,
        /// What there is in its place.
        has: String,
    },
    #[error("column {column:?} of {table} has a type that can be no {part}")]
    WrongType {
        column: String,
        table: String,
        part: &'static str,
    },
}

/// Why this row can never be a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct BadRow {
    /// Of the row, or of the topic that it gives.
    pub kind: Reason,
    pub reason: String,
}

fn bad(reason: impl Into<String>) -> BadRow {
    BadRow {
        kind: Reason::MalformedRow,
        reason: reason.into(),
    }
}

/// The time that a record carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stamp {
    Clock(Clock),
    /// Milliseconds since 1970, from a column.
    At(i64),
    /// The column holds what is no time to Kafka: null, infinity, a time before 1970.
    None,
}

/// A record that has no topic number and no partition yet.
#[derive(Debug)]
pub struct Draft<'a> {
    pub key: Cow<'a, [u8]>,
    /// Of (`aggregate_type`, `aggregate_id`): what keeps its order.
    pub key_hash: u64,
    pub value: Option<Cow<'a, [u8]>>,
    pub stamp: Stamp,
    /// The partition that the row itself asks for.
    pub partition: Option<i64>,
    /// `event_id` first.
    pub headers: Vec<Header<'a>>,
    /// Names in `headers` that the row may not set, and that were dropped.
    pub forged_headers: usize,
}

/// The columns of a Relation message, by name.
struct Finder<'a> {
    relation: &'a Relation<'a>,
    domains: &'a Domains,
}

impl Finder<'_> {
    fn table(&self) -> String {
        format!(
            "{}.{}",
            String::from_utf8_lossy(self.relation.namespace),
            String::from_utf8_lossy(self.relation.name)
        )
    }

    fn columns(&self) -> String {
        let names = self.relation.columns();
        let names: Vec<_> = names.map(|c| String::from_utf8_lossy(c.name)).collect();
        names.join(", ")
    }

    fn find(&self, column: &str, setting: impl FnOnce() -> String) -> Result<usize, Unmapped> {
        self.relation
            .columns()
            .position(|c| c.name == column.as_bytes())
            .ok_or_else(|| Unmapped::Missing {
                column: column.to_owned(),
                table: self.table(),
                setting: setting(),
                has: self.columns(),
            })
    }

    fn part(&self, mapping: &Mapping, part: Part) -> Result<Option<usize>, Unmapped> {
        let column = mapping.columns.get(part);
        column
            .map(|column| {
                let or_none = if part.is_required() {
                    ""
                } else {
                    " (or without: nothing behind the =)"
                };
                self.find(column, || {
                    format!("--column {}=COLUMN{or_none}", part.name())
                })
            })
            .transpose()
    }

    fn required(&self, mapping: &Mapping, part: Part) -> Result<usize, Unmapped> {
        let column = self.part(mapping, part)?;
        Ok(column.expect("a required part has a column"))
    }

    /// The type of a column, or the one that its domain is over.
    fn type_of(&self, index: usize) -> Oid {
        let column = self.relation.columns().nth(index);
        self.domains.base(column.map_or(Oid(0), |c| c.type_oid))
    }

    fn stamp(&self, mapping: &Mapping) -> Result<Source, Unmapped> {
        let Some(index) = self.part(mapping, Part::Timestamp)? else {
            return Ok(Source::Clock(mapping.clock));
        };
        match self.type_of(index) {
            DATE | TIMESTAMP | TIMESTAMPTZ => Ok(Source::Column(index, Kind::Printed)),
            INT8 => Ok(Source::Column(index, Kind::Millis)),
            _ => Err(self.wrong_type(mapping, Part::Timestamp)),
        }
    }

    fn partition(&self, mapping: &Mapping) -> Result<Option<usize>, Unmapped> {
        let found = self.part(mapping, Part::Partition)?;
        match found.map(|index| self.type_of(index)) {
            None | Some(INT2 | INT4 | INT8) => Ok(found),
            Some(_) => Err(self.wrong_type(mapping, Part::Partition)),
        }
    }

    fn wrong_type(&self, mapping: &Mapping, part: Part) -> Unmapped {
        Unmapped::WrongType {
            column: name_of(mapping, part).to_owned(),
            table: self.table(),
            part: part.name(),
        }
    }
}

impl Shape {
    /// Finds the mapped columns by name.
    ///
    /// # Errors
    /// One of them is not there, or of a type that will not do.
    pub fn resolve(
        relation: &Relation<'_>,
        mapping: &Mapping,
        domains: &Domains,
    ) -> Result<Self, Unmapped> {
        let finder = Finder { relation, domains };
        let aggregate_id = finder.required(mapping, Part::AggregateId)?;
        let payload = finder.required(mapping, Part::Payload)?;
        let topic = mapping.topic.columns();
        let in_topic = || "another --topic".to_owned();
        let extra = mapping.headers.iter().map(|(name, column)| {
            let index = finder.find(column, || format!("--header {name}=COLUMN"))?;
            Ok((name.clone(), index))
        });
        Ok(Shape {
            event_id: finder.required(mapping, Part::EventId)?,
            aggregate_type: finder.part(mapping, Part::AggregateType)?,
            aggregate_id,
            key_is_bytea: finder.type_of(aggregate_id) == BYTEA,
            event_type: finder.part(mapping, Part::EventType)?,
            payload,
            payload_is_bytea: finder.type_of(payload) == BYTEA,
            headers: finder.part(mapping, Part::Headers)?,
            partition: finder.partition(mapping)?,
            stamp: finder.stamp(mapping)?,
            topic: topic
                .map(|column| finder.find(column, in_topic))
                .collect::<Result<_, _>>()?,
            extra: extra.collect::<Result<_, _>>()?,
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

    /// `aggregate_type` and `aggregate_id` as they are stored, where they are.
    #[must_use]
    pub fn key(&self, shape: &Shape) -> (Option<&'a [u8]>, Option<&'a [u8]>) {
        let aggregate_type = shape.aggregate_type.and_then(|index| self.get(index));
        (aggregate_type, self.get(shape.aggregate_id))
    }

    /// The topic's name into `topic`, the rest of the record as a draft.
    ///
    /// # Errors
    /// The row can never be a record: the reason names the column and the rule.
    pub fn draft<'s>(
        &self,
        shape: &'s Shape,
        mapping: &Mapping,
        topic: &mut String,
    ) -> Result<Draft<'s>, BadRow>
    where
        'a: 's,
    {
        let need = |index, part: Part| {
            self.get(index)
                .ok_or_else(|| bad(format!("column {} is null", name_of(mapping, part))))
        };
        let event_id = need(shape.event_id, Part::EventId)?;
        let aggregate_type = match shape.aggregate_type {
            Some(index) => Some(need(index, Part::AggregateType)?),
            None => None,
        };
        let event_type = match shape.event_type {
            Some(index) => Some(need(index, Part::EventType)?),
            None => None,
        };
        let aggregate_id = need(shape.aggregate_id, Part::AggregateId)?;
        mapping
            .topic
            .render(
                shape.topic.iter().map(|i| self.get(*i)),
                &mapping.topics,
                topic,
            )
            .map_err(|e| BadRow {
                kind: Reason::InvalidTopic,
                reason: e.to_string(),
            })?;
        let value = match self.get(shape.payload) {
            Some(value) => Some(raw(value, shape.payload_is_bytea, mapping, Part::Payload)?),
            None => None,
        };
        let key = raw(aggregate_id, shape.key_is_bytea, mapping, Part::AggregateId)?;
        let mut headers = self.headers(shape, event_id, event_type, aggregate_type);
        let forged_headers = match shape.headers.and_then(|index| self.get(index)) {
            None | Some(b"{}") => 0,
            Some(json) => read_headers(json, &mut headers).map_err(|what| {
                bad(format!("column {} {what}", name_of(mapping, Part::Headers)))
            })?,
        };
        Ok(Draft {
            key,
            key_hash: key_hash(aggregate_type, aggregate_id),
            value,
            stamp: self.stamp(shape),
            partition: self.partition(shape, mapping)?,
            headers,
            forged_headers,
        })
    }

    /// What there is of a row that can be no record: for people to look at.
    #[must_use]
    pub fn remains(&self, shape: &Shape) -> Record<'static> {
        let printed = |index: usize, is_bytea: bool| {
            let bytes = self.get(index)?;
            let raw = if is_bytea { from_hex(bytes) } else { None };
            Some(raw.unwrap_or_else(|| bytes.to_vec()))
        };
        let [id, kind, aggregate] = OWN_HEADERS;
        let named = [
            (id, Some(shape.event_id)),
            (kind, shape.event_type),
            (aggregate, shape.aggregate_type),
        ];
        let headers = named.into_iter().filter_map(|(name, index)| {
            let value = self.get(index?)?;
            Some(own_header(name, value).into_owned())
        });
        let key = printed(shape.aggregate_id, shape.key_is_bytea);
        Record {
            topic: Cow::Borrowed(""),
            partition: -1,
            key: Cow::Owned(key.unwrap_or_default()),
            value: printed(shape.payload, shape.payload_is_bytea).map(Cow::Owned),
            timestamp_ms: None,
            headers: headers.collect(),
        }
    }

    /// Those that columns give: `event_id` first.
    fn headers<'s>(
        &self,
        shape: &'s Shape,
        event_id: &'a [u8],
        event_type: Option<&'a [u8]>,
        aggregate_type: Option<&'a [u8]>,
    ) -> Vec<Header<'s>>
    where
        'a: 's,
    {
        let [id, kind, aggregate] = OWN_HEADERS;
        let mut headers = Vec::with_capacity(OWN_HEADERS.len() + shape.extra.len());
        headers.push(own_header(id, event_id));
        if let Some(value) = event_type {
            headers.push(own_header(kind, value));
        }
        if let Some(value) = aggregate_type {
            headers.push(own_header(aggregate, value));
        }
        for (name, index) in &shape.extra {
            headers.push(Header {
                name: Cow::Borrowed(name),
                value: self.get(*index).map(Cow::Borrowed),
            });
        }
        headers
    }

    #[inline]
    fn stamp(&self, shape: &Shape) -> Stamp {
        match shape.stamp {
            Source::Clock(clock) => Stamp::Clock(clock),
            Source::Column(index, kind) => self
                .get(index)
                .and_then(|text| stamp::millis(kind, text))
                .map_or(Stamp::None, Stamp::At),
        }
    }

    fn partition(&self, shape: &Shape, mapping: &Mapping) -> Result<Option<i64>, BadRow> {
        let Some(digits) = shape.partition.and_then(|index| self.get(index)) else {
            return Ok(None);
        };
        let number = std::str::from_utf8(digits)
            .ok()
            .and_then(|d| d.parse().ok());
        let name = name_of(mapping, Part::Partition);
        number
            .map(Some)
            .ok_or_else(|| bad(format!("column {name} holds no whole number")))
    }
}

/// The column that a part is mapped to; its own name where it is to none.
fn name_of(mapping: &Mapping, part: Part) -> &str {
    mapping.columns.get(part).unwrap_or(part.name())
}

/// The bytes of a column: what Postgres prints, bytea out of its hex.
fn raw<'a>(
    printed: &'a [u8],
    is_bytea: bool,
    mapping: &Mapping,
    part: Part,
) -> Result<Cow<'a, [u8]>, BadRow> {
    if !is_bytea {
        return Ok(Cow::Borrowed(printed));
    }
    from_hex(printed).map(Cow::Owned).ok_or_else(|| {
        bad(format!(
            "column {} is not bytea in hex",
            name_of(mapping, part)
        ))
    })
}

fn own_header<'a>(name: &'static str, value: &'a [u8]) -> Header<'a> {
    Header {
        name: Cow::Borrowed(name),
        value: Some(Cow::Borrowed(value)),
    }
}

/// The hash of what keeps its order.
#[must_use]
pub fn key_hash(aggregate_type: Option<&[u8]>, aggregate_id: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    if let Some(aggregate_type) = aggregate_type {
        hasher.write(aggregate_type);
        hasher.write_u8(0);
    }
    hasher.write(aggregate_id);
    hasher.finish()
}

fn from_hex(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.strip_prefix(b"\\x")?;
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let nibble = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    digits
        .chunks_exact(2)
        .map(|pair| Some(nibble(pair[0])? << 4 | nibble(pair[1])?))
        .collect()
}

#[cfg(test)]
mod tests;
