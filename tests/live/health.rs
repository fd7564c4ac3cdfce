//! What `/readyz` and `/metrics` say, failure by failure, and while nothing moves.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use serde_json::Value;

use crate::http::{self, Ready, get, metrics};
use crate::kafka::Broker;
use crate::postgres::{Cluster, Pg, Sql, Stop};
use crate::proc::{Proc, eventually, eventually_says, free_port, spawn_child};
use crate::refusals::Holder;
use crate::relay::{Relay, binary, run_to_end};
use crate::stage::{MINUTE, ON_GAP_HALT, Stage};

/// What a failure looks like from outside.
struct Signal {
    failure: &'static str,
    /// The condition of `/readyz` that names it.
    condition: &'static str,
    /// Words of what it says, and of its remedy.
    what: &'static [&'static str],
    remedy: &'static [&'static str],
    metrics: &'static [(&'static str, Is)],
    /// The exit code of `walrelay status`, and what it says.
    status: (i32, &'static str),
}

#[derive(Clone, Copy, Debug)]
enum Is {
    Exactly(f64),
    AtLeast(f64),
    Below(f64),
    Unknown,
}

impl Is {
    fn holds(self, value: f64) -> bool {
        match self {
            Is::Exactly(right) => (value - right).abs() < f64::EPSILON,
            Is::AtLeast(least) => value >= least,
            Is::Below(limit) => value < limit,
            Is::Unknown => value.is_nan(),
        }
    }
}

const TABLE: [Signal; 9] = [
    Signal {
        failure: "broker down",
        condition: "kafka",
        what: &["refuses the connection"],
        remedy: &["start Kafka"],
        metrics: &[
            ("walrelay_condition{condition=\"kafka\"}", Is::Exactly(0.0)),
            ("walrelay_brokers_up", Is::Exactly(0.0)),
        ],
        status: (3, "refuses the connection"),
    },
    Signal {
        failure: "absent topic",
        condition: "topics",
        what: &[".nowhere does not exist", "3 events wait, the first is "],
        remedy: &["create ", "--create-topics"],
        metrics: &[
            ("walrelay_condition{condition=\"topics\"}", Is::Exactly(0.0)),
            ("walrelay_held_events", Is::Exactly(3.0)),
            ("walrelay_oldest_undelivered_age_seconds", Is::AtLeast(0.01)),
        ],
        status: (3, ".nowhere does not exist: 3 events wait"),
    },
    Signal {
        failure: "slot nearly lost",
        condition: "slot",
        what: &["about to be lost", "unreserved"],
        remedy: &["max_slot_wal_keep_size"],
        metrics: &[
            ("walrelay_condition{condition=\"slot\"}", Is::Exactly(0.0)),
            (
                "walrelay_slot_wal_status{status=\"unreserved\"}",
                Is::Exactly(1.0),
            ),
            ("walrelay_slot_safe_wal_size_bytes", Is::Below(0.0)),
            ("walrelay_slot_retained_wal_bytes", Is::AtLeast(3e7)),
        ],
        status: (3, "wal_status unreserved"),
    },
    Signal {
        failure: "publication dropped",
        condition: "publication",
        what: &["publication walrelay does not exist"],
        remedy: &["create publication \"walrelay\""],
        metrics: &[(
            "walrelay_condition{condition=\"publication\"}",
            Is::Exactly(0.0),
        )],
        status: (3, "publication walrelay does not exist"),
    },
    Signal {
        failure: "table swapped",
        condition: "publication",
        what: &[
            "public.outbox is a new table (oid ",
            "not in publication walrelay; the published one is public.outbox_old",
        ],
        remedy: &[
            "leave the relay that runs alone",
            "walrelay init --table public.outbox",
        ],
        metrics: &[(
            "walrelay_condition{condition=\"publication\"}",
            Is::Exactly(0.0),
        )],
        status: (3, "the published one is public.outbox_old"),
    },
    Signal {
        failure: "stuck",
        condition: "kafka",
        what: &["delivered nothing for"],
        remedy: &["broker"],
        metrics: &[
            ("walrelay_condition{condition=\"kafka\"}", Is::Exactly(0.0)),
            ("walrelay_oldest_undelivered_age_seconds", Is::AtLeast(5.0)),
            ("walrelay_in_flight_events", Is::AtLeast(1.0)),
        ],
        status: (3, "delivered nothing for"),
    },
    Signal {
        failure: "database gone",
        condition: "database",
        what: &["no database session"],
        remedy: &["tried again", "server runs"],
        metrics: &[
            (
                "walrelay_condition{condition=\"database\"}",
                Is::Exactly(0.0),
            ),
            ("walrelay_oldest_undelivered_age_seconds", Is::Unknown),
            ("walrelay_leader_state{state=\"unknown\"}", Is::Exactly(1.0)),
            (
                "walrelay_errors_total{class=\"transient\",peer=\"postgres\"}",
                Is::AtLeast(1.0),
            ),
        ],
        status: (3, "no database session"),
    },
    Signal {
        failure: "leader elsewhere",
        condition: "leadership",
        what: &["standing by: pid ", "leads"],
        remedy: &["takes over when the leader goes"],
        metrics: &[
            (
                "walrelay_condition{condition=\"leadership\"}",
                Is::Exactly(0.0),
            ),
            ("walrelay_leader_state{state=\"standby\"}", Is::Exactly(1.0)),
            ("walrelay_oldest_undelivered_age_seconds", Is::Unknown),
            ("walrelay_confirmed_flush_lag_bytes", Is::AtLeast(0.0)),
        ],
        status: (0, "stands by"),
    },
    // Case C11.
    Signal {
        failure: "slot held by a foreign session",
        condition: "stream",
        what: &["is held by pid ", "application_name \"foreign\""],
        remedy: &["pg_terminate_backend("],
        metrics: &[("walrelay_condition{condition=\"stream\"}", Is::Exactly(0.0))],
        status: (3, "is held by pid "),
    },
];

/// Long enough for what is asked of the database every 10 s.
const NOTICED_WITHIN: Duration = Duration::from_secs(30);

/// Waits until the relay is not ready and says why as the table has it, in every place.
#[track_caller]
fn signals(stage: &Stage<'_>, address: &str, failure: &str) -> Ready {
    let signal = TABLE.iter().find(|s| s.failure == failure);
    let signal = signal.expect("a failure of the table");
    let last = RefCell::new(String::new());
    let what = || format!("{failure}: {}", last.borrow());
    let ready = eventually_says(NOTICED_WITHIN, what, || {
        let ready = Ready::of(address);
        match signal.differs(&ready, &metrics(address)) {
            None => Some(ready),
            Some(why) => {
                *last.borrow_mut() = why;
                None
            }
        }
    });
    show(failure, &ready, signal);
    status_says(stage, address, signal);
    ready
}

impl Signal {
    fn differs(&self, ready: &Ready, series: &HashMap<String, f64>) -> Option<String> {
        if ready.status != 503 || ready.body["ready"] != false {
            return Some(format!("/readyz is {}", ready.status));
        }
        let condition = ready.condition(self.condition);
        let has = |field: &str, words: &[&str]| {
            let text = condition[field].as_str().unwrap_or_default();
            words.iter().all(|word| text.contains(word))
        };
        if condition["ok"] != false || !has("what", self.what) || !has("remedy", self.remedy) {
            return Some(format!("{}", ready.body["conditions"]));
        }
        let all = [("walrelay_ready", Is::Exactly(0.0))];
        let mut wrong = all
            .iter()
            .chain(self.metrics)
            .filter(|(name, is)| !series.get(*name).is_some_and(|value| is.holds(*value)));
        wrong
            .next()
            .map(|(name, is)| format!("{name} is {:?}, not {is:?}", series.get(*name)))
    }
}

/// Every text in a JSON value.
fn texts(value: &Value, all: &mut Vec<String>) {
    match value {
        Value::String(text) => all.push(text.clone()),
        Value::Array(items) => items.iter().for_each(|item| texts(item, all)),
        Value::Object(fields) => fields.values().for_each(|field| texts(field, all)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The findings of `walrelay status`, in its own words (what it quotes of `/readyz` apart).
#[track_caller]
fn status_says(stage: &Stage<'_>, address: &str, signal: &Signal) {
    let (code, words) = signal.status;
    let ended = stage
        .status(&["--json", "--http", address])
        .expect_code(code);
    let said: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    let mut all = Vec::new();
    texts(&said["findings"], &mut all);
    assert!(
        all.iter().any(|text| text.contains(words)),
        "{}: no {words} in {all:#?}",
        signal.failure
    );
}

/// The table as it really is, with `--nocapture`.
#[allow(clippy::print_stdout)]
fn show(failure: &str, ready: &Ready, signal: &Signal) {
    let condition = ready.condition(signal.condition);
    println!(
        "{failure}: {} {}: {} | remedy: {}",
        ready.status, signal.condition, condition["what"], condition["remedy"]
    );
}

#[track_caller]
fn becomes_ready(address: &str, within: Duration) -> Ready {
    let last = RefCell::new(String::new());
    let what = || format!("ready: {}", last.borrow());
    eventually_says(within, what, || {
        let ready = Ready::of(address);
        *last.borrow_mut() = ready.body.to_string();
        (ready.status == 200 && ready.body["ready"] == true).then_some(ready)
    })
}

/// A relay that serves on a port of its own, and where.
fn serving(stage: &mut Stage<'_>) -> (Relay, String) {
    if !stage.run_args.iter().any(|arg| arg == "--http") {
        let own = ["--http", "127.0.0.1:0"];
        stage.run_args.extend(own.map(str::to_owned));
    }
    let mut relay = stage.run();
    let address = http::address(&mut relay);
    (relay, address)
}

fn ins(sql: &Sql, aggregate_type: &str, events: usize) {
    for n in 0..events {
        sql.run(&format!(
            "insert into outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             values (gen_random_uuid(), '{aggregate_type}', 'k{n}', 'e', '{n}')"
        ));
    }
}

/// The oldest undelivered event ages by as much as time goes by.
#[track_caller]
fn ages(address: &str) {
    let read = || {
        let age = Ready::of(address).number("oldest_undelivered_age_seconds");
        (age.expect("something is undelivered"), Instant::now())
    };
    let (first, at) = read();
    let span = Duration::from_secs(2);
    std::thread::sleep(span);
    let (second, then) = read();
    let passed = (then - at).as_secs_f64();
    assert!(
        (second - first - passed).abs() < 0.5,
        "{first} became {second} in {passed}"
    );
}

#[test]
fn a_relay_that_works_is_ready_and_tells_its_numbers() {
    let mut stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    let (mut relay, address) = serving(&mut stage);
    ins(&sql, "t", 5);
    stage.wait_count("t", 5, MINUTE);
    stage.wait_confirmed(MINUTE);
    let ready = becomes_ready(&address, MINUTE);
    let body = &ready.body;
    assert_eq!(body["slot"], stage.db.slot());
    assert_eq!(body["publication"], "walrelay");
    assert_eq!(body["table"], "public.outbox");
    assert_eq!(body["leader"], "leading");
    assert_eq!(body["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(body["process_id"].as_str().map(str::len), Some(36));
    eventually(NOTICED_WITHIN, "the numbers are those of now", || {
        let ready = Ready::of(&address);
        let is_known = ready.number("delivered_events") == Some(5.0)
            && ready.number("oldest_undelivered_age_seconds") == Some(0.0)
            && ready.number("brokers_up") == Some(1.0)
            && ready.number("retained_bytes").is_some()
            && ready.number("lag_bytes").is_some()
            && ready.number("wal_bytes_per_second").is_some();
        is_known.then_some(())
    });
    let series = metrics(&address);
    let value = |name: &str| *series.get(name).unwrap_or(&f64::NAN);
    let topic = stage.topic("t");
    let events = format!("walrelay_delivered_events_total{{topic=\"{topic}\"}}");
    let bytes = format!("walrelay_delivered_bytes_total{{topic=\"{topic}\"}}");
    assert_eq!(value(&events), 5.0);
    // Keys of two bytes, values of one.
    assert_eq!(value(&bytes), 15.0);
    assert_eq!(value("walrelay_ready"), 1.0);
    assert_eq!(value("walrelay_slot_wal_status{status=\"reserved\"}"), 1.0);
    assert_eq!(value("walrelay_delivery_latency_seconds_count"), 5.0);
    for name in [
        "walrelay_oldest_transaction_age_seconds",
        "walrelay_prepared_transaction_age_seconds",
        "walrelay_broker_rtt_seconds{quantile=\"0.99\"}",
        "walrelay_reconnects_total{peer=\"postgres\"}",
        "walrelay_errors_total{class=\"definite\",peer=\"kafka\"}",
    ] {
        assert!(value(name) >= 0.0, "{name} is {}", value(name));
    }
    relay.stop();
    assert!(
        TcpStream::connect(&address).is_err(),
        "it listens after its end"
    );
}

#[test]
fn an_idle_relay_notices_that_its_broker_is_gone() {
    let broker = Broker::start();
    let mut stage = Stage::on(Cluster::shared(Pg::V16), &broker);
    let sql = stage.init();
    let (mut relay, address) = serving(&mut stage);
    becomes_ready(&address, MINUTE);
    broker.kill9();
    signals(&stage, &address, "broker down");
    assert_eq!(get(&address, "/livez").status, 200);
    broker.up();
    becomes_ready(&address, MINUTE);

    // It hangs: nothing is said, nothing is delivered.
    ins(&sql, "t", 1);
    stage.wait_count("t", 1, MINUTE);
    broker.freeze();
    ins(&sql, "t", 3);
    signals(&stage, &address, "stuck");
    ages(&address);
    // The connection is closed so that Postgres can stop; what is known stays known.
    relay.wait_for_text("delivered nothing for", MINUTE);
    eventually(MINUTE, "the stream waits for Kafka", || {
        (Ready::of(&address).holds("stream") == Some(false)).then_some(())
    });
    ages(&address);
    broker.thaw();
    becomes_ready(&address, MINUTE);
    stage.wait_count("t", 4, MINUTE);
    relay.stop();
}

#[test]
fn a_topic_that_is_not_there_is_named_with_its_events() {
    let mut stage = Stage::shared(Pg::V17);
    let sql = stage.init();
    let (mut relay, address) = serving(&mut stage);
    ins(&sql, "nowhere", 3);
    let ready = signals(&stage, &address, "absent topic");
    assert_eq!(ready.holds("kafka"), Some(true), "{}", ready.body);
    let topic = stage.topic("nowhere");
    let series = format!("walrelay_topic_waiting_events{{topic=\"{topic}\"}}");
    assert_eq!(metrics(&address).get(&series), Some(&3.0));
    let event_id = sql.one("select event_id from outbox order by id limit 1");
    let said = relay.wait_for_text("does not exist", MINUTE);
    assert!(said.has(&topic) && said.has(&event_id) && said.has("--create-topics"));
    ages(&address);
    stage.broker.create_topic(&topic, 2);
    becomes_ready(&address, MINUTE);
    assert_eq!(metrics(&address).get(&series), None);
    stage.wait_count("nowhere", 3, MINUTE);
    relay.stop();
}

/// README: the publication is dropped or loses the table.
#[test]
fn a_publication_that_no_longer_covers_the_table_is_noticed() {
    let mut stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    let (mut relay, address) = serving(&mut stage);
    becomes_ready(&address, MINUTE);
    sql.run(
        "begin; alter table outbox rename to outbox_old;
         create table outbox (like outbox_old including all); commit",
    );
    signals(&stage, &address, "table swapped");
    let said = relay.wait_for_text("is a new table", MINUTE);
    assert_eq!(said.level(), "WARN");
    assert!(said.has("remedy: leave the relay that runs alone"));
    sql.run("begin; drop table outbox; alter table outbox_old rename to outbox; commit");
    becomes_ready(&address, MINUTE);
    sql.run("alter publication walrelay set table outbox where (event_type <> 'e')");
    eventually(NOTICED_WITHIN, "the row filter", || {
        let ready = Ready::of(&address);
        let publication = ready.condition("publication");
        let what = publication["what"].as_str()?;
        what.contains("has a row filter").then_some(())
    });
    sql.run("drop publication walrelay");
    signals(&stage, &address, "publication dropped");
    relay.assert_alive();
}

#[test]
fn a_slot_that_is_lost_is_announced_and_then_ends_the_relay() {
    let cluster = Cluster::with(Pg::V15, &["max_slot_wal_keep_size = 16MB"]);
    let mut stage = Stage::on(&cluster, Broker::shared());
    stage.run_args.extend(ON_GAP_HALT.map(str::to_owned));
    let sql = stage.init();
    let (mut relay, address) = serving(&mut stage);
    ins(&sql, "nowhere", 1);
    for _ in 0..4 {
        sql.run("select pg_logical_emit_message(false, 'test', 'x'); select pg_switch_wal()");
    }
    signals(&stage, &address, "slot nearly lost");
    sql.run("checkpoint");
    let code = relay.wait_exit(MINUTE);
    let said = relay.said();
    assert_eq!(code, 4, "{said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.starts_with("remedy: ") && last.contains("max_slot_wal_keep_size"));
    let status = stage.status(&[]).expect_code(4);
    assert!(status.stdout.contains("is lost"), "{}", status.stdout);
}

#[test]
fn a_database_that_is_gone_makes_everything_about_it_unknown() {
    let cluster = Cluster::start(Pg::V17);
    let mut stage = Stage::on(&cluster, Broker::shared());
    stage.init();
    let (mut relay, address) = serving(&mut stage);
    becomes_ready(&address, MINUTE);
    cluster.stop(Stop::Fast);
    let ready = signals(&stage, &address, "database gone");
    assert_eq!(ready.holds("leadership"), None, "{}", ready.body);
    assert_eq!(ready.holds("stream"), None, "{}", ready.body);
    assert_eq!(ready.body["leader"], "unknown");
    assert_eq!(get(&address, "/livez").status, 200);
    cluster.up();
    becomes_ready(&address, MINUTE);
    assert!(metrics(&address)["walrelay_reconnects_total{peer=\"postgres\"}"] >= 1.0);
    relay.stop();
}

#[test]
fn a_standby_is_not_ready_and_names_the_leader() {
    let mut stage = Stage::shared(Pg::V16);
    stage.init();
    let (mut leader, first) = serving(&mut stage);
    becomes_ready(&first, MINUTE);
    let (mut standby, second) = serving(&mut stage);
    let ready = signals(&stage, &second, "leader elsewhere");
    assert_eq!(ready.body["leader"], "standby");
    let named = ready.condition("leadership")["what"].to_string();
    assert!(
        named.contains("application_name walrelay") && named.contains("client 127.0.0.1"),
        "{named}"
    );
    leader.stop();
    becomes_ready(&second, MINUTE);
    standby.stop();
}

/// README: another session holds the slot, or another instance leads.
#[test]
fn c11_a_slot_that_another_session_holds_is_named_with_its_holder() {
    let mut stage = Stage::shared(Pg::V15);
    stage.init();
    let holder = Holder::start(&stage);
    let (mut relay, address) = serving(&mut stage);
    signals(&stage, &address, "slot held by a foreign session");
    drop(holder);
    becomes_ready(&address, MINUTE);
    relay.stop();
}

/// The log is read until the relay is ready, and then no more: a pipe without room hangs the loop
/// in the middle of its next line.
#[test]
fn a_loop_that_hangs_is_said_so_by_its_own_health() {
    let stage = Stage::shared(Pg::V18);
    let sql = stage.init();
    let url = stage.db.url();
    let mut command = binary(&[
        "run",
        "--database-url",
        &url,
        "--slot",
        &stage.db.slot(),
        "--brokers",
        &stage.broker.bootstrap(),
        "--http",
        "127.0.0.1:0",
    ]);
    let (reads, log) = std::io::pipe().expect("a pipe");
    let our_end = log.try_clone().expect("a file handle can be cloned");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let _process = Proc::from_child(spawn_child(command));
    let reader = LogReader::start(reads);
    let address = reader.address();
    becomes_ready(&address, MINUTE);
    let _nobody_reads = reader.stop(&our_end);
    fill(&our_end);
    // A topic that is not there is a line of the log.
    ins(&sql, &stage.prefix, 1);
    eventually(MINUTE, "it is not ready because it hangs", || {
        (Ready::of(&address).holds("loop") == Some(false)).then_some(())
    });
    let hung = Ready::of(&address);
    assert_eq!(hung.status, 503);
    let what = hung.condition("loop")["what"].to_string();
    assert!(what.contains("has not turned for"), "{what}");
    eventually(MINUTE, "it is to be restarted", || {
        let live = get(&address, "/livez");
        (live.status == 503).then_some(())
    });
}

/// Reads a log from a pipe, in a thread of its own.
struct LogReader {
    is_over: Arc<AtomicBool>,
    addresses: Receiver<String>,
    thread: JoinHandle<PipeReader>,
}

impl LogReader {
    fn start(pipe: PipeReader) -> LogReader {
        let is_over = Arc::new(AtomicBool::new(false));
        let (tell, addresses) = channel();
        let flag = Arc::clone(&is_over);
        let thread = thread::spawn(move || {
            let mut lines = BufReader::new(pipe);
            let mut line = String::new();
            while !flag.load(Ordering::Relaxed) {
                line.clear();
                lines.read_line(&mut line).expect("a log is text");
                if let Some((_, rest)) = line.split_once("http listening on ") {
                    let address = rest.split('"').next().unwrap_or(rest).trim();
                    let _ = tell.send(address.to_owned());
                }
            }
            lines.into_inner()
        });
        LogReader {
            is_over,
            addresses,
            thread,
        }
    }

    fn address(&self) -> String {
        let said = self.addresses.recv_timeout(MINUTE);
        said.expect("the relay says where it listens")
    }

    /// Reads no more. The pipe stays open.
    fn stop(self, mut pipe: &PipeWriter) -> PipeReader {
        self.is_over.store(true, Ordering::Relaxed);
        // Wakes it, if it waits for a line.
        pipe.write_all(b"\n").expect("it is being read");
        self.thread.join().expect("the reader does not panic")
    }
}

/// Writes until not one byte more has room.
fn fill(pipe: &PipeWriter) {
    // Opened anew: who else writes to it shall wait for room as before.
    let mut own = OpenOptions::new()
        .write(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(format!("/proc/self/fd/{}", pipe.as_raw_fd()))
        .expect("a pipe of our own");
    for size in [4096, 1] {
        while own.write(&vec![b'.'; size]).is_ok() {}
    }
}

#[test]
fn the_server_is_small_strict_and_not_impressed() {
    let mut stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let (mut relay, address) = serving(&mut stage);
    let address = address.as_str();

    let index = get(address, "/");
    assert_eq!(index.status, 200);
    assert!(index.body.contains("/metrics") && index.body.contains("/readyz"));
    let lost = get(address, "/metric");
    assert_eq!(lost.status, 404);
    assert!(lost.body.contains("/, /metrics, /livez, /readyz"));
    let scraped = get(address, "/metrics");
    assert!(
        scraped
            .head
            .contains("content-type: text/plain; version=0.0.4")
    );
    assert!(scraped.head.contains("cache-control: no-store"));
    let live = get(address, "/livez?verbose=1");
    assert_eq!(live.status, 200);
    assert!(live.head.contains("content-type: application/json"));

    let ask = |request: &str| http::ask(address, request);
    let head = ask("HEAD /livez HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    let old = ask("GET /livez HTTP/1.0\r\n\r\n");
    assert_eq!(old.status, 200);
    let post = ask("POST /readyz HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc");
    assert_eq!(post.status, 405);
    assert!(post.head.contains("allow: get, head"));
    assert_eq!(ask("DELETE / HTTP/1.1\r\nHost: x\r\n\r\n").status, 405);
    let bodied = ask("GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc");
    assert_eq!(bodied.status, 413);
    let chunked =
        ask("GET /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n");
    assert_eq!(chunked.status, 413);
    let huge = format!(
        "GET / HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n",
        "x".repeat(1 << 20)
    );
    assert_eq!(ask(&huge).status, 431);
    let many: String = (0..500).map(|n| format!("X{n}: y\r\n")).collect();
    assert_eq!(ask(&format!("GET / HTTP/1.1\r\n{many}\r\n")).status, 431);
    for garbage in [
        "\0\u{1}\u{2}\r\n\r\n",
        "GET\r\n\r\n",
        "\r\n\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
    ] {
        let answer = http::raw(address, garbage.as_bytes());
        assert!(answer.is_empty() || answer.contains(" 400 "), "{answer}");
    }

    // Hundreds of clients that never finish their request keep nobody out.
    let mut slow: Vec<TcpStream> = (0..300).map(|_| http::connect(address)).collect();
    for stream in &mut slow {
        let _ = stream.write_all(b"GET /livez HTTP/1.1\r\nX: ");
    }
    let patient = get(address, "/livez");
    assert_eq!(patient.status, 200);
    assert!(patient.took < Duration::from_secs(2), "{:?}", patient.took);
    // And each of them is cut off.
    let last = slow.last_mut().expect("three hundred");
    let started = Instant::now();
    let mut rest = Vec::new();
    let _ = last.read_to_end(&mut rest);
    assert!(started.elapsed() < Duration::from_secs(12), "it holds on");

    // Nothing of this has disturbed the relay.
    ins(&sql, "t", 3);
    stage.wait_count("t", 3, MINUTE);
    relay.stop();
}

#[test]
fn an_address_that_was_asked_for_is_had_or_the_relay_does_not_start() {
    let mut stage = Stage::shared(Pg::V15);
    let sql = stage.init();
    let taken = std::net::TcpListener::bind(("127.0.0.1", free_port())).expect("free");
    let address = taken.local_addr().expect("bound").to_string();
    let ended = run_to_end(
        &[
            "run",
            "--database-url",
            &stage.db.url(),
            "--brokers",
            "127.0.0.1:1",
            "--http",
            &address,
        ],
        &[],
        MINUTE,
    );
    crate::refusals::says(&ended, 3, &["cannot listen on", &address, "--http off"]);

    // Whoever asked for none gets none, and no warning.
    stage.run_args = vec!["--http".to_owned(), "off".to_owned()];
    let mut relay = stage.run();
    ins(&sql, "t", 1);
    stage.wait_count("t", 1, MINUTE);
    assert!(!relay.said().contains("listen"), "{}", relay.said());
    relay.stop();
}
