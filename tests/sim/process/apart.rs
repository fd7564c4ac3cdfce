//! The second producer, of what is sent apart, and the orders about dead letters and tails. Each
//! statement is a step of its own: it may never be made, and its answer may be lost.

use std::time::Duration;

use walrelay::dead_letter::{EventKey, Parked, Stored, Written};
use walrelay::lsn::PgTimestamp;
use walrelay::record::{Record, Ticket};
use walrelay::relay::orders::{Heard, Ill, Statement};
use walrelay::tail::TailAnswer;

use super::{Done, Env, JobId, Process, Step};
use crate::history::Fact;
use crate::letters::event_of;
use crate::postgres::SideId;
use crate::world::Event;

/// Dead letters that are retried at a time.
pub const RETRY_ROWS: usize = 200;
/// How long a statement waits for a server that the network hides.
const UNANSWERED: Duration = Duration::from_secs(10);

/// What came of it.
#[derive(Clone, Debug)]
pub enum Told {
    Parked {
        epoch: u64,
        written: Written,
    },
    Known(Box<Parked>),
    Loaded(Vec<Stored>),
    Settled {
        epoch: u64,
        free: Vec<EventKey>,
    },
    Nothing,
    /// No answer, or an error.
    Failed(Statement),
}

impl Process {
    pub(super) fn take_reports_apart(&mut self, env: &mut Env) {
        let now = env.ctx.now;
        let mut reports = Vec::new();
        self.apart.drain(&mut reports, &mut env.broker);
        if !reports.is_empty() {
            self.machine.on_trial_reports(&reports, now);
        }
        if self
            .apart
            .rebuild_turn(&mut env.broker, &mut env.ctx)
            .is_some()
        {
            env.ctx.reach("what is sent apart has a new producer");
            self.machine.on_trial_rebuilt(now);
        }
    }

    /// What the producer knows of partitions by now.
    pub(super) fn take_partitions(&mut self, env: &mut Env) {
        if !env.ctx.rng.permille(30) {
            return;
        }
        let known = env.broker.partitions();
        if known != self.partitions {
            let list: Vec<(String, i32)> = known.clone().into_iter().collect();
            self.partitions = known;
            self.machine.on_partitions(&list, env.ctx.now);
        }
    }

    pub(super) fn send_apart(&mut self, number: Ticket, record: &Record<'_>, env: &mut Env) {
        env.ctx.reach("an event was sent apart");
        self.apart
            .send(record, number, &mut env.broker, &mut env.ctx);
    }

    pub(super) fn say_about_letters(&mut self, op: Statement, env: &mut Env) {
        match self.link {
            Some(link) => {
                self.spawn(Step::Letters { link, op }, env);
            }
            None => self.inbox.push_back(Done::Letters(Told::Failed(op))),
        }
    }

    /// The server takes the statement, or not.
    pub(super) fn letters(&mut self, job: JobId, link: SideId, op: Statement, env: &mut Env) {
        let name = match &op {
            Statement::Park { .. } => "park commits",
            Statement::Settle { .. } => "settle commits",
            _ => "",
        };
        if self.is_doomed_at(name, false, env) {
            return;
        }
        let told = match env.pg.statement(link, env.ctx.now) {
            Some(true) if env.ctx.rng.permille(env.pg.write_fails) => {
                env.ctx.reach("a statement failed");
                Told::Failed(op)
            }
            Some(true) => self.say_to_table(op, env),
            Some(false) => Told::Failed(op),
            None => {
                let step = Step::LettersTold {
                    link,
                    op: None,
                    told: Told::Failed(op),
                };
                env.ctx.after(UNANSWERED, Event::Job(self.id, job, step));
                return;
            }
        };
        if self.is_doomed_at(name, true, env) {
            return;
        }
        let step = Step::LettersTold {
            link,
            op: match &told {
                Told::Failed(op) => Some(op.clone()),
                _ => self.said.take(),
            },
            told,
        };
        self.go_on(job, step, env);
    }

    fn say_to_table(&mut self, op: Statement, env: &mut Env) -> Told {
        let confirmed = env.pg.confirmed();
        let flushed = match op {
            Statement::Park { .. } | Statement::Settle { .. } => env.pg.commit_statement(),
            _ => env.pg.wal_end(),
        };
        let letters = &mut env.pg.registry().letters;
        let mut table = std::mem::take(letters);
        let ctx = &mut env.ctx;
        self.said = Some(op.clone());
        let told = match op {
            Statement::Park { epoch, letters } => {
                table.park(&letters, ctx);
                let last_id = table.last_id();
                Told::Parked {
                    epoch,
                    written: Written { flushed, last_id },
                }
            }
            Statement::Look => Told::Known(Box::new(table.load(super::GENERATION, confirmed))),
            Statement::LoadRetry { passed } => {
                let due = table.next_retry(super::GENERATION, passed, RETRY_ROWS);
                ctx.fact(Fact::RetryLoaded {
                    proc: self.id,
                    events: due.iter().map(|stored| event_of(&stored.letter)).collect(),
                });
                Told::Loaded(due)
            }
            Statement::Settle { epoch, settlement } => {
                let free = table.settle(&settlement, ctx);
                Told::Settled { epoch, free }
            }
            Statement::Trip(tripped) => {
                ctx.reach("a topic was tripped");
                table.trip(&tripped);
                Told::Nothing
            }
            Statement::Untrip(topic) => {
                table.untrip(&topic);
                Told::Nothing
            }
        };
        env.pg.registry().letters = table;
        told
    }

    /// Its answer is on the way, and gets lost where the session has ended meanwhile.
    pub(super) fn letters_told(
        &mut self,
        job: JobId,
        link: SideId,
        op: Option<Statement>,
        told: Told,
        env: &mut Env,
    ) {
        let told = match (env.pg.statement(link, env.ctx.now), op) {
            (Some(true), _) | (_, None) => told,
            (Some(false) | None, Some(op)) => {
                if !matches!(told, Told::Failed(_)) {
                    env.ctx.reach("committed, and the answer was lost");
                }
                Told::Failed(op)
            }
        };
        self.answer(job, Done::Letters(told), env);
    }

    pub(super) fn on_letters(&mut self, told: Told, now: Duration) {
        let machine = &mut self.machine;
        match told {
            Told::Parked { epoch, written } => machine.on_parked(epoch, written, now),
            Told::Known(parked) => machine.on_parked_known(*parked, now),
            Told::Loaded(letters) => machine.on_retry_loaded(letters, now),
            Told::Settled { epoch, free } => machine.on_settled(epoch, &free, now),
            Told::Nothing => {}
            Told::Failed(Statement::Park { epoch, letters }) => {
                machine.on_not_parked(epoch, letters, ill(), now);
            }
            Told::Failed(Statement::Look) => machine.on_parked_unknown(now),
            Told::Failed(Statement::LoadRetry { .. }) => machine.on_retry_not_loaded(now),
            Told::Failed(Statement::Settle { epoch, .. }) => {
                machine.on_not_settled(epoch, ill(), now);
            }
            Told::Failed(Statement::Trip(_) | Statement::Untrip(_)) => {}
        }
    }

    pub(super) fn ask_tail(
        &mut self,
        job: JobId,
        topic: String,
        since: PgTimestamp,
        env: &mut Env,
    ) {
        let at = env.ctx.now + env.broker.settling;
        let step = Step::ReadTail { topic, since };
        env.ctx.at(at, Event::Job(self.id, job, step));
    }

    pub(super) fn read_tail(
        &mut self,
        job: JobId,
        topic: String,
        since: PgTimestamp,
        env: &mut Env,
    ) {
        let (answer, events) = env.broker.tail(&topic, since, &mut env.ctx);
        env.ctx.reach(match &answer {
            TailAnswer::Read { complete: true, .. } => "a tail was read",
            TailAnswer::Read {
                complete: false, ..
            } => "a tail was longer than is read",
            TailAnswer::Denied => "a tail may not be read",
            TailAnswer::Failed(_) => "a tail could not be read",
        });
        env.ctx.fact(Fact::TailRead {
            topic: topic.clone(),
            events,
            is_failed: matches!(answer, TailAnswer::Failed(_)),
        });
        self.answer(job, Done::Tail { topic, answer }, env);
    }
}

pub fn heard(is_late: bool) -> Heard {
    if is_late { Heard::NotAll } else { Heard::All }
}

fn ill() -> Ill {
    Ill {
        what: "no answer".to_owned(),
        remedy: "wait".to_owned(),
    }
}
