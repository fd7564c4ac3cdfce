//! What the pure parts cost: decode, row to record, ledger, partition; and the whole machine from
//! frames to records with nobody behind it.
//!
//! `cargo bench --bench cores`

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use walrelay::lsn::{Lsn, PgTimestamp, Triple, Xid};
use walrelay::record::{Record, Report, Size, Ticket, TopicState};
use walrelay::relay::intake::Outlet;
use walrelay::relay::ledger::{Ledger, Take};
use walrelay::relay::machine::Machine;
use walrelay::relay::mapping::{Mapping, Part};
use walrelay::relay::orders::{Led, OnPoison, Opened, Order, Seek, Settings};
use walrelay::relay::outbox::{Domains, Row, Shape};
use walrelay::relay::route::{Template, murmur2};
use walrelay::wire::pgoutput::Message;

const ROWS_A_TRANSACTION: u64 = 100;
const TRANSACTIONS: u64 = 20;
const TABLE_OID: u32 = 16_385;
const EVENT_ID: &str = "3f0e7a54-1c52-4d5e-9d7a-6a3d1f1c9b1e";

criterion_group!(benches, decode, row, ledger, partition, pipeline);
criterion_main!(benches);

/// Everything that can be mapped, on the same table: a timestamp, two headers, exceptions.
fn full_mapping() -> Mapping {
    let mut mapping = Mapping::default();
    mapping
        .columns
        .set(Part::Timestamp, "created_at".to_owned());
    mapping.columns.set(Part::Partition, "id".to_owned());
    mapping.headers = ["xid", "created_at"]
        .map(|c| (c.to_owned(), c.to_owned()))
        .into();
    let template = Template::parse("outbox.{aggregate_type}.{event_type}").expect("a template");
    mapping.set_topic(template).expect("all parts have columns");
    for n in 0..20 {
        mapping
            .topics
            .insert(format!("outbox.t.{n}"), format!("other.{n}"));
    }
    mapping
}

fn payload() -> String {
    format!(r#"{{"data": "{}", "state": "placed"}}"#, "0f".repeat(240))
}

// ---- bytes as a server sends them ---------------------------------------------------------------

fn relation() -> Vec<u8> {
    let columns = [
        ("id", 20),
        ("event_id", 2950),
        ("aggregate_type", 25),
        ("aggregate_id", 25),
        ("event_type", 25),
        ("payload", 3802),
        ("headers", 3802),
        ("created_at", 1184),
        ("xid", 5069),
    ];
    let mut bytes = vec![b'R'];
    bytes.extend(TABLE_OID.to_be_bytes());
    bytes.extend(b"public\0outbox\0d");
    bytes.extend(9u16.to_be_bytes());
    for (name, oid) in columns {
        bytes.push(0);
        bytes.extend(name.as_bytes());
        bytes.push(0);
        bytes.extend(u32::to_be_bytes(oid));
        bytes.extend((-1i32).to_be_bytes());
    }
    bytes
}

fn insert(serial: u64) -> Vec<u8> {
    let key = format!("order-{}", serial % 20_011);
    let payload = payload();
    let columns = [
        "1234567",
        EVENT_ID,
        "t",
        &key,
        "placed",
        &payload,
        "{}",
        "2026-01-01 00:00:00.123456+00",
        "98765",
    ];
    let mut bytes = vec![b'I'];
    bytes.extend(TABLE_OID.to_be_bytes());
    bytes.push(b'N');
    bytes.extend(9u16.to_be_bytes());
    for column in columns {
        bytes.push(b't');
        let length = u32::try_from(column.len()).expect("short");
        bytes.extend(length.to_be_bytes());
        bytes.extend(column.as_bytes());
    }
    bytes
}

fn triple(number: u64) -> Triple {
    Triple {
        commit_lsn: Lsn(1_000_000 + number * 100_000),
        xid: Xid(u32::try_from(number % 1_000_000).expect("small") + 3),
        commit_time: PgTimestamp(800_000_000_000_000),
    }
}

fn end_lsn(number: u64) -> Lsn {
    Lsn(triple(number).commit_lsn.0 + 48)
}

fn begin(number: u64) -> Vec<u8> {
    let triple = triple(number);
    let mut bytes = vec![b'B'];
    bytes.extend(triple.commit_lsn.0.to_be_bytes());
    bytes.extend(triple.commit_time.0.to_be_bytes());
    bytes.extend(triple.xid.0.to_be_bytes());
    bytes
}

fn commit(number: u64) -> Vec<u8> {
    let triple = triple(number);
    let mut bytes = vec![b'C', 0];
    bytes.extend(triple.commit_lsn.0.to_be_bytes());
    bytes.extend(end_lsn(number).0.to_be_bytes());
    bytes.extend(triple.commit_time.0.to_be_bytes());
    bytes
}

/// The body of a CopyData frame.
fn xlog_data(lsn: Lsn, message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![b'w'];
    bytes.extend(lsn.0.to_be_bytes());
    bytes.extend(lsn.0.to_be_bytes());
    bytes.extend(800_000_000_001_000_i64.to_be_bytes());
    bytes.extend(message);
    bytes
}

// ---- the parts ----------------------------------------------------------------------------------

fn decode(c: &mut Criterion) {
    let insert = insert(7);
    let mut group = c.benchmark_group("decode");
    group.throughput(Throughput::Elements(1));
    group.bench_function("insert", |b| {
        b.iter(|| black_box(Message::decode(black_box(&insert))).is_ok());
    });
    group.finish();
}

fn row(c: &mut Criterion) {
    let (relation, insert) = (relation(), insert(7));
    let Ok(Message::Relation(relation)) = Message::decode(&relation) else {
        panic!("a Relation message");
    };
    let Ok(Message::Insert { tuple, .. }) = Message::decode(&insert) else {
        panic!("an Insert message");
    };
    let mut group = c.benchmark_group("row");
    group.throughput(Throughput::Elements(1));
    for (name, mapping) in [
        ("to record", Mapping::default()),
        ("to record, all mapped", full_mapping()),
    ] {
        let shape = Shape::resolve(&relation, &mapping, &Domains::default())
            .expect("every column is there");
        let mut topic = String::new();
        group.bench_function(name, |b| {
            b.iter(|| {
                let row = Row::read(black_box(&tuple));
                let draft = row.draft(&shape, &mapping, &mut topic);
                black_box(draft).is_ok()
            });
        });
    }
    group.finish();
}

fn ledger(c: &mut Criterion) {
    let mut group = c.benchmark_group("ledger");
    for rows in [1, ROWS_A_TRANSACTION] {
        group.throughput(Throughput::Elements(rows));
        let mut ledger = Ledger::default();
        ledger.session_started(Lsn(1));
        const SIZE: Size = Size {
            footprint: 700,
            content: 300,
        };
        let mut number = 0;
        group.bench_function(format!("take and deliver, {rows} rows"), |b| {
            b.iter(|| {
                number += 1;
                ledger.begin(triple(number));
                let mut tickets = Vec::with_capacity(100);
                for _ in 0..rows {
                    if let Ok(Take::New(ticket)) = ledger.insert(EVENT_ID.as_bytes()) {
                        ledger.sent(ticket, 0, SIZE);
                        tickets.push(ticket);
                    }
                }
                ledger.commit(end_lsn(number)).expect("it is new");
                for ticket in tickets {
                    ledger.delivered(ticket);
                }
                ledger.settle();
                assert_eq!(ledger.flush(), end_lsn(number));
            });
        });
    }
    group.finish();
}

fn partition(c: &mut Criterion) {
    let mut group = c.benchmark_group("murmur2");
    for key in ["order-12345", EVENT_ID] {
        group.bench_function(format!("{} bytes", key.len()), |b| {
            b.iter(|| murmur2(black_box(key.as_bytes())));
        });
    }
    group.finish();
}

// ---- the whole machine --------------------------------------------------------------------------

/// Kafka, as fast as can be: everything is delivered when it is next asked.
#[derive(Default)]
struct Nobody {
    reports: Vec<Report>,
}

impl Outlet for Nobody {
    fn send(&mut self, record: &Record<'_>, ticket: Ticket) {
        black_box(record);
        self.reports.push(Report {
            ticket,
            result: Ok(()),
        });
    }
}

/// A machine that leads and has the stream, its topic known.
fn streaming(nobody: &mut Nobody) -> Machine {
    let settings = Settings {
        mapping: Mapping::default(),
        on_poison: OnPoison::Park,
        on_gap: None,
        topic_grace: Duration::from_secs(300),
        in_flight_events_max: 10_000,
        in_flight_bytes_max: 64 << 20,
        span_events_max: 100_000,
        stall_timeout: Duration::from_secs(20),
        shutdown_timeout: Duration::from_secs(30),
        wal_sender_timeout: Duration::from_secs(15),
    };
    let now = Duration::from_secs(1);
    let mut machine = Machine::new(settings, now);
    let led = Led {
        table_oid: TABLE_OID,
        generation: 1,
        is_writable: true,
        consistent_point: Some(Lsn(1)),
        ..Led::default()
    };
    machine.advance(now);
    machine.on_seek(Seek::Led(led), now);
    let opened = Opened {
        system_identifier: "1".to_owned(),
        timeline: 1,
        xlogpos: Lsn(1_000),
        confirmed_flush: Lsn(1),
        unfit: None,
        heals: None,
    };
    machine.on_opened(&opened, now);
    let relation = xlog_data(Lsn(0), &relation());
    machine.on_copy_data(&relation, now, nobody);
    // The first event asks for its topic.
    for body in transaction(0, 1) {
        machine.on_copy_data(&body, now, nobody);
    }
    let present = TopicState::Present {
        partitions: 12,
        max_message_bytes: None,
    };
    machine.on_topic("outbox.event.t", &present, now);
    while let Some(order) = machine.poll_order() {
        if let Order::Send(ticket, record) = order {
            nobody.send(&record, ticket);
        }
    }
    machine.on_reports(&nobody.reports, now);
    nobody.reports.clear();
    assert!(machine.wants_wal(), "{:?}", machine.standing(now));
    machine
}

fn transaction(number: u64, rows: u64) -> Vec<Vec<u8>> {
    let lsn = triple(number).commit_lsn;
    let mut bodies = vec![xlog_data(lsn, &begin(number))];
    bodies.extend((0..rows).map(|row| xlog_data(lsn, &insert(number * rows + row))));
    bodies.push(xlog_data(end_lsn(number), &commit(number)));
    bodies
}

fn pipeline(c: &mut Criterion) {
    let mut group = c.benchmark_group("pipeline");
    for rows in [1, ROWS_A_TRANSACTION] {
        let transactions = TRANSACTIONS * ROWS_A_TRANSACTION / rows;
        group.throughput(Throughput::Elements(transactions * rows));
        group.bench_function(format!("frames to records, {rows} rows"), |b| {
            b.iter_batched_ref(
                || {
                    let mut nobody = Nobody::default();
                    let machine = streaming(&mut nobody);
                    let all = 1..=transactions;
                    let bodies: Vec<_> = all.flat_map(|n| transaction(n, rows)).collect();
                    (machine, nobody, bodies)
                },
                |(machine, nobody, bodies)| run(machine, nobody, bodies),
                criterion::BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

/// What the service does, without its sockets.
fn run(machine: &mut Machine, nobody: &mut Nobody, bodies: &[Vec<u8>]) {
    const BURST: usize = 256;
    let now = Duration::from_secs(1);
    for burst in bodies.chunks(BURST) {
        machine.turned(now);
        for body in burst {
            machine.on_copy_data(body, now, nobody);
        }
        machine.on_reports(&nobody.reports, now);
        nobody.reports.clear();
        machine.advance(now);
        while let Some(order) = machine.poll_order() {
            black_box(order);
        }
        black_box(machine.take_deliveries());
    }
    assert_eq!(machine.standing(now).span, 0, "all is delivered");
}
