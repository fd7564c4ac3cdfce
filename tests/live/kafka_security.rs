//! Every way to log in to Kafka, and every way to be refused.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::certs::Authority;
use crate::http;
use crate::kafka_secured::{Client, PASSWORD, Secured, good, path};
use crate::postgres::{Cluster, Pg};
use crate::proc::{self, eventually, eventually_says};
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
    start_with(stage, brokers, properties, &[], &[])
}

fn start_with(
    stage: &Stage<'_>,
    brokers: &str,
    properties: &[(&str, &str)],
    more: &[&str],
    env: &[(&str, &str)],
) -> Relay {
    let mut args = line(stage, brokers, properties);
    if more.contains(&"--http") {
        args.retain(|arg| arg != "--http" && arg != "off");
    }
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    args.extend(more);
    Relay::start(&args, env)
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
    let ca = path(&secured.ca);
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
        let client = Client::of(&secured.ca, "client", password);
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
    let ca = path(&secured.ca);
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
    let strange = path(&stranger);
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
    let client = Client::of(&stranger, "client", None);
    let mut foreign = tls.to_vec();
    foreign.push(("ssl.certificate.location", &client.certificate));
    foreign.push(("ssl.key.location", &client.key));
    refused(&stage, &secured.ssl, &foreign, &["alert"]);
}

#[test]
fn secrets_come_from_variables_and_files_and_stay_there() {
    let (secured, stage) = (Secured::shared(), stage());
    let dir = proc::dir("secrets");
    let file = dir.join("password");
    fs::write(&file, format!("{PASSWORD}\n")).expect("the directory is ours");
    let ca = path(&secured.ca);
    let from_file = format!("${{file:{}}}", file.display());
    let properties = scram(&ca, "${env:KAFKA_USER}", &from_file);
    let env = [("KAFKA_USER", "scram256"), ("RUST_LOG", "debug")];
    let mut relay = start_with(&stage, &secured.sasl_ssl, &properties, &[], &env);
    delivers(&stage, 1, &relay);
    relay.stop();
    says_no_secret(&relay.said());

    // The same from the file of settings, with tables and dotted keys, and from the environment.
    let settings = dir.join("walrelay.toml");
    let text = format!(
        "[kafka]\nsecurity.protocol = \"sasl_ssl\"\nssl.ca.location = {ca:?}\n\
         [kafka.sasl]\nmechanism = \"SCRAM-SHA-256\"\nusername = \"scram256\"\n"
    );
    fs::write(&settings, text).expect("the directory is ours");
    let lines = format!("linger.ms=1\nsasl.password={from_file}\ndebug=all\n");
    let env = [
        ("WALRELAY_KAFKA", lines.as_str()),
        ("WALRELAY_CONFIG", settings.to_str().expect("plain")),
        ("RUST_LOG", "debug"),
    ];
    let mut relay = start_with(&stage, &secured.sasl_ssl, &[], &[], &env);
    delivers(&stage, 2, &relay);
    relay.stop();
    assert!(
        relay.said().contains("sasl.mechanisms"),
        "librdkafka tells all it does"
    );
    says_no_secret(&relay.said());
}

type Pairs<'a> = &'a [(&'a str, &'a str)];

// Case K12, and what else is wrong before anybody is asked.
#[test]
fn k12_bad_properties_are_usage_errors_before_connecting() {
    let secured = Secured::shared();
    let stranger = Authority::new("stranger");
    let plain = Client::of(&stranger, "client", None);
    let locked = Client::of(&stranger, "client", Some("k3y-passw0rd"));
    let ca = path(&secured.ca);
    let ssl = ("security.protocol", "ssl");
    let certificate = |client: &'static Client| ("ssl.certificate.location", &*client.certificate);
    let key = |client: &'static Client| ("ssl.key.location", &*client.key);
    let (plain, locked): (&Client, &Client) = (Box::leak(plain.into()), Box::leak(locked.into()));
    let cases: &[(Pairs<'_>, &[&str])] = &[
        (&[("message.timeout.ms", "5000")], &["would lose events"]),
        (&[("acks", "1")], &["would lose events"]),
        (&[("enable.idempotence", "false")], &["would lose"]),
        (
            &[("linger", "5")],
            &["no Kafka property linger", "linger.ms"],
        ),
        (&[("compression.codec", "brotli")], &["brotli"]),
        (
            &[("sasl.jaas.config", PASSWORD)],
            &["Java", "sasl.username"],
        ),
        (&[("sasl.password", PASSWORD)], &["security.protocol"]),
        (
            &[("sasl.password", "${file:/no/such/secret}")],
            &["sasl.password", "/no/such/secret"],
        ),
        (
            &[("sasl.password", "${env:NO_SUCH}")],
            &["sasl.password", "NO_SUCH"],
        ),
        (&[ssl, certificate(plain)], &["ssl.key.location"]),
        (
            &[ssl, certificate(plain), key(locked)],
            &["ssl.key.password"],
        ),
        (
            &[
                ssl,
                certificate(plain),
                key(locked),
                ("ssl.key.password", PASSWORD),
            ],
            &["ssl.key.password"],
        ),
        (&[ssl, certificate(locked), key(plain)], &["mismatch"]),
        (
            &[ssl, ("ssl.ca.location", &plain.key)],
            &["ssl.ca.location"],
        ),
        (&[("ssl.ca.location", &ca)], &["no TLS is spoken"]),
    ];
    for (properties, words) in cases {
        let mut args = vec!["run", "--brokers", "127.0.0.1:1", "--http", "off"];
        let pairs: Vec<String> = properties.iter().map(|(k, v)| format!("{k}={v}")).collect();
        for pair in &pairs {
            args.extend(["--kafka", pair]);
        }
        let ended = run_to_end(&args, &[], MINUTE).expect_code(2);
        for word in *words {
            assert!(
                ended.stderr.contains(word),
                "{word:?} is not in:\n{}",
                ended.stderr
            );
        }
        let last = ended.stderr.lines().last().unwrap_or_default();
        assert!(last.starts_with("remedy: "), "{}", ended.stderr);
        says_no_secret(&ended.stderr);
    }
}

fn base64(text: &str) -> String {
    let padded = openssl::base64::encode_block(text.as_bytes());
    padded.replace('+', "-").replace('/', "_").replace('=', "")
}

/// A shell command that prints a token of `sub` that lives for some seconds from when it is run.
fn token_command(sub: &str, seconds: u32, log: &Path) -> String {
    let head = base64("{\"alg\":\"none\"}");
    let log = log.display();
    format!(
        "now=$(date +%s); echo run >> {log}; \
         claims=$(printf '{{\"sub\":\"{sub}\",\"iat\":%d,\"exp\":%d}}' $now $((now+{seconds})) \
         | base64 -w0 | tr '+/' '-_' | tr -d =); printf '{head}.%s.' $claims"
    )
}

#[test]
fn tokens_of_a_command_log_in_and_are_renewed() {
    let (secured, stage) = (Secured::shared(), stage());
    let dir = proc::dir("token");
    let log = dir.join("runs");
    let runs = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let oauth = [
        ("security.protocol", "sasl_plaintext"),
        ("sasl.mechanism", "OAUTHBEARER"),
    ];
    let switch = dir.join("command.sh");
    fs::write(&switch, token_command("token", 6, &log)).expect("the directory is ours");
    let command = format!("sh {}", switch.display());
    let more = [
        "--kafka-token-command",
        command.as_str(),
        "--create-topics",
        "3",
    ];
    let env = [("RUST_LOG", "debug")];
    let mut relay = start_with(&stage, &secured.oauth, &oauth, &more, &env);
    delivers(&stage, 1, &relay);
    eventually(MINUTE, "the token is renewed", || {
        (runs() >= 3).then_some(())
    });
    delivers(&stage, 2, &relay);
    // A topic that is to be made: the admin API logs in too.
    stage.db.connect().run(&ROW.replace("'t'", "'made'"));
    stage.broker.wait_count(&stage.topic("made"), 1, MINUTE);

    // The command fails: said with its status, and the connection is used while the token lasts.
    fs::write(&switch, "echo no realm >&2; exit 7").expect("the directory is ours");
    relay.wait_for("a failed command", MINUTE, |line| {
        line.level() == "WARN" && line.has("exit status: 7; its standard error is not repeated")
    });
    relay.wait_for("what is to be done", MINUTE, |line| {
        line.level() == "ERROR" && line.has("exit status: 7") && line.has("--kafka-token-command")
    });
    relay.assert_alive();
    stage.db.connect().run(ROW);
    fs::write(&switch, token_command("token", 600, &log)).expect("the directory is ours");
    stage.wait_count("t", 3, MINUTE);
    relay.wait_for_text("reachable again", MINUTE);
    relay.stop();
    let said = relay.said();
    let head = base64("{\"alg\":\"none\"}");
    assert!(!said.contains(&head), "a token is printed:\n{said}");
    assert!(
        !said.contains("no realm"),
        "what it says is printed:\n{said}"
    );
}

#[test]
fn a_token_that_is_refused_or_never_comes() {
    let (secured, stage) = (Secured::shared(), stage());
    let oauth = [
        ("security.protocol", "sasl_plaintext"),
        ("sasl.mechanism", "OAUTHBEARER"),
    ];
    let mut relay = start_with(
        &stage,
        &secured.oauth,
        &oauth,
        &["--kafka-token-command", "echo s3cr3t-token-without-a-life"],
        &[],
    );
    relay.wait_for("no lifetime", MINUTE, |line| {
        line.level() == "ERROR" && line.has("without a lifetime")
    });
    relay.stop();
    assert!(!relay.said().contains("s3cr3t"), "{}", relay.said());

    let args = line(&stage, &secured.oauth, &oauth);
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    // No claims that the broker knows: it refuses the token.
    args.extend([
        "--kafka-token-command",
        "echo '{\"access_token\":\"s3cr3t.s3cr3t.s3cr3t\",\"expires_in\":600}'",
    ]);
    let ended = run_to_end(&args, &[], MINUTE).expect_code(3);
    assert!(
        ended.stderr.contains("--kafka-token-command"),
        "{}",
        ended.stderr
    );
    assert!(!ended.stderr.contains("s3cr3t"), "{}", ended.stderr);
}

/// Waits for this answer of `/readyz`.
fn becomes(address: &str, status: u16, words: &str) {
    let last = RefCell::new(String::new());
    eventually_says(
        MINUTE,
        || format!("{status} with {words:?}, not {}", last.borrow()),
        || {
            let reply = http::get(address, "/readyz");
            let is_it = reply.status == status && reply.body.contains(words);
            *last.borrow_mut() = reply.body;
            is_it.then_some(())
        },
    );
}

/// Case K03 while the relay runs: each fault is waited out, and nothing is lost or said twice.
/// README: a password is rotated while the relay runs.
#[test]
fn k03_rotated_passwords_and_bad_certificates_are_waited_out() {
    let secured = Secured::start();
    let stage = Stage::on(Cluster::shared(Pg::V15), &secured.broker);
    stage.init();
    let ca = path(&secured.ca);
    let file = proc::dir("rotated").join("password");
    fs::write(&file, PASSWORD).expect("the directory is ours");
    let from_file = format!("${{file:{}}}", file.display());
    let mut properties = scram(&ca, "plain", &from_file);
    properties[2].1 = "PLAIN";
    let http = ["--http", "127.0.0.1:0"];
    let mut relay = start_with(&stage, &secured.sasl_ssl, &properties, &http, &[]);
    let address = http::address(&mut relay);
    delivers(&stage, 1, &relay);
    becomes(&address, 200, "");

    // The password is changed on the broker, later in the file.
    secured.broker.kill9();
    secured.broker.reconfigure(PASSWORD, "n3w-s3cr3t");
    secured.broker.up();
    stage.db.connect().run(ROW);
    relay.wait_for("the refused password", MINUTE, |line| {
        line.level() == "ERROR" && line.has("sasl.password") && line.has("remedy")
    });
    relay.assert_alive();
    becomes(&address, 503, "sasl.password");
    assert_eq!(secured.broker.count(&stage.topic("t")), 1);
    fs::write(&file, "n3w-s3cr3t\n").expect("the directory is ours");
    stage.wait_count("t", 2, MINUTE);
    relay.wait_for_text("reachable again", MINUTE);

    // The broker's certificate is one that nobody here trusts, of another name, or too old.
    secured.broker.kill9();
    secured.show(&good(&Authority::new("wrong")));
    secured.broker.up();
    stage.db.connect().run(ROW);
    relay.wait_for("the certificate", MINUTE, |line| {
        line.level() == "ERROR" && line.has("verify failed") && line.has("ssl.ca.location")
    });
    relay.assert_alive();
    for (bad, words) in [
        (
            secured.ca.sign("other", &["other.example"]),
            ["mismatch", "advertised.listeners"],
        ),
        (
            secured.ca.sign_expired("localhost", &["127.0.0.1"]),
            ["expired", "renewed"],
        ),
    ] {
        secured.broker.kill9();
        secured.show(&bad);
        secured.broker.up();
        relay.wait_for(words[0], MINUTE, |line| {
            line.level() == "ERROR" && words.iter().all(|word| line.has(word))
        });
    }
    assert_eq!(secured.broker.count(&stage.topic("t")), 2);
    secured.broker.kill9();
    secured.show(&good(&secured.ca));
    secured.broker.up();
    stage.wait_count("t", 3, MINUTE);
    stage.wait_confirmed(MINUTE);
    becomes(&address, 200, "");
    relay.stop();
    let said = relay.said();
    says_no_secret(&said);
    assert!(!said.contains("n3w-s3cr3t"), "{said}");
    assert_eq!(secured.broker.read_all(&stage.topic("t")).len(), 3);
}

fn is_gone(pid: &str) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Whoever adopts orphans may be slow to bury them.
    state.is_empty() || state.contains(") Z ")
}

#[test]
fn a_token_command_ends_with_whoever_runs_it() {
    let (secured, stage) = (Secured::shared(), stage());
    let oauth = [
        ("security.protocol", "sasl_plaintext"),
        ("sasl.mechanism", "OAUTHBEARER"),
    ];
    let file = proc::dir("token").join("pids");
    let command = format!(
        "echo $$ >> {0}; sleep 1000 & echo $! >> {0}; wait",
        file.display()
    );
    let more = ["--kafka-token-command", command.as_str()];
    let pids = |count: usize| {
        let text = fs::read_to_string(&file).unwrap_or_default();
        let pids: Vec<String> = text.lines().map(str::to_owned).collect();
        (pids.len() == count).then_some(pids)
    };
    let mut relay = start_with(&stage, &secured.oauth, &oauth, &more, &[]);
    let started = eventually(MINUTE, "the command runs", || pids(2));
    assert!(!started.iter().any(|pid| is_gone(pid)));
    relay.kill9();
    eventually(MINUTE, "it ends with the relay", || {
        started.iter().all(|pid| is_gone(pid)).then_some(())
    });

    let mut args = line(&stage, &secured.oauth, &oauth);
    args[0] = "check".to_owned();
    args.retain(|arg| arg != "--http" && arg != "off");
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    args.extend(more);
    run_to_end(&args, &[], MINUTE).expect_code(3);
    let started = pids(4).expect("it was run");
    eventually(MINUTE, "it ends with the check", || {
        started.iter().all(|pid| is_gone(pid)).then_some(())
    });
}

#[test]
fn rights_that_are_missing_are_named_until_they_are_granted() {
    let secured = Secured::start();
    let stage = Stage::on(Cluster::shared(Pg::V15), &secured.broker);
    stage.init();
    let guest = [
        ("security.protocol", "sasl_plaintext"),
        ("sasl.mechanism", "SCRAM-SHA-256"),
        ("sasl.username", "guest"),
        ("sasl.password", PASSWORD),
    ];
    let grant = format!(
        "grant this principal Write and Describe on topic {}",
        stage.topic("t")
    );
    stage.db.connect().run(ROW);
    // A topic that is known at the start is asked for there.
    let mut args = line(&stage, &secured.sasl_plaintext, &guest);
    let template = args.iter().position(|arg| arg.contains('{')).expect("one");
    args[template] = stage.topic("t");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let ended = run_to_end(&args, &[], MINUTE).expect_code(3);
    assert!(ended.stderr.contains(&grant), "{}", ended.stderr);

    let http = ["--http", "127.0.0.1:0"];
    let mut relay = start_with(&stage, &secured.sasl_plaintext, &guest, &http, &[]);
    let address = http::address(&mut relay);
    relay.wait_for("the topic's right", MINUTE, |line| {
        line.level() == "ERROR" && line.has(&grant)
    });
    relay.wait_for("the cluster's right", MINUTE, |line| {
        line.level() == "ERROR" && line.has("Cluster authorization") && line.has("IdempotentWrite")
    });
    becomes(&address, 503, &grant);
    becomes(&address, 503, "IdempotentWrite");
    let body = http::get(&address, "/readyz").body;
    assert!(!body.contains("look at the brokers"), "{body}");
    relay.assert_alive();
    secured.broker.kill9();
    secured
        .broker
        .reconfigure("super.users=", "super.users=User:guest;");
    secured.broker.up();
    stage.wait_count("t", 1, MINUTE);
    becomes(&address, 200, "");
    relay.stop();
    says_no_secret(&relay.said());
}
