//! A slot as `pg_replication_slots` shows it, and who holds it.

use std::time::Duration;

use tokio_postgres::Client;

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
    Ok(Some(SlotState {
        plugin: get(&row, 0)?,
        slot_type: get(&row, 1)?,
        database: get(&row, 2)?,
        temporary: get(&row, 3)?,
        two_phase: get(&row, 4)?,
        active_pid: get(&row, 5)?,
        confirmed_flush: lsn(&row, 6)?,
        restart_lsn: lsn(&row, 7)?,
        wal_status: get(&row, 8)?,
        failover: get(&row, 9)?,
        synced: get(&row, 10)?,
    }))
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
        state_age: get::<Option<f64>>(&row, 4)?.map(|secs| Duration::from_secs_f64(secs.max(0.0))),
    }))
}
