//! After a crash: which events of the stream are in their topics already. The ends of the topics
//! are read, each at its first use, and what is found there is passed over.
//!
//! ```text
//!   off ── a start without a complete stop, or a producer that was not heard out ──▶ on
//!    ▲                                                                              │ a topic's first
//!    │                                                          Unread ◀────────────┘ event: ask
//!    │                                                            │ answer
//!    └── everything that may have been sent before has come by ── Read
//! ```

use std::collections::HashMap;
use std::time::Duration;

use super::Moment;
use crate::lsn::{Lsn, PgTimestamp};
use crate::tail::{Tail, TailAnswer};

/// How soon an answer that failed is asked for again, and how often: a topic that can be written
/// and for this long not be read is then taken as one that may not be read.
const ASK_AGAIN: Duration = Duration::from_secs(1);
const ATTEMPTS_MAX: u32 = 15;

#[derive(Debug)]
enum State {
    Asked,
    AskAt(Moment),
    Read(Tail),
}

#[derive(Debug)]
struct Topic {
    state: State,
    attempts: u32,
    since: PgTimestamp,
}

/// What an answer means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TailNews {
    Known {
        events: usize,
        is_complete: bool,
    },
    /// There is no Read right: events may be repeated.
    Denied,
    /// It is asked again.
    NotYet(String),
    /// It is not asked again: events may be repeated.
    GivenUp(String),
}

#[derive(Debug, Default)]
pub struct Tails {
    is_on: bool,
    /// Nothing that commits at or above this was sent by a producer that is gone. `None` until the
    /// next session says how far the log is.
    until: Option<Lsn>,
    topics: HashMap<u16, Topic>,
}

impl Tails {
    /// Whatever comes now may have been sent before.
    pub fn start(&mut self) {
        *self = Tails {
            is_on: true,
            ..Tails::default()
        };
    }

    pub fn stop(&mut self) {
        *self = Tails::default();
    }

    /// A session stands: this is how far the server's log is flushed.
    pub fn opened(&mut self, xlogpos: Lsn) {
        if self.is_on && self.until.is_none() {
            self.until = Some(xlogpos);
        }
    }

    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    fn concerns(&self, commit_lsn: Lsn) -> bool {
        self.is_on && self.until.is_none_or(|until| commit_lsn <= until)
    }

    /// May an event of this topic and transaction be sent, for all that is to be known? Asks for
    /// the tail where it is not.
    pub fn is_ready(&mut self, topic: u16, commit_lsn: Lsn, commit_time: PgTimestamp) -> bool {
        if !self.concerns(commit_lsn) {
            return true;
        }
        let topic = self.topics.entry(topic).or_insert(Topic {
            state: State::AskAt(Moment::ZERO),
            attempts: 0,
            since: commit_time,
        });
        matches!(topic.state, State::Read(_))
    }

    /// As [`Tails::is_ready`], without asking.
    #[must_use]
    pub fn is_read(&self, topic: u16, commit_lsn: Lsn) -> bool {
        let known = self.topics.get(&topic);
        !self.concerns(commit_lsn)
            || known.is_some_and(|topic| matches!(topic.state, State::Read(_)))
    }

    /// Is the event in its topic?
    #[must_use]
    pub fn has(&self, topic: u16, commit_lsn: Lsn, event_id: &[u8]) -> bool {
        self.concerns(commit_lsn)
            && self
                .topics
                .get(&topic)
                .is_some_and(|topic| match &topic.state {
                    State::Read(tail) => tail.contains(event_id),
                    State::Asked | State::AskAt(_) => false,
                })
    }

    /// Topics whose end is to be read now, and since when; of those that are there.
    pub fn questions(
        &mut self,
        now: Moment,
        is_there: impl Fn(u16) -> bool,
    ) -> Vec<(u16, PgTimestamp)> {
        let mut due = Vec::new();
        for (id, topic) in &mut self.topics {
            if let State::AskAt(at) = topic.state
                && now >= at
                && is_there(*id)
            {
                topic.state = State::Asked;
                topic.attempts += 1;
                due.push((*id, topic.since));
            }
        }
        due.sort_unstable();
        due
    }

    #[must_use]
    pub fn next_question_at(&self) -> Option<Moment> {
        let at = self.topics.values().filter_map(|topic| match topic.state {
            State::AskAt(at) => Some(at),
            State::Asked | State::Read(_) => None,
        });
        at.min()
    }

    /// `None`: it was not asked, or is not wanted any more.
    pub fn answer(&mut self, topic: u16, answer: TailAnswer, now: Moment) -> Option<TailNews> {
        let topic = self.topics.get_mut(&topic)?;
        if !matches!(topic.state, State::Asked) {
            return None;
        }
        Some(match answer {
            TailAnswer::Read { tail, complete } => {
                let events = tail.len();
                topic.state = State::Read(tail);
                TailNews::Known {
                    events,
                    is_complete: complete,
                }
            }
            TailAnswer::Denied => {
                topic.state = State::Read(Tail::default());
                TailNews::Denied
            }
            TailAnswer::Failed(why) if topic.attempts < ATTEMPTS_MAX => {
                topic.state = State::AskAt(now + ASK_AGAIN);
                TailNews::NotYet(why)
            }
            TailAnswer::Failed(why) => {
                topic.state = State::Read(Tail::default());
                TailNews::GivenUp(why)
            }
        })
    }

    /// Everything below this is flushed. Returns whether the tails were given up with it.
    pub fn flushed(&mut self, flush: Lsn) -> bool {
        let is_past = self.is_on && self.until.is_some_and(|until| flush >= until);
        if is_past {
            self.stop();
        }
        is_past
    }
}
