//! How far a relay is, asked of the database alone: what waits in the table, how fast WAL grows.

use std::time::Duration;

use tokio_postgres::Client;
use tokio_postgres::types::{PgLsn, ToSql};

use super::registry::get;
use super::side::db_error;
use super::sql::{quote_ident, quote_table};
use crate::config::{Mapping, Part, TableName};
use crate::error::DbError;
use crate::lsn::Lsn;

/// Rows of one event type that are not delivered.
#[derive(Clone, Debug, PartialEq)]
pub struct Waiting {
    /// `None` where the table has no such column, or null stands in it.
    pub event_type: Option<String>,
    pub rows: i64,
    /// Age of the oldest; `None` where the table does not tell.
    pub oldest: Option<Duration>,
}

/// Rows that are not delivered, by event type, the longest waiting first. `delivered` is when the
/// last delivered transaction was committed, in RFC 3339: what began later is not delivered. Without
/// it there may be delivered rows among those that are counted. `None`: the table has no column to tell them by.
///
/// Every transaction that is not confirmed has an xid from the slot's `catalog_xmin` on: below it
/// all had ended at a position that is confirmed. The BRIN index finds the rows from there on. (A
/// slot that is gone or lost has none: then every row counts.)
///
/// # Errors
/// 57014 where it took too long; or what the server says.
pub async fn waiting(
    client: &Client,
    table: &TableName,
    mapping: &Mapping,
    slot: &str,
    delivered: Option<&str>,
) -> Result<Option<Vec<Waiting>>, DbError> {
    let here = columns(client, table).await?;
    let Some(statement) = Statement::new(&here, table, mapping, slot, delivered) else {
        return Ok(None);
    };
    let params: Vec<&(dyn ToSql + Sync)> = statement.params.iter().map(|p| p as _).collect();
    let rows = client
        .query(&statement.sql, &params)
        .await
        .map_err(|e| db_error(&e))?;
    let waiting: Result<Vec<Waiting>, DbError> = rows
        .iter()
        .map(|row| {
            let age: Option<f64> = get(row, 2)?;
            Ok(Waiting {
                event_type: get(row, 0)?,
                rows: get(row, 1)?,
                oldest: age.map(|seconds| Duration::from_secs_f64(seconds.max(0.0))),
            })
        })
        .collect();
    waiting.map(Some)
}

/// The question, and the texts in it.
struct Statement {
    sql: String,
    params: Vec<String>,
}

impl Statement {
    /// `None`: there is no column to tell rows by.
    fn new(
        here: &[(String, String)],
        table: &TableName,
        mapping: &Mapping,
        slot: &str,
        delivered: Option<&str>,
    ) -> Option<Statement> {
        let column = |part: Part, of_type: fn(&str) -> bool| {
            let name = mapping.columns.get(part)?;
            let known = here.iter().find(|(column, _)| column == name)?;
            of_type(&known.1).then(|| quote_ident(&known.0))
        };
        let created_at = column(Part::CreatedAt, |kind| kind.starts_with("timestamp"));
        let mut params = Vec::new();
        let mut conditions = Vec::new();
        if let Some(xid) = column(Part::Xid, |kind| kind == "xid8") {
            params.push(slot.to_owned());
            conditions.push(format!(
                "({xid}::text::bigint) >= coalesce((select \
                   n.next - (n.next - s.catalog_xmin::text::bigint) % 4294967296 \
                   from pg_catalog.pg_replication_slots s, (select pg_catalog.pg_snapshot_xmax( \
                     pg_catalog.pg_current_snapshot())::text::bigint) n (next) \
                   where s.slot_name = ${}::text), 0)",
                params.len()
            ));
        }
        if let (Some(created_at), Some(delivered)) = (&created_at, delivered) {
            params.push(delivered.to_owned());
            conditions.push(format!(
                "{created_at} > ${}::text::timestamptz",
                params.len()
            ));
        }
        if conditions.is_empty() {
            return None;
        }
        let event_type = column(Part::EventType, |_| true)
            .map_or("null::text".to_owned(), |name| {
                format!("case when {name} is not null then pg_catalog.format('%s', {name}) end")
            });
        let age = created_at.map_or("null::float8".to_owned(), |name| {
            format!(
                "extract(epoch from pg_catalog.clock_timestamp() - pg_catalog.min({name}))::float8"
            )
        });
        let sql = format!(
            "select {event_type}, pg_catalog.count(*), {age} as age from {} where {} \
             group by 1 order by age desc nulls last, 2 desc limit 50",
            quote_table(table),
            conditions.join(" and ")
        );
        Some(Statement { sql, params })
    }
}

/// Names and types, as `format_type` prints them.
async fn columns(client: &Client, table: &TableName) -> Result<Vec<(String, String)>, DbError> {
    let rows = client
        .query(
            "select a.attname::text, pg_catalog.format_type(a.atttypid, null) \
             from pg_catalog.pg_attribute a join pg_catalog.pg_class c on c.oid = a.attrelid \
             join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
             where n.nspname = $1::text and c.relname = $2::text \
             and a.attnum > 0 and not a.attisdropped",
            &[&table.schema, &table.name],
        )
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter()
        .map(|row| Ok((get(row, 0)?, get(row, 1)?)))
        .collect()
}

/// Where the server's WAL ends.
///
/// # Errors
/// 55000 on a standby, or the conversation's.
pub async fn wal_end(client: &Client) -> Result<Lsn, DbError> {
    let row = client
        .query_one("select pg_catalog.pg_current_wal_lsn()", &[])
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Lsn(u64::from(get::<PgLsn>(&row, 0)?)))
}
