//! `walrelay status`: how far the relay is and what holds it up, asked of the database and, where
//! it answers, of the relay itself.
//!
//! # Invariants
//! - What is not known is said as unknown, never as zero.
//! - Each side is asked without the other's help, and neither is waited for without an end.

mod judge;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::dead_letters::Standing;
use super::report::{self, Entry, Screen};
use crate::config::{Http, StatusConfig, TableName};
use crate::error::{DbError, Exit, Failure};
use crate::finding::{self, Group};
use crate::io::connect;
use crate::io::fetch::{self, NoAnswer};
use crate::io::preflight::{self, Answer, Seen};
use crate::io::side::Side;
use crate::io::standing::{self, Waiting};

use crate::telemetry::health::Health;

/// The group of what the surroundings lack.
const TROUBLE: &str = "trouble";
const RELAY_WITHIN: Duration = Duration::from_secs(2);
const DATABASE_WITHIN: Duration = Duration::from_secs(10);
/// Rows are counted for no longer than this.
const STATEMENT_TIMEOUT: &str = "set statement_timeout = '2s'; set lock_timeout = '1s'";
/// A rate is taken over no less than this.
const RATE_OVER: Duration = Duration::from_secs(1);

/// # Errors
/// What needs attention: exit code 3, or 4 where an event or a gap waits for a decision.
pub async fn run(config: StatusConfig) -> Result<(), Failure> {
    let (relay, side) = tokio::join!(ask(config.http), session(&config));
    let database = match &side {
        Ok(side) => look(side, &config, &relay).await,
        Err(error) => Err(error.clone()),
    };
    let facts = Facts { relay, database };
    let groups = judge::judge(&config, &facts);
    let failure = failure(&groups);
    let text = if config.json {
        report::json(&Report {
            ok: failure.is_none(),
            numbers: judge::numbers(&config, &facts),
            relay: facts.relay.health(),
            findings: report::entries(&groups),
        })?
    } else {
        report::table(&groups, Screen::of_stdout())
    };
    report::write_out(&text)?;
    failure.map_or(Ok(()), Err)
}

/// What waits for a decision comes before all else: it is often why the rest is down.
fn failure(groups: &[Group]) -> Option<Failure> {
    // What the surroundings lack comes before what does not run for want of it.
    let (first, then): (Vec<&Group>, Vec<&Group>) =
        groups.iter().partition(|group| group.name == TROUBLE);
    let groups = [first, then].concat();
    let all = || groups.iter().flat_map(|group| &group.findings);
    let halted = all().filter(|finding| finding.exit == Exit::Halted);
    finding::failure(halted).or_else(|| finding::failure(all()))
}

#[derive(Serialize)]
struct Report<'a> {
    ok: bool,
    #[serde(flatten)]
    numbers: judge::Numbers,
    /// What the relay says of itself; null where it was not reached.
    relay: Option<&'a Health>,
    findings: Vec<Entry<'a>>,
}

/// All that was found out.
struct Facts {
    relay: Relay,
    database: Result<Base, DbError>,
}

/// What the relay says.
enum Relay {
    /// `--http off`.
    NotAsked,
    Silent {
        address: SocketAddr,
        why: NoAnswer,
    },
    Says {
        address: SocketAddr,
        health: Box<Health>,
    },
}

impl Relay {
    fn health(&self) -> Option<&Health> {
        match self {
            Relay::NotAsked | Relay::Silent { .. } => None,
            Relay::Says { health, .. } => Some(health),
        }
    }
}

/// What the database says.
struct Base {
    seen: Seen,
    /// The table whose rows the slot carries; `None`: it was dropped.
    table: Option<TableName>,
    waiting: Answer<Option<Vec<Waiting>>>,
    /// Delivered rows may be among those that wait: nobody tells when the last one was delivered.
    is_at_most: bool,
    wal_bytes_per_second: Option<f64>,
    /// `None`: the table is not registered.
    letters: Answer<Option<Standing>>,
}

async fn ask(http: Http) -> Relay {
    let address = match http {
        Http::Off => return Relay::NotAsked,
        Http::Default(address) | Http::At(address) => address,
    };
    let body = match fetch::get(address, "/readyz", RELAY_WITHIN).await {
        Ok(body) => body,
        Err(why) => return Relay::Silent { address, why },
    };
    match serde_json::from_slice(&body) {
        Ok(health) => Relay::Says {
            address,
            health: Box::new(health),
        },
        Err(_) => Relay::Silent {
            address,
            why: NoAnswer::Away("what answers there is no walrelay of this version".to_owned()),
        },
    }
}

async fn session(config: &StatusConfig) -> Result<Side, DbError> {
    let side = Side::connect(&config.source.database, None).await?;
    side.run(STATEMENT_TIMEOUT).await?;
    Ok(side)
}

async fn look(side: &Side, config: &StatusConfig, relay: &Relay) -> Result<Base, DbError> {
    let looked = tokio::time::timeout(DATABASE_WITHIN, look_at(side, config, relay)).await;
    looked.map_err(|_| {
        DbError::Unreachable(format!(
            "the server did not answer within {} s",
            DATABASE_WITHIN.as_secs()
        ))
    })?
}

async fn look_at(side: &Side, config: &StatusConfig, relay: &Relay) -> Result<Base, DbError> {
    let source = &config.source;
    let client = &*side.client;
    let began = Instant::now();
    // Fails on a standby, which is said elsewhere.
    let first = standing::wal_end(client).await.ok();
    let seen = preflight::look(client, source).await?;
    if let Some(error) = seen.broken() {
        return Err(error.clone());
    }
    let told = relay
        .health()
        .filter(|health| judge::stranger(config, Some(&seen), health).is_none());
    let delivered = told
        .and_then(|health| health.progress.delivered_commit_time.clone())
        .or_else(|| stored_stop(&seen, &source.slot));
    let swapped = seen.registry.as_ref().ok();
    let table = match swapped.and_then(|registry| registry.swapped(&source.slot)) {
        Some(old) => old.cloned(),
        None => Some(source.table.clone()),
    };
    let waiting = match &table {
        Some(table) => {
            let (mapping, slot) = (&config.mapping, &source.slot);
            standing::waiting(client, table, mapping, slot, delivered.as_deref()).await
        }
        None => Ok(None),
    };
    let letters = match judge::registered(&seen, &source.slot) {
        Some(row) => Standing::of(client, row.table_oid).await.map(Some),
        None => Ok(None),
    };
    let slot = seen.slot(&source.slot);
    let rate = told.and_then(|health| health.progress.wal_bytes_per_second);
    let is_limited = slot.is_some_and(|slot| slot.safe_wal_size.is_some());
    let wal_bytes_per_second = match (rate, first) {
        (Some(rate), _) => Some(rate),
        (None, Some(first)) if is_limited => {
            tokio::time::sleep(RATE_OVER.saturating_sub(began.elapsed())).await;
            let last = standing::wal_end(client).await.ok();
            last.map(|last| per_second(last.0.saturating_sub(first.0), began.elapsed()))
        }
        (None, _) => None,
    };
    let is_all_confirmed = slot.is_some_and(|slot| slot.lag_bytes == Some(0));
    let waiting = match waiting {
        Ok(_) if is_all_confirmed => Ok(Some(Vec::new())),
        waiting => waiting,
    };
    Ok(Base {
        seen,
        table,
        waiting,
        is_at_most: delivered.is_none(),
        wal_bytes_per_second,
        letters,
    })
}

fn per_second(bytes: u64, over: Duration) -> f64 {
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    f64::from(bytes) / over.as_secs_f64().max(0.001)
}

/// When the last transaction before a clean stop was committed.
fn stored_stop(seen: &Seen, slot: &str) -> Option<String> {
    let last = judge::registered(seen, slot)?.stop.as_ref()?.last?;
    Some(judge::rfc3339(last.commit_time))
}

/// For messages of this command alone.
fn unreachable(error: &DbError, config: &StatusConfig) -> Failure {
    connect::failure(error, &config.source.database)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Finding;
    use crate::lsn::PgTimestamp;

    #[test]
    fn a_rate_is_bytes_over_seconds() {
        assert!((per_second(3_000, Duration::from_millis(1_500)) - 2_000.0).abs() < 0.01);
        assert!(per_second(u64::MAX, Duration::ZERO).is_finite());
    }

    #[test]
    fn a_decision_comes_before_what_is_only_down() {
        let down = Finding::failed("leader", "nobody leads", "start it");
        let halted = Finding::failed("halted event", "event 7", "decide").halted();
        let fine = Finding::ok("slot", "there");
        let of = |findings: Vec<Finding>| failure(&[Group::new("all", findings)]);
        let both = of(vec![down.clone(), halted]).expect("it failed");
        assert_eq!((both.exit, both.remedy.as_str()), (Exit::Halted, "decide"));
        let one = of(vec![fine.clone(), down]).expect("it failed");
        assert_eq!((one.exit, one.remedy.as_str()), (Exit::Refused, "start it"));
        assert_eq!(of(vec![fine]), None);
    }

    #[test]
    fn a_stored_time_is_shown_in_utc() {
        assert_eq!(
            judge::rfc3339(PgTimestamp(0)),
            "2000-01-01T00:00:00.000000Z"
        );
    }
}
