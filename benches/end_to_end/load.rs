//! Writers: a backlog as fast as it can be made, and single-row commits on a schedule.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::runtime::Builder;
use tokio_postgres::NoTls;

use crate::postgres::{Database, Sql};

/// Half a kilobyte of jsonb each: hexadecimal noise, which hardly compresses, in a few fields.
const PAYLOAD_POOL: &str = "
  create table pool (i int primary key, payload jsonb);
  insert into pool
  select i, jsonb_build_object('order', i, 'state', 'placed', 'data',
    (select left(string_agg(md5(i::text || '/' || g), ''), 464) from generate_series(1, 15) g))
  from generate_series(0, 999) i;
  analyze pool";

/// What a writer fills in our own layout.
pub const OWN_COLUMNS: [&str; 5] = [
    "event_id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "payload",
];

/// A payload of that size for parameters.
pub fn payload(serial: usize) -> String {
    let noise = |n: usize| n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 3;
    let data: String = (0..29)
        .map(|i| format!("{:016x}", noise(serial * 31 + i)))
        .collect();
    format!(r#"{{"data": "{data}", "order": {serial}, "state": "placed"}}"#)
}

/// Commits `events` rows with so many rows a transaction, from two sessions. What making a backlog
/// costs is not measured: commits do not wait for the disk.
pub fn backlog(db: &Database<'_>, events: usize, rows: usize) {
    backlog_in(db, "outbox", &OWN_COLUMNS, events, rows);
}

/// The same in a table of another name, whose columns have other names.
pub fn backlog_in(db: &Database<'_>, table: &str, columns: &[&str; 5], events: usize, rows: usize) {
    let columns = columns.join(", ");
    let columns = columns.as_str();
    db.connect().run(PAYLOAD_POOL);
    let sessions = 2;
    let transactions = events / sessions / rows;
    assert_eq!(transactions * sessions * rows, events, "a whole backlog");
    thread::scope(|scope| {
        for session in 0..sessions {
            let sql = db.connect();
            scope.spawn(move || {
                sql.run("set synchronous_commit = off");
                sql.run(&format!(
                    "do $$ begin
                       for t in 1..{transactions} loop
                         insert into {table} ({columns})
                         select gen_random_uuid(), 't', 'order-' || (t * {rows} + g) % 20011,
                                'placed', (select payload from pool where i = (t * 7 + g) % 1000)
                         from generate_series(1, {rows}) g;
                         commit;
                       end loop;
                     end $$ -- {session}"
                ));
            });
        }
    });
}

/// Rows from number `from` to `to`, in transactions of a hundred, from one session: `keys` keys in
/// turn, each run in the same order.
pub fn backlog_of_keys(sql: &Sql, from: usize, to: usize, keys: usize) {
    if from == 0 {
        sql.run(PAYLOAD_POOL);
    }
    sql.run("set synchronous_commit = off");
    sql.run(&format!(
        "do $$ begin
           for t in {from} / 100 .. {to} / 100 - 1 loop
             insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             select gen_random_uuid(), 't', 'order-' || (t * 100 + g) % {keys}, 'placed',
                    (select payload from pool where i = (t * 7 + g) % 1000)
             from generate_series(0, 99) g;
             commit;
           end loop;
         end $$"
    ));
}

/// The end of the log, all of it on disk, and something behind it: readers see that they passed.
pub fn end_of_log(sql: &Sql) -> String {
    sql.run("checkpoint");
    let end = sql.one("select pg_current_wal_lsn()");
    sql.run("select pg_logical_emit_message(true, 'bench', 'end')");
    end
}

/// When each event was committed and when it was seen, since one start.
pub struct Times {
    start: Instant,
    committed: Vec<AtomicI64>,
    seen: Vec<AtomicI64>,
    seen_count: AtomicUsize,
    others: AtomicUsize,
}

impl Times {
    pub fn new(events: usize) -> Arc<Times> {
        let none = || (0..events).map(|_| AtomicI64::new(i64::MIN)).collect();
        Arc::new(Times {
            start: Instant::now(),
            committed: none(),
            seen: none(),
            seen_count: AtomicUsize::new(0),
            others: AtomicUsize::new(0),
        })
    }

    fn now(&self) -> i64 {
        i64::try_from(self.start.elapsed().as_nanos()).expect("a run is shorter than centuries")
    }

    pub fn committed(&self, serial: usize) {
        self.committed[serial].store(self.now(), Ordering::Relaxed);
    }

    /// The first time counts.
    pub fn seen(&self, serial: usize) {
        let first = self.seen[serial].compare_exchange(
            i64::MIN,
            self.now(),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        if first.is_ok() {
            self.seen_count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An event of no number: it warms the path up.
    pub fn seen_other(&self) {
        self.others.fetch_add(1, Ordering::Relaxed);
    }

    pub fn others(&self) -> usize {
        self.others.load(Ordering::Relaxed)
    }

    pub fn seen_count(&self) -> usize {
        self.seen_count.load(Ordering::Relaxed)
    }

    /// From committed to seen, sorted. A reader may see an event before its writer is told.
    pub fn latencies(&self) -> Vec<Duration> {
        let mut spans: Vec<Duration> = self
            .committed
            .iter()
            .zip(&self.seen)
            .map(|(c, s)| (c.load(Ordering::Relaxed), s.load(Ordering::Relaxed)))
            .filter(|(committed, seen)| *committed != i64::MIN && *seen != i64::MIN)
            .map(|(committed, seen)| {
                Duration::from_nanos(u64::try_from(seen - committed).unwrap_or(0))
            })
            .collect();
        spans.sort_unstable();
        spans
    }
}

/// Single-row commits on a schedule, one thread, many sessions, each with one at a time.
#[derive(Clone, Copy)]
pub struct Plan {
    pub a_second: u32,
    pub span: Duration,
    pub sessions: usize,
    /// Of the keys: `k` is watched for, others are not.
    pub key: char,
}

impl Plan {
    /// How many there will be at most.
    pub fn events(&self) -> usize {
        let seconds = usize::try_from(self.span.as_secs()).expect("minutes");
        usize::try_from(self.a_second).expect("thousands") * seconds
    }
}

/// What was written.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    pub events: usize,
    pub span: Duration,
}

impl Written {
    pub fn a_second(&self) -> f64 {
        crate::usage::count(self.events) / self.span.as_secs_f64()
    }
}

pub struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Written>,
}

impl Writer {
    /// Starts when every session has its statement ready. Event `n` is due at `n / a_second`,
    /// whatever became of those before it; a session that is late goes on at once.
    pub fn start(db: &Database<'_>, plan: Plan, times: Arc<Times>) -> Writer {
        let config = format!(
            "host=127.0.0.1 port={} user=postgres dbname={}",
            db.cluster.port, db.name
        );
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build();
            runtime
                .expect("a runtime can be built")
                .block_on(write(config, plan, times, stopped))
        });
        Writer { stop, thread }
    }

    pub fn stop(self) -> Written {
        self.stop.store(true, Ordering::Relaxed);
        self.wait()
    }

    pub fn wait(self) -> Written {
        self.thread.join().expect("the writer says why it failed")
    }
}

async fn write(config: String, plan: Plan, times: Arc<Times>, stop: Arc<AtomicBool>) -> Written {
    let mut ready = Vec::new();
    for _ in 0..plan.sessions {
        let connected = tokio_postgres::connect(&config, NoTls).await;
        let (client, connection) = connected.expect("the database can be reached");
        tokio::spawn(connection);
        let statement = client
            .prepare(
                "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
                 values (gen_random_uuid(), 't', $1, 'placed', $2::text::jsonb)",
            )
            .await
            .expect("the outbox is there");
        ready.push((client, statement));
    }
    let start = Instant::now();
    let next = Arc::new(AtomicUsize::new(0));
    let last = Arc::new(Mutex::new(start));
    let written = Arc::new(AtomicUsize::new(0));
    let mut sessions = Vec::new();
    for (client, statement) in ready {
        let (next, last, written) = (Arc::clone(&next), Arc::clone(&last), Arc::clone(&written));
        let (times, stop) = (Arc::clone(&times), Arc::clone(&stop));
        sessions.push(tokio::spawn(async move {
            loop {
                let serial = next.fetch_add(1, Ordering::Relaxed);
                let late = start.elapsed() > plan.span;
                if serial >= plan.events() || late || stop.load(Ordering::Relaxed) {
                    return;
                }
                let nanos = u64::try_from(serial).expect("small") * 1_000_000_000;
                let due = start + Duration::from_nanos(nanos / u64::from(plan.a_second));
                tokio::time::sleep_until(due.into()).await;
                let (key, payload) = (format!("{}{serial}", plan.key), payload(serial));
                let done = client.execute(&statement, &[&key, &payload]).await;
                times.committed(serial);
                done.expect("a row can be inserted");
                written.fetch_add(1, Ordering::Relaxed);
                *last.lock().expect("nobody panics with it") = Instant::now();
            }
        }));
    }
    for session in sessions {
        session.await.expect("the writer says why it failed");
    }
    let end = *last.lock().expect("nobody panics with it");
    Written {
        events: written.load(Ordering::Relaxed),
        span: end - start,
    }
}
