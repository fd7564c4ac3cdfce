//! Ways to reach Postgres: sockets, passwords, TLS, the PG* variables, a role that may not write.

use std::time::Duration;

use crate::certs::Authority;
use crate::kafka::Broker;
use crate::postgres::{Cluster, Pg, Stop};
use crate::proc;
use crate::relay::{Ended, Relay, run_to_end};
use crate::stage::{MINUTE, Stage};

const ROW: &str = "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
                   values (gen_random_uuid(), 't', 'k', 'e', '{}')";

/// Starts the relay with this environment and no `--database-url`, writes a row and sees it arrive.
fn streams(stage: &Stage<'_>, records: usize, env: &[(&str, &str)]) {
    let (slot, brokers) = (stage.db.slot(), stage.broker.bootstrap());
    let topic = format!("{}.{{aggregate_type}}", stage.prefix);
    let args = [
        "run",
        "--slot",
        &slot,
        "--brokers",
        &brokers,
        "--topic",
        &topic,
    ];
    let mut relay = Relay::start(&args, env);
    stage.db.connect().run(ROW);
    stage
        .broker
        .wait_count_while(&stage.topic("t"), records, MINUTE, || {
            assert!(!proc::ended_unnoticed(relay.pid()), "{}", relay.said());
        });
    relay.stop();
}

fn refused(stage: &Stage<'_>, env: &[(&str, &str)]) -> Ended {
    let (slot, brokers) = (stage.db.slot(), stage.broker.bootstrap());
    let args = ["run", "--slot", &slot, "--brokers", &brokers];
    run_to_end(&args, env, MINUTE).expect_code(3)
}

#[test]
fn the_unix_socket_and_the_usual_variables_do() {
    let stage = Stage::shared(Pg::V18);
    stage.init();
    let port = stage.db.cluster.port.to_string();
    let socket = stage.db.cluster.socket_dir().to_string_lossy().into_owned();
    let common = [
        ("PGPORT", port.as_str()),
        ("PGUSER", "postgres"),
        ("PGDATABASE", stage.db.name.as_str()),
    ];
    let with = |host| [&[("PGHOST", host)], &common[..]].concat();
    streams(&stage, 1, &with(&socket));
    streams(&stage, 2, &with("127.0.0.1"));
    // The same as one setting, in libpq's two spellings.
    let words = format!(
        "host={socket} port={port} user=postgres dbname={}",
        stage.db.name
    );
    streams(&stage, 3, &[("WALRELAY_DATABASE_URL", &words)]);
    let url = format!(
        "postgresql://postgres@/{}?host={}&port={port}",
        stage.db.name,
        socket.replace('/', "%2F")
    );
    streams(&stage, 4, &[("WALRELAY_DATABASE_URL", &url)]);
}

#[test]
fn scram_and_every_sslmode_do_what_they_say() {
    for pg in Pg::ALL {
        let cluster = Cluster::start(pg);
        let ca = Authority::new("right");
        let stranger = Authority::new("wrong");
        serve_tls(&cluster, &ca);
        let stage = Stage::on(&cluster, Broker::shared());
        stage.init();
        let port = cluster.port.to_string();
        let base = [
            ("PGPORT", port.as_str()),
            ("PGUSER", "app"),
            ("PGPASSWORD", "pass word'\\&%"),
            ("PGDATABASE", stage.db.name.as_str()),
        ];
        cluster.connect("postgres").run(
            r"set password_encryption = 'scram-sha-256';
              create role app login replication superuser password E'pass word\'\\&%'",
        );
        let file = ca.file.to_string_lossy();
        let wrong_file = stranger.file.to_string_lossy();
        let mut records = 0;
        for (host, mode, root) in [
            ("localhost", "prefer", ""),
            ("localhost", "require", ""),
            ("localhost", "verify-full", &file),
            ("127.0.0.1", "verify-full", &file),
        ] {
            records += 1;
            let env = [
                &base[..],
                &[
                    ("PGHOST", host),
                    ("PGSSLMODE", mode),
                    ("PGSSLROOTCERT", root),
                ],
            ]
            .concat();
            let env: Vec<_> = env.into_iter().filter(|(_, v)| !v.is_empty()).collect();
            streams(&stage, records, &env);
        }
        let tls = |host, mode, root| {
            let env = [
                &base[..],
                &[
                    ("PGHOST", host),
                    ("PGSSLMODE", mode),
                    ("PGSSLROOTCERT", root),
                ],
            ]
            .concat();
            let ended = refused(&stage, &env);
            assert!(
                !ended.stderr.contains("pass word"),
                "the password is printed"
            );
            ended.stderr
        };
        // Only TLS is let in for this role: without it the server's own words, and the remedy.
        assert!(tls("localhost", "disable", &file).contains("pg_hba"));
        assert!(tls("localhost", "verify-full", &wrong_file).contains("certificate"));
        // A name that the certificate does not carry.
        assert!(tls("127.0.0.2", "verify-full", &file).contains("127.0.0.2"));
        assert_eq!(stage.broker.count(&stage.topic("t")), records);
    }
}

/// Turns TLS on, and lets the role `app` in over nothing else.
fn serve_tls(cluster: &Cluster, ca: &Authority) {
    let signed = ca.sign("localhost", &["localhost", "127.0.0.1"]);
    cluster.put("server.crt", &signed.certificate());
    cluster.put("server.key", &signed.key());
    cluster.configure(&["ssl = on", "listen_addresses = '127.0.0.1, 127.0.0.2'"]);
    cluster.hba(&[
        "local all all trust",
        "hostssl all app 127.0.0.0/8 scram-sha-256",
        "host all postgres 127.0.0.0/8 trust",
    ]);
    cluster.restart(Stop::Fast);
}

#[test]
fn a_role_that_may_not_write_streams_and_is_warned_once() {
    let mut stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    stage.user = format!("reader_{}", stage.db.name);
    sql.run(&format!(
        "create role {0} login replication;
         grant usage on schema walrelay to {0};
         grant select on all tables in schema walrelay to {0};
         grant select on outbox to {0}",
        stage.user
    ));
    stage.run_args = vec!["--on-poison".to_owned(), "halt".to_owned()];
    let mut relay = stage.run();
    sql.run(ROW);
    assert_eq!(stage.records(1).len(), 1);
    stage.wait_confirmed(Duration::from_secs(10));
    relay.stop();
    let warnings = relay
        .lines()
        .iter()
        .filter(|line| line.level() == "WARN" && line.has("walrelay") && line.has("grant"))
        .count();
    assert_eq!(warnings, 1, "{}", relay.said());
    sql.run(&format!("drop owned by {0}; drop role {0}", stage.user));
}

#[test]
fn no_password_and_no_payload_is_ever_logged() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k', 'e', '{\"card\": \"4111-1111\"}')",
    );
    let (slot, brokers) = (stage.db.slot(), stage.broker.bootstrap());
    let topic = format!("{}.{{aggregate_type}}", stage.prefix);
    let url = stage.db.url().replace("postgres@", "postgres:s3cr3t@");
    let args = [
        "run",
        "--slot",
        &slot,
        "--brokers",
        &brokers,
        "--topic",
        &topic,
    ];
    let env = [
        ("WALRELAY_DATABASE_URL", url.as_str()),
        ("RUST_LOG", "debug"),
    ];
    let mut relay = Relay::start(&args, &env);
    assert_eq!(stage.records(1).len(), 1);
    relay.stop();
    let said = relay.said();
    for secret in ["s3cr3t", "4111-1111"] {
        assert!(!said.contains(secret), "{secret} is in the log");
    }
}
