//! What is there before `init` changes anything.

use tokio_postgres::Client;

use crate::config::{Source, TableName};
use crate::error::DbError;
use crate::io::catalog::{Publication, Role, Table};
use crate::io::preflight::{self, Registry};
use crate::io::registry::{self, Holder, Registered, Server, SlotState};
use crate::io::side::db_error;
use crate::io::sql::quote_table;

/// Rows are counted no further than this: the answer "are there any, and about how many" must not
/// read a table of a year.
pub const ROWS_COUNTED_MAX: i64 = 10_000;

/// All that the plan is made from.
#[derive(Debug)]
pub struct Seen {
    pub server: Server,
    pub role: Role,
    pub table_schema_exists: bool,
    pub may_use_schema: bool,
    pub may_create_in_schema: bool,
    pub may_create_in_database: bool,
    pub table: Option<Table>,
    pub rows: Rows,
    pub brin_index: bool,
    pub helpers: Helpers,
    pub walrelay: WalrelaySchema,
    /// This table's.
    pub row: Option<Registered>,
    /// Another table's row that names our slot or our publication, and that table's present name.
    pub rival: Option<(Registered, Option<TableName>)>,
    pub publication: Option<Publication>,
    pub slot: Option<SlotState>,
    /// Who holds the slot that the registry names for this table, else the one that was asked for.
    pub slot_holder: Option<Holder>,
    pub slots: Slots,
}

/// How many rows the outbox holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// There is no table, or this role may not read it.
    Unknown,
    Exactly(i64),
    /// More than [`ROWS_COUNTED_MAX`]; the planner's estimate, where there is one.
    Many(Option<i64>),
}

impl std::fmt::Display for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rows::Unknown => f.write_str("an unknown number of rows"),
            Rows::Exactly(1) => f.write_str("1 row"),
            Rows::Exactly(n) => write!(f, "{n} rows"),
            Rows::Many(Some(estimate)) => write!(f, "about {estimate} rows"),
            Rows::Many(None) => write!(f, "more than {ROWS_COUNTED_MAX} rows"),
        }
    }
}

/// The helper functions in the table's schema.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Helpers {
    pub event_id: bool,
    pub emit: bool,
    /// `outbox_emit` writes to this very table.
    pub emit_is_ours: bool,
}

/// Schema `walrelay`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WalrelaySchema {
    Absent,
    /// It is there; these tables of ours are not.
    Incomplete(Vec<String>),
    Complete {
        may_write: bool,
    },
}

/// The server's slots, all databases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    pub used: i64,
    pub max: i64,
    /// Inactive ones and the WAL that each retains, for a person: candidates to drop.
    pub idle: Vec<(String, String)>,
    pub wal_senders_max: i64,
}

pub async fn survey(client: &Client, source: &Source) -> Result<Seen, DbError> {
    let preflight::Seen {
        server,
        role,
        table,
        registry,
        publication,
        slots,
        settings,
        ..
    } = preflight::look(client, source).await?;
    let table = table?;
    let walrelay = walrelay_schema(client).await?;
    let Registry { row, rival, .. } = match walrelay {
        WalrelaySchema::Complete { .. } => registry?,
        WalrelaySchema::Absent | WalrelaySchema::Incomplete(_) => Registry::default(),
    };
    let rights = rights(client, &source.table.schema).await?;
    let (rows, brin_index) = match &table {
        Some(table) if matches!(table.kind, 'r' | 'p') => (
            rows(client, &source.table).await?,
            has_brin_index(client, table.oid).await?,
        ),
        _ => (Rows::Unknown, false),
    };
    let (slots, settings) = (slots?, settings?);
    let held = row.as_ref().map_or(&source.slot, |row| &row.slot);
    let line = |name: &str| slots.iter().find(|slot| slot.name == name);
    let limit = |name| settings.number(name).unwrap_or(i64::MAX);
    Ok(Seen {
        table_schema_exists: rights.schema_exists,
        may_use_schema: rights.may_use_schema,
        may_create_in_schema: rights.may_create_in_schema,
        may_create_in_database: rights.may_create_in_database,
        table,
        rows,
        brin_index,
        helpers: helpers(client, &source.table).await?,
        walrelay,
        publication: publication?,
        slot: line(&source.slot).map(|slot| slot.state.clone()),
        slot_holder: line(held).and_then(|slot| slot.holder.clone()),
        slots: Slots {
            used: i64::try_from(slots.len()).unwrap_or(i64::MAX),
            max: limit("max_replication_slots"),
            wal_senders_max: limit("max_wal_senders"),
            idle: preflight::idle_slots(&slots),
        },
        row,
        rival,
        server,
        role: role?,
    })
}

/// About the table's schema, and the database.
struct Rights {
    schema_exists: bool,
    may_use_schema: bool,
    may_create_in_schema: bool,
    may_create_in_database: bool,
}

async fn rights(client: &Client, schema: &str) -> Result<Rights, DbError> {
    let row = client
        .query_one(
            "select n.oid is not null, \
             coalesce(pg_catalog.has_schema_privilege(n.oid, 'usage'), false), \
             coalesce(pg_catalog.has_schema_privilege(n.oid, 'create'), false), \
             pg_catalog.has_database_privilege(pg_catalog.current_database(), 'create') \
             from (select 1) one left join pg_catalog.pg_namespace n on n.nspname = $1::text",
            &[&schema],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Rights {
        schema_exists: registry::get(&row, 0)?,
        may_use_schema: registry::get(&row, 1)?,
        may_create_in_schema: registry::get(&row, 2)?,
        may_create_in_database: registry::get(&row, 3)?,
    })
}

async fn walrelay_schema(client: &Client) -> Result<WalrelaySchema, DbError> {
    let names: Vec<&str> = super::migrations::WALRELAY_TABLES.to_vec();
    let row = client
        .query_one(
            "select exists (select from pg_catalog.pg_namespace where nspname = 'walrelay'), \
             array(select t from pg_catalog.unnest($1::text[]) t where not exists ( \
               select from pg_catalog.pg_class c \
               join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
               where n.nspname = 'walrelay' and c.relname = t)), \
             coalesce((select pg_catalog.has_schema_privilege(n.oid, 'usage') \
                 and pg_catalog.has_table_privilege(c.oid, 'select') \
                 and pg_catalog.has_table_privilege(c.oid, 'insert') \
                 and pg_catalog.has_table_privilege(c.oid, 'update') \
               from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
               where n.nspname = 'walrelay' and c.relname = 'relay'), false)",
            &[&names],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let exists: bool = registry::get(&row, 0)?;
    let missing: Vec<String> = registry::get(&row, 1)?;
    Ok(if !exists {
        WalrelaySchema::Absent
    } else if missing.is_empty() {
        WalrelaySchema::Complete {
            may_write: registry::get(&row, 2)?,
        }
    } else {
        WalrelaySchema::Incomplete(missing)
    })
}

async fn rows(client: &Client, table: &TableName) -> Result<Rows, DbError> {
    let counted = client.query_one(&count_sql(table), &[]).await;
    let counted: i64 = match counted {
        Ok(row) => registry::get(&row, 0)?,
        Err(error) => {
            let error = db_error(&error);
            // Not ours to read: the plan says so if it matters.
            return if error.sqlstate() == "42501" {
                Ok(Rows::Unknown)
            } else {
                Err(error)
            };
        }
    };
    if counted <= ROWS_COUNTED_MAX {
        return Ok(Rows::Exactly(counted));
    }
    let row = client
        .query_one(
            "select pg_catalog.sum(c.reltuples)::int8 from pg_catalog.pg_class c \
             where c.oid = $1::text::regclass or c.oid in (select relid \
               from pg_catalog.pg_partition_tree($1::text::regclass) where isleaf)",
            &[&quote_table(table)],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let estimate: Option<i64> = registry::get(&row, 0)?;
    Ok(Rows::Many(estimate.filter(|n| *n > ROWS_COUNTED_MAX)))
}

/// Counts rows, but no further than one more than [`ROWS_COUNTED_MAX`].
pub fn count_sql(table: &TableName) -> String {
    format!(
        "select pg_catalog.count(*) from (select from {} limit {}) r",
        quote_table(table),
        ROWS_COUNTED_MAX + 1
    )
}

async fn has_brin_index(client: &Client, oid: u32) -> Result<bool, DbError> {
    let row = client
        .query_one(
            "select exists (select from pg_catalog.pg_index i \
             join pg_catalog.pg_class c on c.oid = i.indexrelid \
             join pg_catalog.pg_am a on a.oid = c.relam \
             where i.indrelid = $1 and a.amname = 'brin' \
             and pg_catalog.pg_get_indexdef(i.indexrelid) like '%xid%')",
            &[&oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    registry::get(&row, 0)
}

async fn helpers(client: &Client, table: &TableName) -> Result<Helpers, DbError> {
    let row = client
        .query_one(
            "select coalesce(pg_catalog.bool_or(p.proname = 'outbox_event_id'), false), \
             coalesce(pg_catalog.bool_or(p.proname = 'outbox_emit'), false), \
             coalesce(pg_catalog.bool_or(p.proname = 'outbox_emit' \
               and pg_catalog.strpos(p.prosrc, 'insert into ' || $2::text || ' (') > 0 \
               or p.proname = 'outbox_emit' \
               and pg_catalog.strpos(p.prosrc, 'insert into ' || $3::text || ' (') > 0), false) \
             from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace \
             where n.nspname = $1::text and p.proname in ('outbox_event_id', 'outbox_emit')",
            // The file as it stands, applied by hand, has the plain name.
            &[
                &table.schema,
                &quote_table(table),
                &format!("{}.{}", table.schema, table.name),
            ],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Helpers {
        event_id: registry::get(&row, 0)?,
        emit: registry::get(&row, 1)?,
        emit_is_ours: registry::get(&row, 2)?,
    })
}
