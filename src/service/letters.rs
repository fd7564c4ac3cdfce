//! Dead letters: statements on the lock's session, each a task that answers with a [`Done`].

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::jobs::{Done, Link, Surroundings};
use crate::dead_letter::{DeadLetter, Settlement, Tripped};
use crate::error::DbError;
use crate::fault::{self, Point};
use crate::io::{connect, dead_letters, kafka, registry};
use crate::lsn::{Lsn, PgTimestamp};
use crate::relay::orders::Ill;

/// Dead letters that are retried at a time, and the bytes of their values.
const RETRY_ROWS: usize = 1_000;
const RETRY_BYTES: usize = 16 << 20;
/// How often a standby is asked whether it has them, and how long before that is said.
const STANDBY_INTERVAL: Duration = Duration::from_millis(100);
const STANDBY_WITHIN: Duration = Duration::from_secs(10);

fn ill(error: &DbError, around: &Surroundings) -> Ill {
    Ill::of(&connect::failure(error, &around.source.database))
}

/// Writes letters and waits until no failover can lose them.
pub async fn park(
    around: Arc<Surroundings>,
    link: Arc<Link>,
    epoch: u64,
    letters: Vec<DeadLetter>,
) -> Done {
    match park_over(&around, &link, &letters).await {
        Ok(flushed) => Done::Parked { epoch, flushed },
        Err(why) => Done::NotParked {
            epoch,
            letters,
            why,
        },
    }
}

async fn park_over(around: &Surroundings, link: &Link, letters: &[DeadLetter]) -> Result<Lsn, Ill> {
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
    let flush = dead_letters::flush_lsn(&link.client)
        .await
        .map_err(in_words)?;
    wait_for_standbys(around, link, flush).await?;
    Ok(flush)
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

pub async fn look(around: Arc<Surroundings>, link: Arc<Link>) -> Done {
    let slot = registry::slot_state(&link.client, &around.source.slot).await;
    let confirmed = match slot {
        Ok(state) => state.and_then(|state| state.confirmed_flush),
        Err(error) => {
            tracing::warn!(%error, "the slot could not be read");
            return Done::ParkedUnknown;
        }
    };
    let confirmed = confirmed.unwrap_or_default();
    match dead_letters::load(&link.client, link.table_oid, link.generation, confirmed).await {
        Ok(parked) => Done::ParkedKnown(Box::new(parked)),
        Err(error) => {
            tracing::warn!(%error, "the dead letters could not be read");
            Done::ParkedUnknown
        }
    }
}

pub async fn load_retry(link: Arc<Link>, passed: Lsn) -> Done {
    let loaded = dead_letters::next_retry(
        &link.client,
        link.table_oid,
        link.generation,
        passed,
        RETRY_ROWS,
        RETRY_BYTES,
    )
    .await;
    match loaded {
        Ok(letters) => Done::RetryLoaded(letters),
        Err(error) => {
            tracing::warn!(%error, "the dead letters to retry could not be read");
            Done::RetryNotLoaded
        }
    }
}

pub async fn settle(
    around: Arc<Surroundings>,
    link: Arc<Link>,
    epoch: u64,
    settlement: Settlement,
) -> Done {
    let no_id = || "";
    let settled = async {
        fault::reached(Point::Settle, no_id).map_err(|e| injected(&e))?;
        let free = dead_letters::settle(&link.client, link.table_oid, &settlement)
            .await
            .map_err(|error| ill(&error, &around))?;
        fault::reached(Point::Settled, no_id).map_err(|e| injected(&e))?;
        Ok(free)
    };
    match settled.await {
        Ok(free) => Done::Settled { epoch, free },
        Err(why) => Done::NotSettled { epoch, why },
    }
}

/// That a topic is tripped outlives the relay. Where it cannot be written the next life finds out
/// by itself.
pub async fn trip(link: Arc<Link>, tripped: Tripped) -> Done {
    if let Err(error) = dead_letters::trip(&link.client, link.table_oid, &tripped).await {
        tracing::warn!(%error, "the registry could not be written");
    }
    Done::Nothing
}

pub async fn untrip(link: Arc<Link>, topic: String) -> Done {
    if let Err(error) = dead_letters::untrip(&link.client, link.table_oid, &topic).await {
        tracing::warn!(%error, "the registry could not be written");
    }
    Done::Nothing
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
