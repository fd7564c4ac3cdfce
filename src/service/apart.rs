//! The second producer, of what is sent apart, and the statements about dead letters.

use std::sync::Arc;

use super::jobs::Done;
use super::letters::Answer;
use super::{Service, letters};
use crate::fault;
use crate::io::kafka::Publisher;
use crate::record::{KafkaCode, Record, Report, Ticket};
use crate::relay::Moment;
use crate::relay::orders::{Ill, Statement};

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

    pub(super) fn say_about_letters(&self, statement: Statement) {
        let Some(link) = self.link.clone() else {
            let _ = self.tell.send(Done::Letters(without_link(statement)));
            return;
        };
        let around = Arc::clone(&self.surroundings);
        self.spawn(async move { Done::Letters(letters::say(around, link, statement).await) });
    }

    pub(super) fn on_letters(&mut self, answer: Answer, now: Moment) {
        match answer {
            Answer::Parked { epoch, written } => self.machine.on_parked(epoch, written, now),
            Answer::NotParked {
                epoch,
                letters,
                why,
            } => self.machine.on_not_parked(epoch, letters, why, now),
            Answer::Known(parked) => self.machine.on_parked_known(*parked, now),
            Answer::Unknown => self.machine.on_parked_unknown(now),
            Answer::RetryLoaded(letters) => self.machine.on_retry_loaded(letters, now),
            Answer::RetryNotLoaded => self.machine.on_retry_not_loaded(now),
            Answer::Settled { epoch, free } => self.machine.on_settled(epoch, &free, now),
            Answer::NotSettled { epoch, why } => self.machine.on_not_settled(epoch, why, now),
            Answer::Nothing => {}
        }
    }
}

/// There is no session to do it on: it is ordered again once there is.
fn without_link(statement: Statement) -> Answer {
    let why = Ill {
        what: "there is no database session".to_owned(),
        remedy: "nothing to do: they are written as soon as there is one".to_owned(),
    };
    match statement {
        Statement::Park { epoch, letters } => Answer::NotParked {
            epoch,
            letters,
            why,
        },
        Statement::Look => Answer::Unknown,
        Statement::LoadRetry { .. } => Answer::RetryNotLoaded,
        Statement::Settle { epoch, .. } => Answer::NotSettled { epoch, why },
        Statement::Trip(_) | Statement::Untrip(_) => Answer::Nothing,
    }
}
