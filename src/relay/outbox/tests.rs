use super::*;
use crate::relay::route::Template;
use crate::wire::pgoutput::Message;

fn relation_bytes(columns: &[(&str, u32)]) -> Vec<u8> {
    let mut bytes = vec![b'R'];
    bytes.extend(7u32.to_be_bytes());
    bytes.extend(b"s\0t\0d");
    bytes.extend(u16::try_from(columns.len()).expect("few").to_be_bytes());
    for (name, oid) in columns {
        bytes.push(0);
        bytes.extend(name.as_bytes());
        bytes.push(0);
        bytes.extend(oid.to_be_bytes());
        bytes.extend((-1i32).to_be_bytes());
    }
    bytes
}

fn insert_bytes(values: &[Option<&[u8]>]) -> Vec<u8> {
    let mut bytes = vec![b'I'];
    bytes.extend(7u32.to_be_bytes());
    bytes.push(b'N');
    bytes.extend(u16::try_from(values.len()).expect("few").to_be_bytes());
    for value in values {
        match value {
            None => bytes.push(b'n'),
            Some(value) => {
                bytes.push(b't');
                bytes.extend(u32::try_from(value.len()).expect("short").to_be_bytes());
                bytes.extend(*value);
            }
        }
    }
    bytes
}

fn shape(columns: &[(&str, u32)], mapping: &Mapping, domains: &Domains) -> Result<Shape, Unmapped> {
    let bytes = relation_bytes(columns);
    let Ok(Message::Relation(relation)) = Message::decode(&bytes) else {
        panic!("a Relation message");
    };
    Shape::resolve(&relation, mapping, domains)
}

/// What a draft says, owned.
#[derive(Debug, PartialEq)]
struct Seen {
    topic: String,
    key: Vec<u8>,
    value: Option<Vec<u8>>,
    stamp: Stamp,
    partition: Option<i64>,
    headers: Vec<(String, Option<String>)>,
    key_hash: u64,
}

fn draft(shape: &Shape, mapping: &Mapping, values: &[Option<&[u8]>]) -> Result<Seen, String> {
    let bytes = insert_bytes(values);
    let Ok(Message::Insert { tuple, .. }) = Message::decode(&bytes) else {
        panic!("an Insert message");
    };
    let mut topic = String::new();
    let draft = Row::read(&tuple)
        .draft(shape, mapping, &mut topic)
        .map_err(|bad| bad.reason)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Seen {
        topic,
        key: draft.key.into_owned(),
        value: draft.value.map(Cow::into_owned),
        stamp: draft.stamp,
        partition: draft.partition,
        headers: draft
            .headers
            .iter()
            .map(|h| (h.name.clone().into_owned(), h.value.as_deref().map(text)))
            .collect(),
        key_hash: draft.key_hash,
    })
}

fn mapped(columns: &[(Part, &str)]) -> Mapping {
    let mut mapping = Mapping::default();
    for (part, column) in columns {
        if column.is_empty() {
            mapping.columns.unset(*part);
        } else {
            mapping.columns.set(*part, (*column).to_owned());
        }
    }
    mapping.topic = Template::parse("events").expect("a template");
    mapping
}

const TEXT: u32 = 25;
const BARE: [(Part, &str); 6] = [
    (Part::EventId, "uid"),
    (Part::AggregateId, "Key"),
    (Part::Payload, "本"),
    (Part::AggregateType, ""),
    (Part::EventType, ""),
    (Part::Headers, ""),
];

#[test]
fn a_table_needs_no_more_than_id_key_and_payload() {
    let mapping = mapped(&BARE);
    let columns = [("本", TEXT), ("x", TEXT), ("Key", TEXT), ("uid", 2950)];
    let shape = shape(&columns, &mapping, &Domains::default()).expect("all are there");
    let values = [Some(&b"{}"[..]), None, Some(b"k"), Some(b"1")];
    let seen = draft(&shape, &mapping, &values).expect("a record");
    assert_eq!(seen.topic, "events");
    assert_eq!(
        (&seen.key[..], seen.value.as_deref()),
        (&b"k"[..], Some(&b"{}"[..]))
    );
    assert_eq!(
        seen.headers,
        [("event_id".to_owned(), Some("1".to_owned()))]
    );
    assert_eq!(seen.stamp, Stamp::Clock(Clock::Commit));
    let error = draft(&shape, &mapping, &[None, None, None, Some(b"1")]);
    assert_eq!(error, Err("column Key is null".to_owned()));
}

#[test]
fn a_missing_column_is_named_with_the_setting_that_names_it() {
    let mut mapping = mapped(&BARE);
    mapping.headers = vec![("h".to_owned(), "tenant".to_owned())];
    let lacks = |left_out: &str| {
        let all = [("uid", TEXT), ("Key", TEXT), ("本", TEXT), ("tenant", TEXT)];
        let columns: Vec<_> = all
            .into_iter()
            .filter(|(name, _)| *name != left_out)
            .collect();
        match shape(&columns, &mapping, &Domains::default()) {
            Err(Unmapped::Missing {
                column,
                table,
                setting,
                ..
            }) => (column, table, setting),
            other => panic!("{left_out}: {other:?}"),
        }
    };
    for (column, setting) in [
        ("Key", "--column aggregate_id=COLUMN"),
        ("本", "--column payload=COLUMN"),
        ("tenant", "--header h=COLUMN"),
    ] {
        let right = (column.to_owned(), "s.t".to_owned(), setting.to_owned());
        assert_eq!(lacks(column), right);
    }
}

#[test]
fn bytea_is_raw_as_key_and_payload_in_a_domain_too() {
    let mapping = mapped(&BARE);
    let mut domains = Domains::default();
    domains.learn(Oid(90_001), b"", b"bytea");
    domains.learn(Oid(90_002), b"public", b"bytea");
    let values = [Some(&b"\\x00ff"[..]), Some(b"\\x00"), Some(b"\\xff80")];
    for oid in [BYTEA.0, 90_001] {
        let columns = [("本", oid), ("uid", oid), ("Key", oid)];
        let shape = shape(&columns, &mapping, &domains).expect("all are there");
        let seen = draft(&shape, &mapping, &values).expect("a record");
        assert_eq!(seen.key, [0xff, 0x80]);
        assert_eq!(seen.value, Some(vec![0, 0xff]));
        // An id is text to every consumer.
        assert_eq!(seen.headers[0].1.as_deref(), Some("\\x00"));
        let bad = [Some(&b"\\x00f"[..]), Some(b"1"), Some(b"\\x00")];
        let error = draft(&shape, &mapping, &bad).expect_err("half a byte");
        assert_eq!(error, "column 本 is not bytea in hex");
    }
    // A type of that name which is not the built-in one.
    let columns = [("本", 90_002), ("uid", TEXT), ("Key", TEXT)];
    let shape = shape(&columns, &mapping, &domains).expect("all are there");
    let seen = draft(&shape, &mapping, &values).expect("a record");
    assert_eq!(seen.value.as_deref(), Some(&b"\\x00ff"[..]));
}

#[test]
fn a_timestamp_column_is_read_by_its_type() {
    let mapping = mapped(&[&BARE[..], &[(Part::Timestamp, "at")]].concat());
    let mut domains = Domains::default();
    domains.learn(Oid(90_001), b"", b"timestamptz");
    let stamp = |oid, text: Option<&[u8]>| {
        let columns = [("本", TEXT), ("uid", TEXT), ("Key", TEXT), ("at", oid)];
        let shape = shape(&columns, &mapping, &domains).expect("all are there");
        let values = [Some(&b"{}"[..]), Some(b"1"), Some(b"k"), text];
        draft(&shape, &mapping, &values).expect("a record").stamp
    };
    for oid in [DATE.0, TIMESTAMP.0, TIMESTAMPTZ.0, 90_001] {
        assert_eq!(stamp(oid, Some(b"1970-01-02")), Stamp::At(86_400_000));
        assert_eq!(stamp(oid, Some(b"infinity")), Stamp::None);
        assert_eq!(stamp(oid, None), Stamp::None);
    }
    assert_eq!(stamp(INT8.0, Some(b"17")), Stamp::At(17));
    let columns = [("本", TEXT), ("uid", TEXT), ("Key", TEXT), ("at", TEXT)];
    let error = shape(&columns, &mapping, &domains).expect_err("text is no time");
    assert!(error.to_string().contains("\"at\" of s.t"), "{error}");
    assert!(error.to_string().contains("no timestamp"), "{error}");
}

#[test]
fn a_partition_column_is_a_whole_number_or_null() {
    let mapping = mapped(&[&BARE[..], &[(Part::Partition, "p")]].concat());
    let columns = |oid| [("本", TEXT), ("uid", TEXT), ("Key", TEXT), ("p", oid)];
    let partition = |oid, text: Option<&[u8]>| {
        let shape = shape(&columns(oid), &mapping, &Domains::default()).expect("all there");
        let values = [Some(&b"{}"[..]), Some(b"1"), Some(b"k"), text];
        draft(&shape, &mapping, &values).map(|seen| seen.partition)
    };
    for oid in [INT2.0, INT4.0, INT8.0] {
        assert_eq!(partition(oid, Some(b"3")), Ok(Some(3)));
        assert_eq!(partition(oid, Some(b"-1")), Ok(Some(-1)));
        assert_eq!(partition(oid, None), Ok(None));
    }
    let error = shape(&columns(TEXT), &mapping, &Domains::default()).expect_err("no number");
    assert!(error.to_string().contains("no partition"), "{error}");
}

#[test]
fn a_key_is_type_and_id_or_the_id_alone() {
    let hash = |with_type: bool, kind: &[u8], id: &[u8]| {
        let kind_column = if with_type { "kind" } else { "" };
        let mapping = mapped(&[&BARE[..], &[(Part::AggregateType, kind_column)]].concat());
        let columns = [("本", TEXT), ("uid", TEXT), ("Key", TEXT), ("kind", TEXT)];
        let shape = shape(&columns, &mapping, &Domains::default()).expect("all there");
        let values = [Some(&b"{}"[..]), Some(b"1"), Some(id), Some(kind)];
        draft(&shape, &mapping, &values).expect("a record").key_hash
    };
    assert_ne!(hash(true, b"a", b"k"), hash(true, b"b", b"k"));
    assert_eq!(hash(true, b"a", b"k"), hash(true, b"a", b"k"));
    assert_eq!(hash(false, b"a", b"k"), hash(false, b"b", b"k"));
    assert_ne!(hash(false, b"a", b"k"), hash(false, b"a", b"l"));
}

#[test]
fn headers_come_from_parts_then_columns_then_the_row() {
    let mut mapping = mapped(&[
        (Part::EventId, "uid"),
        (Part::EventType, ""),
        (Part::AggregateType, "kind"),
        (Part::Headers, "Head"),
    ]);
    mapping.headers = vec![("tenant".to_owned(), "tenant_id".to_owned())];
    let columns = [
        ("uid", TEXT),
        ("kind", TEXT),
        ("aggregate_id", TEXT),
        ("payload", TEXT),
        ("Head", 3802),
        ("tenant_id", TEXT),
    ];
    let shape = shape(&columns, &mapping, &Domains::default()).expect("all there");
    let row = |head: Option<&'static [u8]>| {
        let values = [Some(&b"1"[..]), Some(b"K"), Some(b"k"), None, head, None];
        draft(&shape, &mapping, &values).map(|seen| seen.headers)
    };
    let text = |pairs: &[(&str, Option<&str>)]| -> Vec<(String, Option<String>)> {
        let owned = pairs.iter();
        owned
            .map(|(n, v)| ((*n).to_owned(), v.map(str::to_owned)))
            .collect()
    };
    let own = [
        ("event_id", Some("1")),
        ("aggregate_type", Some("K")),
        ("tenant", None),
    ];
    assert_eq!(row(None), Ok(text(&own)));
    // What no column gives, the row may say itself; what one gives, it may not.
    let head = br#"{"event_type": "x", "aggregate_type": "y", "tenant": "z", "event_id": "0"}"#;
    let right = [&own[..], &[("event_type", Some("x"))]].concat();
    assert_eq!(row(Some(head)), Ok(text(&right)));
    let error = row(Some(b"[1]")).expect_err("no object");
    assert_eq!(error, "column Head is not a JSON object");
}

#[test]
fn bytea_comes_out_of_its_hex() {
    assert_eq!(from_hex(b"\\x00ff80"), Some(vec![0, 0xff, 0x80]));
    assert_eq!(from_hex(b"\\x0"), None);
    assert_eq!(from_hex(b"00"), None);
}
