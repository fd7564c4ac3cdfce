//! The publisher against the simulated cluster: the reflex, the rebuild, the accounts of tickets.
//! What Kafka itself guarantees is tested on a real one, elsewhere.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::future::Future;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::*;
use crate::config::{CreateTopics, Kafka};
use crate::error::kafka as codes;
use crate::finding::State;
use crate::record::{Header, Record, Report, Ticket, TopicState};

const TOPIC: &str = "outbox.event.order";
const PRODUCE: RDKafkaApiKey = RDKafkaApiKey::Produce;

fn on_one_thread<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(async {
            tokio::time::timeout(Duration::from_secs(30), test)
                .await
                .expect("the test ends within its time")
        })
}

fn mock_settings() -> Settings {
    let kafka = Kafka {
        brokers: "mock".into(),
        properties: Vec::new(),
        token_command: None,
        create_topics: None,
    };
    let settings = Settings::new(&kafka, "test").expect("the simulated cluster starts");
    let mock = settings.mock().expect("it was asked for");
    mock.create_topic(TOPIC).expect("made");
    settings
}

fn record(partition: i32, value: &str) -> Record<'_> {
    Record {
        topic: Cow::Borrowed(TOPIC),
        partition,
        key: Cow::Borrowed(b"key"),
        value: Some(Cow::Borrowed(value.as_bytes())),
        timestamp_ms: Some(1_700_000_000_000),
        headers: Vec::new(),
    }
}

/// Waits and drains until nothing is in flight.
async fn settle(publisher: &mut Publisher) -> Vec<Report> {
    let mut reports = Vec::new();
    while publisher.in_flight() > 0 {
        publisher.woken().await;
        publisher.drain(&mut reports);
    }
    reports
}

/// Turns a rebuild to its end; gives what was reported meanwhile.
async fn rebuild(publisher: &mut Publisher) -> (Rebuilt, Vec<Report>) {
    let start = Instant::now();
    let mut reports = Vec::new();
    loop {
        publisher.drain(&mut reports);
        if let Some(rebuilt) = publisher.rebuild_turn(start.elapsed()) {
            return (rebuilt, reports);
        }
        // A turn is due each second or so; shorter here, for the test's sake.
        let _ = tokio::time::timeout(Duration::from_millis(200), publisher.woken()).await;
    }
}

fn by_ticket(reports: &[Report]) -> BTreeMap<Ticket, Result<(), KafkaCode>> {
    let map: BTreeMap<_, _> = reports.iter().map(|r| (r.ticket, r.result)).collect();
    assert_eq!(map.len(), reports.len(), "no ticket is reported twice");
    map
}

/// Everything that a partition holds, in order.
fn read_back(settings: &Settings, partition: i32, count: usize) -> Vec<String> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", settings.bootstrap())
        .set("group.id", "test")
        .create()
        .expect("a consumer");
    let mut from = TopicPartitionList::new();
    from.add_partition_offset(TOPIC, partition, Offset::Beginning)
        .expect("an offset");
    consumer.assign(&from).expect("assigned");
    let mut found = Vec::new();
    while found.len() < count {
        let message = consumer
            .poll(Duration::from_secs(10))
            .expect("there is another record")
            .expect("and it can be read");
        found.push(String::from_utf8_lossy(message.payload().unwrap_or_default()).into_owned());
    }
    assert!(consumer.poll(Duration::from_millis(200)).is_none());
    found
}

#[test]
fn every_ticket_is_reported_exactly_once() {
    on_one_thread(async {
        let settings = mock_settings();
        let mut publisher = Publisher::new(&settings).expect("made");
        for n in 0..5_000 {
            publisher.send(
                &record(n % 12, "value"),
                Ticket(usize::try_from(n).expect("small")),
            );
        }
        assert_eq!(publisher.in_flight(), 5_000);
        let reports = by_ticket(&settle(&mut publisher).await);
        assert_eq!(reports.len(), 5_000);
        assert!(reports.values().all(Result::is_ok));

        // And through a rebuild with everything still on its way.
        for n in 5_000..8_000 {
            publisher.send(
                &record(n % 12, "value"),
                Ticket(usize::try_from(n).expect("small")),
            );
        }
        publisher.start_rebuild();
        publisher.send(&record(0, "late"), Ticket(8_000));
        let (_, reports) = rebuild(&mut publisher).await;
        let reports = by_ticket(&reports);
        assert_eq!(reports.len(), 3_001);
        assert_eq!(reports[&Ticket(8_000)], Err(codes::PURGE_QUEUE));
        assert_eq!(publisher.in_flight(), 0);

        publisher.send(&record(0, "after"), Ticket(9_000));
        let reports = settle(&mut publisher).await;
        assert_eq!(reports.len(), 1);
        assert_eq!(reports[0].result, Ok(()));
    });
}

#[test]
fn a_refused_batch_stops_all_sending_until_rebuilt() {
    on_one_thread(async {
        let settings = mock_settings();
        let mut publisher = Publisher::new(&settings).expect("made");
        publisher.send(&record(3, "first"), Ticket(0));
        assert_eq!(settle(&mut publisher).await[0].result, Ok(()));

        settings
            .mock()
            .expect("mock")
            .cluster()
            .request_errors(PRODUCE, &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_RECORD]);
        publisher.send(&record(3, "refused"), Ticket(1));
        let reports = settle(&mut publisher).await;
        assert_eq!(reports[0].result, Err(KafkaCode(87)));

        // Neither this partition nor another: the broker would take both.
        publisher.send(&record(3, "behind"), Ticket(2));
        publisher.send(&record(4, "elsewhere"), Ticket(3));
        let reports = by_ticket(&settle(&mut publisher).await);
        assert_eq!(reports[&Ticket(2)], Err(codes::PURGE_QUEUE));
        assert_eq!(reports[&Ticket(3)], Err(codes::PURGE_QUEUE));

        publisher.start_rebuild();
        let (rebuilt, reports) = rebuild(&mut publisher).await;
        assert_eq!((rebuilt.late, reports.len()), (false, 0));
        for (ticket, value) in [(1, "refused"), (2, "behind")] {
            publisher.send(&record(3, value), Ticket(ticket));
        }
        assert!(
            settle(&mut publisher)
                .await
                .iter()
                .all(|r| r.result.is_ok())
        );
        assert_eq!(read_back(&settings, 3, 3), ["first", "refused", "behind"]);
    });
}

#[test]
fn a_bad_report_that_nobody_drained_yet_stops_the_next_send() {
    on_one_thread(async {
        let settings = mock_settings();
        let mut publisher = Publisher::new(&settings).expect("made");
        settings
            .mock()
            .expect("mock")
            .cluster()
            .request_errors(PRODUCE, &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_RECORD]);
        publisher.send(&record(0, "refused"), Ticket(0));
        // The wake-up may be for a log line; the report's own is the one that counts.
        while !publisher.holds_a_bad_report() {
            publisher.woken().await;
        }
        publisher.send(&record(0, "behind"), Ticket(1));
        let reports = by_ticket(&settle(&mut publisher).await);
        assert_eq!(reports[&Ticket(0)], Err(KafkaCode(87)));
        assert_eq!(reports[&Ticket(1)], Err(codes::PURGE_QUEUE));
    });
}

#[test]
fn a_refused_send_is_a_report_and_stops_the_rest() {
    on_one_thread(async {
        let settings = mock_settings();
        let mut publisher = Publisher::new(&settings).expect("made");
        let mut unsendable = record(0, "x");
        unsendable.topic = Cow::Borrowed("nul\0inside");
        publisher.send(&unsendable, Ticket(0));
        publisher.send(&record(0, "behind"), Ticket(1));
        let reports = by_ticket(&settle(&mut publisher).await);
        assert_eq!(reports[&Ticket(0)], Err(KafkaCode(17)));
        assert_eq!(reports[&Ticket(1)], Err(codes::PURGE_QUEUE));

        publisher.start_rebuild();
        rebuild(&mut publisher).await;
        let huge = "x".repeat(MESSAGE_BYTES_MAX + 1);
        publisher.send(&record(0, &huge), Ticket(2));
        assert_eq!(
            settle(&mut publisher).await[0].result,
            Err(codes::MSG_SIZE_TOO_LARGE)
        );
    });
}

#[test]
fn an_outage_fails_nothing_and_a_rebuild_in_it_is_late() {
    on_one_thread(async {
        let settings = mock_settings();
        let mut publisher = Publisher::new(&settings).expect("made");
        publisher.send(&record(0, "before"), Ticket(0));
        settle(&mut publisher).await;

        settings.mock().expect("mock").fail();
        publisher.send(&record(0, "during"), Ticket(1));
        let mut reports = Vec::new();
        let mut notices = Vec::new();
        while notices.is_empty() {
            publisher.woken().await;
            publisher.drain(&mut reports);
            notices = publisher.client_notices();
        }
        assert!(reports.is_empty());
        settings.mock().expect("mock").recover();
        let reports = settle(&mut publisher).await;
        assert_eq!(reports[0].result, Ok(()));

        // The broker takes its time over the answer, and nobody waits for it.
        let cluster = settings.mock().expect("mock").cluster();
        cluster
            .broker_round_trip_time(-1, Duration::from_secs(20))
            .expect("slowed");
        publisher.send(&record(0, "unheard"), Ticket(2));
        let sent = Instant::now();
        while sent.elapsed() < Duration::from_millis(300) {
            let _ = tokio::time::timeout(Duration::from_millis(50), publisher.woken()).await;
        }
        publisher.forget_all();
        let (rebuilt, reports) = rebuild(&mut publisher).await;
        assert_eq!(reports.len(), 1);
        assert_eq!(reports[0].result, Err(codes::PURGE_INFLIGHT));
        assert!(rebuilt.late);
        assert!(sent.elapsed() < Duration::from_secs(2));
    });
}

#[test]
fn a_rebuild_hears_out_a_slow_broker() {
    on_one_thread(async {
        let settings = mock_settings();
        let mut publisher = Publisher::new(&settings).expect("made");
        publisher.send(&record(0, "before"), Ticket(0));
        settle(&mut publisher).await;
        let cluster = settings.mock().expect("mock").cluster();
        cluster
            .broker_round_trip_time(-1, Duration::from_millis(400))
            .expect("slowed");
        publisher.send(&record(0, "heard"), Ticket(1));
        let _ = tokio::time::timeout(Duration::from_millis(200), async {
            loop {
                publisher.woken().await;
            }
        })
        .await;
        publisher.start_rebuild();
        let (rebuilt, reports) = rebuild(&mut publisher).await;
        assert_eq!((reports[0].result, rebuilt.late), (Ok(()), false));
    });
}

#[test]
fn a_rebuild_hears_a_silent_broker_out_for_two_seconds_only() {
    on_one_thread(async {
        let settings = mock_settings();
        let mut publisher = Publisher::new(&settings).expect("made");
        publisher.send(&record(0, "before"), Ticket(0));
        settle(&mut publisher).await;
        let cluster = settings.mock().expect("mock").cluster();
        cluster
            .broker_round_trip_time(-1, Duration::from_secs(20))
            .expect("slowed");
        publisher.send(&record(0, "unheard"), Ticket(1));
        let _ = tokio::time::timeout(Duration::from_millis(200), settle(&mut publisher)).await;

        publisher.start_rebuild();
        let from = Duration::from_secs(1_000);
        for millis in [0, 1_000, 1_999] {
            let turn = publisher.rebuild_turn(from + Duration::from_millis(millis));
            assert_eq!((turn, publisher.in_flight()), (None, 1));
        }
        assert_eq!(publisher.rebuild_turn(from + Duration::from_secs(2)), None);
        let reports = settle(&mut publisher).await;
        assert_eq!(reports[0].result, Err(codes::PURGE_INFLIGHT));
        let turn = publisher.rebuild_turn(from + Duration::from_secs(2));
        assert_eq!(turn, Some(Rebuilt { late: true }));
    });
}

#[test]
fn a_record_arrives_as_it_was_given() {
    on_one_thread(async {
        let settings = mock_settings();
        let mut publisher = Publisher::new(&settings).expect("made");
        let header = |name: &'static str, value: Option<&'static [u8]>| Header {
            name: Cow::Borrowed(name),
            value: value.map(Cow::Borrowed),
        };
        let mut tombstone = record(7, "");
        tombstone.value = None;
        tombstone.headers = vec![
            header("event_id", Some(b"42")),
            header("nothing", None),
            header("empty", Some(b"")),
        ];
        let mut empty = record(7, "");
        empty.key = Cow::Borrowed(b"");
        publisher.send(&tombstone, Ticket(0));
        publisher.send(&empty, Ticket(1));
        assert!(
            settle(&mut publisher)
                .await
                .iter()
                .all(|r| r.result.is_ok())
        );

        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", settings.bootstrap())
            .set("group.id", "test")
            .create()
            .expect("a consumer");
        let mut from = TopicPartitionList::new();
        from.add_partition_offset(TOPIC, 7, Offset::Beginning)
            .expect("an offset");
        consumer.assign(&from).expect("assigned");
        let next = || {
            let message = consumer.poll(Duration::from_secs(10)).expect("a record");
            message.expect("that can be read").detach()
        };
        let first = next();
        assert_eq!(first.payload(), None);
        assert_eq!(first.key(), Some(&b"key"[..]));
        assert_eq!(first.timestamp().to_millis(), Some(1_700_000_000_000));
        let headers = first.headers().expect("headers");
        let got: Vec<_> = headers.iter().map(|h| (h.key, h.value)).collect();
        assert_eq!(
            got,
            [
                ("event_id", Some(&b"42"[..])),
                ("nothing", None),
                ("empty", Some(&b""[..]))
            ]
        );
        let second = next();
        assert_eq!(second.payload(), Some(&b""[..]));
        assert_eq!(second.key(), Some(&b""[..]));
    });
}

#[test]
fn a_topic_is_present_or_absent_and_never_made_by_asking() {
    on_one_thread(async {
        let settings = mock_settings();
        let present = TopicState::Present {
            partitions: 12,
            max_message_bytes: None,
        };
        assert_eq!(lookup_topic(&settings, TOPIC).await, present);
        for _ in 0..2 {
            assert_eq!(lookup_topic(&settings, "typo").await, TopicState::Absent);
        }
        let how = CreateTopics {
            partitions: 12,
            replication: None,
        };
        for _ in 0..2 {
            assert_eq!(create_topic(&settings, "typo", how).await, Ok(()));
        }
        assert_eq!(lookup_topic(&settings, "typo").await, present);
    });
}

#[test]
fn a_question_without_an_answer_says_why() {
    on_one_thread(async {
        let kafka = Kafka {
            brokers: "no-such-host.invalid:9092".into(),
            properties: Vec::new(),
            token_command: None,
            create_topics: None,
        };
        let settings = Settings::new(&kafka, "test").expect("nothing is contacted");
        let TopicState::Unknown(words) = lookup_topic(&settings, TOPIC).await else {
            panic!("nobody can have answered");
        };
        assert!(words.contains("no-such-host.invalid"), "{words}");
    });
}

#[test]
fn the_demo_broker_is_said_to_be_simulated() {
    on_one_thread(async {
        let settings = mock_settings();
        let topics = ["typo".to_owned()];
        let findings = look(&settings, &topics, None, Duration::from_secs(1)).await;
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].state, State::Ok);
        assert!(findings[0].found.contains("simulated"));
    });
}
