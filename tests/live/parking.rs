//! Events that cannot be published are parked, with all that follows of their key; everything else
//! flows.

use crate::check::{Committed, check};
use crate::kafka::Rec;
use crate::parked::{
    good, id, letters, malformed, parked, parked_ids, put, retry_all, wait_parked,
};
use crate::poison::{HALT, TINY, halting, ins};
use crate::postgres::{Pg, Sql};
use crate::stage::{MINUTE, Stage};

fn ids_of(records: &[Rec], key: &str) -> Vec<String> {
    let of_key = records.iter().filter(|record| record.key_text() == key);
    of_key.map(Rec::event_id).collect()
}

#[test]
fn r11_headers_that_are_no_object_park_their_key_and_no_other() {
    for pg in [Pg::V15, Pg::V18] {
        let stage = Stage::shared(pg);
        let sql = stage.init();
        sql.run("alter table outbox alter column headers drop not null");
        for (n, (key, headers)) in [("a", "'[1]'"), ("b", "'\"x\"'"), ("c", "'null'")]
            .into_iter()
            .enumerate()
        {
            put(&sql, n, "t", &format!("'{key}'"), "'{}'", headers);
        }
        for (n, key) in ["a", "b", "c", "d", "a"].into_iter().enumerate() {
            put(&sql, 3 + n, "t", &format!("'{key}'"), "'{}'", "'{}'");
        }
        let mut relay = stage.run();
        stage.wait_confirmed(MINUTE);
        // The same of one whose key is parked already, and no headers at all.
        put(&sql, 8, "t", "'b'", "'{}'", "'[2]'");
        put(&sql, 9, "t", "'d'", "'{}'", "null");
        stage.wait_confirmed(MINUTE);
        relay.stop();
        let letters = parked(&sql);
        let told: Vec<_> = letters
            .iter()
            .map(|letter| (letter.key.as_str(), letter.reason.as_str()))
            .collect();
        let bad = "malformed_row";
        assert_eq!(
            told,
            [
                ("a", bad),
                ("b", bad),
                ("c", bad),
                ("a", "behind"),
                ("b", "behind"),
                ("c", "behind"),
                ("a", "behind"),
                ("b", bad)
            ]
        );
        for letter in letters.iter().filter(|letter| letter.reason == bad) {
            assert!(letter.message.contains("column headers"), "{letter:?}");
            assert!(letter.message.contains("not a JSON object"), "{letter:?}");
        }
        let records = stage.broker.read_all(&stage.topic("t"));
        assert_eq!(records.len(), 2);
        assert_eq!(ids_of(&records, "d"), [id(6), id(9)]);
        assert_eq!(records[1].headers.len(), 3, "no headers but our own");
        let list = stage.dead_letters(&["list"]).expect_code(0).stdout;
        assert!(list.contains("8 events of 3 keys parked"), "{list}");
    }
}

/// Of rows of these types, each with a key of its own; the first is parked, the second flows.
fn only_these_are_parked(template: &str, types: &[&str], fine: &str) {
    let mut stage = Stage::shared(Pg::V15);
    stage.template = Some(template.to_owned());
    let sql = stage.init();
    let topic = template.replace("{aggregate_type}", fine);
    stage.broker.create_topic(&topic, 1);
    for (n, kind) in types.iter().chain([&fine]).enumerate() {
        put(&sql, n, kind, &format!("'k{n}'"), "'{}'", "'{}'");
    }
    let mut relay = stage.run();
    stage.broker.wait_count(&topic, 1, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    let letters = parked(&sql);
    assert_eq!(letters.len(), types.len(), "{letters:?}");
    for (letter, kind) in letters.iter().zip(types) {
        assert_eq!(letter.reason, "invalid_topic");
        // Messages are ASCII, for databases that have not every letter.
        let kind = kind.replace('é', "\\u{e9}");
        let name = template.replace("{aggregate_type}", &kind);
        assert!(letter.message.contains(&name), "{letter:?}");
        assert!(letter.message.contains("249"), "{letter:?}");
    }
}

#[test]
fn r13_illegal_topic_names_are_parked_and_not_mended() {
    let fine = format!("fine-{}", std::process::id());
    let long = "a".repeat(237);
    only_these_are_parked(
        "outbox.event.{aggregate_type}",
        &["a b/c", "né", &long],
        &fine,
    );
    only_these_are_parked("{aggregate_type}", &[".", "..", ""], &fine);
}

/// A row whose payload, a `bytea`, is this expression.
fn bytes(sql: &Sql, n: usize, kind: &str, key: &str, expression: &str) {
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         values ('{}', '{kind}', '{key}', 'eventtyp', {expression})",
        id(n)
    ));
}

#[test]
fn k06_the_broker_judges_the_compressed_batch_to_the_byte() {
    for (codec, fits, too_large) in [
        (
            "none",
            "convert_to(repeat('a', 1048425), 'UTF8')",
            "convert_to(repeat('a', 1048426), 'UTF8')",
        ),
        (
            "lz4",
            "convert_to(repeat('a', 2000000), 'UTF8')",
            "(select string_agg(uuid_send(gen_random_uuid()), '') from generate_series(1, 65625))",
        ),
    ] {
        let mut stage = Stage::shared(Pg::V15);
        stage.run_args = ["--kafka", &format!("compression.type={codec}")]
            .map(str::to_owned)
            .to_vec();
        let sql = stage.init();
        sql.run("alter table outbox alter column payload type bytea using ''");
        let topic = stage.topic("kind.8.b");
        let kind = "kind.8.b";
        let limit = ("max.message.bytes", "1048588");
        stage.broker.create_topic_with(&topic, 1, &[limit]);
        for (n, key, payload) in [
            (0, "k", fits),
            (1, "other", "'1'"),
            (2, "k", too_large),
            (3, "other", "'2'"),
            (4, "k", "'behind'"),
            (5, "other", "'3'"),
        ] {
            bytes(&sql, n, kind, key, payload);
        }
        let mut relay = stage.run();
        stage.wait_confirmed(MINUTE);
        bytes(&sql, 6, kind, "other", "'4'");
        bytes(&sql, 7, kind, "k", "'behind, too'");
        stage.wait_confirmed(MINUTE);
        let records = stage.broker.read_all(&topic);
        assert_eq!(ids_of(&records, "k"), [id(0)], "{codec}");
        assert_eq!(ids_of(&records, "other"), [1, 3, 5, 6].map(id), "{codec}");
        let letters = parked(&sql);
        let told: Vec<_> = letters
            .iter()
            .map(|letter| (letter.id.clone(), letter.reason.as_str()))
            .collect();
        let expected = [(id(2), "too_large"), (id(4), "behind"), (id(7), "behind")];
        assert_eq!(told, expected, "{codec}");
        let size = if codec == "none" {
            "1048427"
        } else {
            "1050001"
        };
        for word in [size, "1048588", "MSG_SIZE_TOO_LARGE", &topic] {
            assert!(letters[0].message.contains(word), "{letters:?}");
        }
        // With room for it all goes, in order.
        stage
            .broker
            .alter_topic(&topic, &[("max.message.bytes", "3000000")]);
        retry_all(&stage, &sql);
        relay.stop();
        let records = stage.broker.read_all(&topic);
        assert_eq!(ids_of(&records, "k"), [0, 2, 4, 7].map(id), "{codec}");
        assert_eq!(records.len(), 8);
    }
}

#[test]
fn k08_a_null_key_is_parked_alone_on_a_compacted_topic_and_on_any() {
    for policy in ["compact", "delete"] {
        let stage = Stage::shared(Pg::V15);
        let sql = stage.init();
        let topic = stage.topic("c");
        stage
            .broker
            .create_topic_with(&topic, 3, &[("cleanup.policy", policy)]);
        sql.run("alter table outbox alter column aggregate_id drop not null");
        let keys = ["'k'", "''", "null", "'k'", "null", "''"];
        for (n, key) in keys.into_iter().enumerate() {
            put(&sql, n, "c", key, "null", "'{}'");
        }
        let mut relay = stage.run();
        stage.wait_confirmed(MINUTE);
        relay.stop();
        let records = stage.broker.read_all(&topic);
        assert_eq!(ids_of(&records, "k"), [id(0), id(3)]);
        assert_eq!(ids_of(&records, ""), [id(1), id(5)]);
        assert!(records.iter().all(|record| record.value.is_none()));
        let letters = parked(&sql);
        assert_eq!(parked_ids(&sql), [id(2), id(4)]);
        for letter in letters {
            assert_eq!(letter.reason, "malformed_row");
            assert!(
                letter.message.contains("aggregate_id is null"),
                "{letter:?}"
            );
        }
        // What has no key is parked alone, and comes not again.
        let mut relay = stage.run();
        put(&sql, 6, "c", "'k'", "null", "'{}'");
        stage.wait_confirmed(MINUTE);
        relay.stop();
        assert_eq!(stage.broker.count(&topic), 5);
        assert_eq!(parked_ids(&sql).len(), 2);
    }
}

#[test]
fn an_event_that_is_too_large_parks_its_key_and_returns_in_its_place() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let topic = stage.topic("t");
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", TINY)]);
    let (mut all, mut flowing, mut behind) = (Committed::new(), Committed::new(), Vec::new());
    for n in 0..120 {
        // Small ones of all keys around it, enough of them that they share its batches.
        let (key, bytes) = (format!("k{}", n % 7), if n == 60 { 100_000 } else { 100 });
        ins(&sql, &mut all, n, &key, bytes);
        let n = usize::try_from(n).expect("small");
        if n >= 60 && n % 7 == 60 % 7 {
            behind.push(id(n));
        } else {
            flowing.push(key, id(n));
        }
    }
    let mut relay = stage.run();
    stage.wait_confirmed(MINUTE);
    assert_eq!(parked_ids(&sql), behind);
    check(&stage.broker.read_all(&topic), &flowing).assert_exactly_once();
    // The next life knows it before its first record.
    relay.kill9();
    let mut relay = stage.run();
    good(&sql, &mut all, 120, "k4");
    good(&sql, &mut all, 121, "k5");
    wait_parked(&stage, &sql, behind.len() + 1);
    stage.wait_confirmed(MINUTE);
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", "1000000")]);
    stage.dead_letters(&["retry", "--key", "k4"]).expect_code(0);
    stage.wait_count("t", 122, MINUTE);
    crate::parked::wait_until(&stage, &sql, "parked", 0);
    good(&sql, &mut all, 122, "k4");
    stage.wait_count("t", 123, MINUTE);
    relay.stop();
    check(&stage.broker.read_all(&topic), &all).assert_exactly_once();
    assert_eq!(letters(&sql, "delivered").len(), behind.len() + 1);
}

/// Rows of 50 keys in one transaction: those of these numbers are too large, the others small.
fn many(sql: &Sql, all: &mut Committed, from: usize, rows: usize, large: [usize; 2]) {
    let [one, other] = large;
    let to = from + rows;
    sql.run(&format!(
        "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
         select ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid, 't',
                'k' || n % 50, 'e', (
           select jsonb_build_object('noise', string_agg(md5(n || '/' || g), ''))
           from generate_series(1, case when n in ({one}, {other}) then 1500 else 10 end) g)
         from generate_series({from}, {to} - 1) n order by n"
    ));
    for n in from..to {
        all.push(format!("k{}", n % 50), id(n));
    }
}

/// What the relay says of a batch that is refused.
const REFUSED: &str = "the broker refused a batch: MSG_SIZE_TOO_LARGE";

#[test]
fn a_refused_batch_is_searched_and_no_innocent_is_parked() {
    let stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    let topic = stage.topic("t");
    let mut all = Committed::new();
    let mut relay = stage.run();
    many(&sql, &mut all, 0, 50, [usize::MAX >> 1; 2]);
    stage.wait_count("t", 50, MINUTE);
    // The relay knows of the old limit: what is too large shares its batches, and batches of
    // small ones are too large as well.
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", TINY)]);
    many(&sql, &mut all, 50, 1_000, [usize::MAX >> 1; 2]);
    stage.wait_count("t", 1_050, 2 * MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.wait_for_text(REFUSED, MINUTE);
    assert_eq!(parked(&sql), []);
    // As above, for the relay asked when its batch was refused.
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", "1000000")]);
    relay.stop();
    let mut relay = stage.run();
    many(&sql, &mut all, 1_050, 50, [usize::MAX >> 1; 2]);
    stage.wait_count("t", 1_100, MINUTE);
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", TINY)]);
    // Two of different keys.
    many(&sql, &mut all, 1_100, 1_000, [1_307, 1_623]);
    stage.wait_confirmed(2 * MINUTE);
    let of = |key: usize, from: usize| (from..2_100).filter(move |n| n % 50 == key);
    let mut behind: Vec<String> = of(7, 1_307).chain(of(23, 1_623)).map(id).collect();
    behind.sort();
    assert_eq!(parked_ids(&sql), behind);
    let large = parked(&sql)
        .into_iter()
        .filter(|letter| letter.reason == "too_large");
    let large: Vec<String> = large.map(|letter| letter.id).collect();
    assert_eq!(large, [id(1_307), id(1_623)]);
    relay.wait_for_text(REFUSED, MINUTE);
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", "1000000")]);
    retry_all(&stage, &sql);
    relay.stop();
    check(&stage.broker.read_all(&topic), &all).assert_exactly_once();
}

#[test]
fn where_a_relay_halted_the_next_one_parks_and_goes_on() {
    let mut stage = halting(Pg::V18);
    let sql = stage.init();
    let mut flowing = Committed::new();
    good(&sql, &mut flowing, 0, "a");
    malformed(&sql, 1, "b");
    for (n, key) in [(2, "a"), (3, "c")] {
        good(&sql, &mut flowing, n, key);
    }
    let halted = "select to_jsonb(r)::text like '%000000000001%' from walrelay.relay r";
    for _ in 0..2 {
        let ended = stage.run_to_end().expect_code(4);
        assert!(ended.stderr.contains(&id(1)), "{}", ended.stderr);
        assert_eq!(sql.one(halted), "t");
    }
    stage.run_args.retain(|arg| !HALT.contains(&arg.as_str()));
    let mut relay = stage.run();
    good(&sql, &mut flowing, 4, "a");
    put(&sql, 5, "t", "'b'", "'{}'", "'{}'");
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert_eq!(parked_ids(&sql), [id(1), id(5)]);
    assert_eq!(sql.one(halted), "f", "it halts no more");
    check(&stage.broker.read_all(&stage.topic("t")), &flowing).assert_exactly_once();
    // And the other way round: what is parked stays so.
    stage.run_args.extend(HALT.map(str::to_owned));
    let mut relay = stage.run();
    put(&sql, 6, "t", "'b'", "'{}'", "'{}'");
    good(&sql, &mut flowing, 7, "a");
    stage.wait_confirmed(MINUTE);
    relay.stop();
    assert_eq!(parked_ids(&sql), [id(1), id(5), id(6)]);
    check(&stage.broker.read_all(&stage.topic("t")), &flowing).assert_exactly_once();
}

/// Dies when dead letters are about to be written, and when they were, and nobody knows.
#[test]
fn what_stands_below_a_parked_event_comes_again_and_is_not_parked() {
    for (pg, point, written) in [(Pg::V15, "park", false), (Pg::V18, "parked", true)] {
        let stage = Stage::shared(pg);
        let sql = stage.init();
        let (mut flowing, mut behind) = (Committed::new(), Vec::new());
        // One transaction: whatever of it is delivered, nothing is confirmed.
        sql.run("begin");
        for n in 0..60 {
            let key = ["a", "b", "c"][n % 3];
            if n == 30 {
                malformed(&sql, n, key);
            } else {
                put(&sql, n, "t", &format!("'{key}'"), "'{}'", "'{}'");
            }
            if n >= 30 && n % 3 == 0 {
                behind.push(id(n));
            } else {
                flowing.push(key, id(n));
            }
        }
        sql.run("commit");
        let mut relay = stage.run_with_fault(point);
        assert_eq!(relay.wait_exit(MINUTE), -9, "{}", relay.said());
        assert_eq!(!parked(&sql).is_empty(), written, "{point}");
        let mut relay = stage.run();
        stage.wait_confirmed(MINUTE);
        put(&sql, 60, "t", "'a'", "'{}'", "'{}'");
        good(&sql, &mut flowing, 61, "b");
        behind.push(id(60));
        wait_parked(&stage, &sql, behind.len());
        stage.wait_confirmed(MINUTE);
        relay.stop();
        assert_eq!(parked_ids(&sql), behind, "{point}");
        check(&stage.broker.read_all(&stage.topic("t")), &flowing).assert_exactly_once();
    }
}

/// An event_id that was parked and given up is emitted again, for a key that is parked.
#[test]
fn an_event_that_is_emitted_again_after_it_was_given_up_is_not_lost() {
    let stage = Stage::shared(Pg::V17);
    let sql = stage.init();
    let mut relay = stage.run();
    malformed(&sql, 0, "a");
    wait_parked(&stage, &sql, 1);
    stage
        .dead_letters(&["discard", &id(0), "--yes"])
        .expect_code(0);
    malformed(&sql, 1, "b");
    wait_parked(&stage, &sql, 1);
    sql.run(&format!("delete from outbox where event_id = '{}'", id(0)));
    put(&sql, 0, "t", "'b'", "'{\"again\": true}'", "'{}'");
    wait_parked(&stage, &sql, 2);
    stage
        .dead_letters(&["discard", &id(1), "--yes"])
        .expect_code(0);
    retry_all(&stage, &sql);
    stage.wait_count("t", 1, MINUTE);
    let records = stage.broker.read_all(&stage.topic("t"));
    assert_eq!(records[0].value_text(), "{\"again\": true}");
    assert_eq!(ids_of(&records, "b"), [id(0)]);
    stage.wait_confirmed(MINUTE);
    relay.stop();
}
