//! What `walrelay dead-letters` is asked to do.

use super::layers::Layers;
use super::{DeadLettersConfig, Surroundings, source};
use crate::cli::{self, DeadLettersAction};
use crate::error::Failure;

/// Lines of `list`, unless told otherwise.
const LIMIT_DEFAULT: i64 = 50;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LettersTask {
    List(ListLetters),
    Show(LetterId),
    Retry(Which),
    Discard {
        which: Which,
        /// Do not ask.
        yes: bool,
    },
    /// The topic's name, which is empty for events whose row gives none.
    Park {
        topic: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListLetters {
    pub status: Status,
    pub topic: Option<String>,
    /// Each event of the key, in place of one line a key.
    pub key: Option<KeyName>,
    pub limit: i64,
    pub order: Order,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    OldestFirst,
    NewestFirst,
}

/// What became of a dead letter, as the table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Parked,
    Delivered,
    Discarded,
}

impl Status {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Parked => "parked",
            Status::Delivered => "delivered",
            Status::Discarded => "discarded",
        }
    }
}

/// One dead letter: by its row, by its event, or by either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LetterId {
    Row(i64),
    Event(String),
    Either(String),
}

/// A key as a person names it: of every type unless one is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyName {
    pub aggregate_id: String,
    pub aggregate_type: Option<String>,
}

/// Which dead letters to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    One(LetterId),
    Key(KeyName),
    All,
}

pub(super) fn dead_letters(
    layers: &Layers,
    around: &Surroundings,
    action: DeadLettersAction,
) -> Result<DeadLettersConfig, Failure> {
    let (place, task) = match action {
        DeadLettersAction::List(args) => {
            let task = list(&args)?;
            (args.place, task)
        }
        DeadLettersAction::Show(args) => (args.place, LettersTask::Show(id(&args.id)?)),
        DeadLettersAction::Retry(args) => (args.place, LettersTask::Retry(which(args.which)?)),
        DeadLettersAction::Discard(args) => {
            let task = LettersTask::Discard {
                which: which(args.which)?,
                yes: args.yes,
            };
            (args.place, task)
        }
        DeadLettersAction::Park(args) => (args.place, LettersTask::Park { topic: args.topic }),
    };
    Ok(DeadLettersConfig {
        source: source(layers, around, place.source)?,
        task,
        json: place.json,
    })
}

fn list(args: &cli::LettersListCli) -> Result<LettersTask, Failure> {
    let status = match args.status {
        None | Some(cli::StatusOfLetter::Parked) => Status::Parked,
        Some(cli::StatusOfLetter::Delivered) => Status::Delivered,
        Some(cli::StatusOfLetter::Discarded) => Status::Discarded,
    };
    Ok(LettersTask::List(ListLetters {
        status,
        topic: args.topic.clone(),
        key: args.key.as_ref().map(|key| key_name(key, &args.of_type)),
        limit: args.limit.map_or(LIMIT_DEFAULT, i64::from),
        order: if args.newest {
            Order::NewestFirst
        } else {
            Order::OldestFirst
        },
    }))
}

fn which(args: cli::WhichCli) -> Result<Which, Failure> {
    match (args.id, args.key) {
        (Some(written), _) => Ok(Which::One(id(&written)?)),
        (None, Some(key)) => Ok(Which::Key(key_name(&key, &args.of_type))),
        (None, None) if args.all => Ok(Which::All),
        (None, None) => Err(Failure::usage(
            "nothing says which dead letters are meant",
            "give an ID, --key K or --all (walrelay dead-letters list shows what there is)",
        )),
    }
}

fn key_name(aggregate_id: &str, aggregate_type: &Option<String>) -> KeyName {
    KeyName {
        aggregate_id: aggregate_id.to_owned(),
        aggregate_type: aggregate_type.clone(),
    }
}

/// `row:7`, `event:7`, or `7` for whichever of the two there is.
fn id(written: &str) -> Result<LetterId, Failure> {
    if let Some(event) = written.strip_prefix("event:") {
        return Ok(LetterId::Event(event.to_owned()));
    }
    if let Some(row) = written.strip_prefix("row:") {
        return row.parse().map(LetterId::Row).map_err(|_| {
            Failure::usage(
                format!("{written:?} names no row: its id is a number"),
                "write row:7, or the event_id as event:…",
            )
        });
    }
    if written.is_empty() {
        return Err(Failure::usage(
            "the ID is empty",
            "give the id of a row or an event_id, as walrelay dead-letters list shows them",
        ));
    }
    Ok(LetterId::Either(written.to_owned()))
}
