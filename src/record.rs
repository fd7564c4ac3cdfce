//! The words that `relay` and `io` share: a record to publish, its ticket, and what became of it.

use std::borrow::Cow;

/// The sequence number of an event in the ledger. It rides through the Kafka client as the
/// delivery opaque and comes back with the delivery report. Never reused within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub usize);

/// The headers that say which event a record is, in their order: made of columns, never of a row's
/// own `headers`, and no setting can give them another meaning.
pub const OWN_HEADERS: [&str; 3] = ["event_id", "event_type", "aggregate_type"];

/// A Kafka record header. `value: None` is Kafka's null, not an empty value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header<'a> {
    pub name: Cow<'a, str>,
    pub value: Option<Cow<'a, [u8]>>,
}

impl Header<'_> {
    #[must_use]
    pub fn into_owned(self) -> Header<'static> {
        Header {
            name: Cow::Owned(self.name.into_owned()),
            value: self.value.map(|v| Cow::Owned(v.into_owned())),
        }
    }
}

/// One Kafka record, borrowing what it can from the read buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    pub topic: Cow<'a, str>,
    /// Chosen by us (murmur2 of the key), never by the client library.
    pub partition: i32,
    pub key: Cow<'a, [u8]>,
    /// `None` is a tombstone.
    pub value: Option<Cow<'a, [u8]>>,
    /// Milliseconds since the Unix epoch; `None` is the time of sending.
    pub timestamp_ms: Option<i64>,
    pub headers: Vec<Header<'a>>,
}

/// How large a record is, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// What it costs in memory while it is in flight.
    pub footprint: usize,
    /// Key and value.
    pub content: usize,
}

impl Record<'_> {
    pub fn size(&self) -> Size {
        Size {
            footprint: self.footprint(),
            content: self.content(),
        }
    }

    fn content(&self) -> usize {
        self.key.len() + self.value.as_ref().map_or(0, |v| v.len())
    }

    /// `event_id` is the first header of every record.
    pub fn event_id(&self) -> String {
        let value = self.headers.first().and_then(|h| h.value.as_deref());
        String::from_utf8_lossy(value.unwrap_or_default()).into_owned()
    }

    /// What this record costs in memory while it is in flight, in bytes: its own bytes and what
    /// the Kafka client keeps beside them (a message struct, a header list, a node a header).
    pub fn footprint(&self) -> usize {
        const PER_MESSAGE: usize = 176 + 130;
        const PER_HEADER: usize = 42;
        let headers: usize = self
            .headers
            .iter()
            .map(|h| PER_HEADER + h.name.len() + h.value.as_ref().map_or(0, |v| v.len()))
            .sum();
        PER_MESSAGE + self.content() + headers
    }

    /// A copy that outlives the read buffer.
    pub fn into_owned(self) -> Record<'static> {
        Record {
            topic: Cow::Owned(self.topic.into_owned()),
            partition: self.partition,
            key: Cow::Owned(self.key.into_owned()),
            value: self.value.map(|v| Cow::Owned(v.into_owned())),
            timestamp_ms: self.timestamp_ms,
            headers: self.headers.into_iter().map(Header::into_owned).collect(),
        }
    }
}

/// librdkafka's numeric error code (`rd_kafka_resp_err_t`): positive from the broker, negative
/// from the client library. `error::kafka` says what each means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KafkaCode(pub i32);

/// What became of one record that was handed to the Kafka client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    pub ticket: Ticket,
    pub result: Result<(), KafkaCode>,
}

/// What the cluster says about a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TopicState {
    Present {
        partitions: i32,
        /// `max.message.bytes`, where the cluster lets us read it.
        max_message_bytes: Option<usize>,
    },
    /// The cluster answered, and has no such topic.
    Absent,
    /// The cluster answered, and refuses us this.
    Denied(Right),
    /// Nobody answered, or the answer was an error: ask again.
    Unknown(String),
}

/// What an authorizer may refuse us about a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Where there may be no topic at all: that is not told either.
    Use,
    /// It may be described, and an event was refused all the same.
    Write,
    Create,
}

impl Right {
    #[must_use]
    pub fn refusal(self, topic: &str) -> String {
        match self {
            Right::Use => format!(
                "this principal may not describe topic {topic} (TOPIC_AUTHORIZATION_FAILED)"
            ),
            Right::Write => format!(
                "this principal may not write to topic {topic} (TOPIC_AUTHORIZATION_FAILED)"
            ),
            Right::Create => {
                format!("topic {topic} does not exist, and this principal may not create it")
            }
        }
    }

    #[must_use]
    pub fn remedy(self, topic: &str) -> String {
        match self {
            Right::Use | Right::Write => {
                format!("grant this principal Write and Describe on topic {topic}")
            }
            Right::Create => {
                format!("create {topic}, or grant this principal Create on topic {topic}")
            }
        }
    }
}
