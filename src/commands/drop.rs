//! `walrelay drop`: slot and publication go, after what they still had to deliver was shown. A slot
//! that nobody reads keeps WAL until the disk is full.
//!
//! # Invariants
//! - Nothing is dropped while an instance runs, or any session reads the slot: the leader's lock is
//!   held throughout.
//! - A crash in between leaves a registry row that says so; run again, it ends what it began.
//! - The row stays, and with it the dead letters and the slot's generation.

use serde::Serialize;
use tokio_postgres::Client;

use super::dead_letters::Standing;
use super::report::{self, Entry, Screen};
use crate::config::{DropConfig, Part, Source};
use crate::error::{DbError, Failure};
use crate::finding::{self, Finding, Group};
use crate::io::backlog::{self, Count, Publication};
use crate::io::connect;
use crate::io::preflight::{self, Registry, Seen, SlotSeen, size, span};
use crate::io::registry::{self, Instance, Registered};
use crate::io::side::Side;
use crate::io::slot_view::SlotLine;
use crate::io::sql::{quote_ident, quote_literal, show_ident, show_table};

/// Nobody waits for a count without an end, or behind somebody's lock.
const TIMEOUTS: &str = "set statement_timeout = '20s'; set lock_timeout = '10s'";

/// # Errors
/// Exit code 3: a relay runs, the slot is not this relay's, the database is a standby, refuses or
/// cannot be reached. 2: nobody can be asked.
pub async fn run(config: DropConfig) -> Result<(), Failure> {
    let source = &config.source;
    let failed = |error: DbError| failure(&error, source);
    let side = Side::connect(&source.database, None)
        .await
        .map_err(failed)?;
    side.run(TIMEOUTS).await.map_err(failed)?;
    let client = &*side.client;
    let seen = preflight::look(client, source).await.map_err(failed)?;
    let row = registered(source, &seen)?;
    nobody_runs(&seen.instances.clone().map_err(failed)?, source)?;
    if !registry::try_lock(client, row.table_oid)
        .await
        .map_err(failed)?
    {
        let instances = registry::instances(client, Some(row.table_oid)).await;
        nobody_runs(&instances.map_err(failed)?, source)?;
        return Err(Failure::refused(
            "another session has just taken the leader's lock",
            "run it again",
        ));
    }
    let plan = plan(&config, &seen, row)?;
    if plan.is_done() {
        return report_done(&config, row, &plan, Vec::new());
    }
    let findings = undelivered(&config, client, &seen, row).await;
    if !config.json {
        let groups = [Group::new("undelivered", findings.clone())];
        report::write_out(&report::table(&groups, Screen::of_stdout()))?;
    }
    if !config.yes && !is_confirmed(&plan)? {
        return report::write_out("nothing was dropped\n");
    }
    carry_out(&side, row, &plan).await.map_err(failed)?;
    report_done(&config, row, &plan, findings)
}

// ---- may it be dropped? --------------------------------------------------------------------

/// What there is to do.
struct Plan<'a> {
    slot: Option<&'a SlotLine>,
    /// Its name, where it is there and is to go.
    publication: Option<&'a str>,
    /// The registry still describes a slot.
    is_registered: bool,
}

impl Plan<'_> {
    fn is_done(&self) -> bool {
        self.slot.is_none() && self.publication.is_none() && !self.is_registered
    }

    fn names(&self) -> String {
        let slot = self.slot.map(|slot| format!("slot {}", slot.name));
        let publication = self
            .publication
            .map(|name| format!("publication {}", show_ident(name)));
        let names: Vec<String> = slot.into_iter().chain(publication).collect();
        if names.is_empty() {
            "what the registry says of the slot".to_owned()
        } else {
            names.join(" and ")
        }
    }
}

/// The registry's row of this relay.
fn registered<'a>(source: &Source, seen: &'a Seen) -> Result<&'a Registered, Failure> {
    if seen.server.in_recovery {
        return Err(Failure::refused(
            "this server is a standby: its slots are its own, or copies of the primary's",
            "connect to the primary (--database-url); what is dropped there goes here by itself",
        ));
    }
    let registry = seen
        .registry
        .as_ref()
        .map_err(|error| failure(error, source))?;
    let Some(row) = row_of(source, registry) else {
        let found = SlotSeen {
            source,
            server: &seen.server,
            database: &source.database.dbname,
            slot: seen.slot(&source.slot).map(|line| &line.state),
            holder: None,
        };
        if found.slot.is_some() {
            return Err(refused(&[found.without_a_row()]));
        }
        return Err(Failure::refused(
            format!(
                "table {} is not relayed, and there is no slot {}: there is nothing to drop",
                show_table(&source.table),
                source.slot
            ),
            "name the relay's own with --table, --slot and --publication (select table_name, \
             slot_name, publication from walrelay.relay, in its database)",
        ));
    };
    let names = SlotSeen {
        source,
        server: &seen.server,
        database: &source.database.dbname,
        slot: None,
        holder: seen.slot(&row.slot).and_then(|line| line.holder.as_ref()),
    };
    let otherwise = names.named_otherwise(row);
    if !otherwise.is_empty() {
        return Err(refused(&otherwise));
    }
    Ok(row)
}

/// This table's, or the one that has the slot where its table is gone.
fn row_of<'a>(source: &Source, registry: &'a Registry) -> Option<&'a Registered> {
    let orphan = registry
        .rival
        .as_ref()
        .filter(|(rival, name)| name.is_none() && rival.slot == source.slot)
        .map(|(rival, _)| rival);
    match &registry.row {
        Some(row) if row.slot == source.slot => Some(row),
        other => orphan.or(other.as_ref()),
    }
}

fn nobody_runs(instances: &[Instance], source: &Source) -> Result<(), Failure> {
    if instances.is_empty() {
        return Ok(());
    }
    let mut failure = Failure::refused(
        format!(
            "a relay of {} runs: its slot is not dropped under it",
            show_table(&source.table)
        ),
        "stop it (SIGTERM), and what starts it again, then run this again; where its process is \
         gone and only the session is left: select pg_terminate_backend(pid)",
    );
    for instance in instances {
        failure = failure.because(instance.to_string());
    }
    Err(failure)
}

fn plan<'a>(
    config: &'a DropConfig,
    seen: &'a Seen,
    row: &'a Registered,
) -> Result<Plan<'a>, Failure> {
    let source = &config.source;
    seen.slots.as_ref().map_err(|e| failure(e, source))?;
    let line = seen.slot(&row.slot);
    let found = SlotSeen {
        source,
        server: &seen.server,
        database: seen
            .role
            .as_ref()
            .map_or(source.database.dbname.as_str(), |role| &role.database),
        slot: line.map(|line| &line.state),
        holder: None,
    };
    let is_over = row.dropped.as_ref().is_some_and(|how| !how.is_half_done);
    if let Some(line) = line {
        if is_over {
            return Err(refused(&[found.without_a_row()]));
        }
        may_go(&found, line)?;
    }
    let publication = seen
        .publication
        .as_ref()
        .map_err(|e| failure(e, source))?
        .as_ref()
        .filter(|_| !config.keep_publication)
        .map(|_| row.publication.as_str());
    Ok(Plan {
        slot: line,
        publication,
        is_registered: !is_over,
    })
}

/// The slot is this relay's, and nobody reads it.
fn may_go(found: &SlotSeen<'_>, line: &SlotLine) -> Result<(), Failure> {
    // A lost one is as good to drop as any.
    let unlost = registry::SlotState {
        wal_status: None,
        ..line.state.clone()
    };
    let unfit = found.slot_unfit(&unlost);
    if !unfit.is_empty() {
        return Err(refused(&unfit));
    }
    let Some(pid) = line.state.active_pid else {
        return Ok(());
    };
    let holder = line.holder.as_ref().map_or_else(
        || format!("pid {pid}"),
        |holder| match holder.state_age {
            Some(age) => format!("{holder}, for {}", span(age)),
            None => holder.to_string(),
        },
    );
    Err(Failure::refused(
        format!(
            "slot {} is held by {holder}, though no relay leads",
            line.name
        ),
        format!(
            "a relay that has just ended lets go by itself: run this again; else end that session: \
             select pg_terminate_backend({pid})"
        ),
    ))
}

fn refused(findings: &[Finding]) -> Failure {
    let mut failure = finding::failure(findings).expect("there is a finding, and it failed");
    failure.exit = crate::error::Exit::Refused;
    failure
}

// ---- what is given up ----------------------------------------------------------------------

async fn undelivered(
    config: &DropConfig,
    client: &Client,
    seen: &Seen,
    row: &Registered,
) -> Vec<Finding> {
    let mut findings = vec![slot_finding(seen, row)];
    findings.push(events(client, seen, row).await);
    findings.push(rows(config, client, seen, row).await);
    findings.push(match Standing::of(client, row.table_oid).await {
        Ok(letters) if letters.totals.parked > 0 => Finding::warning(
            "dead letters",
            format!(
                "{} events of {} keys are parked",
                letters.totals.parked, letters.totals.keys
            ),
            "they stay in walrelay.dead_letter, and the next slot's relay publishes them on \
             `walrelay dead-letters retry`",
        ),
        Ok(_) => Finding::ok("dead letters", "none is parked"),
        Err(error) => Finding::unknown("dead letters", error.to_string()),
    });
    findings
}

fn slot_finding(seen: &Seen, row: &Registered) -> Finding {
    let Some(line) = seen.slot(&row.slot) else {
        return Finding::warning(
            "slot",
            format!(
                "slot {} is gone already, and nobody knows what it had not delivered",
                row.slot
            ),
            "rows that were written since are only in the table",
        );
    };
    if line.state.wal_status.as_deref() == Some("lost") {
        return Finding::warning(
            "slot",
            format!(
                "slot {} is lost: the server has removed WAL that it had not sent",
                row.slot
            ),
            "rows of that time are only in the table",
        );
    }
    let behind = line
        .lag_bytes
        .map_or("an unknown amount".to_owned(), |bytes| size(bytes.max(0)));
    let at = line
        .state
        .confirmed_flush
        .map_or("nowhere".to_owned(), |lsn| lsn.to_string());
    Finding::ok(
        "slot",
        format!("{} stands at {at}, {behind} behind", row.slot),
    )
}

async fn events(client: &Client, seen: &Seen, row: &Registered) -> Finding {
    let subject = "events in the slot";
    match seen.slot(&row.slot) {
        None => return Finding::unknown(subject, "there is no slot"),
        Some(line) if line.state.wal_status.as_deref() == Some("lost") => {
            return Finding::unknown(subject, "a lost slot cannot be read");
        }
        Some(_) => {}
    }
    let counted = backlog::events(client, row.table_oid, &row.slot, &row.publication).await;
    match counted {
        Ok(Count::Exactly(0)) => Finding::ok(subject, "none"),
        Ok(count) => Finding::warning(
            subject,
            format!(
                "{} not confirmed{}",
                amount(count, "event"),
                match &row.stop {
                    Some(_) => "",
                    None => " (the relay did not end by a clean stop: some may be delivered)",
                }
            ),
            "`walrelay run` delivers them",
        ),
        Err(error) if error.sqlstate() == "57014" => {
            Finding::unknown(subject, "counting them took too long")
        }
        Err(error) => Finding::unknown(subject, error.to_string()),
    }
}

async fn rows(config: &DropConfig, client: &Client, seen: &Seen, row: &Registered) -> Finding {
    let subject = "rows";
    let column = config.mapping.columns.get(Part::Xid);
    let table = match &seen.table {
        Ok(Some(table)) => table,
        Ok(None) => return Finding::unknown(subject, "the table is gone"),
        Err(error) => return Finding::unknown(subject, error.to_string()),
    };
    let xid = table
        .columns
        .iter()
        .find(|c| Some(c.name.as_str()) == column && c.base_type == "xid8");
    let Some(xid) = xid else {
        return Finding::unknown(
            subject,
            "the table has no column xid to tell delivered rows by",
        );
    };
    let counted = backlog::uncovered(client, row.table_oid, &config.source.table, &xid.name).await;
    match counted {
        Ok(None) => Finding::unknown(
            subject,
            "no checkpoint was stored for this slot: which rows were delivered the table does not tell",
        ),
        Ok(Some(Count::Exactly(0))) => {
            Finding::ok(subject, "every row is covered by the last checkpoint")
        }
        Ok(Some(count)) => Finding::ok(
            subject,
            format!(
                "{} came after the last checkpoint: at most so many are not delivered",
                amount(count, "row")
            ),
        ),
        Err(error) if error.sqlstate() == "57014" => {
            Finding::unknown(subject, "counting them took too long")
        }
        Err(error) => Finding::unknown(subject, error.to_string()),
    }
}

fn amount(count: Count, what: &str) -> String {
    let (least, n) = match count {
        Count::Exactly(n) => ("", n),
        Count::AtLeast(n) => ("at least ", n),
    };
    let s = if n == 1 { "" } else { "s" };
    format!("{least}{n} {what}{s}")
}

// ---- doing it ------------------------------------------------------------------------------

fn is_confirmed(plan: &Plan<'_>) -> Result<bool, Failure> {
    let names = plan.names();
    report::is_confirmed(
        &format!("dropping {names}"),
        &format!("Drop {names}? What is not delivered is then only in the table."),
        "nobody needs what is not delivered",
    )
}

async fn carry_out(side: &Side, row: &Registered, plan: &Plan<'_>) -> Result<(), DbError> {
    let what = match plan.publication {
        Some(_) => Publication::Drop,
        None => Publication::Keep,
    };
    if plan.is_registered || what == Publication::Drop {
        let sql = if plan.is_registered {
            backlog::forget_sql(row.table_oid, &row.publication, what)
        } else {
            format!("drop publication {}", quote_ident(&row.publication))
        };
        if let Err(error) = side.run(&sql).await {
            // If even this fails the session is gone, and its transaction with it.
            let _ = side.run("rollback").await;
            return Err(error);
        }
    }
    if plan.is_registered {
        // It may have to wait for nothing: nobody reads the slot, and the lock is ours.
        side.run(&backlog::drop_sql(row.table_oid, &row.slot))
            .await?;
    }
    Ok(())
}

#[derive(Serialize)]
struct Done<'a> {
    dropped: bool,
    slot: Option<&'a str>,
    publication: Option<&'a str>,
    undelivered: Vec<Entry<'a>>,
}

fn report_done(
    config: &DropConfig,
    row: &Registered,
    plan: &Plan<'_>,
    findings: Vec<Finding>,
) -> Result<(), Failure> {
    let groups = [Group::new("undelivered", findings)];
    if config.json {
        return report::write_out(&report::json(&Done {
            dropped: !plan.is_done(),
            slot: plan.slot.map(|slot| slot.name.as_str()),
            publication: plan.publication,
            undelivered: report::entries(&groups),
        })?);
    }
    if plan.is_done() {
        let how = row.dropped.as_ref().map(|how| preflight::dropped(row, how));
        return report::write_out(&format!(
            "nothing to do: {}\n",
            how.unwrap_or_else(|| format!("there is no slot {}", row.slot))
        ));
    }
    report::write_out(&format!(
        "dropped {}; to relay {} again: walrelay init --existing leave\n",
        plan.names(),
        show_table(&config.source.table)
    ))
}

fn failure(error: &DbError, source: &Source) -> Failure {
    let role = quote_ident(&source.database.user);
    match error.sqlstate() {
        "42501" => Failure::refused(
            error.to_string(),
            format!(
                "a slot wants a role with REPLICATION, a publication its owner, the registry its \
                 grants: run this as the role that ran init, or grant {role} what is missing: grant \
                 usage on schema walrelay to {role}; grant select, update on walrelay.relay to \
                 {role}; grant select, delete on walrelay.checkpoint, walrelay.fence to {role}"
            ),
        ),
        "55006" => Failure::refused(
            format!("{error}: somebody began to read the slot meanwhile"),
            format!(
                "see who: select pid, usename, client_addr, backend_start from pg_stat_activity a \
                 join pg_replication_slots s on s.active_pid = a.pid where s.slot_name = {}; then \
                 run this again, it ends what it began",
                quote_literal(&source.slot)
            ),
        ),
        _ => connect::failure(error, &source.database),
    }
}
