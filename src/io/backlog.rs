//! What a slot still has to deliver, as far as it can be told without a relay; and its end.

use tokio_postgres::Client;

use super::registry::{NO_HALT, NO_STOP, get};
use super::side::db_error;
use super::sql::{outside_of, quote_ident, quote_literal, quote_table};
use crate::config::TableName;
use crate::error::DbError;

/// Changes are looked at no further than this: the answer must not decode a week of WAL. The server
/// stops at the end of a transaction.
const CHANGES_MAX: i32 = 50_000;

/// Rows that no checkpoint covers are counted no further than this.
const UNCOVERED_MAX: i64 = 100_000;

/// How many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    Exactly(i64),
    AtLeast(i64),
}

/// Events in a slot's backlog. It is decoded and not moved. Nobody may hold the slot meanwhile.
///
/// # Errors
/// 55000 where the slot is lost, 42704 where the publication was away in between, 57014 where it
/// took too long; or the conversation's.
pub async fn events(
    client: &Client,
    table_oid: u32,
    slot: &str,
    publication: &str,
) -> Result<Count, DbError> {
    // An Insert begins with 'I'. A fence's carrier is one, and no event.
    let row = client
        .query_one(
            "with change as materialized (select c.xid, pg_catalog.get_byte(c.data, 0) = 73 as is_insert \
               from pg_catalog.pg_logical_slot_peek_binary_changes($1::text::name, null, $2, \
                 'proto_version', '1', 'publication_names', $3::text) c), \
             fence as (select (f.xid::text::bigint % 4294967296)::text as xid \
               from walrelay.fence f where f.table_oid = $4) \
             select pg_catalog.count(*) filter (where is_insert) \
                 - pg_catalog.count(distinct xid::text) filter (where is_insert \
                   and xid::text in (select f.xid from fence f)), \
               pg_catalog.count(*) from change",
            &[&slot, &CHANGES_MAX, &quote_ident(publication), &table_oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let (events, changes): (i64, i64) = (get(&row, 0)?, get(&row, 1)?);
    Ok(if changes < i64::from(CHANGES_MAX) {
        Count::Exactly(events)
    } else {
        Count::AtLeast(events)
    })
}

/// Rows of the table that the stored checkpoint does not prove to be delivered. `None`: there is
/// no checkpoint of this slot. `xid` is the column that holds the transaction's id.
///
/// # Errors
/// 57014 where it took too long; 42501; or the conversation's.
pub async fn uncovered(
    client: &Client,
    table_oid: u32,
    table: &TableName,
    xid: &str,
) -> Result<Option<Count>, DbError> {
    let row = client
        .query_opt(
            "select c.snapshot::text from walrelay.checkpoint c \
             join walrelay.relay r on r.table_oid = c.table_oid \
             and r.slot_generation = c.slot_generation where c.table_oid = $1",
            &[&table_oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let Some(row) = row else { return Ok(None) };
    let snapshot: String = get(&row, 0)?;
    let sql = format!(
        "select pg_catalog.count(*) from (select from {} where {} limit {UNCOVERED_MAX}) r",
        quote_table(table),
        outside_of(&quote_ident(xid), "$1::text::pg_snapshot")
    );
    let row = client.query_one(&sql, &[&snapshot]).await;
    let rows: i64 = get(&row.map_err(|e| db_error(&e))?, 0)?;
    Ok(Some(if rows < UNCOVERED_MAX {
        Count::Exactly(rows)
    } else {
        Count::AtLeast(rows)
    }))
}

/// What becomes of the publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Publication {
    Drop,
    Keep,
}

/// Forgets all that describes the slot and drops the publication, in one transaction; from here on
/// the slot is one that nobody counts on. The row stays: dead letters hang on it.
#[must_use]
pub fn forget_sql(table_oid: u32, publication: &str, what: Publication) -> String {
    let publication = match what {
        Publication::Drop => format!("drop publication if exists {}; ", quote_ident(publication)),
        Publication::Keep => String::new(),
    };
    format!(
        "begin; \
         update walrelay.relay set intent = jsonb_build_object('action', 'drop', 'since', now(), \
           'by', current_user), system_identifier = null, timeline = null, lower_bound = null, \
           consistent_point = null, coverage = null, leader = null, {NO_STOP}, {NO_HALT}, \
           tripped_topics = '{{}}', updated_at = now() \
           where table_oid = {table_oid}; \
         delete from walrelay.checkpoint where table_oid = {table_oid}; \
         delete from walrelay.fence where table_oid = {table_oid}; \
         {publication}\
         commit"
    )
}

/// Drops the slot, if it is there, and says in the registry that nothing is left to do.
#[must_use]
pub fn drop_sql(table_oid: u32, slot: &str) -> String {
    format!(
        "select pg_catalog.pg_drop_replication_slot(s.slot_name) \
           from pg_catalog.pg_replication_slots s where s.slot_name = {}; \
         update walrelay.relay set intent = jsonb_set(intent, '{{action}}', '\"dropped\"'), \
           updated_at = now() where table_oid = {table_oid} and intent->>'action' = 'drop'",
        quote_literal(slot)
    )
}
