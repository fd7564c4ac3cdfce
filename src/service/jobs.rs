//! What takes time: connecting, statements, questions to the cluster. Each is a task that answers
//! with a [`Done`].

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use super::letters::{self, Answer};
use crate::config::{CreateTopics, Database, Mapping, Source};
use crate::error::{DbError, Failure};
use crate::gap::{Cause, Gap, OnGap};
use crate::io::heal::{self, Healing, Intent};
use crate::io::preflight::{self, NotReady};
use crate::io::registry::{self, Found, Prober};
use crate::io::sample::{self, Sample};
use crate::io::side::Side;
use crate::io::slot::{IdentifySystem, Slot};
use crate::io::{connect, kafka, rival};
use crate::lsn::Lsn;
use crate::record::{Right, TopicState};
use crate::relay::ledger::OpenTransaction;
use crate::relay::orders::{Halted, Led, OpenError, Opened, Probed, Seek, Stop};
use crate::tail::TailAnswer;

/// How long the server may take to read the last status and say that it has.
const FINISH_WITHIN: Duration = Duration::from_secs(2);

/// How long the questions of a new session may take: every requirement is looked at.
const FIRST_SEEK_WITHIN: Duration = Duration::from_secs(60);

/// How long a standby waits on the server for the lock before it looks around again. Below the
/// usual deadlock_timeout: a server that logs lock waits has nothing to log.
const AWAIT_LOCK: Duration = Duration::from_millis(500);

/// Where it cannot wait there, it asks as often.
const ASK_FOR_LOCK: Duration = Duration::from_millis(200);

/// A walsender sees in milliseconds that its client is gone.
const SLOT_FREE_WITHIN: Duration = Duration::from_millis(500);
const SLOT_FREE_LOOK: Duration = Duration::from_millis(10);

/// Rows that are healed without having been asked to.
const UNASKED_ROWS_MAX: i64 = 100_000;

/// How long a look at the cluster may take.
const REACH_WITHIN: Duration = Duration::from_secs(5);

/// What does not change while the relay runs.
pub struct Surroundings {
    pub source: Source,
    pub mapping: Mapping,
    /// Topics that are the same for every row.
    pub topics: Vec<String>,
    pub create_topics: Option<CreateTopics>,
    pub on_gap: Option<OnGap>,
    pub kafka: kafka::Settings,
    pub process_id: String,
    pub wal_sender_timeout: Duration,
    /// Side sessions made so far.
    pub sessions: AtomicU32,
    /// Warnings that were logged: each once, not once a session.
    pub told: Mutex<BTreeSet<String>>,
    /// The table whose lock was asked for last; 0 before that.
    pub table_oid: AtomicU32,
}

impl Surroundings {
    pub fn oid(&self) -> u32 {
        self.table_oid.load(Ordering::Relaxed)
    }
}

/// The session that holds the lock, as jobs share it.
pub struct Link {
    pub client: Arc<Client>,
    /// Where that session is: the stream goes to the same server.
    database: Arc<Database>,
    prober: Prober,
    backend_pid: i32,
    /// Since when the lock is ours.
    taken_at: Instant,
    pub table_oid: u32,
    /// Of the slot that the registry describes.
    pub generation: AtomicI64,
    /// A gap is being healed: any settled event may come again.
    pub heals: AtomicBool,
    version_num: i32,
    encoding: String,
    system_identifier: Option<String>,
    timeline: Option<i32>,
}

/// What events are read from.
pub enum Session {
    Stream(Box<Slot>),
    Heal(Box<Healing>),
}

pub enum Done {
    Sought {
        side: Option<Side>,
        link: Option<Arc<Link>>,
        seek: Box<Seek>,
    },
    Opened(Result<(Session, Opened), OpenError>),
    Finished,
    Probed {
        probed: Probed,
        /// The pid of our walsender when it was asked.
        walsender: Option<i32>,
    },
    Topic {
        name: String,
        state: TopicState,
    },
    Reached(kafka::Reach),
    Sampled(Result<Box<Sample>, DbError>),
    StopErased,
    Stored,
    Cleared,
    NotWritten,
    Letters(Answer),
    Tail {
        topic: String,
        answer: TailAnswer,
    },
    /// Nobody waits for it.
    Nothing,
}

// ---- the lead ------------------------------------------------------------------------------

/// Takes the lead if it is free, over a session that is made if there is none.
pub async fn seek(around: Arc<Surroundings>, side: Option<Side>) -> Done {
    let (mut side, is_new) = match side {
        Some(side) => (side, false),
        None => match Side::connect(&around.source.database, None).await {
            Ok(side) => {
                around.sessions.fetch_add(1, Ordering::Relaxed);
                (side, true)
            }
            Err(error) => {
                return Done::Sought {
                    side: None,
                    link: None,
                    seek: Box::new(refused_or_later(&error, &around.source)),
                };
            }
        },
    };
    // A session may die without a word (a firewall that forgot it): the kernel would wait for
    // a quarter of an hour.
    let limit = if is_new {
        FIRST_SEEK_WITHIN
    } else {
        around.wal_sender_timeout / 2
    };
    let sought = tokio::time::timeout(limit, seek_over(&around, &mut side, is_new)).await;
    match sought {
        Ok(Ok((link, seek))) => Done::Sought {
            side: Some(side),
            link,
            seek: Box::new(seek),
        },
        // The session is given up: what it holds (the lock, perhaps) goes with it.
        Ok(Err(seek)) => Done::Sought {
            side: None,
            link: None,
            seek: Box::new(seek),
        },
        Err(_) => {
            side.abandon();
            let why = format!("the session did not answer within {limit:?}");
            Done::Sought {
                side: None,
                link: None,
                seek: Box::new(Seek::Later(why)),
            }
        }
    }
}

fn refused_or_later(error: &DbError, source: &Source) -> Seek {
    if error.heals_with_time() {
        Seek::Later(error.to_string())
    } else {
        Seek::Refused(connect::failure(error, &source.database))
    }
}

async fn seek_over(
    around: &Surroundings,
    side: &mut Side,
    is_new: bool,
) -> Result<(Option<Arc<Link>>, Seek), Seek> {
    let client = &*side.client;
    let or_later = |error: DbError| refused_or_later(&error, &around.source);
    if is_new {
        check(around, client).await?;
    }
    let Some(table_oid) = registry::table_oid(client, &around.source.table)
        .await
        .map_err(or_later)?
    else {
        check(around, client).await?;
        return Err(Seek::Later("the table is not there".to_owned()));
    };
    if is_new {
        registry::show_instance(client, table_oid)
            .await
            .map_err(or_later)?;
    }
    around.table_oid.store(table_oid, Ordering::Relaxed);
    let is_waited_for = !is_new
        && rival::await_lock(client, table_oid, AWAIT_LOCK)
            .await
            .is_ok();
    if !registry::try_lock(client, table_oid)
        .await
        .map_err(or_later)?
    {
        let why = rival(around, client, table_oid).await.map_err(or_later)?;
        if !is_new && !is_waited_for {
            tokio::time::sleep(ASK_FOR_LOCK).await;
        }
        return Ok((None, Seek::Elsewhere(why)));
    }
    match lead(around, side, table_oid).await {
        Ok(Some((link, led))) => Ok((Some(Arc::new(link)), Seek::Led(led))),
        Ok(None) => {
            let client = &*side.client;
            registry::unlock(client, table_oid)
                .await
                .map_err(or_later)?;
            let why = "the server has just started, its lock is left to whoever led before";
            Ok((None, Seek::Elsewhere(why.to_owned())))
        }
        Err(seek) => Err(seek),
    }
}

/// Every requirement, once a session.
async fn check(around: &Surroundings, client: &Client) -> Result<(), Seek> {
    let on_gap = around.on_gap;
    match preflight::before_run(client, &around.source, &around.mapping, on_gap).await {
        Ok(ready) => {
            let mut told = around.told.lock().unwrap_or_else(PoisonError::into_inner);
            for warning in ready.warnings {
                if told.insert(warning.clone()) {
                    tracing::warn!("{warning}");
                }
            }
            Ok(())
        }
        Err(NotReady::Db(error)) => Err(refused_or_later(&error, &around.source)),
        Err(NotReady::Refused(failure)) => Err(Seek::Refused(failure)),
    }
}

/// Who holds the lock; one that hangs is ended.
async fn rival(around: &Surroundings, client: &Client, table_oid: u32) -> Result<String, DbError> {
    let found = rival::of_lock(client, table_oid, around.wal_sender_timeout).await?;
    let Some(rival) = found else {
        return Ok("another instance holds the lock".to_owned());
    };
    let who = rival.who;
    if !rival.is_idle {
        return Ok(format!("another instance leads ({who})"));
    }
    match registry::terminate(client, rival.pid).await {
        Ok(_) => {
            tracing::warn!(
                pid = rival.pid,
                "the leader's session has been idle for too long: ended it ({who})"
            );
            Ok(format!("the leader hangs, its session was ended ({who})"))
        }
        Err(error) => Ok(format!(
            "the leader hangs and cannot be ended ({who}): {error}; end that session by hand"
        )),
    }
}

/// The lock is ours: writes our name and reads what there is to know. `None`: a server that has
/// just started is left to the leader that it had, which has more to go on than we have.
async fn lead(
    around: &Surroundings,
    side: &Side,
    table_oid: u32,
) -> Result<Option<(Link, Led)>, Seek> {
    let client = Arc::clone(&side.client);
    let or_later = |error: DbError| refused_or_later(&error, &around.source);
    let registered = match registry::load_by_table(&client, &around.source.table)
        .await
        .map_err(or_later)?
    {
        Found::Row(row) => *row,
        Found::NoTable | Found::NotInitialised { .. } | Found::NoRow { .. } => {
            check(around, &client).await?;
            return Err(Seek::Later("the registry row went away".to_owned()));
        }
    };
    let is_another = registered
        .leader
        .as_deref()
        .is_some_and(|leader| leader != around.process_id);
    let has_lost_one = around.sessions.load(Ordering::Relaxed) > 1;
    if is_another
        && registry::is_young(&client, has_lost_one)
            .await
            .map_err(or_later)?
    {
        return Ok(None);
    }
    let claimed = registry::claim_lead(&client, table_oid, &around.process_id).await;
    let (previous_leader, term) = match claimed {
        Ok((previous, term)) => (previous, Some(term)),
        Err(error) if error.sqlstate() == "42501" => {
            if registered.stop.is_some() {
                return Err(Seek::Refused(stop_not_erasable(&around.source)));
            }
            (registered.leader.clone(), None)
        }
        Err(error) => return Err(or_later(error)),
    };
    let server = registry::server(&client).await.map_err(or_later)?;
    let prober = Prober::prepare(&client, table_oid, &around.source.slot)
        .await
        .map_err(or_later)?;
    let probe = prober.ask(&client).await.map_err(or_later)?;
    let link = Link {
        client,
        database: Arc::clone(&side.database),
        prober,
        backend_pid: probe.backend_pid,
        taken_at: Instant::now(),
        table_oid,
        generation: AtomicI64::new(registered.generation),
        heals: AtomicBool::new(registered.heals),
        version_num: server.version_num,
        encoding: server.encoding,
        system_identifier: server.system_identifier,
        timeline: server.timeline,
    };
    let columns = preflight::heal_columns(&link.client, &around.source, &around.mapping)
        .await
        .map_err(or_later)?;
    let parked = letters::known(around, &link).await.map_err(or_later)?;
    let led = Led {
        parked,
        table_oid,
        generation: registered.generation,
        term,
        previous_leader,
        is_writable: term.is_some(),
        stop: registered.stop.map(stop_from_registry),
        halted: registered.halted.map(|h| Halted {
            event_id: h.event_id,
            reason: h.reason,
        }),
        consistent_point: registered.consistent_point,
        is_provable: registered.made_table && columns.is_some(),
    };
    Ok(Some((link, led)))
}

fn stop_not_erasable(source: &Source) -> Failure {
    Failure::refused(
        "the registry holds a stop that this role may not erase: it would mislead the next start",
        format!(
            "grant update on walrelay.relay to \"{}\" (`walrelay init --print-sql` shows all grants)",
            source.database.user
        ),
    )
}

fn stop_from_registry(stop: registry::Stop) -> Stop {
    Stop {
        last: stop.last,
        reported: stop.reported,
        complete: stop.complete,
        open: stop.open.map(|open| OpenTransaction {
            triple: open.triple,
            count: open.count,
            last_event_id: open.event_id.into_bytes(),
        }),
    }
}

// ---- the stream ----------------------------------------------------------------------------

pub async fn open(around: Arc<Surroundings>, link: Arc<Link>) -> Done {
    Done::Opened(open_over(&around, &link).await)
}

async fn open_over(
    around: &Surroundings,
    link: &Arc<Link>,
) -> Result<(Session, Opened), OpenError> {
    let source = &around.source;
    let or_later = |error: DbError| {
        if error.heals_with_time() {
            OpenError::Later(error.to_string())
        } else {
            OpenError::Never(connect::failure(&error, &link.database))
        }
    };
    let encoding = if link.encoding == "SQL_ASCII" {
        "SQL_ASCII"
    } else {
        "UTF8"
    };
    // Side by side, for a takeover waits for both. The columns before the position is read up to
    // which they hold.
    let (slot, unfit) = tokio::join!(
        Slot::connect(&link.database, encoding, around.wal_sender_timeout),
        preflight::unfit_columns(&link.client, source, &around.mapping)
    );
    let (mut slot, unfit) = (slot.map_err(or_later)?, unfit.map_err(or_later)?);
    let identity = slot.identify_system().await.map_err(or_later)?;
    let is_other_system = link
        .system_identifier
        .as_ref()
        .is_some_and(|known| *known != identity.system_identifier);
    let is_other_timeline = link
        .timeline
        .is_some_and(|known| known != identity.timeline);
    if is_other_system || is_other_timeline {
        return Err(OpenError::Later(format!(
            "two connections came to two servers: the side session is on system {:?} timeline {:?}, the stream on {} timeline {}; a balancer or a failover in between?",
            link.system_identifier, link.timeline, identity.system_identifier, identity.timeline
        )));
    }
    if let Some(intent) = heal::intent(&link.client, link.table_oid)
        .await
        .map_err(or_later)?
    {
        return open_heal(around, link, slot, intent, identity).await;
    }
    let confirmed_flush = free_slot(around, link).await?;
    still_covered(around, link).await?;
    slot.start_replication(&source.slot, &source.publication)
        .await
        .map_err(or_later)?;
    let opened = Opened {
        system_identifier: identity.system_identifier,
        timeline: identity.timeline,
        xlogpos: identity.xlogpos,
        confirmed_flush,
        unfit,
        heals: None,
    };
    Ok((Session::Stream(Box::new(slot)), opened))
}

/// What the publication covers is what it was when everything before was proved to be delivered.
async fn still_covered(around: &Surroundings, link: &Link) -> Result<(), OpenError> {
    let differs = heal::publication_differs(&link.client, &around.source, link.table_oid);
    if differs
        .await
        .map_err(|error| OpenError::Later(error.to_string()))?
    {
        return Err(gap(around, link, Cause::PublicationDiffers).await);
    }
    Ok(())
}

/// A gap, with what is in it as far as that can be counted.
async fn gap(around: &Surroundings, link: &Link, cause: Cause) -> OpenError {
    let (source, client) = (&around.source, &link.client);
    let missing = match preflight::heal_columns(client, source, &around.mapping).await {
        Ok(Some(columns)) => heal::missing(client, &source.table, &columns, link.table_oid).await,
        Ok(None) => Err(DbError::Protocol("no column xid".to_owned())),
        Err(error) => Err(error),
    };
    if let Err(error) = &missing {
        tracing::debug!(%error, "the gap could not be counted");
    }
    OpenError::Gap(Gap {
        cause,
        missing: missing.ok(),
    })
}

/// A slot is made where that was not done yet, and the rows of the gap are read.
async fn open_heal(
    around: &Surroundings,
    link: &Arc<Link>,
    mut slot: Slot,
    intent: Intent,
    identity: IdentifySystem,
) -> Result<(Session, Opened), OpenError> {
    let source = &around.source;
    let later = |error: DbError| OpenError::Later(error.to_string());
    // Whatever the stream needs: a publication that is still not there would only lose more.
    check(around, &link.client)
        .await
        .map_err(|seek| match seek {
            Seek::Refused(failure) => OpenError::Never(failure),
            Seek::Later(why) | Seek::Elsewhere(why) => OpenError::Later(why),
            Seek::Led(_) => OpenError::Later("the lead was taken anew".to_owned()),
        })?;
    let columns = preflight::heal_columns(&link.client, source, &around.mapping)
        .await
        .map_err(later)?;
    let Some(columns) = columns else {
        return Err(OpenError::Never(Failure::refused(
            format!(
                "the gap cannot be healed: {} has no columns id and xid (xid8)",
                source.table
            ),
            "run with --on-gap halt to see what there is to do, or name them: --column id=COLUMN --column xid=COLUMN",
        )));
    };
    if around.on_gap.is_none() && intent.made.is_none() {
        not_too_many(source, link, &columns).await?;
    }
    let made = match &intent.made {
        Some(made) => made.clone(),
        None => heal::make_slot(&mut slot, &link.client, source, link.table_oid, link.version_num)
            .await
            .map_err(|error| match error.sqlstate() {
                "55P03" => OpenError::Later(format!(
                    "slot {} cannot be made while transactions that began before are open (see pg_stat_activity and pg_prepared_xacts): {error}",
                    source.slot
                )),
                _ => OpenError::Later(error.to_string()),
            })?,
    };
    let generation = made.generation - 1;
    link.generation.store(generation, Ordering::Relaxed);
    link.heals.store(true, Ordering::Relaxed);
    let opened = Opened {
        system_identifier: identity.system_identifier,
        timeline: identity.timeline,
        xlogpos: identity.xlogpos,
        confirmed_flush: Lsn(intent.rows + 1),
        unfit: None,
        heals: Some(generation),
    };
    let plan = heal::Plan {
        table: source.table.clone(),
        table_oid: link.table_oid,
        columns,
        intent,
        made,
    };
    let healing = Healing::start(slot, Arc::clone(&link.client), plan);
    Ok((Session::Heal(Box::new(healing)), opened))
}

/// Of so many rows the topics' ends tell which were published; of more, nobody has asked that they be
/// published again.
async fn not_too_many(
    source: &Source,
    link: &Link,
    columns: &heal::Columns,
) -> Result<(), OpenError> {
    let later = |error: DbError| OpenError::Later(error.to_string());
    let missing = heal::missing(&link.client, &source.table, columns, link.table_oid)
        .await
        .map_err(later)?;
    if missing.rows <= UNASKED_ROWS_MAX {
        return Ok(());
    }
    heal::call_off(&link.client, link.table_oid)
        .await
        .map_err(later)?;
    link.heals.store(false, Ordering::Relaxed);
    Err(OpenError::Never(Failure::halted(
        format!(
            "there is a gap, and {missing}: more than {UNASKED_ROWS_MAX}, of which the topics' ends would show what was published before"
        ),
        "run with --on-gap heal: all of these rows are published from the table, those that were published long ago once more (consumers drop them by event_id); or with --on-gap skip: a new slot is made, and they are given up",
    )))
}

pub async fn begin_heal(link: Arc<Link>, gap: Gap, policy: OnGap) -> Done {
    if let Err(error) = heal::begin(&link.client, link.table_oid, &gap.to_string(), policy).await {
        // The next attempt to open the stream meets the gap again.
        tracing::warn!(%error, "the registry could not be written");
    }
    Done::Nothing
}

/// The slot's confirmed_flush_lsn, read while nobody holds it: a walsender that is still there
/// could move it between this look and START.
async fn free_slot(around: &Surroundings, link: &Link) -> Result<Lsn, OpenError> {
    let name = &around.source.slot;
    let later = |error: DbError| OpenError::Later(error.to_string());
    let until = Instant::now() + SLOT_FREE_WITHIN;
    let state = loop {
        let state = registry::slot_state(&link.client, name)
            .await
            .map_err(later)?;
        match state {
            None => return Err(gap(around, link, Cause::SlotGone).await),
            Some(state) if state.active_pid.is_none() => break state,
            Some(_) if Instant::now() < until => tokio::time::sleep(SLOT_FREE_LOOK).await,
            Some(_) => return Err(held(around, link).await.map_err(later)?),
        }
    };
    match state.confirmed_flush {
        Some(confirmed) if state.wal_status.as_deref() != Some("lost") => Ok(confirmed),
        Some(_) | None => {
            let status = state.wal_status.as_deref().unwrap_or("unknown");
            let why = format!("wal_status {status}");
            Err(gap(around, link, Cause::SlotLost(why)).await)
        }
    }
}

/// Somebody reads the slot although the lock is ours. A relay that led before us has to let go when
/// it cannot prove its lead: one of ours that has not after the longest that this may take is
/// nobody's any more, and is ended.
async fn held(around: &Surroundings, link: &Link) -> Result<OpenError, DbError> {
    let name = &around.source.slot;
    let Some(holder) = registry::holder(&link.client, name).await? else {
        return Ok(OpenError::Later(format!("slot {name} has just come free")));
    };
    let since = holder.state_age.map_or(String::new(), |age| {
        format!(", for {}", preflight::span(age))
    });
    let database = &around.source.database;
    let is_ours = holder.user.as_deref() == Some(&database.user)
        && holder.application_name.as_deref() == Some(&database.application_name);
    if is_ours && link.taken_at.elapsed() >= around.wal_sender_timeout {
        let pid = holder.pid;
        let ended = registry::terminate(&link.client, pid).await;
        tracing::warn!(
            pid,
            "slot {name} was still read by {holder}{since}, which has not led for {:?}: {}",
            around.wal_sender_timeout,
            match ended {
                Ok(_) => "ended it".to_owned(),
                Err(error) => format!("it cannot be ended: {error}"),
            }
        );
    }
    Ok(OpenError::Later(format!(
        "slot {name} is held by {holder}{since}"
    )))
}

pub async fn finish(slot: Box<Slot>) -> Done {
    let ending = slot.finish(FINISH_WITHIN).await;
    tracing::debug!(?ending, "the replication connection is closed");
    Done::Finished
}

// ---- statements on the lock's session ------------------------------------------------------

pub async fn probe(link: Arc<Link>, walsender: Option<i32>) -> Done {
    let probed = match link.prober.ask(&link.client).await {
        Ok(probe) => Probed {
            has_lock: probe.lock_held && probe.backend_pid == link.backend_pid,
            has_slot: walsender.is_none() || probe.slot_active_pid == walsender,
            touched: probe.touched,
        },
        Err(error) => {
            tracing::debug!(%error, "the leader's question was not answered");
            Probed {
                has_lock: false,
                has_slot: false,
                touched: 0,
            }
        }
    };
    Done::Probed { probed, walsender }
}

/// Over whichever session there is: a standby asks too.
pub async fn sample(around: Arc<Surroundings>, client: Arc<Client>) -> Done {
    let taken = sample::take(&client, &around.source, around.oid()).await;
    Done::Sampled(taken.map(Box::new))
}

pub async fn erase_stop(link: Arc<Link>) -> Done {
    written(
        registry::erase_stop(&link.client, link.table_oid).await,
        Done::StopErased,
    )
}

pub async fn clear_halted(link: Arc<Link>) -> Done {
    written(
        registry::clear_halted(&link.client, link.table_oid).await,
        Done::Cleared,
    )
}

pub async fn store(link: Arc<Link>, stop: Stop, halted: Option<Halted>) -> Done {
    let stop = registry::Stop {
        last: stop.last,
        reported: stop.reported,
        complete: stop.complete,
        open: stop.open.map(|open| registry::OpenStop {
            triple: open.triple,
            count: open.count,
            event_id: String::from_utf8_lossy(&open.last_event_id).into_owned(),
        }),
    };
    let mut stored = registry::store_stop(&link.client, link.table_oid, &stop).await;
    if let (Ok(()), Some(halted)) = (&stored, halted) {
        let halted = registry::Halted {
            event_id: halted.event_id,
            reason: halted.reason,
        };
        stored = registry::store_halted(&link.client, link.table_oid, &halted).await;
    }
    // Nothing is on its way: the next leader need not wait for this process to wind up.
    if stored.is_ok() && stop.complete {
        let _ = registry::unlock(&link.client, link.table_oid).await;
    }
    written(stored, Done::Stored)
}

fn written(result: Result<(), DbError>, done: Done) -> Done {
    match result {
        Ok(()) => done,
        Err(error) => {
            tracing::warn!(%error, "the registry could not be written");
            Done::NotWritten
        }
    }
}

// ---- Kafka as a whole ----------------------------------------------------------------------

/// The topics that can be known before there are events.
pub async fn reach(around: Arc<Surroundings>) -> Done {
    let topics = &around.topics;
    let create = around.create_topics;
    Done::Reached(kafka::reach(&around.kafka, topics, create, REACH_WITHIN).await)
}

// ---- topics --------------------------------------------------------------------------------

/// Asks for a topic and makes it where that was asked for.
pub async fn lookup(around: Arc<Surroundings>, name: String) -> Done {
    let mut state = kafka::lookup_topic(&around.kafka, &name).await;
    if let (TopicState::Absent, Some(how)) = (&state, around.create_topics) {
        match kafka::create_topic(&around.kafka, &name, how).await {
            Ok(()) => {
                tracing::info!(
                    topic = name,
                    partitions = how.partitions,
                    "created the topic"
                );
                state = kafka::lookup_topic(&around.kafka, &name).await;
            }
            Err(kafka::NotMade::NoRight) => state = TopicState::Denied(Right::Create),
            Err(error) => state = TopicState::Unknown(format!("it cannot be created: {error}")),
        }
    }
    Done::Topic { name, state }
}
