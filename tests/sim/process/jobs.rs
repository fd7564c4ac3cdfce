//! What takes time, step by step: connecting, statements, questions to the cluster.

use std::time::Duration;

use walrelay::lsn::Lsn;
use walrelay::relay::orders::{Led, OpenError, Opened, Probed, Seek};

use super::{Done, Env, JobId, Process, Step, close_session, elsewhere, later};
use crate::frames;
use crate::history::{EventId, Fact, SessionId};
use crate::postgres::{Running, SideId};
use crate::world::Event;

impl Process {
    /// A job comes to its next step.
    pub fn job(&mut self, job: JobId, step: Step, env: &mut Env) {
        if self.is_paused {
            self.frozen.push(Event::Job(self.id, job, step));
            return;
        }
        if self.is_dead {
            return;
        }
        let now = env.ctx.now;
        match step {
            Step::Letters { link, op } => self.letters(job, link, op, env),
            Step::LettersTold { link, op, told } => self.letters_told(job, link, op, told, env),
            Step::AskTail { topic, since } => self.ask_tail(job, topic, since, env),
            Step::ReadTail { topic, since } => self.read_tail(job, topic, since, env),
            Step::SeekConnect => match env.pg.connect_side(self.id, now) {
                Some(side) => self.go_on(job, Step::Seek { side }, env),
                None => self.answer(job, later(None, "connection refused"), env),
            },
            Step::Seek { side } => match env.pg.statement(side, now) {
                None => {
                    // A time-out of the client's own.
                    let Some(_) = env.pg.sides.get(&side) else {
                        return;
                    };
                    let at = now + Duration::from_secs(5);
                    env.pg.sides.get_mut(&side).expect("looked up").is_hung = false;
                    env.pg.drop_side(side);
                    env.ctx
                        .at(at, Event::Job(self.id, job, Step::Seek { side }));
                }
                Some(false) => self.answer(job, later(None, "end of file"), env),
                Some(true) => {
                    let done = self.seek(side, env);
                    self.answer(job, done, env);
                }
            },
            Step::OpenIdentify { link } => self.identify(job, link, env),
            Step::OpenLook { link, mut opened } => {
                let is_known = env.pg.statement(link, now) == Some(true);
                if !is_known {
                    self.open_failed(job, "the side session is gone", env);
                } else if env.pg.active.is_some() {
                    self.open_failed(job, "the slot is held", env);
                } else {
                    opened.confirmed_flush = env.pg.confirmed();
                    self.go_on(job, Step::OpenStart { opened }, env);
                }
            }
            Step::OpenStart { opened } => match env.pg.start(self.id, &mut env.ctx) {
                Some(session) => {
                    self.answer(job, Done::Opened(Ok((session, opened))), env);
                }
                None => self.open_failed(job, "55006 or gone", env),
            },
            Step::Finish { session, tries } => self.finish(job, session, tries, env),
            Step::Probe { link, walsender } => self.probe(job, link, walsender, env),
            Step::Lookup { name } => {
                let state = env.broker.lookup(&name, &mut env.ctx);
                self.answer(job, Done::Topic { name, state }, env);
            }
            Step::EraseStop { link } => {
                self.write(job, link, Done::StopErased, env, |env| {
                    env.ctx.reach("a stored stop was erased");
                    env.pg.registry().stop = None;
                });
            }
            Step::ClearHalted { link } => {
                self.write(job, link, Done::Cleared, env, |env| {
                    env.pg.registry().halted = None;
                    env.ctx.fact(Fact::HaltCleared);
                });
            }
            Step::Store { link, stop, halted } => {
                let proc = self.id;
                self.write(job, link, Done::Stored, env, |env| {
                    if stop.open.is_some() {
                        env.ctx.reach("a stop inside a transaction");
                    }
                    env.ctx.fact(Fact::StopStored {
                        proc,
                        complete: stop.complete,
                    });
                    env.pg.registry().stop = Some(stop);
                    if let Some(halted) = halted {
                        let event = EventId(halted.event_id[1..].parse().expect("ours"));
                        env.ctx.fact(Fact::HaltStored { event });
                        env.pg.registry().halted = Some(halted);
                    }
                });
            }
        }
    }

    fn seek(&mut self, side: SideId, env: &mut Env) -> Done {
        let now = env.ctx.now;
        if env.pg.lock.is_some_and(|holder| holder != side) {
            if let Some(holder) = env.pg.idle_lock_holder(now) {
                env.ctx.reach("a hung leader was ended");
                env.ctx
                    .after(Duration::ZERO, Event::SideKilled(holder, "57P01"));
            }
            return elsewhere(side, "another instance holds the lock");
        }
        env.pg.lock = Some(side);
        let is_young = now.saturating_sub(env.pg.started_at) < Duration::from_secs(3);
        let me = self.id;
        let previous = env.pg.registry().leader;
        if previous.is_some_and(|leader| leader != me) && is_young {
            env.pg.lock = None;
            return elsewhere(side, "the server has just started");
        }
        if previous != Some(me) {
            env.ctx.fact(Fact::LeaderChanged {
                from: previous,
                to: me,
            });
        }
        let confirmed = env.pg.confirmed();
        let registry = env.pg.registry();
        registry.leader = Some(me);
        registry.lead_changes += i64::from(previous != Some(me));
        let stop = registry.stop.clone();
        if let Some(stop) = &mut registry.stop {
            // Whoever leads may send: from here on it is no end of everything.
            stop.complete = false;
        }
        let led = Led {
            table_oid: frames::OUTBOX.oid,
            parked: registry.letters.load(super::GENERATION, confirmed),
            generation: super::GENERATION,
            term: Some(registry.lead_changes),
            previous_leader: previous.map(|p| format!("p{p}")),
            is_writable: true,
            stop,
            halted: registry.halted.clone(),
            consistent_point: Some(registry.consistent_point),
            is_provable: false,
        };
        if env.ctx.rng.permille(30) {
            env.ctx.reach("a claim of the lead whose answer was lost");
            env.ctx
                .after(Duration::ZERO, Event::SideKilled(side, "57P01"));
            return later(None, "end of file");
        }
        Done::Sought {
            side: Some(side),
            has_link: true,
            seek: Seek::Led(led),
        }
    }

    fn identify(&mut self, job: JobId, link: SideId, env: &mut Env) {
        if env.pg.running != Running::Up {
            self.open_failed(job, "the server is away", env);
            return;
        }
        let opened = Opened {
            system_identifier: "7".to_owned(),
            timeline: env.pg.timeline,
            xlogpos: env.pg.wal_end(),
            confirmed_flush: Lsn::INVALID,
            unfit: None,
            heals: None,
        };
        self.go_on(job, Step::OpenLook { link, opened }, env);
    }

    fn open_failed(&mut self, job: JobId, why: &str, env: &mut Env) {
        let error = OpenError::Later(why.to_owned());
        self.answer(job, Done::Opened(Err(error)), env);
    }

    /// The server reads what was written before, then CopyDone.
    fn finish(&mut self, job: JobId, session: SessionId, tries: u32, env: &mut Env) {
        let is_over = env.pg.is_over(session);
        if is_over || tries == 1 {
            close_session(session, env);
            env.pg.ended(session, &mut env.ctx);
            self.answer(job, Done::Finished, env);
            return;
        }
        let step = Step::Finish { session, tries: 1 };
        let at = env.ctx.now + Duration::from_micros(500);
        env.ctx.at(at, Event::Job(self.id, job, step));
    }

    fn probe(&mut self, job: JobId, link: SideId, walsender: Option<SessionId>, env: &mut Env) {
        let Some(answers) = env.pg.statement(link, env.ctx.now) else {
            return;
        };
        let probed = Probed {
            touched: env.pg.registry().letters.touched,
            has_lock: answers && env.pg.lock == Some(link),
            has_slot: answers && (walsender.is_none() || env.pg.active == walsender),
        };
        self.answer(job, Done::Probed { probed, walsender }, env);
    }

    fn write(
        &mut self,
        job: JobId,
        link: SideId,
        done: Done,
        env: &mut Env,
        what: impl FnOnce(&mut Env),
    ) {
        match env.pg.statement(link, env.ctx.now) {
            None => {}
            Some(false) => self.answer(job, Done::NotWritten, env),
            Some(true) => {
                what(env);
                self.answer(job, done, env);
            }
        }
    }
}
