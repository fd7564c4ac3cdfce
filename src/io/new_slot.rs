//! A new slot, as `init` and a heal make it alike: in a transaction whose snapshot it leaves from,
//! so that every row is either visible in that snapshot or in the stream.

use std::time::Duration;

use super::catalog::coverage_sql;
use super::slot::Slot;
use super::sql::{quote_ident, quote_literal, quote_table};
use crate::config::Source;
use crate::error::DbError;

/// What the slot left from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftFrom {
    /// `pg_current_snapshot()`: cannot be had later.
    pub snapshot: String,
    /// What the publication covered, as JSON.
    pub coverage: String,
}

/// Begins the transaction that [`create_slot`] wants to be the first statement of.
///
/// # Errors
/// Only the conversation's.
pub async fn begin(slot: &mut Slot, lock_timeout: Duration) -> Result<(), DbError> {
    // statement_timeout does not bound slot creation, lock_timeout does, a wait at a time.
    slot.simple_query(&format!(
        "set lock_timeout = '{}ms'; set statement_timeout = 0; \
         set search_path = pg_catalog; set row_security = off",
        lock_timeout.as_millis()
    ))
    .await?;
    slot.simple_query("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
        .await
        .map(|_| ())
}

/// The replication command that makes the slot. The option list is of 15; failover slots of 17.
#[must_use]
pub fn create_slot(slot: &str, version_num: i32) -> String {
    let failover = if version_num >= 170_000 {
        ", FAILOVER true"
    } else {
        ""
    };
    format!(
        "CREATE_REPLICATION_SLOT {} LOGICAL pgoutput (SNAPSHOT 'use'{failover})",
        quote_ident(slot)
    )
}

/// Snapshot and coverage, in the slot's own transaction.
///
/// # Errors
/// Only the conversation's.
pub async fn left_from(slot: &mut Slot, source: &Source) -> Result<LeftFrom, DbError> {
    let coverage = coverage_sql(
        &quote_literal(&quote_table(&source.table)),
        &quote_literal(&source.publication),
    );
    let rows = slot
        .simple_query(&format!(
            "select pg_catalog.pg_current_snapshot()::text, ({coverage})::text"
        ))
        .await?;
    Ok(LeftFrom {
        snapshot: readable_snapshot(&column(&rows, 0, "pg_current_snapshot")?),
        coverage: column(&rows, 1, "coverage")?,
    })
}

/// A column of the first row.
///
/// # Errors
/// There is no such value.
pub fn column(rows: &[Vec<Option<String>>], at: usize, name: &str) -> Result<String, DbError> {
    rows.first()
        .and_then(|row| row.get(at))
        .and_then(Clone::clone)
        .ok_or_else(|| DbError::Protocol(format!("the answer lacks {name}")))
}

/// A snapshot as the server prints it, made such that the server reads it. The one that a slot is
/// made from may have an xmin above its xmax, where transactions in between were rolled back: what
/// is below xmin is over, so that xmax may be said to be xmin.
fn readable_snapshot(text: &str) -> String {
    let mut parts = text.splitn(3, ':');
    let (Some(xmin), Some(xmax), Some(_)) = (parts.next(), parts.next(), parts.next()) else {
        return text.to_owned();
    };
    match (xmin.parse::<u64>(), xmax.parse::<u64>()) {
        (Ok(low), Ok(high)) if low > high => format!("{low}:{low}:"),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_whose_xmin_is_above_its_xmax_is_made_readable() {
        assert_eq!(readable_snapshot("34798:34796:"), "34798:34798:");
        assert_eq!(readable_snapshot("7:9:7,8"), "7:9:7,8");
        assert_eq!(readable_snapshot("7:7:"), "7:7:");
        assert_eq!(readable_snapshot("nonsense"), "nonsense");
    }

    #[test]
    fn the_failover_option_waits_for_17() {
        assert_eq!(
            create_slot("w", 160_011),
            "CREATE_REPLICATION_SLOT \"w\" LOGICAL pgoutput (SNAPSHOT 'use')"
        );
        assert!(create_slot("w", 170_000).ends_with("(SNAPSHOT 'use', FAILOVER true)"));
    }
}
