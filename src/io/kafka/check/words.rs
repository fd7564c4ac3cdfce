//! Findings and remedies for what was seen. Pure: no question is asked here.

use std::collections::HashMap;

use super::super::ClientNotice;
use super::super::native::admin::{Node, Partition, Refusal, Topic, TopicConfig};
use super::address::{Address, Unreachable};
use super::ask::{Heard, address_of};
use crate::config::CreateTopics;
use crate::finding::Finding;
use crate::record::Right;

/// Kafka's own default of `max.message.bytes`: what an event of a mebibyte needs.
const MESSAGE_BYTES_USUAL: u64 = 1_048_588;
/// Kafka's own default of `message.timestamp.after.max.ms`, an hour.
const TIMESTAMP_AFTER_USUAL: u64 = 3_600_000;
/// More partitions are not named one by one.
const PARTITIONS_NAMED_MAX: usize = 5;

const UNKNOWN_TOPIC: i32 = 3;
const INVALID_TOPIC: i32 = 17;
const TOPIC_AUTHORIZATION_FAILED: i32 = 29;

/// What puts a failed finding right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heals {
    /// A server that comes back, a name that is entered.
    WithTime,
    WithTheTopic,
    /// Only an operator, here.
    Never,
}

/// What was found, and what puts it right.
pub struct Said {
    pub finding: Finding,
    pub heals: Heals,
}

impl From<Finding> for Said {
    fn from(finding: Finding) -> Self {
        Said {
            finding,
            heals: Heals::WithTime,
        }
    }
}

impl Said {
    fn definite(finding: Finding) -> Self {
        Said {
            finding,
            heals: Heals::Never,
        }
    }
}

type Probed = (Address, Result<(), Unreachable>);

// ---- the way there -------------------------------------------------------------------------

/// Nobody logs in without one.
pub fn no_token(why: &str) -> Said {
    Finding::failed("kafka token", why, TOKEN).into()
}

const TOKEN: &str = "run what --kafka-token-command says by hand: it is to print a token on its \
                     standard output and end with 0, within ten seconds";

/// None of the brokers that the operator named can be reached.
pub fn nobody(bootstrap: &[Probed]) -> Said {
    let bad: Vec<(&Address, &Unreachable)> = unreachable(bootstrap).collect();
    let found: Vec<String> = bad.iter().map(|(at, why)| cannot(at, why)).collect();
    let mut remedies: Vec<&str> = Vec::new();
    for (_, why) in bad {
        let remedy = match why {
            Unreachable::NotResolved => "mend the name in --brokers, or DNS",
            Unreachable::Refused => "start Kafka, or mend the port in --brokers",
            Unreachable::TimedOut | Unreachable::Other(_) => {
                "open the way from here to Kafka, or mend --brokers"
            }
        };
        if !remedies.contains(&remedy) {
            remedies.push(remedy);
        }
    }
    Finding::failed("kafka", found.join("; "), remedies.join("; or ")).into()
}

fn unreachable(probed: &[Probed]) -> impl Iterator<Item = (&Address, &Unreachable)> {
    probed
        .iter()
        .filter_map(|(address, reached)| Some((address, reached.as_ref().err()?)))
}

fn cannot(address: &Address, why: &Unreachable) -> String {
    match why {
        Unreachable::NotResolved => format!("cannot resolve {}", address.host),
        Unreachable::Refused => format!("{address} refuses the connection"),
        Unreachable::TimedOut => format!("{address} does not answer: timed out"),
        Unreachable::Other(words) => format!("cannot connect to {address}: {words}"),
    }
}

/// A broker is there, and does not talk to us.
pub fn no_answer(good: &[String], heard: &Heard) -> Said {
    let list = good.join(", ");
    // "All brokers are down" is what we see ourselves.
    let notice = heard.notice.as_ref().filter(|notice| notice.weight() > 0);
    if let Some(notice) = notice {
        let finding = Finding::failed(
            "kafka",
            format!("no conversation with Kafka at {list}: {}", notice.text),
            remedy_of(notice),
        );
        return if notice.is_definite() {
            Said::definite(finding)
        } else {
            finding.into()
        };
    }
    let why = match &heard.cluster {
        Some(Err(refusal)) => format!(": {}", refusal.text),
        Some(Ok(_)) | None => String::new(),
    };
    Finding::failed(
        "kafka",
        format!("{list} takes the connection and does not answer{why}"),
        SILENT,
    )
    .into()
}

/// A listener that wants TLS or SASL says nothing to whom talks to it without.
const SILENT: &str = "look at the broker; where that listener wants TLS or SASL, set \
                      --kafka security.protocol (ssl, sasl_ssl, sasl_plaintext)";

/// By the words: the codes tell less.
fn remedy_of(notice: &ClientNotice) -> &'static str {
    let says = |words: &str| notice.text.contains(words);
    if says("PLAINTEXT broker listener") {
        "that listener seems to speak no TLS: name the port of the TLS listener in --brokers, or \
         leave TLS out of --kafka security.protocol (plaintext, sasl_plaintext)"
    } else if says("supported mechanisms") || notice.code.0 == 33 {
        "set --kafka sasl.mechanism to one that the listener offers; one that offers none wants \
         security.protocol plaintext or ssl, or you mean the port of another listener"
    } else if says("OAUTHBEARER token") {
        TOKEN
    } else if says("invalid_token") {
        "look at what --kafka-token-command prints: the broker does not take this token"
    } else if says("hostname mismatch") || says("IP address mismatch") {
        "name the brokers (--brokers, advertised.listeners) as their certificates do"
    } else if says("has expired") {
        "have the broker's certificate renewed, or mend the clock here"
    } else if says("verify failed") {
        "set --kafka ssl.ca.location to the CA certificate (PEM) that the broker's was signed \
         with, or have the broker show a certificate of that CA"
    } else if says("alert") {
        "give a client certificate that the broker takes: --kafka ssl.certificate.location and \
         ssl.key.location (PEM)"
    } else if notice.code.0 == -169 || notice.code.0 == 58 {
        "look at --kafka sasl.username, sasl.password and sasl.mechanism: the broker does not know \
         this user, or not with this password"
    } else if notice.is_definite() {
        "look at the TLS and SASL properties in --kafka, and at the broker's log"
    } else {
        SILENT
    }
}

// ---- brokers -------------------------------------------------------------------------------

/// The brokers, and whether each can be reached where it says that it is. `probed`: the addresses
/// that no bootstrap address has shown to be good.
pub fn cluster(bootstrap: &[Probed], nodes: &[Node], probed: &[Probed]) -> Vec<Said> {
    let good = bootstrap.iter().find(|(_, reached)| reached.is_ok());
    let good = good.map_or_else(String::new, |(address, _)| address.to_string());
    let count = match nodes.len() {
        1 => "1 broker".to_owned(),
        n => format!("{n} brokers"),
    };
    let mut said = vec![Finding::ok("kafka", format!("{good} answers: {count}")).into()];
    for (address, why) in unreachable(bootstrap) {
        let finding = Finding::warning(
            "kafka",
            format!("{}; another of --brokers answers", cannot(address, why)),
            format!("mend {address} in --brokers, or take it out"),
        );
        said.push(finding.into());
    }
    let by_address: HashMap<&Address, &Unreachable> = unreachable(probed).collect();
    for node in nodes {
        let address = address_of(node);
        let Some(why) = by_address.get(&address) else {
            continue;
        };
        let (how, remedy) = match why {
            Unreachable::NotResolved => (
                "cannot be resolved from here".to_owned(),
                "fix advertised.listeners or DNS",
            ),
            Unreachable::Refused => (
                "refuses the connection from here".to_owned(),
                "fix advertised.listeners, or start that broker",
            ),
            Unreachable::TimedOut => (
                "does not answer from here: timed out".to_owned(),
                "fix advertised.listeners, or open the way from here to that address",
            ),
            Unreachable::Other(words) => (
                format!("cannot be reached from here: {words}"),
                "fix advertised.listeners, or open the way from here to that address",
            ),
        };
        let id = node.id;
        let finding = Finding::failed(
            format!("broker {id}"),
            format!("bootstrap {good} answered, but broker {id} advertises {address}, which {how}"),
            remedy,
        );
        said.push(finding.into());
    }
    said
}

// ---- topics --------------------------------------------------------------------------------

pub fn topics(names: &[String], heard: &Heard, create: Option<CreateTopics>) -> Vec<Said> {
    let answers = match &heard.topics {
        Some(Ok(answers)) => answers,
        Some(Err(refusal)) => return unknown_topics(names, &refusal.text),
        None => return unknown_topics(names, "no answer in time"),
    };
    let mut said = Vec::new();
    for name in names {
        match answers.get(name) {
            Some(Ok(topic)) => {
                said.extend(present(name, topic));
                said.extend(configured(name, topic, heard));
            }
            Some(Err(refusal)) => said.push(not_there(name, refusal, create)),
            None => said.push(unknown(name, "the answer does not name it").into()),
        }
    }
    said
}

fn unknown(name: &str, why: &str) -> Finding {
    Finding::unknown(format!("topic {name}"), format!("not looked at: {why}"))
}

fn unknown_topics(names: &[String], why: &str) -> Vec<Said> {
    names.iter().map(|name| unknown(name, why).into()).collect()
}

fn not_there(name: &str, refusal: &Refusal, create: Option<CreateTopics>) -> Said {
    let subject = format!("topic {name}");
    match (refusal.code.0, create) {
        (UNKNOWN_TOPIC, Some(how)) => Finding::ok(
            subject,
            format!(
                "absent; will be made with {} partitions at its first event",
                how.partitions
            ),
        )
        .into(),
        (UNKNOWN_TOPIC, None) => Said {
            finding: Finding::failed(
                subject,
                format!("topic {name} does not exist"),
                format!("create {name}, or --create-topics PARTITIONS"),
            ),
            heals: Heals::WithTheTopic,
        },
        (TOPIC_AUTHORIZATION_FAILED, _) => Said::definite(Finding::failed(
            subject,
            Right::Use.refusal(name),
            Right::Use.remedy(name),
        )),
        (INVALID_TOPIC, _) => Finding::failed(
            subject,
            format!("Kafka takes no topic of the name {name:?}"),
            "mend --topic: ASCII letters, digits, '.', '_' and '-', at most 249",
        )
        .into(),
        _ => unknown(name, &refusal.text).into(),
    }
}

fn present(name: &str, topic: &Topic) -> Vec<Said> {
    let subject = format!("topic {name}");
    let mut said = Vec::new();
    match topic.rights {
        Some(rights) if !rights.write => said.push(Said::definite(Finding::failed(
            &*subject,
            format!("topic {name} may not be written by this principal"),
            Right::Use.remedy(name),
        ))),
        Some(_) | None => {
            let count = topic.partitions.len();
            let right = match topic.rights {
                Some(rights) if rights.read => "may be written and read",
                Some(_) => "may be written",
                None => "whether it may be written shows at the first event",
            };
            said.push(Finding::ok(&*subject, format!("{count} partitions; {right}")).into());
        }
    }
    if topic.rights.is_some_and(|rights| !rights.read) {
        let finding = Finding::warning(
            &*subject,
            format!(
                "no Read right on topic {name}: after a crash of the relay events may be repeated \
                 (at least once)"
            ),
            format!("grant this principal Read on topic {name}"),
        );
        said.push(finding.into());
    }
    let headless: Vec<&Partition> = topic
        .partitions
        .iter()
        .filter(|partition| partition.leader.is_none())
        .collect();
    if !headless.is_empty() {
        let finding = Finding::failed(
            &*subject,
            format!("topic {name}: {} without a leader", named(&headless)),
            "start the brokers that hold them",
        );
        said.push(finding.into());
    }
    let replicas = topic.partitions.iter().map(|p| p.replicas).min();
    if replicas == Some(1) {
        let finding = Finding::warning(
            &*subject,
            format!("topic {name} has one replica: its events are lost with one broker's disk"),
            "raise its replication factor to 3",
        );
        said.push(finding.into());
    }
    said
}

/// "partitions 0, 3 and 7 more are"
fn named(partitions: &[&Partition]) -> String {
    let ids: Vec<String> = partitions
        .iter()
        .take(PARTITIONS_NAMED_MAX)
        .map(|partition| partition.id.to_string())
        .collect();
    let word = if partitions.len() == 1 {
        "partition"
    } else {
        "partitions"
    };
    let more = partitions.len().saturating_sub(PARTITIONS_NAMED_MAX);
    if more == 0 {
        format!("{word} {}", ids.join(", "))
    } else {
        format!("{word} {} and {more} more", ids.join(", "))
    }
}

fn configured(name: &str, topic: &Topic, heard: &Heard) -> Vec<Said> {
    let subject = format!("topic {name}");
    let unread = |why: &str| {
        let found = format!("its settings (min.insync.replicas, max.message.bytes, …): {why}");
        vec![Finding::unknown(&*subject, found).into()]
    };
    let config = match &heard.configs {
        Some(Ok(configs)) => match configs.get(name) {
            Some(Ok(config)) => config,
            Some(Err(refusal)) => {
                return unread(&format!("{} (DescribeConfigs)", refusal.text));
            }
            None => return unread("the answer does not name them"),
        },
        Some(Err(refusal)) => return unread(&refusal.text),
        None => return unread("no answer in time"),
    };
    let mut findings = Vec::new();
    findings.extend(in_sync(name, topic, config));
    findings.extend(sizes(name, config));
    findings.extend(timestamps(name, config));
    findings.into_iter().map(Said::from).collect()
}

fn value<'c>(config: &'c TopicConfig, name: &str) -> Option<&'c str> {
    let (_, value) = config.iter().find(|(own, _)| own == name)?;
    Some(value)
}

fn number(config: &TopicConfig, name: &str) -> Option<u64> {
    value(config, name)?.parse().ok()
}

fn in_sync(name: &str, topic: &Topic, config: &TopicConfig) -> Option<Finding> {
    let min = usize::try_from(number(config, "min.insync.replicas")?).ok()?;
    let subject = format!("topic {name}");
    let short: Vec<&Partition> = topic
        .partitions
        .iter()
        .filter(|partition| partition.in_sync < min.min(partition.replicas))
        .collect();
    if let Some(worst) = short.iter().map(|p| p.in_sync).min() {
        return Some(Finding::failed(
            subject,
            format!(
                "topic {name}: {} with {worst} in-sync replicas, below min.insync.replicas {min}: \
                 nothing would be delivered there",
                named(&short)
            ),
            "bring the missing brokers back, or put replication factor and min.insync.replicas \
             right",
        ));
    }
    // Kafka from 4 on asks for no more replicas than there are; before, for what is written.
    let few: Vec<&Partition> = topic
        .partitions
        .iter()
        .filter(|partition| partition.replicas < min)
        .collect();
    if !few.is_empty() {
        return Some(Finding::warning(
            subject,
            format!(
                "topic {name}: {} with fewer replicas than min.insync.replicas {min}: Kafka before \
                 4 delivers nothing there",
                named(&few)
            ),
            "raise the replication factor, or lower min.insync.replicas",
        ));
    }
    // One replica is a warning of its own.
    let tight: Vec<&Partition> = topic
        .partitions
        .iter()
        .filter(|partition| partition.in_sync == min && partition.replicas > 1)
        .collect();
    (!tight.is_empty()).then(|| {
        Finding::warning(
            subject,
            format!(
                "topic {name}: {} with no in-sync replica above min.insync.replicas {min}: one \
                 more broker away, and nothing is delivered there",
                named(&tight)
            ),
            "bring missing brokers back, or raise the replication factor above \
             min.insync.replicas",
        )
    })
}

fn sizes(name: &str, config: &TopicConfig) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(bytes) = number(config, "max.message.bytes")
        && bytes < MESSAGE_BYTES_USUAL
    {
        findings.push(Finding::warning(
            format!("topic {name}"),
            format!(
                "topic {name}: max.message.bytes is {bytes}, below Kafka's default of \
                 {MESSAGE_BYTES_USUAL}: larger events are refused"
            ),
            "raise max.message.bytes of the topic, or keep payloads below it",
        ));
    }
    if value(config, "cleanup.policy").is_some_and(|policy| policy.contains("compact")) {
        findings.push(Finding::warning(
            format!("topic {name}"),
            format!(
                "topic {name} is compacted: it refuses an event without a key, and keeps only the \
                 newest event of each key"
            ),
            "set cleanup.policy=delete, unless consumers want just that",
        ));
    }
    findings
}

fn timestamps(name: &str, config: &TopicConfig) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut warn = |found: String, remedy: &str| {
        findings.push(Finding::warning(format!("topic {name}"), found, remedy));
    };
    if value(config, "message.timestamp.type") == Some("LogAppendTime") {
        warn(
            format!(
                "topic {name}: message.timestamp.type is LogAppendTime: records carry the \
                 broker's time, not the commit's"
            ),
            "set message.timestamp.type=CreateTime where consumers count on commit time",
        );
    }
    if let Some(millis) = number(config, "message.timestamp.after.max.ms")
        && millis < TIMESTAMP_AFTER_USUAL
    {
        warn(
            format!(
                "topic {name}: message.timestamp.after.max.ms is {millis}: events are refused when \
                 the database's clock is further ahead"
            ),
            "raise message.timestamp.after.max.ms to 3600000, Kafka's default",
        );
    }
    if let Some(millis) = number(config, "message.timestamp.before.max.ms")
        && millis < i64::MAX.unsigned_abs()
    {
        warn(
            format!(
                "topic {name}: message.timestamp.before.max.ms is {millis}: events that waited \
                 for longer are refused"
            ),
            "leave message.timestamp.before.max.ms at Kafka's default (no limit)",
        );
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::State;
    use crate::io::kafka::native::admin::Rights;
    use crate::record::KafkaCode;

    fn address(text: &str) -> Address {
        Address::list(text).remove(0)
    }

    fn bad(text: &str, why: Unreachable) -> Probed {
        (address(text), Err(why))
    }

    fn good(text: &str) -> Probed {
        (address(text), Ok(()))
    }

    fn notice(code: i32, text: &str) -> Heard {
        Heard {
            notice: Some(ClientNotice {
                code: KafkaCode(code),
                text: text.to_owned(),
                times: 1,
            }),
            ..Heard::default()
        }
    }

    // Case K01.
    #[test]
    fn a_broker_that_cannot_be_reached_is_named_with_what_stands_in_the_way() {
        let said = nobody(&[bad("no-such-host.invalid:9092", Unreachable::NotResolved)]);
        assert_eq!(said.finding.state, State::Failed);
        assert_eq!(said.finding.found, "cannot resolve no-such-host.invalid");
        assert_eq!(said.heals, Heals::WithTime);
        let said = nobody(&[
            bad("a:1", Unreachable::Refused),
            bad("b:2", Unreachable::TimedOut),
        ]);
        assert!(said.finding.found.contains("a:1 refuses"));
        assert!(said.finding.found.contains("b:2 does not answer"));
    }

    // Case K02, and K01 with one good host.
    #[test]
    fn an_advertised_address_is_judged_apart_from_the_bootstrap_one() {
        let nodes = [
            Node {
                id: 1,
                host: "kafka-internal.invalid".to_owned(),
                port: 9092,
            },
            Node {
                id: 2,
                host: "b".to_owned(),
                port: 1,
            },
        ];
        let bootstrap = [bad("c:1", Unreachable::NotResolved), good("b:1")];
        let probed = [bad("kafka-internal.invalid:9092", Unreachable::NotResolved)];
        let said = cluster(&bootstrap, &nodes, &probed);
        let states: Vec<State> = said.iter().map(|s| s.finding.state).collect();
        assert_eq!(states, [State::Ok, State::Warning, State::Failed]);
        assert_eq!(said[0].finding.found, "b:1 answers: 2 brokers");
        assert!(said[1].finding.found.starts_with("cannot resolve c;"));
        assert_eq!(
            said[2].finding.found,
            "bootstrap b:1 answered, but broker 1 advertises kafka-internal.invalid:9092, which \
             cannot be resolved from here"
        );
        let remedy = said[2].finding.remedy.as_deref();
        assert_eq!(remedy, Some("fix advertised.listeners or DNS"));
        assert!(said.iter().all(|s| s.heals == Heals::WithTime));
    }

    // Case K03.
    #[test]
    fn a_refusal_is_for_the_operator_and_a_silence_for_time() {
        let at = ["k:1".to_owned()];
        for (code, text, remedy) in [
            (
                -169,
                "SASL authentication error: invalid credentials",
                "sasl.password",
            ),
            (
                -195,
                "Disconnected: connecting to a PLAINTEXT broker listener?",
                "no TLS",
            ),
            (
                -169,
                "handshake failed: broker's supported mechanisms: ",
                "sasl.mechanism",
            ),
            (
                -181,
                "certificate verify failed: unable to get issuer",
                "ssl.ca.location",
            ),
            (
                -181,
                "certificate verify failed: hostname mismatch",
                "advertised.listeners",
            ),
            (
                -195,
                "ssl/tls alert certificate required: Receive failed",
                "ssl.key.location",
            ),
        ] {
            let said = no_answer(&at, &notice(code, text));
            assert_eq!(said.heals, Heals::Never, "{text}");
            assert!(said.finding.found.contains(text));
            assert!(said.finding.remedy.expect("one").contains(remedy), "{text}");
        }
        for (code, text) in [
            (-195, "Receive failed: Connection reset by peer"),
            (-187, "1/1 brokers are down"),
            (
                -169,
                "SaslAuthenticate failed: Local: Broker transport failure",
            ),
            (
                -169,
                "Failed to acquire SASL OAUTHBEARER token: exit status 1",
            ),
        ] {
            let said = no_answer(&at, &notice(code, text));
            assert_eq!(said.heals, Heals::WithTime, "{text}");
        }
        let said = no_answer(&at, &Heard::default());
        assert!(
            said.finding
                .remedy
                .expect("one")
                .contains("security.protocol")
        );
    }

    fn partition(id: i32, replicas: usize, in_sync: usize) -> Partition {
        Partition {
            id,
            leader: Some(1),
            replicas,
            in_sync,
        }
    }

    fn topic(partitions: Vec<Partition>) -> Topic {
        Topic {
            partitions,
            rights: Some(Rights {
                write: true,
                read: true,
                describe_configs: true,
            }),
        }
    }

    fn look_at(answer: Result<Topic, Refusal>, config: &[(&str, &str)]) -> Vec<Said> {
        look_with(answer, config, None)
    }

    fn look_with(
        answer: Result<Topic, Refusal>,
        config: &[(&str, &str)],
        create: Option<CreateTopics>,
    ) -> Vec<Said> {
        let name = "t".to_owned();
        let config = config
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let heard = Heard {
            topics: Some(Ok(HashMap::from([(name.clone(), answer)]))),
            configs: Some(Ok(HashMap::from([(name.clone(), Ok(config))]))),
            ..Heard::default()
        };
        topics(&[name], &heard, create)
    }

    fn refusal(code: i32) -> Result<Topic, Refusal> {
        Err(Refusal {
            code: KafkaCode(code),
            text: "words".to_owned(),
        })
    }

    /// The one finding beside the one that says that the topic is there.
    #[track_caller]
    fn beside(partitions: Vec<Partition>, config: &[(&str, &str)]) -> (State, String) {
        let mut said = look_at(Ok(topic(partitions)), config);
        assert_eq!(
            said.len(),
            2,
            "{:?}",
            said.iter().map(|s| &s.finding).collect::<Vec<_>>()
        );
        assert_eq!(said[0].finding.state, State::Ok);
        let finding = said.remove(1).finding;
        assert!(finding.remedy.is_some());
        (finding.state, finding.found)
    }

    #[test]
    fn an_absent_topic_is_to_be_made_by_whoever_was_asked_to() {
        let said = look_at(refusal(UNKNOWN_TOPIC), &[]);
        assert_eq!(said[0].finding.state, State::Failed);
        assert_eq!(said[0].heals, Heals::WithTheTopic);
        let remedy = said[0].finding.remedy.as_deref();
        assert_eq!(remedy, Some("create t, or --create-topics PARTITIONS"));
        let create = CreateTopics {
            partitions: 6,
            replication: None,
        };
        let said = look_with(refusal(UNKNOWN_TOPIC), &[], Some(create));
        assert_eq!(said[0].finding.state, State::Ok);
        assert!(said[0].finding.found.contains("6 partitions"));
    }

    #[test]
    fn missing_rights_are_for_the_operator() {
        let said = look_at(refusal(TOPIC_AUTHORIZATION_FAILED), &[]);
        assert_eq!(
            (said[0].finding.state, said[0].heals),
            (State::Failed, Heals::Never)
        );
        let mut mute = topic(vec![partition(0, 3, 3)]);
        mute.rights = Some(Rights {
            write: false,
            read: true,
            describe_configs: true,
        });
        let said = look_at(Ok(mute), &[]);
        assert_eq!(
            (said[0].finding.state, said[0].heals),
            (State::Failed, Heals::Never)
        );
        let mut unread = topic(vec![partition(0, 3, 3)]);
        unread.rights = Some(Rights {
            write: true,
            read: false,
            describe_configs: true,
        });
        let said = look_at(Ok(unread), &[]);
        assert_eq!(said[0].finding.state, State::Ok);
        assert_eq!(said[1].finding.state, State::Warning);
        assert!(said[1].finding.found.contains("events may be repeated"));
        let remedy = said[1].finding.remedy.as_deref();
        assert_eq!(remedy, Some("grant this principal Read on topic t"));
        let mut old = topic(vec![partition(0, 3, 3)]);
        old.rights = None;
        let said = look_at(Ok(old), &[]);
        assert_eq!(said[0].finding.state, State::Ok);
        assert!(said[0].finding.found.contains("shows at the first event"));
    }

    #[test]
    fn settings_that_may_not_be_read_are_unknown() {
        let name = "t".to_owned();
        let denied = Refusal {
            code: KafkaCode(TOPIC_AUTHORIZATION_FAILED),
            text: "Topic authorization failed".to_owned(),
        };
        let present = Ok(topic(vec![partition(0, 3, 3)]));
        let heard = Heard {
            topics: Some(Ok(HashMap::from([(name.clone(), present)]))),
            configs: Some(Ok(HashMap::from([(name.clone(), Err(denied))]))),
            ..Heard::default()
        };
        let said = topics(std::slice::from_ref(&name), &heard, None);
        assert_eq!(said[1].finding.state, State::Unknown);
        let silent = topics(&[name], &Heard::default(), None);
        assert_eq!(silent[0].finding.state, State::Unknown);
    }

    #[test]
    fn replicas_are_held_against_the_minimum() {
        let two = &[("min.insync.replicas", "2")];
        let (state, found) = beside(vec![partition(0, 3, 3), partition(7, 3, 1)], two);
        assert_eq!(state, State::Failed);
        assert!(found.contains("partition 7 with 1 in-sync"), "{found}");
        let (state, _) = beside(vec![partition(0, 3, 2)], two);
        assert_eq!(state, State::Warning);
        let said = look_at(Ok(topic(vec![partition(0, 1, 1)])), two);
        assert!(said.iter().all(|s| s.finding.state != State::Failed));
        let said = said
            .iter()
            .find(|s| s.finding.found.contains("Kafka before 4"));
        assert_eq!(said.map(|s| s.finding.state), Some(State::Warning));
        let (state, found) = beside(vec![partition(0, 1, 1)], &[("min.insync.replicas", "1")]);
        assert_eq!(state, State::Warning);
        assert!(found.contains("one replica"), "{found}");
        assert_eq!(look_at(Ok(topic(vec![partition(0, 3, 3)])), two).len(), 1);
        let mut headless = partition(4, 3, 3);
        headless.leader = None;
        let (state, found) = beside(vec![headless], two);
        assert_eq!(state, State::Failed);
        assert!(found.contains("partition 4 without a leader"), "{found}");
    }

    #[test]
    fn settings_of_a_topic_that_refuse_events_are_warned_of() {
        for (name, value, words) in [
            ("max.message.bytes", "20000", "20000"),
            ("cleanup.policy", "compact,delete", "compacted"),
            ("message.timestamp.type", "LogAppendTime", "LogAppendTime"),
            ("message.timestamp.after.max.ms", "1", "further ahead"),
            ("message.timestamp.before.max.ms", "86400000", "waited"),
        ] {
            let (state, found) = beside(vec![partition(0, 3, 3)], &[(name, value)]);
            assert_eq!(state, State::Warning, "{name}");
            assert!(found.contains(words), "{found}");
        }
        let usual = [
            ("max.message.bytes", "1048588"),
            ("cleanup.policy", "delete"),
            ("message.timestamp.type", "CreateTime"),
            ("message.timestamp.after.max.ms", "3600000"),
            ("message.timestamp.before.max.ms", "9223372036854775807"),
        ];
        assert_eq!(
            look_at(Ok(topic(vec![partition(0, 3, 3)])), &usual).len(),
            1
        );
    }
}
