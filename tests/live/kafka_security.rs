//! Every way to log in to Kafka, and every way to be refused.

use std::time::Duration;

use crate::kafka_secured::{Authority, PASSWORD, Secured};
use crate::postgres::{Cluster, Pg};
use crate::proc;
use crate::relay::{Ended, Relay, run_to_end};
use crate::stage::{MINUTE, Stage};

const ROW: &str = "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
                   values (gen_random_uuid(), 't', 'k', 'e', '{}')";

fn stage() -> Stage<'static> {
    let stage = Stage::on(Cluster::shared(Pg::V18), &Secured::shared().broker);
    stage.init();
    stage
}

/// The arguments of a run against one listener with these properties.
fn line(stage: &Stage<'_>, brokers: &str, properties: &[(&str, &str)]) -> Vec<String> {
    let mut args: Vec<String> = [
        "run",
        "--database-url",
        &stage.db.url(),
        "--slot",
        &stage.db.slot(),
        "--brokers",
        brokers,
        "--http",
        "off",
        "--topic",
        &format!("{}.{{aggregate_type}}", stage.prefix),
    ]
    .map(str::to_owned)
    .to_vec();
    for (name, value) in properties {
        args.extend(["--kafka".to_owned(), format!("{name}={value}")]);
    }
    args
}

fn start(stage: &Stage<'_>, brokers: &str, properties: &[(&str, &str)]) -> Relay {
    let args = line(stage, brokers, properties);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Relay::start(&args, &[])
}

fn delivers(stage: &Stage<'_>, records: usize, relay: &Relay) {
    stage.db.connect().run(ROW);
    stage
        .broker
        .wait_count_while(&stage.topic("t"), records, MINUTE, || {
            assert!(!proc::ended_unnoticed(relay.pid()), "{}", relay.said());
        });
}

fn says_no_secret(said: &str) {
    assert!(!said.contains(PASSWORD), "a password is printed:\n{said}");
}

#[track_caller]
fn refused(stage: &Stage<'_>, brokers: &str, properties: &[(&str, &str)], words: &[&str]) -> Ended {
    let args = line(stage, brokers, properties);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let from = std::time::Instant::now();
    let ended = run_to_end(&args, &[], MINUTE).expect_code(3);
    assert!(
        from.elapsed() < Duration::from_secs(8),
        "{:?}",
        from.elapsed()
    );
    for word in words {
        assert!(
            ended.stderr.contains(word),
            "{word:?} is not in:\n{}",
            ended.stderr
        );
    }
    says_no_secret(&ended.stderr);
    ended
}

fn scram<'a>(ca: &'a str, user: &'a str, password: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("security.protocol", "sasl_ssl"),
        ("ssl.ca.location", ca),
        ("sasl.mechanism", "SCRAM-SHA-256"),
        ("sasl.username", user),
        ("sasl.password", password),
    ]
}

#[test]
fn sasl_and_client_certificates_deliver() {
    let (secured, stage) = (Secured::shared(), stage());
    let ca = secured.ca.path();
    let mut records = 0;
    for (brokers, protocol, mechanism, user) in [
        (&secured.sasl_plaintext, "sasl_plaintext", "PLAIN", "plain"),
        (
            &secured.sasl_plaintext,
            "SASL_PLAINTEXT",
            "SCRAM-SHA-256",
            "scram256",
        ),
        (&secured.sasl_ssl, "sasl_ssl", "SCRAM-SHA-512", "scram512"),
    ] {
        let mut properties = vec![
            ("security.protocol", protocol),
            ("sasl.mechanism", mechanism),
            ("sasl.username", user),
            ("sasl.password", PASSWORD),
        ];
        if protocol == "sasl_ssl" {
            properties.push(("ssl.ca.location", &ca));
        }
        records += 1;
        let mut relay = start(&stage, brokers, &properties);
        delivers(&stage, records, &relay);
        relay.stop();
        says_no_secret(&relay.said());
    }
    for password in [None, Some("k3y-passw0rd")] {
        let client = secured.ca.client("client", password);
        let mut properties = vec![
            ("security.protocol", "ssl"),
            ("ssl.ca.location", ca.as_str()),
            ("ssl.certificate.location", &client.certificate),
            ("ssl.key.location", &client.key),
        ];
        properties.extend(password.map(|password| ("ssl.key.password", password)));
        records += 1;
        let mut relay = start(&stage, &secured.ssl, &properties);
        delivers(&stage, records, &relay);
        relay.stop();
        assert!(!relay.said().contains("k3y-passw0rd"), "{}", relay.said());
    }
}

// Case K03, and the certificates that go with it.
#[test]
fn k03_a_refusal_at_the_start_ends_it_with_the_librarys_reason() {
    let (secured, stage) = (Secured::shared(), stage());
    let ca = secured.ca.path();
    let open = secured.broker.bootstrap();
    let wrong = scram(&ca, "scram256", "wr0ng-passw0rd");
    let ended = refused(
        &stage,
        &secured.sasl_ssl,
        &wrong,
        &["invalid credentials", "sasl.password"],
    );
    assert!(!ended.stderr.contains("wr0ng-passw0rd"), "{}", ended.stderr);
    let right = scram(&ca, "scram256", PASSWORD);
    refused(&stage, &open, &right, &["PLAINTEXT broker listener"]);
    let mut sasl = right.clone();
    sasl[0].1 = "sasl_plaintext";
    sasl.remove(1);
    refused(
        &stage,
        &open,
        &sasl,
        &["supported mechanisms", "sasl.mechanism"],
    );
    let stranger = Authority::new("wrong");
    let strange = stranger.path();
    let unknown = scram(&strange, "scram256", PASSWORD);
    refused(
        &stage,
        &secured.sasl_ssl,
        &unknown,
        &["verify failed", "ssl.ca.location"],
    );
    let tls = [
        ("security.protocol", "ssl"),
        ("ssl.ca.location", ca.as_str()),
    ];
    refused(
        &stage,
        &secured.ssl,
        &tls,
        &["alert", "ssl.certificate.location"],
    );
    let client = stranger.client("client", None);
    let mut foreign = tls.to_vec();
    foreign.push(("ssl.certificate.location", &client.certificate));
    foreign.push(("ssl.key.location", &client.key));
    refused(&stage, &secured.ssl, &foreign, &["alert"]);
}
