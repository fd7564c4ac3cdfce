use super::*;

fn at(seconds: u64) -> Now {
    Now {
        wall: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + seconds),
        boot: Duration::from_secs(1_000 + seconds),
    }
}

fn committed(seconds: i64) -> PgTimestamp {
    PgTimestamp::from_unix_micros((1_700_000_000 + seconds) * 1_000_000)
}

fn board() -> Board {
    let identity = Identity {
        slot: "s".into(),
        publication: "p".into(),
        table: "public.outbox".into(),
        process_id: "id".into(),
    };
    Board::new(identity, at(0))
}

/// A leader that streams, with everything delivered.
fn well() -> Facts {
    Facts {
        lead: Lead::Leading,
        stream: Stream::Open,
        kafka: Kafka {
            brokers: Some(Brokers {
                known: 1,
                up: 1,
                ..Brokers::default()
            }),
            ..Kafka::default()
        },
        received: Lsn(1000),
        ..Facts::default()
    }
}

fn sample(seconds: u64) -> Sample {
    Sample {
        at: at(seconds).wall,
        wal_end: Lsn(1000),
        wal_end_before: None,
        wal_bytes_per_second: None,
        slot: Some(SlotSample {
            confirmed_flush: Some(Lsn(900)),
            restart: Some(Lsn(500)),
            wal_status: Some("reserved".into()),
            ..SlotSample::default()
        }),
        confirmed_since: at(seconds).wall,
        publication: None,
        leader: None,
        dead_standbys: None,
        oldest_transaction: Held::None,
        prepared_transaction: Held::None,
    }
}

fn turned(facts: Facts, seconds: u64) -> Board {
    let board = board();
    board.sample(sample(seconds));
    board.facts(facts);
    board.turned(at(seconds).boot);
    board
}

fn condition(health: &Health, name: &str) -> Condition {
    let found = health.conditions.iter().find(|c| c.name == name);
    found
        .unwrap_or_else(|| panic!("no condition {name}"))
        .clone()
}

/// The names of those that do not hold.
fn failing(health: &Health) -> Vec<&str> {
    let failing = health.conditions.iter().filter(|c| c.ok == Some(false));
    failing.map(|c| c.name.as_str()).collect()
}

#[test]
fn nothing_is_known_at_the_start_and_that_is_not_ready() {
    let health = board().report(0, at(1));
    assert!(!health.ready && health.live);
    assert_eq!(condition(&health, "database").ok, None);
    assert_eq!(condition(&health, "publication").ok, None);
    assert_eq!(health.progress.lag_bytes, None);
    assert_eq!(health.progress.oldest_undelivered_age_seconds, None);
    assert_eq!(health.leader, "unknown");
}

#[test]
fn a_leader_that_delivers_is_ready() {
    let health = turned(well(), 5).report(7, at(6));
    assert_eq!(failing(&health), Vec::<&str>::new());
    assert!(health.ready, "{health:#?}");
    assert_eq!(health.leader, "leading");
    let numbers = &health.progress;
    assert_eq!(numbers.lag_bytes, Some(100));
    assert_eq!(numbers.retained_bytes, Some(500));
    assert_eq!(numbers.oldest_undelivered_age_seconds, Some(0.0));
    assert_eq!(numbers.delivered_events, 7);
}

#[test]
fn ages_grow_while_the_loop_hangs() {
    let board = turned(
        Facts {
            oldest_undelivered: Some(committed(3)),
            ..well()
        },
        5,
    );
    let age = |seconds| {
        let health = board.report(0, at(seconds));
        health.progress.oldest_undelivered_age_seconds
    };
    assert_eq!((age(6), age(9)), (Some(3.0), Some(6.0)));
    assert!(board.report(0, at(9)).live);
    let hung = board.report(0, at(11));
    assert_eq!(failing(&hung), ["loop"]);
    assert!(!hung.ready && hung.live);
    let dead = board.report(0, at(35));
    assert!(!dead.live);
    assert_eq!(failing(&dead), ["loop", "progress"]);
    // What the database said is too old to speak of now.
    let stale = board.report(0, at(50));
    assert_eq!(condition(&stale, "slot").ok, None);
    assert_eq!(stale.progress.lag_bytes, None);
    assert_eq!(stale.progress.oldest_undelivered_age_seconds, Some(47.0));
}

#[test]
fn an_old_event_is_not_ready_however_well_all_else_is() {
    let facts = Facts {
        oldest_undelivered: Some(committed(0)),
        ..well()
    };
    assert!(turned(facts.clone(), 29).report(0, at(30)).ready);
    let late = turned(facts, 31).report(0, at(32));
    assert_eq!(failing(&late), ["progress"]);
    assert!(condition(&late, "progress").what.contains("32 s old"));
}

#[test]
fn a_position_that_stands_still_is_not_ready() {
    let board = turned(well(), 0);
    for seconds in [10, 20, 30, 40, 50, 60, 70] {
        let mut next = sample(seconds);
        next.wal_end = Lsn(1000 + seconds);
        board.sample(next);
        board.facts(Facts {
            received: Lsn(2000),
            ..well()
        });
        board.turned(at(seconds).boot);
        let health = board.report(0, at(seconds));
        assert_eq!(health.ready, seconds <= 60, "{health:#?}");
        assert!(health.progress.wal_bytes_per_second.is_some());
    }
    let mut moved = sample(80);
    moved.slot = Some(SlotSample {
        confirmed_flush: Some(Lsn(950)),
        ..moved.slot.expect("given")
    });
    board.sample(moved);
    board.turned(at(80).boot);
    assert!(board.report(0, at(80)).ready);
}

#[test]
fn what_was_not_read_yet_makes_the_age_unknown_not_zero() {
    let behind = Facts {
        received: Lsn(10),
        ..well()
    };
    let health = turned(behind, 5).report(0, at(5));
    assert_eq!(health.progress.oldest_undelivered_age_seconds, None);
    assert!(!health.ready);
    let closed = Facts {
        stream: Stream::Closed("refused".into()),
        ..well()
    };
    let health = turned(closed, 5).report(0, at(5));
    assert_eq!(health.progress.oldest_undelivered_age_seconds, None);
    assert_eq!(failing(&health), ["stream"]);
}

#[test]
fn a_standby_is_not_ready_and_says_who_leads() {
    let board = turned(
        Facts {
            lead: Lead::Standby("another instance holds the lock".into()),
            stream: Stream::Opening,
            // Of the time when it led.
            oldest_undelivered: Some(committed(0)),
            ..well()
        },
        5,
    );
    let mut next = sample(5);
    next.leader = Some("pid 77, client 10.0.0.3".into());
    board.sample(next);
    let health = board.report(0, at(5));
    assert_eq!(failing(&health), ["leadership"]);
    let leadership = condition(&health, "leadership");
    assert!(leadership.what.contains("pid 77, client 10.0.0.3 leads"));
    assert_eq!(health.leader, "standby");
    assert_eq!(health.progress.oldest_undelivered_age_seconds, None);
}

#[test]
fn kafka_is_judged_by_what_it_does() {
    let with = |kafka: Kafka| {
        let health = turned(Facts { kafka, ..well() }, 30).report(0, at(30));
        condition(&health, "kafka")
    };
    let trouble = |what: &str| {
        Some(Trouble {
            what: what.into(),
            remedy: "r".into(),
        })
    };
    let up = well().kafka;
    assert_eq!(with(Kafka::default()).ok, None);
    assert_eq!(with(up.clone()).ok, Some(true));
    let down = Kafka {
        brokers: Some(Brokers::default()),
        ..Kafka::default()
    };
    assert_eq!(with(down).ok, Some(false));
    let silent = |since| Kafka {
        silent_since: Some(at(since).wall),
        ..up.clone()
    };
    assert_eq!(with(silent(25)).ok, Some(true));
    assert!(with(silent(18)).what.contains("nothing for 12 s"));
    let refused = Kafka {
        refused: trouble("refused"),
        trouble: trouble("complains"),
        ..up.clone()
    };
    assert_eq!(with(refused).what, "refused");
    let complains = Kafka {
        trouble: trouble("complains"),
        ..up
    };
    assert_eq!(with(complains).what, "complains");
}

#[test]
fn a_missing_topic_is_named_with_what_waits_for_it() {
    let waiting = |topic: &str, unanswered: Option<&str>| Waiting {
        topic: topic.into(),
        unanswered: unanswered.map(str::to_owned),
        denied: None,
        events: 3,
        first_event_id: "id-1".into(),
    };
    let facts = Facts {
        topics: vec![waiting("a", Some("timed out")), waiting("b", None)],
        ..well()
    };
    let health = turned(facts, 5).report(0, at(5));
    let topics = condition(&health, "topics");
    assert_eq!(
        topics.what,
        "topic b does not exist: 3 events wait, the first is id-1; events also wait for a"
    );
    assert!(topics.remedy.expect("a remedy").contains("--create-topics"));

    let mut denied = waiting("b", None);
    denied.denied = Some(Trouble {
        what: "not for us".into(),
        remedy: "grant it".into(),
    });
    let facts = Facts {
        topics: vec![waiting("a", Some("timed out")), denied],
        ..well()
    };
    let topics = condition(&turned(facts, 5).report(0, at(5)), "topics");
    assert!(
        topics.what.starts_with("not for us: 3 events wait"),
        "{topics:?}"
    );
    assert_eq!(topics.remedy.as_deref(), Some("grant it"));
}

#[test]
fn a_slot_that_is_lost_or_nearly_is_not_ready() {
    let with = |slot: Option<SlotSample>| {
        let board = turned(well(), 5);
        board.sample(Sample { slot, ..sample(6) });
        condition(&board.report(0, at(6)), "slot")
    };
    let status = |status: &str| {
        with(Some(SlotSample {
            wal_status: Some(status.into()),
            ..sample(0).slot.expect("given")
        }))
    };
    assert_eq!(status("reserved").ok, Some(true));
    assert_eq!(status("extended").ok, Some(true));
    assert_eq!(status("unreserved").ok, Some(false));
    assert!(status("lost").what.contains("slot s is lost"));
    assert!(with(None).what.contains("slot s is gone"));
}

#[test]
fn whoever_holds_restart_lsn_back_is_named() {
    let board = turned(well(), 5);
    let mut held = sample(6);
    held.prepared_transaction = Held::By {
        who: "prepared transaction 'forgotten'".into(),
        age: Duration::from_secs(3600),
    };
    board.sample(held);
    let health = board.report(0, at(8));
    let slot = condition(&health, "slot");
    assert!(slot.what.contains("'forgotten' (age 3600 s)"), "{slot:?}");
    assert_eq!(
        health.progress.prepared_transaction_age_seconds,
        Some(3602.0)
    );
}

#[test]
fn since_is_when_it_changed() {
    let board = turned(well(), 5);
    let first = board.report(0, at(5));
    assert!(first.ready);
    assert_eq!(first.since, rfc3339(at(5).wall));
    let later = board.report(0, at(8));
    assert_eq!(later.since, first.since);
    board.facts(Facts {
        stream: Stream::WaitsForKafka,
        ..well()
    });
    board.turned(at(9).boot);
    // Nobody asks, and the loop has looked.
    assert!(board.look(at(9)).is_empty());
    let stuck = board.report(0, at(20));
    assert_eq!(stuck.since, rfc3339(at(9).wall));
    assert_eq!(condition(&stuck, "stream").since, rfc3339(at(9).wall));
    assert_eq!(condition(&stuck, "database").since, first.since);
}

#[test]
fn a_lasting_condition_is_said_once_a_minute_and_its_end_once() {
    let board = turned(well(), 5);
    assert_eq!(board.look(at(5)), []);
    let lost = |seconds| {
        board.sample(Sample {
            slot: None,
            ..sample(seconds)
        });
    };
    lost(6);
    let said = board.look(at(6));
    assert_eq!((said.len(), said[0].name, said[0].ok), (1, "slot", false));
    assert!(said[0].remedy.is_some());
    assert_eq!(board.look(at(7)), []);
    lost(66);
    assert_eq!(board.look(at(66)).len(), 1);
    board.sample(sample(67));
    let said = board.look(at(67));
    assert_eq!((said.len(), said[0].ok), (1, true));
    assert_eq!(board.look(at(68)), []);
}

#[test]
fn an_end_is_not_ready() {
    let facts = Facts {
        ending: Some(Trouble {
            what: "draining: asked to stop".into(),
            remedy: "r".into(),
        }),
        ..well()
    };
    assert_eq!(failing(&turned(facts, 5).report(0, at(5))), ["running"]);
}

#[test]
fn the_body_is_read_back_as_it_was_written() {
    let health = turned(well(), 5).report(7, at(6));
    let text = serde_json::to_string(&health).expect("plain data");
    let read: Health = serde_json::from_str(&text).expect("its own words");
    assert_eq!(read, health);
}
