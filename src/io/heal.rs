//! Healing: a new slot, and the rows that no stream carries any more read from the table, in the
//! shape of a stream (see `wire::compose`).
//!
//! ```text
//!  begin ──▶ make_slot ──▶ wait until S1 is visible ──▶ pages ──▶ finish
//!  intent,    slot, S1       (a commit may wait for      id order,   the checkpoint is S1,
//!  S0         stored          a standby)                 progress    the intent goes
//! ```
//! Whatever is interrupted goes on at the next start: an intent without S1 drops the slot and makes
//! it anew, one with S1 reads on behind what is stored as delivered.
//!
//! # Invariants
//! A row is visible in S1, the snapshot that the slot leaves from, or it is in the slot's stream:
//! never both, never neither.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use postgres_protocol::message::backend::DataRowBody;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_postgres::Client;
use tokio_postgres::fallible_iterator::FallibleIterator;
use tokio_postgres::types::PgLsn;

use super::catalog::coverage_sql;
use super::new_slot::{self, LeftFrom, create_slot};
use super::registry::{NO_HALT, NO_STOP, get, lsn};
use super::side::db_error;
use super::slot::Slot;
use super::sql::{outside_of, quote_ident, quote_literal, quote_table};
use super::wall_clock;
use crate::config::{Source, TableName};
use crate::error::DbError;
use crate::gap::{Missing, OnGap};
use crate::lsn::{Lsn, PgTimestamp, Triple, Xid};
use crate::wire::compose::{self, ColumnType};

/// Rows that are read at a time, by one short statement.
const PAGE_ROWS: usize = 1_000;
/// A page ends behind the row that reaches this: rows are of any size.
const PAGE_BYTES: usize = 4 << 20;
/// Slot creation waits for the transactions that are open.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// How often it is looked whether what S1 has seen is visible to statements.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Rows that a gap is counted up to.
const COUNTED_MAX: i64 = 1_000_000;

/// What is visible in it is proved to be delivered; of `walrelay.relay r`.
const PROVED: &str = "coalesce((select c.snapshot from walrelay.checkpoint c \
    where c.table_oid = r.table_oid), r.lower_bound)";

/// The columns that healing needs by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    pub id: String,
    pub xid: String,
    /// Where there is one: the time that a record carries.
    pub created_at: Option<String>,
}

/// A heal as the registry has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intent {
    pub policy: OnGap,
    /// When it was committed to. A row that bears no time of its own has this one: a row that is read
    /// again must come with the same, or it would be taken for another.
    pub began: PgTimestamp,
    /// What is visible in it is delivered; `None`: nothing is known to be.
    pub s0: Option<String>,
    pub made: Option<Made>,
    /// Delivered so far, and the last one's `id`.
    pub rows: u64,
    pub last_id: Option<i64>,
}

/// The new slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    pub s1: String,
    pub consistent_point: Lsn,
    pub generation: i64,
}

/// The heal that stands in the registry, if one does.
///
/// # Errors
/// 42501 where the role may not read the registry; or the conversation's.
pub async fn intent(client: &Client, table_oid: u32) -> Result<Option<Intent>, DbError> {
    let row = client
        .query_opt(
            "select (extract(epoch from (r.heal->>'began')::timestamptz) * 1000000)::int8, \
             r.heal->>'policy', r.heal->>'s0', r.heal->>'s1', \
             (r.heal->>'consistent_point')::pg_lsn, coalesce((r.heal->>'rows')::int8, 0), \
             (r.heal->>'last_id')::int8, r.slot_generation \
             from walrelay.relay r where r.table_oid = $1 and r.heal is not null",
            &[&table_oid],
        )
        .await
        .map_err(|e| db_error(&e))?;
    let Some(row) = row else {
        return Ok(None);
    };
    let rows: i64 = get(&row, 5)?;
    let s1: Option<String> = get(&row, 3)?;
    let made = match (s1, lsn(&row, 4)?) {
        (Some(s1), Some(consistent_point)) => Some(Made {
            s1,
            consistent_point,
            generation: get(&row, 7)?,
        }),
        _ => None,
    };
    Ok(Some(Intent {
        began: PgTimestamp::from_unix_micros(get(&row, 0)?),
        policy: match get::<Option<String>>(&row, 1)?.as_deref() {
            Some("skip") => OnGap::Skip,
            _ => OnGap::Heal,
        },
        s0: get(&row, 2)?,
        made,
        rows: u64::try_from(rows).unwrap_or_default(),
        last_id: get(&row, 6)?,
    }))
}

/// Commits to a heal, unless one stands already. What is proved to be delivered is the last
/// checkpoint's snapshot; before there was one, what the first slot left behind.
///
/// # Errors
/// 42501 where the role may not write the registry; or the conversation's.
pub async fn begin(
    client: &Client,
    table_oid: u32,
    gap: &str,
    policy: OnGap,
) -> Result<(), DbError> {
    client
        .execute(
            &format!(
                "update walrelay.relay r set updated_at = now(), heal = jsonb_build_object( \
                   'gap', $2::text, 'policy', $3::text, 'began', clock_timestamp(), \
                   's0', {PROVED}::text) \
                 where r.table_oid = $1 and r.heal is null"
            ),
            &[&table_oid, &gap, &policy.as_str()],
        )
        .await
        .map(|_| ())
        .map_err(|e| db_error(&e))
}

/// Drops what is left of the old slot, makes the new one, and stores what it left from. The stored
/// stop and the halted event were the old slot's.
///
/// # Errors
/// 55P03: a transaction that was open before holds slot creation up; or the conversation's.
pub async fn make_slot(
    slot: &mut Slot,
    client: &Client,
    source: &Source,
    table_oid: u32,
    version_num: i32,
) -> Result<Made, DbError> {
    client
        .execute(
            "select pg_catalog.pg_drop_replication_slot(s.slot_name) \
             from pg_catalog.pg_replication_slots s where s.slot_name = $1::text",
            &[&source.slot],
        )
        .await
        .map_err(|e| db_error(&e))?;
    new_slot::begin(slot, LOCK_TIMEOUT).await?;
    let created = slot
        .simple_query(&create_slot(&source.slot, version_num))
        .await?;
    let point = new_slot::column(&created, 1, "consistent_point")?;
    let left_from = new_slot::left_from(slot, source).await?;
    slot.simple_query("COMMIT").await?;
    let identity = slot.identify_system().await?;
    let consistent_point = point
        .parse()
        .map_err(|_| DbError::Protocol(format!("{point} is no LSN")))?;
    store_made(client, table_oid, consistent_point, left_from, &identity).await
}

async fn store_made(
    client: &Client,
    table_oid: u32,
    consistent_point: Lsn,
    left_from: LeftFrom,
    identity: &super::slot::IdentifySystem,
) -> Result<Made, DbError> {
    // Two generations: the heal's events stand above all of the old slot and below the new one's.
    let row = client
        .query_one(
            &format!(
                "update walrelay.relay r set slot_generation = r.slot_generation + 2, \
                 system_identifier = $5, timeline = $6, \
                 consistent_point = $2, {NO_STOP}, {NO_HALT}, updated_at = now(), \
                 heal = r.heal || jsonb_build_object('s1', $3::text, \
                   'consistent_point', $2::pg_lsn::text, 'coverage', $4::text::jsonb) \
                 where r.table_oid = $1 and r.heal is not null returning r.slot_generation"
            ),
            &[
                &table_oid,
                &PgLsn::from(consistent_point.0),
                &left_from.snapshot,
                &left_from.coverage,
                &identity.system_identifier,
                &identity.timeline,
            ],
        )
        .await
        .map_err(|e| db_error(&e))?;
    Ok(Made {
        s1: left_from.snapshot,
        consistent_point,
        generation: get(&row, 0)?,
    })
}

/// A transaction that has its commit record and waits for a standby is in S1, and no statement sees
/// it yet.
async fn wait_until_visible(client: &Client, s1: &str) -> Result<(), DbError> {
    loop {
        let row = client
            .query_one(
                "select pg_snapshot_xmax(c.now) >= pg_snapshot_xmax(s.s1) and not exists ( \
                   select from pg_snapshot_xip(c.now) x where pg_visible_in_snapshot(x, s.s1)) \
                 from (select $1::text::pg_snapshot) s (s1), \
                   (select pg_current_snapshot()) c (now)",
                &[&s1],
            )
            .await
            .map_err(|e| db_error(&e))?;
        if get(&row, 0)? {
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Takes an intent back of which nothing was done yet.
///
/// # Errors
/// As [`begin`].
pub async fn call_off(client: &Client, table_oid: u32) -> Result<(), DbError> {
    client
        .execute(
            "update walrelay.relay set heal = null, updated_at = now() \
             where table_oid = $1 and heal->>'s1' is null",
            &[&table_oid],
        )
        .await
        .map(|_| ())
        .map_err(|e| db_error(&e))
}

/// What lies outside of `s0`, counted.
///
/// # Errors
/// 42501 where the role may not read the table; or the conversation's.
pub async fn missing(
    client: &Client,
    table: &TableName,
    columns: &Columns,
    table_oid: u32,
) -> Result<Missing, DbError> {
    let created = columns.created_at.as_ref().map_or_else(
        || "null::text".to_owned(),
        |name| format!("o.{}::text", quote_ident(name)),
    );
    let (id, xid) = (quote_ident(&columns.id), quote_ident(&columns.xid));
    let sql = format!(
        "with known as (select {PROVED} as s0 from walrelay.relay r where r.table_oid = $1), \
         gap as (select o.{id} as id, {created} as at from {} o, known \
           where known.s0 is null or ({}) limit {COUNTED_MAX}) \
         select count(*), min(id)::int8, max(id)::int8, min(at), max(at) from gap",
        quote_table(table),
        outside_of(&format!("o.{xid}"), "known.s0")
    );
    let row = client
        .query_one(&sql, &[&table_oid])
        .await
        .map_err(|e| db_error(&e))?;
    let ids: (Option<i64>, Option<i64>) = (get(&row, 1)?, get(&row, 2)?);
    let times: (Option<String>, Option<String>) = (get(&row, 3)?, get(&row, 4)?);
    Ok(Missing {
        rows: get(&row, 0)?,
        ids: ids.0.zip(ids.1),
        times: times.0.zip(times.1),
    })
}

/// The heal is over: what S1 saw is delivered.
async fn finish(client: &Client, table_oid: u32) -> Result<(), DbError> {
    client
        .execute(
            &format!(
                "with healed as (select r.table_oid, r.slot_generation, r.heal, r.consistent_point \
                   from walrelay.relay r where r.table_oid = $1 and r.heal is not null for update), \
                 proved as (insert into walrelay.checkpoint as c (table_oid, slot_generation, \
                   snapshot, coverage, fence_event_id, commit_lsn, fenced_at) \
                   select h.table_oid, h.slot_generation, (h.heal->>'s1')::pg_snapshot, \
                     h.heal->'coverage', gen_random_uuid(), h.consistent_point, \
                     (h.heal->>'began')::timestamptz from healed h \
                   on conflict (table_oid) do update set slot_generation = excluded.slot_generation, \
                     snapshot = excluded.snapshot, coverage = excluded.coverage, \
                     fence_event_id = excluded.fence_event_id, commit_lsn = excluded.commit_lsn, \
                     fenced_at = excluded.fenced_at, stored_at = now()), \
                 gone as (delete from walrelay.fence f using healed h where f.table_oid = h.table_oid) \
                 update walrelay.relay r set heal = null, coverage = h.heal->'coverage', \
                   {NO_STOP}, updated_at = now() \
                 from healed h where r.table_oid = h.table_oid"
            ),
            &[&table_oid],
        )
        .await
        .map(|_| ())
        .map_err(|e| db_error(&e))
}

async fn store_progress(
    client: &Client,
    table_oid: u32,
    rows: u64,
    last_id: i64,
) -> Result<(), DbError> {
    let rows = i64::try_from(rows).unwrap_or(i64::MAX);
    client
        .execute(
            "update walrelay.relay set heal = heal || jsonb_build_object('rows', $2::int8, \
             'last_id', $3::int8) where table_oid = $1 and heal is not null",
            &[&table_oid, &rows, &last_id],
        )
        .await
        .map(|_| ())
        .map_err(|e| db_error(&e))
}

/// CopyData bodies, and behind which row they end.
#[derive(Debug, Default)]
struct Page {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Page {
    fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.bytes);
        self.ends.push(self.bytes.len());
    }
}

enum Item {
    Page(Page),
    Healed(u64),
    Failed(DbError),
}

/// What the next turn brought.
#[derive(Debug)]
pub enum Turn {
    Read,
    /// All of it is delivered, so many rows in all.
    Healed(u64),
}

/// The rows of a gap, as a stream. A transaction a row: its commit LSN is its number in the heal,
/// its commit time is when the row was written.
pub struct Healing {
    items: mpsc::Receiver<Item>,
    page: Page,
    next: usize,
    flushed: watch::Sender<u64>,
    task: JoinHandle<()>,
    made: Made,
}

impl Drop for Healing {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What a heal reads, and where from.
pub struct Plan {
    pub table: TableName,
    pub table_oid: u32,
    pub columns: Columns,
    pub intent: Intent,
    pub made: Made,
}

impl Healing {
    /// `slot`: a session with the stream's own settings, so that values come as the stream gives
    /// them. `client`: the lock's session, which progress is stored on.
    #[must_use]
    pub fn start(slot: Slot, client: Arc<Client>, plan: Plan) -> Healing {
        let made = plan.made.clone();
        let (tell, items) = mpsc::channel(2);
        let (flushed, told) = watch::channel(0);
        let task = tokio::task::spawn_local(async move {
            let mut reader = Reader {
                slot,
                client,
                plan,
                marks: VecDeque::new(),
                told,
            };
            let last = match reader.run(&tell).await {
                Ok(rows) => Item::Healed(rows),
                Err(error) => Item::Failed(error),
            };
            // Nobody listens any more: the session was closed.
            let _ = tell.send(last).await;
        });
        Healing {
            items,
            page: Page::default(),
            next: 0,
            flushed,
            task,
            made,
        }
    }

    /// Generation and consistent point of the new slot.
    #[must_use]
    pub fn made(&self) -> (i64, Lsn) {
        (self.made.generation, self.made.consistent_point)
    }

    /// The next CopyData body that was read.
    pub fn next_body(&mut self) -> Option<&[u8]> {
        let end = *self.page.ends.get(self.next)?;
        let start = match self.next.checked_sub(1) {
            Some(before) => self.page.ends[before],
            None => 0,
        };
        self.next += 1;
        Some(&self.page.bytes[start..end])
    }

    #[must_use]
    pub fn has_more(&self) -> bool {
        self.next < self.page.ends.len()
    }

    /// Waits for more. Cancel-safe.
    ///
    /// # Errors
    /// The server's: nothing is lost, the heal goes on from what is stored.
    pub async fn turn(&mut self) -> Result<Turn, DbError> {
        match self.items.recv().await {
            Some(Item::Page(page)) => {
                self.page = page;
                self.next = 0;
                Ok(Turn::Read)
            }
            Some(Item::Healed(rows)) => Ok(Turn::Healed(rows)),
            Some(Item::Failed(error)) => Err(error),
            None => Err(DbError::Unreachable("the heal's task ended".to_owned())),
        }
    }

    /// Everything below is delivered.
    pub fn flushed(&self, flush: Lsn) {
        self.flushed.send_if_modified(|known| {
            let is_more = flush.0 > *known;
            *known = flush.0.max(*known);
            is_more
        });
    }
}

struct Reader {
    slot: Slot,
    client: Arc<Client>,
    plan: Plan,
    /// Number and id of the last row of each page that is not known to be delivered.
    marks: VecDeque<(u64, i64)>,
    told: watch::Receiver<u64>,
}

impl Reader {
    async fn run(&mut self, tell: &mpsc::Sender<Item>) -> Result<u64, DbError> {
        wait_until_visible(&self.client, &self.plan.made.s1).await?;
        let mut number = self.plan.intent.rows;
        let mut after = match self.plan.intent.last_id {
            Some(id) => Some(id),
            None => self.first_id().await?.map(|id| id.saturating_sub(1)),
        };
        let mut is_read = after.is_none() || self.plan.intent.policy == OnGap::Skip;
        let mut columns: Vec<ColumnType> = Vec::new();
        let mut rows_max = PAGE_ROWS;
        let mut is_told = false;
        loop {
            self.store().await?;
            if is_read && is_told && *self.told.borrow() > number {
                finish(&self.client, self.plan.table_oid).await?;
                return Ok(number);
            }
            tokio::select! {
                permit = tell.reserve(), if !is_told => {
                    let Ok(permit) = permit else {
                        return Ok(number);
                    };
                    let mut page = Page::default();
                    if is_read {
                        is_told = true;
                        page.push(|out| compose::keepalive(Lsn(number + 1), wall_clock(), out));
                    } else if let Some(from) = after {
                        let read = self.page(from, number, rows_max, &mut columns, &mut page).await?;
                        is_read = read.is_last;
                        rows_max = (read.rows * 2).clamp(1, PAGE_ROWS);
                        if let Some(last) = read.last_id {
                            number += u64::try_from(read.rows).unwrap_or_default();
                            after = Some(last);
                            self.marks.push_back((number, last));
                        }
                    }
                    permit.send(Item::Page(page));
                }
                changed = self.told.changed() => {
                    if changed.is_err() {
                        return Ok(number);
                    }
                }
            }
        }
    }

    /// Whole pages that are delivered.
    async fn store(&mut self) -> Result<(), DbError> {
        let flushed = *self.told.borrow_and_update();
        let mut done = None;
        while let Some((number, id)) = self.marks.front().copied()
            && flushed > number
        {
            self.marks.pop_front();
            done = Some((number, id));
        }
        if let Some((number, id)) = done {
            store_progress(&self.client, self.plan.table_oid, number, id).await?;
        }
        Ok(())
    }

    /// What the gap is, for `where`.
    fn condition(&self) -> String {
        let xid = format!("o.{}", quote_ident(&self.plan.columns.xid));
        let s1 = quote_literal(&self.plan.made.s1);
        let mut condition = format!("pg_catalog.pg_visible_in_snapshot({xid}, {s1}::pg_snapshot)");
        if let Some(s0) = &self.plan.intent.s0 {
            let s0 = format!("{}::pg_snapshot", quote_literal(s0));
            condition.push_str(" and ");
            condition.push_str(&outside_of(&xid, &s0));
        }
        condition
    }

    async fn first_id(&mut self) -> Result<Option<i64>, DbError> {
        let sql = format!(
            "select pg_catalog.min(o.{}) from {} o where {}",
            quote_ident(&self.plan.columns.id),
            quote_table(&self.plan.table),
            self.condition()
        );
        let rows = self.slot.simple_query(&sql).await?;
        let first = rows.first().and_then(|row| row.first()).cloned().flatten();
        first
            .map(|id| {
                id.parse()
                    .map_err(|_| DbError::Protocol(format!("{id} is no number")))
            })
            .transpose()
    }

    async fn page(
        &mut self,
        after: i64,
        number: u64,
        rows_max: usize,
        known: &mut Vec<ColumnType>,
        page: &mut Page,
    ) -> Result<PageRead, DbError> {
        let columns = &self.plan.columns;
        let created = columns.created_at.as_ref().map_or_else(
            || "null".to_owned(),
            |name| {
                format!(
                    "(extract(epoch from o.{}) * 1000000)::int8",
                    quote_ident(name)
                )
            },
        );
        let id = quote_ident(&columns.id);
        let sql = format!(
            "select o.{id}, o.{}::text, {created}, o.* from {} o \
             where o.{id} > {after} and {} order by o.{id} limit {rows_max}",
            quote_ident(&columns.xid),
            quote_table(&self.plan.table),
            self.condition()
        );
        let (oid, began, now) = (self.plan.table_oid, self.plan.intent.began, wall_clock());
        let mut read = PageRead::default();
        let mut malformed = None;
        let mut seen = 0;
        let mut take = |fields: &[ColumnType], row: &DataRowBody| {
            seen += 1;
            // What is too much for one page is read again with the next.
            if malformed.is_some() || page.bytes.len() >= PAGE_BYTES {
                return;
            }
            if fields.get(3..) != Some(&known[..]) {
                *known = fields.get(3..).unwrap_or_default().to_vec();
                page.push(|out| compose::relation(oid, known, now, out));
            }
            let number = number + u64::try_from(read.rows).unwrap_or_default() + 1;
            match write_row(row, oid, number, (began, now), page) {
                Ok(id) => {
                    read.rows += 1;
                    read.last_id = Some(id);
                }
                Err(error) => malformed = Some(error),
            }
        };
        self.slot.each_row(&sql, &mut take).await?;
        if let Some(error) = malformed {
            return Err(error);
        }
        read.is_last = seen < rows_max && seen == read.rows;
        Ok(read)
    }
}

#[derive(Debug, Default)]
struct PageRead {
    rows: usize,
    last_id: Option<i64>,
    /// There is none behind it.
    is_last: bool,
}

/// A row as a transaction of its own. Returns its id.
fn write_row(
    row: &DataRowBody,
    oid: u32,
    number: u64,
    (began, now): (PgTimestamp, PgTimestamp),
    page: &mut Page,
) -> Result<i64, DbError> {
    let buffer = row.buffer();
    let ranges: Vec<_> = row
        .ranges()
        .collect()
        .map_err(|e| DbError::Protocol(e.to_string()))?;
    let column = |at: usize| {
        let range = ranges.get(at).cloned().flatten();
        range.map(|range| &buffer[range])
    };
    let word = |at: usize| column(at).and_then(|bytes| std::str::from_utf8(bytes).ok());
    let no = |what: &str| DbError::Protocol(format!("a row of the table has no {what}"));
    let id: i64 = word(0)
        .and_then(|id| id.parse().ok())
        .ok_or_else(|| no("id"))?;
    let xid: u64 = word(1)
        .and_then(|xid| xid.parse().ok())
        .ok_or_else(|| no("xid"))?;
    let created = word(2).and_then(|micros| micros.parse().ok());
    let triple = Triple {
        commit_lsn: Lsn(number),
        // As the stream has it: the lower half.
        xid: Xid(u32::try_from(xid & u64::from(u32::MAX)).expect("masked")),
        commit_time: created.map_or(began, PgTimestamp::from_unix_micros),
    };
    page.push(|out| compose::begin(triple, now, out));
    let columns: Vec<Option<&[u8]>> = (3..ranges.len()).map(column).collect();
    page.push(|out| compose::insert(oid, columns.into_iter(), now, out));
    page.push(|out| compose::commit(triple, Lsn(number + 1), now, out));
    Ok(id)
}

/// Is what the publication covers another thing than it was at the last checkpoint, or when the slot
/// was made? The children of a partitioned table come and go.
///
/// # Errors
/// Only the conversation's.
pub async fn publication_differs(
    client: &Client,
    source: &Source,
    table_oid: u32,
) -> Result<bool, DbError> {
    let sql = format!(
        "select coalesce((select coalesce(c.coverage, r.coverage) - 'children' \
           is distinct from ({}) - 'children' \
         from walrelay.relay r left join walrelay.checkpoint c on c.table_oid = r.table_oid \
         where r.table_oid = $1 and coalesce(c.coverage, r.coverage) is not null), false)",
        coverage_sql("$2", "$3")
    );
    let table = quote_table(&source.table);
    let row = client
        .query_one(&sql, &[&table_oid, &table, &source.publication])
        .await
        .map_err(|e| db_error(&e))?;
    get(&row, 0)
}
