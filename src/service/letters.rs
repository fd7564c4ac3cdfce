//! Dead letters: statements on the lock's session, each a task that answers with an [`Answer`].

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::jobs::{Done, Link, Surroundings};
use crate::dead_letter::{DeadLetter, EventKey, Parked, Settlement, Stored, Written};
use crate::error::DbError;
use crate::fault::{self, Point};
use crate::io::{connect, dead_letters, kafka, registry};
use crate::lsn::{Lsn, PgTimestamp};
use crate::relay::orders::{Ill, Statement};

/// Dead letters that are retried at a time, and the bytes of their values.
const RETRY_ROWS: usize = 1_000;
const RETRY_BYTES: usize = 16 << 20;
/// How often a standby is asked whether it has them, and how long before that is said.
const STANDBY_INTERVAL: Duration = Duration::from_millis(100);
const STANDBY_WITHIN: Duration = Duration::from_secs(10);

/// What came of a statement about dead letters.
pub enum Answer {
    Parked {
        epoch: u64,
        written: Written,
    },
    NotParked {
        epoch: u64,
        letters: Vec<DeadLetter>,
        why: Ill,
    },
    Known(Box<Parked>),
    Unknown,
    RetryLoaded(Vec<Stored>),
    RetryNotLoaded,
    Settled {
        epoch: u64,
        free: Vec<EventKey>,
    },
    NotSettled {
        epoch: u64,
        why: Ill,
    },
    /// Nobody waits for it.
    Nothing,
}

fn ill(error: &DbError, around: &Surroundings) -> Ill {
    Ill::of(&connect::failure(error, &around.source.database))
}

pub async fn say(around: Arc<Surroundings>, link: Arc<Link>, statement: Statement) -> Answer {
    match statement {
        Statement::Park { epoch, letters } => park(&around, &link, epoch, letters).await,
        Statement::Look => look(&around, &link).await,
        Statement::LoadRetry { passed } => load_retry(&link, passed).await,
        Statement::Settle { epoch, settlement } => settle(&around, &link, epoch, &settlement).await,
        Statement::Trip(tripped) => {
            unheard(dead_letters::trip(&link.client, link.table_oid, &tripped).await)
        }
        Statement::Untrip(topic) => {
            unheard(dead_letters::untrip(&link.client, link.table_oid, &topic).await)
        }
    }
}

/// That a topic is tripped outlives the relay. Where it cannot be written the next life finds out
/// by itself.
fn unheard(written: Result<(), DbError>) -> Answer {
    if let Err(error) = written {
        tracing::warn!(%error, "the registry could not be written");
    }
    Answer::Nothing
}

/// Writes letters and waits until no failover can lose them.
async fn park(around: &Surroundings, link: &Link, epoch: u64, letters: Vec<DeadLetter>) -> Answer {
    match park_over(around, link, &letters).await {
        Ok(written) => Answer::Parked { epoch, written },
        Err(why) => Answer::NotParked {
            epoch,
            letters,
            why,
        },
    }
}

async fn park_over(
    around: &Surroundings,
    link: &Link,
    letters: &[DeadLetter],
) -> Result<Written, Ill> {
    let in_words = |error: DbError| ill(&error, around);
    let event_id = || {
        let first = letters.first().map_or(&[][..], |letter| &letter.event_id);
        std::str::from_utf8(first).unwrap_or_default()
    };
    fault::reached(Point::Park, event_id).map_err(|e| injected(&e))?;
    dead_letters::park(&link.client, link.table_oid, letters)
        .await
        .map_err(in_words)?;
    fault::reached(Point::Parked, event_id).map_err(|e| injected(&e))?;
    let flushed = dead_letters::flush_lsn(&link.client)
        .await
        .map_err(in_words)?;
    let last_id = dead_letters::last_id(&link.client, link.table_oid)
        .await
        .map_err(in_words)?;
    wait_for_standbys(around, link, flushed).await?;
    Ok(Written { flushed, last_id })
}

/// A standby that is promoted must have the dead letters that the slot has passed.
async fn wait_for_standbys(around: &Surroundings, link: &Link, flush: Lsn) -> Result<(), Ill> {
    let slot = &around.source.slot;
    let wait = async {
        loop {
            let behind = dead_letters::standbys_have(&link.client, slot, flush)
                .await
                .map_err(|error| ill(&error, around))?;
            if behind.is_none() {
                return Ok(());
            }
            tokio::time::sleep(STANDBY_INTERVAL).await;
        }
    };
    tokio::time::timeout(STANDBY_WITHIN, wait)
        .await
        .unwrap_or_else(|_| {
            Err(Ill {
                what: format!(
                    "a standby has not received them within {STANDBY_WITHIN:?} (slot {slot} fails over)"
                ),
                remedy: "look at pg_replication_slots and synchronized_standby_slots: start the standby again, or drop the physical slot of one that is gone".to_owned(),
            })
        })
}

fn injected(error: &fault::Injected) -> Ill {
    Ill {
        what: error.to_string(),
        remedy: "unset WALRELAY_FAULT".to_owned(),
    }
}

/// What is parked, settled and tripped, as the slot stands.
///
/// # Errors
/// 42501 where the role may not read the tables; or the conversation's.
pub async fn known(around: &Surroundings, link: &Link) -> Result<Parked, DbError> {
    let slot = registry::slot_state(&link.client, &around.source.slot).await?;
    let confirmed = slot.and_then(|slot| slot.confirmed_flush);
    let (generation, confirmed) = if link.heals.load(Ordering::Relaxed) {
        // Rows of any age may come again.
        (0, Lsn::INVALID)
    } else {
        let generation = link.generation.load(Ordering::Relaxed);
        (generation, confirmed.unwrap_or_default())
    };
    dead_letters::load(&link.client, link.table_oid, generation, confirmed).await
}

async fn look(around: &Surroundings, link: &Link) -> Answer {
    match known(around, link).await {
        Ok(parked) => Answer::Known(Box::new(parked)),
        Err(error) => {
            tracing::warn!(%error, "the dead letters could not be read");
            Answer::Unknown
        }
    }
}

async fn load_retry(link: &Link, passed: Lsn) -> Answer {
    let loaded = dead_letters::next_retry(
        &link.client,
        link.table_oid,
        link.generation.load(Ordering::Relaxed),
        passed,
        RETRY_ROWS,
        RETRY_BYTES,
    )
    .await;
    match loaded {
        Ok(letters) => Answer::RetryLoaded(letters),
        Err(error) => {
            tracing::warn!(%error, "the dead letters to retry could not be read");
            Answer::RetryNotLoaded
        }
    }
}

async fn settle(around: &Surroundings, link: &Link, epoch: u64, settlement: &Settlement) -> Answer {
    let no_id = || "";
    let settled = async {
        fault::reached(Point::Settle, no_id).map_err(|e| injected(&e))?;
        let free = dead_letters::settle(&link.client, link.table_oid, settlement)
            .await
            .map_err(|error| ill(&error, around))?;
        fault::reached(Point::Settled, no_id).map_err(|e| injected(&e))?;
        Ok(free)
    };
    match settled.await {
        Ok(free) => Answer::Settled { epoch, free },
        Err(why) => Answer::NotSettled { epoch, why },
    }
}

pub async fn read_tail(around: Arc<Surroundings>, topic: String, since: PgTimestamp) -> Done {
    let answer = kafka::read_tail(&around.kafka, &topic, since).await;
    Done::Tail { topic, answer }
}

/// Says, once a topic, that its end may not be read: what that means should be known before a crash.
pub async fn may_read(around: Arc<Surroundings>, topic: String) -> Done {
    let is_new = around
        .told
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(format!("may read {topic}"));
    if is_new && kafka::may_read(&around.kafka, &topic).await == Ok(false) {
        tracing::warn!(
            "no Read right on topic {topic}: after a crash of the relay events may be repeated (at least once, consumers drop them by event_id); remedy: grant this principal Read on topic {topic}"
        );
    }
    Done::Nothing
}
