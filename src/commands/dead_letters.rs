//! `walrelay dead-letters`: events that could not be published, and what becomes of them.
//!
//! # Invariants
//! - The relay need not run, and Kafka is not contacted: what is decided here is written down, and
//!   the leader does it.
//! - A payload is shown by `show` alone, bounded, and nothing from a row reaches the terminal as
//!   more than text.

mod show;
mod words;

use serde::Serialize;
use tokio_postgres::Client;

use super::report;
use crate::config::{DeadLettersConfig, LetterId, LettersTask, ListLetters, Source, Which};
use crate::dead_letter::Tripped;
use crate::error::{DbError, Failure};
use crate::finding::Finding;
use crate::io::dead_letters::by_hand::{self, Changed, Line, Totals};
use crate::io::dead_letters::tripped;
use crate::io::registry::{self, Found, Instance};
use crate::io::side::Side;
use crate::io::sql::{quote_ident, show_table};
use crate::io::{connect, preflight};

/// Nobody waits for a look at a table without an end, or behind somebody's lock.
const TIMEOUTS: &str = "set statement_timeout = '60s'; set lock_timeout = '10s'";

/// What a role needs to look.
const TO_READ: &str = "grant usage on schema walrelay to {role}; \
                       grant select on walrelay.relay, walrelay.dead_letter to {role}";

/// What a role needs to decide, beyond that.
const TO_WRITE: &str = "grant update on walrelay.dead_letter to {role}; \
                        grant update (dead_letters_touched, tripped_topics) on walrelay.relay \
                        to {role}";

/// # Errors
/// Exit code 3: there is no such dead letter, or the database refuses or cannot be reached. 2 where
/// a question cannot be asked.
pub async fn run(config: DeadLettersConfig) -> Result<(), Failure> {
    let desk = Desk::open(&config).await?;
    match &config.task {
        LettersTask::List(asked) => desk.list(asked).await,
        LettersTask::Show(id) => desk.show(id).await,
        LettersTask::Retry(which) => desk.retry(which).await,
        LettersTask::Discard { which, yes } => desk.discard(which, *yes).await,
        LettersTask::Park { topic } => desk.park(topic).await,
    }
}

/// The session, and whose dead letters it is about.
struct Desk<'a> {
    side: Side,
    source: &'a Source,
    table_oid: u32,
    json: bool,
}

/// What a change came to, for a program.
#[derive(Serialize)]
struct Done<'a> {
    done: &'a str,
    events: i64,
    keys: i64,
    still_parked_behind: i64,
    leader: bool,
}

impl<'a> Desk<'a> {
    async fn open(config: &'a DeadLettersConfig) -> Result<Desk<'a>, Failure> {
        let source = &config.source;
        let failure = |error: DbError| failed(&error, source);
        let side = Side::connect(&source.database, None).await;
        let side = side.map_err(failure)?;
        side.run(TIMEOUTS).await.map_err(failure)?;
        let found = registry::load_by_table(&side.client, &source.table).await;
        let table_oid = match found.map_err(failure)? {
            Found::Row(row) => row.table_oid,
            Found::NoTable => return Err(not_relayed(source, "does not exist in this database")),
            Found::NotInitialised { .. } | Found::NoRow { .. } => {
                return Err(not_relayed(
                    source,
                    "is not relayed: it has no dead letters",
                ));
            }
        };
        Ok(Desk {
            side,
            source,
            table_oid,
            json: config.json,
        })
    }

    fn failed(&self, error: &DbError) -> Failure {
        failed(error, self.source)
    }

    async fn leader(&self) -> Result<Option<Instance>, Failure> {
        let instances = registry::instances(&self.side.client, Some(self.table_oid)).await;
        let mut instances = instances.map_err(|e| self.failed(&e))?;
        instances.retain(|instance| instance.is_leader);
        Ok(instances.pop())
    }

    async fn list(&self, asked: &ListLetters) -> Result<(), Failure> {
        let client = &*self.side.client;
        let failure = |error: DbError| self.failed(&error);
        let totals = by_hand::totals(client, self.table_oid).await;
        let lines = by_hand::list(client, self.table_oid, asked).await;
        let held = tripped(client, self.table_oid).await;
        let shown = Shown {
            totals: totals.map_err(failure)?,
            lines: lines.map_err(failure)?,
            tripped: held.map_err(failure)?,
            is_led: self.leader().await?.is_some(),
        };
        let text = if self.json {
            report::json(&words::list_json(&shown, self.source))?
        } else {
            words::list(&shown, asked, &show_table(&self.source.table))
        };
        report::write_out(&text)
    }

    async fn show(&self, id: &LetterId) -> Result<(), Failure> {
        let row = self.find(id).await?;
        let client = &*self.side.client;
        let details = by_hand::details(client, self.table_oid, row, show::PREVIEW_BYTES).await;
        let Some(details) = details.map_err(|e| self.failed(&e))? else {
            return Err(no_such(id));
        };
        let text = if self.json {
            report::json(&show::json(&details))?
        } else {
            show::text(&details)
        };
        report::write_out(&text)
    }

    async fn retry(&self, which: &Which) -> Result<(), Failure> {
        let row = self.one_parked(which).await?;
        let client = &*self.side.client;
        let done = by_hand::retry(client, self.table_oid, which, row).await;
        let changed = done.map_err(|e| self.failed(&e))?;
        self.something(which, changed)?;
        let leader = self.leader().await?;
        if self.json {
            return self.done("retry_requested", changed, leader.is_some());
        }
        let who = match &leader {
            Some(leader) => format!(
                "the leader ({}) publishes them in order; `walrelay dead-letters list` shows how far \
                 it is, and one that is refused again ends the retry of its key\n",
                leader.session
            ),
            None => "no relay leads at the moment: the request waits in the database; start \
                     `walrelay run`, and it publishes them\n"
                .to_owned(),
        };
        let text = format!("retry requested for {}\n{who}", words::amount(changed));
        report::write_out(&text)
    }

    async fn discard(&self, which: &Which, yes: bool) -> Result<(), Failure> {
        let row = self.one_parked(which).await?;
        let client = &*self.side.client;
        if !yes {
            let would = by_hand::would_discard(client, self.table_oid, which, row).await;
            let would = would.map_err(|e| self.failed(&e))?;
            self.something(which, would)?;
            let what = format!(
                "{} of {}",
                words::amount(would),
                show_table(&self.source.table)
            );
            if !report::is_confirmed(
                &format!("discarding {what}"),
                &format!("Discard {what}? They are never published."),
                "nobody needs them",
            )? {
                return report::write_out("nothing was discarded\n");
            }
        }
        let done = by_hand::discard(client, self.table_oid, which, row).await;
        let changed = done.map_err(|e| self.failed(&e))?;
        self.something(which, changed)?;
        if self.json {
            let leader = self.leader().await?;
            return self.done("discarded", changed, leader.is_some());
        }
        let mut text = format!("discarded {}\n", words::amount(changed));
        if changed.behind > 0 {
            text.push_str(&format!(
                "{} of the same key stay parked, and so does what its writers add, until they are \
                 retried or discarded, too: `walrelay dead-letters retry --key K`\n",
                words::events(changed.behind)
            ));
        }
        report::write_out(&text)
    }

    async fn park(&self, topic: &str) -> Result<(), Failure> {
        let client = &*self.side.client;
        let asked = by_hand::ask_to_park(client, self.table_oid, topic).await;
        let shown = words::topic(topic);
        if !asked.map_err(|e| self.failed(&e))? {
            let held = tripped(client, self.table_oid).await;
            let held = held.map_err(|e| self.failed(&e))?;
            let names: Vec<String> = held.iter().map(|t| words::topic(&t.topic)).collect();
            let (cause, remedy) = if names.is_empty() {
                (
                    "no topic's events are held",
                    "nothing to do: walrelay status tells".to_owned(),
                )
            } else {
                (
                    "its events are not held",
                    format!("name one that is: {}", names.join(", ")),
                )
            };
            return Err(Failure::refused(format!("{shown}: {cause}"), remedy));
        }
        let leader = self.leader().await?;
        if self.json {
            return self.done("park_requested", Changed::default(), leader.is_some());
        }
        let who = match leader {
            Some(leader) => format!("the leader ({}) does it now", leader.session),
            None => "no relay leads at the moment: the next one does it".to_owned(),
        };
        report::write_out(&format!(
            "what is held of {shown} is to be parked, key by key; {who}\n"
        ))
    }

    fn done(&self, done: &str, changed: Changed, leader: bool) -> Result<(), Failure> {
        report::write_out(&report::json(&Done {
            done,
            events: changed.events,
            keys: changed.keys,
            still_parked_behind: changed.behind,
            leader,
        })?)
    }

    /// The row that one ID means, which is still parked; `None` where a key or all is meant.
    async fn one_parked(&self, which: &Which) -> Result<Option<i64>, Failure> {
        let Which::One(id) = which else {
            return Ok(None);
        };
        let row = self.find(id).await?;
        let details = by_hand::details(&self.side.client, self.table_oid, row, 0).await;
        let details = details.map_err(|e| self.failed(&e))?;
        let Some(line) = details.map(|details| details.line) else {
            return Err(no_such(id));
        };
        if line.status != "parked" {
            return Err(Failure::refused(
                format!("{} is {} already", words::id(id), line.status),
                format!("nothing to do; walrelay dead-letters show row:{row} tells when"),
            ));
        }
        Ok(Some(row))
    }

    async fn find(&self, id: &LetterId) -> Result<i64, Failure> {
        let rows = by_hand::find(&self.side.client, self.table_oid, id).await;
        match rows.map_err(|e| self.failed(&e))?[..] {
            [] => Err(no_such(id)),
            [row] => Ok(row),
            _ => Err(Failure::usage(
                format!("{} is one row's id and another's event_id", words::id(id)),
                "write row:… or event:… before it",
            )),
        }
    }

    /// Nothing to change is a failure, unless everything was asked for.
    fn something(&self, which: &Which, changed: Changed) -> Result<(), Failure> {
        if changed.events > 0 || matches!(which, Which::All) {
            return Ok(());
        }
        let what = match which {
            Which::One(id) => words::id(id),
            Which::Key(key) => words::key_name(key),
            Which::All => "all".to_owned(),
        };
        Err(Failure::refused(
            format!("no parked event matches {what}"),
            "walrelay dead-letters list shows what is parked",
        ))
    }
}

/// What a list is made of.
struct Shown {
    totals: Totals,
    lines: Vec<Line>,
    tripped: Vec<Tripped>,
    is_led: bool,
}

/// What `check` and `status` say of dead letters.
pub struct Standing {
    pub totals: Totals,
    pub tripped: Vec<Tripped>,
}

impl Standing {
    /// # Errors
    /// 42501 where the role may not read them; or the conversation's.
    pub async fn of(client: &Client, table_oid: u32) -> Result<Standing, DbError> {
        let (totals, tripped) = tokio::join!(
            by_hand::totals(client, table_oid),
            tripped(client, table_oid)
        );
        Ok(Standing {
            totals: totals?,
            tripped: tripped?,
        })
    }

    /// A parked event is worth a look; a topic that is held stands still until somebody decides.
    pub fn findings(&self) -> Vec<Finding> {
        let totals = &self.totals;
        let mut findings = Vec::new();
        if totals.parked == 0 {
            findings.push(Finding::ok("parked", "no event is parked"));
        } else {
            let oldest = totals.oldest_seconds.map_or(String::new(), |seconds| {
                format!(", the oldest for {}", age(seconds))
            });
            let parked = words::amount(Changed {
                events: totals.parked,
                keys: totals.keys,
                behind: 0,
            });
            let asked = match totals.retried_keys {
                0 => String::new(),
                n => format!("; a retry is requested for {n} of them"),
            };
            findings.push(Finding::warning(
                "parked",
                format!("{parked} parked{oldest}{asked}"),
                "walrelay dead-letters list",
            ));
        }
        findings.extend(self.tripped.iter().map(held));
        findings
    }
}

fn held(tripped: &Tripped) -> Finding {
    let topic = words::topic(&tripped.topic);
    let found = format!(
        "events of {topic} are held, not parked: too many keys at once had the same trouble ({}: {})",
        tripped.reason,
        words::safe(tripped.message.as_bytes(), 300)
    );
    if tripped.is_park_asked {
        return Finding::warning(topic, found, "nothing to do: it was asked to park them");
    }
    let remedy = format!(
        "see to the cause: an event of it is tried each minute, and a success opens the topic; or give \
         up waiting: {}",
        words::park_command(&tripped.topic)
    );
    Finding::failed(topic, found, remedy)
}

fn not_relayed(source: &Source, what: &str) -> Failure {
    Failure::refused(
        format!("table {} {what}", show_table(&source.table)),
        "name the outbox table with --table, or run `walrelay init`",
    )
}

fn no_such(id: &LetterId) -> Failure {
    Failure::refused(
        format!("there is no dead letter {}", words::id(id)),
        "walrelay dead-letters list shows what there is (a settled one goes once it cannot come \
         again)",
    )
}

/// The grants are said in full: whoever is called at night need not look them up.
fn failed(error: &DbError, source: &Source) -> Failure {
    let DbError::Server {
        sqlstate, message, ..
    } = error
    else {
        return connect::failure(error, &source.database);
    };
    let is_ours = ["walrelay", "relay", "dead_letter"]
        .iter()
        .any(|name| message.contains(name));
    if sqlstate != "42501" || !is_ours {
        return connect::failure(error, &source.database);
    }
    let grants = format!("{TO_READ}; to retry and discard: {TO_WRITE}");
    Failure::refused(
        error.to_string(),
        grants.replace("{role}", &quote_ident(&source.database.user)),
    )
}

fn age(seconds: f64) -> String {
    preflight::span(std::time::Duration::from_secs_f64(seconds.max(0.0)))
}
