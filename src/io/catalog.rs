//! What the catalogs say of the outbox's surroundings: role, table, publication. Reads only.

use tokio_postgres::Client;

use super::registry::{self, get};
use super::side::db_error;
use crate::config::TableName;
use crate::error::DbError;

/// A relation that a table's name leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub oid: u32,
    /// `pg_class.relkind`.
    pub kind: char,
    /// `pg_class.relpersistence`.
    pub persistence: char,
    pub owner: String,
    /// The session's role owns it, or is a member of the role that does.
    pub owned: bool,
    /// Tables that inherit from it, for a person; partitions do not count.
    pub children: Vec<String>,
    /// Of a partitioned table: roles that may update its key, superusers aside; a few of them.
    pub movers: Vec<String>,
    pub columns: Vec<Column>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    /// As `format_type` prints it.
    pub type_name: String,
    /// The same, of the type that a domain is over.
    pub base_type: String,
    pub generated: bool,
}

/// A row of `pg_publication` and what it covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publication {
    pub all_tables: bool,
    /// The operations that it publishes, in the catalog's order.
    pub publish: Vec<String>,
    pub via_partition_root: bool,
    pub tables: Vec<Published>,
    /// `for tables in schema`.
    pub schemas: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    pub oid: u32,
    pub name: TableName,
    pub row_filter: bool,
    pub column_list: bool,
}

/// The session's role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Role {
    pub name: String,
    pub may_replicate: bool,
    pub database: String,
}

/// # Errors
/// Only the conversation's.
pub async fn role(client: &Client) -> Result<Role, DbError> {
    let row = client
        .query_one(
            // Managed services patch the server: there a membership stands for the attribute.
            "select r.rolname::text, r.rolreplication or r.rolsuper or exists ( \
               select from pg_catalog.pg_roles m where m.rolname in ('rds_replication', 'alloydbreplica') \
               and pg_catalog.pg_has_role(m.oid, 'usage')), \
             pg_catalog.current_database()::text \
             from pg_catalog.pg_roles r where r.rolname = session_user",
            &[],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Role {
        name: get(&row, 0)?,
        may_replicate: get(&row, 1)?,
        database: get(&row, 2)?,
    })
}

/// # Errors
/// Only the conversation's.
pub async fn table(client: &Client, name: &TableName) -> Result<Option<Table>, DbError> {
    let Some(oid) = registry::table_oid(client, name).await? else {
        return Ok(None);
    };
    let row = client
        .query_opt(
            "select c.relkind::text, c.relpersistence::text, \
             pg_catalog.pg_get_userbyid(c.relowner)::text, \
             pg_catalog.pg_has_role(c.relowner, 'usage'), \
             array(select pg_catalog.format('%I.%I', n.nspname, k.relname) \
               from pg_catalog.pg_inherits i join pg_catalog.pg_class k on k.oid = i.inhrelid \
               join pg_catalog.pg_namespace n on n.oid = k.relnamespace \
               where i.inhparent = c.oid and not k.relispartition order by 1 limit 5), \
             array(select pg_catalog.quote_ident(r.rolname) from pg_catalog.pg_roles r \
               join pg_catalog.pg_partitioned_table p on p.partrelid = c.oid \
               where not r.rolsuper and r.oid >= 16384 and exists (select \
                 from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0 \
                 and not a.attisdropped \
                 and (a.attnum = any(p.partattrs) or 0 = any(p.partattrs)) \
                 and pg_catalog.has_column_privilege(r.oid, c.oid, a.attnum, 'update')) \
               order by 1 limit 5) \
             from pg_catalog.pg_class c where c.oid = $1",
            &[&oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let Some(row) = row else { return Ok(None) };
    let columns = client
        .query(
            "select a.attname::text, pg_catalog.format_type(a.atttypid, null), (with recursive \
               base(oid) as (select a.atttypid union all \
                 select t.typbasetype from base join pg_catalog.pg_type t on t.oid = base.oid \
                 where t.typtype = 'd') \
               select pg_catalog.format_type(base.oid, null) from base \
               join pg_catalog.pg_type t on t.oid = base.oid where t.typtype <> 'd'), \
             a.attgenerated <> '' from pg_catalog.pg_attribute a \
             where a.attrelid = $1 and a.attnum > 0 and not a.attisdropped order by a.attnum",
            &[&oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Some(Table {
        oid,
        kind: first_char(get(&row, 0)?),
        persistence: first_char(get(&row, 1)?),
        owner: get(&row, 2)?,
        owned: get(&row, 3)?,
        children: get(&row, 4)?,
        movers: get(&row, 5)?,
        columns: columns
            .iter()
            .map(|row| {
                Ok(Column {
                    name: get(row, 0)?,
                    type_name: get(row, 1)?,
                    base_type: get(row, 2)?,
                    generated: get(row, 3)?,
                })
            })
            .collect::<Result<_, DbError>>()?,
    }))
}

/// The first column of the table's primary key, which an index orders its rows by.
///
/// # Errors
/// Only the conversation's.
pub async fn leading_key(client: &Client, table: &TableName) -> Result<Option<String>, DbError> {
    let row = client
        .query_opt(
            "select a.attname::text from pg_catalog.pg_class c \
             join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
             join pg_catalog.pg_index i on i.indrelid = c.oid and i.indisprimary \
             join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = i.indkey[0] \
             where n.nspname = $1::text and c.relname = $2::text",
            &[&table.schema, &table.name],
        )
        .await
        .map_err(|e| db_error(&e))?;
    row.map(|row| get(&row, 0)).transpose()
}

fn first_char(text: &str) -> char {
    text.chars().next().unwrap_or('?')
}

/// # Errors
/// Only the conversation's.
pub async fn publication(client: &Client, name: &str) -> Result<Option<Publication>, DbError> {
    let row = client
        .query_opt(
            "select oid, puballtables, pubviaroot, pubinsert, pubupdate, pubdelete, pubtruncate \
             from pg_catalog.pg_publication where pubname = $1::text",
            &[&name],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let Some(row) = row else { return Ok(None) };
    let oid: u32 = get(&row, 0)?;
    let mut publish = Vec::new();
    for (at, operation) in ["insert", "update", "delete", "truncate"]
        .into_iter()
        .enumerate()
    {
        if get(&row, 3 + at)? {
            publish.push(operation.to_owned());
        }
    }
    let tables = client
        .query(
            "select c.oid, n.nspname::text, c.relname::text, r.prqual is not null, \
             r.prattrs is not null from pg_catalog.pg_publication_rel r \
             join pg_catalog.pg_class c on c.oid = r.prrelid \
             join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
             where r.prpubid = $1 order by 2, 3",
            &[&oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let schemas = client
        .query(
            "select n.nspname::text from pg_catalog.pg_publication_namespace p \
             join pg_catalog.pg_namespace n on n.oid = p.pnnspid where p.pnpubid = $1 order by 1",
            &[&oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Some(Publication {
        all_tables: get(&row, 1)?,
        via_partition_root: get(&row, 2)?,
        publish,
        tables: tables.iter().map(published).collect::<Result<_, _>>()?,
        schemas: schemas
            .iter()
            .map(|row| get(row, 0))
            .collect::<Result<_, _>>()?,
    }))
}

fn published(row: &tokio_postgres::Row) -> Result<Published, DbError> {
    Ok(Published {
        oid: get(row, 0)?,
        name: TableName {
            schema: get(row, 1)?,
            name: get(row, 2)?,
        },
        row_filter: get(row, 3)?,
        column_list: get(row, 4)?,
    })
}

/// The present name of a relation; `None` when it is gone.
///
/// # Errors
/// Only the conversation's.
pub async fn relation_name(client: &Client, oid: u32) -> Result<Option<TableName>, DbError> {
    let row = client
        .query_opt(
            "select n.nspname::text, c.relname::text from pg_catalog.pg_class c \
             join pg_catalog.pg_namespace n on n.oid = c.relnamespace where c.oid = $1",
            &[&oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    row.map(|row| {
        Ok(TableName {
            schema: get(&row, 0)?,
            name: get(&row, 1)?,
        })
    })
    .transpose()
}

/// An expression that says what a publication covers of a table, as jsonb: catalog rows' oid and
/// xmin, column list, row filter, and the table's children. Compared, never interpreted, except
/// for the children.
///
/// `table` and `publication` are SQL texts: literals or parameters.
#[must_use]
pub fn coverage_sql(table: &str, publication: &str) -> String {
    format!(
        "select pg_catalog.jsonb_build_object( \
           'publication', pg_catalog.jsonb_build_array(p.oid, p.xmin::text), \
           'relation', pg_catalog.jsonb_build_array(r.oid, r.xmin::text), \
           'columns', r.prattrs::text, \
           'filter', pg_catalog.pg_get_expr(r.prqual, r.prrelid), \
           'children', (select coalesce(pg_catalog.jsonb_agg(i.inhrelid::int8 \
             order by i.inhrelid), '[]'::jsonb) from pg_catalog.pg_inherits i \
             where i.inhparent = t.oid)) \
         from (select {table}::text::regclass::oid) t(oid) \
         left join pg_catalog.pg_publication p on p.pubname = {publication}::text \
         left join pg_catalog.pg_publication_rel r on r.prpubid = p.oid and r.prrelid = t.oid"
    )
}
