//! What there is, asked all at once: the questions go out together and each may fail alone.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio_postgres::Client;

use crate::config::{Source, TableName};
use crate::error::DbError;
use crate::io::catalog::{self, Publication, Role, Table};
use crate::io::registry::{self, Instance, Registered, Server, get};
use crate::io::side::db_error;
use crate::io::slot_view::{self, SlotLine};

/// What was asked, or why there is no answer.
pub type Answer<T> = Result<T, DbError>;

/// A transaction that is open for longer may be what holds the slot back.
pub const OLD_TRANSACTION: Duration = Duration::from_secs(60);

/// Settings whose values matter, as their own unit has them.
const SETTINGS: [&str; 8] = [
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "max_replication_slots",
    "max_wal_senders",
    "max_slot_wal_keep_size",
    "idle_replication_slot_timeout",
    "synchronized_standby_slots",
];

/// The whole of it.
pub struct Seen {
    pub server: Server,
    pub session: Answer<Session>,
    pub settings: Answer<Settings>,
    pub role: Answer<Role>,
    pub table: Answer<Option<Table>>,
    pub rights: Answer<Rights>,
    pub registry: Answer<Registry>,
    pub publication: Answer<Option<Publication>>,
    /// All of the cluster.
    pub slots: Answer<Vec<SlotLine>>,
    pub senders: Answer<Senders>,
    /// Sessions that hold a lock of this table: the leader's, an instance's.
    pub instances: Answer<Vec<Instance>>,
    /// Where `synchronous_commit = off` is the default of a role or a database.
    pub commits_off: Answer<Vec<String>>,
    pub transactions: Answer<Vec<OldTransaction>>,
}

/// How this session came about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Where the server listens, as it sees it itself.
    pub server: String,
    /// `TLSv1.3`; `None` in clear.
    pub tls: Option<String>,
    /// As the server sees it; `None` over a Unix socket.
    pub client_addr: Option<String>,
    /// Whether this role sees what sessions of others do.
    pub sees_others: bool,
}

/// Values by name; a name that this version does not know is not in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<String, Setting>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Setting {
    /// What a new session of this role begins with, in the setting's own unit.
    value: String,
    /// With its unit, for a person.
    shown: String,
}

impl Session {
    /// Who could listen, for a person.
    #[must_use]
    pub fn secrecy(&self) -> String {
        match (&self.tls, &self.client_addr) {
            (Some(version), _) => version.clone(),
            (None, Some(_)) => "in clear".to_owned(),
            (None, None) => "on this machine".to_owned(),
        }
    }
}

impl Settings {
    /// The empty text where this version has no such setting.
    #[must_use]
    pub fn value(&self, name: &str) -> &str {
        self.0.get(name).map_or("", |setting| &setting.value)
    }

    #[must_use]
    pub fn shown(&self, name: &str) -> &str {
        self.0.get(name).map_or("", |setting| &setting.shown)
    }

    #[must_use]
    pub fn number(&self, name: &str) -> Option<i64> {
        self.value(name).parse().ok()
    }

    #[cfg(test)]
    pub fn of(values: &[(&str, &str)]) -> Settings {
        let setting = |text: &str| Setting {
            value: text.to_owned(),
            shown: text.to_owned(),
        };
        let values = values.iter();
        Settings(
            values
                .map(|(name, value)| ((*name).to_owned(), setting(value)))
                .collect(),
        )
    }
}

/// What this role may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    pub walrelay_exists: bool,
    pub may_read_walrelay: bool,
    pub may_write_walrelay: bool,
    /// Read, add, change and delete dead letters.
    pub may_park: bool,
    /// Of the outbox; both false where there is none.
    pub may_use_schema: bool,
    pub may_read_table: bool,
    /// Row level security hides rows of the outbox from this role.
    pub row_security: bool,
}

/// Rows of `walrelay.relay` that have to do with this relay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registry {
    /// `init` has been in this database.
    pub initialised: bool,
    /// This table's.
    pub row: Option<Registered>,
    /// Another table's row that names our slot or our publication, and that table's present name.
    pub rival: Option<(Registered, Option<TableName>)>,
}

impl Registry {
    /// The row that names the slot, whatever table has it; else this table's.
    #[must_use]
    pub fn of_slot(&self, slot: &str) -> Option<&Registered> {
        let rival = self.rival.as_ref().map(|(rival, _)| rival);
        let mut rows = self.row.iter().chain(rival);
        rows.find(|row| row.slot == slot).or(self.row.as_ref())
    }

    /// The other table that has the slot: by its present name, if it still has one.
    #[must_use]
    pub fn swapped(&self, slot: &str) -> Option<Option<&TableName>> {
        if self.row.as_ref().is_some_and(|row| row.slot == slot) {
            return None;
        }
        let (rival, name) = self.rival.as_ref()?;
        (rival.slot == slot).then_some(name.as_ref())
    }
}

/// Walsenders of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Senders {
    pub used: i64,
    /// Those that serve standbys or archives.
    pub physical: i64,
}

/// A transaction that has been open for long.
#[derive(Clone, Debug, PartialEq)]
pub struct OldTransaction {
    /// Of a prepared one.
    pub gid: Option<String>,
    pub pid: Option<i32>,
    pub user: Option<String>,
    pub application_name: Option<String>,
    pub database: Option<String>,
    pub age: Duration,
    /// It has written: the slot's restart_lsn waits for it, too, not only vacuum.
    pub has_xid: bool,
}

/// Asks everything.
///
/// # Errors
/// Only where not even the server's version could be asked.
pub async fn look(client: &Client, source: &Source) -> Result<Seen, DbError> {
    let server = registry::server(client).await?;
    let (table, slot, publication) = (&source.table, &source.slot, &source.publication);
    let (session, settings, role, found, rights, registry) = tokio::join!(
        session(client),
        settings(client),
        catalog::role(client),
        catalog::table(client, table),
        rights(client, table),
        registry_rows(client, table, slot, publication),
    );
    // Under a table that was swapped the leader has the lock of the old one.
    let registered = registry.as_ref().ok().and_then(|r| r.of_slot(slot));
    let here = found.as_ref().ok().and_then(Option::as_ref);
    let led = registered.map_or(here.map(|table| table.oid), |row| Some(row.table_oid));
    let (publication, slots, senders, instances, commits_off, transactions) = tokio::join!(
        catalog::publication(client, publication),
        slot_view::all_slots(client),
        senders(client),
        registry::instances(client, led),
        commits_off(client),
        old_transactions(client),
    );
    Ok(Seen {
        server,
        session,
        settings,
        role,
        table: found,
        rights,
        registry,
        publication,
        slots,
        senders,
        instances,
        commits_off,
        transactions,
    })
}

async fn session(client: &Client) -> Answer<Session> {
    let row = client
        .query_one(
            "select (select s.version from pg_catalog.pg_stat_ssl s \
               where s.pid = pg_catalog.pg_backend_pid() and s.ssl), \
             host(pg_catalog.inet_client_addr()), \
             pg_catalog.concat_ws(' port ', coalesce(host(pg_catalog.inet_server_addr()), \
               'Unix socket'), pg_catalog.current_setting('port')), \
             pg_catalog.pg_has_role('pg_read_all_stats', 'usage')",
            &[],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Session {
        tls: get(&row, 0)?,
        client_addr: get(&row, 1)?,
        server: get(&row, 2)?,
        sees_others: get(&row, 3)?,
    })
}

async fn settings(client: &Client) -> Answer<Settings> {
    let names = SETTINGS.to_vec();
    let rows = client
        .query(
            // reset_val: this session has set some of them for itself.
            "select name, reset_val, pg_catalog.current_setting(name) \
             from pg_catalog.pg_settings where name = any($1::text[])",
            &[&names],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let mut settings = BTreeMap::new();
    for row in &rows {
        let setting = Setting {
            value: get::<Option<String>>(row, 1)?.unwrap_or_default(),
            shown: get(row, 2)?,
        };
        settings.insert(get(row, 0)?, setting);
    }
    Ok(Settings(settings))
}

pub(super) async fn rights(client: &Client, table: &TableName) -> Answer<Rights> {
    let row = client
        .query_one(
            "select w.found, w.usage and w.reads, w.usage and w.writes, \
             coalesce(t.usage, false), coalesce(t.reads, false), coalesce(t.hidden, false), \
             w.usage and w.parks from (select pg_catalog.count(*) > 0, \
               coalesce(pg_catalog.bool_and(pg_catalog.has_schema_privilege(n.oid, 'usage')), false), \
               coalesce(pg_catalog.bool_and(pg_catalog.has_table_privilege(c.oid, 'select')), false), \
               coalesce(pg_catalog.bool_and(pg_catalog.has_table_privilege(c.oid, 'insert') \
                 and pg_catalog.has_table_privilege(c.oid, 'update') \
                 and pg_catalog.has_table_privilege(c.oid, 'delete')), false), \
               coalesce(pg_catalog.bool_and(pg_catalog.has_table_privilege(c.oid, 'select') \
                 and pg_catalog.has_table_privilege(c.oid, 'insert') \
                 and pg_catalog.has_table_privilege(c.oid, 'update') \
                 and pg_catalog.has_table_privilege(c.oid, 'delete')) \
                 filter (where c.relname = 'dead_letter'), false) \
               from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
               where n.nspname = 'walrelay' and c.relkind = 'r') \
               w (found, usage, reads, writes, parks) \
             left join (select pg_catalog.has_schema_privilege(n.oid, 'usage'), \
                 pg_catalog.has_table_privilege(c.oid, 'select'), \
                 pg_catalog.row_security_active(c.oid) \
               from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
               where n.nspname = $1::text and c.relname = $2::text and c.relkind in ('r', 'p')) \
               t (usage, reads, hidden) on true",
            &[&table.schema, &table.name],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Rights {
        walrelay_exists: get(&row, 0)?,
        may_read_walrelay: get(&row, 1)?,
        may_write_walrelay: get(&row, 2)?,
        may_use_schema: get(&row, 3)?,
        may_read_table: get(&row, 4)?,
        row_security: get(&row, 5)?,
        may_park: get(&row, 6)?,
    })
}

async fn registry_rows(
    client: &Client,
    table: &TableName,
    slot: &str,
    publication: &str,
) -> Answer<Registry> {
    let (initialised, oid) = tokio::join!(
        registry::is_initialised(client),
        registry::table_oid(client, table)
    );
    if !initialised? {
        return Ok(Registry::default());
    }
    let oid = oid?;
    let mut row = None;
    let mut rivals = Vec::new();
    for found in registry::load_related(client, oid, slot, publication).await? {
        if Some(found.table_oid) == oid {
            row = Some(found);
        } else {
            rivals.push(found);
        }
    }
    // The slot's is the more telling one, where two tables have one of the names each.
    rivals.sort_by_key(|rival| rival.slot != slot);
    let rival = match rivals.into_iter().next() {
        Some(rival) => {
            let name = catalog::relation_name(client, rival.table_oid).await?;
            Some((rival, name))
        }
        None => None,
    };
    Ok(Registry {
        initialised: true,
        row,
        rival,
    })
}

async fn senders(client: &Client) -> Answer<Senders> {
    let row = client
        .query_one(
            "select pg_catalog.count(*), pg_catalog.count(*) filter (where s.slot_type = 'physical' \
               or s.slot_type is null and r.state in ('catchup', 'streaming')) \
             from pg_catalog.pg_stat_replication r \
             left join pg_catalog.pg_replication_slots s on s.active_pid = r.pid",
            &[],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Senders {
        used: get(&row, 0)?,
        physical: get(&row, 1)?,
    })
}

async fn commits_off(client: &Client) -> Answer<Vec<String>> {
    let rows = client
        .query(
            "select concat_ws(' in ', 'role ' || pg_catalog.quote_ident(r.rolname), \
               'database ' || pg_catalog.quote_ident(d.datname)) \
             from pg_catalog.pg_db_role_setting s \
             cross join pg_catalog.unnest(s.setconfig) c (setting) \
             left join pg_catalog.pg_roles r on r.oid = s.setrole \
             left join pg_catalog.pg_database d on d.oid = s.setdatabase \
             where pg_catalog.lower(c.setting) in ('synchronous_commit=off', \
               'synchronous_commit=false', 'synchronous_commit=no', 'synchronous_commit=0') \
             and (s.setdatabase = 0 or d.datname = pg_catalog.current_database()) order by 1",
            &[],
        )
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter().map(|row| get(row, 0)).collect()
}

/// The oldest ones first, prepared ones among them.
async fn old_transactions(client: &Client) -> Answer<Vec<OldTransaction>> {
    let rows = client
        .query(
            "select t.* from ( \
               select null::text, a.pid, a.usename::text, a.application_name, a.datname::text, \
                 extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::float8 as age, \
                 a.backend_xid is not null \
               from pg_catalog.pg_stat_activity a \
               where (a.backend_xid is not null or a.backend_xmin is not null) \
               and a.backend_type = 'client backend' and a.pid <> pg_catalog.pg_backend_pid() \
               union all \
               select p.gid, null, p.owner::text, null, p.database::text, \
                 extract(epoch from pg_catalog.clock_timestamp() - p.prepared)::float8, true \
               from pg_catalog.pg_prepared_xacts p) t \
             where t.age > $1 order by t.age desc limit 5",
            &[&OLD_TRANSACTION.as_secs_f64()],
        )
        .await
        .map_err(|e| db_error(&e))?;
    rows.iter()
        .map(|row| {
            Ok(OldTransaction {
                gid: get(row, 0)?,
                pid: get(row, 1)?,
                user: get(row, 2)?,
                application_name: get(row, 3)?,
                database: get(row, 4)?,
                age: Duration::from_secs_f64(get::<f64>(row, 5)?.max(0.0)),
                has_xid: get(row, 6)?,
            })
        })
        .collect()
}

impl Seen {
    /// Where the connection broke or the server went away, all later answers say the same.
    #[must_use]
    pub fn broken(&self) -> Option<&DbError> {
        let errors = [
            self.settings.as_ref().err(),
            self.role.as_ref().err(),
            self.slots.as_ref().err(),
            self.transactions.as_ref().err(),
        ];
        let is_end = |error: &&DbError| match error {
            DbError::Unreachable(_) => true,
            DbError::Server { sqlstate, .. } => {
                sqlstate.starts_with("57P") || sqlstate.starts_with("08")
            }
            DbError::Tls(_) | DbError::Auth(_) | DbError::Protocol(_) => false,
        };
        errors.into_iter().flatten().find(is_end)
    }

    /// What a relay cannot start without knowing, and could not be asked.
    #[must_use]
    pub fn unanswered(&self) -> Option<&DbError> {
        let errors = [
            self.role.as_ref().err(),
            self.table.as_ref().err(),
            self.registry.as_ref().err(),
            self.publication.as_ref().err(),
            self.slots.as_ref().err(),
        ];
        errors.into_iter().flatten().next()
    }

    /// A slot of the cluster by its name.
    #[must_use]
    pub fn slot(&self, name: &str) -> Option<&SlotLine> {
        self.slots.as_ref().ok()?.iter().find(|s| s.name == name)
    }
}
