//! `walrelay init`: outbox table, helpers, schema `walrelay`, publication, and last the slot.
//!
//! Look, plan, then do: one transaction makes everything that SQL can make and commits the intent
//! to make a slot; the slot is made; the registry row is completed.
//!
//! # Invariants
//! - Nothing is created before every need is known to be met.
//! - A crash leaves nothing that the next run cannot tell: without an intent there is no slot of
//!   ours; with one, whatever slot bears its name is made anew.

mod migrations;
mod plan;
mod slot;
mod survey;

use std::time::{Duration, Instant};

use serde::Serialize;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use crate::config::{Database, InitConfig, Mapping, Source};
use crate::error::{DbError, Exit, Failure};
use crate::finding::{self, Finding};
use crate::io::connect;
use crate::io::new_slot::create_slot;
use crate::io::registry::{self, Found};
use crate::io::side::{Side, db_error};
use crate::io::slot::{IdentifySystem, Slot, WAL_SENDER_TIMEOUT};
use crate::io::sql::{quote_ident, quote_table, show_ident, show_table};
use crate::lsn::Lsn;
use plan::{Plan, SlotWork};
use slot::{Made, NotMade};
use survey::Seen;

/// No table has oid 0: this lock is for one `init` at a time.
const INIT_LOCK: u32 = 0;

/// How often we ask whether another `init` is done. A person waits.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// # Errors
/// Every unmet need with its remedy; exit 3, or 4 where a decision is missing.
pub async fn run(config: InitConfig) -> Result<(), Failure> {
    super::report::write_out(&report(&config).await?)
}

/// As [`run`], for a caller who shows in their own way what was done.
///
/// # Errors
/// As [`run`].
pub async fn report(config: &InitConfig) -> Result<String, Failure> {
    let database = &config.source.database;
    let side = Side::connect(database, None)
        .await
        .map_err(|e| connect::failure(&e, database))?;
    lock(config, &side).await?;
    let seen = look(config, &side).await?;
    let plan = plan::plan(&config.source, &config.mapping, &seen, config.existing)?;
    if config.print_sql {
        return Ok(script(config, &seen, &plan));
    }
    let report = if plan.changes_nothing() {
        Report::new(&plan, None)
    } else {
        let made = carry_out(config, &side, &seen, &plan).await?;
        Report::new(&plan, Some(SlotReport::new(config, &seen, &plan, &made)))
    };
    report.text(config.json)
}

/// What a first run by this role would be refused for. Changes nothing.
///
/// # Errors
/// Only the conversation's.
pub async fn obstacles(
    client: &Client,
    source: &Source,
    mapping: &Mapping,
) -> Result<Vec<Finding>, DbError> {
    let seen = survey::survey(client, source).await?;
    Ok(plan::obstacles(source, mapping, &seen))
}

async fn lock(config: &InitConfig, side: &Side) -> Result<(), Failure> {
    let until = Instant::now() + config.lock_timeout;
    loop {
        let locked = registry::try_lock(&side.client, INIT_LOCK)
            .await
            .map_err(|e| statement_failure("taking the lock of init", &e))?;
        if locked {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(Failure::refused(
                "another `walrelay init` is at work in this database",
                "wait until it is done, and run init again",
            ));
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}

/// What is there. The walsender of an init that was killed may be at work on its slot for a while,
/// since it does not look after its client while it waits: it is waited for.
async fn look(config: &InitConfig, side: &Side) -> Result<Seen, Failure> {
    let until = Instant::now() + config.lock_timeout;
    loop {
        let seen = survey::survey(&side.client, &config.source)
            .await
            .map_err(|e| statement_failure("looking at the database", &e))?;
        let half_made = seen.row.as_ref().is_some_and(|row| row.intent);
        let in_use = seen
            .slot
            .as_ref()
            .is_some_and(|slot| slot.active_pid.is_some());
        if !(half_made && in_use) || config.print_sql || Instant::now() >= until {
            return Ok(seen);
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}

async fn carry_out(
    config: &InitConfig,
    side: &Side,
    seen: &Seen,
    plan: &Plan,
) -> Result<Made, Failure> {
    let (mut slot, system) = replication(&side.database, seen, &plan.needs).await?;
    apply(config, side, plan).await?;
    let table_oid = registered_oid(config, side).await?;
    if plan.slot == SlotWork::MakeAgain {
        slot::drop_slot(&side.client, &config.source.slot)
            .await
            .map_err(|e| statement_failure("dropping the slot of an interrupted init", &e))?;
    }
    let version = seen.server.version_num;
    let made = slot::make(&mut slot, &side.client, config, version, plan.existing)
        .await
        .map_err(|error| match error {
            NotMade::Refused(failure) => failure,
            NotMade::Db(error) => {
                statement_failure(&format!("making slot {}", config.source.slot), &error)
            }
        })?;
    if let Err(error) = complete(side, table_oid, &system, &made).await {
        // Best effort: the intent stands, so that the next run makes the slot anew either way.
        let _ = slot::drop_slot(&side.client, &config.source.slot).await;
        return Err(statement_failure("completing the registry row", &error));
    }
    Ok(made)
}

/// Connects for replication before anything is made: what stands in the way there (an attribute,
/// a line of pg_hba.conf) is reported with all the rest.
async fn replication(
    database: &Database,
    seen: &Seen,
    needs: &[Finding],
) -> Result<(Slot, IdentifySystem), Failure> {
    let encoding = if seen.server.encoding == "SQL_ASCII" {
        "SQL_ASCII"
    } else {
        "UTF8"
    };
    let mut needs = needs.to_vec();
    // Without the attribute the answer is known, and told already.
    let connected = if seen.role.may_replicate {
        match Slot::connect(database, encoding, WAL_SENDER_TIMEOUT).await {
            Ok(mut slot) => match slot.identify_system().await {
                Ok(system) => Some((slot, system)),
                Err(error) => return Err(statement_failure("IDENTIFY_SYSTEM", &error)),
            },
            Err(error) => {
                let failure = connect::failure(&error, database);
                for cause in failure.causes {
                    needs.push(Finding::failed(
                        "replication connection",
                        format!("for replication: {cause}"),
                        failure.remedy.clone(),
                    ));
                }
                None
            }
        }
    } else {
        None
    };
    if let Some(failure) = finding::failure(&needs) {
        return Err(failure);
    }
    let Some((slot, system)) = connected else {
        return Err(Failure::new(
            Exit::Unexpected,
            "no replication connection, and no reason for it",
            "report this as a bug",
        ));
    };
    let here = seen.server.system_identifier.as_ref();
    if here.is_some_and(|here| *here != system.system_identifier) {
        return Err(Failure::refused(
            "the replication connection reached another server than the ordinary one",
            "connect to one server, not through a balancer (--database-url, PGHOST)",
        ));
    }
    Ok((slot, system))
}

/// Everything that SQL can make, and the intent, in one transaction.
async fn apply(config: &InitConfig, side: &Side, plan: &Plan) -> Result<(), Failure> {
    if plan.statements.is_empty() {
        return Ok(());
    }
    let lock_timeout = config.lock_timeout.as_millis();
    let begin = format!("begin; set local lock_timeout = '{lock_timeout}ms'");
    run_sql(side, "opening a transaction", &begin).await?;
    for statement in &plan.statements {
        let what = statement.makes.as_ref().map_or_else(
            || "storing the intent in walrelay.relay".to_owned(),
            |item| format!("making {} {}", item.object, item.name),
        );
        if let Err(failure) = run_sql(side, &what, &statement.sql).await {
            // If even this fails the session is gone, and its transaction with it.
            let _ = side.run("rollback").await;
            return Err(failure);
        }
    }
    run_sql(side, "committing", "commit").await
}

async fn run_sql(side: &Side, what: &str, sql: &str) -> Result<(), Failure> {
    side.run(sql).await.map_err(|e| statement_failure(what, &e))
}

async fn registered_oid(config: &InitConfig, side: &Side) -> Result<u32, Failure> {
    let found = registry::load_by_table(&side.client, &config.source.table)
        .await
        .map_err(|e| statement_failure("reading walrelay.relay", &e))?;
    match found {
        Found::Row(row) => Ok(row.table_oid),
        Found::NoTable | Found::NotInitialised { .. } | Found::NoRow { .. } => {
            Err(Failure::refused(
                "the table or its registry row was taken away while init was at work",
                "find out who does that, and run init again",
            ))
        }
    }
}

/// The row describes the slot from here on.
async fn complete(
    side: &Side,
    table_oid: u32,
    system: &IdentifySystem,
    made: &Made,
) -> Result<(), DbError> {
    let consistent_point: Lsn = made
        .consistent_point
        .parse()
        .map_err(|e| DbError::Protocol(format!("consistent_point: {e}")))?;
    let updated = side
        .client
        .execute(
            "update walrelay.relay set intent = null, system_identifier = $2, timeline = $3, \
             slot_generation = slot_generation + 1, lower_bound = $4::text::pg_snapshot, \
             consistent_point = $5, coverage = $6::text::jsonb, leader = null, \
             stop_commit_lsn = null, stop_xid = null, stop_commit_time = null, \
             stop_reported = null, stop_complete = null, stop_open = null, halted_event = null, \
             halted_generation = null, halted_reason = null, updated_at = now() \
             where table_oid = $1 and intent is not null",
            &[
                &table_oid,
                &system.system_identifier,
                &system.timeline,
                &made.snapshot,
                &PgLsn::from(consistent_point.0),
                &made.coverage,
            ],
        )
        .await
        .map_err(|e| db_error(&e))?;
    if updated == 1 {
        return Ok(());
    }
    Err(DbError::Protocol(
        "the registry row that announced the slot is gone".to_owned(),
    ))
}

/// A statement that failed, for a person.
fn statement_failure(what: &str, error: &DbError) -> Failure {
    let cause = format!("{what}: {error}");
    let remedy = match error.sqlstate() {
        "42501" => "give the role the right that is missing, or run init as the table's owner",
        "55P03" => {
            "another session holds a lock on the table: look in pg_locks, end it or wait, and run \
             init again (--lock-timeout waits longer)"
        }
        "42703" | "42P01" => {
            "schema walrelay was made by another version of walrelay: use that one, or bring the \
             schema to this one's state (migrations/)"
        }
        "53400" => "drop a slot that nobody needs, or raise max_replication_slots and restart",
        _ => match error {
            DbError::Protocol(_) => {
                return Failure::new(
                    Exit::Unexpected,
                    cause,
                    "look at the server's log; if that explains nothing, report this as a bug",
                );
            }
            _ if error.heals_with_time() => "run init again when the server is up",
            _ => "put right what the server says, and run init again",
        },
    };
    Failure::refused(cause, remedy)
}

/// What would run, as a script for psql. Unmet needs are comments: whoever runs it may have the
/// rights that this role lacks.
fn script(config: &InitConfig, seen: &Seen, plan: &Plan) -> String {
    let source = &config.source;
    let mut out = String::new();
    for need in &plan.needs {
        out.push_str(&comment(&format!("unmet: {}", need.found)));
        if let Some(remedy) = &need.remedy {
            out.push_str(&comment(&format!("  remedy: {remedy}")));
        }
    }
    for note in &plan.notes {
        out.push_str(&comment(&format!("note: {note}")));
    }
    if plan.changes_nothing() {
        out.push_str("-- nothing to do: everything is there already\n");
    }
    if !plan.statements.is_empty() {
        let lock_timeout = config.lock_timeout.as_millis();
        out.push_str("begin;\n");
        out.push_str(&format!("set local lock_timeout = '{lock_timeout}ms';\n\n"));
        for statement in &plan.statements {
            out.push_str(&statement.sql);
            out.push('\n');
        }
        out.push_str("commit;\n\n");
    }
    if plan.slot != SlotWork::AlreadyThere {
        out.push_str(
            "-- The slot is always made by `walrelay init`, over a replication connection, once the\n\
             -- above is committed. It runs:\n",
        );
        if plan.slot == SlotWork::MakeAgain {
            out.push_str(&comment(&format!(
                "  select pg_drop_replication_slot('{}');  -- left from an interrupted init",
                source.slot
            )));
        }
        out.push_str("--   BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ;\n");
        let create = create_slot(&source.slot, seen.server.version_num);
        out.push_str(&comment(&format!("  {create};")));
        out.push_str("--   select pg_current_snapshot();\n--   COMMIT;\n");
        out.push_str("-- and completes the row in walrelay.relay with what that snapshot is.\n\n");
    }
    out.push_str(
        "-- Another role for `walrelay run` (REPLICATION is an attribute, not a grant):\n\
         --   alter role ROLE replication;\n\
         --   grant usage on schema walrelay to ROLE;\n\
         --   grant select, insert, update, delete on all tables in schema walrelay to ROLE;\n",
    );
    let schema = quote_ident(&source.table.schema);
    let table = quote_table(&source.table);
    out.push_str(&comment(&format!(
        "  grant usage on schema {schema} to ROLE;"
    )));
    out.push_str(&comment(&format!("  grant select on {table} to ROLE;")));
    out
}

/// One line of comment, whatever the names in it.
fn comment(text: &str) -> String {
    format!("-- {}\n", text.replace(['\n', '\r'], " "))
}

#[derive(Serialize)]
struct Report<'a> {
    changed: bool,
    created: Vec<Entry<'a>>,
    already_there: Vec<Entry<'a>>,
    notes: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    slot: Option<SlotReport>,
}

#[derive(Serialize)]
struct Entry<'a> {
    object: &'a str,
    name: &'a str,
}

#[derive(Serialize)]
struct SlotReport {
    name: String,
    table: String,
    publication: String,
    consistent_point: String,
    lower_bound: String,
    failover: bool,
    /// The slot of an interrupted init was dropped and made anew.
    repaired: bool,
}

impl SlotReport {
    fn new(config: &InitConfig, seen: &Seen, plan: &Plan, made: &Made) -> Self {
        SlotReport {
            name: config.source.slot.clone(),
            table: show_table(&config.source.table),
            publication: show_ident(&config.source.publication),
            consistent_point: made.consistent_point.clone(),
            lower_bound: made.snapshot.clone(),
            failover: seen.server.version_num >= 170_000,
            repaired: plan.slot == SlotWork::MakeAgain,
        }
    }
}

impl<'a> Report<'a> {
    fn new(plan: &'a Plan, slot: Option<SlotReport>) -> Self {
        let entry = |item: &'a plan::Item| Entry {
            object: item.object,
            name: &item.name,
        };
        let made = plan.statements.iter().filter_map(|s| s.makes.as_ref());
        Report {
            changed: !plan.changes_nothing(),
            created: made.map(entry).collect(),
            already_there: plan.already.iter().map(entry).collect(),
            notes: &plan.notes,
            slot,
        }
    }

    fn text(&self, json: bool) -> Result<String, Failure> {
        if json {
            let mut text = serde_json::to_string_pretty(self).map_err(|e| {
                Failure::new(Exit::Unexpected, e.to_string(), "report this as a bug")
            })?;
            text.push('\n');
            return Ok(text);
        }
        let mut text = String::new();
        for entry in &self.already_there {
            text.push_str(&format!("already there  {} {}\n", entry.object, entry.name));
        }
        for entry in &self.created {
            text.push_str(&format!("created        {} {}\n", entry.object, entry.name));
        }
        if let Some(slot) = &self.slot {
            let failover = if slot.failover { ", failover" } else { "" };
            let again = if slot.repaired {
                ", in place of one that an interrupted init left"
            } else {
                ""
            };
            text.push_str(&format!(
                "created        slot {} (from {}{failover}{again})\n",
                slot.name, slot.consistent_point
            ));
        }
        for note in self.notes {
            text.push_str(&format!("note           {note}\n"));
        }
        text.push_str(if self.changed {
            "ready          walrelay run --brokers HOST:PORT\n"
        } else {
            "nothing to do: everything was there already, nothing was changed\n"
        });
        Ok(text)
    }
}
