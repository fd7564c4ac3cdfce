//! What must hold before the relay may stream, and what to do where it does not. `init` and `run`
//! ask the same questions; the answers that need no server are pure functions.
//!
//! # Invariants
//! Every unmet need is reported at once, not the first only. Nothing here changes anything.

mod fit;
mod look;
mod server;
mod slot;
mod swap;

use tokio_postgres::Client;

use super::catalog::{Publication, Table};
use super::heal;
use super::registry::{Registered, Server, SlotState};
use super::sql::{quote_table, show_ident, show_table};
use crate::config::{Mapping, Part, Source, TableName};
use crate::error::{DbError, Failure};
use crate::finding::{self, Finding, Group, State};
use crate::gap::{self, OnGap};
pub use fit::{kin, publication_needs, table_needs};
pub use look::{Answer, OldTransaction, Registry, Seen, Session, look};
pub use server::{
    dead_standbys, described, idle_slots, no_slot_left, no_wal_senders, only_failed,
    replication_remedy, role_finding, server_findings, size, span,
};
pub use slot::{SlotSeen, dropped, parking, start_over};
pub use swap::{Swap, another_table};

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
    /// `None`: it is gone, and that is healed.
    pub slot: Option<SlotState>,
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
    mapping: &Mapping,
    on_gap: Option<OnGap>,
) -> Result<Ready, NotReady> {
    let seen = look(client, source).await?;
    if let Some(error) = seen.broken() {
        return Err(NotReady::Db(error.clone()));
    }
    let findings: Vec<Finding> = judge(&seen, source, mapping)
        .into_iter()
        .flat_map(|group| group.findings)
        .collect();
    // What the columns are now they need not have been when the rows that come first were written:
    // where nothing else is wrong the stream tells (`unfit_columns`).
    let columns = match &seen.table {
        Ok(Some(table)) => fit::column_needs(&source.table, table, &needed(mapping)),
        Ok(None) | Err(_) => Vec::new(),
    };
    let row = seen.registry.as_ref().ok().and_then(|r| r.row.as_ref());
    let gaps_pass = row.is_some_and(|row| {
        let is_whole = |table: &Table| is_provable(row, table, mapping);
        let table = seen.table.as_ref().ok().and_then(Option::as_ref);
        row.heals || gap::policy(on_gap, table.is_some_and(is_whole)) != OnGap::Halt
    });
    let refuses =
        |finding: &&Finding| finding.state == State::Failed && !(gaps_pass && finding.is_gap);
    let is_refused = findings
        .iter()
        .filter(refuses)
        .any(|finding| !columns.contains(finding));
    if let Some(failure) = finding::failure(findings.iter().filter(refuses)).filter(|_| is_refused)
    {
        return Err(NotReady::Refused(failure));
    }
    if let Some(error) = seen.unanswered() {
        return Err(NotReady::Db(error.clone()));
    }
    let slot = seen.slot(&source.slot).map(|slot| slot.state.clone());
    match (seen.registry?.row, slot) {
        (Some(registered), slot) if slot.is_some() || gaps_pass => Ok(Ready {
            server: seen.server,
            registered,
            slot,
            warnings: warnings(&findings),
        }),
        // No need and yet not ready: it went away between two questions.
        _ => Err(NotReady::Refused(Failure::refused(
            "the table, its registry row or the slot went away while it was being looked at",
            "run it again",
        ))),
    }
}

/// May a heal be taken for complete? Where `init` made the table nobody but our own retention deletes
/// rows, and a row's xid tells whether it is missing.
fn is_provable(row: &Registered, table: &Table, mapping: &Mapping) -> bool {
    row.made_table && columns_to_heal(table, mapping).is_some()
}

fn columns_to_heal(table: &Table, mapping: &Mapping) -> Option<heal::Columns> {
    let column = |part: Part, types: &[&str]| {
        let name = mapping.columns.get(part)?;
        let mut columns = table.columns.iter();
        let found = columns.find(|column| column.name == name)?;
        types
            .contains(&found.base_type.as_str())
            .then(|| name.to_owned())
    };
    Some(heal::Columns {
        id: column(Part::Id, &["int8", "int4", "bigint", "integer"])?,
        xid: column(Part::Xid, &["xid8"])?,
        created_at: column(
            Part::CreatedAt,
            &["timestamptz", "timestamp with time zone"],
        ),
    })
}

/// The columns that a heal reads by name, where the table has them.
///
/// # Errors
/// Only the conversation's.
pub async fn heal_columns(
    client: &Client,
    source: &Source,
    mapping: &Mapping,
) -> Result<Option<heal::Columns>, DbError> {
    let table = super::catalog::table(client, &source.table).await?;
    Ok(table.and_then(|table| columns_to_heal(&table, mapping)))
}

/// Does the table, as it is now, lack what the mapping names?
///
/// # Errors
/// Only the conversation's.
pub async fn unfit_columns(
    client: &Client,
    source: &Source,
    mapping: &Mapping,
) -> Result<Option<Failure>, DbError> {
    let table = super::catalog::table(client, &source.table).await?;
    let needs = table.map(|table| fit::column_needs(&source.table, &table, &needed(mapping)));
    Ok(finding::failure(&needs.unwrap_or_default()))
}

/// What is worth a log line.
#[must_use]
pub fn warnings(findings: &[Finding]) -> Vec<String> {
    findings
        .iter()
        .filter(|finding| finding.state == State::Warning)
        .map(|finding| match &finding.remedy {
            Some(remedy) => format!("{}; remedy: {remedy}", finding.found),
            None => finding.found.clone(),
        })
        .collect()
}

/// What was seen, as findings: what a relay needs and what its operator counts on.
#[must_use]
pub fn judge(seen: &Seen, source: &Source, mapping: &Mapping) -> Vec<Group> {
    let mut server = server_findings(&seen.server);
    if seen.server.in_recovery {
        // A standby has slots of its own: what they lack says nothing of the primary's.
        return vec![Group::new("server", server)];
    }
    server.extend(server::room(seen, source));
    let (table, publication, slot) = stream(seen, source, mapping);
    let groups = [
        Group::new("server", server),
        Group::new("role", role(seen, source)),
        Group::new("table", table),
        Group::new("publication", publication),
        Group::new("slot", slot),
        Group::new("durability", server::durability(seen)),
        Group::new("wal", server::wal_keeping(seen, source)),
        Group::new("failover", server::failover(seen, source)),
    ];
    let mut groups = groups.to_vec();
    groups.retain(|group| !group.findings.is_empty());
    groups
}

fn role(seen: &Seen, source: &Source) -> Vec<Finding> {
    let role = match &seen.role {
        Ok(role) => role,
        Err(error) => return vec![Finding::unknown("role", error.to_string())],
    };
    let mut findings = vec![role_finding(role)];
    let table = seen.table.as_ref().ok().and_then(Option::as_ref);
    match &seen.rights {
        Ok(rights) => findings.extend(slot::rights_findings(*rights, role, source, table)),
        Err(error) => findings.push(Finding::unknown("rights", error.to_string())),
    }
    findings
}

/// Table, publication and slot. Where the names do not belong together, nothing is said of how well
/// each would do.
fn stream(
    seen: &Seen,
    source: &Source,
    mapping: &Mapping,
) -> (Vec<Finding>, Vec<Finding>, Vec<Finding>) {
    let table = match &seen.table {
        Ok(table) => table.as_ref(),
        Err(error) => {
            let unknown = Finding::unknown("table", error.to_string());
            return (vec![unknown], Vec::new(), Vec::new());
        }
    };
    let name = seen
        .role
        .as_ref()
        .map_or(source.database.dbname.as_str(), |role| &role.database);
    let line = seen.slot(&source.slot);
    let row = seen.registry.as_ref().ok().and_then(|r| r.row.as_ref());
    let relayed_through = row.map_or(&source.slot, |row| &row.slot);
    let found = SlotSeen {
        source,
        server: &seen.server,
        database: name,
        slot: line.map(|line| &line.state),
        holder: seen
            .slot(relayed_through)
            .and_then(|line| line.holder.as_ref()),
    };
    let (is_settled, slot) = found.findings(seen, table);
    let Some(table) = table else {
        if !is_settled {
            return (Vec::new(), Vec::new(), slot);
        }
        let missing = slot::no_table(&source.table);
        // `init` makes all three.
        let publication = seen.publication.as_ref().ok().and_then(Option::as_ref);
        let also = |finding: Finding| match finding.state {
            State::Failed if finding.remedy.as_deref() == Some(slot::RUN_INIT) => Finding {
                remedy: missing.remedy.clone(),
                ..finding
            },
            State::Failed | State::Ok | State::Unknown | State::Warning => finding,
        };
        let publication = slot::publication_without_a_row(source, publication);
        let slot = slot.into_iter().map(also).collect();
        return (vec![missing.clone()], vec![also(publication)], slot);
    };
    if !is_settled {
        return (Vec::new(), Vec::new(), slot);
    }
    let publication = match &seen.publication {
        Ok(publication) if row.is_none() && seen.registry.is_ok() => {
            vec![slot::publication_without_a_row(
                source,
                publication.as_ref(),
            )]
        }
        Ok(publication) => publication_findings(source, table, publication.as_ref()),
        Err(error) => vec![Finding::unknown("publication", error.to_string())],
    };
    (
        table_findings(&source.table, table, mapping),
        publication,
        slot,
    )
}

/// What a table is, for a person, unless it lacks something.
fn table_findings(name: &TableName, table: &Table, mapping: &Mapping) -> Vec<Finding> {
    let columns = needed(mapping);
    let mut findings = table_needs(name, table, &columns);
    if findings.is_empty() {
        let kind = if table.kind == 'p' {
            "a partitioned table"
        } else {
            "a table"
        };
        let owner = show_ident(&table.owner);
        let found = format!("{}, {kind} of {owner}", show_table(name));
        findings.push(Finding::ok("table", found));
        let mut names: Vec<String> = Vec::new();
        for column in &columns {
            let name = show_ident(column.name);
            if !names.contains(&name) {
                names.push(name);
            }
        }
        findings.push(Finding::ok("columns", names.join(", ")));
    }
    if matches!(table.kind, 'r' | 'p') {
        findings.extend(fit::kin(name, table));
        findings.extend(later_columns(name, table, mapping));
    }
    findings
}

/// Columns that no record is made of, and whose absence costs something.
#[must_use]
pub fn later_columns(name: &TableName, table: &Table, mapping: &Mapping) -> Vec<Finding> {
    let column = |part: Part| {
        let name = mapping.columns.get(part)?;
        table.columns.iter().find(|column| column.name == name)
    };
    // `add column ... default` would stamp the old rows as if they were written now.
    let add = |part: Part, type_name: &str, default: &str| {
        let part = part.name();
        format!(
            "when it suits: alter table {} add column {part} {type_name}, alter column {part} set \
             default {default} (in the rows from before it stays null); or name the one that does it: \
             --column {part}=COLUMN",
            quote_table(name)
        )
    };
    let mut findings = Vec::new();
    if column(Part::Xid).is_none_or(|column| column.base_type != "xid8") {
        findings.push(Finding::warning(
            "column xid",
            "the table has no column xid of type xid8: no gap recovery, no retention",
            add(Part::Xid, "xid8", "pg_current_xact_id()"),
        ));
    }
    if column(Part::CreatedAt).is_none() {
        findings.push(Finding::warning(
            "column created_at",
            "the table has no column created_at: the age of what waits in it cannot be told",
            add(Part::CreatedAt, "timestamptz", "now()"),
        ));
    }
    findings
}

fn publication_findings(
    source: &Source,
    table: &Table,
    publication: Option<&Publication>,
) -> Vec<Finding> {
    let needs = publication_needs(source, table, publication);
    if !needs.is_empty() {
        return needs;
    }
    let found = format!(
        "{} publishes inserts of {}, and of nothing else",
        show_ident(&source.publication),
        show_table(&source.table)
    );
    vec![Finding::ok("publication", found)]
}
