//! `walrelay drain`: brings the stream to its end, for `pg_upgrade` or a move, and says when that is
//! reached. The relay is the very one that `run` runs; beside it a second session looks on.
//!
//! ```text
//!   mark ──▶ confirmed up to it? ──▶ nothing new, nobody writes, for a while ──▶ safe
//!     ▲                                        │
//!     └──────── a row came, or a writer ◀──────┘
//! ```
//!
//! # Invariants
//! - "Safe" is said only of what was looked at: everything below the position is confirmed, no row
//!   has come since, no transaction that has written is open in this database, no other relay waits.
//! - Whatever ends it, the relay ends as after a SIGTERM.

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::oneshot;
use tokio_postgres::Client;

use super::report;
use crate::config::{DrainConfig, Part, Source};
use crate::error::{DbError, Exit, Failure};
use crate::io::preflight::span;
use crate::io::registry::{self, Found};
use crate::io::side::Side;
use crate::io::sql::show_table;
use crate::io::writers::{self, Mark};
use crate::io::{catalog, connect};
use crate::lsn::Lsn;
use crate::service::{self, StopBy, Termination};

/// Nothing may have been written for so long.
const QUIET: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How often what is waited for is said again.
const SAY_EVERY: Duration = Duration::from_secs(10);
/// How long a server that shuts down may take to let the stream go.
const SHUTDOWN_WITHIN: Duration = Duration::from_secs(60);

type Relay = Pin<Box<dyn Future<Output = Result<(), Failure>>>>;

/// # Errors
/// Exit code 3: not drained, and why; another relay runs; or whatever ended the relay.
pub async fn run(config: DrainConfig) -> Result<(), Failure> {
    let source = config.run.source.clone();
    let failed = |error: DbError| connect::failure(&error, &source.database);
    let side = Side::connect(&source.database, None)
        .await
        .map_err(failed)?;
    let table = observed(&side.client, &config).await?;
    nobody_else(&side.client, table.oid)
        .await
        .map_err(failed)??;
    let mut stops = Termination::listen()?;
    let (stop, request) = oneshot::channel();
    let run = config.run.clone();
    let mut relay: Relay = Box::pin(service::run_by(run, StopBy::Request(request)));
    let mut watch = Watch::new(&side.client, &source, table);
    let came = tokio::select! {
        ended = &mut relay => return Err(ended_early(ended)),
        came = watch.until_safe(config.deadline) => came.map_err(failed),
        () = stops.next() => Ok(Came::Interrupted),
    };
    let safe = match came {
        Ok(Came::Safe(safe)) => safe,
        Ok(Came::Late(why)) => {
            let _ = stop.send(());
            relay.await?;
            return Err(not_drained(config.deadline, &why));
        }
        Ok(Came::Interrupted) => {
            let _ = stop.send(());
            relay.await?;
            return Err(Failure::refused(
                "stopped before the stream was drained",
                "nothing is lost: run it again, or `walrelay run`",
            ));
        }
        Err(failure) => {
            let _ = stop.send(());
            relay.await?;
            return Err(failure);
        }
    };
    if config.hold {
        say(&config, &safe, None)?;
        return hold(side, &source, relay, stop, &mut stops).await;
    }
    let _ = stop.send(());
    relay.await?;
    let stored = stop_is_stored(&side.client, &source, &safe)
        .await
        .map_err(failed)?;
    // Between the last look and the relay's end somebody may have begun again.
    if let Some(late) = watch.came_late(&safe).await.map_err(failed)? {
        return Err(Failure::refused(
            format!("not drained: {late}"),
            "stop what writes to the outbox, and run it again",
        ));
    }
    say(&config, &safe, Some(stored))
}

/// The outbox.
#[derive(Clone)]
struct Outbox {
    oid: u32,
    /// The column by which new rows are told; `None`: they are not.
    xid: Option<String>,
}

async fn observed(client: &Client, config: &DrainConfig) -> Result<Outbox, Failure> {
    let source = &config.run.source;
    let failed = |error: DbError| connect::failure(&error, &source.database);
    let server = registry::server(client).await.map_err(failed)?;
    if server.in_recovery {
        return Err(Failure::refused(
            "this server is a standby: the stream comes from the primary",
            "connect to the primary (--database-url)",
        ));
    }
    let found = registry::load_by_table(client, &source.table)
        .await
        .map_err(failed)?;
    let table = catalog::table(client, &source.table)
        .await
        .map_err(failed)?;
    let (Found::Row(row), Some(table)) = (found, table) else {
        return Err(Failure::refused(
            format!(
                "table {} is not relayed: there is nothing to drain",
                show_table(&source.table)
            ),
            "name the outbox table with --table, or run `walrelay init`",
        ));
    };
    let column = config.run.mapping.columns.get(Part::Xid);
    let mut columns = table.columns.into_iter();
    let xid = columns.find(|c| Some(c.name.as_str()) == column && c.base_type == "xid8");
    Ok(Outbox {
        oid: row.table_oid,
        xid: xid.map(|column| column.name),
    })
}

/// A relay that runs already does the same work, and a standby would take the slot as soon as it
/// is drained.
async fn nobody_else(client: &Client, table_oid: u32) -> Result<Result<(), Failure>, DbError> {
    let instances = registry::instances(client, Some(table_oid)).await?;
    if instances.is_empty() {
        return Ok(Ok(()));
    }
    let mut failure = Failure::refused(
        "a relay of this table runs",
        "stop it (SIGTERM), and what starts it again: drain takes its place and goes on from where \
         it stops",
    );
    for instance in &instances {
        failure = failure.because(instance.to_string());
    }
    Ok(Err(failure))
}

fn ended_early(ended: Result<(), Failure>) -> Failure {
    match ended {
        Err(failure) => failure.because("the stream is not drained"),
        Ok(()) => Failure::new(
            Exit::Unexpected,
            "the relay ended by itself before the stream was drained",
            "report this as a bug; nothing is lost: run it again",
        ),
    }
}

fn not_drained(deadline: Duration, why: &[String]) -> Failure {
    let mut failure = Failure::refused(
        format!("not drained within {}", span(deadline)),
        "stop what writes to the outbox, end or wait for what is open, see to what the relay's log \
         names, and run it again (--deadline gives it more time)",
    );
    for reason in why {
        failure = failure.because(reason.clone());
    }
    failure
}

// ---- looking on ----------------------------------------------------------------------------

enum Came {
    Safe(Safe),
    /// What was still in the way.
    Late(Vec<String>),
    Interrupted,
}

/// What was found when nothing was in the way any more.
#[derive(Clone)]
struct Safe {
    mark: Mark,
    confirmed: Lsn,
    /// New rows could be told.
    are_rows_known: bool,
}

struct Watch<'a> {
    client: &'a Client,
    source: &'a Source,
    table: Outbox,
    said: Option<(Vec<String>, Instant)>,
}

impl<'a> Watch<'a> {
    fn new(client: &'a Client, source: &'a Source, table: Outbox) -> Self {
        Watch {
            client,
            source,
            table,
            said: None,
        }
    }

    async fn until_safe(&mut self, deadline: Duration) -> Result<Came, DbError> {
        let until = Instant::now() + deadline;
        let mut mark = writers::mark(self.client).await?;
        let mut marked_at = Instant::now();
        loop {
            let confirmed = writers::confirmed(self.client, &self.source.slot).await?;
            let confirmed = confirmed.unwrap_or_default();
            let is_confirmed = confirmed >= mark.position;
            let mut waits = self.writers().await?;
            let rows = self.rows_since(&mark).await?;
            if let Some(rows) = rows.filter(|rows| *rows > 0) {
                waits.push(format!("{rows} rows were written since {}", mark.position));
            }
            let is_quiet = waits.is_empty();
            if is_quiet && is_confirmed && marked_at.elapsed() >= QUIET {
                return Ok(Came::Safe(Safe {
                    mark,
                    confirmed,
                    are_rows_known: rows.is_some(),
                }));
            }
            if !is_confirmed {
                let behind = mark.position.bytes_since(confirmed);
                waits.push(format!(
                    "confirmed up to {confirmed}, {behind} bytes before {}",
                    mark.position
                ));
            }
            if Instant::now() >= until {
                waits.push("it was not quiet for long enough".to_owned());
                return Ok(Came::Late(waits));
            }
            // What came meanwhile is drained, too: the next goal lies behind it.
            if is_confirmed && !is_quiet {
                mark = writers::mark(self.client).await?;
                marked_at = Instant::now();
            }
            self.say(waits);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Whatever may still write.
    async fn writers(&self) -> Result<Vec<String>, DbError> {
        let instances = registry::instances(self.client, Some(self.table.oid)).await?;
        let ours: Vec<i32> = instances.iter().map(|i| i.session.pid).collect();
        let mut waits = writers::open_transactions(self.client, self.table.oid, &ours).await?;
        // One of them is the relay that drains; it need not lead yet.
        if instances.len() > 1 {
            let others = instances.iter().filter(|i| !i.is_leader);
            waits.extend(others.map(|i| format!("another relay stands by: {}", i.session)));
        }
        Ok(waits)
    }

    async fn rows_since(&self, mark: &Mark) -> Result<Option<i64>, DbError> {
        let Some(xid) = &self.table.xid else {
            return Ok(None);
        };
        let table = &self.source.table;
        writers::rows_since(self.client, table, xid, mark)
            .await
            .map(Some)
    }

    async fn came_late(&self, safe: &Safe) -> Result<Option<String>, DbError> {
        let rows = self.rows_since(&safe.mark).await?.unwrap_or_default();
        Ok((rows > 0).then(|| {
            format!(
                "{rows} rows were written after it had been safe at {}",
                safe.mark.position
            )
        }))
    }

    /// When it changes, and now and then.
    fn say(&mut self, waits: Vec<String>) {
        let is_due = match &self.said {
            None => true,
            Some((before, at)) => before.len() != waits.len() || at.elapsed() >= SAY_EVERY,
        };
        if is_due && !waits.is_empty() {
            tracing::info!("draining: {}", waits.join("; "));
            self.said = Some((waits, Instant::now()));
        }
    }
}

/// Whether the registry has the clean stop of this very end.
async fn stop_is_stored(client: &Client, source: &Source, safe: &Safe) -> Result<bool, DbError> {
    let Found::Row(row) = registry::load_by_table(client, &source.table).await? else {
        return Ok(false);
    };
    Ok(row
        .stop
        .is_some_and(|stop| stop.complete && stop.reported >= safe.mark.position))
}

// ---- until the server goes -----------------------------------------------------------------

/// Goes on confirming until the server is down: `pg_upgrade` keeps a slot only if it has consumed
/// all WAL, and a database that nobody writes to still writes some.
async fn hold(
    mut side: Side,
    source: &Source,
    mut relay: Relay,
    stop: oneshot::Sender<()>,
    stops: &mut Termination,
) -> Result<(), Failure> {
    tokio::select! {
        ended = &mut relay => return Err(ended_early(ended)),
        () = stops.next() => {}
        _ = side.closed() => {
            tracing::info!("the server ends its sessions");
            let down = tokio::time::timeout(SHUTDOWN_WITHIN, is_down(source));
            tokio::select! {
                ended = &mut relay => return Err(ended_early(ended)),
                _ = down => {}
            }
        }
    }
    let _ = stop.send(());
    relay.await
}

/// Nobody listens any more: the last walsender is gone, too.
async fn is_down(source: &Source) {
    while !matches!(
        Side::connect(&source.database, None).await,
        Err(DbError::Unreachable(_))
    ) {
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

// ---- words ---------------------------------------------------------------------------------

#[derive(Serialize)]
struct Report {
    safe: bool,
    position: String,
    confirmed_flush_lsn: String,
    /// False: the table has no column to tell new rows by.
    new_rows_were_looked_for: bool,
    /// Null while the stream is held open.
    stop_stored: Option<bool>,
}

fn say(config: &DrainConfig, safe: &Safe, stored: Option<bool>) -> Result<(), Failure> {
    if config.json {
        return report::write_out(&report::json(&Report {
            safe: true,
            position: safe.mark.position.to_string(),
            confirmed_flush_lsn: safe.confirmed.to_string(),
            new_rows_were_looked_for: safe.are_rows_known,
            stop_stored: stored,
        })?);
    }
    let mut text = format!(
        "drained: everything committed before {} is delivered, and confirmed up to {}\n\
         nobody has written for {} s, and no transaction that has written is open; keep the writers \
         stopped\n",
        safe.mark.position,
        safe.confirmed,
        QUIET.as_secs()
    );
    if !safe.are_rows_known {
        text.push_str(
            "the table has no column xid: whether rows came after that position was not looked for\n",
        );
    }
    text.push_str(match stored {
        None => "now stop the server: the stream is held open until it is down\n",
        Some(true) => {
            "a clean stop is stored\n\
             for pg_upgrade from Postgres 17 on: drain again with --hold and stop the server under \
             it, for a slot is kept only if it has consumed all WAL\n"
        }
        Some(false) => {
            "no clean stop is stored (this role may not write schema walrelay, or the database did \
             not answer): the next start reads the topics as after a crash\n"
        }
    });
    report::write_out(&text)
}
