//! Leadership: the lock, who led before, the proof of each second.

use std::time::Duration;

use super::{
    Close, Exit, Ill, Lead, Leadership, Led, Ledger, Machine, Moment, Notice, Order,
    PROBE_INTERVAL, Probed, Purge, RECONNECT_MAX, Reopen, SEEK_INTERVAL, SERVER_SHUTDOWN_DRAIN,
    Seek, Stream, Why,
};

impl Machine {
    pub fn on_seek(&mut self, seek: Seek, now: Moment) {
        match seek {
            Seek::Led(led) => self.take_lead(led, now),
            Seek::Elsewhere(why) => {
                self.leadership = Leadership::Elsewhere(why.clone());
                if self.standby_said.as_ref() != Some(&why) {
                    self.standby_said = Some(why.clone());
                    self.say(Notice::Standby(why));
                }
                self.wait_for_lead(SEEK_INTERVAL, now);
            }
            Seek::Later(why) => {
                self.leadership = Leadership::NoDatabase(no_database(&why));
                self.remind(Notice::NoDatabase(why), now);
                let pause = self.next_reconnect();
                self.wait_for_lead(pause, now);
            }
            // What was right at the start and is not now may be put right again: the database
            // waits in its slot, nothing is lost by asking again.
            Seek::Refused(failure) if self.has_led && failure.exit == Exit::Refused => {
                self.leadership = Leadership::NoDatabase(Ill::of(&failure));
                self.remind(Notice::NoDatabase(failure.one_line()), now);
                let pause = self.next_reconnect();
                self.wait_for_lead(pause, now);
            }
            Seek::Refused(failure) => self.orders.push_back(Order::Exit(Err(failure))),
        }
        self.advance(now);
    }

    pub(super) fn wait_for_lead(&mut self, pause: Duration, now: Moment) {
        self.lead = Lead::Waiting { until: now + pause };
    }

    pub(super) fn next_reconnect(&mut self) -> Duration {
        let pause = self.reconnect;
        self.reconnect = (self.reconnect * 2).min(RECONNECT_MAX);
        pause
    }

    pub(super) fn take_lead(&mut self, led: Led, now: Moment) {
        self.lead = Lead::Held;
        self.leadership = Leadership::Leading;
        self.refused = None;
        self.standby_said = None;
        self.reminders.clear();
        self.probe_sent_at = None;
        self.probe_at = now + PROBE_INTERVAL;
        self.table_oid = led.table_oid;
        let was_ours = led.term.is_some() && led.term == self.term;
        self.term = led.term;
        let is_same_slot = led.generation == self.generation;
        if self.has_led && !(was_ours && is_same_slot) {
            // Somebody else may have led in between: what we know may be what he has sent.
            self.rebuild(Purge::Everything, true);
            self.resume.clone_from(&led.stop);
        }
        if !self.has_led {
            // Where nobody ever led, nothing was ever sent; who may not write leaves no name.
            let is_first = led.is_writable && led.previous_leader.is_none();
            if !is_first && !led.stop.as_ref().is_some_and(|stop| stop.complete) {
                self.start_tails();
            }
            if let Some(stop) = &led.stop {
                self.ledger = Ledger::resumed(stop.last, stop.open.clone());
            }
        }
        if !(self.has_led && was_ours) {
            // Whoever led in between may have halted.
            self.halted = led.halted;
        }
        if !(self.has_led && was_ours && is_same_slot) {
            self.highest_reported = match (&led.stop, &led.previous_leader) {
                (Some(stop), _) => Some(stop.reported),
                // Who may not write leaves no name: this role may have moved the slot before.
                (None, None) if led.is_writable => led.consistent_point,
                (None, Some(_) | None) => None,
            };
        }
        // Of a restored copy it may be one that was erased long ago in the database that is gone.
        self.stored_stop = led.stop.map(|stop| stop.reported);
        self.has_led = true;
        self.generation = led.generation;
        self.is_looking = false;
        self.is_server_known = false;
        self.learn_parked(led.parked, now);
        self.is_writable = led.is_writable;
        self.is_provable = led.is_provable;
        self.say(Notice::Leading);
        if matches!(self.stream, Stream::Closed(Reopen::At(_))) {
            self.stream = Stream::Closed(Reopen::At(now));
        }
    }

    pub(super) fn lose_lead(&mut self, why: &str, now: Moment) {
        if self.lead != Lead::Held {
            return;
        }
        self.say(Notice::LeadLost(why.to_owned()));
        self.leadership = Leadership::NoDatabase(no_database(why));
        self.lead = Lead::Waiting { until: now };
        self.probe_sent_at = None;
        self.is_erasing = false;
        // A stream that was closed because Kafka is away stays closed until it answers.
        let reopen = if self.is_stalled {
            Reopen::WhenKafkaAnswers
        } else {
            Reopen::At(now)
        };
        self.close(Close::Abort, reopen);
    }

    /// The side session is gone, with the SQLSTATE that the server gave, if any.
    pub fn on_side_end(&mut self, sqlstate: &str, why: &str, now: Moment) {
        if self.lead != Lead::Held {
            return;
        }
        let is_storing = self.ending.as_ref().is_some_and(|e| e.is_storing);
        if is_storing {
            // What was to be stored cannot be: the next start is one after a crash.
            self.exit();
        } else if sqlstate == "57P01" && self.stream == Stream::Open && self.ending.is_none() {
            self.end(
                Why::ServerStops,
                format!("the database server ends this session ({why})"),
                SERVER_SHUTDOWN_DRAIN,
                now,
            );
        } else if self.ending.is_none() {
            self.lose_lead(why, now);
        }
        self.advance(now);
    }

    /// `stream_open` says whether the replication session is the one that was asked about.
    pub fn on_probe(&mut self, probed: &Probed, now: Moment) {
        if probed.has_lock && probed.touched != self.touched {
            self.is_touched = true;
        }
        self.probe_sent_at = None;
        self.probe_at = now + PROBE_INTERVAL;
        if !probed.has_lock {
            self.lose_lead("the side session has lost the lock", now);
        } else if !probed.has_slot && self.stream == Stream::Open {
            self.lose_lead("the slot is not held by our walsender", now);
        }
        self.advance(now);
    }

    pub(super) fn pump_lead(&mut self, now: Moment) {
        match self.lead {
            Lead::Waiting { until } if now >= until && self.ending.is_none() => {
                self.lead = Lead::Seeking;
                // Whoever takes the lead looks at what is parked.
                self.look_begins();
                self.orders.push_back(Order::SeekLead);
            }
            Lead::Held => {
                let silent = self
                    .probe_sent_at
                    .is_some_and(|at| now >= at + self.settings.wal_sender_timeout / 2);
                if silent {
                    self.lose_lead("the side session does not answer", now);
                } else if self.probe_sent_at.is_none() && now >= self.probe_at {
                    self.probe_sent_at = Some(now);
                    self.orders.push_back(Order::Probe);
                }
            }
            Lead::Waiting { .. } | Lead::Seeking => {}
        }
    }
}

fn no_database(why: &str) -> Ill {
    Ill {
        what: format!("no database session: {why}"),
        remedy: "it is tried again by itself, every 2 s at most: look whether the server runs, accepts connections from here and has not failed over".to_owned(),
    }
}
