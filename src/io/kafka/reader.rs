//! Reads a topic back, whole and from its beginning, without joining a consumer group.

use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::{Offset, TopicPartitionList};

use super::Settings;

/// The demo broker holds an empty answer back for as long as it is allowed to, whatever arrives
/// meanwhile; a real one answers at once.
const MOCK_FETCH_WAIT_MS: &str = "1";
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// A record as a consumer has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Got {
    pub partition: i32,
    pub offset: i64,
    pub key: Vec<u8>,
    /// A tombstone is empty here.
    pub value: Vec<u8>,
    pub headers: Vec<(String, Vec<u8>)>,
}

impl Got {
    /// The first header of that name, where it is text.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(own, _)| own == name)?;
        std::str::from_utf8(value).ok()
    }
}

/// What a partition holds: `first` to before `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub partition: i32,
    pub first: i64,
    pub end: i64,
}

/// All partitions of one topic.
pub struct Reader {
    consumer: BaseConsumer,
    topic: String,
    partitions: i32,
}

impl Reader {
    /// # Errors
    /// The client library's words.
    pub fn new(settings: &Settings, topic: &str, partitions: i32) -> Result<Self, String> {
        let recipe = settings.asking().map_err(|failure| failure.one_line())?;
        let mut config = recipe.config;
        // Not a word to a group's coordinator: partitions are assigned and nothing is committed.
        config
            .set("group.id", "walrelay-reader")
            .set("enable.auto.commit", "false")
            .set("auto.offset.reset", "earliest");
        if settings.mock().is_some() {
            config.set("fetch.wait.max.ms", MOCK_FETCH_WAIT_MS);
        }
        let consumer: BaseConsumer = config.create().map_err(|error| error.to_string())?;
        // Assigning a topic that the client has not heard of waits for its next look.
        consumer
            .fetch_metadata(Some(topic), ANSWER_WITHIN)
            .map_err(|error| error.to_string())?;
        let mut from = TopicPartitionList::new();
        for partition in 0..partitions {
            from.add_partition_offset(topic, partition, Offset::Beginning)
                .map_err(|error| error.to_string())?;
        }
        consumer.assign(&from).map_err(|error| error.to_string())?;
        Ok(Reader {
            consumer,
            topic: topic.to_owned(),
            partitions,
        })
    }

    /// The next record of any partition; of each one in order. Blocks.
    ///
    /// # Errors
    /// What the client library complains of; it goes on by itself.
    pub fn poll(&self, timeout: Duration) -> Result<Option<Got>, String> {
        let Some(polled) = self.consumer.poll(timeout) else {
            return Ok(None);
        };
        let message = polled.map_err(|error| error.to_string())?;
        let headers = message.headers().map_or_else(Vec::new, |headers| {
            headers
                .iter()
                .map(|h| (h.key.to_owned(), h.value.unwrap_or_default().to_vec()))
                .collect()
        });
        Ok(Some(Got {
            partition: message.partition(),
            offset: message.offset(),
            key: message.key().unwrap_or_default().to_vec(),
            value: message.payload().unwrap_or_default().to_vec(),
            headers,
        }))
    }

    /// What each partition holds now. Blocks.
    ///
    /// # Errors
    /// A broker did not answer within 5 seconds.
    pub fn extents(&self) -> Result<Vec<Extent>, String> {
        (0..self.partitions)
            .map(|partition| {
                self.consumer
                    .fetch_watermarks(&self.topic, partition, ANSWER_WITHIN)
                    .map(|(first, end)| Extent {
                        partition,
                        first,
                        end,
                    })
                    .map_err(|error| error.to_string())
            })
            .collect()
    }
}
