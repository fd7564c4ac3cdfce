//! Rows that are in no stream: told, and by policy healed, given up or halted at.
//!
//! A heal is a session like any other: rows of the table come in the shape of a stream, one
//! transaction a row, numbered from one. It stands at the head of everything: the slot's own stream
//! is opened when all of it is delivered.

use super::{
    Close, Failure, Feedback, Lsn, Machine, Moment, Notice, Opened, Order, Purge, Reopen, Stream,
};
use crate::gap::{self, Cause, Gap, OnGap};

impl Machine {
    pub(super) fn on_gap(&mut self, gap: Gap, now: Moment) {
        // What the present session says from here on moves nothing.
        self.ledger.session_started(Lsn::INVALID);
        let policy = gap::policy(self.settings.on_gap, self.is_provable);
        if policy == OnGap::Halt || !self.is_writable {
            let failure = self.gap_failure(&gap);
            self.fail(failure, None, now);
            return;
        }
        self.say(Notice::Gap(gap.clone(), policy));
        self.is_server_known = false;
        self.resume = None;
        self.rebuild(Purge::Everything, true);
        self.orders.push_back(Order::BeginHeal(gap, policy));
        self.close(Close::Abort, Reopen::At(now));
    }

    fn gap_failure(&self, gap: &Gap) -> Failure {
        let keep = match &gap.cause {
            Cause::SlotLost(_) => {
                "raise max_slot_wal_keep_size (or idle_replication_slot_timeout), then "
            }
            Cause::SlotGone
            | Cause::SlotMoved { .. }
            | Cause::PublicationGone(_)
            | Cause::PublicationDiffers => "",
        };
        let ways = "run with --on-gap heal: a new slot is made, and what the stream does not carry is published once from the table; or with --on-gap skip: a new slot is made, and those rows are given up";
        let failure = Failure::halted(gap.cause.to_string(), format!("{keep}{ways}"));
        let failure = match &gap.missing {
            Some(missing) => failure.because(missing.to_string()),
            None => failure,
        };
        if !self.is_writable {
            return failure.because("this role may not write schema walrelay: it can heal nothing");
        }
        match self.settings.on_gap {
            Some(_) => failure.because("policy --on-gap halt"),
            None => failure.because(
                "whether anybody but walrelay deletes rows of this table, or when they were written (column xid), is not known: that a heal is complete cannot be proved",
            ),
        }
    }

    /// The rows of a gap are read from the table.
    pub(super) fn on_heal_opened(&mut self, opened: &Opened, generation: i64, now: Moment) {
        self.ledger.session_started(opened.confirmed_flush);
        self.confirmed = opened.confirmed_flush;
        self.generation = generation;
        // What was published after the checkpoint is in the topics' ends.
        if !self.is_healing && !self.tails.is_on() && self.ledger.span() == 0 {
            self.start_tails();
        }
        self.is_healing = true;
        self.tails.opened(Lsn(u64::MAX));
        self.feedback = Feedback::new(now);
        self.shape = None;
        self.unfit_from = None;
        self.current_lsn = Lsn::INVALID;
        self.in_transaction = false;
        self.progress_at = now;
        self.identity = Some((opened.system_identifier.clone(), opened.timeline));
        self.is_server_known = true;
        self.say(Notice::Healing(opened.confirmed_flush.0.saturating_sub(1)));
        self.advance(now);
    }

    /// All of it is delivered: the new slot's stream begins where the heal's snapshot ended.
    pub fn on_healed(&mut self, rows: u64, generation: i64, consistent_point: Lsn, now: Moment) {
        self.is_healing = false;
        self.stream = Stream::Closed(Reopen::At(now));
        self.ledger.forget();
        self.tails.stop();
        self.generation = generation;
        self.received_ever = Lsn::INVALID;
        self.received_before = Lsn::INVALID;
        self.highest_reported = Some(consistent_point);
        self.stored_stop = None;
        self.confirmed = Lsn::INVALID;
        self.say(Notice::Healed(rows));
        self.advance(now);
    }
}
