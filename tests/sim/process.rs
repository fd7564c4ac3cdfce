//! One relay process: the loop of `service.rs` and its jobs, on the invented world.

mod apart;
mod jobs;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use walrelay::error::{Exit, Failure};
use walrelay::lsn::PgTimestamp;
use walrelay::record::{Report, TopicState};
use walrelay::relay::machine::Machine;
use walrelay::relay::orders::{
    Close, Halted, Notice, OpenError, Opened, Order, Probed, Purge, Seek, Settings, Statement,
    Stop, StreamEnd,
};
use walrelay::tail::TailAnswer;

use crate::broker::{Broker, ClientId, Kind, Publisher, Sending};
use crate::history::{Ctx, Moment, ProcId, SessionId};
use crate::postgres::{Frame, Postgres, SideId};
use crate::world::Event;
pub use apart::RETRY_ROWS;
use apart::Told;

pub type JobId = u32;

/// Both ends of the relay's world.
pub struct Env {
    pub pg: Postgres,
    pub broker: Broker,
    pub ctx: Ctx,
}

/// What takes time, one step of it.
#[derive(Clone, Debug)]
pub enum Step {
    SeekConnect,
    Seek {
        side: SideId,
    },
    OpenIdentify {
        link: SideId,
    },
    OpenLook {
        link: SideId,
        opened: Opened,
    },
    OpenStart {
        opened: Opened,
    },
    Finish {
        session: SessionId,
        tries: u32,
    },
    Probe {
        link: SideId,
        walsender: Option<SessionId>,
    },
    Lookup {
        name: String,
    },
    EraseStop {
        link: SideId,
    },
    Store {
        link: SideId,
        stop: Stop,
        halted: Option<Halted>,
    },
    ClearHalted {
        link: SideId,
    },
    Letters {
        link: SideId,
        op: Statement,
    },
    /// `op`: what is told to have failed when the answer does not arrive.
    LettersTold {
        link: SideId,
        op: Option<Statement>,
        told: Told,
    },
    AskTail {
        topic: String,
        since: PgTimestamp,
    },
    ReadTail {
        topic: String,
        since: PgTimestamp,
    },
}

/// Where a process is to be killed: in front of something or right behind it.
#[derive(Clone, Copy, Debug)]
pub enum Doom {
    /// When it has obeyed so many orders more.
    Orders(u32),
    At {
        name: &'static str,
        is_after: bool,
    },
}

/// Boundaries at which a kill is aimed: orders, and commits.
pub const BOUNDARIES: [&str; 20] = [
    "SeekLead",
    "Open",
    "Close",
    "Status",
    "Send",
    "Rebuild",
    "Try",
    "RebuildTrial",
    "Park",
    "LookAtParked",
    "LoadRetry",
    "Settle",
    "Trip",
    "Untrip",
    "ReadTail",
    "EraseStop",
    "Store",
    "ClearHalted",
    "park commits",
    "settle commits",
];

#[derive(Debug)]
pub enum Done {
    Sought {
        side: Option<SideId>,
        has_link: bool,
        seek: Seek,
    },
    Opened(Result<(SessionId, Opened), OpenError>),
    Finished,
    Probed {
        probed: Probed,
        walsender: Option<SessionId>,
    },
    Topic {
        name: String,
        state: TopicState,
    },
    StopErased,
    Stored,
    Cleared,
    NotWritten,
    Letters(Told),
    Tail {
        topic: String,
        answer: TailAnswer,
    },
}

const ROW_BYTES_MAX: usize = 1_200;
const GENERATION: i64 = 1;

pub struct Process {
    /// Events in flight, bytes, span.
    limits: (usize, usize, usize),
    pub id: ProcId,
    pub instance: usize,
    machine: Machine,
    publisher: Publisher,
    /// Of what is sent apart.
    apart: Publisher,
    partitions: BTreeMap<String, i32>,
    /// The statement that was just obeyed by the server.
    said: Option<Statement>,
    pub doom: Option<Doom>,
    /// It has met its doom.
    pub is_dead: bool,
    side: Option<SideId>,
    link: Option<SideId>,
    slot: Option<SessionId>,
    buffer: VecDeque<Frame>,
    opening: Option<JobId>,
    cancelled: BTreeSet<JobId>,
    next_job: JobId,
    inbox: VecDeque<Done>,
    side_ended: Option<&'static str>,
    is_broken: bool,
    pub signals: u32,
    reports: Vec<Report>,
    batch_bytes: usize,
    is_batch_shrunk: bool,
    turn_at: Option<Moment>,
    write_at: Moment,
    pub is_paused: bool,
    /// Another history was met with events of the old one on their way.
    must_purge: bool,
    /// What happened to its tasks while it did not run.
    pub frozen: Vec<Event>,
    pub exit: Option<Result<(), Failure>>,
}

impl Process {
    pub fn start(id: ProcId, instance: usize, settings: Settings, env: &mut Env) -> Self {
        let now = env.ctx.now;
        let limits = (
            settings.in_flight_events_max,
            settings.in_flight_bytes_max,
            settings.span_events_max,
        );
        let mut process = Process {
            limits,
            id,
            instance,
            machine: Machine::new(settings, now),
            publisher: Publisher::new(id, Kind::Gapless, &mut env.broker),
            apart: Publisher::new(id, Kind::Apart, &mut env.broker),
            partitions: BTreeMap::new(),
            said: None,
            doom: None,
            is_dead: false,
            side: None,
            link: None,
            slot: None,
            buffer: VecDeque::new(),
            opening: None,
            cancelled: BTreeSet::new(),
            next_job: 0,
            inbox: VecDeque::new(),
            side_ended: None,
            is_broken: false,
            signals: 0,
            reports: Vec::new(),
            batch_bytes: 1_000_000,
            is_batch_shrunk: false,
            turn_at: None,
            write_at: now,
            must_purge: false,
            is_paused: false,
            frozen: Vec::new(),
            exit: None,
        };
        process.machine.advance(now);
        process.turn_soon(Duration::ZERO, env);
        process
    }

    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    pub fn clients(&self) -> [ClientId; 2] {
        [self.publisher.client, self.apart.client]
    }

    pub fn turn_soon(&mut self, pause: Duration, env: &mut Env) {
        let at = env.ctx.now + pause;
        if self.turn_at.is_none_or(|known| at < known) {
            self.turn_at = Some(at);
            env.ctx.at(at, Event::Turn(self.id));
        }
    }

    /// One turn of the loop: what was waited for, then everything that follows from it.
    pub fn turn(&mut self, env: &mut Env) {
        let now = env.ctx.now;
        if self.turn_at != Some(now) || self.is_paused || self.is_dead {
            return;
        }
        self.turn_at = None;
        self.handle_next(env);
        self.machine.turned(now);
        self.take_reports(env);
        self.read_buffered(env);
        self.machine.advance(now);
        self.obey(env);
        let _ = self.machine.take_deliveries();
        self.check_bounds(now);
        if self.exit.is_some() || self.is_dead {
            return;
        }
        let has_more = self.machine.wants_wal() && !self.buffer.is_empty();
        if has_more || self.is_ready(env) {
            let pause = env.ctx.rng.micros(5, 80);
            self.turn_soon(pause, env);
        } else {
            let at = self
                .machine
                .next_timeout(now)
                .max(now + Duration::from_micros(50));
            self.turn_soon(at - now, env);
        }
    }

    /// Memory is bounded, whatever happens: one row more than the limits at most.
    fn check_bounds(&self, now: Moment) {
        let standing = self.machine.standing(now);
        let load = standing.load;
        assert!(load.in_flight_events <= self.limits.0, "{standing:?}");
        let bytes = load.in_flight_bytes + load.held_bytes;
        assert!(bytes <= self.limits.1 + ROW_BYTES_MAX, "{standing:?}");
        assert!(standing.span <= self.limits.2, "{standing:?}");
        assert!(standing.span >= load.in_flight_events + load.held_events);
    }

    fn has_arrived(&self, env: &Env) -> bool {
        let session = self.slot.and_then(|id| env.pg.sessions.get(&id));
        let first = session.and_then(|s| s.to_client.front());
        first.is_some_and(|(at, _)| *at <= env.ctx.now)
    }

    fn is_ready(&self, env: &Env) -> bool {
        self.signals > 0
            || !self.inbox.is_empty()
            || self.side_ended.is_some()
            || self.is_broken
            || self.machine.wants_wal() && self.has_arrived(env)
    }

    /// The select of the loop, in its order.
    fn handle_next(&mut self, env: &mut Env) {
        let now = env.ctx.now;
        self.machine.turned(now);
        if self.signals > 0 {
            self.signals -= 1;
            self.machine.on_stop_asked(now);
        } else if let Some(done) = self.inbox.pop_front() {
            self.on_done(done, env);
        } else if let Some(sqlstate) = self.side_ended.take() {
            self.side = None;
            self.link = None;
            self.machine.on_side_end(sqlstate, "the session ended", now);
        } else if self.is_broken {
            self.stream_ended("broken pipe", env);
        } else if self.machine.wants_wal() && self.buffer.is_empty() && self.has_arrived(env) {
            self.read_socket(env);
        }
    }

    fn read_socket(&mut self, env: &mut Env) {
        let Some(id) = self.slot else { return };
        let now = env.ctx.now;
        let Some(session) = env.pg.sessions.get_mut(&id) else {
            return;
        };
        while let Some((at, frame)) = session.to_client.front() {
            if *at > now || matches!(frame, Frame::Eof) && !self.buffer.is_empty() {
                break;
            }
            let (_, frame) = session.to_client.pop_front().expect("looked at");
            self.buffer.push_back(frame);
        }
        if matches!(self.buffer.front(), Some(Frame::Eof)) {
            self.stream_ended("end of file", env);
        } else {
            env.pg.link_was_read(&mut env.ctx);
        }
    }

    fn stream_ended(&mut self, why: &str, env: &mut Env) {
        self.drop_slot(env);
        let end = StreamEnd::Lost(why.to_owned());
        self.machine.on_stream_end(end, env.ctx.now);
    }

    fn drop_slot(&mut self, env: &mut Env) {
        self.buffer.clear();
        self.is_broken = false;
        if let Some(session) = self.slot.take() {
            close_session(session, env);
        }
    }

    fn take_reports(&mut self, env: &mut Env) {
        let now = env.ctx.now;
        self.publisher.drain(&mut self.reports, &mut env.broker);
        if !self.reports.is_empty() {
            self.machine.on_reports(&self.reports, now);
            self.reports.clear();
        }
        let is_idle = self.publisher.in_flight() == 0 && self.publisher.is_sending();
        if self.is_batch_shrunk && is_idle {
            self.is_batch_shrunk = false;
            self.publisher.start_rebuild(&mut env.broker, &mut env.ctx);
        }
        if let Some(is_late) = self.publisher.rebuild_turn(&mut env.broker, &mut env.ctx) {
            if is_late {
                env.ctx.reach("a producer was not heard out");
            }
            self.machine.on_rebuilt(apart::heard(is_late), now);
        }
        self.take_reports_apart(env);
        self.take_partitions(env);
    }

    fn limit_batch(&mut self, bytes: usize) {
        let bytes = bytes.max(16_384);
        if bytes < self.batch_bytes {
            self.batch_bytes = bytes;
            self.is_batch_shrunk = true;
        }
    }

    fn read_buffered(&mut self, env: &mut Env) {
        let now = env.ctx.now;
        // Reports come between any two frames: a burst ends anywhere.
        let burst = env.ctx.rng.count(1, 12);
        for _ in 0..burst {
            if !self.machine.wants_wal() {
                return;
            }
            match self.buffer.pop_front() {
                None => return,
                Some(Frame::Copy(body)) => {
                    let mut outlet = Sending {
                        publisher: &mut self.publisher,
                        broker: &mut env.broker,
                        ctx: &mut env.ctx,
                    };
                    self.machine.on_copy_data(&body, now, &mut outlet);
                }
                Some(Frame::CommandComplete) => self.stream_ended("the server shuts down", env),
                Some(Frame::Eof) => self.stream_ended("end of file", env),
            }
        }
    }

    // ---- orders ----------------------------------------------------------------------------

    fn obey(&mut self, env: &mut Env) {
        while let Some(order) = self.machine.poll_order() {
            let name = name_of(&order);
            if self.is_doomed_at(name, false, env) {
                return;
            }
            self.obey_one(order, env);
            if self.is_doomed_at(name, true, env) {
                return;
            }
        }
    }

    /// Does it die here? Everything that was not done yet is never done.
    fn is_doomed_at(&mut self, here: &'static str, is_behind: bool, env: &mut Env) -> bool {
        if here.is_empty() {
            return false;
        }
        match &mut self.doom {
            Some(Doom::At { name, is_after }) if *name == here && *is_after == is_behind => {
                env.ctx.reach(if is_behind {
                    "killed behind a boundary"
                } else {
                    "killed in front of a boundary"
                });
                env.ctx.note(format!("p{}: doomed at {here}", self.id));
                self.is_dead = true;
            }
            Some(Doom::Orders(0)) => {
                env.ctx.reach("killed between two orders");
                self.is_dead = true;
            }
            Some(Doom::Orders(left)) if is_behind => *left -= 1,
            Some(Doom::At { .. } | Doom::Orders(_)) | None => {}
        }
        self.is_dead
    }

    fn obey_one(&mut self, order: Order, env: &mut Env) {
        match order {
            Order::SeekLead => {
                self.link = None;
                let step = match self.side.take() {
                    Some(side) => Step::Seek { side },
                    None => Step::SeekConnect,
                };
                self.spawn(step, env);
            }
            Order::Open if self.must_purge => {
                panic!("another history's events are still on their way");
            }
            Order::Open => match (self.link, self.side) {
                (Some(link), Some(_)) => {
                    self.opening = Some(self.spawn(Step::OpenIdentify { link }, env));
                }
                _ => {
                    let later = OpenError::Later("the side session is gone".to_owned());
                    self.machine.on_open_failed(later, env.ctx.now);
                }
            },
            Order::Close(how) => self.close(how, env),
            Order::Status(status) => {
                if let Some(session) = self.slot {
                    if env.pg.is_over(session) {
                        self.is_broken = env.ctx.rng.permille(700);
                    }
                    let latency = env.ctx.rng.micros(20, 400);
                    env.ctx.after(latency, Event::Status(session, status));
                }
            }
            Order::Probe => {
                if let Some(link) = self.link {
                    let walsender = self.slot;
                    self.spawn(Step::Probe { link, walsender }, env);
                }
            }
            Order::Send(ticket, record) => {
                use walrelay::relay::intake::Outlet;
                env.ctx.reach("a held event was released");
                let mut outlet = Sending {
                    publisher: &mut self.publisher,
                    broker: &mut env.broker,
                    ctx: &mut env.ctx,
                };
                outlet.send(&record, ticket);
            }
            Order::Rebuild(Purge::Queue) => {
                self.publisher.start_rebuild(&mut env.broker, &mut env.ctx);
            }
            Order::Rebuild(Purge::Everything) => {
                self.must_purge = false;
                self.publisher.forget_all(&mut env.broker, &mut env.ctx);
            }
            Order::Try(number, record) => self.send_apart(number, &record, env),
            Order::RebuildTrial => self.apart.forget_all(&mut env.broker, &mut env.ctx),
            Order::Letters(statement) => self.say_about_letters(statement, env),
            Order::ReadTail { topic, since } => {
                self.spawn(Step::AskTail { topic, since }, env);
            }
            Order::Lookup(name) => {
                self.spawn(Step::Lookup { name }, env);
            }
            Order::EraseStop => self.with_link(|link| Step::EraseStop { link }, env),
            Order::Store { stop, halted } => {
                self.with_link(|link| Step::Store { link, stop, halted }, env);
            }
            Order::ClearHalted => self.with_link(|link| Step::ClearHalted { link }, env),
            Order::Notice(notice) => {
                if matches!(notice, Notice::OtherHistory(_)) {
                    self.must_purge = self.publisher.in_flight() > 0;
                }
                self.log(&notice, env);
            }
            // The policy in here is to halt.
            Order::BeginHeal(..) => unreachable!("a heal under the policy to halt"),
            Order::Exit(result) => self.exit = Some(result),
        }
    }

    fn with_link(&mut self, step: impl FnOnce(SideId) -> Step, env: &mut Env) {
        match self.link {
            Some(link) => {
                self.spawn(step(link), env);
            }
            None => {
                self.inbox.push_back(Done::NotWritten);
            }
        }
    }

    fn spawn(&mut self, step: Step, env: &mut Env) -> JobId {
        self.next_job += 1;
        let job = self.next_job;
        self.go_on(job, step, env);
        job
    }

    fn go_on(&mut self, job: JobId, step: Step, env: &mut Env) {
        let is_write = matches!(
            step,
            Step::EraseStop { .. }
                | Step::Store { .. }
                | Step::ClearHalted { .. }
                | Step::Letters { .. }
        );
        if is_write {
            // One session takes them in the order in which they were given.
            let at = env.ctx.now + env.ctx.rng.micros(100, 50_000);
            self.write_at = at.max(self.write_at + Duration::from_micros(1));
            env.ctx.at(self.write_at, Event::Job(self.id, job, step));
            return;
        }
        let latency = if env.ctx.rng.permille(950) {
            env.ctx.rng.micros(100, 4_000)
        } else {
            env.ctx.rng.millis(4, 300)
        };
        env.ctx.after(latency, Event::Job(self.id, job, step));
    }

    fn answer(&mut self, job: JobId, done: Done, env: &mut Env) {
        if let Done::Opened(_) = &done
            && self.cancelled.remove(&job)
        {
            if let Done::Opened(Ok((session, _))) = done {
                close_session(session, env);
            }
            return;
        }
        self.inbox.push_back(done);
        let pause = env.ctx.rng.micros(10, 200);
        self.turn_soon(pause, env);
    }

    fn close(&mut self, how: Close, env: &mut Env) {
        if let Some(job) = self.opening.take() {
            self.cancelled.insert(job);
        }
        match (self.slot, how) {
            (Some(session), Close::Finish) => {
                self.slot = None;
                self.buffer.clear();
                self.is_broken = false;
                self.spawn(Step::Finish { session, tries: 0 }, env);
            }
            (Some(_) | None, Close::Abort) | (None, Close::Finish) => {
                self.drop_slot(env);
                let end = StreamEnd::Lost("closed by us".to_owned());
                self.machine.on_stream_end(end, env.ctx.now);
            }
        }
    }

    fn on_done(&mut self, done: Done, env: &mut Env) {
        let now = env.ctx.now;
        match done {
            Done::Sought {
                side,
                has_link,
                seek,
            } => {
                self.side = side;
                self.link = side.filter(|_| has_link);
                if let Some(side) = side
                    && !env.pg.sides.contains_key(&side)
                {
                    // It ended while the answer was on its way.
                    self.side_ended = Some("57P01");
                }
                self.machine.on_seek(seek, now);
            }
            Done::Opened(Ok((session, opened))) => {
                self.opening = None;
                if let Some(old) = self.slot.replace(session) {
                    close_session(old, env);
                }
                self.buffer.clear();
                self.is_broken = false;
                self.machine.on_opened(&opened, now);
            }
            Done::Opened(Err(error)) => {
                self.opening = None;
                self.machine.on_open_failed(error, now);
            }
            Done::Finished => {
                let end = StreamEnd::Lost("closed by us".to_owned());
                self.machine.on_stream_end(end, now);
            }
            Done::Probed { probed, walsender } => {
                let is_same = walsender == self.slot;
                let probed = Probed {
                    has_slot: probed.has_slot || !is_same,
                    ..probed
                };
                self.machine.on_probe(&probed, now);
            }
            Done::Topic { name, state } => {
                if let TopicState::Present {
                    max_message_bytes: Some(bytes),
                    ..
                } = state
                {
                    self.limit_batch(bytes);
                }
                self.machine.on_topic(&name, &state, now);
            }
            Done::StopErased => self.machine.on_stop_erased(now),
            Done::Stored => self.machine.on_stored(),
            Done::Cleared => {}
            Done::NotWritten => self.machine.on_not_written(now),
            Done::Letters(told) => self.on_letters(told, now),
            Done::Tail { topic, answer } => self.machine.on_tail(&topic, answer, now),
        }
    }

    fn log(&mut self, notice: &Notice, env: &mut Env) {
        if *notice == Notice::BatchTooLarge {
            self.limit_batch(self.batch_bytes / 2);
        }
        let what = match notice {
            Notice::OtherHistory(_) => "another history",
            Notice::KafkaStalled { .. } => "closed because Kafka stalled",
            Notice::ProducerRebuilt { .. } => "the producer was rebuilt",
            Notice::TopicAbsent { .. } => "a topic was absent",
            Notice::HaltedEventPassed(_) => "a halted event passed",
            Notice::WasAway(_) => "a leader was away",
            Notice::BatchTooLarge => "a batch was too large",
            Notice::TopicGrown(_) => "a topic has grown",
            Notice::TopicOpen { is_by_hand, .. } if !is_by_hand => {
                "a tripped topic opened by itself"
            }
            Notice::Retried { .. } => "dead letters were delivered",
            Notice::NotParked(..) => "dead letters could not be written",
            Notice::ForeignTable { .. } => "a foreign table's row",
            Notice::Streaming { again, .. } if *again > 0 => "reconnected with events on their way",
            Notice::ClockSkew { .. } => "a clock was ahead",
            Notice::Stopped { complete: true, .. } => "a complete stop",
            Notice::Stopped {
                complete: false, ..
            } => "an incomplete stop",
            _ => "another notice",
        };
        env.ctx.reach(what);
        let id = self.id;
        env.ctx.note(format!("p{id}: {notice}"));
    }

    /// The server, or the network, has ended a side session of this process.
    pub fn side_died(&mut self, side: SideId, sqlstate: &'static str, env: &mut Env) {
        if self.side == Some(side) {
            self.side_ended = Some(sqlstate);
            let pause = env.ctx.rng.micros(10, 500);
            self.turn_soon(pause, env);
        }
    }

    /// It runs again.
    pub fn resumed(&mut self, env: &mut Env) {
        for event in std::mem::take(&mut self.frozen) {
            let pause = env.ctx.rng.micros(10, 1_000);
            env.ctx.after(pause, event);
        }
        self.turn_at = None;
        let pause = env.ctx.rng.micros(10, 5_000);
        self.turn_soon(pause, env);
    }

    /// Everything that the kernel closes when the process is gone.
    pub fn ended(&mut self, env: &mut Env) {
        for client in self.clients() {
            env.broker.drop_client(client);
        }
        let id = self.id;
        let sessions = env.pg.sessions.iter().filter(|(_, s)| s.proc == id);
        let sessions: Vec<SessionId> = sessions.map(|(id, _)| *id).collect();
        for session in sessions {
            close_session(session, env);
        }
        let sides = env.pg.sides.iter().filter(|(_, s)| s.proc == id);
        let sides: Vec<SideId> = sides.map(|(id, _)| *id).collect();
        for side in sides {
            let pause = env.ctx.rng.millis(0, env.pg.death_max);
            env.ctx.after(pause, Event::SideGone(side));
        }
    }
}

pub fn is_halt(result: &Result<(), Failure>) -> bool {
    let about_event = |f: &Failure| f.causes.iter().any(|c| c.contains("cannot be published"));
    result
        .as_ref()
        .is_err_and(|f| f.exit == Exit::Halted && about_event(f))
}

fn close_session(id: SessionId, env: &mut Env) {
    let Some(session) = env.pg.sessions.get_mut(&id) else {
        return;
    };
    if session.client_gone {
        return;
    }
    session.client_gone = true;
    session.to_client.clear();
    if env.pg.is_over(id) && env.pg.active != Some(id) {
        env.pg.sessions.remove(&id);
    } else {
        let pause = env.ctx.rng.millis(0, env.pg.death_max);
        env.ctx.after(pause, Event::SessionGone(id));
    }
}

fn later(side: Option<SideId>, why: &str) -> Done {
    Done::Sought {
        side,
        has_link: false,
        seek: Seek::Later(why.to_owned()),
    }
}

fn elsewhere(side: SideId, why: &str) -> Done {
    Done::Sought {
        side: Some(side),
        has_link: false,
        seek: Seek::Elsewhere(why.to_owned()),
    }
}

fn name_of(order: &Order) -> &'static str {
    match order {
        Order::SeekLead => "SeekLead",
        Order::Open => "Open",
        Order::Close(_) => "Close",
        Order::Status(_) => "Status",
        Order::Probe => "Probe",
        Order::Send(..) => "Send",
        Order::Rebuild(_) => "Rebuild",
        Order::Try(..) => "Try",
        Order::RebuildTrial => "RebuildTrial",
        Order::Letters(Statement::Park { .. }) => "Park",
        Order::Letters(Statement::Look) => "LookAtParked",
        Order::Letters(Statement::LoadRetry { .. }) => "LoadRetry",
        Order::Letters(Statement::Settle { .. }) => "Settle",
        Order::Letters(Statement::Trip(_)) => "Trip",
        Order::Letters(Statement::Untrip(_)) => "Untrip",
        Order::ReadTail { .. } => "ReadTail",
        Order::Lookup(_) => "Lookup",
        Order::EraseStop => "EraseStop",
        Order::Store { .. } => "Store",
        Order::ClearHalted => "ClearHalted",
        Order::BeginHeal(..) | Order::Notice(_) | Order::Exit(_) => "",
    }
}
