//! The client library's configuration: what every promise rests on, and what an operator may add.

use std::sync::Arc;

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaConfRes;

use super::{MockBroker, topics};
use crate::config::Kafka;
use crate::error::Failure;

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

/// How to make clients for one cluster. Clones share the lookup client and the demo broker.
#[derive(Clone)]
pub struct Settings {
    bootstrap: String,
    properties: Vec<(String, String)>,
    client_id: String,
    batch_bytes: usize,
    mock: Option<Arc<MockBroker>>,
    pub(super) lookup: Arc<topics::Lookup>,
}

impl Settings {
    /// `client_id` is what the brokers' logs and quotas call us. With the brokers `mock` a demo
    /// broker is started in this process and lives as long as a clone of these settings.
    ///
    /// # Errors
    /// The demo broker could not be started.
    pub fn new(kafka: &Kafka, client_id: impl Into<String>) -> Result<Self, Failure> {
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
            client_id: client_id.into(),
            batch_bytes: BATCH_BYTES_MAX,
            mock,
            lookup: Arc::default(),
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

    /// Batches are never larger than the smallest topic allows.
    pub(super) fn limit_batch(&mut self, bytes: usize) {
        self.batch_bytes = self.batch_bytes.min(bytes).max(1);
    }

    /// A configuration that only asks, for lookups and the admin API.
    pub(super) fn asking(&self) -> ClientConfig {
        self.config(&[
            ("bootstrap.servers", self.bootstrap.clone()),
            ("client.id", format!("{}-lookup", self.client_id)),
            // A producer's metadata request would make the topic by itself, with defaults that
            // nobody chose.
            ("allow.auto.create.topics", "false".into()),
            ("log.connection.close", "false".into()),
            ("socket.keepalive.enable", "true".into()),
        ])
    }

    pub(super) fn producing(&self) -> ClientConfig {
        // The demo broker does not check sequence numbers: with more than one request in flight
        // a retry may be acknowledged and lost.
        let in_flight_requests = if self.mock.is_some() { "1" } else { "5" };
        let mut config = self.config(&[
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
            ("topic.metadata.refresh.interval.ms", "60000".into()),
            ("topic.metadata.propagation.max.ms", "30000".into()),
            ("allow.auto.create.topics", "false".into()),
            ("statistics.interval.ms", "10000".into()),
            ("log.connection.close", "false".into()),
        ]);
        // The smaller of the operator's and ours.
        let batch_bytes = config
            .get("batch.size")
            .and_then(|own| own.parse().ok())
            .map_or(self.batch_bytes, |own: usize| own.min(self.batch_bytes));
        config.set("batch.size", batch_bytes.to_string());
        config
    }

    /// `base`, then the operator's properties over it.
    fn config(&self, base: &[(&str, String)]) -> ClientConfig {
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
        for (name, value) in &self.properties {
            config.set(canonical(name), value);
        }
        config
    }

    fn has(&self, name: &str) -> bool {
        self.properties.iter().any(|(own, _)| own == name)
    }
}

/// One name for a property and its alias, the one that other clients use too. (rdkafka applies
/// properties in no order: an alias beside its property would win by chance.)
fn canonical(name: &str) -> &str {
    match name {
        "queue.buffering.max.ms" => "linger.ms",
        "compression.type" => "compression.codec",
        "max.in.flight" => "max.in.flight.requests.per.connection",
        "metadata.broker.list" => "bootstrap.servers",
        "request.required.acks" => "acks",
        "delivery.timeout.ms" => "message.timeout.ms",
        "message.send.max.retries" => "retries",
        other => other,
    }
}

/// Checks what the operator adds to the client's configuration, before anything is contacted.
///
/// # Errors
/// Usage: a property that a promise rests on, one that librdkafka does not know, or a bad value.
/// Values are never repeated where they may be secret.
pub fn check_properties(properties: &[(String, String)]) -> Result<(), Failure> {
    for (name, value) in properties {
        if let Some(reason) = refusal(canonical(name)) {
            return Err(Failure::usage(
                format!("the Kafka property {name} cannot be set: {reason}"),
                format!("leave {name} out"),
            ));
        }
        check_value(name, value)?;
        check_bound(name, value)?;
    }
    Ok(())
}

/// Why a property is not the operator's to set.
fn refusal(name: &str) -> Option<&'static str> {
    let reason = match name {
        "acks" => "anything but acks=all would lose events when a broker dies",
        "enable.idempotence" => {
            "without idempotence a retry would lose the order of events or repeat them"
        }
        "enable.gapless.guarantee" => "without it events behind a refused one would overtake it",
        "message.timeout.ms" => {
            "a time-out would lose events in a long outage; they are sent until the broker takes them"
        }
        "retries" => "a bound on retries would lose events in a long outage",
        "queuing.strategy" => "lifo would lose the order of events",
        "transactional.id" => "transactional delivery is not offered",
        "delivery.report.only.error" | "dr_cb" | "dr_msg_cb" => {
            "without every delivery report no event would ever count as delivered"
        }
        "partitioner" | "partitioner_cb" => {
            "the relay chooses the partition itself (murmur2, as the Java client does)"
        }
        "allow.auto.create.topics" => {
            "topics would be made with defaults that nobody chose; use --create-topics"
        }
        "queue.buffering.max.messages"
        | "queue.buffering.max.kbytes"
        | "queue.buffering.backpressure.threshold" => {
            "the relay bounds what is in flight itself, and a smaller queue would refuse events"
        }
        "bootstrap.servers" => "the brokers are given with --brokers",
        "topic.blacklist" => "the events of such a topic would wait for ever",
        "test.mock.num.brokers" | "test.mock.broker.rtt" => {
            "the built-in demo broker is --brokers mock"
        }
        "log.queue"
        | "enabled_events"
        | "log_cb"
        | "error_cb"
        | "stats_cb"
        | "opaque"
        | "socket_cb"
        | "connect_cb"
        | "closesocket_cb"
        | "open_cb"
        | "throttle_cb"
        | "background_event_cb"
        | "plugin.library.paths"
        | "interceptors" => "it is part of how the relay is built into the client library",
        _ => return None,
    };
    Some(reason)
}

/// librdkafka's own judgement of one property.
fn check_value(name: &str, value: &str) -> Result<(), Failure> {
    let mut config = ClientConfig::new();
    config.set(name, value);
    let Err(error) = config.create_native_config() else {
        return Ok(());
    };
    if let KafkaError::ClientConfig(RDKafkaConfRes::RD_KAFKA_CONF_UNKNOWN, ..) = error {
        let remedy = match nearest(name) {
            Some(known) => {
                format!("did you mean {known}? The names are librdkafka's, in its CONFIGURATION.md")
            }
            None => "look the name up in librdkafka's CONFIGURATION.md".to_owned(),
        };
        return Err(Failure::usage(
            format!("there is no Kafka property {name}"),
            remedy,
        ));
    }
    let words = match error {
        // The library ends some of its sentences with a newline.
        KafkaError::ClientConfig(_, words, _, _) if !is_secret(name) => words.trim().to_owned(),
        _ => "its value is not valid".to_owned(),
    };
    Err(Failure::usage(
        format!("the Kafka property {name}: {words}"),
        format!("give {name} a value that librdkafka takes (its CONFIGURATION.md lists them)"),
    ))
}

/// What librdkafka would take and the relay cannot live with.
fn check_bound(name: &str, value: &str) -> Result<(), Failure> {
    let bound = match canonical(name) {
        "message.max.bytes" => MESSAGE_BYTES_MAX,
        "max.in.flight.requests.per.connection" => 5,
        _ => return Ok(()),
    };
    match value.trim().parse::<usize>() {
        Ok(n) if n <= bound => Ok(()),
        Ok(_) | Err(_) => Err(Failure::usage(
            format!("the Kafka property {name} is {value}, and at most {bound} is possible"),
            format!("set {name} to {bound} or less, or leave it out"),
        )),
    }
}

fn is_secret(name: &str) -> bool {
    ["password", "secret", "pem", "token", "oauthbearer", "key"]
        .iter()
        .any(|word| name.contains(word))
}

fn nearest(name: &str) -> Option<&'static str> {
    WELL_KNOWN
        .iter()
        .map(|known| {
            // "linger" for "linger.ms" is nearer than any other name of six letters.
            let prefix = if known.starts_with(name) { 0.5 } else { 0.0 };
            (strsim::jaro_winkler(name, known) + prefix, *known)
        })
        .filter(|(likeness, _)| *likeness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, known)| known)
}

/// What `nearest` may suggest: librdkafka cannot list its properties without leaving out those
/// that have no default. Only for the hint; what is valid, librdkafka decides.
const WELL_KNOWN: &[&str] = &[
    "batch.num.messages",
    "batch.size",
    "broker.address.family",
    "broker.address.ttl",
    "client.dns.lookup",
    "client.id",
    "client.rack",
    "compression.codec",
    "compression.level",
    "compression.type",
    "connections.max.idle.ms",
    "debug",
    "enable.metrics.push",
    "enable.ssl.certificate.verification",
    "linger.ms",
    "log.connection.close",
    "max.in.flight.requests.per.connection",
    "message.copy.max.bytes",
    "message.max.bytes",
    "metadata.max.age.ms",
    "metadata.recovery.strategy",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "request.timeout.ms",
    "retry.backoff.max.ms",
    "retry.backoff.ms",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.password",
    "sasl.username",
    "security.protocol",
    "socket.connection.setup.timeout.ms",
    "socket.keepalive.enable",
    "socket.nagle.disable",
    "socket.receive.buffer.bytes",
    "socket.send.buffer.bytes",
    "socket.timeout.ms",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.cipher.suites",
    "ssl.crl.location",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.location",
    "ssl.keystore.password",
    "statistics.interval.ms",
    "topic.metadata.propagation.max.ms",
    "topic.metadata.refresh.interval.ms",
];

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

    fn check(name: &str, value: &str) -> Result<(), String> {
        check_properties(&[(name.into(), value.into())]).map_err(|failure| {
            assert_eq!(failure.exit, Exit::Usage);
            failure.to_string()
        })
    }

    fn refused(name: &str, value: &str) -> String {
        check(name, value).expect_err("refused")
    }

    // Case K12.
    #[test]
    fn a_property_that_would_lose_events_is_refused_with_the_reason() {
        for (name, value) in [
            ("message.timeout.ms", "5000"),
            ("delivery.timeout.ms", "5000"),
            ("acks", "1"),
            ("request.required.acks", "1"),
            ("retries", "3"),
        ] {
            let said = refused(name, value);
            assert!(
                said.contains(name) && said.contains("would lose events"),
                "{said}"
            );
        }
        assert!(refused("enable.idempotence", "false").contains("would lose the order"));
        assert!(refused("error_cb", "x").contains("error_cb"));
        for name in ["partitioner", "transactional.id", "bootstrap.servers"] {
            refused(name, "x");
        }
    }

    #[test]
    fn an_unknown_property_is_named_with_the_nearest() {
        let said = refused("linger", "5");
        assert!(said.contains("no Kafka property linger"), "{said}");
        assert!(said.contains("did you mean linger.ms?"), "{said}");
        assert!(refused("sasl.user", "x").contains("sasl.username"));
        assert!(refused("compresion.codec", "x").contains("compression.codec"));
        assert!(!refused("zzzzzzzz", "x").contains("did you mean"));
    }

    #[test]
    fn a_bad_value_is_refused_in_the_librarys_words() {
        let said = refused("compression.codec", "brotli");
        assert!(
            said.contains("compression.codec") && said.contains("brotli"),
            "{said}"
        );
        assert!(refused("linger.ms", "soon").contains("linger.ms"));
        assert!(refused("message.max.bytes", "99000000").contains("at most 68157440"));
        assert!(refused("max.in.flight", "6").contains("at most 5"));
    }

    #[test]
    fn what_an_operator_needs_passes() {
        for (name, value) in [
            ("security.protocol", "sasl_ssl"),
            ("sasl.mechanism", "SCRAM-SHA-512"),
            ("sasl.username", "relay"),
            ("sasl.password", "x"),
            ("ssl.ca.location", "/etc/ssl/ca.pem"),
            ("compression.type", "zstd"),
            ("linger.ms", "0.5"),
            ("client.id", "orders"),
            ("batch.size", "500000"),
            ("max.in.flight", "1"),
        ] {
            assert_eq!(check(name, value), Ok(()), "{name}");
        }
    }

    #[test]
    fn an_operators_alias_replaces_the_default() {
        let kafka = Kafka {
            brokers: "a:1".into(),
            properties: vec![
                ("compression.type".into(), "zstd".into()),
                ("queue.buffering.max.ms".into(), "5".into()),
                ("batch.size".into(), "2000000".into()),
            ],
            create_topics: None,
        };
        let mut settings = Settings::new(&kafka, "relay").expect("no mock to start");
        let config = settings.producing();
        assert_eq!(config.get("compression.codec"), Some("zstd"));
        assert_eq!(config.get("compression.type"), None);
        assert_eq!(config.get("linger.ms"), Some("5"));
        assert_eq!(config.get("batch.size"), Some("1000000"));
        settings.limit_batch(20_000);
        assert_eq!(settings.producing().get("batch.size"), Some("20000"));
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
