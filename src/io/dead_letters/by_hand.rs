//! The dead letters as a person looks at them and decides about them, on a session of its own.
//!
//! # Invariants
//! Every change is one statement, and the same statement counts it in the registry, where the leader
//! looks each second. Texts come back as bytes: in a database of SQL_ASCII they can be anything.

use tokio_postgres::types::PgLsn;
use tokio_postgres::{Client, Row};

use super::{ENCODING, bytes};
use crate::config::{KeyName, LetterId, ListLetters, Order, Status, Which};
use crate::error::DbError;
use crate::io::registry::get;
use crate::io::side::db_error;
use crate::lsn::Lsn;

/// How much there is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    pub parked: i64,
    /// Keys that are parked; an event without a key counts as one.
    pub keys: i64,
    /// Of these, those that somebody asked to retry.
    pub retried_keys: i64,
    pub oldest_seconds: Option<f64>,
    pub delivered: i64,
    pub discarded: i64,
}

/// A dead letter in a list.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub id: i64,
    pub event_id: Vec<u8>,
    pub aggregate_type: Option<Box<[u8]>>,
    pub aggregate_id: Option<Box<[u8]>>,
    pub topic: String,
    pub reason: String,
    pub error_code: Option<i32>,
    pub error_message: Option<String>,
    pub status: String,
    pub attempts: i32,
    pub parked_at: String,
    pub age_seconds: f64,
    pub is_retried: bool,
    pub settled_at: Option<String>,
    pub settled_by: Option<String>,
    /// Of its key, this one included, where the list is one of keys.
    pub events: Option<i64>,
}

/// The rest of a dead letter.
#[derive(Clone, Debug, PartialEq)]
pub struct Details {
    pub line: Line,
    pub generation: i64,
    pub commit_lsn: Lsn,
    pub ordinal: i64,
    pub xid: Option<i64>,
    pub commit_time: Option<String>,
    pub partition: Option<i32>,
    pub key: Option<Vec<u8>>,
    /// Its beginning.
    pub value: Option<Vec<u8>>,
    pub value_bytes: Option<i64>,
    pub value_in_table: bool,
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    pub timestamp_ms: Option<i64>,
    pub retry_requested_at: Option<String>,
    pub retry_requested_by: Option<String>,
    /// The row that its key is parked from, and its event.
    pub first: Option<(i64, Vec<u8>)>,
}

/// What a change came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    pub events: i64,
    pub keys: i64,
    /// Parked events of the same keys that were not meant.
    pub behind: i64,
}

/// # Errors
/// 42501 where the role may not read the table; or the conversation's. So for all of these.
pub async fn totals(client: &Client, table_oid: u32) -> Result<Totals, DbError> {
    let row = client
        .query_one(
            "select coalesce(pg_catalog.sum(k.events), 0)::bigint, pg_catalog.count(*), \
             pg_catalog.count(*) filter (where k.is_retried), \
             extract(epoch from pg_catalog.clock_timestamp() - pg_catalog.min(k.since))::float8, \
             (select pg_catalog.count(*) from walrelay.dead_letter s \
               where s.table_oid = $1 and s.status = 'delivered'), \
             (select pg_catalog.count(*) from walrelay.dead_letter s \
               where s.table_oid = $1 and s.status = 'discarded') \
             from (select pg_catalog.count(*) as events, \
               pg_catalog.bool_or(d.retry_requested_at is not null) as is_retried, \
               pg_catalog.min(d.parked_at) as since \
               from walrelay.dead_letter d where d.table_oid = $1 and d.status = 'parked' \
               group by d.key_hash, case when d.key_hash is null then d.id end) k",
            &[&table_oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Totals {
        parked: get(&row, 0)?,
        keys: get(&row, 1)?,
        retried_keys: get(&row, 2)?,
        oldest_seconds: get(&row, 3)?,
        delivered: get(&row, 4)?,
        discarded: get(&row, 5)?,
    })
}

/// What is read of a row `h`.
fn columns() -> String {
    format!(
        "h.id, pg_catalog.convert_to(h.event_id, {ENCODING}), \
         pg_catalog.convert_to(h.aggregate_type, {ENCODING}), \
         pg_catalog.convert_to(h.aggregate_id, {ENCODING}), h.topic, h.reason, h.error_code, \
         h.error_message, h.status, h.attempts, {}, \
         extract(epoch from pg_catalog.clock_timestamp() - h.parked_at)::float8, \
         h.retry_requested_at is not null, {}, h.settled_by",
        utc("h.parked_at"),
        utc("h.settled_at")
    )
}

fn utc(column: &str) -> String {
    format!("pg_catalog.to_char({column} at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')")
}

fn line(row: &Row) -> Result<Line, DbError> {
    Ok(Line {
        id: get(row, 0)?,
        event_id: get(row, 1)?,
        aggregate_type: bytes(row, 2)?,
        aggregate_id: bytes(row, 3)?,
        topic: get(row, 4)?,
        reason: get(row, 5)?,
        error_code: get(row, 6)?,
        error_message: get(row, 7)?,
        status: get(row, 8)?,
        attempts: get(row, 9)?,
        parked_at: get(row, 10)?,
        age_seconds: get(row, 11)?,
        is_retried: get(row, 12)?,
        settled_at: get(row, 13)?,
        settled_by: get(row, 14)?,
        events: None,
    })
}

/// The lines that were asked for: parked ones a key each, by its first event; others, and those of
/// a key, an event each.
///
/// # Errors
/// As [`totals`].
pub async fn list(
    client: &Client,
    table_oid: u32,
    asked: &ListLetters,
) -> Result<Vec<Line>, DbError> {
    match (&asked.key, asked.status) {
        (None, Status::Parked) => keys(client, table_oid, asked).await,
        (Some(_), _) | (None, Status::Delivered | Status::Discarded) => {
            events(client, table_oid, asked).await
        }
    }
}

fn direction(order: Order) -> &'static str {
    match order {
        Order::OldestFirst => "asc",
        Order::NewestFirst => "desc",
    }
}

async fn keys(client: &Client, table_oid: u32, asked: &ListLetters) -> Result<Vec<Line>, DbError> {
    let (columns, direction) = (columns(), direction(asked.order));
    let sql = format!(
        "select {columns}, k.events, k.is_retried from ( \
           select d.key_hash, case when d.key_hash is null then d.id end as lone, \
           pg_catalog.count(*) as events, pg_catalog.min(d.parked_at) as since, \
           pg_catalog.min(d.id) as first_id, \
           pg_catalog.bool_or(d.retry_requested_at is not null) as is_retried \
           from walrelay.dead_letter d where d.table_oid = $1 and d.status = 'parked' \
           group by 1, 2 having $2::text is null or pg_catalog.bool_or(d.topic = $2) \
           order by since {direction}, first_id {direction} limit $3) k \
         join walrelay.dead_letter h on h.id = coalesce(k.lone, ( \
           select d.id from walrelay.dead_letter d where d.table_oid = $1 \
           and d.status = 'parked' and d.key_hash = k.key_hash \
           order by d.slot_generation, d.commit_lsn, d.ordinal limit 1)) \
         order by k.since {direction}, h.slot_generation {direction}, h.commit_lsn {direction}, \
           h.ordinal {direction}"
    );
    let rows = client
        .query(&sql, &[&table_oid, &asked.topic, &asked.limit])
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter()
        .map(|row| {
            Ok(Line {
                events: Some(get(row, 15)?),
                is_retried: get(row, 16)?,
                ..line(row)?
            })
        })
        .collect()
}

async fn events(
    client: &Client,
    table_oid: u32,
    asked: &ListLetters,
) -> Result<Vec<Line>, DbError> {
    let (columns, direction) = (columns(), direction(asked.order));
    let sql = format!(
        "select {columns} from walrelay.dead_letter h where h.table_oid = $1 and h.status = $2 \
         and ($3::text is null or h.topic = $3) and ($4::text is null or h.aggregate_id = $4) \
         and ($5::text is null or h.aggregate_type = $5) \
         order by h.slot_generation {direction}, h.commit_lsn {direction}, h.ordinal {direction} \
         limit $6"
    );
    let key = asked.key.as_ref();
    let rows = client
        .query(
            &sql,
            &[
                &table_oid,
                &asked.status.as_str(),
                &asked.topic,
                &key.map(|key| &key.aggregate_id),
                &key.and_then(|key| key.aggregate_type.as_ref()),
                &asked.limit,
            ],
        )
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter().map(line).collect()
}

/// The rows that an id means: two, where it is one row's id and another's event.
///
/// # Errors
/// As [`totals`].
pub async fn find(client: &Client, table_oid: u32, id: &LetterId) -> Result<Vec<i64>, DbError> {
    let (row, event) = match id {
        LetterId::Row(row) => (Some(*row), None),
        LetterId::Event(event) => (None, Some(event)),
        LetterId::Either(text) => (text.parse::<i64>().ok(), Some(text)),
    };
    let rows = client
        .query(
            // As the index has an event_id.
            "select d.id from walrelay.dead_letter d where d.table_oid = $1 and d.id = $2 \
             union \
             select d.id from walrelay.dead_letter d where d.table_oid = $1 and d.event_id = $3 \
             and (case when pg_catalog.octet_length(d.event_id) <= 2000 then d.event_id \
               else pg_catalog.md5(d.event_id) end) \
             = (case when pg_catalog.octet_length($3::text) <= 2000 then $3 \
               else pg_catalog.md5($3) end) \
             order by 1",
            &[&table_oid, &row, &event],
        )
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter().map(|row| get(row, 0)).collect()
}

/// Everything of one, of its value the first `preview` bytes.
///
/// # Errors
/// As [`totals`].
pub async fn details(
    client: &Client,
    table_oid: u32,
    id: i64,
    preview: i32,
) -> Result<Option<Details>, DbError> {
    let (columns, commit_time, asked_at) =
        (columns(), utc("h.commit_time"), utc("h.retry_requested_at"));
    let sql = format!(
        "select {columns}, h.slot_generation, h.commit_lsn, h.ordinal, h.xid, {commit_time}, \
         h.partition, h.key, pg_catalog.substr(h.value, 1, $3), \
         pg_catalog.octet_length(h.value)::bigint, h.value_in_table, h.header_names, \
         h.header_values, h.timestamp_ms, {asked_at}, h.retry_requested_by, f.id, \
         pg_catalog.convert_to(f.event_id, {ENCODING}), \
         (select pg_catalog.count(*) from walrelay.dead_letter d where d.table_oid = $1 \
           and d.status = 'parked' and d.key_hash = h.key_hash) \
         from walrelay.dead_letter h left join lateral ( \
           select d.id, d.event_id from walrelay.dead_letter d where d.table_oid = $1 \
           and d.status = 'parked' and d.key_hash = h.key_hash \
           order by d.slot_generation, d.commit_lsn, d.ordinal limit 1) f on true \
         where h.table_oid = $1 and h.id = $2"
    );
    let row = client
        .query_opt(&sql, &[&table_oid, &id, &preview])
        .await
        .map_err(|e| db_error(&e))?;
    row.map(|row| of_row(&row)).transpose()
}

fn of_row(row: &Row) -> Result<Details, DbError> {
    let commit_lsn: PgLsn = get(row, 16)?;
    let names: Vec<String> = get(row, 25)?;
    let contents: Vec<Option<Vec<u8>>> = get(row, 26)?;
    let first: Option<i64> = get(row, 30)?;
    let first_event: Option<Vec<u8>> = get(row, 31)?;
    Ok(Details {
        line: Line {
            events: Some(get(row, 32)?),
            ..line(row)?
        },
        generation: get(row, 15)?,
        commit_lsn: Lsn(u64::from(commit_lsn)),
        ordinal: get(row, 17)?,
        xid: get(row, 18)?,
        commit_time: get(row, 19)?,
        partition: get(row, 20)?,
        key: get(row, 21)?,
        value: get(row, 22)?,
        value_bytes: get(row, 23)?,
        value_in_table: get(row, 24)?,
        headers: names.into_iter().zip(contents).collect(),
        timestamp_ms: get(row, 27)?,
        retry_requested_at: get(row, 28)?,
        retry_requested_by: get(row, 29)?,
        first: first.zip(first_event),
    })
}

/// Which rows, as parameters: `$2` one row, `$3` and `$4` a key, `$5` all.
type Meant<'a> = (Option<i64>, Option<&'a str>, Option<&'a str>, bool);

fn meant<'a>(which: &'a Which, found: Option<i64>) -> Meant<'a> {
    match which {
        Which::One(_) => (found, None, None, false),
        Which::Key(KeyName {
            aggregate_id,
            aggregate_type,
        }) => (None, Some(aggregate_id), aggregate_type.as_deref(), false),
        Which::All => (None, None, None, true),
    }
}

/// Asks the leader to retry: marks the first parked row of each key that is meant, which stands for
/// the key, and rows without a key. `found` is the row of [`Which::One`].
///
/// # Errors
/// 42501 where the role may not update the table or the registry; or the conversation's.
pub async fn retry(
    client: &Client,
    table_oid: u32,
    which: &Which,
    found: Option<i64>,
) -> Result<Changed, DbError> {
    let heads = match which {
        // A walk along the index, a step a key, however many rows it has.
        Which::All => {
            "walk as ((select d.id, d.key_hash from walrelay.dead_letter d where d.table_oid = $1 \
               and d.status = 'parked' and d.key_hash is not null \
               order by d.key_hash, d.slot_generation, d.commit_lsn, d.ordinal limit 1) \
             union all select n.* from walk w cross join lateral ( \
               select d.id, d.key_hash from walrelay.dead_letter d where d.table_oid = $1 \
               and d.status = 'parked' and d.key_hash > w.key_hash \
               order by d.key_hash, d.slot_generation, d.commit_lsn, d.ordinal limit 1) n), \
             heads as (select w.id from walk w union all \
               select d.id from walrelay.dead_letter d where d.table_oid = $1 \
               and d.status = 'parked' and d.key_hash is null and $5::boolean \
               and $2::bigint is null and $3::text is null and $4::text is null)"
        }
        Which::One(_) | Which::Key(_) => {
            "meant as (select distinct d.key_hash, case when d.key_hash is null then d.id end \
               as lone from walrelay.dead_letter d where d.table_oid = $1 \
               and d.status = 'parked' and (d.id = $2 or d.aggregate_id = $3 \
                 and ($4::text is null or d.aggregate_type = $4) or $5::boolean)), \
             heads as (select coalesce(m.lone, (select d.id from walrelay.dead_letter d \
               where d.table_oid = $1 and d.status = 'parked' and d.key_hash = m.key_hash \
               order by d.slot_generation, d.commit_lsn, d.ordinal limit 1)) as id from meant m)"
        }
    };
    let sql = format!(
        "with recursive {heads}, \
         marked as (update walrelay.dead_letter d set \
           retry_requested_at = coalesce(d.retry_requested_at, pg_catalog.clock_timestamp()), \
           retry_requested_by = coalesce(d.retry_requested_by, session_user) \
           where d.table_oid = $1 and d.id in (select h.id from heads h) and d.status = 'parked' \
           returning d.key_hash), \
         touched as (update walrelay.relay r set \
           dead_letters_touched = r.dead_letters_touched + 1 where r.table_oid = $1) \
         select pg_catalog.count(*), coalesce(pg_catalog.sum(case when m.key_hash is null then 1 \
           else (select pg_catalog.count(*) from walrelay.dead_letter d where d.table_oid = $1 \
             and d.status = 'parked' and d.key_hash = m.key_hash) end), 0)::bigint from marked m"
    );
    let (row, key, of_type, all) = meant(which, found);
    let done = client
        .query_one(&sql, &[&table_oid, &row, &key, &of_type, &all])
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Changed {
        keys: get(&done, 0)?,
        events: get(&done, 1)?,
        behind: 0,
    })
}

/// The rows `d` that [`meant`] says, where they are still parked.
const MEANT: &str = "d.table_oid = $1 and d.status = 'parked' and (d.id = $2 \
                     or d.aggregate_id = $3 and ($4::text is null or d.aggregate_type = $4) \
                     or $5::boolean)";

/// Counts `c (id, key_hash)`: events, keys, and what else is parked of these keys.
const COUNTED: &str = "select pg_catalog.count(*), \
     pg_catalog.count(distinct coalesce(c.key_hash::text, c.id::text)), \
     case when $2::bigint is null then 0 else (select pg_catalog.count(*) \
       from walrelay.dead_letter d where d.table_oid = $1 and d.status = 'parked' and d.id <> $2 \
       and d.key_hash in (select c.key_hash from c)) end from c";

/// What [`discard`] would give up.
///
/// # Errors
/// As [`totals`].
pub async fn would_discard(
    client: &Client,
    table_oid: u32,
    which: &Which,
    found: Option<i64>,
) -> Result<Changed, DbError> {
    let sql = format!(
        "with c as (select d.id, d.key_hash from walrelay.dead_letter d where {MEANT}) {COUNTED}"
    );
    counted(client, &sql, table_oid, meant(which, found)).await
}

/// Gives dead letters up, and keeps who did and when. What is parked behind them stays parked.
///
/// # Errors
/// As [`retry`].
pub async fn discard(
    client: &Client,
    table_oid: u32,
    which: &Which,
    found: Option<i64>,
) -> Result<Changed, DbError> {
    let sql = format!(
        "with c as (update walrelay.dead_letter d set status = 'discarded', \
           settled_at = pg_catalog.clock_timestamp(), settled_by = session_user, \
           settled_lsn = pg_catalog.pg_current_wal_insert_lsn() where {MEANT} \
           returning d.id, d.key_hash), \
         touched as (update walrelay.relay r set \
           dead_letters_touched = r.dead_letters_touched + 1 where r.table_oid = $1) {COUNTED}"
    );
    counted(client, &sql, table_oid, meant(which, found)).await
}

async fn counted(
    client: &Client,
    sql: &str,
    table_oid: u32,
    (row, key, of_type, all): Meant<'_>,
) -> Result<Changed, DbError> {
    let done = client
        .query_one(sql, &[&table_oid, &row, &key, &of_type, &all])
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Changed {
        events: get(&done, 0)?,
        keys: get(&done, 1)?,
        behind: get(&done, 2)?,
    })
}

/// Asks the leader to park what is held of a topic. `false`: it is not held.
///
/// # Errors
/// As [`retry`].
pub async fn ask_to_park(client: &Client, table_oid: u32, topic: &str) -> Result<bool, DbError> {
    let changed = client
        .execute(
            "update walrelay.relay r set dead_letters_touched = r.dead_letters_touched + 1, \
             tripped_topics = pg_catalog.jsonb_set(r.tripped_topics, \
               array[$2::text, 'park_asked'], 'true') \
             where r.table_oid = $1 and pg_catalog.jsonb_exists(r.tripped_topics, $2)",
            &[&table_oid, &topic],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(changed > 0)
}
