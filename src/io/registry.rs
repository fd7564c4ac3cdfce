//! The registry (`walrelay.relay`) and what a relay asks about its own slot, lock and rivals.
//!
//! # Invariants
//! Everything is qualified and every value is a parameter: the side connection's `search_path`
//! holds nothing but `pg_catalog`. Writes are single statements on the session that holds the
//! leader's lock, whose `synchronous_commit` is on.

use std::time::Duration;

use tokio_postgres::types::{PgLsn, ToSql};
use tokio_postgres::{Client, Row, Statement};

use super::preflight::span;
use super::side::db_error;
pub use super::slot_view::{Holder, SlotState, holder, slot_state};
use crate::config::TableName;
use crate::error::DbError;
use crate::lsn::{Lsn, PgTimestamp, Triple, Xid};

/// First key of the leader's advisory lock ("walr" in ASCII); the second is the table's oid.
const LOCK_CLASS: i32 = i32::from_be_bytes(*b"walr");

/// Assignments that leave no stored stop.
pub(super) const NO_STOP: &str = "stop_commit_lsn = null, stop_xid = null, \
    stop_commit_time = null, stop_reported = null, stop_complete = null, stop_open = null";

/// Assignments that leave no halted event.
pub(super) const NO_HALT: &str =
    "halted_event = null, halted_reason = null, halted_generation = null";

/// First key of the lock that every running instance shares, so that it can be counted ("wals").
const INSTANCE_CLASS: i32 = i32::from_be_bytes(*b"wals");

/// One row of `walrelay.relay`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    pub table_oid: u32,
    /// What the table was called when it was registered, as `show_table` has it.
    pub table_name: String,
    pub slot: String,
    pub publication: String,
    /// `None` until the first slot was made.
    pub system_identifier: Option<String>,
    pub timeline: Option<i32>,
    pub generation: i64,
    pub consistent_point: Option<Lsn>,
    pub leader: Option<String>,
    pub stop: Option<Stop>,
    pub halted: Option<Halted>,
    /// A slot was being made and the row does not describe it yet.
    pub intent: bool,
    /// What `--existing` was when the intent was committed.
    pub intent_existing: Option<String>,
    /// `walrelay drop` was here: there is no slot, and that is as it should be.
    pub dropped: Option<Dropped>,
    pub made_table: bool,
    /// A gap is being healed.
    pub heals: bool,
}

/// What `walrelay drop` left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// It was interrupted: a slot of that name is still the one to be dropped.
    pub is_half_done: bool,
    /// For a person.
    pub since: String,
    pub by: String,
}

/// The last clean stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stop {
    /// W: the last transaction of the contiguous delivered prefix; `None` when none was delivered.
    pub last: Option<Triple>,
    /// Highest flush position reported on this slot.
    pub reported: Lsn,
    /// Whether all that was taken had been delivered.
    pub complete: bool,
    /// A transaction of which only the beginning was taken, and delivered.
    pub open: Option<OpenStop>,
}

/// Where in a transaction a stop was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenStop {
    pub triple: Triple,
    /// Inserts of it that are delivered.
    pub count: usize,
    /// The last one's.
    pub event_id: String,
}

/// The event that stopped the relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Halted {
    pub event_id: String,
    pub reason: String,
}

/// What the registry knows of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    NoTable,
    /// Schema `walrelay` does not exist here: `init` has not run.
    NotInitialised {
        table_oid: u32,
    },
    NoRow {
        table_oid: u32,
    },
    Row(Box<Registered>),
}

/// What is the server, as far as an ordinary session can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// `server_version_num`: 150018 is 15.18.
    pub version_num: i32,
    pub encoding: String,
    pub in_recovery: bool,
    pub wal_level: String,
    /// Off: what was committed, and relayed, may be gone after a crash of the machine.
    pub fsync: bool,
    /// `None` where EXECUTE on `pg_control_system()` was taken from public.
    pub system_identifier: Option<String>,
    /// Of the WAL being written; `None` in recovery. `pg_control_checkpoint()` would still show the
    /// old one between a promotion and its first checkpoint.
    pub timeline: Option<i32>,
    /// Since when the server is up, microseconds since 2000-01-01.
    pub started: PgTimestamp,
}

/// Where a table's registry row is, if anywhere.
///
/// # Errors
/// 42501 where the role lacks USAGE on schema `walrelay` or SELECT on `walrelay.relay`.
pub async fn load_by_table(client: &Client, table: &TableName) -> Result<Found, DbError> {
    let Some(table_oid) = table_oid(client, table).await? else {
        return Ok(Found::NoTable);
    };
    if !is_initialised(client).await? {
        return Ok(Found::NotInitialised { table_oid });
    }
    let rows = select(client, "table_oid = $1", &[&table_oid]).await?;
    Ok(match rows.into_iter().next() {
        Some(row) => Found::Row(Box::new(row)),
        None => Found::NoRow { table_oid },
    })
}

/// The rows of a table, of a slot and of a publication: at most three.
///
/// # Errors
/// As [`load_by_table`]; 3F000 or 42P01 where schema `walrelay` does not exist.
pub async fn load_related(
    client: &Client,
    table_oid: Option<u32>,
    slot: &str,
    publication: &str,
) -> Result<Vec<Registered>, DbError> {
    let condition = "table_oid = $1 or slot_name = $2 or publication = $3";
    select(client, condition, &[&table_oid, &slot, &publication]).await
}

/// A table's oid by its exact name; partitioned tables and views count, indexes do not.
///
/// # Errors
/// Only the conversation's.
pub async fn table_oid(client: &Client, table: &TableName) -> Result<Option<u32>, DbError> {
    let row = client
        .query_opt(
            "select c.oid from pg_catalog.pg_class c \
             join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
             where n.nspname = $1::text and c.relname = $2::text \
             and c.relkind in ('r', 'p', 'v', 'm', 'f')",
            &[&table.schema, &table.name],
        )
        .await
        .map_err(|e| db_error(&e))?;
    row.map(|row| get(&row, 0)).transpose()
}

/// Whether `init` has been here.
///
/// # Errors
/// Only the conversation's.
pub async fn is_initialised(client: &Client) -> Result<bool, DbError> {
    let row = client
        .query_one(
            "select exists (select from pg_catalog.pg_class c \
             join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
             where n.nspname = 'walrelay' and c.relname = 'relay')",
            &[],
        )
        .await
        .map_err(|e| db_error(&e))?;
    get(&row, 0)
}

async fn select(
    client: &Client,
    condition: &str,
    params: &[&(dyn ToSql + Sync)],
) -> Result<Vec<Registered>, DbError> {
    let sql = format!(
        "select table_oid, slot_name, publication, system_identifier, timeline, slot_generation, \
         consistent_point, leader, stop_commit_lsn, stop_xid, stop_commit_time, stop_reported, \
         stop_complete, halted_event, halted_reason, halted_generation, intent is not null, \
         intent->>'existing', made_table, stop_open::text, table_name, \
         heal is not null, intent->>'action', intent->>'since', intent->>'by' \
         from walrelay.relay where {condition}"
    );
    let rows = client.query(&sql, params).await.map_err(|e| db_error(&e))?;
    rows.iter().map(registered).collect()
}

fn registered(row: &Row) -> Result<Registered, DbError> {
    let generation: i64 = get(row, 5)?;
    let halted = match (
        get::<Option<String>>(row, 13)?,
        get::<Option<i64>>(row, 15)?,
    ) {
        // A new slot generation forgets the halted event.
        (Some(event_id), Some(halted_in)) if halted_in == generation => Some(Halted {
            event_id,
            reason: get::<Option<String>>(row, 14)?.unwrap_or_default(),
        }),
        _ => None,
    };
    Ok(Registered {
        table_oid: get(row, 0)?,
        table_name: get(row, 20)?,
        slot: get(row, 1)?,
        publication: get(row, 2)?,
        system_identifier: get(row, 3)?,
        timeline: get(row, 4)?,
        generation,
        consistent_point: lsn(row, 6)?,
        leader: get(row, 7)?,
        stop: stop(row)?,
        halted,
        intent: get(row, 16)?,
        intent_existing: get(row, 17)?,
        dropped: dropped(row)?,
        made_table: get(row, 18)?,
        heals: get(row, 21)?,
    })
}

fn dropped(row: &Row) -> Result<Option<Dropped>, DbError> {
    let action: Option<String> = get(row, 22)?;
    let is_half_done = match action.as_deref() {
        Some("drop") => true,
        Some("dropped") => false,
        Some(_) | None => return Ok(None),
    };
    Ok(Some(Dropped {
        is_half_done,
        since: get::<Option<String>>(row, 23)?.unwrap_or_default(),
        by: get::<Option<String>>(row, 24)?.unwrap_or_default(),
    }))
}

fn stop(row: &Row) -> Result<Option<Stop>, DbError> {
    let Some(reported) = lsn(row, 11)? else {
        return Ok(None);
    };
    let commit_lsn = lsn(row, 8)?;
    let xid: Option<i64> = get(row, 9)?;
    let commit_time: Option<i64> = get(row, 10)?;
    let last = match (commit_lsn, xid.map(u32::try_from), commit_time) {
        (Some(commit_lsn), Some(Ok(xid)), Some(commit_time)) => Some(Triple {
            commit_lsn,
            xid: Xid(xid),
            commit_time: PgTimestamp(commit_time),
        }),
        _ => None,
    };
    Ok(Some(Stop {
        last,
        reported,
        complete: get::<Option<bool>>(row, 12)?.unwrap_or(false),
        open: get::<Option<String>>(row, 19)?
            .as_deref()
            .and_then(open_stop),
    }))
}

/// `stop_open` as [`OpenStop::to_json`] wrote it.
fn open_stop(json: &str) -> Option<OpenStop> {
    let json: serde_json::Value = serde_json::from_str(json).ok()?;
    let lsn = json["commit_lsn"].as_str()?.parse().ok()?;
    Some(OpenStop {
        triple: Triple {
            commit_lsn: lsn,
            xid: Xid(u32::try_from(json["xid"].as_u64()?).ok()?),
            commit_time: PgTimestamp(json["commit_time"].as_i64()?),
        },
        count: usize::try_from(json["count"].as_u64()?).ok()?,
        event_id: json["event_id"].as_str()?.to_owned(),
    })
}

impl OpenStop {
    fn to_json(&self) -> String {
        serde_json::json!({
            "commit_lsn": self.triple.commit_lsn.to_string(),
            "xid": self.triple.xid.0,
            "commit_time": self.triple.commit_time.0,
            "count": self.count,
            "event_id": self.event_id,
        })
        .to_string()
    }
}

/// Is the server up for so short a time that the leader it had may still be on its way back?
/// Whoever `has_lost` a session counts from the present one: a recovery is part of the postmaster's
/// age, and nobody can connect in it.
///
/// # Errors
/// Only the conversation's.
pub async fn is_young(client: &Client, has_lost: bool) -> Result<bool, DbError> {
    let row = client
        .query_one(
            "select pg_catalog.clock_timestamp() - case when $1 then \
               (select a.backend_start from pg_catalog.pg_stat_activity a \
                where a.pid = pg_catalog.pg_backend_pid()) \
             else pg_catalog.pg_postmaster_start_time() end < interval '3 seconds'",
            &[&has_lost],
        )
        .await
        .map_err(|e| db_error(&e))?;
    get(&row, 0)
}

/// Takes the leader's lock of a table if it is free. It is this session's until it ends or
/// [`unlock`]; taking it twice needs unlocking twice.
///
/// # Errors
/// Only the conversation's.
pub async fn try_lock(client: &Client, table_oid: u32) -> Result<bool, DbError> {
    let row = client
        .query_one(
            "select pg_catalog.pg_try_advisory_lock($1, $2)",
            &[&LOCK_CLASS, &lock_key(table_oid)],
        )
        .await
        .map_err(|e| db_error(&e))?;
    get(&row, 0)
}

/// Shows this session as one of an instance that runs, leader or not: until it ends.
///
/// # Errors
/// Only the conversation's.
pub async fn show_instance(client: &Client, table_oid: u32) -> Result<(), DbError> {
    client
        .query_one(
            "select pg_catalog.pg_try_advisory_lock_shared($1, $2)",
            &[&INSTANCE_CLASS, &lock_key(table_oid)],
        )
        .await
        .map(|_| ())
        .map_err(|e| db_error(&e))
}

/// An instance that runs, as its side session shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    pub session: Holder,
    pub is_leader: bool,
    /// Age of the session; `None` where the role may not see it.
    pub age: Option<Duration>,
}

impl std::fmt::Display for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let role = if self.is_leader {
            "the leader"
        } else {
            "a standby"
        };
        write!(f, "{role}: {}", self.session)?;
        match self.age {
            Some(age) => write!(f, ", connected for {}", span(age)),
            None => Ok(()),
        }
    }
}

/// Every instance of a table, by the locks that their sessions hold.
///
/// # Errors
/// Only the conversation's.
pub async fn instances(client: &Client, table_oid: Option<u32>) -> Result<Vec<Instance>, DbError> {
    let rows = client
        .query(
            "select l.pid, pg_catalog.bool_or(l.classid = $1), pg_catalog.min(a.usename::text), \
             pg_catalog.min(a.application_name), pg_catalog.min(host(a.client_addr)), \
             pg_catalog.min(extract(epoch from pg_catalog.clock_timestamp() - a.backend_start)::float8) \
             from pg_catalog.pg_locks l \
             left join pg_catalog.pg_stat_activity a on a.pid = l.pid \
             where l.locktype = 'advisory' and l.classid in ($1, $2) and l.objsubid = 2 and l.granted \
             and l.objid = $3 \
             and l.database = (select oid from pg_catalog.pg_database \
               where datname = pg_catalog.current_database()) \
             group by l.pid order by l.pid",
            &[
                &class_oid(LOCK_CLASS),
                &class_oid(INSTANCE_CLASS),
                &table_oid,
            ],
        )
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter()
        .map(|row| {
            let age: Option<f64> = get(row, 5)?;
            Ok(Instance {
                session: Holder {
                    pid: get(row, 0)?,
                    user: get(row, 2)?,
                    application_name: get(row, 3)?,
                    client_addr: get(row, 4)?,
                    state_age: None,
                },
                is_leader: get(row, 1)?,
                age: age.map(|seconds| Duration::from_secs_f64(seconds.max(0.0))),
            })
        })
        .collect()
}

/// Gives the leader's lock back.
///
/// # Errors
/// Only the conversation's.
pub async fn unlock(client: &Client, table_oid: u32) -> Result<bool, DbError> {
    let row = client
        .query_one(
            "select pg_catalog.pg_advisory_unlock($1, $2)",
            &[&LOCK_CLASS, &lock_key(table_oid)],
        )
        .await
        .map_err(|e| db_error(&e))?;
    get(&row, 0)
}

/// An oid's bits as the signed number that the lock functions want.
fn lock_key(table_oid: u32) -> i32 {
    i32::from_ne_bytes(table_oid.to_ne_bytes())
}

/// The same bits as `pg_locks` shows them: `classid` and `objid` are oids there.
/// The lock's class as `pg_locks` has it.
pub(super) fn lock_class_oid() -> u32 {
    class_oid(LOCK_CLASS)
}

fn class_oid(class: i32) -> u32 {
    u32::from_ne_bytes(class.to_ne_bytes())
}

/// Writes this process's id as the leader's and returns the one that stood there, in one statement,
/// and how often the lead has changed hands by now.
/// A stop that is stored is complete no more: whoever finds it after a crash of this process must
/// look for what it has delivered.
/// `Err` with 42501 where the role may not write schema `walrelay`.
///
/// # Errors
/// 42501, or the conversation's.
pub async fn claim_lead(
    client: &Client,
    table_oid: u32,
    process_id: &str,
) -> Result<(Option<String>, i64), DbError> {
    let row = client
        .query_opt(
            "with before as (select table_oid, leader from walrelay.relay where table_oid = $1 for update) \
             update walrelay.relay r set leader = $2, updated_at = now(), \
             lead_changes = lead_changes + (before.leader is distinct from $2)::int, \
             stop_complete = case when stop_reported is not null then false end from before \
             where r.table_oid = before.table_oid returning before.leader, r.lead_changes",
            &[&table_oid, &process_id],
        )
        .await
        .map_err(|e| db_error(&e))?;
    match row {
        Some(row) => Ok((get(&row, 0)?, get(&row, 1)?)),
        None => Err(DbError::Protocol(format!(
            "walrelay.relay has no row of table oid {table_oid} any more"
        ))),
    }
}

/// Stores a clean stop.
///
/// # Errors
/// 42501 where the role may not write schema `walrelay`, or the conversation's.
pub async fn store_stop(client: &Client, table_oid: u32, stop: &Stop) -> Result<(), DbError> {
    let commit_lsn = stop.last.map(|t| PgLsn::from(t.commit_lsn.0));
    let xid = stop.last.map(|t| i64::from(t.xid.0));
    let commit_time = stop.last.map(|t| t.commit_time.0);
    execute(
        client,
        "update walrelay.relay set stop_commit_lsn = $2, stop_xid = $3, stop_commit_time = $4, \
         stop_reported = $5, stop_complete = $6, stop_open = $7::text::jsonb, updated_at = now() where table_oid = $1",
        &[
            &table_oid,
            &commit_lsn,
            &xid,
            &commit_time,
            &PgLsn::from(stop.reported.0),
            &stop.complete,
            &stop.open.as_ref().map(OpenStop::to_json),
        ],
    )
    .await
}

/// Erases the stored stop: before the first status that passes it.
///
/// # Errors
/// As [`store_stop`].
pub async fn erase_stop(client: &Client, table_oid: u32) -> Result<(), DbError> {
    execute(
        client,
        &format!("update walrelay.relay set {NO_STOP}, updated_at = now() where table_oid = $1"),
        &[&table_oid],
    )
    .await
}

/// Remembers the event that stopped the relay, for the present slot generation.
///
/// # Errors
/// As [`store_stop`].
pub async fn store_halted(client: &Client, table_oid: u32, halted: &Halted) -> Result<(), DbError> {
    execute(
        client,
        "update walrelay.relay set halted_event = $2, halted_reason = $3, \
         halted_generation = slot_generation, updated_at = now() where table_oid = $1",
        &[&table_oid, &halted.event_id, &halted.reason],
    )
    .await
}

/// Forgets the halted event: it was delivered.
///
/// # Errors
/// As [`store_stop`].
pub async fn clear_halted(client: &Client, table_oid: u32) -> Result<(), DbError> {
    execute(
        client,
        &format!("update walrelay.relay set {NO_HALT}, updated_at = now() where table_oid = $1"),
        &[&table_oid],
    )
    .await
}

async fn execute(
    client: &Client,
    sql: &str,
    params: &[&(dyn ToSql + Sync)],
) -> Result<(), DbError> {
    client
        .execute(sql, params)
        .await
        .map(|_| ())
        .map_err(|e| db_error(&e))
}

/// What [`Prober::ask`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    pub backend_pid: i32,
    pub lock_held: bool,
    pub slot_active_pid: Option<i32>,
    /// Grows with each change of the dead letters by hand.
    pub touched: i64,
}

/// The leader's question of each second, prepared once on its session: who am I, is the lock mine,
/// who holds the slot, has somebody touched the dead letters. The first three from the server's
/// shared memory, the last from the registry's row by its primary key.
pub struct Prober {
    statement: Statement,
    table_oid: u32,
    slot: String,
}

impl Prober {
    /// # Errors
    /// Only the conversation's.
    pub async fn prepare(client: &Client, table_oid: u32, slot: &str) -> Result<Self, DbError> {
        // The functions under the views: the views join catalogs that do not matter here. 16 gave
        // the slots' function no parameters to narrow it by; there are few slots.
        let statement = client
            .prepare(
                "select pg_catalog.pg_backend_pid(), \
                 exists (select from pg_catalog.pg_lock_status() l where l.locktype = 'advisory' \
                   and l.pid = pg_catalog.pg_backend_pid() and l.classid = $1 and l.objid = $2 \
                   and l.objsubid = 2 and l.granted), \
                 (select s.active_pid from pg_catalog.pg_get_replication_slots() s \
                   where s.slot_name = $3), \
                 coalesce((select r.dead_letters_touched from walrelay.relay r \
                   where r.table_oid = $2), 0)",
            )
            .await
            .map_err(|e| db_error(&e))?;
        Ok(Prober {
            statement,
            table_oid,
            slot: slot.to_owned(),
        })
    }

    /// # Errors
    /// Only the conversation's: for a leader, any is a wrong answer.
    pub async fn ask(&self, client: &Client) -> Result<Probe, DbError> {
        let row = client
            .query_one(
                &self.statement,
                &[&class_oid(LOCK_CLASS), &self.table_oid, &self.slot],
            )
            .await
            .map_err(|e| db_error(&e))?;
        Ok(Probe {
            backend_pid: get(&row, 0)?,
            lock_held: get(&row, 1)?,
            slot_active_pid: get(&row, 2)?,
            touched: get(&row, 3)?,
        })
    }
}

/// Ends a session. `false` when there is none of that pid.
///
/// # Errors
/// 42501 where this role may not.
pub async fn terminate(client: &Client, pid: i32) -> Result<bool, DbError> {
    let row = client
        .query_one("select pg_catalog.pg_terminate_backend($1)", &[&pid])
        .await
        .map_err(|e| db_error(&e))?;
    get(&row, 0)
}

/// # Errors
/// Only the conversation's.
pub async fn server(client: &Client) -> Result<Server, DbError> {
    let row = client
        .query_one(
            "select pg_catalog.current_setting('server_version_num')::int, \
             pg_catalog.current_setting('server_encoding'), pg_catalog.pg_is_in_recovery(), \
             pg_catalog.current_setting('wal_level'), \
             pg_catalog.current_setting('fsync')::bool, \
             pg_catalog.has_function_privilege('pg_catalog.pg_control_system()', 'execute'), \
             (extract(epoch from pg_catalog.pg_postmaster_start_time()) * 1000000)::int8, \
             case when not pg_catalog.pg_is_in_recovery() then ('x' || pg_catalog.substr( \
               pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8))::bit(32)::int end",
            &[],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let may_ask_control: bool = get(&row, 5)?;
    Ok(Server {
        version_num: get(&row, 0)?,
        encoding: get(&row, 1)?,
        in_recovery: get(&row, 2)?,
        wal_level: get(&row, 3)?,
        fsync: get(&row, 4)?,
        system_identifier: if may_ask_control {
            Some(system_identifier(client).await?)
        } else {
            None
        },
        timeline: get(&row, 7)?,
        started: PgTimestamp::from_unix_micros(get(&row, 6)?),
    })
}

async fn system_identifier(client: &Client) -> Result<String, DbError> {
    let row = client
        .query_one(
            "select system_identifier::text from pg_catalog.pg_control_system()",
            &[],
        )
        .await
        .map_err(|e| db_error(&e))?;
    get(&row, 0)
}

/// A column, or an error that says which one was not what we thought.
pub(crate) fn get<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a Row,
    column: usize,
) -> Result<T, DbError> {
    row.try_get(column).map_err(|e| {
        let name = row.columns().get(column).map_or("?", |c| c.name());
        DbError::Protocol(format!("column {column} ({name}): {e}"))
    })
}

pub(super) fn lsn(row: &Row, column: usize) -> Result<Option<Lsn>, DbError> {
    Ok(get::<Option<PgLsn>>(row, column)?.map(|lsn| Lsn(u64::from(lsn))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_key_keeps_every_bit_of_a_large_oid() {
        assert_eq!(lock_key(5), 5);
        assert_eq!(lock_key(u32::MAX), -1);
        assert_eq!(lock_key(1 << 31), i32::MIN);
    }

    #[test]
    fn the_lock_class_is_the_same_in_the_call_and_in_pg_locks() {
        assert_eq!(class_oid(LOCK_CLASS), 0x7761_6c72);
    }
}
