//! The raw limits: the same work without the relay, one half at a time.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::Message as _;
use rdkafka::{Offset, TopicPartitionList};
use tokio::runtime::{Builder, Runtime};
use walrelay::config;
use walrelay::io::kafka::{Publisher, Settings};
use walrelay::io::slot::{Frame, Intake, Slot, Turn};
use walrelay::lsn::{Lsn, PgTimestamp};
use walrelay::record::{Header, Record, Ticket};
use walrelay::wire::pgoutput::{Column, Message};
use walrelay::wire::replication::{ReplicationMessage, Reply, StatusUpdate};

use crate::kafka::Broker;
use crate::load::{Times, payload};
use crate::proc::{self, AtParentDeath, Proc, RunAs};
use crate::rig::{MINUTE, PARTITIONS, Rig};
use crate::usage::Cpu;

/// Events in the client library at one time, as many as the relay gives it.
const WINDOW: usize = 10_000;

/// Postgres's own reader, to /dev/null.
pub struct Recvlogical {
    process: Proc,
}

impl Recvlogical {
    /// Reads a slot, to its end or to a position.
    pub fn start(rig: &Rig<'_>, slot: &str, end: Option<&str>) -> Recvlogical {
        let mut command = proc::command(recvlogical(), RunAs::Me, AtParentDeath::Kill);
        command
            .args(["--start", "--no-loop", "-f", "/dev/null", "-F", "0"])
            .args(["-s", "1", "-U", "postgres", "-S", slot])
            .args(["-h", &rig.host(), "-p", &rig.db.cluster.port.to_string()])
            .args(["-d", &rig.db.name])
            .args(["-o", "proto_version=1", "-o", "publication_names=walrelay"]);
        if let Some(end) = end {
            command.args(["-E", end]);
        }
        let log = proc::dir("recvlogical").join("log");
        Recvlogical {
            process: Proc::start(command, &log),
        }
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub fn is_alive(&mut self) -> bool {
        self.process.ended().is_none()
    }

    /// Its end, looked for again and again; `look` is called at every look.
    pub fn wait(&mut self, mut look: impl FnMut(u32)) {
        let until = Instant::now() + 10 * MINUTE;
        while self.is_alive() {
            look(self.pid());
            assert!(Instant::now() < until, "pg_recvlogical does not end");
            thread::sleep(Duration::from_millis(10));
        }
        let status = self.process.ended().expect("it has ended");
        assert!(status.success(), "pg_recvlogical: {status}");
    }
}

fn recvlogical() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join("pg_recvlogical"));
    let debian = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|version| version.path().join("bin/pg_recvlogical"));
    on_path
        .chain(debian)
        .find(|file| Path::exists(file))
        .expect("pg_recvlogical comes with Postgres's client package (make bench installs it)")
}

/// What the bare producer did.
pub struct Produced {
    pub span: Duration,
    pub cpu: Cpu,
}

fn publisher(broker: &Broker) -> Publisher {
    let kafka = config::Kafka {
        brokers: broker.bootstrap(),
        properties: Vec::new(),
        token_command: None,
        create_topics: None,
    };
    let settings = Settings::new(&kafka, "bench").expect("no mock broker to start");
    Publisher::new(&settings).expect("settings that the relay uses")
}

fn record<'a>(topic: &'a str, serial: usize, key: &'a str, payload: &'a str) -> Record<'a> {
    let own = |name: &'static str, value: &'static [u8]| Header {
        name: name.into(),
        value: Some(value.into()),
    };
    let partition = i32::try_from(serial % 12).expect("a remainder");
    Record {
        topic: topic.into(),
        partition: partition % PARTITIONS,
        key: key.as_bytes().into(),
        value: Some(payload.as_bytes().into()),
        timestamp_ms: None,
        headers: vec![
            own("event_id", b"3f0e7a54-1c52-4d5e-9d7a-6a3d1f1c9b1e"),
            own("event_type", b"placed"),
            own("aggregate_type", b"t"),
        ],
    }
}

/// Publishes as fast as it goes, with the relay's own settings and no Postgres.
pub fn produce(broker: &Broker, topic: &str, events: usize) -> Produced {
    let payloads: Vec<String> = (0..1_000).map(payload).collect();
    let keys: Vec<String> = (0..1_000).map(|i| format!("order-{i}")).collect();
    let start = Instant::now();
    let before = Cpu::of("self");
    runtime().block_on(async {
        let mut publisher = publisher(broker);
        let (mut sent, mut done, mut reports) = (0, 0, Vec::new());
        while done < events {
            publisher.drain(&mut reports);
            assert!(reports.iter().all(|r| r.result.is_ok()), "{reports:?}");
            done += reports.len();
            reports.clear();
            while publisher.in_flight() < WINDOW && sent < events {
                let i = sent % 1_000;
                let record = record(topic, sent, &keys[i], &payloads[i]);
                publisher.send(&record, Ticket(sent));
                sent += 1;
            }
            if done < events {
                publisher.woken().await;
            }
        }
    });
    Produced {
        span: start.elapsed(),
        cpu: Cpu::of("self") - before,
    }
}

/// Publishes on a schedule: from `send` to the delivery report.
pub fn produce_on_schedule(broker: &Broker, topic: &str, a_second: u32, times: &Times, n: usize) {
    runtime().block_on(async {
        let mut publisher = publisher(broker);
        let mut reports = Vec::new();
        // Connects, and learns where the partitions are.
        for partition in 0..12 {
            publisher.send(&record(topic, partition, "w", "warm"), Ticket(0));
        }
        while publisher.in_flight() > 0 {
            publisher.woken().await;
            publisher.drain(&mut reports);
        }
        reports.clear();
        let start = Instant::now();
        let (mut sent, mut done) = (0, 0);
        while done < n {
            let nanos = u64::try_from(sent).expect("small") * 1_000_000_000;
            let due = start + Duration::from_nanos(nanos / u64::from(a_second));
            tokio::select! {
                biased;
                () = publisher.woken() => {}
                () = tokio::time::sleep_until(due.into()), if sent < n => {
                    let (key, payload) = (format!("k{sent}"), payload(sent));
                    times.committed(sent);
                    publisher.send(&record(topic, sent, &key, &payload), Ticket(sent));
                    sent += 1;
                }
            }
            publisher.drain(&mut reports);
            for report in reports.drain(..) {
                assert!(report.result.is_ok(), "{report:?}");
                times.seen(report.ticket.0);
                done += 1;
            }
        }
    });
}

fn runtime() -> Runtime {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime can be built")
}

/// When each record of each key was appended, in milliseconds; for a topic of `LogAppendTime`.
pub fn append_times(broker: &Broker, topic: &str) -> HashMap<String, Vec<i64>> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", broker.bootstrap())
        .set("group.id", "bench")
        .set("enable.auto.commit", "false")
        .set("enable.partition.eof", "true")
        .set("log_level", "2")
        .create()
        .expect("a consumer");
    let mut all = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        all.add_partition_offset(topic, partition, Offset::Beginning)
            .expect("a beginning");
    }
    consumer.assign(&all).expect("an assignment");
    let mut times: HashMap<String, Vec<i64>> = HashMap::new();
    let (mut ended, until) = (0, Instant::now() + 5 * MINUTE);
    while ended < PARTITIONS {
        assert!(Instant::now() < until, "{topic} cannot be read");
        match consumer.poll(Duration::from_millis(200)) {
            Some(Ok(message)) => {
                let key = String::from_utf8_lossy(message.key().unwrap_or_default());
                let at = message.timestamp().to_millis().expect("it was appended");
                times.entry(key.into_owned()).or_default().push(at);
            }
            Some(Err(KafkaError::PartitionEOF(_))) => ended += 1,
            Some(Err(_)) | None => {}
        }
    }
    times
}

/// A thread that watches for events until it is stopped.
pub struct Watcher {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Watcher {
    fn start(watch: impl FnOnce(&AtomicBool) + Send + 'static) -> Watcher {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || watch(&stopped));
        Watcher { stop, thread }
    }

    pub fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the watcher says why it failed");
    }

    /// A Kafka consumer of a whole topic.
    pub fn of_topic(broker: &Broker, topic: &str, times: Arc<Times>) -> Watcher {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", broker.bootstrap())
            .set("group.id", "bench")
            .set("enable.auto.commit", "false")
            .set("socket.nagle.disable", "true")
            .set("fetch.error.backoff.ms", "0")
            .set("log_level", "2")
            .create()
            .expect("a consumer");
        let mut all = TopicPartitionList::new();
        for partition in 0..PARTITIONS {
            all.add_partition_offset(topic, partition, Offset::Beginning)
                .expect("a beginning");
        }
        consumer.assign(&all).expect("an assignment");
        Watcher::start(move |stop| {
            while !stop.load(Ordering::Relaxed) {
                // An error here is a passing one: what was not seen is missed in the end.
                let Some(Ok(message)) = consumer.poll(Duration::from_millis(50)) else {
                    continue;
                };
                match message.key().and_then(serial) {
                    Some(serial) => times.seen(serial),
                    None => times.seen_other(),
                }
            }
        })
    }

    /// A reader of the stream that does nothing with it: the relay's own client, no Kafka.
    pub fn of_slot(rig: &Rig<'_>, slot: &str, times: Arc<Times>) -> Watcher {
        let database =
            config::Database::plain(&rig.host(), rig.db.cluster.port, "postgres", &rig.db.name);
        let slot = slot.to_owned();
        let (tell, told) = std::sync::mpsc::channel();
        let watcher = Watcher::start(move |stop| {
            runtime().block_on(async {
                let mut stream = Slot::connect(&database, "UTF8", Duration::from_secs(15))
                    .await
                    .expect("the database can be reached");
                let started = stream.start_replication(&slot, "walrelay").await;
                started.expect("the slot is there");
                let _ = tell.send(());
                read(&mut stream, &times, stop).await;
            });
        });
        told.recv().expect("the stream starts");
        watcher
    }
}

async fn read(stream: &mut Slot, times: &Times, stop: &AtomicBool) {
    let mut received = Lsn::INVALID;
    let mut told = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        while let Some(frame) = stream.next_frame().expect("whole frames") {
            if let Frame::Copy(body) = frame {
                received = received.max(look_at(body, times));
            }
        }
        if told.elapsed() > Duration::from_secs(1) {
            told = Instant::now();
            let status = StatusUpdate {
                write: received,
                flush: received,
                reply: Reply::NotRequested,
            };
            stream.queue_status(&status.encode(PgTimestamp::default()));
        }
        let turn = stream.turn(Intake::Open);
        if let Ok(turn) = tokio::time::timeout(Duration::from_millis(50), turn).await {
            assert!(matches!(turn, Ok(Turn::Read(_))), "{turn:?}");
        }
    }
}

fn look_at(body: &[u8], times: &Times) -> Lsn {
    match ReplicationMessage::decode(body).expect("a message") {
        ReplicationMessage::Keepalive { wal_end, .. } => wal_end,
        ReplicationMessage::XLogData {
            wal_start, data, ..
        } => {
            if let Ok(Message::Insert { tuple, .. }) = Message::decode(data)
                && let Some(Column::Text(key)) = tuple.columns().nth(3)
            {
                match serial(key) {
                    Some(serial) => times.seen(serial),
                    None => times.seen_other(),
                }
            }
            wal_start
        }
    }
}

/// `k17` is event 17.
fn serial(key: &[u8]) -> Option<usize> {
    std::str::from_utf8(key)
        .ok()?
        .strip_prefix('k')?
        .parse()
        .ok()
}
