//! `walrelay dead-letters`: no relay and no Kafka are needed for any of it.

use serde_json::Value;
use walrelay::dead_letter::{DeadLetter, Reason, Tripped};
use walrelay::io::dead_letters::trip;
use walrelay::io::registry;

use crate::check_command::Said;
use crate::dead_letter_store::{Store, letter};
use crate::postgres::{Cluster, Pg, Sql, runtime};
use crate::refusals::says;
use crate::relay::{Ended, run_to_end};
use crate::stage::MINUTE;

/// A store with a key of three, one of one, and one that has none.
fn store(pg: Pg) -> Store<'static> {
    let store = Store::on(Cluster::shared(pg).database());
    let because = |mut letter: DeadLetter, reason| {
        letter.why.reason = reason;
        letter
    };
    store.park(&[
        letter("a1", Some("a"), 1, 0),
        because(letter("a2", Some("a"), 2, 0), Reason::Behind),
        because(letter("a3", Some("a"), 3, 0), Reason::Behind),
        because(letter("b1", Some("it's b"), 4, 0), Reason::TopicAbsent),
        because(letter("n1", None, 5, 0), Reason::MalformedRow),
    ]);
    store
}

fn say_as(store: &Store<'_>, user: &str, args: &[&str]) -> Ended {
    let url = store.db.url_as(user);
    let args = [&["dead-letters"], args, &["--database-url", &url]].concat();
    run_to_end(&args, &[], MINUTE)
}

fn say(store: &Store<'_>, args: &[&str]) -> Ended {
    say_as(store, "postgres", args)
}

fn json(store: &Store<'_>, args: &[&str]) -> Value {
    let ended = say(store, &[args, &["--json"]].concat()).expect_code(0);
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {}", ended.stdout))
}

fn events(list: &Value) -> Vec<&str> {
    let letters = list["dead_letters"].as_array().expect("a list");
    let id = |letter: &'_ Value| letter["event_id"].as_str().map(str::len);
    assert!(letters.iter().all(|letter| id(letter).is_some()));
    letters
        .iter()
        .map(|letter| letter["event_id"].as_str().unwrap_or_default())
        .collect()
}

fn marked(sql: &Sql) -> String {
    sql.one(
        "select string_agg(event_id || ':' || retry_requested_by, ' ' order by event_id) \
         from walrelay.dead_letter where retry_requested_at is not null",
    )
}

fn touched(sql: &Sql) -> String {
    sql.one("select dead_letters_touched from walrelay.relay")
}

#[test]
fn a_list_is_of_keys_and_says_how_much_there_is() {
    for pg in [Pg::V15, Pg::V18] {
        let store = store(pg);
        let list = json(&store, &["list"]);
        assert_eq!(events(&list), ["a1", "b1", "n1"]);
        assert_eq!(list["parked_events"], 5);
        assert_eq!(list["parked_keys"], 3);
        assert_eq!(list["leader"], false);
        assert_eq!(list["dead_letters"][0]["key_events"], 3);
        assert_eq!(list["dead_letters"][0]["reason"], "too_large");
        assert_eq!(
            events(&json(&store, &["list", "--newest", "--limit", "2"])),
            ["n1", "b1"]
        );
        assert_eq!(
            events(&json(&store, &["list", "--key", "a", "--type", "t"])),
            ["a1", "a2", "a3"]
        );
        assert_eq!(
            events(&json(&store, &["list", "--key", "a", "--type", "x"])),
            [""; 0]
        );
        assert_eq!(events(&json(&store, &["list", "--topic", "x"])), [""; 0]);
        assert_eq!(
            events(&json(&store, &["list", "--topic", "topic.t"])).len(),
            3
        );
        let text = say(&store, &["list"]).expect_code(0).stdout;
        for word in ["5 events of 3 keys parked", "it's b", "(none)", "too_large"] {
            assert!(text.contains(word), "no {word} in:\n{text}");
        }
        assert!(!text.contains("\"of\""), "a payload: {text}");
    }
}

#[test]
fn show_tells_all_of_one_and_what_to_do() {
    let store = store(Pg::V18);
    let mut odd = letter("odd", Some("\u{1b}[2Jk"), 9, 0);
    odd.record.value = Some(vec![b'x'; 5_000].into());
    store.park(&[odd]);
    let text = say(&store, &["show", "a1"]).expect_code(0).stdout;
    for word in [
        "too_large",
        "MSG_SIZE_TOO_LARGE (10)",
        "1,048,577 bytes",
        "max.message.bytes",
        "dead-letters retry row:1",
        "dead-letters discard row:1",
        "3 events parked, from row:1",
        "commit 0/1 row 0",
        "event_id: a1",
        "12 bytes: {\"of\": \"a1\"}",
    ] {
        assert!(text.contains(word), "no {word} in:\n{text}");
    }
    let behind = say(&store, &["show", "event:a3"]).expect_code(0).stdout;
    assert!(behind.contains("dead-letters show row:1"), "{behind}");
    let odd = say(&store, &["show", "odd"]).expect_code(0).stdout;
    assert!(
        odd.contains("\\u{1b}[2Jk") && !odd.contains('\u{1b}'),
        "{odd}"
    );
    assert!(
        odd.contains("5000 bytes: xxx") && odd.len() < 3_000,
        "{odd}"
    );
    let whole = json(&store, &["show", "b1"]);
    assert_eq!(whole["reason"], "topic_absent");
    assert_eq!(whole["headers"][0]["value"], "b1");
    assert_eq!(whole["value_bytes"], 12);
    assert!(
        whole["remedy"].to_string().contains("create topic topic.t"),
        "{whole:#}"
    );
    says(
        &say(&store, &["show", "no such"]),
        3,
        &["no dead letter no such"],
    );
    // A row's id and another's event_id.
    store.park(&[letter("1", Some("one"), 10, 0)]);
    says(&say(&store, &["show", "1"]), 2, &["row:", "event:"]);
    assert_eq!(json(&store, &["show", "row:1"])["event_id"], "a1");
    assert_eq!(json(&store, &["show", "event:1"])["aggregate_id"], "one");
}

#[test]
fn a_retry_is_a_mark_on_the_first_row_of_its_key() {
    for pg in [Pg::V15, Pg::V18] {
        let store = store(pg);
        let sql = store.db.connect();
        let ended = say(&store, &["retry", "a3"]).expect_code(0);
        assert_eq!(marked(&sql), "a1:postgres");
        assert_eq!(touched(&sql), "1");
        for word in ["3 events of 1 key", "no relay leads", "walrelay run"] {
            assert!(ended.stdout.contains(word), "{}", ended.stdout);
        }
        let client = store.client();
        runtime().block_on(async {
            let led = registry::try_lock(&client, store.oid).await;
            assert_eq!(led, Ok(true));
        });
        let ended = say(&store, &["retry", "--key", "it's b", "--type", "t"]).expect_code(0);
        assert!(ended.stdout.contains("the leader (pid"), "{}", ended.stdout);
        let key = &store.load(1, 0).keys;
        assert!(key.iter().all(|key| key.is_retried), "{key:?}");
        assert_eq!(marked(&sql), "a1:postgres b1:postgres");
        let done = json(&store, &["retry", "--all"]);
        assert_eq!((&done["events"], &done["keys"]), (&5.into(), &3.into()));
        assert_eq!(done["leader"], true);
        assert_eq!(marked(&sql), "a1:postgres b1:postgres n1:postgres");
        assert_eq!(
            (touched(&sql), store.load(1, 0).touched),
            ("3".to_owned(), 3)
        );
        for wrong in [
            &["retry", "zz"][..],
            &["retry", "--key", "zz"],
            &["retry", "--key", "a", "--type", "zz"],
        ] {
            says(&say(&store, wrong), 3, &["dead-letters list"]);
        }
    }
}

#[test]
fn a_discard_wants_a_yes_and_keeps_who_and_when() {
    let store = store(Pg::V18);
    let sql = store.db.connect();
    let role = format!("ops_{}", store.db.name);
    sql.run(&format!("create role {role} login"));
    says(
        &say(&store, &["discard", "a1"]),
        2,
        &["1 event of 1 key", "--yes"],
    );
    assert_eq!(touched(&sql), "0");
    // What is said in the remedy is enough.
    let refused = say_as(&store, &role, &["discard", "a1", "--yes"]);
    says(&refused, 3, &["grant usage on schema walrelay"]);
    let remedy = refused.stderr.lines().last().unwrap_or_default();
    let grants = remedy.trim_start_matches("remedy: ");
    sql.run(&grants.replace("to retry and discard: ", ""));
    let ended = say_as(&store, &role, &["discard", "a1", "--yes"]).expect_code(0);
    assert!(
        ended
            .stdout
            .contains("2 events of the same key stay parked"),
        "{}",
        ended.stdout
    );
    let row = "select status, settled_by, settled_at > now() - interval '1 hour', \
               settled_lsn <= pg_current_wal_insert_lsn() from walrelay.dead_letter \
               where event_id = 'a1'";
    let row: Vec<String> = sql.rows(row)[0].iter().flatten().cloned().collect();
    assert_eq!(row, ["discarded", &role, "t", "t"]);
    assert_eq!(touched(&sql), "1");
    let again = say_as(&store, &role, &["discard", "a1", "--yes"]);
    says(&again, 3, &["is discarded already"]);
    say_as(&store, &role, &["retry", "--all"]).expect_code(0);
    let done = json(&store, &["discard", "--key", "a", "--yes"]);
    assert_eq!((&done["events"], &done["keys"]), (&2.into(), &1.into()));
    assert_eq!(
        events(&json(&store, &["list", "--status", "discarded"])),
        ["a1", "a2", "a3"]
    );
    let done = json(&store, &["discard", "--all", "--yes"]);
    assert_eq!((&done["events"], &done["keys"]), (&2.into(), &2.into()));
    assert_eq!(store.load(1, 0).keys, []);
    let none = say(&store, &["list"]).expect_code(0).stdout;
    assert!(none.contains("nothing is parked"), "{none}");
    sql.run(&format!("drop owned by {role}; drop role {role}"));
}

#[test]
fn a_topic_that_is_held_is_shown_with_the_command_that_parks_it() {
    let store = store(Pg::V15);
    let sql = store.db.connect();
    says(
        &say(&store, &["park", "--topic", "topic.t"]),
        3,
        &["no topic's events are held"],
    );
    let client = store.client();
    let held = Tripped {
        topic: "topic.t".to_owned(),
        reason: Reason::TopicAbsent,
        message: "100 keys within 10 minutes".to_owned(),
        since: walrelay::lsn::PgTimestamp(0),
        is_park_asked: false,
    };
    let done = runtime().block_on(trip(&client, store.oid, &held));
    done.expect("tripped");
    let command = "walrelay dead-letters park --topic=topic.t";
    let list = json(&store, &["list"]);
    assert_eq!(list["tripped_topics"][0]["command"], command);
    let text = say(&store, &["list"]).expect_code(0).stdout;
    assert!(text.contains(command), "{text}");
    let (url, slot) = (store.db.url(), store.db.slot());
    let report = |name: &str| {
        let args = [name, "--json", "--database-url", &url, "--slot", &slot];
        Said::of(&run_to_end(&args, &[], MINUTE))
    };
    report("status").expect("topic topic.t", "failed", &[command]);
    report("status").expect("parked", "warning", &["5 events of 3 keys"]);
    report("check").expect("topic topic.t", "warning", &[command]);
    say(&store, &["park", "--topic=topic.t"]).expect_code(0);
    assert!(store.load(1, 0).tripped[0].is_park_asked);
    assert_eq!(touched(&sql), "1");
    report("status").expect("topic topic.t", "warning", &["asked to park"]);
    says(
        &say(&store, &["park", "--topic", "x"]),
        3,
        &["topic topic.t"],
    );
}

#[test]
fn what_is_in_the_way_is_said_with_its_exit_code() {
    let nowhere = ["--database-url", "postgresql://u@127.0.0.1:1/d"];
    let args = [&["dead-letters", "list"], &nowhere[..]].concat();
    says(&run_to_end(&args, &[], MINUTE), 3, &["127.0.0.1"]);
    let db = Cluster::shared(Pg::V15).database();
    let url = db.url();
    let list = ["dead-letters", "list", "--database-url", &url];
    says(
        &run_to_end(&list, &[], MINUTE),
        3,
        &["public.outbox", "init"],
    );
    let ended = run_to_end(&["dead-letters", "retry"], &[], MINUTE);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
}

/// A role that may stream and not park is refused where parking is the policy.
#[test]
fn check_wants_the_right_to_park_unless_poison_halts() {
    let store = store(Pg::V18);
    let sql = store.db.connect();
    let role = format!("runner_{}", store.db.name);
    sql.run(&format!(
        "create role {role} login replication; grant usage on schema walrelay to {role}; \
         grant select on all tables in schema walrelay to {role}; \
         grant select on outbox to {role}"
    ));
    let (url, slot) = (store.db.url_as(&role), store.db.slot());
    let check = |more: &[&str]| {
        let args = ["check", "--json", "--database-url", &url, "--slot", &slot];
        run_to_end(&[&args[..], more].concat(), &[], MINUTE)
    };
    let halts = check(&["--on-poison", "halt"]).expect_code(0);
    assert!(!halts.stdout.contains("rights to park"), "{}", halts.stdout);
    let refused = check(&[]);
    says(&refused, 3, &["could not be parked", "--on-poison halt"]);
    let remedy = Said::of(&refused).finding("rights to park")["remedy"].clone();
    let grants = remedy.as_str().and_then(|text| text.split(" (").next());
    sql.run(grants.expect("a remedy"));
    Said::of(&check(&[]).expect_code(0)).expect("rights to park", "ok", &["dead_letter"]);
    sql.run(&format!("drop owned by {role}; drop role {role}"));
}
