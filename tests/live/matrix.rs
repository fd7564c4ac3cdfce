//! A matrix of bad configurations: every bad value in every place that a setting comes from, every
//! common mistake in the surroundings, each through `check` and through `run`. Always the exit code
//! of the contract, an end within its time, a remedy as the last line, and the password nowhere.

use std::fs;
use std::time::Duration;

use crate::kafka::Broker;
use crate::postgres::{Cluster, Database, Pg};
use crate::proc;
use crate::relay::{Ended, Relay, run_to_end};
use crate::stage::MINUTE;

const PASSWORD: &str = "Tr0ub4dor-and-3";

/// Key of the file, and values that nobody can mean.
const BAD_VALUES: [(&str, &[&str]); 9] = [
    (
        "database_url",
        &[
            "mysql://u@h/d",
            "postgresql://u:Tr0ub4dor-and-3@x/y@127.0.0.1/d",
            "postgresql://u:Tr0ub4dor-and-3#1@127.0.0.1/d",
            "postgresql://u@127.0.0.1:99999/d",
            "postgresql://u@127.0.0.1/d?sslmode=paranoid",
            "postgresql://u@127.0.0.1/d?sslmod=require",
            "host=127.0.0.1 port=x user=u",
            "host=127.0.0.1 password='Tr0ub4dor-and-3",
            "host=127.0.0.1 connect_timeout=soon",
            "127.0.0.1",
        ],
    ),
    ("slot", &["Not-A-Slot", "", "a b", LONG]),
    ("table", &["", "a.b.c", "\"open", ".", LONG]),
    ("publication", &["", "\"open", LONG]),
    ("topic", &["", "a.{b", "a.b}", "a.{}", "a b", "é"]),
    (
        "brokers",
        &[
            "",
            "http://127.0.0.1:9092",
            "h",
            "h:0",
            "h:99999",
            ",",
            "h:1,,",
        ],
    ),
    ("create_topics", &["0", "x", "1:0", "-1", "1:2:3"]),
    ("log", &["xml", ""]),
    (
        "kafka",
        &["acks=1", "linger=5", "message.timeout.ms=5000", "no-pair"],
    ),
];

/// The same, for settings that only `run` has.
const BAD_RUN_VALUES: [(&str, &[&str]); 7] = [
    ("http", &[":9187", "localhost", "127.0.0.1:99999", ""]),
    ("stall_timeout", &["10", "-1s", "soon", ""]),
    ("shutdown_timeout", &["10", "-1s", "soon"]),
    ("in_flight_bytes", &["1", "1GiB", "x"]),
    ("on_poison", &["prak", ""]),
    ("topic_grace", &["10", "-1s", "soon", ""]),
    ("on_gap", &["ignore", ""]),
];

const LONG: &str = "a123456789b123456789c123456789d123456789e123456789f123456789g123456789";

#[derive(Clone, Copy, Debug)]
enum Layer {
    Flag,
    Variable,
    File,
}

#[test]
fn every_bad_value_is_named_before_anything_is_contacted() {
    let mut tried = 0;
    for (keys, commands) in [
        (&BAD_VALUES[..], &["check", "run"][..]),
        (&BAD_RUN_VALUES[..], &["run"][..]),
    ] {
        for (key, values) in keys {
            for value in *values {
                for layer in [Layer::Flag, Layer::Variable, Layer::File] {
                    for command in commands {
                        let ended = with_value(command, key, value, layer);
                        let what = format!("{command}, {layer:?} {key} = {value:?}");
                        usage(&ended, &what);
                        tried += 1;
                    }
                }
            }
        }
    }
    assert!(tried >= 200, "only {tried} were tried");
}

/// Nothing listens where the other settings lead: an attempt to connect would end with 3, or never.
fn with_value(command: &str, key: &str, value: &str, layer: Layer) -> Ended {
    let mut args = vec![command.to_owned()];
    if key != "database_url" {
        args.extend(["--database-url", "postgresql://u@127.0.0.1:1/d"].map(str::to_owned));
    }
    if key != "brokers" {
        args.extend(["--brokers", "127.0.0.1:1"].map(str::to_owned));
    }
    let mut env = vec![("PGPASSWORD", PASSWORD)];
    let variable = format!("WALRELAY_{}", key.to_ascii_uppercase());
    match layer {
        Layer::Flag => args.extend([format!("--{}", key.replace('_', "-")), value.to_owned()]),
        Layer::Variable => env.push((&variable, value)),
        Layer::File => {
            let path = proc::dir("config").join("walrelay.toml");
            let text = match (key, value.split_once('=')) {
                ("kafka", Some((name, value))) => format!("[kafka]\n\"{name}\" = \"{value}\"\n"),
                _ => format!("{key} = '''{value}'''\n"),
            };
            fs::write(&path, text).expect("the directory is ours");
            args.extend(["--config".to_owned(), path.to_string_lossy().into_owned()]);
        }
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    run_to_end(&args, &env, Duration::from_secs(10))
}

#[track_caller]
fn usage(ended: &Ended, what: &str) {
    assert_eq!(ended.code, 2, "{what}:\n{}", ended.stderr);
    well_said(&ended.stdout, &ended.stderr, what);
}

#[track_caller]
fn well_said(stdout: &str, stderr: &str, what: &str) {
    for said in [stdout, stderr] {
        assert!(!said.contains("panicked"), "{what}:\n{said}");
        assert!(!said.contains("panic at"), "{what}:\n{said}");
        assert!(!said.contains(PASSWORD), "{what}: the password is shown");
        assert!(!said.contains("Tr0ub4"), "{what}: half a password is shown");
    }
    let last = stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("remedy: "), "{what}:\n{stderr}");
}

// ---- surroundings

/// How `run` takes a mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// It ends with this code.
    Ends(i32),
    /// Time may heal it: the relay waits and says for what.
    Waits,
}

/// A mistake: what is done to the database before, what is changed on the command line, how both
/// commands take it, and a word that both must say.
struct Mistake {
    name: &'static str,
    sql: &'static str,
    args: &'static [&'static str],
    check: i32,
    run: Run,
    word: &'static str,
}

const fn refused(
    name: &'static str,
    sql: &'static str,
    args: &'static [&'static str],
    word: &'static str,
) -> Mistake {
    Mistake {
        name,
        sql,
        args,
        check: 3,
        run: Run::Ends(3),
        word,
    }
}

const fn waited_for(
    name: &'static str,
    args: &'static [&'static str],
    word: &'static str,
) -> Mistake {
    Mistake {
        name,
        sql: "",
        args,
        check: 3,
        run: Run::Waits,
        word,
    }
}

/// `{db}`, `{slot}`, `{port}`, `{user}` stand for the test's own.
const MISTAKES: &[Mistake] = &[
    refused(
        "a wrong password",
        "alter role {user} password 'another'",
        &[],
        "28P01",
    ),
    refused(
        "no such database",
        "",
        &[
            "--database-url",
            "postgresql://{user}@127.0.0.1:{port}/Nowhere",
        ],
        "Nowhere",
    ),
    refused(
        "no such role",
        "",
        &[
            "--database-url",
            "postgresql://nobody_at_all@127.0.0.1:{port}/{db}",
        ],
        "nobody_at_all",
    ),
    refused(
        "a role that may not log in",
        "alter role {user} nologin",
        &[],
        "28000",
    ),
    refused(
        "a role that may not replicate",
        "alter role {user} noreplication",
        &[],
        "alter role",
    ),
    refused("no such table", "", &["--table", "nope"], "nope"),
    refused(
        "a view",
        "create view v as select 1 as n",
        &["--table", "v", "--slot", "{slot}_2", "--publication", "p2"],
        "view",
    ),
    refused(
        "an unlogged table",
        "create unlogged table u (like outbox)",
        &["--table", "u", "--slot", "{slot}_2", "--publication", "p2"],
        "unlogged",
    ),
    refused(
        "a table without our columns",
        "create table thin (id int)",
        &[
            "--table",
            "thin",
            "--slot",
            "{slot}_2",
            "--publication",
            "p2",
        ],
        "event_id",
    ),
    refused(
        "a payload of numbers",
        "create table odd (like outbox); alter table odd drop payload; alter table odd add payload int",
        &[
            "--table",
            "odd",
            "--slot",
            "{slot}_2",
            "--publication",
            "p2",
        ],
        "payload",
    ),
    refused(
        "no publication",
        "drop publication walrelay",
        &[],
        "publication",
    ),
    refused(
        "a publication of updates",
        "alter publication walrelay set (publish = 'insert, update')",
        &[],
        "publish",
    ),
    refused(
        "a publication with a second table",
        "create table second (n int); alter publication walrelay add table second",
        &[],
        "second",
    ),
    refused(
        "a publication with a row filter",
        "alter publication walrelay set table outbox where (event_type <> 'x')",
        &[],
        "row filter",
    ),
    refused(
        "a publication of everything",
        "drop publication walrelay; create publication walrelay for all tables",
        &[],
        "all tables",
    ),
    refused(
        "a slot of two phases",
        "select pg_drop_replication_slot('{slot}');
         select pg_create_logical_replication_slot('{slot}', 'pgoutput', false, true)",
        &[],
        "two_phase",
    ),
    refused(
        "a physical slot",
        "select pg_drop_replication_slot('{slot}');
         select pg_create_physical_replication_slot('{slot}')",
        &[],
        "physical",
    ),
    refused("another slot's name", "", &["--slot", "{slot}_x"], "{slot}"),
    refused(
        "no rights on the registry",
        "revoke all on schema walrelay from {user}",
        &[],
        "grant",
    ),
    waited_for(
        "a closed port",
        &["--database-url", "postgresql://u@127.0.0.1:1/d"],
        "refused",
    ),
    waited_for(
        "an unknown host",
        &["--database-url", "postgresql://u@no-such-host.invalid/d"],
        "no-such-host.invalid",
    ),
    waited_for(
        "no socket",
        &["--database-url", "host=/nowhere user=u dbname=d"],
        "/nowhere",
    ),
    waited_for(
        "a broker that is down",
        &["--brokers", "127.0.0.1:1"],
        "127.0.0.1:1",
    ),
    waited_for(
        "a broker without an address",
        &["--brokers", "no-such-broker.invalid:9092"],
        "no-such-broker.invalid",
    ),
    waited_for("an absent topic", &["--topic", "{db}.none"], "{db}.none"),
];

#[test]
fn every_mistake_in_the_surroundings_ends_or_waits_as_promised() {
    let cluster = Cluster::start(Pg::V17);
    cluster.hba(&[
        "local all all trust",
        "host all postgres 127.0.0.1/32 trust",
        "host all all 127.0.0.1/32 scram-sha-256",
    ]);
    for mistake in MISTAKES {
        try_mistake(&cluster, mistake);
    }
}

fn try_mistake(cluster: &Cluster, mistake: &Mistake) {
    let db = cluster.database();
    let user = format!("app_{}", db.name);
    let sql = db.connect();
    sql.run(&format!(
        "create role {user} login replication password '{PASSWORD}';
         grant all on database \"{0}\" to {user}; grant all on schema public to {user}",
        db.name
    ));
    let env = [("PGPASSWORD", PASSWORD)];
    let url = db.url_as(&user);
    let slot = db.slot();
    let init = ["init", "--database-url", &url, "--slot", &slot];
    run_to_end(&init, &env, MINUTE).expect_code(0);
    let fill = |text: &str| {
        text.replace("{db}", &db.name)
            .replace("{slot}", &slot)
            .replace("{port}", &cluster.port.to_string())
            .replace("{user}", &user)
    };
    Broker::shared().create_topic(&format!("{}.t", db.name), 1);
    // An event that its topic is asked for.
    sql.run(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', 'k', 'e', '{}')",
    );
    if !mistake.sql.is_empty() {
        sql.run(&fill(mistake.sql));
    }
    let args = |command: &str| command_line(command, &db, &url, mistake, &fill);
    let word = fill(mistake.word);

    let checked = args("check");
    let checked: Vec<&str> = checked.iter().map(String::as_str).collect();
    let ended = run_to_end(&checked, &env, Duration::from_secs(20));
    let what = format!("check, {}", mistake.name);
    let said = format!("{}\n{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, mistake.check, "{what}:\n{said}");
    well_said(&ended.stdout, &ended.stderr, &what);
    assert!(said.contains(&word), "{what}: no {word} in\n{said}");

    let what = format!("run, {}", mistake.name);
    let run = args("run");
    let run: Vec<&str> = run.iter().map(String::as_str).collect();
    match mistake.run {
        Run::Ends(code) => {
            let ended = run_to_end(&run, &env, Duration::from_secs(20));
            let said = format!("{}\n{}", ended.stdout, ended.stderr);
            assert_eq!(ended.code, code, "{what}:\n{said}");
            well_said(&ended.stdout, &ended.stderr, &what);
            assert!(said.contains(&word), "{what}: no {word} in\n{said}");
        }
        Run::Waits => {
            let mut relay = Relay::start(&run, &env);
            relay.wait_for(&what, MINUTE, |line| {
                line.level() != "DEBUG" && line.has(&word)
            });
            relay.assert_alive();
            relay.stop();
            assert!(!relay.said().contains(PASSWORD), "{what}: the password");
        }
    }
}

fn command_line(
    command: &str,
    db: &Database<'_>,
    url: &str,
    mistake: &Mistake,
    fill: &dyn Fn(&str) -> String,
) -> Vec<String> {
    let mut args = vec![command.to_owned()];
    let topic = format!("{}.{{aggregate_type}}", db.name);
    let brokers = Broker::shared().bootstrap();
    for (flag, value) in [
        ("--database-url", url),
        ("--slot", &db.slot()),
        ("--brokers", &brokers),
        ("--topic", &topic),
    ] {
        // A flag given twice is a mistake of its own.
        if !mistake.args.contains(&flag) {
            args.extend([flag.to_owned(), value.to_owned()]);
        }
    }
    args.extend(mistake.args.iter().map(|arg| fill(arg)));
    args
}
