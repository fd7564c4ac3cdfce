//! The client library's configuration: what every promise rests on, and what an operator may add.

use std::sync::Arc;

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::producer::BaseProducer;

use super::context::Inbox;
use super::properties::{self, Secrets, canonical};
use super::token::TokenSource;
use super::{MockBroker, tail, topics};
use crate::config::{Kafka, Property};
use crate::error::{Exit, Failure};

/// The largest record that is given to the client library: a 64 MiB row and its envelope. Brokers
/// close the connection on a request above `socket.request.max.bytes` (100 MiB), each time again,
/// and the partition would stall for good.
pub const MESSAGE_BYTES_MAX: usize = (64 << 20) + (1 << 20);

/// One batch, uncompressed. Kept below the smallest topic's `max.message.bytes`: librdkafka never
/// splits a batch that was refused, so all its records would fail together.
const BATCH_BYTES_MAX: usize = 1_000_000;

/// The word for the built-in demo broker.
const MOCK: &str = "mock";
const MOCK_PARTITIONS: i32 = 12;

/// What a client is made of.
pub struct Recipe {
    pub config: ClientConfig,
    pub context: Inbox,
}

impl Recipe {
    /// # Errors
    /// Usage: properties that do not go together, a certificate that cannot be parsed.
    pub fn make(self) -> Result<BaseProducer<Inbox>, Failure> {
        let secrets = self.context.secrets().clone();
        self.config
            .create_with_context(self.context)
            .map_err(|error| properties::cannot_be_made(&error, &secrets))
    }
}

/// How to make clients for one cluster. Clones share the lookup client, the tokens, the readers
/// of tails and the demo broker.
#[derive(Clone)]
pub struct Settings {
    bootstrap: String,
    properties: Vec<Property>,
    token: Option<Arc<TokenSource>>,
    client_id: String,
    batch_bytes: usize,
    mock: Option<Arc<MockBroker>>,
    pub(super) lookup: Arc<topics::Lookup>,
    pub(super) tails: Arc<tail::Tails>,
}

impl Settings {
    /// `client_id` is what the brokers' logs and quotas call us. With the brokers `mock` a demo
    /// broker is started in this process and lives as long as a clone of these settings.
    ///
    /// # Errors
    /// Usage: brokers or properties that are wrong in themselves; nothing is contacted. The demo
    /// broker could not be started.
    pub fn new(kafka: &Kafka, client_id: impl Into<String>) -> Result<Self, Failure> {
        check_brokers(&kafka.brokers)?;
        properties::check(kafka)?;
        let mock = if kafka.brokers == MOCK {
            Some(Arc::new(MockBroker::new(MOCK_PARTITIONS)?))
        } else {
            None
        };
        Ok(Settings {
            bootstrap: mock
                .as_ref()
                .map_or_else(|| kafka.brokers.clone(), |mock| mock.bootstrap()),
            properties: kafka.properties.clone(),
            token: kafka.token_command.clone().map(tokens).transpose()?,
            client_id: client_id.into(),
            batch_bytes: BATCH_BYTES_MAX,
            mock,
            lookup: Arc::default(),
            tails: Arc::default(),
        })
    }

    /// The demo broker, where the brokers are `mock`.
    #[must_use]
    pub fn mock(&self) -> Option<&Arc<MockBroker>> {
        self.mock.as_ref()
    }

    /// The addresses that clients are given; with `mock`, those of the demo broker.
    #[must_use]
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Where tokens come from, if they are used.
    pub(super) fn token(&self) -> Option<&TokenSource> {
        self.token.as_deref()
    }

    /// What others on the network could read or pretend to be: what, and what to do.
    pub(super) fn exposures(&self) -> Vec<(&'static str, &'static str)> {
        properties::read(&self.properties)
            .map(|values| properties::exposures(&values))
            .unwrap_or_default()
    }

    /// User and password as they are now; `None` where nobody logs in with one.
    pub(super) fn login(&self) -> Option<(String, String)> {
        let value = |name: &str| {
            let property = self.properties.iter().find(|p| p.name == name)?;
            property.read().ok()
        };
        Some((value("sasl.username")?, value("sasl.password")?))
    }

    /// Batches are never larger than the smallest topic allows.
    pub(super) fn limit_batch(&mut self, bytes: usize) {
        self.batch_bytes = self.batch_bytes.min(bytes).max(1);
    }

    /// A configuration that only asks, for lookups and the admin API.
    ///
    /// # Errors
    /// A file with a value cannot be read now.
    pub(super) fn asking(&self) -> Result<Recipe, Failure> {
        self.recipe(&[
            ("bootstrap.servers", self.bootstrap.clone()),
            ("client.id", format!("{}-lookup", self.client_id)),
            // A producer's metadata request would make the topic by itself, with defaults that
            // nobody chose.
            ("allow.auto.create.topics", "false".into()),
            ("log.connection.close", "false".into()),
            ("socket.keepalive.enable", "true".into()),
        ])
    }

    /// # Errors
    /// As [`Settings::asking`].
    pub(super) fn producing(&self) -> Result<Recipe, Failure> {
        // The demo broker does not check sequence numbers: with more than one request in flight
        // a retry may be acknowledged and lost.
        let in_flight_requests = if self.mock.is_some() { "1" } else { "5" };
        let mut recipe = self.recipe(&[
            ("bootstrap.servers", self.bootstrap.clone()),
            ("client.id", self.client_id.clone()),
            ("acks", "all".into()),
            ("enable.idempotence", "true".into()),
            // Batches behind a refused one are not delivered before it.
            ("enable.gapless.guarantee", "true".into()),
            (
                "max.in.flight.requests.per.connection",
                in_flight_requests.into(),
            ),
            // For ever: a time-out would leave a hole.
            ("message.timeout.ms", "0".into()),
            // The relay paces: at once while little is in flight, gathered while much is.
            ("linger.ms", "0".into()),
            ("batch.num.messages", "10000".into()),
            ("message.max.bytes", MESSAGE_BYTES_MAX.to_string()),
            ("compression.codec", "lz4".into()),
            // Twice the window that the relay keeps: back-stops, never reached.
            ("queue.buffering.max.messages", "20000".into()),
            ("queue.buffering.max.kbytes", "262144".into()),
            ("request.timeout.ms", "10000".into()),
            ("socket.timeout.ms", "15000".into()),
            ("socket.keepalive.enable", "true".into()),
            ("socket.nagle.disable", "true".into()),
            ("reconnect.backoff.ms", "100".into()),
            ("reconnect.backoff.max.ms", "5000".into()),
            ("retry.backoff.ms", "100".into()),
            ("retry.backoff.max.ms", "1000".into()),
            // How soon partitions that are added are used.
            ("topic.metadata.refresh.interval.ms", "30000".into()),
            ("topic.metadata.propagation.max.ms", "30000".into()),
            ("allow.auto.create.topics", "false".into()),
            ("statistics.interval.ms", "10000".into()),
            ("log.connection.close", "false".into()),
        ])?;
        let config = &mut recipe.config;
        // The smaller of the operator's and ours.
        let batch_bytes = config
            .get("batch.size")
            .and_then(|own| own.parse().ok())
            .map_or(self.batch_bytes, |own: usize| own.min(self.batch_bytes));
        config.set("batch.size", batch_bytes.to_string());
        Ok(recipe)
    }

    /// `base`, then the operator's properties over it.
    fn recipe(&self, base: &[(&str, String)]) -> Result<Recipe, Failure> {
        let values = properties::read(&self.properties)?;
        let mut config = ClientConfig::new();
        // The level would else come from the `log` crate, which has no logger here.
        config.set_log_level(RDKafkaLogLevel::Info);
        for (name, value) in base {
            config.set(*name, value);
        }
        if cfg!(feature = "vendored") && !self.has("ssl.ca.pem") {
            // An OpenSSL of our own does not know where this system keeps its certificates.
            config.set("ssl.ca.location", "probe");
        }
        for (name, value) in &values {
            config.set(canonical(name), value);
        }
        let secrets = Secrets::of(&values, &self.properties);
        Ok(Recipe {
            config,
            context: Inbox::new(secrets, self.token.clone()),
        })
    }

    fn has(&self, name: &str) -> bool {
        self.properties.iter().any(|property| property.name == name)
    }
}

fn tokens(command: String) -> Result<Arc<TokenSource>, Failure> {
    let source = TokenSource::start(command).map_err(|error| {
        Failure::new(
            Exit::Unexpected,
            format!("no thread for --kafka-token-command: {error}"),
            "raise this process's limits (ulimit -u)",
        )
    })?;
    Ok(Arc::new(source))
}

/// Checks `--brokers`: `host:port,…`, or the word `mock`.
///
/// # Errors
/// Usage. (The client library would say no more than "no brokers configured".)
pub fn check_brokers(brokers: &str) -> Result<(), Failure> {
    let refuse = |cause: String| {
        Failure::usage(
            cause,
            "give --brokers as host:port, no scheme, with commas between brokers: kafka-1:9092,kafka-2:9092",
        )
    };
    if brokers == MOCK {
        return Ok(());
    }
    if brokers.trim().is_empty() {
        return Err(refuse("the list of brokers is empty".into()));
    }
    for broker in brokers.split(',').map(str::trim) {
        if broker.is_empty() {
            return Err(refuse(format!(
                "brokers \"{brokers}\": one of them is empty"
            )));
        }
        if broker.contains("://") {
            return Err(refuse(format!(
                "broker \"{broker}\": an address has no scheme; TLS is --kafka security.protocol=ssl"
            )));
        }
        let host_and_port = broker
            .rsplit_once(':')
            .and_then(|(host, port)| Some((host, port.parse::<u16>().ok().filter(|p| *p > 0)?)));
        let Some((host, _)) = host_and_port else {
            return Err(refuse(format!(
                "broker \"{broker}\": the port is missing or no port"
            )));
        };
        let bracketed = host.starts_with('[') && host.ends_with(']');
        let host_is_plain = !host.is_empty()
            && !host.contains(['/', '@', ' ', '\0'])
            && (bracketed || !host.contains(':'));
        if !host_is_plain {
            return Err(refuse(format!("broker \"{broker}\": not host:port")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Exit;

    #[test]
    fn an_operators_alias_replaces_the_default() {
        let kafka = Kafka {
            brokers: "a:1".into(),
            properties: vec![
                Property::plain("compression.type", "zstd"),
                Property::plain("queue.buffering.max.ms", "5"),
                Property::plain("batch.size", "2000000"),
            ],
            token_command: None,
            create_topics: None,
        };
        let mut settings = Settings::new(&kafka, "relay").expect("no mock to start");
        let config = settings.producing().expect("no files").config;
        assert_eq!(config.get("compression.codec"), Some("zstd"));
        assert_eq!(config.get("compression.type"), None);
        assert_eq!(config.get("linger.ms"), Some("5"));
        assert_eq!(config.get("batch.size"), Some("1000000"));
        settings.limit_batch(20_000);
        let config = settings.producing().expect("no files").config;
        assert_eq!(config.get("batch.size"), Some("20000"));
    }

    // Case K01.
    #[test]
    fn brokers_are_hosts_and_ports() {
        for good in [
            "a:1",
            "a.example:9092, b:9093",
            "127.0.0.1:9092",
            "[::1]:9092",
            "mock",
        ] {
            assert_eq!(check_brokers(good), Ok(()), "{good}");
        }
        for bad in [
            "",
            " ",
            "http://127.0.0.1:9092",
            "a",
            "a:",
            "a:0",
            "a:70000",
            "a:1,,b:1",
            ":9092",
            "::1:9092",
            "u@h:1",
        ] {
            let failure = check_brokers(bad).expect_err(bad);
            assert_eq!(failure.exit, Exit::Usage);
            assert!(failure.remedy.contains("host:port, no scheme"));
        }
    }
}
