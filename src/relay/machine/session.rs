//! The replication session: opened, recognised, ended.

use super::{
    Close, Exit, Failure, Feedback, Lead, Lsn, Machine, Moment, Notice, OpenError, Opened, Order,
    OtherHistory, Producer, Purge, Reopen, Stream, StreamEnd,
};
use crate::gap::{Cause, Gap};

impl Machine {
    pub fn on_opened(&mut self, opened: &Opened, now: Moment) {
        if self.stream != Stream::Opening {
            return;
        }
        self.stream = Stream::Open;
        self.closed_because = None;
        if let Some(generation) = opened.heals {
            self.on_heal_opened(opened, generation, now);
            return;
        }
        // Before anything else: no position of an earlier session may be reported in this one.
        self.ledger.session_started(opened.confirmed_flush);
        self.confirmed = opened.confirmed_flush;
        // A slot that was set back sends again what another leader had delivered: we have taken
        // nothing by which it could be recognised.
        let is_set_back = self.highest_reported > Some(opened.confirmed_flush);
        let has_nothing = self.ledger.w().is_none() && self.ledger.span() == 0;
        if is_set_back && has_nothing && !self.tails.is_on() {
            self.start_tails();
        }
        self.tails.opened(opened.xlogpos);
        self.feedback = Feedback::new(now);
        self.shape = None;
        self.unfit_from = opened.unfit.clone().map(|why| (opened.xlogpos, why));
        self.current_lsn = Lsn::INVALID;
        self.in_transaction = false;
        self.progress_at = now;
        let identity = (opened.system_identifier.clone(), opened.timeline);
        let is_other = self
            .identity
            .as_ref()
            .is_some_and(|known| *known != identity);
        if is_other || opened.xlogpos < self.received_before {
            let what = format!(
                "system {} timeline {} at {}, after {} was received",
                opened.system_identifier, opened.timeline, opened.xlogpos, self.received_before
            );
            self.identity = Some(identity);
            self.other_history(what, now);
            self.advance(now);
            return;
        }
        self.identity = Some(identity);
        self.is_server_known = true;
        if let Some(highest) = self.highest_reported
            && opened.confirmed_flush > highest
        {
            let cause = Cause::SlotMoved {
                confirmed: opened.confirmed_flush,
                reported: highest,
            };
            let missing = None;
            self.on_gap(Gap { cause, missing }, now);
            self.advance(now);
            return;
        }
        self.highest_reported = self.highest_reported.max(Some(opened.confirmed_flush));
        self.say(Notice::Streaming {
            from: opened.confirmed_flush,
            again: self.ledger.span(),
        });
        self.advance(now);
    }

    pub fn on_open_failed(&mut self, error: OpenError, now: Moment) {
        if self.stream != Stream::Opening {
            return;
        }
        let pause = self.next_reconnect();
        self.stream = Stream::Closed(Reopen::At(now + pause));
        match error {
            OpenError::Later(why) => {
                self.closed_because = Some(why.clone());
                self.remind(Notice::StreamEnded(why), now);
            }
            // As for the side session: what was right before (a password, a line of pg_hba.conf) may
            // be put right again, and the slot waits.
            OpenError::Never(failure)
                if self.identity.is_some() && failure.exit == Exit::Refused =>
            {
                self.closed_because = Some(failure.one_line());
                self.remind(Notice::StreamEnded(failure.one_line()), now);
            }
            OpenError::Never(failure) => self.fail(failure, None, now),
            OpenError::Gap(gap) => self.on_gap(gap, now),
        }
        self.advance(now);
    }

    pub fn on_stream_end(&mut self, end: StreamEnd, now: Moment) {
        let pause = self.next_reconnect();
        match self.stream {
            Stream::Closing(reopen) => self.stream = Stream::Closed(reopen),
            Stream::Open | Stream::Opening => {
                self.stream = Stream::Closed(Reopen::At(now + pause));
                match end {
                    StreamEnd::Lost(why) => {
                        self.closed_because = Some(why.clone());
                        self.say(Notice::StreamEnded(why));
                    }
                    StreamEnd::Never(failure) => self.fail(failure, None, now),
                    StreamEnd::Gap(gap) => self.on_gap(gap, now),
                }
            }
            Stream::Closed(_) => {}
        }
        self.advance(now);
    }

    /// A warning that means that rows are being skipped: nothing more may be flushed.
    pub fn on_rows_skipped(&mut self, gap: Gap, now: Moment) {
        self.on_gap(gap, now);
        self.advance(now);
    }

    /// A row above every limit stands in the stream. What came before it is delivered and told
    /// first: the connection still carries that, once the row is passed over.
    pub fn on_huge_row(&mut self, failure: Failure, now: Moment) {
        self.fail(failure, None, now);
        self.advance(now);
    }

    /// The commit position of the transaction that is being read, or was read last.
    #[must_use]
    pub fn transaction_lsn(&self) -> Lsn {
        self.current_lsn
    }

    pub(in crate::relay) fn close(&mut self, how: Close, reopen: Reopen) {
        match self.stream {
            Stream::Open => {
                self.orders.push_back(Order::Close(how));
                self.stream = Stream::Closing(reopen);
            }
            Stream::Opening => {
                self.orders.push_back(Order::Close(Close::Abort));
                self.stream = Stream::Closing(reopen);
            }
            Stream::Closing(_) => self.stream = Stream::Closing(reopen),
            Stream::Closed(_) => self.stream = Stream::Closed(reopen),
        }
    }

    pub(super) fn pump_stream(&mut self, now: Moment) {
        if let Producer::Resting { until } = self.producer
            && now >= until
        {
            self.producer = Producer::Ready;
        }
        let may_open =
            self.lead == Lead::Held && self.producer == Producer::Ready && self.ending.is_none();
        if let Stream::Closed(Reopen::At(at)) = self.stream
            && may_open
            && now >= at
        {
            self.stream = Stream::Opening;
            // What is parked while it is being opened may lie behind what it is told then.
            self.received_before = self.received_ever;
            self.orders.push_back(Order::Open);
        }
    }

    pub(in crate::relay) fn other_history(&mut self, what: String, now: Moment) {
        self.is_server_known = false;
        self.say(Notice::OtherHistory(what));
        self.resume = None;
        self.rebuild(Purge::Everything, true);
        self.close(Close::Abort, Reopen::At(now));
    }

    pub(in crate::relay) fn on_ledger_error(&mut self, error: &OtherHistory, now: Moment) {
        self.other_history(error.to_string(), now);
    }
}
