//! A table that is swapped under a running relay, one that has children, one whose rows may move:
//! what is said of them, and the commands that are said, typed as they stand.

use crate::check_command::Said;
use crate::http::{self, Ready};
use crate::postgres::{Pg, Sql};
use crate::proc::eventually;
use crate::refusals::says;
use crate::relay::{Ended, Relay, run_to_end};
use crate::stage::{MINUTE, Stage};

const RENAMED: &str = "begin; alter table outbox rename to \"Old box\";
    create table outbox (like \"Old box\" including all); commit";
const DROPPED: &str = "begin; create table copy (like outbox including all); drop table outbox;
    alter table copy rename to outbox; commit";

fn serving(stage: &mut Stage<'_>) -> (Relay, String) {
    stage.run_args = vec!["--http".to_owned(), "127.0.0.1:0".to_owned()];
    let mut relay = stage.run();
    let address = http::address(&mut relay);
    relay.wait_for_text("streaming from", MINUTE);
    (relay, address)
}

fn insert(sql: &Sql, table: &str, key: &str) {
    sql.run(&format!(
        "insert into {table} (event_id, aggregate_type, aggregate_id, event_type, payload)
         values (gen_random_uuid(), 't', '{key}', 'e', '{{}}')"
    ));
}

/// What `/readyz` says of the publication, once it is not well.
fn trouble(address: &str) -> (String, String) {
    eventually(MINUTE, "the publication is not well", || {
        let ready = Ready::of(address);
        let of_it = ready.condition("publication");
        (of_it["ok"] == false).then(|| {
            let text = |name: &str| of_it[name].as_str().unwrap_or_default().to_owned();
            (text("what"), text("remedy"))
        })
    })
}

/// The last line of standard error, without its first word.
fn last_remedy(ended: &Ended) -> String {
    let last = ended.stderr.lines().last().unwrap_or_default();
    last.strip_prefix("remedy: ").expect("a remedy").to_owned()
}

/// What becomes of the old table's relay.
fn old_part(remedy: &str) -> &str {
    let at = remedy.find("the old one's (").expect("it is said");
    &remedy[at..]
}

/// What stands between two texts.
#[track_caller]
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let Some((_, rest)) = text.split_once(from) else {
        panic!("no {from} in {text}");
    };
    rest.split_once(to).expect("it ends").0
}

/// As a shell takes a line apart.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut is_quoted = false;
    for c in line.chars() {
        match c {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(String::new()),
            _ => words.last_mut().expect("one at least").push(c),
        }
    }
    words
}

/// A command with these words, and where the servers are.
fn line(stage: &Stage<'_>, command: &str, names: &str) -> Vec<String> {
    let mut args = vec![command.to_owned()];
    args.extend(["--database-url".to_owned(), stage.db.url()]);
    args.extend(words(names));
    if command == "run" {
        let topic = format!("{}.{{aggregate_type}}", stage.prefix);
        let more = ["--brokers", &stage.broker.bootstrap(), "--topic", &topic];
        args.extend(more.map(str::to_owned));
    }
    if command != "init" {
        args.extend(["--http", "off"].map(str::to_owned));
    }
    args
}

fn typed(stage: &Stage<'_>, command: &str, names: &str) -> Ended {
    let args = line(stage, command, names);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    run_to_end(&args, &[], MINUTE)
}

fn started(stage: &Stage<'_>, names: &str) -> Relay {
    let args = line(stage, "run", names);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Relay::start(&args, &[])
}

/// Nothing false is said of the relay that runs, and one remedy is said by all.
fn all_say(stage: &Stage<'_>, address: &str, remedy: &str) {
    let status = stage.status(&["--json", "--http", address]);
    assert_eq!(status.code, 3, "{}", status.stdout);
    for word in ["pg_terminate_backend", "no walrelay", "no relay of"] {
        let all = [&status.stdout[..], &status.stderr].concat();
        assert!(!all.contains(word), "{all}");
    }
    let said = Said::of(&status);
    said.expect("leader", "ok", &["process id"]);
    said.expect("slot", "ok", &["read by"]);
    assert_eq!(last_remedy(&status), remedy);
    assert_eq!(last_remedy(&stage.try_init()), remedy);
    assert!(last_remedy(&stage.check(&[])).starts_with(remedy));
}

#[test]
fn d07_what_is_said_of_a_renamed_table_keeps_every_event_as_typed() {
    for pg in [Pg::V15, Pg::V18] {
        let mut stage = Stage::shared(pg);
        let sql = stage.init();
        let (mut relay, address) = serving(&mut stage);
        insert(&sql, "outbox", "o1");
        stage.records(1);
        sql.run(RENAMED);
        insert(&sql, "outbox", "n1");
        insert(&sql, "\"Old box\"", "o2");
        let (what, remedy) = trouble(&address);
        assert!(
            what.contains("public.outbox is a new table (oid "),
            "{what}"
        );
        stage.records(2);
        all_say(&stage, &address, &remedy);
        // The new table through names of its own, the old relay still running.
        let names = between(&remedy, "walrelay init ", ", and walrelay run");
        typed(&stage, "init", names).expect_code(0);
        let own = names.strip_suffix(" --existing leave").expect("its last");
        let mut second = started(&stage, own);
        insert(&sql, "outbox", "n2");
        stage.records(3);
        sql.run(
            "create temp table again as select * from outbox where aggregate_id = 'n1';
             delete from outbox where aggregate_id = 'n1';
             insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
               select event_id, aggregate_type, aggregate_id, event_type, payload from again",
        );
        stage.records(4);
        // The old one, stopped and started again under its new name.
        relay.stop();
        insert(&sql, "\"Old box\"", "o3");
        let stopped = stage.status(&["--http", "off", "--json"]);
        assert!(last_remedy(&stopped).ends_with(old_part(&remedy)));
        Said::of(&stopped).expect("undelivered rows", "ok", &["1 row"]);
        let names = between(&remedy, "(stopped: walrelay run ", ") may go");
        let mut old = started(&stage, names);
        let mut keys: Vec<String> = stage.records(5).iter().map(|r| r.key_text()).collect();
        keys.sort();
        assert_eq!(keys, ["n1", "n2", "o1", "o2", "o3"]);
        let of_it = between(&remedy, "and walrelay status ", " shows undelivered");
        eventually(MINUTE, "undelivered rows: none", || {
            let said = Said::of(&typed(&stage, "status", &format!("{of_it} --json")));
            (said.finding("undelivered rows")["found"] == "none").then_some(())
        });
        old.stop();
        let gone = remedy.split_once("stop it, ").expect("the last step").1;
        sql.run(gone);
        second.assert_alive();
        typed(&stage, "status", own).expect_code(0);
        second.stop();
    }
}

#[test]
fn d07_what_is_said_of_a_dropped_table_keeps_what_its_relay_can_deliver() {
    let mut stage = Stage::shared(Pg::V16);
    let sql = stage.init();
    let (mut relay, address) = serving(&mut stage);
    insert(&sql, "outbox", "o1");
    sql.run(DROPPED);
    let (_, remedy) = trouble(&address);
    stage.records(1);
    all_say(&stage, &address, &remedy);
    let names = between(&remedy, "walrelay init ", ", and walrelay run");
    typed(&stage, "init", names).expect_code(0);
    relay.stop();
    let stopped = stage.status(&["--http", "off", "--json"]);
    assert!(last_remedy(&stopped).ends_with(old_part(&remedy)));
    sql.run(remedy.split_once("stop it, ").expect("the last step").1);
    let own = names.strip_suffix(" --existing leave").expect("its last");
    let mut second = started(&stage, own);
    insert(&sql, "outbox", "n1");
    stage.records(2);
    second.stop();
}

#[test]
fn a_new_table_in_the_old_one_s_publication_is_taken_out_again() {
    let mut stage = Stage::shared(Pg::V17);
    let sql = stage.init();
    let (mut relay, address) = serving(&mut stage);
    sql.run(RENAMED);
    sql.run("alter publication walrelay set table outbox");
    let remedy = eventually(MINUTE, "it is noticed", || {
        let (what, remedy) = trouble(&address);
        what.contains("this relay is that of the old one")
            .then_some(remedy)
    });
    all_say(&stage, &address, &remedy);
    let (back, _) = remedy.split_once("; then ").expect("the first step");
    sql.run(back);
    insert(&sql, "\"Old box\"", "o1");
    stage.records(1);
    relay.stop();
    let names = between(&remedy, "(stopped: walrelay run ", ") may go");
    let check = typed(&stage, "status", names);
    says(&check, 3, &["no relay of public.\"Old box\" runs"]);
}

#[test]
fn children_are_left_out_and_said_and_what_is_said_puts_it_right() {
    for pg in Pg::ALL {
        let stage = Stage::shared(pg);
        let sql = stage.db.connect();
        sql.run(
            "create table outbox (event_id uuid, aggregate_type text, aggregate_id text,
               event_type text, payload jsonb, headers jsonb);
             create table child () inherits (outbox)",
        );
        let init = stage.try_init().expect_code(0);
        let left_out = "rows of public.child are not published";
        assert!(init.stdout.contains(left_out), "{}", init.stdout);
        stage.broker.create_topic(&stage.topic("t"), 1);
        let check = Said::of(&stage.check(&["--json"]).expect_code(0));
        check.expect("inheritance", "warning", &[left_out]);
        let mut relay = stage.run();
        relay.wait_for_text(left_out, MINUTE);
        insert(&sql, "child", "no");
        insert(&sql, "outbox", "yes");
        stage.wait_confirmed(MINUTE);
        let keys: Vec<String> = stage.records(1).iter().map(|r| r.key_text()).collect();
        assert_eq!(keys, ["yes"]);
        relay.stop();
        sql.run("alter publication walrelay set table outbox");
        let check = stage.check(&[]);
        says(&check, 3, &["covers public.child beside public.outbox"]);
        sql.run(&last_remedy(&check));
        stage.check(&[]).expect_code(0);
    }
}

#[test]
fn d05_who_may_move_a_row_to_another_partition_is_named() {
    for pg in Pg::ALL {
        let stage = Stage::shared(pg);
        let sql = stage.db.connect();
        sql.run(
            "create table outbox (event_id uuid, aggregate_type text, aggregate_id text,
               event_type text, payload jsonb, headers jsonb, day date default now())
               partition by range (day);
             create table later partition of outbox default",
        );
        stage.try_init().expect_code(0);
        stage.broker.create_topic(&stage.topic("t"), 1);
        let about = |said: &Said| {
            let mut findings = said.findings.iter();
            findings.any(|f| f["subject"] == "partition key")
        };
        assert!(!about(&Said::of(&stage.check(&["--json"]).expect_code(0))));
        let role = format!("mover_{}", stage.db.name);
        sql.run(&format!(
            "create role {role}; grant update (payload) on outbox to {role}"
        ));
        assert!(!about(&Said::of(&stage.check(&["--json"]).expect_code(0))));
        sql.run(&format!("grant update (day) on outbox to {role}"));
        let said = Said::of(&stage.check(&["--json"]).expect_code(0));
        said.expect("partition key", "ok", &[&role, "published again"]);
        // A publication of the root alone publishes its partitions.
        let mut relay = stage.run();
        insert(&sql, "outbox", "k");
        insert(&sql, "later", "k");
        assert_eq!(stage.records(2).len(), 2);
        relay.stop();
        sql.run(&format!("drop owned by {role}; drop role {role}"));
    }
}
