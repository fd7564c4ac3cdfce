//! What an operator adds to the client library's configuration: what may be set, and what goes
//! together. All of it is judged before anything is contacted.

mod security;

use std::borrow::Cow;

use rdkafka::ClientConfig;
use rdkafka::client::{Client, DefaultClientContext};
use rdkafka::error::KafkaError;
use rdkafka::types::{RDKafkaConfRes, RDKafkaType};

use super::settings::MESSAGE_BYTES_MAX;
use crate::config::{Kafka, Property};
use crate::error::Failure;
use security::Security;

pub use security::exposures;

/// A secret that is shorter is too common a word to be hidden wherever it stands.
const SECRET_BYTES_MIN: usize = 6;

/// Values that no word of the client library may repeat.
#[derive(Clone, Default)]
pub struct Secrets(Vec<String>);

impl Secrets {
    pub fn of(values: &[(String, String)], given: &[Property]) -> Self {
        let is_indirect = |name: &str| given.iter().any(|p| p.name == name && p.is_indirect());
        let mut secrets: Vec<String> = values
            .iter()
            .filter(|(name, value)| {
                value.len() >= SECRET_BYTES_MIN && (is_secret(name) || is_indirect(name))
            })
            .map(|(_, value)| value.clone())
            .collect();
        // A password that is a part of another one must not leave the rest of it behind.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Secrets(secrets)
    }

    pub fn hide<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut hidden = Cow::Borrowed(text);
        for secret in &self.0 {
            if hidden.contains(secret) {
                hidden = Cow::Owned(hidden.replace(secret, "***"));
            }
        }
        hidden
    }
}

/// All values as they are now, under the names that they were given.
///
/// # Errors
/// Usage: a file that cannot be read.
pub fn read(properties: &[Property]) -> Result<Vec<(String, String)>, Failure> {
    properties
        .iter()
        .map(|property| Ok((property.name.clone(), property.read()?)))
        .collect()
}

/// One name for a property and its alias, the one that other clients use too. (rdkafka applies
/// properties in no order: an alias beside its property would win by chance.)
pub fn canonical(name: &str) -> &str {
    match name {
        "queue.buffering.max.ms" => "linger.ms",
        "compression.type" => "compression.codec",
        "max.in.flight" => "max.in.flight.requests.per.connection",
        "metadata.broker.list" => "bootstrap.servers",
        "request.required.acks" => "acks",
        "delivery.timeout.ms" => "message.timeout.ms",
        "message.send.max.retries" => "retries",
        "sasl.mechanism" => "sasl.mechanisms",
        other => other,
    }
}

/// Checks what the operator adds to the client's configuration, before anything is contacted.
///
/// # Errors
/// Usage: a property that a promise rests on, one that librdkafka does not know, a bad value, or
/// properties that do not go together. Values are never repeated where they may be secret.
pub fn check(kafka: &Kafka) -> Result<(), Failure> {
    let given = &kafka.properties;
    for property in given {
        let name = property.name.as_str();
        let canonical = canonical(name);
        if let Some(twin) = given
            .iter()
            .find(|other| other.name != name && self::canonical(&other.name) == canonical)
        {
            return Err(Failure::usage(
                format!(
                    "the Kafka properties {name} and {} are one and the same",
                    twin.name
                ),
                format!("leave {name} or {} out", twin.name),
            ));
        }
        if let Some(remedy) = java(name) {
            return Err(Failure::usage(
                format!("{name} is a property of the Java client; this is librdkafka"),
                remedy,
            ));
        }
        if let Some(reason) = refusal(canonical) {
            return Err(Failure::usage(
                format!("the Kafka property {name} cannot be set: {reason}"),
                format!("leave {name} out"),
            ));
        }
        check_value(property)?;
    }
    let values = read(given)?;
    let secrets = Secrets::of(&values, given);
    let security = Security {
        values: &values,
        has_token_command: kafka.token_command.is_some(),
    };
    security.check()?;
    if security.has_tls() || security.has_sasl() {
        try_to_make(&values, &secrets)?;
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
        _ if name.starts_with("sasl.kerberos.") => "Kerberos (GSSAPI) is not built in",
        _ if name.starts_with("sasl.oauthbearer.")
            || name == "enable.sasl.oauthbearer.unsecure.jwt" =>
        {
            "tokens come from --kafka-token-command"
        }
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

/// What to write instead of a property of the Java client's.
fn java(name: &str) -> Option<&'static str> {
    let remedy = match name {
        "bootstrap.servers" => "give the brokers with --brokers",
        "sasl.jaas.config" => {
            "write sasl.username and sasl.password (PLAIN, SCRAM), or --kafka-token-command \
             (OAUTHBEARER)"
        }
        "sasl.client.callback.handler.class"
        | "sasl.login.callback.handler.class"
        | "sasl.login.class" => "write --kafka-token-command for OAUTHBEARER, or leave it out",
        "ssl.truststore.location" | "ssl.truststore.certificates" => {
            "write ssl.ca.location with the CA certificate as PEM (keytool -exportcert -rfc \
             prints it)"
        }
        "ssl.truststore.password" | "ssl.truststore.type" => {
            "leave it out: ssl.ca.location is a PEM file"
        }
        "ssl.keystore.type" => {
            "leave it out: ssl.keystore.location is PKCS#12, ssl.certificate.location and \
             ssl.key.location are PEM"
        }
        "ssl.keystore.certificate.chain" => "write ssl.certificate.pem",
        "ssl.keystore.key" => "write ssl.key.pem",
        "max.request.size" => "write message.max.bytes",
        "send.buffer.bytes" => "write socket.send.buffer.bytes",
        "receive.buffer.bytes" => "write socket.receive.buffer.bytes",
        "max.block.ms"
        | "buffer.memory"
        | "key.serializer"
        | "value.serializer"
        | "partitioner.class"
        | "interceptor.classes"
        | "ssl.protocol"
        | "ssl.enabled.protocols"
        | "ssl.trustmanager.algorithm"
        | "ssl.keymanager.algorithm" => "leave it out",
        _ => return None,
    };
    Some(remedy)
}

/// librdkafka's own judgement of one property.
fn check_value(property: &Property) -> Result<(), Failure> {
    let name = property.name.as_str();
    let value = property.read()?;
    let is_hidden = is_secret(name) || property.is_indirect();
    let mut config = ClientConfig::new();
    config.set(name, &value);
    let Err(error) = config.create_native_config() else {
        return check_bound(name, &value, is_hidden);
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
        KafkaError::ClientConfig(_, words, _, _) if !is_hidden => words.trim().to_owned(),
        _ => "its value is not valid".to_owned(),
    };
    Err(Failure::usage(
        format!("the Kafka property {name}: {words}"),
        format!("give {name} a value that librdkafka takes (its CONFIGURATION.md lists them)"),
    ))
}

/// What librdkafka would take and the relay cannot live with.
fn check_bound(name: &str, value: &str, is_hidden: bool) -> Result<(), Failure> {
    let is_off = value.trim().parse::<i64>().is_ok_and(|n| n <= 0);
    let is_watch = matches!(
        name,
        "statistics.interval.ms" | "topic.metadata.refresh.interval.ms"
    );
    if is_off && is_watch {
        return Err(Failure::usage(
            format!(
                "the Kafka property {name} cannot be switched off: partitions that are added to a topic are noticed by it"
            ),
            format!("set {name} to some seconds, or leave it out"),
        ));
    }
    let bound = match canonical(name) {
        "message.max.bytes" => MESSAGE_BYTES_MAX,
        "max.in.flight.requests.per.connection" => 5,
        _ => return Ok(()),
    };
    let shown = if is_hidden { "…" } else { value };
    match value.trim().parse::<usize>() {
        Ok(n) if n <= bound => Ok(()),
        Ok(_) | Err(_) => Err(Failure::usage(
            format!("the Kafka property {name} is {shown}, and at most {bound} is possible"),
            format!("set {name} to {bound} or less, or leave it out"),
        )),
    }
}

/// By the name. A path is none, and has to be shown to be mended.
pub fn is_secret(name: &str) -> bool {
    let words = ["password", "secret", "pem", "token", "oauthbearer", "key"];
    !name.ends_with(".location") && words.iter().any(|word| name.contains(word))
}

/// Certificates that cannot be parsed and passwords that open no key show when a client is made,
/// which connects to nobody.
fn try_to_make(values: &[(String, String)], secrets: &Secrets) -> Result<(), Failure> {
    let mut config = ClientConfig::new();
    for (name, value) in values {
        config.set(canonical(name), value);
    }
    let made = config.create_native_config().and_then(|native| {
        let kind = RDKafkaType::RD_KAFKA_PRODUCER;
        Client::new(&config, native, kind, DefaultClientContext)
    });
    match made {
        Ok(_) => Ok(()),
        Err(error) => Err(cannot_be_made(&error, secrets)),
    }
}

/// The client library's complaint about a configuration as a whole.
pub fn cannot_be_made(error: &KafkaError, secrets: &Secrets) -> Failure {
    let words = match error {
        KafkaError::ClientCreation(words) => words.trim().to_owned(),
        other => other.to_string(),
    };
    let remedy = if words.contains("keystore") {
        "look at ssl.keystore.location, a PKCS#12 file, and ssl.keystore.password"
    } else {
        "mend the --kafka properties that it names"
    };
    Failure::usage(
        format!("the Kafka client cannot be made: {}", secrets.hide(&words)),
        remedy,
    )
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Exit;

    fn check(name: &str, value: &str) -> Result<(), String> {
        check_all(&[(name, value)], None)
    }

    fn check_all(properties: &[(&str, &str)], token: Option<&str>) -> Result<(), String> {
        let kafka = Kafka {
            brokers: "a:1".to_owned(),
            properties: properties
                .iter()
                .map(|(name, value)| Property::plain(name, value))
                .collect(),
            token_command: token.map(str::to_owned),
            create_topics: None,
        };
        super::check(&kafka).map_err(|failure| {
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
        assert!(refused("security.protocl", "x").contains("security.protocol"));
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
        for name in [
            "statistics.interval.ms",
            "topic.metadata.refresh.interval.ms",
        ] {
            assert!(refused(name, "0").contains("cannot be switched off"));
            assert_eq!(check(name, "1000"), Ok(()));
        }
    }

    #[test]
    fn what_an_operator_needs_passes() {
        for (name, value) in [
            ("security.protocol", "ssl"),
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
    fn a_name_of_the_java_clients_is_answered_with_ours() {
        for (name, remedy) in [
            ("sasl.jaas.config", "sasl.username and sasl.password"),
            ("ssl.truststore.location", "ssl.ca.location"),
            ("ssl.keystore.type", "PKCS#12"),
            ("bootstrap.servers", "--brokers"),
            ("max.request.size", "message.max.bytes"),
            ("key.serializer", "leave it out"),
        ] {
            let said = refused(name, "user=\"s3cr3t\"");
            assert!(said.contains("Java") && said.contains(remedy), "{said}");
            assert!(!said.contains("s3cr3t"), "{said}");
        }
        for name in ["sasl.oauthbearer.config", "sasl.oauthbearer.client.secret"] {
            let said = refused(name, "s3cr3t");
            assert!(said.contains("--kafka-token-command"), "{said}");
            assert!(!said.contains("s3cr3t"), "{said}");
        }
        assert!(refused("sasl.kerberos.keytab", "x").contains("not built in"));
    }

    #[test]
    fn a_login_is_complete_or_refused() {
        let sasl = ("security.protocol", "SASL_PLAINTEXT");
        let user = ("sasl.username", "relay");
        let password = ("sasl.password", "s3cr3t");
        let mechanism = |name| ("sasl.mechanism", name);
        for (properties, words) in [
            (&[sasl][..], "without sasl.mechanism"),
            (&[sasl, mechanism("GSSAPI")], "not built in"),
            (&[sasl, mechanism("scram-sha-256")], "in capitals"),
            (&[sasl, mechanism("PLAIN")], "without sasl.username"),
            (&[sasl, mechanism("PLAIN"), user], "without sasl.password"),
            (&[sasl, mechanism("OAUTHBEARER")], "--kafka-token-command"),
            (&[user], "security.protocol is plaintext"),
            (
                &[("security.protocol", "ssl"), password],
                "security.protocol is ssl",
            ),
            (
                &[("sasl.mechanism", "PLAIN"), ("sasl.mechanisms", "PLAIN")],
                "one and the same",
            ),
        ] {
            let said = check_all(properties, None).expect_err(words);
            assert!(said.contains(words), "{said}");
            assert!(!said.contains("s3cr3t"), "{said}");
        }
        let complete = [sasl, mechanism("SCRAM-SHA-512"), user, password];
        assert_eq!(check_all(&complete, None), Ok(()));
        let said = check_all(&complete, Some("true")).expect_err("two logins");
        assert!(said.contains("OAUTHBEARER"), "{said}");
        assert_eq!(
            check_all(&[sasl, mechanism("OAUTHBEARER")], Some("true")),
            Ok(())
        );
        assert!(check_all(&[], Some("true")).is_err());
    }

    fn file(content: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), content).expect("it can be written");
        file
    }

    #[test]
    fn certificates_are_there_in_pairs_and_of_the_right_kind() {
        let ssl = ("security.protocol", "ssl");
        let jks = file(&[0xFE, 0xED, 0xFE, 0xED, 0, 0]);
        let empty = file(b"");
        let rubbish = file(b"-----BEGIN RUBBISH-----");
        let path = |file: &tempfile::NamedTempFile| file.path().to_str().expect("plain").to_owned();
        let (jks, empty, rubbish) = (path(&jks), path(&empty), path(&rubbish));
        let certificate = "ssl.certificate.location";
        for (properties, words) in [
            (
                &[ssl, (certificate, &rubbish)][..],
                "without ssl.key.location",
            ),
            (
                &[ssl, ("ssl.key.location", &rubbish)],
                "without ssl.certificate.location",
            ),
            (
                &[ssl, ("ssl.ca.location", "/no/such/ca.pem")],
                "/no/such/ca.pem",
            ),
            (
                &[ssl, (certificate, &rubbish), ("ssl.key.location", &rubbish)],
                "holds no private key",
            ),
            (&[ssl, ("ssl.keystore.location", &rubbish)], "PKCS#12"),
            (&[ssl, ("ssl.ca.location", &empty)], "is empty"),
            (&[ssl, ("ssl.ca.location", &rubbish)], "ssl.ca.location"),
            (&[ssl, ("ssl.keystore.location", &jks)], "pkcs12"),
            (&[("ssl.ca.location", &rubbish)], "no TLS is spoken"),
        ] {
            let said = check_all(properties, None).expect_err(words);
            assert!(said.contains(words), "{said}");
        }
        assert_eq!(
            check_all(&[ssl, ("ssl.ca.location", "probe")], None),
            Ok(())
        );
    }

    #[test]
    fn secrets_are_hidden_wherever_they_stand() {
        let values = [
            ("sasl.username".to_owned(), "relay-user".to_owned()),
            ("sasl.password".to_owned(), "s3cr3t".to_owned()),
            ("ssl.key.password".to_owned(), "s3cr3t-longer".to_owned()),
            ("ssl.key.location".to_owned(), "/etc/relay.key".to_owned()),
        ];
        let secrets = Secrets::of(&values, &[]);
        assert_eq!(
            secrets.hide("relay-user s3cr3t-longer /etc/relay.key s3cr3t"),
            "relay-user *** /etc/relay.key ***"
        );
    }
}
