//! `walrelay check`: what is wrong, all at once, before anything is changed. Each refusal is also
//! `run`'s.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::kafka::Broker;
use crate::postgres::{Cluster, Pg, Stop};
use crate::proc::{self, AtParentDeath, Proc, RunAs, eventually};
use crate::refusals::{Holder, says};
use crate::relay::{Ended, run_to_end};
use crate::stage::{MINUTE, Stage};

/// What `--json` says.
pub struct Said {
    pub ok: bool,
    pub findings: Vec<Value>,
}

impl Said {
    #[track_caller]
    pub fn of(ended: &Ended) -> Said {
        let json: Value = serde_json::from_str(&ended.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}\n{}", ended.stdout, ended.stderr));
        Said {
            ok: json["ok"].as_bool().expect("ok is there"),
            findings: json["findings"].as_array().expect("a list").clone(),
        }
    }

    /// The one finding of that subject.
    #[track_caller]
    pub fn finding(&self, subject: &str) -> &Value {
        let mut of_it = self.findings.iter().filter(|f| f["subject"] == subject);
        let finding = of_it.next();
        assert!(of_it.next().is_none(), "two findings on {subject}");
        finding.unwrap_or_else(|| panic!("nothing on {subject}: {:#?}", self.findings))
    }

    #[track_caller]
    pub fn expect(&self, subject: &str, state: &str, words: &[&str]) {
        let finding = self.finding(subject);
        assert_eq!(finding["state"], state, "{finding:#}");
        for word in words {
            let text = finding.to_string();
            assert!(text.contains(word), "no {word} in {text}");
        }
    }

    fn of_state(&self, state: &str) -> Vec<&Value> {
        let findings = self.findings.iter();
        findings.filter(|f| f["state"] == state).collect()
    }
}

/// All but Kafka's side, whose one broker is no cluster.
fn only_postgres(mut said: Said) -> Said {
    said.findings.retain(|finding| finding["group"] != "kafka");
    said
}

#[test]
fn a_healthy_setup_is_ok_line_by_line() {
    for pg in Pg::ALL {
        let stage = Stage::shared(pg);
        stage.init();
        let ended = stage.check(&["--json"]).expect_code(0);
        let said = Said::of(&ended);
        assert!(said.ok);
        for finding in &said.findings {
            for key in ["group", "subject", "state", "found"] {
                assert!(finding[key].is_string(), "{finding}");
            }
            assert!(finding.get("remedy").is_some(), "{finding}");
        }
        let said = only_postgres(said);
        assert_eq!(
            said.of_state("ok").len(),
            said.findings.len(),
            "{:#?}",
            said.findings
        );
        said.expect("server version", "ok", &["Postgres"]);
        said.expect("replication connection", "ok", &["system identifier"]);
        let table = stage.check(&[]).expect_code(0);
        assert!(table.stderr.is_empty(), "{}", table.stderr);
        assert!(!table.stdout.contains('\x1b'), "colours in a pipe");
        let widest = table.stdout.lines().map(|l| l.chars().count()).max();
        assert!(widest <= Some(100), "{}", table.stdout);
    }
}

#[test]
fn before_init_everything_that_it_makes_is_named_and_nothing_is_made() {
    let stage = Stage::shared(Pg::V18);
    let ended = stage.check(&["--json"]);
    says(&ended, 3, &["public.outbox", "walrelay init"]);
    let said = Said::of(&ended);
    assert!(!said.ok);
    for subject in ["table", "publication", "slot"] {
        said.expect(subject, "failed", &["walrelay init"]);
    }
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert_eq!(last.matches("walrelay init").count(), 1, "{last}");
    let made = stage.db.connect().one(
        "select (select count(*) from pg_namespace where nspname = 'walrelay')
              + (select count(*) from pg_publication)",
    );
    assert_eq!(made, "0");
}

#[test]
fn while_a_relay_runs_its_slot_is_ok_and_its_session_named() {
    let stage = Stage::shared(Pg::V17);
    let sql = stage.init();
    let mut relay = stage.run();
    let slot = stage.db.slot();
    let pid = eventually(MINUTE, "the slot is read", || {
        let pid = sql.one(&format!(
            "select active_pid from pg_replication_slots where slot_name = '{slot}'"
        ));
        (!pid.is_empty()).then_some(pid)
    });
    let said = Said::of(&stage.check(&["--json"]).expect_code(0));
    said.expect("slot", "ok", &[&format!("pid {pid},"), "application_name"]);
    relay.stop();
}

#[test]
fn c11_a_slot_that_a_stranger_holds_is_a_warning_that_names_it() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let holder = Holder::start(&stage);
    let pid = sql.one(&format!(
        "select active_pid from pg_replication_slots where slot_name = '{}'",
        stage.db.slot()
    ));
    let said = Said::of(&stage.check(&["--json"]).expect_code(0));
    said.expect(
        "slot",
        "warning",
        &[&format!("pid {pid}"), "no walrelay", "client 127.0.0.1"],
    );
    drop(holder);
}

#[test]
fn c11_without_a_free_slot_the_idle_ones_are_listed() {
    let cluster = Cluster::with(Pg::V16, &["max_replication_slots = 1"]);
    let stage = Stage::on(&cluster, Broker::shared());
    stage
        .db
        .connect()
        .run("select pg_create_logical_replication_slot('forgotten', 'test_decoding')");
    let ended = stage.check(&[]);
    says(&ended, 3, &["53400", "forgotten (retains "]);
    // What the table says in lines, the last line says in one.
    assert!(
        ended.stdout.contains("max_replication_slots"),
        "{}",
        ended.stdout
    );
}

#[test]
fn c04_every_unmet_need_of_a_server_is_named_at_once() {
    let cluster = Cluster::with(
        Pg::V15,
        &["wal_level = replica", "max_wal_senders = 0", "fsync = off"],
    );
    let stage = Stage::on(&cluster, Broker::shared());
    let words = [
        "wal_level is replica",
        "55000",
        "alter system set wal_level",
        "rds.logical_replication",
        "max_wal_senders",
        "fsync",
    ];
    let ended = stage.check(&[]);
    says(&ended, 3, &words);
    // The connection that max_wal_senders refuses is no second thing to do.
    assert!(
        !ended.stderr.contains("wait until a connection"),
        "{}",
        ended.stderr
    );
    says(&stage.try_init(), 3, &words);
    let made = stage
        .db
        .connect()
        .one("select count(*) from pg_publication");
    assert_eq!(made, "0");
}

#[test]
fn fsync_off_is_refused_by_check_and_run() {
    let cluster = Cluster::start(Pg::V17);
    let stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    cluster.configure(&["fsync = off"]);
    cluster.reload();
    eventually(MINUTE, "fsync is off", || {
        (sql.one("show fsync") == "off").then_some(())
    });
    stage.refused_by_both(3, &["fsync is off", "alter system set fsync = on"]);
}

#[test]
fn c02_a_line_for_physical_replication_is_no_line_for_the_database() {
    let cluster = Cluster::start(Pg::V18);
    cluster
        .connect("postgres")
        .run("create role app login replication");
    let mut stage = Stage::on(&cluster, Broker::shared());
    stage.init();
    stage.user = "app".to_owned();
    cluster.hba(&[
        "local all all trust",
        "host replication app 127.0.0.1/32 trust",
        "host all postgres 127.0.0.1/32 trust",
    ]);
    let line = format!("\"{}\" \"app\" 127.0.0.1/32 scram-sha-256", stage.db.name);
    let words = [
        "28000",
        "no pg_hba.conf entry",
        &line,
        "physical replication",
    ];
    eventually(MINUTE, "the server has read its file", || {
        (stage.check(&[]).code == 3).then_some(())
    });
    stage.refused_by_both(3, &words);
}

/// PgBouncer of the distribution, in front of a cluster.
fn pgbouncer(cluster: &Cluster) -> (Proc, u16) {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .map(|dir| dir.join("pgbouncer"))
        .find(|program| program.exists())
        .expect("no pgbouncer: run tests/servers/install.sh servers");
    let dir = proc::dir("pgbouncer");
    let port = proc::free_port();
    let config = dir.join("pgbouncer.ini");
    std::fs::write(
        &config,
        format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n\
             [users]\n",
            cluster.port
        )
        .replace("* = host=127.0.0.1", "* = user=postgres host=127.0.0.1"),
    )
    .expect("the directory is ours");
    let mut command = proc::command(program, RunAs::Unprivileged, AtParentDeath::Kill);
    command.arg(&config).current_dir("/");
    let mut pooler = Proc::start(command, &dir.join("log"));
    eventually(MINUTE, "the pooler listens", || {
        assert!(pooler.ended().is_none(), "see {}", dir.display());
        TcpStream::connect(("127.0.0.1", port)).ok()
    });
    (pooler, port)
}

#[test]
fn c03_a_pooler_in_the_way_is_recognised() {
    let stage = Stage::shared(Pg::V15);
    stage.init();
    let (_pooler, port) = pgbouncer(stage.db.cluster);
    let url = format!("postgresql://postgres@127.0.0.1:{port}/{}", stage.db.name);
    let (slot, brokers) = (stage.db.slot(), stage.broker.bootstrap());
    for command in ["check", "run"] {
        let args = [
            command,
            "--database-url",
            &url,
            "--slot",
            &slot,
            "--brokers",
            &brokers,
        ];
        let ended = run_to_end(&args, &[], MINUTE);
        says(&ended, 3, &["08P01", "PgBouncer"]);
    }
}

#[test]
fn c05_a_standby_is_refused() {
    let cluster = Cluster::start(Pg::V16);
    let stage = Stage::on(&cluster, Broker::shared());
    stage.init();
    cluster.stop(Stop::Fast);
    cluster.put("standby.signal", b"");
    cluster.up();
    stage.refused_by_both(3, &["in recovery", "connect to the primary"]);
    // Its own slots and settings say nothing of the primary's.
    let said = Said::of(&stage.check(&["--json"]));
    assert_eq!(only_postgres(said).of_state("failed").len(), 1);
}

/// Sends each connection to the next of these ports, as a balancer would.
fn balancer(ports: [u16; 2]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    std::thread::spawn(move || {
        for (client, server) in listener.incoming().zip(ports.into_iter().cycle()) {
            let (Ok(mut from), Ok(mut to)) = (client, TcpStream::connect(("127.0.0.1", server)))
            else {
                return;
            };
            let (Ok(mut back_from), Ok(mut back_to)) = (to.try_clone(), from.try_clone()) else {
                return;
            };
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
        }
    });
    port
}

#[test]
fn c05_two_servers_behind_one_address_are_not_taken_for_one() {
    let servers = [Pg::V16, Pg::V17].map(|pg| Cluster::shared(pg).port);
    let port = balancer(servers);
    let url = format!("postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable");
    let ended = run_to_end(&["check", "--database-url", &url], &[], MINUTE);
    says(&ended, 3, &["another server", "balancer"]);
}

#[test]
fn c13_an_unreachable_server_ends_check_in_time_with_its_reason() {
    let check = |url: &str| {
        let began = Instant::now();
        let ended = run_to_end(&["check", "--database-url", url], &[], MINUTE);
        assert!(began.elapsed() < Duration::from_secs(8), "{url}");
        ended
    };
    let closed = format!("postgresql://u@127.0.0.1:{}/d", proc::free_port());
    says(&check(&closed), 3, &["refused the connection"]);
    let unknown = "postgresql://u@no-such-host.invalid/d";
    says(&check(unknown), 3, &["no-such-host.invalid", "resolve"]);
    // Takes the connection and never says a word.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = silent.local_addr().expect("it is bound").port();
    let url = format!("postgresql://u@127.0.0.1:{port}/d?connect_timeout=2");
    says(&check(&url), 3, &["timed out"]);
    // Answers, but is not there yet.
    let starting = starting_server();
    let url = format!("postgresql://u@127.0.0.1:{starting}/d?sslmode=disable");
    says(&check(&url), 3, &["57P03", "starting up", "wait until"]);
}

/// The port of a server that says to everybody that it is starting up.
fn starting_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let Ok(mut client) = client else { return };
            let mut startup = [0; 4096];
            let _ = client.read(&mut startup);
            let body = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0";
            let length = u32::try_from(body.len() + 4).expect("short").to_be_bytes();
            let _ = client.write_all(&[b"E", &length[..], body].concat());
        }
    });
    port
}

#[test]
fn d07_a_table_under_an_old_name_is_told_from_the_published_one() {
    for swap in [
        "alter table outbox rename to outbox_old;
         create table outbox (like outbox_old including all)",
        "drop table outbox cascade;
         create table outbox (event_id uuid, aggregate_type text, aggregate_id text,
           event_type text, payload jsonb, headers jsonb, xid xid8, created_at timestamptz)",
    ] {
        let stage = Stage::shared(Pg::V16);
        let sql = stage.init();
        sql.run(swap);
        let oid = sql.one("select 'outbox'::regclass::oid");
        let new = format!("public.outbox is a new table (oid {oid})");
        let words = [new.as_str(), "the published one is"];
        stage.refused_by_both(3, &words);
        says(&stage.status(&["--http", "off"]), 3, &words);
    }
}

#[test]
fn d08_and_d09_generated_keys_and_second_tables_are_refused() {
    let stage = Stage::shared(Pg::V17);
    let sql = stage.init();
    sql.run(
        "create schema b; create table b.outbox (like public.outbox including all);
         alter publication walrelay add table b.outbox",
    );
    let mend = "alter publication \"walrelay\" set table only \"public\".\"outbox\"";
    stage.refused_by_both(3, &["b.outbox beside public.outbox", mend]);
    sql.run(mend);
    sql.run(
        "alter table outbox drop column aggregate_id;
         alter table outbox add column aggregate_id text
           generated always as (payload->>'id') stored",
    );
    stage.refused_by_both(3, &["column aggregate_id", "generated"]);
}

#[test]
fn t04_row_security_that_hides_rows_is_refused() {
    let mut stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    stage.user = format!("secured_{}", stage.db.name);
    sql.run(&format!(
        "create role {0} login replication;
         grant usage on schema walrelay to {0};
         grant select, insert, update, delete on all tables in schema walrelay to {0};
         grant select on outbox to {0};
         alter table outbox enable row level security",
        stage.user
    ));
    let hides = format!(
        "row security hides rows of public.outbox from role \"{}\"",
        stage.user
    );
    stage.refused_by_both(3, &[&hides, "bypassrls"]);
    sql.run(&format!("alter role {} bypassrls", stage.user));
    stage.check(&[]).expect_code(0);
    sql.run(&format!("drop owned by {0}; drop role {0}", stage.user));
}

#[test]
fn a_second_relay_needs_names_of_its_own() {
    let mut stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let first = stage.db.slot();
    // Another slot on the same table.
    stage.source_args = vec!["--slot".to_owned(), format!("{first}_b")];
    let through = format!("already relayed through slot {first}");
    let names = format!("remedy: use --slot {first} --publication walrelay");
    let check = |stage: &Stage<'_>, more: &[&str]| {
        let url = stage.db.url();
        let args = [&["check", "--database-url", &url], more].concat();
        run_to_end(&args, &[], MINUTE)
    };
    let other = format!("{first}_b");
    says(&check(&stage, &["--slot", &other]), 3, &[&through, &names]);
    // The same slot for another table, with its publication and without.
    sql.run("create table second (like outbox including all)");
    for (publication, held) in [
        (
            "walrelay",
            "and publication walrelay are those of public.outbox",
        ),
        ("second", "is that of public.outbox"),
    ] {
        for command in ["init", "check"] {
            let url = stage.db.url();
            let args = ["--table", "second", "--publication", publication];
            let args = [
                &[command, "--database-url", &url, "--slot", &first],
                &args[..],
            ]
            .concat();
            let ended = run_to_end(&args, &[], MINUTE);
            let held = format!("slot {first} {held}");
            says(
                &ended,
                3,
                &[
                    &held,
                    "give public.second a slot and a publication of its own",
                ],
            );
            // The first one's are nobody's to drop.
            assert!(!ended.stderr.contains("drop"), "{}", ended.stderr);
        }
    }
    // And the same publication.
    let ended = check(&stage, &["--slot", &other, "--table", "second"]);
    says(
        &ended,
        3,
        &["publication walrelay is that of public.outbox", "its own"],
    );
    // Side by side with names of its own.
    let own = [
        "--slot",
        &other,
        "--table",
        "second",
        "--publication",
        "second",
    ];
    let url = stage.db.url();
    let init = [&["init", "--database-url", &url], &own[..]].concat();
    run_to_end(&init, &[], MINUTE).expect_code(0);
    check(&stage, &own).expect_code(0);
    check(&stage, &["--slot", &first]).expect_code(0);
    let ended = check(&stage, &["--table", "second", "--slot", &first]);
    let names = format!("remedy: use --slot {other} --publication second");
    says(&ended, 3, &[&names]);
    assert!(!ended.stderr.contains("drop"), "{}", ended.stderr);
}

#[test]
fn a_question_that_is_not_answered_is_unknown_and_stops_no_other() {
    let cluster = Cluster::start(Pg::V18);
    let mut stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    sql.run(
        "create role app login replication;
         grant usage on schema walrelay to app;
         grant select, insert, update, delete on all tables in schema walrelay to app;
         grant select on outbox to app;
         revoke select on pg_catalog.pg_prepared_xacts from public;
         revoke select on pg_catalog.pg_db_role_setting from public;
         revoke execute on function pg_catalog.pg_control_system() from public",
    );
    stage.user = "app".to_owned();
    let said = Said::of(&stage.check(&["--json"]).expect_code(0));
    said.expect("long transactions", "unknown", &["permission denied"]);
    said.expect("synchronous_commit", "unknown", &["permission denied"]);
    said.expect("replication connection", "unknown", &["may not be asked"]);
    said.expect("slot", "ok", &[&stage.db.slot()]);
}

#[test]
fn what_an_operator_counts_on_is_warned_of() {
    let cluster = Cluster::with(
        Pg::V18,
        &[
            "max_slot_wal_keep_size = -1",
            "full_page_writes = off",
            "idle_replication_slot_timeout = '1h'",
        ],
    );
    let stage = Stage::on(&cluster, Broker::shared());
    let sql = stage.init();
    sql.run(&format!(
        "alter database {0} set synchronous_commit = off;
         select pg_create_physical_replication_slot('standby');
         alter table outbox drop column xid, drop column created_at",
        stage.db.name
    ));
    let said = Said::of(&stage.check(&["--json"]).expect_code(0));
    assert!(said.ok);
    said.expect("max_slot_wal_keep_size", "warning", &["disk is full"]);
    said.expect("full_page_writes", "warning", &["full_page_writes is off"]);
    said.expect("idle_replication_slot_timeout", "warning", &["1h"]);
    let database = format!("database {}", stage.db.name);
    said.expect("synchronous_commit", "warning", &[&database]);
    said.expect("synchronized_standby_slots", "warning", &["empty"]);
    said.expect("column xid", "warning", &["no gap recovery"]);
    said.expect("column created_at", "warning", &["age"]);
    assert!(only_postgres(said).of_state("failed").is_empty());
}
