//! What a dead producer had delivered is not sent again: the topics' ends are asked.

use super::{Machine, Moment, Notice, Order, Ticket};
use crate::relay::mapping::Part;
use crate::relay::tails::TailNews;
use crate::relay::trial::Source;
use crate::tail::TailAnswer;

impl Machine {
    /// What comes now may be in its topic already.
    pub(super) fn start_tails(&mut self) {
        // A record's place in its topic's log follows its time; a column's says nothing of when it
        // was sent.
        if self.settings.mapping.columns.get(Part::Timestamp).is_some() {
            self.say(Notice::AtLeastOnce {
                why: "the records' time is a column's, their topics' ends cannot be searched by it"
                    .to_owned(),
            });
            self.tails.stop();
        } else {
            self.tails.start();
            self.ask_for_waiting();
        }
    }

    /// What waits here already is not read again: its topics are asked for now, or it would wait for
    /// an answer that nobody wants.
    fn ask_for_waiting(&mut self) {
        let tried = self.trial.waiting().chain(self.trial.out());
        let tried = tried.filter_map(|item| match &item.source {
            Source::Event(waiting) => Some(&**waiting),
            Source::Letter { .. } => None,
        });
        let mut waiting: Vec<_> = self
            .held
            .waiting()
            .chain(tried)
            .map(|waiting| {
                let origin = &waiting.origin;
                let at = origin.position.commit_lsn;
                (waiting.ticket, waiting.topic, at, origin.commit_time)
            })
            .collect();
        waiting.sort_unstable_by_key(|(ticket, ..)| *ticket);
        for (_, topic, at, time) in waiting {
            let _ = self.tails.is_ready(topic, at, time);
        }
    }

    pub(super) fn pump_tails(&mut self, now: Moment) {
        if !self.tails.is_on() {
            return;
        }
        let topics = &self.topics;
        let is_there = |topic| topics.partitions_anyway(topic).is_some();
        for (topic, since) in self.tails.questions(now, is_there) {
            let topic = self.topics.name(topic).to_owned();
            self.orders.push_back(Order::ReadTail { topic, since });
        }
        if self.tails.flushed(self.ledger.flush()) {
            self.release_due = true;
        }
    }

    /// The end of a topic, as it was asked for.
    pub fn on_tail(&mut self, topic: &str, answer: TailAnswer, now: Moment) {
        let Some(id) = self.topics.id(topic) else {
            return;
        };
        let topic = topic.to_owned();
        match self.tails.answer(id, answer, now) {
            None => {}
            Some(TailNews::Known {
                events,
                is_complete,
            }) => {
                self.release_due = true;
                if events > 0 {
                    self.say(Notice::TailRead {
                        topic,
                        events,
                        is_complete,
                    });
                }
            }
            Some(TailNews::Denied) => {
                self.release_due = true;
                self.say(Notice::AtLeastOnce {
                    why: format!("this principal may not read topic {topic} (grant Read on it)"),
                });
            }
            Some(TailNews::NotYet(why)) => self.remind(Notice::TailUnread { topic, why }, now),
            Some(TailNews::GivenUp(why)) => {
                self.release_due = true;
                self.say(Notice::AtLeastOnce {
                    why: format!("the end of topic {topic} could not be read ({why})"),
                });
            }
        }
        self.advance(now);
    }

    /// It was delivered by a producer that is gone.
    pub(in crate::relay) fn found_in_tail(&mut self, ticket: Ticket, now: Moment) {
        self.deliveries.passed_over += 1;
        self.pass_over(ticket, now);
    }

    /// An event that needs no sending: delivered, discarded or parked before.
    pub(in crate::relay) fn pass_over(&mut self, ticket: Ticket, now: Moment) {
        self.suspects.remove(&ticket);
        self.ledger.delivered(ticket);
        self.progress_at = now;
        self.passed_gate(ticket);
        self.ledger.settle();
    }
}
