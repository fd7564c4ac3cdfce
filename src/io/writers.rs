//! Who still writes to an outbox, and whether a slot has everything: what `walrelay drain` looks at.

use std::time::Duration;

use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use super::registry::{get, lsn};
use super::side::db_error;
use super::sql::{outside_of, quote_ident, quote_table};
use crate::config::TableName;
use crate::error::DbError;
use crate::lsn::Lsn;

/// New rows are counted no further than this.
const ROWS_MAX: i64 = 10_000;

/// A moment: whatever its snapshot shows was committed below its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    pub position: Lsn,
    pub snapshot: String,
}

/// Takes a mark. The position is that of a message that no stream carries, in a transaction of its
/// own: its commit flushes the WAL up to there, so that a quiet server sends that far, too.
///
/// # Errors
/// Only the conversation's.
pub async fn mark(client: &Client) -> Result<Mark, DbError> {
    let row = client
        .query_one(
            "select s.snapshot::text, pg_catalog.pg_logical_emit_message(true, 'walrelay', 'drain') \
             from (select pg_catalog.pg_current_snapshot() as snapshot) s",
            &[],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Mark {
        position: Lsn(u64::from(get::<PgLsn>(&row, 1)?)),
        snapshot: get(&row, 0)?,
    })
}

/// The slot's confirmed_flush_lsn; `None`: there is no such slot.
///
/// # Errors
/// Only the conversation's.
pub async fn confirmed(client: &Client, slot: &str) -> Result<Option<Lsn>, DbError> {
    let row = client
        .query_opt(
            "select confirmed_flush_lsn from pg_catalog.pg_replication_slots \
             where slot_name = $1::text",
            &[&slot],
        )
        .await
        .map_err(|e| db_error(&e))?;
    row.map_or(Ok(None), |row| lsn(&row, 0))
}

/// Rows that were committed after a mark. `xid` is the column of the transaction's id.
///
/// # Errors
/// 42501, or the conversation's.
pub async fn rows_since(
    client: &Client,
    table: &TableName,
    xid: &str,
    mark: &Mark,
) -> Result<i64, DbError> {
    let sql = format!(
        "select pg_catalog.count(*) from (select from {} where {} limit {ROWS_MAX}) r",
        quote_table(table),
        outside_of(&quote_ident(xid), "$1::text::pg_snapshot")
    );
    let row = client.query_one(&sql, &[&mark.snapshot]).await;
    get(&row.map_err(|e| db_error(&e))?, 0)
}

/// Transactions of this database that have written and are not over: each may still commit an
/// event. Those of `apart` and of this session do not count. For a person.
///
/// # Errors
/// Only the conversation's.
pub async fn open_transactions(
    client: &Client,
    table_oid: u32,
    apart: &[i32],
) -> Result<Vec<String>, DbError> {
    let rows = client
        .query(
            "select a.pid, null::text, a.usename::text, a.application_name, host(a.client_addr), \
             extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::float8, \
             exists (select from pg_catalog.pg_locks l where l.pid = a.pid and l.granted \
               and l.locktype = 'relation' and l.mode in ('RowExclusiveLock', 'ExclusiveLock', \
                 'ShareRowExclusiveLock', 'AccessExclusiveLock') \
               and (l.relation = $1 or l.relation in (select i.inhrelid from pg_catalog.pg_inherits i \
                 where i.inhparent = $1))) \
             from pg_catalog.pg_stat_activity a \
             where a.datname = pg_catalog.current_database() and a.backend_xid is not null \
             and a.pid <> pg_catalog.pg_backend_pid() and a.pid <> all($2) \
             and a.backend_type is distinct from 'autovacuum worker' \
             union all \
             select null, p.gid, p.owner::text, null, null, \
             extract(epoch from pg_catalog.clock_timestamp() - p.prepared)::float8, false \
             from pg_catalog.pg_prepared_xacts p where p.database = pg_catalog.current_database() \
             order by 6 desc nulls last limit 20",
            &[&table_oid, &apart],
        )
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter()
        .map(|row| {
            let mut who = match (get::<Option<i32>>(row, 0)?, get::<Option<String>>(row, 1)?) {
                (_, Some(gid)) => format!("prepared transaction '{gid}'"),
                (pid, None) => format!("the transaction of pid {}", pid.unwrap_or_default()),
            };
            for (label, column) in [("user", 2), ("application_name", 3), ("client", 4)] {
                let value = get::<Option<String>>(row, column)?;
                if let Some(value) = value.filter(|v| !v.is_empty()) {
                    who.push_str(&format!(", {label} {value}"));
                }
            }
            if let Some(age) = get::<Option<f64>>(row, 5)? {
                let age = Duration::try_from_secs_f64(age.max(0.0)).unwrap_or_default();
                who.push_str(&format!(", open for {} s", age.as_secs()));
            }
            if get(row, 6)? {
                who.push_str(", which writes to the outbox");
            }
            Ok(who)
        })
        .collect()
}
