//! The slot: made in the transaction whose snapshot it leaves from, so that every row is either
//! visible in that snapshot or in the stream, never both, never neither.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio_postgres::Client;

use super::plan::rows_need;
use super::survey::{ROWS_COUNTED_MAX, Rows, count_sql};
use crate::config::{Existing, InitConfig};
use crate::error::{DbError, Failure};
use crate::finding;
use crate::io::new_slot::{self, LeftFrom, column, create_slot};
use crate::io::registry;
use crate::io::side::db_error;
use crate::io::slot::Slot;
use crate::io::sql::{quote_ident, quote_literal};

/// How often we look who holds slot creation up. Only the last look counts.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What the slot's own transaction saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    pub consistent_point: String,
    /// `pg_current_snapshot()`: cannot be had later.
    pub snapshot: String,
    pub coverage: String,
}

/// Why there is no slot.
#[derive(Debug)]
pub enum NotMade {
    Db(DbError),
    Refused(Failure),
}

impl From<DbError> for NotMade {
    fn from(error: DbError) -> Self {
        NotMade::Db(error)
    }
}

/// Makes the slot. On an error there is none: Postgres takes a half-made one back, a made one is
/// dropped here (and where even that fails, the intent tells the next run).
pub async fn make(
    slot: &mut Slot,
    side: &Client,
    config: &InitConfig,
    version_num: i32,
    existing: Option<Existing>,
) -> Result<Made, NotMade> {
    new_slot::begin(slot, config.lock_timeout).await?;
    let command = create_slot(&config.source.slot, version_num);
    let rows = create(slot, side, config, &command).await?;
    let consistent_point = column(&rows, 1, "consistent_point")?;
    match read_snapshot(slot, config, existing).await {
        Ok(LeftFrom { snapshot, coverage }) => Ok(Made {
            consistent_point,
            snapshot,
            coverage,
        }),
        Err(error) => {
            let rolled_back = slot.simple_query("ROLLBACK").await;
            if rolled_back.is_ok() {
                // Best effort: the intent stands, so that the next run drops it otherwise.
                let _ = drop_slot(side, &config.source.slot).await;
            }
            Err(error)
        }
    }
}

async fn create(
    slot: &mut Slot,
    side: &Client,
    config: &InitConfig,
    command: &str,
) -> Result<Vec<Vec<Option<String>>>, NotMade> {
    let pid = slot.backend_pid();
    let mut watch = Watch::default();
    let error = {
        let creation = slot.simple_query(command);
        tokio::pin!(creation);
        loop {
            tokio::select! {
                done = &mut creation => match done {
                    Ok(rows) => return Ok(rows),
                    Err(error) => break error,
                },
                () = tokio::time::sleep(LOOK_EVERY) => {
                    if let Ok(sight) = look(side, pid).await {
                        watch.saw(sight);
                    }
                }
            }
        }
    };
    if error.sqlstate() == "55P03" {
        let role = registry_role(side).await.unwrap_or_default();
        return Err(NotMade::Refused(blocked(
            &config.source.slot,
            config.lock_timeout,
            &watch.blockers(),
            &role,
        )));
    }
    Err(error.into())
}

async fn registry_role(side: &Client) -> Result<String, DbError> {
    crate::io::catalog::role(side).await.map(|role| role.name)
}

/// Snapshot and coverage, and what is in the table as of that very snapshot.
async fn read_snapshot(
    slot: &mut Slot,
    config: &InitConfig,
    existing: Option<Existing>,
) -> Result<LeftFrom, NotMade> {
    let left_from = new_slot::left_from(slot, &config.source).await?;
    if existing.is_none() {
        let rows = slot.simple_query(&count_sql(&config.source.table)).await?;
        let count: i64 = column(&rows, 0, "count")?
            .parse()
            .map_err(|_| DbError::Protocol("count() is not a number".to_owned()))?;
        let rows = if count > ROWS_COUNTED_MAX {
            Rows::Many(None)
        } else {
            Rows::Exactly(count)
        };
        if let Some(failure) = finding::failure(rows_need(&config.source, rows).as_slice()) {
            return Err(NotMade::Refused(failure));
        }
    }
    slot.simple_query("COMMIT").await?;
    Ok(left_from)
}

/// Drops a slot that nobody holds.
pub async fn drop_slot(side: &Client, slot: &str) -> Result<(), DbError> {
    side.execute(
        "select pg_catalog.pg_drop_replication_slot($1::text)",
        &[&slot],
    )
    .await
    .map(|_| ())
    .map_err(|e| db_error(&e))
}

/// The transaction that slot creation waits for, and all others, at one moment.
#[derive(Clone, Debug, Default)]
struct Sight {
    /// The xid that our walsender waits for.
    awaited: Option<String>,
    /// By xid: who holds it.
    open: BTreeMap<String, Blocker>,
}

/// A transaction that slot creation has to outwait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Blocker {
    Session {
        pid: i32,
        /// `None`: a background process.
        user: Option<String>,
        database: Option<String>,
        /// State and age; `None` where the role lacks `pg_read_all_stats`.
        doing: Option<(String, Duration)>,
    },
    Prepared {
        gid: String,
        owner: String,
        database: String,
        age: Duration,
    },
}

/// Remembers what was open when the present wait began: only that can be what holds it up. What
/// began later is new work that the next round of slot creation may not even wait for.
#[derive(Default)]
struct Watch {
    awaited: Option<String>,
    at_first: BTreeMap<String, Blocker>,
    last: BTreeMap<String, Blocker>,
}

impl Watch {
    fn saw(&mut self, sight: Sight) {
        if sight.awaited.is_none() {
            return;
        }
        if sight.awaited != self.awaited {
            self.awaited = sight.awaited;
            self.at_first = sight.open.clone();
        }
        self.last = sight.open;
    }

    fn blockers(&self) -> Vec<Blocker> {
        let mut found: Vec<Blocker> = Vec::new();
        for (xid, blocker) in &self.last {
            // Subtransactions have an xid each: one session is one blocker.
            if self.at_first.contains_key(xid) && !found.contains(blocker) {
                found.push(blocker.clone());
            }
        }
        found
    }
}

async fn look(side: &Client, walsender_pid: i32) -> Result<Sight, DbError> {
    let rows = side
        .query(
            "select l.transactionid::text, l.granted, l.pid, a.usename::text, a.datname::text, \
             a.state, extract(epoch from clock_timestamp() - a.xact_start)::float8, \
             p.gid, p.owner::text, p.database::text, \
             extract(epoch from clock_timestamp() - p.prepared)::float8 \
             from pg_catalog.pg_locks l \
             left join pg_catalog.pg_stat_activity a on a.pid = l.pid \
             left join pg_catalog.pg_prepared_xacts p \
               on l.pid is null and p.transaction = l.transactionid \
             where l.locktype = 'transactionid' and (l.pid is null or l.pid <> $1 or not l.granted) \
             and (l.granted and l.mode = 'ExclusiveLock' or l.pid = $1)",
            &[&walsender_pid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let mut sight = Sight::default();
    for row in &rows {
        let xid: String = registry::get(row, 0)?;
        if !registry::get::<bool>(row, 1)? {
            sight.awaited = Some(xid);
        } else if let Some(blocker) = blocker(row)? {
            sight.open.insert(xid, blocker);
        }
    }
    Ok(sight)
}

fn blocker(row: &tokio_postgres::Row) -> Result<Option<Blocker>, DbError> {
    let age = |at| -> Result<Option<Duration>, DbError> {
        let secs: Option<f64> = registry::get(row, at)?;
        Ok(secs.map(|secs| Duration::from_secs_f64(secs.max(0.0))))
    };
    if let Some(pid) = registry::get::<Option<i32>>(row, 2)? {
        let state: Option<String> = registry::get(row, 5)?;
        return Ok(Some(Blocker::Session {
            pid,
            user: registry::get(row, 3)?,
            database: registry::get(row, 4)?,
            doing: state.zip(age(6)?),
        }));
    }
    let gid: Option<String> = registry::get(row, 7)?;
    Ok(match gid {
        Some(gid) => Some(Blocker::Prepared {
            gid,
            owner: registry::get::<Option<String>>(row, 8)?.unwrap_or_default(),
            database: registry::get::<Option<String>>(row, 9)?.unwrap_or_default(),
            age: age(10)?.unwrap_or_default(),
        }),
        None => None,
    })
}

/// Says who held slot creation up, and how to get past them.
pub fn blocked(slot: &str, waited: Duration, blockers: &[Blocker], role: &str) -> Failure {
    let waited = humantime::format_duration(waited);
    let mut failure = Failure::refused(
        format!(
            "slot {slot} could not be made within {waited} (55P03): it has to wait for transactions \
             that were open before it"
        ),
        String::new(),
    );
    let mut ways = Vec::new();
    for blocker in blockers {
        match blocker {
            Blocker::Session {
                pid,
                user,
                database,
                doing,
            } => {
                let user = user
                    .as_deref()
                    .map_or("a background process".to_owned(), quote_ident);
                let database = database.as_deref().map_or("-".to_owned(), quote_ident);
                let doing = match doing {
                    Some((state, age)) => {
                        format!("{state}, its transaction open for {}", whole_seconds(*age))
                    }
                    None => format!(
                        "its age and state are hidden: grant pg_read_all_stats to {}",
                        quote_ident(role)
                    ),
                };
                failure = failure.because(format!(
                    "blocked by pid {pid}, user {user}, database {database} ({doing})"
                ));
                ways.push(format!("select pg_terminate_backend({pid})"));
            }
            Blocker::Prepared {
                gid,
                owner,
                database,
                age,
            } => {
                failure = failure.because(format!(
                    "blocked by prepared transaction {}, owner {}, database {} (prepared {} ago)",
                    quote_literal(gid),
                    quote_ident(owner),
                    quote_ident(database),
                    whole_seconds(*age)
                ));
                ways.push(format!(
                    "rollback prepared {} (or commit prepared, connected to database {})",
                    quote_literal(gid),
                    quote_ident(database)
                ));
            }
        }
    }
    failure.remedy = if ways.is_empty() {
        "look for long transactions in pg_stat_activity and pg_prepared_xacts, end them, and run \
         init again (--lock-timeout waits longer)"
            .to_owned()
    } else {
        format!(
            "end what blocks: {}; then run init again (--lock-timeout waits longer)",
            ways.join("; ")
        )
    };
    failure
}

fn whole_seconds(age: Duration) -> String {
    humantime::format_duration(Duration::from_secs(age.as_secs())).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(pid: i32, doing: Option<(&str, u64)>) -> Blocker {
        Blocker::Session {
            pid,
            user: Some("app".into()),
            database: Some("shop".into()),
            doing: doing.map(|(state, secs)| (state.to_owned(), Duration::from_secs(secs))),
        }
    }

    #[test]
    fn a_prepared_transaction_is_named_with_the_statement_that_ends_it() {
        let prepared = Blocker::Prepared {
            gid: "it's".into(),
            owner: "app".into(),
            database: "shop".into(),
            age: Duration::from_millis(7_260_900),
        };
        let text = blocked("w", Duration::from_secs(10), &[prepared], "init").to_string();
        assert!(text.contains("prepared transaction 'it''s', owner \"app\", database \"shop\""));
        assert!(text.contains("prepared 2h 1m ago"), "{text}");
        let last = text.lines().last().expect("a remedy");
        assert!(last.starts_with("remedy: ") && last.contains("rollback prepared 'it''s'"));
    }

    #[test]
    fn a_hidden_session_names_the_grant_that_shows_it() {
        let blockers = [
            session(7, None),
            session(8, Some(("idle in transaction", 61))),
        ];
        let text = blocked("w", Duration::from_secs(10), &blockers, "init").to_string();
        assert!(text.contains("pid 7, user \"app\""));
        assert!(text.contains("grant pg_read_all_stats to \"init\""));
        assert!(text.contains("(idle in transaction, its transaction open for 1m 1s)"));
        assert!(text.contains("pg_terminate_backend(8)"));
    }

    #[test]
    fn only_what_was_open_when_the_wait_began_is_a_blocker() {
        let sight = |awaited: &str, open: &[(&str, i32)]| Sight {
            awaited: Some(awaited.to_owned()),
            open: open
                .iter()
                .map(|(xid, pid)| ((*xid).to_owned(), session(*pid, None)))
                .collect(),
        };
        let mut watch = Watch::default();
        watch.saw(sight("1", &[("1", 11), ("2", 12), ("21", 12)]));
        watch.saw(sight("2", &[("2", 12), ("21", 12), ("3", 13)]));
        watch.saw(Sight::default());
        watch.saw(sight("2", &[("2", 12), ("21", 12), ("4", 14)]));
        assert_eq!(watch.blockers(), [session(12, None)]);
    }
}
