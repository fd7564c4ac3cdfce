//! Retrying: what is due, and what became of it.
//!
//! A mark is a row's, and means its whole key. Where a row that bears it is delivered, the mark goes
//! on to the key's next row in the same statement, so that a retry ends at the key's end wherever it
//! is interrupted.

use tokio_postgres::types::PgLsn;
use tokio_postgres::{Client, Row};

use super::{ENCODING, Timestamptz, bytes, park, position, reason};
use crate::dead_letter::{DeadLetter, EventKey, Settlement, Stored, Why};
use crate::error::DbError;
use crate::io::registry::get;
use crate::io::side::db_error;
use crate::lsn::{Lsn, PgTimestamp, Xid};
use crate::record::{Header, KafkaCode, Record};

/// The dead letters to publish next, each key's in order and from its first on; those without a key
/// where they are marked. All are below (`generation`, `passed`): what the stream may still bring
/// again would be published twice. At most `rows_max`; about `bytes_max`, and one at least.
///
/// # Errors
/// 42501 where the role may not read the table; or the conversation's.
pub async fn next_retry(
    client: &Client,
    table_oid: u32,
    generation: i64,
    passed: Lsn,
    rows_max: usize,
    bytes_max: usize,
) -> Result<Vec<Stored>, DbError> {
    let rows_limit = i64::try_from(rows_max).unwrap_or(i64::MAX);
    let params = (table_oid, generation, PgLsn::from(passed.0), rows_limit);
    let mut due = Vec::new();
    for sql in [DUE_KEYS, DUE_KEYLESS] {
        due.extend(
            client
                .query(sql, &[&params.0, &params.1, &params.2, &params.3])
                .await
                .map_err(|e| db_error(&e))?,
        );
    }
    let ids = within(&due, rows_max, bytes_max)?;
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let sql = format!(
        "select d.id, pg_catalog.convert_to(d.event_id, {ENCODING}), \
         pg_catalog.convert_to(d.aggregate_type, {ENCODING}), \
         pg_catalog.convert_to(d.aggregate_id, {ENCODING}), \
         d.slot_generation, d.commit_lsn, d.ordinal, coalesce(d.xid, 0), d.commit_time, d.topic, \
         d.partition, d.key, d.value, d.header_names, d.header_values, d.timestamp_ms, d.reason, \
         d.error_code, d.error_message \
         from pg_catalog.unnest($2::bigint[]) with ordinality w (id, n) \
         join walrelay.dead_letter d on d.id = w.id \
         where d.table_oid = $1 and d.status = 'parked' order by w.n"
    );
    let rows = client
        .query(&sql, &[&table_oid, &ids])
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter().map(stored).collect()
}

/// Marked keys by their hash, each with its rows in order. Nested loops under a limit: what is
/// beyond it is not looked at.
const DUE_KEYS: &str = "\
    with recursive marked as ( \
      (select d.key_hash from walrelay.dead_letter d where d.table_oid = $1 \
        and d.status = 'parked' and d.retry_requested_at is not null and d.key_hash is not null \
        order by d.key_hash limit 1) \
      union all \
      select n.key_hash from marked m cross join lateral ( \
        select d.key_hash from walrelay.dead_letter d where d.table_oid = $1 \
        and d.status = 'parked' and d.retry_requested_at is not null and d.key_hash > m.key_hash \
        order by d.key_hash limit 1) n) \
    select r.id, r.size, r.value_in_table, m.key_hash::text \
    from marked m cross join lateral ( \
      select d.id, d.value_in_table, coalesce(pg_catalog.octet_length(d.value), 0)::bigint \
        + pg_catalog.octet_length(d.key) + pg_catalog.pg_column_size(d.header_values) as size \
      from walrelay.dead_letter d where d.table_oid = $1 and d.status = 'parked' \
      and d.key_hash = m.key_hash and (d.slot_generation, d.commit_lsn) < ($2, $3) \
      order by d.slot_generation, d.commit_lsn, d.ordinal limit $4) r \
    limit $4";

const DUE_KEYLESS: &str = "\
    select d.id, coalesce(pg_catalog.octet_length(d.value), 0)::bigint \
      + pg_catalog.octet_length(d.key) + pg_catalog.pg_column_size(d.header_values), \
    d.value_in_table, null::text \
    from walrelay.dead_letter d where d.table_oid = $1 and d.status = 'parked' \
    and d.retry_requested_at is not null and d.key_hash is null \
    and (d.slot_generation, d.commit_lsn) < ($2, $3) \
    order by d.id limit $4";

/// The rows that fit. One whose value is only in the outbox is not published as a tombstone: its key
/// waits there.
fn within(due: &[Row], rows_max: usize, bytes_max: usize) -> Result<Vec<i64>, DbError> {
    let mut ids = Vec::new();
    let mut left = i64::try_from(bytes_max).unwrap_or(i64::MAX);
    let mut waiting: Option<&str> = None;
    for row in due {
        let key: Option<&str> = get(row, 3)?;
        if key.is_some() && key == waiting {
            continue;
        }
        if get(row, 2)? {
            waiting = key;
            continue;
        }
        let size: Option<i64> = get(row, 1)?;
        left = left.saturating_sub(size.unwrap_or(0));
        if ids.len() == rows_max || (left < 0 && !ids.is_empty()) {
            break;
        }
        ids.push(get(row, 0)?);
    }
    Ok(ids)
}

fn stored(row: &Row) -> Result<Stored, DbError> {
    let aggregate_type = bytes(row, 2)?;
    let key = bytes(row, 3)?.map(|aggregate_id| EventKey {
        aggregate_type: aggregate_type.clone(),
        aggregate_id,
    });
    let xid: i64 = get(row, 7)?;
    let commit_time: Option<Timestamptz> = get(row, 8)?;
    let names: Vec<String> = get(row, 13)?;
    let contents: Vec<Option<Vec<u8>>> = get(row, 14)?;
    let record = Record {
        topic: get::<String>(row, 9)?.into(),
        partition: get::<Option<i32>>(row, 10)?.unwrap_or(-1),
        key: get::<Option<Vec<u8>>>(row, 11)?.unwrap_or_default().into(),
        value: get::<Option<Vec<u8>>>(row, 12)?.map(Into::into),
        timestamp_ms: get(row, 15)?,
        headers: names
            .into_iter()
            .zip(contents)
            .map(|(name, value)| Header {
                name: name.into(),
                value: value.map(Into::into),
            })
            .collect(),
    };
    Ok(Stored {
        id: get(row, 0)?,
        letter: DeadLetter {
            event_id: get(row, 1)?,
            key,
            aggregate_type,
            position: position(row, 4)?,
            xid: Xid(u32::try_from(xid).unwrap_or(0)),
            commit_time: commit_time.map_or_else(PgTimestamp::default, |at| at.0),
            record,
            why: Why {
                reason: reason(get(row, 16)?),
                code: get::<Option<i32>>(row, 17)?.map(KafkaCode),
                message: get::<Option<String>>(row, 18)?.unwrap_or_default(),
            },
            is_retried: true,
        },
    })
}

/// Writes down what became of dead letters, in one commit, and returns the keys of delivered ones
/// that have no parked row left. A row that somebody discarded meanwhile stays that.
///
/// # Errors
/// 42501 where the role may not update the table; or the conversation's: then nothing is settled.
pub async fn settle(
    client: &Client,
    table_oid: u32,
    settlement: &Settlement,
) -> Result<Vec<EventKey>, DbError> {
    let mut failed = Vec::new();
    let mut reasons = Vec::new();
    let mut codes = Vec::new();
    let mut messages = Vec::new();
    for (id, why) in &settlement.failed {
        failed.push(*id);
        reasons.push(why.reason.as_str());
        codes.push(why.code.map(|code| code.0));
        messages.push(park::plain(&why.message));
    }
    let sql = SETTLE.replace("{ENCODING}", ENCODING);
    let rows = client
        .query(
            &sql,
            &[
                &table_oid,
                &settlement.delivered,
                &failed,
                &reasons,
                &codes,
                &messages,
            ],
        )
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter()
        .map(|row| {
            Ok(EventKey {
                aggregate_type: bytes(row, 0)?,
                aggregate_id: bytes(row, 1)?.unwrap_or_default(),
            })
        })
        .collect()
}

/// All parts see the table as it was before: no row is updated by two of them.
const SETTLE: &str = "\
    with delivered as ( \
      update walrelay.dead_letter d set status = 'delivered', \
      settled_at = pg_catalog.clock_timestamp(), \
      settled_lsn = pg_catalog.pg_current_wal_insert_lsn(), attempts = d.attempts + 1 \
      where d.table_oid = $1 and d.id = any($2::bigint[]) and d.status = 'parked' \
      returning d.key_hash, d.aggregate_type, d.aggregate_id, d.retry_requested_at, \
      d.retry_requested_by), \
    failed as ( \
      update walrelay.dead_letter d set attempts = d.attempts + 1, reason = f.reason, \
      error_code = f.code, error_message = f.message, retry_requested_at = null, \
      retry_requested_by = null \
      from rows from (pg_catalog.unnest($3::bigint[]), pg_catalog.unnest($4::text[]), \
        pg_catalog.unnest($5::integer[]), pg_catalog.unnest($6::text[])) \
        as f (id, reason, code, message) \
      where d.table_oid = $1 and d.id = f.id and d.status = 'parked' \
      returning d.key_hash), \
    cleared as ( \
      update walrelay.dead_letter d set retry_requested_at = null, retry_requested_by = null \
      where d.table_oid = $1 and d.status = 'parked' and d.retry_requested_at is not null \
      and d.key_hash in (select f.key_hash from failed f where f.key_hash is not null) \
      and d.id <> all ($2::bigint[]) and d.id <> all ($3::bigint[])), \
    keys as ( \
      select d.key_hash, d.aggregate_type, d.aggregate_id, \
      pg_catalog.min(d.retry_requested_at) as asked_at, \
      pg_catalog.min(d.retry_requested_by) as asked_by \
      from delivered d where d.key_hash is not null group by 1, 2, 3), \
    remaining as ( \
      select k.*, n.id as next_id from keys k left join lateral ( \
        select d.id from walrelay.dead_letter d where d.table_oid = $1 and d.status = 'parked' \
        and d.key_hash = k.key_hash and d.id <> all ($2::bigint[]) \
        order by d.slot_generation, d.commit_lsn, d.ordinal limit 1) n on true), \
    moved as ( \
      update walrelay.dead_letter d set retry_requested_at = r.asked_at, \
      retry_requested_by = r.asked_by \
      from remaining r where d.id = r.next_id and d.status = 'parked' \
      and d.retry_requested_at is null and r.asked_at is not null \
      and r.key_hash not in (select f.key_hash from failed f where f.key_hash is not null)) \
    select pg_catalog.convert_to(r.aggregate_type, {ENCODING}), \
    pg_catalog.convert_to(r.aggregate_id, {ENCODING}) from remaining r where r.next_id is null";
