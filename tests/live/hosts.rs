//! Which server is connected to, what is said when there is none, and passwords that change.

use std::fs;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::certs::chmod;
use crate::kafka::Broker;
use crate::postgres::{Cluster, Pg, Sql};
use crate::proc::{self, eventually, eventually_says};
use crate::relay::{Ended, Relay, run_to_end};
use crate::stage::{MINUTE, Stage};

const ROW: &str = "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
                   values (gen_random_uuid(), 't', 'k', 'e', '{}')";

/// `run` for a stage, told where by these variables alone.
fn start(stage: &Stage<'_>, env: &[(&str, &str)]) -> Relay {
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
    Relay::start(&args, env)
}

fn init(env: &[(&str, &str)]) -> Ended {
    run_to_end(&["init", "--print-sql"], env, MINUTE)
}

/// By `init` and by `run`, in the same words.
#[track_caller]
fn refused(env: &[(&str, &str)], words: &[&str]) {
    let run = ["run", "--brokers", "127.0.0.1:1"];
    for ended in [init(env), run_to_end(&run, env, MINUTE)] {
        assert_eq!(ended.code, 3, "{}", ended.stderr);
        for word in words {
            assert!(ended.stderr.contains(word), "{word:?}: {}", ended.stderr);
        }
    }
}

/// The sessions of the relay on a server.
fn sessions(sql: &Sql) -> String {
    sql.one("select count(*) from pg_stat_activity where application_name = 'walrelay'")
}

/// Case C05.
#[test]
fn a_standby_alone_is_refused_and_in_a_list_passed_over() {
    let primary = Cluster::start(Pg::V18);
    let stage = Stage::on(&primary, Broker::shared());
    let sql = stage.init();
    drop(sql);
    let standby = Cluster::standby(&primary);
    let (closed, ports) = (proc::free_port(), (standby.port, primary.port));
    let base = [
        ("PGHOST", "127.0.0.1"),
        ("PGUSER", "postgres"),
        ("PGDATABASE", stage.db.name.as_str()),
    ];
    let alone = ports.0.to_string();
    for attrs in ["any", "read-write"] {
        let env = [
            &base[..],
            &[("PGPORT", &alone), ("PGTARGETSESSIONATTRS", attrs)],
        ]
        .concat();
        refused(&env, &["in recovery", "primary"]);
    }
    let hosts = "127.0.0.1,127.0.0.1,127.0.0.1";
    let list = format!("{closed},{},{}", ports.0, ports.1);
    let base = [&base[1..], &[("PGHOST", hosts), ("PGPORT", &list)]].concat();
    let sql = stage.db.connect();
    for (records, attrs) in ["any", "primary", "read-write"].into_iter().enumerate() {
        let env = [&base[..], &[("PGTARGETSESSIONATTRS", attrs)]].concat();
        let mut relay = start(&stage, &env);
        sql.run(ROW);
        stage.wait_count("t", records + 1, MINUTE);
        let both = "the stream and the side session are on the primary";
        eventually(MINUTE, both, || (sessions(&sql) == "2").then_some(()));
        relay.stop();
        eventually(MINUTE, "both are gone", || {
            (sessions(&sql) == "0").then_some(())
        });
    }
    drop(sql);

    // Without the primary the list is waited for, and each host is named.
    primary.stop(crate::postgres::Stop::Fast);
    let ended = init(&base).expect_code(3);
    for part in [
        "none of the hosts is the primary",
        "is a standby",
        &closed.to_string(),
    ] {
        assert!(ended.stderr.contains(part), "{}", ended.stderr);
    }
    let mut relay = start(&stage, &base);
    relay.wait_for_text("none of the hosts is the primary", MINUTE);
    primary.up();
    stage.db.connect().run(ROW);
    stage.wait_count("t", 4, MINUTE);
    relay.stop();
}

/// As in libpq: who refuses us is not passed over.
#[test]
fn a_refused_password_ends_the_search_and_says_by_whom() {
    let closed = Cluster::start(Pg::V15);
    closed
        .connect("postgres")
        .run("create role app login password 'right'");
    closed.hba(&[
        "local all all trust",
        "host all app 127.0.0.0/8 scram-sha-256",
        "host all all 127.0.0.0/8 trust",
    ]);
    let open = Cluster::shared(Pg::V15);
    let port = closed.port.to_string();
    let ports = format!("{port},{}", open.port);
    let env = |ports, password| {
        [
            ("PGHOST", "127.0.0.1,localhost"),
            ("PGPORT", ports),
            ("PGUSER", "app"),
            ("PGDATABASE", "postgres"),
            ("PGPASSWORD", password),
        ]
    };
    let said_by = format!("so says host \\\"127.0.0.1\\\" port {port}");
    let ended = init(&env(&ports, "wrong")).expect_code(3);
    assert!(ended.stderr.contains("28P01"), "{}", ended.stderr);
    assert!(
        ended.stderr.contains(&said_by.replace('\\', "")),
        "{}",
        ended.stderr
    );

    // Each host has its own line in the password file.
    let file = proc::dir("pass").join("pgpass");
    let line = format!("127.0.0.1:{port}:*:app:right\nlocalhost:*:*:*:wrong\n");
    fs::write(&file, line).expect("the directory is ours");
    chmod(&file, 0o600);
    let mut with_file = env(&ports, "").to_vec();
    with_file.push(("PGPASSFILE", file.to_str().expect("UTF-8")));
    // In: what is missing now is no password but the right to make things.
    let ended = init(&with_file);
    assert!(!ended.stderr.contains("connecting as"), "{}", ended.stderr);

    // Case C07.
    chmod(&file, 0o644);
    let path = file.to_str().expect("UTF-8");
    refused(&with_file, &["no password supplied", path, "0600"]);
}

/// Case C06.
#[test]
fn a_hard_password_gets_through_in_each_of_four_ways() {
    const PASSWORD: &str = "p@ss:w/rd#1%?é ";
    let cluster = Cluster::start(Pg::V18);
    cluster.connect("postgres").run(&format!(
        "create role app login superuser password '{PASSWORD}'"
    ));
    cluster.hba(&[
        "local all all trust",
        "host all app 127.0.0.0/8 scram-sha-256",
        "host all all 127.0.0.0/8 trust",
    ]);
    let file = proc::dir("pass").join("pgpass");
    fs::write(&file, "*:*:*:app:p@ss\\:w/rd#1%?é \n").expect("the directory is ours");
    chmod(&file, 0o600);
    let place = format!("127.0.0.1:{}/postgres", cluster.port);
    let url = format!("postgresql://app:p%40ss%3Aw%2Frd%231%25%3F%C3%A9%20@{place}");
    let words = format!(
        "host=127.0.0.1 port={} user=app dbname=postgres password='{PASSWORD}'",
        cluster.port
    );
    let bare = format!("postgresql://app@{place}");
    let raw = format!("postgresql://app:{PASSWORD}@{place}");
    let path = file.to_str().expect("UTF-8");
    for env in [
        vec![("WALRELAY_DATABASE_URL", url.as_str())],
        vec![("WALRELAY_DATABASE_URL", &words)],
        vec![("WALRELAY_DATABASE_URL", &bare), ("PGPASSWORD", PASSWORD)],
        vec![("WALRELAY_DATABASE_URL", &bare), ("PGPASSFILE", path)],
    ] {
        init(&env).expect_code(0);
    }
    let ended = init(&[("WALRELAY_DATABASE_URL", &raw)]).expect_code(2);
    assert!(ended.stderr.contains("percent-encode"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("rd#1"), "{}", ended.stderr);
    let started = Instant::now();
    let wrong = [
        ("WALRELAY_DATABASE_URL", bare.as_str()),
        ("PGPASSWORD", "no"),
    ];
    refused(&wrong, &["28P01", "alter role \"app\" password"]);
    assert!(started.elapsed() < Duration::from_secs(10));
}

/// Case C12: the side session and the stream, each cut alone.
/// README: a password is rotated while the relay runs.
#[test]
fn a_password_that_changes_while_we_run_is_waited_for_and_read_anew() {
    let cluster = Cluster::start(Pg::V18);
    let stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    sql.run("create role app login superuser replication password 'first'");
    cluster.hba(&[
        "local all all trust",
        "host all app 127.0.0.0/8 scram-sha-256",
        "host all all 127.0.0.0/8 trust",
    ]);
    let file = proc::dir("pass").join("pgpass");
    let port = cluster.port.to_string();
    let write = |password: &str| {
        fs::write(&file, format!("127.0.0.1:{port}:*:app:{password}\n")).expect("it is ours");
        chmod(&file, 0o600);
    };
    write("first");
    let env = [
        ("PGHOST", "127.0.0.1"),
        ("PGPORT", port.as_str()),
        ("PGUSER", "app"),
        ("PGDATABASE", stage.db.name.as_str()),
        ("PGPASSFILE", file.to_str().expect("UTF-8")),
    ];
    let mut relay = start(&stage, &env);
    sql.run(ROW);
    stage.wait_count("t", 1, MINUTE);
    for (records, (password, cut)) in [
        ("second", "backend_type = 'walsender'"),
        ("third", "usename = 'app'"),
    ]
    .into_iter()
    .enumerate()
    {
        sql.run(&format!("alter role app password '{password}'"));
        let before = refusals(&cluster);
        sql.run(&format!(
            "select pg_terminate_backend(pid) from pg_stat_activity where {cut}"
        ));
        eventually_says(
            MINUTE,
            || relay.said(),
            || (refusals(&cluster) >= before + 2).then_some(()),
        );
        sql.run(ROW);
        relay.assert_alive();
        write(password);
        stage.wait_count("t", records + 2, MINUTE);
    }
    let complaints = relay
        .lines()
        .iter()
        .filter(|line| line.has("28P01"))
        .count();
    assert!(
        (1..=4).contains(&complaints),
        "{complaints}: {}",
        relay.said()
    );
    assert_eq!(stage.broker.count(&stage.topic("t")), 3, "nothing twice");
    relay.stop();
}

fn refusals(cluster: &Cluster) -> usize {
    cluster
        .log()
        .matches("password authentication failed")
        .count()
}

/// Case C13: four ways of not being there.
#[test]
fn what_is_not_there_is_named_and_waited_for() {
    let closed = proc::free_port().to_string();
    let starting = starting_server().to_string();
    let (silent, _full) = silent_server();
    let silent = silent.to_string();
    for (host, port, words) in [
        (
            "127.0.0.1",
            &closed,
            ["refused the connection", "start the server"],
        ),
        (
            "no-such-host.invalid",
            &closed,
            ["cannot resolve the host name", "resolver"],
        ),
        ("127.0.0.1", &starting, ["57P03", "has started"]),
        (
            "127.0.0.1",
            &silent,
            ["timed out after 2 s without an answer", "firewall"],
        ),
    ] {
        let env = [
            ("PGHOST", host),
            ("PGPORT", port),
            ("PGUSER", "app"),
            ("PGCONNECT_TIMEOUT", "2"),
        ];
        let started = Instant::now();
        let ended = init(&env).expect_code(3);
        assert!(
            started.elapsed() < Duration::from_secs(6),
            "{:?}",
            started.elapsed()
        );
        for word in words {
            assert!(ended.stderr.contains(word), "{word:?}: {}", ended.stderr);
        }
        let mut relay = Relay::start(&["run", "--brokers", "127.0.0.1:1"], &env);
        relay.wait_for_text(words[0], MINUTE);
        relay.assert_alive();
        relay.stop();
    }
}

/// A listener that says to everyone what a server says that starts up.
fn starting_server() -> u16 {
    use std::io::{Read, Write};
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    let fields = b"SFATAL\0C57P03\0Mthe database system is starting up\0\0";
    let length = u32::try_from(fields.len() + 4).expect("it is short");
    let error = [b"E", &length.to_be_bytes()[..], fields].concat();
    std::thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let mut request = [0; 1024];
            // A request for TLS is 8 bytes, a start-up message is longer.
            while let Ok(8) = client.read(&mut request) {
                let _ = client.write_all(b"N");
            }
            let _ = client.write_all(&error);
        }
    });
    port
}

/// A port that drops what comes, as a firewall does: its queue is full.
fn silent_server() -> (u16, impl Sized) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    rustix::net::listen(&listener, 0).expect("a shorter queue");
    let address = listener.local_addr().expect("it is bound");
    let mut queue = Vec::new();
    let wait = Duration::from_millis(300);
    while let Ok(client) = std::net::TcpStream::connect_timeout(&address, wait) {
        queue.push(client);
        assert!(queue.len() < 10, "the queue does not fill");
    }
    (address.port(), (listener, queue))
}
