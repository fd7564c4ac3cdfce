//! The world of one run: two instances, a server, a broker, and what happens to them.

use std::collections::BTreeMap;
use std::time::Duration;

use walrelay::record::KafkaCode;
use walrelay::relay::mapping::Mapping;
use walrelay::relay::orders::{OnPoison, Settings};
use walrelay::wire::replication::StatusUpdate;

use crate::broker::{Broker, ClientId, FlightId, Rates};
use crate::history::{Ctx, Fact, Moment, ProcId, SessionId};
use crate::letters::Hand;
use crate::postgres::{Postgres, Running, Side, SideId, Version};
use crate::process::{BOUNDARIES, Doom, Env, JobId, Process, Step, is_halt};

/// What comes, each at its time.
#[derive(Clone, Debug)]
pub enum Event {
    Turn(ProcId),
    Wake(ProcId),
    Job(ProcId, JobId, Step),
    Walsender(SessionId),
    SessionCheck(SessionId),
    SessionGone(SessionId),
    Status(SessionId, StatusUpdate),
    SideGone(SideId),
    SideKilled(SideId, &'static str),
    Pump(ClientId),
    Flight(FlightId),
    Response(FlightId),
    ServerUp,
    Start(usize),
    Resume(ProcId),
    BrokerUp,
    TopicBack(usize),
    Mend,
    /// The operator looks at the dead letters.
    Hand,
    Write,
    BadRow,
    Fault,
    Calm,
    Look,
}

const TOPICS: [&str; 3] = ["outbox.event.a", "outbox.event.b", "outbox.event.c"];

/// What may happen in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Kill,
    Pause,
    Terminate,
    CutStream,
    EndSide,
    HangSide,
    StopFast,
    StopImmediate,
    Restore,
    Copy,
    SaveSlot,
    Outage,
    DeleteTopic,
    GrowTopic,
    /// Everything of a topic is refused for a while.
    BadDeploy,
    Poison,
    KillAtBoundary,
}

/// Faults that excuse no duplicate.
const GENTLE: [Fault; 10] = [
    Fault::CutStream,
    Fault::StopFast,
    Fault::StopImmediate,
    Fault::SaveSlot,
    Fault::SaveSlot,
    Fault::Outage,
    Fault::DeleteTopic,
    Fault::GrowTopic,
    Fault::Poison,
    Fault::Copy,
];
const ROUGH: [Fault; 9] = [
    Fault::Kill,
    Fault::KillAtBoundary,
    Fault::KillAtBoundary,
    Fault::Pause,
    Fault::EndSide,
    Fault::HangSide,
    Fault::Restore,
    Fault::Terminate,
    Fault::Terminate,
];

pub struct World {
    env: Env,
    procs: BTreeMap<ProcId, Process>,
    instances: [Option<ProcId>; 2],
    instance_count: usize,
    next_proc: ProcId,
    faults: Vec<Fault>,
    fault_pause: u64,
    write_pause: u64,
    rows_max: usize,
    limits: Limits,
    is_restoring: bool,
    has_bad_row: bool,
    /// To be killed as soon as it has something on the wire.
    doomed: Option<ProcId>,
    is_calm: bool,
    calm_at: Moment,
    on_poison: OnPoison,
    grace: Duration,
    hand_pause: u64,
    /// Dead letters stay where they are, in the end.
    is_left_parked: bool,
    /// Crash follows on crash, and a new process on each at once.
    is_storm: bool,
    /// More than the breaker lets be parked.
    has_many_keys: bool,
}

#[derive(Clone, Copy, Debug)]
struct Limits {
    events: usize,
    bytes: usize,
    span: usize,
    stall: Duration,
}

/// Where crashes are counted by the million, most lives are made of them.
fn env_is_soak() -> bool {
    std::env::var_os("SIM_CRASHES").is_some()
}

pub struct Outcome {
    pub facts: Vec<(Moment, Fact)>,
    pub reached: BTreeMap<&'static str, u64>,
}

/// One run, `span` of it with faults.
pub fn run(seed: u64, span: Option<Duration>) -> Outcome {
    let mut world = World::new(seed, span);
    world.go();
    Outcome {
        facts: world.env.ctx.facts,
        reached: world.env.ctx.reached,
    }
}

impl World {
    fn new(seed: u64, span: Option<Duration>) -> Self {
        let mut ctx = Ctx::new(seed);
        let version = *ctx.rng.pick(&[Version::Fifteen, Version::Eighteen]);
        let is_rough = ctx.rng.permille(600);
        let mut faults = Vec::new();
        for fault in GENTLE {
            if ctx.rng.permille(450) {
                faults.push(fault);
            }
        }
        if is_rough && ctx.rng.permille(500) {
            // One alone: two of them excuse each other.
            faults.push(*ctx.rng.pick(&ROUGH));
        } else if is_rough {
            faults.extend(ROUGH.iter().filter(|_| ctx.rng.permille(500)));
        }
        if faults.contains(&Fault::Restore) {
            faults.extend([Fault::Copy, Fault::CutStream]);
        }
        let mut rates = Rates::default();
        if ctx.rng.permille(300) {
            rates.lie = ctx.rng.range(1, 15);
        }
        if ctx.rng.permille(400) {
            rates.transient = ctx.rng.range(1, 25);
        }
        if ctx.rng.permille(200) {
            rates.definite = ctx.rng.range(1, 15);
        }
        let events = ctx.rng.count(2, 40);
        let limits = Limits {
            events,
            bytes: ctx.rng.count(3_000, 60_000),
            span: events + ctx.rng.count(0, 150),
            stall: ctx.rng.millis(2_000, 20_000),
        };
        let length = span.unwrap_or_else(|| Duration::from_secs(60));
        let length = ctx.rng.millis(5_000, 60_000).min(length);
        let mut broker = Broker::new();
        broker.rates = rates;
        for name in TOPICS {
            if ctx.rng.permille(800) {
                let is_small = ctx.rng.permille(100);
                broker.make_topic(name, 3, is_small.then_some(300), &mut ctx);
            }
        }
        World {
            env: Env {
                pg: Postgres::new(version, ctx.now),
                broker,
                ctx,
            },
            procs: BTreeMap::new(),
            instances: [None; 2],
            instance_count: 1,
            next_proc: 0,
            faults,
            fault_pause: 2_000,
            write_pause: 40,
            rows_max: 4,
            limits,
            is_restoring: false,
            has_bad_row: false,
            doomed: None,
            is_calm: false,
            calm_at: length,
            on_poison: OnPoison::Park,
            grace: Duration::from_secs(600),
            hand_pause: 3_000,
            is_left_parked: false,
            is_storm: false,
            has_many_keys: false,
        }
    }

    /// A life of crashes and little else: hundreds of them.
    fn storm(&mut self) {
        self.is_storm = true;
        self.faults = vec![
            Fault::KillAtBoundary,
            Fault::KillAtBoundary,
            Fault::KillAtBoundary,
            Fault::Kill,
            Fault::SaveSlot,
        ];
        let more = [Fault::CutStream, Fault::Poison, Fault::StopImmediate];
        let rng = &mut self.env.ctx.rng;
        self.faults
            .extend(more.iter().filter(|_| rng.permille(300)));
        self.env.broker.settling = Duration::from_millis(30);
        self.env.pg.death_max = 15;
    }

    /// What becomes of what cannot be published, and who looks after it.
    fn choose_policies(&mut self) {
        let env = &mut self.env;
        let rng = &mut env.ctx.rng;
        if rng.permille(250) {
            self.on_poison = OnPoison::Halt;
        } else {
            if rng.permille(400) {
                self.grace = rng.millis(1_000, 8_000);
            }
            if rng.permille(100) && !self.is_storm {
                env.pg.ids = 250;
                self.faults.extend([Fault::BadDeploy; 3]);
                self.has_many_keys = true;
            }
            if rng.permille(150) {
                env.pg.illegal = 10;
            }
            if rng.permille(200) {
                env.pg.write_fails = rng.range(20, 300);
            }
            if rng.permille(500) {
                self.faults.push(Fault::Poison);
            }
        }
        self.hand_pause = *rng.pick(&[300, 2_000, 8_000]);
        self.is_left_parked = rng.permille(250);
        env.broker.may_read = !rng.permille(120);
        if rng.permille(80) {
            env.broker.tail_max = rng.count(1, 60);
        }
        env.ctx.fact(Fact::World {
            halts: self.on_poison == OnPoison::Halt,
            is_tail_whole: env.broker.may_read && env.broker.tail_max == usize::MAX,
            is_left_parked: self.is_left_parked,
            grace: self.grace,
        });
    }

    fn go(&mut self) {
        let storms = if env_is_soak() { 950 } else { 60 };
        if self.env.ctx.rng.permille(storms) {
            self.storm();
        }
        self.choose_policies();
        let ctx = &mut self.env.ctx;
        self.calm_at += ctx.now;
        self.instance_count = ctx.rng.count(1, 3);
        self.fault_pause = *ctx.rng.pick(&[300, 1_000, 3_000]);
        self.write_pause = *ctx.rng.pick(&[5, 20, 100, 400]);
        self.rows_max = *ctx.rng.pick(&[1, 3, 12, 40]);
        if self.has_many_keys {
            self.write_pause = 20;
            self.rows_max = 12;
        }
        if self.is_storm {
            self.fault_pause = *ctx.rng.pick(&[40, 100, 250]);
            self.write_pause = *ctx.rng.pick(&[50, 200]);
            self.rows_max = *ctx.rng.pick(&[1, 3]);
        }
        let is_halting = self.on_poison == OnPoison::Halt;
        let rate = if is_halting { 100 } else { 400 };
        self.has_bad_row =
            ctx.rng.permille(rate) && !(is_halting && self.faults.contains(&Fault::Restore));
        let pause = ctx.rng.millis(0, self.hand_pause);
        ctx.after(pause, Event::Hand);
        if self.has_bad_row {
            let pause = ctx.rng.millis(0, 20_000);
            ctx.after(pause, Event::BadRow);
        }
        for index in 0..self.instance_count {
            let pause = ctx.rng.millis(0, 1_500);
            ctx.after(pause, Event::Start(index));
        }
        for (index, name) in TOPICS.iter().enumerate() {
            if !self.env.broker.has_topic(name) {
                let pause = ctx.rng.millis(0, 30_000);
                ctx.after(pause, Event::TopicBack(index));
            }
        }
        ctx.after(Duration::ZERO, Event::Write);
        ctx.after(Duration::from_millis(self.fault_pause), Event::Fault);
        ctx.at(self.calm_at, Event::Calm);
        let latest = self.calm_at + Duration::from_secs(240);
        while let Some(event) = self.env.ctx.next() {
            if matches!(event, Event::Look) && self.is_done(latest) {
                break;
            }
            self.handle(event);
        }
        for (id, process) in &self.procs {
            let standing = format!("p{id}: {:?}", process.machine().standing(self.env.ctx.now));
            self.env.ctx.note(standing);
        }
        let confirmed = self.env.pg.confirmed();
        let wal_end = self.env.pg.wal_end();
        self.env.ctx.fact(Fact::End { confirmed, wal_end });
    }

    /// Everything is confirmed, or never will be.
    fn is_done(&mut self, latest: Moment) -> bool {
        let now = self.env.ctx.now;
        self.env.ctx.after(Duration::from_secs(1), Event::Look);
        let pg = &self.env.pg;
        let is_confirmed = pg.running == Running::Up && pg.confirmed() >= pg.wal_end();
        let is_settled =
            is_confirmed && (self.is_left_parked || self.env.pg.registry().letters.is_empty());
        // It halts there again and again, and would for ever.
        let is_halting = self.has_bad_row && self.on_poison == OnPoison::Halt;
        let is_enough = is_halting && now >= self.calm_at + Duration::from_secs(45);
        is_enough || is_settled && now >= self.calm_at + Duration::from_secs(5) || now >= latest
    }

    fn handle(&mut self, event: Event) {
        let env = &mut self.env;
        match event {
            Event::Turn(id) => self.turn(id),
            Event::Wake(id) => {
                if let Some(process) = self.procs.get_mut(&id)
                    && !process.is_paused
                {
                    process.turn_soon(Duration::ZERO, env);
                }
            }
            Event::Job(id, job, step) => {
                if let Some(process) = self.procs.get_mut(&id) {
                    process.job(job, step, env);
                    if process.is_dead {
                        self.kill(id);
                    }
                }
            }
            Event::Walsender(id) => env.pg.walsender(id, &mut env.ctx),
            Event::SessionCheck(id) => env.pg.session_check(id, &mut env.ctx),
            Event::SessionGone(id) => env.pg.ended(id, &mut env.ctx),
            Event::Status(id, status) => env.pg.status(id, &status, &mut env.ctx),
            Event::SideGone(id) => {
                env.pg.drop_side(id);
            }
            Event::SideKilled(id, sqlstate) => self.kill_side(id, sqlstate),
            Event::Pump(id) => env.broker.pump(id, &mut env.ctx),
            Event::Flight(id) => {
                let owner = env.broker.owner(id);
                if self.doomed.is_some() && self.doomed == owner {
                    self.doomed = None;
                    self.kill(owner.expect("compared"));
                }
                self.env.broker.flight(id, &mut self.env.ctx);
            }
            Event::Response(id) => env.broker.response(id, &mut env.ctx),
            Event::ServerUp => {
                let restore = std::mem::take(&mut self.is_restoring);
                env.pg.up(restore, &mut env.ctx);
                if restore {
                    env.ctx.reach("a copy was restored");
                }
            }
            Event::Start(index) => self.start(index),
            Event::Resume(id) => self.resume(id),
            Event::BrokerUp => env.broker.is_up = true,
            Event::TopicBack(index) => {
                env.broker.make_topic(TOPICS[index], 3, None, &mut env.ctx);
            }
            Event::Mend => env.broker.mend_all(&mut env.ctx),
            Event::Hand => self.hand(),
            Event::Write => self.write(),
            Event::BadRow => {
                if self.on_poison == OnPoison::Park && !self.is_calm {
                    let pause = env.ctx.rng.millis(100, 20_000);
                    env.ctx.after(pause, Event::BadRow);
                }
                env.ctx.reach("a row that can be no record");
                env.pg.write_bad_row(&mut env.ctx);
            }
            Event::Fault => self.fault(),
            Event::Calm => self.calm(),
            Event::Look => {}
        }
    }

    fn turn(&mut self, id: ProcId) {
        let Some(process) = self.procs.get_mut(&id) else {
            return;
        };
        process.turn(&mut self.env);
        if process.is_dead {
            self.kill(id);
            return;
        }
        let Some(result) = process.exit.take() else {
            return;
        };
        let halted = is_halt(&result);
        let text = result.as_ref().err().map(ToString::to_string);
        self.env.ctx.fact(Fact::Exited {
            proc: id,
            ok: result.is_ok(),
            halted,
            text: text.unwrap_or_default(),
        });
        let instance = process.instance;
        self.remove(id);
        let pause = self.env.ctx.rng.millis(100, 5_000);
        self.env.ctx.after(pause, Event::Start(instance));
        if halted {
            self.env.ctx.reach("halted by poison");
            let pause = self.env.ctx.rng.millis(0, 10_000);
            self.env.ctx.after(pause, Event::Mend);
        }
    }

    fn remove(&mut self, id: ProcId) {
        if let Some(mut process) = self.procs.remove(&id) {
            process.ended(&mut self.env);
            self.instances[process.instance] = None;
        }
    }

    fn start(&mut self, index: usize) {
        if self.instances[index].is_some() {
            return;
        }
        self.next_proc += 1;
        let id = self.next_proc;
        let limits = self.limits;
        let settings = Settings {
            on_poison: self.on_poison,
            on_gap: Some(walrelay::gap::OnGap::Halt),
            topic_grace: self.grace,
            mapping: Mapping::default(),
            in_flight_events_max: limits.events,
            in_flight_bytes_max: limits.bytes,
            span_events_max: limits.span,
            stall_timeout: limits.stall,
            shutdown_timeout: Duration::from_secs(10),
            wal_sender_timeout: Duration::from_secs(15),
        };
        self.env.ctx.fact(Fact::Started {
            proc: id,
            instance: index,
        });
        let process = Process::start(id, index, settings, &mut self.env);
        self.procs.insert(id, process);
        self.instances[index] = Some(id);
    }

    fn write(&mut self) {
        if self.is_calm {
            return;
        }
        let env = &mut self.env;
        let events = env.pg.write(self.rows_max, &mut env.ctx);
        if env.ctx.rng.permille(200) {
            env.pg.write_elsewhere(&mut env.ctx);
        }
        if self.faults.contains(&Fault::Poison) && !events.is_empty() && env.ctx.rng.permille(4) {
            let (event, _) = *env.ctx.rng.pick(&events);
            let kinds = [(10, false), (10, true), (18, true), (87, true), (32, true)];
            let kind = *env.ctx.rng.pick(&kinds);
            env.ctx.fact(Fact::PoisonMade { event });
            env.broker.poison.insert(event, (KafkaCode(kind.0), kind.1));
        }
        let is_lull = env.ctx.rng.permille(10);
        let pause = if is_lull {
            env.ctx.rng.millis(1_000, 8_000)
        } else {
            env.ctx.rng.millis(0, self.write_pause * 2)
        };
        env.ctx.after(pause, Event::Write);
    }

    // ---- faults ------------------------------------------------------------------------------

    fn fault(&mut self) {
        if self.is_calm {
            return;
        }
        let pause = self.env.ctx.rng.millis(10, self.fault_pause * 2);
        self.env.ctx.after(pause, Event::Fault);
        if self.faults.is_empty() {
            return;
        }
        let fault = *self.env.ctx.rng.pick(&self.faults);
        self.do_fault(fault);
    }

    fn any_process(&mut self) -> Option<ProcId> {
        let ids: Vec<ProcId> = self.procs.keys().copied().collect();
        if ids.is_empty() {
            return None;
        }
        let leader = self.env.pg.registry().leader;
        match leader.filter(|id| ids.contains(id)) {
            Some(leader) if self.env.ctx.rng.permille(800) => Some(leader),
            Some(_) | None => Some(*self.env.ctx.rng.pick(&ids)),
        }
    }

    fn do_fault(&mut self, fault: Fault) {
        let is_up = self.env.pg.running == Running::Up;
        match fault {
            Fault::Kill => {
                if let Some(id) = self.any_process() {
                    if self.env.ctx.rng.permille(500) {
                        // While a batch is on the wire.
                        self.doomed = Some(id);
                    } else {
                        self.kill(id);
                    }
                }
            }
            Fault::Pause => {
                if let Some(id) = self.any_process() {
                    self.pause(id);
                }
            }
            Fault::Terminate => {
                if let Some(id) = self.any_process()
                    && let Some(process) = self.procs.get_mut(&id)
                    && !process.is_paused
                {
                    self.env.ctx.note(format!("SIGTERM p{id}"));
                    process.signals += 1;
                    process.turn_soon(Duration::ZERO, &mut self.env);
                }
            }
            Fault::CutStream => {
                if let Some(id) = self.env.pg.active
                    && !self.env.pg.is_over(id)
                {
                    self.env.ctx.note(format!("session {id} cut"));
                    self.env.pg.cut(id, &mut self.env.ctx);
                }
            }
            Fault::EndSide => {
                if let Some(side) = self.env.pg.lock {
                    let sqlstate = *self.env.ctx.rng.pick(&["57P01", ""]);
                    self.kill_side(side, sqlstate);
                }
            }
            Fault::HangSide => {
                let lock = self.env.pg.lock;
                if let Some(side) = lock.and_then(|id| self.env.pg.sides.get_mut(&id)) {
                    side.is_hung = true;
                    self.env.ctx.note("the lock's session hangs".to_owned());
                }
            }
            Fault::StopFast if is_up => {
                let sides = self.env.pg.stop_fast(&mut self.env.ctx);
                self.tell(sides, "57P01");
            }
            Fault::StopImmediate if self.env.pg.running != Running::Down => self.stop_immediate(),
            Fault::Restore if is_up && self.env.pg.has_copy() => {
                self.is_restoring = true;
                self.stop_immediate();
            }
            Fault::StopFast | Fault::StopImmediate | Fault::Restore => {}
            Fault::Copy => self.env.pg.copy(),
            Fault::SaveSlot => self.env.pg.save_slot(),
            Fault::Outage => self.outage(),
            Fault::DeleteTopic => self.delete_topic(),
            Fault::GrowTopic => {
                let name = *self.env.ctx.rng.pick(&TOPICS);
                self.env.broker.grow_topic(name);
            }
            Fault::BadDeploy => self.bad_deploy(),
            Fault::KillAtBoundary => self.doom(),
            Fault::Poison => {}
        }
    }

    /// Somebody dies at a boundary of its orders, or of a commit.
    fn doom(&mut self) {
        let Some(id) = self.any_process() else {
            return;
        };
        let rng = &mut self.env.ctx.rng;
        let doom = if rng.permille(500) {
            Doom::Orders(u32::try_from(rng.range(0, 60)).expect("small"))
        } else {
            Doom::At {
                name: rng.pick::<&'static str>(&BOUNDARIES),
                is_after: rng.permille(500),
            }
        };
        if let Some(process) = self.procs.get_mut(&id) {
            process.doom = Some(doom);
        }
    }

    /// Everything of a topic is refused.
    fn bad_deploy(&mut self) {
        let env = &mut self.env;
        let name = *env.ctx.rng.pick(&TOPICS);
        if env.broker.refusing.is_empty() {
            env.broker.refusing.insert(name.to_owned(), KafkaCode(87));
            env.ctx.fact(Fact::Refusing {
                topic: name.to_owned(),
            });
            let pause = env.ctx.rng.millis(1_000, 40_000);
            env.ctx.after(pause, Event::Mend);
        }
    }

    /// The operator has a look, and does something or not.
    fn hand(&mut self) {
        let env = &mut self.env;
        let pause = env.ctx.rng.millis(self.hand_pause / 4, self.hand_pause * 2);
        env.ctx.after(pause, Event::Hand);
        if env.pg.running != Running::Up {
            return;
        }
        let mut table = std::mem::take(&mut env.pg.registry().letters);
        if self.is_calm {
            if !self.is_left_parked {
                table.discard_hopeless(&mut env.ctx);
                table.by_hand(Hand::RetryAll, &mut env.ctx);
            }
        } else {
            let hands = [
                Hand::RetryOne,
                Hand::RetryOne,
                Hand::RetryAll,
                Hand::Discard,
                Hand::ParkTopic,
            ];
            let hand = *env.ctx.rng.pick(&hands);
            table.by_hand(hand, &mut env.ctx);
            if env.ctx.rng.permille(150) {
                env.broker.raise_limits(&mut env.ctx);
            }
            if env.ctx.rng.permille(300) {
                env.broker.mend_all(&mut env.ctx);
            }
        }
        env.pg.registry().letters = table;
    }

    fn stop_immediate(&mut self) {
        let sides = self.env.pg.stop_immediate(&mut self.env.ctx);
        self.tell(sides, "");
    }

    fn tell(&mut self, sides: Vec<(SideId, Side)>, sqlstate: &'static str) {
        for (id, side) in sides {
            if let Some(process) = self.procs.get_mut(&side.proc) {
                process.side_died(id, sqlstate, &mut self.env);
            }
        }
    }

    fn kill_side(&mut self, id: SideId, sqlstate: &'static str) {
        if let Some(side) = self.env.pg.drop_side(id) {
            self.env
                .ctx
                .note(format!("p{}'s side session is ended {sqlstate}", side.proc));
            self.tell(vec![(id, side)], sqlstate);
        }
    }

    fn kill(&mut self, id: ProcId) {
        if !self.procs.contains_key(&id) {
            return;
        }
        self.env.ctx.fact(Fact::Killed { proc: id });
        self.env.ctx.reach("killed");
        let instance = self.procs[&id].instance;
        self.remove(id);
        let longest = if self.is_storm { 90 } else { 8_000 };
        let pause = self.env.ctx.rng.millis(20, longest);
        self.env.ctx.after(pause, Event::Start(instance));
    }

    fn pause(&mut self, id: ProcId) {
        let Some(process) = self.procs.get_mut(&id) else {
            return;
        };
        if process.is_paused {
            return;
        }
        process.is_paused = true;
        for client in process.clients() {
            self.env.broker.freeze(client, true, &mut self.env.ctx);
        }
        self.env.ctx.fact(Fact::Paused { proc: id });
        let span = if self.env.ctx.rng.permille(500) {
            self.env.ctx.rng.millis(50, 6_500)
        } else {
            self.env.ctx.rng.millis(6_500, 40_000)
        };
        self.env.ctx.after(span, Event::Resume(id));
    }

    fn resume(&mut self, id: ProcId) {
        let Some(process) = self.procs.get_mut(&id) else {
            return;
        };
        if !process.is_paused {
            return;
        }
        process.is_paused = false;
        self.env.ctx.fact(Fact::Resumed { proc: id });
        for client in process.clients() {
            self.env.broker.freeze(client, false, &mut self.env.ctx);
        }
        process.resumed(&mut self.env);
    }

    fn outage(&mut self) {
        if !self.env.broker.is_up {
            return;
        }
        self.env.broker.is_up = false;
        self.env.ctx.note("the broker is away".to_owned());
        let span = if self.env.ctx.rng.permille(700) {
            self.env.ctx.rng.millis(100, 4_000)
        } else {
            self.env.ctx.rng.millis(4_000, 40_000)
        };
        self.env.ctx.after(span, Event::BrokerUp);
    }

    fn delete_topic(&mut self) {
        let index = self.env.ctx.rng.count(0, TOPICS.len());
        if self.env.broker.has_topic(TOPICS[index]) {
            self.env
                .broker
                .delete_topic(TOPICS[index], &mut self.env.ctx);
            self.env.ctx.note(format!("{} is deleted", TOPICS[index]));
            let pause = self.env.ctx.rng.millis(500, 20_000);
            self.env.ctx.after(pause, Event::TopicBack(index));
        }
    }

    /// Nothing fails from here on, and all that is away comes back.
    fn calm(&mut self) {
        self.is_calm = true;
        self.doomed = None;
        self.env.ctx.fact(Fact::Calm);
        self.env.broker.is_up = true;
        self.env.broker.rates = Rates::default();
        self.env.broker.mend_all(&mut self.env.ctx);
        self.env.broker.raise_limits(&mut self.env.ctx);
        self.env.pg.write_fails = 0;
        for process in self.procs.values_mut() {
            process.doom = None;
        }
        for name in TOPICS {
            self.env.broker.make_topic(name, 3, None, &mut self.env.ctx);
        }
        let ids: Vec<ProcId> = self.procs.keys().copied().collect();
        for id in ids {
            self.resume(id);
        }
        for index in 0..self.instance_count {
            self.start(index);
        }
        self.env.ctx.after(Duration::from_secs(1), Event::Look);
    }
}
