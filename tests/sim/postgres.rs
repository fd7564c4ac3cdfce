//! A fake Postgres: a log of transactions, one slot, walsenders, one lock, one registry row.
//!
//! The server skips a transaction if and only if its commit record starts below
//! confirmed_flush_lsn, which it keeps in memory: a restart takes it back to what was saved.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use walrelay::lsn::{Lsn, Triple};
use walrelay::relay::orders::{Halted, Stop};
use walrelay::wire::replication::StatusUpdate;

use crate::frames;
use crate::history::{Ctx, EventId, Fact, Key, Moment, ProcId, SessionId, triple};
use crate::letters::Letters;
use crate::world::Event;

pub type SideId = u32;

const WAL_SENDER_TIMEOUT: Duration = Duration::from_secs(15);
/// Frames on their way to a client that does not read.
const LINK_FRAMES_MAX: usize = 48;

#[derive(Clone, Debug)]
pub struct Row {
    pub event: EventId,
    pub key: Key,
    pub lsn: Lsn,
    pub payload: Option<usize>,
    pub bad: Option<Bad>,
}

/// Why a row can never be a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    NullKey,
    Headers,
}

#[derive(Clone, Debug)]
enum Body {
    Rows(Vec<Row>),
    /// A foreign table's row that the publication carries as well.
    Foreign,
    /// Begin, Truncate, Commit.
    Truncate,
}

#[derive(Clone, Debug)]
struct Txn {
    triple: Triple,
    end_lsn: Lsn,
    body: Body,
}

/// The row of `walrelay.relay`.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    pub leader: Option<ProcId>,
    pub lead_changes: i64,
    pub stop: Option<Stop>,
    pub halted: Option<Halted>,
    pub consistent_point: Lsn,
    pub letters: Letters,
}

/// All that a copy of the data directory holds.
#[derive(Clone, Debug)]
struct Data {
    wal: Vec<Txn>,
    insert_lsn: u64,
    next_xid: u32,
    saved_flush: Lsn,
    registry: Registry,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// A clean restart takes the slot back as a crash does.
    Fifteen,
    /// A clean restart loses nothing.
    Eighteen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Running {
    Up,
    /// A fast shutdown waits for its walsender.
    Stopping,
    Down,
}

#[derive(Clone, Debug)]
pub enum Frame {
    Copy(Vec<u8>),
    CommandComplete,
    Eof,
}

pub struct Side {
    pub proc: ProcId,
    last_activity: Moment,
    /// The network swallows what is said; nobody has noticed.
    pub is_hung: bool,
}

pub struct Walsender {
    pub proc: ProcId,
    /// Index into the log, and how many messages of that transaction were sent.
    cursor: (usize, usize),
    relations: [bool; 2],
    wal_end: Lsn,
    /// The last keepalive while it had nothing more to send.
    told: Lsn,
    /// What the client said last.
    client_write: Lsn,
    client_flush: Lsn,
    last_word: Moment,
    asked: bool,
    pub to_client: VecDeque<(Moment, Frame)>,
    arrives_at: Moment,
    /// The client closed its socket; the server has not noticed.
    pub client_gone: bool,
    /// CopyDone was read.
    is_tick_due: bool,
    is_over: bool,
}

pub struct Postgres {
    data: Data,
    copies: Vec<Data>,
    pub version: Version,
    pub running: Running,
    is_fast_stop: bool,
    pub started_at: Moment,
    confirmed: Lsn,
    pub timeline: i32,
    pub sessions: BTreeMap<SessionId, Walsender>,
    pub sides: BTreeMap<SideId, Side>,
    pub active: Option<SessionId>,
    pub lock: Option<SideId>,
    /// Keys of a type.
    pub ids: u64,
    /// Of 1,000 rows, so many name a topic that can be none.
    pub illegal: u64,
    /// A dead client's session ends within so many milliseconds.
    pub death_max: u64,
    /// Of 1,000 statements about dead letters, so many fail: the disk is full.
    pub write_fails: u64,
    /// The highest position that each process has reported in this life of the log.
    reported: BTreeMap<ProcId, Lsn>,
    next_id: u32,
    next_event: u64,
}

impl Postgres {
    pub fn new(version: Version, now: Moment) -> Self {
        let start = Lsn(0x100_0000);
        Postgres {
            data: Data {
                wal: Vec::new(),
                insert_lsn: start.0,
                next_xid: 700,
                saved_flush: start,
                registry: Registry {
                    consistent_point: start,
                    ..Registry::default()
                },
            },
            copies: Vec::new(),
            version,
            running: Running::Up,
            is_fast_stop: false,
            started_at: now.saturating_sub(Duration::from_secs(60)),
            confirmed: start,
            timeline: 1,
            sessions: BTreeMap::new(),
            sides: BTreeMap::new(),
            active: None,
            lock: None,
            ids: 6,
            illegal: 0,
            death_max: 60,
            write_fails: 0,
            reported: BTreeMap::new(),
            next_id: 100,
            next_event: 1,
        }
    }

    fn id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }

    pub fn registry(&mut self) -> &mut Registry {
        &mut self.data.registry
    }

    /// A statement of the relay's has committed: the log's end.
    pub fn commit_statement(&mut self) -> Lsn {
        self.data.insert_lsn += 0x60;
        self.wal_end()
    }

    pub fn wal_end(&self) -> Lsn {
        Lsn(self.data.insert_lsn)
    }

    pub fn confirmed(&self) -> Lsn {
        self.confirmed
    }

    // ---- writing ---------------------------------------------------------------------------

    /// Somebody commits. Returns the events.
    pub fn write(&mut self, rows_max: usize, ctx: &mut Ctx) -> Vec<(EventId, Key)> {
        if self.running != Running::Up {
            return Vec::new();
        }
        let is_pair = ctx.rng.permille(150);
        let mut written = Vec::new();
        if is_pair {
            // The second's rows stand before the first's commit record, so that nothing lies
            // between the two commit records.
            let first = self.body(rows_max, ctx);
            let second = self.body(rows_max, ctx);
            written.extend(self.commit(first, ctx));
            written.extend(self.commit(second, ctx));
            ctx.reach("neighbours share an LSN");
        } else {
            let body = self.body(rows_max, ctx);
            written.extend(self.commit(body, ctx));
        }
        self.wake(ctx);
        written
    }

    /// Somebody commits a row that can be no record, between others.
    pub fn write_bad_row(&mut self, ctx: &mut Ctx) {
        if self.running != Running::Up {
            return;
        }
        let mut body = self.body(5, ctx);
        if let Body::Rows(rows) = &mut body {
            let index = ctx.rng.count(0, rows.len());
            let bad = *ctx.rng.pick(&[Bad::NullKey, Bad::Headers, Bad::Headers]);
            rows[index].bad = Some(bad);
            let event = rows[index].event;
            let is_keyless = bad == Bad::NullKey;
            ctx.fact(Fact::BadRow { event, is_keyless });
        }
        self.commit(body, ctx);
        self.wake(ctx);
    }

    /// WAL that the publication does not carry.
    pub fn write_elsewhere(&mut self, ctx: &mut Ctx) {
        if self.running == Running::Up {
            self.data.insert_lsn += ctx.rng.range(40, 4_000) & !7;
            self.wake(ctx);
        }
    }

    fn body(&mut self, rows_max: usize, ctx: &mut Ctx) -> Body {
        match ctx.rng.range(0, 20) {
            0 => Body::Foreign,
            1 => Body::Truncate,
            _ => {
                let is_large = ctx.rng.permille(60);
                let count = ctx
                    .rng
                    .count(1, if is_large { rows_max * 4 } else { rows_max } + 1);
                // COPY: rows that share an LSN.
                let is_copy = ctx.rng.permille(200);
                let rows = (0..count).map(|_| {
                    if !is_copy {
                        self.data.insert_lsn += ctx.rng.range(64, 400) & !7;
                    }
                    self.next_event += 1;
                    let has_payload = !ctx.rng.permille(100);
                    let kind = if ctx.rng.permille(self.illegal) {
                        3
                    } else {
                        ctx.rng.range(0, 3)
                    };
                    let kind = u8::try_from(kind).expect("small");
                    let id = u8::try_from(ctx.rng.range(0, self.ids)).expect("small");
                    Row {
                        event: EventId(self.next_event),
                        key: Key(kind, id),
                        lsn: Lsn(self.data.insert_lsn),
                        payload: has_payload.then(|| ctx.rng.count(2, 300)),
                        bad: None,
                    }
                });
                Body::Rows(rows.collect())
            }
        }
    }

    fn commit(&mut self, body: Body, ctx: &mut Ctx) -> Vec<(EventId, Key)> {
        let commit_lsn = self.data.insert_lsn;
        self.data.insert_lsn += 0x30;
        self.data.next_xid += 1;
        let triple = triple(commit_lsn, self.data.next_xid, ctx.clock());
        let end_lsn = Lsn(self.data.insert_lsn);
        let mut events = Vec::new();
        if let Body::Rows(rows) = &body {
            events = rows.iter().map(|r| (r.event, r.key)).collect();
            ctx.fact(Fact::Committed {
                triple,
                end_lsn,
                rows: events.clone(),
            });
        }
        self.data.wal.push(Txn {
            triple,
            end_lsn,
            body,
        });
        events
    }

    // ---- sides: the lock's sessions ----------------------------------------------------------

    pub fn connect_side(&mut self, proc: ProcId, now: Moment) -> Option<SideId> {
        if self.running != Running::Up {
            return None;
        }
        let id = self.id();
        let side = Side {
            proc,
            last_activity: now,
            is_hung: false,
        };
        self.sides.insert(id, side);
        Some(id)
    }

    /// A statement on this session: does it get an answer? `None`: none ever.
    pub fn statement(&mut self, side: SideId, now: Moment) -> Option<bool> {
        match self.sides.get_mut(&side) {
            None => Some(false),
            Some(side) if side.is_hung => None,
            Some(side) => {
                side.last_activity = now;
                Some(true)
            }
        }
    }

    pub fn drop_side(&mut self, side: SideId) -> Option<Side> {
        if self.lock == Some(side) {
            self.lock = None;
        }
        self.sides.remove(&side)
    }

    /// The lock's holder, if its session has been idle for too long.
    pub fn idle_lock_holder(&self, now: Moment) -> Option<SideId> {
        let holder = self.lock?;
        let idle_since = self.sides.get(&holder)?.last_activity;
        (now.saturating_sub(idle_since) > WAL_SENDER_TIMEOUT).then_some(holder)
    }

    // ---- the stream --------------------------------------------------------------------------

    /// START_REPLICATION at 0/0 on a free slot.
    pub fn start(&mut self, proc: ProcId, ctx: &mut Ctx) -> Option<SessionId> {
        if self.running != Running::Up || self.active.is_some() {
            return None;
        }
        let id = self.id();
        let confirmed = self.confirmed;
        let cursor = self
            .data
            .wal
            .partition_point(|t| t.triple.commit_lsn < confirmed);
        let walsender = Walsender {
            proc,
            cursor: (cursor, 0),
            relations: [false; 2],
            wal_end: confirmed,
            told: Lsn::INVALID,
            client_write: Lsn::INVALID,
            client_flush: Lsn::INVALID,
            last_word: ctx.now,
            asked: false,
            to_client: VecDeque::new(),
            arrives_at: ctx.now,
            client_gone: false,
            is_tick_due: true,
            is_over: false,
        };
        self.sessions.insert(id, walsender);
        self.active = Some(id);
        ctx.fact(Fact::SessionOpened {
            session: id,
            proc,
            confirmed,
        });
        ctx.after(ctx.rng.clone().millis(0, 3), Event::Walsender(id));
        ctx.after(Duration::from_millis(500), Event::SessionCheck(id));
        Some(id)
    }

    /// There may be more to send.
    fn wake(&mut self, ctx: &mut Ctx) {
        if let Some(id) = self.active
            && let Some(session) = self.sessions.get_mut(&id)
            && !session.is_tick_due
        {
            session.is_tick_due = true;
            let pause = ctx.rng.micros(50, 2_000);
            ctx.after(pause, Event::Walsender(id));
        }
    }

    /// The client has read: the walsender may go on.
    pub fn link_was_read(&mut self, ctx: &mut Ctx) {
        self.wake(ctx);
    }

    fn say(&mut self, id: SessionId, frame: Frame, ctx: &mut Ctx) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let latency = ctx.rng.micros(20, 400);
        session.arrives_at = session.arrives_at.max(ctx.now + latency);
        let at = session.arrives_at;
        session.to_client.push_back((at, frame));
        let proc = session.proc;
        ctx.at(at, Event::Wake(proc));
    }

    fn keepalive(&mut self, id: SessionId, wal_end: Lsn, reply: bool, ctx: &mut Ctx) {
        let frame = Frame::Copy(frames::keepalive(wal_end, ctx.clock(), reply));
        ctx.fact(Fact::Sent {
            session: id,
            lsn: wal_end,
        });
        self.say(id, frame, ctx);
    }

    /// The walsender goes on for a moment.
    pub fn walsender(&mut self, id: SessionId, ctx: &mut Ctx) {
        let budget = ctx.rng.count(1, 24);
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.is_tick_due = false;
        if session.is_over {
            return;
        }
        for _ in 0..budget {
            let session = &self.sessions[&id];
            if session.to_client.len() >= LINK_FRAMES_MAX {
                return;
            }
            if session.cursor.0 >= self.data.wal.len() {
                self.caught_up(id, ctx);
                return;
            }
            self.send_one(id, ctx);
        }
        self.wake(ctx);
    }

    fn send_one(&mut self, id: SessionId, ctx: &mut Ctx) {
        let session = self.sessions.get_mut(&id).expect("checked by walsender()");
        let (index, step) = session.cursor;
        let txn = &self.data.wal[index];
        let clock = ctx.clock();
        if step == 0 {
            let low = session.wal_end.0;
            let high = txn.triple.commit_lsn.0;
            if high > low && ctx.rng.permille(60) {
                // Decoding what is not ours takes time.
                let wal_end = Lsn(ctx.rng.range(low, high + 1));
                session.wal_end = wal_end;
                self.keepalive(id, wal_end, ctx.rng.clone().permille(300), ctx);
                return;
            }
            session.wal_end = session.wal_end.max(txn.triple.commit_lsn);
            session.cursor.1 = 1;
            let body = frames::begin(&txn.triple);
            let start = match &txn.body {
                Body::Rows(rows) => rows[0].lsn,
                Body::Foreign | Body::Truncate => txn.triple.commit_lsn,
            };
            self.say(id, Frame::Copy(frames::xlog_data(start, clock, &body)), ctx);
            return;
        }
        if ctx.rng.permille(15) {
            let wal_end = txn.triple.commit_lsn;
            ctx.reach("keepalive inside a transaction");
            self.keepalive(id, wal_end, ctx.rng.clone().permille(300), ctx);
            return;
        }
        let (lsn, body) = match &txn.body {
            Body::Rows(rows) if !session.relations[0] => {
                session.relations[0] = true;
                (rows[0].lsn, frames::relation(&frames::OUTBOX))
            }
            Body::Foreign if !session.relations[1] => {
                session.relations[1] = true;
                (txn.triple.commit_lsn, frames::relation(&frames::FOREIGN))
            }
            Body::Rows(rows) if step <= rows.len() => {
                session.cursor.1 += 1;
                (rows[step - 1].lsn, insert(&rows[step - 1]))
            }
            Body::Foreign if step == 1 => {
                session.cursor.1 += 1;
                let id: &[u8] = b"7";
                let body = frames::insert(frames::FOREIGN.oid, &[Some(id)]);
                (txn.triple.commit_lsn, body)
            }
            Body::Truncate if step == 1 => {
                session.cursor.1 += 1;
                (txn.triple.commit_lsn, frames::truncate(frames::OUTBOX.oid))
            }
            Body::Rows(_) | Body::Foreign | Body::Truncate => {
                session.cursor = (index + 1, 0);
                let reported = self.reported.get(&session.proc).copied();
                if reported.is_some_and(|reported| txn.end_lsn < reported) {
                    ctx.reach("re-sent from below W");
                }
                session.wal_end = txn.end_lsn;
                let fact = Fact::Sent {
                    session: id,
                    lsn: txn.end_lsn,
                };
                ctx.fact(fact);
                (
                    txn.triple.commit_lsn,
                    frames::commit(&txn.triple, txn.end_lsn),
                )
            }
        };
        self.say(id, Frame::Copy(frames::xlog_data(lsn, clock, &body)), ctx);
    }

    fn caught_up(&mut self, id: SessionId, ctx: &mut Ctx) {
        let wal_end = self.wal_end();
        let is_stopping = self.running == Running::Stopping;
        let session = self.sessions.get_mut(&id).expect("checked by walsender()");
        session.wal_end = session.wal_end.max(wal_end);
        let wal_end = session.wal_end;
        // It says so once: a client that has received that far is not told again.
        let is_told = session.client_write >= wal_end || session.told >= wal_end;
        session.told = wal_end;
        if is_stopping && session.client_flush >= wal_end {
            session.is_over = true;
            self.say(id, Frame::CommandComplete, ctx);
            self.say(id, Frame::Eof, ctx);
            self.ended(id, ctx);
        } else if is_stopping {
            self.keepalive(id, wal_end, true, ctx);
            // A burst, for as long as the client answers.
            let session = self.sessions.get_mut(&id).expect("just spoken to");
            session.is_tick_due = true;
            let pause = ctx.rng.millis(1, 40);
            ctx.after(pause, Event::Walsender(id));
        } else if !is_told {
            self.keepalive(id, wal_end, false, ctx);
        }
    }

    /// Every half second: has the client said anything?
    pub fn session_check(&mut self, id: SessionId, ctx: &mut Ctx) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        if session.is_over {
            return;
        }
        let silent = ctx.now.saturating_sub(session.last_word);
        if silent >= WAL_SENDER_TIMEOUT {
            session.is_over = true;
            let proc = session.proc;
            ctx.reach("wal_sender_timeout");
            ctx.fact(Fact::TimedOut { proc });
            self.say(id, Frame::Eof, ctx);
            self.ended(id, ctx);
            return;
        }
        if silent >= WAL_SENDER_TIMEOUT / 2 && !session.asked {
            session.asked = true;
            let wal_end = session.wal_end;
            self.keepalive(id, wal_end, true, ctx);
        }
        ctx.after(Duration::from_millis(500), Event::SessionCheck(id));
    }

    pub fn status(&mut self, id: SessionId, status: &StatusUpdate, ctx: &mut Ctx) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        if session.is_over {
            return;
        }
        session.last_word = ctx.now;
        session.asked = false;
        session.client_write = status.write;
        session.client_flush = status.flush;
        if status.flush > self.confirmed {
            self.confirmed = status.flush;
        }
        let reported = self.reported.entry(session.proc).or_default();
        *reported = status.flush.max(*reported);
        ctx.fact(Fact::Status {
            session: id,
            flush: status.flush,
            write: status.write,
        });
        self.wake(ctx);
    }

    /// The server is done with this session: the slot is free.
    pub fn ended(&mut self, id: SessionId, ctx: &mut Ctx) {
        if self.active == Some(id) {
            self.active = None;
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            session.is_over = true;
            if session.client_gone {
                self.sessions.remove(&id);
            }
        }
        if self.running == Running::Stopping && self.active.is_none() {
            self.down(ctx);
        }
    }

    pub fn is_over(&self, id: SessionId) -> bool {
        self.sessions.get(&id).is_none_or(|s| s.is_over)
    }

    /// The connection breaks now; both ends will know, each in its time.
    pub fn cut(&mut self, id: SessionId, ctx: &mut Ctx) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        let is_inside = session.cursor.1 > 0;
        if is_inside {
            ctx.reach("cut inside a transaction");
        }
        // What is on its way may arrive or not.
        let keep = ctx.rng.count(0, session.to_client.len() + 1);
        session.to_client.truncate(keep);
        session.is_over = true;
        self.say(id, Frame::Eof, ctx);
        let pause = if ctx.rng.permille(900) {
            ctx.rng.millis(0, 200)
        } else {
            ctx.rng.millis(200, 15_000)
        };
        ctx.after(pause, Event::SessionGone(id));
    }

    // ---- stops, starts, copies ----------------------------------------------------------------

    /// The checkpointer saves the slot where something has made it dirty.
    pub fn save_slot(&mut self) {
        if self.running == Running::Up {
            self.data.saved_flush = self.confirmed;
        }
    }

    /// Somebody copies the data directory.
    pub fn copy(&mut self) {
        self.copies.push(self.data.clone());
    }

    pub fn has_copy(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Returns the side sessions that end at once, to be told with this SQLSTATE.
    pub fn stop_fast(&mut self, ctx: &mut Ctx) -> Vec<(SideId, Side)> {
        self.running = Running::Stopping;
        self.is_fast_stop = true;
        ctx.fact(Fact::Stopping { fast: true });
        self.lock = None;
        let sides = std::mem::take(&mut self.sides).into_iter().collect();
        if self.active.is_none() {
            self.down(ctx);
        } else {
            self.wake(ctx);
        }
        sides
    }

    pub fn stop_immediate(&mut self, ctx: &mut Ctx) -> Vec<(SideId, Side)> {
        self.is_fast_stop = false;
        ctx.fact(Fact::Stopping { fast: false });
        self.lock = None;
        let ids: Vec<SessionId> = self.sessions.keys().copied().collect();
        for id in ids {
            if !self.sessions[&id].is_over {
                self.cut(id, ctx);
            }
            self.ended(id, ctx);
        }
        let sides = std::mem::take(&mut self.sides).into_iter().collect();
        if self.running != Running::Down {
            self.down(ctx);
        }
        sides
    }

    fn down(&mut self, ctx: &mut Ctx) {
        self.running = Running::Down;
        ctx.fact(Fact::Down);
        let pause = if ctx.rng.permille(700) {
            ctx.rng.millis(200, 2_000)
        } else {
            ctx.rng.millis(2_000, 20_000)
        };
        ctx.after(pause, Event::ServerUp);
    }

    pub fn up(&mut self, restore: bool, ctx: &mut Ctx) {
        self.running = Running::Up;
        self.started_at = ctx.now;
        if restore && !self.copies.is_empty() {
            let index = ctx.rng.count(0, self.copies.len());
            self.copies.truncate(index + 1);
            self.data = self.copies[index].clone();
            self.confirmed = self.data.saved_flush;
            self.reported.clear();
            let is_outbox = |t: &&Txn| matches!(t.body, Body::Rows(_));
            let kept = self.data.wal.iter().filter(is_outbox).count();
            let parked = self.data.registry.letters.events();
            ctx.fact(Fact::Restored { kept, parked });
            if ctx.rng.permille(200) {
                self.timeline += 1;
            }
            // The new life of the same log diverges at once, or only later.
            if ctx.rng.permille(300) {
                self.data.insert_lsn += 0x40;
            }
        } else {
            if self.is_fast_stop && self.version == Version::Eighteen {
                self.data.saved_flush = self.confirmed;
            }
            if self.confirmed > self.data.saved_flush {
                ctx.reach("the slot went backwards");
            }
            self.confirmed = self.data.saved_flush;
            self.data.insert_lsn += 0x70;
        }
        ctx.fact(Fact::Up);
        let to = self.confirmed;
        ctx.fact(Fact::SlotBack { to });
    }
}

fn insert(row: &Row) -> Vec<u8> {
    let event = row.event.to_string();
    let id = row.event.0.to_string();
    let key = format!("k{}", row.key.1);
    let payload = row.payload.map(|size| vec![b'x'; size]);
    let columns: [Option<&[u8]>; 7] = [
        Some(id.as_bytes()),
        Some(event.as_bytes()),
        Some(row.key.kind().as_bytes()),
        Some(key.as_bytes()).filter(|_| row.bad != Some(Bad::NullKey)),
        Some(b"happened"),
        payload.as_deref(),
        Some(if row.bad == Some(Bad::Headers) {
            b"[]"
        } else {
            b"{}"
        }),
    ];
    frames::insert(frames::OUTBOX.oid, &columns)
}
