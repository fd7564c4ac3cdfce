//! Ends: asked for, forced by the server, by policy.

use std::time::Duration;

use super::{
    Close, Ending, Failure, Halted, Lead, Machine, Moment, Notice, Order, Poisoned, Producer,
    Reopen, STORE_WITHIN, Stop, Stream, Why,
};

/// How long an open transaction's commit is waited for at an end. A huge one is cut; the registry
/// then remembers how far it was taken.
const COMMIT_WAIT: Duration = Duration::from_secs(1);

impl Machine {
    /// SIGTERM or SIGINT.
    pub fn on_stop_asked(&mut self, now: Moment) {
        let is_ending = self
            .ending
            .as_ref()
            .is_some_and(|e| !matches!(e.why, Why::ServerStops));
        if !is_ending {
            let deadline = self.settings.shutdown_timeout;
            self.end(Why::Asked, "asked to stop".to_owned(), deadline, now);
        }
        self.advance(now);
    }

    pub(super) fn end(&mut self, why: Why, text: String, deadline: Duration, now: Moment) {
        // A server that shuts down is held up no longer because somebody ends the relay as well.
        let before = self.ending.as_ref().map(|ending| ending.deadline);
        let deadline = before.map_or(deadline, |at| at.saturating_sub(now).min(deadline));
        self.say(match why {
            Why::Failed(..) => Notice::Failing(text),
            Why::Asked | Why::ServerStops => Notice::Draining {
                why: text,
                deadline,
            },
        });
        let commit_by = match why {
            Why::Asked | Why::ServerStops => Some(now + deadline.min(COMMIT_WAIT)),
            // What stands behind the cause of a failure is not wanted.
            Why::Failed(..) => None,
        };
        self.ending = Some(Ending {
            why,
            deadline: now + deadline,
            commit_by,
            is_erase_refused: false,
            is_storing: false,
        });
    }

    /// Ends with this failure once what is on its way has arrived.
    pub(in crate::relay) fn fail(&mut self, failure: Failure, halted: Option<Halted>, now: Moment) {
        let is_failing = self
            .ending
            .as_ref()
            .is_some_and(|e| matches!(e.why, Why::Failed(..)));
        if !is_failing {
            let text = failure.causes.first().cloned().unwrap_or_default();
            let deadline = self.settings.shutdown_timeout;
            self.end(Why::Failed(failure, halted), text, deadline, now);
        }
    }

    pub(super) fn halt(&mut self, poisoned: &Poisoned, now: Moment) {
        let Poisoned {
            event_id,
            lsn,
            reason,
            remedy,
            ..
        } = poisoned;
        let event = if event_id.is_empty() {
            "an event without an event_id".to_owned()
        } else {
            format!("event {event_id}")
        };
        let failure = Failure::halted(
            format!("{event} (transaction at {lsn}) cannot be published: {reason}"),
            format!(
                "{remedy}; then start again: this event is tried alone, nothing behind it is sent before it is delivered"
            ),
        )
        .because("policy --on-poison halt: everything before it is delivered, and confirmed up to its transaction (what stands before it in there comes again)");
        let halted = Halted {
            event_id: event_id.clone(),
            reason: reason.clone(),
        };
        self.fail(failure, Some(halted), now);
    }

    pub(super) fn pump_end(&mut self, now: Moment) {
        if let Some(poisoned) = self.poisoned.clone()
            && self.ending.is_none()
            && self.ledger.delivered_below() >= poisoned.ticket
        {
            self.halt(&poisoned, now);
        }
        let awaits_commit = self.awaits_commit();
        // What waits for no more than its topic's answer is as good as on its way.
        let may_go = self.lead == Lead::Held && self.held.may_go(&self.topics);
        if self.ending.is_some() {
            self.wind_up_retry();
        }
        let is_set_aside = self.trial.is_empty() && self.parking.is_idle() && self.is_retry_over();
        let Some(ending) = &mut self.ending else {
            return;
        };
        if ending.commit_by.is_some_and(|at| now < at) && awaits_commit {
            return;
        }
        ending.commit_by = None;
        let is_drained = self.ledger.load().in_flight_events == 0
            && !may_go
            && is_set_aside
            && !matches!(self.producer, Producer::Rebuilding { .. });
        if ending.is_storing {
            if now >= ending.deadline {
                // Nobody answers: the next start is one after a crash.
                self.exit();
            }
            return;
        }
        if !(is_drained || now >= ending.deadline) {
            return;
        }
        match self.stream {
            Stream::Open => {
                if !self.awaits_erasing(now) {
                    self.last_status(now);
                    self.close(Close::Finish, Reopen::At(now));
                }
            }
            Stream::Opening => self.close(Close::Abort, Reopen::At(now)),
            Stream::Closing(_) => {}
            Stream::Closed(_) => self.ended(now),
        }
    }

    /// What is delivered may be reported only when the stored stop that it passes is erased: asks
    /// for that once more, and waits for the answer.
    fn awaits_erasing(&mut self, now: Moment) -> bool {
        self.flush();
        let is_erasing = self.is_erasing;
        self.ending
            .as_ref()
            .is_some_and(|e| is_erasing && now < e.deadline && !e.is_erase_refused)
    }

    /// The stream is closed and what could be delivered is.
    pub(super) fn ended(&mut self, now: Moment) {
        let why = self.ending.as_ref().map(|e| e.why.clone());
        match why {
            None => {}
            Some(Why::ServerStops) => {
                self.ending = None;
                self.lose_lead("the database server shut down", now);
                let pause = self.next_reconnect();
                self.wait_for_lead(pause, now);
            }
            Some(Why::Asked | Why::Failed(..))
                if self.lead != Lead::Held
                    || !self.is_writable
                    || self.highest_reported.is_none() =>
            {
                self.exit();
            }
            Some(why) => {
                if let Some(ending) = &mut self.ending {
                    ending.is_storing = true;
                    ending.deadline = now + STORE_WITHIN;
                }
                let halted = match why {
                    Why::Failed(_, halted) => halted,
                    Why::Asked | Why::ServerStops => None,
                };
                self.orders.push_back(Order::Store {
                    stop: self.stop(),
                    halted,
                });
            }
        }
    }

    pub(super) fn stop(&self) -> Stop {
        Stop {
            last: self.ledger.w(),
            reported: self.highest_reported.unwrap_or_default(),
            // What an earlier life had delivered and not confirmed may still come.
            complete: self.ledger.span() == 0 && !self.tails.is_on(),
            open: self.ledger.open_transaction(),
        }
    }

    /// The stop is in the registry, or could not be written.
    pub fn on_stored(&mut self) {
        self.exit();
    }

    /// A statement on the lock's session failed. Its end, or the next probe, says what is wrong.
    pub fn on_not_written(&mut self, now: Moment) {
        self.is_erasing = false;
        if let Some(ending) = &mut self.ending {
            ending.is_erase_refused = true;
            if ending.is_storing {
                self.exit();
            }
        }
        self.advance(now);
    }

    pub(super) fn exit(&mut self) {
        self.say(Notice::Stopped {
            flush: self.highest_reported.unwrap_or_default(),
            complete: self.ledger.span() == 0,
        });
        let result = match self.ending.take().map(|e| e.why) {
            Some(Why::Failed(failure, _)) => Err(failure),
            Some(Why::Asked | Why::ServerStops) | None => Ok(()),
        };
        self.orders.push_back(Order::Exit(result));
    }

    /// The registry holds no stop any more.
    pub fn on_stop_erased(&mut self, now: Moment) {
        self.stored_stop = None;
        self.is_erasing = false;
        self.advance(now);
    }
}
