//! The second producer, of what is sent apart, and the orders about dead letters.

use std::sync::Arc;

use super::jobs::Done;
use super::{Service, letters};
use crate::fault;
use crate::io::kafka::Publisher;
use crate::record::{KafkaCode, Record, Report, Ticket};
use crate::relay::Moment;
use crate::relay::orders::{Ill, Order};

/// Its producer could not be made: as if it had been taken back.
const DESTROYED: KafkaCode = KafkaCode(-197);

pub async fn woken(apart: &Option<Publisher>) {
    match apart {
        Some(publisher) => publisher.woken().await,
        None => std::future::pending().await,
    }
}

impl Service {
    pub(super) fn take_reports_apart(&mut self, now: Moment) {
        let Some(apart) = &mut self.apart else {
            return;
        };
        let mut reports = Vec::new();
        apart.drain(&mut reports);
        if !reports.is_empty() {
            self.vitals.refused(&reports);
            self.machine.on_trial_reports(&reports, now);
        }
        if let Some(apart) = &mut self.apart
            && apart.rebuild_turn(now).is_some()
        {
            self.machine.on_trial_rebuilt(now);
        }
        if let Some(apart) = &mut self.apart {
            for notice in apart.client_notices() {
                tracing::debug!(code = notice.code.0, "kafka, apart: {}", notice.text);
            }
        }
    }

    pub(super) fn send_apart(&mut self, number: Ticket, record: &Record<'_>, now: Moment) {
        let _ = fault::sending(usize::MAX, || record.event_id());
        if self.apart.is_none() {
            match Publisher::apart(&self.surroundings.kafka) {
                Ok(publisher) => self.apart = Some(publisher),
                Err(failure) => {
                    tracing::error!("{}; will be tried again", failure.one_line());
                    let report = Report {
                        ticket: number,
                        result: Err(DESTROYED),
                    };
                    self.machine.on_trial_reports(&[report], now);
                    return;
                }
            }
        }
        if let Some(apart) = &mut self.apart {
            apart.send(record, number);
        }
    }

    pub(super) fn rebuild_apart(&mut self, now: Moment) {
        match &mut self.apart {
            Some(apart) => apart.forget_all(),
            None => self.machine.on_trial_rebuilt(now),
        }
    }

    pub(super) fn obey_about_letters(&mut self, order: Order) {
        let around = Arc::clone(&self.surroundings);
        let link = self.link.clone();
        match (order, link) {
            (Order::ReadTail { topic, since }, _) => {
                self.spawn(letters::read_tail(around, topic, since));
            }
            (Order::Park { epoch, letters }, Some(link)) => {
                self.spawn(letters::park(around, link, epoch, letters));
            }
            (Order::LookAtParked, Some(link)) => {
                self.spawn(letters::look(around, link));
            }
            (Order::LoadRetry { passed }, Some(link)) => {
                self.spawn(letters::load_retry(link, passed));
            }
            (Order::Settle { epoch, settlement }, Some(link)) => {
                self.spawn(letters::settle(around, link, epoch, settlement));
            }
            (Order::Trip(tripped), Some(link)) => {
                self.spawn(letters::trip(link, tripped));
            }
            (Order::Untrip(topic), Some(link)) => {
                self.spawn(letters::untrip(link, topic));
            }
            (order, _) => {
                let _ = self.tell.send(without_link(order));
            }
        }
    }

    pub(super) fn on_letters(&mut self, done: Done, now: Moment) {
        match done {
            Done::Parked { epoch, flushed } => self.machine.on_parked(epoch, flushed, now),
            Done::NotParked {
                epoch,
                letters,
                why,
            } => self.machine.on_not_parked(epoch, letters, why, now),
            Done::ParkedKnown(parked) => self.machine.on_parked_known(*parked, now),
            Done::ParkedUnknown => self.machine.on_parked_unknown(now),
            Done::RetryLoaded(letters) => self.machine.on_retry_loaded(letters, now),
            Done::RetryNotLoaded => self.machine.on_retry_not_loaded(now),
            Done::Settled { epoch, free } => self.machine.on_settled(epoch, &free, now),
            Done::NotSettled { epoch, why } => self.machine.on_not_settled(epoch, why, now),
            Done::Tail { topic, answer } => self.machine.on_tail(&topic, answer, now),
            _ => {}
        }
    }
}

/// There is no session to do it on: it is ordered again once there is.
fn without_link(order: Order) -> Done {
    let why = Ill {
        what: "there is no database session".to_owned(),
        remedy: "nothing to do: they are written as soon as there is one".to_owned(),
    };
    match order {
        Order::Park { epoch, letters } => Done::NotParked {
            epoch,
            letters,
            why,
        },
        Order::LookAtParked => Done::ParkedUnknown,
        Order::LoadRetry { .. } => Done::RetryNotLoaded,
        Order::Settle { epoch, .. } => Done::NotSettled { epoch, why },
        _ => Done::Nothing,
    }
}
