//! How things stand: what the machine knows of why it does not go on.

use std::time::Duration;

use super::{Ill, Leadership, Machine, Moment, Reopen, Stream, Why};
use crate::relay::orders::{Absent, Closed, Standing};

/// Topics that are named; so many that are absent have one cause.
const TOPICS_NAMED_MAX: usize = 20;

impl Machine {
    #[must_use]
    pub fn standing(&self, now: Moment) -> Standing {
        Standing {
            is_leading: self.leadership == Leadership::Leading,
            is_streaming: self.stream == Stream::Open,
            load: self.ledger.load(),
            span: self.ledger.span(),
            received: self.feedback.received_lsn(),
            flush: self.highest_reported.unwrap_or_default(),
            oldest_undelivered: self.ledger.oldest_undelivered(),
            delivered: self.ledger.w(),
            leadership: self.leadership.clone(),
            closed: self.closed(),
            ending: self.ending.as_ref().map(|ending| Self::ill(&ending.why)),
            stuck_event: self.stuck_event(),
            refused: self.refused.clone(),
            silent: self.silent(now),
            parked_keys: self.parked.count(),
            retried_keys: self.parked.retried(),
            not_parked: self.parking.trouble.clone(),
            tripped: self.breaker.tripped().cloned().collect(),
            is_full: !self.held.is_empty() && self.ledger.span() >= self.span_events_max(),
        }
    }

    /// Topics without which events wait. Walks what is held: not for every turn.
    #[must_use]
    pub fn absent_topics(&self) -> Vec<Absent> {
        self.held.waits_for(&self.topics, TOPICS_NAMED_MAX)
    }

    fn closed(&self) -> Option<Closed> {
        match self.stream {
            Stream::Open => None,
            Stream::Closed(Reopen::WhenKafkaAnswers)
            | Stream::Closing(Reopen::WhenKafkaAnswers) => Some(Closed::UntilKafkaAnswers),
            Stream::Opening | Stream::Closed(Reopen::At(_)) | Stream::Closing(Reopen::At(_)) => {
                Some(match &self.closed_because {
                    Some(why) => Closed::Because(why.clone()),
                    None => Closed::Opening,
                })
            }
        }
    }

    fn ill(why: &Why) -> Ill {
        let ill = |what: &str, remedy: &str| Ill {
            what: what.to_owned(),
            remedy: remedy.to_owned(),
        };
        match why {
            Why::Asked => ill(
                "draining: asked to stop",
                "nothing to do: it ends once what it took is delivered",
            ),
            Why::ServerStops => ill(
                "draining: the database server shuts down",
                "nothing to do: it connects again when the server is back",
            ),
            Why::Failed(failure, _) => Ill::of(failure),
        }
    }

    fn stuck_event(&self) -> Option<Ill> {
        if let Some(poisoned) = &self.poisoned {
            return Some(Ill {
                what: format!(
                    "event {} (transaction at {}) cannot be published: {}",
                    poisoned.event_id, poisoned.lsn, poisoned.reason
                ),
                remedy: poisoned.remedy.clone(),
            });
        }
        let halted = self.halted.as_ref().filter(|_| self.gate.is_some())?;
        Some(Ill {
            what: format!(
                "event {}, at which the relay halted ({}), is tried alone; everything behind it waits",
                halted.event_id, halted.reason
            ),
            remedy: "nothing to do if it is delivered now; else the relay says why and halts again"
                .to_owned(),
        })
    }

    /// For how long the broker has been silent about what it was given or asked.
    fn silent(&self, now: Moment) -> Option<Duration> {
        let is_waiting = self.ledger.load().in_flight_events > 0
            || (!self.held.is_empty() && self.topics.is_unanswered());
        is_waiting.then(|| now.saturating_sub(self.progress_at))
    }
}
