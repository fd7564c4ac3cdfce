//! Parked events on their way back: in order, whatever dies meanwhile, with new ones of their key
//! behind them.

use std::collections::HashSet;

use crate::check::{Committed, check};
use crate::http::metrics;
use crate::kafka::Rec;
use crate::parked::{
    count, good, id, letters, malformed, parked, parked_ids, put, repeats, retry_all, wait_parked,
    wait_until,
};
use crate::poison::{TINY, ins};
use crate::postgres::{Pg, Sql};
use crate::proc::{self, eventually};
use crate::stage::{MINUTE, Stage};

const ROOM: [(&str, &str); 1] = [("max.message.bytes", "1000000")];

/// Of each key 10 events are written, of which 8 are parked: the third is too large for the topic,
/// which has room for it afterwards.
fn parked_keys(stage: &Stage<'_>, sql: &Sql, all: &mut Committed, keys: &[&str]) -> u32 {
    let topic = stage.topic("t");
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", TINY)]);
    let mut n = 0;
    for key in keys {
        for of_key in 0..10 {
            ins(sql, all, n, key, if of_key == 2 { 50_000 } else { 100 });
            n += 1;
        }
    }
    let mut relay = stage.run();
    wait_parked(stage, sql, keys.len() * 8);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    stage.broker.alter_topic(&topic, &ROOM);
    n
}

fn of_key(records: &[Rec], key: &str) -> Vec<Rec> {
    let mut records = records.to_vec();
    records.retain(|record| record.key_text() == key);
    records
}

/// A fault at each step of a retry: before and after what waits behind is written, before and
/// after what was delivered is settled.
#[test]
fn a_retry_that_is_cut_short_at_any_step_keeps_order_and_repeats_a_batch_at_most() {
    let stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    let faults = [
        "park",
        "parked",
        "settle",
        "settled",
        "park=error",
        "parked=error",
        "settle=error",
        "settled=error",
    ];
    let keys: Vec<String> = (0..faults.len()).map(|n| format!("k{n}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let mut all = Committed::new();
    let mut n = parked_keys(&stage, &sql, &mut all, &keys) as usize;
    for (key, fault) in keys.iter().zip(faults) {
        // One comes while nobody leads, one while the retry is cut short, one when all is well.
        good(&sql, &mut all, n, key);
        stage.dead_letters(&["retry", "--key", key]).expect_code(0);
        let left = count(&sql, "parked") - 8;
        let mut relay = stage.run_with_fault(fault);
        if fault.ends_with("=error") {
            relay.wait_for_text("injected by WALRELAY_FAULT", MINUTE);
            good(&sql, &mut all, n + 1, key);
            relay.assert_alive();
            relay.kill9();
        } else {
            assert_eq!(relay.wait_exit(MINUTE), -9, "{fault}: {}", relay.said());
            good(&sql, &mut all, n + 1, key);
        }
        let mut relay = stage.run();
        wait_until(&stage, &sql, "parked", left);
        stage.wait_confirmed(MINUTE);
        wait_until(&stage, &sql, "parked", left);
        good(&sql, &mut all, n + 2, key);
        stage.wait_confirmed(MINUTE);
        relay.stop();
        assert_eq!(
            count(&sql, "parked"),
            left,
            "{fault}: the key is free again"
        );
        let records = of_key(&stage.broker.read_all(&stage.topic("t")), key);
        let ids: Vec<String> = records.iter().map(Rec::event_id).collect();
        let distinct: HashSet<String> = ids.iter().cloned().collect();
        assert_eq!(distinct.len(), 13, "{fault}: {ids:?}");
        let again = repeats(&records, &distinct);
        assert!(again <= 10, "{fault}: {again} repeats");
        if fault.starts_with("settled") {
            assert_eq!(again, 0, "{fault}: what was settled was sent again");
        }
        n += 3;
    }
    check(&stage.broker.read_all(&stage.topic("t")), &all).assert_complete_and_ordered();
}

#[test]
fn what_comes_while_its_key_is_retried_goes_behind_it() {
    for pg in [Pg::V15, Pg::V17] {
        let stage = Stage::shared(pg);
        let sql = stage.init();
        let mut all = Committed::new();
        let first = parked_keys(&stage, &sql, &mut all, &["k", "l"]) as usize;
        let mut relay = stage.run();
        let writer = stage.db.connect();
        // Behind what is parked, beside the retry, and behind it.
        let mut came = Committed::new();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for n in 0..400 {
                    let key = if n % 4 == 3 { "other" } else { "k" };
                    good(&writer, &mut came, first + n, key);
                }
            });
            wait_a_while(&sql, first + 50);
            stage.dead_letters(&["retry", "--key", "k"]).expect_code(0);
            writer.join().expect("it writes");
        });
        wait_until(&stage, &sql, "parked", 8);
        stage.wait_confirmed(MINUTE);
        wait_until(&stage, &sql, "parked", 8);
        assert!(parked(&sql).iter().all(|letter| letter.key == "l"));
        stage.dead_letters(&["retry", "--key", "l"]).expect_code(0);
        stage.wait_count("t", first + 400, MINUTE);
        wait_until(&stage, &sql, "parked", 0);
        relay.stop();
        let mut of_k = vec![];
        let records = stage.broker.read_all(&stage.topic("t"));
        for record in of_key(&records, "k") {
            of_k.push(record.event_id());
        }
        let mut sorted = of_k.clone();
        sorted.sort();
        assert_eq!(of_k, sorted, "numbers are in commit order");
        assert_eq!(records.len(), first + 400, "each once");
    }
}

/// Until a row of this number or a later one is committed.
fn wait_a_while(sql: &Sql, n: usize) {
    eventually(MINUTE, "rows are written", || {
        let there = sql.one(&format!(
            "select exists (select from outbox where event_id >= '{}')",
            id(n)
        ));
        (there == "t").then_some(())
    });
}

#[test]
fn a_retry_that_is_refused_again_leaves_the_key_as_it_was() {
    let stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let mut all = Committed::new();
    let first = parked_keys(&stage, &sql, &mut all, &["k", "l"]) as usize;
    let topic = stage.topic("t");
    stage
        .broker
        .alter_topic(&topic, &[("max.message.bytes", TINY)]);
    let before = parked(&sql);
    let mut relay = stage.run();
    stage.dead_letters(&["retry", "--all"]).expect_code(0);
    eventually(MINUTE, "both retries have failed", || {
        let failed = "select count(*) = 2 and bool_and(retry_requested_at is null)
                      from walrelay.dead_letter where attempts = 1";
        (sql.one(failed) == "t").then_some(())
    });
    relay.wait_for_text("its key stays parked", MINUTE);
    good(&sql, &mut all, first, "k");
    good(&sql, &mut all, first + 1, "free");
    stage.wait_confirmed(MINUTE);
    let after = parked(&sql);
    let ids = |letters: &[crate::parked::Letter]| -> Vec<String> {
        letters.iter().map(|letter| letter.id.clone()).collect()
    };
    assert_eq!(ids(&after)[..before.len()], ids(&before));
    assert_eq!(ids(&after)[before.len()..], [id(first)]);
    assert_eq!(stage.broker.count(&topic), 2 * 2 + 1);
    stage.broker.alter_topic(&topic, &ROOM);
    retry_all(&stage, &sql);
    stage.wait_count("t", first + 2, MINUTE);
    relay.stop();
    check(&stage.broker.read_all(&topic), &all).assert_exactly_once();
}

#[test]
fn a_head_that_is_discarded_lets_the_rest_of_its_key_go() {
    let mut stage = Stage::shared(Pg::V18);
    let address = format!("127.0.0.1:{}", proc::free_port());
    stage.run_args = vec!["--http".to_owned(), address.clone()];
    let sql = stage.init();
    let mut flowing = Committed::new();
    malformed(&sql, 0, "k");
    for n in 1..4 {
        good(&sql, &mut flowing, n, "k");
    }
    let mut relay = stage.run();
    wait_parked(&stage, &sql, 4);
    // As long as it stands at the head, nothing goes.
    stage
        .dead_letters(&["retry", &format!("event:{}", id(2))])
        .expect_code(0);
    relay.wait_for_text("its key stays parked", MINUTE);
    assert_eq!(parked(&sql).len(), 4);
    stage
        .dead_letters(&["discard", &format!("event:{}", id(0))])
        .expect_code(2);
    let discard = ["discard", &format!("event:{}", id(0)), "--yes"];
    stage.dead_letters(&discard).expect_code(0);
    assert_eq!(parked_ids(&sql), [1, 2, 3].map(id));
    // What is left of the key goes on waiting, and so does what comes.
    good(&sql, &mut flowing, 4, "k");
    stage.wait_confirmed(MINUTE);
    assert_eq!(parked_ids(&sql), [1, 2, 3, 4].map(id));
    assert_eq!(stage.broker.count(&stage.topic("t")), 0);
    retry_all(&stage, &sql);
    good(&sql, &mut flowing, 5, "k");
    stage.wait_count("t", 5, MINUTE);
    // A key of which all is discarded is free.
    malformed(&sql, 6, "l");
    wait_parked(&stage, &sql, 1);
    stage
        .dead_letters(&["discard", "--key", "l", "--yes"])
        .expect_code(0);
    eventually(MINUTE, "the relay knows", || {
        (metrics(&address)["walrelay_parked_keys"] == 0.0).then_some(())
    });
    good(&sql, &mut flowing, 7, "l");
    stage.wait_count("t", 6, MINUTE);
    stage.wait_confirmed(MINUTE);
    // Neither comes again with the next life.
    relay.kill9();
    let mut relay = stage.run();
    good(&sql, &mut flowing, 8, "l");
    stage.wait_count("t", 7, MINUTE);
    stage.wait_confirmed(MINUTE);
    relay.stop();
    check(&stage.broker.read_all(&stage.topic("t")), &flowing).assert_exactly_once();
    let discarded = letters(&sql, "discarded");
    let ids: Vec<String> = discarded.into_iter().map(|letter| letter.id).collect();
    assert_eq!(ids, [id(0), id(6)]);
    let by = sql.one("select string_agg(distinct settled_by, ' ') from walrelay.dead_letter where status = 'discarded'");
    assert_eq!(by, "postgres");
}

/// What has no key, or no topic, and is asked for.
#[test]
fn a_retry_of_what_can_be_no_record_says_so_and_of_an_absent_topic_finds_it_made() {
    let mut stage = Stage::shared(Pg::V15);
    stage.run_args = ["--topic-grace", "1s"].map(str::to_owned).to_vec();
    let sql = stage.init();
    sql.run("alter table outbox alter column aggregate_id drop not null");
    put(&sql, 0, "t", "null", "'{}'", "'{}'");
    put(&sql, 1, "a b", "'x'", "'{}'", "'{}'");
    for n in 2..5 {
        put(&sql, n, "later", "'y'", &format!("'{n}'"), "'{}'");
    }
    let mut relay = stage.run();
    wait_parked(&stage, &sql, 5);
    stage.dead_letters(&["retry", "--all"]).expect_code(0);
    eventually(MINUTE, "all three have failed", || {
        let open = "select count(*) from walrelay.dead_letter where retry_requested_at is not null";
        let failed = "select count(*) from walrelay.dead_letter where attempts = 1";
        (sql.one(open) == "0" && sql.one(failed) == "3").then_some(())
    });
    // Made a moment ago: the relay, which asked before, does not take its old answer for one.
    stage.broker.create_topic(&stage.topic("later"), 2);
    stage.dead_letters(&["retry", "--key", "y"]).expect_code(0);
    stage.wait_count("later", 3, MINUTE);
    wait_until(&stage, &sql, "parked", 2);
    put(&sql, 5, "later", "'y'", "'5'", "'{}'");
    stage.wait_count("later", 4, MINUTE);
    relay.stop();
    let records = stage.broker.read_all(&stage.topic("later"));
    let ids: Vec<String> = records.iter().map(Rec::event_id).collect();
    assert_eq!(ids, [2, 3, 4, 5].map(id));
    assert_eq!(parked_ids(&sql), [id(0), id(1)]);
}
