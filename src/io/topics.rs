//! The topics that the rows of a table lead to.

use std::collections::BTreeSet;

use tokio_postgres::Client;

use super::catalog;
use super::registry::get;
use super::side::db_error;
use super::sql::{quote_ident, quote_table};
use crate::config::{Mapping, TableName};
use crate::error::DbError;

/// The newest rows stand for those to come.
const ROWS_MAX: u32 = 10_000;
/// Two connections' worth of a broker's metadata; a table whose every row has its own topic is not
/// to be asked about in full.
const TOPICS_MAX: usize = 200;

/// Where the newest rows would go. A template without a column needs no table.
///
/// # Errors
/// Why that cannot be told.
pub async fn of_table(
    client: &Client,
    table: &TableName,
    mapping: &Mapping,
) -> Result<BTreeSet<String>, String> {
    let mut topics: BTreeSet<String> = mapping.topics.values().cloned().collect();
    let columns: Vec<&str> = mapping.topic.columns().collect();
    let rows = if columns.is_empty() {
        vec![Vec::new()]
    } else {
        let read = newest(client, table, &columns).await;
        read.map_err(|error| match error.sqlstate() {
            "42P01" | "3F000" => {
                "there is no table yet, and topics are known from its rows".to_owned()
            }
            _ => format!("the newest rows cannot be read: {error}"),
        })?
    };
    for row in &rows {
        let values = row.iter().map(|value| value.as_deref().map(str::as_bytes));
        let mut topic = String::new();
        // A name that is not legal is that event's own trouble.
        let rendered = mapping.topic.render(values, &mapping.topics, &mut topic);
        if rendered.is_ok() {
            topics.insert(topic);
        }
        if topics.len() == TOPICS_MAX {
            break;
        }
    }
    if topics.is_empty() {
        return Err("the table holds no row: topics are known when events come".to_owned());
    }
    Ok(topics)
}

async fn newest(
    client: &Client,
    table: &TableName,
    columns: &[&str],
) -> Result<Vec<Vec<Option<String>>>, DbError> {
    let names: Vec<String> = columns.iter().map(|name| quote_ident(name)).collect();
    let order = match catalog::leading_key(client, table).await? {
        Some(key) => format!("order by {} desc ", quote_ident(&key)),
        None => String::new(),
    };
    // As the type's output function does, like the stream.
    let texts: Vec<String> = (1..=columns.len())
        .map(|n| format!("pg_catalog.format('%s', r.c{n})"))
        .collect();
    let aliases: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(at, name)| format!("{name} as c{}", at + 1))
        .collect();
    let nulls: Vec<String> = (1..=columns.len())
        .map(|n| format!("case when r.c{n} is not null then t{n} end"))
        .collect();
    let of: Vec<String> = (1..=columns.len()).map(|n| format!("t{n}")).collect();
    let sql = format!(
        "select distinct {} from (select {} from {} {order}limit {ROWS_MAX}) r, \
         lateral (select {}) t ({}) limit {}",
        nulls.join(", "),
        aliases.join(", "),
        quote_table(table),
        texts.join(", "),
        of.join(", "),
        TOPICS_MAX * 2,
    );
    let rows = client.query(&sql, &[]).await.map_err(|e| db_error(&e))?;
    rows.iter()
        .map(|row| (0..columns.len()).map(|at| get(row, at)).collect())
        .collect()
}
