//! The dead-letter table (`walrelay.dead_letter`) as the leader reads and writes it, on the session
//! that holds its lock.
//!
//! # Invariants
//! Every write is a single statement: the session is shared, and a transaction that stays open
//! would take in what others say on it. Texts of rows travel as bytes in the stream's encoding,
//! which is UTF-8, or SQL_ASCII where the database is that. Nothing is read but by an index.

pub mod by_hand;
mod park;
mod retry;

use std::error::Error;

use bytes::BytesMut;
use tokio_postgres::types::{FromSql, IsNull, PgLsn, ToSql, Type, to_sql_checked};
use tokio_postgres::{Client, Row};

pub use self::park::park;
pub use self::retry::{next_retry, settle};
use super::registry::get;
use super::side::db_error;
use crate::dead_letter::{EventKey, Parked, ParkedKey, Position, Reason, Settled, Tripped};
use crate::error::DbError;
use crate::lsn::{Lsn, PgTimestamp, Xid};

/// Rows of an answer: what the driver holds of them at a time.
const PAGE_ROWS: i64 = 10_000;

/// Settled rows that one statement deletes.
const FORGET_ROWS: i64 = 5_000;

/// The stream's encoding, in SQL.
pub(super) const ENCODING: &str = "(case pg_catalog.getdatabaseencoding() when 'SQL_ASCII' \
                                   then 'SQL_ASCII' else 'UTF8' end)::name";

/// A `timestamptz`, to the microsecond.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timestamptz(pub PgTimestamp);

impl ToSql for Timestamptz {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.extend_from_slice(&self.0.0.to_be_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }

    to_sql_checked!();
}

impl FromSql<'_> for Timestamptz {
    fn from_sql(_: &Type, raw: &[u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Timestamptz(PgTimestamp(i64::from_be_bytes(
            raw.try_into()?,
        ))))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

/// What the table knows, for a leader whose slot stands at `confirmed`. What is changed while this
/// reads shows in a `touched` that is no longer the probe's.
///
/// # Errors
/// 42501 where the role may not read the table; or the conversation's.
pub async fn load(
    client: &Client,
    table_oid: u32,
    generation: i64,
    confirmed: Lsn,
) -> Result<Parked, DbError> {
    let touched = touched(client, table_oid).await?;
    Ok(Parked {
        touched,
        last_id: last_id(client, table_oid).await?,
        keys: keys(client, table_oid).await?,
        settled: settled(client, table_oid, generation, confirmed).await?,
        tripped: tripped(client, table_oid).await?,
        is_keyless_retried: is_keyless_retried(client, table_oid).await?,
    })
}

async fn touched(client: &Client, table_oid: u32) -> Result<i64, DbError> {
    let row = client
        .query_one(
            "select coalesce((select dead_letters_touched from walrelay.relay \
             where table_oid = $1), 0)",
            &[&table_oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    get(&row, 0)
}

/// The parked keys, each by its first row. One probe of the index a key, however many rows a key
/// has: the next key is what follows the last one's hash.
async fn keys(client: &Client, table_oid: u32) -> Result<Vec<ParkedKey>, DbError> {
    let next = "select d.key_hash, d.aggregate_type, d.aggregate_id, d.slot_generation, \
                d.commit_lsn, d.ordinal from walrelay.dead_letter d \
                where d.table_oid = $1 and d.status = 'parked' and d.key_hash >";
    let first = "order by d.key_hash, d.slot_generation, d.commit_lsn, d.ordinal limit 1";
    let sql = format!(
        "with recursive heads as (({next} $2::text::uuid {first}) union all \
           select n.* from heads h cross join lateral ({next} h.key_hash {first}) n) \
         select pg_catalog.convert_to(h.aggregate_type, {ENCODING}), \
         pg_catalog.convert_to(h.aggregate_id, {ENCODING}), \
         h.slot_generation, h.commit_lsn, h.ordinal, \
         h.key_hash in (select m.key_hash from walrelay.dead_letter m where m.table_oid = $1 \
           and m.status = 'parked' and m.retry_requested_at is not null \
           and m.key_hash is not null), h.key_hash::text \
         from heads h limit $3"
    );
    let statement = client.prepare(&sql).await.map_err(|e| db_error(&e))?;
    let mut keys = Vec::new();
    // No key's hash, for all that is known of md5.
    let mut after = "00000000-0000-0000-0000-000000000000".to_owned();
    loop {
        let rows = client
            .query(&statement, &[&table_oid, &after, &PAGE_ROWS])
            .await
            .map_err(|e| db_error(&e))?;
        let Some(last) = rows.last() else {
            return Ok(keys);
        };
        after = get(last, 6)?;
        for row in &rows {
            keys.push(ParkedKey {
                key: EventKey {
                    aggregate_type: bytes(row, 0)?,
                    aggregate_id: bytes(row, 1)?.unwrap_or_default(),
                },
                from: position(row, 2)?,
                is_retried: get(row, 5)?,
            });
        }
    }
}

async fn settled(
    client: &Client,
    table_oid: u32,
    generation: i64,
    confirmed: Lsn,
) -> Result<Vec<Settled>, DbError> {
    let sql = format!(
        "select pg_catalog.convert_to(d.event_id, {ENCODING}), d.slot_generation, d.commit_lsn, d.id, \
         d.ordinal, d.xid \
         from walrelay.dead_letter d where d.table_oid = $1 \
         and (d.status <> 'parked' or d.aggregate_id is null) \
         and (d.slot_generation, d.commit_lsn, d.id) > ($2, $3, $4) \
         order by d.slot_generation, d.commit_lsn, d.id limit $5"
    );
    let statement = client.prepare(&sql).await.map_err(|e| db_error(&e))?;
    let mut ids = Vec::new();
    // Ids of rows begin at 1: the first page has all of `confirmed` itself.
    let mut after: (i64, PgLsn, i64) = (generation, PgLsn::from(confirmed.0), 0);
    loop {
        let rows = client
            .query(
                &statement,
                &[&table_oid, &after.0, &after.1, &after.2, &PAGE_ROWS],
            )
            .await
            .map_err(|e| db_error(&e))?;
        let Some(last) = rows.last() else {
            return Ok(ids);
        };
        after = (get(last, 1)?, get(last, 2)?, get(last, 3)?);
        for row in &rows {
            let xid: Option<i64> = get(row, 5)?;
            let ordinal: i64 = get(row, 4)?;
            ids.push(Settled {
                event_id: get(row, 0)?,
                position: Position {
                    generation: get(row, 1)?,
                    commit_lsn: Lsn(u64::from(get::<PgLsn>(row, 2)?)),
                    ordinal: u64::try_from(ordinal).unwrap_or_default(),
                },
                xid: xid.and_then(|xid| u32::try_from(xid).ok()).map(Xid),
            });
        }
    }
}

async fn is_keyless_retried(client: &Client, table_oid: u32) -> Result<bool, DbError> {
    let row = client
        .query_one(
            "select exists (select from walrelay.dead_letter d where d.table_oid = $1 \
             and d.status = 'parked' and d.retry_requested_at is not null and d.key_hash is null)",
            &[&table_oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    get(&row, 0)
}

/// The topics whose events are held.
///
/// # Errors
/// 42501 where the role may not read the registry; or the conversation's.
pub async fn tripped(client: &Client, table_oid: u32) -> Result<Vec<Tripped>, DbError> {
    let rows = client
        .query(
            "select t.key, t.value->>'reason', t.value->>'message', \
             (t.value->>'since')::timestamptz, coalesce((t.value->>'park_asked')::boolean, false) \
             from walrelay.relay r cross join lateral pg_catalog.jsonb_each(r.tripped_topics) t \
             where r.table_oid = $1 order by 1",
            &[&table_oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter()
        .map(|row| {
            let since: Option<Timestamptz> = get(row, 3)?;
            Ok(Tripped {
                topic: get(row, 0)?,
                reason: reason(get(row, 1)?),
                message: get::<Option<String>>(row, 2)?.unwrap_or_default(),
                since: since.map_or_else(PgTimestamp::default, |at| at.0),
                is_park_asked: get(row, 4)?,
            })
        })
        .collect()
}

/// Latches a topic.
///
/// # Errors
/// 42501 where the role may not write the registry; or the conversation's.
pub async fn trip(client: &Client, table_oid: u32, tripped: &Tripped) -> Result<(), DbError> {
    client
        .execute(
            "update walrelay.relay set updated_at = pg_catalog.now(), \
             tripped_topics = tripped_topics || pg_catalog.jsonb_build_object($2::text, \
               pg_catalog.jsonb_build_object('reason', $3::text, 'message', $4::text, \
                 'since', $5::timestamptz, 'park_asked', $6::boolean)) \
             where table_oid = $1",
            &[
                &table_oid,
                &tripped.topic,
                &tripped.reason.as_str(),
                &park::plain(&tripped.message),
                &Timestamptz(tripped.since),
                &tripped.is_park_asked,
            ],
        )
        .await
        .map(|_| ())
        .map_err(|e| db_error(&e))
}

/// Opens a topic.
///
/// # Errors
/// As [`trip`].
pub async fn untrip(client: &Client, table_oid: u32, topic: &str) -> Result<(), DbError> {
    client
        .execute(
            "update walrelay.relay set updated_at = pg_catalog.now(), \
             tripped_topics = tripped_topics - $2::text where table_oid = $1",
            &[&table_oid, &topic],
        )
        .await
        .map(|_| ())
        .map_err(|e| db_error(&e))
}

/// The highest number that a dead letter has; 0 where there is none.
///
/// # Errors
/// 42501 where the role may not read the table; or the conversation's.
pub async fn last_id(client: &Client, table_oid: u32) -> Result<i64, DbError> {
    let row = client
        .query_one(
            "select coalesce((select id from walrelay.dead_letter \
             where table_oid = $1 order by id desc limit 1), 0)",
            &[&table_oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    get(&row, 0)
}

/// How far the server's log is on disk.
///
/// # Errors
/// Only the conversation's.
pub async fn flush_lsn(client: &Client) -> Result<Lsn, DbError> {
    let row = client
        .query_one("select pg_catalog.pg_current_wal_flush_lsn()", &[])
        .await
        .map_err(|e| db_error(&e))?;
    let lsn: PgLsn = get(&row, 0)?;
    Ok(Lsn(u64::from(lsn)))
}

/// Does every standby that may be promoted have what was flushed by `flush`? Asked of a failover
/// slot only (`None` for any other, and before Postgres 17), and then as the server itself holds
/// such a slot back: the slots in `synchronized_standby_slots`; where that is empty, every active
/// physical slot. `Some` is the name of one that is behind, lost, or not there.
///
/// # Errors
/// Only the conversation's.
pub async fn standbys_have(
    client: &Client,
    slot: &str,
    flush: Lsn,
) -> Result<Option<String>, DbError> {
    // Columns and settings that a version lacks are null, not an error, as members of a jsonb.
    let row = client
        .query_opt(
            "with setting as (select pg_catalog.string_to_array(coalesce( \
               pg_catalog.current_setting('synchronized_standby_slots', true), ''), ',') as list), \
             named as (select pg_catalog.btrim(n, E' \\t\\n\"') as name \
               from setting cross join lateral pg_catalog.unnest(list) n), \
             slots as (select s.slot_name::text as name, s.active, \
               s.slot_type = 'physical' and s.restart_lsn >= $2 \
               and pg_catalog.to_jsonb(s)->>'invalidation_reason' is null as has \
               from pg_catalog.pg_replication_slots s where s.slot_type = 'physical') \
             select b.name from ( \
               select n.name from named n left join slots s on s.name = n.name \
               where n.name <> '' and s.has is not true \
               union all \
               select s.name from slots s where s.active and s.has is not true \
               and not exists (select from named n where n.name <> '')) b \
             where (select (pg_catalog.to_jsonb(o)->>'failover')::boolean \
               from pg_catalog.pg_replication_slots o where o.slot_name = $1::text) \
             order by 1 limit 1",
            &[&slot, &PgLsn::from(flush.0)],
        )
        .await
        .map_err(|e| db_error(&e))?;
    row.map(|row| get(&row, 0)).transpose()
}

/// Deletes settled rows that can come again no more: below what the slot still reads and below the
/// stored checkpoint. None while there is no checkpoint. Returns how many.
///
/// # Errors
/// 42501 where the role may not delete; or the conversation's.
pub async fn forget_settled(client: &Client, table_oid: u32, slot: &str) -> Result<u64, DbError> {
    let mut forgotten = 0;
    loop {
        let deleted = client
            .execute(
                "delete from walrelay.dead_letter where id = any(array( \
                   select d.id from walrelay.dead_letter d where d.table_oid = $1 \
                   and d.status <> 'parked' and d.settled_lsn < ( \
                     select least(s.restart_lsn, c.commit_lsn) \
                     from pg_catalog.pg_replication_slots s, walrelay.checkpoint c \
                     join walrelay.relay r on r.table_oid = c.table_oid \
                       and r.slot_generation = c.slot_generation \
                     where s.slot_name = $2::text and s.restart_lsn is not null \
                     and c.table_oid = $1) \
                   order by d.settled_lsn limit $3))",
                &[&table_oid, &slot, &FORGET_ROWS],
            )
            .await
            .map_err(|e| db_error(&e))?;
        forgotten += deleted;
        if deleted == 0 {
            return Ok(forgotten);
        }
    }
}

/// A reason's name as it stands in a table; one that this version does not know is a refusal.
fn reason(name: Option<&str>) -> Reason {
    name.and_then(Reason::of).unwrap_or(Reason::Refused)
}

/// A nullable `bytea`.
fn bytes(row: &Row, column: usize) -> Result<Option<Box<[u8]>>, DbError> {
    Ok(get::<Option<&[u8]>>(row, column)?.map(Box::from))
}

/// Generation, LSN and ordinal, from `column` on.
fn position(row: &Row, column: usize) -> Result<Position, DbError> {
    let commit_lsn: PgLsn = get(row, column + 1)?;
    let ordinal: i64 = get(row, column + 2)?;
    Ok(Position {
        generation: get(row, column)?,
        commit_lsn: Lsn(u64::from(commit_lsn)),
        ordinal: u64::try_from(ordinal).unwrap_or(0),
    })
}
