//! Another session that has what this relay wants: the leader's lock, or the slot.

use std::time::Duration;

use tokio_postgres::Client;

use super::registry::{get, lock_class_oid};
use super::side::db_error;
use crate::error::DbError;

/// Whoever holds a table's lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rival {
    pub pid: i32,
    /// For a person: pid, user, where from, since when. The same for as long as it is the same.
    pub who: String,
    /// Idle for longer than a leader ever is. `false` also where this role may not see that.
    pub is_idle: bool,
}

/// Who holds the lock; `None`: it has just come free. A leader asks a question each second: it is
/// never idle for `idle_max`.
///
/// # Errors
/// Only the conversation's.
pub async fn of_lock(
    client: &Client,
    table_oid: u32,
    idle_max: Duration,
) -> Result<Option<Rival>, DbError> {
    let row = client
        .query_opt(
            "select l.pid, a.usename::text, a.application_name, pg_catalog.host(a.client_addr), \
             pg_catalog.to_char(a.backend_start at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'), \
             coalesce(a.state = 'idle' and a.state_change < pg_catalog.clock_timestamp() \
               - pg_catalog.make_interval(secs => $3), false) \
             from pg_catalog.pg_locks l \
             left join pg_catalog.pg_stat_activity a on a.pid = l.pid \
             where l.locktype = 'advisory' and l.classid = $1 and l.objid = $2 and l.objsubid = 2 \
             and l.granted and l.pid <> pg_catalog.pg_backend_pid() \
             and l.database = (select oid from pg_catalog.pg_database \
               where datname = pg_catalog.current_database()) limit 1",
            &[&lock_class_oid(), &table_oid, &idle_max.as_secs_f64()],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let Some(row) = row else { return Ok(None) };
    let pid: i32 = get(&row, 0)?;
    let mut who = format!("pid {pid}");
    for (label, column) in [
        ("user", 1),
        ("application_name", 2),
        ("client", 3),
        ("connected since", 4),
    ] {
        if let Some(value) = get::<Option<String>>(&row, column)?.filter(|v| !v.is_empty()) {
            who.push_str(&format!(", {label} {value}"));
        }
    }
    Ok(Some(Rival {
        pid,
        who,
        is_idle: get(&row, 5)?,
    }))
}

/// Waits on the server until the lock could be had, at most for `limit`: whoever waits there is
/// woken at once, whoever asks now and then is late by half of that. It is given back at once, for
/// it is to be taken by name. The time-out is caught where it is raised: the server logs nothing.
///
/// # Errors
/// Where plpgsql was taken away, or the conversation's.
pub async fn await_lock(client: &Client, table_oid: u32, limit: Duration) -> Result<(), DbError> {
    let (class, key) = (
        i32::from_ne_bytes(lock_class_oid().to_ne_bytes()),
        i32::from_ne_bytes(table_oid.to_ne_bytes()),
    );
    let sql = format!(
        "do $wait$ begin \
           set local lock_timeout = {}; \
           perform pg_catalog.pg_advisory_xact_lock({class}, {key}); \
         exception when lock_not_available then null; end $wait$",
        limit.as_millis()
    );
    client.batch_execute(&sql).await.map_err(|e| db_error(&e))
}
