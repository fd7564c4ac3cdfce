//! The dead-letter table as the leader uses it, against real servers.

use std::borrow::Cow;
use std::sync::Arc;

use tokio_postgres::Client;
use walrelay::config;
use walrelay::dead_letter::{
    DeadLetter, EventKey, Parked, ParkedKey, Position, Reason, Settled, Settlement, Stored,
    Tripped, Why,
};
use walrelay::io::dead_letters::{
    flush_lsn, forget_settled, load, next_retry, park, settle, standbys_have, trip, tripped, untrip,
};
use walrelay::io::registry::Prober;
use walrelay::io::side::Side;
use walrelay::lsn::{Lsn, PgTimestamp, Xid};
use walrelay::record::{Header, KafkaCode, Record};

use crate::postgres::{Cluster, Database, Pg, Sql, Stop, runtime};
use crate::proc::eventually;
use crate::relay::run_to_end;
use crate::stage::MINUTE;

/// A database after `init`, and the leader's session.
pub struct Store<'a> {
    pub db: Database<'a>,
    pub oid: u32,
    side: Side,
}

impl<'a> Store<'a> {
    pub fn on(db: Database<'a>) -> Store<'a> {
        let more = ["--lock-timeout", "50s"];
        let (url, slot) = (db.url(), db.slot());
        let line = ["init", "--database-url", &url, "--slot", &slot];
        run_to_end(&[&line[..], &more[..]].concat(), &[], MINUTE).expect_code(0);
        let sql = db.connect();
        let oid = sql.one("select table_oid from walrelay.relay");
        let ascii = sql.one("show server_encoding") == "SQL_ASCII";
        let database = config::Database::plain("127.0.0.1", db.cluster.port, "postgres", &db.name);
        let encoding = ascii.then_some("SQL_ASCII");
        let side = runtime()
            .block_on(Side::connect(&database, encoding))
            .expect("the server is up");
        Store {
            oid: oid.parse().expect("an oid"),
            db,
            side,
        }
    }

    pub fn client(&self) -> Arc<Client> {
        Arc::clone(&self.side.client)
    }

    pub fn park(&self, letters: &[DeadLetter]) {
        let done = runtime().block_on(park(&self.side.client, self.oid, letters));
        done.expect("parked");
    }

    pub fn load(&self, generation: i64, confirmed: u64) -> Parked {
        let done = load(&self.side.client, self.oid, generation, Lsn(confirmed));
        runtime().block_on(done).expect("loaded")
    }

    fn next(&self, passed: u64, rows_max: usize, bytes_max: usize) -> Vec<Stored> {
        let done = next_retry(
            &self.side.client,
            self.oid,
            1,
            Lsn(passed),
            rows_max,
            bytes_max,
        );
        runtime().block_on(done).expect("an answer")
    }

    fn settle(&self, delivered: &[&Stored], failed: &[&Stored]) -> Vec<EventKey> {
        let why = why(Reason::Refused, "again");
        let settlement = Settlement {
            delivered: delivered.iter().map(|stored| stored.id).collect(),
            failed: failed.iter().map(|s| (s.id, why.clone())).collect(),
        };
        let done = settle(&self.side.client, self.oid, &settlement);
        runtime().block_on(done).expect("settled")
    }

    /// As the command marks: a key by its first row.
    fn mark(&self, ids: &str) {
        self.db.connect().run(&format!(
            "update walrelay.dead_letter set retry_requested_at = now(), \
             retry_requested_by = 'ann' where event_id in ({ids})"
        ));
    }
}

fn why(reason: Reason, message: &str) -> Why {
    Why {
        reason,
        code: Some(KafkaCode(10)),
        message: message.to_owned(),
    }
}

pub fn key(id: &str) -> EventKey {
    EventKey {
        aggregate_type: Some(Box::from(&b"t"[..])),
        aggregate_id: Box::from(id.as_bytes()),
    }
}

/// The event `id`, of a key or none, at (1, `lsn`, `ordinal`).
pub fn letter(id: &str, key_id: Option<&str>, lsn: u64, ordinal: u64) -> DeadLetter {
    DeadLetter {
        event_id: id.as_bytes().to_vec(),
        key: key_id.map(key),
        aggregate_type: key_id.is_none().then(|| Box::from(&b"t"[..])),
        position: Position {
            generation: 1,
            commit_lsn: Lsn(lsn),
            ordinal,
        },
        xid: Xid(u32::MAX),
        commit_time: PgTimestamp(849_403_803_894_564),
        record: Record {
            topic: "topic.t".into(),
            partition: -1,
            key: Cow::Owned(key_id.unwrap_or_default().as_bytes().to_vec()),
            value: Some(Cow::Owned(format!("{{\"of\": \"{id}\"}}").into_bytes())),
            timestamp_ms: Some(-1),
            headers: vec![Header {
                name: "event_id".into(),
                value: Some(Cow::Owned(id.as_bytes().to_vec())),
            }],
        },
        why: why(Reason::TooLarge, "1,048,577 bytes"),
        is_retried: false,
    }
}

fn ids(stored: &[Stored]) -> Vec<String> {
    stored
        .iter()
        .map(|s| String::from_utf8_lossy(&s.letter.event_id).into_owned())
        .collect()
}

fn of_key(stored: &[Stored], id: &str) -> Vec<String> {
    let mut of_key = stored.to_vec();
    of_key.retain(|s| s.letter.key == Some(key(id)));
    ids(&of_key)
}

fn keys(parked: &Parked) -> Vec<(String, u64, bool)> {
    let name = |k: &ParkedKey| String::from_utf8_lossy(&k.key.aggregate_id).into_owned();
    let of = |k: &ParkedKey| (name(k), k.from.commit_lsn.0, k.is_retried);
    let mut keys: Vec<_> = parked.keys.iter().map(of).collect();
    keys.sort();
    keys
}

fn settled(parked: &Parked) -> Vec<String> {
    let of = |event: &Settled| String::from_utf8_lossy(&event.event_id).into_owned();
    let mut ids: Vec<_> = parked.settled.iter().map(of).collect();
    ids.sort();
    ids
}

fn discard(sql: &Sql, id: &str) {
    sql.run(&format!(
        "update walrelay.dead_letter set status = 'discarded', settled_at = now(), \
         settled_lsn = pg_current_wal_insert_lsn() where event_id = '{id}'"
    ));
}

/// Everything that a letter can be: no header, nulls, an explicit partition, bytes of every kind.
fn odd_letters() -> Vec<DeadLetter> {
    let mut tombstone = letter("tombstone", Some(""), 7, 0);
    tombstone.key = Some(EventKey {
        aggregate_type: None,
        aggregate_id: Box::default(),
    });
    tombstone.record.value = None;
    tombstone.record.headers.clear();
    tombstone.record.timestamp_ms = None;
    tombstone.record.partition = 11;
    tombstone.record.topic = "".into();
    tombstone.why.code = None;
    let mut full = letter("it's \"{odd}\\,NULL", Some("{a,\"b\"}\\'"), u64::MAX, 99);
    full.record.value = Some(Cow::Owned((0..=255).collect()));
    full.record.key = Cow::Owned((0..=255).rev().collect());
    full.commit_time = PgTimestamp(-1);
    let headers = [
        ("event_id", Some(&b"\0\xff"[..])),
        ("", Some(b"")),
        ("twice", None),
        ("twice", Some(b"{\"\\")),
        ("NULL", Some(b"NULL")),
    ];
    full.record.headers = headers
        .iter()
        .map(|(name, value)| Header {
            name: (*name).into(),
            value: value.map(Into::into),
        })
        .collect();
    let mut keyless = letter("keyless", None, 8, 1);
    keyless.record.key = Cow::Borrowed(b"");
    // What does not compress, and is longer than an entry of an index: as key, and as id.
    let mut long = letter(&noise(4_000), Some(&noise(20_000)), 9, 0);
    long.record.key = Cow::Borrowed(b"k");
    vec![tombstone, full, keyless, long]
}

/// Hexadecimal digits without a pattern.
fn noise(length: usize) -> String {
    let mut state = 88_172_645_463_325_252_u64;
    let digits = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        char::from_digit(u32::try_from(state >> 60).expect("four bits"), 16).expect("a digit")
    });
    digits.take(length).collect()
}

#[test]
fn what_is_parked_comes_back_to_the_byte() {
    for pg in [Pg::V15, Pg::V18] {
        let store = Store::on(Cluster::shared(pg).database());
        let letters = odd_letters();
        store.park(&letters);
        // Twins change nothing.
        store.park(&letters);
        let sql = store.db.connect();
        sql.run("update walrelay.dead_letter set retry_requested_at = now()");
        let mut back = store.next(u64::MAX, 1_000, 1 << 20);
        // The last one is not below what has passed.
        assert_eq!(back.len(), letters.len() - 1);
        back.extend(back_at_the_end(&store));
        back.sort_by_key(|stored| stored.id);
        let back: Vec<DeadLetter> = back.into_iter().map(|stored| stored.letter).collect();
        let mut expected = letters;
        for letter in &mut expected {
            letter.is_retried = true;
            if let Some(key) = &letter.key {
                letter.aggregate_type.clone_from(&key.aggregate_type);
            }
        }
        assert_eq!(back, expected);
        assert_eq!(sql.one("select count(*) from walrelay.dead_letter"), "4");
    }
}

/// What stands at the last position of all: below a later generation.
fn back_at_the_end(store: &Store<'_>) -> Vec<Stored> {
    let client = store.client();
    let later = next_retry(&client, store.oid, 2, Lsn(0), 1_000, 1 << 20);
    let mut later = runtime().block_on(later).expect("an answer");
    later.retain(|stored| stored.letter.position.commit_lsn == Lsn(u64::MAX));
    later
}

/// Bytes that are no text in any encoding, and a database that has fewer letters than UTF-8.
#[test]
fn texts_keep_the_streams_encoding() {
    let odd: [(&str, &[u8]); 2] = [
        ("encoding 'SQL_ASCII'", b"\xff\xfe\x80"),
        ("encoding 'LATIN1' locale 'C'", "é".as_bytes()),
    ];
    for (options, bytes) in odd {
        let options = format!("{options} template template0");
        let store = Store::on(Cluster::shared(Pg::V15).database_with(&options));
        let mut odd = letter("x", Some("x"), 5, 0);
        odd.event_id = bytes.to_vec();
        let of_bytes = EventKey {
            aggregate_type: Some(Box::from(bytes)),
            aggregate_id: Box::from(bytes),
        };
        odd.key = Some(of_bytes.clone());
        odd.aggregate_type = Some(Box::from(bytes));
        odd.is_retried = true;
        "→ no LATIN1 has it".clone_into(&mut odd.why.message);
        store.park(std::slice::from_ref(&odd));
        assert_eq!(store.load(1, 0).keys[0].key, of_bytes);
        let back = store.next(6, 10, 1_000);
        "\\u{2192} no LATIN1 has it".clone_into(&mut odd.why.message);
        assert_eq!(back[0].letter, odd);
        assert_eq!(store.settle(&[&back[0]], &[]), [of_bytes]);
        assert_eq!(store.load(1, 5).settled[0].event_id, bytes);
    }
}

#[test]
fn a_key_is_parked_from_its_first_row_that_is_left() {
    for pg in [Pg::V15, Pg::V18] {
        let store = Store::on(Cluster::shared(pg).database());
        assert_eq!(store.load(1, 0), Parked::default());
        let mut old = letter("old", Some("b"), 900, 0);
        old.position.generation = 0;
        store.park(&[
            letter("a2", Some("a"), 20, 1),
            letter("a1", Some("a"), 20, 0),
            letter("a3", Some("a"), 30, 0),
            letter("b1", Some("b"), 10, 0),
            old,
            letter("lonely", None, 20, 3),
            letter("lonely below", None, 19, 3),
        ]);
        let sql = store.db.connect();
        store.mark("'a3'");
        let parked = store.load(1, 20);
        assert_eq!(
            keys(&parked),
            [("a".to_owned(), 20, true), ("b".to_owned(), 900, false)]
        );
        assert_eq!(parked.keys.iter().map(|k| k.from.ordinal).max(), Some(0));
        assert_eq!(settled(&parked), ["lonely"]);
        assert!(!parked.is_keyless_retried);
        store.mark("'lonely'");
        assert!(store.load(1, 20).is_keyless_retried);
        for id in ["a1", "old", "lonely"] {
            discard(&sql, id);
        }
        let parked = store.load(1, 20);
        assert_eq!(
            keys(&parked),
            [("a".to_owned(), 20, true), ("b".to_owned(), 10, false)]
        );
        // What is settled counts from the slot's position on, and in every later generation.
        assert_eq!(settled(&parked), ["a1", "lonely"]);
        assert_eq!(settled(&store.load(1, 21)), [""; 0]);
        assert_eq!(
            settled(&store.load(0, 900)),
            ["a1", "lonely", "lonely below", "old"]
        );
        // Another table's are another's.
        let other = load(&store.side.client, store.oid + 1, 1, Lsn(0));
        assert_eq!(runtime().block_on(other), Ok(Parked::default()));
    }
}

#[test]
fn a_retry_takes_whole_beginnings_of_keys_in_order() {
    for pg in [Pg::V15, Pg::V18] {
        let store = Store::on(Cluster::shared(pg).database());
        let mut letters = vec![letter("n1", None, 5, 0), letter("n2", None, 6, 0)];
        for n in (0..20).rev() {
            letters.push(letter(&format!("a{n:02}"), Some("a"), 100 + n / 3, n % 3));
            letters.push(letter(&format!("b{n:02}"), Some("b"), 100 + n, 0));
            letters.push(letter(&format!("c{n:02}"), Some("c"), 500 + n, 0));
        }
        store.park(&letters);
        assert_eq!(store.next(1_000, 100, 1 << 20), []);
        store.mark("'a07', 'b00', 'b01', 'c00', 'n2'");
        let due = store.next(500, 100, 1 << 20);
        let expected = |k: &str| (0..20).map(|n| format!("{k}{n:02}")).collect::<Vec<_>>();
        assert_eq!(of_key(&due, "a"), expected("a"));
        assert_eq!(of_key(&due, "b"), expected("b"));
        assert_eq!(ids(&due)[40..], ["n2"]);
        // What the stream has not passed it may bring again: that waits.
        let some = store.next(103, 100, 1 << 20);
        assert_eq!(of_key(&some, "a"), expected("a")[..9]);
        assert_eq!(of_key(&some, "b"), expected("b")[..3]);
        assert_eq!(store.next(501, 100, 1 << 20).len(), 42);
        assert_eq!(store.next(520, 100, 1 << 20).len(), 61);
        assert_eq!(store.next(100, 100, 1 << 20).len(), 1);
        for rows in 1..=41 {
            let some = store.next(500, rows, 1 << 20);
            assert_eq!(ids(&some), ids(&due)[..rows]);
        }
        let one = store.next(500, 100, 0);
        assert_eq!(ids(&one), ids(&due)[..1]);
        let few = store.next(500, 100, 200);
        assert!((2..40).contains(&few.len()), "{}", few.len());
        assert_eq!(ids(&few), ids(&due)[..few.len()]);
    }
}

#[test]
fn a_mark_goes_on_to_the_end_of_its_key_and_a_failure_clears_it() {
    for pg in [Pg::V15, Pg::V18] {
        let store = Store::on(Cluster::shared(pg).database());
        let sql = store.db.connect();
        let mut behind = letter("a2", Some("a"), 2, 0);
        behind.why.reason = Reason::Behind;
        store.park(&[
            letter("a1", Some("a"), 1, 0),
            behind,
            letter("a3", Some("a"), 3, 0),
            letter("b1", Some("b"), 1, 1),
            letter("n1", None, 4, 0),
        ]);
        store.mark("'a1', 'b1', 'n1'");
        let due = store.next(9, 100, 1 << 20);
        let (a, b): (Vec<_>, Vec<_>) = due
            .iter()
            .filter(|s| s.letter.key.is_some())
            .partition(|s| s.letter.key == Some(key("a")));
        assert_eq!(store.settle(&a[..1], &b), []);
        // b's mark is gone, a's has moved on, and who asked is kept.
        assert_eq!(ids(&store.next(9, 100, 1 << 20)), ["a2", "a3", "n1"]);
        assert_eq!(
            sql.one("select retry_requested_by from walrelay.dead_letter where event_id = 'a2'"),
            "ann"
        );
        let row = |id: &str| {
            sql.one(&format!(
                "select concat_ws(' ', status, reason, error_code, error_message, attempts, \
                 settled_lsn is not null, retry_requested_at is not null) \
                 from walrelay.dead_letter where event_id = '{id}'"
            ))
        };
        assert_eq!(row("b1"), "parked refused 10 again 1 f f");
        assert_eq!(row("a1"), "delivered too_large 10 1,048,577 bytes 1 t t");
        assert_eq!(store.settle(&[], &a[2..]), []);
        assert_eq!(ids(&store.next(9, 100, 1 << 20)), ["n1"]);
        assert_eq!(row("a2"), "parked behind 10 1,048,577 bytes 0 f f");
        // What arrives after the failure does not bring the mark back.
        assert_eq!(store.settle(&a[1..2], &[]), []);
        assert_eq!(ids(&store.next(9, 100, 1 << 20)), ["n1"]);
        store.mark("'a3'");
        let last = store.next(9, 100, 1 << 20);
        let last: Vec<&Stored> = last.iter().collect();
        assert_eq!(store.settle(&last, &[]), [key("a")]);
        assert_eq!(
            keys(&store.load(1, 0)),
            [("b".to_owned(), 1, false)],
            "n1 was settled beside it"
        );
        assert_eq!(store.settle(&last, &[]), [], "twice");
    }
}

/// What somebody discarded while it was on its way stays discarded, and its key's rest is known.
#[test]
fn a_discarded_row_is_not_settled_over() {
    let store = Store::on(Cluster::shared(Pg::V18).database());
    store.park(&[letter("a1", Some("a"), 1, 0), letter("a2", Some("a"), 2, 0)]);
    store.mark("'a1'");
    let due = store.next(9, 100, 1 << 20);
    let sql = store.db.connect();
    discard(&sql, "a1");
    assert_eq!(store.settle(&[&due[0]], &[]), []);
    let status = "select status from walrelay.dead_letter where event_id = 'a1'";
    assert_eq!(sql.one(status), "discarded");
    assert_eq!(keys(&store.load(1, 0)), [("a".to_owned(), 2, false)]);
}

#[test]
fn a_tripped_topic_is_kept_and_opened() {
    for pg in [Pg::V15, Pg::V18] {
        let store = Store::on(Cluster::shared(pg).database());
        let client = store.client();
        let mut no_topic = Tripped {
            topic: String::new(),
            reason: Reason::MalformedRow,
            message: "headers: \"é\"".to_owned(),
            since: PgTimestamp(849_403_803_894_564),
            is_park_asked: false,
        };
        let odd = Tripped {
            topic: "it's \"a\".b\\é".to_owned(),
            reason: Reason::TopicAbsent,
            is_park_asked: true,
            ..no_topic.clone()
        };
        runtime().block_on(async {
            for one in [&no_topic, &odd, &no_topic] {
                trip(&client, store.oid, one).await.expect("tripped");
            }
        });
        "headers: \"\\u{e9}\"".clone_into(&mut no_topic.message);
        let odd = Tripped {
            message: no_topic.message.clone(),
            ..odd
        };
        assert_eq!(store.load(1, 0).tripped, [no_topic.clone(), odd.clone()]);
        runtime().block_on(async {
            untrip(&client, store.oid, &odd.topic).await.expect("open");
            let left = tripped(&client, store.oid).await;
            assert_eq!(left, Ok(vec![no_topic]));
        });
    }
}

#[test]
fn the_probe_tells_of_changes_by_hand() {
    let store = Store::on(Cluster::shared(Pg::V15).database());
    let client = store.client();
    let slot = store.db.slot();
    let sql = store.db.connect();
    let touched = || {
        runtime().block_on(async {
            let prober = Prober::prepare(&client, store.oid, &slot).await;
            let probe = prober.expect("prepared").ask(&client).await;
            probe.expect("an answer").touched
        })
    };
    assert_eq!(touched(), 0);
    sql.run("update walrelay.relay set dead_letters_touched = dead_letters_touched + 1");
    assert_eq!((touched(), store.load(1, 0).touched), (1, 1));
}

/// The rule of design section 5: as the server itself holds a failover slot back.
#[test]
fn a_failover_slot_waits_for_its_standbys() {
    let cluster = Cluster::start(Pg::V17);
    let standby = Cluster::standby(&cluster);
    standby.stop(Stop::Fast);
    let store = Store::on(cluster.database());
    let client = store.client();
    let sql = store.db.connect();
    let slot = store.db.slot();
    let ask = |flush| {
        let asked = runtime().block_on(standbys_have(&client, &slot, flush));
        asked.expect("an answer")
    };
    let now = || runtime().block_on(flush_lsn(&client)).expect("a position");
    assert_eq!(
        sql.one("select failover from pg_replication_slots"),
        "t",
        "init makes it so"
    );
    assert_eq!(ask(now()), None, "no standby at all");
    sql.run("select pg_create_physical_replication_slot('sb', true)");
    assert_eq!(ask(Lsn(u64::MAX)), None, "nobody is on it");
    let name = |names: &str| {
        sql.run(&format!(
            "alter system set synchronized_standby_slots = {names}"
        ));
        cluster.reload();
        eventually(MINUTE, "the setting is there", || {
            let seen = sql.one("show synchronized_standby_slots");
            (seen == names.trim_matches('\'')).then_some(())
        });
    };
    name("'sb'");
    assert_eq!(ask(Lsn(u64::MAX)).as_deref(), Some("sb"));
    assert_eq!(ask(Lsn(1)), None);
    name("'sb, not_there'");
    assert_eq!(ask(Lsn(1)).as_deref(), Some("not_there"));
    // A logical slot is no standby's.
    name(&format!("'{slot}'"));
    assert_eq!(ask(Lsn(1)).as_deref(), Some(slot.as_str()));
    // The rule is a failover slot's.
    sql.run("select pg_create_physical_replication_slot('other', true)");
    let other = standbys_have(&client, "other", Lsn(u64::MAX));
    assert_eq!(runtime().block_on(other), Ok(None));
    name("''");
    sql.run("select pg_drop_replication_slot('other')");
    standby.configure(&[
        &format!(
            "primary_conninfo = 'host=127.0.0.1 port={} user=postgres'",
            cluster.port
        ),
        "primary_slot_name = 'sb'",
    ]);
    standby.up();
    eventually(MINUTE, "the standby is on it", || {
        let active = "select active from pg_replication_slots where slot_name = 'sb'";
        (sql.one(active) == "t").then_some(())
    });
    assert_eq!(ask(Lsn(u64::MAX)).as_deref(), Some("sb"));
    sql.run("select pg_logical_emit_message(true, 'x', 'y')");
    let flush = now();
    eventually(MINUTE, "it has it", || ask(flush).is_none().then_some(()));
}

#[test]
fn versions_without_failover_slots_wait_for_nobody() {
    let store = Store::on(Cluster::shared(Pg::V15).database());
    let asked = standbys_have(&store.side.client, &store.db.slot(), Lsn(u64::MAX)).await_it();
    assert_eq!(asked, Ok(None));
}

trait AwaitIt: Future + Sized {
    fn await_it(self) -> Self::Output {
        runtime().block_on(self)
    }
}

impl<F: Future> AwaitIt for F {}

#[test]
fn settled_rows_are_kept_until_slot_and_checkpoint_have_passed_them() {
    for pg in [Pg::V15, Pg::V18] {
        let store = Store::on(Cluster::shared(pg).database());
        let sql = store.db.connect();
        let letters: Vec<_> = (0..3)
            .map(|n| letter(&format!("e{n}"), Some("a"), 1, n))
            .collect();
        store.park(&letters);
        let slot = store.db.slot();
        let forget = || {
            let done = forget_settled(&store.side.client, store.oid, &slot).await_it();
            done.expect("deleted")
        };
        // One below what the slot still reads, one above, one parked.
        let settle_at = |id: &str, lsn: &str| {
            discard(&sql, id);
            sql.run(&format!(
                "update walrelay.dead_letter set settled_lsn = {lsn} where event_id = '{id}'"
            ));
        };
        settle_at("e0", "'0/1'");
        settle_at("e1", "'FFFFFFFF/0'");
        assert_eq!(forget(), 0, "no checkpoint");
        let checkpoint = |generation: &str, lsn: &str| {
            sql.run(&format!(
                "delete from walrelay.checkpoint; insert into walrelay.checkpoint \
                 (table_oid, slot_generation, snapshot, coverage, fence_event_id, commit_lsn, \
                 fenced_at) values ({}, {generation}, '1:1:', '{{}}', gen_random_uuid(), \
                 '{lsn}', now())",
                store.oid
            ));
        };
        checkpoint("1", "0/1");
        assert_eq!(forget(), 0, "the checkpoint is not above it");
        checkpoint("0", "FFFFFFFF/F");
        assert_eq!(forget(), 0, "another slot's checkpoint");
        checkpoint("1", "FFFFFFFF/F");
        assert_eq!(forget(), 1, "below both");
        assert_eq!(
            sql.one("select string_agg(event_id, ' ' order by event_id) from walrelay.dead_letter"),
            "e1 e2"
        );
        let gone = forget_settled(&store.side.client, store.oid, "no slot").await_it();
        assert_eq!(gone, Ok(0));
    }
}

#[test]
fn nothing_is_parked_by_a_statement_that_fails() {
    let store = Store::on(Cluster::shared(Pg::V18).database());
    let sql = store.db.connect();
    let letters: Vec<_> = (0..10)
        .map(|n| letter(&format!("e{n}"), Some("a"), n, 0))
        .collect();
    sql.run("alter table walrelay.dead_letter add constraint no check (event_id <> 'e7')");
    let refused = park(&store.side.client, store.oid, &letters).await_it();
    assert_eq!(refused.expect_err("a row is refused").sqlstate(), "23514");
    assert_eq!(sql.one("select count(*) from walrelay.dead_letter"), "0");
    sql.run("alter table walrelay.dead_letter drop constraint no");
    store.park(&letters);
    store.park(&[]);
    assert_eq!(sql.one("select count(*) from walrelay.dead_letter"), "10");
}

/// 100,000 keys on an un-analyzed table: each by one probe of the index, the rest of its rows
/// unread.
#[test]
fn a_hundred_thousand_keys_are_read_by_the_index() {
    let store = Store::on(Cluster::shared(Pg::V18).database());
    let sql = store.db.connect();
    let mut letters: Vec<_> = (0..20_000)
        .map(|n| letter(&format!("h{n}"), Some(&format!("h{}", n / 2)), n, 0))
        .collect();
    letters.reverse();
    store.park(&letters);
    sql.run(
        "insert into walrelay.dead_letter (table_oid, event_id, aggregate_type, aggregate_id, \
         slot_generation, commit_lsn, ordinal, topic, key, value, reason) \
         select table_oid, 'e' || n, 't', 'k' || n, 1, '0/9'::pg_lsn + n, 0, 't', '', '', \
         'behind' from walrelay.relay, generate_series(0, 89999) n",
    );
    let scans = || {
        sql.run("select pg_stat_force_next_flush()");
        sql.one("select seq_scan from pg_stat_user_tables where relname = 'dead_letter'")
    };
    let before = scans();
    let parked = store.load(1, 0);
    assert_eq!(parked.keys.len(), 100_000);
    let positions = |k: &ParkedKey| k.from.commit_lsn.0;
    assert!(parked.keys.iter().all(|k| positions(k) < 90_009));
    assert_eq!(scans(), before, "the table was read from end to end");
    sql.run(
        "update walrelay.dead_letter set retry_requested_at = now() \
         where event_id in (select 'e' || n from generate_series(0, 89999) n)",
    );
    let before = scans();
    let due = store.next(1 << 40, 1_000, 1 << 20);
    assert_eq!(due.len(), 1_000);
    let settled = store.settle(&due.iter().collect::<Vec<_>>(), &[]);
    assert_eq!(settled.len(), 1_000);
    assert_eq!(scans(), before, "the table was read from end to end");
}

/// A million dead letters of 100,000 keys, the values 500 bytes each: what a take-over costs.
#[test]
#[ignore = "minutes: make soak"]
fn soak_a_million_dead_letters_are_read_within_bounds() {
    let store = Store::on(Cluster::shared(Pg::V18).database());
    let sql = store.db.connect();
    let timed = |what: &str, work: &mut dyn FnMut()| -> u64 {
        let (began, before) = (std::time::Instant::now(), resident());
        work();
        let grown = resident().saturating_sub(before) >> 20;
        #[expect(clippy::print_stdout, reason = "the harness shows it of a soak")]
        let () = println!("{what}: {:?}, {grown} MiB more resident", began.elapsed());
        grown
    };
    let letters: Vec<_> = (0..50_000)
        .map(|n| letter(&format!("p{n}"), Some(&format!("p{}", n % 1_000)), n, 0))
        .collect();
    timed("parking 50,000", &mut || store.park(&letters));
    sql.run(
        "insert into walrelay.dead_letter (table_oid, event_id, aggregate_type, aggregate_id, \
         slot_generation, commit_lsn, ordinal, topic, key, value, reason) \
         select table_oid, gen_random_uuid()::text, 'order', gen_random_uuid()::text, 1, \
         '0/9'::pg_lsn + n, 0, 't', '', convert_to(repeat(md5(n::text), 16), 'UTF8'), 'too_large' \
         from walrelay.relay, generate_series(1, 100000) n; \
         insert into walrelay.dead_letter (table_oid, event_id, aggregate_type, aggregate_id, \
         slot_generation, commit_lsn, ordinal, topic, key, value, reason) \
         select d.table_oid, gen_random_uuid()::text, 'order', d.aggregate_id, 1, \
         d.commit_lsn + n * 1000000, 0, 't', '', d.value, 'behind' \
         from walrelay.dead_letter d, generate_series(1, 9) n where d.reason = 'too_large' \
         and d.aggregate_type = 'order'",
    );
    let mut parked = Parked::default();
    let grown = timed("loading, first", &mut || parked = store.load(1, 0));
    assert!(grown < 100, "{grown} MiB for 100,000 keys");
    timed("loading, again", &mut || parked = store.load(1, 0));
    assert_eq!(parked.keys.len(), 101_000);
    timed("counting", &mut || {
        let totals = walrelay::io::dead_letters::by_hand::totals(&store.side.client, store.oid);
        runtime().block_on(totals).expect("counted");
    });
    timed("marking all", &mut || {
        let all = walrelay::config::Which::All;
        let client = &store.side.client;
        let retry = walrelay::io::dead_letters::by_hand::retry(client, store.oid, &all, None);
        runtime().block_on(retry).expect("marked");
    });
    timed("a hundred rounds of retry and settle", &mut || {
        for _ in 0..100 {
            let due = store.next(1 << 50, 1_000, 8 << 20);
            store.settle(&due.iter().collect::<Vec<_>>(), &[]);
        }
    });
}

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("this is Linux");
    let pages = statm.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok());
    pages.expect("a number") * 4_096
}

/// Whoever emits an event again, or has ids that are none, loses nothing by it.
#[test]
fn two_events_of_one_id_have_a_dead_letter_each() {
    let store = Store::on(Cluster::shared(Pg::V17).database());
    let sql = store.db.connect();
    let ids = || {
        sql.rows("select event_id from walrelay.dead_letter order by id")
            .into_iter()
            .map(|row| row[0].clone().expect("not null"))
            .collect::<Vec<_>>()
    };
    let other = |lsn: u64, key: &str| {
        let mut other = letter("same", Some(key), lsn, 0);
        other.xid = Xid(u32::try_from(lsn).expect("small"));
        other
    };
    let all = [
        other(10, "a"),
        other(20, "b"),
        letter("own", Some("b"), 30, 0),
    ];
    store.park(&all);
    let expected = ["same", "same (1 0/14#0)", "own"];
    assert_eq!(ids(), expected);
    // They come again: alone, together, and in a heal, where their positions are others.
    store.park(&all);
    store.park(&all[1..2]);
    store.park(&all[..1]);
    let mut healed = other(10, "a");
    healed.position = Position {
        generation: 2,
        commit_lsn: Lsn(1),
        ordinal: 0,
    };
    store.park(&[healed]);
    assert_eq!(ids(), expected);
    // A third, after the first was settled.
    sql.run("update walrelay.dead_letter set status = 'discarded', settled_at = now() where event_id = 'same'");
    store.park(&[other(40, "a")]);
    assert_eq!(ids().last().map(String::as_str), Some("same (1 0/28#0)"));
}
