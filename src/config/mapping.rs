//! How a row becomes a record, from the settings: `--column`, `--topic`, `--topic-for`, `--header`,
//! `--timestamp`.

use super::layers::Layers;
use super::values;
use crate::cli::RecordCli;
use crate::error::Failure;
use crate::record::OWN_HEADERS;
use crate::relay::mapping::{Clock, Mapping, Part};
use crate::relay::route::check_topic;

pub(super) fn mapping(layers: &Layers, args: RecordCli) -> Result<Mapping, Failure> {
    let mut mapping = Mapping {
        headers: headers(layers, &args)?,
        ..Mapping::default()
    };
    for (name, column) in layers.pairs("columns", "--column", &args.column)? {
        set_column(&mut mapping, &name, &column)?;
    }
    if let Some(given) = layers.get("timestamp", args.timestamp)? {
        mapping.clock = match given.value.as_str() {
            "commit" => Clock::Commit,
            "publish" => Clock::Publish,
            _ => {
                return Err(given.wrong(
                    "is neither commit nor publish",
                    "write commit or publish; for a column: --column timestamp=COLUMN",
                ));
            }
        };
        if let Some(column) = mapping.columns.get(Part::Timestamp) {
            return Err(Failure::usage(
                format!(
                    "{}: the timestamp is already taken from column {column}",
                    given.origin
                ),
                "leave one of the two out (--column timestamp= takes the column back)",
            ));
        }
    }
    topic(layers, args.topic, &args.topic_for, &mut mapping)?;
    Ok(mapping)
}

fn headers(layers: &Layers, args: &RecordCli) -> Result<Vec<(String, String)>, Failure> {
    let mut headers = Vec::new();
    for (name, column) in layers.pairs("headers", "--header", &args.header)? {
        if OWN_HEADERS.contains(&name.as_str()) {
            return Err(Failure::usage(
                format!("header {name} is walrelay's own and cannot be mapped"),
                format!(
                    "name its column with --column {name}=COLUMN, or give the header another name"
                ),
            ));
        }
        let Some(column) = values::column(&format!("--header {name}"), &column)? else {
            return Err(Failure::usage(
                format!("header {name} is mapped to no column"),
                format!("write the column's name behind it: {name}=COLUMN"),
            ));
        };
        headers.push((name, column));
    }
    Ok(headers)
}

fn set_column(mapping: &mut Mapping, name: &str, column: &str) -> Result<(), Failure> {
    let Some(part) = Part::parse(name) else {
        return Err(unknown_part(name));
    };
    match values::column(&format!("--column {name}"), column)? {
        Some(column) => mapping.columns.set(part, column),
        None if part.is_required() => {
            return Err(Failure::usage(
                format!("--column {name}: there is no record without {name}"),
                format!("write the column's name behind it: {name}=COLUMN"),
            ));
        }
        None => mapping.columns.unset(part),
    }
    Ok(())
}

fn unknown_part(name: &str) -> Failure {
    let names = Part::ALL.map(Part::name);
    let nearest = names
        .into_iter()
        .map(|known| (strsim::jaro_winkler(known, name), known))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .filter(|(likeness, _)| *likeness > 0.7);
    let remedy = match nearest {
        Some((_, known)) => {
            format!("did you mean {known}? The other way round is --header NAME=COLUMN")
        }
        None => format!(
            "write --column PART=COLUMN, PART being one of {}; for a header from a column: --header \
             NAME=COLUMN",
            names.join(", ")
        ),
    };
    Failure::usage(format!("--column: a record has no part {name:?}"), remedy)
}

fn topic(
    layers: &Layers,
    flag: Option<String>,
    exceptions: &[String],
    mapping: &mut Mapping,
) -> Result<(), Failure> {
    let template = match layers.get("topic", flag)? {
        Some(given) => values::topic(&given)?,
        None => mapping.topic.clone(),
    };
    mapping.set_topic(template).map_err(|error| {
        Failure::usage(
            error.to_string(),
            format!(
                "name the topic without it (--topic outbox.events), or over another column (--topic \
                 'outbox.{{COLUMN}}'), or say which column it is: --column {}=COLUMN",
                error.part
            ),
        )
    })?;
    for (given, topic) in layers.pairs("topics", "--topic-for", exceptions)? {
        let topic = topic.trim().to_owned();
        check_topic(&topic).map_err(|error| {
            Failure::usage(
                format!("--topic-for {given}: {error}"),
                "write --topic-for NAME=TOPIC: what the template gives, and a legal topic for it",
            )
        })?;
        mapping.topics.insert(given, topic);
    }
    Ok(())
}
