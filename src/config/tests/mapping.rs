use super::*;

fn column(args: &[&str], part: Part) -> Option<String> {
    run(args).mapping.columns.get(part).map(str::to_owned)
}

#[test]
fn the_columns_of_our_own_layout_are_the_default() {
    let named = [
        ("event_id", Part::EventId),
        ("aggregate_type", Part::AggregateType),
        ("aggregate_id", Part::AggregateId),
        ("event_type", Part::EventType),
        ("payload", Part::Payload),
        ("headers", Part::Headers),
        ("created_at", Part::CreatedAt),
        ("xid", Part::Xid),
        ("id", Part::Id),
    ];
    for (name, part) in named {
        assert_eq!(column(&[], part).as_deref(), Some(name));
    }
    assert_eq!(column(&[], Part::Timestamp), None);
    assert_eq!(column(&[], Part::Partition), None);
}

#[test]
fn a_column_is_named_in_the_file_the_environment_or_by_a_flag() {
    let file = file(
        "[columns]\nevent_id = \"uid\"\naggregate_id = \"file\"\npayload = \"file\"\nheaders = \"\"",
    );
    let env = around(&[
        (
            "WALRELAY_COLUMNS",
            "aggregate_id=env\r\npayload=env\n\nevent_type = Kind \n",
        ),
        ("WALRELAY_CONFIG", path(&file)),
    ]);
    let config = run_in(&env, &["--column", "payload=flag"]).expect("right");
    let columns = config.mapping.columns;
    assert_eq!(columns.get(Part::EventId), Some("uid"));
    assert_eq!(columns.get(Part::AggregateId), Some("env"));
    assert_eq!(columns.get(Part::Payload), Some("flag"));
    assert_eq!(columns.get(Part::EventType), Some("Kind"));
    assert_eq!(columns.get(Part::Headers), None);
    assert_eq!(columns.get(Part::AggregateType), Some("aggregate_type"));
}

#[test]
fn a_columns_name_is_never_folded_and_unquoted_as_in_sql() {
    let payload = |value: &str| column(&["--column", &format!("payload={value}")], Part::Payload);
    for (written, name) in [
        ("PayLoad", "PayLoad"),
        ("Pay Load", "Pay Load"),
        ("é日本", "é日本"),
        ("\"Pay\"\"Load \"", "Pay\"Load "),
        ("a=b", "a=b"),
    ] {
        assert_eq!(payload(written).as_deref(), Some(name));
    }
    let long = format!("payload={}", "é".repeat(32));
    for (written, words) in [
        ("payload=\"x", "not closed"),
        ("payload=\"x\"y", "after a closing quote"),
        ("payload=\"\"", "empty name"),
        (&long, "63 bytes"),
    ] {
        refused(&["--column", written], &["--column payload", words]);
    }
}

#[test]
fn what_a_table_may_lack_is_left_out_by_an_empty_name() {
    let topic = ["--topic", "events"];
    for name in [
        "aggregate_type",
        "event_type",
        "headers",
        "xid",
        "partition",
    ] {
        let empty = format!("{name}=");
        let args = [&["--column", &empty], &topic[..]].concat();
        let part = Part::parse(name).expect("a part");
        assert_eq!(column(&args, part), None, "{name}");
    }
    for name in ["event_id", "aggregate_id", "payload"] {
        let words = ["no record without", name];
        refused(&["--column", &format!("{name}= ")], &words);
    }
}

#[test]
fn an_unknown_part_is_refused_with_the_nearest() {
    refused(
        &["--column", "event-id=x"],
        &["\"event-id\"", "did you mean event_id?"],
    );
    refused(
        &["--column", "agregate_id=x"],
        &["did you mean aggregate_id?"],
    );
    refused(
        &["--column", "zzz=x"],
        &["\"zzz\"", "event_id, aggregate_type"],
    );
    refused(&["--column", "payload"], &["--column NAME=VALUE"]);
}

#[test]
fn a_topic_over_a_part_that_is_not_there_is_refused() {
    let words = [
        "{aggregate_type}",
        "--topic",
        "--column aggregate_type=COLUMN",
    ];
    refused(&["--column", "aggregate_type="], &words);
    let config = run(&["--column", "aggregate_type=Art"]);
    assert_eq!(config.mapping.topic.columns().collect::<Vec<_>>(), ["Art"]);
}

#[test]
fn exceptions_to_the_topic_may_have_any_name_and_legal_topics() {
    let file = file("[topics]\noutbox.event.t = \"plain\"\n\"outbox.event.a b\" = \"spaced\"");
    let args = [
        "--config",
        path(&file),
        "--topic-for",
        "outbox.event.t=flag",
    ];
    let env = around(&[("WALRELAY_TOPICS", "outbox.event.né=ne")]);
    let topics = run_in(&env, &args).expect("right").mapping.topics;
    let topic = |name: &str| topics.get(name).map(String::as_str);
    assert_eq!(topic("outbox.event.t"), Some("flag"));
    assert_eq!(topic("outbox.event.a b"), Some("spaced"));
    assert_eq!(topic("outbox.event.né"), Some("ne"));
    for topic in ["", "a b", "..", "{x}"] {
        let given = format!("x={topic}");
        refused(&["--topic-for", &given], &["--topic-for x", "249"]);
    }
}

#[test]
fn a_timestamp_comes_from_one_place() {
    assert_eq!(run(&[]).mapping.clock, Clock::Commit);
    let publish = ["--timestamp", "publish"];
    assert_eq!(run(&publish).mapping.clock, Clock::Publish);
    refused(
        &["--timestamp", "created_at"],
        &["commit or publish", "--column timestamp="],
    );
    let both = [&["--column", "timestamp=at"], &publish[..]].concat();
    refused(&both, &["--timestamp", "column at"]);
    let file = file("timestamp = \"commit\"\n[columns]\ntimestamp = \"at\"");
    let args = ["--config", path(&file)];
    refused(&args, &["timestamp in", "column at"]);
    let back = [&args[..], &["--column", "timestamp="]].concat();
    assert_eq!(run(&back).mapping.clock, Clock::Commit);
}

#[test]
fn the_headers_of_the_contract_cannot_be_mapped() {
    for name in ["event_id", "event_type", "aggregate_type"] {
        refused(
            &["--header", &format!("{name}=x")],
            &[name, "cannot be mapped", &format!("--column {name}=COLUMN")],
        );
    }
    refused(&["--header", "x="], &["mapped to no column", "x=COLUMN"]);
    let headers = run(&["--header", "x=\"A\"\"b\""]).mapping.headers;
    assert_eq!(headers, [("x".to_owned(), "A\"b".to_owned())]);
}
