use clap::{CommandFactory, Parser};

use super::*;
use crate::cli::Cli;
use crate::error::Exit;

mod conninfo;
mod mapping;

fn around(env: &[(&str, &str)]) -> Surroundings {
    Surroundings {
        env: env
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect(),
        os_user: Some("ops".to_owned()),
        socket_dir: Some("/var/run/postgresql".to_owned()),
        terminal: false,
    }
}

fn resolve_in(around: &Surroundings, args: &[&str]) -> Result<Config, Failure> {
    let cli = Cli::try_parse_from([&["walrelay"], args].concat()).expect("clap takes the flags");
    Config::resolve(cli.command, around)
}

fn run_in(around: &Surroundings, args: &[&str]) -> Result<RunConfig, Failure> {
    let args = [&["run", "--brokers", "kafka:9092"], args].concat();
    match resolve_in(around, &args)?.task {
        Task::Run(config) => Ok(*config),
        task @ (Task::Init(_)
        | Task::Check(_)
        | Task::Status(_)
        | Task::DeadLetters(_)
        | Task::Drain(_)
        | Task::Drop(_)
        | Task::Demo(_)) => {
            panic!("not a run: {task:?}")
        }
    }
}

fn run(args: &[&str]) -> RunConfig {
    run_in(&around(&[]), args).expect("the settings are right")
}

#[track_caller]
fn refused(args: &[&str], words: &[&str]) -> String {
    refused_in(&around(&[]), args, words)
}

#[track_caller]
fn refused_in(around: &Surroundings, args: &[&str], words: &[&str]) -> String {
    let failure = run_in(around, args).expect_err("the settings are wrong");
    assert_eq!(failure.exit, Exit::Usage);
    let text = failure.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
    text
}

fn database(url: &str) -> Database {
    run(&["--database-url", url]).source.database
}

#[track_caller]
fn url_refused(url: &str, words: &[&str]) -> String {
    refused(&["--database-url", url], words)
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), text).expect("it can be written");
    file
}

fn path(file: &tempfile::NamedTempFile) -> &str {
    file.path().to_str().expect("its path is UTF-8")
}

#[test]
fn the_flags_are_well_formed() {
    Cli::command().debug_assert();
}

#[test]
fn defaults() {
    let config = run(&[]);
    assert_eq!(config.source.table.to_string(), "public.outbox");
    assert_eq!(config.source.slot, "walrelay");
    assert_eq!(config.source.publication, "walrelay");
    assert_eq!(config.mapping, Mapping::default());
    assert_eq!(
        config.mapping.topic.to_string(),
        "outbox.event.{aggregate_type}"
    );
    assert_eq!(config.stall_timeout, Duration::from_secs(20));
    assert_eq!(config.shutdown_timeout, Duration::from_secs(30));
    assert_eq!(config.in_flight_bytes, 64 << 20);
    assert_eq!(config.kafka.create_topics, None);
    assert_eq!(
        config.source.database,
        Database {
            tls: Tls::default(),
            ..Database::plain("/var/run/postgresql", 5432, "ops", "ops")
        }
    );
}

// ---- precedence, the file

#[test]
fn a_flag_beats_the_environment_beats_the_file_beats_the_default() {
    let file = file("topic = \"file\"\nslot = \"file\"\npublication = \"file\"");
    let env = around(&[
        ("WALRELAY_TOPIC", "env"),
        ("WALRELAY_SLOT", "env"),
        ("WALRELAY_CONFIG", path(&file)),
    ]);
    let config = run_in(&env, &["--topic", "flag"]).expect("right");
    assert_eq!(config.mapping.topic.to_string(), "flag");
    assert_eq!(config.source.slot, "env");
    assert_eq!(config.source.publication, "file");
    assert_eq!(config.source.table.to_string(), "public.outbox");
}

#[test]
fn pairs_are_merged_by_name() {
    let file = file(
        "[kafka]\nsecurity.protocol = \"SSL\"\n\"linger.ms\" = 5\nenable.x = true\n\
         [headers]\ntenant = \"tenant_id\"",
    );
    let env = around(&[("WALRELAY_KAFKA", "linger.ms=6\nsasl.password=a=b c\n")]);
    let args = [
        "--config",
        path(&file),
        "--kafka",
        "linger.ms=7",
        "--header",
        "trace=trace_id",
    ];
    let config = run_in(&env, &args).expect("right");
    let mut properties: Vec<(String, String)> = config
        .kafka
        .properties
        .iter()
        .map(|property| (property.name.clone(), property.read().expect("plain text")))
        .collect();
    properties.sort();
    let expected = [
        ("enable.x", "true"),
        ("linger.ms", "7"),
        ("sasl.password", "a=b c"),
        ("security.protocol", "SSL"),
    ];
    assert_eq!(
        properties,
        expected.map(|(k, v)| (k.to_owned(), v.to_owned()))
    );
    let headers = [("tenant", "tenant_id"), ("trace", "trace_id")];
    assert_eq!(
        config.mapping.headers,
        headers.map(|(k, v)| (k.to_owned(), v.to_owned()))
    );
}

#[test]
fn a_property_may_stand_for_a_variable_or_a_file() {
    let secret = file("s3cr3t\n");
    let settings = file(&format!(
        "kafka_token_command = \"file\"\n[kafka]\nsasl.password = \"${{file:{}}}\"\n\
         [kafka.ssl]\nca.location = \"${{env:CA}}\"",
        path(&secret)
    ));
    let env = around(&[
        ("CA", "/etc/ca.pem"),
        ("WALRELAY_KAFKA_TOKEN_COMMAND", "variable"),
    ]);
    let config = run_in(&env, &["--config", path(&settings)]).expect("right");
    let value = |name: &str| {
        let mut all = config.kafka.properties.iter();
        let property = all.find(|property| property.name == name);
        property.expect("it is given").read().expect("it is there")
    };
    assert_eq!(value("sasl.password"), "s3cr3t");
    assert_eq!(value("ssl.ca.location"), "/etc/ca.pem");
    assert_eq!(config.kafka.token_command.as_deref(), Some("variable"));
    let shown = format!("{config:?}");
    assert!(
        !shown.contains("s3cr3t") && !shown.contains("variable"),
        "{shown}"
    );
    refused(
        &["--kafka", "a=${env:NO_SUCH}"],
        &["a:", "NO_SUCH", "not set"],
    );
}

#[test]
fn a_malformed_pair_is_refused_without_showing_it() {
    let text = refused(&["--kafka", "hunter2"], &["--kafka NAME=VALUE"]);
    assert!(!text.contains("hunter2"));
    refused(&["--kafka", "a=1", "--kafka", "a=2"], &["a is given twice"]);
    refused(&["--header", "=x"], &["--header"]);
}

#[test]
fn an_unknown_key_is_named_with_the_nearest_one_and_the_file() {
    let file = file("brokres = \"x\"");
    let words = ["unknown key brokres", "did you mean brokers?", path(&file)];
    refused(&["--config", path(&file)], &words);
    let file = self::file("zzz = 1");
    refused(
        &["--config", path(&file)],
        &["unknown key zzz", "the keys are"],
    );
}

#[test]
fn a_key_may_be_spelled_like_its_flag_but_not_twice() {
    let kebab = file("stall-timeout = \"7s\"");
    let config = run(&["--config", path(&kebab)]);
    assert_eq!(config.stall_timeout, Duration::from_secs(7));
    let both = file("stall-timeout = \"7s\"\nstall_timeout = \"8s\"");
    refused(
        &["--config", path(&both)],
        &["stall_timeout is given twice"],
    );
}

#[test]
fn a_wrong_type_is_named_with_file_and_key() {
    let array = file("topic = [\"a\"]");
    refused(
        &["--config", path(&array)],
        &["topic is an array, not text", path(&array)],
    );
    let name = file("topic = 3");
    refused(
        &["--config", path(&name)],
        &["topic is an integer, not text"],
    );
    let text = file("kafka = \"a=b\"");
    refused(
        &["--config", path(&text)],
        &["kafka is a string, not a table", "[kafka]"],
    );
    let twice = file("[kafka]\n\"linger.ms\" = 5\nlinger.ms = 6");
    refused(&["--config", path(&twice)], &["linger.ms is given twice"]);
    let inner = file("[kafka]\nx.y = [1]");
    refused(&["--config", path(&inner)], &["kafka.x.y is an array"]);
    let number = file("stall_timeout = 20");
    refused(
        &["--config", path(&number)],
        &["stall_timeout in", "no unit", "write 20s"],
    );
}

#[test]
fn a_file_that_is_not_toml_is_named_with_the_line() {
    let bad = file("topic = \"a\"\nslot = walrelay\n");
    refused(
        &["--config", path(&bad)],
        &[&format!("{}:2", path(&bad)), "not TOML"],
    );
    refused(
        &["--config", "/nowhere/x.toml"],
        &["cannot read /nowhere/x.toml"],
    );
}

#[test]
fn an_empty_value_is_refused_wherever_it_stands() {
    refused(&["--topic", ""], &["--topic is empty"]);
    let env = around(&[("WALRELAY_TOPIC", " ")]);
    refused_in(&env, &[], &["WALRELAY_TOPIC is empty"]);
    let empty = file("topic = \"\"");
    refused(&["--config", path(&empty)], &["topic in", "is empty"]);
}

// ---- the README

#[test]
fn every_file_in_the_readme_is_understood() {
    let env = around(&[("KAFKA_KEY_PASSWORD", "x")]);
    let readme = include_str!("../../README.md");
    let mut files = 0;
    for block in readme.split("```toml\n").skip(1) {
        let (text, _) = block.split_once("```").expect("a block is closed");
        let file = file(text);
        if let Err(failure) = run_in(&env, &["--config", path(&file)]) {
            panic!("{text}\n{failure}");
        }
        files += 1;
    }
    assert!(files >= 3, "only {files} were found");
}

// ---- what is not built yet

#[test]
fn what_is_not_built_is_refused_by_name() {
    let refusals = [(["--retention", "7d"], "today only off is")];
    for (args, remedy) in refusals {
        refused(&args, &[args[0], "not built yet", remedy]);
    }
    refused(
        &["--on-poison", "prak"],
        &["no such policy", "write park or halt"],
    );
    let env = around(&[("WALRELAY_HTTP", ":9187")]);
    refused_in(&env, &[], &["WALRELAY_HTTP", "no address and port"]);
    run(&[
        "--on-poison",
        "halt",
        "--on-gap",
        "halt",
        "--retention",
        "off",
        "--http",
        "off",
    ]);
}

#[test]
fn poison_is_parked_unless_told_otherwise() {
    let default = run(&[]);
    assert_eq!(default.on_poison, OnPoison::Park);
    assert_eq!(default.topic_grace, Duration::from_secs(300));
    let told = run(&["--on-poison", "halt", "--topic-grace", "90s"]);
    assert_eq!(told.on_poison, OnPoison::Halt);
    assert_eq!(told.topic_grace, Duration::from_secs(90));
    refused(&["--topic-grace", "5"], &["no unit"]);
}

#[test]
fn dead_letters_are_named_by_row_by_event_or_by_key() {
    let task = |args: &[&str]| {
        let args = [&["dead-letters"], args].concat();
        match resolve_in(&around(&[]), &args).expect("it is right").task {
            Task::DeadLetters(config) => config.task,
            task => panic!("{task:?}"),
        }
    };
    let retry = |which| LettersTask::Retry(which);
    assert_eq!(
        task(&["retry", "row:7"]),
        retry(Which::One(LetterId::Row(7)))
    );
    assert_eq!(
        task(&["retry", "event:7"]),
        retry(Which::One(LetterId::Event("7".to_owned())))
    );
    assert_eq!(
        task(&["retry", "7"]),
        retry(Which::One(LetterId::Either("7".to_owned())))
    );
    assert_eq!(
        task(&["retry", "--key=-k", "--type", "t"]),
        retry(Which::Key(KeyName {
            aggregate_id: "-k".to_owned(),
            aggregate_type: Some("t".to_owned()),
        }))
    );
    assert_eq!(task(&["retry", "--all"]), retry(Which::All));
    for wrong in [
        &["retry"][..],
        &["retry", "7", "--all"],
        &["discard", "--key", "k", "--all"],
        &["retry", "--all", "--type", "t"],
        &["park"],
    ] {
        let args = [&["walrelay", "dead-letters"], wrong].concat();
        assert!(Cli::try_parse_from(args).is_err(), "{wrong:?}");
    }
    let bad = resolve_in(&around(&[]), &["dead-letters", "show", "row:x"]).expect_err("no number");
    assert_eq!(bad.exit, Exit::Usage);
}

#[test]
fn subcommands_to_come_are_recognised_and_refused() {
    for name in ["prune", "replay", "poll"] {
        let failure =
            resolve_in(&around(&[]), &[name, "list", "--json", "--help"]).expect_err("not built");
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.to_string().contains("not built yet"), "{failure}");
        let help = Cli::command().render_long_help().to_string();
        assert!(
            !help.contains(&format!("\n  {name}")),
            "{name} is in: {help}"
        );
    }
}

#[test]
fn run_needs_brokers() {
    let failure = resolve_in(&around(&[]), &["run"]).expect_err("no brokers");
    assert_eq!(failure.exit, Exit::Usage);
    assert!(failure.to_string().contains("--brokers"), "{failure}");
}

#[test]
fn an_unknown_flag_is_a_usage_error_with_the_nearest_one() {
    let error = Cli::try_parse_from(["walrelay", "run", "--tpoic", "x"]).expect_err("unknown");
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("--topic"), "{error}");
}

#[test]
fn the_demo_does_not_read_where_the_real_ones_are() {
    let env = around(&[("WALRELAY_BROKERS", "prod:9092")]);
    let config = resolve_in(&env, &["demo", "--seconds", "8"]).expect("right");
    let Task::Demo(demo) = config.task else {
        panic!("not a demo");
    };
    assert_eq!(demo.brokers, None);
    assert_eq!(demo.seconds, Some(Duration::from_secs(8)));
}

#[test]
fn init_takes_its_own_flags() {
    let args = [
        "init",
        "--print-sql",
        "--existing",
        "leave",
        "--lock-timeout",
        "3s",
        "--json",
    ];
    let Task::Init(init) = resolve_in(&around(&[]), &args).expect("right").task else {
        panic!("not an init");
    };
    assert!(init.print_sql && init.json);
    assert_eq!(init.existing, Some(Existing::Leave));
    assert_eq!(init.lock_timeout, Duration::from_secs(3));
}

#[test]
fn logs_are_text_on_a_terminal_and_json_elsewhere() {
    let mut around = around(&[]);
    let format = |around: &Surroundings, args: &[&str]| {
        resolve_in(around, &[&["init"], args].concat()).map(|config| config.log)
    };
    assert_eq!(format(&around, &[]), Ok(LogFormat::Json));
    around.terminal = true;
    assert_eq!(format(&around, &[]), Ok(LogFormat::Text));
    assert_eq!(format(&around, &["--log", "json"]), Ok(LogFormat::Json));
    assert!(format(&around, &["--log", "xml"]).is_err());
}

// ---- durations, sizes, counts, templates

#[test]
fn durations_have_a_unit_and_a_range() {
    let config = run(&["--stall-timeout", "1m 30s"]);
    assert_eq!(config.stall_timeout, Duration::from_secs(90));
    refused(&["--stall-timeout", "10"], &["no unit", "write 10s"]);
    refused(&["--stall-timeout", "0"], &["no unit"]);
    refused(&["--stall-timeout", "10 parsecs"], &["no duration"]);
    refused(&["--stall-timeout", "1ms"], &["out of range"]);
    refused(&["--shutdown-timeout", "99d"], &["out of range"]);
}

#[test]
fn sizes_have_a_unit_and_a_range() {
    let sizes = [
        ("64MiB", 64 << 20),
        ("2 MB", 2_000_000),
        ("1024kib", 1 << 20),
        ("1048576B", 1 << 20),
    ];
    for (text, bytes) in sizes {
        assert_eq!(run(&["--in-flight-bytes", text]).in_flight_bytes, bytes);
    }
    refused(&["--in-flight-bytes", "64"], &["no unit", "write 64MiB"]);
    for text in ["64M", "MiB", "1.5MiB", "-1MiB"] {
        refused(
            &["--in-flight-bytes=", text]
                .concat()
                .split(' ')
                .collect::<Vec<_>>(),
            &["no size"],
        );
    }
    for text in ["65MiB", "1023KiB", "99999999999999GiB"] {
        refused(
            &["--in-flight-bytes", text],
            &["out of range", "1MiB to 64MiB"],
        );
    }
}

#[test]
fn topics_to_create_are_p_or_p_and_r() {
    let create = |text: &str| run(&["--create-topics", text]).kafka.create_topics;
    let made = |partitions, replication| {
        Some(CreateTopics {
            partitions,
            replication,
        })
    };
    assert_eq!(create("12"), made(12, None));
    assert_eq!(create("12:3"), made(12, Some(3)));
    assert_eq!(create("off"), None);
    for text in ["0", "x", "1:0", "1:", "1:2:3"] {
        refused(&["--create-topics", text], &["not P or P:R"]);
    }
}

#[test]
fn braces_of_a_topic_have_partners() {
    assert_eq!(
        run(&["--topic", "a.{b}{c}"]).mapping.topic.to_string(),
        "a.{b}{c}"
    );
    for text in ["a.{b", "a.b}", "a.{}", "{a{b}}"] {
        refused(&["--topic", text], &["brace"]);
    }
}

// ---- names (case C10)

#[test]
fn names_are_quoted_and_folded_as_in_sql() {
    let table = |text: &str| {
        let table = run(&["--table", text]).source.table;
        (table.schema, table.name)
    };
    let name = |schema: &str, name: &str| (schema.to_owned(), name.to_owned());
    assert_eq!(table("Outbox"), name("public", "outbox"));
    assert_eq!(table("Sales.Out_Box1"), name("sales", "out_box1"));
    assert_eq!(table("\"Sales\".\"Out box\""), name("Sales", "Out box"));
    assert_eq!(table("\"a.b\".\"Out Box\""), name("a.b", "Out Box"));
    assert_eq!(table("\"a\"\"b\""), name("public", "a\"b"));
    for text in [
        "a.b.c", "a b", "\"a", "\"\"", "a.", ".a", "\"a\"b", "1a", "a-b",
    ] {
        refused(&["--table", text], &["--table"]);
    }
    refused(&["--table", &"x".repeat(64)], &["longer than 63"]);
    assert_eq!(
        run(&["--publication", "\"MyPub\""]).source.publication,
        "MyPub"
    );
    assert_eq!(run(&["--publication", "MyPub"]).source.publication, "mypub");
    refused(&["--publication", "a.b"], &["more than one name"]);
}

#[test]
fn a_table_is_shown_as_it_would_be_typed() {
    let table = run(&["--table", "sales.\"Out \"\"box\""]).source.table;
    assert_eq!(table.to_string(), "sales.\"Out \"\"box\"");
    assert_eq!(table.sql(), "\"sales\".\"Out \"\"box\"");
}

#[test]
fn a_slot_has_a_slots_name() {
    assert_eq!(run(&["--slot", "a_1"]).source.slot, "a_1");
    for name in ["My-Slot", "MySlot", "é", &"x".repeat(64)] {
        let words = ["lower-case letters, digits and underscores, at most 63"];
        refused(&["--slot", name], &words);
    }
}
