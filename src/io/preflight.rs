//! What must hold before the relay may stream, and what to do where it does not. `init` and `run`
//! ask the same questions; the answers that need no server are pure functions.
//!
//! # Invariants
//! Every unmet need is reported at once, not the first only. Nothing here changes anything.

mod fit;

use tokio_postgres::Client;

use super::catalog::{self, Role};
use super::registry::{self, Found, Holder, Registered, Server, SlotState};
use super::sql::{quote_ident, quote_literal, show_ident, show_table};
use crate::config::{Mapping, Part, Source, TableName};
use crate::error::{DbError, Failure};
use crate::finding::{self, Finding};
pub use fit::{publication_needs, table_needs};

/// The oldest and the newest major version that this was tried on.
const VERSIONS: (i32, i32) = (15, 18);

/// Why a check came to no good end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotReady {
    /// The conversation failed; `heals_with_time` says whether to ask again.
    Db(DbError),
    Refused(Failure),
}

impl From<DbError> for NotReady {
    fn from(error: DbError) -> Self {
        NotReady::Db(error)
    }
}

/// What a column is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Part(Part),
    Topic,
    Header,
}

/// A column that the mapping names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needed<'a> {
    pub name: &'a str,
    pub used_as: Use,
}

/// The columns that a record cannot be made without, each once a use. Of the columns that only
/// reports read, those that were named on purpose.
#[must_use]
pub fn needed(mapping: &Mapping) -> Vec<Needed<'_>> {
    let parts = mapping
        .columns
        .all()
        .filter(|(part, column)| part.is_read() || *column != part.name())
        .map(|(part, name)| (name, Use::Part(part)));
    let in_topic = mapping.topic.columns().map(|name| (name, Use::Topic));
    let headers = mapping.headers.iter();
    let headers = headers.map(|(_, column)| (column.as_str(), Use::Header));
    parts
        .chain(in_topic)
        .chain(headers)
        .map(|(name, used_as)| Needed { name, used_as })
        .collect()
}

/// What `run` needs to know once everything is in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    pub server: Server,
    pub registered: Registered,
    pub slot: SlotState,
    /// Worth a log line, no more.
    pub warnings: Vec<String>,
}

/// Everything that must hold before START_REPLICATION. A slot that another session holds is no
/// obstacle here: `run` waits for it.
///
/// # Errors
/// [`NotReady::Refused`] with every unmet need; [`NotReady::Db`] where the server could not be asked.
pub async fn before_run(
    client: &Client,
    source: &Source,
    columns: &[Needed<'_>],
) -> Result<Ready, NotReady> {
    let server = registry::server(client).await?;
    let role = catalog::role(client).await?;
    let mut needs = server_needs(&server);
    if server.in_recovery {
        // A standby has slots of its own: what they lack says nothing of the primary's.
        return Err(refusal(needs));
    }
    needs.extend(role_needs(&role));
    let found = match registry::load_by_table(client, &source.table).await {
        Err(error) if error.sqlstate() == "42501" => {
            needs.push(no_registry_access(&role));
            return Err(refusal(needs));
        }
        found => found?,
    };
    let slot = registry::slot_state(client, &source.slot).await?;
    let holder = match &found {
        Found::Row(row) => registry::holder(client, &row.slot).await?,
        Found::NoTable | Found::NotInitialised { .. } | Found::NoRow { .. } => None,
    };
    let seen = SlotSeen {
        source,
        server: &server,
        database: &role.database,
        slot: slot.as_ref(),
        holder: holder.as_ref(),
    };
    needs.extend(needs_of(client, &seen, &found, columns).await?);
    match (found, slot) {
        (Found::Row(registered), Some(slot)) if needs.is_empty() => Ok(Ready {
            warnings: warnings(&server, &registered.slot, &slot),
            server,
            registered: *registered,
            slot,
        }),
        _ => Err(refusal(needs)),
    }
}

/// What table, publication, registry row and slot lack. Where the names do not belong together,
/// nothing is said of how well each would do.
async fn needs_of(
    client: &Client,
    seen: &SlotSeen<'_>,
    found: &Found,
    columns: &[Needed<'_>],
) -> Result<Vec<Finding>, DbError> {
    let source = seen.source;
    let by_registry = match found {
        Found::Row(row) => {
            let otherwise = seen.named_otherwise(row);
            if !otherwise.is_empty() {
                return Ok(otherwise);
            }
            seen.needs_of_registered(row)
        }
        Found::NoTable => return Ok(vec![no_table(&source.table)]),
        Found::NotInitialised { .. } => vec![seen.without_a_row()],
        Found::NoRow { table_oid } => match registry::find_by_slot(client, &source.slot).await? {
            Some(other) => {
                let name = catalog::relation_name(client, other.table_oid).await?;
                return Ok(vec![another_table(
                    source,
                    *table_oid,
                    &other,
                    name.as_ref(),
                )]);
            }
            None => vec![seen.without_a_row()],
        },
    };
    let mut needs = Vec::new();
    if let Some(table) = catalog::table(client, &source.table).await? {
        needs.extend(table_needs(&source.table, &table, columns));
        let publication = catalog::publication(client, &source.publication).await?;
        needs.extend(publication_needs(source, &table, publication.as_ref()));
    }
    needs.extend(by_registry);
    Ok(needs)
}

fn warnings(server: &Server, name: &str, slot: &SlotState) -> Vec<String> {
    let mut warnings = server_warnings(server);
    if slot.failover == Some(false) {
        warnings.push(format!(
            "slot {name} is no failover slot: after a failover it is gone; over a replication \
             connection, while the relay is down: ALTER_REPLICATION_SLOT {name} (FAILOVER true)"
        ));
    }
    warnings
}

fn refusal(needs: Vec<Finding>) -> NotReady {
    NotReady::Refused(finding::failure(&needs).unwrap_or_else(|| {
        // No need and yet not ready: the table, its row or the slot went away between two questions.
        Failure::refused(
            "the table, its registry row or the slot went away while it was being looked at",
            "run it again",
        )
    }))
}

#[must_use]
pub fn server_needs(server: &Server) -> Vec<Finding> {
    let mut needs = Vec::new();
    let major = server.version_num / 10_000;
    if major < VERSIONS.0 {
        needs.push(Finding::failed(
            "server version",
            format!(
                "this server is Postgres {major}; walrelay needs {} or newer",
                VERSIONS.0
            ),
            format!("upgrade the server to Postgres {} or newer", VERSIONS.0),
        ));
    }
    if server.in_recovery {
        needs.push(Finding::failed(
            "recovery",
            "this server is in recovery (a standby): nothing can be written here",
            "connect to the primary: --database-url, or PGHOST and PGPORT",
        ));
    }
    if server.wal_level != "logical" {
        needs.push(Finding::failed(
            "wal_level",
            format!(
                "wal_level is {}; logical decoding requires wal_level >= logical (55000)",
                server.wal_level
            ),
            "alter system set wal_level = 'logical', and restart the server (RDS, Aurora: \
             rds.logical_replication = 1; Cloud SQL, AlloyDB: the flag \
             cloudsql.logical_decoding / alloydb.logical_decoding = on; Azure: the server \
             parameter wal_level)",
        ));
    }
    needs
}

/// What is worth a line and no more.
#[must_use]
pub fn server_warnings(server: &Server) -> Vec<String> {
    let mut warnings = Vec::new();
    let major = server.version_num / 10_000;
    if major > VERSIONS.1 {
        warnings.push(format!(
            "this server is Postgres {major}, newer than the {} to {} that walrelay was tried on",
            VERSIONS.0, VERSIONS.1
        ));
    }
    if !server.fsync {
        warnings.push(
            "fsync is off on this server: an event may be in Kafka whose row a crash has undone"
                .to_owned(),
        );
    }
    if server.encoding == "SQL_ASCII" {
        warnings.push(
            "this database is SQL_ASCII: its bytes pass as they are, whatever they mean".to_owned(),
        );
    }
    warnings
}

#[must_use]
pub fn role_needs(role: &Role) -> Vec<Finding> {
    if role.may_replicate {
        return Vec::new();
    }
    vec![Finding::failed(
        "REPLICATION",
        format!(
            "role {} lacks the attribute REPLICATION (42501: must be superuser or replication role \
             to start walsender)",
            quote_ident(&role.name)
        ),
        format!("alter role {} replication", quote_ident(&role.name)),
    )]
}

#[must_use]
pub fn no_table(name: &TableName) -> Finding {
    Finding::failed(
        "table",
        format!("table {} does not exist in this database", show_table(name)),
        "run `walrelay init`, which makes it, or name yours with --table (quoted as in SQL)",
    )
}

fn no_registry_access(role: &Role) -> Finding {
    let role = quote_ident(&role.name);
    Finding::failed(
        "schema walrelay",
        format!("role {role} may not read schema walrelay (42501)"),
        format!(
            "grant usage on schema walrelay to {role}; grant select, insert, update, delete on all \
             tables in schema walrelay to {role}"
        ),
    )
}

/// A slot as it was found, and where.
pub struct SlotSeen<'a> {
    pub source: &'a Source,
    pub server: &'a Server,
    pub database: &'a str,
    pub slot: Option<&'a SlotState>,
    /// Who holds the slot that the registry names, which need not be this one.
    pub holder: Option<&'a Holder>,
}

impl SlotSeen<'_> {
    /// What a complete or half-made registry row of this table still lacks.
    #[must_use]
    pub fn needs_of_registered(&self, row: &Registered) -> Vec<Finding> {
        let named_otherwise = self.named_otherwise(row);
        if !named_otherwise.is_empty() {
            return named_otherwise;
        }
        if row.intent {
            return vec![Finding::failed(
                "slot",
                format!(
                    "`walrelay init` was interrupted while it made slot {}",
                    self.source.slot
                ),
                "run `walrelay init` again: it puts this right",
            )];
        }
        if let Some(need) = self.another_system(row) {
            return vec![need];
        }
        match self.slot {
            None => vec![self.slot_gone(row)],
            Some(slot) => self.slot_unfit(slot),
        }
    }

    /// The table is relayed through another slot or publication (two relays on one table would send
    /// every event twice).
    #[must_use]
    pub fn named_otherwise(&self, row: &Registered) -> Vec<Finding> {
        let mut needs = Vec::new();
        let table = show_table(&self.source.table);
        if row.slot != self.source.slot {
            needs.push(Finding::failed(
                "slot",
                format!(
                    "outbox {table} is already relayed through slot {} ({}); a second slot would \
                     send every event twice",
                    row.slot,
                    self.holder
                        .map_or("not active".to_owned(), |holder| format!(
                            "active, {holder}"
                        ))
                ),
                format!("use --slot {}, or leave --slot away", row.slot),
            ));
        }
        if row.publication != self.source.publication {
            needs.push(Finding::failed(
                "publication",
                format!(
                    "outbox {table} is already relayed through publication {}",
                    show_ident(&row.publication)
                ),
                format!("use --publication {}", quote_ident(&row.publication)),
            ));
        }
        needs
    }

    /// Another cluster than the one that the slot was made in: a restored copy, an upgrade.
    #[must_use]
    pub fn another_system(&self, row: &Registered) -> Option<Finding> {
        let (Some(then), Some(now)) = (&row.system_identifier, &self.server.system_identifier)
        else {
            return None;
        };
        (then != now).then(|| {
            Finding::failed(
                "server",
                format!(
                    "this is another cluster (system identifier {now}) than the one that slot {} \
                     was made in ({then}): a restored copy, or an upgrade; what was delivered \
                     cannot be told from here",
                    row.slot
                ),
                start_over(row),
            )
            .halted()
        })
    }

    /// The registry says that there was a slot, and it is gone: a gap.
    #[must_use]
    pub fn slot_gone(&self, row: &Registered) -> Finding {
        Finding::failed(
            "slot",
            format!(
                "slot {} is gone, though the registry says that it was made (generation {}): what \
                 was committed since it vanished is in no stream",
                row.slot, row.generation
            ),
            start_over(row),
        )
        .halted()
    }

    /// No registry row of this table: a slot, if there is one, is somebody else's.
    #[must_use]
    pub fn without_a_row(&self) -> Finding {
        let name = &self.source.slot;
        let Some(slot) = self.slot else {
            return Finding::failed(
                "slot",
                format!(
                    "slot {name} does not exist, and the registry has no row of table {}",
                    show_table(&self.source.table)
                ),
                "run `walrelay init`",
            );
        };
        let place = match slot.database.as_deref() {
            Some(database) if database != self.database => {
                format!(" (in database {})", quote_ident(database))
            }
            Some(_) => String::new(),
            None => " (a physical one)".to_owned(),
        };
        Finding::failed(
            "slot",
            format!(
                "slot {name} exists{place}, but walrelay did not make it for {}: nobody knows what \
                 it has let pass",
                show_table(&self.source.table)
            ),
            format!(
                "use another name (--slot), or, if nobody needs it: select \
                 pg_drop_replication_slot({}); then run `walrelay init`",
                quote_literal(name)
            ),
        )
    }

    /// A slot that exists and cannot carry this stream.
    #[must_use]
    pub fn slot_unfit(&self, slot: &SlotState) -> Vec<Finding> {
        let name = &self.source.slot;
        let drop = format!(
            "use another slot (--slot), or drop this one if nobody needs it: select \
             pg_drop_replication_slot({})",
            quote_literal(name)
        );
        let refused = |cause: String| Finding::failed("slot", cause, drop.clone());
        if slot.slot_type != "logical" {
            return vec![refused(format!("slot {name} is a physical one"))];
        }
        let mut needs = Vec::new();
        if slot.database.as_deref() != Some(self.database) {
            needs.push(refused(format!(
                "slot {name} belongs to database {}, not to {}",
                quote_ident(slot.database.as_deref().unwrap_or("")),
                quote_ident(self.database)
            )));
        }
        if slot.plugin.as_deref() != Some("pgoutput") {
            needs.push(refused(format!(
                "slot {name} was made with the output plugin {}; walrelay reads pgoutput",
                slot.plugin.as_deref().unwrap_or("?")
            )));
        }
        if slot.two_phase {
            needs.push(refused(format!(
                "slot {name} was made with two_phase = true: it sends transactions that can still \
                 be rolled back"
            )));
        }
        if slot.temporary {
            needs.push(refused(format!("slot {name} is a temporary one")));
        }
        if slot.wal_status.as_deref() == Some("lost") {
            needs.push(
                Finding::failed(
                    "slot",
                    format!(
                        "slot {name} is lost: the server removed WAL that it still needed \
                     (max_slot_wal_keep_size, idle_replication_slot_timeout); what it had not sent \
                     is in no stream"
                    ),
                    format!(
                        "decide what becomes of the rows in between; then select \
                     pg_drop_replication_slot({}), and the next start says how to go on",
                        quote_literal(name)
                    ),
                )
                .halted(),
            );
        }
        needs
    }
}

/// How to begin anew where what was delivered cannot be told.
#[must_use]
pub fn start_over(row: &Registered) -> String {
    format!(
        "to give up what is not delivered and begin anew: delete from walrelay.relay where \
         table_oid = {}; drop publication if exists {}; select pg_drop_replication_slot(slot_name) \
         from pg_replication_slots where slot_name = {}; then `walrelay init --existing leave` (rows that \
         are in the table then stay unpublished; write those that matter again, with the same \
         event_id consumers drop what they had)",
        row.table_oid,
        quote_ident(&row.publication),
        quote_literal(&row.slot)
    )
}

/// The slot belongs to another table's row: most often the table was swapped.
#[must_use]
pub fn another_table(
    source: &Source,
    table_oid: u32,
    other: &Registered,
    name: Option<&TableName>,
) -> Finding {
    let published = name.map_or_else(
        || format!("a table that is gone (oid {})", other.table_oid),
        |name| format!("{} (oid {})", show_table(name), other.table_oid),
    );
    Finding::failed(
        "table",
        format!(
            "{} is a new table (oid {table_oid}), not in publication {}; the published one is \
             {published}, through slot {}",
            show_table(&source.table),
            show_ident(&other.publication),
            other.slot,
        ),
        let_go(other),
    )
}

/// How to take slot and publication from a table that is done with.
#[must_use]
pub fn let_go(other: &Registered) -> String {
    format!(
        "name another slot and publication (--slot, --publication), or, when that table is done \
         with: select pg_drop_replication_slot({}); drop publication if exists {}; delete from \
         walrelay.relay where table_oid = {}; then run init again",
        quote_literal(&other.slot),
        quote_ident(&other.publication),
        other.table_oid
    )
}
