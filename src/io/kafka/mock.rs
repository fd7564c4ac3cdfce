//! The built-in demo broker: librdkafka's simulated cluster, in this process, on a port of
//! 127.0.0.1. It keeps 5 MiB a partition, drops the oldest silently, and checks no sequence
//! numbers: for a show, not for a proof.

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{BaseProducer, Producer as _};

use super::context::Inbox;
use crate::error::{Exit, Failure};

/// A cluster of one broker that lives as long as this value.
pub struct MockBroker {
    /// Only to own the cluster: it is never asked to send.
    holder: BaseProducer<Inbox>,
    partitions: i32,
}

impl MockBroker {
    /// Topics made without a count get `partitions`.
    ///
    /// # Errors
    /// No port or no thread could be had.
    pub fn new(partitions: i32) -> Result<Self, Failure> {
        let mut config = ClientConfig::new();
        config
            .set("test.mock.num.brokers", "1")
            .set_log_level(RDKafkaLogLevel::Error);
        let holder = config
            .create_with_context(Inbox::default())
            .map_err(|error| {
                Failure::new(
                    Exit::Unexpected,
                    format!("the built-in demo broker cannot start: {error}"),
                    "free a port on 127.0.0.1, or name a real broker with --brokers",
                )
            })?;
        Ok(MockBroker { holder, partitions })
    }

    /// `host:port`, for clients and for `kcat -b`.
    #[must_use]
    pub fn bootstrap(&self) -> String {
        self.cluster().bootstrap_servers()
    }

    /// # Errors
    /// The simulated cluster's words.
    pub fn create_topic(&self, topic: &str) -> Result<(), String> {
        self.create_topic_with(topic, self.partitions)
    }

    /// A topic that exists is left as it is.
    ///
    /// # Errors
    /// The simulated cluster's words.
    pub fn create_topic_with(&self, topic: &str, partitions: i32) -> Result<(), String> {
        match self.cluster().create_topic(topic, partitions, 1) {
            Ok(()) | Err(KafkaError::MockCluster(RDKafkaErrorCode::TopicAlreadyExists)) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Refuses connections until `recover`: the show of an outage.
    pub fn fail(&self) {
        // Fails only for a broker that does not exist.
        let _ = self.cluster().broker_down(-1);
    }

    pub fn recover(&self) {
        let _ = self.cluster().broker_up(-1);
    }

    pub(super) fn cluster(&self) -> MockCluster<'_, Inbox> {
        self.holder
            .client()
            .mock_cluster()
            .expect("the holder was made with a simulated cluster")
    }
}
