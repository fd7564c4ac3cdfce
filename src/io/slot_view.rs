//! A slot as `pg_replication_slots` shows it, and who holds it.

use std::time::Duration;

use tokio_postgres::{Client, Row};

use super::registry::{get, lsn};
use super::side::db_error;
use crate::error::DbError;
use crate::lsn::Lsn;

/// A row of `pg_replication_slots`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotState {
    /// `None` for a physical slot.
    pub plugin: Option<String>,
    /// `logical` or `physical`.
    pub slot_type: String,
    pub database: Option<String>,
    pub temporary: bool,
    pub two_phase: bool,
    pub active_pid: Option<i32>,
    pub confirmed_flush: Option<Lsn>,
    pub restart_lsn: Option<Lsn>,
    /// `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: Option<String>,
    /// `None` below 17, where there are no failover slots.
    pub failover: Option<bool>,
    pub synced: Option<bool>,
}

/// Who holds a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub pid: i32,
    pub user: Option<String>,
    pub application_name: Option<String>,
    /// `None` over a Unix socket, or where the role may not see it.
    pub client_addr: Option<String>,
    /// Since the last change of state; `None` where the role may not see it.
    pub state_age: Option<Duration>,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pid {}", self.pid)?;
        if let Some(user) = &self.user {
            write!(f, ", user \"{user}\"")?;
        }
        if let Some(name) = self.application_name.as_deref().filter(|n| !n.is_empty()) {
            write!(f, ", application_name \"{name}\"")?;
        }
        if let Some(addr) = &self.client_addr {
            write!(f, ", client {addr}")?;
        }
        Ok(())
    }
}

/// A slot, what it keeps, and who holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotLine {
    pub name: String,
    pub state: SlotState,
    pub holder: Option<Holder>,
    /// WAL from `restart_lsn` to the end; `None` where nothing is kept, and on a standby.
    pub retained_bytes: Option<i64>,
    /// From `confirmed_flush_lsn` to the end.
    pub lag_bytes: Option<i64>,
    /// What may still be written before the slot is at risk; `None`: no limit is set.
    pub safe_wal_size: Option<i64>,
}

/// Every slot of the cluster.
///
/// # Errors
/// Only the conversation's.
pub async fn all_slots(client: &Client) -> Result<Vec<SlotLine>, DbError> {
    let rows = client
        .query(
            "select s.plugin::text, s.slot_type, s.database::text, s.temporary, s.two_phase, \
             s.active_pid, s.confirmed_flush_lsn, s.restart_lsn, s.wal_status, \
             (pg_catalog.to_jsonb(s)->>'failover')::bool, (pg_catalog.to_jsonb(s)->>'synced')::bool, \
             s.slot_name::text, pg_catalog.pg_wal_lsn_diff(w.now, s.restart_lsn)::int8, \
             pg_catalog.pg_wal_lsn_diff(w.now, s.confirmed_flush_lsn)::int8, s.safe_wal_size, \
             a.usename::text, a.application_name, host(a.client_addr), \
             extract(epoch from pg_catalog.clock_timestamp() - a.state_change)::float8 \
             from pg_catalog.pg_replication_slots s \
             cross join (select case when not pg_catalog.pg_is_in_recovery() \
               then pg_catalog.pg_current_wal_lsn() end) w (now) \
             left join pg_catalog.pg_stat_activity a on a.pid = s.active_pid \
             order by s.restart_lsn nulls last",
            &[],
        )
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter().map(slot_line).collect()
}

fn slot_line(row: &Row) -> Result<SlotLine, DbError> {
    let state = state_of(row)?;
    let holder = match state.active_pid {
        Some(pid) => Some(Holder {
            pid,
            user: get(row, 15)?,
            application_name: get(row, 16)?,
            client_addr: get(row, 17)?,
            state_age: age(row, 18)?,
        }),
        None => None,
    };
    Ok(SlotLine {
        name: get(row, 11)?,
        state,
        holder,
        retained_bytes: get(row, 12)?,
        lag_bytes: get(row, 13)?,
        safe_wal_size: get(row, 14)?,
    })
}

fn age(row: &Row, column: usize) -> Result<Option<Duration>, DbError> {
    let seconds: Option<f64> = get(row, column)?;
    Ok(seconds.map(|seconds| Duration::from_secs_f64(seconds.max(0.0))))
}

/// A slot as `pg_replication_slots` shows it. Read as JSON, since 15 lacks columns that 17 has.
///
/// # Errors
/// Only the conversation's.
pub async fn slot_state(client: &Client, slot: &str) -> Result<Option<SlotState>, DbError> {
    let row = client
        .query_opt(
            "select plugin::text, slot_type, database::text, temporary, two_phase, active_pid, \
             confirmed_flush_lsn, restart_lsn, wal_status, \
             (pg_catalog.to_jsonb(s)->>'failover')::bool, (pg_catalog.to_jsonb(s)->>'synced')::bool \
             from pg_catalog.pg_replication_slots s where slot_name = $1::text",
            &[&slot],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let Some(row) = row else { return Ok(None) };
    state_of(&row).map(Some)
}

fn state_of(row: &Row) -> Result<SlotState, DbError> {
    Ok(SlotState {
        plugin: get(row, 0)?,
        slot_type: get(row, 1)?,
        database: get(row, 2)?,
        temporary: get(row, 3)?,
        two_phase: get(row, 4)?,
        active_pid: get(row, 5)?,
        confirmed_flush: lsn(row, 6)?,
        restart_lsn: lsn(row, 7)?,
        wal_status: get(row, 8)?,
        failover: get(row, 9)?,
        synced: get(row, 10)?,
    })
}

/// Who holds the slot; `None` when nobody does.
///
/// # Errors
/// Only the conversation's.
pub async fn holder(client: &Client, slot: &str) -> Result<Option<Holder>, DbError> {
    let row = client
        .query_opt(
            "select s.active_pid, a.usename::text, a.application_name, host(a.client_addr), \
             extract(epoch from pg_catalog.clock_timestamp() - a.state_change)::float8 \
             from pg_catalog.pg_replication_slots s \
             left join pg_catalog.pg_stat_activity a on a.pid = s.active_pid \
             where s.slot_name = $1::text and s.active_pid is not null",
            &[&slot],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let Some(row) = row else { return Ok(None) };
    Ok(Some(Holder {
        pid: get(&row, 0)?,
        user: get(&row, 1)?,
        application_name: get(&row, 2)?,
        client_addr: get(&row, 3)?,
        state_age: age(&row, 4)?,
    }))
}
