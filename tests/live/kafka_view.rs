//! How Kafka stands, as `check` and the start of `run` see it, on real brokers.

use std::time::{Duration, Instant};

use walrelay::config::{CreateTopics, Kafka, Property};
use walrelay::finding::{Finding, State};
use walrelay::io::kafka::{self, Settings};

use crate::kafka::Broker;
use crate::kafka_secured::{PASSWORD, Secured, path};
use crate::postgres::{Cluster, Pg, runtime};
use crate::proc::{self, eventually};
use crate::stage::{MINUTE, Stage};

const WITHIN: Duration = Duration::from_secs(5);

fn look_as(
    brokers: &str,
    properties: &[(&str, &str)],
    topics: &[&str],
    create_topics: Option<CreateTopics>,
) -> Vec<Finding> {
    let kafka = Kafka {
        brokers: brokers.to_owned(),
        properties: properties
            .iter()
            .map(|(name, value)| Property::plain(name, value))
            .collect(),
        token_command: None,
        create_topics,
    };
    let topics: Vec<String> = topics.iter().map(|topic| (*topic).to_owned()).collect();
    runtime().block_on(async {
        let settings = Settings::new(&kafka, "look").expect("nothing is wrong in itself");
        kafka::look(&settings, &topics, create_topics, WITHIN).await
    })
}

fn look(brokers: &str, topics: &[&str]) -> Vec<Finding> {
    look_as(brokers, &[], topics, None)
}

#[track_caller]
fn find<'f>(findings: &'f [Finding], state: State, words: &[&str]) -> &'f Finding {
    let is_it = |finding: &&Finding| {
        finding.state == state && words.iter().all(|word| finding.found.contains(word))
    };
    findings
        .iter()
        .find(is_it)
        .unwrap_or_else(|| panic!("nothing {state:?} with {words:?} in {findings:#?}"))
}

fn topic() -> String {
    format!("look-{}-{}", std::process::id(), proc::unique())
}

#[test]
fn a_healthy_cluster_is_looked_at_in_no_time() {
    let broker = Broker::shared();
    let name = topic();
    broker.create_topic(&name, 6);
    // The first client of a process reads OpenSSL's configuration and more.
    look(&broker.bootstrap(), &[&name]);
    let from = Instant::now();
    let findings = look(&broker.bootstrap(), &[&name]);
    assert!(
        from.elapsed() < Duration::from_millis(500),
        "{:?}",
        from.elapsed()
    );
    find(&findings, State::Ok, &["answers: 1 broker"]);
    find(&findings, State::Ok, &["6 partitions; may be written"]);
    find(&findings, State::Warning, &["one replica"]);
    assert_eq!(findings.len(), 3, "{findings:#?}");

    let secured = Secured::shared();
    let ca = path(&secured.ca);
    let scram = [
        ("security.protocol", "sasl_ssl"),
        ("ssl.ca.location", ca.as_str()),
        ("sasl.mechanism", "SCRAM-SHA-256"),
        ("sasl.username", "scram256"),
        ("sasl.password", PASSWORD),
    ];
    let from = Instant::now();
    let findings = look_as(&secured.sasl_ssl, &scram, &[], None);
    assert!(
        from.elapsed() < Duration::from_millis(1000),
        "{:?}",
        from.elapsed()
    );
    find(&findings, State::Ok, &["answers: 1 broker"]);
}

// Case K01.
#[test]
fn k01_a_bootstrap_name_that_does_not_resolve_is_named() {
    let findings = look("no-such-host.invalid:9092", &[]);
    find(
        &findings,
        State::Failed,
        &["cannot resolve no-such-host.invalid"],
    );
    let broker = Broker::shared();
    let both = format!("no-such-host.invalid:9092,{}", broker.bootstrap());
    let findings = look(&both, &[]);
    find(
        &findings,
        State::Warning,
        &["cannot resolve no-such-host.invalid"],
    );
    find(&findings, State::Ok, &["answers"]);
    let closed = format!("127.0.0.1:{}", proc::free_port());
    let findings = look(&closed, &[]);
    let finding = find(&findings, State::Failed, &[&closed, "refuses"]);
    assert!(
        finding
            .remedy
            .as_deref()
            .expect("one")
            .contains("start Kafka")
    );

    // The same brokers carry a stream, with one warning.
    let stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    let args: Vec<String> = vec![
        "run".into(),
        "--database-url".into(),
        stage.db.url(),
        "--slot".into(),
        stage.db.slot(),
        "--brokers".into(),
        both,
        "--http".into(),
        "off".into(),
        "--topic".into(),
        format!("{}.{{aggregate_type}}", stage.prefix),
    ];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut relay = crate::relay::Relay::start(&args, &[]);
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k', 'e', '{}')",
    );
    assert_eq!(stage.records(1).len(), 1);
    relay.stop();
    let warnings = relay
        .lines()
        .iter()
        .filter(|line| line.has("cannot resolve no-such-host.invalid"))
        .count();
    assert_eq!(warnings, 1, "{}", relay.said());
}

// Case K02.
#[test]
fn k02_an_advertised_address_that_cannot_be_reached_is_named_by_look_and_run() {
    let broker = Broker::with(&["advertised.listeners=PLAINTEXT://kafka-internal.invalid:9092"]);
    let words = [
        "bootstrap 127.0.0.1:",
        "answered, but broker 1 advertises kafka-internal.invalid:9092, which cannot be resolved \
         from here",
    ];
    let findings = look(&broker.bootstrap(), &[]);
    let finding = find(&findings, State::Failed, &words);
    assert_eq!(
        finding.remedy.as_deref(),
        Some("fix advertised.listeners or DNS")
    );

    let stage = Stage::on(Cluster::shared(Pg::V18), &broker);
    stage.try_init().expect_code(0);
    let mut relay = stage.run();
    relay.wait_for("the same text", MINUTE, |line| {
        line.level() == "ERROR"
            && words.iter().all(|word| line.has(word))
            && line.has("fix advertised.listeners or DNS")
    });
    relay.assert_alive();
    relay.stop();
}

#[test]
fn topics_are_looked_at_with_their_settings() {
    let broker = Broker::shared();
    let (small, compact, absent) = (topic(), topic(), topic());
    broker.create_topic_with(&small, 2, &[("max.message.bytes", "20000")]);
    broker.create_topic_with(&compact, 1, &[("cleanup.policy", "compact")]);
    let findings = look(&broker.bootstrap(), &[&small, &compact, &absent]);
    find(&findings, State::Warning, &[&small, "20000"]);
    find(&findings, State::Warning, &[&compact, "compacted"]);
    let finding = find(&findings, State::Failed, &[&absent, "does not exist"]);
    let remedy = finding.remedy.as_deref().expect("one");
    assert_eq!(
        remedy,
        format!("create {absent}, or --create-topics PARTITIONS")
    );
    let create = CreateTopics {
        partitions: 6,
        replication: None,
    };
    let findings = look_as(&broker.bootstrap(), &[], &[&absent], Some(create));
    find(&findings, State::Ok, &["will be made with 6 partitions"]);
    assert!(!broker.topic_exists(&absent), "looking makes nothing");
    // More replicas wanted than there are: this Kafka takes events all the same, older ones do not.
    let starved = topic();
    broker.create_topic_with(&starved, 1, &[("min.insync.replicas", "2")]);
    let findings = look(&broker.bootstrap(), &[&starved]);
    find(
        &findings,
        State::Warning,
        &[&starved, "min.insync.replicas 2", "Kafka before 4"],
    );
}

#[test]
fn a_user_without_rights_is_told_so() {
    let secured = Secured::shared();
    let name = topic();
    secured.broker.create_topic(&name, 1);
    let guest = [
        ("security.protocol", "sasl_plaintext"),
        ("sasl.mechanism", "SCRAM-SHA-256"),
        ("sasl.username", "guest"),
        ("sasl.password", PASSWORD),
    ];
    let findings = look_as(&secured.sasl_plaintext, &guest, &[&name], None);
    let finding = find(
        &findings,
        State::Failed,
        &[&name, "TOPIC_AUTHORIZATION_FAILED"],
    );
    assert!(
        finding
            .remedy
            .as_deref()
            .expect("one")
            .contains("Write and Describe")
    );
}

#[test]
fn a_topic_that_may_not_be_read_is_a_warning_with_its_remedy() {
    let secured = Secured::shared();
    let name = topic();
    secured.broker.create_topic(&name, 1);
    secured.allow("scribe", &["Write", "Describe"], &name);
    let scribe = [
        ("security.protocol", "sasl_plaintext"),
        ("sasl.mechanism", "SCRAM-SHA-256"),
        ("sasl.username", "scribe"),
        ("sasl.password", PASSWORD),
    ];
    let look = || look_as(&secured.sasl_plaintext, &scribe, &[&name], None);
    // A grant takes a moment to be known.
    let findings = eventually(MINUTE, "it may be written", || {
        let findings = look();
        let is_ok = |finding: &Finding| finding.found.contains("may be written");
        findings.iter().any(is_ok).then_some(findings)
    });
    let words = [&*name, "no Read right", "may be repeated (at least once)"];
    let finding = find(&findings, State::Warning, &words);
    let remedy = format!("grant this principal Read on topic {name}");
    assert_eq!(finding.remedy.as_deref(), Some(&*remedy));
    secured.allow("scribe", &["Read"], &name);
    eventually(MINUTE, "it may be read", || {
        let findings = look();
        let is_ok = |finding: &Finding| finding.found.contains("may be written and read");
        findings.iter().any(is_ok).then_some(())
    });
}

#[test]
fn a_listener_that_wants_more_than_plain_words_is_suspected() {
    let secured = Secured::shared();
    for listener in [&secured.sasl_plaintext, &secured.ssl] {
        let findings = look(listener, &[]);
        let finding = find(&findings, State::Failed, &[listener]);
        let remedy = finding.remedy.as_deref().expect("one");
        assert!(remedy.contains("security.protocol"), "{finding:?}");
    }
}
