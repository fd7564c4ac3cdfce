//! When a standby status update is due.
//!
//! # Invariants
//! - One at least every [`STATUS_INTERVAL`], within [`FLUSH_DELAY`] of a flush that moved, and at
//!   once only where the server asked: answering every keepalive makes both sides spin.
//! - `flush ≤ write`, and both only from this session.

use std::time::Duration;

use super::Moment;
use crate::lsn::Lsn;
use crate::wire::replication::{Reply, StatusUpdate};

/// The longest silence towards the server.
pub const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// How soon a moved flush is told.
pub const FLUSH_DELAY: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub struct Feedback {
    received: Lsn,
    told_flush: Lsn,
    last_status: Moment,
    /// Since when a moved flush has not been told.
    untold_since: Option<Moment>,
    reply_due: bool,
}

impl Feedback {
    /// A new session: nothing received, nothing told; the first status is due at once.
    #[must_use]
    pub fn new(now: Moment) -> Self {
        Feedback {
            last_status: now,
            reply_due: true,
            ..Feedback::default()
        }
    }

    pub fn received(&mut self, lsn: Lsn) {
        self.received = self.received.max(lsn);
    }

    #[must_use]
    pub fn received_lsn(&self) -> Lsn {
        self.received
    }

    pub fn reply_requested(&mut self) {
        self.reply_due = true;
    }

    pub fn flush_is(&mut self, flush: Lsn, now: Moment) {
        if flush > self.told_flush && self.untold_since.is_none() {
            self.untold_since = Some(now);
        }
    }

    /// When a status has to be sent, if nothing else happens.
    #[must_use]
    pub fn due_at(&self) -> Moment {
        if self.reply_due {
            return Moment::ZERO;
        }
        let by_interval = self.last_status + STATUS_INTERVAL;
        match self.untold_since {
            Some(since) => by_interval.min(since + FLUSH_DELAY),
            None => by_interval,
        }
    }

    /// The status to send now, if one is due.
    pub fn poll(&mut self, flush: Lsn, now: Moment) -> Option<StatusUpdate> {
        (now >= self.due_at()).then(|| self.status(flush, now))
    }

    /// A status whether due or not (the last one before the end).
    pub fn status(&mut self, flush: Lsn, now: Moment) -> StatusUpdate {
        assert!(
            flush <= self.received,
            "flush {flush} passes what was received ({})",
            self.received
        );
        self.told_flush = self.told_flush.max(flush);
        self.last_status = now;
        self.untold_since = None;
        self.reply_due = false;
        StatusUpdate {
            write: self.received,
            flush,
            reply: Reply::NotRequested,
        }
    }

    #[must_use]
    pub fn told_flush(&self) -> Lsn {
        self.told_flush
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keepalive_that_asks_is_answered_once() {
        let mut feedback = Feedback::new(Moment::ZERO);
        assert!(feedback.poll(Lsn(0), Moment::ZERO).is_some());
        assert!(feedback.poll(Lsn(0), Moment::ZERO).is_none());
        feedback.received(Lsn(7));
        assert!(feedback.poll(Lsn(0), Moment::ZERO).is_none());
        feedback.reply_requested();
        let status = feedback.poll(Lsn(0), Moment::ZERO).expect("asked for");
        assert_eq!((status.write, status.flush), (Lsn(7), Lsn(0)));
        assert!(feedback.poll(Lsn(0), Moment::ZERO).is_none());
    }

    #[test]
    fn a_moved_flush_is_told_within_a_tenth_of_a_second() {
        let mut feedback = Feedback::new(Moment::ZERO);
        feedback.received(Lsn(9));
        let _ = feedback.poll(Lsn(0), Moment::ZERO);
        feedback.flush_is(Lsn(9), Duration::from_millis(10));
        feedback.flush_is(Lsn(9), Duration::from_millis(90));
        assert_eq!(feedback.due_at(), Duration::from_millis(110));
        assert!(feedback.poll(Lsn(9), Duration::from_millis(110)).is_some());
        assert_eq!(feedback.due_at(), Duration::from_millis(1_110));
    }
}
